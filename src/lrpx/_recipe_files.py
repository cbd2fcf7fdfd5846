"""Recipes as JSON files, for people to read and change; nothing that a file names is imported or run.

A file holds what a :class:`~lrpx.recipes.Recipe` does::

    {
     "lrpx recipe": 1,
     "name": "mine",
     "rules": {"activation": "identity", "linear": {"rule": "Gamma", "gamma": 0.25}},
     "strict": true,
     "overrides": [{"path": "*.mlp", "layers": "7:", "rules": {"softmax": "constant"}}]
    }

Kinds that are left out have the rule ``unmodified``; ``strict`` is true, ``overrides`` are none and their ``path`` is
``"*"`` and their ``layers`` are all unless the file says otherwise. Layers are written as an index, a list of them, or
a slice in Python's own way, ``"7:"``.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrpx import rules
from lrpx._files import write_text
from lrpx._kinds import KINDS, PLACES, rule_name
from lrpx.errors import MethodError
from lrpx.recipes import Override, Recipe

if TYPE_CHECKING:
    from lrpx.rules import Rule

FORMAT = 1
_FORMAT_KEY = "lrpx recipe"
_LARGEST = 2**53
"""The largest whole number that every reader of JSON reads as it is."""
_SLICE = re.compile(r"([0-9]{0,18}):([0-9]{0,18})(?::([1-9][0-9]{0,17}))?")

BUILT_IN: dict[str, Any] = {
    rule.__name__: rule
    for rule in (
        rules.unmodified,
        rules.constant,
        rules.identity,
        rules.uniform,
        rules.signal_take_all,
        rules.Epsilon,
        rules.ZPlus,
        rules.Gamma,
        rules.AlphaBeta,
        rules.Flat,
        rules.WSquare,
        rules.ZBox,
        rules.Scaled,
        rules.Temperature,
        rules.uniform_bias,
        rules.AumannShapley,
    )
}
"""The rules that a file may name without more."""


# ------------------------------------------------------------------------------------ writing


def write(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe as a JSON file.

    Raises:
        MethodError: a rule or the layers cannot be written, such as a lambda.
        ResultFileError: the folder is missing or cannot be written to.
    """
    write_text(path, json.dumps(written(recipe), ensure_ascii=False, indent=1) + "\n")


def written(recipe: Recipe) -> dict[str, Any]:
    """A recipe as the JSON object of its file, which :func:`made` takes.

    Raises:
        MethodError: a rule or the layers cannot be written, such as a lambda.
    """
    return {
        _FORMAT_KEY: FORMAT,
        "name": recipe.name,
        "rules": {
            kind: _written_rule(kind, recipe.rule(kind))
            for kind in (*KINDS, *PLACES)
            if kind in KINDS or recipe.rule(kind) is not None
        },
        "strict": recipe.strict,
        "overrides": [
            {
                "path": override.path,
                "layers": _written_layers(override),
                "rules": {kind: _written_rule(kind, rule) for kind, rule in override.rules},
            }
            for override in recipe.overrides
        ],
    }


def _written_rule(kind: str, rule: Rule | None) -> str | dict[str, Any] | None:
    """A rule as JSON: its name, with its parameters where it has any; null for a place that is as its kind."""
    if rule is None:
        return None
    if inspect.isfunction(rule):
        return _name(kind, rule, rule)
    if isinstance(rule, partial):
        raise _unwritable(kind, rule, "a partial; write a function or a @dataclass(frozen=True) in its place")
    if not is_dataclass(rule):
        raise _unwritable(kind, rule, "neither a function nor a dataclass; make it a @dataclass(frozen=True)")
    name = _name(kind, rule, type(rule))
    given = {field.name: getattr(rule, field.name) for field in fields(rule) if field.init}
    for parameter, value in given.items():
        if not _is_plain(value) and not (isinstance(rule, rules.ZBox) and _is_numbers(value)):
            raise _unwritable(kind, rule, f"its {parameter} is {value!r}; pass a text or a finite number")
    return {"rule": name} | given if given else name


def _name(kind: str, rule: Rule, named: Any) -> str:
    """How a file calls a rule: its name, or ``package.module:name`` for one that is not ours."""
    module, name = named.__module__, named.__qualname__
    if BUILT_IN.get(name) is named:
        return str(name)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not named or module == "__main__":
        raise _unwritable(kind, rule, f"{name} is not found in a module; define it at the top of a file and import it")
    return f"{module}:{name}"


def _unwritable(kind: str, rule: Rule, why: str) -> MethodError:
    return MethodError(f"the rule for {kind}, {rule_name(rule)}, cannot be saved: {why}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_plain(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(map(_is_number, value))


def _written_layers(override: Override) -> str | list[int] | None:
    layers = override.layers
    if isinstance(layers, range):
        last = "" if layers.stop == sys.maxsize else str(layers.stop)
        return f"{layers.start}:{last}" + ("" if layers.step == 1 else f":{layers.step}")
    if isinstance(layers, tuple):
        return list(layers)
    if layers is None:
        return None
    raise MethodError(
        f"the layers of {override.description!r} cannot be saved, for a {type(layers).__name__} has no list of them; "
        "pass a range or a list of indices"
    )


# ------------------------------------------------------------------------------------ reading


def read(path: str | Path, own: Collection[Callable[..., Any]] = ()) -> Recipe:
    """Read a recipe from a JSON file.

    Args:
        path: of the file.
        own: the functions, and classes of rules, that the file may name as ``package.module:name``.

    Raises:
        MethodError: there is no such file, it is no recipe, or it names a rule that is neither LRPx's nor in ``own``.
    """
    if not isinstance(own, Collection) or not all(inspect.isfunction(rule) or isinstance(rule, type) for rule in own):
        raise MethodError(f"own is {own!r}; pass a list of functions and of classes of rules: own=[half, Capped]")
    known = BUILT_IN | {f"{rule.__module__}:{rule.__qualname__}": rule for rule in own}
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise MethodError(f"there is no file {path}; check the path") from error
    except (OSError, TypeError, ValueError) as error:
        raise MethodError(f"cannot read {path} ({type(error).__name__}: {error}); name another file") from error
    try:
        return _recipe(parsed(text), known)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, MethodError) else f"no JSON ({type(error).__name__}: {error})"
        raise MethodError(f"{path} is no recipe: {why}") from error


