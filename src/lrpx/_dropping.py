"""Tokens that a mask hides need not be computed: nothing of them reaches what is read, so a row may be run without
them, where the others keep their positions.

Whether that holds for a model is tried on the model, never taken for granted (:func:`proven`): one that counts
distances from tokens' places in the row (T5, sliding windows, convolutions) says something else of a shorter row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from lrpx.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lrpx.questions import Questions
    from lrpx.tasks import Task

    Run = Callable[[Questions, Sequence[Tensor], bool, int], Tensor]

FIELDS: Final = frozenset({"token_type_ids", "position_ids"})
"""What a tokenizer may say of each token that means the same in a shorter row."""
WORTH: Final = 32
"""So many times the longest row must be hidden, for the trial costs about a third of that;"""
SHARE: Final = 1 / 8
"""and this part of all tokens."""
_APART: Final = 3
"""Of so many tokens one is hidden to see whether others see it."""
_NOISE: Final = 4
"""So many times what another batch or padding rounds away the values of shorter rows may differ;"""
_ROUNDING: Final = 64
"""or so many times the precision, at the largest logit, for two classes tell little of the rounding;"""
_POWER: Final = 1e-4
"""but by no more than this part of what hiding changes, or :data:`_COARSE` times the precision where that is more."""
_COARSE: Final = 8


def told_apart(
    questions: Questions, looks_back: bool, spare: Sequence[int], pad_id: int | None
) -> list[tuple[Questions, list[Tensor], list[int]]]:
    """What tells whether hidden tokens are seen: a text twice, the second time with other tokens in a third of the
    places between its ends that are not read, the first and the last of them among these (at an end, where it has no
    others); masks that hide these places from both; and the places. And the same with all of these places, for a
    convolution at the very end looks at some from one token alone. None where no text has such a place. (One place
    alone would tell little of a long text, of which far tokens say next to nothing.)

    Args:
        questions: about texts.
        looks_back: whether what is read at a place hangs on those before it alone, as the hidden ones are then.
        spare: two tokens, of which one stands there where the text itself has no other.
        pad_id: the padding, before which a classifier may read the last token.
    """
    for asked in questions.asked:
        row = questions.rows[asked.row]
        first, *others = row.segments
        tokens = first.tokens
        last = max((i for i, each in enumerate(tokens.ids) if each != pad_id), default=None)
        read = last if asked.position is None else None if others else asked.position
        end = read if looks_back and read is not None else len(first) - 1
        inner = [i for i in range(1, end) if not tokens.special[i] and i != read]
        if not inner and asked.position is not None and not others:
            inner = [i for i in sorted({0, end}) if not tokens.special[i] and i != read]
        if inner and not row.arguments:
            known = (*(tokens.ids[i] for i in inner), *spare)
            found = []
            for places in (sorted({inner[0], *inner[len(inner) // 2 % _APART :: _APART], inner[-1]}), inner):
                ids = list(tokens.ids)
                mask = torch.ones(len(first), dtype=torch.int64)
                for place in places:
                    ids[place] = next(each for each in known if each != tokens.ids[place])
                    mask[place] = 0
                changed = replace(first, tokens=replace(tokens, ids=tuple(ids)))
                rows = row, replace(row, segments=(changed, *others))
                pair = replace(questions, rows=rows, asked=(replace(asked, row=0), replace(asked, row=1)))
                found.append((pair, [mask] * 2, places))
            return found
    return []


def with_another_end(questions: Questions, spare: Sequence[int]) -> tuple[Questions, list[Tensor]] | None:
    """What tells whether a model still reads the last token where one before it is hidden: a text twice, the second
    time with another last token, both of them whole; and both again with a token hidden between their ends. None where
    no text has three tokens.

    Args:
        questions: about texts, each as a whole.
        spare: two tokens, of which one is the other last.
    """
    for asked in questions.asked:
        row = questions.rows[asked.row]
        (first, *others) = row.segments
        tokens, count = first.tokens, len(first)
        if others or row.arguments or count < 3:
            continue
        other = next(each for each in spare if each != tokens.ids[-1])
        changed = replace(first, tokens=replace(tokens, ids=(*tokens.ids[:-1], other)))
        rows = (row, replace(row, segments=(changed,))) * 2
        whole = torch.ones(count, dtype=torch.int64)
        hidden = whole.clone()
        hidden[count // 2] = 0
        return replace(questions, rows=rows, asked=tuple(replace(asked, row=i) for i in range(4))), [
            whole, whole, hidden, hidden
        ]  # fmt: skip
    return None


def worth(masks: Sequence[Tensor]) -> bool:
    """Whether enough is hidden for shorter rows to pay.

    Args:
        masks: for each row ``[T]``, 0 at hidden tokens.
    """
    total = sum(len(mask) for mask in masks)
    hidden = total - sum(int(mask.count_nonzero()) for mask in masks)
    return hidden >= max(WORTH * max(len(mask) for mask in masks), SHARE * total)


def can_drop(questions: Questions, task: Task, pad_id: int | None) -> bool:
    """Whether it is known which tokens of these rows are read: one at a position, or the first and the last by a
    classifier, which must not find others by the padding among the ids."""
    if task.reads not in ("position", "whole"):
        return False
    for row in questions.rows:
        if row.arguments or len(row.segments) != 1 or not FIELDS.issuperset(row.segments[0].fields):
            return False
        if task.reads == "whole" and pad_id in row.tokens.ids:
            return False
    return True


def can_tell(dtype: torch.dtype) -> bool:
    """Whether numbers of this kind are exact enough to tell two texts apart, as those of eight bits are not."""
    return dtype.is_floating_point and torch.finfo(dtype).eps <= torch.finfo(torch.bfloat16).eps


def without_hidden(questions: Questions, masks: Sequence[Tensor], first: int) -> tuple[Questions, list[Tensor]]:
    """The rows without hidden tokens, but for the first, the last and those that are read: what stands there is
    computed, and the mask still hides it from all others.

    Args:
        questions: rows of one segment.
        masks: for each row ``[T]``, 0 at hidden tokens.
        first: the model's position of a row's first token.

    Returns:
        The questions about the shorter rows, whose tokens have ``position_ids``; and the rows' masks.
    """
    keeps = [mask != 0 for mask in masks]
    for asked in questions.asked:
        keep = keeps[asked.row]
        keep[0] = keep[-1] = True
        if asked.position is not None:
            keep[asked.position] = True
    rows = []
    for row, keep in zip(questions.rows, keeps, strict=True):
        (segment,) = row.segments
        if "position_ids" not in segment.fields:
            counted = tuple(range(first, first + len(segment)))
            segment = replace(segment, fields={**segment.fields, "position_ids": counted})
        rows.append(replace(row, segments=(segment.only(keep.nonzero()[:, 0].tolist()),)))
    moved = [
        asked if asked.position is None else replace(asked, position=int(keeps[asked.row][: asked.position].sum()))
        for asked in questions.asked
    ]
    shorter = replace(questions, rows=tuple(rows), asked=tuple(moved))
    return shorter, [mask[keep] for mask, keep in zip(masks, keeps, strict=True)]


def proven(run: Run, questions: Questions, first: int, eps: float) -> bool:
    """Whether the model says the same of shorter rows, tried where it would differ most if places counted: with every
    other token hidden, one half or the other, all between the ends, and one alone.

    Args:
        run: from questions, their rows' masks, whether rows are run without padding and how many at once to the logits
            ``[K, V]``.
        questions: one, about a row as long as there is any.
        first: the model's position of a row's first token.
        eps: the model's precision.
    """
    places = torch.arange(sum(questions.rows[0].lengths))
    end, middle = len(places) - 1, len(places) // 2
    seen = [places % 2 == 0, places >= middle, places < middle, (places < 2) | (places > end - 2), places != middle]
    masks = [each.to(torch.int64) for each in seen]
    masked = questions.alone([0] * len(masks))
    shorter, left = without_hidden(masked, masks, first)
    few = range(2)  # alone, where some kernels read a gap between positions as the end of a text
    try:
        wanted, alone = run(masked, masks, True, len(masks)), run(masked.alone(few), masks[:2], True, 1)
        found, single = run(shorter, left, False, len(masks)), run(shorter.alone(few), left[:2], False, 1)
    except (ValueError, TypeError, RuntimeError, IndexError, NonFiniteError):
        return False  # the model takes no such positions, or hides no such tokens
    lost = max(_distance(wanted[:2], alone), _distance(found[:2], single))
    differs = max(_distance(found, wanted), _distance(single, wanted[:2]))
    changed = _distance(wanted, wanted.mean(0))
    rounding = max(_NOISE * lost, _ROUNDING * eps * float(wanted.abs().max()))
    return differs <= min(rounding, max(_POWER, _COARSE * eps) * changed)


def _distance(some: Tensor, others: Tensor) -> float:
    return float((some - others).abs().max())
