"""Indirect object identification (Wang et al. 2023): "When Mary and John went to the store, John gave a drink to" →
" Mary". The templates, names, places and objects are written here.

Two names are introduced in either order, and the one that is named again, the subject, gives something to the other,
the indirect object. The corrupt prompt differs in one word alone, the second mention of the subject:

- ``"swap"``: it is the other name, so that the answer is turned round (Nanda's attribution patching; Jafari et al.
  2025);
- ``"abc"``: it is a third name, so that nothing tells the two apart.
"""

from __future__ import annotations

from itertools import cycle
from random import Random
from typing import Final

from lrpx._data.minimal_pairs import MinimalPair
from lrpx.errors import InputError

NAMES: Final = (
    "John", "Mary", "Tom", "James", "Anna", "Paul", "Peter", "Alice", "David", "Sarah", "Michael", "Lisa", "Mark",
    "Emma", "Robert", "Laura", "Daniel", "Jane", "Kevin", "Rachel", "George", "Kate", "Simon", "Martin", "Richard",
    "Jack", "Sam", "Adam", "Henry", "Charles",
)  # fmt: skip
PLACES: Final = ("store", "park", "school", "office", "garden", "hospital", "station", "restaurant")
OBJECTS: Final = ("drink", "book", "ring", "ball", "letter", "ticket", "hat", "camera")
TEMPLATES: Final = (
    "When {a} and {b} went to the {place}, {s} gave a {object} to",
    "Then {a} and {b} went to the {place}. {s} handed the {object} to",
    "After {a} and {b} left the {place}, {s} showed a {object} to",
    "While {a} and {b} were working at the {place}, {s} passed a {object} to",
    "Yesterday {a} and {b} had a long talk at the {place}. In the end {s} offered the {object} to",
    "The {place} was full when {a} and {b} arrived, so {s} gave the {object} to",
)
CORRUPT: Final = ("swap", "abc")


def ioi_pairs(limit: int, corrupt: str = "swap", seed: int = 0) -> list[MinimalPair]:
    """Pairs of prompts; each template and both orders of the names come equally often.

    Args:
        limit: how many.
        corrupt: one of :data:`CORRUPT`.
        seed: which names, places and objects.

    Raises:
        InputError: there is no such way to corrupt them.

    >>> pair = ioi_pairs(1)[0]
    >>> [a == b for a, b in zip(pair.clean.split(), pair.corrupt.split())].count(False)
    1
    """
    if corrupt not in CORRUPT:
        raise InputError(f"there is no way {corrupt!r} to corrupt a prompt; the ways are {', '.join(CORRUPT)}")
    random = Random(seed)
    found = []
    kinds = cycle([(template, swapped) for swapped in (False, True) for template in TEMPLATES])
    for number, (template, swapped) in zip(range(1, limit + 1), kinds, strict=False):
        subject, other, third = random.sample(NAMES, 3)
        a, b = (subject, other) if swapped else (other, subject)
        words = {"a": a, "b": b, "place": random.choice(PLACES), "object": random.choice(OBJECTS)}
        instead = other if corrupt == "swap" else third
        clean, changed = (template.format(s=name, **words) for name in (subject, instead))
        found.append(MinimalPair(f"ioi:{number}", clean, changed, f" {other}", f" {subject}", number))
    return found
