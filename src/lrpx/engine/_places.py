"""Where relevance can be read, and which operations ran."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

Side = Literal["input", "output"]


@dataclass(frozen=True)
class Source:
    """A place where relevance ends: the output of an embedding, or a floating-point input of the model.

    ``paths`` are the module paths that share the embedding's weight, or the name of the model's argument;
    ``ids`` the indices that were looked up, if any; ``value`` is a leaf of the graph; ``is_of_tokens``, whether the ids
    are of tokens that the model was given, or were computed from such, and no positions or types of them.
    """

    paths: tuple[str, ...]
    value: Tensor
    ids: Tensor | None = None
    is_of_tokens: bool = False

    def among(self, paths: Collection[str]) -> str | None:
        """Which of these paths of embeddings it is, or is a part of."""
        around = (path for path in sorted(paths) for each in self.paths if each == path or each.startswith(path + "."))
        return next(around, None)


PLACES_OF_TOKENS = (
    ("token types", re.compile(r"token_type|segment_emb|seg_emb")),
    (
        "positions",
        re.compile(
            r"(?:^|[._])(?:pos|positions?|positional|wpe|alibi)(?:[._]|$)|relative_(?:attention|position)|rel_attn_embed"
        ),
    ),
)
"""How the kind of an embedding shows in its path."""


def place_of_tokens(path: str, otherwise: str) -> str:
    """What an embedding is of by its path: token types or positions, or something else."""
    return next((kind for kind, shown in PLACES_OF_TOKENS if shown.search(path)), otherwise)


def is_among(numbers: list[int], tokens: Tensor) -> bool:
    """Whether a list of whole numbers is all the ids of tokens in a tensor, or those of a row of it."""
    return tokens.ndim > 0 and numbers in (tokens.flatten().tolist(), *tokens.tolist())


@dataclass(frozen=True)
class Place:
    """A module's input or output in one call, in the order of the forward pass."""

    path: str
    side: Side
    value: Tensor
    version: int


@dataclass(frozen=True)
class Ran:
    """An operation of the model: its torch function, the rule it ran under, the module it ran in, and how often.

    ``rule`` is the name of the rule it ran under; ``"plain"`` where none is needed, for the plain gradient is right;
    ``"source"`` where relevance ends; and ``"unknown"`` where nothing is known of the operation and the plain gradient
    was taken.
    """

    operation: str
    rule: str
    module: str
    count: int
