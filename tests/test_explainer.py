"""Explainer: every task, target, method and kind of input, one input at a time."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM, BertForSequenceClassification, LlamaForCausalLM

import lrpx
from lrpx import Contrast, Explainer, Logit, LogProb, Margin
from lrpx.errors import InputError, MethodError
from lrpx.methods import METHODS, Backward
from lrpx.methods._gradients import l1
from lrpx.tasks import Task
from tests import tiny
from tests.reference import models

IDS = [3, 14, 15, 9, 26]
TEXT = "The keys to the cabinet"


def stock(model, ids, **extra):
    """The logits of the model run on its own, ``[T, V]`` or ``[V]`` for a classifier."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **extra).logits[0]


def near(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, check_dtype=False)


@pytest.fixture
def causal(byte_tokenizer):
    return Explainer(models.tiny_gpt2(vocab_size=len(byte_tokenizer)), byte_tokenizer)


# ------------------------------------------------------------------------- causal models


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.opt, tiny.neox, tiny.mamba])
@pytest.mark.parametrize(("position", "at"), [(None, 4), (-1, 4), (2, 2), (-5, 0)])
def test_value_and_prediction_are_the_stock_models_own(build, position, at):
    model = build()
    a = Explainer(model)(IDS, position=position)
    logits = stock(model, IDS)[at]
    assert a.prediction.id == int(logits.argmax())
    near(a.explained.value, float(logits.max()))
    near(a.prediction.probability, float(logits.softmax(-1).max()), 1e-6)
    assert a.explained.position == at
    assert a.ids == tuple(IDS)
    assert a.segments == (("input", 0, 5),)
    assert a.relevance.shape == (5,)


def test_tokens_after_the_explained_position_of_a_causal_model_get_nothing():
    a = Explainer(models.tiny_llama())(IDS, position=2)
    assert a.relevance[3:].tolist() == [0, 0]
    assert (a.relevance[:3] != 0).all()


def test_a_text_of_one_token_is_explained():
    a = Explainer(models.tiny_gpt2())([7])
    assert len(a) == 1
    assert a.relevance[0] != 0


def test_text_target_and_contrast_read_in_words(causal):
    a = causal(TEXT, target=" are", contrast=" is")
    logits = stock(causal.model, a.ids)[-1]
    are, is_ = (causal.tokenizer(text)["input_ids"][0] for text in (" are", " is"))
    near(a.explained.value, float(logits[are] - logits[is_]))
    assert a.explained.description == "logit of ' are' − logit of ' is'"
    assert "".join(a.tokens) == TEXT
    assert a.words().tokens == ("The", " keys", " to", " the", " cabinet")


# ---------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (7, lambda z: z[7]),
        (Logit(7), lambda z: z[7]),
        (Logit(), lambda z: z.max()),
        (Contrast(7, 3), lambda z: z[7] - z[3]),
        (LogProb(7), lambda z: z.log_softmax(-1)[7]),
        (LogProb(), lambda z: z.log_softmax(-1).max()),
        (Margin(7), lambda z: z[7] - torch.cat([z[:7], z[8:]]).max()),
        (Margin(), lambda z: z.topk(2).values[0] - z.topk(2).values[1]),
        (torch.tensor(7), lambda z: z[7]),
    ],
)
def test_targets_by_index_and_object(target, expected):
    model = models.tiny_llama()
    near(Explainer(model)(IDS, target).explained.value, float(expected(stock(model, IDS)[-1])))


def test_a_contrast_of_the_default_target_is_against_the_prediction():
    model = models.tiny_llama()
    z = stock(model, IDS)[-1]
    other = int(z.argmin())
    near(Explainer(model)(IDS, contrast=other).explained.value, float(z.max() - z.min()))


def test_a_target_object_with_a_string_means_its_token(causal):
    by_text = causal(TEXT, LogProb(" are"))
    by_id = causal(TEXT, LogProb(causal.tokenizer(" are")["input_ids"][0]))
    assert by_text == by_id
    assert by_text.explained.description == "log-probability of ' are'"


