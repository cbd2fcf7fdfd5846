"""The numbers of a run that hides tokens: what each method earns by each metric, how sure that is, and which metrics
agree.

Everything is over all samples that were explained, whether the model predicts them correctly or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from lrpx.benchmarks._summary import Score, select
from lrpx.errors import InputError, ResultFileError
from lrpx.metrics import PerturbationMetric
from lrpx.metrics._metric import ROUNDING
from lrpx.metrics._statistics import holm, interval, paired_test

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from lrpx.metrics import Metric
    from lrpx.runs import Store

ORDERS: Final = ("most", "least")
"""Of the curves that are drawn."""
SURE: Final = 0.05
"""The adjusted p-value below which two methods are told apart."""
CHANCE: Final[tuple[str, ...]] = ("random", "position", "centre")
"""Methods that no explanation should lose to."""
_FEWEST: Final = 3
"""Methods whose order two metrics can agree about."""


@dataclass(frozen=True)
class Variant:
    """A metric in one way and reading.

    Args:
        name: of its column.
        metric: the metric.
        way: how tokens are hidden.
        reads: what is read at the output.
    """

    name: str
    metric: PerturbationMetric
    way: str
    reads: str

    def says_of(self, method: str) -> bool:
        """Whether it says something of a method: leave-one-out is the loss of the logit by the attention mask, and
        nothing is compared with itself."""
        return method not in self.metric.itself or (self.way, self.reads) != ("attention-mask", "logit")


def variants(metrics: Iterable[Metric], ways: Sequence[str], reads: Sequence[str]) -> list[Variant]:
    """Every metric in every way and reading; what there is only one of is not named.

    >>> from lrpx.metrics import PERTURBATION_METRICS as known
    >>> [each.name for each in variants([known["AOPC Δ"], known["RISE"]], ["unk"], ["logit", "probability"])]
    ['AOPC Δ [logit]', 'AOPC Δ [probability]', 'RISE']
    """
    found = []
    for metric in metrics:
        assert isinstance(metric, PerturbationMetric)
        for way in ways:
            for read in [metric.reads] if metric.reads else reads:
                named = [way] if len(ways) > 1 else []
                named += [read] if len(reads) > 1 and not metric.reads else []
                name = f"{metric.name} [{', '.join(named)}]" if named else metric.name
                found.append(Variant(name, metric, way, read))
    return found


Described: TypeAlias = tuple[str, tuple[str, ...], tuple[Variant, ...]]
"""A run's model, its methods and its variants."""


@dataclass(frozen=True)
class Verdict:
    """Which explanation to believe.

    Args:
        method: the one of the best mean rank.
        ranks: each method's mean rank over the variants, 1 for the best; ties have the mean.
        leads: by how many of the variants it has the best mean.
        level: by how many it has not, and is not told apart from the best.
        apart: by how many it is better than at least one other method, and told apart.
        over: for each method that is chance, by how many variants it is better, and told apart.
        variants: how many there are, of those that say something of it.
    """

    method: str
    ranks: Mapping[str, float]
    leads: int
    level: int
    apart: int
    over: Mapping[str, int]
    variants: int

    @property
    def level_ranks(self) -> list[str]:
        """The other methods of the same mean rank."""
        best = self.ranks[self.method] + ROUNDING
        return [name for name, rank in self.ranks.items() if name != self.method and rank <= best]


