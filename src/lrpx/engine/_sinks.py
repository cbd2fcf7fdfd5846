"""What is kept of positions where they meet what depends on the input: the leaf, and which of its dimensions are whose,
from which the relevance of each place is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from lrpx.engine._book import Line, relevance

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.engine._places import Source


@dataclass(frozen=True, eq=False)
class Sink:
    """A place where positions meet what depends on the input, and the leaf that keeps their relevance.

    Args:
        layer: the path of the layer, or ``"input"``.
        call: which call of the layer, from 0.
        line: what the ledger calls it; None where the ledger has it elsewhere, as what was looked up in a table.
        leaf: the positions as a leaf, one for each row.
        source: the tokens whose positions they are; None where the model has none, as one of images.
        rows: how many rows the leaf's first dimension is, one after another; None where it is no dimension of rows.
        tokens: which dimensions are those of the tokens, counted from the end; none where there is one token.
        heads: which dimension is that of the heads, counted from the end; 0 where the first has them in each row; None
            where there are none, or nobody asked.
        is_of_keys: whether it is added to the scores of attention, for every query the same. Then nothing but the
            differences between keys counts, and the first that is seen is where they are counted from: a model may
            count from the last (MPT), which is another in a padded row.
        is_of_layer: whether it is a factor, or added to scores, which is what layers do; what is added to embeddings is
            not.
        is_behind: whether what it meets was made of other positions of layers, outside of every list of modules.
        ndim: how many dimensions of an image's it meets, where one of several is that of the places, as of rows or of
            columns; else 0.
        of: of which of several inputs of numbers the places are, by the ``id`` of its leaf; None where nothing tells.
    """

    layer: str
    call: int
    line: Line | None
    leaf: Tensor
    source: Source | None
    rows: int | None
    tokens: tuple[int, ...]
    heads: int | None
    is_of_keys: bool = False
    is_of_layer: bool = False
    is_behind: bool = False
    ndim: int = 0
    of: int | None = None

    def rows_of(self, value: Tensor) -> Tensor:
        """``[B, n, d]`` of the leaf, or of its gradient, where it is positions that are added to an image's rows."""
        return value.movedim(self.tokens, tuple(range(1, len(self.tokens) + 1))).flatten(1, len(self.tokens))

    def _of_first_key(self, value: Tensor, gradient: Tensor) -> Tensor:
        """What is added for the first key of each row that any query sees: those before are padding."""
        flat, of = (each.reshape(self.rows or 1, -1, each.shape[-1]) for each in (value, gradient))
        first = (of != 0).any(1).int().argmax(-1)[:, None, None].expand(-1, flat.shape[1], 1)
        return flat.gather(-1, first).reshape(*value.shape[:-1], 1)

    def relevance(self, gradient: Tensor | None) -> Tensor:
        """``[B, H, n]``: the relevance of each place in each row, by heads, which are one where there are none."""
        value = self.leaf.detach()
        gradient = torch.zeros_like(value) if gradient is None else gradient
        if self.is_of_keys:  # unless it is no softmax of these keys alone, as beside an attention sink
            bound = max(1e-5, 8 * torch.finfo(value.dtype).eps) * gradient.abs().sum(-1, keepdim=True)
            is_no_matter = gradient.sum(-1, keepdim=True).abs() <= bound
            value = torch.where(is_no_matter, value - self._of_first_key(value, gradient), value)
        found = relevance(value, gradient)
        if self.leaf.is_complex():  # real and imaginary parts are the last dimension
            found = found.sum(-1)
        found = found if self.rows is not None else found.unsqueeze(0)
        kept = [*([self.heads] if self.heads else []), *self.tokens]
        found = found.movedim(kept, tuple(range(1, len(kept) + 1)))
        if found.ndim > 1 + len(kept):
            found = found.flatten(1 + len(kept)).sum(-1)
        rows = self.rows or 1
        if self.heads == 0:
            found = found.reshape(rows, -1, *found.shape[1:])
        elif self.heads is None:
            found = found.unsqueeze(1)
        found = found.flatten(2) if self.tokens else found.unsqueeze(-1)
        return found.reshape(rows, -1, *found.shape[1:]).sum(1)


class Kept(NamedTuple):
    """What the positions of one layer have.

    Args:
        layer: its path, or ``"input"``.
        source: the tokens whose positions they are; None where the model has none.
        relevance: ``[B, n]``; by heads ``[B, H, n]``.
        heads: how many heads they were met in; None where they were met outside of heads, or it was not asked.
    """

    layer: str
    source: Source | None
    relevance: Tensor
    heads: int | None = None
