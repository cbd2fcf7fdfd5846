"""What a layer is to the model: the first, which sees the pixels, or a projection into attention or out of it.

Nobody's names say so, but the graph does. A layer is the first where its input is the model's own, reshaped at most. It
is an output projection where its input is what attention has given, reshaped, normalised or pooled at most. That a
layer is an input projection is known only later, when its output has become queries, keys or values; so under a recipe
with a rule of its own for these, a linear layer has both gradients, and attention, when it is met, says which
(:func:`_kernels.either`).
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from lrpx import _kernels, rules
from lrpx._kinds import rule_name
from lrpx.engine import _origins, _overrides
from lrpx.engine._nodes import COPY, NORM, OWN, SCALES, SHAPES, SUMS, kind
from lrpx.engine._origins import ATTENDED, LEAF, PRODUCTS, dimension, shape
from lrpx.engine._tensors import CONSTANT, FROM_INPUT, is_parameter, is_tensor, tensors_in
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch import Tensor

    from lrpx.rules import Rule

WEIGHTS = "lrpx attention weights"
"""What the node of the graph is marked with that made a softmax."""
LINEAR = "lrpx linear"
"""What the node of a linear layer is marked with that has the same rule as an input projection as else."""
OF_LAYER = "lrpx attention weights of a layer"
"""What it is marked with in its place where the softmax is along outputs of a layer, which is not along products."""
ROUTED = "lrpx weights of a router"
"""What the node of a softmax along all outputs of a layer is marked with: attention only where it weighs places."""
SPREAD = "lrpx spread weights"
"""What the node of an element-wise product of attention weights is marked with: summed, it is what attention gives."""
SHARES = "lrpx shares"
"""The mark of a softmax of constants."""
GATES = "lrpx gates of weights"
"""What the node of a product is marked with, too, whose attention weights are constants: behind it are gates."""
BROADCAST = "lrpx broadcast values"
"""What holds, at the node of such a product with what is smaller, along which dimensions that is weighed, counted from
the last: values, where the product is summed along one, and a gate else."""
SHARED = "lrpx shared dimensions"
"""What holds, at the node of an element-wise product with weights like a router's, along which dimensions they are
shares, counted from the last."""
MADE_OF = "lrpx weights of a product"
"""What holds, at that of one with weights like a router's, their mark."""
WIDTH = "lrpx width"
"""What holds, at the node of a linear layer, how many outputs that has."""
TAKEN = "lrpx taken"
"""What holds, at the node of a tensor, which layers take it, as the numbers of their nodes."""
MIXED = "lrpx mixed"
"""What the node of a convolution is marked with that mixes channels, as a layer does, or that of a recurrent layer."""

OUTWARD = "lrpx outward"
"""What the node of an output projection is marked with; and what holds, at that of a layer after one, its choice."""

PARAMETER = "lrpx parameter"
"""What holds, at the node of a layer, which parameter its weight is; None of one that was computed."""
OTHER = "other"
"""What stands for what a convolution or attention has given, among layers."""
SCORES, SUMMED = "scores", "summands of scores"
"""What is met between a softmax and the products of queries and keys."""
SPREADING = frozenset(("mul", "outer", "einsum", "addcmul"))
"""Operations that may multiply element by element."""
ADDING = frozenset(("add", "sub", "rsub", "addcmul"))
"""Operations that add two tensors."""
SUMMING = ADDING | frozenset(
    "sum nansum mean nanmean cumsum einsum index_add scatter_add index_add_ scatter_add_".split()
)
"""Operations that sum."""
MAY_ADAPT = SUMMING | frozenset(("addmm", "baddbmm", "lerp"))
"""Operations that may add what an adapter gives."""
MOVES = SHAPES | frozenset(
    """ConstantPadNd Pad ReflectionPad2D ReplicationPad2D Slice Select Index IndexSelect Narrow Im2Col Unfold Unbind
    Split SplitWithSizes UnsafeSplit Roll Flip Gather Repeat""".split()
)
"""Nodes whose result is some of the numbers of what they are made of, in another shape or order."""
VIEWS = _origins.VIEWS | {"Unsqueeze"}
"""Those whose result has the numbers in the same order."""
SCALED = VIEWS | SCALES | {"NativeDropout", OWN}
"""Those that scale besides."""
CHOOSES_ALONG = frozenset("Topk Sort Gather IndexSelect Slice Scatter Cat".split())
"""Those whose result was chosen, or put together, along one dimension."""
PADS = frozenset("ConstantPadNd Pad Im2Col".split())
"""Those that may put constants beside them."""
WRITES = frozenset("IndexCopy IndexPut CopySlices SelectScatter SliceScatter Scatter".split())
"""Nodes whose result is what they are made of first, with others written into a part of it, as an intervention does."""
CHOICES = frozenset(
    """NanToNum Tril Triu MaskedFill Where MaskedSelect MaskedScatter Take Topk Sort AsStrided Diagonal NativeDropout
    Cat Stack ScatterAdd IndexAdd Col2Im PixelShuffle PixelUnshuffle Complex Real ViewAsReal ViewAsComplex""".split()
)
"""Nodes whose result is numbers of what they are made of, with constants beside them or put together."""
JOINS = frozenset(("Cat", "Stack"))
"""Those of them that are made of several tensors, of which all must be marked."""
NORMS = frozenset((NORM, "_LayerNormConstantStd"))
"""Those of a norm in one function: what was attention's, or its weights, is that still."""
NO_QUERIES = 1
"""What holds at the node of what attention gives where no dimension is known to be its queries'."""
ADDED = frozenset(("Addcmul", "Lerp", "IndexAdd", "ScatterAdd"))
"""Nodes that add two tensors, one of them scaled, or to a part of the other."""
TOTALS = frozenset(("Sum", "Mean"))
"""Those that pool: of what attention gives, over queries or heads, or in a norm that is written out, that still."""
LAYERS = frozenset(
    """Convolution ConvolutionOverrideable MkldnnConvolution Addmm Mm Bmm Baddbmm Addmv Mv Linear Dot Addbmm
    ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
    _WithBackwardProduct _Either""".split()
)
"""Nodes of layers, behind which a way back ends."""
FARTHEST = 1024
"""Nodes that are looked at on a way back."""
MOST_SUMS = 64
"""Sums of several tensors that are looked at on it."""


