"""The floors of the package: imports only go down; and what `import lrpx` brings along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lrpx

ROOT = Path(lrpx.__file__).parent
FLOORS = {
    "errors": 0,
    "hooks": 0,
    "holding": 1,
    "intervening": 1,
    "kept": 1,
    "kernels": 0,
    "ledger": 0,
    "modules": 0,
    "files": 1,
    "registry": 1,
    "defined": 3,
    "scripts": 4,
    "rules": 1,
    "kinds": 1,
    "targets": 1,
    "tokens": 1,
    "encoded": 1,
    "padding": 2,
    "parts": 1,
    "pooling": 1,
    "pictures": 1,
    "progress": 1,
    "metrics": 2,
    "flow": 3,
    "ranking": 3,
    "recipes": 2,
    "attribution": 2,
    "tasks": 2,
    "signals": 2,
    "images": 1,
    "patches": 4,
    "recipe_files": 3,
    "attributions": 3,
    "saving": 3,
    "views": 4,
    "data": 3,
    "engine": 3,
    "inputs": 3,
    "loading": 3,
    "fingerprints": 4,
    "naming": 4,
    "probabilities": 4,
    "units": 4,
    "interventions": 5,
    "questions": 4,
    "batching": 5,
    "dropping": 5,
    "passes": 6,
    "tried": 6,
    "model": 7,
    "perturbations": 8,
    "patching": 8,
    "wiring": 8,
    "circuits": 9,
    "covering": 9,
    "results": 8,
    "features": 8,
    "methods": 9,
    "neurons": 8,
    "explainer": 10,
    "runs": 10,
    "benchmarks": 11,
    "cards": 11,
    "sae": 11,
    "coverage": 11,
    "sanity": 11,
    "tuning": 12,
    "composites": 13,
    "cli": 14,
    "main": 15,
}
ENTRANCES = {
    "attribution": {"saving", "views"},
    "attributions": {"views"},
    "pictures": {"files", "views"},
    "flow": {"views"},
    "ranking": {"views"},
    "recipes": {"recipe_files"},
}
"""Imports upwards, or across, inside a function, so that a value can show and save itself: of a module, to these."""
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def part(module):
    """The first name below lrpx: ``lrpx.engine._trace`` is in the engine."""
    return module.split(".")[1].removeprefix("_")


def imports(tree):
    """``(module, whether it is inside a function)`` of every import from lrpx."""
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"lrpx.{name.name}" for name in node.names] if node.module == "lrpx" else [node.module]
        else:
            continue
        yield from ((name, id(node) in inner) for name in names if name.split(".")[0] == "lrpx")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_only_go_down(path):
    own = path.relative_to(ROOT).with_suffix("").parts[0].strip("_")
    assert own in FLOORS, f"{own} is on no floor; put it into FLOORS"
    for module, inside in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if module == "lrpx" or part(module) not in FLOORS:
            assert FLOORS[own] >= FLOORS["benchmarks"], f"{path.name} imports the package from inside"
            continue
        other = part(module)
        allowed = other == own or FLOORS[other] < FLOORS[own] or (inside and other in ENTRANCES.get(own, ()))
        assert allowed, f"{own} (floor {FLOORS[own]}) imports {other} (floor {FLOORS[other]})"


HEAVY = ["captum", "spacy", "matplotlib", "sklearn", "pandas", "datasets", "selenium", "tensorflow", "typer", "rich"]


def test_importing_lrpx_brings_no_heavy_extras(record_property):
    code = (
        "import sys, torch, transformers; before = set(sys.modules); import lrpx; from lrpx import *; "
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    record_property("modules that lrpx imports after torch and transformers", len(modules))
    assert not set(HEAVY) & set(modules)
    assert not [name for name in modules if name.startswith("transformers.models.")][:1]
