"""What several methods say of one text, side by side: a row for each token, a column for each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lrpx._views.picture import number, one_line, percent, picture, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from lrpx.attribution import Attribution


def columns(found: Sequence[Attribution], in_units: Sequence[bool]) -> RenderableType:
    """Attributions of the same tokens; the strongest of each is bold.

    Args:
        found: one of each method.
        in_units: whether a method's numbers are parts of the value, so that their sum is a share of it.
    """
    first, pictures = found[0], [picture(a) for a in found]
    header = Text(overflow="fold").append(one_line(first.explained.description), "bold")
    header.append(f"  {number(first.explained.value)}", "bold")
    about = Text(overflow="fold")
    if first.prediction is not None:
        about.append(f'predicted "{one_line(first.prediction.text)}" {percent(first.prediction.probability)}  ')
    about.append(one_line(first.provenance.model), "dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", max_width=24)
    for a in found:
        table.add_column(Text(one_line(a.provenance.method)), justify="right", overflow="fold")
    strongest = [{piece.index for piece in shown.strongest(1)} for shown in pictures]
    for segments in zip(*(shown.segments for shown in pictures), strict=True):
        if len(pictures[0].segments) > 1:
            table.add_row(Text(one_line(segments[0].name) or "other", "bold"))
        for row in zip(*(segment.pieces for segment in segments), strict=True):
            numbers = [
                Text(shown.number(piece.relevance), "bold" if piece.index in most else "")
                for shown, piece, most in zip(pictures, row, strongest, strict=True)
            ]
            table.add_row(Text(row[0].text, "italic" if row[0].special else ""), *numbers)
    table.add_row()
    sums = [Text(number(shown.total), "dim") for shown in pictures]
    table.add_row(Text("sum", "dim"), *sums)
    parts = [
        percent(share(shown.total, a.explained.value)) if has_share else ""
        for shown, a, has_share in zip(pictures, found, in_units, strict=True)
    ]
    table.add_row(Text("of the value", "dim"), *(Text(part, "dim") for part in parts))
    return Group(header, about, Text(), table)
