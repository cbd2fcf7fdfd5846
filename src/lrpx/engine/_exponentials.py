"""What is made of exponentials, known by what it computes: divided by the sum of them, it is a softmax.

``exp(x) / Σ exp(x)``, and ``exp(x − log Σ exp x)``, get the rule for softmax; and ``(exp(x) @ v) / Σ exp(x)`` is
``softmax(x) @ v``, a product of the weights and the values. So each tensor that was made of exponentials carries a note
of how (``engine/_notes.py``). Here notes are written: on exponentials, and on the selections, sums and products of
them. What is read of them is beside: logarithms of sums (``engine/_logarithms.py``), quotients
(``engine/_quotients.py``), and the rule for softmax itself (``engine/_softmaxes.py``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine._gates import EXPONENTS
from lrpx.engine._notes import (
    INVERSE,
    LOG,
    NORMALISED,
    OTHERS,
    PART,
    SUMMED,
    WEIGHTED,
    Leaf,
    Made,
    Note,
    keep,
    leaves_of,
    note,
    noted,
    raised,
    unchanged,
)
from lrpx.engine._softmaxes import LEAST, PLAIN
from lrpx.engine._tensors import LIKE_ANOTHER, called, carries, detached, is_parameter, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Op = Callable[..., Any]


SUMMING = frozenset("sum mean nansum nanmean cumsum einsum norm vector_norm linalg_vector_norm linalg_norm".split())
"""Functions that sum (of what is not negative, the 1-norm does)."""
BY_INDEX = frozenset("index_add scatter_add scatter_reduce index_reduce index_put segment_reduce".split())
"""Functions that may sum what has the same index."""
ADDING = frozenset("add __add__ __radd__ add_ __iadd__".split())
"""Functions that sum two tensors."""


# -------------------------------------------------------------------------------------------------------- exponentials


def exponent(y: Tensor, x: Tensor, op: Op) -> None:
    """``y = op(x)``, an exponential; of the logarithm of a sum of them, that sum."""
    found = noted(x)
    if found is not None and found[1] == LOG:
        note(y, Made(op, found[0]), SUMMED if _rises(found[0], x) else INVERSE)
    else:
        note(y, Made(op, Leaf(x)), PART)


def exponent_of(y: Tensor) -> tuple[Tensor, Op] | None:
    """``(x, op)``, where ``y = op(x)`` is an exponential and nothing was done with it since."""
    found = noted(y)
    if found is None or found[1] != PART or len(found[0].inputs) != 1:
        return None
    (leaf,) = found[0].inputs
    is_same = isinstance(leaf, Leaf) and not leaf.is_value and unchanged((leaf,)) and leaf.tensor.shape == y.shape
    return (leaf.tensor, found[0].call) if isinstance(leaf, Leaf) and is_same else None


def _rises(made: Made, x: Tensor) -> bool:
    """Whether ``x``, the logarithm of a sum of exponentials times a number, rises with them."""
    return bool((raised(made) >= x.detach()).all())


def weighs(y: Tensor, x: Tensor, is_scaling: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether ``y`` is the exponential of ``x`` itself or a scaling of it, masked perhaps, by which ``x`` may be pooled
    as by a weight (SoftPool, smooth maxima). ``is_scaling(z, x)`` says whether ``z`` is one."""
    found = noted(y)
    if found is None or found[1] != PART or found[0].is_bent:
        return False
    leaves = leaves_of(found[0])
    return len(leaves) == 1 and unchanged(leaves) and (leaves[0].tensor is x or is_scaling(leaves[0].tensor, x))


def is_weighed(x: Tensor) -> bool:
    """Whether a tensor is made of exponentials times other constants, as attention to exponentials of values is."""
    found = noted(x)
    return found is not None and found[0].is_weighed


# ------------------------------------------------------------------------------------------------- selections and sums


