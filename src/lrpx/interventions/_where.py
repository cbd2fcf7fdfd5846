"""Where a change is meant: what a user names, as what a hook knows of it, and the features of each unit that is named.

A path, a side of it or a place of units is resolved to one module's input or output; where several things may be meant,
it is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from lrpx._modules import layers, named_modules
from lrpx.errors import InputError, MethodError, ModelError
from lrpx.interventions._changes import Change, Set, change_of
from lrpx.units import Place
from lrpx.units._asked import apart_of, calls_of, is_picked, is_turned, neurons_or_heads
from lrpx.units._place import called, own_paths, split_name, stack_of

if TYPE_CHECKING:
    from torch.nn import Module

    from lrpx.engine._places import Side

Key: TypeAlias = "str | tuple[str, Side] | Place"
Wanted: TypeAlias = "Change | float | Mapping[int, Change | float]"


@dataclass(frozen=True)
class Where:
    """A place as a hook knows it; ``place``: its units, ``call``: which call of the module, or every; ``turned``:
    whether the tokens there come before the rows, None where only shapes may tell; ``apart``: how many places there
    were that are no tokens'; ``holders``: the module and those that it is in, the innermost first."""

    path: str
    side: Side
    place: Place | None = None
    call: int | None = None
    turned: bool | None = False
    apart: int = 0
    holders: tuple[Module, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The path, and which call of it."""
        return called(self.path, self.call)


def resolved(model: Module, changes: Mapping[Any, Any]) -> list[tuple[Where, Any]]:
    """The places that are meant by the keys.

    Raises:
        MethodError: a path that is none.
    """
    if not isinstance(changes, Mapping) or not changes:
        raise InputError('the changes are none; pass a dict of places, {"model.layers.17.mlp": {3948: 0.0}}')
    modules = dict(named_modules(model))
    compiled = [path for path, m in modules.items() if "_orig_mod" in m._modules or vars(m).get("_compiled_call_impl")]
    if compiled:
        name = compiled[0] or type(model).__name__
        raise ModelError(
            f"{name} is compiled by torch.compile, whose code does not look at what is changed later; pass the model "
            "before it is compiled"
        )
    found = []
    for key, wanted in changes.items():
        where = _where(model, modules, key, isinstance(wanted, Mapping))
        parts = where.path.split(".")
        holders = tuple(modules[".".join(parts[:count])] for count in range(len(parts), -1, -1))
        found.append((replace(where, holders=holders), wanted))
    return found


def _where(model: Module, modules: Mapping[str, Module], key: Any, by_units: bool) -> Where:
    if isinstance(key, Place) and key.path in modules:
        return Where(key.path, key.side, key, key.call if key.calls > 1 else None)
    named = key[0] if isinstance(key, tuple) and len(key) == 2 and key[1] in ("input", "output") else key
    named = named.path if isinstance(named, Place) else named
    if not isinstance(named, str):
        raise InputError(f'{key!r} is no place; pass a path, (path, "input"), (path, "output") or a Place')
    path, call = (named, None) if named in modules else split_name(named)
    if path not in modules or not path:
        names = list(layers(modules))
        told = f"; it has {len(names)} layers, {names[0]} to {names[-1]}" if names else ""
        raise MethodError(f"{type(model).__name__} has no module {named!r}{told}")
    _refuse_several(model, path, call)
    if not isinstance(key, str):
        return Where(path, key[1], None, call)
    is_layer = path in layers([path])  # which is its output, whatever units are in it
    if is_layer:
        _refuse_half(model, modules, path)
    return (None if is_layer else _of_units(model, path, call, by_units)) or Where(path, "output", None, call)


def facing(model: Module, where: Where) -> Where:
    """The same, and whether the tokens come before the rows there, or none stand there."""
    turned, apart = is_turned(model, where.path, where.side), apart_of(model, where.path, where.side)
    return replace(where, turned=turned, apart=apart)


def refuse_picked(model: Module, where: Where, mend: str) -> None:
    """Refuse a change at some positions, or in some rows, of what an expert takes or gives.

    Raises:
        MethodError: its rows are picked among the tokens.
    """
    if is_picked(model, where.path, where.side):
        raise MethodError(
            f"the tokens of {where.name} are picked among all by their numbers, as an expert's are, and nobody knows "
            f"which of its rows is at which position; {mend}, or choose the module that holds it"
        )


def _refuse_several(model: Module, path: str, call: int | None) -> None:
    """Refuse one of several paths of one module, where it may be taken for a layer of its own.

    Raises:
        MethodError: it is one.
    """
    own = own_paths(model)
    first = own[path]
    same = [each for each, its in own.items() if its == first and stack_of(each) == stack_of(path)]
    if path != first or (len(same) > 1 and call is None):
        others = ", ".join(each for each in same if each != path) or first
        raise MethodError(
            f"{path} is one module with {others}, and is run as all of them; name a call, {called(first, 0)!r} or a "
            "later one"
        )


def _refuse_half(model: Module, modules: Mapping[str, Module], path: str) -> None:
    """Refuse an MLP or an attention that has a layer's number, where a list beside its own holds the others.

    Raises:
        MethodError: it is one: its units and the features that it gives may both be meant.
    """
    stacks = dict.fromkeys(each.rpartition(".")[0] for each in layers(modules))
    own = path.rpartition(".")[0]
    beside = [each for each in stacks if each != own and each.rpartition(".")[0] == own.rpartition(".")[0]]
    if not beside or len(inside := neurons_or_heads(model, path)) != 1:
        return
    if other := next((each for each in beside if neurons_or_heads(model, each)), None):
        (place,) = inside.values()
        raise MethodError(
            f"{path} has a layer's number, and {place.kind}, and {other} holds others beside it: its units may be "
            f'meant, or what it gives; name {place.path!r} for its {place.kind}, or ("{path}", "output") for the '
            "features that it gives"
        )


def _of_units(model: Module, path: str, call: int | None, by_units: bool) -> Where | None:
    """The neurons of the MLP at a path, or the heads of the attention there, if it is one of these and not both.

    Raises:
        MethodError: a call is named of a module that calls the one with the units several times; or it is an expert,
            which a few tokens need not come to; or units are named (``by_units``) of a module in a layer in which
            none were found, or those of several modules: they would be taken for features of its output.
    """
    if is_picked(model, path, "input"):
        raise MethodError(
            f"{path} is an expert or in one, whose units are found only where some tokens come to it; name what is "
            f'meant, ("{path}", "output") or the input of its second matrix, (path, "input")'
        )
    inside = neurons_or_heads(model, path)
    if by_units and len(inside) != 1:
        held = (
            f"has units in {', '.join(inside)}; name one of these"
            if inside
            else (
                "has no neurons or heads that were found (lrpx.units); name the linear layer that reads them, if "
                'places(model, "neurons") or places(model, "heads") has one'
            )
        )
        raise MethodError(f'{path} {held}, or pass ("{path}", "output") for the features that it gives')
    if len(inside) != 1:
        return None
    (place,) = inside.values()
    if call is not None and calls_of(model, path) != place.calls:
        raise MethodError(f"{path} calls {place.path} several times; name one of the {place.calls} calls of that")
    return Where(place.path, place.side, place, call)


def edits_of(where: Where, wanted: Any) -> list[tuple[tuple[int, ...] | None, Change]]:
    """The features of each unit, and the change of these; None for all features."""
    if not isinstance(wanted, Mapping):
        change = change_of(wanted)
        change.check()
        return [(None if where.place is None else where.place.columns, change)]
    if not wanted:
        raise InputError(f"no unit of {where.path} is named; pass {{unit: change}}")
    named: list[tuple[tuple[int, ...], Change]] = []
    for unit, each in wanted.items():
        if isinstance(unit, bool) or not isinstance(unit, int):
            raise InputError(f"{unit!r} is no unit of {where.path}; pass its number, from 0")
        change = change_of(each)
        change.check()
        if where.place is None and unit < 0:
            raise MethodError(f"{where.path} has no feature {unit}; count from 0")
        named.append(((unit,) if where.place is None else where.place.features(unit), change))
    edits: list[tuple[tuple[int, ...] | None, Change]] = []
    together: dict[float, list[int]] = defaultdict(list)  # of one number, which is written once
    for features, change in named:
        if isinstance(change, Set) and change.positions is None and not isinstance(change.value, Tensor):
            together[change.value] += features
        else:
            edits.append((features, change))
    return edits + [(tuple(features), Set(value)) for value, features in together.items()]
