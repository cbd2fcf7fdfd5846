"""What a tensor was moved from, on the graph: by shapes, copies and selections, with which functions of it commute.

``a.mT.contiguous() * sigmoid(a).mT.contiguous()`` is a function of ``a.mT``, though neither tensor knows of ``a``: what
was noted of a function is noted at its node of the graph, too, and places are compared by what moves hand back.
"""

from __future__ import annotations

from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lrpx.engine._nodes import kind
from lrpx.engine._tensors import LISTS, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Op = Callable[..., Any]
    Edge = tuple[Any, int]

MOVES = frozenset(
    """Clone ToCopy Alias View UnsafeView ReshapeAlias Reshape Transpose Permute T Movedim Swapaxes Unsqueeze Squeeze
    Expand Repeat Flip Roll Select Slice Index IndexSelect Gather Narrow Split SplitWithSizes Unbind Diagonal AsStrided
    ConstantPadNd Unfold""".split()
)
"""Nodes of one input whose result is some of its numbers, in other places."""

FARTHEST = 32
"""Nodes that are looked at for one tensor."""

FUNCTION = "lrpx function"
"""The key, in what a node of the graph carries along, of what it is an element-wise function of: ``(edge of the root,
kind, exact, op)``."""


class Way(NamedTuple):
    """What a tensor was moved from: an element-wise function, ``op``, of what left the node ``end``, moved."""

    end: Edge
    moves: Sequence[Edge]
    kind: int = 0
    exact: bool = True
    op: Op | None = None


def note(out: Tensor, root: Tensor, kind: int, exact: bool, op: Op | None) -> None:
    """Note at the node of ``out`` that it is ``op(root)``."""
    node: Any = out.grad_fn
    of = root.grad_fn
    if node is not None and of is not None and of is not node:
        node.metadata[FUNCTION] = (of, root.output_nr), kind, exact, op


def is_moved(x: Tensor) -> bool:
    """Whether the last thing that was done with a tensor is a move; not that of a linear layer to the shape it has."""
    node: Any = x.grad_fn
    if node is None or (name := kind(node)) not in MOVES:
        return False
    made_of = node.next_functions[0][0]
    return name != "UnsafeView" or (made_of is not None and kind(made_of) in MOVES)


def way(x: Tensor) -> Way:
    """What ``x`` was moved from, as far as it is a function of one tensor."""
    node: Any = x.grad_fn
    place = x.output_nr
    moves: list[Edge] = []
    ops: list[Op] = []
    of, is_exact = 0, True
    for _ in range(FARTHEST):
        if node is None:
            break
        noted = node.metadata.get(FUNCTION)
        if noted is not None:
            (node, place), its_kind, its_exact, op = noted
            of, is_exact = max(of, its_kind), is_exact and its_exact
            if op is not None:
                ops.append(op)
        elif kind(node) in MOVES and (child := node.next_functions[0])[0] is not None:
            moves.append((node, place))
            node, place = child
        else:
            break
    return Way((node, place), moves, of, is_exact, _composed(ops) if ops else None)


def _composed(ops: Sequence[Op]) -> Op:
    """The last of these, then the one before it, and so on."""

    def op(x: Any) -> Any:
        for each in reversed(ops):
            x = each(x)
        return x

    return op


def are_in_one_place(one: Way, other: Way, like: Tensor) -> bool:
    """Whether two tensors of the shape of ``like`` are the same elements of the same, in the same order."""
    if one.end != other.end:
        return False
    if one.moves == other.moves:
        return True
    if [node for node, _ in one.moves] == [node for node, _ in other.moves]:  # two parts of one split
        return False
    with _disable_current_modes(), torch.no_grad():
        numbers = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
        numbers = (numbers * 2654435761.0 + 1).remainder(2.0**31).view(like.shape)  # whatever is added up is exact
        return torch.equal(*(_handed_back(each.moves, numbers) for each in (one, other)))


def _handed_back(moves: Sequence[Edge], numbers: Tensor) -> Tensor:
    for node, place in moves:
        if kind(node) == "ToCopy":  # which would round
            before, at = node.next_functions[0]
            numbers = numbers.to(before._input_metadata[at].device)
            continue
        given: list[Tensor | None] = [None] * len(node._input_metadata)
        given[place] = numbers
        back = node(*given)
        numbers = back[0] if isinstance(back, tuple) else back
    return numbers


# ------------------------------------------------------------------------------ computed twice

TWICE = MOVES | frozenset("Mm Addmm Bmm Baddbmm Mv Addmv Linear Convolution Mul Div Add Sub Rsub Stack Cat".split())
"""Nodes that compute the same again of the same."""
DEEPEST = 8
"""Nodes after one another that are compared."""


def are_twins(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one that was computed twice, ``layer(x)`` and ``layer(x)``: they have the same numbers,
    and were made by the same calls of the same. What was added to them the graph does not keep, but the numbers tell.
    """
    if a.shape != b.shape or a.grad_fn is None or b.grad_fn is None:
        return False
    return _alike((a.grad_fn, a.output_nr), (b.grad_fn, b.output_nr), DEEPEST) and torch.equal(a.detach(), b.detach())


def _alike(one: Edge, other: Edge, left: int) -> bool:
    (a, i), (b, j) = one, other
    if a is b or i != j:
        return one == other
    if a is None or b is None or not left or a.name() != b.name() or kind(a) not in TWICE:
        return False
    if len(a.next_functions) != len(b.next_functions):
        return False
    if not all(map(_alike, a.next_functions, b.next_functions, repeat(left - 1))):
        return False
    return all(_is_same(getattr(a, name), getattr(b, name)) for name in _saved(type(a)))  # type: ignore[arg-type]


@cache
def _saved(of: type) -> tuple[str, ...]:
    """The names of what a kind of node keeps."""
    return tuple(name for name in dir(of) if name.startswith("_saved_"))


def _is_same(a: Any, b: Any) -> bool:
    """Whether two that nodes have kept are one: a weight is one in one place, and indices in any."""
    if type(a) is not type(b):
        return False
    if not is_tensor(a):
        return all(map(_is_same, a, b)) and len(a) == len(b) if type(a) in LISTS else bool(a == b)
    # a compiler's tensors have a storage, and no other place
    is_one = a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
    if not is_one and (a.is_floating_point() or type(a) is not torch.Tensor):  # nearly always
        return False
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    return is_one or torch.equal(a, b)
