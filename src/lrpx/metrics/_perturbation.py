"""How true an explanation is to the model, by what the model says when tokens are hidden.

A perturbation metric is a **plan** and a **measure**. The plan says which tokens to hide, ``[S, N]`` booleans over the
``N`` tokens that may be hidden; the measure makes one number of the ``[S]`` values that the model then has. So the
plans of many metrics, methods and samples run together, and equal sets once.

What each is called after, and what the papers leave open, is in ``docs/conventions.md``. Of ties: where tokens have the
same relevance, no order of them is right. A curve goes from before the first of them to behind the last in a straight
line, as a ROC curve does, so that a constant relevance has the same curve from both ends; what draws, draws among them.

A metric of your own is such a pair under :func:`perturbation_metric`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from lrpx._registry import Registry
from lrpx.errors import InputError
from lrpx.metrics._metric import Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Numbers = NDArray[np.float64]
Sets = NDArray[np.bool_]

STEPS: Final = 100
"""The most steps of a curve that goes token by token, unless a run says otherwise."""
CHUNK: Final = 16
"""Tokens in a chunk (You et al. 2025, App. B.1.2)."""
TENTHS: Final = 10
"""Steps of Bakish et al. 2025: fractions 0, .1, …, 1."""
PERCENTS: Final = (1, 5, 10, 20, 50)
"""The parts of the tokens, in per cent, that ERASER averages over."""
GROUPS: Final = 20
"""Groups of tokens in RISE and MAS."""
NOTHING: Final = 1e-5
"""Of a log-probability, or of its size where that is above 1: what float32 may round away in it. A curve whose ends are
no further apart has lost nothing, and what tokens lose is the same for all."""
RANDOM_PARTS: Final = (10, 20, 30, 40, 50)
"""The top parts, in per cent, of which F-Fidelity removes random parts."""
DRAWS: Final = 4
"""How often it draws one."""


@dataclass(frozen=True, eq=False)
class Given:
    """An explanation that is to be measured.

    Args:
        relevance: ``[N]``, finite, of the tokens that may be hidden, in the order of the text.
        full: the value with nothing hidden.
        steps: the most steps that a curve may have.
        name: of the sample, the seed of whatever is drawn.

    Raises:
        InputError: no tokens, or relevance that is not finite or not ``[N]``.
    """

    relevance: Numbers
    full: float = 0.0
    steps: int = STEPS
    name: str = ""

    def __post_init__(self) -> None:
        if self.relevance.ndim != 1 or not len(self.relevance) or not np.isfinite(self.relevance).all():
            raise InputError("a perturbation needs the relevance of its tokens: give [N] finite numbers, at least one")
        if self.steps < 1:
            raise InputError(f"a curve has {self.steps} steps; give at least 1")

    def __len__(self) -> int:
        return len(self.relevance)


Plan = Callable[[Given], Sets]
Measure = Callable[[Given, Numbers], float]


def _unplanned(_: Given) -> Sets:
    raise InputError("this metric was read from a record, which has no plan; register the metric to measure")


@dataclass(frozen=True)
class PerturbationMetric(Metric):
    """A metric of what a model says with tokens hidden: called with the explanation and the values ``[S]`` of its plan.

    Args:
        plan: which tokens are hidden, ``[S, N]``.
        reads: what is read at the output, one of :data:`lrpx.perturbations.READS`; what the run reads, if it is empty.
        itself: names of methods that it is made of, about which it says nothing where they do the same: hide tokens by
            the attention mask, and read the logit.
    """

    plan: Plan = field(default=_unplanned, compare=False, repr=False)
    reads: str = ""
    itself: tuple[str, ...] = ()

    def sets(self, given: Given) -> Sets:
        """The plan's sets, checked.

        Raises:
            InputError: they are no booleans ``[S, N]``, or none.
        """
        found = np.asarray(self.plan(given))
        if found.dtype != np.bool_ or found.ndim != 2 or found.shape[1] != len(given) or not len(found):
            raise InputError(
                f"the plan of {self.name} gave {found.dtype} {list(found.shape)}; give booleans [S, {len(given)}], "
                "True at the tokens that are hidden"
            )
        return found

    def describe(self) -> dict[str, Any]:
        """See :meth:`Metric.describe`."""
        plain = super().describe()
        del plain["plan"]
        return plain | {"itself": list(self.itself)}

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> PerturbationMetric:
        """See :meth:`Metric.read`."""
        base = Metric.read(described)
        itself = described.get("itself", ())
        return cls(base.name, base.caption, base.low, base.high, base.better, **_told(described, itself))


def _told(described: Mapping[str, Any], itself: Any) -> dict[str, Any]:
    return {"reads": str(described.get("reads", "")), "itself": tuple(map(str, itself))}


PERTURBATION_METRICS: Registry[PerturbationMetric] = Registry("metric", InputError, "lrpx.metrics")
"""The perturbation metrics by name: ours, those of other packages (entry points ``lrpx.metrics``), and yours."""


def perturbation_metric(
    name: str,
    caption: str,
    plan: Plan,
    *,
    range: tuple[float, float] = (-math.inf, math.inf),
    better: Literal["higher", "lower"] = "higher",
    reads: str = "",
    itself: Sequence[str] = (),
) -> Callable[[Measure], Measure]:
    """Register a function of an explanation and of the values of its plan as a metric; it stays the function it was.

    Args:
        name: how tables call it.
        caption: what it says, as it goes on after "name: ".
        plan: which tokens to hide, ``[S, N]`` booleans, from the :class:`Given`.
        range: the least and the largest value; ``math.inf`` where there is none.
        better: which values are the better ones.
        reads: what is read at the output; what the run reads, if it is empty.
        itself: names of methods that it is made of (see :class:`PerturbationMetric`).

    Raises:
        InputError: another metric has the name, or there is no such range or direction.
    """

    def register(measure: Measure) -> Measure:
        made = PerturbationMetric(name, caption, *range, better, measure, plan, reads, tuple(itself))
        PERTURBATION_METRICS.add(name, made, measure.__module__)
        return measure

    return register


# ------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve that hides tokens in an order, and what must be run to have it.

    Args:
        counts: ``[C]``, how many tokens are taken at each of its points.
        sets: ``[S, N]``, the tokens taken: the first so many, as far as no tie is cut.
        weights: ``[C, S]``: its points are ``weights @ values``.
    """

    counts: NDArray[np.int64]
    sets: Sets
    weights: Numbers

    @classmethod
    def taking(cls, key: Numbers, counts: Sequence[int] | NDArray[np.int64]) -> Curve:
        """Take the tokens of the largest key first.

        A point that cuts a group of equal keys lies on the straight line between the group's ends.

        >>> Curve.taking(np.array([1.0, 3.0, 1.0]), [0, 1, 2]).weights  # the third point cuts a tie
        array([[1. , 0. , 0. ],
               [0. , 1. , 0. ],
               [0. , 0.5, 0.5]])
        """
        wanted = np.asarray(counts, dtype=np.int64)
        order = np.argsort(-key, kind="stable")
        rank = np.empty(len(key), dtype=np.int64)
        rank[order] = np.arange(len(key))
        falls = np.flatnonzero(np.diff(key[order]) != 0) + 1
        ends = np.concatenate([[0], falls, [len(key)]])
        low = ends[np.searchsorted(ends, wanted, side="right") - 1]
        high = ends[np.searchsorted(ends, wanted, side="left")]
        sizes = np.unique(np.concatenate([low, high]))
        span = np.where(high > low, high - low, 1)
        share = (wanted - low) / span
        weights = np.zeros((len(wanted), len(sizes)))
        rows = np.arange(len(wanted))
        weights[rows, np.searchsorted(sizes, low)] += 1 - share
        weights[rows, np.searchsorted(sizes, high)] += share
        return cls(wanted, rank[None, :] < sizes[:, None], weights)

    def points(self, values: Numbers) -> Numbers:
        """``[C]``, from the values of its sets."""
        return self.weights @ values


