"""The attention weights of a run, whatever kernel computes them: read, with their gradients, or changed.

ALTI-Logit follows what heads write into a residual stream (``_heads.py``) and needs a recipe that leaves nothing else
in the graph. This tap asks for less: which softmax multiplies the values of which tokens. So it serves encoders and
decoders, too, under any recipe, and no class of model needs to be known.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine._attention import NAMES
from lrpx.engine._graph import descends
from lrpx.engine._heads import FILLED, PRODUCTS, Reading, is_moved, mark_of, operands_of, reading, with_mark
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import any_carries, arguments, first, is_parameter
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from lrpx.engine._taps import Call, Running

    Kind = Literal["self", "encoder", "decoder", "cross"]


@dataclass(eq=False)
class Attended:
    """One call of softmax attention.

    Args:
        path: the module that called it.
        kind: ``"self"`` in a model of one stream; else the ``"encoder"``'s, the ``"decoder"``'s, or ``"cross"``.
        raw: the weights as the model has them, in its graph: ``[B, H, Q, K]``, or with the first two as one.
        batch: ``B``.
        values: what they multiply, in the graph.
        given: their product, in the graph; None where that is cut off there.
        order: how the product is permuted to be ``[…, Q, d]``; none where it is.
    """

    path: str
    kind: Kind
    raw: Tensor
    batch: int
    values: Tensor
    given: Tensor | None = None
    order: tuple[int, ...] = ()

    def by_head(self, values: Tensor) -> Tensor:
        """``[B, H, Q, K]`` of what has the shape of ``raw``, in float32 at least."""
        wide = torch.promote_types(values.dtype, torch.float32)
        return values.detach().to(wide).reshape(self.batch, -1, *values.shape[-2:])


@dataclass(eq=False)
class _Softmax:
    """A softmax that may be attention's: what it was taken of, what it gave, whether that is what a linear layer gave,
    as in a router of experts, whether the largest of the scores was taken off before, whether values were multiplied,
    and by weights of other scores, and whether the model computes something else with the weights."""

    path: str
    scores: Tensor
    out: Tensor
    is_routers: bool
    is_lowered: bool = False
    is_read: bool = False
    is_changed: bool = False
    is_elsewhere: bool = False


@dataclass(frozen=True)
class _Linear:
    """What a linear layer gave, and how many outputs that has."""

    width: int


@dataclass(frozen=True)
class _Lowered:
    """Scores that their largest was taken off, or that largest score itself."""

    is_largest: bool


class Attentions(Tap):
    """Finds every softmax attention over the tokens of an input; perhaps with other scores.

    Fused attention is written out where its weights are asked for, with the kernel's own value. Padding, and what a
    mask forbids, has the weight 0.

    Args:
        batch: how many rows run together.
        lengths: how many tokens wide each of the model's arguments that take tokens is. Two must differ, for a kind of
            attention is known by what it looks from and at.
        factors: for some kinds of attention ``[B, K]``, what the scores of each key are multiplied with before the
            softmax, what is added to them (such as a relative bias) included; a score that a mask forbids stays as it
            is. The weights are then not kept.
        embeddings: where the model is given something besides tokens, the paths of the token embeddings. The attention
            of an image's tower may be as wide as a text's; that of the tokens multiplies values that come from these.
            It takes a graph to know that.
        known: where there is no graph, :attr:`of_tokens` of a run with one.
        is_apart: what attention gives is a constant in the graph, so that :meth:`check_places` tells whether anything
            else mixes the tokens before the last attention.

    Attributes:
        attended: the attention over the tokens, in the order of the forward pass.
        of_tokens: of the modules whose attention is as wide as the tokens, whether it is the tokens'; empty where the
            model is given nothing else.
        is_square: whether some values are as wide as there are tokens, so that their sizes do not tell attention over
            tokens from that over features.
    """

    def __init__(
        self,
        batch: int,
        lengths: Sequence[int],
        factors: Mapping[Kind, Tensor] | None = None,
        *,
        embeddings: Collection[str] = (),
        known: Mapping[str, bool] | None = None,
        is_apart: bool = False,
    ) -> None:
        self._batch = batch
        self._is_apart = is_apart
        self._embeddings = embeddings
        self._is_known = known is not None
        self.of_tokens: dict[str, bool] = dict(known or {})
        self._kinds: dict[tuple[int, int], Kind] = {}
        if len(lengths) == 1:
            self._kinds = {(lengths[0], lengths[0]): "self"}
        else:
            s, d = lengths
            self._kinds = {(s, s): "encoder", (d, d): "decoder", (d, s): "cross"}
        self._factors = factors
        self._run: Running
        self._softmaxes: list[_Softmax] = []
        self._found: set[Kind] = set()
        self._reordered = ""  # where tokens were put into another order
        self._heads_first = ""  # where heads were put before the rows of the batch
        # what check_places() looks at: the values of the first attention, or of the last, and of which tokens
        self._values: dict[Kind, tuple[str, Tensor, list[Tensor]]] = {}
        self._squares: list[tuple[str, Tensor, list[Tensor]]] = []  # what check_features() looks at
        self._beside: list[tuple[str, Tensor]] = []  # what attention gives that is not over the tokens alone, and why
        self.attended: list[Attended] = []
        self.is_square = False

    def begin(self, run: Running) -> None:
        """The run whose attention is looked at."""
        self._run = weakref.proxy(run)

    def leaves(self) -> list[Tensor]:
        """The attention weights, and what attention gives that maps of these leave out."""
        attended = [part for each in self.attended for part in (each.raw, each.given) if part is not None]
        return attended + [out for _, out in self._beside]

    def check(self) -> None:
        """Refuse a model in which some attention was not found.

        Raises:
            MethodError: says where and why.
        """
        why = "; use attnlrp or lrp"
        lost = next((each for each in self._softmaxes if not each.is_read), None)
        if lost is not None:
            raise MethodError(f"the attention weights in {lost.path} do not multiply values as they are{why}")
        twice = next((each for each in self._softmaxes if each.is_changed and each.is_elsewhere), None)
        if twice is not None:
            raise MethodError(
                f"the attention weights in {twice.path} meet something besides values, as embeddings of distances, "
                "so the scores cannot be changed there; use another method, such as leave-one-out"
            )
        if not self._found:
            raise MethodError(
                "found no softmax attention over the tokens of its input, with weights [rows, heads, queries, keys], "
                f"in the model{why}"
            )
        missing = sorted(set(self._kinds.values()) - self._found)
        if missing:
            told = {"encoder": "over an encoder's tokens", "decoder": "over a decoder's tokens", "cross": "of both"}
            of = told[missing[0]]
            raise MethodError(
                f"no softmax attention {of} alone was found, as where a decoder looks at both at once{why}"
            )

    def check_places(self) -> None:
        """Refuse a model in which the values of the first attention have tokens at other places; where what attention
        gives is a constant, those of the last.

        Raises:
            MethodError: names the attention.
        """
        while self._values:
            _, (path, values, tokens) = self._values.popitem()
            if any(_is_moved(values, each) for each in tokens):
                raise MethodError(
                    f"before the attention in {path} the model puts the tokens into other places, as where it moves "
                    "them one on behind a vector of its own, or mixes them; use attnlrp or lrp"
                )

    def check_features(self) -> None:
        """Refuse a model in which features look at features, of as many tokens as there are features: where what
        attention gives is a constant, the values have the tokens at their places, but as columns.

        Raises:
            MethodError: names the attention.
        """
        for path, values, tokens in self._squares:
            if any(_is_moved(values, each) and not _is_moved(values.mT, each) for each in tokens):
                raise MethodError(
                    f"the attention in {path} is over {values.shape[-2]} places that are not the tokens, but features "
                    "of theirs; use attnlrp or lrp"
                )

    def check_beside(self, gradient_of: Callable[[Tensor], Tensor]) -> None:
        """Refuse a model whose explained value depends on attention that maps of the tokens' own leave out: such as one
        that pools them, or over patches of them; that of a head which nothing reads is none of its matter.

        Args:
            gradient_of: the gradient of the explained value at one of the :meth:`leaves`.

        Raises:
            MethodError: names the attention.
        """
        for why, out in self._beside:
            if bool(gradient_of(out).any()):
                raise MethodError(f"{why}, which maps of the tokens' own attention leave out; use attnlrp or lrp")

    # ------------------------------------------------------------------------ operations

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function, and what it does to the marks."""
        name = call.name if call.operation is None else call.operation.name
        if name == "attention":
            return self._fused(call, proceed)
        if name in ("conv1d", "conv2d") and self._convolves(*arguments(call.args, call.kwargs, "input", "weight")):
            raise MethodError(f"{self._run.where()} mixes positions by a convolution, besides attention; use attnlrp")
        if (read := reading(call, lambda mark: isinstance(mark, _Softmax))) is not None:
            if self._kind(read.weights) is not None:
                return self._eager(read, call, proceed)
            self._met(call, None)
            if not mark_of(read.weights).is_routers:
                return self._others(read.weights, read.values, proceed(call.args, call.kwargs))
        lowered = self._lowered(name, call.args)
        out = proceed(call.args, call.kwargs)
        if (
            self._factors is not None
            and name in ("max", "amax")
            and not isinstance(arguments(call.args, call.kwargs, "input", "other")[1], Tensor)
        ):
            with_mark(out if isinstance(out, Tensor) else out[0], _Lowered(is_largest=True))
            return out
        if not isinstance(out, Tensor):
            return out
        self._met(call, out)
        if call.name == "pad" and self._shifts(arguments(call.args, call.kwargs, "input", "pad")[1], out):
            raise MethodError(f"{self._run.where()} shifts tokens to their neighbours, besides attention; use attnlrp")
        if call.name in REORDERS and self._reorders(call.args[0], out):
            self._reordered = self._reordered or self._run.where()
        if call.name in JOINS | COPIES and self._puts_heads_first(call, out):
            self._heads_first = self._heads_first or self._run.where()
        if name in ("linear", "addmm") or (name == "matmul" and any(map(is_parameter, call.args[1:2]))):
            return with_mark(out, _Linear(out.shape[-1]))
        if name == "softmax":
            scores, _, _ = first(call.args, call.kwargs)
            if scores.ndim < 3:
                return out
            of = mark_of(scores)
            is_routers = isinstance(of, _Linear) and of.width == out.shape[-1]
            kept = scores.detach() if self._factors else out.detach()
            is_lowered = lowered is not None and not lowered.is_largest
            mark = _Softmax(self._run.where(), kept, out.detach(), is_routers, is_lowered)
            if self._kind(out) is not None and not is_routers:
                self._softmaxes.append(mark)
            return with_mark(out, mark)
        if lowered is not None:
            return with_mark(out, lowered)
        row, old = call.operation, mark_of(call.args[0]) if call.args else None
        if old is not None and out is not call.args[0]:
            moves = row is not None and row.gate in ("moves", "stays")
            return with_mark(out, old) if moves or name in FILLED else out
        return out

    def _met(self, call: Call, out: Tensor | None) -> None:
        """Notes weights whose scores would be changed for the values alone, and not for what else they meet here. What
        is of the same size is perhaps a mask of them, after which they are looked at again."""
        name = call.name if call.operation is None else call.operation.name
        if not self._factors or name not in MEETS:
            return
        operands = operands_of(call.args) if name == "einsum" else call.args
        for mark in (mark_of(each) for each in operands):
            if isinstance(mark, _Softmax):
                mark.is_elsewhere |= name != "mul" or out is None or out.numel() != mark.out.numel()

    def _lowered(self, name: str, args: tuple[Any, ...]) -> _Lowered | None:
        """The mark of what is computed from scores that their largest was taken off, or from that largest one."""
        if self._factors is None or name == "matmul":
            return None
        marks = [mark_of(each) for each in args if isinstance(each, Tensor)]
        found = [mark for mark in marks if isinstance(mark, _Lowered)]
        if not found or any(isinstance(mark, _Linear) for mark in marks):
            return None
        return _Lowered(is_largest=all(mark.is_largest for mark in found) and name not in ("add", "sub"))

    def _convolves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether tokens see their neighbours: in two dimensions where one is the tokens', as in the values of heads
        ``[B, H, T, d]``, and the kernel is wide in no other."""
        if weight.ndim == 3:
            return weight.shape[-1] > 1
        widths = {width for width, _ in self._kinds}
        rows, columns = weight.shape[-2:]
        return (x.shape[-2] in widths and rows > 1 == columns) or (x.shape[-1] in widths and columns > 1 == rows)

    def _shifts(self, pad: Sequence[int], out: Tensor) -> bool:
        """Whether ``out``, which was padded, is as many vectors as there are tokens, moved to other places."""
        widths = {width for width, _ in self._kinds}
        return out.ndim == 3 and out.is_floating_point() and out.shape[1] in widths and any(pad[2:4])

    def _reorders(self, x: Any, out: Tensor) -> bool:
        """Whether ``out`` has the vectors of ``x``, one or more for each token, at other tokens, and not just their
        features elsewhere. Those of all rows one after another ``[B · T, d]`` are an expert's."""
        widths = {width for width, _ in self._kinds}
        if not isinstance(x, Tensor) or x.shape != out.shape or x.ndim < 3 or not widths & {*x.shape[:-1]}:
            return False
        if not any_carries(x) if torch.is_grad_enabled() else x.ndim != 3 or not x.is_floating_point():
            return False
        with torch._C.DisableTorchFunction():
            before, after = (each.detach().sort(-1).values for each in (x, out))
            return not torch.equal(before, after)

    def _widths(self) -> set[int]:
        """How many queries or keys there may be."""
        return {width for pair in self._kinds for width in pair}

    def _puts_heads_first(self, call: Call, out: Tensor) -> bool:
        """Whether ``out`` has heads before the rows of the batch, ``[H, B, T, d]`` or ``[H · B, T, d]``: put together
        from heads, or a copy of such in another shape."""
        parts = call.args[0]
        if call.name in COPIES:
            return isinstance(parts, Tensor) and self._is_heads_first(parts)
        if not isinstance(parts, (tuple, list)) or len(parts) < 2 or out.ndim not in (3, 4):
            return False
        dim = arguments(call.args, call.kwargs, "tensors", "dim")[1] or 0
        is_first = dim in (0, -out.ndim) and out.shape[-2] in self._widths()
        one = out.ndim - (call.name == "stack")
        return is_first and one == 3 and all(each.ndim == 3 and len(each) == self._batch for each in parts)

    def _is_heads_first(self, x: Tensor) -> bool:
        """Whether a view has heads before rows: in memory a row's heads are beside one another."""
        if x.ndim != 4 or x.shape[1] != self._batch or len(x) < 2:
            return False
        return x.shape[-2] in self._widths() and x.stride(0) < x.stride(1)

    def _is_of_tokens(self, values: Tensor) -> bool:
        """Whether the values that attention multiplies come from the tokens' embeddings."""
        if not self._embeddings and not self._is_known:
            return True
        where = self._run.where()
        if self._is_known or self._run.replaying:
            return self.of_tokens.get(where, False)
        found = self._comes_from_tokens(values)
        if self.of_tokens.setdefault(where, found) != found:
            raise MethodError(
                f"the attention in {where} is both that of the tokens and that of something else; use attnlrp or lrp"
            )
        return found

    def _comes_from_tokens(self, values: Tensor) -> bool:
        sources = {id(source.value) for source in self._run.sources if source.among(self._embeddings) is not None}
        return descends(values.grad_fn, sources)

    def _others(self, rows: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """What attention gives that is not over the tokens alone: as where an image looks at a text that then looks at
        it, where a text is cut into patches that look at each other, or where a few places look at all tokens.

        Raises:
            MethodError: it mixes the tokens with something else.
        """
        if self._run.replaying or not values.requires_grad or values.shape[-2] == 1:
            return out
        where = self._run.where()
        if self._embeddings and self._comes_from_tokens(values):
            raise MethodError(
                f"the attention in {where} mixes what comes from the tokens with something else, such as an image, "
                "which maps of the tokens' own attention leave out; use attnlrp or lrp"
            )
        if len(self._kinds) == 1 and not self._embeddings and out.requires_grad:
            count = values.shape[-2]
            of = f"is over {count} places that are not the tokens, such as patches of them"
            if count in self._widths():
                seen = "a place that is none of them" if rows.shape[-2] == 1 else "places that are none of them"
                of = f"looks at all tokens from {seen}, as one that pools them does"
            self._beside.append((f"the attention in {where} {of}", out))
        return out

    def _kind(self, weights: Tensor) -> Kind | None:
        """Which attention weights ``[…, Q, K]`` are, if they are of the tokens of the input."""
        fits = weights.ndim in (3, 4) and weights.shape[0] % self._batch == 0
        return self._kinds.get((weights.shape[-2], weights.shape[-1])) if fits else None

    def _kept(self, kind: Kind, raw: Tensor, values: Tensor) -> Attended | None:
        self._found.add(kind)
        are_other_rows = raw.ndim == 4 and len(raw) != self._batch
        if self._batch > 1 and (self._heads_first or are_other_rows or self._is_heads_first(values)):
            alone = "" if self._factors else "explain one input at a time (batch_size=1), or "
            raise MethodError(
                f"{self._heads_first or self._run.where()} puts heads before the rows of a batch, so nothing tells of "
                f"which row the weights of attention in {self._run.where()} are; {alone}use attnlrp or lrp"
            )
        if self._reordered:
            raise MethodError(
                f"{self._reordered} puts the tokens into another order, in which the attention in {self._run.where()} "
                "may look at them; use attnlrp or lrp"
            )
        self.is_square = self.is_square or values.shape[-1] == values.shape[-2]
        if self._factors is not None or self._run.replaying:
            return None
        found = Attended(self._run.where(), kind, raw, self._batch, values)
        self.attended.append(found)
        is_first = kind not in {each.kind for each in self.attended[:-1]}
        if kind != "cross" and values.requires_grad and (is_first or self._is_apart):
            tokens = [each.value for each in self._run.sources if each.is_of_tokens and each.value.ndim == 3]
            self._values[kind] = self._run.where(), values, [each for each in tokens if each.requires_grad]
            if self._is_apart and values.shape[-1] == values.shape[-2]:
                self._squares.append(self._values[kind])
        return found

    def _factor(self, kind: Kind, scores: Tensor) -> Tensor | None:
        """What the scores ``[…, Q, K]`` are multiplied with, for each row of them."""
        if self._factors is None or kind not in self._factors:
            return None
        each = self._factors[kind].to(scores.device, scores.dtype)
        each = each.repeat_interleave(scores.shape[0] // self._batch, 0)
        return each.reshape(len(each), *(1,) * (scores.ndim - 2), -1)

    def _eager(self, read: Reading, call: Call, proceed: Callable[..., Any]) -> Any:
        """The product of attention weights and values."""
        weights, mark = read.weights, mark_of(read.weights)
        kind = self._kind(weights)
        assert kind is not None
        mark.is_read = True
        if not self._is_of_tokens(read.values):
            return proceed(call.args, call.kwargs)
        if mark.is_routers:
            raise MethodError(
                f"in {mark.path} values are multiplied by a softmax of a linear layer, which has as many outputs as "
                "there are tokens, so nobody knows whether that is attention or a choice of experts; use attnlrp or lrp"
            )
        found = self._kept(kind, weights, read.values)
        factor = self._factor(kind, weights)
        if factor is None:
            return self._gives(found, proceed(call.args, call.kwargs), read.order)
        as_it_was = weights.numel() == mark.out.numel()
        if not as_it_was or not torch.equal(weights.detach().flatten(), mark.out.to(weights.dtype).flatten()):
            raise MethodError(
                f"in {mark.path} something comes between the softmax of the attention scores and the values, so the "
                "scores cannot be changed there; use another method, such as leave-one-out"
            )
        if mark.is_lowered:
            raise MethodError(
                f"in {mark.path} the largest score is taken off before the softmax, so that all are below 0 and to "
                "multiply them would turn a token up; use another method, such as leave-one-out"
            )
        scores = mark.scores.to(mark.out.dtype).reshape(weights.shape)
        mark.is_changed = True
        changed = torch.where(_is_forbidden(scores), scores, scores * factor).softmax(-1)
        return proceed(read.given(changed.to(weights.dtype)), call.kwargs)

    def _fused(self, call: Call, proceed: Callable[..., Any]) -> Any:
        """Attention that is one torch function, written out."""
        q, k, v, mask, dropout, causal, scale, _ = arguments(call.args, call.kwargs, *NAMES)
        kind = self._kinds.get((q.shape[-2], k.shape[-2])) if q.ndim == 4 and len(q) == self._batch else None
        if kind is None:
            return self._others(q, v, proceed(call.args, call.kwargs))
        if not self._is_of_tokens(v):
            return proceed(call.args, call.kwargs)
        if self._factors is not None and kind not in self._factors:
            self._found.add(kind)
            return proceed(call.args, call.kwargs)
        if dropout:
            raise MethodError(
                f"the attention in {self._run.where()} drops weights at random; put the model into eval()"
            )
        groups = q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        keys, values = (x.repeat_interleave(groups, 1).to(wide) for x in (k, v))
        scores = q.to(wide) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        admitted = None
        if causal:
            admitted = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        elif mask is not None:
            admitted = mask if mask.dtype is torch.bool else ~_is_forbidden(mask.detach())
            scores = scores if mask.dtype is torch.bool else torch.where(admitted, scores + mask, scores)
        factor = self._factor(kind, scores)
        scores = scores if factor is None else scores * factor
        if admitted is not None:  # by a finite number: a row that admits nothing must not be NaN
            scores = scores.masked_fill(~admitted, torch.finfo(scores.dtype).min)  # narrow under autocast
        weights = scores.softmax(-1)
        weights = weights if admitted is None else weights.masked_fill(~admitted, 0.0)
        found = self._kept(kind, weights, v)
        product = (weights @ values).to(v.dtype)
        if factor is not None:
            return product
        with torch.no_grad():
            value = proceed(call.args, call.kwargs)
        out = rules.with_gradient_of(value.detach(), product) if torch.is_grad_enabled() else value
        return self._gives(found, out)

    def _gives(self, found: Attended | None, out: Tensor, order: tuple[int, ...] = ()) -> Tensor:
        """What attention gives, which is kept beside its weights, or a constant."""
        if self._is_apart:
            return out.detach()
        if found is not None and out.requires_grad:
            found.given, found.order = out, order
        return out


def _is_moved(values: Tensor, tokens: Tensor) -> bool:
    """Whether attention's values ``[…, K, d]`` have what was looked up ``[B, T, d]`` at other places, or some of it."""
    if tokens.shape[1] == values.shape[-2]:
        return is_moved(values, [tokens])
    (found,) = torch.autograd.grad(values.sum(), [tokens], retain_graph=True, allow_unused=True)
    return found is not None


REORDERS = frozenset("flip fliplr flipud rot90 roll __getitem__ index_select gather take_along_dim sort msort".split())
"""How torch calls what may put tokens into another order."""
JOINS = frozenset("cat concat concatenate stack".split())
"""How torch calls what may put heads together, one behind another along a batch."""
COPIES = frozenset("reshape contiguous clone flatten".split())
"""How torch calls what may copy heads that were put before the rows, after which their strides tell nothing."""
MEETS = frozenset(("mul", "linear", "addmm", "baddbmm", *PRODUCTS))
"""Operations in which attention weights meet something else."""
FORBIDDEN = -5e3
"""What a mask forbids is at or below this, be it the lowest number there is or −10,000. No score that a model makes of
queries and keys is; one that was would have the weight 0, too."""


def _is_forbidden(scores: Tensor) -> Tensor:
    return scores <= FORBIDDEN
