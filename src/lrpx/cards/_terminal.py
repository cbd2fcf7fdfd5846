"""A card for the terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lrpx._views.picture import number, one_line, picture
from lrpx._views.terminal import _card, _is_dark, _paint, _tokens
from lrpx.cards._ranges import places, ranged, trimmed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from lrpx.cards._card import Card, Shown

AFTER: Final = 6
"""Tokens that are shown after the one at which the neuron is highest."""
BEFORE: Final = 60
"""And before it."""
STRONGEST: Final = 3
BAR: Final = 24
FEWEST: Final = 4
"""Cells of a bar: with fewer there is none."""
GAP: Final = 2


@dataclass(frozen=True)
class CardView:
    """A card as ``rich`` draws it; after each passage stand its strongest tokens with their numbers."""

    card: Card

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for this console: its width, its colours."""
        card = self.card
        yield Text(f"Neuron {card.unit} of layer {card.layer}", "bold")
        yield Text(
            f"{one_line(card.model)}, {one_line(card.path)}, seen in {card.texts:,} texts", "dim", overflow="fold"
        )
        yield Text()
        if card.note:
            yield Text(one_line(card.note), "dim", overflow="fold")
        for name, tokens in (("raises", card.top), ("lowers", card.bottom)) if not card.note else ():
            said = "  ".join(f"{one_line(each.text)} {number(each.logit)}" for each in tokens)
            yield Text(overflow="fold").append(f"{name}  ", "bold").append(said)
        for name, some in card.passages.items():
            yield Text(f"\nhighest {name}", "bold")
            for each in some:
                yield from _passage(each, console)
        if card.relevant_for:
            yield Text("\nmost often relevant for", "bold")
            counts = (f"{one_line(text)} {count}×" for text, count, _ in card.relevant_for)
            yield Text("  ".join(counts), overflow="fold")
        yield Text("\nhow active it is", "bold")
        yield _bars([(ranged(low, high), count) for low, high, count in trimmed(card.histogram)], options.max_width)
        yield Text("\nwhere in a text it is highest", "bold")
        yield _bars([(places(first, last), count) for first, last, count in trimmed(card.peaks)], options.max_width)


def _passage(each: Shown, console: Console) -> Iterator[Text | Padding]:
    shown, paint = picture(each.attribution), _paint(console)
    at = each.passage.position
    said = "" if each.predicted is None else f", predicted “{one_line(each.predicted)}”"
    peak = shown.pieces[at].text
    said += f", activation {number(each.attribution.explained.value)}" if each.predicted is not None else ""
    told = f" at “{peak}”{said}, line {each.passage.line}"
    yield Text(overflow="fold").append(number(each.passage.value)).append(told, "dim")
    for segment in shown.segments:
        near = tuple(piece for piece in segment.pieces if at - BEFORE <= piece.index <= at + AFTER)
        if paint:
            yield Padding(_tokens(replace(segment, pieces=near), paint, flat=True), (0, 1), style=_card(_is_dark()))
        else:
            yield Text("".join(piece.before + piece.text for piece in near), overflow="fold")
    strongest = (f"{piece.text} {shown.number(piece.relevance)}" for piece in shown.strongest(STRONGEST))
    yield Text("  ".join(strongest), "dim", overflow="fold")


def _bars(rows: Sequence[tuple[str, int]], width: int) -> Table:
    """Names, bars and counts. Where the width is short bars are shorter, or none, and names are folded; no number is
    cut off."""
    most = max((count for _, count in rows), default=1)
    names, counts = max((len(name) for name, _ in rows), default=0), len(f"{most:,}")
    cells = min(BAR, width - names - counts - 2 * GAP)
    table = Table.grid(padding=(0, GAP))
    table.add_column(overflow="fold")
    if cells >= FEWEST:
        table.add_column(no_wrap=True, min_width=cells)
    table.add_column(justify="right", no_wrap=True, min_width=counts)
    for name, count in rows:
        bar = [Text("█" * round(cells * count / most))] if cells >= FEWEST else []
        table.add_row(Text(name), *bar, Text(f"{count:,}"))
    return table
