"""Models of other packages, where they are installed: tiny, random, beside the same weights in transformers."""

from __future__ import annotations

import copy
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lrpx import LRP, Explainer
from lrpx.coverage._checking import _everything_wide
from lrpx.engine import propagate
from lrpx.errors import MethodError, ModelError
from lrpx.units import Reading, places
from tests.families.checks import RECIPES, alike, holds, ready, sources
from tests.families.without_torchvision import imported

WIDTH, WORDS = 16, 31
IDS = torch.tensor([[3, 17, 8, 25, 4, 11, 29]])
LLAMA = LlamaConfig(
    vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager",
)  # fmt: skip


def last(logits: Tensor) -> Tensor:
    return logits[0, -1, 5]


# --------------------------------------------------------------------------- peft

ITS_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


@pytest.fixture
def adapted():
    """A Llama with LoRA on every linear layer of its blocks, whose second matrices are not zero."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    return ready(peft.get_peft_model(LlamaForCausalLM(LLAMA), config))


@pytest.mark.filterwarnings(ITS_WARNING)
def test_adapters(adapted):
    with _everything_wide():
        holds(adapted, lambda: adapted(input_ids=IDS).logits, last)


@pytest.mark.filterwarnings(ITS_WARNING)
def test_merged_adapters_give_the_same(adapted):
    """``W x + B A x`` is linear in ``x``, however it is spelled."""
    with _everything_wide():
        apart = [explained(adapted, recipe) for recipe in RECIPES]
        merged = adapted.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_modules())
        for recipe, expected in zip(RECIPES, apart, strict=True):
            torch.testing.assert_close(explained(merged, recipe), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings(ITS_WARNING)
def test_units_behind_an_adapter_that_changes_what_its_layer_gives():
    """RoAd turns it, so that what the layer gives is not what the branch does."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.RoadConfig(group_size=4, target_modules="all-linear")
        adapted = ready(peft.get_peft_model(LlamaForCausalLM(LLAMA), config))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "road" in name:
                    weight += 0.3 * torch.randn_like(weight)
    merged = copy.deepcopy(adapted).merge_and_unload()
    for kind in ("neurons", "mlp", "heads", "attention"):
        found = []
        for model in (adapted, merged):
            reading = Reading(places(model, kind))
            with propagate(model, LRP, taps=[reading]) as trace:
                trace.explain(model(input_ids=IDS).logits[0, -1, 7])
                found.append([trace.relevance_of(reading.value(place)) for place in places(model, kind)])
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.filterwarnings(ITS_WARNING)
def test_an_adapter_of_the_token_embedding():
    """``E x + B A x`` looks tokens up in two tables; what both have is the tokens'."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["embed_tokens", "q_proj"]
    config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    with _everything_wide():
        adapted = ready(peft.get_peft_model(LlamaForCausalLM(LLAMA), config))
        ids = IDS[0].tolist()
        for method in ("attnlrp", "lrp", "gradient-x-input"):
            apart = Explainer(adapted, tokenizer=None)(ids, target=7, method=method, ledger=True)
            merged = Explainer(copy.deepcopy(adapted).merge_and_unload(), tokenizer=None)(ids, target=7, method=method)
            assert apart.relevance == pytest.approx(merged.relevance, rel=1e-9, abs=1e-12)
            assert apart.ledger.closes(1e-9) or method == "gradient-x-input"
        with pytest.raises(MethodError, match=r"embed_tokens\.base_layer and .*lora_embedding_A.*merge_and_unload"):
            Explainer(adapted, tokenizer=None)(ids, target=7, method="gradient-l1")


@pytest.mark.filterwarnings(ITS_WARNING)
def test_trained_rows_of_the_token_embedding():
    """A layer of peft's looks all tokens up, and the embedding's own module is never called."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[5, 9], task_type="CAUSAL_LM")
    adapted = ready(peft.get_peft_model(LlamaForCausalLM(LLAMA), config))
    with pytest.raises(ModelError, match=r"was not called: .*trainable_token_indices.*merge_and_unload"):
        Explainer(adapted, tokenizer=None)(IDS[0].tolist(), target=7)
    assert Explainer(copy.deepcopy(adapted).merge_and_unload(), tokenizer=None)(IDS[0].tolist(), target=7)


