"""What a session has defined: a digest of the code of a user's own functions and classes, such as a metric's, which no
script and no package has registered.

It is of the code as it was compiled, with what that names of the user's own, so that neither a comment nor where it
stands counts; of functions and classes of other packages it is the name. Other objects of theirs, files that are read,
modules that a function imports when it runs, and tensors are not looked at; lists, sets and dictionaries are, but for
what is of that kind in them, so that a cache of tensors counts for nothing.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
import sys
import sysconfig
from argparse import Namespace
from contextlib import suppress
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lrpx._modules import kept_in_running, named_modules
from lrpx.tasks import changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, type(...), torch.dtype, range, slice),
    *(PurePath, Decimal, Fraction, operator.itemgetter, operator.attrgetter),
)
CODE = (FunctionType, staticmethod, classmethod, property)
NAMED = (FunctionType, BuiltinFunctionType, type)
CODE_OF_MODEL: Final = "code of the model"
CACHED = type(functools.cache(len))
NUMPYS = (np.ufunc, type(np.mean))
"""What numpy's functions are."""
_INSTALLED = ("site-packages", "dist-packages")
_OWN = "own "
_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""The attributes of every module, ``training`` among them."""


def digest_of_code(thing: object) -> str | None:
    """The SHA-256 of a thing's code, as far as it is the user's own; None where none of it is.

    >>> digest_of_code(len), digest_of_code(Path)
    (None, None)
    """
    return _digest([*_told(thing, {}, plain=False)])


def settings_of_model(model: Module) -> dict[str, str]:
    """What a run is known by beside a model's weights and config: the digest of its code, where that is the user's."""
    digest = digest_of_model(model)
    return {} if digest is None else {CODE_OF_MODEL: digest}


def digest_of_model(model: Module) -> str | None:
    """The same of a model: of the classes of its modules, of what the user has put on them, into their classes, in the
    place of a function that these call, or of torch's, and of what the modules hold that is no weight, as the numbers
    and names of a scale, of torch's functions between layers, or of a configuration."""
    seen: dict[int, int] = {}
    told: list[str] = []
    for path, module in named_modules(model):
        kind: Any = type(module)
        held = vars(module)
        told += [path, *_told(kind, seen)]
        is_users = is_own(kind.__module__)
        known = is_users or kind.__module__.startswith("torch.nn.")
        hidden = _OF_MODULES | (kept_in_running(kind) if is_users else frozenset())
        named = _named_by(kind) if is_users else frozenset()  # of what begins with _ the rest is transformers', say
        for name in sorted(held.keys() - hidden):
            if (name[:1] != "_" or name in named) and (known or _is_put_on(held[name])):
                lines = [] if held[name] is None else [*_told(held[name], seen)]  # a tensor may come there
                told += [name, *lines] if lines else []
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            told += [line for hook in hooks.values() if _is_put_on(hook) for line in ("hook", *_told(hook, seen))]
    put_in: Any = changes(model)
    for place, thing in put_in:
        if isinstance(place, str) and _is_put_on(thing) and id(thing) not in seen:
            told += [place, *_told(thing, seen)]
    for name, thing in vars(torch.nn.functional).items():  # as some put a kernel of attention there, for all models
        if isinstance(thing, FunctionType) and _is_put_on(thing):
            told += [name, *_told(thing, seen)]
    return _digest(told)


def _named_by(kind: type) -> frozenset[str]:
    """What the methods of a user's classes name."""
    methods = (each for cls in kind.__mro__ if is_own(cls.__module__) for each in vars(cls).values())
    return frozenset(name for each in methods if isinstance(each, FunctionType) for name in each.__code__.co_names)


def _digest(told: list[str]) -> str | None:
    is_any = any(line.startswith(_OWN) for line in told)
    return hashlib.sha256("\n".join(told).encode()).hexdigest() if is_any else None


