"""The quick form of the sweep, for real; and a sweep that meets crashes, hangs, and rows of an earlier one."""

from __future__ import annotations

import json
import threading

import pytest

from lrpx.coverage import CHECKS, choose, sweep, versions
from lrpx.coverage.classes import DATA, MAPPINGS, ModelClass
from lrpx.coverage.sweeping import ROWS, _Worker
from lrpx.errors import ResultFileError

LLAMA = choose(["llama"], "causal-lm")
NO_CLASS = ModelClass("causal-lm", "NoSuchModel", "llama", ("llama",))


@pytest.mark.slow
def test_the_quick_form_passes_every_check(record_property):
    classes = choose(quick=True)
    assert len(classes) >= 40
    assert {f"{one.mapping}/{one.model_type}" for one in classes} == set(DATA["quick"])
    assert {one.mapping for one in classes} == set(MAPPINGS)
    rows = list(sweep(classes, workers=2))
    record_property("seconds of all classes", sum(row.seconds for row in rows))
    assert {(row.mapping, row.name) for row in rows} == {(one.mapping, one.name) for one in classes}
    assert [(row.mapping, row.name, row.reasons) for row in rows if row.passed != CHECKS] == []
    assert all(row.difference == 0.0 and 0 < row.parameters < 200_000 for row in rows)
    assert all(0.0 <= missing <= 1e-6 for row in rows for missing in row.missing.values())


def test_what_fails_is_a_row_and_the_sweep_goes_on():
    wrong, right = sweep((NO_CLASS, *LLAMA))
    assert wrong.passed == ()
    assert wrong.reasons == dict.fromkeys(CHECKS, "AttributeError: module transformers has no attribute NoSuchModel")
    assert right.passed == CHECKS


def test_a_class_that_takes_too_long_is_a_row():
    rows = list(sweep((*LLAMA, NO_CLASS), seconds=0.01))
    assert [row.name for row in rows] == ["LlamaForCausalLM", "NoSuchModel"]
    assert all(row.reasons == dict.fromkeys(CHECKS, "took longer than 0.01 s") for row in rows)


def test_a_crash_is_a_row():
    worker = _Worker()
    worker.process.kill()
    row = worker.check(LLAMA[0], 60.0, threading.Event())
    worker.end()
    assert row.reasons["built"].startswith("the process ended with code")
    assert row.passed == ()


def test_a_sweep_goes_on_where_it_ended(tmp_path):
    classes = choose(["llama", "gpt2"], "causal-lm")
    first = list(sweep(classes, tmp_path / "rows"))
    file = tmp_path / "rows" / ROWS
    lines = file.read_text().splitlines()
    assert [json.loads(line)["versions"] for line in lines] == [versions()] * 2
    # no class has the time to be checked again
    again = list(sweep(classes, tmp_path / "rows", seconds=0.01))
    assert again == first
    # a row cut short, and one of another version, are made again
    older = json.dumps(json.loads(lines[1]) | {"versions": {"lrpx": "0"}})
    file.write_text(f"{lines[0][:40]}\n{older}\n")
    remade = list(sweep(classes, tmp_path / "rows", seconds=0.01))
    assert [row.reasons["built"] for row in remade] == ["took longer than 0.01 s"] * 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultFileError, match=r"cannot keep rows in .*file.*name another folder"):
        next(sweep(LLAMA, tmp_path / "file"))
