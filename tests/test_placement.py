"""A model split over devices by accelerate, here the CPU and the disk: the same numbers as the model undivided."""

from __future__ import annotations

import warnings

import pytest
import torch

import lrpx
from lrpx import Explainer
from lrpx.errors import ModelError
from tests import tiny
from tests.reference import models

IDS = [3, 14, 15, 9, 26]
BUILDS = {
    "llama": models.tiny_llama,
    "gpt2": models.tiny_gpt2,
    "bert classifier": tiny.bert_classifier,
    "mamba": tiny.mamba,
    "t5, tied": models.tiny_t5,
    "bart, tied": tiny.bart,
    "marian": tiny.marian,
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@pytest.fixture(scope="module")
def accelerate():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("accelerate", reason="accelerate is not installed")


def on_cpu(accelerate, model, _):
    """Every parameter is on "meta" between the calls of its module."""
    return accelerate.cpu_offload(model, torch.device("cpu"))


def on_disk(accelerate, model, folder):
    return accelerate.disk_offload(model, str(folder), torch.device("cpu"))


def divided(accelerate, model, folder, one="disk", other="cpu", main="cpu"):
    """Every other leaf of the tree of modules on the disk, the token embedding among them; or on another device."""
    leaves = [path for path, module in model.named_modules() if not [*module.children()] and [*module.parameters()]]
    held = {path.rsplit(".", 1)[0] if "." in path else path for path, _ in model.named_parameters()}
    places = {path: one if i % 2 == 0 else other for i, path in enumerate(leaves)}
    places |= dict.fromkeys(held - set(leaves), other)
    return accelerate.dispatch_model(
        model, places, main_device=main, offload_dir=str(folder), force_hooks=True, offload_buffers=False
    )


def same(found, want):
    assert torch.equal(found.relevance, want.relevance)
    assert found.explained == want.explained
    assert found.provenance == want.provenance


@every_build
@pytest.mark.parametrize("place", [on_cpu, on_disk])
@pytest.mark.parametrize("method", ["attnlrp", "lrp", "gradient-x-input"])
def test_an_offloaded_model_is_explained_as_the_whole(accelerate, build, place, method, tmp_path):
    moved = place(accelerate, build(), tmp_path)
    assert moved.get_input_embeddings().weight.device.type == "meta"
    want = Explainer(build())([IDS, IDS[:3]], method=method)
    for found, one in zip(Explainer(moved)([IDS, IDS[:3]], method=method), want, strict=True):
        same(found, one)
    assert moved.get_input_embeddings().weight.device.type == "meta"


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.bert_classifier])
def test_a_device_map_of_the_cpu_and_the_disk(accelerate, build, tmp_path):
    moved = divided(accelerate, build(), tmp_path)
    assert {parameter.device.type for parameter in moved.parameters()} == {"cpu", "meta"}
    for method in ("attnlrp", "lrp"):
        same(Explainer(moved)(IDS, method=method), Explainer(build())(IDS, method=method))


def test_a_model_loaded_with_a_device_map(accelerate, tmp_path):
    """The way of transformers: ``from_pretrained(..., device_map=..., offload_folder=...)``."""
    places = {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    whole = Explainer.from_pretrained()
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(len(whole.model.model.layers))}
    moved = Explainer.from_pretrained(device_map=places, offload_folder=str(tmp_path))
    assert {parameter.device.type for parameter in moved.model.parameters()} >= {"meta"}
    found, want = (e("The doors of the house", " are", " is") for e in (moved, whole))
    assert torch.equal(found.relevance, want.relevance)


@every_build
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_propagate_names_the_embeddings_and_gives_the_same_numbers(accelerate, build, recompute):
    found = []
    for model in (build(), accelerate.cpu_offload(build(), torch.device("cpu"))):
        ids = torch.tensor([IDS])
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
        with lrpx.propagate(model, lrpx.ATTNLRP, observe=(), recompute=recompute) as trace:
            value = model(**inputs).logits.flatten()[2]
        found.append((trace.explain(value), [trace.source_relevance(source) for source in trace.sources]))
        assert all(hasattr(model.get_submodule(path), "weight") for source in trace.sources for path in source.paths)
    (value, relevance), (other_value, other_relevance) = found
    assert torch.equal(value, other_value)
    assert all(map(torch.equal, relevance, other_relevance))


@every_build
def test_the_ledger_of_an_offloaded_model_has_the_same_entries(accelerate, build):
    found = []
    for model in (build(), accelerate.cpu_offload(build(), torch.device("cpu"))):
        ids = torch.tensor([IDS])
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
        with lrpx.propagate(model, lrpx.LRP, observe=(), ledger=True) as trace:
            value = model(**inputs).logits.flatten()[2]
        trace.explain(value)
        assert trace.ledger().closes()
        found.append(trace.ledger().by_kind())
    assert found[0] == found[1]


def test_nothing_of_an_offloaded_model_changes(accelerate):
    model = accelerate.cpu_offload(models.tiny_llama(), torch.device("cpu"))

    def state():
        return {path: (type(p), p.device, p.requires_grad, p.grad) for path, p in model.named_parameters()}

    with torch.no_grad():
        before = state(), model(torch.tensor([IDS])).logits
    Explainer(model)(IDS)
    with torch.no_grad():
        after = state(), model(torch.tensor([IDS])).logits
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("path", ["lm_head", "model.layers.1.mlp", ""])
def test_weights_that_were_never_loaded_are_refused(path):
    """torch multiplies a tensor on the CPU with a weight on "meta" all the same, and gives what is in memory."""
    model = models.tiny_llama()
    model.get_submodule(path).to("meta")
    with pytest.raises(ModelError, match='is on the device "meta"'):
        Explainer(model)
