"""The how-to pages, followed to the letter in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lrpx.benchmarks import BENCHMARKS
from lrpx.metrics.ground_truth import METRICS

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVE = re.compile(r"[Ss]ave as\s+`([\w.]+)`")


@pytest.mark.parametrize("name", ["benchmark", "metric"])
def test_following_it_works(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for registry in (BENCHMARKS, METRICS):  # what the pages register is not there for other tests
        monkeypatch.setattr(registry, "_found", dict(registry))
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (HOWTO / f"{name}.md").read_text(encoding="utf-8")
    before, done = 0, []
    for fence in FENCE.finditer(page):
        kind, block = fence.groups()
        named = SAVE.findall(page[before : fence.start()])
        before = fence.end()
        if named:
            Path(named[-1]).write_text(block, encoding="utf-8")
        elif kind == "python":
            exec(compile(block, f"{name}.md", "exec"), {})
        elif kind == "console":
            first, *wanted = block.splitlines()
            program, *arguments = shlex.split(first.removeprefix("$ "))
            assert program == "lrpx"
            code, out, err = run(*arguments)
            assert (code, err) == (0, "")
            assert [line for line in wanted if " ".join(line.split()) not in " ".join(out.split())] == []
        done.append("save" if named else kind)
    wanted = {"benchmark": ["save", "save", "console", "python"], "metric": ["save", "python", "save", "console"]}
    assert done == wanted[name]
    for each in ("nouns", "leak"):
        sys.modules.pop(each, None)
