"""Slow twin of ``T5ForConditionalGeneration``: own forward pass and explicit LRP / AttnLRP, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.reference import rules
from tests.reference.blocks import (
    ACTIVATIONS,
    Attention,
    Ledger,
    Linear,
    RMSNorm,
    attend,
    attention_relevance,
    check_recipe,
    gated_product_relevance,
    ids,
    merge_heads,
    parameter,
    seed,
    split_heads,
    visible_keys,
)

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

    from tests.reference.rules import Array


@dataclass(frozen=True)
class T5Explanation:
    """Relevance of every part of one prediction; S source tokens, T target tokens.

    ``sum(source_tokens) + sum(target_tokens) + sum(position_bias) + sum(softmax_residue) = value``
    (T5 has no other biases; ``biases`` is empty unless the model was given some).
    """

    logits: Array  # [T, V]
    value: float
    source_tokens: Array  # [S]
    target_tokens: Array  # [T]
    source_embeddings: Array  # [S, d]
    target_embeddings: Array  # [T, d]
    encoder_output: Array  # [S, d] after the encoder's final norm, summed over the cross-attentions
    encoder_layers: list[Array]  # [S, d] at the input of each encoder block
    decoder_layers: list[Array]  # [T, d] at the input of each decoder block
    encoder_heads: list[Array]  # [S, H dh] at the input of each self-attention output projection
    decoder_heads: list[Array]  # [T, H dh]
    cross_heads: list[Array]  # [T, H dh] at the input of each cross-attention output projection
    encoder_neurons: list[Array]  # [S, f] at the input of each feed-forward output projection
    decoder_neurons: list[Array]  # [T, f]
    position_bias: dict[str, Array]  # [H, queries, keys] share of the relative bias, by attention module name
    biases: dict[str, float]  # by parameter name
    softmax_residue: dict[str, float]  # by attention module name


def relative_bucket(distance: int, bidirectional: bool, buckets: int, longest: int) -> int:
    """Bucket of ``key position - query position``: exact when near, logarithmic when far, by direction."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    far = np.log(np.float32(distance) / np.float32(exact)) / math.log(longest / exact) * (buckets - exact)
    return offset + min(exact + int(far), buckets - 1)


def relative_bias(table: Array, length: int, bidirectional: bool, longest: int) -> Array:
    """``[H, T, T]`` of score biases from the learned table ``[buckets, H]``."""
    bias = np.zeros((table.shape[1], length, length))
    for query, key in np.ndindex(length, length):
        bias[:, query, key] = table[relative_bucket(key - query, bidirectional, table.shape[0], longest)]
    return bias


class _Attention:
    """``x + o(attention(norm(x), memory))``; the memory is ``norm(x)`` itself or the encoder's output."""

    def __init__(self, model: T5ForConditionalGeneration, layer: str, module: str) -> None:
        self.name = f"{layer}.{module}"
        self.q, self.k, self.v, self.o = (Linear.read(model, f"{self.name}.{p}") for p in "qkvo")
        self.norm = RMSNorm.read(model, f"{layer}.layer_norm", model.config.layer_norm_epsilon)
        self.heads = model.config.num_heads

    def forward(self, x: Array, memory: Array | None, visible: np.ndarray, bias: Array | None) -> Array:
        self.x, self.normed, self.cross = x, self.norm(x), memory is not None
        self.memory = self.normed if memory is None else memory
        q = split_heads(self.q(self.normed), self.heads)
        k, v = (split_heads(layer(self.memory), self.heads) for layer in (self.k, self.v))
        self.attention: Attention = attend(q, k, v, visible, 1.0, bias)
        self.attended = merge_heads(self.attention.output)
        self.out = self.o(self.attended)
        return x + self.out

    def relevance(
        self, relevance: Array, recipe: str, ledger: Ledger, position_bias: dict[str, Array]
    ) -> tuple[Array, Array, Array]:
        """Relevance at ``x``, at the memory (zeros for self-attention) and at the output projection."""
        r_x, r_out = rules.addition([self.x, self.out], relevance)
        r_heads = self.o.relevance(self.attended, r_out, ledger)
        r = attention_relevance(self.attention, split_heads(r_heads, self.heads), recipe)
        ledger.softmax_residue[self.name] = r.residue
        if self.attention.bias is not None:
            position_bias[self.name] = r.bias
        r_normed = self.q.relevance(self.normed, merge_heads(r.q), ledger)
        r_memory = self.k.relevance(self.memory, merge_heads(r.k), ledger)
        r_memory = r_memory + self.v.relevance(self.memory, merge_heads(r.v), ledger)
        if not self.cross:
            r_normed, r_memory = r_normed + r_memory, np.zeros_like(r_memory)
        return r_x + self.norm.relevance(self.x, r_normed), r_memory, r_heads


