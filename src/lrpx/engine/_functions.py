"""Functions of one tensor that a model writes out as many operations, known by what they compute.

An element-wise function of a tensor gets the rule for activations once, as a whole, whether it is one torch function
or many: ``x · ½(1 + erf(x/√2))`` is GELU, no product of two things, and ``x · sigmoid(x)`` is SiLU; ``silu(a) · b`` is
a product. So each tensor that was made of one other, its root, by casts, scalings, numbers that are added and
element-wise functions, knows it. Where two of one root are multiplied or divided, the result is a function of that
root; and so is a function of a function, ``log(1 + exp x)``. A sum of functions of one root needs no rule, for each
hands on what it is given; a number that is added after the last of them is a constant.

``exp(x) / Σ exp(x)`` gets the rule for softmax: ``engine/_exponentials.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from lrpx import rules
from lrpx.engine import _exponentials, _factors
from lrpx.engine._exponentials import Note
from lrpx.engine._gates import (
    EXPONENTS,
    SURE,
    WEAK,
    gate_strength,
    mark_gate,
    mark_shifted,
    mark_written,
    put_gate,
    takes_all,
    weakest_gate,
)
from lrpx.engine._tensors import PLAIN, carries, constants

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]


FUNCTION = "_lrpx_function"
"""The attribute of a tensor that is a function of another: ``(version, root, its version, kind, exact, op)``. The root
is held weakly, so that nothing lives longer than without; and a change in place, of the tensor or of its root, shows in
the version. Exact: no number was added, so that all relevance of the tensor arrives at the root. ``op(root)`` is the
tensor; None: the root itself."""

ONE_HOT = "_lrpx_one_hot"
"""The attribute of one-hot ids of the model's input: the ids. Cast to be multiplied they are a source, as what is
looked up in an embedding is."""

LINEAR, CURVED, EXPONENTIAL = range(3)
"""Kinds of functions: scalings and shifts by numbers; others; those that an exponential is in."""

Function = tuple[int, Any, int, int, bool, "Op | None"]


def _function(x: Tensor) -> Function | None:
    """What ``x`` is a function of, if that is known and still there."""
    found: Function | None = vars(x).get(FUNCTION)
    if not found or x._version != found[0]:
        return None
    root = found[1]()
    return found if root is not None and root._version == found[2] else None


def _of_itself(x: Tensor) -> Function:
    version = x._version
    return version, ref(x), version, LINEAR, True, None


def _then(before: Op | None, op: Op) -> Op:
    return op if before is None else lambda root: op(before(root))


def linked(out: Tensor, x: Tensor, op: Op, kind: int = LINEAR, exact: bool = True) -> Tensor:
    """``out``, a new tensor, noted as ``op(x)``, an element-wise function of ``x``."""
    if out is not x:
        if FUNCTION not in x.__dict__:  # nearly always
            out.__dict__[FUNCTION] = Note((0, ref(x), x._version, kind, exact, op))
            return out
        _, root, version, before, was_exact, again = _function(x) or _of_itself(x)
        setattr(out, FUNCTION, Note((0, root, version, max(kind, before), exact and was_exact, _then(again, op))))
    return out


def scaled(out: Tensor, x: Tensor, op: Op) -> Tensor:
    """``out = op(x)``, where ``op`` scales, by constants, or casts."""
    linked(out, x, op)
    if EXPONENTS in x.__dict__:
        _exponentials.keep(out, x, op)
    return out


def copied(out: Tensor, x: Tensor) -> None:
    """``out`` is a copy of ``x``, whose attributes it has."""
    linked(out, x, torch.clone)
    vars(out).pop(EXPONENTS, None)
    _exponentials.keep(out, x, torch.clone)


def moved(x: Tensor, value: Tensor) -> None:
    """``value`` was written into the place of ``x``."""
    found = vars(value).get(FUNCTION)
    if found:
        setattr(x, FUNCTION, Note((x._version, *found[1:])))
    _exponentials.moved(x, value)


# ------------------------------------------------------------------------ element-wise functions


def activation(run: Any, op: Op, x: Tensor, kind: int = CURVED) -> Tensor:
    """``op(x)``, an element-wise function, under the recipe's rule; as a whole with what ``x`` is a function of."""
    found = _function(x)
    if found is not None:
        _, root, _, before, exact, again = found
        if not (exact and before == LINEAR) and run.recipe.activation not in PARTWISE:
            value = op(x.detach())
            if _fits(value, root()):
                return _whole(run, root(), value, _then(again, op), max(kind, before))
    y = linked(run.apply("activation", op, x), x, op, kind)
    if EXPONENTS in x.__dict__ and not _exponentials.is_sum(x):
        _exponentials.keep(y, x, op)
    return y


