"""What a torch function does with the tensors that it is given, as far as its name and its arguments tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.engine._tensors import any_carries, tensors_in
from lrpx.units._traits import PICKED, TURNED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.engine import Call

REARRANGES = frozenset(
    """chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split unbind narrow select repeat repeat_interleave
    tile flip roll __getitem__ __get__ slice broadcast_to cat concat concatenate stack index_select gather
    take_along_dim""".split()
)
"""Torch functions that put numbers elsewhere and change none, beside those that move the mark of a gate; ``__get__`` is
``x.mT`` and ``x.T``."""
CASTS = frozenset("type float half bfloat16 double to type_as dropout".split())
"""Of these, those that leave them where they are."""
PRODUCTS = ("matmul", "baddbmm", "grouped_mm")
TURNS = frozenset("transpose swapaxes swapdims permute movedim moveaxis".split())
PICKS = ("__getitem__", "index_select", "gather", "take_along_dim")
"""Torch functions that pick."""
PUTS = ("index_", "scatter", "masked_scatter", "__setitem__", "put")
"""How the names of those begin that put rows back to where they were."""


def turns(call: Call, out: Any) -> bool:
    """Whether a call brings the tokens before the rows, of which there is one, or computes with such a tensor."""
    if not isinstance(out, Tensor) or out.ndim not in (2, 3) or not any_carries(out) or not call.args:
        return False
    if out.ndim == 3 and not len(out) > out.shape[1] == 1:
        return False
    x = call.args[0]
    if call.name in TURNS and isinstance(x, Tensor) and out.ndim == 3:
        return x.shape[:2] == (1, len(out))
    return any(isinstance(x, Tensor) and TURNED in vars(x) and len(x) == len(out) for x in call.args)


def picks(call: Call, out: Any) -> bool:
    """Whether a call picks rows among the tokens by their numbers, or computes with such rows.

    Those that a mask picks, or a slice, stay in order: of these there are as many as tokens where they are all.
    """
    if not isinstance(out, Tensor) or out.ndim != 2 or not any_carries(out) or not call.args:
        return False
    if any(isinstance(x, Tensor) and PICKED in vars(x) and len(x) == len(out) for x in call.args):
        return not call.name.startswith(PUTS) or call.name in PICKS
    x = call.args[0]
    if call.name not in PICKS or not isinstance(x, Tensor) or not any_carries(x) or x.ndim < 2:
        return False
    given = [*call.args[1:], *call.kwargs.values()]
    if call.name == "__getitem__":
        given = list(given[0][: x.ndim - 1]) if isinstance(given[0], tuple) else given
    elif 0 not in [each for each in given if isinstance(each, int)]:
        return False
    return any(
        isinstance(each, Tensor) and each.ndim > 0 and each.dtype in (torch.int32, torch.int64) for each in given
    )


def adds_stream(call: Call) -> bool:
    """Whether a sum is that with a stream that does not depend on the input, as a decoder's first queries."""
    is_sum = call.operation is not None and call.operation.name in ("add", "sub", "rsub")
    return is_sum and any(x.ndim > 1 and not any_carries(x) for x in tensors_in(call.args))


def is_list(args: Sequence[Any]) -> bool:
    """Whether the first argument is a list of tensors."""
    return bool(args) and isinstance(args[0], (list, tuple)) and all(isinstance(x, Tensor) for x in args[0])


def guards(call: Call) -> bool:
    """Whether a clamp leaves alone what is near 0, as one that keeps half precision from overflowing, or queries small,
    or keeps lengths from 0, as ``F.normalize`` does. It makes no neurons, as one from 0 up does, which is a ReLU."""
    names = ("max",) if call.name.startswith("clamp_max") else ("min", "max")
    given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
    low, high = given.get("min"), given.get("max")
    return (low is None or bool(torch.as_tensor(low != 0).all())) and (
        high is None or bool(torch.as_tensor(high > 0).all())
    )


def is_share(x: Tensor) -> bool:
    """Whether all numbers are from 0 to 1, as a sigmoid's are."""
    with torch._C.DisableTorchFunction():
        return bool(((x >= 0) & (x <= 1)).all())


def is_weight(x: Any) -> bool:
    """Whether an argument is a matrix that does not depend on the input."""
    return isinstance(x, Tensor) and x.ndim == 2 and not any_carries(x)
