"""What a user passes, as rows: texts, pairs of texts, chats, token ids, images, and what a tokenizer or processor makes
of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lrpx import _tokens, tasks
from lrpx._tokens import Tokens
from lrpx.errors import InputError
from lrpx.targets import whole_number
from lrpx.tasks import Task

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["Reader", "Row", "Segment"]

DECODERS = ("decoder_input_ids", "decoder_attention_mask")
"""The fields that are the decoder's text."""
RANKS = {"pixel_values": 4, "input_features": 3, "input_values": 2}
"""How many dimensions a batch of images or sounds has."""
NO_INPUT = ("label", "special_tokens_mask", "offset_mapping", "overflow")
"""What a tokenizer may give that is not for the model's forward pass."""


@dataclass(frozen=True)
class Segment:
    """A part of an input: its tokens, and what else the tokenizer says of each (``"token_type_ids"``)."""

    name: str
    tokens: Tokens
    fields: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens.ids)


@dataclass(frozen=True)
class Row:
    """One input.

    Args:
        segments: its parts, as :class:`~lrpx.tasks.Task` names them: one, an encoder's and a decoder's, one for each
            choice; none for an image.
        arguments: the model's arguments that hold no tokens, such as ``pixel_values``, each as a batch of one.
        where: what an error about this row adds: nothing, or its number.
    """

    segments: tuple[Segment, ...]
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    where: str = ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each segment has."""
        return tuple(map(len, self.segments))

    @property
    def tokens(self) -> Tokens:
        """The tokens of all segments, one after another."""
        found, offset = [segment.tokens for segment in self.segments], 0
        if len(found) == 1:
            return found[0]
        spans: list[tuple[int, int]] = []
        for each in found:
            spans += [(a + offset, b + offset) for a, b in each.word_spans]
            offset += len(each.ids)
        return Tokens(
            ids=tuple(number for each in found for number in each.ids),
            pieces=tuple(piece for each in found for piece in each.pieces),
            special=tuple(special for each in found for special in each.special),
            word_spans=tuple(spans),
            word_texts=tuple(text for each in found for text in each.word_texts),
        )


@dataclass(frozen=True)
class Reader:
    """Reads inputs for one model.

    Args:
        model: the user's module.
        tokenizer: its tokenizer or processor, or None.
        task: what it predicts.
    """

    model: Module
    tokenizer: Any
    task: Task

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer; a processor of images and texts holds one."""
        return getattr(self.tokenizer, "tokenizer", None) or self.tokenizer

    @cached_property
    def limit(self) -> int | None:
        """The most tokens that the model takes, or None for any number."""
        return tasks.context_length(self.model) if self.task.segments else None

    def rows(self, inputs: Any, decoder: Any = None) -> list[Row]:
        """A row for each of several inputs; the decoder's text is one for all, or a list.

        Raises:
            InputError: see :meth:`row`; the row is named.
        """
        many = _each(inputs) if isinstance(inputs, Mapping) else list(inputs)
        if not many:
            raise InputError("the list of inputs is empty; pass at least one text")
        texts = isinstance(decoder, tuple) and all(isinstance(each, str) for each in decoder)
        several = (
            texts or is_many(decoder) or (isinstance(decoder, (list, tuple)) and any(each is None for each in decoder))
        )
        decoders = spread(decoder, len(many), "decoder") if several else [decoder] * len(many)
        pairs = zip(many, decoders, strict=True)
        return [self.row(each, written, f" (row {i} of the batch)") for i, (each, written) in enumerate(pairs)]

    def row(self, given: Any, decoder: Any = None, where: str = "") -> Row:
        """One input as a row.

        Args:
            given: a text; a pair of texts (a tuple of two: premise and hypothesis, question and context, or the two
                texts to compare); for multiple choice ``(text, [choice, choice, …])``; token ids; chat messages; an
                image; or what a tokenizer or processor returns.
            decoder: what an encoder-decoder model has written so far: a text, or ids with the start token.
            where: what an error adds.

        Raises:
            InputError: no tokens, too many, ids outside the vocabulary, or something that this model cannot take.
        """
        try:
            written = self._decoder_ids(_decoder_of(given, decoder))
            segments, arguments = self._read(given)
        except InputError as error:
            raise InputError(f"{error}{where}") if where else error from None
        if written is not None:
            segments = (*segments, self._segment(self.task.segments[-1], {"input_ids": written}))
        return Row(segments, arguments, where)

    def position(self, row: Row, position: Any = None) -> int | None:
        """Where the logits of a row are read, from 0; None where they belong to the whole of it.

        Raises:
            InputError: a position that is none, or one for a model whose logits have none.
        """
        try:
            return self._position(row, position)
        except InputError as error:
            raise InputError(f"{error}{row.where}") if row.where else error from None

    # -------------------------------------------------------------------------- what is passed

    def _read(self, given: Any) -> tuple[tuple[Segment, ...], dict[str, Tensor]]:
        """The segments but for the decoder's, and the other arguments."""
        name = self.task.segments[0] if self.task.segments else "input"
        if isinstance(given, Mapping) and self.task.together is not None:
            raise InputError(
                f"the input is {type(given).__name__}, and a {self.task.title} takes several texts; pass them as a "
                "tuple: (text, other), or (text, [choice, choice]) for multiple choice"
            )
        if isinstance(given, Mapping) and not {"role", "content"} <= set(given):
            if {"question", "context"} <= set(given):
                return (self._segment(name, self._texts(given["question"], given["context"])),), {}
            return self._processed(given, name)
        if self.task is Task.MULTIPLE_CHOICE:
            text, choices = _choices(given)
            pairs = [self._texts(text, choice) for choice in choices]
            return tuple(self._segment(f"{name} {i}", each) for i, each in enumerate(pairs)), {}
        if self.task is Task.EMBEDDINGS:
            if not (isinstance(given, (tuple, list)) and len(given) == 2):
                raise InputError("a text encoder compares two texts; pass them as a tuple: (text, other)")
            both = zip(self.task.segments, given, strict=True)
            return tuple(self._segment(each, self._fields(one, each)) for each, one in both), {}
        if self.task.arguments[0] != "input_ids":
            return (), self._signal(given)
        return (self._segment(name, self._fields(given, name)),), {}

    def _fields(self, given: Any, name: str) -> dict[str, list[int]]:
        """What a text, a pair of texts, chat messages or token ids are to the model, token by token."""
        if isinstance(given, str):
            return _tokens.encode(self.text_tokenizer, given)
        if isinstance(given, (bytes, bytearray, memoryview)):
            raise InputError(
                f"the {name} is {type(given).__name__}, which is no text; pass a str, such as bytes(…).decode()"
            )
        if isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, str) for each in given):
            return self._texts(*given)
        if hasattr(given, "ndim"):  # a tensor or an array
            given = given[0] if given.ndim == 2 and len(given) == 1 else given
            if given.ndim != 1:
                raise InputError(
                    f"the {name} has shape {list(given.shape)}; pass the token ids of one text as a flat list"
                )
            given = given.tolist()
        if isinstance(given, Sequence):
            if given and all(isinstance(message, Mapping) for message in given):
                return {"input_ids": _tokens.encode_chat(self.text_tokenizer, given)}
            if not given:
                raise InputError(f"the {name} has no token ids; pass at least one")
            ids = [whole_number(each) for each in given]
            whole = [i for i in ids if i is not None]
            if len(whole) == len(ids):
                self._refuse_unknown(whole)
                return {"input_ids": whole}
            other = type(given[ids.index(None)]).__name__
            raise InputError(
                f"the {name} is a {type(given).__name__} that holds {other}; pass a text, token ids or chat messages"
            )
        raise InputError(f"the {name} is {type(given).__name__}; pass a text, token ids or chat messages")

    def _texts(self, text: Any, pair: Any) -> dict[str, list[int]]:
        return _tokens.encode(self.text_tokenizer, text, pair)

    def _segment(self, name: str, fields: Mapping[str, Sequence[int]]) -> Segment:
        """A segment, when the model can take it."""
        ids = fields["input_ids"]
        size = tasks.first_weight(self.model).shape[0]
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InputError(
                f"the tokenizer makes token id {wrong}, the model's vocabulary ends at {size - 1}; "
                "pass the model's own tokenizer"
            )
        if self.limit is not None and len(ids) > self.limit:
            raise InputError(f"the {name} has {len(ids)} tokens, the model's context is {self.limit}; shorten it")
        others = {
            each: tuple(values)
            for each, values in fields.items()
            if each != "input_ids" and len(values) == len(ids) and tasks.accepts(self.model, each)
        }
        return Segment(name, _tokens.describe(self.text_tokenizer, ids), others)

    def _refuse_unknown(self, ids: Sequence[int]) -> None:
        size = tasks.first_weight(self.model).shape[0]
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the model's vocabulary; pass ids 0 to {size - 1}")

    def _processed(self, given: Mapping[str, Any], name: str) -> tuple[tuple[Segment, ...], dict[str, Tensor]]:
        """What a tokenizer or a processor returned for one input, carried as it is, without the padding."""
        fields = {
            key: _field(key, value)
            for key, value in given.items()
            if value is not None and not key.startswith(NO_INPUT) and key not in DECODERS
            if key in ("input_ids", "attention_mask") or tasks.accepts(self.model, key)
        }
        found: tuple[Segment, ...] = ()
        if "input_ids" in fields:
            ids = _flat(fields["input_ids"])
            if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
                told = _told(fields["input_ids"])
                raise InputError(f"the input_ids are {told}; pass the whole numbers of one input, or of a batch")
            kept = _flat(fields.get("attention_mask", torch.ones_like(ids)))
            if kept.shape != ids.shape:
                raise InputError("the attention_mask and the input_ids differ in shape; pass both as they were made")
            kept = kept.bool()
            inside = kept.nonzero()[:, 0].tolist()
            if not inside or inside != list(range(inside[0], inside[-1] + 1)):
                raise InputError("the attention_mask hides tokens between others; leave these tokens out of the input")
            per_token = {}
            for key in [key for key in fields if key != "attention_mask"]:
                value = _flat(fields[key])
                if value.shape == ids.shape and not value.is_floating_point():
                    per_token[key] = [int(each) for each in value[kept]]
                    del fields[key]
                elif value.ndim <= 1:
                    raise InputError(
                        f"the {key} are {_told(value)} for {len(ids)} tokens; pass one number for each token"
                    )
            fields.pop("attention_mask", None)
            self._refuse_unknown(per_token["input_ids"])
            found = (self._segment(name, per_token),)
        elif "input_ids" in self.task.arguments or not fields:
            wanted = "input_ids" if self.task.segments else tasks.signal_argument(self.model, self.task)
            raise InputError(
                f"the {name} is {type(given).__name__} without {wanted}; pass what the tokenizer returned, or a text"
            )
        return found, {key: _as_batch(key, value) for key, value in fields.items()}

    def _signal(self, given: Any) -> dict[str, Tensor]:
        """An image or a sound, as its processor reads it; a floating-point tensor is what a processor made."""
        argument, is_image = tasks.signal_argument(self.model, self.task), self.task is Task.IMAGE_CLASSIFICATION
        if isinstance(given, Tensor) and given.is_floating_point() and (given.ndim in (3, 4) or not is_image):
            one = given[None] if given.ndim == 3 or not is_image else given
            if len(one) == 1:
                return {argument: one}
        if not is_image:
            raise InputError(
                f"the sound is {type(given).__name__}; pass what the model's processor returned, or {argument} as the "
                "model takes them, a float tensor of one sound"
            )
        if self.tokenizer is None or not (hasattr(given, "ndim") or hasattr(given, "convert")):
            raise InputError(
                f"the image is {type(given).__name__}; pass pixel_values as the model takes them, a float tensor "
                "[channels, rows, columns], or an image together with the model's processor as tokenizer"
            )
        try:
            made = self.tokenizer(images=given, return_tensors="pt")
        except (TypeError, ValueError) as error:
            raise InputError(f"the processor cannot read the image: {error}; pass pixel_values") from error
        return {argument: made[argument]}

    # ---------------------------------------------------------------------- decoder, position

    def _decoder_ids(self, decoder: Any) -> list[int] | None:
        if "decoder" not in self.task.segments:
            if decoder is not None:
                raise InputError(f"{type(self.model).__name__} has no decoder of its own; leave decoder out")
            return None
        if decoder is not None and not isinstance(decoder, str):
            return self._fields(decoder, "decoder")["input_ids"]
        start = next(
            (
                found
                for config in (getattr(self.model, "config", None), getattr(self.model, "generation_config", None))
                for name in ("decoder_start_token_id", "bos_token_id")
                if (found := getattr(config, name, None)) is not None
            ),
            None,
        )
        if start is None:
            raise InputError("the model's config names no decoder_start_token_id; pass decoder ids that begin with one")
        if decoder is None:
            return [start]
        if self.tokenizer is None:
            raise InputError("there is no tokenizer to read the decoder's text with; pass decoder ids")
        try:
            written = self.text_tokenizer(text_target=decoder, add_special_tokens=False, verbose=False)["input_ids"]
        except (TypeError, ValueError) as error:  # half a surrogate pair, for one
            raise InputError(f"the tokenizer cannot read {decoder[:60]!r}; pass whole Unicode characters") from error
        return [start, *written]

    def _position(self, row: Row, position: Any) -> int | None:
        if self.task.reads != "position":
            if position is not None:
                raise InputError(f"the logits of a {self.task.title} belong to the whole input; leave position out")
            return None
        ids = row.segments[-1].tokens.ids
        if position is None and self.task.default is None:
            raise InputError(
                f"a {self.task.title} predicts something for each token; pass position, the token that is meant"
            )
        if position is None and self.task.default == "mask":
            return self._mask_position(ids)
        at = -1 if position is None else whole_number(position)
        if at is None:
            raise InputError(f"the position is {position!r}; pass a whole number for each input")
        if not -len(ids) <= at < len(ids):
            raise InputError(f"position {at} is outside the {len(ids)} tokens; pass {-len(ids)} to {len(ids) - 1}")
        return at % len(ids)

    def _mask_position(self, ids: Sequence[int]) -> int:
        tokenizer = self.text_tokenizer
        mask = None if tokenizer is None else tokenizer.mask_token_id
        found = [i for i, token in enumerate(ids) if token == mask]
        if len(found) != 1:
            shown = "the mask token" if tokenizer is None else repr(tokenizer.mask_token)
            raise InputError(
                f"a masked language model is explained at {shown}, and the input has {len(found)} of it; "
                "put exactly one in the text, or pass position"
            )
        return found[0]


