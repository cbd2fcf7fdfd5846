"""GradientSHAP, by Captum."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lrpx.methods._contract import register
from lrpx.methods._embedded import Baseline, ByCaptum, Values, are_settled, deviations, seeded
from lrpx.methods._refusals import refuse_count, refuse_half_default, refuse_number, refuse_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lrpx.model import BoundModel


@register
@dataclass(frozen=True)
class GradientShap(ByCaptum):
    """``Σ_d E[δ ∂f(x₀ + α δ)]``, ``δ = x + ε − x₀``, ``α ~ U(0, 1)``, ``ε ~ N(0, σ²)`` (after Lundberg & Lee 2017).

    With one baseline, as here, it is Integrated Gradients by random points on the path, and noise on the input. Where a
    score's standard error is more than half of the largest score, a warning says so.

    Args:
        name: how results call it.
        n_samples: random points; each is a forward and a backward pass.
        sigma: the deviation of ``ε``, as a share of the range ``max − min`` of the input's embeddings.
        baseline: ``"zero"`` embeddings, or those of the ``"pad"``, ``"mask"`` or ``"unk"`` token.
        seed: of points and noise, anew for each question; a GPU draws other noise than the processor, and so
            does torch with float64 as its default dtype.
        batch_size: the most points that run together.
        label: how tables spell it.
    """

    name: str = "gradient-shap"
    n_samples: int = 50
    sigma: float = 0.0
    baseline: Baseline = "zero"
    seed: int = 0
    batch_size: int = 32
    label: str = "GradientSHAP"

    def describe(self) -> str:
        """The baseline, the samples, the deviation, the seed and what runs together, which the draws depend on."""
        return (
            f"gradient shap; baseline={self.baseline}; n_samples={self.n_samples}; sigma={self.sigma} of the range; "
            f"seed={self.seed}; batch_size={self.batch_size}"
        )

    def check(self, model: BoundModel) -> None:
        """Refuse fields that are none."""
        super().check(model)
        refuse_half_default(self)
        refuse_count(self.name, "n_samples", self.n_samples)
        refuse_number(self.name, "sigma", self.sigma, 0)
        refuse_seed(self.name, self.seed)

    def explain(self, captum: Any, function: Values, inputs: Any, baselines: Any) -> Sequence[Tensor]:
        """See :class:`~lrpx.methods._embedded.ByCaptum`."""
        noise = deviations(self.sigma, inputs)
        drawn: list[list[Tensor]] = []
        with seeded(self.seed, inputs):
            for done in range(0, self.n_samples, self.batch_size):  # Captum would run all points at once
                some = min(self.batch_size, self.n_samples - done)
                points = tuple(each.expand(some, *each.shape[1:]) for each in inputs)  # each with scores of its own
                found = captum.GradientShap(function).attribute(points, baselines, n_samples=1, stdevs=noise)
                drawn.append([each.sum(-1) for each in found])
        scores = [torch.cat(each) for each in zip(*drawn, strict=True)]
        means = [each.mean(0, keepdim=True) for each in scores]
        if not are_settled(torch.cat(scores, 1)):
            warnings.warn(
                f"{self.name} has not converged: the standard error of its scores is more than half of the largest; "
                "pass more n_samples, or another baseline, for under an RMSNorm gradients have no bound near zero",
                stacklevel=2,
            )
        return means
