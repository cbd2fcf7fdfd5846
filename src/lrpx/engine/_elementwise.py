"""Element-wise functions of one tensor, and products of two that both depend on the input.

A product with a constant (a norm's weight, a mask, ``1/√d``) is no layer but a scaling: each of its outputs has one
input, to which every rule for linear layers hands all it is given, as the plain gradient does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _factors, _functions
from lrpx.engine._functions import CURVED
from lrpx.engine._gates import gate_strength, keep_gate, mark_gate
from lrpx.engine._operation import Operation, write
from lrpx.engine._tensors import any_carries, arguments, carries, constants, first, pair

if TYPE_CHECKING:
    from lrpx.engine._run import Run

# ---------------------------------------------------------------------------- products

ELEMENTWISE = ("mul", "multiply", "__mul__", "__rmul__")
"""Products of two tensors that are no outer ones, nor transposed."""


def product(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``a · b``, element by element."""
    if len(args) == 2:
        a, b = constants(args[0]), constants(args[1])
    else:
        a, b, _, _ = pair(args, kwargs)
    if not (carries(a) and carries(b)):
        out = func(a, b)
        if carries(a):
            _functions.scaled(out, a, lambda a: func(a, b))
        elif carries(b):
            _functions.scaled(out, b, lambda b: func(a, b))
        return keep_gate(run.recipe, out, a, b) if run.asks_for_gates else out
    if a is b:
        return _square(run, func, a)
    if func.__name__ in ELEMENTWISE and (whole := _functions.of_one(run, func, a, b)) is not None:
        return whole
    if run.recipe.product is rules.signal_take_all:
        strength_a, strength_b = gate_strength(a), gate_strength(b)
        if strength_a == strength_b:
            return _factors.product(run, func, a, b, rules.uniform)
        return _factors.scaled(run, "product", func, a, b, first_scales=strength_a > strength_b)
    return _factors.product(run, func, a, b)


def _addcmul(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "tensor1", "tensor2")
    operands: list[Any] = [*args, *(kwargs[name] for name in names if name in kwargs)]
    given, a, b = operands
    a, b, settings = constants(a), constants(b), {n: value for n, value in kwargs.items() if n not in names}
    x = run.added(given, "addcmul", a, b)
    if carries(a) and carries(b):
        zero = torch.zeros_like(x)
        apart = product(run, lambda a, b: func(zero, a, b, **settings), (a, b if b is not a else b.view_as(b)), {})
    elif carries(x) and run.has_taps_on_constants and not (carries(a) or carries(b)):
        apart = run.added(func(torch.zeros_like(x), a, b, **settings), "addcmul", x)
    else:
        return func(x, a, b, **settings)
    return rules.with_gradient_of(func(x.detach(), a.detach(), b.detach(), **settings), x + apart)


