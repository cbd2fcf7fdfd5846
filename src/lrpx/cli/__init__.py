"""The command line: ``lrpx explain``, ``lrpx benchmark`` and ``lrpx coverage``.

This file imports next to nothing, so that Ctrl-C is quiet from the first moment, and ``lrpx --help`` and shell
completion are quick: no torch before a command needs it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from lrpx.errors import LRPxError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
SHOW_CURSOR = b"\x1b[?25h"


def main() -> None:
    """Run the command line; bad input ends with one line on standard error and exit code 2."""
    _fill_closed_streams()
    with _quiet_interrupts():
        try:
            from lrpx.cli._app import run

            run()
        except LRPxError as error:
            from lrpx.cli._app import lacking
            from lrpx.cli._mends import on_the_command_line

            told = on_the_command_line(str(error))
            _refuse(told + lacking(told))
        except OSError as error:
            _broken(error)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        finally:
            _flush()


@contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Ctrl-C leaves without a traceback: at once while modules are imported, for an import that is interrupted may
    swallow it, or turn it into another error; else by the usual exception, so that files are closed."""

    def leave(number: int, frame: FrameType | None) -> None:
        if not _is_importing(frame):
            raise KeyboardInterrupt
        with suppress(OSError):
            if os.isatty(2):  # not sys.stderr, which is the spinner's own while it turns
                os.write(2, SHOW_CURSOR)  # which a spinner has hidden
        os._exit(INTERRUPTED)

    try:
        before = signal.signal(signal.SIGINT, leave)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in this frame or those that called it."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _refuse(message: str) -> None:
    with suppress(OSError):
        print(f"lrpx: {in_one_line(message)}", file=sys.stderr)
    sys.exit(2)


def in_one_line(message: str) -> str:
    r"""A message without line breaks, and with whatever could move a terminal's cursor, or turn its text around, as an
    escape.

    >>> in_one_line("a\nb \x1b[31m")
    'a b \\x1b[31m'
    """
    line = " ".join(message.split())
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _broken(error: OSError) -> None:
    """Leave after an error of the system: with a line that names the file, and quietly when nobody reads any more."""
    if error.filename is None:
        _drop_output()
    if error.errno == errno.EPIPE:
        sys.exit(1)
    what = "standard output" if error.filename is None else str(error.filename)
    _refuse(f"cannot use {what}: {error.strerror or error}; choose another file, or make room")


def _flush() -> None:
    """Write out what is still to be written, while an error can still be told."""
    try:
        for stream in (sys.stdout, sys.__stdout__):  # typer may have put another in its place
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError as error:
        _broken(error)


def _drop_output() -> None:
    """Whatever is still to be written goes nowhere, so that Python does not stumble over it as it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _fill_closed_streams() -> None:
    """Open what is closed of the first three files on nothing, so that no file of a model's takes its place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
