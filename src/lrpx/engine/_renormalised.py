"""Some of a softmax over their own sum, which are the softmax of what was chosen.

A router shares among the experts that it has chosen so, and attention that is masked after its softmax among the tokens
that are left. What some of a softmax are, and what is made of them by products and sums, the graph tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from lrpx import _kernels, rules
from lrpx.engine import _factors
from lrpx.engine._exponentials import (
    DEEPEST,
    LEADS_ON,
    PRODUCTS,
    SOFTMAX,
    Note,
    is_guarded,
    note_softmax,
    refused,
)
from lrpx.engine._gates import mark_gate
from lrpx.engine._nodes import FUNCTION, SHAPES, kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Op = Callable[..., Any]

CHOICES = frozenset(
    """Topk Sort Gather Index IndexSelect Slice Narrow MaskedFill Where Mul Div ToCopy Clone Alias Cat Copy CopySlices
    Split SplitWithSizes Scatter ScatterAdd IndexPut IndexAdd IndexCopy MaskedScatter ConstantPadNd""".split()
)
"""Nodes that choose some of a softmax, where only one of what they are made of depends on the input."""
OF_ROWS = frozenset("View UnsafeView ReshapeAlias Reshape Squeeze Unsqueeze Select".split())
"""Nodes that give what they are made of another shape."""
MOVED = frozenset("ToCopy Expand Clone Alias Permute Transpose T Slice".split()) | OF_ROWS
"""Nodes between a sum and what is divided by it."""
GUARDS = MOVED | frozenset("Add Mul Div Clamp ClampMin _Identity".split())
"""The same, with a number that scales or is added, or a bound."""


def chosen(
    run: Any, op: Op, a: Tensor, b: Tensor, root: Tensor, power: tuple[Tensor, Op] | None = None
) -> Tensor | None:
    """``op(a, b) = a / b``, some of a softmax over their own sum, as a router shares among the experts it has chosen:
    the softmax of what was chosen, of whose gradient those that were not have no part. A softmax to a power over its
    sum is the softmax of the scores times that power. What was multiplied with such weights before the division,
    ``(p @ v) / Σ p``, is a product of that softmax and the values.

    Args:
        run: the run.
        op: the quotient.
        a: what is divided.
        b: what divides.
        root: what that was before numbers were added, or bounds set.
        power: ``(p, function)``, if ``a`` is a function of ``p``: perhaps a softmax to a power.
    """
    if run.recipe.softmax is not rules.unmodified or run.recipe.norm is rules.unmodified:
        return None
    totals, dim = _sums_in(b)
    is_own = [_copied(each.next_functions[0]) for each in totals] == [_copied((a.grad_fn, a.output_nr))]
    if is_own and power is not None and (sharpened := _sharpened(run, op, a, b, dim, *power)) is not None:
        return sharpened
    found = {_softmax_in(each.next_functions[0][0], dim) for each in totals}
    if len(found) != 1 or (softmax := found.pop()) is None:
        return None
    if not is_own:
        is_sum = is_guarded(b, root) and set(_summed(root.grad_fn, MOVED)) == set(totals)
        return _weighted_by_chosen(run, op, a, b, softmax, is_sum=is_sum)
    sums = a.detach().sum(dim, keepdim=True)
    if not is_guarded(b, sums.expand_as(a) if b.shape == a.shape else sums):
        return None
    out: Tensor = run.apply("softmax", op, a, b, rule=rules.unmodified)
    return _renormalised(run, out, dim)


def _renormalised(run: Any, out: Tensor, dim: int) -> Tensor:
    """``out``, a softmax along a dimension."""
    note_softmax(out, Note((out._version, None)), dim % out.ndim)
    return mark_gate(run.recipe, "softmax", _factors.made_of(run, out, 1))


def _sums_in(b: Tensor) -> tuple[list[Any], int]:
    """The nodes of the sums that divide, and along which dimension they are, from the end; none, if along several."""
    totals, dims = _summed(b.grad_fn, GUARDS), set[int]()
    for total in totals:
        along: Any = getattr(total, "_saved_dim", ())
        child, place = total.next_functions[0]
        ndim = len(child._input_metadata[place].shape)
        dims.update(_signed(each) % ndim - ndim for each in along)
        if len(along) != 1 or len(dims) != 1:
            return [], 0
    return totals, next(iter(dims), 0)


def _summed(node: Any, leads_on: frozenset[str], depth: int = 0) -> list[Any]:
    """The nodes of sums that a node is made of, and of nothing else that depends on the input."""
    if depth == _factors.DEEPEST:
        return []
    if _is_sum_or_length(node):
        return [node]
    made_of = [child for child, _ in node.next_functions if child is not None and not _factors.is_entry(child)]
    if not (kind(node) == "Add" if len(made_of) > 1 else kind(node) in leads_on):
        return []
    found = [_summed(child, leads_on, depth + 1) for child in made_of]
    return [total for totals in found for total in totals] if all(found) else []


def _softmax_in(node: Any, dim: int) -> Any:
    """The softmax along a dimension, from the end, some of which a node has chosen."""
    softmax = _alone(node, _keeps_rows if dim == -1 else _chooses, lambda node: _dimension_of(node) is not None)
    if softmax is None or (cast("int", _dimension_of(softmax)) - dim) % len(softmax._input_metadata[0].shape):
        return None
    return softmax


def _sharpened(run: Any, op: Op, a: Tensor, b: Tensor, dim: int, p: Tensor, power: Op) -> Tensor | None:
    """``op(a, b) = a / b``, if that is a softmax ``p`` to a power, ``a = power(p)``, over its sum along a dimension."""
    if _softmax_in(p.grad_fn, dim) is None or not _is_power(p.detach(), power):
        return None

    def again(p: Tensor) -> Any:
        y = power(p)
        return y / y.sum(dim, keepdim=True)

    y: Tensor = run.apply("softmax", again, p, rule=rules.unmodified)
    return _renormalised(run, rules.with_gradient_of(op(a.detach(), b.detach()), y), dim)


def _is_power(x: Tensor, function: Op) -> bool:
    """Whether a function of what is not negative is a power: twice as much is as many times as much everywhere."""
    before = function(x)
    times = (function(2 * x) / before)[before != 0]
    return bool(times.numel()) and bool(
        (times - times[0]).abs().max() <= torch.finfo(x.dtype).eps ** 0.5 * times[0].abs()
    )


def _weighted_by_chosen(run: Any, op: Op, a: Tensor, b: Tensor, softmax: Any, *, is_sum: bool) -> Tensor | None:
    """``op(a, b) = a / b``, sums of products with some of a softmax over the sum of these: what divides hands on the
    share that the softmax has of the products. Refused, where it is no such sums, or not the sum that divides."""
    share = _Shares(run, softmax).of(a.grad_fn)
    if share == 0:
        return None
    if share is None or not is_sum or not run.recipe.product is run.recipe.matmul is rules.uniform:
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


def _chooses(node: Any) -> bool:
    return kind(node) in CHOICES and _is_scaling(node)


def _is_scaling(node: Any) -> bool:
    """Whether a node, perhaps a product, is not that of a function: a square is made as a product with a constant."""
    return not node.metadata.get(FUNCTION, (None, 0))[1]


def _keeps_rows(node: Any) -> bool:
    """Whether a node chooses some of a softmax along the last dimension, or gives its rows another shape."""
    if (name := kind(node)) not in OF_ROWS:
        return _chooses(node)
    child, place = node.next_functions[0]
    before, after = child._input_metadata[place].shape, node._input_metadata[0].shape
    is_last = name == "Select" and _signed(node._saved_dim) % len(before) == len(before) - 1
    return len(after) > 0 and before[-1] == after[-1] and not is_last


def _copied(edge: tuple[Any, int]) -> tuple[Any, int]:
    """What leaves a node of the graph, or what it is a copy of, as of what is divided in place."""
    node = edge[0]
    return node.next_functions[0] if node is not None and kind(node) == "Clone" else edge


def _dimension_of(node: Any) -> int | None:
    """Along which dimension the softmax is that a node of the graph made; None for any other node."""
    if SOFTMAX in node.metadata:
        found: int | None = node.metadata[SOFTMAX]
        return found
    # a user's own function may have torch's name
    return _signed(node._saved_dim) if kind(node) == "Softmax" and hasattr(node, "_saved_dim") else None


def _signed(dim: int) -> int:
    """A dimension as it is: torch saves it without its sign."""
    return dim - 2**64 if dim >= 2**63 else dim


def _is_sum_or_length(node: Any) -> bool:
    """Whether a node is a sum, a mean, or the 1-norm, which is one of what is not negative (DBRX's router)."""
    return kind(node) in ("Sum", "Mean") or (kind(node) == "LinalgVectorNorm" and getattr(node, "_saved_ord", 0) == 1)


def _alone(node: Any, leads_on: Callable[[Any], bool], fits: Callable[[Any], bool]) -> Any:
    """The node that fits, which this one is made of by others that lead on, and of nothing else that depends on the
    input."""
    for _ in range(_factors.DEEPEST):
        if node is None or fits(node):
            return node
        made_of = [child for child, _ in node.next_functions if child is not None and not _factors.is_entry(child)]
        if len(made_of) != 1 or not leads_on(node):
            return None
        node = made_of[0]
    return None
