"""The residual stream of a model as it runs: which modules read it, and which write into it.

Nothing is known by a module's name. One run is watched: the stream is what enters the first layer, and each sum of it
and something else; a module that is given the stream reads it; what is added to it is written by the module that put it
out, on behalf of the branch, attention or MLP, that :mod:`lrpx.units` has found last. What a reader gives to the
matrices of an attention is read once more for each head's queries, keys and values (MIB: Mueller et al. 2025).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lrpx._modules import layer_of
from lrpx.errors import MethodError, ModelError
from lrpx.units import Place, places
from lrpx.units._place import READS, own_paths
from lrpx.units._reading import Called

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine import Call
    from lrpx.engine._places import Side
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.units import Kind

__all__ = ["Reader", "Share", "Wiring", "Writer", "wiring_of"]

ONE: Final = {"queries": "query", "keys": "key", "values": "value"}
CLOSE: Final = 0.01
"""Of the largest, by how much what a matrix gives may differ from what is computed again of the stream before it; in
half precision the order of sums alone makes a hundredth part of that."""


@dataclass(frozen=True)
class Share:
    """One head's queries, keys or values, of what a matrix gives.

    Args:
        place: of all heads of that matrix.
        head: which one; of keys and values that several heads share, which of these.
    """

    place: Place
    head: int

    @property
    def name(self) -> str:
        """What it is called, such as ``"query 3.5"``: of the layer and the head."""
        return f"{ONE[self.place.kind]} {self.place.layer}.{self.head}"

    @property
    def features(self) -> list[int]:
        """Which of the matrix's features it is."""
        size = self.place.width // self.place.heads
        return [i for unit in range(self.head * size, (self.head + 1) * size) for i in self.place.features(unit)]


@dataclass(frozen=True)
class Writer:
    """A module whose output is added to the residual stream.

    Args:
        path: of the module: the last of its branch, perhaps a norm.
        branch: what the branch puts out before that.
        heads: the heads of an attention, at the input of the same matrix.
        call: which call of the module.
    """

    path: str
    branch: Place
    heads: Place | None = None
    call: int = 0


@dataclass(frozen=True)
class Reader:
    """A module that is given the residual stream: the norm before an attention, say, or the one after the last layer.

    Args:
        path: of the module.
        after: how many of the writers have written before it reads.
        call: which call of the module.
        calls: how many calls of it read the stream.
        share: what is read of it; None for all that is no head's queries, keys or values.
    """

    path: str
    after: int
    call: int = 0
    calls: int = 1
    share: Share | None = None

    @property
    def place(self) -> Place:
        """What it is given."""
        return Place(0, self.path, "input", "residual", 1, call=self.call, calls=self.calls)

    @property
    def name(self) -> str:
        """What it is called: a head's share by its own name, all else by the module's path."""
        return self.place.name if self.share is None else self.share.name

    def given(self, module: Module, stream: Tensor) -> Tensor:
        """What the matrix of its share is given where it reads this stream ``[…, d]``."""
        assert self.share is not None
        if f"{self.share.place.path}.".startswith(f"{self.path}."):  # nothing is in between
            return stream
        found: Tensor = module.get_submodule(self.path).forward(stream)
        return found


@dataclass(frozen=True)
class Wiring:
    """How a model's layers are joined by the residual stream.

    Args:
        begin: the path of the first layer, which is given the stream before anything is added to it.
        writers: in the order in which they write.
        readers: in the order in which they read.
    """

    begin: str
    writers: tuple[Writer, ...]
    readers: tuple[Reader, ...]


def wiring_of(model: BoundModel, questions: Questions, *, whole: bool = False) -> Wiring:
    """The wiring of a model, from one run on the first of some questions.

    Args:
        model: the model.
        questions: of the first the model is run.
        whole: whether an attention is one reader, and not each head's queries, keys and values.

    Raises:
        ModelError: it has no layers in a list, or no residual stream that each layer is given and adds to.
        MethodError: it has no attentions or no MLPs that are seen, or no queries, keys and values that can be told
            apart by head.
    """
    both: tuple[Kind, ...] = ("attention", "mlp")
    branches = {(each.path, each.call): each for kind in both for each in places(model.module, kind)}
    heads = {(each.path, each.call): each for each in places(model.module, "heads")}
    matrices = () if whole else _matrices(model.module, list(heads.values()))
    watch = _Watch(model.module, branches, matrices)
    model.values(questions.alone([0]), taps=lambda *_: [watch])
    if watch.lost or not watch.written or len(watch.written) not in {each.after for each in watch.readers}:
        where = f" (in {watch.lost} it is something else)" if watch.lost else ""
        raise ModelError(
            f"{type(model.module).__name__} has no residual stream that every layer is given and adds to{where}, so no "
            "edges can be cut; use a model whose norms stand before its attentions, as GPT-2's or Llama's"
        )
    writers = tuple(
        Writer(path, branch, heads.get((branch.path, branch.call)), call) for path, call, branch in watch.written
    )
    known = {(each.branch.path, each.branch.call) for each in writers}
    missing = next((each for each in branches.values() if (each.path, each.call) not in known), None)
    if missing is not None or len(known) != len(writers):
        named = writers[0].path if missing is None else missing.name
        raise MethodError(f"{named} writes into the residual stream in a way that is not seen; its edges cannot be cut")
    times = Counter(each.path for each in watch.readers)
    readers = [replace(each, calls=times[each.path]) for each in watch.readers]
    return Wiring(watch.layers[0], writers, tuple(_told_apart(readers, matrices, watch)))


