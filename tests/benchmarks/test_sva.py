"""The agreement benchmark from end to end: what is in its rows, on real models of both kinds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import lrpx
from lrpx import recipes
from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._agreement import Agreement
from lrpx.benchmarks._ground_truth import draws
from lrpx.errors import InputError, MethodError, ModelError, NonFiniteError
from lrpx.methods import METHODS as REGISTERED
from lrpx.methods import Backward
from lrpx.model import BUNDLED
from lrpx.rules import Gamma
from tests import tiny

SENTENCES = Path(__file__).parent / "data" / "sentences.conllu"
METHODS = Agreement.methods
METRICS = ("PG2", "MRR", "RMA", "PTA")


def explained(explainer, folder, data=(SENTENCES,), methods=None, batch_size=32, **options):
    """The rows of a whole run."""
    run = Run(Agreement(list(data), **options), explainer.bound, methods, batch_size=batch_size)
    done = []
    with keep(run, folder) as kept:
        kept.explain(done.append)
    assert sum(done) == len(run)
    found = pl.read_parquet(folder / "rows" / "*.parquet")
    assert len(found) == len(run)
    return found


@pytest.fixture(scope="module")
def explainer():
    return lrpx.Explainer.from_pretrained()


@pytest.fixture(scope="module")
def frame(explainer, tmp_path_factory):
    return explained(explainer, tmp_path_factory.mktemp("sva"))


@pytest.fixture(scope="module")
def bert(minilm):
    """A tiny random BERT with the real tokenizer."""
    torch.manual_seed(0)
    sizes = tiny.SIZES | {"vocab_size": 30522}
    model = tf.BertForMaskedLM(tf.BertConfig(**sizes)).eval()
    return lrpx.Explainer(model, tf.AutoTokenizer.from_pretrained(minilm))


# ------------------------------------------------------------------------------ rows


def test_a_row_says_what_the_model_reads_and_what_it_should_find(frame):
    found = frame.row(0, named=True)
    assert found["id"] == "sentences:1.6"
    assert "".join(found["tokens"][1:]) == "The keys to the cabinet"
    assert "".join(found["tokens"][i] for i in found["ground_truth"]).strip() == "keys"
    assert (found["right"], found["wrong"], found["attractors"]) == ("lie", "lies", 1)
    assert found["position"] == len(found["tokens"]) - 1
    assert len(frame["id"].unique()) == len(frame) == 14
    assert frame["id"].to_list() == sorted(frame["id"], key=lambda name: [int(n) for n in name[10:].split(".")])


def test_the_relevance_is_the_explainers(explainer, frame):
    for found in frame[::4].iter_rows(named=True):
        text = "".join(found["tokens"][1:])
        forms = [" " + found["right"], " " + found["wrong"]]
        for method in METHODS:
            alone = explainer(text, *(forms if found["correct"] else forms[::-1]), method)
            scale = float(alone.relevance.abs().max())
            assert found[f"relevance/{method}"] == pytest.approx(alone.relevance.tolist(), abs=1e-4 * scale)
        assert abs(found["logit_difference"]) == pytest.approx(alone.explained.value, rel=1e-4)
        assert found["correct"] == (found["logit_difference"] > 0)


def test_the_metrics_are_those_of_the_relevance(frame):
    for found in frame.iter_rows(named=True):
        truth = np.isin(np.arange(len(found["tokens"])), found["ground_truth"])
        for method in METHODS:
            relevance = np.array(found[f"relevance/{method}"])
            ranks = (relevance[:, None] < relevance[None]).sum(1) + 1  # no two are tied
            assert sorted(ranks) == list(range(1, len(ranks) + 1))
            first, positive = ranks[truth].min(), relevance.clip(0)
            share, signs = positive[truth].sum() / positive.sum(), (relevance > 0) == truth
            wanted = float(first <= 2), 1 / first, share, signs.mean()
            assert [found[f"{metric}/{method}"] for metric in METRICS] == pytest.approx(wanted)


def test_what_is_explained_is_the_preferred_form_even_where_it_is_wrong(bert, tmp_path):
    frame = explained(bert, tmp_path, methods=["gradient-x-input"])
    assert set(frame["correct"]) == {True, False}  # a random model
    for found in frame.iter_rows(named=True):
        ids = bert.tokenizer.convert_tokens_to_ids([found["right"], found["wrong"]])
        read = bert.tokenizer.convert_tokens_to_ids([t.strip() for t in found["tokens"]])
        chosen = ids if found["correct"] else ids[::-1]
        alone = bert(read, *chosen, "gradient-x-input", position=found["position"])
        assert alone.explained.value == pytest.approx(abs(found["logit_difference"]), rel=1e-3, abs=1e-6)
        assert found["relevance/gradient-x-input"] == pytest.approx(alone.relevance.tolist(), abs=1e-5)


def test_a_masked_model_reads_the_whole_sentence(bert, tmp_path):
    frame = explained(bert, tmp_path)
    found = frame.row(1, named=True)
    assert [t.strip() for t in found["tokens"]] == (
        "[CLS] the author of the books [MASK] in a small house . [SEP]".split()
    )
    assert found["tokens"][found["position"]].strip() == "[MASK]"
    assert found["ground_truth"] == [2]
    assert all(len(found[f"relevance/{method}"]) == len(found["tokens"]) for method in METHODS)


@pytest.mark.parametrize(("side", "batch_size"), [pytest.param("right", 1, marks=pytest.mark.slow), ("left", 5)])
def test_batches_change_nothing_but_rounding(explainer, frame, tmp_path, side, batch_size):
    other = lrpx.Explainer(explainer.model, explainer.tokenizer, padding_side=side)
    alone = explained(other, tmp_path, batch_size=batch_size)
    for column in frame.columns:
        if column.startswith("relevance/"):
            pairs = zip(alone[column].to_list(), frame[column].to_list(), strict=True)
            assert all(a == pytest.approx(b, abs=1e-4 * max(map(abs, b))) for a, b in pairs)
        elif column.endswith("/random") or column in Agreement([]).facts.names:
            assert alone[column].to_list() == frame[column].to_list()


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_precisions(frame, tmp_path, dtype):
    explainer = lrpx.Explainer.from_pretrained(dtype=dtype)
    found = explained(explainer, tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["dtype"] == dtype
    for metric in METRICS:
        assert found[f"{metric}/attnlrp"].mean() == pytest.approx(frame[f"{metric}/attnlrp"].mean(), abs=0.08)


def test_stories260k(shared_data, tmp_path):
    """A vocabulary of 512: most verbs are several tokens, and are dropped by name."""
    folder = shared_data / "models" / "stories260K" / "hf"
    explainer = lrpx.Explainer.from_pretrained(str(folder))
    if explainer.tokenizer is None:
        with pytest.raises(ModelError, match="tokenizer"):
            explained(explainer, tmp_path)
        return
    frame = explained(explainer, tmp_path, [shared_data / "agreement" / "en_ewt-ud-dev.conllu"], limit=200)
    dropped = pl.read_parquet(tmp_path / "dropped.parquet")
    assert set(dropped["stage"]) == {"source", "tokenizer"}
    assert len(frame) + len(dropped.filter(stage="tokenizer")) == 200


def test_a_treebank(explainer, shared_data, tmp_path):
    frame = explained(explainer, tmp_path, [shared_data / "agreement" / "en_ewt-ud-dev.conllu"], limit=40)
    assert 30 < len(frame) <= 40
    assert frame["correct"].mean() > 0.7
    right = frame.filter("correct")
    assert right["MRR/attnlrp"].mean() > right["MRR/random"].list.mean().mean()


# ------------------------------------------------------------------------------ random


@given(st.text(min_size=1), st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_draws(name, length):
    found = draws(name, length)
    assert found.shape == (10, length)
    assert (found >= -1).all()
    assert (found < 1).all()
    assert (found == draws(name, length)).all()
    assert len({tuple(row) for row in found.tolist()}) == 10
    assert (found != draws(name + "0", length)).any()


def test_draws_are_uniform():
    found = draws("dev:1", 20_000)
    assert np.histogram(found, bins=10, range=(-1, 1))[0] / found.size == pytest.approx(0.1, abs=0.005)


# ------------------------------------------------------------------------------ choices


def test_only_and_limit_choose_samples(explainer, tmp_path):
    (tmp_path / "ids.txt").write_text("sentences:12.9\nsentences:5.9\n")
    some = explained(explainer, tmp_path / "only", only=tmp_path / "ids.txt", methods=["lrp"])
    assert some["id"].to_list() == ["sentences:5.9", "sentences:12.9"]
    first = explained(explainer, tmp_path / "limit", limit=3, methods=["lrp"])
    assert first["id"].to_list() == ["sentences:1.6", "sentences:2.6", "sentences:3.6"]


def test_several_files_follow_each_other(explainer, tmp_path):
    other = tmp_path / "more.conllu"
    other.write_bytes(SENTENCES.read_bytes())
    frame = explained(explainer, tmp_path / "out", [other, SENTENCES], limit=20, methods=["lrp"])
    assert [name.split(":")[0] for name in frame["id"]] == ["more"] * 14 + ["sentences"] * 6
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["sources"] == ["more.conllu", "sentences.conllu"]
    assert record["counts"]["kept"] == 20


def test_a_table_with_parses(explainer, tmp_path):
    """Goldberg's format, its sentences parsed elsewhere: the trees of the treebank itself."""
    line = (
        "1\tThe keys to the cabinet lie on the table .\tThe keys to the cabinet ***mask*** on the table .\tlie\tlies\n"
    )
    (tmp_path / "a.tsv").write_text(line)
    frame = explained(explainer, tmp_path / "out", [tmp_path / "a.tsv"], parses=SENTENCES, methods=["lrp"])
    assert frame["id"].to_list() == ["a:1"]


