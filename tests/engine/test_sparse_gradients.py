"""Where most of a gradient is zero, in the language-model head and the last layer, the rest alone is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from lrpx import ATTNLRP, LRP, _kernels, propagate, rules
from lrpx.engine._layers import FEW_ROWS, MANY_OUTPUTS
from tests.reference import models


def by_linear(x, weight, bias):
    return linear(x, weight, bias)


def by_addmm(x, weight, bias):
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


@pytest.mark.parametrize("columns", [[], [7], [0, 4999], range(5000)])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6)])
def test_the_gradient_of_the_whole_product(columns, shape):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size, dtype=torch.float64) for size in (shape, (5000, 6), (5000,)))
    x.requires_grad_()
    bias.requires_grad_()
    value, expected = _kernels.for_sparse_gradients(linear)(x, weight, bias), linear(x, weight, bias)
    assert torch.equal(value, expected)
    seed = torch.zeros_like(expected)
    seed[..., list(columns)] = torch.randn(*shape[:-1], len(columns), dtype=torch.float64)
    found = torch.autograd.grad(value, (x, bias), seed)
    for one, other in zip(found, torch.autograd.grad(expected, (x, bias), seed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("columns", [[], [7], [0, 4999], range(5000)])
@pytest.mark.parametrize("rows", [[], [3], [0, 5], range(8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_and_columns_without_a_gradient(columns, rows, transposed):
    torch.manual_seed(0)
    op = by_addmm if transposed else by_linear
    x, weight, bias = (torch.randn(*size, dtype=torch.float64) for size in ((8, 6), (5000, 6), (5000,)))
    weight = weight.T if transposed else weight
    x.requires_grad_()
    bias.requires_grad_()
    value, expected = _kernels.for_sparse_gradients(op, transposed)(x, weight, bias), op(x, weight, bias)
    assert torch.equal(value, expected)
    seed = torch.zeros_like(expected)
    seed[torch.tensor(list(rows), dtype=torch.long)[:, None], torch.tensor(list(columns), dtype=torch.long)] = 1.7
    found = torch.autograd.grad(value, (x, bias), seed)
    for one, other in zip(found, torch.autograd.grad(expected, (x, bias), seed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_zero_in_the_first_row_and_column_alone():
    a = torch.randn(6, 5, dtype=torch.float64)
    a[0], a[:, 0] = 0, 0
    b = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.ops.lrpx.sparse_matmul(a, b), a @ b, rtol=1e-12, atol=1e-12)


def test_the_output_of_a_transposed_input_can_be_changed_in_place():
    """There the product is a view."""
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64)
    found = []
    for op in (_kernels.for_sparse_gradients(linear), linear):
        y = op(x.transpose(0, 1), weight)
        y.mul_(2)
        found.append(torch.autograd.grad(y[0, 1].sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_under_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, MANY_OUTPUTS))
    with propagate(model, LRP, ()) as trace, torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(6, 4))
    trace.explain(out[1, 5])
    assert trace.relevance("input")[1].abs().sum() > 0


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


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (models.tiny_gpt2, "transformer.h"),
        (models.tiny_llama, "model.layers"),
        (models.tiny_bert, "bert.encoder.layer"),
    ],
    ids=["gpt2", "llama", "bert"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_linear_layers_of_the_last_layer(make, layers, recompute, monkeypatch):
    model = make()
    last = model.get_submodule(layers)[-1]
    calls = []
    product = _kernels._sparse_product
    monkeypatch.setattr(_kernels, "_sparse_product", lambda a, b: calls.append(a) or product(a, b))
    with propagate(model, ATTNLRP, (), recompute=recompute) as trace:
        out = model(torch.arange(7)[None]).logits
    trace.explain(out[0, 4].max())
    assert len(calls) == sum(isinstance(module, (nn.Linear, Conv1D)) for module in last.modules())


HAS_ONEDNN = torch.backends.mkldnn.is_available()


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch was built without oneDNN")
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6), (0, 6)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_by_onednn(shape, has_bias, transposed):
    torch.manual_seed(0)
    op = (lambda x, weight, bias: linear(x, weight.T, bias)) if transposed else linear
    x, weight, bias = torch.randn(shape, requires_grad=True), torch.randn(50, 6), torch.randn(50, requires_grad=True)
    weight, bias = weight.T.contiguous() if transposed else weight, bias if has_bias else None
    value, expected = _kernels.by_onednn(op, transposed)(x, weight, bias), op(x, weight, bias)
    assert torch.equal(value, expected)
    seed = torch.randn(expected.shape)
    exact = seed.double() @ (weight.T if transposed else weight).double()
    found, by_torch = (torch.autograd.grad(each, x, seed, retain_graph=True)[0] for each in (value, expected))
    assert (found - exact).abs().max() <= 8 * (by_torch - exact).abs().max() if x.numel() else found.shape == x.shape
    both = torch.autograd.grad(value, x, torch.stack([seed, 2 * seed]), retain_graph=True, is_grads_batched=True)[0]
    torch.testing.assert_close(both, torch.stack([found, 2 * found]))
    if has_bias:
        for one, other in zip(
            torch.autograd.grad(value, bias, seed), torch.autograd.grad(expected, bias, seed), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.fixture
def products(monkeypatch):
    """The products that oneDNN was asked for, on a processor that prefers it."""
    asked, product = [], _kernels._product_by_onednn
    monkeypatch.setattr(_kernels, "_product_by_onednn", lambda a, b: asked.append(a) or product(a, b))
    monkeypatch.setattr(_kernels, "prefers_onednn", lambda: True)
    return asked


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch was built without oneDNN")
@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
@pytest.mark.parametrize("make", [models.tiny_llama, models.tiny_bert, models.tiny_gpt2])
def test_a_processor_that_prefers_onednn(recipe, make, products, monkeypatch):
    """The relevance is as near to that in float64 as where the products are torch's own."""
    found = {}
    for dtype, prefers in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        monkeypatch.setattr(_kernels, "prefers_onednn", lambda prefers=prefers: prefers)
        model = make().to(dtype)
        with propagate(model, recipe, ()) as trace:
            trace.explain(model(torch.arange(7)[None]).logits[0, -1, 3])
        assert bool(products) == prefers
        found[dtype, prefers] = torch.cat([trace.relevance(each.paths[0]).flatten().double() for each in trace.sources])
    exact = found[torch.float64, False]
    lost, by_torch = ((found[torch.float32, prefers] - exact).norm() for prefers in (True, False))
    assert lost <= 8 * by_torch


class AfterExponential(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.exp())


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch was built without oneDNN")
@pytest.mark.parametrize("layer", [nn.Linear(4, 8), Conv1D(8, 4)], ids=["linear", "addmm"])
def test_layers_that_keep_torchs_own_product(layer, products):
    """Behind an exponential, which is looked for by way of the product, with a ledger, and under another rule."""
    x = torch.randn(2, 4)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))

    def used(model, recipe=ATTNLRP, **settings):
        products.clear()
        with propagate(model, recipe, (), **settings) as trace:
            trace.explain(model(x).sum())
        return len(products)

    assert used(model)
    assert not used(AfterExponential(model))
    assert not used(model, ledger=True)
    assert not used(model, replace(ATTNLRP, linear=rules.Gamma(0.1)))
