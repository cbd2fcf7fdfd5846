"""The ground-truth metrics: the paper's conventions by hand, chance, what must not matter, and bad input."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx.errors import InputError
from lrpx.metrics._ground_truth import ANSWERS, METRICS, mrr, pg, pta, rma
from tests.reference import ground_truth as twins

MANY = settings(deadline=None)
SMALL = st.integers(-2, 2)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw, values=SMALL, most=9):
    """Relevance with many ties, and a ground truth of at least one token."""
    relevance = draw(st.lists(values, min_size=1, max_size=most))
    truth = draw(st.lists(st.booleans(), min_size=len(relevance), max_size=len(relevance)).filter(any))
    return relevance, truth


def mask(length, *positions):
    return [place in positions for place in range(length)]


def scores(relevance, truth):
    return [metric(relevance, truth) for metric in METRICS.values()]


def test_the_metrics_are_those_of_the_paper_in_its_order():
    assert [(name, metric.measure) for name, metric in METRICS.items()] == [
        ("PG2", pg), ("MRR", mrr), ("RMA", rma), ("PTA", pta),
    ]  # fmt: skip
    assert {(metric.low, metric.high, metric.better) for metric in METRICS.values()} == {(0.0, 1.0, "higher")}


@pytest.mark.parametrize(
    ("relevance", "truth", "expected"),
    [
        # [CLS] the keys to the cabinet [MASK]: "keys" is second; 3 of 3 + 4 + 1 = 8 is its mass; wrong by sign are
        # "the" (4 > 0) and "cabinet" (1 > 0): 5 of 7 tokens are right.
        ([-2, 4, 3, 0, -1, 1, 0], mask(7, 2), [1.0, 1 / 2, 3 / 8, 5 / 7]),
        # Third place: no point, 1 / 3. Mass 1 of 1 + 3 + 2. Right by sign: only the token itself.
        ([3, 2, 1], mask(3, 2), [0.0, 1 / 3, 1 / 6, 1 / 3]),
        # Two tokens of ground truth, at ranks 2 and 4: the smaller rank counts. Mass 3 + 1 of 4 + 3 + 2 + 1 = 10.
        ([4, 3, 2, 1], mask(4, 1, 3), [1.0, 1 / 2, 4 / 10, 2 / 4]),
        # Nothing positive: no mass (0, not NaN); the signed order still ranks, −1 first. Right by sign: those outside.
        ([-3, -1, -2], mask(3, 1), [1.0, 1.0, 0.0, 2 / 3]),
        # Relevance 0 is no positive relevance: wrong in the ground truth, right outside.
        ([0, 5, -1], mask(3, 0, 1), [1.0, 1.0, 1.0, 2 / 3]),
        # Signed, not absolute: −9 is the least relevant.
        ([-9, 1, 2], mask(3, 0), [0.0, 1 / 3, 0.0, 0.0]),
        # Tied for second place, one of two: half the orders point at it; rank 2 or 3: (1/2 + 1/3) / 2 = 5 / 12.
        ([7, 5, 5, 0], mask(4, 1), [1 / 2, 5 / 12, 5 / 17, 2 / 4]),
        # Tied for the first three places, one of three: 2 of 3 orders; (1 + 1/2 + 1/3) / 3 = 11 / 18.
        ([5, 5, 5, 0], mask(4, 1), [2 / 3, 11 / 18, 1 / 3, 2 / 4]),
        # Two of three tied: one of them is surely within two places; rank 1 in 2 of 3 orders, else 2: 2/3 + 1/6 = 5/6.
        ([5, 5, 5, 0], mask(4, 0, 2), [1.0, 5 / 6, 2 / 3, 3 / 4]),
        # The ground truth's later groups do not matter once its first is known.
        ([5, 5, 1, 1], mask(4, 0, 2), [1.0, (1 + 1 / 2) / 2, 6 / 12, 2 / 4]),
        # 0.0 and −0.0 are tied.
        ([0.0, -0.0], mask(2, 1), [1.0, 3 / 4, 0.0, 1 / 2]),
        # A single token.
        ([2.5], [True], [1.0, 1.0, 1.0, 1.0]),
        ([-2.5], [True], [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_by_hand(relevance, truth, expected):
    assert scores(relevance, truth) == pytest.approx(expected, rel=1e-15, abs=0)


def test_how_many_tokens_the_pointing_game_may_point_at():
    relevance, truth = [5, 4, 3, 3, 3, 1], mask(6, 2, 5)
    # Two places are taken; of the three tied at 3, one is right, so k − 2 of 3 draws find it.
    assert [pg(relevance, truth, k=k) for k in range(1, 8)] == pytest.approx([0, 0, 1 / 3, 2 / 3, 1, 1, 1])
    with pytest.raises(InputError, match="k = 0"):
        pg(relevance, truth, k=0)


@MANY
@given(samples(), st.randoms(use_true_random=False))
def test_the_place_in_the_text_does_not_matter(sample, shuffler):
    order = list(range(len(sample[0])))
    shuffler.shuffle(order)
    assert scores(*([row[place] for place in order] for row in sample)) == scores(*sample)


@MANY
@given(samples(), st.floats(-300, 300))
def test_a_positive_factor_does_not_matter(sample, exponent):
    relevance, truth = sample
    scaled = [value * 10.0**exponent for value in relevance]
    assert scores(scaled, truth) == pytest.approx(scores(relevance, truth), rel=1e-12, abs=0)


@pytest.mark.parametrize("unit", [5e-324, 1e-310, 1e-300, 1.0, 1e300, 4e307])
def test_no_magnitude_overflows_or_vanishes(unit):
    relevance = [unit * value for value in (4.0, 4.0, 3.0, 1.0, -4.0, -4.0)]
    assert scores(relevance, mask(6, 2)) == pytest.approx([0.0, 1 / 3, 3 / 12, 3 / 6], rel=1e-12, abs=0)


def test_magnitudes_far_apart():
    assert scores([1e300, 1e-300, 5e-324, -1e300], mask(4, 1)) == pytest.approx([1.0, 1 / 2, 0.0, 2 / 4])
    assert rma([1e300, 1e-300, 5e-324, -1e300], mask(4, 0)) == 1.0


@MANY
@given(samples())
def test_the_ranks_alone_matter_to_pg_and_mrr(sample):
    relevance, truth = sample
    for monotone in (math.exp, lambda x: x**3 - 50, lambda x: math.atan(x) * 1e-200):
        changed = [monotone(value) for value in relevance]
        assert pg(changed, truth) == pg(relevance, truth)
        assert mrr(changed, truth) == mrr(relevance, truth)


@MANY
@given(samples(most=8), st.integers(1, 4), st.sampled_from([-3.5, 0.0, 1e-320, 2.0]))
def test_a_constant_relevance_scores_as_chance(sample, k, constant):
    truth, length, hits = sample[1], len(sample[1]), sum(sample[1])
    relevance = [constant] * length
    # Chance, by going through every set of places that the ground truth's tokens could have in a random order.
    firsts = [min(places) for places in itertools.combinations(range(1, length + 1), hits)]
    assert pg(relevance, truth, k) == pytest.approx(sum(first <= k for first in firsts) / len(firsts), rel=1e-12)
    assert mrr(relevance, truth) == pytest.approx(sum(1 / first for first in firsts) / len(firsts), rel=1e-12)
    assert pg(relevance, truth) == pytest.approx(
        1 - math.comb(length - hits, min(2, length)) / math.comb(length, min(2, length)), rel=1e-12
    )
    assert rma(relevance, truth) == pytest.approx(hits / length if constant > 0 else 0)
    assert pta(relevance, truth) == pytest.approx((hits if constant > 0 else length - hits) / length)


@MANY
@given(samples(most=6) | samples(values=FINITE, most=6), st.integers(1, 7))
def test_the_slow_twins_agree(sample, k):
    assert scores(*sample) == pytest.approx([twin(*sample) for twin in twins.METRICS.values()], rel=1e-12, abs=1e-300)
    assert pg(*sample, k=k) == pytest.approx(twins.pg(*sample, k=k), rel=1e-12)


@MANY
@given(samples(values=FINITE))
def test_every_metric_is_from_0_to_1(sample):
    assert all(type(score) is float and 0.0 <= score <= 1.0 for score in scores(*sample))


@MANY
@given(samples(values=FINITE))
def test_if_every_token_is_in_the_ground_truth(sample):
    relevance, everything = sample[0], [True] * len(sample[0])
    positive = sum(value > 0 for value in relevance)
    assert scores(relevance, everything) == [1.0, 1.0, float(positive > 0), positive / len(relevance)]


def test_thousands_of_tied_tokens():
    truth = mask(4000, 17, 1800, 3999)
    # The first of three among n in random order: mean 1 / rank is Σ_r C(n − r, 2) / (r C(n, 3)), written out.
    n = 4000
    chance = math.fsum((n - r) * (n - r - 1) / 2 / r for r in range(1, n - 1)) / (n * (n - 1) * (n - 2) / 6)
    assert mrr([0.0] * n, truth) == pytest.approx(chance, rel=1e-12)
    assert 0 < mrr([0.0] * n, [place % 2 == 0 for place in range(n)]) < 1


def test_uniformly_random_relevance_scores_as_chance():
    """The random baseline of Table 2, on a made set of texts of 5 to 40 tokens with 1 to 3 in the ground truth."""
    shuffler, generator = random.Random(0), np.random.default_rng(0)
    found, chances = [], []
    for _ in range(3000):
        n, m = shuffler.randint(5, 40), shuffler.randint(1, 3)
        truth = mask(n, *shuffler.sample(range(n), m))
        found += [scores(generator.uniform(-1.0, 1.0, n), truth) for _ in range(5)]
        miss = math.prod((n - m - draw) / (n - draw) for draw in range(2))
        first = [m / (n - r + 1) * math.prod((n - m - i) / (n - i) for i in range(r - 1)) for r in range(1, n - m + 2)]
        rank = sum(chance / r for r, chance in enumerate(first, 1))
        # By symmetry each token has the same share of the mass, if there is any; and every sign is as likely.
        chances.append([1 - miss, rank, m / n * (1 - 0.5**n), 0.5])
    found = np.array(found)
    error = found.std(axis=0) / math.sqrt(len(found))
    assert (error < 0.005).all()
    assert (abs(found.mean(axis=0) - np.mean(chances, axis=0)) < 4 * error).all()


@pytest.mark.parametrize(
    "relevance",
    [
        np.array([0.1, 0.2, 0.2, -1.5]),
        np.array([0.1, 0.2, 0.2, -1.5], dtype=np.float32),
        np.array([0.1, 0.2, 0.2, -1.5], dtype=np.float16),
        np.array([9, 0.1, 9, 0.2, 9, 0.2, 9, -1.5])[1::2],
        torch.tensor([0.1, 0.2, 0.2, -1.5], dtype=torch.float64),
        torch.tensor([0.1, 0.2, 0.2, -1.5], dtype=torch.bfloat16),
        torch.tensor([0.1, 0.2, 0.2, -1.5], requires_grad=True),
        list(torch.tensor([0.1, 0.2, 0.2, -1.5])),
        list(np.array([0.1, 0.2, 0.2, -1.5], dtype=np.float32)),
        (0.1, 0.2, 0.2, -1.5),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', type(value[0]).__name__)}",
)
def test_any_kind_of_array_is_read_as_it_is(relevance):
    exact = [float(value) for value in (relevance.detach() if torch.is_tensor(relevance) else relevance)]
    for truth in (mask(4, 0, 1), np.array(mask(4, 0, 1)), torch.tensor(mask(4, 0, 1)), list(np.array(mask(4, 0, 1)))):
        assert scores(relevance, truth) == scores(exact, mask(4, 0, 1))
    # Tied at 0.2: rank 1 or 2. The mass is that of the numbers as rounded to the precision.
    assert mrr(relevance, mask(4, 1)) == 0.75
    assert rma(relevance, mask(4, 0)) == pytest.approx(exact[0] / (exact[0] + exact[1] + exact[2]), rel=1e-15)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize(
    ("relevance", "truth", "message"),
    [
        ([0.5, math.nan], [True, False], "NaN or infinity"),
        ([0.5, -math.inf], [True, False], "NaN or infinity"),
        (torch.tensor([math.inf, 1.0]), torch.tensor([True, False]), "NaN or infinity"),
        ([0.5, 1.0], [False, False], "no token is in the ground truth"),
        ([], [], "no token is in the ground truth"),
        ([0.5, 1.0, 2.0], [True, False], "has 3 tokens and the ground truth 2"),
        ([0.5, 1.0], [1, 0], "a mask, not positions"),
        ([0.5, 1.0], (0, 1), "a mask, not positions"),
        ([0.5, 1.0], True, "a mask, not positions"),
        ([[0.5, 1.0]], [True], "give .T. numbers"),
        (np.array([[0.5], [1.0]]), [True, False], "give .T. numbers"),
        (torch.ones(1, 2), [True], "give .T. numbers"),
        (list(torch.ones(2, 2)), [True, False], "give .T. numbers"),
        (torch.tensor(1.0), [True], "give .T. numbers"),
        (1.0, [True], "give .T. numbers"),
        (["0.5", "1.0"], [True, False], "give .T. numbers"),
        ([1 + 2j, 0], [True, False], "give .T. numbers"),
        ([None, 0.5], [True, False], "give .T. numbers"),
    ],
)
def test_what_cannot_be_scored_is_refused(metric, relevance, truth, message):
    with pytest.raises(InputError, match=message):
        metric(relevance, truth)


@given(samples())
@MANY
def test_the_metrics_of_answers_are_those_of_the_twins(sample):
    for name, metric in ANSWERS.items():
        assert metric(*sample) == pytest.approx(twins.ANSWERS[name](*sample), abs=1e-9)
    assert set(ANSWERS).isdisjoint(METRICS)
