"""PA-LRP's methods: what they make of tokens and positions, conservation (the paper's lemmas), batches and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import positional
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose

import lrpx
from lrpx import rules
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import MethodError
from lrpx.methods import PositionAware
from tests import tiny
from tests.reference import models

IDS = [5, 9, 3, 17, 22, 8, 4]
PA = lrpx.METHODS["pa-lrp"]
NAMES = ("pa-lrp", "pa-lrp-absolute", "pa-lrp-single-sink", "pa-lrp-positions", "pa-lrp-tokens")


@pytest.fixture(scope="module")
def llama() -> lrpx.Explainer:
    return lrpx.Explainer(models.tiny_llama())


def test_what_each_makes_of_tokens_and_positions(llama: lrpx.Explainer) -> None:
    found = {name: llama(IDS, 5, 9, method=name) for name in NAMES}
    part = found["pa-lrp"].parts["positions"]
    assert part.axes == ("layer", "token")
    assert part.labels["layer"] == ("model.layers.0", "model.layers.1")
    sinks = part.values.numpy()
    assert (sinks < 0).any()
    tokens = found["pa-lrp-tokens"].relevance.numpy()
    want = {
        "pa-lrp": tokens + np.maximum(sinks, 0).sum(0),
        "pa-lrp-absolute": tokens + np.abs(sinks).sum(0),
        "pa-lrp-single-sink": tokens + sinks.sum(0),
        "pa-lrp-positions": np.maximum(sinks, 0).sum(0),
    }
    for name, expected in want.items():
        assert_allclose(found[name].relevance.numpy(), expected, rtol=0, atol=1e-12)
        assert found[name].parts["positions"] == part
    assert not np.allclose(tokens, llama(IDS, 5, 9, method="attnlrp").relevance.numpy(), atol=1e-6)


def test_the_ledger_has_an_entry_of_positions_in_each_layer(llama: lrpx.Explainer) -> None:
    a = llama(IDS, 5, 9, method="pa-lrp-single-sink", ledger=True)
    assert a.ledger is not None
    assert a.ledger.closes(1e-9)
    entries = {entry.name: entry.value for entry in a.ledger.entries if entry.kind == "positions"}
    sums = dict(zip(("model.layers.0", "model.layers.1"), a.parts["positions"].values.sum(1).tolist(), strict=True))
    assert entries == pytest.approx(sums, abs=1e-12)
    with pytest.raises(MethodError, match="pa-lrp does not measure in the units"):
        llama(IDS, method="pa-lrp", ledger=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.bloom, tiny.opt, tiny.bert_classifier])
def test_a_batch_is_its_rows(build: Any, recompute: bool) -> None:
    explainer = lrpx.Explainer(build(), recompute=recompute)
    rows = [IDS, [7, 6, 5], [11, 12, 13, 14, 15]]
    for each, ids in zip(explainer(rows, method="pa-lrp"), rows, strict=True):
        one = lrpx.Explainer(explainer.model)(ids, method="pa-lrp")
        # BLOOM takes its softmax in float32
        assert_allclose(each.relevance.numpy(), one.relevance.numpy(), rtol=0, atol=1e-7)
        part, alone = (found.parts["positions"].values.numpy() for found in (each, one))
        assert_allclose(part, alone, rtol=0, atol=1e-7)
        assert np.abs(alone).max() > 1e-6


@pytest.mark.parametrize("build", [models.tiny_bert, tiny.roberta, models.tiny_t5, models.tiny_gpt2])
def test_one_token_alone_is_what_it_is_beside_others(build: Any) -> None:
    """BERT chooses token types by places, and where there is one, only that all are the same tells."""
    explainer = lrpx.Explainer(build())
    where: dict[str, Any] = {"decoder": [2, 9]} if "t5" in build.__name__ else {"position": 0}
    alone = explainer([7], 5, 9, method="pa-lrp-single-sink", **where)
    beside, _ = explainer([[7], IDS], 5, 9, method="pa-lrp-single-sink", **where)
    assert_allclose(alone.relevance.numpy(), beside.relevance.numpy(), rtol=0, atol=1e-7)
    part, other = (found.parts["positions"].values.numpy() for found in (alone, beside))
    assert_allclose(part, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["neox", "phi"])
def test_two_tokens_that_are_turned_by_two_angles_are_what_they_are_beside_others(kind: str) -> None:
    """A table of angles of 2 × 2 is none of scores."""
    phi = tf.PhiConfig(**tiny.SIZES, partial_rotary_factor=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    explain = lrpx.Explainer(tiny.neox() if kind == "neox" else tiny.build(tf.PhiForCausalLM, phi))
    alone, beside = explain(IDS[:2], method=PA), explain([IDS[:2], IDS], method=PA)[0]
    assert_allclose(alone.parts["positions"].values, beside.parts["positions"].values, rtol=0, atol=1e-9)
    assert_allclose(alone.relevance, beside.relevance, rtol=0, atol=1e-9)


def test_heads_are_a_part_that_sums_to_the_positions(llama: lrpx.Explainer) -> None:
    method = replace(PA, by_head=True)
    for a in llama([IDS, IDS[:3]], 5, 9, method=method):
        part = a.parts["positions by head"]
        assert part.axes == ("layer", "head", "token")
        assert part.labels["head"] == ("0 of 2", "1 of 2", "0 of 4", "1 of 4", "2 of 4", "3 of 4")
        assert_allclose(part.values.sum(1).numpy(), a.parts["positions"].values.numpy(), rtol=0, atol=1e-9)
    plain = llama(IDS, 5, 9, method="pa-lrp")
    assert_allclose(llama(IDS, 5, 9, method=method).relevance.numpy(), plain.relevance.numpy(), rtol=0, atol=1e-9)
    assert "positions by head" not in plain.parts


def test_heads_of_one_number_have_no_labels_and_those_of_none_are_refused() -> None:
    found = lrpx.Explainer(models.tiny_t5())([5, 6, 7, 8], decoder=[0, 9], method=replace(PA, by_head=True))
    part = found.parts["positions by head"]
    assert part.shape["head"] == 4
    assert set(part.labels) == {"layer"}
    assert_allclose(part.values.sum(1).numpy(), found.parts["positions"].values.numpy(), rtol=0, atol=1e-9)
    with pytest.raises(MethodError, match="outside of its heads; leave by_head out"):
        lrpx.Explainer(models.tiny_gpt2())(IDS, method=replace(PA, by_head=True))


def test_heads_of_an_image_whose_stages_have_their_own() -> None:
    sizes = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2}
    explainer = lrpx.Explainer(tiny.build(tf.SwinForImageClassification, tf.SwinConfig(**sizes, num_labels=3)))
    pixels = torch.randn(3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = explainer(pixels, 1, method=replace(PA, by_head=True))
    part = a.parts["positions by head"]
    assert part.shape == {"layer": 2, "head": 6, "place": 4}
    assert_allclose(part.values.sum(1).numpy(), a.parts["positions"].values.numpy(), rtol=0, atol=1e-6)
    assert not part.values[0, 2:].any()
    assert not part.values[1, :2].any()


def test_an_encoder_and_a_decoder_have_layers_of_their_own() -> None:
    a = lrpx.Explainer(models.tiny_t5())([5, 6, 7, 8], decoder=[0, 9, 10], method="pa-lrp")
    part = a.parts["positions"]
    layers = [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in (0, 1)]
    assert part.labels["layer"] == tuple(layers)
    at = part.values.numpy() != 0
    size = len(a.tokens) - 3
    assert at[:2, :size].any()
    assert not at[:2, size:].any()
    assert at[2:, size:].any()
    assert not at[2:, :size].any()


def test_an_image_has_positions_by_place() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
    config = tf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    explainer = lrpx.Explainer(tiny.build(tf.ViTForImageClassification, config))
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row, a in enumerate(explainer({"pixel_values": pixels}, method="pa-lrp")):
        part = a.parts["positions"]
        assert part.shape == {"layer": 1, "place": 5}
        one = explainer({"pixel_values": pixels[row : row + 1]}, method="pa-lrp").parts["positions"]
        assert_allclose(part.values.numpy(), one.values.numpy(), rtol=0, atol=1e-6)
        assert np.abs(part.values.numpy()).max() > 1e-6
    with pytest.raises(MethodError, match=r'pa-lrp-positions is of the positions of tokens.*whose part "positions"'):
        explainer({"pixel_values": pixels}, method="pa-lrp-positions")


@pytest.mark.parametrize("method", ["pa-lrp", "pa-lrp-tokens"])
def test_a_sound_beside_tokens_is_refused_by_name(method: str) -> None:
    """Its places are none of the tokens, and the ledger alone would tell of them."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    size |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 20}
    size |= {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8, "pad_token_id": 0}
    size |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(**size)).eval()
    with pytest.raises(MethodError, match=r"those of an image or a sound beside the tokens.*; use attnlrp or lrp"):
        lrpx.Explainer(model, None)({"input_features": torch.randn(1, 4, 16)}, decoder=[1, 5], method=method)