def is_many(inputs: Any) -> bool:
    """Whether the input is several inputs rather than one text, pair of texts, list of ids or chat.

    >>> is_many("a text"), is_many(("a premise", "a hypothesis")), is_many([5, 7])
    (False, False, False)
    >>> is_many(["a text"]), is_many([[5, 7], [5]]), is_many([]), is_many([("one", "two"), ("three", "four")])
    (True, True, True, True)
    >>> is_many([{"role": "user", "content": "hi"}]), is_many({"input_ids": [[5, 7], [5, 2]]})
    (False, True)
    """
    if isinstance(inputs, Mapping):
        return _rows_of(inputs) > 1
    if hasattr(inputs, "ndim"):
        return bool(inputs.ndim in (2, 4) and len(inputs) > 1)  # rows of ids, or images
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
        return False
    if not inputs:
        return True
    first = inputs[0]
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(first, str):
        return False
    if isinstance(first, Mapping):
        return not ("role" in first or "content" in first)
    return not isinstance(first, (bool, float)) and whole_number(first) is None


def spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each of ``count`` inputs: a list of as many, or the same for all.

    Raises:
        InputError: a list of another length.
    """
    if not isinstance(value, (list, tuple)) and getattr(value, "ndim", 0) == 0:
        return [value] * count
    if len(value) != count:
        raise InputError(
            f"{name} is a list of {len(value)} for {count} inputs; pass one for all, or one for each input"
        )
    return list(value)


def _rows_of(batch: Mapping[str, Any]) -> int:
    """How many inputs there are in what a tokenizer or processor returned."""
    name = next((key for key in ("input_ids", *RANKS) if key in batch), None)
    value = None if name is None else batch[name]
    if isinstance(value, (list, tuple)):
        is_batch = bool(value) and (isinstance(value[0], (list, tuple)) or hasattr(value[0], "ndim"))
        is_batch = is_batch and (name == "input_ids" or getattr(value[0], "ndim", 0) == RANKS[str(name)] - 1)
    else:
        is_batch = getattr(value, "ndim", 0) == (2 if name == "input_ids" else RANKS.get(str(name), 0))
    return len(value) if is_batch and value is not None else 1


def _each(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a tokenizer or processor returned for several inputs, each as a batch of one."""
    count = _rows_of(batch)
    if count == 1:
        return [dict(batch)]
    held = {key: value for key, value in batch.items() if value is not None and hasattr(value, "__len__")}
    uneven = next((key for key, value in held.items() if len(value) != count), None)
    if uneven is not None:
        raise InputError(f"{uneven} has {len(held[uneven])} rows for {count} inputs; pass one input at a time")
    return [{key: value[i : i + 1] for key, value in held.items()} for i in range(count)]


