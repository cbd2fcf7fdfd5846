"""``propagate``: the user's own model, unmodified, run under a recipe inside a ``with`` block."""

from __future__ import annotations

import inspect
import re
import threading
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module

from lrpx import rules
from lrpx.engine.handlers import mark_gate
from lrpx.engine.mode import RuleMode
from lrpx.engine.trace import Place, Source, Trace
from lrpx.errors import MethodError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from lrpx.recipes import Override, Recipe

SPELLED_OUT_ACTIVATIONS = frozenset({"BloomGelu"})
"""Classes outside ``transformers.activations`` that write one element-wise function as many operations."""

_running = threading.local()


@contextmanager
def propagate(model: Module, recipe: Recipe, observe: Sequence[str] = ("*",)) -> Iterator[Trace]:
    """Run ``model`` under ``recipe`` inside the block, in this thread.

    Calls of ``model`` inside the block compute what they always compute, and record a graph whose gradients
    give relevance. Nothing of the model changes, and other models and threads are not affected.

    Args:
        model: any module; call this very module inside the block.
        recipe: the rules, such as ``lrpx.ATTNLRP``.
        observe: shell patterns of module paths whose inputs and outputs can be asked for; each costs the
            memory of its gradient, so name few, or none (``()``), for long contexts.

    Yields:
        The trace: call ``trace.explain(value)`` on the scalar to explain, then ``trace.relevance(path)``.

    Raises:
        TraceError: this thread already runs the same model under a recipe.
        MethodError: the path of an override matches no module of the model.
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
    running: set[int] = _running.__dict__.setdefault("models", set())
    if id(model) in running:
        raise TraceError("this thread already runs this model under a recipe; leave the first block before the second")
    modules = dict(model.named_modules(remove_duplicate=False))
    unused = [
        override for override in recipe.overrides if not any(fnmatchcase(path, override.path) for path in modules)
    ]
    if unused:
        raise MethodError(
            f"no module of {type(model).__name__} has a path like {unused[0].path!r}, which an override wants; "
            "compare it with the paths of model.named_modules()"
        )
    trace = Trace(recipe.rule_modules() if recipe.strict else None)
    mode = RuleMode(recipe, trace, _embeddings(modules), lambda: {id(m): path for path, m in modules.items()})
    hooks = _Hooks(mode, trace)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(running.discard, id(model))
        running.add(id(model))
        stack.callback(hooks.remove)
        hooks.register(model, modules, recipe, observe)
        stack.enter_context(mode)
        yield trace


def _embeddings(modules: dict[str, Module]) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for path, module in modules.items():
        if isinstance(module, Embedding) or "embedding" in type(module).__name__.lower():
            for weight in module.parameters(recurse=False):
                found[id(weight)] = (*found.get(id(weight), ()), path)
    return found


def layer_index(path: str) -> int | None:
    """The number of the outermost list element in a module path: ``model.layers.3.mlp`` is in layer 3."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return None if match is None else int(match.group(1))


def is_spelled_out_activation(module: Module) -> bool:
    """Whether a module writes one element-wise function out as many operations."""
    kind = type(module)
    return kind.__module__ == "transformers.activations" or kind.__name__ in SPELLED_OUT_ACTIVATIONS


