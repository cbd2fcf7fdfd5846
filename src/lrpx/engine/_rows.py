"""Which dimension is that of a batch's rows: the first, unless the model has moved it.

Only what moves it is followed: a first dimension that is exchanged for another, whole batches that are stacked or put
one behind the other, and heads that are flattened before the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lrpx.engine._tensors import any_carries, arguments, tensors_in

if TYPE_CHECKING:
    from lrpx.engine._taps import Call

UNKNOWN = -1
MOVES = frozenset("transpose swapaxes swapdims permute movedim moveaxis adjoint t __get__".split())
JOINS = ("cat", "concat", "concatenate", "stack")
SHAPES = ("view", "reshape", "flatten", "unflatten")


class Rows:
    """Of the tensors of one run that depend on the input, those whose rows are not their first dimension."""

    def __init__(self) -> None:
        self._at: Any = WeakTensorKeyDictionary()

    def are_first(self, value: Any) -> bool:
        """Whether nothing has moved the rows from the first dimension."""
        return not isinstance(value, Tensor) or value not in self._at

    def follow(self, call: Call, out: Any, rows: int) -> None:
        """Remember where a call has moved the rows."""
        given = [each for each in tensors_in((*call.args, *call.kwargs.values())) if any_carries(each)]
        made = [each for each in tensors_in(out) if any_carries(each)]
        if not given or not made:
            return
        firsts = [each for each in given if each not in self._at and each.ndim and len(each) == rows]
        if call.name in JOINS:
            dim = arguments(call.args, call.kwargs, "tensors", "dim")[1] or 0
            if dim % made[0].ndim == 0 and len(given) > 1 and self._are_mixed(given, firsts, rows):
                self._at[made[0]] = 1 if call.name == "stack" and len(firsts) == len(given) else UNKNOWN
                return
        x = given[0]
        if x.ndim == 0:
            return
        before = self._at.get(x, 0)
        if before == 0 and (call.name not in MOVES or len(x) != rows):
            if len(given) == 1 or firsts:
                return
            x = next((each for each in given if each in self._at), x)
            before = self._at.get(x, 0)
            if before == 0:
                return
        elif firsts and len(given) > 1 and firsts[0].ndim == made[0].ndim:
            return  # such as the residual stream
        for each in made:
            at = self._after(call, x, each, before, rows)
            if at:
                self._at[each] = at

    def _are_mixed(self, given: list[Tensor], firsts: list[Tensor], rows: int) -> bool:
        """Whether what is joined along the first dimension has each several rows, so that those of one row are no
        longer one behind the other: whole batches, or one beside others that have more of each row."""
        whole = [each for each in given if each not in self._at and each.ndim and len(each) % rows == 0]
        if len(whole) < len(given):
            return bool(whole) and any(each in self._at for each in given)
        return bool(firsts) and firsts[0].ndim > 2

    @staticmethod
    def _after(call: Call, x: Tensor, out: Tensor, at: int, rows: int) -> int:
        """Which dimension of ``out`` is that of the rows, which is ``at`` of ``x``."""
        if at == UNKNOWN:
            return UNKNOWN
        if call.name in MOVES and out.ndim == x.ndim:
            if call.name == "__get__":
                return _turned(x, out, at)
            # the same move of a tensor whose steps tell
            marked = torch.empty(1, device="meta").as_strided(x.shape, [int(dim == at) for dim in range(x.ndim)])
            return int(getattr(torch.Tensor, call.name)(marked, *call.args[1:], **call.kwargs).stride().index(1))
        if call.name in SHAPES and out.shape[:at] == x.shape[:at] and out.ndim > at and out.shape[at] % rows == 0:
            return at
        fewer = x.ndim - out.ndim
        is_chosen = call.name in ("unbind", "__iter__", "select", "__getitem__")
        if is_chosen and 0 < fewer <= at and out.shape[at - fewer] == x.shape[at]:
            return at - fewer
        is_before = out.shape[: at + 1] == x.shape[: at + 1] or (out.ndim == x.ndim and out.shape[at] == x.shape[at])
        return at if is_before else UNKNOWN


def _turned(x: Tensor, out: Tensor, at: int) -> int:
    """Where a dimension is after ``x.mT``, ``x.T`` or another attribute, such as ``x.real``."""
    dims = list(range(x.ndim))
    for turned in (dims, [*dims[:-2], *dims[:-3:-1]], dims[::-1]):
        if [*out.shape] == [x.shape[dim] for dim in turned] and [*out.stride()] == [x.stride()[dim] for dim in turned]:
            return turned.index(at)
    return at
