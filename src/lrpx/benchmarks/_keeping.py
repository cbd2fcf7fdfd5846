"""A run kept in a folder, part after part: stopped at any moment, it goes on where it was, and ends with the same rows.

Beside the record and the parts (:class:`lrpx.runs.Store`) the folder has what the benchmark read, ``samples.parquet``,
so that nothing is parsed twice, and what gave no sample, ``dropped.parquet``.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from lrpx._data.agreement import Dropped
from lrpx.benchmarks._contract import Source
from lrpx.benchmarks._running import data_of, of_scripts, read
from lrpx.errors import InputError
from lrpx.methods import METHODS
from lrpx.runs import Store, digest, read_table, versions, write_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lrpx.benchmarks._contract import Benchmark
    from lrpx.benchmarks._running import Run
    from lrpx.methods import Method
    from lrpx.metrics import Metric
    from lrpx.model import Spec

PACKAGES: Final = ("lrpx", "torch", "transformers", "numpy", "pyarrow", "spacy")
"""The packages whose versions the rows may depend on."""
SAMPLES: Final = "samples.parquet"
DROPPED: Final = "dropped.parquet"
COLUMNS: Final = pa.schema(
    {"stage": pa.string(), "id": pa.string(), "line": pa.int32(), "reason": pa.string(), "text": pa.string()}
)
"""Of what gave no sample; the stage is the source, or the tokenizer, for a model that cannot be asked."""
NOTES: Final = b"lrpx.notes"
"""The key of the metadata that says what the samples were read from."""


@contextmanager
def keep(run: Run, folder: Path, command: str = "") -> Iterator[Kept]:
    """A run in a folder, locked until the block ends.

    Args:
        run: the run.
        folder: where everything is written; made if it is missing.
        command: how the run was asked for, for the report.

    Raises:
        ResultFileError: the folder cannot be written, holds another run, or another run is writing in it.
        DataError, InputError: a file cannot be read, or no sample is left.
    """
    with Store.begin(folder, run.benchmark.name, run.settings, versions(PACKAGES)) as store:
        of = _digest(run.benchmark.name, run.data)
        before = _read(folder, run.benchmark.source, of)
        if before is not None:
            run.source = before
        _write_dropped(folder, run, of)  # first, so that the samples are never there without
        if before is None:
            notes = {NOTES: json.dumps(dict(run.source.notes))}
            write_table(folder / SAMPLES, run.source.rows, of, notes)
        counts: dict[str, int] = dict(run.source.notes.get("counts", {}))
        for each in run.samples.dropped:
            counts[each.reason] = counts.get(each.reason, 0) + 1
        facts = {
            "counts": counts,
            "statistics": dict(run.samples.statistics),
            "labels": labels_of(run.methods),
            "command": command,
            "batch_size": run.batch_size,
            "device": run.model.device,
            "spec": {name: value for name, value in run.spec.items() if name != "settings"},
        }
        store.note(**dict(run.source.notes) | facts)
        yield Kept(run, store)


def labels_of(methods: Sequence[Method]) -> dict[str, str]:
    """How tables spell methods: by their labels, and by its name one whose label is that of a method of
    :data:`lrpx.METHODS`, or of another before it, which it was copied from."""
    first: dict[str, str] = {}
    for method in (*METHODS.values(), *methods):
        first.setdefault(method.label, method.name)
    return {each.name: each.label if each.label and first[each.label] == each.name else each.name for each in methods}


def read_or_kept(benchmark: Benchmark[Any], folder: Path) -> Source:
    """What a benchmark reads: what a run has kept of it in the folder, else from its files. No model is needed.

    Raises:
        DataError, InputError: a file cannot be read, or has other columns than the benchmark says.
    """
    return _read(folder, benchmark.source, _digest(benchmark.name, data_of(benchmark))) or read(benchmark)


def refuse_other(
    benchmark: Benchmark[Any],
    folder: Path,
    model: Spec,
    methods: Sequence[Method] = (),
    metrics: Sequence[Metric] = (),
    **more: Any,
) -> None:
    """Refuse a folder that holds another run, as far as it can be told before a model is loaded.

    Args:
        benchmark: what is measured; what it leaves open may hang on the model.
        folder: of the run.
        model: what will be loaded.
        methods, metrics: those that were named; none where they hang on the model.
        more: other settings of a run, such as ``part``.

    Raises:
        ResultFileError: it holds another run; says what differs.
    """
    said = {name: value for name, value in data_of(benchmark).items() if getattr(benchmark, name, True) is not None}
    known = {"model": model.called} | said | more
    if model.dtype != "auto":
        known["dtype"] = str(model.dtype)
    if methods:
        known["methods"] = [method.name for method in methods]
        known["described"] = {method.name: method.describe() for method in methods}
    if metrics:
        known["metrics"] = [metric.describe() for metric in metrics]
    Store.refuse_other(folder, benchmark.name, known | of_scripts(methods, metrics))


@dataclass(frozen=True)
class Kept:
    """A run in its folder.

    Args:
        run: the run.
        store: its folder.
    """

    run: Run
    store: Store

    @property
    def numbers(self) -> dict[str, float]:
        """What the record says of the samples: how many were read, dropped for which reason, and kept; statistics."""
        return dict(self.store.record["counts"]) | dict(self.store.record["statistics"])

    def check_shown(self, show: Sequence[str]) -> None:
        """Refuse ids of no sample, before anything is explained.

        Raises:
            InputError: names them.
        """
        check_shown(show, list(map(self.run.id_of, self.run.samples.kept)), self.store.folder)

    def explain(self, done: Callable[[int], object] = lambda _: None) -> None:
        """Make every part that is not there yet.

        Args:
            done: called with how many more samples are done.

        Raises:
            ResultFileError: a part cannot be written; those before it are.
            NonFiniteError, InputError, MethodError: see :meth:`Run.part <lrpx.benchmarks._running.Run.part>`.
        """
        names = [f"{number:05}" for number in range(self.run.parts)]
        self.store.remove_all_but(names)
        for number, name in enumerate(names):
            if self._is_there(number, name):
                done(len(self.run.chosen(number)))
            else:
                self.store.keep(name, self.run.part(number, done))

    def _is_there(self, number: int, name: str) -> bool:
        """Whether a part is whole, of this run, and of its samples: other versions may have read others."""
        benchmark = self.run.benchmark
        wanted = [benchmark.facts_of(sample) for sample in self.run.chosen(number)]
        found = self.store.part(name, self.run.columns)
        return found is not None and bool(
            found.select(benchmark.facts.names).equals(pa.Table.from_pylist(wanted, benchmark.facts))
        )


def check_shown(show: Sequence[str], ids: Sequence[str], folder: Path) -> None:
    """Refuse ids that are of none of the samples of a folder.

    Raises:
        InputError: names them.
    """
    unknown = sorted(set(show) - set(ids))
    if unknown:
        raise InputError(
            f"there is no sample {', '.join(map(repr, unknown))} in {folder}; its {len(ids)} samples have ids such as "
            f"{ids[0]!r}"
        )


def _digest(name: str, data: Mapping[str, Any]) -> str:
    """Of what a benchmark reads, whatever the model and the methods."""
    return digest(f"{name} samples", data)


def _read(folder: Path, columns: pa.Schema, of: str) -> Source | None:
    """What the benchmark read before, by the digest of what it reads, whatever the model and the methods; or None."""
    rows, dropped = read_table(folder / SAMPLES, columns, of), read_table(folder / DROPPED, COLUMNS, of)
    if rows is None or dropped is None:
        return None
    mine = [each for each in dropped.to_pylist() if each.pop("stage") == "source"]
    return Source(rows, tuple(Dropped(**each) for each in mine), json.loads(rows.schema.metadata[NOTES]))


def _write_dropped(folder: Path, run: Run, of: str) -> None:
    """List what gave no sample, each with the stage that dropped it."""
    stages = {"source": run.source.dropped, "tokenizer": run.samples.dropped}
    rows = [
        {"stage": stage, "id": each.id, "line": each.line, "reason": each.reason, "text": each.text}
        for stage, dropped in stages.items()
        for each in dropped
    ]
    write_table(folder / DROPPED, pa.Table.from_pylist(rows, COLUMNS), of)
