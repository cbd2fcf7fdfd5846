"""What a user passes, as rows of token ids: texts, ids or chat messages, positions, the decoder's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lrpx import tasks, tokens
from lrpx.errors import InputError
from lrpx.targets import whole_number
from lrpx.tasks import Task
from lrpx.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Row:
    """One input.

    Args:
        tokens: the encoder's (or only) tokens.
        decoder: the decoder's tokens, for an encoder-decoder model.
        position: where the logits are read, from 0; None for a classifier.
        where: what an error about this row adds: nothing, or its number.
    """

    tokens: Tokens
    decoder: Tokens | None
    position: int | None
    where: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """How many tokens the row has, and how many of the decoder."""
        return len(self.tokens.ids), 0 if self.decoder is None else len(self.decoder.ids)

    @property
    def described(self) -> Tokens:
        """The tokens, and the decoder's after them."""
        first, second, offset = self.tokens, self.decoder, len(self.tokens.ids)
        if second is None:
            return first
        return Tokens(
            ids=first.ids + second.ids,
            pieces=first.pieces + second.pieces,
            special=first.special + second.special,
            word_spans=first.word_spans + tuple((a + offset, b + offset) for a, b in second.word_spans),
            word_texts=first.word_texts + second.word_texts,
        )


@dataclass(frozen=True)
class Reader:
    """Reads inputs for one model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    task: Task

    def rows(self, inputs: Sequence[Any], position: Any, decoder: Any) -> list[Row]:
        """A row for each of a list of inputs; positions and decoders are one for all, or a list.

        Raises:
            InputError: see :meth:`row`; the row is named.
        """
        many = list(inputs)
        if not many:
            raise InputError("the list of inputs is empty; pass at least one text")
        positions = spread(position, len(many), "position")
        several = is_many(decoder) or (isinstance(decoder, (list, tuple)) and any(each is None for each in decoder))
        decoders = spread(decoder, len(many), "decoder") if several else [decoder] * len(many)
        rows = zip(many, positions, decoders, strict=True)
        return [self.row(each, at, written, f" (row {i} of the batch)") for i, (each, at, written) in enumerate(rows)]

    def row(self, given: Any, position: Any = None, decoder: Any = None, where: str = "") -> Row:
        """One input as a row.

        Raises:
            InputError: no tokens, too many, ids outside the vocabulary, or a position that is none.
        """
        try:
            ids = self._ids(given, "input")
            written = self._decoder_ids(decoder)
            return Row(
                tokens.describe(self.tokenizer, ids),
                None if written is None else tokens.describe(self.tokenizer, written),
                self._position(ids if written is None else written, position),
                where,
            )
        except InputError as error:
            raise InputError(f"{error}{where}") if where else error from None

    def _ids(self, given: Any, name: str) -> list[int]:
        ids, is_text = self._read(given, name)
        size = self.model.get_input_embeddings().weight.shape[0]
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None and is_text:
            raise InputError(
                f"the tokenizer makes token id {wrong}, the model's vocabulary ends at {size - 1}; "
                "pass the model's own tokenizer"
            )
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the model's vocabulary; pass ids 0 to {size - 1}")
        if self.limit is not None and len(ids) > self.limit:
            raise InputError(f"the {name} has {len(ids)} tokens, the model's context is {self.limit}; shorten it")
        return ids

    @cached_property
    def limit(self) -> int | None:
        """The most tokens that the model takes, or None for any number."""
        return tasks.context_length(self.model)

    def _read(self, given: Any, name: str) -> tuple[list[int], bool]:
        """The ids, and whether the tokenizer made them."""
        if isinstance(given, str):
            return tokens.encode(self.tokenizer, given), True
        if hasattr(given, "ndim"):  # a tensor or an array
            given = given[0] if given.ndim == 2 and len(given) == 1 else given
            if given.ndim != 1:
                raise InputError(
                    f"the {name} has shape {list(given.shape)}; pass the token ids of one text as a flat list"
                )
            given = given.tolist()
        if isinstance(given, Sequence):
            if given and all(isinstance(message, Mapping) for message in given):
                return tokens.encode_chat(self.tokenizer, given), True
            if not given:
                raise InputError(f"the {name} has no token ids; pass at least one")
            ids = [whole_number(each) for each in given]
            whole = [i for i in ids if i is not None]
            if len(whole) == len(ids):
                return whole, False
            other = type(given[ids.index(None)]).__name__
            raise InputError(
                f"the {name} is a {type(given).__name__} that holds {other}; pass a text, token ids or chat messages"
            )
        hint = ' (the "input_ids" in it)' if isinstance(given, Mapping) else ""
        raise InputError(f"the {name} is {type(given).__name__}; pass a text, token ids{hint} or chat messages")

    def _decoder_ids(self, decoder: Any) -> list[int] | None:
        if self.task is not Task.SEQ2SEQ:
            if decoder is not None:
                raise InputError(f"{type(self.model).__name__} has no decoder of its own; leave decoder out")
            return None
        if decoder is not None and not isinstance(decoder, str):
            return self._ids(decoder, "decoder")
        start = next(
            (
                found
                for config in (self.model.config, getattr(self.model, "generation_config", None))
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
        written = self.tokenizer(text_target=decoder, add_special_tokens=False, verbose=False)["input_ids"]
        return self._ids([start, *written], "decoder")

    def _position(self, ids: list[int], position: Any) -> int | None:
        if self.task is Task.CLASSIFICATION:
            if position is not None:
                raise InputError("a classifier's logits belong to the whole text; leave position out")
            return None
        if position is None and self.task is Task.MASKED:
            return self._mask_position(ids)
        at = -1 if position is None else whole_number(position)
        if at is None:
            raise InputError(f"the position is {position!r}; pass a whole number for each input")
        if not -len(ids) <= at < len(ids):
            raise InputError(f"position {at} is outside the {len(ids)} tokens; pass {-len(ids)} to {len(ids) - 1}")
        return at % len(ids)

    def _mask_position(self, ids: list[int]) -> int:
        mask = None if self.tokenizer is None else self.tokenizer.mask_token_id
        found = [i for i, token in enumerate(ids) if token == mask]
        if len(found) != 1:
            shown = "the mask token" if self.tokenizer is None else repr(self.tokenizer.mask_token)
            raise InputError(
                f"a masked language model is explained at {shown}, and the input has {len(found)} of it; "
                "put exactly one in the text, or pass position"
            )
        return found[0]


BATCH_COST = 64
"""What running a batch costs besides its tokens, in tokens: a forward pass has its overhead however little is in it."""

TOKENS_PER_ROW = 64
"""For each row a batch may have, the tokens it may have, padding included."""


def batches(rows: Sequence[Row], batch_size: int) -> list[list[int]]:
    """Which rows to run together: the indices of each batch, the longest rows first.

    Rows of like length share a batch, so that padding is a small part of it. Of all ways to cut the rows in the order
    of their length, this is the cheapest when a batch costs its tokens, padding included, and ``BATCH_COST`` more. A
    batch has at most ``batch_size`` rows and, unless it is one row alone, ``TOKENS_PER_ROW * batch_size`` tokens: its
    memory is bounded by that or by the longest row.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].sizes, reverse=True)
    sizes = [rows[i].sizes for i in order]
    costs, cuts = [0], [0]  # of the first rows, as many as the index: the least cost, and where their last batch starts
    for end in range(1, len(rows) + 1):
        best = None
        longest = longest_decoder = 0
        for start in range(end - 1, max(end - batch_size, 0) - 1, -1):
            longest, longest_decoder = max(longest, sizes[start][0]), max(longest_decoder, sizes[start][1])
            padded = (end - start) * (longest + longest_decoder)
            if best is not None and padded > TOKENS_PER_ROW * batch_size:
                break
            cost = costs[start] + padded + BATCH_COST
            if best is None or cost < best[0]:
                best = cost, start
        assert best is not None
        costs.append(best[0])
        cuts.append(best[1])
    found = []
    end = len(rows)
    while end:
        found.append(order[cuts[end] : end])
        end = cuts[end]
    return found[::-1]


