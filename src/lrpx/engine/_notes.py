"""What is noted on a tensor that was made of exponentials: how, so that it can be made again of others.

A note holds a call, and how the tensors were made that it was called with, back to the exponents and to the values that
exponentials were multiplied with. There may be several of both, as where attention is computed in pieces, or a state
decays. What no note tells, the graph may: whether something is in what a tensor is made of.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx.engine import _factors
from lrpx.engine._gates import EXPONENTS, GATE
from lrpx.engine._nodes import SCALES
from lrpx.engine._tensors import single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Op = Callable[..., Any]


class Note(tuple[Any, ...]):
    """What is noted on a tensor. A tensor that the model returns may be copied and saved: without what was noted."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, ()  # what torch.load takes, and is false


PART, SUMMED, WEIGHTED, INVERSE, LOG, NORMALISED = range(6)
"""What has been done with exponentials: nothing that matters; they were summed, or multiplied with values; a sum of
them was inverted, its logarithm was taken, and was taken off scores."""
WITH_VALUES, OTHERS = frozenset({"with values"}), frozenset({"others"})
"""Terms of a sum: exponentials that were multiplied with values, and other ones."""

_numbers = count()


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
        of_sum: whether a sum of exponentials was multiplied with the value.
    """

    __slots__ = ("is_value", "of_sum", "tensor", "version")

    def __init__(self, tensor: Tensor, *, is_value: bool = False, of_sum: bool = False) -> None:
        super().__init__(lambda: tensor)
        self.tensor, self.version, self.is_value, self.of_sum = tensor, tensor._version, is_value, of_sum
        self.terms = WITH_VALUES if is_value else OTHERS


def ways(made: Made, known: Callable[[Made], bool]) -> list[Made]:
    """All that a tensor is made of, itself last; not what that which is ``known`` is made of."""
    found, waiting = {made}, [made]
    while waiting:
        each = waiting.pop()
        new = () if known(each) else set(each.inputs) - found
        found.update(new)
        waiting += new
    return sorted(found, key=lambda each: each.number)


def leaves_of(made: Made) -> list[Leaf]:
    """The tensors that one is made of, as they are."""
    return [each for each in ways(made, lambda _: False) if isinstance(each, Leaf)]


def remade(made: Made, leaves: dict[Leaf, Tensor]) -> Any:
    """The tensor, made again of others."""
    values: dict[Made, Any] = dict(leaves.items())
    for each in ways(made, lambda _: False):
        if each not in values:
            values[each] = each.call(*(values[of] for of in each.inputs))
    return values[made]


def raised(made: Made) -> Tensor:
    """What was made of exponentials, if each exponent were larger by 1."""
    out: Tensor = remade(made, {leaf: leaf.tensor.detach() + 1 for leaf in leaves_of(made)})
    return out


def unchanged(leaves: Iterable[Leaf]) -> bool:
    """Whether none of the tensors was changed in place since."""
    return all(each.tensor._version == each.version for each in leaves)


# --------------------------------------------------------------------------------------------------------------- notes


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


def is_sum(x: Tensor) -> bool:
    """Whether a tensor is a sum of exponentials, with constant weights perhaps, or a scaling of it."""
    found = noted(x)
    return found is not None and (found[1] == SUMMED or sums_nothing_else(found, x))


def sums_nothing_else(below: tuple[Made, int], b: Tensor) -> bool:
    """Whether a sum of products of exponentials and values is one of exponentials, for these values are ones: a column
    of them beside the others gives the denominator."""
    made, state = below
    if state != WEIGHTED or not unchanged(leaves := leaves_of(made)):
        return False
    plain = {each: torch.ones_like(each.tensor) if each.is_value else each.tensor.detach() for each in leaves}
    return torch.allclose(remade(made, plain), b.detach(), rtol=torch.finfo(b.dtype).eps ** 0.75, atol=0.0)


# ------------------------------------------------------------------------------------------------ what the graph tells

PRODUCTS = SCALES | frozenset(
    "Mm Bmm Mv Dot Addmm Addmv Addbmm Baddbmm SparseAddmm Convolution Linear Trilinear FftR2C FftC2R FftC2C".split()
)
"""Nodes of products."""
LEADS_ON = _factors.LEADS_ON | PRODUCTS
"""Nodes that a factor of a product can be in."""


def reaches(node: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a node of the graph is made of one that fits, by matrix products, too."""
    return _factors.reaches(node, fits, LEADS_ON)
