"""Recipes: which rule each kind of operation gets. Data, not classes.

>>> from lrpx.rules import Gamma
>>> ATTNLRP.at(layers=range(7, 100), use=LRP).name
'attnlrp, layers 7-99: lrp'
>>> print(ATTNLRP.at("*.mlp", linear=Gamma(0.25)))
attnlrp, *.mlp: linear=Gamma(gamma=0.25)
the rules of AttnLRP (Achtibat et al. 2024), and others in some modules
  linear       unmodified
  convolution  unmodified
  activation   identity
  product      uniform
  matmul       uniform
  softmax      unmodified
  norm         constant
  position     signal_take_all
  *.mlp        linear=Gamma(gamma=0.25)
an operation without a rule is refused
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from lrpx import _kernels, rules
from lrpx._kinds import KINDS, PLACES, check_rule, shown, unwrapped
from lrpx.errors import MethodError
from lrpx.targets import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lrpx.rules import Rule

__all__ = [
    "ALTI_LOGIT",
    "ATTNLRP",
    "ATTNLRP_VIT",
    "GIM",
    "GRADIENT",
    "LIBRAGRAD",
    "LRP",
    "LRP_CHEFER",
    "LRP_DING",
    "LRP_VIT",
    "LRP_VOITA",
    "PA_LRP",
    "RELP",
    "Override",
    "Recipe",
]

QUANTISED_LINEARS = frozenset({"bitsandbytes.autograd._functions"})
"""Modules of autograd functions that are linear layers, with the gradient of the weights they stand for."""
OWN_ACTIVATIONS = frozenset({"transformers.models.bloom.modeling_bloom"})
"""Modules of autograd functions that are activations, with the derivative of what they compute."""


@dataclass(frozen=True)
class Override:
    """Other rules for the modules whose path matches ``path`` and whose layer index is in ``layers``.

    Args:
        path: shell pattern on the module's path.
        layers: only in the layers of these indices; None for all. Kept as an ascending range or tuple, where it can be
            listed.
        rules: pairs of a kind of operation and its rule; kept in the order of :data:`lrpx._kinds.KINDS`.

    Raises:
        MethodError: a path, layers, a kind or a rule that is none.
    """

    path: str
    layers: Container[int] | None
    rules: tuple[tuple[str, Rule], ...]

    def __post_init__(self) -> None:
        _check_name(self.path, "the path of an override", "'*.mlp'")
        try:
            chosen = dict(self.rules)
        except (TypeError, ValueError) as error:
            raise MethodError(f"the rules of an override are {self.rules!r}; make them by .at(path, …)") from error
        for kind, rule in chosen.items():
            check_rule(kind, rule)
        if not chosen:
            raise MethodError("nothing to change: pass use=RECIPE or a rule by kind, such as softmax=rules.constant")
        order = (*KINDS, *PLACES)
        object.__setattr__(self, "rules", tuple((kind, chosen[kind]) for kind in order if kind in chosen))
        object.__setattr__(self, "layers", _listed(self.layers))

    @property
    def where(self) -> str:
        """The modules, ``"*.mlp layers 0-1"``."""
        where = [] if self.path == "*" else [self.path]
        return " ".join(where + ([] if self.layers is None else [_layers_name(self.layers)])) or "*"

    @property
    def what(self) -> str:
        """The rules; of all kinds, by the named recipe that is nearest: ``"lrp, linear=Gamma(gamma=0.25)"``."""
        chosen = dict(self.rules)
        if not chosen.keys() >= set(KINDS):
            return ", ".join(_given(kind, rule) for kind, rule in self.rules)
        near = min(_NAMED, key=lambda recipe: sum(recipe.rule(kind) != chosen[kind] for kind in KINDS))
        others = [_given(kind, rule) for kind, rule in self.rules if rule != near.rule(kind)]
        return ", ".join([near.name, *others])

    @property
    def description(self) -> str:
        """Both: ``"*.mlp layers 0-1: norm=unmodified"``."""
        return f"{self.where}: {self.what}"

    def covers(self, path: str, layer: int | None) -> bool:
        """Whether the override begins at the module at ``path``, in the layer of that index."""
        if self.layers is not None and (layer is None or layer not in self.layers):
            return False
        return fnmatchcase(path, self.path)


@dataclass(frozen=True, repr=False)
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
        position: element-wise products with what is computed from the numbers of the places alone, as rotary angles
            are; by default the signal takes all, and positions are constants.
        strict: refuse an operation that is neither known to be linear nor has a rule.
        overrides: other rules for some modules; made by :meth:`at`.
        first: the layer, linear or a convolution, whose input is the model's own, such as pixels.
        input_projection: linear layers whose outputs are the queries, keys or values of attention.
        output_projection: linear layers whose input is what attention gives. Without a rule, None, these three are as
            ``linear`` or ``convolution``.

    Raises:
        MethodError: a rule that cannot be called as :data:`lrpx._kinds.INPUTS` has it, or another field that is none.
    """

    name: str
    linear: Rule = rules.unmodified
    convolution: Rule = rules.unmodified
    activation: Rule = rules.unmodified
    product: Rule = rules.unmodified
    matmul: Rule = rules.unmodified
    softmax: Rule = rules.unmodified
    norm: Rule = rules.unmodified
    position: Rule = rules.signal_take_all
    strict: bool = True
    overrides: tuple[Override, ...] = ()
    first: Rule | None = None
    input_projection: Rule | None = None
    output_projection: Rule | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "the name of a recipe", "'my-recipe'")
        for kind in (*KINDS, *PLACES):
            check_rule(kind, self.rule(kind))
        if not isinstance(self.strict, bool):
            raise MethodError(f"strict is {self.strict!r}; pass True or False")
        if not isinstance(self.overrides, tuple) or not all(isinstance(each, Override) for each in self.overrides):
            raise MethodError("the overrides are no tuple of them; make them by .at(path, softmax=rules.constant)")

    def rule(self, kind: str) -> Rule:
        """The rule of a kind of operation, where no override covers it; None for a place without one."""
        return getattr(self, kind)  # type: ignore[no-any-return]

    def has_places(self) -> bool:
        """Whether layers have other rules by what they are to the model, where no override covers them."""
        return not (self.first is self.input_projection is self.output_projection is None)

    def has_places_anywhere(self) -> bool:
        """The same, and where an override covers them."""
        return any(self._rules(place) for place in PLACES)

    def _places(self, other: Recipe | None = None) -> tuple[str, ...]:
        """The places that this recipe has rules for; with another, which shall hold instead, those that it or an
        override of this one has some for, too."""
        if other is None:
            return tuple(place for place in PLACES if self.rule(place) is not None)
        return tuple(place for place in PLACES if self._rules(place) or other.rule(place) is not None)

    def at(
        self,
        path: str = "*",
        *,
        layers: Container[int] | slice | int | None = None,
        use: Recipe | None = None,
        **kinds: Rule,
    ) -> Recipe:
        """The same recipe with other rules in some modules and all they contain.

        A module has the same rules wherever it stands and whenever it runs. Where one runs as several layers, layers
        that are some of these are refused when the model runs. A rule holds while a module is called: what the model's
        ``forward`` computes between the modules of a layer that is only a ``ModuleDict`` is no part of that layer.

        A rule for a projection, or for the first layer, holds there in the place of the one for ``linear``. Where such
        a rule would hide the ``linear`` that is given for modules by their path, that is refused when the model runs;
        ``input_projection=None`` beside it takes the rule for projections away.

        Args:
            path: shell pattern on the module's path, ``"model.layers.3.mlp"`` or ``"*.mlp"``.
            layers: only in the layers of these indices: an int, a range, a slice or any container. A model that has not
                all that are named one by one is refused; a range or a slice may go beyond its last.
            use: take every rule from this recipe, which has one for each kind of operation and no overrides.
            kinds: rules by kind of operation: ``linear=Gamma(0.25)``.

        Raises:
            MethodError: an unknown kind of operation, a rule, layers or a path that is none, a recipe with overrides,
                or nothing to change.
        """
        if use is not None and not isinstance(use, Recipe):
            raise MethodError(f"use is {type(use).__name__}; pass a recipe, such as lrpx.LRP")
        if use is not None and use.overrides:
            raise MethodError(
                f"use is {use.name!r}, which has other rules in some modules ({use.overrides[0].where}), and only its "
                "rules for all modules would be taken; pass the recipe that it was made of, and write the others after "
                "it: .at(path, use=lrpx.LRP).at('*.mlp', linear=rules.Gamma(0.25))"
            )
        taken = {} if use is None else {kind: use.rule(kind) for kind in (*KINDS, *self._places(use))}
        override = Override(path, layers, tuple((taken | kinds).items()))  # type: ignore[arg-type]
        return replace(self, name=f"{self.name}, {override.description}", overrides=(*self.overrides, override))

    def save(self, path: str | Path) -> None:
        """Write the recipe as a JSON file, which :meth:`load` reads and an editor can change.

        A rule of your own is written as its name, ``"package.module:name"``: a function, or a frozen dataclass whose
        parameters are numbers or texts.

        Raises:
            MethodError: a rule or the layers cannot be written, such as a lambda.
            ResultFileError: the folder is missing or cannot be written to.
        """
        from lrpx._recipe_files import write

        write(self, path)

    @classmethod
    def load(cls, path: str | Path, own: Collection[Callable[..., Any]] = ()) -> Recipe:
        """Read a recipe from a JSON file. Nothing that the file names is imported or run.

        Args:
            path: of the file.
            own: the rules of your own that the file may name: functions, and classes of rules.

        Raises:
            MethodError: there is no such file, it is no recipe, or it names a rule that is neither LRPx's nor in
                ``own``.
        """
        from lrpx._recipe_files import read

        return read(path, own)

    def rule_modules(self) -> frozenset[str]:
        """The Python modules whose autograd functions are rules: where the recipe's rules come from, and those of
        quantised linears and of activations where these need no rule."""
        mine = [rule for kind in (*KINDS, *PLACES) for rule in self._rules(kind)]
        quantised = QUANTISED_LINEARS if all(r is rules.unmodified for r in self._rules("linear")) else frozenset()
        activations = self._rules("activation")
        plain = OWN_ACTIVATIONS if all(rule is rules.unmodified for rule in activations) else frozenset()
        ours = {rules.__name__, _kernels.__name__}
        return frozenset(ours | {unwrapped(rule).__module__ for rule in mine}) | quantised | plain

    def has_gates(self) -> bool:
        """Whether a product's relevance may go to the signal alone, so that the gate must be known."""
        return any(rule is rules.signal_take_all for rule in self._rules("product"))

    def has_rules_for_linear(self) -> bool:
        """Whether a linear layer or a convolution has another rule than its plain gradient, so that its weight must be
        known."""
        kinds = ("linear", "convolution", *PLACES)
        return any(rule is not rules.unmodified for kind in kinds for rule in self._rules(kind))

    def shares_products(self) -> bool:
        """Whether a factor of a product may be given another share of its relevance than all, or none, somewhere."""
        return any(rule not in (rules.unmodified, rules.signal_take_all) for rule in self._rules("product"))

    def has_rule_for_norms(self) -> bool:
        """Whether a norm has another rule than its plain gradient, somewhere."""
        return any(rule is not rules.unmodified for rule in self._rules("norm"))

    def has_rule_for_first(self) -> bool:
        """Whether the layer that sees the model's input has a rule of its own, somewhere."""
        return bool(self._rules("first"))

    def _rules(self, kind: str) -> list[Rule]:
        """The rules of one kind of operation, the overrides' too."""
        found = [getattr(self, kind), *(rule for o in self.overrides for each, rule in o.rules if each == kind)]
        return [rule for rule in found if rule is not None]

    def is_ours(self) -> bool:
        """Whether every rule is one of this package's."""
        every = [rule for kind in (*KINDS, *PLACES) for rule in self._rules(kind)]
        return all(unwrapped(rule).__module__ == rules.__name__ for rule in every)

    def has_rules(self) -> bool:
        """Whether any kind of operation has another rule than its plain gradient."""
        return bool(self.overrides) or self.has_places() or any(map(self._is_changed, KINDS))

    def has_positions(self) -> bool:
        """Whether positions have relevance of their own, so that they must be known."""
        return any(rule is not rules.signal_take_all for rule in self._rules("position"))

    def with_rules(self, changed: tuple[tuple[str, Rule], ...]) -> Recipe:
        """The same recipe with the rules of an override everywhere; they were checked when that was made."""
        made = copy(self)
        for kind, rule in changed:
            object.__setattr__(made, kind, rule)
        return made

    def describe(self) -> str:
        """All rules on one line, the overrides' too, and whether what has none keeps its plain gradient; what the
        provenance of a result holds."""
        kinds = (kind for kind in KINDS if kind != "position" or self._is_changed(kind))
        rows = " ".join(_given(kind, self.rule(kind)) for kind in (*kinds, *self._places()))
        lenient = [] if self.strict or not self.has_rules() else ["strict=False"]
        return "; ".join([rows, *(override.description for override in self.overrides), *lenient])

    def __str__(self) -> str:
        family = next((words for recipe, words in _FAMILIES if self._has_rules_of(recipe)), None)
        lines = [] if family is None else [family]
        if self.overrides:
            lines = [f"{line}, and others in some modules" for line in lines]
        rows = {kind: shown(self.rule(kind)) for kind in (*KINDS, *self._places())}
        table = [*rows.items(), *((each.where, each.what) for each in self.overrides)]
        width = max(len(name) for name, _ in table)
        lines += [f"  {name:{width}}  {what}" for name, what in table]
        unknown = "is refused" if self.strict else "keeps its plain gradient"
        return "\n".join([self.name, *lines, f"an operation without a rule {unknown}"])

    def __repr__(self) -> str:
        changed = [_given(kind, self.rule(kind)) for kind in (*KINDS, *self._places()) if self._is_changed(kind)]
        return f"<Recipe {self.name!r}: {', '.join(changed) or 'plain gradient'}>"

    def _is_changed(self, kind: str) -> bool:
        """Whether a kind of operation has another rule than a plain gradient with constant positions has."""
        return self.rule(kind) is not (rules.signal_take_all if kind == "position" else rules.unmodified)

    def _has_rules_of(self, other: Recipe) -> bool:
        return all(self.rule(kind) == other.rule(kind) for kind in (*KINDS, *PLACES))


