"""KernelSHAP, by Captum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lrpx.methods._contract import register
from lrpx.methods._embedded import Baseline, ByCaptum, Values, seeded
from lrpx.methods._occlusion import features
from lrpx.methods._refusals import refuse_count, refuse_half_default, refuse_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lrpx.model import BoundModel


@register
@dataclass(frozen=True)
class KernelShap(ByCaptum):
    """Shapley values of the tokens by weighted least squares over random sets of them (Lundberg & Lee 2017, Eq. 5, 8).

    Tokens that are not in a set have the baseline in their place. The relevance sums to ``f(x) − f(x₀)`` up to the
    weight of 10⁶ that Captum gives to the full and the empty set.

    Args:
        name: how results call it.
        n_samples: sets, the full and the empty one among them, so at least 2; each is a forward pass. Fewer than there
            are tokens leave the regression undetermined, and scikit-learn then takes the solution of least length.
        baseline: ``"zero"`` embeddings, or those of the ``"pad"``, ``"mask"`` or ``"unk"`` token.
        seed: of the sets, anew for each question.
        batch_size: the most sets that run together.
        label: how tables spell it.
    """

    name: str = "kernel-shap"
    n_samples: int = 256
    baseline: Baseline = "zero"
    seed: int = 0
    batch_size: int = 32
    label: str = "KernelSHAP"

    def describe(self) -> str:
        """The baseline, the samples and the seed."""
        return f"kernel shap; baseline={self.baseline}; n_samples={self.n_samples}; seed={self.seed}"

    def check(self, model: BoundModel) -> None:
        """Refuse fields that are none."""
        super().check(model)
        refuse_half_default(self)
        refuse_count(self.name, "n_samples", self.n_samples, least=2)
        refuse_seed(self.name, self.seed)

    def explain(self, captum: Any, function: Values, inputs: Any, baselines: Any) -> Sequence[Tensor]:
        """See :class:`~lrpx.methods._embedded.ByCaptum`."""
        if sum(each.shape[1] for each in inputs) == 1:  # of one token there are no sets to weigh
            with torch.no_grad():
                return [(function(*inputs) - function(*baselines))[None]]
        with seeded(self.seed, inputs):
            found = captum.KernelShap(function).attribute(
                inputs, baselines, feature_mask=features(inputs), n_samples=self.n_samples,
                perturbations_per_eval=self.batch_size,
            )  # fmt: skip
        return [each[..., 0] for each in found]
