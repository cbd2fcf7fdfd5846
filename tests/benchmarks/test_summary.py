"""The numbers of a benchmark, against the same computed row by row in plain Python and numpy."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from fractions import Fraction

import pyarrow.parquet as pq
import pytest

from lrpx.benchmarks import _summary as summaries
from lrpx.benchmarks._summary import BINS, Means, select
from lrpx.errors import ResultFileError
from lrpx.metrics._ground_truth import METRICS
from lrpx.runs import Store
from tests.benchmarks.report_samples import BENCHMARK, METHODS, random_rows, write

ROWS = random_rows(300)
RIGHT = [row for row in ROWS if row["correct"]]


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return summarise(write(tmp_path_factory.mktemp("run"), ROWS))


def summarise(folder):
    return summaries.summarise(Store.read(folder), BENCHMARK.group)


def changed(folder, **settings):
    """The run of a folder with other settings, in its record and in its parts."""
    with Store.begin(folder / "new", "sva", Store.read(folder).settings | settings, {}) as store:
        store.note()
        for path in Store.read(folder).parts():
            store.keep(path.stem.removeprefix("part-"), pq.read_table(path))
    return folder / "new"


def column(metric, name):
    return [row[f"{metric}/{name}"] for row in RIGHT]


def test_counts_and_accuracy(summary):
    assert (summary.samples, summary.correct) == (300, len(RIGHT))
    assert 0 < len(RIGHT) < 300
    assert summary.accuracy == len(RIGHT) / 300


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("method", METHODS)
def test_means_are_over_the_correct_samples_with_an_interval_as_wide_as_the_normal_one(summary, metric, method):
    values, score = column(metric, method), summary.scores[metric][method]
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert score.mean == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert score.low == pytest.approx(score.mean - 1.96 * error, abs=0.25 * error)
    assert score.high == pytest.approx(score.mean + 1.96 * error, abs=0.25 * error)


@pytest.mark.parametrize("metric", METRICS)
def test_chance_is_over_the_draws(summary, metric):
    means = [statistics.fmean(draw) for draw in zip(*column(metric, "random"), strict=True)]
    assert summary.chance[metric].mean == pytest.approx(statistics.fmean(means), abs=1e-12)
    assert summary.chance[metric].std == pytest.approx(statistics.pstdev(means), abs=1e-12)
    assert summary.chance[metric].draws == 10


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("method", METHODS)
def test_shares_count_the_values(summary, metric, method):
    edges = [Fraction(at, BINS) for at in range(BINS)]
    values = [Fraction(value).limit_denominator(10**9) for value in column(metric, method)]
    counted = Counter(sum(value >= edge for edge in edges) - 1 for value in values)
    shares = summary.shares[metric][method]
    assert [round(share * len(RIGHT), 9) for share in shares] == [counted[at] for at in range(BINS)]


def test_groups_by_attractors(summary):
    assert [group.number for group in summary.groups] == [1, 2, 3]
    assert sum(group.samples for group in summary.groups) == 300
    for group in summary.groups:
        mine = [row for row in RIGHT if row["attractors"] == group.number]
        assert group.correct == len(mine)
        assert group.means["RMA"]["lrp"] == pytest.approx(statistics.fmean(row["RMA/lrp"] for row in mine))
        every = [value for row in mine for value in row["MRR/random"]]
        assert group.means["MRR"]["random"] == pytest.approx(statistics.fmean(every))


def test_a_group_without_a_correct_sample_has_no_means(tmp_path):
    found = random_rows(30)
    for row in found:
        if row["attractors"] == 2:
            row |= {"correct": False, "logit_difference": -1.0}
    two = summarise(write(tmp_path, found)).groups[1]
    assert two == Means(2, sum(row["attractors"] == 2 for row in found), 0, {})


def test_the_tests_tell_a_better_method_from_noise(summary):
    for metric in ("PG2", "MRR", "RMA"):
        assert summary.best(metric) == ["lrp"]
        assert summary.against_best(metric, "lrp") is None
        assert all(summary.against_best(metric, method) < 0.01 for method in METHODS[1:])
        noise = [p for pair, p in summary.p_values[metric].items() if "lrp" not in pair]
        assert len(noise) == 6
        assert min(noise) > 0.05


def test_methods_that_are_equally_good_are_both_best(tmp_path):
    found = random_rows(40, ["lrp", "attnlrp", "logit"])
    for row in found:
        row |= {f"{metric}/attnlrp": row[f"{metric}/lrp"] for metric in METRICS}
    summary = summarise(write(tmp_path, found, ["lrp", "attnlrp", "logit"]))
    assert summary.best("RMA") == ["lrp", "attnlrp"]
    assert summary.rank("RMA", "logit") == 2
    assert summary.p_values["RMA"]["lrp", "attnlrp"] == 1.0
    assert summary.gradient is None


def test_gradient_is_the_norm_with_the_higher_mrr(summary):
    higher = max(("gradient-l1", "gradient-l2-squared"), key=lambda m: statistics.fmean(column("MRR", m)))
    assert summary.gradient == higher


def test_one_method_alone_has_nothing_to_be_tested_against(tmp_path):
    summary = summarise(write(tmp_path, random_rows(5, ["alti"]), ["alti"]))
    assert summary.best("PG2") == ["alti"]
    assert summary.p_values["PG2"] == {}


def test_rows_come_in_the_order_of_the_run_and_by_id(tmp_path):
    folder = write(tmp_path, ROWS[:31])
    assert select(Store.read(folder), ["id"])["id"].to_list() == [row["id"] for row in ROWS[:31]]
    some = select(Store.read(folder), ["id", "relevance/lrp"], ids=["random:30", "random:2"])
    assert some["relevance/lrp"].to_list() == [ROWS[1]["relevance/lrp"], ROWS[29]["relevance/lrp"]]


def test_no_flipped_bit_of_the_rows_goes_unseen(tmp_path):
    """A report is written of rows that polars, which knows no checksums, would read as they are, or end the process."""
    store = Store.read(write(tmp_path, ROWS[:8]))
    columns = ["id", "correct", "relevance/lrp", "RMA/lrp"]
    kept, path = select(store, columns), store.parts()[0]
    whole, unseen, drawn = path.read_bytes(), [], random.Random(0)
    for bit in [drawn.randrange(8 * len(whole)) for _ in range(400)]:
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        try:
            unseen += [] if select(store, columns).equals(kept) else [bit]
        except ResultFileError:
            continue
    assert unseen == []


def test_a_folder_with_signs_of_a_pattern_is_read(tmp_path):
    folder = tmp_path / "run [1] *"
    assert summarise(write(folder, ROWS[:10])).samples == 10


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"settings": {}}', "[" * 5000])
def test_a_record_that_describes_no_run_is_named(tmp_path, text):
    write(tmp_path, ROWS[:4])
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(ResultFileError, match=r"run\.json does not describe a run .*run it into a new folder"):
        summarise(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"methods": []},
        {"model": 1},
        {"methods": "lrp"},
        {"methods": [1]},
        {"metrics": []},
        {"metrics": [{"name": "M"}]},
    ],
)
def test_a_run_without_methods_or_metrics_is_named(tmp_path, settings):
    with pytest.raises(ResultFileError, match=r"does not hold a run of methods .*run it into a new folder"):
        summarise(changed(write(tmp_path, ROWS[:4]), **settings))


def test_a_folder_without_a_run_or_rows_is_named(tmp_path):
    with pytest.raises(ResultFileError, match=r"cannot read .*run\.json.*run it first"):
        summarise(tmp_path)
    write(tmp_path, [])
    with pytest.raises(ResultFileError, match=r"no rows in .*run it first"):
        summarise(tmp_path)


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_a_part_that_is_cut_short_is_refused(tmp_path, kept):
    part = Store.read(write(tmp_path, ROWS[:10])).path("00001")
    content = part.read_bytes()
    part.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(ResultFileError, match="cannot read the rows"):
        summarise(tmp_path)


def test_rows_that_lack_a_method_are_refused(tmp_path):
    folder = write(tmp_path, random_rows(4, ["lrp"]), ["lrp"])
    with pytest.raises(ResultFileError, match="logit"):
        summarise(changed(folder, methods=["lrp", "logit"]))


def test_rows_of_another_run_are_refused(tmp_path):
    """Two models' rows in one folder: half of each would be neither's result."""
    folder, other = write(tmp_path / "a", ROWS[:10]), write(tmp_path / "b", ROWS[:10], model="another")
    Store.read(folder).path("00001").write_bytes(Store.read(other).path("00001").read_bytes())
    with pytest.raises(ResultFileError, match=r"part-00001\.parquet are of a run with other settings"):
        summarise(folder)


def test_a_model_that_is_never_right_cannot_be_scored(tmp_path):
    wrong = [row | {"correct": False, "logit_difference": -1.0} for row in ROWS[:6]]
    with pytest.raises(ResultFileError, match=r"none of the 6 samples .* correctly"):
        summarise(write(tmp_path, wrong))
