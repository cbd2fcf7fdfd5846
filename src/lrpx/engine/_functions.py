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

from functools import partial
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import rules
from lrpx.engine import (
    _biases,
    _exponentials,
    _factors,
    _logarithms,
    _moved,
    _nodes,
    _notes,
    _quotients,
    _renormalised,
    _softmaxes,
    _steps,
)
from lrpx.engine._gates import (
    EXPONENTS,
    SURE,
    WEAK,
    gate_strength,
    mark_gate,
    mark_shifted,
    mark_written,
    takes_all,
)
from lrpx.engine._nodes import SHAPES, SUMS
from lrpx.engine._notes import Note
from lrpx.engine._tensors import PLAIN, carries, constants, is_in_place, is_parameter, is_tensor, single, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lrpx.engine._moved import Noted

    Op = Callable[..., Any]


FUNCTION = "_lrpx_function"
"""The attribute of a tensor that is a function of another: ``(version, root, its version, kind, exact, op)``. A change
in place, of the tensor or of its root, shows in the version. Exact: no number was added, so that all relevance of the
tensor arrives at the root. ``op(root)`` is the tensor; None: the root itself. ``root()`` is the root. What a rule gives
must not hang on whether the model has kept it: so it is kept where a number was added, or an exponential is in it. Else
it is held weakly, so that few live longer than without: the run keeps the newest (``run.roots``)."""

ONE_HOT = "_lrpx_one_hot"
"""The attribute of one-hot ids of the model's input: the ids. Cast to be multiplied they are a source, as what is
looked up in an embedding is."""

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


# ------------------------------------------------------------------------ element-wise functions


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


def _of_filled(run: Any, op: Op, x: Tensor, kind: int) -> Tensor | None:
    """``op(x)``, where ``x`` has constants in some places: as where these are put in after the function."""
    found = getattr(x, FILLED, None)
    if not found or found[0] != x._version or found[1]._version != found[2]:
        return None
    before, constant, again = found[1], found[3], found[4]
    made = run.apply("activation", op, constant.to(x.dtype)) if carries(constant) else 0.0  # whose value is at hand
    places, other = again(torch.zeros_like(x, dtype=torch.bool), True), x.detach()

    def elsewhere(x: Tensor) -> Tensor:  # there the function may have no number: it was filled for that
        return op(x) if x.shape != places.shape else torch.where(places, 0.0, op(torch.where(places, other, x)))

    return rules.with_gradient_of(op(other), again(activation(run, elsewhere, before, kind), made))


def activation(run: Any, op: Op, x: Tensor, kind: int = CURVED) -> Tensor:
    """``op(x)``, an element-wise function, under the recipe's rule; as a whole with what ``x`` is a function of."""
    if hasattr(x, FILLED) and (whole := _of_filled(run, op, x, kind)) is not None:
        return whole
    found = function_of(x)
    root = x if found is None else found.root
    lost = ""
    if hasattr(root, CUT) and _is_lost(run, op, found or Function(x)):
        lost = "relu with inplace=True, before a function that is not 0 at 0 (leave inplace out)"
    elif _was_moved(run, op, found or Function(x), kind):
        lost = MOVED
    elif found is None and _is_forgotten(x) and _was_function(run, op, Function(x), kind):
        lost = "function of a function of what is gone (apply it at once, or keep that in a variable)"
    if lost:
        run.refuse(lost)
        plain: Tensor = run.apply("unknown", op, x, rule=rules.unmodified)
        return linked(plain, x, op, kind) if lost is MOVED else plain  # a product with what was moved may be a function
    if found is not None and not (found.exact and found.kind == LINEAR) and run.recipe.activation not in PARTWISE:
        value = op(x.detach())
        if fits(value, found.root):
            return as_whole(run, found.root, value, then(found.op, op), max(kind, found.kind))
    y = curved(run, run.apply("activation", op, x), x, op, kind)
    _logarithms.mark_merging(run, y, x, least=2)
    is_shift = found is not None and not found.exact  # 1 + exp(x), a function of which is no exponential
    if getattr(x, EXPONENTS, None) is not None and not is_shift and not _notes.is_sum(x):
        _notes.keep_function(y, x, op)
    return y


