"""The handlers of norms, and of what divides: standard deviations, lengths, denominators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lrpx import rules
from lrpx.engine.handlers import arguments, carries, constants, handles, keep_gate

if TYPE_CHECKING:
    from lrpx.engine.mode import RuleMode


@handles("layer_norm")
def _layer_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, shape, weight, bias, eps = arguments(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    if not carries(x) or mode.recipe.norm is rules.unmodified:
        return func(x, shape, weight, bias, eps)
    dims = tuple(range(-len(shape), 0))
    return rules.layer_norm_constant_std(lambda x: func(x, shape, weight, bias, eps), x, dims, weight, eps)


@handles("rms_norm")
def _rms_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, shape, weight, eps = arguments(args, kwargs, "input", "normalized_shape", "weight", "eps")
    if not carries(x) or mode.recipe.norm is rules.unmodified:
        return func(x, shape, weight, eps)
    dims = tuple(range(-len(shape), 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    return rules.rms_norm_constant_std(
        lambda x: func(x, shape, weight, eps), x, dims, weight, torch.finfo(wide).eps if eps is None else eps
    )


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
    return rules.with_gradient_of(value, (x * scale.view(1, -1, *(1,) * (x.ndim - 2))).to(value.dtype))


@handles("group_norm")
def _group_norm(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, groups, weight, bias, eps = arguments(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    value = func(x, groups, weight, bias, eps)
    if not carries(x) or mode.recipe.norm is rules.unmodified:
        return value
    grouped = x.reshape(x.shape[0], groups, -1)
    normed = rules.layer_norm_constant_std(
        lambda g: func(x, groups, None, None, eps).reshape(g.shape), grouped, (-1,), None, eps
    ).reshape(x.shape)
    channels = (1, -1) + (1,) * (x.ndim - 2)
    return rules.with_gradient_of(value, normed if weight is None else normed * weight.view(channels))


@handles("rsqrt", "reciprocal", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "std", "var")
def _normalizer(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    return mode.recipe.norm(lambda x: func(x, *rest, **kwargs), x)


@handles("var_mean", "std_mean")
def _normalizer_and_mean(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    deviation, mean = func(*constants(args), **constants(kwargs))
    return (deviation if mode.recipe.norm is rules.unmodified else deviation.detach()), mean


@handles("div", "divide", "true_divide", "__truediv__", "__div__")
def _division(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A denominator is a normaliser, like the standard deviation of a norm."""
    a, b = constants(args[0]), constants(args[1] if len(args) > 1 else kwargs.pop("other"))
    if carries(b) and mode.recipe.norm is not rules.unmodified:
        b = b.detach()
    return keep_gate(mode, func(a, b, **kwargs), a, b)
