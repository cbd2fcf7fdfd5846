"""Mistakes that need no model are told before one is loaded: the one that is named here is not there."""

from __future__ import annotations

import numpy as np
import pytest

from lrpx.cli import main
from lrpx.model import Spec

NOWHERE = "there is no folder"
FILES = {
    "texts.tsv": "text\tlabel\nThe doors\t1\nThe keys\t0\n",
    "other.csv": "a,b\n1,2\n",
    "empty.txt": "\n \n",
    "pairs.csv": "clean,corrupt,right\na,b,c\n",
    "questions.json": "[]",
    "file": "x",
    "pictures/a.png": "no image",
    "pictures.csv": "image,label\nnone.png,dog\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("mistakes")
    (found / "pictures").mkdir()
    for name, content in FILES.items():
        (found / name).write_text(content)
    np.savez(found / "flat.npz", x=np.zeros((2, 4), np.uint8))
    np.savez(found / "labels.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.zeros(3))
    (found / "broken.npz").write_bytes(b"PK\x03\x04")
    np.savez_compressed(found / "cut.npz", x=np.random.default_rng(0).integers(0, 255, (4, 9, 9), np.uint8))
    whole = (found / "cut.npz").read_bytes()
    (found / "cut.npz").write_bytes(whole[:90] + bytes(60) + whole[150:])
    with (found / "one.npz").open("wb") as file:
        np.save(file, np.zeros((2, 4, 4), np.uint8))
    return found


SMOOTH = ("tune", "--method", "smoothgrad", "--out", "o")
PIXELS = ("benchmark", "pixels", "--out", "o")
TEXTS = ("benchmark", "faithfulness", "--out", "o", "--data", "texts.tsv")


def changed(command, *more):
    """A command with other values of its options."""
    first = next(at for at, each in enumerate(command) if each.startswith("--"))
    options = [*command[first:], *more]
    return *command[:first], *(
        each for pair in dict(zip(options[::2], options[1::2], strict=True)).items() for each in pair
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("explain", "--texts", "empty.txt"), "empty.txt has no text; write one a line"),
        (("explain", "--texts", "texts.tsv"), "texts.tsv is a table, and --texts reads a text a line"),
        (
            ("explain", "--texts", "other.csv"),
            "or pipe the column in, as by cut -f 2 table.tsv | lrpx explain --texts -",
        ),
        (("check", "--method", "lrp", "--method", "cp-lrp"), "the methods are lrp, lrp; name one or more, each once"),
        (("check", "--seed", 2**32), "invalid value for '--seed'"),
        (("neurons", "flow", "The", "--target", "a", "--contrast", "a"), "the contrast 'a' is the target itself"),
        (("neurons", "rank", "The", "--target-id", "3", "--contrast-id", "3"), "the contrast 3 is the target itself"),
        (("neurons", "flow", "The", "--target", ""), "--target is empty; pass the text of one token"),
        (("neurons", "turn", "The", "--set", "1:2=nan"), "what is to set is nan; pass a finite number"),
        (("neurons", "turn", "The", "--clamp", "1:2=3,1"), "Clamp(3.0, 1.0) lets nothing through"),
        (("neurons", "collect", "--data", "empty.txt", "--out", "o"), "there is no text in empty.txt"),
        (("neurons", "collect", "--data", "other.csv", "--out", "o"), "no column 'text', only 'a', 'b'"),
        (("neurons", "collect", "--data", "texts.tsv", "--out", "file"), "cannot write in file: file is no folder"),
        ((*SMOOTH, "--data", "empty.txt"), "there is no text in empty.txt"),
        ((*SMOOTH, "--data", "texts.tsv", "--perturbation", "unk,pad"), "a search is by one number"),
        (changed(SMOOTH, "--data", "texts.tsv", "--out", "file"), "cannot write in file: file is no folder"),
        (("tune", "--method", "random", "--out", "o", "--data", "texts.tsv"), "such as --grid sigma=0.1,0.2"),
        ((*SMOOTH[:1], "--method", "attnlrp", "--out", "o", "--data", "flat.npz"), "its x is uint8 [2, 4]"),
        ((*SMOOTH[:1], "--method", "attnlrp", "--out", "o", "--data", "pictures"), "holds no image; mend the file"),
        ((*PIXELS, "--data", "flat.npz"), "its x is uint8 [2, 4]"),
        ((*PIXELS, "--data", "labels.npz"), "y is [3]; make it [2], as x has it"),
        ((*PIXELS, "--data", "broken.npz"), "broken.npz is no npz file of arrays"),
        ((*PIXELS, "--data", "cut.npz"), "cut.npz is no npz file of arrays"),
        ((*PIXELS, "--data", "one.npz"), "one.npz is no npz file of arrays (it is one array without a name)"),
        ((*PIXELS, "--data", "pictures"), "holds no image; mend the file"),
        ((*PIXELS, "--data", "pictures.csv"), "cannot read none.png: No such file"),
        ((*TEXTS, "--text", "sentence"), "no column 'sentence', only 'text', 'label'"),
        ((*TEXTS, "--read-out", "x"), "nothing is called 'x' that could be read; choose of logit"),
        ((*SMOOTH, "--data", "texts.tsv", "--grid", "sigma=x"), "the sigma of smoothgrad is 'x'; pass a number"),
        ((*TEXTS, "--methods", "lrp,cp-lrp"), "the methods are lrp, lrp; name one or more, each once"),
        (changed(TEXTS, "--out", "file"), "cannot write in file: file is no folder"),
        (changed(TEXTS, "--out", "file/below"), "cannot write in file/below: "),
        (("benchmark", "patching", "--out", "o", "--data", "pairs.csv"), "the column 'wrong' is missing"),
        (("benchmark", "patching", "--out", "o", "--seed", "-1"), "seed is -1; give a whole number from 0"),
        (("benchmark", "patching", "--out", "o", "--methods", "random"), "random is no recipe, whose gradients"),
        (("benchmark", "qa", "--out", "o", "--data", "questions.json"), "is no JSON as SQuAD has it"),
    ],
)
def test_before_a_model_is_loaded(run, folder, monkeypatch, arguments, told):
    monkeypatch.chdir(folder)
    code, out, err = run(*arguments, "--model", "/nowhere/model")
    assert (code, out) == (2, "")
    assert told in err
    assert NOWHERE not in err
    assert err.count("\n") == 1
    assert not (folder / "o").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs, a few numbers each, of the bundled model."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "texts.tsv").write_text(FILES["texts.tsv"])
    (folder / "more.tsv").write_text(FILES["texts.tsv"] + "The cats\t1\n")
    for command in RUNS.values():
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            patched.setattr("sys.argv", ["lrpx", *command])
            main()
    return folder


