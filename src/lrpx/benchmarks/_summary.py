"""The numbers of a run with a ground truth: how well each method finds it, and how sure that is.

Everything is over the correctly predicted samples, as in Arras et al. 2025, §4.1 and Table 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from lrpx.benchmarks._words import RANDOM
from lrpx.errors import InputError, ResultFileError
from lrpx.metrics import Metric
from lrpx.metrics._statistics import holm, interval, paired_test
from lrpx.runs import BROKEN, read_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from lrpx.benchmarks._words import Group
    from lrpx.runs import Store

BINS: Final = 20
"""Equal parts of a metric's range that its values are counted in."""

_GRADIENTS = ("gradient-l1", "gradient-l2-squared")


@dataclass(frozen=True)
class Score:
    """A method's mean of a metric over the correctly predicted samples, with its bootstrap 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Chance:
    """The random baseline: mean and standard deviation, over the draws, of a metric's mean over the samples."""

    mean: float
    std: float
    draws: int


@dataclass(frozen=True)
class Means:
    """The samples of one group, by its number: how many, how many of them are predicted correctly, and over those each
    metric's mean for each method and for ``"random"``; no means where none is correct."""

    number: int
    samples: int
    correct: int
    means: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Summary:
    """The numbers of a run, each table as ``[metric][method]``, by their names.

    Args:
        model: as the run names it.
        methods: in the order of the run.
        labels: how tables spell them.
        metrics: in the order of the run.
        samples: how many were explained.
        correct: how many of them the model predicts correctly; the tables are over these.
        scores: mean and interval.
        chance: the random baseline of each metric.
        shares: ``[metric][method]``, with ``"random"`` as a method: the share of the samples in each of :data:`BINS`
            equal parts between the metric's ends.
        ends: where a metric's axis begins and ends.
        p_values: ``[metric][a, b]`` for every two methods: paired sign-flip test, adjusted by Holm over all pairs of
            methods within the metric.
        groups: by the benchmark's number, ascending; none if it has no groups.
    """

    model: str
    methods: tuple[str, ...]
    labels: Mapping[str, str]
    metrics: tuple[Metric, ...]
    samples: int
    correct: int
    scores: Mapping[str, Mapping[str, Score]]
    chance: Mapping[str, Chance]
    shares: Mapping[str, Mapping[str, tuple[float, ...]]]
    ends: Mapping[str, tuple[float, float]]
    p_values: Mapping[str, Mapping[tuple[str, str], float]]
    groups: tuple[Means, ...]

    @property
    def accuracy(self) -> float:
        """Share of the samples whose right form has the larger logit (Table 3)."""
        return self.correct / self.samples

    @property
    def gradient(self) -> str | None:
        """What the paper calls Gradient (§2.4): the norm with the higher MRR; None unless both were run."""
        if not set(_GRADIENTS) <= set(self.methods) or "MRR" not in self.scores:
            return None
        return max(_GRADIENTS, key=lambda method: self.scores["MRR"][method].mean)

    def rank(self, metric: str, method: str) -> int:
        """How many methods have a better mean: 0 for the best, or for each of several that are equally good."""
        beats = next(each.beats for each in self.metrics if each.name == metric)
        mean = self.scores[metric][method].mean
        return sum(beats(other.mean, mean) for other in self.scores[metric].values())

    def best(self, metric: str) -> list[str]:
        """The method with the best mean, or those that share it, in the order of the run."""
        return [method for method in self.methods if self.rank(metric, method) == 0]

    def against_best(self, metric: str, method: str) -> float | None:
        """The adjusted p-value of a method's difference to the best one of a metric; None for the best itself."""
        best, pairs = self.best(metric), self.p_values[metric]
        return None if method in best else pairs.get((best[0], method), pairs.get((method, best[0])))


def select(store: Store, columns: Sequence[str], ids: Sequence[str] | None = None) -> pl.DataFrame:
    """These columns of all rows, in the order they were written; nothing else is read.

    Args:
        store: the run's folder.
        columns: by name.
        ids: of the rows to take; None takes all.

    Raises:
        ResultFileError: there are no rows, or they cannot be read, are of another run, or lack a column.
    """
    parts = store.checked_parts()
    read = list(dict.fromkeys([*columns, *([] if ids is None else ["id"])]))
    found = []
    try:
        for path in parts:  # not by polars, which knows no checksums
            rows = pl.from_arrow(read_columns(path, read))
            assert isinstance(rows, pl.DataFrame)
            found.append(rows if ids is None else rows.filter(pl.col("id").is_in(list(ids))))
        return pl.concat(found).select(columns)
    except (pl.exceptions.PolarsError, *BROKEN) as error:
        reason = str(error).splitlines()[0]
        raise ResultFileError(
            f"cannot read the rows in {parts[0].parent}: {reason}; run it again, which makes anew what is broken"
        ) from error


