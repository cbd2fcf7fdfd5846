"""Positions as inputs (PA-LRP): against slow twins with explicit rules, in every spelling, and what must not change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from transformers.models.bloom import modeling_bloom

from lrpx import ATTNLRP, LRP, PA_LRP, Explainer, Task, rules
from lrpx.engine import Tap, propagate
from lrpx.engine._positions import Positions
from lrpx.errors import MethodError, TraceError
from tests import tiny
from tests.pictures import build as pictured
from tests.pictures import image
from tests.reference import bert, bloom, deit, gpt2, llama, models, t5

if TYPE_CHECKING:
    from lrpx.engine import Trace

RNG = np.random.default_rng(2)
TOKENS, SOURCE = RNG.integers(3, 31, 9), RNG.integers(3, 31, 12)
POSITION = 6
CONTRAST = np.eye(31)[5] - np.eye(31)[9]


def run(model: Any, recipe: Any = PA_LRP, *, weights: Any = CONTRAST, ledger: bool = True, **inputs: Any) -> Trace:
    batch = {name: torch.as_tensor(value) for name, value in inputs.items()}
    batch = {name: value[None] if value.ndim == 1 else value for name, value in batch.items()}
    with torch.no_grad():
        plain = model(**batch).logits
    with propagate(model, recipe, observe=(), ledger=ledger) as trace:
        logits = model(**batch).logits
    assert_allclose(logits.detach(), plain, rtol=0, atol=1e-12 if model.config.model_type == "t5" else 0)
    trace.explain(logits[0, POSITION] @ torch.as_tensor(weights, dtype=logits.dtype))
    return trace


def tokens_of(trace: Trace) -> np.ndarray:
    return trace.source_relevance(trace.sources[0])[0].sum(-1).numpy()


def positions_of(trace: Trace) -> dict[str, np.ndarray]:
    return {kept.layer: kept.relevance[0].numpy() for kept in trace.positions()}


def near(found: Any, expected: Any, atol: float = 1e-9) -> None:
    assert np.abs(expected).max() > 1e-6
    assert_allclose(found, expected, rtol=0, atol=atol)


# ------------------------------------------------------------------------------- slow twins


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_llama_is_its_twin(implementation: str) -> None:
    model = models.tiny_llama(implementation)
    trace = run(model, input_ids=TOKENS)
    want = llama.explain(model, TOKENS, POSITION, CONTRAST, "pa-lrp")
    tolerance = 1e-9 if implementation == "sdpa" else 1e-6  # transformers' eager Llama takes its softmax in float32
    near(tokens_of(trace), want.tokens, tolerance)
    for layer, expected in enumerate(want.angles):
        near(positions_of(trace)[f"model.layers.{layer}"], expected, tolerance)
    ledger = trace.ledger()
    assert ledger.closes(1e-9 if implementation == "sdpa" else 1e-6)
    assert abs(ledger.by_kind()["positions"] - sum(each.sum() for each in want.angles)) < tolerance


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_learned_positions_are_the_twins(name: str) -> None:
    build, twin = {"gpt2": (models.tiny_gpt2, gpt2), "bert": (models.tiny_bert, bert)}[name]
    extra = {"token_type_ids": np.array([0, 0, 0, 0, 1, 1, 1, 1, 1])} if name == "bert" else {}
    trace = run(build(), input_ids=TOKENS, **extra)
    want: Any = twin.explain(build(), TOKENS, POSITION, CONTRAST, "attnlrp", **extra)
    near(tokens_of(trace), want.tokens)
    assert list(positions_of(trace)) == ["input"]
    near(positions_of(trace)["input"], want.positions)
    assert trace.ledger().closes(1e-9)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [5, 9])  # 5: encoder and decoder are as long as each other
def test_t5_is_its_twin(implementation: str, length: int) -> None:
    model = models.tiny_t5(implementation)
    source, target = (SOURCE[:5], TOKENS[:5]) if length == 5 else (SOURCE, TOKENS)
    weights = np.eye(31)[7]
    with propagate(model, PA_LRP, observe=()) as trace:
        logits = model(input_ids=torch.tensor(source)[None], decoder_input_ids=torch.tensor(target)[None]).logits
    trace.explain(logits[0, 4, 7])
    want = t5.explain(model, source, target, 4, weights, "attnlrp")
    near(tokens_of(trace), want.source_tokens)
    found = trace.positions()
    assert [kept.relevance.shape[1] for kept in found] == [len(source)] * 2 + [len(target)] * 2
    assert [kept.source is trace.sources[stack] for kept, stack in zip(found, (0, 0, 1, 1), strict=True)] == [True] * 4
    for kept in found:
        (bias,) = (part for name, part in want.position_bias.items() if name.startswith(kept.layer + "."))
        near(kept.relevance[0], bias.sum((0, 1)))


@pytest.fixture
def lifted_bloom(monkeypatch: pytest.MonkeyPatch) -> Any:
    """BLOOM without its cast to float32 in the softmax."""
    functions = SimpleNamespace(
        softmax=lambda x, dim, dtype: torch.softmax(x, dim), dropout=torch.nn.functional.dropout
    )
    monkeypatch.setattr(modeling_bloom, "F", functions)
    return tiny.bloom()


def test_bloom_is_its_twin(lifted_bloom: Any) -> None:
    trace = run(lifted_bloom, input_ids=TOKENS)
    want = bloom.explain(lifted_bloom, TOKENS, POSITION, CONTRAST)
    near(tokens_of(trace), want.tokens)
    for layer, expected in enumerate(want.positions):
        near(positions_of(trace)[f"transformer.h.{layer}"], expected.sum(0))
    assert trace.ledger().closes(1e-9)
    own = sum(map(np.sum, want.positions)) + want.tokens.sum() + sum(want.biases.values())
    assert abs(own + sum(want.softmax_residue.values()) - want.value) < 1e-9


# ------------------------------------------------------------------- what must not change


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
def test_other_recipes_take_positions_for_constants(recipe: Any) -> None:
    trace = run(models.tiny_llama(), recipe, input_ids=TOKENS)
    with pytest.raises(TraceError, match="constants under this recipe"):
        trace.positions()


def test_a_rule_that_gives_positions_nothing_is_attnlrp_bit_for_bit() -> None:
    model = models.tiny_llama()
    plain = run(model, ATTNLRP, input_ids=TOKENS, ledger=False)
    # in another layer, where no module is: the tap listens, and changes nothing
    apart = run(model, ATTNLRP.at("model.norm", position=rules.uniform), input_ids=TOKENS, ledger=False)
    assert torch.equal(apart.source_relevance(apart.sources[0]), plain.source_relevance(plain.sources[0]))
    assert apart.positions() == []


def test_layers_of_their_own() -> None:
    trace = run(models.tiny_llama(), ATTNLRP.at(layers=1, position=rules.uniform), input_ids=TOKENS)
    assert list(positions_of(trace)) == ["model.layers.1"]
    assert trace.ledger().closes(1e-9)


# -------------------------------------------------------------------------------- spellings

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 64,
}  # fmt: skip
KV = {"num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4, "rope_theta": 10000.0}


def gptj() -> Any:
    return tiny.build(tf.GPTJForCausalLM, tf.GPTJConfig(**tiny.GPT2_SIZES, rotary_dim=4), "eager")


def mpt() -> Any:
    return tiny.build(tf.MptForCausalLM, tf.MptConfig(vocab_size=31, d_model=16, n_layers=2, n_heads=4), "eager")


def falcon(**settings: Any) -> Any:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tiny.build(tf.FalconForCausalLM, tf.FalconConfig(**sizes, **settings))


def llama4() -> Any:
    sizes = SIZES | KV | {"head_dim": 4, "intermediate_size_mlp": 24, "num_local_experts": 2, "pad_token_id": 0}
    return tiny.build(tf.Llama4ForCausalLM, tf.Llama4TextConfig(**sizes))


SPELLINGS = {
    "rotate-half": (models.tiny_llama, 2),
    "heads as wide as the text": (lambda: models.tiny_llama(head_dim=8, num_attention_heads=8), 2),
    "partial": (tiny.neox, 2),
    "interleaved": (gptj, 2),
    "codegen": (tiny.codegen, 2),
    "YaRN": (lambda: models.tiny_llama(rope_parameters=YARN), 2),
    "dynamic": (lambda: models.tiny_llama(rope_parameters=DYNAMIC), 2),
    "complex": (llama4, 2),
    "ALiBi by baddbmm": (tiny.bloom, 2),
    "ALiBi from a longer table": (mpt, 2),
    "ALiBi in a mask": (lambda: falcon(alibi=True), 2),
    "learned": (models.tiny_gpt2, 1),
    "learned, by the mask": (tiny.opt, 1),
    "learned, by the ids": (tiny.roberta, 1),
}


@pytest.mark.parametrize(("build", "count"), SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("length", [8, 4, 2])  # as many as heads, and as wide as they are
def test_every_spelling_is_met(build: Any, count: int, length: int) -> None:
    model = build().requires_grad_()  # as users' models are
    ids = torch.tensor(np.tile(TOKENS[:length], (3, 1)))
    ids[1] = ids[1].flip(0)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        logits = model(input_ids=ids).logits
    trace.explain(logits[:, -1, 5].sum())
    found = trace.positions()
    assert len(found) == count
    assert all(kept.relevance.shape == (3, length) for kept in found)
    assert trace.ledger().closes(1e-6)
    rows = []
    for row in ids:
        with propagate(model, PA_LRP, observe=()) as alone:
            value = model(input_ids=row[None]).logits[0, -1, 5]
        alone.explain(value)
        rows.append([kept.relevance[0] for kept in alone.positions()])
    for at, kept in enumerate(found):
        assert_allclose(kept.relevance, torch.stack([row[at] for row in rows]), rtol=0, atol=1e-7)
        assert (kept.relevance[:, -2:].abs() > 1e-12).any()


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(3, 30), min_size=1, max_size=8), min_size=1, max_size=3),
    side=st.sampled_from(["left", "right"]),
    learned=st.booleans(),
)
def test_padding_changes_nothing_and_has_nothing(rows: list[list[int]], side: str, learned: bool) -> None:
    model = models.tiny_gpt2() if learned else models.tiny_llama()
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    spans = [slice(width - len(row), width) if side == "left" else slice(len(row)) for row in rows]
    for at, (row, span) in enumerate(zip(rows, spans, strict=True)):
        ids[at, span], mask[at, span] = torch.tensor(row), 1
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
        value = torch.stack([logits[at, span][-1, 5] for at, span in enumerate(spans)]).sum()
    trace.explain(value)
    assert trace.ledger().closes(1e-9)
    for at, (row, span) in enumerate(zip(rows, spans, strict=True)):
        with propagate(model, PA_LRP, observe=()) as alone:
            one = model(input_ids=torch.tensor([row])).logits[0, -1, 5]
        alone.explain(one)
        for kept, mine in zip(trace.positions(), alone.positions(), strict=True):
            assert_allclose(kept.relevance[at, span].numpy(), mine.relevance[0].numpy(), rtol=0, atol=1e-9)
            assert not kept.relevance[at][mask[at] == 0].any()


# ------------------------------------------------------------------------------------ heads


def by_head(model: Any, recipe: Any = PA_LRP, weights: Any = CONTRAST, **inputs: Any) -> Trace:
    batch = {name: torch.as_tensor(value)[None] for name, value in inputs.items()}
    with propagate(model, recipe, observe=(), ledger=True, taps=[Positions(model, by_head=True)]) as trace:
        logits = model(**batch).logits
    trace.explain(logits[0, POSITION] @ torch.as_tensor(weights, dtype=logits.dtype))
    return trace


def test_heads_of_queries_and_of_keys_are_the_twins() -> None:
    model = models.tiny_llama()
    found = by_head(model, input_ids=TOKENS).positions(by_head=True)
    want = llama.explain(model, TOKENS, POSITION, CONTRAST, "pa-lrp").angles_by_head
    assert [(kept.layer, kept.heads) for kept in found] == [(f"model.layers.{i}", n) for i in (0, 1) for n in (4, 2)]
    for kept, expected in zip(found, (each for layer in want for each in layer), strict=True):
        near(kept.relevance[0], expected)


def test_heads_of_alibi_are_the_twins(lifted_bloom: Any) -> None:
    found = by_head(lifted_bloom, input_ids=TOKENS).positions(by_head=True)
    want = bloom.explain(lifted_bloom, TOKENS, POSITION, CONTRAST).positions
    for kept, expected in zip(found, want, strict=True):
        near(kept.relevance[0], expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_heads_of_relative_biases_are_the_twins(implementation: str) -> None:
    model = models.tiny_t5(implementation)
    trace = by_head(model, weights=np.eye(31)[7], input_ids=SOURCE, decoder_input_ids=TOKENS)
    want = t5.explain(model, SOURCE, TOKENS, POSITION, np.eye(31)[7], "attnlrp")
    for kept in trace.positions(by_head=True):
        (bias,) = (part for name, part in want.position_bias.items() if name.startswith(kept.layer + "."))
        near(kept.relevance[0], bias.sum(1))


def heads_sum_to_what_they_were(model: Any, layers: int, heads: set[int | None], rows: int, **inputs: Any) -> None:
    found = []
    for taps in ([], [Positions(model, by_head=True)]):
        with propagate(model, PA_LRP, observe=(), ledger=True, taps=taps) as trace:
            logits = model(**inputs).logits
        trace.explain(logits.reshape(rows, -1)[:, 5 % logits.shape[-1]].sum())
        found.append(trace)
    plain, several = found
    apart, together = several.positions(by_head=True), several.positions()
    assert {kept.heads for kept in apart} == heads
    assert len(together) == layers
    assert several.ledger().closes(1e-6)
    for mine, kept in zip(together, plain.positions(), strict=True):
        parts = [each.relevance for each in apart if each.layer == mine.layer and each.source is mine.source]
        assert_allclose(sum(part.sum(1) for part in parts), kept.relevance, rtol=0, atol=1e-9)
        assert_allclose(mine.relevance, kept.relevance, rtol=0, atol=1e-9)
    with pytest.raises(TraceError, match="heads were not kept apart"):
        plain.positions(by_head=True)


HEADS: dict[str, set[int | None]] = {
    "rotate-half": {2, 4}, "heads as wide as the text": {2, 8}, "YaRN": {2, 4}, "dynamic": {2, 4}, "complex": {2, 4},
    "learned": {None}, "learned, by the mask": {None}, "learned, by the ids": {None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *((name, length) for name in SPELLINGS for length in (8, 4)),
        ("rotate-half", 1),
        ("interleaved", 1),
        ("learned", 1),
    ],
)
def test_heads_sum_to_what_they_were_in_every_spelling(name: str, length: int) -> None:
    build, count = SPELLINGS[name]
    ids = torch.tensor(np.tile(TOKENS[:length], (2, 1)))
    ids[1] = ids[1].flip(0)
    for rows in (2, 1):
        heads_sum_to_what_they_were(build(), count, HEADS.get(name, {4}), rows, input_ids=ids[:rows])


PIXELS = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8,
    "patch_size": 2, "num_labels": 3,
}  # fmt: skip
SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}
IMAGES = {
    "ViT": (lambda: tiny.build(tf.ViTForImageClassification, tf.ViTConfig(**VIT)), {"input": 17}),
    "DeiT": (lambda: tiny.build(tf.DeiTForImageClassification, tf.DeiTConfig(**VIT)), {"input": 18}),
    "BEiT": (
        lambda: tiny.build(tf.BeitForImageClassification, tf.BeitConfig(**VIT, use_relative_position_bias=True)),
        {"beit.layers.0": 17, "beit.layers.1": 17},
    ),
    "Swin": (  # positions inside a window of 2 × 2, all windows together
        lambda: tiny.build(tf.SwinForImageClassification, tf.SwinConfig(**SWIN, num_labels=3)),
        {"swin.encoder.layers.0": 4, "swin.encoder.layers.1": 4},
    ),
}


@pytest.mark.parametrize(("build", "places"), IMAGES.values(), ids=IMAGES)
def test_images_have_positions(build: Any, places: dict[str, int]) -> None:
    model = build().requires_grad_()
    for _ in range(2):  # BEiT keeps what it has computed from positions
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            logits = model(pixel_values=PIXELS).logits
        trace.explain(logits[:, 1].sum())
        found = trace.positions()
        assert {kept.layer: kept.relevance.shape for kept in found} == {
            layer: (2, count) for layer, count in places.items()
        }
        assert trace.ledger().closes(1e-9)
    with propagate(model, PA_LRP, observe=()) as alone:
        value = model(pixel_values=PIXELS[1:]).logits[0, 1]
    alone.explain(value)
    for mine, one in zip(found, alone.positions(), strict=True):
        near(mine.relevance[1].numpy(), one.relevance[0].numpy())


@pytest.mark.parametrize(("name", "heads"), [("BEiT", {4}), ("Swin", {2}), ("ViT", {None})])
def test_heads_of_images_sum_to_what_they_were(name: str, heads: set[int | None]) -> None:
    build, places = IMAGES[name]
    heads_sum_to_what_they_were(build(), len(places), heads, 2, pixel_values=PIXELS)


def test_deberta_has_heads_of_queries_and_keys() -> None:
    heads_sum_to_what_they_were(deberta(), 3, {None, 4}, 1, input_ids=torch.tensor(TOKENS)[None])


class Map(torch.nn.Module):
    """A table of positions for each place of a map, as SAM has it, or channels first."""

    def __init__(self, *, channels_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.channels_first = channels_first
        self.patches = torch.nn.Conv2d(3, 4, 4, 4)
        self.where = torch.nn.Parameter(torch.randn(1, 4, 2, 4) if channels_first else torch.randn(1, 2, 4, 4))
        self.head = torch.nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.patches(x)
        if self.channels_first:
            return self.head((made + self.where).flatten(2).mT).sum(1)
        return self.head((made.permute(0, 2, 3, 1) + self.where).flatten(1, 2)).sum(1)


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_table_for_a_map_has_a_number_for_each_place(channels_first: bool) -> None:
    model = Map(channels_first=channels_first).double().eval()
    pixels = torch.randn(2, 3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    table = model.where[0].flatten(1).T if channels_first else model.where[0].flatten(0, 1)
    want = (table @ model.head.weight[1]).detach().numpy()
    for recipe in (PA_LRP, ATTNLRP):
        explainer = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
        for found in explainer(pixels, 1, method=recipe if recipe is ATTNLRP else "pa-lrp"):
            part = found.parts["positions"]
            near(part.values.numpy() if recipe is ATTNLRP else part.values[0].numpy(), want, 1e-6)
        with propagate(model, recipe, observe=(), ledger=True) as trace:
            logits = model(pixels[:1])
        trace.explain(logits[0, 1])
        assert trace.ledger().closes(1e-9)
        assert abs(trace.ledger().by_kind()["positions"] - want.sum()) < 1e-9


@pytest.mark.parametrize("recipe", [PA_LRP, ATTNLRP], ids=["pa-lrp", "attnlrp"])
def test_the_tables_of_sam_are_positions(recipe: Any) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 24, "output_channels": 8}
    config = tf.SamVisionConfig(**sizes, image_size=8, patch_size=2, window_size=0, use_rel_pos=False)
    model = tiny.build(tf.SamVisionModel, config)
    with torch.no_grad():
        model.vision_encoder.pos_embed.normal_()
    with propagate(model, recipe, observe=(), ledger=True) as trace:
        out = model(pixel_values=PIXELS).last_hidden_state
    trace.explain(out[:, 0, 0, 0].sum())
    assert trace.ledger().closes(1e-9)
    assert abs(trace.ledger().by_kind()["positions"]) > 1e-6
    if recipe is PA_LRP:
        (kept,) = trace.positions()
        assert kept.relevance.shape == (2, 16)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_distances_of_sam_are_the_keys_positions(implementation: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 24, "output_channels": 8}
    config = tf.SamVisionConfig(**sizes, image_size=8, patch_size=2, window_size=0, use_abs_pos=False)
    model = tiny.build(tf.SamVisionModel, config, implementation)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "rel_pos" in name:
                weight.copy_(torch.as_tensor(np.random.default_rng(0).normal(size=weight.shape)))
    with propagate(model, PA_LRP, observe=(), ledger=True, taps=[Positions(model, by_head=True)]) as trace:
        out = model(pixel_values=PIXELS).last_hidden_state
    trace.explain(out[:, 0, 0, 0].sum())
    assert trace.ledger().closes(1e-6)
    spelled_out = tiny.build(tf.SamVisionModel, config, "eager")
    spelled_out.load_state_dict(model.state_dict())
    with propagate(spelled_out, ATTNLRP, observe=(), taps=[given := Given("reshape_as")]) as plain:
        out = spelled_out(pixel_values=PIXELS).last_hidden_state
    plain.explain(out[:, 0, 0, 0].sum())
    (scores,) = given.found
    want = 0.5 * (scores.detach() * plain.gradient_of(scores)).reshape(2, 2, 16, 16).sum(2)  # by image, head and key
    (kept,) = trace.positions()
    near(kept.relevance.numpy(), want.sum(1).numpy(), 3e-6)  # it takes its softmax in float32
    apart = trace.positions(by_head=True)
    if implementation == "sdpa":
        near(apart[0].relevance.numpy(), want.numpy(), 3e-6)


@pytest.mark.parametrize("size", [16, 24])  # 24: interpolated
def test_positions_of_dinov2_have_the_same_sum_under_both_recipes(size: int) -> None:
    model, pixels = pictured("dinov2"), image(size=size)[None]
    found = []
    for recipe in (PA_LRP, ATTNLRP):
        with propagate(model, recipe, observe=(), ledger=True) as trace:
            logits = model(pixel_values=pixels).logits
        trace.explain(logits[0, 1])
        found.append(trace.ledger().by_kind()["positions"])
    assert abs(found[0]) > 1e-3
    assert abs(found[0] - found[1]) < 1e-9  # added positions need no rule


class Biased(torch.nn.Module):
    """Attention over a batch as large as its rows, with a constant for each pair of them: no table of positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.bias = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.project(x) @ x.mT / 2 + self.bias
        return (scores.softmax(-1) @ x).sum(1)


