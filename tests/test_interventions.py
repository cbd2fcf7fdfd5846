"""Interventions against hand-written hooks: every change, every place, positions with a cache, scope, and refusals."""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo import eval_frame
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

import lrpx
from lrpx._hooks import Hooks, plainly
from lrpx._intervening import intervened
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import InputError, MethodError, ModelError, TraceError
from lrpx.interventions import Add, Along, Clamp, Patch, Scale, Set, record
from lrpx.sae import FeatureTap, SparseAutoencoder
from lrpx.units import places
from tests import plain_gpt, tiny
from tests.engine.samples import SAMPLES
from tests.reference import models
from tests.test_units import Experts, OfOneLayer
from tests.work import Interrupt

IDS = torch.tensor([[5, 9, 3, 12, 7, 22, 8], [4, 4, 19, 6, 30, 2, 9]])
DOWN = "model.layers.1.mlp.down_proj"
FIRST = torch.tensor([1])
VECTOR = torch.linspace(-1, 1, 16, dtype=torch.float64)


def logits(model, ids=IDS, **given):
    with torch.no_grad():
        return model(input_ids=ids, **given).logits


def by_hand(model, path, change, side="input", ids=IDS, **given):
    """The logits with ``change(x)`` in the place of what one module takes or gives, by a hook of torch's."""
    module = model.get_submodule(path)
    if side == "input":
        handle = module.register_forward_pre_hook(lambda _, args: (change(args[0].clone()), *args[1:]))
    else:

        def after(_, __, out):
            return change(out.clone()) if isinstance(out, Tensor) else (change(out[0].clone()), *out[1:])

        handle = module.register_forward_hook(after)
    with handle:
        return logits(model, ids, **given)


def at_neuron(unit, function, where=slice(None)):
    def change(x):
        rows = x.reshape(2, -1, x.shape[-1]) if x.ndim == 2 else x  # OPT's
        rows[:, where, unit] = function(rows[:, where, unit])
        return x

    return change


@pytest.fixture(scope="module")
def llama():
    return models.tiny_llama()


CHANGES = {
    "number": (0.0, lambda x: x * 0),
    "set": (Set(2.5), lambda x: x * 0 + 2.5),
    "scale": (Scale(5), lambda x: 5 * x),
    "add": (Add(-1.5), lambda x: x - 1.5),
    "clamp": (Clamp(-0.1, 0.2), lambda x: x.clip(-0.1, 0.2)),
    "from below": (Clamp(low=0.0), lambda x: x.clip(0)),
}


@pytest.mark.parametrize("key", ["model.layers.1.mlp", DOWN, (DOWN, "input")])
@pytest.mark.parametrize("name", CHANGES)
def test_neurons_are_changed_as_a_hook_would(llama, name, key):
    change, function = CHANGES[name]
    with lrpx.intervene(llama, {key: {3: change, 7: Scale(2)}}):
        found = logits(llama)

    def both(x):
        return at_neuron(7, lambda x: 2 * x)(at_neuron(3, function)(x))

    assert torch.equal(found, by_hand(llama, DOWN, both))
    assert not torch.equal(found, logits(llama))


@pytest.mark.parametrize("name", ["gpt2", "bert", "opt", "bloom", "falcon"])
def test_other_families(name):
    model = SAMPLES[name].build()
    (_, place) = places(model, "neurons")
    around = place.path.rpartition(".")[0] if name != "opt" else place.path
    around = "bert.encoder.layer.1.output" if name == "bert" else around
    with lrpx.intervene(model, {around: {3: Scale(-3, positions=[0, 4])}}):
        found = logits(model)
    assert torch.equal(found, by_hand(model, place.path, at_neuron(3, lambda x: -3 * x, [0, 4])))


def turned(model, changes, ids=IDS):
    with lrpx.intervene(model, changes):
        return logits(model, ids)


def test_heads_and_layers_and_any_module(llama):
    def head(x):
        x[..., 8:12] = 0
        return x

    projection, layer, query = ("model.layers.0" + name for name in (".self_attn.o_proj", "", ".self_attn.q_proj"))
    for key in ("model.layers.0.self_attn", projection, places(llama, "heads")[0]):
        assert torch.equal(turned(llama, {key: {2: 0.0}}), by_hand(llama, projection, head))
    assert torch.equal(turned(llama, {layer: Add(VECTOR)}), by_hand(llama, layer, lambda x: x + VECTOR, "output"))
    expected = by_hand(llama, layer, at_neuron(5, lambda x: x * 0 + 1), "output")
    assert torch.equal(turned(llama, {layer: {5: 1.0}}), expected)
    found = turned(llama, {(query, "output"): Scale(0.5)})
    assert torch.equal(found, by_hand(llama, query, lambda x: x / 2, "output"))
    found = turned(llama, {(projection, "input"): {2: 0.0}})  # one feature, no head
    assert torch.equal(found, by_hand(llama, projection, at_neuron(2, lambda x: x * 0)))


@pytest.mark.parametrize(
    ("layer", "kind", "config"),
    [
        ("backbone.layers.0", "MambaForCausalLM", {"state_size": 4}),
        ("fnet.encoder.layer.0", "FNetForMaskedLM", {"use_tpu_fourier_optimizations": False}),
        ("model.layers.0", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}),
    ],
)
def test_a_layer_is_its_output_also_where_its_units_are_in_one_place(layer, kind, config):
    """As of a state-space mixer, or of the MLP of a layer without attention."""
    made = getattr(transformers, kind.partition("For")[0] + "Config")(**tiny.SIZES, **config)
    model = tiny.build(getattr(transformers, kind), made, "eager")
    (place,) = [each for each in places(model, "neurons") if each.path.startswith(layer)]
    expected = by_hand(model, layer, lambda x: x + VECTOR, "output")
    assert torch.equal(turned(model, {layer: Add(VECTOR)}), expected)
    around = place.path.rpartition(".")[0]  # the mixer, or the MLP
    expected = by_hand(model, place.path, at_neuron(5, lambda x: x * 3))
    assert torch.equal(turned(model, {around: {5: Scale(3)}}), expected)


def test_a_block_of_experts_is_no_mlp_and_one_beside_them_is():
    """The neurons of an expert that all tokens go to do not stand for the others."""
    sizes = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = transformers.Qwen2MoeConfig(**tiny.SIZES | sizes, shared_expert_intermediate_size=8)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    path = "model.layers.1.mlp"
    first = torch.tensor([3])
    for changes, side, of in (
        ({path: 0.0}, "output", torch.zeros_like),
        ({f"{path}.shared_expert": {3: 0.0}}, "input", lambda x: x.index_fill(-1, first, 0.0)),
    ):
        module = path if side == "output" else f"{path}.shared_expert.down_proj"
        wanted = by_hand(model, module, of, side)
        assert not torch.equal(wanted, logits(model))
        with lrpx.intervene(model, changes):
            assert torch.equal(logits(model), wanted)


def test_nobody_knows_at_which_positions_the_rows_of_an_expert_stand():
    """Two experts are each given all tokens, those of their first choice first."""
    model, path = Experts().eval(), "layers.0.experts.1"
    for each, side in ((path, "input"), (path, "output"), (f"{path}.down", "input"), (f"{path}.down", "output")):
        with (
            pytest.raises(MethodError, match=r"picked among all by their numbers, .* leave the positions out"),
            lrpx.intervene(model, {(each, side): Scale(0.0, positions=[2])}),
        ):
            model(IDS)
        before = model(IDS)
        with lrpx.intervene(model, {(each, side): 0.0}):
            assert not torch.equal(model(IDS), before)
    with pytest.raises(MethodError, match="is an expert or in one"), lrpx.intervene(model, {path: {3: 0.0}}):
        model(IDS)
    with lrpx.intervene(model, {"layers.0": Scale(0.0, positions=[2])}):
        model(IDS)


@pytest.mark.parametrize(
    ("made", "config", "path"),
    [
        (transformers.MixtralForCausalLM, transformers.MixtralConfig, "model.layers.1.mlp.gate"),
        (transformers.GptOssForCausalLM, transformers.GptOssConfig, "model.layers.1.mlp.router"),
    ],
)
def test_what_a_router_has_chosen_by_is_no_place_to_change(made, config, path):
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model, ids = tiny.build(made, config(**tiny.SIZES, **sizes), "eager"), torch.tensor([[3, 4, 5, 6]])
    model.set_experts_implementation("eager")
    for change in (-100.0, lrpx.Add(3.0, positions=[1])):
        with (
            pytest.raises(MethodError, match="has chosen by its first output"),
            lrpx.intervene(model, {(path, "output"): {0: change}}),
        ):
            model(ids)
    with lrpx.interventions.record(model, [path]) as kept:
        before = model(ids).logits
    assert kept[path].shape[-1] == 4
    with lrpx.intervene(model, {(path, "input"): {0: 5.0}}):
        assert not torch.allclose(model(ids).logits, before)


