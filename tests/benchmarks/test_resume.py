"""A benchmark that is stopped, by a signal, a full disk or a broken file, goes on and ends with the same rows."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import lrpx
from lrpx import recipes
from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._agreement import Agreement
from lrpx.errors import ResultFileError
from lrpx.methods import Backward
from lrpx.rules import Gamma
from lrpx.runs import Store
from tests.work import calls_of

SENTENCES = Path(__file__).parent / "data" / "sentences.conllu"
COMMAND = ["lrpx", "benchmark", "sva", "--data", str(SENTENCES), "--out", "out", "--part", "2"]
"""Two samples in a part, so that there are seven parts."""

DRIVER = """
import json, os, resource, signal, sys, time
from pathlib import Path
import torch, transformers.models.llama.modeling_llama, transformers.generation.utils
from lrpx import cli
from lrpx.benchmarks import _report
command, steps = json.loads(sys.argv[1])
torch.set_num_threads(1)
results = []

def parts():
    return sorted(Path("out/rows").glob("part-*"))

for folder, action, after, delay in steps:
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    Path("printed").touch()  # the process may be killed before it has opened it
    pid = os.fork()
    if not pid:
        sys.argv = command
        os.dup2(os.open("printed", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        os.dup2(2, 1)
        try:
            cli.main()
        except SystemExit as left:
            os._exit(left.code or 0)
        os._exit(0)
    if action:
        while len(parts()) < after:
            time.sleep(0.001)
        time.sleep(delay)
    if action == "kill":
        os.kill(pid, signal.SIGKILL)
    if action == "limit":
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (9000, 9000))
    _, status = os.waitpid(pid, 0)
    found = {path.name: path.read_bytes().hex() for path in parts()}
    results.append([os.waitstatus_to_exitcode(status), found, Path("printed").read_text()])
print(json.dumps(results))
"""
"""Runs the command again and again, each time in a process of its own, and disturbs it as told: ``(folder, what to do
to it, when there are so many parts, and so many seconds later)``. The processes are forked from one that has imported
torch, which takes seconds, and has not used it."""
STEPS = {
    "whole": [(None, 0, 0.0)],
    "killed": [*(("kill", parts, random.Random().uniform(0, 0.03)) for parts in (0, 2, 4)), (None, 0, 0.0)],
    "limited": [("limit", 2, 0.0), (None, 0, 0.0)],
}


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """``(folder, [(exit code, parts by name, what was printed)])`` of each of ``STEPS``."""
    folder = tmp_path_factory.mktemp("driven")
    steps = [(str(folder / name), *step) for name, each in STEPS.items() for step in each]
    given = json.dumps([COMMAND, steps])
    done = subprocess.run([sys.executable, "-c", DRIVER, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = iter(json.loads(done.stdout))
    return {name: (folder / name / "out", [next(results) for _ in each]) for name, each in STEPS.items()}


@pytest.fixture(scope="module")
def whole(driven):
    """The folder of a run that nobody disturbed."""
    folder, [(code, parts, printed)] = driven["whole"]
    assert (code, len(parts)) == (0, 7), printed
    return folder


def parts(folder):
    return sorted((folder / "rows").glob("part-*"))


def assert_same(folder, whole):
    """The same rows, bit for bit, and the same reports; and nothing else is left."""
    assert_frame_equal(*(pl.read_parquet(each / "rows" / "*.parquet") for each in (folder, whole)), check_exact=True)
    for name in ("table.md", "report.html", "table.tex", "heatmaps.tex", "run.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    names = [sorted(path.relative_to(each) for path in each.rglob("*")) for each in (folder, whole)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_the_same(driven, whole):
    folder, (*killed, last) = driven["killed"]
    assert [code for code, _, _ in killed] == [-9] * 3, killed
    assert 4 <= len(killed[-1][1]) < 7
    for (_, before, _), (_, after, _) in pairwise([*killed, last]):
        assert before.items() <= after.items()
    assert (last[0], len(last[1])) == (0, 7), last[2]
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_file_that_cannot_grow_ends_with_one_line_and_costs_no_row(driven, whole):
    """The limit on a file's size is an error of the same kind as a full disk, and anyone may set it."""
    folder, [(code, parts, printed), last] = driven["limited"]
    assert code == 2
    assert 2 <= len(parts) < 7
    line = printed.splitlines()[-1]
    assert line.startswith("lrpx: cannot write out/rows/part-0000")
    assert "File too large; make room in that folder" in line
    assert parts.items() <= last[1].items()
    assert (last[0], len(last[1])) == (0, 7), last[2]
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_full_disk(whole, tmp_path, monkeypatch, run):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here, which takes root")
    try:
        monkeypatch.chdir(disk)
        code, _, err = run(*COMMAND[1:])
        assert code == 2
        assert "No space left on device; make room in that folder" in err
        written = {path: path.read_bytes() for path in parts(disk / "out")}
        assert 0 < len(written) < 7
        assert not list(disk.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        code, _, err = run(*COMMAND[1:])
        assert code == 0, err
        assert {path: path.read_bytes() for path in written} == written
        found, wanted = (pl.read_parquet(each / "rows" / "*.parquet") for each in (disk / "out", whole))
        assert_frame_equal(found, wanted, rel_tol=1e-4, abs_tol=1e-4)
    finally:
        monkeypatch.undo()
        subprocess.run(["umount", str(disk)], check=True)


# ------------------------------------------------------------------------------ in this process


@pytest.fixture(scope="module")
def explainer():
    return lrpx.Explainer.from_pretrained()


@pytest.fixture
def again(explainer, tmp_path):
    """Run the benchmark in a folder, with two methods: how many samples were explained anew."""

    def call(methods=("lrp", "attnlrp"), batch_size=32, metrics=None, **options):
        done = []
        benchmark = Agreement([SENTENCES], **options)
        run = Run(benchmark, explainer.bound, methods, metrics, batch_size=batch_size, part=4)
        with calls_of(explainer.model) as calls, keep(run, tmp_path) as kept:
            kept.explain(done.append)
            benchmark.report(kept.store)
        assert sum(done) == len(run)
        return sum(len(given["input_ids"]) for given in calls) // 2

    return call


def test_what_is_there_is_kept(again, tmp_path):
    assert again() == 14
    before = {path: path.stat().st_mtime_ns for path in [*parts(tmp_path), tmp_path / "samples.parquet"]}
    assert again() == 0
    assert again(batch_size=2) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def breakages():
    def cut(path, _):
        path.write_bytes(path.read_bytes()[:-100])

    def flip(path, _):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 0xFF
        path.write_bytes(content)

    def empty(path, _):
        path.write_bytes(b"")

    def another(path, other):
        path.write_bytes(other.read_bytes())

    def gone(path, _):
        path.unlink()

    return {"cut": cut, "flipped bit": flip, "empty": empty, "another part": another, "gone": gone}


@pytest.mark.parametrize("how", breakages())
def test_a_broken_part_is_made_again(again, tmp_path, how):
    again()
    content = {path: path.read_bytes() for path in parts(tmp_path)}
    table = (tmp_path / "table.md").read_bytes()
    first, second, *_ = content
    breakages()[how](first, second)
    (tmp_path / "rows" / ".part-00003.parquet.123.tmp").write_bytes(b"half a file")
    assert again() == 4
    assert {path: path.read_bytes() for path in parts(tmp_path)} == content
    assert (tmp_path / "table.md").read_bytes() == table
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["samples.parquet", "dropped.parquet"])
def test_broken_samples_are_read_again(again, tmp_path, name):
    again()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-9])
    assert again() == 0
    assert (tmp_path / name).read_bytes() == content


