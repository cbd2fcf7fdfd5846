"""A place that is written or kept: of which feature, row and token its numbers are, and what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lrpx.errors import InputError, MethodError, TraceError
from lrpx.interventions._changes import Change, Patch, Scale, described, in_ranges, is_of_features, needs_positions
from lrpx.units._across import across

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lrpx.interventions._where import Where


class Site:
    """One place that is written or kept.

    Args:
        where: the place.
        edits: the changes there, in order.
        keep: what is given the value, if anything.
        row: of the batch, which alone is changed; None for all.
    """

    def __init__(
        self,
        where: Where,
        edits: list[tuple[tuple[int, ...] | None, Change]],
        keep: Callable[[Tensor], None] | None = None,
        row: int | None = None,
    ) -> None:
        self.where = where
        self.edits = edits
        self.keep = keep
        self.row = row
        self.reached = False
        self.waiting = {p for _, change in edits for p in getattr(change, "positions", None) or ()}
        self.needs_positions = any(needs_positions(change) for _, change in edits)
        # whether it matters which number is of which feature, and of which token
        self.asks = keep is not None or self.needs_positions or any(is_of_features(*edit) for edit in edits)

    def value(self, value: Tensor, positions: Tensor | None) -> Tensor | None:
        """What stands in the place of a value, or None.

        Args:
            value: what is there.
            positions: ``[B, W]``, where its tokens are in their texts, -1 for padding; None where nobody knows.
        """
        self.reached = True
        if value.is_nested and (self.asks or not all(isinstance(change, Scale) for _, change in self.edits)):
            raise TraceError(
                f"the {self.where.side} of {self.where.name} is a nested tensor, as torch's TransformerEncoder makes "
                "of texts with padding without a gradient; make it with enable_nested_tensor=False, or leave "
                "torch.no_grad out"
            )
        if not self.asks:
            return self._edited(value, None)
        dim = self._across(value, positions)
        value = value if dim == -1 else value.movedim(dim, -1)
        if self.keep is not None:
            self.keep(self._rows_first(value, positions))
        if not self.edits:
            return None
        at = self._positions(value, positions) if self.needs_positions else None
        after = self._edited(value, at)
        return after if dim == -1 else after.movedim(-1, dim)

    def _across(self, value: Tensor, positions: Tensor | None) -> int:
        """The dimension along which the features lie.

        Raises:
            TraceError: nobody knows.
        """
        place = self.where.place
        is_known = place is not None and place.kind != "residual"
        dim = -1 if is_known else across(self.where.holders, value, positions)
        if dim is None:
            raise TraceError(
                f"nobody knows which dimension of the {self.where.side} of {self.where.name}, {list(value.shape)}, has "
                "its features; name a convolution or a linear layer in it, change all numbers alike, or, where it has "
                "as many places as features, pass an input of another size"
            )
        return dim

    def told(self) -> Iterator[str]:
        """What is changed, as results have it."""
        for columns, change in self.edits:
            which = "" if columns is None else f"[{in_ranges(columns)}]"
            yield f"{self.where.side} of {self.where.name}{which} by {described(change)}"

    def write(self, row: int, value: Tensor, positions: Tensor) -> None:
        """Change one row of a value in place, where there is no graph.

        Raises:
            TraceError: nobody knows which of its numbers are the row's, or at which tokens they stand.
        """
        self.reached = True
        dim = self._across(value, positions) if self.asks else -1
        with torch._C.DisableTorchFunction():  # no rule is asked for
            by_row = self._by_row(value.movedim(dim, -1), positions)
            if by_row is None:
                raise TraceError(
                    f"nobody knows which numbers of the {self.where.side} of {self.where.name}, {list(value.shape)}, "
                    f"are of which of {len(positions)} runs; use lrpx.intervene, one run after another"
                )
            at = positions[row].to(value.device)
            if self.needs_positions and (by_row.shape[1:-1] != at.shape or self.where.apart == len(at)):
                raise self._not_at_tokens(value)
            by_row[row] = self._edited(by_row[row], at)

    def _by_row(self, value: Tensor, positions: Tensor) -> Tensor | None:
        """``[B, …, n]``, a view of a value ``[…, n]``; None where nobody knows which is of which row."""
        rows, wide = positions.shape
        if value.ndim == 2 and len(value) == rows * wide and not self.where.turned:
            return value.view(rows, wide, -1)
        if len(value) == rows:  # which are never as many as the tokens
            return value
        return value.transpose(0, 1) if value.ndim > 2 and value.shape[:2] == (wide, rows) else None

    def _edited(self, value: Tensor, at: Tensor | None) -> Tensor:
        for columns, change in self.edits:
            value = self._changed(value, at, columns, change)
        return value

    def _changed(self, value: Tensor, at: Tensor | None, columns: tuple[int, ...] | None, change: Change) -> Tensor:
        chosen = None if columns is None else torch.tensor(columns, device=value.device)
        if columns is not None and max(columns) >= value.shape[-1]:
            raise MethodError(
                f"the {self.where.side} of {self.where.name} has {value.shape[-1]} features; {max(columns)} is none of "
                "them, count from 0"
            )
        if isinstance(change, Patch) and change.values.shape[-1] != value.shape[-1]:
            raise InputError(
                f"the values of Patch have {change.values.shape[-1]} features, the place has {value.shape[-1]}; pass "
                "those that lrpx.interventions.record gave for it"
            )
        before = value if chosen is None else value.index_select(-1, chosen)
        width = getattr(change, "value", getattr(change, "amount", None))
        if isinstance(width, Tensor) and len(width) != before.shape[-1]:
            raise InputError(
                f"the vector has {len(width)} features, the unit of {self.where.name} has {before.shape[-1]}; pass as "
                "many"
            )
        after = change.of(before, at, chosen)
        positions = getattr(change, "positions", None)
        if positions is not None:
            assert at is not None
            mask = torch.isin(at, torch.tensor(list(positions), device=at.device))
            self.waiting -= set(at[mask].tolist())
            after = torch.where(mask[..., None], after, before)
        return after if chosen is None else value.index_copy(-1, chosen, after)

    def _rows_first(self, value: Tensor, at: Tensor | None) -> Tensor:
        """A value ``[B, W, n]`` or ``[B·W, n]``, also where the model has the tokens first."""
        if not self._is_turned(value, at):
            return value
        if value.ndim == 2 and at is not None and len(value) == at.numel():
            return value.view(*at.T.shape, -1).transpose(0, 1).flatten(0, 1)
        return value.transpose(0, 1) if value.ndim == 3 else value

    def _is_turned(self, value: Tensor, at: Tensor | None) -> bool:
        """Whether the tokens of a value ``[B, W, n]`` or ``[W, B, n]`` come before the rows.

        Raises:
            TraceError: nobody knows, and there are as many rows as tokens.
        """
        if self.where.turned is not None or at is None or value.ndim != 3:
            return bool(self.where.turned)
        rows, wide = at.shape
        if value.shape[:2] == at.shape == (wide, rows) and rows > 1:
            raise TraceError(
                f"nobody knows whether the {self.where.side} of {self.where.name}, {list(value.shape)}, has the tokens "
                "or the rows first, for there are as many; call the model with more rows or fewer"
            )
        return value.shape[:2] == (wide, rows) != at.shape

    def _positions(self, value: Tensor, at: Tensor | None) -> Tensor:
        """``[...]``: the position of each vector of a value ``[..., n]``.

        Raises:
            TraceError: they are not known.
        """
        before = value.shape[:-1]
        if at is not None and self.where.apart != at.shape[1]:
            at = at.to(value.device)
            first, last = (at.T, at) if self._is_turned(value, at) else (at, at.T)  # it may have as many rows as tokens
            for each in (first, first.flatten(), last, at[:, None]):
                if each.shape == before:
                    return each
            if len(at) == 1 and before[1:] == at.shape[1:]:
                return at.expand(before)
        raise self._not_at_tokens(value)

    def _not_at_tokens(self, value: Tensor) -> TraceError:
        return TraceError(
            f"nobody knows at which tokens the {self.where.side} of {self.where.name}, {list(value.shape)}, stands, as "
            "where it is made of an image, the model was not called itself, padding before a text is in no "
            "attention_mask, position_ids begin anew inside a row, or its cache does not count its tokens; leave the "
            "positions or the cache out (use_cache=False); or, where all that its modules keep of a call are tables, "
            "call it once before the block"
        )
