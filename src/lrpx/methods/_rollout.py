"""Attention rollout: how much of each token comes from each input token, by attention weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

import torch
from torch import Tensor

from lrpx.errors import MethodError
from lrpx.methods._attention_maps import OfAttention
from lrpx.methods._contract import register
from lrpx.methods._refusals import refuse_number, refuse_other

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.methods._attention_maps import Maps

Fusion = Literal["mean", "max", "min"]
Outliers = Literal["lowest", "highest"]
FUSIONS: Final[dict[str, Callable[..., Tensor]]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}
"""Of several heads ``[H, Q, K]`` one map ``[Q, K]``."""


def discarded(weights: Tensor, share: float, outliers: Outliers) -> Tensor:
    """A map ``[Q, K]`` with the share of its weights that are lowest, or highest, set to 0; what a mask forbids is 0
    already and is not counted. Of ``n`` weights ``⌊share · n⌋`` are discarded; of equal ones, those at the end first
    among the lowest, and at the beginning first among the highest.

    >>> discarded(torch.tensor([[0.2, 0.8], [0.0, 1.0]]), 0.34, "lowest")
    tensor([[0.0000, 0.8000],
            [0.0000, 1.0000]])
    """
    flat = weights.flatten().clone()
    attended = (flat > 0).nonzero()[:, 0]
    count = int(share * len(attended) + 1e-9)  # 0.3 of 10 are 3
    order = flat[attended].argsort(descending=True, stable=True)
    gone = order[len(order) - count :] if outliers == "lowest" else order[:count]
    flat[attended[gone]] = 0.0
    return flat.reshape(weights.shape)


def refuse_discard(name: str, share: float, outliers: str) -> None:
    """Refuse a share of weights that is none.

    Raises:
        MethodError: not from 0 to below 1, or of neither end.
    """
    refuse_number(name, "discard", share, 0, 1)
    if share == 1:
        raise MethodError(f"the discard of {name} is 1, which leaves nothing; pass a number below 1")
    refuse_other(name, "outliers", outliers, get_args(Outliers))


@register
@dataclass(frozen=True)
class Rollout(OfAttention):
    """Attention rollout (Abnar & Zuidema 2020, §3; Achtibat et al. 2024, Eq. 23).

    Of each layer's heads one map ``A`` is made; with the residual stream, ``Â = (A + I) / 2``, its rows summing to 1;
    ``M = Â^L … Â^1``. The relevance is the row of ``M`` where the explained value is read (the mean of the rows, where
    it is read at several positions). In an encoder-decoder, tokens of both are one set, and a decoder's position takes
    half from the residual stream and half from the encoder's outputs in each cross-attention; that is our reading, for
    the paper has none. All relevance is positive, sums to 1, and is the same whatever is explained at a position.

    Args:
        name: how results call it.
        fusion: what is made of the heads: their mean (the paper), maximum or minimum (Gildenblat).
        discard: this share of each map's weights is set to 0, before the residual stream is added.
        outliers: which: the ``"lowest"`` (as Gildenblat's code does), or the ``"highest"`` (as Achtibat et al. 2024,
            A.1.4, tell it).
        label: how tables spell it.
    """

    name: str = "rollout"
    fusion: Fusion = "mean"
    discard: float = 0.0
    outliers: Outliers = "lowest"
    label: str = "Attention rollout"

    def describe(self) -> str:
        """All fields but the names."""
        return f"attention rollout; fusion={self.fusion}; discard={self.discard} {self.outliers}"

    def refuse(self) -> None:
        """Refuse fields that are none."""
        refuse_discard(self.name, self.discard, self.outliers)
        refuse_other(self.name, "fusion", self.fusion, get_args(Fusion))

    def score(self, maps: Maps) -> Tensor:
        """The mean of the rows of the rollout where the value is read."""
        first, count = maps.lengths[0], sum(maps.lengths)
        rollout = torch.eye(count, dtype=maps.layers[0].weights.dtype, device=maps.read.device)
        identity = rollout.clone()
        for each in maps.layers:
            kept = discarded(FUSIONS[self.fusion](each.weights, 0), self.discard, self.outliers)
            queries = slice(0, first) if each.kind in ("self", "encoder") else slice(first, count)
            keys = slice(first, count) if each.kind == "decoder" else slice(0, first)
            mixed = identity.clone()
            mixed[queries, keys] += kept
            mixed[queries] /= mixed[queries].sum(-1, keepdim=True)
            rollout = mixed @ rollout
        offset = 0 if len(maps.lengths) == 1 else first
        return rollout[maps.read + offset].mean(0)
