"""What a model of images learned and puts beside its patches: class tokens, and positions.

They are sources of relevance as the pixels are, and no biases. Neither is known by a name: what does not depend on the
input and is joined to rows ``[B, N, d]`` that do, along ``N``, is learned tokens (class, distillation, registers,
prompts); what is added to such rows and has a row for each of them is positions. A bias is one row for all.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx.engine._factors import CONSTANT
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import any_carries, carries

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine._taps import Call, Running

JOINS = ("cat", "concat", "concatenate")
ADDS = ("add", "__add__", "__radd__", "add_", "__iadd__")


@dataclass(frozen=True, eq=False)
class Lesson:
    """Something learned that was put beside the input.

    Args:
        kind: what it is.
        leaf: ``[B, N, d]``, a row for each token that it is, or is added to; positions of a map are ``[B, R, C, d]``.
    """

    kind: Literal["class token", "positions"]
    leaf: Tensor


class Learned(Tap):
    """Makes leaves of learned tokens and positions, one for each row of the batch, with the same values.

    Args:
        rows: how many rows run together.
        positions: whether positions are leaves too; not under a recipe that gives them relevance wherever they are met,
            whose own tap makes them.
    """

    def __init__(self, rows: int, *, positions: bool = True) -> None:
        self._rows = rows
        self._positions = positions
        self._run: Running
        self.found: list[Lesson] = []
        self._looked_up: list[Any] = []

    def begin(self, run: Running) -> None:
        """The run begins."""
        self._run = weakref.proxy(run)  # which holds this

    def leaves(self) -> list[Tensor]:
        """The leaves."""
        return [each.leaf for each in self.found]

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function."""
        if call.name == "embedding":
            self._looked_up.append(out := proceed(call.args, call.kwargs))
            return out
        if call.name in JOINS and torch.is_grad_enabled():
            return self._joined(call, proceed)
        is_sum = call.name in ADDS and len(call.args) == 2 and not call.kwargs
        if is_sum and self._positions and torch.is_grad_enabled():
            a, b = call.args
            if self._is_row_by_row(a, b):
                return proceed((a, self._leaf("positions", b, a.shape)), {})
            if self._is_row_by_row(b, a) and not call.name.endswith("_"):
                return proceed((self._leaf("positions", a, b.shape), b), {})
        return proceed(call.args, call.kwargs)

    def _joined(self, call: Call, proceed: Callable[..., Any]) -> Any:
        parts, *rest = call.args or (call.kwargs.get("tensors"),)
        axis = rest[0] if rest else call.kwargs.get("dim", call.kwargs.get("axis", 0))
        fits = isinstance(parts, (tuple, list)) and all(isinstance(each, Tensor) for each in parts)
        if not fits or not any(self._is_rows(each) for each in parts) or axis not in (1, -2):
            return proceed(call.args, call.kwargs)
        made = [
            self._leaf("class token", each, each.shape) if _is_constant(each) and each.ndim == 3 else each
            for each in parts
        ]
        if call.args:
            return proceed((made, *rest), call.kwargs)
        return proceed((), call.kwargs | {"tensors": made})

    def _is_rows(self, x: Any) -> bool:
        """Whether a tensor depends on the input and has a row for each of some places."""
        return isinstance(x, Tensor) and x.ndim in (3, 4) and len(x) == self._rows and carries(x) and not _marked(x)

    def _is_row_by_row(self, x: Any, constant: Any) -> bool:
        """Whether a constant has a row of its own for each place of ``x``."""
        if not self._is_rows(x) or not isinstance(constant, Tensor):
            return False
        if not (_is_constant(constant) or self._is_looked_up(constant)):
            return False
        if x.ndim == 4 and x.shape[-1] == x.shape[-2]:  # a score for each pair of tokens, and no map
            return False
        shape = constant.shape[-(x.ndim - 1) :]
        return shape == x.shape[1:] and shape[0] > 1

    def _is_looked_up(self, x: Tensor) -> bool:
        """Whether a tensor was looked up for all rows alike, as positions are."""
        return any(x is each for each in self._looked_up) and (x.ndim == 2 or len(x) == 1)

    def _leaf(self, kind: Literal["class token", "positions"], constant: Tensor, shape: Any) -> Tensor:
        wide = constant.expand(self._rows, *shape[1:])
        # what a ledger has made a leaf of stays in its graph, and so does what was looked up in a table
        stays = _marked(constant) or self._is_looked_up(constant)
        leaf = wide.clone() if stays else wide.detach().clone().requires_grad_()
        if not self._run.replaying:
            self.found.append(Lesson(kind, leaf))
        return leaf


def _marked(x: Tensor) -> bool:
    """Whether a tensor is the leaf that a ledger has made of a constant."""
    return CONSTANT in vars(x)


def _is_constant(x: Tensor) -> bool:
    return x.is_floating_point() and (not any_carries(x) or _marked(x))
