"""Rules by layer: every mix once, with the rules that it says, and reports that hold what the rows hold."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import lrpx
from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._faithful_summary import summarise
from lrpx.benchmarks._layers import SWEEPS, Layers, chosen, count, mixes, named, terminal
from lrpx.benchmarks._summary import select
from lrpx.engine._overrides import recipe_in
from lrpx.errors import ModelError
from lrpx.methods._backward import Backward
from lrpx.model import BoundModel, Spec
from lrpx.recipes import ATTNLRP, LRP

TEXTS = (
    "The doors of the old house\nThe keys to the cabinet that stands in the hall\nWhat a lovely film, and a terrible\n"
)


@pytest.fixture(scope="module")
def bundled() -> BoundModel:
    return Spec(dtype="float64").build()


@pytest.fixture
def data(tmp_path: Any) -> Any:
    (tmp_path / "texts.txt").write_text(TEXTS)
    return tmp_path / "texts.txt"


@pytest.mark.parametrize("of", [1, 2, 3, 6])
def test_every_place_of_every_sweep_is_a_mix_with_its_rules(of: int) -> None:
    found = {each.name: each for each in mixes(of)}
    assert len(found) == max(1, 3 * of - 3)
    for sweep in SWEEPS:
        for layer in range(of):
            method = found[named(chosen(sweep, layer, of))]
            assert isinstance(method, Backward)
            for other in range(of):
                inside = {"first": other <= layer, "last": other >= layer, "one": other == layer}[sweep]
                wanted = LRP if inside else ATTNLRP
                rules = recipe_in(method.recipe, f"model.layers.{other}.self_attn")
                assert (rules.softmax, rules.product) == (wanted.softmax, wanted.product)
            assert recipe_in(method.recipe, "lm_head").softmax is ATTNLRP.softmax


@pytest.mark.slow
def test_a_run_measures_every_mix_and_draws_it(bundled: BoundModel, data: Any, tmp_path: Any) -> None:
    benchmark = Layers(data=data)
    run = Run(benchmark, bundled, metrics=["LOO Pearson", "AOPC Δ"])
    assert count(bundled) == 6
    assert [each.name for each in run.methods] == ["attnlrp", "lrp", *(each.name for each in mixes(6))]
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
        rows = select(kept.store, ["id", "LOO Pearson/lrp in 0-2", "relevance/lrp in 0-2", "relevance/lrp in 0-5"])
        explainer = lrpx.Explainer.of(bundled)
        half = explainer("The doors of the old", method=ATTNLRP.at(layers=range(3), use=LRP))
        np.testing.assert_allclose(rows["relevance/lrp in 0-2"][0].to_numpy(), half.relevance.numpy(), atol=1e-9)
        every = explainer("The doors of the old", method="lrp")  # the bundled model has no products outside of layers
        np.testing.assert_allclose(rows["relevance/lrp in 0-5"][0].to_numpy(), every.relevance.numpy(), atol=1e-9)
        mean = float(rows["LOO Pearson/lrp in 0-2"].to_numpy().mean())
    told = (tmp_path / "out/layers.md").read_text()
    (line,) = [line for line in told.splitlines() if line.startswith(f"| {SWEEPS['first']}: 2 ")]
    assert line.split("|")[2].split()[0] == f"{mean:.3f}".replace("-", "−")
    assert len([line for line in told.splitlines() if line.startswith("| CP-LRP ")]) == 3 * 6
    assert (tmp_path / "out/layers.png").read_bytes().startswith(b"\x89PNG")
    again = Run.from_spec(json.loads(json.dumps(run.spec)), model=bundled)
    assert again.part(0).equals(run.part(0))


def test_some_methods_alone_give_the_usual_report(bundled: BoundModel, data: Any, tmp_path: Any) -> None:
    benchmark = Layers(data=data)
    run = Run(benchmark, bundled, ["attnlrp", "lrp in 2"], ["LOO Pearson"])
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
    assert not (tmp_path / "out/layers.md").exists()
    assert (tmp_path / "out/table.md").exists()
    assert json.loads((tmp_path / "out/run.json").read_text())["settings"]["methods"] == ["attnlrp", "lrp in 2"]


def test_the_terminal_shows_the_names_of_model_and_metric_as_they_are(
    bundled: BoundModel, data: Any, tmp_path: Any
) -> None:
    run = Run(
        Layers(data=data, limit=1), bundled, ["attnlrp", "lrp", *(each.name for each in mixes(6))], ["LOO Pearson"]
    )
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        found = replace(summarise(kept.store), model="runs/llama[lora]")
    (variant,) = found.variants
    scores = {"LOO[b]": found.scores[variant.name]}
    found = replace(found, variants=(replace(variant, name="LOO[b]"),), scores=scores)
    console = Console(width=100, file=io.StringIO())
    console.print(terminal(found, 6))
    assert console.file.getvalue().startswith("runs/llama[lora]: 1 samples")  # type: ignore[attr-defined]
    assert "LOO[b] ↑" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_model_without_layers_is_refused(data: Any, bundled: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundModel, "paths", ("embedding", "head"))
    with pytest.raises(ModelError, match=r"no list of layers.*loo"):
        Run(Layers(data=data), bundled)
