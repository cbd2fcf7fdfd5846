"""The perturbation metrics: against their slow twins, by hand, what must not matter, and bad input."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx.errors import InputError
from lrpx.metrics import PERTURBATION_METRICS, Given, Metric, PerturbationMetric, perturbation_metric
from lrpx.metrics._perturbation import CHUNK, DRAWS, RANDOM_PARTS, Curve, even
from tests.reference import perturbation as twins

MANY = settings(deadline=None, max_examples=60)
OURS = list(PERTURBATION_METRICS.items())
RELEVANCE = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=40) | st.lists(
    st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=40
)
CURVES = [name for name in twins.METRICS if not name.startswith("LOO")]


def values_of(seed):
    """A function of hidden sets, in (0, 1), that nothing is known of."""

    def value(hidden):
        text = f"{seed} {sorted(hidden)}"
        return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) + 0.5) / 2**48

    return value


def measured(metric, relevance, value, steps=100, name=""):
    asked = Given(np.array(relevance, dtype=np.float64), value(frozenset()), steps, name)
    sets = metric.sets(asked)
    return metric(asked, np.array([value(frozenset(np.flatnonzero(each).tolist())) for each in sets]))


def test_every_metric_has_a_twin():
    assert {name for name in PERTURBATION_METRICS if not name.startswith("random-part")} == set(twins.METRICS)


@pytest.mark.parametrize("name", twins.METRICS)
@given(relevance=RELEVANCE, seed=st.integers(0, 99), steps=st.sampled_from([1, 3, 7, 100]))
@MANY
def test_the_twins_agree(name, relevance, seed, steps):
    value = values_of(seed)
    found = measured(PERTURBATION_METRICS[name], relevance, value, steps)
    assert found == pytest.approx(twins.METRICS[name](relevance, value, steps), abs=1e-9)


@pytest.mark.parametrize("name", CURVES)
@given(relevance=RELEVANCE, seed=st.integers(0, 99), data=st.data())
@MANY
def test_the_order_of_the_tokens_is_no_matter(name, relevance, seed, data):
    """Tied tokens too: none of them comes first. Chunks are of neighbours, so there it is one."""
    if "16" in name:
        return
    order = data.draw(st.permutations(range(len(relevance))))
    value = values_of(seed)
    moved = [relevance[i] for i in order]
    found = measured(PERTURBATION_METRICS[name], moved, lambda hidden: value(frozenset(order[i] for i in hidden)))
    assert found == pytest.approx(measured(PERTURBATION_METRICS[name], relevance, value), abs=1e-9)


@pytest.mark.parametrize("name", ["AOPC Δ", "ΔA flipping", "ΔA insertion", "LOO Pearson", "LOO Spearman"])
@given(count=st.integers(2, 40), seed=st.integers(0, 99))
@MANY
def test_a_constant_relevance_earns_nothing(name, count, seed):
    assert measured(PERTURBATION_METRICS[name], [0.5] * count, values_of(seed)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["AOPC Δ", "ΔA flipping", "ΔA insertion", "LOO Pearson", "LOO Spearman"])
@given(relevance=RELEVANCE, seed=st.integers(0, 99))
@MANY
def test_the_opposite_relevance_earns_the_opposite(name, relevance, seed):
    metric, value = PERTURBATION_METRICS[name], values_of(seed)
    opposite = measured(metric, [-each for each in relevance], value)
    assert opposite == pytest.approx(-measured(metric, relevance, value), abs=1e-9)


@given(relevance=RELEVANCE, seed=st.integers(0, 99))
@MANY
def test_insertion_mirrors_flipping(relevance, seed):
    """With every step taken, x_F^LeRF is x_I^MoRF (Achtibat et al. 2024, App. B.2)."""
    value = values_of(seed)
    one, other = (
        measured(PERTURBATION_METRICS[f"A {each}"], relevance, value) for each in ("flipping LeRF", "insertion MoRF")
    )
    assert one == pytest.approx(other, abs=1e-9)


def additive(weights):
    return lambda hidden: sum(weight for i, weight in enumerate(weights) if i not in hidden)


def test_by_hand():
    """f is the sum of the weights that are shown: 4, 2, 1."""
    value, right, wrong = additive([4.0, 2.0, 1.0]), [4.0, 2.0, 1.0], [1.0, 2.0, 4.0]
    found = {name: measured(metric, right, value) for name, metric in OURS if not metric.reads}
    assert found["LOO Pearson"] == pytest.approx(1.0)
    assert found["AOPC MoRF"] == (7 + 3 + 1 + 0) / 4
    assert found["AOPC LeRF"] == (7 + 6 + 4 + 0) / 4
    assert found["AOPC Δ"] == 6 / 4
    assert found["A flipping MoRF"] == pytest.approx((5 + 2 + 0.5) / 3)
    assert found["ΔA flipping"] == pytest.approx((6.5 + 5 + 2 - 7.5) / 3)
    assert found["AOPC16 MoRF"] == found["AOPC16 LeRF"] == 7 / 2  # one chunk
    worst = {name: measured(metric, wrong, value) for name, metric in OURS if not metric.reads}
    assert worst["AOPC Δ"] == -found["AOPC Δ"]
    assert worst["LOO Spearman"] == pytest.approx(-1.0)


def test_a_line_has_the_area_below_it():
    """Ten equal tokens: the value falls by a tenth with each; Bakish's tenths are exact."""
    value = additive([0.1] * 10)
    ramp = [float(i) for i in range(10)]
    for name in ("AUAC generation", "AUAC pruning", "RISE"):
        assert measured(PERTURBATION_METRICS[name], ramp, value) == pytest.approx(0.5)
    # 1, 1, 1, 2 and 5 of ten tokens
    assert measured(PERTURBATION_METRICS["comprehensiveness"], ramp, value) == pytest.approx(0.2)
    assert measured(PERTURBATION_METRICS["sufficiency"], ramp, value) == pytest.approx(0.8)
    assert measured(PERTURBATION_METRICS["MAS"], [0.1] * 10, value) == pytest.approx(0.5)  # relevance is what is lost
    assert measured(PERTURBATION_METRICS["MAS"], ramp, value) > 0.5


