"""The tiny models: tiny, the same each time, with everything their type has, and nothing at its default."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto import modeling_auto

from lrpx.coverage import choose, every_class
from lrpx.coverage._classes import MAPPINGS, ModelClass
from lrpx.coverage._inputs import tiny_inputs
from lrpx.coverage._tiny import SIZES, tiny_config, tiny_model
from lrpx.errors import InputError


def one(mapping, model_type):
    (found,) = choose([model_type], mapping)
    return found


def test_every_class_is_there_once():
    classes = every_class()
    held = [names for names in vars(modeling_auto) if names.startswith("MODEL_") and names.endswith("_MAPPING_NAMES")]
    assert sorted(MAPPINGS.values()) == sorted(held)
    assert {mapping for c in classes for mapping in (c.mapping, *c.others)} == set(MAPPINGS)
    assert len({c.name for c in classes}) == len(classes)
    wanted = {
        name
        for mapping in held
        for names in getattr(modeling_auto, mapping).values()
        for name in ((names,) if isinstance(names, str) else names)
    }
    assert {c.name for c in classes} == wanted
    assert sum(c.mapping == "causal-lm" for c in classes) >= 165
    wanted = ModelClass("causal-lm", "GPT2LMHeadModel", "gpt2", ("gpt-sw3", "gpt2"), ("pretraining",))
    assert one("causal-lm", "gpt-sw3") == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mapping": "poetry"}, "there is no mapping 'poetry'; the mappings are causal-lm, seq2seq-lm"),
        ({"model_types": ["gpt2", "parrot"]}, "no mapping has a model type 'parrot'; name one as transformers does"),
        ({"model_types": ["vit"], "mapping": "causal-lm"}, "no class is left to cover"),
    ],
)
def test_wrong_choices_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        choose(**arguments)


def test_a_hybrid_has_each_kind_of_layer():
    assert tiny_config(one("causal-lm", "qwen3_next")).layer_types == ["linear_attention", "full_attention"]
    assert set(tiny_config(one("causal-lm", "axk2")).mlp_layer_types) == {"dense", "sparse"}
    assert set(tiny_config(one("causal-lm", "gemma3_text")).layer_types) == {"sliding_attention", "full_attention"}


def test_keys_are_grouped_as_by_default():
    assert tiny_config(one("causal-lm", "mixtral")).num_key_value_heads == 2
    assert tiny_config(one("causal-lm", "deepseek_v3")).num_key_value_heads == SIZES["num_attention_heads"]


@pytest.mark.parametrize(
    ("mapping", "model_type"),
    [("causal-lm", "gpt2"), ("masked-lm", "bert"), ("seq2seq-lm", "bart"), ("image-classification", "resnet")],
)
def test_no_parameter_is_a_constant(mapping, model_type):
    model_class = one(mapping, model_type)
    model = tiny_model(model_class)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.numel() == 1 or parameter.min() < parameter.max(), name
    state = torch.get_rng_state()
    for a, b in zip(model.parameters(), tiny_model(model_class).parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_hold_no_special_token():
    model = tiny_model(one("causal-lm", "gemma3"))
    inputs = tiny_inputs(one("causal-lm", "gemma3"), model)
    assert inputs.keys() == {"input_ids", "use_cache"}
    assert not torch.isin(inputs["input_ids"], model.config.image_token_index).any()


@pytest.mark.parametrize(
    ("mapping", "model_type", "shapes"),
    [
        ("multiple-choice", "bert", {"input_ids": (1, 2, 12)}),
        ("video-classification", "videomae", {"pixel_values": (1, 16, 3, 32, 32)}),
        ("zero-shot-image-classification", "clip", {"input_ids": (1, 12), "pixel_values": (1, 3, 32, 32)}),
        ("speech-seq-2-seq", "whisper", {"input_features": (1, 80, 128), "decoder_input_ids": (1, 6)}),
        ("ctc", "wav2vec2-conformer", {"input_values": (1, 2000)}),
        ("base", "qwen3_vl_vision", {"hidden_states": (16, 384), "grid_thw": (1, 3)}),
        ("time-series-classification", "patchtst", {"past_values": (1, 32, 1)}),
    ],
)
def test_inputs_are_what_the_model_takes(mapping, model_type, shapes):
    (found,) = choose([model_type], mapping)
    inputs = tiny_inputs(found, tiny_model(found))
    assert {name: tuple(value.shape) for name, value in inputs.items() if name != "use_cache"} == shapes
