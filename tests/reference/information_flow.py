"""Slow twin of information flow routes (Ferrando & Voita 2024): loops over layers, tokens and heads, in float64.

The linearised network is ALTI-Logit's (``alti_networks.py``). A sum's parts are the stream before, what each head
writes from each token, and the feed-forward part's output, if it is added in the same place; a bias is none.
"""

from __future__ import annotations

import numpy as np


def close(part, whole):
    """``max(0, ‖y‖₁ − ‖a − y‖₁)``."""
    return max(0.0, np.abs(whole).sum() - np.abs(part - whole).sum())


def attention_shares(block, parallel):
    """``[T, T]``: the shares of token j in the sum after attention at token i."""
    tokens, heads = len(block.x), len(block.attention.weights)
    result = np.zeros((tokens, tokens))
    for i in range(tokens):
        parts = [(i, block.past_sum(block.x[i], i))]
        for h in range(heads):
            for j in range(tokens):
                if block.attention.weights[h, i, j] != 0:
                    parts.append((j, block.past_sum(block.to_sum(block.attention.term(h, i, j), i), i)))
        if parallel:
            parts.append((i, block.mlp[i]))
        y = sum(part for _, part in parts) + block.past_sum(block.to_sum(block.attention.bias, i), i)
        if block.sum_norm is not None:
            y = y + block.sum_norm.beta
        found = [(j, close(part, y)) for j, part in parts]
        total = sum(each for _, each in found)
        if total == 0:
            result[i, i] = 1.0
            continue
        for j, each in found:
            result[i, j] += each / total
    return result


def flow(network, parallel=False):
    """``[T]``: the shares of the input's tokens at the explained position. ``parallel``: attention and feed-forward
    part are added at once; where one follows the other, what the second adds stays with its token."""
    shares = np.eye(len(network.blocks[0].x))[network.position or 0]
    for block in reversed(network.blocks):
        step = attention_shares(block, parallel)
        shares = np.array([sum(shares[i] * step[i, j] for i in range(len(step))) for j in range(len(step))])
    return shares