def test_a_bias_of_scores_is_no_table_of_rows() -> None:
    model = Biased().double()
    with propagate(model, ATTNLRP, observe=(), ledger=True) as trace:
        out = model(torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    trace.explain(out[:, 1].sum())
    assert {e.kind for e in trace.ledger().entries if e.name == "bias"} == {"biases"}


class Pooled(torch.nn.Module):
    """Attention of some queries over all rows, with a bias for each pair, which may be kept with one dimension of
    pairs."""

    def __init__(self, heads: int, queries: int, *, is_flat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.heads, self.queries, self.is_flat = torch.nn.Linear(8, 8), heads, queries, is_flat
        bias = torch.randn(heads, queries, 6) if heads > 1 else torch.randn(queries, 6)
        self.bias = torch.nn.Parameter(bias.movedim(0, -1).flatten(0, 1).clone() if is_flat else bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.project(x)[:, : self.queries], x
        if self.heads > 1:
            q, k = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k))
        bias = self.bias.view(self.queries, 6, self.heads).permute(2, 0, 1) if self.is_flat else self.bias
        return ((q @ k.mT + bias).softmax(-1) @ k).flatten(1).sum(1)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("queries", [1, 4, 6])
@pytest.mark.parametrize("is_flat", [False, True])
def test_biases_that_an_image_has_kept_are_the_keys(heads: int, queries: int, *, is_flat: bool) -> None:
    """Those of fewer queries than keys, and those that are kept with one dimension of pairs, were constants."""
    model = Pooled(heads, queries, is_flat=is_flat and heads > 1).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(model(x).sum(), model.bias)
    with propagate(model, PA_LRP, observe=()) as trace:
        out = model(x)
    trace.explain(out.sum())
    (found,) = trace.positions()
    bias, gradient = (
        each.view(queries, 6, heads).permute(2, 0, 1) if model.is_flat else each.view(-1, queries, 6)
        for each in (model.bias.detach(), gradient)
    )
    bias = bias - bias[..., :1] if queries == 1 else bias  # the same for every query
    near(found.relevance[0].numpy(), (bias * gradient).sum((0, 1)).numpy() / 2)


def test_registers_are_tokens_and_no_positions() -> None:
    a = Explainer(pictured("registers"))(image(), 1, method="pa-lrp-single-sink", ledger=True)
    assert a.parts["positions"].shape == {"layer": 1, "place": 17}
    assert a.parts["class token"].shape == {"learned token": 3}
    kinds = a.ledger.by_kind()
    for kind, part in {"positions": "positions", "class token": "class token", "inputs": "pixels"}.items():
        assert abs(kinds[kind] - float(a.parts[part].values.sum())) < 1e-6
    assert a.ledger.closes(1e-9)


def test_deit_is_its_twin() -> None:
    model, weights = IMAGES["DeiT"][0](), np.array([1.0, -1.0, 0.0])
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        logits = model(pixel_values=PIXELS[:1]).logits[0]
    value = trace.explain(logits @ torch.as_tensor(weights))
    want = deit.explain(model, PIXELS[0].numpy(), weights)
    near(logits.detach().numpy(), want.logits)
    assert abs(float(value) - want.value) < 1e-9
    near(positions_of(trace)["input"], want.positions)
    assert abs(trace.ledger().by_kind()["positions"] - want.positions.sum()) < 1e-9
    own = want.patches.sum() + want.special.sum() + want.positions.sum() + sum(want.biases.values())
    assert abs(own + sum(want.softmax_residue.values()) - want.value) < 1e-9


def deberta() -> Any:
    more = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "share_att_key": True}
    config = tf.DebertaV2Config(**SIZES, **more, norm_rel_ebd="layer_norm", type_vocab_size=0)
    return tiny.build(tf.DebertaV2ForMaskedLM, config, "eager")


