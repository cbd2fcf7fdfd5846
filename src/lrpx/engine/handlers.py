"""What a handler is, and what handlers share: the register, constants, and the marks of gates.

A handler sees one call of a torch function, ``handler(mode, func, args, kwargs)``, and answers it under the
recipe's rule. The handlers themselves are in ``operations.py`` and ``norms.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lrpx import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine.mode import RuleMode

    Handler = Callable[[RuleMode, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[str, Handler] = {}
OPERATORS = {"mul": ("__imul__",), "div": ("__itruediv__",), "pow": ("__ipow__",)}
"""Operators that change their left side in place."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for the torch functions of these names, and for their variants in place."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        for name in names:
            if not name.startswith("_") and hasattr(Tensor, name) and hasattr(Tensor, name + "_"):
                in_place = _in_place(handler, getattr(Tensor, name))
                HANDLERS.update(dict.fromkeys((name + "_", *OPERATORS.get(name, ())), in_place))
        return handler

    return register


def _in_place(handler: Handler, out_of_place: Any) -> Handler:
    def handle(mode: RuleMode, func: Any, args: Any, kwargs: Any) -> Any:
        if not any(map(carries, args)):
            return func(*constants(args), **constants(kwargs))
        # computed from a copy, which the change in place leaves for the backward pass
        x = args[0]
        before = x.clone()
        vars(before).update(vars(x))
        return write(x, handler(mode, out_of_place, tuple(before if a is x else a for a in args), kwargs))

    return handle


def write(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the place of ``x``, and its gate."""
    x.copy_(value)
    setattr(x, GATE, gate_strength(value))
    return x


PLAIN = frozenset({Tensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice})
"""Types of arguments that are no parameter and hold none."""


def constants(value: Any) -> Any:
    """The same argument with the parameters in it detached: weights are constants, and stay as they are."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is Parameter:
        return value.detach()
    if kind is tuple or kind is list:
        return value if PLAIN.issuperset(map(type, value)) else kind(map(constants, value))
    if kind is dict:
        return {key: constants(item) for key, item in value.items()}
    if isinstance(value, Parameter):
        return value.detach()
    return value


def added(mode: RuleMode, constant: Any, operation: str, *beside: Any) -> Any:
    """A constant that is added to what ``beside`` gives: with a ledger open, one of its entries."""
    if mode.book is not None and any(map(carries, beside)):
        return mode.book.added(constant, operation)
    return constants(constant)


def carries(value: Any) -> bool:
    """Whether a value, no parameter, depends on the input."""
    return isinstance(value, Tensor) and value.requires_grad


def any_carries(value: Any) -> bool:
    """Whether a value, or one in a list or tuple of values, depends on the input; parameters do not."""
    if isinstance(value, (tuple, list)):
        return any(map(any_carries, value))
    return carries(value) and not isinstance(value, Parameter)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The arguments of these names, in this order, however they were passed; None for those that were not."""
    if len(args) == len(names):
        return list(args)
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


# ------------------------------------------------------------------ gates of CP-LRP
#
# In a product of two input-dependent factors, signal-take-all must know which one is the gate. An
# activation's output is marked; a sigmoid or a softmax is a gate before any other activation is, and stays
# one when it is selected from, scaled or shifted: the weights of a router, ``1 − z``, ``Φ(x) = ½(1 + erf …)``.
# Other activations are often the signal itself (SiLU after Mamba's convolution), so their mark ends sooner.

GATE = "_lrpx_gate"
SURE_GATES = ("sigmoid", "softmax", "expit", "erf")


def mark_gate(mode: RuleMode, name: str, value: Tensor) -> Tensor:
    """Mark the output of the activation called ``name`` as a possible gate."""
    if mode.recipe.product is rules.signal_take_all:
        setattr(value, GATE, 2 if any(kind in name for kind in SURE_GATES) else 1)
    return value


def gate_strength(value: Tensor) -> int:
    """0 for no gate, 1 for an activation's output, 2 for a sigmoid's or softmax's."""
    return int(vars(value).get(GATE, 0))


def keep_gate(mode: RuleMode, out: Any, *inputs: Any) -> Any:
    """``out``, made of ``inputs`` by a selection, or by a sum or product with constants: a sure gate stays one."""
    if mode.recipe.product is rules.signal_take_all:
        carrying = [x for x in inputs if any_carries(x)]
        if len(carrying) == 1 and gate_strength(carrying[0]) == 2:
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if carries(value):
                    setattr(value, GATE, 2)
        elif len(carrying) > 1 and out is inputs[0]:  # a sum in place is no gate any more
            vars(out).pop(GATE, None)
    return out
