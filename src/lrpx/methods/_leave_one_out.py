"""Leave-one-out: what the value loses when a token is hidden from all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lrpx.errors import MethodError
from lrpx.methods._contract import Found, Method, register
from lrpx.tasks import Task

if TYPE_CHECKING:
    from lrpx.model import BoundModel
    from lrpx.questions import Questions


@register
@dataclass(frozen=True)
class LeaveOneOut(Method):
    """``f(x) − f(x without token i)`` for every token ``i`` (You et al. 2025, §2).

    A token is left out by the attention mask: it keeps its place, and no other token sees it. What the explained
    position holds itself is still there when its own token is left out. (Where a model counts ALiBi's distances from
    the mask, as BLOOM does, they are those of the text without the token; and where its mask hides rows too, as
    DeBERTa's does, the token sees nothing either.) The differences are in the units of the explained value, and need
    not sum to it.

    Args:
        name: how results call it.
        batch_size: the most changed inputs that run together.
        label: how tables spell it.
    """

    name: str = "leave-one-out"
    batch_size: int = 32
    label: str = "Leave-one-out"

    tasks: ClassVar[frozenset[Task]] = frozenset(
        {Task.CAUSAL, Task.MASKED, Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING}
    )
    needs: ClassVar[frozenset[str]] = frozenset({"attention_mask"})

    @property
    def has_ledger(self) -> bool:
        """No: differences need not sum to the value."""
        return False

    def describe(self) -> str:
        """How a token is left out."""
        return "f(x) − f(x without i), by the attention mask"

    def check(self, model: BoundModel) -> None:
        """Refuse a decoder that is given the same tokens, where they would still be seen; see :meth:`Method.check`."""
        super().check(model)
        if getattr(model.config, "is_encoder_decoder", False):
            kind = type(model.module).__name__
            raise MethodError(
                f"{self.name} hides tokens from an encoder, and {kind} gives them to a decoder too; use lrp"
            )

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger is asked for, which differences have none of.
        """
        self.check(model)
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise MethodError(f"batch_size is {self.batch_size!r}; pass a whole number, at least 1")
        if ledger:
            raise MethodError("leave-one-out has no ledger, for differences need not sum to the value; use attnlrp")
        answers = model.ask(questions)
        resolved = questions.with_targets(answers.targets)
        lengths = [resolved.row_of(i).lengths[0] for i in range(len(resolved))]
        each = resolved.alone(i for i, length in enumerate(lengths) for _ in range(length))
        masks = [mask for length in lengths for mask in 1 - torch.eye(length, dtype=torch.int64)]
        without = model.values(each, attention_mask=masks, batch_size=self.batch_size)
        pairs = zip(answers.values, torch.split(without, lengths), strict=True)
        return Found(answers, tuple(value - values for value, values in pairs))