def test_deberta_of_as_many_tokens_as_heads() -> None:
    """Its tables of distances have a matrix for each head of each row, and those are not the tokens'."""
    model, explain = deberta(), Explainer(deberta())
    heads, ids = model.config.num_attention_heads, [*TOKENS.tolist(), *TOKENS.tolist()]
    for length, count in ((heads, 1), (2 * heads, 2)):
        short = ids[:heads]
        found = explain([ids[:length], short][:count], 9, method="pa-lrp-single-sink", position=2)
        beside = explain([ids[: heads + 1], short], 9, method="pa-lrp-single-sink", position=2)[1]
        assert torch.allclose(found[-1].relevance, beside.relevance, rtol=0, atol=1e-9)
        assert torch.allclose(found[-1].parts["positions"].values, beside.parts["positions"].values, rtol=0, atol=1e-9)


def test_distances_that_deberta_chooses_by() -> None:
    model = deberta()
    trace = run(model, input_ids=TOKENS)
    assert list(positions_of(trace)) == ["input", "deberta.encoder.layer.0", "deberta.encoder.layer.1"]
    assert trace.ledger().closes(1e-9)


class Distances(torch.nn.Module):
    """Products with a table of distances, one of which a pair of tokens is given, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = torch.nn.Embedding(31, 4), torch.nn.Parameter(torch.randn(9, 4))
        self.project = torch.nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, places = self.embed(input_ids), torch.arange(input_ids.shape[1])
        products = x @ self.project(self.table).T
        index = (places[:, None] - places + 4).expand(len(x), -1, -1)
        return products.gather(-1, index) * 2.0


def test_half_of_what_a_distance_chooses_is_the_positions() -> None:
    torch.manual_seed(0)
    model = Distances().double()
    ids = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    weights = torch.randn(2, 5, 5, dtype=torch.float64)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        scores = model(ids)
        value = (scores * weights).sum()
    trace.explain(value)
    chosen = (scores * weights).detach()
    near(trace.positions()[0].relevance.numpy(), 0.5 * chosen.sum(1).numpy())  # of the token whose distance it is
    near(trace.source_relevance(trace.sources[0]).sum(-1).numpy(), 0.5 * chosen.sum(2).numpy())


class InBrackets(Distances):
    """The same by an index in brackets, or along another dimension."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, places = self.embed(input_ids), torch.arange(input_ids.shape[1])
        products, index = x @ self.project(self.table).T, places[:, None] - places + 4
        if self.how == "rows":
            return products[torch.arange(len(x))[:, None, None], places[:, None], index] * 2.0
        if self.how == "queries":
            return products[:, places[:, None], index] * 2.0
        if self.how == "both":  # of the tokens and others, as ProphetNet does
            return products.gather(-1, torch.cat([index, index], 1).expand(len(x), -1, -1)) * 2.0
        return products.mT.gather(1, index.T.expand(len(x), -1, -1)).mT * 2.0


