"""How ranges of numbers are shown, in the page and in the terminal alike."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def trimmed(rows: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Rows of ``(from, to, count)`` without the empty ones at both ends.

    >>> trimmed([(0, 1, 0), (1, 2, 3), (2, 3, 0), (3, 4, 1), (4, 5, 0)])
    [(1, 2, 3), (2, 3, 0), (3, 4, 1)]
    """
    there = [i for i, (*_, count) in enumerate(rows) if count]
    return list(rows[there[0] : there[-1] + 1]) if there else []


def ranged(low: float, high: float) -> str:
    """A range of activations.

    >>> ranged(-inf, -128.0), ranged(0.5, 1.0), ranged(128.0, inf)
    ('below -128', '0.5 to 1', 'from 128')
    """
    if low == -inf:
        return f"below {high:g}"
    return f"from {low:g}" if high == inf else f"{low:g} to {high:g}"


def places(first: float, last: float) -> str:
    """A range of positions; ``last`` is −1 where it is open.

    >>> places(0, 0), places(2, 3), places(16384, -1)
    ('token 0', 'tokens 2 to 3', 'from token 16384')
    """
    if first == last:
        return f"token {first}"
    return f"from token {first}" if last < 0 else f"tokens {first} to {last}"
