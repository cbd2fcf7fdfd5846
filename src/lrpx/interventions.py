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

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from lrpx._modules import layers, named_modules
from lrpx.engine._observer import first_tensor
from lrpx.engine._running import intervened, with_other
from lrpx.errors import InputError, MethodError, ModelError, TraceError
from lrpx.units import Place, is_looking, places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from lrpx.engine._places import Side
    from lrpx.units import Kind

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
        return _like(self.value, x).expand(x.shape)

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
    """What stood there in another run (:func:`record`): ``values [T, n]``, all features of the place at each position.
    Beyond ``T`` it stays as it is.
    """

    values: Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        assert at is not None
        chosen = self.values if columns is None else self.values[..., columns.to(self.values.device)]
        if chosen.shape[-1] != x.shape[-1]:
            raise InputError(
                f"the values of Patch have {chosen.shape[-1]} features, the place has {x.shape[-1]}; pass those that "
                "lrpx.interventions.record gave for it"
            )
        there = (at >= 0) & (at < len(chosen))
        rows = _like(chosen, x)[torch.where(there, at, 0)]
        return torch.where(there[..., None], rows, x)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        if not isinstance(self.values, Tensor) or self.values.ndim != 2 or not len(self.values):
            what = list(self.values.shape) if isinstance(self.values, Tensor) else type(self.values).__name__
            raise InputError(f"the values of Patch are {what}; pass a tensor [tokens, features] of one text")


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
        vector = _like(self.vector, x)
        if vector.shape != x.shape[-1:]:
            raise InputError(f"the direction has {len(vector)} features, the place has {x.shape[-1]}; pass as many")
        before = (x @ (vector / (vector @ vector)))[..., None]
        after = _change(self.change).of(before, at, None)
        return x + (after - before) * vector

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
    be nested: an inner one changes what the outer one leaves. Nothing of the model changes.

    Args:
        model: the model that is called; it is run once on a few tokens to find its units, if names are to be found.
        changes: for a place a change of all its features, or of each of some of its units. A place is the path of an
            MLP (``"model.layers.17.mlp"``, or of its second matrix), whose units are its latent neurons; of an
            attention (or of its output projection), whose units are its heads; of a layer, or any other module, whose
            units are the features of its output; ``(path, "input")`` or ``(path, "output")`` for the features that any
            module takes or gives; or a :class:`~lrpx.units.Place`. A change is a number, which is set, or
            :class:`Set`, :class:`Scale`, :class:`Add`, :class:`Clamp`, :class:`Patch` or :class:`Along`.

    Raises:
        InputError: a change that is none, or does not fit the features.
        MethodError: a unit or a module that is not there.
        ModelError: the model is compiled, so nothing in it can be changed.
        TraceError: at the end of the block: the model was not called, or did not come to a place or to a position.
    """
    sites = [_Site(place, _edits(place, wanted)) for place, wanted in _resolved(model, changes)]
    with _watching(model, sites) as calls:
        yield
        _refuse_unreached(model, sites, calls)


@contextmanager
def record(model: Module, keys: Sequence[Key]) -> Iterator[dict[Any, Tensor]]:
    """What stands at some places of a model while the block runs, for :class:`Patch`.

    Args:
        model: the model that is called.
        keys: places, as :func:`intervene` takes them.

    Yields:
        For each key, after a call of the model, ``[B, T, n]``: all features of the place in the newest call.

    Raises:
        MethodError, ModelError, TraceError: as :func:`intervene`.
    """
    found: dict[Any, Tensor] = {}

    def keeper(key: Any) -> Callable[[Tensor], None]:
        return lambda value: found.__setitem__(key, value.detach().clone())

    pairs = zip(keys, _resolved(model, dict.fromkeys(keys)), strict=True)
    sites = [_Site(place, [], keeper(key)) for key, (place, _) in pairs]
    with _watching(model, sites) as calls:
        yield found
        _refuse_unreached(model, sites, calls)


# -------------------------------------------------------------------------- what is meant


@dataclass(frozen=True)
class _Where:
    """A place as a hook knows it; ``place``: its units, ``call``: which call of the module, or every."""

    path: str
    side: Side
    place: Place | None = None
    call: int | None = None


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
    return [(_where(model, modules, key), wanted) for key, wanted in changes.items()]


def _where(model: Module, modules: Mapping[str, Module], key: Any) -> _Where:
    if isinstance(key, Place):
        found = _Where(key.path, key.side, key, key.call)
    elif isinstance(key, tuple) and len(key) == 2 and key[1] in ("input", "output"):
        found = _Where(key[0], key[1])
    elif isinstance(key, str):
        found = _Where(key, "output")
    else:
        raise InputError(f'{key!r} is no place; pass a path, (path, "input"), (path, "output") or a Place')
    if found.path not in modules or not found.path:
        names = list(layers(modules))
        told = f"; it has {len(names)} layers, {names[0]} to {names[-1]}" if names else ""
        raise MethodError(f"{type(model).__name__} has no module {found.path!r}{told}")
    return _of_units(model, found.path) or found if isinstance(key, str) else found


def _of_units(model: Module, path: str) -> _Where | None:
    """The neurons of the MLP at a path, or the heads of the attention there, if it is one of these and not both."""
    kinds: tuple[Kind, ...] = ("neurons", "heads")
    inside: dict[str, Place] = {}
    for kind in kinds:
        try:
            found = places(model, kind)
        except MethodError:  # there are none of these
            continue
        inside |= {each.path: each for each in found if each.path == path or each.path.startswith(f"{path}.")}
    if len(inside) != 1:
        return None
    (place,) = inside.values()
    return _Where(place.path, place.side, place)


def _edits(where: _Where, wanted: Any) -> list[tuple[tuple[int, ...] | None, Change]]:
    """The features of each unit, and the change of these; None for all features."""
    if not isinstance(wanted, Mapping):
        change = _change(wanted)
        change.check()
        return [(None if where.place is None else where.place.columns, change)]
    if not wanted:
        raise InputError(f"no unit of {where.path} is named; pass {{unit: change}}")
    edits: list[tuple[tuple[int, ...] | None, Change]] = []
    for unit, each in wanted.items():
        if isinstance(unit, bool) or not isinstance(unit, int):
            raise InputError(f"{unit!r} is no unit of {where.path}; pass its number, from 0")
        change = _change(each)
        change.check()
        if where.place is None and unit < 0:
            raise MethodError(f"{where.path} has no feature {unit}; count from 0")
        edits.append(((unit,) if where.place is None else where.place.features(unit), change))
    return edits


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


def _like(value: float | Tensor, x: Tensor) -> Tensor:
    """A constant in the precision and place of ``x``."""
    return torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()


# ------------------------------------------------------------------------------- hooks


class _Site:
    """One place while the block runs.

    Args:
        where: the place.
        edits: the changes there, in order.
        keep: what is given the value, if anything.
    """

    def __init__(
        self,
        where: _Where,
        edits: list[tuple[tuple[int, ...] | None, Change]],
        keep: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.where = where
        self.edits = edits
        self.keep = keep
        self.calls = 0  # of this call of the model
        self.reached = False
        self.waiting = {p for _, change in edits for p in getattr(change, "positions", None) or ()}
        self.needs_positions = any(_needs_positions(change) for _, change in edits)

    def value(self, value: Tensor, at: Tensor | None) -> Tensor | None:
        """What stands in the place of a value, or None; ``at``: ``[B, W]``, where its tokens are in their texts."""
        call, self.calls = self.calls, self.calls + 1
        if self.where.call not in (None, call):
            return None
        self.reached = True
        if self.keep is not None:
            self.keep(value)
        if not self.edits:
            return None
        where = self._positions(value, at) if self.needs_positions else None
        for columns, change in self.edits:
            value = self._changed(value, where, columns, change)
        return value

    def _changed(self, value: Tensor, at: Tensor | None, columns: tuple[int, ...] | None, change: Change) -> Tensor:
        chosen = None if columns is None else torch.tensor(columns, device=value.device)
        if columns is not None and max(columns) >= value.shape[-1]:
            raise MethodError(
                f"the {self.where.side} of {self.where.path} has {value.shape[-1]} features; {max(columns)} is none of "
                "them, count from 0"
            )
        before = value if chosen is None else value.index_select(-1, chosen)
        width = getattr(change, "value", getattr(change, "amount", None))
        if isinstance(width, Tensor) and len(width) != before.shape[-1]:
            raise InputError(
                f"the vector has {len(width)} features, the unit of {self.where.path} has {before.shape[-1]}; pass as "
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

    def _positions(self, value: Tensor, at: Tensor | None) -> Tensor:
        """``[...]``: the position of each vector of a value ``[..., n]``.

        Raises:
            TraceError: they are not known.
        """
        before = value.shape[:-1]
        if at is not None:
            at = at.to(value.device)
            for each in (at, at.flatten(), at.T):
                if each.shape == before:
                    return each
            if len(at) == 1 and before[1:] == at.shape[1:]:
                return at.expand(before)
        raise TraceError(
            f"nobody knows at which tokens the {self.where.side} of {self.where.path}, {list(value.shape)}, stands, as "
            "where the model was not called itself; leave the positions out"
        )


def _needs_positions(change: Change) -> bool:
    return isinstance(change, Patch) or getattr(change, "positions", None) is not None


class _Scope:
    """A module whose input says which tokens run: the model, or its encoder or decoder.

    Args:
        path: the module.
        sites: those inside it.
    """

    def __init__(self, path: str, sites: Sequence[_Site]) -> None:
        self.path = path
        self.sites = sites
        self.positions: Tensor | None = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called."""
        for site in self.sites:
            site.calls = 0
        self.positions = _positions_of(args, kwargs)


