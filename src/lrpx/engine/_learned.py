"""What a model of images learned and puts beside its patches: class tokens.

They are sources of relevance as the pixels are, and no biases. They are not known by a name: what does not depend on
the input and is joined to rows ``[B, N, d]`` that do, along ``N``, is learned tokens (class, distillation, registers,
prompts). (What is added to such rows and has a row for each of them is positions: :mod:`lrpx.engine._positions`.)
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.engine._graph import descends
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import CONSTANT, any_carries, carries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.engine._places import Source
    from lrpx.engine._taps import Call, Running

JOINS = ("cat", "concat", "concatenate")


class Learned(Tap):
    """Makes leaves ``[B, n, d]`` of learned tokens, one for each row of the batch, with the same values.

    Args:
        rows: how many rows run together.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._run: Running
        self.found: list[Tensor] = []

    def begin(self, run: Running) -> None:
        """The run begins."""
        self._run = weakref.proxy(run)  # which holds this

    def leaves(self) -> list[Tensor]:
        """The leaves."""
        return self.found

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function."""
        if call.name in JOINS and torch.is_grad_enabled():
            return self._joined(call, proceed)
        return proceed(call.args, call.kwargs)

    def _joined(self, call: Call, proceed: Callable[..., Any]) -> Any:
        parts, *rest = call.args or (call.kwargs.get("tensors"),)
        axis = rest[0] if rest else call.kwargs.get("dim", call.kwargs.get("axis", 0))
        fits = isinstance(parts, (tuple, list)) and all(isinstance(each, Tensor) for each in parts)
        if not fits or not any(self._is_rows(each) for each in parts) or axis not in (1, -2):
            return proceed(call.args, call.kwargs)
        made = [self._leaf(each) if _is_constant(each) and each.ndim == 3 else each for each in parts]
        if call.args:
            return proceed((made, *rest), call.kwargs)
        return proceed((), call.kwargs | {"tensors": made})

    def _is_rows(self, x: Any) -> bool:
        """Whether a tensor depends on the input and has a row for each of some places."""
        fits = isinstance(x, Tensor) and x.ndim in (3, 4) and len(x) == self._rows and carries(x) and not _marked(x)
        return fits and (self._run.replaying or is_of_image(x, self._run.sources))

    def _leaf(self, constant: Tensor) -> Tensor:
        wide = constant.expand(self._rows, *constant.shape[1:])
        # what a ledger has made a leaf of stays in its graph
        leaf = wide.clone() if _marked(constant) else wide.detach().clone().requires_grad_()
        if not self._run.replaying:
            self.found.append(leaf)
        return leaf


def is_of_image(x: Tensor, sources: Sequence[Source]) -> bool:
    """Whether what depends on the input was computed from pixels, and not from ids that were looked up alone, as a text
    is that the model itself compares its image with."""
    pixels = {id(source.value) for source in sources if source.ids is None}
    return len(pixels) == len(sources) or id(x) in pixels or descends(x.grad_fn, pixels)


def _marked(x: Tensor) -> bool:
    """Whether a tensor is the leaf that a ledger has made of a constant."""
    return CONSTANT in vars(x)


def _is_constant(x: Tensor) -> bool:
    return x.is_floating_point() and (not any_carries(x) or _marked(x))
