"""The intervals and tests of means: against closed forms, against scipy, and how often they are wrong."""

from __future__ import annotations

import itertools
import math
import random
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lrpx.errors import InputError, MissingExtraError
from lrpx.metrics._images import mean_iou
from lrpx.metrics._statistics import FLIPS, RESAMPLES, holm, interval, least_p_value, paired_test, swap_test
from tests.reference import statistics as twins

FINITE = st.floats(-100, 100)
FEW = settings(max_examples=25, deadline=None)
MANY = settings(deadline=None)


# --- interval


@pytest.mark.parametrize("values", [[0.1], [0.1] * 7, [0.0] * 14_000, [1.0] * 3, [-2.5, -2.5]])
def test_constant_values_have_an_interval_of_their_mean(values):
    assert interval(values) == (values[0], values[0])


def test_two_values_by_hand():
    # Of four equally likely resamples of (0, 1), the means are 0, 1/2, 1/2, 1: the middle 95 % reach to both ends,
    # the middle 40 % (from the 30th to the 70th percentile) are at 1/2.
    assert interval([0.0, 1.0]) == (0.0, 1.0)
    assert interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_many_values_have_the_normal_interval(level):
    values = np.random.default_rng(3).random(2000)
    half = stats.norm.ppf((1 + level) / 2) * values.std() / math.sqrt(len(values))
    assert interval(values, level=level) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.07 * half)


def test_zeros_and_ones_have_the_binomial_interval():
    # The sum of a resample of 30 with 26 ones is binomial(30, 26/30).
    for seed in range(3):
        low, high = interval([1.0] * 26 + [0.0] * 4, seed=seed)
        assert (low, high) == pytest.approx(stats.binom.ppf([0.025, 0.975], 30, 26 / 30) / 30, abs=1e-12)


@FEW
@given(st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=5), st.integers(0, 9))
def test_the_interval_is_that_of_all_resamples(values, seed):
    """Of all N^N: the drawn ends stand at most six standard errors of their share from the exact ones."""
    low, high = interval(values, seed=seed)
    error = 6 * math.sqrt(0.025 * 0.975 / RESAMPLES)
    narrow, wide = twins.interval(values, 0.95 - 2 * error), twins.interval(values, 0.95 + 2 * error)
    assert wide[0] - 1e-12 <= low <= narrow[0] + 1e-12
    assert narrow[1] - 1e-12 <= high <= wide[1] + 1e-12


@FEW
@given(st.lists(FINITE, min_size=2, max_size=20), st.floats(0.1, 10), FINITE)
def test_the_interval_lies_within_the_values_and_moves_with_them(values, factor, shift):
    low, high = interval(values)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    moved = interval([factor * value + shift for value in values])
    assert moved == pytest.approx((factor * low + shift, factor * high + shift), rel=1e-9, abs=1e-9)
    assert interval(values, level=0.5)[0] >= low
    assert interval(values, level=0.5)[1] <= high


def test_the_interval_holds_the_true_mean_as_often_as_it_says():
    generator = np.random.default_rng(11)
    # Reciprocal ranks of a fair method: mean (1 + 1/2 + 1/3 + 1/4) / 4 = 25 / 48.
    held = []
    for _ in range(300):
        low, high = interval(1 / generator.integers(1, 5, size=60), level=0.9)
        held.append(low <= 25 / 48 <= high)
    assert 0.9 - 4 * math.sqrt(0.09 / 300) < np.mean(held) < 0.9 + 4 * math.sqrt(0.09 / 300)


@pytest.mark.parametrize(
    ("values", "level", "message"),
    [
        ([], 0.95, "at least one"),
        ([[0.5, 1.0]], 0.95, r"shape \[1, 2\]"),
        (0.5, 0.95, r"shape \[\]"),
        ([0.5, math.nan], 0.95, "NaN or infinite"),
        ([0.5, math.inf], 0.95, "NaN or infinite"),
        ([0.5, 1.0], 95, "between 0 and 1"),
        ([0.5, 1.0], 0.0, "between 0 and 1"),
        ([0.5, 0.5], 1.0, "between 0 and 1"),
        ([0.5, 1.0], math.nan, "between 0 and 1"),
    ],
)
def test_no_interval_of_what_is_no_sample(values, level, message):
    with pytest.raises(InputError, match=message):
        interval(values, level=level)


