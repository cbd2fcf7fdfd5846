"""The record of a run, ``run.json``: the settings that define it, which a resumed run must share, and the versions."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrpx.benchmarks import rows
from lrpx.errors import DataError, ResultFileError

if TYPE_CHECKING:
    from lrpx.explainer import Explainer

NAME = "run.json"
FORMAT = 1
PACKAGES = ("lrpx", "torch", "transformers", "numpy", "pyarrow", "spacy")
"""The packages whose versions the rows may depend on."""


def load(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of the run in a folder, or a new one where no rows are written yet.

    Args:
        folder: the run's folder.
        settings: what defines the run, as plain JSON types.

    Returns:
        ``{"format", "benchmark", "settings", "versions"}``, and what a run before this one added. Where versions
        differ from that run's, each is listed.

    Raises:
        ResultFileError: the rows in the folder are of a run with other settings, or of one without a record.
    """
    path, versions = folder / NAME, _versions()
    if not rows.parts(folder):
        return {"format": FORMAT, "benchmark": "sva", "settings": settings, "versions": versions}
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        before, versions_before = dict(record["settings"]), dict(record["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"{path} is not the record of a run; name another folder with --out") from error
    for name in [*settings, *before]:
        if settings.get(name) != before.get(name):
            raise ResultFileError(
                f"{folder} holds a run with another setting: {name} was {_shown(before.get(name))} and is "
                f"{_shown(settings.get(name))} now; name another folder with --out"
            )
    for package, version in versions.items():
        listed = str(versions_before.get(package, version)).split(", ")
        versions[package] = ", ".join(listed if version in listed else [*listed, version])
    return record | {"versions": versions}


def save(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a run.

    Raises:
        ResultFileError: it cannot be written.
    """
    rows.replace(folder / NAME, (json.dumps(record, ensure_ascii=False, indent=1) + "\n").encode())


def file(path: Path) -> dict[str, Any]:
    """What tells one file of data from another: its name, its size, its SHA-256.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name a file of sentences") from error


def model(explainer: Explainer) -> dict[str, str]:
    """What tells one model from another: its name (on the Hub, or of its folder), its weights, what it predicts, and
    in which precision it runs."""
    bound = explainer.bound
    name = Path(bound.name).resolve().name if Path(bound.name).is_dir() else bound.name
    return {"model": name, "weights": bound.fingerprint(), "task": bound.task.title, "dtype": bound.dtype}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # spacy, where parses come from elsewhere
            continue
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}…"
