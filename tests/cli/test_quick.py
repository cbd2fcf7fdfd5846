"""What needs no model brings no torch along: help, versions, completion, and mistakes."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lrpx
from lrpx.benchmarks import BENCHMARKS
from lrpx.cli import _benchmarks, _wanted
from lrpx.errors import MethodError
from lrpx.explainer import recipe_of
from lrpx.methods import METHODS
from tests.cli.commands import finish, start

SLOW = {"torch", "transformers", "numpy", "polars", "pyarrow", "scipy", "spacy"}
TOLD = """
import atexit, sys
atexit.register(lambda: print("imported:", *sys.modules, file=sys.stderr))
sys.argv[0] = "lrpx"
from lrpx.cli import main
main()
"""


def imported(*arguments, code=0, env=None):
    """Standard output, and which slow packages a command has imported."""
    command = [sys.executable, "-c", TOLD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | dict(env or {}))
    assert done.returncode == code, done.stderr
    (modules,) = (line for line in done.stderr.splitlines() if line.startswith("imported:"))
    assert "Traceback" not in done.stderr
    return done.stdout, SLOW & set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "explain"),
        (["--version"], lrpx.__version__),
        (["explain", "--help"], "gradient-l2-squared"),
        (["benchmark", "--help"], "sva"),
        (["benchmark", "sva", "--help"], "--parses"),
        (["coverage", "--help"], "--mapping"),
        (["neurons", "collect", "--help"], "--measure"),
        (["neurons", "turn", "--help"], "--generate"),
        (["--show-completion", "bash"], "_LRPX_COMPLETE"),
    ],
)
def test_help_brings_no_torch(arguments, said):
    # whatever shell runs the tests
    out, slow = imported(*arguments, env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert said in out
    assert slow == set()


def test_help_names_everything_whole_at_80_columns():
    """No list of names is cut off where a table is narrow."""
    wanted = {*_wanted.METHODS, "zero-embedding", "mask-token", "delete", "log-probability"}
    for arguments in (["benchmark", "faithfulness"], ["benchmark", "qa-perturbed"], ["tune"], ["check"], ["explain"]):
        out, _ = imported(*arguments, "--help", env={"COLUMNS": "80", "TERM": "dumb"})
        told = {word.strip(",;.:()") for word in out.split()}
        missing = (wanted if "benchmark" in arguments else set(_wanted.METHODS)) - told
        assert not missing, (arguments, missing)
        assert not re.search(r"\w…", out), arguments


@pytest.mark.parametrize(
    ("typed", "at", "offered"),
    [
        ("lrpx ", 1, {"explain", "benchmark", "coverage"}),
        ("lrpx expl", 1, {"explain"}),
        ("lrpx explain --metho", 2, {"--method"}),
        ("lrpx explain --method gr", 3, {"gradient-x-input", "gradient-l1", "gradient-l2-squared"}),
        ("lrpx explain --dtype fl", 3, {"float16", "float32", "float64"}),
        ("lrpx benchmark s", 2, {"sva"}),
        ("lrpx benchmark sva --da", 3, {"--data"}),
    ],
)
def test_a_shell_completes_without_torch(typed, at, offered):
    given = {"_LRPX_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(at)}
    out, slow = imported(env=given)
    assert offered <= set(out.split())
    assert slow == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain"], "name a file of texts with --texts"),
        (["explain", " "], "the text is empty"),
        (["explain", "Hello", "--html", "."], "is a folder; name a file"),
        (["explain", "Hello", "--html", "missing/a.html"], "there is no folder missing; create it first"),
        (["explain", "Hello", "--html", "ring"], "it is a link to itself; choose another path"),
        (["explain", "--texts", "ring"], "cannot read ring"),
        (["explain", "--texts", "README.json", "--json", "ring"], "it is a link to itself"),
        (["explain", "Hello", "--html", "nowhere"], "missing; create it first"),
        (["explain", "9" * 5000, "--ids"], "are no token ids"),
        (["explain", "Hello", "--method", "missing.json"], "cannot read missing.json"),
        (["explain", "Hello", "--method", "README.json"], "is no recipe"),
        (["explain", "Hello", "--target", "a", "--target-id", "3"], "--target and --target-id exclude each other"),
        (["explain", "Hello", "--target", "a", "--contrast", "a"], "pass another contrast"),
        (["explain", "Hello", "--target", ""], "--target is empty"),
        (["explain", "Hello", "--revision", "main"], "leave --revision out"),
        (["explain", "Hello", "--model", ".", "--revision", "main"], "has no revisions"),
        (["explain", "Hello", "--ids"], "leave --ids out"),
        (["explain", "Hello", "--texts", "texts.txt"], "leave one of them out"),
        (["explain", "--texts", "missing.txt"], "cannot read missing.txt"),
        (["explain", "--texts", "README.json", "--json", "README.json"], "one file is named twice"),
        (["explain", "--texts", "README.json", "--html", "a.html"], "--texts and --html exclude each other"),
        (["explain", "--texts", "README.json", "--json", "other.txt"], "holds something else than results"),
        (["explain", "Hello", "--method", "lrp", "--method", "attnlrp", "--save", "a"], "--save holds one method"),
        (["explain", "Hello", "--method", "lrp", "--method", "alti", "--html", "a", "--ledger"], "shows no ledger"),
        (["explain", "Hello", "--save", "-"], "is no file"),
        (["explain", "Hello", "--tagret", "a"], "no such option: --tagret (Possible options: --target"),
        (["explain", "The", "doors"], "unexpected extra argument"),
        (["explain", "The", "doors"], "; put the text in quotes"),
        (["explain", "Hello", "--position", "two"], "invalid value for '--position'"),
        (
            ["explain", "Hello", "--target", "a", "--target", "b"],
            "--target is given twice, and takes one value; give it once",
        ),
        (["benchmark", "sva", "--data", "a", "--methods", "lrp", "--methods", "alti"], "--methods is given twice"),
        (["neurons", "rank", "a", "--top", "0x", "--top", "1"], "--top is given twice"),
        (["explain", "Hello", "--target"], "option '--target' requires an argument"),
        (["exlpain", "Hello"], "no such command 'exlpain'"),
        (["benchmark", "sva"], "missing option '--data'; lrpx benchmark sva --help says what there is"),
        (["coverage", "--workers", "0"], "invalid value for '--workers'"),
        (["explain", "-"], "standard input is not UTF-8, at byte 3; convert it first"),
    ],
)
def test_mistakes_in_the_options_are_told_before_torch_is_imported(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.json").write_text("no recipe")
    (tmp_path / "other.txt").write_text("something else")
    (tmp_path / "ring").symlink_to("ring")
    (tmp_path / "nowhere").symlink_to("missing/a.html")
    process = subprocess.Popen(
        [sys.executable, "-c", TOLD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = process.communicate(b"caf\xe9")
    *lines, modules = err.decode().splitlines()
    assert (process.returncode, out) == (2, b"")
    assert len(lines) == 1
    assert lines[0].startswith("lrpx: ")
    assert said in lines[0]
    assert SLOW & set(modules.split()) == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.json", "nowhere", "other.txt", "ring"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "magic"], "there is no method 'magic'"),
        (["--method", "list.json"], "is no recipe"),
        (["--method", "lrp", "--method", "cp-lrp"], "pass each once"),
        (["--ledger", "--method", "gradient-l1"], "gradient-l1 has no ledger; leave --ledger out"),
        (["--ledger", "--method", "alti"], "alti has no ledger"),
        (["--device", "abacus"], "device 'abacus'"),
        (["--device", "meta"], "cannot move the model to device 'meta': it holds no numbers; pass another device"),
        (["--dtype", "float99"], "there is no dtype 'float99'"),
    ],
)
def test_other_mistakes_are_told_before_a_model_is_loaded(run, arguments, said, tmp_path, monkeypatch):
    """The model's name is wrong as well, which only loading it would tell."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    code, out, err = run("explain", "Hello", "--model", "no-such/model", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "no-such" not in err


