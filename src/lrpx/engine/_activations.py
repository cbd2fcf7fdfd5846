"""The rule for activations, for an element-wise function as a whole, however it is written; and for exponentials.

A function of a function is one function of the root of that (``engine/_functions.py``). An exponential is a softmax, if
its exponent is normalised; one of a sum that logarithms are in would be a product, and is refused.
"""

from __future__ import annotations

from functools import partial
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _exponentials, _factors, _logarithms, _moved, _nodes, _notes, _softmaxes
from lrpx.engine._functions import (
    CURVED,
    EXPONENTIAL,
    FILLED,
    LINEAR,
    PARTWISE,
    Function,
    curved,
    fits,
    function_of,
    has_rules,
    linked,
    then,
    write_note,
)
from lrpx.engine._gates import EXPONENTS, mark_written
from lrpx.engine._lost import CUT, MOVED, is_forgotten, is_lost, was_function, was_moved
from lrpx.engine._nodes import SHAPES, SUMS
from lrpx.engine._tensors import carries

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]


def activation(run: Any, op: Op, x: Tensor, kind: int = CURVED) -> Tensor:
    """``op(x)``, an element-wise function, under the recipe's rule; as a whole with what ``x`` is a function of."""
    if hasattr(x, FILLED) and (whole := _of_filled(run, op, x, kind)) is not None:
        return whole
    found = function_of(x)
    root = x if found is None else found.root
    lost = ""
    if hasattr(root, CUT) and is_lost(run, op, found or Function(x)):
        lost = "relu with inplace=True, before a function that is not 0 at 0 (leave inplace out)"
    elif was_moved(run, op, found or Function(x), kind):
        lost = MOVED
    elif found is None and is_forgotten(x) and was_function(run, op, Function(x), kind):
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


def as_whole(run: Any, root: Tensor, value: Tensor, again: Op, kind: int) -> Tensor:
    """``value = again(root)`` under the rule for activations; the root is kept for a function of it that may follow."""
    takes_value = _takes_value(run)

    def op(x: Tensor) -> Any:
        return value.detach() if takes_value else again(x)

    rule = run.recipe.activation
    if rule is rules.identity and hasattr(again, _moved.MASKING):
        rule = partial(_where_it_counts, again)
    if was_moved(run, again, Function(root), kind):
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


def _takes_value(run: Any) -> bool:
    """Whether the rule for activations takes nothing of a function but its value."""
    return run.recipe.activation in (rules.identity, rules.constant)


def may_be_moved(run: Any) -> bool:
    """Whether functions of what was moved are known: the rule for activations takes their value, or what their parts
    hand on."""
    return _takes_value(run) or run.recipe.activation is rules.unmodified


# -------------------------------------------------------------------------------------------------------- exponentials


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


def of_exponential(run: Any, op: Op, x: Tensor) -> Tensor | None:
    """``op(x)``, a power or a number over ``x``, if ``x`` is an exponential: then it is one, of another exponent."""
    found = _exponentials.exponent_of(x)
    if found is None or not has_rules(run):
        return None
    exponent, before = found
    return exponential(run, lambda exponent: op(before(exponent)), exponent)


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
