"""The rules of relevance propagation, each written as a modified forward pass.

A rule takes the operation ``op`` and its inputs and returns ``op(*inputs)``: the value is the model's own,
computed by the model's own kernel, and only the gradient that autograd will use is changed, so that
``R = x ⊙ ∂x`` is the relevance the rule prescribes (Arras et al. 2025, App. D). A rule is a plain function
or a small frozen dataclass; write your own and put it into a :class:`~lrpx.recipes.Recipe`.

>>> x = torch.tensor([-2.0, 0.5, 3.0], requires_grad=True)
>>> y = identity(torch.tanh, x)
>>> torch.equal(y, torch.tanh(x))
True
>>> (gradient,) = torch.autograd.grad(y.sum(), x)
>>> torch.allclose(x * gradient, y)
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from lrpx._kernels import ratio as ratio
from lrpx._kernels import scale_gradient, scaled_on_entry
from lrpx._kernels import with_gradient_of as with_gradient_of
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable

    Operation = Callable[..., Tensor]

__all__ = [
    "AlphaBeta",
    "AumannShapley",
    "Epsilon",
    "Flat",
    "Gamma",
    "Rule",
    "Scaled",
    "Temperature",
    "WSquare",
    "ZBox",
    "ZPlus",
    "constant",
    "identity",
    "ratio",
    "signal_take_all",
    "uniform",
    "uniform_bias",
    "unmodified",
    "with_gradient_of",
]


class Rule(Protocol):
    """``rule(op, *inputs) == op(*inputs)``, with a gradient of its own."""

    def __call__(self, op: Operation, /, *inputs: Any) -> Tensor:
        """``op(*inputs)`` under the rule."""


# ----------------------------------------------------------------- any operation


def unmodified(op: Operation, /, *inputs: Any) -> Tensor:
    """The operation as it is: LRP-0 for linear layers, Gradient×Input for the others (Arras 2025, D.1, D.6)."""
    return op(*inputs)


def constant(op: Operation, /, *inputs: Any) -> Tensor:
    """No relevance flows into the operation: ``[op(x)]detach``.

    CP-LRP's softmax (all relevance goes to the values) and the standard deviation of the norms
    (Ali et al. 2022; Arras 2025, D.5).
    """
    return op(*[x.detach() if x is not None and isinstance(x, Tensor) else x for x in inputs])


@dataclass(frozen=True)
class Scaled:
    """``c · y`` in the place of ``y``, for the gradient alone: the operation's own, ``c`` times.

    Raises:
        MethodError: the factor is no finite number from 0.
    """

    factor: float

    def __post_init__(self) -> None:
        _refuse_negative("factor", self.factor)

    def __call__(self, op: Operation, /, *inputs: Any) -> Tensor:
        """``op(*inputs)`` with its gradient times the factor."""
        return scaled_on_entry(op(*inputs), self.factor)


# ---------------------------------------------------------------- softmax, and the norms


@dataclass(frozen=True)
class Temperature:
    """A softmax whose gradient is that at a higher temperature ``T``: ``∂x = s_T ⊙ (∂s − Σ ∂s ⊙ s_T)`` with
    ``s_T = softmax(x / T)`` (Edin et al. 2025, with ``T = 2``).

    Raises:
        MethodError: T is no finite number above 0.
    """

    temperature: float = 2.0

    def __post_init__(self) -> None:
        _refuse_negative("temperature", self.temperature)
        if not self.temperature:
            raise MethodError("temperature is 0; pass a number above 0")

    def __call__(self, op: Operation, /, x: Tensor) -> Tensor:
        """``op(x)`` with the gradient of ``T · op(x / T)``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        value = op(x.detach())
        return with_gradient_of(value, (self.temperature * op(wide / self.temperature)).to(value.dtype))


