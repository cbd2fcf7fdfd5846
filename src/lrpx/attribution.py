"""The result of an explanation: a frozen value that can be read, grouped, saved and shown."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import save_file

from lrpx.errors import InputError, ResultFileError
from lrpx.ledger import KINDS, Entry, Ledger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

FORMAT = 1


@dataclass(frozen=True)
class Prediction:
    """What the model itself says at the explained position.

    ``text`` is the token or class label, ``id`` its index, ``probability`` its softmax probability.
    """

    text: str
    id: int
    probability: float


@dataclass(frozen=True)
class Explained:
    """The scalar that was explained: how it reads, its value, and the position it was read at.

    ``position`` counts from 0 within the tokens (of the decoder for a seq2seq model); None for a
    classifier, whose logits belong to the whole text.
    """

    description: str
    value: float
    position: int | None


@dataclass(frozen=True)
class Provenance:
    """Where an attribution comes from, enough to make it again."""

    model: str
    revision: str | None
    method: str
    recipe: str
    dtype: str
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Attribution:
    """Relevance of every input token for one explained value.

    Two are equal when every field is, the relevance bit for bit.

    Args:
        tokens: ``T`` pieces of text as a person reads them, each with the white space before it.
        relevance: ``[T]``, on the CPU, in the units of the explained value (logits, or log-probability).
        explained: what was explained: how it reads, its value, where it was read.
        prediction: the model's own prediction at the explained position.
        provenance: model, recipe, versions, precision.
        ids: the token ids, ``T`` of them; empty for groups.
        word_spans: half-open token ranges ``(start, end)`` that make up the words, in order.
        word_texts: the text of each word.
        special: for each token, whether the tokenizer or the template added it.
        segments: named half-open ranges of tokens, such as the encoder's and the decoder's; one segment
            ``("input", 0, T)`` for everything else.
        ledger: where every unit of the explained value went, or None when it was not asked for.
        heads: ``[L, H, T]``, what each attention head of each layer writes into the explained value from each token,
            for methods that tell (ALTI-Logit, Logit); None for the others.
    """

    tokens: tuple[str, ...]
    relevance: Tensor
    explained: Explained
    prediction: Prediction
    provenance: Provenance
    ids: tuple[int, ...] = ()
    word_spans: tuple[tuple[int, int], ...] = ()
    word_texts: tuple[str, ...] = ()
    special: tuple[bool, ...] = ()
    segments: tuple[tuple[str, int, int], ...] = ()
    ledger: Ledger | None = None
    heads: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attribution):
            return NotImplemented
        mine, others = self._tensors(), other._tensors()
        alike = mine.keys() == others.keys() and all(_equal(mine[name], others[name]) for name in mine)
        return alike and self._metadata() == other._metadata()

    def _tensors(self) -> dict[str, Tensor]:
        named = {"relevance": self.relevance} | ({} if self.heads is None else {"heads": self.heads})
        return {name: value.contiguous() for name, value in named.items()}

    def words(self) -> Attribution:
        """The same relevance, summed over the tokens of each word.

        Raises:
            InputError: the attribution was made without words.
        """
        if not self.word_spans:
            raise InputError("this attribution has no word_spans; pass the ranges to spans() instead")
        return self._grouped(self.word_spans, self.word_texts)

    def spans(self, spans: Sequence[tuple[int, int]]) -> Attribution:
        """The same relevance, summed over half-open token ranges; a token in none of them stays alone.

        Raises:
            InputError: a range is empty, out of bounds, or overlaps another.
        """
        ranges = sorted(spans)
        reached = 0
        whole: list[tuple[int, int]] = []
        for start, end in ranges:
            if not 0 <= start < end <= len(self):
                raise InputError(
                    f"span ({start}, {end}) is not a range of the {len(self)} tokens; "
                    f"pass half-open ranges 0 <= start < end <= {len(self)}"
                )
            if start < reached:
                raise InputError(f"span ({start}, {end}) overlaps the one before it; pass disjoint spans")
            whole += [(i, i + 1) for i in range(reached, start)] + [(start, end)]
            reached = end
        whole += [(i, i + 1) for i in range(reached, len(self))]
        return self._grouped(whole, ["".join(self.tokens[a:b]) for a, b in whole])

    def _grouped(self, spans: Sequence[tuple[int, int]], texts: Sequence[str]) -> Attribution:
        starts = {start: group for group, (start, _) in enumerate(spans)} | {len(self): len(spans)}
        return replace(
            self,
            tokens=tuple(texts),
            relevance=torch.stack([self.relevance[a:b].sum() for a, b in spans]),
            heads=None if self.heads is None else torch.stack([self.heads[..., a:b].sum(-1) for a, b in spans], -1),
            ids=(),
            word_spans=tuple((i, i + 1) for i in range(len(spans))),
            word_texts=tuple(texts),
            special=tuple(all(self.special[a:b]) for a, b in spans) if self.special else (),
            segments=tuple(
                (name, _group_at(starts, spans, a), _group_at(starts, spans, b)) for name, a, b in self.segments
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, relevance included."""
        return self._metadata() | {name: value.tolist() for name, value in self._tensors().items()}

    def _metadata(self) -> dict[str, Any]:
        plain = asdict(replace(self, relevance=torch.empty(0), heads=None))
        del plain["relevance"], plain["heads"]
        return {"format": FORMAT} | plain

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: relevance and heads as tensors, the rest as JSON metadata."""
        try:
            save_file(self._tensors(), path, {"lrpx": json.dumps(self._metadata())})
        except (OSError, safetensors.SafetensorError) as error:
            raise ResultFileError(f"cannot write {path}: {error}; check the folder exists") from error

    @classmethod
    def load(cls, path: str | Path) -> Attribution:
        """Read what :meth:`save` wrote.

        Raises:
            ResultFileError: the file is missing, truncated, not an LRPx result, or of a newer format.
        """
        try:
            with safetensors.safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            fields = json.loads(metadata["lrpx"])
            version = fields["format"]
        except FileNotFoundError as error:
            raise ResultFileError(f"there is no file {path}; check the path") from error
        except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ResultFileError(
                f"{path} is not a readable LRPx result ({type(error).__name__}: {error}); "
                "it may be truncated: save it again"
            ) from error
        if type(version) is not int or version > FORMAT:
            raise ResultFileError(
                f"{path} has result format {version!r}, this lrpx reads up to {FORMAT}; upgrade lrpx to read it"
            )
        try:
            return _from_fields(fields, tensors.get("relevance"), tensors.get("heads"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ResultFileError(
                f"{path} lacks a part of an LRPx result, or holds a wrong one ({type(error).__name__}: {error}); "
                "save it again"
            ) from error

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page; also written to ``path`` when given."""
        from lrpx.views.html import page

        text = page(self)
        if path is not None:
            write_text(path, text)
        return text

    def _repr_html_(self) -> str:
        from lrpx.views.html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from lrpx.views.terminal import line

        return line(self)

    def __rich__(self) -> Any:
        from lrpx.views.terminal import heatmap

        return heatmap(self)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same in type and in every bit."""
    return one.dtype == other.dtype and torch.equal(one, other)


def _group_at(starts: Mapping[int, int], spans: Sequence[tuple[int, int]], token: int) -> int:
    """The group that begins at, or holds, a token."""
    if token in starts:
        return starts[token]
    return next(group for group, (a, b) in enumerate(spans) if a <= token < b)


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


def _from_fields(fields: Mapping[str, Any], relevance: Tensor | None, heads: Tensor | None) -> Attribution:
    """The attribution of a file's JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: a field is missing, of another type, or does
            not fit.
    """
    tokens = _typed(fields["tokens"], str)
    count = len(tokens)
    if relevance is None or relevance.shape != (count,) or not relevance.is_floating_point():
        raise ValueError(f"relevance is not {count} floating-point numbers")
    if heads is not None and not (heads.ndim == 3 and heads.shape[-1] == count and heads.is_floating_point()):
        raise ValueError(f"heads are not layers × heads × {count} floating-point numbers")
    spans = tuple((a, b) for a, b in fields["word_spans"])
    words = _typed(fields["word_texts"], str)
    ids, special = _typed(fields["ids"], int), _typed(fields["special"], bool)
    segments = tuple((name, a, b) for name, a, b in fields["segments"])
    ledger = None if fields["ledger"] is None else _ledger(**fields["ledger"])
    explained, prediction = Explained(**fields["explained"]), Prediction(**fields["prediction"])
    provenance = Provenance(**fields["provenance"])
    _typed([explained.description, prediction.text, *(name for name, _, _ in segments)], str)
    _typed([provenance.model, provenance.method, provenance.recipe, provenance.dtype, provenance.device], str)
    _typed([*provenance.versions, *provenance.versions.values()], str)
    _finite([explained.value, prediction.probability])
    _typed([prediction.id, *([] if explained.position is None else [explained.position])], int)
    ranges = [*spans, *((a, b) for _, a, b in segments)]
    if not all(type(a) is type(b) is int and 0 <= a <= b <= count for a, b in ranges):
        raise ValueError(f"a range of tokens is none of {count}")
    if len(words) != len(spans) or len(ids) not in (0, count) or len(special) not in (0, count):
        raise ValueError("the lists differ in length")
    return Attribution(
        tokens, relevance, explained, prediction, provenance, ids, spans, words, special, segments, ledger, heads
    )


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


def scale(relevance: Tensor) -> tuple[float, int | None]:
    """``(limit, sink)``: the colour scale of a heatmap, and the token that would swallow it.

    The limit is the largest absolute relevance. When one token alone exceeds four times the
    next largest, it is the sink: the limit is then the largest of the rest, and the views mark that token.

    >>> scale(torch.tensor([9.0, 1.0, -0.5]))
    (1.0, 0)
    >>> scale(torch.tensor([2.0, 1.0, -0.5]))
    (2.0, None)
    """
    size = relevance.abs().tolist()
    if not size:
        return 0.0, None
    order = sorted(range(len(size)), key=lambda i: -size[i])
    if len(size) > 1 and 0 < size[order[1]] < size[order[0]] / 4 and math.isfinite(size[order[0]]):
        return size[order[1]], order[0]
    return size[order[0]], None
