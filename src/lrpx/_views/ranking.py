"""A ranking of units as a table: in a terminal, in a notebook, as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lrpx._views.html import _fragment, _page, style
from lrpx._views.picture import number, one_line, percent

if TYPE_CHECKING:
    from lrpx.ranking import Ranking

TITLES = {
    "neurons": ("neuron", "neurons"), "heads": ("head", "heads"), "keys": ("key feature", "key features"),
    "values": ("value feature", "value features"), "attention": ("", "attention branches"), "mlp": ("", "MLPs"),
    "residual": ("", "layers"),
}  # fmt: skip
"""How one unit of a kind is called, and many; one is called nothing where a layer has but one."""


class Drawn(NamedTuple):
    """A ranking as text: what every view shows.

    ``columns`` are ``(name, whether its cells are numbers)``; ``ratios`` the relevance as a share of the largest.
    """

    title: str
    facts: str
    columns: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]
    ratios: tuple[float, ...]
    note: str


def drawn(ranking: Ranking) -> Drawn:
    """What the views show of a ranking; token text and names made plain."""
    unit, many = TITLES[ranking.kind]
    columns = [("layer", True)] + ([(unit, True)] if unit else [])
    rows: list[tuple[str, ...]] = []
    several = ranking.explained is None
    if several:
        columns += [("mean relevance", True), ("from", True), ("to", True), ("sum", True)]
    else:
        columns += [("position", True), ("token", False), ("activation", True), ("relevance", True), ("share", True)]
    columns.append(("module", False))
    for row in ranking:
        first = [str(row.layer)] + ([str(row.unit)] if unit else [])
        if several:
            middle = [number(row.mean), number(row.low), number(row.high), number(row.total)]
        else:
            middle = [
                str(row.position), one_line(row.token) or " ", number(row.activation), number(row.relevance),
                percent(row.share),
            ]  # fmt: skip
        rows.append((*first, *middle, one_line(row.path)))
    sizes = [row.mean if several else row.relevance for row in ranking]
    largest = max(map(abs, sizes), default=0.0)
    ratios = tuple(size / largest if largest else 0.0 for size in sizes)
    made = ranking.provenance
    among = f"{ranking.count:,} {many}" if several else f"{ranking.count:,} {many} at positions"
    facts = f"the {len(rows)} most relevant of {among} · {made.method} · {made.model}"
    if not several:
        assert ranking.explained is not None
        title = f"{ranking.explained.description} = {number(ranking.explained.value)}"
        note = "activation: of several features the length of their vector; share: of the explained value"
    else:
        counts = " less ".join(f"{count} texts" for count in ranking.texts)
        title = f"mean relevance over {counts}"
        note = "from, to: 95 % bootstrap interval of each unit alone; the largest of many are partly so by chance"
    return Drawn(one_line(title), one_line(facts), tuple(columns), tuple(rows), ratios, note)


def table(ranking: Ranking) -> Table:
    """A renderable for ``rich``."""
    shown = drawn(ranking)
    found = Table(title=Text(shown.title, "bold"), caption=Text(f"{shown.facts}\n{shown.note}"), title_justify="left")
    for name, is_number in shown.columns:
        found.add_column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in shown.rows:
        found.add_row(*map(Text, row))
    return found


def lines(ranking: Ranking) -> str:
    """The table as plain text."""
    console = Console(force_jupyter=False, highlight=False, no_color=True, width=120)
    with console.capture() as captured:
        console.print(table(ranking))
    return captured.get().rstrip()


def page(ranking: Ranking) -> str:
    """One self-contained HTML page; it loads nothing and runs nothing."""
    return _page("ranking.html.j2", _context(ranking), _style(whole_page=True))


def fragment(ranking: Ranking) -> str:
    """The table as a piece of HTML for a notebook."""
    return _fragment("ranking.html.j2", _context(ranking), _style)


def _context(ranking: Ranking) -> dict[str, Any]:
    shown = drawn(ranking)
    return {"title": shown.title, "shown": shown}


def _style(**options: Any) -> str:
    return style((), **options)
