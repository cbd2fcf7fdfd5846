"""Random relevance: the row of a table that says what chance earns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lrpx import tasks
from lrpx.attribution import axes_of_pixels
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import IMAGES, refuse_ledger, refuse_seed
from lrpx.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.tasks import Task


@register
@dataclass(frozen=True)
class Random(Method):
    """Uniform in [−1, 1) (Arras et al. 2025, §3.4; Achtibat et al. 2024, Table 1).

    The numbers depend on the seed and on the tokens alone, so that a text has the same in a batch as alone; those of an
    image's pixels on the seed and the pixels. The user's random state is not touched.

    Args:
        name: how results call it.
        seed: of the numbers.
        label: how tables spell it.
    """

    name: str = "random"
    seed: int = 0
    label: str = "Random"

    tasks: ClassVar[frozenset[Task]] = Method.tasks | IMAGES

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
        if model.task in IMAGES:
            name = tasks.signal_argument(model.module, model.task)
            pixels = [questions.row_of(i).arguments[name][0].cpu() for i in range(len(questions))]
            digests = [each.to(torch.float32).contiguous().view(torch.uint8).numpy().tobytes() for each in pixels]
            parts = [
                Part("pixels", self._drawn(digest, each.numel()).reshape(each.shape), axes_of_pixels(each.ndim))
                for digest, each in zip(digests, pixels, strict=True)
            ]
            return Found(answers, (torch.empty(0),) * len(parts), {"pixels": tuple(parts)})
        found = []
        for i in range(len(questions)):
            ids = [segment.tokens.ids for segment in questions.row_of(i).segments]
            found.append(self._drawn(f"{ids}".encode(), sum(map(len, ids))))
        return Found(answers, tuple(found))

    def _drawn(self, by: bytes, count: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed} ".encode() + by).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return 2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1
