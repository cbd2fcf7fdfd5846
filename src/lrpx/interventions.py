"""Interventions: set, scale, shift, bound or patch neurons, heads and directions while the user's own model runs.

>>> import lrpx, torch
>>> explainer = lrpx.Explainer.from_pretrained()
>>> model, ids = explainer.model, torch.tensor([explainer("The doors of the house").ids])
>>> with lrpx.intervene(model, {"model.layers.1.mlp": {3: 0.0, 7: lrpx.Scale(5)}}):
...     changed = model(ids).logits
>>> torch.equal(changed, model(ids).logits)  # nothing is left behind the block
False
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from lrpx._hooks import hooks, plainly
from lrpx._modules import HOLDERS, held_in, layers, named_modules
from lrpx.engine._book import storage_of
from lrpx.engine._observer import first_given, first_tensor
from lrpx.engine._running import interventions, with_other
from lrpx.errors import InputError, MethodError, ModelError, TraceError
from lrpx.tasks import is_theirs
from lrpx.units import Place
from lrpx.units._across import across
from lrpx.units._asked import apart_of, calls_of, is_picked, is_turned, neurons_or_heads
from lrpx.units._looking import is_looking, with_tokens
from lrpx.units._place import called, own_paths, split_name, stack_of
from lrpx.units._reading import AGAIN, Called
from lrpx.units._standing import begins_anew, by_name, has_others, may_go_on, pads_before, positions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from torch.nn import Module

    from lrpx.engine import Running
    from lrpx.engine._places import Side

__all__ = ["Add", "Along", "Change", "Clamp", "Patch", "Scale", "Set", "intervene", "record"]


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of some features; a number stands for :class:`Set`.

    Every change takes ``positions``: the tokens at which it holds, from 0 in the text, padding not counted; also while
    text is generated with a cache. By default it holds at all.
    """

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """What stands in the place of ``x [..., k]``, whose features are these columns of the module's, at positions
        ``[...]`` of the text, where they are known."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse a change that is none.

        Raises:
            InputError: says why.
        """


@dataclass(frozen=True, eq=False)
class Set(Change):
    """``value`` in the place of what is there: a number, or one for each feature, ``[k]``."""

    value: float | Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return _like(self.value, x).expand(x.shape).clone()  # the model may go on in place, as Falcon does

    def check(self) -> None:
        """See :meth:`Change.check`."""
        _check_number(self.value, "set")


@dataclass(frozen=True, eq=False)
class Scale(Change):
    """``factor`` times what is there."""

    factor: float
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return x * self.factor

    def check(self) -> None:
        """See :meth:`Change.check`."""
        _check_number(self.factor, "scale by", only_numbers=True)


@dataclass(frozen=True, eq=False)
class Add(Change):
    """What is there and ``amount``: a number, or one for each feature, ``[k]``, as a direction of the stream."""

    amount: float | Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return x + _like(self.amount, x).expand(x.shape[-1])

    def check(self) -> None:
        """See :meth:`Change.check`."""
        _check_number(self.amount, "add")


@dataclass(frozen=True, eq=False)
class Clamp(Change):
    """What is there, kept between ``low`` and ``high``."""

    low: float = -math.inf
    high: float = math.inf
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return x.clamp(self.low, self.high)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        for bound in (self.low, self.high):
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or math.isnan(bound):
                raise InputError(f"the bound {bound!r} is no number; pass Clamp(low, high)")
        if self.low > self.high:
            raise InputError(f"Clamp({self.low}, {self.high}) lets nothing through; pass the smaller bound first")


@dataclass(frozen=True, eq=False)
class Patch(Change):
    """What stood there in another run (:func:`record`): ``values [T, n]``, all features of the place at each position
    of the text, without padding before it. Beyond ``T`` it stays as it is; a position there is refused.
    """

    values: Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        assert at is not None
        chosen = self.values if columns is None else self.values[..., columns.to(self.values.device)]
        there = (at >= 0) & (at < len(chosen))
        rows = _like(chosen, x)[torch.where(there, at, 0)]
        return torch.where(there[..., None], rows, x)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        if not isinstance(self.values, Tensor) or self.values.ndim != 2 or not len(self.values):
            what = list(self.values.shape) if isinstance(self.values, Tensor) else type(self.values).__name__
            raise InputError(f"the values of Patch are {what}; pass a tensor [tokens, features] of one text")
        if self.positions is not None and max(self.positions) >= len(self.values):
            raise InputError(
                f"the values of Patch are of {len(self.values)} tokens, and none stood at position "
                f"{max(self.positions)}; pass positions to {len(self.values) - 1}"
            )


