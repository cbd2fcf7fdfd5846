"""What is padding: in plain token ids, where nobody has said so and the model would read it as text, it is refused; in
an attention mask that hides tokens, these are none."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from lrpx.errors import InputError
from lrpx.targets import whole_number


@dataclass(frozen=True)
class Padding:
    """The padding token of a model, and what else it means.

    Args:
        id: its id; None where there is none.
        text: how the tokenizer writes it; empty where there is no tokenizer.
        starts, starts_decoder, ends: whether a text, or a decoder's, may begin or end with it: GPT-2's users let the
            end of a text be the padding too, and T5's decoder starts with it.
    """

    id: int | None = None
    text: str = ""
    starts: bool = False
    starts_decoder: bool = False
    ends: bool = False

    @classmethod
    def of(cls, tokenizer: Any, config: Any) -> Padding:
        """What a tokenizer says of it, or a model's config where there is no tokenizer."""
        number = whole_number(getattr(config if tokenizer is None else tokenizer, "pad_token_id", None))
        if number is None or number < 0:
            return cls()

        def is_also(*roles: str) -> bool:
            found = [getattr(holder, f"{role}_token_id", None) for holder in (tokenizer, config) for role in roles]
            return any(number in each if isinstance(each, (list, tuple)) else number == each for each in found)

        starts = is_also("bos", "cls", "unk", "eos")
        text = "" if tokenizer is None else f"{tokenizer.pad_token!r}, "
        return cls(number, text, starts, starts or is_also("decoder_start"), is_also("eos", "sep", "unk"))

    def around(self, ids: Sequence[int]) -> tuple[int, int]:
        """How many padding tokens ids begin and end with.

        >>> Padding(0).around([0, 5, 0, 7, 0, 0]), Padding(0).around([0, 0]), Padding().around([0, 5])
        ((1, 2), (2, 0), (0, 0))
        """
        front = sum(1 for _ in takewhile(lambda token: token == self.id, ids))
        return front, sum(1 for _ in takewhile(lambda token: token == self.id, reversed(ids[front:])))

    def refuse(self, ids: Sequence[int], name: str) -> None:
        """Refuse padding around one input.

        One such token alone may be the text's own, where it has another role.

        Raises:
            InputError: there is some.
        """
        front, end = self.around(ids)
        if front > (self.starts_decoder if name == "decoder" else self.starts) or end > self.ends:
            raise self._error(name, front + end)

    def refuse_rows(self, many: Sequence[Any], name: str) -> None:
        """Refuse rows of ids of one length of which some have more padding than others, whatever else it means.

        Raises:
            InputError: there are such; names the first.
        """
        if self.id is None or not all(isinstance(row, Sequence) or getattr(row, "ndim", 0) == 1 for row in many):
            return
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in many]
        if len({len(row) for row in rows}) > 1 or any(whole_number(each) is None for row in rows for each in row):
            return
        found = [self.around(row) for row in rows]
        least = [min(each) for each in zip(*found, strict=True)]
        for i, (front, end) in enumerate(found):
            if front > least[0] or end > least[1]:
                raise InputError(f"{self._error(name, front + end)} (row {i} of the batch)")

    def _error(self, name: str, count: int) -> InputError:
        return InputError(
            f"the {name} begins or ends with {count} padding tokens ({self.text}id {self.id}), which would be "
            "explained as text; pass all that the tokenizer returned, with its attention_mask, or leave the padding out"
        )


_hiding = threading.local()


@contextmanager
def hiding(mask: Tensor, real: Tensor) -> Iterator[None]:
    """Until the block ends, and in this thread, a model runs with an attention mask that hides tokens.

    Args:
        mask: ``[B, W]``, 0 at padding and at hidden tokens.
        real: ``[B, W]``, false at padding alone.
    """
    before, _hiding.now = getattr(_hiding, "now", None), (mask != 0, real.to(mask.device))
    try:
        yield
    finally:
        _hiding.now = before


def without_padding(mask: Tensor) -> Tensor:
    """``[B, W]``: what of an attention mask is no padding, hidden tokens of :func:`hiding` among it."""
    given = mask != 0
    hidden, real = getattr(_hiding, "now", None) or (given, given)
    return real if torch.equal(given, hidden) else given


def end_of(ids: Sequence[int], pad_id: int | None) -> int:
    """Where the last token of a text is that is no padding, which may be what ends texts, too.

    >>> end_of([5, 6, 0], 0), end_of([5, 6, 0], None)
    (1, 2)
    """
    return next((at for at, each in reversed([*enumerate(ids)]) if each != pad_id), 0)