class _Slot:
    """In the place of a tensor among the arguments of a call: which of its inputs it is."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _filled(value: Any, inputs: Sequence[Any]) -> Any:
    if type(value) is _Slot:
        return inputs[value.number]
    if type(value) in (tuple, list):
        return type(value)(_filled(each, inputs) for each in value)
    return value


def _slots(value: Any, changed: Any, found: list[tuple[Made, int]]) -> Any:
    """An argument of a call with a slot for each tensor that is made of exponentials, which is appended to ``found``;
    ``changed`` is what the call has changed in place. No function in a function: it would hold what it is given until
    the garbage collector comes, and the roots of functions are held weakly.

    Raises:
        LookupError: a tensor that depends on the input is made of others.
    """
    if type(value) in (tuple, list):
        return type(value)(_slots(each, changed, found) for each in value)
    if type(value) is Tensor and (value.requires_grad or hasattr(value, EXPONENTS)):
        known: tuple[Any, ...] = getattr(value, EXPONENTS, None) or (-1,)
        is_changed = value is changed and known[0] == value._version - 1
        if known[0] != value._version and not is_changed:
            raise LookupError
        found.append((Made(torch.clone, known[1]) if is_changed else known[1], known[2]))
        return _Slot(len(found) - 1)
    return value.detach() if is_parameter(value) else value


def keep_exponents(func: Any, out: Any, args: Any, kwargs: Any, least: int = PART) -> None:
    """``out = func(*args, **kwargs)``, a shape, a selection, a sum, or several put together: noted, if all that depends
    on the input in its arguments is made of exponentials."""
    name, found = func.__name__, list[tuple[Made, int]]()
    if exponent_of(out) is not None:  # noted by its handler
        return
    if name in LIKE_ANOTHER and noted(args[0]) is None:
        return
    if name.endswith("_norm") and name not in SUMMING:
        return
    if name[:-1] in BY_INDEX and not hasattr(out, EXPONENTS) and any(hasattr(each, EXPONENTS) for each in args[1:]):
        # in place, of new zeros; what else there was is not known any more
        func, args = getattr(torch, name[:-1]), (torch.zeros_like(out), *args[1:])
        if not torch.equal(func(*detached(*args), **kwargs), out):
            return

    changed = out if name.endswith("_") else None
    try:
        made_of = _slots(tuple(args), changed, found)
        named = {key: _slots(value, changed, found) for key, value in kwargs.items()}
    except LookupError:
        return
    states = {state for _, state in found}
    if not found or (states & {LOG, NORMALISED} and len(found) > 1):
        return
    if LOG in states and name in ("amax", "max"):  # what is taken off for its size normalises nothing
        return
    if "dropout" in name:
        if not torch.equal(out, args[0]):
            return
        func, made_of, named = torch.clone, made_of[:1], {}

    def again(*inputs: Any) -> Any:
        return func(*_filled(made_of, inputs), **{key: _filled(value, inputs) for key, value in named.items()})

    made, state = Made(again, *(each for each, _ in found)), max(least, *states)
    if len(found) == 1 and name in ADDING:
        made.is_weighed |= any(_is_weight(each) for each in args if noted(each) is None)
    if len(found) > 1 and name in ADDING:
        state = max(state, SUMMED)
    elif len(found) > 1 and "sub" in name and state != WEIGHTED:
        return
    elif name in SUMMING or (name.removesuffix("_") in BY_INDEX and _sums_by_index(name, args, kwargs)):
        state = max(state, SUMMED)
    if isinstance(out, Tensor):
        note(out, made, state)
    elif isinstance(out, (tuple, list)):
        for i, each in enumerate(out):
            if isinstance(each, Tensor) and each.is_floating_point():
                note(each, Made(partial(_element, i), made), state)


def _is_weight(summand: Any) -> bool:
    """Whether a constant that is added to a sum of exponentials is none of 0 and 1, nor a guard."""
    summand = torch.as_tensor(summand)
    return not bool(((summand.abs() <= LEAST) | (summand == 1)).all())


def _sums_by_index(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call of one of :data:`BY_INDEX` sums."""
    if name.startswith("index_put"):
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    how = kwargs.get("reduce", next((each for each in args if isinstance(each, str)), "sum"))
    return how in ("sum", "mean")


def _element(i: int, values: Any) -> Any:
    return values[i]