def _is_put_on(thing: Any) -> bool:
    """Whether it is a function of the user's, with arguments given or not, a method of something of theirs, or what
    can be called like one."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    function = getattr(thing, "__func__", thing)
    if not isinstance(function, FunctionType):
        return callable(thing) and is_own(type(thing).__module__)
    return is_own(_home(function))


def _home(thing: Any) -> str | None:
    """The module that a function or a class is from; of a function where it was written, for one in the place of
    another may say that it is from there (``functools.wraps``)."""
    written = thing.__globals__.get("__name__") if isinstance(thing, FunctionType) else None
    home: str | None = thing.__module__ if written is None else written
    return home


def is_own(module: str | None) -> bool:
    """Whether a module is the user's: a file that is none of Python's, of an installed package or of ours, or what was
    typed in or run as it is."""
    if module is None or module.partition(".")[0] == "lrpx" or module not in sys.modules:
        return False
    origin = getattr(sys.modules[module], "__file__", None)
    if origin is None:
        return module == "__main__"
    return not is_installed(Path(origin).resolve())


def is_installed(file: Path) -> bool:
    """Whether a file is one of Python's own, or of an installed package."""
    python = (Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib"))
    return bool(set(_INSTALLED) & set(file.parts)) or any(file.is_relative_to(each) for each in python)


def _told(thing: Any, seen: dict[int, int], plain: bool = True) -> Iterator[str]:
    """What tells of a thing, in an order that is the same in any process; of plain values only where they count, of
    what is not the user's a name, and of what was met before which it was."""
    if isinstance(thing, (np.generic, np.ndarray)) and not isinstance(thing, PLAIN) and thing.dtype != object:
        thing = f"{thing.dtype} {thing.shape} {hashlib.sha256(thing.tobytes()).hexdigest()}"
    elif isinstance(thing, re.Pattern):
        thing = f"{thing.pattern!r} {thing.flags}"
    elif isinstance(thing, NUMPYS):
        thing = thing.__name__
    if isinstance(thing, Enum) and not isinstance(thing.value, PLAIN):  # whose text may say where it lies in memory
        if plain:
            yield from (type(thing).__qualname__, thing.name, *_told(thing.value, seen))
        return
    if isinstance(thing, PLAIN):
        if plain:
            yield repr(thing)
        return
    if isinstance(thing, tuple):  # the same one may be two in another process
        yield from ("(", *_all(thing, seen, plain), ")")
        return
    if isinstance(thing, (set, frozenset)):
        yield from sorted("\n".join(_told(each, dict(seen), plain)) for each in thing)
        return
    if isinstance(thing, (SimpleNamespace, Namespace)):
        thing = vars(thing)
    if id(thing) in seen:
        yield f"as {seen[id(thing)]}"
        return
    yield from _of_another(thing, seen, plain)


def _of_another(thing: Any, seen: dict[int, int], plain: bool) -> Iterator[str]:
    """The same of what was not met before."""
    if isinstance(thing, NAMED) and not is_own(_home(thing)):
        yield thing.__name__
        return
    seen[id(thing)] = len(seen)
    if isinstance(thing, (list, dict)) and not is_own(type(thing).__module__):
        lines = [*_held(thing, seen, plain)]
        if lines:
            yield from ("(", *lines, ")")
        else:
            del seen[id(thing)]
    elif isinstance(thing, MethodType):
        yield from _all((thing.__func__, thing.__self__), seen, plain)
    elif isinstance(thing, FunctionType):
        yield _OWN + thing.__qualname__
        yield from _code(thing.__code__, thing.__globals__, seen)
        named = [part for pair in (thing.__kwdefaults__ or {}).items() for part in pair]
        yield from _all([*(thing.__defaults__ or ()), *named, *_cells(thing)], seen)
    elif isinstance(thing, type):
        yield _OWN + thing.__qualname__
        held = {name: each for name, each in vars(thing).items() if name[:2] != "__" or isinstance(each, CODE)}
        yield from _all([*thing.__bases__, *(part for pair in held.items() for part in pair)], seen)
    elif isinstance(thing, functools.cached_property):
        yield from _told(thing.func, seen, plain)
    elif isinstance(thing, (staticmethod, classmethod, CACHED)):
        yield from _told(thing.__wrapped__, seen, plain)
    elif isinstance(thing, property):
        yield from _all((thing.fget, thing.fset), seen, plain)
    elif isinstance(thing, functools.partial):
        named = [part for pair in thing.keywords.items() for part in pair]
        yield from _told(thing.func, seen, plain)
        yield from _all([*thing.args, *named], seen)
    elif is_own(type(thing).__module__) or (type(thing).__module__.partition(".")[0] == "lrpx" and is_dataclass(thing)):
        kind: Any = type(thing)
        stated = {each.name: getattr(thing, each.name, None) for each in fields(thing)} if is_dataclass(thing) else {}
        hidden = kept_in_running(kind, None) | (_OF_MODULES if isinstance(thing, torch.nn.Module) else frozenset())
        held = {name: each for name, each in getattr(thing, "__dict__", {}).items() if name not in hidden}
        counts = is_own(kind.__module__)  # of ours some count what they have done
        yield from _told(kind, seen)
        yield from _held(stated | held, seen, counts)
        if isinstance(thing, (list, dict)):
            yield from _held(thing, seen, counts)
    else:
        del seen[id(thing)]  # nothing is told of it, nor that it was met


def _held(thing: list[Any] | dict[Any, Any], seen: dict[int, int], plain: bool) -> Iterator[str]:
    """What tells of a list or a dictionary, without what nothing tells of, say tensors that were kept."""
    for name, each in thing.items() if isinstance(thing, dict) else ((None, each) for each in thing):
        lines = [*_told(each, seen, plain)]
        if lines:
            yield from (*(() if name is None else _told(name, seen)), *lines)


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function holds of where it was made."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing yet
            yield cell.cell_contents


def _all(things: Iterable[Any], seen: dict[int, int], plain: bool = True) -> Iterator[str]:
    for each in things:
        yield from _told(each, seen, plain)


def _code(code: CodeType, around: dict[str, Any], seen: dict[int, int]) -> Iterator[str]:
    """What runs, and what it names of the user's own, also in a module of theirs."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for each in code.co_consts:
        yield from _code(each, around, seen) if isinstance(each, CodeType) else _told(each, seen)
    for name in code.co_names:
        yield from _inside(around.get(name), code.co_names, seen, [])


def _inside(found: Any, names: tuple[str, ...], seen: dict[int, int], around: list[Any]) -> Iterator[str]:
    """What tells of a thing that code names, and of a module of the user's what it names in that, or in those in it."""
    if not isinstance(found, ModuleType):
        yield from _told(found, seen)
    elif is_own(found.__name__) and found not in around:
        for each in (name for name in names if name in vars(found)):
            yield from _inside(vars(found)[each], names, seen, [*around, found])
