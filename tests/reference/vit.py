"""Slow twin of ``ViTForImageClassification`` and of DeiT with two heads: explicit LRP / AttnLRP, in float64.

A patch is a row of numbers, and the convolution that reads it a linear layer. Every kind of layer may have its own rule
(Achtibat 2024, Table 4): the patches, linear layers, projections into attention and out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.reference import rules
from tests.reference.blocks import (
    ACTIVATIONS,
    LayerNorm,
    Ledger,
    Linear,
    attend,
    attention_relevance,
    check_recipe,
    merge_heads,
    parameter,
    split_heads,
    visible_keys,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.reference.rules import Array

    Rule = Callable[[Array, Array, Array | None, Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Rules:
    """For each kind of layer ``(x, weight, bias, relevance) -> (R_x, R_b)``."""

    first: Rule = rules.linear_zero
    linear: Rule = rules.linear_zero
    into: Rule = rules.linear_zero
    out: Rule = rules.linear_zero


@dataclass
class ViTExplanation:
    """Relevance of every part of one prediction: pixels, class tokens, positions, biases, residue of the softmax."""

    value: float
    pixels: Array  # [C, R, C]
    learned: Array  # [n] class token, then the distillation token
    positions: Array  # [n + N]
    ledger: Ledger = field(default_factory=Ledger)


def explain(model: Any, pixels: Array, weights: Array, recipe: str, chosen: Rules | None = None) -> ViTExplanation:
    """Explain ``logits @ weights`` of one image ``[C, R, C]``, with ``recipe`` "lrp" (CP-LRP) or "attnlrp"."""
    check_recipe(recipe)
    by = chosen or Rules()
    config, ledger = model.config, Ledger()
    name = model.base_model_prefix
    size, channels = config.patch_size, pixels.shape[0]
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    heads, scale = config.num_attention_heads, (config.hidden_size // config.num_attention_heads) ** -0.5

    def linear(path: str) -> Linear:
        return Linear.read(model, path)

    def back(layer: Linear, x: Array, relevance: Array, rule: Rule) -> Array:
        r_x, r_b = rule(x, layer.weight, layer.bias, relevance)
        if layer.bias is not None:
            ledger.keep(layer.bias_name, r_b)
        return r_x

    # ------------------------------------------------------------------------ forward
    kernel = f"{name}.embeddings.patch_embeddings.projection"
    patch = Linear(
        parameter(model, f"{kernel}.weight").reshape(config.hidden_size, -1), parameter(model, f"{kernel}.bias"), kernel
    )
    cut = np.zeros((rows * columns, channels * size * size))
    for r in range(rows):
        for c in range(columns):
            cut[r * columns + c] = pixels[:, r * size : (r + 1) * size, c * size : (c + 1) * size].reshape(-1)
    embedded = patch(cut)
    tokens = ["cls_token", *(["distillation_token"] if name == "deit" else [])]
    learned = np.concatenate([parameter(model, f"{name}.embeddings.{token}")[0] for token in tokens])
    joined = np.concatenate([learned, embedded])
    places = parameter(model, f"{name}.embeddings.position_embeddings")[0]
    x, saved = joined + places, []
    visible = visible_keys(len(x), len(x), causal=False)
    for i in range(config.num_hidden_layers):
        at = f"{name}.layers.{i}"
        before = LayerNorm.read(model, f"{at}.layernorm_before", config.layer_norm_eps)
        after = LayerNorm.read(model, f"{at}.layernorm_after", config.layer_norm_eps)
        into = [linear(f"{at}.attention.{part}_proj") for part in "qkv"]
        out, up, down = linear(f"{at}.attention.o_proj"), linear(f"{at}.mlp.fc1"), linear(f"{at}.mlp.fc2")
        normed = before(x)
        attention = attend(*(split_heads(layer(normed), heads) for layer in into), visible, scale)
        merged = merge_heads(attention.output)
        attended = out(merged)
        middle = x + attended
        normed_middle = after(middle)
        raw = up(normed_middle)
        hidden = ACTIVATIONS[config.hidden_act](raw)
        written = down(hidden)
        saved.append((at, before, after, into, out, up, down, x, normed, attention, merged, attended, middle,
                      normed_middle, raw, hidden, written))  # fmt: skip
        x = middle + written
    last = LayerNorm.read(model, f"{name}.layernorm", config.layer_norm_eps)
    read = last(x)
    names = ["cls_classifier", "distillation_classifier"] if name == "deit" else ["classifier"]
    classifiers = [linear(each) for each in names]
    logits = [layer(read[i]) for i, layer in enumerate(classifiers)]
    value = sum(float(each @ weights) for each in logits) / len(logits)

    # ----------------------------------------------------------------------- backward
    r_read = np.zeros_like(read)
    for i, layer in enumerate(classifiers):
        r_read[i] = back(layer, read[i], weights * logits[i] / len(logits), by.linear)
    r_x = last.relevance(x, r_read, ledger)
    for (at, before, after, into, out, up, down, x, normed, attention, merged, attended, middle, normed_middle, raw,
         hidden, written) in reversed(saved):  # fmt: skip
        r_middle, r_written = rules.addition([middle, written], r_x)
        r_hidden = back(down, hidden, r_written, by.linear)
        r_raw = rules.identity(raw, r_hidden)
        r_middle = r_middle + after.relevance(middle, back(up, normed_middle, r_raw, by.linear), ledger)
        r_x, r_attended = rules.addition([x, attended], r_middle)
        r_merged = back(out, merged, r_attended, by.out)
        r = attention_relevance(attention, split_heads(r_merged, heads), recipe)
        ledger.softmax_residue[at] = r.residue
        parts = zip(into, (r.q, r.k, r.v), strict=True)
        r_normed = sum(back(layer, normed, merge_heads(part), by.into) for layer, part in parts)
        r_x = r_x + before.relevance(x, np.asarray(r_normed), ledger)
    r_joined, r_places = rules.addition([joined, places], r_x)
    r_cut = back(patch, cut, r_joined[len(learned) :], by.first)
    r_pixels = np.zeros_like(pixels)
    for r in range(rows):
        for c in range(columns):
            block = r_cut[r * columns + c].reshape(channels, size, size)
            r_pixels[:, r * size : (r + 1) * size, c * size : (c + 1) * size] = block
    return ViTExplanation(value, r_pixels, r_joined[: len(learned)].sum(-1), r_places.sum(-1), ledger)