@pytest.mark.parametrize("how", ["rows", "queries"])
@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_half_of_what_brackets_choose_is_the_positions(how: str, length: int) -> None:
    torch.manual_seed(0)
    model = InBrackets(how).double()
    ids = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])[:, :length]
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        scores = model(ids)
    trace.explain(scores.sum())
    near(trace.positions()[0].relevance.numpy(), 0.5 * scores.detach().sum(1).numpy())


@pytest.mark.parametrize("how", ["both", "first"])
def test_what_is_chosen_and_no_score_of_the_tokens_is_refused_by_name(how: str) -> None:
    model = InBrackets(how).double()
    with pytest.raises(MethodError, match="choose of products"), propagate(model, PA_LRP):
        model(torch.tensor([[3, 4, 5, 6, 7]]))


@torch.jit.script
def scripted(distances: torch.Tensor) -> torch.Tensor:
    """Buckets in a function that no mode sees into, as older DeBERTas make them."""
    return torch.where(distances.abs() <= 4, distances + 4, torch.full_like(distances, 4)).float()


class Unseen(Distances):
    """The same, where the index goes through a scripted function, or is a range with tensors for ends."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, places = self.embed(input_ids), torch.arange(input_ids.shape[1])
        products = x @ self.project(self.table).T
        if self.how == "scripted":
            index = scripted(places[:, None] - places).long()
        else:
            count = places[-1] - places[0]
            index = torch.stack([torch.arange(4 - count + i, 5 + i).flip(0) for i in range(input_ids.shape[1])]) % 9
        return products.gather(-1, index.expand(len(x), -1, -1)) * 2.0


@pytest.mark.parametrize("how", ["scripted", "range"])
def test_distances_by_numbers_that_are_made_unseen(how: str) -> None:
    torch.manual_seed(0)
    model = Unseen(how).double()
    ids = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    with propagate(model, PA_LRP, observe=()) as trace:
        scores = model(ids)
    trace.explain(scores.sum())
    near(trace.positions()[0].relevance.numpy(), 0.5 * scores.detach().sum(1).numpy())


class ChoosesNothing(Distances):
    """Chooses from a table of whole numbers that is empty, as ViLT does where no place of an image is masked."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        masked = (input_ids < 0).nonzero()
        masked = masked[masked[:, 0] == 1]
        scores = super().forward(input_ids)
        return scores if len(masked) == 0 else scores * 0


