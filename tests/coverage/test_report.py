"""How a ledger is judged, and how the sweep is reported."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lrpx.coverage import CHECKS, Checked, markdown, summary
from lrpx.coverage._checking import failed, first_line, judged
from lrpx.coverage._classes import MAPPINGS, ModelClass
from lrpx.coverage._report import counts, gaps, shares
from lrpx.ledger import Entry, Ledger

GOOD = Checked("causal-lm", "LlamaForCausalLM", "llama", passed=CHECKS, missing={"lrp": 2e-16, "attnlrp": 3e-16})
OPEN = Checked(
    "causal-lm", "OddForCausalLM", "odd", passed=CHECKS[:4],
    reasons=dict.fromkeys(CHECKS[4:], "misses 1.0e-02 of the explained value"), missing={"lrp": 0.01, "attnlrp": 0.01},
)  # fmt: skip
REFUSED = Checked(
    "masked-lm", "NewForMaskedLM", "new", ("pretraining",), ("built",),
    dict.fromkeys(CHECKS[1:], "calls torch's 'magic'"),
)  # fmt: skip
UNBUILT = failed(ModelClass("masked-lm", "FarForMaskedLM", "far", ("far",)), "ImportError: needs far\nnot found")
CHECKED = [UNBUILT, GOOD, OPEN, REFUSED]


def ledger(explained, **entries):
    return Ledger(tuple(Entry(kind.replace("_", " "), kind, value) for kind, value in entries.items()), explained)


@pytest.mark.parametrize(
    ("book", "conserves", "reason"),
    [
        (ledger(1.0, tokens=0.75, biases=0.25), True, ""),
        (ledger(1.0, tokens=0.75, biases=0.24), True, "misses 1.0e-02 of the explained value"),
        (ledger(1.0, tokens=0.75, softmax_residue=0.25), False, ""),
        (ledger(1.0, tokens=0.75, softmax_residue=0.25), True, "leaves 2.5e-01 as residue, most in softmax_residue"),
        (ledger(1.0, tokens=float("nan")), False, "misses nan of the explained value"),
    ],
)
def test_a_ledger_is_judged(book, conserves, reason):
    assert judged(book, conserves)[1] == reason


def test_counts_and_shares():
    found = counts(CHECKED)
    assert list(found) == ["causal-lm", "masked-lm", "pretraining", "all"]
    assert found["masked-lm"]["classes"] == 2
    assert found["pretraining"]["classes"] == 1
    assert found["all"] == dict(zip(("classes", *CHECKS), (4, 3, 2, 2, 2, 1, 1), strict=True))
    assert shares(CHECKED) == {
        "run, identical and finite": 2 / 3, "CP-LRP ledger": 1 / 3, "AttnLRP ledger": 1 / 3,
    }  # fmt: skip
    assert [str(gap) for gap in gaps([*CHECKED, replace(OPEN, name="EvenForCausalLM")])] == [
        "EvenForCausalLM (causal-lm), OddForCausalLM (causal-lm), CP-LRP ledger, AttnLRP ledger: "
        "misses 1.0e-02 of the explained value",
        "FarForMaskedLM (masked-lm): ImportError: needs far",
        "NewForMaskedLM (masked-lm), ran, identical, finite, CP-LRP ledger, AttnLRP ledger: calls torch's 'magic'",
    ]


def test_the_page_names_every_gap():
    page = markdown(CHECKED, "lrpx coverage --report coverage.md", {"lrpx": "1.0", "torch": "2.0"})
    assert "$ lrpx coverage --report coverage.md" in page
    assert "with lrpx 1.0, torch 2.0." in page
    assert "| all | 4 | 3 (75.0%) | 2 (66.7%) | 2 (66.7%) | 2 (66.7%) | 1 (33.3%) | 1 (33.3%) |" in page
    assert "- FarForMaskedLM (masked-lm): ImportError: needs far\n" in page
    assert "- OddForCausalLM (causal-lm), CP-LRP ledger, AttnLRP ledger: misses 1.0e-02" in page
    assert "**causal-lm**: llama\n" in page
    assert max(map(len, page.splitlines())) <= 200
    assert "\n\n\n" not in page


def test_nothing_to_name_is_said():
    page = markdown([GOOD], "lrpx coverage llama", {"lrpx": "1.0"})
    assert "## What cannot be built here\n\nNothing.\n" in page
    assert "## Gaps\n\nNone.\n" in page


def test_the_terminal_shows_the_same():
    text = printed(CHECKED)
    assert "66.7% of the classes that can be built: run, identical and finite" in text
    assert "Cannot be built here:\n  ImportError: needs far\n    FarForMaskedLM (masked-lm)\n" in text
    assert "  CP-LRP ledger, AttnLRP ledger: misses 1.0e-02 of the explained value\n    OddForCausalLM" in text


def test_eighty_columns_hold_every_mapping():
    many = [replace(GOOD, mapping=mapping, name=f"{mapping}{i}") for mapping in MAPPINGS for i in range(40)]
    text = printed([*many, *CHECKED])
    assert "…" not in text
    assert all(mapping in text for mapping in MAPPINGS)
    heads, *rows = text.splitlines()[: len(MAPPINGS) + 2]
    assert heads.split() == ["mapping", "tried", "built", "ran", "identical", "finite", "CP-LRP", "AttnLRP"]
    assert {len(row.split()) for row in rows} == {8}
    assert rows[-1].split()[:3] == ["all", str(len(many) + 4), str(len(many) + 3)]


def printed(checked):
    out = io.StringIO()
    Console(file=out, width=80).print(summary(checked))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_what_was_checked_survives_as_plain_values():
    assert Checked.from_dict(OPEN.to_dict()) == OPEN


def test_a_reason_is_one_line():
    assert first_line("\n  Class validation error:\n    ValueError: no\n  more") == (
        "Class validation error: ValueError: no"
    )
    assert first_line("It needs timm, e.g. now. Install it; restart") == "It needs timm, e.g. now"
    assert first_line("x" * 300) == "x" * 179 + "…"
    assert first_line("") == ""
