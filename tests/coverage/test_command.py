"""``lrpx coverage`` on the command line."""

from __future__ import annotations

import sys

import pytest

from lrpx.runs import Store


def test_counts_are_printed_and_the_report_written(run, tmp_path):
    page = tmp_path / "coverage.md"
    code, out, err = run("coverage", "gpt2", "--mapping", "causal-lm", "--out", tmp_path / "kept", "--report", page)
    assert (code, err) == (0, "")
    assert "100.0% of the classes that can be built: CP-LRP ledger" in out
    assert f"$ lrpx coverage gpt2 --mapping causal-lm --report {page}\n" in page.read_text()
    assert [path.name for path in Store.read(tmp_path / "kept").checked_parts()] == [
        "part-causal-lm-GPT2LMHeadModel.parquet"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mapping", "poetry"], "there is no mapping 'poetry'"),
        (["gpt2", "parrot"], "no mapping has a model type 'parrot'"),
        (["gpt2", "--mapping", "image-classification"], "no class is left to cover"),
        (["gpt2", "--report", "missing-folder/a.md"], "there is no folder missing-folder; create it first"),
        (["gpt2", "--out", "/dev/null/rows"], "cannot write in /dev/null/rows"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run("coverage", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lrpx: ")
    assert err.count("\n") == 1
    assert message in err


def test_no_worker_is_refused(run):
    code, _, err = run("coverage", "gpt2", "--workers", 0)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.slow
def test_only_a_folder_needs_the_extra(run, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("lrpx.runs", "lrpx.coverage._parts"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run("coverage", "gpt2", "--mapping", "causal-lm")[0] == 0
    code, out, err = run("coverage", "gpt2", "--mapping", "causal-lm", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err == "lrpx: to keep a run's rows in a folder needs pyarrow: pip install 'lrpx[benchmarks]'\n"


@pytest.mark.slow
def test_the_table_is_readable_in_80_columns(run):
    code, out, _ = run("coverage", "gpt2", "--mapping", "causal-lm")
    assert code == 0
    assert "…" not in out
    heads = " ".join(out.split("causal-lm")[0].split())
    for head in ("mapping", "tried", "built", "ran", "identical", "finite", "CP-LRP", "AttnLRP"):
        assert head in heads
    assert max(map(len, out.splitlines())) <= 80
