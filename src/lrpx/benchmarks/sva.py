"""The subject-verb agreement benchmark (Arras et al. 2025, §3 and App. B): from sentences to relevance and metrics.

:func:`prepare` reads the sentences and finds the ground truth, first in words and then in one model's tokens;
:meth:`Run.explain` explains every sample and writes the rows, a part at a time. A run that was stopped goes on where it
was when it is started again with the same settings, and ends with the same rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lrpx import tasks
from lrpx.benchmarks import record, rows, samples
from lrpx.benchmarks.scoring import DRAWS, facts, score
from lrpx.data.agreement import Dropped, Sample, read_agreement
from lrpx.data.tokenised import Tokenised, tokenise
from lrpx.errors import InputError, MethodError, ModelError
from lrpx.methods import METHODS
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from lrpx.explainer import Explainer


@dataclass(frozen=True)
class Run:
    """A benchmark that is ready to run.

    Args:
        explainer: the model.
        folder: where everything is written.
        methods: names of methods.
        batch_size: the most rows run together.
        counts: how many verbs were read, dropped for which reason, and kept; and dropped for the model's sake.
        statistics: the numbers of App. B about the tokenised samples.
    """

    explainer: Explainer
    folder: Path
    methods: tuple[str, ...]
    batch_size: int
    counts: dict[str, int]
    statistics: dict[str, float]

    def __len__(self) -> int:
        """How many samples there are."""
        return int(self.statistics["samples"])

    def explain(self) -> Iterator[int]:
        """Explain every sample, and write the rows a part at a time; a part that is there already is kept.

        Yields:
            How many more samples are done.

        Raises:
            ResultFileError: a part cannot be written; those before it are.
            NonFiniteError: NaN or infinity in the logits or the relevance; names the sample.
            InputError: the model does not have a token that its tokenizer makes.
            MethodError: a method that does not apply to the model.
        """
        schema = rows.schema(self.methods)
        count = -(-len(self) // rows.PART)
        rows.remove_parts(self.folder, count)
        for part in range(count):
            path, chosen = rows.part(self.folder, part), samples.load_tokenised(self.folder, part)
            wanted = pa.Table.from_pylist([facts(each) for each in chosen], rows.FACTS)
            found = rows.read_table(path, schema)
            if found is not None and found.select(rows.FACTS.names).equals(wanted):
                yield len(chosen)
                continue
            made: list[dict[str, Any]] = [{}] * len(chosen)
            for i, row in score(self.explainer, chosen, self.methods, self.batch_size):
                made[i] = row
                yield 1
            rows.write_table(path, pa.Table.from_pylist(made, schema))


def prepare(
    explainer: Explainer,
    data: Sequence[Path],
    out: Path,
    *,
    parser: str | None = None,
    parses: Path | None = None,
    methods: Sequence[str] = tuple(METHODS),
    only: Collection[str] | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    command: str = "",
) -> Run:
    """Read the sentences, find the ground truth, and keep both in the folder, ready to run.

    Args:
        explainer: a causal or masked language model with its tokenizer.
        data: files of sentences, ``.tsv`` (Goldberg 2019) or ``.conllu`` (a treebank).
        out: the folder for the results; made if it is missing.
        parser: a spaCy pipeline that finds the subjects in a ``.tsv``.
        parses: its parses instead, as a CoNLL-U file.
        methods: names of methods.
        only: ids of the samples to take; all by default.
        limit: take the first so many samples.
        batch_size: the most rows run together.
        command: how the run was asked for, for the report.

    Raises:
        DataError, InputError: a file that cannot be read, or no sample is left.
        MissingExtraError: a package for reading the files is not installed.
        MethodError: an unknown method.
        ModelError: a model of another kind, or without a tokenizer that can be used.
        ResultFileError: the folder cannot be written, or holds a run with other settings.
    """
    methods = tuple(dict.fromkeys(methods))
    _check(explainer, data, methods)
    source = {
        "data": [record.file(path) for path in data],
        "parser": parser,
        "parses": None if parses is None else record.file(parses),
        "only": None if only is None else hashlib.sha256("\n".join(sorted(only)).encode()).hexdigest(),
        "limit": limit,
    }
    settings = record.model(explainer) | source | {"methods": list(methods), "draws": DRAWS}
    rows.begin(out)
    how = {"command": command, "batch_size": batch_size, "device": str(tasks.input_device(explainer.model))}
    noted = record.load(out, settings) | how
    before = samples.load(out)
    if before is not None and before[1]["settings"] == source:
        found, read = before
    else:
        found, read, dropped = _read(data, parser, parses, only, limit)
        samples.save_dropped(out, "source", dropped)
        samples.save(out, found, read | {"settings": source})
    tokenised = _fitting(found, explainer)
    samples.save_dropped(out, "tokenizer", tokenised.dropped)
    samples.save_tokenised(out, tokenised.samples)
    counts = read["counts"] | Counter(each.reason for each in tokenised.dropped)
    record.save(out, noted | {"sources": read["sources"], "counts": counts, "statistics": tokenised.statistics})
    return Run(explainer, out, methods, batch_size, counts, tokenised.statistics)


def _check(explainer: Explainer, data: Sequence[Path], methods: Sequence[str]) -> None:
    """Refuse what cannot run, before any work."""
    unknown = next((name for name in methods if name not in METHODS), None)
    if unknown is not None or not methods:
        raise MethodError(f"there is no method {unknown or ''!r}; the methods are {', '.join(METHODS)}")
    if explainer.task not in (Task.CAUSAL, Task.MASKED):
        raise ModelError(
            f"{type(explainer.model).__name__} is a {explainer.task.value}, and the benchmark asks for the form of a "
            "verb; pass a causal or masked language model"
        )
    if explainer.tokenizer is None:
        raise ModelError("the model has no tokenizer to read sentences with; save its tokenizer in the same folder")
    if explainer.model.training:
        raise ModelError("the model is in training mode, where dropout makes outputs random; call model.eval()")
    name, times = next(iter(Counter(path.name for path in data).most_common(1)), ("", 0))
    if times != 1:
        raise InputError(
            f"{times or 'no'} files are named {name!r}, and samples are named after their file; "
            "pass one file or more, each once and with a name of its own"
        )


def _read(
    data: Sequence[Path],
    parser: str | None,
    parses: Path | None,
    only: Collection[str] | None,
    limit: int | None,
) -> tuple[tuple[Sample, ...], dict[str, Any], list[Dropped]]:
    """The samples of all files, what the record says of them, and the sentences that are none."""
    found: list[Sample] = []
    dropped: list[Dropped] = []
    sources: list[str] = []
    counts: Counter[str] = Counter()
    unparsed = [path for path in data if path.suffix == ".tsv"] or data
    for path in data:
        left = None if limit is None else limit - len(found)
        if left == 0:
            break
        how = (parser, parses) if path in unparsed else (None, None)
        one = read_agreement(path, parser=how[0], parses=how[1], only=only, limit=left)
        found += one.samples
        dropped += one.dropped
        sources.append(one.source)
        counts.update(one.counts())
    return tuple(found), {"sources": sources, "counts": dict(counts)}, dropped


def _fitting(found: Sequence[Sample], explainer: Explainer) -> Tokenised:
    """The samples as the model reads them, less those that are longer than its context."""
    assert explainer.tokenizer is not None
    tokenised = tokenise(found, explainer.tokenizer, explainer.task)
    context = tasks.context_length(explainer.model)
    long = {each.sample.id for each in tokenised.samples if context is not None and len(each.ids) > context}
    if not long:
        return tokenised
    fitting = tokenise([each for each in found if each.id not in long], explainer.tokenizer, explainer.task)
    reason = f"longer than the model's context of {context} tokens"
    dropped = [Dropped(each.id, each.line, reason, each.text) for each in found if each.id in long]
    return replace(fitting, dropped=(*fitting.dropped, *dropped))
