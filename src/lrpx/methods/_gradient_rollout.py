"""Gradient-weighted attention rollout: attention weights times their gradients, layer upon layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lrpx.methods._attention_maps import OfAttention
from lrpx.methods._contract import register
from lrpx.methods._rollout import discarded, refuse_discard

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.methods._attention_maps import Maps
    from lrpx.methods._rollout import Outliers


@register
@dataclass(frozen=True)
class GradientRollout(OfAttention):
    """Relevance by attention weights and their gradients (Chefer et al. 2021a, Eq. 5–10).

    ``Ā = E_h[(∇A ⊙ A)⁺]`` (Eq. 5). Self-attention: ``R += Ā R`` (Eq. 6, 7), from ``R = I``. In an encoder-decoder the
    decoder's tokens ``s`` have relevance of the encoder's tokens ``q``, too: ``R^sq += Ā^ss R^sq`` in their own
    attention, and ``R^sq += (R̄^ss)ᵀ Ā^sq R̄^qq`` in cross-attention (Eq. 10), where ``R̄`` is ``R − I`` with rows that
    sum to 1, and ``I`` again (Eq. 8, 9). The relevance is the row where the explained value is read, without the
    identity (the mean of the rows, where it is read at several positions). It is never negative.

    Args:
        name: how results call it.
        discard: this share of each map ``Ā`` is set to 0 (Gildenblat; Achtibat et al. 2024, A.1.4).
        outliers: the ``"lowest"``, or the ``"highest"``.
        label: how tables spell it.
    """

    name: str = "gradient-rollout"
    discard: float = 0.0
    outliers: Outliers = "lowest"
    label: str = "Gradient rollout"

    def describe(self) -> str:
        """All fields but the names."""
        return f"gradient-weighted attention rollout; discard={self.discard} {self.outliers}"

    def refuse(self) -> None:
        """Refuse fields that are none."""
        refuse_discard(self.name, self.discard, self.outliers)

    def score(self, maps: Maps) -> Tensor:
        """The row of ``R − I`` where the value is read."""
        how: dict[str, Any] = {"dtype": maps.layers[0].weights.dtype, "device": maps.read.device}
        own = [torch.eye(length, **how) for length in maps.lengths]  # R^qq, and R^ss of a decoder
        across = torch.zeros(maps.lengths[-1], maps.lengths[0], **how)
        for each in maps.layers:
            mean = (each.weights * each.gradient).clamp(min=0).mean(0)
            mean = discarded(mean, self.discard, self.outliers)
            if each.kind in ("self", "encoder"):
                own[0] = own[0] + mean @ own[0]
            elif each.kind == "decoder":
                own[1], across = own[1] + mean @ own[1], across + mean @ across
            else:
                across = across + _normalised(own[1]).T @ mean @ _normalised(own[0])
        mixed = own[-1] - torch.eye(maps.lengths[-1], **how)
        rows = mixed if len(own) == 1 else torch.cat([across, mixed], 1)
        return rows[maps.read].mean(0)


def _normalised(relevance: Tensor) -> Tensor:
    """``R̄``: what attention has added, its rows summing to 1 where there is any, and the identity (Eq. 8, 9)."""
    identity = torch.eye(len(relevance), dtype=relevance.dtype, device=relevance.device)
    added = relevance - identity
    total = added.sum(-1, keepdim=True)
    return torch.where(total > 0, added / total, 0.0) + identity