@dataclass(frozen=True, eq=False)
class Along(Change):
    """A change of the coefficient along a direction ``vector [k]``, and of nothing across it.

    The coefficient is ``x·v / v·v``, so ``Along(v, 0.0)`` takes the direction out, ``Along(v, Scale(2))`` doubles it.
    """

    vector: Tensor
    change: Change | float
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision does not hold the square of a long vector
        vector = _like(self.vector, x.new_empty(0, dtype=wide))
        if vector.shape != x.shape[-1:]:
            raise InputError(f"the direction has {len(vector)} features, the place has {x.shape[-1]}; pass as many")
        length: Tensor = torch.linalg.vector_norm(vector)
        before = (x.to(wide) @ (vector / length) / length)[..., None]
        after = _change(self.change).of(before, at, None)
        return x + ((after - before) * vector).to(x.dtype)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        if not isinstance(self.vector, Tensor) or self.vector.ndim != 1 or not bool((self.vector != 0).any()):
            raise InputError("the direction of Along is no vector; pass a tensor [features] that is not zero")
        inner = _change(self.change)
        if isinstance(inner, (Patch, Along)) or getattr(inner, "positions", None) is not None:
            raise InputError("Along takes a number, Scale, Add or Clamp without positions; give the positions to Along")
        inner.check()


Key: TypeAlias = "str | tuple[str, Side] | Place"
Wanted: TypeAlias = "Change | float | Mapping[int, Change | float]"


@contextmanager
def intervene(model: Module, changes: Mapping[Key, Wanted]) -> Iterator[None]:
    """Change what stands at some places of a model, in this block, in this thread.

    It holds for every call of the model, also inside ``model.generate`` with its cache, in batches, and under
    :class:`~lrpx.Explainer` or :func:`~lrpx.propagate`: then the model as it is in the block is explained. Blocks may
    be nested: an inner one changes what the outer one leaves. Nothing of the model changes. What ``torch.compile`` has
    made of a function that calls the model, as ``generate`` does for a static cache, runs plainly in the block.

    Args:
        model: the model that is called; it is run once on a few tokens to find its units, if names are to be found.
        changes: for a place a change of all its features, or of each of some of its units. A place is the path of an
            MLP (``"model.layers.17.mlp"``, or of its second matrix), whose units are its latent neurons; of an
            attention (or of its output projection), whose units are its heads; of a layer, whose units are the features
            of its output; ``(path, "input")`` or ``(path, "output")`` for the features that any module takes or gives,
            which may be left out where no unit of it is named (of a map ``[B, C, H, W]`` its channels); or a
            :class:`~lrpx.units.Place`. Of a module that is called several times in a pass, ``"path#2"`` is the third
            call, and ``"path"`` every one. A change is a number, which is set, or :class:`Set`, :class:`Scale`,
            :class:`Add`, :class:`Clamp`, :class:`Patch` or :class:`Along`.

    Raises:
        InputError: a change that is none, or does not fit the features.
        MethodError: a unit or a module that is not there, or units of a module that is no layer and in which no neurons
            or heads are found, or an MLP or an attention that stands in a list of its own (``"mlps.3"``), where a
            layer may be meant; or when it is met: the numbers that a router gives beside its choice, which nothing
            reads.
        ModelError: the model is compiled, so nothing in it can be changed.
        TraceError: at the end of the block: the model was not called, or did not come to a place or to a position; or
            when it is met: a map of which nobody knows which dimension has its features.
    """
    sites = []
    for place, wanted in _resolved(model, changes):
        edits = _edits(place, wanted)
        if any(_needs_positions(change) for _, change in edits):
            _refuse_picked(model, place, "leave the positions out")
            place = _facing(model, place)
        sites.append(Site(place, edits))
    tap = Writing(sites)
    with _watching(model, tap):
        yield
        tap.refuse_unreached(type(model).__name__)