def plain_of_exponentials(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum over dimensions, a selection or another shape."""
    out = called(func, args, kwargs)
    x = args[0] if args else None
    if type(out) is Tensor and not out.requires_grad:
        run.computed(out, *args)
    if is_tensor(x) and getattr(x, EXPONENTS, None) is not None and is_tensor(out) and out.is_floating_point():
        rest = args[1:]
        state = SUMMED * (func.__name__ == "sum")
        keep(out, x, lambda x: func(x, *rest, **kwargs), state)
    return out


LAYERED = "lrpx layer of exponentials"
"""What the node of the graph is marked with that made a layer of exponentials, under a rule for layers."""


def layered(run: Any, func: Any, out: Any, args: Any, kwargs: Any) -> None:
    """``out = func(*args, **kwargs)``, a product with a constant: of exponentials, a sum of them with weights."""
    if not isinstance(out, Tensor) or not carries(out) or noted(out) is not None:
        return
    given = [(x, noted(x)) for x in (*args, *kwargs.values())]
    found = [each for _, each in given if each is not None]
    if len(found) != 1 or found[0][1] > WEIGHTED:
        return
    constants = [x for x, each in given if isinstance(x, Tensor) and each is None]
    adds_up = len(constants) == 1 and _adds_up(constants[0])
    if run.recipe.linear is not rules.unmodified and not adds_up:
        _mark_layer(out)
    if not (found[0][0].terms <= OTHERS or adds_up):  # a layer of a product with values
        return
    if run.recipe.linear is rules.unmodified:
        keep_exponents(func, out, args, kwargs, WEIGHTED)
        if not adds_up and (made := noted(out)) is not None:
            made[0].is_weighed = True
    elif adds_up:
        keep_exponents(func, out, args, kwargs, SUMMED)


def _mark_layer(out: Any) -> Any:
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[LAYERED] = True
    return out


def _adds_up(constant: Any) -> bool:
    """Whether a matrix has but one number in it, and zeros: it adds up some of what it is multiplied with."""
    if not isinstance(constant, Tensor) or not constant.is_floating_point() or not constant.numel():
        return False
    if constant.layout is not torch.strided:
        constant = constant.coalesce().values() if constant.layout is torch.sparse_coo else constant.values()
    return bool(((constant == 0) | (constant == constant.max())).all())


# ------------------------------------------------------------------------------------------------------------ products

DIRECT = "_lrpx_weighted"
"""The attribute of a matrix product of exponentials and values: ``(version, exponentials, their version, again)``;
``again(weights)`` is the product, under the recipe's rule, with these in the place of the exponentials."""


def multiplied(run: Any, op: Op, out: Any, a: Any, b: Any, again: Op | None = None) -> Any:
    """``out = op(a, b)``, linear in each: a product under the recipe's rule, of exponentials and others perhaps, before
    a division by the sum of the exponentials.

    Args:
        run: the run.
        op: the product.
        out: its result.
        a: one factor.
        b: the other.
        again: the product with other weights than ``a``, under the recipe's rule, if it is linear in ``a`` as an
            attention's is.
    """
    one, other = noted(a), noted(b)
    if (one is None and other is None) or not carries(out):
        return out
    states = [each[1] for each in (one, other) if each is not None]
    if max(states) > WEIGHTED or states.count(WEIGHTED) == 2:
        return out
    if one is not None and other is not None:
        made = Made(op, one[0], other[0])
        made.terms = _terms_of_product(one[0], other[0])
        note(out, made, max(states))
        return out
    x, found = (a, one) if one is not None else (b, other)
    value = b if one is not None else a
    assert found is not None
    if found[1] == WEIGHTED and carries(value):  # of three factors
        return out
    state = WEIGHTED
    if not carries(value):
        constant = value.detach() if isinstance(value, Tensor) else value
        made = Made((lambda x: op(x, constant)) if one is not None else (lambda x: op(constant, x)), found[0])
        if _is_nothing(constant):
            made.terms = frozenset()
        is_same = isinstance(constant, Tensor) and constant.numel() and bool((constant == constant.flatten()[0]).all())
        made.is_weighed |= not (is_same or _adds_up(constant))
        if found[1] == PART and is_same:
            state = SUMMED
        elif run.recipe.linear is not rules.unmodified:
            if found[1] > WEIGHTED or not _adds_up(constant):
                return _mark_layer(out)
            state = max(found[1], SUMMED)
    else:
        leaf = Leaf(value, is_value=True, of_sum=found[1] == SUMMED)
        made = Made(op, *((found[0], leaf) if one is not None else (leaf, found[0])))
        made.terms = _terms_of_product(found[0], leaf)
    note(out, made, state)
    if again is not None and found[1] == PART and one is not None:
        setattr(out, DIRECT, Note((out._version, x, x._version, again)))
    return out


def _terms_of_product(one: Made, other: Made) -> frozenset[str]:
    """Of what the product of two is a sum, one of which may be exponentials alone, or a value."""
    if not (one.terms and other.terms):
        return frozenset()
    return one.terms if other.terms == OTHERS else other.terms if one.terms <= OTHERS else one.terms | other.terms


def multiplied_by_constant(run: Any, out: Tensor, constant: Any) -> None:
    """``out`` is what was made of exponentials, times a constant or over it: nothing, if that is zeros, as a state
    begins with."""
    if (found := noted(out)) is None:
        return
    if _is_nothing(constant):
        found[0].terms = frozenset()
    elif run.recipe.softmax not in PLAIN and isinstance(constant, Tensor) and constant.numel() > 1:
        found[0].is_weighed |= not _adds_up(constant.to(out.dtype))


def _is_nothing(constant: Any) -> bool:
    return isinstance(constant, Tensor) and not constant.any()
