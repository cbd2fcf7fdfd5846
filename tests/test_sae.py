"""Features of sparse autoencoders: their relevance, what is missed, and autoencoders that are none."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
import transformers as tf
from rich.console import Console
from safetensors.torch import save_file

import lrpx
from lrpx.engine import propagate
from lrpx.errors import InputError, ModelError, TargetError
from lrpx.model import BoundModel
from lrpx.sae import SAELENS, SPARSIFY, FeatureTap, SparseAutoencoder, explain_features
from tests import tiny
from tests.engine.samples import SAMPLES
from tests.reference import llama as llama_twin
from tests.reference import models
from tests.reference import sae as twin

WIDE, COUNT = 16, 40
TEXT, OTHER = "The keys to the cabinet", "The key to the old rug is small."
KINDS = {
    "relu": {},
    "topk": {"k": 5},
    "jumprelu": {"threshold": torch.rand(COUNT, generator=torch.Generator().manual_seed(7), dtype=torch.float64)},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
PATH = "model.layers.0"


def made(kind="relu", centred=False, hook="blocks.0.hook_resid_post"):
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    weights = normal(WIDE, COUNT) / 4, normal(COUNT) / 5, normal(COUNT, WIDE) / 4, normal(WIDE) / 3
    return SparseAutoencoder(*weights, activation=kind, centred=centred, hook=hook, **KINDS[kind])


@pytest.fixture
def explainer(byte_tokenizer):
    return lrpx.Explainer(models.tiny_llama(vocab_size=340), byte_tokenizer)


def parts(sae):
    return [each.numpy() for each in (sae.encoder, sae.encoder_bias, sae.decoder, sae.decoder_bias)]


@every_kind
@pytest.mark.parametrize("centred", [False, True])
def test_relevance_is_that_of_the_twin(kind, centred, explainer):
    sae = made(kind, centred)
    found = explain_features(explainer, TEXT, sae, target=7)
    ids = np.array(explainer(TEXT).ids)
    of = llama_twin.explain(explainer.model, ids, len(ids) - 1, np.eye(340)[7], "attnlrp")
    with torch.no_grad():
        hidden = (
            explainer.model(input_ids=torch.tensor(ids[None]), output_hidden_states=True).hidden_states[1][0].numpy()
        )
    encoder, encoder_bias, decoder, decoder_bias = parts(sae)
    how = {name: value if name == "k" else value.numpy() for name, value in KINDS[kind].items()}
    dense = found.sparse.to_dense().numpy()
    for t, x in enumerate(hidden):
        features = twin.encode(x, encoder, encoder_bias, decoder_bias, kind, centred=centred, **how)
        wanted, bias, error = twin.relevance(x, of.layers[1][t], features, decoder, decoder_bias)
        np.testing.assert_allclose(dense[t], wanted, atol=1e-9, rtol=0)
        assert abs(float(found.bias[t]) - bias) < 1e-9
        assert abs(float(found.error[t]) - error) < 1e-9
        active = found.indices[found.indices[:, 0] == t, 1].tolist()
        assert active == np.flatnonzero(features).tolist()
        np.testing.assert_allclose(found.activations[found.indices[:, 0] == t], features[active], atol=1e-9)
    assert abs(found.total - of.layers[1].sum()) < 1e-9
    assert np.abs(dense).sum() > 1e-3
    assert abs(found.error.sum()) > 1e-3


@every_kind
@pytest.mark.parametrize("recipe", [lrpx.ATTNLRP, lrpx.LRP, lrpx.GRADIENT], ids=["attnlrp", "lrp", "gradient"])
def test_all_of_it_sums(kind, recipe, explainer):
    """What arrives at the place is what the entries have; and with the ledger of the rest the value closes."""
    sae, model = made(kind), explainer.model
    ids = torch.tensor([explainer(TEXT).ids])
    with propagate(model, recipe, [PATH]) as trace:
        plain = model(input_ids=ids).logits[0, -1]
    trace.explain(plain[7])
    tap = FeatureTap(sae, PATH)
    with propagate(model, recipe, (), ledger=True, taps=[tap]) as kept:
        logits = model(input_ids=ids).logits[0, -1]
    value = kept.explain(logits[7])
    assert torch.equal(logits, plain)  # bit for bit
    entries = sum(float(kept.relevance_of(each).sum()) for each in (tap.features, tap.bias, tap.error))
    assert abs(entries - float(trace.relevance(PATH).sum())) < 1e-9
    ended = sum(float(kept.relevance_of(each).sum()) for each in (tap.bias, tap.error))
    if recipe is not lrpx.GRADIENT:
        assert abs(kept.ledger().total + ended - float(value)) < 1e-9
    assert abs(kept.ledger().total - float(value)) > 1e-3  # and not without them


@every_kind
@pytest.mark.parametrize("name", ["k", "threshold"])
def test_what_the_activation_does_not_use_is_refused(kind, name):
    if name in KINDS[kind]:
        return
    only = "topk" if name == "k" else "jumprelu"
    more = KINDS[kind] | KINDS[only]
    sae = made(kind)
    with pytest.raises(
        ModelError, match=f"has a {name}, which its activation, {kind}, does not use; pass activation='{only}'"
    ):
        SparseAutoencoder(sae.encoder, sae.encoder_bias, sae.decoder, sae.decoder_bias, activation=kind, **more)


@every_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_gives_the_same(kind, side, byte_tokenizer):
    explainer = lrpx.Explainer(models.tiny_llama(vocab_size=340), byte_tokenizer, padding_side=side)
    sae = made(kind)
    both = explain_features(explainer, [TEXT, OTHER], sae, target=7)
    for text, one in zip([TEXT, OTHER], both, strict=True):
        alone = explain_features(explainer, text, sae, target=7)
        assert torch.equal(one.indices, alone.indices)
        for name in ("activations", "relevance", "bias", "error"):
            torch.testing.assert_close(getattr(one, name), getattr(alone, name), rtol=0, atol=1e-9)
        torch.testing.assert_close(one.attribution.relevance, alone.attribution.relevance, rtol=0, atol=1e-9)


def test_what_is_shown(explainer):
    found = explain_features(explainer, TEXT, made("topk"), target=7, contrast=9)
    best = found.top(3)
    assert [abs(each.relevance) for each in best] == sorted(found.relevance.abs().tolist(), reverse=True)[:3]
    assert best[0].text == found.attribution.tokens[best[0].token]
    by_feature = found.by_feature()
    assert sum(by_feature.values()) == pytest.approx(float(found.relevance.sum()))
    assert list(map(abs, by_feature.values())) == sorted(map(abs, by_feature.values()), reverse=True)
    console = Console(width=100, file=io.StringIO())
    console.print(found)
    said = console.file.getvalue()
    assert "decoder's bias" in said
    assert f"through {PATH}" in said
    plain = json.loads(json.dumps(found.to_dict()))
    parts = [[each["relevance"] for each in plain["features"]], plain["bias"], plain["error"]]
    assert sum(map(sum, parts)) == pytest.approx(found.total, abs=1e-9)
    assert len(parts[0]) == len(found.indices)


def test_the_page(byte_tokenizer, tmp_path):
    explainer = lrpx.Explainer(models.tiny_llama(vocab_size=340), byte_tokenizer)
    found = explain_features(explainer, "<b>&[red]", made(), target=7)
    page = found.to_html(tmp_path / "features.html", top=7)
    assert page == (tmp_path / "features.html").read_text()
    assert "<script" not in page
    assert "the 7 most relevant of" in page
    first = next(iter(found.by_feature()))
    assert f"<bdi>{first}</bdi>" in page
    for name in ("all features", "decoder&#39;s bias", "error", "Token by token"):
        assert name in page
    assert "&lt;" in page
    assert "<b>&" not in page
    assert f"through {PATH}" in str(found)
    assert "Token by token" not in found._repr_html_()


def test_another_model_is_left_as_it_is(explainer):
    before = {name: value.clone() for name, value in explainer.model.state_dict().items()}
    sae = made()
    weights = [each.clone() for each in (sae.encoder, sae.encoder_bias, sae.decoder, sae.decoder_bias)]
    explain_features(explainer, TEXT, sae)
    assert all(torch.equal(value, before[name]) for name, value in explainer.model.state_dict().items())
    after = (sae.encoder, sae.encoder_bias, sae.decoder, sae.decoder_bias)
    assert all(torch.equal(*pair) and not pair[0].requires_grad for pair in zip(after, weights, strict=True))
    assert not any(module._forward_hooks for module in explainer.model.modules())


# --------------------------------------------------------------------------------- files


def written(folder, config, weights, name=SAELENS):
    folder.mkdir(exist_ok=True)
    save_file({key: each.contiguous() for key, each in weights.items()}, folder / name)
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def saelens(sae):
    return {"W_enc": sae.encoder, "b_enc": sae.encoder_bias, "W_dec": sae.decoder, "b_dec": sae.decoder_bias}


def sparsify(sae):
    return {
        "encoder.weight": sae.encoder.T,
        "encoder.bias": sae.encoder_bias,
        "W_dec": sae.decoder,
        "b_dec": sae.decoder_bias,
    }


X = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@every_kind
def test_it_is_written_and_read(kind, tmp_path):
    sae = made(kind, centred=True)
    sae.save(tmp_path / "it")
    read = SparseAutoencoder.load(tmp_path / "it")
    assert (read.activation, read.k, read.centred, read.hook) == (kind, sae.k, True, sae.hook)
    torch.testing.assert_close(read.encode(X.float()), sae.to(dtype=torch.float32).encode(X.float()))


@pytest.mark.parametrize("place", ["metadata", None])
def test_where_the_stream_was_centred_it_is_read_without_its_mean(place, tmp_path, byte_tokenizer):
    """As TransformerLens has GPT-2's; its Llama's is as it is, whatever the files say."""
    said = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    config = {"hook_name": "blocks.0.hook_resid_post"} | (said if place is None else {place: said})
    sae = SparseAutoencoder.load(written(tmp_path / "it", config, saelens(made()))).to(dtype=torch.float64)
    sae.save(tmp_path / "again")
    assert SparseAutoencoder.load(tmp_path / "again").mean_free
    explainer = lrpx.Explainer(models.tiny_gpt2(vocab_size=340), byte_tokenizer)
    assert explainer.model.config.n_embd == WIDE
    found = explain_features(explainer, TEXT, sae, target=7)
    with torch.no_grad():
        ids = torch.tensor([explainer(TEXT).ids])
        x = explainer.model(ids, output_hidden_states=True).hidden_states[1][0].double()
        wanted = made(centred=True).encode(x - x.mean(-1, keepdim=True))
        assert x.mean(-1).abs().max() > 0.01
    active = found.indices.T.tolist()
    assert wanted[active[0], active[1]].min() > 0
    torch.testing.assert_close(found.activations.clone(), wanted[active[0], active[1]], atol=1e-6, rtol=1e-5)
    llama = lrpx.Explainer(models.tiny_llama(vocab_size=340), byte_tokenizer)
    with pytest.raises(ModelError, match=r"read a stream without its mean, and LlamaForCausalLM reads the mean at"):
        explain_features(llama, TEXT, sae, target=7)


def test_the_layouts_of_others(tmp_path):
    """As SAELens wrote them before and writes them now, and as sparsify does; both take the decoder's bias off first
    unless the file says that it is not to be."""
    plain, top = made(centred=True), made("topk", centred=True)
    old = {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 5}, "hook_name": "h"}
    cases = [
        ({"hook_name": "h", "activation_fn_str": "relu"}, saelens(plain), SAELENS, plain, "h"),
        ({"hook_name": "h", "normalize_activations": False}, saelens(plain), SAELENS, plain, "h"),
        ({"hook_name": "h", "apply_b_dec_to_input": False}, saelens(plain), SAELENS, made(), "h"),
        ({"hook_point": "h"}, saelens(plain) | {"scaling_factor": torch.ones(COUNT)}, SAELENS, plain, "h"),
        (old, saelens(top), SAELENS, top, "h"),
        ({"architecture": "topk", "k": 5, "metadata": {"hook_name": "h"}}, saelens(top), SAELENS, top, "h"),
        ({"k": 5, "d_in": WIDE, "activation": "topk"}, sparsify(top), SPARSIFY, made("topk", centred=True), "layers.0"),
    ]
    for i, (config, weights, name, wanted, hook) in enumerate(cases):
        folder = tmp_path / f"{i}" / "layers.0"
        folder.parent.mkdir()
        read = SparseAutoencoder.load(written(folder, config, weights, name))
        assert read.hook == hook
        torch.testing.assert_close(read.encode(X.float()), wanted.encode(X).float())
        torch.testing.assert_close(read.decode(read.encode(X.float())), wanted.decode(wanted.encode(X)).float())


@pytest.mark.parametrize(
    ("config", "change", "match"),
    [
        ({"architecture": "gated"}, {}, r"is 'gated', which is not computed here; use one with relu, topk or jumprelu"),
        (
            {"normalize_activations": "layer_norm"},
            {},
            r"has normalize_activations = 'layer_norm', which is not computed",
        ),
        ({"rescale_acts_by_decoder_norm": True}, {}, "rescale_acts_by_decoder_norm = True"),
        ({"signed": True}, {}, "signed = True"),  # sparsify: the k of the largest size
        ({"gram_lookup": True}, {}, "gram_lookup = True"),  # sparsify: less a mean of n-grams
        ({"architecture": "jumprelu"}, {}, r"has the weights .* and not just .*threshold"),
        ({}, {"scaling_factor": 2 * torch.ones(COUNT)}, "scaling_factor"),
        ({"architecture": "topk"}, {}, r"k is None for 40 features"),
        ({"architecture": "topk", "k": 41}, {}, r"k is 41 for 40 features"),
        ({"hook_name": "a", "hook_name_out": "b"}, {}, "transcoder, from a to b"),
        ({}, {"b_dec": torch.ones(3)}, r"decoder bias is \[3\], and its encoder \[16, 40\]; it must be \[16\]"),
    ],
)
def test_what_computes_something_else_is_refused(config, change, match, tmp_path):
    with pytest.raises(ModelError, match=match):
        SparseAutoencoder.load(written(tmp_path / "it", config, saelens(made()) | change))


def test_files_that_are_none(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*cfg.json: No such file"):
        SparseAutoencoder.load(tmp_path)
    (tmp_path / "cfg.json").write_text("[]")
    with pytest.raises(ModelError, match=r"neither sae_weights.safetensors nor sae.safetensors"):
        SparseAutoencoder.load(tmp_path)
    (tmp_path / SAELENS).write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"cannot read the autoencoder in .*; copy it anew"):
        SparseAutoencoder.load(tmp_path)
    with pytest.raises(ModelError, match="holds list"):
        SparseAutoencoder.load(written(tmp_path, [], saelens(made())))
    with pytest.raises(ModelError, match="is 'groupmax'"):
        SparseAutoencoder.load(written(tmp_path / "b", {"activation": "groupmax"}, sparsify(made()), SPARSIFY))


# --------------------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("hook", "path"),
    [
        ("blocks.0.hook_resid_post", "model.layers.0"),
        ("blocks.1.hook_resid_pre", "model.layers.0"),
        ("blocks.1.hook_mlp_out", "model.layers.1.mlp.down_proj"),
        ("blocks.1.hook_attn_out", "model.layers.1.self_attn.o_proj"),
        ("layers.1", "model.layers.1"),
        ("layers.1.mlp", "model.layers.1.mlp"),
        ("model.layers.1", "model.layers.1"),
    ],
)
def test_where_it_was_trained(hook, path, explainer):
    assert made(hook=hook).path(explainer.bound) == path
    assert made(hook=hook).path(explainer.bound, "model.norm") == "model.norm"


def test_a_norm_behind_a_branch_is_part_of_what_it_puts_out():
    """As TransformerLens has it: its hooks are behind Gemma's second norms."""
    size = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    gemma = tf.Gemma2ForCausalLM(tf.Gemma2Config(**size, num_attention_heads=2, num_key_value_heads=1)).eval()
    gpt = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2)).eval()
    bert = tf.BertForMaskedLM(tf.BertConfig(vocab_size=31, num_hidden_layers=2, hidden_size=16, num_attention_heads=2))
    for model, mlp, attention in (
        (gemma, "model.layers.1.post_feedforward_layernorm", "model.layers.1.post_attention_layernorm"),
        (gpt, "transformer.h.1.mlp.c_proj", "transformer.h.1.attn.c_proj"),
        (bert.eval(), "bert.encoder.layer.1.output.dense", "bert.encoder.layer.1.attention.output.dense"),
    ):
        bound = BoundModel(model)
        assert made(hook="blocks.1.hook_mlp_out").path(bound) == mlp
        assert made(hook="blocks.1.hook_attn_out").path(bound) == attention
        assert not any(each._forward_hooks for each in model.modules())


