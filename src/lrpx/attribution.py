"""The result of an explanation: a frozen value that can be read, grouped, saved and shown."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from lrpx._files import kept
from lrpx._images import Patches
from lrpx._pictures import Pictures
from lrpx.errors import InputError, MissingExtraError, ResultError
from lrpx.parts import Parts, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from lrpx.ledger import Ledger
    from lrpx.parts import Part

__all__ = ["Attribution", "Explained", "Prediction", "Provenance", "Token"]


TOKEN = "token"
"""The name of the axis that the tokens of an attribution lie along."""

PIXELS = ("channel", "row", "column")
"""The axes of the relevance of pixels."""


def axes_of_pixels(count: int) -> tuple[str, ...]:
    """The axes of the relevance of pixels that have so many: of one image, else of a film or of several images.

    >>> axes_of_pixels(3)
    ('channel', 'row', 'column')
    """
    return PIXELS if count == len(PIXELS) else numbered(count)


def numbered(count: int) -> tuple[str, ...]:
    """So many axes without a name of their own.

    >>> numbered(2)
    ('dimension 0', 'dimension 1')
    """
    return tuple(f"dimension {i}" for i in range(count))


_SHORT = 50


@dataclass(frozen=True)
class Prediction:
    """What the model itself says at the explained position.

    ``text`` is the token or class label, ``id`` its index, ``probability`` what the model gives it: by the softmax of
    the logits, or by the sigmoid of its own where several classes may hold at once (``problem_type`` of the config).
    """

    text: str
    id: int
    probability: float


@dataclass(frozen=True)
class Explained:
    """The scalar that was explained: how it reads, its value, and the position it was read at.

    ``position`` counts from 0 within the tokens (of the decoder for a seq2seq model), and where these are summed,
    within the groups of them; None for a classifier, whose logits belong to the whole text.
    """

    description: str
    value: float
    position: int | None


class _Facts(dict[str, str]):
    """A dict that is not to be written into."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ResultError("a result is not to be written into; make a dict of it first: dict(…)")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


@dataclass(frozen=True)
class Provenance:
    """Where an attribution comes from, enough to make it again.

    ``model`` is its name, with the adapters of peft that were switched on and what :func:`~lrpx.intervene` changed.
    """

    model: str
    revision: str | None
    method: str
    recipe: str
    dtype: str
    device: str
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", _Facts(self.versions))


@dataclass(frozen=True)
class Token:
    """One token of an attribution, or one group of them.

    Args:
        text: as a person reads it, with the white space before it.
        relevance: in the units of the explained value.
        index: its place, from 0.
        id: in the vocabulary; None for a group.
        special: whether it is one of the special tokens, such as a tokenizer adds; a template's other text is none.
        segment: the name of the segment that holds it, such as ``"encoder"``; empty for none.
    """

    text: str
    relevance: float
    index: int
    id: int | None
    special: bool
    segment: str