def test_a_product_with_a_vector_is_no_product_with_positions() -> None:
    """Pooling that scores each token by its product with a learned vector."""

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = tiny.bert_classifier().bert
            self.query, self.head = torch.nn.Parameter(torch.linspace(-1, 1, 16)), torch.nn.Linear(16, 3)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.encoder.get_input_embeddings()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids).last_hidden_state
            scores = hidden @ (self.query if self.as_vector else self.query[:, None])
            return self.head((scores.reshape(*hidden.shape[:2], 1).softmax(1) * hidden).sum(1))

    model = Pooled().double().eval()
    found = []
    for model.as_vector in (True, False):
        found.append(lrpx.Explainer(model, task=lrpx.Task.CLASSIFICATION)(IDS, 1, method="pa-lrp-single-sink"))
    assert_allclose(found[0].relevance, found[1].relevance, rtol=0, atol=1e-12)
    assert_allclose(found[0].parts["positions"].values, found[1].parts["positions"].values, rtol=0, atol=1e-12)


class _Turned(torch.nn.Module):
    """Attention whose queries and keys are turned by rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat([-x[..., 2:], x[..., :2]], -1) * self.sin[:length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class _Stacked(torch.nn.Module):
    """Three layers, in a list or each by a name of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(31, 8)
        layers = [_Turned() for _ in range(3)]
        if kind == "list":
            self.layers = torch.nn.ModuleList(layers)
        elif kind == "again and again":
            self.layers = torch.nn.ModuleList(layers[:1])
            layers = layers[:1] * 3
        elif kind == "dict":
            self.layers = torch.nn.ModuleDict({f"layer_{i}": each for i, each in enumerate(layers)})
        else:
            self.first, self.second, self.third = layers
        self.run, self.head = layers, torch.nn.Linear(8, 31)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for each in self.run:
            x = each(x)
        return self.head(x)


