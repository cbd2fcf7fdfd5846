"""Follows what a model's torch functions make through one pass, and so finds its units.

What a non-linearity gives and a second matrix takes back to the width of the layer are latent neurons; what softmax
attention gives, head beside head, to an output projection are heads.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx._modules import layer_of
from lrpx.engine import Tap
from lrpx.engine._book import storage_of
from lrpx.engine._tensors import any_carries, spelled, tensors_in
from lrpx.units._branches import Branches
from lrpx.units._marks import (
    ATTRIBUTE,
    RANKS,
    Mark,
    calls_of_marks,
    features_of,
    heads_of,
    is_equal_along,
    is_further,
    is_turned_over,
    mark_of,
    marked,
    merged,
    numbers_along,
    numbers_between,
    numbers_of_nobody,
    ordered,
    queries_first,
    read_with,
    stacked,
)
from lrpx.units._operations import CASTS, PRODUCTS, REARRANGES, guards, is_list, is_share, is_weight, picks, turns
from lrpx.units._place import READS, Kind, Place, is_in
from lrpx.units._traits import ALONE, JOINED, LEARNED, PICKED, TURNED, is_alone, is_same, is_there, keep_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from lrpx.engine import Call, Running
    from lrpx.engine._places import Side
    from lrpx.rules import Rule
    from lrpx.units._marks import Pairs


class Follower(Branches, Tap):
    """Follows what torch functions make, through one forward pass."""

    patterns = ("*",)

    def __init__(self, own: Mapping[str, str], weights: Iterable[int], adapted: Collection[str] = ()) -> None:
        super().__init__(own, adapted)
        self._inner: dict[str, list[str]] = {}  # of each module the names of those in it
        for each in own:
            holder, _, name = each.rpartition(".")
            self._inner.setdefault(holder, []).append(name)
        self._weights = set(weights) - {0}  # where they lie
        self._run: Running
        self._entered: dict[str, Tensor] = {}
        self._attentions = 0
        self._parts: dict[tuple[Kind, str, int, tuple[str, int]], tuple[int, list[Tensor]]] = {}  # where it is seen
        self._mixed: dict[str, dict[int, set[int]]] = {}  # of a module's features, with which others one was summed

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
                if (mark := mark_of(value)) is not None:
                    marked(value, replace(mark, is_stream=True))
                self._running.append((path, self.calls[path]))
                self._given[path, self.calls[path]] = value.shape
                self._embedded |= {source.value.shape[-1] for source in self._run.sources[:1]}
            return
        self._beside(path, value)
        made = self._made.get(path)
        if made is not None and is_same(made, value):
            self._gives.add(path)
            self._products[path, self.calls[path]] = made
        mark = mark_of(value)
        if mark is not None and (branch := self._branch(mark)) is not None:
            _, last = self._scaled.get(branch, (None, None))
            is_next = last is None or (layer_of(path) == layer_of(branch[0]) and is_further(mark, last))
            if is_next and self._is_whole(branch[0], mark):
                self._scaled[branch] = (path, self.calls[path]), mark
        at = path, self.calls[path]
        if any(each in self._made and is_same(self._made[each], value) for each in self._readers.get(at, ())):
            self._wraps.add(at)
        if is_layer and (path, self.calls[path]) in self._running:
            call = self.calls[path]
            self._rows[path, call] = value.shape
            self._saw(Place(0, path, "output", "residual", 1, value.shape[-1], call=call))
            self._running.remove((path, call))
            if any(is_in(each, path) and is_same(self._made[each], value) for each, _ in self._units):
                self._ended[path, call] = value
        self.calls[path] += 1

    def _beside(self, path: str, value: Tensor) -> None:
        """What a module makes of its input by a linear layer in it, and perhaps an adapter beside that, is linear: also
        where the adapter is off."""
        given, mark = self._entered.get(path), mark_of(value)
        if given is None or not any_carries(value):
            return
        for child in (f"{path}.{name}" for name in self._inner.get(path, ())):
            made, its = self._made.get(child), self._entered.get(child)
            if made is None or its is None or not is_same(its, given):
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
        return marked(value, Mark("linear", numbers_along(value, -1), path, calls=(call,)))

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
            (x, mark_of(x), vars(x).get(JOINED, frozenset()))  # before what is changed in place
            for x in tensors_in((*call.args, *call.kwargs.values()))
            if any_carries(x)
        ]
        out = self._followed(call, proceed)
        self._go_on(call, given, out)
        return out

    def _followed(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        args, row = call.args, call.operation
        name = call.name if row is None else row.name
        marks = [mark_of(x) for x in args]  # before what is changed in place
        lists = [mark_of(x) for x in args[0] if x.numel()] if is_list(args[:1]) else []  # a cache may be empty
        out = proceed(args, call.kwargs)
        if self._running and picks(call, out):
            setattr(out, PICKED, True)
        if turns(call, out):
            setattr(out, TURNED, True)
        keep_alone(call, out)
        if row is None or not args:
            return out
        moves = row.gate == "moves" or call.name in REARRANGES
        is_linear = name in ("linear", "addmm") or (name == "matmul" and is_weight(args[1]))
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
            self._product(two, [mark_of(x) for x in two], out)
            return marked(out, merged(mark_of(out), [marks[0]])) if name == "baddbmm" else out
        if name == "softmax":
            given = dict(zip(("input", "dim"), args, strict=False)) | call.kwargs
            dim = given.get("dim")
            made_of = queries_first(marks[0], dim)
            if not any_carries(out):
                return out
            self._await(made_of)
            along = numbers_along(out, -1 if dim is None else int(dim) % out.ndim - out.ndim)
            return marked(out, Mark("weights", along, made_of=made_of))
        if name == "clamp" and guards(call):
            vars(out).pop(ATTRIBUTE, None)
            return marked(out, marks[0])
        if call.name == "glu" and any_carries(out):
            given = dict(zip(("input", "dim"), args, strict=False)) | call.kwargs
            return marked(out, Mark("neurons", numbers_along(out, int(given.get("dim", -1)) % out.ndim - out.ndim)))
        if row.kind == "activation":
            if marks[0] is not None and marks[0].kind == "scores":  # as where they are kept between bounds
                return marked(out, marks[0])
            return self._activated(args[0], marks[0], out)
        if moves:
            if call.name in CASTS:
                return marked(out, marks[0])
            if lists:
                return self._joined(lists, call, out, proceed)
            return self._rearranged(call, name, marks, out, proceed)
        if name == "add" and not self._running:
            self._added |= {at for at, x in self._ended.items() for arg in args if is_there(arg, x)}
        if row.kind in ("plain", "norm", "product") and name != "cumsum":
            return self._kept(name, args, marks, out, row.kind)
        return out

    def rule(
        self, kind: str, rule: Rule, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        """An activation that is run as one function is seen here alone."""
        out = proceed(*inputs)
        return self._activated(inputs[0], mark_of(inputs[0]), out) if kind == "activation" else out

    def _activated(self, x: Any, mark: Mark | None, out: Tensor) -> Tensor:
        is_one = any_carries(out) and out.ndim > 1 and isinstance(x, Tensor) and out.shape == x.shape
        if not is_one:
            return out
        if mark is not None and mark.kind == "heads":  # before their matrix: they are units of neither kind then
            return out
        if mark is None or mark.kind != "linear":
            return marked(out, Mark("neurons", numbers_along(out, -1) if mark is None else mark.index))
        after = (mark.path, self._linears[mark.path]) if mark.path in self._linears else None
        return marked(out, Mark("neurons", mark.index, mark.path if is_share(out) else "", after=after))

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        for kind, name in zip(READS, ("query", "key", "value"), strict=True):
            self._features(kind, mark_of(given[name]))
            self._note_unknown(kind, given[name])
        return self._heads(out, numbers_between(out)) if out.ndim > 3 else out

    def _heads(self, out: Tensor, index: Tensor) -> Tensor:
        self._attentions += 1
        name = f"attention {self._attentions}"
        self._homes[name] = self._here()
        if self._is_in_layer(out):
            self._in_layers.add(name)
        return marked(out, Mark("heads", index, name))

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

    def _product(self, args: Sequence[Any], marks: Sequence[Mark | None], out: Tensor) -> Tensor:
        """A product of two that depend on the input: scores, or what attention reads."""
        left, right = marks
        if not all(map(any_carries, args)):
            for mark, other, dim in zip(marks, reversed(args), (-1, -2), strict=True):
                if mark is not None and mark.kind == "neurons":  # the weights of all experts in one tensor
                    self.inside.setdefault("neurons", self._run.where())
                    if self._is_learned(other) and out.ndim > 1:
                        self._inside.append((self._run.where(), out.shape[dim]))
            return out
        made_of = read_with(args[0], left) if out.ndim > 2 else None
        values, its = args[1], right
        if made_of is None and out.ndim > 2 and right is not None and right.made_of and is_turned_over(right):
            made_of, values, its = right.made_of, args[0], left
        if made_of is not None:
            self._attends(made_of, its, out)
            self._note_unknown("values", values)
            heads = numbers_along(out, -3)
            if out.ndim == 3:  # the heads of each row of the batch, one row after another
                heads = heads % (len(out) // self._run.sources[0].value.shape[0])
            return self._heads(out, heads)
        if left is not None and right is not None and {left.kind, right.kind} == {"linear"}:
            return marked(out, Mark("scores", numbers_along(out, -1), made_of=((left, right),)))
        return out

    def _await(self, made_of: Pairs) -> None:
        """Note of a softmax of scores over tokens, in a layer, that something is to be read with it."""
        if self._running:
            self._unread |= dict.fromkeys(made_of, self._here())

    def _attends(self, made_of: Pairs, values: Mark | None, out: Tensor) -> None:
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
        two = given[0] if is_list(given[:1]) else given
        marks = [mark_of(x) for x in two]
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
            made_of = [ordered(marks[i], (left, right)[i], common) for i in (1 - keys, keys)]
            return marked(out, Mark("scores", numbers_along(out, -1), made_of=((made_of[0], made_of[1]),)))
        read = [
            read_with(x, mark) if label[-1] not in result or kind == "weights" else None
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
        self._attends(read[weights] or (), ordered(marks[1 - weights], values, common), out)
        self._note_unknown("values", two[1 - weights])
        index = numbers_along(out, result.index(heads) - len(result))
        if len(label) == 3:  # the heads of each row of the batch, one row after another
            index = index % max(out.shape[result.index(heads)] // self._run.sources[0].value.shape[0], 1)
        return self._heads(out, index)

    def _is_learned(self, x: Any) -> bool:
        """Whether a tensor is a weight of the model, or was chosen of one."""
        return isinstance(x, Tensor) and (LEARNED in vars(x) or storage_of(x) in self._weights)

    def _linear(self, x: Any, mark: Mark | None, out: Tensor) -> Tensor:
        path = self._here()
        self._is_linear(path, out)
        if mark is not None and mark.kind in ("neurons", "heads"):
            self._second(path, x, mark, out)
        setattr(out, ALONE, path)
        if (path, self.calls[path]) in self._units:
            setattr(out, JOINED, frozenset({(path, self.calls[path])}))
        if mark is not None and mark.kind in ("scores", "weights") and is_equal_along(mark.index):
            return marked(out, replace(mark, index=mark.index[..., :1].expand(out.shape)))  # of each head some of all
        return out

    def _second(self, path: str, x: Tensor, mark: Mark, out: Tensor) -> None:
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
        if entered is None or not is_same(x, entered) or PICKED in vars(x):
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

    def _reads(self, name: str, args: Sequence[Any], marks: Sequence[Mark | None]) -> None:
        """An operation of units, which a module that is given them does beside its linear layer, as adapters do that
        scale them first or sum parts of them."""
        path = self._here()
        for x, mark in zip(args, marks, strict=True):
            if mark is not None and mark.kind in ("neurons", "heads"):
                for each in self._given_units(path, x, mark):
                    self._readers.setdefault(each, set()).add(f"{path} {name}")

    def _given_units(self, path: str, x: Tensor, mark: Mark) -> Iterator[tuple[str, int]]:
        """A module of a layer and those that hold it, where they are given some units, the innermost first."""
        layer = layer_of(path)
        while layer is not None and len(path) > len(layer.path):
            its = mark_of(given := self._entered.get(path))
            if its is mark or (its is not None and its.kind == mark.kind and storage_of(given) == storage_of(x)):
                yield path, self.calls[path]  # also in another precision, or in another shape
            path = path.rpartition(".")[0]

    def _features(self, kind: Kind, mark: Mark | None) -> None:
        if mark is None or mark.kind != "linear" or layer_of(mark.path) is None:
            return
        for call in mark.calls:
            self._features_in(kind, mark, call)

    def _features_in(self, kind: Kind, mark: Mark, call: int) -> None:
        made = self._made_in[mark.path, call]
        self._read.setdefault((mark.path, call), []).append(made)
        if not self._running:
            self._homeless.setdefault(kind, (mark.path, 0))
            return
        layer = self._running[-1]
        at, indices = self._parts.setdefault((kind, mark.path, call, layer), (len(self._seen), []))
        indices.append(mark.index)
        mixed = self._mixed.get(mark.path, {})
        columns = tuple(sorted(features_of(indices, mixed)))
        all_of_them = len(columns) == made.shape[-1]
        place = Place(0, mark.path, "output", kind, len(columns), 1, None if all_of_them else columns, call)
        self._seen[at : at + 1] = [(replace(place, heads=heads_of(indices, columns, mixed)), 0, 0, layer)]

    def _note_unknown(self, kind: Kind, x: Any) -> None:
        """Note of what attention is given of the input that is not seen to be one linear layer's, as values to which
        those of another layer were added."""
        mark = mark_of(x)
        if any_carries(x) and (mark is None or mark.kind != "linear"):
            self.unknown.setdefault(kind, self._here())

    def _rearranged(
        self, call: Call, name: str, marks: list[Mark | None], out: Any, proceed: Callable[..., Any]
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
                marked(each, replace(gone, index=its, after=None, is_stream=False))
        return out

    def _joined(self, marks: list[Mark | None], call: Call, out: Tensor, proceed: Callable[..., Any]) -> Tensor:
        known = [mark for mark in marks if mark is not None]
        kinds, paths = {mark.kind for mark in known}, {mark.path for mark in known}
        calls = calls_of_marks(known)
        given: list[Any] = [None if mark is None else mark.index for mark in marks]
        if kinds == {"scores"}:  # a sink, which is learned, stands beside those of the keys
            each = [x for x in call.args[0] if x.numel()]
            given = [
                numbers_of_nobody(x) if its is None and not any_carries(x) else its
                for x, its in zip(each, given, strict=True)
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
        made_of = tuple((stacked([q for q, _ in each]), stacked([k for _, k in each])) for each in pairs)
        if any(self._unread.pop(pair, None) for mark in known for pair in mark.made_of):
            self._await(made_of)
        return marked(out, Mark(known[0].kind, index, known[0].path, made_of, calls=calls))

    def _join(self, marks: Sequence[Mark]) -> None:
        """Note that the heads of several attentions go on as those of the first."""
        for mark in marks:
            if mark.kind == "heads" and self._whole_of(mark.path) != self._whole_of(marks[0].path):
                self._part_of[self._whole_of(mark.path)] = self._whole_of(marks[0].path)

    @staticmethod
    def _moved(index: Any, call: Call, proceed: Callable[..., Any]) -> Any:
        """The numbers where the call puts them; None where it cannot take them."""
        try:
            return proceed((index, *call.args[1:]), call.kwargs)
        except RuntimeError:  # as a view of what lies otherwise in memory
            return None

    def _kept(self, name: str, args: Sequence[Any], marks: Sequence[Mark | None], out: Tensor, kind: str) -> Tensor:
        """The mark that goes on where numbers stay in their places."""
        known = [mark for mark in marks if mark is not None and mark.index.shape == out.shape]
        if not known:
            return out
        best = merged(min(known, key=lambda mark: RANKS.index(mark.kind)), known)
        ends = name in ("add", "sub", "rsub") or (name in ("lerp", "addcmul", "addcdiv") and any_carries(args[0]))
        own = best.kind == "linear" and any(is_alone(x, best.path) for x in args)  # as in a norm that is written out
        alike = [mark for mark in known if mark.kind == best.kind == "heads" and torch.equal(mark.index, best.index)]
        self._join(alike)
        others = any(
            any_carries(x)
            and (mark is None or (mark.kind, mark.path, mark.calls) != (best.kind, best.path, best.calls))
            and mark not in alike
            and not (own and is_alone(x, best.path))
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
            return marked(out, best)
        if best.kind == "linear":
            is_norm = own or (kind == "norm" and name != "div")
            best = replace(best, norms=best.norms + is_norm, gates=best.gates + (not is_norm))
        return marked(out, replace(best, is_scaled=True))
