"""Images and their relevance as a figure of matplotlib: the image, then each layer or each method beside it, and below
them the tokens of a text that belongs to the image."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from lrpx._views.colour import QUIET, colour
from lrpx._views.figure import INCH_MARGIN, Caption, check_width, plain_text, sized
from lrpx._views.gallery import groups
from lrpx._views.picture import number
from lrpx.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from matplotlib.figure import Figure

    from lrpx._views.gallery import Group
    from lrpx.attribution import Attribution

ACROSS: Final = 4
"""The most pictures beside each other."""
GAP: Final = 0.12
HEAD: Final = 0.52
FOOT: Final = 0.7
SCALE: Final = 0.33
LINE: Final = 0.13
"""Inches: between pictures, above a group, and below a picture; of that to its colour scale, and to each line more."""


def figure(attributions: Sequence[Attribution], width: float) -> Figure:
    """Draw attributions of images, those of one image beside each other.

    Args:
        attributions: at least one, all of images.
        width: in inches.

    Raises:
        ResultError: some are of texts, or the width is none.
    """
    if any(a.image is None for a in attributions):
        raise ResultError("some results are of images and some of texts; draw them apart")
    check_width(width)
    found = [(group, _panels(group)) for group in groups(attributions)]
    rows = [_rows(panels) for _, panels in found]
    across = min(ACROSS, max(len(panels) for _, panels in found))
    room = (width - 2 * INCH_MARGIN - (across - 1) * GAP) / across
    heights = [
        [max(panel[0].shape[0] / panel[0].shape[1] for panel in row) * room + FOOT for row in each] for each in rows
    ]
    captions = [_caption(group, width) for group, _ in found]
    down = 2 * INCH_MARGIN + sum(HEAD + sum(each) + GAP * (len(each) - 1) for each in heights)
    down += sum(caption.height for caption in captions if caption is not None)
    drawn = sized(width, down)
    top = down - INCH_MARGIN
    for (group, _), each, tall, caption in zip(found, rows, heights, captions, strict=True):
        several = len(group.lines) > 1
        title = group.title if several else f"{group.title}  {_number(group.lines[0].attribution.explained.value)}"
        plain_text(drawn, INCH_MARGIN, top - 0.17, title, 11.5)
        plain_text(drawn, INCH_MARGIN, top - 0.36, " · ".join(group.facts), 8.0, QUIET[False])
        top -= HEAD
        for row, height in zip(each, tall, strict=True):
            for at, panel in enumerate(row):
                _draw(drawn, panel, INCH_MARGIN + at * (room + GAP), top, room)
            top -= height + GAP
        top += GAP
        if caption is not None:
            caption.draw(drawn, top)
            top -= caption.height
    return drawn


Panel = tuple["torch.Tensor", str, tuple[str, ...]]


def _panels(group: Group) -> list[Panel]:
    """Pixels, their name, and what stands beside and below the colours: the image, then each layer, or each method's
    first."""
    first = group.lines[0].canvas
    assert first is not None
    found: list[Panel] = [(first.image, "", ())]
    for line in group.lines:
        shown = line.canvas
        assert shown is not None
        for layer in shown.layers if len(group.lines) == 1 else shown.layers[:1]:
            label = layer.name if len(group.lines) == 1 else line.label
            told = [f"±{number(layer.limit).lstrip('+')}", f"sum {_number(layer.total)}"]
            told += [f"largest {_number(layer.largest)}, beyond"] if abs(layer.largest) > layer.limit else []
            found.append((shown.over(layer), label, tuple(told)))
    return found


def _caption(group: Group, width: float) -> Caption | None:
    """The texts beside the image; None where there are none."""
    texts = [(line.label or "text", line.shown) for line in group.lines if line.attribution.has_text]
    return Caption(width, texts) if any(shown.pieces for _, shown in texts) else None


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    count = math.ceil(len(panels) / ACROSS)
    return [list(panels[row * ACROSS : (row + 1) * ACROSS]) for row in range(count)]


def _draw(drawn: Figure, panel: Panel, left: float, top: float, room: float) -> None:
    """A picture, its label, its colour scale with two ends, and a line for each number more, which a narrow picture
    would cut; lengths in inches."""
    pixels, label, told = panel
    width, height = drawn.get_size_inches()
    tall = pixels.shape[0] / pixels.shape[1] * room
    axes: Any = drawn.add_axes((left / width, (top - tall) / height, room / width, tall / height))
    axes.imshow(pixels.numpy(), interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    if label:
        plain_text(drawn, left, top - tall - 0.15, label, 8.0, room=room)
    if told:
        steps = [[tuple(each / 255 for each in colour(step / 16 - 1)) for step in range(33)]]
        scale: Any = drawn.add_axes((left / width, (top - tall - SCALE) / height, room / 5 / width, 0.09 / height))
        scale.imshow(steps, aspect="auto", interpolation="nearest")
        scale.set_axis_off()
        plain_text(drawn, left + room / 5 + 0.06, top - tall - SCALE, told[0], 7.0, QUIET[False], room=room * 0.8)
        for at, each in enumerate(told[1:], 1):
            plain_text(drawn, left, top - tall - SCALE - LINE * at, each, 7.0, QUIET[False], room=room)


def _number(value: float) -> str:
    return number(value).replace("-", "−")