CUT = "_lrpx_cut"
"""The attribute of what a ReLU in place has made: its version. What was negative before is lost."""


def cut(x: Tensor) -> None:
    """``x`` is a ReLU of what it was."""
    setattr(x, CUT, x._version)


def _is_lost(run: Any, op: Op, f: Function) -> bool:
    """Whether ``op`` of a function of a ReLU in place is not 0 at 0, and so a function of what was there before, and a
    recipe refuses that."""
    if not run.recipe.strict or run.recipe.activation in PARTWISE or getattr(f.root, CUT) != f.root._version:
        return False
    with _disable_current_modes():
        return bool(then(f.op, op)(single(f.root, 0)).any())


def _is_forgotten(x: Tensor) -> bool:
    """Whether ``x`` is a function of what neither the model nor the run has kept."""
    noted: Any = getattr(x, FUNCTION, None)
    return bool(noted) and noted[0] == x._version and noted[1]() is None


FAR = 5.0
"""How far from zero it is asked what a function gives."""
PARTS = (1.0, -1.0, 2.0**-5, -(2.0**-5), 2.0**-10, -(2.0**-10))
"""Of which parts of that it is asked whether nothing is left: a ReLU leaves nothing far off, a shrinkage near by."""


def _was_moved(run: Any, op: Op, f: Function, kind: int = CURVED) -> bool:
    """The same, if the root of ``f`` was moved or put together."""
    return _moved.is_moved_or_joined(f.root) and _was_function(run, op, f, kind)


def refuse_moved(run: Any, op: Op, f: Function) -> None:
    """Refuse ``op`` of ``f``, which the model has written out by a mask or a selection, where as one function with what
    was moved it would be another."""
    if _was_moved(run, op, f):
        run.refuse(MOVED)


MOVED = "function of a function that was moved (apply it before that is moved)"


def _was_function(run: Any, op: Op, f: Function, kind: int) -> bool:
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


def fits(value: Tensor, root: Tensor) -> bool:
    """Whether ``value`` can be an element-wise function of ``root``."""
    return value.shape == root.shape and value.is_floating_point() and root.is_floating_point()


PARTWISE = (rules.unmodified, rules.constant)
"""Rules that give a function of a function the same, as a whole or part by part."""


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


def hides_logistic(run: Any, op: Op, a: Any, b: Tensor) -> Tensor | None:
    """``op(a, b)``, refused where ``b``, which divides, is an exponential and a number that were moved: a function of
    what was moved with them, which is not at hand. Where a gate gets nothing, no rule need know."""
    if not _moved.is_moved(b) or takes_all(run.recipe) or not _has_rules(run):
        return None
    way = _moved.way(b)
    if way.kind != EXPONENTIAL or way.exact:
        return None
    run.refuse("division by an exponential and a number that were moved (divide before they are moved)")
    out: Tensor = run.apply("unknown", op, a, b, rule=rules.unmodified)
    return out


def keep_logistic(y: Tensor, *made_of: Tensor) -> Tensor:
    """``y``, a power or a product of what ``made_of`` gives: as good as the denominator of a sigmoid, if that is."""
    if all(map(is_logistic, made_of)) and (found := function_of(y)) is not None:
        write_note(y, found._replace(exact=False))
    return y


