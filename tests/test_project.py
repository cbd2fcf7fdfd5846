"""What the project says of itself: one version, and a test suite that reports as others expect."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from markdown_it import MarkdownIt

import lrpx

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_written_once():
    """In the package; what pip shows is read from there, and the citation repeats it."""
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert source.samefile(lrpx.__file__)
    assert importlib.metadata.version("lrpx") == lrpx.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == lrpx.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Homepage"]


def test_the_tested_set_holds_every_tool_of_the_tests():
    """So that a check here and in CI is the same check."""
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {name.split(">=")[0].lower() for extra in extras.values() for name in extra if "[" not in name}
    (alone,) = re.findall(r"^ALONE = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted | set(alone.split()) <= pinned


@pytest.mark.slow
def test_a_report_for_other_tools_can_be_written(tmp_path):
    """``pytest --junitxml``, with what a test records."""
    report = tmp_path / "report.xml"
    name = "tests/test_floors.py::test_importing_lrpx_brings_no_heavy_extras"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (recorded,) = ElementTree.parse(report).iter("property")
    assert float(recorded.get("value")) > 0


def test_what_the_readme_shows_and_links_is_there_wherever_it_is_read():
    """On a package index there is no file beside it: addresses are whole, and those of ours are of files that exist."""
    ours = re.compile(r"https://(?:github\.com|raw\.githubusercontent\.com)/lrpx/lrpx/(?:(?:blob|tree)/)?main/(.+)")
    tokens = MarkdownIt().parse((ROOT / "README.md").read_text(encoding="utf-8"))
    inside = [child for token in tokens for child in token.children or ()]
    addresses = [str(each.attrs[name]) for each in inside for name in ("href", "src") if name in each.attrs]
    assert len(addresses) > 10
    for address in addresses:
        assert address.startswith("https://"), address
        if address.startswith(("https://github.com/lrpx", "https://raw.githubusercontent.com/lrpx")):
            assert (ROOT / ours.fullmatch(address)[1]).exists(), address
    depth, bare = 0, []
    for each in inside:
        depth += each.nesting if each.type.startswith("link_") else 0
        if each.type == "code_inline" and not depth and re.match(r"(docs|src|tests)/", each.content):
            bare.append(each.content)
    assert bare == []
