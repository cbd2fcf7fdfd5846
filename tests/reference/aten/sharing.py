"""How two factors that both depend on the input share what their product gets.

- ``N`` factors get ``1/N`` each, however a model brackets them (Achtibat et al. 2024, Prop. 3.3): a tensor that is a
  product of ``m`` gets ``m`` of ``m + n`` shares. Shapes, selections, scalings by constants, and sums over dimensions
  are products of as many factors as what they are made of (the fewest, if that is several); a linear layer, a function,
  a softmax, a norm that takes a mean off and a sum of two are one factor.
- An exponential is a scale, held constant (Jafari et al. 2024): what it is multiplied with gets all; a product of
  exponentials alone is a product of so many factors (Achtibat et al. 2024, Prop. 3.3). A product with one
  decays; a sum of what decays and of what is added to it leads on, as a selection does.
- Under CP-LRP, of an element-wise product, the gate gets nothing (Arras et al. 2025, D.4); which one that is, says
  :mod:`.gates`.
- A triangular solve is its substitution, in which what is solved for is one factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.reference.aten.gates import SCALE, Gates
from tests.reference.aten.operations import (
    ADDING,
    BILINEAR,
    JOINS,
    MATRIX,
    POOLS,
    QUOTIENTS,
    SCALINGS,
    SELECTS,
    SHAPES,
    SUMMATIONS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.reference.aten.patterns import Patterns
    from tests.reference.aten.tape import Node, Value

CENTRED = frozenset({"native_layer_norm", "native_group_norm"})
"""Norms that take a mean off, which is a sum of two."""


class Sharing:
    """Of every value of a tape: how many factors it has, how strong a gate it is, whether an exponential decays it.

    :meth:`add` is told the calls in the order of the tape; :meth:`split` is asked on the way back.
    """

    def __init__(self, patterns: Patterns, carries: Callable[[Any], bool], *, gated: bool) -> None:
        """``gated``: whether the gate of an element-wise product gets nothing (CP-LRP)."""
        self.patterns, self.carries, self.gated = patterns, carries, gated
        self.counts: dict[int, int] = {}
        self.scales: dict[int, int] = {}  # of what is a product of exponentials alone, of how many
        self.gates = Gates(patterns, carries)
        self.decayed: set[int] = set()

    def add(self, node: Node) -> None:
        """Look at a call whose outputs carry relevance."""
        inputs = [value for value in node.values if self.carries(value)]
        factors = self._factors(node)
        count, decayed = self._count(node, inputs, factors), self._decays(node, inputs, factors)
        held = self._held(node, *factors) if factors else None
        self.gates.add(node, inputs, None if held is None else factors[held])
        scales = self._scales(node, inputs, factors)
        for value in node.outputs:
            self.counts[id(value)] = count
            self.scales[id(value)] = scales
            if decayed:
                self.decayed.add(id(value))

    def split(self, node: Node) -> tuple[float, float]:
        """Which part of a product's relevance goes to each factor."""
        a, b = (node.args[i] for i in BILINEAR[node.name])
        if not (self.carries(a) and self.carries(b)):
            return 1.0, 1.0
        held = self._held(node, a, b)
        if held is not None:
            return (0.0, 1.0) if held == 0 else (1.0, 0.0)
        of = self._of_scales if all(self.gates.strength(value) == SCALE for value in (a, b)) else self.factors
        m, n = of(a), of(b)
        return m / (m + n), n / (m + n)

    def of_glu(self, node: Node) -> float:
        """The part of the first half of a gated linear unit; the second is a sigmoid, one factor."""
        count = self.factors(node.args[0])
        return 1.0 if self.gated else count / (count + 1)

    def of_solve(self, node: Node) -> float:
        """The part that an element of the matrix of a triangular solve has of its products."""
        count = self.factors(node.args[0])
        return count / (count + 1) if self.carries(node.args[0]) else 0.0

    # ------------------------------------------------------------------------------ small

    def _factors(self, node: Node) -> list[Value]:
        """The two factors of a product, if both carry relevance and it is no function of one tensor."""
        if node.name not in BILINEAR or self._is_whole(node):
            return []
        factors = [node.args[i] for i in BILINEAR[node.name]]
        return factors if all(map(self.carries, factors)) else []

    def _is_whole(self, node: Node) -> bool:
        base = self.patterns.functions.get(node.index)
        return node.index in self.patterns.softmaxes or (base is not None and self.carries(base))

    def _held(self, node: Node, a: Value, b: Value) -> int | None:
        """Which factor is held constant."""
        if node.name in QUOTIENTS:
            return 1
        scales = [self.gates.strength(value) == SCALE for value in (a, b)]
        if any(scales):
            return None if all(scales) else scales.index(True)
        return self.gates.of(a, b) if self.gated and node.name not in MATRIX else None

    def factors(self, value: Value) -> int:
        """How many factors a value is a product of."""
        return self.counts.get(id(value), 1) or 1

    def _of_scales(self, value: Value) -> int:
        return self.scales.get(id(value), 1)

    def _scales(self, node: Node, inputs: list[Value], factors: list[Value]) -> int:
        if factors:
            return sum(map(self._of_scales, factors))
        return self._of_scales(inputs[0]) if len(inputs) == 1 and self._leads_on(node) else 1

    def _fewest(self, values: Sequence[Value]) -> int:
        """0 of exponentials alone, which are no factors."""
        return min((count for value in values if (count := self.counts.get(id(value), 1))), default=0)

    # ------------------------------------------------------------------------- the factors

    def _count(self, node: Node, inputs: list[Value], factors: list[Value]) -> int:
        if self.gates.is_scale(node):
            return 0
        if self._is_whole(node):
            return 1
        if node.index in self.patterns.means and not self.gated:
            return 1 + max((self.factors(value) for _, value in self.patterns.means[node.index].values), default=0)
        added = node.args[0] if node.name in ADDING and len(inputs) > len(factors or [0]) else None
        if added is not None and (not factors or self.counts.get(id(added), 1)):
            return 1  # a sum of two
        if factors:
            held = self._held(node, *factors)
            if held is not None:
                return self.factors(factors[1 - held])
            if all(self.gates.strength(value) == SCALE for value in factors):
                return 0
            return sum(map(self.factors, factors))
        if node.name == "glu":
            return self.factors(node.args[0]) + (not self.gated)
        if node.name == "linalg_solve_triangular":
            return self.factors(node.args[1]) if all(map(self.carries, node.args[:2])) else 1
        if node.name in SUMMATIONS:
            summands = [value for value in inputs if self.counts.get(id(value), 1)]
            if len(summands) > 1 and not any(id(value) in self.decayed for value in summands):
                return 1
        if self._leads_on(node):
            return self._fewest(inputs)
        return 1

    def _leads_on(self, node: Node) -> bool:
        """Whether a call makes nothing new of its input: it moves, scales, or sums it; or takes a constant off, as
        where a softmax is one."""
        if node.name == "_log_softmax":
            return self.gated
        return node.name in SHAPES | SELECTS | JOINS | SUMMATIONS | SCALINGS | POOLS - CENTRED

    def _decays(self, node: Node, inputs: list[Value], factors: list[Value]) -> bool:
        if self.gates.is_scale(node) or self._is_whole(node):
            return False
        if factors:
            held = self._held(node, *factors)
            if held is None:
                return any(id(value) in self.decayed for value in factors)
            return self.gates.strength(factors[held]) == SCALE or id(factors[1 - held]) in self.decayed
        return len(inputs) == 1 and self._leads_on(node) and id(inputs[0]) in self.decayed