def of_one(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b)``, a product or quotient, under the rule for activations, if both are functions of one tensor."""
    if _are_of_one(a, b):
        f, g = function_of(a) or Function(a), function_of(b) or Function(b)
    elif not (_moved.is_of_moved(a) or _moved.is_of_moved(b)) or not _may_be_moved(run):  # nearly always
        return None
    elif (both := _moved_of_one(run, a, b)) is not None:
        f, g = both
        if (run.has_scales and (_pools(a, f, g) or _pools(b, g, f))) or _is_seen_square(run, f, g):
            return None
        if run.recipe.activation is rules.unmodified:
            return _of_parts(run, op, a, b, f, g) if _has_rules(run) else None
        if any(getattr(each.op, _moved.MASKING, False) for each in both):
            run.refuse("product of two functions of one tensor that were moved (multiply before they are moved)")
            return None
        if f.op is not None and g.op is not None and f.root is not g.root:
            run.refuse("product of two functions of one tensor that were moved apart (multiply before they are moved)")
            return None
    else:
        return None
    if not _is_one(f.root, g.root) or not _has_rules(run):
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


def _are_of_one(a: Tensor, b: Tensor) -> bool:
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


def _has_rules(run: Any) -> bool:
    recipe = run.recipe
    return not (recipe.activation is recipe.product is recipe.norm is rules.unmodified)


def _takes_value(run: Any) -> bool:
    """Whether the rule for activations takes nothing of a function but its value."""
    return run.recipe.activation in (rules.identity, rules.constant)


def _may_be_moved(run: Any) -> bool:
    """Whether functions of what was moved are known: the rule for activations takes their value, or what their parts
    hand on."""
    return _takes_value(run) or run.recipe.activation is rules.unmodified


def as_whole(run: Any, root: Tensor, value: Tensor, again: Op, kind: int) -> Tensor:
    """``value = again(root)`` under the rule for activations; the root is kept for a function of it that may follow."""
    takes_value = _takes_value(run)

    def op(x: Tensor) -> Any:
        return value.detach() if takes_value else again(x)

    rule = run.recipe.activation
    if rule is rules.identity and hasattr(again, _moved.MASKING):
        rule = partial(_where_it_counts, again)
    if _was_moved(run, again, Function(root), kind):
        run.refuse(MOVED)
        y = rules.with_gradient_of(value, run.apply("unknown", again, root, rule=rules.unmodified))
    else:
        y = run.apply("activation", op, root, rule=rule)
    _logarithms.mark_merging(run, y, root, least=2)
    run.keep_root(root)
    write_note(y, Function(root, kind, op=again))
    return mark_written(run.recipe, y, root, again)


def _where_it_counts(again: Op, op: Op, root: Tensor) -> Tensor:
    """``op(root)`` under the identity rule; a constant where a mask has left the function nothing of its root."""
    x, value = root.detach(), op(root).detach()
    y = rules.identity(op, root)
    others = (again(other) for other in (-x, 2 * x, x / 2, torch.zeros_like(x)))
    is_number = torch.stack([(other == value) | other.isnan() for other in others]).all(0)  # of what it has numbers for
    is_known = type(value) is Tensor  # a compiler's tensors have no numbers
    return y if is_known and not is_number.any() else rules.with_gradient_of(value, torch.where(is_number, 0.0, y))


# -------------------------------------------------------------------------------- sums, and casts


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
            a, b, func = b, a, _swapped(func)
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


def _with_number(run: Any, out: Tensor, x: Tensor, op: tuple[Op, Any, bool]) -> Tensor:
    """``out = op(x)``, a new tensor: ``x`` and a number."""
    if getattr(x, EXPONENTS, None) is not None:
        _shifted_exponential(out, x, _moved.callable_of(op))
    else:
        linked(out, x, op, exact=False)
    if run.asks_for_gates:
        _mark_shifted(run, out, x)
    return out


def _normalised_in_place(func: Any, args: Any) -> Tensor | None:
    """Scores that the logarithm of the sum of their exponentials is taken off in place, ``s.sub_(s.logsumexp(-1))``."""
    if len(args) != 2 or (before := _logarithms.before_logarithm(*args)) is None:
        return None
    out: Tensor = func(*args)
    _logarithms.summed(out, before, args[1], torch.sub if "sub" in func.__name__ else torch.add)
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


def _before_a_shift(func: Any, args: Any) -> Function | None:
    """What the tensor is a function of that a number is added to in place; of itself, as it is until then."""
    if len(args) != 2 or type(args[0]) is not Tensor or not args[0].requires_grad or not is_in_place(func.__name__):
        return None
    x, number = args
    if is_tensor(number) and (number.ndim or not number.is_leaf):
        return None
    return function_of(x) or Function(x.clone())


def _may_be_known(a: Tensor, b: Tensor) -> bool:
    """Whether a sum may be a function of what both depend on, or exponentials are in it: the second may be a
    normaliser, which a rule has made a constant."""
    if getattr(b, EXPONENTS, None) is not None:
        return True
    if not b.requires_grad:
        return False
    if _are_of_one(a, b) or getattr(a, EXPONENTS, None) is not None:
        return True
    return _moved.is_of_moved(a) and _moved.is_of_moved(b)


def summed(run: Any, out: Tensor, a: Tensor, b: Tensor, op: Op) -> None:
    """``out = op(a, b)``, a sum of two that depend on the input; of two functions of one tensor, a function of it."""
    if _moved.is_of_moved(a) and _moved.is_of_moved(b) and not _are_of_one(a, b):
        if _may_be_moved(run) and (both := _moved_of_one(run, a, b)) is not None:
            f, g = both
            if f.root is g.root:
                write_note(out, Function(f.root, max(f.kind, g.kind), f.exact and g.exact, _both(op, f, g)))
            elif is_shifted(a) or is_shifted(b):  # of what both were moved from, which only the graph knows
                _moved.note(out, f.root, max(f.kind, g.kind), False, _same)
    else:
        merged(out, op, a, b)
    mark_function(run, out, function_of(out))
    if hasattr(a, EXPONENTS) or hasattr(b, EXPONENTS):
        _logarithms.summed(out, a, b, op)


def mark_function(run: Any, out: Tensor, f: Function | None) -> None:
    """Mark ``out``, which was put together of functions of one tensor, as the gate that it is."""
    if f is not None and f.kind != LINEAR and f.op is not None and takes_all(run.recipe):
        mark_written(run.recipe, out, f.root, f.op)


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


GUARD = 1e-5
"""The largest number beside an exponential, as a part of what that is where its exponent is 0, that guards against a
division by zero: ``x / (exp(s) + 1e-12)`` is ``x / exp(s)``, and no product with a sigmoid."""


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


def _shifted_in_place(x: Tensor, was: Function, op: Op) -> None:
    """A number was added to ``x`` in place: what was known of it until then is known of what it was."""
    is_guarded = _is_guarded(was, op)
    write_note(x, Function(was.root, was.kind, is_guarded, then(was.op, op)))
    _notes.changed(x, op, is_exponential=is_guarded)


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """The call as it is, on constants that are detached."""
    if not PLAIN.issuperset(map(type, args)):
        args = constants(args)
    if kwargs and not PLAIN.issuperset(map(type, kwargs.values())):
        kwargs = constants(kwargs)
    return func(*args, **kwargs)


def _swapped(func: Any) -> Op:
    return lambda x, number: func(number, x)


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


def in_pieces(run: Any, out: Tensor, op: Op, *parts: Tensor, least: int = LINEAR) -> Tensor:
    """``out = op(*parts)``, chosen among them element by element: of functions of one tensor, a function of it in
    pieces, under the rule for activations if numbers were added in one. ``least``: the kind of function that it is."""
    found = function_of(merged(out, op, *parts))
    rule = run.recipe.activation
    if found is not None and found.op is not None:
        refuse_moved(run, _same, found)
    if found is not None and rule not in PARTWISE and not (found.exact and rule is rules.identity):
        root, kind, _, again = found
        if again is not None and fits(out, root):
            return as_whole(run, root, out, again, max(CURVED, kind))
    mark_function(run, out, None if found is None else found._replace(kind=max(least, found.kind)))
    return out


def plain_scaling(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A cast, a copy or a change of sign; of one-hot ids a source."""
    out = called(func, args, kwargs)
    x = args[0] if args else None
    if out is x or not is_tensor(x):
        return out
    if not x.requires_grad:
        if not x.is_floating_point():
            return of_whole_numbers(run, out, x)
        if hasattr(x, EXPONENTS):  # a logarithm that a rule has made a constant
            _notes.keep(out, x, _moved.callable_of(_with_rest(func, args[1:], kwargs)))
        return run.computed(out, x)
    if out.requires_grad:
        scaled(out, x, _with_rest(func, args[1:], kwargs))
    return out


