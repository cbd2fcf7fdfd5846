"""The sweep: every class in a worker process, so that a crash or a hang is one failed row; rows are kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from lrpx.coverage.checking import Row, failed
from lrpx.errors import ResultFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lrpx.coverage.classes import ModelClass

ROWS = "rows.jsonl"
"""The file of a sweep's rows, in its folder."""
SECONDS = 120.0
"""How long a class may take, its share of a worker's start included."""


def versions() -> dict[str, str]:
    """What the rows depend on."""
    found = {name: importlib.metadata.version(name) for name in ("lrpx", "torch", "transformers")}
    return found | {"python": platform.python_version()}


def sweep(
    classes: Sequence[ModelClass], out: Path | None = None, workers: int = 1, seconds: float = SECONDS
) -> Iterator[Row]:
    """Check every class, and yield the rows as they finish.

    Args:
        classes: the classes to check.
        out: a folder to keep the rows in; started again, the sweep goes on where it ended. Rows of other versions
            are made again; after a change of the code, begin a new folder.
        workers: processes at a time, of one thread each.
        seconds: what one class may take.

    Raises:
        ResultFileError: the folder cannot be written.
    """
    kept: list[Row] = []
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            kept = _kept(out / ROWS, classes)
        except OSError as error:
            raise ResultFileError(f"cannot keep rows in {out}: {error.strerror}; name another folder") from error
    yield from kept
    have = {(row.mapping, row.name) for row in kept}
    todo: SimpleQueue[ModelClass] = SimpleQueue()
    remaining = [one for one in classes if (one.mapping, one.name) not in have]
    for one in remaining:
        todo.put(one)
    done: SimpleQueue[Row | BaseException] = SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_serve, args=(todo, done, stop, seconds), daemon=True)
        for _ in range(min(workers, len(remaining)))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in remaining:
            row = done.get()
            if isinstance(row, BaseException):
                raise row
            if out is not None:
                with (out / ROWS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row.to_dict() | {"versions": versions()}) + "\n")
            yield row
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _kept(path: Path, classes: Sequence[ModelClass]) -> list[Row]:
    """The rows that an earlier sweep of the same versions left; a line cut short is no row."""
    wanted = {(one.mapping, one.name) for one in classes}
    found: dict[tuple[str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values: dict[str, Any] = json.loads(line)
            same = values.pop("versions") == versions()
            row = Row.from_dict(values)
        except (ValueError, KeyError, TypeError):
            continue
        if same and (row.mapping, row.name) in wanted:
            found[row.mapping, row.name] = row
    return list(found.values())


# ------------------------------------------------------------------------ workers


def _serve(
    todo: SimpleQueue[ModelClass], done: SimpleQueue[Row | BaseException], stop: threading.Event, seconds: float
) -> None:
    """Take classes until there are none, with a worker that is replaced when it fails."""
    worker: _Worker | None = None
    try:
        while not stop.is_set():
            model_class = todo.get_nowait()
            worker = worker or _Worker()
            row = worker.check(model_class, seconds, stop)
            if worker.process.poll() is not None:
                worker.end()
                worker = None
            done.put(row)
    except Empty:
        pass
    except BaseException as error:  # the sweep raises it where it is waited for
        done.put(error)
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """One process that checks class after class."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "lrpx.coverage.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )

    def check(self, model_class: ModelClass, seconds: float, stop: threading.Event) -> Row:
        """The row of a class; after a crash or a hang the process is dead and the row says why."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer: list[str] = []
        reader = threading.Thread(target=lambda: answer.append(self.process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        try:
            self.process.stdin.write(json.dumps(asdict(model_class)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died before; there will be no answer
        waited = 0.0
        while reader.is_alive() and waited < seconds and not stop.is_set():
            reader.join(min(0.1, seconds - waited))
            waited += 0.1
        late = reader.is_alive()
        if late:
            self.process.kill()
            reader.join()
        if answer and answer[0].endswith("\n"):
            return Row.from_dict(json.loads(answer[0]))
        code = self.process.wait()
        if late:
            return failed(model_class, f"took longer than {seconds:g} s")
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        return failed(model_class, ": ".join([f"the process ended with code {code}", *last]))

    def end(self) -> None:
        """Kill the process and free what it held."""
        self.process.kill()
        self.process.communicate()
        self._errors.close()
