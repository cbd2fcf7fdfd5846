"""Every rule against its slow twin, against the papers' modified forward passes, and in low precision."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose
from torch import Tensor
from torch.nn import functional as F

from lrpx import _kernels, rules
from lrpx.engine import propagate
from lrpx.errors import MethodError
from lrpx.recipes import ATTNLRP
from tests.reference import rules as twins

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "mish": F.mish,
    "exp": torch.exp,
    "erf": torch.erf,
    "square": torch.square,
}
numbers = st.floats(-4, 4).map(lambda x: 0.0 if abs(x) < 1e-2 else x)
small = settings(max_examples=40, deadline=None)


def matrix(*shape: int) -> Any:
    return arrays(np.float64, shape, elements=numbers)


def leaf(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(np.asarray(values)).to(dtype).requires_grad_()


def relevance(output: Tensor, upstream: Any, *inputs: Tensor) -> list[np.ndarray]:
    seed = torch.as_tensor(np.asarray(upstream)).to(output.dtype)
    gradients = torch.autograd.grad(output, inputs, seed, allow_unused=True)
    return [
        (x.detach() * (torch.zeros_like(x) if g is None else g)).numpy() for x, g in zip(inputs, gradients, strict=True)
    ]


def near(actual: Any, expected: Any) -> None:
    assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# ------------------------------------------------------------------ against the slow twins


@pytest.mark.parametrize("name", ACTIVATIONS)
@small
@given(x=matrix(7), upstream=matrix(7))
def test_identity_is_its_twin(name: str, x: np.ndarray, upstream: np.ndarray) -> None:
    x[0] = 0.0
    given = leaf(x)
    output = rules.identity(ACTIVATIONS[name], given)
    assert torch.equal(output, ACTIVATIONS[name](given))
    (found,) = relevance(output, upstream, given)
    near(found, twins.identity(x, output.detach().numpy() * upstream))


@small
@given(a=matrix(6), b=matrix(6), upstream=matrix(6))
def test_products_are_their_twins(a: np.ndarray, b: np.ndarray, upstream: np.ndarray) -> None:
    left, right = leaf(a), leaf(b)
    for rule, twin in (
        (rules.uniform, twins.product_uniform),
        (rules.signal_take_all, twins.product_signal_take_all),
    ):
        found = relevance(rule(torch.mul, left, right), upstream, left, right)
        near(found, twin(a, b, a * b * upstream))


@small
@given(a=matrix(2, 3, 4), b=matrix(2, 4, 5), upstream=matrix(2, 3, 5))
def test_matrix_products_are_their_twins(a: np.ndarray, b: np.ndarray, upstream: np.ndarray) -> None:
    left, right = leaf(a), leaf(b)
    out = twins.matmul(a, b) * upstream
    uniform = rules.uniform(torch.matmul, left, right)
    # where z rounds to 0 in one order of summation only, the twin's division by z has no meaning
    if ((twins.matmul(a, b) == 0) == (uniform.detach().numpy() == 0)).all():
        near(relevance(uniform, upstream * (out != 0), left, right)[0], twins.matmul_uniform(a, b, out)[0])
        near(relevance(rules.uniform(torch.matmul, left, right), upstream * (out != 0), left, right)[1],
             twins.matmul_uniform(a, b, out)[1])  # fmt: skip
        signal = rules.signal_take_all(torch.matmul, left, right)
        near(relevance(signal, upstream * (out != 0), right)[0], twins.matmul_signal_take_all(a, b, out)[1])
    assert relevance(rules.signal_take_all(torch.matmul, left, right), upstream, left)[0].any() == 0


@small
@given(x=matrix(3, 5), upstream=matrix(3, 5))
def test_softmax_without_a_rule_is_attnlrp(x: np.ndarray, upstream: np.ndarray) -> None:
    given = leaf(x)
    output = rules.unmodified(lambda x: x.softmax(-1), given)
    weights = output.detach().numpy()
    near(relevance(output, upstream, given)[0], twins.softmax_attnlrp(x, weights, weights * upstream)[0])


def test_constant_cuts_the_graph_and_keeps_the_value() -> None:
    x = leaf(draw(3, 5))
    output = rules.constant(lambda x: x.softmax(-1), x)
    assert not output.requires_grad
    assert torch.equal(output, x.softmax(-1))


LINEAR_RULES = {
    "epsilon": (rules.Epsilon(0.3), (0.3,)),
    "z_plus": (rules.ZPlus(), ()),
    "gamma": (rules.Gamma(0.7), (0.7,)),
}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", LINEAR_RULES)
@small
@given(x=matrix(3, 5), w=matrix(4, 5), b=matrix(4), upstream=matrix(3, 4))
def test_linear_rules_are_their_twins(
    name: str, with_bias: bool, x: np.ndarray, w: np.ndarray, b: np.ndarray, upstream: np.ndarray
) -> None:
    rule, extra = LINEAR_RULES[name]
    given, weight, bias = leaf(x), torch.as_tensor(w), torch.as_tensor(b) if with_bias else None
    output = rule(F.linear, given, weight, bias)
    z = output.detach().numpy()
    if (np.abs(z) < 1e-6).any() or ((z != twins.linear(x, w, b if with_bias else None)).any() and (z == 0).any()):
        return  # the sign of a sum that is only rounding; exact zeros have a test of their own
    twin = getattr(twins, f"linear_{name}")
    near(relevance(output, upstream, given)[0], twin(x, w, b if with_bias else None, z * upstream, *extra)[0])


@pytest.mark.parametrize("name", LINEAR_RULES)
def test_linear_rules_hand_nothing_back_from_an_exact_zero(name: str) -> None:
    rule, extra = LINEAR_RULES[name]
    x = leaf([[1.0, 3.0], [0.0, 0.0], [-1.0, -2.0]])
    weight, bias = torch.tensor([[3.0, -1.0], [1.0, 2.0]], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    output = rule(F.linear, x, weight, bias)
    (found,) = relevance(output, np.ones((3, 2)), x)
    twin = getattr(twins, f"linear_{name}")
    near(found, twin(x.detach().numpy(), weight.numpy(), bias.numpy(), output.detach().numpy(), *extra)[0])
    assert np.isfinite(found).all()
    assert (found[1] == 0).all()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), ((2, 1), (0, 2))])
@pytest.mark.parametrize("name", LINEAR_RULES)
def test_convolution_rules_are_their_twins(name: str, stride: Any, padding: Any, with_bias: bool) -> None:
    rule, extra = LINEAR_RULES[name]
    x, w, b = draw(2, 2, 5, 4), draw(3, 2, 3, 2, seed=1), draw(3, seed=2) if with_bias else None
    given = leaf(x)
    output = rule(
        lambda x, w, b: F.conv2d(x, w, b, stride=stride, padding=padding),
        given, torch.as_tensor(w), None if b is None else torch.as_tensor(b),
    )  # fmt: skip
    upstream = draw(*output.shape, seed=3)
    twin = getattr(twins, f"conv2d_{name}")
    want = twin(x, w, b, output.detach().numpy() * upstream, *extra, stride, padding)[0]
    near(relevance(output, upstream, given)[0], want)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_sign_of_zero_is_plus_in_the_epsilon_rule(zero: float) -> None:
    """Where z is 0 nothing was given and nothing is handed on; that it is divided by +ε shows in the zero's sign."""
    x = torch.tensor([zero, zero], requires_grad=True)
    z = rules.Epsilon(0.5)(lambda x, weight, bias: x * weight, x, torch.tensor([2.0, 3.0]), None)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert gradient.tolist() == [0.0, 0.0]
    assert torch.signbit(gradient).tolist() == [bool(torch.signbit(torch.tensor(zero)))] * 2


