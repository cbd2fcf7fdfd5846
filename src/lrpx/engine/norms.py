"""The handlers of norms, and of what divides: standard deviations, lengths, denominators."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lrpx import rules
from lrpx.engine.handlers import added, arguments, carries, constants, handles, keep_gate

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.engine.mode import RuleMode


@handles("layer_norm")
def _layer_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, shape, weight, bias, eps = arguments(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    x, weight, eps = constants(x), constants(weight), 1e-5 if eps is None else eps
    bias = added(mode, bias, "bias", x)

    def op(x: Tensor, bias: Tensor | None) -> Any:
        return func(x, shape, weight, bias, eps)

    def with_deviation(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        value, _, reciprocal_std = torch.native_layer_norm(x, shape, weight, bias, eps)  # what ``func`` calls
        return value, reciprocal_std

    if not carries(x):
        return op(x, bias)
    if mode.recipe.norm is rules.unmodified:
        return mode.apply("norm", op, x, bias)
    dims = tuple(range(-len(shape), 0))
    rule = partial(rules.layer_norm_constant_std, dims=dims, weight=weight, eps=eps)
    return mode.apply("norm", with_deviation if _is_wide(x, weight, bias) else op, x, bias, rule=rule, conserves=True)


def _is_wide(*tensors: Tensor | None) -> bool:
    """Whether all that is given has one dtype, and that is no less precise than float32."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes in ({torch.float32}, {torch.float64})


@handles("rms_norm")
def _rms_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, shape, weight, eps = arguments(constants(args), constants(kwargs), "input", "normalized_shape", "weight", "eps")

    def op(x: Tensor) -> Any:
        return func(x, shape, weight, eps)

    if not carries(x):
        return op(x)
    if mode.recipe.norm is rules.unmodified:
        return mode.apply("norm", op, x)
    dims = tuple(range(-len(shape), 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    rule = partial(rules.rms_norm_constant_std, dims=dims, weight=weight, eps=eps)
    return mode.apply("norm", op, x, rule=rule, conserves=True)


@handles("batch_norm")
def _batch_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Linear with its running statistics; with a batch's own it would need a rule that it has not."""
    args, kwargs = constants(args), constants(kwargs)
    names = ("weight", "bias", "running_mean", "running_var")
    names = names if func is torch.batch_norm else names[2:] + names[:2]
    x, *four, training, _, eps = arguments(args, kwargs, "input", *names, "training", "momentum", "eps")
    value = func(*args, **kwargs)
    if not carries(x):
        return value
    if training:
        mode.refuse("batch_norm in training mode")
        return value
    # torch's own gradient is wrong for one sample whose gradient is not contiguous (torch 2.13, CPU)
    named = dict(zip(names, four, strict=True))
    scale = torch.rsqrt(named["running_var"] + (1e-5 if eps is None else eps))
    scale = scale if named["weight"] is None else scale * named["weight"]
    channels = (1, -1, *(1,) * (x.ndim - 2))
    shift = -named["running_mean"] * scale if named["bias"] is None else named["bias"] - named["running_mean"] * scale
    linear = (x * scale.view(channels)).to(value.dtype)
    if mode.book is not None:
        linear = linear + added(mode, shift, "batch_norm", x).view(channels)
    return rules.with_gradient_of(value, linear)


@handles("group_norm")
def _group_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, groups, weight, bias, eps = arguments(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    x, weight, eps = constants(x), constants(weight), 1e-5 if eps is None else eps
    bias = added(mode, bias, "bias", x)
    if not carries(x):
        return func(x, groups, weight, bias, eps)
    if mode.recipe.norm is rules.unmodified:
        return mode.apply("norm", lambda x, bias: func(x, groups, weight, bias, eps), x, bias)
    grouped = x.reshape(x.shape[0], groups, -1)
    normed = mode.apply(
        "norm",
        lambda g, _: func(x.detach(), groups, None, None, eps).reshape(g.shape), grouped, None,
        rule=partial(rules.layer_norm_constant_std, dims=(-1,), weight=None, eps=eps), conserves=True,
    ).reshape(x.shape)  # fmt: skip
    channels = (1, -1) + (1,) * (x.ndim - 2)
    normed = normed if weight is None else normed * weight.view(channels)
    normed = normed if bias is None else normed + bias.view(channels)
    return rules.with_gradient_of(func(x.detach(), groups, weight, bias, eps), normed)


@handles("rsqrt", "reciprocal", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "std", "var")
def _normalizer(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    if not carries(x):
        return func(x, *rest, **kwargs)
    return mode.apply("norm", lambda x: func(x, *rest, **kwargs), x)


@handles("var_mean", "std_mean")
def _normalizer_and_mean(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    deviation, mean = func(x, *rest, **kwargs)
    if carries(x):
        deviation = mode.apply("norm", lambda x: func(x, *rest, **kwargs)[0], x)
    return deviation, mean


@handles("div", "divide", "true_divide", "__truediv__", "__div__")
def _division(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A denominator is a normaliser, like the standard deviation of a norm."""
    a, b = constants(args[0]), constants(args[1] if len(args) > 1 else kwargs.pop("other"))
    if carries(b):
        if mode.recipe.norm is rules.unmodified:
            return mode.apply("norm", lambda a, b: func(a, b, **kwargs), a, b)
        b = b.detach()
    return keep_gate(mode, func(a, b, **kwargs), a, b)
