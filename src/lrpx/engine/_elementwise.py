"""Element-wise functions of one tensor, and products of two that both depend on the input.

A product with a constant (a norm's weight, a mask, ``1/√d``) is no layer but a scaling: each of its outputs has one
input, to which every rule for linear layers hands all it is given, as the plain gradient does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lrpx import _kernels, rules
from lrpx.engine import (
    _activations,
    _biases,
    _casts,
    _combined,
    _divisors,
    _exponentials,
    _factors,
    _functions,
    _joined,
    _logarithms,
    _lost,
    _notes,
    _quotients,
    _roles,
    _selections,
    _softmaxes,
    _steps,
    _sums,
)
from lrpx.engine._gates import (
    EXPONENTIAL,
    GATE,
    WEAK,
    gate_of,
    gate_strength,
    keep_gate,
    mark_begun,
    mark_gate,
    move_gate,
    put_gate,
    takes_all,
    told,
    weakest_gate,
)
from lrpx.engine._nodes import NOTHING
from lrpx.engine._notes import Note
from lrpx.engine._operation import Operation, as_it_is, changes_in_place
from lrpx.engine._tensors import CONSTANT, any_carries, arguments, carries, constants, first, is_tensor, pair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.engine._run import Run

# ---------------------------------------------------------------------------- products

ELEMENTWISE = ("mul", "multiply", "__mul__", "__rmul__")
"""Products of two tensors that are no outer ones, nor transposed."""


def product(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``a · b``, element by element."""
    a, b = args if len(args) == 2 else pair(args, kwargs)[:2]
    if type(a) is not Tensor:
        a = a.detach() if type(a) is Parameter else constants(a)
    if type(b) is not Tensor:
        b = constants(b)
    if run.has_scales and (softmax := _quotients.times_inverse(run, func, a, b)) is not None:
        return softmax
    a_carries = a.requires_grad if type(a) is Tensor else carries(a)
    b_carries = b.requires_grad if type(b) is Tensor else carries(b)
    if not (a_carries and b_carries):
        return _scaling(run, func, a, b, a_carries, b_carries)
    if a is b:
        return _square(run, func, a)
    is_weighed = run.has_scales and (_combined.is_weight(a, b) or _combined.is_weight(b, a))
    if func.__name__ in ELEMENTWISE and not is_weighed and (whole := _combined.of_one(run, func, a, b)) is not None:
        _functions.keep_logistic(whole, a, b)
        return keep_gate(run.recipe, whole, min(a, b, key=gate_strength)) if run.asks_for_gates else whole
    if func.__name__ in ELEMENTWISE and (regrouped := _regrouped(run, func, a, b)) is not None:
        return regrouped
    out = _of_two(run, func, a, b)
    if func.__name__ in ELEMENTWISE and carries(out):
        setattr(out, FACTORS, Note((out._version, a, a._version, b, b._version)))
    return out


FACTORS = "_lrpx_factors"
"""The attribute of a product: ``(version, factor, its version, the other, its version)``; until a layer takes it up."""


def _regrouped(run: Run, func: Any, a: Tensor, b: Tensor) -> Any:
    """``func(a, b)``, one of which is a product of something and what the other is a function of, or the other way
    round: ``(u · g) · sigmoid(g)`` is ``u · silu(g)``."""
    for x, other in ((a, b), (b, a)):
        found = getattr(x, FACTORS, None)
        if not found or (found[0], found[2], found[4]) != (x._version, found[1]._version, found[3]._version):
            continue
        for rest, factor in ((found[1], found[3]), (found[3], found[1])):
            if factor is other or not (_functions.is_curved(factor) or _functions.is_curved(other)):
                continue  # u · u · a is a product of three
            if EXPONENTIAL in (gate_strength(factor), gate_strength(other)):
                continue  # a scale, which takes nothing
            if (whole := _combined.of_one(run, torch.mul, factor, other)) is not None:
                made = product(run, torch.mul, (rest, whole), {})
                return move_gate(rules.with_gradient_of(func(a.detach(), b.detach()), made), made)
    return None


