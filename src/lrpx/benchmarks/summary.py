"""The numbers of a benchmark's folder: how well each method points at the subject, and how sure that is.

Everything is over the correctly predicted samples, as in Arras et al. 2025, §4.1 and Table 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from lrpx.benchmarks.rows import RANDOM, ROWS
from lrpx.errors import ResultFileError
from lrpx.metrics.ground_truth import METRICS
from lrpx.metrics.statistics import holm, interval, paired_test

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BINS: Final = 20
"""Equal parts of [0, 1] that a metric's values are counted in."""

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
class Group:
    """The samples with the same number of attractors: how many, how many of them are predicted correctly, and over
    those each metric's mean for each method and for ``"random"``; no means where none is correct."""

    attractors: int
    samples: int
    correct: int
    means: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Summary:
    """The numbers of a benchmark, each table as ``[metric][method]``.

    Args:
        model: as the run names it.
        methods: in the order of the run.
        samples: how many were explained.
        correct: how many of them the model predicts correctly; the tables are over these.
        scores: mean and interval.
        chance: the random baseline of each metric.
        shares: ``[metric][method]``, with ``"random"`` as a method: the share of the samples in each of :data:`BINS`
            equal parts of [0, 1].
        p_values: ``[metric][a, b]`` for every two methods: paired sign-flip test, adjusted by Holm over all pairs of
            methods within the metric.
        groups: by number of attractors, ascending.
    """

    model: str
    methods: tuple[str, ...]
    samples: int
    correct: int
    scores: Mapping[str, Mapping[str, Score]]
    chance: Mapping[str, Chance]
    shares: Mapping[str, Mapping[str, tuple[float, ...]]]
    p_values: Mapping[str, Mapping[tuple[str, str], float]]
    groups: tuple[Group, ...]

    @property
    def accuracy(self) -> float:
        """Share of the samples whose right form has the larger logit (Table 3)."""
        return self.correct / self.samples

    @property
    def gradient(self) -> str | None:
        """What the paper calls Gradient (§2.4): the norm with the higher MRR; None unless both were run."""
        if not set(_GRADIENTS) <= set(self.methods):
            return None
        return max(_GRADIENTS, key=lambda method: self.scores["MRR"][method].mean)

    def rank(self, metric: str, method: str) -> int:
        """How many methods have a higher mean: 0 for the best, or for each of several that are equally good."""
        mean = self.scores[metric][method].mean
        return sum(other.mean > mean for other in self.scores[metric].values())

    def best(self, metric: str) -> list[str]:
        """The method with the highest mean, or those that share it, in the order of the run."""
        return [method for method in self.methods if self.rank(metric, method) == 0]

    def against_best(self, metric: str, method: str) -> float | None:
        """The adjusted p-value of a method's difference to the best one of a metric; None for the best itself."""
        best, pairs = self.best(metric), self.p_values[metric]
        return None if method in best else pairs.get((best[0], method), pairs.get((method, best[0])))


def read_run(folder: Path) -> dict[str, Any]:
    """What ``run.json`` says of the run; ``["settings"]["model"]`` and ``["settings"]["methods"]`` are there.

    Raises:
        ResultFileError: the file is missing, or is no such run.
    """
    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        model, methods = run["settings"]["model"], run["settings"]["methods"]
        if not methods or not isinstance(methods, list) or not all(isinstance(name, str) for name in (model, *methods)):
            raise ValueError("it names no model, or no methods")
    except OSError as error:
        raise ResultFileError(
            f"cannot read {path}: {error.strerror}; name the folder of a benchmark, or run it first"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultFileError(
            f"{path} does not describe a run ({type(error).__name__}: {error}); run the benchmark into a new folder"
        ) from error
    found: dict[str, Any] = run
    return found


def select(folder: Path, columns: Sequence[str], ids: Sequence[str] | None = None) -> pl.DataFrame:
    """These columns of all rows, in the order they were written; nothing else is read.

    Args:
        folder: of the benchmark.
        columns: by name.
        ids: of the rows to take; None takes all.

    Raises:
        ResultFileError: there are no rows, or they cannot be read, or lack a column.
    """
    parts = sorted((folder / ROWS).glob("part-*.parquet"))
    if not parts:
        raise ResultFileError(f"there are no rows in {folder / ROWS}; run the benchmark first")
    try:
        rows = pl.scan_parquet(parts, glob=False)
        if ids is not None:
            rows = rows.filter(pl.col("id").is_in(list(ids)))
        return rows.select(columns).collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ResultFileError(
            f"cannot read the rows in {folder / ROWS}: {reason}; run the benchmark again, which writes what is missing"
        ) from error


def summarise(folder: Path) -> Summary:
    """Read a benchmark's folder and compute its tables.

    Raises:
        ResultFileError: the folder holds no readable run, no rows, or not one correctly predicted sample.
    """
    settings = read_run(folder)["settings"]
    methods = tuple(settings["methods"])
    names = (*methods, RANDOM)
    columns = [f"{metric}/{name}" for metric in METRICS for name in names]
    rows = select(folder, ["correct", "attractors", *columns])
    right = rows.filter("correct")
    if not len(right):
        raise ResultFileError(
            f"{settings['model']} predicts none of the {len(rows)} samples in {folder} correctly, so no method can be "
            "scored; run more samples, or a model that knows the task"
        )
    values = {metric: {name: _values(right, f"{metric}/{name}") for name in names} for metric in METRICS}
    return Summary(
        model=settings["model"],
        methods=methods,
        samples=len(rows),
        correct=len(right),
        scores={metric: {m: _score(values[metric][m]) for m in methods} for metric in METRICS},
        chance={metric: _chance(values[metric][RANDOM]) for metric in METRICS},
        shares={metric: {name: _shares(found) for name, found in values[metric].items()} for metric in METRICS},
        p_values={metric: _p_values({m: values[metric][m] for m in methods}) for metric in METRICS},
        groups=_groups(rows, right, values),
    )


def _values(rows: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """``[N]`` values of a method, or ``[N, draws]`` of the random baseline."""
    return np.array(rows[column].to_list(), dtype=np.float64)


def _score(values: NDArray[np.float64]) -> Score:
    low, high = interval(values)
    return Score(float(values.mean()), float(low), float(high))


def _chance(draws: NDArray[np.float64]) -> Chance:
    means = draws.mean(axis=0)
    return Chance(float(means.mean()), float(means.std()), len(means))


def _shares(values: NDArray[np.float64]) -> tuple[float, ...]:
    places = np.minimum((values.ravel() * BINS + 1e-9).astype(int), BINS - 1)  # 3/5 · 20 is a little less than 12
    return tuple((np.bincount(places, minlength=BINS) / values.size).tolist())


def _p_values(values: Mapping[str, NDArray[np.float64]]) -> dict[tuple[str, str], float]:
    pairs = list(combinations(values, 2))
    adjusted = holm([paired_test(values[a], values[b]) for a, b in pairs]) if pairs else []
    return {pair: float(p) for pair, p in zip(pairs, adjusted, strict=True)}


def _groups(
    rows: pl.DataFrame, right: pl.DataFrame, values: Mapping[str, Mapping[str, NDArray[np.float64]]]
) -> tuple[Group, ...]:
    every, correct = rows["attractors"].to_numpy(), right["attractors"].to_numpy()

    def means(mine: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
        if not mine.any():
            return {}
        return {metric: {name: float(v[mine].mean()) for name, v in table.items()} for metric, table in values.items()}

    return tuple(
        Group(count, int((every == count).sum()), int((correct == count).sum()), means(correct == count))
        for count in sorted(set(every.tolist()))
    )
