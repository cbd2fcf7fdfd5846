"""The metrics of images: against their slow twins, by hand, what must not matter, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrpx.errors import InputError
from lrpx.metrics import IMAGE_METRICS, MOSAIC_METRICS, Given, PerturbationMetric, SetMetric
from lrpx.metrics._images import COUNTS, average_precision, confusion, mean_iou, pixel_accuracy
from tests.metrics.test_perturbation import MANY, RELEVANCE, measured, values_of
from tests.reference import images as twins

PERTURBATION = [name for name, metric in IMAGE_METRICS.items() if isinstance(metric, PerturbationMetric)]
SEGMENTATION = [name for name, metric in IMAGE_METRICS.items() if isinstance(metric, SetMetric)]
PIXELS = st.lists(
    # numbers whose sums are exact: what equals the mean is not above it by rounding
    st.tuples(st.integers(-3, 3).map(float) | st.floats(-9, 9, width=16), st.booleans()),
    min_size=2,
    max_size=30,
)
SQUARES = st.integers(1, 3).flatmap(
    lambda half: st.lists(
        st.lists(st.integers(-3, 3).map(float), min_size=2 * half, max_size=2 * half),
        min_size=2 * half,
        max_size=2 * half,
    )
)


def test_every_metric_has_a_twin():
    assert [set(PERTURBATION), set(SEGMENTATION)] == [set(twins.PERTURBATION), set(twins.SEGMENTATION)]
    assert len(PERTURBATION) + len(SEGMENTATION) == len(IMAGE_METRICS)


@pytest.mark.parametrize("name", PERTURBATION)
@given(relevance=RELEVANCE, seed=st.integers(0, 99))
@MANY
def test_the_perturbation_metrics_are_their_twins(name, relevance, seed):
    value = values_of(seed)
    found = measured(IMAGE_METRICS[name], relevance, value, 10)
    assert found == pytest.approx(twins.PERTURBATION[name](relevance, value), abs=1e-9)


@given(relevance=RELEVANCE, seed=st.integers(0, 99))
@MANY
def test_all_of_them_ask_for_the_same_images(relevance, seed):
    """Tenths from both ends, so that eight metrics cost what one does; an odd number has a half, rounded up."""
    asked = Given(np.array(relevance * 2), 0.0, 10)
    both = {each.tobytes() for each in IMAGE_METRICS["ΔA"].sets(asked)}
    for name in PERTURBATION:
        assert {each.tobytes() for each in IMAGE_METRICS[name].sets(asked)} <= both


@given(images=st.lists(PIXELS, min_size=1, max_size=4))
@MANY
def test_the_segmentation_metrics_are_their_twins(images):
    pairs = [(np.array([r for r, _ in image]), np.array([m for _, m in image])) for image in images]
    plain = [(r.tolist(), m.tolist()) for r, m in pairs]
    for name in SEGMENTATION:
        if name == "mAP" and not all(m.any() for _, m in pairs):
            continue
        metric = IMAGE_METRICS[name]
        found = metric(sum(metric.counts(*each) for each in pairs))
        assert found == pytest.approx(twins.SEGMENTATION[name](plain), abs=1e-9)


def test_a_set_is_counted_before_it_is_divided():
    """Not the mean of the images' ratios: a large image counts for more."""
    small = confusion(np.array([1.0, 0.0]), np.array([True, False]))
    large = confusion(np.array([0.0, 0.0, 0.0, 1.0]), np.array([True, True, True, False]))
    assert pixel_accuracy(small + large) == pytest.approx(2 / 6)
    assert pixel_accuracy(small + large) != pytest.approx((1.0 + 0.0) / 2)
    assert mean_iou(confusion(np.zeros(3), np.array([True, True, True]))) == 0.0
    assert len(COUNTS) == len(small)


def test_scale_and_shift_do_not_matter_to_a_segmentation():
    draw = np.random.default_rng(0)
    relevance, mask = draw.normal(size=50), draw.random(50) < 0.3
    for other in (3.0 * relevance, relevance + 0.5):
        assert confusion(other, mask).tolist() == confusion(relevance, mask).tolist()
        assert average_precision(other, mask) == average_precision(relevance, mask)


def test_chance_and_perfection():
    draw = np.random.default_rng(0)
    mask = draw.random(20_000) < 0.25
    assert average_precision(mask.astype(float), mask) == 1.0
    assert average_precision(np.zeros(20_000), mask) == pytest.approx(mask.mean())
    assert average_precision(draw.normal(size=20_000), mask) == pytest.approx(0.25, abs=0.02)


def test_a_mask_without_an_object_is_refused():
    with pytest.raises(InputError, match="the mask has no pixel"):
        average_precision(np.zeros(3), np.zeros(3, dtype=bool))


@given(square=SQUARES, quadrant=st.integers(0, 3))
@MANY
def test_the_mosaic_metrics_are_their_twins(square, quadrant):
    half = len(square) // 2
    array = np.array(square)
    ordered = array.reshape(2, half, 2, half).transpose(0, 2, 1, 3).reshape(4, -1)
    truth = np.zeros(ordered.shape, dtype=bool)
    truth[quadrant] = True
    for name, twin in (("share", twins.quadrant_share), ("lead", twins.quadrant_lead)):
        found = MOSAIC_METRICS[name](ordered.ravel().tolist(), truth.ravel().tolist())
        assert found == pytest.approx(twin(square, quadrant), abs=1e-9)
