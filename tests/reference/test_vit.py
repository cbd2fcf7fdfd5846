"""Vision transformers against their slow twin, layer for layer the rules of Achtibat et al. 2024, Table 4."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers as tf

from lrpx import ATTNLRP, LRP, Epsilon, Explainer, Gamma, ZPlus
from lrpx.rules import AlphaBeta, Flat, WSquare, ZBox
from tests.reference import rules, vit

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4, "num_labels": 3, "initializer_range": 0.3,
}  # fmt: skip


def built(kind, config, seed=0):
    torch.manual_seed(seed)
    model = kind(config(**SIZES)).eval().double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name or "token" in name or "position" in name:
                weight.normal_(0, 0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


MODELS = {
    "vit": (tf.ViTForImageClassification, tf.ViTConfig),
    "deit": (tf.DeiTForImageClassificationWithTeacher, tf.DeiTConfig),
}
LAYERS = {  # of the recipe, and of the twin
    "plain": ({}, {}),
    "table 4": (
        {"convolution": Gamma(0.25), "linear": Gamma(0.05), "input_projection": Epsilon(0.1),
         "output_projection": Epsilon(0.2)},
        {"first": partial(rules.linear_gamma, gamma=0.25), "linear": partial(rules.linear_gamma, gamma=0.05),
         "into": partial(rules.linear_epsilon, epsilon=0.1), "out": partial(rules.linear_epsilon, epsilon=0.2)},
    ),
    "z+": (
        {"convolution": ZPlus(), "linear": ZPlus(), "input_projection": AlphaBeta(), "output_projection": Gamma(1.0)},
        {"first": rules.linear_z_plus, "linear": rules.linear_z_plus,
         "into": partial(rules.linear_alpha_beta, alpha=2.0, beta=1.0), "out": partial(rules.linear_gamma, gamma=1.0)},
    ),
}  # fmt: skip
FIRST = {
    "flat": (Flat(), lambda x, w, b, r: (rules.linear_flat(x, w, r), 0 * r)),
    "w2": (WSquare(), lambda x, w, b, r: (rules.linear_w_square(w, r), 0 * r)),
    "zB": (ZBox(-4.0, 5.0), lambda x, w, b, r: (rules.linear_z_box(x, w, r, -4.0, 5.0), 0 * r)),
    "zB by channel": (
        ZBox((-4.0, -5.0, -6.0), (5.0, 4.0, 6.0)),
        lambda x, w, b, r: (
            rules.linear_z_box(x, w, r, np.repeat([-4.0, -5.0, -6.0], 16), np.repeat([5.0, 4.0, 6.0], 16)), 0 * r),
    ),
    "ab": (AlphaBeta(3.0, 2.0), partial(rules.linear_alpha_beta, alpha=3.0, beta=2.0)),
}  # fmt: skip


def compared(model, recipe, family, chosen):
    pixels = np.clip(np.random.default_rng(0).normal(size=(3, 8, 8)), -3, 3)
    pixels[:, :2] = 0  # where no gradient could tell what a rule for the first layer gives
    expected = vit.explain(model, pixels, np.array([0.0, 1.0, -1.0]), family, vit.Rules(**chosen))
    found = Explainer(model)(torch.tensor(pixels), 1, 2, method=recipe, ledger=True)
    assert found.explained.value == pytest.approx(expected.value, abs=1e-12)
    parts = {"pixels": expected.pixels, "class token": expected.learned, "positions": expected.positions}
    for name, values in parts.items():
        assert np.abs(values).max() > 1e-3
        np.testing.assert_allclose(found.parts[name].values.numpy(), values, rtol=0, atol=1e-9, err_msg=name)
    kept = found.ledger.by_kind()
    assert kept.get("biases", 0) == pytest.approx(sum(expected.ledger.biases.values()), abs=1e-9)
    patches = expected.pixels.sum(0).reshape(2, 4, 2, 4).sum((1, 3))
    np.testing.assert_allclose(found.parts["patches"].values.numpy(), patches, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.relevance.numpy(), patches.flatten(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["attnlrp", "lrp"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_vision_transformer_and_its_twin(name, layers, family, implementation, monkeypatch):
    model = built(*MODELS[name])
    model.set_attn_implementation(implementation)
    # its eager attention casts the softmax to float32
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, **_: torch.softmax(x, dim))
    recipe, twin = LAYERS[layers]
    compared(model, replace(ATTNLRP if family == "attnlrp" else LRP, name="mine", **recipe), family, twin)


@pytest.mark.parametrize("name", FIRST)
def test_rules_of_the_first_layer(name):
    rule, twin = FIRST[name]
    compared(built(*MODELS["vit"]), replace(ATTNLRP, name="mine", first=rule), "attnlrp", {"first": twin})
