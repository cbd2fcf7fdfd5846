"""Integrated Gradients, by Captum."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lrpx.methods._contract import register
from lrpx.methods._embedded import Baseline, ByCaptum, Values
from lrpx.methods._refusals import IMAGES, SERVED, refuse_count, refuse_half_default

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lrpx.model import BoundModel
    from lrpx.tasks import Task


MISSED = 0.05
"""The largest part of the absolute relevance by which its sum may miss the difference before a warning."""


@register
@dataclass(frozen=True)
class IntegratedGradients(ByCaptum):
    """``Σ_d (x − x₀) ∫ ∂f(x₀ + α(x − x₀)) dα`` (Sundararajan et al. 2017, Eq. 1), by Gauss-Legendre quadrature.

    All tokens, special ones too, go from the baseline to their embeddings together. The relevance sums to
    ``f(x) − f(x₀)``, as far as the steps suffice; where it misses that by more than 5 % of its absolute sum, a warning
    says so. So it is from zero embeddings where the first norm is an RMSNorm: what the model says of ``αx`` changes as
    in a step at ``α = 0``, and no number of points is enough.

    Args:
        name: how results call it.
        steps: points of the quadrature; each is a forward and a backward pass.
        baseline: ``x₀``: ``"zero"`` embeddings, or those of the ``"pad"``, ``"mask"`` or ``"unk"`` token.
        batch_size: the most points that run together.
        label: how tables spell it.
    """

    name: str = "integrated-gradients"
    steps: int = 50
    baseline: Baseline = "zero"
    batch_size: int = 32
    label: str = "Integrated Gradients"

    tasks: ClassVar[frozenset[Task]] = SERVED | IMAGES

    def describe(self) -> str:
        """The baseline and the steps."""
        return f"integrated gradients; baseline={self.baseline}; steps={self.steps} gauss-legendre"

    def check(self, model: BoundModel) -> None:
        """Refuse fields that are none."""
        super().check(model)
        refuse_half_default(self)
        refuse_count(self.name, "steps", self.steps)

    def explain(self, captum: Any, function: Values, inputs: Any, baselines: Any) -> Sequence[Tensor]:
        """See :class:`~lrpx.methods._embedded.ByCaptum`."""
        found, missed = captum.IntegratedGradients(function).attribute(
            inputs, baselines, n_steps=self.steps, method="gausslegendre", internal_batch_size=self.batch_size,
            return_convergence_delta=True,
        )  # fmt: skip
        scores = [each.sum(-1) for each in found]
        if float(missed.abs()) > MISSED * sum(float(each.abs().sum()) for each in scores):
            warnings.warn(
                f"{self.name} has not converged: its scores do not sum to f(x) − f(baseline); pass more steps, or "
                "another baseline, for under an RMSNorm the way from zero begins with a step",
                stacklevel=2,
            )
        return scores