@contextmanager
def record(model: Module, keys: Sequence[Key]) -> Iterator[dict[Any, Tensor]]:
    """What stands at some places of a model while the block runs, for :class:`Patch`.

    Args:
        model: the model that is called.
        keys: places, as :func:`intervene` takes them.

    Yields:
        For each key, after a call of the model, ``[B, T, n]``: all features of the place in the newest call, the rows
        first in every model, and the channels of a map last, ``[B, H, W, n]``. Padding is there as the model was given
        it, and a :class:`Patch` counts without: of a row that is padded on the left pass
        ``found[key][row, mask[row].bool()]``.

    Raises:
        MethodError, ModelError, TraceError: as :func:`intervene`.
    """
    found: dict[Any, Tensor] = {}

    def keeper(key: Any) -> Callable[[Tensor], None]:
        return lambda value: found.__setitem__(key, value.detach().clone())

    tap = Writing(Site(_facing(model, place), [], keeper(key)) for place, key in _resolved(model, {k: k for k in keys}))
    with _watching(model, tap):
        yield found
        tap.refuse_unreached(type(model).__name__)


def writing(model: Module, runs: Sequence[Mapping[Key, Wanted]], positions: Tensor) -> Writing:
    """A tap of a run in which each row of the batch is changed as its own run says.

    Args:
        model: the model that is called.
        runs: the changes of each row, as :func:`intervene` takes them; they may be none.
        positions: ``[B, W]``: where the batch's tokens stand in their texts, -1 for padding.

    Raises:
        InputError, MethodError, ModelError: as :func:`intervene`.
    """
    sites = []
    for row, changes in enumerate(runs):
        for place, wanted in _resolved(model, changes) if changes else ():
            _refuse_picked(model, place, "use lrpx.intervene, one run after another")
            sites.append(Site(_facing(model, place), _edits(place, wanted), row=row))
    return Writing(sites, positions)


def recording(model: Module, keepers: Mapping[Key, Callable[[Tensor], None]]) -> Writing:
    """A tap that gives each keeper what stands at its place, in every call of it."""
    return Writing(Site(place, [], keep) for place, keep in _resolved(model, keepers))


# -------------------------------------------------------------------------- what is meant


@dataclass(frozen=True)
class _Where:
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


def _resolved(model: Module, changes: Mapping[Any, Any]) -> list[tuple[_Where, Any]]:
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


def _where(model: Module, modules: Mapping[str, Module], key: Any, by_units: bool) -> _Where:
    if isinstance(key, Place) and key.path in modules:
        return _Where(key.path, key.side, key, key.call if key.calls > 1 else None)
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
        return _Where(path, key[1], None, call)
    is_layer = path in layers([path])  # which is its output, whatever units are in it
    if is_layer:
        _refuse_half(model, modules, path)
    return (None if is_layer else _of_units(model, path, call, by_units)) or _Where(path, "output", None, call)


def _facing(model: Module, where: _Where) -> _Where:
    """The same, and whether the tokens come before the rows there, or none stand there."""
    turned, apart = is_turned(model, where.path, where.side), apart_of(model, where.path, where.side)
    return replace(where, turned=turned, apart=apart)


def _refuse_picked(model: Module, where: _Where, mend: str) -> None:
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


def _of_units(model: Module, path: str, call: int | None, by_units: bool) -> _Where | None:
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
    if call is not None and calls_of(model)[path] != place.calls:
        raise MethodError(f"{path} calls {place.path} several times; name one of the {place.calls} calls of that")
    return _Where(place.path, place.side, place, call)


def _edits(where: _Where, wanted: Any) -> list[tuple[tuple[int, ...] | None, Change]]:
    """The features of each unit, and the change of these; None for all features."""
    if not isinstance(wanted, Mapping):
        change = _change(wanted)
        change.check()
        return [(None if where.place is None else where.place.columns, change)]
    if not wanted:
        raise InputError(f"no unit of {where.path} is named; pass {{unit: change}}")
    named: list[tuple[tuple[int, ...], Change]] = []
    for unit, each in wanted.items():
        if isinstance(unit, bool) or not isinstance(unit, int):
            raise InputError(f"{unit!r} is no unit of {where.path}; pass its number, from 0")
        change = _change(each)
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


def _change(given: Any) -> Change:
    if isinstance(given, Change):
        positions = getattr(given, "positions", None)
        whole = positions is None or (
            isinstance(positions, (list, tuple, range))
            and len(positions) > 0
            and all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in positions)
        )
        if not whole:
            raise InputError(f"the positions {positions!r} are none; pass a list of whole numbers from 0")
        return given
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return Set(given)
    raise InputError(f"{given!r} is no change; pass a number, or Set, Scale, Add, Clamp, Patch or Along")


