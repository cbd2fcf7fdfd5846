"""An attribution as HTML: a page of its own, or a fragment for a notebook.

There is no script in either. The page forbids itself everything but its one style sheet, by hash, so
a token that slipped through the escaping could still neither run nor load anything. Colours are classes,
not style attributes, for the same reason; numbers appear on hover and focus by CSS alone.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lrpx._views import picture as pictures
from lrpx._views.canvas import canvas
from lrpx._views.colour import INK, PAPER, QUIET, RGB, colour, hexadecimal, ink
from lrpx._views.gallery import FEW, groups
from lrpx._views.grid import grids
from lrpx._views.picture import one_line, percent, picture
from lrpx._views.waterfall import waterfall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lrpx._views.grid import Cell
    from lrpx._views.picture import Piece
    from lrpx.attribution import Attribution

STEPS: Final = 32
"""Shades on either side of zero: finer than the eye tells apart, few enough for classes."""

_STRONGEST = 10
_STOPS = 4
"""Colours of the legend's scale on either side of zero, which shows the same bend as the map."""
_MINUS = "−"
_NO_BREAK = "\N{NO-BREAK SPACE}"


def page(a: Attribution) -> str:
    """One self-contained HTML page; it loads nothing and runs nothing.

    Heatmap, numbers of every token, strongest tokens, a grid of every other part, ledger and provenance; light, dark,
    narrow, print.
    """
    drawn = [grid for grid in grids(a) if a.image is None or grid.name not in ("patches", "pixels")]
    context = _context(a) | {"grids": drawn}
    coloured = [*context["shown"].pieces, *(cell for grid in drawn for cell in grid.cells)]
    return _page("picture.html.j2", context, style(coloured, whole_page=True))


def fragment(a: Attribution) -> str:
    """The heatmap as a piece of HTML for a notebook.

    Its styles hold only inside it: every rule is below a class that is derived from the style sheet
    itself, so two fragments share a class only if they share the styles.
    """
    context = _context(a)
    return _fragment("picture.html.j2", context, lambda **options: style(context["shown"].pieces, **options))


def gallery_page(attributions: Sequence[Attribution]) -> str:
    """Several attributions on one page of the same kind: those of the same tokens stand side by side."""
    context = _gallery(attributions, len(attributions))
    return _page("gallery.html.j2", context, _gallery_style(context, whole_page=True))


def gallery_fragment(attributions: Sequence[Attribution]) -> str:
    """The first few of several attributions as a piece of HTML for a notebook."""
    context = _gallery(attributions, FEW)
    return _fragment("gallery.html.j2", context, lambda **options: _gallery_style(context, **options))


def content_hash(text: str) -> str:
    """What a page's policy names a style sheet or a script by, so that the page runs no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page(body: str, context: dict[str, Any], sheet: str) -> str:
    digest = content_hash(sheet)
    html = environment().get_template("page.html.j2")
    return html.render(context, body=body, scope="lrpx", style=Markup(sheet), style_hash=digest, whole_page=True)


def _fragment(body: str, context: dict[str, Any], styled: Callable[..., str]) -> str:
    scope = "lrpx-" + hashlib.sha256(styled(whole_page=False).encode()).hexdigest()[:8]
    sheet = styled(whole_page=False, scope=scope)
    html = environment().get_template("fragment.html.j2")
    return html.render(context, body=body, scope=scope, style=Markup(sheet), whole_page=False)


def _gallery(attributions: Sequence[Attribution], most: int) -> dict[str, Any]:
    """What the gallery's template reads of the first so many."""
    shown = attributions[:most]
    count = len(attributions)
    return {
        "title": "1 explanation" if count == 1 else f"{count} explanations",
        "groups": groups(shown),
        "left_out": count - len(shown),
        "shown_count": len(shown),
        "has_images": any(a.image is not None for a in shown),
        "provenances": list(dict.fromkeys(tuple(_provenance(a)) for a in shown)),
    }


def _gallery_style(context: dict[str, Any], *, whole_page: bool, scope: str = "lrpx") -> str:
    pieces = [piece for group in context["groups"] for line in group.lines for piece in line.shown.pieces]
    named = {"scope": scope, "paper": _pair(PAPER), "ink": _pair(INK), "quiet": _pair(QUIET), "levels": _levels(pieces)}
    more = environment().get_template("gallery.css.j2").render(named)
    return style(pieces, whole_page=whole_page, scope=scope) + more