def test_without_scipy_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lrpx\[benchmarks\]'"):
        interval([0.0, 1.0])
    assert paired_test([1.0, 0.5], [0.0, 0.25]) == 0.5


# --- paired_test


def test_signs_by_hand():
    # All differences positive: only the two choices of all signs alike reach so far.
    assert paired_test([3, 2, 4], [1, 1, 1]) == 2 / 8
    # Differences 3, −1: |±3 ± 1| is 2 or 4, each twice; all are at least the observed 2.
    assert paired_test([3, 0], [0, 1]) == 1.0
    # Differences 1, 2, −4: sums of absolute value 1 (observed), 7, 3, 5: all again.
    assert paired_test([1, 2, 0], [0, 0, 4]) == 1.0
    # Differences 1, −2, 4: the observed 3 and 7, 5 are, 1 is not: 6 of 8.
    assert paired_test([1, 0, 4], [0, 2, 0]) == 6 / 8


@pytest.mark.parametrize("size", [1, 5, 14_000])
def test_identical_values_do_not_differ(size):
    values = np.random.default_rng(0).random(size)
    assert paired_test(values, values) == 1.0


def test_sums_that_differ_by_rounding_alone_are_equal():
    # 0.1 + 0.2 − 0.3 is 5.6e-17 in floating point, and with the signs the other way round −5.6e-17.
    assert paired_test([0.1, 0.2, 0.0], [0.0, 0.0, 0.3]) == 1.0
    # 7 + 2 + 3 + 7 tenths are odd, so no choice of signs has a sum nearer to 0 than the observed 0.1.
    assert paired_test([0.0, 0.0, 0.3, 0.7], [0.7, 0.2, 0.0, 0.0]) == 1.0


@pytest.mark.parametrize("samples", [1, 4, 8, 13, 14, 60])
def test_the_least_p_value_is_that_of_samples_which_all_say_the_same(samples):
    assert paired_test(np.ones(samples), np.zeros(samples)) == pytest.approx(least_p_value(samples), abs=3e-4)
    assert least_p_value(samples) <= paired_test(np.arange(samples) + 1.0, np.zeros(samples)) + 3e-4


def test_values_that_differ_by_rounding_alone_do_not_differ():
    # The mean share of four quadrants is 0.25 whatever the map, or the number before it.
    quarters = np.full(80, 0.25)
    assert paired_test(quarters, np.nextafter(quarters, 0)) == paired_test(quarters, np.nextafter(quarters, 1)) == 1.0
    assert paired_test(quarters - 1e-9, quarters) == 1 / (FLIPS + 1)
    assert paired_test(np.full(80, 1e-30), np.zeros(80)) == 1 / (FLIPS + 1)  # by their own size, not by ours


@FEW
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=8))
def test_few_samples_agree_with_the_slow_twin_and_with_scipy(pairs):
    a, b = np.array(pairs, dtype=float).T
    assert paired_test(a, b) == pytest.approx(twins.paired_test(a, b), rel=1e-12)
    expected = stats.permutation_test(
        (a, b), lambda a, b, axis: np.mean(a - b, axis=axis), permutation_type="samples", vectorized=True
    )
    assert paired_test(a, b) == pytest.approx(expected.pvalue, rel=1e-12)


COUNTED = st.tuples(*(st.integers(0, 9) for _ in range(4)))


@FEW
@given(st.lists(st.tuples(COUNTED, COUNTED), min_size=1, max_size=7))
def test_numbers_of_a_set_are_tested_by_swaps_of_samples(pairs):
    a, b = ([list(map(float, pair[side])) for pair in pairs] for side in (0, 1))
    assert swap_test(a, b, mean_iou) == twins.swap_test(a, b, mean_iou) == swap_test(b, a, mean_iou)


@FEW
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=20), st.integers(0, 9))
def test_of_a_mean_swaps_are_sign_flips(pairs, seed):
    a, b = np.array(pairs, dtype=float).T
    swapped = swap_test(a[:, None], b[:, None], lambda sums: sums[0] / len(pairs), seed)
    assert swapped == paired_test(a, b, seed)


