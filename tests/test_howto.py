"""The pages of docs/howto, followed to the letter in an empty folder.

A block whose first line is a comment such as ``# my_rules.py``, or that comes after "… as `my_rules.py`:", is saved
under that name. Else ``python`` blocks run in order in one namespace; of ``pycon`` blocks (``>>> …``) the output is
compared too; and ``console`` blocks (``$ …``) are run by a shell, which must print what follows, line by line.
``...`` stands for anything.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf

from lrpx import Explainer
from lrpx.benchmarks import BENCHMARKS
from lrpx.methods import METHODS
from lrpx.metrics import METRICS
from tests.tiny import build

PAGES = sorted((Path(__file__).parents[1] / "docs" / "howto").glob("*.md"))
METHOD = next(page for page in PAGES if page.name == "method.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"\bas\s+`([\w/.-]+)`(?:(?!\n\n)[^`])*:\s*$")
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text):
    """``(what it is for, its text, its first line, the name to save it under or None)`` of each block of a page."""
    for found in BLOCK.finditer(text):
        before = text[: found.start()]
        name = re.match(r"# ([\w/.-]+\.\w+)\n", found[2]) or SAVED.search(before)
        yield found[1], found[2], before.count("\n") + 2, name and name[1]


def run_python(page, source, line, namespace):
    exec(compile("\n" * (line - 1) + source, page, "exec"), namespace)


def run_pycon(page, source, line, namespace):
    test = doctest.DocTestParser().get_doctest(source, {}, page, page, line - 1)
    test.globs = namespace
    said = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)


def run_console(page, source, line, namespace):
    del namespace
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "COLUMNS": "120"}
    assert source.startswith("$ "), f"{page}:{line}: a console block begins with a command"
    for command, wanted in COMMAND.findall(source):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"{page}:{line}: {command}\n{done.stdout}{done.stderr}"
        printed, at = " ".join(done.stdout.split()), 0
        for each in wanted.replace("...", "\n").splitlines():
            one = " ".join(each.split())
            assert one in printed[at:], f"{page}:{line}: {command}\nwanted: {one}\nfound:\n{done.stdout}"
            at = printed.index(one, at) + len(one)


RUN = {"python": run_python, "pycon": run_pycon, "console": run_console}


def follow(page, text):
    """Do what a page says, in the current folder."""
    namespace = {"__name__": "__main__"}
    for kind, source, line, name in blocks(text):
        if name:
            Path(name).write_text(source, encoding="utf-8")
        elif kind in RUN:
            RUN[kind](page, source, line, namespace)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The current folder, empty and importable from; what is imported from it is forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    for registry in (METHODS, METRICS, BENCHMARKS):  # what a page registers is not there for other tests
        monkeypatch.setattr(registry, "_found", dict(registry))
        monkeypatch.setattr(registry, "_origins", dict(registry._origins))
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


LONG = {"recipe.md", "metric.md", "benchmark.md"}
"""Pages with commands that load a model."""


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name in LONG)) for p in PAGES]
)
def test_the_page_can_be_followed(page, empty_folder):
    follow(page.name, page.read_text(encoding="utf-8"))


def test_every_page_is_in_the_index():
    """And the index names no page that is not there."""
    index = next(page for page in PAGES if page.name == "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == {page.name for page in PAGES} - {"README.md"}


FENCE = "`" * 3


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("python", "1 / 0\n"),
        ("pycon", ">>> 1 + 1\n3\n"),
        ("pycon", ">>> 1 / 0\n"),
        ("console", "$ exit 3\n"),
        ("console", "$ echo one\none\n$ echo two\nthree\n"),
        ("console", "$ echo one; echo two\ntwo\none\n"),
        ("console", "echo one\n"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(kind, source, empty_folder):
    with pytest.raises((AssertionError, ZeroDivisionError)):
        follow("page.md", f"Text.\n\n{FENCE}{kind}\n{source}{FENCE}\n")


def test_a_page_that_is_right(empty_folder):
    steps = [
        ("python", "# two.py\nTWO = 2\n"),
        ("python", "from two import TWO\n"),
        ("pycon", ">>> TWO + 1\n3\n"),
        ("console", '$ echo one; \\\n  echo two\none\n...\n$ python -c "import two; print(two.TWO)"\n2\n'),
        ("text", "not code\n"),
        ("console", "$ cat three.txt\nthree\n"),
    ]
    page = "".join(f"\n{FENCE}{kind}\n{source}{FENCE}\n" for kind, source in steps)
    follow("page.md", f"Save this as\n`three.txt`:\n\n{FENCE}text\nthree\n{FENCE}\n{page}")


def test_the_pages_method_is_right_where_a_model_scales_its_embeddings(empty_folder):
    """Gemma's module multiplies what it looks up by √d: the table's rows alone are other inputs."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "head_dim": 4}
    config = tf.Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = build(tf.Gemma2ForCausalLM, config, "eager")
    found = [source for kind, source, _, name in blocks(METHOD.read_text(encoding="utf-8")) if name == "zeroed.py"]
    Path("zeroed.py").write_text(found[0], encoding="utf-8")
    a = Explainer(model)([3, 14, 15, 9], 7, method="zeroed.py")
    embedded = model.get_input_embeddings()(torch.tensor([a.ids])).detach()

    def value(x):
        with torch.no_grad():
            return float(model(inputs_embeds=x).logits[0, -1, 7])

    lost = [value(embedded) - value(embedded.index_fill(1, torch.tensor(at), 0.0)) for at in range(4)]
    assert a.relevance.tolist() == pytest.approx(lost, abs=1e-12)