def _check_number(value: Any, what: str, *, only_numbers: bool = False) -> None:
    if isinstance(value, Tensor) and not only_numbers:
        if value.ndim != 1 or not bool(value.isfinite().all()):
            raise InputError(f"what is to {what} is a tensor {list(value.shape)}; pass a number, or a finite vector")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"what is to {what} is {value!r}; pass a finite number")


def _described(change: Any) -> str:
    """A change with all that it holds; of a tensor its shape and a digest of its numbers."""
    if isinstance(change, Tensor):
        numbers = change.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()
        return f"tensor {list(change.shape)} {hashlib.sha256(numbers).hexdigest()[:8]}"
    if not isinstance(change, Change) or not is_dataclass(change):
        return repr(change)
    held = ((each.name, getattr(change, each.name)) for each in fields(change))
    told = (f"{name}={_described(value)}" for name, value in held if name != "positions" or value is not None)
    return f"{type(change).__name__}({', '.join(told)})"


def _in_ranges(numbers: Sequence[int]) -> str:
    """Whole numbers, those that follow on each other as a range.

    >>> _in_ranges((7, 0, 1, 2))
    '0-2, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _like(value: float | Tensor, x: Tensor) -> Tensor:
    """A constant in the precision and place of ``x``."""
    return torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()


# ----------------------------------------------------------------------------- the tap


class Site:
    """One place that is written or kept.

    Args:
        where: the place.
        edits: the changes there, in order.
        keep: what is given the value, if anything.
        row: of the batch, which alone is changed; None for all.
    """

    def __init__(
        self,
        where: _Where,
        edits: list[tuple[tuple[int, ...] | None, Change]],
        keep: Callable[[Tensor], None] | None = None,
        row: int | None = None,
    ) -> None:
        self.where = where
        self.edits = edits
        self.keep = keep
        self.row = row
        self.reached = False
        self.waiting = {p for _, change in edits for p in getattr(change, "positions", None) or ()}
        self.needs_positions = any(_needs_positions(change) for _, change in edits)
        # whether it matters which number is of which feature, and of which token
        self.asks = keep is not None or self.needs_positions or any(_is_of_features(*edit) for edit in edits)

    def value(self, value: Tensor, positions: Tensor | None) -> Tensor | None:
        """What stands in the place of a value, or None.

        Args:
            value: what is there.
            positions: ``[B, W]``, where its tokens are in their texts, -1 for padding; None where nobody knows.
        """
        self.reached = True
        if value.is_nested and (self.asks or not all(isinstance(change, Scale) for _, change in self.edits)):
            raise TraceError(
                f"the {self.where.side} of {self.where.name} is a nested tensor, as torch's TransformerEncoder makes "
                "of texts with padding without a gradient; make it with enable_nested_tensor=False, or leave "
                "torch.no_grad out"
            )
        if not self.asks:
            return self._edited(value, None)
        dim = self._across(value, positions)
        value = value if dim == -1 else value.movedim(dim, -1)
        if self.keep is not None:
            self.keep(self._rows_first(value, positions))
        if not self.edits:
            return None
        at = self._positions(value, positions) if self.needs_positions else None
        after = self._edited(value, at)
        return after if dim == -1 else after.movedim(-1, dim)

    def _across(self, value: Tensor, positions: Tensor | None) -> int:
        """The dimension along which the features lie.

        Raises:
            TraceError: nobody knows.
        """
        place = self.where.place
        is_known = place is not None and place.kind != "residual"
        dim = -1 if is_known else across(self.where.holders, value, positions)
        if dim is None:
            raise TraceError(
                f"nobody knows which dimension of the {self.where.side} of {self.where.name}, {list(value.shape)}, has "
                "its features; name a convolution or a linear layer in it, change all numbers alike, or, where it has "
                "as many places as features, pass an input of another size"
            )
        return dim

    def told(self) -> Iterator[str]:
        """What is changed, as results have it."""
        for columns, change in self.edits:
            which = "" if columns is None else f"[{_in_ranges(columns)}]"
            yield f"{self.where.side} of {self.where.name}{which} by {_described(change)}"

    def write(self, row: int, value: Tensor, positions: Tensor) -> None:
        """Change one row of a value in place, where there is no graph.

        Raises:
            TraceError: nobody knows which of its numbers are the row's, or at which tokens they stand.
        """
        self.reached = True
        dim = self._across(value, positions) if self.asks else -1
        with torch._C.DisableTorchFunction():  # no rule is asked for
            by_row = self._by_row(value.movedim(dim, -1), positions)
            if by_row is None:
                raise TraceError(
                    f"nobody knows which numbers of the {self.where.side} of {self.where.name}, {list(value.shape)}, "
                    f"are of which of {len(positions)} runs; use lrpx.intervene, one run after another"
                )
            at = positions[row].to(value.device)
            if self.needs_positions and (by_row.shape[1:-1] != at.shape or self.where.apart == len(at)):
                raise self._not_at_tokens(value)
            by_row[row] = self._edited(by_row[row], at)

    def _by_row(self, value: Tensor, positions: Tensor) -> Tensor | None:
        """``[B, …, n]``, a view of a value ``[…, n]``; None where nobody knows which is of which row."""
        rows, wide = positions.shape
        if value.ndim == 2 and len(value) == rows * wide and not self.where.turned:
            return value.view(rows, wide, -1)
        if len(value) == rows:  # which are never as many as the tokens
            return value
        return value.transpose(0, 1) if value.ndim > 2 and value.shape[:2] == (wide, rows) else None

    def _edited(self, value: Tensor, at: Tensor | None) -> Tensor:
        for columns, change in self.edits:
            value = self._changed(value, at, columns, change)
        return value

    def _changed(self, value: Tensor, at: Tensor | None, columns: tuple[int, ...] | None, change: Change) -> Tensor:
        chosen = None if columns is None else torch.tensor(columns, device=value.device)
        if columns is not None and max(columns) >= value.shape[-1]:
            raise MethodError(
                f"the {self.where.side} of {self.where.name} has {value.shape[-1]} features; {max(columns)} is none of "
                "them, count from 0"
            )
        if isinstance(change, Patch) and change.values.shape[-1] != value.shape[-1]:
            raise InputError(
                f"the values of Patch have {change.values.shape[-1]} features, the place has {value.shape[-1]}; pass "
                "those that lrpx.interventions.record gave for it"
            )
        before = value if chosen is None else value.index_select(-1, chosen)
        width = getattr(change, "value", getattr(change, "amount", None))
        if isinstance(width, Tensor) and len(width) != before.shape[-1]:
            raise InputError(
                f"the vector has {len(width)} features, the unit of {self.where.name} has {before.shape[-1]}; pass as "
                "many"
            )
        after = change.of(before, at, chosen)
        positions = getattr(change, "positions", None)
        if positions is not None:
            assert at is not None
            mask = torch.isin(at, torch.tensor(list(positions), device=at.device))
            self.waiting -= set(at[mask].tolist())
            after = torch.where(mask[..., None], after, before)
        return after if chosen is None else value.index_copy(-1, chosen, after)

    def _rows_first(self, value: Tensor, at: Tensor | None) -> Tensor:
        """A value ``[B, W, n]`` or ``[B·W, n]``, also where the model has the tokens first."""
        if not self._is_turned(value, at):
            return value
        if value.ndim == 2 and at is not None and len(value) == at.numel():
            return value.view(*at.T.shape, -1).transpose(0, 1).flatten(0, 1)
        return value.transpose(0, 1) if value.ndim == 3 else value

    def _is_turned(self, value: Tensor, at: Tensor | None) -> bool:
        """Whether the tokens of a value ``[B, W, n]`` or ``[W, B, n]`` come before the rows.

        Raises:
            TraceError: nobody knows, and there are as many rows as tokens.
        """
        if self.where.turned is not None or at is None or value.ndim != 3:
            return bool(self.where.turned)
        rows, wide = at.shape
        if value.shape[:2] == at.shape == (wide, rows) and rows > 1:
            raise TraceError(
                f"nobody knows whether the {self.where.side} of {self.where.name}, {list(value.shape)}, has the tokens "
                "or the rows first, for there are as many; call the model with more rows or fewer"
            )
        return value.shape[:2] == (wide, rows) != at.shape

    def _positions(self, value: Tensor, at: Tensor | None) -> Tensor:
        """``[...]``: the position of each vector of a value ``[..., n]``.

        Raises:
            TraceError: they are not known.
        """
        before = value.shape[:-1]
        if at is not None and self.where.apart != at.shape[1]:
            at = at.to(value.device)
            first, last = (at.T, at) if self._is_turned(value, at) else (at, at.T)  # it may have as many rows as tokens
            for each in (first, first.flatten(), last):
                if each.shape == before:
                    return each
            if len(at) == 1 and before[1:] == at.shape[1:]:
                return at.expand(before)
        raise self._not_at_tokens(value)

    def _not_at_tokens(self, value: Tensor) -> TraceError:
        return TraceError(
            f"nobody knows at which tokens the {self.where.side} of {self.where.name}, {list(value.shape)}, stands, as "
            "where it is made of an image, the model was not called itself, padding before a text is in no "
            "attention_mask, position_ids begin anew inside a row, or its cache does not count its tokens; leave the "
            "positions or the cache out (use_cache=False); or, where all that its modules keep of a call are tables, "
            "call it once before the block"
        )


class Writing(Called):
    """Changes what stands at some places, or keeps it: in a run that it is a tap of, or by hooks (:func:`intervene`).

    Args:
        sites: the places.
        positions: ``[B, W]``: where the tokens of a run stand in their texts, -1 for padding; of the hooks each scope
            has its own.
    """

    writes = True

    def __init__(self, sites: Iterable[Site], positions: Tensor | None = None) -> None:
        self.sites = tuple(sites)
        super().__init__(site.where.path for site in self.sites)
        self.places: dict[tuple[str, Side], list[Site]] = defaultdict(list)
        for site in self.sites:
            self.places[site.where.path, site.where.side].append(site)
        self._positions = positions
        self.needs_positions = any(site.needs_positions for site in self.sites)
        self.scopes: dict[str, Tensor | None] = {}
        self.begun = False
        self.keeps_graph = False  # whether the model was called with gradients on
        self._forgotten: set[str] = set()  # what a checkpoint of the model's own has run, and will run again
        self._over: set[str] = set()  # the places in what is called no more
        self._is_mixed = False  # whether others ran since then, whose tokens stand elsewhere

    def begin(self, run: Running) -> None:
        """A new run."""
        super().begin(run)
        self.begun = True

    def enter(self, within: Sequence[str], positions: Tensor | None) -> None:
        """A module that says which tokens run, the model or its encoder or decoder, is called, with these in it."""
        self.begun = True
        self.keeps_graph = torch.is_grad_enabled()
        self._over.difference_update(within)
        for path in within:
            self._is_mixed |= path in self._forgotten and not _is_equal(self.scopes.get(path), positions)
            self.scopes[path] = positions
            self._calls.pop((path, "input"), None)
            self._calls.pop((path, "output"), None)

    def leave(self, within: Sequence[str]) -> None:
        """The call of such a module is over: what is called in it by itself has other tokens."""
        self._over.update(within)

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        """See :meth:`Called.module <lrpx.units.Called.module>`."""
        if self._run is not None or torch._C._current_graph_task_id() < 0:
            if self._run is None and self.keeps_graph and any(site.edits for site in self.places[path, side]):
                self._note_checkpoint(path, side, value)
            return super().module(path, side, value)
        # by a hook, in the backward pass: a checkpoint of the model's own, and what held for all calls holds again
        if any(site.where.call is not None for site in self.places[path, side]):
            raise TraceError(AGAIN.format(path))
        if self._is_mixed and self.needs_positions:
            raise TraceError(
                f"{path} runs again in the backward pass of a call of the model, and another call behind that had its "
                "tokens at other positions; call backward() before the next call, or switch the model's checkpoints off"
            )
        self._forgotten.discard(path)
        return self.at(path, side, 0, value)

    def _note_checkpoint(self, path: str, side: Side, value: Tensor) -> None:
        """Remember what runs in a checkpoint, until the backward pass has come to it."""
        found, is_whole = _checkpoint(self.places[path, side][0].where.holders[0])
        if not found or (is_whole and side == "output" and value.requires_grad):  # it need not be computed again
            return
        self._forgotten.add(path)
        if value.requires_grad:  # the part before it may be all that runs again
            value.register_hook(lambda _: self._forgotten.discard(path))  # type: ignore[no-untyped-call]

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """The value with the changes that are due."""
        positions = self.scopes.get(path, self._positions)
        if path in self._over and torch._C._current_graph_task_id() < 0:
            positions = None
        now = value
        for site in self.places.get((path, side), ()):
            if site.where.call not in (None, call):
                continue
            if site.row is None:
                after = site.value(now, positions)
                now = now if after is None else after
            else:
                assert positions is not None
                now = now.clone() if now is value else now
                site.write(site.row, now, positions)
        return None if now is value else now

    def refuse_unreached(self, name: str) -> None:
        """Refuse what had no effect in a model of this name.

        Raises:
            TraceError: the model was not called, or did not come to a place, or to a position.
        """
        if not (self.begun or any(site.reached for site in self.sites)):
            raise TraceError(f"{name} was not called in this block, so nothing in it was changed; call this very model")
        for site in self.sites:
            where = site.where
            if not site.reached:
                raise TraceError(
                    f"{name} did not come to the {where.side} of {where.name} in this block, as to an expert that no "
                    "token was given; choose another place"
                )
            if site.waiting:
                told = ", ".join(map(str, sorted(site.waiting)))
                raise TraceError(f"no text in this block had position {told} at {where.name}; count tokens from 0")
        if self._forgotten:
            raise TraceError(
                f"{min(self._forgotten)} is in a checkpoint, and runs again in the backward pass, where nothing is "
                "changed after this block or in another thread, as on a GPU; call backward() in the block, or switch "
                "the model's checkpoints off; torch.no_grad() where no gradient is asked for"
            )


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _checkpoint(module: Module) -> tuple[bool, bool]:
    """Whether a function of torch.utils.checkpoint is what calls a module, and whether by no other module."""
    frame: FrameType | None = sys._getframe()
    is_whole = True
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True, is_whole
        caller = frame.f_locals.get("self")
        is_whole &= caller is module or not isinstance(caller, torch.nn.Module)
        frame = frame.f_back
    return False, False


def _is_of_features(columns: tuple[int, ...] | None, change: Change) -> bool:
    """Whether a change is of some features, or not the same for all numbers."""
    vector = getattr(change, "value", getattr(change, "amount", None))
    return columns is not None or not isinstance(change, (Set, Scale, Add, Clamp)) or isinstance(vector, Tensor)


def _needs_positions(change: Change) -> bool:
    return isinstance(change, Patch) or getattr(change, "positions", None) is not None


def _is_part(value: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is another, or in its memory."""
    return value is whole or storage_of(value) == storage_of(whole) != 0