def test_a_layer_of_a_model_whose_units_nobody_can_look_for():
    model, layer = (
        tiny.build(transformers.BertForMultipleChoice, transformers.BertConfig(**tiny.SIZES)),
        "bert.encoder.layer.1",
    )
    change = Set(0.5, positions=[0, 3])
    expected = by_hand(model, layer, at_neuron(slice(None), lambda x: x * 0 + 0.5, [0, 3]), "output", ids=IDS[None])
    assert torch.equal(turned(model, {layer: change}, IDS[None]), expected)


class Summed(Module):
    """A layer of attention by sums of products, whose heads are not side by side, so that none are found."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (4, 4)) for each in (self.q, self.k, self.v))
        weights = torch.einsum("btdh,bsdh->bhts", q, k).softmax(-1)
        return x + self.o(torch.einsum("bhts,bsdh->btdh", weights, v).flatten(-2))


class OfSums(Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = torch.nn.Embedding(31, 16, dtype=torch.float64), torch.nn.ModuleList([Summed()])

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids):
        return self.layers[0](self.table(input_ids))


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (lambda: OfSums().eval(), "layers.0.o"),
        (tiny.xlnet, "transformer.layer.0.rel_attn"),
        (tiny.bert_classifier, "bert.encoder.layer.0.attention.self"),  # whose heads are at attention.output.dense
        (lambda: OfSums().eval(), "layers.0.q"),
        (lambda: OfSums().eval(), "table"),
    ],
)
def test_units_where_no_neurons_or_heads_are_found_are_no_features(made, path):
    model = made()
    with pytest.raises(MethodError, match=f"{path} has no neurons or heads"), lrpx.intervene(model, {path: {1: 0.0}}):
        raise AssertionError("the block began")
    for changes in ({(path, "output"): {1: 0.0}}, {path: 0.0}):  # asked for, and all of it
        with lrpx.intervene(model, changes):
            model(IDS)


@pytest.mark.parametrize("key", ["layers.0", ("layers.0.q", "output")])
def test_a_layer_and_an_output_that_is_named_have_features(key):
    model = OfSums().eval()
    with torch.no_grad(), lrpx.intervene(model, {key: {1: 0.0}}):
        found = model(IDS)
    module = model.get_submodule(key if isinstance(key, str) else key[0])
    with torch.no_grad(), module.register_forward_hook(lambda _, __, y: y.index_fill(-1, FIRST, 0.0)):
        assert torch.equal(model(IDS), found)


class Halves(Module):
    """Attentions and MLPs in two lists, put together by the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)
        blocks = plain_gpt.GPT(together=True, width=8).float().blocks
        self.attentions = torch.nn.ModuleList(each.attention for each in blocks)
        self.mlps = torch.nn.ModuleList(each.mlp for each in blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(x)


@pytest.mark.parametrize(("path", "matrix"), [("attentions.1", "project"), ("mlps.1", "2")])
def test_an_mlp_or_an_attention_in_a_list_of_its_own_is_no_layer(path, matrix):
    """Its unit was taken for a feature of its output."""
    model = Halves().eval()
    for wanted in ({1: 0.0}, 0.0):
        with pytest.raises(MethodError, match=rf"{path} has a layer's number"), lrpx.intervene(model, {path: wanted}):
            raise AssertionError("the block began")
    with torch.no_grad():
        for key in (f"{path}.{matrix}", (path, "output")):
            with lrpx.intervene(model, {key: {1: 0.0}}):
                model(IDS)


def test_keys_that_share_a_matrix():
    model = SAMPLES["gpt2"].build()
    place = places(model, "keys")[1]

    def keys(x):
        x[..., 16:32] *= 2
        return x

    assert torch.equal(turned(model, {place: Scale(2)}), by_hand(model, place.path, keys, "output"))
    expected = by_hand(model, place.path, at_neuron(17, lambda x: x * 3), "output")
    assert torch.equal(turned(model, {place: {1: Scale(3)}}), expected)


def test_one_call_of_a_shared_layer():
    model = SAMPLES["albert"].build()
    first, second = places(model, "neurons")
    with lrpx.intervene(model, {first: {3: 0.0}}):
        one = logits(model)
    with lrpx.intervene(model, {second: {3: 0.0}}):
        other = logits(model)
    with lrpx.intervene(model, {first.path: {3: 0.0}}):
        both = logits(model)
    assert torch.equal(both, by_hand(model, first.path, at_neuron(3, lambda x: x * 0)))
    assert not torch.equal(one, other)
    assert not torch.equal(one, both)
    calls = iter(range(2))
    only = by_hand(model, first.path, lambda x: at_neuron(3, lambda y: y * 0)(x) if next(calls) == 1 else x)
    assert torch.equal(other, only)


@pytest.mark.parametrize(
    ("change", "after"), [(0.0, lambda c: 0 * c), (Scale(3), lambda c: 3 * c), (Add(2), lambda c: c + 2)]
)
def test_a_direction(llama, change, after):
    def by_formula(x):
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                c = (x[b, t] @ VECTOR) / (VECTOR @ VECTOR)
                x[b, t] += (after(c) - c) * VECTOR
        return x

    with lrpx.intervene(llama, {"model.layers.0": Along(VECTOR, change)}):
        found = logits(llama)
    assert torch.allclose(found, by_hand(llama, "model.layers.0", by_formula, "output"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_direction_as_long_or_short_as_any_in_half_precision(dtype, size):
    """The square of its length may be no number there."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    vector = (size * VECTOR * 16).float()
    found = Along(vector, 0.0).of(x, None, None)
    unit = (vector / vector.norm()).double()
    expected = x.double() - (x.double() @ unit)[..., None] * unit
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_model_that_goes_on_in_place_changes_nothing_of_the_vector():
    """Falcon's parallel block adds to what its MLP gives: before, that was the user's own vector, or no place of its
    own at all."""
    model, path, before = SAMPLES["falcon"].build(), "transformer.h.1.mlp", VECTOR.clone()
    for ids in (IDS, IDS[:1, :1]):
        with lrpx.intervene(model, {(path, "output"): Set(before)}):
            found = logits(model, ids)
        torch.testing.assert_close(found, by_hand(model, path, lambda x: VECTOR.expand(x.shape).clone(), "output", ids))
    torch.testing.assert_close(before, VECTOR, rtol=0, atol=0)


def test_a_patch_from_another_text(llama):
    other = torch.tensor([[11, 13, 17, 19]])
    with record(llama, ["model.layers.1.mlp"]) as seen:
        logits(llama, other)
    values = seen["model.layers.1.mlp"]
    assert values.shape == (1, 4, 24)

    def patched(x):
        x[:, 1:4, 6] = values[0, 1:4, 6]
        return x

    found = turned(llama, {"model.layers.1.mlp": {6: Patch(values[0], positions=[1, 2, 3])}})
    assert torch.equal(found, by_hand(llama, DOWN, patched))
    found = turned(llama, {"model.layers.1.mlp": Patch(values[0])})  # beyond its end all is as it was
    assert torch.equal(found, by_hand(llama, DOWN, lambda x: torch.cat([values.expand(2, -1, -1), x[:, 4:]], 1)))
    found = turned(llama, {"model.layers.0": Patch(_layer(llama, other)[0])}, IDS[:1, :4])
    assert torch.allclose(found, logits(llama, other))  # from the layer on it is the other


@pytest.mark.parametrize("length", [7, 16, 24])
def test_angles_of_all_rows_have_their_features_last_however_long_the_text(llama, length):
    """They are [1, T, d]: of a text as long as some layer is wide, its tokens were taken for the features."""
    ids = torch.arange(2 * length).reshape(2, length) % 31
    rotary = "model.rotary_emb"

    def changed(x):
        x[..., 2] = 0.5
        return x

    with lrpx.intervene(llama, {(rotary, "output"): {2: 0.5}}):
        found = logits(llama, ids)
    assert torch.equal(found, by_hand(llama, rotary, changed, "output", ids))
    assert not torch.equal(found, logits(llama, ids))
    with record(llama, [(rotary, "output")]) as seen:
        logits(llama, ids)
    assert seen[rotary, "output"].shape == (1, length, 4)


def _layer(model, ids):
    with record(model, ["model.layers.0"]) as seen:
        logits(model, ids)
    return seen["model.layers.0"]


# ------------------------------------------------------------------------------ positions


@pytest.mark.parametrize("side", ["right", "left"])
def test_positions_count_without_the_padding(llama, side):
    change = {"model.layers.1.mlp": {3: Set(9.0, positions=[0, 2])}}
    with lrpx.intervene(llama, change):
        alone = logits(llama, IDS[:1, :4])
    row = torch.zeros(1, 3, dtype=torch.int64)
    pads = [IDS[:1, :4], row] if side == "right" else [row, IDS[:1, :4]]
    ones = [torch.ones(1, 4, dtype=torch.int64), row]
    mask = torch.cat([torch.cat(ones if side == "right" else ones[::-1], 1), torch.ones(1, 7, dtype=torch.int64)])
    ids = torch.cat([torch.cat(pads, 1), IDS[1:]])
    places_ = (mask.cumsum(1) - 1).clamp(min=0)
    with lrpx.intervene(llama, change):
        found = logits(llama, ids, attention_mask=mask, position_ids=places_)[0]
    assert torch.allclose(found[:4] if side == "right" else found[3:], alone[0])
    assert torch.allclose(alone, by_hand(llama, DOWN, at_neuron(3, lambda x: x * 0 + 9, [0, 2]), ids=IDS[:1, :4]))


@pytest.mark.parametrize("positions", [None, [1, 5], [9]])
def test_generating_with_a_cache_is_generating_without(llama, positions):
    change = {"model.layers.1.mlp": {3: Scale(40, positions=positions)}, "model.layers.0.self_attn": {1: 0.0}}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(IDS)
    with lrpx.intervene(llama, change):
        cached = llama.generate(IDS, attention_mask=mask, use_cache=True, **how)
        whole = llama.generate(IDS, attention_mask=mask, use_cache=False, **how)
    plain = llama.generate(IDS, attention_mask=mask, **how)
    assert torch.equal(cached, whole)
    assert not torch.equal(cached, plain) or positions == [9]
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), IDS], 1)
    before = torch.cat([torch.zeros(2, 3, dtype=torch.int64), mask], 1)
    with lrpx.intervene(llama, change):
        left = llama.generate(padded, attention_mask=before, **how)
    assert torch.equal(left[:, 3:], cached)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", [{2: 0.0}, Set(1.0), Set(1.0, positions=[1]), Clamp(-1, 1), Add(1.0), None])
def test_nested_tensors_of_a_padded_batch_are_refused_by_name(change):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    block = record(model, ["layers.0"]) if change is None else lrpx.intervene(model, {"layers.0": change})
    with torch.no_grad(), pytest.raises(TraceError, match="make it with enable_nested_tensor=False"), block:
        model(x, src_key_padding_mask=padding)


class WithMask(torch.nn.Module):
    """One's own model, whose mask has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = torch.nn.Embedding(16, 8), torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.emb

    def forward(self, input_ids, mask=None, src_key_padding_mask=None):
        real = mask if src_key_padding_mask is None else ~src_key_padding_mask
        real = torch.ones_like(input_ids) if real is None else real
        return (self.layers[0](self.emb(input_ids)) * real[..., None]).sum(1)


@pytest.mark.parametrize("name", ["mask", "src_key_padding_mask"])
def test_positions_are_refused_where_a_mask_of_another_name_hides_what_is_before_a_text(name):
    model, change = WithMask(), {"layers.0": Set(4.0, positions=[0])}
    right, left = torch.tensor([[3, 5, 7, 9], [4, 6, 0, 0]]), torch.tensor([[3, 5, 7, 9], [0, 0, 4, 6]])
    told = {"mask": lambda ids: (ids > 0).long(), "src_key_padding_mask": lambda ids: ids == 0}[name]
    with torch.no_grad(), lrpx.intervene(model, change):
        found, alone = model(right, **{name: told(right)}), model(right[1:, :2])
        torch.testing.assert_close(found[1:], alone)
    refused = pytest.raises(TraceError, match="padding before a text is in no attention_mask")
    with torch.no_grad(), refused, lrpx.intervene(model, change):
        model(left, **{name: told(left)})


class WeightsFirst(torch.nn.Module):
    """A layer that gives its attention's weights before the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, weights = self.attention(x, x, x, average_attn_weights=False)
        return weights, x + found


class OfWeightsFirst(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([WeightsFirst(), WeightsFirst()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[1]
        return x


def test_weights_that_a_layer_gives_before_the_stream_are_not_changed_nor_kept():
    model, x = OfWeightsFirst().eval(), torch.randn(2, 5, 8)
    told = "before what it has made with them, which alone goes on"
    with torch.no_grad(), pytest.raises(MethodError, match=told), lrpx.intervene(model, {"layers.0": {2: 0.0}}):
        model(x)
    with torch.no_grad(), pytest.raises(MethodError, match=told), record(model, ["layers.0"]):
        model(x)
    with torch.no_grad(), lrpx.intervene(model, {("layers.1", "input"): {2: 0.0}}):
        changed = model(x)
    with torch.no_grad():
        assert not torch.equal(changed, model(x))


class WithCache(torch.nn.Module):
    """One's own model, whose earlier calls are given to it by a name of its own, counted, or kept by a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.read = name, None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.emb, self.layers = torch.nn.Embedding(16, 8), torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.emb

    def forward(self, input_ids, past=None, kv_cache=None, state=None, start_pos=0, input_pos=None):
        x = self.layers[0](self.emb(input_ids))
        begins = start_pos == 0 and (input_pos is None or input_pos[0] == 0)
        before = past or kv_cache or state or (None if begins and self.name != "kept" else self.read)
        x = x if before is None else torch.cat([before[0], x], 1)
        self.read = [x.detach()]
        return x.cumsum(1)[:, -input_ids.shape[1] :], [x.detach()]


@pytest.mark.parametrize("first", [3, 2])
@pytest.mark.parametrize("name", ["past", "kv_cache", "state", "start_pos", "input_pos", "kept"])
def test_positions_are_refused_where_an_own_cache_does_not_count_its_tokens(name, first):
    """Also where it goes on by several tokens, of which each was taken for that many of the first."""
    model, ids = WithCache(name), torch.tensor([[3, 5, 7, 9]])

    def told(at: int, kept: object) -> dict[str, object]:
        many = {"past": kept, "kv_cache": kept, "state": kept, "start_pos": at, "input_pos": torch.tensor([at])}
        return {key: value for key, value in many.items() if key == name}

    def run() -> torch.Tensor:
        model.read = None
        found, kept = model(ids[:, :first])
        return torch.cat([found, model(ids[:, first:], **told(first, kept))[0]], 1)

    with torch.no_grad(), lrpx.intervene(model, {"layers.0": {2: lrpx.Set(4.0)}}):
        parts = run()  # without positions nothing need be known
        model.read = None
        torch.testing.assert_close(parts, model(ids)[0])
    change = {"layers.0": {2: lrpx.Set(4.0, positions=[0])}}
    refused = pytest.raises(TraceError, match="its cache does not count its tokens")
    with torch.no_grad(), refused, lrpx.intervene(model, change):
        run()
    model.read = None
    with torch.no_grad(), lrpx.intervene(model, change):  # a text at once
        whole = model(ids, start_pos=0, input_pos=torch.arange(4))[0]
    assert not torch.equal(whole, WithCache("none")(ids)[0])


class Inside(WithCache):
    """The same, which keeps what it has read inside of something that stays the same."""

    inside: Any

    @property
    def read(self) -> Any:
        held = self.inside
        return held.read if isinstance(held, SimpleNamespace) else held[0][-1] if held and held[0] else None

    @read.setter
    def read(self, value: Any) -> None:
        held = vars(self).get("inside")
        if isinstance(held, SimpleNamespace):
            held.read = value
        elif held is not None:
            held[0] = [value]


@pytest.mark.parametrize(
    "held",
    [SimpleNamespace(read=None), [None], {0: None}, deque([None], maxlen=1)],
    ids=["object", "list", "dict", "deque"],
)
def test_positions_are_refused_where_a_cache_stays_the_same_object(held: Any) -> None:
    """Nor does looking for its units leave anything in it, from which the next call would go on."""
    model, ids = Inside("kept").eval(), torch.tensor([[3, 5, 7, 9]])
    model.inside = held
    plain = WithCache("none")(ids)[0]
    with suppress(MethodError):
        places(model, "neurons")
    with torch.no_grad():
        assert torch.equal(model(ids)[0], plain)
    model.read = None
    change = {"layers.0": {2: lrpx.Set(4.0, positions=[0])}}
    refused = pytest.raises(TraceError, match="its cache does not count its tokens")
    with torch.no_grad(), refused, lrpx.intervene(model, change):
        model(ids[:, :2])
        model(ids[:, 2:])


class WithTable(torch.nn.Module):
    """One's own model that makes a table of its positions in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = torch.nn.Embedding(16, 8), torch.nn.ModuleList([torch.nn.Linear(8, 8)])
        self.table: torch.Tensor | None = None

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.emb

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.table = torch.arange(9.0)[:, None].sin() if self.table is None else self.table
        return self.layers[0](self.emb(input_ids) + self.table[: input_ids.shape[1]])


def test_a_table_that_a_model_keeps_is_no_cache_where_it_was_called_before():
    model, ids = WithTable(), torch.tensor([[3, 5, 7, 9]])
    change = {"layers.0": {2: lrpx.Set(4.0, positions=[1])}}

    def twice() -> list[torch.Tensor]:
        return [model(ids)[0, :, 2] for _ in range(2)]

    refused = pytest.raises(TraceError, match=r"are tables, call it once before the block")
    with torch.no_grad(), refused, lrpx.intervene(model, change):
        twice()
    with torch.no_grad(), lrpx.intervene(model, change):
        for found in twice():
            assert [i for i, each in enumerate(found.tolist()) if each == 4.0] == [1]


def test_a_cache_of_states_does_not_count_its_tokens():
    model, layer = SAMPLES["mamba"].build(), "backbone.layers.0"
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(IDS, use_cache=True, **how)
    with lrpx.intervene(model, {layer: Scale(-2)}):
        cached = model.generate(IDS, use_cache=True, **how)
        whole = model.generate(IDS, use_cache=False, **how)
    assert torch.equal(cached, whole)
    assert not torch.equal(cached, plain)
    with lrpx.intervene(model, {layer: Scale(-2, positions=[1])}):
        model.generate(IDS, use_cache=False, **how)
    with (
        pytest.raises(TraceError, match="its cache does not count its tokens; leave the pos"),
        lrpx.intervene(model, {layer: Scale(-2, positions=[1])}),
    ):
        model.generate(IDS, use_cache=True, **how)


def test_an_encoder_and_a_decoder_count_for_themselves():
    model = tiny.bart()
    ids, written = torch.tensor([[4, 8, 9, 2]]), torch.tensor([[2, 5, 9]])
    encoder, decoder = places(model, "neurons")[0], places(model, "neurons")[-1]
    for place, positions in ((encoder, [3]), (decoder, [1])):
        with lrpx.intervene(model, {place: {3: Set(9.0, positions=positions)}}):
            found = logits(model, ids, decoder_input_ids=written)
        expected = by_hand(
            model, place.path, at_neuron(3, lambda x: x * 0 + 9, positions), ids=ids, decoder_input_ids=written
        )
        assert torch.equal(found, expected)
    with lrpx.intervene(model, {encoder: {3: Set(9.0, positions=[3])}, decoder: {3: Set(9.0, positions=[4])}}):
        cached = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2)
        whole = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2, use_cache=False)
    assert torch.equal(cached, whole)


# --------------------------------------------------------------------------- what it is not


def hooks(model):
    return {p: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for p, m in model.named_modules()}


def beside_an_image(ids):
    torch.manual_seed(0)
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=int),
        "pixel_values": pixels,
    }


@pytest.mark.parametrize("length", [4, 5, 6])
def test_an_images_places_have_no_positions_however_many_there_are(length):
    """Of five, as the shortest, the middle or the longest text has tokens."""
    model, given = tiny.clip(), beside_an_image([5, 6, 7, 8, 9, 2][-length:])
    change = {"vision_model.encoder.layers.0": Set(0.0, positions=[1])}
    with torch.no_grad():
        plain = model(**given).logits_per_image
        with pytest.raises(TraceError, match="nobody knows"), lrpx.intervene(model, change):
            model(**given)
        with pytest.raises(TraceError, match="nobody knows"), lrpx.intervene(model, change):
            lrpx.Explainer(model)(given)
        with lrpx.intervene(model, {"vision_model.encoder.layers.0": Scale(2.0)}):
            assert not torch.equal(model(**given).logits_per_image, plain)
        assert torch.equal(model(**given).logits_per_image, plain)


def test_positions_of_a_text_beside_an_image():
    model, given = tiny.llava(), beside_an_image([30, 30, 30, 30, 9])
    path = "model.language_model.layers.0"

    def second(x):
        x[:, 1] *= 2
        return x

    want = by_hand(model, path, second, "output", given["input_ids"], pixel_values=given["pixel_values"])
    change = {path: Scale(2.0, positions=[1])}
    with torch.inference_mode(), lrpx.intervene(model, change):
        assert torch.allclose(model(**given).logits, want, atol=1e-12)
    with lrpx.intervene(model, change):
        value = lrpx.Explainer(model)(given, 5).explained.value
        how = {"max_new_tokens": 3, "do_sample": False}
        cached = model.generate(**given, use_cache=True, **how)
        assert torch.equal(cached, model.generate(**given, use_cache=False, **how))
    assert value == pytest.approx(float(want[0, -1, 5]), abs=1e-9)
    tower = {"model.vision_tower.encoder.layers.0": Scale(2.0, positions=[1])}
    with pytest.raises(TraceError, match="nobody knows"), lrpx.intervene(model, tower):
        model(**given)


class Named(Module):
    """A layer that is given a mask and the stream by their names, in this order or the other."""

    def __init__(self):
        super().__init__()
        self.attention, self.linear = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.nn.Linear(16, 16)
        self.gives = lambda x: x

    def forward(self, stream, mask):
        made = torch.tanh(self.attention(stream, stream, stream, attn_mask=mask)[0])
        return self.gives(stream + self.linear(made))


class Naming(Module):
    def __init__(self, *, mask_first):
        super().__init__()
        self.embeddings, self.layers = torch.nn.Embedding(40, 16), torch.nn.ModuleList([Named(), Named()])
        self.mask_first = mask_first

    def forward(self, input_ids):
        x = self.embeddings(input_ids)
        mask = torch.full((x.shape[1],) * 2, -math.inf, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(mask=mask, stream=x) if self.mask_first else layer(stream=x, mask=mask)
            x = x if isinstance(x, Tensor) else x[0]
        return x


class Two(NamedTuple):
    """What a layer gives."""

    stream: Tensor
    more: None = None


class Listed(list):
    """A list of one's own."""


@pytest.mark.parametrize("gives", [Two, lambda x: Listed([x]), lambda x: (x, None)])
def test_what_a_layer_gives_in_a_tuple_or_a_list_of_ones_own_is_changed(gives):
    torch.manual_seed(0)
    model, found = Naming(mask_first=False).double().eval(), []
    sae = SparseAutoencoder(torch.eye(16), torch.zeros(16), torch.eye(16), torch.zeros(16))
    for each in (lambda x: x, gives):
        for layer in model.layers:
            layer.gives = each
        with torch.no_grad(), lrpx.intervene(model, {"layers.0": Scale(3), "layers.1": {2: Set(1.0, positions=[1])}}):
            changed = model(IDS)
        tap = FeatureTap(sae, "layers.0")
        with lrpx.propagate(model, lrpx.LRP, observe=(), taps=[tap]) as trace:
            trace.explain(model(IDS)[:, -1, 5])
        found.append((changed, trace.relevance_of(tap.features), trace.relevance_of(tap.error)))
    for expected, its in zip(*found, strict=True):
        torch.testing.assert_close(its, expected)
    assert bool(found[0][1].any())


def test_the_first_input_is_the_first_that_a_module_names_and_not_that_a_call_names():
    torch.manual_seed(0)
    one, other = (Naming(mask_first=mask_first).double().eval() for mask_first in (False, True))
    other.load_state_dict(one.state_dict())
    place, found = ("layers.1", "input"), []
    for model in (one, other):
        with torch.no_grad(), record(model, [place]) as kept:
            model(IDS)
        with torch.no_grad(), lrpx.intervene(model, {place: {3: Set(2.0, positions=[1])}}):
            changed = model(IDS)
        with lrpx.propagate(model, lrpx.LRP, observe=["layers.1"]) as trace:
            trace.explain(model(IDS)[:, -1, 5])
        found.append((kept[place], changed, trace.relevance("layers.1", of="input")))
    for expected, each in zip(*found, strict=True):
        torch.testing.assert_close(each, expected)
    assert found[0][0].shape == (*IDS.shape, 16)


@pytest.mark.parametrize("change", [Set(0.0, positions=[1]), Patch(torch.zeros(2, 16))])
def test_positions_are_those_of_the_call_alone(llama, change):
    whole, padded = torch.ones_like(IDS), torch.ones_like(IDS)
    padded[:, :3] = 0
    told = "nobody knows at which tokens"
    with torch.no_grad(), lrpx.intervene(llama, {"model.layers.0": change}):
        llama(IDS, attention_mask=whole)
        with pytest.raises(TraceError, match=told):  # which does not tell its mask
            llama.model(IDS, attention_mask=padded)
    several = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad(), pytest.raises(TraceError, match=told), lrpx.intervene(llama, {"model.layers.0": change}):
        llama(IDS, position_ids=several)
    of_padded = (padded.cumsum(1) - 1).clamp(min=0)
    of_padded[padded == 0] = 1  # as generate has it
    with torch.no_grad(), lrpx.intervene(llama, {"model.layers.0": change}):
        llama(IDS, attention_mask=padded, position_ids=of_padded)


def test_a_copy_of_the_model_is_as_it_was_behind_the_block(llama):
    expected = logits(llama)
    with lrpx.intervene(llama, {"model.layers.0": Scale(2.0)}):
        changed, copied = logits(llama), copy.deepcopy(llama)
    assert not torch.equal(changed, expected)
    assert torch.equal(logits(copied), expected)


def test_nothing_is_left_behind_whatever_happens(llama):
    before, plain = hooks(llama), logits(llama)
    weights = {name: value.clone() for name, value in llama.state_dict().items()}
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with lrpx.intervene(llama, {"model.layers.1.mlp": {3: 9.0}}):
                logits(llama)
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert hooks(llama) == before
    with pytest.raises(ValueError, match="exactly one"), lrpx.intervene(llama, {"model.layers.1.mlp": {3: 9.0}}):
        llama(nonsense=1)
    assert hooks(llama) == before
    assert torch.equal(logits(llama), plain)
    assert all(torch.equal(value, weights[name]) for name, value in llama.state_dict().items())


def test_nothing_is_left_behind_wherever_an_interrupt_falls(llama):
    """As where a run is stopped by hand while hooks are put on or taken off."""
    before = hooks(llama)
    moments = (Module.register_forward_pre_hook, Module.register_forward_hook, RemovableHandle.remove, Hooks.remove)
    moments += (plainly.__wrapped__, eval_frame._set_stance)
    for at in range(10**4):
        with (
            suppress(KeyboardInterrupt),
            Interrupt((each.__code__ for each in moments), at) as interrupt,
            lrpx.intervene(llama, {"model.layers.0": 9.0, ("model.layers.1", "input"): 9.0}),
        ):
            logits(llama)
        assert hooks(llama) == before
        assert not intervened(llama)
        assert eval_frame._stance.stance == "default"
        if not interrupt.fell:
            break
    assert at > 20


def test_blocks_may_be_nested(llama):
    with lrpx.intervene(llama, {"model.layers.1.mlp": {3: 9.0}}):
        outer = logits(llama)
        with lrpx.intervene(llama, {"model.layers.1.mlp": {3: Scale(2), 4: 1.0}}):
            inner = logits(llama)
        assert torch.equal(logits(llama), outer)

    def both(x):
        return at_neuron(4, lambda x: x * 0 + 1)(at_neuron(3, lambda x: x * 0 + 18)(x))

    assert torch.equal(inner, by_hand(llama, DOWN, both))


def test_other_threads_and_models_are_as_they_were(llama):
    plain, another, found = logits(llama), models.tiny_llama(seed=1), []
    thread = threading.Thread(target=lambda: found.append(logits(llama)))
    with lrpx.intervene(llama, {"model.layers.1.mlp": {3: 9.0}}):
        thread.start()
        thread.join()
        changed = logits(llama)
        assert torch.equal(logits(another), logits(models.tiny_llama(seed=1)))
    assert torch.equal(found[0], plain)
    assert not torch.equal(changed, plain)


# ------------------------------------------------------------------------- with explanations


@pytest.mark.parametrize("method", ["attnlrp", "lrp", "gradient-x-input", "leave-one-out", "alti-logit"])
def test_the_model_in_the_block_is_explained(llama, method):
    class Turned(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x * torch.ones(24, dtype=x.dtype).index_fill(0, torch.tensor([3]), 5))

    built = models.tiny_llama()
    built.model.layers[1].mlp.down_proj = Turned(built.model.layers[1].mlp.down_proj)
    expected = lrpx.Explainer(built)(IDS[0].tolist(), target=5, method=method)
    with lrpx.intervene(llama, {"model.layers.1.mlp": {3: Scale(5)}}):
        found = lrpx.Explainer(llama)(IDS[0].tolist(), target=5, method=method)
    assert found.explained.value == pytest.approx(expected.explained.value, abs=1e-12)
    assert torch.allclose(found.relevance, expected.relevance, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["attnlrp-vit", "lrp-vit", "attnlrp"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("factor", [1.0, 2.5, 0.0])
def test_behind_a_changed_head_is_the_output_projection_all_the_same(method, attention, factor):
    """A recipe with a rule of its own for it has that rule there: the numbers of a model with other weights."""
    model, other = (models.tiny_llama(attn_implementation=attention) for _ in range(2))
    width = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight[:, width : 2 * width] *= factor
    expected = lrpx.Explainer(other)(IDS[0].tolist(), target=5, method=method)
    with lrpx.intervene(model, {"model.layers.1.self_attn": {1: Scale(factor)}}):
        found = lrpx.Explainer(model)(IDS[0].tolist(), target=5, method=method)
    assert torch.allclose(
        found.relevance, expected.relevance, rtol=0, atol=1e-9 * float(expected.relevance.abs().max())
    )


@pytest.mark.parametrize("change", [Scale(1.0), Add(0.0), {3: Scale(1.0)}, {3: Add(0.0)}, {3: Clamp()}])
def test_a_change_of_nothing_in_attention_changes_no_rule(llama, change):
    explainer = lrpx.Explainer(llama)
    expected = explainer(IDS[0].tolist(), target=5, method="attnlrp-vit")
    with lrpx.intervene(llama, {"model.layers.1.self_attn": change}):
        found = explainer(IDS[0].tolist(), target=5, method="attnlrp-vit")
    assert torch.allclose(
        found.relevance, expected.relevance, rtol=0, atol=1e-9 * float(expected.relevance.abs().max())
    )


@pytest.mark.parametrize(
    ("make", "layer", "given"),
    [
        (models.tiny_llama, "model.layers.0", {}),
        (models.tiny_bert, "bert.encoder.layer.0", {}),
        (models.tiny_t5, "encoder.block.0", {"decoder_input_ids": torch.tensor([[0, 4]])}),
    ],
    ids=["llama", "bert", "t5"],
)
def test_a_token_that_is_hidden_at_an_end_is_no_padding(make, layer, given):
    """Where tokens at the ends are changed, and one after another is hidden by the mask."""
    model, ids, last = make(), IDS[:1], IDS.shape[1] - 1
    asked = {"position": 1, "decoder": [0, 4]} if given else {"position": last}
    with lrpx.intervene(model, {layer: Set(0.5, positions=[0, last])}):
        found = lrpx.Explainer(model)(ids[0].tolist(), 5, method="leave-one-out", **asked)

    def change(x):
        x[:, [0, last]] = 0.5
        return x

    takes = {"position_ids": torch.arange(last + 1)[None]} if make is not models.tiny_t5 else given
    values = []
    for hidden in (None, *range(last + 1)):
        mask = torch.ones_like(ids)
        if hidden is not None:
            mask[0, hidden] = 0
        row = by_hand(model, layer, change, "output", ids, attention_mask=mask, **takes)[0, asked["position"]]
        values.append(row[5])
    expected = values[0] - torch.stack(values[1:])
    assert found.explained.value == pytest.approx(float(values[0]), abs=1e-12)
    assert torch.allclose(found.relevance[: last + 1], expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "change", [0.0, Scale(3), Add(2.0), Clamp(-0.1, 0.1), Set(1.0, positions=[2]), Scale(-1, positions=[0, 6])]
)
def test_the_ledger_still_closes(llama, change):
    with lrpx.intervene(llama, {"model.layers.0.mlp": {3: change}, "model.layers.1": Add(VECTOR)}):
        for method in ("attnlrp", "lrp"):
            found = lrpx.Explainer(llama)(IDS[0].tolist(), target=5, method=method, ledger=True)
            assert found.ledger.closes()
            assert found.explained.value == pytest.approx(float(logits(llama, IDS[:1])[0, -1, 5]), abs=1e-12)


@pytest.mark.parametrize("method", ["gradient-x-input", "leave-one-out", "alti-logit"])
@pytest.mark.parametrize("asked", [[2, 1, 0], [2, 0, 2], [1, 2], [2]])
def test_the_head_has_the_positions_of_the_text(llama, asked, method):
    """Whichever are asked for, in whatever order, and however many: also as many as the text has."""
    ids = IDS[0, :3].tolist()
    expected = logits(llama, IDS[:1, :3])[0, asked, 5] * torch.tensor([3.0 if at == 2 else 1.0 for at in asked])
    with lrpx.intervene(llama, {("lm_head", "output"): {5: Scale(3, positions=[2])}}):
        found = lrpx.Explainer(llama)(ids, target=[5] * len(asked), position=asked, method=method)
    values = torch.tensor([each.explained.value for each in found], dtype=torch.float64)
    assert torch.allclose(values, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_known", [False, True])
def test_hidden_states_are_those_in_the_block_whenever_they_were_first_asked_for(is_known):
    """transformers keeps them by hooks that stay from the first call that asks; whose order is as it was behind it."""
    model = models.tiny_llama()
    plain = model(IDS, output_hidden_states=True).hidden_states if is_known else None
    layer = model.model.layers[0]
    mine = layer.register_forward_hook(lambda *_: None)
    before = list(layer._forward_hooks)
    with lrpx.intervene(model, {"model.layers.0": Add(VECTOR)}), lrpx.intervene(model, {"model.layers.0": Scale(2)}):
        found = model(IDS, output_hidden_states=True).hidden_states
    assert list(layer._forward_hooks)[: len(before)] == before
    mine.remove()
    plain = model(IDS, output_hidden_states=True).hidden_states if plain is None else plain
    assert torch.equal(found[0], plain[0])
    assert torch.allclose(found[1], 2 * (plain[1] + VECTOR), rtol=0, atol=1e-12)


class Mixes(torch.nn.Module):
    """Looks to both sides."""

    def __init__(self):
        super().__init__()
        self.v, self.up, self.down = (torch.nn.Linear(*each) for each in ((16, 16), (16, 12), (12, 16)))

    def forward(self, x):
        x = x + self.v(torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0])
        return x + self.down(torch.relu(self.up(x)))


def both_sides():
    torch.manual_seed(0)
    return OfOneLayer(Mixes()).double().eval()


@pytest.mark.parametrize("method", ["gradient-x-input", "rollout", "atman"])
def test_what_is_tried_of_a_model_is_not_tried_of_the_changed_one(method):
    """Where nothing mixes tokens in the block, rows with padding are still what they are alone behind it."""
    model, texts = both_sides(), [[3, 5, 7, 9], [4, 6]]

    def explained(explainer, given):
        return explainer(given, target=[5] * len(given), method=method)

    expected = [explained(lrpx.Explainer(model, task=lrpx.Task.CAUSAL), [text])[0] for text in texts]
    explainer = lrpx.Explainer(model, task=lrpx.Task.CAUSAL)
    with lrpx.intervene(model, {("layers.0.v", "output"): 0.0}):
        explained(explainer, texts)
    for one, other in zip(explained(explainer, texts), expected, strict=True):
        scale = float(other.relevance.abs().max())
        assert torch.allclose(one.relevance, other.relevance, rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("build", [both_sides, lambda: SAMPLES["bert"].build()], ids=["own", "bert"])
def test_a_position_that_a_trial_alone_has_is_told_at_the_end(build):
    model = build()
    (layer, *_) = (place.path for place in places(model, "residual"))
    given = {} if "bert" in layer else {"task": lrpx.Task.CAUSAL}
    explainer = lrpx.Explainer(model, **given)
    asked = {"position": [1, 1]} if "bert" in layer else {}
    with (
        pytest.raises(TraceError, match="no text in this block had position 4"),
        lrpx.intervene(model, {layer: Scale(2, positions=[4])}),
    ):
        explainer([[3, 5, 7], [4, 6]], target=[5, 5], **asked)


def test_the_patches_of_an_image_are_those_without_the_block():
    """Pixels that are kept between bounds still go where they do, and tell which token is which patch's."""
    model = SAMPLES["vit"].build()
    size, generator = model.config.image_size, torch.Generator().manual_seed(0)
    image = {"pixel_values": torch.randn(1, 3, size, size, generator=generator, dtype=torch.float64)}
    expected, explainer = lrpx.Explainer(model)(image, target=1), lrpx.Explainer(model)
    (path,) = (name for name, each in model.named_modules() if isinstance(each, torch.nn.Conv2d))
    with lrpx.intervene(model, {(path, "input"): Clamp(-0.2, 0.2)}):
        found = explainer(image, target=1)
    assert list(found.parts) == list(expected.parts) == list(explainer(image, target=1).parts)


def test_units_are_ranked_as_they_are_in_the_block(llama):
    explainer = lrpx.Explainer(llama)
    with lrpx.intervene(llama, {"model.layers.1.mlp": {3: 0.0}}):
        found = explainer.neurons(IDS[0].tolist(), 5, top=10**6)
    assert all(row.relevance == row.activation == 0 for row in found if (row.layer, row.unit) == (1, 3))
    assert any(row.relevance for row in found if (row.layer, row.unit) == (1, 4))


@pytest.mark.slow
def test_what_compiled_code_calls_is_changed_too(llama):
    """Such code does not look at hooks, and what is compiled in a block would keep them."""

    def compiled():
        return torch.compile(lambda ids: llama(input_ids=ids).logits, backend="eager")

    before, during = compiled(), compiled()
    with torch.no_grad():
        plain = before(IDS)
        with lrpx.intervene(llama, {"model.layers.1": Add(VECTOR)}):
            want = logits(llama)
            with lrpx.intervene(llama, {"model.layers.0": 0.0}):
                inner = before(IDS)
            assert torch.equal(before(IDS), want)
            assert torch.equal(during(IDS), want)
        assert not torch.equal(inner, want)
        assert torch.equal(during(IDS), plain)
        assert torch.equal(before(IDS), plain)
    assert torch.allclose(plain, logits(llama))
    assert not torch.allclose(want, plain)


def test_blocks_of_several_threads_leave_compiled_code_as_it_was(llama):
    calls = []
    counted = torch.compile(lambda x: x + 1, backend=lambda graph, _: calls.append(1) or graph.forward)
    with record(llama, ["model.layers.0"]):
        other = record(llama, ["model.layers.1"])
        entered = threading.Thread(target=other.__enter__)
        entered.start()
        entered.join()
        logits(llama)
    counted(torch.ones(2))
    assert not calls  # the other block is still there
    with suppress(TraceError):
        other.__exit__(None, None, None)
    counted(torch.ones(2))
    assert calls


def test_a_static_cache_that_generate_compiles_is_changed_at_each_step(llama):
    config = transformers.CompileConfig(mode="default", fullgraph=False, backend="eager")
    config._compile_all_devices = True  # as a GPU has it
    how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    static = {"cache_implementation": "static", "compile_config": config}
    plain = llama.generate(IDS, **how, **static)
    with lrpx.intervene(llama, {"model.layers.0": Add(30 * VECTOR)}):
        want = llama.generate(IDS, **how)
        assert torch.equal(llama.generate(IDS, **how, **static), want)
    assert not torch.equal(plain, want)
    assert torch.equal(llama.generate(IDS, **how, **static), plain)


CHECKPOINTED = (DOWN, "input")


def trained(model, change, calls, *, reentrant=None, inside=True):
    """The gradient of the changed layer's weight, of calls with masks, with the model's own checkpoints or without."""
    with suppress(ValueError):
        model.gradient_checkpointing_disable()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.zero_grad()
    hook = model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_())
    with hook:
        with lrpx.intervene(model, {CHECKPOINTED: {3: change}}):
            loss = sum(model(IDS, attention_mask=mask, labels=IDS, use_cache=False).loss for mask in calls)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    return model.get_submodule(DOWN).weight.grad.clone()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_.*able` is deprecated:FutureWarning")
def test_what_a_checkpoint_computes_again_is_changed_as_before_or_refused(reentrant):
    model = models.tiny_llama().requires_grad_().train()
    model.config.attention_dropout = 0.0
    whole, padded = torch.ones_like(IDS), torch.ones_like(IDS)
    padded[:, :3] = 0
    for change in (Set(5.0, positions=[2]), Scale(3.0)):
        expected = trained(model, change, [padded])
        assert torch.equal(trained(model, change, [padded], reentrant=reentrant), expected)
        with pytest.raises(TraceError, match=r"is in a checkpoint.*call backward\(\) in the block"):
            trained(model, change, [padded], reentrant=reentrant, inside=False)
    with pytest.raises(TraceError, match="another call behind that had its tokens at other positions"):
        trained(model, Set(5.0, positions=[2]), [whole, padded], reentrant=reentrant)
    for change, calls in ((Set(5.0, positions=[2]), [padded, padded]), (Scale(3.0), [whole, padded])):
        expected = trained(model, change, calls)
        torch.testing.assert_close(trained(model, change, calls, reentrant=reentrant), expected)


def test_layers_that_run_again_and_compiled_code_are_refused(llama):
    with lrpx.intervene(llama, {"model.layers.1.mlp": {3: 0.0}}):
        logits(llama)
        with pytest.raises(MethodError, match="leave recompute out"):
            lrpx.Explainer(llama, recompute=True)(IDS[0].tolist())
        with pytest.raises(ModelError, match="without compile"):
            lrpx.Explainer(llama, compile=True)(IDS[0].tolist())
    compiled = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    with pytest.raises(ModelError, match=r"0 is compiled by torch\.compile"), lrpx.intervene(compiled, {"0": 0.0}):
        pass


# ------------------------------------------------------------------------------- refusals

WRONG = {
    "no such layer": ({"model.layers.9.mlp": {3: 0.0}}, MethodError, "no module 'model.layers.9.mlp'; it has 2 layers"),
    "no such unit": ({"model.layers.1.mlp": {24: 0.0}}, MethodError, "has 24 neurons; 24 is none of them"),
    "a negative unit": ({"model.layers.1.mlp": {-1: 0.0}}, MethodError, "-1 is none"),
    "no such head": ({"model.layers.1.self_attn": {4: 0.0}}, MethodError, "has 4 heads; 4 is none"),
    "no unit": ({"model.layers.1.mlp": {}}, InputError, "no unit of"),
    "no change": ({"model.layers.1.mlp": {3: "off"}}, InputError, "'off' is no change"),
    "not finite": ({"model.layers.1.mlp": {3: float("nan")}}, InputError, "pass a finite number"),
    "a factor of text": ({"model.layers.1.mlp": {3: Scale("2")}}, InputError, "pass a finite number"),
    "bounds": ({"model.layers.1.mlp": {3: Clamp(2, 1)}}, InputError, "lets nothing through"),
    "positions": ({"model.layers.1.mlp": {3: Scale(2, positions=[-1])}}, InputError, r"positions \[-1\] are none"),
    "a unit's name": ({"model.layers.1.mlp": {"3": 0.0}}, InputError, "'3' is no unit"),
    "no dict": ([("a", 1)], InputError, "pass a dict"),
    "a patch": ({"model.layers.1.mlp": Patch(torch.zeros(3))}, InputError, r"values of Patch are \[3\]"),
    "a patch where it has nothing": (
        {"model.layers.1": Patch(torch.zeros(3, 16), positions=[1, 3])},
        InputError,
        "of 3 tokens, and none stood at position 3; pass positions to 2",
    ),
    "a direction": ({"model.layers.1": Along(torch.zeros(16), 0.0)}, InputError, "is not zero"),
    "no place": ({3: 0.0}, InputError, "3 is no place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_at_once(llama, name):
    changes, error, told = WRONG[name]
    before = hooks(llama)
    with pytest.raises(error, match=told), lrpx.intervene(llama, changes):
        raise AssertionError("the block began")
    assert hooks(llama) == before


def test_what_is_refused_when_it_is_met(llama):
    for changes, told in (
        ({"model.layers.1.mlp": {6: Patch(torch.zeros(4, 16))}}, "Patch have 16 features, the place has 24"),
        ({"model.layers.1": {16: 0.0}}, "has 16 features; 16 is none of them"),
        ({"model.layers.1": Add(VECTOR[:5])}, "has 5 features, the unit of model.layers.1 has 16"),
        ({"model.layers.1": Along(VECTOR[:5], 0.0)}, "5 features, the place has 16"),
        ({"model.layers.1": Patch(torch.zeros(3, 5))}, "5 features, the place has 16"),
    ):
        with pytest.raises((MethodError, InputError), match=told), lrpx.intervene(llama, changes):
            logits(llama)


def test_what_had_no_effect_is_told_at_the_end(llama):
    with pytest.raises(TraceError, match="was not called in this block"), lrpx.intervene(llama, {DOWN: {3: 0.0}}):
        pass
    with (
        pytest.raises(TraceError, match="no text in this block had position 7, 9 at"),
        lrpx.intervene(llama, {DOWN: {3: Set(0.0, positions=[6, 7, 9])}}),
    ):
        logits(llama)
    model = SAMPLES["wav2vec2"].build()
    path = "wav2vec2.encoder.layers.1.feed_forward.output_dense"
    with (
        pytest.raises(TraceError, match="at which tokens"),
        lrpx.intervene(model, {(path, "input"): Scale(2, positions=[1])}),
        torch.no_grad(),
    ):
        model(**SAMPLES["wav2vec2"].batch())
    model = SAMPLES["t5"].build()
    with (
        pytest.raises(TraceError, match="did not come to the output of decoder"),
        lrpx.intervene(model, {("decoder.block.1", "output"): 0.0}),
        torch.no_grad(),
    ):
        model.get_encoder()(input_ids=IDS)
    with pytest.raises(ZeroDivisionError), lrpx.intervene(llama, {DOWN: {3: 0.0}}):  # the first error is told
        raise ZeroDivisionError


# ------------------------------------------------------------- tokens before the rows, as in XLNet

SQUARE = torch.tensor([[11, 25, 3, 4], [12, 24, 1, 27], [30, 29, 8, 3], [9, 8, 7, 6]])
"""As many rows as tokens."""


@pytest.mark.parametrize("rows", [4, 3])
def test_positions_where_the_tokens_come_before_the_rows(rows):
    model = tiny.xlnet()
    changes = {"transformer.layer.0.ff": Set(0.0, positions=[1])}
    with lrpx.intervene(model, changes):
        together = logits(model, SQUARE[:rows])
        alone = torch.cat([logits(model, each[None]) for each in SQUARE[:rows]])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("key", ["transformer.layer.0", ("transformer.layer.0.ff", "input")])
@pytest.mark.parametrize("rows", [4, 3, 1])
def test_what_is_recorded_has_the_rows_first(rows, key):
    model = tiny.xlnet()
    with record(model, [key]) as together:
        logits(model, SQUARE[:rows])
    for row, ids in enumerate(SQUARE[:rows]):
        with record(model, [key]) as alone:
            logits(model, ids[None])
        torch.testing.assert_close(together[key][row], alone[key][0], rtol=0, atol=1e-9)


def test_positions_where_all_tokens_of_a_place_stand_side_by_side():
    """As ``[T·B, n]``, which no shape tells from ``[B·T, n]``."""
    model, key = tiny.tokens_first(), ("layers.0", "input")
    changes = {"layers.0.2": {3: Set(2.0, positions=[1])}}
    alone = []
    with torch.no_grad():
        for ids in SQUARE[:3]:
            with lrpx.intervene(model, changes), record(model, [key]) as there:
                alone.append((model(ids[None])[0], there[key]))
        with lrpx.intervene(model, changes), record(model, [key]) as there:
            together = model(SQUARE[:3])
    torch.testing.assert_close(together, torch.stack([out for out, _ in alone]))
    torch.testing.assert_close(there[key], torch.cat([value for _, value in alone]))


class BesideOne(Module):
    """An MLP that is given ``[B, 1, T, d]``, as DeepSeek's values are made."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = (
            torch.nn.Embedding(9, 8),
            torch.nn.Linear(8, 12),
            torch.nn.Linear(12, 8),
        )

    def get_input_embeddings(self) -> Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.second(self.first(self.embedding(input_ids)[:, None]).relu())[:, 0].cumsum(1)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_positions_of_what_stands_beside_a_dimension_of_one(rows: int) -> None:
    model = BesideOne().double().eval()
    ids = torch.arange(4 * rows).view(rows, 4) % 9
    mask = torch.ones_like(ids)
    mask[-1, :1] = 0  # the last row is padded on the left
    with torch.no_grad():
        x = model.first(model.embedding(ids))
        for row in range(rows):
            x[row, 1 + int(row == rows - 1), 2:4] *= 3
        expected = model.second(x.relu()).cumsum(1)
        changes = {unit: Scale(3, positions=[1]) for unit in (2, 3)}
        with lrpx.intervene(model, {("first", "output"): changes}):
            torch.testing.assert_close(model(input_ids=ids, attention_mask=mask), expected, rtol=0, atol=1e-9)


class Tutorial(Module):
    """torch's own layers as they are by default, the tokens before the rows, in a model of no known argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(31, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor) -> Tensor:
        return self.layers(self.embed(src).transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("rows", [4, 3])
def test_where_only_shapes_tell_what_comes_first(rows):
    model, key = Tutorial().double().eval(), ("layers.layers.0", "output")
    changes = {key: Add(VECTOR, positions=[1])}
    alone = []
    for ids in SQUARE[:rows]:
        with lrpx.intervene(model, changes), record(model, [key]) as there, torch.no_grad():
            alone.append((model(ids[None])[0], there[key][0]))
    if rows == SQUARE.shape[1]:
        for block in (lrpx.intervene(model, changes), record(model, [key])):
            with pytest.raises(TraceError, match="has the tokens or the rows first"), block:
                model(SQUARE)
        return
    with lrpx.intervene(model, changes), record(model, [key]) as there, torch.no_grad():
        together = model(SQUARE[:rows])
    torch.testing.assert_close(together, torch.stack([out for out, _ in alone]))
    torch.testing.assert_close(there[key], torch.stack([value for _, value in alone]))


class Weighed(Summed):
    """The same, its heads side by side, and its weights no softmax that torch has."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.o((self.weights(q @ k.mT) @ v).transpose(1, 2).flatten(-2))


class ByHead(Module):
    """Attention whose heads each have a matrix back to the stream."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(3))
        self.o = torch.nn.ModuleList(torch.nn.Linear(4, 16, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        read = ((q @ k.mT).softmax(-1) @ v).unbind(1)
        return sum(o(each) for o, each in zip(self.o, read, strict=True))


class Maxout(Module):
    """An MLP whose latent neurons nobody finds."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(*sizes, dtype=torch.float64) for sizes in ((16, 64), (32, 16)))

    def forward(self, x):
        one, other = self.up(x).chunk(2, -1)
        return self.down(torch.maximum(one, other))


class Around(Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return x + self.attention(x)


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        (lambda: Weighed(lambda scores: scores.cumsum(-1)), "has no neurons or heads"),
        (ByHead, "has units in layers.0.attention.o.0, layers.0.attention.o.1"),
        (Maxout, "has no neurons or heads"),
    ],
)
def test_units_that_are_at_no_one_place_are_no_features(attention, match):
    model = OfSums()
    model.layers = torch.nn.ModuleList([Around(attention())])
    path = "layers.0.attention"
    with pytest.raises(MethodError, match=match), lrpx.intervene(model.eval(), {path: {1: 0.0}}):
        raise AssertionError("the block began")
    for changes in ({(path, "output"): {1: 0.0}}, {path: 0.0}):
        with lrpx.intervene(model, changes):
            model(IDS)


def test_heads_with_a_matrix_each_are_all_found():
    model = OfSums()
    model.layers = torch.nn.ModuleList([Around(ByHead())])
    found = places(model.eval(), "heads")
    assert [(place.path, place.width, place.size) for place in found] == [
        (f"layers.0.attention.o.{head}", 1, 4) for head in range(4)
    ]
    for place in found:
        with torch.no_grad(), lrpx.intervene(model, {place: {0: 0.0}}):
            without = model(IDS)
        matrix = model.get_submodule(place.path)
        with torch.no_grad(), matrix.register_forward_hook(lambda module, _, y: torch.zeros_like(y) + module.bias):
            torch.testing.assert_close(model(IDS), without, rtol=0, atol=1e-12)


def test_a_patch_from_a_row_that_was_padded_on_the_left(llama):
    key = "model.layers.0"
    with torch.no_grad(), lrpx.interventions.record(llama, [key]) as alone:
        llama(IDS[:1])
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), IDS[:1]], 1)
    mask = (torch.arange(padded.shape[1]) >= 2).long()[None]
    with torch.no_grad(), lrpx.interventions.record(llama, [key]) as found:
        llama(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    torch.testing.assert_close(found[key][0, mask[0].bool()], alone[key][0], rtol=0, atol=1e-9)


MAPS = {
    "a convolution": ("resnet", "encoder.stages.0.layers.0.layer.0.convolution"),
    "what normalises it": ("resnet", "encoder.stages.1.layers.0.layer.1.normalization"),
    "a norm over its channels": ("convnext", "encoder.stages.1.downsampling_layer.0"),
    "a layer": ("resnet", "encoder.stages.1"),
    "the layer's activation": ("resnet", "embedder.embedder.activation"),
    "a stage of transformer blocks": ("segformer", "stages.1"),
    "a convolution of a sound": ("wav2vec2", "feature_extractor.conv_layers.1"),
}


@pytest.mark.parametrize("what", MAPS)
def test_the_features_of_a_map_are_its_channels(what: str) -> None:
    """``[B, C, H, W]`` and ``[B, C, T]``: channel 1, at all places, and not column 1 or step 1."""
    name, inner = MAPS[what]
    model = of_maps(name)
    path, given = f"{name}.{inner}", map_input(name)
    module = model.get_submodule(path)
    with torch.no_grad(), module.register_forward_hook(lambda _, __, y: y.index_fill(1, FIRST, 3.0)):
        want = model(given).logits
    with torch.no_grad(), lrpx.intervene(model, {(path, "output"): {1: 3.0}}):
        assert torch.allclose(model(given).logits, want, rtol=0, atol=1e-12)
    with torch.no_grad(), module.register_forward_hook(lambda _, __, y: y + 1):
        want = model(given).logits
    with torch.no_grad(), record(model, [(path, "output")]) as found:
        model(given)
    wide = found[path, "output"].shape[-1]
    with torch.no_grad(), lrpx.intervene(model, {(path, "output"): Add(torch.ones(wide))}):
        assert torch.allclose(model(given).logits, want, rtol=0, atol=1e-12)


def test_a_map_with_as_many_places_as_features_is_refused_but_for_changes_of_all_numbers() -> None:
    model = of_maps("resnet")
    path = "resnet.encoder.stages.0"  # [1, 8, 8, 8]
    with pytest.raises(TraceError, match="nobody knows which dimension"), lrpx.intervene(model, {path: {1: 0.0}}):
        model(map_input("resnet", 32))
    with torch.no_grad(), lrpx.intervene(model, {path: 0.0}):
        model(map_input("resnet", 32))


class Mapped(Module):
    """A convolution over the tokens and what follows on it, of maps ``[B, 12, T]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(31, 12), torch.nn.Linear(12, 3)
        self.block = torch.nn.Sequential(torch.nn.Conv1d(12, 12, 3, padding=1), torch.nn.GELU())

    def get_input_embeddings(self) -> Module:
        return self.embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(input_ids).mT).mean(-1))


@pytest.mark.parametrize("path", ["block", "block.1"])
def test_a_map_of_a_text_as_long_as_it_is_wide_is_none_of_tokens(path: str) -> None:
    """It has the shape of a vector for each token: which is told by a text of another length, or refused."""
    model = Mapped().double().eval()
    seven, twelve = (torch.arange(3, 3 + length)[None] for length in (7, 12))
    with torch.no_grad(), model.get_submodule(path).register_forward_hook(lambda _, __, y: y.index_fill(1, FIRST, 2.0)):
        want = model(seven)
    with torch.no_grad(), lrpx.intervene(model, {(path, "output"): {1: 2.0}}):
        assert torch.allclose(model(seven), want, rtol=0, atol=1e-12)
    with (
        pytest.raises(TraceError, match=r"nobody knows which dimension .* pass an input of another size"),
        lrpx.intervene(model, {(path, "output"): {1: 2.0}}),
    ):
        model(twelve)


def of_maps(name: str) -> Module:
    mapping = "audio-classification" if name == "wav2vec2" else "image-classification"
    return tiny_model(choose([name], mapping)[0]).double()


def map_input(name: str, side: int = 48) -> Tensor:
    shape = (1, 800) if name == "wav2vec2" else (1, 3, side, side)
    return torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).sin().reshape(shape)
