"""What a session has defined: a digest of the code of a user's own functions and classes, such as a metric's, which no
script and no package has registered.

It is of the code as it was compiled, with what that names of the user's own, so that neither a comment nor where it
stands counts. Containers that can change, objects of other packages and files that are read are not looked at.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from lrpx._modules import named_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, type(...))
CODE = (FunctionType, staticmethod, classmethod, property)
CACHED = type(functools.cache(len))
_INSTALLED = ("site-packages", "dist-packages")


def digest_of_code(thing: object) -> str | None:
    """The SHA-256 of a thing's code, as far as it is the user's own; None where none of it is.

    >>> digest_of_code(len), digest_of_code(Path)
    (None, None)
    """
    told = [*_told(thing, set(), plain=False)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest() if told else None


def digest_of_model(model: Module) -> str | None:
    """The same of a model: of the classes of its modules, and of the numbers and names that these hold, as of a scale,
    which are no weights."""
    seen: set[int] = set()
    told: list[str] = []
    for path, module in named_modules(model):
        if is_own(type(module).__module__):
            told += [path, *_told(type(module), seen)]
            held = {name: each for name, each in vars(module).items() if isinstance(each, PLAIN)}
            told += [f"{name} {held[name]!r}" for name in sorted(held) if name[:1] != "_" and name != "training"]
    return hashlib.sha256("\n".join(told).encode()).hexdigest() if told else None


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


def _told(thing: Any, seen: set[int], plain: bool = True) -> Iterator[str]:
    """What tells of a thing, in an order that is the same in any process; of plain values only where they count."""
    if isinstance(thing, PLAIN):
        if plain:
            yield repr(thing)
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, MethodType):
        yield from _all((thing.__func__, thing.__self__), seen, plain)
    elif isinstance(thing, FunctionType):
        if is_own(thing.__module__):
            yield thing.__qualname__
            yield from _code(thing.__code__, thing.__globals__, seen)
            named = [part for pair in (thing.__kwdefaults__ or {}).items() for part in pair]
            yield from _all([*(thing.__defaults__ or ()), *named, *_cells(thing)], seen)
    elif isinstance(thing, type):
        if is_own(thing.__module__):
            yield thing.__qualname__
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
        yield from _all([thing.func, *thing.args, *named], seen, plain)
    elif isinstance(thing, tuple):
        yield from _all(thing, seen, plain)
    elif isinstance(thing, frozenset):
        yield from sorted("\n".join(_told(each, seen, plain)) for each in thing)
    elif is_own(type(thing).__module__) or (type(thing).__module__.partition(".")[0] == "lrpx" and is_dataclass(thing)):
        counts = is_dataclass(thing) and is_own(type(thing).__module__)  # others may count what they have done
        yield from _told(type(thing), seen)
        yield from _all([part for pair in getattr(thing, "__dict__", {}).items() for part in pair], seen, counts)


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function holds of where it was made."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing yet
            yield cell.cell_contents


def _all(things: Iterable[Any], seen: set[int], plain: bool = True) -> Iterator[str]:
    for each in things:
        yield from _told(each, seen, plain)


def _code(code: CodeType, around: dict[str, Any], seen: set[int]) -> Iterator[str]:
    """What runs, and what it names of the user's own, also in a module of theirs."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for each in code.co_consts:
        yield from _code(each, around, seen) if isinstance(each, CodeType) else _told(each, seen)
    for name in code.co_names:
        found = around.get(name)
        if isinstance(found, ModuleType):
            inside = vars(found) if is_own(found.__name__) else {}
            yield from _all([inside[each] for each in code.co_names if each in inside], seen)
        else:
            yield from _told(found, seen)
