"""What is noted of a tensor that is on its way, beside its mark, and whether two tensors are one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx.engine._tensors import any_carries

if TYPE_CHECKING:
    from lrpx.engine import Call

LEARNED = "_lrpx_learned"
"""The attribute of a tensor that was chosen of a weight."""
ALONE = "_lrpx_alone"
"""The attribute of a tensor that was computed of what one linear layer gives alone, as the mean and the deviation of
that: the layer's path."""
JOINED = "_lrpx_joined"
"""The attribute of a tensor that is made of branches alone: the linear layers, and which call of them, that gave
them."""
PICKED = "_lrpx_picked"
"""The attribute of a tensor whose rows were picked among the tokens by their numbers, as those of an expert: of several
that it is given all of, nobody knows the order."""
TURNED = "_lrpx_turned"
"""The attribute of a tensor ``[T, 1, n]`` that was ``[1, T, n]``, and of ``[T, n]`` that was made of it: of more
rows it has the first token of each first."""


def keep_alone(call: Call, out: Any) -> None:
    """Note of what a call gives of what linear layer's output alone it was computed, if it was."""
    given = [
        vars(x).get(ALONE) for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor) and any_carries(x)
    ]
    if given and given[0] is not None and len({*given}) == 1:
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, Tensor) and any_carries(each):
                setattr(each, ALONE, given[0])


def is_alone(x: Any, path: str) -> bool:
    """Whether a tensor is a number for each token, computed of what this linear layer gives alone."""
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[-1] == 1 and vars(x).get(ALONE) == path


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two are one, but for how many dimensions there are before the last."""
    return one.numel() == other.numel() and one.shape[-1] == other.shape[-1] and one.data_ptr() == other.data_ptr()


def is_there(x: Any, other: Tensor) -> bool:
    """Whether an argument is a tensor that is the same as another."""
    return isinstance(x, Tensor) and x.ndim > 0 and is_same(x, other)
