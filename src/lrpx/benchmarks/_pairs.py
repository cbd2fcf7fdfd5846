"""What the benchmarks of patching have in common: pairs of prompts, and methods that are coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa

from lrpx import recipes
from lrpx._data.agreement import Dropped
from lrpx._data.ioi import ioi_pairs
from lrpx._data.minimal_pairs import MinimalPair, agreement_pairs, read_pairs
from lrpx.benchmarks._contract import Benchmark, Samples, Source, file_of
from lrpx.errors import InputError, MethodError, ModelError, TargetError
from lrpx.methods._backward import Backward, value_times_gradient
from lrpx.patching import Pair, pair_of
from lrpx.questions import Question, Questions
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.methods import Method
    from lrpx.model import BoundModel

STEPS = 5
"""Points between the corrupt and the clean embeddings, for EAP-IG (Hanna et al. 2024 take five)."""
INSIDE = "pairs with an answer that is a token inside words, for want of a space before it"
"""What a run says of a table that has ``are`` where `` are`` was meant, perhaps."""
SPARE = 4
"""So many times as many pairs are made as are wanted, for some have words of several tokens."""


@dataclass(frozen=True)
class Coefficients(Backward):
    """A recipe whose gradient is taken at several points between the corrupt and the clean embeddings.

    Args:
        steps: how many; one is the clean input alone.
    """

    steps: int = 1

    def describe(self) -> str:
        """The recipe, and the steps."""
        return f"{super().describe()}; steps={self.steps}"


@dataclass(frozen=True)
class PairSample:
    """A pair as a model reads it.

    Args:
        given: as it was written.
        pair: as the model reads it.
    """

    given: MinimalPair
    pair: Pair


@dataclass(frozen=True)
class Pairs(Benchmark[PairSample]):
    """A benchmark whose samples are pairs of prompts.

    Args:
        data: which pairs.
        corrupt: how a prompt of ``ioi`` is corrupted.
        limit: take the first so many.
        seed: which of the pairs that are written by templates.
    """

    data: Annotated[
        str, "ioi, agreement, or a table (.tsv, .csv, .jsonl) with the columns clean, corrupt, right, wrong."
    ] = "ioi"
    corrupt: Annotated[str, "The second mention of the subject in ioi: swap (the other name) or abc (a third)."] = (
        "swap"
    )
    limit: Annotated[int, "Take the first so many pairs."] = 20
    seed: Annotated[int, "Which of the pairs that are written by templates."] = 0

    explains: ClassVar[bool] = False
    tasks: ClassVar[frozenset[Task]] = frozenset({Task.CAUSAL, Task.MASKED})
    methods: ClassVar[tuple[str, ...]] = ("gim", "attnlrp", "lrp")
    source: ClassVar[pa.Schema] = pa.schema(
        {"id": pa.string(), "line": pa.int32()} | {name: pa.string() for name in ("clean", "corrupt", "right", "wrong")}
    )
    facts: ClassVar[pa.Schema] = pa.schema(
        {
            "id": pa.string(),
            "clean": pa.list_(pa.string()),
            "corrupt": pa.list_(pa.string()),
            "right": pa.string(),
            "wrong": pa.string(),
        }
    )

    def check(self) -> None:
        """See :meth:`Benchmark.check <lrpx.benchmarks.Benchmark.check>`."""
        if self.limit < 1:
            raise InputError(f"limit is {self.limit}; give at least 1")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; give a whole number from 0")
        if self.data not in ("ioi", "agreement") and not Path(self.data).suffix:
            raise InputError(f"there is no data {self.data!r}; name ioi, agreement, or a table of pairs")
        self._given()

    def settings(self) -> dict[str, Any]:
        """Its fields; a table is its name, its size and its digest."""
        found = super().settings()
        return found if self._is_written else found | {"data": file_of(Path(self.data))}

    @property
    def _is_written(self) -> bool:
        """Whether the pairs are written by templates."""
        return self.data in ("ioi", "agreement")

    @property
    def wanted(self) -> int:
        """How many pairs are needed."""
        return self.limit

    def _given(self) -> list[MinimalPair]:
        if self.data == "ioi":
            return ioi_pairs(SPARE * self.wanted, self.corrupt, self.seed)
        if self.data == "agreement":
            return agreement_pairs(SPARE * self.wanted, self.seed)
        return read_pairs(Path(self.data), self.wanted)

    def of_model(self, model: BoundModel) -> Sequence[Method]:
        """RelP, attribution patching and EAP-IG."""
        del model
        return (
            Coefficients("relp", recipes.RELP, label="RelP"),
            Coefficients("attribution-patching", recipes.GRADIENT, label="attribution patching"),
            Coefficients("eap-ig", recipes.GRADIENT, label=f"EAP-IG, {STEPS} steps", steps=STEPS),
        )

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Benchmark.check_model <lrpx.benchmarks.Benchmark.check_model>`; a model in half precision is
        refused, whose rounding moves the value as far as most parts do.
        """
        super().check_model(model)
        if "float16" in model.precision:
            raise ModelError(
                f"{type(model.module).__name__} runs in {model.precision}, where rounding moves the value as far as "
                f"patching most of its parts does, so {self.name} would measure rounding; pass --dtype float32"
            )

    def check_methods(self, methods: Sequence[Method]) -> None:
        """Refuse methods that are no coefficients."""
        for method in methods:
            if not isinstance(method, Backward) or method.reduce is not value_times_gradient:
                raise MethodError(
                    f"{method.name} is no recipe, whose gradients {self.name} could take; name relp, gim, attnlrp, "
                    "lrp, attribution-patching, eap-ig, or a recipe's file"
                )

    def read(self) -> Source:
        """The pairs.

        Raises:
            DataError: the table cannot be read.
        """
        rows = [{name: getattr(each, name) for name in self.source.names} for each in self._given()]
        return Source(pa.Table.from_pylist(rows, self.source), (), {"counts": {"pairs read": len(rows)}})

    def samples(self, source: Source, model: BoundModel) -> Samples[PairSample]:
        """The pairs as the model reads them; of those that templates write, the ones whose words are single tokens.

        Raises:
            InputError: none is left, or a pair of a table has prompts of unequal length or an answer of several tokens.
        """
        kept: list[PairSample] = []
        dropped: list[Dropped] = []
        for row in source.rows.to_pylist():
            if len(kept) == self.wanted:
                break
            each = MinimalPair(**row)
            try:
                kept.append(PairSample(each, pair_of(model, each.clean, each.corrupt, each.right, each.wrong)))
            except (InputError, TargetError) as error:
                if not self._is_written:
                    raise InputError(f"{self.data}:{each.line}: {error}") from error
                reason = "has an answer of several tokens" if isinstance(error, TargetError) else "is of unequal length"
                dropped.append(Dropped(each.id, each.line, reason, each.clean))
        if not kept:
            raise InputError(
                f"no pair of {self.data} has answers of one token for this model; pass a table of your own"
            )
        statistics = {"mean tokens": float(np.mean([len(e.pair) for e in kept]))}
        inside = sum(_is_inside(model, e.given.right) or _is_inside(model, e.given.wrong) for e in kept)
        if inside:
            statistics[INSIDE] = inside
        return Samples(self.measured(kept), tuple(dropped), statistics)

    def measured(self, kept: Sequence[PairSample]) -> Sequence[PairSample]:
        """The pairs that are measured: all of them."""
        return kept

    def facts_of(self, sample: PairSample) -> dict[str, Any]:
        """Its tokens and its answers."""
        return {
            "id": sample.given.id,
            "clean": list(sample.pair.clean.tokens.pieces),
            "corrupt": list(sample.pair.corrupt.tokens.pieces),
            "right": sample.given.right,
            "wrong": sample.given.wrong,
        }

    def ask(self, sample: PairSample, model: BoundModel) -> Questions:
        """The right answer less the wrong one, of the clean prompt."""
        del model
        return Questions((sample.pair.clean,), (Question(0, sample.pair.position, sample.pair.target),))


def _is_inside(model: BoundModel, answer: str) -> bool:
    """Whether an answer is a token inside words, and the word itself, behind a space, another one."""
    try:
        return answer[:1].isalnum() and model.index(f" {answer}") != model.index(answer)
    except TargetError:
        return False


def steps_of(method: Method) -> int:
    """At how many points a method takes its gradient."""
    return method.steps if isinstance(method, Coefficients) else 1