def test_the_relevance_of_a_contrast_is_the_difference_of_the_two():
    explain = Explainer(models.tiny_llama())
    difference = explain(IDS, 7).relevance - explain(IDS, 3).relevance
    near(explain(IDS, 7, 3).relevance, difference)


# ---------------------------------------------------------------------------- methods


def autograd(model, ids, token):
    """Embeddings and their plain gradient, by autograd alone."""
    x = model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=x).logits[0, -1, token], x)
    return x[0].detach(), gradient[0]


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.opt])
@pytest.mark.parametrize(
    ("method", "reduce"),
    [
        ("gradient-x-input", lambda x, g: (x * g).sum(-1)),
        ("gradient-l1", lambda x, g: g.abs().sum(-1)),
        ("gradient-l2-squared", lambda x, g: g.square().sum(-1)),
    ],
)
def test_gradient_methods_equal_plain_autograd(build, method, reduce):
    model = build()
    near(Explainer(model)(IDS, 7, method=method).relevance, reduce(*autograd(model, IDS, 7)))


@pytest.mark.parametrize(("method", "recipe"), [("attnlrp", lrpx.ATTNLRP), ("lrp", lrpx.LRP)])
def test_rule_methods_equal_propagate_by_hand(method, recipe):
    model = models.tiny_llama()
    with lrpx.propagate(model, recipe) as trace:
        logits = model(torch.tensor([IDS])).logits
    trace.explain(logits[0, -1, 7])
    near(Explainer(model)(IDS, 7, method=method).relevance, trace.relevance("model.embed_tokens")[0].sum(-1))


def test_a_method_by_name_by_object_and_by_recipe_is_the_same():
    explain = Explainer(models.tiny_llama())
    by_name = explain(IDS, method="lrp")
    assert by_name == explain(IDS, method=METHODS["lrp"]) == explain(IDS, method=lrpx.LRP)
    own = lrpx.ATTNLRP.at(layers=1, use=lrpx.LRP)
    a = explain(IDS, method=own)
    assert a.provenance.method == own.name
    assert a.provenance.recipe == own.describe()
    assert not torch.equal(a.relevance, by_name.relevance)
    norm = explain(IDS, method=Backward("own", lrpx.GRADIENT, l1))
    assert norm.provenance.method == "own"
    assert torch.equal(norm.relevance, explain(IDS, method="gradient-l1").relevance)


# ----------------------------------------------------------------------------- the ledger


LEDGERS = [
    models.tiny_llama,
    models.tiny_gpt2,
    models.tiny_bert,
    models.tiny_t5,
    tiny.opt,
    tiny.neox,
    tiny.roberta,
    tiny.bart,
    tiny.marian,
    tiny.bert_classifier,
    tiny.gpt2_classifier,
]


@pytest.mark.parametrize("build", LEDGERS)
@pytest.mark.parametrize("method", ["attnlrp", "lrp", "gradient-x-input"])
def test_a_ledger_closes_and_its_tokens_are_the_relevance(build, method):
    explain = Explainer(build())
    settings = {"position": -1} if explain.task is Task.MASKED else {}
    plain = explain(IDS, 2, method=method, **settings)
    a = explain(IDS, 2, method=method, ledger=True, **settings)
    assert plain.ledger is None
    assert torch.equal(a.relevance, plain.relevance)
    assert a.ledger.explained == a.explained.value == plain.explained.value
    assert a.ledger.closes(1e-9)
    near(a.ledger.by_kind()["tokens"], float(a.relevance.sum()), 1e-12)
    assert a.words().ledger == a.ledger