def described(store: Store) -> tuple[str, tuple[str, ...], tuple[Metric, ...]]:
    """What a run's record says of its model, its methods and its metrics.

    Raises:
        ResultFileError: it says nothing of them.
    """
    try:
        settings = store.settings
        model, methods = settings["model"], settings["methods"]
        metrics = tuple(map(Metric.read, settings["metrics"]))
        if not metrics or not methods or not isinstance(methods, list):
            raise ValueError("it names no methods, or no metrics")
        if not all(isinstance(name, str) for name in (model, *methods)):
            raise ValueError("a name is no text")
    except (ValueError, KeyError, TypeError, InputError) as error:
        raise ResultFileError(
            f"{store.folder} does not hold a run of methods ({type(error).__name__}: {error}); run it into a new folder"
        ) from error
    return model, tuple(methods), metrics


def summarise(store: Store, group: Group | None = None) -> Summary:
    """Read a run's rows and compute its tables.

    Args:
        store: the run's folder.
        group: the numbers that the means are also taken by.

    Raises:
        ResultFileError: the folder holds no readable run, no rows, or not one correctly predicted sample.
    """
    model, methods, metrics = described(store)
    names = (*methods, RANDOM)
    columns = [f"{metric.name}/{name}" for metric in metrics for name in names]
    rows = select(store, ["correct", *([] if group is None else [group.column]), *columns])
    right = rows.filter("correct")
    if not len(right):
        raise ResultFileError(
            f"{model} predicts none of the {len(rows)} samples in {store.folder} correctly, so no method can be "
            "scored; run more samples, or a model that knows the task"
        )
    values = {each.name: {name: _values(right, f"{each.name}/{name}") for name in names} for each in metrics}
    ends = {each.name: each.ends(_ends(values[each.name])) for each in metrics}
    return Summary(
        model=model,
        methods=methods,
        labels={name: str(store.record.get("labels", {}).get(name, name)) for name in methods},
        metrics=metrics,
        samples=len(rows),
        correct=len(right),
        scores={name: {m: _score(table[m]) for m in methods} for name, table in values.items()},
        chance={name: _chance(table[RANDOM]) for name, table in values.items()},
        shares={name: {m: _shares(found, *ends[name]) for m, found in table.items()} for name, table in values.items()},
        ends=ends,
        p_values={name: _p_values({m: table[m] for m in methods}) for name, table in values.items()},
        groups=() if group is None else _groups(rows, right, values, group.column),
    )


def _values(rows: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """``[N]`` values of a method, or ``[N, draws]`` of the random baseline."""
    return np.array(rows[column].to_list(), dtype=np.float64)


def _ends(values: Mapping[str, NDArray[np.float64]]) -> list[float]:
    """The least and the largest of all values."""
    return [float(found) for each in values.values() for found in (each.min(), each.max())]


def _score(values: NDArray[np.float64]) -> Score:
    low, high = interval(values)
    return Score(float(values.mean()), float(low), float(high))


def _chance(draws: NDArray[np.float64]) -> Chance:
    means = draws.mean(axis=0)
    return Chance(float(means.mean()), float(means.std()), len(means))


def _shares(values: NDArray[np.float64], low: float, high: float) -> tuple[float, ...]:
    places = (values.ravel() - low) / (high - low) * BINS
    bins = np.clip((places + 1e-9).astype(int), 0, BINS - 1)  # 3/5 · 20 is a little less than 12
    return tuple((np.bincount(bins, minlength=BINS) / values.size).tolist())


def _p_values(values: Mapping[str, NDArray[np.float64]]) -> dict[tuple[str, str], float]:
    pairs = list(combinations(values, 2))
    adjusted = holm([paired_test(values[a], values[b]) for a, b in pairs]) if pairs else []
    return {pair: float(p) for pair, p in zip(pairs, adjusted, strict=True)}


def _groups(
    rows: pl.DataFrame, right: pl.DataFrame, values: Mapping[str, Mapping[str, NDArray[np.float64]]], column: str
) -> tuple[Means, ...]:
    every, correct = rows[column].to_numpy(), right[column].to_numpy()

    def means(mine: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
        if not mine.any():
            return {}
        return {metric: {name: float(v[mine].mean()) for name, v in table.items()} for metric, table in values.items()}

    return tuple(
        Means(count, int((every == count).sum()), int((correct == count).sum()), means(correct == count))
        for count in sorted(set(every.tolist()))
    )
