"""What a user's own script registers: a method, a metric, a benchmark, by ``"my.py"`` or ``"my.py:name"``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lrpx.errors import LRPxError

T = TypeVar("T")

PREFIX = "lrpx_script_"
"""How the modules of scripts are called."""
_digests: dict[int, tuple[object, str]] = {}
"""By ``id``: what scripts have registered, and the classes of it that are theirs, each with the script's digest. The
thing is kept, so that no other gets its id."""


def is_script(given: str) -> bool:
    """Whether a script is meant, with a name in it or without.

    >>> is_script("my.py"), is_script("my.py:mine"), is_script("attnlrp")
    (True, True, False)
    """
    return given.endswith(".py") or ".py:" in given


def from_script(given: str, registry: Mapping[str, T], kind: str, error: type[LRPxError]) -> T:
    """What a script registers; the script is run.

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
    module, digest = _run(path, error)
    mine = {known: thing for known, thing in registry.items() if thing is not before.get(known)}
    for thing in mine.values():
        _digests[id(thing)] = thing, digest
        if type(thing).__module__ == module:
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


def digest_of(thing: object) -> str | None:
    """The SHA-256 of the script that has registered a thing, or its class, as the script was when it ran. None of what
    is ours, a package's, or was defined in the session or in a module that was imported."""
    found = _digests.get(id(thing)) or _digests.get(id(type(thing)))
    return None if found is None else found[1]


def settings_of(kind: str, things: Mapping[str, object]) -> dict[str, str]:
    """What a run is known by beside what its things say of themselves: the digests of their scripts.

    Args:
        kind: what they are: ``"metric"``.
        things: by name.

    >>> settings_of("metric", {"RMA": object()})
    {}
    """
    digests = {name: digest_of(thing) for name, thing in things.items()}
    return {f"script of the {kind} {name}": digest for name, digest in digests.items() if digest is not None}


def _run(path: Path, error: type[LRPxError]) -> tuple[str, str]:
    """Run a script; the name of its module, and the digest of what ran."""
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
    return name, hashlib.sha256(source).hexdigest()
