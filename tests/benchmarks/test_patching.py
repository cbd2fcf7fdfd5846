"""The benchmarks of patching: their prompts, their rows, their reports, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from lrpx import circuits, patching
from lrpx._data.ioi import NAMES, ioi_pairs
from lrpx._data.minimal_pairs import agreement_pairs, read_pairs
from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._circuits import Circuits
from lrpx.benchmarks._circuits_report import FRACTIONS, cmd, cpr, recovery
from lrpx.benchmarks._pairs import INSIDE
from lrpx.benchmarks._pairs_report import Grid, Report, terminal
from lrpx.benchmarks._patching import Patching, pearson, spearman
from lrpx.benchmarks._report import figure
from lrpx.benchmarks._summary import select
from lrpx.errors import DataError, InputError, MethodError, ModelError
from lrpx.model import BoundModel, Spec
from lrpx.recipes import GRADIENT, RELP

HEAD = "clean\tcorrupt\tright\twrong\n"


@pytest.fixture(scope="module")
def bundled() -> BoundModel:
    return Spec(dtype="float64").build()


@pytest.fixture
def table(tmp_path: Any) -> Any:
    path = tmp_path / "pairs.tsv"
    path.write_text(HEAD + "The doors of the house\tThe door of the house\t are\t is\nThe boy\tThe boys\t is\t are\n")
    return path


def test_prompts_of_ioi_differ_in_one_word_and_come_equally_often() -> None:
    for how in ("swap", "abc"):
        found = ioi_pairs(24, how)
        assert found == ioi_pairs(24, how)
        assert found != ioi_pairs(24, how, seed=1)
        for each in found:
            clean, corrupt = (text.replace(",", "").replace(".", "").split() for text in (each.clean, each.corrupt))
            ((was, now),) = [(a, b) for a, b in zip(clean, corrupt, strict=True) if a != b]
            assert clean.count(was) == 2
            assert (f" {was}", clean.count(each.right[1:])) == (each.wrong, 1)
            assert now in NAMES
            assert (now == each.right[1:]) is (how == "swap")
        order = [each.clean.index(each.right[1:]) < each.clean.index(each.wrong[1:]) for each in found]
        assert sum(order) == 12


def test_prompts_of_agreement_turn_the_subjects_number() -> None:
    found = agreement_pairs(200)
    assert len({each.clean for each in found}) == 200
    for each in found:
        nouns = [(text.split()[1], text.split()[-1]) for text in (each.clean, each.corrupt)]
        assert nouns[0][1] == nouns[1][1]
        plural = nouns[0][0].endswith("s") and len(nouns[0][0]) > len(nouns[1][0])
        assert (each.right, each.wrong) == ((" are", " is") if plural else (" is", " are"))
    assert 0.3 < np.mean([each.right == " are" for each in found]) < 0.7


def test_correlations_are_scipys() -> None:
    from scipy.stats import pearsonr, spearmanr

    drawn = np.random.default_rng(0).integers(0, 9, (2, 50)).astype(float)
    assert abs(pearson(*drawn) - pearsonr(*drawn).statistic) < 1e-12
    assert abs(spearman(*drawn) - spearmanr(*drawn).statistic) < 1e-12


def test_areas_are_those_of_trapezoids_by_hand() -> None:
    curve = np.linspace(-0.5, 1.5, len(FRACTIONS))
    areas = [0.0, 0.0]
    for i in range(len(FRACTIONS) - 1):
        width = FRACTIONS[i + 1] - FRACTIONS[i]
        areas[0] += width * (curve[i] + curve[i + 1]) / 2
        areas[1] += width * (abs(1 - curve[i]) + abs(1 - curve[i + 1])) / 2
    assert abs(cpr(curve) - areas[0]) < 1e-12
    assert abs(cmd(curve) - areas[1]) < 1e-12
    assert recovery([[1.0, 3.0], [0.0, 2.0]], [3.0, 2.0], [1.0, 0.0]).tolist() == [0.0, 1.0]
    for full in (1.0, 1.0000001):  # but for rounding
        with pytest.raises(InputError, match="nothing can be recovered"):
            recovery([[1.0]], [full], [1.0])


def test_rows_hold_what_patching_finds(bundled: BoundModel, table: Any, tmp_path: Any) -> None:
    benchmark = Patching(data=str(table), kinds="attention,neurons", neurons=20)
    with keep(Run(benchmark, bundled, ["relp", "attribution-patching"]), tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
        rows = select(kept.store, [*kept.run.columns.names]).to_dicts()
    row = rows[0]
    pair = patching.pair_of(bundled, "The doors of the house", "The door of the house", " are", " is")
    at = row["layer/attention"], row["part/attention"]
    assert set(row["part/attention"]) == set(range(pair.first, len(pair)))  # nothing differs before
    truth = patching.exact(bundled, pair, "attention")
    np.testing.assert_allclose(row["exact/attention"], truth[at].numpy(), atol=1e-9)
    for name, recipe in (("relp", RELP), ("attribution-patching", GRADIENT)):
        scores = patching.attributed(bundled, pair, recipe, ["attention"])["attention"]
        np.testing.assert_allclose(row[f"score/attention/{name}"], scores[at].numpy(), atol=1e-9)
        wanted = np.corrcoef(scores[at].numpy(), truth[at].numpy())[0, 1]
        assert abs(row[f"Pearson/attention/{name}"] - wanted) < 1e-9
    assert len(set(zip(row["layer/neurons"], row["part/neurons"], strict=True))) == 20
    assert rows[1]["part/neurons"] != row["part/neurons"]
    means = [np.mean([each["Pearson/attention/relp"] for each in rows])]
    assert f"{means[0]:.3f}".replace("-", "−") in (tmp_path / "out/table.md").read_text()
    assert (tmp_path / "out/scatter.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out/report.html").read_text()
    assert f"{means[0]:.3f}".replace("-", "−") in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched


def test_effects_that_are_the_same_but_for_rounding_correlate_with_nothing(
    bundled: BoundModel, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the prompts differ in the last token alone, so the stream there is the whole difference after every layer; in
    # float32 the numbers of another batch are others in the last bits
    path = tmp_path / "pairs.tsv"
    path.write_text(HEAD + "The doors\tThe door\t are\t is\nThe girl saw the dogs\tThe girl saw the dog\t are\t is\n")

    def rounded(*given: Any, **how: Any) -> torch.Tensor:
        found = patching.exact(*given, **how)
        return found + 2e-8 * torch.arange(found.numel()).reshape(found.shape)

    monkeypatch.setattr("lrpx.benchmarks._patching.exact", rounded)
    benchmark = Patching(data=str(path), kinds="residual")
    with keep(Run(benchmark, bundled, ["relp"], part=1), tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
        rows = select(kept.store, ["exact/residual", "Pearson/residual/relp", "Spearman/residual/relp"])
    for row in rows.to_dicts():
        np.testing.assert_allclose(row["exact/residual"], row["exact/residual"][0], atol=1e-5)
        assert (row["Pearson/residual/relp"], row["Spearman/residual/relp"]) == (None, None)
    assert "none" in (tmp_path / "out/table.md").read_text()


def test_a_mean_over_some_of_the_pairs_says_of_how_many(bundled: BoundModel, tmp_path: Any) -> None:
    """In the second pair only the last token differs, so every layer's residual stream there does the same."""
    path = tmp_path / "pairs.tsv"
    path.write_text(HEAD + "The doors of the house\tThe door of the house\t is\t are\nThe door\tThe doors\t is\t are\n")
    benchmark = Patching(data=str(path), kinds="residual,heads")
    with keep(Run(benchmark, bundled, ["relp"], ["Pearson"]), tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
        (mean, missing) = select(kept.store, ["Pearson/residual/relp"])["Pearson/residual/relp"].to_list()
    assert missing is None
    first, *_ = (line for line in (tmp_path / "out/table.md").read_text().splitlines() if line.startswith("| RelP"))
    residual, heads = first.split("|")[2:4]
    assert residual.strip() == rf"{figure(mean)} \[{figure(mean)}, {figure(mean)}\], of 1"
    assert " of " not in heads
    assert "then of fewer pairs" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize("width", [26, 40, 60, 80, 200])
def test_no_number_is_cut_off_in_a_terminal(width: int) -> None:
    kinds, methods = ("attention", "mlp", "heads", "neurons"), ("AttnLRP", "Gradient × Input", "attribution patching")
    rows = [(name, [f"0.{i}{j}1 [−0.{i}{j}2, 0.{i}{j}3]" for j in range(4)]) for i, name in enumerate(methods)]
    grids = [Grid("Pearson", kinds, rows, "what it is"), Grid("The share", kinds, rows, "", wide=True)]
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal(Report("Patching", "model: 2 pairs", grids, b"", "scatter.png", "scores")))
    text = captured.get()
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    assert sorted(re.findall(r"−?0\.\d+", text)) == sorted(re.findall(r"−?0\.\d+", str(rows)))
    assert "Pearson" in text
    assert "what it is" in text


