"""The attribution of a row's tokens, for values that are no target of the explainer's."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from lrpx.attribution import Attribution, Explained, Provenance
from lrpx.parts import Part, Parts

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.inputs import Row
    from lrpx.model import BoundModel


def attribution_of(
    model: BoundModel, row: Row, relevance: Tensor, explained: Explained, method: str, recipe: str
) -> Attribution:
    """Relevance ``[T]`` of the tokens of a row of one segment as a result."""
    tokens = row.tokens
    return Attribution(
        tokens=tokens.pieces,
        parts=Parts([Part("tokens", relevance, ("token",))]),
        explained=explained,
        prediction=None,
        provenance=Provenance(
            model=model.as_it_is,
            revision=model.revision,
            method=method,
            recipe=recipe,
            dtype=model.precision,
            device=model.device,
            versions={package: metadata.version(package) for package in ("lrpx", "torch", "transformers")},
        ),
        ids=tokens.ids,
        word_spans=tokens.word_spans,
        word_texts=tokens.word_texts,
        special=tokens.special,
        segments=((row.segments[0].name, 0, len(tokens.ids)),),
    )
