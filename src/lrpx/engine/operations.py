"""Which torch function is which kind of operation: the one table that recipes act through.

Every function that a model calls is one of: a handler, here or in ``norms.py`` (it gets the recipe's rule), a
name in ``lrpx.engine.linear.LINEAR`` (the gradient is right as it is), or unknown. Names are those of the torch
functions themselves.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lrpx import rules
from lrpx.engine.handlers import (
    added,
    arguments,
    carries,
    constants,
    gate_strength,
    handles,
    keep_gate,
    mark_gate,
    write,
)
from lrpx.errors import MethodError, UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine.mode import RuleMode


# ------------------------------------------------------------------------- sources


@handles("embedding", "embedding_bag")
def _embedding(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    ids, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
    out = func(*constants(args), **constants(kwargs))
    if not weight.requires_grad or weight.is_leaf:
        return mode.source(weight, ids, out)
    return out


# ------------------------------------------------------------------ linear operations

MANY_OUTPUTS = 4096
FEW_ROWS = 64
"""A linear layer of at least so many outputs, for at most so many rows, may be a language-model head."""


@handles("linear")
def _linear(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = arguments(args, kwargs, "input", "weight", "bias")
    x, weight = constants(x), constants(weight)
    bias = added(mode, bias, "bias", x, weight)
    if carries(weight):
        return _bilinear(mode, func, x, weight, bias, bias)
    if not carries(x):
        return func(x, weight, bias)
    is_head = weight.shape[0] >= MANY_OUTPUTS and x.numel() <= FEW_ROWS * x.shape[-1]
    if (is_head or mode.in_last_layer) and _is_plain(weight):
        func = rules.for_sparse_gradients(func)
    elif type(weight) is not Tensor:
        _refuse_without_gradient(mode, func, x, weight)
    return mode.apply("linear", func, x, weight, bias)


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is a matrix in the memory of the processor, and not a quantised one."""
    return weight.device.type == "cpu" and type(weight).dequantize is Tensor.dequantize


def _refuse_without_gradient(mode: RuleMode, func: Any, x: Tensor, weight: Tensor) -> None:
    """Refuse a quantised weight whose kernel would stop the relevance without a word; one row of ``x`` tells."""
    if not carries(func(x.detach().reshape(-1, x.shape[-1])[:1].requires_grad_(), weight)):
        raise UnknownOperationError(
            f"{mode.where()} has a weight of {type(weight).__name__} whose product with the input has no gradient, "
            "as where activations are quantised too; quantise the weights alone"
        )