def uniform_bias(op: Operation, /, x: Tensor) -> Tensor:
    """A first-order Taylor expansion at ``x`` whose bias, ``b = y − J x``, goes to all inputs alike:
    ``R_i = Σ_j (J_ji x_i + b_j / N) / y_j · R_j`` (Voita et al. 2021, Eq. 5; Achtibat et al. 2024, A.2.1).

    For a softmax over the last dimension, whose masked inputs take no part, and for the deviation that a norm divides
    by, where the formula is that of the whole norm ``y = x / σ(x)``: its expansion is all bias, but for the norm's ε,
    and so the deviation has ``∂σ_i − (Σ_k x_k ∂σ_k) / (N x_i)``. It conserves, and is unstable: an input near 0 that is
    handed a share has a gradient without bound.

    Raises:
        MethodError: the operation is another, such as the reciprocal root in a norm that a model spells out.
    """
    y = op(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    still, value = wide.detach(), y.detach().to(wide.dtype)
    rounding = max(1e-3, 2 * torch.finfo(y.dtype).eps)
    if y.shape == x.shape and x.ndim and _sums_to_one(value, rounding) and _sums_to_one(op(_others(x)), rounding):
        taking_part = (still > MASKED) & (op(torch.zeros_like(x)) != 0)  # a mask may follow the exponential
        scores, tangent = still.masked_fill(~taking_part, -math.inf), still.masked_fill(~taking_part, 0.0)
        expected = (value * still).masked_fill(~taking_part, 0.0).sum(-1, keepdim=True)
        bias = value - value * (tangent - expected)
        if not torch.allclose(scores.softmax(-1).nan_to_num(), value, rtol=0, atol=rounding):  # of so many times these
            bias = value - torch.func.jvp(op, (still.to(x.dtype),), (tangent.to(x.dtype),))[1].to(wide.dtype)
        count = taking_part.sum(-1, keepdim=True)
        each = ratio(torch.ones_like(still), count * still).masked_fill(~taking_part, 0.0)
        spread = (each * wide.masked_fill(~taking_part, 0.0)).sum(-1, keepdim=True)
        return with_gradient_of(y.detach(), y + (bias * spread).to(y.dtype))
    reduced = [i for i in range(x.ndim) if y.ndim == x.ndim and y.shape[i] == 1 and x.shape[i] > 1]
    if not reduced:
        raise MethodError(
            "uniform_bias is a rule for a softmax over the last dimension and for norms in one function; in this model "
            "one is spelled out, so use another rule there, such as norm=rules.constant"
        )
    along: Tensor = torch.func.jvp(op, (still,), (still,))[1]  # Σ_k x_k ∂σ_k
    inputs = math.prod(x.shape[i] for i in reduced)
    spread = (ratio(torch.ones_like(still), inputs * still) * wide).sum(reduced, keepdim=True)
    return with_gradient_of(y.detach(), y - along.detach() * spread)


def _sums_to_one(y: Tensor, rounding: float) -> bool:
    return torch.allclose(y.sum(-1).to(torch.float64), y.new_ones((), dtype=torch.float64), rtol=0, atol=rounding)


def _others(x: Tensor) -> Tensor:
    """Other numbers, whose softmax over another dimension than the last sums to one along none but that, as that of
    equal scores, or of large ones, may along the last, too."""
    return torch.arange(x.numel(), device=x.device).view(x.shape).sin().to(x.dtype)


MASKED = -5e3
"""What is at or below it was put there by a mask: a softmax that any other score takes part in is 0 there."""


# ------------------------------------------------------------ element-wise operations


def identity(op: Operation, /, x: Tensor) -> Tensor:
    """``x · [g(x)/x]detach``: an element-wise ``y = g(x)`` hands its relevance on, ``R_x = R_y``.

    Where ``x = 0`` the output is a constant (Arras 2025, D.3); so it is where ``g(0) ≠ 0`` (sigmoid, exp) and ``x`` is
    so small that ``|g(x)/x|`` exceeds :data:`STEEPEST`, where the gradient would lose all precision.
    """
    return _Identity.apply(x, op)  # type: ignore[no-any-return, no-untyped-call]


class _Identity(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Operation) -> Tensor:
        y = op(x)
        # not x and y themselves: the model may change them in place, as it may without a rule
        share = ratio(y, x)
        if getattr(op, "__name__", None) not in THROUGH_ZERO:
            share.sub_(torch.nn.functional.hardshrink(share, STEEPEST))
        ctx.save_for_backward(share)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return (dy * share).to(ctx.dtype), None


STEEPEST = 1e4
"""The largest ``|g(x)/x|`` at which the identity rule still hands relevance on."""


THROUGH_ZERO = frozenset(
    """silu gelu tanh mish elu selu celu hardswish softsign relu6 GELUActivation NewGELUActivation GELUTanh
    FastGELUActivation QuickGELUActivation AccurateGELUActivation MishActivation""".split()
)
"""Functions, and modules that write one out, that are 0 at 0, where ``g(x)/x`` is never steep and need not be looked
at."""


def is_steep(y: Tensor, x: Tensor) -> Tensor:
    """Where the identity rule takes ``y = g(x)`` for a constant, and that constant is not 0."""
    return (y.abs() > STEEPEST * x.abs()) | ((x == 0) & (y != 0))


# ------------------------------------------------------------------------- products


def uniform(op: Operation, /, a: Tensor, b: Tensor) -> Tensor:
    """``½ab + ½[ab]detach``: each factor of a product or matrix product gets half of the relevance.

    Achtibat et al. 2024, Prop. 3.3; Arras 2025, §2.7.
    """
    return scaled_on_entry(op(a, b), 0.5)


def signal_take_all(op: Operation, /, gate: Tensor, signal: Tensor) -> Tensor:
    """``[gate]detach · signal``: the signal gets all of the relevance (Arras et al. 2017; Arras 2025, D.4)."""
    return op(gate.detach(), signal)


# ----------------------------------------------------------------- attention as one block


@dataclass(frozen=True)
class AumannShapley:
    """Attention as one function of its scores ``z`` and values ``v``, whatever it is factorised into:
    ``R_z + R_v = o`` with ``R_v = v ⊙ ∫ A(αz)ᵀ∂o dα``, ``R_z = z ⊙ ∫ α · ∂(A(αz) v) dα``, ``α`` from 0 to 1.

    The Aumann–Shapley value of ``o(z, v) = softmax(z) v`` with nothing, ``v = 0``, as its baseline (Sundararajan et al.
    2017, Eq. 1), which is the plain gradient of attention, averaged over temperatures ``1/α``; queries and keys share
    ``R_z`` by the uniform rule. It conserves, to the error of a Gauss–Legendre quadrature. Put it into a recipe as the
    rule for softmax: it holds where attention is one torch function, ``scaled_dot_product_attention``, and is refused
    elsewhere (``docs/design/attention-block.md``).

    Args:
        nodes: of the quadrature; each costs the attention once more.

    Raises:
        MethodError: ``nodes`` is no whole number from 1.
    """

    nodes: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 1:
            raise MethodError(f"nodes is {self.nodes!r}; pass a whole number, at least 1")

    def __call__(self, op: Operation, /, x: Tensor) -> Tensor:
        """Refuse a softmax by itself, of which nobody can tell whether it is attention.

        Raises:
            MethodError: always.
        """
        raise MethodError(
            "AumannShapley is a rule for attention as one torch function, and the model computes a softmax by itself; "
            'load it with attn_implementation="sdpa", or give that module another rule: softmax=rules.unmodified'
        )

    def attention(
        self, op: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, halves: bool
    ) -> Tensor:
        """``op(q, k, v, mask)``, with the gradient of the average of ``op(αq, k, v, αmask)``.

        Args:
            op: the model's own attention.
            q, k, v: queries, keys and values.
            mask: what is added to the scores, or which are admitted.
            halves: whether queries and keys share the relevance of their product; else each has it all.
        """
        value = op(*(None if x is None else x.detach() for x in (q, k, v, mask)))
        if halves and q.requires_grad and k.requires_grad:
            q, k = scale_gradient(q, 0.5), scale_gradient(k, 0.5)
        average: Tensor | float = 0.0
        for alpha, weight in _gauss_legendre(self.nodes):
            added = mask if mask is None or not mask.is_floating_point() else alpha * mask
            average = average + weight * op(alpha * q, k, v, added)
        assert isinstance(average, Tensor)
        return with_gradient_of(value, average.to(value.dtype))


def _gauss_legendre(nodes: int) -> list[tuple[float, float]]:
    """Nodes and weights of the quadrature on [0, 1]."""
    import numpy as np

    places, weights = np.polynomial.legendre.leggauss(nodes)
    return [(float(place + 1) / 2, float(weight) / 2) for place, weight in zip(places, weights, strict=True)]


# ---------------------------------------------------- linear layers and convolutions
#
# ``op(x, weight, bias)`` is linear in x: F.linear, addmm, a convolution. The weight and the bias are
# constants; the bias takes part in the denominator and so gets its own share (formulas in Arras 2025, D.1–D.2).


@dataclass(frozen=True)
class Epsilon:
    """LRP-ε: ``R_i = Σ_j x_i w_ij / (z_j + ε·sign z_j) · R_j``, with sign(0) = +1 (Bach 2015; Arras 2025, D.1).

    Raises:
        MethodError: ε is no finite number from 0.
    """

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        _refuse_negative("epsilon", self.epsilon)

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``z · [z / (z + ε·sign z)]detach``."""
        z = op(x, weight, bias)
        wide = z.detach().to(torch.promote_types(z.dtype, torch.float32))
        stabilised = torch.where(wide >= 0, wide + self.epsilon, wide - self.epsilon)
        return with_gradient_of(z, z * ratio(wide, stabilised).to(z.dtype))


@dataclass(frozen=True)
class ZPlus:
    """LRP-α1β0, the z⁺ rule: only positive contributions count, ``R_i = Σ_j (x_i w_ij)⁺ / z_j⁺ · R_j``
    with ``z⁺ = Σ (x w)⁺ + b⁺`` (Bach 2015; Arras 2025, D.2). Where ``z⁺ = 0`` nothing is propagated.
    """

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``z⁺ · [z / z⁺]detach``."""
        z = op(x, weight, bias)
        positive, _ = _signed_parts(op, x, weight, bias)
        return with_gradient_of(z, positive * ratio(z.detach(), positive.detach()).to(z.dtype))


@dataclass(frozen=True)
class Gamma:
    """Generalised LRP-γ: contributions of the sign of ``z_j`` are favoured, ``z_ij + γ·z_ij^±`` over the
    sum of the same, ``±`` the sign of ``z_j`` (Achtibat et al. 2024, Eq. 24).

    Raises:
        MethodError: γ is no finite number from 0.
    """

    gamma: float = 0.25

    def __post_init__(self) -> None:
        _refuse_negative("gamma", self.gamma)

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``z^γ · [z / z^γ]detach``."""
        z = op(x, weight, bias)
        positive, negative = _signed_parts(op, x, weight, bias)
        favoured = z + self.gamma * torch.where(z.detach() >= 0, positive, negative)
        return with_gradient_of(z, favoured * ratio(z.detach(), favoured.detach()).to(z.dtype))


@dataclass(frozen=True)
class AlphaBeta:
    """LRP-αβ: ``R_i = Σ_j (α (x_i w_ij)⁺ / z_j⁺ − β (x_i w_ij)⁻ / z_j⁻) · R_j`` with ``z⁺ = Σ (x w)⁺ + b⁺`` and ``z⁻``
    likewise, ``α − β = 1`` (Bach 2015, Eq. 60; Achtibat et al. 2024, App. B.4 with α = 2, β = 1). Where one of the two
    sums is 0 its part is not propagated.

    Raises:
        MethodError: α or β is no finite number from 0, or their difference is not 1.
    """

    alpha: float = 2.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        _refuse_negative("alpha", self.alpha)
        _refuse_negative("beta", self.beta)
        if abs(self.alpha - self.beta - 1) > 1e-9:
            raise MethodError(f"alpha is {self.alpha!r} and beta {self.beta!r}; pass two whose difference is 1")

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``α z⁺ · [z / z⁺]detach − β z⁻ · [z / z⁻]detach``."""
        z = op(x, weight, bias)
        positive, negative = _signed_parts(op, x, weight, bias)
        still = z.detach()
        favoured = self.alpha * positive * ratio(still, positive.detach()).to(z.dtype)
        return with_gradient_of(z, favoured - self.beta * negative * ratio(still, negative.detach()).to(z.dtype))


BY_SIGNS = (Epsilon, ZPlus, Gamma, AlphaBeta)
"""The rules that look at the signs of what a layer computes."""


# ------------------------------------------------------------------------ the first layer
#
# Rules for the layer that sees the pixels hand on relevance whatever the pixel is, also where it is 0, and there no
# gradient could: R = x ⊙ ∂x. So where a recipe has such a rule, the leaf that stands for the input has ``nudge`` in the
# place of 0, which the model does not see, and these rules know it.


def nudge(dtype: torch.dtype) -> float:
    """What stands for 0 in the leaf of an input whose layer has a rule of its own: the root of the least number."""
    return float(torch.finfo(dtype).tiny ** 0.5)


def _units(x: Tensor) -> Tensor:
    """``x / [x]detach``, with 0 nudged: the gradient of what it is multiplied with is relevance."""
    still = x.detach()
    return x / torch.where(still == 0, nudge(x.dtype), still)


@dataclass(frozen=True)
class Flat:
    """LRP-flat: every input that a layer's output sees has an even share, ``R_i = Σ_j R_j / n_j`` (Lapuschkin et al.
    2019). Only for the first layer, ``Recipe(first=Flat())``.
    """

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``Σ_i u_i · [z / n]detach``, ``u = x / [x]detach``."""
        z = op(x, weight, bias)
        ones = torch.ones_like(dequantised(weight))
        count = op(torch.ones_like(x.detach()), ones, None)
        return with_gradient_of(z, op(_units(x), ones, None) * ratio(z.detach(), count).to(z.dtype))


@dataclass(frozen=True)
class WSquare:
    """LRP-w²: ``R_i = Σ_j w_ij² / Σ_k w_kj² · R_j`` (Montavon et al. 2017, Eq. 12). Only for the first layer."""

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``Σ_i u_i w_i² · [z / Σ w²]detach``, ``u = x / [x]detach``."""
        z = op(x, weight, bias)
        square = dequantised(weight).square()
        total = op(torch.ones_like(x.detach()), square, None)
        return with_gradient_of(z, op(_units(x), square, None) * ratio(z.detach(), total).to(z.dtype))


@dataclass(frozen=True)
class ZBox:
    """LRP-z^B, for inputs between two bounds: ``R_i = Σ_j c_ij / Σ_k c_kj · R_j`` with
    ``c_ij = x_i w_ij − l_i w_ij⁺ − h_i w_ij⁻`` (Montavon et al. 2017, Eq. 14). Only for the first layer.

    Args:
        low: ``l``, what the least pixel is after normalisation: a number, or one for each channel, ``(−2.12, …)``, in
            the order in which the layer sees them, for convolutions.
        high: ``h``, what the largest is.

    Raises:
        MethodError: the bounds are no numbers, or the lower is not below the higher.
    """

    low: float | tuple[float, ...] = 0.0
    high: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        low, high = (each if isinstance(each, tuple) else (each,) for each in (self.low, self.high))
        right = all(isinstance(each, int | float) and math.isfinite(each) for each in (*low, *high))
        if not right or len(low) != len(high) or not low or not all(a < b for a, b in zip(low, high, strict=True)):
            raise MethodError(
                f"the bounds are {self.low!r} and {self.high!r}; pass two numbers, or a tuple of one for each channel "
                "twice, the lower first"
            )

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``Σ_i u_i c_i · [z / Σ c]detach``, ``u = x / [x]detach``.

        Raises:
            MethodError: other bounds than there are channels, or an input outside of them.
        """
        z = op(x, weight, bias)
        still, weight = x.detach(), dequantised(weight)
        low, high = (self._bound(each, still, weight) for each in (self.low, self.high))
        slack = 1e-3 * (high - low)
        if bool(((still < low - slack) | (still > high + slack)).any()):
            raise MethodError(
                f"the pixels reach from {float(still.min()):.3g} to {float(still.max()):.3g}, outside of the bounds of "
                f"ZBox, {self.low} and {self.high}; pass those that normalised pixels may have"
            )
        plus, minus = weight.clamp(min=0), weight.clamp(max=0)

        def shared(by: Tensor | float) -> Tensor:
            return op(still * by, weight, None) - op(low * by, plus, None) - op(high * by, minus, None)

        total = shared(1.0).detach()
        return with_gradient_of(z, shared(_units(x)) * ratio(z.detach(), total).to(z.dtype))

    @staticmethod
    def _bound(bound: float | tuple[float, ...], x: Tensor, weight: Tensor) -> Tensor:
        if not isinstance(bound, tuple) or len(bound) == 1:
            return torch.full_like(x, bound[0] if isinstance(bound, tuple) else bound)
        if x.ndim != 4 or weight.ndim != 4 or x.shape[1] != len(bound):
            raise MethodError(
                f"ZBox has bounds for {len(bound)} channels, and the first layer sees {list(x.shape)}; pass two numbers"
            )
        return torch.tensor(bound, dtype=x.dtype, device=x.device).reshape(1, -1, 1, 1).expand_as(x)


def _refuse_negative(name: str, value: Any) -> None:
    """Below 0 a denominator may vanish, or change its sign, where no term of it does."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise MethodError(f"{name} is {value!r}; pass a finite number, at least 0")


def _signed_parts(op: Operation, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(Σ (x w)⁺ + b⁺, Σ (x w)⁻ + b⁻)``."""
    weight = dequantised(weight)
    x_plus, x_minus = x.clamp(min=0), x.clamp(max=0)
    w_plus, w_minus = weight.clamp(min=0), weight.clamp(max=0)
    b_plus, b_minus = (None, None) if bias is None else (bias.clamp(min=0), bias.clamp(max=0))
    positive = op(x_plus, w_plus, b_plus) + op(x_minus, w_minus, None)
    negative = op(x_plus, w_minus, b_minus) + op(x_minus, w_plus, None)
    return positive, negative


def dequantised(weight: Tensor) -> Tensor:
    """The floating-point matrix that a quantised weight stands for; any other weight as it is."""
    return weight if type(weight).dequantize is Tensor.dequantize else weight.dequantize()