def test_each_kind_of_entry_has_its_name():
    ledger = Explainer(models.tiny_bert())(IDS, position=2, ledger=True).ledger
    names = {kind: [entry.name for entry in ledger.entries if entry.kind == kind] for kind in ledger.by_kind()}
    assert names["tokens"] == ["bert.embeddings.word_embeddings"]
    assert names["positions"] == ["bert.embeddings.position_embeddings"]
    assert names["token types"] == ["bert.embeddings.token_type_embeddings"]
    assert "bert.encoder.layer.0.output.dense.bias" in names["biases"]
    assert len(names["softmax residue"]) == 2


def test_both_embeddings_of_an_encoder_decoder_model_are_tokens():
    ledger = Explainer(tiny.marian())(IDS, decoder=[1, 8, 6], method="lrp", ledger=True).ledger
    names = {entry.name for entry in ledger.entries if entry.kind == "tokens"}
    assert names == {"model.encoder.embed_tokens", "model.decoder.embed_tokens"}


@pytest.mark.parametrize("target", [Logit(7), Contrast(7, 3), LogProb(7), Margin()])
@pytest.mark.parametrize("method", ["attnlrp", "lrp"])
def test_the_ledger_of_every_target_closes(target, method):
    a = Explainer(models.tiny_llama())(IDS, target, method=method, ledger=True)
    assert a.ledger.closes(1e-9)
    assert ("target" in {entry.name for entry in a.ledger.entries}) == isinstance(target, LogProb)


@pytest.mark.parametrize("method", ["gradient-l1", "gradient-l2-squared", Backward("own", lrpx.LRP, l1)])
def test_scores_in_other_units_have_no_ledger(method):
    explain = Explainer(models.tiny_llama())
    with pytest.raises(MethodError, match=r"(gradient-l\S+|own) does not measure .*leave ledger out, or use attnlrp"):
        explain(IDS, method=method, ledger=True)


def test_a_list_has_a_ledger_for_each_row():
    explain = Explainer(models.tiny_gpt2())
    rows = [IDS, [6], [8, 9, 3]]
    many = explain(rows, ledger=True)
    assert many == [explain(row, ledger=True) for row in rows]
    assert all(a.ledger.closes(1e-9) for a in many)


def test_a_ledger_can_be_saved(tmp_path):
    a = Explainer(models.tiny_gpt2())(IDS, ledger=True)
    a.save(tmp_path / "a")
    assert lrpx.Attribution.load(tmp_path / "a") == a
    assert "transformer.wpe" in a.to_html()


# ------------------------------------------------------------------ masked models, classifiers


def test_a_masked_model_is_explained_at_its_mask(piece_tokenizer):
    model = models.tiny_bert(vocab_size=len(piece_tokenizer))
    explain = Explainer(model, piece_tokenizer)
    a = explain("the keys to the cabinet [MASK] on the table", target="are", contrast="is")
    at = a.ids.index(piece_tokenizer.mask_token_id)
    assert a.explained.position == at
    are, is_ = piece_tokenizer.convert_tokens_to_ids(["are", "is"])
    logits = stock(model, a.ids)[at]
    near(a.explained.value, float(logits[are] - logits[is_]))
    assert a.special[0]
    assert a.special[at]
    assert not a.special[1]
    elsewhere = explain("the keys [MASK] the cabinet [MASK]", position=3)
    assert elsewhere.explained.position == 3


def test_a_classifier_takes_labels_and_indices(piece_tokenizer):
    model = tiny.bert_classifier(vocab_size=len(piece_tokenizer))
    explain = Explainer(model, piece_tokenizer)
    text = "what a lovely film"
    a = explain(text, target="positive", contrast="negative")
    logits = stock(model, a.ids)
    near(a.explained.value, float(logits[1] - logits[0]))
    assert a.explained.description == "logit of 'positive' − logit of 'negative'"
    assert a.explained.position is None
    assert explain(text, 1, 0) == a
    assert explain(text).prediction.text == model.config.id2label[int(logits.argmax())]


