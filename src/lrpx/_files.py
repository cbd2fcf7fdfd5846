"""Files, written whole or not at all, or refused with the mend."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lrpx.errors import DataError, ResultFileError

TEMPORARY = ".tmp"
"""How a file that is not whole yet ends."""
Content = TypeVar("Content", str, bytes)


def kept(content: Content, path: str | Path | None) -> Content:
    """A page or a picture; also written to ``path`` as a whole (:func:`write_whole`), if that is given.

    Raises:
        ResultFileError: it cannot be written.
    """
    if path is not None:
        if isinstance(content, str):
            write_text(path, content)
        else:
            write_whole(path, content)
    return content


def write_text(path: str | Path, text: str) -> None:
    """Write a text file as a whole (:func:`write_whole`), in UTF-8.

    Raises:
        ResultFileError: the folder is missing or cannot be written to, or the text holds half a character.
    """
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ResultFileError(f"cannot write {path}: {error}; leave such characters out") from error
    write_whole(path, content)


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file as a whole: another process, or one started after a crash, sees the old content or the new.

    It is written under a temporary name in the same folder, flushed to the disk and renamed. A new file has the mode
    that the user's umask leaves, a file that was there keeps its own, and a link still points to what it pointed to.
    What is no plain file, such as ``/dev/stdout``, is written to as it is.

    Raises:
        ResultFileError: the folder is missing or cannot be written to, or the disk is full; the old content is left.
    """
    try:
        given = Path(path)
        if goes_on(given):
            with given.open("ab") as file:
                file.write(content)
            return
        real = given.resolve()
        if not real.parent.is_dir():
            raise ResultFileError(f"cannot write {path}: there is no folder {given.parent}; create it first")
        _replace(real, content, real.stat().st_mode if real.exists() else None)
    except (OSError, TypeError, ValueError, RuntimeError) as error:  # a name with a zero byte, none, a ring of links
        if isinstance(error, ResultFileError):
            raise
        raise ResultFileError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}; make room in that folder, make it "
            "writable, or choose another path: what stood there before still does"
        ) from error


def goes_on(path: Path) -> bool:
    """Whether what is written there goes on to somebody else, as into a pipe or ``/dev/stdout``."""
    return (path.exists() and not path.is_file()) or path.absolute().is_relative_to("/dev")


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    # the name cut short, for a name has at most 255 bytes
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{threading.get_ident()}{TEMPORARY}")
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(None, "the file is read-only")
    try:
        with temporary.open("wb") as file:
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # else the new name itself may be lost with the power; not every file system can
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written in a folder."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink()


def checksum(plain: Any) -> str:
    """The SHA-256 of what a file of JSON says, however it is laid out; against lost bits, and no signature.

    >>> checksum({"a": 1, "b": 2}) == checksum({"b": 2, "a": 1}) != checksum({"a": 1, "b": 3})
    True
    """
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def named_once(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``json.loads(…, object_pairs_hook=…)``; of two values with one name none is right.

    Raises:
        DataError: a name stands twice; ``where`` is the line that says it.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DataError(f"{where} says {', '.join(name for name, _ in pairs)}, of which one stands twice; leave one")
    return found