def _of_two(run: Run, func: Any, a: Tensor, b: Tensor) -> Any:
    """``a · b``, two factors."""
    run.roots.clear()  # as large as the product, and seldom asked for after it
    all_to_one = takes_all(run.recipe)
    gate = gate_of(a, b) if all_to_one else None
    if gate is not None:
        out = _factors.scaled(run, "product", func, a, b, first_scales=gate is a)
        put_gate(run.recipe, out, weakest_gate((a, b)))
    else:
        out = _factors.product(run, func, a, b, rules.uniform if all_to_one else None)
    if not run.has_scales or (all_to_one and not run.asks_for_places):
        return out
    if _functions.is_logistic(a) or _functions.is_logistic(b):  # a gate's own number is no score
        return out
    return _exponentials.multiplied(run, func, out, a, b)


def _scaling(run: Run, func: Any, a: Any, b: Any, a_carries: bool, b_carries: bool) -> Any:
    """``a · b``, of which one at most depends on the input."""
    if not (a_carries or b_carries):
        return _of_constants(run, func, a, b)
    x, constant = (a, b) if a_carries else (b, a)
    if run.positions is not None and (shared := run.positions.product(func, a, b)) is not None:
        return shared
    is_inverse = hasattr(constant, _divisors.RECIPROCAL)
    if is_inverse and (shared := _divisors.times_reciprocal(run, func, a, b)) is not None:
        return shared
    is_step = hasattr(constant, _steps.STEP)
    if is_step:
        op = func if a_carries else lambda x, constant: func(constant, x)
        if (whole := _selections.piece(run, op, x, constant)) is not None:
            return whole
    out = func(a, b)
    if run.asks_for_weights:
        _biases.scaled(out, x, (lambda x: func(x, b)) if a_carries else lambda x: func(a, x))
    if run.has_scales:
        if run.has_logarithms:
            _note_nothing(out, x, constant)
        _quotients.divided(run, out, constant)
    _divisors.scaled_by(run, out, x, constant, (func, constant, a_carries))
    if is_step and constant.numel() == x.numel() and out is not x:
        root = _selections.masked_by_sign(run, x, constant)
        if root is not None:
            _selections.kinked(run, out, root, x, constant)
            if takes_all(run.recipe):
                return out
        else:
            _selections.stepped(run, out, op, x, constant)
    if not run.asks_for_gates or getattr(a, GATE, None) is getattr(b, GATE, None) is None:  # nearly always
        return out
    return keep_gate(run.recipe, out, a, b)


def _of_constants(run: Run, func: Any, a: Any, b: Any) -> Any:
    """``a · b``, neither of which depends on the input."""
    out = func(a, b)
    if run.has_scales:
        _exponentials.keep_exponents(func, out, (a, b), {})
    if type(b) in (int, float) and b == 1 and isinstance(a, Tensor):
        _divisors.divided(out, a, 1)
        return _casts.of_whole_numbers(run, out, a)
    return run.computed(_steps.keep(func, out, a, b), a, b)


