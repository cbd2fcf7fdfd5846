"""Recipes: which rule each kind of operation gets. Data, not classes.

>>> from lrpx.rules import Gamma
>>> ATTNLRP.at(layers=range(7, 100), use=LRP).name
'attnlrp, layers 7-99: lrp'
>>> ATTNLRP.at("*.mlp", linear=Gamma(0.25)).name
'attnlrp, *.mlp: linear=Gamma(gamma=0.25)'
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from lrpx import kernels, rules
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Container

    from lrpx.rules import Rule

KINDS = ("linear", "convolution", "activation", "product", "matmul", "softmax", "norm")

QUANTISED_LINEARS = frozenset({"bitsandbytes.autograd._functions"})
"""Modules of autograd functions that are linear layers, with the gradient of the weights they stand for."""


@dataclass(frozen=True)
class Override:
    """Other rules for the modules whose path matches ``path`` and whose layer index is in ``layers``."""

    path: str
    layers: Container[int] | None
    rules: tuple[tuple[str, Rule], ...]
    description: str

    def covers(self, path: str, layer: int | None) -> bool:
        """Whether the override begins at the module at ``path``, in the layer of that index."""
        if self.layers is not None and (layer is None or layer not in self.layers):
            return False
        return fnmatchcase(path, self.path)


@dataclass(frozen=True)
class Recipe:
    """A rule for each kind of operation.

    Args:
        name: how results call it.
        linear: matrix products with weights.
        convolution: convolutions.
        activation: element-wise non-linearities.
        product: element-wise products of two tensors that both depend on the input.
        matmul: matrix products of two tensors that both depend on the input.
        softmax: softmax.
        norm: the standard deviation (or root mean square, or length) that a norm divides by.
        strict: refuse an operation that is neither known to be linear nor has a rule.
        overrides: other rules for some modules; made by :meth:`at`.
    """

    name: str
    linear: Rule = rules.unmodified
    convolution: Rule = rules.unmodified
    activation: Rule = rules.unmodified
    product: Rule = rules.unmodified
    matmul: Rule = rules.unmodified
    softmax: Rule = rules.unmodified
    norm: Rule = rules.unmodified
    strict: bool = True
    overrides: tuple[Override, ...] = field(default=())

    def at(
        self,
        path: str = "*",
        *,
        layers: Container[int] | slice | int | None = None,
        use: Recipe | None = None,
        **kinds: Rule,
    ) -> Recipe:
        """The same recipe with other rules in some modules and all they contain.

        Args:
            path: shell pattern on the module's path, ``"model.layers.3.mlp"`` or ``"*.mlp"``.
            layers: only in the layers of these indices: an int, a range, a slice or any container.
            use: take every rule from this recipe.
            kinds: rules by kind of operation: ``linear=Gamma(0.25)``.

        Raises:
            MethodError: an unknown kind of operation, or nothing to change.
        """
        unknown = set(kinds) - set(KINDS)
        if unknown:
            raise MethodError(f"no kind of operation is called {unknown.pop()!r}; the kinds are {', '.join(KINDS)}")
        if use is None and not kinds:
            raise MethodError("nothing to change: pass use=RECIPE or a rule by kind, such as softmax=rules.constant")
        ends = (layers.start, layers.stop) if isinstance(layers, slice) else (layers,)
        if any(isinstance(end, int) and end < 0 for end in ends):
            raise MethodError("a recipe does not know how many layers a model has; count layers from 0 upwards")
        if isinstance(layers, slice):
            layers = range(layers.start or 0, sys.maxsize if layers.stop is None else layers.stop, layers.step or 1)
        elif isinstance(layers, int):
            layers = (layers,)
        taken = {} if use is None else {kind: getattr(use, kind) for kind in KINDS}
        what = ", ".join(([use.name] if use else []) + [f"{kind}={rule_name(rule)}" for kind, rule in kinds.items()])
        where = [] if path == "*" else [path]
        where += [] if layers is None else [_layers_name(layers)]
        override = Override(path, layers, tuple((taken | kinds).items()), f"{' '.join(where) or '*'}: {what}")
        return replace(
            self,
            name=f"{self.name}, {override.description}",
            overrides=(*self.overrides, override),
        )

    def rule_modules(self) -> frozenset[str]:
        """The Python modules whose autograd functions are rules: where the recipe's rules come from, and packages of
        quantised linears where these need no rule."""
        mine = [rule for kind in KINDS for rule in self._rules(kind)]
        quantised = QUANTISED_LINEARS if all(r is rules.unmodified for r in self._rules("linear")) else frozenset()
        return frozenset({rules.__name__, kernels.__name__} | {rule.__module__ for rule in mine}) | quantised

    def has_gates(self) -> bool:
        """Whether a product's relevance may go to the signal alone, so that the gate must be known."""
        return any(rule is rules.signal_take_all for rule in self._rules("product"))

    def has_rules_for_linear(self) -> bool:
        """Whether a linear layer has another rule than its plain gradient, so that its weight must be known."""
        return any(rule is not rules.unmodified for rule in self._rules("linear"))

    def _rules(self, kind: str) -> list[Rule]:
        """The rules of one kind of operation, the overrides' too."""
        return [getattr(self, kind), *(rule for o in self.overrides for each, rule in o.rules if each == kind)]

    def has_rules(self) -> bool:
        """Whether any kind of operation has another rule than its plain gradient."""
        return bool(self.overrides) or any(getattr(self, kind) is not rules.unmodified for kind in KINDS)

    def with_rules(self, changed: tuple[tuple[str, Rule], ...]) -> Recipe:
        """The same recipe with some rules exchanged everywhere."""
        return replace(self, **dict[str, Any](changed))

    def __str__(self) -> str:
        rows = [f"{kind}={rule_name(getattr(self, kind))}" for kind in KINDS]
        return "; ".join([" ".join(rows)] + [override.description for override in self.overrides])


def rule_name(rule: Rule) -> str:
    """How a rule is called: a function's name, or a dataclass with its parameters."""
    rule = rule.func if isinstance(rule, partial) else rule
    return getattr(rule, "__name__", None) or repr(rule)


def _layers_name(layers: Container[int]) -> str:
    if isinstance(layers, range) and layers.step == 1:
        return f"layers {layers.start}-" + ("" if layers.stop == sys.maxsize else str(layers.stop - 1))
    return f"layers {layers}"


GRADIENT = Recipe("gradient", strict=False)
"""No rule at all: the plain gradient."""

LRP = Recipe(
    "lrp",
    activation=rules.identity,
    product=rules.signal_take_all,
    matmul=rules.uniform,
    softmax=rules.constant,
    norm=rules.constant,
)
"""LRP for transformers with attention weights as constants, also called CP-LRP (Ali et al. 2022; Arras 2025)."""

ATTNLRP = Recipe(
    "attnlrp",
    activation=rules.identity,
    product=rules.uniform,
    matmul=rules.uniform,
    softmax=rules.unmodified,
    norm=rules.constant,
)
"""AttnLRP (Achtibat et al. 2024): relevance also flows to queries and keys."""

ALTI_LOGIT = LRP.at(
    layers=slice(0, None),
    linear=rules.constant,
    activation=rules.constant,
    product=rules.constant,
    matmul=rules.constant,
)
"""Nothing but the residual stream: what the branches of the layers add to it are constants; the norms on it and the
head after it have LRP's rules. The recipe of ALTI-Logit (Ferrando et al. 2023; Arras 2025, §2.1)."""
