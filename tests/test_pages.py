"""Pages for users, followed in an empty folder: what needs the bundled model alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lrpx.recipes import ATTNLRP_VIT
from lrpx.rules import Flat
from tests.test_howto import blocks, run_console, run_python

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"^`(lrpx explain [^`]+)`[^`]*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A command in a line of its own, and what it prints."""


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_explanations_of_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = SHOWN.findall(text_of("docs/explanations.md"))
    assert len(found) == 2
    for command, printed in found:
        printed = re.sub(r"difference is \S+", "difference is ...", printed)  # rounding, which is each machine's own
        run_console("explanations.md", f"$ {command}\n{printed}", 1, {})


@pytest.mark.slow
def test_patching_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for kind, source, line, _ in blocks(text_of("docs/patching.md")):
        if kind == "python":
            run_python("patching.md", source, line, namespace)
    assert {"truth", "scores", "plain", "best"} <= set(namespace)


@pytest.mark.slow
def test_explaining_many_texts(tmp_path, monkeypatch):
    """The block of the command line's page that explains a column of a table, as far as LRPx goes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.tsv").write_text("1\tThe doors of the house\n2\tThe keys\n")
    (command,) = re.findall(r"^\$ (cut .*) \| jq", text_of("docs/command-line.md"), re.MULTILINE)
    run_console("command-line.md", f'$ {command}\n{{"line": 1, ...\n{{"line": 2, ...\n', 1, {})


def test_how_a_recipe_prints():
    """The end of what the last block of Python on the page of images prints."""
    printed = str(replace(ATTNLRP_VIT, name="mine", first=Flat()))
    assert f"\n{printed}\n```\n" in text_of("docs/images.md")
