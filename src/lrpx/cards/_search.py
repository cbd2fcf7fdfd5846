"""Which neurons have to do with a word? By what they write, by where they peak, by the passages they were kept for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np
import torch

from lrpx.cards._corpus import as_cut, texts_of
from lrpx.cards._lens import Lens
from lrpx.errors import InputError
from lrpx.units import places

if TYPE_CHECKING:
    from pathlib import Path

    from lrpx.cards._reading import References
    from lrpx.model import BoundModel

By = Literal["writes", "peaks", "passages"]
WAYS: Final[tuple[By, ...]] = get_args(By)


@dataclass(frozen=True)
class Hit:
    """A neuron that was found.

    Args:
        layer, unit: which.
        score: by ``"writes"``, how many standard deviations the token's logit lies above the mean of all that its row
            writes, or below; else in how many of its reference passages.
        of: of how many; 0 for ``"writes"``.
    """

    layer: int
    unit: int
    score: float
    of: int = 0


def search(
    references: References,
    text: str,
    by: By = "writes",
    model: BoundModel | None = None,
    *,
    measure: str = "activation",
    top: int = 20,
    corpus: Path | None = None,
) -> list[Hit]:
    """The neurons that a text finds, the best first; of equal ones the lower layer and unit.

    Args:
        references: what was collected.
        text: one token, for ``"writes"``; else any text, whatever its case.
        by: ``"writes"``: the token stands out, raised or lowered, in what the neuron's row writes; ``"peaks"``: the
            token at which it is highest in a passage is this one, white space aside; ``"passages"``: the passage
            contains it, as far as the model read it.
        model: the model; loaded as it was collected by default.
        measure: by which ranking the passages were kept.
        top: how many.
        corpus: the file of the passages, where it has moved.

    Raises:
        InputError: there is no such way, an empty text, or a ranking that there is not.
        TargetError: no token, for ``"writes"``.
        ModelError: the model has no vocabulary to read neurons with.
        DataError: the corpus is missing, or is another by now.
    """
    if by not in WAYS:
        raise InputError(f"neurons are searched by {', '.join(WAYS)}; {by!r} is none of them")
    if not text.strip():
        raise InputError("the text to search for is empty; pass a word")
    if by != "writes":
        references.check_measure(measure)
    if by == "passages":
        wanted = text.casefold()
        found = [each for each in texts_of(references, corpus) if wanted in each.text.casefold()]
        if found and references.are_cut:
            bound = references.model() if model is None else references.check(model)
            limit = references.settings["context"]
            found = [each for each in found if wanted in as_cut(bound, each.text, limit).casefold()]
        lines = [each.line for each in found]
        return _counted(references, f"{measure} line", np.array(lines, dtype=np.int64), top)
    bound = references.model() if model is None else references.check(model)
    if by == "peaks":
        _, tokens = references.flat(f"{measure} token")
        wanted = text.strip().casefold()
        ids = [int(each) for each in np.unique(tokens) if bound.label(int(each)).strip().casefold() == wanted]
        return _counted(references, f"{measure} token", np.array(ids, dtype=np.int64), top)
    token = bound.index(text)
    where = places(bound.module, "neurons")
    lens = Lens.of(bound, where)
    scores = torch.cat(
        [lens.scores(lens.directions(bound.module.get_submodule(place.path), place.path), token) for place in where]
    )
    order = scores.abs().argsort(descending=True, stable=True)[:top]
    return [Hit(*references.name(i), float(scores[i])) for i in order.tolist()]


def _counted(references: References, column: str, wanted: np.ndarray, top: int) -> list[Hit]:
    """The units by how many values of a column are among those wanted."""
    rows, values = references.flat(column)
    size = references.table.num_rows
    hits = np.bincount(rows[np.isin(values, wanted)], minlength=size)
    each = np.bincount(rows, minlength=size)
    order = np.argsort(-hits, kind="stable")[:top]
    return [Hit(*references.name(int(i)), float(hits[i]), int(each[i])) for i in order if hits[i]]
