"""Follows what a model's torch functions make through one pass, and so finds its units.

What a non-linearity gives and a second matrix takes back to the width of the layer are latent neurons; what softmax
attention gives, head beside head, to an output projection are heads.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from lrpx._modules import layer_of
from lrpx.engine import Tap
from lrpx.engine._book import storage_of
from lrpx.engine._tensors import any_carries, spelled, tensors_in
from lrpx.units._place import READS, Kind, Place, is_in, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from lrpx.engine import Call, Running
    from lrpx.engine._places import Side
    from lrpx.rules import Rule

REARRANGES = frozenset(
    """chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split unbind narrow select repeat repeat_interleave
    tile flip roll __getitem__ __get__ slice broadcast_to cat concat concatenate stack index_select gather
    take_along_dim""".split()
)
"""Torch functions that put numbers elsewhere and change none, beside those that move the mark of a gate; ``__get__`` is
``x.mT`` and ``x.T``."""
CASTS = frozenset("type float half bfloat16 double to type_as dropout".split())
"""Of these, those that leave them where they are."""
PRODUCTS = ("matmul", "baddbmm", "grouped_mm")
RANKS = ("heads", "weights", "scores", "neurons", "linear")
"""Of two marks that meet in a product, the first here goes on."""


_Pairs: TypeAlias = "tuple[tuple[_Mark | None, _Mark | None], ...]"


@dataclass(frozen=True, eq=False)
class _Mark:
    """What is known of a tensor that is on its way.

    Args:
        kind: one of :data:`RANKS`.
        index: of the tensor's own shape: which feature of a linear layer, which head or which neuron stands where.
        path: the linear layer's module; of heads, which attention's they are; of neurons that are numbers from 0 to 1,
            as a sigmoid gives, that of the linear layer before it.
        made_of: of attention's scores and weights: the queries and keys they were made of; several where they are a
            sum of several products.
        is_scaled: whether it was multiplied by what depends on the input since, as a norm does; of neurons, by what is
            nobody's, as the stream.
        calls: of what a linear layer gives: which calls of the module gave it, as where keys of two streams are joined.
        after: of neurons: the linear layer, and which call of it, whose output the non-linearity was given.
        is_stream: whether a layer was given it, as where the embeddings end in a non-linearity.
        scales: of neurons: the linear layer, and which call of it, that gives a branch of which they are a factor.
        norms, gates: of a branch: how many norms, and how many factors that depend on the input, it went through.
    """

    kind: str
    index: Tensor
    path: str = ""
    made_of: _Pairs = ()
    is_scaled: bool = False
    calls: tuple[int, ...] = ()
    after: tuple[str, int] | None = None
    is_stream: bool = False
    scales: tuple[str, int] | None = None
    norms: int = 0
    gates: int = 0


ATTRIBUTE = "_lrpx_unit"
LEARNED = "_lrpx_learned"
"""The attribute of a tensor that was chosen of a weight."""
ALONE = "_lrpx_alone"
"""The attribute of a tensor that was computed of what one linear layer gives alone, as the mean and the deviation of
that: the layer's path."""
JOINED = "_lrpx_joined"
"""The attribute of a tensor that is made of branches alone: the linear layers, and which call of them, that gave
them."""
PICKED = "_lrpx_picked"
"""The attribute of a tensor whose rows were picked among the tokens by their numbers, as those of an expert: of several
that it is given all of, nobody knows the order."""
TURNED = "_lrpx_turned"
"""The attribute of a tensor ``[T, 1, n]`` that was ``[1, T, n]``, and of ``[T, n]`` that was made of it: of more
rows it has the first token of each first."""
TURNS = frozenset("transpose swapaxes swapdims permute movedim moveaxis".split())
PICKS = ("__getitem__", "index_select", "gather", "take_along_dim")
"""Torch functions that pick."""
PUTS = ("index_", "scatter", "masked_scatter", "__setitem__", "put")
"""How the names of those begin that put rows back to where they were."""


def _mark_of(x: Any) -> _Mark | None:
    mark, version = vars(x).get(ATTRIBUTE, (None, 0)) if isinstance(x, Tensor) else (None, 0)
    return mark if mark is not None and x._version == version and mark.index.shape == x.shape else None


def _with(x: Tensor, mark: _Mark | None) -> Tensor:
    if mark is not None and mark.index.shape == x.shape:
        setattr(x, ATTRIBUTE, (mark, x._version))
    return x


def _along(x: Tensor, dim: int) -> Tensor:
    """Numbers along one dimension, in the shape of ``x``."""
    count = torch.arange(x.shape[dim], device=x.device).reshape(-1, *(1,) * (-dim - 1))
    return torch.empty_like(x, dtype=torch.int64, requires_grad=False).copy_(count.expand(x.shape))  # lying as x does


def _between(x: Tensor) -> Tensor:
    """Numbers of what stands between rows and tokens, in the shape of ``x``: heads, perhaps each in several windows."""
    between = x.shape[1:-2]
    numbers = torch.arange(between.numel(), device=x.device).reshape(1, *between, 1, 1)
    return torch.empty_like(x, dtype=torch.int64, requires_grad=False).copy_(numbers.expand(x.shape))


def _nobody(x: Tensor) -> Tensor:
    """Numbers in the shape of ``x`` that are those of nothing."""
    return torch.full_like(x, -1, dtype=torch.int64, requires_grad=False)


def _is_equal_along(index: Tensor) -> bool:
    """Whether numbers are the same along the last dimension: of scores or weights that a layer mixes the heads of."""
    return bool((index == index[..., :1]).all())