class _FeedForward:
    """``x + wo(act(wi(norm(x))))`` or, gated, ``x + wo(act(wi_0(norm(x))) wi_1(norm(x)))``."""

    def __init__(self, model: T5ForConditionalGeneration, layer: str) -> None:
        config = model.config
        self.gated = config.is_gated_act
        names = ("wi_0", "wi_1") if self.gated else ("wi",)
        self.into = [Linear.read(model, f"{layer}.DenseReluDense.{name}") for name in names]
        self.wo = Linear.read(model, f"{layer}.DenseReluDense.wo")
        self.norm = RMSNorm.read(model, f"{layer}.layer_norm", config.layer_norm_epsilon)
        self.act = ACTIVATIONS[config.dense_act_fn]

    def forward(self, x: Array) -> Array:
        self.x, self.normed = x, self.norm(x)
        self.before_act = self.into[0](self.normed)
        self.gate = self.act(self.before_act)
        self.up = self.into[1](self.normed) if self.gated else None
        self.hidden = self.gate if self.up is None else self.gate * self.up
        self.out = self.wo(self.hidden)
        return x + self.out

    def relevance(self, relevance: Array, recipe: str, ledger: Ledger) -> tuple[Array, Array]:
        """Relevance at ``x`` and at the output projection."""
        r_x, r_out = rules.addition([self.x, self.out], relevance)
        r_hidden = self.wo.relevance(self.hidden, r_out, ledger)
        r_gate, r_normed = r_hidden, np.zeros_like(self.normed)
        if self.up is not None:
            r_gate, r_up = gated_product_relevance(self.gate, self.up, r_hidden, recipe)
            r_normed = self.into[1].relevance(self.normed, r_up, ledger)
        r_before = rules.identity(self.before_act, r_gate)
        r_normed = r_normed + self.into[0].relevance(self.normed, r_before, ledger)
        return r_x + self.norm.relevance(self.x, r_normed), r_hidden


class _Stack:
    """The encoder or the decoder. The relative bias belongs to block 0 and serves every block."""

    def __init__(self, model: T5ForConditionalGeneration, name: str) -> None:
        config = model.config
        self.decoder = name == "decoder"
        count = config.num_decoder_layers if self.decoder else config.num_layers
        blocks = [f"{name}.block.{i}.layer" for i in range(count)]
        self.attentions = [_Attention(model, f"{b}.0", "SelfAttention") for b in blocks]
        self.crosses = [_Attention(model, f"{b}.1", "EncDecAttention") for b in blocks] if self.decoder else []
        self.mlps = [_FeedForward(model, f"{b}.{2 if self.decoder else 1}") for b in blocks]
        self.norm = RMSNorm.read(model, f"{name}.final_layer_norm", config.layer_norm_epsilon)
        self.table = parameter(model, f"{blocks[0]}.0.SelfAttention.relative_attention_bias.weight")
        self.longest = config.relative_attention_max_distance

    def forward(self, x: Array, key_mask: Any, memory: Array | None = None, memory_mask: Any = None) -> Array:
        length = len(x)
        visible = visible_keys(length, length, self.decoder, key_mask)
        bias = relative_bias(self.table, length, not self.decoder, self.longest)
        for i, mlp in enumerate(self.mlps):
            x = self.attentions[i].forward(x, None, visible, bias)
            if memory is not None:
                seen = visible_keys(length, len(memory), False, memory_mask)
                x = self.crosses[i].forward(x, memory, seen, None)
            x = mlp.forward(x)
        self.last = x
        return self.norm(x)

    def relevance(
        self, relevance: Array, recipe: str, ledger: Ledger, position_bias: dict[str, Array]
    ) -> dict[str, Any]:
        """Relevance at every block, head and neuron, and at the encoder's output (``memory``)."""
        found: dict[str, Any] = {"layers": [], "heads": [], "cross_heads": [], "neurons": [], "memory": 0.0}
        relevance = self.norm.relevance(self.last, relevance)
        for i in reversed(range(len(self.mlps))):
            relevance, r_neurons = self.mlps[i].relevance(relevance, recipe, ledger)
            if self.crosses:
                relevance, r_memory, r_cross = self.crosses[i].relevance(relevance, recipe, ledger, position_bias)
                found["memory"] = found["memory"] + r_memory
                found["cross_heads"].insert(0, r_cross)
            relevance, _, r_heads = self.attentions[i].relevance(relevance, recipe, ledger, position_bias)
            found["layers"].insert(0, relevance)
            found["heads"].insert(0, r_heads)
            found["neurons"].insert(0, r_neurons)
        found["input"] = relevance
        return found


def explain(
    model: T5ForConditionalGeneration,
    source_ids: Any,
    target_ids: Any,
    position: int,
    weights: Any,
    recipe: str,
    *,
    attention_mask: Any = None,
    decoder_attention_mask: Any = None,
) -> T5Explanation:
    """Explain ``logits[position] @ weights``; ``target_ids`` are the decoder's inputs as it reads them."""
    check_recipe(recipe)
    config = model.config
    table = parameter(model, "shared.weight")
    encoder, decoder = _Stack(model, "encoder"), _Stack(model, "decoder")
    head = Linear.read(model, "lm_head")

    source, target = table[ids(source_ids)], table[ids(target_ids)]
    memory = encoder.forward(source, attention_mask)
    hidden = decoder.forward(target, decoder_attention_mask, memory, attention_mask)
    scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
    scaled = hidden * scale
    logits = head(scaled)

    ledger, position_bias = Ledger(), {}
    value, r_logits = seed(logits, position, weights)
    r_hidden = head.relevance(scaled, r_logits, ledger)  # a constant scale passes relevance through
    down = decoder.relevance(r_hidden, recipe, ledger, position_bias)
    up = encoder.relevance(down["memory"], recipe, ledger, position_bias)
    return T5Explanation(
        logits=logits,
        value=value,
        source_tokens=up["input"].sum(-1),
        target_tokens=down["input"].sum(-1),
        source_embeddings=up["input"],
        target_embeddings=down["input"],
        encoder_output=down["memory"],
        encoder_layers=up["layers"],
        decoder_layers=down["layers"],
        encoder_heads=up["heads"],
        decoder_heads=down["heads"],
        cross_heads=down["cross_heads"],
        encoder_neurons=up["neurons"],
        decoder_neurons=down["neurons"],
        position_bias=position_bias,
        biases=ledger.biases,
        softmax_residue=ledger.softmax_residue,
    )
