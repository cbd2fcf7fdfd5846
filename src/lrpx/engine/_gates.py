"""Which factor of a product is the gate, for CP-LRP's rule that the signal takes all.

An activation's output is marked; a sigmoid or a softmax is a gate before any other activation is, and stays one when it
is selected from, scaled or shifted: the weights of a router, ``1 − z``, ``Φ(x) = ½(1 + erf …)``. Other activations are
often the signal itself (SiLU after Mamba's convolution), so their mark ends sooner. An exponential is a gate before all
others, under the uniform rule too (``engine/_factors.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrpx import rules
from lrpx.engine._tensors import any_carries, carries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lrpx.recipes import Recipe

GATE = "_lrpx_gate"
SURE_GATES = frozenset("sigmoid hardsigmoid special_expit softmax erf erfc special_erf special_erfc".split())
SURE, EXPONENTIAL = 2, 3
"""The strengths of gates that stay gates: a sigmoid or softmax, and an exponential."""


def mark_gate(recipe: Recipe, name: str, value: Tensor) -> Tensor:
    """Mark the output of the activation called ``name`` as a possible gate."""
    if recipe.product is rules.signal_take_all:
        setattr(value, GATE, SURE if name in SURE_GATES else 1)
    return value


def gate_strength(value: Tensor) -> int:
    """0 for no gate, 1 for an activation's output, 2 for a sigmoid's or softmax's, 3 for an exponential's."""
    return int(vars(value).get(GATE, 0))


def put_gate(value: Tensor, strength: int) -> None:
    """Make ``value`` a gate of a strength, or none."""
    if strength:
        setattr(value, GATE, strength)
    else:
        vars(value).pop(GATE, None)


def keep_gate(recipe: Recipe, out: Any, *inputs: Any) -> Any:
    """``out``, made of ``inputs`` by a selection, or by a sum or product with constants: a sure gate stays one."""
    carrying = [x for x in inputs if any_carries(x)]
    if len(carrying) == 1 and isinstance(carrying[0], Tensor):
        strength = gate_strength(carrying[0])
        if strength >= (SURE if recipe.product is rules.signal_take_all else EXPONENTIAL):
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if carries(value):
                    setattr(value, GATE, strength)
    elif len(carrying) > 1 and out is inputs[0]:  # a sum in place is no gate any more
        vars(out).pop(GATE, None)
    return out


def weakest_gate(inputs: Any) -> int:
    """The strength of the weakest gate among what depends on the input, also in lists."""
    return min(_strengths(inputs), default=0)


def set_gate(recipe: Recipe, out: Any, strength: int) -> Any:
    """``out``, chosen or put together from gates of which this is the weakest: a gate, if that is a sure one."""
    is_gate = strength >= (SURE if recipe.product is rules.signal_take_all else EXPONENTIAL)
    for value in out if isinstance(out, (tuple, list)) else (out,):
        if is_gate and carries(value):
            setattr(value, GATE, strength)
        elif isinstance(value, Tensor):  # perhaps changed in place
            vars(value).pop(GATE, None)
    return out


def _strengths(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _strengths(value)
        elif any_carries(value):
            yield gate_strength(value)


def move_gate(out: Any, x: Any) -> Any:
    """``out``, which is ``x`` cast or in another shape: a gate stays a gate."""
    if isinstance(x, Tensor):
        strength = vars(x).get(GATE)
        if strength is not None:
            setattr(out, GATE, strength)
    return out