def test_numbers_that_are_chosen_of_none() -> None:
    torch.manual_seed(0)
    model = ChoosesNothing().double()
    trace = {}
    for each in (model, Distances().double()):
        each.load_state_dict(model.state_dict())
        with propagate(each, PA_LRP, observe=()) as trace[each]:
            scores = each(torch.tensor([[3, 4, 5, 6, 7]]))
        trace[each].explain(scores.sum())
    found, expected = (each.positions()[0].relevance.numpy() for each in trace.values())
    near(found, expected, atol=0)


class Masked(torch.nn.Module):
    """Looks its mask up, which is numbers of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.kept = torch.nn.Embedding(31, 4), torch.nn.Embedding(2, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids) + self.kept(attention_mask.long())


def test_a_mask_of_floating_point_numbers_no_places() -> None:
    model = Masked().double()
    with propagate(model, PA_LRP, observe=()) as trace:
        out = model(torch.tensor([[3, 4, 5]]), torch.tensor([[1.0, 1.0, 0.0]]))
    trace.explain(out.sum())
    assert not trace.positions()


class Shifted(torch.nn.Module):
    """Products with distances that positions have made, shifted until each is of a query and a key, as in XLNet."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.project = torch.nn.Embedding(31, 4), torch.nn.Linear(4, 4, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, length = self.embed(input_ids), input_ids.shape[1]
        angles = torch.arange(length, -length, -1.0)[:, None] * torch.tensor([1.0, 0.1])
        distances = torch.cat([angles.sin(), angles.cos()], -1).to(x)
        products = torch.einsum("bid,td->bit", x, self.project(distances)) * 0.5
        if self.how == "softmax":
            return products.softmax(-1)
        rows, _, wide = products.shape
        shifted = products.reshape(rows, wide, length)[:, 1:].reshape(rows, length, wide - 1)
        shifted = shifted.index_select(2, torch.arange(length)) if self.how == "select" else shifted[..., :length]
        if self.how == "sum":
            return x.sum(-1) + shifted.sum(-1)
        return x @ x.mT + shifted


