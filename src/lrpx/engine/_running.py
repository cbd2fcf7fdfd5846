"""``propagate``: the user's own model, unmodified, run under a recipe inside a ``with`` block."""

from __future__ import annotations

import inspect
import operator
import sys
import threading
import weakref
from collections import UserDict, deque
from contextlib import contextmanager
from copy import copy
from fnmatch import fnmatchcase
from functools import lru_cache
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module
from torch.overrides import _get_current_function_mode_stack

from lrpx import rules
from lrpx._hooks import Hooks, keep_instead
from lrpx._intervening import intervened
from lrpx._modules import layer_of, layers, named_modules
from lrpx.engine import _overrides
from lrpx.engine._book import Book
from lrpx.engine._gates import mark_gate
from lrpx.engine._graph import AS_WRITTEN
from lrpx.engine._heads import Heads
from lrpx.engine._mode import RuleMode
from lrpx.engine._nodes import hooks_of_saved
from lrpx.engine._observer import Observer, first_given, first_tensor
from lrpx.engine._places import Source
from lrpx.engine._positions import Positions
from lrpx.engine._recompute import Layer
from lrpx.engine._run import Run
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import GIVEN, as_own
from lrpx.engine._trace import Trace
from lrpx.errors import LRPxError, MethodError, TraceError, UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import saved_tensors_hooks

    from lrpx.recipes import Recipe

UNSEEN_ACTIVATIONS = frozenset({"BloomGelu"})
"""Classes outside ``transformers.activations`` that compute their function in a custom autograd function, which no mode
sees into."""
NOT_AS_ONE = frozenset({"SiLUActivation", "LaplaceActivation", "LinearActivation"})
"""Classes of ``transformers.activations`` that are not run as one function: they call one torch function, as those do
whose ``act`` is one; or what they compute ends with a number that is added, which is a constant there as anywhere; or
they compute nothing, and no gate."""

CACHES = ("past_key_values", "cache_params", "mems", "state")
"""Arguments of models that hold what an earlier call has computed, which are no input."""

_running = threading.local()


def is_running() -> bool:
    """Whether this thread runs a model under a recipe."""
    return bool(_running.__dict__.get("models"))


