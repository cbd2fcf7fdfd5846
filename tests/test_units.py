"""Units: found by what they do, in models whose modules have every kind of name; and what is refused by name."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DeepseekV3Config,
    FunnelConfig,
    FunnelForMaskedLM,
    Llama4TextConfig,
    MBartConfig,
    MBartForConditionalGeneration,
    MptConfig,
    MptForCausalLM,
    Qwen2MoeConfig,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)

import lrpx
from lrpx.coverage._classes import choose, every_class
from lrpx.coverage._inputs import tiny_inputs
from lrpx.coverage._tiny import tiny_model
from lrpx.engine import propagate
from lrpx.errors import MethodError, ModelError, TraceError
from lrpx.recipes import ATTNLRP, GRADIENT
from lrpx.sae import SparseAutoencoder, explain_features
from lrpx.units import KINDS, Place, Reading, places
from lrpx.units._place import READS
from tests import tiny
from tests.engine.samples import SAMPLES, token_ids
from tests.plain_gpt import GPT
from tests.reference import models

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}
NEURONS = {
    "llama": ("model.layers.{}.mlp.down_proj", 24),
    "gemma3": ("model.layers.{}.mlp.down_proj", 24),
    "phi": ("model.layers.{}.mlp.fc2", 24),
    "falcon": ("transformer.h.{}.mlp.dense_4h_to_h", 64),
    "bloom": ("transformer.h.{}.mlp.dense_4h_to_h", 64),
    "opt": ("model.decoder.layers.{}.fc2", 24),
    "gpt2": ("transformer.h.{}.mlp.c_proj", 64),
    "gpt_neox": ("gpt_neox.layers.{}.mlp.dense_4h_to_h", 24),
    "bert": ("bert.encoder.layer.{}.output.dense", 24),
    "modernbert": ("model.layers.{}.mlp.Wo", 24),
    "vit": ("vit.layers.{}.mlp.fc2", 24),
    "mamba": ("backbone.layers.{}.mixer.out_proj", 24),
}
HEADS = {
    "llama": ("model.layers.{}.self_attn.o_proj", "sdpa eager"),
    "gemma2": ("model.layers.{}.self_attn.o_proj", "eager"),
    "falcon": ("transformer.h.{}.self_attention.dense", "sdpa eager"),
    "falcon alibi": ("transformer.h.{}.self_attention.dense", "eager"),
    "bloom": ("transformer.h.{}.self_attention.dense", "eager"),
    "gpt2": ("transformer.h.{}.attn.c_proj", "sdpa eager"),
    "bert": ("bert.encoder.layer.{}.attention.output.dense", "sdpa eager"),
    "mixtral": ("model.layers.{}.self_attn.o_proj", "sdpa"),
}


@pytest.mark.parametrize("name", NEURONS)
def test_neurons_are_the_input_of_the_second_matrix(name):
    path, width = NEURONS[name]
    found = places(SAMPLES[name].build(), "neurons")
    assert found == tuple(Place(i, path.format(i), "input", "neurons", width) for i in range(2))


def mbart():
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    return tiny.build(MBartForConditionalGeneration, MBartConfig(vocab_size=31, d_model=16, **sizes))


@pytest.mark.parametrize("kind", ["neurons", "mlp", "queries", "residual"])
@pytest.mark.parametrize("build", [mbart, models.tiny_t5])
def test_a_clamp_that_keeps_half_precision_from_overflowing_makes_no_neurons(build, kind):
    assert places(build().half(), kind) == places(build(), kind)


def test_queries_that_are_kept_between_bounds():
    config = {"d_model": 16, "n_heads": 4, "n_layers": 2, "vocab_size": 31, "max_seq_len": 64}
    model = tiny.build(MptForCausalLM, MptConfig(**config, attn_config={"clip_qkv": 6.0}), "eager")
    free = tiny.build(MptForCausalLM, MptConfig(**config), "eager")
    assert places(model, "queries") == places(free, "queries")
    assert places(model, "neurons") == places(free, "neurons")


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_side_by_side_at_the_output_projection(name):
    path, ways = HEADS[name]
    for attention in ways.split():
        found = places(SAMPLES[name].build(torch.float32, attn_implementation=attention), "heads")
        assert found == tuple(Place(i, path.format(i), "input", "heads", 4, 4) for i in range(2))


def entered(model: nn.Module, path: str) -> Tensor:
    """What enters a module."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=token_ids())
    handle.remove()
    return seen[0]


def test_a_head_is_what_its_values_make():
    model = SAMPLES["llama"].build()
    (place, *_) = places(model, "heads")
    before = place.of(entered(model, place.path)), entered(model, place.path)
    values = model.get_submodule("model.layers.0.self_attn.v_proj").weight
    with torch.no_grad():
        values[4:] += 1  # the second of two groups, which heads 2 and 3 read
    after = entered(model, place.path)
    changed = (after != before[1]).any(0).any(0)
    assert [int(i) for i in changed.nonzero()] == [*place.features(2), *place.features(3)]
    assert torch.allclose(place.of(after), after.unflatten(-1, (4, 4)).sum(-1))
    assert not torch.equal(place.of(after), before[0])


def test_reading_has_what_the_trace_has():
    model = SAMPLES["llama"].build()
    found = [place for kind in ("neurons", "heads", "keys", "residual") for place in places(model, kind)]
    tap = Reading(found)
    with propagate(model, ATTNLRP, taps=[tap]) as trace:
        value = model(input_ids=token_ids()).logits[0, -1, 3]
    trace.explain(value)
    for place in found:
        assert torch.equal(trace.relevance_of(tap.value(place)), trace.relevance(place.path, of=place.side))


def test_keys_and_values_of_one_matrix_are_told_apart():
    (first, _) = places(SAMPLES["gpt2"].build(), "keys")
    assert first == Place(0, "transformer.h.0.attn.c_attn", "output", "keys", 16, 1, tuple(range(16, 32)))
    (first, _) = places(SAMPLES["gpt2"].build(), "values")
    assert first.columns == tuple(range(32, 48))
    assert first.features(3) == (35,)
    (first, _) = places(SAMPLES["gpt_neox"].build(), "keys")  # head after head, each with its query, key and value
    assert first.columns == tuple(head * 12 + 4 + i for head in range(4) for i in range(4))
    assert torch.equal(first.of(torch.arange(48)), torch.tensor(first.columns))
    (first, _) = places(SAMPLES["llama"].build(), "values")
    assert first == Place(0, "model.layers.0.self_attn.v_proj", "output", "values", 8)


def test_values_that_attention_reads_in_two_parts_are_numbered_once():
    (diffllama,) = choose(["diffllama"], "causal-lm")  # half of them in each of two calls
    (first, _) = places(tiny_model(diffllama), "values")
    assert first == Place(0, "model.layers.0.self_attn.v_proj", "output", "values", 32)
    assert first.heads == 4


def test_one_module_run_as_several_layers_has_a_place_for_each():
    found = places(SAMPLES["albert"].build(), "neurons")
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"
    assert found == tuple(Place(i, path, "input", "neurons", 24, call=i, calls=2) for i in range(2))
    model, tap = SAMPLES["albert"].build(), Reading(found)
    with propagate(model, ATTNLRP, taps=[tap]) as trace:
        value = model(input_ids=token_ids()).logits[0, -1, 3]
    trace.explain(value)
    for place in found:
        assert torch.equal(trace.relevance_of(tap.value(place)), trace.relevance(path, of="input", call=place.call))


def test_encoder_and_decoder_have_their_own():
    found = [(place.layer, place.path) for place in places(SAMPLES["bart"].build(), "heads")]
    encoder = [(i, f"model.encoder.layers.{i}.self_attn.out_proj") for i in range(2)]
    kinds = ("self_attn", "encoder_attn")
    assert found == encoder + [(i, f"model.decoder.layers.{i}.{kind}.out_proj") for i in range(2) for kind in kinds]
    assert len(places(SAMPLES["t5"].build(), "neurons")) == 4
    assert len(places(SAMPLES["bart"].build(), "residual")) == 4


def test_branches_and_layers():
    model = SAMPLES["qwen3"].build()
    assert places(model, "attention")[1] == Place(1, "model.layers.1.self_attn.o_proj", "output", "attention", 1, 16)
    assert places(model, "mlp")[0] == Place(0, "model.layers.0.mlp.down_proj", "output", "mlp", 1, 16)
    assert places(model, "residual")[1] == Place(1, "model.layers.1", "output", "residual", 1, 16)


@pytest.mark.parametrize("name", ["xlm", "flaubert"])
def test_branches_in_lists_of_their_own_are_no_layers(name: str):
    """XLM adds what its lists of attentions and of MLPs give to its stream itself."""
    model = tiny_model(choose([name], "masked-lm")[0])
    assert [place.path for place in places(model, "mlp")] == [f"transformer.ffns.{i}.lin2" for i in range(2)]
    assert len(places(model, "attention")) == 2
    with pytest.raises(MethodError, match=r"the modules in transformer\.attentions of .* are branches"):
        places(model, "residual")
    with pytest.raises(MethodError, match="are branches"):
        lrpx.Explainer(model).flow([3, 4, 5, 6], position=1)


def test_looking_leaves_the_model_as_it_was():
    model = SAMPLES["llama"].build()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    hooks = {path: (len(m._forward_hooks), len(m._forward_pre_hooks)) for path, m in model.named_modules()}
    grads = [p.requires_grad for p in model.parameters()]
    places(model, "neurons")
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks == {path: (len(m._forward_hooks), len(m._forward_pre_hooks)) for path, m in model.named_modules()}
    assert grads == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize(("kind", "name"), [("beit", "BeitForSemanticSegmentation"), ("dpt", "DPTForDepthEstimation")])
def test_looking_leaves_what_a_model_makes_of_hidden_states(kind, name):
    """They are kept by hooks that its first call puts there."""
    (case,) = (each for each in choose([kind]) if each.name == name)
    model = tiny_model(case)
    inputs = tiny_inputs(case, model)
    with torch.no_grad():
        expected = copy.deepcopy(model)(**inputs)[0]
        places(model, "neurons", inputs)
        assert torch.equal(model(**inputs)[0], expected)


def test_a_model_is_run_once_and_again_after_it_has_changed():
    model = SAMPLES["llama"].build()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for kind in KINDS:
        places(model, kind)
    assert len(calls) == 1
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    assert len(places(model, "neurons")) == 2
    assert len(calls) == 2


