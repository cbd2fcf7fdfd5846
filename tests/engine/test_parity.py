"""Whole tiny models against their slow twins: tokens, positions, layers, heads and neurons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from lrpx.engine import Trace, propagate
from lrpx.recipes import ATTNLRP, LRP
from tests.reference import bert, gpt2, llama, models, t5

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(1)
TOKENS, SOURCE = RNG.integers(3, 31, 9), RNG.integers(3, 31, 12)
TYPES = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1])
POSITION = 6
LOGIT = np.eye(31)[5]
CONTRAST = np.eye(31)[5] - np.eye(31)[9]
RECIPES = {"lrp": LRP, "attnlrp": ATTNLRP}


@dataclass(frozen=True)
class Case:
    """Where the parts of the twin's explanation are in the model: source paths, and input paths by layer."""

    build: Callable[..., Any]
    twin: Any
    inputs: dict[str, np.ndarray]
    sources: dict[str, tuple[str, int]]
    places: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)

    def explain(self, recipe: str, weights: np.ndarray, **settings: Any) -> tuple[Trace, torch.Tensor, Any]:
        model = self.build(**(self.settings | settings))
        batch = {name: torch.tensor(value)[None] for name, value in self.inputs.items()}
        with propagate(model, RECIPES[recipe]) as trace:
            logits = model(**batch).logits[0, POSITION]
        value = trace.explain(logits @ torch.tensor(weights, dtype=logits.dtype))
        if self.twin is t5:
            return trace, value, t5.explain(model, SOURCE, TOKENS, POSITION, weights, recipe)
        extra = {name: array for name, array in self.inputs.items() if name != "input_ids"}
        return trace, value, self.twin.explain(model, TOKENS, POSITION, weights, recipe, **extra)

    def compare(self, recipe: str, weights: np.ndarray, rtol: float, **settings: Any) -> None:
        trace, value, want = self.explain(recipe, weights, **settings)
        assert_allclose(float(value), want.value, rtol=rtol, atol=rtol)
        for name, (path, call) in self.sources.items():
            found = trace.relevance(path, call=call)[0]
            near(found, getattr(want, name), rtol)
        for name, path in self.places.items():
            for layer, expected in enumerate(getattr(want, name)):
                near(trace.relevance(path.format(layer), of="input")[0], expected, rtol)


def near(found: torch.Tensor, expected: np.ndarray, rtol: float) -> None:
    """To ``rtol`` of the largest relevance at the place."""
    assert np.abs(expected).max() > 0
    assert_allclose(found.numpy(), expected, rtol=0, atol=rtol * max(1.0, np.abs(expected).max()))


T5 = Case(
    models.tiny_t5,
    t5,
    {"input_ids": SOURCE, "decoder_input_ids": TOKENS},
    {"source_embeddings": ("shared", 0), "target_embeddings": ("shared", 1)},
    {
        "encoder_layers": "encoder.block.{}",
        "decoder_layers": "decoder.block.{}",
        "encoder_heads": "encoder.block.{}.layer.0.SelfAttention.o",
        "decoder_heads": "decoder.block.{}.layer.0.SelfAttention.o",
        "cross_heads": "decoder.block.{}.layer.1.EncDecAttention.o",
        "encoder_neurons": "encoder.block.{}.layer.1.DenseReluDense.wo",
        "decoder_neurons": "decoder.block.{}.layer.2.DenseReluDense.wo",
    },
)
CASES = {
    "llama": Case(
        models.tiny_llama,
        llama,
        {"input_ids": TOKENS},
        {"embeddings": ("model.embed_tokens", 0)},
        {
            "layers": "model.layers.{}",
            "heads": "model.layers.{}.self_attn.o_proj",
            "neurons": "model.layers.{}.mlp.down_proj",
        },
    ),
    "gpt2": Case(
        models.tiny_gpt2,
        gpt2,
        {"input_ids": TOKENS},
        {"embeddings": ("transformer.wte", 0), "position_embeddings": ("transformer.wpe", 0)},
        {
            "layers": "transformer.h.{}",
            "heads": "transformer.h.{}.attn.c_proj",
            "neurons": "transformer.h.{}.mlp.c_proj",
        },
    ),
    "bert": Case(
        models.tiny_bert,
        bert,
        {"input_ids": TOKENS, "token_type_ids": TYPES},
        {
            "embeddings": ("bert.embeddings.word_embeddings", 0),
            "position_embeddings": ("bert.embeddings.position_embeddings", 0),
            "token_type_embeddings": ("bert.embeddings.token_type_embeddings", 0),
        },
        {
            "layers": "bert.encoder.layer.{}",
            "heads": "bert.encoder.layer.{}.attention.output.dense",
            "neurons": "bert.encoder.layer.{}.output.dense",
        },
    ),
    "t5 gated": T5,
    "t5 relu": Case(T5.build, T5.twin, T5.inputs, T5.sources, T5.places, {"feed_forward_proj": "relu"}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@every_case
@every_recipe
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("weights", [LOGIT, CONTRAST], ids=["logit", "contrast"])
def test_every_part_is_the_twins(case: Case, recipe: str, implementation: str, weights: np.ndarray) -> None:
    # transformers' eager Llama takes its softmax in float32, whatever comes in
    tolerance = 1e-6 if case.twin is llama and implementation == "eager" else 1e-9
    case.compare(recipe, weights, tolerance, attn_implementation=implementation)


@every_case
@every_recipe
def test_stock_norms_that_cast_to_float32(case: Case, recipe: str) -> None:
    case.compare(recipe, CONTRAST, 1e-6, lifted=False)


@every_case
@every_recipe
def test_other_weights(case: Case, recipe: str) -> None:
    case.compare(recipe, CONTRAST, 1e-9, seed=3)


@every_recipe
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_relative_positions_of_t5(recipe: str, implementation: str) -> None:
    trace, _, want = T5.explain(recipe, CONTRAST, attn_implementation=implementation)
    for stack in ("encoder", "decoder"):
        found = trace.relevance(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
        expected = sum(part.sum() for name, part in want.position_bias.items() if name.startswith(stack))
        assert abs(float(found.sum()) - expected) < 1e-9
        assert (abs(expected) > 1e-3) == (recipe == "attnlrp")


@every_case
def test_lrp_without_biases_sums_to_the_value(case: Case) -> None:
    model = models.zero_biases(case.build(**case.settings))
    batch = {name: torch.tensor(value)[None] for name, value in case.inputs.items()}
    with propagate(model, LRP) as trace:
        logits = model(**batch).logits[0, POSITION]
    value = trace.explain(logits @ torch.tensor(CONTRAST))
    total = sum(trace.source_relevance(source).sum() for source in trace.sources)
    assert abs(float(total - value)) < 1e-9
    for layer in range(2):
        path = next(iter(case.places.values())).format(layer)
        if case.twin is not t5:  # where the decoder also reads the encoder
            assert abs(float(trace.relevance(path, of="input").sum() - value)) < 1e-9


@every_recipe
def test_relevance_is_linear_in_the_explained_value(recipe: str) -> None:
    case = CASES["llama"]
    both, for_5, for_9 = (
        case.explain(recipe, weights)[0].relevance("model.embed_tokens")
        for weights in (2 * LOGIT - np.eye(31)[9], LOGIT, np.eye(31)[9])
    )
    assert_allclose(both, 2 * for_5 - for_9, rtol=0, atol=1e-12)