def test_the_sentences_are_not_read_again(again, tmp_path, monkeypatch):
    again()

    def refuse(*_, **__):
        raise AssertionError("read again")

    monkeypatch.setattr(Agreement, "read", refuse)
    assert again() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"methods": ["lrp"]},
            r'methods was \["lrp", "attnlrp"\] and is \["lrp"\] now; name another folder with --out',
        ),
        ({"limit": 3}, "limit was null and is 3 now"),
        ({"only": Path(__file__)}, "only was null and is"),
        ({"metrics": ["RMA"]}, "metrics was"),
        ({"methods": [Backward("lrp", recipes.LRP.at("*.mlp", linear=Gamma(0.25))), "attnlrp"]}, "described lrp was"),
    ],
)
def test_other_settings_are_refused(again, tmp_path, options, message):
    again()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ResultFileError, match=message):
        again(**options)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_model_of_the_same_name_is_refused(again, explainer):
    again()
    weight = explainer.model.get_input_embeddings().weight
    weight.data.neg_()
    try:
        with pytest.raises(ResultFileError, match="weights and config was"):
            again()
    finally:
        weight.data.neg_()
    assert again() == 0


def test_another_tokenizer_is_refused(again, explainer, monkeypatch):
    again()
    with monkeypatch.context() as changed:
        changed.setattr(explainer.tokenizer, "chat_template", "{{ messages }}")
        with pytest.raises(ResultFileError, match="tokenizer was"):
            again()
    assert again() == 0