@contextmanager
def propagate(
    model: Module,
    recipe: Recipe,
    observe: Sequence[str] = ("*",),
    *,
    ledger: bool = False,
    recompute: bool = False,
    heads: bool = False,
    taps: Sequence[Tap] = (),
) -> Iterator[Trace]:
    """Run ``model`` under ``recipe`` inside the block, in this thread.

    Calls of ``model`` inside the block compute what they always compute, and record a graph whose gradients
    give relevance. Nothing of the model changes, and other models and threads are not affected.

    Args:
        model: any module; call this very module inside the block.
        recipe: the rules, such as ``lrpx.ATTNLRP``.
        observe: shell patterns of module paths whose inputs and outputs can be asked for; each costs the
            memory of its gradient, so name few, or none (``()``), for long contexts.
        ledger: also measure what every bias, other constant and non-conserving rule keeps; ``trace.ledger()`` then
            tells.
        recompute: forget what happens inside each layer (each element of a list of modules), and compute it again
            in the backward pass: a second forward pass, for the memory of one layer.
        heads: follow the attention heads into the residual stream (``trace.heads``), under a recipe that cuts the
            branches of every layer off, ``recipes.ALTI_LOGIT``.
        taps: what else shall listen to the run, or write into it (:class:`~lrpx.engine.Tap`).

    Yields:
        The trace: call ``trace.explain(value)`` on the scalar to explain, then ``trace.relevance(path)``.

    Raises:
        TraceError: this thread already runs the same model, or a part of it, under a recipe; or it is compiled by
            torch.compile.
        MethodError: the path of an override matches no module of the model, or one that it runs without calling it; it
            has no layers to recompute, or its weights were made in inference mode.
        UnknownOperationError: the model calls an operation that a strict recipe has no rule for.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Tanh(),
    ...                             torch.nn.Linear(4, 2, bias=False))
    >>> from lrpx.recipes import LRP
    >>> with propagate(model, LRP) as trace:
    ...     logits = model(torch.tensor([1.0, 2.0, 3.0]))
    >>> value = trace.explain(logits[0])
    >>> torch.allclose(trace.relevance("input").sum(), value)
    True
    """
    running: dict[int, tuple[frozenset[int], Run]] = _running.__dict__.setdefault("models", {})
    if any(other.active for _, other in running.values()):
        raise TraceError(
            "a model is in the middle of a run under a recipe in this thread, as where an Explainer is called in a "
            "hook of one of its modules; keep what the hook is given, and explain when that run is over"
        )
    if id(model) in running:
        raise TraceError("this thread already runs this model under a recipe; leave the first block before the second")
    modules = dict(named_modules(model))
    kinds = set(map(type, modules.values()))
    _refuse_compiled(modules)
    inside = frozenset(map(id, modules.values()))
    if any(id(model) in others or other in inside for other, (others, _) in running.items()):
        raise TraceError(
            "this thread already runs a model under a recipe that is a part of this one, or this one of it; leave the "
            "first block before the second, or give the part its rules with recipe.at(path, use=other)"
        )
    _refuse_unused(recipe, type(model).__name__, modules)
    for tap in _taps(taps):
        for pattern in tap.patterns:
            if not any(fnmatchcase(path, pattern) for path in modules if path):
                raise TraceError(
                    f"no module of {type(model).__name__} has a path like {pattern!r}, which the tap "
                    f"{type(tap).__name__} wants; compare it with the paths of model.named_modules()"
                )
    recomputed = list(layers(modules)) if recompute else []
    if recompute and not recomputed:
        raise MethodError(f"{type(model).__name__} has no list of layers to recompute; leave recompute out")
    if recompute and any(intervened(module) for module in modules.values()):
        raise MethodError(
            "layers that run again in the backward pass, perhaps in another thread, would run without the intervention "
            "in this block; leave recompute out"
        )
    trace = Trace(recipe)
    lookups = {kind for kind in kinds if _is_embedding(kind)}
    embeddings = [(path, module) for path, module in modules.items() if type(module) in lookups]
    positions = [tap for tap in taps if isinstance(tap, Positions)]
    if not positions and (ledger or recipe.has_positions()):
        positions = [Positions(model)]
    trace.taps = [
        *([Heads()] if heads else []),
        *positions,  # before the ledger, so that they are no other constants
        *([Book(model)] if ledger else []),
        *([Observer(observe, trace.places)] if observe else []),
        *(tap for tap in taps if not isinstance(tap, Positions)),
    ]
    run = Run(
        recipe,
        trace,
        embeddings,
        lambda: {id(m): path for path, m in modules.items()},
        trace.taps,
        parameters=model.named_parameters,
        has_outputs=not heads,
    )
    for tap in trace.taps:
        tap.begin(run)
    replayed = [path for path, m in modules.items() if m.training and vars(m).get("gradient_checkpointing")]
    # the model's own checkpoints are inside the hooks; and without rules, a layer's gradients are left to torch
    last = next(layers(reversed(modules)), None) if recipe.has_rules() and not replayed else None
    seams = _Seams(run, model, modules, recipe, recomputed, last)
    run.replays = seams.replayed_by(trace)
    if replayed:
        _overrides.refuse_lost(recipe, replayed)
        trace.during_backward = lambda: seams.again(recipe)  # the model's own checkpoints compute their layers again
    with torch._C._InferenceMode(False):  # where gradients are on, too; it is left in one step
        try:
            running[id(model)] = inside, run
            seams.install()
            try:
                yield trace
            except Exception as error:
                _refuse_unseen(error, model, modules)
                raise
        finally:
            try:
                seams.remove()
            except BaseException:  # an interrupt
                seams.remove()
                raise
            finally:
                running.pop(id(model), None)


def _refuse_unseen(error: Exception, model: Module, modules: dict[str, Module]) -> None:
    """Refuse what an error in a block comes from, if that is known.

    Raises:
        MethodError: weights that were made in inference mode.
        UnknownOperationError: code inside which no rule is called.
    """
    if isinstance(error, RuntimeError) and "nference tensor" in str(error):
        _refuse_inference(model, modules)
    where = _where(error, modules, model)
    is_known = isinstance(error, LRPxError) and not isinstance(error, TraceError)  # it may be compiled
    if where and not is_known and _is_in(error, "flex_attention.py"):
        raise UnknownOperationError(
            f"{where} calls flex_attention, a higher-order operator of torch, inside which no rule is called; "
            'load the model with attn_implementation="sdpa"'
        ) from error
    if where and not isinstance(error, LRPxError) and _is_compiled(error):
        raise UnknownOperationError(
            f"{where} calls a higher-order operator of torch, such as torch.cond or while_loop, or a compiled "
            "function, inside which no rule is called; write it as plain Python, with if or for, or "
            f"{AS_WRITTEN}"
        ) from (None if isinstance(error, StopIteration) else error)  # contextlib takes it for the block's end


