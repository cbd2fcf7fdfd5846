"""Slow twin of ``DeiTForImageClassification``: explicit AttnLRP of its patches, and of the positions added to them."""

from __future__ import annotations

from dataclasses import dataclass
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
    merge_heads,
    parameter,
    seed,
    split_heads,
)

if TYPE_CHECKING:
    from transformers import DeiTForImageClassification

    from tests.reference.rules import Array


@dataclass(frozen=True)
class DeiTExplanation:
    """``sum(patches) + sum(positions) + sum(special) + sum(biases) + sum(softmax_residue) = value``."""

    logits: Array  # [C]
    value: float
    patches: Array  # [N] of the embedded patches, the projection's bias included
    special: Array  # [2] of the class token and the distillation token
    positions: Array  # [2 + N]
    biases: dict[str, float]
    softmax_residue: dict[str, float]


def embedded_patches(model: DeiTForImageClassification, pixels: Array) -> Array:
    """``[N, d]``: each patch of ``pixels [3, H, W]`` by the projection, row after row."""
    weight = parameter(model, "deit.embeddings.patch_embeddings.projection.weight")
    bias, size = parameter(model, "deit.embeddings.patch_embeddings.projection.bias"), weight.shape[-1]
    _, height, width = pixels.shape
    found = [
        np.einsum("dcij,cij->d", weight, pixels[:, i : i + size, j : j + size]) + bias
        for i in range(0, height, size)
        for j in range(0, width, size)
    ]
    return np.stack(found)


def explain(model: DeiTForImageClassification, pixels: Any, weights: Any) -> DeiTExplanation:
    """Explain ``logits @ weights`` with AttnLRP; positions have their share of the sum with the embedded patches."""
    config, ledger = model.config, Ledger()
    heads, eps = config.num_attention_heads, config.layer_norm_eps
    special = np.concatenate([parameter(model, f"deit.embeddings.{name}_token")[0] for name in ("cls", "distillation")])
    tokens = np.concatenate([special, embedded_patches(model, np.asarray(pixels, dtype=np.float64))])
    places = parameter(model, "deit.embeddings.position_embeddings")[0]
    x, saved = tokens + places, []
    visible = np.ones((len(x), len(x)), dtype=bool)
    for i in range(config.num_hidden_layers):
        name = f"deit.layers.{i}"
        norms = [LayerNorm.read(model, f"{name}.layernorm_{side}", eps) for side in ("before", "after")]
        q_, k_, v_, out = (Linear.read(model, f"{name}.attention.{each}_proj") for each in "qkvo")
        up, down = (Linear.read(model, f"{name}.mlp.fc{each}") for each in (1, 2))
        normed = norms[0](x)
        q, k, v = (split_heads(each(normed), heads) for each in (q_, k_, v_))
        attention = attend(q, k, v, visible, q.shape[-1] ** -0.5)
        attended = merge_heads(attention.output)
        attention_out = out(attended)
        middle = x + attention_out
        middle_normed = norms[1](middle)
        before = up(middle_normed)
        hidden = ACTIVATIONS["gelu"](before)
        mlp_out = down(hidden)
        values = (x, normed, attention, attended, attention_out, middle, middle_normed, before, hidden, mlp_out)
        saved.append((name, values, (norms, q_, k_, v_, out, up, down)))
        x = middle + mlp_out
    final, head = LayerNorm.read(model, "deit.layernorm", eps), Linear.read(model, "classifier")
    normed = final(x)
    logits = head(normed[:1])
    value, r_logits = seed(logits, 0, weights)
    r_normed = np.zeros_like(normed)
    r_normed[:1] = head.relevance(normed[:1], r_logits, ledger)
    relevance = final.relevance(x, r_normed, ledger)
    for name, values, (norms, q_, k_, v_, out, up, down) in reversed(saved):
        x, normed, attention, attended, attention_out, middle, middle_normed, before, hidden, mlp_out = values
        r_middle, r_mlp = rules.addition([middle, mlp_out], relevance)
        r_before = rules.identity(before, down.relevance(hidden, r_mlp, ledger))
        r_middle = r_middle + norms[1].relevance(middle, up.relevance(middle_normed, r_before, ledger), ledger)
        r_x, r_attention = rules.addition([x, attention_out], r_middle)
        r = attention_relevance(attention, split_heads(out.relevance(attended, r_attention, ledger), heads), "attnlrp")
        ledger.softmax_residue[name] = r.residue
        r_normed = sum(
            layer.relevance(normed, merge_heads(part), ledger) for layer, part in ((q_, r.q), (k_, r.k), (v_, r.v))
        )
        relevance = r_x + norms[0].relevance(x, r_normed, ledger)
    r_tokens, r_places = rules.addition([tokens, places], relevance)
    found = r_tokens.sum(-1)
    return DeiTExplanation(
        logits[0], value, found[2:], found[:2], r_places.sum(-1), ledger.biases, ledger.softmax_residue
    )
