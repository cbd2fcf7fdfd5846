"""Text files, written or refused with the mend."""

from __future__ import annotations

from pathlib import Path

from lrpx.errors import ResultFileError


def write_text(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        ResultFileError: the folder is missing or cannot be written to.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise ResultFileError(f"cannot write {path}: there is no folder {folder}; create it first")
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"cannot write {path}: {error.strerror}; choose another path") from error
