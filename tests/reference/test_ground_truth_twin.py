"""The twins of the metrics and statistics on cases small enough to work out by hand."""

from __future__ import annotations

from math import factorial

import pytest

from tests.reference.ground_truth import METRICS, mrr, pg, pta, rankings, rma
from tests.reference.statistics import bootstrap_means, holm, interval, paired_test

FIRST = [True, False, False, False]


def test_without_ties() -> None:
    relevance, truth = [0.5, -1.0, 3.0, 0.25, 0.0], [True, False, False, True, False]
    assert list(rankings(relevance)) == [[2, 0, 3, 4, 1]]
    assert pg(relevance, truth, 1) == 0
    assert pg(relevance, truth) == 1
    assert mrr(relevance, truth) == 1 / 2  # token 0 stands second, token 3 third
    assert rma(relevance, truth) == 0.75 / 3.75
    assert pta(relevance, truth) == 4 / 5  # all but token 2


def test_one_token() -> None:
    assert [metric([1.0], [True]) for metric in METRICS.values()] == [1, 1, 1, 1]
    assert [metric([-1.0], [True]) for metric in METRICS.values()] == [1, 1, 0, 0]


def test_nothing_positive() -> None:
    relevance = [-0.5, -1.0, -2.0, 0.0]
    assert rma(relevance, FIRST) == 0
    assert pta(relevance, FIRST) == 3 / 4
    assert mrr(relevance, FIRST) == 1 / 2


def test_a_constant_attribution_scores_as_chance() -> None:
    for constant in (1.0, 0.0, -1.0):
        assert pg([constant] * 4, FIRST) == 2 / 4
        assert mrr([constant] * 4, FIRST) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, abs=1e-15)
    assert rma([1.0] * 4, FIRST) == pta([1.0] * 4, FIRST) == 1 / 4
    assert rma([0.0] * 4, FIRST) == 0
    assert pta([0.0] * 4, FIRST) == 3 / 4


def test_ties_around_the_second_place() -> None:
    relevance = [1.0, 5.0, 1.0, 1.0]  # one place left among the three that follow token 1
    assert pg(relevance, FIRST) == pytest.approx(1 / 3, abs=1e-15)
    assert mrr(relevance, FIRST) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, abs=1e-15)
    both = [True, False, True, False]
    assert pg(relevance, both) == pytest.approx(2 / 3, abs=1e-15)
    assert mrr(relevance, both) == pytest.approx(2 / 3 * 1 / 2 + 1 / 3 * 1 / 3, abs=1e-15)  # second, or third at worst


def test_ties_that_do_not_matter() -> None:
    assert pg([2.0, 2.0, 0.0, 0.0], FIRST) == 1
    assert mrr([3.0, 2.0, 2.0, 2.0], FIRST) == 1
    assert pg([0.0, 2.0, 2.0, 2.0], FIRST) == 0


def test_zeros_of_both_signs_are_tied() -> None:
    assert len(list(rankings([0.0, -0.0, 0.0, 1.0]))) == factorial(3)
    assert len(list(rankings([2.0, 1.0, 2.0, 1.0]))) == 4


def test_every_token_is_ground_truth() -> None:
    assert [metric([2.0, 1.0, 1.0], [True] * 3) for metric in METRICS.values()] == [1, 1, 1, 1]


def test_more_places_than_tokens() -> None:
    assert pg([0.0, 1.0], [True, False], 5) == 1


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1.0, 1e300])
def test_any_order_of_magnitude(scale: float) -> None:
    # halves and doubles of one number: exact at every scale, subnormal numbers included
    relevance, truth = [2 * scale, scale, -4 * scale, scale], [False, True, True, False]
    assert rma(relevance, truth) == 1 / 4
    assert mrr(relevance, truth) == pytest.approx((1 / 2 + 1 / 3) / 2, abs=1e-15)
    assert rma([1.7e308, 1.7e308], [True, False]) == 1 / 2  # the sum itself is no float


def test_bootstrap_by_hand() -> None:
    assert bootstrap_means([0.0, 1.0]) == [0, 0.5, 0.5, 1]
    assert interval([0.0, 1.0], 0.5) == (0.0, 0.5)  # 1/4 of the resamples are at most 0, 3/4 at most 1/2
    assert interval([0.0, 1.0], 0.95) == (0.0, 1.0)
    # three of {0, 0, 3}: means 0, 1, 2, 3 in 8, 12, 6, 1 of 27 resamples
    assert [bootstrap_means([0.0, 0.0, 3.0]).count(m) for m in range(4)] == [8, 12, 6, 1]
    assert interval([0.0, 0.0, 3.0], 0.5) == (0.0, 2.0)  # 8/27 > 1/4; 20/27 < 3/4
    assert interval([2.5] * 4) == (2.5, 2.5)


def test_sign_flips_by_hand() -> None:
    # differences 1, 2, 3: of 8 signed sums only +6 and −6 are as far out
    assert paired_test([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]) == 2 / 8
    # differences 1, 2, −3: sum 0, and every sum is at least that far out
    assert paired_test([1.0, 2.0, 0.0], [0.0, 0.0, 3.0]) == 1
    # differences 3, 1, −1: sum 3; of 8 sums ±5, ±3, ±3, ±1 six are as far out
    assert paired_test([3.0, 1.0, 0.0], [0.0, 0.0, 1.0]) == 6 / 8
    assert paired_test([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]) == 1
    assert paired_test([1.0] * 10, [0.0] * 10) == 2 / 2**10


def test_sign_flips_are_exact() -> None:
    # 1 + 1e-17 is 1 in float64; as fractions the flip of the small difference is told apart
    assert paired_test([1.0, 1e-17], [0.0, 0.0]) == 2 / 4


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06], abs=1e-15)  # 3·.01; max(1·.04, 2·.03); 2·.03
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([0.02, 0.02]) == pytest.approx([0.04, 0.04])
    assert holm([0.2]) == [0.2]
