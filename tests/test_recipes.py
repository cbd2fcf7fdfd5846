"""Recipes are data: their fields, names, overrides and refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrpx import rules
from lrpx.errors import LRPxError, MethodError
from lrpx.recipes import ATTNLRP, GRADIENT, KINDS, LRP, Override, Recipe
from lrpx.rules import Gamma


def test_the_three_recipes_differ_where_the_papers_say() -> None:
    assert all(getattr(GRADIENT, kind) is rules.unmodified for kind in KINDS)
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
    assert {field.name for field in fields(Recipe)} == {"name", *KINDS, "strict", "overrides"}


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
        ({"layers": 3, "use": LRP}, "attnlrp, layers (3,): lrp"),
        ({"layers": slice(3, None), "use": LRP}, "attnlrp, layers 3-: lrp"),
        ({"layers": slice(None, 3), "softmax": rules.constant}, "attnlrp, layers 0-2: softmax=constant"),
        ({"path": "*.mlp", "layers": range(2), "norm": rules.unmodified}, "attnlrp, *.mlp layers 0-1: norm=unmodified"),
        ({"use": LRP, "linear": Gamma(1.0)}, "attnlrp, *: lrp, linear=Gamma(gamma=1.0)"),
    ],
)  # fmt: skip
def test_the_name_says_what_was_changed(arguments: dict[str, Any], name: str) -> None:
    assert ATTNLRP.at(**arguments).name == name


def test_a_kind_given_with_use_wins_over_it() -> None:
    (override,) = ATTNLRP.at(use=LRP, softmax=rules.unmodified).overrides
    assert dict(override.rules) == {kind: getattr(LRP, kind) for kind in KINDS} | {"softmax": rules.unmodified}


def test_text_lists_every_kind_and_override() -> None:
    text = str(ATTNLRP.at(layers=range(1, 3), use=LRP))
    assert text.startswith("linear=unmodified convolution=unmodified activation=identity product=uniform")
    assert text.endswith("; layers 1-2: lrp")


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
    override = Override("*.mlp", None, (), "")
    assert override.covers("model.layers.0.mlp", 0)
    assert not override.covers("model.layers.0.mlp.down_proj", 0)
    assert not override.covers("mlp", None)
    assert Override("model.layers.[01]", None, (), "").covers("model.layers.1", 1)


def test_with_rules_changes_everywhere() -> None:
    changed = ATTNLRP.with_rules((("softmax", rules.constant),))
    assert changed.softmax is rules.constant
    assert changed.activation is rules.identity
