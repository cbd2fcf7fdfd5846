"""The judge beside the engine: one model, one question, both recipes."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import lrpx
from lrpx.errors import LRPxError
from tests.reference.aten.judging import Recipe, explain
from tests.reference.aten.tape import JudgeError, Source, Tape, record, wide

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPES = {Recipe.ATTNLRP: lrpx.ATTNLRP, Recipe.LRP: lrpx.LRP}
TOLERANCE = 1e-9
"""How far the two may be apart, relative to the largest relevance."""


@dataclass(frozen=True)
class Compared:
    """What became of one recipe: how far apart the two are, or why that cannot be said.

    ``outcome`` is ``"agree"``, ``"differ"``, ``"not judged"`` (an operation that the judge has no formula for) or
    ``"refused"`` (by the engine).
    """

    outcome: str
    difference: float = 0.0
    reason: str = ""


def compare(
    model: nn.Module,
    inputs: dict[str, Any],
    logits: Callable[[Any], Tensor],
    value: Callable[[Tensor], Tensor],
    seeded: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Compared]:
    """Explain one value by the judge and by the engine, by copies of the model, in float64 throughout.

    Args:
        model: in float64.
        inputs: its keyword arguments.
        logits: what is explained in its output.
        value: one number of the logits.
        seeded: a context in which random numbers are the same each time.

    Returns:
        Of each recipe, by its name, the largest difference of any source's relevance, relative to the largest
        relevance of all.

    Raises:
        AssertionError: the two do not explain the same value.
    """
    try:
        tape, output = _recorded(model, inputs, logits, seeded)
    except JudgeError as error:
        return {recipe.value: Compared("not judged", reason=str(error)) for recipe in Recipe}
    return {recipe.value: _compared(recipe, tape, output, model, inputs, logits, value, seeded) for recipe in Recipe}


def _recorded(model: nn.Module, inputs: dict[str, Any], logits: Any, seeded: Any) -> tuple[Tape, Tensor]:
    floating = [v for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point() and "mask" not in k]
    own = copy.deepcopy(model)
    with wide(), seeded(), record(floating) as tape:
        output = logits(own(**inputs))
    return tape, output


def _compared(
    recipe: Recipe,
    tape: Tape,
    output: Tensor,
    model: nn.Module,
    inputs: dict[str, Any],
    logits: Any,
    value: Any,
    seeded: Any,
) -> Compared:
    own = copy.deepcopy(model)
    try:
        with wide(), seeded(), lrpx.propagate(own, RECIPES[recipe], observe=()) as trace:
            explained = trace.explain(value(logits(own(**inputs))))
    except LRPxError as error:
        return Compared("refused", reason=str(error))
    engine = [(source, trace.source_relevance(source).detach()) for source in trace.sources]
    sources = _matched(tape.sources, [source.value for source, _ in engine])
    if None in sources:
        return Compared("differ", float("inf"), f"the judge has no {engine[sources.index(None)][0].paths[0]}")
    try:
        verdict = explain(tape, output, value, recipe, sources)
    except JudgeError as error:
        return Compared("not judged", reason=str(error))
    assert torch.allclose(explained, verdict.value, rtol=1e-9, atol=1e-12), (explained, verdict.value)
    largest = max(float(relevance.abs().max()) for _, relevance in engine if relevance.numel())
    scale = largest or 1.0  # nothing of the value may come from the input
    apart = [
        (float((mine - relevance).abs().max()) / scale, source.paths[0])
        for (source, relevance), mine in zip(engine, verdict.relevance, strict=True)
        if relevance.numel()
    ]
    worst, where = max(apart)
    return Compared("agree", worst) if worst <= TOLERANCE else Compared("differ", worst, f"most at {where}")


def _matched(sources: list[Source], wanted: list[Tensor]) -> list[Source | None]:
    """Sources are told apart by their numbers; among equal ones, by their order.

    What the engine does not take for a source is a constant to both, as a fixed table of positions.
    """
    left = list(sources)
    found: list[Source | None] = []
    for tensor in wanted:
        one = next((source for source in left if _same(source.value.tensor, tensor)), None)
        found.append(one)
        if one is not None:
            left.remove(one)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