class Weighing(str):
    """The mark of attention weights that a rule has made constants, and the choices of the layers that gave their
    scores: behind a constant there is no way back, and a layer may give keys and values in parts."""

    __slots__ = ("choices",)
    choices: frozenset[Any]

    @classmethod
    def by(cls, mark: str, choices: Iterable[Any]) -> Weighing:
        """The mark, with choices."""
        made = cls(mark)
        made.choices = frozenset(choices)
        return made


def layer(run: Any, what: str, op: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """``op(*inputs)``, a linear layer or a convolution (``what``), under the rule for what it is to the model."""
    recipe, x = run.recipe, inputs[0]
    if recipe.first is not None and (seen := _input_seen(run, x)) is not None:
        _overrides.refuse_unmet(recipe, run.where(), what, "first")
        # what these hand on where the input is 0, the leaf alone shows: a ledger would look for it here in vain
        conserves = isinstance(recipe.first, (rules.Flat, rules.WSquare, rules.ZBox))
        if conserves and seen[1]:
            op = _without_padding(op, x, seen[0])
        return run.apply(what, op, *inputs, rule=recipe.first, called=rule_name(recipe.first), conserves=conserves)
    if what != "linear":
        out: Any = run.apply(what, op, *inputs, rule=getattr(recipe, what))
        if inputs[1].shape[1] > 1:
            mixes(out)
        _origins.layer(out, x, {1 - inputs[1].ndim})
        _taken(run, out, x)
        return out
    projected = _by_place(run, what, op, inputs)
    _origins.layer(projected, x, {-1})
    _taken(run, projected, x)
    if projected.grad_fn is not None:
        projected.grad_fn.metadata[WIDTH] = projected.shape[-1]
    return projected


def mixes(out: Tensor) -> Tensor:
    """``out``, noted as made by what is no projection of attention's, whatever layers it has inside."""
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[MIXED] = True
    return out


def _taken(run: Any, out: Tensor, x: Tensor) -> None:
    """``out`` is what a layer has made of ``x``."""
    if run.asks_for_places and out.grad_fn is not None and (given := _unmoved(x.grad_fn)) is not None:
        given.metadata.setdefault(TAKEN, set()).add(out.grad_fn._sequence_nr())


def _unmoved(node: Any) -> Any:
    """The node of what was given another shape or normalised."""
    while node is not None and kind(node) in VIEWS | NORMS | {"Permute", "Transpose", "T", "Expand"}:
        node = node.next_functions[0][0]
    return node


def _by_place(run: Any, what: str, op: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """A linear layer under the rule for where it is to attention. What it is, is noted where its module has no rule for
    that, too: others of the projection that it is a part of may have one."""
    recipe, x = run.recipe, inputs[0]
    is_outward = run.asks_for_places and _reaches(x, ATTENDED)
    if is_outward and recipe.output_projection is not None:
        _overrides.refuse_unmet(recipe, run.where(), what, "output_projection")
        name = rule_name(recipe.output_projection)
        out = run.apply(what, op, *inputs, rule=recipe.output_projection, called=name)
    else:
        plain = run.apply(what, op, *inputs, rule=recipe.linear)
        if run.asks_for_places and not is_outward and _is_outward(x.grad_fn, [MOST_SUMS]):
            return _after_projection(run, what, op, inputs, plain)
        out = _into_attention(run, what, op, inputs, plain)
    if is_outward and out.grad_fn is not None:
        out.grad_fn.metadata[OUTWARD] = None
    return out


def _after_projection(run: Any, what: str, op: Callable[..., Any], inputs: Sequence[Any], plain: Any) -> Any:
    """A layer of what an output projection gives: the second half of one, if what it gives is added to what another
    projection makes of the same, as an adapter's is. Which of the two is known when they meet."""
    rule = run.recipe.output_projection
    if rule in (None, run.recipe.linear):
        out, its_choice = _into_attention(run, what, op, inputs, plain), _kernels.Choice()
    else:
        either = _kernels.either(plain, run.apply(what, op, *inputs, rule=rule))
        if run.trace.ran is not None and either.grad_fn is not None:
            run.may_be_renamed(either.grad_fn, rule_name(rule))
        out, its_choice = _into_attention(run, what, op, inputs, either), choice(either)
        if its_choice is not None and run.recipe.overrides:
            its_choice.when_second(partial(_overrides.refuse_unmet, run.recipe, run.where(), what, "output_projection"))
    if out.grad_fn is not None and its_choice is not None:
        out.grad_fn.metadata[OUTWARD] = its_choice
    return out


def _into_attention(run: Any, what: str, op: Callable[..., Any], inputs: Sequence[Any], plain: Any) -> Any:
    """A linear layer (``plain`` is what it gives under the rule for these) that may be an input projection."""
    recipe = run.recipe
    rule: Rule | None = recipe.input_projection
    if rule is None or rule == recipe.linear:
        if plain.grad_fn is not None:
            plain.grad_fn.metadata[LINEAR] = True
        return plain
    out: Any = _kernels.either(plain, run.apply(what, op, *inputs, rule=rule))
    if run.trace.ran is not None and out.grad_fn is not None:
        run.may_be_renamed(out.grad_fn, rule_name(rule))
    if recipe.overrides and out.grad_fn is not None:
        refuse = partial(_overrides.refuse_unmet, recipe, run.where(), what, "input_projection")
        cast("Any", out.grad_fn).choice.when_second(refuse)
    return out


def choice(out: Tensor) -> Any:
    """Whether a layer is an input projection, which may be known later; None where that makes no difference."""
    return getattr(out.grad_fn, "choice", None)


def made_by(out: Any, weight: Any) -> None:
    """``out`` is what a layer of this weight gives."""
    node: Any = out.grad_fn
    if node is not None:
        node.metadata[PARAMETER] = id(weight) if is_parameter(weight) else None


def is_of_same_layer(run: Any, out: Tensor, x: Tensor, made: Any) -> None:
    """``out`` is what a layer gives of ``x`` with another bias, and ``made`` the node of what it gave before: they are
    one that takes ``x``, and that mixes heads; and if one of them is queries, as where scores are a sum of contents and
    of places, the layer makes queries."""
    node: Any = out.grad_fn
    if (given := _unmoved(x.grad_fn)) is not None:
        given.metadata.get(TAKEN, set()).discard(made._sequence_nr())
    for what in (PARAMETER, WEIGHTS):
        if what in made.metadata:
            node.metadata[what] = made.metadata[what]
    its_choice = getattr(made, "choice", None)
    if its_choice is not None and choice(out) is not None:
        node.choice = its_choice
        if its_choice.is_second:
            run.call_it(rule_name(run.recipe.input_projection))


def attend(run: Any, out: Any, *factors: Any, summed: Sequence[int | None] = ()) -> Any:
    """``out``, what attention gives; the layers that gave its factors (queries, keys, values, or the weights that were
    made of them) are told. ``summed``: which dimension of each factor is summed over, None where that tells nothing."""
    if run.asks_for_places and not _mixes_at_each_place(factors, summed):
        if getattr(out, "grad_fn", None) is not None:
            marks = [mark_of(each) for each in factors]
            out.grad_fn.metadata[ATTENDED] = -1 if len(marks) == 2 and marks[1] and not marks[0] else -2
            if WEIGHTS in marks and all(each in (WEIGHTS, OF_LAYER) for each in marks):  # as Nyströmformer's
                out.grad_fn.metadata[WEIGHTS] = True
        for factor in factors:
            if getattr(factor, "grad_fn", None) is not None:
                _tell(factor.grad_fn, SCORES if mark_of(factor) == ROUTED else "")
            else:
                _tell_of(getattr(factor, FROM_INPUT, None) if mark_of(factor) == WEIGHTS else None)
        return out
    return gathered(run, out, factors, summed) if run.asks_for_places else out


def gathered(run: Any, out: Any, factors: Sequence[Any], summed: Sequence[int | None]) -> Any:
    """``out``, a product; noted as what attention gives where it sums by gates what several kinds of attention gave,
    which the model has stacked: so is what multiplies and sums them element by element. By weights it is a layer."""
    node: Any = getattr(out, "grad_fn", None)
    by_weights = any(is_tensor(each) and not each.requires_grad and run.is_weight(each) for each in factors)
    if node is None or by_weights or len(factors) != len(summed):
        return out
    for factor, dim in zip(factors, summed, strict=True):
        is_given = dim is not None and getattr(factor, "grad_fn", None) is not None and _reaches(factor, ATTENDED)
        if is_given and _origins.origin(factor, cast("int", dim)) == (_origins.STACK, False):
            node.metadata[ATTENDED] = NO_QUERIES
    return out


def _mixes_at_each_place(factors: Sequence[Any], summed: Sequence[int | None]) -> bool:
    """Whether what weights are multiplied with was stacked by the model, or is outputs of a layer by others, and no
    layer made values of it: states of several layers, streams or experts, which each place weighs by itself."""
    if len(factors) != len(summed):
        return False
    is_of_layer = any(mark_of(each) == OF_LAYER for each in factors)
    for factor, dim in zip(factors, summed, strict=True):
        if dim is None or getattr(factor, "grad_fn", None) is None or any_weights(factor):
            continue
        if _is_stacked(factor, dim, is_of_layer):
            return True
    return False


def _is_stacked(values: Tensor, dim: int, is_of_layer: bool) -> bool:
    found, is_made = _origins.origin(values, dim)
    if is_made or not (found == _origins.STACK or (found == _origins.OUTPUTS and is_of_layer)):
        return False
    return _origins.has_other_places(values, dim)


def weighs_places(factors: Sequence[Any], summed: Sequence[int | None]) -> bool:
    """Whether weights like a router's are multiplied with what a layer has made of places, as attention's are."""
    if len(factors) != len(summed) or not any(mark_of(each) == ROUTED for each in factors):
        return False
    return all(
        dim is not None and (_are_shares(x, dim) if mark_of(x) == ROUTED else _is_made_of_places(x, dim))
        for x, dim in zip(factors, summed, strict=True)
    )


def _are_shares(weights: Tensor, dim: int) -> bool:
    """Whether a dimension of weights is the one that their softmax is along."""
    if weights.ndim < -dim:
        return False
    if weights.grad_fn is not None and _origins.origin(weights, dim, through_products=False) == (
        _origins.OUTPUTS,
        False,
    ):
        return True
    return sums_to_one(weights, dim, may_move=False)


def _is_made_of_places(values: Tensor, dim: int) -> bool:
    """Whether a layer has made something of each place along a dimension, and no expert of those chosen for it."""
    return values.grad_fn is not None and _origins.origin(values, dim, chosen=False) == (_origins.PLACES, True)


def multiplied(name: str, out: Any, given: Sequence[Any]) -> None:
    """``out`` is what an operation of this name has made of ``given``. Where that is an element-wise product of
    attention weights and something else, it is noted, and a sum of such products is what attention gives, as that of a
    matrix product is."""
    node: Any = getattr(out, "grad_fn", None)
    if node is None or name not in SPREADING | MAY_ADAPT or ATTENDED in node.metadata:
        return
    if name in MAY_ADAPT and _is_outward(node, [MOST_SUMS]):
        _adapted(node)
    if name not in SPREADING | SUMMING:
        return
    tensors = [each for each in tensors_in(given) if each.is_floating_point()]
    summands = [each for each in (tensors[:1] if name == "addcmul" else tensors) if each.grad_fn is not None]
    is_product = name in SPREADING and _spreads(tensors[1:] if name == "addcmul" else tensors, out)
    if name in ADDING and len(summands) + bool(is_product) < 2:
        summands = []
    are_spread = [_is_spread(each, node) for each in summands] if name in SUMMING else []
    if any(are_spread) or (is_product and are_spread and name == "addcmul"):
        if all(is_one or _reaches(each, ATTENDED) for each, is_one in zip(summands, are_spread, strict=True)):
            _tell(node)
            for each in summands:
                _tell_of(_leads(each.grad_fn, SPREAD, [MOST_SUMS]) or _leads(each.grad_fn, MADE_OF, [MOST_SUMS]))
            node.metadata[ATTENDED] = -2
    elif is_product:
        mark = ROUTED if is_product == ROUTED else WEIGHTS
        are_weights = [any_weights(each) if mark == WEIGHTS else mark_of(each) == ROUTED for each in tensors]
        values = [each for each, is_one in zip(tensors, are_weights, strict=True) if each.grad_fn and not is_one]
        node.metadata[_origins.VALUES] = [(each.grad_fn, each.output_nr) for each in values]
        made_of = mark_among([each for each, is_one in zip(tensors, are_weights, strict=True) if is_one])
        if mark == WEIGHTS:
            node.metadata[SPREAD] = made_of or True
        else:
            node.metadata[MADE_OF] = made_of
            weights = [each for each, is_one in zip(tensors, are_weights, strict=True) if is_one]
            node.metadata[SHARED] = {
                dim for dim in range(-out.ndim, 0) if any(_are_shares(each, dim) for each in weights)
            }
    else:
        if name in SPREADING and (along := _weighed_along(tensors, out)):
            node.metadata[BROADCAST] = along
        if name == "mul" and any(not each.requires_grad and any_weights(each) for each in tensors):
            node.metadata[WEIGHTS] = node.metadata[GATES] = True
        if kind(node) in TOTALS and len(summands) == 1 and _are_totals(name, summands[0], node):
            node.metadata[WEIGHTS] = True


def _are_totals(name: str, x: Tensor, node: Any) -> bool:
    """Whether a node sums attention weights along others of their dimensions than the one that they are shares along,
    as their heads, which constants may weigh: weights still."""
    if "_saved_dim" not in dir(node) or not any_weights(x):
        return False
    summed = {dimension(each, x.ndim) for each in node._saved_dim}
    if name == "einsum":  # which moves what it sums behind the others
        before = node.next_functions[0][0]
        if kind(before) != "Permute" or len(before._saved_dims) != x.ndim:
            return False
        summed = {dimension(before._saved_dims[each], x.ndim) for each in summed}
    summed = {each - x.ndim for each in summed}
    along = [dim for dim in range(-x.ndim, 0) if sums_to_one(x, dim)]
    if not along:
        along = [dim for dim in range(-x.ndim, 0) if dim not in summed and _sums_alike(x, dim, summed)]
    return bool(summed) and summed.isdisjoint(along) and bool(along)


def _sums_alike(weights: Tensor, dim: int, but: Collection[int]) -> bool:
    """Whether weights sum along a dimension to what differs along no other ``but`` some."""
    total = weights.detach().sum(dim, keepdim=True)
    kept = [each for each in range(-total.ndim, 0) if each not in but]
    least, most = total.amin(kept), total.amax(kept)
    found = ((most - least <= NEARLY_ONE * most.abs()) & (most != 0)).all()
    return is_found(found, (weights.shape, dim, tuple(sorted(but))))


def _weighed_along(factors: Sequence[Tensor], out: Tensor) -> set[int]:
    """Along which dimensions of a product attention weights sum to 1 that weigh something smaller there."""
    weights = [each for each in factors if each.numel() == out.numel() and any_weights(each)]
    values = [each for each in factors if each.numel() < out.numel() and each.requires_grad]
    if len(weights) != 1 or not values:
        return set()
    along = [dim for dim in range(-out.ndim, 0) if all(each.ndim >= -dim and each.shape[dim] > 1 for each in values)]
    return {dim for dim in along if sums_to_one(weights[0], dim, may_move=False)}


def _adapted(node: Any) -> None:
    """A sum of what an output projection makes of a tensor, and other layers after another, is an output projection."""
    layers, _ = _adapted_layers(node, [FARTHEST], is_outward=True) or (set[Any](), None)
    for each in layers:
        if (its_choice := each.metadata.get(OUTWARD)) is not None:
            its_choice.take_second()


def _is_projection(node: Any) -> bool:
    """Whether it is the node of an output projection."""
    return OUTWARD in node.metadata and node.metadata[OUTWARD] is None


def _is_outward(node: Any, left: list[int]) -> bool:
    """Whether a tensor is what output projections, and layers after them, have made alone, moved and summed at most."""
    while node is not None and left[0] > 0 and ATTENDED not in node.metadata:
        if OUTWARD in node.metadata:
            return True
        edges = _summands(node)
        if len(edges) > 1:  # the newest first: a stream of many layers is soon known
            left[0] -= 1
            return all(_is_outward(each, left) for each, _ in sorted(edges, key=lambda edge: -edge[0]._sequence_nr()))
        node = edges[0][0] if edges else None
    return False


def _summands(node: Any) -> list[tuple[Any, int]]:
    """What a node sums, or writes into another, if that is all it does besides moving and scaling by constants."""
    edges = [edge for edge in node.next_functions if not _is_constant(edge[0])]
    if kind(node) in MOVES | SUMS | TOTALS | WRITES | CHOICES | {OWN, COPY}:
        return edges
    is_scaled = len(edges) == 1 and kind(node) in SCALES
    is_added = len(edges) == 2 and kind(node) in ADDED and node.next_functions[0][0] is not None
    return edges if is_scaled or is_added else []


def _is_constant(node: Any) -> bool:
    """Whether what a node is made of is a constant there; of those that are added, a ledger makes leaves."""
    return node is None or (kind(node) == LEAF and hasattr(node.variable, CONSTANT))


def _is_spread(x: Tensor, node: Any) -> bool:
    """Whether a summand of a node's is an element-wise product of attention weights and values; of a router's, where
    the sum is over places that a layer has made values of."""
    is_one = _reaches(x, SPREAD) or _is_broadcast(x, node)
    shares = set() if is_one else _leads(x.grad_fn, SHARED, [MOST_SUMS])
    if not (is_one or shares) or kind(node) not in TOTALS or "_saved_dim" not in dir(node):
        return is_one
    dims = [dimension(each, x.ndim) for each in cast("Any", node)._saved_dim]
    if is_one:
        return len(dims) != 1 or not _is_stacked(x, dims[0], is_of_layer=False)
    return any(_is_made_of_places(x, each) and _origins.at_product(x, each) in shares for each in dims)


def _is_broadcast(x: Tensor, node: Any) -> bool:
    """Whether a summand is a product of weights with smaller values, which is summed along what they weigh: noted."""
    product: Any = x.grad_fn
    if kind(node) not in TOTALS or BROADCAST not in product.metadata or "_saved_dim" not in dir(node):
        return False
    if not {dimension(each, x.ndim) - x.ndim for each in node._saved_dim} & product.metadata[BROADCAST]:
        return False
    for mark in (WEIGHTS, GATES):
        product.metadata.pop(mark, None)
    product.metadata[SPREAD] = True
    return True


def _spreads(factors: Sequence[Tensor], out: Tensor) -> bool | str:
    """Whether attention weights are among some factors, beside what is no gate or mask of them: it is larger, or as
    large and depends on the input. :data:`ROUTED` where they are like a router's."""
    if any(map(any_weights, factors)):
        return _are_spread([any_weights(each) for each in factors], factors, out)
    are_routed = [mark_of(each) == ROUTED for each in factors]
    return ROUTED if any(are_routed) and _are_spread(are_routed, factors, out) else False


def _are_spread(are_weights: Sequence[bool], factors: Sequence[Tensor], out: Tensor) -> bool:
    others = [each for each, is_one in zip(factors, are_weights, strict=True) if not is_one]
    if any(is_one and each.numel() < out.numel() for each, is_one in zip(factors, are_weights, strict=True)):
        return bool(others)
    return any(each.requires_grad and each.numel() == out.numel() for each in others)


def attended(out: Tensor, scores: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """``out`` is what attention gives, by weights that were made of ``scores``: the layers that gave these and the
    values are told."""
    for each in values:
        _tell(each.grad_fn)
    for each in scores:
        _tell(each.grad_fn, SCORES)
    cast("Any", out.grad_fn).metadata[ATTENDED] = -2


def mark_weights(run: Any, out: Any, scores: Any = None, dim: int | None = -1) -> Any:
    """``out``, the result of a softmax along ``dim``: attention weights, but where it is of all that a linear layer
    gave (``scores``), or of the largest of it, along its outputs, as a router's among experts is. ``dim`` is None where
    it is known to be along none of these."""
    if not run.asks_for_places:
        return out
    mark = WEIGHTS
    if scores is None or dim is None:
        pass
    elif is_of_outputs(scores, dim):
        mark = ROUTED
    elif scores.grad_fn is not None and scores.ndim:
        own = _origins.origin(scores, dim, through_products=False)
        mark = OF_LAYER if own == (_origins.OUTPUTS, False) else WEIGHTS
    if getattr(out, "grad_fn", None) is not None:
        out.grad_fn.metadata[ROUTED if mark == ROUTED else WEIGHTS] = True if mark == WEIGHTS else mark
    else:  # under a rule that makes it a constant
        layers = _layers_behind(getattr(scores, "grad_fn", None), [FARTHEST], SCORES) - {OTHER}
        setattr(out, FROM_INPUT, Weighing.by(mark, (each.choice for each in layers if LINEAR not in each.metadata)))
    return out


def constant_weights(run: Any, out: Any) -> Any:
    """``out``, a softmax of what does not depend on the input: attention weights where it weighs places, element by
    element."""
    if run.asks_for_places and is_tensor(out):
        setattr(out, SHARES, True)
    return out


def bounded(out: Any, x: Tensor, *, is_relu: bool) -> None:
    """``out`` is ``x`` between bounds: attention weights still, or what attention gives, but where that is a ReLU."""
    for mark in (WEIGHTS,) if is_relu else (WEIGHTS, ATTENDED):
        if getattr(out, "grad_fn", None) is not None and _reaches(x, mark):
            out.grad_fn.metadata[mark] = True


def mixed(out: Tensor, x: Tensor, dim: int) -> None:
    """``out`` is what a layer made of dimension ``dim`` of ``x``: of attention weights that are shares along another,
    attention weights still, as where it mixes their heads."""
    if not any_weights((x,)) or x.ndim < -dim or sums_to_one(x, dim):
        return
    if any(sums_to_one(x, each) for each in range(-x.ndim, 0)):
        cast("Any", out.grad_fn).metadata[WEIGHTS] = MIXED


def are_mixed(out: Tensor) -> bool:
    """Whether a layer has mixed the attention weights of heads."""
    node: Any = out.grad_fn
    return node is not None and node.metadata.get(WEIGHTS) == MIXED


def sums_to_one(weights: Tensor, dim: int, *, may_move: bool = True) -> bool:
    """Whether a softmax is along a dimension; an empty row has nothing. ``may_move``: also where each row has but one,
    as the places where experts find their tokens."""
    total = weights.detach().sum(dim)
    found = (((total - 1).abs() < NEARLY_ONE) | (total == 0)).all()
    if not may_move:
        found = found & ~((weights == 0).any() & ((weights == 0) | (weights == 1)).all())
    return is_found(found, (weights.shape, dim, may_move))


def is_found(found: Tensor, what: object) -> bool:
    """Whether ``found``, which numbers tell, is so; in a trace, which has none, whether it was in the plain pass."""
    asked = _ASKED.get()
    return bool(found) if asked is None else asked.answer(what, found.detach())


class Asked:
    """What :func:`is_found` finds in a plain pass, and in the trace of the same, whose tensors have no numbers.

    Args:
        answers: those of the plain pass; None to keep them.
    """

    def __init__(self, answers: Sequence[tuple[object, bool]] | None = None) -> None:
        self.answers = list(answers or ())
        self.traced: list[Tensor] = []
        """The answers as the trace computes them."""
        self._is_trace = answers is not None

    def answer(self, what: object, found: Tensor) -> bool:
        """What the plain pass found, or finds.

        Raises:
            TypeError: the trace asks for another thing.
        """
        if not self._is_trace:
            self.answers.append((what, bool(found)))
            return bool(found)
        before, answer = self.answers[len(self.traced)] if len(self.traced) < len(self.answers) else (None, False)
        if before != what:
            raise TypeError(f"attention weights {what} that the plain pass did not have")
        self.traced.append(found)
        return answer


@contextmanager
def asking(asked: Asked) -> Iterator[None]:
    """In the block, what :func:`is_found` finds is kept there, or taken from there."""
    token = _ASKED.set(asked)
    try:
        yield
    finally:
        _ASKED.reset(token)


_ASKED: ContextVar[Asked | None] = ContextVar("lrpx asked", default=None)
NEARLY_ONE = 1e-2
"""How far from 1 what a softmax sums to may be, in whatever precision."""


def along_no_outputs(out: Tensor) -> None:
    """Forget the width of a layer whose last dimension is its input's and not its outputs', as in ``probe @ k.mT`` and
    ``x @ vector``: a softmax along it is over places, and no router's."""
    node: Any = out.grad_fn
    if node is not None:
        node.metadata.pop(WIDTH, None)


def is_of_outputs(scores: Tensor, dim: int = -1) -> bool:
    """Whether a dimension of a tensor has all outputs of the linear layer that gave it, or some that were chosen of
    them, wherever they were moved, in another shape or precision, or an element-wise function of these: scaled,
    shifted, masked."""
    node, at = cast("Any", scores.grad_fn), 0
    if not scores.ndim:
        return False
    dim %= scores.ndim
    width = scores.shape[dim]
    while node is not None and WIDTH not in node.metadata:
        child, place = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
        if child is None or kind(child) == LEAF:
            return False
        before, after = shape(child, place), shape(node, at)
        found = _before(node, before, after, dim) if before and after else None
        if found is None:
            return False
        dim, is_chosen = found
        width = before[dim] if is_chosen else width
        if before[dim] != width:
            return False
        node, at = child, place
    return node is not None and dim == len(shape(node, at)) - 1 and bool(node.metadata[WIDTH] == width)


def _before(node: Any, before: tuple[int, ...], after: tuple[int, ...], dim: int) -> tuple[int, bool] | None:
    """Which dimension of what a node of the graph is made of became one of what it gives, and whether some of it was
    chosen; None where that is not known."""
    name, last = kind(node), len(before) - 1
    if name == "Permute":
        return dimension(node._saved_dims[dim], len(before)), False
    if name == "Transpose":
        one, other = (dimension(each, len(before)) for each in (node._saved_dim0, node._saved_dim1))
        return {one: other, other: one}.get(dim, dim), False
    if name == "T":
        return last - dim, False
    if name in CHOOSES_ALONG:
        return dim, dimension(node._saved_dim, len(after)) == dim
    if name == "Index":
        chosen = node._saved_indices
        return (last, len(chosen) == len(before) and chosen[-1] is not None) if dim == len(after) - 1 else None
    if name in VIEWS:  # the numbers come in the same order
        behind = prod(after[dim + 1 :])
        same = (i for i in range(last + 1) if (before[i], prod(before[i + 1 :])) == (after[dim], behind))
        return next(((i, False) for i in same), None)
    return None if name in LAYERS or before != after else (dim, False)


def keep_shares(out: Any, given: Sequence[Any], row: Any) -> None:
    """Hand the mark of a softmax of constants on to what was made of it, but by products and sums."""
    if (row is None or row.name not in SUMMING | {"matmul"}) and any(hasattr(each, SHARES) for each in given):
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if is_tensor(each):
                setattr(each, SHARES, True)


def mark_of(x: Any) -> Any:
    """:data:`WEIGHTS`, or what else marks weights, of a tensor that has some; False where it has none."""
    if not is_tensor(x):
        return False
    if x.requires_grad:
        found = _leads(x.grad_fn, WEIGHTS, [MOST_SUMS])
        return (found if found == OF_LAYER else WEIGHTS) if found else _leads(x.grad_fn, ROUTED, [MOST_SUMS]) and ROUTED
    found = getattr(x, FROM_INPUT, None)
    return found if found in (WEIGHTS, OF_LAYER, ROUTED) else hasattr(x, SHARES) and ROUTED


def mark_among(values: Any) -> Any:
    """The same of values, also in lists."""
    if isinstance(values, (tuple, list)):
        found = [mark for each in values if (mark := mark_among(each))]
        name = next((each for each in (OF_LAYER, WEIGHTS, ROUTED) if each in found), None)
        return name is not None and Weighing.by(name, frozenset().union(*map(_choices, found)))
    return mark_of(values)


def any_weights(values: Any) -> bool:
    """Whether attention weights are among values, also in lists: what a softmax made, or a constant that was made of
    one. A mask, as of what is padded, is none."""
    if isinstance(values, (tuple, list)):
        return any(map(any_weights, values))
    if not is_tensor(values):
        return False
    if values.requires_grad:
        return _reaches(values, WEIGHTS)
    return getattr(values, FROM_INPUT, None) in (WEIGHTS, OF_LAYER)


def _reaches(x: Tensor, mark: str) -> bool:
    """Whether a tensor is what a marked node has made, in another shape or another precision, scaled, normalised,
    shifted by a constant, or written into in part; or such tensors alone, put together or summed, as in differential
    attention."""
    return bool(_leads(x.grad_fn, mark, [MOST_SUMS]))


def _leads(node: Any, mark: str, sums: list[int]) -> Any:
    """The same of what a node has made, as the mark there; ``sums`` are still looked at."""
    waiting: list[Any] = [node]
    allowed = MOVES | SCALES | WRITES | CHOICES | NORMS | {OWN} | (TOTALS if mark == ATTENDED else frozenset())
    for _ in range(FARTHEST):
        if not waiting:
            return False
        node = waiting.pop()
        if node is None:
            continue
        if mark in node.metadata:
            return node.metadata[mark]
        made_of: list[Any] = [child for child, _ in node.next_functions if not _is_constant(child)]
        is_shifted = kind(node) in SUMS and len(made_of) == 1  # by a constant
        if kind(node) in SUMS and not is_shifted:
            sums[0] -= 1
            found = [_leads(child, mark, sums) for child in reversed(made_of)] if sums[0] >= 0 else []
            if found and all(found):
                return found[0]
        elif kind(node) in JOINS and len(made_of) > 1:
            found = [_leads(made_of[0], mark, list(sums))]
            if found[0] and all(_leads(child, mark, list(sums)) for child in made_of[1:]):
                return found[0]
        elif kind(node) in SCALES and len(made_of) > 1:  # a gate may come first or second
            if mark in (WEIGHTS, ROUTED):  # which are as many after a gate as before
                made_of = [child for child, at in node.next_functions if child and shape(child, at) == shape(node, 0)]
            waiting += made_of
        elif kind(node) == COPY:
            waiting += made_of[-1:]  # what was there before comes first
        elif kind(node) in allowed or is_shifted:
            waiting += made_of[:1]
    return False


def _input_seen(run: Any, x: Tensor) -> tuple[Tensor, bool] | None:
    """The leaf that a layer's input is, such as pixels, and whether it was padded; None for what is computed.

    Raises:
        MethodError: it is the model's own input, but not as it was given.
    """
    leaves = {id(source.value) for source in run.sources if source.ids is None}
    waiting: list[tuple[Any, str, bool]] = [(x.grad_fn, "", False)]
    for _ in range(FARTHEST):
        if not waiting:
            return None
        node, changed, is_padded = waiting.pop()
        if node is None or kind(node) in LAYERS or ATTENDED in node.metadata:
            continue
        if kind(node) == LEAF:
            if id(node.variable) not in leaves:
                continue
            if changed:
                raise MethodError(
                    f"{run.where()} is the first layer, and the model changes its input before it ({changed}), so no "
                    "rule for the first layer can tell what the input has; leave first= out, or pass the model "
                    "without that and normalise the pixels yourself"
                )
            return node.variable, is_padded
        changed = changed if kind(node) in MOVES or changed else kind(node)
        waiting += [(child, changed, is_padded or kind(node) in PADS) for child, _ in node.next_functions]
    return None


def _without_padding(op: Callable[..., Any], x: Tensor, leaf: Tensor) -> Callable[..., Any]:
    """``op``, of which all but the layer's own value sees none of the constants that its input was padded with: they
    have no share, as those have none with which a convolution itself pads.

    What is the input's own, the moves that made ``x`` of the leaf make of ones: they are linear, and their gradient's
    gradient is they themselves.
    """
    seed = torch.zeros_like(x, requires_grad=True)
    (back,) = torch.autograd.grad(x, leaf, seed, create_graph=True)
    (is_own,) = torch.autograd.grad(back, seed, torch.ones_like(back))
    return lambda given, *weights: op(given if given is x else given * is_own, *weights)


def _choices(mark: Any) -> frozenset[Any]:
    """Those of the layers that gave the scores of constant weights with this mark."""
    return mark.choices if isinstance(mark, Weighing) else frozenset()


def _tell_of(mark: Any) -> None:
    for each in _choices(mark):
        each.take_second()


def _tell(node: Any, of: str = "") -> None:
    for each in _layers_behind(node, [FARTHEST], of):
        if each is OTHER or LINEAR in each.metadata:
            continue
        each.choice.take_second()


def _layers_behind(node: Any, left: list[int], of: str = "") -> set[Any]:
    """The layers that a tensor is a projection by. A sum of what several layers gave is none of theirs: it is the
    residual stream; but a rotation is a sum of what one layer gave, and scores less their logsumexp of the same two.
    Behind a convolution of all channels, a recurrent layer, or what attention gives, there are none, for it is what
    projects (:data:`OTHER`); one of each channel by itself, as behind a layer that gives queries, pools what that layer
    gave. Of a sum of weights alone, all that made them do.

    A layer that makes scores (``of``) by itself, or mixes them, is one, and what made its input, a key of a learned
    query, is another. Scores may be a sum, of those of contents and of places; what a layer gives to it, as of queries
    and a table of places, is neither query nor key."""
    left[0] -= 1
    if node is None or left[0] < 0 or GATES in node.metadata:
        return set()
    if ATTENDED in node.metadata:
        return {OTHER}
    if node.metadata.get(WEIGHTS) == MIXED:  # a layer has, those of heads
        return set().union(*(_layers_behind(child, left, SCORES) for child, _ in node.next_functions))
    if MIXED in node.metadata:  # of scores it is as a layer is
        return {OTHER}.union(*(_layers_behind(child, left) for child, _ in node.next_functions if of == SCORES))
    name = kind(node)
    if name in SUMS and _pairs(node):  # of each place with each: of queries and of keys
        return set().union(*(_layers_behind(child, left) for child, _ in node.next_functions))
    if name == "_Either" or LINEAR in node.metadata:
        if of == SCORES:  # a learned query makes them of its keys, which a layer may have made
            edge = node.metadata[_origins.OWN][1]
            given = node.next_functions if edge is None else (edge,)
            return _with_keys({node}, given, left)
        return set() if of == SUMMED else {node}
    if WEIGHTS in node.metadata:
        of = of or SCORES
    elif name in PRODUCTS or (of == SCORES and _multiplies(node)):
        of = ""
    children = [child for child, _ in node.next_functions]
    if name in SCALES and len(children) > 1 and SPREAD not in node.metadata:  # no gates of weights
        marks = WEIGHTS, SPREAD
        children = [each for each in children if any(_leads(each, mark, [MOST_SUMS]) for mark in marks)] or children
        if of == SCORES:  # nor their temperature
            children = [each for each in children if _is_product(each)] or children
    found = [_layers_behind(child, left, of) for child in children]
    together = set().union(*found)
    is_sum = of != SUMMED and name in SUMS and any(each not in (set(), together) for each in found)
    may_adapt = of != SUMMED and len(together) > 1 and name in SUMS | ADDED | TOTALS | WRITES
    if may_adapt and (adapted := _adapted_layers(node, [FARTHEST])) is not None:
        layers, given = adapted
        return _with_keys(layers, ((given, 0),), left) if of == SCORES else layers
    if is_sum and not (of == "" and _leads(node, WEIGHTS, [MOST_SUMS])):
        return set().union(*(_layers_behind(child, left, SUMMED) for child in children)) if of else {OTHER}
    return together


def _with_keys(layers: set[Any], given: Sequence[tuple[Any, int]], left: list[int]) -> set[Any]:
    """Layers that make scores, and those that make what they were given, the keys of learned queries. What gates a
    stream is none, nor what other layers take, too: it is the stream."""
    own = {each._sequence_nr() for each in layers}
    if any(getattr(_unmoved(node), "metadata", {}).get(TAKEN, own) - own for node, _ in given):
        return layers
    behind: set[Any] = set().union(*(_layers_behind(node, left) for node, _ in given))
    return layers if OTHER in behind else layers | behind


def _adapted_layers(node: Any, left: list[int], *, is_outward: bool = False) -> tuple[set[Any], Any] | None:
    """The layers behind a sum of what one makes of a tensor, and what others make of it one after another, as an
    adapter of lower rank does, or one by a weight that was computed (LoKr, FourierFT), and what they were given; None
    where something else is added, as that itself. What two make, each by itself, is a stream. ``is_outward``: only
    where what the others are added to are output projections; beside another layer, such as the head, an adapter is as
    that layer is."""
    adapted = []
    for (given, _), ways in _made_linearly((node, 0), left).items():
        singles = [way for way in ways if len(way) == 1]
        computed = [way for way in singles if all(each.metadata.get(PARAMETER, way) is None for each in way)]
        is_alone = [way in singles and (way not in computed or len(computed) == len(singles)) for way in ways]
        alone = set[Any]().union(*(way for way, is_one in zip(ways, is_alone, strict=True) if is_one))
        after = set[Any]().union(*(way for way, is_one in zip(ways, is_alone, strict=True) if not is_one))
        same = (
            {getattr(each, "choice", each) for each in alone},
            {each.metadata.get(PARAMETER) or each for each in alone},
        )
        is_one = not is_outward and min(map(len, same)) == 1
        is_one |= all(map(_is_projection, alone))
        if all(ways) and alone and is_one and after and alone.isdisjoint(after):
            adapted.append((alone | after, given))
    return min(adapted, key=lambda each: len(each[0]), default=None)


def _made_linearly(made: tuple[Any, int], left: list[int]) -> dict[tuple[Any, int], list[frozenset[Any]]]:
    """What a tensor was made of by layers, moves, scalings and sums alone, and the layers on each way there."""
    node, found = made[0], {made: [frozenset[Any]()]}
    left[0] -= 1
    if left[0] < 0:
        return found
    if kind(node) == "_Either" or LINEAR in node.metadata or OUTWARD in node.metadata:
        edge = node.metadata[_origins.OWN][1]
        behind = _made_linearly(edge, left) if edge is not None else {}
        return found | {before: [way | {node} for way in ways] for before, ways in behind.items()}
    each = [_made_linearly(edge, left) for edge in _summands(node)]
    common = set.intersection(*(set(one) for one in each)) if each else ()
    return found | {before: [way for one in each for way in one[before]] for before in common}


def _pairs(node: Any) -> bool:
    """Whether a sum is of each of some places with each of others, as a product of queries and keys is; of what a table
    has for rows and for columns, as of relative places, it is of a layer's outputs."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(edges) != 2:
        return False
    after = shape(node, 0)
    sizes = [(1,) * (len(after) - len(before)) + before for before in (shape(*edge) for edge in edges)]
    if all(kind(child) == "Unsqueeze" and len(shape(child, at)) == len(after) for child, at in edges):
        one, other = ({dimension(child._saved_dim, len(after))} for child, _ in edges)
    else:
        one, other = ({dim for dim, size in enumerate(after) if each[dim] < size} for each in sizes)
    if one == other or not (one and other):
        return False
    alone = zip(edges, (other - one, one - other), strict=True)  # what each of them has, and the other has not
    return not any(
        _origins.of_node(child, at, dim - len(after) + len(shape(child, at))) == _origins.OUTPUTS
        for (child, at), dims in alone
        for dim in dims
    )


def _multiplies(node: Any) -> bool:
    """Whether a node multiplies queries and keys element by element: it sums such a product of two, or has nothing to
    sum in one of each place with each."""
    if kind(node) not in TOTALS:
        return kind(node) == "Mul" and _pairs(node)
    child = node.next_functions[0][0]
    return child is not None and kind(child) == "Mul" and all(each is not None for each, _ in child.next_functions)


def _is_product(node: Any) -> bool:
    """Whether a node gives products of queries and keys, in another shape, scaled, shifted or masked."""
    waiting = [node]
    for _ in range(FARTHEST):
        if not waiting:
            return False
        node = waiting.pop()
        if node is None or WIDTH in node.metadata:
            continue
        if kind(node) in PRODUCTS or _multiplies(node):
            return True
        if kind(node) in MOVES | SCALES | CHOICES | SUMS | {OWN} | TOTALS:
            waiting += [child for child, _ in node.next_functions]
    return False
