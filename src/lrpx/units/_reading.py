"""Taps at places, which know the calls of a module."""

from __future__ import annotations

import weakref
from collections import Counter
from glob import escape
from typing import TYPE_CHECKING, ClassVar

from lrpx.engine import Tap
from lrpx.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from lrpx.engine import Running
    from lrpx.engine._places import Side
    from lrpx.units._place import Place

AGAIN = (
    "{} runs again in the backward pass, where nobody knows which call it is that was changed; switch the model's "
    "checkpoints off"
)


class Called(Tap):
    """A tap at some modules that is told which of its module's calls it stands at.

    Args:
        paths: of the modules.
    """

    writes: ClassVar[bool] = False
    """Whether it puts another value in the place of one."""
    _run: Running | None = None

    def __init__(self, paths: Iterable[str]) -> None:
        self.patterns = tuple({escape(path): None for path in paths})
        self._calls: Counter[tuple[str, Side]] = Counter()

    def begin(self, run: Running) -> None:
        """A new run."""
        self._run = weakref.proxy(run)
        self._calls.clear()

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        """What enters or leaves a module, once more.

        Raises:
            TraceError: a part of the model that is to be changed runs again in the backward pass.
        """
        if self._run is not None and self._run.replaying:
            if self.writes:
                raise TraceError(AGAIN.format(path))
            return None
        call = self._calls[path, side]
        self._calls[path, side] += 1
        return self.at(path, side, call, value)

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """What enters or leaves a module in one of its calls, from 0; another value in its place, or None."""
        raise NotImplementedError


class Reading(Called):
    """What stands at some places in one run, in its graph.

    Args:
        places: where to look.
        unseen: modules like those, in which nobody has looked for units; a run that comes to one is refused.
    """

    def __init__(self, places: Sequence[Place], unseen: Iterable[str] = ()) -> None:
        self._unseen = frozenset(unseen)
        super().__init__([*(place.path for place in places), *sorted(self._unseen)])
        self.places = tuple(places)
        self._wanted = {(place.path, place.side, place.call) for place in places}
        self._values: dict[tuple[str, Side, int], tuple[Tensor, int]] = {}

    def begin(self, run: Running) -> None:
        """A new run."""
        super().begin(run)
        self._values = {}

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """What enters or leaves a module.

        Raises:
            TraceError: the model came to one where no units were looked for.
        """
        if path in self._unseen:
            raise TraceError(
                f"{path} was called, and was not when the model's units were looked for, as an expert that no token "
                "was sent to; choose other units"
            )
        if (path, side, call) in self._wanted:
            self._values[path, side, call] = value, value._version
        return None

    def leaves(self) -> list[Tensor]:
        """What was there."""
        return [value for value, _ in self._values.values()]

    def keep(self, place: Place, value: Tensor) -> None:
        """Another tensor for what stands at a place."""
        self._values[place.path, place.side, place.call] = value, value._version

    def value(self, place: Place) -> Tensor:
        """``[B, T, n]``: what stood there, every feature of the module's input or output.

        Raises:
            TraceError: the model did not come there, came there more often than when its units were looked for, or has
                changed the value in place since.
        """
        value, version = self._values.get((place.path, place.side, place.call), (None, 0))
        if value is None:
            raise TraceError(f"{place.path} was not called, or less than {place.call + 1} times; choose other units")
        calls = self._calls[place.path, place.side]
        if calls > max(place.calls, place.call + 1):
            raise TraceError(
                f"{place.path} was called {calls} times, and {place.calls} when its units were looked for, as in one "
                "whose depth depends on its input; choose other units"
            )
        if value._version != version:
            raise TraceError(f"the {place.side} of {place.name} was changed in place later; choose other units")
        return value
