"""Along which dimension the features lie of what a module takes or gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Embedding, GroupNorm, LayerNorm, Linear
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module

WIDTHS = "in_features out_features in_channels out_channels num_features num_channels embedding_dim nf nx".split()
"""What modules call how many features they take or give."""


def across(holders: Sequence[Module], value: Tensor, tokens: Tensor | None) -> int | None:
    """The dimension of a value along which its features lie; None where nobody knows.

    It is the last, but of a convolution ``[B, d, T]`` or ``[B, d, H, W]``, of what normalises its output, and of a
    module that holds such, or is in what does, and gives as many features as one of them along the second dimension
    alone. Elsewhere the second dimension has tokens, however many.

    Args:
        holders: the module that takes or gives the value, and those that it is in, the innermost first.
        value: what stands there.
        tokens: ``[B, T]``: those that the model was given, if it was.
    """
    module = holders[0]
    if isinstance(module, _ConvNd):
        return -1 - len(module.kernel_size)
    if isinstance(module, (_NormBase, GroupNorm)):
        return 1 - value.ndim
    if isinstance(module, (Linear, Embedding)) or type(module) is LayerNorm:  # those made of it may be of maps
        return -1
    if value.ndim < 3:
        return -1
    parts = next((found for each in holders if (found := _parts(each))), [])
    has_maps, only_maps = any(part.of_maps for part in parts), all(part.of_maps for part in parts)
    # angles of tokens, ``[1, T, d]``, are those of all rows
    by_token = tokens is not None and value.shape[:2] in (tokens.shape, tokens.shape[::-1], (1, tokens.shape[1]))
    if by_token and not (has_maps and only_maps):  # a map may be as wide as there are tokens
        return -1
    dims = (1 - value.ndim, -1) if has_maps or _widths(module) else (-1,)
    fitting = [dim for dim in dims if any(value.shape[dim] in part.widths for part in parts)]
    if len(fitting) == 1:
        return fitting[0]
    return None if has_maps or (tokens is None and value.ndim > 3) else -1


class _Part(NamedTuple):
    """A module that says how wide it is, and whether it gives a map."""

    widths: frozenset[int]
    of_maps: bool


def _parts(module: Module) -> list[_Part]:
    """Those in a module, or itself."""
    found = [(_widths(each), isinstance(each, (_ConvNd, _NormBase, GroupNorm))) for each in module.modules()]
    return [_Part(widths, of_maps) for widths, of_maps in found if widths]


def _widths(module: Module) -> frozenset[int]:
    """How many features a module says that it takes and gives."""
    found = {vars(module).get(name) for name in WIDTHS} | {vars(module).get("normalized_shape", (None,))[-1]}
    return frozenset(width for width in found if isinstance(width, int))
