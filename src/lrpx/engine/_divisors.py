"""What divides: normalisers and reciprocals, which a rule has made constants; and quotients that have no normaliser.

What is multiplied with a normaliser is a norm, and so a new root. What divides is none where the quotient is a function
of one tensor, ``x / (1 + |x|)``, or a softmax; and where it is an exponential and a number, as a sigmoid's is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _exponentials, _moved, _nodes, _notes, _quotients, _renormalised
from lrpx.engine._activations import activation, of_exponential
from lrpx.engine._combined import of_one
from lrpx.engine._functions import (
    EXPONENTIAL,
    FUNCTION,
    function_of,
    has_rules,
    is_curved,
    is_logistic,
    linked,
    scaled,
    swapped,
)
from lrpx.engine._gates import EXPONENTS, mark_gate, takes_all
from lrpx.engine._notes import Note
from lrpx.engine._tensors import carries, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Op = Callable[..., Any]


NORMALISER = "_lrpx_normaliser"
"""The attribute of a constant that divides, and was made of the input: a deviation, or one over it. What is multiplied
with one is a norm, and so a new root."""


def normaliser(value: Tensor, like: Iterable[Any] = ()) -> Tensor:
    """``value``, what divides: noted, if a rule has made it a constant; perhaps computed from others like it."""
    if not carries(value):
        setattr(value, NORMALISER, True)
        for each in like:
            _quotients.keep_root(value, each)
    return value


def is_normaliser(constant: Any) -> bool:
    """Whether a constant is what divides, or a part of it or it in another shape."""
    if hasattr(constant, NORMALISER):
        return True
    base = constant._base if is_tensor(constant) else None
    return base is not None and hasattr(base, NORMALISER)


def scaled_by(run: Any, out: Tensor, x: Tensor, constant: Any, op: tuple[Op, Any, bool]) -> Tensor:
    """``out = op(x)``, ``x`` times a constant or over it: a scaling, or a norm, which is something new.

    What a number scales is kept for a function of that: ``erf(x[:, :4] / √2)`` is one of the part of ``x``.
    """
    if getattr(x, FUNCTION, None) is None or function_of(x) is None:
        if type(constant) is float or type(constant) is int:
            run.keep_root(x)
        elif _moved.is_moved_or_joined(x):
            run.scaled.append(x)
    if out is x or hasattr(x, EXPONENTS):
        if not is_normaliser(constant):
            scaled(out, x, op)
            _exponentials.multiplied_by_constant(run, out, constant)
            return out
        _notes.keep(out, x, _moved.callable_of(op))
    elif not is_normaliser(constant):
        linked(out, x, op)
    return out


# ----------------------------------------------------------------------------------------------------------- quotients


def quotient(run: Any, op: Op, a: Any, b: Tensor) -> Tensor | None:
    """``op(a, b) = a / b``, if that is a function of one tensor, or a softmax; its denominator is no norm then."""
    if not carries(a):
        if (
            run.has_scales
            and type(a) in (int, float)
            and (power := of_exponential(run, lambda b: op(a, b), b)) is not None
        ):
            return power
        if not is_logistic(b) or not has_rules(run):
            return None
        return mark_gate(run.recipe, "sigmoid", activation(run, lambda b: op(a, b), b))
    whole = of_one(run, op, a, b)
    if whole is None:
        f = function_of(a) if is_curved(a) else None
        function = None if f is None or f.op is None else (f.root, f.op)
        whole = _renormalised.chosen(run, op, a, b, function)
    if whole is not None or not run.has_scales or is_logistic(b):
        return whole
    return _quotients.quotient(run, op, a, b)


def hides_logistic(run: Any, op: Op, a: Any, b: Tensor) -> Tensor | None:
    """``op(a, b)``, refused where ``b``, which divides, is an exponential and a number that were moved: a function of
    what was moved with them, which is not at hand. Where a gate gets nothing, no rule need know."""
    if not _moved.is_moved(b) or takes_all(run.recipe) or not has_rules(run):
        return None
    way = _moved.way(b)
    if way.kind != EXPONENTIAL or way.exact:
        return None
    run.refuse("division by an exponential and a number that were moved (divide before they are moved)")
    out: Tensor = run.apply("unknown", op, a, b, rule=rules.unmodified)
    return out


# --------------------------------------------------------------------------------------------------------- reciprocals

RECIPROCAL = "_lrpx_reciprocal"
"""The attribute of a constant ``op(x)`` one over ``x``, a number over it, or one over its root: ``(version, x, its
version, op, whether it is no root)``."""


def _reciprocal(x: Any) -> tuple[Tensor, Op, bool] | None:
    found = getattr(x, RECIPROCAL, None) if is_tensor(x) else None
    if not found or found[0] != x._version or found[1]._version != found[2]:
        return None
    return found[1], found[3], found[4]


def keep_inverse(out: Tensor, x: Tensor, op: Op) -> Tensor:
    """``out = op(x)``, a reciprocal; of a sum of exponentials, a softmax's."""
    if not carries(out):
        normaliser(out)
        setattr(out, RECIPROCAL, Note((out._version, x, x._version, op, True)))
    if _notes.is_sum(x) and _is_reciprocal(x.detach(), op):
        _notes.keep(out, x, op, _notes.INVERSE)
        return out
    return _quotients.keep_root(out, x)


