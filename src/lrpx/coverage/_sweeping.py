"""The sweep: every class in a worker process, so that a crash or a hang is one class that failed; results are kept."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from concurrent.futures import BrokenExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import huggingface_hub
import torch
from pebble import ProcessExpired, ProcessPool
from transformers.utils import logging

from lrpx.coverage._checking import Checked, check, failed
from lrpx.errors import ResultFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from lrpx.coverage._classes import ModelClass

SECONDS: Final = 120.0
"""How long a class may take."""


def versions() -> dict[str, str]:
    """What the results depend on."""
    found = {name: metadata.version(name) for name in ("lrpx", "torch", "transformers")}
    return found | {"python": ".".join(map(str, sys.version_info[:3]))}


def sweep(
    classes: Sequence[ModelClass], out: Path | None = None, workers: int = 1, seconds: float = SECONDS
) -> Iterator[Checked]:
    """Check every class, and yield what became of it as it is known.

    Args:
        classes: the classes to check.
        out: a folder to keep the results in, a part a class (:class:`lrpx.runs.Store`); started again, with these
            classes or others, the sweep goes on where it ended. After a change of the code, begin a new folder.
        workers: processes at a time, of one thread each. They import the script that calls this, so in a script call
            it below ``if __name__ == "__main__":``.
        seconds: what one class may take.

    Raises:
        ResultFileError: the folder cannot be written, is another sweep's at the moment, or holds a sweep of other
            versions; or no worker can be started.
        MissingExtraError: a folder is given, and the package that writes it is not installed.
    """
    if out is None:
        yield from _checked(classes, workers, seconds)
        return
    from lrpx.coverage import _parts
    from lrpx.runs import Store

    with Store.begin(out, "coverage", versions(), {}) as store:
        store.note()
        kept = {one: _parts.read(store, one) for one in classes}
        yield from filter(None, kept.values())
        names = {(one.mapping, one.name): one for one in classes}
        for found in _checked([one for one in classes if kept[one] is None], workers, seconds):
            _parts.keep(store, names[found.mapping, found.name], found)
            yield found


def _checked(classes: Sequence[ModelClass], workers: int, seconds: float) -> Iterator[Checked]:
    """Each class, as its worker is done with it."""
    if not classes:
        return
    with tempfile.TemporaryDirectory() as errors:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        pool = ProcessPool(min(workers, len(classes)), context=context, initializer=_prepare, initargs=[errors])
        try:
            waiting: dict[Future[Checked], ModelClass] = {
                pool.schedule(check, args=[one], timeout=seconds): one for one in classes
            }
            for future in as_completed(waiting):
                try:
                    yield future.result()
                except TimeoutError:
                    yield failed(waiting[future], f"took longer than {seconds:g} s")
                except ProcessExpired as error:
                    reason = f"the process ended with code {error.exitcode}"
                    yield failed(waiting[future], ": ".join([reason, *_last_line(Path(errors, str(error.pid)))]))
        except BrokenExecutor as error:
            raise ResultFileError(
                "no worker can be started; in a script, call sweep() below: if __name__ == '__main__':"
            ) from error
        finally:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()


def _prepare(errors: str) -> None:
    """Begin a worker: one thread, no network, and what models print goes into a file of its own."""
    file = os.open(Path(errors, str(os.getpid())), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _last_line(path: Path) -> list[str]:
    """The last thing that a process wrote, if it wrote anything."""
    return path.read_text("utf-8", "replace").strip().splitlines()[-1:] if path.exists() else []
