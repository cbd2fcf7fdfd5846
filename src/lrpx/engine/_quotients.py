"""What is made of exponentials over a sum of them: a softmax, or a product of one with values, or not known.

To multiply with the reciprocal of the sum is to divide. Which of these it is, is told by how both were made
(``engine/_notes.py``), and by their numbers where all exponents rise; that exponentials are divided at all where no
note is left, the graph tells, and it is refused.
"""

from __future__ import annotations

from functools import partial
from math import e
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lrpx import _kernels, rules
from lrpx.engine import _factors, _roles
from lrpx.engine._exponentials import DIRECT, LAYERED
from lrpx.engine._gates import EXPONENTIAL, gate_strength
from lrpx.engine._notes import (
    INVERSE,
    PART,
    SUMMED,
    WEIGHTED,
    WITH_VALUES,
    Leaf,
    Made,
    is_sum,
    leaves_of,
    note,
    noted,
    raised,
    reaches,
    remade,
    sums_nothing_else,
    unchanged,
    ways,
)
from lrpx.engine._softmaxes import LEAST, along_outputs, refused, softmax_of, under_softmax
from lrpx.engine._tensors import carries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Op = Callable[..., Any]


UNKNOWN = "division, of what exponentials are in, by a sum of exponentials"
LAYERS = "division of a layer's output by another's, of exponentials both, under a rule for layers"
RATIO = "division of one exponential by another, for exp of the difference"


def quotient(run: Any, op: Op, a: Tensor, b: Tensor) -> Tensor | None:
    """``op(a, b)``, if that is what is made of exponentials over their sum: ``a / b``, or ``a`` times the reciprocal of
    the sum, in either order."""
    above, below = noted(a), noted(b)
    if above is not None and above[1] == INVERSE:
        a, b, above, below = b, a, below, above
        op = partial(_swapped, op)
    is_divisor = below is not None and (below[1] in (SUMMED, INVERSE) or sums_nothing_else(below, b))
    if not (is_divisor or _is_sum_of_one(above, below)):
        if _are_layered(run, a, b):
            return refused(run, LAYERS, op, a, b)
        if below is not None or gate_strength(b) != EXPONENTIAL:
            return None
    elif above is not None and above[1] <= WEIGHTED:
        assert below is not None
        made = Made(op, above[0], below[0])
        if not is_divisor and run.recipe.softmax is not rules.constant and not _is_ones(_without_values(made)):
            return refused(run, RATIO, op, a, b)
        if above[1] < WEIGHTED:
            value, is_constant = op(a.detach(), b.detach()), run.recipe.softmax is rules.constant
            if (run.asks_for_places or not is_constant) and not _is_share(value, made):
                inverse = _inverse(run, value, made)
                if inverse is not None or not is_constant:
                    return refused(run, UNKNOWN, op, a, b) if inverse is None else inverse
            softmax = softmax_of(run, value, made)
            if softmax is not None and above[1] == SUMMED:
                _factors.mark_merging(run, softmax)
            return refused(run, UNKNOWN, op, a, b) if softmax is None else softmax
        if len(above[0].terms) > 1:
            return refused(run, UNKNOWN, op, a, b, under_constant=True)
        if run.recipe.softmax is rules.constant:  # values take all, if there are any
            if above[0].terms != WITH_VALUES:
                return under_softmax(run, op(a.detach(), b.detach()), made)
            _attending(run, a, made, b)
            return None
        if (direct := _directly(run, op, a, b)) is not None or (direct := _attended(run, op, a, b, made)) is not None:
            return direct
    return refused(run, UNKNOWN, op, a, b) if _divided(run, a) else None


def _are_layered(run: Any, a: Tensor, b: Tensor) -> bool:
    """Whether a rule for layers has shared weighted sums of exponentials, one of which is divided by the other."""
    return run.asks_for_weights and all(reaches(x.grad_fn, lambda node: LAYERED in node.metadata) for x in (a, b))


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


def _swapped(op: Op, a: Any, b: Any) -> Any:
    return op(b, a)


def _is_sum_of_one(above: tuple[Made, int] | None, below: tuple[Made, int] | None) -> bool:
    """Whether what is divided was made of the very exponential that divides: a sum over the first token alone."""
    if above is None or below is None or above[1] > WEIGHTED or below[1] != PART:
        return False
    one, other = ({id(leaf.tensor) for leaf in leaves_of(made) if not leaf.is_value} for made in (above[0], below[0]))
    return one == other