def explained(model, recipe):
    with propagate(model, recipe, observe=()) as trace:
        trace.explain(last(model(input_ids=IDS).logits))
    (found,) = sources(trace)
    return found


# ------------------------------------------------------------------ x-transformers


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
        {"alibi_pos_bias": True, "attn_one_kv_head": True},
        {"attn_flash": True, "rotary_pos_emb": True, "attn_kv_heads": 2},
        {"rel_pos_bias": True, "sandwich_norm": True, "attn_qk_norm": True},
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
def test_x_transformers(settings):
    x_transformers = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    model = ready(
        x_transformers.TransformerWrapper(
            num_tokens=WORDS, max_seq_len=16, attn_layers=x_transformers.Decoder(dim=32, depth=2, heads=4, **settings)
        )
    )
    holds(model, lambda: model(IDS), last)


def test_x_transformers_encoder():
    x_transformers = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    encoder = x_transformers.Encoder(dim=32, depth=2, heads=4)
    model = ready(x_transformers.TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=encoder))
    holds(model, lambda: model(IDS), lambda logits: logits[0, 3, 7])


# ------------------------------------------------------------ curated-transformers


def test_curated_transformers():
    """Its Llama with the weights of that in transformers, by its own conversion: the same relevance."""
    models = pytest.importorskip("curated_transformers.models", reason="curated-transformers is not installed")
    layers = pytest.importorskip("curated_transformers.layers")
    mask = layers.AttentionMask(torch.ones_like(IDS, dtype=torch.bool))
    with _everything_wide():
        theirs = ready(LlamaForCausalLM(LLAMA))
        model = ready(models.LlamaCausalLM(models.LlamaCausalLM.config_from_hf(LLAMA.to_dict())))
        model.load_state_dict(models.LlamaCausalLM.state_dict_from_hf(theirs.state_dict()))
        holds(model, lambda: model(IDS, mask).logits, last)
        alike((model, lambda: model(IDS, mask).logits, last), (theirs, lambda: theirs(IDS).logits, last))


# ----------------------------------------------------------- sentence-transformers


