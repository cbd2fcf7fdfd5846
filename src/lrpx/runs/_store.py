"""A folder that a run keeps its rows in, so that it can be stopped at any moment and goes on where it was.

In the folder are ``run.json``, the record of the run, and ``rows/part-*.parquet``, its parts. What defines the run are
its **settings**, plain JSON values; their digest stands in the record and in every part. A part of other settings is
never taken for one of this run, a part that is not whole is none, and a folder is written by one process at a time.

The lock is the operating system's, on the file ``.lock``: it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock, Timeout

from lrpx._files import checksum, remove_unfinished, write_whole
from lrpx.errors import ResultFileError
from lrpx.runs._tables import BROKEN, digest_of, read_table, write_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

RECORD: Final = "run.json"
ROWS: Final = "rows"
"""The folder of the parts."""
LOCK: Final = ".lock"
CHECKSUM: Final = "sha256"
"""Of the record, beside what it says: against lost bits, and no signature."""
LONGEST: Final = 120
"""Characters of a setting in a message."""
FORMAT: Final = 3
"""Of the folder; it is one of the settings' digest, so that no other format is read as this one."""


@dataclass(frozen=True)
class Store:
    """A run's folder; :meth:`begin` opens it to write, :meth:`read` to read.

    Args:
        folder: of the run.
        record: what ``run.json`` says: ``format``, ``kind``, ``settings``, their ``digest``, ``versions``, and what the
            run noted beside.
    """

    folder: Path
    record: dict[str, Any]

    @classmethod
    @contextmanager
    def begin(
        cls, folder: Path, kind: str, settings: Mapping[str, Any], versions: Mapping[str, str]
    ) -> Iterator[Store]:
        """The folder of a run, made if it is missing and locked until the block ends. What was made, and stayed empty
        until an error ended the block, is removed again.

        Args:
            folder: where everything is written.
            kind: what runs, such as a benchmark's name.
            settings: what defines the run, as plain JSON values; a run that goes on must share them.
            versions: the packages it runs with, which may differ from those before; each is then listed.

        Raises:
            ResultFileError: the folder cannot be written, is another run's at the moment, or holds the parts of a run
                with other settings, or of one without a record.
        """
        try:
            new = [each for each in (folder / ROWS, folder, *folder.parents) if not each.exists()]
            (folder / ROWS).mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK)
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ResultFileError(
                f"another run is writing in {folder} at this moment; wait until it ends, or name another folder"
            ) from error
        except OSError as error:
            raise ResultFileError(f"cannot write in {folder}: {error.strerror}; name another folder") from error
        try:
            try:
                for each in (folder, folder / ROWS):
                    remove_unfinished(each)
            except OSError as error:
                raise ResultFileError(f"cannot write in {folder}: {error.strerror}; name another folder") from error
            yield cls(folder, _continued(folder, kind, settings, versions))
        except BaseException:
            _remove_empty(folder, new)
            raise
        finally:
            lock.release()

    @staticmethod
    def refuse_other(folder: Path, kind: str, known: Mapping[str, Any]) -> None:
        """Refuse the folder of another run as soon as some of the settings tell, before all of them are known.

        Raises:
            ResultFileError: as :meth:`begin`.
        """
        if _parts(folder):
            _recorded(folder, kind, json.loads(json.dumps(known)), known)

    @classmethod
    def read(cls, folder: Path) -> Store:
        """A run's folder as it is, to read from; it need not be whole, and may be another process's at the moment.

        Raises:
            ResultFileError: it has no record, or one that describes no run.
        """
        path = folder / RECORD
        try:
            record = _read(path)
        except OSError as error:
            raise ResultFileError(
                f"cannot read {path}: {error.strerror}; name the folder of a run, or run it first"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ResultFileError(
                f"{path} does not describe a run ({type(error).__name__}: {error}); run it into a new folder"
            ) from error
        return cls(folder, record)

    @property
    def digest(self) -> str:
        """Of the run's settings."""
        return str(self.record["digest"])

    @property
    def settings(self) -> dict[str, Any]:
        """What defines the run."""
        return dict(self.record["settings"])

    def note(self, **facts: Any) -> None:
        """Write the record, with facts about the run that do not define it, as plain JSON values.

        Raises:
            ResultFileError: it cannot be written.
        """
        self.record.update(facts)
        text = json.dumps(self.record | {CHECKSUM: checksum(self.record)}, ensure_ascii=False, indent=1) + "\n"
        write_whole(self.folder / RECORD, text.encode())

    def path(self, part: str) -> Path:
        """The file of a part: ``rows/part-<name>.parquet``."""
        return self.folder / ROWS / f"part-{part}.parquet"

    def part(self, part: str, columns: pa.Schema) -> pa.Table | None:
        """A part with these columns; None when there is none of this run that is whole."""
        return read_table(self.path(part), columns, self.digest)

    def keep(self, part: str, rows: pa.Table) -> None:
        """Write a part, whole or not at all.

        Raises:
            ResultFileError: it cannot be written; those before it are.
        """
        write_table(self.path(part), rows, self.digest)

    def remove_all_but(self, parts: Collection[str]) -> None:
        """Remove parts of other names, which other versions of the packages made."""
        wanted = {self.path(part) for part in parts}
        for path in self.parts():
            if path not in wanted:
                path.unlink()

    def parts(self) -> list[Path]:
        """The files of all parts that are there, in the order of their names."""
        return _parts(self.folder)

    def checked_parts(self) -> list[Path]:
        """The files of all parts, each of which is of this run.

        Raises:
            ResultFileError: there is none, or one cannot be read, or is of other settings.
        """
        parts = self.parts()
        if not parts:
            raise ResultFileError(f"there are no rows in {self.folder / ROWS}; run it first")
        again = "run it again, which makes anew what is broken"
        for path in parts:
            try:
                found = digest_of(path)
            except BROKEN as error:
                raise ResultFileError(f"cannot read the rows in {path}: {_line(error)}; {again}") from error
            if found != self.digest:
                raise ResultFileError(f"the rows in {path} are of a run with other settings; {again}")
        return parts


def digest(kind: str, settings: Mapping[str, Any]) -> str:
    """The digest of what defines a run, the same on every machine.

    >>> digest("sva", {"a": 1, "b": None}) == digest("sva", {"b": None, "a": 1}) != digest("sva", {"a": 1, "b": 0})
    True
    """
    plain = json.dumps([FORMAT, kind, settings], sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _remove_empty(folder: Path, new: Sequence[Path]) -> None:
    """Remove folders that a run made, the innermost first, if it wrote nothing into them."""
    if folder / ROWS in new and {path.name for path in folder.rglob("*")} == {LOCK, ROWS}:
        (folder / LOCK).unlink()
    with suppress(OSError):  # something was written
        for each in new:
            each.rmdir()


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / ROWS).glob("part-*.parquet"))


