"""Slow twin of ALTI-Logit, Logit and ALTI: loops over layers, heads and tokens, in float64.

Ferrando 2022 (ALTI), Ferrando 2023 (ALTI-Logit), Arras 2025, section 2.1 (grouped queries, RMSNorm). Indices:
i is the token that attends, j the token attended to, h a head, l a layer, t the position whose logit is explained.
For BERT, whose norms follow the residual sums, this is an extension of the papers' method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.reference.alti_networks import READERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tests.reference.alti_networks import Block, Network
    from tests.reference.rules import Array


@dataclass(frozen=True)
class AltiLogit:
    """Every part of one explained value; ``total()`` adds them up again.

    ``relevance`` is ``Δ⁰ + Σ_{l≥1} Δ^l M^{l-1}``, and the embeddings on top at token t; ``logit`` is ``Σ_l Δ^l`` alone.
    The rows of M sum to 1, so ``relevance.sum() = logit.sum() + sum(embeddings.values())``.
    """

    value: float  # the explained logit, or logit difference, from the forward pass
    relevance: Array  # [T] ALTI-Logit
    logit: Array  # [T] Logit, without the embeddings
    alti: Array  # [T] ALTI: row t of the rollout M^{L-1}
    heads: Array  # [L, H, T] Δ by layer, head and token (without b_O)
    mlp: Array  # [L] the MLP's terms, with its own biases
    output_bias: Array  # [L] b_O's terms
    biases: dict[str, float]  # every other bias on the path, by parameter name
    embeddings: dict[str, float]  # u · L_f(x⁰_t) by kind: "token", "position", "token_type"
    contributions: Array  # [L, T, T] C^l_ij
    attention: Array  # [L, H, T, T] A^h_ij

    def total(self) -> float:
        """The sum of all terms, equal to ``value``."""
        constants = self.mlp.sum() + self.output_bias.sum() + sum(self.biases.values())
        return float(self.relevance.sum() + constants)


def contributions(block: Block, distance_epsilon: float = 0.0) -> Array:
    """``C_ij [T, T]``, steps 2 to 5: how near ``F_ij`` comes to ``y_i``, rows summing to 1.

    ``F_ij = T_ij + δ_ij x_i`` and ``y_i = Σ_j F_ij + b_O``; with a norm after the residual sum both pass its linear
    map and ``y_i`` gets its β. ``distance_epsilon`` is added to every component of ``F_ij − y_i``. Where no token
    comes nearer than 0, the row is the token's own.
    """
    tokens = len(block.x)
    result = np.zeros((tokens, tokens))
    for i in range(tokens):
        seen = [j for j in range(tokens) if block.attention.weights[:, i, j].any() or j == i]
        parts = {}
        for j in seen:
            moved = block.to_sum(block.attention.moved(i, j), i)
            parts[j] = block.past_sum(moved + block.x[i] if j == i else moved, i)
        y = sum(parts.values()) + block.past_sum(block.to_sum(block.attention.bias, i), i)
        if block.sum_norm is not None:
            y = y + block.sum_norm.beta
        for j, part in parts.items():
            distance = np.abs(part - y + distance_epsilon).sum()
            result[i, j] = max(0.0, np.abs(y).sum() - distance)
        if result[i].sum() == 0:
            result[i, i] = 1.0
        result[i] /= result[i].sum()
    return result


def decompose(network: Network, distance_epsilon: float = 0.0) -> AltiLogit:
    """ALTI-Logit of a linearised network."""
    t, blocks, carry = network.position, network.blocks, network.carry
    layers, (heads, tokens) = len(blocks), blocks[0].attention.weights.shape[:2]
    delta = np.zeros((layers, heads, tokens))
    for layer, block in enumerate(blocks):
        for h in range(heads):
            for j in range(tokens):
                moved = block.to_sum(block.attention.term(h, t, j), t)
                delta[layer, h, j] = carry(moved, block.attention_enters)
    c = np.stack([contributions(block, distance_epsilon) for block in blocks])

    relevance, rollout = np.zeros(tokens), np.eye(tokens)
    for layer in range(layers):  # rollout is M^{l-1}, the identity before the first layer
        for j in range(tokens):
            for i in range(tokens):
                relevance[i] += delta[layer, :, j].sum() * rollout[j, i]
        rollout = c[layer] @ rollout
    embeddings = {kind: carry(vector, 0) for kind, vector in network.embeddings.items()}
    relevance[t] += sum(embeddings.values())

    return AltiLogit(
        value=network.value,
        relevance=relevance,
        logit=delta.sum((0, 1)),
        alti=rollout[t],
        heads=delta,
        mlp=np.array([carry(block.mlp[t], block.mlp_enters) for block in blocks]),
        output_bias=np.array([carry(b.to_sum(b.attention.bias, t), b.attention_enters) for b in blocks]),
        biases={
            stage.name: carry(stage.bias, index + 1)
            for index, stage in enumerate(network.path)
            if stage.bias is not None
        },
        embeddings=embeddings,
        contributions=c,
        attention=np.stack([block.attention.weights for block in blocks]),
    )


def alti_logit(
    model: nn.Module,
    ids: Tensor,
    position: int | None,
    token: int,
    other: int | None = None,
    *,
    distance_epsilon: float = 0.0,
) -> AltiLogit:
    """Explain ``logit_token`` (minus ``logit_other``) at ``position`` for ``ids [1, T]``.

    A classifier has no position (None), and ``token`` and ``other`` are its classes.
    """
    tokens = ids.reshape(-1).tolist()
    rows = [token] if other is None else [token, other]
    for model_class, read in READERS.items():
        if isinstance(model, model_class):
            return decompose(read(model, tokens, position, rows), distance_epsilon)
    raise ValueError(f"no twin for {type(model).__name__}")
