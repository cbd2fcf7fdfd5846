"""What is asked, questions about rows, each read at a position of its row; and what a model answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from lrpx.inputs import Row
    from lrpx.targets import Target

__all__ = ["Answers", "Question", "Questions"]


@dataclass(frozen=True)
class Question:
    """One thing to explain.

    Args:
        row: which of the rows it is about, from 0.
        position: where its logits are read: a token of the row's last segment, from 0; None where the logits belong to
            the whole input.
        target: the scalar that is explained, read from these logits.
    """

    row: int
    position: int | None
    target: Target


@dataclass(frozen=True)
class Questions:
    """``K`` questions about ``B`` rows. Several questions about one row share its forward pass.

    Args:
        rows: the inputs.
        asked: the questions.

    Raises:
        InputError: there is no question, or one about a row that there is not.
    """

    rows: tuple[Row, ...]
    asked: tuple[Question, ...]

    def __post_init__(self) -> None:
        if not self.asked:
            raise InputError("there are no questions; ask at least one")
        wrong = next((each.row for each in self.asked if not 0 <= each.row < len(self.rows)), None)
        if wrong is not None:
            raise InputError(f"a question is about row {wrong} of {len(self.rows)}; count rows from 0")

    def __len__(self) -> int:
        return len(self.asked)

    def row_of(self, question: int) -> Row:
        """The row that a question is about."""
        return self.rows[self.asked[question].row]

    def rounds(self) -> list[list[int]]:
        """The questions in as few rounds as there can be with at most one question about each row: as rows are
        independent of each other, one backward pass answers a round.

        Returns:
            The indices of the questions of each round.
        """
        found: list[list[int]] = []
        times = [0] * len(self.rows)
        for i, question in enumerate(self.asked):
            if times[question.row] == len(found):
                found.append([])
            found[times[question.row]].append(i)
            times[question.row] += 1
        return found

    def slots(self, count: int) -> list[int]:
        """Where each question's logits stand in ``[B · n, V]``, for ``n = count`` read from each row: one for each
        round, or one for all."""
        slots = [0] * len(self)
        for i, chosen in enumerate(self.rounds()):
            for question in chosen:
                slots[question] = self.asked[question].row * count + (i if count > 1 else 0)
        return slots

    def alone(self, questions: Iterable[int]) -> Questions:
        """Some of the questions, again and again if need be, each about a row of its own."""
        chosen = [self.asked[i] for i in questions]
        rows = tuple(self.rows[each.row] for each in chosen)
        return Questions(rows, tuple(replace(each, row=i) for i, each in enumerate(chosen)))

    def about(self, rows: Sequence[int]) -> Questions:
        """The questions about some rows, with these rows alone."""
        place = {row: i for i, row in enumerate(rows)}
        asked = tuple(replace(each, row=place[each.row]) for each in self.asked if each.row in place)
        return Questions(tuple(self.rows[row] for row in rows), asked)

    def with_targets(self, targets: Sequence[Target]) -> Questions:
        """The same questions with other targets, such as those that a first pass has resolved."""
        pairs = zip(self.asked, targets, strict=True)
        return replace(self, asked=tuple(replace(each, target=target) for each, target in pairs))


@dataclass(frozen=True)
class Answers:
    """What a model says to ``K`` questions.

    Args:
        logits: ``[K, V]``, the row of logits that each question is read from.
        targets: each question's target, with its tokens resolved.
        values: ``[K]``, the explained values.
    """

    logits: Tensor
    targets: tuple[Target, ...]
    values: Tensor

    def detached(self) -> Answers:
        """The same without a graph, on the CPU."""
        return replace(self, logits=self.logits.detach().cpu(), values=self.values.detach().cpu())