def test_samples_longer_than_the_context_are_dropped(minilm, tmp_path):
    sizes = tiny.SIZES | {"vocab_size": 30522, "max_position_embeddings": 12}
    model = tf.BertForMaskedLM(tf.BertConfig(**sizes)).eval()
    explainer = lrpx.Explainer(model, tf.AutoTokenizer.from_pretrained(minilm))
    frame = explained(explainer, tmp_path, methods=["lrp"])
    assert frame["tokens"].list.len().max() == 12
    dropped = pl.read_parquet(tmp_path / "dropped.parquet").filter(
        pl.col("reason").str.contains("context of 12 tokens")
    )
    assert len(frame) + len(dropped) == 14
    assert len(dropped) > 0


# ------------------------------------------------------------------------------ errors


def test_a_number_that_is_not_finite_names_the_sample(tmp_path):
    explainer = lrpx.Explainer.from_pretrained()
    bride = explainer.tokenizer(" bride", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        explainer.model.get_input_embeddings().weight[bride[0]] = torch.inf
    explainer.model.lm_head.weight = torch.nn.Parameter(explainer.model.lm_head.weight.nan_to_num(posinf=0.0))
    with pytest.raises(NonFiniteError, match=r"sample sentences:13\.6: "):
        explained(explainer, tmp_path)


def test_what_cannot_run_is_refused_before_any_work(explainer, tmp_path):
    def run(model, data=(SENTENCES,), **options):
        Run(Agreement(list(data)), lrpx.Explainer(*model).bound, **options)

    own = explainer.model, explainer.tokenizer
    with pytest.raises(MethodError, match="there is no method 'magic'"):
        run(own, methods=["lrp", "magic"])
    with pytest.raises(MethodError, match="the methods are none"):
        run(own, methods=[])
    with pytest.raises(MethodError, match="the methods are lrp, lrp; name one or more, each once"):
        run(own, methods=["lrp", "cp-lrp"])
    with pytest.raises(MethodError, match="a method is called 'random', as the baseline is"):
        run(own, methods=[Backward("random", recipes.LRP)])
    with pytest.raises(InputError, match="there is no metric 'magic'"):
        run(own, metrics=["magic"])
    with pytest.raises(InputError, match="batch_size is 0"):
        run(own, batch_size=0)
    with pytest.raises(ModelError, match="is a sequence classifier, and sva asks a causal language model or a masked"):
        run((tiny.bert_classifier(),))
    with pytest.raises(ModelError, match="no tokenizer"):
        run((tiny.roberta(),))
    with pytest.raises(ModelError, match="training mode"):
        run((tiny.roberta().train(), explainer.tokenizer))
    with pytest.raises(InputError, match=r"2 files are named 'sentences\.conllu'"):
        run(own, [SENTENCES, SENTENCES])


def test_a_tokenizer_of_another_model_is_refused(explainer, tmp_path):
    other = lrpx.Explainer(tiny.neox(), explainer.tokenizer)
    with pytest.raises(InputError, match=r"outside the model's vocabulary.*sample sentences"):
        explained(other, tmp_path)


# ------------------------------------------------------------------------------ the command


def test_the_command_shows_the_table_and_names_the_files(run, tmp_path):
    out = tmp_path / "out"
    code, text, err = run(
        "benchmark", "sva", "--data", SENTENCES, "--out", out, "--methods", "attnlrp, lrp", "--show", "sentences:3.6"
    )
    assert (code, err) == (0, "")
    assert "kept: 14" in text
    assert "tokens, mean: " in text
    assert "AttnLRP" in text
    assert "ALTI" not in text
    assert all(f"{metric} ↑" in text for metric in METRICS)
    for name in ("table.md", "report.html", "table.tex", "heatmaps.tex"):
        assert str(out / name) in text.replace("\n", "")
        assert (out / name).stat().st_size
    assert json.loads((out / "run.json").read_text())["command"].startswith("lrpx benchmark sva --data ")


def test_a_recipe_in_a_file_is_a_method(run, tmp_path, explainer):
    recipe = replace(recipes.LRP.at("*.mlp", linear=Gamma(0.25)), name="gamma")
    recipe.save(tmp_path / "gamma.json")
    out = tmp_path / "out"
    code, _, err = run(
        "benchmark", "sva", "--data", SENTENCES, "--methods", f"lrp,{tmp_path / 'gamma.json'}", "--out", out
    )
    assert (code, err) == (0, "")
    found = pl.read_parquet(out / "rows" / "*.parquet").row(0, named=True)
    alone = explainer("".join(found["tokens"][1:]), " lie", " lies", recipe)
    assert found["relevance/gamma"] == pytest.approx(alone.relevance.tolist(), rel=1e-3)
    assert found["relevance/gamma"] != pytest.approx(found["relevance/lrp"], rel=1e-2)
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert settings["methods"] == ["lrp", "gamma"]
    assert "0.25" in settings["described"]["gamma"]


def test_a_perturbation_stands_beside_the_propagations(run, tmp_path, explainer):
    """Leave-one-out: each sample asks the model again, as often as it has tokens."""
    out = tmp_path / "out"
    options = ("--methods", "leave-one-out,lrp", "--limit", 3, "--out", out)
    code, text, err = run("benchmark", "sva", "--data", SENTENCES, *options)
    assert (code, err) == (0, "")
    assert "Leave-one-out" in text
    found = pl.read_parquet(out / "rows" / "*.parquet").row(0, named=True)
    ids = explainer.tokenizer("".join(found["tokens"][1:]), return_tensors="pt")["input_ids"][0]
    assert len(ids) == len(found["tokens"])
    forms = [explainer.bound.index(f" {found[name]}") for name in ("right", "wrong")]

    def value(mask):
        with torch.no_grad():
            logits = explainer.model(input_ids=ids[None], attention_mask=mask[None]).logits[0, -1, forms]
        return (logits[0] - logits[1]).item()

    every = torch.ones_like(ids)
    wanted = [value(every) - value(every - torch.eye(len(ids), dtype=torch.int64)[i]) for i in range(len(ids))]
    sign = 1 if found["correct"] else -1
    assert found["relevance/leave-one-out"] == pytest.approx([sign * each for each in wanted], abs=1e-3)


SCRIPT = """
from dataclasses import dataclass
import torch
from lrpx.methods import Found, Method, register

@register
@dataclass(frozen=True)
class Third(Method):
    name: str = "third"
    label: str = "The <third>"

    def describe(self):
        return "the third token, %s"

    def attribute(self, model, questions, *, ledger=False):
        lengths = [questions.row_of(i).lengths[0] for i in range(len(questions))]
        return Found(model.ask(questions), tuple(1.0 * (torch.arange(n) == 2) for n in lengths))
"""


def test_a_method_in_a_script_stands_in_rows_and_reports(run, tmp_path, monkeypatch):
    monkeypatch.setattr(REGISTERED, "_found", dict(REGISTERED))
    script, out = tmp_path / "third.py", tmp_path / "out"
    script.write_text(SCRIPT % "once")
    command = ("benchmark", "sva", "--data", SENTENCES, "--methods", f"{script},lrp", "--out", out)
    code, text, err = run(*command)
    assert (code, err) == (0, "")
    assert "The <third>" in text
    frame = pl.read_parquet(out / "rows" / "*.parquet")
    assert all(each == [0.0, 0.0, 1.0, *[0.0] * (len(each) - 3)] for each in frame["relevance/third"].to_list())
    found = frame["ground_truth"].list.contains(2).to_list()
    assert [value == 1.0 for value in frame["MRR/third"]] == found
    assert set(found) == {True, False}
    assert r"| The \<third\> |" in (out / "table.md").read_text()
    assert "The &lt;third&gt;" in (out / "report.html").read_text()
    assert r"{The \textless{}third\textgreater{}}" in (out / "table.tex").read_text()
    # the same name, another method
    script.write_text(SCRIPT % "twice")
    code, _, err = run(*command)
    assert code == 2
    assert 'described third was "the third token, once" and is "the third token, twice" now' in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--data": "missing.tsv"}, "cannot read missing.tsv"),
        ({"--only": "missing.txt"}, "cannot read missing.txt"),
        ({"--methods": "magic"}, "there is no method 'magic'"),
        ({"--metrics": "magic"}, "there is no metric 'magic'"),
        ({"--model": "no-such/model"}, "no-such/model"),
        ({"--dtype": "float99"}, "there is no dtype 'float99'"),
        ({"--out": SENTENCES / "out"}, "name another folder"),
        ({"--parser": "en_core_web_trf"}, "leave the parser and the parses out"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(run, tmp_path, options, message):
    given = {"--data": SENTENCES, "--out": tmp_path / "out"} | options
    code, out, err = run("benchmark", "sva", *(each for pair in given.items() for each in pair))
    assert (code, out) == (2, "")
    assert err.startswith("lrpx: ")
    assert err.count("\n") == 1
    assert message in err


def test_ids_of_a_file(run, tmp_path):
    wanted = ["sentences:2.6", "sentences:4.6"]
    (tmp_path / "ids.txt").write_text("\n\n".join(wanted) + "\n")
    options = ("--only", tmp_path / "ids.txt", "--methods", "lrp", "--dtype", "float64")
    assert run("benchmark", "sva", "--data", SENTENCES, "--out", tmp_path / "out", *options)[0] == 0
    assert pl.read_parquet(tmp_path / "out" / "rows" / "*.parquet")["id"].to_list() == [
        "sentences:2.6",
        "sentences:4.6",
    ]


def test_without_the_extra_the_error_says_how_to_get_it(run, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("lrpx.benchmarks", "lrpx.runs"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = run("benchmark", "sva", "--data", SENTENCES, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == "lrpx: the benchmarks need pyarrow and polars: pip install 'lrpx[benchmarks]'\n"


def test_the_bundled_model_has_a_name(frame, explainer, tmp_path):
    explained(explainer, tmp_path, limit=1, methods=["lrp"])
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["settings"]["model"] == "lrpx bundled model"
    assert str(BUNDLED) not in (tmp_path / "run.json").read_text()
