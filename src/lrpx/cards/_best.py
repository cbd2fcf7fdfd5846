"""The k passages in which each of many units is highest, while passages stream by.

A passage is known by its number in the corpus. Of two with the same value the one with the smaller number comes first,
so what is kept depends on the passages alone: not on their order, nor on how they were cut into batches and parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY: Final = torch.iinfo(torch.int64).min
"""The key of no passage."""
LAST: Final = 2**32 - 1
"""The largest number that a passage may have."""


def keys(values: Tensor, passages: Tensor) -> Tensor:
    """Values (float32) and the numbers of their passages as int64 that sort as they do: by the value, then the smaller
    number above.

    >>> values, passages = torch.tensor([-1.0, 0.0, -0.0, 2.5]), torch.tensor([3, 7, 2, 9])
    >>> keys(values, passages).argsort(descending=True).tolist()
    [3, 2, 1, 0]
    >>> [part.tolist() for part in decoded(keys(values, passages))]
    [[-1.0, 0.0, 0.0, 2.5], [3, 7, 2, 9]]
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: there is one zero
    return (_ordered(bits).long() << 32) + (LAST - passages)


def decoded(key: Tensor) -> tuple[Tensor, Tensor]:
    """The values (float32) and the numbers of the passages that keys were made of."""
    return _ordered((key >> 32).int()).view(torch.float32), LAST - (key & LAST)


def _ordered(bits: Tensor) -> Tensor:
    """The bits of floats as integers of the same order, and back: of the negative ones all but the sign are turned."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@dataclass
class Best:
    """The k best passages of each of ``U`` units, best first.

    Args:
        key: ``[U, k]`` int64, of :func:`keys`; ``EMPTY`` where there is none yet.
        facts: ``[U, k, n]`` int32, what is known of each.
    """

    key: Tensor
    facts: Tensor

    @classmethod
    def none(cls, units: int, k: int, facts: int, device: torch.device | str = "cpu") -> Best:
        """None yet."""
        key = torch.full((units, k), EMPTY, device=device)
        return cls(key, torch.zeros(units, k, facts, dtype=torch.int32, device=device))

    def offer(self, key: Tensor, facts: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Take in what is better than what is there; mostly nothing is.

        Args:
            key: ``[B, U]``, of other passages than those before.
            facts: of those that are taken in, from their rows and their units ``[N]`` to ``[N, n]``.
        """
        better = key > self.key[:, -1]
        units = better.any(0).nonzero().flatten()
        if not len(units):
            return
        rows = better[:, units].any(1).nonzero().flatten()
        k = self.key.shape[1]
        pool = torch.cat([self.key[units], key[rows][:, units].T], 1)
        best, places = pool.topk(k, 1)  # no two keys are the same, but for EMPTY
        kept = self.facts[units].gather(1, places.clamp(max=k - 1)[..., None].expand(-1, -1, self.facts.shape[2]))
        at, column = (places >= k).nonzero().unbind(1)
        kept[at, column] = facts(rows[places[at, column] - k], units[at])
        self.key[units], self.facts[units] = best, kept

    def merge(self, other: Best) -> None:
        """Take in what another part of the corpus has; the parts may come in any order."""
        k = self.key.shape[1]
        self.key, places = torch.cat([self.key, other.key], 1).topk(k, 1)
        both = torch.cat([self.facts, other.facts], 1)
        self.facts = both.gather(1, places[..., None].expand(-1, -1, both.shape[2]))
        self.facts[self.key == EMPTY] = 0
