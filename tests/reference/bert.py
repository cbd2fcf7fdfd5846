"""Slow twin of ``BertForMaskedLM``: its own forward pass and explicit LRP / AttnLRP, in float64."""

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
    from transformers import BertForMaskedLM

    from tests.reference.rules import Array


@dataclass(frozen=True)
class BertExplanation:
    """Relevance of every part of one prediction.

    ``sum(tokens) + sum(positions) + sum(token_types) + sum(biases) + sum(softmax_residue) = value``.
    """

    logits: Array  # [T, V]
    value: float
    tokens: Array  # [T] word embeddings
    positions: Array  # [T] position embeddings
    token_types: Array  # [T] token type embeddings
    embeddings: Array  # [T, d] word embeddings, per component
    position_embeddings: Array  # [T, d]
    token_type_embeddings: Array  # [T, d]
    layers: list[Array]  # [T, d] at the input of each layer
    heads: list[Array]  # [T, H dh] at the input of each attention output projection
    neurons: list[Array]  # [T, f] at the input of each MLP output projection
    biases: dict[str, float]  # by parameter name
    softmax_residue: dict[str, float]  # by attention module name


@dataclass(frozen=True)
class _Saved:
    """Activations of one layer."""

    x: Array
    attention: Attention
    attended: Array
    attention_out: Array
    first_sum: Array
    middle: Array
    before_act: Array
    hidden: Array
    mlp_out: Array
    second_sum: Array


class _Layer:
    """One encoder layer: attention and MLP, each followed by a norm of the residual sum."""

    def __init__(self, model: BertForMaskedLM, index: int) -> None:
        config, name = model.config, f"bert.encoder.layer.{index}"
        self.name = f"{name}.attention.self"
        self.q, self.k, self.v = (Linear.read(model, f"{self.name}.{p}") for p in ("query", "key", "value"))
        self.o = Linear.read(model, f"{name}.attention.output.dense")
        self.norm_1 = LayerNorm.read(model, f"{name}.attention.output.LayerNorm", config.layer_norm_eps)
        self.up = Linear.read(model, f"{name}.intermediate.dense")
        self.down = Linear.read(model, f"{name}.output.dense")
        self.norm_2 = LayerNorm.read(model, f"{name}.output.LayerNorm", config.layer_norm_eps)
        self.heads = config.num_attention_heads
        self.scale = (config.hidden_size // config.num_attention_heads) ** -0.5
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Array, visible: np.ndarray) -> tuple[Array, _Saved]:
        q, k, v = (split_heads(layer(x), self.heads) for layer in (self.q, self.k, self.v))
        attention = attend(q, k, v, visible, self.scale)
        attended = merge_heads(attention.output)
        attention_out = self.o(attended)
        first_sum = attention_out + x
        middle = self.norm_1(first_sum)
        before_act = self.up(middle)
        hidden = self.act(before_act)
        mlp_out = self.down(hidden)
        second_sum = mlp_out + middle
        saved = _Saved(
            x, attention, attended, attention_out, first_sum, middle, before_act, hidden, mlp_out, second_sum
        )
        return self.norm_2(second_sum), saved

    def relevance(self, s: _Saved, relevance: Array, recipe: str, ledger: Ledger) -> tuple[Array, Array, Array]:
        """Relevance at the layer's input, at the attention output projection and at the MLP's."""
        r_sum = self.norm_2.relevance(s.second_sum, relevance, ledger)
        r_mlp, r_middle = rules.addition([s.mlp_out, s.middle], r_sum)
        r_hidden = self.down.relevance(s.hidden, r_mlp, ledger)
        r_before = rules.identity(s.before_act, r_hidden)
        r_middle = r_middle + self.up.relevance(s.middle, r_before, ledger)
        r_sum = self.norm_1.relevance(s.first_sum, r_middle, ledger)
        r_attention, r_x = rules.addition([s.attention_out, s.x], r_sum)
        r_heads = self.o.relevance(s.attended, r_attention, ledger)
        r = attention_relevance(s.attention, split_heads(r_heads, self.heads), recipe)
        ledger.softmax_residue[self.name] = r.residue
        for layer, part in ((self.q, r.q), (self.k, r.k), (self.v, r.v)):
            r_x = r_x + layer.relevance(s.x, merge_heads(part), ledger)
        return r_x, r_heads, r_hidden


def explain(
    model: BertForMaskedLM,
    token_ids: Any,
    position: int,
    weights: Any,
    recipe: str,
    *,
    attention_mask: Any = None,
    token_type_ids: Any = None,
) -> BertExplanation:
    """Explain ``logits[position] @ weights`` with ``recipe`` "lrp" (CP-LRP) or "attnlrp"."""
    check_recipe(recipe)
    config = model.config
    tokens = ids(token_ids)
    types = np.zeros(len(tokens), dtype=np.int64) if token_type_ids is None else ids(token_type_ids)
    visible = visible_keys(len(tokens), len(tokens), False, attention_mask)
    layers = [_Layer(model, i) for i in range(config.num_hidden_layers)]
    first_norm = LayerNorm.read(model, "bert.embeddings.LayerNorm", config.layer_norm_eps)
    transform = Linear.read(model, "cls.predictions.transform.dense")
    head_norm = LayerNorm.read(model, "cls.predictions.transform.LayerNorm", config.layer_norm_eps)
    head = Linear.read(model, "cls.predictions.decoder", bias_name="cls.predictions.bias")

    words = parameter(model, "bert.embeddings.word_embeddings.weight")[tokens]
    kinds = parameter(model, "bert.embeddings.token_type_embeddings.weight")[types]
    places = parameter(model, "bert.embeddings.position_embeddings.weight")[: len(tokens)]
    summed = words + kinds + places
    x, saved = first_norm(summed), []
    for layer in layers:
        x, activations = layer.forward(x, visible)
        saved.append(activations)
    before_act = transform(x)
    transformed = ACTIVATIONS[config.hidden_act](before_act)
    normed = head_norm(transformed)
    logits = head(normed)

    ledger = Ledger()
    value, r_logits = seed(logits, position, weights)
    r_normed = head.relevance(normed, r_logits, ledger)
    r_transformed = head_norm.relevance(transformed, r_normed, ledger)
    relevance = transform.relevance(x, rules.identity(before_act, r_transformed), ledger)
    at_layers, at_heads, at_neurons = [], [], []
    for layer, activations in zip(reversed(layers), reversed(saved), strict=True):
        relevance, r_heads, r_neurons = layer.relevance(activations, relevance, recipe, ledger)
        at_layers.insert(0, relevance)
        at_heads.insert(0, r_heads)
        at_neurons.insert(0, r_neurons)
    r_summed = first_norm.relevance(summed, relevance, ledger)
    r_words, r_kinds, r_places = rules.addition([words, kinds, places], r_summed)
    return BertExplanation(
        logits=logits,
        value=value,
        tokens=r_words.sum(-1),
        positions=r_places.sum(-1),
        token_types=r_kinds.sum(-1),
        embeddings=r_words,
        position_embeddings=r_places,
        token_type_embeddings=r_kinds,
        layers=at_layers,
        heads=at_heads,
        neurons=at_neurons,
        biases=ledger.biases,
        softmax_residue=ledger.softmax_residue,
    )
