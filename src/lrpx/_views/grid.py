"""What every view shows of a part with several axes: a grid of two of them, the others summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lrpx._views.picture import aligned, number, one_line, share_of_scale, visible
from lrpx.attribution import TOKEN, scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.attribution import Attribution
    from lrpx.parts import Part

LARGEST: Final = 64
"""The most rows, and columns, of a grid: what is longer is shown in blocks, each the sum of its places."""


@dataclass(frozen=True)
class Cell:
    """One number of a grid: where it is, and its size as a share of the colour limit, within [-1, 1]."""

    row: int
    column: int
    place: str
    value: float
    ratio: float


@dataclass(frozen=True)
class Grid:
    """A part, ready to be drawn: labels, cells in rows, and the colour scale they share."""

    name: str
    row_axis: str
    column_axis: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    limit: float
    note: str

    @property
    def title(self) -> str:
        """The part's name and the two axes."""
        return f"{self.name}: {self.row_axis} × {self.column_axis}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell, row by row."""
        return tuple(cell for row in self.rows for cell in row)

    def number(self, value: float) -> str:
        """A value with as many decimals as give the colour limit three digits, alike for all."""
        return aligned(value, self.limit)

    def strongest(self, count: int) -> tuple[Cell, ...]:
        """The cells of largest absolute value, zero left out, largest first."""
        ranked = sorted(self.cells, key=lambda cell: -abs(cell.value))
        return tuple(cell for cell in ranked[:count] if cell.value)


def grids(a: Attribution, largest: int = LARGEST) -> tuple[Grid, ...]:
    """Lay out every part of several axes that has any numbers.

    The first two axes are shown. Of more than two, the tokens are summed first, for the heatmap shows them, and then
    the last.
    """
    parts = (part for part in a.parts.values() if len(part.axes) > 1 and 0 not in part.shape.values())
    is_told = len(a) == 0 and a.image is None  # a sound: no tokens whose sum is told elsewhere
    return tuple(_grid(part, a.labels(part), largest, is_told=is_told) for part in parts)


def _grid(part: Part, labels: dict[str, Sequence[str]], largest: int, *, is_told: bool) -> Grid:
    summed, sums = part, []
    while len(summed.axes) > 2:
        sums.append(TOKEN if TOKEN in summed.axes else summed.axes[-1])
        summed = summed.summed(sums[-1])
    notes = [f"summed over {' and '.join(sums)}"] if sums else []
    notes += [f"sum {number(float(part.values.sum()))}"] if is_told else []
    names = {}
    for axis, size in summed.shape.items():
        spans = _blocks(size, largest)
        if len(spans) < size:
            notes.append(f"{axis} in blocks of {spans[0][1]}")
            summed = summed.grouped(axis, spans)
            names[axis] = [f"{start}–{end - 1}" if end - start > 1 else str(start) for start, end in spans]
        else:
            texts = labels.get(axis, tuple(map(str, range(size))))
            names[axis] = [one_line(text).strip() for text in texts]
            if axis == TOKEN:  # one of blanks is called by their signs
                names[axis] = [name or visible(text)[1] for name, text in zip(names[axis], texts, strict=True)]
    limit, sink = scale(summed.values.flatten())
    (row_axis, row_names), (column_axis, column_names) = names.items()

    def cell(i: int, j: int, value: float) -> Cell:
        place = f"{row_axis} {row_names[i]}, {column_axis} {column_names[j]}"
        return Cell(i, j, place, value, share_of_scale(value, limit))

    if sink is not None:
        i, j = divmod(sink, len(column_names))
        notes.append(beyond(cell(i, j, 0.0).place, float(summed.values[i, j])))
    return Grid(
        name=part.name,
        row_axis=row_axis,
        column_axis=column_axis,
        row_labels=tuple(row_names),
        column_labels=tuple(column_names),
        rows=tuple(
            tuple(cell(i, j, value) for j, value in enumerate(row)) for i, row in enumerate(summed.values.tolist())
        ),
        limit=limit,
        note="; ".join(notes),
    )


def beyond(place: str, value: float) -> str:
    """What is said of the one cell that would swallow the scale, and so has a colour that others have."""
    return f"{place} alone has {number(value)}, beyond the colours"


def _blocks(size: int, largest: int) -> list[tuple[int, int]]:
    """Half-open ranges of one length, the last perhaps shorter, at most ``largest`` of them.

    >>> _blocks(5, 2), _blocks(2, 2)
    ([(0, 3), (3, 5)], [(0, 1), (1, 2)])
    """
    length = -(-size // largest)
    return [(start, min(start + length, size)) for start in range(0, size, length)]
