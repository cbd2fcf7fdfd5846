"""What every view shows of several attributions: those of the same tokens side by side, each told from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lrpx._views.canvas import canvas
from lrpx._views.picture import number, one_line, percent, picture

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lrpx._views.canvas import Canvas
    from lrpx._views.picture import Picture, Piece
    from lrpx.attribution import Attribution, Prediction

FEW: Final = 20
"""So many attributions of a list are shown where nobody asked for all: in a notebook, in a terminal."""
MAIN: Final = ("method", "what", "where", "model")
"""Facts of attributions that stand together, of which none that differs is left unsaid."""


@dataclass(frozen=True)
class Line:
    """One attribution: its number in the list from 1, what tells it from the others of its group, and its pictures."""

    number: int
    label: str
    attribution: Attribution
    shown: Picture
    canvas: Canvas | None

    @property
    def value(self) -> str:
        """The explained value."""
        return number(self.attribution.explained.value)


@dataclass(frozen=True)
class Group:
    """Attributions of the same tokens.

    Args:
        title: what was explained, where it is the same for all.
        facts: what else is the same for all of the prediction, the model and the method.
        lines: one for each attribution, in their order.
    """

    title: str
    facts: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def rows(self) -> tuple[tuple[Piece, ...], ...]:
        """For each token, what it is in each line."""
        return tuple(zip(*(line.shown.pieces for line in self.lines), strict=True))

    def strongest(self, count: int) -> tuple[tuple[Piece, ...], ...]:
        """The rows of the tokens that are strong in any line, strongest first, each as a share of its own scale."""
        ranked = sorted(self.rows, key=lambda row: -max(abs(piece.ratio) for piece in row))
        return tuple(row for row in ranked[:count] if any(piece.relevance for piece in row))


def groups(attributions: Iterable[Attribution]) -> tuple[Group, ...]:
    """Lay out attributions: one group for all of the same tokens and segments, and of one image, as they first come."""
    found: dict[object, list[tuple[int, Attribution]]] = {}
    for at, a in enumerate(attributions, 1):
        image = None if a.image is None else (tuple(a.image.shape), a.image.clone().numpy().tobytes())
        found.setdefault((a.tokens, a.segments, image), []).append((at, a))
    return tuple(map(_group, found.values()))


def _group(numbered: Sequence[tuple[int, Attribution]]) -> Group:
    told = [_told(a) for _, a in numbered]
    common = {name: fact for name, fact in told[0].items() if all(each[name] == fact for each in told)}
    labels = zip(numbered, _labels(told, numbered), strict=True)
    lines = (Line(at, label, a, picture(a), canvas(a)) for (at, a), label in labels)
    kind = "text" if numbered[0][1].image is None else "image"
    facts = tuple(common[name] for name in ("prediction", "model", "method") if common.get(name))
    return Group(common.get("what", f"{len(numbered)} explanations of the same {kind}"), facts, tuple(lines))


def _told(a: Attribution) -> dict[str, str]:
    """What may tell an attribution from another of the same tokens, what a person would name first before the rest."""
    made, where = a.provenance, a.explained.position
    return {
        "method": one_line(made.method),
        "what": one_line(a.explained.description),
        "where": "" if where is None else f"position {where}",
        "model": one_line(made.model),
        "recipe": one_line(made.recipe),
        "revision": one_line(made.revision or ""),
        "precision": one_line(made.dtype),
        "device": one_line(made.device),
        "prediction": _predicted(a.prediction),
    }


def _predicted(prediction: Prediction | None) -> str:
    if prediction is None:
        return ""
    return f'predicted "{one_line(prediction.text)}" {percent(prediction.probability)}'


def _labels(told: Sequence[dict[str, str]], numbered: Sequence[tuple[int, Attribution]]) -> list[str]:
    """The method, the target, its place and the model where they differ, as many of the other facts as tell the
    attributions apart, and else their numbers."""
    chosen: list[str] = []
    for name in told[0]:
        if name not in MAIN and len({tuple(each[key] for key in chosen) for each in told}) == len(told):
            break
        if len({each[name] for each in told}) > 1:
            chosen.append(name)
    labels = [", ".join(each[name] for name in chosen if each[name]) for each in told]
    if len(set(labels)) < len(labels):
        return [f"{label}, no. {at}" if label else f"no. {at}" for label, (at, _) in zip(labels, numbered, strict=True)]
    return labels