def _add_product(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``x + a · b``, element by element or of two vectors."""
    names = ("input", "tensor1", "tensor2", "vec1", "vec2")
    operands: list[Any] = [*args, *(kwargs[name] for name in names if name in kwargs)]
    given, a, b = operands
    a, b, settings = constants(a), constants(b), {n: value for n, value in kwargs.items() if n not in names}
    x = run.added(given, func.__name__, a, b)
    scale = settings.get("value", 1)
    if carries(a) and carries(b) and func.__name__ == "addcmul":
        is_seen = a is b and not _combined.takes_squares(run)
        apart = product(run, torch.mul, (a, b.view_as(b) if is_seen else b), {})
        apart = move_gate(_functions.linked(scale * apart, apart, (torch.mul, scale, True)), apart)
    elif carries(a) and carries(b):
        op = partial(func, torch.zeros_like(x), **settings)
        op.__name__ = func.__name__  # type: ignore[attr-defined]
        apart = product(run, op, (a, b if b is not a else b.view_as(b)), {})
    elif run.positions is not None and carries(a) != carries(b) and func.__name__ == "addcmul":
        zero = torch.zeros_like(x)
        shared = run.positions.product(lambda a, b: func(zero, a, b, **settings), a, b)
        apart = func(zero, a, b, **settings) if shared is None else shared
    elif carries(x) and run.has_taps_on_constants and not (carries(a) or carries(b)):
        apart = run.added(func(torch.zeros_like(x), a, b, **settings), func.__name__, x)
    else:
        out = func(x, a, b, **settings)
        return put_gate(run.recipe, out, weakest_gate((given, a, b))) if run.asks_for_gates else out
    value = func(x.detach(), a.detach(), b.detach(), **settings)
    out = rules.with_gradient_of(value, settings.get("beta", 1) * x + apart)
    if func.__name__ == "addcmul" and carries(x) and carries(apart):
        _combined.summed(run, out, x, apart, torch.add)
    if run.asks_for_gates:
        keep_gate(run.recipe, out, given, apart if carries(a) and carries(b) else None)
    return out


def _matrix_of_products(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Each element of ``a`` times each of ``b``."""
    a, b, _, _ = pair(args, kwargs)
    return product(run, func, (a, b.view_as(b) if a is b and carries(b) else b), {})


def _prod(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The product of all elements, or of those along a dimension; each of ``n`` factors has the same share."""
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return func(x, *rest, **settings)
    dim = rest[0] if rest else settings.get("dim")
    if _shares(run) and isinstance(dim, int) and (parts := _joined.parts_of(x, dim)):
        made = parts[0]
        for part in parts[1:]:
            made = product(run, torch.mul, (made, part), {})
        keeps = settings.get("keepdim", len(rest) > 1 and rest[1])
        out = rules.with_gradient_of(func(x.detach(), *rest, **settings), made.unsqueeze(dim) if keeps else made)
        return move_gate(out, made)
    out = _of_factors(run, func.__name__, lambda x: func(x, *rest, **settings), x)
    if not _shares(run):
        return out
    number = x.numel() // max(out.numel(), 1)
    return _of_so_many(run, _kernels.scaled_on_entry(out, 1 / max(number, 1)), x, number)


def _of_so_many(run: Run, out: Tensor, x: Tensor, number: int) -> Any:
    """``out``, products of so many elements of ``x``, and so of as many factors; gates, if ``x`` is."""
    strength = gate_strength(x) if run.asks_for_gates else 0
    if strength:
        put_gate(run.recipe, out, strength)
    is_scale = strength == EXPONENTIAL
    of_one = 1 if number == _factors.UNEVEN else (_factors.scales if is_scale else _factors.factors)(run, x)
    return _factors.made_of(run, out, -number * of_one if is_scale else number * of_one)


def _cumprod(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The products of the first ``n`` elements along a dimension; each has the same share."""
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return func(x, *rest, **settings)
    out = _of_factors(run, func.__name__, lambda x: func(x, *rest, **settings), x)
    if not _shares(run) or not out.ndim:
        return out
    dim = rest[0] if rest else settings.get("dim", settings.get("axis"))
    number = torch.arange(1, out.shape[dim] + 1, dtype=out.dtype, device=out.device)
    shares = number.reciprocal().view(-1, *(1,) * ((out.ndim - 1 - dim) % out.ndim))
    return _of_so_many(run, rules.with_gradient_of(out, out * shares), x, _factors.UNEVEN if len(number) > 1 else 1)


def _shares(run: Run) -> bool:
    return run.recipe.product in (rules.uniform, rules.signal_take_all)


def _of_factors(run: Run, name: str, op: Callable[..., Any], x: Tensor) -> Any:
    rule = run.recipe.product
    if rule in (rules.uniform, rules.signal_take_all):  # of elements of one tensor none is the gate
        run.under("product")
        return op(x)
    if rule not in (rules.unmodified, rules.constant):
        raise run.refuse_rule("product", name, "a product of many factors", "spell it as products of two, or ")
    return run.apply("product", op, x)


def _lerp(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``start + weight · (end − start)``."""
    start, end, weight = arguments(constants(args), constants(kwargs), "input", "end", "weight")
    if not carries(weight):
        if run.has_taps_on_constants:
            start, end = run.added(start, "lerp", end), run.added(end, "lerp", start)
        out = func(start, end, weight)
        if run.asks_for_gates:
            put_gate(run.recipe, out, weakest_gate((start, end)))
        if carries(start) and carries(end):
            _combined.summed(run, out, start, end, lambda start, end: func(start, end, weight))
        return out
    value = func(start.detach(), end.detach(), weight.detach())
    if not (carries(start) or start.any()) and end.shape == value.shape:  # a product
        made = product(run, torch.mul, (weight, end), {})
        return move_gate(_functions.linked(rules.with_gradient_of(value, made), made, torch.clone), made)
    ends = run.added(end, "lerp", start), run.added(start, "lerp", end)
    way = _sums.plain_sum(run, torch.sub, ends, {})
    if run.asks_for_gates:
        put_gate(run.recipe, way, weakest_gate((start, end)))
    apart = product(run, torch.mul, (weight, way), {})
    out = rules.with_gradient_of(value, run.added(start, "lerp", weight) + apart)
    if run.asks_for_gates:
        put_gate(run.recipe, out, weakest_gate((start, apart)))
    if carries(start):
        _combined.summed(run, out, start, apart, torch.add)
    return out


def _glu(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = arguments(constants(args), constants(kwargs), "input", "dim")
    dim = -1 if dim is None else dim
    if not carries(x):
        return func(x, dim)
    signal, inner = x.chunk(2, dim)
    gate = mark_gate(run.recipe, "sigmoid", run.apply("activation", torch.sigmoid, inner))
    made = product(run, torch.mul, (gate, move_gate(signal, x)), {})
    return move_gate(rules.with_gradient_of(func(x, dim), made), made)


# ------------------------------------------------------------------------- activations


def activation(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest, settings = first(args, kwargs)
    if (rest or settings) and (others := [v for v in (*rest, *settings.values()) if is_tensor(v)]):
        if any_carries(others):
            why = f"{func.__name__} of several tensors that depend on the input"
            return as_it_is(run, why, func, (x, *rest), settings)
        x = _broadcast(x, *others)
    if not carries(x):
        return _softmaxes.keep_softmax(run, run.computed(func(x, *rest, **settings), x), x)
    if x.is_complex() and run.recipe.activation is not rules.unmodified:  # no ratio of these is known to conserve
        return as_it_is(run, f"{func.__name__} of complex numbers", func, (x, *rest), settings)
    if settings.pop("inplace", False) or any(value is True for value in rest):
        rest = tuple(value for value in rest if value is not True)
        return changes_in_place(activation, func)(run, func, (x, *rest), settings)
    op = func if not (rest or settings) else lambda x: func(x, *rest, **settings)
    name = func.__name__
    if name in EXPONENTIALS:
        return _activations.exponential(run, op, x)
    if name in OF_EXPONENTIALS:
        return mark_gate(run.recipe, name, _activations.activation(run, op, x, _functions.EXPONENTIAL))
    if name == "sqrt" and run.has_scales and (root := _activations.of_exponential(run, op, x)) is not None:
        return root
    y = mark_gate(run.recipe, name, _activations.activation(run, op, x))
    if name in LOGARITHMS:
        _logarithms.log_of(run, y, x, op)
    if name not in KEEPING:
        return y
    _functions.keep_logistic(y, x)
    return keep_gate(run.recipe, y, x) if run.asks_for_gates else y


def _broadcast(x: Tensor, *others: Tensor) -> Tensor:
    """``x`` in the shape that an element-wise function of it and others has."""
    if all(x.shape == other.shape or not other.ndim for other in others):  # nearly always
        return x
    wide: Tensor = torch.broadcast_tensors(x, *others)[0]  # type: ignore[no-untyped-call]
    return wide


def _clamp(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Between constant bounds an element-wise function; between bounds that depend on the input a selection.

    From 0 up, or down, it is an activation and a gate, as ReLU is; between other bounds what was no gate becomes none.
    """
    x, *bounds = arguments(constants(args), constants(kwargs), *_BOUNDS[func.__name__])
    if not any_carries(bounds):
        named = dict(zip(_BOUNDS[func.__name__][1:], bounds, strict=True))
        return _bounded(run, func, args, kwargs, x, bounds, lambda x: func(x, **named))
    wide = [each.to(x.dtype) if isinstance(each, Tensor) else each for each in bounds]
    added = [each if each is None else run.added(each, func.__name__, x, *bounds) for each in (x, *wide)]
    if not all(each is None or isinstance(each, Tensor) for each in added):
        return func(*added)
    out = added[0]
    for name, bound in zip(_BOUNDS[func.__name__][1:], added[1:], strict=True):
        if bound is not None:
            out = _larger(run, torch.maximum if name == "min" else torch.minimum, (out, bound), {})
    return out


def _bounded(
    run: Run, func: Any, args: Any, kwargs: Any, x: Tensor, bounds: Sequence[Any], op: Callable[[Tensor], Any]
) -> Any:
    """``func(*args, **kwargs) = op(x)``, ``x`` between constant bounds."""
    is_function = _functions.is_shifted(x)
    out = activation(run, func, args, kwargs)
    is_relu = any(type(each) in (int, float) and each == 0 for each in bounds)
    if run.asks_for_places:
        _roles.bounded(out, x, is_relu=is_relu)
    if run.asks_for_gates and carries(out) and not is_function:
        put_gate(run.recipe, out, max(gate_strength(x), WEAK * is_relu))
    if run.has_scales and carries(out) and out is not x:
        _notes.keep(out, x, op)
    return out


def _larger(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The larger, or the smaller, of two; of a tensor and a number it is between bounds."""
    given = arguments(args, kwargs, "input", "other")
    if all(map(is_tensor, given)):
        a, b = (each.detach() if hasattr(each, CONSTANT) else constants(each) for each in given)
        x, number = (a, b) if carries(a) else (b, a)
        if carries(x) and not carries(number) and type(x) is Tensor and _is_bound(run, x, number):
            out = _bounded(run, func, (x, number), {}, x, (number,), lambda x: func(x, number))
            return told(run.recipe, out)
    return _selections.larger(run, func, args, kwargs)


def _is_bound(run: Run, x: Tensor, number: Tensor) -> bool:
    """Whether a constant is one number for all of ``x``; with 0, of what no number was added to, there is a ReLU."""
    if run.recipe.activation is rules.unmodified or not number.numel() or not x.is_floating_point():
        return False
    shape = torch.broadcast_shapes(x.shape, number.shape)  # type: ignore[no-untyped-call]
    if shape != x.shape or torch.result_type(x, number) != x.dtype:
        return False
    first = number.flatten()[0]
    return bool((number == first).all()) and (bool(first) or _functions.is_shifted(x))


def _threshold(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Piecewise linear through zero where what is below the threshold becomes 0."""
    value = arguments(args, kwargs, "input", "threshold", "value")[2]
    return (homogeneous if value == 0 else activation)(run, func, args, kwargs)


def _prelu(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A slope that depends on the input is a factor: ``relu(x) − slope · relu(−x)``."""
    x, slope, _, _ = pair(args, kwargs, names=("weight",))
    by_channel = slope.view(-1, *(1,) * (x.ndim - 2)) if slope.numel() > 1 else slope.view(())
    if not carries(slope):
        slope, by_channel = constants(slope), constants(by_channel)
        channels = x.shape[1:2]

        def prelu(x: Tensor) -> Any:  # of one number, by which a function is asked what it does, too
            return func(x, slope) if x.shape[1:2] == channels else torch.where(x > 0, x, x * by_channel)

        return homogeneous(run, prelu, (x,), {})
    by_channel = move_gate(by_channel, slope)
    above, below = homogeneous(run, torch.relu, (x,), {}), -homogeneous(run, torch.relu, (-x,), {})  # no gate
    apart = run.added(above, "prelu", slope) + product(run, torch.mul, (by_channel, below), {})
    return rules.with_gradient_of(func(x.detach(), slope.detach()), apart)


def homogeneous(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Piecewise linear through zero: the gradient already is the identity rule."""
    args, kwargs = constants(args), constants(kwargs)
    x, rest, settings = first(args, kwargs)
    own = run.recipe.activation
    if own is rules.unmodified or (own is rules.identity and not _functions.is_shifted(x)):
        run.under("activation")
        out = func(*args, **kwargs)
        if not carries(out):
            return run.computed(out, x)
        if out is x and func.__name__ == "relu":
            _lost.cut(out)
        mark_gate(run.recipe, "relu", _functions.curved(run, out, x, lambda x: func(x, *rest, **settings)))
        return keep_gate(run.recipe, out, x) if run.asks_for_gates else out
    if not carries(x):
        return run.computed(func(x, *rest, **settings), x)
    if settings.pop("inplace", False) or any(value is True for value in rest):
        rest = tuple(value for value in rest if value is not True)
        return changes_in_place(homogeneous, func)(run, func, (x, *rest), settings)
    y = mark_gate(run.recipe, "relu", _activations.activation(run, lambda x: func(x, *rest, **settings), x))
    return keep_gate(run.recipe, y, x) if run.asks_for_gates else y


def step(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Constant almost everywhere: no gradient, and so no relevance, but what a rule of the user's own gives it."""
    x, rest, settings = first(args, kwargs)
    if not carries(x) or run.recipe.activation in (rules.identity, rules.unmodified, rules.constant):
        detached = [each.detach() if isinstance(each, Tensor) else each for each in (x, *rest)]
        return _steps.keep(func, run.computed(func(*detached, **settings), x), x, *rest, **settings)
    if func.__name__ in ("heaviside", "floor_divide", "__floordiv__"):
        raise run.refuse_rule("activation", func.__name__, "which has no derivative in torch")
    return run.apply("activation", lambda x: func(x, *rest, **settings), x)


def _square_function(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return _square(run, func, first(args, kwargs)[0])


def _note_nothing(out: Tensor, x: Tensor, factor: Any) -> None:
    """Note that ``out``, an exponential times zeros (the state that a recurrence begins with), is nothing of it."""
    if gate_strength(x) != EXPONENTIAL:  # the cheaper question
        return
    is_zero = not torch.count_nonzero(factor) if type(factor) is Tensor else type(factor) in (int, float) and not factor
    node: Any = out.grad_fn
    if is_zero:
        node.metadata[NOTHING] = True


def _square(run: Run, func: Any, x: Tensor) -> Any:
    """``x²`` is an element-wise function, ``g(x)/x = x``; not a product of two things."""
    if not carries(x):
        return run.computed(func(x, x) if func.__name__ != "square" else func(x), x)
    if run.has_scales and (power := _activations.of_exponential(run, torch.square, x)) is not None:
        return power
    if run.recipe.activation is rules.identity and not _functions.is_shifted(x):
        run.under("activation")
        y = mark_gate(run.recipe, "square", _functions.curved(run, x.detach() * x, x, torch.square))
        mark_begun(run.recipe, y)
        _factors.made_of(run, y, 1)  # no product of what x is a product of
        if getattr(x, GATE, None) is None:  # nearly always
            return y
    else:
        y = _functions.keep_logistic(_activations.activation(run, torch.square, x), x)
        y = mark_begun(run.recipe, mark_gate(run.recipe, "square", y))
    return keep_gate(run.recipe, y, x) if run.asks_for_gates else y


def _reflected_power(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    return _power(run, torch.pow, (args[1], args[0]), kwargs)


def _power(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, exponent, _, _ = pair(args, kwargs, names=("exponent",))
    is_square = type(exponent) in (int, float) and exponent == 2 and func.__name__ != "float_power"
    if is_square and not run.has_scales and carries(x):  # nearly always
        return _square(run, torch.mul, x)
    if carries(exponent):
        if carries(x):  # a function of the exponent
            if run.recipe.activation is rules.unmodified:
                return run.apply("activation", func, x, exponent)
            x = x.detach()
        if isinstance(x, Tensor):
            exponent = _broadcast(exponent, x)
        return _activations.exponential(run, lambda e: func(x, e), exponent)
    if not carries(x):
        return run.computed(func(x, exponent), x)
    number = isinstance(exponent, (int, float))
    if number and exponent != 1 and run.has_scales:
        power = _activations.of_exponential(run, lambda x: func(x, exponent), x)
        if power is not None:
            return power
    if number and exponent == 1:  # no function at all
        out = _functions.scaled(func(x, exponent), x, lambda x: func(x, exponent))
        return keep_gate(run.recipe, out, x) if run.asks_for_gates else out
    if is_square:
        return _square(run, torch.mul, x)
    if x.is_complex() and run.recipe.activation is not rules.unmodified:
        return as_it_is(run, f"{func.__name__} of complex numbers", func, (x, exponent), kwargs)
    if not number:
        x = _broadcast(x, exponent)
    is_divisor = exponent < 0 if number else bool((exponent < 0).all())
    if is_divisor and not _functions.is_logistic(x):
        run.refuse_part_of_norm(func.__name__)
        op = lambda x: func(x, exponent)  # noqa: E731
        return _divisors.keep_inverse(run.apply("norm", op, x), x, op)
    y = mark_gate(run.recipe, "pow", _activations.activation(run, lambda x: func(x, exponent), x))
    if not is_divisor:
        _functions.keep_logistic(y, x)
    return keep_gate(run.recipe, y, x) if run.asks_for_gates and not is_divisor else y  # one over 1 + exp(x) is none


KEEPING = ("sqrt",)
"""Element-wise functions of a sure gate that are one."""
EXPONENTIALS = ("exp", "exp2", "special_exp2")
OF_EXPONENTIALS = ("expm1", "special_expm1")
"""Element-wise functions that are an exponential and a number: one over such and another number is a sigmoid."""
LOGARITHMS = ("log", "log2", "log1p")

ACTIVATIONS = """
    gelu silu mish tanh sigmoid hardsigmoid hardswish softplus softsign tanhshrink softshrink hardshrink
    elu selu celu relu6 hardtanh log_sigmoid erf erfc erfinv exp exp2 expm1 log1p sqrt
    sin cos tan sinh cosh acos arccos asin arcsin atan arctan acosh arccosh asinh arcsinh atanh arctanh sinc
    frac fmod remainder __mod__ copysign digamma lgamma mvlgamma i0
    special_expit special_erf special_erfc special_erfinv special_exp2 special_expm1 special_log1p
    special_sinc special_digamma special_psi special_gammaln special_multigammaln special_i0 special_i0e special_i1
    special_i1e special_entr special_ndtr special_ndtri special_log_ndtr special_erfcx""".split()

_BOUNDS = {
    "clamp": ("input", "min", "max"),
    "clip": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "clamp_max": ("input", "max"),
}
"""The arguments of the functions that keep a tensor between bounds."""

ROWS = [
    Operation("mul", ("mul", "multiply", "__mul__", "__rmul__"), product, "product"),
    Operation("addcmul", ("addcmul", "addr"), _add_product, "product"),
    Operation("outer", ("outer", "ger", "kron"), _matrix_of_products, "product"),
    Operation("prod", ("prod",), _prod, "product"),
    Operation("cumprod", ("cumprod",), _cumprod, "product"),
    Operation("lerp", ("lerp",), _lerp, "product"),
    Operation("glu", ("glu",), _glu, "product"),
    *(Operation(name, (name,), activation, "activation") for name in ACTIVATIONS),
    *(
        Operation(name, (name,), homogeneous, "activation")
        for name in ("relu", "leaky_relu", "rrelu", "abs", "absolute")
    ),
    *(
        Operation(name, (name,), step, "activation")
        for name in (
            "sign",
            "sgn",
            "round",
            "special_round",
            "floor",
            "ceil",
            "trunc",
            "fix",
            "heaviside",
            "floor_divide",
            "__floordiv__",
        )
    ),
    Operation("prelu", ("prelu",), _prelu, "activation"),
    Operation("threshold", ("threshold",), _threshold, "activation"),
    Operation("clamp", tuple(_BOUNDS), _clamp, "activation"),
    *(
        Operation(name, (name,), _larger, "plain", "joins")
        for name in ("maximum", "minimum", "max", "min", "fmax", "fmin")
    ),
    Operation("square", ("square",), _square_function, "activation"),
    Operation("pow", ("pow", "__pow__", "float_power"), _power, "activation"),
    Operation("rpow", ("__rpow__",), _reflected_power, "activation"),
]
