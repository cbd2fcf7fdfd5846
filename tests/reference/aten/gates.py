"""Which of the factors of a product is the gate, under CP-LRP (docs/design/engine.md, "Which factor is the gate?").

What an element-wise function gave is a gate, and stays one as long as it makes no difference where the product is
written: moved, chosen, put together, scaled, shifted by constants, summed with other gates, and multiplied with one.

- Of two gates the stronger is the other's: an exponential, before what is of one sign everywhere, before any other.
- A written-out function is of one sign if it is so at -5, 0 and 5, and not zero at 0.
- What the other factor was computed from is no gate of it, unless it is of one sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from tests.reference.aten.operations import (
    BILINEAR,
    BOUNDS,
    EXPONENTIALS,
    FUNCTIONS,
    JOINS,
    KEEPS,
    LENGTHS,
    MATRIX,
    OF_ONE_SIGN,
    POOLS,
    QUOTIENTS,
    SAME,
    SCALINGS,
    SELECTS,
    SHAPES,
    SUMMATIONS,
)
from tests.reference.aten.patterns import CHOOSING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tests.reference.aten.patterns import Patterns
    from tests.reference.aten.tape import Node, Value

NONE, ACTIVATION, SURE, SCALE = range(4)
"""How strong a gate is: none; an activation's output; one of one sign everywhere; an exponential."""

LASTS = SHAPES | SELECTS | JOINS | SUMMATIONS | SCALINGS | POOLS
"""What makes a gate of gates."""


CURVES = FUNCTIONS - {"nan_to_num"}
HOMOGENEOUS = frozenset("relu leaky_relu abs square".split())
"""Tried at three numbers only where a number was added before."""


class Function(NamedTuple):
    """What a value is an element-wise function of.

    ``is_curved``: whether it is more than a scaling with numbers added; ``is_shifted``: whether a number was added to
    the last curve, or to the root.
    """

    root: Value
    is_curved: bool = False
    is_shifted: bool = False


