"""The pages of docs/howto, followed to the letter in an empty folder.

What a block is for stands after its fence. ``python`` blocks run in order in one namespace; one whose first line is a
comment such as ``# my_rules.py`` is saved under that name instead, for the next ones to import. Of ``pycon`` blocks
(``>>> …``) the output is compared too, and of ``console`` blocks (``$ …``), which a shell runs; ``...`` stands for
anything.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs" / "howto").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text):
    """``(what it is for, its text, its first line)`` of each block of a page."""
    return [(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in BLOCK.finditer(text)]


def run_python(page, source, line, namespace):
    name = re.match(r"# ([\w/]+\.\w+)\n", source)
    if name:
        Path(name[1]).write_text(source, encoding="utf-8")
    else:
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
        as_wanted = doctest.OutputChecker().check_output(wanted, done.stdout, OPTIONS)
        assert not wanted or as_wanted, f"{page}:{line}: {command}\nwanted:\n{wanted}\nfound:\n{done.stdout}"


RUN = {"python": run_python, "pycon": run_pycon, "console": run_console}


def follow(page, text):
    """Do what a page says, in the current folder."""
    namespace = {"__name__": "__main__"}
    for kind, source, line in blocks(text):
        if kind in RUN:
            RUN[kind](page, source, line, namespace)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The current folder, empty and importable from; what is imported from it is forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
    ]
    follow("page.md", "".join(f"\n{FENCE}{kind}\n{source}{FENCE}\n" for kind, source in steps))
