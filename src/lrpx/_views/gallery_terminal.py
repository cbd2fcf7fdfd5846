"""Several attributions in a terminal: the tokens of each, and a table of the strongest, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from lrpx._views.gallery import FEW, groups
from lrpx._views.picture import number, percent
from lrpx._views.terminal import _card, _flat, _is_dark, _ledger, _legend, _numbered, _paint, _quoted, _tokens, blocks
from lrpx._views.waterfall import waterfall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from lrpx._views.gallery import Group, Line
    from lrpx.attribution import Attribution

_STRONGEST = 8
_COLUMN = 20
_TOKEN = 16
_NUMBER = 8


@dataclass(frozen=True)
class Gallery:
    """Attributions as ``rich`` draws them, the first few of many; without colours the tokens carry their numbers."""

    attributions: tuple[Attribution, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for this console: its width, its colours, its encoding."""
        for at, group in enumerate(groups(self.attributions[:FEW])):
            if at:
                yield Text()
            yield Text(group.title, "bold", overflow="fold")
            yield Text(", ".join(group.facts), "dim", overflow="fold")
            for line in group.lines:
                yield from self._line(line, console, options)
            is_drawn = len(group.lines) > 1 and bool(group.lines[0].shown.pieces)
            if is_drawn and group.lines[0].attribution.has_text:
                yield Text()
                yield from _tables(group, options.max_width)
        left = len(self.attributions) - FEW
        if left > 0:
            yield Text(f"\nand {left} more; print one, or to_html() has all", "dim", overflow="fold")

    def _line(self, line: Line, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, paint = line.shown, _paint(console)
        yield Text()
        label = Text(overflow="fold").append(line.label, "bold").append("  " if line.label else "").append(line.value)
        if line.canvas is not None:
            yield label
            yield from blocks(line.canvas, paint, options.max_width, ascii_only=options.ascii_only)
            if not line.attribution.has_text:
                return
            label = Text("text")
        if not shown.pieces:  # a sound
            yield label
            return
        yield label.append(f"  sum {number(shown.total)}", "dim")
        for segment in shown.segments:
            if len(shown.segments) > 1:
                yield Text(f"{segment.name or 'other'}  {number(segment.total)}", "dim", overflow="fold")
            tokens = _tokens(segment, paint) if paint else _numbered(shown, segment)
            tokens.overflow = "fold"
            yield Padding(tokens, (0, 1), style=_card(_is_dark())) if paint else tokens
        if paint:
            yield _legend(shown, paint)
        if shown.sink:
            yield Text(f"{_quoted(shown.sink)} alone carries {number(shown.sink.relevance)}", overflow="fold")
        if fall := waterfall(line.attribution):
            yield Text()
            yield _ledger(fall, paint, options.max_width, ascii_only=options.ascii_only)


def _tables(group: Group, width: int) -> RenderResult:
    """The strongest tokens with a column for each line, as many tables as the width asks for."""
    column = min(_COLUMN, max(cell_len(line.label) for line in group.lines), max(1, width - _TOKEN - 4))
    rows = group.strongest(_STRONGEST)
    told = [_numbers(line, [row[i].relevance for row in rows]) for i, line in enumerate(group.lines)]
    column = max(column, _NUMBER, *(len(each) for numbers in told for each in numbers))
    fit = max(1, (width - _TOKEN) // (column + 2))
    for start in range(0, len(group.lines), fit):
        lines = group.lines[start : start + fit]
        heads = (
            Column(Text(line.label), justify="right", max_width=column, overflow="fold", header_style="dim")
            for line in lines
        )
        token = Column(Text("strongest"), max_width=_TOKEN, no_wrap=True, overflow="ellipsis", header_style="dim")
        table = Table(token, *heads, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        *numbers, sums, shares = zip(*told[start : start + fit], strict=True)
        for row, each in zip(rows, numbers, strict=True):
            table.add_row(Text(_flat(row[0].text)), *map(Text, each))
        table.add_row(Text("sum", "dim"), *(Text(each, "dim") for each in sums))
        if any(shares):
            table.add_row(Text("of the value", "dim"), *(Text(each, "dim") for each in shares))
        yield table


def _numbers(line: Line, strongest: Sequence[float]) -> list[str]:
    """What stands in a line's column: the relevance of the strongest tokens, the sum, and its share of the value."""
    return [*map(line.shown.number, strongest), number(line.shown.total), percent(line.shown.share)]