def test_the_names_and_options_that_help_knows_are_those_that_there_are():
    ours = [name for name, method in METHODS.items() if type(method).__module__.startswith("lrpx.")]
    assert list(_wanted.METHODS) == ours
    of_units = []
    for name in ours:
        with contextlib.suppress(MethodError):
            recipe_of(METHODS[name])
            of_units.append(name)
    assert list(_wanted.OF_UNITS) == of_units
    assert list(_benchmarks.OURS) == [name for name, kind in BENCHMARKS.items() if kind.__module__.startswith("lrpx.")]
    for name, kind in BENCHMARKS.items():
        if name in _benchmarks.OURS:
            face = _benchmarks._face(name)
            assert dict(face.options) == kind.options()
            assert face.help == (kind.__doc__ or "").split("\n\n")[0]
            made = kind(**dict.fromkeys(face.options) | dict(face.defaults))
            assert {option: getattr(made, option) for option in face.defaults} == dict(face.defaults)


@pytest.mark.slow
def test_lrpx_imports_what_is_asked_for_when_it_is_asked_for():
    code = (
        "import sys, lrpx; assert 'torch' not in sys.modules; lrpx.__version__; dir(lrpx); "
        "assert 'torch' not in sys.modules; lrpx.rules.identity; lrpx.errors.LRPxError; lrpx.Explainer; "
        "from lrpx import *; ATTNLRP; assert 'torch' in sys.modules; assert not hasattr(lrpx, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'lrpx' has no attribute 'explainers'"):
        lrpx.explainers  # noqa: B018


@pytest.mark.parametrize("module", ["typer", "torch", "jinja2"])
def test_interrupted_while_it_imports_there_is_no_traceback(module):
    """The signal comes as the module is imported, whatever that makes of it."""
    code = f"""
import builtins, os, signal, sys
sys.argv[:] = ["lrpx", "explain", "Hello"]
import lrpx.cli
given = builtins.__import__
def spring(name, *rest, **more):
    if name == {module!r} and name not in sys.modules:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            given("colorsys")  # a step of Python, in which the signal arrives
        except BaseException:
            pass  # as a library may
    return given(name, *rest, **more)
builtins.__import__ = spring
lrpx.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_interrupted_while_it_explains_what_is_written_stays(tmp_path):
    texts, found = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    texts.write_text("".join(f"The key number {i} to the cabinets\n" for i in range(100_000)))
    process = start("explain", "--texts", texts, "--json", found)
    while not (found.is_file() and found.stat().st_size):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    lines = found.read_bytes().split(b"\n")
    assert [json.loads(line)["line"] for line in lines[:-1]] == list(range(1, len(lines)))


def test_the_package_itself_imports_nothing_at_its_top():
    """So that Ctrl-C is quiet from the first moment."""
    tree = ast.parse(Path(lrpx.cli.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"__future__", "contextlib", "errno", "lrpx.errors", "os", "signal", "sys", "typing"}
