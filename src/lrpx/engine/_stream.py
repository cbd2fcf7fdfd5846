"""The residual stream: what each layer writes into it, and what that is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(eq=False)
class Attention:
    """One call of softmax attention.

    Args:
        path: the module that called it.
        weights: from positions ``[B, I]`` to the rows ``[B, H, I, T]`` of the attention weights there.
        values: ``[B, G, T, e]``, the values of ``G`` groups of heads.
        output: ``[B, H, T, e]``, what the heads read; until the projection was found.
        projection: ``[H, e, d]``, the output projection of each head.
        beside: where something else than a move or the projection reads what the heads read.
    """

    path: str
    weights: Callable[[Tensor], Tensor]
    values: Tensor
    output: Tensor | None
    projection: Tensor | None = None
    beside: str = ""

    def projected(self) -> Tensor:
        """``[B, T, H, d]``: what each head writes of each token, before its weight."""
        assert self.projection is not None
        values = self.values.to(self.projection.dtype)
        values = values.repeat_interleave(len(self.projection) // values.shape[1], dim=1)
        return torch.einsum("bhte,hed->bthd", values, self.projection)


@dataclass(frozen=True, eq=False)
class Part:
    """One of the summands that a layer writes into the residual stream: ``rows ⊙ fixed(value)``.

    Args:
        kind: ``"attention"``, ``"MLPs"`` or ``"biases"``.
        name: the path of the module or the parameter.
        value: ``[B, T, d]``, or ``[d]`` for a bias; of attention without its bias.
        attention: where it comes from, for the kind of that name.
        rows: ``[B, T, 1]`` factors, such as those of a norm, whose standard deviation is a constant; None for 1.
        fixed: linear functions on the last dimension, the same at all positions.
    """

    kind: str
    name: str
    value: Tensor
    attention: Attention | None = None
    rows: Tensor | None = None
    fixed: tuple[Callable[[Tensor], Tensor], ...] = ()

    def written(self) -> Tensor:
        """``[B, T, d]``, or ``[d]``: what reaches the stream."""
        value = self.through(self.value)
        return value if self.rows is None else value * self.rows

    def through(self, value: Tensor) -> Tensor:
        """The functions that are the same at all positions."""
        for function in self.fixed:
            value = function(value)
        return value

    def scaled(self, rows: Tensor | None, fixed: tuple[Callable[[Tensor], Tensor], ...]) -> Part:
        """The same with more factors and functions after it."""
        if rows is not None and self.rows is not None:
            rows = rows * self.rows
        return replace(self, rows=self.rows if rows is None else rows, fixed=(*self.fixed, *fixed))


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm on the stream itself, linear with its standard deviation held constant."""

    rows: Tensor
    fixed: tuple[Callable[[Tensor], Tensor], ...]
    output: Tensor

    def __call__(self, value: Tensor) -> Tensor:
        """The linear part at ``[B, T, d]``."""
        for function in self.fixed:
            value = function(value)
        return value * self.rows


@dataclass(eq=False)
class Write:
    """A sum of the residual stream and what a layer adds to it.

    Args:
        layer: the path of the layer.
        parts: what is added.
        leaf: their sum, a leaf of the graph.
        stream: ``[B, T, d]``, what they are added to.
        carried_on: whether another sum takes the result up as it is.
        norm: the norm that the result passes before anything else in the layer, in a post-norm model.
        read: whether something that is no sum has been given the result.
        joins: whether ``stream`` is the sum before it in the layer, which nothing has read: both are one, as a parallel
            block's ``x + attention + MLP``.
    """

    layer: str
    parts: tuple[Part, ...]
    leaf: Tensor
    stream: Tensor
    carried_on: bool = False
    norm: Norm | None = None
    read: bool = False
    joins: bool = False

    @property
    def reads(self) -> list[Part]:
        """The parts that are attention's."""
        return [part for part in self.parts if part.attention is not None]