def filled(batch: Sequence[int], batch_size: int) -> list[int]:
    """The rows of a batch, the first again and again up to a size that code is compiled for: 1, 2, 4, 8, …

    >>> filled([5, 4, 9], batch_size=32), filled([5, 4, 9], batch_size=3)
    ([5, 4, 9, 5], [5, 4, 9])
    """
    size = min(1 << (len(batch) - 1).bit_length(), batch_size)
    return [*batch, *[batch[0]] * (size - len(batch))]


def widths(rows: Sequence[Row], limit: int | None) -> tuple[int, int]:
    """How many tokens wide to pad rows, and their decoders: the next length that code is compiled for (16, 24, 32, 48,
    64, 96, …), but not beyond the model's context."""
    return tuple(_width(max(sizes), limit) for sizes in zip(*(row.sizes for row in rows), strict=True))  # type: ignore[return-value]


def _width(longest: int, limit: int | None) -> int:
    power = 1 << (max(longest, 16) - 1).bit_length()
    width = power * 3 // 4 if 16 < longest <= power * 3 // 4 else power
    return width if limit is None else min(width, limit)


def shifts(rows: Sequence[Row], width: int, side: str) -> Tensor:
    """``[B]``: how far padding moved each row to the right."""
    return torch.tensor([width - row.sizes[0] if side == "left" else 0 for row in rows])


def is_many(inputs: Any) -> bool:
    """Whether the input is a list of inputs rather than one text, one list of ids or one chat.

    >>> is_many("a text"), is_many([5, 7]), is_many([{"role": "user", "content": "hi"}])
    (False, False, False)
    >>> is_many(["a text"]), is_many([[5, 7], [5]]), is_many([])
    (True, True, True)
    """
    if hasattr(inputs, "ndim"):
        return bool(inputs.ndim == 2 and len(inputs) > 1)
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        return False
    if not inputs:
        return True
    return not isinstance(inputs[0], (bool, float, Mapping)) and whole_number(inputs[0]) is None


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
