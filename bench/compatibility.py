"""Run the fast tests under another Python, torch and transformers, and keep what came of it in docs/compatibility.md.

python bench/compatibility.py --transformers 5.17.0
python bench/compatibility.py --python python3.12 --torch 2.14.1 --keep

An environment is made in ``.bench/`` from constraints.txt, with these versions in the place of its own. Nothing but
Python is needed to start it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
FOLLOWS = {"transformers": ("tokenizers", "huggingface-hub", "hf-xet"), "torch": ("torchao",)}
"""Whose pins go where one of these is overridden: each release asks for its own range of them."""
NAMED = 8
"""Of so many failed tests the names are kept."""
COUNT = """
import torch, transformers, platform
print(platform.python_version(), torch.__version__, transformers.__version__)
"""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    python: str
    torch: str
    transformers: str
    passed: int
    failed: int
    skipped: int
    note: str

    def written(self) -> str:
        """The line in Markdown."""
        date = datetime.datetime.now(tz=datetime.UTC).date()
        figures = (self.python, self.torch, self.transformers, self.passed, self.failed, self.skipped)
        return f"| {date} | {' | '.join(map(str, figures))} | {processor()} | {self.note} |\n"


def main() -> int:
    """Make the environment, run the tests, add the row; the exit code is 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default="python3.11", help="the interpreter")
    parser.add_argument("--torch", help="its version; that of constraints.txt by default")
    parser.add_argument("--transformers", help="its version; that of constraints.txt by default")
    parser.add_argument("--tests", nargs="*", default=[], help="these tests instead of all fast ones; adds no row")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the environment")
    given = parser.parse_args()
    wanted = {name: getattr(given, name) for name in FOLLOWS if getattr(given, name)}
    folder = ROOT / ".bench" / "-".join(["compatibility", Path(given.python).name, *sum(wanted.items(), ())])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        row = run(given.python, wanted, folder, given.tests, given.workers)
        print(row.written())
        if not given.tests:
            with PAGE.open("a", encoding="utf-8") as page:
                page.write(row.written())
    finally:
        if not given.keep:
            shutil.rmtree(folder)
    return 1 if row.failed or not row.passed else 0


def run(python: str, wanted: dict[str, str], folder: Path, tests: list[str], workers: int) -> Row:
    """What comes of one environment."""
    constraints = folder / "constraints.txt"
    constraints.write_text(overridden((ROOT / "constraints.txt").read_text(encoding="utf-8"), wanted), encoding="utf-8")
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    own = folder / "venv" / "bin" / "python"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", constraints]
    installed = subprocess.run([*pip, "--editable", f"{ROOT}[test]"], capture_output=True, text=True)
    if installed.returncode:
        why = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")] or ["unknown"]
        asked = [wanted.get(name, "as tested") for name in FOLLOWS]
        return Row(Path(python).name, *asked, 0, 0, 0, f"does not install: {plain(why[0])}")
    versions = subprocess.run([own, "-c", COUNT], capture_output=True, text=True, check=True).stdout.split()
    report = folder / "report.xml"
    command = [own, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-n", workers, "--dist", "loadfile"]
    command += ["--junitxml", report, *tests]
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "PATH": f"{own.parent}{os.pathsep}{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    subprocess.run(list(map(str, command)), cwd=ROOT, env=variables)
    return Row(*versions[:3], *counted(report))


def overridden(constraints: str, wanted: dict[str, str]) -> str:
    """Constraints with other versions of some packages, and without the pins of what these choose themselves."""
    dropped = {name for package in wanted for name in (package, *FOLLOWS[package])}
    kept = [line for line in constraints.splitlines() if named(line) not in dropped]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in wanted.items())]) + "\n"


def named(line: str) -> str:
    """The package of a line of constraints, as the index spells it."""
    return re.sub(r"[-_.]+", "-", line.partition("==")[0].strip()).lower()


def counted(report: Path) -> tuple[int, int, int, str]:
    """How many tests passed, failed and were skipped, and the names of those that failed."""
    if not report.is_file():
        return 0, 0, 0, "the tests did not start"
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [
        f"`{plain(case.get('classname', '').rpartition('.')[2])}::{plain(case.get('name', ''))}`" for case in failed
    ]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return len(cases) - len(failed) - len(skipped), len(failed), len(skipped), ", ".join(names[:NAMED]) + more


def plain(text: str) -> str:
    """Text for a cell of a table."""
    return re.sub(r"[|`\s]+", " ", text)[:120]


def processor() -> str:
    """What the machine computes with."""
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else os.uname().machine


if __name__ == "__main__":
    sys.exit(main())
