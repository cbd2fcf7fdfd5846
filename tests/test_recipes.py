"""Recipes are data: their fields, names, overrides and refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrpx import rules
from lrpx._kinds import INPUTS, KINDS, PLACES, rule_name
from lrpx.errors import LRPxError, MethodError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Override, Recipe
from lrpx.rules import Gamma


def test_the_three_recipes_differ_where_the_papers_say() -> None:
    assert all(GRADIENT.rule(kind) is rules.unmodified for kind in KINDS if kind != "position")
    assert all(recipe.position is rules.signal_take_all for recipe in (GRADIENT, LRP, ATTNLRP))
    assert not GRADIENT.strict
    for recipe in (LRP, ATTNLRP):
        assert recipe.strict
        assert recipe.activation is rules.identity
        assert recipe.norm is rules.constant
        assert recipe.matmul is rules.uniform
        assert recipe.linear is recipe.convolution is rules.unmodified
    assert (LRP.product, LRP.softmax) == (rules.signal_take_all, rules.constant)
    assert (ATTNLRP.product, ATTNLRP.softmax) == (rules.uniform, rules.unmodified)


def test_a_recipe_is_frozen_hashable_and_equal_by_value() -> None:
    with pytest.raises(FrozenInstanceError):
        LRP.linear = Gamma()  # type: ignore[misc]
    assert Recipe("a", linear=Gamma(0.1)) == Recipe("a", linear=Gamma(0.1))
    assert len({ATTNLRP, LRP, GRADIENT, Recipe("a"), Recipe("a")}) == 4
    assert {field.name for field in fields(Recipe)} == {"name", *KINDS, *PLACES, "strict", "overrides"}


def test_at_leaves_the_recipe_alone_and_adds_in_order() -> None:
    narrow = ATTNLRP.at("*.mlp", linear=Gamma(0.25))
    both = narrow.at(layers=range(7, 10), use=LRP)
    assert ATTNLRP.overrides == ()
    assert [override.description for override in both.overrides] == [
        "*.mlp: linear=Gamma(gamma=0.25)",
        "layers 7-9: lrp",
    ]
    assert both.overrides[0] is narrow.overrides[0]
    assert dict(both.overrides[1].rules) == {kind: getattr(LRP, kind) for kind in KINDS}
    assert both.strict


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"layers": 3, "use": LRP}, "attnlrp, layers 3: lrp"),
        ({"layers": slice(3, None), "use": LRP}, "attnlrp, layers 3-: lrp"),
        ({"layers": slice(None, 3), "softmax": rules.constant}, "attnlrp, layers 0-2: softmax=constant"),
        ({"path": "*.mlp", "layers": range(2), "norm": rules.unmodified}, "attnlrp, *.mlp layers 0-1: norm=unmodified"),
        ({"layers": [5, 1, 5], "use": LRP}, "attnlrp, layers 1, 5: lrp"),
        ({"layers": range(9, 0, -2), "use": LRP}, "attnlrp, layers 1-9 by 2: lrp"),
        ({"use": replace(LRP, name="mine", norm=rules.unmodified)}, "attnlrp, *: lrp, norm=unmodified"),
        ({"use": LRP, "linear": Gamma(1.0)}, "attnlrp, *: lrp, linear=Gamma(gamma=1.0)"),
    ],
)  # fmt: skip
def test_the_name_says_what_was_changed(arguments: dict[str, Any], name: str) -> None:
    assert ATTNLRP.at(**arguments).name == name


def test_a_kind_given_with_use_wins_over_it() -> None:
    (override,) = ATTNLRP.at(use=LRP, softmax=rules.unmodified).overrides
    assert dict(override.rules) == {kind: getattr(LRP, kind) for kind in KINDS} | {"softmax": rules.unmodified}


def test_a_recipe_with_overrides_is_not_taken_in_part() -> None:
    mine = LRP.at("*.mlp", linear=Gamma(0.25))
    with pytest.raises(MethodError, match=r"^use is 'lrp, \*.mlp: .*has other rules in some modules \(\*.mlp\)"):
        ATTNLRP.at(layers=slice(3, None), use=mine)


def test_the_order_in_which_rules_are_given_makes_no_difference() -> None:
    one = ATTNLRP.at("*.mlp", softmax=rules.constant, linear=Gamma(1.0))
    assert one == ATTNLRP.at("*.mlp", linear=Gamma(1.0), softmax=rules.constant)
    assert one.name == "attnlrp, *.mlp: linear=Gamma(gamma=1.0), softmax=constant"


def test_a_description_lists_every_kind_and_override_on_one_line() -> None:
    text = ATTNLRP.at(layers=range(1, 3), use=LRP).describe()
    assert text.startswith("linear=unmodified convolution=unmodified activation=identity product=uniform")
    assert text.endswith("; layers 1-2: lrp")


def test_a_description_says_what_becomes_of_operations_without_a_rule() -> None:
    assert replace(ATTNLRP, strict=False).describe() == f"{ATTNLRP.describe()}; strict=False"
    assert replace(GRADIENT, strict=True).describe() == GRADIENT.describe()  # has no rules to be without


def test_it_prints_as_a_table_that_says_whose_rules_they_are() -> None:
    lines = str(LRP).splitlines()
    assert lines[:2] == ["lrp", "the rules of CP-LRP, LRP with attention weights as constants (Ali et al. 2022)"]
    assert [line.split() for line in lines[2:10]] == [[kind, rules_of.__name__] for kind, rules_of in by_kind(LRP)]
    assert lines[10:] == ["an operation without a rule is refused"]
    assert "AttnLRP (Achtibat et al. 2024)" in str(ATTNLRP)
    mine = Recipe("lrp", linear=Gamma(0.25), strict=False).at("*.mlp", layers=slice(3, None), linear=rules.unmodified)
    assert "CP-LRP" not in str(mine)
    assert [line.split() for line in str(mine).splitlines()[-2:]] == [
        ["*.mlp", "layers", "3-", "linear=unmodified"],
        "an operation without a rule keeps its plain gradient".split(),
    ]


def by_kind(recipe: Recipe) -> list[tuple[str, Any]]:
    return [(kind, recipe.rule(kind)) for kind in KINDS]


def test_the_repr_is_short() -> None:
    assert repr(Recipe("mine", linear=Gamma(0.25))) == "<Recipe 'mine': linear=Gamma(gamma=0.25)>"
    assert repr(GRADIENT) == "<Recipe 'gradient': plain gradient>"


def test_a_rule_has_a_name_without_an_address() -> None:
    half = partial(scaled, factor=0.5)
    assert rule_name(half) == "scaled"
    assert "norm=scaled(factor=0.5)" in Recipe("a", norm=half).describe()
    assert rule_name(Callable()) == "Callable"
    assert half.func.__module__ in Recipe("a", norm=half).rule_modules()


def test_unknown_kinds_are_refused_with_the_kinds_there_are() -> None:
    with pytest.raises(
        MethodError, match=r"no kind of operation is called 'attention'; the kinds are linear, conv.*norm"
    ):
        ATTNLRP.at(attention=rules.constant)


def test_nothing_to_change_is_refused() -> None:
    with pytest.raises(MethodError, match=r"pass use=RECIPE or a rule by kind, such as softmax=rules.constant"):
        ATTNLRP.at("*.mlp")


@pytest.mark.parametrize("layers", [-1, slice(-2, None), slice(None, -1)], ids=str)
def test_layers_counted_from_the_end_are_refused(layers: Any) -> None:
    with pytest.raises(LRPxError, match="count layers from 0 upwards"):
        ATTNLRP.at(layers=layers, use=LRP)


@given(
    start=st.none() | st.integers(0, 6),
    stop=st.none() | st.integers(0, 6),
    step=st.none() | st.integers(1, 3),
    layer=st.integers(0, 9),
)
def test_a_slice_of_layers_is_a_slice_of_their_list(
    start: int | None, stop: int | None, step: int | None, layer: int
) -> None:
    chosen = slice(start, stop, step)
    (override,) = ATTNLRP.at(layers=chosen, use=LRP).overrides
    assert override.covers("anything", layer) == (layer in list(range(10))[chosen])
    assert not override.covers("anything", None)


def test_an_override_covers_paths_by_shell_pattern() -> None:
    constant = (("softmax", rules.constant),)
    override = Override("*.mlp", None, constant)
    assert override.covers("model.layers.0.mlp", 0)
    assert not override.covers("model.layers.0.mlp.down_proj", 0)
    assert not override.covers("mlp", None)
    assert Override("model.layers.[01]", None, constant).covers("model.layers.1", 1)


def test_with_rules_changes_everywhere() -> None:
    changed = ATTNLRP.with_rules((("softmax", rules.constant),))
    assert changed.softmax is rules.constant
    assert changed.activation is rules.identity
    assert changed == replace(ATTNLRP, softmax=rules.constant) != ATTNLRP


# ---------------------------------------------------------------------- checked when made


def scaled(op: Any, /, *inputs: Any, factor: float = 1.0) -> Any:
    return op(*inputs)


def anything(*inputs: Any, **options: Any) -> Any:
    return inputs[0](*inputs[1:])


class Callable:
    def __call__(self, op: Any, x: Any, y: Any = None, z: Any = None) -> Any:
        return op(x, y, z)

    def method(self, op: Any, *inputs: Any) -> Any:
        return op(*inputs)


@dataclass
class Changeable:
    factor: float = 1.0

    def __call__(self, op: Any, /, *inputs: Any) -> Any:
        return op(*inputs)


@dataclass(frozen=True)
class Holds:
    factors: list[float] = field(default_factory=lambda: [1.0])

    def __call__(self, op: Any, /, *inputs: Any) -> Any:
        return op(*inputs)


@pytest.mark.parametrize(
    "rule",
    [
        *(scaled, anything, partial(scaled, factor=0.5), partial(anything), Callable(), Callable().method),
        *(lambda op, *inputs: op(*inputs), rules.unmodified, rules.constant),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_can_be_called_so_is_a_rule(kind: str, rule: Any) -> None:
    assert Recipe("a", **{kind: rule}).rule(kind) is rule
    (override,) = ATTNLRP.at("*.mlp", **{kind: rule}).overrides
    assert override.rules == ((kind, rule),)


NO_RULES = [
    ("gamma", r"is 'gamma'; pass a rule, such as {kind}=rules\."),
    (None, r"is None; pass a rule"),
    (0.25, r"is 0.25; pass a rule"),
    (Gamma, r"is the class Gamma; pass one of it: Gamma\(…\)"),
    (Changeable(), r"is .*Changeable\(factor=1.0\), which cannot be hashed .*; make it a @dataclass\(frozen=True\)"),
    (Holds(), r"is Holds\(factors=\[1.0\]\), which cannot be hashed .*; make it a @dataclass\(frozen=True\) of"),
    (
        lambda: None,
        r"is <lambda>, which cannot be called as rule\(op, {inputs}\) .*; pass another, such as {kind}=rules",
    ),
    (lambda op, a, b, c, d: None, r"is <lambda>, which cannot be called as rule\(op, {inputs}\)"),
    (
        lambda op, *inputs, gamma: None,
        r"is <lambda>, which cannot be called as rule\(op, {inputs}\) \(missing a required .*'gamma'",
    ),
]


def makers(kind: str, rule: Any) -> list[Any]:
    return [
        lambda: Recipe("a", **{kind: rule}),
        lambda: ATTNLRP.at("*.mlp", **{kind: rule}),
        lambda: replace(ATTNLRP, **{kind: rule}),
        lambda: Override("*", None, ((kind, rule),)),
    ]


@pytest.mark.parametrize(("rule", "message"), NO_RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_rule_is_refused_when_the_recipe_is_made(kind: str, rule: Any, message: str) -> None:
    message = message.replace("{kind}", kind).replace("{inputs}", ", ".join(INPUTS[kind]))
    for make in makers(kind, rule):
        with pytest.raises(MethodError, match=f"^the rule for {kind} {message}"):
            make()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("activation", Gamma(0.25)),
        ("softmax", rules.uniform),
        ("norm", rules.signal_take_all),
        ("linear", rules.identity),
        ("convolution", rules.uniform),
        ("product", rules.identity),
        ("matmul", rules.Epsilon()),
    ],
)
def test_a_rule_for_another_kind_is_refused_when_the_recipe_is_made(kind: str, rule: Any) -> None:
    for make in makers(kind, rule):
        with pytest.raises(
            MethodError, match=rf"the rule for {kind} is .*cannot be called as rule\(op, .*pass another"
        ):
            make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(""), r"the name of a recipe is ''; pass a text, such as 'my-recipe'"),
        (lambda: Recipe("  "), r"the name of a recipe is '  '"),
        (lambda: Recipe("a\nb"), r"the name of a recipe is 'a\\nb'"),
        (lambda: Recipe(7), r"the name of a recipe is 7"),  # type: ignore[arg-type]
        (lambda: Recipe("a", strict="no"), r"strict is 'no'; pass True or False"),  # type: ignore[arg-type]
        (lambda: replace(LRP, strict=1), r"strict is 1; pass True or False"),  # type: ignore[arg-type]
        (lambda: Recipe("a", overrides=[]), r"the overrides are no tuple of them; make them by"),  # type: ignore[arg-type]
        (lambda: Recipe("a", overrides=(LRP,)), r"the overrides are no tuple of them"),  # type: ignore[arg-type]
        (lambda: LRP.at(7, norm=rules.constant), r"the path of an override is 7; pass a text, such as '\*.mlp'"),  # type: ignore[arg-type]
        (lambda: LRP.at("", norm=rules.constant), r"the path of an override is ''"),
        (lambda: LRP.at(use="lrp"), r"use is str; pass a recipe, such as lrpx.LRP"),  # type: ignore[arg-type]
        (lambda: Override("*", None, "x"), r"the rules of an override are 'x'; make them by .at"),  # type: ignore[arg-type]
        (lambda: Override("*", None, None), r"the rules of an override are None; make them by .at"),  # type: ignore[arg-type]
        (lambda: Override("*", None, ()), r"nothing to change: pass use=RECIPE or a rule by kind"),
        (lambda: Override("*", None, (("attention", rules.constant),)), r"no kind of operation is called 'attention'"),
    ],
)
def test_what_is_no_recipe_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        make()


@pytest.mark.parametrize(
    "layers",
    ["x", b"x", True, False, 1.5, [1.5], ["x"], [True], {0: 1}, slice("a"), slice(1.5), slice(0, 9, -1)],
    ids=str,
)
def test_what_is_no_layer_is_refused_when_the_recipe_is_made(layers: Any) -> None:
    for make in (
        lambda: ATTNLRP.at(layers=layers, use=LRP),
        lambda: Override("*", layers, (("norm", rules.constant),)),
    ):
        with pytest.raises(
            MethodError, match=r"the layers are .*; pass an index, a range, a slice or a list of indices"
        ):
            make()


@pytest.mark.parametrize("layers", [[0, -1], range(-2, 3), range(3, -3, -1)], ids=str)
def test_lists_of_layers_counted_from_the_end_are_refused(layers: Any) -> None:
    with pytest.raises(MethodError, match="count layers from 0 upwards"):
        ATTNLRP.at(layers=layers, use=LRP)


def test_any_container_of_layers_is_asked() -> None:
    class Odd:
        def __contains__(self, layer: object) -> bool:
            return isinstance(layer, int) and layer % 2 == 1

    (override,) = ATTNLRP.at(layers=Odd(), use=LRP).overrides  # type: ignore[arg-type]
    assert [layer for layer in range(5) if override.covers("a", layer)] == [1, 3]
    assert override.description == "layers in Odd: lrp"
    many = ATTNLRP.at(layers=torch.tensor([2, 0]), use=LRP)  # type: ignore[arg-type]
    assert many == ATTNLRP.at(layers={0, 2}, use=LRP) == ATTNLRP.at(layers=(0, 2, 2), use=LRP)
    assert hash(many) == hash(ATTNLRP.at(layers=[2, 0], use=LRP))
