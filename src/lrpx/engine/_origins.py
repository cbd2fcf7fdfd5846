"""Where a dimension of a tensor comes from: places of the input, outputs of a layer, or what the model has stacked.

Attention weighs places. A softmax also mixes experts, streams or the states of several layers, each place by itself,
and its spelling is the same: what is summed over tells, followed back through the graph.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, cast

from lrpx.engine._graph import descends
from lrpx.engine._nodes import kind

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

PLACES, OUTPUTS, STACK, ROWS = "places", "outputs of a layer", "a stack", "rows of a batch"
ATTENDED = "lrpx attended"
"""What the node of the graph is marked with that made what attention gives."""
OWN = "lrpx own dimensions"
"""What holds, at the node of a layer, which dimensions of its result are the weight's (the last is -1), and the node
and the place there of its input."""
LEAF = "AccumulateGrad"
VIEWS = frozenset("View UnsafeView ReshapeAlias Reshape ViewAs Squeeze ToCopy Clone Alias".split())
"""Nodes whose result has the same numbers in the same order."""
VALUES = "lrpx values"
"""What holds, at the node of an element-wise product with attention weights, what is weighed, as edges of the graph."""
PRODUCTS = frozenset("Mm Bmm Baddbmm Addmm Addbmm".split())
"""Nodes of these, the last two of what they are made of being the factors."""
CHOSEN = frozenset(
    """Index IndexPut IndexSelect IndexCopy IndexAdd Gather Scatter ScatterAdd ScatterReduce Take MaskedScatter
    MaskedSelect Topk Sort CopySlices RepeatInterleave""".split()
)
"""Nodes whose result was chosen, or put together, by indices."""
PUT_BESIDE = frozenset("ConstantPadNd Cat Clone Alias".split())
PARTS = PUT_BESIDE | frozenset("Slice Select Unbind Split SplitWithSizes UnsafeSplit Narrow Roll".split())
"""Nodes whose result is some of the numbers of what they are made of, cut or shifted along a dimension, or constants
beside them."""
FARTHEST = 4096
"""Nodes that are looked at on a way back."""


def layer(out: Tensor, x: Tensor, own: Collection[int]) -> None:
    """Note that ``out`` is what a layer has made of ``x``; some dimensions of it are the layer's ``own``."""
    node: Any = out.grad_fn
    if node is not None:
        edge = (x.grad_fn, x.output_nr) if x.ndim == out.ndim and x.grad_fn is not None else None
        node.metadata[OWN] = frozenset(own), edge


def origin(x: Tensor, dim: int, *, through_products: bool = True, chosen: bool = True) -> tuple[str, bool]:
    """Where a dimension of a tensor comes from, ``""`` if that is not known, and whether it went through a layer that
    made each of its places by itself, as values are made. ``chosen``: also where indices chose, as for experts."""
    return _origin(x.grad_fn, x.output_nr, dim % x.ndim, through_products, chosen, [FARTHEST])


def of_node(node: Any, at: int, dim: int) -> str:
    """The same of a dimension of what a node gives, counted from the first."""
    return _origin(node, at, dim, True, True, [FARTHEST])[0]


def at_product(x: Tensor, dim: int) -> int | None:
    """Which dimension of a product with weights, counted from the last, became one of ``x``."""
    node, at, dim = cast("Any", x.grad_fn), x.output_nr, dim % x.ndim
    for _ in range(FARTHEST):
        if VALUES in node.metadata:
            return dim - len(shape(node, at))
        ways = _ways(node, kind(node), shape(node, at), dim)
        if len(ways) != 1:
            return None
        node, at, dim = ways[0]
    return None


def has_other_places(x: Tensor, dim: int) -> bool:
    """Whether another dimension than this one has places."""
    return any(origin(x, each)[0] == PLACES for each in range(x.ndim) if each != dim % x.ndim)


def shape(node: Any, at: int) -> tuple[int, ...]:
    """That of what a node of the graph gives."""
    return tuple(node._input_metadata[at].shape)


