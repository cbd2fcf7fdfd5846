"""Information flow routes: against the slow twin, thresholds, and what they are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose

from lrpx import Explainer
from lrpx.errors import MethodError
from lrpx.methods import InformationFlow
from tests import tiny
from tests.reference import models
from tests.reference.alti_networks import READERS
from tests.reference.information_flow import flow

IDS = [3, 14, 15, 9, 26, 5, 7]


def network(model, position):
    read = next(read for kind, read in READERS.items() if isinstance(model, kind))
    return read(model, IDS, position, [4])


@pytest.mark.parametrize("position", [6, 3])
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.neox, models.tiny_bert])
def test_it_is_its_twin(build, position):
    model = build()
    found = Explainer(model)(IDS, 4, method="ifr", position=position).relevance
    expected = flow(network(model, position), parallel=build is tiny.neox)
    assert_allclose(found.double().numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_kernel_is_no_matter(kernel):
    found = Explainer(models.tiny_gpt2(kernel))(IDS, 4, method="ifr").relevance
    assert_allclose(found.numpy(), flow(network(models.tiny_gpt2(), 6)), rtol=1e-9, atol=1e-9)


def stream_first(layer, x, attend):
    """As Cohere adds up."""
    attention, mlp = attend(layer.input_layernorm(x)), layer.mlp(layer.post_attention_layernorm(x))
    return x + attention + mlp


def one_after_the_other(layer, x, attend):
    read = layer.post_attention_layernorm(x)
    y = x + attend(layer.input_layernorm(x))
    return y + layer.mlp(read)


@pytest.mark.parametrize("spelling", [stream_first, one_after_the_other])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_parallel_block_is_one_sum_in_any_order(spelling, recompute, monkeypatch):
    model = tiny.neox()
    expected = flow(network(model, 6), parallel=True)

    def forward(layer, hidden_states, **kwargs):
        return spelling(layer, hidden_states, lambda x: layer.attention(x, **kwargs)[0])

    monkeypatch.setattr(type(model.gpt_neox.layers[0]), "forward", forward)
    found = Explainer(model, recompute=recompute)(IDS, 4, method="ifr").relevance
    assert_allclose(found.double().numpy(), expected, rtol=1e-9, atol=1e-9)


def by_hand(model, threshold):
    """One layer of GPT-2, with hooks for what is added to the stream."""
    seen = {}

    def keep(name):
        return lambda _, given, out: seen.__setitem__(name, (given, out[0] if isinstance(out, tuple) else out))

    block = model.transformer.h[0]
    handles = [
        module.register_forward_hook(keep(name))
        for name, module in {"block": block, "attn": block.attn, "proj": block.attn.c_proj, "mlp": block.mlp}.items()
    ]
    with torch.no_grad():
        out = model(torch.tensor([IDS]), output_attentions=True)
    for handle in handles:
        handle.remove()
    stream = seen["block"][0][0][0]
    mlp = seen["mlp"][1][0]
    middle = stream + seen["attn"][1][0]
    weights = out.attentions[0][0]
    with torch.no_grad():
        v = block.attn.c_attn(block.ln_1(stream)).split(16, -1)[2]
    projection = block.attn.c_proj.weight
    i = len(IDS) - 1

    def share(part, whole):
        return max(0.0, float(whole.abs().sum() - (part - whole).abs().sum()))

    own = [share(middle[i], middle[i] + mlp[i]), share(mlp[i], middle[i] + mlp[i])]
    kept = sum(each / sum(own) for each in own if each / sum(own) >= threshold)
    parts = [(i, share(stream[i], middle[i]))]
    for h in range(4):
        head = slice(4 * h, 4 * h + 4)
        parts += [(j, share(weights[h, i, j] * v[j, head] @ projection[head], middle[i])) for j in range(i + 1)]
    total = sum(each for _, each in parts)
    found = np.zeros(len(IDS))
    for j, each in parts:
        if each / total >= threshold:
            found[j] += kept * each / total
    return found


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.45])
def test_routes_above_a_threshold(threshold):
    build = lambda kernel: tiny.build(  # noqa: E731
        tf.GPT2LMHeadModel, tf.GPT2Config(**tiny.GPT2_SIZES | tiny.GPT2_TOKENS | {"n_layer": 1}), kernel
    )
    found = Explainer(build("sdpa"))(IDS, 4, method=InformationFlow("own", threshold)).relevance
    assert_allclose(found.double().numpy(), by_hand(build("eager"), threshold), rtol=1e-9, atol=1e-9)
    assert found.sum() <= 1 + 1e-12


def test_it_is_not_alti():
    explain = Explainer(models.tiny_gpt2())
    assert (explain(IDS, 4, method="ifr").relevance - explain(IDS, 4, method="alti").relevance).abs().max() > 1e-3


def test_fields_that_are_none():
    with pytest.raises(MethodError, match="the threshold of ifr is 2; pass a number from 0 to 1"):
        Explainer(models.tiny_gpt2())(IDS, method=InformationFlow(threshold=2))
    with pytest.raises(MethodError, match="ifr has no ledger"):
        Explainer(models.tiny_gpt2())(IDS, method="ifr", ledger=True)
    assert InformationFlow(threshold=0.1).describe() != InformationFlow().describe()


def test_rows_with_unlike_numbers_of_questions():
    explainer = Explainer(models.tiny_llama())
    found = explainer([IDS, IDS[:3]], [[4, 5], 6], method="ifr")
    for each, ids, target in zip((*found[0], found[1]), (IDS, IDS, IDS[:3]), (4, 5, 6), strict=True):
        alone = explainer(ids, target, method="ifr").relevance
        assert_allclose(each.relevance.numpy(), alone.numpy(), rtol=1e-9, atol=1e-12)