class Pooled(nn.Module):
    """An encoder, the mean of its tokens, of length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask[..., None].to(rows.dtype)
        mean = (rows * seen).sum(1) / seen.sum(1)
        return mean / mean.norm(dim=-1, keepdim=True)


def test_sentence_transformers(minilm):
    """Real MiniLM: the pipeline of its modules, and the same written in three lines."""
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    text = dict(tokenizer(["The doors of the house are open"], return_tensors="pt"))
    text.pop("token_type_ids", None)
    plain = Pooled(AutoModel.from_pretrained(minilm, dtype=torch.float64)).eval().requires_grad_(False)
    parts = package.sentence_transformer.modules if hasattr(package.sentence_transformer, "modules") else package.models
    transformer = parts.Transformer(minilm)
    model = package.SentenceTransformer(
        modules=[transformer, parts.Pooling(384, pooling_mode="mean"), parts.Normalize()], device="cpu"
    )
    model = model.double().eval().requires_grad_(False)
    other = torch.randn(384, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def embedded() -> Tensor:
        return model(dict(text))["sentence_embedding"]

    def pick(embedding: Tensor) -> Tensor:
        return embedding[0] @ other

    holds(model, embedded, pick)
    alike((model, embedded, pick), (plain, lambda: plain(**text), pick))


# ----------------------------------------------------------------- TransformerLens


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated:DeprecationWarning")
def test_transformer_lens():
    """GPT-2's weights in a HookedTransformer: the same relevance of the residual stream behind the embedding."""
    lens = pytest.importorskip("transformer_lens", reason="transformer-lens is not installed")
    if int(version("transformer-lens").split(".")[0]) >= 4:
        pytest.skip("transformer-lens 4 has no HookedTransformer")
    config = lens.HookedTransformerConfig(
        n_layers=2, d_model=WIDTH, n_ctx=16, d_head=4, n_heads=4, d_vocab=WORDS, act_fn="gelu", normalization_type="LN",
        dtype=torch.float64,
    )  # fmt: skip
    model = ready(lens.HookedTransformer(config))
    gpt2 = ready(
        GPT2LMHeadModel._from_config(
            GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, activation_function="gelu",
                       tie_word_embeddings=False), attn_implementation="eager",
        )
    )  # fmt: skip
    into_lens(model, gpt2)
    stream = gpt2.transformer.wte(IDS) + gpt2.transformer.wpe(torch.arange(IDS.shape[1]))
    stream = stream.detach().requires_grad_()

    def ours() -> Tensor:
        return model(stream, start_at_layer=0)

    def theirs() -> Tensor:
        return gpt2(inputs_embeds=stream - gpt2.transformer.wpe(torch.arange(IDS.shape[1]))).logits

    holds(model, ours, last)
    torch.testing.assert_close(ours(), theirs(), rtol=1e-10, atol=1e-12)
    for recipe in RECIPES:
        with propagate(model, recipe, observe=()) as trace:
            trace.explain(last(ours()))
        (found,) = sources(trace)
        with propagate(gpt2, recipe) as trace:
            trace.explain(last(theirs()))
        expected = trace.relevance("transformer.h.0", of="input")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def into_lens(model, gpt2):
    """Copy the weights; a HookedTransformer has a matrix a head."""
    with torch.no_grad():
        for ours, theirs in zip(model.blocks, gpt2.transformer.h, strict=True):
            for name, part, bias in zip("QKV", theirs.attn.c_attn.weight.split(WIDTH, 1),
                                        theirs.attn.c_attn.bias.split(WIDTH), strict=True):  # fmt: skip
                getattr(ours.attn, f"W_{name}").copy_(part.reshape(WIDTH, 4, 4).transpose(0, 1))
                getattr(ours.attn, f"b_{name}").copy_(bias.reshape(4, 4))
            ours.attn.W_O.copy_(theirs.attn.c_proj.weight.reshape(4, 4, WIDTH))
            ours.attn.b_O.copy_(theirs.attn.c_proj.bias)
            ours.mlp.W_in.copy_(theirs.mlp.c_fc.weight)
            ours.mlp.b_in.copy_(theirs.mlp.c_fc.bias)
            ours.mlp.W_out.copy_(theirs.mlp.c_proj.weight)
            ours.mlp.b_out.copy_(theirs.mlp.c_proj.bias)
            for mine, other in ((ours.ln1, theirs.ln_1), (ours.ln2, theirs.ln_2)):
                mine.w.copy_(other.weight)
                mine.b.copy_(other.bias)
        model.ln_final.w.copy_(gpt2.transformer.ln_f.weight)
        model.ln_final.b.copy_(gpt2.transformer.ln_f.bias)
        model.unembed.W_U.copy_(gpt2.lm_head.weight.T)
        model.unembed.b_U.zero_()


# ------------------------------------- timm and open_clip, with torchvision or without


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "mixer_s16_224", "resnet18"])
def test_timm(name):
    timm = imported("timm")
    settings = {"img_size": 32, "patch_size": 8, "depth": 2} if name.startswith("vit") else {}
    model = ready(timm.create_model(name, num_classes=5, **settings))
    side = 32 if settings or "2" not in name else 224
    picture = torch.randn(1, 3, side, side, dtype=torch.float64).requires_grad_()
    holds(model, lambda: model(picture), lambda logits: logits[0, 2])


def test_open_clip():
    open_clip = imported("open_clip")
    model = ready(
        open_clip.CLIP(
            embed_dim=WIDTH,
            vision_cfg={"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
            text_cfg={"context_length": 8, "vocab_size": WORDS, "width": 64, "heads": 4, "layers": 2},
        )
    )
    ids = torch.tensor([[3, 17, 8, 25, 4, 11, 29, 30]])
    other = torch.randn(WIDTH, dtype=torch.float64)
    picture = torch.randn(1, 3, 32, 32, dtype=torch.float64).requires_grad_()
    holds(model, lambda: model(picture, ids)[1], lambda rows: rows[0] @ other)
