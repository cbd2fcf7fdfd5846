"""The rule for softmax, where a model writes one out; and what is a softmax, or made of one.

What was made of exponentials is made again of their exponents under the rule, and has the value that is there. What
may be a softmax and is not known is refused here, and so is what belongs to the scores under a rule that sees them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _factors, _roles
from lrpx.engine._gates import mark_gate
from lrpx.engine._logarithms import is_logarithm, log_of, mark_merging
from lrpx.engine._nodes import LINEAR, SCALES, SHAPES, kind
from lrpx.engine._notes import (
    LEADS_ON,
    LOG,
    NORMALISED,
    PRODUCTS,
    Leaf,
    Made,
    Note,
    leaves_of,
    noted,
    raised,
    reaches,
    remade,
    unchanged,
)
from lrpx.engine._tensors import is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.errors import MethodError
    from lrpx.recipes import Recipe

    Op = Callable[..., Any]


SCORES = "_lrpx_scores"
"""The attribute of a softmax: ``(version, what it is of, its version, the dimension)``; of one that was written out the
version and None. The run keeps the newest of what a softmax is of, so that its logarithm does not hang on whether the
model has kept it."""
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


DEEPEST = 128
"""Nodes after one another that are looked through for a softmax."""


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


# -------------------------------------------------------------------------------------- softmaxes that are written out


def exponential_of_normalised(run: Any, op: Op, x: Tensor) -> Tensor | None:
    """``op(x)``, an exponential, if that is a softmax: ``x`` is ``z − log Σ exp z``."""
    found = noted(x)
    if found is None or found[1] != NORMALISED:
        if run.has_scales and not _rises(x, found) and reaches(x.grad_fn, is_logarithm):
            return refused(run, "exp of what the logarithm of a sum of exponentials was taken off", op, x)
        return None
    made = Made(op, found[0])
    softmax = softmax_of(run, op(x.detach()), made)
    return refused(run, "exp of a log-softmax", op, x) if softmax is None else softmax


def _rises(x: Tensor, found: tuple[Made, int] | None) -> bool:
    """Whether ``x`` is made of logarithms of sums of exponentials alone, and more where all exponents are: no
    difference of two, whose exponential is a weight."""
    if found is None or found[1] != LOG:
        return False
    return type(x) is not Tensor or not torch.allclose(raised(found[0]), x.detach(), rtol=0.0, atol=2.0**-4)


def logarithm_of_sum(run: Any, op: Op, x: Any) -> Tensor | None:
    """``op(x)``, the logarithm of ``x``, a sum of exponentials (``_notes.is_sum``), under the rule for softmax, as
    ``logsumexp`` has it; None where its scores were changed since, or there are no rules."""
    found = noted(x)
    if found is None or not run.recipe.has_rules():
        return None
    out = under_softmax(run, op(x.detach()), Made(op, found[0]))
    if out is not None:
        log_of(run, out, x, op)
    return out


def softmax_of(run: Any, value: Tensor, made: Made) -> Tensor | None:
    """``value``, a softmax that was made so, under the recipe's rule for it; None where its scores were changed since,
    or are several tensors and the rule is for one."""
    y = under_softmax(run, value, made)
    if y is None:
        return None
    out = mark_gate(run.recipe, "softmax", _weights(run, y, made))
    for scores in {id(each.tensor): each.tensor for each in leaves_of(made)}.values():
        mark_merging(run, out, scores)
    if asks_for_scores(run.recipe):
        # its logarithm is no log-softmax that is at hand
        note_softmax(out, Note((out._version, None)))
    return out


def _weights(run: Any, y: Tensor, made: Made) -> Any:
    """``y``, marked as attention weights, if it is none of a router's scores."""
    if not run.asks_for_places:
        return y
    leaf = leaves_of(made)[0]
    scores = leaf.tensor
    outputs = along_outputs(made, leaf)
    if outputs is not None:
        return _roles.mark_weights(run, y, scores, outputs)
    dims = range(-1, -y.ndim - 1, -1) if scores.shape == y.shape else (-1,)
    dim = next((each for each in dims if y.ndim and _roles.sums_to_one(y, each)), None)
    if dim is None:
        return _roles.mark_weights(run, y)
    return _roles.mark_weights(run, y, scores, None if _roles.is_of_outputs(scores, dim) else dim)


