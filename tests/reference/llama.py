"""Slow twin of ``LlamaForCausalLM``: its own forward pass and explicit LRP / AttnLRP, in float64."""

from __future__ import annotations

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
    from transformers import LlamaForCausalLM

    from tests.reference.rules import Array


@dataclass(frozen=True)
class LlamaExplanation:
    """Relevance of every part of one prediction.

    ``sum(tokens) + sum(angles) + sum(biases) + sum(softmax_residue) = value``.
    """

    logits: Array  # [T, V]
    value: float
    tokens: Array  # [T]
    embeddings: Array  # [T, d]
    layers: list[Array]  # [T, d] at the input of each layer
    heads: list[Array]  # [T, H dh] at the input of each attention output projection
    neurons: list[Array]  # [T, f] at the input of each down projection
    angles: list[Array]  # [T] of each layer's rotary angles; zero unless the recipe is "pa-lrp"
    angles_by_head: list[tuple[Array, Array]]  # the same in the heads of the queries [H, T], and of the keys
    biases: dict[str, float]  # by parameter name
    softmax_residue: dict[str, float]  # by attention module name


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of ``x [H, T, dh]``: components i and i + dh/2 turn together.

    ``y_i = x_i cos_i - x_(i+h) sin_i`` and ``y_(i+h) = x_(i+h) cos_(i+h) + x_i sin_(i+h)``.
    """
    h = x.shape[-1] // 2
    first, second = x[..., :h], x[..., h:]
    upper = first * cos[:, :h] - second * sin[:, :h]
    lower = second * cos[:, h:] + first * sin[:, h:]
    return np.concatenate([upper, lower], axis=-1)


def rotate_relevance(x: Array, cos: Array, sin: Array, relevance: Array) -> Array:
    """LRP-0 of :func:`rotate`, which is linear in ``x`` (cos and sin are constants)."""
    h = x.shape[-1] // 2
    first, second = x[..., :h], x[..., h:]
    upper_first, upper_second = rules.addition([first * cos[:, :h], -second * sin[:, :h]], relevance[..., :h])
    lower_second, lower_first = rules.addition([second * cos[:, h:], first * sin[:, h:]], relevance[..., h:])
    return np.concatenate([upper_first + lower_first, upper_second + lower_second], axis=-1)


def rotate_shared(x: Array, cos: Array, sin: Array, relevance: Array) -> tuple[Array, Array]:
    """Relevance of ``x [H, T, dh]`` and of each head's angles ``[H, T]`` behind :func:`rotate`, product by product.

    A sum of two products: each product has its share of the sum, and each of its factors half of that (the uniform
    rule; Bakish et al. 2025, Eq. 10).
    """
    heads, length, width = x.shape
    half = width // 2
    r_x, r_places = np.zeros_like(x), np.zeros((heads, length))
    for head in range(heads):
        for t in range(length):
            for i in range(width):
                j, sign = (i + half, -1.0) if i < half else (i - half, 1.0)
                with_cos = x[head, t, i] * cos[t, i]
                with_sin = sign * x[head, t, j] * sin[t, i]
                shares = rules.addition([np.array(with_cos), np.array(with_sin)], np.array(relevance[head, t, i]))
                r_x[head, t, i] += 0.5 * shares[0]
                r_x[head, t, j] += 0.5 * shares[1]
                r_places[head, t] += 0.5 * shares[0] + 0.5 * shares[1]
    return r_x, r_places


@dataclass(frozen=True)
class _Saved:
    """Activations of one layer."""

    x: Array
    normed: Array
    q: Array
    k: Array
    attention: Attention
    attended: Array
    attention_out: Array
    middle: Array
    middle_normed: Array
    gate_in: Array
    gate: Array
    up: Array
    hidden: Array
    mlp_out: Array


class _Layer:
    """One decoder layer: pre-norm attention with grouped keys and values, pre-norm gated MLP."""

    def __init__(self, model: LlamaForCausalLM, index: int) -> None:
        config, name = model.config, f"model.layers.{index}"
        self.name = f"{name}.self_attn"
        self.q, self.k, self.v, self.o = (Linear.read(model, f"{self.name}.{p}_proj") for p in "qkvo")
        self.gate, self.up, self.down = (Linear.read(model, f"{name}.mlp.{p}_proj") for p in ("gate", "up", "down"))
        self.norm_1 = RMSNorm.read(model, f"{name}.input_layernorm", config.rms_norm_eps)
        self.norm_2 = RMSNorm.read(model, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Array, cos: Array, sin: Array, visible: np.ndarray) -> tuple[Array, _Saved]:
        normed = self.norm_1(x)
        q, k = split_heads(self.q(normed), self.heads), split_heads(self.k(normed), self.groups)
        v = split_heads(self.v(normed), self.groups)
        shared = self.heads // self.groups  # head h reads group h // shared
        attention = attend(
            rotate(q, cos, sin),
            np.repeat(rotate(k, cos, sin), shared, axis=0),
            np.repeat(v, shared, axis=0),
            visible,
            self.scale,
        )
        attended = merge_heads(attention.output)
        attention_out = self.o(attended)
        middle = x + attention_out
        middle_normed = self.norm_2(middle)
        gate_in, up = self.gate(middle_normed), self.up(middle_normed)
        gate = self.act(gate_in)
        hidden = gate * up
        mlp_out = self.down(hidden)
        saved = _Saved(
            x, normed, q, k, attention, attended, attention_out, middle, middle_normed,
            gate_in, gate, up, hidden, mlp_out,
        )  # fmt: skip
        return middle + mlp_out, saved

    def relevance(
        self, s: _Saved, relevance: Array, cos: Array, sin: Array, recipe: str, ledger: Ledger
    ) -> tuple[Array, Array, Array, Array]:
        """Relevance at the layer's input, at the attention output projection, at the down projection, and of places."""
        has_positions = recipe == "pa-lrp"
        recipe = "attnlrp" if has_positions else recipe
        # second residual sum, gated MLP
        r_middle, r_mlp = rules.addition([s.middle, s.mlp_out], relevance)
        r_hidden = self.down.relevance(s.hidden, r_mlp, ledger)
        r_gate, r_up = gated_product_relevance(s.gate, s.up, r_hidden, recipe)
        r_gate_in = rules.identity(s.gate_in, r_gate)
        r_normed = self.gate.relevance(s.middle_normed, r_gate_in, ledger)
        r_normed = r_normed + self.up.relevance(s.middle_normed, r_up, ledger)
        r_middle = r_middle + self.norm_2.relevance(s.middle, r_normed)
        # first residual sum, attention
        r_x, r_attention = rules.addition([s.x, s.attention_out], r_middle)
        r_heads = self.o.relevance(s.attended, r_attention, ledger)
        r = attention_relevance(s.attention, split_heads(r_heads, self.heads), recipe)
        ledger.softmax_residue[self.name] = r.residue
        per_group = (self.groups, self.heads // self.groups, *r.k.shape[1:])
        r_places = np.zeros((self.heads, len(s.x))), np.zeros((self.groups, len(s.x)))
        if has_positions:
            r_q, of_q = rotate_shared(s.q, cos, sin, r.q)
            r_k, of_k = rotate_shared(s.k, cos, sin, r.k.reshape(per_group).sum(1))
            r_places = of_q, of_k
        else:
            r_q = rotate_relevance(s.q, cos, sin, r.q)
            r_k = rotate_relevance(s.k, cos, sin, r.k.reshape(per_group).sum(1))
        r_v = r.v.reshape(per_group).sum(1)
        r_normed = self.q.relevance(s.normed, merge_heads(r_q), ledger)
        r_normed = r_normed + self.k.relevance(s.normed, merge_heads(r_k), ledger)
        r_normed = r_normed + self.v.relevance(s.normed, merge_heads(r_v), ledger)
        return r_x + self.norm_1.relevance(s.x, r_normed), r_heads, r_hidden, r_places


def rotary_constants(model: LlamaForCausalLM, positions: np.ndarray) -> tuple[Array, Array]:
    """cos and sin ``[T, dh]``: the model's own table, float32 as the model computes it, then widened."""
    import torch

    probe = torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(probe, torch.as_tensor(positions)[None])
    return cos[0].double().numpy(), sin[0].double().numpy()


def explain(
    model: LlamaForCausalLM,
    token_ids: Any,
    position: int,
    weights: Any,
    recipe: str,
    *,
    attention_mask: Any = None,
    position_ids: Any = None,
) -> LlamaExplanation:
    """Explain ``logits[position] @ weights`` with ``recipe`` "lrp" (CP-LRP), "attnlrp" or "pa-lrp"."""
    check_recipe("attnlrp" if recipe == "pa-lrp" else recipe)
    tokens = ids(token_ids)
    positions = np.arange(len(tokens)) if position_ids is None else ids(position_ids)
    cos, sin = rotary_constants(model, positions)
    visible = visible_keys(len(tokens), len(tokens), True, attention_mask)
    layers = [_Layer(model, i) for i in range(model.config.num_hidden_layers)]
    final = RMSNorm.read(model, "model.norm", model.config.rms_norm_eps)
    head = Linear.read(model, "lm_head")

    embedded = parameter(model, "model.embed_tokens.weight")[tokens]
    x, saved = embedded, []
    for layer in layers:
        x, activations = layer.forward(x, cos, sin, visible)
        saved.append(activations)
    normed = final(x)
    logits = head(normed)

    ledger = Ledger()
    value, r_logits = seed(logits, position, weights)
    relevance = final.relevance(x, head.relevance(normed, r_logits, ledger))
    at_layers, at_heads, at_neurons, at_places = [], [], [], []
    for layer, activations in zip(reversed(layers), reversed(saved), strict=True):
        relevance, r_heads, r_neurons, r_places = layer.relevance(activations, relevance, cos, sin, recipe, ledger)
        at_layers.insert(0, relevance)
        at_heads.insert(0, r_heads)
        at_neurons.insert(0, r_neurons)
        at_places.insert(0, r_places)
    return LlamaExplanation(
        logits=logits,
        value=value,
        tokens=relevance.sum(-1),
        embeddings=relevance,
        layers=at_layers,
        heads=at_heads,
        neurons=at_neurons,
        angles=[of_q.sum(0) + of_k.sum(0) for of_q, of_k in at_places],
        angles_by_head=at_places,
        biases=ledger.biases,
        softmax_residue=ledger.softmax_residue,
    )
