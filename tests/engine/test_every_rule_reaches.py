"""No rule of a recipe is dropped: every kind of operation, in every spelling, under a rule of the user's own.

Such a rule is called, nothing arrives behind it when it detaches, and the spellings of one thing agree; or the
operation is refused, with the names of the rule and the operation, and the mend.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx import rules
from lrpx.engine import Trace, propagate
from lrpx.engine._operation import Operation
from lrpx.engine._table import TABLE, register
from lrpx.errors import MethodError, UnknownOperationError
from lrpx.recipes import ATTNLRP, GRADIENT, KINDS, LRP
from lrpx.rules import Epsilon, Gamma, ZPlus, with_gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.recipes import Recipe
    from lrpx.rules import Rule

    Spelling = Callable[[Any, Tensor], Tensor]


class Counting:
    """A rule of the user's own, of which nothing is known: the operation as it is, or a part of it, or nothing."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.calls = 0

    def __call__(self, op: Any, /, *inputs: Any) -> Tensor:
        self.calls += 1
        if self.share == 0:
            return op(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))  # type: ignore[no-any-return]
        y = op(*inputs)
        return with_gradient_of(y, self.share * y)


class Model(nn.Module):
    """A function of ``x`` ``[2, 3, 4]``, with weights."""

    def __init__(self, function: Spelling) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.function = function
        self.w, self.cube = nn.Parameter(normal(4, 4)), nn.Parameter(normal(2, 4, 4))
        self.vector, self.bias = nn.Parameter(normal(4)), nn.Parameter(normal(4))
        self.kernel, self.slopes = nn.Parameter(normal(4, 3, 2)), nn.Parameter(normal(3).abs())
        self.three = nn.Parameter(normal(4, 4, 4))
        self.register_buffer("buffer", normal(4, 4))
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def run(function: Spelling, recipe: Recipe, x: Tensor = X, ledger: bool = False) -> Trace:
    model = Model(function)
    with propagate(model, recipe, (), ledger=ledger) as trace:
        y = model(x)
    # to the bit but for ``w @ x``, where torch chooses a kernel by whether w needs a gradient
    torch.testing.assert_close(y, model(x), rtol=1e-13, atol=1e-13)
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)
    # besides what the operation passes on, the input itself: so that there is a graph where it passes nothing on
    leaf = trace.sources[0].value
    trace.explain((y * weights).sum() + (leaf * 0.0).sum())
    return trace


def relevance(function: Spelling, recipe: Recipe, x: Tensor = X) -> Tensor:
    return run(function, recipe, x).relevance("x")


def flat(x: Tensor) -> Tensor:
    return x.reshape(6, 4)


