"""A table of numbers in a terminal: where it is too wide, in pieces, so that no number is cut off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

BORDERS: Final = 3
"""The width of a column less that of its cells."""
NAMED: Final = 10
"""So wide a column's name may make it where there is too little room; a longer one is folded."""


@dataclass(frozen=True)
class Pieces:
    """A table whose lines are named, in one piece or in several beneath each other.

    Args:
        corner: what the lines' names are.
        names: of the lines.
        columns: the name of each, and a cell for each line.
        title: above the first piece.
        wrapped: whether cells are told in words, which may go on in the next line; no word is cut off.
        justify: the side that cells stand at.
        apart: how many of the last lines stand below a rule of their own.
    """

    corner: str
    names: Sequence[str]
    columns: Sequence[tuple[str, Sequence[Text]]]
    title: str = ""
    wrapped: bool = False
    justify: Literal["left", "right"] = "right"
    apart: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        named = max(map(cell_len, (self.corner, *self.names)))
        if self.wrapped:
            named = min(named, max(NAMED, options.max_width // 4))
        room = options.max_width - 1 - BORDERS - named
        numbers = [max(map(self._width, cells), default=0) for _, cells in self.columns]
        widths = [max(each, cell_len(name)) for each, (name, _) in zip(numbers, self.columns, strict=True)]
        if sum(widths) + BORDERS * len(widths) > room:
            widths = [max(each, min(wide, NAMED)) for each, wide in zip(numbers, widths, strict=True)]
        if max(widths, default=0) + BORDERS > room:  # the lines' names are folded sooner than a number
            widths = [max(1, each) for each in numbers]
            least = max(widths, default=1) + BORDERS
            named, room = max(1, min(named, named + room - least)), max(room, least)
        for start, end in _parts(widths, room):
            spare = max(0, room - sum(widths[start:end]) - BORDERS * (end - start)) // (end - start)
            heads = (
                Column(
                    Text(name),
                    justify=self.justify,
                    width=min(width + spare, self._whole(name, cells)) if self.wrapped else width,
                    overflow="fold",
                )
                for (name, cells), width in zip(self.columns[start:end], widths[start:end], strict=True)
            )
            title = Text(self.title) if self.title and not start else None
            piece = Table(Column(Text(self.corner), width=named, overflow="fold"), *heads, title=title)
            for line, name in enumerate(self.names):
                if self.apart and line == len(self.names) - self.apart:
                    piece.add_section()
                piece.add_row(Text(name), *(cells[line] for _, cells in self.columns[start:end]))
            yield piece

    def _width(self, cell: Text) -> int:
        """The least that a cell needs: its longest word, or all of it."""
        return max(map(cell_len, cell.plain.split()), default=0) if self.wrapped else cell.cell_len

    def _whole(self, name: str, cells: Sequence[Text]) -> int:
        """The most that a column needs."""
        return max([cell_len(name), *(cell.cell_len for cell in cells)])


def _parts(widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns that have room beside each other, each as long as it can be, and one column at least.

    >>> list(_parts([5, 5, 9, 5], 19)), list(_parts([30], 19))
    ([(0, 2), (2, 3), (3, 4)], [(0, 1)])
    """
    start = taken = 0
    for at, width in enumerate(widths):
        if at > start and taken + width + BORDERS > room:
            yield start, at
            start = at
            taken = 0
        taken += width + BORDERS
    yield start, len(widths)
