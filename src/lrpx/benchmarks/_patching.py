"""Does relevance say what patching would do? (Jafari et al. 2025; Nanda 2023.)

For each pair of prompts every part of the model is patched, one at a time, and its score by each method is compared
with that truth. Parts by position are taken from the first token that differs on: before it, a model that looks back
alone has the same values in both runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from lrpx.benchmarks._contract import Case, register
from lrpx.benchmarks._pairs import Pairs, PairSample, steps_of
from lrpx.benchmarks._pairs_report import terminal, write
from lrpx.benchmarks._patching_report import summarised, varies
from lrpx.errors import InputError, MissingExtraError
from lrpx.metrics import Metric
from lrpx.metrics._perturbation import is_more
from lrpx.patching import BY_POSITION, KINDS, attributed, exact, parts_of
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from rich.console import RenderableType

    from lrpx.model import BoundModel
    from lrpx.runs import Store


def pearson(scores: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    """Pearson's correlation."""
    return float(np.corrcoef(scores, truth)[0, 1])


def spearman(scores: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    """Spearman's: Pearson's correlation of the ranks, the same for ties."""
    try:
        from scipy.stats import rankdata
    except ImportError as error:
        raise MissingExtraError("ranks need scipy: pip install 'lrpx[benchmarks]'") from error
    return pearson(rankdata(scores), rankdata(truth))


METRICS: Final = {
    each.name: each
    for each in (
        Metric("Pearson", "correlation of the scores with exact patching.", -1.0, 1.0, "higher", pearson),
        Metric("Spearman", "the same, of the ranks.", -1.0, 1.0, "higher", spearman),
    )
}


@register
@dataclass(frozen=True)
class Patching(Pairs):
    """Which method says best what activation patching would do? (RelP, attribution patching, EAP-IG, GIM)

    Args:
        kinds: of which parts of the model.
        neurons: so many neurons are drawn for each pair; patching all would take long.
    """

    kinds: Annotated[str, "Some of: residual, attention, mlp, heads, neurons; with commas between."] = (
        "residual,attention,mlp,heads,neurons"
    )
    neurons: Annotated[int, "So many neurons are drawn for each pair."] = 200

    name: ClassVar[str] = "patching"
    metrics: ClassVar[Mapping[str, Metric]] = METRICS

    @property
    def parts(self) -> list[str]:
        """The kinds of parts."""
        return [each.strip() for each in self.kinds.split(",")]

    def check(self) -> None:
        """See :meth:`Benchmark.check <lrpx.benchmarks.Benchmark.check>`."""
        super().check()
        wrong = next((each for each in self.parts if each not in KINDS or self.parts.count(each) > 1), None)
        if wrong is not None:
            raise InputError(f"the kinds are {self.kinds!r}; name some of {', '.join(KINDS)}, each once")
        if self.neurons < 3:
            raise InputError(f"neurons is {self.neurons}; give at least 3, for fewer have no correlation")

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Benchmark.check_model <lrpx.benchmarks.Benchmark.check_model>`; all parts must be there."""
        super().check_model(model)
        for kind in self.parts:
            parts_of(model, kind)

    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """The values of both prompts; for each kind the parts, the truth, and each method's scores and metrics."""
        found = [*self.facts, pa.field("value", pa.float64()), pa.field("corrupt value", pa.float64())]
        for kind in self.parts:
            found += [pa.field(f"{name}/{kind}", pa.list_(pa.int32())) for name in ("layer", "part")]
            found.append(pa.field(f"exact/{kind}", pa.list_(pa.float64())))
            for method in methods:
                found.append(pa.field(f"score/{kind}/{method}", pa.list_(pa.float64())))
                found += [pa.field(f"{metric.name}/{kind}/{method}", pa.float64()) for metric in metrics]
        return pa.schema(found)

    def judge(self, case: Case[PairSample], model: BoundModel, metrics: Sequence[Metric]) -> dict[str, Any]:
        """Patches one part after another, and compares."""
        return self.judge_all([case], model, metrics, 1)[0]

    def judge_all(
        self, cases: Sequence[Case[PairSample]], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> list[dict[str, Any]]:
        """The same for several, ``batch_size`` patched copies at a time."""
        return [self._judged(case, model, metrics, batch_size) for case in cases]

    def _judged(
        self, case: Case[PairSample], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> dict[str, Any]:
        pair = case.sample.pair
        values = model.values(pair.questions).tolist()
        row: dict[str, Any] = {"value": values[0], "corrupt value": values[1]}
        scores = {
            name: attributed(model, pair, method.recipe, self.parts, steps=steps_of(method))  # type: ignore[attr-defined]
            for name, method in case.methods.items()
        }
        for kind in self.parts:
            which = self._chosen(model, kind, case.sample)
            truth = exact(model, pair, kind, which=which, batch_size=batch_size)
            at = tuple(np.array(which).T)
            row |= {f"layer/{kind}": at[0].tolist(), f"part/{kind}": at[1].tolist()}
            true = truth.numpy()[at]
            row[f"exact/{kind}"] = true.tolist()
            for name, found in scores.items():
                mine = found[kind].double().cpu().numpy()[at]
                row[f"score/{kind}/{name}"] = mine.tolist()
                known = is_more(np.ptp(true), max(map(abs, values))) and varies(mine)  # else it has no correlation
                row |= {f"{each.name}/{kind}/{name}": each(mine, true) if known else None for each in metrics}
        return row

    def _chosen(self, model: BoundModel, kind: str, sample: PairSample) -> list[tuple[int, int]]:
        """The parts that are patched, each by its layer and its place."""
        places = parts_of(model, kind)
        if kind in BY_POSITION:
            first = sample.pair.first if model.task is Task.CAUSAL else 0
            return [(i, at) for i in range(len(places)) for at in range(first, len(sample.pair))]
        every = [(i, at) for i in range(len(places)) for at in range(places[0].width)]
        if kind != "neurons" or len(every) <= self.neurons:
            return every
        drawn = np.random.default_rng([self.seed, sample.given.line]).choice(len(every), self.neurons, replace=False)
        return [every[each] for each in sorted(drawn)]

    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write ``table.md``, ``report.html`` and ``scatter.png``."""
        del show
        return terminal(write(store, summarised(store, self.parts)))