@pytest.mark.parametrize("build", [tiny.gpt2_classifier, tiny.llama_classifier, tiny.bert_classifier])
@pytest.mark.parametrize("settings", [{}, {"pad_token_id": None}])
def test_classifiers_of_every_kind_have_the_stock_value(build, settings):
    model = build(**settings)
    a = Explainer(model)(IDS, target=2)
    near(a.explained.value, float(stock(model, IDS)[2]))
    assert (a.relevance != 0).all()


def test_labels_can_be_set_on_one_side_only():
    model = tiny.gpt2_classifier(id2label={0: "low", 1: "mid", 2: "high"}, label2id=None)
    assert Explainer(model)(IDS, "high").explained.value == Explainer(model)(IDS, 2).explained.value


def test_labels_of_a_config_that_was_read_as_json():
    """Its numbers are texts then."""
    model = tiny.gpt2_classifier()
    model.config.id2label, model.config.label2id = {"0": "low", "1": "mid", "2": "high"}, None
    found = Explainer(model)([5, 6, 7], target="high")
    assert found.explained.description == Explainer(model)([5, 6, 7], target=2).explained.description
    assert "'high'" in found.explained.description
    assert found.prediction.text in ("low", "mid", "high")


# ---------------------------------------------------------------------------- seq2seq


@pytest.mark.parametrize("build", [models.tiny_t5, tiny.bart])
def test_an_encoder_decoder_model_is_explained_over_both_texts(build):
    model = build()
    explain = Explainer(model)
    a = explain(IDS, decoder=[2, 8, 6], target=7)
    logits = stock(model, IDS, decoder_input_ids=torch.tensor([[2, 8, 6]]))
    near(a.explained.value, float(logits[-1, 7]))
    assert a.explained.position == 2
    assert a.segments == (("encoder", 0, 5), ("decoder", 5, 8))
    assert a.ids == (*IDS, 2, 8, 6)
    assert (a.relevance != 0).all()
    first = explain(IDS, decoder=[2, 8, 6], target=7, position=0)
    near(first.explained.value, float(logits[0, 7]))
    assert first.relevance[6:].tolist() == [0, 0]


def test_the_decoder_begins_with_the_configs_start_token():
    model = models.tiny_t5()
    assert Explainer(model)(IDS).ids == (*IDS, 0)
    near(
        Explainer(model)(IDS, 7).explained.value,
        float(stock(model, IDS, decoder_input_ids=torch.tensor([[0]]))[0, 7]),
    )


def test_a_decoder_text_follows_the_start_token(byte_tokenizer):
    model = models.tiny_t5(vocab_size=len(byte_tokenizer), decoder_start_token_id=0)
    a = Explainer(model, byte_tokenizer)(TEXT, decoder="The key", target=" is")
    written = tuple(byte_tokenizer("The key")["input_ids"])
    assert a.ids == (*byte_tokenizer(TEXT)["input_ids"], 0, *written)
    _, start, end = a.segments[1]
    assert a.tokens[start:end] == ("<pad>", *Explainer(model, byte_tokenizer)("The key").tokens[: len(written)])
    near(float(a.words().relevance.sum()), float(a.relevance.sum()))
    assert [name for name, _, _ in a.words().segments] == ["encoder", "decoder"]


def test_a_decoder_text_follows_the_token_that_must_come_first(byte_tokenizer):
    model = models.tiny_t5(vocab_size=len(byte_tokenizer), decoder_start_token_id=0)
    model.generation_config.forced_bos_token_id = 9  # as of BART, or of the language of a translation
    given = byte_tokenizer(TEXT, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=3, do_sample=False)[0].tolist()
    assert made[:2] == [0, 9]
    explain = Explainer(model, byte_tokenizer)
    written = byte_tokenizer("The key")["input_ids"]
    ids = [0, 9, *written]
    a = explain(TEXT, decoder="The key", target=" is")
    assert a.ids == (*byte_tokenizer(TEXT)["input_ids"], *ids)
    assert a == explain(TEXT, decoder=ids, target=" is")
    assert explain(TEXT).ids[-1] == 0
    assert explain(TEXT, decoder=[0, *written]).ids[-len(written) - 1] == 0
    model.generation_config.forced_bos_token_id = byte_tokenizer.bos_token_id
    own = explain(TEXT, decoder="<s>The key")  # it has the token itself
    assert own == explain(TEXT, decoder="The key")
    assert own.ids[-len(written) - 2 :] == (0, byte_tokenizer.bos_token_id, *written)