def _matrices(module: Module, heads: Sequence[Place]) -> tuple[Place, ...]:
    """What gives queries, keys and values.

    Raises:
        MethodError: they are not found for each attention, are not one head's after another's, or are the same numbers.
    """
    found: list[Place] = []
    for kind in READS:
        try:
            found += places(module, kind)
        except MethodError as error:
            raise _not_told_apart(str(error).partition("; ask for")[0]) from error
    there = {(each.kind, each.stack, each.layer) for each in found}
    for each in heads:
        lost = next((kind for kind in READS if (kind, each.stack, each.layer) not in there), None)
        if lost is not None:
            raise _not_told_apart(f"of the attention before {each.name} no {lost} were found")
    alone: dict[tuple[Kind, str, int], Place] = {}
    for each in found:  # layers may share keys and values
        alone.setdefault((each.kind, each.path, each.call), each)
    taken: set[tuple[str, int, int]] = set()
    for each in alone.values():
        mine = {(each.path, each.call, i) for unit in range(each.width) for i in each.features(unit)}
        if not each.heads or taken & mine:
            raise _not_told_apart(f"the {each.kind} of {each.name} are not one head's after another's, and no other's")
        taken |= mine
    return tuple(alone.values())


def _told_apart(readers: Sequence[Reader], matrices: Sequence[Place], watch: _Watch) -> Iterator[Reader]:
    """The readers, and what of theirs is a head's queries, keys or values.

    Raises:
        MethodError: a matrix is given something else than a reader gives.
    """
    fed = {(each.path, each.call): watch.fed.get((each.path, each.call)) for each in matrices}
    lost = next((each for each in matrices if fed[each.path, each.call] is None), None)
    if lost is not None:
        raise _not_told_apart(f"{lost.name} is given something else than what a norm makes of the residual stream")
    for number, reader in enumerate(readers):
        mine = [each for each in matrices if fed[each.path, each.call] == number]
        for each in mine:
            yield from (replace(reader, share=Share(each, head)) for head in range(each.heads))
        if not mine or number in watch.others:
            yield reader


def _not_told_apart(why: str) -> MethodError:
    return MethodError(
        f"{why}, so its heads' queries, keys and values cannot be told apart; take an attention as one reader: "
        "whole=True"
    )


