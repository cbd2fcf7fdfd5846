"""docs/howto/recipe.md, followed to the letter in an empty folder: its files, its commands, what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lrpx

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "recipe.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def test_the_page_can_be_followed(tmp_path):
    sources = Path(lrpx.__file__).parents[1]
    variables = os.environ | {"PYTHONPATH": str(sources), "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
    commands = 0
    for kind, block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)[1]
            (tmp_path / name).write_text(block, encoding="utf-8")
        else:
            assert kind == "console"
            command, expected = re.fullmatch(r"\$ python (.*?)\n(.*)", block, re.S).groups()
            run = [sys.executable, *shlex.split(command)]
            done = subprocess.run(run, cwd=tmp_path, env=variables, capture_output=True, encoding="utf-8", check=False)
            assert (done.stdout, done.returncode) == (expected, 0), done.stderr
            commands += 1
    assert commands == 6
