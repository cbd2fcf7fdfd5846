"""Units ranked by relevance, against slow twins and plain loops; over texts; what is shown, kept and refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers as tf

import lrpx
from lrpx.errors import InputError, MethodError, ModelError, ResultFileError, TargetError
from lrpx.metrics._statistics import interval, intervals
from lrpx.ranking import MeanUnit, Ranking
from lrpx.recipes import ATTNLRP, LRP
from lrpx.units import KINDS, places
from tests import tiny
from tests.engine.samples import SAMPLES, token_ids
from tests.reference import bert, gpt2, llama, models

IDS = [5, 9, 3, 12, 7, 22, 8]
ROWS = [IDS, [4, 3, 17], [9, 9, 30, 6, 11]]


def twin(name, model, recipe, target, ids=IDS):
    weights = np.eye(31)[target]
    module, position = {"llama": (llama, len(ids) - 1), "gpt2": (gpt2, len(ids) - 1), "bert": (bert, 2)}[name]
    extra = {"token_type_ids": np.zeros(len(ids), dtype=int)} if name == "bert" else {}
    return module.explain(model, np.array(ids), position, weights, recipe, **extra)


BUILD = {"llama": models.tiny_llama, "gpt2": models.tiny_gpt2, "bert": models.tiny_bert}


def ranked_in_loops(layers, size, value):
    """Every unit at every position, in plain loops, the largest absolute relevance first."""
    found = []
    for number, layer in enumerate(layers):
        for position in range(layer.shape[0]):
            for unit in range(layer.shape[1] // size):
                relevance = sum(float(layer[position, unit * size + i]) for i in range(size))
                found.append((number, unit, position, relevance, relevance / value))
    return sorted(found, key=lambda each: -abs(each[3]))


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", BUILD)
def test_neurons_and_heads_are_those_of_the_twin(name, recipe):
    model = BUILD[name]()
    expected = twin(name, model, recipe.name, 5)
    explainer = lrpx.Explainer(model)
    position = 2 if name == "bert" else None
    for kind, layers, size in (("neurons", expected.neurons, 1), ("heads", expected.heads, 4)):
        found = explainer.neurons(IDS, 5, kind=kind, method=recipe, top=30, position=position)
        loops = ranked_in_loops(layers, size, expected.value)
        assert found.count == len(loops)
        for row, (layer, unit, at, relevance, share) in zip(found, loops, strict=False):
            assert (row.layer, row.unit, row.position) == (layer, unit, at)
            assert abs(row.relevance - relevance) < 1e-9
            assert abs(row.share - share) < 1e-9


def test_layers_and_activations_are_what_stands_there():
    model = models.tiny_llama()
    expected = twin("llama", model, "lrp", 5)
    found = lrpx.Explainer(model).neurons(IDS, 5, kind="residual", method="lrp", top=99)
    assert len(found) == 14
    for row in found:
        if row.layer == 0:  # what leaves the first enters the second
            assert abs(row.relevance - expected.layers[1][row.position].sum()) < 1e-9
    seen = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    handle.remove()
    for row in lrpx.Explainer(model).neurons(IDS, 5, top=999):
        if row.layer == 1:
            assert row.activation == float(seen[0][0, row.position, row.unit])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "modernbert"])
def test_every_kind_is_what_the_trace_says(name, kind):
    model = SAMPLES[name].build()
    ids = token_ids()[:1]
    position = 3
    with lrpx.propagate(model, ATTNLRP) as trace:
        value = model(input_ids=ids).logits[0, position, 4]
    trace.explain(value)
    found = lrpx.Explainer(model).neurons(ids[0].tolist(), 4, kind=kind, top=10**6, position=position)
    for place in places(model, kind):
        relevance = place.of(trace.relevance(place.path, of=place.side))[0]
        for row in found:
            if row.path == place.path:
                assert abs(row.relevance - float(relevance[row.position, row.unit])) < 1e-9


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_has_the_numbers_of_each_text_alone(side):
    explainer = lrpx.Explainer(models.tiny_llama(), padding_side=side)
    kinds = {kind: explainer.neurons(ROWS, 5, kind=kind, top=10**6) for kind in ("neurons", "heads")}
    for kind, found in kinds.items():
        alone = [explainer.neurons(ids, 5, kind=kind, top=10**6) for ids in ROWS]
        assert found.count == alone[0].count / len(IDS)
        for row in found:
            sums = [sum(u.relevance for u in each if (u.layer, u.unit) == (row.layer, row.unit)) for each in alone]
            assert abs(row.total - sum(sums)) < 1e-5  # kept in float32
            assert abs(row.mean - sum(sums) / 3) < 1e-5
            assert row.low - 1e-9 <= row.mean <= row.high + 1e-9


def test_only_some_tokens_are_ranked():
    explainer = lrpx.Explainer(models.tiny_llama())
    every = explainer.neurons(IDS, 5, top=10**6)
    for at in (-1, [0, 3], [6, -7]):
        tokens = {t % 7 for t in ([at] if isinstance(at, int) else at)}
        found = explainer.neurons(IDS, 5, at=at, top=10)
        assert list(found) == [row for row in every if row.position in tokens][:10]
        assert found.count == len(tokens) * 48
        summed = explainer.neurons([IDS], 5, at=at, top=10**6)
        for row in summed:
            parts = [u.relevance for u in every if (u.layer, u.unit) == (row.layer, row.unit) and u.position in tokens]
            assert abs(row.total - sum(parts)) < 1e-5
    for wrong in (7, [], [0.5]):
        with pytest.raises(InputError, match="token"):
            explainer.neurons(IDS, 5, at=wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_torchs_default_dtype_does_not_matter(dtype):
    """Sums over texts were kept in it: in float16 rounded without a word, in bfloat16 there was none at all."""
    explainer = lrpx.Explainer(models.tiny_llama())
    expected = explainer.neurons(ROWS, 5, top=10**6)
    torch.set_default_dtype(dtype)
    try:
        found = explainer.neurons(ROWS, 5, top=10**6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.rows == expected.rows


def test_two_sets_of_texts_are_compared():
    explainer = lrpx.Explainer(models.tiny_llama())
    found = explainer.neurons(ROWS, 5, versus=ROWS[1:], top=10**6)
    one, other = (explainer.neurons(rows, 5, top=10**6) for rows in (ROWS, ROWS[1:]))
    means = [{(row.layer, row.unit): row.mean for row in each} for each in (one, other)]
    assert found.texts == (3, 2)
    for row in found:
        assert abs(row.mean - (means[0][row.layer, row.unit] - means[1][row.layer, row.unit])) < 1e-12
    same = explainer.neurons(ROWS, 5, versus=ROWS, top=3)
    assert all(row.mean == 0 and row.low < 0 < row.high for row in same)
    assert [abs(row.mean) for row in found] == sorted((abs(row.mean) for row in found), reverse=True)


def test_intervals_of_many_means_are_those_of_each():
    values = np.random.default_rng(0).normal(size=(50, 3)) * [1, 5, 0] + [0, 2, 7]
    low, high = intervals(values)
    for i in range(3):
        expected = interval(values[:, i])
        width = expected[1] - expected[0]
        assert abs(low[i] - expected[0]) <= 0.06 * width
        assert abs(high[i] - expected[1]) <= 0.06 * width
    assert low[2] == high[2] == 7
    less = intervals(values, values - 1)
    assert (less[0] < 1 + 1e-12).all()
    assert (less[1] > 1 - 1e-12).all()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("bart", [4, 8, 2]), ("bert_classifier", IDS), ("gpt2_classifier", IDS), ("codegen", IDS), ("mamba", IDS),
        ("neox", IDS), ("opt", IDS), ("xlnet", IDS[1:]), ("bloom", IDS),
    ],
)  # fmt: skip
def test_other_families(name, given):
    explainer = lrpx.Explainer(getattr(tiny, name)())
    decoder = {"decoder": [2, 5, 9]} if name == "bart" else {}
    position = 1 if name == "xlnet" else None
    found = explainer.neurons(given, 1, top=10**6, position=position, **decoder)
    assert {row.position for row in found} == set(range(len(given) + 3 * bool(decoder)))
    assert any(row.relevance for row in found)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(kind, "xlnet") for kind in ("neurons", "mlp", "residual")],
        ("neurons", "tokens_first"),
        ("mlp", "tokens_first"),
    ],
)
def test_as_many_texts_as_tokens_where_the_tokens_come_before_the_rows(kind, name):
    """XLNet computes with ``[T, B, d]``, which no shape tells from ``[B, T, d]`` where both are as many; nor
    ``[T·B, d]`` from ``[B·T, d]``, however many."""
    texts = [[11, 25, 3, 4], [12, 24, 1, 27], [30, 29, 8, 3], [9, 8, 7, 6]]
    explainer = lrpx.Explainer(getattr(tiny, name)(), task=lrpx.Task.CAUSAL if name == "tokens_first" else None)
    how = {"kind": kind, "at": 1, "top": 10**6, "position": 2}
    found = {(row.path, row.unit): row.mean for row in explainer.neurons(texts, 3, **how)}
    for text in texts:
        for row in explainer.neurons(text, 3, **how):
            found[row.path, row.unit] -= row.relevance / len(texts)
    assert max(map(abs, found.values())) < 1e-6  # sums are kept in float32


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_what_several_layers_read_is_ranked_once(kind):
    """Gemma's last layers read the keys and values of layers before them."""
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 4, "global_head_dim": 4}
    shared = {"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3}
    model = tiny.build(
        tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**{**tiny.SIZES, **sizes, **shared}, vocab_size_per_layer_input=31)
    )
    explainer = lrpx.Explainer(model)
    found = explainer.neurons(IDS, 5, kind=kind, top=10**6)
    paths = [f"model.layers.{layer}.self_attn.{kind[0]}_proj" for layer in range(2)]
    with lrpx.propagate(model, ATTNLRP) as trace:
        value = model(input_ids=torch.tensor([IDS])).logits[0, -1, 5]
    trace.explain(value)
    expected = {(layer, path): float(trace.relevance(path).sum()) for layer, path in enumerate(paths)}
    sums = dict.fromkeys(expected, 0.0)
    for row in found:
        sums[row.layer, row.path] += row.relevance
    assert found.count == len(found) == 2 * 8 * len(IDS)
    assert sums == pytest.approx(expected, rel=0, abs=1e-9)
    means = explainer.neurons([IDS, IDS], 5, kind=kind, top=10**6)
    assert sorted((row.path, row.unit) for row in means) == [(path, unit) for path in paths for unit in range(8)]