class _Watch(Called):
    """Watches one run."""

    def __init__(
        self, module: Module, branches: Mapping[tuple[str, int], Place], matrices: Sequence[Place] = ()
    ) -> None:
        super().__init__(())
        self.patterns = ("*",)
        self._module = module
        self._own = own_paths(module)
        self._paths: Collection[str] = set(self._own.values())
        self._branches = branches
        self._matrices: dict[tuple[str, int], list[Place]] = {}
        for each in matrices:
            self._matrices.setdefault((each.path, each.call), []).append(each)
        self._given: dict[int, int] = {}  # what which reader has made of the stream
        self._streams: list[Tensor] = []  # what each reader was given
        self._direct: set[int] = set()  # readers inside of which the stream itself is computed with
        self._branch: Place | None = None
        self._stream: Tensor | None = None
        self._earlier: dict[int, int] = {}  # what the stream was before, and how many had written by then
        self._put_out: dict[int, list[tuple[str, int, Place]]] = {}
        self._kept: list[Tensor] = []  # so that none of their numbers is another's
        self.layers: list[str] = []
        self.readers: list[Reader] = []
        self.written: list[tuple[str, int, Place]] = []
        self.lost = ""
        self.fed: dict[tuple[str, int], int] = {}
        """Which reader gives a matrix what it is given."""
        self.others: set[int] = set()
        """The readers that something else is given by, too."""

    def at(self, path: str, side: Side, call: int, value: Tensor) -> None:
        """A layer is given the stream, another module reads it, or something is put out that may be written."""
        if path not in self._paths:
            return
        if side == "output":
            self._made(path, call, value)
            self._branch = self._branches.get((path, call), self._branch)
            if self._branch is not None:
                self._put_out[id(value)] = [(path, call, self._branch)]  # the outermost module comes last
                self._kept.append(value)
            return
        layer = layer_of(path)
        if layer is not None and layer.path == path:
            self._stream = value if self._stream is None else self._stream
            self.lost = self.lost or ("" if value is self._stream else path)
            self.layers.append(path)
        elif self.layers and (after := self._after(value)) is not None and not self._is_inside_a_reader(path):
            self.readers.append(Reader(path, after, call))
            self._streams.append(value)
        if (path, call) in self._matrices:
            reader = self._given.get(id(value))
            if reader is None and value is self._stream and self._is_in(path):
                reader = len(self.readers) - 1
                self.others |= {reader} & self._direct
            if reader is not None:
                self.fed[path, call] = reader

    def _made(self, path: str, call: int, value: Tensor) -> None:
        """What a reader makes of the stream; or whether a matrix gives what it would of the stream alone."""
        number = next((i for i, each in enumerate(self.readers) if (each.path, each.call) == (path, call)), None)
        if number is not None and value is self._streams[number]:  # it hands the stream on to who reads it
            del self.readers[number], self._streams[number]
            return
        if (
            number is not None
            and self._matrices
            and not any(f"{at}.".startswith(f"{path}.") for at, _ in self._matrices)
        ):
            self._given[id(value)] = number
            self._kept.append(value)
        fed = self.fed.get((path, call))
        if fed is None:
            return
        reader = replace(self.readers[fed], share=Share(self._matrices[path, call][0], 0))
        with torch._C.DisableTorchFunction():  # it is the model's own matrix, once more
            try:
                again = self._module.get_submodule(path).forward(
                    reader.given(self._module, self._streams[fed][:, None])
                )
            except (TypeError, RuntimeError, ValueError, IndexError):  # they are given more than a stream
                again = None
        if again is None or float((again[:, 0] - value).abs().max()) > CLOSE * float(value.abs().max()):
            del self.fed[path, call]
        elif sum(each.width for each in self._matrices[path, call]) < value.shape[-1]:  # as of a gate beside them
            self.others.add(fed)

    def _after(self, value: Tensor) -> int | None:
        """How many had written what is the stream, or was it: ``x + attention(x) + mlp(x)`` reads what it was."""
        return len(self.written) if value is self._stream else self._earlier.get(id(value))

    def _is_inside_a_reader(self, path: str) -> bool:
        return any(path.startswith(each.path + ".") for each in self.readers)

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """A sum with the stream makes it anew."""
        out = proceed(call.args, call.kwargs)
        if self._matrices and self.readers and any(isinstance(each, Tensor) for each in _flat([out])):
            self._seen_by_others(call)
        if call.operation is not None and call.operation.name == "add" and isinstance(out, Tensor):
            is_whole = call.kwargs.get("alpha", 1) == 1  # else a part of what a module puts out is written
            self._add(call.args[:2], out, is_whole=is_whole)
        return out

    def _seen_by_others(self, call: Call) -> None:
        """What a reader makes of the stream, or the stream itself inside of it, goes elsewhere than to a matrix."""
        assert self._run is not None
        where = self._run.where()
        path = self._own.get(where, where)
        if any(path == each for each, _ in self._matrices):
            return
        given = _flat([*call.args, *call.kwargs.values()])
        self.others |= {self._given[id(each)] for each in given if id(each) in self._given}
        if self._is_in(path) and any(each is self._stream for each in given):
            last = len(self.readers) - 1
            self._direct.add(last)
            self.others |= {last} & set(self.fed.values())

    def _is_in(self, path: str) -> bool:
        """Whether a module is the last reader, or in it."""
        return bool(self.readers) and f"{path}.".startswith(f"{self.readers[-1].path}.")

    def _add(self, args: tuple[Any, ...], out: Tensor, *, is_whole: bool) -> None:
        tensors = [each for each in args if isinstance(each, Tensor) and each.shape == out.shape]
        if len(tensors) < 2 or self._stream is None:
            return
        others = [each for each in tensors if each is not self._stream]
        written = [each for other in others for each in self._put_out.get(id(other), ()) if is_whole]
        if len(others) == 1:
            assert self._run is not None
            self.lost = self.lost or ("" if written else self._run.where())
            self._earlier[id(self._stream)] = len(self.written)
            self._kept.append(self._stream)
            self.written += written
            self._stream = out
        elif is_whole and all(id(each) in self._put_out for each in others):  # two branches side by side
            self._put_out[id(out)] = written
            self._kept.append(out)


def _flat(values: Sequence[Any]) -> list[Any]:
    """What there is, and what is in lists of it."""
    return [each for one in values for each in (one if isinstance(one, (list, tuple)) else [one])]
