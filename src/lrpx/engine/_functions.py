"""Functions of one tensor that a model writes out as many operations, known by what they compute.

An element-wise function of a tensor gets the rule for activations once, as a whole, whether it is one torch function
or many: ``x · ½(1 + erf(x/√2))`` is GELU, no product of two things, and ``x · sigmoid(x)`` is SiLU; ``silu(a) · b`` is
a product. So each tensor that was made of one other, its root, by casts, scalings, numbers that are added and
element-wise functions, knows it. Where two of one root are multiplied or divided, the result is a function of that
root; and so is a function of a function, ``log(1 + exp x)``. A sum of functions of one root needs no rule, for each
hands on what it is given; a number that is added after the last of them is a constant.

``exp(x) / Σ exp(x)`` and the exponential of a log-softmax get the rule for softmax.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _factors
from lrpx.engine._gates import EXPONENTIAL as OF_EXPONENTS
from lrpx.engine._gates import GATE, WEAK, gate_strength, mark_gate, mark_written, put_gate, takes_all, weakest_gate
from lrpx.engine._tensors import PLAIN, carries, constants, is_in_place, is_parameter, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]
    Noted = Op | tuple[Op, Any, bool]
    """A function; or one of two arguments, the other of them, and whether that is the second: sooner made than a
    closure."""


class Note(tuple[Any, ...]):
    """What is noted on a tensor. A tensor that the model returns may be copied and saved: without what was noted."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, ()  # what torch.load takes, and is false


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


def _function(x: Tensor) -> Function | None:
    """What ``x`` is a function of, if that is known and still there."""
    found = vars(x).get(FUNCTION)
    if not found or x._version != found[0]:
        return None
    root = found[1]()
    if root is None or root._version != found[2]:
        return None
    return Function(root, found[3], found[4], None if found[5] is None else _callable(found[5]))


def _write(out: Tensor, f: Function) -> None:
    """Note on a tensor what it is a function of."""
    root = f.root
    is_kept = not f.exact or f.kind == EXPONENTIAL
    setattr(out, FUNCTION, Note((out._version, (lambda: root) if is_kept else ref(root), root._version, *f[1:])))


def _callable(op: Noted) -> Op:
    if not isinstance(op, tuple):
        return op
    func, other, is_second = op
    return (lambda x: func(x, other)) if is_second else lambda x: func(other, x)


def _then(before: Op | None, op: Noted) -> Op:
    last = _callable(op)
    return last if before is None else lambda root: last(before(root))


def linked(out: Tensor, x: Tensor, op: Noted, kind: int = LINEAR, exact: bool = True) -> Tensor:
    """``out``, a new tensor, noted as ``op(x)``, an element-wise function of ``x``."""
    if out is not x:
        if getattr(x, FUNCTION, None) is None:  # nearly always
            root = ref(x) if exact and kind != EXPONENTIAL else lambda: x  # as _write() has it
            out.__dict__[FUNCTION] = Note((0, root, x._version, kind, exact, op))
            return out
        f = _function(x) or Function(x)
        _write(out, Function(f.root, max(kind, f.kind), exact and f.exact, _then(f.op, op)))
    return out


def curved(run: Any, out: Tensor, x: Tensor, op: Noted, kind: int = CURVED) -> Tensor:
    """``out``, a new tensor, noted as ``op(x)``, no scaling; the root is kept for a function of it that may follow."""
    f = _function(x)
    run.roots.append(x if f is None else f.root)
    return linked(out, x, op, kind)


def scaled(out: Tensor, x: Tensor, op: Noted) -> Tensor:
    """``out = op(x)``, where ``op`` scales, by constants, or casts."""
    linked(out, x, op)
    if getattr(x, EXPONENTS, None) is not None:
        _keep_exponents(out, x, op)
    return out


NORMALISER = "_lrpx_normaliser"
"""The attribute of a constant that divides, and was made of the input: a deviation, or one over it."""


def normaliser(value: Tensor) -> Tensor:
    """``value``, what divides: noted, if a rule has made it a constant."""
    if not carries(value):
        setattr(value, NORMALISER, True)
    return value


