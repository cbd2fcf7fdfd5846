"""Recipes as files: round trips, what cannot be saved, and files that are never trusted."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrpx import rules
from lrpx._kinds import INPUTS, KINDS
from lrpx._recipe_files import BUILT_IN
from lrpx.errors import MethodError, ResultFileError
from lrpx.recipes import ALTI_LOGIT, ATTNLRP, GRADIENT, LRP, Recipe
from lrpx.rules import Epsilon, Gamma, ZPlus
from tests import own_rules
from tests.own_rules import Needs, Plain, Share, half

if TYPE_CHECKING:
    from pathlib import Path

OWN = [half, Share]
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ANY_KIND = [rules.unmodified, rules.constant, half]
RULES = {1: [rules.identity], 2: [rules.uniform, rules.signal_take_all], 3: [Epsilon(0.1), ZPlus()]}


def rules_for(kind: str) -> st.SearchStrategy[Any]:
    fixed = st.sampled_from(ANY_KIND + RULES[len(INPUTS[kind])])
    own = st.builds(Share, FLOATS | st.integers(-9, 9), st.text(st.characters(exclude_categories=["Cs"]), max_size=4))
    return fixed | own | (st.builds(Gamma, FLOATS.map(abs)) if kind in ("linear", "convolution") else st.nothing())


NAMES = st.text(st.characters(categories=["L", "N", "P", "Zs"]), min_size=1, max_size=9).filter(
    lambda text: text.strip() and text.isprintable()
)
INDICES = st.integers(0, 99)
LAYERS = (
    st.none()
    | INDICES
    | st.lists(INDICES, max_size=4)
    | st.sets(INDICES, max_size=4)
    | st.builds(slice, st.none() | INDICES, st.none() | INDICES, st.none() | st.integers(1, 5))
    | st.builds(range, INDICES, INDICES, st.integers(-5, -1))
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    made = Recipe(
        draw(NAMES),
        strict=draw(st.booleans()),
        **{kind: draw(rules_for(kind)) for kind in draw(st.sets(st.sampled_from(KINDS)))},
    )
    for _ in range(draw(st.integers(0, 2))):
        kinds = draw(st.sets(st.sampled_from(KINDS), min_size=1))
        made = made.at(draw(NAMES), layers=draw(LAYERS), **{kind: draw(rules_for(kind)) for kind in kinds})
    return made


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=recipes())
def test_a_saved_recipe_loads_as_it_was(tmp_path: Path, made: Recipe) -> None:
    made.save(tmp_path / "mine.json")
    loaded = Recipe.load(tmp_path / "mine.json", own=OWN)
    assert loaded == made
    assert hash(loaded) == hash(made)
    assert (loaded.describe(), str(loaded), repr(loaded)) == (made.describe(), str(made), repr(made))


@pytest.mark.parametrize("recipe", [GRADIENT, LRP, ATTNLRP, ALTI_LOGIT])
def test_every_recipe_of_ours_can_be_saved(tmp_path: Path, recipe: Recipe) -> None:
    recipe.save(str(tmp_path / "a.json"))
    assert Recipe.load(str(tmp_path / "a.json")) == recipe


def test_every_rule_with_parameters_can_be_saved() -> None:
    classes = {name for name, found in vars(rules).items() if is_dataclass(found)}
    assert classes == {name for name, rule in BUILT_IN.items() if isinstance(rule, type)} >= {"Gamma"}


def test_a_file_can_be_read_and_written_by_people(tmp_path: Path) -> None:
    ATTNLRP.at("*.mlp", layers=slice(7, None), linear=Gamma(0.25)).save(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert found["lrpx recipe"] == 1
    assert found["rules"]["activation"] == "identity"
    assert found["overrides"] == [
        {"path": "*.mlp", "layers": "7:", "rules": {"linear": {"rule": "Gamma", "gamma": 0.25}}}
    ]
    override = '{"layers": 3, "rules": {"norm": "constant"}}'
    shortest = f'{{"lrpx recipe": 1, "name": "mine", "rules": {{"linear": "Gamma"}}, "overrides": [{override}]}}'
    (tmp_path / "b.json").write_text(shortest, encoding="utf-8-sig")
    made = Recipe.load(tmp_path / "b.json")
    assert (made.name, made.linear, made.strict) == ("mine", Gamma(), True)
    assert made.overrides == ATTNLRP.at(layers=3, norm=rules.constant).overrides


def test_layers_are_written_in_the_shortest_way(tmp_path: Path) -> None:
    for layers, text in [
        (range(2, 5), "2:5"),
        (slice(1, 9, 3), "1:9:3"),
        ([4, 2], [2, 4]),
        (3, [3]),
        (None, None),
        (range(0), "0:0"),
    ]:
        LRP.at(layers=layers, norm=rules.unmodified).save(tmp_path / "a.json")
        assert json.loads((tmp_path / "a.json").read_text())["overrides"][0]["layers"] == text


# ------------------------------------------------------------------------- what cannot be saved


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (own_rules.nameless, r"<lambda> is not found in a module; define it at the top of a file and import it"),
        (own_rules.made(), r"made.<locals>.inner is not found in a module"),
        (own_rules.shortened, r"a partial; write a function or a @dataclass\(frozen=True\) in its place"),
        (Plain(), r"neither a function nor a dataclass; make it a @dataclass\(frozen=True\)"),
        (Plain().__call__, r"neither a function nor a dataclass"),
        (Share(float("nan")), r"its factor is nan; pass a text or a finite number"),
        (Share(float("inf")), r"its factor is inf; pass a text or a finite number"),
        (Share(10**400), r"its factor is 1000.*; pass a text or a finite number"),
        (Share((1.0,)), r"its factor is \(1.0,\); pass a text or a finite number"),
        (Share(torch.float32), r"its factor is torch.float32; pass a text or a finite number"),
    ],
)
def test_a_rule_that_cannot_be_saved_is_named_with_the_mend(tmp_path: Path, rule: Any, message: str) -> None:
    for recipe in (Recipe("a", linear=rule), ATTNLRP.at("*.mlp", linear=rule)):
        with pytest.raises(MethodError, match=rf"^the rule for linear, .*, cannot be saved: {message}"):
            recipe.save(tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()


def test_a_rule_of_a_script_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "half", half, raising=False)
    with pytest.raises(MethodError, match=r"half is not found in a module; define it at the top of a file and import"):
        Recipe("a", linear=half).save(tmp_path / "a.json")


def test_layers_that_cannot_be_listed_cannot_be_saved(tmp_path: Path) -> None:
    class Odd:
        def __contains__(self, layer: object) -> bool:
            return isinstance(layer, int) and layer % 2 == 1

    with pytest.raises(
        MethodError, match=r"'layers in Odd: lrp' cannot be saved, .*; pass a range or a list of indices"
    ):
        ATTNLRP.at(layers=Odd(), use=LRP).save(tmp_path / "a.json")  # type: ignore[arg-type]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"there is no folder .*none; create it first"):
        LRP.save(tmp_path / "none" / "a.json")
    with pytest.raises(MethodError, match=r"there is no file .*a\.json; check the path"):
        Recipe.load(tmp_path / "a.json")
    with pytest.raises(MethodError, match=r"cannot read .*; name another file"):
        Recipe.load(tmp_path)
    with pytest.raises(MethodError, match=r"cannot read .*; name another file"):
        Recipe.load("a\0b")


# ------------------------------------------------------------------------------ rules of one's own


def test_a_rule_of_ones_own_must_be_passed(tmp_path: Path) -> None:
    made = Recipe("a", linear=half, activation=Share(0.25, "quarter"))
    made.save(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())["rules"]
    assert found["linear"] == "tests.own_rules:half"
    assert found["activation"] == {"rule": "tests.own_rules:Share", "factor": 0.25, "note": "quarter"}
    for own, missing in (((), "half"), ((Share,), "half"), ((half,), "Share")):
        mend = rf"import it, and load the file with Recipe.load\(path, own=\[{missing}\]\)"
        with pytest.raises(MethodError, match=rf"'tests.own_rules:{missing}', which is not known; {mend}"):
            Recipe.load(tmp_path / "a.json", own=own)
    assert Recipe.load(tmp_path / "a.json", own=[half, Share]) == made


@pytest.mark.parametrize("own", [half, [Share()], ["tests.own_rules:half"], [None], {"half": 1}])
def test_what_is_passed_as_ones_own_must_be_rules(tmp_path: Path, own: Any) -> None:
    LRP.save(tmp_path / "a.json")
    with pytest.raises(MethodError, match=r"own is .*; pass a list of functions and of classes of rules"):
        Recipe.load(tmp_path / "a.json", own=own)


def test_nothing_a_file_names_is_imported_or_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef rule(op, *x): return op(*x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bomb:rule", "os:system", "builtins:eval", "lrpx.rules:identity", "tests.own_rules:half"):
        for rule in (name, {"rule": name}, {"rule": name, "command": "touch ran"}):
            with pytest.raises(MethodError, match="which is not known"):
                read(tmp_path, {"rules": {"softmax": rule}})
    assert not (tmp_path / "ran").exists()
    assert "bomb" not in sys.modules


# --------------------------------------------------------------------------------- hostile files


def read(folder: Path, fields: Any, own: Any = ()) -> Recipe:
    text = fields if isinstance(fields, str) else json.dumps({"lrpx recipe": 1, "name": "a"} | fields)
    (folder / "a.json").write_text(text, encoding="utf-8")
    return Recipe.load(folder / "a.json", own)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"lrpx recipe": ' + "9" * 5000 + "}", "no JSON"),
        ("null", 'it has no "lrpx recipe": 1; save one with'),
        ("[1]", 'it has no "lrpx recipe": 1; save one with'),
        ("{}", 'it has no "lrpx recipe": 1; save one with'),
        ('{"lrpx recipe": 2}', "it has format 2, this lrpx reads format 1"),
        ('{"lrpx recipe": true}', "it has format True, this lrpx reads format 1"),
        ('{"lrpx recipe": "1"}', "it has format '1', this lrpx reads format 1"),
        ('{"lrpx recipe": 1}', 'it has no "name"; add one'),
        ('{"lrpx recipe": 1, "name": "a", "name": "b"}', "a name stands twice in lrpx recipe, name, name; leave one"),
        ('{"lrpx recipe": 1, "name": "a", "strict": NaN}', "NaN is no number of JSON; write a finite one"),
        (
            '{"lrpx recipe": 1, "name": "a", "rules": {"linear": {"rule": "Gamma", "gamma": 1e999}}}',
            "gamma of the rule",
        ),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MethodError, match=rf"a\.json is no recipe: {re.escape(message)}"):
        read(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(MethodError, match=r"cannot read .*UnicodeDecodeError.*; name another file"):
        Recipe.load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "the name of a recipe is ''"),
        ({"name": 7}, "the name of a recipe is 7"),
        ({"name": "\x1b[2J"}, "the name of a recipe is '\\x1b[2J'"),
        ({"strict": "no"}, "strict is 'no'; pass True or False"),
        ({"strict": 1}, "strict is 1; pass True or False"),
        ({"more": 1}, "a recipe has no 'more'; it may have name, rules, strict, overrides"),
        ({"rules": []}, "the rules is []; write an object of linear, "),
        ({"rules": {"attention": "constant"}}, "the rules has no 'attention'; it may have linear, convolution"),
        ({"rules": {"strict": "constant"}}, "the rules has no 'strict'"),
        ({"rules": {"name": "constant"}}, "the rules has no 'name'"),
        (
            {"rules": {"linear": "gamma"}},
            "the rule for linear is 'gamma', which is not known; the rules are unmodified",
        ),
        ({"rules": {"linear": "_Identity"}}, "the rule for linear is '_Identity', which is not known"),
        ({"rules": {"linear": "scale_gradient"}}, "the rule for linear is 'scale_gradient', which is not known"),
        ({"rules": {"linear": None}}, "the rule for linear is None; write its name"),
        ({"rules": {"linear": ["Gamma"]}}, "the rule for linear is ['Gamma']; write its name"),
        ({"rules": {"linear": {}}}, "the rule for linear is {}; write its name"),
        ({"rules": {"linear": {"rule": ["Gamma"]}}}, "the rule for linear is {'rule': ['Gamma']}; write its name"),
        ({"rules": {"linear": {"rule": "Gamma", "g": 1}}}, "the rule Gamma has no 'g'; it may have gamma"),
        ({"rules": {"linear": {"rule": "ZPlus", "g": 1}}}, "the rule ZPlus has no 'g'; it may have nothing"),
        (
            {"rules": {"linear": {"rule": "Gamma", "gamma": "1"}}},
            "gamma of the rule Gamma is '1'; write a finite number",
        ),
        ({"rules": {"linear": {"rule": "Gamma", "gamma": True}}}, "gamma of the rule Gamma is True; write a finite"),
        ({"rules": {"linear": {"rule": "Gamma", "gamma": None}}}, "gamma of the rule Gamma is None; write a finite"),
        ({"rules": {"linear": {"rule": "Gamma", "gamma": [1]}}}, "gamma of the rule Gamma is [1]; write a finite"),
        ({"rules": {"linear": {"rule": "Gamma", "gamma": 10**400}}}, "gamma of the rule Gamma is 1000"),
        ({"rules": {"softmax": {"rule": "constant", "x": 1}}}, "the rule constant has no parameters, and x was given"),
        ({"rules": {"activation": "Gamma"}}, "the rule for activation is Gamma(gamma=0.25), which cannot be called"),
        ({"rules": {"linear": "tests.own_rules:Needs"}}, "the rule tests.own_rules:Needs cannot be made"),
        (
            {"rules": {"linear": "tests.own_rules:Plain"}},
            "the rule tests.own_rules:Plain is a class that is no dataclass",
        ),
        ({"overrides": {}}, 'its "overrides" are no list'),
        ({"overrides": [7]}, "an override is 7; write an object of path, layers, rules"),
        ({"overrides": [{}]}, "nothing to change"),
        ({"overrides": [{"rules": {}}]}, "nothing to change"),
        (
            {"overrides": [{"rules": {"norm": "constant"}, "at": 1}]},
            "an override has no 'at'; it may have path, layers",
        ),
        ({"overrides": [{"rules": {"norm": "constant"}, "path": 7}]}, "the path of an override is 7"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": "x"}]}, "the layers are 'x'; write an index, a list"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": "-1:"}]}, "the layers are '-1:'; write an index"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": "::0"}]}, "the layers are '::0'; write an index"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": "٣:"}]}, "the layers are '٣:'; write an index"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": True}]}, "the layers are True; pass an index"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": 1.0}]}, "the layers are 1.0; pass an index"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": ["x"]}]}, "the layers are ['x']; pass an index"),
        ({"overrides": [{"rules": {"norm": "constant"}, "layers": [-1]}]}, "count layers from 0 upwards"),
        (
            {"overrides": [{"rules": {"norm": "constant"}, "layers": {"0": 1}}]},
            "the layers are {'0': 1}; pass an index",
        ),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=rf"a\.json is no recipe: .*{re.escape(message)}") as raised:
        read(tmp_path, fields, own=[Needs, Plain])
    assert len(str(raised.value)) < 1000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | FLOATS
    | st.text(max_size=5)
    | st.sampled_from([*BUILT_IN, *KINDS, "7:"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*KINDS, "rule", "gamma", "path", "layers", "rules", "name"]) | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(["name", "rules", "strict", "overrides"]), JSON, max_size=4))
def test_any_json_is_a_recipe_or_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    try:
        made = read(tmp_path, fields)
    except MethodError:
        return
    assert replace(made) == made


@pytest.mark.parametrize("rule", [{"rule": "Gamma", "gamma": -1}, {"rule": "Epsilon", "epsilon": -0.5}])
def test_a_file_with_a_parameter_below_zero_is_refused(tmp_path, rule):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"lrpx recipe": 1, "name": "mine", "rules": {"linear": rule}}))
    with pytest.raises(MethodError, match=r"mine\.json is no recipe: (gamma|epsilon) is -[01.5]+; pass a finite"):
        Recipe.load(path)