DATA = ("--data", "texts.tsv")
RUNS = {
    "measured": (
        "benchmark", "faithfulness", *DATA, "--methods", "lrp", "--metrics", "comprehensiveness", "--out", "measured",
    ),
    "tuned": ("tune", "--method", "rollout", "--grid", "discard=0,0.9", *DATA, "--last", "1", "--out", "tuned"),
    "collected": ("neurons", "collect", *DATA, "--k", "2", "--out", "collected"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("measured", ("--model", "/nowhere/model"), 'model was "lrpx bundled model" and is "model" now'),
        ("measured", ("--methods", "attnlrp"), 'methods was ["lrp"] and is ["attnlrp"] now'),
        ("measured", ("--part", "3"), "part was 512 and is 3 now"),
        ("measured", ("--dtype", "float64"), 'dtype was "float32" and is "float64" now'),
        ("measured", ("--data", "more.tsv"), "data file was"),
        ("measured", ("--metrics", "sufficiency"), "metrics was"),
        ("tuned", ("--last", "2"), "last was 1 and is 2 now"),
        ("tuned", ("--model", "/nowhere/model"), "model was"),
        ("collected", ("--k", "3"), "k was 2 and is 3 now"),
        ("collected", ("--measure", "relevance"), "measures was"),
        ("collected", ("--data", "more.tsv"), "corpus file was"),
    ],
)
def test_the_folder_of_another_run(run, runs, monkeypatch, name, more, told):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(Spec, "build", lambda spec: pytest.fail("a model was loaded"))
    code, _, err = run(*changed(RUNS[name], *more))
    assert code == 2
    assert f"{name} holds a run with another setting: {told}" in err


@pytest.mark.parametrize("name", RUNS)
def test_the_folder_of_the_same_run_goes_on(run, runs, monkeypatch, name):
    monkeypatch.chdir(runs)
    assert run(*RUNS[name])[0] == 0


def test_the_model_itself_is_told(run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "texts.txt").write_text("The doors\n")
    assert NOWHERE in run("explain", "--texts", "texts.txt", "--model", "/nowhere/model")[2]
    assert NOWHERE in run(*TEXTS, "--model", "/nowhere/model")[2]
