"""The observers: what entered and left the modules one wants to look at."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx.engine._places import Place
from lrpx.engine._taps import Tap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.engine._places import Side
    from lrpx.engine._taps import Running


class Observer(Tap):
    """Records places.

    Args:
        patterns: shell patterns of the paths of modules.
        places: where they are recorded.
    """

    def __init__(self, patterns: Sequence[str], places: list[Place]) -> None:
        self.patterns = patterns
        self._places = places
        self._run: Running

    def begin(self, run: Running) -> None:
        """The run that is looked at."""
        self._run = weakref.proxy(run)

    def module(self, path: str, side: Side, value: Tensor) -> None:
        """One more place."""
        if not self._run.replaying:
            self._places.append(Place(path, side, value, value._version))

    def leaves(self) -> list[Tensor]:
        """What was there."""
        return [place.value for place in self._places]


def first_tensor(values: Any) -> Tensor | None:
    """The first floating-point tensor of what enters or leaves a module."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
    return None
