"""Norms, and what divides: standard deviations, lengths, denominators.

The rule ``norm`` is for what a norm divides by. A norm that is one torch function is spelled out for it,
``(x − mean) / rule(deviation, x) · w + b``, but where the rule is known and there is a kernel for it.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpx import _kernels, rules
from lrpx.engine import _activations, _biases, _divisors, _exponentials, _functions, _notes, _quotients
from lrpx.engine._elementwise import product, step
from lrpx.engine._gates import keep_gate, mark_gate, move_gate
from lrpx.engine._operation import Operation, as_it_is, beside_a_constant
from lrpx.engine._tensors import any_carries, arguments, carries, constants, detached, first, pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine._run import Run
    from lrpx.rules import Rule


def _layer_norm(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, shape, weight, bias, eps = arguments(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    x, weight, eps = constants(x), constants(weight), 1e-5 if eps is None else eps
    if _is_product(run, weight):
        normed = _layer_norm(run, func, (x, shape, None, None, eps), {})
        value = func(*detached(x, shape, weight, bias, eps))
        return _times_weight(run, value, normed, weight, run.added(bias, "bias", x, weight))
    bias = run.added(bias, "bias", x)

    def op(x: Tensor, bias: Tensor | None = None) -> Any:
        return func(x, shape, weight, bias, eps)

    def with_deviation(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        value, _, reciprocal_std = torch.native_layer_norm(x, shape, weight, bias, eps)  # what ``func`` calls
        return value, reciprocal_std

    if not carries(x):
        return beside_a_constant(run, "layer_norm", op(x, bias), bias, bias)
    norm, dims = run.recipe.norm, tuple(range(-len(shape), 0))
    if norm is rules.unmodified:
        return run.apply("norm", op, x, bias)
    if norm is rules.constant:
        rule = partial(_kernels.layer_norm_constant_std, dims=dims, weight=weight, eps=eps)
        op_ = with_deviation if _is_wide(x, weight, bias) else op
        return run.apply("norm", op_, x, bias, rule=rule, conserves=True)
    return run.apply("norm", op, x, bias, rule=partial(_spelled_out, norm, dims, eps, weight, centred=True))


def _is_product(run: Run, weight: Tensor | None) -> bool:
    """Whether a norm's weight depends on the input (AdaGN), so that there is a product that some rule is for."""
    has_rule = not (run.recipe.norm is run.recipe.product is rules.unmodified)
    return carries(weight) and (has_rule or run.has_taps_on_rules)


