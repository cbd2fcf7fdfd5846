"""The samples a report shows: which, why, and every method's heatmap of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl
import torch

from lrpx._views.picture import Piece, visible
from lrpx.attribution import scale
from lrpx.benchmarks._keeping import check_shown
from lrpx.benchmarks._summary import select

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx.benchmarks._words import Reported
    from lrpx.metrics import Metric
    from lrpx.runs import Store

COUNT: Final = 5
"""Samples shown of each kind (Arras 2025, App. Fig. 2)."""


@dataclass(frozen=True)
class Line:
    """One method's heatmap of a sample, on a colour scale of its own, and its value of the metric that is shown."""

    method: str
    pieces: tuple[Piece, ...]
    score: float


@dataclass(frozen=True)
class Heatmap:
    """A sample as every method explains it.

    Args:
        id: of the sample.
        told: what was explained, in words.
        value: its value.
        correct: whether the model predicts what it should.
        group: the number of its group, or None.
        truth: positions of the tokens that should be found.
        lines: one for each method, over the same tokens.
    """

    id: str
    told: str
    value: float
    correct: bool
    group: int | None
    truth: frozenset[int]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Chosen:
    """Samples shown together: what they are, and how they were chosen."""

    title: str
    how: str
    heatmaps: tuple[Heatmap, ...]


def shown(metrics: Sequence[Metric]) -> Metric:
    """The metric beside a heatmap, by which the worst explained are chosen: the mass on the ground truth, or the first
    where that was not measured."""
    return next((metric for metric in metrics if metric.name == "RMA"), metrics[0])


def choose(
    benchmark: Reported, store: Store, methods: Sequence[str], metric: Metric, show: Sequence[str] = ()
) -> tuple[Chosen, ...]:
    """The samples asked for, those of largest explained value, and those where the methods fail most.

    Args:
        benchmark: whose rows they are.
        store: the run's folder.
        methods: one heatmap each.
        metric: by which they fail.
        show: ids of samples, predicted correctly or not.

    Raises:
        InputError: an id is of no sample.
        ResultFileError: the rows cannot be read.
    """
    column, called = benchmark.words.value
    rows = select(store, ["id", "correct", column, *(f"{metric.name}/{method}" for method in methods)])
    check_shown(show, rows["id"].to_list(), store.folder)
    mean = pl.mean_horizontal([f"{metric.name}/{method}" for method in methods])
    right = rows.filter("correct").with_columns(mean.alias("mean"), pl.col(column).alias("value"))
    worst = "lowest" if metric.better == "higher" else "highest"
    kinds = [
        ("Asked for", "By their ids", list(dict.fromkeys(show))),
        (
            f"Largest {called}",
            f"The {COUNT} correctly predicted samples with the largest {called}",
            right.sort(["value", "id"], descending=[True, False])["id"].head(COUNT).to_list(),
        ),
        (
            "Worst explained",
            f"The {COUNT} correctly predicted samples with the {worst} {metric.name}, mean over the methods",
            right.sort(["mean", "id"], descending=[metric.better == "lower", False])["id"].head(COUNT).to_list(),
        ),
    ]
    columns = [*benchmark.facts.names, *benchmark.prediction, "correct"]
    columns += [f"{each}/{method}" for method in methods for each in ("relevance", metric.name)]
    wanted = select(store, columns, ids=[name for _, _, ids in kinds for name in ids])
    found = {row["id"]: _heatmap(benchmark, row, methods, metric) for row in wanted.iter_rows(named=True)}
    return tuple(Chosen(title, how, tuple(found[name] for name in ids)) for title, how, ids in kinds if ids)


def _heatmap(benchmark: Reported, row: Mapping[str, Any], methods: Sequence[str], metric: Metric) -> Heatmap:
    lines = (
        Line(name, pieces(row["tokens"], row[f"relevance/{name}"]), row[f"{metric.name}/{name}"]) for name in methods
    )
    return Heatmap(
        id=row["id"],
        told=benchmark.told(row),
        value=benchmark.value_of(row),
        correct=row["correct"],
        group=None if benchmark.group is None else row[benchmark.group.column],
        truth=frozenset(row["ground_truth"]),
        lines=tuple(lines),
    )


def pieces(tokens: Sequence[str], relevance: Sequence[float]) -> tuple[Piece, ...]:
    """The ``T`` tokens ready to be drawn, on the colour scale that this relevance ``[T]`` has alone.

    >>> [piece.ratio for piece in pieces(["The", " keys"], [-1.0, 2.0])]
    [-0.5, 1.0]
    """
    limit, sink = scale(torch.tensor(relevance, dtype=torch.float64))

    def piece(i: int, token: str, value: float) -> Piece:
        before, text, after = visible(token)
        return Piece(
            index=i,
            before=before,
            text=text,
            after=after,
            relevance=value,
            ratio=max(-1.0, min(1.0, value / limit)) if limit else 0.0,
            share=None,
            id=None,
            special=False,
            sink=i == sink,
        )

    return tuple(piece(i, token, value) for i, (token, value) in enumerate(zip(tokens, relevance, strict=True)))
