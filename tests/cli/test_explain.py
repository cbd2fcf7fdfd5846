"""The command line, run for real on the bundled model."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lrpx
from lrpx.cli import _streams
from tests.cli.commands import finish, start

DOORS = ["The doors of the house", "--target", " are", "--contrast", " is"]


def test_explain_shows_the_heatmap_with_its_numbers(run):
    code, out, err = run("explain", *DOORS)
    assert (code, err) == (0, "")
    assert "logit of ' are' − logit of ' is'" in out
    assert "doors" in out


def test_a_terminal_that_says_it_has_no_width(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    code, out, _ = run("explain", *DOORS)
    assert code == 0
    assert "logit of ' are' − logit of ' is'" in out


def test_the_numbers_are_the_librarys(run, tmp_path):
    code, _, _ = run("explain", *DOORS, "--method", "lrp", "--json", str(tmp_path / "a.json"))
    assert code == 0
    found = json.loads((tmp_path / "a.json").read_text())
    wanted = lrpx.Explainer.from_pretrained()(DOORS[0], " are", " is", "lrp")
    assert found["parts"]["tokens"]["values"] == pytest.approx(wanted.relevance.tolist(), rel=1e-6)
    assert tuple(found["tokens"]) == wanted.tokens
    assert found["prediction"]["text"] == wanted.prediction.text


def test_html_is_written(run, tmp_path):
    page = tmp_path / "a.html"
    assert run("explain", *DOORS, "--html", str(page))[0] == 0
    assert "doors" in page.read_text()


def test_the_ledger_is_printed_and_goes_into_every_file(run, tmp_path):
    page, numbers, result = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.safetensors"
    files = ("--html", str(page), "--json", str(numbers), "--save", str(result))
    code, out, err = run("explain", *DOORS, "--ledger", *files)
    assert (code, err) == (0, "")
    assert "where the value came from" in out
    assert "softmax residue" in out
    assert "It closes to the precision of float32" in out
    saved = lrpx.Attribution.load(result)
    assert saved.ledger.closes(1e-4)
    assert json.loads(numbers.read_text())["ledger"]["explained"] == saved.explained.value
    assert "Where the value came from" in page.read_text()
    code, out, _ = run("explain", *DOORS, "--save", str(result))
    assert "where the value came from" not in out
    assert lrpx.Attribution.load(result).ledger is None


def test_a_ledger_that_no_method_can_give_is_refused(run):
    code, out, err = run("explain", *DOORS, "--ledger", "--method", "gradient-l1")
    assert (code, out) == (2, "")
    assert "leave --ledger out, or use attnlrp" in err


def test_a_dash_reads_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The doors of the house\n")))
    code, out, _ = run("explain", "-", "--target", " are")
    assert code == 0
    assert "doors" in out


def test_dtype_and_a_model_folder(run, tmp_path):
    import transformers

    from lrpx.model import BUNDLED

    model = transformers.AutoModelForCausalLM.from_pretrained(str(BUNDLED))
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(str(BUNDLED)).save_pretrained(tmp_path)
    target = str(tmp_path / "a.json")
    assert run("explain", *DOORS, "--model", str(tmp_path), "--dtype", "float64", "--json", target)[0] == 0
    assert json.loads(Path(target).read_text())["provenance"]["dtype"] == "float64"


def test_version(run):
    assert run("--version")[:2] == (0, f"lrpx {lrpx.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the text is empty"),
        (["word " * 600], "context is 512; shorten it"),
        (["Hello", "--target", " antidisestablishmentarian"], "pass one of them"),
        (["Hello", "--target", " are", "--contrast", " are"], "pass another contrast"),
        (["Hello", "--method", "magic"], "the methods are attnlrp"),
        (["Hello", "--model", "no-such/model"], "no-such/model"),
        (["Hello", "--html", "missing-folder/a.html"], "there is no folder missing-folder; create it first"),
        (["Hello", "--save", "missing-folder/a.safetensors"], "there is no folder missing-folder; create it first"),
        (["Hello", "--json", "missing-folder/a.json"], "there is no folder missing-folder; create it first"),
        (["Hello", "--dtype", "float99"], "there is no dtype 'float99'"),
        (["Hello", "--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run("explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lrpx: ")
    assert err.count("\n") == 1
    assert message in err


def test_as_a_process_there_is_no_traceback():
    done = subprocess.run(
        [sys.executable, "-c", "from lrpx.cli import main; main()", "explain", " "],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("lrpx: the text is empty")  # after the progress of a slow machine
    assert "Traceback" not in done.stderr


def test_progress_is_shown_only_when_it_takes_long(run, monkeypatch):
    assert run("explain", *DOORS)[2] == ""
    monkeypatch.setattr(_streams, "PATIENCE", 0.0)
    assert "Loading the model" in run("explain", *DOORS)[2]


def test_a_word_and_its_letters_are_two_tokens(run):
    """' are' is meant where 'are' was given: said, where both are tokens, and demanded, where only the word is one."""
    code, out, err = run("explain", DOORS[0], "--target", "are", "--contrast", " is")
    assert code == 0
    assert "logit of 'are'" in out
    assert err == "lrpx: 'are' is a token inside words; the word itself is another: --target ' are'\n"
    code, out, err = run("explain", DOORS[0], "--target", " are", "--contrast", "were")
    assert (code, out) == (2, "")
    assert err == "lrpx: --contrast 'were' is not one token, but the word ' were' is; pass --contrast ' were'\n"
    code, _, err = run("explain", DOORS[0], "--target", " are", "--contrast", " were")
    assert (code, err) == (0, "")


def test_where_the_rest_of_the_value_went_is_one_line(run):
    _, out, _ = run("explain", *DOORS)
    a = lrpx.Explainer.from_pretrained()(DOORS[0], " are", " is")
    missing = a.explained.value - float(a.relevance.sum())
    assert abs(missing) > 0.02 * abs(a.explained.value)
    told = " ".join(out[out.rindex("the other") :].split())
    assert told.startswith(f"the other {missing:+.4g} (")
    assert told.endswith("from positions, biases or what rules keep: --ledger shows it")
    assert "the other" not in run("explain", *DOORS, "--ledger")[1]
    assert "the other" not in run("explain", *DOORS, "--method", "gradient-l1")[1], "its ledger would be refused"


def test_methods_stand_side_by_side(run, tmp_path):
    several = ("--method", "lrp", "--method", "attnlrp", "--method", "gradient-l1")
    code, out, err = run("explain", *DOORS, *several, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    assert (code, err) == (0, "")
    explainer = lrpx.Explainer.from_pretrained()
    (heads,) = (line.split()[1:] for line in out.splitlines() if line.startswith("strongest"))
    assert heads == ["lrp", "attnlrp", "gradient-l1"]
    (row,) = (line.split() for line in out.splitlines() if line.startswith("doors "))
    found = json.loads((tmp_path / "a.json").read_text())
    for name, shown, plain in zip(heads, row[1:], found, strict=True):
        wanted = explainer(DOORS[0], " are", " is", name)
        assert float(shown) == pytest.approx(float(wanted.relevance[2]), rel=0.01, abs=0.006)
        assert plain["parts"]["tokens"]["values"] == pytest.approx(wanted.relevance.tolist(), rel=1e-5)
    page = (tmp_path / "a.html").read_text()
    assert "3 explanations" in page
    assert all(f"<bdi>{name}</bdi>" in page for name in heads)
    (shares,) = (line.split() for line in out.splitlines() if line.startswith("of the value"))
    assert len(shares) == 3 + 2, "no share of what is in other units"


def test_the_ledger_of_each_method_is_shown(run):
    code, out, err = run("explain", *DOORS, "--method", "lrp", "--method", "alti-logit", "--ledger")
    assert (code, err) == (0, "")
    assert out.count("where the value came from") == 2


def test_numbers_that_are_no_parts_of_the_value_have_no_share_of_it(run, tmp_path):
    """The norm of a gradient is no part of a logit, and 5,770 % of it says nothing."""
    files = ("--html", tmp_path / "a.html", "--save", tmp_path / "a")
    for name, has_shares in (("gradient-l1", False), ("leave-one-out", False), ("attnlrp", True)):
        code, out, err = run("explain", *DOORS, "--method", name, *files)
        assert (code, err) == (0, "")
        assert lrpx.Attribution.load(tmp_path / "a").is_decomposition == has_shares
        page = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", (tmp_path / "a.html").read_text(), flags=re.S)
        for shown in (out, page):
            beside = [part for part in re.findall(r"[\d.]+%", shown) if part != "100%"]
            assert (len(beside) > 1) == has_shares, "one is the prediction's probability"
        assert ("Of the value" in page) == has_shares


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (["--words"], lambda e: e(DOORS[0]).words()),
        (["--position", "2"], lambda e: e(DOORS[0], position=2)),
        (["--position", "-2"], lambda e: e(DOORS[0], position=-2)),
        (["--recompute"], lambda e: e(DOORS[0])),
        (["--target-id", "262", "--contrast-id", "300"], lambda e: e(DOORS[0], 262, 300)),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_options_are_the_librarys(run, options, same):
    code, out, err = run("explain", DOORS[0], *options, "--json", "-")
    assert (code, err) == (0, "")
    found, wanted = json.loads(out), same(lrpx.Explainer.from_pretrained())
    assert found["tokens"] == list(wanted.tokens)
    assert found["explained"]["description"] == wanted.explained.description
    assert found["parts"]["tokens"]["values"] == pytest.approx(wanted.relevance.tolist(), rel=1e-5, abs=1e-6)


def test_an_unknown_revision_is_looked_for(run):
    """Offline there is none in the cache; that it is asked for shows in the error."""
    code, _, err = run("explain", "Hello", "--model", "no-such/model", "--revision", "v1")
    assert code == 2
    assert "no-such/model" in err


def test_no_memory_is_told_with_what_to_do(run, monkeypatch):
    def none(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lrpx.Explainer, "__call__", none)
    code, _, err = run("explain", *DOORS)
    assert (code, err) == (2, "lrpx: there is not enough memory for this text; shorten it, or use --recompute\n")


@pytest.mark.slow
def test_a_warning_is_one_line(tmp_path):
    """As one of a method's own."""
    script = tmp_path / "warns.py"
    script.write_text(
        "import warnings\nimport lrpx\nfrom lrpx.methods import Backward\n"
        "warnings.warn('the numbers\\nare odd', stacklevel=2)\n"
        "lrpx.register(Backward('odd', lrpx.LRP))\n"
    )
    code, out, err = finish(start("explain", "Hello", "--method", script))
    assert (code, err) == (0, "lrpx: the numbers are odd\n")
    assert "odd" in out