# ------------------------------------------------------------------------------- hooks


def _refuse_choice(path: str, value: Tensor, output: Any) -> None:
    """Refuse a change of the numbers by which a router has chosen: it gives them beside its choice, and the weights of
    it, which are all that goes on.

    Raises:
        MethodError: it is such a change.
    """
    if not isinstance(output, (tuple, list)) or output[0] is not value:
        return
    others = [each for each in output[1:] if isinstance(each, Tensor) and each.shape[:-1] == value.shape[:-1]]
    chosen = [each for each in others if not each.is_floating_point() and each.shape[-1] <= value.shape[-1]]
    if chosen and any(each.is_floating_point() and each.shape == chosen[0].shape for each in others):
        raise MethodError(
            f"{path} has chosen by its first output, and gives its choice beside it, so that a change there does "
            f'nothing; change what it takes, ("{path}", "input"), or what is computed of its choice'
        )


def _refuse_weights(path: str, value: Tensor, output: Any) -> None:
    """Refuse to change or to keep attention weights that a module gives before what it has made with them.

    Raises:
        MethodError: it is such a module.
    """
    if value.ndim != 4 or not isinstance(output, (tuple, list)) or output[0] is not value:
        return
    rows, wide = value.shape[0], value.shape[2]
    if any(isinstance(each, Tensor) and each.ndim == 3 and each.shape[:2] == (rows, wide) for each in output[1:]):
        raise MethodError(
            f"{path} gives numbers {list(value.shape)}, as attention weights are, before what it has made with them, "
            "which alone goes on; name what a module in it gives, or what the next one takes"
        )