def test_settings_may_change_until_there_are_rows(again, explainer, tmp_path):
    with keep(Run(Agreement([SENTENCES], limit=3), explainer.bound, ["alti"]), tmp_path):
        pass
    assert again() == 14


def test_versions_are_listed_and_may_differ(again, tmp_path):
    again()
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    torch = record["versions"]["torch"]
    Store.read(tmp_path).note(versions=record["versions"] | {"torch": "1.0"})
    assert again() == 0
    assert json.loads(path.read_text())["versions"]["torch"] == f"1.0, {torch}"
    assert again() == 0
    assert json.loads(path.read_text())["versions"]["torch"] == f"1.0, {torch}"


def test_rows_without_their_record_are_refused(again, tmp_path):
    again()
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ResultFileError, match=r"run\.json is not the record of a run; name another folder"):
        again()


def test_a_part_that_other_versions_made_goes(again, tmp_path):
    again()
    first, *_ = parts(tmp_path)
    first.with_name("part-00004.parquet").write_bytes(first.read_bytes())
    assert again() == 0
    assert len(parts(tmp_path)) == 4


def test_a_second_run_at_the_same_time_is_refused(again, explainer, tmp_path, run):
    """Its rows would be mixed with those of the first, which may be another model's."""
    again()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with keep(Run(Agreement([SENTENCES]), explainer.bound, ["lrp", "attnlrp"], part=4), tmp_path) as kept:
        with pytest.raises(ResultFileError, match=r"another run is writing in .* name another folder"):
            again()
        code, out, err = run("benchmark", "sva", "--data", SENTENCES, "--out", tmp_path, "--part", 4)
        assert (code, out) == (2, "")
        assert err.startswith(f"lrpx: another run is writing in {tmp_path}")
        kept.explain()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in after if after[path] != before[path]} <= {tmp_path / "run.json"}


def test_a_copy_of_a_method_does_not_take_its_label(explainer, tmp_path):
    """Tables would have two methods of one name, of which one is another."""
    copies = [replace(lrpx.METHODS["attnlrp"], name=name, recipe=lrpx.LRP) for name in ("mine", "mine too")]
    own = [replace(copies[0], name="new", label="New"), replace(copies[0], name="newer", label="New")]
    run = Run(Agreement([SENTENCES], limit=3), explainer.bound, ["attnlrp", *copies, *own])
    with keep(run, tmp_path) as kept:
        found = kept.store.record["labels"]
    assert found == {"attnlrp": "AttnLRP", "mine": "mine", "mine too": "mine too", "new": "New", "newer": "newer"}