class Follower(Tap):
    """Follows what torch functions make, through one forward pass."""

    patterns = ("*",)

    def __init__(self, own: Mapping[str, str], weights: Iterable[int], adapted: Collection[str] = ()) -> None:
        self._own = own
        self._adapted = adapted
        self._inner: dict[str, list[str]] = {}  # of each module the names of those in it
        for each in own:
            holder, _, name = each.rpartition(".")
            self._inner.setdefault(holder, []).append(name)
        self._weights = set(weights) - {0}  # where they lie
        self._run: Running
        self.calls: Counter[str] = Counter()
        self._entered: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._made_in: dict[tuple[str, int], Tensor] = {}  # the same, of each call
        self._attentions = 0
        self._gives: set[str] = set()
        self._products: dict[tuple[str, int], Tensor] = {}  # which a module's call has given
        self._read: dict[tuple[str, int], list[Tensor]] = {}  # of which attention has read a part
        self._parts: dict[tuple[Kind, str, int, tuple[str, int]], tuple[int, list[Tensor]]] = {}  # where it is seen
        self._mixed: dict[str, dict[int, set[int]]] = {}  # of a module's features, with which others one was summed
        self._around: dict[tuple[str, int], list[tuple[str, int]]] = {}  # of a layer of units, what is given them, too
        self._readers: dict[tuple[str, int], set[str]] = {}  # the layers of units in a module that is given them
        self._units: dict[tuple[str, int], Tensor] = {}  # which a layer of units was given
        self._constant: set[str] = set()  # what is given nothing of the input, as a decoder's first attention to itself
        self._gates: set[tuple[str, int]] = set()  # of these, what gives the scores of a gate, and no branch
        self._hidden: set[tuple[str, int]] = set()  # of these, what gives neurons of another, as in an MLP of three
        self._met: set[tuple[str, int]] = set()  # of linear layers, whose output was added to something else, too
        self._of_stream: set[tuple[str, int]] = set()  # of layers of units, those that are given the stream, no neurons
        self._wraps: set[tuple[str, int]] = set()  # of these, what gives no more than a layer in it
        self._rows: dict[tuple[str, int], torch.Size] = {}  # of the layers and their calls, in order
        self._given: dict[tuple[str, int], torch.Size] = {}  # what they took
        self._embedded: set[int] = set()  # how wide the first of the sources is
        self._streams: set[int] = set()  # how wide the second stream of a layer is
        self._ended: dict[tuple[str, int], Tensor] = {}  # of these, what is all that a branch gives
        self._added: set[tuple[str, int]] = set()  # of these, what is added to something outside of every layer
        self._linears: dict[str, int] = {}  # the last call of each module that gave what is linear
        self._scaled: dict[tuple[str, int], tuple[tuple[str, int], _Mark]] = {}  # what gives that behind norms, gates
        self._normed: set[tuple[str, int]] = set()  # of linear layers, whose output meets others behind a norm
        self._gated: set[tuple[str, int]] = set()  # of these, behind a factor that depends on the input
        self._running: list[tuple[str, int]] = []
        self._seen: list[tuple[Place, int, int, tuple[str, int]]] = []  # and their layer
        self._homeless: dict[Kind, tuple[str, int]] = {}  # in no layer that runs, as in a list of lists of layers
        self.unknown: dict[Kind, str] = {}  # where attention is given what no linear layer is seen to give
        self._strewn: dict[str, str] = {}  # of an attention, where its heads stand, but not side by side
        self._ordered_heads: dict[str, list[tuple[str, int, tuple[str, int]]]] = {}  # where they do, how wide what that
        # gives, and the layer
        self._unread: dict[Any, str] = {}  # of softmaxes of scores with which nothing was read, and where they are
        self._homes: dict[str, str] = {}  # the module in which an attention was computed
        self._in_layers: set[str] = set()  # the attentions over tokens that a layer has
        self._part_of: dict[str, str] = {}  # of an attention the one that its heads go on with, as of two that differ
        self.unlike: dict[Kind, str] = {}  # a module that has none of any kind, where that of another layer has some
        self.inside: dict[str, str] = {}
        self._inside: list[tuple[str, int]] = []  # where neurons are that no module takes, and how wide what they give
        self.turned: set[tuple[str, Side]] = set()
        self.picked: set[tuple[str, Side]] = set()
        self.apart: dict[tuple[str, Side], int] = {}  # of what has not one place for each token: how many it has

    def begin(self, run: Running) -> None:
        self._run = weakref.proxy(run)

    # ------------------------------------------------------------------- modules

    def module(self, path: str, side: Side, value: Tensor) -> None:
        if self._own[path] != path:
            return
        if (value.ndim == 3 and len(value) > value.shape[1] == 1) or TURNED in vars(value):  # of one row
            self.turned.add((path, side))
        if PICKED in vars(value):
            self.picked.add((path, side))
        tokens = [source.value.shape[:-1] for source in self._run.sources]
        if tokens and (count := value.shape[:-1].numel()) not in {each.numel() for each in tokens}:
            self.apart[path, side] = count // max(tokens[0][0], 1)
        if not any_carries(value):
            self._constant.add(path)
        layer = layer_of(path)
        is_layer = layer is not None and layer.path == path
        if side == "input":
            self._entered[path] = value
            if is_layer:
                vars(value).pop(JOINED, None)
                if (mark := _mark_of(value)) is not None:
                    _with(value, replace(mark, is_stream=True))
                self._running.append((path, self.calls[path]))
                self._given[path, self.calls[path]] = value.shape
                self._embedded |= {source.value.shape[-1] for source in self._run.sources[:1]}
            return
        self._beside(path, value)
        made = self._made.get(path)
        if made is not None and _is_same(made, value):
            self._gives.add(path)
            self._products[path, self.calls[path]] = made
        mark = _mark_of(value)
        if mark is not None and (branch := self._branch(mark)) is not None:
            _, last = self._scaled.get(branch, (None, None))
            is_next = last is None or (layer_of(path) == layer_of(branch[0]) and _is_further(mark, last))
            if is_next and self._is_whole(branch[0], mark):
                self._scaled[branch] = (path, self.calls[path]), mark
        at = path, self.calls[path]
        if any(each in self._made and _is_same(self._made[each], value) for each in self._readers.get(at, ())):
            self._wraps.add(at)
        if is_layer and (path, self.calls[path]) in self._running:
            call = self.calls[path]
            self._rows[path, call] = value.shape
            self._saw(Place(0, path, "output", "residual", 1, value.shape[-1], call=call))
            self._running.remove((path, call))
            if any(is_in(each, path) and _is_same(self._made[each], value) for each, _ in self._units):
                self._ended[path, call] = value
        self.calls[path] += 1

    def _beside(self, path: str, value: Tensor) -> None:
        """What a module makes of its input by a linear layer in it, and perhaps an adapter beside that, is linear: also
        where the adapter is off."""
        given, mark = self._entered.get(path), _mark_of(value)
        if given is None or not any_carries(value):
            return
        for child in (f"{path}.{name}" for name in self._inner.get(path, ())):
            made, its = self._made.get(child), self._entered.get(child)
            if made is None or its is None or not _is_same(its, given):
                continue
            if mark is not None and (mark.kind, mark.path) != ("linear", child):
                continue
            if made.numel() == value.numel() and made.shape[-1] == value.shape[-1]:
                self._is_linear(path, value)

    def _is_linear(self, path: str, value: Tensor) -> Tensor:
        """Note of what this call of a module gives that it is linear."""
        call = self.calls[path]
        self._made[path] = self._made_in[path, call] = value
        self._linears[path] = call
        return _with(value, _Mark("linear", _along(value, -1), path, calls=(call,)))

    def _here(self) -> str:
        """The path of the module that runs now; of one with several, the first."""
        return self._own.get(where := self._run.where(), where)

    def _saw(self, place: Place, wide: int = 0, rows: int = 0) -> None:
        if self._running:
            self._seen.append((place, wide, rows, self._running[-1]))
        else:
            self._homeless.setdefault(place.kind, (place.path, wide))

    # ---------------------------------------------------------------- operations

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        given = [
            (x, _mark_of(x), vars(x).get(JOINED, frozenset()))  # before what is changed in place
            for x in tensors_in((*call.args, *call.kwargs.values()))
            if any_carries(x)
        ]
        out = self._followed(call, proceed)
        self._go_on(call, given, out)
        return out

    def _followed(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        args, row = call.args, call.operation
        name = call.name if row is None else row.name
        marks = [_mark_of(x) for x in args]  # before what is changed in place
        lists = [_mark_of(x) for x in args[0] if x.numel()] if _is_list(args[:1]) else []  # a cache may be empty
        out = proceed(args, call.kwargs)
        if self._running and _is_picked(call, out):
            setattr(out, PICKED, True)
        if _is_turned(call, out):
            setattr(out, TURNED, True)
        _keep_alone(call, out)
        if row is None or not args:
            return out
        moves = row.gate == "moves" or call.name in REARRANGES
        is_linear = name in ("linear", "addmm") or (name == "matmul" and _is_weight(args[1]))
        if any_carries(out) and not (moves or is_linear):
            self._reads(name, args, marks)
        if isinstance(out, Tensor) and moves and self._is_learned(args[0]):
            setattr(out, LEARNED, True)
        if name == "attention":
            return self._attention(args, call.kwargs, out)
        if not isinstance(out, Tensor):
            return self._rearranged(call, name, marks, out, proceed)
        if is_linear:
            return self._linear(args[1] if name == "addmm" else args[0] if args else None, marks[name == "addmm"], out)
        if name == "einsum":
            return self._einsum(*args, out=out) if isinstance(args[0], str) else out
        if name in PRODUCTS:
            two = [*args, *call.kwargs.values()][name == "baddbmm" :][:2]
            self._product(two, [_mark_of(x) for x in two], out)
            return _with(out, _merged(_mark_of(out), [marks[0]])) if name == "baddbmm" else out
        if name == "softmax":
            given = dict(zip(("input", "dim"), args, strict=False)) | call.kwargs
            dim = given.get("dim")
            made_of = _queries_first(marks[0], dim)
            if not any_carries(out):
                return out
            self._await(made_of)
            along = _along(out, -1 if dim is None else int(dim) % out.ndim - out.ndim)
            return _with(out, _Mark("weights", along, made_of=made_of))
        if name == "clamp" and _guards(call):
            vars(out).pop(ATTRIBUTE, None)
            return _with(out, marks[0])
        if call.name == "glu" and any_carries(out):
            given = dict(zip(("input", "dim"), args, strict=False)) | call.kwargs
            return _with(out, _Mark("neurons", _along(out, int(given.get("dim", -1)) % out.ndim - out.ndim)))
        if row.kind == "activation":
            if marks[0] is not None and marks[0].kind == "scores":  # as where they are kept between bounds
                return _with(out, marks[0])
            return self._activated(args[0], marks[0], out)
        if moves:
            if call.name in CASTS:
                return _with(out, marks[0])
            if lists:
                return self._joined(lists, call, out, proceed)
            return self._rearranged(call, name, marks, out, proceed)
        if name == "add" and not self._running:
            self._added |= {at for at, x in self._ended.items() for arg in args if _is_there(arg, x)}
        if row.kind in ("plain", "norm", "product") and name != "cumsum":
            return self._kept(name, args, marks, out, row.kind)
        return out

    def rule(
        self, kind: str, rule: Rule, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        """An activation that is run as one function is seen here alone."""
        out = proceed(*inputs)
        return self._activated(inputs[0], _mark_of(inputs[0]), out) if kind == "activation" else out

    def _activated(self, x: Any, mark: _Mark | None, out: Tensor) -> Tensor:
        is_one = any_carries(out) and out.ndim > 1 and isinstance(x, Tensor) and out.shape == x.shape
        if not is_one:
            return out
        if mark is not None and mark.kind == "heads":  # before their matrix: they are units of neither kind then
            return out
        if mark is None or mark.kind != "linear":
            return _with(out, _Mark("neurons", _along(out, -1) if mark is None else mark.index))
        after = (mark.path, self._linears[mark.path]) if mark.path in self._linears else None
        return _with(out, _Mark("neurons", mark.index, mark.path if _is_share(out) else "", after=after))

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        for kind, name in zip(READS, ("query", "key", "value"), strict=True):
            self._features(kind, _mark_of(given[name]))
            self._note_unknown(kind, given[name])
        return self._heads(out, _between(out)) if out.ndim > 3 else out

    def _heads(self, out: Tensor, index: Tensor) -> Tensor:
        self._attentions += 1
        name = f"attention {self._attentions}"
        self._homes[name] = self._here()
        if self._is_in_layer(out):
            self._in_layers.add(name)
        return _with(out, _Mark("heads", index, name))

    def _is_in_layer(self, out: Tensor) -> bool:
        """Whether what was read is that of an attention over tokens in a layer."""
        return bool(self._running) and not self._is_within_tokens(out)

    def _is_within_tokens(self, out: Tensor) -> bool:
        """Whether what was read is each token's own, as of a layer's depth: ``[B, T, …, d]``, ``[B·T, …, d]``."""
        tokens = self._run.sources[0].value
        if tokens.ndim != 3:  # as an image
            return False
        batch, length = tokens.shape[:2]
        among = out.shape[:2] == (batch, length) if out.ndim > 3 else len(out) == batch * length
        return among and out.shape[-2] != length

    def _product(self, args: Sequence[Any], marks: Sequence[_Mark | None], out: Tensor) -> Tensor:
        """A product of two that depend on the input: scores, or what attention reads."""
        left, right = marks
        if not all(map(any_carries, args)):
            for mark, other, dim in zip(marks, reversed(args), (-1, -2), strict=True):
                if mark is not None and mark.kind == "neurons":  # the weights of all experts in one tensor
                    self.inside.setdefault("neurons", self._run.where())
                    if self._is_learned(other) and out.ndim > 1:
                        self._inside.append((self._run.where(), out.shape[dim]))
            return out
        made_of = _weights(args[0], left) if out.ndim > 2 else None
        values, its = args[1], right
        if made_of is None and out.ndim > 2 and right is not None and right.made_of and _is_turned_over(right):
            made_of, values, its = right.made_of, args[0], left
        if made_of is not None:
            self._attends(made_of, its, out)
            self._note_unknown("values", values)
            heads = _along(out, -3)
            if out.ndim == 3:  # the heads of each row of the batch, one row after another
                heads = heads % (len(out) // self._run.sources[0].value.shape[0])
            return self._heads(out, heads)
        if left is not None and right is not None and {left.kind, right.kind} == {"linear"}:
            return _with(out, _Mark("scores", _along(out, -1), made_of=((left, right),)))
        return out

    def _await(self, made_of: _Pairs) -> None:
        """Note of a softmax of scores over tokens, in a layer, that something is to be read with it."""
        if self._running:
            self._unread |= dict.fromkeys(made_of, self._here())

    def _attends(self, made_of: _Pairs, values: _Mark | None, out: Tensor) -> None:
        """Note of the queries, keys and values of what attention reads; of those of nobody knows which, that they are
        missed, but where it is given nothing of the input."""
        if not made_of and self._is_in_layer(out) and self._here() not in self._constant:
            for kind in READS[:2]:
                self.unknown.setdefault(kind, self._here())
        for pair in made_of:
            self._unread.pop(pair, None)
            for kind, mark in zip(READS, pair, strict=False):
                self._features(kind, mark)
        self._features("values", values)

    def _einsum(self, equation: str, *given: Any, out: Tensor) -> Tensor:
        """Scores, or what attention reads, in whatever order their indices are.

        The heads are the last index that weights, values and result have, or one of the weights and the result, where
        all heads read the same values. Where they cannot be told, as of several that share keys and values, they are
        heads of no place.
        """
        two = given[0] if _is_list(given[:1]) else given
        marks = [_mark_of(x) for x in two]
        labels, _, result = spelled(equation, two).partition("->")
        for weight, label in zip(two, labels.split(","), strict=True):
            if self._is_learned(weight) and any(mark is not None and mark.kind == "neurons" for mark in marks):
                own = [letter for letter in result if labels.count(letter) == label.count(letter)]
                widths = [out.shape[result.index(letter)] for letter in own]
                self._inside += [(self._run.where(), width) for width in widths]  # the weights of all experts
        if len(two) != 2:
            return out
        left, right = labels.split(",")
        if result == left == right or (not all(map(any_carries, two)) and result in (left, right)):  # nothing is summed
            return self._kept("mul", two, marks, out, "product")
        if not all(map(any_carries, two)):
            return out
        if not result or any(len(set(label)) < len(label) for label in (left, right)):  # a sum, or a diagonal
            return out
        kinds = [None if mark is None else mark.kind for mark in marks]
        common = [letter for letter in left if letter in right and letter in result]
        if kinds == ["linear", "linear"]:
            if result[-1] in common:
                return out
            keys = int(result[-1] in right)
            made_of = [_ordered(marks[i], (left, right)[i], common) for i in (1 - keys, keys)]
            return _with(out, _Mark("scores", _along(out, -1), made_of=((made_of[0], made_of[1]),)))
        read = [
            _weights(x, mark) if label[-1] not in result or kind == "weights" else None
            for x, mark, kind, label in zip(two, marks, kinds, (left, right), strict=True)
        ]
        weights = next((i for i, each in enumerate(read) if each is not None), None)
        if weights is None:
            return out
        label, values = (left, right) if weights == 0 else (right, left)
        own = [letter for letter in label[:-1] if letter not in values and letter in result]
        heads = common[-1] if len(own) == 1 and common else own[-2] if len(own) == 2 and len(common) == 1 else ""
        if label[-1] in result or not heads:
            return self._heads(out, torch.full_like(out, -1, dtype=torch.int64, requires_grad=False))
        self._attends(read[weights] or (), _ordered(marks[1 - weights], values, common), out)
        self._note_unknown("values", two[1 - weights])
        index = _along(out, result.index(heads) - len(result))
        if len(label) == 3:  # the heads of each row of the batch, one row after another
            index = index % max(out.shape[result.index(heads)] // self._run.sources[0].value.shape[0], 1)
        return self._heads(out, index)

    def _is_learned(self, x: Any) -> bool:
        """Whether a tensor is a weight of the model, or was chosen of one."""
        return isinstance(x, Tensor) and (LEARNED in vars(x) or storage_of(x) in self._weights)

    def _linear(self, x: Any, mark: _Mark | None, out: Tensor) -> Tensor:
        path = self._here()
        self._is_linear(path, out)
        if mark is not None and mark.kind in ("neurons", "heads"):
            self._second(path, x, mark, out)
        setattr(out, ALONE, path)
        if (path, self.calls[path]) in self._units:
            setattr(out, JOINED, frozenset({(path, self.calls[path])}))
        if mark is not None and mark.kind in ("scores", "weights") and _is_equal_along(mark.index):
            return _with(out, replace(mark, index=mark.index[..., :1].expand(out.shape)))  # of each head some of all
        return out

    def _second(self, path: str, x: Tensor, mark: _Mark, out: Tensor) -> None:
        """A linear layer of latent neurons, or of heads side by side."""
        if layer_of(path) is None:
            return
        self._units[path, self.calls[path]] = x
        self._around[path, self.calls[path]] = around = list(self._given_units(path, x, mark))
        for each in around:
            self._readers.setdefault(each, set()).add(path)
        if mark.kind == "neurons" and mark.after is not None and layer_of(mark.after[0]) == layer_of(path):
            self._hidden.add(mark.after)
        if mark.kind == "neurons" and mark.is_stream:
            self._of_stream.add((path, self.calls[path]))
        index = mark.index.reshape(-1, x.shape[-1])
        index = index if len(index) else mark.index.new_zeros(1, x.shape[-1])  # an expert that no token was sent to
        entered = self._entered.get(path)
        kind: Any = mark.kind
        size, first = 1, index[0]
        if kind == "heads":
            index = index - max(int(first.min()), 0)  # as where each head has a linear layer of its own
            size = max(int((index[0] == 0).sum()), 1)
            first = torch.arange(len(first), device=index.device) // size  # one head after another
        if entered is None or not _is_same(x, entered) or PICKED in vars(x):
            self.inside.setdefault(kind, path)
            self._inside += [(path, out.shape[-1])] if kind == "neurons" else []
            if kind == "heads":
                self._strewn.setdefault(mark.path, path)
        elif torch.equal(index, first.expand_as(index)):
            place = Place(0, path, "input", kind, x.shape[-1] // size, size, call=self.calls[path])
            self._saw(place, out.shape[-1], x.shape.numel() // x.shape[-1])
            if kind == "heads" and self._running:
                self._ordered_heads.setdefault(mark.path, []).append((path, out.shape[-1], self._running[-1]))
        elif kind == "heads" and int(index.min()) >= 0:
            self._strewn.setdefault(mark.path, path)

    def _reads(self, name: str, args: Sequence[Any], marks: Sequence[_Mark | None]) -> None:
        """An operation of units, which a module that is given them does beside its linear layer, as adapters do that
        scale them first or sum parts of them."""
        path = self._here()
        for x, mark in zip(args, marks, strict=True):
            if mark is not None and mark.kind in ("neurons", "heads"):
                for each in self._given_units(path, x, mark):
                    self._readers.setdefault(each, set()).add(f"{path} {name}")

    def _given_units(self, path: str, x: Tensor, mark: _Mark) -> Iterator[tuple[str, int]]:
        """A module of a layer and those that hold it, where they are given some units, the innermost first."""
        layer = layer_of(path)
        while layer is not None and len(path) > len(layer.path):
            its = _mark_of(given := self._entered.get(path))
            if its is mark or (its is not None and its.kind == mark.kind and storage_of(given) == storage_of(x)):
                yield path, self.calls[path]  # also in another precision, or in another shape
            path = path.rpartition(".")[0]

    def _whole(self, place: Place) -> Place:
        """The module that is given some units where several layers in it read them, as a matrix and its adapter do; or
        may do, where the adapter is off; peft's own, which may change what the matrix gives (RoAd), in any case."""
        around = self._around[place.path, place.call]
        wraps = [each for each in reversed(around) if each in self._wraps] or [(place.path, place.call)]
        shared = (each for each in around if each[0] in self._adapted or len(self._readers[each]) > 1)
        path, call = next(shared, wraps[0])
        return replace(place, path=path, call=call)

    def _features(self, kind: Kind, mark: _Mark | None) -> None:
        if mark is None or mark.kind != "linear" or layer_of(mark.path) is None:
            return
        for call in mark.calls:
            self._features_in(kind, mark, call)

    def _features_in(self, kind: Kind, mark: _Mark, call: int) -> None:
        made = self._made_in[mark.path, call]
        self._read.setdefault((mark.path, call), []).append(made)
        if not self._running:
            self._homeless.setdefault(kind, (mark.path, 0))
            return
        layer = self._running[-1]
        at, indices = self._parts.setdefault((kind, mark.path, call, layer), (len(self._seen), []))
        indices.append(mark.index)
        mixed = self._mixed.get(mark.path, {})
        columns = tuple(sorted(_among(indices, mixed)))
        all_of_them = len(columns) == made.shape[-1]
        place = Place(0, mark.path, "output", kind, len(columns), 1, None if all_of_them else columns, call)
        self._seen[at : at + 1] = [(replace(place, heads=_heads_of(indices, columns, mixed)), 0, 0, layer)]

    def _note_unknown(self, kind: Kind, x: Any) -> None:
        """Note of what attention is given of the input that is not seen to be one linear layer's, as values to which
        those of another layer were added."""
        mark = _mark_of(x)
        if any_carries(x) and (mark is None or mark.kind != "linear"):
            self.unknown.setdefault(kind, self._here())

    def _rearranged(
        self, call: Call, name: str, marks: list[_Mark | None], out: Any, proceed: Callable[..., Any]
    ) -> Any:
        mark, names = marks[0] if marks else None, {name, call.name}
        gate = call.operation.gate if call.operation else None
        several = isinstance(out, (tuple, list))
        if mark is None or not (several or isinstance(out, Tensor)) or not (names & REARRANGES or gate):
            return out
        index = self._moved(mark.index, call, proceed)
        if index is None:
            return out
        pairs = zip(out, index, strict=True) if several else [(out, index)]
        for each, its in pairs:
            if isinstance(its, Tensor):
                gone = mark if mark.kind == "linear" else replace(mark, is_scaled=False)
                _with(each, replace(gone, index=its, after=None, is_stream=False))
        return out

    def _joined(self, marks: list[_Mark | None], call: Call, out: Tensor, proceed: Callable[..., Any]) -> Tensor:
        known = [mark for mark in marks if mark is not None]
        kinds, paths = {mark.kind for mark in known}, {mark.path for mark in known}
        calls = _calls_of(known)
        given: list[Any] = [None if mark is None else mark.index for mark in marks]
        if kinds == {"scores"}:  # a sink, which is learned, stands beside those of the keys
            each = [x for x in call.args[0] if x.numel()]
            given = [
                _nobody(x) if its is None and not any_carries(x) else its for x, its in zip(each, given, strict=True)
            ]
        if any(its is None for its in given) or len(kinds) > 1 or (len(paths) > 1 and kinds != {"heads"}):
            return out
        if kinds == {"heads"} and len(paths) == len(known):
            is_beside = out.ndim > given[0].ndim or sum(each.shape[-1] for each in given) == out.shape[-1]
            if is_beside:  # each head is an attention of its own
                begins = [0, *accumulate(int(each.max()) + 1 for each in given)]
                given = [each + begin for each, begin in zip(given, begins, strict=False)]
        index = self._moved(given, call, proceed)
        if index is None:
            return out
        self._join(known)
        counts = {len(mark.made_of) for mark in known}
        pairs = zip(*(mark.made_of for mark in known), strict=True) if len(counts) == 1 else ()
        made_of = tuple((_stacked([q for q, _ in each]), _stacked([k for _, k in each])) for each in pairs)
        if any(self._unread.pop(pair, None) for mark in known for pair in mark.made_of):
            self._await(made_of)
        return _with(out, _Mark(known[0].kind, index, known[0].path, made_of, calls=calls))

    def _join(self, marks: Sequence[_Mark]) -> None:
        """Note that the heads of several attentions go on as those of the first."""
        for mark in marks:
            if mark.kind == "heads" and self._whole_of(mark.path) != self._whole_of(marks[0].path):
                self._part_of[self._whole_of(mark.path)] = self._whole_of(marks[0].path)

    def _whole_of(self, attention: str) -> str:
        while attention in self._part_of:
            attention = self._part_of[attention]
        return attention

    @staticmethod
    def _moved(index: Any, call: Call, proceed: Callable[..., Any]) -> Any:
        """The numbers where the call puts them; None where it cannot take them."""
        try:
            return proceed((index, *call.args[1:]), call.kwargs)
        except RuntimeError:  # as a view of what lies otherwise in memory
            return None

    def _kept(self, name: str, args: Sequence[Any], marks: Sequence[_Mark | None], out: Tensor, kind: str) -> Tensor:
        """The mark that goes on where numbers stay in their places."""
        known = [mark for mark in marks if mark is not None and mark.index.shape == out.shape]
        if not known:
            return out
        best = _merged(min(known, key=lambda mark: RANKS.index(mark.kind)), known)
        ends = name in ("add", "sub", "rsub") or (name in ("lerp", "addcmul", "addcdiv") and any_carries(args[0]))
        own = best.kind == "linear" and any(_is_alone(x, best.path) for x in args)  # as in a norm that is written out
        alike = [mark for mark in known if mark.kind == best.kind == "heads" and torch.equal(mark.index, best.index)]
        self._join(alike)
        others = any(
            any_carries(x)
            and (mark is None or (mark.kind, mark.path, mark.calls) != (best.kind, best.path, best.calls))
            and mark not in alike
            and not (own and _is_alone(x, best.path))
            for x, mark in zip(args, marks, strict=True)
        )
        if ends and others:
            self._met |= {(mark.path, call) for mark in known if mark.kind == "linear" for call in mark.calls}
        if ends and name.startswith(("lerp", "addc")) and all(map(any_carries, args[1 + (name == "lerp") :])):
            self._gated |= {(mark.path, self._linears[mark.path]) for mark in self._branches(known)}
        for mark in known if ends and (others or best.kind == "neurons") else ():
            if (branch := self._branch(mark)) is not None:
                self._note(branch, mark)
        if others and best.kind != "scores" and (ends or (kind == "plain" and best.kind == "linear")):
            return out  # but scores, to which a bias that is learned may be added
        if ends and best.kind == "neurons" and len(known) > 1 and any(mark.is_scaled for mark in known):
            return out  # a stream that a gate lets through, σ(g) y + (1 − σ(g)) x
        for other in known if ends and best.kind == "linear" else ():
            for one, its in {*zip(best.index.flatten().tolist(), other.index.flatten().tolist(), strict=True)}:
                self._mixed.setdefault(best.path, {}).setdefault(one, {one}).add(its)
        if kind == "product":
            self._gate(args, marks)
        if best.kind == "neurons":
            gated = next(self._branches(known), None) if kind == "product" else None
            if gated is not None:
                best = replace(best, scales=(gated.path, self._linears[gated.path]), norms=gated.norms)
            if gated is not None or (kind == "product" and others and best.scales is not None):
                best = replace(best, gates=(gated or best).gates + 1)
            is_scaled = kind == "product" and any(
                any_carries(x) and mark is None for x, mark in zip(args, marks, strict=True)
            )
        else:
            is_norm = kind == "norm" and name != "div"
            is_scaled = best.kind == "linear" and (is_norm or others or own) and kind in ("norm", "product")
        if not is_scaled:
            return _with(out, best)
        if best.kind == "linear":
            is_norm = own or (kind == "norm" and name != "div")
            best = replace(best, norms=best.norms + is_norm, gates=best.gates + (not is_norm))
        return _with(out, replace(best, is_scaled=True))

    def _branches(self, marks: Iterable[_Mark]) -> Iterator[_Mark]:
        """Those that are what a linear layer of units gives."""
        return (
            mark for mark in marks if mark.kind == "linear" and any(is_in(path, mark.path) for path, _ in self._units)
        )

    def _go_on(self, call: Call, given: Sequence[tuple[Tensor, _Mark | None, frozenset[Any]]], out: Any) -> None:
        """Which branches a tensor in a layer is made of, until they meet the stream, or another, in a sum; and note of
        those that are multiplied by what depends on the input, or go through a norm, where no mark says so."""
        row, branches = call.operation, frozenset[tuple[str, int]]().union(*(each for _, _, each in given))
        if row is None or row.kind in ("linear", "convolution"):
            return
        made = [x for x in tensors_in(out) if any_carries(x)]
        for x in made:
            vars(x).pop(JOINED, None)
        is_norm = row.kind == "norm" and row.gate == "joins"
        several = row.name == "glu" or (len(given) > 1 and row.kind in ("product", "matmul", "norm") and not is_norm)
        if row.name == "lerp" and not any(map(any_carries, [*call.args[2:], call.kwargs.get("weight")])):
            return  # a sum
        moves = row.gate == "moves" or call.name in REARRANGES
        goes_on = several or is_norm or moves or row.kind in ("plain", "product") or row.name == "div"
        if not (branches and made and goes_on and self._running):
            return
        if not (several or moves) and (not all(each for _, _, each in given) or _adds_stream(call)):
            return
        key = " + ".join(sorted({path for path, _ in branches}))
        lost = branches - {self._branch(mark) for x in made if (mark := _mark_of(x)) is not None}
        if several and (row.name == "glu" or sum(_is_alone(x, key) for x, _, _ in given) < len(given) - 1):
            self._gated |= lost
        elif several or is_norm:
            self._normed |= lost
        for _, mark, _ in given:
            branch = None if mark is None else self._branch(mark)
            if mark is not None and branch is not None and branch in lost:
                self._note(branch, mark)
        if row.name in ("lerp", "addcmul", "addcdiv"):
            return
        for x in made:
            setattr(x, JOINED, branches)
            if len(branches) > 1:
                setattr(x, ALONE, key)

    def _is_whole(self, path: str, mark: _Mark) -> bool:
        """Whether what a mark is of has a branch's features, all of them, in their order."""
        wide = self._made[path].shape[-1] if path in self._made else -1
        return mark.index.shape[-1] == wide and bool((mark.index == _along(mark.index, -1)).all())

    def _note(self, branch: tuple[str, int], mark: _Mark) -> None:
        """Note of a branch what it went through that no module gives."""
        _, last = self._scaled.get(branch, (None, None))
        self._normed |= {branch} if mark.norms > (last.norms if last else 0) else set()
        self._gated |= {branch} if mark.gates > (last.gates if last else 0) else set()

    def _branch(self, mark: _Mark) -> tuple[str, int] | None:
        """The linear layer, and which call of it, that gave what norms or gates have scaled since."""
        if mark.kind == "linear" and mark.is_scaled and mark.path in self._linears:
            return mark.path, self._linears[mark.path]
        return mark.scales if mark.kind == "neurons" else None

    def _gate(self, args: Sequence[Any], marks: Sequence[_Mark | None]) -> None:
        """Note of linear layers all of whose output, as numbers from 0 to 1, is a factor of as many features."""
        for x, mark in zip(args, marks, strict=True):
            if mark is None or mark.kind != "neurons" or mark.path not in self._linears:
                continue
            wide = self._made[mark.path].shape[-1]
            others = [other for other, its in zip(args, marks, strict=True) if its is None or its.path != mark.path]
            if any(any_carries(each) and each.shape[-1:] == x.shape[-1:] == (wide,) for each in others):
                self._gates.add((mark.path, self._linears[mark.path]))

    # -------------------------------------------------------------------- result

    def found(self) -> Iterator[Place]:
        """The places, those of no layer and of another width than their layer's left out."""
        places = list(self._found())
        known = {(place.path, place.side) for place in places}
        layers = dict.fromkeys(path for path, _ in self._rows)
        for place in places:
            own = layer_of(place.path)
            if own is None or own.path == place.path or place.path not in self._made:  # a list of matrices, or several
                continue
            for path in (layer + place.path[len(own.path) :] for layer in layers if stack_of(layer) == place.stack):
                if self._own.get(path) == path and (path, place.side) not in known and path not in self._constant:
                    self.unlike.setdefault(place.kind, path)
        return iter(places)

    def _found(self) -> Iterator[Place]:
        numbers = self._numbers()
        ordered = {*map(self._whole_of, filter(self._is_of_layer, self._ordered_heads))}
        lost = {attention: home for attention, home in self._homes.items() if self._whole_of(attention) not in ordered}
        layers = {layer_of(path) for each in self._ordered_heads.values() for path, _, _ in each}
        for attention, home in lost.items():
            path = self._strewn.get(attention, home)
            # what stands elsewhere in a layer that has heads may be no attention's of tokens: of a layer's depth, say
            is_own = _is_beside(path, home) or layer_of(path) not in layers
            if is_own and (attention in self._strewn or attention in self._in_layers):
                self.unknown.setdefault("heads", path)
        # a second stream of a layer, to which an attention gives
        apart = [each for each in self._ordered_heads if self._whole_of(each) not in ordered]
        others = {(wide, layer) for each in apart for _, wide, layer in self._ordered_heads[each]}
        for kind in ("heads", *READS) if self._unread else ():
            self.unknown.setdefault(kind, next(iter(self._unread.values())))
        whole = {path for place, _, _, (path, _) in self._seen if place.kind != "residual"}
        done = set()
        widths = {wide for shape in self._rows.values() for wide in _widths(shape)}
        homeless = {kind: path for kind, (path, wide) in self._homeless.items() if wide in widths}
        homeless |= {kind: self._homeless[kind][0] for kind in READS if kind in self._homeless and "heads" in homeless}
        if alone := homeless.get("heads") or homeless.get("neurons"):
            homeless["residual"] = alone  # of the stream behind it nothing is known
        maps = {stack_of(layer[0]) for _, wide, _, layer in self._seen if _is_map(self._rows.get(layer, ()), wide)}
        for place, wide, rows, layer in self._seen:
            if place.kind in homeless:
                self.inside[place.kind] = homeless[place.kind]
                continue
            shape = self._rows.get(layer)
            if shape is None or (place.kind == "residual" and layer[0] not in whole):
                continue
            if place.kind == "residual" and stack_of(layer[0]) in maps:
                continue
            if place.kind == "residual" and layer in self._added:  # a branch, in a list of branches
                self.inside.setdefault("residual", stack_of(layer[0]))
                continue
            given = self._given[layer]
            if wide in _widths(given) and rows == given.numel() // wide:  # a stage may make them wider and fewer
                shape = given
            if wide and wide not in _widths(shape):
                if place.kind == "neurons" and (wide, layer) in others:
                    self._lose(place, wide)
                    self._streams.add(wide)
                continue
            if rows and rows != shape.numel() // wide:  # as of an expert, which is given some of the tokens
                self._lose(place, wide)
                continue
            if place.side == "output" and place.kind != "residual" and not self._is_given(place):
                self._lose(place, wide)
                continue
            at = place.path, place.call
            is_one = sum(is_in(each, layer[0]) for each in self._made) == 1  # a layer that is no more than a matrix
            if place.kind == "neurons" and at in self._of_stream and not is_one:
                continue
            if place.kind in ("neurons", "heads"):
                units = self._units[at]
                place = self._whole(place)
                if any(_is_same(x, units) for (path, _), x in self._units.items() if not is_in(path, place.path)):
                    self._lose(place, wide)
                    continue
            if place.kind == "neurons" and at in self._gates:
                continue
            each = [replace(place, layer=numbers[layer], calls=self.calls[place.path], stack=stack_of(layer[0]))]
            if place.kind == "heads" or (place.kind == "neurons" and at not in self._hidden - self._met):
                branch: Kind = "mlp" if place.kind == "neurons" else "attention"
                at = place.path, place.call
                its = replace(each[0], side="output", kind=branch, width=1, size=wide)
                each.append(replace(its, is_normed=at in self._normed, is_gated=at in self._gated))
                if at in self._scaled:
                    (path, call), _ = self._scaled[at]
                    given_by = replace(each[1], path=path, call=call, calls=self.calls[path])
                    each[1] = replace(each[1], behind=self._turned(given_by))
            for one in each:
                if one not in done:  # keys that several heads read
                    done.add(one)
                    yield self._turned(one)

    def _is_of_layer(self, attention: str) -> bool:
        """Whether some matrix that takes an attention's heads side by side gives what is as wide as their layer."""
        each = self._ordered_heads[attention]
        return any(wide in self._widths_of(layer) for _, wide, layer in each)

    def _widths_of(self, layer: tuple[str, int]) -> set[int]:
        """How wide what a layer takes or gives may be."""
        return {*_widths(self._given[layer]), *_widths(self._rows.get(layer, self._given[layer]))}

    def _lose(self, place: Place, wide: int) -> None:
        """Note of units that no module takes or gives for all tokens, so that the others alone are none of a kind."""
        self.inside.setdefault(place.kind, place.path)
        if place.kind == "neurons":
            self._inside.append((place.path, wide))
        else:
            self.unknown.setdefault(place.kind, place.path)

    def _turned(self, place: Place) -> Place:
        at = place.path, place.side
        return replace(place, turned=at in self.turned, apart=self.apart.get(at, 0))

    def _is_given(self, place: Place) -> bool:
        """Whether a module gives what was read: torch's attention makes queries, keys and values inside, and gives
        another product."""
        at = place.path, place.call
        return place.path in self._gives and all(each is self._products.get(at) for each in self._read.get(at, ()))

    def experts(self, known: Collection[str]) -> tuple[str, ...]:
        """Where neurons are computed that no module takes or gives for all tokens, and what they give is as wide as
        their layer, or a second stream of it, or as the embeddings, of which hyper-connections make a wider stream; but
        for paths at which others are known."""
        widths = {wide for shape in self._rows.values() for wide in _widths(shape)} | self._embedded | self._streams
        return tuple({path: None for path, wide in self._inside if wide in widths and path not in known})

    def _numbers(self) -> dict[tuple[str, int], int]:
        """The number of each layer's call: the layer's own; of a list whose layers run several times, of the run."""
        again = {stack_of(path) for path, call in self._rows if call}
        runs: Counter[str] = Counter()
        found = {}
        for path, call in self._rows:
            layer, stack = layer_of(path), stack_of(path)
            assert layer is not None
            found[path, call] = runs[stack] if stack in again else layer.number
            runs[stack] += 1
        return found


def _adds_stream(call: Call) -> bool:
    """Whether a sum is that with a stream that does not depend on the input, as a decoder's first queries."""
    is_sum = call.operation is not None and call.operation.name in ("add", "sub", "rsub")
    return is_sum and any(x.ndim > 1 and not any_carries(x) for x in tensors_in(call.args))


def _is_further(mark: _Mark, other: _Mark) -> bool:
    """Whether a branch went through more than when it was another's."""
    return mark.norms > other.norms or mark.gates > other.gates


def _is_beside(path: str, home: str) -> bool:
    """Whether a matrix stands in the module in which an attention was computed, or with it in a module of a layer, as
    beside a core that has no weights."""
    layer = layer_of(path)
    depth = 0 if layer is None else layer.path.count(".") + 2
    return is_in(path, home) or is_in(home, ".".join(path.split(".")[:depth]))


def _widths(shape: Sequence[int]) -> set[int]:
    """How many features what a layer takes or gives may have: of a map ``[B, d, H, W]`` they are the second dimension,
    and of ``[B, H, W, d]`` the last."""
    return {shape[-1], shape[1]} if len(shape) == 4 else {shape[-1]}


def _is_map(shape: Sequence[int], wide: int) -> bool:
    """Whether what a layer gives, with a branch of such a width in it, is ``[B, d, H, W]``."""
    return len(shape) == 4 and wide == shape[1] != shape[-1]


def _keep_alone(call: Call, out: Any) -> None:
    """Note of what a call gives of what linear layer's output alone it was computed, if it was."""
    given = [
        vars(x).get(ALONE) for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor) and any_carries(x)
    ]
    if given and given[0] is not None and len({*given}) == 1:
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor) and any_carries(each):
                setattr(each, ALONE, given[0])


def _is_alone(x: Any, path: str) -> bool:
    """Whether a tensor is a number for each token, computed of what this linear layer gives alone."""
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[-1] == 1 and vars(x).get(ALONE) == path


def _merged(mark: _Mark | None, others: Iterable[_Mark | None]) -> Any:
    """Scores, or weights, that were made of what others were made of, too."""
    if mark is None or mark.kind not in ("scores", "weights"):
        return mark
    made_of = [pair for each in (mark, *others) if each is not None for pair in each.made_of]
    return replace(mark, made_of=tuple(dict.fromkeys(made_of)))


def _weights(x: Tensor, mark: _Mark | None) -> _Pairs | None:
    """The queries and keys of what multiplies values ``[…, Q, K]``, as far as they are known; None where it is no
    weights. Those are a softmax, be it torch's or known by its numbers alone, or scores that none was taken of; a sink
    has the rest of one."""
    if mark is not None and mark.kind == "weights":
        return mark.made_of
    if mark is not None and mark.kind == "scores":
        return _queries_first(mark, -1)
    with torch._C.DisableTorchFunction():
        each = x.detach()
        is_one = x.ndim > 2 and x.shape[-1] > 1 and bool((each >= 0).all())
        sums = each.sum(-1)
        return () if is_one and bool(((sums > 0) & (sums < 1 + 1e-3)).all()) else None


def _is_turned_over(mark: _Mark) -> bool:
    """Whether these are weights whose keys are the last dimension but one, as in ``v.mT @ p.mT``."""
    keys = mark.index.movedim(-2, 0)
    return mark.kind == "weights" and len(keys) > 1 and bool((keys[1:] != keys[:-1]).all())


def _stacked(marks: Sequence[_Mark | None]) -> _Mark | None:
    """The queries, or the keys, of several heads' scores, which are parts of what one linear layer gives."""
    known = [mark for mark in marks if mark is not None]
    kinds = {(mark.kind, mark.path, mark.index.shape) for mark in known}
    if len(known) < len(marks) or len(kinds) > 1:
        return None
    return replace(known[0], index=torch.stack([mark.index for mark in known]), calls=_calls_of(known))


def _calls_of(marks: Sequence[_Mark]) -> tuple[int, ...]:
    """Those of any of these."""
    return tuple(sorted({call for mark in marks for call in mark.calls}))


def _queries_first(scores: _Mark | None, dim: Any) -> _Pairs:
    """The queries and keys of scores that a softmax is taken of, which is over the keys, whichever came first."""
    if scores is None or scores.kind != "scores":
        return ()
    numbers = scores.index.movedim(-1 if dim is None else int(dim), 0)
    if len(numbers) == 1 or bool((numbers[1:] != numbers[:-1]).any()):
        return scores.made_of
    return tuple((columns, rows) for rows, columns in scores.made_of)


def _ordered(mark: _Mark | None, label: str, first: Sequence[str]) -> _Mark | None:
    """What is known of a factor of an ``einsum``, with the indices first that it shares."""
    if mark is None:
        return None
    order = [*first, *(letter for letter in label if letter not in first)]
    return replace(mark, index=mark.index.permute([label.index(letter) for letter in order]))


def _among(indices: Sequence[Tensor], mixed: Mapping[int, set[int]]) -> set[int]:
    """The features in some indices, and those that were added to them."""
    return {i for index in indices for each in {*index.flatten().tolist()} for i in mixed.get(each, (each,))}


def _heads_of(indices: Sequence[Tensor], columns: Sequence[int], mixed: Mapping[int, set[int]]) -> int:
    """Of how many heads some features are: each index ``[…, H, T, n]`` or ``[…, H, n, T]`` says which stand where."""
    blocks = [block for index in indices for block in index.reshape(-1, *index.shape[-2:])]
    each = list(dict.fromkeys(tuple(sorted(_among([one], mixed))) for one in blocks))
    return len(each) if [i for one in each for i in one] == list(columns) and len({*map(len, each)}) == 1 else 0


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two are one, but for how many dimensions there are before the last."""
    return one.numel() == other.numel() and one.shape[-1] == other.shape[-1] and one.data_ptr() == other.data_ptr()


def _is_there(x: Any, other: Tensor) -> bool:
    """Whether an argument is a tensor that is the same as another."""
    return isinstance(x, Tensor) and x.ndim > 0 and _is_same(x, other)


def _is_turned(call: Call, out: Any) -> bool:
    """Whether a call brings the tokens before the rows, of which there is one, or computes with such a tensor."""
    if not isinstance(out, Tensor) or out.ndim not in (2, 3) or not any_carries(out) or not call.args:
        return False
    if out.ndim == 3 and not len(out) > out.shape[1] == 1:
        return False
    x = call.args[0]
    if call.name in TURNS and isinstance(x, Tensor) and out.ndim == 3:
        return x.shape[:2] == (1, len(out))
    return any(isinstance(x, Tensor) and TURNED in vars(x) and len(x) == len(out) for x in call.args)


def _is_picked(call: Call, out: Any) -> bool:
    """Whether a call picks rows among the tokens by their numbers, or computes with such rows.

    Those that a mask picks, or a slice, stay in order: of these there are as many as tokens where they are all.
    """
    if not isinstance(out, Tensor) or out.ndim != 2 or not any_carries(out) or not call.args:
        return False
    if any(isinstance(x, Tensor) and PICKED in vars(x) and len(x) == len(out) for x in call.args):
        return not call.name.startswith(PUTS) or call.name in PICKS
    x = call.args[0]
    if call.name not in PICKS or not isinstance(x, Tensor) or not any_carries(x) or x.ndim < 2:
        return False
    given = [*call.args[1:], *call.kwargs.values()]
    if call.name == "__getitem__":
        given = list(given[0][: x.ndim - 1]) if isinstance(given[0], tuple) else given
    elif 0 not in [each for each in given if isinstance(each, int)]:
        return False
    return any(
        isinstance(each, Tensor) and each.ndim > 0 and each.dtype in (torch.int32, torch.int64) for each in given
    )


def _is_list(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], (list, tuple)) and all(isinstance(x, Tensor) for x in args[0])


def _guards(call: Call) -> bool:
    """Whether a clamp leaves alone what is near 0, as one that keeps half precision from overflowing, or queries small,
    or keeps lengths from 0, as ``F.normalize`` does. It makes no neurons, as one from 0 up does, which is a ReLU."""
    names = ("max",) if call.name.startswith("clamp_max") else ("min", "max")
    given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
    low, high = given.get("min"), given.get("max")
    return (low is None or bool(torch.as_tensor(low != 0).all())) and (
        high is None or bool(torch.as_tensor(high > 0).all())
    )


def _is_share(x: Tensor) -> bool:
    """Whether all numbers are from 0 to 1, as a sigmoid's are."""
    with torch._C.DisableTorchFunction():
        return bool(((x >= 0) & (x <= 1)).all())


def _is_weight(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and not any_carries(x)
