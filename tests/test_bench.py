"""Each benchmark runs at a toy size and prints its table. No figure is tested: those are for a quiet machine."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
SENTENCES = Path(__file__).parent / "benchmarks" / "data" / "sentences.conllu"
TOY = ["--shapes", "toy"]
SVA = ["--shape", "toy", "--data", str(SENTENCES), "--methods", "lrp"]
SCRIPTS = {
    "speed.py": ([*TOY, "--lengths", "8", "--runs", "1", "--subjects", "lrpx attnlrp"], 1),
    "memory.py": ([*TOY, "--lengths", "64", "--runs", "1", "--subjects", "lrpx attnlrp"], 2),
    "longest_context.py": ([*TOY, "--lengths", "32", "64", "--at-most", "64", "--subjects", "lrpx attnlrp"], 1),
    "ledger.py": ([*TOY, "--lengths", "8", "--runs", "1"], 1),
    "positions.py": ([*TOY, "--lengths", "8", "--runs", "1"], 1),
    "batches.py": (["--sentences", "4", "--rounds", "1"], 2),
    "questions.py": (["--shape", "toy", "--lengths", "8", "--questions", "3", "--rounds", "1"], 1),
    "collect.py": (["--texts", "4", "--rounds", "1", "--no-relevance"], 1),
    "curves.py": (["--samples", "3", "--steps", "5", "--looped", "1"], 1),
    "neurons.py": (["--tokens", "8", "--rounds", "1"], 3),
    "sva.py": ([*SVA, "--samples", "4", "--rounds", "1", "--sizes", "2", "4", "--subjects", "lrpx attnlrp"], 3),
}


@pytest.mark.bench
@pytest.mark.parametrize(
    "name", ["ledger.py", *(pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS if n != "ledger.py")]
)
def test_prints_its_table(name):
    options, rows = SCRIPTS[name]
    command = [sys.executable, str(BENCH / name), "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"python bench/{name}" in lines[0]
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = list(takewhile(lambda line: line.startswith("|"), lines[start:]))
    assert set(table[1]) == {"|", "-"}
    assert len(table) == 2 + rows
    assert len({line.count("|") for line in table}) == 1
    assert "n/a" not in done.stdout


@pytest.mark.bench
def test_the_command_line_is_measured():
    command = [sys.executable, str(BENCH / "command_line.py"), "--times", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["lrpx"] * 6 + ["completion"]


def test_the_reactions_map_atoms_to_atoms_of_their_element():
    spec = importlib.util.spec_from_file_location("atom_mapping", BENCH / "atom_mapping.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    found = script.reaction("C[c:1]1[nH:2][cH:3]1.[Cl:4][O-:5]>>[O-:5][CH2:3][nH:2]")
    assert found.tokens == (
        *("[CLS]", "C", "c", "1", "[nH]", "c", "1", ".", "Cl", "[O-]", ">>", "[O-]", "C", "[nH]", "[SEP]"),
    )
    assert found.was == {11: {9}, 12: {5}, 13: {4}}
    assert found.reactants == (1, 2, 4, 5, 8, 9)
    for text in script.REACTIONS:
        each = script.reaction(text)
        for atom, places in each.was.items():
            elements = {re.search(r"[A-Z][a-z]?|[a-z]", each.tokens[at])[0].upper() for at in (atom, *places)}
            assert len(elements) == 1, (text, atom)
        product = [at for at in range(each.tokens.index(">>") + 1, len(each.tokens) - 1) if each.tokens[at].isalpha()]
        assert set(product) <= set(each.was)