@pytest.mark.parametrize("z", [1e-3, -1e-3])
def test_the_epsilon_rule_makes_a_denominator_larger_on_both_sides(z: float) -> None:
    x = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    out = rules.Epsilon(0.5)(F.linear, x, torch.ones(1, 1, dtype=torch.float64), None)
    (gradient,) = torch.autograd.grad(out, x)
    assert gradient.item() == pytest.approx(1e-3 / (1e-3 + 0.5))


def test_gamma_zero_and_epsilon_zero_are_the_plain_gradient() -> None:
    x, weight, bias, upstream = leaf(draw(3, 5)), torch.as_tensor(draw(4, 5)), torch.as_tensor(draw(4)), draw(3, 4)
    (plain,) = relevance(F.linear(x, weight, bias), upstream, x)
    for rule in (rules.Gamma(0.0), rules.Epsilon(0.0)):
        near(relevance(rule(F.linear, x, weight, bias), upstream, x)[0], plain)


@pytest.mark.parametrize("affine", [True, False])
def test_norms_are_their_twins(affine: bool) -> None:
    x, upstream = draw(4, 6), draw(4, 6, seed=1)
    gamma, beta = (draw(6, seed=2), draw(6, seed=3)) if affine else (np.ones(6), np.zeros(6))
    weight, bias = (torch.as_tensor(gamma), torch.as_tensor(beta)) if affine else (None, None)
    given = leaf(x)
    output = _kernels.layer_norm_constant_std(
        lambda x, b: F.layer_norm(x, (6,), weight, b, 1e-3), given, bias, (-1,), weight, 1e-3
    )
    want = twins.layernorm_constant_std(x, gamma, beta, 1e-3, output.detach().numpy() * upstream)[0]
    near(relevance(output, upstream, given)[0], want)
    output = _kernels.rms_norm_constant_std(lambda x: F.rms_norm(x, (6,), weight, 1e-3), given, (-1,), weight, 1e-3)
    want = twins.rmsnorm_constant_std(x, gamma, 1e-3, output.detach().numpy() * upstream)[0]
    near(relevance(output, upstream, given)[0], want)