def _refuse_unused(recipe: Recipe, model: str, modules: dict[str, Module]) -> None:
    """Refuse an override of what a model does not have. A range of layers may begin behind the last.

    Raises:
        MethodError: it has no such path, not all of such layers, which were named one by one, or nothing of the path in
            its layers.
    """
    for override in recipe.overrides:
        paths = [path for path in modules if fnmatchcase(path, override.path)]
        if not paths:
            raise MethodError(
                f"no module of {model} has a path like {override.path!r}, which an override wants; "
                "compare it with the paths of model.named_modules()"
            )
        if override.layers is None:
            continue
        numbers, of_path = (
            {layer.number for path in among if (layer := layer_of(path)) is not None} for among in (modules, paths)
        )
        named = override.layers if isinstance(override.layers, tuple) else ()
        if missing := [number for number in named if number not in numbers]:
            has = f"layers {min(numbers)} to {max(numbers)}" if numbers else "no list of layers"
            raise MethodError(
                f"{model} has no layer {' and no layer '.join(map(str, missing))}, which an override wants "
                f"({override.where}); it has {has}"
            )
        if numbers and (not of_path or (isinstance(override.layers, tuple) and of_path.isdisjoint(override.layers))):
            raise MethodError(
                f"{override.where!r} is nothing in {model}: what {override.path!r} names is in none of these layers; "
                f"leave one of the two out, or name what is in the layers, as {override.path + '.*'!r}"
            )


def _is_list(module: Module) -> bool:
    """Whether a module only holds others, and is never called."""
    return getattr(type(module), "forward", None) is Module.forward and "forward" not in vars(module)


def _where(error: BaseException, modules: dict[str, Module], model: Module) -> str:
    """The path of the innermost module of the model that an error was raised in, if it was in one."""
    paths = {id(module): path or type(model).__name__ for path, module in modules.items()}
    found, frames = "", error.__traceback__
    while frames is not None:
        found = paths.get(id(frames.tb_frame.f_locals.get("self")), found)
        frames = frames.tb_next
    return found


def _is_in(error: BaseException, file: str) -> bool:
    """Whether an error was raised in a file of this name, or in what that calls."""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename.endswith(file):
            return True
        frames = frames.tb_next
    return False


def _is_compiled(error: BaseException) -> bool:
    """Whether an error comes from torch.compile, which has also followed the engine's own code and broken it off."""
    if type(error).__module__ == "torch._dynamo.exc":  # which is slow to import
        return True
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_name.startswith("torch_dynamo_resume_in"):
            return True
        frames = frames.tb_next
    return False


def _refuse_inference(model: Module, modules: dict[str, Module]) -> None:
    """Refuse weights that autograd cannot follow.

    Raises:
        MethodError: a parameter or a buffer was made in inference mode.
    """
    for path, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_inference():
                raise MethodError(
                    f"{path}{'.' * bool(path)}{name} of {type(model).__name__} was made in inference mode, so autograd "
                    "cannot follow it; load the model outside torch.inference_mode(), or pass copy.deepcopy(model)"
                )


def _taps(given: Any) -> Sequence[Tap]:
    """The user's taps.

    Raises:
        TraceError: they are no list of taps.
    """
    if not isinstance(given, (list, tuple)) or not all(isinstance(tap, Tap) for tap in given):
        raise TraceError(f"taps is {given!r}; pass a list of taps, each derived from lrpx.Tap: taps=[Mine()]")
    return given


def _is_embedding(kind: type[Module]) -> bool:
    return issubclass(kind, Embedding) or "embedding" in kind.__name__.lower()


def is_one_function(module: Module) -> bool:
    """Whether a module is run as one element-wise function.

    What models write out is known by what it computes (``engine/_functions.py``), and has the same numbers; a module
    that is known beforehand runs without a rule for each operation in it, a tenth faster (GELU with 256 tokens).
    """
    return _may_be_one_function(type(module)) and vars(module).get("act") is not torch.nn.functional.gelu