@contextmanager
def _watching(model: Module, tap: Writing) -> Iterator[None]:
    """Hooks that call a tap, in this thread, until the block ends."""
    modules = dict(named_modules(model))
    thread = threading.get_ident()
    here = interventions()
    heard: list[Tensor | None] = [None]
    held = _held(modules) if tap.needs_positions and not is_theirs(model) else []

    def mine(hook: Callable[..., Any]) -> Callable[..., Any]:
        def heard_here(*args: Any) -> Any:
            # a copy that was made of the model in the block has its hooks for good
            is_on = id(tap) in here and threading.get_ident() == thread and not is_looking()
            return hook(*args) if is_on else None

        return heard_here

    def begins(within: Sequence[str]) -> Callable[..., Any]:
        def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = by_name(module, args, kwargs)
            positions = None if given is None else positions_of(given)
            if given is not None and positions is not None and tap.needs_positions and not is_theirs(model):
                # modules may keep what they have read, and go on from there
                again = tap.begun and (positions.shape[1] == 1 or not _is_held(_held(modules), held))
                is_known = not (again or may_go_on(given) or pads_before(given, positions))
                positions = positions if is_known else None
            if given is not None and positions is not None and tap.needs_positions and begins_anew(given, positions):
                positions = None
            tap.enter(within, positions)
            if module is model and given is not None and tap.needs_positions and has_others(given):
                seen = with_tokens(model, given)
                tap.scopes |= {path: None for path, side in tap.places if path in within and (path, side) not in seen}
            if given is not None and isinstance(states := given.get("encoder_hidden_states"), Tensor):
                heard[0] = states

        return mine(before)

    def ends(within: Sequence[str]) -> Callable[..., Any]:
        return mine(lambda *_: tap.leave(within))

    def of_tokens(path: str, value: Tensor | None) -> None:
        """A decoder's keys and values are made of the encoder's tokens, wherever its own stand."""
        if value is not None and heard[0] is not None and _is_part(value, heard[0]):
            tap.scopes[path] = None

    def entered(path: str) -> Callable[..., Any]:
        def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = first_given(module, args, kwargs)
            of_tokens(path, value)
            other = None if value is None else tap.module(path, "input", value)
            return None if other is None else (with_other(args, value, other), with_other(kwargs, value, other))

        return mine(before)

    def left(path: str) -> Callable[..., Any]:
        def after(_: Module, args: Any, output: Any) -> Any:
            value = first_tensor(output)
            of_tokens(path, first_tensor(args))
            other = None if value is None else tap.module(path, "output", value)
            if value is not None and other is not None:
                _refuse_choice(path, value, output)
            if value is not None and (other is not None or any(site.keep for site in tap.places[path, "output"])):
                _refuse_weights(path, value, output)
            return None if other is None else with_other(output, value, other)

        return mine(after)

    with plainly(), hooks() as on:
        try:
            here[id(tap)] = model, tuple(told for site in tap.sites for told in site.told())
            scopes = _scopes(model, modules)
            within = {scope: [path for path, _ in tap.places if _holder(scopes, path) == scope] for scope in scopes}
            for scope in scopes:
                on.before(modules[scope], begins(within[scope]), with_kwargs=True)
            for path, side in tap.places:
                if side == "input":
                    on.before(modules[path], entered(path), with_kwargs=True)
                else:
                    on.after(modules[path], left(path))
            for scope in scopes:
                on.after(modules[scope], ends(within[scope]))
            yield
        finally:
            here.pop(id(tap), None)