@pytest.mark.parametrize("hook", ["", "blocks.2.hook_resid_post", "mlp", "layers.7"])
def test_nobody_knows_where(hook, explainer):
    with pytest.raises(ModelError, match=r"where the autoencoder belongs in LlamaForCausalLM is not known: .* path="):
        explain_features(explainer, TEXT, made(hook=hook))


def test_a_place_whose_output_has_the_tokens_of_all_rows_one_after_another(byte_tokenizer):
    """OPT's MLP: before, the message counted features for numbers of the output, and had no way on."""
    opt = lrpx.Explainer(SAMPLES["opt"].build(), byte_tokenizer, task=lrpx.Task.CAUSAL)
    with pytest.raises(
        ModelError, match=r"fc2 is \[15, 16\] for \[3, 5\] tokens, which has no vector .*; pass another"
    ):
        explain_features(opt, [[5, 9, 3, 12, 7]] * 3, made(), target=7, path="model.decoder.layers.0.fc2")


@pytest.mark.parametrize("hook", ["blocks.0.hook_resid_mid", "blocks.0.attn.hook_z"])
def test_a_place_that_is_no_modules_output(hook, explainer):
    """What heads give is the input of a module, whose output is as wide: no path is asked for."""
    with pytest.raises(
        ModelError, match=rf"reads {hook} of TransformerLens, which is known here as no module's output"
    ):
        made(hook=hook).path(explainer.bound)