def _lerp(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``start + weight · (end − start)``."""
    start, end, weight = arguments(constants(args), constants(kwargs), "input", "end", "weight")
    if not carries(weight):
        if run.has_taps_on_constants:
            start, end = run.added(start, "lerp", end), run.added(end, "lerp", start)
        return func(start, end, weight)
    start = run.added(start, "lerp", weight)
    value = func(start.detach(), constants(end).detach(), weight.detach())
    return rules.with_gradient_of(value, start + product(run, torch.mul, (weight, end - start), {}))


def _glu(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = arguments(constants(args), constants(kwargs), "input", "dim")
    dim = -1 if dim is None else dim
    if not carries(x):
        return func(x, dim)
    signal, inner = x.chunk(2, dim)
    gate = mark_gate(run.recipe, "sigmoid", run.apply("activation", torch.sigmoid, inner))
    return rules.with_gradient_of(func(x, dim), product(run, torch.mul, (gate, signal), {}))


# ------------------------------------------------------------------------- activations


def _activation(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest, settings = first(constants(args), constants(kwargs))
    if any_carries((*rest, *settings.values())):  # as clamp with bounds that depend on the input
        run.refuse(f"{func.__name__} of several tensors that depend on the input")
        return func(x, *rest, **settings)
    if not carries(x):
        return func(x, *rest, **settings)
    if settings.pop("inplace", False) or any(value is True for value in rest):
        rest = tuple(value for value in rest if value is not True)
        return write(x, _activation(run, func, (x.clone(), *rest), settings))
    op = func if not (rest or settings) else lambda x: func(x, *rest, **settings)
    if func.__name__ in EXPONENTIALS:
        return _functions.exponential(run, op, x)
    return mark_gate(run.recipe, func.__name__, _functions.activation(run, op, x))


def _homogeneous(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Piecewise linear through zero: the gradient already is the identity rule."""
    args, kwargs = constants(args), constants(kwargs)
    x, rest, settings = first(args, kwargs)
    own = run.recipe.activation
    if own is rules.unmodified or (own is rules.identity and not _functions.is_shifted(x)):
        run.under("activation")
        out = func(*args, **kwargs)
        if not carries(out):
            return out
        return mark_gate(run.recipe, "relu", _functions.linked(out, x, lambda x: func(x, *rest, **settings), CURVED))
    if not carries(x):
        return func(x, *rest, **settings)
    if settings.pop("inplace", False) or any(value is True for value in rest):
        rest = tuple(value for value in rest if value is not True)
        return write(x, _homogeneous(run, func, (x.clone(), *rest), settings))
    y = _functions.activation(run, lambda x: func(x, *rest, **settings), x)
    return mark_gate(run.recipe, "relu", y)


def _step(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Constant almost everywhere: no gradient, and so no relevance, but what a rule of the user's own gives it."""
    x, rest, settings = first(constants(args), constants(kwargs))
    if not carries(x) or run.recipe.activation in (rules.identity, rules.unmodified, rules.constant):
        detached = [each.detach() if isinstance(each, Tensor) else each for each in (x, *rest)]
        return func(*detached, **settings)
    if func.__name__ == "heaviside":
        raise run.refuse_rule("activation", "heaviside", "which has no derivative in torch")
    return run.apply("activation", lambda x: func(x, *rest, **settings), x)


def _square_function(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return _square(run, func, first(constants(args), constants(kwargs))[0])


def _square(run: Run, func: Any, x: Tensor) -> Any:
    """``x²`` is an element-wise function, ``g(x)/x = x``; not a product of two things."""
    if not carries(x):
        return func(x, x) if func.__name__ != "square" else func(x)
    if run.recipe.activation is rules.identity and not _functions.is_shifted(x):
        run.under("activation")
        return mark_gate(run.recipe, "square", _functions.linked(x.detach() * x, x, torch.square, CURVED))
    return _functions.activation(run, torch.square, x)


def _reflected_power(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return _power(run, torch.pow, (args[1], args[0]), kwargs)


def _power(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, exponent, _, _ = pair(args, kwargs, names=("exponent",))
    if carries(exponent):
        if carries(x) and run.recipe.activation is not rules.unmodified:  # a function of the exponent
            x = x.detach()
        return _functions.exponential(run, lambda e: func(x, e), exponent)
    if not carries(x):
        return func(x, exponent)
    number = isinstance(exponent, (int, float))
    if number and exponent == 2 and func.__name__ != "float_power":
        return _square(run, torch.mul, x)
    is_divisor = exponent < 0 if number else bool((exponent < 0).all())
    if is_divisor and not _functions.is_logistic(x):
        return run.apply("norm", lambda x: func(x, exponent), x)
    return _functions.activation(run, lambda x: func(x, exponent), x)


EXPONENTIALS = ("exp", "exp2", "special_exp2")

ACTIVATIONS = """
    gelu silu mish tanh sigmoid hardsigmoid hardswish softplus softsign tanhshrink softshrink hardshrink
    elu selu celu relu6 hardtanh clamp clip log_sigmoid clamp_min clamp_max erf erfc erfinv exp exp2 expm1 log log1p
    log2 log10 sqrt sin cos sinh cosh atan arctan asinh arcsinh special_expit special_erf special_exp2 special_expm1
    special_log1p""".split()

ROWS = [
    Operation("mul", ("mul", "multiply", "__mul__", "__rmul__"), product, "product"),
    Operation("addcmul", ("addcmul",), _addcmul, "product"),
    Operation("lerp", ("lerp",), _lerp, "product"),
    Operation("glu", ("glu",), _glu, "product"),
    *(Operation(name, (name,), _activation, "activation") for name in ACTIVATIONS),
    *(
        Operation(name, (name,), _homogeneous, "activation")
        for name in ("relu", "leaky_relu", "prelu", "rrelu", "threshold", "abs", "absolute")
    ),
    *(
        Operation(name, (name,), _step, "activation")
        for name in ("sign", "sgn", "round", "floor", "ceil", "trunc", "heaviside")
    ),
    Operation("square", ("square",), _square_function, "activation"),
    Operation("pow", ("pow", "__pow__", "float_power"), _power, "activation"),
    Operation("rpow", ("__rpow__",), _reflected_power, "activation"),
]
