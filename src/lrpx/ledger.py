"""The ledger: where every unit of an explained value went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KINDS", "Entry", "Ledger"]

KINDS = (
    "tokens",
    "positions",
    "class token",
    "token types",
    "inputs",
    "attention",
    "MLPs",
    "biases",
    "constants",
    "softmax residue",
    "rule residue",
)
"""What an entry may be, in the order they are shown.

tokens, positions, token types: the embeddings of that name, and positions wherever a model meets them, under a recipe
that gives them relevance; class token: learned tokens that are joined to those of an image (class, distillation,
registers); inputs: floating-point inputs of the model;
attention, MLPs: what these parts of a layer write into the residual stream, where a method ends there (ALTI-Logit);
biases: parameters that are added; constants: buffers and numbers that are added;
softmax residue: relevance that a softmax neither passes on nor had from its inputs; rule residue: the same of any
other rule that does not conserve.
"""


@dataclass(frozen=True)
class Entry:
    """One place where relevance ended.

    Args:
        kind: one of :data:`KINDS`.
        name: the path of the embedding, the parameter or the module.
        value: its relevance, in the units of the explained value.
    """

    kind: str
    name: str
    value: float


@dataclass(frozen=True)
class Ledger:
    """Every place where the relevance of one explained value ended, each measured on its own.

    Args:
        entries: the places, in the order the model reached them; those of ALTI-Logit that a layer wrote come last. A
            place is left out where no more was measured than rounding may make of nothing.
        explained: the explained value, which the entries should sum to.

    >>> ledger = Ledger((Entry("tokens", "wte", 1.25), Entry("biases", "h.0.mlp.bias", -0.25)), explained=1.0)
    >>> ledger.total, ledger.difference, ledger.closes()
    (1.0, 0.0, True)
    >>> ledger.by_kind()
    {'tokens': 1.25, 'biases': -0.25}
    """

    entries: tuple[Entry, ...]
    explained: float

    @property
    def total(self) -> float:
        """The sum of all entries."""
        return sum(entry.value for entry in self.entries)

    @property
    def difference(self) -> float:
        """What is missing: the explained value less the total."""
        return self.explained - self.total

    @property
    def scale(self) -> float:
        """What a difference is measured by: the explained value or the largest entry, whichever is larger."""
        return max([abs(self.explained), *(abs(entry.value) for entry in self.entries)])

    def closes(self, tolerance: float = 1e-6) -> bool:
        """Whether nothing is missing, relative to :attr:`scale`."""
        return abs(self.difference) <= tolerance * self.scale

    def by_kind(self) -> Mapping[str, float]:
        """The sum over each kind of entry that occurs, in the order of :data:`KINDS`."""
        kinds = {entry.kind for entry in self.entries}
        return {kind: sum(e.value for e in self.entries if e.kind == kind) for kind in KINDS if kind in kinds}