def test_another_width_and_other_places(explainer, byte_tokenizer):
    with pytest.raises(ModelError, match=r"reads 16 numbers, and the output of model.layers.0.mlp.gate_proj has 24"):
        explain_features(explainer, TEXT, made(), path="model.layers.0.mlp.gate_proj")
    module = explainer.model
    module.model.layers[1] = module.model.layers[0]
    with pytest.raises(ModelError, match="is called several times in one run"):
        explain_features(lrpx.Explainer(module, byte_tokenizer), TEXT, made(), path=PATH)


def test_questions_that_are_none(explainer):
    with pytest.raises(TargetError, match="index 400"):
        explain_features(explainer, TEXT, made(), target=400)
    with pytest.raises(TargetError, match="both a target object and a contrast"):
        explain_features(explainer, TEXT, made(), target=lrpx.Logit(40), contrast=41)
    with pytest.raises(InputError):
        explain_features(explainer, "", made())


def test_a_classifier(byte_tokenizer):
    model = BoundModel(tiny.bert_classifier(vocab_size=340, pad_token_id=0), byte_tokenizer)
    found = explain_features(lrpx.Explainer.of(model), TEXT, made(), path="bert.encoder.layer.0")
    alone = explain_features(lrpx.Explainer.of(model), [TEXT, OTHER], made(), path="bert.encoder.layer.0")[0]
    assert found.total == pytest.approx(alone.total, abs=1e-9)


def test_a_model_that_has_its_tokens_before_the_rows():
    explainer, sae = lrpx.Explainer(tiny.xlnet()), made()
    texts = [[3, 7, 11], [6, 9, 21], [8, 8, 4]]  # as many as each has tokens
    together = explain_features(explainer, texts, sae, 8, path="transformer.layer.0")
    for text, found in zip(texts, together, strict=True):
        alone = explain_features(explainer, text, sae, 8, path="transformer.layer.0")
        torch.testing.assert_close(found.sparse.to_dense(), alone.sparse.to_dense(), rtol=0, atol=1e-9)
        torch.testing.assert_close(found.error, alone.error, rtol=0, atol=1e-9)
