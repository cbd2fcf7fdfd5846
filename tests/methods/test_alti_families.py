"""ALTI-Logit on the architectures of transformers, by what its ledger says; and the models it refuses, and why."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lrpx import Explainer
from lrpx.coverage._checking import _everything_wide as everything_wide
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import MethodError
from lrpx.methods import METHODS
from lrpx.model import BoundModel
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task
from tests import tiny
from tests.engine.samples import SAMPLES, Sample
from tests.reference import models

IDS = [3, 14, 15, 9, 26, 5, 7, 12, 20]
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16}
FALCON = {"alibi": False, "bias": True}
FAMILIES = SAMPLES | {
    "opt post-norm": Sample("OPTForCausalLM", "OPTConfig", OPT | {"do_layer_norm_before": False}),
    "opt narrow": Sample("OPTForCausalLM", "OPTConfig", OPT | {"word_embed_proj_dim": 8}),
    "falcon new": Sample(
        "FalconForCausalLM", "FalconConfig", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon sequential": Sample(
        "FalconForCausalLM", "FalconConfig", FALCON | {"parallel_attn": False, "multi_query": False}
    ),
    "neox sequential": Sample("GPTNeoXForCausalLM", "GPTNeoXConfig", {"use_parallel_residual": False}),
    "gptj": Sample("GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 4}),
    "stablelm": Sample("StableLmForCausalLM", "StableLmConfig", {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm parallel": Sample("StableLmForCausalLM", "StableLmConfig", {"use_parallel_residual": True}),
    "cohere": Sample("CohereForCausalLM", "CohereConfig", {"use_qk_norm": True}),
    "granite": Sample(
        "GraniteForCausalLM", "GraniteConfig",
        {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    ),
    "gpt2 classifier": Sample("GPT2ForSequenceClassification", "GPT2Config", {"num_labels": 3}),
    "deepseek": Sample(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
         "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
         "first_k_dense_replace": 1, "moe_intermediate_size": 8},
    ),
    "gpt_oss": Sample(
        "GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 4, "head_dim": 4, "sliding_window": 4}
    ),
    "bert classifier": Sample("BertForSequenceClassification", "BertConfig", {"num_labels": 3}),
}  # fmt: skip
DECODERS = [
    "gpt2", "opt", "opt post-norm", "opt narrow", "bloom", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3",
    "gpt_neox", "neox sequential", "falcon", "falcon new", "falcon sequential", "falcon alibi", "phi", "gptj",
    "stablelm", "stablelm parallel", "cohere", "olmo2", "granite", "mixtral", "deepseek", "gpt_oss",
]  # fmt: skip
ENCODERS = ["bert", "bert classifier", "roberta", "distilbert", "electra", "modernbert", "albert", "gpt2 classifier"]
EAGER_ONLY = ["gemma2", "bloom", "gpt_oss", "gptj"]
BEFORE_THE_LAYERS = re.compile(r".*embed.*\.bias")


def build(name, implementation):
    model = FAMILIES[name].build(attn_implementation=implementation)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other one's kernel has no float64
    return model


def explained(model, **options):
    where = {} if "Classification" in type(model).__name__ else {"position": 6}
    return Explainer(model)(IDS, method="alti-logit", **where, **options)


EAGER = [(name, "eager") for name in DECODERS + ENCODERS]
FUSED = [(name, "sdpa") for name in DECODERS + ENCODERS if name not in EAGER_ONLY]


@pytest.mark.parametrize(("name", "implementation"), EAGER + FUSED)
@pytest.mark.parametrize("contrast", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_every_unit_of_the_value_has_its_place(name, implementation, contrast):
    model = build(name, implementation)
    with everything_wide():
        found = explained(model, target=2, contrast=contrast, ledger=True)
        with torch.no_grad():
            logits = model(torch.tensor([IDS])).logits[0]
    logits = logits if logits.ndim == 1 else logits[6]
    value = float(logits[2] - (0 if contrast is None else logits[contrast]))
    kinds, scale = found.ledger.by_kind(), 1e-9 * found.ledger.scale
    assert abs(found.explained.value - value) < scale
    assert abs(found.ledger.difference) < scale
    assert set(kinds) <= {"tokens", "positions", "token types", "attention", "MLPs", "biases"}
    assert {"tokens", "attention", "MLPs"} <= set(kinds)
    assert abs(float(found.parts["heads"].values.sum()) - kinds["attention"]) < scale
    entries = [e.value for e in found.ledger.entries if e.kind == "attention"]
    if name != "albert":  # its layers are one module
        by_layer = found.parts["heads"].values.sum((1, 2)) - torch.tensor(entries, dtype=torch.float64)
        assert float(by_layer.abs().max()) < scale
    first = [e.value for e in found.ledger.entries if BEFORE_THE_LAYERS.fullmatch(e.name)]
    outside = kinds["MLPs"] + kinds.get("biases", 0.0) - sum(first)
    assert abs(float(found.relevance.sum()) + outside - value) < scale
    if name in DECODERS:
        assert (found.relevance[7:] == 0).all()
        assert (found.parts["heads"].values[..., 7:] == 0).all()


@pytest.mark.parametrize("name", [name for name, _ in FUSED if name != "falcon alibi"])  # there they differ themselves
def test_fused_attention_gives_the_same(name):
    with everything_wide():
        fused, eager = (explained(build(name, implementation), target=2) for implementation in ("sdpa", "eager"))
    torch.testing.assert_close(fused.relevance, eager.relevance, rtol=0, atol=1e-9)
    torch.testing.assert_close(fused.parts["heads"].values, eager.parts["heads"].values, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore")  # transformers' own, of sizes that no one would choose
@pytest.mark.parametrize(
    "name",
    [
        "causal-lm/llama4",  # all experts in one product
        "causal-lm/gemma3",  # a vision tower beside the layers
        "causal-lm/git",  # positions are looked up before tokens
        "masked-lm/mpnet",  # biases of relative positions, looked up outside the layers
        "masked-lm/xmod",  # sums in place
    ],
)
def test_other_ways_to_write_a_model(name):
    mapping, model_type = name.split("/")
    (model_class,) = choose([model_type], mapping)
    model = tiny_model(model_class).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with everything_wide():
        found = Explainer(model)([id + 10 for id in IDS], 2, 1, "alti-logit", position=6, ledger=True)
    kinds = found.ledger.by_kind()
    assert set(kinds) <= {"tokens", "positions", "token types", "attention", "MLPs", "biases"}
    assert abs(found.ledger.difference) < 1e-9 * found.ledger.scale
    assert float(found.parts["heads"].values.sum()) == pytest.approx(kinds["attention"], abs=1e-9 * found.ledger.scale)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_neox", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_near(name, dtype):
    """Nearer to float64 than a few times what the plain gradient loses, in the same model on the same processor."""

    def error(explain):
        exact, found = explain(build(name, "sdpa")), explain(build(name, "sdpa").to(dtype))
        return (found.relevance.double() - exact.relevance).abs().max() / exact.relevance.abs().max()

    lost = error(lambda model: Explainer(model)(IDS, 2, method="gradient-x-input", position=6))
    assert error(lambda model: explained(model, target=2)) <= 4 * lost


@pytest.mark.parametrize("ids", [IDS, [IDS, IDS[:3], IDS[:1]]])
def test_a_classifier_may_read_the_mean_of_all_positions(ids):
    settings = {"classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2, "num_labels": 3}
    explain = Explainer(Sample("ModernBertForSequenceClassification", "ModernBertConfig", settings).build())
    with everything_wide():
        found = explain(ids, 2, 1, method="alti-logit")
        for one in found if isinstance(found, list) else [found]:
            alone = explain(list(one.ids), 2, 1, method="alti-logit", ledger=True)
            kinds = alone.ledger.by_kind()
            assert abs(alone.ledger.difference) < 1e-9
            assert float(alone.parts["heads"].values.sum()) == pytest.approx(kinds["attention"], abs=1e-9)
            assert float(alone.relevance.sum()) == pytest.approx(kinds["attention"] + kinds["tokens"], abs=1e-9)
            torch.testing.assert_close(one.relevance, alone.relevance, rtol=0, atol=1e-9)
    with pytest.raises(MethodError, match=r"alti gives the shares of one position.*use alti-logit, or ifr"):
        explain(IDS, method="alti")


# ----------------------------------------------------------------------------- refusals


def jamba():
    settings = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
    return Sample("JambaForCausalLM", "JambaConfig", settings | {"num_experts": 2}).build()


def qwen3_next():
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    settings = {"layer_types": ["full_attention", "full_attention"], "head_dim": 4}
    return Sample("Qwen3NextForCausalLM", "Qwen3NextConfig", settings | experts).build(torch.float32)


def recurrent_gemma():
    settings = {"block_types": ["recurrent", "attention"], "lru_width": 16, "attention_window_size": 8}
    return Sample("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", settings).build()


class Plain(nn.Module):
    """No layers and no attention."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        return {"logits": self.head(self.embedding(input_ids))}