def along_outputs(made: Made, leaf: Leaf) -> int | None:
    """Along which dimension of exponents a sum of their exponentials, or what was divided by one, is over all outputs
    of a layer, as a router's is, wherever they were moved since; None if along none."""
    scores = leaf.tensor
    return next((d for d in range(-scores.ndim, 0) if _roles.is_of_outputs(scores, d) and _adds(made, leaf, d)), None)


def _adds(made: Made, leaf: Leaf, dim: int) -> bool:
    """Whether it adds up what is along a dimension: without some of it there is less, and neither nothing nor the
    same; told with equal exponents, for one of a run's may outweigh all others. Where they were changed since, nobody
    can tell."""
    leaves, size = leaves_of(made), leaf.tensor.shape[dim]
    if not unchanged(leaves):
        return dim == -1
    given = {each: torch.zeros_like(each.tensor.detach()) for each in leaves}
    whole = remade(made, given)
    number = torch.arange(size, device=whole.device).view(-1, *(1,) * (-1 - dim))
    found = torch.zeros((), dtype=torch.bool, device=whole.device)
    for bit in range((size - 1).bit_length()):  # any two numbers differ in one
        left = remade(made, given | {leaf: given[leaf].masked_fill((number >> bit) % 2 == 1, -torch.inf)})
        found = found | ~((left == 0) | left.isnan() | torch.isclose(left, whole)).all()
    return _roles.is_found(found, (leaf.tensor.shape, "adds", dim))


PLAIN = (rules.unmodified, rules.constant)
"""Rules for softmax that take a function as it is, whatever of."""


def under_softmax(run: Any, value: Tensor, made: Made) -> Tensor | None:
    """``value``, that was made so of exponentials, as a function of their exponents under the rule for softmax; None
    where these were changed since, or are several tensors and the rule is for one."""
    leaves, softmax = leaves_of(made), run.recipe.softmax
    scores = list({id(each.tensor): each.tensor for each in leaves}.values())
    is_one = len(scores) == 1 or softmax is rules.unmodified
    if softmax is not rules.constant and not (is_one and unchanged(leaves)):
        return None
    if made.is_weighed and softmax not in PLAIN and not isinstance(softmax, rules.Scaled):
        why = "of exponentials beside other constants, which belong to the scores"
        raise run.refuse_rule("softmax", "exp", why, "add the logarithms of these to the scores, or ")
    if softmax in OF_SCORES:
        if any(_has_taken_off(each.grad_fn) for each in scores):
            raise _refuse_taken_off(run, "exp")
        if not _stays(made, value):
            why = "of exponentials that were moved or chosen before they were divided"
            raise run.refuse_rule("softmax", "exp", why, "divide first, or move the scores themselves, or ")

    def again(*given: Tensor) -> Any:
        if softmax is rules.constant:
            return value.detach()
        of = {id(score): x for score, x in zip(scores, given, strict=True)}
        return remade(made, {each: of[id(each.tensor)] for each in leaves})

    y: Tensor = run.apply("softmax", again, *scores)
    return y if softmax is rules.constant else rules.with_gradient_of(value, y)


def _stays(made: Made, value: Tensor) -> bool:
    """Whether each number of a softmax is that of the exponent in its own place: without it, it is nothing, and
    without others it is something."""
    leaves = leaves_of(made)
    if any(each.tensor.shape != value.shape for each in leaves):
        return False
    number = torch.arange(value.numel(), device=value.device).view(value.shape)
    found = torch.ones((), dtype=torch.bool, device=value.device)
    for bit in range((value.numel() - 1).bit_length()):  # any two numbers differ in one
        out = (number >> bit) % 2 == 1
        left = remade(made, {each: each.tensor.detach().masked_fill(out, -torch.inf) for each in leaves})
        found = found & torch.where(out, (left == 0) | left.isnan(), (left != 0) | (value == 0)).all()
    return _roles.is_found(found, (value.shape, "stays"))


# ----------------------------------------------------------------------------------------------------- what is refused


def refused(run: Any, what: str, op: Op, *given: Tensor, under_constant: bool = False) -> Tensor | None:
    """``op(*given)``, a softmax that is not known: refused, with its plain gradient, where the recipe has a rule that
    hands something on; nothing where it has none, unless it matters ``under_constant``."""
    is_constant = run.recipe.softmax is rules.constant
    if (is_constant and not under_constant) or not run.recipe.has_rules():
        return None
    run.refuse(f"{what} (if that is a softmax: torch.softmax)")
    out: Tensor = run.apply("unknown", op, *given, rule=rules.unmodified)
    return out


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
