"""Taps: what listens to a run, or writes into it, behind one protocol.

The ledger, the attention heads and the observers of modules are taps; a tap of your own is given to
``propagate(..., taps=[tap])``. Each part of the protocol may be left as it is, and costs nothing then.

>>> import lrpx, torch
>>> class Silenced(Tap):
...     patterns = ("0",)
...     def module(self, path, side, value):
...         return value * 0 if side == "output" else None
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
>>> with lrpx.propagate(model, lrpx.LRP, taps=[Silenced()]):
...     y = model(torch.ones(1, 2))
>>> torch.equal(y[0], model[1].bias)
True
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from lrpx.engine._operation import Operation
    from lrpx.engine._places import Side, Source
    from lrpx.recipes import Recipe
    from lrpx.rules import Rule


class Running(Protocol):
    """What a tap may ask of the run."""

    @property
    def recipe(self) -> Recipe:
        """The rules that hold where the model is now."""

    @property
    def replaying(self) -> bool:
        """Whether a part of the model runs again in the backward pass: a tap that writes writes again, one that
        records does not."""

    @property
    def sources(self) -> Sequence[Source]:
        """Where relevance ends, as far as the model has come."""

    def where(self) -> str:
        """The path of the module whose forward pass is running."""


@dataclass(frozen=True)
class Call:
    """One call of a torch function.

    Args:
        name: of the torch function.
        operation: its row in the table of operations; None if there is none.
        args: its arguments by place.
        kwargs: its arguments by name.
    """

    name: str
    operation: Operation | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tap:
    """What listens to a run, or writes into it: override what you need.

    A tap belongs to one run at a time. Taps are called in their order, the first around the others. What is called in
    the forward pass may make leaves of the graph (tensors that require a gradient); name them in :meth:`leaves`, and
    ``trace.gradient_of(leaf)`` and ``trace.relevance_of(leaf)`` answer for them after ``trace.explain(value)``.
    """

    patterns: Sequence[str] = ()
    """Shell patterns of the paths of the modules that :meth:`module` is called for."""

    def begin(self, run: Running) -> None:
        """The block begins. Keep no strong reference to the run, which holds the tap."""

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """A torch function is called inside the model, with or without gradients; ``proceed(args, kwargs)`` gives its
        result, under the recipe's rule."""
        return proceed(call.args, call.kwargs)

    def rule(
        self, kind: str, rule: Rule, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        """``rule(op, *inputs)`` is due for an operation of a kind; ``proceed(*inputs)`` gives it."""
        return proceed(*inputs)

    def added(self, value: Any, operation: str) -> Any:
        """A constant, a parameter or a number that an operation adds to what depends on the input; the same value."""
        return value

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        """What enters a module, its first floating-point tensor, or what leaves it; another in its place, or None."""
        return None

    def check(self) -> None:
        """The value is about to be explained; raise where the run was none that the tap can read."""

    def leaves(self) -> Sequence[Tensor]:
        """Tensors whose gradients the tap needs."""
        return ()

    def backward(self, value: Tensor, outputs: Tensor | None) -> AbstractContextManager[object]:
        """A context around the backward pass from ``value``; ``outputs``: what it was computed from, if told. With
        ``keep=True`` there may be several, and what is asked of the tap then is about the newest."""
        return nullcontext()