def _times_weight(run: Run, value: Tensor, normed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``value`` with the gradient of ``normed · weight + bias``, where the weight depends on the input."""
    apart = product(run, torch.mul, (normed, weight), {})
    apart = apart if bias is None else apart + bias
    return rules.with_gradient_of(value, apart.to(value.dtype))


def _is_wide(*tensors: Tensor | None) -> bool:
    """Whether all that is given has one dtype, and that is no less precise than float32."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes in ({torch.float32}, {torch.float64})


def _spelled_out(
    norm: Rule,
    dims: tuple[int, ...],
    eps: float,
    weight: Tensor | None,
    op: Callable[..., Any],
    x: Tensor,
    bias: Tensor | None = None,
    *,
    centred: bool,
) -> Tensor:
    """``op(x, bias)``, with the gradient of the norm over ``dims`` written out, and a rule on its deviation.

    Args:
        norm: the rule.
        dims: what the deviation is taken over.
        eps: added to its square.
        weight: what is multiplied with; broadcast to ``x``.
        op: the norm.
        x: its input.
        bias: what is added; broadcast to ``x``.
        centred: whether the mean is taken off.
    """

    def deviation(x: Tensor) -> Tensor:
        x = x - x.mean(dims, keepdim=True) if centred else x
        return (x.square().mean(dims, keepdim=True) + eps).sqrt()

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    numerator = wide - wide.mean(dims, keepdim=True) if centred else wide
    normed = numerator / norm(deviation, wide)
    normed = normed if weight is None else normed * weight
    normed = normed if bias is None else normed + bias
    value = op(x.detach(), *(() if bias is None else (bias.detach(),)))
    return rules.with_gradient_of(value, normed.to(value.dtype))


def _rms_norm(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, shape, weight, eps = arguments(constants(args), constants(kwargs), "input", "normalized_shape", "weight", "eps")

    if _is_product(run, weight):
        normed = _rms_norm(run, func, (x, shape, None, eps), {})
        return _times_weight(run, func(*detached(x, shape, weight, eps)), normed, weight, None)

    def op(x: Tensor) -> Any:
        return func(x, shape, weight, eps)

    if not carries(x):
        return op(x)
    norm = run.recipe.norm
    if norm is rules.unmodified:
        return run.apply("norm", op, x)
    dims = tuple(range(-len(shape), 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    eps = torch.finfo(wide).eps if eps is None else eps
    if norm is rules.constant:
        rule: Rule = partial(_kernels.rms_norm_constant_std, dims=dims, weight=weight, eps=eps)
        return run.apply("norm", op, x, rule=rule, conserves=True)
    return run.apply("norm", op, x, rule=partial(_spelled_out, norm, dims, eps, weight, centred=False))


def _batch_norm(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Linear with its running statistics, which are constants; with a batch's own it would need a rule it has not."""
    args, kwargs = constants(args), constants(kwargs)
    names = ("weight", "bias", "running_mean", "running_var")
    names = names if func is torch.batch_norm else names[2:] + names[:2]
    x, *four, training, _, eps = arguments(args, kwargs, "input", *names, "training", "momentum", "eps")
    named = dict(zip(names, four, strict=True))
    weight = named["weight"]
    carrying = any(map(carries, (x, weight, named["bias"])))
    if carrying and training:
        return as_it_is(run, "batch_norm in training mode", func, args, kwargs)
    value = func(*args, **kwargs)
    if not carrying:
        return value
    if carries(weight):
        still = {name: named[name] for name in ("running_mean", "running_var")}
        normed = _batch_norm(run, F.batch_norm, (x,), {**still, "eps": 1e-5 if eps is None else eps})
        return _times_weight(run, value.detach(), normed, *_by_channel(run, x, weight, named["bias"]))
    if not carries(x):
        shift = named["bias"].view(1, -1, *(1,) * (x.ndim - 2))
        return beside_a_constant(run, "batch_norm", value, named["bias"], shift)
    # torch's own gradient is wrong for one sample whose gradient is not contiguous (torch 2.13, CPU)
    scale = torch.rsqrt(named["running_var"] + (1e-5 if eps is None else eps))
    scale = scale if named["weight"] is None else scale * named["weight"]
    channels = (1, x.shape[1], *(1,) * (x.ndim - 2)) if x.ndim > 1 else (-1,)
    shift = -named["running_mean"] * scale if named["bias"] is None else named["bias"] - named["running_mean"] * scale
    linear = (x * scale.view(channels)).to(value.dtype)
    if run.has_taps_on_constants or carries(shift):
        linear = linear + run.added(shift, "batch_norm", x).view(channels)
    return rules.with_gradient_of(value, linear)


def _by_channel(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A weight and what is added ``[C]`` as they are broadcast to ``x`` ``[B, C, …]``."""
    channels = (1, -1, *(1,) * (x.ndim - 2))
    bias = run.added(bias, "bias", x, weight)
    return move_gate(weight.view(channels), weight), None if bias is None else bias.view(channels)


def _group_norm(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, groups, weight, bias, eps = arguments(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    x, weight, eps = constants(x), constants(weight), 1e-5 if eps is None else eps
    if _is_product(run, weight):
        normed = _group_norm(run, func, (x, groups, None, None, eps), {})
        value = func(*detached(x, groups, weight, bias, eps))
        return _times_weight(run, value, normed, *_by_channel(run, x, weight, bias))
    bias = run.added(bias, "bias", x)
    norm = run.recipe.norm
    if not carries(x):
        by_channel = None if bias is None else bias.view(-1, *(1,) * (x.ndim - 2))
        return beside_a_constant(run, "group_norm", func(x, groups, weight, bias, eps), bias, by_channel)
    if norm is rules.unmodified:
        return run.apply("norm", lambda x, bias: func(x, groups, weight, bias, eps), x, bias)
    grouped = x.reshape(x.shape[0], groups, prod(x.shape[1:]) // groups)

    def op(g: Tensor, _: None = None) -> Any:
        return func(x.detach(), groups, None, None, eps).reshape(g.shape)

    if norm is rules.constant:
        rule: Rule = partial(_kernels.layer_norm_constant_std, dims=(-1,), weight=None, eps=eps)
        normed = run.apply("norm", op, grouped, None, rule=rule, conserves=True)
    else:
        normed = run.apply("norm", op, grouped, rule=partial(_spelled_out, norm, (-1,), eps, None, centred=True))
    normed = normed.reshape(x.shape)
    channels = (1, -1) + (1,) * (x.ndim - 2)
    normed = normed if weight is None else normed * weight.view(channels)
    normed = normed if bias is None else normed + bias.view(channels)
    return rules.with_gradient_of(func(x.detach(), groups, weight, bias, eps), normed)


def _instance_norm(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A group norm of as many groups as channels; or, with running statistics, a batch norm."""
    args, kwargs = constants(args), constants(kwargs)
    names = ("weight", "bias", "running_mean", "running_var")
    names = names if func is torch.instance_norm else names[2:] + names[:2]
    x, *four, own, _, eps = arguments(args, kwargs, "input", *names, "use_input_stats", "momentum", "eps")
    named = dict(zip(names, four, strict=True))
    if not any(map(carries, (x, named["weight"], named["bias"]))):
        return func(*args, **kwargs)
    own, eps = True if own is None else own, 1e-5 if eps is None else eps
    value = func(*detached(*args), **dict(zip(kwargs, detached(*kwargs.values()), strict=True)))
    if own:
        made = _group_norm(run, F.group_norm, (x, x.shape[1], named["weight"], named["bias"], eps), {})
    else:
        made = _batch_norm(run, F.batch_norm, (x,), {**named, "eps": eps})
    return rules.with_gradient_of(value, made) if carries(made) else value


def _hypotenuse(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The length of a vector of two numbers."""
    a, b, _, _ = pair(args, kwargs)
    if not any_carries((a, b)):
        return func(a, b)
    given = (run.added(x, func.__name__, a, b) for x in (a, b))
    both = torch.stack(torch.broadcast_tensors(*given))  # type: ignore[no-untyped-call]
    return _length(run, func.__name__, lambda both: func(*both.unbind()), both)


def _length(run: Run, name: str, op: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """``op(x)``, how long something is, or how far it varies. Where it divides, ``_division`` makes it a normaliser;
    until then it is a function, of the features of a siamese network, say.

    It is homogeneous (Euler), so its plain gradient is that of the squares, their sum and the root that it is under the
    identity rule; half of it for a variance, which is of degree 2.
    """
    recipe = run.recipe
    if "var" in name:
        run.refuse_part_of_norm(name, "activation")
    if recipe.norm is not rules.constant or recipe.activation not in (rules.identity, rules.unmodified):
        return _divisors.normaliser(run.apply("norm", op, x))
    if "norm" in name and recipe.activation is rules.identity and _functions.is_shifted(x):
        x = _activations.activation(run, torch.clone, x)  # a number that was added belongs to a function
    kept = x.clone()  # by the graph; a model may go on to divide x in place
    if recipe.activation is rules.unmodified:
        out = run.apply("activation", op, kept)  # of which a variance keeps something
    else:
        run.under("activation")
        out = _kernels.scaled_on_entry(op(kept), 0.5) if "var" in name else op(kept)
    if kept.stride() != x.stride():  # its numbers may be summed up in another order
        out = rules.with_gradient_of(op(x.detach()), out)
    mark_gate(recipe, "sqrt", out)
    return keep_gate(recipe, out, x) if run.asks_for_gates else out


def _reciprocal(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x = first(args, kwargs)[0]
    if not carries(x):
        return run.computed(func(x), x)
    run.refuse_part_of_norm("reciprocal")
    if (inverse := _divisors.quotient(run, torch.div, 1, x)) is not None:
        return inverse
    if (refused := _divisors.hides_logistic(run, lambda _, x: func(x), None, x)) is not None:
        return refused
    return _divisors.keep_inverse(run.apply("norm", func, x), x, func)


def _reciprocal_root(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x = first(args, kwargs)[0]
    if not carries(x):
        return run.computed(func(x), x)
    if run.has_scales and (power := _activations.of_exponential(run, func, x)) is not None:
        return power
    run.refuse_part_of_norm("rsqrt")
    if _functions.is_logistic(x):
        return mark_gate(run.recipe, "pow", _activations.activation(run, func, x))
    if (refused := _divisors.hides_logistic(run, lambda _, x: func(x), None, x)) is not None:
        return refused
    return _divisors.keep_inverse_root(run.apply("norm", func, x), x, func)


def _normalizer(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return run.computed(func(x, *rest, **settings), x)

    def op(x: Tensor) -> Any:
        return func(x, *rest, **settings)

    degree = settings.get("p", settings.get("ord", rest[0] if rest else 2)) if "norm" in func.__name__ else 2
    if run.has_scales and degree == 1:
        out = op(x)
        _exponentials.keep_exponents(func, out, (x, *rest), settings)
        if _notes.is_sum(out):
            return out
    if degree == 0:  # how many are not zero
        return _divisors.normaliser(run.apply("norm", op, x))
    return _length(run, func.__name__, op, x)


def _normalizer_and_mean(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return func(x, *rest, **settings)

    def op(x: Tensor) -> Any:
        return func(x, *rest, **settings)[0]

    mean = func(x, *rest, **settings)[1]
    return _length(run, func.__name__, op, x), keep_gate(run.recipe, mean, x) if run.asks_for_gates else mean


def _division(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A denominator is a normaliser, like the standard deviation of a norm."""
    a, b, _, settings = pair(args, kwargs)
    divisor = b
    if settings.get("rounding_mode") is not None:
        return step(run, func, (a, b), settings)
    if not settings and carries(a) and (x := _divisors.one_over(b)) is not None:
        return rules.with_gradient_of(func(*detached(a, b)), product(run, torch.mul, (a, x), {}))
    if carries(b):
        if not settings and (whole := _divisors.quotient(run, func, a, b)) is not None:
            return whole
        if carries(a) and _functions.is_logistic(b) and (gate := _divisors.quotient(run, torch.div, 1, b)) is not None:
            made = product(run, torch.mul, (a, gate), {})
            return move_gate(rules.with_gradient_of(func(*detached(a, b), **settings), made), made)
        if (refused := _divisors.hides_logistic(run, lambda a, b: func(a, b, **settings), a, b)) is not None:
            return refused
        norm = run.recipe.norm
        if norm is not rules.constant:
            rule: Rule = norm if norm is rules.unmodified else partial(_quotient, norm)
            out = run.apply("norm", lambda a, b: func(a, b, **settings), a, b, rule=rule)
            return out if carries(a) else _divisors.keep_inverse(out, divisor, lambda b: func(a, b, **settings))
        run.under("norm")
        b = _divisors.normaliser(b.detach())
        if not carries(a):
            return _divisors.keep_inverse(func(a, b, **settings), divisor, lambda b: func(a, b, **settings))
    out = func(a, b, **settings)
    if run.has_scales and carries(a) and b is not divisor:
        _quotients.divided(run, out, divisor)
    if carries(a):
        if run.asks_for_weights:
            _biases.scaled(out, a, lambda x: func(x, b, **settings))
        _divisors.scaled_by(run, out, a, b, (partial(func, **settings), b, True))
    else:
        run.computed(out, a, b)
    return keep_gate(run.recipe, out, a, b) if run.asks_for_gates else out


def _add_quotient(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``x + value · a / b``."""
    x, a, b = arguments(constants(args), constants(kwargs), "input", "tensor1", "tensor2")
    factor = kwargs.get("value", 1)
    if not any_carries((a, b)) and not (carries(x) and run.has_taps_on_constants):
        return func(x, a, b, value=factor)
    value = func(*detached(x, a, b), value=factor)
    apart = factor * _division(run, torch.div, (a, b), {})
    both = run.added(x, func.__name__, apart) + run.added(apart, func.__name__, x)
    return rules.with_gradient_of(value, both) if carries(both) else value


def _quotient(norm: Rule, op: Callable[..., Any], a: Any, b: Tensor) -> Any:
    """``a / b`` with a rule on the denominator."""
    return op(a, norm(torch.clone, b))


ROWS = [
    Operation("layer_norm", ("layer_norm",), _layer_norm, "norm", "joins"),
    Operation("rms_norm", ("rms_norm",), _rms_norm, "norm", "joins"),
    Operation("batch_norm", ("batch_norm",), _batch_norm, "norm", "joins"),
    Operation("group_norm", ("group_norm",), _group_norm, "norm", "joins"),
    Operation("instance_norm", ("instance_norm",), _instance_norm, "norm", "joins"),
    Operation("hypot", ("hypot",), _hypotenuse, "norm"),
    Operation("reciprocal", ("reciprocal",), _reciprocal, "norm"),
    Operation("rsqrt", ("rsqrt",), _reciprocal_root, "norm"),
    Operation(
        "deviation",
        tuple(
            """norm vector_norm linalg_vector_norm linalg_norm linalg_matrix_norm nuclear_norm
            frobenius_norm std var""".split()
        ),
        _normalizer,
        "norm",
    ),
    Operation("deviation and mean", ("var_mean", "std_mean"), _normalizer_and_mean, "norm"),
    Operation("addcdiv", ("addcdiv",), _add_quotient, "norm"),
    Operation("div", ("div", "divide", "true_divide", "__truediv__", "__div__"), _division, "norm"),
]