class _Hooks:
    """The instance hooks of one block: inert in other threads, removed when it ends."""

    def __init__(self, mode: RuleMode, trace: Trace) -> None:
        self.mode = mode
        self.trace = trace
        self.thread = threading.get_ident()
        self.handles: list[RemovableHandle] = []
        self.outer: list[Recipe] = []

    def register(self, model: Module, modules: dict[str, Module], recipe: Recipe, observe: Sequence[str]) -> None:
        before, after = self._root(model, recipe)
        self._add(model, before, after)
        shared: dict[Module, list[str]] = {}
        for path, module in modules.items():
            shared.setdefault(module, []).append(path)
        for module, paths in shared.items():
            begins = [path for path in paths if any(_begins(override, path) for override in recipe.overrides)]
            if begins:
                self._add(module, *self._override(_recipe_in(recipe, begins[0])))
            observers = [
                self._observer(path) for path in paths if path and any(fnmatchcase(path, name) for name in observe)
            ]
            # an observer sees what enters the module before it is run as one function, and what leaves it after
            for before, _ in observers:
                self._add(module, before=before)
            if is_spelled_out_activation(module):
                self._add(module, *self._activation())
            for _, after in observers:
                self._add(module, after=after)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _add(
        self, module: Module, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        def mine(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: hook(*args) if threading.get_ident() == self.thread else None

        if before is not None:
            self.handles.append(module.register_forward_pre_hook(mine(before), with_kwargs=True))
        if after is not None:
            self.handles.append(module.register_forward_hook(mine(after), with_kwargs=True, always_call=True))

    def _root(self, model: Module, recipe: Recipe) -> tuple[Callable[..., Any], Callable[..., Any]]:
        names = list(inspect.signature(model.forward).parameters)

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.mode.active = True
            self.mode.recipe = recipe
            self.outer.clear()
            named = [(names[i] if i < len(names) else f"input {i}", value) for i, value in enumerate(args)]
            return (
                tuple(self._source(name, value) for name, value in named),
                {name: self._source(name, value) for name, value in kwargs.items()},
            )

        def after(*_: Any) -> None:
            self.mode.active = False

        return before, after

    def _source(self, name: str, value: Any) -> Any:
        """A floating-point input of the model, as a leaf of the graph; masks are no input."""
        if isinstance(value, Tensor) and value.is_inference():
            value = value.clone()  # autograd cannot save an inference tensor
        if not isinstance(value, Tensor) or not value.is_floating_point() or "mask" in name or "label" in name:
            return value
        leaf = value.detach().requires_grad_()
        self.trace.sources.append(Source((name,), leaf))
        return leaf.clone()

    def _override(self, recipe: Recipe) -> tuple[Callable[..., Any], ...]:
        def before(*_: Any) -> None:
            self.outer.append(self.mode.recipe)
            self.mode.recipe = recipe

        def after(*_: Any) -> None:
            if self.outer:
                self.mode.recipe = self.outer.pop()

        return before, after

    def _activation(self) -> tuple[Callable[..., Any], ...]:
        """Run the module as one element-wise function ``g``, then give ``g`` the recipe's rule."""
        waiting: list[Tensor] = []

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            waiting.clear()
            if not self.mode.active or self.mode.recipe.activation is rules.unmodified or kwargs or len(args) != 1:
                return None
            self.mode.active = False
            waiting.append(args[0])
            return (args[0].detach(),), kwargs

        def after(_: Module, __: Any, ___: Any, output: Any) -> Any:
            if not waiting:
                return None
            self.mode.active = True
            x = waiting.pop()
            if output is None or not x.requires_grad:
                return output
            return mark_gate(self.mode, "activation", self.mode.recipe.activation(lambda _: output.detach(), x))

        return before, after

    def _observer(self, path: str) -> tuple[Callable[..., Any], ...]:
        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._place(path, "input", (*args, *kwargs.values()))

        def after(_: Module, __: Any, ___: Any, output: Any) -> None:
            self._place(path, "output", output)

        return before, after

    def _place(self, path: str, side: Any, values: Any) -> None:
        tensor = _first_tensor(values)
        if tensor is not None:
            self.trace.places.append(Place(path, side, tensor, tensor._version))


def _begins(override: Override, path: str) -> bool:
    """Whether an override covers a module but none of the modules around it."""
    if not override.covers(path, layer_index(path)):
        return False
    parents = [path[: match.start()] for match in re.finditer(r"\.", path)] + ([""] if path else [])
    return not any(override.covers(parent, layer_index(parent)) for parent in parents)


def _recipe_in(recipe: Recipe, path: str) -> Recipe:
    """The recipe in a module: every override that covers it or a module around it, the later over the earlier."""
    around = ["", *(path[: match.start()] for match in re.finditer(r"\.", path)), path]
    for override in recipe.overrides:
        if any(override.covers(place, layer_index(place)) for place in around):
            recipe = recipe.with_rules(override.rules)
    return recipe


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else None
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
    return None
