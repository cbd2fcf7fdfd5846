"""Kernels: what the rules need of autograd, and what makes them fast.

Each gives the value of the model's own operation, and a gradient. The equations are in ``rules.py``; which operation of
the model gets which rule, and when a kernel stands for one, is the engine's.
"""

from __future__ import annotations

import platform
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

if TYPE_CHECKING:
    from collections.abc import Callable

    Operation = Callable[..., Tensor]

# ------------------------------------------------------------------- the parts of a rule


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


class Choice:
    """Which of two gradients holds: what one layer has made, with a bias and without, has one choice."""

    def __init__(self) -> None:
        self.is_second = False
        self._waiting: list[Callable[[], object]] = []

    def when_second(self, call: Callable[[], object]) -> None:
        """Call it once the second is taken, or now if it was."""
        if self.is_second:
            call()
        else:
            self._waiting.append(call)

    def take_second(self) -> None:
        """From here on the second holds."""
        self.is_second = True
        while self._waiting:
            self._waiting.pop(0)()


def either(first: Tensor, second: Tensor) -> Tensor:
    """``first``, with its gradient or, once its node is told so (``node.choice.take_second()``), with that of
    ``second``, which has the same value."""
    return _Either.apply(first, second)  # type: ignore[no-any-return, no-untyped-call]


class _Either(Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.choice = Choice()
        return first.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (None, dy) if ctx.choice.is_second else (dy, None)


def _constant(weight: Tensor | None) -> Tensor | None:
    """A weight for the backward pass. By way of a torch function, so that a trace has its own tensor in the place of a
    buffer's, too: what is only saved, no mode sees."""
    return None if weight is None else weight.detach()


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """``factor·x + (1 − factor)·[x]detach``, as a view of ``x``."""
    return _on_entry(x.view_as(x), factor) if x.requires_grad else x


def scaled_on_entry(y: Tensor, factor: float) -> Tensor:
    """``y``, in its own memory; what enters the operation that made it in the backward pass is scaled.

    The operation's node in the graph scales, not the tensor: the gradient at ``y`` stays what it is, and ``y`` may be
    changed in place. Cheaper than an operation of its own.
    """
    # a change in place gives a view another node in the place of its own; einsum and tensordot give views
    return _on_entry(torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y, factor)


def _on_entry(y: Tensor, factor: float) -> Tensor:
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: tuple([g if g is None else g * factor for g in gradients]))
    return y


def ratio(y: Tensor, x: Tensor) -> Tensor:
    """``y / x``, in float32 at least, and 0 where that is no finite number, as where ``x = 0``."""
    if x.dtype is not torch.float32:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    # on a CPU a comparison with 0 costs more than all of this
    return torch.div(y, x).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


# -------------------------------------------- products that leave out what is zero, or are oneDNN's


def for_sparse_gradients(op: Operation, transposed: bool = False) -> Operation:
    """The linear ``op(x, weight, bias)``, which in the backward pass leaves out what no gradient arrives at: of a
    language-model head all rows of the weight but the one or two that are explained, and in the last layer all tokens
    but the one whose logits they are.

    Args:
        op: the operation.
        transposed: whether its weight is ``[inputs, outputs]``, not ``[outputs, inputs]``.
    """
    sparse = partial(_of_rows, _sparse_product), partial(_of_rows, torch.ops.lrpx.sparse_matmul)
    return _with_backward_product(_Product(op, transposed, *sparse))


def by_onednn(op: Operation, transposed: bool = False) -> Operation:
    """The linear ``op(x, weight, bias)`` of float32, whose gradient is a product by oneDNN."""
    return _with_backward_product(_Product(op, transposed, _product_by_onednn, torch.matmul))


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN's products of float32 matrices are quicker than MKL's, torch's own choice: on AMD's processors
    with AVX-512."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = platform.processor()
    return "AuthenticAMD" in told


class _Product(NamedTuple):
    """What the gradient of a linear operation is a product by."""

    op: Operation
    transposed: bool
    product: Operation
    of_batched: Operation
    """What stands for it where gradients come in batches, as tensors of a kind of their own."""


def _with_backward_product(by: _Product) -> Operation:
    return lambda x, weight, bias=None: _WithBackwardProduct.apply(by, x, weight, bias)  # type: ignore[no-untyped-call]


