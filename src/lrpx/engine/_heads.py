"""Attention heads, followed from the weights they read with to what they write into the residual stream.

Under a recipe that cuts every branch of a layer off (``recipes.ALTI_LOGIT``) the graph holds the residual stream alone,
and what a layer adds to it are constants. This part sees the torch functions that make these constants: softmax
attention, its output projection, norms and factors after that, the sum with the stream. Tensors carry a mark on the
way, so no class of model needs to be known.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from lrpx import rules
from lrpx._modules import layer_of
from lrpx.engine._graph import LEAF, descends
from lrpx.engine._stream import Attention, Norm, Part, Write
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import arguments, carries, spelled
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.engine._taps import Call, Running

Result = TypeVar("Result")
MARK = "_lrpx_heads"
WEIGHTS = "attention weights"
FILLED = frozenset(("mul", "where", "masked_fill", "masked_fill_"))
"""Operations that leave attention weights what they are, beside those whose gate moves or stays: they mask."""
LOST = "made of what attention has written"
"""The mark of what is made of an output projection's result by an operation that is not followed."""
PRODUCTS = ("matmul", "dot", "einsum", "tensordot", "bilinear")
"""Products with weights of any shape, such as those of all experts at once: only a matrix is a linear layer."""


class Heads(Tap):
    """Follows the attention heads of one run.

    ``writes`` are in the order of the forward pass; ``beginning`` is the stream before the first, in the graph.
    """

    def __init__(self) -> None:
        self._run: Running
        self._attentions: list[Attention] = []
        self.writes: list[Write] = []
        self.beginning: Tensor | None = None
        self._tokens: Tensor | None = None
        """The embeddings, until it was looked whether each is at its own place in the stream."""
        self._end: Tensor | None = None
        """The stream after the newest sum, until the same was looked."""
        self._newest: Any = None
        """The node of the graph that made the newest sum, which the next is to begin with."""
        self._skipped_to: str | None = None
        """The first layer with a sum that does not."""

    def begin(self, run: Running) -> None:
        """The run whose heads are followed."""
        self._run = weakref.proxy(run)  # which holds this: no circle, so that memory is given back at once

    def leaves(self) -> list[Tensor]:
        """What each layer adds to the stream, and the stream before the first."""
        return [write.leaf for write in self.writes] + ([] if self.beginning is None else [self.beginning])

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, T)``."""
        batch, length = self._run.sources[0].value.shape[:2]
        return batch, length

    def check(self) -> None:
        """Refuse a model in which the way of some attention to the residual stream was not found.

        Raises:
            MethodError: says where and why.
        """
        why = ", so its prediction cannot be followed along a residual stream; use attnlrp or lrp"
        if not self._attentions:
            raise MethodError(
                "found no softmax attention over the tokens of its input, with weights [rows, heads, queries, keys], "
                f"in the model{why}"
            )
        reached = {id(part.attention) for write in self.writes for part in write.reads}
        lost = next((each for each in self._attentions if id(each) not in reached), None)
        if lost is not None:
            raise MethodError(
                f"the output of the attention in {lost.path} is not projected and added to a residual stream, or "
                f"something else comes between{why}"
            )
        beside = next((each for each in self._attentions if each.beside), None)
        if beside is not None:
            raise MethodError(
                f"the output of the attention in {beside.path} is projected, and read by {beside.beside}, too, as with "
                "an adapter; merge the adapter into the weights, or use attnlrp or lrp"
            )
        with_attention = {write.layer for write in self.writes if write.reads}
        without = next((write.layer for write in self.writes if write.layer not in with_attention), None)
        if without is not None:
            raise MethodError(f"{without} has no softmax attention, as the layers of hybrid models{why}")
        widths = {write.stream.shape[-1] for write in self.writes}
        if len(widths) > 1:
            raise MethodError(f"the layers write into streams of {len(widths)} widths, not into one{why}")
        for write in [write for write in self.writes if write.reads][:-1]:
            if not write.carried_on and write.norm is None:
                raise MethodError(f"in {write.layer} the sum of attention and residual stream is changed{why}")
        if self._skipped_to is not None:
            raise MethodError(
                f"{self._skipped_to} is given what was made before the layer below it, beside that or in its "
                f"place, as by skips that lead past layers, and there is no single residual stream{why}"
            )
        if self._is_moved():
            raise MethodError(
                "before its first layer or between layers the model puts the tokens into other places, as where it "
                f"moves them one on behind a vector of its own, or mixes them{why}"
            )

    def check_end(self, values: Tensor) -> None:
        """Refuse a model that reads what stands in the stream before the last sum past that; and first what
        :meth:`check` refuses.

        Args:
            values: what is explained, in the graph.

        Raises:
            MethodError: it does.
        """
        self.check()
        if self._is_bypassed(values):
            raise MethodError(
                "what the layers are given, or some of them add, is read past the last of them, too, as by a skip to "
                "the output, so the prediction cannot be followed along a single residual stream; use attnlrp or lrp"
            )

    def _is_moved(self) -> bool:
        """Whether a token's embedding, or what a layer has added to it, is in the stream at other places."""
        tokens, end = self._tokens, self._end
        self._tokens = self._end = None
        if tokens is None or end is None or not tokens.requires_grad:
            return False
        leaves = [each for each in (tokens, *(write.leaf for write in self.writes)) if each.requires_grad]
        return is_moved(end.view(*tokens.shape[:2], -1), leaves)

    # ------------------------------------------------------------------------ operations

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function, and what it does to the marks."""
        name, row, args, kwargs = call.name, call.operation, call.args, call.kwargs
        if not torch.is_grad_enabled():
            return proceed(args, kwargs)

        def run(args: tuple[Any, ...]) -> Any:
            return proceed(args, kwargs)

        operation = name if row is None else row.name
        two = operands_of(args) if operation == "einsum" else args[:2]
        marks = [mark for x in two if (mark := mark_of(x)) is not None]
        marked = next((mark for mark in marks if mark != LOST), marks[0] if marks else None)
        moves = row is not None and row.gate == "moves"
        if operation != "add" and not moves:
            for x in tree_leaves((args, kwargs)):
                if isinstance(mark := mark_of(x), Write):
                    mark.read = True
        if operation == "add" and len(args) == 2 and not kwargs:
            return self._add(name, args, run)
        if operation == "attention":
            out = run(args)
            return self._fused(args, kwargs, out)
        if operation == "softmax":
            return with_mark(run(args), WEIGHTS)
        if operation == "conv1d" and arguments(args, kwargs, "input", "weight")[1].shape[-1] > 1:
            where = self._run.where()
            raise MethodError(
                f"{_layer(where) or where} mixes positions by {name}, besides attention; use attnlrp or lrp"
            )
        if operation in PRODUCTS and self._run.recipe.linear is rules.constant:
            args = tuple(x.detach() if carries(x) else x for x in args)
        out = run(args)
        if marked in (None, LOST) or not isinstance(out, Tensor):
            is_lost = any(mark_of(x) == LOST or isinstance(mark_of(x), tuple) for x in tree_leaves((args, kwargs)))
            return _lost(out) if is_lost else out
        if marked == WEIGHTS:
            if (read := reading(call, lambda mark: mark == WEIGHTS)) is not None:
                return self._eager(read, out)
            stays = moves or operation in FILLED or (row is not None and row.gate == "stays")
            return with_mark(out, WEIGHTS) if stays else out
        if moves:
            same = isinstance(marked, Attention) or out.shape[-1] == args[0].shape[-1]
            return with_mark(out, marked) if same else _lost(out) if isinstance(marked, tuple) else out
        if isinstance(marked, Attention):
            return self._projected(marked, operation, args, kwargs, out)
        if operation in ("layer_norm", "rms_norm"):
            return self._normed(marked, operation, args, kwargs, out)
        if isinstance(marked, tuple) and operation in ("mul", "div") and len(args) == 2:
            return self._scaled(marked, operation, args, out)
        return _lost(out) if isinstance(marked, tuple) else out

    def _fused(self, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        q, k, v, mask, _, causal, scale, _ = arguments(args, kwargs, *names)
        if q.ndim != 4 or q.shape[2] != k.shape[2]:
            return out
        q, k, v = q.detach(), k.detach(), v.detach()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        wide = torch.promote_types(q.dtype, torch.float32)

        def weights(rows: Tensor) -> Tensor:
            chosen: Tensor = torch.take_along_dim(q, rows[:, None, :, None], 2).to(wide)
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores: Tensor = chosen @ keys.to(wide).transpose(-1, -2) * scale
            if mask is not None:
                full = mask[(None,) * (4 - mask.ndim)].expand(len(q), -1, q.shape[2], -1)
                admitted = torch.take_along_dim(full, rows[:, None, :, None], 2)
                scores = scores.masked_fill(~admitted, -torch.inf) if mask.dtype is torch.bool else scores + admitted
            if causal:
                later = torch.arange(k.shape[2], device=q.device) > rows[:, :, None]
                scores = scores.masked_fill(later[:, None], -torch.inf)
            return scores.softmax(-1).nan_to_num(0.0)

        return self._attends(Attention(self._run.where(), weights, v, out.detach()), out)

    def _eager(self, read: Reading, out: Tensor) -> Tensor:
        batch, length = self.shape
        weights, values = read.weights, read.values
        if weights.shape[-2:] != (length, length) or values.shape[-2] != length or weights.ndim not in (3, 4):
            return out
        product = out.permute(read.order) if read.order else out
        four = [x.detach().reshape(batch, -1, *x.shape[-2:]) for x in (weights, values, product)]
        all_rows = four[0].to(torch.promote_types(out.dtype, torch.float32))

        def at(rows: Tensor) -> Tensor:
            return torch.take_along_dim(all_rows, rows[:, None, :, None], 2)

        return self._attends(Attention(self._run.where(), at, four[1], four[2]), out)

    def _attends(self, attention: Attention, out: Tensor) -> Tensor:
        if not self._run.replaying:
            self._attentions.append(attention)
        return with_mark(out, attention)

    def _projected(self, attention: Attention, name: str, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        """The output projection: of the heads side by side, and of nothing else."""
        if name == "linear":
            x, weight, bias = arguments(args, kwargs, "input", "weight", "bias")
            weight = rules.dequantised(weight.detach()).T
        elif name == "addmm" and not kwargs:
            bias, x, weight = args
        elif name == "matmul" and args[1].ndim == 2:  # a matrix without a batch is a weight, perhaps transposed
            x, weight = args
            bias = None
        else:
            if out.is_floating_point():
                attention.beside = attention.beside or f"{name} in {self._run.where()}"
            return out
        if attention.output is None:
            raise MethodError(
                f"the output of the attention in {attention.path} is projected twice, as with an adapter; merge the "
                "adapter into the weights, or use attnlrp or lrp"
            )
        heads = attention.output.transpose(1, 2)
        if x.numel() != heads.numel() or not self._is_stream(out) or not torch.equal(x.reshape(heads.shape), heads):
            return out
        wide = torch.promote_types(out.dtype, torch.float32)
        attention.projection = weight.detach().to(wide).reshape(*heads.shape[2:], -1)
        attention.output = None
        value = out.detach().to(wide).reshape(*self.shape, -1)
        if bias is None:
            return with_mark(out, (Part("attention", attention.path, value, attention),))
        bias = bias.detach().to(wide)
        names = Part("biases", f"{self._run.where()}.bias", bias)
        return with_mark(out, (Part("attention", attention.path, value - bias, attention), names))

    def _scaled(self, parts: tuple[Part, ...], name: str, args: Any, out: Tensor) -> Tensor:
        """The parts times a constant: a number, a vector, or a number for each position."""
        factor = args[1] if mark_of(args[0]) is parts else args[0]
        if mark_of(factor) not in (None, LOST) or carries(out) or (name == "div" and factor is args[0]):
            return _lost(out)
        if isinstance(factor, Tensor):
            factor = factor.detach()
        factor = 1 / factor if name == "div" else factor
        width = out.shape[-1]
        if isinstance(factor, Tensor) and factor.numel() > 1 and factor.shape[-1] == 1:
            rows = factor.expand(*out.shape[:-1], 1).reshape(*self.shape, 1)
            return with_mark(out, tuple(part.scaled(rows, ()) for part in parts))
        if not isinstance(factor, Tensor) or factor.numel() in (1, width):
            factor = factor.reshape(-1) if isinstance(factor, Tensor) else factor
            return with_mark(out, tuple(part.scaled(None, (lambda x: x * factor,)) for part in parts))
        return _lost(out)

    def _normed(self, marked: tuple[Part, ...] | Write, name: str, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        """A norm of what will be written, or of the stream after it."""
        has_bias = ("bias",) if name == "layer_norm" else ()
        found = arguments(args, kwargs, "input", "normalized_shape", "weight", *has_bias, "eps")
        x, weight, bias, eps = found[0], found[2], found[3] if has_bias else None, found[-1]
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32)).reshape(*self.shape, -1)
        centred = wide - wide.mean(-1, keepdim=True) if name == "layer_norm" else wide
        smallest = 1e-5 if name == "layer_norm" else torch.finfo(wide.dtype).eps
        rows = torch.rsqrt(centred.square().mean(-1, keepdim=True) + (smallest if eps is None else eps))
        fixed: tuple[Callable[[Tensor], Tensor], ...] = ()
        if name == "layer_norm":
            fixed += (lambda u: u - u.mean(-1, keepdim=True),)
        if weight is not None:
            scale = weight.detach().to(wide.dtype)
            fixed += (lambda u: u * scale,)
        where = self._run.where()
        if isinstance(marked, Write):
            if _layer(where) == marked.layer:
                marked.norm = Norm(rows, fixed, out.detach().reshape(wide.shape))
            return out
        parts = [part.scaled(rows, fixed) for part in marked]
        if bias is not None:
            parts.append(Part("biases", f"{where}.bias", bias.detach().to(wide.dtype)))
        return with_mark(out, tuple(parts))

    def _add(self, name: str, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        marks = [mark_of(x) for x in args]
        for mark in marks:
            if isinstance(mark, Write):
                mark.carried_on = True
        if not all(isinstance(x, Tensor) for x in args):
            return run(args)
        carrying = [carries(x) and not isinstance(x, Parameter) for x in args]
        in_place = name in ("add_", "__iadd__")
        if not any(carrying):
            written = [part for mark in marks if isinstance(mark, tuple) for part in mark]
            if not written:
                return _lost(run(args)) if LOST in marks else run(args)
            for part in written if LOST in marks else ():
                if part.attention is not None:
                    part.attention.beside = part.attention.beside or f"{name} in {self._run.where()}"
            parts = (*self._parts(args[0], marks[0], in_place), *self._parts(args[1], marks[1], False))
            return with_mark(run(args), parts)
        if args[0].numel() != args[1].numel() or not self._is_stream(args[0]):
            self._refuse_other_places(args, carrying)
            return run(args)
        if all(carrying):
            if layer := _layer(self._run.where()):
                raise MethodError(
                    f"{layer} adds up two tensors that both are linear in its input, so there is no single residual "
                    "stream, as where layers have several or experts hand on what they are given; use attnlrp or lrp"
                )
            return run(args)
        stream, constant = args if carrying[0] else args[::-1]
        mark = mark_of(constant)
        layer = _layer(self._run.where())
        if layer is None or isinstance(constant, Parameter):
            return run(args)
        if self.writes and self._skipped_to is None and not self._run.replaying and self._is_bypassed(stream):
            self._skipped_to = layer
        overwritten = in_place and constant is args[0]
        leaf = (constant.detach().clone() if overwritten else constant.detach()).requires_grad_()
        before = stream.detach().clone() if in_place else stream.detach()
        shape = (*self.shape, stream.shape[-1])
        last = mark_of(stream)
        joins = last in self.writes[-1:] and last.layer == layer and not last.read
        write = Write(layer, self._parts(constant, mark, overwritten), leaf, before.reshape(shape), joins=joins)
        if not self._run.replaying:
            self.writes.append(write)
            if self.beginning is None:
                self.beginning, self._tokens = stream, self._run.sources[0].value
        if overwritten:
            out = constant.copy_(run((leaf.clone(), stream)))
        else:
            out = run((stream, leaf) if carrying[0] else (leaf, stream))
        if not self._run.replaying:
            self._newest, self._end = out.grad_fn, out
        return with_mark(out, write)

    def _refuse_other_places(self, args: tuple[Any, ...], carrying: list[bool]) -> None:
        """Refuse a layer that adds to vectors made of the tokens that are not one for each.

        Raises:
            MethodError: names it.
        """
        batch, length = self.shape
        stream, layer = args[carrying.index(True)], _layer(self._run.where())
        is_other = args[0].shape == args[1].shape and stream.ndim == 3 and stream.shape[1] != length
        if layer is None or all(carrying) or not is_other or len(stream) != batch:
            return
        tokens = {id(source.value) for source in self._run.sources if source.ids is not None}
        if descends(stream.grad_fn, tokens):
            raise MethodError(
                f"{layer} adds to {stream.shape[1]} vectors made of the {length} tokens, such as patches of them, so "
                "its prediction cannot be followed along one residual stream of the tokens; use attnlrp or lrp"
            )

    def _is_bypassed(self, stream: Tensor) -> bool:
        """Whether a way of the graph leads from the stream to the tokens or to what a layer has added, and not by the
        newest sum. One to positions alone is none: they may be added in every layer."""
        leaves = {id(write.leaf) for write in self.writes} | {id(self._run.sources[0].value)}
        seen: set[Any] = {self._newest, None}
        waiting: list[Any] = [stream.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() == LEAF and id(node.variable) in leaves:
                return True
            waiting += [child for child, _ in node.next_functions]
        return False

    def _is_stream(self, x: Tensor) -> bool:
        """Whether a tensor is ``[B, T, d]`` or ``[B·T, d]``."""
        batch, length = self.shape
        return x.shape[:-1] in ((batch, length), (batch * length,))

    def _parts(self, x: Tensor, mark: Any, overwritten: bool) -> tuple[Part, ...]:
        """What a constant is made of: the marked parts, else the output of a feed-forward part, or a bias."""
        if isinstance(mark, tuple):
            return tuple(replace(part, value=part.value.clone()) for part in mark) if overwritten else mark
        value = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        value = value.clone() if overwritten else value
        if x.ndim == 1:
            return (Part("biases", f"add in {self._run.where()}", value),)
        return (Part("MLPs", self._run.where(), value.reshape(*self.shape, -1)),)


def is_moved(made: Tensor, tokens: Sequence[Tensor]) -> bool:
    """Whether what was made of vectors of tokens, each ``[B, T, d]`` or ``[B · T, d]``, is at other places or at more:
    ``made`` ``[…, T, d]``. Two places differ in some bit of their numbers, so a pass from each half tells."""
    length = made.shape[-2]
    place = torch.arange(length, device=made.device)
    for half in [(place >> bit) % 2 == side for bit in range((length - 1).bit_length()) for side in (0, 1)]:
        seed = torch.zeros_like(made)
        seed[..., half, :] = torch.linspace(0.5, 1.5, made.shape[-1], device=made.device, dtype=made.dtype)
        for found in torch.autograd.grad(made, tokens, seed, retain_graph=True, allow_unused=True):
            if found is not None and found.nan_to_num().reshape(-1, length, found.shape[-1])[:, ~half].any():
                return True
    return False


class Reading(NamedTuple):
    """Values that are multiplied by attention weights, in one matrix product or ``einsum``.

    Args:
        weights, values: ``[…, Q, K]`` and ``[…, K, d]``.
        order: how what the call gives is permuted to be their product ``[…, Q, d]``; none where it is.
        given: the call's arguments with others in the place of the weights.
    """

    weights: Tensor
    values: Tensor
    order: tuple[int, ...]
    given: Callable[[Tensor], tuple[Any, ...]]


def operands_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """What an ``einsum`` multiplies."""
    is_listed = len(args) == 2 and isinstance(args[1], (list, tuple))
    return tuple(args[1] if is_listed else args[1:])


def reading(call: Call, are_weights: Callable[[Any], bool]) -> Reading | None:
    """What a call reads with attention weights, known by their mark; None where it reads nothing, or in no such order:
    keys are the last index of the weights, queries the one before."""
    name, args = call.name if call.operation is None else call.operation.name, call.args
    if name == "matmul":
        if len(args) != 2 or not are_weights(mark_of(args[0])):
            return None
        return Reading(*args, (), lambda weights: (weights, args[1]))
    two = operands_of(args) if name == "einsum" else ()
    if len(two) != 2 or not all(isinstance(x, Tensor) for x in two):
        return None
    at = 0 if are_weights(mark_of(two[0])) else 1
    if not are_weights(mark_of(two[at])):
        return None
    labels, result = spelled(args[0], two).split("->")
    of_weights, of_values = labels.split(",")[:: 1 if at == 0 else -1]
    *rows, query, key = list(of_weights)
    features = [each for each in of_values if each not in of_weights]
    wanted = [*rows, query, *features]
    if len(features) != 1 or key not in of_values or query in of_values or sorted(wanted) != sorted(result):
        return None
    weights, values = two[at], two[1 - at]
    values = values.permute([of_values.index(each) for each in (*rows, key, *features) if each in of_values])
    values = values[tuple(slice(None) if each in of_values else None for each in (*rows, key, *features))]
    order = tuple(result.index(each) for each in wanted)
    order = () if order == tuple(range(len(order))) else order
    return Reading(weights, values, order, lambda new: (args[0], *((new, two[1]) if at == 0 else (two[0], new))))


def _layer(path: str) -> str | None:
    layer = layer_of(path)
    return None if layer is None else layer.path


def _lost(out: Result) -> Result:
    """What was made of an output projection's result in a way that is not followed, marked so."""
    for each in tree_leaves(out):
        if isinstance(each, Tensor):
            with_mark(each, LOST)
    return out


def mark_of(x: Any) -> Any:
    """The mark of a tensor that was not changed in place since, as a whole or through a view."""
    mark, version = vars(x).get(MARK, (None, 0)) if isinstance(x, Tensor) else (None, 0)
    return mark if mark is None or x._version == version else None


def with_mark(x: Tensor, mark: Any) -> Tensor:
    setattr(x, MARK, (mark, x._version))
    return x
