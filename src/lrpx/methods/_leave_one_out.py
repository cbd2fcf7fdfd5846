"""Leave-one-out: what the value loses when a token is hidden from all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from lrpx.errors import MethodError
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import SERVED, refuse_count, refuse_ledger, refuse_twice_given
from lrpx.perturbations import Perturbation

if TYPE_CHECKING:
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.tasks import Task


@register
@dataclass(frozen=True)
class LeaveOneOut(Method):
    """``f(x) − f(x without token i)`` for every token ``i`` (You et al. 2025, §2).

    A token is left out by the attention mask: it keeps its place, and no other token sees it. What the explained
    position holds itself is still there when its own token is left out, and where it could see nothing else, it sees
    itself alone. (Where a model counts ALiBi's distances from the mask, as BLOOM does, they are those of the text
    without the token; where its mask hides rows too, as DeBERTa's does, the token sees nothing either; and where the
    embeddings are multiplied by the mask, as ESM's are, what the explained position holds itself goes, too.) Of an
    encoder and a decoder the encoder's tokens are left out; a decoder's have 0. The differences are in the units of the
    explained value, and need not sum to it.

    Args:
        name: how results call it.
        batch_size: the most changed inputs that run together.
        label: how tables spell it.
    """

    name: str = "leave-one-out"
    batch_size: int = 32
    label: str = "Leave-one-out"

    tasks: ClassVar[frozenset[Task]] = SERVED
    needs: ClassVar[frozenset[str]] = frozenset({"attention_mask"})

    @property
    def has_ledger(self) -> bool:
        """No: differences need not sum to the value."""
        return False

    def describe(self) -> str:
        """How a token is left out."""
        return "f(x) − f(x without i), by the attention mask"

    def check(self, model: BoundModel) -> None:
        """Refuse an encoder-decoder that is given one text twice; see :meth:`Method.check`."""
        super().check(model)
        refuse_twice_given(self, model)

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger is asked for, which differences have none of, or a text has nothing but one token.
        """
        self.check(model)
        refuse_count(self.name, "batch_size", self.batch_size)
        refuse_ledger(self, ledger)
        answers = model.ask(questions)
        resolved = questions.with_targets(answers.targets)
        hiding, which, masks = Perturbation(specials=True), [], []
        for i, question in enumerate(resolved.asked):
            row = resolved.row_of(i)
            for hidden in np.eye(row.lengths[0], dtype=bool):
                mask = hiding.mask(model, row, question, hidden)
                if not mask.any():
                    raise MethodError(f"{self.name} leaves nothing of a text of one token; use attnlrp{row.where}")
                which.append(i)
                masks.append(mask)
        without = model.values(resolved.alone(which), attention_mask=masks, batch_size=self.batch_size)
        found = []
        for i, value in enumerate(answers.values):
            first, *others = resolved.row_of(i).lengths
            lost, without = value - without[:first], without[first:]
            found.append(torch.cat([lost, lost.new_zeros(sum(others))]))
        return Found(answers, tuple(found))
