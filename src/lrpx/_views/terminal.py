"""An attribution in a terminal: one coloured line, or a heatmap that wraps to the width."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, Group
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lrpx._views.canvas import canvas, shrunk
from lrpx._views.colour import INK, PAPER, RGB, colour, hexadecimal, ink, stepped
from lrpx._views.grid import LARGEST, grids
from lrpx._views.picture import number, one_line, percent, picture
from lrpx._views.waterfall import waterfall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from lrpx._views.canvas import Canvas
    from lrpx._views.grid import Grid
    from lrpx._views.picture import Picture, Piece, Segment
    from lrpx._views.waterfall import Waterfall
    from lrpx.attribution import Attribution
    from lrpx.parts import Part

_Paint = Callable[[float], RGB]
"""From a share of the colour scale to a background."""


class _Row(NamedTuple):
    """A line of bars: a name, the bar as long as there is room for, and its numbers."""

    name: Text
    bar: Callable[[int], Text]
    numbers: tuple[Text, Text]


_STRONGEST = 6
_LARGEST = 4
_BAR_CELLS = 16
_FALL_CELLS = 24
_FEWEST_CELLS = 4
_SHORTEST_NAME = 9
_GAP = 2
_LEGEND_HALF = 8
_CELL = 2
_BLOCKS = 37
_WIDEST_TOKEN = 24
_LIGHT_BACKGROUNDS = ("7", "15")


def line(a: Attribution) -> str:
    """What was explained, its value and the tokens, on a single line.

    Coloured where standard output is a terminal that shows 256 colours or more (``NO_COLOR`` and ``FORCE_COLOR``
    are honoured); elsewhere, in the output of a notebook's cell too, each token is followed by its number instead.
    """
    console = Console(force_jupyter=False, highlight=False)
    shown, paint = picture(a), _paint(console)
    text = Text(f"{one_line(a.explained.description)} = {number(a.explained.value)}:  ")
    if a.image is not None:
        text.append(_told_of_image(a))
        if not a.has_text:
            return text.plain
        text.append("; text: ")
    for segment in shown.segments:
        if len(shown.segments) > 1:
            text.append(f" {segment.name or 'other'}: ")
        text.append(_tokens(segment, paint, flat=True) if paint else _numbered(shown, segment, flat=True))
    if not shown.pieces:  # a sound
        text.append(", ".join(f"{name} sum to {number(float(part.values.sum()))}" for name, part in _others(a)))
    if paint and (sink := shown.sink):
        text.append(f"  {_quoted(sink)} alone: {number(sink.relevance)}")
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    return captured.get()


def _others(a: Attribution) -> list[tuple[str, Part]]:
    """The parts that are not of tokens, by name."""
    return [(name, part) for name, part in a.parts.items() if name != "tokens"]


def _told_of_image(a: Attribution) -> str:
    """An image on a line: its size, what its parts sum to, and the strongest of them."""
    drawn = canvas(a)
    assert drawn is not None
    layer = drawn.layers[0]
    told = ", ".join(f"{cell.place}: {layer.number(cell.value)}" for cell in layer.strongest(1))
    return (
        f"image of {drawn.width} × {drawn.height} pixels, {layer.name} sum to {number(layer.total)}; "
        f"strongest {told or 'none'}"
    )


def heatmap(a: Attribution) -> Heatmap:
    """A renderable for ``rich``: header, tokens on their colours, legend, strongest tokens, other parts, ledger."""
    return Heatmap(a)


@dataclass(frozen=True)
class Heatmap:
    """An attribution as ``rich`` draws it; without colours the tokens carry their numbers."""

    attribution: Attribution

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for this console: its width, its colours, its encoding."""
        a, shown = self.attribution, picture(self.attribution)
        paint, dark = _paint(console), _is_dark()
        yield _header(a)
        drawn = canvas(a)
        if drawn is not None:
            yield Text()
            yield from blocks(drawn, paint, options.max_width, ascii_only=options.ascii_only)
        if not a.has_text:
            if fall := waterfall(a):
                yield Text()
                yield _ledger(fall, paint, options.max_width, ascii_only=options.ascii_only)
            return
        if shown.pieces:  # a sound has none
            yield from _of_tokens(shown, paint, options, dark=dark)
        for grid in grids(a, largest=max(1, min(LARGEST, (options.max_width - _WIDEST_TOKEN) // _CELL))):
            if drawn is not None and grid.name in ("patches", "pixels"):
                continue
            yield Text()
            yield _cells(grid, paint, ascii_only=options.ascii_only)
        if fall := waterfall(a):
            yield Text()
            yield _ledger(fall, paint, options.max_width, ascii_only=options.ascii_only)


def _of_tokens(shown: Picture, paint: _Paint | None, options: ConsoleOptions, *, dark: bool) -> RenderResult:
    """The tokens of each segment, the colour scale, the sums and the strongest."""
    for segment in shown.segments:
        several = len(shown.segments) > 1
        yield Text(f"{segment.name or 'other'}  {number(segment.total)}", "bold") if several else Text()
        tokens = _tokens(segment, paint) if paint else _numbered(shown, segment)
        tokens.overflow = "fold"
        yield Padding(tokens, (0, 1), style=_card(dark)) if paint else tokens
    yield Text()
    yield _legend(shown, paint) if paint else Text()
    yield _totals(shown)
    if sink := shown.sink:
        yield _sink_note(shown, sink, coloured=paint is not None)
    yield Text()
    yield _strongest(shown, paint, options.max_width, ascii_only=options.ascii_only)


def blocks(drawn: Canvas, paint: _Paint | None, width: int, *, ascii_only: bool, name: str = "") -> RenderResult:
    """An image and its relevance as blocks, two of them in a character, side by side where there is room; the sums; and
    the strongest places by name. Without colours these alone."""
    layer = drawn.layers[0]
    if paint is not None and not ascii_only:
        columns = max(4, min(_BLOCKS, drawn.width, (width - 3) // 2))
        rows = max(2, round(columns * drawn.height / drawn.width))
        rows += rows % 2
        ratios = shrunk(layer.ratios, rows, columns).tolist()
        pixels = shrunk(drawn.image, rows, columns).round().int().tolist()
        shown = [[tuple(each) for each in row] for row in pixels], [[paint(each) for each in row] for row in ratios]
        for row in range(0, rows, 2):
            line = Text(no_wrap=True, overflow="crop")
            for at, each in enumerate(shown):
                line.append("  " * at)
                for upper, lower in zip(each[row], each[row + 1], strict=True):
                    line.append("▀", Style(color=hexadecimal(upper), bgcolor=hexadecimal(lower)))
            yield line
    if paint is not None:
        yield _scale(layer.limit, paint)
    part = percent(layer.share)
    told = f"{name or layer.name}: sum {number(layer.total)}{f' ({part} of the value)' if part else ''}"
    yield Text(f"{told}; {number(layer.positive)} for, {number(layer.negative)} against", "dim", overflow="fold")
    names = Table.grid(padding=(0, 2))
    names.add_column(overflow="fold")
    names.add_column(justify="right", no_wrap=True)
    for cell in layer.strongest(_LARGEST):
        names.add_row(Text(cell.place, "dim"), Text(layer.number(cell.value)))
    yield names


def _paint(console: Console) -> _Paint | None:
    """How this console colours relevance; None where it cannot.

    Of sixteen colours, the nearest to the strongest red is yellow, to a weaker one red, and to a weak one of either
    sign grey, so there numbers must do.
    """
    maps = {"truecolor": colour, "256": stepped}
    found = None if console.no_color else maps.get(console.color_system or "")
    return None if found is None else partial(found, dark=_is_dark())


def _is_dark() -> bool:
    """Some terminals tell their background as ``COLORFGBG=15;0``; most are dark."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] not in _LIGHT_BACKGROUNDS


def _card(dark: bool) -> Style:
    return Style(color=hexadecimal(INK[dark]), bgcolor=hexadecimal(PAPER[dark]))


def _tokens(segment: Segment, paint: _Paint, *, flat: bool = False) -> Text:
    """The tokens of a segment on their colours; ``flat`` leaves out the line breaks."""
    text = Text(style=_card(_is_dark()))
    for piece in segment.pieces:
        background = paint(piece.ratio)
        style = Style(
            color=hexadecimal(ink(background)),
            bgcolor=hexadecimal(background),
            italic=piece.special or None,
            underline=piece.sink or None,
        )
        text.append(piece.before).append(_apart(_flat(piece.text) if flat else piece.text), style)
        text.append("" if flat else piece.after)
    return text


def _apart(text: str) -> str:
    """A token whose last joiner is written as its code: ``rich`` takes the token behind it for joined, counts it in no
    cells, and cuts as many characters off the end of the line."""
    stem = text.removesuffix("\u200d")
    return stem if stem == text else f"{stem}⟨200D⟩"


def _numbered(shown: Picture, segment: Segment, *, flat: bool = False) -> Text:
    """The tokens of a segment, each followed by its number."""
    words = (f"{_flat(p.text)}[{shown.number(p.relevance)}]{'' if flat else p.after}" for p in segment.pieces)
    return Text(" ".join(words).replace("\n ", "\n"))


def _flat(text: str) -> str:
    return text.replace("\n", "")


def _quoted(piece: Piece) -> str:
    return f'"{_flat(piece.text)}"'


def _header(a: Attribution) -> RenderableType:
    made = f"{one_line(a.provenance.model)}, {one_line(a.provenance.method)}"
    first = Text(overflow="fold").append(one_line(a.explained.description), "bold")
    first.append("  ").append(number(a.explained.value), "bold")
    second = Text(overflow="fold")
    if a.prediction is not None:
        prediction = f'"{one_line(a.prediction.text)}" {percent(a.prediction.probability)}  '
        second.append("predicted ", "dim").append(prediction)
    return Group(first, second.append(made, "dim"))


def _legend(shown: Picture, paint: _Paint) -> Text:
    """The colour scale of the tokens."""
    return _scale(shown.limit, paint)


def _scale(limit: float, paint: _Paint) -> Text:
    """The colour scale with its two ends as numbers."""
    text = Text(f"against {number(-limit)} ", "dim", overflow="fold")
    for step in range(-_LEGEND_HALF, _LEGEND_HALF + 1):
        text.append(" ", Style(bgcolor=hexadecimal(paint(step / _LEGEND_HALF))))
    return text.append(f" {number(limit)} for")


def _totals(shown: Picture) -> Text:
    part = percent(shown.share)
    whole = f"sum {number(shown.total)}" + ("" if shown.whole is None else f" of {number(shown.whole)}")
    whole += f" ({part})" if part else ""
    sides = f"{number(shown.positive)} for, {number(shown.negative)} against"
    return Text(f"{whole}; {sides}", "dim", overflow="fold")


def _sink_note(shown: Picture, sink: Piece, *, coloured: bool) -> Text:
    how = "it is underlined, and the colours are scaled by the rest" if coloured else "the bars are scaled by the rest"
    return Text(overflow="fold").append(
        f"{_quoted(sink)} alone carries {number(sink.relevance)}, {abs(sink.relevance) / shown.limit:.1f} "
        f"times the next largest; {how}"
    )


def _grid(rows: Sequence[_Row], cells: int, width: int) -> Table:
    """Columns for a name, a bar of so many cells, a number and a share. Where the width is short, bars are shorter, and
    names are cut; numbers are not."""
    numbers = [max(number.cell_len for number in column) for column in zip(*(row.numbers for row in rows), strict=True)]
    room = width - sum(numbers) - 3 * _GAP
    name = min(_WIDEST_TOKEN, max((row.name.cell_len for row in rows), default=0), max(_SHORTEST_NAME, room - cells))
    cells = min(cells, room - name)
    table = Table.grid(padding=(0, _GAP))
    table.add_column(max_width=max(1, name if cells >= _FEWEST_CELLS else room), no_wrap=True, overflow="ellipsis")
    if cells >= _FEWEST_CELLS:
        table.add_column(no_wrap=True, overflow="crop")
    for wide in numbers:
        table.add_column(justify="right", no_wrap=True, min_width=wide)
    for row in rows:
        table.add_row(row.name, *([row.bar(cells)] if cells >= _FEWEST_CELLS else []), *row.numbers)
    return table


def _tint(value: float, paint: _Paint | None) -> Style:
    return Style() if paint is None else Style(color=hexadecimal(colour(math.copysign(1, value))))


def _strongest(shown: Picture, paint: _Paint | None, width: int, *, ascii_only: bool) -> RenderableType:
    """The tokens of largest relevance, with bars and numbers."""

    def row(piece: Piece) -> _Row:
        return _Row(
            Text(_flat(piece.text)),
            lambda cells: Text(_bar(piece, ascii_only, cells), _tint(piece.ratio, paint)),
            (Text(shown.number(piece.relevance)), Text(percent(piece.share), "dim")),
        )

    return _grid([row(piece) for piece in shown.strongest(_STRONGEST)], _BAR_CELLS, width)


def _cells(grid: Grid, paint: _Paint | None, *, ascii_only: bool) -> RenderableType:
    """A part of several axes on its colours, and its strongest places by name; without colours these alone."""
    note = f"  {grid.note}" if grid.note else ""
    name = grid.title.replace("×", "x") if ascii_only else grid.title
    title = Text(overflow="fold").append(name, "bold").append(note, "dim")
    names = Table.grid(padding=(0, 2))
    names.add_column(overflow="fold")
    names.add_column(justify="right", no_wrap=True)
    for cell in grid.strongest(_LARGEST):
        names.add_row(Text(cell.place, "dim"), Text(grid.number(cell.value)))
    if paint is None:
        return Group(title, names)
    table = Table.grid(padding=(0, 1))
    table.add_column(max_width=_WIDEST_TOKEN - 1, no_wrap=True, overflow="ellipsis", justify="right")
    table.add_column(no_wrap=True, overflow="crop")
    for label, row in zip(grid.row_labels, grid.rows, strict=True):
        line = Text()
        for cell in row:
            line.append(" " * _CELL, Style(bgcolor=hexadecimal(paint(cell.ratio))))
        table.add_row(Text(label, "dim"), line)
    return Group(title, table, names)


def _ledger(fall: Waterfall, paint: _Paint | None, width: int, *, ascii_only: bool) -> RenderableType:
    """Where the value came from: the sum of each kind of entry, their sum, and the largest entries by name."""

    def row(name: Text, start: float, end: float, style: Style | str, value: float, part: float | None) -> _Row:
        return _Row(
            name,
            lambda cells: Text(_floating_bar(start, end, ascii_only, cells), style),
            (Text(fall.number(value)), Text(percent(part), "dim")),
        )

    rows = [
        row(Text(step.kind), step.start, step.end, _tint(step.value, paint), step.value, step.share)
        for step in fall.steps
    ]
    rows.append(row(Text("sum", "bold"), fall.zero, fall.end, "dim", fall.total, fall.share))
    table = _grid(rows, _FALL_CELLS, width)
    parts: list[RenderableType] = [Text("where the value came from", "bold"), table]
    parts.append(Text(fall.verdict, "dim" if fall.closes else "bold", overflow="fold"))
    if largest := fall.largest(_LARGEST):
        names = Table.grid(padding=(0, 2))
        names.add_column(overflow="fold")
        names.add_column(justify="right", no_wrap=True)
        for step, line in largest:
            names.add_row(Text(f"{step.kind}: {line.name}", "dim"), Text(fall.number(line.value)))
        parts += [Text(), Text("largest single entries", "bold"), names]
    return Group(*parts)


def _floating_bar(start: float, end: float, ascii_only: bool, cells: int) -> str:
    """A bar between two places of the range, at least one cell long."""
    low, high = (round(place * cells) for place in sorted((start, end)))
    low = min(low, cells - 1)
    return " " * low + ("=" if ascii_only else "━") * max(1, high - low)


def _bar(piece: Piece, ascii_only: bool, cells: int) -> str:
    """A bar as long as the relevance, in half cells; the sink's has an arrow, for it goes on."""
    full, half, beyond = "=->" if ascii_only else "━╸▶"
    if piece.sink:
        return full * (cells - 1) + beyond
    whole, rest = divmod(max(1, round(abs(piece.ratio) * cells * 2)), 2)
    return full * whole + half * rest
