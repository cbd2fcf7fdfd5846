"""ActMax and RelMax from their definition: everything is kept, and sorted in the end; the logit lens in loops."""

from __future__ import annotations

import numpy as np


def references(values, k):
    """The k best passages of each unit.

    Args:
        values: from the line of each passage to ``[T, U]``, the value of each unit at each token.
        k: how many.

    Returns:
        For each unit ``[(value, line, position), …]``, best first; of equal values the smaller line, and within a
        passage the first token. Values are compared as float32.
    """
    units = next(iter(values.values())).shape[1]
    found = []
    for unit in range(units):
        every = []
        for line, of in values.items():
            column = [np.float32(each) for each in of[:, unit]]
            best = max(column)
            every.append((-best, line, column.index(best)))
        found.append([(-value, line, position) for value, line, position in sorted(every)[:k]])
    return found


def histogram(values, inner_edges):
    """``[U, len(inner_edges) + 1]``: of how many numbers each unit's value was in each bin; a bin has the edge that is
    closer to zero, and the one around zero has none.

    Args:
        values: ``[N, U]``.
        inner_edges: from the lowest, alike on both sides of zero.
    """
    counts = np.zeros((values.shape[1], len(inner_edges) + 1), dtype=int)
    for row in values:
        for unit, value in enumerate(row):
            bin_ = sum(value > edge if edge < 0 else value >= edge for edge in inner_edges)
            counts[unit, bin_] += 1
    return counts


def lens(unembedding, scale, centred, row):
    """``U (γ ⊙ w)`` for one row ``w`` of the second matrix, its mean taken off first where the final norm does."""
    mean = sum(row) / len(row) if centred else 0.0
    return [sum(u * g * (w - mean) for u, g, w in zip(each, scale, row, strict=True)) for each in unembedding]
