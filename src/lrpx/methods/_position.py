"""A fixed ramp: the row of a table that says what the order of tokens alone earns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import refuse_ledger

if TYPE_CHECKING:
    from lrpx.model import BoundModel
    from lrpx.questions import Questions


@register
@dataclass(frozen=True)
class Position(Method):
    """``(i + 1) / T`` for token ``i`` of ``T``, counted from 0 over all segments: the later, the more relevant.

    It looks neither at the model nor at the tokens.

    Args:
        name: how results call it.
        label: how tables spell it.
    """

    name: str = "position"
    label: str = "Position"

    @property
    def has_ledger(self) -> bool:
        """No."""
        return False

    def describe(self) -> str:
        """The formula."""
        return "(i + 1) / T"

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`."""
        self.check(model)
        refuse_ledger(self, ledger)
        answers = model.ask(questions)
        counts = [sum(questions.row_of(i).lengths) for i in range(len(questions))]
        return Found(answers, tuple(torch.arange(1, count + 1, dtype=torch.float64) / count for count in counts))