def with_latent_values():
    """DeepSeek's values, which one matrix makes of ``[B, 1, T, r]``."""
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    sizes = {**tiny.SIZES, **ranks, "first_k_dense_replace": 2}
    return tiny.build(tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config(**sizes))


def test_values_that_are_made_beside_a_dimension_of_one_are_ranked():
    model = with_latent_values()
    explainer, chosen = lrpx.Explainer(model), places(model, "values")
    found = explainer.neurons(IDS, 5, kind="values", top=10**6)
    with lrpx.propagate(model, ATTNLRP) as trace:
        value = model(input_ids=torch.tensor([IDS])).logits[0, -1, 5]
    trace.explain(value)
    for place in chosen:
        expected = place.of(trace.relevance(place.path)[0, 0])
        there = {(row.position, row.unit): row.relevance for row in found if row.layer == place.layer}
        assert len(there) == expected.numel()
        assert max(abs(float(expected[at]) - there[at]) for at in there) < 1e-9
    means = {(row.path, row.unit): row.mean for row in explainer.neurons(ROWS, 5, kind="values", top=10**6)}
    for text in ROWS:
        for row in explainer.neurons(text, 5, kind="values", top=10**6):
            means[row.path, row.unit] -= row.relevance / len(ROWS)
    assert max(map(abs, means.values())) < 1e-6  # sums are kept in float32