def _origin(node: Any, at: int, dim: int, products: bool, chosen: bool, left: list[int]) -> tuple[str, bool]:
    is_made = False
    while node is not None and left[0] > 0:
        left[0] -= 1
        after = shape(node, at)
        if OWN in node.metadata:
            own, edge = node.metadata[OWN]
            if dim - len(after) in own:
                return OUTPUTS, is_made
            if edge is None:
                return "", True
            (node, at), is_made = edge, True
            continue
        if ATTENDED in node.metadata and dim == len(after) - 2:  # the queries', of weights that may be constants
            return PLACES, is_made
        name = kind(node)
        if name == LEAF:
            return _of_leaf(dim, len(after)), is_made
        if name in PRODUCTS and not products:
            return "", is_made
        if name in CHOSEN and not chosen:
            return "", is_made
        if name.startswith("GridSampler") and dim > 1:  # places of the map that it reads
            return PLACES, True
        if name in ("Stack", "Unsqueeze", "Cat") and _saved(node, len(after)) == dim:
            ways = _windows(node, name, len(after), dim)
            if name != "Cat" and not ways:
                return STACK, is_made
        else:
            ways = []
        ways = ways or _ways(node, name, after, dim)
        if not ways:
            return "", is_made
        if len(ways) > 1:  # put together: places, if one of them is
            found = [_origin(*way, products, chosen, left) for way in ways]
            first = next((each for each in (PLACES, STACK, OUTPUTS) if any(each == one for one, _ in found)), "")
            return first, is_made or any(made for one, made in found if one == first)
        node, at, dim = ways[0]
    return "", is_made


def _of_leaf(dim: int, dims: int) -> str:
    """Of ``[batch, …]``, ``[batch, places, features]``, or ``[batch, channels, …]``."""
    if dim == 0:
        return ROWS
    return OUTPUTS if dim == (1 if dims > 3 else dims - 1) else PLACES


def _ways(node: Any, name: str, after: tuple[int, ...], dim: int) -> list[tuple[Any, int, int]]:
    """Of what a node is made that has the dimension, and which it is there."""
    edges = node.metadata.get(VALUES) or [edge for edge in node.next_functions if edge[0] is not None]
    if name == "Permute":
        return [(*edges[0], node._saved_dims[dim] % len(after))]
    if name in ("Transpose", "T"):
        one, other = (-2 % len(after), len(after) - 1) if name == "T" else (node._saved_dim0, node._saved_dim1)
        one, other = (dimension(each, len(after)) for each in (one, other))
        return [(*edges[0], {one: other, other: one}.get(dim, dim))]
    if name in ("Stack", "Unsqueeze"):
        return [(*edges[0], dim - (dim > _saved(node, len(after))))]
    if name in ("Select", "Unbind"):
        return [(*edges[0], dim + (dim >= _saved(node, len(after) + 1)))]
    if name == "Unfold":  # its windows are last
        along = dimension(node._saved_dimension, len(after) - 1)
        return [(*edges[0], along if dim == len(after) - 1 else dim)]
    if name == "Cat" and _saved(node, len(after)) == dim:
        return [(*edge, dim) for edge in edges]
    if name in VIEWS:
        return [(*edges[0], each) for each in _before(shape(*edges[0]), after, dim)]
    if name in PRODUCTS:
        factor = node.next_functions[-1 if dim == len(after) - 1 else -2]
        return [(*factor, dim)] if factor[0] is not None and len(shape(*factor)) == len(after) else []
    if name.startswith("ScaledDotProduct"):
        factor = node.next_functions[2 if dim == len(after) - 1 else 0]
        return [(*factor, dim)] if factor[0] is not None else []
    if name in ("Sum", "Mean") and len(edges) == 1:
        before = shape(*edges[0])
        if len(before) != len(after):
            summed = {dimension(each, len(before)) for each in node._saved_dim}
            return [(*edges[0], [each for each in range(len(before)) if each not in summed][dim])]
    return _aligned(edges, after, dim)


