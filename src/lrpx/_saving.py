"""Attributions as safetensors files: every part a tensor of its name, the rest JSON; a file is never trusted.

A SHA-256 of both stands beside them, against bits that a disk or a transfer lost; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from lrpx._files import write_whole
from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.errors import ResultFileError
from lrpx.ledger import KINDS, Entry, Ledger
from lrpx.parts import Part, Parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

FORMAT = 5
IMAGE = "_image"
"""The name of the tensor that holds the image as shown; no part can be called so."""
CHECKSUM = "sha256"
"""The name of the metadata that holds the checksum."""
ROUNDING = 1e-3
"""By how much a probability may exceed 1, as the softmax of a model in half precision does."""


def write(a: Attribution, path: str | Path) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        ResultFileError: the folder is missing or cannot be written to.
    """
    tensors = {name: part.values.clone().contiguous() for name, part in a.parts.items()}
    tensors |= {} if a.image is None else {IMAGE: a.image.clone().contiguous()}
    text = json.dumps(metadata(a))
    write_whole(path, safetensors.torch.save(tensors, {"lrpx": text, CHECKSUM: checksum(text, tensors)}))


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of a file's JSON and of every tensor: its name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, values in sorted(tensors.items()):
        digest.update(json.dumps([name, str(values.dtype), list(values.shape)]).encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read(path: str | Path) -> Attribution:
    """Read what :func:`write` wrote.

    Raises:
        ResultFileError: the file is missing, truncated, changed, not an LRPx result, or of another format.
    """
    if Path(path).is_dir():
        raise ResultFileError(f"{path} is a folder; name a file that save() wrote")
    try:
        with safetensors.safe_open(path, "pt") as file:
            described = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ResultFileError(f"there is no file {path}; check the path") from error
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error
    if "lrpx" not in described:
        raise ResultFileError(f"{path} holds no LRPx result; name a file that save() wrote")
    text = described["lrpx"]
    try:
        found = json.loads(text)
        version = found["format"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if type(version) is not int or version != FORMAT:
        mend = "make it again" if type(version) is int and version < FORMAT else "upgrade lrpx to read it"
        raise ResultFileError(f"{path} has result format {version!r}, this lrpx reads format {FORMAT}; {mend}")
    if described.get(CHECKSUM) != checksum(text, tensors):
        raise ResultFileError(f"{path} was changed since it was written: its checksum is another; make it again")
    try:
        return _from_fields(found, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ResultFileError(
            f"{path} lacks a part of an LRPx result, or holds a wrong one ({type(error).__name__}: {error}); "
            "save it again"
        ) from error


def _unreadable(path: str | Path, error: Exception) -> ResultFileError:
    return ResultFileError(
        f"{path} is not a readable LRPx result ({type(error).__name__}: {error}); name a file that save() wrote, or, "
        "if it is one that was cut off, save it again"
    )


def metadata(a: Attribution) -> dict[str, Any]:
    """All of an attribution but its numbers, as plain JSON types."""
    plain: dict[str, Any] = {field.name: getattr(a, field.name) for field in fields(a)}
    for name in ("explained", "prediction", "provenance", "ledger"):
        plain[name] = None if plain[name] is None else asdict(plain[name])
    plain["provenance"]["versions"] = dict(a.provenance.versions)
    plain["image"] = a.image is not None
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
    image = tensors.get(IMAGE)
    if _typed([fields["image"]], bool) != (image is not None,):
        raise ValueError("the image is not that of the tensors")
    parts = _parts(fields["parts"], {name: values for name, values in tensors.items() if name != IMAGE})
    patch = None if fields["patch"] is None else _typed(fields["patch"], int)
    if patch is not None and (len(patch) != 2 or min(patch) < 1):
        raise ValueError(f"a patch is {patch} pixels")
    spans = _ranges(fields["word_spans"], count)
    words = _typed(fields["word_texts"], str)
    ids, special = _typed(fields["ids"], int), _typed(fields["special"], bool)
    segments = tuple((name, a, b) for name, a, b in fields["segments"])
    _ranges([[a, b] for _, a, b in segments], count)
    ledger = None if fields["ledger"] is None else _ledger(**fields["ledger"])
    explained = Explained(**fields["explained"])
    prediction = None if fields["prediction"] is None else Prediction(**fields["prediction"])
    provenance = Provenance(**fields["provenance"])
    _typed([explained.description, *(name for name, _, _ in segments)], str)
    _typed([provenance.model, provenance.method, provenance.recipe, provenance.dtype, provenance.device], str)
    _typed([] if provenance.revision is None else [provenance.revision], str)
    _typed([*provenance.versions, *provenance.versions.values()], str)
    _finite([explained.value])
    (is_decomposition,) = _typed([fields["is_decomposition"]], bool)
    _counts([*ids, *([] if explained.position is None else [explained.position])])
    if prediction is not None:
        _typed([prediction.text], str)
        _finite([prediction.probability])
        _counts([prediction.id])
        if not 0 <= prediction.probability <= 1 + ROUNDING:
            raise ValueError(f"the probability is {prediction.probability}")
    if any(a == b for a, b in spans) or any(b > c for (_, b), (c, _) in pairwise(spans)):
        raise ValueError("the words are empty, overlap or are not in order")
    if len(words) != len(spans) or len(ids) not in (0, count) or len(special) not in (0, count):
        raise ValueError("the lists differ in length")
    made = (tokens, parts, explained, prediction, provenance, ids, spans, words, special, segments, ledger)
    return Attribution(*made, is_decomposition, image, patch)


def _parts(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> Parts:
    """The parts of a file, whose JSON and tensors must tell of the same; raises as :func:`_from_fields` does."""
    if not isinstance(described, dict) or described.keys() != tensors.keys():
        raise ValueError(f"the parts are not those of the tensors {sorted(tensors)}")

    def part(name: str, axes: Any, labels: Any) -> Part:
        named = {axis: _typed(names, str) for axis, names in labels.items()}
        made = Part(name, tensors[name], _typed(axes, str), named)
        if not made.values.isfinite().all():
            raise ValueError(f"part {name!r} holds NaN or infinity")
        return made

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


def _ranges(pairs: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of tokens; raises as :func:`_from_fields` does."""
    found = tuple((a, b) for a, b in pairs)
    if not all(type(a) is type(b) is int and 0 <= a <= b <= count for a, b in found):
        raise ValueError(f"a range of tokens is none of {count}")
    return found


def _counts(numbers: list[Any]) -> None:
    """Refuse what is no whole number from 0."""
    if any(number < 0 for number in _typed(numbers, int)):
        raise ValueError("an id or a position is negative")


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