def most_relevant_first(given: Given, counts: Sequence[int] | NDArray[np.int64]) -> Curve:
    """Takes the most relevant tokens first."""
    return Curve.taking(given.relevance, counts)


def least_relevant_first(given: Given, counts: Sequence[int] | NDArray[np.int64]) -> Curve:
    """Takes the least relevant tokens first."""
    return Curve.taking(-given.relevance, counts)


def even(count: int, steps: int) -> NDArray[np.int64]:
    """How many of ``count`` tokens are taken at each of at most ``steps`` steps, from none to all: every number, or as
    evenly spaced as whole numbers are.

    >>> even(3, 100).tolist(), even(10, 4).tolist()
    ([0, 1, 2, 3], [0, 3, 5, 8, 10])
    """
    steps = min(steps, count)
    return np.array([(2 * i * count + steps) // (2 * steps) for i in range(steps + 1)], dtype=np.int64)


def up(count: int, parts: Sequence[int], of: int) -> list[int]:
    """``⌈count · part / of⌉`` for each part, in whole numbers: 0.3 · 10 is 3.

    >>> up(10, [0, 3], 10), up(7, [1, 50], 100)
    ([0, 3], [1, 4])
    """
    return [-(-count * part // of) for part in parts]


def trapezoid(heights: Numbers, places: Numbers) -> float:
    """The area under straight lines between points."""
    return float(np.sum((heights[1:] + heights[:-1]) / 2 * np.diff(places)))


# ---------------------------------------------------------------------------------- leave-one-out


def each_alone(given: Given) -> Sets:
    """One token hidden at a time."""
    return np.eye(len(given), dtype=bool)


def pearson(a: Numbers, b: Numbers) -> float:
    """Pearson's correlation; 0 where one of the two is constant, which says nothing about the other.

    >>> round(pearson(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])), 9), pearson(np.zeros(2), np.arange(2.0))
    (1.0, 0.0)
    """
    if a.min() == a.max() or b.min() == b.max():
        return 0.0
    a, b = a - a[0], b - b[0]  # first, so that what is far from zero loses nothing
    a, b = a / np.abs(a).max(), b / np.abs(b).max()
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / size)) if size else 0.0


def ranks(values: Numbers) -> Numbers:
    """Ranks from 1, the mean of the places where values are tied.

    >>> ranks(np.array([5.0, 1.0, 5.0]))
    array([2.5, 1. , 2.5])
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return found


def is_more(difference: float, value: float) -> bool:
    """Whether values like this one differ by more than rounding (:data:`NOTHING`)."""
    return difference > NOTHING * max(1.0, abs(value))


def _lost(given: Given, values: Numbers) -> Numbers:
    """``f(x) − f(x without i)``; zeros where these differ by no more than rounding (:data:`NOTHING`)."""
    lost: Numbers = given.full - values
    return lost if is_more(float(np.ptp(lost)), given.full) else np.zeros_like(lost)


_ITSELF: Final = ("leave-one-out",)


@perturbation_metric(
    "LOO Pearson",
    "correlation of the relevance with what the value loses when each token alone is hidden.",
    each_alone,
    range=(-1.0, 1.0),
    itself=_ITSELF,
)
def loo_pearson(given: Given, values: Numbers) -> float:
    """Pearson's correlation of relevance and ``f(x) − f(x without i)`` (You et al. 2025, §4.1); 0 of a constant."""
    return pearson(given.relevance, _lost(given, values))


@perturbation_metric(
    "LOO Pearson Σ",
    "the same after both are divided by their sums, which turns the sign where a sum is negative.",
    each_alone,
    range=(-1.0, 1.0),
    itself=_ITSELF,
)
def loo_pearson_normalised(given: Given, values: Numbers) -> float:
    """The same with both "normalized to sum to one", to the letter: a negative sum turns the sign; 0 where one is 0."""
    lost = _lost(given, values)
    sign = np.sign(math.fsum(given.relevance)) * np.sign(math.fsum(lost))
    return float(sign) * pearson(given.relevance, lost)


@perturbation_metric(
    "LOO Spearman",
    "rank correlation of the relevance with what the value loses when each token alone is hidden.",
    each_alone,
    range=(-1.0, 1.0),
    itself=_ITSELF,
)
def loo_spearman(given: Given, values: Numbers) -> float:
    """Spearman's correlation of the two; tied values have the mean of their ranks."""
    return pearson(ranks(given.relevance), ranks(_lost(given, values)))


# ------------------------------------------------------------------------------- orders and areas


@dataclass(frozen=True)
class _Area:
    """The area, or the mean, under a curve that takes tokens in an order.

    Args:
        first: the ``"most"`` or the ``"least"`` relevant.
        insert: whether what is taken is shown, and all else hidden.
        chunk: tokens that are taken together, next to each other.
        mean: the mean of the points, in place of the area.
    """

    first: Literal["most", "least"]
    insert: bool = False
    chunk: int = 1
    mean: bool = False

    def curve(self, given: Given) -> Curve:
        """Over tokens, or over chunks, whose relevance is the sum of their tokens'."""
        starts = np.arange(0, len(given), self.chunk)
        key = given.relevance if self.chunk == 1 else np.add.reduceat(given.relevance, starts)
        return Curve.taking(key if self.first == "most" else -key, even(len(key), given.steps))

    def sets(self, given: Given) -> Sets:
        """The hidden sets."""
        taken = np.repeat(self.curve(given).sets, self.chunk, axis=1)[:, : len(given)]
        return ~taken if self.insert else taken

    def value(self, given: Given, values: Numbers) -> float:
        """The mean of the points, or ``A``."""
        curve = self.curve(given)
        points = curve.points(values)
        if self.mean:
            return math.fsum(points) / len(points)
        return trapezoid(points, curve.counts.astype(np.float64)) / int(curve.counts[-1])


def _register_areas(name: str, title: str, told: str, **how: Any) -> None:
    """Three metrics: most relevant first, least relevant first, and the difference that is the better the higher."""
    most, least = _Area("most", **how), _Area("least", **how)
    good, bad = (most, least) if most.insert else (least, most)
    order = {most: "most", least: "least"}
    for area in (most, least):
        called = "MoRF" if area is most else "LeRF"
        direction: Literal["higher", "lower"] = "higher" if area is good else "lower"
        caption = told.format(order=order[area])
        perturbation_metric(f"{name} {called}", caption, area.sets, better=direction)(area.value)

    def both(given: Given) -> Sets:
        return np.concatenate([good.sets(given), bad.sets(given)])

    def difference(given: Given, values: Numbers) -> float:
        count = len(good.sets(given))
        return good.value(given, values[:count]) - bad.value(given, values[count:])

    ends = ("MoRF", "LeRF") if good is most else ("LeRF", "MoRF")
    perturbation_metric(f"{title}", f"{name} {ends[0]} less {name} {ends[1]}.", both)(difference)


_register_areas(
    "AOPC", "AOPC Δ", "mean value while the {order} relevant tokens are hidden one after another.", mean=True
)
_register_areas(
    f"AOPC{CHUNK}",
    f"AOPC{CHUNK} Δ",
    f"mean value while the {{order}} relevant chunks of {CHUNK} tokens are hidden one after another.",
    mean=True,
    chunk=CHUNK,
)
_register_areas(
    "A flipping",
    "ΔA flipping",
    "area under the value while the {order} relevant tokens are hidden one after another, over their number.",
)
_register_areas(
    "A insertion",
    "ΔA insertion",
    "area under the value while all are hidden and the {order} relevant tokens are shown one after another, over their "
    "number.",
    insert=True,
)

# ------------------------------------------------------------------------------ generation, pruning

_FRACTIONS: Final = np.arange(TENTHS + 1) / TENTHS


def _generation(given: Given) -> Curve:
    return most_relevant_first(given, up(len(given), range(TENTHS + 1), TENTHS))


def _generation_sets(given: Given) -> Sets:
    return ~_generation(given).sets


def _pruning(given: Given) -> Curve:
    return least_relevant_first(given, up(len(given), range(TENTHS + 1), TENTHS))


def _pruning_sets(given: Given) -> Sets:
    return _pruning(given).sets


_SHOWN = "while all tokens are hidden and the most relevant are shown, tenth by tenth"
_PRUNED = "while the least relevant tokens are hidden, tenth by tenth"
_ERROR = "of the logits to those of the whole text (of all classes, or of the explained token)"


@perturbation_metric(
    "AUAC generation",
    f"area under the explained probability {_SHOWN}.",
    _generation_sets,
    range=(0.0, 1.0),
    reads="probability",
)
@perturbation_metric(
    "AU-MSE generation",
    f"area under the squared distance {_ERROR} {_SHOWN}.",
    _generation_sets,
    range=(0.0, math.inf),
    better="lower",
    reads="squared-error",
)
def generation(given: Given, values: Numbers) -> float:
    """Area over the fractions 0, .1, …, 1 of tokens that are shown, the most relevant first (Bakish et al. 2025)."""
    return trapezoid(_generation(given).points(values), _FRACTIONS)


@perturbation_metric(
    "AUAC pruning",
    f"area under the explained probability {_PRUNED}.",
    _pruning_sets,
    range=(0.0, 1.0),
    reads="probability",
)
@perturbation_metric(
    "AU-MSE pruning",
    f"area under the squared distance {_ERROR} {_PRUNED}.",
    _pruning_sets,
    range=(0.0, math.inf),
    better="lower",
    reads="squared-error",
)
def pruning(given: Given, values: Numbers) -> float:
    """Area over the fractions 0, .1, …, 1 of tokens that are hidden, the least relevant first (Bakish et al. 2025)."""
    return trapezoid(_pruning(given).points(values), _FRACTIONS)


# ------------------------------------------------------------------------------------------ ERASER


def _top(given: Given) -> Curve:
    return most_relevant_first(given, up(len(given), PERCENTS, 100))


def _top_sets(given: Given) -> Sets:
    return _top(given).sets


def _all_but_top_sets(given: Given) -> Sets:
    return ~_top(given).sets


_PARTS = "mean over the top 1, 5, 10, 20 and 50 % of the tokens"


@perturbation_metric(
    "comprehensiveness",
    f"what the explained probability loses without the most relevant tokens, {_PARTS}.",
    _top_sets,
    range=(-1.0, 1.0),
    reads="probability",
)
@perturbation_metric(
    "sufficiency",
    f"what the explained probability loses with the most relevant tokens alone, {_PARTS}.",
    _all_but_top_sets,
    range=(-1.0, 1.0),
    better="lower",
    reads="probability",
)
def mean_loss(given: Given, values: Numbers) -> float:
    """``f(x) −`` the mean of the values at the five parts (DeYoung et al. 2020)."""
    return given.full - math.fsum(_top(given).points(values)) / len(PERCENTS)


# ------------------------------------------------------------------------------------- RISE and MAS


def _in_groups(given: Given) -> Curve:
    """As :func:`numpy.array_split` cuts them: the first groups are the larger ones."""
    sizes = [len(part) for part in np.array_split(given.relevance, min(GROUPS, len(given)))]
    return most_relevant_first(given, np.cumsum([0, *sizes]))


def _group_sets(given: Given) -> Sets:
    return _in_groups(given).sets


def _falling(points: Numbers) -> Numbers:
    """``(v − v_last) / |v_first − v_last|`` in [0, 1], never rising; 1 where the ends are equal but for rounding
    (:data:`NOTHING`): nothing is lost."""
    size = abs(float(points[0] - points[-1]))
    is_curve = is_more(size, float(points[0]))
    scaled = np.clip((points - points[-1]) / size, 0.0, 1.0) if is_curve else np.ones_like(points)
    return np.minimum.accumulate(scaled)


def _under(heights: Numbers) -> float:
    return trapezoid(heights, np.linspace(0.0, 1.0, len(heights)))


@perturbation_metric(
    "RISE",
    f"area under the scaled log-probability, from 1 to 0 and never rising, while the {GROUPS} most relevant groups of "
    "tokens are hidden one after another.",
    _group_sets,
    range=(0.0, 1.0),
    better="lower",
    reads="log-probability",
)
def rise(given: Given, values: Numbers) -> float:
    """Area under the running minimum of the scaled curve (as FlashTrace has it)."""
    return _under(_falling(_in_groups(given).points(values)))


@perturbation_metric(
    "MAS",
    "the same with the distance between the curve and the share of the relevance that is left added to it, scaled; it "
    "is hard on signed relevance.",
    _group_sets,
    range=(0.0, 1.0),
    better="lower",
    reads="log-probability",
)
def mas(given: Given, values: Numbers) -> float:
    """Area under ``clip(c + |c − d|)``, scaled from its least to its largest point, where ``c`` is RISE's curve and
    ``d`` the share of the relevance that is not hidden yet, a straight line where the relevance sums to nothing or less
    (as FlashTrace has it)."""
    curve = _in_groups(given)
    response = _falling(curve.points(values))
    total = math.fsum(given.relevance)
    taken = curve.weights @ (curve.sets @ given.relevance)
    density = 1.0 - taken / total if total > 0 else np.linspace(1.0, 0.0, len(response))
    corrected = np.clip(response + np.abs(response - density), 0.0, 1.0)
    low, high = float(corrected.min()), float(corrected.max())
    return _under((corrected - low) / (high - low)) if high > low else 0.5


# -------------------------------------------------------------------------------------- F-Fidelity


def _random_parts(given: Given, top: bool) -> Sets:
    """``[5 · DRAWS, N]``: of the most relevant part, or of all others, a random half each."""
    count = len(given)
    seed = int.from_bytes(hashlib.sha256(f"{given.name}\n{count}".encode()).digest())
    rng = np.random.Generator(np.random.PCG64(seed))
    found = np.zeros((len(RANDOM_PARTS) * DRAWS, count), dtype=bool)
    draws = rng.random((len(found), 2, count))  # the same for every method
    for i, (tied, drawn) in enumerate(draws):
        size = min(up(count, [RANDOM_PARTS[i // DRAWS]], 100)[0], max(1, count - 1))
        order = np.lexsort((tied, -given.relevance))
        part = order[:size] if top else order[size:]
        found[i, part[np.argsort(drawn[part])][: -(-len(part) // 2)]] = True
    return found


def _from_the_top(given: Given) -> Sets:
    return _random_parts(given, top=True)


def _from_the_rest(given: Given) -> Sets:
    return _random_parts(given, top=False)


_DRAWN = f"over {DRAWS} draws for each of the top 10, 20, 30, 40 and 50 %, without the paper’s fine-tuning"


@perturbation_metric(
    "random-part fidelity+",
    f"mean loss of the value without a random half of the most relevant tokens, {_DRAWN}.",
    _from_the_top,
)
@perturbation_metric(
    "random-part fidelity−",
    f"mean loss of the value without a random half of all other tokens, {_DRAWN}.",
    _from_the_rest,
    better="lower",
)
def mean_random_loss(given: Given, values: Numbers) -> float:
    """``f(x) −`` the mean value (the removal of F-Fidelity, Zheng et al. 2024, without its fine-tuning)."""
    return given.full - math.fsum(values) / len(values)
