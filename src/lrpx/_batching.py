"""Rows that run together: which, how wide, and as which arguments of the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx import _tokens, tasks
from lrpx._encoded import RANKS
from lrpx._holding import PLACES, holding
from lrpx._modules import argument_names
from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.nn import Module

    from lrpx.inputs import Row, Segment
    from lrpx.questions import Questions
    from lrpx.tasks import Task

BATCH_COST = 64
"""What running a batch costs besides its tokens, in tokens: a forward pass has its overhead however little is in it."""

TOKENS_PER_ROW = 64
"""For each row a batch may have, the tokens it may have, padding included."""


def batches(rows: Sequence[Row], batch_size: int, border: int | None = None) -> list[list[int]]:
    """Which rows to run together: the indices of each batch, the longest rows first.

    Rows of like length share a batch, so that padding is a small part of it. Of all ways to cut the rows in the order
    of their length, this is the cheapest when a batch costs its tokens, padding included, and ``BATCH_COST`` more. A
    batch has at most ``batch_size`` rows and, unless it is one row alone, ``TOKENS_PER_ROW * batch_size`` tokens: its
    memory is bounded by that or by the longest row. Rows with another number of segments, other fields of their tokens,
    other arguments or another number of ends that the model reads do not share one, and neither do rows on two sides of
    a ``border``, a number of tokens beyond which the model computes otherwise, with all rows of a batch.
    """
    kinds: dict[object, list[int]] = {}
    for i, row in enumerate(rows):
        is_beyond = border is not None and max(row.lengths, default=0) > border
        kinds.setdefault((_kind(row, i), is_beyond), []).append(i)
    return [batch for kind in kinds.values() for batch in _cut(kind, rows, batch_size)]


def _kind(row: Row, number: int) -> object:
    """What rows of a batch have in common."""
    if not row.arguments:
        return row.ends, *(frozenset(segment.fields) for segment in row.segments)
    # an image beside a text has places in it, so only images alone run together
    return number if row.segments else tuple((name, value.shape) for name, value in row.arguments.items())


def _cut(chosen: Sequence[int], rows: Sequence[Row], batch_size: int) -> list[list[int]]:
    order = sorted(chosen, key=lambda i: rows[i].lengths, reverse=True)
    sizes = [rows[i].lengths for i in order]
    costs, cuts = [0], [0]  # of the first rows, as many as the index: the least cost, and where their last batch starts
    for end in range(1, len(order) + 1):
        best = None
        longest = (0,) * len(sizes[0])
        for start in range(end - 1, max(end - batch_size, 0) - 1, -1):
            longest = tuple(map(max, longest, sizes[start]))
            padded = (end - start) * sum(longest)
            if best is not None and padded > TOKENS_PER_ROW * batch_size:
                break
            cost = costs[start] + padded + BATCH_COST
            if best is None or cost < best[0]:
                best = cost, start
        assert best is not None
        costs.append(best[0])
        cuts.append(best[1])
    found = []
    end = len(order)
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


def widths(rows: Sequence[Row], limit: int | None) -> tuple[int, ...]:
    """How many tokens wide to pad each segment: the next length that code is compiled for (16, 24, 32, 48, 64, 96, …),
    but not beyond the model's context."""
    return tuple(_width(max(lengths), limit) for lengths in zip(*(row.lengths for row in rows), strict=True))


def _width(longest: int, limit: int | None) -> int:
    power = 1 << (max(longest, 16) - 1).bit_length()
    width = power * 3 // 4 if 16 < longest <= power * 3 // 4 else power
    return width if limit is None else min(width, limit)


def widened(wide: Sequence[int], taken: set[int], limit: int | None) -> tuple[int, ...]:
    """How wide each argument of a batch is to be so that none is as wide as another is, or as any number that is taken.

    Args:
        wide: how wide they are.
        taken: as many rows as there are, where these may be what tells.
        limit: the most tokens that the model takes, or None for any number.

    Raises:
        InputError: the model has no places for more padding.
    """
    taken, found = set(taken), []
    for each in reversed(wide):  # a decoder's first
        free = next(more for more in count(each) if more not in taken)
        if limit is not None and each <= limit < free:
            raise InputError(
                f"an encoder's tokens, a decoder's or the rows of a batch are {limit} alike, as many as the "
                "model's context, and inside of the model nothing tells them apart; shorten one text, or pass "
                "fewer rows"
            )
        taken.add(free)
        found.append(free)
    return tuple(reversed(found))


