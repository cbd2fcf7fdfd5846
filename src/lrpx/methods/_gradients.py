"""The gradient baselines: no rules, and what is made of the gradient at the embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrpx import recipes
from lrpx.methods._backward import Backward
from lrpx.methods._contract import register

if TYPE_CHECKING:
    from torch import Tensor


def l1(_: Tensor, gradient: Tensor) -> Tensor:
    """``‖∂x‖₁`` (Arras 2025, §2.4)."""
    return gradient.abs().sum(-1)


def squared_l2(_: Tensor, gradient: Tensor) -> Tensor:
    """``‖∂x‖₂²`` (Arras 2025, §2.4)."""
    return gradient.square().sum(-1)


register(Backward("gradient-x-input", recipes.GRADIENT, label="Gradient×Input"))
register(Backward("gradient-l1", recipes.GRADIENT, l1, label="Gradient (L1)"))
register(Backward("gradient-l2-squared", recipes.GRADIENT, squared_l2, label="Gradient (L2²)"))
