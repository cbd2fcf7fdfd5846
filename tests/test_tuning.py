"""The search over settings: its scores are the benchmark's, the best one wins, and its file is a method."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lrpx
from lrpx import Explainer
from lrpx.benchmarks import Run, find
from lrpx.errors import DataError, InputError, MethodError, ResultFileError
from lrpx.methods import METHODS, Backward, IntegratedGradients, PositionAware, Rollout, SmoothGrad
from lrpx.methods import find as find_method
from lrpx.methods._method_files import write
from lrpx.model import Spec
from lrpx.tuning import GRIDS, METRIC, Tried, Tuned, candidates, tune

TEXTS = [
    "The keys to the cabinet are on the table.",
    "She said that the doors of the house were open.",
    "Nobody knows where the river begins.",
    "The old man and his dogs walk to the village.",
    "It was late, and the lamps were lit.",
]


@pytest.fixture(scope="module")
def model():
    return Spec(dtype="float32").build()


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def benchmark(texts, **how):
    return find("faithfulness")(data=texts, perturbation="zero-embedding", **how)


def test_scores_are_the_benchmarks(model, texts):
    grid = {"discard": [0.0, 0.9]}
    done = []
    found = tune(model, benchmark(texts, last=3), "rollout", grid, done=done.append)
    assert found.others == 2
    assert sum(done) == 3
    assert found.ids == ("texts:3", "texts:4", "texts:5")
    run = Run(benchmark(texts), model, [Rollout("a"), Rollout("b", discard=0.9)], [METRIC])
    rows = run.part(0).to_pylist()[2:]
    for name, tried in zip("ab", found.tried, strict=True):
        columns = [column for column in rows[0] if column.startswith(METRIC) and column.endswith(f"/{name}")]
        expected = [row[columns[0]] for row in rows]
        np.testing.assert_allclose(tried.scores, expected, rtol=1e-4, atol=1e-4)
    assert found.tried[0].scores != found.tried[1].scores
    assert found.best.mean == max(each.mean for each in found.tried)
    assert found.best.method.describe() == Rollout(discard=found.best.settings["discard"]).describe()


def test_what_is_best():
    def tried(name, *scores):
        return Tried(Rollout(name), {}, scores)

    found = Tuned((tried("a", 1.0, 2.0), tried("b", 2.0, 3.0), tried("c", 3.0, 2.0)), ("1", "2"))
    assert found.best.method.name == "b"  # the first of equals
    assert found.best.mean == 2.5
    assert found.best.error == pytest.approx(0.5)
    assert np.isnan(tried("d", 1.0).error)


def test_every_default_grid_is_made_of_settings_that_there_are():
    of_class = {type(method): method for method in METHODS.values()}
    for kind, grid in GRIDS.items():
        if kind is Backward:
            continue
        count = np.prod([len(values) for values in grid.values()])
        made = candidates(of_class[kind])
        assert len(made) == count
        for settings, method in made:
            assert settings == {name: getattr(method, name) for name in grid}
            assert method.label.startswith(of_class[kind].label + " ")
            if hasattr(method, "refuse"):
                method.refuse()


def test_gamma_of_a_recipe(model, texts, tmp_path):
    recipe = lrpx.ATTNLRP.at("*.mlp", linear=lrpx.Gamma(0.25))
    recipe.save(tmp_path / "mine.json")
    found = tune(model, benchmark(texts, last=2), str(tmp_path / "mine.json"), {"gamma": [0.0, 1.0]})
    for tried, gamma in zip(found.tried, (0.0, 1.0), strict=True):
        (override,) = tried.method.recipe.overrides
        assert dict(override.rules) == {"linear": lrpx.Gamma(gamma)}
        exact = lrpx.ATTNLRP.at("*.mlp", linear=lrpx.Gamma(gamma))
        explain = Explainer(model.module, model.tokenizer)
        a, b = (explain(TEXTS[0], method=each).relevance for each in (tried.method, exact))
        assert torch.equal(a, b)
    found.save(tmp_path / "best.json")
    assert find_method(str(tmp_path / "best.json")).describe() == found.best.method.describe()
    with pytest.raises(MethodError, match=r"attnlrp has no γ rule to search; save a recipe with one"):
        candidates("attnlrp")
    with pytest.raises(MethodError, match=r"of a recipe only gamma can be searched, not 'sigma'"):
        candidates(recipe, {"sigma": [1]})


def test_a_method_of_positions_is_searched_and_saved_with_them(model, texts, tmp_path):
    method = PositionAware("mine", lrpx.PA_LRP.at("*.mlp", linear=lrpx.Gamma(0.25)), sinks="absolute")
    found = tune(model, benchmark(texts, last=2), method, {"gamma": [0.1]})
    found.save(tmp_path / "best.json")
    explain = Explainer(model.module, model.tokenizer)
    tuned, loaded = (explain(TEXTS[0], method=each) for each in (found.best.method, str(tmp_path / "best.json")))
    assert torch.equal(tuned.relevance, loaded.relevance)
    assert torch.equal(tuned.parts["positions"].values, loaded.parts["positions"].values)
    assert find_method(str(tmp_path / "best.json")).describe() == found.best.method.describe()


def test_a_class_of_recipes_of_ones_own_is_not_written_as_the_recipe_alone(tmp_path):
    class Own(Backward):
        """Registered by no name."""

    with pytest.raises(MethodError, match="mine cannot be saved: it is no registered method with fields"):
        write(Own("mine", lrpx.LRP), tmp_path / "mine.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["convolution", "first", "input_projection", "output_projection"])
def test_gamma_of_every_rule_of_a_recipe(place):
    """Also of the layers that have a rule by what they are to the model."""
    recipe = replace(lrpx.ATTNLRP, **{place: lrpx.Gamma(0.25)}).at("*.mlp", **{place: lrpx.Gamma(0.5)})
    for searched in (recipe, replace(recipe, overrides=()), replace(recipe, linear=lrpx.Gamma(0.25))):
        ((_, made),) = candidates(searched, {"gamma": [1.0]})
        assert made.recipe.rule(place) == lrpx.Gamma(1.0)
        assert made.recipe.linear == (lrpx.Gamma(1.0) if searched.linear == lrpx.Gamma(0.25) else lrpx.ATTNLRP.linear)
        assert all(dict(each.rules) == {place: lrpx.Gamma(1.0)} for each in made.recipe.overrides)


@pytest.mark.parametrize(
    "method",
    [
        SmoothGrad("mine", sigma=0.2, score="l1"),
        IntegratedGradients("mine", 7, "pad"),
        Rollout("mine", "max", 0.5, "highest"),
        METHODS["random"],
        METHODS["alti-logit"],
        METHODS["lrp"],
        PositionAware("mine", lrpx.PA_LRP.at("*.mlp", linear=lrpx.Gamma(0.25)), of="tokens", sinks="single"),
        replace(METHODS["alti-logit"], name="mine", recipe=lrpx.LRP),
    ],
)
def test_a_file_is_the_method_that_was_written(method, tmp_path):
    path = tmp_path / "method.json"
    write(method, path)
    found = find_method(str(path))
    assert found.name == method.name
    assert found.describe() == method.describe()
    assert type(found) is type(method)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"lrpx method": 2, "method": "rollout"}, "it has format 2, this lrpx reads format 1"),
        ({"lrpx method": 1, "method": "magic"}, "there is no method 'magic'"),
        ({"lrpx method": 1, "method": "rollout", "run": "rm"}, "it has no 'run'"),
        ({"lrpx method": 1, "method": "rollout", "settings": {"sigma": 1}}, "rollout has no setting 'sigma'"),
        ({"lrpx method": 1, "method": "rollout", "settings": {"discard": [1]}}, "a setting is a list or an object"),
        ({"lrpx method": 1, "method": "rollout", "settings": 3}, "its settings are 3"),
        ({"lrpx method": 1, "method": "rollout", "settings": {"discard": "much"}}, "is 'much'; pass a number"),
        ({"lrpx method": 1, "method": "rollout", "settings": {"fusion": 1}}, "the fusion of rollout is 1; pass a text"),
        ({"lrpx method": 1, "method": "pa-lrp", "settings": {"by_head": "yes"}}, "is 'yes'; pass true or false"),
        ({"lrpx method": 1, "method": "random", "settings": {"seed": True}}, "is True; pass a number"),
        ({"lrpx method": 1, "method": "rollout", "name": "\x1b"}, "its name is"),
        ({"lrpx method": 1, "method": "lrp", "settings": {"recipe": "x"}}, "has no setting 'recipe'"),
        ({"lrpx method": 1, "method": "pa-lrp", "settings": {"recipe": {}}}, 'it has no "lrpx recipe"'),
        ({"lrpx method": 1, "method": "rollout", "settings": {"fusion": {}}}, "a setting is a list or an object"),
        (["no"], "is no recipe"),
    ],
)
def test_files_that_are_none(content, said, tmp_path):
    path = tmp_path / "method.json"
    path.write_text(json.dumps(content))
    with pytest.raises(MethodError, match=said):
        find_method(str(path))


@pytest.mark.parametrize(
    "content",
    [
        '{"lrpx method": 1, "method": "smoothgrad", "settings": {"sigma": 0.1, "sigma": 0.5}}',
        '{"lrpx method": 1, "method": "smoothgrad", "method": "occlusion"}',
        '{"lrpx method": 1, "method": "pa-lrp", "settings": {"recipe": {"lrpx recipe": 1, "name": "mine", "rules": '
        '{"softmax": "constant", "softmax": "identity"}}}}',
    ],
)
def test_what_stands_twice_is_refused(content, tmp_path):
    """As in a recipe's file; the last would be taken."""
    path = tmp_path / "method.json"
    path.write_text(content)
    with pytest.raises(MethodError, match="a name stands twice in"):
        find_method(str(path))