class Switched(nn.Module):
    """A ReLU that may be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if self.on else x


def test_units_are_looked_for_again_where_a_model_was_pruned_or_stops_earlier():
    """Its modules are of the same names and types: ranking them ended in torch's own error, or was refused."""
    model = SAMPLES["llama"].build()
    assert [place.width for place in places(model, "neurons")] == [24, 24]
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, nn.Linear(mlp.gate_proj.in_features, 20, bias=False))
    mlp.down_proj = nn.Linear(20, mlp.down_proj.out_features, bias=False)
    mlp.double()
    assert [place.width for place in places(model, "neurons")] == [24, 20]
    model.config.num_hidden_layers = 1
    assert [place.width for place in places(model, "neurons")] == [24]


class Written(nn.Module):
    """An MLP whose second matrix is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Parameter(torch.randn(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(self.first(x).relu(), self.second)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(9, 8), nn.ModuleList([Written()]), nn.Linear(8, 9)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.tanh())  # which is in no layer


def test_what_is_computed_inside_a_module_is_refused_by_its_name():
    with pytest.raises(MethodError, match=r"Own computes its neurons inside layers\.0, where"):
        places(Own().eval(), "neurons")
    with pytest.raises(MethodError, match=r"Mixtral.* computes its neurons inside model\.layers\.0\.mlp\.experts"):
        places(SAMPLES["mixtral"].build(torch.float32), "neurons")


class Torchs(nn.Module):
    """torch's own encoder, whose attention makes queries, keys and values inside of one module."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 31)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        return self.head(self.encoder(self.embedding(input_ids)))


@pytest.mark.parametrize("kind", ["queries", "keys", "values", "heads"])
def test_what_an_attention_makes_inside_is_not_what_it_gives(kind):
    model = Torchs().eval()
    with pytest.raises(MethodError, match=rf"Torchs computes its {kind} inside encoder\.layers\.0\.self_attn, where"):
        places(model, kind)
    assert [place.path for place in places(model, "neurons")] == [f"encoder.layers.{i}.linear2" for i in range(2)]


FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOW = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
DEEP = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FOUR = {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4, "intermediate_size_mlp": 24}
MIXED = {
    "beside": (
        Qwen2MoeConfig(**tiny.SIZES | FEW, num_key_value_heads=2, num_experts=4, shared_expert_intermediate_size=8),
        "model.layers.0.mlp.experts",
    ),
    "later": (DeepseekV3Config(**tiny.SIZES | FEW | LOW | DEEP), "model.layers.1.mlp.experts"),
    "all at once": (Llama4TextConfig(**tiny.SIZES | FOUR), "model.layers.0.feed_forward.experts"),
}
"""Experts in one tensor, and others that are MLPs of their own: of one layer, or of another."""


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MIXED)
def test_experts_are_not_left_out_where_there_are_other_neurons(name, experts):
    config, inside = MIXED[name]
    model = AutoModelForCausalLM.from_config(config).eval()
    if name != "all at once":
        model.set_experts_implementation(experts)
    for kind in ("neurons", "mlp"):
        with pytest.raises(MethodError, match=rf"computes some of its \w+ inside {re.escape(inside)}, where"):
            places(model, kind)
    assert len(places(model, "heads")) == 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class InOneTensor(nn.Module):
    """A layer of attention, two experts whose weights are one tensor, and a third for all tokens."""

    def __init__(self, how):
        super().__init__()
        self.how, self.attention = how, nn.MultiheadAttention(16, 2, batch_first=True)
        self.router, self.shared = nn.Linear(16, 2), Expert()
        self.up, self.down = nn.Parameter(torch.randn(2, 24, 16)), nn.Parameter(torch.randn(2, 16, 24))

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        weights = self.router(x).softmax(-1)
        if self.how == "none is sent to the second":
            out = torch.zeros_like(x).flatten(0, 1)
            for expert, count in enumerate((len(out), 0)):
                at = torch.arange(count)
                hidden = nn.functional.gelu(x.flatten(0, 1)[at] @ self.up[expert].T)
                given = nn.functional.linear(hidden, self.down[expert]) * weights.flatten(0, 1)[at, expert, None]
                out = out.index_add(0, at, given)
            return x + self.shared(x) + out.view_as(x)
        hidden = nn.functional.gelu(torch.einsum("btd,efd->btef", x, self.up))
        if self.how == "one einsum":
            return x + self.shared(x) + torch.einsum("bte,btef,edf->btd", weights, hidden, self.down)
        if self.how == "einsum":
            given = torch.einsum("btef,edf->bted", hidden, self.down)
        else:
            given = torch.stack([nn.functional.linear(hidden[:, :, i], self.down[i]) for i in range(2)], 2)
        return x + self.shared(x) + (given * weights[..., None]).sum(2)


class InLayers(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.table, self.layers = nn.Embedding(30, 16), nn.ModuleList([InOneTensor(how)])

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids):
        return self.layers[0](self.table(input_ids)) @ self.table.weight.T


@pytest.mark.parametrize("how", ["none is sent to the second", "einsum", "one einsum", "one after another"])
def test_experts_in_the_layer_itself_are_not_left_out_beside_a_shared_one(how):
    model = InLayers(how).eval()
    with pytest.raises(MethodError, match=r"computes some of its neurons inside layers\.0, where"):
        places(model, "neurons")


class Routed(nn.Module):
    """Each token's first and second choice of two experts: an expert is given the tokens of its first choice first."""

    def __init__(self, pick):
        super().__init__()
        self.gate, self.pick = nn.Linear(16, 2), pick
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            which, at = torch.where((chosen == number).T)
            out = out.index_add(0, at, expert(self.pick(flat, at)) * weights[at, which][:, None])
        return out.reshape(x.shape)


class Experts(nn.Module):
    def __init__(self, pick=lambda x, at: x[at]):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList([Routed(pick), Routed(pick)])

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, at: x[at],
        lambda x, at: x[at, :],
        lambda x, at: x[None][0, at],
        lambda x, at: x.index_select(0, at),
        lambda x, at: torch.gather(x, 0, at[:, None].expand(-1, 16)),
    ],
)
def test_rows_that_were_picked_among_the_tokens_stand_in_no_order(pick):
    """An expert that all tokens come to has as many rows as there are tokens, and not in theirs."""
    for kind in ("neurons", "mlp"):
        with pytest.raises(MethodError, match=r"Experts computes its \w+ inside layers\.0\.experts\.0\.down, where"):
            places(Experts(pick).eval(), kind)


def test_experts_are_not_left_out_beside_hyper_connections():
    model = tiny_model(next(each for each in every_class() if each.name == "Qwen4ExpForCausalLM"))
    with pytest.raises(MethodError, match=r"some of its neurons inside model\.layers\.0\.mlp\.experts, where"):
        places(model, "neurons")


def test_what_there_is_not():
    with pytest.raises(MethodError, match="no heads were found in MambaForCausalLM"):
        places(SAMPLES["mamba"].build(), "heads")
    with pytest.raises(MethodError, match="no units called 'nerves'; pass one of neurons, heads"):
        places(SAMPLES["llama"].build(), "nerves")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"is in training mode; call model\.eval\(\)"):
        places(SAMPLES["llama"].build().train(), "neurons")
    with pytest.raises(ModelError, match="nobody knows what Wav2Vec2ForCTC takes"):
        places(SAMPLES["wav2vec2"].build(), "neurons")
    assert len(places(SAMPLES["wav2vec2"].build(), "neurons", SAMPLES["wav2vec2"].batch())) == 2
    with pytest.raises(MethodError, match="has 24 neurons; 24 is none of them"):
        places(SAMPLES["llama"].build(), "neurons")[0].features(24)


@pytest.mark.parametrize("name", ["bert_classifier", "gpt2_classifier", "codegen", "longformer", "marian", "xlnet"])
def test_other_families(name):
    assert len(places(getattr(tiny, name)(), "neurons")) == (4 if name == "marian" else 2)


