"""Some of a softmax over their own sum, which are the softmax of what was chosen.

A router shares among the experts that it has chosen so, and attention that is masked after its softmax among the tokens
that are left. What some of a softmax are, and what is made of them by products and sums, the graph tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import _kernels, rules
from lrpx.engine import _factors
from lrpx.engine._gates import mark_gate
from lrpx.engine._nodes import FUNCTION, LINEAR, SCALES, SHAPES, kind, saved
from lrpx.engine._notes import LEADS_ON, PRODUCTS, Note
from lrpx.engine._softmaxes import DEEPEST, LEAST, is_guarded, made_softmax, note_softmax, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Op = Callable[..., Any]

MATRICES = {"Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Mv": ("self", "vec"), "Dot": ("self", "tensor")}
"""Nodes of matrix products, and what they call their two factors, of which they keep one if the other needs it."""
ADDS_UP = frozenset("Sum Nansum Mean Cumsum Add LinalgVectorNorm".split()) | frozenset(MATRICES)
"""Nodes of sums; the 1-norm is one of what is not negative (DBRX's router)."""


def chosen(run: Any, op: Op, a: Tensor, b: Tensor, power: tuple[Tensor, Op] | None = None) -> Tensor | None:
    """``op(a, b) = a / b``, some of a softmax over their own sum, as a router shares among the experts it has chosen:
    the softmax of what was chosen, of whose gradient those that were not have no part. A softmax to a power over its
    sum is the softmax of the scores times that power. What was multiplied with such weights before the division,
    ``(p @ v) / Σ p``, is a product of that softmax and the values.

    Args:
        run: the run.
        op: the quotient.
        a: what is divided.
        b: what divides.
        power: ``(p, function)``, if ``a`` is a function of ``p``: perhaps a softmax to a power.
    """
    if not _is_plain(run.recipe.softmax) or run.recipe.norm is rules.unmodified:
        return None
    if power is not None and (sharpened := _sharpened(run, op, a, b, *power)) is not None:
        return sharpened
    softmax, is_sum = _made_of(b.grad_fn, _is_softmax)
    if softmax is None or not is_sum:
        return None
    if _made_of(a.grad_fn, _is_softmax)[0] is softmax:
        return _renormalised(run, run.apply("softmax", op, a, b, rule=rules.unmodified))
    share = _Shares(run, softmax).of(a.grad_fn)
    return None if share == 0 else _weighted_by_chosen(run, op, a, b, share)


def _is_plain(rule: Any) -> bool:
    """Whether a rule for softmax is its plain gradient, or so many times that."""
    return rule is rules.unmodified or isinstance(rule, rules.Scaled)


def _renormalised(run: Any, out: Tensor) -> Tensor:
    """``out``, a softmax."""
    note_softmax(out, Note((out._version, None)))
    return mark_gate(run.recipe, "softmax", _factors.made_of(run, out, 1))


def _made_of(node: Any, fits: Callable[[Any], bool]) -> tuple[Any, bool]:
    """The one node that fits, of whose numbers a node has chosen some and perhaps added them up, with nothing else that
    depends on the input; None, if there is none, or several. And whether any were added."""
    found, is_sum, seen, waiting = set[Any](), False, {node}, [node]
    while waiting:
        each = waiting.pop()
        if fits(each):
            found.add(each)
            continue
        made_of = [child for child, _ in each.next_functions if child is not None and not _factors.is_entry(child)]
        if len(found) > 1 or len(seen) > _factors.FARTHEST or not made_of or not _adds(each, len(made_of)):
            return None, False
        is_sum = is_sum or kind(each) in ADDS_UP
        waiting += [child for child in made_of if child not in seen]
        seen.update(made_of)
    return (found.pop(), is_sum) if len(found) == 1 else (None, False)


def _adds(node: Any, count: int) -> bool:
    """Whether a node chooses, scales or adds up what it is made of, which is not negative: so many that depend on the
    input."""
    name = kind(node)
    if not _is_scaling(node):
        return _is_guard(node)
    if name in SCALES:
        return count == 1
    if name in MATRICES:
        return count == 1 and all(_is_of_ones(saved(node, each)) for each in MATRICES[name])
    if name == "LinalgVectorNorm":
        return bool(node._saved_ord == 1)
    return name in LINEAR


def _is_of_ones(x: Tensor | None) -> bool:
    """Whether there is nothing but 0 and 1 in a tensor, if there is one."""
    return x is None or all(bool(((x == 0) | (x == 1)).all()) for x in (x.detach()[:1], x.detach()))


def _is_guard(node: Any) -> bool:
    """Whether the node of a function scales what is between 0 and 1, but for a guard."""
    (root, place), *_, op = node.metadata[FUNCTION]
    if op is None:
        return False
    like = root._input_metadata[place]
    with _disable_current_modes():  # numbers, also where a compiler traces the model
        x = torch.full(like.shape, 0.5, dtype=like.dtype, device=like.device)
        return all(torch.allclose(op(x / n) * n, op(x), rtol=0.0, atol=LEAST * n) for n in (1.5, 4))


def _sharpened(run: Any, op: Op, a: Tensor, b: Tensor, p: Tensor, power: Op) -> Tensor | None:
    """``op(a, b) = a / b``, if that is a softmax ``p`` to a power, ``a = power(p)``, over its sum."""
    if _made_of(p.grad_fn, _is_softmax)[0] is None or not _is_power(p.detach(), power):
        return None
    if _made_of(b.grad_fn, lambda each: _is_alike(each, a, p, power))[0] is None:
        return None
    sums = ((dim, a.detach().sum(dim, keepdim=True).expand_as(a)) for dim in reversed(range(a.ndim)))
    dim = next((dim for dim, total in sums if is_guarded(b.expand_as(a), total)), None)
    if dim is None:
        return None

    def again(p: Tensor) -> Any:
        y = power(p)
        return y / y.sum(dim, keepdim=True)

    y: Tensor = run.apply("softmax", again, p, rule=rules.unmodified)
    return _renormalised(run, rules.with_gradient_of(op(a.detach(), b.detach()), y))


def _is_alike(node: Any, a: Tensor, p: Tensor, function: Op) -> bool:
    """Whether a node has made ``a``, or the same function of ``p`` once more, as of a power that is written twice."""
    if node is a.grad_fn:
        return True
    root, *_, op = node.metadata.get(FUNCTION, (None, None))
    return root == (p.grad_fn, p.output_nr) and op is not None and torch.equal(op(p.detach()), function(p.detach()))


def _is_power(x: Tensor, function: Op) -> bool:
    """Whether a function of what is not negative is a power: twice as much is as many times as much everywhere."""
    before = function(x)
    times = (function(2 * x) / before)[before != 0]
    return bool(times.numel()) and bool(
        (times - times[0]).abs().max() <= torch.finfo(x.dtype).eps ** 0.5 * times[0].abs()
    )


def _weighted_by_chosen(run: Any, op: Op, a: Tensor, b: Tensor, share: float | None) -> Tensor | None:
    """``op(a, b) = a / b``, sums of products with some of a softmax over the sum of these: what divides hands on the
    share that the softmax has of the products. Refused, where it is no such sums."""
    if share is None or not run.recipe.product is run.recipe.matmul is rules.uniform:
        return refused(run, "division, of what some of a softmax are in, by their sum", op, a, b)
    n = _factors.factors(run, a)
    shared: Tensor = run.apply(
        "softmax", lambda a, b: op(a, _kernels.scale_gradient(b, share)), a, b, rule=rules.unmodified
    )
    return cast("Tensor", _factors.made_of(run, shared, n))


class _Shares:
    """Which share a softmax has of what is made of it by sums and products.

    Attributes:
        known: the shares of nodes that were looked at.
        above: of how many factors a product is, where that is noted at the shape that it has in the end.
    """

    def __init__(self, run: Any, softmax: Any) -> None:
        self.run, self.softmax = run, softmax
        self.known: dict[Any, float | None] = {softmax: 1.0}
        self.above: dict[Any, int] = {}

    def of(self, node: Any, depth: int = 0) -> float | None:
        """The share of sums of products of some of the softmax and others; 0 if it is in none, and None for sums of
        both, and of products in which it has other shares."""
        if node in self.known:
            return self.known[node]
        if _factors.is_entry(node) or node._sequence_nr() < self.softmax._sequence_nr() or depth == DEEPEST:
            return 0.0
        self.known[node], name = 0.0, kind(node)
        made_of = [child for child, _ in node.next_functions if child is not None]
        if name in _factors.ADDS:
            shares = [self.of(child, depth + 1) for child in made_of]
            shares += [0.0] * (len(made_of) == 1)  # a constant
        elif name in PRODUCTS:
            shares = [self._of_product(node, made_of, depth)]
        elif name in LEADS_ON:
            if name in SHAPES and (count := self._count(node)) is not None:
                self.above[made_of[0]] = count
            shares = [self.of(child, depth + 1) for child in made_of if not _factors.is_entry(child)]
        else:
            shares = []
        if shares:
            self.known[node] = shares[0] if len(set(shares)) == 1 and (_is_scaling(node) or not shares[0]) else None
        return self.known[node]

    def _of_product(self, node: Any, made_of: list[Any], depth: int) -> float | None:
        """The same of a product; of one of several, which is made two by two, the last knows of how many."""
        shares = [self.of(child, depth + 1) for child in made_of]
        if None in shares or sum(map(bool, shares)) > 1:
            return None
        for child, share in zip(made_of, shares, strict=True):
            if share:
                count = self._count(node) if len(made_of) > 1 else None
                return share if count is None else share * _factors.of_node(self.run, child) / count
        return 0.0

    def _count(self, node: Any) -> int | None:
        found: int | None = self.above.get(node, self.run.counts.get(node._sequence_nr()))
        return found


def _is_scaling(node: Any) -> bool:
    """Whether a node, perhaps a product, is not that of a function: a square is made as a product with a constant."""
    return not node.metadata.get(FUNCTION, (None, 0))[1]


def _is_softmax(node: Any) -> bool:
    """Whether a node of the graph made a softmax."""
    # a user's own function may have torch's name
    return made_softmax(node) or (kind(node) == "Softmax" and hasattr(node, "_saved_dim"))
