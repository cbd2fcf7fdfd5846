"""Methods with settings of one's own as JSON files, for ``--method file.json``; nothing that a file names is imported.

A file holds the name of a registered method and its fields; what is left out is as the method has it::

    {"lrpx method": 1, "method": "smoothgrad", "name": "smoothgrad sigma=0.1", "settings": {"sigma": 0.1}}

A setting that is a recipe is the object of the recipe's file. A method that is a recipe, and no more, is written as the
recipe's file. What has the name of a method of :data:`METHODS` and is another has a word behind it, as of recipes.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from lrpx import _recipe_files
from lrpx._files import write_text
from lrpx._scripts import is_of_script
from lrpx.errors import MethodError
from lrpx.methods._backward import Backward, value_times_gradient
from lrpx.methods._contract import METHODS, Method
from lrpx.recipes import Recipe

FORMAT: Final = 1
_FORMAT_KEY: Final = "lrpx method"
_OF_NAMES: Final = ("name", "label")


def write(method: Method, path: str | Path) -> None:
    """Write a method as a JSON file, which :func:`read` reads.

    Raises:
        MethodError: its class is registered by no name, or is of a script, which no file names; or a field is no text,
            number or recipe.
        ResultFileError: the folder is missing or cannot be written to.
    """
    if type(method) is Backward and method.reduce is value_times_gradient:
        method.recipe.save(path)
        return
    base = next((each for each in METHODS.values() if type(each) is type(method)), None)
    if base is None or not is_dataclass(method) or type(method) is Backward:
        raise MethodError(f"{method.name} cannot be saved: it is no registered method with fields; pass a script of it")
    settings = {}
    for name in (each.name for each in fields(method) if each.init and each.name not in _OF_NAMES):
        value = getattr(method, name)
        if isinstance(value, Recipe):
            settings[name] = _recipe_files.written(value)
        elif _is_plain(value):
            settings[name] = value
        elif value != getattr(base, name):
            raise MethodError(f"{method.name} cannot be saved: its {name} is {value!r}; pass a text or a number")
    if is_of_script(type(method)):
        told = ", ".join(f"{name}={value!r}" for name, value in settings.items() if _is_plain(value))
        raise MethodError(
            f"{method.name} cannot be saved: it is of a script, and nothing that a file names is run; register it in "
            f"the script, with {told or 'a name of its own'}"
        )
    plain = {_FORMAT_KEY: FORMAT, "method": base.name, "name": method.name, "settings": settings}
    write_text(path, json.dumps(plain, ensure_ascii=False, indent=1) + "\n")


def read(path: str) -> Method:
    """The method of a file: a recipe's, or one that :func:`write` wrote.

    Raises:
        MethodError: there is no such file, or it is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or _FORMAT_KEY not in found:
        return of_recipe(Recipe.load(path))  # which says what is wrong with it
    try:
        return _method(_recipe_files.parsed(text))
    except MethodError as error:
        raise MethodError(f"{path} is no method: {error}") from error


def of_recipe(recipe: Recipe) -> Method:
    """The method of a recipe. One that has the name of a method of :data:`METHODS`, and is not all of it, has a word
    behind its name: it was saved and changed, say, or the method counts more than the recipe does, as ``pa-lrp``.

    >>> of_recipe(Recipe("attnlrp")).name, of_recipe(Recipe("plain")).name
    ('attnlrp, changed', 'plain')
    """
    known = METHODS.get(recipe.name)
    if known is None or known.describe() == recipe.describe():
        return Backward(recipe.name, recipe)
    is_part = getattr(known, "recipe", None) == recipe
    return Backward(f"{recipe.name}, {'recipe alone' if is_part else 'changed'}", recipe)


def settings_of(method: Method) -> tuple[str, ...]:
    """The fields of a method that are texts or numbers, but for its names."""
    if not is_dataclass(method):
        return ()
    names = [each.name for each in fields(method) if each.init and each.name not in _OF_NAMES]
    return tuple(name for name in names if _is_plain(getattr(method, name)))


def with_settings(method: Method, name: str, settings: dict[str, Any]) -> Method:
    """The same method by another name, with some fields set.

    Raises:
        MethodError: it has no such field, or the value is of another kind.

    >>> from lrpx import METHODS
    >>> with_settings(METHODS["integrated-gradients"], "integrated-gradients-20", {"steps": 20}).label
    'Integrated Gradients 20'
    """
    known = settings_of(method)
    for each, value in settings.items():
        if each not in known:
            raise MethodError(f"{method.name} has no setting {each!r}; it has {', '.join(known) or 'none'}")
        own = getattr(method, each)
        if own is not None and _kind(own) != _kind(value):
            raise MethodError(f"the {each} of {method.name} is {value!r}; pass {_kind(own)}")
    of_its_own = name.removeprefix(method.name).strip(" -_,")
    label = method.label and f"{method.label} {of_its_own}".rstrip()
    made: Method = replace(method, name=name, label=label, **settings)  # type: ignore[type-var]
    return made


def _method(found: dict[str, Any]) -> Method:
    version = found.get(_FORMAT_KEY)
    if type(version) is not int or version != FORMAT:
        raise MethodError(f"it has format {version!r}, this lrpx reads format {FORMAT}; save it again")
    wrong = next((name for name in found if name not in (_FORMAT_KEY, "method", "name", "settings")), None)
    if wrong is not None:
        raise MethodError(f"it has no {wrong!r}; it may have method, name and settings")
    given, settings = found.get("method"), found.get("settings", {})
    if not isinstance(given, str) or given not in METHODS:
        raise MethodError(f"there is no method {given!r}; the methods are {', '.join(METHODS)}")
    name = found.get("name", given)
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise MethodError(f"its name is {name!r}; write a text")
    if not isinstance(settings, dict):
        raise MethodError(f"its settings are {settings!r}; write an object of them")
    method = METHODS[given]
    own = {each: _recipe_files.made(settings[each]) for each in settings if _is_recipe(method, each, settings)}
    plain = {each: value for each, value in settings.items() if each not in own}
    if any(isinstance(value, dict | list) for value in plain.values()):
        raise MethodError("a setting is a list or an object; write a text or a number")

    def made(called: str) -> Method:
        return replace(with_settings(method, called, plain), **own)  # type: ignore[type-var]

    is_another = name in METHODS and not _is_same(METHODS[name], made(name))
    return made(f"{name}, changed" if is_another else name)


def _is_same(one: Method, other: Method) -> bool:
    """Whether two methods compute the same, whatever they are called and however much of it at a time."""
    if type(one) is not type(other):
        return False
    names = {each.name for each in fields(one)} - {*_OF_NAMES, "batch_size"}  # type: ignore[arg-type]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _is_recipe(method: Method, name: str, settings: dict[str, Any]) -> bool:
    """Whether a setting is the object of a recipe, for a field of the method that is one."""
    return isinstance(settings[name], dict) and isinstance(getattr(method, name, None), Recipe)


def _kind(value: Any) -> str:
    """What a setting is, in words."""
    kinds = {bool: "true or false", str: "a text", int: "a number", float: "a number"}
    return kinds.get(type(value), "something else")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