def _given(kind: str, rule: Rule) -> str:
    return f"{kind}={shown(rule)}"


def _check_name(name: Any, what: str, example: str) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise MethodError(f"{what} is {name!r}; pass a text, such as {example}")


def _listed(layers: Any) -> Container[int] | None:
    """Layers as an ascending range or tuple, where they can be listed; else the container itself.

    Raises:
        MethodError: they are no layers, or counted from the end.
    """
    if layers is None:
        return None
    refusal = f"the layers are {layers!r}; pass an index, a range, a slice or a list of indices"
    if isinstance(layers, slice):
        ends = (layers.start, layers.stop, layers.step)
        start, stop, step = (given if given is None else whole_number(given) for given in ends)
        if (start, stop, step) != ends or (step is not None and step < 1):
            raise MethodError(refusal)
        if min(start or 0, stop or 0) < 0:
            raise MethodError(FROM_ZERO)
        return range(start or 0, sys.maxsize if stop is None else stop, step or 1)
    if whole_number(layers) is not None:
        layers = (layers,)
    if isinstance(layers, range):
        layers = layers if layers.step > 0 else layers[::-1]
        lowest = layers[0] if layers else 0
    elif isinstance(layers, Collection) and not isinstance(layers, (str, bytes, Mapping)):
        indices = {whole_number(layer) for layer in layers}
        if None in indices:
            raise MethodError(refusal)
        layers = tuple(sorted(index for index in indices if index is not None))
        lowest = layers[0] if layers else 0
    elif isinstance(layers, Container) and not isinstance(layers, (str, bytes, Mapping)):
        return layers
    else:
        raise MethodError(refusal)
    if lowest < 0:
        raise MethodError(FROM_ZERO)
    return layers  # type: ignore[no-any-return]


