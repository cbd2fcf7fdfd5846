"""Subject-verb agreement (Arras et al. 2025, §3 and App. B): do the methods find the subject behind the verb's number?

Explained is ``logit_p − logit_o``, where ``p`` is the form that the model prefers of the two and ``o`` the other
(§3.1); so a wrong prediction is explained as well.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path  # noqa: TC003 - the fields' types are read
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pyarrow as pa

from lrpx._data.agreement import Dropped, Sample, read_agreement
from lrpx._data.tokenised import TokenSample, tokenise
from lrpx.benchmarks._contract import Case, Samples, Source, register
from lrpx.benchmarks._ground_truth import GroundTruth
from lrpx.benchmarks._words import Group, Words
from lrpx.errors import DataError, InputError
from lrpx.questions import Question, Questions
from lrpx.targets import Preferred
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lrpx.model import BoundModel


@register
@dataclass(frozen=True)
class Agreement(GroundTruth[TokenSample]):
    """Subject-verb agreement: do the methods find the subject behind the number of the verb? (Arras et al. 2025)

    Args:
        data: files of sentences, ``.tsv`` (Goldberg 2019) or ``.conllu`` (a treebank).
        parser: a spaCy pipeline that finds the subjects in a ``.tsv``.
        parses: its parses instead, as a CoNLL-U file.
        only: a file of the ids of the samples to take; all by default.
        limit: take the first so many samples.
    """

    data: Annotated[list[Path], "Sentences: a .tsv (Goldberg 2019) or a .conllu treebank; as often as you like."]
    parser: Annotated[str | None, "The spaCy pipeline that finds the subjects in a .tsv."] = None
    parses: Annotated[Path | None, "The parses of a .tsv instead, as a CoNLL-U file."] = None
    only: Annotated[Path | None, "A text file of the sample ids to take, one a line."] = None
    limit: Annotated[int | None, "Take the first so many samples."] = None

    name: ClassVar[str] = "sva"
    tasks: ClassVar[frozenset[Task]] = frozenset({Task.CAUSAL, Task.MASKED})
    methods: ClassVar[tuple[str, ...]] = (
        "attnlrp", "lrp", "alti-logit", "logit", "alti", "gradient-x-input", "gradient-l1", "gradient-l2-squared",
    )  # fmt: skip
    words: ClassVar[Words] = Words(
        title="Which method points at the subject?",
        about="Subject-verb agreement",
        truth="the subject",
        right="prefers the right form of the verb",
        value=("logit_difference", "logit difference"),
        toward="the preferred form",
        paper="Arras et al. 2025",
    )
    group: ClassVar[Group | None] = Group(
        "attractors", "attractors", "Nouns of the other number between subject and verb"
    )
    more: ClassVar[Mapping[str, pa.DataType]] = {
        "right": pa.string(), "wrong": pa.string(), "attractors": pa.int32(),
    }  # fmt: skip
    prediction: ClassVar[Mapping[str, pa.DataType]] = {"logit_difference": pa.float64()}
    source: ClassVar[pa.Schema] = pa.schema(
        {
            "id": pa.string(),
            "text": pa.string(),
            "verb": pa.list_(pa.int32()),
            "form": pa.string(),
            "other": pa.string(),
            "subject": pa.list_(pa.list_(pa.int32())),
            "attractors": pa.int32(),
        }
    )
    """A :class:`~lrpx._data.agreement.Sample`."""

    def check(self) -> None:
        """See the class: samples are named after their file, so each file has a name of its own."""
        name, times = next(iter(Counter(path.name for path in self.data).most_common(1)), ("", 0))
        if times != 1:
            raise InputError(
                f"{times or 'no'} files are named {name!r}, and samples are named after their file; "
                "pass one file or more, each once and with a name of its own"
            )

    def settings(self) -> dict[str, Any]:
        """Its fields; of the ids, their digest, whatever their order."""
        ids = self._ids()
        digest = None if ids is None else hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()
        return super().settings() | {"only": digest}

    def read(self) -> Source:
        """The samples of all files, and the sentences that are none.

        Raises:
            DataError, InputError: a file cannot be read, or its parser is missing.
            MissingExtraError: a package for reading the files is not installed.
            ModelError: the parser cannot be loaded.
        """
        found: list[Sample] = []
        dropped: list[Dropped] = []
        sources: list[str] = []
        counts: Counter[str] = Counter()
        ids = self._ids()
        unparsed = [path for path in self.data if path.suffix == ".tsv"] or self.data
        for path in self.data:
            left = None if self.limit is None else self.limit - len(found)
            if left == 0:
                break
            parser, parses = (self.parser, self.parses) if path in unparsed else (None, None)
            one = read_agreement(path, parser=parser, parses=parses, only=ids, limit=left)
            found += one.samples
            dropped += one.dropped
            sources.append(one.source)
            counts.update(one.counts())
        rows = pa.Table.from_pylist([asdict(sample) for sample in found], self.source)
        return Source(rows, tuple(dropped), {"sources": sources, "counts": dict(counts)})

    def samples(self, source: Source, model: BoundModel) -> Samples[TokenSample]:
        """The samples as the model reads them, less those that are longer than its context.

        Raises:
            InputError: none is left.
            ModelError: no verb's forms are one token each.
        """
        found = [_sample(**row) for row in source.rows.to_pylist()]
        tokenised = tokenise(found, model.tokenizer, model.task)
        limit = model.limit
        long = {each.sample.id for each in tokenised.samples if limit is not None and len(each.ids) > limit}
        if long:
            reason = f"longer than the model's context of {limit} tokens"
            dropped = [Dropped(each.id, each.line, reason, each.text) for each in found if each.id in long]
            fitting = tokenise([each for each in found if each.id not in long], model.tokenizer, model.task)
            tokenised = replace(fitting, dropped=(*fitting.dropped, *dropped))
        return Samples(tokenised.samples, tokenised.dropped, tokenised.statistics)

    def facts_of(self, sample: TokenSample) -> dict[str, Any]:
        """Its tokens, the subject's positions, the position of the logits, and the verb's forms."""
        return {
            "id": sample.sample.id,
            "tokens": list(sample.tokens),
            "ground_truth": list(sample.ground_truth),
            "position": sample.position,
            "right": sample.sample.form,
            "wrong": sample.sample.other,
            "attractors": sample.sample.attractors,
        }

    def ask(self, sample: TokenSample, model: BoundModel) -> Questions:
        """The form that the model prefers, against the other."""
        return Questions(
            (model.reader.row(sample.ids),), (Question(0, sample.position, Preferred(sample.right, sample.wrong)),)
        )

    def predicted(self, case: Case[TokenSample]) -> dict[str, Any]:
        """Whether the right form has the larger logit (Table 3)."""
        right, wrong = case.answers.logits[0, [case.sample.right, case.sample.wrong]].tolist()
        return {"logit_difference": right - wrong, "correct": right - wrong > 0}

    def told(self, row: Mapping[str, Any]) -> str:
        """The two logits."""
        preferred, other = (row["right"], row["wrong"]) if row["correct"] else (row["wrong"], row["right"])
        return f"logit of “{preferred}” − logit of “{other}”"

    def value_of(self, row: Mapping[str, Any]) -> float:
        """The difference of the form that the model prefers, which is positive."""
        return abs(super().value_of(row))

    def _ids(self) -> frozenset[str] | None:
        """The ids of the samples to take."""
        if self.only is None:
            return None
        try:
            lines = self.only.read_text("utf-8", "replace").splitlines()
        except OSError as error:
            raise DataError(f"cannot read {self.only}: {error.strerror}; name a file of ids, one a line") from error
        return frozenset(line.strip() for line in lines) - {""}


def _sample(verb: list[int], subject: list[list[int]], **values: Any) -> Sample:
    return Sample(verb=(verb[0], verb[1]), subject=tuple((a, b) for a, b in subject), **values)