def _continued(folder: Path, kind: str, settings: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """The record of the run in a folder, or a new one where no parts are written yet."""
    new = {
        "format": FORMAT,
        "kind": kind,
        "settings": json.loads(json.dumps(settings)),
        "digest": digest(kind, settings),
        "versions": dict(versions),
    }
    if not _parts(folder):
        return new
    record = _recorded(folder, kind, new["settings"])
    for package, version in new["versions"].items():
        listed = str(record["versions"].get(package, version)).split(", ")
        new["versions"][package] = ", ".join(listed if version in listed else [*listed, version])
    return dict(record | new)


def _recorded(
    folder: Path, kind: str, settings: Mapping[str, Any], only: Collection[str] | None = None
) -> dict[str, Any]:
    """The record of the run in a folder, which has these settings; ``only``: the others are not known yet."""
    path = folder / RECORD
    try:
        record = _read(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultFileError(f"{path} is not the record of a run; name another folder with --out") from error
    if record["kind"] != kind:
        raise ResultFileError(
            f"{folder} holds a run of {record['kind']}, not of {kind}; name another folder with --out"
        )
    before = {name: value for name, value in record["settings"].items() if only is None or name in only}
    for name, was, now in _differences(before, settings):
        raise ResultFileError(
            f"{folder} holds a run with another setting: {name} was {was} and is {now} now; name another folder with "
            "--out"
        )
    return dict(record)


def _read(path: Path) -> dict[str, Any]:
    """A record; raises OSError, or any of ValueError, KeyError, TypeError and RecursionError for what is none."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']}, and this is {FORMAT}")
    if not isinstance(record["versions"], dict):
        raise TypeError("it lists no versions")
    if record["digest"] != digest(record["kind"], record["settings"]):
        raise ValueError("its digest is not that of its settings")
    if record.pop(CHECKSUM) != checksum(record):
        raise ValueError("it was changed since it was written: its checksum is another")
    return dict(record)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What differs in two settings: its name, and both values, shown where they begin to differ."""
    for name in [*now, *(name for name in before if name not in now)]:
        was, one = before.get(name), now.get(name)
        if was == one:
            continue
        if isinstance(was, dict) and isinstance(one, dict):
            yield from ((f"{name} {inner}", a, b) for inner, a, b in _differences(was, one))
            continue
        a, b = (json.dumps(value, ensure_ascii=False) for value in (was, one))
        alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
        yield name, *(_shown(a, alike - 40), _shown(b, alike - 40))


def _shown(text: str, start: int) -> str:
    """A text in one line; a long one from there on, and not all of it."""
    if len(text) <= LONGEST:
        return text
    start = max(0, start)
    return ("…" if start else "") + text[start : start + LONGEST] + ("…" if start + LONGEST < len(text) else "")


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