def scaled_by(out: Tensor, x: Tensor, constant: Any, op: Noted) -> Tensor:
    """``out = op(x)``, ``x`` times a constant or over it: a scaling, or a norm, which is something new."""
    if is_tensor(constant) and (known := constant.__dict__) and (NORMALISER in known or RECIPROCAL in known):
        _keep_exponents(out, x, op)
        return out
    return scaled(out, x, op)


def copied(out: Tensor, x: Tensor) -> None:
    """``out`` is a copy of ``x``, whose attributes it has."""
    linked(out, x, torch.clone)
    if _noted(x, EXPONENTS) is None:
        vars(out).pop(EXPONENTS, None)
    else:
        _keep_exponents(out, x, torch.clone)


def rooted(run: Any, value: Tensor, x: Tensor, copy: Tensor) -> None:
    """``value`` will be written into the place of ``x``: what it is a function of is then the copy of that."""
    if (found := _function(value)) is not None and found.root is x:
        _write(value, found._replace(root=copy))
        run.roots.append(copy)


def moved(x: Tensor, value: Tensor) -> None:
    """``value`` was written into the place of ``x``."""
    if (found := _function(value)) is not None:
        _write(x, found)
    if exponents := vars(value).get(EXPONENTS):
        setattr(x, EXPONENTS, Note((x._version, *exponents[1:])))


# ------------------------------------------------------------------------ element-wise functions


def activation(run: Any, op: Op, x: Tensor, kind: int = CURVED) -> Tensor:
    """``op(x)``, an element-wise function, under the recipe's rule; as a whole with what ``x`` is a function of."""
    found = _function(x)
    if found is not None and not (found.exact and found.kind == LINEAR) and run.recipe.activation not in PARTWISE:
        value = op(x.detach())
        if _fits(value, found.root):
            return _whole(run, found.root, value, _then(found.op, op), max(kind, found.kind))
    y = curved(run, run.apply("activation", op, x), x, op, kind)
    _keep_exponents(y, x, op)
    return y


def _fits(value: Tensor, root: Tensor) -> bool:
    """Whether ``value`` can be an element-wise function of ``root``."""
    return value.shape == root.shape and value.is_floating_point() and root.is_floating_point()


PARTWISE = (rules.unmodified, rules.constant)
"""Rules that give a function of a function the same, as a whole or part by part."""


def is_shifted(x: Tensor) -> bool:
    """Whether ``x`` is a function of another, of which it does not hand on all: a number was added."""
    found = _function(x)
    return found is not None and not found.exact


def is_logistic(x: Tensor) -> bool:
    """Whether ``x`` is an exponential and a number, as the denominator of a sigmoid is; and no norm."""
    found = _function(x)
    return found is not None and found.kind == EXPONENTIAL and not found.exact


def of_one(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b)``, a product or quotient, under the rule for activations, if both are functions of one tensor."""
    if not _are_of_one(a, b):
        return None
    f, g = _function(a) or Function(a), _function(b) or Function(b)
    if f.root is not g.root or not _has_rules(run):
        return None
    value = op(a.detach(), b.detach())
    if not _fits(value, f.root):
        return None
    return _whole(run, f.root, value, _both(op, f, g), max(CURVED, f.kind, g.kind))


def _are_of_one(a: Tensor, b: Tensor) -> bool:
    """Whether two may be functions of one tensor, at a glance at what is noted."""
    of_a, of_b = getattr(a, FUNCTION, None), getattr(b, FUNCTION, None)
    if not (of_a or of_b):  # nearly always
        return False
    root, other = of_a and of_a[1](), of_b and of_b[1]()
    return other is a or (root is not None and (root is other or root is b))


def _both(op: Op, f: Function, g: Function) -> Op:
    of_f, of_g = f.op, g.op
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
    _write(y, Function(root, kind, op=again))
    return mark_written(run.recipe, y, root, again)


# -------------------------------------------------------------------------------- sums, and casts


def plain_sum(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``a + b`` or ``a − b``, or with a number: its plain gradient is right."""
    if kwargs and (two := _two_of(func, args, kwargs)) is not None:
        func, args, kwargs = *two, {}
    if len(args) == 2 and type(args[0]) is type(args[1]) is Tensor and not kwargs:  # nearly always
        a, b = args
        if a.ndim and b.ndim:
            out = func(a, b)
            if not out.requires_grad:
                run.computed_ids(out, a, b)
            elif a is b:
                return out if out is a else scaled(out, a, lambda x: func(x, x))
            elif out is not a and a.requires_grad and _may_be_known(a, b):
                _summed(out, a, b, func)
            return out
    was = _before_a_shift(func, args)
    out = _called(func, args, kwargs)
    if len(args) == 2 and not kwargs and carries(out):
        a, b = args
        if not is_tensor(a):
            a, b, func = b, a, _swapped(func)
        if not is_tensor(b) or (b.ndim == 0 and b.is_leaf):  # a number, or the leaf that a ledger makes of it
            number = b.detach() if is_tensor(b) else b
            if was is not None and out is a:
                _shifted_in_place(a, was, lambda x: func(x.clone(), number))
            else:
                op: Noted = func, number, True
                linked(out, a, op, exact=False)
                if getattr(a, EXPONENTS, None) is not None:
                    _keep_exponents(out, a, op)
            _mark_shifted(run, out, a)
        elif a is b:
            return out if out is a else scaled(out, a, lambda x: func(x, x))
        elif out is not a and a.requires_grad and b.requires_grad:
            _summed(out, a, b, func)
    elif type(out) is Tensor and not out.requires_grad:
        run.computed_ids(out, *args, *kwargs.values())
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
    return _function(x) or Function(x.clone())


