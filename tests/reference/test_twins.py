"""The model twins check themselves: the real models' logits, conservation, padding, causality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers.models.t5.modeling_t5 import T5Attention

from tests.reference import bert, gpt2, llama, models, t5

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(3, 31, 9)
SOURCE = RNG.integers(3, 31, 12)
TYPES = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1])
VOCAB = 31
POSITION = 6


def one_hot(index: int) -> np.ndarray:
    return np.eye(VOCAB)[index]


CONTRAST = one_hot(5) - one_hot(9)


def near(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    assert_allclose(actual, expected, rtol=0, atol=atol)


@dataclass(frozen=True)
class Case:
    """One architecture: how to build it, run it, and run its twin on the same input."""

    build: Callable[..., Any]
    module: Any
    inputs: dict[str, np.ndarray]
    parts: tuple[str, ...]  # the twin's relevance of inputs
    layer: str  # name of layer i, as a prefix of its parameters

    def logits(self, model: Any) -> np.ndarray:
        batch = {name: torch.tensor(value)[None] for name, value in self.inputs.items()}
        with torch.no_grad():
            return model(**batch).logits[0].double().numpy()

    def explain(self, model: Any, recipe: str, weights: Any = CONTRAST, **extra: Any) -> Any:
        if self.module is t5:
            return t5.explain(model, SOURCE, TOKENS, POSITION, weights, recipe, **extra)
        extra = {k: v for k, v in self.inputs.items() if k != "input_ids"} | extra
        return self.module.explain(model, TOKENS, POSITION, weights, recipe, **extra)

    def inputs_total(self, found: Any) -> float:
        return sum(float(getattr(found, part).sum()) for part in self.parts)


CASES = {
    "llama": Case(models.tiny_llama, llama, {"input_ids": TOKENS}, ("tokens",), "model.layers"),
    "gpt2": Case(models.tiny_gpt2, gpt2, {"input_ids": TOKENS}, ("tokens", "positions"), "transformer.h"),
    "bert": Case(
        models.tiny_bert,
        bert,
        {"input_ids": TOKENS, "token_type_ids": TYPES},
        ("tokens", "positions", "token_types"),
        "bert.encoder.layer",
    ),
    "t5": Case(
        models.tiny_t5,
        t5,
        {"input_ids": SOURCE, "decoder_input_ids": TOKENS},
        ("source_tokens", "target_tokens"),
        "decoder.block",
    ),
}
RECIPES = ["lrp", "attnlrp"]
every_model = pytest.mark.parametrize("name", CASES)


def constants_total(found: Any) -> float:
    bias = sum(float(part.sum()) for part in getattr(found, "position_bias", {}).values())
    return bias + sum(found.biases.values()) + sum(found.softmax_residue.values())


@every_model
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("lifted", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_the_models_own(name: str, implementation: str, lifted: bool, seed: int) -> None:
    case = CASES[name]
    model = case.build(attn_implementation=implementation, lifted=lifted, seed=seed)
    logits = case.logits(model)
    assert logits.std() > 0.1
    cast = (not lifted and name in ("llama", "t5")) or (implementation == "eager" and name == "llama")
    found = case.explain(model, "lrp")
    near(found.logits, logits, 1e-5 if cast else 1e-9)
    assert abs(found.value - logits[POSITION] @ CONTRAST) < (1e-5 if cast else 1e-9)


@every_model
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cp_lrp_conserves_without_biases(name: str, seed: int) -> None:
    case = CASES[name]
    found = case.explain(models.zero_biases(case.build(seed=seed)), "lrp")
    assert abs(case.inputs_total(found) - found.value) < 1e-9
    assert all(residue == 0 for residue in found.softmax_residue.values())


@every_model
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ledger_closes_with_biases(name: str, recipe: str, seed: int) -> None:
    case = CASES[name]
    found = case.explain(case.build(seed=seed), recipe)
    assert abs(case.inputs_total(found) + constants_total(found) - found.value) < 1e-9


@every_model
def test_attnlrp_leaves_a_softmax_residue(name: str) -> None:
    case = CASES[name]
    found = case.explain(models.zero_biases(case.build()), "attnlrp")
    assert abs(case.inputs_total(found) - found.value) > 1e-3
    assert all(abs(residue) > 1e-6 for residue in found.softmax_residue.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layer_conserves_with_its_own_constants(name: str, recipe: str) -> None:
    case = CASES[name]
    found = case.explain(case.build(), recipe)
    for i in range(len(found.layers) - 1):
        own = f"{case.layer}.{i}."
        kept = sum(
            value
            for entries in (found.biases, found.softmax_residue)
            for entry, value in entries.items()
            if entry.startswith(own)
        )
        assert abs(kept) > 1e-3
        assert abs(found.layers[i].sum() + kept - found.layers[i + 1].sum()) < 1e-9


@every_model
@pytest.mark.parametrize("recipe", RECIPES)
def test_relevance_is_linear_in_the_weights(name: str, recipe: str) -> None:
    case, part = CASES[name], CASES[name].parts[0]
    model = case.build()
    both = case.explain(model, recipe, 2.0 * one_hot(5) - one_hot(9))
    for_5, for_9 = case.explain(model, recipe, one_hot(5)), case.explain(model, recipe, one_hot(9))
    near(getattr(both, part), 2.0 * getattr(for_5, part) - getattr(for_9, part))
    assert abs(both.value - (2.0 * for_5.value - for_9.value)) < 1e-12


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_later_tokens_get_nothing(name: str, recipe: str) -> None:
    found = CASES[name].explain(CASES[name].build(), recipe)
    tokens = found.target_tokens if name == "t5" else found.tokens
    assert (tokens[POSITION + 1 :] == 0).all()
    assert (np.abs(tokens[: POSITION + 1]) > 1e-9).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_right_padding_changes_nothing(name: str, recipe: str) -> None:
    case = CASES[name]
    model = case.build()
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 0, 0])
    padded = case.explain(model, recipe, attention_mask=mask)
    extra = {"token_type_ids": TYPES[:7]} if name == "bert" else {}
    short = case.module.explain(model, TOKENS[:7], POSITION, CONTRAST, recipe, **extra)
    near(padded.embeddings[:7], short.embeddings)
    assert (padded.embeddings[7:] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_left_padding_with_position_ids_changes_nothing(name: str, recipe: str) -> None:
    case = CASES[name]
    model = case.build()
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 1])
    places = np.maximum(np.cumsum(mask) - 1, 0)
    padded = case.explain(model, recipe, attention_mask=mask, position_ids=places)
    short = case.module.explain(model, TOKENS[2:], POSITION - 2, CONTRAST, recipe)
    near(padded.embeddings[2:], short.embeddings)
    assert (padded.embeddings[:2] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_t5_padded_source_gets_nothing(recipe: str) -> None:
    model = models.tiny_t5()
    mask = (np.arange(len(SOURCE)) < 8).astype(int)
    padded = t5.explain(model, SOURCE, TOKENS, POSITION, CONTRAST, recipe, attention_mask=mask)
    short = t5.explain(model, SOURCE[:8], TOKENS, POSITION, CONTRAST, recipe)
    near(padded.source_embeddings[:8], short.source_embeddings)
    assert (padded.source_embeddings[8:] == 0).all()
    near(padded.target_embeddings, short.target_embeddings)


@pytest.mark.parametrize("recipe", RECIPES)
def test_t5_with_a_plain_feed_forward(recipe: str) -> None:
    case = CASES["t5"]
    model = case.build(feed_forward_proj="relu")
    found = case.explain(model, recipe)
    near(found.logits, case.logits(model), 1e-9)
    assert abs(case.inputs_total(found) + constants_total(found) - found.value) < 1e-9


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_relative_buckets(bidirectional: bool) -> None:
    distances = np.arange(-150, 151)
    for buckets, longest in ((8, 16), (32, 128)):
        want = T5Attention._relative_position_bucket(torch.tensor(distances), bidirectional, buckets, longest)
        got = [t5.relative_bucket(int(d), bidirectional, buckets, longest) for d in distances]
        assert got == want.tolist()


def test_shapes() -> None:
    found = CASES["llama"].explain(models.tiny_llama(), "attnlrp")
    assert found.logits.shape == (9, VOCAB)
    assert found.embeddings.shape == (9, 16)
    assert [part.shape for part in found.layers + found.heads] == [(9, 16)] * 4
    assert [part.shape for part in found.neurons] == [(9, 24)] * 2
    found = CASES["t5"].explain(models.tiny_t5(), "attnlrp")
    assert [part.shape for part in found.encoder_layers + found.encoder_heads] == [(12, 16)] * 4
    assert [part.shape for part in found.decoder_layers + found.cross_heads] == [(9, 16)] * 4
    assert found.encoder_output.shape == (12, 16)
    assert {part.shape for part in found.position_bias.values()} == {(4, 12, 12), (4, 9, 9)}


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe"):
        CASES["gpt2"].explain(models.tiny_gpt2(), "gradient")
