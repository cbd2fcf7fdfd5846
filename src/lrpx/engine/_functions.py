"""Functions of one tensor that a model writes out as many operations, known by what they compute.

An element-wise function of a tensor gets the rule for activations once, as a whole, whether it is one torch function
or many: ``x · ½(1 + erf(x/√2))`` is GELU, no product of two things, and ``x · sigmoid(x)`` is SiLU; ``silu(a) · b`` is
a product. So each tensor that was made of one other, its root, by casts, scalings, numbers that are added and
element-wise functions, knows it: here is what is noted of that. The rule for activations of a function of a function,
``log(1 + exp x)``, is in ``engine/_activations.py``, and what it would have to know and is gone in ``engine/_lost.py``.
Where two of one root are multiplied, divided, summed or chosen among, the result is a function of that root
(``engine/_combined.py``). A sum of functions of one root needs no rule, for each hands on what it is given; a number
that is added after the last of them is a constant (``engine/_sums.py``).

``exp(x) / Σ exp(x)`` gets the rule for softmax: ``engine/_exponentials.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _moved, _notes
from lrpx.engine._gates import EXPONENTS
from lrpx.engine._notes import Note

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine._moved import Noted

    Op = Callable[..., Any]


FUNCTION = "_lrpx_function"
"""The attribute of a tensor that is a function of another: ``(version, root, its version, kind, exact, op)``. A change
in place, of the tensor or of its root, shows in the version. Exact: no number was added, so that all relevance of the
tensor arrives at the root. ``op(root)`` is the tensor; None: the root itself. ``root()`` is the root. What a rule gives
must not hang on whether the model has kept it: so it is kept where a number was added, or an exponential is in it. Else
it is held weakly, so that few live longer than without: the run keeps the newest (``run.roots``)."""
LINEAR, CURVED, EXPONENTIAL = range(3)
"""Kinds of functions: scalings and shifts by numbers; others; those that an exponential is in."""


class Function(NamedTuple):
    """What a tensor is a function of; see :data:`FUNCTION`."""

    root: Tensor
    kind: int = LINEAR
    exact: bool = True
    op: Op | None = None


def function_of(x: Tensor) -> Function | None:
    """What ``x`` is a function of, if that is known and still there."""
    found = getattr(x, FUNCTION, None)  # of what has no attributes, vars() would make a dict
    if not found or x._version != found[0]:
        return None
    root = found[1]()
    if root is None or root._version != found[2]:
        return None
    return Function(root, found[3], found[4], None if found[5] is None else _moved.callable_of(found[5]))


def write_note(out: Tensor, f: Function) -> None:
    """Note on a tensor what it is a function of."""
    root = f.root
    is_kept = not f.exact or f.kind == EXPONENTIAL
    _moved.note(out, *f)
    setattr(out, FUNCTION, Note((out._version, (lambda: root) if is_kept else ref(root), root._version, *f[1:])))


def swapped(func: Any) -> Op:
    """``func`` with its arguments the other way round."""
    return lambda x, number: func(number, x)


def then(before: Op | None, op: Noted) -> Op:
    """``op`` of what ``before`` gives."""
    last = _moved.callable_of(op)
    return last if before is None else _moved.masking(lambda root: last(before(root)), before, last)


def linked(out: Tensor, x: Tensor, op: Noted, kind: int = LINEAR, exact: bool = True) -> Tensor:
    """``out``, a new tensor, noted as ``op(x)``, an element-wise function of ``x``."""
    if out is not x:
        if getattr(x, FUNCTION, None) is None or (f := function_of(x)) is None:  # nearly always
            root = ref(x) if exact and kind != EXPONENTIAL else lambda: x  # as write_note() has it
            out.__dict__[FUNCTION] = Note((0, root, x._version, kind, exact, op))
            if kind != LINEAR or not exact or _moved.is_scaling(op, out):
                _moved.note(out, x, kind, exact, op)
        else:
            write_note(out, Function(f.root, max(kind, f.kind), exact and f.exact, then(f.op, op)))
    return out


def curved(run: Any, out: Tensor, x: Tensor, op: Noted, kind: int = CURVED) -> Tensor:
    """``out``, a new tensor, noted as ``op(x)``, no scaling; the root is kept for a function of it that may follow."""
    f = function_of(x)
    run.keep_root(x if f is None else f.root)
    return linked(out, x, op, kind)


def scaled(out: Tensor, x: Tensor, op: Noted) -> Tensor:
    """``out = op(x)``, where ``op`` scales, by constants, or casts."""
    linked(out, x, op)
    if getattr(x, EXPONENTS, None) is not None:
        _notes.keep(out, x, _moved.callable_of(op))
    return out


def copied(out: Tensor, x: Tensor) -> None:
    """``out`` is a copy of ``x``, whose attributes it has."""
    linked(out, x, torch.clone)
    vars(out).pop(EXPONENTS, None)
    _notes.keep(out, x, torch.clone)


def rooted(run: Any, value: Tensor, x: Tensor, copy: Tensor) -> None:
    """``value`` will be written into the place of ``x``: what it is a function of is then the copy of that."""
    if (found := function_of(value)) is not None and found.root is x:
        write_note(value, found._replace(root=copy))
        run.keep_root(copy)


def moved(x: Tensor, value: Tensor) -> None:
    """``value`` was written into the place of ``x``."""
    if (found := function_of(value)) is not None:
        write_note(x, found)
    _notes.moved(x, value)


# -------------------------------------------------------------------------------------------------- what a function is


def is_shifted(x: Tensor) -> bool:
    """Whether ``x`` is a function of another, of which it does not hand on all: a number was added, perhaps before it
    was moved, or put together, and scaled."""
    noted: Any = getattr(x, FUNCTION, None)
    if not noted or (found := function_of(x)) is None:
        return hasattr(x, FILLED) or _moved.is_shifted(x)
    return not noted[4] or _moved.is_shifted(found.root)


def is_curved(x: Tensor) -> bool:
    """Whether ``x`` is a function of another that is no scaling, nor a shift; or was one before it was moved."""
    noted: Any = getattr(x, FUNCTION, None)
    if noted and function_of(x) is not None:
        return bool(noted[3] != LINEAR)
    return _moved.is_moved(x) and _moved.way(x).kind != LINEAR


def is_logistic(x: Tensor) -> bool:
    """Whether ``x`` is an exponential and a number, as the denominator of a sigmoid is; and no norm."""
    noted: Any = getattr(x, FUNCTION, None)
    return bool(noted) and noted[3] == EXPONENTIAL and not noted[4] and function_of(x) is not None


def keep_logistic(y: Tensor, *made_of: Tensor) -> Tensor:
    """``y``, a power or a product of what ``made_of`` gives: as good as the denominator of a sigmoid, if that is."""
    if all(map(is_logistic, made_of)) and (found := function_of(y)) is not None:
        write_note(y, found._replace(exact=False))
    return y


def fits(value: Tensor, root: Tensor) -> bool:
    """Whether ``value`` can be an element-wise function of ``root``."""
    return value.shape == root.shape and value.is_floating_point() and root.is_floating_point()


PARTWISE = (rules.unmodified, rules.constant)
"""Rules that give a function of a function the same, as a whole or part by part."""
GUARD = 1e-5
"""The largest number beside an exponential, as a part of what that is where its exponent is 0, that guards against a
division by zero: ``x / (exp(s) + 1e-12)`` is ``x / exp(s)``, and no product with a sigmoid."""


def has_rules(run: Any) -> bool:
    """Whether functions, products or norms have another rule than their plain gradient."""
    recipe = run.recipe
    return not (recipe.activation is recipe.product is recipe.norm is rules.unmodified)


# ------------------------------------------------------------------------------------------------------ what is filled

FILLED = "_lrpx_filled"
"""The attribute of what has a constant ``c`` in some places of ``x``, to which a number was added: ``(version, x, its
version, c, again)``; ``again(x, c)`` is it."""


def to_be_filled(x: Any, *, in_place: bool) -> Tensor | None:
    """``x``, or a copy of it if that will be changed, if a number was added to it."""
    if not getattr(x, FUNCTION, None) or not is_shifted(x):
        return None
    if not in_place or (found := function_of(x)) is None:
        return None if in_place else x
    copy: Tensor = x.clone()
    write_note(copy, found)
    return copy


def filled(out: Tensor, x: Tensor | None, constant: Any, again: Op) -> None:
    """Note that ``out`` is ``again(x, constant)``, if ``x`` is to be filled."""
    if x is not None and out.shape == x.shape:
        setattr(out, FILLED, Note((out._version, x, x._version, constant, again)))
