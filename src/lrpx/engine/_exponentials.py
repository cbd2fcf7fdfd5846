"""What is made of exponentials, known by what it computes: divided by the sum of them, it is a softmax.

``exp(x) / Σ exp(x)``, and ``exp(x − log Σ exp x)``, get the rule for softmax; and ``(exp(x) @ v) / Σ exp(x)`` is
``softmax(x) @ v``, a product of the weights and the values. So each tensor that was made of exponentials carries a note
of how: a call, and the tensors that it was called with, back to the exponents and to the values that exponentials were
multiplied with. There may be several of both, as where attention is computed in pieces, or a state decays.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from math import e
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import _kernels, rules
from lrpx.engine import _factors, _roles
from lrpx.engine._gates import EXPONENTIAL, EXPONENTS, GATE, gate_strength, mark_gate
from lrpx.engine._nodes import LINEAR, SCALES, SHAPES, kind
from lrpx.engine._tensors import LIKE_ANOTHER, carries, detached, is_parameter, is_tensor, single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lrpx.errors import MethodError
    from lrpx.recipes import Recipe

    Op = Callable[..., Any]


class Note(tuple[Any, ...]):
    """What is noted on a tensor. A tensor that the model returns may be copied and saved: without what was noted."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, ()  # what torch.load takes, and is false


PART, SUMMED, WEIGHTED, INVERSE, LOG, NORMALISED = range(6)
"""What has been done with exponentials: nothing that matters; they were summed, or multiplied with values; a sum of
them was inverted, its logarithm was taken, and was taken off scores."""
SUMMING = frozenset("sum mean nansum nanmean cumsum einsum norm vector_norm linalg_vector_norm linalg_norm".split())
"""Functions that sum (of what is not negative, the 1-norm does)."""
BY_INDEX = frozenset("index_add scatter_add scatter_reduce index_reduce index_put segment_reduce".split())
"""Functions that may sum what has the same index."""
ADDING = frozenset("add __add__ __radd__ add_ __iadd__".split())
"""Functions that sum two tensors."""

_numbers = count()


WITH_VALUES, OTHERS = frozenset({"with values"}), frozenset({"others"})
"""Terms of a sum: exponentials that were multiplied with values, and other ones."""


class Made:
    """How a tensor was made: a call, and what its tensors were made of.

    Attributes:
        call: what makes the tensor, of its ``inputs`` remade.
        inputs: what it is made of.
        number: is larger than those of its inputs.
        terms: of what it is a sum: of exponentials with values that depend on the input, or of others; of nothing, if
            these were multiplied with zeros.
        plain: the tensor remade, and for how many factors of the values.
        is_bent: whether a function that is no power is in it, as in ``tanh(exp(x))``.
        is_weighed: whether constants are beside the exponentials that are none of 0 and 1: exponentials of what belongs
            to the scores, which another temperature would change, too.
    """

    __slots__ = ("call", "inputs", "is_bent", "is_weighed", "number", "plain", "terms")

    def __init__(self, call: Op, *inputs: Made) -> None:
        self.call, self.inputs, self.number = call, inputs, next(_numbers)
        self.terms: frozenset[str] = frozenset().union(*(each.terms for each in inputs))
        self.plain: tuple[int, Any] | None = None
        self.is_bent: bool = any(each.is_bent for each in inputs)
        self.is_weighed: bool = any(each.is_weighed for each in inputs)


class Leaf(Made):
    """A tensor as it is: an exponent, or a value that exponentials were multiplied with.

    Args:
        tensor: the tensor.
        is_value: which of the two.
    """

    __slots__ = ("is_value", "tensor", "version")

    def __init__(self, tensor: Tensor, *, is_value: bool = False) -> None:
        super().__init__(lambda: tensor)
        self.tensor, self.version, self.is_value = tensor, tensor._version, is_value
        self.terms = WITH_VALUES if is_value else OTHERS


def _ways(made: Made, known: Callable[[Made], bool]) -> list[Made]:
    """All that a tensor is made of, itself last; not what that which is ``known`` is made of."""
    found, waiting = {made}, [made]
    while waiting:
        each = waiting.pop()
        new = () if known(each) else set(each.inputs) - found
        found.update(new)
        waiting += new
    return sorted(found, key=lambda each: each.number)


def _leaves(made: Made) -> list[Leaf]:
    return [each for each in _ways(made, lambda _: False) if isinstance(each, Leaf)]


def _remade(made: Made, leaves: dict[Leaf, Tensor]) -> Any:
    """The tensor, made again of others."""
    values: dict[Made, Any] = dict(leaves.items())
    for each in _ways(made, lambda _: False):
        if each not in values:
            values[each] = each.call(*(values[of] for of in each.inputs))
    return values[made]


# ------------------------------------------------------------------------------------ notes