class Gates:
    """The strength of every value of a tape as a gate; :meth:`add` is told the calls in their order."""

    def __init__(self, patterns: Patterns, carries: Callable[[Any], bool]) -> None:
        self.patterns, self.carries = patterns, carries
        self.strengths: dict[int, int] = {}
        self.functions: dict[int, Function] = {}
        self.ways: dict[int, list[Value]] = {}  # by the index of a call what it hands relevance on to

    def add(self, node: Node, inputs: list[Value], held: Value | None) -> None:
        """Look at a call; ``held`` is the factor of it that is a constant."""
        base = self._base(node)
        self.ways[node.index] = [value for value in inputs if value is not held] if base is None else [base]
        if len(node.outputs) == 1 or node.name in CURVES:
            self.functions[id(node.outputs[0])] = self._function(node, inputs, base)
        strength = self._strength(node, inputs, held, base)
        self.strengths.update((id(value), strength) for value in node.outputs)

    def strength(self, value: Value) -> int:
        """How strong a gate a value is."""
        return self.strengths.get(id(value), NONE)

    def of(self, a: Value, b: Value) -> int | None:
        """Which of two factors is the gate, if one is."""
        strengths = [self.strength(a), self.strength(b)]
        if strengths[0] == strengths[1]:
            return None
        place = strengths.index(max(strengths))
        gate, signal = (a, b) if place == 0 else (b, a)
        return None if max(strengths) == ACTIVATION and self._is_made_of(signal, gate) else place

    def is_scale(self, node: Node) -> bool:
        """Whether a call gives an exponential, and no softmax."""
        if node.index in self.patterns.softmaxes:
            return False
        return node.name in EXPONENTIALS or (node.name == "pow" and self.carries(node.args[1]))

    def is_logistic(self, value: Any) -> bool:
        """Whether a value that carries relevance is an exponential and a number."""
        return self.carries(value) and id(value) in self.patterns.logistic

    # ------------------------------------------------------------------------- strengths

    def _strength(self, node: Node, inputs: list[Value], held: Value | None, base: Value | None) -> int:
        if self.is_scale(node):
            return SCALE
        if node.name in OF_ONE_SIGN or node.index in self.patterns.softmaxes:
            return SURE
        if node.name in QUOTIENTS and base is None and held is not None:
            return min(self.strength(value) for value in inputs if value is not held)
        if node.name in MATRIX and held is not None:
            return NONE
        weakest = min(map(self.strength, inputs), default=NONE)
        if node.name in LENGTHS:
            return max(weakest, ACTIVATION)
        before = self._of(inputs[0])
        if node.name in CHOOSING and _is_kinked(self._of(inputs[0]), [self._of(each) for each in inputs], node):
            return max(weakest, ACTIVATION)
        if node.name == "where" and not any(self._of(value).is_shifted for value in inputs):
            return weakest  # a selection, whether it asks for the sign of what it selects from or not
        if base is not None or (node.name in CURVES and len(inputs) == 1):
            if base is None and not before.is_shifted:
                if node.name in BOUNDS:
                    return max(weakest, ACTIVATION if _is_relu(node) else NONE)
                if _is_first_power(node):
                    return weakest
            is_written = base is not None or before.is_shifted or (before.is_curved and not _is_homogeneous(node))
            own = SURE if is_written and self._is_of_one_sign(node.outputs[0]) else ACTIVATION
            keeps = node.name in KEEPS and not _is_divisor(node)
            return max(own, weakest) if keeps or node.name == "mul" else own
        if len(inputs) > 1 and node.name in BILINEAR and node.name != "addcmul":
            return weakest if all(self.carries(node.args[i]) for i in BILINEAR[node.name]) else NONE
        if node.name not in LASTS | {"addcmul"}:
            return NONE
        if node.name in SUMMATIONS and len(inputs) == 2 and self._of(node.outputs[0]).is_curved:
            return max(weakest, SURE if self._is_of_one_sign(node.outputs[0]) else ACTIVATION)
        is_written = before.is_curved and self._adds_a_number(node, inputs)
        if weakest in (ACTIVATION, SURE) and is_written:
            return SURE if self._is_of_one_sign(node.outputs[0]) else ACTIVATION
        return weakest

    # ------------------------------------------------------------------- written functions

    def _base(self, node: Node) -> Value | None:
        base = self.patterns.functions.get(node.index)
        return base if self.carries(base) else None

    def _of(self, value: Value) -> Function:
        return self.functions.get(id(value), Function(value))

    def _function(self, node: Node, inputs: list[Value], base: Value | None) -> Function:
        """What the output of a call is an element-wise function of."""
        if base is not None:
            return Function(self._of(base).root, is_curved=True)
        made = [self._of(value) for value in inputs]
        before, own = made[0], Function(node.outputs[0])
        if len(made) == 1 and inputs[0].tensor.shape == node.outputs[0].tensor.shape:
            if node.name in CURVES and not _is_first_power(node):
                return Function(before.root, is_curved=True)
            if node.name in SCALINGS | SAME or _is_first_power(node):
                return before
            if self._adds_a_number(node, inputs):
                return before._replace(is_shifted=True)
        elif len(made) == 2 and node.name in SUMMATIONS | {"where"} and made[0].root is made[1].root:
            return Function(before.root, *(any(each) for each in zip(*(one[1:] for one in made), strict=True)))
        elif node.index in self.patterns.sums and len(made) == 2:
            return Function(self._of(self.patterns.sums[node.index]).root, is_curved=True)
        return own

    def _adds_a_number(self, node: Node, inputs: list[Value]) -> bool:
        if node.name not in SUMMATIONS or len(inputs) != 1:
            return False
        return all(_is_number(each) for each in node.args[:2] if each is not inputs[0])

    def _is_of_one_sign(self, value: Value) -> bool:
        """Whether a value as a function of its root is, tried at three numbers."""
        root = self._of(value).root

        def at(x: float) -> Tensor:
            known: dict[int, Tensor] = {}

            def number(each: Any) -> Any:
                if not hasattr(each, "tensor"):
                    return each
                if each.node is None:
                    return each.tensor
                if id(each) not in known:
                    if each is root or self._of(each).root is each:
                        known[id(each)] = torch.full_like(each.tensor, x)
                    else:
                        made = each.node.func(*tree_map(number, each.node.args), **tree_map(number, each.node.kwargs))
                        known[id(each)] = made if isinstance(made, torch.Tensor) else made[each.number]
                return known[id(each)]

            return number(value)

        below, middle, above = at(-5.0), at(0.0), at(5.0)
        return any(bool(((s * below >= 0) & (s * middle > 0) & (s * above >= 0)).all()) for s in (1, -1))

    # ----------------------------------------------------------------- what is made of what

    def _is_made_of(self, x: Value, gate: Value) -> bool:
        """Whether relevance of one value goes on to another, in whatever shape or scale that one is."""
        places = {id(gate)}
        while gate.node is not None and len(self.ways.get(gate.node.index, ())) == 1 and _is_in_another_shape(gate):
            gate = self.ways[gate.node.index][0]
            places.add(id(gate))
        waiting, seen = [x], {id(x)}
        while waiting:
            each = waiting.pop()
            if id(each) in places:
                return True
            if each.index > gate.index:
                new = [value for value in self.ways.get(each.index, ()) if id(value) not in seen]
                seen.update(map(id, new))
                waiting += new
        return False


def _is_in_another_shape(value: Value) -> bool:
    """Whether the call that made a value made it of all of another."""
    node = value.node
    assert node is not None
    if node.name == "read":
        return node.values[0].tensor.numel() == value.tensor.numel()
    return node.name in SHAPES | SCALINGS | {"_fused_rms_norm"}


def _is_number(argument: Any) -> bool:
    tensor = getattr(argument, "tensor", None)
    return isinstance(argument, (int, float)) if tensor is None else argument.node is None and not tensor.ndim


def _is_kinked(before: Function, made: list[Function], node: Node) -> bool:
    """Whether a selection or a mask gives a (leaky) ReLU of what all its inputs are scalings of: one slope above zero,
    and another below."""
    x, y = before.root.tensor, node.outputs[0].tensor
    if (
        x.is_complex()
        or x.shape != y.shape
        or any(each.root is not before.root or each.is_curved or each.is_shifted for each in made)
    ):
        return False
    slopes = [(y[side] / x[side]) for side in (x > 0, x < 0)]
    if not all(each.numel() and torch.allclose(each, each[:1], rtol=1e-12, atol=0) for each in slopes):
        return False
    return abs(float(slopes[0][0] - slopes[1][0])) > 1e-9


def _exponent(node: Node) -> Any:
    return node.args[1] if node.name == "pow" and isinstance(node.args[1], (int, float)) else None


def _is_first_power(node: Node) -> bool:
    return bool(_exponent(node) == 1)


def _is_homogeneous(node: Node) -> bool:
    return node.name in HOMOGENEOUS or _exponent(node) == 2


def _is_divisor(node: Node) -> bool:
    return (_exponent(node) or 0) < 0


def _is_relu(node: Node) -> bool:
    """Whether a clamp is from 0 up, or down, to wherever."""
    return any(isinstance(bound, (int, float)) and bound == 0 for bound in node.args[1:])
