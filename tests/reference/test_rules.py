"""Hand-made cases for every rule, and the laws that tie the rules to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from tests.reference import rules

X = np.array([1.0, 2.0])
W = np.array([[3.0, -1.0]])
B = np.array([1.0])  # z_ij = (3, -2), b = 1, z = 2


def near(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_linear_zero_by_hand() -> None:
    r_x, r_b = rules.linear_zero(X, W, B, np.array([4.0]))
    near(r_x, [6.0, -4.0])
    near(r_b, [2.0])


def test_linear_zero_hands_nothing_back_from_an_output_of_zero() -> None:
    r_x, r_b = rules.linear_zero(np.array([1.0, 3.0]), W, None, np.array([7.0]))
    near(r_x, [0.0, 0.0])
    near(r_b, [0.0])


@pytest.mark.parametrize(
    ("x", "bias", "epsilon", "relevance", "r_x", "r_b"),
    [
        (X, B, 0.5, 5.0, [6.0, -4.0], 2.0),  # 2 + 0.5
        (np.array([-1.0, 2.0]), B, 1.0, 5.0, [3.0, 2.0], -1.0),  # -4 - 1
        (np.array([1.0, 3.0]), np.zeros(1), 0.5, 1.0, [6.0, -6.0], 0.0),  # sign(0) = +1
    ],
)
def test_linear_epsilon_by_hand(x: Any, bias: Any, epsilon: float, relevance: float, r_x: Any, r_b: float) -> None:
    got_x, got_b = rules.linear_epsilon(x, W, bias, np.array([relevance]), epsilon)
    near(got_x, r_x)
    near(got_b, [r_b])


def test_linear_z_plus_by_hand() -> None:
    r_x, r_b = rules.linear_z_plus(X, W, B, np.array([8.0]))
    near(r_x, [6.0, 0.0])  # 3 / (3 + 1)
    near(r_b, [2.0])
    r_x, r_b = rules.linear_z_plus(np.array([-1.0, 2.0]), W, -B, np.array([8.0]))
    near(r_x, [0.0, 0.0])
    near(r_b, [0.0])


def test_linear_gamma_by_hand() -> None:
    r_x, r_b = rules.linear_gamma(X, W, B, np.array([3.0]), gamma=1.0)
    near(r_x, [3.0, -1.0])  # (6, -2, 2) / 6
    near(r_b, [1.0])
    r_x, r_b = rules.linear_gamma(np.array([-1.0, 2.0]), W, B, np.array([9.0]), gamma=1.0)
    near(r_x, [6.0, 4.0])  # (-6, -4, 1) / -9
    near(r_b, [-1.0])


def test_gamma_runs_from_lrp_zero_to_z_plus(rng: np.random.Generator) -> None:
    x, w, b = rng.normal(size=(5, 4)), rng.normal(size=(3, 4)), rng.normal(size=3)
    relevance = rng.normal(size=(5, 3))
    for got, want in zip(
        rules.linear_gamma(x, w, b, relevance, 0.0), rules.linear_zero(x, w, b, relevance), strict=True
    ):
        near(got, want)
    only_positive = np.where(rules.linear(x, w, b) > 0, relevance, 0.0)
    for got, want in zip(
        rules.linear_gamma(x, w, b, only_positive, 1e12),
        rules.linear_z_plus(x, w, b, only_positive),
        strict=True,
    ):
        near(got, want, 1e-9)


@pytest.mark.parametrize("rule", ["zero", "z_plus", "gamma"])
def test_linear_rules_conserve_with_the_bias(rng: np.random.Generator, rule: str) -> None:
    x, w, b = rng.normal(size=(5, 6)), rng.normal(size=(3, 6)), rng.normal(size=3)
    relevance = rng.normal(size=(5, 3))
    extra = (0.25,) if rule == "gamma" else ()
    r_x, r_b = getattr(rules, f"linear_{rule}")(x, w, b, relevance, *extra)
    near(r_x.sum(-1) + r_b.sum(-1), relevance.sum(-1))


@pytest.mark.parametrize("rule", ["epsilon", "z_plus", "gamma"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1), ((2, 1), (0, 2))])
@pytest.mark.parametrize("with_bias", [True, False])
def test_conv2d_is_the_linear_rule_on_its_matrix(
    rng: np.random.Generator, rule: str, stride: Any, padding: Any, with_bias: bool
) -> None:
    x, weight = rng.normal(size=(2, 2, 5, 4)), rng.normal(size=(3, 2, 3, 2))
    bias = rng.normal(size=3) if with_bias else None
    units = torch.eye(40, dtype=torch.float64).reshape(40, 2, 5, 4)
    columns = torch.nn.functional.conv2d(units, torch.tensor(weight), stride=stride, padding=padding)
    _, channels, height, width = columns.shape
    matrix = columns.reshape(40, -1).T.numpy()
    relevance = rng.normal(size=(2, channels, height, width))
    dense_bias = None if bias is None else np.repeat(bias, height * width)
    extra = () if rule == "z_plus" else (0.3,)
    r_x, r_b = getattr(rules, f"conv2d_{rule}")(x, weight, bias, relevance, *extra, stride, padding)
    want_x, want_b = getattr(rules, f"linear_{rule}")(
        x.reshape(2, -1), matrix, dense_bias, relevance.reshape(2, -1), *extra
    )
    near(r_x, want_x.reshape(x.shape))
    near(r_b, want_b.reshape(relevance.shape))


def test_elementwise_rules_by_hand() -> None:
    near(rules.identity(np.array([2.0, -1.0, 0.0]), np.array([3.0, 4.0, 5.0])), [3.0, 4.0, 0.0])
    first, second = rules.addition([np.array([3.0, 1.0]), np.array([-1.0, -1.0])], np.array([4.0, 4.0]))
    near(first, [6.0, 0.0])
    near(second, [-2.0, 0.0])
    a, b, relevance = np.array([2.0, 0.0]), np.array([-3.0, 5.0]), np.array([4.0, 0.0])
    near(rules.product_uniform(a, b, relevance), [[2.0, 0.0], [2.0, 0.0]])
    near(rules.product_signal_take_all(a, b, relevance), [[0.0, 0.0], [4.0, 0.0]])


def test_matmul_rules_by_hand() -> None:
    a, b = np.array([[1.0, 2.0]]), np.array([[3.0], [-1.0]])  # 3 - 2 = 1
    r_a, r_b = rules.matmul_uniform(a, b, np.array([[4.0]]))
    near(r_a, [[6.0, -4.0]])
    near(r_b, [[6.0], [-4.0]])
    r_a, r_b = rules.matmul_signal_take_all(a, b, np.array([[4.0]]))
    near(r_a, [[0.0, 0.0]])
    near(r_b, [[12.0], [-8.0]])


def test_softmax_attnlrp_by_hand() -> None:
    x = np.array([0.0, np.log(3.0)])
    s = rules.softmax(x)
    near(s, [0.25, 0.75])
    r_x, r_b = rules.softmax_attnlrp(x, s, np.array([1.0, 2.0]))
    near(r_x, [0.0, -0.25 * np.log(3.0)])  # x (R - s * 3)
    near(r_x.sum() + r_b.sum(), 3.0)


def test_softmax_attnlrp_bias_closes_and_masked_entries_get_nothing(rng: np.random.Generator) -> None:
    x, relevance = rng.normal(size=(4, 4)) * 3, rng.normal(size=(4, 4))
    visible = np.tril(np.ones((4, 4), dtype=bool))
    for hidden in (7.0, -np.inf):
        scores = np.where(visible, x, hidden)
        s = rules.softmax(scores, visible)
        near(s.sum(-1), np.ones(4))
        r_x, r_b = rules.softmax_attnlrp(scores, s, relevance)
        assert (r_x[~visible] == 0).all()
        assert (r_b[~visible] == 0).all()
        near(r_x.sum(-1) + r_b.sum(-1), np.where(visible, relevance, 0).sum(-1))


def test_softmax_constant_keeps_everything() -> None:
    r_x, kept = rules.softmax_constant(np.array([0.25, 0.75]), np.array([1.0, 2.0]))
    near(r_x, [0.0, 0.0])
    near(kept, [1.0, 2.0])


def test_layernorm_by_hand() -> None:
    x, gamma, beta = np.array([[1.0, 3.0]]), np.array([2.0, 1.0]), np.array([1.0, 0.0])  # std 1
    near(rules.layernorm(x, gamma, beta, 0.0), [[-1.0, 1.0]])
    r_x, r_b = rules.layernorm_constant_std(x, gamma, beta, 0.0, np.array([[1.0, 1.0]]))
    near(r_x, [[-1.0 - 0.5, 3.0 + 1.5]])  # z_0 = 1 - 3 + 1 = -1, z_1 = -0.5 + 1.5 = 1
    near(r_b, [[-1.0, 0.0]])


def test_rmsnorm_by_hand() -> None:
    x, gamma, relevance = np.array([[1.0, 7.0]]), np.array([5.0, 10.0]), np.array([[2.0, 6.0]])  # rms 5
    near(rules.rmsnorm(x, gamma, 0.0), [[1.0, 14.0]])
    r_x, r_b = rules.rmsnorm_constant_std(x, gamma, 0.0, relevance)
    near(r_x, relevance)
    near(r_b, [[0.0, 0.0]])
    r_x, r_b = rules.rmsnorm_constant_std(x, gamma, 0.0, relevance, beta=np.array([1.0, -2.0]))
    near(r_x, [[1.0, 7.0]])
    near(r_b, [[1.0, -1.0]])