def noted(x: Any) -> tuple[Made, int] | None:
    """How a tensor was made of exponentials, and what has been done with them, if it was not changed since."""
    found = getattr(x, EXPONENTS, None) if isinstance(x, Tensor) else None
    return (found[1], found[2]) if found and found[0] == x._version else None


def note(out: Tensor, made: Made, state: int) -> None:
    """``out`` was made so."""
    setattr(out, EXPONENTS, Note((out._version, made, state)))
    vars(out).setdefault(GATE, 0)  # no gate, perhaps; but what is made of it is looked at


def keep(out: Tensor, x: Tensor, op: Op, state: int = PART) -> None:
    """``out = op(x)``, noted if ``x`` is."""
    found = noted(x)
    if found is not None:
        note(out, Made(op, found[0]), max(state, found[1]))


def keep_function(y: Tensor, x: Tensor, op: Op) -> None:
    """``y = op(x)``, an element-wise function, noted if ``x`` is."""
    found = noted(x)
    if found is not None:
        made = Made(op, found[0])
        made.is_bent |= not _is_power(op, x)
        note(y, made, found[1])


def _is_power(op: Op, like: Tensor) -> bool:
    """Whether an element-wise function makes an exponential of one: a power, a scaling or a bound."""
    with _disable_current_modes():  # numbers, also where a compiler traces the model
        one, two, four = (op(single(like, x)) for x in (1, 2, 4))
        return torch.allclose(two * two, one * four, rtol=0.02, atol=0.0)


def changed(x: Tensor, op: Op, *, is_exponential: bool = False) -> None:
    """``x`` was changed in place into ``op(x)``, an exponential still if it was one, perhaps."""
    found = getattr(x, EXPONENTS, None)
    if found and found[0] == x._version - 1:
        before: Made = found[1]
        made = Made(lambda *of: op(before.call(*of)), *before.inputs) if is_exponential else Made(op, before)
        note(x, made, found[2])


def stands_for(leaf: Tensor, constant: Tensor) -> None:
    """The leaf of a ledger is what the constant in whose place it stands is noted as."""
    if (found := noted(constant)) is not None and found[1] == LOG:
        note(leaf, *found)


def moved(x: Tensor, value: Tensor) -> None:
    """``value`` was written into the place of ``x``."""
    if (found := getattr(value, EXPONENTS, None)) is not None:
        setattr(x, EXPONENTS, Note((x._version, *found[1:])))


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
    if not (found[0][0].terms <= OTHERS or adds_up):  # a layer of a product with values
        return
    if run.recipe.linear is rules.unmodified:
        keep_exponents(func, out, args, kwargs, WEIGHTED)
        if not adds_up and (made := noted(out)) is not None:
            made[0].is_weighed = True
    elif adds_up:
        keep_exponents(func, out, args, kwargs, SUMMED)


def _adds_up(constant: Any) -> bool:
    """Whether a matrix has but one number in it, and zeros: it adds up some of what it is multiplied with."""
    if not isinstance(constant, Tensor) or not constant.is_floating_point() or not constant.numel():
        return False
    if constant.layout is not torch.strided:
        constant = constant.coalesce().values() if constant.layout is torch.sparse_coo else constant.values()
    return bool(((constant == 0) | (constant == constant.max())).all())