def test_a_killed_run_goes_on_with_the_same_rows(bundled: BoundModel, table: Any, tmp_path: Any) -> None:
    benchmark = Patching(data=str(table), kinds="mlp")

    def run() -> Run:
        return Run(benchmark, bundled, ["relp"], part=1)

    with keep(run(), tmp_path / "a") as kept:
        kept.explain()
    whole = [each.read_bytes() for each in kept.store.parts()]
    with keep(run(), tmp_path / "b") as kept:
        kept.store.keep("00001", kept.run.part(1))
    with keep(Run.from_spec(run().spec, model=bundled), tmp_path / "b") as kept:
        kept.explain()
    assert [each.read_bytes() for each in kept.store.parts()] == whole


@pytest.mark.parametrize(("whole", "edges"), [(False, 2500), (True, 385)])
def test_circuits_hold_the_best_edges_of_other_pairs(
    bundled: BoundModel, tmp_path: Any, whole: bool, edges: int
) -> None:
    benchmark = Circuits(data="agreement", limit=2, scored_on=2, whole=whole)
    run = Run(benchmark, bundled, ["relp", "random"])
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
        rows = select(kept.store, [*kept.run.columns.names]).to_dicts()
    given = agreement_pairs(4)
    pairs = [patching.pair_of(bundled, each.clean, each.corrupt, each.right, each.wrong) for each in given]
    assert [row["id"] for row in rows] == [given[2].id, given[3].id]
    graph = circuits.graph_of(bundled, pairs[0], whole=whole)
    assert graph.count == rows[0]["edges"] == edges
    mean = sum(circuits.scores(bundled, pair, graph, RELP) for pair in pairs[:2]) / 2
    kept_edges = circuits.chosen(graph, mean, int(0.1 * graph.count))
    wanted = circuits.run(bundled, pairs[2], graph, kept_edges[None])
    assert abs(rows[0]["circuits/relp"][FRACTIONS.index(0.1)] - float(wanted[0])) < 1e-9
    assert abs(rows[0]["circuits/relp"][-1] - rows[0]["value"]) < 1e-9  # the whole graph
    assert abs(rows[0]["circuits/relp"][0] - rows[0]["corrupt value"]) < 1e-9  # .1 % of the edges join nothing
    text = (tmp_path / "out/table.md").read_text()
    full, empty = ([row[name] for row in rows] for name in ("value", "corrupt value"))
    area = cpr(recovery([row["circuits/relp"] for row in rows], full, empty))
    assert f"{area:.3f}" in text


