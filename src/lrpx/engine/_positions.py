"""Positions, where a model uses them: known by what they are computed from, and made leaves of the graph.

A transformer knows the order of its tokens by constants: what is looked up or computed from the numbers of the places
(learned and sinusoidal embeddings, rotary angles, ALiBi, relative biases), or a table with a row for each place. Where
one of them meets what depends on the input, it becomes a leaf, so that it has relevance of its own, place by place and
layer by layer (Bakish et al. 2025). No module's name is asked for:

- *What is computed from places* is told by a second computation. Numbers of places are what ``arange`` or ``cumsum`` of
  whole numbers gives, whole numbers that the model has kept, and its arguments of that name. Each has a *shadow*: the
  same, with another place in its middle. What is made of it is made of its shadow too, and where the two differ is
  where that place counts: along the axis of the tokens, and at one index of it. What comparisons give is a mask, and
  what is made of masks alone is none.
- *A table* is a parameter, a buffer or another tensor of the model itself with a row for each token of a sequence that
  it is added to or multiplied with.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from lrpx import rules
from lrpx._kinds import rule_name
from lrpx._modules import layer_of
from lrpx.engine._book import Line, relevance, storage_of
from lrpx.engine._factors import CONSTANT
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import any_carries, arguments, is_in_place
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine._places import Source
    from lrpx.engine._taps import Call

OF_NO_TOKENS = ("grid", "size", "length", "index", "indices")
"""What is in the name of an argument of whole numbers whose last dimension is none of tokens."""
INPUT = "input"
"""What the positions are called that meet the input outside of every layer."""

NUMBERING = ("arange", "linspace", "range", "cumsum")
"""Functions that number places, of nothing or of whole numbers."""
SUMS = frozenset(
    "add __add__ __radd__ add_ __iadd__ sub subtract __sub__ __rsub__ rsub sub_ __isub__ subtract_".split()
)
BESIDE = frozenset("cat concat concatenate stack hstack vstack dstack".split())
ADDING = frozenset("addmm baddbmm addbmm addmv addr addcmul addcdiv addmm_ baddbmm_ addbmm_ addmv_ addr_".split())
"""Functions that add their first argument to a product of the others; all but the last two, scores to a bias."""
CHOOSING = ("gather", "take_along_dim")
ATTENTION = "scaled_dot_product_attention"
PRODUCTS = ("product", "linear", "convolution", "matmul")
DIVISIONS = frozenset("div divide true_divide __truediv__ div_ divide_ __itruediv__".split())


@dataclass(frozen=True)
class Sink:
    """A place where positions meet what depends on the input, and the leaf that keeps their relevance.

    Args:
        line: what the ledger calls it: its name is the layer's path, or ``"input"``.
        leaf: the positions as a leaf, one for each row.
        source: the tokens whose positions they are; None where the model has none, as one of images.
        rows: how many rows the leaf's first dimension is, one after another; None where it is no dimension of rows.
        tokens: which dimension is that of the tokens, counted from the end; None where there is one token.
        is_of_keys: whether it is added to the scores of attention, for every query the same. Then nothing but the
            differences between keys counts, and the first is where they are counted from: a model may count from the
            last (MPT), which is another in a padded row.
    """

    line: Line
    leaf: Tensor
    source: Source | None
    rows: int | None
    tokens: int | None
    is_of_keys: bool = False

    def relevance(self, gradient: Tensor | None) -> Tensor:
        """``[B, n]``: the relevance of each place in each row."""
        value = self.leaf.detach()
        value = value - value[..., :1] if self.is_of_keys else value
        found = relevance(value, torch.zeros_like(self.leaf) if gradient is None else gradient)
        if self.leaf.is_complex():  # real and imaginary parts are the last dimension
            found = found.sum(-1)
        found = found if self.rows is not None else found.unsqueeze(0)
        if self.tokens is None:
            found = found.flatten(1).sum(1, keepdim=True)
        else:
            found = found.movedim(self.tokens, 1)
            found = found.flatten(2).sum(2) if found.ndim > 2 else found
        return found.reshape(self.rows or 1, -1, found.shape[-1]).sum(1)


class Kept(NamedTuple):
    """What the positions of one layer have.

    Args:
        layer: its path, or ``"input"``.
        source: the tokens whose positions they are; None where the model has none.
        relevance: ``[B, n]``.
    """

    layer: str
    source: Source | None
    relevance: Tensor


class _Mark(NamedTuple):
    """That a tensor was made of the numbers of places.

    Args:
        shadow: the same of other numbers; None where it cannot be computed.
        is_single: whether there is one place only.
        is_mask: whether it was made of comparisons of them alone, and so says what is admitted, or on which side.
    """

    shadow: Any
    is_single: bool = False
    is_mask: bool = False


class _Axis(NamedTuple):
    """Which dimension of positions, counted from their end, is that of the places; None where there is one place."""

    dim: int | None


class Positions(Tap):
    """Makes positions leaves, and collects them.

    Args:
        model: whose buffers and parameters may be tables of positions.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._run: Any = None
        self._marks: Any = WeakTensorKeyDictionary()
        self._seen: Any = WeakTensorKeyDictionary()  # whole numbers that the run was given, or has made
        self._own: Any = WeakTensorKeyDictionary()  # those that the model has kept
        self._tables: frozenset[int] | None = None
        self._made: Any = WeakTensorKeyDictionary()  # what was made of the model's own tensors
        self._lengths: set[int] = set()
        self.sinks: list[Sink] = []

    def begin(self, run: Any) -> None:
        """The block begins."""
        self._run = weakref.proxy(run)
        run.positions = self

    def leaves(self) -> list[Tensor]:
        """The positions, where they meet what depends on the input."""
        return [sink.leaf for sink in self.sinks]

    def lines(self) -> list[tuple[Line, Tensor]]:
        """What a ledger has of each."""
        return [(sink.line, sink.leaf) for sink in self.sinks]

    def kept(self, gradients: Mapping[int, Tensor]) -> list[Kept]:
        """The relevance of the positions of each layer, in the order of the forward pass.

        Args:
            gradients: of each leaf, by its ``id``.
        """
        found: dict[tuple[str, int], Kept] = {}
        for sink in self.sinks:
            key = sink.line.name, id(sink.source)
            mine = sink.relevance(gradients.get(id(sink.leaf)))
            before = found.get(key)
            found[key] = Kept(sink.line.name, sink.source, mine if before is None else before.relevance + mine)
        return list(found.values())

    # -------------------------------------------------------- what is computed from places

    def given(self, name: str, value: Tensor) -> None:
        """An argument of the model that is of whole numbers: the tokens, or the numbers of their places."""
        if "position" in name and value.ndim:
            self._number(value)
            return
        self._seen[value] = True
        if "ids" in name or "mask" in name or (value.ndim <= 2 and not any(word in name for word in OF_NO_TOKENS)):
            self._lengths.update(value.shape[-1:])

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """A call of constants is followed by its shadow's; one of what depends on the input has leaves for constants
        that are positions."""
        args, kwargs = call.args, call.kwargs
        row = call.operation
        takes_shape = (
            row is not None and not row.has_summands and row.kind == "plain" and args and not any_carries(args[0])
        )
        if takes_shape or not any_carries((*args, *kwargs.values())):
            return self._of_constants(call, proceed)
        if call.name != "__get__" and torch.is_grad_enabled():
            args, kwargs = self._met(call)
        out = proceed(args, kwargs)
        self._see(out)
        return self._chosen(call, out) if call.name in CHOOSING else out

    def _follow(self, out: Any, made_of: Any) -> None:
        """What is cast, scaled or put together of a table is one."""
        if any(self._is_of_model(each) for each, _ in _pairs(list(made_of), None) if _is_constant(each)):
            for made, _ in _pairs(out, None):
                if made.is_floating_point() or made.is_complex():
                    self._made[made] = True

    def _is_of_model(self, c: Tensor) -> bool:
        """Whether the numbers of a constant are the model's own, or were made of them."""
        base = c if c._base is None else c._base
        return storage_of(c) in self._memory() or c in self._made or base in self._made

    def _see(self, out: Any) -> None:
        """Whole numbers that the run has made are no numbers of places that the model has kept."""
        for made, _ in _pairs(out, None):
            if made.dtype is torch.int64:
                self._seen[made] = True

    def _of_constants(self, call: Call, proceed: Callable[..., Any]) -> Any:
        args, kwargs = call.args, call.kwargs
        marks = list(self._marks_in((*args, *kwargs.values())))
        if not marks:
            out = proceed(args, kwargs)
            self._see(out)
            self._follow(out, (*args, *kwargs.values()))
            if call.name in NUMBERING and isinstance(out, Tensor) and out.ndim and self._numbers_places(call, out):
                self._number(out)
            return out
        writes = is_in_place(call.name) and isinstance(args[0], Tensor)
        written = self._before_writing(args[0]) if writes else []
        shadow, is_known = None, all(mark.shadow is not None for mark in (*marks, *(mark for _, mark in written)))
        with torch.no_grad():  # a look-up by the numbers of places is no source of the input
            if is_known:
                first = [mark.shadow for _, mark in written[:1]]
                named = {name: self._shadow(value) for name, value in kwargs.items()}
                try:
                    with torch.random.fork_rng(devices=(), enabled="dropout" in call.name):
                        shadow = proceed((*first, *map(self._shadow, args[len(first) :])), named)
                except (IndexError, RuntimeError):  # the numbers of other places lead out of a table
                    is_known = False
            out = proceed(args, kwargs)
        is_single, is_mask = all(mark.is_single for mark in marks), all(mark.is_mask for mark in marks)
        for made, other in _pairs(out, shadow):
            if not (writes and made is args[0]) and not self._is_part_of_numbers(made, args):
                fits = isinstance(other, Tensor) and other.shape == made.shape
                self._marks[made] = _Mark(other if fits else None, is_single, is_mask or made.dtype is torch.bool)
        for value, mark in written:
            self._marks[value] = _Mark(mark.shadow if is_known else None, is_single, is_mask and mark.is_mask)
        return out

    def _marks_in(self, value: Any) -> Iterator[_Mark]:
        if isinstance(value, (tuple, list)):
            for each in value:
                yield from self._marks_in(each)
        elif isinstance(value, Tensor) and (mark := self._mark_of(value)) is not None:
            yield mark

    def _mark_of(self, value: Tensor) -> _Mark | None:
        mark: _Mark | None = self._marks.get(value)
        if mark is None and value.dtype is torch.int64 and value.ndim and value not in self._seen:
            if bool((value != value.flatten()[:1]).any()) or value.shape[-1] == 1 in self._lengths:
                self._own[value] = True
                mark = self._number(value)
            else:
                self._seen[value] = True
        return mark

    def _shadow(self, value: Any) -> Any:
        """The shadow of a tensor that has one; any other value as it is."""
        if isinstance(value, (tuple, list)):
            made = [self._shadow(each) for each in value]
            return type(value)(made) if type(value) in (tuple, list) else value
        mark = self._mark_of(value) if isinstance(value, Tensor) else None
        return value if mark is None else mark.shadow

    def _number(self, value: Tensor) -> _Mark:
        """Mark the numbers of places, along the last dimension; their shadow has another place in its middle."""
        shadow, length = value.clone(), value.shape[-1]
        known = max(self._lengths, default=length)
        for place in {length // 2} if length <= known else {known // 2, length - known + known // 2}:
            differs = (value != value[..., place : place + 1]).reshape(-1, length).sum(0)
            shadow[..., place] = value[..., int(differs.argmax())]
        mark = _Mark(shadow, length == 1)
        self._marks[value] = mark
        return mark

    def _numbers_places(self, call: Call, out: Tensor) -> bool:
        """Whether what ``arange`` or ``cumsum`` gives may number places: there are as many as tokens, or more; where
        the model is given no tokens, any number."""
        if call.name == "cumsum":
            counted = call.args[0]
            return isinstance(counted, Tensor) and bool((counted == counted.long()).all())
        if not self._lengths or out.shape[0] in self._lengths:
            return True
        return out.shape[0] > max(self._lengths) and bool((out[1] - out[0]).abs() == 1)

    def _is_part_of_numbers(self, made: Tensor, made_of: Sequence[Any]) -> bool:
        """Whether it is a part of whole numbers of the model itself, which number places by themselves where it is
        used."""
        whole = made_of[0] if made_of else None
        if not isinstance(whole, Tensor) or whole not in self._own or made._base is None:
            return False
        return made._base is (whole if whole._base is None else whole._base) and made.numel() < whole.numel()

    def _before_writing(self, value: Tensor) -> list[tuple[Tensor, _Mark]]:
        """A constant that will be written into, with its mark; and its base, if it is a view, with its own: the shadow
        of a view is a view of its base's shadow."""
        base = value if value._base is None else value._base
        mark = self._marks.get(base) or _Mark(base.detach().clone(), is_mask=True)
        if base is value or mark.shadow is None:
            return [(value, mark)]
        shadow = mark.shadow.as_strided(value.size(), value.stride(), value.storage_offset())
        return [(value, mark._replace(shadow=shadow)), (base, mark)]

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
            added = self._added(mask, (*q.shape[:-1], k.shape[-2]), q.dtype, is_scores=True)
            if added is mask:
                return args, kwargs
            return ((*args[:3], added, *args[4:]), kwargs) if len(args) > 3 else (args, kwargs | {"attn_mask": added})
        if name in ADDING and args:
            factors = [each for each in (*args[1:], *kwargs.values()) if _is_tensor(each)]
            # of a constant and what depends on the input it is a layer, and its bias
            is_scores = not name.startswith("addc") and all(map(any_carries, factors))
            shape = _shape_of_sum(name, args[0], factors)
            dtype = next(each.dtype for each in (*args, *kwargs.values()) if any_carries(each))
            return (self._added(args[0], shape, dtype, is_scores=is_scores), *args[1:]), kwargs
        if name in BESIDE and args and type(args[0]) in (tuple, list):
            dtype = next((each.dtype for each in args[0] if any_carries(each)), torch.get_default_dtype())
            return ([self._added(each, each.shape, dtype) for each in args[0]], *args[1:]), kwargs
        if call.operation is not None and (call.operation.kind in PRODUCTS or name in DIVISIONS):
            return args, kwargs  # products ask by themselves; a divisor is a normaliser
        for each in (*args, *kwargs.values()):
            if _is_tensor(each) and each.is_floating_point() and not any_carries(each) and self._varies(each):
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
        if self._run.recipe.position is rules.signal_take_all or not any_carries(x) or not self._varies(index):
            return out
        if dim % x.ndim != x.ndim - 1 or out.shape[-1] not in self._lengths:
            return out
        ones = out.new_ones(*(1,) * (out.ndim - 1), out.shape[-1])
        return self._run.apply(  # type: ignore[no-any-return]
            "position",
            lambda position, signal: signal * position,
            self._sink(ones, out.shape, out.dtype, _Axis(-1)),
            out,
        )

    def _varies(self, constant: Tensor) -> bool:
        mark = self._marks.get(constant)
        if mark is None or mark.is_mask:
            return False
        return mark.is_single or mark.shadow is None or not torch.equal(constant, mark.shadow)

    def _summed(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = list(call.args), dict(call.kwargs)
        given = [each for each in (*args, *kwargs.values()) if _is_tensor(each)]
        if len(given) < 2 or all(map(any_carries, given)):
            return call.args, call.kwargs
        shape = _shape_of(*(each.shape for each in given))
        dtype = next(each.dtype for each in given if any_carries(each))
        for at, value in enumerate(args):
            if _is_constant(value) and not (at == 0 and is_in_place(call.name)):
                args[at] = self._added(value, shape, dtype)
            elif _is_constant(value) and (axis := self._axis(value, shape)) is not None:
                # what is written into becomes what depends on the input
                value.copy_(self._sink(value.clone(), shape, dtype, axis, is_scores=len(shape) == 4))
        kwargs |= {key: self._added(value, shape, dtype) for key, value in kwargs.items() if _is_constant(value)}
        return tuple(args), kwargs

    def _added(self, value: Any, shape: Sequence[int], dtype: torch.dtype, *, is_scores: bool = False) -> Any:
        """A constant that is added to what has this shape and dtype: as a leaf, if it is positions."""
        axis = self._axis(value, shape, is_scores=is_scores) if _is_constant(value) else None
        is_scores |= len(shape) == 4
        return value if axis is None else self._sink(value, shape, dtype, axis, is_scores=is_scores)

    def product(self, func: Callable[..., Any], a: Any, b: Any) -> Any:
        """``func(a, b)`` under the recipe's rule for positions, if one depends on the input and the other is positions,
        and the rule gives them some; else None."""
        constant, x = (b, a) if any_carries(a) else (a, b)
        if self._run.recipe.position is rules.signal_take_all or not _is_tensor(constant):
            return None
        shape = _shape_of(constant.shape, x.shape)
        axis = self._axis(constant, shape)
        if axis is None:
            return None
        leaf = self._sink(constant, shape, x.dtype, axis)
        op = func if constant is a else lambda position, signal: func(signal, position)
        return self._run.apply("position", op, leaf, x)

    def refuse_product(self, a: Any, b: Any) -> None:
        """Refuse a matrix product with positions, which are then distances and no token's.

        Raises:
            MethodError: one depends on the input, and the other is positions, under a rule that gives them some.
        """
        constant = b if any_carries(a) else a
        if self._run.recipe.position is not rules.signal_take_all and _is_tensor(constant) and self._varies(constant):
            raise self._refusal("positions are a factor of a matrix product, whose rows are no tokens'")

    def _sink(
        self, value: Tensor, shape: Sequence[int], dtype: torch.dtype, axis: _Axis, *, is_scores: bool = False
    ) -> Tensor:
        """Positions as a leaf, with one for each row of the batch; ``is_scores``: added to the scores of attention."""
        run = self._run
        value = value.detach() if value.is_floating_point() or value.is_complex() else value.to(dtype)
        of_tokens = [each for each in run.sources if each.ids is not None]
        count = 1 if axis.dim is None else value.shape[axis.dim]
        source = next((each for each in reversed(of_tokens) if each.ids.shape[-1] == count), None)
        if source is None and of_tokens:
            raise self._refusal(f"it has positions for {count} places, which are none of the tokens")
        rows = self._rows()
        if rows > 1:
            if shape[0] % rows or axis.dim == -len(shape):
                raise self._refusal(f"nothing tells the {rows} rows of the batch apart", "pass batch_size=1, or ")
            value = value.reshape((1,) * (len(shape) - value.ndim) + value.shape)
            value = value.expand(shape[0], *value.shape[1:])
        leaf = value.requires_grad_()
        setattr(leaf, CONSTANT, True)
        if not run.replaying:
            layer = layer_of(run.where())
            line = Line((len(run.sources), len(self.sinks)), "positions", INPUT if layer is None else layer.path)
            is_of_keys = is_scores and axis.dim == -1 and leaf.shape[-1] == shape[-1] and leaf.shape[-2:-1] == (1,)
            self.sinks.append(Sink(line, leaf, source, rows if rows > 1 else None, axis.dim, is_of_keys))
        return leaf

    def _rows(self) -> int:
        """How many rows the batch has: of ids, if the model takes any."""
        sources = self._run.sources
        first = next((each for each in sources if each.ids is not None), sources[0])
        shape = first.value.shape if first.ids is None else first.ids.shape
        return int(shape[0]) if first.ids is None or len(shape) > 1 else 1

    def _axis(self, c: Tensor, shape: Sequence[int], *, is_scores: bool = False) -> _Axis | None:
        """The dimension of the places of a constant; None where it is no positions.

        Args:
            c: the constant.
            shape: of what it makes with what depends on the input.
            is_scores: whether that is known to be the scores of attention. Of the two dimensions of places there, the
                last is the keys', and what is added belongs to the positions of the keys.

        Raises:
            MethodError: nothing tells.
        """
        mark = self._marks.get(c)
        if mark is None:
            return self._axis_of_table(c, shape, is_scores=is_scores)
        if mark.is_mask:
            return None
        if mark.is_single:
            return _Axis(None) if 1 in self._lengths else None
        if mark.shadow is None:
            raise self._refusal(f"nothing tells which dimension of positions of shape {list(c.shape)} is the tokens'")
        differs = c != mark.shadow
        if not bool(differs.any()):
            return None
        if is_scores:
            return _Axis(-1 if c.shape[-1] > 1 else -2)
        is_pair = c.ndim > 1 and c.shape[-1] == shape[-1] > 1 and c.shape[-2] in (1, shape[-2])
        is_pair &= c.shape[-1] in (self._lengths or c.shape)
        if is_pair and len(shape) > 3 and c.shape[-2:] == (2, 2):  # too few to tell
            return _Axis(-1)
        rows = (
            -len(shape) if self._rows() > 1 else 0
        )  # in which some may differ and others not, as where they are padded
        many = {dim: _spread(differs, dim) for dim in range(-c.ndim, 0) if c.shape[dim] > 1 and dim != rows}
        fewest = min(many.values(), default=0)
        found = [dim for dim, count in many.items() if count == fewest < c.shape[dim]]
        if len(found) == 1:
            return _Axis(found[0])
        if is_pair:  # both dimensions differ alike: queries and keys
            return _Axis(-1)
        raise self._refusal(f"nothing tells which dimension of positions of shape {list(c.shape)} is the tokens'")

    def _axis_of_table(self, c: Tensor, shape: Sequence[int], *, is_scores: bool) -> _Axis | None:
        """The same of what was not computed from places: a table of the model with a row for each."""
        if c.ndim < 2 or max(c.shape[:-1]) == 1:  # nearly always
            return None
        wide = [dim for dim in range(-c.ndim, -1) if c.shape[dim] > 1]
        known = [dim for dim in wide if c.shape[dim] in self._lengths and dim > -len(shape)]
        is_whole = len(shape) == 3 and wide == [-2] and c.shape[-2:] == tuple(shape[-2:])
        is_of_input = is_whole and any(each.ids is None for each in self._run.sources)
        is_pair = is_scores or (len(shape) > 3 and c.shape[-2:] == tuple(shape[-2:]) == (c.shape[-1],) * 2)
        if is_pair:
            dim = -1 if c.shape[-1] in (self._lengths or c.shape) else None
        else:
            dim = known[0] if len(known) == 1 else -2 if is_of_input else None
        if dim is None or not self._is_table(c, dim):
            return None
        others = [each for each in range(1 - len(shape), -1) if each != dim and shape[each] == c.shape[dim]]
        is_unclear = any(each < -c.ndim or c.shape[each] == 1 for each in others) and not _is_part(c)
        if not is_pair and (is_unclear or (is_of_input and c.shape[-1] == c.shape[-2])):
            raise self._refusal(f"nothing tells which dimension of a table of shape {list(c.shape)} is the tokens'")
        return _Axis(dim)

    def _is_table(self, c: Tensor, dim: int) -> bool:
        """Whether a constant is numbers of the model itself that differ along a dimension, and no mask."""
        if not (c.is_floating_point() or c.is_complex()) or not self._is_of_model(c):
            return False
        is_mask = not c.is_complex() and bool(((c == c.min()) | (c == c.max())).all())
        return not is_mask and bool((c != c.narrow(dim, 0, 1)).any())

    def _memory(self) -> frozenset[int]:
        """Where the tensors of the model are."""
        if self._tables is None:
            own = [each for module in self._model.modules() for each in vars(module).values() if _is_tensor(each)]
            every = (*self._model.parameters(), *self._model.buffers(), *own)
            self._tables = frozenset(map(storage_of, every)) - {0}
        return self._tables

    def _refusal(self, why: str, mend: str = "") -> MethodError:
        rule = rule_name(self._run.recipe.position)
        return MethodError(
            f"{self._run.where()}: {why}, so the rule position={rule} cannot be applied; {mend}"
            "use attnlrp, for which positions are constants"
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and (isinstance(value, Parameter) or not value.requires_grad)


def _shape_of(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of what is made of tensors of these, element by element."""
    made = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, size in enumerate(reversed(shape), 1):
            made[-i] = max(made[-i], size) if size else 0
    return tuple(made)


def _is_part(c: Tensor) -> bool:
    """Whether a tensor is a part of a larger one, as the first rows of a table of angles are."""
    return c.untyped_storage().nbytes() > c.numel() * c.element_size()


def _spread(differs: Tensor, dim: int) -> int:
    """At how many indices of a dimension anything differs."""
    others = [other for other in range(-differs.ndim, 0) if other != dim]
    return int((differs.any(others) if others else differs).sum())


def _pairs(out: Any, shadow: Any) -> Iterator[tuple[Tensor, Any]]:
    """The tensors of a result, each with that of its shadow's, or None."""
    if isinstance(out, Tensor):
        yield out, shadow
    elif isinstance(out, (tuple, list)):
        others = shadow if isinstance(shadow, (tuple, list)) and len(shadow) == len(out) else [None] * len(out)
        for one, other in zip(out, others, strict=True):
            yield from _pairs(one, other)


def _shape_of_sum(name: str, first: Any, others: Sequence[Tensor]) -> tuple[int, ...]:
    a, b = others[:2]
    made = _shape_of(a.shape, b.shape) if name.startswith("addc") else (*a.shape[:-1], *b.shape[-1:])
    return _shape_of(made, first.shape) if isinstance(first, Tensor) else tuple(made)
