"""Functions of one tensor that are multiplied, divided, summed or chosen among: a function of it.

Two have one root where that is one tensor, the same part of it, or what one layer has made of the same twice; or where
both were moved alike, as the graph tells (``engine/_moved.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _exponentials, _logarithms, _moved
from lrpx.engine._activations import as_whole, may_be_moved
from lrpx.engine._functions import (
    CURVED,
    EXPONENTIAL,
    FUNCTION,
    LINEAR,
    PARTWISE,
    Function,
    fits,
    function_of,
    has_rules,
    is_shifted,
    then,
    write_note,
)
from lrpx.engine._gates import EXPONENTS, mark_gate, mark_written, takes_all
from lrpx.engine._lost import MOVED, refuse_moved
from lrpx.engine._tensors import carries, is_parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Op = Callable[..., Any]


def of_one(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b)``, a product or quotient, under the rule for activations, if both are functions of one tensor."""
    if are_of_one(a, b):
        f, g = function_of(a) or Function(a), function_of(b) or Function(b)
    elif not (_moved.is_of_moved(a) or _moved.is_of_moved(b)) or not may_be_moved(run):  # nearly always
        return None
    elif (both := _moved_of_one(run, a, b)) is not None:
        f, g = both
        if (run.has_scales and (_pools(a, f, g) or _pools(b, g, f))) or _is_seen_square(run, f, g):
            return None
        if run.recipe.activation is rules.unmodified:
            return _of_parts(run, op, a, b, f, g) if has_rules(run) else None
        if any(getattr(each.op, _moved.MASKING, False) for each in both):
            run.refuse("product of two functions of one tensor that were moved (multiply before they are moved)")
            return None
        if f.op is not None and g.op is not None and f.root is not g.root:
            run.refuse("product of two functions of one tensor that were moved apart (multiply before they are moved)")
            return None
    else:
        return None
    if not _is_one(f.root, g.root) or not has_rules(run):
        return None
    if _is_seen_square(run, f, g):
        return None
    value = op(a.detach(), b.detach())
    if not fits(value, f.root):
        return None
    return as_whole(run, f.root, value, _both(op, f, g), max(CURVED, f.kind, g.kind))


def _of_parts(run: Any, op: Op, a: Tensor, b: Tensor, f: Function, g: Function) -> Tensor:
    """``op(a, b)``, a function of one tensor, where functions have their plain gradient, which is that of the parts."""
    out: Tensor = run.apply("activation", op, a, b)
    if f.root is g.root:
        write_note(out, Function(f.root, max(CURVED, f.kind, g.kind), op=_both(op, f, g)))
    else:  # of what both were moved from, which only the graph knows
        _moved.note(out, f.root, CURVED, True, _same)
    return mark_gate(run.recipe, "product", out)


def _is_seen_square(run: Any, f: Function, g: Function) -> bool:
    """Whether a product is a square that a rule for products wants to see."""
    return f.op is g.op is None and not takes_squares(run)


def takes_squares(run: Any) -> bool:
    """Whether no rule for products wants to see a square that is written as one."""
    return run.recipe.product in (rules.uniform, rules.signal_take_all)


def are_apart(run: Any) -> bool:
    """Whether functions have their plain gradient and products share, so that one taken for the other is wrong."""
    return run.recipe.activation is rules.unmodified and run.recipe.product is rules.uniform


def is_weight(y: Tensor, x: Tensor) -> bool:
    """Whether ``y`` is an exponential by which ``x`` may be pooled, of which it is made itself."""
    return _exponentials.weighs(y, x, _is_scaling)


def _is_scaling(z: Tensor, x: Tensor) -> bool:
    f = function_of(z)
    return f is not None and f.root is x and f.kind == LINEAR and f.exact


def _pools(y: Tensor, f: Function, other: Function) -> bool:
    """Whether ``y``, the function ``f``, is an exponential of what was moved alike, by which that, or a scaling of it,
    may be pooled."""
    is_one = f.kind == EXPONENTIAL and f.exact and other.kind == LINEAR and other.exact
    return is_one and _exponentials.weighs(y, y, lambda z, x: True)


# --------------------------------------------------------------------------------------------------------- what is one


def are_of_one(a: Tensor, b: Tensor) -> bool:
    """Whether two may be functions of one tensor, at a glance at what is noted."""
    of_a, of_b = getattr(a, FUNCTION, None), getattr(b, FUNCTION, None)
    if not (of_a or of_b):  # nearly always
        return _moved.are_twins(a, b)
    root = of_a[1]() if of_a and of_a[0] == a._version else a
    other = of_b[1]() if of_b and of_b[0] == b._version else b
    return _is_one(a if root is None else root, b if other is None else other)  # of what is gone, they are none