def _context(a: Attribution) -> dict[str, Any]:
    """What the templates read; plain text throughout, they do the escaping."""
    shown = picture(a)
    return {
        "title": one_line(a.explained.description),
        "a": a,
        "shown": shown,
        "strongest": shown.strongest(_STRONGEST),
        "fall": waterfall(a),
        "provenance": _provenance(a),
        "canvas": canvas(a),
        "has_images": a.image is not None,
    } | _units(a)


def _units(a: Attribution) -> dict[str, str]:
    """How one of the pieces is called, and several."""
    unit = "token" if a.ids else "group" if a.has_text else "patch"
    return {"unit": unit, "units": f"{unit}es" if unit == "patch" else f"{unit}s"}


def _provenance(a: Attribution) -> list[tuple[str, str]]:
    made = a.provenance
    facts = {
        "Model": made.model,
        "Revision": made.revision or "not recorded",
        "Method": made.method,
        "Recipe": made.recipe,
        "Precision": made.dtype,
        "Device": made.device,
        **dict(sorted(made.versions.items())),
    }
    return [(one_line(name), one_line(fact)) for name, fact in facts.items()]


def style(pieces: Iterable[Piece | Cell], *, whole_page: bool, scope: str = "lrpx") -> str:
    """The style sheet of a page or a fragment, with a class for each shade that these pieces have.

    Args:
        pieces: all that the page shows.
        whole_page: a page of its own, rather than a part of another.
        scope: the class that every rule is below.
    """
    return (
        environment()
        .get_template("style.css.j2")
        .render(
            scope=scope,
            whole_page=whole_page,
            levels=_levels(pieces),
            paper=_pair(PAPER),
            ink=_pair(INK),
            quiet=_pair(QUIET),
            towards=_backgrounds(1.0),
            against=_backgrounds(-1.0),
            stops=[_backgrounds(step / _STOPS) for step in range(-_STOPS, _STOPS + 1)],
        )
    )


def _levels(pieces: Iterable[Piece | Cell]) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """The class of each shade that the pieces have, with its background and its ink."""
    levels = sorted({_level(piece) for piece in pieces} - {0})
    return [(_level_class(n), _backgrounds(n / STEPS), _inks(n / STEPS)) for n in levels]


def _level(piece: Piece | Cell) -> int:
    return round(piece.ratio * STEPS)


def _level_class(level: int) -> str:
    return f"lrpx-{'p' if level > 0 else 'n'}{abs(level)}" if level else ""


def _backgrounds(ratio: float) -> tuple[str, str]:
    return hexadecimal(colour(ratio)), hexadecimal(colour(ratio, dark=True))


def _inks(ratio: float) -> tuple[str, str]:
    return hexadecimal(ink(colour(ratio))), hexadecimal(ink(colour(ratio, dark=True)))


def _pair(colours: dict[bool, RGB]) -> tuple[str, str]:
    return hexadecimal(colours[False]), hexadecimal(colours[True])


def _typeset(text: str) -> str:
    """A number with a real minus sign."""
    return text.replace("-", _MINUS)


def _number(value: float) -> str:
    return _typeset(pictures.number(value))


def _edge(place: float) -> str:
    """A place within [0, 1] of the waterfall as the left edge of a line four units wide, of 1,000."""
    return f"{996 * place:.1f}"


def _percent(part: float | None) -> str:
    return _typeset(percent(part))


def _tip(piece: Piece, unit: str) -> str:
    """What a token says when pointed at."""
    parts = [_number(piece.relevance)]
    if piece.share is not None:
        parts.append(f"{_percent(piece.share)} of the value")
    parts.append(f"{unit} {piece.index}")
    if piece.id is not None:
        parts.append(f"id {piece.id}")
    if piece.special:
        parts.append("special")
    if piece.sink:
        parts.append("beyond the colour scale")
    return " · ".join(part.replace(" ", _NO_BREAK) for part in parts)


@cache
def environment() -> Environment:
    """Jinja2 with the views' templates and filters; whatever a template is given is escaped."""
    environment = Environment(
        loader=PackageLoader("lrpx._views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "percent": _percent,
        "typeset": _typeset,
        "edge": _edge,
        "one_line": one_line,
        "tip": _tip,
        "level": lambda piece: _level_class(_level(piece)),
    }
    return environment
