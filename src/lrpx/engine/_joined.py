"""What was put together of others: stacked along a dimension, or a vector on the diagonal of a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrpx.engine._notes import Note
from lrpx.engine._tensors import called, carries

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Op = Callable[..., Any]


STACKED = "_lrpx_stacked"
"""The attribute of what was stacked: ``(version, the parts, the dimension)``."""


def stacked(out: Tensor, parts: Any, dim: int) -> None:
    """Note what ``out`` was stacked of, along a dimension of it."""
    setattr(out, STACKED, Note((out._version, tuple(parts), dim % out.ndim)))


def parts_of(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """What ``x`` was stacked of, along this dimension; nothing, if that is not known."""
    found = getattr(x, STACKED, None)
    return found[1] if found and found[0] == x._version and found[2] == dim % x.ndim else ()


DIAGONAL = "_lrpx_diagonal"
"""The attribute of a matrix that has a vector on its diagonal and else zeros: ``(version, the vector)``."""


def diagonal(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A vector as a matrix; which may be multiplied with, as the vector itself."""
    out = called(func, args, kwargs)
    if len(args) == 1 and not kwargs and carries(out) and out.ndim == args[0].ndim + 1:
        setattr(out, DIAGONAL, Note((out._version, args[0])))
    return out


def on_diagonal(x: Tensor) -> Tensor | None:
    """The vector on the diagonal of a matrix that has been made of it."""
    found = getattr(x, DIAGONAL, None)
    return found[1] if found and found[0] == x._version else None