@dataclass(frozen=True)
class Summary:
    """The numbers of a run, by the names of variants and methods.

    Args:
        model: as the run names it.
        methods: in the order of the run.
        labels: how tables spell them.
        variants: in the order of the run.
        samples: how many were explained.
        correct: how many of those with a label the model predicts, and how many have one.
        scores: ``[variant][method]``: mean and interval; None where the metric is made of the method.
        p_values: ``[variant][a, b]``: paired sign-flip test, or of a number of a whole set a test that swaps samples,
            adjusted by Holm over all pairs within the variant.
        agreement: ``[variant][variant]``: Spearman's correlation of how the two order the methods, the better first,
            mean over the samples; None where there are fewer than three methods to order.
        curves: ``[order][method]``: the mean value while tokens are hidden in an order, from none to all.
        curve_of: the way and the reading of the curves.
        verdict: which explanation to believe; None for one method alone.
    """

    model: str
    methods: tuple[str, ...]
    labels: Mapping[str, str]
    variants: tuple[Variant, ...]
    samples: int
    correct: tuple[int, int]
    scores: Mapping[str, Mapping[str, Score | None]]
    p_values: Mapping[str, Mapping[tuple[str, str], float]]
    agreement: Mapping[str, Mapping[str, float | None]]
    curves: Mapping[str, Mapping[str, tuple[float, ...]]]
    curve_of: tuple[str, str]
    verdict: Verdict | None

    def rank(self, variant: str, method: str) -> int | None:
        """How many methods have a better mean; None where the metric is made of the method."""
        metric = next(each.metric for each in self.variants if each.name == variant)
        mine = self.scores[variant][method]
        others = (other for other in self.scores[variant].values() if other is not None)
        return None if mine is None else sum(metric.beats(other.mean, mine.mean) for other in others)

    def best(self, variant: str) -> list[str]:
        """The method with the best mean, or those that share it."""
        return [method for method in self.methods if self.rank(variant, method) == 0]

    def p_value(self, variant: str, a: str, b: str) -> float | None:
        """The adjusted p-value of the difference of two methods."""
        pairs = self.p_values[variant]
        return pairs.get((a, b), pairs.get((b, a)))

    def against_best(self, variant: str, method: str) -> float | None:
        """The adjusted p-value of a method's difference to the best one; None for the best itself."""
        best = self.best(variant)
        return None if method in best else self.p_value(variant, best[0], method)


def summarise(store: Store) -> Summary:
    """Read a run's rows and compute its tables.

    Raises:
        ResultFileError: the folder holds no readable run of this kind, or no rows.
    """
    model, methods, found = described(store)
    columns = [f"{each.name}/{method}" for each in found for method in methods]
    drawn = [f"curve {order}/{method}" for order in ORDERS for method in methods]
    rows = select(store, ["correct", *columns, *drawn])
    values = {each.name: {m: _values(rows[f"{each.name}/{m}"]) for m in methods} for each in found}
    scores = {name: {m: score(each) for m, each in table.items()} for name, table in values.items()}
    curve_of = _names(store, "perturbation")[0], _names(store, "read_out")[0]
    return tabulated(store, (model, methods, found), rows, values, scores, ORDERS, curve_of)


def tabulated(
    store: Store,
    of: Described,
    rows: pl.DataFrame,
    values: Mapping[str, Mapping[str, NDArray[np.float64] | None]],
    scores: Mapping[str, Mapping[str, Score | None]],
    orders: Sequence[str],
    curve_of: tuple[str, str],
    p_values: Mapping[str, Mapping[tuple[str, str], float]] | None = None,
) -> Summary:
    """The summary of a run.

    Args:
        store: the run's folder.
        of: the model, the methods and the variants.
        rows: the columns ``correct``, and ``curve order/method`` for each of ``orders``.
        values: ``[variant][method]``: a number for each sample; None where the metric is made of the method.
        scores: likewise their means and intervals.
        orders: of the curves.
        curve_of: the way and the reading of the curves.
        p_values: of the variants whose scores are no means of the values.
    """
    model, methods, found = of
    known = rows["correct"].drop_nulls()
    made = Summary(
        model=model,
        methods=methods,
        labels={name: str(store.record.get("labels", {}).get(name, name)) for name in methods},
        variants=found,
        samples=len(rows),
        correct=(int(known.sum() or 0), len(known)),
        scores=scores,
        p_values={name: adjusted(table, paired_test) for name, table in values.items()} | dict(p_values or {}),
        agreement={a.name: {b.name: _agreement(values[a.name], values[b.name], a, b) for b in found} for a in found},
        curves={
            order: {m: tuple(np.array(rows[f"curve {order}/{m}"].to_list()).mean(0).tolist()) for m in methods}
            for order in orders
        },
        curve_of=curve_of,
        verdict=None,
    )
    return made if len(methods) == 1 else _judged(made)


def described(store: Store) -> Described:
    """What a run that hides tokens says in its record of its model, its methods and its variants.

    Raises:
        ResultFileError: it says nothing of them.
    """

    def read(settings: Mapping[str, Any]) -> list[Variant]:
        metrics = [PerturbationMetric.read(each) for each in settings["metrics"]]
        return variants(metrics, _names(store, "perturbation"), _names(store, "read_out"))

    return recorded(store, "that hides tokens", read)


