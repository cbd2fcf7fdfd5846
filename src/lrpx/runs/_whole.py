"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lrpx.errors import ResultFileError

if TYPE_CHECKING:
    from pathlib import Path

TEMPORARY = ".tmp"
"""How a file that is not whole yet ends."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as a whole: another process, or one started after a crash, sees the old content or the new.

    It is written under a temporary name in the same folder, flushed to the disk and renamed.

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


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written in a folder."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink()
