"""The residual stream of a model as it runs: which modules read it, and which write into it.

Nothing is known by a module's name. One run is watched: the stream is what enters the first layer, and each sum of it
and something else; a module that is given the stream reads it; what is added to it is written by the module that put it
out, on behalf of the branch, attention or MLP, that :mod:`lrpx.units` has found last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx._modules import layer_of
from lrpx.errors import MethodError, ModelError
from lrpx.units import Called, Place, own_paths, places

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from lrpx.engine import Call
    from lrpx.engine._places import Side
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.units import Kind

__all__ = ["Reader", "Wiring", "Writer", "wiring_of"]


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
    """

    path: str
    after: int
    call: int = 0
    calls: int = 1

    @property
    def place(self) -> Place:
        """What it is given."""
        return Place(0, self.path, "input", "residual", 1, call=self.call, calls=self.calls)


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


def wiring_of(model: BoundModel, questions: Questions) -> Wiring:
    """The wiring of a model, from one run on the first of some questions.

    Raises:
        ModelError: it has no layers in a list, or no residual stream that each layer is given and adds to.
        MethodError: it has no attentions or no MLPs that are seen.
    """
    both: tuple[Kind, ...] = ("attention", "mlp")
    branches = {(each.path, each.call): each for kind in both for each in places(model.module, kind)}
    heads = {(each.path, each.call): each for each in places(model.module, "heads")}
    watch = _Watch(set(own_paths(model.module).values()), branches)
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
    readers = tuple(replace(each, calls=times[each.path]) for each in watch.readers)
    return Wiring(watch.layers[0], writers, readers)


class _Watch(Called):
    """Watches one run."""

    def __init__(self, paths: Collection[str], branches: Mapping[tuple[str, int], Place]) -> None:
        super().__init__(())
        self.patterns = ("*",)
        self._paths = paths
        self._branches = branches
        self._branch: Place | None = None
        self._stream: Tensor | None = None
        self._put_out: dict[int, list[tuple[str, int, Place]]] = {}
        self._kept: list[Tensor] = []  # so that none of their numbers is another's
        self.layers: list[str] = []
        self.readers: list[Reader] = []
        self.written: list[tuple[str, int, Place]] = []
        self.lost = ""

    def at(self, path: str, side: Side, call: int, value: Tensor) -> None:
        """A layer is given the stream, another module reads it, or something is put out that may be written."""
        if path not in self._paths:
            return
        if side == "output":
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
        elif self.layers and value is self._stream and not self._is_inside_a_reader(path):
            self.readers.append(Reader(path, len(self.written), call))

    def _is_inside_a_reader(self, path: str) -> bool:
        return any(path.startswith(each.path + ".") for each in self.readers)

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """A sum with the stream makes it anew."""
        out = proceed(call.args, call.kwargs)
        if call.operation is not None and call.operation.name == "add" and isinstance(out, Tensor):
            self._add(call.args[:2], out)
        return out

    def _add(self, args: tuple[Any, ...], out: Tensor) -> None:
        tensors = [each for each in args if isinstance(each, Tensor) and each.shape == out.shape]
        if len(tensors) < 2 or self._stream is None:
            return
        others = [each for each in tensors if each is not self._stream]
        written = [each for other in others for each in self._put_out.get(id(other), ())]
        if len(others) == 1:
            assert self._run is not None
            self.lost = self.lost or ("" if written else self._run.where())
            self.written += written
            self._stream = out
        elif all(id(each) in self._put_out for each in others):  # two branches side by side
            self._put_out[id(out)] = written
            self._kept.append(out)