def _may_be_known(a: Tensor, b: Tensor) -> bool:
    """Whether a sum may be a function of what both depend on, or the second is a normaliser, which a rule may have
    made a constant."""
    return (b.requires_grad and _are_of_one(a, b)) or getattr(b, LOGSUM, None) is not None


def _summed(out: Tensor, a: Tensor, b: Tensor, op: Op) -> None:
    """``out = op(a, b)``, a sum of two that depend on the input."""
    merged(out, a, b, op)
    normaliser = _noted(b, LOGSUM)
    if normaliser is not None and normaliser[0] is a and "sub" in op.__name__:
        _note(out, NORMALISED, *normaliser)


def _mark_shifted(run: Any, out: Tensor, x: Tensor) -> None:
    """``out`` is ``x`` and a number: perhaps of one sign now, as ``1 + tanh(x)`` is."""
    if takes_all(run.recipe) and gate_strength(x) == WEAK:
        found = _function(out)
        if found is not None and found.kind != LINEAR and found.op:
            mark_written(run.recipe, out, found.root, found.op)


def _shifted_in_place(x: Tensor, was: Function, op: Op) -> None:
    """A number was added to ``x`` in place: what was known of it until then is known of what it was."""
    _write(x, Function(was.root, was.kind, False, _then(was.op, op)))
    version = x._version
    exponents = vars(x).get(EXPONENTS)
    if exponents and exponents[0] == version - 1:
        setattr(x, EXPONENTS, Note((version, *exponents[1:3], _then(exponents[3], op), exponents[4])))


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    if not kwargs and PLAIN.issuperset(map(type, args)):  # nearly always
        return func(*args)
    return func(*constants(args), **constants(kwargs))


def _swapped(func: Any) -> Op:
    return lambda x, number: func(number, x)


def merged(out: Tensor, a: Tensor, b: Tensor, op: Op) -> Tensor:
    """``out = op(a, b)``, a sum of two or a selection among them: a function of what both are functions of."""
    f, g = _function(a), _function(b)
    if (f is None and g is None) or is_parameter(a) or is_parameter(b):
        return out
    f, g = f or Function(a), g or Function(b)
    if f.root is g.root:
        _write(out, Function(f.root, max(f.kind, g.kind), f.exact and g.exact, _both(op, f, g)))
    return out


