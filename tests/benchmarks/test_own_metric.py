"""A metric of one's own, in one file: range, direction and caption reach every table, ranking and histogram."""

from __future__ import annotations

import io
import math
import re
import statistics

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from lrpx.benchmarks._heatmaps import choose
from lrpx.benchmarks._report import terminal
from lrpx.benchmarks._summary import BINS
from lrpx.metrics._ground_truth import METRICS, metric
from lrpx.runs import Store
from tests.benchmarks.report_samples import BENCHMARK, random_rows, reports, write

ORDER = ("alti", "lrp", "logit")
"""The first has more relevance on the subject than the others have."""


@pytest.fixture(scope="module")
def leak():
    """Registered as a user would do it, and taken back for the other tests."""

    @metric("Leak[b]", "share of absolute relevance beside {truth} less that on it.", (-1.0, 1.0), "lower")
    def leak(relevance, truth):
        size, truth = np.abs(np.asarray(relevance)), np.asarray(truth)
        return float((size[~truth].sum() - size[truth].sum()) / size.sum())

    yield METRICS["Leak[b]"]
    del METRICS._found["Leak[b]"]


@pytest.fixture(scope="module")
def rows(leak):
    return random_rows(60, ORDER, metrics=(METRICS["RMA"], leak))


@pytest.fixture(scope="module")
def folder(rows, leak, tmp_path_factory):
    return write(tmp_path_factory.mktemp("run"), rows, ORDER, (METRICS["RMA"], leak))


@pytest.fixture(scope="module")
def summary(folder):
    return reports(folder)


@pytest.fixture(scope="module")
def means(rows, summary):
    """By hand, the lowest first."""
    right = [row for row in rows if row["correct"]]
    found = {method: statistics.fmean(row[f"Leak[b]/{method}"] for row in right) for method in ORDER}
    return dict(sorted(found.items(), key=lambda each: each[1]))


def figure(value):
    return f"{value:.3f}".replace("-", "−")


def test_the_lowest_is_the_best(summary, means):
    assert means["alti"] < min(means["lrp"], means["logit"])  # so that both metrics agree on the best, and on no sign
    assert summary.best("Leak[b]") == summary.best("RMA") == ["alti"]
    assert [summary.rank("Leak[b]", method) for method in means] == [0, 1, 2]
    assert summary.against_best("Leak[b]", "alti") is None


def test_the_table_in_markdown(folder, means):
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert r"| Method | RMA ↑ | Leak\[b\] ↓ |" in text
    assert f" **{figure(means['alti'])}** [" in text
    assert text.count("**") == 2 * (2 + 2 + 1)  # the best of two metrics, their heads by attractors, the accuracy
    assert "The arrow says whether higher or lower is better" in text
    caption = r"Leak\[b\]: share of absolute relevance beside the subject less that on it."
    assert rf"{caption} (within \[−1, 1\], lower is better)" in text
    assert "All are within" not in text


def test_the_table_in_latex(folder, means):
    text = (folder / "table.tex").read_text(encoding="utf-8")
    assert r"RMA\,\ensuremath{\uparrow} & Leak[b]\,\ensuremath{\downarrow} \\" in text
    best, second, _ = (figure(value).replace("−", r"\ensuremath{-}") for value in means.values())
    assert rf"\textbf{{{best}}} \\" in text
    assert rf"\underline{{{second}}} \\" in text
    assert text.count(r"\textbf") == text.count(r"\underline") == 2


def test_the_page(folder, means, summary):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert ">Leak[b] ↓</th>" in text
    assert re.search(rf'lrpx-best"><span class="lrpx-mean">{figure(means["alti"])}<', text)
    assert "Best: <b>ALTI</b> by RMA and Leak[b]." in text
    assert "<span>−1</span><span>1</span>" in text
    assert "(within [−1, 1], lower is better)" in text
    # the bar begins at −1, and 1000 is the whole range
    for method, mean in means.items():
        width = round(1000 * (mean + 1) / 2)
        cells = text.split(f'<tr><th scope="row">{summary.labels[method]}</th>')[1].split("</tr>")[0]
        assert f'width="{width}" height="10"/>' in cells


def test_the_terminal(summary, means):
    console = Console(width=100, file=io.StringIO())
    group = terminal(summary)
    console.print(group)
    assert "Leak[b] ↓" in console.file.getvalue()
    cells = dict(zip(ORDER, group.renderables[1].columns[1][1], strict=False))
    assert all(isinstance(cell, Text) and cell.plain.startswith(figure(means[name])) for name, cell in cells.items())
    assert [name for name, cell in cells.items() if "bold" in str(cell.style)] == ["alti"]


def test_the_histogram_is_of_the_whole_range(rows, summary):
    assert summary.ends["Leak[b]"] == (-1.0, 1.0)
    right = [row["Leak[b]/lrp"] for row in rows if row["correct"]]
    assert min(right) < 0 < max(right)
    wanted = np.histogram(right, BINS, (-1, 1))[0] / len(right)
    assert summary.shares["Leak[b]"]["lrp"] == pytest.approx(wanted.tolist())


def test_the_worst_explained_are_those_with_the_highest(folder, rows, leak):
    chosen = choose(BENCHMARK, Store.read(folder), ORDER, leak)
    right = [row for row in rows if row["correct"]]
    worst = sorted(right, key=lambda row: -statistics.fmean(row[f"Leak[b]/{method}"] for method in ORDER))[:5]
    assert [each.id for each in chosen[-1].heatmaps] == [row["id"] for row in worst]
    assert "with the highest Leak[b]" in chosen[-1].how


def test_a_metric_without_an_end_has_a_histogram_of_its_values(tmp_path):
    @metric("Excess", "how much more is on {truth} than beside it.", (-math.inf, math.inf))
    def excess(relevance, truth):
        values, truth = np.asarray(relevance), np.asarray(truth)
        return float(values[truth].sum() - values[~truth].sum())

    try:
        made = (METRICS["Excess"],)
        rows = random_rows(30, ORDER, metrics=made)
        found = reports(write(tmp_path, rows, ORDER, made))
    finally:
        del METRICS._found["Excess"]
    right = [row for row in rows if row["correct"]]
    every = [value for row in right for name in ORDER for value in [row[f"Excess/{name}"]]]
    every += [value for row in right for value in row["Excess/random"]]
    assert found.ends["Excess"] == (min(every), max(every))
    assert sum(found.shares["Excess"]["random"]) == pytest.approx(1.0)
    assert "All are any number, higher is better" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "number is the sample’s Excess" in (tmp_path / "report.html").read_text(encoding="utf-8")
