"""A metric: its range, its direction, and what it says of itself."""

from __future__ import annotations

import json
import math

import pytest

from lrpx.errors import InputError
from lrpx.metrics import Metric
from lrpx.metrics._ground_truth import METRICS, metric

SIGNED = Metric("Signed", "what it says.", -1.0, 1.0, "lower", lambda value: value)


@pytest.mark.parametrize("value", [-1.0, 0.25, 1.0 + 1e-12])
def test_a_value_within_the_range_is_the_functions(value):
    assert SIGNED(value) == value


@pytest.mark.parametrize("value", [1.001, -2.0, math.nan, math.inf])
def test_a_value_outside_the_range_is_refused(value):
    with pytest.raises(
        InputError, match=r"Signed gave .*, which is not within \[−1, 1\]; mend the function or its range"
    ):
        SIGNED(value)


@pytest.mark.parametrize("value", [None, "much", [1.0, 2.0]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(InputError, match=r"Signed gave (NoneType|str|list), which is no number; mend the function"):
        SIGNED(value)


def test_direction():
    assert SIGNED.beats(-0.5, 0.5)
    assert not SIGNED.beats(0.5, 0.5)
    assert METRICS["PG2"].beats(0.5, -0.5)
    assert (SIGNED.arrow, METRICS["PG2"].arrow) == ("↓", "↑")


@pytest.mark.parametrize(
    ("low", "high", "within", "ends"),
    [
        (-1.0, 1.0, "within [−1, 1]", (-1.0, 1.0)),
        (0.0, math.inf, "at least 0", (0.0, 3.0)),
        (-math.inf, 5.0, "at most 5", (-2.0, 5.0)),
        (-math.inf, math.inf, "any number", (-2.0, 3.0)),
    ],
)
def test_a_range_without_an_end_has_an_axis_with_one(low, high, within, ends):
    made = Metric("M", "", low, high, "higher")
    assert made.within == within
    assert made.ends([-2.0, 3.0]) == ends
    assert made.ends([low] if math.isfinite(low) else [])[0] < made.ends([])[1]


@pytest.mark.parametrize("made", [SIGNED, Metric("M", "c", -math.inf, math.inf, "higher"), METRICS["RMA"]])
def test_what_it_says_of_itself_is_plain_and_read_again(made):
    described = json.loads(json.dumps(made.describe(), allow_nan=False))
    assert Metric.read(described) == made
    with pytest.raises(InputError, match="register the metric to measure"):
        Metric.read(described)(0.5)


@pytest.mark.parametrize("described", [{}, [], {"name": "M"}, SIGNED.describe() | {"better": "faster"}])
def test_what_describes_no_metric_is_refused(described):
    with pytest.raises(InputError):
        Metric.read(described)


@pytest.mark.parametrize(
    ("name", "ends", "better", "message"),
    [
        ("a/b", (0, 1), "higher", "without a slash"),
        ("", (0, 1), "higher", "without a slash"),
        ("M", (1, 0), "higher", "give the lower end first"),
        ("M", (0, math.nan), "higher", "give the lower end first"),
        ("M", (0, 1), "faster", 'say "higher" or "lower"'),
    ],
)
def test_what_is_no_metric_is_refused_when_it_is_registered(name, ends, better, message):
    with pytest.raises(InputError, match=message):
        metric(name, "c", ends, better)(lambda relevance, truth: 0.0)
    assert name not in METRICS


def test_a_name_is_given_once():
    with pytest.raises(InputError, match="there is a metric 'PG2' already; give yours another name"):
        metric("PG2", "c")(lambda relevance, truth: 0.0)
