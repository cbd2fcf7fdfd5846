"""Slow twin of ``BloomForCausalLM``: its own forward pass and explicit AttnLRP with ALiBi, in float64."""

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
    ids,
    merge_heads,
    parameter,
    seed,
    split_heads,
    visible_keys,
)

if TYPE_CHECKING:
    from transformers import BloomForCausalLM

    from tests.reference.rules import Array


@dataclass(frozen=True)
class BloomExplanation:
    """Relevance of one prediction: ``sum(tokens) + sum(positions) + sum(biases) + sum(softmax_residue) = value``."""

    logits: Array  # [T, V]
    value: float
    tokens: Array  # [T]
    positions: list[Array]  # [H, T] of each layer's ALiBi, by head and key
    biases: dict[str, float]
    softmax_residue: dict[str, float]


def slopes(heads: int) -> Array:
    """``2^(-8 h / H)`` for ``h`` from 1 (Press et al. 2022); the number of heads is a power of two."""
    return np.array([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])


def explain(model: BloomForCausalLM, token_ids: Any, position: int, weights: Any) -> BloomExplanation:
    """Explain ``logits[position] @ weights`` with AttnLRP; what ALiBi adds to a score is its key's position's."""
    config, tokens = model.config, ids(token_ids)
    heads, length = config.n_head, len(tokens)
    bias = np.broadcast_to(slopes(heads)[:, None, None] * np.arange(length), (heads, length, length))
    visible, eps = visible_keys(length, length, True), config.layer_norm_epsilon
    ledger = Ledger()

    def norm(name: str) -> LayerNorm:
        return LayerNorm.read(model, name, eps)

    embedded = parameter(model, "transformer.word_embeddings.weight")[tokens]
    first = norm("transformer.word_embeddings_layernorm")
    x, saved = first(embedded), []
    for i in range(config.n_layer):
        name = f"transformer.h.{i}"
        norm_1, norm_2 = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
        qkv, out = (Linear.read(model, f"{name}.self_attention.{each}") for each in ("query_key_value", "dense"))
        up, down = (Linear.read(model, f"{name}.mlp.{each}") for each in ("dense_h_to_4h", "dense_4h_to_h"))
        normed = norm_1(x)
        fused = qkv(normed).reshape(length, heads, 3, -1)  # of each head its query, key and value
        q, k, v = (fused[:, :, part].transpose(1, 0, 2) for part in range(3))
        attention = attend(q, k, v, visible, q.shape[-1] ** -0.5, bias)
        attended = merge_heads(attention.output)
        attention_out = out(attended)
        middle = x + attention_out
        middle_normed = norm_2(middle)
        before = up(middle_normed)
        hidden = ACTIVATIONS["gelu_new"](before)
        mlp_out = down(hidden)
        layers = norm_1, norm_2, qkv, out, up, down
        saved.append((x, normed, attention, attended, attention_out, middle, middle_normed, before, hidden, mlp_out))
        saved[-1] += (layers,)
        x = middle + mlp_out
    final, head = norm("transformer.ln_f"), Linear.read(model, "lm_head")
    normed = final(x)
    logits = head(normed)
    value, r_logits = seed(logits, position, weights)
    relevance = final.relevance(x, head.relevance(normed, r_logits, ledger), ledger)
    positions: list[Array] = []
    for i, entry in reversed(list(enumerate(saved))):
        x, normed, attention, attended, attention_out, middle, middle_normed, before, hidden, mlp_out, layers = entry
        norm_1, norm_2, qkv, out, up, down = layers
        r_middle, r_mlp = rules.addition([middle, mlp_out], relevance)
        r_before = rules.identity(before, down.relevance(hidden, r_mlp, ledger))
        r_middle = r_middle + norm_2.relevance(middle, up.relevance(middle_normed, r_before, ledger), ledger)
        r_x, r_attention = rules.addition([x, attention_out], r_middle)
        r_heads = split_heads(out.relevance(attended, r_attention, ledger), heads)
        r = attention_relevance(attention, r_heads, "attnlrp")
        ledger.softmax_residue[f"transformer.h.{i}"] = r.residue
        positions.insert(0, r.bias.sum(1))
        r_fused = np.stack([part.transpose(1, 0, 2) for part in (r.q, r.k, r.v)], 2).reshape(length, -1)
        relevance = r_x + norm_1.relevance(x, qkv.relevance(normed, r_fused, ledger), ledger)
    r_tokens = first.relevance(embedded, relevance, ledger)
    return BloomExplanation(logits, value, r_tokens.sum(-1), positions, ledger.biases, ledger.softmax_residue)