def _held(modules: Mapping[str, Module]) -> list[tuple[Any, int]]:
    """What modules hold beside their weights, as what they have read, and how often, or how far, it was written."""
    values = held_in(dict.fromkeys(modules.values()))
    return [(value, _written(value)) for value in values if isinstance(value, (Tensor, tuple, int, *HOLDERS))]


def _written(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return value if isinstance(value, int) else len(value)


def _is_held(now: Sequence[tuple[Any, int]], before: Sequence[tuple[Any, int]]) -> bool:
    """Whether modules hold the same as before."""
    if len(now) != len(before):
        return False
    pairs = zip(now, before, strict=True)
    return all(one[1] == other[1] and (one[0] is other[0] or isinstance(one[0], int)) for one, other in pairs)


def _scopes(model: Module, modules: Mapping[str, Module]) -> list[str]:
    """The paths of the modules whose inputs say which tokens run; the model's own is the last."""
    found = []
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        for name in ("get_encoder", "get_decoder"):
            part: Any = getattr(model, name, lambda: None)()
            found += [path for path, module in modules.items() if module is part and path][:1]
    return [*found, ""]


def _holder(scopes: Sequence[str], path: str) -> str:
    return next(scope for scope in scopes if not scope or path == scope or path.startswith(f"{scope}."))
