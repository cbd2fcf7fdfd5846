"""Where a dimension of a tensor comes from: places of the input, outputs of a layer, or what the model has stacked.

Attention weighs places. A softmax also mixes experts, streams or the states of several layers, each place by itself,
and its spelling is the same: what is summed over tells, followed back through the graph.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
        if node.metadata.get(ATTENDED) == dim - len(after):  # the queries', of weights that may be constants
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
"""What :func:`whose` says of rows that are several texts', one after another or side by side."""
JOINS = frozenset("Cat Stack CopySlices IndexPut".split())
"""Nodes that put the rows of several tensors together."""


def whose(x: Tensor, dim: int, leaves: Collection[int]) -> int | None:
    """The ``id`` of the leaf whose places a dimension of a tensor has, of several that it comes from, or ``SEVERAL``;
    None where nothing tells. What is the same for each place, as a mean, has none; of what was added or multiplied
    place by place the first is it, as a residual comes before what a layer adds to it."""
    return _whose(_Way(x.grad_fn, x.output_nr, dim % x.ndim), leaves)


def has_places_of(x: Tensor, dim: int, leaves: Collection[int]) -> bool:
    """Whether a dimension of a tensor is that of the places of any of the leaves, ``[batch, places, features]``, or of
    some of them, of blocks of them, or of these and others."""
    return _whose(_Way(x.grad_fn, x.output_nr, dim % x.ndim), leaves, is_any=False) is not None


class _Way(NamedTuple):
    """Places along a dimension of what a node gives, of which so many numbers are between one and the next, where
    others are one dimension with them."""

    node: Any
    at: int
    dim: int
    inner: int = 1


def _whose(way: _Way, leaves: Collection[int], *, is_any: bool = True) -> int | None:
    seen, waiting = set(), [way]
    while waiting:
        way = waiting.pop()
        if way in seen or not descends(way.node, leaves):
            continue
        seen.add(way)
        name, after = kind(way.node), shape(way.node, way.at)
        if name == LEAF and (is_any or (len(after) > 2) <= way.dim < len(after) - 1):
            return id(way.node.variable)
        ways = [] if name == LEAF else _ways_of_places(way, name, after)
        are_features = name == "Cat" and way.dim != len(after) - 1 == _saved(way.node, len(after))
        if name in JOINS and not (are_features or _changes_all(way.node, name, after)):
            joined = {_whose(one, leaves, is_any=is_any) for one in ways} - {None}
            if len(joined) > 1:
                return SEVERAL
        waiting += reversed(ways)
    return None


def _changes_all(node: Any, name: str, after: tuple[int, ...]) -> bool:
    """Whether what was changed in place through a view was changed as a whole, as ``x += y`` behind a layer does."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return name == "CopySlices" and all(prod(shape(*edge)) == prod(after) for edge in edges)


def _ways_of_places(way: _Way, name: str, after: tuple[int, ...]) -> list[_Way]:
    """Of what a node is made that has the places of what it gives, and where, the first first."""
    node, _, dim, inner = way
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    first = shape(*edges[0])
    if name in VIEWS:
        there = _in_order(first, after, dim, inner)
        return [] if there is None else [_Way(edges[0][0], edges[0][1], *there)]
    if hasattr(node, "_saved_keepdim"):  # what is reduced is the same for each place
        reduced = node._saved_dim if isinstance(node._saved_dim, (tuple, list)) else (node._saved_dim,)
        gone = {dimension(each, len(first)) for each in reduced} or set(range(len(first)))
        kept = [each for each in range(len(first)) if each not in gone]
        dim = dim if node._saved_keepdim else kept[dim]
        return [_Way(edges[0][0], edges[0][1], dim, inner)] if dim in kept else []
    if name in ("Stack", "Unsqueeze") and _saved(node, len(after)) == dim:
        ways = _windows(node, name, len(after), dim)
    elif name == "Stack":
        ways = [(*edge, dim - (dim > _saved(node, len(after)))) for edge in edges]
    elif name in ("ViewAsComplex", "ViewAsReal", "Mv"):
        ways = [(*edges[0], dim)] if dim < len(first) else []
    elif len(edges) > 1 and name not in PRODUCTS and not name.startswith("ScaledDotProduct"):
        ways = [(*edge, dim - len(after) + len(shape(*edge))) for edge in edges]
    else:
        ways = _ways(node, name, after, dim)
    is_there = [each >= 0 and (shape(one, at)[each] > 1 or after[dim] == 1) for one, at, each in ways]
    return [_Way(*each, inner) for each, is_one in zip(ways, is_there, strict=True) if is_one]


def _in_order(before: tuple[int, ...], after: tuple[int, ...], dim: int, inner: int) -> tuple[int, int] | None:
    """Where places are in another shape of the same numbers in the same order: the dimension, and how many numbers are
    from one to the next in it."""
    if after[dim] == 1:  # of several of one place those that are as many from the last
        end = prod(after[:dim])
        ones, mine = (
            [each for each, size in enumerate(of) if size == 1 and prod(of[:each]) == end] for of in (before, after)
        )
        return (ones[-min(len(mine) - mine.index(dim), len(ones))], 1) if ones else None
    step = inner * prod(after[dim + 1 :])
    for each, size in enumerate(before):
        behind = prod(before[each + 1 :])
        if behind <= step < behind * size:
            return each, step // behind
    return None
