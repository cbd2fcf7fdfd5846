"""No two files need each other: inside the engine and the views, imports make no circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lrpx

ROOT = Path(lrpx.__file__).parent


def imported(path: Path) -> set[str]:
    """The modules of lrpx that a file imports, those for its types alone too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def graph(folder: Path, package: str) -> dict[str, set[str]]:
    files = {f"{package}.{path.stem}": path for path in folder.glob("*.py") if path.stem != "__init__"}
    return {name: imported(path) & files.keys() for name, path in files.items()}


@pytest.mark.parametrize("part", ["engine", "_views", "benchmarks", "coverage"])
def test_files_make_no_circle(part: str) -> None:
    found = graph(ROOT / part, f"lrpx.{part}")
    assert len(found) > 3
    assert any(found.values())
    list(TopologicalSorter(found).static_order())


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f():\n    from lrpx.some.two import g\n")
    (tmp_path / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lrpx.some import one\n"
    )
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph(tmp_path, "lrpx.some")).static_order())