def cast_or_name(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``x.type(dtype)``, a cast; ``x.type()`` is the name of a type."""
    return plain_scaling(run, func, args, kwargs) if len(args) > 1 or kwargs else called(func, args, kwargs)


def _with_rest(func: Any, rest: Any, kwargs: Any) -> Noted:
    if kwargs or len(rest) > 1:
        return lambda x: func(x, *rest, **kwargs)
    return (func, rest[0], True) if rest else func


def of_whole_numbers(run: Any, out: Tensor, x: Tensor) -> Tensor:
    """``out``, a copy of ``x`` or a cast; of one-hot ids a source, once it is floating-point."""
    rows = whole_of(x)
    ids = getattr(rows, ONE_HOT, None)
    if ids is None:
        _steps.keep(partial(_cast, out.dtype), out, x)
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


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype)


# ---------------------------------------------------------------------- exponentials, and quotients


def exponential(run: Any, op: Op, x: Tensor) -> Tensor:
    """``exp x``, or to another base; of a log-softmax, with the rule for softmax."""
    softmax = _softmaxes.exponential_of_normalised(run, op, x)
    if softmax is not None:  # or what is refused, unless it is a sigmoid's
        is_odds = _logarithms.mark_merging(run, softmax, x, least=2)
        is_one = _logarithms.is_normalised(x) and not is_odds
        return softmax if is_one else curved(run, softmax, x, op, EXPONENTIAL)
    is_own = run.recipe.activation not in PARTWISE
    if is_own and _weighs_scores(run, x.grad_fn):  # weights, and no scale, which would hand nothing on
        run.refuse(
            "exp of a sum with a function of scores (multiply: sigmoid(s) * exp(...) for exp(logsigmoid(s) + ...))"
        )
        weights: Tensor = run.apply("unknown", op, x, rule=rules.unmodified)
        return weights
    if is_own and run.has_logarithms and function_of(x) is None and _logarithms.has_logarithm(x):
        run.refuse("exp of a sum that logarithms are in (multiply, or sum up, what they are of)")
        y: Tensor = curved(run, run.apply("unknown", op, x, rule=rules.unmodified), x, op, EXPONENTIAL)
    else:
        y = activation(run, op, x, EXPONENTIAL)
    _factors.exponential(run, y)
    _exponentials.exponent(y, x, op)
    return y


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


def _weighs_scores(run: Any, node: Any) -> bool:
    """Whether a node adds something to a function of a product, as stick-breaking attention adds the logarithms of what
    is left to the logsigmoid of its scores: the exponential is no decay then, but the weights of the values."""
    node = _unmoved(node)
    made_of = [child for child, _ in node.next_functions if child is not None and not _factors.is_entry(child)]
    if _nodes.kind(node) not in SUMS or len(made_of) < 2:
        return False
    noted = (child.metadata.get(_nodes.FUNCTION) for child in map(_unmoved, made_of))
    return any(f is not None and _is_log_sigmoid(f) and _factors.of_node(run, f[0][0]) > 1 for f in noted)


def _is_log_sigmoid(noted: Any) -> bool:
    """Whether what is noted at a node is ``log σ(c x)``, or its negative: a softplus."""
    (root, place), kind, _, op = noted
    if kind == LINEAR or op is None:
        return False
    like = root._input_metadata[place]
    x = torch.ones(like.shape, dtype=like.dtype, device=like.device)
    slopes = [(op(x * far) - op(x * -far)) / far for far in (1, 2)]
    return torch.allclose(*slopes) and torch.allclose(op(x * 0).abs(), x * log(2)) and bool(slopes[0].any())


def _unmoved(node: Any) -> Any:
    """What a node has given another shape, or filled with numbers."""
    for _ in range(_factors.DEEPEST):
        made_of = [child for child, _ in node.next_functions if child is not None and not _factors.is_entry(child)]
        if len(made_of) != 1 or _nodes.kind(node) not in SHAPES | {"MaskedFill", "Where"}:
            break
        node = made_of[0]
    return node


def of_exponential(run: Any, op: Op, x: Tensor) -> Tensor | None:
    """``op(x)``, a power or a number over ``x``, if ``x`` is an exponential: then it is one, of another exponent."""
    found = _exponentials.exponent_of(x)
    if found is None or not _has_rules(run):
        return None
    exponent, before = found
    return exponential(run, lambda exponent: op(before(exponent)), exponent)


def plain_of_exponentials(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum over dimensions, a selection or another shape."""
    out = called(func, args, kwargs)
    x = args[0] if args else None
    if type(out) is Tensor and not out.requires_grad:
        run.computed(out, *args)
    if is_tensor(x) and getattr(x, EXPONENTS, None) is not None and is_tensor(out) and out.is_floating_point():
        rest = args[1:]
        state = _notes.SUMMED * (func.__name__ == "sum")
        _notes.keep(out, x, lambda x: func(x, *rest, **kwargs), state)
    return out


RECIPROCAL = "_lrpx_reciprocal"
"""The attribute of a constant ``op(x)`` one over ``x``, a number over it, or one over its root: ``(version, x, its
version, op, whether it is no root)``."""
STACKED = "_lrpx_stacked"
"""The attribute of what was stacked: ``(version, the parts, the dimension)``."""


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


def times_reciprocal(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b) = a · b``, one of which is one over another tensor, or over its root, that a rule has made a constant:
    if the other is a function of the same, one function, as ``x · (1 / (1 + |x|))`` is. And one over the sum of some of
    a softmax: if these are in the other, a softmax."""
    for x, one_over, product in ((a, b, op), (b, a, _swapped(op))):
        if (found := _reciprocal(one_over)) is not None:
            total, inverse, is_no_root = found

            def divided(x: Any, total: Any, by: Op = product, inverse: Op = inverse) -> Any:
                return by(x, inverse(total))

            whole = of_one(run, divided, x, total)
            return _renormalised.chosen(run, divided, x, total) if whole is None and is_no_root else whole
    return None


def _is_reciprocal(x: Tensor, op: Op) -> bool:
    """Whether ``op(x)`` is a number over ``x``, or over a scaling of it; and no root or power of that."""
    return torch.allclose(op(x / 2) / 2, op(x), rtol=torch.finfo(x.dtype).eps ** 0.75, atol=0.0)


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


def stacked(out: Tensor, parts: Any, dim: int) -> None:
    """Note what ``out`` was stacked of, along a dimension of it."""
    setattr(out, STACKED, Note((out._version, tuple(parts), dim % out.ndim)))


def parts_of(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """What ``x`` was stacked of, along this dimension; nothing, if that is not known."""
    found = getattr(x, STACKED, None)
    return found[1] if found and found[0] == x._version and found[2] == dim % x.ndim else ()


DIAGONAL = "_lrpx_diagonal"
"""The attribute of a matrix that has a vector on its diagonal and else zeros: ``(version, the vector)``."""


def diagonal(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A vector as a matrix; which may be multiplied with, as the vector itself."""
    out = called(func, args, kwargs)
    if len(args) == 1 and not kwargs and carries(out) and out.ndim == args[0].ndim + 1:
        setattr(out, DIAGONAL, Note((out._version, args[0])))
    return out


def on_diagonal(x: Tensor) -> Tensor | None:
    """The vector on the diagonal of a matrix that has been made of it."""
    found = getattr(x, DIAGONAL, None)
    return found[1] if found and found[0] == x._version else None


def quotient(run: Any, op: Op, a: Any, b: Tensor) -> Tensor | None:
    """``op(a, b) = a / b``, if that is a function of one tensor, or a softmax; its denominator is no norm then."""
    if not carries(a):
        if (
            run.has_scales
            and type(a) in (int, float)
            and (power := of_exponential(run, lambda b: op(a, b), b)) is not None
        ):
            return power
        if not is_logistic(b) or not _has_rules(run):
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