class _WithBackwardProduct(Function):
    @staticmethod
    def forward(ctx: Any, by: _Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(_constant(weight))
        ctx.by = by
        y = by.op(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        if ctx.by.transposed:
            weight = weight.T
        if weight.dtype != dy.dtype:  # under autocast
            weight = weight.to(dy.dtype)
        is_plain = type(dy) is Tensor and not is_legacy_batchedtensor(dy)
        dx = (ctx.by.product if is_plain else ctx.by.of_batched)(dy, weight)
        return None, dx, None, dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None


def _of_rows(product: Operation, a: Tensor, b: Tensor) -> Tensor:
    """``product(a, b)`` of a matrix ``b`` and all rows of ``a``, whatever its dimensions."""
    rows: Tensor = product(a.reshape(-1, a.shape[-1]), b)
    return rows.view(*a.shape[:-1], b.shape[-1])


def _sparse_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` without the rows and columns of ``a`` that are all zero, where they are many."""
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


_sparse_matmul = torch.library.custom_op(
    "lrpx::sparse_matmul", _sparse_product, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
"""The same as an operator of its own, so that a compiler leaves the choice to the call, and a batch of them is one."""


@_sparse_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


@torch.library.custom_op("lrpx::onednn_matmul", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def _onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices by oneDNN, without a copy of either."""
    return _product_by_onednn(a, b)


def _product_by_onednn(a: Tensor, b: Tensor) -> Tensor:
    if not (a.numel() and b.numel()) or a.dtype != torch.float32:
        return a @ b
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.T, None, "none", [], "")
    return product


@_onednn_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


def _mm(a: Tensor, b: Tensor) -> Any:
    known = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_float32 = a.device.type == "cpu" and a.dtype == torch.float32
    return torch.ops.lrpx.onednn_matmul(a, b) if known and is_float32 else NotImplemented


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _mm(a, b)
    return product if product is NotImplemented else beta * bias + alpha * product


ONEDNN: dict[Any, Callable[..., Any]] = {torch.ops.aten.mm.default: _mm, torch.ops.aten.addmm.default: _addmm}
"""How a compiler records the products of two matrices."""


# ---------------------------------------------------- products under the uniform rule


def substitution(op: Operation, /, a: Tensor, b: Tensor, share: float = 0.5, **kwargs: Any) -> Tensor:
    """``x = a⁻¹ b`` for a triangular ``a``, as the substitution ``x_i = (b_i − Σ_j a_ij x_j) / a_ii`` that it is.

    The uniform rule gives ``a_ij`` a share ``λ`` of ``a_ij x_j``, and ``a_ii`` is a normaliser. Unrolled, with ``L``
    the triangle beside the diagonal, that is the gradient of ``[a − λL]detach⁻¹ (b − λ L [x]detach)``; its value is x.
    """
    x = op(a, b, **kwargs)
    beside = a.triu(1) if kwargs["upper"] else a.tril(-1)
    known = beside @ x.detach() if kwargs.get("left", True) else x.detach() @ beside
    return with_gradient_of(x, op((a - share * beside).detach(), b - share * known, **kwargs))


def attention(
    op: Operation,
    /,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    counts: tuple[int, int, int] = (1, 1, 1),
) -> Tensor:
    """Fused attention with the uniform rule on both of its products; its softmax has its own gradient.

    That is standard attention whose gradients are scaled ×¼ at q and k, ×½ at an additive mask and at v, or ×¼ on entry
    and then ×2 at two of the four. The kernel ``op(q, k, v, mask)`` is the model's own, and no attention matrix is
    formed.

    ``counts``: of how many factors the queries, keys and values are products; one that is a product of two gets two
    shares.
    """
    masked = mask is not None and mask.requires_grad
    if counts != (1, 1, 1):
        of_q, of_k, of_v = counts
        if v.requires_grad and (q.requires_grad or k.requires_grad or masked):
            v = scale_gradient(v, 2 * of_v / (of_v + 1))
            q, k = scale_gradient(q, 2 / (of_v + 1)), scale_gradient(k, 2 / (of_v + 1))
            mask = None if mask is None else scale_gradient(mask, 2 / (of_v + 1))
        if q.requires_grad and k.requires_grad:
            q, k = scale_gradient(q, 2 * of_q / (of_q + of_k)), scale_gradient(k, 2 * of_k / (of_q + of_k))
    share = 0.5 if v.requires_grad and (q.requires_grad or k.requires_grad or masked) else 1.0
    if q.requires_grad and k.requires_grad:
        v = scale_gradient(v, 2.0)
        mask = None if mask is None else scale_gradient(mask, 2.0)
        share /= 2
    attended = op(q, k, v, mask)
    return attended if share == 1.0 else scaled_on_entry(attended, share)


# --------------------------------------------------------------- norms with constant deviations


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
        ctx.save_for_backward(reciprocal_std, _constant(weight))
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
        summed = dy.sum(leading) if leading else dy  # over no dimensions, torch takes the sum over all
        return dx, summed if ctx.needs_input_grad[1] else None, None, None, None, None


def rms_norm_constant_std(
    op: Operation, /, x: Tensor, dims: tuple[int, ...], weight: Tensor | None, eps: float
) -> Tensor:
    """RMSNorm with its root mean square held constant (Arras 2025, D.5)."""
    return _RMSNormConstantStd.apply(x, op, dims, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNormConstantStd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Operation, dims: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps), _constant(weight))
        return op(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        reciprocal_rms, weight = ctx.saved_tensors
        scaled = dy if weight is None else dy * weight
        return (scaled * reciprocal_rms).to(dy.dtype), None, None, None, None
