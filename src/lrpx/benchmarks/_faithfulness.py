"""Faithfulness on one's own model and texts: does the output follow where an explanation says it comes from?

Every method explains the same value of every text; then tokens are hidden, as every metric's plan says, and what the
model says then is measured (:mod:`lrpx.metrics._perturbation`). There is no ground truth in it but the model.

``faithfulness`` measures by all metrics; ``loo`` by those of You et al. (2025). :class:`Perturbed` is for benchmarks
that read other data.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path  # noqa: TC003 - the fields' types are read
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self, TypeVar

import numpy as np
import pyarrow as pa

from lrpx._data.agreement import Dropped
from lrpx._data.texts import read_texts
from lrpx._tokens import cutting, decoder_ids
from lrpx.benchmarks._contract import Benchmark, Case, Samples, Source, index_of, joined, labelled, register, rows_of
from lrpx.benchmarks._faithful_report import terminal, write_reports
from lrpx.benchmarks._faithful_summary import Variant, variants
from lrpx.errors import DataError, InputError, ModelError, TargetError
from lrpx.metrics import PERTURBATION_METRICS, Given, PerturbationMetric
from lrpx.metrics._perturbation import Curve, least_relevant_first, most_relevant_first
from lrpx.perturbations import Perturbation, check_reads, outputs
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from rich.console import RenderableType

    from lrpx.inputs import Row
    from lrpx.metrics import Metric
    from lrpx.model import BoundModel
    from lrpx.runs import Store

S = TypeVar("S")

POINTS: Final = 20
"""Steps of the curves that a report draws, every twentieth of the tokens; fewer where a run takes fewer."""
READINGS: Final = ("logit", "probability", "log-probability")
"""What can be read by a metric that does not say itself: more of it speaks for what is explained."""
FEWEST: Final = 2
"""Tokens that may be hidden in a text; one alone has no order."""
AGAIN: Final = frozenset(
    {
        "LOO Pearson Σ",
        *(f"{name} {order}" for name in ("AOPC", "AOPC16", "A flipping", "A insertion") for order in ("MoRF", "LeRF")),
        "AOPC16 Δ",
        "ΔA insertion",
    }
)
"""Metrics that are taken when they are named: the parts of a difference, the mirror of another, the coarser one."""
_ORDERS: Final = {"most": most_relevant_first, "least": least_relevant_first}


@dataclass(frozen=True)
class TextSample:
    """A text as a model reads it.

    Args:
        id: its file's name and its line.
        row: what the model is given.
        position: where its logits are read, or None.
        label: the index of the logit that is right, or None where nobody says.
        named: how it reads.
        target: what is explained.
        hideable: the places of the tokens that may be hidden.
        options: the indices among whose logits the right one's should be the largest; none for all.
    """

    id: str
    row: Row
    position: int | None
    label: int | None
    named: str | None
    target: Logit
    hideable: tuple[int, ...]
    options: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _Planned:
    """Hidden sets that are run, and what is made of their values.

    Args:
        column: where that is written.
        sets: ``[S, N]``, of the tokens that may be hidden.
        reads: what is read.
        measure: from the values ``[S]``.
        may: ``[N]``, the places of these tokens.
    """

    column: str
    sets: NDArray[np.bool_]
    reads: str
    measure: Callable[[NDArray[np.float64]], Any]
    may: NDArray[np.int64]


def too_few(count: int) -> str:
    """Why a sample is left out that has fewer than :data:`FEWEST` tokens to hide."""
    return f"has {count} token{'' if count == 1 else 's'} that may be hidden, and an order needs {FEWEST}"


def _points(curve: Curve, values: NDArray[np.float64]) -> list[float]:
    return list(map(float, curve.points(values)))


def _without_probability(error: TargetError, metrics: Sequence[Metric]) -> TargetError:
    """The error, with the metrics of a run that it does not stop, where some read a probability by themselves."""
    reading = [metric for metric in metrics if "probability" in getattr(metric, "reads", "")]
    others = [metric.name for metric in metrics if metric not in reading] or ["ΔA flipping"]
    return TargetError(f'{error}, as by --metrics "{",".join(others)}"') if reading else error


def _hidden(planned: Sequence[_Planned], length: int) -> NDArray[np.bool_]:
    """``[S, T]``: all sets of a case, over all its tokens."""
    found = np.zeros((sum(len(each.sets) for each in planned), length), dtype=bool)
    start = 0
    for each in planned:
        end = start + len(each.sets)
        found[start:end, each.may] = each.sets
        start = end
    return found


class Perturbed(Benchmark[S]):
    """A benchmark that hides tokens of texts, for every metric of :data:`~lrpx.metrics.PERTURBATION_METRICS`.

    Its rows have ``id``, ``tokens``, ``hideable`` and ``position``, the columns :attr:`more`, then ``explained``,
    ``value`` and ``correct``; for each method its relevance, its metrics, empty where a metric is made of the method,
    and the curves that the report draws.
    """

    metrics: ClassVar[Mapping[str, Metric]] = PERTURBATION_METRICS
    title: ClassVar[str] = "Which explanation is true to the model?"
    more: ClassVar[Mapping[str, pa.DataType]] = {}
    """Further facts about a sample."""

    perturbation: str
    """Names of :data:`lrpx.perturbations.WAYS`, with commas between."""
    read_out: str | None
    """What is read at the output, names with commas between, by metrics that do not say themselves; None where nobody
    says."""
    steps: int
    """The most steps of a curve."""
    specials: bool
    """Whether special tokens may be hidden."""

    def settings(self) -> dict[str, Any]:
        """Its fields, lists of names however they are spaced, and how many steps the drawn curves have."""
        names = {"perturbation": ",".join(way.how for way in self.ways), "read_out": ",".join(self.reads)}
        return super().settings() | names | {"points": self.points}

    @property
    def points(self) -> int:
        """Steps of the curves that the report draws, the same of every text, so that their mean can be taken."""
        return min(POINTS, self.steps)

    @property
    def facts(self) -> pa.Schema:
        """``id``, ``tokens``, ``hideable``, ``position`` and :attr:`more`."""
        every = {
            "id": pa.string(),
            "tokens": pa.list_(pa.string()),
            "hideable": pa.list_(pa.int32()),
            "position": pa.int32(),
        }
        return pa.schema(every | dict(self.more))

    @cached_property
    def ways(self) -> tuple[Perturbation, ...]:
        """The perturbations.

        Raises:
            InputError: there is no such perturbation.
        """
        return tuple(Perturbation(how, self.specials) for how in listed(self.perturbation, "perturbation"))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """What is read: the logit where nobody says."""
        return ("logit",) if self.read_out is None else tuple(listed(self.read_out, "read-out"))

    def check(self) -> None:
        """See the class."""
        found = self.ways, self.reads
        if not all(found):
            raise InputError("name a perturbation, and what is read at the output")
        for each in self.reads:
            if each not in READINGS:
                raise InputError(f"nothing is called {each!r} that could be read; choose of {', '.join(READINGS)}")
        if self.steps < 1:
            raise InputError(f"a curve of {self.steps} steps is none; give at least 1")

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Benchmark.check_model`; and that its texts can be perturbed."""
        super().check_model(model)
        for way in self.ways:
            way.check(model)
        check_reads(model, self.reads)

    def hideable(self, question: Questions, model: BoundModel) -> NDArray[np.bool_]:
        """``[T]``: which tokens of a sample may be hidden, by every way of the run."""
        found: NDArray[np.bool_] = np.ones(sum(question.rows[0].lengths), dtype=bool)
        for way in self.ways:
            found &= way.hideable(model, question, 0)
        return found

    def usual(self) -> list[str]:
        """All but those that say again what another one says, so that the verdict counts nothing twice."""
        return [name for name in self.metrics if name not in AGAIN]

    @abstractmethod
    def correct(self, case: Case[S]) -> bool | None:
        """Whether the model predicts what it should; None where nobody says."""

    def explained(self, case: Case[S], model: BoundModel) -> str:
        """What was explained, in words."""
        return case.answers.targets[0].describe(model.label)

    def variants(self, metrics: Sequence[Metric]) -> list[Variant]:
        """The metrics in every way and reading of the run."""
        return variants(metrics, [way.how for way in self.ways], self.reads)

    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """See the class."""
        wrong = next((metric for metric in metrics if not isinstance(metric, PerturbationMetric)), None)
        if wrong is not None:
            raise InputError(f"{wrong.name} is no perturbation metric; register it by perturbation_metric")
        found = [*self.facts, pa.field("explained", pa.string()), pa.field("value", pa.float64())]
        found.append(pa.field("correct", pa.bool_()))
        for method in methods:
            found.append(pa.field(f"relevance/{method}", pa.list_(pa.float64())))
            found += [pa.field(f"{each.name}/{method}", pa.float64()) for each in self.variants(metrics)]
            found += [pa.field(f"curve {order}/{method}", pa.list_(pa.float64())) for order in _ORDERS]
        return pa.schema(found)

    def judge(self, case: Case[S], model: BoundModel, metrics: Sequence[Metric]) -> dict[str, Any]:
        """See :meth:`judge_all`."""
        return self.judge_all([case], model, metrics, 32)[0]

    def judge_all(
        self, cases: Sequence[Case[S]], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> list[dict[str, Any]]:
        """What each method's relevance earns by each metric, all plans of all cases run together.

        Raises:
            InputError: a metric gives a value that is none, or a plan that is none.
            TargetError: there is no probability of what is explained.
            NonFiniteError: NaN or infinity in an output.
        """
        rows = [self._begun(case, model) for case in cases]
        together, answers = joined(cases)
        for number, way in enumerate(self.ways):
            chosen = [each for each in self.variants(metrics) if each.way == way.how]
            drawn = self.reads[0] if number == 0 else None
            reads = list(dict.fromkeys([*(each.reads for each in chosen), *([] if drawn is None else [drawn])]))
            nothing = [np.zeros((1, sum(row.lengths)), dtype=bool) for row in together.rows]
            try:
                full = outputs(model, together, answers, nothing, reads, way, batch_size)
            except TargetError as error:
                raise _without_probability(error, metrics) from error
            planned = [
                self._planned(case, chosen, dict(zip(reads, values[0].tolist(), strict=True)), drawn)
                for case, values in zip(cases, full, strict=True)
            ]
            hidden = [_hidden(each, whole.shape[1]) for each, whole in zip(planned, nothing, strict=True)]
            found = outputs(model, together, answers, hidden, reads, way, batch_size)
            for row, plans, values in zip(rows, planned, found, strict=True):
                start = 0
                for plan in plans:
                    end = start + len(plan.sets)
                    row[plan.column] = plan.measure(values[start:end, reads.index(plan.reads)])
                    start = end
        return rows

    def _begun(self, case: Case[S], model: BoundModel) -> dict[str, Any]:
        row: dict[str, Any] = {
            "explained": self.explained(case, model),
            "value": float(case.answers.values[0]),
            "correct": self.correct(case),
        }
        return row | {f"relevance/{name}": found[0].double().tolist() for name, found in case.relevance.items()}

    def _planned(
        self, case: Case[S], chosen: Sequence[Variant], full: Mapping[str, float], drawn: str | None
    ) -> list[_Planned]:
        """What is run for a case in one way: the metrics' plans, and the curves that are drawn, of one reading."""
        facts = self.facts_of(case.sample)
        may = np.array(facts["hideable"])
        points = [(2 * at * len(may) + self.points) // (2 * self.points) for at in range(self.points + 1)]
        found = []
        for method, relevance in case.relevance.items():
            given = Given(relevance[0].double().numpy()[may], 0.0, self.steps, str(facts["id"]))
            for each in chosen:
                if each.says_of(method):
                    asked = replace(given, full=full[each.reads])
                    measure = partial(each.metric, asked)
                    found.append(_Planned(f"{each.name}/{method}", each.metric.sets(asked), each.reads, measure, may))
            for order, taken in _ORDERS.items() if drawn is not None else ():
                curve = taken(given, points)
                assert drawn is not None
                found.append(_Planned(f"curve {order}/{method}", curve.sets, drawn, partial(_points, curve), may))
        return found

    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write ``table.md``, ``curves.png`` and ``report.html``; see
        :func:`lrpx.benchmarks._faithful_report.write_reports`."""
        return terminal(write_reports(store, self.title, show=show))


@register
@dataclass(frozen=True)
class Faithfulness(Perturbed[TextSample]):
    """Which explanation is true to your model, on your texts? By what the model says when tokens are hidden.

    Args:
        data: the texts.
        text, label: the columns of a table.
        decoder: the column of what an encoder-decoder model has written so far; None where it has written nothing.
        target: what is explained: the model's own prediction, the data's label (of a language model the text's last
            token, of an encoder-decoder model the label's first), or a class or token by its name.
        perturbation: how tokens are hidden, names with commas between.
        read_out: what is read at the output, names with commas between; :attr:`next_token` of a next token where nobody
            says, else the logit.
        steps: the most steps of a curve.
        specials: whether special tokens are hidden too.
        context: read so many tokens of each text at most.
        limit: take the first so many texts.
        last: of these take the last so many.
    """

    data: Annotated[Path, "Texts: .tsv, .csv, .jsonl or .parquet with named columns, or .txt, a line each."]
    text: Annotated[str, "The column of the texts."] = "text"
    label: Annotated[str, "The column of the labels, if there is one."] = "label"
    decoder: Annotated[str | None, "The column of what an encoder-decoder model has written so far."] = None
    target: Annotated[str, "What is explained: predicted, label, or the name of a class or token."] = "predicted"
    perturbation: Annotated[
        str, "Some of: attention-mask, zero-embedding, mask-token, unk, pad, delete; with commas between."
    ] = "attention-mask"
    read_out: Annotated[
        str | None,
        "What metrics read that do not say: some of logit, probability, log-probability; with commas between. By "
        "default the logit, and by faithfulness of a next token its log-probability, too.",
    ] = None
    steps: Annotated[int, "The most steps of a curve."] = 100
    specials: Annotated[bool, "Hide special tokens, too."] = False
    context: Annotated[int | None, "Read only the first so many tokens of a text."] = None
    limit: Annotated[int | None, "Take the first so many texts."] = None
    last: Annotated[int | None, "Of these take the last so many."] = None

    name: ClassVar[str] = "faithfulness"
    tasks: ClassVar[frozenset[Task]] = frozenset({Task.CAUSAL, Task.MASKED, Task.CLASSIFICATION, Task.SEQ2SEQ})
    methods: ClassVar[tuple[str, ...]] = (
        "attnlrp", "lrp", "gradient-x-input", "gradient-l1", "gradient-l2-squared", "leave-one-out", "random",
        "position",
    )  # fmt: skip
    next_token: ClassVar[str] = "logit,log-probability"
    """What is read of a next token where nobody says: a logit alone also moves with the normaliser of them all."""
    more: ClassVar[Mapping[str, pa.DataType]] = {"label": pa.string()}
    source: ClassVar[pa.Schema] = pa.schema(
        {"id": pa.string(), "line": pa.int32(), "text": pa.string(), "label": pa.string(), "decoder": pa.string()}
    )

    def check(self) -> None:
        """See the class."""
        super().check()
        for name, value in (("context", self.context), ("limit", self.limit), ("last", self.last)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give at least 1")

    def for_model(self, model: BoundModel) -> Self:
        """With what is read, where nobody says."""
        of_next = self.read_out is None and model.task in (Task.CAUSAL, Task.SEQ2SEQ)
        return replace(self, read_out=self.next_token) if of_next else self

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Perturbed.check_model`."""
        super().check_model(model)
        if self.decoder is not None and model.task is not Task.SEQ2SEQ:
            raise ModelError(f"{type(model.module).__name__} has no decoder of its own; leave --decoder out")

    def read(self) -> Source:
        """The texts of the file.

        Raises:
            DataError: it cannot be read, or has no such column, or no text; or no label in the column that was named.
        """
        texts = read_texts(self.data, self.text, self.label, self.limit, self.decoder)
        if self.label != Faithfulness.label and all(each.label is None for each in texts):
            raise DataError(
                f"{self.data} has no label in a column {self.label!r}; name the column of the labels with --label, or "
                "leave it out"
            )
        rows = [{"id": f"{self.data.stem}:{each.line}"} | asdict(each) for each in texts]
        before = 0 if self.last is None else max(len(rows) - self.last, 0)
        counts = {"texts": len(rows)} | ({"not of the last": before} if before else {})
        return Source(pa.Table.from_pylist(rows[before:], self.source), (), {"counts": counts})

    def samples(self, source: Source, model: BoundModel) -> Samples[TextSample]:
        """The texts as the model reads them, less those that are too long or too short.

        Raises:
            InputError, DataError: none is left, or a label is none of the model's.
        """
        kept: list[TextSample] = []
        dropped: list[Dropped] = []
        for row in rows_of(source, model, self.data, self.target):
            found = self._sample(row, model)
            if isinstance(found, TextSample):
                kept.append(found)
            else:
                dropped.append(Dropped(row["id"], row["line"], found, row["text"]))
        if not kept:
            raise InputError(
                f"none of the {len(dropped)} texts in {self.data.name} can be used, the first because it "
                f"{dropped[0].reason}; pass other texts"
            )
        lengths = [sum(each.row.lengths) for each in kept]
        return Samples(kept, tuple(dropped), {"kept": len(kept), "mean tokens": sum(lengths) / len(lengths)})

    def _sample(self, row: Mapping[str, Any], model: BoundModel) -> TextSample | str:
        """A sample, or why there is none."""
        try:
            ids, more = self._ids(row["text"], model)
        except InputError as error:
            return str(error).split(";")[0]
        causal = model.task is Task.CAUSAL
        label: int | None = None
        if causal:
            end = max((i + 1 for i, each in enumerate(ids) if each not in self._special(model)), default=0)
            if end < FEWEST:
                return f"has {end} token{'' if end == 1 else 's'}, and the last is to be told from those before it"
            ids, label = ids[: end - 1], ids[end - 1]
            more = {name: values[: len(ids)] for name, values in more.items()}
        elif row["label"] is not None:
            label = self._first(row, model) if model.task is Task.SEQ2SEQ else labelled(row, model, self.data)
        try:
            made = model.reader.row({"input_ids": ids, "attention_mask": [1] * len(ids)} | more, row["decoder"])
            position = model.reader.position(made)
        except InputError as error:
            return f"cannot be read: {str(error).split(';')[0]}"
        target = self._target(row, label, model)
        question = Questions((made,), (Question(0, position, target),))
        may = tuple(np.flatnonzero(self.hideable(question, model)).tolist())
        if len(may) < FEWEST:
            return too_few(len(may))
        named = None if label is None else model.label(label)
        return TextSample(row["id"], made, position, label, named, target, may)

    def _first(self, row: Mapping[str, Any], model: BoundModel) -> int:
        """The token that a label begins with, as a decoder writes it.

        Raises:
            DataError: the tokenizer has none.
        """
        tokenizer = model.reader.text_tokenizer
        ids = decoder_ids(tokenizer, row["label"], DataError)
        if not ids or ids[0] == tokenizer.unk_token_id:
            raise DataError(
                f"{self.data}:{row['line']} has the label {row['label']!r}, which the model's tokenizer has no token "
                "for; give what the model may write"
            )
        return ids[0]

    @staticmethod
    def _special(model: BoundModel) -> frozenset[int]:
        """What a tokenizer may put behind a text."""
        return frozenset(model.reader.text_tokenizer.all_special_ids)

    def _ids(self, text: str, model: BoundModel) -> tuple[list[int], dict[str, list[int]]]:
        """The ids of a text, cut to the context where one is given, and what else the tokenizer says of each."""
        most = None if self.context is None else self.context + (model.task is Task.CAUSAL)
        tokenizer = model.reader.text_tokenizer
        if most is None:
            found = tokenizer(text)
        else:
            with cutting_at_the_end(tokenizer):
                found = tokenizer(text, truncation=True, max_length=most)
        count = len(found["input_ids"])
        limit = None if model.limit is None else model.limit + (model.task is Task.CAUSAL)
        if limit is not None and count > limit:
            raise InputError(f"has {count} tokens, more than the model’s context of {model.limit}; pass --context")
        more = {
            name: list(values)
            for name, values in found.items()
            if name not in ("input_ids", "attention_mask") and len(values) == count
        }
        return list(found["input_ids"]), more

    def _target(self, row: Mapping[str, Any], label: int | None, model: BoundModel) -> Logit:
        if self.target == "predicted":
            return Logit()
        if self.target != "label":
            try:
                return Logit(index_of(self.target, model))
            except TargetError as error:
                said, _, mend = str(error).partition("; ")
                names = ["one token", mend.removeprefix("pass ").removesuffix(", or the index of a class")]
                raise TargetError(f"{said}; name {names[model.task is Task.CLASSIFICATION]} with --target") from error
        if label is None:
            raise DataError(
                f"{self.data}:{row['line']} has no label in the column {self.label!r}, which is to be explained; name "
                "the column with --label, or explain --target predicted"
            )
        return Logit(label)

    def facts_of(self, sample: TextSample) -> dict[str, Any]:
        """The sample in the columns :attr:`facts`."""
        return {
            "id": sample.id,
            "tokens": list(sample.row.tokens.pieces),
            "hideable": list(sample.hideable),
            "position": sample.position,
            "label": sample.named,
        }

    def ask(self, sample: TextSample, model: BoundModel) -> Questions:
        """Its one question."""
        return Questions((sample.row,), (Question(0, sample.position, sample.target),))

    def correct(self, case: Case[TextSample]) -> bool | None:
        """Whether the label has the largest logit, of all or of the options."""
        label, logits = case.sample.label, case.answers.logits[0]
        best = max(case.sample.options, key=lambda option: float(logits[option]), default=int(logits.argmax()))
        return None if label is None else best == label


@register
@dataclass(frozen=True)
class LeaveOneOutAgreement(Faithfulness):
    """Does an explanation say what leave-one-out says, on your texts? With the curves beside it (You et al. 2025)."""

    name: ClassVar[str] = "loo"
    next_token: ClassVar[str] = "logit"
    title: ClassVar[str] = "Which explanation says what leave-one-out says?"

    def usual(self) -> list[str]:
        """Those of You et al. 2025, Table 2."""
        return ["LOO Pearson", "LOO Spearman", "AOPC LeRF", "AOPC MoRF", "AOPC Δ"]


@contextmanager
def cutting_at_the_end(tokenizer: Any) -> Iterator[None]:
    """In the block, what a tokenizer cuts off a text is its end, whichever side it cuts; it is left as it was."""
    side = getattr(tokenizer, "truncation_side", "right")
    try:
        if side != "right":
            tokenizer.truncation_side = "right"
        with cutting(tokenizer):
            yield
    finally:
        if side != "right":
            tokenizer.truncation_side = side


def listed(names: str, what: str) -> list[str]:
    """Names with commas between, each once.

    Raises:
        InputError: there is none, or one twice.
    """
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found or len(set(found)) != len(found):
        raise InputError(f"{what} is {names!r}; name one or more, each once, with commas between")
    return found
