"""Which interventions hold: :mod:`lrpx.interventions` writes them down here, and what runs a model asks.

What is tried of a model is tried without them, for it is so behind their block, too.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module

_here = threading.local()


class Intervening(NamedTuple):
    """What is known of an intervention: the model that it is in, what it changes, and at which modules."""

    model: Module
    changes: tuple[str, ...]
    at: frozenset[Module]


def interventions() -> dict[int, Intervening]:
    """The interventions (``lrpx.interventions``) that hold in this thread, by what identifies each."""
    found: dict[int, Intervening] = _here.__dict__.setdefault("found", {})
    return found


def intervened(model: Module) -> bool:
    """Whether interventions hold in a model in this thread."""
    return any(each.model is model for each in interventions().values())


def intervened_at(modules: Iterable[Module]) -> bool:
    """Whether an intervention in this thread changes, or keeps, what one of these modules takes or gives."""
    return any(not each.at.isdisjoint(modules) for each in interventions().values())


def changes_in(model: Module) -> tuple[str, ...]:
    """What the interventions that hold in a model in this thread change, outer ones first."""
    return tuple(told for each in interventions().values() if each.model is model for told in each.changes)


@contextmanager
def without_interventions() -> Iterator[None]:
    """In the block models run as they do without interventions in this thread."""
    here = interventions()
    kept = dict(here)
    here.clear()
    try:
        yield
    finally:
        here.update(kept)