def plain_where(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A selection between two; of functions of one tensor, a function in pieces."""
    if kwargs.keys() <= {"condition", "input", "other"} and len(args) + len(kwargs) == 3:
        args, kwargs = (*args, *(kwargs[name] for name in ("condition", "input", "other") if name in kwargs)), {}
    out = _called(func, args, kwargs)
    if run.asks_for_gates:
        put_gate(run.recipe, out, weakest_gate((*args, *kwargs.values())))
    if not any(isinstance(each, Tensor) for each in args[1:]) and args[1:] == (1, 0):
        return of_whole_numbers(run, out, args[0])
    run.computed_ids(out, *args, *kwargs.values())
    if run.has_scales:
        keep_exponents(func, out, args, kwargs)
    if len(args) == 3 and carries(args[1]) and carries(args[2]):
        where = args[0]
        found = _function(merged(out, args[1], args[2], lambda a, b: func(where, a, b)))
        rule = run.recipe.activation
        if found is not None and rule not in PARTWISE and not (found.exact and rule is rules.identity):
            root, kind, _, again = found
            if again is not None and _fits(out, root):
                return _whole(run, root, out, again, max(CURVED, kind))
    return out


def plain_scaling(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A cast, a copy or a change of sign; of one-hot ids a source."""
    out = _called(func, args, kwargs)
    x = args[0] if args else None
    if out is x or not is_tensor(x):
        return out
    if not x.requires_grad:
        return out if x.is_floating_point() else of_whole_numbers(run, out, x)
    if out.requires_grad:
        scaled(out, x, _with_rest(func, args[1:], kwargs))
        if getattr(x, NORMALISED, None) is not None and (normalised := _noted(x, NORMALISED)) is not None:
            _note(out, NORMALISED, *normalised)
    return out


def _with_rest(func: Any, rest: Any, kwargs: Any) -> Noted:
    if kwargs or len(rest) > 1:
        return lambda x: func(x, *rest, **kwargs)
    return (func, rest[0], True) if rest else func


def of_whole_numbers(run: Any, out: Tensor, x: Tensor) -> Tensor:
    """``out``, a copy of ``x`` or a cast; of one-hot ids a source, once it is floating-point."""
    rows = x if x._base is None else x._base
    ids = vars(rows).get(ONE_HOT)
    if ids is None:
        if not out.is_floating_point():
            run.copied_ids(out, x)
        return out
    if not out.is_floating_point():
        if x is rows:
            setattr(out, ONE_HOT, ids)
        return out
    leaf: Tensor = run.source(rows, ids, rows.to(out), "one_hot")
    return leaf if x is rows else leaf.as_strided(x.shape, x.stride(), x.storage_offset())


# ------------------------------------------------------------------------------------- softmax

EXPONENTS = "_lrpx_exponents"
"""The attribute of an exponential, of its sum, and of the reciprocal of that: ``(version, z, its version, op, state)``,
where ``op(z)`` is the tensor."""
PART, SUMMED, INVERSE = range(3)
"""What has been done with exponentials."""
SUMMING = frozenset("sum mean nansum nanmean cumsum einsum norm vector_norm linalg_vector_norm linalg_norm".split())
"""Functions that sum (of what is not negative, the 1-norm does)."""
RECIPROCAL = "_lrpx_reciprocal"
"""The attribute of a constant ``op(x)`` one over ``x``, or a number over it: ``(version, x, its version, op)``."""
STACKED = "_lrpx_stacked"
"""The attribute of what was stacked: ``(version, the parts, the dimension)``."""
WEIGHTED = "_lrpx_weighted"
"""The attribute of a matrix product of exponentials and values: ``(version, exponentials, their version, again)``;
``again(weights)`` is the product, under the recipe's rule, with these in the place of the exponentials; None where that
is no softmax's product."""
LOGSUM = "_lrpx_logsumexp"
"""The attribute of ``log Σ exp x``: ``(version, x, its version, dim)``."""
NORMALISED = "_lrpx_log_softmax"
"""The attribute of ``x − log Σ exp x``: the same."""


def _note(out: Tensor, attribute: str, x: Tensor, *facts: Any) -> None:
    setattr(out, attribute, Note((out._version, x, x._version, *facts)))


def _noted(x: Tensor, attribute: str) -> tuple[Any, ...] | None:
    """The tensor and the facts that were noted, if neither was changed in place since."""
    found = vars(x).get(attribute)
    if not found or found[0] != x._version or found[1]._version != found[2]:
        return None
    return found[1], *found[3:]


def exponential(run: Any, op: Op, x: Tensor) -> Tensor:
    """``exp x``, or to another base; of a log-softmax, with the rule for softmax."""
    normalised = _noted(x, NORMALISED)
    if normalised is not None:
        scores, dim = normalised
        return _softmax(run, op(x.detach()), scores, lambda scores: torch.softmax(scores, dim))
    y = _factors.exponential(run, activation(run, op, x, EXPONENTIAL))
    _note(y, EXPONENTS, x, op, PART)
    return y


def logsumexp(out: Tensor, x: Tensor, dim: Any) -> Tensor:
    """``out``, noted as ``log Σ exp x``."""
    _note(out, LOGSUM, x, dim)
    return out


def stands_for(leaf: Tensor, constant: Tensor) -> None:
    """The leaf of a ledger is what the constant in whose place it stands is noted as."""
    if (found := _noted(constant, LOGSUM)) is not None:
        _note(leaf, LOGSUM, *found)


def log_softmax(out: Tensor, x: Tensor, dim: int) -> Tensor:
    """``out``, noted as ``x − log Σ exp x``."""
    _note(out, NORMALISED, x, dim)
    return out


def _keep_exponents(out: Tensor, x: Tensor, op: Noted, state: int = PART) -> None:
    found = _noted(x, EXPONENTS)
    if found is not None:
        exponents, before, was = found
        _note(out, EXPONENTS, exponents, _then(before, op), max(state, was))


class _Slot(tuple[Any, ...]):
    """In the place of a tensor among the arguments of a call: the function that makes it of its exponents."""

    __slots__ = ()


def _filled(value: Any, x: Tensor) -> Any:
    """The arguments of a call whose tensors are made of ``x``."""
    if type(value) is _Slot:
        return value[0](x)
    if type(value) in (tuple, list):
        return type(value)(_filled(each, x) for each in value)
    return value


def keep_exponents(func: Any, out: Any, args: Any, kwargs: Any) -> None:
    """``out = func(*args, **kwargs)``, a shape, a selection, a sum, or several put together: noted, if all that depends
    on the input in its arguments is made of exponentials of one tensor."""
    name, found = func.__name__, list[tuple[Any, ...]]()

    def slots(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(slots, value))
        if type(value) is Tensor and (value.requires_grad or EXPONENTS in vars(value)):
            note: tuple[Any, ...] = vars(value).get(EXPONENTS) or (-1,)
            is_changed = value is out and name.endswith("_") and note[0] == value._version - 1
            if (note[0] != value._version and not is_changed) or note[1]._version != note[2]:
                raise LookupError
            found.append(note)
            op = note[3]
            return _Slot(((lambda x: op(x).clone()) if is_changed else op,))
        return value

    try:
        made_of, named = slots(tuple(args)), {key: slots(value) for key, value in kwargs.items()}
    except LookupError:
        return
    x = found[0][1] if found else None
    if x is None or any(note[1] is not x for note in found) or ("dropout" in name and not torch.equal(out, args[0])):
        return

    def again(x: Tensor) -> Any:
        if "dropout" in name:
            return _filled(made_of[0], x)
        return func(*_filled(made_of, x), **{key: _filled(value, x) for key, value in named.items()})

    state = max(max(note[4] for note in found), SUMMED * (name in SUMMING))
    is_one = isinstance(out, Tensor)
    for i, each in enumerate((out,) if is_one else out if isinstance(out, (tuple, list)) else ()):
        if isinstance(each, Tensor) and each.is_floating_point():
            _note(each, EXPONENTS, x, again if is_one else partial(_element, again, i), state)
            if state == INVERSE:
                setattr(each, GATE, OF_EXPONENTS)


def _element(op: Op, i: int, x: Tensor) -> Any:
    return op(x)[i]


def keep_inverse(out: Tensor, x: Tensor, op: Op) -> Tensor:
    """``out = op(x)``, a reciprocal; of a sum of exponentials, a softmax's."""
    if not carries(out):
        _note(out, RECIPROCAL, x, op)
    found = _noted(x, EXPONENTS)
    if found is not None and found[2] == SUMMED:
        _keep_exponents(out, x, op, INVERSE)
        setattr(out, GATE, OF_EXPONENTS)  # what is made of it is looked at, as what is made of a gate is
    return out


def divided(out: Tensor, a: Tensor, number: float) -> Tensor:
    """``out = a · number``; of a reciprocal, a number over what it was of."""
    found = _noted(a, RECIPROCAL)
    if found is not None:
        x, op = found
        _note(out, RECIPROCAL, x, lambda x: op(x) * number)
    return out


def one_over(b: Any) -> Tensor | None:
    """``x``, where ``b`` is ``1 / x``, which a rule has made a constant: to divide by that is a product."""
    found = _noted(b, RECIPROCAL) if is_tensor(b) else None
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


def is_sum_of_exponentials(x: Tensor) -> bool:
    """Whether that is what a tensor is, or a scaling of it."""
    found = _noted(x, EXPONENTS)
    return found is not None and found[2] == SUMMED


def keep_weighted(out: Tensor, a: Any, b: Any, again: Op | None) -> Tensor:
    """``out = a @ b``, a product under the recipe's rule; of exponentials and others, perhaps before a division by
    their sum. ``again(a)``: the product with other weights, if that may be an attention's."""
    one, other = _noted(a, EXPONENTS), _noted(b, EXPONENTS)
    if one is not None and one[2] == PART and not carries(b) and type(b) is Tensor and (b == b.flatten()[0]).all():
        b = b.detach()
        _keep_exponents(out, a, lambda a: a @ b, SUMMED)
    elif (one is None) != (other is None) and (one or other or (0, 0, 1))[2] == PART and carries(out):
        _note(out, WEIGHTED, a if one is not None else b, again if one is not None else None)
    return out


def times_inverse(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b) = a · b``, if that is a softmax: exponentials times the reciprocal of their sum."""
    if not (is_tensor(a) and is_tensor(b)):
        return None
    one, other = _noted(a, EXPONENTS), _noted(b, EXPONENTS)
    if one is None or other is None or one[0] is not other[0] or {one[2], other[2]} != {PART, INVERSE}:
        return None
    left, right = one[1], other[1]
    return _softmax(run, op(a.detach(), b.detach()), one[0], lambda x: op(left(x), right(x)))


def plain_of_exponentials(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum over dimensions, a selection or another shape."""
    out = _called(func, args, kwargs)
    x = args[0] if args else None
    if type(out) is Tensor and not out.requires_grad:
        run.computed_ids(out, *args)
    if is_tensor(x) and x.__dict__ and is_tensor(out) and out.is_floating_point():
        rest = args[1:]
        _keep_exponents(out, x, lambda x: func(x, *rest, **kwargs), SUMMED * (func.__name__ == "sum"))
        if (normaliser := _noted(x, LOGSUM)) is not None:
            _note(out, LOGSUM, *normaliser)
    return out


def quotient(run: Any, op: Op, a: Any, b: Tensor) -> Tensor | None:
    """``op(a, b) = a / b``, if that is a softmax, or a function of one tensor; its denominator is no norm then."""
    if not carries(a):
        if not is_logistic(b) or not _has_rules(run):
            return None
        return mark_gate(run.recipe, "sigmoid", activation(run, lambda b: op(a, b), b))
    numerator, denominator = _noted(a, EXPONENTS), _noted(b, EXPONENTS)
    if numerator is not None and denominator is not None:
        (x, above, state), (y, below, of_divisor) = numerator, denominator
        if x is y and of_divisor == SUMMED and state == PART:
            return _softmax(run, op(a.detach(), b.detach()), x, lambda x: op(above(x), below(x)))
    elif denominator is not None and denominator[2] == SUMMED and (weighted := _noted(a, WEIGHTED)) is not None:
        exponentials, again = weighted
        is_sum = (_noted(exponentials, EXPONENTS) or (None,))[0] is denominator[0]
        if is_sum and run.recipe.softmax is not rules.constant:
            if again is None or b.shape != (*exponentials.shape[:-1], 1):
                run.refuse(
                    "division, of values that exponentials were multiplied with, by the sum of these; divide first"
                )
            else:
                weights = quotient(run, op, exponentials, b)
                return rules.with_gradient_of(op(a.detach(), b.detach()), again(weights))
    return of_one(run, op, a, b)


def _softmax(run: Any, value: Tensor, scores: Tensor, again: Op) -> Tensor:
    """``value = again(scores)``, a softmax, under the recipe's rule for it."""
    is_constant = run.recipe.softmax is rules.constant
    y = run.apply("softmax", lambda x: value.detach() if is_constant else again(x), scores)
    return mark_gate(run.recipe, "softmax", y if is_constant else rules.with_gradient_of(value, y))