def test_an_encoders_and_a_decoders_tokens_are_told_apart():
    explainer = lrpx.Explainer(tiny.bart())
    found = explainer.neurons([4, 8, 2], 7, decoder=[2, 5, 9], top=10**6)
    for row in found:
        assert (row.position < 3) == ("encoder" in row.path.split(".")[1])


def test_an_encoder_and_a_decoder_that_both_fill_the_context_are_refused():
    model = tiny.bart()
    limit = model.config.max_position_embeddings
    ids = [5 + i % 20 for i in range(limit)]
    explainer = lrpx.Explainer(model)
    for ask in (explainer.neurons, explainer.flow, partial(explainer, method="rollout")):
        with pytest.raises(InputError, match=f"{limit} alike.*shorten one text"):
            ask(ids, 7, decoder=ids)
    found = explainer.neurons(ids[1:], 7, decoder=ids, top=10)  # which leaves room for padding, but for none wider
    assert len(found) == 10


@pytest.mark.parametrize("length", [4, 5, 6])
def test_an_images_places_are_no_tokens_however_many_there_are(length):
    """An image of five places beside a text."""
    torch.manual_seed(0)
    given = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 2][-length:]]),
        "attention_mask": torch.ones(1, length, dtype=torch.long),
        "pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64),
    }
    explainer = lrpx.Explainer(tiny.clip())
    layer = "vision_model.encoder.layers.0.self_attn"
    for ask in (
        partial(explainer.neurons, kind="residual"),
        partial(explainer.neurons, kind="heads"),
        explainer.flow,
        partial(explainer.paths, kind="heads", layer=layer, units=[0]),
    ):
        with pytest.raises(MethodError, match="computed without the input's tokens"):
            ask(given)
    assert explainer.paths(given, kind="heads", layer="text_model.encoder.layers.0.self_attn", units=[0])


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_sounds_places_are_no_tokens_however_many_there_are(length):
    """A sound of eight places and a decoder's tokens."""
    torch.manual_seed(0)
    sound = {"input_features": torch.randn(1, 32, 4, dtype=torch.float64)}
    explainer = lrpx.Explainer(tiny.speech_to_text())
    for ask in (explainer.neurons, explainer.flow):
        with pytest.raises(MethodError, match="computed without the input's tokens"):
            ask(sound, 7, decoder=[2, 5, 9, 4, 3, 6, 7, 8, 11][:length])


