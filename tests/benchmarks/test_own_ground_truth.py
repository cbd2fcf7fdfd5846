"""A ground truth of one's own: what does not say which tokens, or which prediction, is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from lrpx.benchmarks import GroundTruth, Run, Samples, Source, Words, keep
from lrpx.errors import InputError
from lrpx.model import Spec
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task

TEXT = "The keys to the cabinet"


@dataclass(frozen=True)
class Keys(GroundTruth):
    """Keys: are they found?"""

    facts_given: dict[str, Any] = field(default_factory=dict)
    prediction_given: dict[str, Any] = field(default_factory=lambda: {"correct": True})
    questions: int = 1

    name: ClassVar[str] = "keys"
    tasks = frozenset({Task.CAUSAL})
    words: ClassVar[Words] = Words("Keys?", "Keys", "the keys", "knows keys", ("value", "logit"), "the verb")
    source = pa.schema({"text": pa.string()})
    prediction: ClassVar = {}

    def read(self):
        return Source(pa.Table.from_pylist([{"text": TEXT}], self.source))

    def samples(self, source, model):
        return Samples([row["text"] for row in source.rows.to_pylist()])

    def facts_of(self, sample):
        facts = {"id": sample, "tokens": list("abcdefgh"), "ground_truth": [2, 3], "position": 7}
        return {name: value for name, value in (facts | self.facts_given).items() if value is not None}

    def ask(self, sample, model):
        return Questions((model.reader.row(sample),), (Question(0, 5, Logit(" are")),) * self.questions)

    def predicted(self, case):
        return self.prediction_given

    def told(self, row):
        return "a logit"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"facts_given": {"ground_truth": [-1]}}, r"is \[-1\]; pass whole numbers from 0 to 7"),
        ({"facts_given": {"ground_truth": [8]}}, r"is \[8\]; pass whole numbers from 0 to 7"),
        ({"facts_given": {"ground_truth": [2.0]}}, r"is \[2.0\]; pass whole numbers"),
        ({"facts_given": {"ground_truth": [False, False, True]}}, "pass whole numbers"),
        ({"facts_given": {"position": None}}, "facts_of of the benchmark keys gives no position; return"),
        ({"prediction_given": {"is_correct": True}}, "predicted of the benchmark keys gives no correct; return"),
        ({"questions": 2}, "asks 2 questions, and one is judged"),
    ],
    ids=["not found", "behind the end", "float", "mask", "no position", "not correct", "two questions"],
)
def test_what_names_no_tokens_or_no_prediction_is_refused(tmp_path, given, message):
    run = Run(Keys(**given), Spec().build(), ["attnlrp"])
    with keep(run, tmp_path / "keys") as kept, pytest.raises(InputError, match=message):
        kept.explain()
