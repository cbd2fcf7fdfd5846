"""What is shown while a run takes its time: in a real notebook, in a terminal, and nothing in a pipe."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from lrpx import Explainer
from tests.reference import models

MODEL = models.tiny_llama()
SLOW = pytest.mark.slow
RUN = """
import warnings
warnings.simplefilter("error")
from lrpx import Explainer
from tests.reference import models
explain = Explainer(models.tiny_llama())
many = explain([[3, 4]] * 6, batch_size=1{option})
"""


CLIENT = """
import json, sys
import nbclient, nbformat
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec

class Manager(KernelManager):
    kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="")

book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[1])])
nbclient.NotebookClient(book, km=Manager(), timeout=600).execute()
print(json.dumps(book.cells[0].outputs))
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def compiled():
    return Explainer(MODEL, compile=True)


@pytest.fixture
def notebook(tmp_path):
    """Runs a cell in a real kernel, with a client in a process of its own, and gives its outputs."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folders = dict.fromkeys(("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(tmp_path))

    def run(code):
        variables = os.environ | folders | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", CLIENT, code], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs = json.loads(done.stdout)
        written = "".join(each["text"] for each in outputs if each["output_type"] == "stream")
        assert "Explaining" not in written
        assert "Compiling" not in written
        assert 'install "ipywidgets"' not in written, "rich's own bar needs them"
        return [each for each in outputs if each["output_type"] != "stream"]

    return run


def told(output):
    return output["data"].get("text/plain", "") if output["output_type"] in ("display_data", "execute_result") else ""


def test_a_notebook_shows_a_bar_that_stays_and_needs_no_widgets(notebook):
    (output,) = notebook(RUN.format(option=""))
    assert output["output_type"] == "display_data"
    assert "Explaining" in told(output)
    assert "6/6" in told(output)
    assert "6/6" in output["data"]["text/html"]


@SLOW
def test_a_notebook_where_quiet_is_asked_shows_nothing(notebook):
    assert notebook(RUN.format(option=", progress=False")) == []


@SLOW
def test_a_notebook_says_what_the_compiler_is_waited_for(notebook):
    code = RUN.format(option="").replace("tiny_llama())", "tiny_llama(), compile=True)")
    code = code.replace('warnings.simplefilter("error")', "").replace("* 6", "* 1")
    (output,) = notebook(code)
    assert told(output).strip() == "Compiling for an input of 1 × 16, once: done"


@SLOW
def test_a_list_in_a_notebook_shows_its_pictures(notebook):
    (output,) = notebook(RUN.format(option=", progress=False") + "many")
    assert output["output_type"] == "execute_result"
    assert "6 explanations" in output["data"]["text/html"]


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        pytest.param("", False, marks=SLOW),
        pytest.param(", progress=False", False, marks=SLOW),
        pytest.param(", progress=True", True, marks=SLOW),
    ],
)
def test_a_pipe_gets_progress_only_where_it_is_asked_for(option, shown):
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FORCE_COLOR": ""}
    ran = subprocess.run([sys.executable, "-c", RUN.format(option=option)], env=variables, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == b""
    assert (b"6/6" in ran.stderr) == (b"Explaining" in ran.stderr) == shown


@SLOW
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_terminal_says_once_what_the_compiler_is_waited_for(compiled, monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    compiled([3, 4])
    assert "Compiling for an input of 1 × 16, once" in stderr.getvalue()
    assert stderr.getvalue().count("\x1b[?25l") == stderr.getvalue().count("\x1b[?25h") > 0, "the cursor is back"
    stderr.seek(0)
    stderr.truncate()
    compiled([3, 4])
    assert stderr.getvalue() == ""


@SLOW
@pytest.mark.parametrize(("progress", "shown"), [(None, True), (False, False)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_bar_says_what_is_waited_for(monkeypatch, progress, shown):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    Explainer(MODEL, compile=True)([[3, 4]] * 6, batch_size=1, progress=progress)
    assert ("Compiling for an input of 1 × 16, once" in stderr.getvalue()) == shown
    assert ("6/6" in stderr.getvalue()) == shown
    assert shown or stderr.getvalue() == ""


@SLOW
def test_a_compile_wait_is_not_told_in_a_pipe(compiled, capsys):
    compiled([[3, 4]] * 2)
    assert capsys.readouterr().err == ""


def test_a_list_is_drawn_by_rich_as_pictures():
    out = io.StringIO()
    many = Explainer(MODEL)([[3, 4], [5, 6]])
    Console(file=out, width=60).print(many)
    assert out.getvalue().count("logit of") == 2
