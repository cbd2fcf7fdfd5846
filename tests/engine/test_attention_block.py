"""Attention as one block, under its Aumann–Shapley value: the slow twin, what it conserves, what it does not depend on,
and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import lrpx
from lrpx import rules
from lrpx.errors import MethodError
from lrpx.rules import AumannShapley
from tests.reference import attention_block as twin

BLOCK = replace(lrpx.ATTNLRP, name="block", softmax=AumannShapley(24))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relevance(out: Tensor, g: Tensor, *leaves: Tensor) -> list[np.ndarray]:
    return [
        (x.detach() * d).numpy() for x, d in zip(leaves, torch.autograd.grad(out, leaves, g), strict=True)
    ]  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["none", "admitted", "learned"]))
def test_the_fused_rule_is_its_slow_twin(seed: int, queries: int, keys: int, masked: str) -> None:
    q, k, v, g = (draw(n, 3, seed=seed + i) for i, n in enumerate((queries, keys, keys, queries)))
    mask, bias = None, np.zeros((queries, keys))
    if masked == "admitted":
        mask = draw(queries, keys, seed=seed + 4) > 0
        mask[:, 0] = True
        bias = np.where(mask.numpy(), 0.0, -np.inf)
    if masked == "learned":
        mask = draw(queries, keys, seed=seed + 4).requires_grad_()
        bias = mask.detach().numpy()
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([mask] if masked == "learned" else [])
    out = AumannShapley(24).attention(attention, q, k, v, mask, halves=True)
    assert torch.equal(out, attention(q.detach(), k.detach(), v.detach(), None if mask is None else mask.detach()))
    found = relevance(out, g, *leaves)  # type: ignore[arg-type]

    plain = [x.detach().numpy() for x in (q, k, v)]
    z = twin.scores(plain[0], plain[1], bias, 3**-0.5)
    of_scores, of_values = twin.aumann_shapley(z, plain[2], g.numpy())
    of_q, of_k, of_bias = twin.of_queries_and_keys(of_scores, z, *plain[:2], 3**-0.5)
    for one, other in zip(found, [of_q, of_k, of_values, of_bias], strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    assert sum(each.sum() for each in found) == pytest.approx(float((out.detach() * g).sum()), abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(-3, 3))
def test_it_depends_on_the_function_alone(seed: int, shift: float) -> None:
    """What a score is made of, and a number added to all scores of a row, change neither part."""
    q, k, v, g = (draw(4, 3, seed=seed + i).requires_grad_(i < 3) for i in range(4))
    mixed = draw(3, 3, seed=seed + 4)
    inverse = torch.linalg.inv(mixed)
    added = torch.full((4, 4), shift, dtype=torch.float64)
    rule = AumannShapley(24)
    base = relevance(rule.attention(attention, q, k, v, None, halves=True), g, q, k, v)
    a, b = ((x.detach() @ m).requires_grad_() for x, m in ((q, mixed), (k, inverse.T)))
    other = relevance(rule.attention(attention, a, b, v, None, halves=True), g, a, b, v)
    shifted = relevance(rule.attention(attention, q, k, v, added, halves=True), g, q, k, v)
    scale = abs(base[0]).sum() + abs(base[2]).sum()
    for changed in (other, shifted):
        np.testing.assert_allclose(changed[2], base[2], rtol=1e-7, atol=1e-7 * scale)
    assert other[0].sum() == pytest.approx(base[0].sum(), abs=1e-6 * scale)
    np.testing.assert_allclose(other[0].sum(-1), base[0].sum(-1), rtol=1e-6, atol=1e-6 * scale)


def test_scores_that_say_nothing_have_no_relevance() -> None:
    """Where all scores are 0, attention is the mean that it is by default, and the values have it all, as in CP-LRP."""
    k, v, g = (draw(5, 3, seed=i) for i in range(3))
    q = torch.zeros(5, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = AumannShapley(1).attention(attention, *leaves, None, halves=True)
    of_q, of_k, of_v = relevance(out, g, *leaves)
    assert not of_q.any()
    assert not of_k.any()
    (wanted,) = relevance(attention(q.detach(), k.detach(), v, None), g, v)
    np.testing.assert_allclose(of_v, wanted, rtol=1e-12)


def test_more_nodes_conserve_better() -> None:
    q, k, v, g = (4 * draw(6, 8, seed=i) if i < 2 else draw(6, 8, seed=i) for i in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    lost = []
    for nodes in (2, 8, 32, 128):
        out = AumannShapley(nodes).attention(attention, *leaves, None, halves=True)
        lost.append(abs(sum(r.sum() for r in relevance(out, g, *leaves)) - float((out.detach() * g).sum())))
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 1e-9


@pytest.mark.parametrize("text", ["The doors of the house", "The key to the cabinets of the boys"])
def test_a_whole_model_keeps_nothing_in_its_softmax(text: str) -> None:
    explainer = lrpx.Explainer.from_pretrained(dtype="float64")
    block = explainer(text, " are", " is", method=BLOCK, ledger=True)
    attnlrp = explainer(text, " are", " is", method="attnlrp", ledger=True)
    assert block.explained.value == attnlrp.explained.value
    assert block.ledger is not None
    assert attnlrp.ledger is not None
    assert block.ledger.closes(1e-6)
    kept, of_attnlrp = (each.ledger.by_kind().get("softmax residue", 0.0) for each in (block, attnlrp))  # type: ignore[union-attr]
    assert abs(kept) < 1e-6 < abs(of_attnlrp)


def test_a_batch_is_its_rows() -> None:
    explainer = lrpx.Explainer.from_pretrained(dtype="float64")
    texts = ["The doors", "The keys to the old cabinet of the boys are"]
    for text, together in zip(texts, explainer(texts, method=BLOCK), strict=True):
        alone = explainer(text, method=BLOCK)
        assert_close(alone.relevance, together.relevance, rtol=1e-7, atol=1e-7)


def test_attention_in_pieces_is_refused_by_name() -> None:
    explainer = lrpx.Explainer.from_pretrained(attn_implementation="eager")
    with pytest.raises(MethodError, match=r"self_attn.*'softmax'.*AumannShapley.*attn_implementation=\"sdpa\""):
        explainer("The doors of the house", method=BLOCK)
    with pytest.raises(MethodError, match="by itself"):
        AumannShapley()(torch.exp, torch.ones(2))


@pytest.mark.parametrize(
    ("recipe", "dropout", "said"),
    [
        (BLOCK, 0.5, "with dropout.*eval"),
        (replace(BLOCK, matmul=rules.constant), 0.0, "another rule for matmul.*uniform"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(recipe: lrpx.Recipe, dropout: float, said: str) -> None:
    class Attends(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    x = draw(1, 1, 3, 4, seed=1)
    model = Attends()
    with pytest.raises(MethodError, match=said), lrpx.propagate(model, recipe, ()) as trace:
        trace.explain(model(x).sum())


@pytest.mark.parametrize("nodes", [0, -1, 2.0, True])
def test_nodes_that_are_none(nodes: Any) -> None:
    with pytest.raises(MethodError, match="nodes is"):
        AumannShapley(nodes)


def test_it_is_written_to_a_file_and_read(tmp_path: Any) -> None:
    replace(BLOCK, softmax=AumannShapley(4)).save(tmp_path / "block.json")
    assert lrpx.Recipe.load(tmp_path / "block.json").softmax == AumannShapley(4)
