"""A wide linear layer for few rows, such as a language-model head, reads only the weights that it needs backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from lrpx import ATTNLRP, LRP, propagate, rules
from lrpx.engine.operations import FEW_ROWS, MANY_OUTPUTS


@pytest.mark.parametrize("columns", [[], [7], [0, 4999], range(5000)])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6)])
def test_the_gradient_of_the_whole_product(columns, shape):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size, dtype=torch.float64) for size in (shape, (5000, 6), (5000,)))
    x.requires_grad_()
    bias.requires_grad_()
    value, expected = rules.for_few_outputs(linear)(x, weight, bias), linear(x, weight, bias)
    assert torch.equal(value, expected)
    seed = torch.zeros_like(expected)
    seed[..., list(columns)] = torch.randn(*shape[:-1], len(columns), dtype=torch.float64)
    found = torch.autograd.grad(value, (x, bias), seed)
    for one, other in zip(found, torch.autograd.grad(expected, (x, bias), seed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


RECIPES = [ATTNLRP, LRP, ATTNLRP.at(linear=rules.Gamma(0.25)), ATTNLRP.at(linear=rules.Epsilon())]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_few_rows_get_what_they_get_among_many(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, MANY_OUTPUTS)).double()
    x = torch.randn(FEW_ROWS + 1, 4, dtype=torch.float64)
    found = []
    for rows in (2, len(x)):
        with propagate(model, recipe, (), ledger=True) as trace:
            out = model(x[:rows])
        trace.explain(out[1, 5] - out[0, 9])
        found.append((trace.relevance("input")[:2], trace.ledger().total))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
