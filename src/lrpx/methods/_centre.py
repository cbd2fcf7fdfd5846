"""A fixed centred Gaussian: the row of a table that says what looking at the middle of an image alone earns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lrpx import tasks
from lrpx.attribution import axes_of_pixels
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import IMAGES, refuse_ledger, refuse_number
from lrpx.parts import Part

if TYPE_CHECKING:
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.tasks import Task


@register
@dataclass(frozen=True)
class Centre(Method):
    """``exp(−½ ((r − (R−1)/2)² / (σR)² + (c − (C−1)/2)² / (σC)²))`` at the pixel in row ``r`` of ``R`` and column ``c``
    of ``C``, evenly over the channels. It looks neither at the model nor at the pixels.

    Args:
        name: how results call it.
        sigma: the deviation, as a share of the image's height and width.
        label: how tables spell it.
    """

    name: str = "centre"
    sigma: float = 0.25
    label: str = "Centre"

    tasks: ClassVar[frozenset[Task]] = IMAGES

    @property
    def has_ledger(self) -> bool:
        """No."""
        return False

    def describe(self) -> str:
        """The deviation."""
        return f"centred Gaussian; sigma={self.sigma} of the height and the width"

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`."""
        self.check(model)
        refuse_number(self.name, "sigma", self.sigma, 1e-3)
        refuse_ledger(self, ledger)
        answers = model.ask(questions)
        parts = []
        for i in range(len(questions)):
            shape = questions.row_of(i).arguments[tasks.signal_argument(model.module, model.task)].shape[1:]
            *others, height, width = shape  # channels, and of a film frames
            fall = [
                torch.exp(-0.5 * ((torch.arange(n, dtype=torch.float64) - (n - 1) / 2) / (self.sigma * n)) ** 2)
                for n in (height, width)
            ]
            heights = fall[0][:, None] * fall[1] / math.prod(others)
            parts.append(Part("pixels", heights.expand(shape), axes_of_pixels(len(shape))))
        return Found(answers, (torch.empty(0),) * len(parts), {"pixels": tuple(parts)})