FROM_ZERO = "a recipe does not know how many layers a model has; count layers from 0 upwards"


def _layers_name(layers: Container[int]) -> str:
    if isinstance(layers, range) and layers:
        last = "" if layers.stop == sys.maxsize else str(layers[-1])
        return f"layers {layers.start}-{last}" + ("" if layers.step == 1 else f" by {layers.step}")
    if isinstance(layers, range | tuple):
        return f"layers {', '.join(map(str, layers)) or 'none'}"
    return f"layers in {type(layers).__name__}"


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
"""CP-LRP: LRP for transformers with attention weights as constants (Ali et al. 2022; Arras 2025). Its name in tables
and on the command line is ``lrp``."""

ATTNLRP = Recipe(
    "attnlrp",
    activation=rules.identity,
    product=rules.uniform,
    matmul=rules.uniform,
    softmax=rules.unmodified,
    norm=rules.constant,
)
"""AttnLRP (Achtibat et al. 2024): relevance also flows to queries and keys."""

PA_LRP = replace(ATTNLRP, name="pa-lrp", position=rules.uniform)
"""PA-LRP (Bakish et al. 2025): AttnLRP, and positions are inputs too. What is multiplied with rotary angles shares with
them by the uniform rule, so that queries and keys end at ⅛; positions that are added need no rule."""

