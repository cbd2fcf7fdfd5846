"""A ledger as every view shows it: from zero, kind by kind, to the explained value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

from lrpx._views.picture import aligned, number, one_line, share

if TYPE_CHECKING:
    from lrpx.attribution import Attribution
    from lrpx.ledger import Entry, Ledger

MEANINGS: Final = {
    "tokens": "what the tokens are",
    "positions": "where the tokens stand",
    "class token": "learned tokens beside those of an image",
    "token types": "which text the tokens are of",
    "inputs": "numbers given to the model",
    "attention": "what the attention heads bring from the tokens",
    "MLPs": "what the feed-forward parts add",
    "biases": "learned numbers that are added, whatever the input",
    "constants": "fixed numbers that are added, such as the ε of a norm",
    "softmax residue": "what the softmaxes keep for themselves",
    "rule residue": "what other rules keep for themselves",
}
"""Each kind of entry in a few words."""


@dataclass(frozen=True)
class Line:
    """One entry: its name on one line with nothing invisible, its value, its share of the explained value, and its
    size as a share of the largest entry, within [-1, 1]."""

    name: str
    value: float
    share: float | None
    ratio: float


@dataclass(frozen=True)
class Step:
    """All entries of one kind: where the running sum stands before and after them, within [0, 1] of the whole range."""

    kind: str
    value: float
    share: float | None
    start: float
    end: float
    lines: tuple[Line, ...]

    @property
    def meaning(self) -> str:
        """The kind in a few words."""
        return MEANINGS[self.kind]


@dataclass(frozen=True)
class Waterfall:
    """The steps, and the places of nothing, of their sum and of the explained value, within [0, 1] of the range."""

    steps: tuple[Step, ...]
    zero: float
    end: float
    goal: float
    total: float
    share: float | None
    verdict: str
    closes: bool
    limit: float

    def number(self, value: float) -> str:
        """A value with as many decimals as give the largest sum three digits, alike for all."""
        return aligned(value, self.limit)

    def largest(self, count: int) -> tuple[tuple[Step, Line], ...]:
        """The largest entries of the kinds that have several, largest first."""
        found = [(step, line) for step in self.steps if len(step.lines) > 1 for line in step.lines]
        return tuple(sorted(found, key=lambda each: -abs(each[1].value))[:count])


def waterfall(a: Attribution) -> Waterfall | None:
    """Lay out the ledger of an attribution, if it has one."""
    ledger = a.ledger
    if ledger is None:
        return None
    sums = ledger.by_kind()
    reached = [0.0, *accumulate(sums.values())]
    low, high = min(*reached, ledger.explained), max(*reached, ledger.explained)

    def place(value: float) -> float:
        part = (value - low) / (high - low) if high > low else 0.0
        return min(1.0, max(0.0, part)) if math.isfinite(part) else 0.0

    biggest = max((abs(entry.value) for entry in ledger.entries), default=0.0)

    def line(entry: Entry) -> Line:
        ratio = entry.value / biggest if biggest else 0.0
        return Line(one_line(entry.name), entry.value, share(entry.value, ledger.explained), ratio)

    def lines(kind: str) -> tuple[Line, ...]:
        ranked = sorted(ledger.entries, key=lambda entry: -abs(entry.value))
        return tuple(line(entry) for entry in ranked if entry.kind == kind)

    steps = (
        Step(kind, value, share(value, ledger.explained), place(before), place(before + value), lines(kind))
        for (kind, value), before in zip(sums.items(), reached[:-1], strict=True)
    )
    return Waterfall(
        steps=tuple(steps),
        zero=place(0.0),
        end=place(reached[-1]),
        goal=place(ledger.explained),
        total=ledger.total,
        share=share(ledger.total, ledger.explained),
        verdict=_verdict(ledger, a.provenance.dtype),
        closes=ledger.closes(_tolerance(a.provenance.dtype)),
        limit=max([abs(ledger.explained), *map(abs, sums.values())]),
    )


def _verdict(ledger: Ledger, dtype: str) -> str:
    """Whether the ledger closes, in words, with the difference."""
    if not ledger.difference:
        return "It closes: nothing is missing."
    missing = number(ledger.difference)
    if ledger.closes(_tolerance(dtype)):
        return f"It closes to the precision of {one_line(dtype)}; the difference is {missing}."
    part = share(ledger.difference, ledger.explained)
    return f"It does not close: {missing}{'' if part is None else f' ({part:.2%})'} is missing."


def _tolerance(dtype: str) -> float:
    """What rounding may cost a sum of many values of a dtype, relative: the root of its precision, at least 1e-6."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return 1e-6
    return max(1e-6, math.sqrt(torch.finfo(found).eps))
