"""What a model's forward pass may read besides its inputs and weights, as it is at this moment, to be compared later.

Compiled code has such things written into it.
"""

from __future__ import annotations

import sys
import zlib
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from functools import partial
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
NUMBERS = frozenset({bool, float, complex})
"""Plain values that are equal to others that code may tell from them: 1, 1.0 and True, and 0.0 and -0.0."""
NOT_SETTINGS = frozenset(vars(Module())) - {"training", "_modules", "_parameters", "_buffers"}
"""What each module has besides its settings, as hooks, which are refused."""
NOT_LOOKED_INTO = sys.stdlib_module_names | {"numpy", "torch"}
"""Whose objects are only asked whether they are the same: functions and types, a logger, a lock, an array."""
PLACES = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap)
"""Python's own classes of objects that are made to hold settings."""


class Same:
    """An object that is equal to itself alone, whatever it says of others.

    >>> Same([]) == Same([]), Same(len) == Same(len)
    (False, True)
    """

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


class Settings:
    """Reads what objects hold, each once, wherever it is met again.

    What it reads is equal to what another one reads later, if nothing has changed: plain values and containers are
    what they are, a dictionary's in their order, all else is the same object with the same attributes, its class's too.

    Args:
        modules: those that are not looked into where they are met, because each is read with :meth:`of_module`.
        inputs: the tensors that are inputs of the code, by their ``id`` their numbers: of these it matters which one is
            where, and not what it holds.

    >>> one = SimpleNamespace(scale=2.0)
    >>> before = Settings().of({"kept": one, "names": ["a"]})
    >>> before == Settings().of({"kept": one, "names": ["a"]})
    True
    >>> one.scale = 3.0
    >>> before == Settings().of({"kept": one, "names": ["a"]})
    False
    """

    def __init__(self, modules: Iterable[Module] = (), inputs: Mapping[int, int] | None = None) -> None:
        self._inputs = inputs or {}
        self._met: set[int] = set(map(id, modules))
        self.beside: list[Module] = []
        """The other modules that were met, as in a list, where torch registers none."""
        self.holders: list[Any] = []
        """The containers, objects and classes that were read, whose contents may change."""

    def of(self, value: Any) -> Any:
        """A value as it is now."""
        if type(value) in PLAIN:
            return (type(value), repr(value)) if type(value) in NUMBERS else value
        if isinstance(value, Tensor):
            number = self._inputs.get(id(value))
            return (Same(value), *_numbers_of(value)) if number is None else number
        if isinstance(value, type):
            return self.of_class(value)
        if id(value) in self._met:
            return Same(value)
        self._met.add(id(value))
        if isinstance(value, MethodType):
            return Same(value), self.of(value.__self__), self.of(value.__func__)
        if isinstance(value, partial):
            return Same(value), self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, MappingProxyType):
            return Same(value), self.of(dict(value))
        self.holders.append(value)
        if isinstance(value, Module):
            self.beside.append(value)
            return self.of_module(value)
        if isinstance(value, dict):
            return [type(value), *((self.of(key), self.of(each)) for key, each in value.items())]  # in this order
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            return [type(value), *map(self.of, value)]  # a list is another index than a tuple
        return Same(value), self.of_class(type(value)), self._attributes(value)

    def of_module(self, module: Module) -> Any:
        """A module's class and attributes, its own tensors and modules among them."""
        held = {name: self.of(each) for name, each in vars(module).items() if name not in NOT_SETTINGS}
        return Same(module), self.of_class(type(module)), held

    def of_class(self, cls: type) -> Any:
        """What a class, and those between it and torch's or Python's own, have for all their objects."""
        if id(cls) in self._met or cls.__module__.partition(".")[0] in NOT_LOOKED_INTO:
            return Same(cls)
        self._met.add(id(cls))
        self.holders.append(cls)
        own = {name: self.of(each) for name, each in vars(cls).items() if callable(each) or not name.startswith("__")}
        return Same(cls), own, self._file(cls.__module__), [self.of_class(base) for base in cls.__bases__]

    def _file(self, home: str) -> Any:
        """What a modelling file of transformers has names for, whose functions its classes call by them."""
        file = sys.modules.get(home) if home.startswith("transformers.models.") else None
        if file is None or id(file) in self._met:
            return None
        self._met.add(id(file))
        return [(name, Same(each)) for name, each in vars(file).items()]

    def _attributes(self, value: object) -> Any:
        cls = type(value)
        if isinstance(value, FunctionType):
            is_users = (value.__module__ or "").partition(".")[0] not in NOT_LOOKED_INTO
            held = [value.__dict__, value.__defaults__, value.__kwdefaults__]
            return list(map(self.of, held)) if is_users else None
        if not isinstance(value, PLACES) and cls.__module__.partition(".")[0] in NOT_LOOKED_INTO:
            return None
        return {name: self.of(each) for name, each in _attributes_of(value).items()}


def _numbers_of(tensor: Tensor) -> tuple[Any, ...]:
    """What tells whether a tensor holds the same numbers in the same places, whatever its class answers."""
    with torch._C.DisableTorchFunction():
        strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None
        version = None if tensor.is_inference() else tensor._version  # goes up with each change in place
        shape = None if tensor.is_nested else tensor.shape
        return version, tensor.dtype, tensor.device, shape, strides, _checksum(tensor, strides)


def _checksum(tensor: Tensor, strides: tuple[int, ...] | None) -> int | None:
    """Of a tensor's numbers, which change in ``.data`` without its version; None where they are not in memory."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or strides is None:
        return None
    if tensor.is_meta or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim]:  # the same numbers again and again
            tensor = tensor.narrow(dim, 0, 1)
    numbers = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    numbers = numbers.as_strided((numbers.numel(),), (1,))  # one number may have any stride
    return zlib.crc32(numbers.view(torch.uint8).numpy().data)


def _attributes_of(value: object) -> dict[str, Any]:
    slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ()) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def contents(holder: Any) -> Any:
    """What a container, an object or a class holds at this moment, in a dictionary, a list or a set of its own."""
    if isinstance(holder, (dict, list, deque, set)):
        return dict(holder) if isinstance(holder, dict) else set(holder) if isinstance(holder, set) else list(holder)
    return dict(vars(holder)) if isinstance(holder, type) else _attributes_of(holder)


def put_back(holder: Any, earlier: Any) -> str | None:
    """Give a holder its earlier :func:`contents` again; tells what was another, None where nothing was.

    >>> kept = {"x": 1}
    >>> kept["y"] = 2
    >>> put_back(kept, {"x": 1}), kept
    ('y', {'x': 1})
    """
    now = contents(holder)
    if isinstance(now, dict):
        names = [name for name in {**now, **earlier} if not _is_same(now.get(name, now), earlier.get(name, now))]
    elif isinstance(now, list):
        same = len(now) == len(earlier) and all(map(_is_same, now, earlier))
        names = [] if same else ["a list"]
    else:
        names = [] if now == earlier else ["a set"]
    if not names:
        return None
    if isinstance(holder, (dict, list, deque, set)):
        holder.clear()
        holder.extend(earlier) if isinstance(now, list) else holder.update(earlier)  # type: ignore[union-attr]
        return str(names[0])
    how = type if isinstance(holder, type) else object
    for name in names:
        how.__setattr__(holder, name, earlier[name]) if name in earlier else how.__delattr__(holder, name)
    return str(names[0])


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)