REFUSED = {
    "mamba": (tiny.mamba, r"backbone\.layers\.0 mixes positions by conv1d, besides attention; use attnlrp or lrp"),
    "jamba": (jamba, r"model\.layers\.0 mixes positions by conv1d, besides attention; use attnlrp or lrp"),
    "recurrent gemma": (recurrent_gemma, r"model\.layers\.0 mixes positions by conv1d"),
    "t5": (models.tiny_t5, r"T5ForConditionalGeneration has an encoder's and a decoder's; use attnlrp or lrp"),
    "bart": (tiny.bart, r"BartForConditionalGeneration has an encoder's and a decoder's; use attnlrp or lrp"),
    "xlnet": (tiny.xlnet, r"no softmax attention over the tokens of its input.*use attnlrp or lrp"),
    "qwen3-next": (qwen3_next, r"attention in model\.layers\.0\.self_attn is not projected.*use attnlrp or lrp"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("method", ["alti-logit", "logit", "alti"])
def test_what_has_no_single_stream_is_refused(name, method):
    build, message = REFUSED[name]
    with pytest.raises(MethodError, match=message):
        Explainer(build())(IDS, method=method)


TINY = {
    "sequence-classification/bart": r"BartForSequenceClassification has an encoder's and a decoder's",
    "sequence-classification/lilt": r"streams of 2 widths, not into one",
    "masked-lm/nystromformer": r"attention in nystromformer\.encoder\.layer\.0\.attention\.self is not projected",
    "causal-lm/longcat_flash": r"model\.layers\.0 adds up two tensors that both are linear in its input",
    "causal-lm/gemma3n_text": r"model\.layers\.0 adds up two tensors that both are linear in its input",
    "causal-lm/minimax": r"model\.layers\.1 has no softmax attention, as the layers of hybrid models",
    "causal-lm/doge": r"in model\.layers\.0 the sum of attention and residual stream is changed",
    "causal-lm/cpmant": r"the model embeds \[1, 41\] tokens of an input of \[1, 9\]",
    "causal-lm/deepseek_v4": r"attention in model\.layers\.0\.self_attn is not projected",
}


@pytest.mark.filterwarnings("ignore")  # transformers' own, of sizes that no one would choose
@pytest.mark.parametrize("name", TINY)
def test_what_would_be_wrong_without_a_word_is_refused(name):
    mapping, model_type = name.split("/")
    (model_class,) = choose([model_type], mapping)
    ids = [id + 10 for id in IDS]  # below are special tokens
    where = {} if mapping == "sequence-classification" else {"position": 6}
    with pytest.raises(MethodError, match=TINY[name] + ".*use attnlrp or lrp"):
        Explainer(tiny_model(model_class))(ids, method="alti-logit", **where)


def test_shares_have_no_ledger():
    with pytest.raises(MethodError, match=r"alti gives shares.*leave ledger out, or use alti-logit"):
        Explainer(models.tiny_llama())(IDS, method="alti", ledger=True)


def test_a_module_without_layers_is_refused():
    model = BoundModel(Plain(), task=Task.CAUSAL)
    questions = Questions((model.reader.row(IDS),), (Question(0, 6, Logit(2)),))
    with pytest.raises(MethodError, match=r"no softmax attention over the tokens of its input.*use attnlrp or lrp"):
        METHODS["alti-logit"].attribute(model, questions)
