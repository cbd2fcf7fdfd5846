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
from dataclasses import dataclass
from glob import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from lrpx import rules
from lrpx._kinds import rule_name
from lrpx._modules import layer_of, layers, named_modules
from lrpx.engine._book import Book, Line, relevance, storage_of
from lrpx.engine._gates import EXPONENTS
from lrpx.engine._graph import descends
from lrpx.engine._numbers import Numbers, cut_dims, pairs
from lrpx.engine._rows import Rows
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import CONSTANT, any_carries, arguments, is_in_place, tensors_in, whole_of
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine._places import Side, Source
    from lrpx.engine._taps import Call

INPUT = "input"
"""What the positions are called that meet the input outside of every layer."""

SUMS = frozenset(
    "add __add__ __radd__ add_ __iadd__ sub subtract __sub__ __rsub__ rsub sub_ __isub__ subtract_".split()
)
BESIDE = frozenset("cat concat concatenate stack hstack vstack dstack".split())
JOINING = ("cat", "concat", "concatenate")
ADDING = frozenset("addmm baddbmm addbmm addmv addr addcmul addcdiv addmm_ baddbmm_ addbmm_ addmv_ addr_".split())
"""Functions that add their first argument to a product of the others; all but the last two, scores to a bias."""
CHOOSING = ("gather", "take_along_dim", "__getitem__")
ATTENTION = "scaled_dot_product_attention"
PRODUCTS = ("product", "linear", "convolution", "matmul")
SCORES, FIRST, LAST = "scores", "channels first", "channels last"
"""What a tensor is in a model of images: products of two that depend on the input, scaled or in another shape; a map
``[B, d, R, C]``, which a convolution gives; or ``[B, R, C, d]``."""
SHAPES = ("permute", "transpose", "swap", "move", "reshape", "view", "T", "flatten")
"""What is in the names of functions after which channels may be elsewhere."""
WITH_DISTANCES = ("einsum", "matmul", "__matmul__", "bmm")
"""Matrix products that may be with a table of distances."""
SPLITS = frozenset("split split_with_sizes tensor_split chunk hsplit vsplit dsplit unsafe_split unsafe_chunk".split())
HIDDEN = 20
"""How much less than the others a score has that a mask hides: Swin takes 100 off."""
REDUCING = frozenset("sum mean nansum nanmean cumsum trace diagonal".split())
"""Functions that need no rule, after which a dimension is another's."""
DIVISIONS = frozenset("div divide true_divide __truediv__ div_ divide_ __itruediv__".split())


@dataclass(frozen=True, eq=False)
class Sink:
    """A place where positions meet what depends on the input, and the leaf that keeps their relevance.

    Args:
        layer: the path of the layer, or ``"input"``.
        call: which call of the layer, from 0.
        line: what the ledger calls it; None where the ledger has it elsewhere, as what was looked up in a table.
        leaf: the positions as a leaf, one for each row.
        source: the tokens whose positions they are; None where the model has none, as one of images.
        rows: how many rows the leaf's first dimension is, one after another; None where it is no dimension of rows.
        tokens: which dimensions are those of the tokens, counted from the end; none where there is one token.
        heads: which dimension is that of the heads, counted from the end; 0 where the first has them in each row; None
            where there are none, or nobody asked.
        is_of_keys: whether it is added to the scores of attention, for every query the same. Then nothing but the
            differences between keys counts, and the first that is seen is where they are counted from: a model may
            count from the last (MPT), which is another in a padded row.
        is_of_layer: whether it is a factor, or added to scores, which is what layers do; what is added to embeddings is
            not.
        is_behind: whether what it meets was made of other positions of layers, outside of every list of modules.
    """

    layer: str
    call: int
    line: Line | None
    leaf: Tensor
    source: Source | None
    rows: int | None
    tokens: tuple[int, ...]
    heads: int | None
    is_of_keys: bool = False
    is_of_layer: bool = False
    is_behind: bool = False

    def rows_of(self, value: Tensor) -> Tensor:
        """``[B, n, d]`` of the leaf, or of its gradient, where it is positions that are added to an image's rows."""
        return value.movedim(self.tokens, tuple(range(1, len(self.tokens) + 1))).flatten(1, len(self.tokens))

    def _of_first_key(self, value: Tensor, gradient: Tensor) -> Tensor:
        """What is added for the first key of each row that any query sees: those before are padding."""
        flat, of = (each.reshape(self.rows or 1, -1, each.shape[-1]) for each in (value, gradient))
        first = (of != 0).any(1).int().argmax(-1)[:, None, None].expand(-1, flat.shape[1], 1)
        return flat.gather(-1, first).reshape(*value.shape[:-1], 1)

    def relevance(self, gradient: Tensor | None) -> Tensor:
        """``[B, H, n]``: the relevance of each place in each row, by heads, which are one where there are none."""
        value = self.leaf.detach()
        gradient = torch.zeros_like(value) if gradient is None else gradient
        if self.is_of_keys:  # unless it is no softmax of these keys alone, as beside an attention sink
            bound = max(1e-5, 8 * torch.finfo(value.dtype).eps) * gradient.abs().sum(-1, keepdim=True)
            is_no_matter = gradient.sum(-1, keepdim=True).abs() <= bound
            value = torch.where(is_no_matter, value - self._of_first_key(value, gradient), value)
        found = relevance(value, gradient)
        if self.leaf.is_complex():  # real and imaginary parts are the last dimension
            found = found.sum(-1)
        found = found if self.rows is not None else found.unsqueeze(0)
        kept = [*([self.heads] if self.heads else []), *self.tokens]
        found = found.movedim(kept, tuple(range(1, len(kept) + 1)))
        if found.ndim > 1 + len(kept):
            found = found.flatten(1 + len(kept)).sum(-1)
        rows = self.rows or 1
        if self.heads == 0:
            found = found.reshape(rows, -1, *found.shape[1:])
        elif self.heads is None:
            found = found.unsqueeze(1)
        found = found.flatten(2) if self.tokens else found.unsqueeze(-1)
        return found.reshape(rows, -1, *found.shape[1:]).sum(1)


