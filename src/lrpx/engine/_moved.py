"""What a tensor was moved from, on the graph: by shapes, copies and selections, with which functions of it commute.

``a.mT.contiguous() * sigmoid(a).mT.contiguous()`` is a function of ``a.mT``, though neither tensor knows of ``a``: what
was noted of a function is noted at its node of the graph, too, and places are compared by what moves hand back.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx.engine._nodes import FUNCTION, SUMS, hooks_of_saved, kind
from lrpx.engine._notes import Note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Op = Callable[..., Any]
    Noted = Op | tuple[Op, Any, bool]
    """A function; or one of two arguments, the other of them, and whether that is the second: sooner made than a
    closure."""
    Edge = tuple[Any, int]

MOVES = frozenset(
    """Clone ToCopy Alias View UnsafeView ReshapeAlias Reshape Transpose Permute T Movedim Swapaxes Unsqueeze Squeeze
    Expand Repeat Flip Roll Rot90 Select Slice Index IndexSelect Gather Take MaskedSelect Narrow Split SplitWithSizes
    UnsafeSplit Unbind Diagonal DiagEmbed Tril Triu AsStrided ConstantPadNd Unfold Im2Col PixelShuffle PixelUnshuffle
    ChannelShuffle ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D
    UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D
    UpsampleNearestExact3D""".split()
)
"""Nodes of one input whose result is some of its numbers, in other places."""
CHOICES = frozenset(
    """Max Min Amax Amin Sort Topk Kthvalue Median Nanmedian Cummax Cummin MaxPool2DWithIndices MaxPool3DWithIndices
    AdaptiveMaxPool2D AdaptiveMaxPool3D NanToNum""".split()
)
"""Nodes whose result is some of the numbers too, but where, these tell: another text would have others in a place."""
JOINS = CHOICES | frozenset(
    """Cat Stack BlockDiag CopySlices IndexPut IndexCopy Scatter MaskedScatter SelectScatter SliceScatter
    DiagonalScatter AsStridedScatter Where MaskedFill IndexFill""".split()
)
"""Nodes that choose, or put several tensors together, each part as it is."""

FARTHEST = 32
"""Nodes that are looked at for one tensor."""


class Way(NamedTuple):
    """What a tensor was moved from: an element-wise function, ``op``, of what left the node ``end``, moved."""

    end: Edge
    moves: Sequence[Edge]
    kind: int = 0
    exact: bool = True
    op: Op | None = None


def callable_of(op: Noted) -> Op:
    """What was noted as a function that can be called."""
    if not isinstance(op, tuple):
        return op
    func, other, is_second = op
    made = (lambda x: func(x, other)) if is_second else lambda x: func(other, x)
    if isinstance(other, Tensor) or (isinstance(other, int | float) and other == 0):
        setattr(made, MASKING, isinstance(other, Tensor) and other.numel() > 1)
    return made


MASKING = "_lrpx_masks"
"""The attribute of a function that a tensor of constants is in, or a 0: where that has zeros, the function may be a
number. Whether there are several constants, so that it is one of what has their shape."""


def masking(op: Op, *made_of: Op | None) -> Op:
    """``op``, noted as such a function if one of those is that it is made of."""
    found = [getattr(each, MASKING) for each in made_of if hasattr(each, MASKING)]
    if found:
        setattr(op, MASKING, any(found))
    return op


def note(out: Tensor, root: Tensor, kind: int, exact: bool, op: Noted | None) -> None:
    """Note at the node of ``out`` that it is ``op(root)``."""
    node: Any = out.grad_fn
    of = root.grad_fn
    if node is not None and of is not None and of is not node:
        node.metadata[FUNCTION] = (of, root.output_nr), kind, exact, op


def is_scaling(op: Noted, out: Tensor) -> bool:
    """Whether ``op``, which has made ``out``, scales by a number, or turns the sign: it commutes with moves."""
    if not isinstance(op, tuple):
        return out.grad_fn is not None and kind(out.grad_fn) in ("Neg", "Add")  # `x + x`
    other = op[1]
    return isinstance(other, int | float) or (isinstance(other, Tensor) and other.numel() == 1)


def _unscaled_node(x: Tensor) -> Any:
    """The node that has made what a tensor is, or is so many times."""
    node: Any = x.grad_fn
    while node is not None and (noted := node.metadata.get(FUNCTION)) is not None and not noted[1] and noted[2]:
        node = noted[0][0]
    return node


def is_moved(x: Tensor) -> bool:
    """Whether the last thing that was done with a tensor is a move, and to scale it by numbers perhaps; not that of a
    linear layer to the shape it has."""
    return _is_move(x, _unscaled_node(x))


def _is_move(x: Tensor, node: Any) -> bool:
    if node is None or (name := kind(node)) not in MOVES:
        return False
    if name != "UnsafeView":
        return True
    made_of = None if hasattr(x, LAYER) else node.next_functions[0][0]
    return made_of is not None and kind(made_of) in MOVES


def is_of_moved(x: Tensor) -> bool:
    """Whether a tensor is a function of what was moved, or that itself."""
    node: Any = x.grad_fn
    while node is not None and (noted := node.metadata.get(FUNCTION)) is not None:
        node = noted[0][0]
    return _is_move(x, node)


def is_moved_or_joined(x: Tensor) -> bool:
    """Whether that is a move, or to choose from it, or to put it together."""
    node = _unscaled_node(x)
    name = "" if node is None else kind(node)
    if name in SUMS:  # of what was moved: a function of one tensor that only the graph knows
        return FUNCTION in node.metadata
    return name in JOINS or _is_move(x, node)


def is_shifted(x: Tensor) -> bool:
    """Whether a number was added to what a tensor was moved from, or to a part that it was put together of."""
    return is_moved_or_joined(x) and not all(way.exact for way in ways(x))


def ways(x: Tensor) -> list[Way]:
    """What ``x`` was moved from, and each part that it was put together of."""
    found, i = [way(x)], 0
    while i < len(found) <= FARTHEST:
        end = found[i].end[0] if found[i].op is None else None
        if end is not None and kind(end) in JOINS:
            found += [_way(child, at) for child, at in end.next_functions if child is not None]
        i += 1
    return found


def way(x: Tensor) -> Way:
    """What ``x`` was moved from, as far as it is a function of one tensor."""
    return _way(x.grad_fn, x.output_nr)


def _way(node: Any, place: int, is_passed: Callable[[int, bool, Op | None], bool] | None = None) -> Way:
    moves: list[Edge] = []
    ops: list[Op] = []
    of, is_exact = 0, True
    for _ in range(FARTHEST):
        if node is None:
            break
        noted = node.metadata.get(FUNCTION)
        if noted is not None:
            before, its_kind, its_exact, op = noted
            its_op = None if op is None else callable_of(op)
            if is_passed is not None and not is_passed(its_kind, its_exact, its_op):
                break
            (node, place), of, is_exact = before, max(of, its_kind), is_exact and its_exact
            if its_op is not None:
                ops.append(its_op)
        elif kind(node) in MOVES and (child := node.next_functions[0])[0] is not None:
            moves.append((node, place))
            node, place = child
        else:
            break
    return Way((node, place), moves, of, is_exact, _composed(ops) if ops else None)


def unscaled(way: Way) -> Callable[[Op | None], Op | None] | None:
    """If a tensor is what it was moved from, scaled by one number at most: how a function of that is one of this."""
    op = way.op
    if op is None:
        return lambda function: function
    if way.kind or not way.exact or getattr(op, MASKING, False):
        return None

    def before(x: Any) -> Any:
        return x / op(torch.ones((), dtype=x.dtype, device=x.device))

    return lambda function: before if function is None else masking(lambda x: function(before(x)), function)


def _composed(ops: Sequence[Op]) -> Op:
    """The last of these, then the one before it, and so on."""

    def op(x: Any) -> Any:
        for each in reversed(ops):
            x = each(x)
        return x

    return masking(op, *ops)


SAVING = frozenset("Index IndexSelect Gather Take MaskedSelect".split())
"""Moves whose nodes keep a tensor: where."""


def are_kept(*ways: Way) -> bool:
    """Whether nodes on the way keep tensors, which a checkpoint would have to compute again to tell them."""
    return any(kind(node) in SAVING for each in ways for node, _ in each.moves)


def are_in_one_place(one: Way, other: Way) -> bool | None:
    """Whether two tensors of one shape are the same elements of the same, in the same order; None where only numbers
    can tell (:func:`are_numbered_alike`)."""
    if one.end != other.end:
        return False
    if one.moves == other.moves:
        return True
    if [node for node, _ in one.moves] == [node for node, _ in other.moves]:  # two parts of one split
        return False
    return None


def are_numbered_alike(one: Way, other: Way, like: Tensor) -> bool:
    """The same, by numbers in the shape of ``like`` that the nodes hand back: small ones, whose sums are exact in each
    precision on the way."""
    dtypes = [node._input_metadata[place].dtype for each in (one, other) for node, place in each.moves]
    bits = round(-log2(max(torch.finfo(each).eps for each in (like.dtype, *dtypes)))) // 2

    def compare() -> bool:
        with _disable_current_modes(), torch.no_grad():
            numbers = torch.arange(like.numel(), device=like.device) * 2654435761 % 2**32 >> (32 - bits)
            given = (numbers + 1).view(like.shape).to(like.dtype)
            return torch.equal(*(_handed_back(each.moves, given) for each in (one, other)))

    if torch._C._current_graph_task_id() == -1:  # nearly always
        return compare()
    # a layer runs again in a backward pass, where nodes hand back what this pass asks for, and nothing else
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compare).result()


def are_moved_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one that was moved twice, alike, and scaled by the same number perhaps; and nothing else
    was done with."""
    if a.shape != b.shape or a.grad_fn is None or b.grad_fn is None:
        return False
    one, other = _scaled(a), _scaled(b)
    if not one.moves or not other.moves or a._version or b._version or not _are_scaled_alike(one, other):
        return False
    is_one = are_in_one_place(one, other)
    return are_numbered_alike(one, other, like=a) if is_one is None and not _is_hooked(one, other) else bool(is_one)


