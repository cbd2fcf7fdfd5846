"""Slow twins of the benchmark's statistics, for a handful of samples: everything that could be drawn is counted."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def bootstrap_means(values: Sequence[float]) -> list[Fraction]:
    """The means of all ``N^N`` resamples with replacement, sorted: the bootstrap distribution itself."""
    return sorted(sum(map(Fraction, resample)) / len(values) for resample in product(values, repeat=len(values)))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean.

    Its ends are the smallest means that at least ``(1 − level) / 2`` and ``(1 + level) / 2`` of all resamples do
    not exceed.
    """
    means = bootstrap_means(values)
    tail = (1 - Fraction(str(level))) / 2
    ends = []
    for share in (tail, 1 - tail):
        ends.append(next(m for count, m in enumerate(means, start=1) if Fraction(count, len(means)) >= share))
    return float(ends[0]), float(ends[1])


def paired_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Sign-flip test of the mean difference, two-sided.

    If a and b were exchangeable, every difference could as well have the other sign: p is the share of all ``2^N``
    choices of signs whose mean is at least as far from 0 as the one seen, which is one of them.
    """
    differences = [Fraction(x) - Fraction(y) for x, y in zip(a, b, strict=True)]
    seen, extreme, choices = abs(sum(differences)), 0, 0
    for signs in product((1, -1), repeat=len(differences)):
        choices += 1
        if abs(sum(sign * d for sign, d in zip(signs, differences, strict=True))) >= seen:
            extreme += 1
    return extreme / choices


def swap_test(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], measure: Callable[[list[float]], float]
) -> float:
    """The same test of a number that is made of sums over samples: the share of all ``2^N`` ways to give each sample's
    counts to the one or the other that make the two numbers differ as much as they do, or more."""

    def difference(swapped: Sequence[bool]) -> float:
        mine = [(y, x)[not swap] for x, y, swap in zip(a, b, swapped, strict=True)]
        others = [(y, x)[swap] for x, y, swap in zip(a, b, swapped, strict=True)]
        sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in (mine, others)]
        return abs(measure(sums[0]) - measure(sums[1]))

    seen = difference([False] * len(a))
    every = [difference(swapped) for swapped in product((False, True), repeat=len(a))]
    return sum(each >= seen - 1e-12 for each in every) / len(every)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: the k-th smallest of m p-values counts ``m − k + 1`` times.

    None ends below a smaller one: each is the largest of ``(m − k + 1) p_(k)`` over the k at or below it, at most 1.
    """
    ordered, m = sorted(p_values), len(p_values)
    return [min(1.0, max((m - k) * p for k, p in enumerate(ordered) if p <= own)) for own in p_values]