def made(found: Any) -> Recipe:
    """The recipe of a JSON object that :func:`written` gave.

    Raises:
        MethodError: it is none, or it names a rule that is not LRPx's.
    """
    return _recipe(dict(found) if isinstance(found, dict) else found, BUILT_IN)


def parsed(text: str) -> Any:
    """A text as JSON, in which no name of an object stands twice, and every number is finite.

    Raises:
        MethodError: one does, or is not.
        ValueError: it is no JSON.
    """
    return json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MethodError(f"a name stands twice in {', '.join(name for name, _ in pairs)}; leave one")
    return found


def _no_constant(name: str) -> Any:
    raise MethodError(f"{name} is no number of JSON; write a finite one")


def _recipe(found: Any, known: dict[str, Any]) -> Recipe:
    if not isinstance(found, dict) or _FORMAT_KEY not in found:
        raise MethodError(f'it has no "{_FORMAT_KEY}": {FORMAT}; save one with recipe.save(path) to see how it looks')
    version = found.pop(_FORMAT_KEY)
    if type(version) is not int or version != FORMAT:
        raise MethodError(f"it has format {version!r}, this lrpx reads format {FORMAT}; save it again")
    _only(found, "a recipe", "name", "rules", "strict", "overrides")
    if "name" not in found:
        raise MethodError('it has no "name"; add one')
    overrides = found.get("overrides", [])
    if not isinstance(overrides, list):
        raise MethodError('its "overrides" are no list; write [{"path": "*.mlp", "rules": {"softmax": "constant"}}]')
    return Recipe(
        found["name"],
        **dict[str, Any](_rules(found.get("rules", {}), known)),
        strict=found.get("strict", True),
        overrides=tuple(_override(each, known) for each in overrides),
    )


def _override(found: Any, known: dict[str, Any]) -> Override:
    _only(found, "an override", "path", "layers", "rules")
    layers = found.get("layers")
    if isinstance(layers, str):
        layers = _slice(layers)
    return Override(found.get("path", "*"), layers, tuple(_rules(found.get("rules", {}), known).items()))


def _slice(text: str) -> Any:
    match = _SLICE.fullmatch(text)
    if match is None:
        raise MethodError(f'the layers are {text!r}; write an index, a list of them, or a slice such as "7:" or "0:6"')
    return slice(*(int(end) if end else None for end in match.groups()))


def _rules(found: Any, known: dict[str, Any]) -> dict[str, Rule]:
    _only(found, "the rules", *KINDS, *PLACES)
    return {kind: _rule(kind, given, known) for kind, given in found.items()}


def _rule(kind: str, given: Any, known: dict[str, Any]) -> Rule:
    if given is None and kind in PLACES:
        return None  # type: ignore[return-value]
    parameters = dict(given) if isinstance(given, dict) else {"rule": given}
    name = parameters.pop("rule", None)
    if not isinstance(name, str):
        raise MethodError(
            f'the rule for {kind} is {_short(given)}; write its name, or {{"rule": "Gamma", "gamma": 0.25}}'
        )
    if name not in known:
        mend = f"the rules are {', '.join(BUILT_IN)}"
        if ":" in name:
            mend = f"import it, and load the file with Recipe.load(path, own=[{name.rpartition(':')[2]}])"
        raise MethodError(f"the rule for {kind} is {name!r}, which is not known; {mend}")
    rule = known[name]
    if not isinstance(rule, type):
        if parameters:
            raise MethodError(f"the rule {name} has no parameters, and {', '.join(parameters)} was given; leave it out")
        return rule  # type: ignore[no-any-return]
    if not is_dataclass(rule):
        raise MethodError(f"the rule {name} is a class that is no dataclass; make it a @dataclass(frozen=True)")
    _only(parameters, f"the rule {name}", *(field.name for field in fields(rule) if field.init))
    for parameter, value in parameters.items():
        is_bounds = rule is rules.ZBox and _is_numbers(value)
        if not is_bounds and (not _is_plain(value) or (name in BUILT_IN and not _is_number(value))):
            raise MethodError(f"{parameter} of the rule {name} is {_short(value)}; write a finite number")
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    try:
        return rule(**made)  # type: ignore[return-value]
    except TypeError as error:
        raise MethodError(f"the rule {name} cannot be made ({error}); write all its parameters") from error


def _only(found: Any, what: str, *names: str) -> None:
    """Refuse what is no JSON object, and names that it should not have."""
    if not isinstance(found, dict):
        raise MethodError(f"{what} is {_short(found)}; write an object of {', '.join(names)}")
    for name in found:
        if name not in names:
            raise MethodError(f"{what} has no {_short(name)}; it may have {', '.join(names) or 'nothing'}")


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:59]}…"