def _fits(value: Tensor, root: Tensor) -> bool:
    """Whether ``value`` can be an element-wise function of ``root``."""
    return value.shape == root.shape and value.is_floating_point() and root.is_floating_point()


PARTWISE = (rules.unmodified, rules.constant)
"""Rules that give a function of a function the same, as a whole or part by part."""


def is_shifted(x: Tensor) -> bool:
    """Whether ``x`` is a function of another, of which it does not hand on all: a number was added."""
    found = _function(x)
    return found is not None and not found[4]


def is_logistic(x: Tensor) -> bool:
    """Whether ``x`` is an exponential and a number, as the denominator of a sigmoid is; and no norm."""
    found = _function(x)
    return found is not None and found[3] == EXPONENTIAL and not found[4]


def of_one(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b)``, a product or quotient, under the rule for activations, if both are functions of one tensor."""
    f, g = _function(a), _function(b)
    if f is None and g is None:
        return None
    f, g = f or _of_itself(a), g or _of_itself(b)
    root = f[1]()
    if root is not g[1]() or not _has_rules(run):
        return None
    value = op(a.detach(), b.detach())
    return _whole(run, root, value, _both(op, f, g), max(CURVED, f[3], g[3])) if _fits(value, root) else None


def _both(op: Op, f: Function, g: Function) -> Op:
    of_f, of_g = f[5], g[5]
    return lambda root: op(root if of_f is None else of_f(root), root if of_g is None else of_g(root))


def _has_rules(run: Any) -> bool:
    recipe = run.recipe
    return not (recipe.activation is recipe.product is recipe.norm is rules.unmodified)


def _whole(run: Any, root: Tensor, value: Tensor, again: Op, kind: int) -> Tensor:
    """``value = again(root)`` under the rule for activations."""
    takes_value = run.recipe.activation in (rules.identity, rules.constant)

    def op(x: Tensor) -> Any:
        return value.detach() if takes_value else again(x)

    y = run.apply("activation", op, root)
    setattr(y, FUNCTION, Note((y._version, ref(root), root._version, kind, True, again)))
    return mark_written(run.recipe, y, root, again)


# -------------------------------------------------------------------------------- sums, and casts


def plain_sum(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``a + b`` or ``a − b``, or with a number: its plain gradient is right."""
    out = _called(func, args, kwargs)
    if len(args) == 2 and not kwargs and carries(out):
        a, b = args
        if type(a) is type(b) is Tensor and a.ndim and b.ndim:  # nearly always
            if (a.__dict__ or b.__dict__) and out is not a and a is not b and a.requires_grad and b.requires_grad:
                _summed(out, a, b, func)
            return out
        if not isinstance(a, Tensor):
            a, b, func = b, a, _swapped(func)
        if not isinstance(b, Tensor) or (b.ndim == 0 and b.is_leaf):  # a number, or the leaf that a ledger makes of it
            number = b.detach() if isinstance(b, Tensor) else b
            if out is a:
                _shifted_in_place(a, lambda x: func(x.clone(), number))
            else:
                op: Op = lambda x: func(x, number)  # noqa: E731
                linked(out, a, op, exact=False)
                _exponentials.keep(out, a, op)
            _mark_shifted(run, out, a)
        elif out is not a and a is not b and a.requires_grad and b.requires_grad:
            _summed(out, a, b, func)
    elif type(out) is Tensor and not out.requires_grad:
        run.computed_ids(out, *args, *kwargs.values())
    return out


def _summed(out: Tensor, a: Tensor, b: Tensor, op: Op) -> None:
    """``out = op(a, b)``, a sum of two that depend on the input."""
    merged(out, a, b, op)
    if EXPONENTS in a.__dict__ or EXPONENTS in b.__dict__:
        _exponentials.summed(out, a, b, op)


def _mark_shifted(run: Any, out: Tensor, x: Tensor) -> None:
    """``out`` is ``x`` and a number: perhaps of one sign now, or no longer."""
    if takes_all(run.recipe) and gate_strength(x) in (WEAK, SURE):
        found = _function(out)
        if found is not None and found[3] != LINEAR and found[5]:
            mark_shifted(run.recipe, out, found[1](), found[5])


