"""What the command line says and where: results, progress, and what is read from standard input."""

from __future__ import annotations

import codecs
import logging
import os
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lrpx._files import goes_on
from lrpx.cli import in_one_line
from lrpx.errors import DataError, InputError, ResultFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

PATIENCE = 2.0
"""Seconds before progress is shown."""

LIKE = {"−": "-", "·": "-", "×": "x", "…": "...", "’": "'", "“": '"', "”": '"', "␣": "_"}
"""What is written where an encoding lacks these, of what we write ourselves."""
DASH = Path("-")
"""Standard input or output, as the name of a file."""


def refuse_unwritable(*paths: Path | None, in_place: bool = False, or_output: bool = False) -> None:
    """Refuse files that could not be written at the end, before the work begins.

    Args:
        paths: the files; None is left out.
        in_place: whether lines are added to a file that is there; else another takes its place, in its folder.
        or_output: whether ``-`` stands for standard output.
    """
    for path in paths:
        if path is None or (path == DASH and or_output):
            continue
        if path == DASH:
            raise ResultFileError("this command writes nothing to standard output by -; name a file")
        real = Path(os.path.realpath(path))
        if real.is_symlink():
            raise ResultFileError(f"cannot write {path}: it is a link to itself; choose another path")
        folder = real.parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise ResultFileError(f"cannot write {path}: there is no folder {folder}; create it first")
        if path.is_dir():
            raise ResultFileError(f"cannot write {path}: it is a folder; name a file, such as {path / 'result'}")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ResultFileError(f"cannot write {path}: permission denied; choose another path")
        if not in_place and not goes_on(path) and not os.access(folder, os.W_OK):
            raise ResultFileError(
                f"cannot write {path}: its folder {folder} is read-only, and a file is written there as a whole, under "
                "another name first; choose another path"
            )


def refuse_folder(path: Path) -> None:
    """Refuse a folder that could not be made, or written in, before the work begins.

    Raises:
        ResultFileError: it could not.
    """
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise ResultFileError(f"cannot write in {path}: {there} is no folder; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ResultFileError(f"cannot write in {path}: permission denied; name another folder")


def refuse_unreadable(*paths: Path | None) -> None:
    """Refuse files that cannot be read, before the work begins.

    Raises:
        DataError: one cannot.
    """
    for path in paths:
        try:
            if path is not None and path != DASH and not path.is_fifo():  # whose writer would be left alone
                path.open("rb").close()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; name another file") from error


def refuse_same(*paths: Path | None) -> None:
    """Refuse a file that is named twice, to be read or written: one would take the other's place.

    Raises:
        InputError: one is.
    """
    real = [os.path.realpath(path) for path in paths if path is not None and path != DASH]
    if len(set(real)) < len(real):
        raise InputError("one file is named twice, and would be written over; name another")


def standard_input() -> BinaryIO:
    """Standard input as bytes.

    Raises:
        InputError: it is closed.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise InputError("standard input is closed; pipe a text in, or write it on the command line")
    return sys.stdin.buffer


def decoded(content: bytes, what: str, *, begins: bool = True) -> str:
    """Bytes as text; where a file or a pipe begins, a byte order mark is none of it.

    Raises:
        InputError: they are no UTF-8.
    """
    refuse_utf16(content, what)
    try:
        return content.decode("utf-8-sig" if begins else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} is not UTF-8, at byte {error.start}; convert it first, such as by iconv -f latin1 -t utf-8"
        ) from error


def refuse_utf16(content: bytes, what: str) -> None:
    """Refuse what Windows calls Unicode: each letter but a few is two bytes, of which one is often zero."""
    if b"\0" in content or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        mend = "convert it first, such as by iconv -f utf-16 -t utf-8"
        raise InputError(f"{what} holds bytes of zero, as UTF-16 does, and no UTF-8; {mend}")


def read_text(given: str) -> str:
    """A text as it was written on the command line; ``-`` is standard input.

    Raises:
        InputError: standard input is closed, or no UTF-8.
    """
    return decoded(standard_input().read(), "standard input").rstrip("\r\n") if given == "-" else given


def refuse_empty(text: str) -> None:
    """Refuse a text of nothing but white space."""
    if not text.strip():
        raise InputError("the text is empty; pass a text of at least one character that is not white space")


def read_column(path: Path, limit: int | None = None) -> list[str]:
    """The texts of a file, with the white space around them: its lines, or its column ``text``.

    Raises:
        DataError: it cannot be read, or has none.
    """
    from lrpx._data.texts import read_texts

    try:
        return [each.text for each in read_texts(path, label=None, limit=limit, whole=True)]
    except DataError as error:
        told = str(error).replace("name the column of the texts with --text", "call the column of the texts 'text'")
        raise DataError(told) from error


def prepare_output() -> None:
    """Characters that the terminal's encoding does not have are written as others that look like them, or as escapes,
    rather than not at all; and a width of 0, as some terminals that do not know theirs say, is none."""
    if os.environ.get("COLUMNS", "").strip("0") == "":
        os.environ.pop("COLUMNS", None)
    codecs.register_error("lrpx", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="lrpx")


def _spelled(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(LIKE.get(each) or each.encode("unicode_escape").decode() for each in lacking), error.end


def write_bytes(content: bytes) -> None:
    """Write to standard output at once, whatever its encoding is."""
    if sys.stdout is None:
        return
    sys.stdout.flush()
    binary: Any = getattr(sys.stdout, "buffer", None)
    if binary is None:
        sys.stdout.write(content.decode())
    else:
        binary.write(content)
    sys.stdout.flush()


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on standard error what is going on, once it takes longer than two seconds."""
    console = Console(stderr=True)
    status = console.status(what, spinner="line" if console.options.ascii_only else "dots")
    timer = threading.Timer(PATIENCE, status.start if console.is_terminal else lambda: console.print(what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def own_lines_only() -> Iterator[None]:
    """Only this command's own lines in this command's output: nothing that the packages below log, and of a warning
    its message."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.showwarning = _warn
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    if sys.stderr is not None:
        print(f"lrpx: {in_one_line(str(message))}", file=sys.stderr)


def hush() -> None:
    """No progress bars of transformers, and of its messages only errors."""
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
