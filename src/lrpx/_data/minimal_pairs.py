"""Pairs of prompts that differ in as little as turns the answer round: a clean one, a corrupt one, and two answers.

Those of subject-verb agreement are written here; indirect object identification is in :mod:`lrpx._data.ioi`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Final

from lrpx._data.texts import read_columns
from lrpx.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS: Final = ("clean", "corrupt", "right", "wrong")
NOUNS: Final = (
    ("door", "doors"), ("key", "keys"), ("book", "books"), ("boy", "boys"), ("girl", "girls"), ("dog", "dogs"),
    ("horse", "horses"), ("car", "cars"), ("house", "houses"), ("tree", "trees"), ("letter", "letters"),
    ("picture", "pictures"), ("friend", "friends"), ("teacher", "teachers"), ("road", "roads"), ("song", "songs"),
    ("window", "windows"), ("bird", "birds"), ("table", "tables"), ("ship", "ships"),
)  # fmt: skip
"""Nouns in singular and plural."""
BETWEEN: Final = ("of the", "near the", "behind the", "with the", "from the", "for the")


@dataclass(frozen=True)
class MinimalPair:
    """Two prompts and two answers.

    Args:
        id: what it is called.
        clean: the prompt that is explained.
        corrupt: the other.
        right: what goes on the clean prompt, with the space before it.
        wrong: what does not.
        line: where it stands in a file, or its number, from 1.
    """

    id: str
    clean: str
    corrupt: str
    right: str
    wrong: str
    line: int


def agreement_pairs(limit: int, seed: int = 0) -> list[MinimalPair]:
    """Subject-verb agreement: ``The doors of the house`` → `` are``; corrupt is the subject's other number.

    Half of the second nouns have the number of the subject, half the other one; half of the subjects are plural.

    Args:
        limit: how many, at most as many as there are.
        seed: which.

    >>> agreement_pairs(1)[0].right in (" are", " is")
    True
    """
    every = [
        (subject, between, other, plural, attracts)
        for subject, between, other in product(NOUNS, BETWEEN, NOUNS)
        if subject != other
        for plural, attracts in product((False, True), repeat=2)
    ]
    Random(seed).shuffle(every)
    found = []
    for number, (subject, between, other, plural, attracts) in enumerate(every[:limit], 1):
        noun = other[plural != attracts]
        right, wrong = (" are", " is") if plural else (" is", " are")
        clean, corrupt = (f"The {subject[each]} {between} {noun}" for each in (plural, not plural))
        found.append(MinimalPair(f"agreement:{number}", clean, corrupt, right, wrong, number))
    return found


def read_pairs(path: Path, limit: int | None = None) -> list[MinimalPair]:
    """The pairs of a table with the columns ``clean``, ``corrupt``, ``right``, ``wrong``.

    Args:
        path: ``.tsv``, ``.csv`` or ``.jsonl``.
        limit: take the first so many.

    Raises:
        DataError: the file cannot be read, or has no such column or no pair.
    """
    rows = read_columns(path, COLUMNS, limit)
    empty = next((number for number, row in rows if not all(row.values())), None)
    if empty is not None:
        raise DataError(f"{path}:{empty} has an empty column; give a text for each of {', '.join(COLUMNS)}")
    return [
        MinimalPair(f"{path.stem}:{number}", row["clean"], row["corrupt"], row["right"], row["wrong"], number)
        for number, row in rows
    ]
