"""Benchmarks where it is known which tokens decide: each method's relevance is judged against these.

The random baseline draws relevance uniformly from [−1, 1) (Arras et al. 2025, Table 2), and is judged likewise.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np
import pyarrow as pa

from lrpx.benchmarks._contract import Benchmark, Case
from lrpx.benchmarks._report import terminal, write_reports
from lrpx.benchmarks._words import RANDOM, Group, Words
from lrpx.errors import InputError, MethodError
from lrpx.metrics._ground_truth import METRICS
from lrpx.targets import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from rich.console import RenderableType

    from lrpx.metrics import Metric
    from lrpx.model import BoundModel
    from lrpx.runs import Store

S = TypeVar("S")

DRAWS: Final = 10
"""How often the random baseline is drawn for each sample (Arras 2025, Table 2)."""


class GroundTruth(Benchmark[S]):
    """A benchmark whose samples know the positions of the tokens that should be found.

    Its rows have ``id``, ``tokens``, ``ground_truth`` and ``position``, the columns :attr:`more`, then those of
    :attr:`prediction` and ``correct``, for each method its relevance and its metrics, and the metrics of the random
    draws.
    """

    metrics: ClassVar[Mapping[str, Metric]] = METRICS
    words: ClassVar[Words]
    group: ClassVar[Group | None] = None
    more: ClassVar[Mapping[str, pa.DataType]] = {}
    """Further facts about a sample."""
    prediction: ClassVar[Mapping[str, pa.DataType]] = {}
    """What a row says of the prediction, beside ``correct``."""

    @property
    def facts(self) -> pa.Schema:
        """``id``, ``tokens``, ``ground_truth``, ``position`` and :attr:`more`."""
        every = {
            "id": pa.string(),
            "tokens": pa.list_(pa.string()),
            "ground_truth": pa.list_(pa.int32()),
            "position": pa.int32(),
        }
        return pa.schema(every | dict(self.more))

    def settings(self) -> dict[str, Any]:
        """Its fields, and how often the random baseline is drawn."""
        return super().settings() | {"draws": DRAWS}

    @abstractmethod
    def predicted(self, case: Case[S]) -> dict[str, Any]:
        """The columns :attr:`prediction`, and ``correct``: whether the model predicts what it should."""

    @abstractmethod
    def told(self, row: Mapping[str, Any]) -> str:
        """What was explained in a row, in words: "logit of “are” − logit of “is”"."""

    def value_of(self, row: Mapping[str, Any]) -> float:
        """The value of what was explained in a row."""
        return float(row[self.words.value[0]])

    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """See the class.

        Raises:
            MethodError: a method has the name of the random baseline.
        """
        if RANDOM in methods:
            raise MethodError(
                f"a method is called {RANDOM!r}, as the baseline is, which is measured anyway; leave it out, or give "
                "it another name"
            )
        found = [*self.facts, *pa.schema(dict(self.prediction) | {"correct": pa.bool_()})]
        for method in methods:
            found.append(pa.field(f"relevance/{method}", pa.list_(pa.float64())))
            found += [pa.field(f"{metric.name}/{method}", pa.float64()) for metric in metrics]
        found += [pa.field(f"{metric.name}/{RANDOM}", pa.list_(pa.float64())) for metric in metrics]
        return pa.schema(found)

    def judged(self, sample: S) -> slice:
        """The tokens that metrics look at; all of them, unless a benchmark knows better."""
        del sample
        return slice(None)

    def judge(self, case: Case[S], model: BoundModel, metrics: Sequence[Metric]) -> dict[str, Any]:
        """The prediction, each method's relevance ``[T]`` and metrics, and those of the random draws.

        Raises:
            InputError: the sample's facts or its prediction lack a column, its ground truth is no places of its tokens,
                or it asks several questions, of which one alone can be judged.
        """
        facts = self.facts_of(case.sample)
        self._refuse_missing("facts_of", self.facts.names, facts)
        judged = self.judged(case.sample)
        truth = np.zeros(len(facts["tokens"]), dtype=bool)
        truth[_places(facts)] = True
        truth = truth[judged]
        asked = next((len(found) for found in case.relevance.values() if len(found) != 1), 1)
        if asked != 1:
            raise InputError(
                f"the sample {facts['id']!r} asks {asked} questions, and one is judged; ask one, and make a sample of "
                "each other"
            )
        relevance = {name: found[0].double().numpy() for name, found in case.relevance.items()}
        predicted = self.predicted(case)
        self._refuse_missing("predicted", (*self.prediction, "correct"), predicted)
        row = predicted | {f"relevance/{method}": found.tolist() for method, found in relevance.items()}
        drawn = draws(facts["id"], len(truth))
        for metric in metrics:
            row |= {f"{metric.name}/{method}": metric(found[judged], truth) for method, found in relevance.items()}
            row[f"{metric.name}/{RANDOM}"] = [metric(draw, truth) for draw in drawn]
        return row

    def _refuse_missing(self, made_by: str, columns: Sequence[str], found: Mapping[str, Any]) -> None:
        """Refuse a row that lacks a column.

        Raises:
            InputError: it does.
        """
        missing = [name for name in columns if name not in found]
        if missing:
            raise InputError(
                f"{made_by} of the benchmark {self.name} gives no {', '.join(missing)}; return "
                f"{', '.join(columns)} of each sample"
            )

    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write ``table.md``, ``table.tex``, ``heatmaps.tex`` and ``report.html``; see
        :func:`lrpx.benchmarks._report.write_reports`."""
        return terminal(write_reports(self, store, show=show))


def _places(facts: Mapping[str, Any]) -> list[int]:
    """The places of the ground truth among the tokens.

    Raises:
        InputError: they are none, such as the −1 by which ``str.find`` says that there is nothing.
    """
    places, size = [whole_number(each) for each in facts["ground_truth"]], len(facts["tokens"])
    found = [each for each in places if each is not None and 0 <= each < size]
    if len(found) < len(places):
        raise InputError(
            f"the ground truth of {facts['id']!r} is {facts['ground_truth']!r}; pass whole numbers from 0 to "
            f"{size - 1}, the places of its {size} tokens, or leave the sample out"
        )
    return found


def draws(name: str, length: int) -> NDArray[np.float64]:
    """``[DRAWS, length]`` random relevance in [−1, 1) for the sample of this name: the same on every machine.

    >>> draws("dev:1", 3).shape, bool((draws("dev:1", 3) == draws("dev:1", 3)).all())
    ((10, 3), True)
    """
    seeds = [hashlib.sha256(f"{name}\n{draw}".encode()).digest() for draw in range(DRAWS)]
    generators = [np.random.Generator(np.random.PCG64(int.from_bytes(seed))) for seed in seeds]
    return np.stack([generator.uniform(-1.0, 1.0, length) for generator in generators])