@pytest.mark.parametrize("how", ["select", "slice"])
def test_half_of_what_a_shifted_distance_gives_is_the_keys_position(how: str) -> None:
    torch.manual_seed(0)
    model = Shifted(how).double()
    ids = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    weights = torch.randn(2, 5, 5, dtype=torch.float64)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        value = (model(ids) * weights).sum()
    trace.explain(value)
    x, project = model.embed(ids).detach().numpy(), model.project.weight.detach().numpy()
    want = np.zeros((2, 5))
    for row in range(2):
        for i in range(5):
            for j in range(5):
                angles = np.float32(i - j) * np.array([1.0, 0.1], dtype=np.float32)
                distance = np.concatenate([np.sin(angles), np.cos(angles)]).astype(float)
                want[row, j] += 0.5 * weights[row, i, j].item() * 0.5 * (x[row, i] @ project @ distance)
    near(trace.positions()[0].relevance.numpy(), want, 1e-7)  # the distances are float32
    assert trace.ledger().closes(1e-9)


@pytest.mark.parametrize("how", ["softmax", "sum"])
def test_distances_that_become_no_scores_are_refused_by_name(how: str) -> None:
    model = Shifted(how).double()
    told = f"a product with distances goes into torch's '{how}' before"
    with pytest.raises(MethodError, match=told), propagate(model, PA_LRP):
        model(torch.tensor([[3, 4, 5, 6, 7]]))


