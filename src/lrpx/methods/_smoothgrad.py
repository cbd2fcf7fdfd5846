"""SmoothGrad, by Captum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from lrpx.methods._contract import register
from lrpx.methods._embedded import Baseline, ByCaptum, Values, deviations, seeded
from lrpx.methods._refusals import (
    IMAGES,
    SERVED,
    refuse_count,
    refuse_half_default,
    refuse_number,
    refuse_other,
    refuse_seed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lrpx.model import BoundModel
    from lrpx.tasks import Task

Score = Literal["x-input", "l1"]


@register
@dataclass(frozen=True)
class SmoothGrad(ByCaptum):
    """The mean of the gradients around the input, ``E[∂f(x + ε)]``, ``ε ~ N(0, σ²)`` (Smilkov et al. 2017, Eq. 1).

    Of the mean gradient a token's relevance is made as of one gradient: ``Σ_d x ⊙ E[∂f]``, or its length. With σ = 0 it
    is Gradient×Input.

    Args:
        name: how results call it.
        n_samples: noisy copies; each is a forward and a backward pass.
        sigma: the deviation, as a share of the range ``max − min`` of the input's embeddings (Smilkov et al., §3.1).
        score: ``"x-input"``: ``Σ_d x ⊙ E[∂f]``, which has a sign; ``"l1"``: ``‖E[∂f]‖₁``.
        seed: of the noise, anew for each question; a GPU draws other noise than the processor, and so
            does torch with float64 as its default dtype.
        batch_size: the most copies that run together.
        label: how tables spell it.
    """

    name: str = "smoothgrad"
    n_samples: int = 20
    sigma: float = 0.05
    score: Score = "x-input"
    seed: int = 0
    batch_size: int = 32
    label: str = "SmoothGrad"

    tasks: ClassVar[frozenset[Task]] = SERVED | IMAGES

    baseline: ClassVar[Baseline] = "zero"  # type: ignore[misc]

    def describe(self) -> str:
        """The deviation, the samples, the seed and what runs together, which the draws depend on."""
        return (
            f"smoothgrad; sigma={self.sigma} of the range; n_samples={self.n_samples}; score={self.score}; "
            f"seed={self.seed}; batch_size={self.batch_size}"
        )

    def check(self, model: BoundModel) -> None:
        """Refuse fields that are none."""
        super().check(model)
        refuse_half_default(self)
        refuse_count(self.name, "n_samples", self.n_samples)
        refuse_number(self.name, "sigma", self.sigma, 0)
        refuse_seed(self.name, self.seed)
        refuse_other(self.name, "score", self.score, get_args(Score))

    def explain(self, captum: Any, function: Values, inputs: Any, baselines: Any) -> Sequence[Tensor]:
        """See :class:`~lrpx.methods._embedded.ByCaptum`."""
        with seeded(self.seed, inputs):
            found = captum.NoiseTunnel(captum.Saliency(function)).attribute(
                inputs, nt_type="smoothgrad", nt_samples=self.n_samples,
                nt_samples_batch_size=min(self.batch_size, self.n_samples),
                stdevs=deviations(self.sigma, inputs), abs=False,
            )  # fmt: skip
        if self.score == "l1":
            return [each.abs().sum(-1) for each in found]
        return [(x * each).sum(-1) for x, each in zip(inputs, found, strict=True)]