@dataclass(frozen=True, repr=False)
class Attribution(Pictures):
    """Relevance of every input token for one explained value, and of whatever else the method tells.

    Two are equal when every field is, the numbers bit for bit. ``for token in a`` gives a :class:`Token` each.

    Args:
        tokens: ``T`` pieces of text as a person reads them, each with the white space before it.
        parts: the numbers by name. ``"tokens"`` is always there, with the axis ``"token"`` of length ``T``, on the CPU,
            in the units of the explained value (logits, or log-probability). A method that tells more adds more, each
            with named axes: ``"heads"`` ("layer", "head", "token") is what each attention head of each layer writes
            into the explained value from each token (ALTI-Logit, Logit).
        explained: what was explained: how it reads, its value, where it was read.
        prediction: the model's own prediction at the explained position; None where it predicts nothing.
        provenance: model, recipe, versions, precision.
        ids: the token ids, ``T`` of them; empty for groups.
        word_spans: half-open token ranges ``(start, end)`` that make up the words, in order.
        word_texts: the text of each word.
        special: for each token, whether it is one of the special tokens.
        segments: named half-open ranges of tokens, such as the encoder's and the decoder's; one segment
            ``("input", 0, T)`` for everything else.
        ledger: where every unit of the explained value went, or None when it was not asked for.
        is_decomposition: whether a token's relevance is a part of the explained value, as LRP's is, and so a share of
            it; not the norm of a gradient, say, or a difference.
        image: where an image was explained, it as shown: ``[row, column, 3]``, ``uint8``, in the size that the model
            was given. The tokens are then its patches in reading order, ``"0,0"``, ``"0,1"``, …, where there is no text
            beside it; the part ``"pixels"`` has the axes ("channel", "row", "column"), ``"patches"`` ("row", "column").
        patch: how many pixels high and wide a patch is; None where there are none.

    Raises:
        ResultError: there is no part of the tokens, or a part has another number of tokens.
    """

    tokens: tuple[str, ...]
    parts: Parts
    explained: Explained
    prediction: Prediction | None
    provenance: Provenance
    ids: tuple[int, ...] = ()
    word_spans: tuple[tuple[int, int], ...] = ()
    word_texts: tuple[str, ...] = ()
    special: tuple[bool, ...] = ()
    segments: tuple[tuple[str, int, int], ...] = ()
    ledger: Ledger | None = None
    is_decomposition: bool = True
    image: Tensor | None = None
    patch: tuple[int, int] | None = None

    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Parts):
            raise ResultError(f"the parts are {type(self.parts).__name__}; pass Parts([Part('tokens', …), …])")
        if self.parts["tokens"].axes != (TOKEN,):
            raise ResultError(f"the part {self.parts['tokens']} is not of tokens alone; give it the axes ('token',)")
        for part in self.parts.values():
            if part.shape.get(TOKEN, len(self.tokens)) != len(self.tokens):
                raise ResultError(f"the part {part} does not fit {len(self.tokens)} tokens; give it a number for each")
        if self.image is not None:
            shape = self.image.shape
            if self.image.dtype != torch.uint8 or len(shape) != 3 or shape[-1] != 3 or 0 in shape:
                raise ResultError("the image is no tensor [row, column, 3] of uint8; pass one, or None")
            for part in self.parts.values():
                if part.axes == PIXELS and part.values.shape[1:] != shape[:2]:
                    raise ResultError(f"the part {part} does not fit an image of {list(shape[:2])} pixels")
            object.__setattr__(self, "image", frozen(self.image))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attribution):
            return NotImplemented
        if any(getattr(self, f.name) != getattr(other, f.name) for f in fields(self) if f.name != "image"):
            return False
        if self.image is None or other.image is None:
            return self.image is other.image
        return torch.equal(self.image, other.image)

    @property
    def relevance(self) -> Tensor:
        """``[T]``: the relevance of the tokens, the values of the part of that name; not to be written into."""
        return self.parts["tokens"].values

    @property
    def has_text(self) -> bool:
        """Whether the tokens, or the groups of them, are those of a text; not the patches of an image."""
        return self.image is None or bool(self.ids or self.special)

    def by_pixel(self) -> Tensor:
        """``[row, column]``: the relevance of each pixel of an image, summed over the channels; of a method that knows
        only patches, a patch's evenly over its pixels.

        Raises:
            ResultError: no image was explained.
        """
        if self.image is None:
            raise ResultError("this result is of no image; a.relevance has the numbers of its tokens")
        if "pixels" in self.parts:
            return self.parts["pixels"].values.clone().sum(0)
        values = self.parts["patches"].values.clone()
        if self.patch is None:
            raise ResultError("this result does not say how large a patch is; make it again")
        rows, columns = values.shape
        height, width, _ = self.image.shape
        return Patches(rows, columns, *self.patch).spread(values, height, width)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Token]:
        within = {i: name for name, start, end in reversed(self.segments) for i in range(start, end)}
        for i, (text, relevance) in enumerate(zip(self.tokens, self.relevance.tolist(), strict=True)):
            yield Token(
                text=text,
                relevance=relevance,
                index=i,
                id=self.ids[i] if i < len(self.ids) else None,
                special=i < len(self.special) and self.special[i],
                segment=within.get(i, ""),
            )

    def __repr__(self) -> str:
        text = "".join(self.tokens).strip()
        if not self.has_text and self.image is not None:
            text = f"image of {self.image.shape[1]} × {self.image.shape[0]} pixels"
        text = repr(text if len(text) <= _SHORT else text[: _SHORT - 1] + "…")
        what, value = repr(self.explained.description)[1:-1], self.explained.value
        return f"Attribution({text}, {what} = {value:+.4g}, {self.provenance.method}, {self.parts})"

    def words(self) -> Attribution:
        """The same relevance, summed over the tokens of each word.

        A token that is in no word stays alone, and a word ends where its segment does.

        Raises:
            InputError: the attribution was made without words, or with words that overlap.
        """
        if not self.word_spans:
            raise InputError("this attribution has no word_spans; pass the ranges to spans() instead")
        words = dict(zip(self.word_spans, self.word_texts, strict=True))
        borders = sorted({at for _, start, end in self.segments for at in (start, end)})
        edges = ([a, *(at for at in borders if a < at < b), b] for a, b in self.word_spans)
        whole = self._whole([part for each in edges for part in pairwise(each)])
        return self._grouped(whole, [words.get(span, "".join(self.tokens[slice(*span)])) for span in whole])

    def by_segment(self) -> Attribution:
        """The same relevance, summed over the tokens of each segment: the messages of a chat and its template, the two
        texts that are compared, an encoder's and a decoder's. Each is called by its name.

        Raises:
            InputError: the attribution was made without segments, or with some that overlap.
        """
        named = {(start, end): name for name, start, end in self.segments if start < end}
        if not named:
            raise InputError("this attribution has no segments; pass the ranges to spans() instead")
        whole = self._whole(list(named))
        texts = [named.get(span, "".join(self.tokens[slice(*span)])) for span in whole]
        return replace(self._grouped(whole, texts), segments=())

    def spans(self, spans: Sequence[tuple[int, int]]) -> Attribution:
        """The same relevance, summed over half-open token ranges; a token in none of them stays alone.

        A range that reaches over the border of a segment is in none.

        Raises:
            InputError: a range is empty, out of bounds, or overlaps another.
        """
        whole = self._whole(spans)
        return self._grouped(whole, ["".join(self.tokens[a:b]) for a, b in whole])

    def _whole(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Ranges of all tokens: those given, and each token between them alone."""
        try:
            ranges = sorted((operator.index(start), operator.index(end)) for start, end in spans)
        except (TypeError, ValueError) as error:
            raise InputError(
                "the spans are no list of ranges; pass half-open ranges of tokens, such as [(0, 2), (4, 5)]"
            ) from error
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
        return whole + [(i, i + 1) for i in range(reached, len(self))]

    def _grouped(self, spans: Sequence[tuple[int, int]], texts: Sequence[str]) -> Attribution:
        starts = {start: group for group, (start, _) in enumerate(spans)} | {len(self): len(spans)}
        return replace(
            self,
            tokens=tuple(texts),
            parts=Parts(part.grouped(TOKEN, spans) for part in self.parts.values()),
            explained=replace(self.explained, position=self._position_among(starts, spans)),
            ids=(),
            word_spans=tuple((i, i + 1) for i in range(len(spans))),
            word_texts=tuple(texts),
            special=tuple(all(self.special[a:b]) for a, b in spans) if self.special else (),
            segments=tuple((name, *_groups_within(starts, spans, a, b)) for name, a, b in self.segments),
        )

    def _position_among(self, starts: Mapping[int, int], spans: Sequence[tuple[int, int]]) -> int | None:
        """Which group holds the token that the value was read at, counted as that is: of a decoder, from its first."""
        where = self.explained.position
        if where is None:
            return None
        first = next((start for name, start, _ in self.segments if name == "decoder"), 0)
        if not 0 <= first + where < len(self):
            return where
        return max(0, _group_at(starts, spans, first + where) - _groups_within(starts, spans, first, len(self))[0])

    def labels(self, part: Part) -> dict[str, Sequence[str]]:
        """How the places along the axes of a part are called: the part's own labels, and the tokens' texts."""
        return ({TOKEN: self.tokens} if TOKEN in part.axes else {}) | dict(part.labels)

    def to_dataframe(self, part: str = "tokens") -> Any:
        """A part as a table of polars or else pandas, whichever is installed.

        One row a value. Each axis has a column of its name that counts its places from 0, ``"layer"``, and one of their
        texts where they have any, ``"token text"``; the values are in the column ``"relevance"``.

        Raises:
            MissingExtraError: neither polars nor pandas is installed.
            ResultError: there is no such part.
        """
        chosen = self.parts[part]
        library = dataframes()
        values = chosen.values.clone()
        wide = torch.promote_types(values.dtype, torch.float32)  # the libraries know no smaller ones
        places = torch.meshgrid(*(torch.arange(size) for size in values.shape), indexing="ij")
        labels = self.labels(chosen)
        columns: dict[str, Any] = {}
        for axis, indices in zip(chosen.axes, places, strict=True):
            columns[axis] = indices.flatten().numpy()
            if axis in labels:
                texts = [text.encode(errors="backslashreplace").decode() for text in labels[axis]]
                columns[f"{axis} text"] = [texts[i] for i in columns[axis].tolist()]
        columns["relevance"] = values.to("cpu", wide).flatten().numpy()
        if len(columns) != len(chosen.axes) + len(labels) + 1:
            raise ResultError(f"the table of part {chosen} has two columns of one name; rename its axes")
        return library.DataFrame(columns)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the numbers of every part included."""
        from lrpx._saving import metadata

        plain = metadata(self)
        for name, part in self.parts.items():
            plain["parts"][name]["values"] = part.values.tolist()
        return plain

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: every part as a tensor, the rest as JSON metadata.

        Raises:
            ResultFileError: the folder is missing or cannot be written to.
        """
        from lrpx._saving import write

        write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Attribution:
        """Read what :meth:`save` wrote.

        Raises:
            ResultFileError: the file is missing, truncated, not an LRPx result, or of another format.
        """
        from lrpx._saving import read

        return read(path)

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page; also written to ``path`` when given."""
        from lrpx._views.html import page

        return kept(page(self), path)

    def _pictured(self) -> Sequence[Attribution]:
        return (self,)

    def _repr_html_(self) -> str:
        from lrpx._views.html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from lrpx._views.terminal import line

        return line(self)

    def __rich__(self) -> Any:
        from lrpx._views.terminal import heatmap

        return heatmap(self)


def _group_at(starts: Mapping[int, int], spans: Sequence[tuple[int, int]], token: int) -> int:
    """The group that begins at, or holds, a token."""
    if token in starts:
        return starts[token]
    return next(group for group, (a, b) in enumerate(spans) if a <= token < b)


def _groups_within(
    starts: Mapping[int, int], spans: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[int, int]:
    """The groups whose tokens are all in a range: one that reaches over its border is in no segment."""
    first = _group_at(starts, spans, start) + (start not in starts)
    return first, max(first, _group_at(starts, spans, end))


def dataframes() -> Any:
    """The library that makes tables: polars, or else pandas."""
    for name in ("polars", "pandas"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise MissingExtraError("a table needs polars or pandas: pip install polars")


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
