"""Logarithms of sums of exponentials, which normalise the scores that they are taken off.

``log Σ exp x`` by ``logsumexp``, ``logaddexp`` or written out is noted on its tensor, and so is ``x − log Σ exp x``,
the exponential of which is a softmax. Their nodes of the graph are marked, too: attention that is put together by such
logarithms is a product of more factors than attention at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from lrpx.engine import _factors
from lrpx.engine._notes import LOG, NORMALISED, PART, Leaf, Made, is_sum, leaves_of, note, noted, raised, reaches

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]


LOGGED = "lrpx logarithm"
"""What the node of the graph is marked with that made a logarithm."""
LOGARITHM = "lrpx logarithm of a sum"
"""What the node of the graph is marked with that made the logarithm of a sum of exponentials."""


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


def normalised(run: Any, out: Tensor, x: Tensor, op: Op) -> None:
    """``out = op(x)``, ``x − log Σ exp x``."""
    note(out, Made(op, Leaf(x)), NORMALISED)
    _meet_logarithm(run, out)


def is_normalised(x: Tensor) -> bool:
    """Whether ``x`` is ``z − log Σ exp z``."""
    found = noted(x)
    return found is not None and found[1] == NORMALISED


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
    if not is_difference and any(leaf.tensor is not x for leaf in leaves_of(log)):  # of others, as Sinkhorn's sums are
        return False
    given = (x.detach(), raised(log))
    way = op(*(given[::-1] if is_first else given)) - out.detach()
    return bool((way < 0).any()) and not (way > 0).any()  # what a mask forbids stays where it is


def before_logarithm(a: Any, b: Any) -> Tensor | None:
    """A copy of ``a``, which the logarithm ``b`` of a sum of its exponentials will be taken off in place: it is what
    both are made of then."""
    found = noted(b)
    if found is None or found[1] != LOG or noted(a) is not None:
        return None
    before: Tensor = a.clone()
    for leaf in leaves_of(found[0]):
        if leaf.tensor is a and leaf.version == a._version:
            leaf.tensor, leaf.version = before, before._version
    return before


# ---------------------------------------------------------------------------------------------------- what they are in


def is_logarithm(node: Any) -> bool:
    """Whether a node of the graph made the logarithm of a sum of exponentials."""
    return LOGARITHM in node.metadata


def has_logarithm(x: Tensor) -> bool:
    """Whether a logarithm is in ``x``, by sums, selections and in whatever shape."""
    found = noted(x)
    return (found is not None and found[1] == LOG) or reaches(
        x.grad_fn, lambda node: LOGGED in node.metadata or LOGARITHM in node.metadata
    )


def has_logarithm_of_sum(x: Tensor) -> bool:
    """The same of the logarithm of a sum of exponentials."""
    return reaches(x.grad_fn, is_logarithm)


def mark_merging(run: Any, weights: Tensor, scores: Tensor, least: int = 1) -> bool:
    """Mark ``weights``, a softmax or another function of ``scores``, if there are such logarithms in these, ``least``
    of them, or such weights: a sigmoid of one and a constant is attention with a sink. Whether they are."""
    logarithms = set[Any]()

    def is_last(each: Any) -> bool:
        if is_logarithm(each):
            logarithms.add(each)
        return len(logarithms) == least or _factors.MERGING in each.metadata

    is_merging = run.has_logarithms and _factors.reaches(scores.grad_fn, is_last)
    if is_merging:
        _factors.mark_merging(run, weights)
    return bool(is_merging)
