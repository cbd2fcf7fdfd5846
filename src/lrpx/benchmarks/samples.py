"""The samples of a run in its folder: as they are read, as the model reads them, and the sentences that are none.

So a resumed run need not parse again, and no more than one part of the samples is in memory while a run explains.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lrpx.benchmarks import rows
from lrpx.data.agreement import Sample
from lrpx.data.tokenised import TokenSample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from lrpx.data.agreement import Dropped

SAMPLES = pa.schema(
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
"""A :class:`~lrpx.data.agreement.Sample`."""
TOKENISED = pa.schema(
    {
        "sample": pa.struct(list(SAMPLES)),
        "ids": pa.list_(pa.int32()),
        "tokens": pa.list_(pa.string()),
        "position": pa.int32(),
        "right": pa.int32(),
        "wrong": pa.int32(),
        "ground_truth": pa.list_(pa.int32()),
    }
)
"""A :class:`~lrpx.data.tokenised.TokenSample`."""
DROPPED = pa.schema(
    {"stage": pa.string(), "id": pa.string(), "line": pa.int32(), "reason": pa.string(), "text": pa.string()}
)
SOURCES = b"lrpx"
"""The key of the metadata that says what the samples were read from."""


def save(folder: Path, samples: Sequence[Sample], sources: dict[str, Any]) -> None:
    """Keep the samples, with what they were read from.

    Raises:
        ResultFileError: they cannot be written.
    """
    table = _table(samples, SAMPLES).replace_schema_metadata({SOURCES: json.dumps(sources)})
    rows.write_table(folder / "samples.parquet", table)


def load(folder: Path) -> tuple[tuple[Sample, ...], dict[str, Any]] | None:
    """What :func:`save` kept, or None."""
    table = rows.read_table(folder / "samples.parquet", SAMPLES)
    if table is None:
        return None
    samples = tuple(_sample(**each) for batch in table.to_batches(rows.PART) for each in batch.to_pylist())
    return samples, json.loads(table.schema.metadata[SOURCES])


def save_tokenised(folder: Path, samples: Sequence[TokenSample]) -> None:
    """Keep the samples as the model reads them.

    Raises:
        ResultFileError: they cannot be written.
    """
    rows.write_table(folder / "tokenised.parquet", _table(samples, TOKENISED))


def load_tokenised(folder: Path, part: int) -> list[TokenSample]:
    """The samples of a part, as the model reads them."""
    with pq.ParquetFile(folder / "tokenised.parquet") as file:
        return [_token_sample(**each) for each in file.read_row_group(part).to_pylist()]


def save_dropped(folder: Path, stage: Literal["source", "tokenizer"], dropped: Sequence[Dropped]) -> None:
    """List the sentences that gave no sample, or whose sample the model cannot be asked, beside those of the other
    stage.

    Raises:
        ResultFileError: the list cannot be written.
    """
    path = folder / "dropped.parquet"
    new = pa.Table.from_pylist([{"stage": stage, **asdict(each)} for each in dropped], DROPPED)
    old = rows.read_table(path, DROPPED)
    tables = [new] if old is None else [old.filter(pc.field("stage") != stage), new]
    rows.write_table(path, pa.concat_tables(tables))


def _table(items: Iterable[Sample | TokenSample], schema: pa.Schema) -> pa.Table:
    """Values as a table, a part at a time, for as Python's dictionaries they need many times the memory."""
    left = iter(items)
    parts = iter(lambda: [asdict(each) for each in islice(left, rows.PART)], [])
    return pa.Table.from_batches((pa.RecordBatch.from_pylist(part, schema) for part in parts), schema)


def _sample(verb: list[int], subject: list[list[int]], **values: Any) -> Sample:
    return Sample(verb=(verb[0], verb[1]), subject=tuple((a, b) for a, b in subject), **values)


def _token_sample(
    sample: dict[str, Any], ids: list[int], tokens: list[str], ground_truth: list[int], **values: Any
) -> TokenSample:
    return TokenSample(_sample(**sample), tuple(ids), tuple(tokens), ground_truth=tuple(ground_truth), **values)