@pytest.mark.parametrize("lost", [0.0, 1e-7, -1e-7, 3e-6])
def test_what_rounding_leaves_of_equal_ends_is_no_curve(lost):
    """As of a text of one token, again and again, to a model that attends by values alone."""
    given = Given(np.array([4.0, 3.0, 2.0, 1.0]))
    values = -1.5 + lost * np.array([0.0, 0.5, 0.0, 1.0, 1.0])
    assert PERTURBATION_METRICS["RISE"](given, values) == 1.0
    assert PERTURBATION_METRICS["MAS"](given, values) == 0.5


@pytest.mark.parametrize("name", ["LOO Pearson", "LOO Pearson Σ", "LOO Spearman"])
@pytest.mark.parametrize("lost", [0.0, 1e-7, -3e-6])
def test_what_rounding_leaves_of_equal_losses_is_no_correlation(name, lost):
    given = Given(np.array([4.0, 3.0, 2.0, 1.0]), full=-1.5)
    values = -1.5 + lost * np.array([0.0, 0.5, 0.1, 1.0])
    assert PERTURBATION_METRICS[name](given, values) == 0.0


def test_three_tenths_of_ten_are_three():
    value = additive([0.1] * 10)
    taken = Curve.taking(np.arange(10.0), [-(-i * 10 // 10) for i in range(11)])
    assert taken.points(np.array([value(frozenset(np.flatnonzero(s))) for s in taken.sets])) == pytest.approx(
        1 - np.arange(11) / 10
    )


@pytest.mark.parametrize("name", [name for name, metric in OURS if metric.itself])
def test_leave_one_out_is_what_it_is(name):
    """Its own relevance correlates perfectly, so that the metric says nothing of it."""
    value = values_of(3)
    loo = twins.lost(range(9), value)
    assert measured(PERTURBATION_METRICS[name], loo, value) == pytest.approx(1.0)
    assert PERTURBATION_METRICS[name].itself == ("leave-one-out",)


def test_a_negative_sum_turns_the_sign_of_one_alone():
    value = additive([3.0, 1.0])
    assert measured(PERTURBATION_METRICS["LOO Pearson"], [1.0, -2.0], value) == pytest.approx(1.0)
    assert measured(PERTURBATION_METRICS["LOO Pearson Σ"], [1.0, -2.0], value) == pytest.approx(-1.0)


@given(relevance=RELEVANCE, top=st.booleans())
@MANY
def test_random_parts_are_halves_of_the_top_or_of_the_rest(relevance, top):
    metric = PERTURBATION_METRICS[f"random-part fidelity{'+' if top else '−'}"]
    asked = Given(np.array(relevance), name="a")
    sets, count = metric.sets(asked), len(relevance)
    assert (sets == metric.sets(asked)).all()
    for i, hidden in enumerate(sets):
        size = min(math.ceil(RANDOM_PARTS[i // DRAWS] * count / 100), max(1, count - 1))
        ordered = sorted(relevance, reverse=True)
        chosen = asked.relevance[hidden]
        part = size if top else count - size
        assert hidden.sum() == math.ceil(part / 2)
        if len(chosen):
            assert (chosen >= ordered[size - 1]).all() if top else (chosen <= ordered[size]).all()


def test_random_parts_are_other_ones_for_another_sample():
    relevance = np.arange(30.0)
    metric = PERTURBATION_METRICS["random-part fidelity+"]
    assert (metric.sets(Given(relevance, name="a")) != metric.sets(Given(relevance, name="b"))).any()
    assert len({each.tobytes() for each in metric.sets(Given(relevance, name="a"))}) > len(RANDOM_PARTS)


def test_steps_are_as_many_as_there_may_be():
    for name in ("AOPC MoRF", "A insertion LeRF"):
        assert len(PERTURBATION_METRICS[name].sets(Given(np.arange(50.0), steps=5))) == 6
    assert even(50, 5).tolist() == [0, 10, 20, 30, 40, 50]
    chunks = PERTURBATION_METRICS["AOPC16 MoRF"].sets(Given(np.arange(40.0)))
    assert chunks.sum(1).tolist() == [0, CHUNK, CHUNK + 8, 40]  # the sums are 120, 376, 284


@pytest.mark.parametrize(("name", "metric"), OURS)
def test_one_token_is_no_error(name, metric):
    assert math.isfinite(measured(metric, [2.0], additive([0.5])))


@pytest.mark.parametrize(("name", "metric"), OURS)
def test_what_is_kept_of_a_metric(name, metric):
    found = PerturbationMetric.read(metric.describe())
    assert found == metric
    assert found.itself == metric.itself
    assert Metric.read(metric.describe()).beats(1, 0) == metric.beats(1, 0)
    with pytest.raises(InputError, match="no plan"):
        found.sets(Given(np.ones(3)))


def test_bad_relevance():
    for wrong in ([], [[1.0]], [1.0, math.nan], [math.inf]):
        with pytest.raises(InputError, match=r"give \[N\] finite numbers"):
            Given(np.array(wrong, dtype=np.float64))
    with pytest.raises(InputError, match="at least 1"):
        Given(np.ones(2), steps=0)


def test_bad_plans():
    asked = Given(np.ones(3))
    for plan in (np.ones(3, dtype=bool), np.ones((2, 3)), np.ones((2, 4), dtype=bool), np.ones((0, 3), dtype=bool)):
        metric = PerturbationMetric("x", "y", 0.0, 1.0, "higher", plan=lambda _, made=plan: made)
        with pytest.raises(InputError, match=r"the plan of x gave .*give booleans \[S, 3\]"):
            metric.sets(asked)


def test_a_metric_of_ones_own_is_registered_and_refused_twice():
    try:

        @perturbation_metric("mine", "first token.", lambda asked: np.eye(len(asked), dtype=bool)[:1], better="lower")
        def mine(asked, values):
            return asked.full - values[0]

        assert measured(PERTURBATION_METRICS["mine"], [1.0, 2.0], additive([4.0, 1.0])) == 4.0
    finally:
        PERTURBATION_METRICS._found.pop("mine", None)
    with pytest.raises(InputError, match="there is a metric 'RISE' already"):
        perturbation_metric("RISE", "x.", lambda asked: np.eye(1, dtype=bool))(lambda asked, values: 0.0)
