"""The files of a benchmark's folder: each is there whole or not at all, and a resumed run finds what is whole.

A file is written under a temporary name in the same folder, flushed to the disk and renamed, so that a process killed
at any moment leaves either the old file or the new one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from lrpx.errors import ResultFileError
from lrpx.metrics.ground_truth import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PART = 512
"""Samples in a part: a killed run loses at most the part in work."""
ROWS = "rows"
"""The folder of the parts."""
TEMPORARY = ".tmp"
"""How a file that is not whole yet ends."""
RANDOM = "random"
"""The baseline's name where a method's would stand."""

FACTS = pa.schema(
    {
        "id": pa.string(),
        "tokens": pa.list_(pa.string()),
        "ground_truth": pa.list_(pa.int32()),
        "position": pa.int32(),
        "right": pa.string(),
        "wrong": pa.string(),
        "attractors": pa.int32(),
    }
)
"""What a row says of its sample, whatever the model predicts."""
PREDICTION = pa.schema({"logit_difference": pa.float64(), "correct": pa.bool_()})


def schema(methods: Sequence[str]) -> pa.Schema:
    """The columns of a row: the sample, the prediction, and each method's relevance and metrics."""
    fields = [*FACTS, *PREDICTION]
    for method in methods:
        fields.append(pa.field(f"relevance/{method}", pa.list_(pa.float64())))
        fields += [pa.field(f"{metric}/{method}", pa.float64()) for metric in METRICS]
    fields += [pa.field(f"{metric}/{RANDOM}", pa.list_(pa.float64())) for metric in METRICS]
    return pa.schema(fields)


def part(folder: Path, number: int) -> Path:
    """The file of a part, from 0: ``rows/part-00000.parquet``."""
    return folder / ROWS / f"part-{number:05}.parquet"


def parts(folder: Path) -> list[Path]:
    """The files of all parts that are there, in order."""
    return sorted((folder / ROWS).glob("part-*.parquet"))


def remove_parts(folder: Path, first: int) -> None:
    """Remove what other versions of the packages took for further parts."""
    for path in parts(folder):
        if path >= part(folder, first):
            path.unlink()


def begin(folder: Path) -> None:
    """Make the folder, and remove what a killed run left half written.

    Raises:
        ResultFileError: the folder cannot be made or written.
    """
    try:
        (folder / ROWS).mkdir(parents=True, exist_ok=True)
        for directory in (folder, folder / ROWS):
            for path in directory.glob(f".*{TEMPORARY}"):
                path.unlink()
    except OSError as error:
        raise ResultFileError(f"cannot write in {folder}: {error.strerror}; name another folder") from error


def replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: another process, or one started after a crash, sees the old content or the new.

    Raises:
        ResultFileError: the disk is full, or the folder cannot be written; the old content is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # else the new name itself may be lost with the power
        finally:
            os.close(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResultFileError(
            f"cannot write {path}: {error.strerror}; make room in that folder, or make it writable, and run the same "
            "command again, which goes on after the rows that are written"
        ) from error


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file as a whole, a part in each of its row groups; see :func:`replace`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=PART, compression="zstd", write_page_checksum=True)
    replace(path, sink.getvalue().to_pybytes())


def read_table(path: Path, columns: pa.Schema) -> pa.Table | None:
    """A Parquet file with these columns; None when there is none that is whole, by its checksums."""
    try:
        table = pq.read_table(path, page_checksum_verification=True, partitioning=None)
    except (OSError, pa.ArrowException):
        return None
    return table if table.schema.equals(columns) else None
