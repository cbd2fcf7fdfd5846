"""How small a circuit says what the whole model says? (CPR and CMD of MIB: Mueller et al. 2025.)

Edges are ranked by the absolute mean of their scores over some pairs of prompts; then the best .1, .2, .5, 1, 2, 5, 10,
20, 50 and 100 % of them are kept, on other pairs, and all others have the values of the corrupt prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import torch

from lrpx.benchmarks._circuits_report import FRACTIONS, METRICS, summarised
from lrpx.benchmarks._contract import Case, register
from lrpx.benchmarks._pairs import Coefficients, Pairs, PairSample, steps_of
from lrpx.benchmarks._pairs_report import terminal, write
from lrpx.circuits import check_closes, chosen, exact_edges, graph_of, run, scores
from lrpx.errors import InputError
from lrpx.methods._random import Random
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType
    from torch import Tensor

    from lrpx.circuits import Graph
    from lrpx.methods import Method
    from lrpx.metrics import Metric
    from lrpx.model import BoundModel
    from lrpx.runs import Store

EXACT: Final = "exact"
"""The method that patches one edge after another."""


@dataclass(frozen=True)
class CircuitSample(PairSample):
    """A pair to measure, and those that the edges are scored on.

    Args:
        scored: those pairs.
        known: what was found of them, the graph and the edges' scores: once for all samples of a run, and for each
            state of the model's weights.
    """

    scored: tuple[PairSample, ...] = ()
    known: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)


@register
@dataclass(frozen=True)
class Circuits(Pairs):
    """How much of what the model says is in the best edges? (CPR and CMD, Mueller et al. 2025)

    Args:
        scored_on: so many pairs are only scored, and not measured.
        exact: whether the edges are patched one by one as well.
        whole: whether an attention is one reader.
    """

    scored_on: Annotated[int, "Rank the edges on so many further pairs, which are not measured."] = 10
    exact: Annotated[bool, "Rank the edges by patching one after another, too, which takes long."] = False
    whole: Annotated[
        bool, "Take an attention as one reader, where its heads' queries, keys and values cannot be told apart."
    ] = False

    name: ClassVar[str] = "circuits"
    methods: ClassVar[tuple[str, ...]] = (*Pairs.methods, "random")
    metrics: ClassVar[Mapping[str, Metric]] = METRICS

    def check(self) -> None:
        """See :meth:`Benchmark.check <lrpx.benchmarks.Benchmark.check>`."""
        super().check()
        if self.scored_on < 1:
            raise InputError(f"scored_on is {self.scored_on}; give at least 1")

    @property
    def wanted(self) -> int:
        """Those that are scored, and those that are measured."""
        return self.limit + self.scored_on

    def of_model(self, model: BoundModel) -> Sequence[Method]:
        """RelP, attribution patching and EAP-IG, and the edges patched one by one."""
        by_one = (Coefficients(EXACT, GRADIENT, label="exact, edge by edge"),) if self.exact else ()
        return (*super().of_model(model), *by_one)

    def besides(self) -> Sequence[str]:
        """The edges patched one by one, where that is asked for."""
        return (EXACT,) if self.exact else ()

    def check_methods(self, methods: Sequence[Method]) -> None:
        """Refuse methods that are no coefficients; random scores are welcome."""
        super().check_methods([each for each in methods if not isinstance(each, Random)])

    def measured(self, kept: Sequence[PairSample]) -> Sequence[PairSample]:
        """All but the first.

        Raises:
            InputError: there are no others.
        """
        scored = tuple(kept[: self.scored_on])
        if len(kept) <= len(scored):
            raise InputError(
                f"the edges are ranked on {self.scored_on} pairs, and {self.data} has {len(kept)}; give a smaller "
                "scored_on, or more pairs"
            )
        known: dict[object, Any] = {}
        return [CircuitSample(each.given, each.pair, scored, known) for each in kept[self.scored_on :]]

    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """The values of both prompts, and that of each method's circuits."""
        del metrics
        found = [*self.facts, pa.field("value", pa.float64()), pa.field("corrupt value", pa.float64())]
        found += [pa.field("edges", pa.int32())]
        return pa.schema([*found, *(pa.field(f"circuits/{method}", pa.list_(pa.float64())) for method in methods)])

    def judge(self, case: Case[PairSample], model: BoundModel, metrics: Sequence[Metric]) -> dict[str, Any]:
        """Runs each method's circuits."""
        return self.judge_all([case], model, metrics, 16)[0]

    def judge_all(
        self, cases: Sequence[Case[PairSample]], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> list[dict[str, Any]]:
        """The same for several, ``batch_size`` circuits at a time."""
        del metrics
        return [self._judged(case, model, batch_size) for case in cases]

    def _judged(self, case: Case[PairSample], model: BoundModel, batch_size: int) -> dict[str, Any]:
        sample = case.sample
        assert isinstance(sample, CircuitSample)
        weights = model.fingerprint()
        graph = self._graph(sample, model, weights)
        counts = [int(fraction * graph.count) for fraction in FRACTIONS]
        every = [
            chosen(graph, self._scores(method, graph, sample, model, weights, batch_size), count)
            for method in case.methods.values()
            for count in counts
        ]
        both = model.values(sample.pair.questions).tolist()
        values = run(model, sample.pair, graph, torch.stack(every), batch_size=batch_size).reshape(-1, len(counts))
        row: dict[str, Any] = {"value": both[0], "corrupt value": both[1], "edges": graph.count}
        return row | {f"circuits/{name}": each.tolist() for name, each in zip(case.methods, values, strict=True)}

    def _graph(self, sample: CircuitSample, model: BoundModel, weights: str) -> Graph:
        if weights not in sample.known:
            pair = sample.scored[0].pair
            graph = graph_of(model, pair, whole=self.whole)
            check_closes(model, pair, graph)
            sample.known[weights] = graph
        found: Graph = sample.known[weights]
        return found

    def _scores(
        self, method: Method, graph: Graph, sample: CircuitSample, model: BoundModel, weights: str, batch_size: int
    ) -> Tensor:
        """The mean of the edges' scores over the pairs that are scored."""
        key = (weights, method.name)
        if key not in sample.known:
            sample.known[key] = self._mean(method, graph, sample, model, batch_size)
        found: Tensor = sample.known[key]
        return found

    def _mean(self, method: Method, graph: Graph, sample: CircuitSample, model: BoundModel, batch_size: int) -> Tensor:
        if isinstance(method, Random):
            drawn = np.random.default_rng(self.seed).uniform(-1.0, 1.0, graph.edges.shape)
            return torch.tensor(drawn)
        pairs = [each.pair for each in sample.scored]
        if method.name == EXACT:
            found = [exact_edges(model, pair, graph, batch_size=batch_size) for pair in pairs]
        else:
            recipe = method.recipe  # type: ignore[attr-defined]
            found = [scores(model, pair, graph, recipe, steps=steps_of(method)).cpu().double() for pair in pairs]
        return torch.stack(found).mean(0)

    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write ``table.md``, ``report.html`` and ``curves.png``."""
        del show
        return terminal(write(store, summarised(store)))
