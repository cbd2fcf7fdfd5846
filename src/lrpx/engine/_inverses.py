"""The inverse of a triangular matrix that a model writes row after row, as a gated delta rule has it without a solver.

``A[..., i, :i] += (A[..., i, :i, None] * A[..., :i, :i]).sum(-2)`` for each row makes ``(1 − A)⁻¹ − 1`` of a strictly
lower ``A``. What that, with the identity added, is multiplied with is what is solved for, and has the rule of a
triangular solve: by the products it is made of it would hang on how long the chunks are, and give half to the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.engine._nodes import kind
from lrpx.engine._tensors import carries

if TYPE_CHECKING:
    from lrpx.engine._run import Run

SYSTEM = "lrpx system"
"""What a node of the graph that has written such a row is marked with: the matrix before the first of them."""


def before_a_row(x: Any, at: Any) -> Tensor | None:
    """The matrix before its first row was written, if ``x[at]`` is a row up to the diagonal."""
    if not (type(at) is tuple and len(at) == 3 and at[0] is Ellipsis and type(at[1]) is int and type(at[2]) is slice):
        return None
    if at[2] != slice(at[1]) or type(x) is not Tensor or x.ndim < 2 or x.shape[-1] != x.shape[-2] or not carries(x):
        return None
    if at[1] == 1:
        return x.clone()
    node: Any = x.grad_fn
    found: Tensor | None = node.metadata.get(SYSTEM)
    return found


def written(run: Run, x: Tensor, system: Tensor) -> None:
    """A row of ``x`` was written."""
    node: Any = x.grad_fn
    node.metadata[SYSTEM] = system
    run.has_systems = True


def system_of(x: Tensor) -> Tensor | None:
    """The strictly lower triangular matrix ``A`` of ``x = (1 − A)⁻¹``, where it was written row after row."""
    node: Any = x.grad_fn
    if type(x) is not Tensor or node is None or kind(node) != "Add":
        return None
    made_of = [child for child, _ in node.next_functions if child is not None]
    system: Tensor | None = next((child.metadata[SYSTEM] for child in made_of if SYSTEM in child.metadata), None)
    if system is None:
        return None
    inverse, matrix = x.detach(), system.detach()
    off = inverse - matrix @ inverse - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    size = inverse.abs().amax() * (1 + matrix.abs().amax())
    return system if bool((off.abs() <= torch.finfo(x.dtype).eps ** 0.5 * size).all()) else None
