"""What a benchmark is: samples, questions about them, a judgement of the answers as columns, and a report.

A benchmark is one file: a frozen dataclass, whose fields are what defines a run (and the options of its command),
registered by the decorator :func:`register`. Everything else is done for it: batches, methods, parts, resuming, the
command line.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from inspect import isabstract
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

import torch

from lrpx._registry import Registry
from lrpx._scripts import from_script, is_script
from lrpx.errors import DataError, InputError, ModelError, TargetError
from lrpx.questions import Answers, Questions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from rich.console import RenderableType
    from torch import Tensor

    from lrpx._data.agreement import Dropped
    from lrpx.methods import Method
    from lrpx.metrics import Metric
    from lrpx.model import BoundModel
    from lrpx.parts import Part
    from lrpx.runs import Store
    from lrpx.tasks import Task

S = TypeVar("S")
"""What a benchmark's sample is."""


@dataclass(frozen=True)
class Source:
    """What a benchmark reads from its files, before any model sees it. It is kept in the run's folder.

    Args:
        rows: of the benchmark's ``source`` columns.
        dropped: what gave no sample, and why.
        notes: what the record shall say of it, plain JSON values: ``{"sources": [...], "counts": {...}}``.
    """

    rows: pa.Table
    dropped: tuple[Dropped, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples(Generic[S]):
    """The samples as one model reads them.

    Args:
        kept: the samples, in order.
        dropped: those that the model cannot be asked, and why.
        statistics: numbers about them, for the record and the report.
    """

    kept: Sequence[S]
    dropped: tuple[Dropped, ...] = ()
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case(Generic[S]):
    """A sample with what the model says to its ``K`` questions, and what each method found.

    Args:
        sample: the sample.
        questions: those of this sample alone, about its one row.
        answers: logits ``[K, V]``, targets, values ``[K]``.
        relevance: for each method, for each question ``[T]``, on the CPU; empty where a benchmark does not ask for it.
        parts: for each method, for each question, the other parts of its relevance by name, such as ``"pixels"``.
        methods: the methods, by name.
    """

    sample: S
    questions: Questions
    answers: Answers
    relevance: Mapping[str, tuple[Tensor, ...]]
    parts: Mapping[str, tuple[Mapping[str, Part], ...]] = field(default_factory=dict)
    methods: Mapping[str, Method] = field(default_factory=dict)


def joined(cases: Sequence[Case[Any]]) -> tuple[Questions, Answers]:
    """The first question of each case, and what the model says to it, as those of one batch."""
    questions = Questions(
        tuple(case.questions.rows[0] for case in cases),
        tuple(replace(case.questions.asked[0], row=i) for i, case in enumerate(cases)),
    )
    answers = Answers(
        torch.stack([case.answers.logits[0] for case in cases]),
        tuple(case.answers.targets[0] for case in cases),
        torch.stack([case.answers.values[0] for case in cases]),
    )
    return questions, answers


class Benchmark(ABC, Generic[S]):
    """Data → questions → judgement → report. Write a frozen dataclass with these, and :func:`register` it.

    Each field is an option of the command, named, typed and helped by its annotation:
    ``data: Annotated[list[Path], "Sentences: a treebank."]``. Fields are what a sample depends on, and nothing else.
    """

    name: ClassVar[str]
    """Of its command, and of its runs' kind."""
    methods: ClassVar[tuple[str, ...]] = ()
    """The methods that are measured when none are named; if it is empty, all that serve the model."""
    explains: ClassVar[bool] = True
    """Whether the methods explain each sample's tokens first; if not, its judgement asks them what it needs."""
    tasks: ClassVar[frozenset[Task]]
    """What the models predict that it can be asked of."""
    metrics: ClassVar[Mapping[str, Metric]]
    """The metrics that its judgement takes, by name."""
    source: ClassVar[pa.Schema]
    """The columns of what it reads."""
    facts: ClassVar[pa.Schema]
    """The columns that say what a sample is, whatever the model answers; ``id`` is one of them."""

    def check(self) -> None:
        """Refuse fields that do not fit together, before any work.

        Raises:
            InputError: says why.
        """

    def usual(self) -> list[str]:
        """The metrics that are taken when none are named: all that it knows."""
        return list(self.metrics)

    def for_model(self, model: BoundModel) -> Self:
        """Itself, with what hangs on the model where nobody says: nothing."""
        del model
        return self

    def of_model(self, model: BoundModel) -> Sequence[Method]:
        """Methods that are measured beside :attr:`methods`, and can be named, for this model: none.

        Raises:
            ModelError: the model is none that it has methods for.
        """
        del model
        return ()

    def besides(self) -> Sequence[str]:
        """Which of :meth:`of_model` its fields ask for, whatever methods are named: none."""
        return ()

    def check_methods(self, methods: Sequence[Method]) -> None:
        """Refuse methods that it cannot measure, before any work.

        Raises:
            MethodError: says why.
        """
        del methods

    def settings(self) -> dict[str, Any]:
        """What its fields are, as plain JSON values that are the same wherever the same data lie: a file is its name,
        its size and its digest.

        Raises:
            DataError: a file cannot be read.
        """
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_plain(cls, options: Mapping[str, Any]) -> Self:
        """The benchmark of options that were plain JSON values, where paths are texts.

        Raises:
            TypeError: it has other options.
        """
        known = cls.options()
        wrong = set(options) - set(known)
        if wrong:
            raise TypeError(f"{cls.name} has no option {', '.join(sorted(wrong))}")
        return cls(**{name: _typed(known[name][0], value) for name, value in options.items()})

    @classmethod
    def options(cls) -> dict[str, tuple[Any, str]]:
        """The type of each field, and what its annotation says of it.

        Raises:
            TypeError: it is no dataclass, or a field has no such annotation.
        """
        found: dict[str, tuple[Any, str]] = {}
        for each in fields(cls):  # type: ignore[arg-type]
            owner = next(kind for kind in cls.__mro__ if each.name in vars(kind).get("__annotations__", {}))
            alone = type("_", (), {"__annotations__": {each.name: each.type}, "__module__": owner.__module__})
            kind, *said = get_args(get_type_hints(alone, include_extras=True)[each.name]) or (None,)
            if len(said) != 1 or not isinstance(said[0], str):
                raise TypeError(f'say what {each.name} is: {each.name}: Annotated[Path, "A file of …"]')
            found[each.name] = kind, said[0]
        return found

    @abstractmethod
    def read(self) -> Source:
        """What the files hold; this may take long, and is done once for a folder."""

    @abstractmethod
    def samples(self, source: Source, model: BoundModel) -> Samples[S]:
        """The samples as a model reads them.

        Raises:
            InputError: none is left.
        """

    @abstractmethod
    def facts_of(self, sample: S) -> dict[str, Any]:
        """The sample in the columns :attr:`facts`."""

    @abstractmethod
    def ask(self, sample: S, model: BoundModel) -> Questions:
        """The questions about a sample, all about one row."""

    @abstractmethod
    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """The columns of a row: :attr:`facts` first, then the judgement."""

    @abstractmethod
    def judge(self, case: Case[S], model: BoundModel, metrics: Sequence[Metric]) -> dict[str, Any]:
        """The judgement of a case, in the columns behind :attr:`facts`. The model is there to be asked further."""

    def judge_all(
        self, cases: Sequence[Case[S]], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> list[dict[str, Any]]:
        """The judgement of each case of a batch: for a benchmark that asks the model further, so that it asks for all
        of them at once, ``batch_size`` texts at a time."""
        del batch_size
        return [self.judge(case, model, metrics) for case in cases]

    @abstractmethod
    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write the reports of a run into its folder, from its rows.

        Args:
            store: the run's folder.
            show: ids of samples that the reports shall show.

        Returns:
            What the terminal shows.
        """

    def check_model(self, model: BoundModel) -> None:
        """Refuse a model that cannot be asked, before any work.

        Raises:
            ModelError: says why.
        """
        kind = type(model.module).__name__
        if model.task not in self.tasks:
            served = " or ".join(sorted(task.named for task in self.tasks))
            raise ModelError(f"{kind} is {model.task.named}, and {self.name} asks {served}; pass such a model")
        if model.tokenizer is None:
            raise ModelError("the model has no tokenizer to read samples with; save its tokenizer in the same folder")
        model.refuse_random()


def labelled(row: Mapping[str, Any], model: BoundModel, path: Path) -> int:
    """The index of the label of a file's row: its name, or its number.

    Raises:
        DataError: the model has none such, or more than one.
    """
    given = row["label"]
    try:
        return index_of(given, model)
    except TargetError as error:
        mend = str(error).replace("the index of a class", "its number")
        raise DataError(
            f"{path}:{row['line']} has the label {given!r}, which is not one of the model's classes: {mend}"
        ) from error


def rows_of(source: Source, model: BoundModel, path: Path, target: str) -> list[dict[str, Any]]:
    """The rows of a source, whose labels are not the names of some classes and the numbers of others, as 0 to 4 are of
    "1" to "5". Without labels, where a model gives one score and these are no target: they are scores, and no class.

    Raises:
        DataError: the model has none such; or one is a class's number alone, and another names a class of another
            number.
    """
    rows: list[dict[str, Any]] = source.rows.to_pylist()
    if model.task.logits != "classes":
        return rows
    if _classes(model) == 1 and target != "label":
        return [row | {"label": None} for row in rows]
    numbers: list[Mapping[str, Any]] = []
    names: list[tuple[Mapping[str, Any], int]] = []
    for row in rows:
        if row["label"] is not None and row["label"].isdecimal():
            index = labelled(row, model, path)
            if index != int(row["label"]):
                names.append((row, index))
            elif model.label(index) != row["label"]:
                numbers.append(row)
    if numbers and names:
        number, (name, index) = numbers[0], names[0]
        raise DataError(
            f"{path}:{number['line']} has the label {number['label']!r}, which is a class's number and no name, and "
            f"line {name['line']} {name['label']!r}, which is the name of class {index}; write the names of all classes"
        )
    return rows


def _classes(model: BoundModel) -> int:
    """How many classes a classifier has, 0 where the model is none."""
    return int(getattr(model.config, "num_labels", 0)) if model.task.logits == "classes" else 0


def index_of(given: str, model: BoundModel) -> int:
    """The index of a token or a class that is given by its name, or a class by its number.

    Raises:
        TargetError: the model has none such, or several.
    """
    try:
        return model.index(given)
    except TargetError as error:
        if given.isdecimal() and int(given) < _classes(model):
            return int(given)
        raise TargetError(str(error).replace("by its id", "by its number")) from error


BENCHMARKS: Registry[type[Benchmark[Any]]] = Registry("benchmark", InputError, "lrpx.benchmarks")
"""Every benchmark by its name: ours, those of other packages (entry points ``lrpx.benchmarks``), and yours."""

B = TypeVar("B", bound=type[Benchmark[Any]])


def register(kind: B) -> B:
    """Make a benchmark known by its name: a decorator for its class.

    Raises:
        InputError: it is none, lacks something, or another one has its name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Benchmark)):
        raise InputError(f"{kind!r} is no benchmark; derive it from lrpx.benchmarks.Benchmark")
    if isabstract(kind):
        raise InputError(f"the benchmark {kind.__name__} lacks {', '.join(sorted(kind.__abstractmethods__))}; add them")
    try:
        kind.options()
    except (TypeError, NameError) as error:
        raise InputError(f"the fields of {kind.__name__} are no options: {error}") from error
    BENCHMARKS.add(kind.name, kind, kind.__module__)
    return kind


def find(given: str) -> type[Benchmark[Any]]:
    """A benchmark by its name, or by the script that registers it, ``"my.py"`` or ``"my.py:name"``.

    Raises:
        InputError: there is none of that name, or the script cannot be run.
    """
    return from_script(given, BENCHMARKS, "benchmark", InputError) if is_script(given) else BENCHMARKS[given]


def file_of(path: Path) -> dict[str, Any]:
    """What tells one file of data from another: its name, its size, its SHA-256.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name another file") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return file_of(value)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _typed(hint: Any, value: Any) -> Any:
    """A plain value as a field's type has it."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if value is None:
        return None
    if get_origin(hint) in (list, tuple):
        return [_typed(kinds[0], each) for each in value]
    if get_origin(hint) is UnionType:
        return _typed(kinds[0], value)
    return Path(value) if hint is Path else value
