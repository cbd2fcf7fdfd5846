"""Rules of a user's own, in a module that can be imported; and what cannot be told from one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lrpx.rules import scaled_on_entry

if TYPE_CHECKING:
    from torch import Tensor


def half(op: Any, /, *inputs: Any) -> Tensor:
    """Half of the relevance."""
    return scaled_on_entry(op(*inputs), 0.5)


@dataclass(frozen=True)
class Share:
    """A share of the relevance."""

    factor: float = 0.5
    note: str = ""

    def __call__(self, op: Any, /, *inputs: Any) -> Tensor:
        return scaled_on_entry(op(*inputs), self.factor)


@dataclass(frozen=True)
class Needs:
    """A rule without defaults."""

    factor: float

    def __call__(self, op: Any, /, *inputs: Any) -> Tensor:
        return op(*inputs)


class Plain:
    """No dataclass."""

    def __call__(self, op: Any, /, *inputs: Any) -> Tensor:
        return op(*inputs)


def made() -> Any:
    def inner(op: Any, /, *inputs: Any) -> Tensor:
        return op(*inputs)

    return inner


renamed = half
shortened = partial(half)
nameless = lambda op, *inputs: op(*inputs)  # noqa: E731
