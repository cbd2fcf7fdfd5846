"""The search over composites of rules: its scores are the benchmark's, the best one wins, and its file is a method."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import lrpx
from lrpx._covering import FILLS, _fill
from lrpx.benchmarks import Run, find
from lrpx.cli._composites import are_images
from lrpx.composites import GRID, KINDS, composites, plotted, search
from lrpx.errors import InputError, MethodError
from lrpx.methods import Backward
from lrpx.methods import find as find_method
from lrpx.model import BoundModel
from tests import pictured
from tests.pictured import processor, vit
from tests.reference.covering import blurred


@pytest.fixture
def arrays(tmp_path):
    return pictured.arrays(tmp_path / "images.npz")


GRID_OF_TWO = {"linear": ["epsilon", "gamma:0.25"]}


def test_scores_are_the_benchmarks(arrays, tmp_path):
    model = BoundModel(vit().double(), processor())
    benchmark = find("pixels")(data=arrays, last=3)
    found = search(model, benchmark, "attnlrp", GRID_OF_TWO, folder=tmp_path / "out")
    run = Run(find("pixels")(data=arrays), model, ["attnlrp"], ["ΔA"])
    assert found.others == 3
    assert list(found.ids) == run.part(0)["id"].to_pylist()[3:]
    rules = {"a": lrpx.Epsilon(), "b": lrpx.Gamma(0.25)}
    methods = [Backward(name, replace(lrpx.ATTNLRP, name=name, linear=rule)) for name, rule in rules.items()]
    rows = Run(benchmark, model, methods, ["ΔA"]).part(0).to_pylist()
    for name, tried in zip("ab", found.tried, strict=True):
        np.testing.assert_allclose(tried.scores, [row[f"ΔA/{name}"] for row in rows], rtol=1e-9)
    assert found.tried[0].scores != found.tried[1].scores
    assert found.best.mean == max(each.mean for each in found.tried)


def test_a_search_goes_on_in_its_folder(arrays, tmp_path):
    model = BoundModel(vit().double(), processor())
    benchmark = find("pixels")(data=arrays)
    first = search(model, benchmark, "lrp", GRID_OF_TWO, folder=tmp_path / "out", part=2)
    made = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "out" / "rows").iterdir())}
    lost = list(made)[1]
    lost.unlink()
    again = search(model, benchmark, "lrp", GRID_OF_TWO, folder=tmp_path / "out", part=2)
    assert {path for path, when in made.items() if path.stat().st_mtime_ns != when} == {lost}
    assert [each.scores for each in again.tried] == [each.scores for each in first.tried]


def test_the_command_writes_the_grid_and_a_recipe(run, arrays, tmp_path):
    folder = pictured.saved(tmp_path / "vit")
    out = tmp_path / "out"
    code, told, err = run(
        "tune", "--method", "attnlrp", "--data", arrays, "--model", folder, "--out", out, "--last", 2, "--grid",
        "linear=epsilon,gamma:0.25", "--grid", "convolution=zplus", "--cells", "patches",
    )  # fmt: skip
    assert (code, err) == (0, ""), err
    rows = list(csv.DictReader((out / "grid.csv").read_text().splitlines()))
    best = max(rows, key=lambda row: float(row["mean"]))
    recipe = json.loads((out / "best.json").read_text())
    assert recipe["name"] == f"attnlrp linear={best['linear']} convolution=zplus"
    assert find_method(out / "best.json").name == recipe["name"]
    assert (out / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert "measure it on the others: lrpx benchmark pixels --limit 4" in told


@pytest.mark.parametrize(
    ("method", "grid", "said"),
    [
        ("attnlrp", {"linear": ["gamma"]}, "no rule 'gamma'"),
        ("attnlrp", {"linear": ["gamma:inf"]}, "no rule 'gamma:inf'"),
        ("attnlrp", {"linear": ["epsilon:1"]}, "no rule 'epsilon:1'"),
        ("attnlrp", {"softmax": ["epsilon"]}, "no kind of layer 'softmax'"),
        ("attnlrp", {"linear": ["epsilon", "epsilon"]}, "name each once"),
        ("gradient-x-input", None, "has no rules for layers"),
        ("random", None, "has no rules for layers"),
    ],
)
def test_what_cannot_be_searched(method, grid, said):
    with pytest.raises(MethodError, match=said):
        composites(method, grid)


def test_the_command_says_it_in_one_line(run, arrays, tmp_path):
    given = ["tune", "--method", "attnlrp", "--data", arrays, "--out"]
    code, _, err = run(*given, tmp_path / "best.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "is kept in a folder" in err
    code, _, err = run(*given, tmp_path / "out", "--grid", "linear")
    assert (code, err.count("\n")) == (2, 1)
    assert "write a kind of layer and its rules once" in err


def test_the_usual_grid_is_the_papers():
    """ε, z⁺, γ and αβ, at the four kinds of layers of Table 4."""
    made = composites("attnlrp")
    assert len(made) == np.prod([len(rules) for rules in GRID.values()])
    assert tuple(GRID) == KINDS
    assert {name.partition(":")[0] for name in GRID["linear"]} == {"epsilon", "zplus", "gamma", "alphabeta"}


def test_the_plot_needs_no_model():
    from lrpx.tuning import Tried, Tuned

    tried = tuple(Tried(made, settings, (0.1, 0.2)) for settings, made in composites("lrp", GRID_OF_TWO))
    assert plotted(Tuned(tried, ("a", "b")), "a $title$").startswith(b"\x89PNG")


def test_what_covers():
    image = torch.rand(1, 3, 12, 7, dtype=torch.float64)
    assert not _fill(image, "zero").any()
    assert torch.allclose(_fill(image, "mean")[0, :, 3, 2], image[0].mean((1, 2)))
    expected = torch.tensor([blurred(channel.tolist()) for channel in image[0]], dtype=torch.float64)
    torch.testing.assert_close(_fill(image, "blur")[0], expected, rtol=1e-9, atol=1e-9)
    assert list(FILLS) == ["zero", "mean", "blur"]
    with pytest.raises(InputError, match="nothing is called 'black'"):
        _fill(image, "black")


def test_a_rule_that_the_grid_would_not_reach_is_refused():
    mine = Backward("mine", lrpx.ATTNLRP.at("*.mlp", linear=lrpx.Gamma(0.25)))
    with pytest.raises(MethodError, match=r"^mine has a rule for linear in some modules \(\*.mlp\)"):
        composites(mine, GRID_OF_TWO)
    assert len(composites(mine, {"convolution": ["epsilon", "zplus"]})) == 2


@pytest.mark.parametrize("option", ["--text", "--perturbation", "--steps", "--context", "--part"])
def test_the_command_refuses_what_only_texts_have(run, arrays, tmp_path, option):
    given = ["tune", "--method", "attnlrp", "--data", arrays, "--out", tmp_path / "out", option, "5"]
    code, _, err = run(*given)
    assert (code, err) == (2, f"lrpx: {arrays} holds images, and {option} is of texts; leave it out\n")


def test_the_command_refuses_of_texts_what_only_images_have(run, tmp_path):
    data = tmp_path / "texts.txt"
    data.write_text("The doors of the house\n")
    given = ["tune", "--method", "smoothgrad", "--data", data, "--out", tmp_path / "out", "--cells", "pixels"]
    code, _, err = run(*given)
    assert (code, err) == (2, f"lrpx: {data} holds texts, and --cells is of images; leave it out\n")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"image": "a.png"}', True),
        ('{"image": "a.png", "text": "a"}', False),
        ('{"text": "a"}', False),
        ('["image"]', False),
        ('{"image"', False),
        ("", False),
    ],
)
def test_lines_of_json_that_name_images(line, wanted, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(f"\n{line}\n")
    assert are_images(data, "text") is wanted
