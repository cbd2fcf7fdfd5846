"""What is right for the operations of torch's database that a judge cannot tell by calling them.

Written out in plain torch, with ``detach`` where a rule holds something constant; under a recipe, by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

NORMALISERS = frozenset("reciprocal rsqrt".split())
"""What divides, and is a constant under the rule for norms."""

LENGTHS = frozenset(
    """norm norm_nuc norm_fro norm_inf linalg_norm linalg_norm_subgradients_at_zero linalg_vector_norm
    linalg_matrix_norm masked_norm std std_unbiased hypot""".split()
)
"""How long something is, or how it varies: homogeneous, so that the plain gradient hands all on."""

VARIANCES = frozenset("var var_unbiased".split())
"""The same, of degree 2."""

SELECTIONS = frozenset(
    """maximum minimum max_binary min_binary fmax fmin index_reduce_amin index_reduce_amax scatter_reduce_amin
    scatter_reduce_amax""".split()
)
"""What chooses among its tensors, some of which may be constants."""

STEPS = frozenset(
    """ceil floor round round_decimals_0 round_decimals_3 round_decimals_neg_3 sign sgn trunc div_floor_rounding
    div_trunc_rounding floor_divide heaviside eq ne lt le gt ge logical_and logical_or logical_xor
    logical_not""".split()
)
"""What is constant almost everywhere. (In place, torch gives some of them the gradient of what they overwrite.)"""

COMPOSED = frozenset(
    """masked_cumprod masked_log_softmax masked_normalize masked_logaddexp masked_var masked_std
    nn_functional_gaussian_nll_loss nn_functional_multilabel_soft_margin_loss
    nn_functional_triplet_margin_with_distance_loss nn_functional_multi_head_attention_forward
    linalg_solve_triangular""".split()
)
"""What torch has written in Python of other functions, which are judged; and what ``test_every_rule_reaches.py`` and
``test_operations_sweep.py`` judge."""


def half(a: Tensor, b: Tensor) -> Tensor:
    """``a · b``, of which each factor gets half."""
    return 0.5 * (a * b.detach() + a.detach() * b)


def scaled(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``g(x)`` under the identity rule."""
    y = function(x).detach()
    share = torch.where((x == 0) | (y.abs() > 1e4 * x.abs()), torch.zeros_like(y), y / x.detach())
    return torch.where(share == 0, y, x * share)


def both(reference: Callable[..., Any]) -> Callable[[str], Callable[..., Any]]:
    return lambda recipe: reference


def softmax(op: Callable[..., Any]) -> Callable[[str], Callable[..., Any]]:
    """Gradient×Input under AttnLRP, a constant under CP-LRP."""

    def constant(*args: Any, **kwargs: Any) -> Any:
        return op(*(x.detach() if isinstance(x, Tensor) else x for x in args), **kwargs)

    return lambda recipe: op if recipe == "attnlrp" else constant


def log_softmax(recipe: str) -> Callable[..., Any]:
    def written_out(x: Tensor, dim: int | None = None, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        return x - x.logsumexp(dim, keepdim=True).detach()

    return torch.log_softmax if recipe == "attnlrp" else written_out


def divided(a: Any, b: Any) -> Any:
    return a / (b.detach() if isinstance(b, Tensor) else b)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **kwargs: Any) -> Tensor:
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).detach()


