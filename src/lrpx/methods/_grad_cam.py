"""Grad-CAM on the last attention map.

Captum's has the output of a module for its layer; a fused kernel gives none of attention weights, so this is our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lrpx.methods._attention_maps import OfAttention
from lrpx.methods._contract import register

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.engine._attentions import Kind
    from lrpx.methods._attention_maps import Map, Maps


@register
@dataclass(frozen=True)
class GradCam(OfAttention):
    """Grad-CAM with the heads of the last attention as channels (Selvaraju et al. 2017, Eq. 1, 2; Chefer et al. 2021b).

    In the row ``i`` where the explained value is read, the weight of head ``h`` is the mean of the gradients of its
    attention weights, over the tokens attended to; the relevance of token ``j`` is ``(E_h[w_h · A^h_ij])⁺``. (The mean
    of the rows, where the value is read at several positions.) In an encoder-decoder the encoder's tokens have that of
    the last cross-attention, the decoder's that of its own last attention. It is never negative.

    Args:
        name: how results call it.
        label: how tables spell it.
    """

    name: str = "grad-cam"
    label: str = "Grad-CAM"

    def describe(self) -> str:
        """What it is; there is nothing to choose."""
        return "Grad-CAM of the last attention"

    def score(self, maps: Maps) -> Tensor:
        """The last map of each kind that looks from the last segment."""
        last = {each.kind: each for each in maps.layers}
        kinds: tuple[Kind, ...] = ("self",) if len(maps.lengths) == 1 else ("cross", "decoder")
        return torch.cat([_cam(last[kind], maps.read) for kind in kinds])


def _cam(each: Map, rows: Tensor) -> Tensor:
    weights, gradient = each.weights[:, rows], each.gradient[:, rows]
    attended = weights > 0
    channel = (gradient * attended).sum(-1, keepdim=True) / attended.sum(-1, keepdim=True).clamp(min=1)
    return (channel * weights).mean(0).clamp(min=0).mean(0)
