"""Tables in Parquet files: whole, checksummed, and each with the digest of what it was made by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from lrpx._files import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DIGEST: Final = b"lrpx.digest"
"""The key, in a table's metadata, of the digest of the settings it was made by."""
BROKEN: Final = (OSError, ValueError, pa.ArrowException)
"""What reading a broken Parquet file raises: names that are no text, for one, are a ValueError."""
GROUP: Final = 512
"""Rows in a row group."""


def encoded(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file; the same table has the same bytes."""
    sink = pa.BufferOutputStream()
    # without statistics: a reader would trust them, and no checksum covers them
    pq.write_table(
        table, sink, row_group_size=GROUP, compression="zstd", write_page_checksum=True, write_statistics=False
    )
    return bytes(sink.getvalue().to_pybytes())


def write_table(path: Path, table: pa.Table, digest: str, more: Mapping[bytes, str] | None = None) -> None:
    """Write a Parquet file as a whole (:func:`~lrpx._files.write_whole`).

    Args:
        path: the file.
        table: its rows.
        digest: of the settings they were made by.
        more: what else its metadata shall say.
    """
    write_whole(path, encoded(table.replace_schema_metadata({DIGEST: digest} | dict(more or {}))))


def read_table(path: Path, columns: pa.Schema, digest: str) -> pa.Table | None:
    """A Parquet file with these columns and this digest; None when there is none that is whole, by its checksums."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table, rows = file.read(), file.metadata.num_rows
    except BROKEN:
        return None
    same = table.schema.equals(columns) and (table.schema.metadata or {}).get(DIGEST) == digest.encode()
    # no checksum covers how many rows a group has, and the reader believes it
    return table if same and table.num_rows == rows else None


def digest_of(path: Path) -> str:
    """The digest in a Parquet file's metadata, or ""; raises one of ``BROKEN`` where it cannot be read."""
    found: bytes = (pq.read_schema(path).metadata or {}).get(DIGEST, b"")
    return found.decode("ascii", "replace")
