"""How good an explanation of an image is: by what the model says of images parts of which are covered, by a mask of the
object, or by the quadrant of a mosaic.

The ``N`` **cells** of an image are what is covered at once, pixels or patches. The perturbation metrics are of the kind
of :mod:`lrpx.metrics._perturbation`, over cells in place of tokens, in tenths of them, so that all of them ask for the
same images. A :class:`SetMetric` counts in each image and divides at the end, for a mean of ratios is not the ratio of
sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from lrpx._registry import Registry
from lrpx.errors import InputError
from lrpx.metrics._ground_truth import rma
from lrpx.metrics._metric import Metric
from lrpx.metrics._perturbation import (
    Curve,
    Given,
    Numbers,
    PerturbationMetric,
    Plan,
    Sets,
    _Area,
    even,
    least_relevant_first,
    most_relevant_first,
    trapezoid,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS: Final = 10
"""Steps of the curves: tenths of the cells."""
COUNTS: Final = ("inside", "outside", "missed", "free")
"""Of pixels: found in the object, found beside it, in the object and not found, and neither."""

IMAGE_METRICS: Registry[Metric] = Registry("metric", InputError, "lrpx.image_metrics")
"""The metrics of ``lrpx benchmark pixels`` by name: ours, and those of other packages."""
MOSAIC_METRICS: Registry[Metric] = Registry("metric", InputError)
"""The metrics of ``lrpx benchmark mosaics`` by name: of the relevance of the pixels and of those of the quadrant."""


@dataclass(frozen=True)
class SetMetric(Metric):
    """A metric of a whole set of images with masks: called with the sum of what is counted in each.

    Args:
        counts: from the relevance ``[N]`` and the mask ``[N]`` of an image to what is counted in it, ``[K]``.
    """

    counts: Callable[[Numbers, Sets], Numbers] = field(default=lambda *_: np.zeros(0), compare=False, repr=False)

    def describe(self) -> dict[str, Any]:
        """See :meth:`Metric.describe <lrpx.metrics.Metric.describe>`."""
        plain = super().describe()
        del plain["counts"]
        return plain


# --------------------------------------------------------------------------------- perturbation


def _tenths(order: Callable[..., Curve], given: Given) -> Curve:
    """One tenth to nine tenths of the cells; of fewer than ten cells each number of them."""
    places = even(len(given), STEPS)
    return order(given, places[1:-1] if len(places) > 2 else places)


def _area_of_tenths(given: Given, values: Numbers, order: Callable[..., Curve]) -> float:
    curve = _tenths(order, given)
    points, places = curve.points(values), curve.counts.astype(np.float64)
    span = float(places[-1] - places[0])
    return trapezoid(points, places) / span if span else float(points[0])


def positive_sets(given: Given) -> Sets:
    """The cells covered at 0.1, …, 0.9, the most relevant first."""
    return _tenths(most_relevant_first, given).sets


def negative_sets(given: Given) -> Sets:
    """The same, the least relevant first."""
    return _tenths(least_relevant_first, given).sets


def positive(given: Given, values: Numbers) -> float:
    """Positive perturbation (Chefer et al. 2021): the area under the nine points over their span, so that a value that
    never changes has itself as its area."""
    return _area_of_tenths(given, values, most_relevant_first)


def negative(given: Given, values: Numbers) -> float:
    """Negative perturbation: the same, the least relevant first."""
    return _area_of_tenths(given, values, least_relevant_first)


def everything(given: Given) -> Sets:
    """All cells covered at once."""
    return np.ones((1, len(given)), dtype=bool)


def incompleteness(total: float, whole: float) -> float:
    """How far a sum is from what it should add up to, ``|Σ − Δ| / (|Σ| + |Δ|)``: 0 where it does, 1 where the two have
    other signs or one is nothing.

    >>> incompleteness(2.0, 2.0), incompleteness(1.0, 3.0), incompleteness(-1.0, 3.0), incompleteness(0.0, 0.0)
    (0.0, 0.5, 1.0, 0.0)
    """
    size = abs(total) + abs(whole)
    return abs(total - whole) / size if size else 0.0


def completeness_error(given: Given, values: Numbers) -> float:
    """:func:`incompleteness` of the relevance, for ``Δ`` what the value loses when everything is covered.

    Integrated Gradients promises 0 for its own baseline; of the LRP family a part is in class tokens, positions and
    biases, which no pixel has: their ledger adds up, not their pixels.
    """
    return incompleteness(math.fsum(given.relevance), given.full - float(values[0]))


_MOST, _LEAST = _Area("most"), _Area("least")
_SHOWN = _Area("most", insert=True)


def _both(given: Given) -> Sets:
    return np.concatenate([_LEAST.sets(given), _MOST.sets(given)])


def delta_a(given: Given, values: Numbers) -> float:
    """``ΔA = A_LeRF − A_MoRF`` (Achtibat et al. 2024, App. B.2)."""
    count = len(_LEAST.sets(given))
    return _LEAST.value(given, values[:count]) - _MOST.value(given, values[count:])


def _add(
    name: str,
    caption: str,
    plan: Plan,
    measure: Callable[[Given, Numbers], float],
    better: Literal["higher", "lower"],
    *,
    reads: str = "",
    range: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    made = PerturbationMetric(name, caption, *range, better, measure, plan, reads)
    IMAGE_METRICS.add(name, made, __name__)


_FIRST = "share of the images whose explained class stays the first, while the {} relevant {{cells}} are covered, from "
_FIRST += "0.1 to 0.9 of them."
_add(
    "positive perturbation", _FIRST.format("most"), positive_sets, positive, "lower", reads="first", range=(0.0, 1.0)
)  # fmt: skip
_add(
    "negative perturbation", _FIRST.format("least"), negative_sets, negative, "higher", reads="first", range=(0.0, 1.0)
)  # fmt: skip
_UNDER = "area under the {} while the {} relevant {{cells}} are {} one tenth after another, over their number."
_add("A MoRF", _UNDER.format("value", "most", "covered"), _MOST.sets, _MOST.value, "lower")
_add("A LeRF", _UNDER.format("value", "least", "covered"), _LEAST.sets, _LEAST.value, "higher")
_add("ΔA", "A LeRF less A MoRF.", _both, delta_a, "higher")
_add(
    "deletion", _UNDER.format("probability", "most", "covered"), _MOST.sets, _MOST.value, "lower",
    reads="probability", range=(0.0, 1.0),
)  # fmt: skip
_add(
    "insertion", _UNDER.format("probability", "most", "shown in a covered image"), _SHOWN.sets, _SHOWN.value, "higher",
    reads="probability", range=(0.0, 1.0),
)  # fmt: skip
_add(
    "completeness error",
    "how far the relevance is from adding up to what the logit loses when all {cells} are covered.",
    everything, completeness_error, "lower", reads="logit", range=(0.0, 1.0),
)  # fmt: skip


# --------------------------------------------------------------------------------- segmentation


def confusion(relevance: Numbers, mask: Sets) -> Numbers:
    """:data:`COUNTS` of an image, where found is what is above the mean relevance (Chefer et al. 2021, §4).

    >>> confusion(np.array([3.0, 2.0, 0.0, 0.0]), np.array([True, False, False, True])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    found = relevance > math.fsum(relevance) / len(relevance)
    each = (found & mask, found & ~mask, ~found & mask, ~found & ~mask)
    return np.array([np.count_nonzero(one) for one in each], dtype=np.float64)


def pixel_accuracy(counts: Sequence[float] | Numbers) -> float:
    """Share of all pixels that are where they should be, of summed :data:`COUNTS`.

    >>> pixel_accuracy([3, 1, 1, 5])
    0.8
    """
    inside, outside, missed, free = counts
    return float((inside + free) / (inside + outside + missed + free))


def mean_iou(counts: Sequence[float] | Numbers) -> float:
    """Mean of the intersection over union of the object's pixels and of all others; a class that nowhere is, neither
    found nor in a mask, has 1.

    >>> round(mean_iou([3, 1, 1, 5]), 4)  # 3/5 and 5/7
    0.6571
    """
    inside, outside, missed, free = counts
    both = ((inside, inside + outside + missed), (free, free + outside + missed))
    return float(sum(part / whole if whole else 1.0 for part, whole in both) / 2)


def average_precision(relevance: Numbers, mask: Sets) -> float:
    """Area under the precision over the recall of the object's pixels, the most relevant first, pixels of one relevance
    at once: ``Σ_n (r_n − r_{n−1}) p_n``; the share of the object where the relevance is constant.

    Raises:
        InputError: the mask has no pixel.

    >>> average_precision(np.array([3.0, 2.0, 1.0]), np.array([True, False, True]))  # (1 + 2/3) / 2
    0.8333333333333333
    """
    if not mask.any():
        raise InputError("the mask has no pixel of an object; give one that has")
    order = np.argsort(-relevance, kind="stable")
    hits = np.cumsum(mask[order])
    ends = np.append(np.flatnonzero(np.diff(relevance[order])), len(order) - 1)
    recall = np.concatenate([[0.0], hits[ends] / hits[-1]])
    return float(np.diff(recall) @ (hits[ends] / (ends + 1)))


def _precision(relevance: Numbers, mask: Sets) -> Numbers:
    return np.array([average_precision(relevance, mask), 1.0])


def mean_of_images(counts: Sequence[float] | Numbers) -> float:
    """The mean of a number of each image, from their sum and how many there are."""
    total, count = counts
    return float(total / count)


_FOUND = "found is what is above the mean relevance"
for _name, _caption, _measure, _counts in (
    ("pixel accuracy", f"share of the pixels that are found and of the object, or neither; {_FOUND}.",
     pixel_accuracy, confusion),
    ("mIoU", f"intersection over union, mean of object and all else, counted over the set; {_FOUND}.",
     mean_iou, confusion),
    ("mAP", "average precision of the object’s pixels, the most relevant first, mean over the images.",
     mean_of_images, _precision),
):  # fmt: skip
    IMAGE_METRICS.add(_name, SetMetric(_name, _caption, 0.0, 1.0, "higher", _measure, _counts), __name__)


# -------------------------------------------------------------------------------------- mosaics


def quadrant_lead(relevance: Sequence[float], quadrant: Sequence[bool]) -> float:
    """1 where the sum of the relevance in the quadrant is the largest, less for each quadrant that it ties with; needs
    the pixels of all four, ``[4 · N]``, quadrant after quadrant.

    >>> quadrant_lead([1.0, 2.0, 0.0, 0.0], [False, True, False, False])
    1.0
    """
    sums = np.asarray(relevance, dtype=np.float64).reshape(4, -1).sum(1)
    mine = np.asarray(quadrant).reshape(4, -1).all(1)
    best = sums == sums.max()
    return float((best & mine).sum() / best.sum())


for _mosaic in (
    Metric("share", "share of the positive relevance in the quadrant of the explained class; 0.25 is chance.",
           0.0, 1.0, "higher", rma),
    Metric("lead", "is the relevance of that quadrant the largest of the four? 0.25 is chance.",
           0.0, 1.0, "higher", quadrant_lead),
):  # fmt: skip
    MOSAIC_METRICS.add(_mosaic.name, _mosaic, __name__)