class Kept(NamedTuple):
    """What the positions of one layer have.

    Args:
        layer: its path, or ``"input"``.
        source: the tokens whose positions they are; None where the model has none.
        relevance: ``[B, n]``; by heads ``[B, H, n]``.
        heads: how many heads they were met in; None where they were met outside of heads, or it was not asked.
    """

    layer: str
    source: Source | None
    relevance: Tensor
    heads: int | None = None


class _Axis(NamedTuple):
    """Which dimensions of positions, counted from their end, are those of the places, none where there is one place;
    and whether what they are added to is scores."""

    dims: tuple[int, ...]
    is_scores: bool = False


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
        self._moved = Rows()
        self._tables: frozenset[int] | None = None
        self._is_everywhere = False
        self._made: Any = WeakTensorKeyDictionary()
        self._looked_up: list[Tensor] = []
        self._of_tables: Any = WeakTensorKeyDictionary()  # what was made of the model's own tensors
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
            MethodError: one layer has positions of places of different number.
        """
        found: dict[tuple[str, int, int | None], Kept] = {}
        again = {sink.layer for sink in self.sinks if sink.call}
        for sink in self.sinks:
            layer = f"{sink.layer}#{sink.call}" if sink.layer in again else sink.layer
            mine = sink.relevance(gradients.get(id(sink.leaf)))
            heads = None if sink.heads is None or not by_head else mine.shape[1]
            mine = mine if by_head else mine.sum(1)
            key = layer, id(sink.source), heads
            before = found.get(key)
            if before is not None and before.relevance.shape != mine.shape:
                raise MethodError(
                    f"{layer or 'the model'} meets the positions of {before.relevance.shape[-1]} places and of "
                    f"{mine.shape[-1]}, as of pixels and of what they are read into, and no token has both; use attnlrp"
                )
            mine = mine if before is None else before.relevance + mine
            found[key] = Kept(layer, sink.source, mine, heads)
        return list(found.values())

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
            if call.name in SUMS and torch.is_grad_enabled() and self._is_of_image():
                args, kwargs = self._summed(call)
            out = proceed(args, kwargs)
            if self._is_of_image():
                self._numbers.follow_input(call, out)
            self._follow(call, out)
            return out
        takes_shape = (
            row is not None and not row.has_summands and row.kind == "plain" and args and not any_carries(args[0])
        )
        if takes_shape or not any_carries((*args, *kwargs.values())):
            self._refuse_choice(call)
            out = self._numbers.of_constants(call, proceed)
            if not self._numbers.follow_input(call, out):
                self._follow_tables(call, out)
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
        self._follow(call, out)
        self._follow_rows(call, out)
        self._follow_pairs(call, out)
        self._follow_joined(call, out, has_places=len(self.sinks) > before)
        return self._chosen(call, out) if call.name in CHOOSING else out

    def _is_of_places(self, c: Tensor) -> bool:
        """Whether a constant was made of the numbers of places."""
        mark = self._numbers.mark(c)
        return mark is not None and not mark.is_table

    def _is_of_image(self) -> bool:
        """Whether the model reads numbers, such as pixels."""
        return any(source.ids is None for source in self._run.sources)

    def _follow(self, call: Call, out: Any) -> None:
        """Remember what is a score for each pair of places; of a model of images, too, a map with its channels first,
        or a row that was looked up."""
        row = call.operation
        if row is None or not isinstance(out, Tensor) or not (self._is_everywhere or self._is_of_image()):
            return
        is_looked_up = call.name == "embedding" and not self._is_everywhere and call.args
        if is_looked_up and not self._run.is_given(call.args[0]):
            self._looked_up.append(out)
        given = [each for each in (*call.args, *call.kwargs.values()) if any_carries(each)]
        made = {self._made.get(each) if isinstance(each, Tensor) else None for each in given}
        if row.kind == "matmul":
            made = {SCORES} if len(given) > 1 else set()
        elif row.kind == "convolution":
            made = {FIRST}
        elif made in ({FIRST}, {LAST}):
            made = _moved(made, call, out)
        elif row.kind in ("linear", "source"):
            return
        if SCORES in made and call.name in SUMS:
            made = {SCORES}
        if len(made) == 1 and made != {None}:
            self._made[out] = made.pop()

    def _follow_rows(self, call: Call, out: Any) -> None:
        if self._run.sources and (rows := self._rows()) > 1:
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
                raise self._refusal("positions of pairs were added to scores with the keys before the queries")
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
            if dim % out.ndim == out.ndim - 1 and any(map(_is_constant, call.args[0])):
                self._joined[out] = has_places
        elif name == "pad" and arguments(call.args, call.kwargs, "input", "pad", "mode", "value")[3]:
            self._joined[out] = False
        given = [self._joined[each] for each in tensors_in(call.args) if _is_in(each, self._joined)]
        if not given:
            return
        if len(given) > 1 and any(given) and (row.kind == "matmul" or name == ATTENTION):
            raise self._refusal(
                "positions are joined to the features of queries or keys, and constants to those of the others, where "
                "their product is added to scores and would have a half"
            )
        if row.kind in ("plain", "product") and name not in BESIDE:
            self._joined[out] = any(given)

    def _follow_tables(self, call: Call, out: Any) -> None:
        """What is cast, scaled, cut or put together of a table is one, if it was not computed from places."""
        tables = [each for each in tensors_in((*call.args, *call.kwargs.values())) if self._is_of_model(each)]
        for made, _ in pairs(out, None) if tables else ():
            mark = self._numbers.mark(made)
            if (made.is_floating_point() or made.is_complex()) and (mark is None or mark.is_table):
                self._of_tables[made] = True
                if made._base is not None and (dims := cut_dims(call)):
                    self._numbers.cut(call.args[0], made, dims)
                elif made._base is not None and call.name in SPLITS:
                    self._numbers.cut(call.args[0], made)

    def _is_of_model(self, c: Tensor) -> bool:
        """Whether the numbers of a constant are the model's own, or were made of them."""
        base = whole_of(c)
        return _is_constant(c) and (storage_of(c) in self._memory() or c in self._of_tables or base in self._of_tables)

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
            added = self._added(mask, [k], (*q.shape[:-1], k.shape[-2]), q.dtype, is_scores=True)
            if added is mask:
                return args, kwargs
            return ((*args[:3], added, *args[4:]), kwargs) if len(args) > 3 else (args, kwargs | {"attn_mask": added})
        if name in ADDING and args:
            factors = [each for each in (*args[1:], *kwargs.values()) if _is_tensor(each)]
            # of a constant and what depends on the input it is a layer, and its bias
            is_scores = not name.startswith("addc") and all(map(any_carries, factors))
            shape = _shape_of_sum(name, args[0], factors)
            dtype = next(each.dtype for each in (*args, *kwargs.values()) if any_carries(each))
            return (self._added(args[0], factors, shape, dtype, is_scores=is_scores), *args[1:]), kwargs
        if name in BESIDE and args and type(args[0]) in (tuple, list):
            dtype = next((each.dtype for each in args[0] if any_carries(each)), torch.get_default_dtype())
            made = [
                # what is learned and joined are tokens, as registers are, and no table
                self._added(each, args[0], each.shape, dtype) if _is_tensor(each) and self._is_of_places(each) else each
                for each in args[0]
            ]
            return (made, *args[1:]), kwargs
        if call.operation is not None and (call.operation.kind in PRODUCTS or name in DIVISIONS):
            return args, kwargs  # products ask by themselves; a divisor is a normaliser
        for each in (*args, *kwargs.values()):
            if _is_tensor(each) and each.is_floating_point() and not any_carries(each) and self._numbers.varies(each):
                raise self._refusal(f"positions go into torch's {name!r}, which is neither a sum nor a product")
        return args, kwargs

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
            raise self._refusal("positions choose of products what are no scores of the tokens, with the keys last")
        return self._of_keys(out)

    def _of_keys(self, scores: Tensor) -> Tensor:
        """Scores that are products with distances, half of them that of the position of each key."""
        ones = scores.new_ones(*(1,) * (scores.ndim - 1), scores.shape[-1])
        leaf = self._sink(ones, [scores], scores.shape, scores.dtype, _Axis((-1,), is_scores=True))
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
            raise self._refusal(
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
            if self._is_of_image() and not all(self._made.get(each) == SCORES for each in others):
                return False
        known = self._numbers.lengths or shape
        return len(shape) > 2 and tuple(value.shape) == shape and shape[-1] in known and shape[-2] in known

    def _summed(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = list(call.args), dict(call.kwargs)
        given = [each for each in (*args, *kwargs.values()) if _is_tensor(each)]
        x = next((each for each in given if any_carries(each) and not self._is_constant(each)), None)
        if x is None or not any(map(self._is_constant, given)):
            return call.args, call.kwargs
        shape = _shape_of(*(each.shape for each in given))
        for at, value in enumerate(args):
            if self._is_constant(value) and not (at == 0 and is_in_place(call.name)):
                args[at] = self._added_to(x, value, shape)
            elif self._is_constant(value) and (axis := self._axis(value, [x], shape)) is not None:
                # what is written into becomes what depends on the input
                value.copy_(self._sink(value.clone(), [x], shape, x.dtype, axis, is_added=len(shape) == 4))
        kwargs |= {key: self._added_to(x, value, shape) for key, value in kwargs.items() if self._is_constant(value)}
        return tuple(args), kwargs

    def _added_to(self, x: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
        """A constant that is added to ``x``, of which something of this shape is made: as a leaf, if it is
        positions."""
        is_known = self._is_of_model(value) and self._made.get(x) not in (FIRST, LAST)
        axis = None if is_known else self._axis_of_rows(value, x)
        axis = self._axis(value, [x], shape) if axis is None and self._is_everywhere else axis
        axis = self._axis_of_rows(value, x) if axis is None else axis
        return (
            value
            if axis is None
            else self._sink(value, [x], shape, x.dtype, axis, is_added=len(shape) == 4 or axis.is_scores)
        )

    def _axis_of_rows(self, c: Tensor, x: Tensor) -> _Axis | None:
        """The same of what is added to the rows or the map of an image, and has a row of its own for each place."""
        if not self._is_of_image() or self._numbers.mark(c) is not None or self._made.get(x) == SCORES:
            return None
        if self._numbers.is_of_input(c):
            return None
        if x.ndim not in (3, 4) or len(x) != self._rows() or CONSTANT in vars(x):
            return None
        if x.shape[1:-1].numel() == 1 or c.shape[1 - x.ndim :] != x.shape[1:] or not c.is_floating_point():
            return None
        of_tokens = [each for each in self._run.sources if each.ids is not None]
        if not self._run.replaying and self._of_which([x], of_tokens):  # a text beside the image, or a stream of both
            return None
        is_first = self._made.get(x) == FIRST
        if self._made.get(x) not in (FIRST, LAST):  # nobody saw where its channels are
            is_first = x.shape[-3] != x.shape[-2] == x.shape[-1]
        return _Axis((-2, -1) if x.ndim == 4 and is_first else tuple(range(1 - x.ndim, -1)))

    def _of_which(self, given: Sequence[Any], sources: Sequence[Source]) -> list[Source]:
        """The sources that any of the tensors was computed from; a replay has no graph to tell."""
        every = [each for each in given if _is_tensor(each)]
        return [source for source in sources if any(descends(each.grad_fn, {id(source.value)}) for each in every)]

    def _is_constant(self, value: Any) -> bool:
        """Whether a summand is a constant, or was looked up for all rows alike, as an image's positions may be."""
        if _is_constant(value):
            return True
        is_for_all = isinstance(value, Tensor) and value.ndim > 1 and (value.ndim == 2 or len(value) == 1)
        return is_for_all and any(value is each for each in self._looked_up)

    def _added(
        self, value: Any, met: Sequence[Any], shape: Sequence[int], dtype: torch.dtype, *, is_scores: bool = False
    ) -> Any:
        """A constant that is added to what was made of some tensors, and has this shape and dtype: as a leaf, if it is
        positions."""
        axis = self._axis(value, met, shape, is_scores=is_scores) if _is_constant(value) else None
        if axis is None:
            return value
        return self._sink(value, met, shape, dtype, axis, is_added=len(shape) == 4 or axis.is_scores)

    def product(self, func: Callable[..., Any], a: Any, b: Any) -> Any:
        """``func(a, b)`` under the recipe's rule for positions, if one depends on the input and the other is positions,
        and the rule gives them some; else None."""
        constant, x = (b, a) if any_carries(a) else (a, b)
        if self._run.recipe.position is rules.signal_take_all or not _is_tensor(constant):
            return None
        shape = _shape_of(constant.shape, x.shape)
        axis = self._axis(constant, [x], shape, is_factor=True)
        if axis is None:
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
        if is_shared and _is_tensor(constant) and (self._numbers.varies(constant) or self._is_of_matrices(constant, x)):
            raise self._refusal("positions are a factor of a matrix product, whose rows are no tokens'")

    def _sink(
        self,
        value: Tensor,
        met: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        axis: _Axis,
        *,
        is_added: bool = False,
        is_factor: bool = False,
    ) -> Tensor:
        """Positions as a leaf, with one for each row of the batch, and for each head if that was asked; ``met``: what
        they meet; ``is_added``: to what may be the scores of attention; ``is_factor``: they are multiplied."""
        run = self._run
        is_looked_up = value.requires_grad and not isinstance(value, Parameter)
        named = value
        if not is_looked_up:
            value = value.detach() if value.is_floating_point() or value.is_complex() else value.to(dtype)
        of_tokens = [each for each in run.sources if each.ids is not None] if self._is_everywhere else []
        count = math.prod(value.shape[dim] for dim in axis.dims)
        # an image may have as many places as there are tokens
        possible = self._of_which(met, of_tokens) if self._is_of_image() and not run.replaying else of_tokens
        source = next((each for each in reversed(possible) if self._shape_of_ids(each)[-1] == count), None)
        if source is None and of_tokens:
            raise self._refusal(f"it has positions for {count} places, which are none of the tokens")
        rows = self._rows()
        heads = self._heads(value, shape, rows, axis) if self.by_head else None
        is_wide = rows > 1 or heads is not None or not self._is_everywhere
        if is_wide:
            is_first = rows == 1 or all(map(self._moved.are_first, met))
            if shape[0] % rows or -len(shape) in axis.dims or not is_first:
                if rows > 1:
                    raise self._refusal(f"nothing tells the {rows} rows of the batch apart", "pass batch_size=1, or ")
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
            layer = layer_of(run.where()) if self._is_everywhere else None
            path = INPUT if layer is None else layer.path
            at = len(run.sources), len(self.sinks)
            line = None if is_looked_up else Line(at, "positions", self._name(named, path))
            self._met_pairs = axis.is_scores and axis.dims == (-1,) and leaf.ndim > 1 and leaf.shape[-2] > 1
            is_of_keys = is_added and axis.dims == (-1,) and leaf.shape[-1] == shape[-1]
            is_of_keys = is_of_keys and (leaf.ndim == 1 or bool((leaf == leaf[..., :1, :]).all()))
            is_of_layer = is_added or is_factor or axis.is_scores
            is_behind = is_of_layer and path == INPUT and self._is_behind(met)
            call = max(self._calls[path] - 1, 0)
            of = source, rows if is_wide else None, axis.dims, heads
            self.sinks.append(Sink(path, call, line, leaf, *of, is_of_keys, is_of_layer, is_behind))
        return leaf

    def _is_behind(self, met: Sequence[Any]) -> bool:
        """Whether any of some tensors was made of positions that a layer in no list has met."""
        before = {id(sink.leaf) for sink in self.sinks if sink.layer == INPUT and sink.is_of_layer}
        return bool(before) and any(descends(each.grad_fn, before) for each in met if _is_tensor(each))

    def _name(self, value: Tensor, path: str) -> str:
        """What a ledger calls positions: by their layer; where they are constants in the layers, by themselves."""
        book = None if self._is_everywhere else self._run.trace.tap(Book)
        return path if book is None else book.name_of(value, "add")

    def _heads(self, value: Tensor, shape: Sequence[int], rows: int, axis: _Axis) -> int | None:
        """Which dimension of what positions make is that of the heads: see :class:`Sink`.

        Raises:
            MethodError: nothing tells.
        """
        first = -len(shape)
        if axis.is_scores:
            found = [-3] if first < -3 else []
        else:
            found = [dim for dim in range(first + 1, -1) if dim not in axis.dims]
        if not axis.dims:  # there is one place
            found = [] if first == -3 else [dim for dim in found if shape[dim] > 1] or found[:1]
        if len(found) > 1:  # heads share their angles, which differ along the other dimensions
            found = [dim for dim in found if dim < -value.ndim or value.shape[dim] == 1]
        if len(found) > 1:
            why = f"nothing tells which of the dimensions {list(shape)} is the heads'"
            raise self._refusal(why, "leave by_head out, or ")
        if found:
            return found[0]
        return 0 if len(shape) == 3 and first not in axis.dims and shape[0] > rows and not self._is_of_image() else None

    def _rows(self) -> int:
        """How many rows the batch has: of ids, if the model takes any, and positions are met everywhere."""
        sources = self._run.sources
        first = next((each for each in sources if (each.ids is not None) is self._is_everywhere), sources[0])
        shape = first.value.shape if first.ids is None else self._shape_of_ids(first)
        return int(shape[0]) if first.ids is None or len(shape) > 1 else 1

    def is_turned(self, source: Source) -> bool:
        """Whether the model has looked up ``[T, B]`` ids of tokens that it was given as ``[B, T]``."""
        return source.ids is not None and self._numbers.is_turned(source.ids)

    def _shape_of_ids(self, source: Source) -> tuple[int, ...]:
        assert source.ids is not None
        shape = tuple(source.ids.shape)
        return shape[::-1] if self.is_turned(source) else shape

    def _axis(
        self,
        c: Tensor,
        met: Sequence[Any],
        shape: Sequence[int],
        *,
        is_scores: bool = False,
        is_factor: bool = False,
    ) -> _Axis | None:
        """The dimension of the places of a constant; None where it is no positions.

        Args:
            c: the constant.
            met: what it meets.
            shape: of what it makes with what depends on the input.
            is_scores: whether that is known to be the scores of attention. Of the two dimensions of places there, the
                last is the keys', and what is added belongs to the positions of the keys.
            is_factor: whether it is multiplied, or joined, and not added.

        Raises:
            MethodError: nothing tells.
        """
        is_kept = self._numbers.mark(c) is None and storage_of(c) in self._memory() and c not in self._of_tables
        if is_kept and c._base is not None:
            self._numbers.cut(c._base, c)  # by the model, before the run
        mark = self._numbers.mark(c)
        if self._numbers.is_of_input(c):
            return None
        if mark is None:
            return self._axis_of_table(c, met, shape, is_scores=is_scores, is_factor=is_factor)
        if mark.is_mask and self._hides(c, shape, is_factor=is_factor):
            return None
        if mark.is_single and not self._may_be_one_place(shape):
            return None
        if mark.shadow is None and mark.is_single:
            return _Axis((), is_scores)
        if mark.shadow is None:
            raise self._refusal(f"nothing tells which dimension of positions of shape {list(c.shape)} is the tokens'")
        of_scores = any(_is_tensor(each) and self._made.get(each) == SCORES for each in met)
        differs = c != mark.shadow
        if not (bool(differs.any()) or (mark.is_single and (mark.is_table or is_scores or of_scores))):
            self._refuse_rows(c, shape, of_scores=is_scores or of_scores, is_known=mark.is_mask)
            return None  # of one place, a table has no other row, and a distance is the same from another
        if mark.is_single:
            return _Axis((), is_scores or of_scores)
        if is_scores:
            return _Axis((-1 if c.shape[-1] > 1 else -2,), is_scores=True)
        is_pair = c.ndim > 1 and c.shape[-1] == shape[-1] > 1 and c.shape[-2] in (1, shape[-2])
        # where no tokens are known, a head is as wide as it is, and scores alone are of pairs
        is_gated = is_factor and _is_gated(c, met)
        is_pair &= c.shape[-1] in self._numbers.lengths if self._numbers.lengths else of_scores or is_gated
        # rows of a batch, in which some may differ and others not, as where they are padded
        rows = -len(shape) if self._rows() > 1 else 0
        many = {dim: _spread(differs, dim) for dim in range(-c.ndim, 0) if c.shape[dim] > 1 and dim != rows}
        of_tokens = {dim: count for dim, count in many.items() if c.shape[dim] in self._numbers.lengths}
        if self._numbers.lengths == {1} and all(count == c.shape[dim] for dim, count in many.items()):
            return _Axis((), is_pair or of_scores)
        if min(of_tokens.values(), default=math.inf) <= max(min(many.values(), default=0), self._numbers.moved):
            many = of_tokens  # else others are of places, and there may be as many features as tokens
        fewest = min(many.values(), default=0)
        found = [dim for dim, count in many.items() if count == fewest < c.shape[dim]]
        # a mask that was added to biases of pairs hides some of both dimensions' places, of one maybe more
        in_both = is_pair and mark.is_pair
        in_both |= is_pair and all(self._numbers.moved < many.get(dim, 0) for dim in (-2, -1))
        if len(found) == 1 and not in_both:
            is_kept = mark.is_table and found == [-1] and not of_scores
            # frequencies are of a range, too: where no tokens are known they may be what differs the least
            is_of_features = not self._numbers.lengths and found == [-1] and fewest > self._numbers.moved
            if is_of_features and not of_scores and c.ndim > 1:
                why = f"nothing tells which dimension of positions of shape {list(c.shape)} is that of the places"
                raise self._refusal(why)
            if is_kept:  # of features, unless it is of keys
                if len(shape) < 3 or shape[-2] not in self._numbers.lengths:
                    return None
                raise self._refusal(f"nothing tells whether a table of shape {list(c.shape)} is of keys or of features")
            return _Axis((found[0],), (is_pair or of_scores) and found[0] == -1)
        if is_pair and (of_scores or is_gated):  # both dimensions differ alike: queries and keys
            return _Axis((-1,), is_scores=True)
        raise self._refusal(f"nothing tells which dimension of positions of shape {list(c.shape)} is the tokens'")

    def _axis_of_table(
        self, c: Tensor, met: Sequence[Any], shape: Sequence[int], *, is_scores: bool, is_factor: bool
    ) -> _Axis | None:
        """The same of what was not computed from places: a table of the model with a row for each."""
        of_scores = is_scores or any(_is_tensor(each) and self._made.get(each) == SCORES for each in met)
        if c.ndim and not self._is_of_model(c) and not self._numbers.is_given(c):
            self._refuse_rows(c, shape, of_scores=of_scores)
            return None
        if c.ndim < 2 or max(c.shape[:-1]) == 1:  # nearly always
            return None
        wide = [dim for dim in range(-c.ndim, -1) if c.shape[dim] > 1]
        known = [dim for dim in wide if c.shape[dim] in self._numbers.lengths and dim > -len(shape)]
        is_whole = len(shape) == 3 and wide == [-2] and c.shape[-2:] == tuple(shape[-2:])
        is_of_input = is_whole and any(each.ids is None for each in self._run.sources)
        is_pair = is_scores or (len(shape) > 3 and c.shape[-2:] == tuple(shape[-2:]) == (c.shape[-1],) * 2)
        if is_pair:
            dim = -1 if c.shape[-1] in (self._numbers.lengths or c.shape) else None
            if dim is None and not is_scores and self._is_of_blocks(c):
                raise self._refusal(f"a table of shape {list(c.shape)} has places of a block, and not of all tokens")
        else:
            dim = known[0] if len(known) == 1 else -2 if is_of_input else None
            if dim is None and not self._numbers.lengths and self._is_of_image():
                self._refuse_kept(c, shape, wide, is_factor=is_factor)
        if dim is None or c.shape[dim] not in whole_of(c).shape or not self._is_table(c, dim):
            return None
        first = 0 if any(map(self.is_turned, self._run.sources)) else 1  # in which the tokens may be, too
        others = [each for each in range(first - len(shape), 0) if each != dim and shape[each] == c.shape[dim]]
        is_unclear = any(each < -c.ndim or c.shape[each] == 1 for each in others)
        is_unclear &= not is_pair or not is_scores
        # of as many tokens as a head is wide, unless it is for pairs of these
        is_unclear |= is_pair and not of_scores and c.shape[-1] in self._numbers.lengths
        # of a text that was cut into blocks, one of which is all of it
        is_unclear |= not is_pair and not is_of_input and 1 in shape[1 : dim + len(shape)] and c.ndim < len(shape)
        if is_unclear or (not is_pair and is_of_input and c.shape[-1] == c.shape[-2]):
            raise self._refusal(f"nothing tells which dimension of a table of shape {list(c.shape)} is the tokens'")
        return _Axis((dim,), is_pair)

    def _hides(self, c: Tensor, shape: Sequence[int], *, is_factor: bool) -> bool:
        """Whether what was made of comparisons alone is a mask: what it does not admit is taken out of a softmax, or
        multiplied with 0, and what it does is all the same. A bonus for the first token is none."""
        if not c.is_floating_point():
            return True
        if not is_factor:
            most = c.amax()
            return bool(((c == most) | (c < most - HIDDEN)).all())
        dims = [dim for dim in range(-c.ndim, 0) if dim != -len(shape) and c.shape[dim] in self._numbers.lengths]
        most = c.abs()
        return all(bool(((c == 0) | (most == most.amax(dim, keepdim=True))).all()) for dim in dims)

    def _refuse_kept(self, c: Tensor, shape: Sequence[int], wide: Sequence[int], *, is_factor: bool) -> None:
        """Refuse a table that is multiplied with an image's heads, as angles that were kept are, or is added to rows
        that come after the places.

        Raises:
            MethodError: it is one.
        """
        is_of_heads = is_factor and len(shape) > 3 and not isinstance(c, Parameter)
        is_turned = not is_factor and len(shape) == 3 and wide == [-3] and c.shape[-3] == shape[-3] > 1
        if len(wide) == 1 and c.shape[-1] > 1 and (is_of_heads or is_turned) and self._is_table(c, wide[0]):
            raise self._refusal(f"nothing tells whether a table of shape {list(c.shape)} is of the image's places")

    def _refuse_choice(self, call: Call) -> None:
        """Refuse a look-up by whole numbers that are another for each token, and nobody's.

        Raises:
            MethodError: it is one.
        """
        if call.name == "embedding" and self._run.is_in_module():
            index = arguments(call.args, call.kwargs, "input")[0]
            if self._numbers.is_choice_of_nobody(index):
                why = "nothing tells whether whole numbers by which another row is looked up for each token are places"
                raise self._refusal(why, "let the model count places by torch.arange, or ")

    def _refuse_rows(self, c: Tensor, shape: Sequence[int], *, of_scores: bool, is_known: bool = False) -> None:
        """Refuse a constant with another row for each token, of which nothing tells whether they are positions: nobody
        saw what it was made of, or it is the same at the one other place that was tried, as what comes again is.

        Raises:
            MethodError: it is such a constant, no mask, and met in the model, not in what is made of its outputs.
        """
        rows = -len(shape) if self._rows() > 1 else 0
        dims = range(-c.ndim, 0 if of_scores else -1)
        of_tokens = [dim for dim in dims if dim != rows and 1 < c.shape[dim] == shape[dim] in self._numbers.lengths]
        is_known = is_known and any(bool((c != c.narrow(dim, 0, 1)).any()) for dim in of_tokens)
        if (is_known or any(_has_rows(c, dim) for dim in of_tokens)) and self._run.is_in_module():
            why = f"nothing tells whether what has another row for each token, of shape {list(c.shape)}, is positions"
            raise self._refusal(why, "let the model keep it as a buffer and cut it to the text, or ")

    def _may_be_one_place(self, shape: Sequence[int]) -> bool:
        """Whether what has this shape may be of one token: a dimension of it beside the rows of a batch is one."""
        ids = next((each.ids for each in self._run.sources if each.ids is not None), None)
        is_rows_first = ids is not None and ids.ndim > 1 and self._rows() == 1
        return 1 in self._numbers.lengths and 1 in (shape[1:] if is_rows_first else shape)

    def _is_of_blocks(self, c: Tensor) -> bool:
        """Whether what the model has kept for pairs of places is of fewer places than any text has tokens, as linear
        attention in blocks multiplies its products with."""
        return c.ndim > 3 and c.shape[-1] < min(self._numbers.lengths) and self._is_table(c, -1)

    def _is_table(self, c: Tensor, dim: int) -> bool:
        """Whether a constant is numbers of the model itself that differ along a dimension, and no mask."""
        return self._is_of_model(c) and _has_rows(c, dim)

    def _is_of_matrices(self, c: Tensor, x: Tensor) -> bool:
        """Whether a constant that the model has kept is a matrix for each place, as rotations are; weights of so many
        experts are parameters. Matrices that are not square, and meet ``x`` whose rows are the tokens, are those of
        as many heads, as DeBERTa's tables of distances. A vector, and one matrix, has none for each place."""
        if c.ndim < 3:
            return False
        if c.shape[-1] != c.shape[-2] and x.ndim == c.ndim == 3 and x.shape[-2] in self._numbers.lengths:
            return False
        places = [dim for dim in range(-c.ndim, -2) if c.shape[dim] > 1 and c.shape[dim] in self._numbers.lengths]
        if not places or storage_of(c) in set(map(storage_of, self._model.parameters())):
            return False
        return any(self._is_table(c, dim) for dim in places)

    def _memory(self) -> frozenset[int]:
        """Where the tensors of the model are."""
        if self._tables is None:
            own = [each for module in self._model.modules() for each in _kept_in(vars(module))]
            every = (*self._model.parameters(), *self._model.buffers(), *own)
            self._tables = frozenset(map(storage_of, every)) - {0}
        return self._tables

    def _refusal(self, why: str, mend: str = "") -> MethodError:
        rule = rule_name(self._run.recipe.position)
        return MethodError(
            f"{self._run.where()}: {why}, so the rule position={rule} cannot be applied; {mend}"
            "use attnlrp, for which positions are constants"
        )


def _is_in(value: Any, known: Any) -> bool:
    return isinstance(value, Tensor) and value in known


def _kept_in(value: Any, depth: int = 4) -> list[Tensor]:
    """The tensors in a module's attributes, and in dictionaries and lists there, as caches are."""
    if isinstance(value, Tensor):
        return [value]
    if depth and isinstance(value, dict):
        value = list(value.values())
    if not depth or not isinstance(value, (tuple, list)):
        return []
    return [each for item in value for each in _kept_in(item, depth - 1)]


def _has_rows(c: Tensor, dim: int) -> bool:
    """Whether a constant is numbers that differ along a dimension, and no mask."""
    if not (c.is_floating_point() or c.is_complex()):
        return False
    is_mask = not c.is_complex() and bool(((c == c.min()) | (c == c.max())).all())
    return not is_mask and bool((c != c.narrow(dim, 0, 1)).any())


def _is_gated(c: Tensor, met: Sequence[Any]) -> bool:
    """Whether what is multiplied has one number for all of the last dimension of a constant, which has others for each
    head, as WavLM's gates of biases have: no angles do."""
    is_one = all(each.ndim > 2 and each.shape[-1] == 1 for each in met if _is_tensor(each))
    return is_one and c.ndim > 2 and bool((c != c.narrow(-3, 0, 1)).any())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _of_pairs(given: Any, ndim: int, lengths: set[int]) -> tuple[Tensor | None, int | None]:
    """The index that chooses for each pair of places, of all that are given in brackets, and of which dimension; None
    for that where nothing tells, or what it gives is not last."""
    given = list(given) if isinstance(given, tuple) else [given]
    chosen = [at for at, each in enumerate(given) if _is_tensor(each) and each.dtype is not torch.bool]
    found = [at for at in chosen if given[at].ndim > 1 and lengths.issuperset(given[at].shape[-2:])]
    if not found:
        return None, None
    at = found[-1]
    is_together = all(_is_tensor(each) or isinstance(each, int) for each in given[chosen[0] : at + 1])
    if not is_together or any(each is None or (_is_tensor(each) and each.dtype is torch.bool) for each in given):
        return given[at], None
    behind = len(given) - at if any(each is ... for each in given[:at]) else ndim - at
    return given[at], -behind


def _is_constant(value: Any) -> bool:
    """Whether a tensor does not depend on the input; a normaliser that a rule has held constant is no position."""
    if not isinstance(value, Tensor) or hasattr(value, EXPONENTS):
        return False
    return isinstance(value, Parameter) or not value.requires_grad


def _moved(made: set[Any], call: Call, out: Tensor) -> set[Any]:
    """Where the channels of a map are after a call."""
    if call.name == "permute" and made == {FIRST}:
        dims = call.args[1:] or (call.kwargs["dims"],)
        dims = tuple(dims[0]) if isinstance(dims[0], (tuple, list)) else dims
        return {LAST} if tuple(dim % 4 for dim in dims) == (0, 2, 3, 1) else set()
    return made if out.ndim == 4 and not any(word in call.name for word in SHAPES) else set()


def _shape_of(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of what is made of tensors of these, element by element."""
    made = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, size in enumerate(reversed(shape), 1):
            made[-i] = max(made[-i], size) if size else 0
    return tuple(made)


def _spread(differs: Tensor, dim: int) -> int:
    """At how many indices of a dimension anything differs."""
    others = [other for other in range(-differs.ndim, 0) if other != dim]
    return int((differs.any(others) if others else differs).sum())


def _shape_of_sum(name: str, first: Any, others: Sequence[Tensor]) -> tuple[int, ...]:
    a, b = others[:2]
    made = _shape_of(a.shape, b.shape) if name.startswith("addc") else (*a.shape[:-1], *b.shape[-1:])
    return _shape_of(made, first.shape) if isinstance(first, Tensor) else tuple(made)
