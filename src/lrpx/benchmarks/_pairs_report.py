"""The reports of the benchmarks of patching: tables in Markdown, a picture, and one page with it all."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from rich.console import Group
from rich.text import Text

from lrpx._views import html
from lrpx._views.picture import one_line
from lrpx.benchmarks import _report
from lrpx.benchmarks._panels import png, sheet
from lrpx.benchmarks._pieces import Pieces
from lrpx.benchmarks._report import UNTOLD, figure
from lrpx.metrics._statistics import interval
from lrpx.runs import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.runs import Store


@dataclass(frozen=True)
class Grid:
    """A table of a report.

    Args:
        title: its headline.
        columns: what heads them.
        rows: each a name and a cell for each column.
        note: what stands below.
        wide: whether it is too wide for a terminal.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    note: str
    wide: bool = False


@dataclass(frozen=True)
class Report:
    """What a run has found.

    Args:
        title: the headline.
        lead: the sentence below it.
        grids: the tables.
        picture: a PNG file.
        name: what it is called.
        pictured: what it shows.
    """

    title: str
    lead: str
    grids: Sequence[Grid]
    picture: bytes
    name: str
    pictured: str


def write(store: Store, report: Report) -> Report:
    """Write ``table.md``, ``report.html`` and the picture into a run's folder, each as a whole.

    Raises:
        ResultFileError: a file cannot be written.
    """
    record = {name: value for name, value in store.record.items() if name not in UNTOLD}
    environment = _report._html()
    sheet = html.style([], whole_page=True) + environment.get_template("report.css.j2").render()
    context: dict[str, Any] = {
        "title": report.title,
        "lead": one_line(report.lead),
        "model": store.settings["model"],
        "tables": report.grids,
        "picture": base64.b64encode(report.picture).decode(),
        "pictured": report.pictured,
        "made": list(_report._facts(record)),
        "style": Markup(sheet),
        "style_hash": html.content_hash(sheet),
    }
    write_whole(store.folder / "table.md", _report._markdown().get_template("pairs.md.j2").render(context).encode())
    write_whole(store.folder / "report.html", environment.get_template("pairs.html.j2").render(context).encode())
    write_whole(store.folder / report.name, report.picture)
    return report


def terminal(report: Report) -> Group:
    """The tables for ``rich``."""
    parts: list[Any] = [Text(one_line(report.lead))]
    for grid in report.grids:
        if grid.wide:
            continue
        names = [one_line(name) for name, _ in grid.rows]
        columns = [(name, [Text(cells[at]) for _, cells in grid.rows]) for at, name in enumerate(grid.columns)]
        parts += [Pieces("method", names, columns, grid.title, wrapped=True), Text(grid.note, "italic")]
    return Group(*parts)


def cell(values: Sequence[float | None]) -> str:
    """A mean with its bootstrap 95 % interval; of the values that there are, and then of how many.

    >>> cell([0.5, 0.5]), cell([0.5, None]), cell([None])
    ('0.500 [0.500, 0.500]', '0.500 [0.500, 0.500], of 1', 'none')
    """
    there = [each for each in values if each is not None]
    if not there:
        return "none"
    low, high = interval(there)
    told = f"{figure(float(np.mean(there)))} [{figure(low)}, {figure(high)}]"
    return told if len(there) == len(values) else f"{told}, of {len(there):,}"


def drawn(rows: int, columns: int, size: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """A PNG file of panels.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with sheet((size[0] * columns, size[1] * rows), 150, "the picture of a run needs", font=7.0) as made:
        draw(made.subplots(rows, columns, squeeze=False))
        return png(made)