def test_the_start_token_of_the_generation_config_comes_before_a_texts_first():
    model = tiny.bart(bos_token_id=0, decoder_start_token_id=None)
    assert Explainer(model)(IDS).ids == (*IDS, 0)
    model.generation_config.decoder_start_token_id = 9
    assert model.generate(torch.tensor([IDS]), max_new_tokens=1)[0, 0] == 9
    assert Explainer(model)(IDS).ids == (*IDS, 9)
    model.config.decoder_start_token_id = 7
    with pytest.raises(InputError, match="config names 7 as decoder_start_token_id, its generation config 9"):
        Explainer(model)(IDS)
    assert Explainer(model)(IDS, decoder=[9]).ids == (*IDS, 9)


def test_a_decoder_text_without_the_language_that_must_come_first_is_refused(byte_tokenizer):
    model = models.tiny_t5(vocab_size=len(byte_tokenizer), decoder_start_token_id=0)
    (language,) = byte_tokenizer("!")["input_ids"]
    model.generation_config.lang_to_id = {"<|en|>": language}  # as Whisper has it
    explain = Explainer(model, byte_tokenizer)
    with pytest.raises(InputError, match=r"text has none; write <\|en\|><\|transcribe\|>"):
        explain(TEXT, decoder="The key")
    written = byte_tokenizer("The key")["input_ids"]
    assert explain(TEXT, decoder="!The key").ids[-len(written) - 2 :] == (0, language, *written)
    assert explain(TEXT, decoder=[0, *written]).ids[-len(written) - 1] == 0
    assert explain(TEXT).ids[-1] == 0


# ------------------------------------------------------------------------ kinds of input


def test_ids_come_as_a_list_a_tuple_a_tensor_or_an_array():
    explain = Explainer(models.tiny_gpt2())
    expected = explain(IDS)
    for given in (
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        torch.tensor(IDS).numpy(),
        list(torch.tensor(IDS)),
    ):
        assert explain(given) == expected
    assert expected.tokens[0] == "#3"


def test_chat_messages_are_the_templates_ids_as_they_are(causal):
    messages = [{"role": "user", "content": "Where are the keys?"}]
    a = causal(messages)
    expected = causal.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(a.ids) == expected
    assert a.special[0]
    assert a.tokens[0] == "<s>"
    assert "".join(a.tokens).endswith("<s>assistant: ")


def test_special_tokens_written_in_a_text_are_those_tokens(causal):
    a = causal("<s>The keys")
    assert a.ids[0] == causal.tokenizer.bos_token_id
    assert a.special[:2] == (True, False)


def test_the_surroundings_gradient_mode_does_not_matter():
    explain = Explainer(models.tiny_llama())
    expected = explain(IDS)
    with torch.inference_mode():
        assert explain(IDS) == expected
    with torch.no_grad():
        near(explain([IDS, IDS[:2]])[0].relevance, expected.relevance)


# ------------------------------------------------------------------------- the user's own


