"""Occlusion, by Captum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lrpx.methods._contract import register
from lrpx.methods._embedded import Baseline, ByCaptum, Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def features(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``[1, T, 1]`` a segment: each token is one feature, numbered over all segments."""
    found, start = [], 0
    for each in inputs:
        count = each.shape[1]
        found.append(torch.arange(start, start + count, device=each.device).reshape(1, -1, 1).expand_as(each))
        start += count
    return tuple(found)


@register
@dataclass(frozen=True)
class Occlusion(ByCaptum):
    """``f(x) − f(x with the baseline in place of token i)`` (Zeiler & Fergus 2014, §3): Captum's FeatureAblation.

    The token keeps its place, and others see the baseline there; leave-one-out hides the token from them.

    Args:
        name: how results call it.
        baseline: ``"zero"`` embeddings, or those of the ``"pad"``, ``"mask"`` or ``"unk"`` token.
        batch_size: the most changed inputs that run together.
        label: how tables spell it.
    """

    name: str = "occlusion"
    baseline: Baseline = "zero"
    batch_size: int = 32
    label: str = "Occlusion"

    def describe(self) -> str:
        """The baseline."""
        return f"f(x) − f(x with the baseline for i); baseline={self.baseline}"

    def explain(self, captum: Any, function: Values, inputs: Any, baselines: Any) -> Sequence[Tensor]:
        """See :class:`~lrpx.methods._embedded.ByCaptum`."""
        found = captum.FeatureAblation(function).attribute(
            inputs, baselines, feature_mask=features(inputs), perturbations_per_eval=self.batch_size
        )
        return [each[..., 0] for each in found]
