"""Sums of two, or with a number: the handler of their rows in the table of operations.

Their plain gradient is right, but what is known of the two is known of the sum: that it is a function of one tensor,
that scores are normalised by a logarithm, that an exponential has a number beside it, as a sigmoid's denominator has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx.engine import _biases, _exponentials, _logarithms, _moved, _notes, _softmaxes, _steps
from lrpx.engine._combined import are_of_one, summed
from lrpx.engine._functions import (
    EXPONENTIAL,
    FUNCTION,
    GUARD,
    LINEAR,
    Function,
    function_of,
    linked,
    scaled,
    swapped,
    then,
    write_note,
)
from lrpx.engine._gates import EXPONENTS, SURE, WEAK, gate_strength, mark_shifted, takes_all
from lrpx.engine._tensors import called, carries, is_in_place, is_tensor, single

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]


def plain_sum(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``a + b`` or ``a − b``, or with a number: its plain gradient is right."""
    if kwargs and (two := _two_of(func, args, kwargs)) is not None:
        func, args, kwargs = *two, {}
    if run.asks_for_weights and len(args) == 2 and (layer := _biases.with_bias(run, func, *args)) is not None:
        return layer
    if run.has_logarithms and is_in_place(func.__name__) and (normed := _normalised_in_place(func, args)) is not None:
        return normed
    if len(args) == 2 and type(args[0]) is Tensor and not kwargs:  # nearly always
        a, b = args
        kind = type(b)
        if (kind is float or kind is int) and a.requires_grad and not is_in_place(func.__name__):
            return _with_number(run, func(a, b), a, (func, b, True))
        if kind is Tensor and a.ndim and b.ndim:
            out = func(a, b)
            if not out.requires_grad:
                _softmaxes.keep_softmax(run, run.computed(out, a, b), a, b)
            elif a is b:
                return out if out is a else scaled(out, a, lambda x: func(x, x))
            elif out is not a and (a.requires_grad or hasattr(a, EXPONENTS)) and _may_be_known(a, b):
                summed(run, out, a, b, func)
            return out
    was = _before_a_shift(func, args)
    out = called(func, args, kwargs)
    if any(hasattr(each, _steps.STEP) for each in args):
        _steps.keep(func, out, *args, **kwargs)
    if len(args) == 2 and not kwargs and carries(out):
        a, b = args
        if not is_tensor(a) or (a.ndim == 0 and a.is_leaf and is_tensor(b) and not is_in_place(func.__name__)):
            a, b, func = b, a, swapped(func)
        if not is_tensor(b) or (b.ndim == 0 and b.is_leaf):  # a number, or the leaf that a ledger makes of it
            number = b.detach() if is_tensor(b) else b
            if was is None or out is not a:
                return _with_number(run, out, a, (func, number, True))
            _shifted_in_place(a, was, lambda x: func(x.clone(), number))
            _mark_shifted(run, out, a)
        elif a is b:
            return out if out is a else scaled(out, a, lambda x: func(x, x))
        elif out is not a and (a.requires_grad or hasattr(a, EXPONENTS)) and _may_be_known(a, b):
            summed(run, out, a, b, func)
    elif type(out) is Tensor and not out.requires_grad:
        _softmaxes.keep_softmax(run, run.computed(out, *args, *kwargs.values()), *args)
    return out


def _two_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any]] | None:
    """A sum that has arguments by keyword: as a function of two, and these."""
    given = *args, *(kwargs[name] for name in ("input", "other") if name in kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in ("input", "other")}
    if len(given) != 2 or not rest.keys() <= {"alpha"}:
        return None

    def of_two(a: Any, b: Any) -> Any:
        return func(a, b, **rest)

    of_two.__name__ = "sum" if rest.get("alpha", 1) != 1 else func.__name__
    if is_in_place(func.__name__):
        of_two.__name__ += "_" * (not is_in_place(of_two.__name__))
    return of_two, given


def _normalised_in_place(func: Any, args: Any) -> Tensor | None:
    """Scores that the logarithm of the sum of their exponentials is taken off in place, ``s.sub_(s.logsumexp(-1))``."""
    if len(args) != 2 or (before := _logarithms.before_logarithm(*args)) is None:
        return None
    out: Tensor = func(*args)
    _logarithms.summed(out, before, args[1], torch.sub if "sub" in func.__name__ else torch.add)
    return out


def _may_be_known(a: Tensor, b: Tensor) -> bool:
    """Whether a sum may be a function of what both depend on, or exponentials are in it: the second may be a
    normaliser, which a rule has made a constant."""
    if getattr(b, EXPONENTS, None) is not None:
        return True
    if not b.requires_grad:
        return False
    if are_of_one(a, b) or getattr(a, EXPONENTS, None) is not None:
        return True
    return _moved.is_of_moved(a) and _moved.is_of_moved(b)


# ---------------------------------------------------------------------------------------------- numbers that are added


def _with_number(run: Any, out: Tensor, x: Tensor, op: tuple[Op, Any, bool]) -> Tensor:
    """``out = op(x)``, a new tensor: ``x`` and a number."""
    if getattr(x, EXPONENTS, None) is not None:
        _shifted_exponential(out, x, _moved.callable_of(op))
    else:
        linked(out, x, op, exact=False)
    if run.asks_for_gates:
        _mark_shifted(run, out, x)
    return out


def _shifted_exponential(out: Tensor, x: Tensor, op: Op) -> None:
    """``out = op(x)``, to which a number was added, where ``x`` was made of exponentials."""
    found = function_of(x)
    is_guarded = found is not None and _is_guarded(found, op)
    linked(out, x, op, exact=is_guarded)
    if is_guarded and (power := _exponentials.exponent_of(x)) is not None:
        exponent, before = power
        _exponentials.exponent(out, exponent, lambda exponent: op(before(exponent)))
    else:
        _notes.keep(out, x, op)


def _is_guarded(f: Function, op: Op) -> bool:
    """Whether ``f`` is an exponential, and the number that ``op`` adds to it no more than :data:`GUARD` of it."""
    if f.kind != EXPONENTIAL or not f.exact or f.op is None:
        return False
    with _disable_current_modes():
        one = f.op(single(f.root, 0))
        return bool((op(torch.zeros_like(one)).abs() <= GUARD * one.abs()).all())


def _mark_shifted(run: Any, out: Tensor, x: Tensor) -> None:
    """``out`` is ``x`` and a number: perhaps of one sign now, or no longer."""
    noted = getattr(out, FUNCTION, None)
    if noted and noted[3] != LINEAR and takes_all(run.recipe) and gate_strength(x) in (WEAK, SURE):
        found = function_of(out)
        if found is not None and found.op:
            mark_shifted(run.recipe, out, found.root, found.op)


def _before_a_shift(func: Any, args: Any) -> Function | None:
    """What the tensor is a function of that a number is added to in place; of itself, as it is until then."""
    if len(args) != 2 or type(args[0]) is not Tensor or not args[0].requires_grad or not is_in_place(func.__name__):
        return None
    x, number = args
    if is_tensor(number) and (number.ndim or not number.is_leaf):
        return None
    return function_of(x) or Function(x.clone())


def _shifted_in_place(x: Tensor, was: Function, op: Op) -> None:
    """A number was added to ``x`` in place: what was known of it until then is known of what it was."""
    is_guarded = _is_guarded(was, op)
    write_note(x, Function(was.root, was.kind, is_guarded, then(was.op, op)))
    _notes.changed(x, op, is_exponential=is_guarded)
