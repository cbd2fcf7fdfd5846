"""A method by whatever names it: its name, a recipe, a recipe's file, a script of one's own, or the method itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrpx._scripts import from_script, is_script
from lrpx.errors import MethodError
from lrpx.methods._contract import ALIASES, METHODS, Method
from lrpx.methods._method_files import of_recipe, read
from lrpx.recipes import Recipe


def find(given: Any) -> Method:
    """The method that is meant.

    Args:
        given: a method; a name from :data:`METHODS`, or an alias; a recipe; the file of a recipe, or of a method with
            settings, as ``lrpx tune`` writes it, ``"mine.json"``; or a Python script that registers methods,
            ``"my_method.py"``, with the name behind a colon if there are several: ``"my_methods.py:mine"``. A script
            is run.

    Raises:
        MethodError: there is no such method, or the script cannot be run.
        ResultFileError: the file is no recipe.

    >>> find("cp-lrp").name, find(Recipe("plain")).name
    ('lrp', 'plain')
    """
    if isinstance(given, Method):
        return given
    if isinstance(given, Recipe):
        return of_recipe(given)
    if isinstance(given, Path):
        given = str(given)
    if not isinstance(given, str):
        listed = ", ".join(METHODS)
        raise MethodError(
            f"the method is {type(given).__name__}; pass one of {listed}, a recipe, a file of one, or a method object"
        )
    if is_script(given):
        return from_script(given, METHODS, "method", MethodError)
    if given.endswith(".json"):
        return read(given)
    return METHODS[ALIASES.get(given, given)]