def _is_one(a: Tensor, b: Tensor) -> bool:
    """Whether two are one tensor, or one part of it that was selected twice, ``x[..., :2]``, or what one layer has made
    of the same twice."""
    if a is b:
        return True
    base = a._base
    if base is None or (base is not b._base and base is not b):
        return _moved.are_twins(a, b)
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two are one tensor, or one that was moved alike twice, ``x.roll(1)`` and ``x.roll(1)``."""
    return _is_one(a, b) or _moved.are_moved_alike(a, b)


def of_same(run: Any, a: Tensor, b: Tensor) -> tuple[Function, Function] | None:
    """What two tensors are functions of: of one tensor, or of one that was moved alike, before these or after; of two,
    if that is not at hand."""
    f, g = (function_of(each) or Function(each) for each in (a, b))
    if is_same(b, f.root):
        return f, Function(f.root)
    if is_same(f.root, g.root):
        return f, g._replace(root=f.root)
    if not (_moved.is_of_moved(a) or _moved.is_of_moved(b)) or not may_be_moved(run):
        return None
    if run.has_hooks and all(_moved.way(each).op is None for each in (a, b)):  # no functions, but parts
        return None
    return _moved_of_one(run, a, b)


def _moved_of_one(run: Any, a: Tensor, b: Tensor) -> tuple[Function, Function] | None:
    """What two tensors are functions of that were moved, before these or after: of one root, moved alike; or of two, if
    none that is at hand is what was moved, but functions of it are."""
    if a.shape != b.shape:
        return None
    f, g = (function_of(each) or Function(each) for each in (a, b))
    if f.root is not g.root and _moved.are_moved_alike(f.root, g.root):
        return f, g._replace(root=f.root)
    of_f, of_g = _moved.way(f.root), _moved.way(g.root)
    is_one = _moved.are_in_one_place(of_f, of_g)
    if is_one is None and run.has_hooks and _moved.are_kept(of_f, of_g):
        run.refuse("product of two parts of one tensor that were chosen by indices, in a checkpoint (leave it out)")
        return None
    if not (_moved.are_numbered_alike(of_f, of_g, like=a) if is_one is None else is_one):
        return None
    if (of_root := _moved.unscaled(of_f)) is not None:
        return f, Function(f.root, max(g.kind, of_g.kind), g.exact and of_g.exact, _after(of_root(of_g.op), g.op))
    if (of_root := _moved.unscaled(of_g)) is not None:
        return Function(g.root, max(f.kind, of_f.kind), f.exact and of_f.exact, _after(of_root(of_f.op), f.op)), g
    return None if f.root is g.root else (f._replace(op=f.op or _same), g._replace(op=g.op or _same))


def _same(x: Tensor) -> Tensor:
    return x


def _after(before: Op | None, op: Op | None) -> Op | None:
    return before if op is None else then(before, op)


def _both(op: Op, f: Function, g: Function) -> Op:
    return _all(op, (f, g))


def _all(op: Op, functions: Sequence[Function]) -> Op:
    ops = [f.op for f in functions]

    def whole(root: Any) -> Any:
        return op(*(root if each is None else each(root) for each in ops))

    return _moved.masking(whole, *ops)


# ------------------------------------------------------------------------------------------------- sums and selections


def merged(out: Tensor, op: Op, *parts: Tensor) -> Tensor:
    """``out = op(*parts)``, a sum or a selection among them: a function of what all are functions of."""
    functions = [function_of(each) for each in parts]
    if not any(functions) or any(map(is_parameter, parts)):
        return out
    known = [f or Function(x) for f, x in zip(functions, parts, strict=True)]
    root = next(f.root for f in functions if f)  # which the run may have kept
    if all(is_same(f.root, root) for f in known):
        kind, is_exact = max(f.kind for f in known), all(f.exact for f in known)
        write_note(out, Function(root, kind, is_exact, _all(op, known)))
    return out


def summed(run: Any, out: Tensor, a: Tensor, b: Tensor, op: Op) -> None:
    """``out = op(a, b)``, a sum of two that depend on the input; of two functions of one tensor, a function of it."""
    if _moved.is_of_moved(a) and _moved.is_of_moved(b) and not are_of_one(a, b):
        if may_be_moved(run) and (both := _moved_of_one(run, a, b)) is not None:
            f, g = both
            if f.root is g.root:
                write_note(out, Function(f.root, max(f.kind, g.kind), f.exact and g.exact, _both(op, f, g)))
            else:  # of what both were moved from, which only the graph knows
                if is_shifted(a) or is_shifted(b):
                    _moved.note(out, f.root, max(f.kind, g.kind), False, _same)
                _mark_apart(run, out, op, both)
    else:
        merged(out, op, a, b)
    mark_function(run, out, function_of(out))
    if hasattr(a, EXPONENTS) or hasattr(b, EXPONENTS):
        _logarithms.summed(out, a, b, op)


def in_pieces(
    run: Any,
    out: Tensor,
    op: Op,
    *parts: Tensor,
    least: int = LINEAR,
    step: tuple[Tensor | None, Op | None] = (None, None),
) -> Tensor:
    """``out = op(*parts)``, chosen among them element by element: of functions of one tensor, a function of it in
    pieces, under the rule for activations if numbers were added in one. ``least``: the kind of function that it is.
    ``step``: of which tensor that is a step that has chosen, and how."""
    found = function_of(merged(out, op, *parts))
    functions = [function_of(each) or Function(each) for each in parts]
    if found is None and len(parts) == 2 and (both := of_same(run, *parts)) is not None:
        f, g = functions = list(both)
        if f.root is g.root:
            found = Function(f.root, max(f.kind, g.kind), f.exact and g.exact, _both(op, f, g))
            run.keep_root(f.root)
            write_note(out, found)
        else:
            if any(map(is_shifted, parts)) and run.recipe.activation not in PARTWISE:
                run.refuse(MOVED)
            _mark_apart(run, out, op, both, *step)
    if found is not None and (chosen := _by_step(run, found.root, functions, *step)) is not None:
        found = found._replace(op=chosen)
        write_note(out, found)
    rule = run.recipe.activation
    if found is not None and found.op is not None:
        refuse_moved(run, _same, found)
    if found is not None and rule not in PARTWISE and not (found.exact and rule is rules.identity):
        root, kind, _, again = found
        if again is not None and fits(out, root):
            return as_whole(run, root, out, again, max(CURVED, kind))
    mark_function(run, out, None if found is None else found._replace(kind=max(least, found.kind)))
    return out


def _by_step(run: Any, root: Tensor, pieces: Sequence[Function], of: Tensor | None, again: Op | None) -> Op | None:
    """What a step of the root, or of a function of it, chooses of two functions of it, as a function."""
    if of is None or again is None:
        return None
    both = of_same(run, root, of)
    if both is None or both[0].op is not None or not (both[0].root is both[1].root is root):
        return None
    return _all(lambda of, a, b: torch.where(again(of), a, b), [both[1], *pieces])


def mark_function(run: Any, out: Tensor, f: Function | None) -> None:
    """Mark ``out``, which was put together of functions of one tensor, as the gate that it is."""
    if f is not None and f.kind != LINEAR and f.op is not None and takes_all(run.recipe):
        mark_written(run.recipe, out, f.root, f.op)


def _mark_apart(
    run: Any, out: Tensor, op: Op, both: Sequence[Function], of: Tensor | None = None, again: Op | None = None
) -> None:
    """Mark ``out``, ``op`` of functions that were moved one by one, or what a step of ``of``, that was moved as they
    were, chooses of them, as the gate that it is."""
    if not takes_all(run.recipe):
        return
    f, g = both
    if of is not None and again is not None and of_same(run, f.root, of) is not None:
        op, both = (lambda of, a, b: torch.where(again(of), a, b)), [function_of(of) or Function(of), f, g]
    ways = [_moved.way(each.root) for each in both]
    known = [
        Function(each.root, max(each.kind, way.kind), op=each.op if way.op is None else _after(way.op, each.op))
        for each, way in zip(both, ways, strict=True)
    ]
    whole = _all(op, known)
    if not getattr(whole, _moved.MASKING, False):  # of which each place has another function
        mark_function(run, out, Function(f.root, max(each.kind for each in known), op=whole))


def mark_chosen(run: Any, out: Tensor, parts: Sequence[Tensor], choose: Op) -> bool:
    """Mark ``out``, chosen among ``parts`` that were stacked, as the gate that it is, if these are functions of one
    tensor; whether they are."""
    if not parts or not all(map(carries, parts)):
        return False
    known = [function_of(each) or Function(each) for each in parts]
    if not all(is_same(f.root, known[0].root) for f in known) or all(f.op is None for f in known):
        return False
    mark_function(
        run, out, Function(known[0].root, CURVED, op=_all(lambda *given: choose(torch.stack(given), 0), known))
    )
    return True