def _scaled(x: Tensor) -> Way:
    """What ``x`` was moved from, as far as it is that, so many times."""
    return _way(x.grad_fn, x.output_nr, lambda kind, exact, op: not kind and exact and not getattr(op, MASKING, False))


def _are_scaled_alike(one: Way, other: Way) -> bool:
    if one.op is other.op is None:
        return True
    with _disable_current_modes(), torch.no_grad():
        once = torch.ones((), dtype=torch.float64)
        times = [once if each.op is None else each.op(once) for each in (one, other)]
        return all(each.numel() == 1 for each in times) and len({each.item() for each in times}) == 1


def _is_hooked(*ways: Way) -> bool:
    """Whether a checkpoint would have to run again to tell."""
    return hooks_of_saved(False) is not None and are_kept(*ways)


def _handed_back(moves: Sequence[Edge], numbers: Tensor) -> Tensor:
    for node, place in moves:
        if kind(node) == "ToCopy":
            before, at = node.next_functions[0]
            as_before = before._input_metadata[at]
            numbers = numbers.to(as_before.device, as_before.dtype)
            continue
        given: list[Tensor | None] = [None] * len(node._input_metadata)
        given[place] = numbers
        back = node(*given)
        numbers = back[0] if isinstance(back, tuple) else back
    return numbers


# ------------------------------------------------------------------------------ computed twice

LAYER = "_lrpx_layer"
"""The attribute of what a linear layer has made: ``(what made its input, which of the results, weight, bias)``."""


def made_by_layer(out: Tensor, x: Tensor, given: Sequence[Any]) -> Tensor:
    """``out``, what a linear layer has made of ``x``; ``given``: ``x``, the weight and the bias, as they were given."""
    out.__dict__[LAYER] = Note((x.grad_fn, x.output_nr, given[1], given[2]))
    return out


def are_twins(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one that was computed twice, ``layer(x)`` and ``layer(x)``."""
    one = getattr(a, LAYER, None)
    other = None if one is None else getattr(b, LAYER, None)
    if one is None or other is None or one[2] is not other[2] or one[0] is None or a._version or b._version:
        return False
    return all(each is same for each, same in zip(one, other, strict=True))
