"""Random relevance: the row of a table that says what chance earns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import refuse_ledger, refuse_seed

if TYPE_CHECKING:
    from lrpx.model import BoundModel
    from lrpx.questions import Questions


@register
@dataclass(frozen=True)
class Random(Method):
    """Uniform in [−1, 1) (Arras et al. 2025, §3.4; Achtibat et al. 2024, Table 1).

    The numbers depend on the seed and on the tokens alone, so that a text has the same in a batch as alone. The user's
    random state is not touched.

    Args:
        name: how results call it.
        seed: of the numbers.
        label: how tables spell it.
    """

    name: str = "random"
    seed: int = 0
    label: str = "Random"

    @property
    def has_ledger(self) -> bool:
        """No."""
        return False

    def describe(self) -> str:
        """The seed."""
        return f"uniform in [-1, 1); seed={self.seed}"

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`."""
        self.check(model)
        refuse_seed(self.name, self.seed)
        refuse_ledger(self, ledger)
        answers = model.ask(questions)
        found = []
        for i in range(len(questions)):
            ids = [segment.tokens.ids for segment in questions.row_of(i).segments]
            digest = hashlib.sha256(f"{self.seed} {ids}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            count = sum(map(len, ids))
            found.append(2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1)
        return Found(answers, tuple(found))