def test_nothing_of_the_users_is_changed(causal):
    model, tokenizer = causal.model, causal.tokenizer
    model.requires_grad_(True)
    model.transformer.h[0].requires_grad_(False)
    tokenizer.padding_side = "left"

    def state():
        return {
            "weights": {name: value.clone() for name, value in model.state_dict().items()},
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "grad": [p.grad for p in model.parameters()],
            "training": [m.training for m in model.modules()],
            "hooks": [
                len(hooks)
                for m in model.modules()
                for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
            ],
            "attributes": [sorted(vars(m)) for m in model.modules()],
            "config": copy.deepcopy(model.config.to_dict()),
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "padding": (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.init_kwargs.copy()),
            "random": (torch.get_rng_state().tolist(), random.getstate()),
            "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        }

    before = state()
    causal([TEXT, "The boys"], [" are", " is"])
    causal(TEXT, method="gradient-l2-squared")
    with pytest.raises(lrpx.LRPxError):
        causal(TEXT, target="no such token")
    after = state()
    assert all(torch.equal(after["weights"][name], value) for name, value in before["weights"].items())
    for name in before.keys() - {"weights"}:
        assert after[name] == before[name], name


# --------------------------------------------------------------------------- real models


def test_real_minilm_as_a_classifier_and_as_a_masked_model(minilm):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    encoder = AutoModel.from_pretrained(minilm, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classifier = BertForSequenceClassification(encoder.config).eval()
        masked = BertForMaskedLM(encoder.config).eval()
    classifier.bert.load_state_dict(encoder.state_dict())
    masked.bert.load_state_dict(encoder.state_dict(), strict=False)
    text = "The keys to the cabinet are unbelievably rusty."
    a = Explainer(classifier, tokenizer)(text, target="LABEL_1")
    near(a.explained.value, float(stock(classifier, a.ids)[1]), 1e-5)
    assert a.tokens[0] == "[CLS]"
    assert " unbelievably" in a.words().tokens
    b = Explainer(masked, tokenizer)("The keys [MASK] rusty.", target="are", contrast="is")
    assert b.tokens[b.explained.position] == "[MASK]"
    wanted = stock(masked, b.ids)[b.explained.position]
    ids = tokenizer.convert_tokens_to_ids(["are", "is"])
    near(b.explained.value, float(wanted[ids[0]] - wanted[ids[1]]), 1e-5)
    c = Explainer(masked, tokenizer)("The keys [MASK] rusty.", target="##s", contrast="s")
    assert c.explained.description == "logit of '##s' − logit of 's'"


def test_real_stories_llama(shared_data):
    folder = shared_data / "models" / "stories260K" / "hf"
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [1, 403, 407, 261, 378]
    a = Explainer(model)(ids)
    z = stock(model, ids)[-1]
    near(a.explained.value, float(z.max()), 1e-5)
    closed = Explainer(model.double())(ids, method="lrp")
    near(float(closed.relevance.sum()), closed.explained.value, 1e-4)


def test_the_bundled_model_loads_and_explains_in_batches():
    explain = Explainer.from_pretrained()
    texts = ["The keys to the cabinet", "The boy"]
    single = [explain(text, " are", " is") for text in texts]
    for one, many in zip(single, explain(texts, " are", " is"), strict=True):
        assert "".join(one.tokens) == "".join(many.tokens)
        torch.testing.assert_close(many.relevance, one.relevance, rtol=1e-4, atol=1e-4)
    assert single[0].provenance.model == "lrpx bundled model"


@pytest.mark.parametrize(
    "build", [models.tiny_gpt2, models.tiny_t5, models.tiny_bert, models.tiny_llama, tiny.bert_classifier, tiny.bart]
)
def test_a_saved_folder_loads_with_the_class_its_config_names(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    explain = Explainer.from_pretrained(tmp_path)
    assert type(explain.model) is type(model)
    assert explain.tokenizer is None, "transformers makes up a tokenizer without a vocabulary"
    assert explain.model.dtype == torch.float64
    single = Explainer.from_pretrained(str(tmp_path), dtype="float32", attn_implementation="eager")
    assert single.model.dtype == torch.float32
    assert single.model.config._attn_implementation == "eager"


def test_autocast_stands_in_the_result():
    explainer = Explainer(models.tiny_llama().float())
    plain = explainer(IDS, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = explainer(IDS, 3)
        assert explainer.neurons(IDS, 3, top=1).provenance.dtype == cast.provenance.dtype
    assert [each.provenance.dtype for each in (plain, cast)] == ["float32", "float32, autocast to bfloat16"]
    assert not torch.equal(plain.relevance.clone(), cast.relevance.clone())


def test_an_intervention_stands_in_the_result(tmp_path):
    explainer = Explainer(models.tiny_llama(), None)
    plain = explainer(IDS, 3)
    add = lrpx.interventions.Add(torch.ones(explainer.model.config.hidden_size), positions=[1])
    with lrpx.intervene(explainer.model, {"model.layers.0.mlp": {3: 0.0, 4: 0.0, 7: lrpx.Scale(2.0)}}):
        scaled = explainer(IDS, 3)
        assert explainer.neurons(IDS, 3, top=1).provenance.model == scaled.provenance.model
        with lrpx.intervene(explainer.model, {"model.layers.1": add}):
            both = explainer(IDS, 3).provenance.model
    assert scaled.provenance.model == (
        f"{plain.provenance.model}; changed: input of model.layers.0.mlp.down_proj[7] by Scale(factor=2.0); "
        "changed: input of model.layers.0.mlp.down_proj[3-4] by Set(value=0.0)"
    )
    added = both.removeprefix(scaled.provenance.model)
    assert added.startswith("; changed: output of model.layers.1 by Add(amount=tensor [")
    assert added.endswith(", positions=[1])")
    scaled.save(tmp_path / "scaled")
    assert lrpx.Attribution.load(tmp_path / "scaled") == scaled
    with lrpx.interventions.record(explainer.model, ["model.layers.1"]):
        assert explainer(IDS, 3) == plain


def test_the_adapters_that_are_on_stand_in_the_result():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):  # peft's own, of what transformers will remove
        model = peft.get_peft_model(models.tiny_llama(), lora, adapter_name="one").double()
        model.add_adapter("two", lora)
    explainer = Explainer(model.eval(), None, task=Task.CAUSAL)
    name = explainer.bound.name
    assert explainer(IDS, 3).provenance.model == f"{name}; adapter one"
    model.set_adapter("two")
    assert explainer(IDS, 3).provenance.model == f"{name}; adapter two"
    with model.disable_adapter():
        assert explainer(IDS, 3).provenance.model == name
    model.merge_adapter(["one", "two"])
    assert explainer(IDS, 3).provenance.model == f"{name}; adapter one, two"


class NGrams(torch.nn.Module):
    """A model that looks each token up, and a number that is made of it and the one before."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens, self.grams, self.head = (torch.nn.Embedding(n, 8) for n in (31, 64, 31))
        self.double().eval()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids):
        before = torch.nn.functional.pad(input_ids[:, :-1], (1, 0))
        numbers = {
            "hash": (input_ids * 3) ^ (before * 5), "before": before, "same": input_ids,
            "places": torch.arange(input_ids.shape[1]).expand_as(input_ids),
        }[self.kind] % 64  # fmt: skip
        return (self.tokens(input_ids) + self.grams(numbers)).cumsum(1) @ self.head.weight.T


@pytest.mark.parametrize("kind", ["hash", "before"])
def test_what_n_grams_are_worth_is_said_to_be_no_tokens(kind):
    with pytest.warns(UserWarning, match=r"^grams looks up other numbers than the tokens' ids.*entry of the ledger"):
        found = Explainer(NGrams(kind), task=Task.CAUSAL)([3, 14, 15, 9], target=7, method="lrp", ledger=True)
    kinds = found.ledger.by_kind()
    assert kinds["inputs"] != 0
    assert found.relevance.sum().item() + kinds["inputs"] == pytest.approx(found.explained.value)


@pytest.mark.parametrize("kind", ["same", "places"])
def test_a_second_table_of_tokens_and_one_of_places_are_no_n_grams(kind):
    found = Explainer(NGrams(kind), task=Task.CAUSAL)([3, 14, 15, 9], target=7, method="lrp", ledger=True)
    assert found.relevance.sum().item() == pytest.approx(found.ledger.by_kind()["tokens"])
