"""How well a relevance finds the tokens it should: PGk, MRR, RMA and PTA (Arras 2025 §3.3).

Each metric compares the relevance of one text's tokens, special tokens included, with its ground truth. Those here are
numbers from 0 to 1, the higher the better. A rank metric is the expected value over all orders of tied tokens, exactly,
so that a constant relevance scores as chance, wherever the ground truth stands in the text.

A metric of your own is a function of the same two arguments under :func:`metric`; it then stands in every benchmark
with a ground truth, in its tables, captions, rankings, tests and histograms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any, Literal, SupportsFloat, TypeVar

from lrpx._registry import Registry
from lrpx.errors import InputError
from lrpx.metrics._metric import Metric

Relevance = Iterable[SupportsFloat]
"""``[T]`` finite numbers of any size: a list, a numpy array, a torch tensor of any precision."""
Truth = Iterable[bool]
"""``[T]`` booleans, True at the tokens of the ground truth, of which there is at least one."""

METRICS: Registry[Metric] = Registry("metric", InputError, "lrpx.metrics")
"""The metrics by name: those of Arras 2025, Table 2, in its order, those of other packages (entry points
``lrpx.metrics``), and yours."""

Measure = TypeVar("Measure", bound=Callable[..., float])


def metric(
    name: str, caption: str, range: tuple[float, float] = (0.0, 1.0), better: Literal["higher", "lower"] = "higher"
) -> Callable[[Measure], Measure]:
    """Register a function of relevance and ground truth as a metric; it stays the function it was.

    Args:
        name: how tables call it.
        caption: what it says, as it goes on after "name: "; ``{truth}`` is what a benchmark looks for ("the subject").
        range: the least and the largest value; ``math.inf`` where there is none.
        better: which values are the better ones.

    Raises:
        InputError: another metric has the name, or there is no such range or direction.
    """

    def register(measure: Measure) -> Measure:
        METRICS.add(name, Metric(name, caption, *range, better, measure), measure.__module__)
        return measure

    return register


@metric("PG2", "is one of the two tokens of highest relevance {truth}’s?")
def pg(relevance: Relevance, truth: Truth, k: int = 2) -> float:
    """Pointing game: 1 if one of the k most relevant tokens is in the ground truth, else 0.

    If the k-th place falls into a group of n tied tokens, d places of which are within the first k, and m of the n are
    in the ground truth (and none before them is), it is ``1 − C(n−m, d) / C(n, d)``.

    Args:
        relevance: ``[T]``, finite.
        truth: ``[T]``, boolean.
        k: how many tokens may be pointed at, from 1 up; more than T count as T.

    Raises:
        InputError: the shapes, types or values do not fit.

    >>> pg([0.1, 0.9, 0.5], [False, False, True]), pg([0.1, 0.9, 0.5], [True, False, False])
    (1.0, 0.0)
    >>> pg([0.0, 0.0, 0.0, 0.0], [True, False, False, False])  # two of four places
    0.5
    """
    if k < 1:
        raise InputError(f"the pointing game points at k = {k} tokens; give a k of 1 or more")
    before, tied, hits = _first(*_read(relevance, truth))
    drawn = min(tied, max(0, k - before))
    return 1.0 - math.comb(tied - hits, drawn) / math.comb(tied, drawn)


@metric("MRR", "one over {truth}’s best rank.")
def mrr(relevance: Relevance, truth: Truth) -> float:
    """Reciprocal rank, 1 / r, of the ground truth's most relevant token; the most relevant token of all has r = 1.

    If that token is one of n tied tokens, m of which are in the ground truth, and b tokens are more relevant, it is
    ``Σ_j P(j) / (b + j)``, where ``P(j) = C(n−j, m−1) / C(n, m)`` is the probability that the first of the m is at
    place j of the n. (Its mean over samples is the "mean" in mean reciprocal rank.)

    Args:
        relevance: ``[T]``, finite.
        truth: ``[T]``, boolean.

    Raises:
        InputError: the shapes, types or values do not fit.

    >>> mrr([0.1, 0.9, 0.5], [True, False, True])
    0.5
    >>> mrr([0.0, 0.0], [True, False])  # rank 1 or 2
    0.75
    """
    before, tied, hits = _first(*_read(relevance, truth))
    orders = math.comb(tied, hits)
    places = range(1, tied - hits + 2)
    return math.fsum(math.comb(tied - place, hits - 1) / orders / (before + place) for place in places)


@metric("RMA", "share of the positive relevance that is on {truth}.")
def rma(relevance: Relevance, truth: Truth) -> float:
    """Relevance mass accuracy: the share of the positive relevance that falls on the ground truth; 0 if there is none.

    Args:
        relevance: ``[T]``, finite.
        truth: ``[T]``, boolean.

    Raises:
        InputError: the shapes, types or values do not fit.

    >>> rma([3.0, -5.0, 1.0], [True, True, False])
    0.75
    """
    values, inside = _read(relevance, truth)
    largest = max(values)
    if largest <= 0:
        return 0.0
    mass = [max(value, 0.0) / largest for value in values]  # in [0, 1], so that no sum overflows
    return math.fsum(compress(mass, inside)) / math.fsum(mass)


@metric("PTA", "share of tokens whose sign is right, positive on {truth} alone.")
def pta(relevance: Relevance, truth: Truth) -> float:
    """Per-token accuracy: the share of tokens that are in the ground truth just if their relevance is above 0.

    Args:
        relevance: ``[T]``, finite.
        truth: ``[T]``, boolean.

    Raises:
        InputError: the shapes, types or values do not fit.

    >>> pta([3.0, 0.0, 1.0, -1.0], [True, True, False, False])
    0.5
    """
    values, inside = _read(relevance, truth)
    return sum((value > 0) == hit for value, hit in zip(values, inside, strict=True)) / len(values)


def iou(relevance: Relevance, truth: Truth) -> float:
    """Intersection over union of the tokens of positive relevance and the ground truth (Achtibat et al. 2024, §4.3; of
    an answer in its context, give the context's tokens alone).

    Args:
        relevance: ``[T]``, finite.
        truth: ``[T]``, boolean.

    Raises:
        InputError: the shapes, types or values do not fit.

    >>> iou([3.0, 0.5, -1.0, 0.0], [True, False, False, True])
    0.3333333333333333
    """
    values, inside = _read(relevance, truth)
    found = [value > 0 for value in values]
    both = sum(a and b for a, b in zip(found, inside, strict=True))
    return both / sum(a or b for a, b in zip(found, inside, strict=True))


def top1(relevance: Relevance, truth: Truth) -> float:
    """Whether the most relevant token is in the ground truth: the pointing game with k = 1, ties in expectation.

    >>> top1([1.0, 1.0, 0.0], [True, False, False])
    0.5
    """
    return pg(relevance, truth, 1)


ANSWERS: Mapping[str, Metric] = {
    "IoU": Metric(
        "IoU", "positive relevance against {truth}: intersection over union of the tokens.", 0.0, 1.0, "higher", iou
    ),
    "top-1": Metric("top-1", "is the most relevant token one of {truth}’s?", 0.0, 1.0, "higher", top1),
}
"""The metrics of answers in their context (Achtibat et al. 2024, Table 2)."""


def _first(values: list[float], inside: list[bool]) -> tuple[int, int, int]:
    """Where the ground truth comes first: ``(tokens above, tokens tied there, those of them in the ground truth)``."""
    found = [*compress(values, inside)]
    highest = max(found)
    return sum(value > highest for value in values), values.count(highest), found.count(highest)


def _read(relevance: Relevance, truth: Truth) -> tuple[list[float], list[bool]]:
    """Both as plain lists of one length, checked."""
    values = _plain(relevance, {float, int}, "a metric takes the relevance of one text: give [T] numbers, one a token")
    inside = _plain(truth, {bool}, "the ground truth is a mask, not positions: give [T] booleans, True at its tokens")
    if len(values) != len(inside):
        raise InputError(
            f"the relevance has {len(values)} tokens and the ground truth {len(inside)}; give one of each for every "
            "token, special tokens included"
        )
    if True not in inside:
        raise InputError("no token is in the ground truth, so nothing can be right; leave such samples out")
    if not all(map(math.isfinite, values)):
        raise InputError("the relevance holds NaN or infinity; explain with another dtype, such as float32")
    return values, inside


def _plain(values: object, kinds: set[type], wanted: str) -> list[Any]:
    """A list of Python's own numbers, the same to the last bit; numpy and torch know how to make theirs."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, Iterable):
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        if {*map(type, plain)} <= kinds:
            return plain
    raise InputError(wanted)