@pytest.mark.parametrize(
    ("method", "more", "name", "label"),
    [
        ("smoothgrad", {"settings": {"sigma": 0.5}}, "smoothgrad, changed", "SmoothGrad changed"),
        ("smoothgrad", {"name": "attnlrp"}, "attnlrp, changed", "SmoothGrad attnlrp, changed"),
        ("smoothgrad", {"settings": {"batch_size": 4}}, "smoothgrad", "SmoothGrad"),
        ("smoothgrad", {"name": "mine", "settings": {"sigma": 0.5}}, "mine", "SmoothGrad mine"),
    ],
)
def test_no_file_takes_the_name_of_another_method(method, more, name, label, tmp_path):
    path = tmp_path / "method.json"
    path.write_text(json.dumps({"lrpx method": 1, "method": method} | more))
    found = find_method(str(path))
    assert (found.name, found.label) == (name, label)


def test_positions_by_head_through_a_file(tmp_path):
    """What the command line has instead of an option."""
    path = tmp_path / "by-head.json"
    page = (Path(__file__).parents[1] / "docs" / "design" / "positions.md").read_text(encoding="utf-8")
    path.write_text(page.partition("```json\n")[2].partition("```")[0])
    found = Explainer.from_pretrained()(TEXTS[0], method=str(path))
    assert found.parts["positions by head"].values.shape[2] == len(found.tokens)
    assert "by_head" in found.provenance.recipe