GIM = Recipe(
    "gim",
    product=rules.uniform,
    matmul=rules.uniform,
    softmax=rules.Temperature(2.0),
    norm=rules.constant,
)
"""GIM (Edin et al. 2025): the softmax's gradient at temperature 2, norms as constants, and the gradients of products
divided among their factors: ¼ at queries and keys, ½ at values. Activations keep their plain gradient."""

RELP = Recipe(
    "relp",
    activation=rules.identity,
    product=rules.uniform,
    matmul=rules.uniform,
    softmax=rules.constant,
    norm=rules.constant,
)
"""RelP (Jafari et al. 2025): norms and attention weights as constants, the identity rule, and half of a gated product
to each of its factors. Where there are no gates it is :data:`LRP`."""

LIBRAGRAD = Recipe(
    "libragrad",
    activation=rules.identity,
    product=rules.uniform,
    matmul=rules.uniform,
    softmax=rules.Scaled(2.0),
    norm=rules.constant,
)
"""LibraGrad (Mehri et al. 2025), with Gradient×Input: norms as constants, the identity rule, and half of the gradient
at the two branches of attention, its weights and its values. (The softmax's factor of 2 undoes the ½ of the product
before it, so that queries, keys and values have ½ each.) What biases have, as FullGrad counts it, is in a ledger."""

