"""Positions, where a model uses them: known by what they are computed from, and made leaves of the graph.

A transformer knows the order of its tokens by constants: what is looked up or computed from the numbers of the places
(learned and sinusoidal embeddings, rotary angles, ALiBi, relative biases), or a table with a row for each place. Where
one of them meets what depends on the input, it becomes a leaf, so that it has relevance of its own, place by place and
layer by layer (Bakish et al. 2025). No module's name is asked for:

- *What is computed from places* is known by what it was made of (:mod:`lrpx.engine._numbers`).
- *A table* is a parameter, a buffer or another tensor of the model itself with a row for each token of a sequence that
  it is added to or multiplied with; or whatever constant is added to the rows ``[B, N, d]`` or the map ``[B, R, C, d]``
  of an image, which come from no tokens, and has a row for each of its places.

Under a recipe that takes positions for constants, the last alone are leaves: they are sources as pixels are.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from glob import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from lrpx import rules
from lrpx._modules import layers, named_modules
from lrpx.engine._axes import JOINING, SUMS, Axes, Axis, is_constant
from lrpx.engine._book import Book, Line, storage_of
from lrpx.engine._graph import descends
from lrpx.engine._numbers import Numbers, pairs
from lrpx.engine._rows import Rows
from lrpx.engine._sinks import Kept, Sink
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import CONSTANT, any_carries, arguments, is_in_place, is_tensor, tensors_in
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine._places import Side, Source
    from lrpx.engine._taps import Call

INPUT = "input"
"""What the positions are called that meet the input outside of every layer."""

BESIDE = frozenset("cat concat concatenate stack hstack vstack dstack".split())
ADDING = frozenset("addmm baddbmm addbmm addmv addr addcmul addcdiv addmm_ baddbmm_ addbmm_ addmv_ addr_".split())
"""Functions that add their first argument to a product of the others; all but the last two, scores to a bias."""
COMBINING = frozenset(
    "maximum max minimum min fmax fmin where clamp clip hypot logaddexp logaddexp2 complex polar atan2 pow "
    "index_add index_add_ scatter_add scatter_add_ index_put index_put_".split()
)
"""Functions in which a table with a row for each place would count, beside sums and products."""
CHOOSING = ("gather", "take_along_dim", "__getitem__")
ATTENTION = "scaled_dot_product_attention"
PRODUCTS = ("product", "linear", "convolution", "matmul")
WITH_DISTANCES = ("einsum", "matmul", "__matmul__", "bmm")
"""Matrix products that may be with a table of distances."""
REDUCING = frozenset("sum mean nansum nanmean cumsum trace diagonal".split())
"""Functions that need no rule, after which a dimension is another's."""
DIVISIONS = frozenset("div divide true_divide __truediv__ div_ divide_ __itruediv__".split())


