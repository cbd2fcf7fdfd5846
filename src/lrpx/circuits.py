"""Circuits: the edges between what writes into the residual stream and what reads it, and what is left without some.

Each attention head, each MLP and the embeddings write into the stream. Each head's queries, keys and values read the
sum, each MLP, and what is behind the last layer (MIB: Mueller et al. 2025). An **edge** is the part that one writer has
in what one reader is given: the norm before it reads a stream of its own for each. Keys and values that several heads
share are read once for all of these.

**Scores** of all edges come from two forward passes and a backward pass: ``Σ (a_corrupt − a_clean) · ∂̃``, with the
writer's values and the coefficients at the reader (EAP: Syed et al. 2023; EAP-IG: Hanna et al. 2024), under any recipe.
A **circuit** is run by giving each reader its own mix: the writers of its edges as they are in this run, all others as
they were in the corrupt run.

>>> from lrpx.model import Spec
>>> from lrpx.patching import pair_of
>>> model = Spec().build()
>>> pair = pair_of(model, "The doors of the old house", "The door of the old house", " are", " is")
>>> graph = graph_of(model, pair)
>>> len(graph.writers), len(graph.readers), graph.count
(55, 103, 2500)
>>> values = run(model, pair, graph, torch.stack([graph.edges, torch.zeros_like(graph.edges)]))
>>> torch.allclose(values, model.values(pair.questions), atol=1e-3)
True
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx._wiring import Wiring, wiring_of
from lrpx.errors import InputError, MethodError
from lrpx.patching import backward, between, by_row, check_steps
from lrpx.units import Place, Reading
from lrpx.units._asked import unseen
from lrpx.units._reading import Called

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx._batching import Batch
    from lrpx._wiring import Share
    from lrpx.engine import Tap
    from lrpx.engine._places import Side
    from lrpx.model import BoundModel
    from lrpx.patching import Pair
    from lrpx.recipes import Recipe

__all__ = ["Graph", "check_closes", "chosen", "exact_edges", "graph_of", "run", "scores"]

AT_A_TIME = 16
"""The most circuits that run together."""
CLOSES = 1e-3
"""By how much of the difference between both inputs a run of the whole graph, or of no edge, may miss their values."""


@dataclass(frozen=True)
class Graph:
    """The writers, the readers and the edges of a model.

    Args:
        wiring: the modules that read and write.
    """

    wiring: Wiring

    @cached_property
    def writers(self) -> tuple[str, ...]:
        """What each writer is called, in the order in which they write."""
        found = ["embeddings"]
        for each in self.wiring.writers:
            layer = each.branch.layer
            if each.heads is None:
                found.append(f"{each.branch.kind} {layer}")
            else:
                found += [f"head {layer}.{head}" for head in range(each.heads.width)]
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[str, ...]:
        """What each reader is called, in the order in which they read: ``"query 3.5"``, of layer and head, likewise
        ``"key"`` and ``"value"``; of an MLP and of the output the path of the norm before it."""
        return tuple(each.name for each in self.wiring.readers)

    @cached_property
    def edges(self) -> Tensor:
        """``[readers, writers]``: whether there is an edge."""
        counts = [1, *(1 if each.heads is None else each.heads.width for each in self.wiring.writers)]
        ends = torch.tensor(counts).cumsum(0)
        upto = ends[torch.tensor([each.after for each in self.wiring.readers])]
        return torch.arange(int(ends[-1]))[None] < upto[:, None]

    @property
    def count(self) -> int:
        """How many edges there are."""
        return int(self.edges.sum())

    def slots(self) -> list[slice]:
        """Which of the writers each writing module is."""
        found, start = [], 1
        for each in self.wiring.writers:
            width = 1 if each.heads is None else each.heads.width
            found.append(slice(start, start + width))
            start += width
        return found


def graph_of(model: BoundModel, pair: Pair, *, whole: bool = False) -> Graph:
    """The graph of a model, seen in one run.

    Args:
        model: the model.
        pair: the two inputs.
        whole: whether an attention is one reader, the norm before it: for models whose queries, keys and values cannot
            be told apart by head.

    Raises:
        ModelError: it has no residual stream that each layer is given and adds to.
        MethodError: it has no attentions or MLPs that are seen, or their queries, keys and values cannot be told apart.
    """
    return Graph(wiring_of(model, pair.questions, whole=whole))


def scores(model: BoundModel, pair: Pair, graph: Graph, recipe: Recipe, *, steps: int = 1) -> Tensor:
    """``[readers, writers]``: ``Σ (a_corrupt − a_clean) · ∂̃`` of each edge, 0 where there is none.

    Args:
        model: the model.
        pair: the two inputs.
        graph: of the model.
        recipe: the rules of the backward pass.
        steps: how many points on the way from the corrupt to the clean embeddings the gradient is the mean of.

    Raises:
        InputError: a number of steps that is none.
        MethodError: there is no such recipe.
    """
    check_steps(steps)
    written = _written(model, pair, graph)
    inputs = None if steps == 1 else between(written[:, 0], steps)
    gradients = torch.stack(_coefficients(model, pair, graph, recipe, inputs))
    difference = (written[1] - written[0]).to(gradients.dtype)
    return torch.einsum("utd,rtd->ru", difference, gradients) * graph.edges.to(difference)


def _coefficients(model: BoundModel, pair: Pair, graph: Graph, recipe: Recipe, inputs: Tensor | None) -> list[Tensor]:
    """``[T, d]`` for each reader: ``∂̃`` at the stream that it is given, its mean over the inputs."""
    readers = graph.wiring.readers
    matrices = dict.fromkeys(each.share.place for each in readers if each.share is not None)
    begin = Place(0, graph.wiring.begin, "input", "residual", 1)  # as each reader's, which it may be
    every = list(dict.fromkeys([begin, *(each.place for each in readers), *matrices]))
    found: list[Tensor] = []
    with backward(model, pair, recipe, every, inputs) as (gradients, leaves):
        left = {each.place: gradients[each.place] for each in readers}
        for each in readers:  # what is no head's comes last
            gradient = left[each.place]
            if each.share is not None:
                gradient = _before(each.share, leaves[each.place][0], leaves[each.share.place][1], gradients)
                left[each.place] = left[each.place] - gradient
            found.append(gradient[:, : len(pair)].mean(0))
    return found


def _before(share: Share, leaf: Tensor, made: Tensor, gradients: Mapping[Place, Tensor]) -> Tensor:
    """``[B, T, d]``: of the gradient at the stream that a norm is given, what comes by way of one head's share.

    From there to what the matrix has ``made`` the graph of the run has the norm and the matrix, and no more; it has
    been looked at for what no rule has reached.
    """
    gradient = gradients[share.place]
    seed = torch.zeros_like(gradient)
    seed[..., share.features] = gradient[..., share.features]
    if not bool(seed.any()):  # as of queries and keys, where a recipe holds attention weights constant
        return torch.zeros_like(leaf, dtype=gradient.dtype)
    (found,) = torch.autograd.grad(made, leaf, seed.reshape(made.shape).to(made.dtype), retain_graph=True)
    return found.to(gradient.dtype)


def run(model: BoundModel, pair: Pair, graph: Graph, circuits: Tensor, *, batch_size: int = AT_A_TIME) -> Tensor:
    """``[n]``: the explained value of the clean input in each of ``n`` circuits.

    Args:
        model: the model.
        pair: the two inputs.
        graph: of the model.
        circuits: ``[n, readers, writers]``, whether each edge is in it; all others are patched with the corrupt run.
        batch_size: the most that run together.

    Raises:
        InputError: the circuits are of another shape.
    """
    if circuits.shape[1:] != graph.edges.shape:
        shape = list(graph.edges.shape)
        raise InputError(f"the circuits have shape {list(circuits.shape)}; pass [n, {shape[0]}, {shape[1]}]")
    corrupt = _written(model, pair, graph)[1]

    def mix(_: Batch, rows: Sequence[int]) -> Sequence[Tap]:
        return [_Mixed(model, graph, len(rows), corrupt, circuits[list(rows)])]

    return model.values(pair.questions.alone([0] * len(circuits)), taps=mix, batch_size=batch_size)


def exact_edges(model: BoundModel, pair: Pair, graph: Graph, *, batch_size: int = AT_A_TIME) -> Tensor:
    """``[readers, writers]``: how the explained value moves when one edge alone is patched; 0 where there is none."""
    places = graph.edges.nonzero()
    without = graph.edges.expand(len(places) + 1, -1, -1).clone()
    without[torch.arange(len(places)), places[:, 0], places[:, 1]] = False
    values = run(model, pair, graph, without, batch_size=batch_size).double()
    found = torch.zeros(graph.edges.shape, dtype=torch.float64)
    found[places[:, 0], places[:, 1]] = values[:-1] - values[-1]
    return found


def chosen(graph: Graph, scores: Tensor, count: int) -> Tensor:
    """``[readers, writers]``: the circuit of the edges with the largest absolute scores; of equal ones the first."""
    places = graph.edges.nonzero()
    order = scores[places[:, 0], places[:, 1]].abs().argsort(descending=True, stable=True)[:count]
    found = torch.zeros_like(graph.edges)
    found[places[order, 0], places[order, 1]] = True
    return found


def check_closes(model: BoundModel, pair: Pair, graph: Graph) -> None:
    """Refuse a model in which something else than the known edges joins the layers.

    Without any edge the last reader is given the corrupt stream, whatever the layers before it have made. Where it
    alone reads all writers as they are, it shows whether each of them writes what it did in the corrupt run.

    Raises:
        MethodError: the whole graph does not give the clean value, no edge the corrupt one, or a writer without edges
            something else than in the corrupt run, at whatever token.
    """
    none = torch.zeros_like(graph.edges)
    last = [i for i, each in enumerate(graph.wiring.readers) if each.after == len(graph.wiring.writers)]
    behind, first = none.clone(), none.clone()
    behind[last] = graph.edges[last]
    first[last, 0] = True
    values = run(model, pair, graph, torch.stack([graph.edges, none, behind, first]))
    wanted = model.values(pair.questions)
    misses = (values[0] - wanted[0], values[1] - wanted[1], values[2] - values[3])
    if max(abs(float(each)) for each in misses) > CLOSES * max(float((wanted[0] - wanted[1]).abs()), 1.0):
        raise MethodError(
            f"the edges that are seen in {type(model.module).__name__} are not all that joins its layers: without any "
            f"the value is {float(values[1]):.6g} and not {float(wanted[1]):.6g}, and with those to the output alone "
            f"{float(values[2]):.6g} and not {float(values[3]):.6g}; use the benchmark patching"
        )
    joined = _joined_otherwise(model, pair, graph)
    if joined is not None:
        raise MethodError(
            f"the edges that are seen in {type(model.module).__name__} are not all that joins its layers: without any "
            f"{joined} writes something else than in the corrupt run; use the benchmark patching"
        )


def _joined_otherwise(model: BoundModel, pair: Pair, graph: Graph) -> str | None:
    """The first module that writes, in a run without any edge, something else than in the corrupt run, at any token."""
    corrupt = _written(model, pair, graph)[1]
    taps: list[_Mixed] = []

    def mix(_: Batch, rows: Sequence[int]) -> Sequence[Tap]:
        taps.append(_Mixed(model, graph, len(rows), corrupt, torch.zeros_like(graph.edges)[None]))
        return taps[-1:]

    model.values(pair.questions.alone([0]), taps=mix)
    sums = [(corrupt[slot].sum(0), taps[-1].written[0, slot].sum(0)) for slot in graph.slots()]
    largest = torch.stack([wanted.abs().amax(-1) for wanted, _ in sums]).amax(0)  # at each token
    for writer, (_, off) in zip(graph.wiring.writers, sums, strict=True):
        if bool((off.abs().amax(-1) > CLOSES * largest).any()):
            return writer.path
    return None


def _written(model: BoundModel, pair: Pair, graph: Graph) -> Tensor:
    """``[2, writers, T, d]``: what each writer writes in the clean and the corrupt run."""
    found: dict[int, Tensor] = {}
    taps: list[tuple[Sequence[int], _Mixed]] = []
    others = unseen(model.module, [each.branch for each in graph.wiring.writers])

    def record(_: Batch, rows: Sequence[int]) -> Sequence[Tap]:
        taps.append((list(rows), _Mixed(model, graph, len(rows))))
        return [taps[-1][1], Reading((), others)]

    model.values(pair.questions, taps=record)
    for rows, tap in taps:
        found.update(zip(rows, tap.written, strict=True))
    return torch.stack([found[0], found[1]])


class _Mixed(Called):
    """Knows what each writer writes, and gives each reader its own mix.

    Args:
        model: the model.
        graph: its graph.
        rows: how many run together.
        corrupt: ``[writers, T, d]``, what the writers of missing edges have written; None where nothing is patched.
        circuits: ``[B, readers, writers]``, which edges are in each row's circuit.
    """

    def __init__(
        self,
        model: BoundModel,
        graph: Graph,
        rows: int,
        corrupt: Tensor | None = None,
        circuits: Tensor | None = None,
    ) -> None:
        self._model = model
        self._graph = graph
        self._rows = rows
        self._corrupt = corrupt
        self._missing = None if circuits is None else (graph.edges & ~circuits).to(corrupt)
        wiring = graph.wiring
        pairs = zip(wiring.writers, graph.slots(), strict=True)
        self._writers = {(each.path, each.call): (slot, each) for each, slot in pairs}
        self._matrices = {each.branch.path for each in wiring.writers}
        self._readers: dict[tuple[str, int], list[int]] = {}
        self._shares: dict[tuple[str, int], list[int]] = {}
        for i, each in enumerate(wiring.readers):
            self._readers.setdefault((each.path, each.call), []).append(i)
            if each.share is not None:
                self._shares.setdefault((each.share.place.path, each.share.place.call), []).append(i)
        self._given: dict[int, Tensor] = {}
        self._at: dict[tuple[str, Side], Tensor] = {}
        self.written = torch.empty(0)
        among = [path for path, _ in (*self._writers, *self._readers, *self._shares)]
        super().__init__((wiring.begin, *among, *self._matrices))

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """A writer has written, a reader is given what it reads, or a matrix has read."""
        if side == "input" and path == self._graph.wiring.begin and not call:
            first = by_row(value, self._rows)
            self.written = first.new_zeros(len(first), len(self._graph.writers), *first.shape[1:])
            self._wrote(slice(1), first[:, None])
        if path in self._matrices:
            self._at[path, side] = value
        if side == "output" and (path, call) in self._writers:
            slot, writer = self._writers[path, call]
            self._wrote(slot, self._heads(writer, value) if writer.heads else by_row(value, self._rows)[:, None])
        if self._missing is None:
            return None
        if side == "output" and (path, call) in self._shares:
            return self._read(self._shares[path, call], path, value)
        if side == "input" and (path, call) in self._readers:
            return self._mixed(self._readers[path, call], value)
        return None

    def _wrote(self, slot: slice, value: Tensor) -> None:
        """What is kept of writes ``[B, n, T, d]``: these; where edges are missing how far the corrupt ones are off."""
        self.written[:, slot] = value if self._corrupt is None else self._corrupt[slot] - value

    def _mixed(self, numbers: list[int], value: Tensor) -> Tensor | None:
        """What is given to all that is no head's; what a matrix would be given for each head's share is kept."""
        assert self._missing is not None
        readers = self._graph.wiring.readers
        upto = int(self._graph.edges[numbers[0]].sum())
        changes = torch.einsum("brw,bwtd->brtd", self._missing[:, numbers, :upto], self.written[:, :upto])
        streams = by_row(value, self._rows)[:, None] + changes
        shared = [at for at, number in enumerate(numbers) if readers[number].share is not None]
        if shared:
            with torch._C.DisableTorchFunction():  # it is the model's own norm, once more
                given = readers[numbers[0]].given(self._model.module, streams[:, shared])
            self._given |= {numbers[at]: given[:, i] for i, at in enumerate(shared)}
        if len(shared) == len(numbers):
            return None
        return streams[:, -1].reshape(value.shape)

    def _read(self, numbers: list[int], path: str, value: Tensor) -> Tensor:
        """What a matrix gives, each head's share of it made of what that reads."""
        made = by_row(value, self._rows).clone()
        with torch._C.DisableTorchFunction():  # it is the model's own matrix, once more
            given = torch.stack([self._given.pop(number) for number in numbers], 1)
            found = self._model.module.get_submodule(path).forward(given)
        for at, number in enumerate(numbers):
            share = self._graph.wiring.readers[number].share
            assert share is not None
            made[..., share.features] = found[:, at][..., share.features]
        return made.reshape(value.shape)

    def _heads(self, writer: Any, value: Tensor) -> Tensor:
        """``[B, H, T, d]``: what each head writes; a norm behind them is a factor, that of this run."""
        place = writer.heads
        matrix = self._model.module.get_submodule(place.path)
        given, made = by_row(self._at[place.path, "input"], self._rows), self._at[place.path, "output"]
        alone = given.new_zeros(len(given), place.width, *given.shape[1:])
        for head in range(place.width):
            features = place.features(head)
            alone[:, head][..., features] = given[..., features]
        with torch._C.DisableTorchFunction():  # it is the model's own matrix, once more
            parts: Tensor = matrix.forward(alone) - matrix.forward(torch.zeros_like(alone[:1, :1, :1]))
        if writer.path != place.path:
            total, scaled = by_row(made, self._rows), by_row(value, self._rows)
            ratio = torch.where(total == 0, torch.zeros_like(total), scaled / total)
            parts = parts * ratio[:, None]
        return parts
