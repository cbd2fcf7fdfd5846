"""What a pass has shown of a model's modules, and the places of units that it tells of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lrpx._modules import layer_of
from lrpx.units._place import READS, Kind, Place, is_in, stack_of
from lrpx.units._traits import is_same

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from lrpx.engine._places import Side
    from lrpx.units._marks import Mark


class Seen:
    """What one forward pass has shown, as it is noted, and what it comes to in the end.

    Args:
        own: of each module's path the first of that module.
        adapted: the paths of those that adapters were put around.
    """

    def __init__(self, own: Mapping[str, str], adapted: Collection[str] = ()) -> None:
        self._own = own
        self._adapted = adapted
        self.calls: Counter[str] = Counter()
        self._made: dict[str, Tensor] = {}
        self._made_in: dict[tuple[str, int], Tensor] = {}  # the same, of each call
        self._gives: set[str] = set()
        self._products: dict[tuple[str, int], Tensor] = {}  # which a module's call has given
        self._read: dict[tuple[str, int], list[Tensor]] = {}  # of which attention has read a part
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
        self._scaled: dict[tuple[str, int], tuple[tuple[str, int], Mark]] = {}  # what gives that behind norms, gates
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
        for place, wide, _, layer in self._seen:  # in a layer that gives no tensor itself, as a pair for each stream
            if layer not in self._rows and (place.kind in READS or wide in _widths(self._given[layer])):
                homeless.setdefault(place.kind, place.path)
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
                if any(is_same(x, units) for (path, _), x in self._units.items() if not is_in(path, place.path)):
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

    def _whole(self, place: Place) -> Place:
        """The module that is given some units where several layers in it read them, as a matrix and its adapter do; or
        may do, where the adapter is off; peft's own, which may change what the matrix gives (RoAd), in any case."""
        around = self._around[place.path, place.call]
        wraps = [each for each in reversed(around) if each in self._wraps] or [(place.path, place.call)]
        shared = (each for each in around if each[0] in self._adapted or len(self._readers[each]) > 1)
        path, call = next(shared, wraps[0])
        return replace(place, path=path, call=call)

    def _whole_of(self, attention: str) -> str:
        while attention in self._part_of:
            attention = self._part_of[attention]
        return attention

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