def _shifted_in_place(x: Tensor, op: Op) -> None:
    """A number was added to ``x`` in place: what was known of it until then is known of what it was."""
    version = x._version
    found = vars(x).get(FUNCTION)
    if found and found[0] == version - 1:
        setattr(x, FUNCTION, Note((version, *found[1:4], False, _then(found[5], op))))
    _exponentials.changed(x, op)


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    if PLAIN.issuperset(map(type, args)) and not kwargs:  # nearly always
        return func(*args)
    return func(*constants(args), **constants(kwargs))


def _swapped(func: Any) -> Op:
    return lambda x, number: func(number, x)


def merged(out: Tensor, a: Tensor, b: Tensor, op: Op) -> Tensor:
    """``out = op(a, b)``, a sum of two or a selection among them: a function of what both are functions of."""
    f, g = _function(a), _function(b)
    if (f is None and g is None) or isinstance(a, Parameter) or isinstance(b, Parameter):
        return out
    f, g = f or _of_itself(a), g or _of_itself(b)
    if f[1]() is g[1]():
        setattr(out, FUNCTION, Note((0, f[1], f[2], max(f[3], g[3]), f[4] and g[4], _both(op, f, g))))
    return out


def plain_where(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A selection between two; of functions of one tensor, a function in pieces."""
    out = _called(func, args, kwargs)
    if run.asks_for_gates:
        put_gate(run.recipe, out, weakest_gate((*args, *kwargs.values())))
    if not any(isinstance(each, Tensor) for each in args[1:]) and args[1:] == (1, 0):
        return of_whole_numbers(run, out, args[0])
    run.computed_ids(out, *args, *kwargs.values())
    if run.has_scales:
        _exponentials.keep_exponents(func, out, args, kwargs)
    if takes_all(run.recipe) and len(args) == 3 and carries(out) and _chooses_by_sign(*args):
        mark_gate(run.recipe, "relu", out)
    if len(args) == 3 and carries(args[1]) and carries(args[2]):
        where = args[0]
        found = _function(merged(out, args[1], args[2], lambda a, b: func(where, a, b)))
        rule = run.recipe.activation
        if found is not None and rule not in PARTWISE and not (found[4] and rule is rules.identity):
            _, root, _, kind, _, again = found
            if again is not None and _fits(out, root()):
                return _whole(run, root(), out, again, max(CURVED, kind))
    return out


def _chooses_by_sign(where: Any, a: Any, b: Any) -> bool:
    """Whether a selection is one among two scalings of one tensor, or one and 0, by its sign: a leaky ReLU, or ReLU."""
    if isinstance(where, Tensor) and where.dtype is not torch.bool:  # the method has the condition second
        where, a = a, where
    if not isinstance(where, Tensor) or where.dtype is not torch.bool or not (carries(a) or carries(b)):
        return False
    x = a if carries(a) else b
    scalings = [_function(each) or _of_itself(each) for each in (a, b) if carries(each)]
    is_zero = [not isinstance(each, Tensor) and each == 0 for each in (a, b) if not carries(each)]
    root = scalings[0][1]()
    if root is None or not all(is_zero) or any(f[1]() is not root or f[3] != LINEAR or not f[4] for f in scalings):
        return False
    if where.shape != root.shape or root.shape != x.shape or where.numel() < 2:
        return False
    return any(torch.equal(where, sign) for sign in (root > 0, root >= 0, root < 0, root <= 0))


def plain_scaling(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A cast, a copy or a change of sign; of one-hot ids a source."""
    out = _called(func, args, kwargs)
    x = args[0] if args else None
    if out is x or not isinstance(x, Tensor):
        return out
    if not x.requires_grad:
        return out if x.is_floating_point() else of_whole_numbers(run, out, x)
    if out.requires_grad:
        rest = args[1:]
        scaled(out, x, lambda x: func(x, *rest, **kwargs))
    return out


def of_whole_numbers(run: Any, out: Tensor, x: Tensor) -> Tensor:
    """``out``, a copy of ``x`` or a cast; of one-hot ids a source, once it is floating-point."""
    rows = x if x._base is None else x._base
    ids = vars(rows).get(ONE_HOT)
    if ids is None:
        if out.is_floating_point():
            run.leaving_ids("a cast", x)
        else:
            run.copied_ids(out, x)
        return out
    if not out.is_floating_point():
        if x is rows:
            setattr(out, ONE_HOT, ids)
        return out
    leaf: Tensor = run.source(rows, ids, rows.to(out), "one_hot")
    return leaf if x is rows else leaf.as_strided(x.shape, x.stride(), x.storage_offset())


# ---------------------------------------------------------------------- exponentials, and quotients


def exponential(run: Any, op: Op, x: Tensor) -> Tensor:
    """``exp x``, or to another base; of a log-softmax, with the rule for softmax."""
    softmax = _exponentials.exponential_of_normalised(run, op, x)
    if softmax is not None:
        return softmax
    y = _factors.exponential(run, activation(run, op, x, EXPONENTIAL))
    _exponentials.exponent(y, x, op)
    return y


def plain_of_exponentials(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum over dimensions, a selection or another shape."""
    out = _called(func, args, kwargs)
    x = args[0] if args else None
    if type(out) is Tensor and not out.requires_grad:
        run.computed_ids(out, *args)
    if isinstance(x, Tensor) and EXPONENTS in vars(x) and isinstance(out, Tensor) and out.is_floating_point():
        rest = args[1:]
        state = _exponentials.SUMMED * (func.__name__ == "sum")
        _exponentials.keep(out, x, lambda x: func(x, *rest, **kwargs), state)
    return out


RECIPROCAL = "_lrpx_reciprocal"
"""The attribute of a constant ``op(x)`` one over ``x``, or a number over it: ``(version, x, its version, op)``."""
STACKED = "_lrpx_stacked"
"""The attribute of what was stacked: ``(version, the parts, the dimension)``."""


def _reciprocal(x: Any) -> tuple[Tensor, Op] | None:
    found = vars(x).get(RECIPROCAL) if isinstance(x, Tensor) else None
    if not found or found[0] != x._version or found[1]._version != found[2]:
        return None
    return found[1], found[3]


def keep_inverse(out: Tensor, x: Tensor, op: Op) -> Tensor:
    """``out = op(x)``, a reciprocal; of a sum of exponentials, a softmax's."""
    if not carries(out):
        setattr(out, RECIPROCAL, Note((out._version, x, x._version, op)))
    if _exponentials.is_sum(x):
        _exponentials.keep(out, x, op, _exponentials.INVERSE)
    return out


def divided(out: Tensor, a: Tensor, number: float) -> Tensor:
    """``out = a · number``; of a reciprocal, a number over what it was of."""
    found = _reciprocal(a)
    if found is not None:
        x, op = found
        setattr(out, RECIPROCAL, Note((out._version, x, x._version, lambda x: op(x) * number)))
    return out


def one_over(b: Any) -> Tensor | None:
    """``x``, where ``b`` is ``1 / x``, which a rule has made a constant: to divide by that is a product."""
    found = _reciprocal(b)
    if found is None:
        return None
    x, op = found
    return x if torch.equal(op(x.detach()), x.detach().reciprocal()) else None


def stacked(out: Tensor, parts: Any, dim: int) -> None:
    """Note what ``out`` was stacked of, along a dimension of it."""
    setattr(out, STACKED, Note((out._version, tuple(parts), dim % out.ndim)))


def parts_of(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """What ``x`` was stacked of, along this dimension; nothing, if that is not known."""
    found = vars(x).get(STACKED)
    return found[1] if found and found[0] == x._version and found[2] == dim % x.ndim else ()


DIAGONAL = "_lrpx_diagonal"
"""The attribute of a matrix that has a vector on its diagonal and else zeros: ``(version, the vector)``."""


def diagonal(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A vector as a matrix; which may be multiplied with, as the vector itself."""
    out = _called(func, args, kwargs)
    if len(args) == 1 and not kwargs and carries(out) and out.ndim == args[0].ndim + 1:
        setattr(out, DIAGONAL, Note((out._version, args[0])))
    return out


def on_diagonal(x: Tensor) -> Tensor | None:
    """The vector on the diagonal of a matrix that has been made of it."""
    found = vars(x).get(DIAGONAL)
    return found[1] if found and found[0] == x._version else None


def quotient(run: Any, op: Op, a: Any, b: Tensor) -> Tensor | None:
    """``op(a, b) = a / b``, if that is a function of one tensor, or a softmax; its denominator is no norm then."""
    if not carries(a):
        if not is_logistic(b) or not _has_rules(run):
            return None
        return mark_gate(run.recipe, "sigmoid", activation(run, lambda b: op(a, b), b))
    whole = of_one(run, op, a, b)
    return _exponentials.quotient(run, op, a, b) if whole is None and run.has_scales else whole