def put(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    y = x.clone()
    change(y)
    return y


def above_zero(x: Tensor) -> Tensor:
    """What one may divide by, and no exponential, of which a power is one, too."""
    return x.square() + 1


# ---------------------------------------------------------------- what means the same as what
#
# The first of a group is the plainest spelling; the others give its output, perhaps in another shape.

GROUPS: dict[str, list[dict[str, Spelling]]] = {
    "linear": [
        {
            "F.linear": lambda s, x: F.linear(x, s.w),
            "F.linear by name": lambda s, x: F.linear(input=x, weight=s.w),
            "x @ w.T": lambda s, x: x @ s.w.T,
            "x @ w.t()": lambda s, x: x @ s.w.t(),
            "x @ w.mT": lambda s, x: x @ s.w.mT,
            "x.matmul": lambda s, x: x.matmul(s.w.T),
            "torch.matmul": lambda s, x: torch.matmul(x, s.w.T),
            "torch.matmul by name": lambda s, x: torch.matmul(input=x, other=s.w.T),
            "torch.matmul, one by name": lambda s, x: torch.matmul(x, other=s.w.T),
            "w @ x": lambda s, x: (s.w @ x.mT).mT,
            "w.matmul": lambda s, x: s.w.matmul(x.mT).mT,
            "w @ x of a matrix": lambda s, x: (s.w @ flat(x).T).T.view(2, 3, 4),
            "mm": lambda s, x: torch.mm(flat(x), s.w.T).view(2, 3, 4),
            "mm by name": lambda s, x: torch.mm(input=flat(x), mat2=s.w.T).view(2, 3, 4),
            "x.mm": lambda s, x: flat(x).mm(s.w.T).view(2, 3, 4),
            "w.mm": lambda s, x: s.w.mm(flat(x).T).T.reshape(2, 3, 4),
            "addmm": lambda s, x: torch.addmm(s.bias * 0, flat(x), s.w.T).view(2, 3, 4),
            "addmm by name": lambda s, x: torch.addmm(input=s.bias * 0, mat1=flat(x), mat2=s.w.T).view(2, 3, 4),
            "addmm alpha": lambda s, x: torch.addmm(s.bias, flat(x), s.w.T / 2, beta=0, alpha=2).view(2, 3, 4),
            "addmm, w first": lambda s, x: torch.addmm(s.w[:, :1] * 0, s.w, flat(x).T).T.reshape(2, 3, 4),
            "addmm of a constant": lambda s, x: torch.addmm(s.bias * 0, flat(x), (s.w * 1).T).view(2, 3, 4),
            "addmm_": lambda s, x: put(flat(x) * 0, lambda y: y.addmm_(flat(x), s.w.T)).view(2, 3, 4),
            "inner": lambda s, x: torch.inner(x, s.w),
            "inner by name": lambda s, x: torch.inner(input=x, other=s.w),
            "inner, w first": lambda s, x: torch.inner(s.w, flat(x)).T.reshape(2, 3, 4),
            "tensordot": lambda s, x: torch.tensordot(x, s.w, dims=([2], [1])),
            "tensordot by name": lambda s, x: torch.tensordot(a=x, b=s.w, dims=([2], [1])),
            "tensordot, w first": lambda s, x: torch.tensordot(s.w, x, dims=([1], [2])).permute(1, 2, 0),
            "einsum": lambda s, x: torch.einsum("btd,ed->bte", x, s.w),
            "einsum, w first": lambda s, x: torch.einsum("ed,btd->bte", s.w, x),
            "einsum of dots": lambda s, x: torch.einsum("...d,ed->...e", x, s.w),
            "einsum of a list": lambda s, x: torch.einsum("btd,ed->bte", [x, s.w]),
            "einsum of sublists": lambda s, x: torch.einsum(x, [0, 1, 2], s.w, [3, 2], [0, 1, 3]),
            "bmm": lambda s, x: torch.bmm(x, s.w.T.expand(2, 4, 4)),
            "bmm by name": lambda s, x: torch.bmm(input=x, mat2=s.w.T.expand(2, 4, 4)),
            "bmm, w first": lambda s, x: torch.bmm(s.w.expand(2, 4, 4), x.mT).mT,
            "baddbmm": lambda s, x: torch.baddbmm(s.bias * 0, x, s.w.T.expand(2, 4, 4)),
            "baddbmm by name": lambda s, x: torch.baddbmm(input=s.bias * 0, batch1=x, batch2=s.w.T.expand(2, 4, 4)),
            "mv": lambda s, x: torch.stack([torch.mv(s.w, row) for row in flat(x)]).view(2, 3, 4),
            "mv by name": lambda s, x: torch.stack([torch.mv(input=s.w, vec=row) for row in flat(x)]).view(2, 3, 4),
            "w @ vector": lambda s, x: torch.stack([s.w @ row for row in flat(x)]).view(2, 3, 4),
            "vector @ w": lambda s, x: torch.stack([row @ s.w.T for row in flat(x)]).view(2, 3, 4),
            "addmv": lambda s, x: torch.stack([torch.addmv(s.bias * 0, s.w, row) for row in flat(x)]).view(2, 3, 4),
            "x.mv": lambda s, x: torch.stack([flat(x).mv(row) for row in s.w], 1).view(2, 3, 4),
            "dot": lambda s, x: torch.stack([torch.dot(row, w) for row in flat(x) for w in s.w]).view(2, 3, 4),
            "dot, w first": lambda s, x: torch.stack([w.dot(row) for row in flat(x) for w in s.w]).view(2, 3, 4),
            "a computed weight": lambda s, x: x @ (s.w * 1).T,
            "a computed weight, first": lambda s, x: ((s.w * 1) @ x.mT).mT,
            "the input as the weight": lambda s, x: F.linear(s.w, flat(x)).T.reshape(2, 3, 4),
        },
        {
            "F.linear with a bias": lambda s, x: F.linear(x, s.w, s.bias),
            "by name": lambda s, x: F.linear(x, weight=s.w, bias=s.bias),
            "addmm": lambda s, x: torch.addmm(s.bias, flat(x), s.w.T).view(2, 3, 4),
            "s.bias.addmm": lambda s, x: s.bias.addmm(flat(x), s.w.T).view(2, 3, 4),
            "addmm beta": lambda s, x: torch.addmm(s.bias / 2, flat(x), s.w.T, beta=2).view(2, 3, 4),
            "baddbmm": lambda s, x: torch.baddbmm(s.bias, x, s.w.T.expand(2, 4, 4)),
        },
        {
            "experts": lambda s, x: torch.stack([F.linear(each, w.T) for each, w in zip(x, s.cube, strict=True)]),
            "bmm": lambda s, x: torch.bmm(x, s.cube),
            "x @ cube": lambda s, x: x @ s.cube,
            "cube @ x": lambda s, x: (s.cube.mT @ x.mT).mT,
            "baddbmm": lambda s, x: torch.baddbmm(torch.zeros(2, 3, 4, dtype=x.dtype), x, s.cube),
            "einsum": lambda s, x: torch.einsum("btd,bde->bte", x, s.cube),
        },
        {
            "addmm to x": lambda s, x: flat(x) + flat(x) @ s.w,
            "fused": lambda s, x: torch.addmm(flat(x), flat(x), s.w),
            "in place": lambda s, x: put(flat(x), lambda y: y.addmm_(flat(x), s.w)),
        },
        {
            "a sum over the batch": lambda s, x: torch.einsum("bij,bik->jk", x, s.cube[:, :3]),
            "addbmm": lambda s, x: torch.addbmm(torch.zeros(4, 4, dtype=x.dtype), x.mT, s.cube[:, :3]),
        },
        {"a buffer": lambda s, x: x @ s.buffer, "einsum": lambda s, x: torch.einsum("btd,de->bte", x, s.buffer)},
        {
            "x @ w": lambda s, x: x @ s.w,
            "linalg.matmul": lambda s, x: torch.linalg.matmul(x, s.w),
            "linalg.vecdot": lambda s, x: torch.linalg.vecdot(x[:, :, None], s.w.T),
            "multi_dot": lambda s, x: torch.stack([torch.linalg.multi_dot([each, s.w]) for each in x]),
        },
        {"cross": lambda s, x: torch.cross(x[..., :3], s.cube[:, :3, :3], dim=-1),
         "linalg.cross": lambda s, x: torch.linalg.cross(x[..., :3], s.cube[:, :3, :3])},
    ],
    "convolution": [
        {
            "F.conv1d": lambda s, x: F.conv1d(x, s.kernel),
            "torch.conv1d by name": lambda s, x: torch.conv1d(input=x, weight=s.kernel),
            "conv2d": lambda s, x: F.conv2d(x[..., None], s.kernel[..., None])[..., 0],
            "conv3d": lambda s, x: F.conv3d(x[..., None, None], s.kernel[..., None, None])[..., 0, 0],
            "conv_transpose1d": lambda s, x: F.conv_transpose1d(x, s.kernel.transpose(0, 1).flip(-1))[..., 1:-1],
            "conv_transpose2d": lambda s, x: F.conv_transpose2d(
                x[..., None], s.kernel.transpose(0, 1).flip(-1)[..., None]
            )[..., 1:-1, 0],
            "conv_transpose3d": lambda s, x: F.conv_transpose3d(
                x[..., None, None], s.kernel.transpose(0, 1).flip(-1)[..., None, None]
            )[..., 1:-1, 0, 0],
        },
        {
            "the input as the kernel": lambda s, x: F.conv1d(s.kernel, x[:, :, :2]),
        },
    ],
    "activation": [
        {
            "pairwise_distance": lambda s, x: F.pairwise_distance(x[0], x[1], eps=0.0),
            "by name": lambda s, x: F.pairwise_distance(x1=x[0], x2=x[1], p=2, eps=0.0, keepdim=True)[:, 0],
            "cdist": lambda s, x: torch.cdist(x[0], x[1]).diagonal(),
            "cdist by name": lambda s, x: torch.cdist(x1=x[0], x2=x[1], p=2.0).diagonal(),
            "dist": lambda s, x: torch.stack([torch.dist(x[0, i], x[1, i]) for i in range(3)]),
            "spelled out": lambda s, x: (x[0] - x[1]).square().sum(-1).sqrt(),
        },
        {
            "relu": lambda s, x: x.relu(),
            "torch.relu": lambda s, x: torch.relu(x),
            "torch.relu by name": lambda s, x: torch.relu(input=x),
            "F.relu": lambda s, x: F.relu(x),
            "F.relu inplace": lambda s, x: F.relu(x.clone(), inplace=True),
            "relu_": lambda s, x: put(x, lambda y: y.relu_()),
            "torch.relu_": lambda s, x: put(x, torch.relu_),
            "leaky_relu": lambda s, x: F.leaky_relu(x, 0.0),
            "leaky_relu inplace": lambda s, x: F.leaky_relu(x.clone(), 0.0, inplace=True),
            "leaky_relu_": lambda s, x: put(x, lambda y: F.leaky_relu_(y, 0.0)),
            "threshold": lambda s, x: F.threshold(x, 0.0, 0.0),
            "threshold_": lambda s, x: put(x, lambda y: F.threshold_(y, 0.0, 0.0)),
            "prelu": lambda s, x: F.prelu(x, torch.zeros(3, dtype=x.dtype)),
            "rrelu": lambda s, x: F.rrelu(x, 0.0, 0.0),
            "clamp": lambda s, x: x.clamp(min=0),
            "clip": lambda s, x: torch.clip(x, 0),
            "clamp_min": lambda s, x: x.clamp_min(0),
            "clamp_": lambda s, x: put(x, lambda y: y.clamp_(min=0)),
        },
        {"abs": lambda s, x: x.abs(), "torch.absolute": lambda s, x: torch.absolute(x), "abs()": lambda s, x: abs(x),
         "abs_": lambda s, x: put(x, lambda y: y.abs_())},
        {"tanh": lambda s, x: x.tanh(), "by name": lambda s, x: torch.tanh(input=x), "F": lambda s, x: F.tanh(x),
         "tanh_": lambda s, x: put(x, lambda y: y.tanh_())},
        {"sigmoid": lambda s, x: x.sigmoid(), "expit": lambda s, x: torch.special.expit(x),
         "sigmoid_": lambda s, x: put(x, torch.sigmoid_)},
        {"silu": lambda s, x: F.silu(x), "inplace": lambda s, x: F.silu(x.clone(), inplace=True),
         "inplace by place": lambda s, x: F.silu(x.clone(), True)},
        {"elu": lambda s, x: F.elu(x), "inplace": lambda s, x: F.elu(x.clone(), inplace=True),
         "elu_": lambda s, x: put(x, F.elu_)},
        {"selu": lambda s, x: F.selu(x), "selu_": lambda s, x: put(x, torch.selu_)},
        {"hardtanh": lambda s, x: F.hardtanh(x), "hardtanh_": lambda s, x: put(x, F.hardtanh_),
         "clamp": lambda s, x: x.clamp(-1, 1)},
        {"square": lambda s, x: x.square(), "x * x": lambda s, x: x * x, "x ** 2": lambda s, x: x**2,
         "pow by name": lambda s, x: torch.pow(input=x, exponent=2), "pow_": lambda s, x: put(x, lambda y: y.pow_(2)),
         "by a tensor": lambda s, x: x ** torch.tensor(2.0, dtype=x.dtype), "torch.mul": lambda s, x: torch.mul(x, x),
         "float_power": lambda s, x: torch.float_power(x, 2), "**=": lambda s, x: put(x, lambda y: y.__ipow__(2))},
        {"2 ** x": lambda s, x: 2**x, "exp2": lambda s, x: x.exp2(), "pow": lambda s, x: torch.pow(2.0, x)},
        {"sqrt": lambda s, x: (x.detach().abs() + x * 0 + 1).sqrt(),
         "** 0.5": lambda s, x: (x.detach().abs() + x * 0 + 1) ** 0.5},
        *({name: lambda s, x, name=name: getattr(F, name)(x)}  # type: ignore[misc]
          for name in ("gelu", "mish", "hardsigmoid", "hardswish", "logsigmoid", "softplus", "softsign", "tanhshrink",
                       "softshrink", "hardshrink", "celu", "relu6")),
        {"heaviside": lambda s, x: torch.heaviside(x, x.new_tensor(0.5))},
        {"x ** 3": lambda s, x: x**3, "pow_": lambda s, x: put(x, lambda y: y.pow_(3))},
        *({name: lambda s, x, name=name: getattr(torch, name)(x.sigmoid() / 2)}  # type: ignore[misc]
          for name in ("erfinv", "log", "log1p", "log2", "log10")),
        *({name: lambda s, x, name=name: getattr(torch.special, name)(x)}  # type: ignore[misc]
          for name in ("erf", "exp2", "expm1")),
        {"special.log1p": lambda s, x: torch.special.log1p(x.exp())},
        {"clamp_max": lambda s, x: x.clamp_max(0), "clamp": lambda s, x: x.clamp(max=0)},
        {"atan": lambda s, x: x.atan(), "arctan": lambda s, x: torch.arctan(x)},
        {"asinh": lambda s, x: x.asinh(), "arcsinh": lambda s, x: torch.arcsinh(x)},
        *({name: lambda s, x, name=name: getattr(torch, name)(x)}  # type: ignore[misc]
          for name in ("erf", "erfc", "exp", "expm1", "sin", "cos", "sinh", "cosh", "atan", "asinh", "round", "sign",
                       "floor", "ceil", "trunc", "sgn", "tan", "sinc", "frac", "digamma", "lgamma", "i0", "fix")),
        *({name: lambda s, x, name=name: getattr(torch, name)(x.sigmoid())}  # type: ignore[misc]
          for name in ("acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "logit")),
        *({name: lambda s, x, name=name: getattr(torch, name)(x.exp() + 1)}  # type: ignore[misc]
          for name in ("acosh", "arccosh")),
        *({name: lambda s, x, name=name: getattr(torch.special, name)(x.sigmoid())}  # type: ignore[misc]
          for name in ("erfc", "erfinv", "logit", "sinc", "digamma", "psi", "gammaln", "i0", "i0e", "i1", "i1e", "entr",
                       "ndtr", "ndtri", "log_ndtr", "erfcx", "round")),
        {"multigammaln": lambda s, x: torch.special.multigammaln(x.exp() + 2, 2),
         "mvlgamma": lambda s, x: torch.mvlgamma(x.exp() + 2, 2)},
        {"fmod": lambda s, x: torch.fmod(x, 0.7), "fmod_": lambda s, x: put(x, lambda y: y.fmod_(0.7))},
        {"remainder": lambda s, x: torch.remainder(x, s.bias.detach()), "%": lambda s, x: x % s.bias.detach()},
        {"copysign": lambda s, x: torch.copysign(x, s.bias.detach())},
        {"//": lambda s, x: x // 0.7},
        {"floor_divide": lambda s, x: torch.floor_divide(x, 0.7)},
        {"a threshold that is no relu": lambda s, x: F.threshold(x, 0.1, 0.3),
         "threshold_": lambda s, x: put(x, lambda y: F.threshold_(y, 0.1, 0.3))},
    ],
    "product": [
        {
            "cosine_similarity": lambda s, x: F.cosine_similarity(x[0], x[1], dim=-1),
            "cosine by name": lambda s, x: torch.cosine_similarity(x1=x[0], x2=x[1], dim=-1, eps=1e-8),
            "cosine spelled out": lambda s, x: (x[0] * x[1]).sum(-1) / x[0].norm(dim=-1) / x[1].norm(dim=-1),
        },
        {
            "a * b": lambda s, x: x[0] * x[1],
            "torch.mul": lambda s, x: torch.mul(x[0], x[1]),
            "torch.mul by name": lambda s, x: torch.mul(input=x[0], other=x[1]),
            "torch.multiply": lambda s, x: torch.multiply(x[0], other=x[1]),
            "a.mul": lambda s, x: x[0].mul(x[1]),
            "mul_": lambda s, x: put(x[0], lambda y: y.mul_(x[1])),
            "*=": lambda s, x: put(x[0], lambda y: y.__imul__(x[1])),
            "addcmul": lambda s, x: torch.addcmul(torch.zeros(3, 4, dtype=x.dtype), x[0], x[1]),
            "addcmul by name": lambda s, x: torch.addcmul(
                torch.zeros(3, 4, dtype=x.dtype), tensor1=x[0], tensor2=x[1], value=1
            ),
            "addcmul_": lambda s, x: put(torch.zeros(3, 4, dtype=x.dtype), lambda y: y.addcmul_(x[0], x[1])),
            "lerp": lambda s, x: torch.lerp(torch.zeros(3, 4, dtype=x.dtype), x[0], x[1]),
            "einsum": lambda s, x: torch.einsum("td,td->td", x[0], x[1]),
            "einsum of dots": lambda s, x: torch.einsum("...d, ...d -> ...d", x[0], x[1]),
        },
        {
            "a vector times a vector": lambda s, x: x[0, 0, :, None] * x[1, 0],
            "outer": lambda s, x: torch.outer(x[0, 0], x[1, 0]),
            "outer by name": lambda s, x: torch.outer(x[0, 0], vec2=x[1, 0]),
            "ger": lambda s, x: torch.ger(x[0, 0], x[1, 0]),
            "kron": lambda s, x: torch.kron(x[0, 0], x[1, 0]).view(4, 4),
            "addr": lambda s, x: torch.addr(torch.zeros(4, 4, dtype=x.dtype), x[0, 0], x[1, 0]),
            "einsum": lambda s, x: torch.einsum("a,b->ab", x[0, 0], x[1, 0]),
        },
        {
            "three factors": lambda s, x: x[0] * x[1] * x[0].tanh(),
            "einsum": lambda s, x: torch.einsum("td,td,td->td", x[0], x[1], x[0].tanh()),
        },
        {
            "a slope": lambda s, x: x.relu() - x[:, :, :1].exp().mean() * (-x).relu(),
            "prelu": lambda s, x: F.prelu(x, x[:, :, :1].exp().mean()[None]),
        },
        {
            "an outer product": lambda s, x: x[0, :, :, None] * x[1, 0],
            "einsum": lambda s, x: torch.einsum("td,e->tde", x[0], x[1, 0]),
            "einsum of dots": lambda s, x: torch.einsum("...ab,...c", x[0], x[1, 0]),
            "einsum without an arrow": lambda s, x: torch.einsum("ab,c", x[0], x[1, 0]),
        },
        {
            "a product with itself": lambda s, x: x * x.view_as(x),
            "einsum": lambda s, x: torch.einsum("btd,btd->btd", x, x),
        },
        {"prod": lambda s, x: x.prod(-1)},
        {"cumprod": lambda s, x: x.cumprod(-1)},
        {"glu": lambda s, x: F.glu(x), "by name": lambda s, x: F.glu(x, dim=-1)},
    ],
    "matmul": [
        {
            "a @ b": lambda s, x: x @ x.mT,
            "torch.matmul by name": lambda s, x: torch.matmul(input=x, other=x.mT),
            "bmm": lambda s, x: torch.bmm(x, x.mT),
            "bmm by name": lambda s, x: torch.bmm(x, mat2=x.mT),
            "baddbmm": lambda s, x: torch.baddbmm(torch.zeros(2, 3, 3, dtype=x.dtype), x, x.mT),
            "einsum": lambda s, x: torch.einsum("bij,bkj->bik", x, x),
            "einsum with a constant": lambda s, x: torch.einsum("bij,bkj,j->bik", x, x, torch.ones(4, dtype=x.dtype)),
            "mm": lambda s, x: torch.stack([torch.mm(each, each.T) for each in x]),
            "addmm": lambda s, x: torch.stack([torch.addmm(torch.zeros(3, 3, dtype=x.dtype), e, e.T) for e in x]),
            "inner": lambda s, x: torch.stack([torch.inner(each, each) for each in x]),
            "tensordot": lambda s, x: torch.stack([torch.tensordot(each, each, dims=([1], [1])) for each in x]),
            "dot": lambda s, x: torch.stack([torch.dot(a, b) for e in x for a in e for b in e]).view(2, 3, 3),
            "mv": lambda s, x: torch.stack([torch.mv(e, b) for e in x for b in e]).view(2, 3, 3),
            "F.linear": lambda s, x: torch.stack([F.linear(each, each) for each in x]),
            "bilinear": lambda s, x: F.bilinear(
                x[:, :, None].expand(2, 3, 3, 4).contiguous(), x[:, None].expand(2, 3, 3, 4).contiguous(),
                torch.eye(4, dtype=x.dtype)[None],
            )[..., 0],
        },
        {"conv": lambda s, x: F.conv1d(x[:1], x[1:, :, :2])},
        {"baddbmm": lambda s, x: torch.baddbmm(s.cube[:, :3, :3], x, x.mT, beta=2, alpha=3)},
        {"a solve": lambda s, x: torch.linalg.solve_triangular(
            (x @ x.mT).tril() + 3 * torch.eye(3, dtype=x.dtype), x, upper=False)},
        {"einsum of three": lambda s, x: torch.einsum("btd,bsd,bsd->bts", x, x.flip(1), x)},
    ],
    "softmax": [
        {
            "softmax": lambda s, x: x.softmax(-1),
            "torch.softmax by name": lambda s, x: torch.softmax(input=x, dim=-1),
            "F.softmax": lambda s, x: F.softmax(x, dim=-1),
            "special": lambda s, x: torch.special.softmax(x, -1),
            "softmin": lambda s, x: F.softmin(-x, dim=-1),
            "nn": lambda s, x: nn.Softmax(-1)(x),
        },
        {"logaddexp": lambda s, x: torch.logaddexp(x[0], x[1]),
         "logsumexp": lambda s, x: torch.stack([x[0], x[1]]).logsumexp(0)},
        {"logaddexp2": lambda s, x: torch.logaddexp2(x[0], x[1])},
        {"logcumsumexp": lambda s, x: x.logcumsumexp(-1)},
        {"logsumexp": lambda s, x: x.logsumexp(-1), "by name": lambda s, x: torch.logsumexp(input=x, dim=-1),
         "special": lambda s, x: torch.special.logsumexp(x, -1)},
        {"log_softmax": lambda s, x: x.log_softmax(-1), "x - logsumexp": lambda s, x: x - x.logsumexp(-1, keepdim=True),
         "F": lambda s, x: F.log_softmax(x, dim=-1), "by name": lambda s, x: torch.log_softmax(input=x, dim=-1),
         "special": lambda s, x: torch.special.log_softmax(x, -1),
         "dtype": lambda s, x: F.log_softmax(x, dim=-1, dtype=torch.float64)},
    ],
    "norm": [
        {
            "layer_norm": lambda s, x: F.layer_norm(x, (4,), s.vector, s.bias),
            "torch.layer_norm": lambda s, x: torch.layer_norm(x, (4,), s.vector, s.bias),
            "by name": lambda s, x: F.layer_norm(input=x, normalized_shape=(4,), weight=s.vector, bias=s.bias),
            "spelled out": lambda s, x: (x - x.mean(-1, keepdim=True))
            / ((x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + 1e-5).sqrt() * s.vector + s.bias,
        },
        {
            "rms_norm": lambda s, x: F.rms_norm(x, (4,), s.vector, 1e-6),
            "torch.rms_norm": lambda s, x: torch.rms_norm(x, (4,), s.vector, 1e-6),
            "by name": lambda s, x: F.rms_norm(input=x, normalized_shape=(4,), weight=s.vector, eps=1e-6),
            "spelled out": lambda s, x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * s.vector,
        },
        {
            "group_norm": lambda s, x: F.group_norm(x, 1, s.slopes, s.slopes),
            "torch.group_norm": lambda s, x: torch.group_norm(x, 1, s.slopes, s.slopes),
            "by name": lambda s, x: F.group_norm(input=x, num_groups=1, weight=s.slopes, bias=s.slopes),
            "layer_norm": lambda s, x: F.layer_norm(x, (3, 4)) * s.slopes[:, None] + s.slopes[:, None],
        },
        {
            "a / b": lambda s, x: x[0] / x[1].exp(),
            "torch.div": lambda s, x: torch.div(x[0], x[1].exp()),
            "by name": lambda s, x: torch.div(input=x[0], other=x[1].exp()),
            "true_divide": lambda s, x: torch.true_divide(x[0], other=x[1].exp()),
            "div_": lambda s, x: put(x[0], lambda y: y.div_(x[1].exp())),
            "/=": lambda s, x: put(x[0], lambda y: y.__itruediv__(x[1].exp())),
        },
        {
            "rsqrt": lambda s, x: above_zero(x).rsqrt(),
            "** -0.5": lambda s, x: above_zero(x) ** -0.5,
            "** tensor": lambda s, x: above_zero(x) ** torch.tensor(-0.5, dtype=x.dtype),
            "rsqrt_": lambda s, x: put(above_zero(x), lambda y: y.rsqrt_()),
            "by name": lambda s, x: torch.rsqrt(input=above_zero(x)),
        },
        {"reciprocal": lambda s, x: above_zero(x).reciprocal(), "1 / x": lambda s, x: 1 / above_zero(x),
         "** -1": lambda s, x: above_zero(x) ** -1},
        {"std": lambda s, x: x.std(-1), "std_mean": lambda s, x: torch.std_mean(x, -1)[0]},
        {"var": lambda s, x: x.var(-1), "var_mean": lambda s, x: torch.var_mean(x, -1)[0]},
        {"norm": lambda s, x: x.norm(dim=-1), "vector_norm": lambda s, x: torch.linalg.vector_norm(x, dim=-1),
         "linalg.norm": lambda s, x: torch.linalg.norm(x, dim=-1)},
        {"F.normalize": lambda s, x: F.normalize(x, dim=-1)},
        {"hypot": lambda s, x: torch.hypot(x[0], x[1]), "norm": lambda s, x: x.norm(dim=0)},
        {"matrix_norm": lambda s, x: torch.linalg.matrix_norm(x), "norm": lambda s, x: x.norm(dim=(-2, -1))},
        {
            "a group norm of each channel": lambda s, x: F.group_norm(x, 3, s.slopes, s.slopes),
            "instance_norm": lambda s, x: F.instance_norm(x, weight=s.slopes, bias=s.slopes),
            "torch.instance_norm": lambda s, x: torch.instance_norm(
                x, s.slopes, s.slopes, None, None, True, 0.1, 1e-5, False),
        },
        {"x + a / b": lambda s, x: s.bias + 2 * (x / x.roll(1, 0).exp()),
         "addcdiv": lambda s, x: torch.addcdiv(s.bias, x, x.roll(1, 0).exp(), value=2),
         "addcdiv_": lambda s, x: put(
             s.bias.detach().expand(2, 3, 4), lambda y: y.addcdiv_(x, x.roll(1, 0).exp(), value=2))},
    ],
}  # fmt: skip

REFUSED = {
    ("matmul", "a solve"), ("matmul", "einsum of three"), ("activation", "heaviside"), ("activation", "//"),
    ("activation", "floor_divide"), ("product", "prod"), ("product", "cumprod"),
}  # fmt: skip
"""Where a rule of the user's own cannot be applied."""

BESIDE = {
    (kind, name)
    for kind, of in [
        ("linear", "addmm to x"), ("activation", "glu"), ("softmax", "log_softmax"), ("norm", "layer_norm"),
        ("norm", "rms_norm"), ("norm", "group_norm"), ("norm", "a / b"), ("norm", "F.normalize"),
        ("norm", "x + a / b"), ("norm", "a group norm of each channel"), ("product", "a slope"),
        ("product", "three factors"), ("product", "glu"), ("product", "cosine_similarity"),
    ]
    for group in GROUPS[kind] if next(iter(group)) == of for name in group
}  # fmt: skip
"""Where relevance passes beside the rule, too: to a numerator, a residual stream, what a normaliser is taken off."""

SPELLINGS = [
    pytest.param(kind, name, spelling, id=f"{kind}: {name} ({i})")
    for kind, groups in GROUPS.items()
    for i, group in enumerate(groups)
    for name, spelling in group.items()
]


@pytest.mark.parametrize(("kind", "name", "spelling"), SPELLINGS)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_a_rule_is_called_and_what_it_detaches_does_not_arrive(
    kind: str, name: str, spelling: Spelling, strict: bool
) -> None:
    base = LRP if strict else GRADIENT
    counting, detaching = Counting(), Counting(0.0)
    if (kind, name) in REFUSED:
        with pytest.raises(MethodError, match=rf"Model calls torch's '[\w.]+'.*{kind}=.*Counting.*recipe\.at"):
            run(spelling, base.at(**{kind: counting}))
        return
    run(spelling, base.at(**{kind: counting}))
    assert counting.calls > 0
    found = relevance(spelling, GRADIENT.at(**{kind: detaching}))
    assert detaching.calls > 0
    if (kind, name) in BESIDE:
        assert not torch.allclose(found, relevance(spelling, GRADIENT))
    else:
        assert not found.any()


GROUP_PARAMETERS = [
    pytest.param(kind, group, id=f"{kind}: {next(iter(group))}")
    for kind, groups in GROUPS.items()
    for group in groups
    if len(group) > 1
]
RULES: dict[str, list[Rule]] = {
    "linear": [rules.unmodified, rules.constant, Gamma(0.5), Epsilon(0.1), ZPlus(), Counting(0.7)],
    "convolution": [rules.unmodified, rules.constant, Gamma(0.5), Epsilon(0.1), ZPlus(), Counting(0.7)],
    "activation": [rules.unmodified, rules.constant, rules.identity, Counting(0.7)],
    "product": [rules.unmodified, rules.constant, rules.uniform, Counting(0.7)],
    "matmul": [rules.unmodified, rules.constant, rules.uniform, Counting(0.7)],
    "softmax": [rules.unmodified, rules.constant, Counting(0.7)],
    "norm": [rules.unmodified, rules.constant, Counting(0.7)],
}


@pytest.mark.parametrize(("kind", "group"), GROUP_PARAMETERS)
def test_the_spellings_of_one_thing_agree(kind: str, group: dict[str, Spelling]) -> None:
    for rule in RULES[kind]:
        recipe = GRADIENT.at(**{kind: rule})
        (first, wanted), *others = [(name, relevance(each, recipe)) for name, each in group.items()]
        for name, found in others:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=f"{name} is not {first} under {rule}")


# ------------------------------------------------------------------- attention in one kernel


def heads(x: Tensor) -> Tensor:
    """``[2, 2, 3, 2]``: two heads."""
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 2**-0.5) -> Tensor:
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ v


CAUSAL = torch.ones(3, 3).tril().bool()
BIAS = torch.randn(3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
fused = F.scaled_dot_product_attention
ATTENTIONS: dict[str, tuple[Spelling, Spelling]] = {
    "plain": (lambda s, x: fused(heads(x), heads(x.tanh()), heads(x)),
              lambda s, x: eager(heads(x), heads(x.tanh()), heads(x))),
    "causal": (lambda s, x: fused(heads(x), heads(x), heads(x), is_causal=True),
               lambda s, x: eager(heads(x), heads(x), heads(x), CAUSAL)),
    "masked": (lambda s, x: fused(heads(x), heads(x), heads(x), CAUSAL),
               lambda s, x: eager(heads(x), heads(x), heads(x), CAUSAL)),
    "by name": (lambda s, x: fused(query=heads(x), key=heads(x), value=heads(x), attn_mask=CAUSAL, scale=0.3),
                lambda s, x: eager(heads(x), heads(x), heads(x), CAUSAL, 0.3)),
    "biased": (lambda s, x: fused(heads(x), heads(x), heads(x), BIAS),
               lambda s, x: eager(heads(x), heads(x), heads(x), BIAS)),
    "biased by the input": (lambda s, x: fused(heads(x), heads(x), heads(x), x[:, None, :, :3]),
                            lambda s, x: eager(heads(x), heads(x), heads(x), x[:, None, :, :3])),
    "constant queries": (lambda s, x: fused(BIAS[:, :2].expand(2, 2, 3, 2), heads(x), heads(x)),
                         lambda s, x: eager(BIAS[:, :2].expand(2, 2, 3, 2), heads(x), heads(x))),
    "groups": (lambda s, x: fused(heads(x), heads(x)[:, :1], heads(x)[:, 1:], enable_gqa=True),
               lambda s, x: eager(heads(x), heads(x)[:, :1].expand(2, 2, 3, 2), heads(x)[:, 1:].expand(2, 2, 3, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("kind", ["softmax", "matmul"])
def test_rules_reach_attention_in_one_kernel(name: str, kind: str) -> None:
    in_one, spelled_out = ATTENTIONS[name]
    for rule in (*RULES[kind], Counting(0.0)):
        for base in (GRADIENT, ATTNLRP):
            recipe = base.at(**{kind: rule})
            found, wanted = relevance(in_one, recipe), relevance(spelled_out, recipe)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    counting = Counting()
    run(in_one, ATTNLRP.at(**{kind: counting}))
    assert counting.calls == {"softmax": 1, "matmul": 1 if name == "constant queries" else 2}[kind]


def latents(s: Any) -> Tensor:
    """Learned queries ``[2, 2, 3, 2]``: a weight."""
    return heads(s.cube[:, :3])


LEARNED: dict[str, tuple[Spelling, Spelling]] = {
    "queries": (lambda s, x: fused(latents(s), heads(x), heads(x)),
                lambda s, x: eager(latents(s), heads(x), heads(x))),
    "keys": (lambda s, x: fused(heads(x), latents(s), heads(x), CAUSAL),
             lambda s, x: eager(heads(x), latents(s), heads(x), CAUSAL)),
    "values": (lambda s, x: fused(heads(x), heads(x), latents(s)),
               lambda s, x: eager(heads(x), heads(x), latents(s))),
    "keys and values": (lambda s, x: fused(heads(x), latents(s), latents(s), is_causal=True),
                        lambda s, x: eager(heads(x), latents(s), latents(s), CAUSAL)),
    "queries and keys": (lambda s, x: fused(latents(s), latents(s), heads(x)),
                         lambda s, x: eager(latents(s), latents(s), heads(x))),
    "values, biased by the input": (
        lambda s, x: fused(latents(s), latents(s), latents(s), x[:, None, :, :3]),
        lambda s, x: eager(latents(s), latents(s), latents(s), x[:, None, :, :3])),
    "queries, biased": (lambda s, x: fused(latents(s), latents(s), heads(x), x.detach()[:, None, :, :3]),
                        lambda s, x: eager(latents(s), latents(s), heads(x), x.detach()[:, None, :, :3])),
    "groups": (lambda s, x: fused(latents(s), heads(x)[:, :1], heads(x)[:, 1:], enable_gqa=True),
               lambda s, x: eager(latents(s), heads(x)[:, :1].expand(2, 2, 3, 2), heads(x)[:, 1:].expand(2, 2, 3, 2))),
    "no weights": (lambda s, x: fused(heads(x).detach(), heads(x), heads(x).detach()),
                   lambda s, x: eager(heads(x).detach(), heads(x), heads(x).detach())),
    "no weights, in groups": (
        lambda s, x: fused(heads(x), heads(x)[:, :1].detach(), heads(x)[:, 1:].detach(), enable_gqa=True),
        lambda s, x: eager(
            heads(x), heads(x)[:, :1].detach().expand(2, 2, 3, 2), heads(x).detach()[:, 1:].expand(2, 2, 3, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_rules_for_linear_layers_reach_attention_in_one_kernel(name: str) -> None:
    """A product with learned queries, keys or values is a linear layer."""
    in_one, spelled_out = LEARNED[name]
    for rule in (*RULES["linear"], Counting(0.0)):
        for base in (GRADIENT, ATTNLRP, LRP, ATTNLRP.at(matmul=Counting(0.7), softmax=Counting(0.3))):
            found, wanted = relevance(in_one, base.at(linear=rule)), relevance(spelled_out, base.at(linear=rule))
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    called = []
    for spelling in (in_one, spelled_out):
        counting = Counting()
        run(spelling, ATTNLRP.at(linear=counting))
        called.append(counting.calls)
    assert called[0] == called[1]


def test_attention_with_dropout_hides_a_layer() -> None:
    with pytest.raises(MethodError, match=r"scaled_dot_product_attention', with dropout.*linear=.*eval"):
        run(lambda s, x: fused(latents(s), heads(x), heads(x), dropout_p=0.5), GRADIENT.at(linear=Gamma(0.5)))


def test_a_row_that_attends_to_nothing_is_no_nan() -> None:
    mask = CAUSAL.clone()
    mask[1] = False
    for given in (mask, torch.zeros(3, 3, dtype=X.dtype).masked_fill(~mask, -torch.inf)):
        recipes = [ATTNLRP.at(softmax=rule) for rule in (rules.unmodified, Counting())]
        plain, own = (relevance(lambda s, x: fused(heads(x), heads(x), heads(x), given), each) for each in recipes)  # noqa: B023
        torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-9)
        assert own.isfinite().all()


def test_multi_head_attention_of_torch() -> None:
    for kind in ("linear", "softmax", "matmul"):
        counting = Counting()
        run(lambda s, x: s.mha(x, x, x, need_weights=False)[0], ATTNLRP.at(**{kind: counting}))
        assert counting.calls == {"linear": 2, "softmax": 1, "matmul": 2}[kind]


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_of_a_learned_query(need_weights: bool) -> None:
    """Keys and values by one layer, the product of queries and keys, and the output's layer."""
    counting = Counting()
    run(lambda s, x: s.mha(s.cube, x, x, need_weights=need_weights)[0], ATTNLRP.at(linear=counting))
    assert counting.calls == 3


@pytest.mark.parametrize("rule", [Gamma(0.5), ZPlus(), Counting(0.7)])
def test_multi_head_attention_of_a_learned_query_is_the_same_without_its_weights(rule: Rule) -> None:
    found = []
    for need_weights in (True, False):
        torch.manual_seed(0)  # for the weights of the attention
        recipe = ATTNLRP.at(linear=rule)
        found.append(relevance(lambda s, x: s.mha(s.cube, x, x, need_weights=need_weights)[0], recipe))  # noqa: B023
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------ norms whose weight depends on the input


def gates(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sigmoid().mean(dims)


def running(s: Any) -> tuple[Tensor, Tensor]:
    return s.bias.detach(), s.vector.detach().abs()


MODULATED: dict[str, tuple[Spelling, Spelling]] = {
    "layer_norm": (lambda s, x: F.layer_norm(x, (4,), gates(x, (0, 1)), x.mean((0, 1))),
                   lambda s, x: F.layer_norm(x, (4,)) * gates(x, (0, 1)) + x.mean((0, 1))),
    "layer_norm with a bias": (lambda s, x: F.layer_norm(x, (4,), gates(x, (0, 1)), s.bias),
                               lambda s, x: F.layer_norm(x, (4,)) * gates(x, (0, 1)) + s.bias),
    "layer_norm of a constant": (lambda s, x: F.layer_norm(s.w, (4,), gates(x, (0, 1)), s.bias),
                                 lambda s, x: F.layer_norm(s.w, (4,)) * gates(x, (0, 1)) + s.bias),
    "rms_norm": (lambda s, x: F.rms_norm(x, (4,), gates(x, (0, 1)), 1e-6),
                 lambda s, x: F.rms_norm(x, (4,), None, 1e-6) * gates(x, (0, 1))),
    "group_norm": (lambda s, x: F.group_norm(x.mT, 2, gates(x, (0, 1)), s.bias),
                   lambda s, x: F.group_norm(x.mT, 2) * gates(x, (0, 1))[:, None] + s.bias[:, None]),
    "batch_norm": (lambda s, x: F.batch_norm(x.mT, *running(s), gates(x, (0, 1)), s.bias),
                   lambda s, x: F.batch_norm(x.mT, *running(s)) * gates(x, (0, 1))[:, None]
                   + s.bias[:, None]),
    "batch_norm with a computed bias": (
        lambda s, x: F.batch_norm(x.mT, *running(s), gates(x, (0, 1)), x.mean((0, 1))),
        lambda s, x: F.batch_norm(x.mT, *running(s)) * gates(x, (0, 1))[:, None] + x.mean((0, 1))[:, None]),
    "torch.batch_norm": (
        lambda s, x: torch.batch_norm(
            x.mT, gates(x, (0, 1)), None, *running(s), False, 0.1, 1e-5, False),
        lambda s, x: F.batch_norm(x.mT, *running(s)) * gates(x, (0, 1))[:, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULATED)
def test_rules_reach_a_norm_whose_weight_depends_on_the_input(name: str) -> None:
    """The weight is a factor of a product (AdaGN), and may be its gate."""
    in_one, spelled_out = MODULATED[name]
    product_rules = [*RULES["product"], rules.signal_take_all, Counting(0.0)]
    recipes = [base.at(product=rule) for base in (GRADIENT, ATTNLRP) for rule in product_rules]
    recipes += [base.at(norm=rule) for base in (GRADIENT, ATTNLRP, LRP) for rule in RULES["norm"]]
    for recipe in recipes:
        found, wanted = relevance(in_one, recipe), relevance(spelled_out, recipe)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    counting = Counting()
    run(in_one, ATTNLRP.at(product=counting))
    assert counting.calls == (0 if name == "layer_norm of a constant" else 1)
    model = Model(in_one)
    with propagate(model, ATTNLRP, (), ledger=True) as trace:
        trace.explain(model(X).sum())
    assert trace.ledger().closes(1e-9)


def test_a_bias_of_batch_norm_that_depends_on_the_input_keeps_its_relevance() -> None:
    bias: Spelling = lambda s, x: F.batch_norm(x.mT, *running(s), s.vector, x.mean((0, 1)))  # noqa: E731
    apart: Spelling = lambda s, x: F.batch_norm(x.mT, *running(s), s.vector) + x.mean((0, 1))[:, None]  # noqa: E731
    torch.testing.assert_close(relevance(bias, ATTNLRP), relevance(apart, ATTNLRP))


def test_a_row_looked_up_in_what_was_computed_keeps_its_relevance() -> None:
    ids = torch.tensor([0, 2, 2])
    wanted = relevance(lambda s, x: x[0].tanh()[ids], ATTNLRP)
    spellings: list[Spelling] = [
        lambda s, x: F.embedding(ids, x[0].tanh()),
        lambda s, x: F.embedding(input=ids, weight=x[0].tanh()),
        lambda s, x: torch.embedding(x[0].tanh(), ids),
        lambda s, x: torch.embedding(weight=x[0].tanh(), indices=ids),
    ]
    for spelling in spellings:
        torch.testing.assert_close(relevance(spelling, ATTNLRP), wanted)


def test_a_bag_whose_weights_depend_on_the_input_is_refused() -> None:
    ids = torch.tensor([[0, 1, 3], [2, 2, 1]])
    spelling: Spelling = lambda s, x: F.embedding_bag(ids, s.w, per_sample_weights=x.mean(-1), mode="sum")  # noqa: E731
    with pytest.raises(UnknownOperationError, match=r"embedding_bag with per_sample_weights.*strict=False"):
        run(spelling, LRP)
    model = Model(lambda s, x: F.embedding_bag(ids, s.w, None, None, 2.0, False, "sum", False, x.mean(-1)))
    with propagate(model, GRADIENT, ()) as trace:
        trace.explain(model(X).sum())
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad((model.w.detach()[ids] * x.mean(-1, keepdim=True)).sum(), x)
    torch.testing.assert_close(
        trace.relevance("x"), slope * X if trace.relevance("x").ndim == 3 else (slope * X).sum(-1)
    )


# ------------------------------------------------------------------------- what is a weight


def test_experts_all_at_once_are_linear_layers() -> None:
    x, ends = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 5], dtype=torch.int32)
    weights = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))

    def one_by_one(s: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:2] @ weights[0], x[2:] @ weights[1]])

    def at_once(s: Any, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, weights, offs=ends)

    for rule in RULES["linear"]:
        found = [relevance(each, GRADIENT.at(linear=rule), x) for each in (at_once, one_by_one)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", [Gamma(0.5), Counting(0.3)])
def test_attention_weights_that_are_constants_are_no_weights(rule: Rule) -> None:
    """The values times attention weights that the softmax's rule makes constants: no layer, in any spelling."""
    spellings: list[Spelling] = [
        lambda s, x: x.softmax(-1)[..., :3] @ x,
        lambda s, x: torch.bmm(F.dropout((x * 1).softmax(-1), 0.5, training=False)[..., :3].to(x.dtype), x),
        lambda s, x: torch.einsum("bts,bsd->btd", x.softmax(-1)[..., :3].contiguous(), x),
        lambda s, x: torch.matmul(x.detach().softmax(-1)[..., :3], x),
        lambda s, x: (e := x.exp()).div_(e.sum(-1, keepdim=True))[..., :3] @ x,
        lambda s, x: torch.stack([F.linear(r.T, w).T for r, w in zip(x, x.softmax(-1)[..., :3], strict=True)]),
        lambda s, x: torch.cat(
            [F.conv1d(r[None], w[..., None]) for r, w in zip(x, x.softmax(-1)[..., :3], strict=True)]
        ),
    ]
    wanted = relevance(spellings[0], LRP)
    for spelling in spellings:
        torch.testing.assert_close(relevance(spelling, LRP.at(linear=rule)), wanted)


def test_a_mask_that_the_model_is_given_is_no_weight() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return mask.to(x.dtype) @ x

    model, mask = Pooled(), CAUSAL.clone()
    with propagate(model, LRP.at(linear=Counting(0.0))) as trace:
        trace.explain(model(X, mask).sum())
    assert trace.relevance("x").any()
    assert vars(mask) == {}


def test_a_buffer_that_is_written_into_is_a_weight_again_after_the_run() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.eye(4, dtype=X.dtype))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.mul_(x.detach().sum().sign().abs())
            return x @ self.seen

    model = Writes()
    with propagate(model, LRP.at(linear=Counting())) as trace:
        trace.explain(model(X).sum())
    assert vars(model.seen) == {}


# ------------------------------------------------------------------- what is decided, what refused


def test_a_scaling_is_no_layer() -> None:
    """Each output of ``x · w`` has one input, and every rule of ours for layers hands it all: the plain gradient."""
    for rule in RULES["linear"]:
        found = relevance(lambda s, x: (x * s.vector).sum(-1), GRADIENT.at(linear=rule))
        assert torch.equal(found, relevance(lambda s, x: (x * s.vector).sum(-1), GRADIENT))
    one = torch.tensor([[[-2.0]]], dtype=X.dtype)
    for rule in (Gamma(0.5), ZPlus(), Epsilon(0.0)):  # a layer of one input and one output is a scaling
        wanted = relevance(lambda s, x: x * -1.5, GRADIENT, one)
        assert torch.equal(
            relevance(lambda s, x: F.linear(x, x.new_tensor([[-1.5]])), GRADIENT.at(linear=rule), one), wanted
        )


REFUSED_LINEAR: dict[str, Spelling] = {
    "einsum": lambda s, x: torch.einsum("btd,de,ef->btf", x, s.w, s.w),
    "bilinear": lambda s, x: F.bilinear(x, s.w[:3].expand(2, 3, 4), s.three),
    "solve_triangular": lambda s, x: torch.linalg.solve_triangular(s.w.triu(), x.mT, upper=True),
}


SEVERAL: dict[str, Spelling] = {
    "einsum": lambda s, x: torch.einsum("bti,ij,btj->bt", x, s.w, x.tanh()),
    "bilinear": lambda s, x: F.bilinear(x, x.tanh(), s.three),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_product_of_two_inputs_and_a_weight_is_refused(name: str) -> None:
    spelling = SEVERAL[name]
    for base in (GRADIENT, ATTNLRP, LRP):
        for rule in (Gamma(0.5), Counting()):
            with pytest.raises(
                MethodError, match=rf"Model calls torch's '{name}'.*linear=.*products of two.*recipe\.at"
            ):
                run(spelling, base.at(linear=rule))
        assert relevance(spelling, base).any()
    mask: Spelling = lambda s, x: torch.einsum("bti,i,bsi->bts", x, x.detach()[0, 0], x)  # noqa: E731 - no weight
    torch.testing.assert_close(relevance(mask, ATTNLRP.at(linear=Gamma(0.5))), relevance(mask, ATTNLRP))


@pytest.mark.parametrize("name", REFUSED_LINEAR)
def test_a_layer_that_hides_its_products_is_refused(name: str) -> None:
    spelling = REFUSED_LINEAR[name]
    for rule in (Gamma(0.5), Counting()):
        with pytest.raises(MethodError, match=rf"Model calls torch's '[\w.]*{name}'.*linear=.*recipe\.at"):
            run(spelling, GRADIENT.at(linear=rule))
    assert relevance(spelling, GRADIENT).any()
    assert not relevance(spelling, GRADIENT.at(linear=rules.constant)).any()


def test_an_einsum_has_gates() -> None:
    recipe = GRADIENT.at(product=rules.signal_take_all)
    found = relevance(lambda s, x: torch.einsum("btd,btd->btd", x.sigmoid(), x.roll(1, -1)), recipe)
    torch.testing.assert_close(found, relevance(lambda s, x: x.sigmoid() * x.roll(1, -1), recipe))
    assert not torch.allclose(found, relevance(lambda s, x: x.sigmoid() * x.roll(1, -1), GRADIENT))
    outer = relevance(lambda s, x: torch.einsum("td,e->tde", x[0], x[1, 0].sigmoid()), recipe)
    torch.testing.assert_close(outer, relevance(lambda s, x: x[0][..., None] * x[1, 0].sigmoid(), recipe))


def in_place(y: Tensor) -> Tensor:
    y[..., 0] *= 3
    return y.add_(1.0).mul_(2)


@pytest.mark.parametrize("rule", RULES["matmul"])
def test_a_product_may_be_changed_in_place(rule: Rule) -> None:
    """Some give a view, whose node in the graph a change in place exchanges."""
    spellings: list[Spelling] = [
        lambda s, x: in_place(flat(x) @ flat(x).T),
        lambda s, x: in_place(torch.einsum("id,jd->ij", flat(x), flat(x))),
        lambda s, x: in_place(torch.tensordot(flat(x), flat(x), dims=([1], [1]))),
        lambda s, x: in_place(torch.einsum("idk,jdk->ij", flat(x).view(6, 2, 2), flat(x).view(6, 2, 2))),
    ]
    wanted = relevance(spellings[0], ATTNLRP.at(matmul=rule))
    for spelling in spellings[1:]:
        torch.testing.assert_close(relevance(spelling, ATTNLRP.at(matmul=rule)), wanted, rtol=1e-9, atol=1e-9)


def test_three_factors_share_evenly() -> None:
    x = X.abs()
    found = relevance(lambda s, x: torch.einsum("btd,btd,btd->bt", x, x, x), ATTNLRP, x)
    torch.testing.assert_close(found, relevance(lambda s, x: torch.einsum("btd,btd,btd->bt", x, x, x), GRADIENT, x) / 3)
    assert not relevance(lambda s, x: torch.einsum("btd,btd,btd->bt", x, x, x), ATTNLRP.at(matmul=rules.constant)).any()


TRANSFORMED: dict[str, Spelling] = {
    "linear inside a transform": lambda s, x: torch.vmap(lambda row: F.linear(row, s.w))(x),
    "tanh inside a transform": lambda s, x: torch.vmap(torch.vmap(torch.tanh))(x),
    "cat inside a transform": lambda s, x: torch.vmap(lambda row: torch.cat([row, row]).tanh())(x),
    "tanh inside a transform of": lambda s, x: torch.func.functionalize(torch.tanh)(x),
    "_make_dual inside a transform": lambda s, x: torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[0],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transform_that_hides_what_carries_is_refused(name: str) -> None:
    """``torch.func``: inside, no tensor tells that it depends on the input, so no rule would be called."""
    with pytest.raises(UnknownOperationError, match=rf"Model calls torch's '{name}.*strict=False"):
        run(TRANSFORMED[name], LRP)
    model = Model(TRANSFORMED[name])
    with propagate(model, dataclasses.replace(LRP, strict=False), ()) as trace:
        trace.explain(model(X).sum())
    unknown = {ran.operation for ran in trace.operations if ran.rule == "unknown"}
    assert any(operation.startswith(name) for operation in unknown)


def test_a_transform_of_constants_is_none_of_ours() -> None:
    ones = torch.ones(4, dtype=X.dtype)
    found = relevance(lambda s, x: x @ torch.vmap(lambda row: row * 2)(s.w) * torch.vmap(torch.neg)(ones), LRP)
    torch.testing.assert_close(found, relevance(lambda s, x: x @ (s.w * 2) * -1, LRP))


def test_bounds_that_depend_on_the_input_are_selected_from() -> None:
    for recipe in (ATTNLRP, LRP, GRADIENT):
        found = relevance(lambda s, x: x.clamp(x.tanh(), x * 0.5), recipe)
        wanted = relevance(lambda s, x: torch.minimum(torch.maximum(x, x.tanh()), x * 0.5), recipe)
        torch.testing.assert_close(found, wanted)
    ledger = run(lambda s, x: x.clamp(min=s.bias, max=x.tanh().abs()), ATTNLRP, ledger=True).ledger()
    assert ledger.closes(1e-12)


# ------------------------------------------------------------------------------ the table


def test_the_report_names_the_rules() -> None:
    recipe = dataclasses.replace(LRP, strict=False)
    model = Model(lambda s, x: (torch.einsum("bij,bkj->bik", x, x) / x.sum(-1, keepdim=True)).relu().max(-1).values * 2)
    with propagate(model, recipe) as trace:
        trace.explain(model(X).sum())
    assert {ran.operation: ran.rule for ran in trace.operations} == {
        "einsum": "uniform", "div": "constant", "relu": "identity", "sum": "plain", "max": "plain", "mul": "plain",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT], ids=lambda recipe: recipe.name)
def test_a_row_added_later_holds_under_every_recipe(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Operation(
        "polygamma",
        ("special_polygamma",),
        lambda run, func, args, kwargs: run.apply("activation", lambda x: func(args[0], x), args[1]),
        "activation",
    )
    spelling: Spelling = lambda s, x: torch.special.polygamma(1, x)  # noqa: E731
    if recipe.strict:
        with pytest.raises(UnknownOperationError, match="special_polygamma"):
            run(spelling, recipe)
    monkeypatch.setitem(TABLE, "special_polygamma", row)
    counting = Counting(0.0)
    assert not relevance(spelling, recipe.at(activation=counting)).any()
    assert counting.calls == 1


def test_rows_are_registered_with_their_variants_in_place() -> None:
    before = dict(TABLE)
    try:
        register(Operation("tanh", ("tanh",), lambda run, func, args, kwargs: func(args[0].detach()), "activation"))
        assert not relevance(lambda s, x: x.tanh(), ATTNLRP).any()
        assert not relevance(lambda s, x: put(x, lambda y: y.tanh_()), LRP).any()
    finally:
        TABLE.clear()
        TABLE.update(before)
    assert relevance(lambda s, x: x.tanh(), ATTNLRP).any()


def test_every_row_of_a_kind_has_a_spelling_here() -> None:
    """A new row needs a line above."""
    called = set()
    for groups in GROUPS.values():
        for group in groups:
            for spelling in group.values():
                model = Model(spelling)
                with Names() as names, torch.no_grad():
                    model(X)
                called |= names.seen
    rows = {row.name for row in TABLE.values() if row.kind in KINDS} - {"batch_norm", "attention", "grouped_mm"}
    elsewhere = {"rmatmul", "rpow", "__mod__"}  # torch's own calls have other names
    untried = {row for row in rows if not any(TABLE[name].name == row for name in called if name in TABLE)}
    in_own_files = {name for name in untried if name.startswith(("rnn", "gru", "lstm"))} | {"sparse_mm"}
    assert untried - elsewhere - in_own_files == set()


class Names(torch.overrides.TorchFunctionMode):
    """The names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))