def test_what_is_refused(model, texts, tmp_path):
    with pytest.raises(MethodError, match="there is no grid for position"):
        candidates("position")
    with pytest.raises(MethodError, match="rollout has no setting 'sigma'; it has fusion, discard, outliers"):
        candidates("rollout", {"sigma": [1]})
    with pytest.raises(MethodError, match="has a value twice"):
        candidates("rollout", {"discard": [0.5, 0.5]})
    with pytest.raises(InputError, match="last is 0; give at least 1"):
        tune(model, benchmark(texts, last=0), "rollout")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="there is no text"):
        tune(model, benchmark(tmp_path / "empty.txt"), "rollout")


# ------------------------------------------------------------------------------ the command


def test_the_command(run, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = ["--data", str(texts), "--last", "2", "--context", "6", "--grid", "discard=0,0.9"]
    code, out, err = run("tune", "--method", "rollout", *how, "--out", "found")
    assert code == 0, err
    assert "searched on 2 of the last 2 texts" in out
    assert "lrpx benchmark faithfulness --limit 3 --methods found/best.json" in out
    assert out.strip().endswith("found/best.json")
    assert find_method(str(tmp_path / "found" / "best.json")).name.startswith("rollout discard=")
    code, out, _ = run("explain", "The doors of the house", "--method", "found/best.json")
    assert code == 0
    assert "rollout discard=" in out
    code, _, err = run("tune", "--method", "ifr", *how[:-1], "threshold=0,0.1", "--out", "found")
    assert code == 2
    assert "found holds a run with another setting: methods was" in err


OWN = """
from dataclasses import dataclass
import torch
from lrpx.methods import Found, Method, register

@register
@dataclass(frozen=True)
class Mine(Method):
    name: str = "mine"
    label: str = "Mine"
    power: float = 1.0
    has_ledger = False

    def attribute(self, model, questions, *, ledger=False):
        rows = [questions.row_of(i) for i in range(len(questions))]
        values = [torch.arange(len(row.tokens.ids)).add(1.0) ** self.power for row in rows]
        return Found(model.ask(questions), tuple(values))
"""


def test_the_best_of_a_scripts_own_method_is_told(run, texts, tmp_path, monkeypatch):
    """A file cannot name what only a script knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METHODS, "_found", dict(METHODS))  # what a test registers is not there for others
    monkeypatch.setattr(METHODS, "_origins", dict(METHODS._origins))
    (tmp_path / "own.py").write_text(OWN)
    how = ["--data", str(texts), "--last", "2", "--context", "6", "--grid", "power=1.0,-1.0"]
    code, out, err = run("tune", "--method", "own.py", *how, "--out", "found")
    assert code == 0
    assert "power=1.0" in out
    assert "searched on 2 of the last 2 texts" in out
    assert "register it in the script, with power=" in " ".join(err.split())
    assert "best.json" not in out
    assert not (tmp_path / "found" / "best.json").exists()


def test_a_file_has_all_settings(tmp_path):
    """So that it is the same method when defaults are others."""
    write(SmoothGrad("mine", sigma=0.3), tmp_path / "mine.json")
    settings = json.loads((tmp_path / "mine.json").read_text())["settings"]
    assert settings.items() >= {"sigma": 0.3, "score": SmoothGrad().score}.items()


@pytest.mark.slow
def test_a_search_that_is_stopped_goes_on(model, texts, tmp_path):
    grid = {"discard": [0.0, 0.9]}
    whole = tune(model, benchmark(texts), "rollout", grid, part=1)
    seen = []

    def stop(more):
        seen.append(more)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(model, benchmark(texts), "rollout", grid, folder=tmp_path / "found", part=1, done=stop)
    before = parts(tmp_path / "found")
    assert len(before) == 2  # the third was in work
    made = []
    again = tune(model, benchmark(texts), "rollout", grid, folder=tmp_path / "found", part=1, done=made.append)
    assert len(made) == len(TEXTS)
    assert again == whole
    after = parts(tmp_path / "found")
    assert len(after) == len(TEXTS)
    assert {name: after[name] for name in before} == before
    with pytest.raises(ResultFileError, match="another setting: last was null and is 2 now"):
        tune(model, benchmark(texts, last=2), "rollout", grid, folder=tmp_path / "found", part=1)


def parts(folder):
    """The files of the parts, and when each was written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (folder / "rows").glob("part-*")}


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(run, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = tmp_path / "long.txt"
    long.write_text("\n".join(f"{text} {number}" for number in range(40) for text in TEXTS))
    command = ["tune", "--method", "rollout", "--data", str(long), "--last", "60", "--part", "1"]
    command += ["--grid", "discard=0,0.9"]
    code = "import sys, torch; torch.set_num_threads(1); from lrpx.cli import main; main()"
    child = subprocess.Popen([sys.executable, "-c", code, *command, "--out", "killed"])
    while not (before := parts(tmp_path / "killed")):
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    before = parts(tmp_path / "killed")
    assert 1 <= len(before) < 60
    assert not (tmp_path / "killed" / "best.json").exists()
    code, out, err = run(*command, "--out", "killed")
    assert code == 0, err
    assert {name: at for name, at in parts(tmp_path / "killed").items() if name in before} == before
    code, other, _ = run(*command, "--out", "whole")
    assert out.replace("killed", "whole") == other
    best = [(tmp_path / folder / "best.json").read_bytes() for folder in ("killed", "whole")]
    assert best[0] == best[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--grid", "sigma"], "write a setting and its values once, such as --grid sigma=0.1,0.2"),
        (["--grid", "sigma=1"], "rollout has no setting 'sigma'"),
        (["--perturbation", "magic"], "there is no perturbation 'magic'"),
    ],
)
def test_mistakes_of_the_command(run, texts, tmp_path, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    chosen = ["--method", "rollout", "--data", str(texts), "--model", "no-such/model"]
    code, out, err = run("tune", *chosen, "--out", "found", *given)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert "no-such" not in err
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize("how", [{"perturbation": "unk,delete"}, {"read_out": "logit,probability"}])
def test_a_search_by_several_numbers_is_refused_before_it_begins(model, texts, how):
    asked = []
    with pytest.raises(InputError, match="a search is by one number, not by ΔA flipping"):
        tune(model, find("faithfulness")(data=texts, **how), "rollout", {"discard": [0.0]}, done=asked.append)
    assert not asked