def _field(name: str, value: Any) -> Tensor:
    """A field as a tensor, whatever a tokenizer or processor returned: lists, arrays, lists of arrays, tensors."""
    try:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            value = torch.stack(tuple(value))
        return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        told = f"a {type(value).__name__} that is no array of numbers"
        raise InputError(f"the {name} are {told}; pass what the tokenizer returned, or leave them out") from None


def _flat(value: Tensor) -> Tensor:
    """A field of tokens without the dimension of a batch of one."""
    return value[0] if value.ndim == 2 and len(value) == 1 else value


def _as_batch(name: str, value: Tensor) -> Tensor:
    """A field that holds no tokens, as a batch of one if it was not one yet."""
    return value[None] if value.ndim == RANKS.get(name, value.ndim) - 1 else value


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"


def _decoder_of(given: Any, decoder: Any) -> Any:
    """The decoder's text: given beside the input, or in what a tokenizer returned, without its padding."""
    if not isinstance(given, Mapping) or given.get("decoder_input_ids") is None:
        return decoder
    if decoder is not None:
        raise InputError("the decoder's text is given twice, as decoder_input_ids and as decoder; pass one of them")
    ids = _flat(_field("decoder_input_ids", given["decoder_input_ids"]))
    mask = given.get("decoder_attention_mask")
    kept = torch.ones_like(ids) if mask is None else _flat(_field("decoder_attention_mask", mask))
    if ids.ndim != 1 or kept.shape != ids.shape or ids.is_floating_point():
        raise InputError(f"the decoder_input_ids are {_told(ids)}; pass those of one input, with their mask")
    return ids[kept.bool()].tolist()


def _choices(given: Any) -> tuple[str, Sequence[str]]:
    """The text and the choices of a multiple choice question."""
    if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], (tuple, list)):
        text, choices = given
        if isinstance(text, str) and len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
            return text, choices
    raise InputError("a multiple choice model takes a text and at least two choices; pass (text, [choice, choice])")
