"""Attributions as a figure of matplotlib: the tokens on their colours, wrapped to a width in inches.

Every text is plain to matplotlib (no ``$…$``, no TeX), whatever the user's settings are. What no installed font can
draw is shown as its number, ``⟨4E2D⟩``.
"""

from __future__ import annotations

import io
import math
import unicodedata
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from lrpx._views.colour import INK, QUIET, RGB, colour, ink
from lrpx._views.gallery import groups
from lrpx._views.grid import grids
from lrpx._views.picture import number
from lrpx.errors import MissingExtraError, ResultError

try:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, fontManager, get_font
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text
except ImportError as error:
    raise MissingExtraError(f"a picture needs {error.name}: pip install 'lrpx[pictures]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lrpx._views.gallery import Group
    from lrpx._views.grid import Grid
    from lrpx._views.picture import Picture, Segment
    from lrpx.attribution import Attribution

PIXELS: Final = 200
"""Of an inch."""
TALLEST: Final = 65535
"""Pixels; a figure cannot be drawn beyond them."""
POINTS: Final = 72
_MARGIN = 8.0
_SIZE = 10.0
_TITLE = 11.5
_LABEL = 9.0
_SMALL = 8.0
_LEADING = 1.6
_NARROWEST = 1.0
_OWN = "DejaVu Sans"
_LAST = "Last Resort"  # matplotlib's own, which draws every character as a box
_SCALE = 72.0
_CELL = 16.0
_LONGEST = 32
_STEPS = 33
_RIGHT_TO_LEFT = ("R", "AL")
_MIRRORED = str.maketrans("()[]{}<>«»‹›⟨⟩≤≥", ")(][}{><»«›‹⟩⟨≥≤")


def check_width(width: Any) -> None:
    """Refuse a width in inches that no line fits in.

    Raises:
        ResultError: it is none, or no number.
    """
    if not (isinstance(width, (int, float)) and math.isfinite(width) and width >= _NARROWEST):
        raise ResultError(f"the width is {width!r}; pass inches, at least {_NARROWEST:g}")


def figure(attributions: Sequence[Attribution], width: float) -> Figure:
    """Draw attributions, those of the same tokens below each other.

    Args:
        attributions: at least one.
        width: in inches.

    Raises:
        ResultError: the width is no number of inches a line fits in, or the figure would be too tall.
    """
    check_width(width)
    page = _Page(width * POINTS)
    for at, group in enumerate(groups(attributions)):
        page.skip(14 * bool(at))
        _draw(page, group)
    return page.figure()


INCH_MARGIN: Final = _MARGIN / POINTS
"""Inches around a figure."""


def sized(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        ResultError: it would be too large.
    """
    if max(width, height) * PIXELS > TALLEST:
        raise ResultError(f"the picture would be {width:.0f} by {height:.0f} inches; pass fewer results")
    drawn = Figure(figsize=(width, height), dpi=PIXELS, facecolor="white", edgecolor="none")
    FigureCanvasAgg(drawn)
    return drawn


def plain_text(
    drawn: Figure, x: float, y: float, text: str, size: float, color: RGB = INK[False], room: float | None = None
) -> None:
    """A text at a place in inches from the lower left, on one line, cut where there is no more room; hostile text is
    plain to matplotlib."""
    shown = _drawable(text)
    room = float(drawn.get_size_inches()[0]) - x - INCH_MARGIN if room is None else room
    while shown and _measured(shown, size) > room * POINTS:
        shown = shown[:-2].rstrip("…") + "…" if len(shown) > 2 else ""
    if shown.strip():
        style: dict[str, Any] = {"color": _share(color), "fontproperties": _font(shown, size)}
        style |= {"usetex": False, "parse_math": False}
        drawn.add_artist(Text(x, y, shown, transform=drawn.dpi_scale_trans, **style))


def png(drawn: Figure) -> bytes:
    """A figure as a PNG file."""
    file = io.BytesIO()
    with _settings():
        FigureCanvasAgg(drawn).print_png(file)
    return file.getvalue()


def svg(drawn: Figure) -> str:
    """A figure as an SVG file: its text as shapes, the same bytes each time."""
    file = io.StringIO()
    with _settings():
        FigureCanvasSVG(drawn).print_svg(file, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _settings() -> Any:
    return mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "lrpx", "path.sketch": None, "path.effects": []})


# ------------------------------------------------------------------------------------ what is drawn


def _draw(page: _Page, group: Group) -> None:
    several = len(group.lines) > 1
    page.text(group.title if several else f"{group.title}  {_typeset(group.lines[0].value)}", size=_TITLE)
    page.text(" · ".join(group.facts), size=_SMALL, color=QUIET[False])
    for line in group.lines:
        page.skip(6)
        if several:
            page.text(f"{line.label}  {_typeset(line.value)}", size=_LABEL)
        _of_tokens(page, line.shown)
        if not several:
            for grid in grids(line.attribution):
                _grid(page, grid)


def _of_tokens(page: _Page, shown: Picture) -> None:
    """The tokens of each segment, and the colour scale."""
    for segment in shown.segments:
        if len(shown.segments) > 1:
            page.text(f"{segment.name or 'other'}  {_number(segment.total)}", size=_SMALL, color=QUIET[False])
        page.tokens(segment)
    if shown.pieces:  # a sound has none
        _legend(page, shown)
    if shown.sink:
        name = shown.sink.text.replace("\n", "")
        told = f"{name} alone carries {_number(shown.sink.relevance)}; the colours are"
        page.text(f"{told} scaled by the rest", size=_SMALL, color=QUIET[False])


class Caption:
    """The tokens of texts that stand beside one image, on their colours, to be drawn on its figure.

    Args:
        width: of the figure, in inches.
        texts: of each text what stands above it, and its tokens.
    """

    def __init__(self, width: float, texts: Sequence[tuple[str, Picture]]) -> None:
        self._page = _Page(width * POINTS)
        for label, shown in texts:
            self._page.skip(6)
            self._page.text(f"{label}  sum {_number(shown.total)}".lstrip(), size=_SMALL, color=QUIET[False])
            _of_tokens(self._page, shown)

    @property
    def height(self) -> float:
        """In inches."""
        return self._page.height

    def draw(self, drawn: Figure, top: float) -> None:
        """Draw it on a figure, so many inches above its lower edge."""
        self._page.draw(drawn, top)


def _grid(page: _Page, grid: Grid) -> None:
    """A part of several axes, a row a line: its label, and a cell for each column, in the order of the tokens."""
    page.skip(6)
    told = f"{grid.title}, ±{_number(grid.limit).removeprefix('+')}" + f"; {grid.note}" * bool(grid.note)
    page.text(told, size=_SMALL, color=QUIET[False])
    names = [_drawable(f"{name[-_LONGEST:]} ") for name in grid.row_labels]
    beside = min(max(_measured(name, _SMALL) for name in names), page.room / 2)
    width = min(_CELL, (page.room - beside) / max(len(grid.column_labels), 1))
    for name, row in zip(names, grid.rows, strict=True):
        cells = [_Item("", width, _SMALL, fill=colour(cell.ratio)) for cell in row]
        page.line([_Item(name, beside, _SMALL, QUIET[False]), *cells], _SMALL)


def _typeset(text: str) -> str:
    """A number with a real minus sign."""
    return text.replace("-", "−")


def _number(value: float) -> str:
    return _typeset(number(value))


def _legend(page: _Page, shown: Picture) -> None:
    """The colour scale with its two ends as numbers, on one line or, where that is too narrow, on three."""
    page.skip(2)
    ends = [
        page.plain(text, _SMALL, QUIET[False])
        for text in (f"against {_number(-shown.limit)} ", f" {_number(shown.limit)} for")
    ]
    width = min(_SCALE, page.room) / _STEPS
    steps = [_Item("", width, _SMALL, fill=colour(2 * i / (_STEPS - 1) - 1)) for i in range(_STEPS)]
    whole = [*ends[0], *steps, *ends[1]]
    for line in [whole] if sum(item.width for item in whole) <= page.room else [ends[0], steps, ends[1][1:]]:
        page.line(line, _SMALL)


@dataclass(frozen=True)
class _Item:
    """A text on a line, with its width in points; ``fill`` is the colour behind it."""

    text: str
    width: float
    size: float
    color: RGB = INK[False]
    fill: RGB | None = None
    framed: bool = False


class _Page:
    """Where the next line goes, and all that is drawn so far; lengths in points from the top left."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._y = _MARGIN
        self._items: list[tuple[float, float, _Item]] = []

    @property
    def room(self) -> float:
        """How long a line may be."""
        return self._width - 2 * _MARGIN

    def skip(self, points: float) -> None:
        """Leave room."""
        self._y += points

    def text(self, text: str, size: float = _SIZE, color: RGB = INK[False]) -> None:
        """A text of its own, wrapped to the width."""
        self._wrapped(self.plain(text, size, color), size, _direction(text) or False)

    def plain(self, text: str, size: float, color: RGB) -> list[_Item]:
        """A text's words and the blanks between them."""
        words = ("".join(same) for _, same in groupby(text, str.isspace))
        return [_Item(word, _measured(word, size), size, color) for word in map(_drawable, words)]

    def tokens(self, segment: Segment) -> None:
        """The tokens of a segment on their colours."""
        turned = _direction("".join(piece.text for piece in segment.pieces if not piece.special)) or False
        items: list[_Item] = []
        for piece in segment.pieces:
            if piece.before:
                items.append(_Item(piece.before, _measured(piece.before, _SIZE), _SIZE))
            fill = colour(piece.ratio)
            text = _drawable(piece.text.replace("\n", ""))
            width = _measured(text, _SIZE) + 1
            items.append(_Item(text, width, _SIZE, ink(fill), fill, framed=piece.sink))
            if piece.after:
                self._wrapped(items, _SIZE, turned)
                items = []
        self._wrapped(items, _SIZE, turned)

    def _wrapped(self, items: Iterable[_Item], size: float, turned: bool) -> None:
        line: list[_Item] = []
        used = 0.0
        for item in (part for each in items for part in _parts(each, self.room)):
            if line and used + item.width > self.room:
                self.line(line, size, turned)
                line, used = [], 0.0
                if not item.text.strip():
                    continue
            line.append(item)
            used += item.width
        if line:
            self.line(line, size, turned)

    def line(self, items: Sequence[_Item], size: float, turned: bool = False) -> None:
        """One line, as it stands from left to right; ``turned`` for one that is read from the right."""
        x = self._width - _MARGIN - sum(item.width for item in items) if turned else _MARGIN
        for item in _ordered(items, turned):
            self._items.append((x, self._y, item))
            x += item.width
        self._y += size * _LEADING

    @property
    def height(self) -> float:
        """Of all that was put on it, in inches."""
        return (self._y + _MARGIN) / POINTS

    def figure(self) -> Figure:
        """All that was put on it.

        Raises:
            ResultError: it is too tall.
        """
        across, down = self._width / POINTS, self.height
        if max(across, down) * PIXELS > TALLEST:
            raise ResultError(
                f"the picture would be {across:.0f} by {down:.0f} inches; pass fewer or shorter texts, or use to_html()"
            )
        drawn = sized(across, down)
        self.draw(drawn, down)
        return drawn

    def draw(self, drawn: Figure, top: float) -> None:
        """Draw all that was put on it on a figure, so many inches above its lower edge."""
        inches = drawn.dpi_scale_trans
        for x, y, item in self._items:
            left, bottom = x / POINTS, top - (y + item.size * 1.4) / POINTS
            if item.fill is not None:
                edge = _share(INK[False]) if item.framed else "none"
                box = (item.width / POINTS, item.size * 1.4 / POINTS)
                frame = Rectangle((left, bottom), *box, transform=inches, facecolor=_share(item.fill), edgecolor=edge)
                frame.set_linewidth(0.8 * item.framed)
                drawn.add_artist(frame)
            if item.text.strip():
                drawn.add_artist(
                    Text(
                        left + (0.5 / POINTS if item.fill else 0),
                        top - (y + item.size * 1.05) / POINTS,
                        item.text,
                        color=_share(item.color),
                        fontproperties=_font(item.text, item.size),
                        transform=inches,
                        usetex=False,
                        parse_math=False,
                    )
                )


def _share(color: RGB) -> tuple[float, ...]:
    return tuple(each / 255 for each in color)


def _parts(item: _Item, room: float) -> Iterator[_Item]:
    """An item, in as many pieces as it needs to fit in the room; never cut before a mark or a joiner."""
    if item.width <= room:
        yield item
        return
    part = ""
    for cluster in _clusters(item.text):
        if part and _measured(part + cluster, item.size) + 1 > room:
            yield _of(item, part)
            part = ""
        part += cluster
    yield _of(item, part)


def _of(item: _Item, text: str) -> _Item:
    width = _measured(text, item.size) + 1
    return _Item(text, width, item.size, item.color, item.fill, item.framed)


def _clusters(text: str) -> Iterator[str]:
    found = ""
    for character in text:
        joined = unicodedata.category(character).startswith("M") or character in "\u200c\u200d"
        if found and not joined and found[-1] != "\u200d":
            yield found
            found = ""
        found += character
    if found:
        yield found


def _ordered(items: Sequence[_Item], base: bool) -> list[_Item]:
    """The items of a line as they stand from left to right, as a page has them (Unicode's UAX 9, an item a character):
    runs that are read from the right are turned round, but a number in them, such as the tokens ``1`` ``9`` ``4``
    ``8``, is read from the left. Brackets there are mirrored.

    What has no direction of its own, such as a blank, goes with its neighbours where these agree, and else with the
    paragraph, which is read from the right where ``base`` says so; two brackets go with what is between them.
    """
    own = [_direction(item.text) for item in items]
    behind = _carried(own, base)
    numbers = _numbers([item.text for item in items])
    around = [
        (right or number == "AN") if number else each for number, right, each in zip(numbers, behind, own, strict=True)
    ]
    _pair(around, [item.text for item in items], base)
    earlier = _carried(around, base)
    later = reversed(_carried(around[::-1], base))
    turned = [
        (before if before == after else base) if each is None else each
        for each, before, after in zip(around, earlier, later, strict=True)
    ]
    levels = [(2 if number else 1) if right else 2 * base for number, right in zip(numbers, turned, strict=True)]
    ordered = [
        (level, _mirrored(item) if level % 2 and each is None and not number else item)
        for level, each, number, item in zip(levels, own, numbers, items, strict=True)
    ]
    for lowest in (2, 1):
        runs: list[list[tuple[int, _Item]]] = [[]]
        for level, item in ordered:
            if level < lowest:
                runs += [[(level, item)], []]
            else:
                runs[-1].insert(0, (level, item))
        ordered = [each for run in runs for each in run]
    return [item for _, item in ordered]


def _mirrored(item: _Item) -> _Item:
    """Signs without a letter, as they stand in a run that is read from the right."""
    return replace(item, text="".join(reversed(list(_clusters(item.text)))).translate(_MIRRORED))


def _pair(around: list[bool | None], texts: Sequence[str], base: bool) -> None:
    """Give both of two brackets a direction, where something between them has one (UAX 9, N0)."""
    pairs: list[tuple[int, int]] = []
    opened: list[int] = []
    for at, text in enumerate(texts):
        kind = unicodedata.category(text) if len(text) == 1 and text.translate(_MIRRORED) != text else ""
        if kind == "Ps":
            opened.append(at)
        elif kind == "Pe":
            other = text.translate(_MIRRORED)
            found = next((i for i in reversed(range(len(opened))) if texts[opened[i]] == other), None)
            if found is not None:
                pairs.append((opened[found], at))
                del opened[found:]
    for start, end in sorted(pairs):
        inside = set(around[start + 1 : end]) - {None}
        if inside:
            before = _carried(around[:start], base)[-1:] == [not base]
            around[start] = around[end] = not base if before and base not in inside else base


def _numbers(texts: Sequence[str]) -> list[str]:
    """``"EN"`` for digits and the signs of a number, ``"AN"`` for Arabic ones or those behind Arabic; else nothing."""
    found: list[str] = []
    kinds = [{unicodedata.bidirectional(character) for character in text} for text in texts]
    letter = ""
    for each, text in zip(kinds, texts, strict=True):
        letters = [kind for kind in map(unicodedata.bidirectional, text) if kind in ("L", *_RIGHT_TO_LEFT)]
        letter = letters[-1] if letters else letter
        digits = "" if letters else "AN" if "AN" in each else "EN" if "EN" in each else ""
        found.append("AN" if digits and letter == "AL" else digits)
    for at in range(1, len(found) - 1):  # the point in 3.5
        joins = {"CS", "ES"} if found[at - 1] == "EN" else {"CS"}
        if kinds[at] <= joins and len(texts[at]) == 1 and found[at - 1] == found[at + 1]:
            found[at] = found[at - 1]
    for at in [*range(len(found)), *reversed(range(len(found)))]:  # the sign in 5%
        if kinds[at] == {"ET"} and "EN" in found[max(0, at - 1) : at + 2]:
            found[at] = "EN"
    return found


def _carried(directions: Sequence[bool | None], before: bool) -> list[bool]:
    """Each direction, or the last before it."""
    found = []
    for each in directions:
        before = before if each is None else each
        found.append(before)
    return found


def _direction(text: str) -> bool | None:
    """Whether a text is read from the right, by its first letter; None where it has none."""
    for character in text:
        kind = unicodedata.bidirectional(character)
        if kind == "L" or kind in _RIGHT_TO_LEFT:
            return kind in _RIGHT_TO_LEFT
    return None


# ------------------------------------------------------------------------------------------- fonts


def _drawable(text: str) -> str:
    """The text with the number of each character that no font can draw."""
    return "".join(c if c.isspace() or _family(c) is not None else f"⟨{ord(c):04X}⟩" for c in text)


def _font(text: str, size: float) -> FontProperties:
    """A font for a text: matplotlib's own, then those that have what it lacks."""
    families = dict.fromkeys([_OWN, *(_family(c) or _OWN for c in text if not c.isspace())])
    return FontProperties(family=list(families), size=size, weight="normal", style="normal")


@lru_cache(maxsize=65536)
def _family(character: str) -> str | None:
    """The first family that has a character, matplotlib's own before all."""
    return next((name for name, path in _fonts() if _has(path, character)), None)


@cache
def _fonts() -> tuple[tuple[str, str], ...]:
    """Every family with the path of its regular face."""
    faces = {
        face.name: face.fname
        for face in sorted(fontManager.ttflist, key=lambda face: face.fname, reverse=True)
        if not face.name.startswith(_LAST)
        and face.style == "normal"
        and str(face.weight) in ("400", "normal", "regular")
        and face.stretch == "normal"
    }
    return tuple(sorted(faces.items(), key=lambda face: (face[0] != _OWN, face[0])))


@lru_cache(maxsize=65536)
def _has(path: str, character: str) -> bool:
    """Whether a font can draw a character; pictures, such as coloured emoji, are no shapes that it could scale."""
    try:
        font = get_font(path)
        return bool(font.scalable and font.get_char_index(ord(character)))
    except (OSError, RuntimeError):  # a font that was removed, or that FreeType does not read
        return False


@lru_cache(maxsize=65536)
def _measured(text: str, size: float) -> float:
    """How wide a text is, in points."""
    if not text:
        return 0.0
    across, _, _ = _renderer().get_text_width_height_descent(text, _font(text, size), ismath=False)
    return float(across) * POINTS / PIXELS


@cache
def _renderer() -> RendererAgg:
    return RendererAgg(1, 1, PIXELS)