class Positions(Tap):
    """Makes positions leaves, and collects them.

    Args:
        model: whose buffers and parameters may be tables of positions.
        by_head: whether what is met in heads is kept head by head, which takes as many times the memory.
    """

    def __init__(self, model: Module, *, by_head: bool = False) -> None:
        self._model = model
        self._calls: Counter[str] = Counter()
        self._run: Any = None
        self._numbers = Numbers()
        self._axes = Axes(model, self._numbers)
        self._moved = Rows()
        self._is_everywhere = False
        self._distances: Any = WeakTensorKeyDictionary()  # products of the input with distances
        self._takes_distances = False
        self._pairs: Any = WeakTensorKeyDictionary()  # scores with positions of pairs, and which dimension is the keys'
        self._met_pairs = False
        self._joined: Any = WeakTensorKeyDictionary()  # what constants were joined to; whether they are positions
        self.by_head = by_head
        self.sinks: list[Sink] = []

    def begin(self, run: Any) -> None:
        """The block begins."""
        self._run = weakref.proxy(run)
        self._calls.clear()
        self._is_everywhere = run.recipe.has_positions()
        self._axes.begin(self._run, is_everywhere=self._is_everywhere)
        if self._is_everywhere:
            run.positions = self
            self.patterns = [escape(path) for path in layers(path for path, _ in named_modules(self._model))]

    def module(self, path: str, side: Side, value: Tensor) -> None:
        """A layer is called once more."""
        self._calls[path] += side == "input" and not self._run.replaying

    def leaves(self) -> list[Tensor]:
        """The positions, where they meet what depends on the input."""
        return [sink.leaf for sink in self.sinks]

    def lines(self) -> list[tuple[Line, Tensor]]:
        """What a ledger has of each."""
        return [(sink.line, sink.leaf) for sink in self.sinks if sink.line is not None]

    def kept(self, gradients: Mapping[int, Tensor], *, by_head: bool = False) -> list[Kept]:
        """The relevance of the positions of each layer, in the order of the forward pass; by heads, a layer comes once
        for each number of heads that positions were met in.

        Args:
            gradients: of each leaf, by its ``id``.
            by_head: whether by heads.

        Raises:
            MethodError: one layer has positions of places of different number, or of rows and of columns, or of two
                inputs.
        """
        found: dict[tuple[str, int, int | None], Kept] = {}
        along: dict[tuple[str, int], tuple[int, ...]] = {}  # which dimension is the places', of how many
        of: dict[tuple[str, int, int | None], int] = {}
        again = {sink.layer for sink in self.sinks if sink.call}
        for sink in self.sinks:
            layer = f"{sink.layer}#{sink.call}" if sink.layer in again else sink.layer
            mine = sink.relevance(gradients.get(id(sink.leaf)))
            heads = None if sink.heads is None or not by_head else mine.shape[1]
            mine = mine if by_head else mine.sum(1)
            key = layer, id(sink.source), heads
            if sink.ndim and along.setdefault((layer, sink.ndim), sink.tokens) != sink.tokens:
                raise MethodError(
                    f"{layer or 'the model'} meets positions of rows and those of columns, which are no place's; add "
                    "one to the other before both are added to the image, or use attnlrp"
                )
            if sink.of is not None and of.setdefault(key, sink.of) != sink.of:
                raise MethodError(
                    f"{layer or 'the model'} meets positions of two inputs, as of what an encoder reads and a decoder, "
                    "which are no place's; use attnlrp"
                )
            before = found.get(key)
            if before is not None and before.relevance.shape != mine.shape:
                raise MethodError(
                    f"{layer or 'the model'} meets the positions of {before.relevance.shape[-1]} places and of "
                    f"{mine.shape[-1]}, as of pixels and of what they are read into, and no token has both; use attnlrp"
                )
            mine = mine if before is None else before.relevance + mine
            found[key] = Kept(layer, sink.source, mine, heads)
        return list(found.values())

    def is_turned(self, source: Source) -> bool:
        """Whether the model has looked up ``[T, B]`` ids of tokens that it was given as ``[B, T]``."""
        return self._axes.is_turned(source)

    def has_unknown_layers(self) -> bool:
        """Whether positions were met as layers meet them, one behind the other and outside of every element of a list
        of modules: nothing tells then which of them are of one layer."""
        return any(sink.is_behind for sink in self.sinks)

    def given(self, name: str, value: Tensor) -> None:
        """An argument of the model that carries no relevance: the tokens, the numbers of their places, a mask."""
        self._numbers.given(name, value)

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """A call of constants is followed by its shadow's; one of what depends on the input has leaves for constants
        that are positions."""
        args, kwargs, row = call.args, call.kwargs, call.operation
        if not self._is_everywhere:
            if call.name in SUMS and torch.is_grad_enabled() and self._axes.is_of_image():
                args, kwargs = self._summed(call)
            out = proceed(args, kwargs)
            if self._axes.is_of_image():
                self._numbers.follow_input(call, out)
            self._axes.follow(call, out)
            return out
        takes_shape = (
            row is not None and not row.has_summands and row.kind == "plain" and args and not any_carries(args[0])
        )
        if takes_shape or not any_carries((*args, *kwargs.values())):
            self._axes.refuse_choice(call)
            out = self._numbers.of_constants(call, proceed)
            if not self._numbers.follow_input(call, out):
                self._axes.follow_tables(call, out)
            return out
        if self._distances and any(each in self._distances for each in tensors_in((*args, *kwargs.values()))):
            return self._of_distances(call, proceed)
        if self._is_with_distances(call):
            return self._with_distances(call, proceed)
        before = len(self.sinks)
        if call.name != "__get__" and torch.is_grad_enabled():
            args, kwargs = self._met(call)
        out = proceed(args, kwargs)
        self._numbers.see(out)
        self._numbers.follow_input(call, out)
        self._axes.follow(call, out)
        self._follow_rows(call, out)
        self._follow_pairs(call, out)
        self._follow_joined(call, out, has_places=len(self.sinks) > before)
        return self._chosen(call, out) if call.name in CHOOSING else out

    def _follow_rows(self, call: Call, out: Any) -> None:
        if self._run.sources and (rows := self._axes.rows()) > 1:
            self._moved.follow(call, out, rows)

    def _follow_pairs(self, call: Call, out: Any) -> None:
        """Remember scores to which positions of pairs were added, whose last dimension was taken for the keys'.

        Raises:
            MethodError: the softmax is over another, which so is the keys'.
        """
        has_met, self._met_pairs = self._met_pairs, False
        if has_met and call.name != ATTENTION and isinstance(out, Tensor):
            self._pairs[out] = -1
            return
        given = next((each for each in call.args if _is_in(each, self._pairs)), None) if self._pairs else None
        if given is None or call.operation is None or not isinstance(out, Tensor):
            return
        keys = self._pairs[given]
        if call.operation.name == "softmax":
            dim = arguments(call.args, call.kwargs, "input", "dim")[1]
            if isinstance(dim, int) and dim % out.ndim != keys % out.ndim:
                raise self._axes.refusal("positions of pairs were added to scores with the keys before the queries")
        elif call.operation.kind in ("plain", "product") and out.shape in (given.shape, given.mT.shape):
            is_turned = out.storage_offset() == given.storage_offset() and out.stride() == given.mT.stride()
            is_turned &= storage_of(out) == storage_of(given) and out.stride() != given.stride()
            self._pairs[out] = -3 - keys if is_turned else keys

    def _follow_joined(self, call: Call, out: Any, *, has_places: bool) -> None:
        """Remember what constants were joined to as features, and whether they are positions.

        Raises:
            MethodError: it is multiplied with another of this kind. What is added to scores so would be shared with the
                constants of the other.
        """
        row, name = call.operation, call.name
        if not isinstance(out, Tensor) or row is None or not (self._joined or name in BESIDE or name == "pad"):
            return
        if name in JOINING and call.args and type(call.args[0]) in (tuple, list):
            dim = arguments(call.args, call.kwargs, "tensors", "dim")[1] or 0
            if dim % out.ndim == out.ndim - 1 and any(map(is_constant, call.args[0])):
                self._joined[out] = has_places
        elif name == "pad" and arguments(call.args, call.kwargs, "input", "pad", "mode", "value")[3]:
            self._joined[out] = False
        given = [self._joined[each] for each in tensors_in(call.args) if _is_in(each, self._joined)]
        if not given:
            return
        if len(given) > 1 and any(given) and (row.kind == "matmul" or name == ATTENTION):
            raise self._axes.refusal(
                "positions are joined to the features of queries or keys, and constants to those of the others, where "
                "their product is added to scores and would have a half"
            )
        if row.kind in ("plain", "product") and name not in BESIDE:
            self._joined[out] = any(given)

    # ---------------------------------------------- where they meet what depends on the input

    def _met(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, in which the positions that it adds are leaves.

        Raises:
            MethodError: positions go into it otherwise than in a sum or product, or nothing tells whose they are.
        """
        args, kwargs, name = call.args, call.kwargs, call.name
        if name in SUMS:
            return self._summed(call)
        if name == ATTENTION:
            q, k, _, mask = arguments(args[:4], kwargs, "query", "key", "value", "attn_mask")
            added = self._added(mask, [k], (*q.shape[:-1], k.shape[-2]), q.dtype, is_scores=True, keys=-2)
            if added is mask:
                return args, kwargs
            return ((*args[:3], added, *args[4:]), kwargs) if len(args) > 3 else (args, kwargs | {"attn_mask": added})
        if name in ADDING and args:
            factors = [each for each in (*args[1:], *kwargs.values()) if is_tensor(each)]
            if not any(map(any_carries, factors)):
                self._refuse_within(call, factors)
            # of a constant and what depends on the input it is a layer, and its bias
            is_scores = not name.startswith("addc") and all(map(any_carries, factors))
            shape = _shape_of_sum(name, args[0], factors)
            dtype = next(each.dtype for each in (*args, *kwargs.values()) if any_carries(each))
            return (self._added(args[0], factors, shape, dtype, is_scores=is_scores), *args[1:]), kwargs
        if name in BESIDE and args and type(args[0]) in (tuple, list):
            x = next((each for each in args[0] if any_carries(each)), None)
            # what is learned and joined to the tokens are tokens, as registers are, and no table
            are_features = x is not None and self._axes.joins_features(call, x)
            for each in args[0] if name == "stack" else ():
                if x is not None and is_constant(each):
                    self._axes.refuse_left(each, [x], x.shape)
            made = [
                self._joined_to(x, each, args[0], are_features=are_features) if is_constant(each) else each
                for each in args[0]
            ]
            return (made, *args[1:]), kwargs
        if name in ("lerp", "lerp_"):
            self._refuse_within(call, [each for each in (*args, *kwargs.values()) if is_tensor(each)])
        if call.operation is not None and (call.operation.kind in PRODUCTS or name in DIVISIONS):
            return args, kwargs  # products ask by themselves; a divisor is a normaliser
        given = tensors_in((*args, *kwargs.values()))
        met = [each for each in given if any_carries(each)]
        for each in given:
            if not each.is_floating_point() or any_carries(each):
                continue
            if self._numbers.varies(each):
                raise self._axes.refusal(f"positions go into torch's {name!r}, which is neither a sum nor a product")
            if name in COMBINING and not (is_in_place(name) and each is args[0]):
                self._axes.refuse_left(each, met, _shape_of(*(one.shape for one in (*met, each))))
        return args, kwargs

    def _refuse_within(self, call: Call, given: Sequence[Tensor]) -> None:
        """Refuse positions among what a function multiplies before it adds.

        Raises:
            MethodError: there are some.
        """
        met = [each for each in tensors_in((*call.args, *call.kwargs.values())) if any_carries(each)]
        shape = _shape_of(*(each.shape for each in (*met, *given)))
        if any(is_constant(each) and self._axes.axis(each, met, shape) is not None for each in given):
            why = f"positions go into torch's {call.name!r}, which multiplies them before it adds"
            raise self._axes.refusal(why, "write its sum and its product as two, or ")

    def _chosen(self, call: Call, out: Tensor) -> Tensor:
        """What positions have chosen of products with a table of distances, for each of a pair of tokens, as DeBERTa
        does: half of it is the table's (the uniform rule), and so the position's whose distance it is. The factor 1 is
        that half, without a look at the table."""
        x, dim, index = arguments(
            call.args, call.kwargs, "input", "dim", "index" if call.name == "gather" else "indices"
        )
        dim, index = (index, dim) if isinstance(index, int) else (dim, index)
        is_shared = self._run.recipe.position is not rules.signal_take_all
        if call.name == "__getitem__":
            index, dim = _of_pairs(call.args[1], x.ndim, self._numbers.lengths) if is_shared else (None, None)
        if not is_shared or not any_carries(x) or not isinstance(index, Tensor):
            return out
        if not (self._numbers.varies(index) or self._numbers.is_of_one_place(index)):
            return out
        is_last = dim is not None and dim % x.ndim == x.ndim - 1
        lengths = self._numbers.lengths  # none where the model reads no tokens
        if dim is not None and not is_last and x.shape[dim] in (lengths or x.shape):
            return out  # tokens
        if not is_last or out.shape[-1] not in lengths:
            raise self._axes.refusal(
                "positions choose of products what are no scores of the tokens, with the keys last"
            )
        return self._of_keys(out)

    def _of_keys(self, scores: Tensor) -> Tensor:
        """Scores that are products with distances, half of them that of the position of each key."""
        ones = scores.new_ones(*(1,) * (scores.ndim - 1), scores.shape[-1])
        leaf = self._sink(ones, [scores], scores.shape, scores.dtype, Axis((-1,), is_scores=True))
        shared: Tensor = self._run.apply("position", lambda position, signal: signal * position, leaf, scores)
        return shared

    def _is_with_distances(self, call: Call) -> bool:
        """Whether a call is a matrix product of the input with a table of distances that positions have made, and the
        rule gives them some."""
        if call.name not in WITH_DISTANCES or self._run.recipe.position is rules.signal_take_all:
            return False
        given = [each for each in tensors_in(call.args) if each.is_floating_point()]
        return len(given) == 2 and sum(map(any_carries, given)) == 1 and any(map(self._numbers.varies, given))

    def _with_distances(self, call: Call, proceed: Callable[..., Any]) -> Any:
        """The product, which is remembered until it has become scores, as in XLNet: only then a place of it is one of
        a key. Until then its rows are distances."""
        self._takes_distances = True
        try:
            out = proceed(call.args, call.kwargs)
        finally:
            self._takes_distances = False
        self._distances[out] = True
        return out

    def _of_distances(self, call: Call, proceed: Callable[..., Any]) -> Any:
        """A call with such a product: shifted, cut and scaled it is one still; added to other scores it is scores.

        Raises:
            MethodError: another call, or scores that are none of the tokens' keys.
        """
        args, kwargs, row, name = call.args, call.kwargs, call.operation, call.name
        given = [each for each in tensors_in((*args, *kwargs.values())) if any_carries(each)]
        given = given[:1] if name.endswith("_as") else given  # of the other it has the shape
        is_alone = all(each in self._distances for each in given)
        if name == ATTENTION or (name in SUMS and not (is_in_place(name) and args[0] in self._distances)):
            mine = [each for each in given if each in self._distances]
            if not is_alone and all(self._are_scores(each, call) for each in mine):
                kwargs = {key: self._of_keys(e) if _is_in(e, self._distances) else e for key, e in kwargs.items()}
                return proceed(tuple(self._of_keys(e) if _is_in(e, self._distances) else e for e in args), kwargs)
        is_moved = row is not None and row.kind == "plain" and name not in REDUCING
        is_scaled = name in DIVISIONS or (row is not None and row.kind == "product")
        if is_alone and (is_moved or (is_scaled and len(given) == 1)):
            out = proceed(*self._met(call))
        elif row is None and not any_carries(out := proceed(args, kwargs)):  # as its size
            return out
        else:
            raise self._axes.refusal(
                f"a product with distances goes into torch's {name!r} before it is scores of the tokens"
            )
        for made, _ in pairs(out, None):
            if any_carries(made):
                self._distances[made] = True
        return out

    def _are_scores(self, value: Tensor, call: Call) -> bool:
        """Whether what is added to other scores, or is the mask of attention, is of a query and a key, both of them
        tokens, and not of some that were pooled."""
        if call.name == ATTENTION:
            q, k, _, mask = arguments(call.args[:4], call.kwargs, "query", "key", "value", "attn_mask")
            shape = (*q.shape[:-1], k.shape[-2]) if mask is value else ()
        else:
            summands = tensors_in((*call.args, *call.kwargs.values()))
            shape = _shape_of(*(each.shape for each in summands))
            others = [each for each in summands if any_carries(each) and each not in self._distances]
            if self._axes.is_of_image() and not all(map(self._axes.are_known_scores, others)):
                return False
        known = self._numbers.lengths or shape
        return len(shape) > 2 and tuple(value.shape) == shape and shape[-1] in known and shape[-2] in known

    def _summed(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = list(call.args), dict(call.kwargs)
        given = [each for each in (*args, *kwargs.values()) if is_tensor(each)]
        x = next((each for each in given if any_carries(each) and not self._axes.is_constant(each)), None)
        if x is None or not any(map(self._axes.is_constant, given)):
            return call.args, call.kwargs
        shape = _shape_of(*(each.shape for each in given))
        for at, value in enumerate(args):
            if self._axes.is_constant(value) and not (at == 0 and is_in_place(call.name)):
                args[at] = self._added_to(x, value, shape)
            elif self._axes.is_constant(value) and (axis := self._axes.axis(value, [x], shape)) is not None:
                # what is written into becomes what depends on the input
                value.copy_(self._sink(value.clone(), [x], shape, x.dtype, axis, is_added=len(shape) == 4))
        kwargs |= {
            key: self._added_to(x, value, shape) for key, value in kwargs.items() if self._axes.is_constant(value)
        }
        return tuple(args), kwargs

    def _added_to(self, x: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
        """A constant that is added to ``x``, of which something of this shape is made: as a leaf, if it is
        positions."""
        is_known = self._axes.is_of_model(value) and not self._axes.is_map(x)
        axis = None if is_known else self._axes.axis_of_rows(value, x)
        axis = self._axes.axis(value, [x], shape) if axis is None and self._is_everywhere else axis
        axis = self._axes.axis_of_rows(value, x) if axis is None else axis
        if axis is None:
            self._axes.refuse_left(value, [x], shape, is_added=True)
            return value
        return self._sink(value, [x], shape, x.dtype, axis, is_added=len(shape) == 4 or axis.is_scores)

    def _joined_to(self, x: Tensor | None, value: Tensor, met: Sequence[Any], *, are_features: bool) -> Tensor:
        """A constant that is put beside others, and ``x``: as a leaf, if it is positions.

        Raises:
            MethodError: what is joined may be features of tokens, or tokens whose features come before them, of which
                there are as many as tokens.
        """
        dtype = torch.get_default_dtype() if x is None else x.dtype
        if x is not None and are_features and (axis := self._axes.axis_of_rows(value, x, is_joined=True)) is not None:
            return self._sink(value, met, value.shape, dtype, axis)
        is_table = are_features and bool(self._numbers.lengths)
        if not is_table and not self._axes.is_of_places(value):
            if x is not None and are_features:
                self._axes.refuse_left(value, [x], x.shape)
            return value
        added: Tensor = self._added(value, met, value.shape, dtype)
        may_be_tokens = x is not None and x.shape[-1] in self._numbers.lengths and self._numbers.mark(value) is None
        if is_table and may_be_tokens and added is not value:
            why = f"nothing tells whether what is joined, of shape {list(value.shape)}, is of the tokens or more tokens"
            raise self._axes.refusal(why)
        return added

    def _added(
        self,
        value: Any,
        met: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        is_scores: bool = False,
        keys: int = -1,
    ) -> Any:
        """A constant that is added to what was made of some tensors, and has this shape and dtype: as a leaf, if it is
        positions; ``keys``: which dimension of the last of these is the keys'."""
        axis = self._axes.axis(value, met, shape, is_scores=is_scores) if is_constant(value) else None
        if axis is None:
            if is_constant(value):
                self._axes.refuse_left(value, met, shape)
            return value
        return self._sink(value, met, shape, dtype, axis, is_added=len(shape) == 4 or axis.is_scores, keys=keys)

    def product(self, func: Callable[..., Any], a: Any, b: Any) -> Any:
        """``func(a, b)`` under the recipe's rule for positions, if one depends on the input and the other is positions,
        and the rule gives them some; else None."""
        constant, x = (b, a) if any_carries(a) else (a, b)
        if self._run.recipe.position is rules.signal_take_all or not is_tensor(constant):
            return None
        shape = _shape_of(constant.shape, x.shape)
        axis = self._axes.axis(constant, [x], shape, is_factor=True)
        if axis is None:
            self._axes.refuse_left(constant, [x], shape)
            return None
        leaf = self._sink(constant, [x], shape, x.dtype, axis, is_factor=True)
        op = func if constant is a else lambda position, signal: func(signal, position)
        return self._run.apply("position", op, leaf, x)

    def refuse_product(self, a: Any, b: Any) -> None:
        """Refuse a matrix product with positions, which are then distances and no token's.

        Raises:
            MethodError: one depends on the input, and the other is positions, under a rule that gives them some.
        """
        if self._takes_distances:
            return
        constant, x = (b, a) if any_carries(a) else (a, b)
        is_shared = self._run.recipe.position is not rules.signal_take_all
        if (
            is_shared
            and is_tensor(constant)
            and (self._numbers.varies(constant) or self._axes.is_of_matrices(constant, x))
        ):
            raise self._axes.refusal("positions are a factor of a matrix product, whose rows are no tokens'")

    def _sink(
        self,
        value: Tensor,
        met: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: Axis,
        *,
        is_added: bool = False,
        is_factor: bool = False,
        keys: int = -1,
    ) -> Tensor:
        """Positions as a leaf, with one for each row of the batch, and for each head if that was asked; ``met``: what
        they meet; ``is_added``: to what may be the scores of attention; ``is_factor``: they are multiplied; ``keys``:
        which dimension of what scores are, or are made of, is the keys'."""
        run = self._run
        is_looked_up = value.requires_grad and not isinstance(value, Parameter)
        named = value
        if not is_looked_up:
            value = value.detach() if value.is_floating_point() or value.is_complex() else value.to(dtype)
        of_tokens = [each for each in run.sources if each.ids is not None] if self._is_everywhere else []
        count = math.prod(value.shape[dim] for dim in axis.dims)
        possible = [each for each in of_tokens if self._axes.shape_of_ids(each)[-1] == count]
        if self._axes.is_of_image() and not run.replaying:  # which may have as many places as there are tokens
            possible = self._axes.of_which(met, possible)
        elif possible and len(of_tokens) > 1 and not run.replaying:
            possible = self._of_texts(met, axis, keys, possible, of_tokens)
        source = possible[-1] if possible else None
        if source is None and of_tokens:
            raise self._axes.refusal(f"it has positions for {count} places, which are none of the tokens")
        rows = self._axes.rows()
        heads = self._axes.heads(value, shape, rows, axis) if self.by_head else None
        is_wide = rows > 1 or heads is not None or not self._is_everywhere
        if is_wide:
            is_first = rows == 1 or all(map(self._moved.are_first, met))
            if shape[0] % rows or -len(shape) in axis.dims or not is_first:
                if rows > 1:
                    raise self._axes.refusal(
                        f"nothing tells the {rows} rows of the batch apart", "pass batch_size=1, or "
                    )
                is_wide = False
            value = value.reshape((1,) * (len(shape) - value.ndim) + value.shape)
            wide = list(value.shape)
            wide[0] = shape[0] if is_wide else wide[0]
            if heads:
                wide[heads] = shape[heads]
            value = value.expand(wide)
        # what was looked up stays in the graph: it is a source
        leaf = value.clone() if is_looked_up else value.requires_grad_()
        setattr(leaf, CONSTANT, True)
        if not run.replaying:
            layer = run.layer() if self._is_everywhere else None
            path = INPUT if layer is None else layer.path
            at = len(run.sources), len(self.sinks)
            line = None if is_looked_up else Line(at, "positions", self._name(named, path))
            self._met_pairs = axis.is_scores and axis.dims == (-1,) and leaf.ndim > 1 and leaf.shape[-2] > 1
            is_of_keys = is_added and axis.dims == (-1,) and leaf.shape[-1] == shape[-1]
            is_of_keys = is_of_keys and (leaf.ndim == 1 or bool((leaf == leaf[..., :1, :]).all()))
            is_of_layer = is_added or is_factor or axis.is_scores
            is_behind = is_of_layer and path == INPUT and self._is_behind(met)
            call = max(self._calls[path] - 1, 0)
            is_along = len(shape) > 3 and len(axis.dims) == 1 and not axis.is_scores
            ndim = len(shape) if is_along and source is None else 0
            of = source, rows if is_wide else None, axis.dims, heads
            which = self._of_which(leaf, met, axis, path) if source is None and not is_of_layer else None
            self.sinks.append(Sink(path, call, line, leaf, *of, is_of_keys, is_of_layer, is_behind, ndim, which))
        return leaf

    def _of_texts(
        self, met: Sequence[Any], axis: Axis, keys: int, possible: list[Source], of_tokens: Sequence[Source]
    ) -> list[Source]:
        """Of several texts that whose places positions meet, of those with as many tokens; none of what was cut from
        another.

        Raises:
            MethodError: there are several, and nothing tells whose.
        """
        given, dim = (met[-1:], keys) if axis.is_scores else (met, axis.dims[0] if axis.dims else None)
        if dim is not None and not axis.is_scores:  # what has one row for all of the places has none of them
            given = [each for each in given if is_tensor(each) and each.shape[dim:][:1] != (1,)]
        found = self._axes.of_whose_places(given, of_tokens, dim)
        if not found and len(possible) > 1:
            raise self._axes.refusal("nothing tells to which of several texts of one length positions are added")
        return [each for each in possible if any(each is one for one in found)] if found else possible

    def _of_which(self, leaf: Tensor, met: Sequence[Any], axis: Axis, path: str) -> int | None:
        """Of which of several inputs of numbers what is added to their rows is; where both are cut from one tensor, as
        of a series of past and future, what was not made of other positions has its own."""
        inputs = [each for each in self._run.sources if each.ids is None]
        dim = axis.dims[0] if axis.dims else None
        found = self._axes.of_whose_places(met, inputs, dim) if len(inputs) > 1 else []
        if len(found) != 1 or path != INPUT:
            return id(found[0].value) if found else None
        before = {
            id(sink.leaf): sink.of for sink in self.sinks if sink.layer == INPUT and sink.of and sink.leaf.is_leaf
        }
        again = [
            of for key, of in before.items() if any(descends(each.grad_fn, {key}) for each in met if is_tensor(each))
        ]
        return again[0] if again else id(leaf) if before else id(found[0].value)

    def _is_behind(self, met: Sequence[Any]) -> bool:
        """Whether any of some tensors was made of positions that a layer in no list has met."""
        before = {id(sink.leaf) for sink in self.sinks if sink.layer == INPUT and sink.is_of_layer}
        return bool(before) and any(descends(each.grad_fn, before) for each in met if is_tensor(each))

    def _name(self, value: Tensor, path: str) -> str:
        """What a ledger calls positions: by their layer; where they are constants in the layers, by themselves."""
        book = None if self._is_everywhere else self._run.trace.tap(Book)
        return path if book is None else book.name_of(value, "add")


def _is_in(value: Any, known: Any) -> bool:
    return isinstance(value, Tensor) and value in known


def _of_pairs(given: Any, ndim: int, lengths: set[int]) -> tuple[Tensor | None, int | None]:
    """The index that chooses for each pair of places, of all that are given in brackets, and of which dimension; None
    for that where nothing tells, or what it gives is not last."""
    given = list(given) if isinstance(given, tuple) else [given]
    chosen = [at for at, each in enumerate(given) if is_tensor(each) and each.dtype is not torch.bool]
    found = [at for at in chosen if given[at].ndim > 1 and lengths.issuperset(given[at].shape[-2:])]
    if not found:
        return None, None
    at = found[-1]
    is_together = all(is_tensor(each) or isinstance(each, int) for each in given[chosen[0] : at + 1])
    if not is_together or any(each is None or (is_tensor(each) and each.dtype is torch.bool) for each in given):
        return given[at], None
    behind = len(given) - at if any(each is ... for each in given[:at]) else ndim - at
    return given[at], -behind


def _shape_of(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of what is made of tensors of these, element by element."""
    made = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, size in enumerate(reversed(shape), 1):
            made[-i] = max(made[-i], size) if size else 0
    return tuple(made)


def _shape_of_sum(name: str, first: Any, others: Sequence[Tensor]) -> tuple[int, ...]:
    a, b = others[:2]
    made = _shape_of(a.shape, b.shape) if name.startswith("addc") else (*a.shape[:-1], *b.shape[-1:])
    return _shape_of(made, first.shape) if isinstance(first, Tensor) else tuple(made)
