"""What is asked of a model of any family: the same outputs, finite relevance, a closed ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lrpx.coverage._checking import judged
from lrpx.engine import propagate
from lrpx.recipes import ATTNLRP, LRP
from tests.reference.models import randomise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

RECIPES = (ATTNLRP, LRP)


def ready(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The model with random weights, none of them a constant, frozen (torch chooses kernels by that), in eval mode."""
    randomise(model, 0)
    return model.to(dtype).eval().requires_grad_(False)


def holds(model: nn.Module, run: Callable[[], Tensor], pick: Callable[[Tensor], Tensor], same: bool = True) -> None:
    """Check a model under both recipes.

    Args:
        model: in float64.
        run: one call of the model.
        pick: of its output, the value that is explained.
        same: whether the outputs are the same bit for bit; otherwise to rounding.
    """
    wanted = run().detach()
    for recipe in RECIPES:
        with propagate(model, recipe, observe=()) as trace:
            output = run()
            trace.explain(pick(output))
        close = {"rtol": 0, "atol": 0} if same else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(output.detach(), wanted, **close)
        plain = sources(trace)
        assert any(found.any() for found in plain), recipe.name
        assert all(torch.isfinite(found).all() for found in plain), recipe.name
        with propagate(model, recipe, observe=(), ledger=True) as trace:
            trace.explain(pick(run()))
        assert judged(trace.ledger(), conserves=recipe is LRP)[1] == ""
        for found, expected in zip(sources(trace), plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def sources(trace: Any) -> list[Tensor]:
    """The relevance of everything that a trace began at, without what gets none at all."""
    return [found for found in map(trace.source_relevance, trace.sources) if found.numel()]


def relevance(model: nn.Module, run: Callable[[], Tensor], pick: Callable[[Tensor], Tensor], recipe: Any) -> Tensor:
    """The relevance of each position: of all sources that have one, added up."""
    with propagate(model, recipe, observe=()) as trace:
        trace.explain(pick(run()))
    return sum(found.sum(-1) for found in sources(trace))


def alike(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Two models that compute the same get the same relevance, to rounding, under both recipes.

    Args:
        first: model, run and pick, as :func:`relevance` takes them.
        second: the same of the other.
    """
    torch.testing.assert_close(first[1](), second[1](), rtol=1e-10, atol=1e-12)
    for recipe in RECIPES:
        found, expected = relevance(*first, recipe), relevance(*second, recipe)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * max(1.0, float(expected.abs().max())))
