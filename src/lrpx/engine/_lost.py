"""What was there before the root of a function, and is not at hand where another function follows.

With what was negative before a ReLU in place, with what neither the model nor the run has kept, or with what was moved
since, the function may be another one. Where it is, a strict recipe refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import rules
from lrpx.engine import _moved
from lrpx.engine._functions import CURVED, EXPONENTIAL, FUNCTION, GUARD, LINEAR, PARTWISE, Function, then
from lrpx.engine._tensors import single

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]


CUT = "_lrpx_cut"
"""The attribute of what a ReLU in place has made: its version. What was negative before is lost."""


def cut(x: Tensor) -> None:
    """``x`` is a ReLU of what it was."""
    setattr(x, CUT, x._version)


def is_lost(run: Any, op: Op, f: Function) -> bool:
    """Whether ``op`` of a function of a ReLU in place is not 0 at 0, and so a function of what was there before, and a
    recipe refuses that."""
    if not run.recipe.strict or run.recipe.activation in PARTWISE or getattr(f.root, CUT) != f.root._version:
        return False
    with _disable_current_modes():
        return bool(then(f.op, op)(single(f.root, 0)).any())


def is_forgotten(x: Tensor) -> bool:
    """Whether ``x`` is a function of what neither the model nor the run has kept."""
    noted: Any = getattr(x, FUNCTION, None)
    return bool(noted) and noted[0] == x._version and noted[1]() is None


# ------------------------------------------------------------------------------------------------------ what was moved

MOVED = "function of a function that was moved (apply it before that is moved)"


def was_function(run: Any, op: Op, f: Function, kind: int) -> bool:
    """Whether ``op`` is one function with what the moved root of ``f`` is a function of, which is not at hand, and a
    recipe refuses that: a number was added there; or what is not 0 is 0 there, or next to nothing, and ``op`` of that
    is not. (An exponential of next to nothing is a scale, to which nothing is handed.)"""
    if not run.recipe.strict or run.recipe.activation in PARTWISE:
        return False
    ways = _moved.ways(f.root)
    if any(_is_one_with(way, op, f) for way in ways):
        return True
    is_known = run.recipe.activation is rules.identity and kind != EXPONENTIAL
    return is_known and any(_is_steeper(way, op, f) for way in ways)


def was_moved(run: Any, op: Op, f: Function, kind: int = CURVED) -> bool:
    """The same, if the root of ``f`` was moved or put together."""
    return _moved.is_moved_or_joined(f.root) and was_function(run, op, f, kind)


def refuse_moved(run: Any, op: Op, f: Function) -> None:
    """Refuse ``op`` of ``f``, which the model has written out by a mask or a selection, where as one function with what
    was moved it would be another."""
    if was_moved(run, op, f):
        run.refuse(MOVED)


FAR = 5.0
"""How far from zero it is asked what a function gives."""
PARTS = (1.0, -1.0, 2.0**-5, -(2.0**-5), 2.0**-10, -(2.0**-10))
"""Of which parts of that it is asked whether nothing is left: a ReLU leaves nothing far off, a shrinkage near by."""


def _is_one_with(way: _moved.Way, op: Op, f: Function) -> bool:
    if way.op is None or not way.exact:
        return way.op is not None
    node, place = way.end
    like = node._input_metadata[place]
    with _disable_current_modes():
        far = single(like, FAR)
        is_cut = any(bool((way.op(far * part) == 0).any()) for part in PARTS)
        whole, zero = then(f.op, op), single(f.root, 0)
        return is_cut and bool((whole(zero).abs() > GUARD * whole(zero + 1).abs()).any())


NEAR = tuple(sign * 2.0**power for power in range(-24, 6) for sign in (1, -1))
"""Numbers by which it is asked how steep a function is."""


def _is_steeper(way: _moved.Way, op: Op, f: Function) -> bool:
    """Whether somewhere in the root of ``f`` there is so little that the identity rule takes ``op`` of it for a
    constant, as it would not take the whole."""
    if way.op is None or way.kind == LINEAR:
        return False
    (node, place), x, whole = way.end, f.root.detach(), then(f.op, op)
    like = node._input_metadata[place]
    with _disable_current_modes():
        if type(x) is not Tensor or not bool((rules.is_steep(whole(x), x) & (x != 0)).any()):
            return False
        for number in NEAR:
            root = single(like, number)
            before = single(x, way.op(root).flatten()[0].item())
            value = whole(before)
            if bool((rules.is_steep(value, before) & ~rules.is_steep(value, torch.full_like(value, number))).any()):
                return True
    return False
