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


@dataclass(frozen=True)
class Attribution:
    """Relevance of every input token for one explained value.

    Args:
        tokens: ``T`` pieces of text as a person reads them, each with the white space before it.
        relevance: ``[T]``, on the CPU, in the units of the explained value (logits, or log-probability).
        target: what was explained.
        prediction: the model's own prediction at the explained position.
        provenance: model, recipe, versions, precision.
        ids: the token ids, ``T`` of them; empty for groups.
        word_spans: half-open token ranges ``(start, end)`` that make up the words, in order.
        word_texts: the text of each word.
        special: for each token, whether the tokenizer or the template added it.
        segments: named half-open ranges of tokens, such as the encoder's and the decoder's; one segment
            ``("input", 0, T)`` for everything else.
        ledger: where every unit of the explained value went, or None when it was not asked for.
    """

    tokens: tuple[str, ...]
    relevance: Tensor
    target: Explained
    prediction: Prediction
    provenance: Provenance
    ids: tuple[int, ...] = ()
    word_spans: tuple[tuple[int, int], ...] = ()
    word_texts: tuple[str, ...] = ()
    special: tuple[bool, ...] = ()
    segments: tuple[tuple[str, int, int], ...] = ()
    ledger: Mapping[str, float] | None = field(default=None)

    def __len__(self) -> int:
        return len(self.tokens)

    def words(self) -> Attribution:
        """The same relevance, summed over the tokens of each word."""
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
            ids=(),
            word_spans=tuple((i, i + 1) for i in range(len(spans))),
            word_texts=tuple(texts),
            special=tuple(all(self.special[a:b]) for a, b in spans),
            segments=tuple(
                (name, _group_at(starts, spans, a), _group_at(starts, spans, b))
                for name, a, b in self.segments
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, relevance included."""
        return self._metadata() | {"relevance": self.relevance.tolist()}

    def _metadata(self) -> dict[str, Any]:
        plain = asdict(replace(self, relevance=torch.empty(0)))
        del plain["relevance"]
        return {"format": FORMAT} | plain

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: the relevance as a tensor, the rest as JSON metadata."""
        try:
            save_file(
                {"relevance": self.relevance.contiguous()}, path, {"lrpx": json.dumps(self._metadata())}
            )
        except (OSError, safetensors.SafetensorError) as error:
            raise ResultFileError(f"cannot write {path}: {error}; check the folder exists") from error

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


def load(path: str | Path) -> Attribution:
    """Read what :meth:`Attribution.save` wrote.

    Raises:
        ResultFileError: the file is missing, truncated, not an LRPx result, or of a newer format.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            relevance = file.get_tensor("relevance") if "relevance" in file.keys() else None  # noqa: SIM118
        fields = json.loads(metadata["lrpx"])
        version = fields.pop("format")
    except FileNotFoundError as error:
        raise ResultFileError(f"there is no file {path}; check the path") from error
    except (OSError, safetensors.SafetensorError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ResultFileError(
            f"{path} is not a readable LRPx result ({type(error).__name__}: {error}); "
            "it may be truncated: save it again"
        ) from error
    if not isinstance(version, int) or version > FORMAT:
        raise ResultFileError(
            f"{path} has result format {version}, this lrpx reads up to {FORMAT}; upgrade lrpx to read it"
        )
    try:
        assert relevance is not None and len(relevance) == len(fields["tokens"])
        return Attribution(
            tokens=tuple(fields["tokens"]),
            relevance=relevance,
            target=Explained(**fields["target"]),
            prediction=Prediction(**fields["prediction"]),
            provenance=Provenance(**fields["provenance"]),
            ids=tuple(fields["ids"]),
            word_spans=tuple((a, b) for a, b in fields["word_spans"]),
            word_texts=tuple(fields["word_texts"]),
            special=tuple(fields["special"]),
            segments=tuple((name, a, b) for name, a, b in fields["segments"]),
            ledger=fields["ledger"],
        )
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ResultFileError(f"{path} lacks a part of an LRPx result ({error}); save it again") from error


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