@pytest.mark.parametrize("named", [["relp"], ["exact", "relp"]])
def test_edges_are_patched_one_by_one_where_that_is_asked_for_whatever_methods_are_named(
    bundled: BoundModel, named: list[str]
) -> None:
    benchmark = Circuits(data="agreement", limit=1, scored_on=1, exact=True)
    assert {method.name for method in Run(benchmark, bundled, named).methods} == {"exact", "relp"}
    plain = Circuits(data="agreement", limit=1, scored_on=1)
    assert [method.name for method in Run(plain, bundled, ["relp"]).methods] == ["relp"]


@pytest.mark.slow
def test_circuits_are_the_same_whatever_ran_before_on_the_model(tmp_path: Any) -> None:
    """Other answers, another seed and other weights give other scores of the same pairs."""
    pairs = [(f"The {one} in the house", f"The {one}s in the house") for one in ("boy", "girl", "dog")]
    tables = {}
    for right, wrong in ((" is", " are"), (" ran", " the")):
        rows = "".join(f"{clean}\t{corrupt}\t{right}\t{wrong}\n" for clean, corrupt in pairs)
        tables[right] = tmp_path / f"{right.strip()}.tsv"
        tables[right].write_text(HEAD + rows)

    def made(model: BoundModel, right: str, seed: int = 0) -> Run:
        benchmark = Circuits(data=str(tables[right]), limit=1, scored_on=2, seed=seed)
        return Run(benchmark, model, ["attribution-patching", "random"])

    def found(*how: Any) -> Any:
        return made(*how).part(0)

    spec = Spec(dtype="float64")
    used = spec.build()
    before = found(used, " is")
    for how in ((" ran",), (" is", 7)):
        assert found(used, *how) == found(spec.build(), *how) != before

    run, other = made(used, " is"), spec.build()
    run.part(0)
    for model in (used, other):
        with torch.no_grad():
            for each in model.module.parameters():
                each.mul_(1 + 0.3 * torch.randn(each.shape, generator=torch.Generator().manual_seed(0)).double())
    assert run.part(0) == found(used, " is") == found(other, " is") != before


