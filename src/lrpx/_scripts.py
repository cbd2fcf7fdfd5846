"""What a user's own script registers: a method, a metric, a benchmark, by ``"my.py"`` or ``"my.py:name"``."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lrpx._defined import digest_of_code, is_installed
from lrpx._registry import BROUGHT, Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from importlib.machinery import ModuleSpec

    from lrpx.errors import LRPxError

T = TypeVar("T")

PREFIX = "lrpx_script_"
"""How the modules of scripts are called."""
_digests: dict[int, tuple[object, str]] = {}
"""By ``id``: what scripts have registered, and the classes of it that are theirs, each with the script's digest. The
thing is kept, so that no other gets its id."""
_sources: dict[str, tuple[ModuleSpec, bytes]] = {}
"""By the name of a module that scripts import: what it was loaded from, as it was when it was first seen loaded."""


def is_script(given: str) -> bool:
    """Whether a script is meant, with a name in it or without.

    >>> is_script("my.py"), is_script("my.py:mine"), is_script("attnlrp")
    (True, True, False)
    """
    return given.endswith(".py") or ".py:" in given


def from_script(given: str, registry: Mapping[str, T], kind: str, error: type[LRPxError]) -> T:
    """What a script registers, or a module of the user's that it imports; the script is run.

    Args:
        given: the script, with the name behind a colon if it registers several of the kind.
        registry: where it is registered.
        kind: what it is, for messages: ``"metric"``.
        error: what is raised.

    Raises:
        LRPxError: the script is not there or cannot be run, or it registers none of the name.
    """
    place, _, name = given.partition(".py:") if ".py:" in given else (given.removesuffix(".py"), "", "")
    path = Path(f"{place}.py")
    if not path.is_file():
        raise error(f"there is no script {path}; name a Python file that registers a {kind}")
    before = dict(registry)
    module, source = _run(path, error)
    imported = _imported(source, "", path.parent.resolve(), _is_own)
    files = {getattr(sys.modules.get(name), "__file__", None) for name in imported}
    origins = registry.origins if isinstance(registry, Registry) else {}  # what is imported already registers nothing
    mine = {
        known: thing
        for known, thing in registry.items()
        if thing is not before.get(known) or origins.get(known, "") in files
    }
    digest = _digest(source, imported)
    for thing in mine.values():
        _digests[id(thing)] = thing, digest
        if type(thing).__module__ in {module, *imported}:
            _digests[id(type(thing))] = type(thing), digest
    chosen = [known for known in mine if not name or known == name]
    if len(chosen) != 1:
        raise error(f"the script {path} has these {kind}s: {', '.join(mine) or 'none'}; name one of them: {path}:NAME")
    return mine[chosen[0]]


def script_of(kind: type) -> str | None:
    """The script that a class was defined in, if :func:`from_script` ran it."""
    if not kind.__module__.startswith(PREFIX):
        return None
    found: str | None = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return found


def is_of_script(thing: object) -> bool:
    """Whether a script has registered a thing, or its class."""
    return id(thing) in _digests or id(type(thing)) in _digests


def digest_of(thing: object) -> str | None:
    """The SHA-256 of the script that has registered a thing, or its class, and of the user's own modules that it
    imports, those beside it and below its folder, all as they were when they ran; of what a package has brought by an
    entry point, of that module and of those of the package that it imports; of what the session has defined, of its
    code. None of what is ours."""
    return _registered(thing) or digest_of_code(thing)


def _registered(thing: object) -> str | None:
    """The same, of what a script or a package has registered."""
    found = _digests.get(id(thing)) or _digests.get(id(type(thing)))
    if found is not None:
        return found[1]
    brought = BROUGHT.get(id(thing)) or BROUGHT.get(id(type(thing)))
    return None if brought is None else _digest_of_package(brought[1])


@cache
def _digest_of_package(name: str) -> str | None:
    """Of a module, and of those of its package that it imports, when it is first asked for."""
    spec = _spec(name)
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return None
    path = Path(str(spec.origin))
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    top, source = name.partition(".")[0], path.read_bytes()
    return _digest(source, _imported(source, package, path.parent, lambda each, _: each.name.partition(".")[0] == top))


def settings_of(kind: str, things: Mapping[str, object]) -> dict[str, str]:
    """What a run is known by beside what its things say of themselves: the digests of their scripts, or of their code.

    Args:
        kind: what they are: ``"metric"``.
        things: by name.

    >>> settings_of("metric", {"RMA": object()})
    {}
    """
    found: dict[str, str] = {}
    for name, thing in things.items():
        told, digest = "script", _registered(thing)
        if digest is None:
            told, digest = "code", digest_of_code(thing)
        if digest is not None:
            found[f"{told} of the {kind} {name}"] = digest
    return found


def _run(path: Path, error: type[LRPxError]) -> tuple[str, bytes]:
    """Run a script; the name of its module, and what ran."""
    name = f"{PREFIX}{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        source = path.read_bytes()  # not by the loader, which may have compiled code of before
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as wrong:
        reason = f"{type(wrong).__name__}: {wrong}"
        raise error(f"the script {path} cannot be run ({reason}); mend it, and try again") from wrong
    return name, source


def _digest(source: bytes, imported: Mapping[str, bytes]) -> str:
    """Of a script, and of the modules that it imports, by their names."""
    found = hashlib.sha256(source)
    for name in sorted(imported):
        found.update(f"\n{name} {hashlib.sha256(imported[name]).hexdigest()}".encode())
    return found.hexdigest()


def _imported(
    source: bytes, package: str, folder: Path, is_own: Callable[[ModuleSpec, Path], bool]
) -> dict[str, bytes]:
    """The source of each of the user's own modules that a module imports, or that one of these does, anywhere in it;
    what is imported by a name that is computed is not seen.

    Args:
        source: the module's.
        package: what it is in; nothing for a script.
        folder: where it lies.
        is_own: whether a module, in view of that folder, is the user's.
    """
    found: dict[str, bytes] = {}
    left = list(_names(source, package))
    while left:
        name = left.pop()
        spec = None if name in found else _spec(name)
        if spec is None or not spec.has_location or not is_own(spec, folder):
            continue
        held = _sources.get(name)
        if held is None or held[0] is not spec:  # one that was loaded again has another
            held = spec, Path(str(spec.origin)).read_bytes()
        if name in sys.modules:
            _sources[name] = held
        found[name] = held[1]
        if str(spec.origin).endswith(".py"):
            left += _names(held[1], name if spec.submodule_search_locations is not None else name.rpartition(".")[0])
    return found


def _names(source: bytes, package: str) -> Iterator[str]:
    """The modules that a source in a package imports, each after the packages that it is in; and what else it takes
    from them, which may be modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # of a file that is never run, or whose error is the script's own affair
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package.split(".")):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            whole = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{whole}.{each.name}" for each in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _spec(name: str) -> ModuleSpec | None:
    """Of a module that is loaded, or where it would be found; nothing is loaded for that."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent = name.rpartition(".")[0]
    within = getattr(_spec(parent), "submodule_search_locations", None) if parent else None
    return None if parent and within is None else PathFinder.find_spec(name, within)


def _is_own(spec: ModuleSpec, folder: Path) -> bool:
    """Whether a module's file is below a folder, and none of Python's, of an installed package or of ours."""
    if spec.name.partition(".")[0] == "lrpx":
        return False
    file = Path(str(spec.origin)).resolve()
    return file.is_file() and file.is_relative_to(folder) and not is_installed(file)