@pytest.mark.parametrize("kind", ["dict", "attributes"])
def test_layers_that_nothing_tells_apart_have_one_sink_alone(kind: str) -> None:
    """Rotary angles of layers that are in no list went into one sink, whose positive part is another number."""
    listed, unlisted = (
        lrpx.Explainer(_Stacked(each).double().eval(), task=lrpx.Task.CAUSAL) for each in ("list", kind)
    )
    assert listed(IDS, 1, method="pa-lrp").parts["positions"].labels["layer"] == ("layers.0", "layers.1", "layers.2")
    for name in ("pa-lrp-single-sink", "pa-lrp-tokens"):
        found, wanted = (each(IDS, 1, method=name).relevance for each in (unlisted, listed))
        assert_allclose(found, wanted, rtol=0, atol=1e-12)
    for name in ("pa-lrp", "pa-lrp-absolute", "pa-lrp-positions"):
        with pytest.raises(MethodError, match=f"{name} has a sink for each layer, and this model meets positions out"):
            unlisted(IDS, 1, method=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_runs_again_and_again_has_a_sink_for_each_call(*, recompute: bool) -> None:
    """As the same layers written out have; the positive part was taken of the sum of all calls."""
    looped, written = (_Stacked(kind).double().eval() for kind in ("again and again", "list"))
    for each in written.layers:
        each.load_state_dict(looped.layers[0].state_dict())
    for name in ("embedding", "head"):
        getattr(written, name).load_state_dict(getattr(looped, name).state_dict())
    explain, wanted = (lrpx.Explainer(each, task=lrpx.Task.CAUSAL, recompute=recompute) for each in (looped, written))
    for name in ("pa-lrp", "pa-lrp-absolute", "pa-lrp-positions", "pa-lrp-single-sink"):
        mine, its = (each(IDS, 1, method=name) for each in (explain, wanted))
        assert_allclose(mine.relevance, its.relevance, rtol=0, atol=1e-12)
        assert_allclose(mine.parts["positions"].values, its.parts["positions"].values, rtol=0, atol=1e-12)
        assert mine.parts["positions"].labels["layer"] == ("layers.0#0", "layers.0#1", "layers.0#2")


@pytest.mark.parametrize("also", ["layers alone", "the model", "a list"])
def test_a_module_that_layers_share_has_a_sink_in_each_of_them(also: str) -> None:
    """As rotary embeddings are that all are given: they had one sink, by the path that the module has in the last."""
    wanted, shared = (_Stacked("list").double().eval() for _ in range(2))
    rotary = _Turned().double()
    if also != "layers alone":
        shared.rotary = torch.nn.ModuleList([rotary]) if also == "a list" else rotary
    for layer in shared.layers:
        layer.rotary, layer.turned = rotary, rotary.turned
    its, mine = (lrpx.Explainer(each, task=lrpx.Task.CAUSAL)(IDS, 1, method="pa-lrp") for each in (wanted, shared))
    assert mine.parts["positions"].labels["layer"] == ("layers.0", "layers.1", "layers.2")
    assert_allclose(mine.parts["positions"].values, its.parts["positions"].values, rtol=0, atol=1e-12)
    assert_allclose(mine.relevance, its.relevance, rtol=0, atol=1e-12)


class _Handing(_Turned):
    """A layer that calls the next, which it keeps in a list of its own."""

    def __init__(self, behind: list[_Handing]) -> None:
        super().__init__()
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.behind[0](x) if self.behind else x


def test_layers_that_call_the_next_have_a_sink_each() -> None:
    """All were in one, that of the first."""
    wanted, handing = (_Stacked("list").double().eval() for _ in range(2))
    layers: list[_Handing] = []
    for each in reversed(handing.layers):
        layers.insert(0, _Handing(layers[:1]).double())
        layers[0].load_state_dict(each.state_dict())
    handing.layers, handing.run = torch.nn.ModuleList(layers), layers[:1]
    its, mine = (lrpx.Explainer(each, task=lrpx.Task.CAUSAL)(IDS, 1, method="pa-lrp") for each in (wanted, handing))
    assert mine.parts["positions"].labels["layer"] == ("layers.0", "layers.1", "layers.2")
    assert_allclose(mine.parts["positions"].values, its.parts["positions"].values, rtol=0, atol=1e-12)
    assert_allclose(mine.relevance, its.relevance, rtol=0, atol=1e-12)


def test_a_model_without_positions_is_refused_by_name() -> None:
    with pytest.raises(MethodError, match="no positions were met"):
        lrpx.Explainer(tiny.mamba())(IDS, method="pa-lrp")


@pytest.mark.parametrize("wrong", [{"of": "all"}, {"sinks": "many"}, {"recipe": lrpx.ATTNLRP}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=r"pass|use"):
        PositionAware("mine", **wrong)


# ------------------------------------------------------------------------------------ lemmas


def test_lemma_3_1_without_positions_the_input_does_not_conserve() -> None:
    explainer = lrpx.Explainer(models.zero_biases(models.tiny_gpt2()))
    conserving = PositionAware("mine", replace(lrpx.LRP, position=rules.uniform), sinks="single")
    whole, tokens = (explainer(IDS, 5, 9, method=replace(conserving, of=of)) for of in ("both", "tokens"))
    assert abs(float(whole.relevance.sum()) - whole.explained.value) < 1e-9
    assert abs(float(tokens.relevance.sum()) - whole.explained.value) > 1e-2


def test_lemma_3_2_rotary_positions_conserve() -> None:
    explainer = lrpx.Explainer(models.zero_biases(models.tiny_llama()))
    a = explainer(IDS, 5, 9, method="pa-lrp-single-sink", ledger=True)
    assert a.ledger is not None
    kinds = a.ledger.by_kind()
    assert set(kinds) == {"tokens", "positions", "softmax residue"}  # nothing is lost at the rotation
    assert abs(float(a.relevance.sum()) + kinds["softmax residue"] - a.explained.value) < 1e-9
    assert abs(kinds["positions"]) > 1e-3


# ---------------------------------------------------------------- a task that positions solve


def test_the_texts_and_their_classes() -> None:
    texts = [positional.draw_text(np.random.default_rng(i)) for i in range(50)]
    assert {positional.label(text) for text in texts} == {0, 1}
    words = positional.tokenizer()
    assert [len(words(text)["input_ids"]) for text in texts] == [len(text.split()) + 1 for text in texts]


@pytest.mark.slow
def test_where_positions_decide_attnlrp_is_blind() -> None:
    torch.manual_seed(positional.SEED)
    words = positional.tokenizer()
    model = positional.small_bert(len(words))
    held = [positional.draw_text(np.random.default_rng([positional.SEED, i])) for i in range(60)]
    positional.train(model.train(), words, 150, held, lambda **_: None)
    explainer = lrpx.Explainer(model.eval(), words)
    assert positional.accuracy(model, words, held) > 0.95
    told = positional.found(explainer, held, ["attnlrp", "pa-lrp-positions"])
    assert told["attnlrp"][0] < 0.5 < 0.9 < told["pa-lrp-positions"][0]
    shares = positional.shares(explainer, held)
    assert abs(shares["tokens"]) < 0.3 < 0.6 < shares["positions"]


def test_a_figure_has_a_cell_for_each_layer_and_token(llama: lrpx.Explainer) -> None:
    pytest.importorskip("matplotlib")
    texts, cells = [], []
    for name in ("attnlrp", "pa-lrp"):
        artists = llama(IDS, 5, 9, method=name).to_figure().artists
        cells.append(sum(type(each).__name__ == "Rectangle" for each in artists))
        texts.append(" ".join(each.get_text() for each in artists if hasattr(each, "get_text")))
    assert cells[1] - cells[0] == 2 * len(IDS)
    assert "layer × token" not in texts[0]
    assert "positions: layer × token" in texts[1]
    assert "model.layers.1" in texts[1]


def test_positions_of_frames_and_of_patches_have_no_sum() -> None:
    (kind,) = choose(["timesformer"], "video-classification")
    explainer = lrpx.Explainer(tiny_model(kind), task=lrpx.Task.IMAGE_CLASSIFICATION)
    with pytest.raises(MethodError, match=r"meets the positions of \d+ places and of \d+.*use attnlrp"):
        explainer({"pixel_values": torch.ones(1, 8, 3, 32, 32)}, method="pa-lrp")


def test_positions_of_pixels_beside_those_of_latents_have_no_sum() -> None:
    """The table that Perceiver joins to its pixels was a constant, and what was told as positions its latents alone."""
    for name in ("Learned", "Fourier"):
        (kind,) = (each for each in choose(["perceiver"], "image-classification") if name in each.name)
        explainer = lrpx.Explainer(tiny_model(kind), task=lrpx.Task.IMAGE_CLASSIFICATION)
        for images in (torch.ones(3, 32, 32), torch.ones(2, 3, 32, 32)):
            with pytest.raises(MethodError, match=r"input meets the positions of 1024 places and of 64.*use attnlrp"):
                explainer(images, method="pa-lrp")


def test_the_features_of_an_images_angles_are_not_taken_for_its_places() -> None:
    # both numbers, those of the places and those of the frequencies, are ranges that are made in the forward pass
    (kind,) = (one for one in choose(["vjepa2"]) if one.name == "VJEPA2ForVideoClassification")
    explainer = lrpx.Explainer(tiny_model(kind), task=lrpx.Task.IMAGE_CLASSIFICATION)
    with pytest.raises(MethodError, match=r"nothing tells which dimension of positions of shape \[1, .*use attnlrp"):
        explainer({"pixel_values_videos": torch.ones(1, 4, 3, 64, 64)}, method="pa-lrp")


def test_biases_of_fewer_queries_than_keys_are_met_where_the_model_has_kept_them() -> None:
    """LeViT keeps its biases for the second call, in which those where it has fewer queries were constants."""
    (levit,) = choose(["levit"], "image-classification")[:1]
    explainer = lrpx.Explainer(tiny_model(levit))
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    once, again = (explainer(image, 1, method="pa-lrp").parts["positions"].values for _ in range(2))
    assert_allclose(again.numpy(), once.numpy(), rtol=0, atol=1e-6)


class _Angled(torch.nn.Module):
    """Patches of an image whose places are added, and turn what heads have of them by angles."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.patches, self.head = torch.nn.Conv2d(3, 24, 2, 2), torch.nn.Linear(24, 5)
        self.places = torch.nn.Parameter(torch.randn(1, 16, 24))
        self.kept = torch.nn.Buffer(self.angles())

    @staticmethod
    def angles() -> torch.Tensor:
        places, frequencies = torch.arange(16), 50 ** -(torch.arange(0, 4, 2) / 4)
        one, other = ((each[:, None] * frequencies).repeat(1, 2) for each in (places // 4, places % 4))
        return torch.cat([one, other], -1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixel_values).flatten(2).mT
        if self.how == "places before rows":
            return self.head((x.transpose(0, 1) + self.places.transpose(0, 1)).mean(0))
        x = (x + self.places).unflatten(-1, (3, 8)).transpose(1, 2)
        angles = self.kept if self.how == "kept" else self.angles()
        return self.head((x * angles.cos()).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("how", ["kept", "made", "places before rows"])
def test_angles_of_an_image_of_which_nothing_tells_the_places_are_refused_by_name(how: str) -> None:
    """Those that were kept were none, and of those that are made the features were the places."""
    model, pixels = _Angled(how).eval(), torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    explainer = lrpx.Explainer(model, task=lrpx.Task.IMAGE_CLASSIFICATION)
    with pytest.raises(MethodError, match="nothing tells wh"):
        explainer(pixels, 1, method="pa-lrp")
    assert len(explainer(pixels, 1, method="attnlrp")) == 2


@pytest.mark.parametrize("length", [5, 7])
def test_positions_of_an_image_are_no_tokens_however_many_there_are(length: int) -> None:
    """Of the image there are five places."""
    ids = torch.tensor([[30, 30, 30, 30, 3, 4, 5][:length]])
    given = {"input_ids": ids, "pixel_values": torch.ones(1, 3, 8, 8, dtype=torch.float64)}
    with pytest.raises(MethodError, match="it has positions for 5 places, which are none of the tokens"):
        lrpx.Explainer(tiny.llava())(given, 1, method="pa-lrp")


def test_decays_of_blocks_are_refused_where_a_text_is_longer_than_one() -> None:
    """They were positions of a text of one block, and constants in a longer one or in its batch."""
    (minimax,) = choose(["minimax"], "causal-lm")
    model = tiny_model(minimax)
    blocks = [module for module in model.modules() if hasattr(module, "block_size")]
    assert {module.block_size for module in blocks} == {4}
    explainer = lrpx.Explainer(model, task=lrpx.Task.CAUSAL)
    alone = explainer(IDS[:3], method="pa-lrp")
    assert alone.parts["positions"].values.shape == (2, 3)
    for texts in (IDS, [IDS[:3], IDS]):
        with pytest.raises(MethodError, match=r"a table of shape .* has places of a block.*; use attnlrp"):
            explainer(texts, method="pa-lrp")


@pytest.mark.parametrize("kind", ["bloom", "mpt", "minimax", "llama4_text", "dots3_note_text", "llama", "mpnet"])
def test_texts_of_few_tokens_have_the_positions_that_they_have_beside_longer_ones(kind: str) -> None:
    """Of one token no other place tells; two angles of three tokens differ at fewer features than tokens."""
    (model_class,) = choose([kind], "masked-lm" if kind == "mpnet" else "causal-lm")
    model = tiny_model(model_class)
    explainer = lrpx.Explainer(model)
    for length in (1, 3):
        alone, beside = (
            explainer([IDS[:length], IDS[1:other]], 5, 9, method="pa-lrp-single-sink", position=0)[0]
            for other in (1 + length, 5)
        )
        part, other = (found.parts["positions"] for found in (alone, beside))
        assert part.labels["layer"] == other.labels["layer"]
        assert_allclose(part.values.numpy(), other.values.numpy(), rtol=0, atol=1e-5)
        assert_allclose(alone.relevance.numpy(), beside.relevance.numpy(), rtol=0, atol=1e-5)


def test_what_hangs_on_the_text_at_a_place_is_no_position() -> None:
    """Qwen4's n-grams of a text of one token."""
    (kind,) = choose(["qwen4_exp_text"], "causal-lm")
    for length in (1, 3):
        with pytest.raises(MethodError, match="nothing tells which dimension of positions"):
            lrpx.Explainer(tiny_model(kind))(IDS[:length], method="pa-lrp")


@pytest.mark.parametrize(("length", "decoder"), [(3, 1), (1, 1), (5, 2)])
def test_places_of_a_text_that_the_model_pads_are_not_the_one_token_of_the_decoder(length: int, decoder: int) -> None:
    (kind,) = choose(["led"], "seq2seq-lm")
    with pytest.raises(MethodError, match="places, which are none of the tokens"):
        lrpx.Explainer(tiny_model(kind))(IDS[:length], decoder=[0, *IDS[: decoder - 1]], method="pa-lrp")


def test_places_of_patches_are_none_of_the_tokens_where_there_are_as_many_features() -> None:
    """BLT turns a place more than there are tokens, by angles of which some are the same in float32 everywhere."""
    (kind,) = choose(["blt"], "causal-lm")
    explainer = lrpx.Explainer(tiny_model(kind))
    for length in (7, 8):
        with pytest.raises(MethodError, match=f"positions for {length + 1} places, which are none of the tokens"):
            explainer([*IDS, 6][:length], method="pa-lrp")


def test_a_sink_of_each_head_is_no_position_however_many_tokens_there_are() -> None:
    """GraniteMoeSWA takes [1, H, 1] from [B, H, T]: with as many tokens as heads it had a place for each head."""
    (kind,) = choose(["granitemoe_swa"], "causal-lm")
    explainer = lrpx.Explainer(tiny_model(kind))
    with pytest.raises(MethodError, match=r"which dimension of a table of shape \[1, 4, 1\] is the tokens'"):
        explainer(IDS[:4], method="pa-lrp")
    alone = explainer(IDS[:3], 5, 9, method=PA).parts["positions"].values
    beside = explainer([IDS[:3], IDS], 5, 9, method=PA)[0].parts["positions"].values
    assert_allclose(alone.numpy(), beside.numpy(), rtol=0, atol=1e-5)


class _Typed(torch.nn.Module):
    """Adds what is looked up of tokens, of their types and of their places, in some order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.tables = torch.nn.ModuleDict({name: torch.nn.Embedding(40, 8) for name in ("words", "types", "places")})
        self.layers = torch.nn.ModuleList([_Turned()])
        for seed, weights in enumerate(self.parameters()):
            torch.nn.init.normal_(weights, generator=torch.Generator().manual_seed(seed))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.tables["words"]

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        ids = {"words": input_ids, "types": input_ids * 0, "places": torch.arange(input_ids.shape[1])}
        first, second, third = (self.tables[name](ids[name]) for name in self.order.split())
        x = self.layers[0](first + second + third)
        return x @ self.tables["words"].weight.T


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("order", ["types words places", "types places words", "places types words"])
def test_types_of_tokens_may_be_looked_up_before_these(order: str, length: int) -> None:
    """No tokens came before them, and the error was Python's own."""
    found, wanted = (
        lrpx.Explainer(_Typed(each).double().eval(), task=lrpx.Task.CAUSAL)(IDS[:length], target=5, method="pa-lrp")
        for each in (order, "words types places")
    )
    assert_allclose(found.relevance.numpy(), wanted.relevance.numpy(), rtol=1e-4, atol=1e-5)
    assert_allclose(found.parts["positions"].values, wanted.parts["positions"].values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [4, 6])
def test_positions_of_what_an_encoder_reads_and_a_decoder_are_refused_of_a_series(length: int) -> None:
    """Of as many past as future places, which is the default, they were summed as the same."""
    sizes = {f"{name}_{what}": 2 for name in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    lengths = {"context_length": 6, "prediction_length": length, "lags_sequence": [1, 2]}
    config = tf.TimeSeriesTransformerConfig(d_model=16, num_time_features=1, **sizes, **lengths)
    model = tf.TimeSeriesTransformerForPrediction(config).eval()
    past, future = torch.arange(8.0)[None], torch.arange(float(length))[None]
    given = {"past_values": past, "past_time_features": past[..., None], "past_observed_mask": torch.ones(1, 8)}
    given |= {"future_values": future, "future_time_features": future[..., None]}
    with lrpx.propagate(model, lrpx.PA_LRP, observe=()) as trace:
        trace.explain(model(**given).params[0][0, -1])
    with pytest.raises(MethodError, match="positions of two inputs"):
        trace.positions()
