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
    _run(path, error)
    mine = {known: thing for known, thing in registry.items() if thing is not before.get(known)}
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


def _run(path: Path, error: type[LRPxError]) -> None:
    name = f"{PREFIX}{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as wrong:
        reason = f"{type(wrong).__name__}: {wrong}"
        raise error(f"the script {path} cannot be run ({reason}); mend it, and try again") from wrong