@dataclass(frozen=True)
class Batch:
    """``B`` rows as a model takes them.

    Args:
        task: what the model predicts.
        rows: the rows.
        inputs: the model's keyword arguments.
        starts: where each row's tokens begin in each of the arguments that take tokens, ``[B]`` each.
        wide: how many tokens wide the first of these is, padding included.
    """

    task: Task
    rows: tuple[Row, ...]
    inputs: dict[str, Any]
    starts: tuple[Tensor, ...]
    wide: int = 0

    @property
    def handed(self) -> dict[str, Any]:
        """A copy of the inputs, for one call of the model: it may write into what it is given (``pixels.sub_(mean)``),
        which is the user's own, or is given again."""
        return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in self.inputs.items()}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that take tokens."""
        return self.task.arguments if self.task.segments else ()

    @property
    def tokens(self) -> int:
        """How many tokens the rows have in all, padding included."""
        return sum(self.inputs[name].numel() for name in self.arguments)

    @property
    def widths(self) -> tuple[int, ...]:
        """How many tokens wide each of :attr:`arguments` is, padding included."""
        return tuple(self.inputs[name].shape[-1] for name in self.arguments)

    @property
    def real(self) -> Tensor:
        """``[B, W]``: what of the first segments is no padding, whatever masks are changed to."""
        lengths = torch.tensor([row.lengths[0] for row in self.rows])[:, None]
        places = torch.arange(self.wide) - self.starts[0][:, None]
        return (places >= 0) & (places < lengths)

    def of_row(self, row: int, values: Sequence[Tensor]) -> Tensor:
        """``[…, T]``: what belongs to one row's tokens, the segments one after another, without the padding.

        Args:
            row: which of the rows.
            values: for each of the arguments that take tokens ``[B, …, W]``; ``[B, C, …, W]`` where they hold several
                segments each.
        """
        lengths = self.rows[row].lengths
        if self.task.together is not None:
            (only,) = values
            return torch.cat([only[row, i, ..., :length] for i, length in enumerate(lengths)], -1)
        if len(values) == 1:
            start = int(self.starts[0][row])
            return values[0][row, ..., start : start + lengths[0]]
        begins = [int(start[row]) for start in self.starts]
        pairs = zip(values, begins, lengths, strict=True)
        return torch.cat([value[row, ..., start : start + length] for value, start, length in pairs], -1)

    def positions(self, questions: Questions) -> Tensor | None:
        """``[B, n]``: where the logits of each round are read, in the padded rows; None where they have no position.

        Raises:
            InputError: a question's position is none of its row's.
        """
        if self.task.reads != "position":
            return None
        rounds = questions.rounds()
        found = torch.zeros(len(self.rows), len(rounds), dtype=torch.int64)
        for i, chosen in enumerate(rounds):
            for question in chosen:
                asked = questions.asked[question]
                length = self.rows[asked.row].lengths[-1]
                if asked.position is None or not 0 <= asked.position < length:
                    raise InputError(
                        f"a question is read at position {asked.position} of {length} tokens; pass 0 to {length - 1}"
                    )
                found[asked.row, i] = asked.position
        return found + self.starts[-1][:, None]

    def places_held(self, model: Module) -> AbstractContextManager[None]:
        """Where a mask hides tokens, they keep their places: beside an image they are counted otherwise, and a module
        around another may count them by the mask."""
        around = not tasks.is_theirs(model) and PLACES not in argument_names(model.forward)
        held = (self.rows[0].arguments or around) and "input_ids" in self.inputs
        return holding(model, self.handed) if held else nullcontext()

    def changed(
        self, model: Module, argument: str, values: Sequence[Tensor], first: Callable[[], int] | None = None
    ) -> Batch:
        """The same with another ``attention_mask``, where each token keeps its place, or with ``inputs_embeds`` in the
        place of token ids.

        Args:
            model: what will take it.
            argument: one of these two.
            values: for each row ``[T, …]``, of its first segment.
            first: tells what the model calls the first place of a text, if it is to be told the places of tokens.
        """
        inputs = dict(self.inputs)
        ids = inputs["input_ids"]
        padded = values[0].new_zeros(len(values), ids.shape[-1], *values[0].shape[1:])
        for i, value in enumerate(values):
            start = int(self.starts[0][i])
            padded[i, start : start + len(value)] = value
        held = {"position_ids", *self.rows[0].arguments} & set(inputs)
        if argument == "inputs_embeds":
            del inputs["input_ids"]
        elif first is not None and not held and tasks.accepts(model, "position_ids"):
            # counted before the mask changes, from which some models count them; beside an image they are held
            inputs["position_ids"] = tasks.count_positions(self.real.to(torch.int64), first()).to(ids.device)
        kind = inputs[argument].dtype if argument in inputs else padded.dtype
        return replace(self, inputs=inputs | {argument: padded.to(ids.device, kind)})


def batch_of(
    rows: Sequence[Row],
    model: Module,
    task: Task,
    *,
    pad_id: int,
    side: Literal["left", "right"],
    width: Sequence[int] = (),
) -> Batch:
    """Rows as one batch, padded to the longest.

    Args:
        rows: the inputs, of one kind (:func:`batches`).
        model: what will take them.
        task: what it predicts.
        pad_id: the padding token.
        side: where shorter rows are padded; a decoder's are padded on the right.
        width: the least width of each segment.

    Raises:
        InputError: padding on the left would change what the model computes.
    """
    inputs: dict[str, Any] = {}
    starts = []
    arguments = task.arguments if task.segments else ()
    for i, argument in enumerate(arguments):
        each = [row.segments[i] for row in rows] if task.together is None else [s for row in rows for s in row.segments]
        where = side if argument == "input_ids" else "right"
        wide = width[i] if i < len(width) else 0
        ids, mask = _tokens.pad([segment.tokens.ids for segment in each], pad_id, where, wide)
        named: dict[str, Tensor] = {argument: ids}
        if tasks.takes_mask(model, argument):
            named[tasks.MASKS[argument]] = mask
        if argument == "input_ids":
            named |= _fields(each, ids.shape[1], where)
        if where == "left" and not mask.all():
            named.setdefault("position_ids", tasks.position_ids(model, task, mask))
        starts.append(torch.tensor([ids.shape[1] - len(segment) if where == "left" else 0 for segment in each]))
        if task.together == "choices":
            named = {name: value.reshape(len(rows), -1, value.shape[-1]) for name, value in named.items()}
        inputs |= named
    for name in rows[0].arguments:
        values = [row.arguments[name] for row in rows]
        inputs[name] = _as_weights(model, name, values[0] if len(values) == 1 else torch.cat(values))
    if tasks.accepts(model, "use_cache"):
        inputs["use_cache"] = False
    device = tasks.input_device(model)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    wide = inputs[arguments[0]].shape[-1] if arguments else 0
    return Batch(task, tuple(rows), moved, tuple(starts), wide)


def _as_weights(model: Module, name: str, value: Tensor) -> Tensor:
    """An image or a sound in the precision of the model's weights, where they have one: processors know no other than
    float32, and not every model asks."""
    if name not in RANKS or not value.is_floating_point():
        return value
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return value.to(kinds.pop()) if len(kinds) == 1 else value


def _fields(segments: Sequence[Segment], width: int, side: str) -> dict[str, Tensor]:
    """What else the tokenizer says of each token, padded with zeros; zeros for a segment of which it says nothing."""
    found = {}
    for name in dict.fromkeys(name for segment in segments for name in segment.fields):
        padded = torch.zeros(len(segments), width, dtype=torch.int64)
        for i, segment in enumerate(segments):
            start = width - len(segment) if side == "left" else 0
            values = segment.fields.get(name, (0,) * len(segment))
            padded[i, start : start + len(segment)] = torch.tensor(values, dtype=torch.int64)
        found[name] = padded
    return found
