"""The observers: what entered and left the modules one wants to look at."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx._modules import argument_names
from lrpx.engine._places import Place
from lrpx.engine._taps import Tap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module

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


def first_given(module: Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first floating-point tensor that a module is given, in the order in which its ``forward`` names them: a call
    may name a mask before the stream."""
    if first_tensor(args) is None and len(kwargs) > 1:
        names = _names(type(module))  # type: ignore[arg-type]  # a class can be hashed
        kwargs = {name: kwargs[name] for name in sorted(kwargs, key=lambda name: names.get(name, len(names)))}
    return first_tensor((*args, *kwargs.values()))


@lru_cache(maxsize=1024)
def _names(kind: type[Module]) -> Mapping[str, int]:
    """The arguments of a class's ``forward``, and which each is."""
    forward = getattr(kind, "forward", None)  # what torch.jit has made has none
    return {} if forward is None else {name: at for at, name in enumerate(argument_names(forward))}


def first_tensor(values: Any) -> Tensor | None:
    """The first floating-point tensor of what enters or leaves a module."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
    return None
