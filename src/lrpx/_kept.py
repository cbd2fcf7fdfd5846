"""What modules keep beside their weights, and how a trial call of a model leaves it as it was."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lrpx._hooks import captures, is_own
from lrpx._modules import named_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module

OF_MODULES = frozenset(vars(torch.nn.Module()))
"""The attributes of every module."""
CAPTURING = "_output_capturing_hooks_installed"
"""The flag by which transformers knows that its hooks are on."""
LARGEST = 2**22
"""Of tensors with more numbers than these, as static caches, a trial puts none back."""
DEEP = 5
"""So deep is looked for what a module keeps: a cache has a list of layers, and each of these its keys."""
HOLDERS = (dict, OrderedDict, defaultdict, list, set, deque)
"""What a module keeps others in, beside tuples and objects."""


@contextmanager
def as_it_was(model: Module) -> Iterator[None]:
    """Put back at the end what a trial run has changed of the random state, and of what modules keep for their next
    call: buffers, and tensors, numbers, lists, dictionaries and plain objects that are attributes, and what is in
    these, as tables of angles that grow with the longest text, or a cache.

    What is callable stays as it is: another thread may have put it there. So do hooks that transformers puts on modules
    in the first call that asks for hidden states, and the flag that tells of them; those that a module of one's own
    puts on itself are taken off, for what tells of them, as a list of handles, is put back.
    """
    kept = _Keeping({module: None for _, module in named_modules(model)})
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            try:
                kept.put_back()
            except BaseException:  # Ctrl-C in the midst of it
                kept.put_back()
                raise


class _Keeping:
    """What modules keep beside the numbers of their weights."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.attributes = [(module, _attributes(module)) for module in modules]
        self.hooks = [(module, [dict(each) for each in _hooks_of(module)]) for module, _ in self.attributes]
        parts = [(module._buffers, module._parameters, module._modules) for module, _ in self.attributes]
        self.named: list[tuple[dict[str, Any], dict[str, Any]]] = [(each, dict(each)) for own in parts for each in own]
        kept = {id(each): each for each in held_in(module for module, _ in self.attributes)}
        self.held = [(each, each.copy()) for each in kept.values() if type(each) in HOLDERS]
        self.tensors = [
            (each, each._version, each.detach().clone())
            for each in kept.values()
            if type(each) is torch.Tensor and each.numel() <= LARGEST and not (each.is_inference() or each.is_meta)
        ]

    def put_back(self) -> None:
        for module, hooks in self.hooks:
            _put_back_hooks(_hooks_of(module), hooks)
        for module, attributes in self.attributes:
            for name in _attributes(module).keys() - attributes.keys() - {CAPTURING}:
                del vars(module)[name]
            vars(module).update({name: each for name, each in attributes.items() if name != CAPTURING})
        for held, before in (*self.named, *self.held):
            if [(key, id(each)) for key, each in _items(held)] != [(key, id(each)) for key, each in _items(before)]:
                held.clear()
                held.extend(before) if isinstance(held, (list, deque)) else held.update(before)
        for tensor, version, before in self.tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)


def _hooks_of(module: Module) -> list[dict[int, Any]]:
    """What torch knows of the hooks that are called before and after a module: these, and how."""
    held = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    return [*held, module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called]


def _put_back_hooks(now: list[dict[int, Any]], before: list[dict[int, Any]]) -> None:
    """Take off the hooks that came, and put those on again that went, but for this package's and transformers'."""
    for at in (0, 2):
        for number in now[at].keys() ^ before[at].keys():
            hook = now[at].get(number) or before[at][number]
            if not (is_own(hook) or captures(hook)):
                for held, earlier in zip(now, before, strict=True):
                    held.update({number: earlier[number]}) if number in earlier else held.pop(number, None)


def held_in(modules: Iterable[Module]) -> list[Any]:
    """What modules keep beside their weights, and what lists, dictionaries, tuples and plain objects of these hold; for
    such an object the dictionary of its attributes, and not what is callable."""
    found: list[Any] = []
    opened: set[int] = set()
    values = [each for module in modules for own in (_attributes(module), module._buffers) for each in own.values()]
    for _ in range(DEEP):
        values = [vars(each) if _is_plain(each) else each for each in values]
        found += values
        holders = {id(each): each for each in values if isinstance(each, tuple) or type(each) in HOLDERS}
        values = [each for key, holder in holders.items() if key not in opened for _, each in _items(holder)]
        opened |= holders.keys()
    return found


def _is_plain(x: Any) -> bool:
    """Whether something is an object of a class of one's own, whose attributes are all that it holds; no optimizer,
    whose state is as large as the model, and which no forward pass changes."""
    is_other = isinstance(x, (torch.Tensor, ModuleType, torch.optim.Optimizer, tuple, *HOLDERS)) or callable(x)
    return not is_other and type(getattr(x, "__dict__", None)) is dict


def _items(held: Any) -> list[tuple[Any, Any]]:
    return list(held.items() if isinstance(held, dict) else enumerate(held))


def _attributes(module: Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES and not callable(value)}
