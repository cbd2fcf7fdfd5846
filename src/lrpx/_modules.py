"""The modules inside a module."""

from __future__ import annotations

import dis
import inspect
import re
import sys
from contextlib import contextmanager
from functools import cached_property, lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.nn import Module


MAKING = frozenset({"__init__", "__new__", "__post_init__", "__setattr__", "__setstate__"})
"""The methods in which an object is given what it holds."""


def named_modules(model: Module) -> list[tuple[str, Module]]:
    """``(path, module)`` of a module and all inside it, one at several paths several times.

    What ``model.named_modules(remove_duplicate=False)`` gives, in the same order and in a fraction of its time, which
    an explanation of a short text would notice; and a module inside itself is left out.

    >>> import torch
    >>> shared = torch.nn.Tanh()
    >>> [path for path, _ in named_modules(torch.nn.Sequential(shared, torch.nn.Sequential(shared)))]
    ['', '0', '1', '1.0']
    """
    found = [("", model)]
    _add_inside(found, "", model, (model,))
    return found


def _add_inside(found: list[tuple[str, Module]], prefix: str, module: Module, around: tuple[Module, ...]) -> None:
    for name, child in module._modules.items():
        if child is None:
            continue
        if not child._modules:  # nearly always
            found.append((prefix + name, child))
        elif child not in around:
            found.append((prefix + name, child))
            _add_inside(found, f"{prefix}{name}.", child, (*around, child))


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments of a function, in its order; none where it does not tell, as of compiled code.

    >>> argument_names(lambda x, mask=None: x)
    ('x', 'mask')
    """
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


@lru_cache(maxsize=4096)
def kept_in_running(kind: type, first: str | None = "forward") -> frozenset[str]:
    """The attributes that modules of a class set as they run, in ``forward`` and the methods that it names: counts of
    calls, and the length of the last text.

    Args:
        kind: the class.
        first: the method that is called; None for any but those that make an object.

    >>> class Counting(torch.nn.Module):
    ...     def __init__(self):
    ...         self.scale = 2
    ...
    ...     def forward(self, x):
    ...         self.calls = self._again()
    ...
    ...     def _again(self):
    ...         self.more += 1
    >>> sorted(kept_in_running(Counting))
    ['calls', 'more']
    """
    found: set[str] = set()
    met: set[str] = set()
    names = [first] if first is not None else [each for each in dir(kind) if each not in MAKING]
    while names:
        name = names.pop()
        method: Any = getattr(kind, name, None)
        if isinstance(method, cached_property):
            found.add(name)
            method = method.func
        left = [getattr(method, "__code__", None)] if name not in met else []
        met.add(name)
        for code in left:
            if isinstance(code, CodeType):
                names += [each for each in code.co_names if each not in MAKING]
                found.update(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
                left += code.co_consts
    return frozenset(found)


def base_model(model: Module) -> Module:
    """The model inside an adapter of peft, which hands all on to it; any other as it is."""
    find: Any = getattr(model, "get_base_model", None)
    return model if find is None else find()


def adapted_layers(model: Module) -> dict[str, Module]:
    """The modules in which peft holds a layer and its adapters, by their paths."""
    if "peft" not in sys.modules:
        return {}
    return {path: each for path, each in named_modules(model) if hasattr(each, "_get_available_adapters")}


def adapters_in(model: Module) -> tuple[str, ...]:
    """The adapters of peft that change what a model computes now: those switched on, or merged and not switched off."""
    found: dict[str, None] = {}
    layer: Any
    for layer in adapted_layers(model).values():
        if not layer.disable_adapters:
            there = layer._get_available_adapters()
            found |= dict.fromkeys(name for name in layer.merged_adapters or layer.active_adapters if name in there)
    return tuple(found)


@contextmanager
def attending_as_before(model: Module) -> Iterator[None]:
    """Undo at the end what a run has changed for good: BigBird, given a short text, puts full attention in the place of
    its block-sparse one, and what it says of a long text is another from then on."""
    found = (each for _, each in named_modules(model) if "attention_type" in vars(each))
    before = [(each, each.attention_type, dict(each._modules)) for each in found]
    state: Any = torch.get_rng_state() if before else None
    try:
        yield
    finally:
        for each, kind, inside in before:
            if each.attention_type != kind:
                each.attention_type = kind
                each._modules.update(inside)
                torch.set_rng_state(state)  # it began with random weights


@contextmanager
def unpacked(model: Module) -> Iterator[None]:
    """Have torch's TransformerEncoder compute at hidden tokens too. Without a gradient, and where they are the last of
    every row of a batch, it leaves them out and puts 0 in their places: what it says there hangs on the other rows."""
    found: list[Any] = [each for _, each in named_modules(model) if getattr(each, "use_nested_tensor", False) is True]
    try:
        for each in found:
            each.use_nested_tensor = False
        yield
    finally:
        for each in found:
            each.use_nested_tensor = True


class Layer(NamedTuple):
    """A layer: an element of an outermost list of modules."""

    path: str
    number: int


@lru_cache(maxsize=2**16)
def layer_of(path: str) -> Layer | None:
    """The layer that the module at a path is, or is in.

    >>> layer_of("model.layers.3.mlp.experts.1")
    Layer(path='model.layers.3', number=3)
    >>> layer_of("model.norm")
    """
    found = re.match(r"(?:.*?\.)?(\d+)(?=\.|$)", path)
    return None if found is None else Layer(found.group(), int(found.group(1)))


def layers(paths: Iterable[str]) -> Iterator[str]:
    """The paths of a model's layers, in the order given.

    >>> paths = ["", "model", "model.layers", "model.layers.0", "model.layers.0.experts.1", "model.layers.1", "head"]
    >>> list(layers(paths)), next(layers(reversed(paths)))
    (['model.layers.0', 'model.layers.1'], 'model.layers.1')
    """
    return (path for path in paths if (layer := layer_of(path)) is not None and layer.path == path)
