"""Attributions as safetensors files: every part a tensor of its name, the rest JSON; a file is never trusted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import safetensors
from safetensors.torch import save_file

from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.errors import ResultFileError
from lrpx.ledger import KINDS, Entry, Ledger
from lrpx.parts import Part, Parts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

FORMAT = 2


def write(a: Attribution, path: str | Path) -> None:
    """Write a safetensors file.

    Raises:
        ResultFileError: the folder is missing or cannot be written to.
    """
    tensors = {name: part.values.clone().contiguous() for name, part in a.parts.items()}
    try:
        save_file(tensors, path, {"lrpx": json.dumps(metadata(a))})
    except (OSError, safetensors.SafetensorError) as error:
        raise ResultFileError(f"cannot write {path}: {error}; check the folder exists") from error


def read(path: str | Path) -> Attribution:
    """Read what :func:`write` wrote.

    Raises:
        ResultFileError: the file is missing, truncated, not an LRPx result, or of another format.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            text = (file.metadata() or {})["lrpx"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = json.loads(text)
        version = found["format"]
    except FileNotFoundError as error:
        raise ResultFileError(f"there is no file {path}; check the path") from error
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ResultFileError(
            f"{path} is not a readable LRPx result ({type(error).__name__}: {error}); "
            "it may be truncated: save it again"
        ) from error
    if type(version) is not int or version != FORMAT:
        mend = "make it again" if type(version) is int and version < FORMAT else "upgrade lrpx to read it"
        raise ResultFileError(f"{path} has result format {version!r}, this lrpx reads format {FORMAT}; {mend}")
    try:
        return _from_fields(found, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ResultFileError(
            f"{path} lacks a part of an LRPx result, or holds a wrong one ({type(error).__name__}: {error}); "
            "save it again"
        ) from error


def metadata(a: Attribution) -> dict[str, Any]:
    """All of an attribution but its numbers, as plain JSON types."""
    plain: dict[str, Any] = {field.name: getattr(a, field.name) for field in fields(a)}
    for name in ("explained", "prediction", "provenance", "ledger"):
        plain[name] = None if plain[name] is None else asdict(plain[name])
    plain["parts"] = {name: {"axes": part.axes, "labels": dict(part.labels)} for name, part in a.parts.items()}
    return {"format": FORMAT} | plain


def _from_fields(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Attribution:
    """The attribution of a file's JSON and its tensors.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: a field is missing, of another type, or does
            not fit.
    """
    tokens = _typed(fields["tokens"], str)
    count = len(tokens)
    parts = _parts(fields["parts"], tensors)
    spans = tuple((a, b) for a, b in fields["word_spans"])
    words = _typed(fields["word_texts"], str)
    ids, special = _typed(fields["ids"], int), _typed(fields["special"], bool)
    segments = tuple((name, a, b) for name, a, b in fields["segments"])
    ledger = None if fields["ledger"] is None else _ledger(**fields["ledger"])
    explained = Explained(**fields["explained"])
    prediction = None if fields["prediction"] is None else Prediction(**fields["prediction"])
    provenance = Provenance(**fields["provenance"])
    _typed([explained.description, *(name for name, _, _ in segments)], str)
    _typed([provenance.model, provenance.method, provenance.recipe, provenance.dtype, provenance.device], str)
    _typed([*provenance.versions, *provenance.versions.values()], str)
    _finite([explained.value])
    _typed([] if explained.position is None else [explained.position], int)
    if prediction is not None:
        _typed([prediction.text], str)
        _finite([prediction.probability])
        _typed([prediction.id], int)
    ranges = [*spans, *((a, b) for _, a, b in segments)]
    if not all(type(a) is type(b) is int and 0 <= a <= b <= count for a, b in ranges):
        raise ValueError(f"a range of tokens is none of {count}")
    if len(words) != len(spans) or len(ids) not in (0, count) or len(special) not in (0, count):
        raise ValueError("the lists differ in length")
    return Attribution(tokens, parts, explained, prediction, provenance, ids, spans, words, special, segments, ledger)


def _parts(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> Parts:
    """The parts of a file, whose JSON and tensors must tell of the same; raises as :func:`_from_fields` does."""
    if not isinstance(described, dict) or described.keys() != tensors.keys():
        raise ValueError(f"the parts are not those of the tensors {sorted(tensors)}")

    def part(name: str, axes: Any, labels: Any) -> Part:
        named = {axis: _typed(names, str) for axis, names in labels.items()}
        return Part(name, tensors[name], _typed(axes, str), named)

    return Parts(part(name, **fields) for name, fields in described.items())


def _ledger(entries: list[dict[str, Any]], explained: float) -> Ledger:
    """The ledger of a file's JSON; raises as :func:`_from_fields` does."""
    if not isinstance(entries, list):
        raise TypeError("the ledger's entries are not a list")
    ledger = Ledger(tuple(Entry(**entry) for entry in entries), explained)
    _typed([entry.name for entry in ledger.entries], str)
    _finite([ledger.explained, *(entry.value for entry in ledger.entries)])
    unknown = {entry.kind for entry in ledger.entries} - set(KINDS)
    if unknown:
        raise ValueError(f"the ledger has entries of kind {min(unknown)!r}")
    return ledger


def _finite(numbers: list[Any]) -> None:
    """Refuse what is no number, or none that is finite."""
    if not all(math.isfinite(number) for number in _typed(numbers, (int, float))):
        raise ValueError("a number is not finite")


def _typed(values: Any, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """A JSON list as a tuple, when each of its items is of a kind; a bool is no number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(values, list) or not all(type(value) in kinds for value in values):
        names = " or ".join(each.__name__ for each in kinds)
        raise TypeError(f"not a list of {names}: {str(values)[:60]}")
    return tuple(values)