def test_an_image_has_units_at_places():
    model = SAMPLES["vit"].build()
    found = lrpx.Explainer(model).neurons(SAMPLES["vit"].batch()["pixel_values"][0], 1, top=10**6)
    assert {row.position for row in found} == set(range(5))
    assert {row.token for row in found} == {""}


def test_nothing_of_the_model_changes():
    model = models.tiny_llama()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    lrpx.Explainer(model).neurons(IDS, 5)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ------------------------------------------------------------------------------ the result


@pytest.fixture(scope="module")
def bundled():
    return lrpx.Explainer.from_pretrained()


def test_it_is_kept_and_read_again(tmp_path, bundled):
    for found in (bundled.neurons("The doors", " are"), bundled.neurons(["The doors", "A cat"], " are")):
        found.save(tmp_path / "found.json")
        assert Ranking.load(tmp_path / "found.json") == found
        table = found.to_dataframe()
        assert list(table.columns) == list(found.columns)
        assert len(table) == 20
    assert isinstance(found[0], MeanUnit)
    for wrong in ("", "{", "{}", json.dumps({"format": 9}), json.dumps(found.to_dict() | {"rows of": "x"})):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(ResultFileError, match="is no ranking"):
            Ranking.load(tmp_path / "wrong.json")
    with pytest.raises(ResultFileError):
        Ranking.load(tmp_path / "missing.json")


def test_a_file_that_was_changed_is_no_ranking(tmp_path, bundled):
    file = tmp_path / "found.json"
    found = bundled.neurons("The doors", " are", top=2)
    found.save(file)
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with contextlib.suppress(ResultFileError):  # a blank between the values may be another one
            assert Ranking.load(file) == found
    for wrong in (float("nan"), "0.3", None, True):
        replace(found, rows=(replace(found[0], relevance=wrong),)).save(file)
        with pytest.raises(ResultFileError, match="the relevance of a row is"):
            Ranking.load(file)


CALLED = "neurons", "heads", "query features", "key features", "value features", "attention", "mlp", "layers"


@pytest.mark.parametrize("forced", ["", "1"])
def test_what_is_shown(forced, bundled, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", forced)  # as a notebook's kernel has it
    found = bundled.neurons("The <b>doors</b>\x1b[31m & more", " are", top=40)
    page = found.to_html()
    assert "<b>doors" not in page
    assert "\x1b" not in page + str(found) + found._repr_html_()
    assert "logit of ' are'" in str(found)
    assert "default-src 'none'" in page
    several = str(bundled.neurons(["The doors", "A cat"], " are", versus=["The door"], top=3))
    assert "2 texts less 1 text" in several
    assert "sum: over the first texts" in several
    assert "95 % bootstrap" in several
    for kind, many in zip(KINDS, CALLED, strict=True):
        assert many in str(bundled.neurons("The doors", " are", kind=kind, top=2))


def test_what_is_refused(bundled):
    with pytest.raises(MethodError, match="tells nothing of neurons"):
        bundled.neurons("The doors", method="leave-one-out")
    with pytest.raises(MethodError, match="tells nothing of neurons"):
        bundled.neurons("The doors", method="gradient-l1")
    with pytest.raises(MethodError, match="no units called 'cells'"):
        bundled.neurons("The doors", kind="cells")
    with pytest.raises(InputError, match="top is 0"):
        bundled.neurons("The doors", top=0)
    with pytest.raises(InputError, match="one question of each input"):
        bundled.neurons("The doors", [" are", " is"])
    with pytest.raises(InputError, match="pass both as lists"):
        bundled.neurons("The doors", versus=["A cat"])
    with pytest.raises(TargetError):
        bundled.neurons("The doors", "no such token at all")
    with pytest.raises(ModelError, match="training mode"):
        lrpx.Explainer(models.tiny_llama().train()).neurons(IDS)
