"""The blocks in which a user's own model is changed or recorded, and the hooks that call the tap while they last."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx._hooks import capture_last, hooks, plainly
from lrpx._intervening import Intervening, interventions
from lrpx._kept import HOLDERS, held_in
from lrpx._modules import named_modules
from lrpx.engine._book import storage_of
from lrpx.engine._observer import first_given, first_tensor
from lrpx.engine._running import with_other
from lrpx.errors import MethodError
from lrpx.interventions._changes import needs_positions
from lrpx.interventions._sites import Site
from lrpx.interventions._where import edits_of, facing, refuse_picked, resolved
from lrpx.interventions._writing import Writing
from lrpx.tasks import is_theirs
from lrpx.units._looking import is_looking, with_tokens
from lrpx.units._standing import begins_anew, by_name, has_others, may_go_on, pads_before, positions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.nn import Module

    from lrpx.interventions._where import Key, Wanted


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
    for place, wanted in resolved(model, changes):
        edits = edits_of(place, wanted)
        if any(needs_positions(change) for _, change in edits):
            refuse_picked(model, place, "leave the positions out")
            place = facing(model, place)
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

    tap = Writing(Site(facing(model, place), [], keeper(key)) for place, key in resolved(model, {k: k for k in keys}))
    with _watching(model, tap):
        yield found
        tap.refuse_unreached(type(model).__name__)


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

    order = {path: list(modules[path]._forward_hooks) for path, _ in tap.places}
    with plainly(), hooks() as on:
        try:
            told = tuple(told for site in tap.sites for told in site.told())
            here[id(tap)] = Intervening(model, told, frozenset(modules[path] for path, _ in tap.places))
            scopes = _scopes(model, modules)
            within = {scope: [path for path, _ in tap.places if _holder(scopes, path) == scope] for scope in scopes}
            for scope in scopes:
                on.before(modules[scope], begins(within[scope]), with_kwargs=True)
            for path, side in tap.places:
                if side == "input":
                    on.before(modules[path], entered(path), with_kwargs=True)
                else:
                    on.after(modules[path], left(path))
                    capture_last(modules[path])
            for scope in scopes:
                on.after(modules[scope], ends(within[scope]))
            yield
        finally:
            here.pop(id(tap), None)
            for path, before in order.items():
                _put_in_order(modules[path], before)


def _put_in_order(module: Module, before: Sequence[int]) -> None:
    """Put a module's hooks back in the order in which they were, those that have come since behind them."""
    held: Any = module._forward_hooks
    for number in [*before, *(number for number in held if number not in before)]:
        if number in held:
            held.move_to_end(number)


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


def _is_part(value: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is another, or in its memory."""
    return value is whole or storage_of(value) == storage_of(whole) != 0


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
