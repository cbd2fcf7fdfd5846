"""Slow twin of ``GPT2LMHeadModel``: its own forward pass and explicit LRP / AttnLRP, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.reference import rules
from tests.reference.blocks import (
    ACTIVATIONS,
    Attention,
    LayerNorm,
    Ledger,
    Linear,
    attend,
    attention_relevance,
    check_recipe,
    ids,
    merge_heads,
    parameter,
    seed,
    split_heads,
    visible_keys,
)

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

    from tests.reference.rules import Array


@dataclass(frozen=True)
class GPT2Explanation:
    """Relevance of every part of one prediction.

    ``sum(tokens) + sum(positions) + sum(biases) + sum(softmax_residue) = value``.
    """

    logits: Array  # [T, V]
    value: float
    tokens: Array  # [T] word embeddings
    positions: Array  # [T] position embeddings
    embeddings: Array  # [T, d] word embeddings, per component
    position_embeddings: Array  # [T, d]
    layers: list[Array]  # [T, d] at the input of each layer
    heads: list[Array]  # [T, H dh] at the input of each attention output projection
    neurons: list[Array]  # [T, f] at the input of each MLP output projection
    biases: dict[str, float]  # by parameter name
    softmax_residue: dict[str, float]  # by attention module name


@dataclass(frozen=True)
class _Saved:
    """Activations of one layer."""

    x: Array
    normed: Array
    attention: Attention
    attended: Array
    attention_out: Array
    middle: Array
    middle_normed: Array
    before_act: Array
    hidden: Array
    mlp_out: Array


class _Layer:
    """One block: pre-norm attention and pre-norm MLP. Weights are stored as [in, out] and read transposed."""

    def __init__(self, model: GPT2LMHeadModel, index: int) -> None:
        config, name = model.config, f"transformer.h.{index}"
        self.name = f"{name}.attn"
        self.qkv = Linear.read(model, f"{name}.attn.c_attn", transposed=True)
        self.o = Linear.read(model, f"{name}.attn.c_proj", transposed=True)
        self.up = Linear.read(model, f"{name}.mlp.c_fc", transposed=True)
        self.down = Linear.read(model, f"{name}.mlp.c_proj", transposed=True)
        self.norm_1 = LayerNorm.read(model, f"{name}.ln_1", config.layer_norm_epsilon)
        self.norm_2 = LayerNorm.read(model, f"{name}.ln_2", config.layer_norm_epsilon)
        self.heads = config.n_head
        self.scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= index + 1
        self.act = ACTIVATIONS[config.activation_function]

    def forward(self, x: Array, visible: np.ndarray) -> tuple[Array, _Saved]:
        normed = self.norm_1(x)
        q, k, v = (split_heads(part, self.heads) for part in np.split(self.qkv(normed), 3, axis=-1))
        attention = attend(q, k, v, visible, self.scale)
        attended = merge_heads(attention.output)
        attention_out = self.o(attended)
        middle = attention_out + x
        middle_normed = self.norm_2(middle)
        before_act = self.up(middle_normed)
        hidden = self.act(before_act)
        mlp_out = self.down(hidden)
        saved = _Saved(
            x, normed, attention, attended, attention_out, middle, middle_normed, before_act, hidden, mlp_out
        )
        return middle + mlp_out, saved

    def relevance(self, s: _Saved, relevance: Array, recipe: str, ledger: Ledger) -> tuple[Array, Array, Array]:
        """Relevance at the layer's input, at the attention output projection and at the MLP's."""
        r_middle, r_mlp = rules.addition([s.middle, s.mlp_out], relevance)
        r_hidden = self.down.relevance(s.hidden, r_mlp, ledger)
        r_before = rules.identity(s.before_act, r_hidden)
        r_normed = self.up.relevance(s.middle_normed, r_before, ledger)
        r_middle = r_middle + self.norm_2.relevance(s.middle, r_normed, ledger)
        r_attention, r_x = rules.addition([s.attention_out, s.x], r_middle)
        r_heads = self.o.relevance(s.attended, r_attention, ledger)
        r = attention_relevance(s.attention, split_heads(r_heads, self.heads), recipe)
        ledger.softmax_residue[self.name] = r.residue
        r_qkv = np.concatenate([merge_heads(part) for part in (r.q, r.k, r.v)], axis=-1)
        r_normed = self.qkv.relevance(s.normed, r_qkv, ledger)
        return r_x + self.norm_1.relevance(s.x, r_normed, ledger), r_heads, r_hidden


def explain(
    model: GPT2LMHeadModel,
    token_ids: Any,
    position: int,
    weights: Any,
    recipe: str,
    *,
    attention_mask: Any = None,
    position_ids: Any = None,
) -> GPT2Explanation:
    """Explain ``logits[position] @ weights`` with ``recipe`` "lrp" (CP-LRP) or "attnlrp"."""
    check_recipe(recipe)
    config = model.config
    tokens = ids(token_ids)
    positions = np.arange(len(tokens)) if position_ids is None else ids(position_ids)
    visible = visible_keys(len(tokens), len(tokens), True, attention_mask)
    layers = [_Layer(model, i) for i in range(config.n_layer)]
    final = LayerNorm.read(model, "transformer.ln_f", config.layer_norm_epsilon)
    head = Linear.read(model, "lm_head")

    words = parameter(model, "transformer.wte.weight")[tokens]
    places = parameter(model, "transformer.wpe.weight")[positions]
    x, saved = words + places, []
    for layer in layers:
        x, activations = layer.forward(x, visible)
        saved.append(activations)
    normed = final(x)
    logits = head(normed)

    ledger = Ledger()
    value, r_logits = seed(logits, position, weights)
    relevance = final.relevance(x, head.relevance(normed, r_logits, ledger), ledger)
    at_layers, at_heads, at_neurons = [], [], []
    for layer, activations in zip(reversed(layers), reversed(saved), strict=True):
        relevance, r_heads, r_neurons = layer.relevance(activations, relevance, recipe, ledger)
        at_layers.insert(0, relevance)
        at_heads.insert(0, r_heads)
        at_neurons.insert(0, r_neurons)
    r_words, r_places = rules.addition([words, places], relevance)
    return GPT2Explanation(
        logits=logits,
        value=value,
        tokens=r_words.sum(-1),
        positions=r_places.sum(-1),
        embeddings=r_words,
        position_embeddings=r_places,
        layers=at_layers,
        heads=at_heads,
        neurons=at_neurons,
        biases=ledger.biases,
        softmax_residue=ledger.softmax_residue,
    )