def _positions_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """``[B, W]``: where the tokens of a call stand in their texts, from 0; -1 for padding. None where nobody knows."""
    given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    given = args[0] if given is None and args and isinstance(args[0], Tensor) else given
    if not isinstance(given, Tensor) or given.ndim < 2:
        return None
    if given.ndim == 3 and not given.is_floating_point():  # the choices of several questions
        given = given.flatten(0, 1)
    batch, wide = given.shape[:2]
    seen = _seen(kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 3 and not mask.is_floating_point():
        mask = mask.flatten(0, 1)
    if seen is None or (mask is not None and not (isinstance(mask, Tensor) and mask.shape == (batch, seen + wide))):
        return None
    at = (seen + torch.arange(wide, device=given.device)).expand(batch, wide)
    if mask is None:
        return at
    real = mask != 0  # a token that is hidden inside a text is no padding
    before = real.cumsum(1) > 0
    padding = ~(before & (real.flip(1).cumsum(1) > 0).flip(1))[:, seen:]
    return torch.where(padding, -1, at - (~before).sum(1, keepdim=True))


def _seen(kwargs: Mapping[str, Any]) -> int | None:
    """How many tokens a cache holds; None for one that does not tell."""
    cache = next((kwargs[name] for name in ("past_key_values", "cache_params") if kwargs.get(name) is not None), None)
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    return None


@contextmanager
def _watching(model: Module, sites: Sequence[_Site]) -> Iterator[Counter[str]]:
    """The hooks of the sites, in this thread, until the block ends; and how often each scope was called."""
    modules = dict(named_modules(model))
    paths = _scopes(model, modules)
    scopes = [_Scope(path, [site for site in sites if _holder(paths, site.where.path) == path]) for path in paths]
    thread = threading.get_ident()
    handles: list[RemovableHandle] = []
    calls: Counter[str] = Counter()

    def mine(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: hook(*args) if threading.get_ident() == thread and not is_looking() else None

    def begins(scope: _Scope) -> Callable[..., Any]:
        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[scope.path] += 1
            scope.begin(args, kwargs)

        return mine(before)

    def entered(site: _Site, scope: _Scope) -> Callable[..., Any]:
        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = first_tensor((*args, *kwargs.values()))
            other = None if value is None else site.value(value, scope.positions)
            return None if other is None else (with_other(args, value, other), with_other(kwargs, value, other))

        return mine(before)

    def left(site: _Site, scope: _Scope) -> Callable[..., Any]:
        def after(_: Module, __: Any, output: Any) -> Any:
            value = first_tensor(output)
            other = None if value is None else site.value(value, scope.positions)
            return None if other is None else with_other(output, value, other)

        return mine(after)

    try:
        intervened(1, model)
        for scope in scopes:
            handles.append(modules[scope.path].register_forward_pre_hook(begins(scope), with_kwargs=True))
        for scope in scopes:
            for site in scope.sites:
                module = modules[site.where.path]
                if site.where.side == "input":
                    handles.append(module.register_forward_pre_hook(entered(site, scope), with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(left(site, scope)))
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        intervened(-1, model)


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


def _refuse_unreached(model: Module, sites: Sequence[_Site], calls: Counter[str]) -> None:
    """Refuse what had no effect.

    Raises:
        TraceError: the model was not called, or did not come to a place, or to a position.
    """
    name = type(model).__name__
    for site in sites:
        where = site.where
        if not site.reached and not calls.total():
            raise TraceError(f"{name} was not called in this block, so nothing in it was changed; call this very model")
        if not site.reached:
            raise TraceError(
                f"{name} did not come to the {where.side} of {where.path} in this block, as to an expert that no token "
                "was given; choose another place"
            )
        if site.waiting:
            told = ", ".join(map(str, sorted(site.waiting)))
            raise TraceError(f"no text in this block had position {told} at {where.path}; count tokens from 0")