def recorded(store: Store, kind: str, read: Callable[[Mapping[str, Any]], Sequence[Variant]]) -> Described:
    """The model and the methods of a run's record, and the variants that ``read`` finds in its settings.

    Raises:
        ResultFileError: it says nothing of them, so it is no run of this kind.
    """
    try:
        settings = store.settings
        model, methods = settings["model"], settings["methods"]
        found = read(settings)
        if not found or not methods or not all(isinstance(name, str) for name in (model, *methods)):
            raise ValueError("it names no methods, or no metrics")
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        raise ResultFileError(
            f"{store.folder} does not hold a run {kind} ({type(error).__name__}: {error}); run it into a new folder"
        ) from error
    return model, tuple(methods), tuple(found)


def _names(store: Store, setting: str) -> list[str]:
    return [name.strip() for name in store.settings[setting].split(",")]


def _values(column: pl.Series) -> NDArray[np.float64] | None:
    """``[N]``; None where the metric is made of the method."""
    return None if column.null_count() else column.to_numpy()


def score(values: NDArray[np.float64] | None) -> Score | None:
    """The mean and its interval; None where the metric is made of the method."""
    return None if values is None else Score(float(values.mean()), *interval(values))


def adjusted(
    values: Mapping[str, NDArray[np.float64] | None],
    test: Callable[[NDArray[np.float64], NDArray[np.float64]], float],
) -> dict[tuple[str, str], float]:
    """The p value of every two methods that have values, adjusted over all of these."""
    there = {name: each for name, each in values.items() if each is not None}
    pairs = list(combinations(there, 2))
    found = holm([test(there[a], there[b]) for a, b in pairs]) if pairs else []
    return {pair: float(p) for pair, p in zip(pairs, found, strict=True)}


def _agreement(
    one: Mapping[str, NDArray[np.float64] | None],
    other: Mapping[str, NDArray[np.float64] | None],
    a: Variant,
    b: Variant,
) -> float | None:
    """The mean over samples of the rank correlation of the methods; samples in which one orders nothing are 0."""
    pairs = [(x, y) for name, x in one.items() if x is not None and (y := other[name]) is not None]
    if len(pairs) < _FEWEST:
        return None
    from scipy.stats import rankdata

    first, second = (
        rankdata(np.stack(each, axis=1) * sign, axis=1)
        for each, sign in zip(zip(*pairs, strict=True), (a.metric.sign, b.metric.sign), strict=True)
    )
    first, second = (each - each.mean(axis=1, keepdims=True) for each in (first, second))
    size = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    both = (first * second).sum(axis=1)
    return float(np.divide(both, size, out=np.zeros_like(both), where=size > 0).mean())


def _judged(found: Summary) -> Summary:
    """With the verdict: the method of the best mean rank over all variants that say something of it."""
    ranks: dict[str, list[float]] = {method: [] for method in found.methods}
    for each in found.variants:
        places = {method: found.rank(each.name, method) for method in found.methods}
        for method, place in places.items():
            if place is not None:
                ties = sum(other == place for other in places.values())
                ranks[method].append(place + 1 + (ties - 1) / 2)
    means = {method: sum(each) / len(each) for method, each in ranks.items() if each}
    best = min(means, key=lambda method: (means[method], found.methods.index(method)))
    mine = [each for each in found.variants if found.scores[each.name][best] is not None]
    leads = [each for each in mine if best in found.best(each.name)]
    level = [each for each in mine if each not in leads and (found.against_best(each.name, best) or 0.0) >= SURE]
    over = {
        chance: sum(_beats(found, each, best, chance) for each in mine)
        for chance in CHANCE
        if chance in found.methods and chance != best
    }
    apart = sum(any(_beats(found, each, best, other) for other in found.methods) for each in mine)
    return replace(found, verdict=Verdict(best, means, len(leads), len(level), apart, over, len(mine)))


def _beats(found: Summary, variant: Variant, a: str, b: str) -> bool:
    """Whether a method is better than another, and told apart."""
    one, other = found.scores[variant.name][a], found.scores[variant.name][b]
    p = found.p_value(variant.name, a, b)
    return (
        one is not None
        and other is not None
        and p is not None
        and p < SURE
        and variant.metric.beats(one.mean, other.mean)
    )
