"""Slow twins of the four ground-truth metrics (Arras 2025, section 3.3), in exact fractions.

``relevance [T]`` and ``truth [T]`` (booleans) cover every token of the input. Tokens of equal relevance have no
order of their own: every order of them is tried, and the score is the mean over all of these.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, permutations, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Metric = Callable[[Sequence[float], Sequence[bool]], float]


def rankings(relevance: Sequence[float]) -> Iterator[list[int]]:
    """Every order of the tokens from most to least relevant; tied tokens in all their orders."""
    levels = sorted(set(relevance), reverse=True)
    tied = [[t for t, r in enumerate(relevance) if r == level] for level in levels]
    for orders in product(*(permutations(group) for group in tied)):
        yield list(chain(*orders))


def mean(values: Iterator[Fraction]) -> float:
    """The mean, exact until the last step."""
    found = list(values)
    return float(sum(found) / len(found))


def pg(relevance: Sequence[float], truth: Sequence[bool], k: int = 2) -> float:
    """Pointing game: 1 if one of the k most relevant tokens is in the ground truth."""
    return mean(Fraction(any(truth[t] for t in ranking[:k])) for ranking in rankings(relevance))


def mrr(relevance: Sequence[float], truth: Sequence[bool]) -> float:
    """Reciprocal rank of the first token of the ground truth, the most relevant token having rank 1."""
    return mean(
        Fraction(1, min(rank for rank, t in enumerate(ranking, start=1) if truth[t])) for ranking in rankings(relevance)
    )


def rma(relevance: Sequence[float], truth: Sequence[bool]) -> float:
    """Relevance mass accuracy: the ground truth's share of the positive relevance, 0 where nothing is positive."""
    inside = total = Fraction(0)
    for r, is_truth in zip(relevance, truth, strict=True):
        if r > 0:
            total += Fraction(r)
            inside += Fraction(r) if is_truth else 0
    return float(inside / total) if total else 0.0


def pta(relevance: Sequence[float], truth: Sequence[bool]) -> float:
    """Per-token accuracy: the share of tokens that are positive inside the ground truth, not positive outside."""
    right = 0
    for r, is_truth in zip(relevance, truth, strict=True):
        if (r > 0) == bool(is_truth):
            right += 1
    return right / len(relevance)


def iou(relevance: Sequence[float], truth: Sequence[bool]) -> float:
    """Intersection over union of the positive tokens and the ground truth."""
    positive = {t for t, r in enumerate(relevance) if r > 0}
    wanted = {t for t, is_truth in enumerate(truth) if is_truth}
    return len(positive & wanted) / len(positive | wanted)


def top1(relevance: Sequence[float], truth: Sequence[bool]) -> float:
    """Whether the most relevant token is in the ground truth."""
    return mean(Fraction(truth[ranking[0]]) for ranking in rankings(relevance))


ANSWERS: dict[str, Metric] = {"IoU": iou, "top-1": top1}
METRICS: dict[str, Metric] = {"PG2": pg, "MRR": mrr, "RMA": rma, "PTA": pta}
