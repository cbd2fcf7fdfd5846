"""A benchmark, a model and methods: a run, whose every part is a pure function of the run's spec.

A spec is plain JSON values. From it, and from the files it names, another process on another machine makes exactly the
same parts (:meth:`Run.from_spec`, :meth:`Run.part`); one that finds another model, method, metric or file refuses.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from lrpx._defined import settings_of_model
from lrpx._scripts import from_script, is_script, script_of, settings_of
from lrpx.benchmarks._contract import Benchmark, Case, Samples, Source, find
from lrpx.errors import InputError, MethodError, ModelError, NonFiniteError, ResultFileError
from lrpx.methods import METHODS, attribute_all
from lrpx.methods import find as find_method
from lrpx.methods._contract import check_each_once
from lrpx.model import Spec
from lrpx.questions import Questions
from lrpx.runs import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lrpx.methods import Method
    from lrpx.metrics import Metric
    from lrpx.model import BoundModel

PART: Final = 512
"""Samples in a part: a killed run loses at most the part in work."""


class Run:
    """A benchmark ready to run.

    Args:
        benchmark: what is measured.
        model: on which model.
        methods: which methods, each as :func:`lrpx.methods.find` takes it; those of the benchmark when None.
        metrics: by which metrics, each by its name or a script of yours, ``"my.py"`` or ``"my.py:name"``; those of the
            benchmark when None.
        batch_size: the most samples that run together.
        part: samples in a part.

    Raises:
        MethodError: there is no such method, two have one name, or one does not serve the model.
        ModelError, InputError: the model, the benchmark's fields, or the metrics do not fit.
    """

    def __init__(
        self,
        benchmark: Benchmark[Any],
        model: BoundModel,
        methods: Sequence[Any] | None = None,
        metrics: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
        part: int = PART,
    ) -> None:
        benchmark = benchmark.for_model(model)
        own = {method.name: method for method in benchmark.of_model(model)}
        known = benchmark.methods or [name for name, each in METHODS.items() if model.task in each.tasks]
        given = [*known, *own] if methods is None else list(dict.fromkeys([*methods, *benchmark.besides()]))
        named = benchmark.usual() if metrics is None else list(dict.fromkeys(metrics))
        self.benchmark = benchmark
        self.model = model
        self.methods: tuple[Method, ...] = tuple(own.get(str(each)) or find_method(each) for each in given)
        self.metrics: tuple[Metric, ...] = tuple(find_metric(name, benchmark.metrics) for name in named)
        self.batch_size = batch_size
        self.size = part
        self._check()
        self._given = [
            str(each) if isinstance(each, (str, Path)) else method.name
            for each, method in zip(given, self.methods, strict=True)
        ]
        self._named = named

    def _check(self) -> None:
        check_each_once(self.methods)
        metrics = [metric.name for metric in self.metrics]
        if not metrics or len(set(metrics)) != len(metrics):
            raise InputError(f"the metrics are {', '.join(metrics) or 'none'}; name one or more, each once")
        for name, value in (("batch_size", self.batch_size), ("part", self.size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; pass a whole number, at least 1")
        self.benchmark.check()
        self.benchmark.check_model(self.model)
        self.benchmark.check_methods(self.methods)
        for method in self.methods:
            method.check(self.model)
        self._refuse_itself()
        self.benchmark.columns([method.name for method in self.methods], self.metrics)

    def _refuse_itself(self) -> None:
        """Refuse a method under another name that a metric is made of: it would be compared with itself."""
        for metric in self.metrics:
            for name in getattr(metric, "itself", ()):
                known = find_method(name).describe()
                other = next((each for each in self.methods if each.name != name and each.describe() == known), None)
                if other is not None:
                    raise MethodError(
                        f"{other.name} is {name} by another name, which {metric.name} would compare with itself; name "
                        f"{name} instead"
                    )

    # ------------------------------------------------------------------------- spec

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What defines the run's rows, up to rounding, as plain JSON values: the model, the data, the methods, the
        metrics.

        Raises:
            DataError: a file cannot be read.
        """
        return (
            {
                "model": self.model.as_it_is,
                "weights and config": self.model.fingerprint(),
                "tokenizer": self.model.tokenizer_fingerprint(),
                "task": self.model.task.title,
                "dtype": self.model.precision,
            }
            | self.data
            | {
                "methods": [method.name for method in self.methods],
                "described": {method.name: method.describe() for method in self.methods},
                "metrics": [metric.describe() for metric in self.metrics],
                "part": self.size,
            }
            | of_scripts(self.methods, self.metrics)
            | settings_of_model(self.model.module)
        )

    @cached_property
    def data(self) -> dict[str, Any]:
        """What defines what the benchmark reads, a part of the settings.

        Raises:
            DataError: a file cannot be read.
        """
        return data_of(self.benchmark)

    @property
    def digest(self) -> str:
        """Of the settings; every part carries it."""
        return digest(self.benchmark.name, self.settings)

    @property
    def spec(self) -> dict[str, Any]:
        """All that another process needs to make the parts of this run, as plain JSON values.

        What is not in it must be there too: files at their paths, scripts, and a model of your own, if it was loaded by
        no name.
        """
        script = script_of(type(self.benchmark))
        options = {each.name: getattr(self.benchmark, each.name) for each in fields(self.benchmark)}  # type: ignore[arg-type]
        return {
            "benchmark": self.benchmark.name if script is None else f"{script}:{self.benchmark.name}",
            "options": json.loads(json.dumps(options, default=str)),
            "model": None if self.model.spec is None else self.model.spec.to_dict(),
            "methods": self._given,
            "metrics": self._named,
            "batch_size": self.batch_size,
            "settings": self.settings,
        }

    @classmethod
    def from_spec(
        cls, spec: Mapping[str, Any], *, model: BoundModel | None = None, methods: Sequence[Any] | None = None
    ) -> Run:
        """The run of a spec.

        Args:
            spec: what :attr:`spec` gave.
            model: the model, where the spec has none, or where it is loaded already.
            methods: the methods, where they cannot be found by what the spec calls them.

        Raises:
            ResultFileError: the spec is none, or what is found here is not what it describes; names what differs.
            ModelError, MethodError, InputError, DataError: something cannot be found.
        """
        try:
            kind = find(spec["benchmark"])
            described, wanted = spec["model"], dict(spec["settings"])
            benchmark = kind.from_plain(spec["options"])
            given = spec["methods"] if methods is None else methods
            metrics, batch_size, part = spec["metrics"], spec["batch_size"], wanted["part"]
        except (KeyError, TypeError) as error:
            raise ResultFileError(
                f"this is no spec of a run ({type(error).__name__}: {error}); pass what Run.spec gave"
            ) from error
        if model is None and described is None:
            raise ModelError("the run's model was loaded by no name; pass it: Run.from_spec(spec, model=…)")
        bound = Spec.from_dict(described).build() if model is None else model
        run = cls(benchmark, bound, given, metrics, batch_size=batch_size, part=part)
        found = json.loads(json.dumps(run.settings))
        different = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if different:
            raise ResultFileError(
                f"the spec has another {', '.join(different)} than what is found here; use the same model, files and "
                "versions, or make a new spec"
            )
        return run

    # ------------------------------------------------------------------------ parts

    @cached_property
    def source(self) -> Source:
        """What the benchmark reads from its files. It may be set to what was read before.

        Raises:
            DataError, InputError: a file cannot be read, or has other columns than the benchmark says.
        """
        return read(self.benchmark)

    @cached_property
    def samples(self) -> Samples[Any]:
        """The samples as the model reads them.

        Raises:
            DataError, InputError: a file cannot be read, no sample is left, or two have one id.
        """
        found = self.benchmark.samples(self.source, self.model)
        ids = Counter(map(self.id_of, found.kept)).most_common(1)
        if not ids:
            raise InputError(f"no sample of {self.benchmark.name} is left; pass other data")
        if ids[0][1] > 1:
            raise InputError(
                f"{ids[0][1]} samples of {self.benchmark.name} are called {ids[0][0]!r}; name each its own"
            )
        return found

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.samples.kept)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-len(self) // self.size)

    @cached_property
    def columns(self) -> pa.Schema:
        """Of the rows."""
        return self.benchmark.columns([method.name for method in self.methods], self.metrics)

    def part(self, number: int, done: Callable[[int], object] = lambda _: None) -> pa.Table:
        """The rows of a part: always the same for the same spec.

        Args:
            number: from 0.
            done: called with how many more samples are done.

        Raises:
            InputError: there is no such part; a token that the model does not have, or a value that is no metric's.
            NonFiniteError: NaN or infinity in the logits or the relevance; names the sample.
            MethodError: a method that does not apply to the model.
        """
        if not 0 <= number < self.parts:
            raise InputError(f"there is no part {number}; the {len(self)} samples have parts 0 to {self.parts - 1}")
        chosen = self.chosen(number)
        asked = [self._ask(sample) for sample in chosen]
        made: list[dict[str, Any]] = [{}] * len(chosen)
        for group in self.model.groups([each.rows[0] for each in asked], self.batch_size):
            cases = self._explained([chosen[i] for i in group], [asked[i] for i in group])
            judged = self.benchmark.judge_all(cases, self.model, self.metrics, self.batch_size)
            for i, case, each in zip(group, cases, judged, strict=True):
                made[i] = self.benchmark.facts_of(case.sample) | each
                done(1)
        return pa.Table.from_pylist(made, self.columns)

    def chosen(self, number: int) -> Sequence[Any]:
        """The samples of a part."""
        return self.samples.kept[number * self.size : (number + 1) * self.size]

    def _ask(self, sample: Any) -> Questions:
        where = f" (sample {self.id_of(sample)})"
        try:
            asked = self.benchmark.ask(sample, self.model)
        except InputError as error:
            raise InputError(f"{error}{where}") from error
        if len(asked.rows) != 1:
            raise InputError(f"{self.benchmark.name} asks about {len(asked.rows)} rows at once; ask about one a sample")
        return replace(asked, rows=(replace(asked.rows[0], where=where),))

    def id_of(self, sample: Any) -> str:
        """The id of a sample."""
        return str(self.benchmark.facts_of(sample)["id"])

    def _explained(self, samples: Sequence[Any], asked: Sequence[Questions]) -> list[Case[Any]]:
        """A batch; one with a number that is not finite goes again sample by sample, to name it."""
        together = Questions(
            tuple(each.rows[0] for each in asked),
            tuple(replace(question, row=i) for i, each in enumerate(asked) for question in each.asked),
        )
        try:
            explained = attribute_all(self.methods, self.model, together) if self.benchmark.explains else {}
            answers = explained[self.methods[0].name].answers if explained else self.model.ask(together)
        except NonFiniteError as error:
            if len(samples) == 1:
                raise NonFiniteError(f"sample {self.id_of(samples[0])}: {error}") from error
            for sample, each in zip(samples, asked, strict=True):
                self._explained([sample], [each])
            raise
        cases, start = [], 0
        for sample, each in zip(samples, asked, strict=True):
            own = slice(start, start + len(each))
            start += len(each)
            mine = replace(
                answers, logits=answers.logits[own], targets=answers.targets[own], values=answers.values[own]
            )
            relevance = {name: one.relevance[own] for name, one in explained.items()}
            parts = {
                name: tuple({part: every[i] for part, every in one.parts.items()} for i in range(own.start, own.stop))
                for name, one in explained.items()
            }
            cases.append(Case(sample, each, mine, relevance, parts, {each.name: each for each in self.methods}))
        return cases


