"""What a row of the table of operations says, and what happens to a call that changes its tensor in place."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _factors, _functions
from lrpx.engine._gates import GATE, gate_strength, written
from lrpx.engine._tensors import any_carries, carries, constants, unwrapped
from lrpx.errors import UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

Gate = Literal["moves", "stays", "joins"]


@dataclass(frozen=True, slots=True)
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
        gate: what becomes of the mark of a gate: it ``"moves"`` along with what is cast or reshaped; it ``"stays"``
            with a selection or a sum, if all that depends on the input is a gate, and it ``"joins"`` those of others
            likewise, also where they are in lists or the first is changed in place; None: it ends, or the handler
            knows.
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
                if variant in self.spellings:
                    continue
                if self.kind == "plain":
                    yield variant, self if self.gate else replace(self, handler=ends_gate(self.handler))
                else:
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


def copied(run: Any, x: Tensor) -> Tensor:
    """What a change in place of ``x`` is computed from: a copy, which it leaves for the backward pass."""
    before = x.detach().clone() if run.is_constant(x) else x.clone()
    vars(before).update(vars(x))
    if carries(x):
        _functions.copied(before, x)
    return before


def changes_in_place(handler: Handler, out_of_place: Any) -> Handler:
    """A handler for a variant in place of the function ``out_of_place``."""

    def handle(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if not any_carries((*args, *kwargs.values())):
            return func(*constants(args), **constants(kwargs))
        x = args[0] if args else kwargs["input"]
        before = copied(run, x)
        args = tuple(before if a is x else a for a in args)
        made = handler(run, out_of_place, args, {k: before if a is x else a for k, a in kwargs.items()})
        _functions.rooted(run, made, x, before)
        is_entry = x._is_view() and not carries(made)
        return write(run, x, run.added(made.to(x.dtype), func.__name__, x) if is_entry else made)

    return handle


def beside_a_constant(run: Any, name: str, value: Tensor, bias: Any, summand: Any) -> Tensor:
    """``value``, of which no more than a bias depends on the input, if anything; a ledger gets the rest as an entry.

    Args:
        run: the run.
        name: of the operation.
        value: its result.
        bias: the bias.
        summand: the bias as the result has it.
    """
    if not (run.has_taps_on_constants and carries(bias)):
        return value
    return rules.with_gradient_of(value, run.added((value - summand).detach(), name, bias) + summand)


def ends_gate(handler: Handler) -> Handler:
    """A handler for a change in place that autograd knows, after which a gate is none."""

    def handle(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        out = handler(run, func, args, kwargs)
        if isinstance(out, Tensor):
            vars(out).pop(GATE, None)
        return out

    return handle


NOT_IMPLEMENTED = "torch::autograd::WarnNotImplemented"
"""The node of a kernel without a gradient, as quantised activations have: torch warns, and hands on nothing."""


def unknown(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A function without a row: refused by a strict recipe where a floating-point result comes out of what depends on
    the input (also where torch itself has no derivative), else left as it is.
    """
    if func.__name__ in ("__set__", "set_"):
        is_data = func.__name__ == "set_" or func.__self__.__name__ == "data"
        if is_data and any_carries(constants(args)) and run.recipe.strict:
            raise UnknownOperationError(
                f"{run.where()} sets the data of a tensor, which autograd does not follow, to what depends on the "
                "input, or of what does; let the model compute another tensor, or use a recipe with strict=False"
            )
        return func(*args, **kwargs)  # of the tensor itself, as of a weight whose length a layer keeps in bounds
    args, kwargs, name = constants(args), constants(kwargs), func.__name__
    if not any_carries((*args, *kwargs.values())):
        return func(*args, **kwargs)
    out = as_it_is(run, name, func, args, kwargs, only_floating=True)
    cut = [each for each in (out if isinstance(out, (tuple, list)) else (out,)) if _is_floating(each)]
    if any(each.grad_fn is not None and each.grad_fn.name() == NOT_IMPLEMENTED for each in cut):
        raise UnknownOperationError(
            f"{run.where()} calls torch's {name!r}, whose gradient torch has not, under any recipe; explain the model "
            "as it was before it was quantised, or quantise the weights alone, as torchao does"
        )
    if run.recipe.strict and cut and not any_carries(cut):
        raise UnknownOperationError(
            f"{run.where()} calls torch's {name!r}, which has no derivative, so nothing would be relevant to it; "
            "use a recipe with strict=False to take its result for a constant"
        )
    run.call_it("unknown")
    return run.counted(name, out)


def as_it_is(run: Any, why: str, func: Any, args: Any, kwargs: Any, only_floating: bool = False) -> Any:
    """A call that a strict recipe refuses, with its plain gradient under any other, which a ledger measures.

    Args:
        run: the run.
        why: what is refused.
        func: the torch function.
        args: its arguments, without parameters.
        kwargs: those by name.
        only_floating: whether it is not refused where no result is a floating-point number.
    """

    def op(*given: Any) -> Any:
        return func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    given = (*args, *kwargs.values())
    if args and isinstance(args[0], Tensor) and _changes_its_first(func.__name__):
        run.refuse(why)
        made = run.apply("unknown", lambda x, *rest: op(x.clone(), *rest), *given, rule=rules.unmodified)
        return write(run, args[0], made)
    out = run.apply("unknown", op, *given, rule=rules.unmodified)
    if not only_floating or any_carries(out):
        run.refuse(why)
    return out


def _changes_its_first(name: str) -> bool:
    if name.startswith("__i"):
        return hasattr(operator, name)
    return name.endswith("_") and not name.endswith("__") and "resize" not in name and name != "set_"


def _is_floating(value: Any) -> bool:
    known = isinstance(value, Tensor) and (value.requires_grad or unwrapped(value) is value)
    return known and (value.is_floating_point() or value.is_complex())


def write(run: Any, x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the place of ``x``, and its gate."""
    x.copy_(value)
    if carries(x) and not carries(value) and not x._is_view():
        run.note_constant(x, value)  # as the attention weights are under CP-LRP
    setattr(x, GATE, gate_strength(value))
    if run.asks_for_gates:
        written(run.recipe, x)
    _factors.written(run, x, value)
    _functions.moved(x, value)
    return x
