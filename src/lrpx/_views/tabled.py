"""Tables of numbers with a bar for each row: in a terminal, in a notebook, as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lrpx._views.html import _fragment, _page, style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import ConsoleOptions, RenderResult


TEXT: Final = 4
"""The least width of a column of texts, which may be folded."""


class Tabled(NamedTuple):
    """A table as text: what every view shows.

    ``columns`` are ``(name, whether its cells are numbers)``; ``ratios`` the length of each row's bar, from -1 to 1.
    """

    title: str
    facts: str
    columns: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]
    ratios: tuple[float, ...]
    note: str = ""


def ratios(sizes: Sequence[float]) -> tuple[float, ...]:
    """Each as a share of the largest."""
    largest = max(map(abs, sizes), default=0.0)
    return tuple(size / largest if largest else 0.0 for size in sizes)


def renderable(tables: Sequence[Tabled]) -> Any:
    """Something for ``rich``."""
    return Group(*map(_Shown, tables))


class _Shown:
    """A table, or, where the terminal is too narrow for its numbers, a line for each row: no number is cut off."""

    def __init__(self, shown: Tabled) -> None:
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _least_width(self.shown) <= options.max_width:
            yield _table(self.shown)
            return
        names = [name for name, _ in self.shown.columns]
        yield Text(self.shown.title, "bold")
        for row in self.shown.rows:
            yield Text(" · ".join(f"{name} {cell.strip()}" for name, cell in zip(names, row, strict=True)))
        for said in filter(None, (self.shown.facts, self.shown.note)):
            yield Text(said, "italic")


def _least_width(shown: Tabled) -> int:
    """Of a table whose numbers are whole."""
    widths = _least_widths(shown)
    return sum(widths) + 3 * len(widths) + 1


def _least_widths(shown: Tabled) -> list[int]:
    """Of each column; a text may have numbers in it, too."""
    cells = zip(*shown.rows, strict=True) if shown.rows else ((),) * len(shown.columns)
    return [
        max(map(cell_len, (name, *each)))
        if is_number
        else max(TEXT, *(cell_len(word) for cell in each for word in cell.split() if word[0] in "+-"), 0)
        for (name, is_number), each in zip(shown.columns, cells, strict=True)
    ]


def _table(shown: Tabled) -> Table:
    caption = "\n".join(filter(None, (shown.facts, shown.note)))
    found = Table(title=Text(shown.title, "bold"), caption=Text(caption), title_justify="left")
    for (name, is_number), least in zip(shown.columns, _least_widths(shown), strict=True):
        side: Any = "right" if is_number else "left"
        found.add_column(name, justify=side, overflow="fold", no_wrap=is_number, min_width=least)
    for row in shown.rows:
        found.add_row(*map(Text, row))
    return found


def lines(tables: Sequence[Tabled]) -> str:
    """The tables as plain text."""
    console = Console(force_jupyter=False, highlight=False, color_system=None, width=120)  # bold is no colour
    with console.capture() as captured:
        console.print(renderable(tables))
    return captured.get().rstrip()


def page(tables: Sequence[Tabled]) -> str:
    """One self-contained HTML page; it loads nothing and runs nothing."""
    return _page("tables.html.j2", _context(tables), _style(whole_page=True))


def fragment(tables: Sequence[Tabled]) -> str:
    """The tables as a piece of HTML for a notebook."""
    return _fragment("tables.html.j2", _context(tables), _style)


def _context(tables: Sequence[Tabled]) -> dict[str, Any]:
    return {"title": tables[0].title, "tables": tables}


def _style(**options: Any) -> str:
    return style((), **options)
