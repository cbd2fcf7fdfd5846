"""A method by whatever names it: its name, a recipe, a recipe's file, a script of one's own, or the method itself."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from lrpx.errors import MethodError
from lrpx.methods.backward import Backward
from lrpx.methods.contract import ALIASES, METHODS, Method
from lrpx.recipes import Recipe


def find(given: Any) -> Method:
    """The method that is meant.

    Args:
        given: a method; a name from :data:`METHODS`, or an alias; a recipe; the file of a recipe,
            ``"my-recipe.json"``; or a Python script that registers methods, ``"my_method.py"``, with the name behind a
            colon if there are several: ``"my_methods.py:mine"``. A script is run.

    Raises:
        MethodError: there is no such method, or the script cannot be run.
        ResultFileError: the file is no recipe.

    >>> find("cp-lrp").name, find(Recipe("plain")).name
    ('lrp', 'plain')
    """
    if isinstance(given, Method):
        return given
    if isinstance(given, Recipe):
        return Backward(given.name, given)
    if isinstance(given, Path):
        given = str(given)
    if not isinstance(given, str):
        listed = ", ".join(METHODS)
        raise MethodError(
            f"the method is {type(given).__name__}; pass one of {listed}, a recipe, a file of one, or a method object"
        )
    script, _, name = given.partition(".py:") if ".py:" in given else (given.removesuffix(".py"), "", "")
    if given.endswith(".py") or name:
        return _from_script(Path(f"{script}.py"), name)
    if given.endswith(".json"):
        return find(Recipe.load(given))
    return METHODS[ALIASES.get(given, given)]


def _from_script(path: Path, name: str) -> Method:
    """The method that a script registers."""
    module_name = f"lrpx_script_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise MethodError(f"there is no script {path}; name a Python file that registers a method")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    before = dict(METHODS)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise MethodError(f"the script {path} cannot be run ({reason}); mend it, and try again") from error
    mine = [method for known, method in METHODS.items() if method is not before.get(known)]
    chosen = [method for method in mine if not name or method.name == name]
    if len(chosen) != 1:
        names = ", ".join(method.name for method in mine) or "none"
        raise MethodError(f"the script {path} has these methods: {names}; name one of them: {path}:NAME")
    return chosen[0]
