"""What was collected of every unit: its reference passages, how its activation is spread, and where in texts it peaks.

All of it is counts and orders, so what two parts of a corpus give together does not depend on which came first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from lrpx.cards._best import EMPTY, Best, decoded, keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lrpx.units import Place

FACTS: Final = {
    "activation": ("position", "token"),
    "negative activation": ("position", "token"),
    "relevance": ("position", "token", "predicted"),
}
"""What units are ranked by, and what is kept of a passage beside its value and its line: at which token of it the unit
is highest, that token's id, and, where the model's prediction is explained, the id of what it predicts."""
LOWEST: Final = "negative activation"
"""What is ranked by its opposite, which the table has."""
OCTAVES: Final = 16
"""Places in a text: the first token, the second, the third and fourth, the next four, and so on; the last is open."""
SMALLEST: Final = -6
LARGEST: Final = 7
BINS: Final = 2 * (LARGEST - SMALLEST + 1) + 1
"""Bins of an activation: below −2⁷, one for each power of two up to −2⁻⁶, those closer to 0, and the same above."""


def octave(position: int) -> int:
    """Which of the ``OCTAVES`` a position is in.

    >>> [octave(position) for position in (0, 1, 2, 3, 4, 7, 8, 2**20)]
    [0, 1, 2, 2, 3, 3, 4, 15]
    """
    return min(position.bit_length(), OCTAVES - 1)


def octaves(width: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges of positions below a width that are one octave each.

    >>> list(octaves(6))
    [(0, 1), (1, 2), (2, 4), (4, 6)]
    """
    begin = 0
    while begin < width:
        end = width if octave(begin) == OCTAVES - 1 else min(max(1, 2 * begin), width)
        yield begin, end
        begin = end


def edges() -> list[float]:
    """The ``BINS − 1`` inner edges of the bins, from the lowest; a bin holds its edge that is closer to 0."""
    above = [2.0**power for power in range(SMALLEST, LARGEST + 1)]
    return [-each for each in reversed(above)] + above


def bins(x: Tensor) -> Tensor:
    """In which of the ``BINS`` each of some finite float32 numbers is, read from its bits: int32.

    >>> bins(torch.tensor([-300.0, -1.5, -0.001, 0.0, 0.001, 1.0, 1.99, 2.0, 300.0])).tolist()
    [0, 7, 14, 14, 14, 21, 21, 22, 28]
    """
    bits = x.view(torch.int32)
    size = (((bits >> 23) & 255) - (126 + SMALLEST)).clamp_(0, LARGEST - SMALLEST + 1)
    return torch.where(bits < 0, -size, size) + (LARGEST - SMALLEST + 1)


@dataclass
class Kept:
    """What is kept of the ``U`` units of one place.

    Args:
        best: their best passages, by what they are ranked by.
        counts: ``[U, BINS]`` int64, of how many tokens their activation was in each bin.
        peaks: ``[U, OCTAVES]`` int64, in how many passages they were highest in each octave of positions.
    """

    best: dict[str, Best]
    counts: Tensor
    peaks: Tensor

    @classmethod
    def none(cls, units: int, measures: Sequence[str], k: int, device: torch.device | str = "cpu") -> Kept:
        """Nothing yet."""
        best = {name: Best.none(units, k, len(FACTS[name]), device) for name in measures}
        zeros = [torch.zeros(units, size, dtype=torch.int64, device=device) for size in (BINS, OCTAVES)]
        return cls(best, *zeros)

    def merge(self, other: Kept) -> None:
        """Take in what was kept of another part of the corpus."""
        for name, best in self.best.items():
            best.merge(other.best[name])
        self.counts += other.counts
        self.peaks += other.peaks


def schema(measures: Sequence[str]) -> pa.Schema:
    """The columns of the table of references: a row a unit, lists of what is known of its passages, best first."""
    columns: dict[str, Any] = {"layer": pa.int32(), "place": pa.string(), "unit": pa.int32()}
    for name in measures:
        columns |= {f"{name} value": pa.list_(pa.float32()), f"{name} line": pa.list_(pa.int64())}
        columns |= {f"{name} {fact}": pa.list_(pa.int32()) for fact in FACTS[name]}
    return pa.schema([*columns.items(), ("counts", pa.list_(pa.int64())), ("peaks", pa.list_(pa.int64()))])


def to_table(kept: Mapping[Place, Kept], measures: Sequence[str]) -> pa.Table:
    """What was kept as a table; the same has the same bytes."""
    columns = schema(measures)
    tables = []
    for place, each in kept.items():
        units = len(each.counts)
        found: dict[str, Any] = {
            "layer": np.full(units, place.layer, np.int32),
            "place": pa.array([place.name]).take(pa.array(np.zeros(units, np.int64))),
            "unit": np.arange(units, dtype=np.int32),
        }
        for name in measures:
            best = each.best[name]
            there = (best.key != EMPTY).cpu()
            ends = np.concatenate([[0], there.sum(1).cumsum(0).numpy()]).astype(np.int32)
            values, lines = decoded(best.key.cpu()[there])
            parts = {"value": values, "line": lines}
            parts |= {fact: best.facts[..., i].cpu()[there] for i, fact in enumerate(FACTS[name])}
            found |= {f"{name} {part}": pa.ListArray.from_arrays(ends, flat.numpy()) for part, flat in parts.items()}
        for name in ("counts", "peaks"):
            found[name] = _lists(getattr(each, name).cpu().numpy())
        tables.append(pa.table(found, schema=columns))
    return pa.concat_tables(tables).combine_chunks()


def _lists(values: np.ndarray[Any, Any]) -> pa.ListArray:
    ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(ends, values.reshape(-1))


def from_table(table: pa.Table, places: Sequence[Place], measures: Sequence[str], k: int) -> dict[Place, Kept]:
    """What :func:`to_table` was given."""
    found, start = {}, 0
    for place in places:
        rows = table.slice(start, place.width).combine_chunks()
        start += place.width
        kept = Kept.none(place.width, measures, k)
        for name in measures:
            best = kept.best[name]
            lists = {part: rows[f"{name} {part}"].combine_chunks() for part in ("value", "line", *FACTS[name])}
            lengths = torch.from_numpy(np.diff(np.asarray(lists["value"].offsets)))
            there = torch.arange(k) < lengths[:, None]
            flat = {part: torch.tensor(np.asarray(each.flatten())) for part, each in lists.items()}
            best.key[there] = keys(flat["value"], flat["line"])
            for i, fact in enumerate(FACTS[name]):
                best.facts[..., i][there] = flat[fact]
        for name in ("counts", "peaks"):
            values = torch.tensor(np.asarray(rows[name].combine_chunks().flatten()))
            getattr(kept, name).copy_(values.reshape(place.width, -1))
        found[place] = kept
    return found
