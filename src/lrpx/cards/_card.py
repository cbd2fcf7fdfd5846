"""A neuron's card: what it stands for, as far as texts and the model's vocabulary tell (Achtibat et al. 2024, §3.4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lrpx._files import write_text
from lrpx.cards._corpus import read_lines, read_row
from lrpx.cards._explaining import explain_units
from lrpx.cards._lens import Lens
from lrpx.cards._references import OCTAVES, edges
from lrpx.errors import MethodError, ModelError
from lrpx.units import Place, places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx.attribution import Attribution
    from lrpx.cards._reading import Passage, References
    from lrpx.cards._terminal import CardView
    from lrpx.model import BoundModel

SHOWN: Final = 8
"""Passages of a measure that a card explains."""
WORDS: Final = 12
"""Tokens on either side of the vocabulary."""


@dataclass(frozen=True)
class Shown:
    """A reference passage with its explanation.

    Args:
        passage: where it stands and how high the unit is.
        attribution: the relevance of its tokens for the unit's activation at the passage's position.
        predicted: what the model predicted, whose relevance ranked the passage; None of an activation.
    """

    passage: Passage
    attribution: Attribution
    predicted: str | None = None


@dataclass(frozen=True)
class Written:
    """A token that a unit's row of the second matrix speaks for, or against.

    Args:
        text: the token.
        id: its id.
        logit: what the row adds to its logit, for an activation of 1 and a deviation of 1 in the final norm.
    """

    text: str
    id: int
    logit: float


@dataclass(frozen=True)
class Card:
    """What is known of one neuron.

    Args:
        model: the model's name.
        layer, unit, path: which neuron.
        texts: how many texts it was seen in.
        passages: by what they were ranked by, its reference passages, best first, each explained.
        top, bottom: the tokens that its row raises and lowers most; empty where the model has no vocabulary to read it
            with, and ``note`` says why.
        histogram: ``(from, to, tokens)``: of how many of the tokens that were looked at its activation was in each
            range; the outer two are open.
        peaks: ``(first, last, texts)``: in how many texts it was highest at which positions, from 0.
        relevant_for: ``(token, passages, relevance)``: what the model predicted in the passages of highest relevance.
        every: the histogram counts one of so many tokens.
        note: why there is no vocabulary, or empty.
    """

    model: str
    layer: int
    unit: int
    path: str
    texts: int
    passages: Mapping[str, Sequence[Shown]]
    top: Sequence[Written]
    bottom: Sequence[Written]
    histogram: Sequence[tuple[float, float, int]]
    peaks: Sequence[tuple[int, int, int]]
    relevant_for: Sequence[tuple[str, int, float]]
    every: int
    note: str = ""

    @property
    def name(self) -> str:
        """``17:3948``, as the command line takes it."""
        return f"{self.layer}:{self.unit}"

    def to_html(self, path: str | Path) -> None:
        """Write a page of its own, which loads nothing and runs nothing.

        Raises:
            ResultFileError: it cannot be written.
        """
        from lrpx.cards._page import page

        write_text(path, page(self))

    def __rich__(self) -> CardView:
        from lrpx.cards._terminal import CardView

        return CardView(self)


def card(
    references: References,
    layer: int,
    unit: int,
    model: BoundModel | None = None,
    *,
    corpus: str | Path | None = None,
    passages: int = SHOWN,
    words: int = WORDS,
    lens: Lens | None = None,
) -> Card:
    """The card of a neuron.

    Args:
        references: what was collected.
        layer, unit: which neuron.
        model: the model; loaded as it was collected by default.
        corpus: the file of the passages, where it has moved.
        passages: how many of each measure are explained.
        words: tokens on either side of the vocabulary.
        lens: the model's, if it was made before.

    Raises:
        MethodError: there is no such neuron; says how many there are.
        DataError: the corpus is missing, or is another by now.
        ModelError: the model has other weights than the one that was collected.
    """
    references.row(layer, unit)
    bound = references.model() if model is None else references.check(model)
    place = place_of(bound, layer)
    chosen = {name: references.passages(layer, unit, name)[:passages] for name in references.measures}
    path = None if corpus is None else Path(corpus)
    texts = read_lines(references, {each.line for some in chosen.values() for each in some}, path)
    shown = {name: _shown(references, bound, place, unit, some, texts) for name, some in chosen.items()}
    top, bottom, note = _written(bound, place, unit, words, lens)
    seen = sum(references.peaks(layer, unit))
    predicted: Counter[int] = Counter()
    relevance: dict[int, float] = {}
    for each in references.passages(layer, unit, "relevance") if "relevance" in references.measures else ():
        assert each.predicted is not None
        predicted[each.predicted] += 1
        relevance[each.predicted] = relevance.get(each.predicted, 0.0) + each.value
    ranges = pairwise([-inf, *edges(), inf])
    return Card(
        model=bound.as_it_is,
        layer=layer,
        unit=unit,
        path=place.name,
        texts=seen,
        passages=shown,
        top=top,
        bottom=bottom,
        histogram=[(*each, count) for each, count in zip(ranges, references.counts(layer, unit), strict=True)],
        peaks=[
            (0 if i == 0 else 2 ** (i - 1), -1 if i == OCTAVES - 1 else 2**i - 1, count)
            for i, count in enumerate(references.peaks(layer, unit))
        ],
        relevant_for=[(bound.label(token), count, relevance[token]) for token, count in predicted.most_common()],
        every=references.settings["every"],
        note=note,
    )


def place_of(model: BoundModel, layer: int) -> Place:
    """Where the neurons of a layer are.

    Raises:
        MethodError: there is no such layer.
    """
    found = next((each for each in places(model.module, "neurons") if each.layer == layer), None)
    if found is None:
        raise MethodError(f"{type(model.module).__name__} has no neurons in layer {layer}; count layers from 0")
    return found


def _shown(
    references: References,
    model: BoundModel,
    place: Place,
    unit: int,
    chosen: Sequence[Passage],
    texts: Mapping[int, str],
) -> list[Shown]:
    if not chosen:
        return []
    limit = references.settings["context"]
    rows = [read_row(model, texts[each.line], limit) for each in chosen]
    made: dict[int, Attribution] = {}
    for group in model.groups(rows, len(rows)):
        attributions = explain_units(
            model, [rows[i] for i in group], place, [unit] * len(group), [chosen[i].position for i in group]
        )
        made.update(zip(group, attributions, strict=True))
    return [
        Shown(each, made[i], None if each.predicted is None else model.label(each.predicted))
        for i, each in enumerate(chosen)
    ]


def _written(
    model: BoundModel, place: Place, unit: int, words: int, lens: Lens | None
) -> tuple[list[Written], list[Written], str]:
    """The tokens that a unit's row raises and lowers most; or none, and why."""
    try:
        lens = Lens.of(model, [place]) if lens is None else lens
        direction = lens.directions(model.module.get_submodule(place.path), place.path)[unit]
    except ModelError as error:
        return [], [], str(error)
    logits = lens.logits(direction)
    found = []
    for largest in (True, False):
        values, ids = logits.topk(min(words, len(logits)), largest=largest)
        found.append([Written(model.label(i), i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)])
    return found[0], found[1], ""