def test_drawn_signs_agree_with_all_signs():
    generator = np.random.default_rng(5)
    for shift in (0.0, 0.15, 0.3):
        differences = generator.normal(shift, 0.5, size=16)
        sums = np.array(list(itertools.product([-1.0, 1.0], repeat=16))) @ differences
        exact = np.mean(abs(sums) >= abs(differences.sum()) - 1e-12)
        error = math.sqrt(exact * (1 - exact) / FLIPS) + 1 / FLIPS
        assert abs(paired_test(differences, np.zeros(16)) - exact) < 4 * error


@FEW
@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=30), st.integers(0, 9))
def test_which_method_comes_first_does_not_matter_nor_do_samples_without_a_difference(pairs, seed):
    a, b = np.array(pairs).T
    p = paired_test(a, b, seed=seed)
    assert 0.0 < p <= 1.0
    assert paired_test(b, a, seed=seed) == p
    assert paired_test([*a, 0.25, 7.0], [*b, 0.25, 7.0], seed=seed) == p


def test_a_sure_difference_has_the_smallest_p_value_there_is():
    values = np.random.default_rng(0).random(500)
    assert paired_test(values + 0.5, values) == 1 / (FLIPS + 1)


@pytest.mark.parametrize("size", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_p_values_are_uniform_if_there_is_no_difference(size):
    generator = np.random.default_rng(17)
    p = [paired_test(*generator.random((2, size)), seed=seed) for seed in range(400)]
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert np.mean(np.array(p) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([0.5, 1.0], [0.5], "2 values are paired with 1"),
        ([], [], "at least one"),
        ([0.5, math.nan], [0.5, 1.0], "NaN or infinite"),
        ([0.5, 1.0], [[0.5, 1.0]], r"shape \[1, 2\]"),
    ],
)
def test_what_is_not_paired_is_refused(a, b, message):
    with pytest.raises(InputError, match=message):
        paired_test(a, b)


# --- both


def test_seeds_and_the_global_random_state():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    a, b = np.random.default_rng(1).random((2, 100))
    assert interval(a) == interval(a, seed=0) != interval(a, seed=1)
    assert paired_test(a, b) == paired_test(a, b, seed=0) != paired_test(a, b, seed=1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_memory_does_not_grow_with_resamples_times_samples():
    a, b = np.random.default_rng(1).random((2, 14_000))
    tracemalloc.start()
    try:
        interval(a)
        paired_test(a, b)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20  # all at once would be 2.1 GiB


# --- holm


def test_holm_by_hand():
    # Ascending 0.005, 0.01, 0.03, 0.04, times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04, the last raised to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.25]) == [0.25]
    assert holm([]) == []


@MANY
@given(st.lists(st.integers(0, 64).map(lambda n: n / 64), max_size=12), st.integers(0, 63))
def test_holm_rejects_as_the_procedure_does(p_values, sixtyfourths):
    alpha = Fraction(sixtyfourths, 64)
    adjusted = holm(p_values)
    # (No level is 1, where the cap of adjusted values would reject what the procedure does not.)
    # Holm 1979: from the smallest up, reject while p is at most α / (hypotheses left); stop at the first that is not.
    rejected, left = [], list(p_values)
    while left and Fraction(min(left)) <= alpha / len(left):
        rejected.append(min(left))
        left.remove(min(left))
    assert sorted(p for p, found in zip(p_values, adjusted, strict=True) if found <= alpha) == rejected


@MANY
@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_agrees_with_the_slow_twin(p_values):
    assert holm(p_values) == pytest.approx(twins.holm(p_values), rel=1e-12)


@MANY
@given(st.lists(st.floats(0, 1), max_size=12), st.randoms(use_true_random=False))
def test_holm_is_between_the_p_values_and_bonferroni_and_keeps_their_order(p_values, shuffler):
    adjusted = holm(p_values)
    assert all(p <= found <= min(1.0, len(p_values) * p) for p, found in zip(p_values, adjusted, strict=True))
    assert sorted(adjusted) == [found for _, found in sorted(zip(p_values, adjusted, strict=True))]
    pairs = list(zip(p_values, adjusted, strict=True))
    shuffler.shuffle(pairs)
    assert holm([p for p, _ in pairs]) == [found for _, found in pairs]


@pytest.mark.parametrize("wrong", [-0.01, 1.01, math.nan])
def test_holm_takes_probabilities_only(wrong):
    with pytest.raises(InputError, match="not from 0 to 1"):
        holm([0.5, wrong])