def _windows(node: Any, name: str, dims: int, dim: int) -> list[tuple[Any, int, int]]:
    """What tensors that are stacked are parts of, if it is one, and along which of its dimensions they were cut or
    shifted, as the neighbours of each place."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if name == "Cat":
        if any(kind(each) != "Unsqueeze" or _saved(each, dims) != dim for each, _ in edges):
            return []
        edges = [each.next_functions[0] for each, _ in edges]
    found = [_uncut(*edge) for edge in edges]
    dims_of = sorted({each for _, cut in found for each in cut})
    return [(*found[0][0], each) for each in dims_of] if len({end for end, _ in found}) == 1 else []


def _uncut(node: Any, at: int) -> tuple[tuple[Any, int], set[int]]:
    """What a tensor is a part of, which is padded at most, and along which dimensions of that it was cut or shifted."""
    cut: set[int] = set()
    while kind(node) in PARTS:
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if len(edges) != 1:  # put together
            break
        name, dims = kind(node), len(shape(*edges[0]))
        if name in ("Select", "Unbind"):
            cut = {each + (each >= _saved(node, dims)) for each in cut}
        if name == "Roll":
            cut |= {dimension(each, dims) for each in node._saved_dims}
        elif name not in PUT_BESIDE:
            cut.add(_saved(node, dims))
        node, at = edges[0]
    return (node, at), cut


def _aligned(edges: list[tuple[Any, int]], after: tuple[int, ...], dim: int) -> list[tuple[Any, int, int]]:
    """The same of an element-wise operation: the oldest tensor that is as large there, or any that is there."""
    found = []
    for node, at in edges:
        before = shape(node, at)
        there = dim - len(after) + len(before)
        if there >= 0:
            found.append((before[there] != after[dim], node._sequence_nr(), node, at, there))
    return [min(found, key=lambda each: each[:2])[2:]] if found else []


def _before(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> list[int]:
    """Which dimensions of one shape became one of another, with the numbers in the same order."""
    start, end = prod(after[: dim + 1]), prod(after[:dim])  # how many blocks there are behind it, and before it
    found, blocks = [], 1
    for each, size in enumerate(before):
        if size > 1 and blocks < start and blocks * size > end:
            found.append(each)
        blocks *= size
    if found or after[dim] != 1:
        return found
    nth = sum(after[each] == 1 and prod(after[:each]) == end for each in range(dim))
    return [each for each, size in enumerate(before) if size == 1 and prod(before[:each]) == end][nth : nth + 1]


def _saved(node: Any, dims: int) -> int:
    return dimension(node._saved_dim, dims)


def dimension(dim: int, dims: int) -> int:
    """One that a node has saved, as an index from the first; torch gives a negative one without its sign."""
    return (dim - (1 << 64) if dim >= 1 << 63 else dim) % dims


SEVERAL = 0
"""What :func:`whose` says of rows that are several texts', one after another."""


def whose(node: Any, leaves: Collection[int], count: int, *, is_scores: bool = False) -> int | None:
    """The ``id`` of the leaf whose rows a node has, of several that it comes from: that of what each function was given
    first, as a residual comes before what a layer adds to it, and a query before its keys; but not of what is the same
    for each of the ``count`` rows, as a mean. Scores have the rows of the keys, which are the last factor of their
    product, or the first if they were transposed since."""
    seen, waiting = set(), [(node, is_scores, True)]
    while waiting:
        each, is_scores, are_last = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        name, out = kind(each), shape(each, 0)
        if name == LEAF and id(each.variable) in leaves:
            return id(each.variable)
        given = [child for child in each.next_functions if child[0] is not None]
        if len(given) > 1 or name == "Expand":
            given = [child for child in given if not _is_spread(shape(*child), out, count)]
        if is_scores and _swaps_last(each, name, out):
            are_last = not are_last
        is_joined = name == "Cat" and _joins(each, out, count)
        of = [child for child, _ in given if descends(child, leaves)] if is_scores or is_joined else []
        if is_joined and sum(any(descends(child, {key}) for child in of) for key in leaves) > 1:
            return SEVERAL
        is_product = is_scores and len(of) > 1 and not name.startswith(("Add", "Sub", "Cat", "Where", "Mul", "Div"))
        if not (is_product and are_last):
            given.reverse()
        waiting += [(child, is_scores and not is_product, are_last) for child, _ in given]
    return None


def _is_spread(before: tuple[int, ...], after: tuple[int, ...], count: int) -> bool:
    """Whether what has a shape is the same for each of the rows of what was made of it."""
    before = (1,) * (len(after) - len(before)) + before
    return any(made == count and given == 1 for given, made in zip(before, after, strict=False)) and count > 1


def _joins(node: Any, after: tuple[int, ...], count: int) -> bool:
    """Whether a node joins rows, one after another, and not their features."""
    shapes = [shape(*child) for child in node.next_functions if child[0] is not None]
    return any(given == count != made for each in shapes for given, made in zip(each[:-1], after[:-1], strict=False))


def _swaps_last(node: Any, name: str, after: tuple[int, ...]) -> bool:
    """Whether a node has another dimension last than what it was given, of those that are not 1."""
    if name not in ("Transpose", "Permute", "T"):
        return False
    order = [_ways(node, name, after, dim)[0][2] for dim in range(len(after))]
    long = [dim for dim, size in zip(order, after, strict=True) if size > 1]
    return bool(long) and long[-1] != max(long)