class Mixed(torch.nn.Module):
    """An image whose places are mixed by a table that positions have made: no scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6.0, dtype=x.dtype)
        return x + (places[:, None] - places) @ self.embed(x)


def test_a_mixture_of_places_is_no_scores() -> None:
    model = Mixed().double()
    told = "a product with distances goes into torch's '.*add.*' before"
    with pytest.raises(MethodError, match=told), propagate(model, PA_LRP):
        model(torch.randn(2, 6, 6, dtype=torch.float64))


class Rotated(torch.nn.Module):
    """Queries and keys that a matrix for each place rotates, beside learned positions; or experts, one for each place
    of a text of five tokens by chance."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed, self.learned = how, torch.nn.Embedding(31, 4), torch.nn.Embedding(8, 4)
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1])).repeat_interleave(2, -1)
        turned = torch.tensor([[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]])
        self.register_buffer("rotations", torch.diag_embed(angles.cos()) + turned * angles.sin()[..., None])
        self.experts = torch.nn.Parameter(torch.randn(5, 4, 4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        x = self.embed(input_ids) + self.learned(torch.arange(length))
        if self.how == "experts":
            return x + (x[:, None] @ self.experts).sum(1)
        r = self.rotations[:length].to(x.dtype)
        q = (r @ x[..., None])[..., 0] if self.how == "matmul" else torch.einsum("tij,btj->bti", r, x)
        return x + (q @ q.mT).softmax(-1) @ x


@pytest.mark.parametrize("how", ["matmul", "einsum"])
def test_a_matrix_for_each_place_is_refused_by_name(how: str) -> None:
    model = Rotated(how).double()
    with pytest.raises(MethodError, match="a factor of a matrix product"), propagate(model, PA_LRP):
        model(torch.tensor([[3, 4, 5, 6, 7]]))


def test_as_many_experts_as_places_are_no_positions() -> None:
    model = Rotated("experts").double()
    with propagate(model, PA_LRP, observe=()) as trace:
        out = model(torch.tensor([[3, 4, 5, 6, 7]]))
    trace.explain(out[0, -1].sum())
    assert [kept.layer for kept in trace.positions()] == ["input"]


class Given(Tap):
    """What distances give to each pair of a query and a key, as leaves: what a function of this name gives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[torch.Tensor] = []

    def leaves(self) -> list[torch.Tensor]:
        return self.found

    def around(self, call: Any, proceed: Any) -> Any:
        out = proceed(call.args, call.kwargs)
        if call.name == self.name and out.requires_grad:
            self.found.append(out := out.view_as(out))
        return out


def test_xlnet_by_the_scores_of_its_last_layer() -> None:
    model, shift = tiny.xlnet(), Given("index_select")
    trace = run(model, input_ids=TOKENS)
    assert list(positions_of(trace)) == ["transformer.layer.0", "transformer.layer.1"]
    assert trace.ledger().closes(1e-6)
    with propagate(model, ATTNLRP, observe=(), taps=[shift]) as plain:
        logits = model(input_ids=torch.as_tensor(TOKENS)[None]).logits
    plain.explain(logits[0, POSITION] @ torch.as_tensor(CONTRAST))
    scores = shift.found[-1]  # below the last layer's scores the rules differ
    want = 0.5 * (scores.detach() * plain.gradient_of(scores))[0].numpy()
    near(positions_of(trace)["transformer.layer.1"], want.sum((0, 1)))
    apart = by_head(model, input_ids=TOKENS).positions(by_head=True)
    near(apart[-1].relevance[0], want.sum(1))


@pytest.mark.parametrize("rows", [2, 5])  # 5: as many rows as tokens, and the model turns its ids round
def test_a_batch_of_xlnet_is_its_rows(rows: int) -> None:
    explainer = Explainer(tiny.xlnet())
    given = [[int(i) for i in RNG.integers(6, 31, 5)] for _ in range(rows)]
    for found, ids in zip(explainer(given, 5, 9, method="pa-lrp"), given, strict=True):
        alone = explainer(ids, 5, 9, method="pa-lrp")
        near(found.parts["positions"].values.numpy(), alone.parts["positions"].values.numpy(), 1e-7)
        assert_allclose(found.relevance.numpy(), alone.relevance.numpy(), rtol=0, atol=1e-7)


def test_a_bias_with_as_many_heads_as_there_are_tokens_is_refused_by_name() -> None:
    with pytest.raises(MethodError, match=r"nothing tells which dimension of a table of shape \[4, 4\]"):
        Explainer(tiny.xlnet())([6, 7, 8, 9], method="pa-lrp")


def funnel(*sizes: int) -> Any:
    config = tf.FunnelConfig(vocab_size=31, d_model=16, n_head=4, d_head=4, d_inner=24, block_sizes=list(sizes))
    return tiny.build(tf.FunnelForMaskedLM, config, "eager")


def test_positions_of_pooled_places_are_refused_by_name() -> None:
    trace = run(funnel(2), input_ids=TOKENS)
    assert next(iter(positions_of(trace))) == "funnel.encoder.blocks.0"
    assert trace.ledger().closes(1e-6)
    model = funnel(1, 1)
    with pytest.raises(MethodError, match="position=uniform cannot be applied"), propagate(model, PA_LRP):
        model(input_ids=torch.tensor(TOKENS)[None])


class Detached(torch.nn.Module):
    """Adds what it has made of its tokens and their positions and detached, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed = how, torch.nn.Embedding(31, 4)
        self.table = torch.nn.Parameter(torch.randn(8, 4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, places = self.embed(input_ids), torch.arange(input_ids.shape[1])
        angles = torch.outer(places, torch.tensor([1.0, 0.1, 0.3, 0.4])).cos().to(x)
        x = x * angles
        if self.how == "off":
            with torch.no_grad():
                state = self.table[places] + x * angles
        elif self.how == "written":
            state = angles.clone()
            state[..., :2] = x.detach()[..., :2]
        else:
            state = x.detach() * (self.table[: len(places)] if self.how == "a table" else angles)
        return x + state.clone()


@pytest.mark.parametrize("how", ["off", "angles", "a table", "written"])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_what_was_made_of_tokens_is_no_position(how: str, length: int) -> None:
    model = Detached(how).double()
    ids = torch.tensor([[3, 4, 5, 6, 7][:length]])
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        out = model(ids)
        trace.explain(out[0, -1].sum())
    x = model.embed(ids).detach()[0, -1]
    angle = torch.outer(torch.tensor([length - 1]), torch.tensor([1.0, 0.1, 0.3, 0.4])).cos()[0].double()
    assert abs(trace.ledger().by_kind()["positions"] - float(0.5 * (x * angle).sum())) < 1e-9
    assert abs(float(trace.positions()[0].relevance[0, -1] - 0.5 * (x * angle).sum())) < 1e-9
    assert trace.ledger().closes(1e-9)


class Spread(torch.nn.Module):
    """Multiplies tokens with angles that were spread to their shape, or not."""

    def __init__(self, *, spreads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spreads, self.embed = spreads, torch.nn.Embedding(31, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1, 0.3, 0.4])).cos().to(x)
        if self.spreads:
            angles, x = torch.broadcast_tensors(angles, x)
        return x * angles


@pytest.mark.parametrize("length", [1, 4, 5])
def test_angles_that_are_spread_beside_the_input_are_positions(length: int) -> None:
    found = []
    for spreads in (True, False):
        model = Spread(spreads=spreads).double()
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            trace.explain(model(torch.arange(3, 3 + length)[None])[0, -1].sum())
        found.append(trace.positions()[0].relevance.numpy())
        assert trace.ledger().closes(1e-9)
    near(found[0], found[1])


class AsWide(torch.nn.Module):
    """Heads of four features that are turned by angles: made anew, kept for this length, or with tokens before rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed = how, torch.nn.Embedding(31, 8)
        self.kept = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1, 0.3, 0.4])).cos().double()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).unflatten(-1, (2, 4))
        if self.how == "kept":
            return x.transpose(1, 2) * self.kept
        angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1, 0.3, 0.4])).cos().to(x)
        if self.how == "tokens first":
            return (x.transpose(0, 1) * angles[:, None, None]).permute(1, 2, 0, 3)
        return x.transpose(1, 2) * angles


@pytest.mark.parametrize("how", ["kept", "tokens first"])
def test_angles_of_as_many_tokens_as_a_head_is_wide_are_refused_where_nothing_tells(how: str) -> None:
    ids = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    model = AsWide(how).double()
    with pytest.raises(MethodError, match="nothing tells which dimension of"), propagate(model, PA_LRP, observe=()):
        model(ids)
    model = AsWide("made").double()
    with propagate(model, PA_LRP, observe=()) as trace:
        made = model(ids)
        trace.explain(made[:, :, -1].sum())
    want = 0.5 * made[:, :, -1].detach().sum((1, 2))
    near(trace.positions()[0].relevance[:, -1].numpy(), want.numpy())


class Layout(torch.nn.Module):
    """Turns queries and keys by angles, with the rows of the batch in one of several places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed, self.heads = how, torch.nn.Embedding(31, 8), torch.nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows, length = input_ids.shape
        angles = torch.outer(torch.arange(length), torch.tensor([1.0, 0.1, 0.3, 0.4])).cos().double()
        both = self.heads(self.embed(input_ids)).view(rows, length, 2, 2, 4)
        if self.how == "stacked":
            q, k = both.permute(2, 0, 3, 1, 4) * angles
        else:
            q, k = both.permute(2, 0, 3, 1, 4)
            if self.how == "put together":
                q, k = (torch.cat([q, k]) * angles).chunk(2)
            elif self.how == "heads first":
                q, k = (x.transpose(0, 1).reshape(-1, length, 4) * angles for x in (q, k))
                q, k = (x.view(2, rows, length, 4).transpose(0, 1) for x in (q, k))
            elif self.how.startswith("beside the whole"):  # as an image's pieces are, beside it
                is_turned = self.how.endswith("heads first")
                pieces = q.transpose(0, 1).reshape(-1, length, 4) if is_turned else q.flatten(0, 1)
                q, first, second = (torch.cat([pieces, k[:, 0], k[:, 1]]) * angles).split([2 * rows, rows, rows])
                q = q.view(2, rows, length, 4).transpose(0, 1) if is_turned else q.view(rows, 2, length, 4)
                k = torch.stack([first, second], 1)
            elif self.how == "rows first":
                q, k = ((x.flatten(0, 1) * angles).view(x.shape) for x in (q, k))
            elif self.how == "tokens first, and back":
                q, k = (x.flatten(0, 1).transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
                q, k = ((x * angles).view(rows, 2, length, 4) for x in (q, k))
            else:
                q, k = q * angles, k * angles
        return (q @ k.mT).sum((1, 3))


def rows_of(how: str, ids: torch.Tensor) -> np.ndarray:
    model = Layout(how).double()
    with propagate(model, PA_LRP, observe=()) as trace:
        trace.explain(model(ids)[:, -1].sum())
    return trace.positions()[0].relevance.numpy()


@pytest.mark.parametrize("how", ["", "rows first", "tokens first, and back"])
def test_a_batch_is_its_rows_where_these_come_first(how: str) -> None:
    ids = torch.tensor([[3, 4, 5], [9, 8, 7]])
    near(rows_of(how, ids), np.concatenate([rows_of(how, each[None]) for each in ids]))


@pytest.mark.parametrize(
    "how", ["stacked", "put together", "heads first", "beside the whole, heads first", "beside the whole, rows first"]
)
def test_a_batch_is_refused_by_name_where_other_things_come_before_its_rows(how: str) -> None:
    ids = torch.tensor([[3, 4, 5], [9, 8, 7]])
    near(rows_of(how, ids[:1]), rows_of("", ids[:1]))
    with pytest.raises(MethodError, match=r"nothing tells the 2 rows of the batch apart, .* pass batch_size=1"):
        rows_of(how, ids)


class StraightThrough(torch.nn.Module):
    """Rounds the rows of an image, as if it had not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.head = torch.nn.Conv2d(3, 4, 4, 4), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.patches(x).flatten(2).mT
        return self.head(made + (made.round() - made).detach()).sum(1)


@pytest.mark.parametrize("recipe", [PA_LRP, ATTNLRP], ids=["pa-lrp", "attnlrp"])
def test_what_was_made_of_an_image_is_no_position(recipe: Any) -> None:
    model = StraightThrough().double()
    with propagate(model, recipe, observe=(), ledger=True) as trace:
        trace.explain(model(PIXELS)[:, 1].sum())
    assert "positions" not in trace.ledger().by_kind()
    assert abs(trace.ledger().by_kind()["constants"]) > 1e-3
    assert trace.ledger().closes(1e-9)


class Blocks(torch.nn.Module):
    """Adds a table to each block of four tokens, as DeepSeek-V4 does where it compresses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = torch.nn.Embedding(31, 6), torch.nn.Embedding(12, 6)
        self.table = torch.nn.Parameter(torch.randn(4, 6))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        whole = x.shape[1] // 4 * 4
        return x.sum(1) + (x[:, :whole].view(len(x), whole // 4, 4, 6) + self.table).sum((1, 2))


@pytest.mark.parametrize("length", [3, 5, 8])
def test_a_table_of_a_block_is_no_position(length: int) -> None:
    model = Blocks().double()
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        trace.explain(model(torch.arange(3, 3 + length)[None]).sum())
    whole = length // 4 * 4
    counts = 1 + (torch.arange(length) < whole)
    want = model.places.weight[:length].detach().sum(1) * counts
    near(trace.positions()[0].relevance[0].numpy(), want.numpy())


def test_a_table_of_a_block_as_long_as_the_text_is_refused_by_name() -> None:
    model = Blocks().double()
    told = r"nothing tells which dimension of a table of shape \[4, 6\]"
    with pytest.raises(MethodError, match=told), propagate(model, PA_LRP):
        model(torch.tensor([[3, 4, 5, 6]]))


class Remembered(torch.nn.Module):
    """Keeps the angles of each length in a dictionary or a list, for the next time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed = how, torch.nn.Embedding(31, 4)
        self.kept: dict[Any, Any] = {}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, length = self.embed(input_ids), input_ids.shape[1]
        if length not in self.kept:
            angles = torch.outer(torch.arange(length), torch.tensor([1.0, 0.1, 0.3, 0.4])).to(x)
            both = angles.cos(), angles.sin()
            self.kept[length] = {"pair": both, "list": [both], "named": {"cos": both[0], "sin": both[1]}}[self.how]
        found = self.kept[length]
        cos, sin = found.values() if self.how == "named" else found[0] if self.how == "list" else found
        return x * cos + x.roll(2, -1) * sin


@pytest.mark.parametrize("how", ["pair", "list", "named"])
def test_angles_that_were_remembered_are_those_that_are_made(how: str) -> None:
    model, ids = Remembered(how).double(), torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    found = []
    for _ in range(2):
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            trace.explain(model(ids)[:, -1].sum())
        found.append(trace.positions()[0].relevance.numpy())
        assert trace.ledger().closes(1e-9)
    near(found[1], found[0], atol=0)


BIRD = {"attention_type": "original_full", "sep_token_id": 30}


@pytest.mark.parametrize("end", [3, 8])  # the question is shorter than half of the text, and longer
def test_on_which_side_of_a_questions_end_a_token_is_is_no_position(end: int) -> None:
    """BigBird makes its token types of its places, and of where the first separator is: told of longer questions as
    positions, they were 0.4 of the largest relevance; told by the user they are none."""
    model = tiny.build(tf.BigBirdForQuestionAnswering, tf.BigBirdConfig(**SIZES, **BIRD), "eager")
    ids = torch.arange(3, 15)[None]
    ids[0, end] = ids[0, -1] = 30
    found = []
    for types in (None, (torch.arange(12) > end).long()[None]):
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            trace.explain(model(input_ids=ids, token_type_ids=types).start_logits[0, 4])
        assert trace.ledger().closes(1e-6)
        found.append(trace.positions()[0].relevance[0].numpy())
    near(found[0], found[1])


def test_gated_biases_of_heads_are_the_keys_positions() -> None:
    """WavLM's, for sounds, whose model reads no tokens."""
    sizes = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    model = tiny.build(tf.WavLMForSequenceClassification, tf.WavLMConfig(**SIZES, **sizes), "eager")
    sound = torch.randn(2, 130, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for rows in (sound, sound[1:]):
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            trace.explain(model(rows).logits[-1, 1])
        assert trace.ledger().closes(1e-6)
        found.append({kept.layer: kept.relevance[-1].numpy() for kept in trace.positions()})
    assert list(found[0]) == ["wavlm.encoder.layers.0", "wavlm.encoder.layers.1"]
    for layer, mine in found[0].items():
        assert mine.shape == (12,)
        near(mine, found[1][layer])


def test_positions_of_an_image_that_are_written_into_nothing_are_those_of_its_places() -> None:
    """Siglip 2 stretches its table to each image's shape, and writes it into an empty tensor."""
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = tf.Siglip2Config(vision_config=vision | {"patch_size": 2, "num_patches": 16}, num_labels=3)
    model = tiny.build(tf.Siglip2ForImageClassification, config)
    patches, mask = torch.randn(1, 16, 12, dtype=torch.float64), torch.ones(1, 16, dtype=torch.int64)
    given = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 4]])}
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        trace.explain(model(**given).logits[0, 1])
    (kept,) = trace.positions()
    assert kept.relevance.shape == (1, 16)
    assert kept.relevance.abs().max() > 1e-6
    assert trace.ledger().closes(1e-6)


def test_biases_that_are_counted_from_the_last_key_are_those_of_a_row_alone_behind_padding() -> None:
    """MPT's were counted from the padding: 0.2 of the largest relevance."""
    model, ids = mpt().float(), torch.tensor([[0, 0, 0, *TOKENS], [*SOURCE]])
    mask = (ids != 0).long()
    found = []
    for row, seen in ((ids, mask), (ids[:1, 3:], mask[:1, 3:])):
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            trace.explain(model(input_ids=row, attention_mask=seen).logits[0, -1, 5])
        assert trace.ledger().closes(1e-5)
        found.append([kept.relevance[0].numpy() for kept in trace.positions()])
    for behind, alone in zip(*found, strict=True):
        near(behind[3:], alone, 1e-3 * abs(alone).max())
        assert not behind[:3].any()