def keep_inverse_root(out: Tensor, x: Tensor, op: Op) -> Tensor:
    """``out = op(x)``, the reciprocal of a root; of a mean or a sum, as in a norm, it is no function of what is
    multiplied with it, and the note would keep the graph of that."""
    found = function_of(x)
    made = None if found is None else found.root.grad_fn
    if made is not None and not carries(out) and not _nodes.kind(made).startswith(("Mean", "Sum", "Var")):
        setattr(out, RECIPROCAL, Note((out._version, x, x._version, op, False)))
    return _quotients.keep_root(normaliser(out), x)


def _is_reciprocal(x: Tensor, op: Op) -> bool:
    """Whether ``op(x)`` is a number over ``x``, or over a scaling of it; and no root or power of that."""
    return torch.allclose(op(x / 2) / 2, op(x), rtol=torch.finfo(x.dtype).eps ** 0.75, atol=0.0)


def times_reciprocal(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b) = a · b``, one of which is one over another tensor, or over its root, that a rule has made a constant:
    if the other is a function of the same, one function, as ``x · (1 / (1 + |x|))`` is. And one over the sum of some of
    a softmax: if these are in the other, a softmax."""
    for x, one_over, product in ((a, b, op), (b, a, swapped(op))):
        if (found := _reciprocal(one_over)) is not None:
            total, inverse, is_no_root = found

            def divided(x: Any, total: Any, by: Op = product, inverse: Op = inverse) -> Any:
                return by(x, inverse(total))

            whole = of_one(run, divided, x, total)
            return _renormalised.chosen(run, divided, x, total) if whole is None and is_no_root else whole
    return None


def divided(out: Tensor, a: Tensor, number: float) -> Tensor:
    """``out = a · number``; of a reciprocal, a number over what it was of; of a normaliser, one."""
    if is_normaliser(a):
        normaliser(out, like=(a,))
    found = _reciprocal(a)
    if found is not None:
        x, op, is_no_root = found
        setattr(out, RECIPROCAL, Note((out._version, x, x._version, lambda x: op(x) * number, is_no_root)))
    return out


def one_over(b: Any) -> Tensor | None:
    """``x``, where ``b`` is ``1 / x``, which a rule has made a constant: to divide by that is a product."""
    found = _reciprocal(b)
    if found is None:
        return None
    x, op, is_no_root = found
    return x if is_no_root and torch.equal(op(x.detach()), x.detach().reciprocal()) else None