def _may_be_one_function(kind: type[Module]) -> bool:
    if kind.__module__ == "transformers.activations":
        return kind.__name__ not in NOT_AS_ONE
    return kind.__name__ in UNSEEN_ACTIVATIONS


def _without_cache(names: Sequence[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's arguments for layers that are run twice.

    Raises:
        TraceError: a cache was given, which they would fill twice.
    """
    given = next((name for name in ("past_key_values", "cache_params") if kwargs.get(name) is not None), None)
    if given is not None:
        raise TraceError(f"recompute=True runs each layer twice, and would fill the cache twice; leave {given} out")
    return kwargs | {"use_cache": False} if "use_cache" in names else kwargs


@lru_cache
def _argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class _Seams:
    """Where a run meets the model: the mode, and instance hooks that are inert in other threads."""

    def __init__(
        self,
        run: Run,
        model: Module,
        modules: dict[str, Module],
        recipe: Recipe,
        recomputed: Sequence[str],
        last: str | None,
    ) -> None:
        self.run = run
        self.mode = RuleMode(run)
        self.model = model
        self.modules = modules
        self.recipe = recipe
        self.recomputed = recomputed
        self.last = last
        self.thread: int | None = None
        self.first_thread = threading.get_ident()
        self.hooks = Hooks()
        self.layers: list[tuple[Layer, saved_tensors_hooks]] = []
        self.newest: list[weakref.ref[Layer]] = []
        self.runs = _overrides.Runs(recipe, modules)
        self.passed = _overrides.Passed(())
        self.containers: list[tuple[str, Any, Any, Any]] = []  # name, own, its copy, and what was put in there
        self.tensors: list[tuple[str, Tensor, int, Tensor]] = []  # name, copy, its version, and own
        self.written: list[Tensor] = []

    def install(self) -> None:
        """Put the mode and the hooks on, in this thread."""
        self.thread = threading.get_ident()
        self._register()
        torch._C._push_on_torch_function_stack(self.mode)

    def remove(self) -> None:
        """Take them off. An interrupt may have fallen anywhere, also in here: then it is done again."""
        for _, hooks in reversed(self.layers):  # where a layer was left by an interrupt, its hook was not called
            if _is_newest(hooks):
                hooks.__exit__()
        self.layers.clear()
        self.thread = None
        self.hooks.remove()
        self._leave()
        self.run.forget_marks()

    def _leave(self) -> None:
        """Take the mode off, where it is on."""
        error = sys.exc_info()[1]
        if error is not None and not self._is_on():
            clear_frames(error.__traceback__)  # torch itself takes modes off for a while, and may not have come back
        while self._is_on():
            torch._C._pop_torch_function_stack()

    def _is_on(self) -> bool:
        return self.mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def replayed_by(self, trace: Trace) -> Callable[[Recipe], None]:
        """What makes the backward pass of a trace run under a recipe too, for checkpoints of the model's own."""
        mine = weakref.ref(self)

        def replays(recipe: Recipe) -> None:
            seams = mine()
            if seams is not None:
                trace.during_backward = lambda: seams.again(recipe)

        return replays

    @contextmanager
    def again(self, recipe: Recipe) -> Iterator[None]:
        """Parts of the model run as before in the backward pass, after the block even, or in another thread."""
        before, is_on = self.thread, self._is_on()

        def back() -> None:
            if before is None:
                self.remove()
            elif not is_on:
                self.thread = before
                self._leave()

        try:
            if before is None:
                self.install()
            elif not is_on:
                # in the backward pass of this very block, or in a thread of autograd's while the block's own waits
                self.thread = threading.get_ident()
                torch._C._push_on_torch_function_stack(self.mode)
            with self.run.again(recipe, is_other_thread=threading.get_ident() != self.first_thread):
                yield
        finally:
            try:
                back()
            except BaseException:  # an interrupt
                back()
                raise

    def _register(self) -> None:
        model, modules, recipe = self.model, self.modules, self.recipe
        listening = [tap for tap in self.run.taps if tap.patterns]
        self._add(model, *self._root(model))
        if self.last is not None:
            self._add(modules[self.last], *self._last_layer())
        if not (listening or recipe.overrides or self.recomputed):  # the usual case, at little cost
            kinds = {kind for kind in set(map(type, modules.values())) if _may_be_one_function(kind)}
            for module in {module for module in modules.values() if type(module) in kinds and is_one_function(module)}:
                self._add(module, *self._activation())
            return
        lists = {path for path, module in modules.items() if _is_list(module)}
        shared: dict[Module, list[str]] = {}
        for path, module in modules.items():
            shared.setdefault(module, []).append(path)
        begun = dict.fromkeys(p for p in modules if any(_overrides.begins(o, p, lists) for o in recipe.overrides))
        self.passed = _overrides.Passed(begun)
        for module, paths in shared.items():
            if self.passed.concerns(paths):
                self._add(module, self._met(paths))
            if places := list(self.runs.of(paths)):
                self._add(module, self._counted(places))
            if not set(self.recomputed).isdisjoint(paths):
                self._add(module, *self._recompute())
            begins = [path for path in paths if path in begun]
            if begins:
                _overrides.refuse_shared(recipe, paths, lists)
                self._add(module, *self._override(_overrides.recipe_in(recipe, begins[0])))
            hooks = [
                self._listener(tap, path)
                for tap in listening
                for path in paths
                if path and any(fnmatchcase(path, pattern) for pattern in tap.patterns)
            ]
            # a tap sees what enters the module before it is run as one function, and what leaves it after
            for before, _ in hooks:
                self._add(module, before=before)
            if is_one_function(module):
                self._add(module, *self._activation())
            for _, after in hooks:
                self._add(module, after=after)

    def _add(
        self, module: Module, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks; what it computes is refused
            return

        def mine(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: hook(*args) if threading.get_ident() == self.thread else None

        if before is not None:
            self.hooks.before(module, mine(before), with_kwargs=True)
        if after is not None:
            self.hooks.after(module, mine(after), with_kwargs=True, always_call=True)

    def _root(self, model: Module) -> tuple[Callable[..., Any], ...]:
        names = _argument_names(getattr(model.forward, "__func__", model.forward))
        names = names if inspect.ismethod(model.forward) is False else names[1:]

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.recomputed:
                kwargs = _without_cache(names, kwargs)
            if not self.run.replaying:
                self.run.refuse_transform()
                self.run.nodes.begin()
            self.run.trace.notes.has_no_gradients |= not torch.is_grad_enabled()
            named = [(names[i] if i < len(names) else f"input {i}", value) for i, value in enumerate(args)]
            args = tuple(self._source(name, value) for name, value in named)
            kwargs = {name: self._source(name, value) for name, value in kwargs.items()}
            self.run.begin()
            self.runs.begin()
            self.passed.begin()
            return args, kwargs

        def after(_: Module, __: Any, ___: Any, output: Any) -> None:
            self.run.end()
            twice = self._hand_on()
            if output is not None:  # the model has not failed
                self.passed.refuse()
                if twice:
                    raise TraceError(
                        f"the model writes into {twice!r}, which it is also given by another name; inputs have copies "
                        "here, so that it would not find there what it has written: pass a clone by one of the names"
                    )

        return before, after

    def _source(self, name: str, value: Any) -> Any:
        """A floating-point input of the model as a leaf of the graph, also one in a list or a dictionary; masks are no
        input, nor is what an earlier call has computed in this block, such as a state: relevance goes on there."""
        if isinstance(value, UserDict):  # what a tokenizer or a processor returns
            data = self._source(name, value.data)
            if data is value.data:
                return value
            changed = copy(value)
            changed.data = data
            return changed
        if isinstance(value, dict) and name not in CACHES:  # also what a model of transformers returns
            inside = {key: self._source(f"{name}.{key}", each) for key, each in value.items()}
            return self._container(name, value, inside)
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        is_list = isinstance(value, (list, deque))  # of a class of one's own, too
        if (type(value) is tuple or is_named or is_list) and name not in CACHES:
            parts = [self._source(f"{name}.{i}", each) for i, each in enumerate(value)]
            if is_list:
                return self._container(name, value, parts)
            return type(value)(*parts) if is_named else type(value)(parts)
        if isinstance(value, Tensor) and value.is_inference():
            value = value.clone()  # autograd cannot save an inference tensor
        if not isinstance(value, Tensor) or not value.is_floating_point() or "label" in name or _is_mask(name, value):
            self.run.mark_input(value, name)
            return value
        if value.grad_fn is not None and self.run.nodes.is_own(value.grad_fn):
            trace = self.run.trace
            trace.carried.setdefault(name, sum(name in source.paths for source in trace.sources))
            return value
        has_own_rule = self.recipe.has_rule_for_first()
        if any(_overlap(value, written) for written in self.written):
            raise TraceError(
                f"an earlier call in this block has written into {name!r}, as into a cache, which is not changed here; "
                "let the model return it, and pass on what it has returned"
            )
        leaf = (_nudged(value) if has_own_rule else value.detach()).requires_grad_()
        self.run.trace.sources.append(Source((name,), leaf))
        given = leaf.clone()
        if has_own_rule:
            given.data.copy_(value)
        setattr(given, GIVEN, True)
        self.tensors.append((name, given, given._version, value.detach()))
        return given

    def _container(self, name: str, value: Any, inside: Any) -> Any:
        """A list or a dictionary with ``inside`` in it: itself, where that is what it holds, so that a model may keep
        something in it; else a copy, and what the model puts into that is handed on to ``value`` after the call."""
        keys = list(inside) if isinstance(value, dict) else range(len(inside))
        if all(inside[key] is value[key] for key in keys):
            return value
        changed = copy(value)
        for key in keys:
            changed[key] = inside[key]
        self.containers.append((name, value, changed, inside))
        return changed

    def _hand_on(self) -> str:
        """What the model has put into copies of its inputs is put into these, and tensors that it has written into
        are known, for they are not changed; the name of an input that it has written into and was given twice."""
        twice = ""
        for name, value, changed, given in self.containers:
            if isinstance(value, dict):
                gone = [key for key in given if key not in changed]
                new = [key for key, each in changed.items() if key not in given or each is not given[key]]
                if (gone or new) and sum(each is value for _, each, _, _ in self.containers) > 1:
                    twice = name
                for key in gone:
                    value.pop(key, None)
                for key in new:
                    value[key] = changed[key]
            elif len(changed) != len(given) or any(map(operator.is_not, changed, given)):
                if sum(each is value for _, each, _, _ in self.containers) > 1:
                    twice = name
                    continue
                own = {id(each): before for each, before in zip(given, value, strict=True)}
                value.clear()
                value.extend(own.get(id(each), each) for each in changed)
        for name, given, version, value in self.tensors:
            if given._version != version:
                self.written.append(value)
                if sum(_overlap(value, other) for _, _, _, other in self.tensors) > 1:
                    twice = name
        self.containers.clear()
        self.tensors.clear()
        return twice

    def _counted(self, places: Sequence[str]) -> Callable[..., Any]:
        def before(*_: Any) -> None:
            if not self.run.replaying:
                self.runs.meet(places)

        return before

    def _met(self, paths: Sequence[str]) -> Callable[..., Any]:
        def before(*_: Any) -> None:
            if not self.run.replaying:
                self.passed.meet(paths)

        return before

    def _override(self, recipe: Recipe) -> tuple[Callable[..., Any], ...]:
        return lambda *_: self.run.enter(recipe), lambda *_: self.run.leave()

    def _recompute(self) -> tuple[Callable[..., Any], ...]:
        def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.run.active and not self.run.replaying:
                recipe = self.run.recipe
                layer = Layer(module, args, kwargs, lambda: self.again(recipe), self.newest)
                self.layers.append((layer, layer.hooks()))
                self.layers[-1][1].__enter__()

        def after(module: Module, _: Any, __: Any, output: Any) -> None:
            if self.run.replaying:
                for layer in filter(None, (each() for each in self.newest)):
                    layer.gives(module, output)
            elif self.layers:
                layer, hooks = self.layers[-1]
                hooks.__exit__()
                self.layers.pop()
                layer.gave(output)

        return before, after

    def _last_layer(self) -> tuple[Callable[..., Any], ...]:
        return lambda *_: self.run.enter_last_layer(), lambda *_: self.run.leave_last_layer()

    def _activation(self) -> tuple[Callable[..., Any], ...]:
        """Run the module as one element-wise function ``g``, then give ``g`` the recipe's rule."""
        run = self.run
        waiting: list[Tensor] = []

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            waiting.clear()
            plain = run.recipe.activation is rules.unmodified
            if not run.active or (plain and not run.has_taps_on_rules) or kwargs or len(args) != 1:
                return None
            run.pause()
            waiting.append(args[0])
            return (args[0].detach(),), kwargs

        def after(module: Module, _: Any, __: Any, output: Any) -> Any:
            if not waiting:
                return None
            run.resume()
            x = waiting.pop()
            if output is None or not x.requires_grad:
                return output

            def op(x: Tensor) -> Any:
                if run.recipe.activation in (rules.identity, rules.constant):
                    return output.detach()  # they take the value alone
                with run.paused():
                    return module.forward(x)

            op.__name__ = type(module).__name__
            if not run.has_taps_on_constants:  # what the rule itself computes matters to the ledger alone
                run.pause()
            try:
                y = run.apply("activation", op, x)
            finally:
                run.resume()
            return mark_gate(run.recipe, "activation", run.counted(op.__name__, y))

        return before, after

    def _listener(self, tap: Tap, path: str) -> tuple[Callable[..., Any], ...]:
        def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = first_given(module, args, kwargs)
            other = None if value is None else _as_written(tap, path, value, tap.module(path, "input", value))
            return None if other is None else (with_other(args, value, other), with_other(kwargs, value, other))

        def after(module: Module, _: Any, __: Any, output: Any) -> Any:
            value = first_tensor(output)
            other = None if value is None else _as_written(tap, path, value, tap.module(path, "output", value))
            if other is None:
                return None
            keep_instead(module, value, other)
            return with_other(output, value, other)

        return before, after


def _as_written(tap: Tap, path: str, value: Tensor, other: Any) -> Any:
    """What a tap writes in the place of a module's value, or None.

    Raises:
        TraceError: it is no tensor, or one of another shape, which torch might spread over the place of the value.
    """
    if other is None:
        return None
    if not isinstance(other, Tensor) or other.shape != value.shape:
        given = f"shape {list(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
        raise TraceError(
            f"the tap {type(tap).__name__} writes {given} at {path!r}, where the value has shape {list(value.shape)}; "
            "return a tensor of that shape, or None to leave the value as it is"
        )
    return as_own(other)


def _is_newest(hooks: saved_tensors_hooks) -> bool:
    """Whether these hooks of saved tensors are the newest in this thread."""
    newest = hooks_of_saved(False)
    return newest is not None and newest[0] == hooks.pack_hook


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may have memory in common; parts of a batch have none."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return a is b
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    (a_from, a_to), (b_from, b_to) = map(_extent, (a, b))
    return bool(a_from < b_to and b_from < a_to)


def _extent(x: Tensor) -> tuple[Any, Any]:
    """Where in its memory a tensor begins and ends."""
    begin = x.storage_offset()
    end = begin + 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return begin * x.element_size(), end * x.element_size()


def _nudged(value: Tensor) -> Tensor:
    """An input as the leaf of a layer with a rule of its own: ``rules.nudge`` in the place of 0."""
    return torch.where(value.detach() == 0, rules.nudge(value.dtype), value.detach())


def _is_mask(name: str, value: Tensor) -> bool:
    """Whether an argument is a mask: its name says so, or it may be one by its name and by what is in it."""
    return "mask" in name and (name.endswith(("mask", "masks")) or bool(((value == 0) | (value == 1)).all()))


def _refuse_compiled(modules: dict[str, Module]) -> None:
    """Refuse what ``torch.compile`` has compiled, for no rule is called in its code.

    Raises:
        TraceError: names the module.
    """
    model = modules[""]
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            f"{type(model).__name__} is compiled by torch.jit, where no rule is called; pass the module it was made of"
        )
    for path, module in modules.items():
        by_itself = vars(module).get("_compiled_call_impl") is not None
        if not (by_itself or "_orig_mod" in module._modules):
            continue
        where = path or type(module).__name__
        if by_itself:
            raise TraceError(
                f"{where} is compiled by its compile(), where no rule is called; explain it before it is compiled"
            )
        raise TraceError(
            f"{where} is compiled by torch.compile, where no rule is called; "
            f"pass the module itself, {path or 'model'}._orig_mod"
        )


def with_other(values: Any, one: Tensor | None, other: Tensor) -> Any:
    """The same values with another tensor in the place of one."""
    if values is one:
        return other
    if isinstance(values, (tuple, list)):
        parts = [with_other(each, one, other) for each in values]
        if isinstance(values, list):
            others = copy(values)
            others[:] = parts
            return others
        return values._make(parts) if hasattr(values, "_make") else type(values)(parts)
    if isinstance(values, dict):
        changed = copy(values)
        for key, each in values.items():
            if each is one:
                changed[key] = other
        return changed
    return values