def test_what_is_no_pair_is_refused(bundled: BoundModel, tmp_path: Any) -> None:
    def refused(text: str) -> str:
        path = tmp_path / "bad.tsv"
        path.write_text(text)
        benchmark = Patching(data=str(path))
        with pytest.raises((InputError, DataError)) as error:
            benchmark.samples(benchmark.read(), bundled)
        return str(error.value)

    assert "bad.tsv:2: the clean text has 6 tokens and the corrupt one 3" in refused(
        HEAD + "The doors of the house\tThe door\t are\t is\n"
    )
    assert "bad.tsv:2" in refused(HEAD + "The doors\tThe door\t Bartholomew\t is\n")
    assert "the column 'wrong' is missing" in refused("clean\tcorrupt\tright\nThe keys\tThe key\t are\n")
    assert "has an empty column" in refused(HEAD + "The keys\tThe key\t are\t\n")
    assert "there is no line" in refused(HEAD)
    for wrong in ({"kinds": "mlp,mlp"}, {"kinds": "layers"}, {"limit": 0}, {"neurons": 2}, {"data": "io"},
                  {"corrupt": "cba"}):  # fmt: skip
        with pytest.raises(InputError):
            Patching(**wrong).check()
    with pytest.raises(MethodError, match="is no recipe"):
        Run(Patching(), bundled, ["alti-logit"])
    path = tmp_path / "one.tsv"
    path.write_text(HEAD + "The doors\tThe door\t are\t is\n")
    assert read_pairs(path)[0].line == 2
    few = Circuits(data=str(path))
    with pytest.raises(InputError, match="give a smaller scored_on"):
        few.samples(few.read(), bundled)


@pytest.mark.parametrize("benchmark", [Patching(), Circuits()])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_refused(benchmark: Any, dtype: str) -> None:
    """Most parts move the value by less than it is rounded to there, and the truth would be rounding."""
    with pytest.raises(ModelError, match=f"runs in {dtype}, .* {benchmark.name} would measure rounding; .* float32"):
        Run(benchmark, Spec(dtype=dtype).build(), ["lrp"])


def test_answers_inside_words_are_told(bundled: BoundModel, tmp_path: Any) -> None:
    """``are`` is another token than `` are``, and mostly not what is meant."""
    path = tmp_path / "pairs.tsv"

    def statistics(right: str, wrong: str) -> Any:
        path.write_text(f"{HEAD}The doors of the house\tThe door of the house\t{right}\t{wrong}\n")
        made = Patching(data=str(path))
        return made.samples(made.read(), bundled).statistics

    assert statistics("are", "is")[INSIDE] == statistics(" are", "is")[INSIDE] == 1
    assert INSIDE not in statistics(" are", " is")
    assert INSIDE not in statistics(".", ",")


def test_the_command_refuses_in_one_line(run: Any, tmp_path: Any) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(HEAD + "The doors of the house\tThe door\t are\t is\n")
    code, _, err = run("benchmark", "patching", "--data", path, "--out", tmp_path / "out")
    lines = [line for line in err.splitlines() if line.startswith("lrpx: ")]
    assert (code, len(lines)) == (2, 1)
    assert f"{path}:2: the clean text has 6 tokens and the corrupt one 3" in lines[0]
    assert "Traceback" not in err
    code, _, err = run("benchmark", "circuits", "--data", "io", "--out", tmp_path / "out")
    assert (code, err) == (2, "lrpx: there is no data 'io'; name ioi, agreement, or a table of pairs\n")
