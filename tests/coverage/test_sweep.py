"""The quick form of the sweep, for real; and a sweep that meets crashes, hangs, and what an earlier one left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest

from lrpx.coverage import CHECKS, _sweeping, choose, sweep, versions
from lrpx.coverage._checking import failed
from lrpx.coverage._classes import DATA, MAPPINGS, ModelClass
from lrpx.errors import ResultFileError
from lrpx.runs import Store

LLAMA = choose(["llama"], "causal-lm")
NO_CLASS = ModelClass("causal-lm", "NoSuchModel", "llama", ("llama",))


@pytest.mark.slow
def test_the_quick_form_passes_every_check(record_property):
    classes = choose(quick=True)
    assert len(classes) >= 75
    assert {f"{one.mapping}/{one.model_type}" for one in classes} == set(DATA["quick"])
    assert len({one.mapping for one in classes}) >= 29
    assert {mapping for one in classes for mapping in (one.mapping, *one.others)} <= set(MAPPINGS)
    rows = list(sweep(classes, workers=2))
    record_property("seconds of all classes", sum(row.seconds for row in rows))
    assert {(row.mapping, row.name) for row in rows} == {(one.mapping, one.name) for one in classes}
    assert [(row.mapping, row.name, row.reasons) for row in rows if row.passed != CHECKS] == []
    assert all(row.difference == 0.0 and 0 < row.parameters < 200_000 for row in rows)
    assert all(0.0 <= missing <= 1e-6 for row in rows for missing in row.missing.values())


@pytest.mark.slow
def test_what_fails_is_named_and_the_sweep_goes_on():
    wrong, right = sweep((NO_CLASS, *LLAMA))
    assert wrong.passed == ()
    assert wrong.reasons == dict.fromkeys(CHECKS, "AttributeError: module transformers has no attribute NoSuchModel")
    assert right.passed == CHECKS


class Waiting(ModelClass):
    """A class whose check never ends."""

    def __getattribute__(self, name):
        if name == "name" and multiprocessing.parent_process() is not None:
            threading.Event().wait()
        return super().__getattribute__(name)


class Killing(ModelClass):
    """A class whose worker is killed in the middle of its work, as the system does where memory runs out."""

    def __getattribute__(self, name):
        if name == "name" and multiprocessing.parent_process() is not None:
            os.write(2, b"some warning\nout of memory\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def test_a_class_that_takes_too_long_failed():
    (row,) = sweep([Waiting("causal-lm", "LlamaForCausalLM", "llama", ("llama",))], seconds=0.01)
    assert row.name == "LlamaForCausalLM"
    assert row.reasons == dict.fromkeys(CHECKS, "took longer than 0.01 s")


@pytest.mark.slow
def test_a_crash_is_one_class_that_failed():
    killing = Killing("causal-lm", "LlamaForCausalLM", "llama", ("llama",))
    first, second = sweep([killing, *choose(["mixtral"], "causal-lm")])
    assert first.passed == ()
    assert first.reasons["built"] == "the process ended with code -9: out of memory"
    assert second.passed == CHECKS


@pytest.mark.slow
def test_no_process_is_left_when_a_sweep_is_left():
    found = sweep((*LLAMA, *choose(["gpt2", "mixtral"], "causal-lm")))
    next(found)
    assert multiprocessing.active_children()
    found.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_script_that_cannot_be_imported_by_workers_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from lrpx.coverage import choose, sweep\nprint(*sweep(choose(['llama'], 'causal-lm')))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "no worker can be started; in a script, call sweep() below: if __name__" in done.stderr


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_ended(tmp_path, monkeypatch):
    classes = choose(["llama", "gpt2"], "causal-lm")
    kept = list(sweep(classes[:1], tmp_path)) + list(sweep(classes[1:], tmp_path))
    # no class is checked again
    again = lambda classes, *_: (failed(one, "checked again") for one in classes)  # noqa: E731
    monkeypatch.setattr(_sweeping, "_checked", again)
    assert list(sweep(classes, tmp_path)) == kept
    # a part cut short is made again
    part = Store.read(tmp_path).checked_parts()[1]
    part.write_bytes(part.read_bytes()[:-40])
    again = {one.name: one for one in sweep(classes, tmp_path)}
    wanted = {one.name: one for one in kept}
    assert part.name == "part-causal-lm-LlamaForCausalLM.parquet"
    assert again["GPT2LMHeadModel"] == wanted["GPT2LMHeadModel"]
    assert again["LlamaForCausalLM"].reasons["built"] == "checked again"
    # results of other versions are not mixed with these
    monkeypatch.setattr(_sweeping, "versions", lambda: versions() | {"torch": "1.0"})
    with pytest.raises(ResultFileError, match=r'torch was ".*" and is "1\.0" now; name another folder'):
        next(sweep(classes, tmp_path))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultFileError, match=r"cannot write in .*file.*name another folder"):
        next(sweep(LLAMA, tmp_path / "file"))