def data_of(benchmark: Benchmark[Any]) -> dict[str, Any]:
    """What defines what a benchmark reads: its settings, and its script, if it is a user's.

    Raises:
        DataError: a file cannot be read.
    """
    return benchmark.settings() | settings_of("benchmark", {benchmark.name: type(benchmark)})


def of_scripts(methods: Sequence[Method], metrics: Sequence[Metric]) -> dict[str, str]:
    """Settings of those methods and metrics that users' scripts have registered."""
    return settings_of("method", {each.name: each for each in methods}) | settings_of(
        "metric", {each.name: each for each in metrics}
    )


def read(benchmark: Benchmark[Any]) -> Source:
    """What a benchmark reads from its files; no model is needed.

    Raises:
        DataError, InputError: a file cannot be read, or has other columns than the benchmark says.
    """
    found = benchmark.read()
    if not found.rows.schema.equals(benchmark.source):
        wanted = ", ".join(benchmark.source.names)
        raise InputError(f"{benchmark.name} reads other columns than its source says; make them {wanted}")
    return found


def find_metric(given: str, known: Mapping[str, Metric]) -> Metric:
    """A metric by its name, or the one that a script registers.

    Raises:
        InputError: there is none.
    """
    if is_script(given):
        return from_script(given, known, "metric", InputError)
    if given not in known:
        raise InputError(f"there is no metric {given!r}; the metrics are {', '.join(known)}")
    return known[given]