def _without_values(made: Made) -> Tensor:
    """What was made of exponentials, if each value that they were multiplied with were 1."""
    leaves = {leaf: leaf.tensor.detach() for leaf in leaves_of(made)}
    out: Tensor = remade(made, {leaf: torch.ones_like(x) if leaf.is_value else x for leaf, x in leaves.items()})
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
    return (raised(made) / value)[size > size.max() / 64] if value.numel() else value


# ------------------------------------------------------------------------------------------------ products with values


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
    recipe, leaves = run.recipe, leaves_of(made)
    counts = {_factors.factors(run, each.tensor) for each in leaves if each.is_value}
    is_uniform = recipe.softmax is rules.unmodified and recipe.product is recipe.matmul is rules.uniform
    if not is_uniform or len(counts) > 1 or not unchanged(leaves):
        return None
    n = next(iter(counts), 0)
    if n > 1 and any(each.of_sum for each in leaves):
        run.refuse(_factors.CHUNKS)

    def shared(op: Op, *given: Tensor) -> Any:
        return op(*(_share(x, each, n) for x, each in zip(given, leaves, strict=True)))

    if run.has_taps_on_rules:  # which look at it as a whole
        y = run.apply(
            "softmax", lambda *given: remade(made, dict(zip(leaves, given, strict=True))),
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
        leaves, (below, _) = leaves_of(made), noted(total) or (made, SUMMED)
        if all(along_outputs(below, each) is None for each in leaves_of(below) if not each.is_value):
            scores = [each.tensor for each in leaves if not each.is_value]
            _roles.attended(out, scores, [each.tensor for each in leaves if each.is_value])


def _share(x: Tensor, leaf: Leaf, n: int) -> Tensor:
    return _kernels.scale_gradient(x, (n if leaf.is_value else 1) / (n + 1))


def _plain(made: Made, n: int) -> Tensor:
    """The tensor remade, with its plain gradient shared; of what a state is made of again and again, once."""
    for each in ways(made, lambda each: each.plain is not None and each.plain[0] == n):
        if each.plain is None or each.plain[0] != n:
            of = (of.plain[1] for of in each.inputs if of.plain is not None)
            each.plain = n, _share(each.tensor, each, n) if isinstance(each, Leaf) else each.call(*of)
    plain: Any = made.plain
    value: Tensor = plain[1]
    return value


# --------------------------------------------------------------------------------------------------- what is not known

OVER = "lrpx over a sum of exponentials"
"""What the node of the graph is marked with that divided what no exponentials are in by a sum of them."""


def divided(run: Any, out: Tensor, b: Any) -> None:
    """``out`` is something over ``b``, or times ``b``, and no softmax: marked, if ``b`` is a sum of exponentials, or
    the reciprocal of one, for exponentials may be multiplied with it yet."""
    found, node = noted(b), cast("Any", out.grad_fn)
    if found is None or node is None or run.recipe.softmax is rules.constant:
        return
    if found[1] in (SUMMED, INVERSE) or sums_nothing_else(found, b):
        node.metadata[OVER] = run.has_divided = True


def _meets_divided(run: Any, given: Sequence[Any]) -> bool:
    """Whether one factor was divided by a sum of exponentials, and exponentials are in another."""
    nodes = [x.grad_fn for x in given if isinstance(x, Tensor) and carries(x)]
    over = [reaches(node, _is_over) for node in nodes]
    scaled = [reaches(node, partial(_is_scaled, run.counts)) for node in nodes]
    return any(i != j for i, one in enumerate(over) if one for j, other in enumerate(scaled) if other)


def _is_over(node: Any) -> bool:
    return OVER in node.metadata


def hides_division(run: Any, op: Op, given: Sequence[Tensor]) -> Tensor | None:
    """A product of several, refused where one is the reciprocal of a sum of exponentials, and such are in another."""
    inverse = [((found := noted(x)) is not None and found[1] == INVERSE) or is_root(x) for x in given]
    others = [x for x, is_inverse in zip(given, inverse, strict=True) if not is_inverse]
    is_division = any(inverse) and any(_divided(run, x) for x in others)
    if not is_division and not (run.has_divided and _meets_divided(run, given)):
        return None
    return refused(run, UNKNOWN, op, *given)


def _divided(run: Any, x: Tensor) -> bool:
    """Whether exponentials are in what is divided."""
    return reaches(x.grad_fn, partial(_is_scaled, run.counts))


def _is_scaled(counts: dict[int, int], node: Any) -> bool:
    return _factors.DECAYED in node.metadata or counts.get(node._sequence_nr(), 1) <= 0


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
