"""The command line, run for real on the bundled model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lrpx
from lrpx.cli import _streams

DOORS = ["The doors of the house", "--target", " are", "--contrast", " is"]


def test_explain_shows_the_heatmap_with_its_numbers(run):
    code, out, err = run("explain", *DOORS)
    assert (code, err) == (0, "")
    assert "logit of ' are' − logit of ' is'" in out
    assert "doors" in out


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