LRP_DING = Recipe(
    "lrp-ding",
    activation=rules.identity,
    product=rules.uniform,
    softmax=rules.identity,
    norm=rules.constant,
)
"""The rules of Ding et al. (2017), as Achtibat et al. (2024, Table 3) have them: the identity rule at the softmax,
which is unstable, and LRP-0 for both factors of a matrix product, which hands on twice what it is given. The paper
knows no norms; here they are constants."""

LRP_VOITA = Recipe(
    "lrp-voita",
    activation=rules.identity,
    product=rules.uniform,
    softmax=rules.uniform_bias,
    norm=rules.uniform_bias,
)
"""The rules of Voita et al. (2021), as Achtibat et al. (2024, Table 3) have them: Taylor expansions of softmax and
norms whose bias goes to all inputs alike, which is unstable, and LRP-0 for both factors of a matrix product, which
hands on twice what it is given. Refused where a model spells its norms out, as Llama does."""

LRP_CHEFER = Recipe(
    "lrp-chefer",
    activation=rules.identity,
    product=rules.uniform,
    matmul=rules.uniform,
    softmax=rules.identity,
    norm=rules.constant,
)
"""The rules of Chefer et al. (2021b), as Achtibat et al. (2024, Table 3) have them: the identity rule at the softmax,
which is unstable, and for a matrix product LRP-0 divided by the sums of absolute values of its factors' relevance,
which are the same, so that each has half."""

ATTNLRP_VIT = replace(
    ATTNLRP,
    name="attnlrp-vit",
    linear=rules.Gamma(0.05),
    convolution=rules.Gamma(0.25),
    input_projection=rules.Epsilon(),
    output_projection=rules.Epsilon(),
)
"""AttnLRP for vision transformers (Achtibat et al. 2024, Table 4): the γ rule at convolutions and at linear layers, and
ε at the projections into attention and out of it. Which γ is best depends on the model (App. B.4 searches for it)."""

LRP_VIT = replace(
    LRP,
    name="lrp-vit",
    linear=rules.Gamma(0.05),
    convolution=rules.Gamma(0.25),
    input_projection=rules.Epsilon(),
    output_projection=rules.Epsilon(),
)
"""CP-LRP with the same rules for layers (Achtibat et al. 2024, App. B.4)."""

_NAMED = (GRADIENT, LRP, ATTNLRP, PA_LRP)
_FAMILIES = (
    (GRADIENT, "no rules: the plain gradient"),
    (LRP, "the rules of CP-LRP, LRP with attention weights as constants (Ali et al. 2022)"),
    (ATTNLRP, "the rules of AttnLRP (Achtibat et al. 2024)"),
    (PA_LRP, "the rules of PA-LRP (Bakish et al. 2025)"),
)
"""How a recipe with the same rules says what they are."""

ALTI_LOGIT = LRP.at(
    layers=slice(0, None),
    linear=rules.constant,
    activation=rules.constant,
    product=rules.constant,
    matmul=rules.constant,
)
"""Nothing but the residual stream: what the branches of the layers add to it are constants; the norms on it and the
head after it have LRP's rules. The recipe of ALTI-Logit (Ferrando et al. 2023; Arras 2025, §2.1)."""