@handles("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = arguments(args, kwargs, "input", "weight", "bias")
    x, weight = constants(x), constants(weight)
    bias = added(mode, bias, "bias", x, weight)
    rest = {name: value for name, value in kwargs.items() if name not in ("input", "weight", "bias")}

    def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return func(x, weight, bias, *args[3:], **rest)

    if carries(weight):
        channels = None if bias is None else bias.view(-1, *(1,) * (weight.ndim - 2))
        return _bilinear(mode, op, x, weight, bias, channels)
    return mode.apply("convolution", op, x, weight, bias) if carries(x) else op(x, weight, bias)


@handles("addmm", "addmv", "baddbmm", "addbmm")
def _add_matmul(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    named = ("input", "mat1", "mat", "batch1", "mat2", "vec", "batch2")
    operands = [*args, *(kwargs.pop(name) for name in named if name in kwargs)]
    is_weight = isinstance(operands[2], Parameter)
    a, b = constants(operands[1:])
    constant_bias = not carries(constants(operands[0]))
    bias = added(mode, operands[0], "bias", a, b)
    if carries(a) and is_weight and not kwargs and constant_bias:

        def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            return x @ weight if bias is None else func(bias, x, weight)

        sparse = mode.in_last_layer and func.__name__ == "addmm" and _is_plain(b)
        return mode.apply("linear", rules.for_sparse_gradients(op, transposed=True) if sparse else op, a, b, bias)
    if carries(a) and carries(b):
        product = mode.apply("matmul", lambda a, b: func(torch.zeros_like(bias), a, b, **kwargs), a, b)
    elif carries(bias) and mode.book is not None and not (carries(a) or carries(b)):
        product = mode.book.added(func(torch.zeros_like(bias), a, b, **kwargs), func.__name__)
    else:
        return func(bias, a, b, **kwargs)
    value = func(bias.detach(), a.detach(), b.detach(), **kwargs)
    return rules.with_gradient_of(value, product + kwargs.get("beta", 1) * bias)


# --------------------------------------------------- products of input-dependent factors


@handles("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot", "inner", "outer", "tensordot")
def _matmul(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    if len(args) < 2:
        return func(*args, **kwargs)
    a, b, *rest = args
    if carries(a) and carries(b):
        return mode.apply("matmul", lambda a, b: func(a, b, *rest, **kwargs), a, b)
    if carries(a) and b.ndim == 2 and not rest and not kwargs:  # a constant matrix on the right is a weight

        def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            return func(x, weight) if bias is None else func(x, weight) + bias

        return mode.apply("linear", op, a, b, None)
    return func(*args, **kwargs)


@handles("_grouped_mm", "grouped_mm")
def _grouped_matmul(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The experts of a mixture, all at once: each row of the input times the weight of its expert."""
    (a, b, *rest), bias = constants(args), kwargs.pop("bias", None)
    kwargs = constants(kwargs)
    if bias is not None:
        kwargs["bias"] = added(mode, bias, "bias", a, b)
    if carries(a) and carries(b):
        return mode.apply("matmul", lambda a, b: func(a, b, *rest, **kwargs), a, b)
    if carries(a):
        return mode.apply("linear", lambda x, weight, _: func(x, weight, *rest, **kwargs), a, b, None)
    return func(a, b, *rest, **kwargs)


@handles("linalg_solve_triangular")
def _solve_triangular(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Forward substitution; a gated delta rule spells its recurrence so."""
    (a, b), kwargs = constants(args), constants(kwargs)
    if not carries(a):
        return func(a, b, **kwargs)
    b = added(mode, b, "right-hand side", a)
    matmul = mode.recipe.matmul

    rule = partial(rules.solve_triangular, matmul=matmul, **kwargs)
    try:
        return mode.apply("matmul", func, a, b, rule=rule, conserves=matmul is rules.uniform)
    except TypeError as error:
        raise MethodError(f"{error}; give this module another rule for matmul with recipe.at()") from error


@handles("einsum", "bilinear")
def _einsum(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    first = 1 if isinstance(args[0], str) else 0
    operands = args[first:]
    if first and len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if func.__name__ == "bilinear" and len(operands) > 3:
        *operands, bias = operands
        return _einsum(mode, func, operands, kwargs) + added(mode, bias, "bias", *operands)
    share = sum(map(carries, operands))
    if share > 1 and mode.recipe.matmul is not rules.unmodified:
        operands = tuple(rules.scale_gradient(o, 1 / share) if carries(o) else o for o in operands)
        return func(*args[:first], *operands, **kwargs)
    if share > 1:
        return mode.apply("matmul", lambda *operands: func(*args[:first], *operands, **kwargs), *operands)
    return func(*args[:first], *operands, **kwargs)


@handles("mul", "multiply", "__mul__", "__rmul__")
def _product(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    a, b = constants(args[0]), constants(args[1] if len(args) > 1 else kwargs["other"])
    if not (carries(a) and carries(b)):
        return keep_gate(mode, func(a, b), a, b)
    if a is b:
        return _square(mode, func, a)
    if mode.recipe.product is rules.signal_take_all:
        strength_a, strength_b = gate_strength(a), gate_strength(b)
        if strength_a == strength_b:
            return mode.apply("product", func, a, b, rule=rules.uniform)
        if strength_a < strength_b:
            a, b = b, a
    return mode.apply("product", func, a, b)


@handles("addcmul")
def _addcmul(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    operands = [*args, *(kwargs.pop(name) for name in ("input", "tensor1", "tensor2") if name in kwargs)]
    a, b = constants(operands[1:])
    x = added(mode, operands[0], "addcmul", a, b)
    if carries(a) and carries(b):
        zero = torch.zeros_like(x)
        product = _product(mode, lambda a, b: func(zero, a, b, **kwargs), (a, b if b is not a else b.view_as(b)), {})
    elif carries(x) and mode.book is not None and not (carries(a) or carries(b)):
        product = mode.book.added(func(torch.zeros_like(x), a, b, **kwargs), "addcmul")
    else:
        return func(x, a, b, **kwargs)
    return rules.with_gradient_of(func(x.detach(), a.detach(), b.detach(), **kwargs), x + product)


@handles("lerp")
def _lerp(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``start + weight · (end − start)``."""
    start, end, weight = arguments(constants(args), constants(kwargs), "input", "end", "weight")
    if not carries(weight):
        if mode.book is not None:
            start, end = added(mode, start, "lerp", end), added(mode, end, "lerp", start)
        return func(start, end, weight)
    start = added(mode, start, "lerp", weight)
    value = func(start.detach(), constants(end).detach(), weight.detach())
    return rules.with_gradient_of(value, start + _product(mode, torch.mul, (weight, end - start), {}))


@handles("glu")
def _glu(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = constants(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if not carries(x):
        return func(x, dim)
    signal, inner = x.chunk(2, dim)
    gate = mark_gate(mode, "sigmoid", mode.apply("activation", torch.sigmoid, inner))
    return rules.with_gradient_of(func(x, dim), _product(mode, torch.mul, (gate, signal), {}))


def _bilinear(
    mode: RuleMode, op: Callable[..., Any], a: Tensor, b: Tensor, bias: Tensor | None, summand: Tensor | None
) -> Any:
    """A linear layer or a convolution whose weight depends on the input; ``summand``: the bias as the output has it."""
    if not carries(a):
        return op(a, b, bias)
    product = mode.apply("matmul", lambda a, b: op(a, b, None), a, b)
    if bias is None or summand is None:
        return product
    return rules.with_gradient_of(op(a.detach(), b.detach(), bias.detach()), product + summand)


# ---------------------------------------------------------------- element-wise functions


@handles(
    "gelu", "silu", "mish", "tanh", "sigmoid", "hardsigmoid", "hardswish", "logsigmoid", "softplus", "softsign",
    "tanhshrink", "softshrink", "hardshrink", "elu", "selu", "celu", "relu6", "hardtanh", "clamp", "clip",
    "log_sigmoid", "clamp_min", "clamp_max", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log", "log1p", "log2",
    "log10", "sqrt", "sin", "cos", "sinh", "cosh", "atan", "arctan", "asinh", "arcsinh", "special_expit",
    "special_erf", "special_exp2", "special_expm1", "special_log1p",
)  # fmt: skip
def _activation(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    if not carries(x):
        return func(x, *rest, **kwargs)
    if kwargs.pop("inplace", False) or any(value is True for value in rest):
        rest = tuple(value for value in rest if value is not True)
        return write(x, _activation(mode, func, (x.clone(), *rest), kwargs))
    op = func if not (rest or kwargs) else lambda x: func(x, *rest, **kwargs)
    return mark_gate(mode, func.__name__, mode.apply("activation", op, x))


@handles("relu", "leaky_relu", "prelu", "rrelu", "threshold")
def _homogeneous(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Piecewise linear through zero: the gradient already is the identity rule."""
    out = func(*constants(args), **constants(kwargs))
    return mark_gate(mode, "relu", out) if carries(out) else out


@handles("sign", "sgn", "round", "floor", "ceil", "trunc", "heaviside")
def _step(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Constant almost everywhere."""
    return func(*(x.detach() if isinstance(x, Tensor) else x for x in args), **kwargs)


@handles("square")
def _square_function(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    return _square(mode, func, constants(args[0]))


def _square(mode: RuleMode, func: Any, x: Tensor) -> Any:
    """``x²`` is an element-wise function, ``g(x)/x = x``; not a product of two things."""
    if not carries(x):
        return func(x, x) if func.__name__ != "square" else func(x)
    if mode.recipe.activation is rules.identity:
        return mark_gate(mode, "square", x.detach() * x)
    return mode.apply("activation", torch.square, x)


@handles("__rpow__")
def _reflected_power(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    return _power(mode, torch.pow, (args[1], args[0]), kwargs)


@handles("pow", "__pow__", "float_power")
def _power(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, exponent = constants(args[0]), constants(args[1] if len(args) > 1 else kwargs["exponent"])
    if carries(exponent):
        return mode.apply("activation", lambda e: func(x, e), exponent)
    if not carries(x):
        return func(x, exponent)
    number = isinstance(exponent, (int, float))
    if number and exponent == 2 and func.__name__ != "float_power":
        return _square(mode, torch.mul, x)
    if number and exponent < 0:
        return mode.apply("norm", lambda x: func(x, exponent), x)
    return mode.apply("activation", lambda x: func(x, exponent), x)


# -------------------------------------------------------------------------- softmax


@handles("softmax", "_softmax", "special_softmax")
def _softmax(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest = (constants(args[0]), args[1:]) if args else (constants(kwargs.pop("input")), ())
    if not carries(x):
        return func(x, *rest, **kwargs)
    return mark_gate(mode, "softmax", mode.apply("softmax", lambda x: func(x, *rest, **kwargs), x))


@handles("logsumexp", "special_logsumexp")
def _logsumexp(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The logarithm of a softmax's normaliser."""
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    if not carries(x):
        return func(x, *rest, **kwargs)
    return mode.apply("softmax", lambda x: func(x, *rest, **kwargs), x)


@handles("log_softmax", "special_log_softmax")
def _log_softmax(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A target's normalisation, not a layer; its gradient stands."""
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    if not carries(x):
        return func(x, *rest, **kwargs)
    return mode.apply("softmax", lambda x: func(x, *rest, **kwargs), x, rule=rules.unmodified)


@handles("scaled_dot_product_attention")
def _attention(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    q, k, v, mask = arguments(args, kwargs, "query", "key", "value", "attn_mask")
    rest = {name: value for name, value in kwargs.items() if name not in ("query", "key", "value", "attn_mask")}
    softmax, matmul = mode.recipe.softmax, mode.recipe.matmul
    if mode.book is not None and softmax is not rules.constant and _has_summands(mask):
        mask = added(mode, mask, "attn_mask", q, k)

    try:
        return mode.apply(
            "softmax",
            lambda q, k, v, mask: func(q, k, v, mask, *args[4:], **rest),
            q, k, v, mask,
            rule=partial(rules.attention, softmax=softmax, matmul=matmul), conserves=softmax is rules.constant,
        )  # fmt: skip
    except TypeError as error:
        if "fused attention" not in str(error):
            raise
        raise MethodError(f'{error}; load the model with attn_implementation="eager"') from error


def _has_summands(mask: Tensor | None) -> bool:
    """Whether an attention mask adds to the scores (ALiBi), rather than only admits and forbids."""
    if mask is None or not mask.is_floating_point():
        return False
    return bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())