def _sums_by_index(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call of one of :data:`BY_INDEX` sums."""
    if name.startswith("index_put"):
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    how = kwargs.get("reduce", next((each for each in args if isinstance(each, str)), "sum"))
    return how in ("sum", "mean")


def _element(i: int, values: Any) -> Any:
    return values[i]


# ------------------------------------------------------------------- exponentials, sums, products


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
    is_same = isinstance(leaf, Leaf) and not leaf.is_value and _unchanged((leaf,)) and leaf.tensor.shape == y.shape
    return (leaf.tensor, found[0].call) if isinstance(leaf, Leaf) and is_same else None


def weighs(y: Tensor, x: Tensor, is_scaling: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether ``y`` is the exponential of ``x`` itself or a scaling of it, masked perhaps, by which ``x`` may be pooled
    as by a weight (SoftPool, smooth maxima). ``is_scaling(z, x)`` says whether ``z`` is one."""
    found = noted(y)
    if found is None or found[1] != PART or found[0].is_bent:
        return False
    leaves = _leaves(found[0])
    return len(leaves) == 1 and _unchanged(leaves) and (leaves[0].tensor is x or is_scaling(leaves[0].tensor, x))


def _rises(made: Made, x: Tensor) -> bool:
    """Whether ``x``, the logarithm of a sum of exponentials times a number, rises with them."""
    return bool((_raised(made) >= x.detach()).all())


def _raised(made: Made) -> Tensor:
    """What was made of exponentials, if each exponent were larger by 1."""
    out: Tensor = _remade(made, {leaf: leaf.tensor.detach() + 1 for leaf in _leaves(made)})
    return out


def logarithm(run: Any, out: Tensor, x: Tensor, op: Op) -> None:
    """``out = op(x)``, the logarithm of a sum of exponentials of ``x``."""
    note(out, Made(op, Leaf(x)), LOG)
    _meet_logarithm(run, out)


def log_of(run: Any, out: Tensor, x: Tensor, op: Op) -> None:
    """``out = op(x)``, a logarithm; of a sum of exponentials, one that normalises."""
    run.has_logarithms = True
    if (node := cast("Any", out.grad_fn)) is not None:
        node.metadata[LOGGED] = True
    found = noted(x)
    if found is not None and is_sum(x):
        note(out, Made(op, found[0]), LOG)
        _meet_logarithm(run, out)


def logarithm_of_sum(run: Any, op: Op, x: Any) -> Tensor | None:
    """``op(x)``, the logarithm of ``x``, a sum of exponentials (:func:`is_sum`), under the rule for softmax, as
    ``logsumexp`` has it; None where its scores were changed since, or there are no rules."""
    found = noted(x)
    if found is None or not run.recipe.has_rules():
        return None
    out = _under_softmax(run, op(x.detach()), Made(op, found[0]))
    if out is not None:
        log_of(run, out, x, op)
    return out


def is_weighed(x: Tensor) -> bool:
    """Whether a tensor is made of exponentials times other constants, as attention to exponentials of values is."""
    found = noted(x)
    return found is not None and found[0].is_weighed


def normalised(run: Any, out: Tensor, x: Tensor, op: Op) -> None:
    """``out = op(x)``, ``x − log Σ exp x``."""
    note(out, Made(op, Leaf(x)), NORMALISED)
    _meet_logarithm(run, out)


LOGGED = "lrpx logarithm"
"""What the node of the graph is marked with that made a logarithm."""
LOGARITHM = "lrpx logarithm of a sum"
"""What the node of the graph is marked with that made the logarithm of a sum of exponentials."""


def _meet_logarithm(run: Any, out: Tensor) -> None:
    run.has_logarithms = True
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[LOGARITHM] = True
    if _factors.has_scales(run.recipe):
        run.meet_scale()


def summed(out: Tensor, a: Tensor, b: Tensor, op: Op) -> None:
    """``out = op(a, b)``, a sum or difference of two that depend on the input, one of them perhaps a logarithm."""
    one, other = noted(a), noted(b)
    states = (one[1] if one else PART), (other[1] if other else PART)
    if not {LOG, NORMALISED} & set(states):
        return
    for x, of, log, is_first in ((a, one, other, False), (b, other, one, True)):
        if log is None or log[1] != LOG or (is_first and of is not None and of[1] == LOG):
            continue
        if _is_taken_off(out, x, log[0], op, is_first):
            scores = of[0] if of is not None and of[1] == NORMALISED else Leaf(x)
            note(out, Made(op, *((log[0], scores) if is_first else (scores, log[0]))), NORMALISED)
            return
    if one is None or other is None:
        note(out, Made(op, *(Leaf(x) if each is None else each[0] for x, each in ((a, one), (b, other)))), max(states))


def _is_taken_off(out: Tensor, x: Tensor, log: Made, op: Op, is_first: bool) -> bool:
    """Whether ``out = op(x, y)``, or ``op(y, x)`` if ``y`` is the first, falls with ``y``, a logarithm made so."""
    is_difference = "sub" in op.__name__ and not is_first
    if type(out) is not Tensor:  # a compiler's tensors have no numbers
        return is_difference
    if not is_difference and any(leaf.tensor is not x for leaf in _leaves(log)):  # of others, as Sinkhorn's sums are
        return False
    given = (x.detach(), _raised(log))
    way = op(*(given[::-1] if is_first else given)) - out.detach()
    return bool((way < 0).any()) and not (way > 0).any()  # what a mask forbids stays where it is


def before_logarithm(a: Any, b: Any) -> Tensor | None:
    """A copy of ``a``, which the logarithm ``b`` of a sum of its exponentials will be taken off in place: it is what
    both are made of then."""
    found = noted(b)
    if found is None or found[1] != LOG or noted(a) is not None:
        return None
    before: Tensor = a.clone()
    for leaf in _leaves(found[0]):
        if leaf.tensor is a and leaf.version == a._version:
            leaf.tensor, leaf.version = before, before._version
    return before


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
                return out
            state = max(found[1], SUMMED)
    else:
        leaf = Leaf(value, is_value=True)
        made = Made(op, *((found[0], leaf) if one is not None else (leaf, found[0])))
        made.terms = _terms_of_product(found[0], leaf)
    note(out, made, state)
    if again is not None and found[1] == PART and one is not None:
        setattr(out, DIRECT, Note((out._version, x, x._version, again)))
    return out


def multiplied_by_constant(run: Any, out: Tensor, constant: Any) -> None:
    """``out`` is what was made of exponentials, times a constant or over it: nothing, if that is zeros, as a state
    begins with."""
    if (found := noted(out)) is None:
        return
    if _is_nothing(constant):
        found[0].terms = frozenset()
    elif run.recipe.softmax not in PLAIN and isinstance(constant, Tensor) and constant.numel() > 1:
        found[0].is_weighed |= not _adds_up(constant.to(out.dtype))


def _is_weight(summand: Any) -> bool:
    """Whether a constant that is added to a sum of exponentials is none of 0 and 1, nor a guard."""
    summand = torch.as_tensor(summand)
    return not bool(((summand.abs() <= LEAST) | (summand == 1)).all())


def _is_nothing(constant: Any) -> bool:
    return isinstance(constant, Tensor) and not constant.any()


def _terms_of_product(one: Made, other: Made) -> frozenset[str]:
    """Of what the product of two is a sum, one of which may be exponentials alone, or a value."""
    if not (one.terms and other.terms):
        return frozenset()
    return one.terms if other.terms == OTHERS else other.terms if one.terms <= OTHERS else one.terms | other.terms


DIRECT = "_lrpx_weighted"
"""The attribute of a matrix product of exponentials and values: ``(version, exponentials, their version, again)``;
``again(weights)`` is the product, under the recipe's rule, with these in the place of the exponentials."""


def is_sum(x: Tensor) -> bool:
    """Whether a tensor is a sum of exponentials, with constant weights perhaps, or a scaling of it."""
    found = noted(x)
    return found is not None and (found[1] == SUMMED or _sums_nothing_else(found, x))


# ------------------------------------------------------------------------------------- softmax


def exponential_of_normalised(run: Any, op: Op, x: Tensor) -> Tensor | None:
    """``op(x)``, an exponential, if that is a softmax: ``x`` is ``z − log Σ exp z``."""
    found = noted(x)
    if found is None or found[1] != NORMALISED:
        if run.has_scales and (found is None or found[1] != LOG) and _reaches(x.grad_fn, _is_logarithm):
            return refused(run, "exp of what the logarithm of a sum of exponentials was taken off", op, x)
        return None
    made = Made(op, found[0])
    softmax = _softmax(run, op(x.detach()), made)
    return refused(run, "exp of a log-softmax", op, x) if softmax is None else softmax


def is_normalised(x: Tensor) -> bool:
    """Whether ``x`` is ``z − log Σ exp z``."""
    found = noted(x)
    return found is not None and found[1] == NORMALISED


def quotient(run: Any, op: Op, a: Tensor, b: Tensor) -> Tensor | None:
    """``op(a, b)``, if that is what is made of exponentials over their sum: ``a / b``, or ``a`` times the reciprocal of
    the sum, in either order."""
    above, below = noted(a), noted(b)
    if above is not None and above[1] == INVERSE:
        a, b, above, below = b, a, below, above
        op = partial(_swapped, op)
    is_divisor = below is not None and (below[1] in (SUMMED, INVERSE) or _sums_nothing_else(below, b))
    if not (is_divisor or _is_sum_of_one(above, below)):
        if below is not None or gate_strength(b) != EXPONENTIAL:
            return None
    elif above is not None and above[1] <= WEIGHTED:
        assert below is not None
        made = Made(op, above[0], below[0])
        if not is_divisor and run.recipe.softmax is not rules.constant and not _is_ones(_without_values(made)):
            return refused(run, RATIO, op, a, b)
        if above[1] < WEIGHTED:
            value = op(a.detach(), b.detach())
            if run.recipe.softmax is not rules.constant and not _is_share(value, made):
                inverse = _inverse(run, value, made)
                return refused(run, UNKNOWN, op, a, b) if inverse is None else inverse
            softmax = _softmax(run, value, made)
            if softmax is not None and above[1] == SUMMED:
                _factors.mark_merging(run, softmax)
            return refused(run, UNKNOWN, op, a, b) if softmax is None else softmax
        if len(above[0].terms) > 1:
            return refused(run, UNKNOWN, op, a, b, under_constant=True)
        if run.recipe.softmax is rules.constant:  # values take all, if there are any
            if above[0].terms != WITH_VALUES:
                return _under_softmax(run, op(a.detach(), b.detach()), made)
            _attending(run, a, made, b)
            return None
        if (direct := _directly(run, op, a, b)) is not None or (direct := _attended(run, op, a, b, made)) is not None:
            return direct
    return refused(run, UNKNOWN, op, a, b) if _divided(run, a) else None


def _is_sum_of_one(above: tuple[Made, int] | None, below: tuple[Made, int] | None) -> bool:
    """Whether what is divided was made of the very exponential that divides: a sum over the first token alone."""
    if above is None or below is None or above[1] > WEIGHTED or below[1] != PART:
        return False
    one, other = ({id(leaf.tensor) for leaf in _leaves(made) if not leaf.is_value} for made in (above[0], below[0]))
    return one == other


def _without_values(made: Made) -> Tensor:
    """What was made of exponentials, if each value that they were multiplied with were 1."""
    leaves = {leaf: leaf.tensor.detach() for leaf in _leaves(made)}
    out: Tensor = _remade(made, {leaf: torch.ones_like(x) if leaf.is_value else x for leaf, x in leaves.items()})
    return out


def _is_ones(value: Tensor) -> bool:
    """Whether a quotient of exponentials is 1 wherever it is not masked: by themselves, and not by other places."""
    if type(value) is not Tensor:
        return True
    bound = max(LEAST, 8 * torch.finfo(value.dtype).eps)
    return bool((((value - 1).abs() <= bound) | (value == 0)).all())


def _is_share(value: Tensor, made: Made) -> bool:
    """Whether a quotient of exponentials becomes no smaller if all exponents rise alike, as a softmax does, perhaps
    with a number among what is summed; nor everywhere larger as one exponential is, as a softmax times one."""
    if type(value) is not Tensor or not (times := _raised_where_large(value, made)).numel():
        return True
    return not bool((times < 15 / 16).any()) and not any(bool(((times - by).abs() < 1 / 64).all()) for by in (e, 2))


def _inverse(run: Any, value: Tensor, made: Made) -> Tensor | None:
    """``value``, an exponential over the product of it and a sum of exponentials, ``a / (a · l)``: one over that sum,
    as FlashAttention has it, which a norm's rule has made a constant."""
    times = _raised_where_large(value, made)
    is_one_over = any(bool(((times - by).abs() < 1 / 64).all()) for by in (1 / e, 1 / 2))
    if run.recipe.norm is not rules.constant or not is_one_over:
        return None
    run.under("norm")
    note(value, made, INVERSE)
    return value


def _raised_where_large(value: Tensor, made: Made) -> Tensor:
    """How many times as large ``value`` would be, which was made so, if all exponents rose by 1; where it is large
    enough to tell."""
    size = value.abs()
    return (_raised(made) / value)[size > size.max() / 64] if value.numel() else value


OVER = "lrpx over a sum of exponentials"
"""What the node of the graph is marked with that divided what no exponentials are in by a sum of them."""


def divided(run: Any, out: Tensor, b: Any) -> None:
    """``out`` is something over ``b``, or times ``b``, and no softmax: marked, if ``b`` is a sum of exponentials, or
    the reciprocal of one, for exponentials may be multiplied with it yet."""
    found, node = noted(b), cast("Any", out.grad_fn)
    if found is None or node is None or run.recipe.softmax is rules.constant:
        return
    if found[1] in (SUMMED, INVERSE) or _sums_nothing_else(found, b):
        node.metadata[OVER] = run.has_divided = True


def _meets_divided(run: Any, given: Sequence[Any]) -> bool:
    """Whether one factor was divided by a sum of exponentials, and exponentials are in another."""
    nodes = [x.grad_fn for x in given if isinstance(x, Tensor) and carries(x)]
    over = [_reaches(node, _is_over) for node in nodes]
    scaled = [_reaches(node, partial(_is_scaled, run.counts)) for node in nodes]
    return any(i != j for i, one in enumerate(over) if one for j, other in enumerate(scaled) if other)


def _is_over(node: Any) -> bool:
    return OVER in node.metadata


def _sums_nothing_else(below: tuple[Made, int], b: Tensor) -> bool:
    """Whether a sum of products of exponentials and values is one of exponentials, for these values are ones: a column
    of them beside the others gives the denominator."""
    made, state = below
    if state != WEIGHTED or not _unchanged(leaves := _leaves(made)):
        return False
    plain = {each: torch.ones_like(each.tensor) if each.is_value else each.tensor.detach() for each in leaves}
    return torch.allclose(_remade(made, plain), b.detach(), rtol=torch.finfo(b.dtype).eps ** 0.75, atol=0.0)


def hides_division(run: Any, op: Op, given: Sequence[Tensor]) -> Tensor | None:
    """A product of several, refused where one is the reciprocal of a sum of exponentials, and such are in another."""
    inverse = [((found := noted(x)) is not None and found[1] == INVERSE) or is_root(x) for x in given]
    others = [x for x, is_inverse in zip(given, inverse, strict=True) if not is_inverse]
    is_division = any(inverse) and any(_divided(run, x) for x in others)
    if not is_division and not (run.has_divided and _meets_divided(run, given)):
        return None
    return refused(run, UNKNOWN, op, *given)


UNKNOWN = "division, of what exponentials are in, by a sum of exponentials"
RATIO = "division of one exponential by another, for exp of the difference"


def times_inverse(run: Any, op: Op, a: Any, b: Any) -> Tensor | None:
    """``op(a, b) = a · b``, if that is a softmax: exponentials times the reciprocal of their sum; refused, if it may be
    one, for what divides was made of exponentials alone, or the other factor of exponentials was divided by a sum."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    if run.has_divided and _meets_divided(run, (a, b)):
        return refused(run, UNKNOWN, op, a, b)
    inverse = [(found := noted(x)) is not None and found[1] == INVERSE for x in (a, b)]
    if inverse[0] != inverse[1]:
        return quotient(run, op, a, b)
    x = b if is_root(a) else a if is_root(b) else None
    return refused(run, UNKNOWN, op, a, b) if x is not None and _divided(run, x) else None


def _divided(run: Any, x: Tensor) -> bool:
    """Whether exponentials are in what is divided."""
    return _reaches(x.grad_fn, partial(_is_scaled, run.counts))


ROOT = "_lrpx_root_of_exponentials"
"""The attribute of a constant that divides, one over a root or a power of what was made of exponentials alone; perhaps
of the square of their sum."""


def keep_root(out: Tensor, x: Tensor) -> Tensor:
    """Note that ``out`` is such a constant, if ``x``, of which it is the reciprocal root, was made of exponentials."""
    if (gate_strength(x) == EXPONENTIAL or is_root(x) or is_sum(x)) and not carries(out):
        setattr(out, ROOT, True)
    return out


def is_root(x: Any) -> bool:
    """Whether it is one, or in another shape."""
    return isinstance(x, Tensor) and (hasattr(x, ROOT) or hasattr(x._base, ROOT))


def _swapped(op: Op, a: Any, b: Any) -> Any:
    return op(b, a)


def refused(run: Any, what: str, op: Op, *given: Tensor, under_constant: bool = False) -> Tensor | None:
    """``op(*given)``, a softmax that is not known: refused, with its plain gradient, where the recipe has a rule that
    hands something on; nothing where it has none, unless it matters ``under_constant``."""
    is_constant = run.recipe.softmax is rules.constant
    if (is_constant and not under_constant) or not run.recipe.has_rules():
        return None
    run.refuse(f"{what} (if that is a softmax: torch.softmax)")
    out: Tensor = run.apply("unknown", op, *given, rule=rules.unmodified)
    return out


PLAIN = (rules.unmodified, rules.constant)
"""Rules for softmax that take a function as it is, whatever of."""

SCORES = "_lrpx_scores"
"""The attribute of a softmax: ``(version, what it is of, its version, the dimension)``; of one that was written out the
version and None. The run keeps the newest of what a softmax is of, so that its logarithm does not hang on whether the
model has kept it."""


def _softmax(run: Any, value: Tensor, made: Made) -> Tensor | None:
    """``value``, a softmax that was made so, under the recipe's rule for it; None where its scores were changed since,
    or are several tensors and the rule is for one."""
    y = _under_softmax(run, value, made)
    if y is None:
        return None
    out = mark_gate(run.recipe, "softmax", _weights(run, y, next(iter(_leaves(made))).tensor))
    for scores in {id(each.tensor): each.tensor for each in _leaves(made)}.values():
        mark_merging(run, out, scores)
    if asks_for_scores(run.recipe):
        # its logarithm is no log-softmax that is at hand
        note_softmax(out, Note((out._version, None)))
    return out


SOFTMAX = "lrpx softmax"
"""What the node of the graph is marked with that made a softmax."""


def asks_for_scores(recipe: Recipe) -> bool:
    """Whether the logarithm of a softmax is to be known as a log-softmax: its plain gradient would be another."""
    return not (recipe.activation is recipe.softmax is rules.unmodified)


def note_softmax(out: Tensor, note: Note) -> None:
    """Note on ``out`` that it is a softmax, and of what, and at its node of the graph."""
    setattr(out, SCORES, note)
    mark_softmax(out)


def mark_softmax(out: Tensor) -> None:
    """Mark the node that made ``out`` as one of a softmax, or of what a softmax was multiplied with."""
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[SOFTMAX] = True


def made_softmax(node: Any) -> bool:
    """Whether a node of the graph made a softmax."""
    return SOFTMAX in node.metadata


def is_of_softmax(x: Tensor) -> bool:
    """Whether ``x`` is made of a softmax, by sums, scalings and selections, or of products of nothing but such."""
    found = dict[Any, bool]()

    def is_made_so(node: Any, depth: int) -> bool:
        if node not in found:
            found[node] = False  # if it is too far
            made_of = [child for child, _ in node.next_functions if child is not None]
            if made_softmax(node):
                found[node] = True
            elif kind(node) in LEADS_ON and depth < DEEPEST:
                fits = all if made_of and kind(node) in PRODUCTS else any
                found[node] = fits(is_made_so(child, depth + 1) for child in made_of)
        return found[node]

    return x.grad_fn is not None and is_made_so(x.grad_fn, 0)


DEEPEST = 128
"""Nodes after one another that are looked through for a softmax."""


LEAST = 1e-4
"""The largest number beside a softmax, or bound of it, that guards its logarithm, ``log(p + 1e-9)``."""


def is_guarded(x: Tensor, before: Tensor) -> bool:
    """Whether ``x`` is what it was before, but for a guard."""
    is_alike = x.shape == before.shape and x.dtype is before.dtype
    return is_alike and torch.allclose(x.detach(), before.detach(), rtol=0.0, atol=LEAST)


def keep_softmax(run: Any, out: Tensor, *made_of: Any) -> Tensor:
    """``out``, a constant, noted as a softmax with a guard, if it was made of one."""
    if run.scores is not None:
        for each in made_of:
            is_softmax = is_tensor(each) and (hasattr(each, SCORES) or hasattr(each._base, SCORES))
            if is_softmax and is_guarded(out, each):
                setattr(out, SCORES, Note((out._version, None)))
    return out


def _weights(run: Any, y: Tensor, scores: Tensor) -> Any:
    """``y``, marked as attention weights, if it is none of a router's scores."""
    if not run.asks_for_places:
        return y
    dims = range(-1, -y.ndim - 1, -1) if scores.shape == y.shape else (-1,)
    dim = next((each for each in dims if y.ndim and _roles.sums_to_one(y, each)), None)
    return _roles.mark_weights(run, y) if dim is None else _roles.mark_weights(run, y, scores, dim)


def _under_softmax(run: Any, value: Tensor, made: Made) -> Tensor | None:
    """``value``, that was made so of exponentials, as a function of their exponents under the rule for softmax; None
    where these were changed since, or are several tensors and the rule is for one."""
    leaves, softmax = _leaves(made), run.recipe.softmax
    scores = list({id(each.tensor): each.tensor for each in leaves}.values())
    is_one = len(scores) == 1 or softmax is rules.unmodified
    if softmax is not rules.constant and not (is_one and _unchanged(leaves)):
        return None
    if made.is_weighed and softmax not in PLAIN and not isinstance(softmax, rules.Scaled):
        why = "of exponentials beside other constants, which belong to the scores"
        raise run.refuse_rule("softmax", "exp", why, "add the logarithms of these to the scores, or ")
    if softmax in OF_SCORES and any(_has_taken_off(each.grad_fn) for each in scores):
        raise _refuse_taken_off(run, "exp")

    def again(*given: Tensor) -> Any:
        if softmax is rules.constant:
            return value.detach()
        of = {id(score): x for score, x in zip(scores, given, strict=True)}
        return _remade(made, {each: of[id(each.tensor)] for each in leaves})

    y: Tensor = run.apply("softmax", again, *scores)
    return y if softmax is rules.constant else rules.with_gradient_of(value, y)


OF_SCORES = (rules.identity, rules.uniform_bias)
"""Rules for softmax that share by how large the scores are."""


def refuse_scores(run: Any, name: str, x: Tensor, dim: Any) -> None:
    """Refuse, under a rule that sees the scores, a softmax of scores that their largest was taken off, as gpt-oss has
    it: what is added or taken off else belongs to the scores."""
    if run.recipe.softmax not in OF_SCORES or not _has_taken_off(x.grad_fn):
        return
    if _has_taken_off(x.grad_fn, none_but_largest=True) or bool((x.detach().amax(dim) == 0).all()):
        raise _refuse_taken_off(run, name)


def _refuse_taken_off(run: Any, name: str) -> MethodError:
    why = "of scores that something was taken off, which this rule would share by what is left of them"
    error: MethodError = run.refuse_rule("softmax", name, why, "call torch.softmax on the scores as they are, or ")
    return error


def _has_taken_off(node: Any, *, none_but_largest: bool = False) -> bool:
    """Whether scores are a difference, as those are that their largest was taken off; scaled, masked or moved since."""
    for _ in range(_factors.DEEPEST):
        if node is None:
            return False
        name = kind(node)
        if name in ("Sub", "Rsub") and not none_but_largest:
            return True
        if name in ("Add", "Sub", "Rsub"):  # of a mask, or of their largest
            return any(child is not None and _is_largest(child) for child, _ in node.next_functions)
        if name not in LINEAR | SCALES:
            return False
        node = next((of for of, _ in node.next_functions if of is not None), None)
    return False


def _is_largest(node: Any) -> bool:
    """Whether a node of the graph made the largest of scores, scaled or moved since."""
    for _ in range(_factors.DEEPEST):
        if node is None or kind(node) in ("Amax", "Max"):
            return node is not None
        if kind(node) not in SCALES | SHAPES:
            return False
        node = next((of for of, _ in node.next_functions if of is not None), None)
    return False


def _unchanged(leaves: Iterable[Leaf]) -> bool:
    return all(each.tensor._version == each.version for each in leaves)


def _directly(run: Any, op: Op, a: Tensor, b: Tensor) -> Tensor | None:
    """A product of exponentials and values over the sum of the exponentials, as a product of the softmax and the
    values, under whatever rule; None where the sum has not a number for each row of the exponentials."""
    found = getattr(a, DIRECT, None)
    if not found or found[0] != a._version or found[1]._version != found[2]:
        return None
    exponentials, again = found[1], found[3]
    if b.shape != (*exponentials.shape[:-1], 1):
        return None
    weights = quotient(run, op, exponentials, b)
    return None if weights is None else rules.with_gradient_of(op(a.detach(), b.detach()), again(weights))


def _attended(run: Any, op: Op, a: Tensor, b: Tensor, made: Made) -> Tensor | None:
    """Any sum of products of exponentials and values over the sum of the exponentials: a product of a softmax, one
    factor, with values of ``n`` factors, which has its plain gradient, of which the scores get ``1/(n + 1)``."""
    recipe, leaves = run.recipe, _leaves(made)
    counts = {_factors.factors(run, each.tensor) for each in leaves if each.is_value}
    is_uniform = recipe.softmax is rules.unmodified and recipe.product is recipe.matmul is rules.uniform
    if not is_uniform or len(counts) > 1 or not _unchanged(leaves):
        return None
    n = next(iter(counts), 0)

    def shared(op: Op, *given: Tensor) -> Any:
        return op(*(_share(x, each, n) for x, each in zip(given, leaves, strict=True)))

    if run.has_taps_on_rules:  # which look at it as a whole
        y = run.apply(
            "softmax", lambda *given: _remade(made, dict(zip(leaves, given, strict=True))),
            *(each.tensor for each in leaves), rule=shared,
        )  # fmt: skip
    else:
        run.under("softmax")
        y = _plain(made, n)
    out: Tensor = _factors.made_of(run, rules.with_gradient_of(op(a.detach(), b.detach()), y), n + 1)
    _attending(run, out, made, b)
    return out


def _attending(run: Any, out: Tensor, made: Made, total: Tensor) -> None:
    """``out`` is what attention gives, or that times a ``total`` of exponentials: unless a router's."""
    if run.asks_for_places and out.grad_fn is not None:
        leaves = _leaves(made)
        scores = [each.tensor for each in leaves if not each.is_value]
        if total.shape[-1:] != (1,) or not any(map(_roles.is_of_outputs, scores)):
            _roles.attended(out, scores, [each.tensor for each in leaves if each.is_value])


def _share(x: Tensor, leaf: Leaf, n: int) -> Tensor:
    return _kernels.scale_gradient(x, (n if leaf.is_value else 1) / (n + 1))


def _plain(made: Made, n: int) -> Tensor:
    """The tensor remade, with its plain gradient shared; of what a state is made of again and again, once."""
    for each in _ways(made, lambda each: each.plain is not None and each.plain[0] == n):
        if each.plain is None or each.plain[0] != n:
            of = (of.plain[1] for of in each.inputs if of.plain is not None)
            each.plain = n, _share(each.tensor, each, n) if isinstance(each, Leaf) else each.call(*of)
    plain: Any = made.plain
    value: Tensor = plain[1]
    return value


# ------------------------------------------------------------------------------ what is not known

PRODUCTS = SCALES | frozenset(
    "Mm Bmm Mv Dot Addmm Addmv Addbmm Baddbmm SparseAddmm Convolution Linear Trilinear FftR2C FftC2R FftC2C".split()
)
"""Nodes of products."""
LEADS_ON = _factors.LEADS_ON | PRODUCTS
"""Nodes that a factor of a product can be in."""


def _is_scaled(counts: dict[int, int], node: Any) -> bool:
    return _factors.DECAYED in node.metadata or counts.get(node._sequence_nr(), 1) <= 0


def _is_logarithm(node: Any) -> bool:
    return LOGARITHM in node.metadata


def has_logarithm(x: Tensor) -> bool:
    """Whether a logarithm is in ``x``, by sums, selections and in whatever shape."""
    found = noted(x)
    return (found is not None and found[1] == LOG) or _reaches(
        x.grad_fn, lambda node: LOGGED in node.metadata or LOGARITHM in node.metadata
    )


def has_logarithm_of_sum(x: Tensor) -> bool:
    """The same of the logarithm of a sum of exponentials."""
    return _reaches(x.grad_fn, _is_logarithm)


def mark_merging(run: Any, weights: Tensor, scores: Tensor, least: int = 1) -> bool:
    """Mark ``weights``, a softmax or another function of ``scores``, if there are such logarithms in these, ``least``
    of them, or such weights: a sigmoid of one and a constant is attention with a sink. Whether they are."""
    logarithms = set[Any]()

    def is_last(each: Any) -> bool:
        if _is_logarithm(each):
            logarithms.add(each)
        return len(logarithms) == least or _factors.MERGING in each.metadata

    is_merging = run.has_logarithms and _factors.reaches(scores.grad_fn, is_last)
    if is_merging:
        _factors.mark_merging(run, weights)
    return bool(is_merging)


def _reaches(node: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a node of the graph is made of one that fits, by matrix products, too."""
    return _factors.reaches(node, fits, LEADS_ON)