def times(normed: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return normed
    return half(normed, weight) if normed.requires_grad and weight.requires_grad else normed * weight


def centred(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    deviation = (x.var(dims, correction=0, keepdim=True) + eps).sqrt().detach()
    return (x - x.mean(dims, keepdim=True)) / deviation


def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    y = times(centred(x, tuple(range(-len(shape), 0)), eps), weight)
    return y if bias is None else y + bias


def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return times(x / (x.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).sqrt().detach(), weight)


def by_channel(x: Tensor, value: Any) -> Any:
    return None if value is None else value.view(1, -1, *(1,) * (x.ndim - 2))


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    normed = centred(x.reshape(x.shape[0], groups, x[:1].numel() // groups), (-1,), eps).view(x.shape)
    y = times(normed, by_channel(x, weight))
    return y if bias is None else y + by_channel(x, bias)


def instance_norm(
    x: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats:
        return group_norm(x, x.shape[1], weight, bias, eps)
    return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    y = times((x - by_channel(x, mean)) / (by_channel(x, var) + eps).sqrt(), by_channel(x, weight))
    return y if bias is None else y + by_channel(x, bias)


def glu(recipe: str) -> Callable[..., Any]:
    def written_out(x: Tensor, dim: int = -1) -> Tensor:
        signal, inner = x.chunk(2, dim)
        if recipe == "lrp":
            return signal * inner.sigmoid().detach()
        return half(signal, scaled(torch.sigmoid, inner))

    return written_out


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    slope = weight.view(-1, *(1,) * (x.ndim - 2)) if weight.numel() > 1 else weight
    below = x.clamp(max=0)
    return x.relu() + (half(slope, below) if x.requires_grad and weight.requires_grad else slope * below)


def power(x: Any, exponent: Any) -> Any:
    """An element-wise function of the base; where the exponent depends on the input, of that."""
    if isinstance(exponent, Tensor) and exponent.requires_grad:
        base = x.detach() if isinstance(x, Tensor) else x
        exponent = exponent.expand(torch.broadcast_shapes(exponent.shape, getattr(base, "shape", ())))
        return scaled(lambda e: torch.pow(base, e), exponent)
    number = torch.as_tensor(exponent)
    if bool((number < 0).all()):
        return torch.pow(x, exponent).detach() + 0 * x
    x = x.expand(torch.broadcast_shapes(x.shape, number.shape))
    y = torch.pow(x, exponent).detach()
    return torch.where(x == 0, y, x * torch.where(x == 0, 0.0, y / x.detach()))


def deviation_and_mean(deviation: Callable[..., Any]) -> Callable[..., Any]:
    def written_out(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        spread, mean = deviation(x, *args, **kwargs)
        share = 0.5 if deviation is torch.var_mean else 1.0  # of degree 2
        return share * spread + (1 - share) * spread.detach(), mean

    return written_out


def cosine(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    lengths = [x.norm(dim=dim).clamp(min=eps).detach() for x in torch.broadcast_tensors(a, b)]
    return times(a, b).sum(dim) / lengths[0] / lengths[1]


def grid_sample(x: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.nn.functional.grid_sample(x, grid.detach(), *args, **kwargs)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + value * (a / b.detach())


def of_factors(recipe: str) -> Callable[..., Any]:
    """Each of ``n`` factors has a share of ``1 / n``."""

    def written_out(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        x, along = (x.flatten(), 0) if dim is None else (x, dim)
        factors = x.unsqueeze(0).unbind(0) if x.ndim == 0 else x.unbind(along)
        made = evenly(factors, len(factors))
        return made if not keepdim else made.unsqueeze(along)

    return written_out


def evenly(factors: Any, n: int) -> Tensor:
    made = 0
    for i, factor in enumerate(factors):
        others = 1
        for j, other in enumerate(factors):
            others = others * other.detach() if j != i else others
        made = made + factor * others / n
    return made


def cumulative(recipe: str) -> Callable[..., Any]:
    def written_out(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        factors = x.unsqueeze(0).unbind(0) if x.ndim == 0 else x.unbind(dim)
        made = [evenly(factors[: i + 1], i + 1) for i in range(len(factors))]
        return x if not x.numel() else made[0] if x.ndim == 0 else torch.stack(made, dim)

    return written_out


def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    with torch.no_grad():
        y = F.local_response_norm(x, size, alpha, beta, k)
    return x * torch.where(x == 0, 0.0, y / x).detach()


def bounded(recipe: str) -> Callable[..., Any]:
    """Under bounds that depend on the input a selection; of a number with one of them, it bounds that."""

    def written_out(x: Tensor, *bounds: Any, **named: Any) -> Tensor:
        both = (*bounds, *named.values())
        if any(isinstance(b, Tensor) and b.requires_grad for b in both):
            (bound, *others) = (b for b in both if b is not None)
            if not x.requires_grad and not others and len(x.unique()) == 1 and x.shape in ((), bound.shape):
                return scaled(lambda b: torch.clamp(x, **dict.fromkeys(named, b)), bound)
            return torch.clamp(x, *bounds, **named)
        shape = torch.broadcast_shapes(x.shape, *(b.shape for b in both if isinstance(b, Tensor)))
        return scaled(lambda x: torch.clamp(x, *bounds, **named), x.expand(shape))

    return written_out


def clamp_with(name: str) -> Callable[[str], Callable[..., Any]]:
    return lambda recipe: lambda x, bound: bounded(recipe)(x, **{name: bound})


def attention(recipe: str) -> Callable[..., Any]:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        if a.requires_grad and b.requires_grad:
            return 0.5 * (a @ b.detach() + a.detach() @ b)
        return a @ b

    def written_out(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise NotImplementedError
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = matmul(q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        weights = scores.softmax(-1)
        return matmul(weights.detach() if recipe == "lrp" else weights, v)

    return written_out


REFERENCES: dict[str, Callable[[str], Callable[..., Any]]] = {
    "softmax": softmax(torch.softmax),
    "softmax_with_dtype": softmax(torch.softmax),
    "masked_softmax": softmax(torch.masked.softmax),
    "masked_softmin": softmax(torch.masked.softmin),
    "nn_functional_softmin": softmax(F.softmin),
    "nn_functional_softmin_with_dtype": softmax(F.softmin),
    "logsumexp": softmax(torch.logsumexp),
    "logcumsumexp": softmax(torch.logcumsumexp),
    "logaddexp": softmax(torch.logaddexp),
    "logaddexp2": softmax(torch.logaddexp2),
    "masked_logsumexp": softmax(torch.masked.logsumexp),
    "log_softmax": log_softmax,
    "log_softmax_with_dtype": log_softmax,
    "div_no_rounding_mode": both(divided),
    "true_divide": both(divided),
    "__rdiv__": both(lambda a, b: divided(b, a)),
    "nn_functional_normalize": both(normalize),
    "nn_functional_layer_norm": both(layer_norm),
    "nn_functional_rms_norm": both(rms_norm),
    "nn_functional_group_norm": both(group_norm),
    "nn_functional_instance_norm": both(instance_norm),
    "nn_functional_batch_norm": both(batch_norm),
    "nn_functional_glu": glu,
    "nn_functional_prelu": both(prelu),
    "pow": both(power),
    "float_power": both(power),
    "__rpow__": both(lambda a, b: power(b, a)),
    "var_mean": both(deviation_and_mean(torch.var_mean)),
    "var_mean_unbiased": both(deviation_and_mean(torch.var_mean)),
    "std_mean": both(deviation_and_mean(torch.std_mean)),
    "std_mean_unbiased": both(deviation_and_mean(torch.std_mean)),
    "nn_functional_grid_sample": both(grid_sample),
    "grid_sampler_2d": both(lambda x, grid, *settings: torch.grid_sampler_2d(x, grid.detach(), *settings)),
    "grid_sampler_3d": both(lambda x, grid, *settings: torch.grid_sampler_3d(x, grid.detach(), *settings)),
    "addcdiv": both(addcdiv),
    "prod": of_factors,
    "nn_functional_cosine_similarity": both(cosine),
    "nn_functional_pairwise_distance": both(F.pairwise_distance),
    "cdist": both(torch.cdist),
    "dist": both(torch.dist),
    "nn_functional_pdist": both(F.pdist),
    "cumprod": cumulative,
    "nn_functional_local_response_norm": both(local_response_norm),
    "clamp": bounded,
    "clamp_min": clamp_with("min"),
    "clamp_max": clamp_with("max"),
    "nn_functional_scaled_dot_product_attention": attention,
}  # fmt: skip
"""Each operation's function under a recipe."""
