"""A card as a page, and a page to search all neurons of a model in.

A card loads nothing and runs nothing. The index holds one script, known by its hash, which makes text nodes of the
tokens and nothing else; they are data to it, never markup.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup

from lrpx._views import html
from lrpx._views.picture import number, one_line, picture
from lrpx.cards._lens import Lens
from lrpx.cards._ranges import places as positions
from lrpx.cards._ranges import ranged, trimmed
from lrpx.cards._references import LOWEST
from lrpx.units import places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.cards._card import Card
    from lrpx.cards._reading import References
    from lrpx.model import BoundModel

AT_A_TIME: Final = 256
"""Units whose logits over the whole vocabulary are held at once."""
FEW: Final = 6
"""Tokens of a unit in the index."""


@cache
def _environment() -> Environment:
    found = html.environment().overlay(loader=ChoiceLoader([PackageLoader("lrpx.cards"), PackageLoader("lrpx._views")]))
    found.globals |= {"ranged": ranged, "places": positions}
    return found


def page(card: Card) -> str:
    """A card as one self-contained HTML page."""
    shown = {name: [(each, picture(each.attribution)) for each in some] for name, some in card.passages.items()}
    histogram = trimmed(card.histogram)
    peaks = trimmed(card.peaks)
    context = {
        "title": f"Neuron {card.name} of {one_line(card.model)}",
        "card": card,
        "shown": shown,
        "written_most": max((abs(each.logit) for each in (*card.top, *card.bottom)), default=1.0) or 1.0,
        "histogram": histogram,
        "histogram_most": max((count for *_, count in histogram), default=1) or 1,
        "peaks": peaks,
        "peaks_most": max((count for *_, count in peaks), default=1) or 1,
    }
    pieces = [piece for some in shown.values() for _, each in some for piece in each.pieces]
    sheet = _sheet(pieces)
    template = _environment().get_template("page.html.j2")
    return template.render(
        context,
        body="card.html.j2",
        scope="lrpx",
        style=Markup(sheet),
        style_hash=html.content_hash(sheet),
        whole_page=True,
    )


def index_page(
    references: References,
    model: BoundModel | None = None,
    *,
    measure: str = "activation",
    done: Callable[[int], object] = lambda _: None,
) -> str:
    """A page to search the neurons of a model in, by the tokens they write and peak at.

    Args:
        references: what was collected.
        model: the model; loaded as it was collected by default.
        measure: by which ranking the passages were kept.
        done: called with how many more neurons are done.

    Raises:
        ModelError: the model has no vocabulary to read neurons with, or other weights than the one that was collected.
        InputError: the units were not ranked by that.
    """
    references.check_measure(measure)
    bound = references.model() if model is None else references.check(model)
    found = places(bound.module, "neurons")
    lens = Lens.of(bound, found)
    is_lowest = measure == LOWEST
    tokens = references.table[f"{measure} token"].to_pylist()
    values = references.table[f"{measure} value"].to_pylist()
    words: dict[str, int] = {}

    def named(ids: Sequence[int]) -> list[int]:
        return [words.setdefault(one_line(bound.label(i)), len(words)) for i in ids]

    units: list[list[Any]] = []
    for place in found:
        directions = lens.directions(bound.module.get_submodule(place.path), place.path)
        for begin in range(0, place.width, AT_A_TIME):
            logits = lens.logits(directions[begin : begin + AT_A_TIME])
            few = min(FEW, logits.shape[1])
            tops = [logits.topk(few, largest=largest).indices.tolist() for largest in (True, False)]
            for i, (top, bottom) in enumerate(zip(*tops, strict=True)):
                row = references.row(place.layer, begin + i)
                peaks = list(dict.fromkeys(tokens[row]))[:FEW]
                best = number(-values[row][0] if is_lowest else values[row][0]) if values[row] else ""
                units.append([place.layer, begin + i, named(top), named(bottom), named(peaks), best])
            done(len(logits))
    data = json.dumps({"words": list(words), "units": units}, ensure_ascii=True, separators=(",", ":"))
    script = resources.files("lrpx.cards").joinpath("templates/index.js").read_text(encoding="utf-8")
    sheet = _sheet([])
    return (
        _environment()
        .get_template("index.html.j2")
        .render(
            model=bound.as_it_is,
            ranked=("activation is lowest" if is_lowest else f"{measure} is highest"),
            best="Lowest" if is_lowest else "Highest",
            count=len(units),
            layers=len(found),
            texts=references.record["texts"],
            corpus=references.settings["corpus"]["file"],
            data=Markup(data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")),
            script=Markup(script),
            script_hash=html.content_hash(script),
            style=Markup(sheet),
            style_hash=html.content_hash(sheet),
        )
    )


def _sheet(pieces: Sequence[Any]) -> str:
    """The style sheet: that of every page, that of several heatmaps, and a card's own."""
    named = {"scope": "lrpx", "levels": [], "paper": ("#fff", "#181a1f"), "ink": ("#1b1d22", "#f0f1f4")}
    several = html.environment().get_template("gallery.css.j2").render(named, quiet=("#5b616e", "#9aa1ae"))
    own = resources.files("lrpx.cards").joinpath("templates/card.css.j2").read_text(encoding="utf-8")
    return html.style(pieces, whole_page=True) + several + own