BY_VIEW = {
    "codegen": {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "gpt_neo": {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}
"""Families that put the heads side by side by ``contiguous().view()``."""


@pytest.mark.parametrize("name", BY_VIEW)
def test_heads_are_found_where_they_are_copied_before_they_are_put_side_by_side(name):
    config = AutoConfig.for_model(name, vocab_size=31, **BY_VIEW[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    assert [(place.path.rpartition(".")[2], place.width) for place in places(model, "heads")] == [("out_proj", 4)] * 2
    assert len(places(model, "attention")) == len(places(model, "mlp")) == 2


@pytest.mark.parametrize("how", ["cat", "stack"])
def test_heads_that_are_modules_of_their_own(how):
    found = places(GPT(how), "heads", {"input_ids": torch.tensor([[3, 14, 15, 9]])})
    assert found == tuple(Place(i, f"blocks.{i}.attention.project", "input", "heads", 4, 4) for i in range(3))


EINSUMS = {
    "heads first": ("bhid,bhjd->bhij", "bhij,bhjd->bhid"),
    "dots": ("...id,...jd->...ij", "...ij,...jd->...id"),
    "tokens first": ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    "keys and values before": ("bjhd,bihd->bhij", "bjhd,bhij->bihd"),
    "one head of keys": ("bhid,bjd->bhij", "bhij,bjd->bhid"),
    "groups": ("bghid,bgjd->bghij", "bghij,bgjd->bghid"),
}


class Einsums(nn.Module):
    """A layer of attention by ``einsum``, and a gate of its input that scales what it has read, as in AlphaFold."""

    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.spelled, (self.scores, self.read) = spelled, EINSUMS[spelled]
        self.q, self.v, self.gate, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.k = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 4)) for layer in (self.q, self.k, self.v))
        k, v = (k[:, :, 0], v[:, :, 0]) if self.spelled == "one head of keys" else (k, v)
        if "groups" in self.spelled:
            q, k, v = (
                q.unflatten(2, (2, 2)).permute(0, 2, 3, 1, 4),
                k[:, :, :2].transpose(1, 2),
                v[:, :, :2].transpose(1, 2),
            )
        elif self.spelled in ("heads first", "dots"):
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        elif self.spelled == "one head of keys":
            q = q.transpose(1, 2)
        two = (k, q) if self.scores.startswith("bjhd") else (q, k)
        weights = torch.einsum(self.scores, *two).softmax(-1)
        two = (v, weights) if self.read.startswith("bjhd") else (weights, v)
        read = torch.einsum(self.read, *two)
        if self.spelled not in ("tokens first", "keys and values before"):
            read = read.flatten(1, -3).transpose(1, 2)
        return x + self.out(read.flatten(2) * self.gate(x).sigmoid())


class OfEinsums(nn.Module):
    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(31, 16), nn.ModuleList([Einsums(spelled)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layers[0](self.embed(input_ids))


@pytest.mark.parametrize("spelled", EINSUMS)
def test_what_attention_by_einsum_reads_is_heads_and_no_neurons_behind_a_gate(spelled):
    model = OfEinsums(spelled).eval()
    with pytest.raises(MethodError, match="no neurons"):
        places(model, "neurons")
    if spelled == "groups":  # of which nobody knows the heads
        with pytest.raises(MethodError, match="no heads"):
            places(model, "heads")
        return
    assert places(model, "heads") == (Place(0, "layers.0.out", "input", "heads", 4, 4),)
    heads = 1 if spelled == "one head of keys" else 4
    columns = tuple(range(4)) if heads == 1 else None
    for kind, path, width, of in zip(KINDS[2:5], "qkv", (16, 4 * heads, 4 * heads), (4, heads, heads), strict=True):
        (found,) = places(model, kind)
        its = None if kind == "queries" else columns
        assert found == Place(0, f"layers.0.{path}", "output", kind, width, 1, its)
        assert found.heads == of


class KeysFirst(Einsums):
    """The same with the products of keys and queries, in this order, and a softmax over the keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = k @ q.mT
        weights = scores.softmax(dim=-2).mT if self.spelled == "softmax of columns" else scores.mT.softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("spelled", ["softmax of columns", "turned before"])
def test_keys_that_are_multiplied_first_are_keys(spelled, monkeypatch):
    monkeypatch.setitem(EINSUMS, spelled, ("", ""))
    model = OfEinsums(spelled)
    model.layers = nn.ModuleList([KeysFirst(spelled)])
    found = [places(model.eval(), kind)[0].path for kind in KINDS[2:5]]
    assert found == ["layers.0.q", "layers.0.k", "layers.0.v"]


class Normalised(nn.Module):
    """An RMSNorm, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Joined(Einsums):
    """The same by fused attention, a branch that joins the stream by one function of three, and a norm behind both."""

    def __init__(self, spelled: str) -> None:
        super().__init__("heads first")
        self.joins = spelled
        self.norm, self.first, self.second = Normalised(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        read = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = JOINS[self.joins](x, read)
        unit = nn.functional.normalize(self.norm(x), dim=-1)
        return x + self.second(self.first(unit * 4).relu())


JOINS = {
    "lerp": lambda x, read: torch.lerp(x, read, 0.3),
    "addcmul": lambda x, read: torch.addcmul(x, read, torch.full((16,), 0.3)),
    "maximum": torch.maximum,
    "a gate": lambda x, read: (gate := torch.sigmoid(x)) * read + (1 - gate) * x,
    "lerp by a gate": lambda x, read: torch.lerp(x, read, torch.sigmoid(read)),
}


@pytest.mark.parametrize("spelled", JOINS)
def test_a_branch_ends_where_it_meets_the_stream(spelled):
    model = OfEinsums("heads first")
    model.layers = nn.ModuleList([Joined(spelled)])
    (found,) = places(model.eval(), "attention")
    assert (found.path, found.behind) == ("layers.0.out", None)
    assert [each.path for each in places(model, "neurons")] == ["layers.0.second"]  # no features of unit length


class Scaled(nn.Module):
    """A layer whose output a sum or a diagonal of products scales."""

    def __init__(self, *given: object) -> None:
        super().__init__()
        self.given = given
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if self.given[0] == "list":
            return x + torch.einsum(a, [0, 1, 2], b, [0, 1, 2], [0, 1])[..., None]
        if self.given[0] == "btt->b":
            return x + torch.einsum("btt,btt->b", a[..., :5], b[..., :5])[:, None, None]
        return x + torch.einsum(self.given[0], a, b)


@pytest.mark.parametrize("spelled", ["bti,bti->", "bti,bti", "btt->b", "list"])
def test_sums_and_diagonals_by_einsum_are_no_attention(spelled):
    model = OfEinsums("dots")
    model.layers[0] = Scaled(spelled)
    with pytest.raises(MethodError, match="no heads were found"):
        places(model.eval(), "heads")


@pytest.mark.parametrize("kind", ["neurons", "mlp", "heads", "values"])
def test_units_are_not_left_out_where_a_layer_is_a_list_that_never_runs(kind):
    """As of Funnel, whose encoder's layers are in lists in a list, and its decoder's in one."""
    sizes = {"vocab_size": 31, "d_model": 16, "n_head": 4, "d_head": 4, "d_inner": 24, "block_sizes": [2, 1]}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("funnel", num_decoder_layers=1, **sizes)).eval()
    with pytest.raises(MethodError, match=r"inside funnel\.encoder\.blocks\.0"):
        places(model, kind)


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, as peft puts them."""

    def __init__(self, base_layer: nn.Module, wide: int, out: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(wide, 2, bias=False), nn.Linear(2, out, bias=False)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        return out + self.up(self.down(x.to(self.down.weight.dtype))) if self.on else out


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_what_an_adapter_reads_too_is_the_input_of_both(name, is_on):
    """Also where it is off when they are looked for: it may be on later."""
    plain, model = SAMPLES[name].build(), SAMPLES[name].build()
    named = [(place.path, place.width * place.size) for kind in ("neurons", "heads") for place in places(plain, kind)]
    adapters = []
    for path, wide in named:
        adapter = Adapted(model.get_submodule(path), wide, 16).double()
        model.set_submodule(path, adapter)
        adapters.append(adapter)
        matrix, delta = plain.get_submodule(path).weight.data, adapter.up.weight @ adapter.down.weight
        matrix += delta.T.data if name == "gpt2" else delta.data
    for adapter in adapters:
        adapter.on = is_on
    found = {kind: places(model, kind) for kind in KINDS[:2] + KINDS[5:]}
    for adapter in adapters:
        adapter.on = True
    batch = SAMPLES[name].batch()
    for kind, mine in found.items():
        assert mine == places(plain, kind)
        for place in mine:
            with lrpx.intervene(model, {place: {0: lrpx.Scale(3)}}), torch.no_grad():
                got = model(**batch).logits
            with lrpx.intervene(plain, {place: {0: lrpx.Scale(3)}}), torch.no_grad():
                torch.testing.assert_close(got, plain(**batch).logits)


class Summed(Adapted):
    """An adapter that sums every second number of what it is given (MiSS)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(x.reshape(*x.shape[:-1], -1, 2).sum(-2))


class Delta(Adapted):
    """An adapter whose product is multiplied first (LoKr)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + nn.functional.linear(x, self.up.weight @ self.down.weight)


@pytest.mark.parametrize("adapter", [Summed, Delta])
def test_an_adapter_may_read_units_in_whatever_way(adapter):
    """What is set is set for the adapter, too, whose share of the branch counts."""
    model = SAMPLES["llama"].build()
    expected = {kind: places(model, kind) for kind in KINDS[:2] + KINDS[5:]}
    for place in (*expected["neurons"], *expected["heads"]):
        inner = model.get_submodule(place.path)
        model.set_submodule(place.path, adapter(inner, place.width * place.size, 16).double())
    assert {kind: places(model, kind) for kind in expected} == expected


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize(("name", "which"), [("llama", "1.self_attn.q_proj"), ("gpt2", "1.attn.c_attn")])
def test_what_an_adapter_adds_to_queries_is_a_part_of_them(name, which, is_on):
    """Adapters on one layer alone leave no layer out."""
    model = SAMPLES[name].build()
    kinds = ("queries", "keys", "values")
    expected = {kind: places(model, kind) for kind in kinds}
    path = next(place.path for place in expected["queries"] if place.path.endswith(which))
    inner = model.get_submodule(path)
    adapter = Adapted(inner, 16, inner.weight.numel() // 16).double()
    adapter.on = is_on
    model.set_submodule(path, adapter)
    assert {kind: places(model, kind) for kind in kinds} == expected


class Beside(nn.Module):
    """A block whose low-rank adapter stands in its own forward pass, beside its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.first(x).relu()
        return x + self.second(latent) + self.up(self.down(latent))


def test_units_that_several_layers_read_and_no_module_is_given_are_refused():
    """What would be set at one of the layers would stay what it was at the other."""
    model = Own().eval()
    model.layers[0] = Beside()
    with pytest.raises(
        MethodError, match=r"Own computes its neurons inside layers\.0\.second, .*several layers read them"
    ):
        places(model, "neurons")


def test_a_stage_that_makes_them_wider_at_its_end_has_its_units():
    """Swin's first stage gives half as many tokens again as wide as those that its blocks compute with."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
    model = tiny.build(SwinForImageClassification, SwinConfig(**sizes))
    found = {kind: [(place.layer, place.path, place.width) for place in places(model, kind)] for kind in KINDS[:2]}
    block = "swin.encoder.layers.{}.blocks.0."
    assert found["neurons"] == [(i, block.format(i) + "mlp.fc2", width) for i, width in enumerate([32, 64])]
    assert found["heads"] == [(i, block.format(i) + "attention.o_proj", width) for i, width in enumerate([2, 4])]
    image = torch.randn(1, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    path = block.format(0) + "mlp.fc2"

    def hook(_, args):
        return (args[0].index_fill(-1, torch.tensor([5]), 3.0),)

    handle = model.get_submodule(path).register_forward_pre_hook(hook)
    wanted = model(image).logits
    handle.remove()
    with lrpx.intervene(model, {path: {5: 3.0}}):
        assert torch.equal(model(image).logits, wanted)


class OfOneLayer(torch.nn.Module):
    """A table of tokens, and a layer."""

    def __init__(self, layer):
        super().__init__()
        self.table, self.layers = torch.nn.Embedding(31, 16), torch.nn.ModuleList([layer])

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids):
        return self.layers[0](self.table(input_ids))


@pytest.mark.parametrize("turn", [lambda k: k.mT, lambda k: k.mH, lambda k: k.transpose(-1, -2)])
def test_queries_and_keys_are_seen_through_any_transpose(turn):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
            return x + self.o(((q @ turn(k)).softmax(-1) @ v).transpose(1, 2).flatten(-2))

    model = OfOneLayer(Block()).eval()
    for kind, path in (("queries", "layers.0.q"), ("keys", "layers.0.k"), ("values", "layers.0.v")):
        assert [(place.path, place.width, place.heads) for place in places(model, kind)] == [(path, 16, 4)]


ROTATED = {
    "halves": lambda a, b, cos, sin: torch.cat([a * cos + b * sin, a * -sin + b * cos], -1),
    "halves, each first": lambda a, b, cos, sin: torch.cat([a * cos - b * sin, b * cos + a * sin], -1),
    "pairs": lambda a, b, cos, sin: torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2),
}


@pytest.mark.parametrize("how", ROTATED)
def test_both_halves_of_what_is_rotated_are_queries_and_keys(how):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.o = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)

        def rotated(self, x):
            angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1])
            parts = (x[..., ::2], x[..., 1::2]) if how == "pairs" else x.chunk(2, -1)
            return ROTATED[how](*parts, angle.cos(), angle.sin())

        def forward(self, x):
            q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in self.qkv(x).split([16, 8, 8], -1))
            q, k, v = self.rotated(q), self.rotated(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            return x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))

    model = OfOneLayer(Block()).eval()
    for kind, columns, heads in (("queries", range(16), 4), ("keys", range(16, 24), 2), ("values", range(24, 32), 2)):
        (place,) = places(model, kind)
        assert (place.path, place.columns, place.heads) == ("layers.0.qkv", tuple(columns), heads)


class Gated(nn.Module):
    """A layer whose MLP is gated by a sigmoid, in one function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.glu(self.up(x)))


def test_what_a_glu_gives_are_neurons():
    model = OfEinsums("tokens first")
    model.layers = nn.ModuleList([Gated()])
    assert places(model.eval(), "neurons") == (Place(0, "layers.0.down", "input", "neurons", 24),)


@pytest.mark.parametrize("side", [64, 256])  # of 256 the map of the first stage is as wide as the second has features
def test_stages_that_give_maps_have_all_their_units(side: int) -> None:
    """SegFormer's stages give ``[B, d, H, W]``; each of its blocks has a second matrix and heads."""
    widths = [16, 64, 8, 32]
    config = SegformerConfig(
        depths=[1] * 4, hidden_sizes=widths, num_attention_heads=[1, 2, 2, 4], mlp_ratios=[2] * 4, num_labels=3
    )
    model = tiny.build(SegformerForImageClassification, config)
    picture = torch.linspace(-1, 1, 3 * side * side, dtype=torch.float64).reshape(1, 3, side, side)
    inputs = {"pixel_values": picture}
    found = {kind: places(model, kind, inputs) for kind in ("neurons", "mlp", "heads", "attention")}
    blocks = [f"segformer.stages.{i}.blocks.0" for i in range(4)]
    assert [(each.path, each.width) for each in found["neurons"]] == [
        (f"{block}.mlp.fc2", 2 * wide) for block, wide in zip(blocks, widths, strict=True)
    ]
    assert [(each.path, each.size) for each in found["mlp"]] == [
        (f"{block}.mlp.fc2", wide) for block, wide in zip(blocks, widths, strict=True)
    ]
    assert [each.width for each in found["heads"]] == [1, 2, 2, 4]
    assert len(found["attention"]) == 4
    with pytest.raises(MethodError, match="no layers were found"):  # a map has no vector for each place
        places(model, "residual", inputs)


class OfNorms(nn.Module):
    """A layer with gated attention and a gated MLP, each behind a norm, written in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.q, self.k, self.v, self.gate, self.o = (nn.Linear(16, 16) for _ in range(5))
        self.up, self.gate_up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.norms = nn.ModuleDict({"attention": OfOneNorm(how), "mlp": OfOneNorm(how)})

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        hides = torch.full((q.shape[2],) * 2, -torch.inf).triu(1)
        if self.how == "by head":
            scores = torch.stack([(q[:, i] @ k[:, i].mT).tanh() for i in range(4)], 1) + hides
        elif self.how == "complex":
            turned = torch.polar(torch.ones(2), torch.tensor([0.3, 0.7]))
            q, k = (
                torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * turned).flatten(-2) for x in (q, k)
            )
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2]) + hides
        else:
            scores = q @ k.mT + hides
        if self.how == "sigmoid":
            return scores.sigmoid()
        if self.how in ("written out", "complex"):
            each = torch.exp(scores - scores.amax(-1, keepdim=True))
            return each / each.sum(-1, keepdim=True)
        if self.how == "sink":
            return scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        read = (self.weights(q, k) @ v).transpose(1, 2).flatten(-2)
        x = x + self.normed("attention", self.o(read * self.gate(x).sigmoid()))
        up, gate = self.up(x), nn.functional.silu(self.gate_up(x))
        both = torch.einsum("...n,...n->...n", up, gate) if self.how == "einsum" else up * gate
        return x + self.normed("mlp", self.down(both))

    def normed(self, name: str, x: Tensor) -> Tensor:
        norm = self.norms[name]
        return nn.functional.layer_norm(x, (16,), norm.weight, norm.bias) if self.how == "in the layer" else norm(x)


class OfOneNorm(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight, self.bias = how, nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "norm":
            apart = x - x.mean(-1, keepdim=True)
            return self.weight * apart / torch.sqrt((apart**2).mean(-1, keepdim=True) + 1e-5) + self.bias
        if self.how == "norm by einsum":
            spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            return torch.einsum("...d,d->...d", (x - mean) * (spread + 1e-5).rsqrt(), self.weight) + self.bias
        return nn.functional.layer_norm(x, (16,), self.weight, self.bias)


OF_NORMS = ["sigmoid", "written out", "complex", "sink", "by head", "einsum", "norm", "norm by einsum", "frozen"]


@pytest.mark.parametrize("how", OF_NORMS)
def test_units_are_found_however_a_layer_is_written(how: str) -> None:
    """What a gate lets through of attention that was not known were neurons, and the MLP's own were left out; a branch
    was read before the norm behind it."""
    usual, written = (nn.Module() for _ in range(2))
    for model, each in ((usual, "plain"), (written, how)):
        model.layers = nn.ModuleList([OfNorms(each), OfNorms(each)])
        model.eval().requires_grad_(how != "frozen")
        model.forward = lambda x, layers=model.layers: layers[1](layers[0](x))
    given = {"x": torch.randn(1, 5, 16)}
    for kind in ("neurons", "heads", "attention", "mlp"):
        expected, found = (places(model, kind, given) for model in (usual, written))
        assert found == expected
        assert all(place.behind is not None for place in found) or kind in ("neurons", "heads")
    for kind, counts in (("queries", 4), ("keys", 4)):
        if how != "complex":
            assert [(place.path, place.width, place.heads) for place in places(written, kind, given)] == [
                (f"layers.{i}.{kind[0]}", 16, counts) for i in (0, 1)
            ]


class OfTwoMaps(nn.Module):
    """Attention whose scores, or weights, are a sum of several."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = q.chunk(2, -1), k.chunk(2, -1)
        if self.how == "apart":  # as DeepSeek's, one part of which is rotated
            return (sum(a @ b.mT for a, b in zip(queries, keys, strict=True))).softmax(-1) @ v
        if self.how == "by einsum":
            scores = [torch.einsum("bhqd,bhkd->bhqk", a, b) for a, b in zip(queries, keys, strict=True)]
            return (scores[0] + scores[1]).softmax(-1) @ v
        if self.how == "baddbmm":
            (a, b), (c, d) = ([x.flatten(0, 1) for x in each] for each in (queries, keys))
            scores = torch.baddbmm(a @ c.mT, b, d.mT)
            return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, q.shape[:2])
        if self.how == "by head":
            each = [sum(a[:, i] @ b[:, i].mT for a, b in zip(queries, keys, strict=True)) for i in range(4)]
            return torch.stack(each, 1).softmax(-1) @ v
        one, other = ((a @ b.mT).softmax(-1) for a, b in zip(queries, keys, strict=True))
        return (torch.lerp(one, other, 0.3) if self.how == "lerp" else one - 0.3 * other) @ v  # differential

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.o(self.read(q, k, v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("how", ["apart", "by einsum", "baddbmm", "by head", "differential", "lerp"])
def test_what_several_scores_are_made_of_are_all_queries_and_keys(how: str) -> None:
    """Half of them were, and the others had no place."""
    model = nn.Module()
    model.layers = nn.ModuleList([OfTwoMaps(how)])
    model.forward = lambda x, layers=model.layers: layers[0](x)
    for kind in ("queries", "keys", "values"):
        (found,) = places(model.eval(), kind, {"x": torch.randn(1, 5, 16)})
        assert (found.path, found.width, found.columns) == (f"layers.0.{kind[0]}", 16, None)
        assert found.heads == (4 if kind == "values" else 0)  # the parts do not stand beside one another


class MixedOrInWindows(nn.Module):
    """Attention whose heads are mixed by layers before they meet the values, as CaiT's, or in windows that stand behind
    them, as Hiera's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.how == "mixed":
            scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return x + self.o((weights @ v).transpose(1, 2).flatten(-2))
        if self.how == "plain":
            return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        windows = 3 if self.how == "in windows" else 1
        each = (a.unflatten(2, (windows, -1)) for a in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*each).transpose(1, 3)  # [B, T / windows, windows, H, d]
        return x + self.o(out.reshape(x.shape))


@pytest.mark.parametrize("how", ["mixed", "in one window", "in windows"])
def test_heads_beside_those_of_another_layer_are_found_or_refused(how: str) -> None:
    """They were left out of a ranking of the others, as if these were all."""
    model = nn.Module()
    model.layers = nn.ModuleList([MixedOrInWindows(how), MixedOrInWindows("plain")])
    model.forward = lambda x, layers=model.layers: layers[1](layers[0](x))
    given = {"x": torch.randn(1, 6, 16)}
    if how == "in windows":
        with pytest.raises(MethodError, match=r"the heads that layers\.0\.o .* do not stand side by side"):
            places(model.eval(), "heads", given)
        return
    found = places(model.eval(), "heads", given)
    assert [(each.path, each.width, each.size) for each in found] == [("layers.0.o", 4, 4), ("layers.1.o", 4, 4)]
    for kind in ("queries", "keys", "values"):
        assert [each.path for each in places(model, kind, given)] == [f"layers.{i}.{kind[0]}" for i in range(2)]


class Picked(nn.Module):
    """Queries, keys and values of one matrix, whose features are put into another order by their numbers."""

    def __init__(self, pick: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pick, self.order = pick, torch.arange(48).unflatten(0, (16, 3)).T.flatten()  # one of each after another
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x)
        if self.pick == "index_select":
            made = made.index_select(-1, self.order)
        else:
            made = getattr(torch, self.pick)(made, dim=-1, **{PICKED_BY[self.pick]: self.order.expand(made.shape)})
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in made.chunk(3, -1))
        return x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2))


PICKED_BY = {"gather": "index", "take_along_dim": "indices"}


@pytest.mark.parametrize("pick", ["index_select", *PICKED_BY])
def test_features_that_are_picked_by_their_numbers_are_those_that_were_picked(pick: str) -> None:
    """They were taken for those that had stood there, and a third of the queries for keys and values."""
    model = nn.Module()
    model.layers = nn.ModuleList([Picked(pick)])
    model.forward = lambda x, layers=model.layers: layers[0](x)
    for first, kind in enumerate(("queries", "keys", "values")):
        (found,) = places(model.eval(), kind, {"x": torch.randn(1, 5, 16)})
        assert (found.columns, found.heads) == (tuple(range(first, 48, 3)), 4)


class WithNorms(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layers = nn.ModuleList([OfNorms(how), OfNorms(how)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_a_norm_behind_a_branch_that_no_module_gives(kind: str) -> None:
    """Before it the plain gradient has a branch sum to nothing; under a rule that holds its deviation constant the
    branch has what it has behind it, but for the norm's bias."""
    usual, inside = (WithNorms(how).double().eval() for how in ("plain", "in the layer"))
    for norm in (norm for layer in (*usual.layers, *inside.layers) for norm in layer.norms.values()):
        norm.bias.data.zero_()
    ids = [3, 5, 7, 1]
    ranks = []
    for model in (usual, inside):
        found = lrpx.Explainer(model, task=lrpx.Task.CAUSAL).neurons(ids, 2, kind=kind, top=99)
        ranks.append({(unit.layer, unit.position): unit.relevance for unit in found})
    assert ranks[0].keys() == ranks[1].keys()
    assert all(abs(ranks[0][at] - ranks[1][at]) < 1e-12 for at in ranks[0])
    explain = lrpx.Explainer(usual, task=lrpx.Task.CAUSAL)
    assert max(abs(unit.relevance) for unit in explain.neurons(ids, 2, kind=kind, method="gradient-x-input")) > 1e-3
    with pytest.raises(MethodError, match=r"goes through a norm that no module is, before which its plain gradient"):
        lrpx.Explainer(inside, task=lrpx.Task.CAUSAL).neurons(ids, 2, kind=kind, method="gradient-x-input")


class WithFirstValues(nn.Module):
    """A layer whose values are mixed with those of the first one."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.share = share

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        first = v if first is None else first
        given = (1 - self.share) * v + self.share * first if self.share else v
        read = ((q @ k.mT / 2).softmax(-1) @ given).transpose(1, 2)
        return x + self.o(read.flatten(2)), first


class OfLayers(nn.Module):
    """A language model of layers, one after another."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList(layers)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class OfGates(nn.Module):
    """A layer whose MLP is multiplied by a gate, in a module that gives the product, or in the layer."""

    def __init__(self, wide: int, *, is_module: bool) -> None:
        super().__init__()
        self.norm, self.branch, self.is_module = nn.LayerNorm(16), OfGate(wide), is_module

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.is_module:
            return x + self.branch(h)  # type: ignore[no-any-return]
        return x + torch.sigmoid(self.branch.gate(h)) * self.branch.mlp(h)


class OfGate(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.gate = nn.Linear(16, wide)

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(h)) * self.mlp(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wide", [1, 16])
def test_a_branch_ends_behind_what_gates_it(wide: int) -> None:
    """As of RWKV's channels, and of soft mixtures of experts: half of what the branch gives was told as all of it."""
    torch.manual_seed(0)
    usual, inside = (
        OfLayers(OfGates(wide, is_module=each) for _ in range(2)).double().eval() for each in (True, False)
    )
    inside.load_state_dict(usual.state_dict())
    ids = [3, 5, 7, 1]
    with propagate(usual, ATTNLRP) as trace:
        logits = usual(torch.tensor([ids]))
    trace.explain(logits[0, -1, 2])
    wanted = [trace.relevance(f"layers.{i}.branch")[0].sum(-1) for i in range(2)]
    assert abs(wanted[1][-1]) > 1e-3
    found = lrpx.Explainer(usual, task=lrpx.Task.CAUSAL).flow(ids, 2)["mlp"]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=1e-12)
    explain = lrpx.Explainer(inside, task=lrpx.Task.CAUSAL)
    with pytest.raises(
        MethodError, match=r"layers\.0\.branch\.mlp\.2 gives is multiplied by what depends on the input"
    ):
        explain.neurons(ids, 2, kind="mlp")
    for method in ("lrp", "gradient-x-input"):  # which give the gate nothing, or change nothing
        two = (
            lrpx.Explainer(each, task=lrpx.Task.CAUSAL).neurons(ids, 2, kind="mlp", method=method)
            for each in (usual, inside)
        )
        ranks = [{(unit.layer, unit.position): unit.relevance for unit in each} for each in two]
        assert all(abs(ranks[0][at] - ranks[1][at]) < 1e-12 for at in ranks[0])


class Mixed(nn.Module):
    """A layer that mixes two MLPs, or one and the stream, by what a router gives."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.router = how, nn.LayerNorm(16), nn.Linear(16, 2)
        self.gate = nn.Linear(16, 16)
        self.experts = nn.ModuleList(OfGate(1).mlp for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shares, made = self.router(h).softmax(-1), [expert(h) for expert in self.experts]
        if self.how == "sum":
            return x + shares[..., :1] * made[0] + shares[..., 1:] * made[1]
        if self.how == "stack":
            return x + (shares[..., None] * torch.stack(made, -2)).sum(-2)
        if self.how == "einsum":
            return x + torch.einsum("bte,betd->btd", shares, torch.stack(made, 1))
        if self.how == "half of a stack":
            return x + (shares[..., None] * (0.5 * torch.stack(made, -2))).sum(-2)
        if self.how == "with the stream":
            return (shares[..., None] * torch.stack([made[0], x], -2)).sum(-2) + made[1]
        if self.how == "together":
            return x + shares[..., :1] * (made[0] + made[1] + 0.1)
        if self.how == "several of one":
            return x + made[1] + (shares[..., None] * made[0][..., None, :]).sum(-2)
        if self.how == "view":
            return x + made[1] + (shares[..., :1] * made[0]).view(*x.shape[:2], 4, 4).flatten(2)
        if self.how == "groups":
            grouped = made[0].unflatten(-1, (2, 8)) * shares[..., None]
            return x + made[1] + grouped.flatten(2)
        if self.how == "quotient":
            return x + made[1] + made[0] / (1 + torch.exp(-shares[..., :1]))
        if self.how == "glu":
            return x + made[1] + nn.functional.glu(torch.cat([made[0], self.gate(h)], -1))
        if self.how == "a half":
            return x + made[1] + torch.cat([shares[..., :1] * made[0][..., :8], made[0][..., 8:]], -1)
        if self.how == "where":
            return x + made[1] + torch.where(shares[..., :1] > 0.5, made[0] * shares[..., :1], made[0])
        gate = torch.sigmoid(shares[..., :1].expand(x.shape))
        if self.how == "highway":
            return gate * made[0] + (1 - gate) * x + made[1]
        if self.how == "lerp":
            return torch.lerp(x, made[0], gate) + made[1]
        return torch.addcmul(x, made[0], gate) + made[1]


MIXES = ["sum", "stack", "einsum", "highway", "lerp", "addcmul", "half of a stack", "with the stream", "together"]
MIXES += ["several of one", "view", "groups", "quotient", "glu", "a half", "where"]


@pytest.mark.parametrize("how", MIXES)
def test_branches_that_a_layer_mixes_itself_are_refused_where_a_share_is_the_routers(how: str) -> None:
    torch.manual_seed(0)
    explain = lrpx.Explainer(OfLayers(Mixed(how) for _ in range(2)).eval(), task=lrpx.Task.CAUSAL)
    with pytest.raises(MethodError, match="is multiplied by what depends on the input"):
        explain.neurons([3, 5, 7], 2, kind="mlp")
    assert len(explain.neurons([3, 5, 7], 2, kind="mlp", method="lrp", top=99)) == 12


class Behind(nn.Module):
    """A layer whose MLP goes through a norm, and then through a gate or another norm."""

    def __init__(self, then: str) -> None:
        super().__init__()
        self.norm, self.after, self.branch = nn.LayerNorm(16), nn.LayerNorm(16), OfGate(1)
        self.second = {"norm": nn.RMSNorm(16), "gate": Times()}.get(then)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        made, gate = self.after(self.branch.mlp(h)), torch.sigmoid(self.branch.gate(h))
        if self.second is None:
            made = made * gate
        else:
            made = self.second(made, gate) if isinstance(self.second, Times) else self.second(made)
        return x + made  # type: ignore[no-any-return]


class Times(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


@pytest.mark.parametrize("then", ["norm", "gate", "in the layer"])
def test_a_branch_ends_behind_the_last_of_what_it_goes_through(then: str) -> None:
    """It ended behind the first norm: before a second the plain gradient sums to nothing, before a gate half is its."""
    torch.manual_seed(0)
    model = OfLayers(Behind(then) for _ in range(2)).double().eval()
    ids = [3, 5, 7, 1]
    explain = lrpx.Explainer(model, task=lrpx.Task.CAUSAL)
    if then == "in the layer":
        with pytest.raises(MethodError, match="is multiplied by what depends on the input"):
            explain.neurons(ids, 2, kind="mlp")
        return
    for name, recipe in (("attnlrp", ATTNLRP), ("gradient-x-input", GRADIENT)):
        with propagate(model, recipe) as trace:
            logits = model(torch.tensor([ids]))
        trace.explain(logits[0, -1, 2])
        wanted = torch.stack([trace.relevance(f"layers.{i}.second")[0].sum(-1) for i in range(2)])
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(explain.flow(ids, 2, method=name)["mlp"], wanted, rtol=0, atol=1e-12)


class Together(nn.Module):
    """A layer whose branches are added to each other, and perhaps normed, or made smaller; or to the stream by lerp."""

    def __init__(self, then: str) -> None:
        super().__init__()
        self.then, self.norm, self.branches = then, nn.LayerNorm(16), nn.ModuleList(OfGate(1).mlp for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.then == "lerp":
            return torch.lerp(torch.lerp(x, self.branches[0](h), 0.3), self.branches[1](h), 0.3)
        made = self.branches[0](h) + self.branches[1](h)
        if self.then == "smaller":
            made = (made + 0.1).transpose(1, 2).transpose(1, 2) / 2
        if self.then == "normed":
            made = made * torch.rsqrt(made.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + made  # type: ignore[no-any-return]


@pytest.mark.parametrize("then", ["smaller", "normed", "lerp"])
def test_branches_that_are_added_to_each_other_are_told_where_nothing_gates_them(then: str) -> None:
    torch.manual_seed(0)
    explain = lrpx.Explainer(OfLayers(Together(then) for _ in range(2)).double().eval(), task=lrpx.Task.CAUSAL)
    assert len(explain.neurons([3, 5, 7], 2, kind="mlp", top=99)) == 12
    if then == "normed":
        with pytest.raises(MethodError, match="goes through a norm that no module is"):
            explain.neurons([3, 5, 7], 2, kind="mlp", method="gradient-x-input")
    else:
        assert len(explain.neurons([3, 5, 7], 2, kind="mlp", method="gradient-x-input", top=99)) == 12


class OfFirstValues(OfLayers):
    def __init__(self, share: float) -> None:
        super().__init__(WithFirstValues(share) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x, first = self.table(input_ids), None
        for layer in self.layers:
            x, first = layer(x, first)
        return self.head(x)


def test_values_of_some_layers_alone_are_refused() -> None:
    """Those that are added to the first layer's are no linear layer's; only the first layer's were ranked, as all."""
    plain = places(OfFirstValues(0.0).eval(), "values")
    assert [place.path for place in plain] == ["layers.0.v", "layers.1.v"]
    model = OfFirstValues(0.5).eval()
    assert len(places(model, "heads")) == len(places(model, "queries")) == 2
    with pytest.raises(MethodError, match=r"the values of the attention in layers\.1 of OfFirstValues are not"):
        places(model, "values")


class WithHeads(nn.Module):
    """A layer that hands its heads on side by side, or their features one after another; or looks at them first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.gate, self.how = nn.Linear(4, 1), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.how == "gated":
            read = read * self.gate(read).sigmoid()
        order = {"turned": (0, 2, 3, 1)}.get(self.how, (0, 2, 1, 3))
        return x + self.o(read.permute(order).flatten(2))


class OfHeads(OfLayers):
    def __init__(self, *how: str) -> None:
        super().__init__(map(WithHeads, how))


def test_a_model_that_fails_on_a_few_tokens_is_refused_by_name() -> None:
    """By whatever error, as Sam2's with windows of no places."""
    model = OfHeads("plain")
    model.layers[0].forward = lambda x: x * (1 // (x.shape[1] - 5))
    with pytest.raises(ModelError, match=r"OfHeads cannot be run to find its units \(integer .* by zero"):
        places(model.eval(), "heads")


def test_heads_of_some_layers_alone_are_refused() -> None:
    """Where their features are not side by side they are no units; the other layers' alone were ranked, as all."""
    for how in ("plain", "gated"):
        found = places(OfHeads("plain", how).eval(), "heads")
        assert [place.path for place in found] == ["layers.0.o", "layers.1.o"]
    model = OfHeads("plain", "turned").eval()
    assert len(places(model, "queries")) == 2
    for kind in ("heads", "attention"):
        with pytest.raises(MethodError, match=r"the heads that layers\.1\.o of OfHeads makes or is given do not"):
            places(model, kind)


LOSES: dict[str, Any] = {
    "einsum": lambda x, o, f: torch.einsum("bthd,ohd->bto", f.unflatten(-1, (4, 4)), o.weight.unflatten(-1, (4, 4))),
    "convolution": lambda x, o, f: nn.functional.conv1d(f.mT, o.weight[..., None]).mT,
    "mean of the heads": lambda x, o, f: f.unflatten(-1, (4, 4)).mean(2).repeat(1, 1, 4),
    "the stream beside": lambda x, o, f: o(f + x),
    "gelu": lambda x, o, f: o(nn.functional.gelu(f)),
    "no matrix": lambda x, o, f: f,
    "rounded": lambda x, o, f: o((8 * f).round() / 8),
    "among other features": lambda x, o, f: nn.functional.linear(torch.cat([f, x], -1), torch.cat([o.weight] * 2, 1)),
    "narrow": lambda x, o, f: o(nn.functional.pad(nn.functional.linear(f, o.weight[:8]).relu(), (0, 8))),
}


class Loses(WithHeads):
    """A layer that does something else with its heads than to give them to a matrix side by side."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.how == "elementwise":
            weights = (q @ k.mT).softmax(-1)
            return x + self.o((weights[..., None] * v[:, :, None]).sum(-2).transpose(1, 2).flatten(2))
        read = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + LOSES[self.how](x, self.o, read.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", [*LOSES, "elementwise"])
def test_heads_of_a_layer_that_does_something_else_with_them_are_refused(how: str) -> None:
    """None of them is a unit; those of the other layer were ranked as if they were all."""
    model = OfHeads("plain")
    model.layers.append(Loses(how))
    for kind in ("heads", "attention"):
        with pytest.raises(MethodError, match=r"the heads that layers\.1(\.o)? of OfHeads makes or is given do not"):
            places(model.eval(), kind)
    if how == "elementwise":
        for kind in READS:
            with pytest.raises(MethodError, match=rf"the {kind} of the attention in layers\.1 of OfHeads are not"):
                places(model, kind)


class LowRank(nn.Module):
    """An MLP that is gated by a few numbers, before or after; or that gates itself, or is one of two branches."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.first, self.second = (
            nn.Linear(*each) for each in ((16, 24), (24, 16), (16, 4), (4, 16))
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        low = self.second(nn.functional.silu(self.first(x)))
        given = x * low.sigmoid() if self.how == "before" else x
        out = self.down(nn.functional.gelu(self.up(given)))
        out = {"after": lambda: low.sigmoid() * out, "own": lambda: out * out.sigmoid() + low}.get(
            self.how, lambda: out
        )()
        return x + out + (low if self.how == "branch" else 0)


@pytest.mark.parametrize("how", ["after", "before", "own", "branch"])
def test_what_gives_the_scores_of_a_gate_is_no_branch(how: str) -> None:
    """Its few numbers were ranked as neurons, and what it gives as an MLP's share of the stream."""
    model = OfHeads()
    model.layers = nn.ModuleList([LowRank(how)]).eval()
    wanted = ["layers.0.down"] + ["layers.0.second"] * (how in ("own", "branch"))
    for kind in ("neurons", "mlp"):
        assert sorted(place.path for place in places(model.eval(), kind)) == wanted


class WithHidden(WithHeads):
    """An attention, which may end in a non-linearity before its matrix, and an MLP of three matrices."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.first, self.second, self.third = nn.Linear(16, 12), nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        read = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o(nn.functional.gelu(read) if self.how == "activated" else read)
        hidden = self.second(nn.functional.gelu(self.first(x)))
        met = hidden if self.how == "met" else 0
        return x + self.third(nn.functional.gelu(hidden)) + met  # type: ignore[no-any-return]


class FromActivated(OfLayers):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = nn.functional.gelu(self.table(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["plain", "activated", "met"])
def test_what_is_activated_again_is_no_branch(how: str) -> None:
    """What the second of an MLP's three matrices gives was told as a second MLP's share of the stream, and counted
    twice in a flow; heads were told as neurons where a non-linearity stands before their matrix."""
    model = OfLayers([WithHidden(how)]).eval()
    both = ["layers.0.second", "layers.0.third"]
    assert [place.path for place in places(model, "neurons")] == both
    assert [place.path for place in places(model, "mlp")] == (both if how == "met" else both[1:])
    if how == "activated":
        with pytest.raises(MethodError, match="heads"):
            places(model, "heads")
    else:
        assert [place.path for place in places(model, "heads")] == ["layers.0.o"]


def test_a_stream_that_begins_in_a_non_linearity_is_no_neurons() -> None:
    """What the first attention is given was told as neurons, and what it gives as an MLP's share of the stream."""
    model = FromActivated(Branches(16, 24) for _ in range(2)).eval()
    for kind in ("neurons", "mlp"):
        assert [place.path for place in places(model, kind)] == ["layers.0.down", "layers.1.down"]
    for kind in ("queries", "keys", "values"):
        assert len(places(model, kind)) == 2


HIDES: dict[str, Any] = {
    "gelu": lambda a, b: nn.functional.gelu(a),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > 0, a, 0.0),
    "product": lambda a, b: a * b,
}


class Hides(nn.Module):
    """An MLP whose non-linearity may be none that makes neurons."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.how = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16), how

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(HIDES[self.how](self.up(x), self.gate(x)))


@pytest.mark.parametrize("how", HIDES)
def test_neurons_of_a_layer_that_hides_them_are_refused(how: str) -> None:
    """Those of the other layer were ranked as if they were all."""
    model = OfHeads()
    model.layers = nn.ModuleList([Hides("gelu"), Hides(how)]).eval()
    for kind in ("neurons", "mlp"):
        if how == "gelu":
            assert len(places(model.eval(), kind)) == 2
            continue
        with pytest.raises(MethodError, match=r"layers\.1\.down of OfHeads is not seen to have .* are not all"):
            places(model.eval(), kind)


@pytest.mark.parametrize("is_held", [False, True])
def test_queries_that_the_scores_do_not_tell_are_refused(is_held: bool) -> None:
    """Of a layer whose scores are no matrix product; those of the other were ranked as if they were all, where its
    modules have other names."""
    model, other = OfHeads("plain"), Otherwise("scores by elements")
    model.layers.append(nn.Sequential(other) if is_held else other)
    assert len(places(model.eval(), "heads")) == len(places(model, "values")) == 2
    for kind in READS[:2]:
        with pytest.raises(MethodError, match=rf"the {kind} of the attention in layers\.1.* of OfHeads are not seen"):
            places(model, kind)


class Otherwise(WithHeads):
    """Attention that is the difference of two, or is written in another order."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.how == "difference":
            read = (q @ k.mT).softmax(-1) @ v - (k @ q.mT).softmax(-1) @ v / 2
        elif self.how == "features first":
            read = (v.mT @ (q @ k.mT).softmax(-1).mT).mT * nn.functional.silu(q)
        elif self.how == "scores by elements":
            read = (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1) @ v
        else:  # keys first
            read = (v.mT @ (k @ q.mT).softmax(-2)).mT
        return x + self.o(read.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", ["difference", "features first", "keys first"])
def test_heads_however_they_read(how: str) -> None:
    """Each is what its own values make of it, and no neuron."""
    model = OfHeads("plain")
    model.layers.append(Otherwise(how))
    found = places(model.eval(), "heads")
    assert found[1] == Place(1, "layers.1.o", "input", "heads", 4, 4)
    for kind in READS:
        assert {place.layer for place in places(model, kind)} == {0, 1}
    with pytest.raises(MethodError, match="no neurons"):
        places(model, "neurons")
    before = entered(model, "layers.1.o")
    with torch.no_grad():
        model.layers[1].v.weight[8:12] += 1  # the values of head 2
    changed = (entered(model, "layers.1.o") != before).any(0).any(0)
    assert [int(i) for i in changed.nonzero()] == [*found[1].features(2)]


class ScalesFirst(nn.Linear):
    """A linear layer whose matrix takes what it is given at another scale, as SmoothQuant's does."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x / 2, 2 * self.weight, self.bias)


class WrittenOut(nn.Linear):
    """A linear layer that is the sum of a matrix product and a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


@pytest.mark.parametrize(("name", "made", "kinds"), [
    ("o", ScalesFirst, ("heads", "attention")), ("v", WrittenOut, ("values",)),
])  # fmt: skip
def test_units_that_some_layers_alone_have_at_a_module_are_refused(name: str, made: Any, kinds: Any) -> None:
    """Those of the last layer no module takes or gives; the others' were ranked, as all."""
    for kind in kinds:
        assert len(places(OfHeads("plain", "plain").eval(), kind)) == 2
        model = OfHeads("plain", "plain").eval()
        setattr(model.layers[1], name, made(16, 16))
        with pytest.raises(MethodError, match=rf"layers\.1\.{name} of OfHeads .* of the other layers are not all"):
            places(model, kind)


class InOne(nn.Module):
    """A layer with an attention whose output matrix is a weight, or torch's own, beside an MLP."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(16, 4, batch_first=True) if how == "torch" else WithHeads(how)
        self.across = nn.MultiheadAttention(16, 4, batch_first=True) if how == "both" else None
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.att(x, x, x)[0] if isinstance(self.att, nn.MultiheadAttention) else self.att(x))
        x = x if self.across is None else x + self.across(x, x, x)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize(("how", "path"), [
    (("plain", "torch"), r"layers\.1\.att"), (("torch", "plain"), r"layers\.0\.att"),
    (("both", "both"), r"layers\.0\.across"),
])  # fmt: skip
def test_heads_that_one_module_has_in_it_are_refused_beside_others(how: Any, path: str) -> None:
    """Also of the last layer with neurons, and in layers that have heads of another attention."""
    model = OfHeads()
    model.layers = nn.ModuleList(InOne(each) for each in how)
    assert len(places(model.eval(), "neurons")) == 2
    for kind in ("heads", "attention"):
        with pytest.raises(MethodError, match=rf"the heads that {path} of OfHeads .* of the other layers are not all"):
            places(model, kind)


class Core(nn.Module):
    """Attention without weights of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class WithCore(nn.Module):
    """An attention whose heads a module in it computes."""

    def __init__(self, o: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.core, self.o = Core(), o

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.core(self.q(x), self.k(x), self.v(x)))


def test_heads_of_a_core_beside_their_matrix_are_refused_beside_others() -> None:
    """In a layer with two attentions, of which the matrix of the second takes its heads at another scale."""
    model = OfHeads()
    model.layers = nn.ModuleList(
        nn.Sequential(WithCore(nn.Linear(16, 16)), WithCore(ScalesFirst(16, 16))) for _ in range(2)
    )
    assert len(places(model.eval(), "queries")) == 4
    for kind in ("heads", "attention"):
        with pytest.raises(MethodError, match=r"the heads that layers\.0\.1\.o of OfHeads .* the other layers are not"):
            places(model, kind)


class InGroups(nn.Module):
    """Grouped-query attention by einsum in a layer of its own, whose output matrix is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2, 4))
        k, v = self.kv(x).unflatten(-1, (2, 8)).chunk(2, -1)
        weights = torch.einsum("bqgrd,bkgd->bgrqk", q, k).softmax(-1)
        x = x + torch.einsum("bgrqk,bkgd->bqgrd", weights, v).flatten(2) @ self.o
        return x + self.down(nn.functional.gelu(self.up(x)))


def test_neurons_beside_heads_that_cannot_be_told_apart() -> None:
    """Whose attention has no name; finding any units ended in a KeyError."""
    model = OfHeads()
    model.layers = nn.ModuleList(InGroups() for _ in range(2))
    assert [place.path for place in places(model.eval(), "neurons")] == ["layers.0.down", "layers.1.down"]
    with pytest.raises(MethodError, match=r"computes its heads inside layers\.0"):
        places(model, "heads")


@pytest.mark.parametrize(("mapping", "kind", "path"), [
    ("image-classification", "cvt", r"stages\.2\.layers\.0\.attention"),
    ("image-classification", "mobilevit", r"encoder\.layer\.3\.transformer\.layer\.0\.attention"),
    ("seq2seq-lm", "pegasus_x", r"encoder\.layers\.0\.self_attn"),
    ("seq2seq-lm", "prophetnet", r"decoder\.layers\.0\.self_attn"),
])  # fmt: skip
def test_heads_of_some_layers_alone_are_refused_in_transformers(mapping: str, kind: str, path: str) -> None:
    """The last stage's, the encoder's or the decoder's were left out of what was ranked as all."""
    (chosen,) = choose([kind], mapping)
    model = tiny_model(chosen).eval()
    for units in ("heads", "attention"):
        with pytest.raises(MethodError, match=rf"the heads that .*{path}.* are not all"):
            places(model, units, tiny_inputs(chosen, model))  # type: ignore[arg-type]


@dataclass
class Streams:
    """What a layer gives, as people write it."""

    x: Tensor
    y: Tensor


class Gives(WithHeads):
    """A layer with an MLP, that gives its stream, or no tensor, but something that holds it."""

    def __init__(self, how: str) -> None:
        super().__init__("plain")
        self.up, self.down, self.gives = nn.Linear(16, 24), nn.Linear(24, 16), how

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return {"tensor": x, "object": Streams(x, x), "pairs": ((x, x), (x, x))}[self.gives]


class OfGiven(OfLayers):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
            x = x.x if isinstance(x, Streams) else x[0][0] if isinstance(x, tuple) else x
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["object", "pairs"])
def test_units_of_a_layer_that_gives_no_tensor_are_refused_beside_others(how: str) -> None:
    """Those of the other layers alone were told, as all."""
    model = OfGiven([Gives(how), Gives("tensor")]).eval()
    assert len(places(OfGiven([Gives("tensor"), Gives("tensor")]).eval(), "neurons")) == 2
    for kind in KINDS:
        with pytest.raises(MethodError, match=r"layers\.0\."):
            places(model, kind)
    (dino,) = choose(["grounding-dino"], "zero-shot-object-detection")
    model = tiny_model(dino).eval()
    for kind in KINDS:
        with pytest.raises(MethodError, match=r"encoder\.layers\.0\.|encoder_attn_text"):
            places(model, kind, tiny_inputs(dino, model))


def test_what_hangs_on_no_input_is_not_missed() -> None:
    """The first attention of a decoder whose queries are learned; and lists of matrices, which are no layers."""
    (detr,) = choose(["table-transformer"], "object-detection")
    model = tiny_model(detr).eval()
    for kind, count in (("heads", 5), ("queries", 4), ("neurons", 6), ("residual", 6)):
        assert len(places(model, kind, tiny_inputs(detr, model))) == count  # type: ignore[arg-type]
    with pytest.raises(MethodError, match=r"decoder\.layers\.0\.encoder_attn\.k_proj .* is not seen to have keys"):
        places(model, "keys", tiny_inputs(detr, model))  # which the learned queries read


def test_queries_of_some_layers_alone_are_refused() -> None:
    """Llama 4 turns queries and keys as complex numbers in some of its layers, and only the others' are seen."""
    (llama4,) = choose(["llama4_text"], "causal-lm")
    with pytest.raises(MethodError, match=r"the queries of the attention in model\.layers\.0\.self_attn of Llama4"):
        places(tiny_model(llama4), "queries")
    (kimi,) = choose(["kimi_linear"], "causal-lm")  # some of whose layers have no softmax
    with pytest.raises(MethodError, match=r"model\.layers\.0\.self_attn\.q_proj of .* is not seen to have queries"):
        places(tiny_model(kimi), "queries")
    (long,) = choose(["longt5"], "seq2seq-lm")  # whose encoder lays them out in blocks
    for kind in READS:
        with pytest.raises(MethodError, match=rf"the {kind} of the attention in encoder\.block\.0.* are not seen"):
            places(tiny_model(long), kind)


@pytest.mark.parametrize("kind", ["gpt_oss", "mimo_v2_flash"])
def test_scores_beside_a_learned_sink_are_made_of_queries_and_keys(kind: str) -> None:
    """None were found in one whose layers all have sinks; those of layers that have some were missed."""
    (model_class,) = choose([kind], "causal-lm")
    model = tiny_model(model_class)
    layers = range(model.config.num_hidden_layers)
    for reads, name in (("queries", "q_proj"), ("keys", "k_proj"), ("values", "v_proj")):
        found = places(model, reads)
        assert [place.path for place in found] == [f"model.layers.{i}.self_attn.{name}" for i in layers]
        assert all(place.columns is None and place.heads for place in found)


class Remembering(nn.Module):
    """An attention that reads a memory of its own before the text, by the same matrices."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.memory = nn.Linear(16, 16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x[:, :3].mean(1, keepdim=True))
        read = []
        for matrix in (self.k, self.v):
            one, other = (matrix(each).unflatten(-1, (2, 8)).transpose(1, 2) for each in (memory, x))
            read.append(torch.cat([one, other], 2) if self.how == "joined" else other + one)
        q = self.q(x).unflatten(-1, (2, 8)).transpose(1, 2)
        made: Tensor = torch.softmax(q @ read[0].mT, -1) @ read[1]
        return x + self.o(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class OfRemembering(OfLayers):
    def __init__(self, how: str) -> None:
        super().__init__(Remembering(how) for _ in range(2))


@pytest.mark.parametrize("how", ["joined", "summed"])
def test_what_one_matrix_gives_of_two_streams_is_all_read(how: str) -> None:
    """The keys and values of the newest call alone were told as all."""
    model = OfRemembering(how).eval()
    if how == "summed":
        with pytest.raises(MethodError, match="no keys were found in OfRemembering"):
            places(model, "keys")
        return
    for kind, name in (("queries", "q"), ("keys", "k"), ("values", "v")):
        found = places(model, kind)  # type: ignore[arg-type]
        calls = [0] if name == "q" else [0, 1]
        assert [(each.path, each.call) for each in found] == [(f"layers.{i}.{name}", c) for i in (0, 1) for c in calls]
        assert all(each.heads == 2 and each.columns is None for each in found)


def test_a_decoder_that_reads_itself_and_the_encoder_at_once_has_keys_of_both() -> None:
    """T5Gemma 2's were those of the encoder's tokens alone."""
    (t5gemma,) = choose(["t5gemma2"], "seq2seq-lm")
    model = tiny_model(t5gemma)
    inputs = tiny_inputs(t5gemma, model)
    for kind, name in (("keys", "k_proj"), ("values", "v_proj")):
        found = [place for place in places(model, kind) if "decoder" in place.path]  # type: ignore[arg-type]
        wanted = [(f"model.decoder.layers.{i}.self_attn.{name}", call) for i in (0, 1) for call in (0, 1)]
        assert [(place.path, place.call) for place in found] == wanted
        with lrpx.intervene(model, dict.fromkeys(found, 0.0)), torch.no_grad():
            changed = model(**inputs).logits
        with torch.no_grad():
            for place in found:
                model.get_parameter(f"{place.path}.weight").zero_()
            assert torch.allclose(changed, model(**inputs).logits)
        model = tiny_model(t5gemma)


class Branches(nn.Module):
    """An attention and an MLP of some width, each beside a stream."""

    def __init__(self, wide: int, latent: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(wide, wide) for _ in range(4))
        self.up, self.down = nn.Linear(wide, latent), nn.Linear(latent, wide)

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        read = x if read is None else read
        q, k, v = (
            matrix(each).unflatten(-1, (2, -1)).transpose(1, 2)
            for matrix, each in ((self.q, x), (self.k, read), (self.v, read))
        )
        x = x + self.o((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class WithSecondStream(nn.Module):
    """A narrow stream and a wide one in each layer, of which it gives the narrow one first, as TNT does."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.join = Branches(8, 12), Branches(16, 24), nn.Linear(8, 16)

    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        x = self.narrow(x)
        return x, self.wide(wide + self.join(x))


class OfManyStreams(nn.Module):
    """Layers in a list of lists before those of a list; layers of two streams; or latents that read the tokens."""

    def __init__(self, how: str, latents: int = 7) -> None:
        super().__init__()
        self.how = how
        self.table, self.head, self.first = nn.Embedding(31, 16), nn.Linear(16, 31), nn.Linear(16, 8)
        self.latents = nn.Parameter(torch.randn(1, latents, 16))
        self.blocks = nn.ModuleList(nn.ModuleList([Branches(16, 24)]) for _ in range(2 * (how == "lists")))
        self.layers = nn.ModuleList(WithSecondStream() if how == "two" else Branches(16, 24) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        if self.how == "latents":
            tokens, x = x, self.latents.expand(len(x), -1, -1)
            for layer in self.layers:
                x = layer(x, tokens)
            return self.head(x.mean(1))  # type: ignore[no-any-return]
        if self.how == "two":
            both = self.first(x), x
            for layer in self.layers:
                both = layer(*both)
            return self.head(both[1])  # type: ignore[no-any-return]
        for (layer,) in self.blocks:
            x = layer(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def funnel() -> nn.Module:
    config = FunnelConfig(vocab_size=31, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=4, d_head=4)
    return tiny.build(FunnelForMaskedLM, config, "eager")


@pytest.mark.parametrize("make", [funnel, lambda: OfManyStreams("lists").eval()], ids=["funnel", "own"])
def test_layers_beside_those_of_a_list_of_lists_are_not_told_as_all(make: Any) -> None:
    """Of Funnel's encoder and decoder the stream was told behind the decoder's layers alone."""
    model = make()
    with pytest.raises(MethodError, match=r"blocks\.0\.0\..* is in no layer that is seen, .* the layers that are"):
        places(model, "residual")
    if isinstance(model, OfManyStreams):
        with pytest.raises(MethodError, match="is in no layer that is seen"):
            lrpx.Explainer(model, task=lrpx.Task.CAUSAL).flow([5, 9, 3])


@pytest.mark.parametrize("kind", ["neurons", "mlp"])
def test_neurons_of_a_second_stream_of_another_width_are_not_left_out(kind: Any) -> None:
    """Of each layer's two MLPs the one in the stream that it gives first was told as all."""
    with pytest.raises(MethodError, match=r"inside layers\.0\.wide\.down"):
        places(OfManyStreams("two").eval(), kind)


class PostNorm(nn.Module):
    """A layer that hands on what it has made and the stream, which the next one adds to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, made: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        stream = made + stream
        return self.down(nn.functional.gelu(self.up(self.norm(stream)))), stream


class OfPostNorms(OfLayers):
    def forward(self, input_ids: Tensor) -> Tensor:
        both = self.table(input_ids), self.table(input_ids)
        for layer in self.layers:
            both = layer(*both)
        return self.head(sum(both))  # type: ignore[no-any-return]


def test_a_stream_of_two_tensors_is_not_told_as_the_first() -> None:
    """Of two streams of a layer the first was ranked as what stands behind it; of a stream that the next layer adds
    to what this one gives, the latter alone."""
    for model in (OfManyStreams("two").eval(), OfPostNorms(PostNorm() for _ in range(2)).eval()):
        with pytest.raises(MethodError, match=r"layers\.0 of \w+ is given two streams and gives both"):
            places(model, "residual")
        with pytest.raises(MethodError, match="two streams"):
            lrpx.Explainer(model, task=lrpx.Task.CAUSAL).flow([5, 9, 3])
    assert len(places(model, "neurons")) == 2


@pytest.mark.parametrize("kind", ["neurons", "heads", "queries", "attention", "mlp", "residual"])
@pytest.mark.parametrize("count", [5, 7])
def test_latents_are_no_tokens_where_there_are_as_many(kind: Any, count: int) -> None:
    """The third of seven latents was told as the third of seven tokens; of five, as many as tokens are looked at."""
    model = OfManyStreams("latents", count).eval()
    explainer = lrpx.Explainer(model, task=lrpx.Task.CLASSIFICATION)
    sae = SparseAutoencoder(torch.randn(16, 4), torch.ones(4), torch.randn(4, 16), torch.zeros(16), hook="layers.0")
    for ids in ([5, 9, 3, 12, 7, 22, 8][:count], [5, 9, 3, 12]):
        with pytest.raises(MethodError, match="no vector for each of the input's tokens"):
            explainer.neurons(ids, kind=kind)
        with pytest.raises(ModelError, match="no vector for each of them"):
            explain_features(explainer, ids, sae)
        for place in places(model, kind):
            change = {place: lrpx.Scale(0.0, positions=[2])}
            with pytest.raises(TraceError, match="nobody knows at which tokens"), lrpx.intervene(model, change):
                model(torch.tensor([ids]))
    with lrpx.intervene(model, dict.fromkeys(places(model, kind), lrpx.Scale(0.0))):
        model(torch.tensor([[5, 9, 3, 12, 7, 22, 8]]))


def test_units_are_looked_for_again_where_a_number_or_a_flag_is_another() -> None:
    """As many heads as there were before were ranked, and the neurons of a layer that was switched on were left out."""
    model = GPT(together=True).eval()
    explainer, ids = lrpx.Explainer(model, task=lrpx.Task.CAUSAL), [5, 9, 3]
    for block in model.blocks:
        block.attention.count = 4
    assert {place.width for place in places(model, "heads")} == {4}
    for block in model.blocks:
        block.attention.count = 2
    assert {place.width for place in places(model, "heads")} == {2}
    assert explainer.neurons(ids, kind="heads").count == 2 * len(model.blocks) * len(ids)
    for block in model.blocks:
        block.mlp[1] = Switched()
    assert len(places(model, "neurons")) == len(model.blocks)
    for on in (False, True):
        model.blocks[0].mlp[1].on = on
        with nullcontext() if on else pytest.raises(MethodError, match="is not seen to have neurons"):
            assert len(places(model, "neurons")) == len(model.blocks)


def test_units_are_those_of_the_inputs_that_are_given() -> None:
    """Those of the images were left out where the units of texts had been asked for before."""
    model = tiny.llava().eval()
    patches = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
    side = model.config.vision_config.image_size
    inputs = {
        "input_ids": torch.tensor([[1, *[model.config.image_token_id] * patches, 2, 3]]),
        "pixel_values": torch.randn(1, 3, side, side, dtype=next(model.parameters()).dtype),
    }
    for _ in range(2):
        assert {place.path.split(".")[1] for place in places(model, "neurons")} == {"language_model"}
        both = places(model, "neurons", inputs)
        assert {place.path.split(".")[1] for place in both} == {"vision_tower", "language_model"}
    said = model(**inputs).logits
    with lrpx.intervene(model, {both[0]: lrpx.Scale(0.0)}):
        assert not torch.equal(model(**inputs).logits, said)
