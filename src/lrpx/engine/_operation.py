"""What a row of the table of operations says, and what happens to a call that changes its tensor in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx.engine import _functions
from lrpx.engine._gates import GATE, gate_strength
from lrpx.engine._tensors import any_carries, carries, constants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

Gate = Literal["moves", "stays"]


@dataclass(frozen=True)
class Operation:
    """An operation, by whatever names torch's functions have it: one row of the table.

    A handler sees one call of the torch function, ``handler(run, func, args, kwargs)``, and answers it under the
    recipe's rule. (What stands beside it here, or will, is what else must be known of an operation, such as its tangent
    in a pass forwards.)

    Args:
        name: of the operation.
        spellings: the names of its torch functions, methods and operators.
        handler: how its call is answered.
        kind: whose rule it gets, one of ``recipes.KINDS``; ``"source"`` for what makes a leaf of the graph, ``"plain"``
            where no rule is needed, for the plain gradient is right under every recipe.
        gate: what becomes of the mark of a gate: it ``"moves"`` along with what is cast or reshaped, it ``"stays"`` if
            it is a sure one and the operation a selection or a sum with constants; None: it ends.
        numbers: where a number among the arguments is a summand of the result.
        has_summands: whether a second tensor is a summand of the result.
    """

    name: str
    spellings: tuple[str, ...]
    handler: Handler
    kind: str
    gate: Gate | None = None
    numbers: tuple[int, ...] = ()
    has_summands: bool = True

    def rows(self) -> Iterator[tuple[str, Operation]]:
        """The row under each of its names, and under those of its variants in place."""
        for name in self.spellings:
            yield name, self
            for variant, out_of_place in in_place(name):
                if self.kind != "plain" and variant not in self.spellings:
                    yield variant, replace(self, handler=changes_in_place(self.handler, out_of_place))


OPERATORS = {"mul": "__imul__", "div": "__itruediv__", "pow": "__ipow__"}
"""Operators that change their left side in place."""


def in_place(name: str) -> Iterator[tuple[str, Any]]:
    """The names of a function's variants in place, with the function that they are variants of."""
    for holder in (Tensor, torch.nn.functional, torch):
        if not name.startswith("_") and hasattr(holder, name) and hasattr(holder, name + "_"):
            yield name + "_", getattr(holder, name)
            if name in OPERATORS:
                yield OPERATORS[name], getattr(holder, name)
            return


def changes_in_place(handler: Handler, out_of_place: Any) -> Handler:
    """A handler for a variant in place of the function ``out_of_place``."""

    def handle(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if not any_carries((*args, *kwargs.values())):
            return func(*constants(args), **constants(kwargs))
        # computed from a copy, which the change in place leaves for the backward pass
        x = args[0] if args else kwargs["input"]
        before = x.clone()
        vars(before).update(vars(x))
        if carries(x):
            _functions.copied(before, x)
        args = tuple(before if a is x else a for a in args)
        return write(x, handler(run, out_of_place, args, {k: before if a is x else a for k, a in kwargs.items()}))

    return handle


def write(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the place of ``x``, and its gate."""
    x.copy_(value)
    if carries(x) and not carries(value) and not x._is_view():
        x.detach_()  # a constant now, as the attention weights are under CP-LRP
    setattr(x, GATE, gate_strength(value))
    _functions.moved(x, value)
    return x
