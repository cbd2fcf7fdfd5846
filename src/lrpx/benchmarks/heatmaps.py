"""The samples a report shows: which, why, and every method's heatmap of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl
import torch

from lrpx.attribution import scale
from lrpx.benchmarks.summary import select
from lrpx.errors import InputError
from lrpx.views.picture import Piece, visible

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COUNT: Final = 5
"""Samples shown of each kind (Arras 2025, App. Fig. 2)."""


@dataclass(frozen=True)
class Line:
    """One method's heatmap of a sample, on a colour scale of its own, and its Relevance Mass Accuracy."""

    method: str
    pieces: tuple[Piece, ...]
    rma: float


@dataclass(frozen=True)
class Heatmap:
    """A sample as every method explains it.

    Args:
        id: of the sample.
        preferred: the verb form with the larger logit.
        other: the other form.
        difference: the explained value, logit of ``preferred`` less logit of ``other``; not negative.
        correct: whether ``preferred`` is the right form.
        attractors: how many nouns of the other number stand between subject and verb.
        truth: positions of the subject's tokens.
        lines: one for each method, over the same tokens.
    """

    id: str
    preferred: str
    other: str
    difference: float
    correct: bool
    attractors: int
    truth: frozenset[int]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Chosen:
    """Samples shown together: what they are, and how they were chosen."""

    title: str
    how: str
    heatmaps: tuple[Heatmap, ...]


def choose(folder: Path, methods: Sequence[str], show: Sequence[str] = ()) -> tuple[Chosen, ...]:
    """The samples asked for, those of largest logit difference, and those where the methods fail most.

    Args:
        folder: of the benchmark.
        methods: one heatmap each.
        show: ids of samples, predicted correctly or not.

    Raises:
        InputError: an id is of no sample.
        ResultFileError: the rows cannot be read.
    """
    rows = select(folder, ["id", "correct", "logit_difference", *(f"RMA/{method}" for method in methods)])
    unknown = sorted(set(show) - set(rows["id"]))
    if unknown:
        raise InputError(
            f"there is no sample {', '.join(map(repr, unknown))} in {folder}; "
            f"its {len(rows)} samples have ids such as {rows['id'][0]!r}"
        )
    right = rows.filter("correct").with_columns(
        pl.mean_horizontal([f"RMA/{method}" for method in methods]).alias("RMA")
    )
    kinds = [
        ("Asked for", "By their ids", list(dict.fromkeys(show))),
        (
            "Largest logit difference",
            f"The {COUNT} correctly predicted samples with the largest logit difference",
            right.sort(["logit_difference", "id"], descending=[True, False])["id"].head(COUNT).to_list(),
        ),
        (
            "Worst explained",
            f"The {COUNT} correctly predicted samples with the lowest Relevance Mass Accuracy, mean over the methods",
            right.sort(["RMA", "id"])["id"].head(COUNT).to_list(),
        ),
    ]
    columns = ["id", "tokens", "ground_truth", "right", "wrong", "attractors", "logit_difference", "correct"]
    columns += [f"{column}/{method}" for method in methods for column in ("relevance", "RMA")]
    wanted = select(folder, columns, ids=[name for _, _, ids in kinds for name in ids])
    found = {row["id"]: _heatmap(row, methods) for row in wanted.iter_rows(named=True)}
    return tuple(Chosen(title, how, tuple(found[name] for name in ids)) for title, how, ids in kinds if ids)


def _heatmap(row: dict[str, Any], methods: Sequence[str]) -> Heatmap:
    right, wrong = row["right"], row["wrong"]
    return Heatmap(
        id=row["id"],
        preferred=right if row["correct"] else wrong,
        other=wrong if row["correct"] else right,
        difference=abs(row["logit_difference"]),
        correct=row["correct"],
        attractors=row["attractors"],
        truth=frozenset(row["ground_truth"]),
        lines=tuple(Line(m, pieces(row["tokens"], row[f"relevance/{m}"]), row[f"RMA/{m}"]) for m in methods),
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
