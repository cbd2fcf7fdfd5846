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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from collections.abc import Callable

    Operation = Callable[..., Tensor]


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
    return op(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))


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


def ratio(y: Tensor, x: Tensor) -> Tensor:
    """``y / x``, in float32 at least, and 0 where ``x = 0``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # by the reciprocal, whose only infinity is at 0: on a CPU a comparison costs more than all of this
    return torch.reciprocal(x.to(wide)).nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0).mul_(y)


# ------------------------------------------------------------------------- products


def uniform(op: Operation, /, a: Tensor, b: Tensor) -> Tensor:
    """``½ab + ½[ab]detach``: each factor of a product or matrix product gets half of the relevance.

    Achtibat et al. 2024, Prop. 3.3; Arras 2025, §2.7.
    """
    return scaled_on_entry(op(a, b), 0.5)


def signal_take_all(op: Operation, /, gate: Tensor, signal: Tensor) -> Tensor:
    """``[gate]detach · signal``: the signal gets all of the relevance (Arras et al. 2017; Arras 2025, D.4)."""
    return op(gate.detach(), signal)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """``factor·x + (1 − factor)·[x]detach``, as a view of ``x``."""
    return scaled_on_entry(x.view_as(x), factor) if x.requires_grad else x


def scaled_on_entry(y: Tensor, factor: float) -> Tensor:
    """``y`` itself; what enters the operation that made it in the backward pass is scaled.

    The operation's node in the graph scales, not the tensor: the gradient at ``y`` stays what it is, and ``y`` may be
    changed in place. Cheaper than an operation of its own.
    """
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: tuple([g if g is None else g * factor for g in gradients]))
    return y


def solve_triangular(op: Operation, /, a: Tensor, b: Tensor, matmul: Rule, **kwargs: Any) -> Tensor:
    """``x = a⁻¹ b`` for a triangular ``a``, as the substitution ``x_i = (b_i − Σ_j a_ij x_j) / a_ii`` that it is.

    The uniform rule gives each factor of ``a_ij x_j`` half, and ``a_ii`` is a normaliser. Unrolled, with ``L`` the
    triangle beside the diagonal, that is the gradient of ``[a − ½L]detach⁻¹ (b − ½ L [x]detach)``, whose value is x.

    Raises:
        TypeError: another rule than ``unmodified`` and ``uniform``, which one kernel cannot carry.
    """
    x = op(a, b, **kwargs)
    if matmul is unmodified:
        return x
    if matmul is not uniform:
        raise TypeError("a triangular solve carries only the rules unmodified and uniform")
    beside = a.triu(1) if kwargs["upper"] else a.tril(-1)
    known = beside @ x.detach() if kwargs.get("left", True) else x.detach() @ beside
    return with_gradient_of(x, op((a - beside / 2).detach(), b - known / 2, **kwargs))


# ---------------------------------------------------- linear layers and convolutions
#
# ``op(x, weight, bias)`` is linear in x: F.linear, addmm, a convolution. The weight and the bias are
# constants; the bias takes part in the denominator and so gets its own share (formulas in Arras 2025, D.1–D.2).


@dataclass(frozen=True)
class Epsilon:
    """LRP-ε: ``R_i = Σ_j x_i w_ij / (z_j + ε·sign z_j) · R_j``, with sign(0) = +1 (Bach 2015; Arras 2025, D.1)."""

    epsilon: float = 1e-6

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
    """

    gamma: float = 0.25

    def __call__(self, op: Operation, /, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``z`` with the gradient of ``z^γ · [z / z^γ]detach``."""
        z = op(x, weight, bias)
        positive, negative = _signed_parts(op, x, weight, bias)
        favoured = z + self.gamma * torch.where(z.detach() >= 0, positive, negative)
        return with_gradient_of(z, favoured * ratio(z.detach(), favoured.detach()).to(z.dtype))


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


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """``value``, bit for bit, with the gradient of ``other``."""
    return _GradientOf.apply(other, value.detach())  # type: ignore[no-any-return, no-untyped-call]


class _GradientOf(Function):
    @staticmethod
    def forward(ctx: Any, other: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def for_sparse_gradients(op: Operation, transposed: bool = False) -> Operation:
    """The linear ``op(x, weight, bias)``, which in the backward pass leaves out what no gradient arrives at: of a
    language-model head all rows of the weight but the one or two that are explained, and in the last layer all tokens
    but the one whose logits they are.

    Args:
        op: the operation.
        transposed: whether its weight is ``[inputs, outputs]``, not ``[outputs, inputs]``.
    """
    return lambda x, weight, bias=None: _ForSparseGradients.apply(op, transposed, x, weight, bias)  # type: ignore[no-untyped-call]


class _ForSparseGradients(Function):
    @staticmethod
    def forward(ctx: Any, op: Operation, transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.transposed = transposed
        y = op(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[0].to(dy.dtype)  # under autocast it has another
        rows = dy.reshape(-1, dy.shape[-1])
        dx = torch.ops.lrpx.sparse_matmul(rows, weight.T if ctx.transposed else weight).view(*dy.shape[:-1], -1)
        return None, None, dx, None, rows.sum(0) if ctx.needs_input_grad[4] else None


@torch.library.custom_op("lrpx::sparse_matmul", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def _sparse_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` without the rows and columns of ``a`` that are all zero, where they are many; an operator of its own,
    so that a compiler leaves the choice to the call."""
    if 2 * a[:, :1].count_nonzero() <= len(a):  # else most rows are not zero, without another look
        rows = a.any(1).nonzero()[:, 0]
        if 2 * len(rows) <= len(a):
            return a.new_zeros(len(a), b.shape[1]).index_copy_(0, rows, _without_columns(a[rows], b))
    return _without_columns(a, b)


def _without_columns(a: Tensor, b: Tensor) -> Tensor:
    if 8 * a[:1].count_nonzero() <= len(b):
        columns = a.any(0).nonzero()[:, 0]
        if 8 * len(columns) <= len(b):
            return a[:, columns] @ b[columns]
    return a @ b


@_sparse_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


# ----------------------------------------------------------------------------- norms


def layer_norm_constant_std(
    op: Operation, /, x: Tensor, bias: Tensor | None, dims: tuple[int, ...], weight: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm with its standard deviation held constant; the mean stays in the graph (Arras 2025, D.5).

    ``op(x, bias)`` is the model's own kernel, which may give the reciprocal of the deviation beside the value; ``dims``
    are the normalised dimensions; the bias is a summand.
    """
    return _LayerNormConstantStd.apply(x, bias, op, dims, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _LayerNormConstantStd(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        op: Operation,
        dims: tuple[int, ...],
        weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        value = op(x, bias)
        if isinstance(value, tuple):
            value, reciprocal_std = value
        else:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            # the kernel of LayerNorm gives the deviation sooner than that of the variance
            reciprocal_std = torch.native_layer_norm(wide, x.shape[dims[0] :], None, None, eps)[2]
        ctx.save_for_backward(reciprocal_std, weight)
        ctx.dims = dims
        return value

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        reciprocal_std, weight = ctx.saved_tensors
        if dy.dtype == reciprocal_std.dtype and (weight is None or weight.dtype == dy.dtype):
            # the gradient of LayerNorm at x = 0 and mean 0, where its term for the deviation vanishes: one kernel
            zero, means = torch.zeros_like(dy, memory_format=torch.contiguous_format), torch.zeros_like(reciprocal_std)
            shape, only_x = dy.shape[ctx.dims[0] :], [True, False, False]
            dx = torch.ops.aten.native_layer_norm_backward(
                dy, zero, shape, means, reciprocal_std, weight, None, only_x
            )[0]
        else:
            scaled = dy if weight is None else dy * weight
            dx = ((scaled - scaled.mean(ctx.dims, keepdim=True)) * reciprocal_std).to(dy.dtype)
        leading = tuple(range(dy.ndim - len(ctx.dims)))
        return dx, dy.sum(leading) if ctx.needs_input_grad[1] else None, None, None, None, None


def rms_norm_constant_std(
    op: Operation, /, x: Tensor, dims: tuple[int, ...], weight: Tensor | None, eps: float
) -> Tensor:
    """RMSNorm with its root mean square held constant (Arras 2025, D.5)."""
    return _RMSNormConstantStd.apply(x, op, dims, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNormConstantStd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Operation, dims: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps), weight)
        return op(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        reciprocal_rms, weight = ctx.saved_tensors
        scaled = dy if weight is None else dy * weight
        return (scaled * reciprocal_rms).to(dy.dtype), None, None, None, None


# ------------------------------------------------------------------- fused attention


def attention(
    op: Operation, /, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: Rule, matmul: Rule
) -> Tensor:
    """Fused attention under the recipe's rules for softmax and for matrix products.

    The uniform rule on both products is standard attention whose gradients are scaled ×¼ at q and k, ×½ at
    an additive mask and at v, or ×¼ on entry and then ×2 at two of the four; a constant softmax leaves v alone in the
    graph. The kernel ``op(q, k, v, mask)`` is the model's own, and no attention matrix is formed.

    Raises:
        TypeError: another rule than ``unmodified``, ``uniform`` and ``constant``, which a fused kernel
            cannot carry.
    """
    if softmax is constant:
        return op(q.detach(), k.detach(), v, None if mask is None else mask.detach())
    if softmax is not unmodified or matmul not in (unmodified, uniform):
        raise TypeError("fused attention carries only the rules unmodified, uniform and constant")
    if matmul is not uniform:
        return op(q, k, v, mask)
    masked = mask is not None and mask.requires_grad
    share = 0.5 if v.requires_grad and (q.requires_grad or k.requires_grad or masked) else 1.0
    if q.requires_grad and k.requires_grad:
        v = scale_gradient(v, 2.0)
        mask = None if mask is None else scale_gradient(mask, 2.0)
        share /= 2
    attended = op(q, k, v, mask)
    return attended if share == 1.0 else scaled_on_entry(attended, share)