def test_norms_over_several_dimensions() -> None:
    x, weight, upstream = leaf(draw(2, 3, 4)), torch.as_tensor(draw(3, 4, seed=1)), draw(2, 3, 4, seed=2)
    mean = x.mean((-2, -1), keepdim=True)
    std = (x - mean).square().mean((-2, -1), keepdim=True).add(1e-5).sqrt().detach()
    (want,) = relevance((x - mean) / std * weight, upstream, x)
    output = _kernels.layer_norm_constant_std(
        lambda x, _: F.layer_norm(x, (3, 4), weight), x, None, (-2, -1), weight, 1e-5
    )
    near(relevance(output, upstream, x)[0], want)


# --------------------------------------- the modified forward passes of Arras 2025, App. D


def modified_forward_passes() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """Each rule, and the formula the paper spells it with."""
    w, b = torch.as_tensor(draw(5, 5, seed=5)), torch.as_tensor(draw(5, seed=6)).abs()

    def epsilon(x: Tensor, _: Tensor) -> Tensor:
        z = F.linear(x, w, b)
        return z * (z / (z + 0.2 * z.sign())).detach()

    def z_plus(x: Tensor, _: Tensor) -> Tensor:
        z = F.linear(x, w, b)
        positive = (x[..., None, :] * w).clamp(min=0).sum(-1) + b.clamp(min=0)
        return positive * (z / positive).detach()

    def layer_norm(x: Tensor, _: Tensor) -> Tensor:
        std = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return (x - x.mean(-1, keepdim=True)) / std.detach() * w[0] + b

    def rms_norm(x: Tensor, _: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt().detach() * w[0]

    return {
        "D.1 epsilon": (lambda x, y: rules.Epsilon(0.2)(F.linear, x, w, b), epsilon),
        "D.2 alpha1-beta0": (lambda x, y: rules.ZPlus()(F.linear, x, w, b), z_plus),
        "D.3 activation": (lambda x, y: rules.identity(F.gelu, x), lambda x, y: x * (F.gelu(x) / x).detach()),
        "D.4 signal takes all": (
            lambda x, y: rules.signal_take_all(torch.mul, y, x),
            lambda x, y: x * y.detach(),
        ),
        "2.7 uniform": (
            lambda x, y: rules.uniform(torch.mul, x, y),
            lambda x, y: 0.5 * x * y + 0.5 * (x * y).detach(),
        ),
        "2.7 uniform on matrices": (
            lambda x, y: rules.uniform(torch.matmul, x, y.mT),
            lambda x, y: 0.5 * (x @ y.mT) + 0.5 * (x @ y.mT).detach(),
        ),
        "D.5 LayerNorm": (
            lambda x, y: _kernels.layer_norm_constant_std(
                lambda x, b: F.layer_norm(x, (5,), w[0], b), x, b, (-1,), w[0], 1e-5
            ),
            layer_norm,
        ),
        "D.5 RMSNorm": (
            lambda x, y: _kernels.rms_norm_constant_std(
                lambda x: F.rms_norm(x, (5,), w[0], 1e-5), x, (-1,), w[0], 1e-5
            ),
            rms_norm,
        ),
        "D.6 softmax": (lambda x, y: rules.constant(torch.softmax, x, -1) * y, lambda x, y: x.softmax(-1).detach() * y),
    }  # fmt: skip


@pytest.mark.parametrize("name", modified_forward_passes())
def test_rule_equals_the_papers_modified_forward_pass(name: str) -> None:
    rule, formula = modified_forward_passes()[name]
    upstream, results = draw(5, 5, seed=9), []
    for function in (rule, formula):
        x, y = leaf(draw(5, 5, seed=7)), leaf(draw(5, 5, seed=8))
        output = function(x, y)
        value = [] if name == "D.1 epsilon" else [output.detach()]  # the paper's own form changes it by about ε
        results.append((*value, *relevance(output, upstream, x, y)))
    for found, want in zip(*results, strict=True):
        near(found, want)


# ------------------------------------------------------------- value and precision


def operations(dtype: torch.dtype) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Each rule on its operation, and the operation alone."""
    w, b = (torch.as_tensor(draw(*shape, seed=3)).to(dtype) for shape in ((8, 8), (8,)))

    def linear(rule: rules.Rule) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return lambda x: rule(F.linear, x, w, b), lambda x: F.linear(x, w, b)

    return {
        **{name: (lambda x, g=g: rules.identity(g, x), g) for name, g in ACTIVATIONS.items()},
        "uniform": (lambda x: rules.uniform(torch.mul, x, x.flip(0)), lambda x: x * x.flip(0)),
        "signal": (lambda x: rules.signal_take_all(torch.mul, x, x.flip(0)), lambda x: x * x.flip(0)),
        "matmul": (lambda x: rules.uniform(torch.matmul, x, x.mT), lambda x: x @ x.mT),
        "epsilon": linear(rules.Epsilon(1e-6)),
        "z_plus": linear(rules.ZPlus()),
        "gamma": linear(rules.Gamma(0.25)),
        "layer_norm": (
            lambda x: _kernels.layer_norm_constant_std(
                lambda x, b: F.layer_norm(x, (8,), w[0], b), x, b, (-1,), w[0], 1e-5
            ),
            lambda x: F.layer_norm(x, (8,), w[0], b),
        ),
        "rms_norm": (
            lambda x: _kernels.rms_norm_constant_std(lambda x: F.rms_norm(x, (8,), w[0]), x, (-1,), w[0], 1e-6),
            lambda x: F.rms_norm(x, (8,), w[0]),
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", operations(torch.float32))
def test_value_is_bit_for_bit_and_gradient_finite_with_zeros(name: str, dtype: torch.dtype) -> None:
    rule, plain = operations(dtype)[name]
    # where g(0) is not 0, g(x)/x has no place in float16's range beside 0
    unbounded = name in ("sigmoid", "softplus", "exp", "z_plus") and dtype == torch.float16
    for scale in (1.0, 0.5) if unbounded else (1e-4, 1.0, 20.0):
        values = (draw(6, 8) * scale).clip(-20, 10 if name == "exp" else 60)
        values[0], values[1, ::2] = 0.0, -0.0
        x = leaf(values, dtype)
        output, want = rule(x), plain(x.detach())
        assert output.dtype == want.dtype
        assert output.detach().view(torch.uint8).equal(want.view(torch.uint8))
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert gradient.dtype == dtype
        assert torch.isfinite(gradient).all()


def test_value_stays_finite_where_a_rules_share_overflows_float16() -> None:
    x, weight = leaf([[1e-3, 200.0]], torch.float16), torch.tensor([[1e-2, -300.0]], dtype=torch.float16)
    for rule in (rules.ZPlus(), rules.Gamma(1e4)):
        output = rule(F.linear, x, weight, None)
        assert torch.equal(output, F.linear(x, weight))


def test_rules_let_the_model_change_their_output_and_input_in_place() -> None:
    def touched(function: Callable[[Tensor], Tensor]) -> np.ndarray:
        x = leaf(draw(4, 4))
        hidden = x * 1.0
        output = function(hidden)
        output[:, 0] = 0.0
        output += 1.0
        hidden.add_(1.0)
        return relevance(output, np.ones((4, 4)), x)[0]

    x = leaf(draw(4, 4))
    mask = torch.ones(4, 4, dtype=torch.float64)
    mask[:, 0] = 0
    (want,) = relevance(rules.identity(F.gelu, x) * mask, np.ones((4, 4)), x)
    near(touched(lambda h: rules.identity(F.gelu, h)), want)
    (want,) = relevance(0.5 * (x * x.flip(0)) * mask, np.ones((4, 4)), x)
    near(touched(lambda h: rules.uniform(torch.mul, h * 1.0, h.flip(0))), want)


@pytest.mark.parametrize("make", [rules.Gamma, rules.Epsilon])
@pytest.mark.parametrize("value", [-1, -1e-9, "x", None, True, float("nan"), float("inf"), 1j, [0.1]])
def test_a_parameter_that_is_no_number_from_zero_is_refused_when_the_rule_is_made(make: Any, value: Any) -> None:
    with pytest.raises(MethodError, match=r"(gamma|epsilon) is .*; pass a finite number, at least 0"):
        make(value)
    assert make(0) == make(0.0)


def without_bias(op: Any, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return op(x, weight, None)  # type: ignore[no-any-return]


def doubling(op: Any, /, x: Tensor, *rest: Any) -> Tensor:
    return op(x.mul_(2), *rest)  # type: ignore[no-any-return]


def widened(op: Any, /, x: Tensor, *rest: Any) -> Tensor:
    return op(x, *rest).double()  # type: ignore[no-any-return]


def forgotten(op: Any, /, *inputs: Any) -> None:
    op(*inputs)


def refused(rule: Any, why: str) -> None:
    """A rule of one's own at the second of two layers is refused, and named."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).eval(), torch.randn(1, 4)
    with (
        pytest.raises(MethodError, match=f"the rule {rule.__name__} {why}"),
        propagate(model, replace(ATTNLRP, name="mine").at("1", linear=rule)),
    ):
        model(x.clone().requires_grad_())


@pytest.mark.parametrize("rule", [without_bias, doubling, widened, forgotten])
def test_a_rule_of_ones_own_that_gives_another_value_is_refused(rule: Any) -> None:
    """Else another model would be explained, without a word."""
    refused(rule, "gives .*, and not the value of the linear in 1")


def by_size_in_place(op: Any, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = op(x, weight, bias)
    return rules.with_gradient_of(z, op(x.abs_(), weight, bias))


def by_weights_in_place(op: Any, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = op(x, weight, bias)
    return rules.with_gradient_of(z, op(x, weight.clamp_(min=0), bias))


@pytest.mark.parametrize("rule", [by_size_in_place, by_weights_in_place])
def test_a_rule_of_ones_own_that_changes_its_inputs_is_refused(rule: Any) -> None:
    """Else what else the model computes of them would be another model's, and a weight would stay changed."""
    refused(rule, "changes an input of the linear in 1 in place")


def test_a_rule_of_ones_own_may_stand_at_an_operation_in_place() -> None:
    def own(op: Any, /, x: Tensor) -> Tensor:
        return rules.identity(op, x)

    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.SiLU(inplace=True)).eval(), torch.randn(1, 4)
    found = []
    for rule in (own, rules.identity):
        with propagate(model, ATTNLRP.at(activation=rule)) as trace:
            trace.explain(model(x)[0, 0])
        found.append(trace.relevance("input"))
    assert torch.equal(*found)


def test_a_rule_of_ones_own_may_round_otherwise() -> None:
    def by_double(op: Any, /, x: Tensor, *rest: Any) -> Tensor:
        return op(x.double(), *(None if each is None else each.double() for each in rest)).float()  # type: ignore[no-any-return]

    model, x = torch.nn.Linear(400, 3).eval(), torch.randn(1, 400, requires_grad=True)
    with propagate(model, ATTNLRP.at(linear=by_double)) as trace:
        trace.explain(model(x)[0, 0])
    assert trace.relevance("input").abs().sum() > 0
