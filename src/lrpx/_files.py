"""Files that are there whole or not at all, or refused with the mend."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from lrpx.errors import ResultFileError

TEMPORARY = ".tmp"
"""How a file that is not whole yet ends."""


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 as a whole (:func:`write_whole`); half a surrogate pair is written as its escape.

    Raises:
        ResultFileError: the folder is missing, cannot be written to, or the disk is full.
    """
    write_whole(path, text.encode(errors="backslashreplace"))


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file as a whole: another process, or one started after a crash, sees the old content or the new.

    It is written under a temporary name in the same folder, flushed to the disk and renamed. A new file has the mode
    that the user's own mask gives; one that is replaced keeps its mode, and a link stays a link. What is no regular
    file, such as a pipe, is written to as it is.

    Raises:
        ResultFileError: the folder is missing, cannot be written to, or the disk is full; the old content is left.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ResultFileError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    try:
        target = path.resolve()
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            target.write_bytes(content)
            return
        _replace(target, content, mode)
    except OSError as error:
        raise ResultFileError(
            f"cannot write {path}: {error.strerror}; make room in that folder, or make it writable, or choose another "
            "path"
        ) from error


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # else the new name itself may be lost with the power
    finally:
        os.close(directory)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written in a folder."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink()
