"""Tables in Parquet files: whole, checksummed, and each with the digest of what it was made by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from lrpx._files import checksum, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

DIGEST: Final = b"lrpx.digest"
"""The key, in a table's metadata, of the digest of the settings it was made by."""
CHECKSUM: Final = b"lrpx.sha256"
"""The key of the checksum of what else the metadata says, which no page's checksum covers."""
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
    said = {DIGEST: digest.encode()} | {name: text.encode() for name, text in (more or {}).items()}
    write_whole(path, encoded(table.replace_schema_metadata(said | {CHECKSUM: _checksum(said)})))


def read_table(path: Path, columns: pa.Schema, digest: str) -> pa.Table | None:
    """A Parquet file with these columns and this digest; None when there is none that is whole, by its checksums."""
    try:
        table = read_columns(path)
    except BROKEN:
        return None
    said = dict(table.schema.metadata or {})
    whole = said.pop(CHECKSUM, None) == _checksum(said)
    return table if whole and table.schema.equals(columns) and said.get(DIGEST) == digest.encode() else None


def read_columns(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Some columns of a Parquet file, or all; raises one of ``BROKEN`` where its checksums say that it is not whole."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        missing = [name for name in columns or () if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"there is no column {missing[0]!r}")
        table, rows = file.read(columns), file.metadata.num_rows
    if table.num_rows != rows:  # no checksum covers how many rows a group has, and the reader believes it
        raise ValueError(f"it has {table.num_rows} rows, and says that they are {rows}")
    return table


def digest_of(path: Path) -> str:
    """The digest in a Parquet file's metadata, or ""; raises one of ``BROKEN`` where it cannot be read."""
    found: bytes = (pq.read_schema(path).metadata or {}).get(DIGEST, b"")
    return found.decode("ascii", "replace")


def _checksum(said: Mapping[bytes, bytes]) -> bytes:
    """The SHA-256 of what a table's metadata says."""
    plain = sorted((name.hex(), text.hex()) for name, text in said.items())
    return checksum(plain).encode()
