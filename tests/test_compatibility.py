"""The script that runs the tests under other versions: what it installs, and what it counts."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "bench" / "compatibility.py"))
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two[a|b `c`]"><failure/></testcase>
<testcase classname="tests.test_b" name="test_three"><skipped/></testcase>
<testcase classname="tests.test_b" name="test_four"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("wanted", [{}, {"transformers": "5.17.0"}, {"torch": "2.14.1", "transformers": "5.17.0"}])
def test_the_constraints_of_an_environment(wanted):
    own = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = SCRIPT["overridden"](own, wanted).splitlines()
    names = [SCRIPT["named"](line) for line in lines if "==" in line]
    assert len(set(names)) == len(names)
    assert all(f"{name}=={version}" in lines for name, version in wanted.items())
    left_out = {SCRIPT["named"](line) for line in own.splitlines() if "==" in line} - set(names)
    assert left_out == {name for package in wanted for name in SCRIPT["FOLLOWS"][package]}


def test_what_is_counted(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    passed, failed, skipped, note = SCRIPT["counted"](tmp_path / "report.xml")
    assert (passed, failed, skipped) == (1, 2, 1)
    assert note == "`test_a::test_two[a b c ]`, `test_b::test_four`"
    assert SCRIPT["counted"](tmp_path / "none.xml") == (0, 0, 0, "the tests did not start")


def test_a_line_fits_the_table():
    table = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8").splitlines()
    head = next(line for line in table if line.startswith("| date"))
    row = SCRIPT["Row"]("3.11.7", "2.13.0", "5.17.0", 3, 1, 1, "`test_a::test_two`").written()
    assert row.count("|") == head.count("|")
    assert all(line.count("|") == head.count("|") for line in table if line.startswith("|"))


def test_the_oldest_transformers_that_is_asked_for_was_run():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = {name.split(">=")[0]: name.split(">=")[1].split(",")[0] for name in project["dependencies"]}
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| 20")]
    if not rows:
        pytest.skip("no run is in docs/compatibility.md yet")
    assert any(oldest["transformers"] in row[4] for row in rows)
    claimed = {line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line}
    assert claimed == {".".join(row[2].split(".")[:2]) for row in rows}
