"""The kinds of operation that have rules, and what can be a rule of each."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS = {
    "linear": ("x", "weight", "bias"),
    "convolution": ("x", "weight", "bias"),
    "activation": ("x",),
    "product": ("gate", "signal"),
    "matmul": ("a", "b"),
    "softmax": ("x",),
    "norm": ("x",),
}
"""Each kind of operation, and what its rule is called with after the operation itself."""

KINDS = tuple(INPUTS)

PLACES = ("first", "input_projection", "output_projection")
"""What a layer may be to the model, where it has a rule of its own; without one it is as its kind."""

INPUTS |= dict.fromkeys(PLACES, ("x", "weight", "bias"))

_SUGGESTED = {
    "linear": "rules.Gamma(0.25)",
    "convolution": "rules.Gamma(0.25)",
    "activation": "rules.identity",
    "product": "rules.uniform",
    "matmul": "rules.uniform",
    "softmax": "rules.constant",
    "norm": "rules.constant",
    "first": "rules.Flat()",
    "input_projection": "rules.Epsilon()",
    "output_projection": "rules.Epsilon()",
}


def check_rule(kind: Any, rule: Any) -> None:
    """Refuse what cannot be a rule of a kind of operation.

    Raises:
        MethodError: there is no such kind, or the rule is not called as :data:`INPUTS` has it.
    """
    if kind not in INPUTS:
        raise MethodError(f"no kind of operation is called {kind!r}; the kinds are {', '.join(INPUTS)}")
    if rule is None and kind in PLACES:
        return
    if isinstance(rule, type):
        raise MethodError(f"the rule for {kind} is the class {rule.__name__}; pass one of it: {rule.__name__}(…)")
    if not callable(rule):
        raise MethodError(f"the rule for {kind} is {rule!r}; pass a rule, such as {kind}={_SUGGESTED[kind]}")
    try:
        hash(rule)
    except TypeError as error:
        raise MethodError(
            f"the rule for {kind} is {rule_name(rule)}, which cannot be hashed ({error}); "
            "make it a @dataclass(frozen=True) of numbers and texts"
        ) from None
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # of some functions in C
        return
    try:
        signature.bind(None, *INPUTS[kind])
    except TypeError as error:
        raise MethodError(
            f"the rule for {kind} is {rule_name(rule)}, which cannot be called as rule(op, {', '.join(INPUTS[kind])}) "
            f"({error}); pass another, such as {kind}={_SUGGESTED[kind]}"
        ) from None


def rule_name(rule: Callable[..., Any]) -> str:
    """How a rule is called: a function's name, or a dataclass with its parameters.

    >>> from lrpx.rules import Gamma, identity
    >>> rule_name(identity), rule_name(Gamma(0.25))
    ('identity', 'Gamma(gamma=0.25)')
    """
    bare = unwrapped(rule)
    with_address: Any = object.__repr__
    if type(bare).__repr__ is with_address:
        return type(bare).__name__
    return getattr(bare, "__name__", None) or repr(bare)


def unwrapped(rule: Any) -> Any:
    """The rule within a partial, which is of no module of its own."""
    return unwrapped(rule.func) if isinstance(rule, partial) else rule


def shown(rule: Callable[..., Any] | None) -> str:
    """A rule with all its parameters, a partial's too."""
    if rule is None:
        return "as its kind"
    if not isinstance(rule, partial):
        return rule_name(rule)
    given = [*map(repr, rule.args), *(f"{name}={value!r}" for name, value in rule.keywords.items())]
    return f"{shown(rule.func)}({', '.join(given)})"
