"""Every kind of input: pairs, questions about contexts, classes of tokens, choices, embeddings, images, and what
tokenizers and processors return."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close

from lrpx import LRP, METHODS, Explainer, Logit, LogProb, propagate
from lrpx._files import checksum
from lrpx._fingerprints import LOOKED_AT, _reading
from lrpx.coverage._classes import every_class
from lrpx.coverage._inputs import tiny_inputs
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import InputError, MethodError, ModelError, TargetError
from lrpx.model import BoundModel, Spec
from lrpx.targets import Similarity, Span
from lrpx.tasks import Task
from tests import tiny
from tests.reference import models

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 200,
    "max_position_embeddings": 64,
}  # fmt: skip


def bert(kind, **more):
    torch.manual_seed(0)
    model = kind(tf.BertConfig(**SIZES, **more, initializer_range=0.3)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def by_hand(model, read, **inputs):
    """CP-LRP through ``propagate`` itself, on exactly the model's arguments."""
    with propagate(model, LRP, observe=()) as trace:
        output = model(**inputs)
        value = read(output)
    trace.explain(value)
    (source,) = [source for source in trace.sources if "word" in source.paths[0]]
    return trace.source_relevance(source).sum(-1), float(value.detach())


def same(found, expected, value):
    torch.testing.assert_close(found.relevance, expected, rtol=0, atol=1e-12)
    assert found.explained.value == pytest.approx(value, abs=1e-12)


# --------------------------------------------------------------------------- texts and pairs


def test_a_pair_of_texts_is_one_input(piece_tokenizer):
    model = bert(tf.BertForSequenceClassification, num_labels=3)
    pair = ("the key is small", "the keys are tall")
    found = Explainer(model, piece_tokenizer)(pair, 1, method="lrp")
    inputs = piece_tokenizer(*pair, return_tensors="pt")
    assert found.ids == tuple(inputs["input_ids"][0].tolist())
    expected, value = by_hand(model, lambda output: output.logits[0, 1], **inputs)
    same(found, expected[0], value)


@pytest.fixture
def typed_tokenizer(piece_backend):
    """One that says which of two texts a token is of."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(piece_backend)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    )


def test_types_of_tokens_are_carried_in_batches(typed_tokenizer):
    model = bert(tf.BertForSequenceClassification, num_labels=3)
    explain = Explainer(model, typed_tokenizer)
    pairs = [
        ("the key is small", "the keys are tall"),
        ("a film", "what a terrible ending to the film"),
        "the girl",
    ]
    for found, given in zip(explain(pairs, 1, method="lrp"), pairs, strict=True):
        inputs = typed_tokenizer(*(given if isinstance(given, tuple) else [given]), return_tensors="pt")
        assert bool(inputs["token_type_ids"].any()) == isinstance(given, tuple)
        expected, value = by_hand(model, lambda output: output.logits[0, 1], **inputs)
        same(found, expected[0], value)


def test_what_a_tokenizer_returns_is_taken_as_it_is(piece_tokenizer):
    model = bert(tf.BertForSequenceClassification, num_labels=3)
    explain = Explainer(model, piece_tokenizer)
    texts = ["the key is small", "the keys to the old cabinets are under the table"]
    padded = piece_tokenizer(texts, padding=True, return_tensors="pt")
    assert not padded["attention_mask"].all()
    for given in (padded, dict(padded), piece_tokenizer(texts), piece_tokenizer(texts, padding=True)):
        for found, text in zip(explain(given, 1, method="lrp"), texts, strict=True):
            expected = explain(text, 1, method="lrp")
            assert found.tokens == expected.tokens, "no padding is explained"
            same(found, expected.relevance, expected.explained.value)
    one = piece_tokenizer(texts[0], return_tensors="pt")
    same(
        explain(one, 1, method="lrp"),
        explain(texts[0], 1, method="lrp").relevance,
        explain(texts[0], 1).explained.value,
    )


def test_padding_on_the_left_is_taken_off(byte_tokenizer):
    model = models.tiny_gpt2(vocab_size=400)
    explain = Explainer(model, byte_tokenizer)
    byte_tokenizer.padding_side = "left"
    texts = ["The keys", "The keys to the cabinet are"]
    for found, text in zip(explain(byte_tokenizer(texts, padding=True, return_tensors="pt")), texts, strict=True):
        same(found, explain(text).relevance, explain(text).explained.value)


@pytest.mark.parametrize("as_", [torch.as_tensor, np.asarray, list, tuple], ids=["tensor", "array", "list", "tuple"])
@pytest.mark.parametrize("batch", [True, False])
def test_fields_of_any_kind_of_array(as_, batch):
    model = bert(tf.BertForSequenceClassification, num_labels=3)
    ids, types = [2, 14, 15, 9, 3], [0, 0, 1, 1, 1]

    def made(values):
        return as_([values]) if batch else as_(values)

    found = Explainer(model)({"input_ids": made(ids), "token_type_ids": made(types)}, 1, method="lrp")
    inputs = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([types])}
    expected, value = by_hand(model, lambda output: output.logits[0, 1], **inputs)
    same(found, expected[0], value)
    two = Explainer(model)({"input_ids": as_([ids, ids]), "token_type_ids": as_([types, types])}, 1, method="lrp")
    assert len(two) == 2
    same(two[1], expected[0], value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_type_ids": [0, 1]}, "the token_type_ids are int64 of shape .2. for 3 tokens"),
        ({"token_type_ids": ["a", "b", "c"]}, "the token_type_ids are a list that is no array of numbers"),
        ({"token_type_ids": [[0], [1, 2]]}, "the token_type_ids are a list that is no array of numbers"),
        ({"tokens": ["a", "b", "c"], "labels": "x"}, None),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    explain = Explainer(bert(tf.BertForSequenceClassification, num_labels=3))
    if message is None:
        assert explain({"input_ids": [2, 14, 3], **fields}).ids == (2, 14, 3)
        return
    with pytest.raises(InputError, match=message):
        explain({"input_ids": [2, 14, 3], **fields})


@pytest.mark.parametrize("build", [models.tiny_t5, tiny.bart])
def test_a_decoders_text_in_what_a_tokenizer_returned(build):
    explain = Explainer(build())
    written = [0, 8, 9]
    expected = explain([3, 14, 15], 7, decoder=written)
    padded = {
        "decoder_input_ids": torch.tensor([[*written, 1]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }
    for more in ({"decoder_input_ids": [written]}, {"decoder_input_ids": torch.tensor([written])}, padded):
        found = explain({"input_ids": torch.tensor([[3, 14, 15]]), **more}, 7)
        assert found.ids == expected.ids
        same(found, expected.relevance, expected.explained.value)
    with pytest.raises(InputError, match="the decoder's text is given twice"):
        explain({"input_ids": [3, 14], "decoder_input_ids": written}, decoder=written)


def test_choices_that_padding_would_end_are_refused(piece_tokenizer):
    """XLNet reads the last token of each choice."""
    torch.manual_seed(0)
    config = tf.XLNetConfig(vocab_size=200, d_model=16, n_layer=1, n_head=2, d_inner=24)
    explain = Explainer(tf.XLNetForMultipleChoice(config).eval(), piece_tokenizer)
    with pytest.raises(ModelError, match="XLNetForMultipleChoice reads the last token of each choice, which padding"):
        explain(("the key", ["is small", "are tall and the girl is small"]))


def test_ids_that_are_the_same_turned_round():
    """XLNet turns them round; with as many rows as tokens, only the numbers could tell."""
    torch.manual_seed(0)
    model = (
        tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24)).eval().double()
    )
    explain = Explainer(model)
    for found, ids in zip(explain([[8, 6], [6, 7]], 7, position=0), [[8, 6], [6, 7]], strict=True):
        expected = explain(ids, 7, position=0)
        same(found, expected.relevance, expected.explained.value)


def test_two_texts_of_which_one_has_types(typed_tokenizer):
    model = bert(tf.BertModel)
    explain = Explainer(model, typed_tokenizer)
    ids, texts = [2, 14, 15, 3], ("the key", "is small")
    inputs = typed_tokenizer(*texts, return_tensors="pt")
    assert inputs["token_type_ids"].any()
    with torch.no_grad():
        one = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        other = model(**inputs).last_hidden_state[0].mean(0)
    cosine = float(torch.nn.functional.cosine_similarity(one, other, 0))
    for pair in ((ids, texts), (texts, ids)):
        (found,) = explain([pair], method="lrp")
        assert found.explained.value == pytest.approx(cosine, abs=1e-12)


def test_targets_of_another_kind_are_refused(piece_tokenizer):
    asked = ("is it small", "the key is small")
    with pytest.raises(TargetError, match=r"has no Logit to explain; pass Span"):
        Explainer(bert(tf.BertForQuestionAnswering), piece_tokenizer)(asked, 3)
    with pytest.raises(TargetError, match="a sequence classifier has no Span to explain; pass a token or a class"):
        Explainer(bert(tf.BertForSequenceClassification, num_labels=3), piece_tokenizer)("the key", Span(1, 2))
    with pytest.raises(TargetError, match=r"a text encoder has no LogProb to explain; pass Similarity"):
        Explainer(bert(tf.BertModel), piece_tokenizer)(asked, LogProb(3))


def test_dropout_by_function_is_seen():
    model = models.tiny_llama()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.model.layers[0].self_attn.train()
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn is in training mode"):
        Explainer(model)([3, 4])


# --------------------------------------------------------------------------------- tasks


def test_the_class_of_a_token(piece_tokenizer):
    model = bert(tf.BertForTokenClassification, num_labels=3, label2id={"N": 0, "V": 1, "D": 2},
                 id2label={0: "N", 1: "V", 2: "D"})  # fmt: skip
    explain = Explainer(model, piece_tokenizer)
    text = "the key is small"
    inputs = piece_tokenizer(text, return_tensors="pt")
    for position, found in enumerate(explain(text, "V", method="lrp", position=range(inputs["input_ids"].shape[1]))):
        expected, value = by_hand(model, lambda output, at=position: output.logits[0, at, 1], **inputs)
        same(found, expected[0], value)
        assert found.explained.description == "logit of 'V'"
    with pytest.raises(InputError, match="a token classifier predicts something for each token; pass position"):
        explain(text)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_answer_to_a_question(piece_tokenizer, elsewhere):
    """The best span of the context, also where a better one is in the question."""
    model = bert(tf.BertForQuestionAnswering)
    explain = Explainer(model, piece_tokenizer)
    asked = ("is the key small", "the keys are on the table, the key is under the old rug")
    asked = asked[::-1] if elsewhere else asked
    inputs = piece_tokenizer(*asked, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    starts, ends, of_context = output.start_logits[0], output.end_logits[0], inputs.sequence_ids()
    context = [at for at, each in enumerate(of_context) if each == 1]
    start, end = max(
        ((a, b) for a in context for b in context if a <= b), key=lambda pair: float(starts[pair[0]] + ends[pair[1]])
    )
    whole = (starts[:, None] + ends[None]).masked_fill(torch.ones(len(starts), len(starts)).tril(-1) > 0, -torch.inf)
    assert (int(whole.argmax()) != start * len(starts) + end) is elsewhere
    expected, value = by_hand(model, lambda out: out.start_logits[0, start] + out.end_logits[0, end], **inputs)
    for given in (asked, {"question": asked[0], "context": asked[1]}, inputs):
        found = explain(given, method="lrp")
        same(found, expected[0], value)
        assert found.explained.description == f"answer from token {start} to {end}"
        assert found.prediction.text == f"token {start} to {end}"
    same(explain(asked, Span(2, 4), method="lrp"), *_first(by_hand(
        model, lambda out: out.start_logits[0, 2] + out.end_logits[0, 4], **inputs)))  # fmt: skip


def _first(found):
    relevance, value = found
    return relevance[0], value


def test_a_mask_in_the_question_does_not_end_it(piece_tokenizer):
    """What stands between question and context stands at the end, too; an answer began at the question's last words."""
    model = bert(tf.BertForQuestionAnswering)
    explain = Explainer(model, piece_tokenizer)
    for words in ("the keys to the cabinet", "is the key small", "the film is under the old rug by the table"):
        asked = (f"where {piece_tokenizer.mask_token} {words}", "on the table")
        inputs = piece_tokenizer(*asked, return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs)
        context = [at for at, each in enumerate(inputs.sequence_ids()) if each == 1]
        best = max(
            float(output.start_logits[0, a] + output.end_logits[0, b]) for a in context for b in context if a <= b
        )
        assert explain(asked).explained.value == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("special", ["[MASK]", "[SEP]"])
def test_the_context_of_a_question_that_holds_a_special_token(piece_tokenizer, special):
    """The types of the tokens tell the two texts apart, where the special token alone would end the question."""
    model = bert(tf.BertForQuestionAnswering)
    ends = [(name, piece_tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    piece_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    piece_tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    texts = ["the keys are", "on the old table by the tree", "under the rug", "small", "it is the key"]
    for text in texts:
        asked = (f"is {special} {text}", "the keys are on the table")
        inputs = piece_tokenizer(*asked, return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs)
        context = [at for at, each in enumerate(inputs.sequence_ids()) if each == 1]
        pairs = [(a, b) for a in context for b in context if a <= b]
        best = max(float(output.start_logits[0, a] + output.end_logits[0, b]) for a, b in pairs)
        assert Explainer(model, piece_tokenizer)(asked).explained.value == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("kind", ["nothing between", "an end in the question"])
def test_the_tokenizer_tells_question_and_context_apart(byte_tokenizer, kind):
    """GPT-2's tokenizer puts nothing between two texts, and a question may hold what RoBERTa's puts there."""
    config = tf.GPT2Config(vocab_size=400, n_embd=16, n_head=4, n_layer=2, n_positions=64)
    model = tiny.build(tf.GPT2ForQuestionAnswering, config)
    explain = Explainer(model, byte_tokenizer)
    if kind != "nothing between":
        byte_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            "<s> $A </s>", "<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    asked = [
        (
            f"{'' if kind == 'nothing between' else 'is </s> '}{text} the keys to the cabinet are on the table",
            "under it",
        )
        for text in ("What", "the old table by the tree", "a terrible ending", "small", "it is the key")
    ]
    batch = byte_tokenizer(asked, return_tensors="pt", padding=True, padding_side="left")
    for at, (each, row) in enumerate(zip(asked, explain(batch), strict=True)):
        inputs = byte_tokenizer(*each, return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs)
        context = [at for at, of in enumerate(inputs.sequence_ids()) if of == 1]
        pairs = [(a, b) for a in context for b in context if a <= b]
        start, end = max(pairs, key=lambda pair: float(output.start_logits[0, pair[0]] + output.end_logits[0, pair[1]]))
        lists, of_many_lengths = byte_tokenizer(*each), byte_tokenizer(asked)
        found = [explain(inputs), explain(lists), row, explain([inputs, lists])[1], explain(of_many_lengths)[at]]
        if kind != "nothing between":
            found += [explain(each), explain({"question": each[0], "context": each[1]})]
        assert {a.explained.description for a in found} == {f"answer from token {start} to {end}"}


def test_answers_in_a_batch(piece_tokenizer):
    explain = Explainer(bert(tf.BertForQuestionAnswering), piece_tokenizer)
    asked = [("is it small", "the key is small"), ("where are the keys", "the keys are on the old table by the tree")]
    for found, each in zip(explain(asked, method="lrp"), asked, strict=True):
        single = explain(each, method="lrp")
        assert found.explained.description == single.explained.description
        same(found, single.relevance, single.explained.value)


def test_one_of_several_choices(piece_tokenizer):
    model = bert(tf.BertForMultipleChoice)
    explain = Explainer(model, piece_tokenizer)
    text, choices = "the keys to the cabinet", ["are on the old table", "is small", "what a film"]
    encoded = piece_tokenizer([text] * 3, choices, padding=True, return_tensors="pt")
    inputs = {name: value[None] for name, value in encoded.items()}
    found = explain((text, choices), 1, method="lrp")
    expected, value = by_hand(model, lambda output: output.logits[0, 1], **inputs)
    kept = encoded["attention_mask"].bool()
    same(found, expected[kept], value)
    assert [name for name, _, _ in found.segments] == ["choice 0", "choice 1", "choice 2"]
    first, second, third = (found.relevance[a:b].abs().sum() for _, a, b in found.segments)
    assert float(second) > 0
    assert float(first) == float(third) == 0.0, "the score of a choice depends on that choice alone"
    both = explain([(text, choices), ("the girl", ["is small", "are tall"])], 1, method="lrp")
    same(both[0], found.relevance, value)


def test_the_similarity_of_two_texts(piece_tokenizer):
    model = bert(tf.BertModel)
    explain = Explainer(model, piece_tokenizer)
    pair = ("the keys are on the table", "the key is small")
    with torch.no_grad():
        a, b = (model(**piece_tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in pair)
    cosine = float(torch.nn.functional.cosine_similarity(a, b, 0))
    found = explain(pair, method="lrp", ledger=True)
    assert found.explained.value == pytest.approx(cosine, abs=1e-12)
    assert found.explained.description == "similarity of the two texts (mean of the tokens, as nothing else is said)"
    assert found.prediction is None
    assert [name for name, _, _ in found.segments] == ["first", "second"]
    assert found.ledger.closes(1e-9)
    # each text's half of the product, by hand: the other's embedding is a constant
    for (_, start, end), text, mine, other in zip(found.segments, pair, (a, b), (b, a), strict=True):
        direction = other / (mine.norm() * other.norm()) / 2
        inputs = piece_tokenizer(text, return_tensors="pt")
        expected, _ = by_hand(model, lambda out, u=direction: out.last_hidden_state[0].mean(0) @ u, **inputs)
        torch.testing.assert_close(found.relevance[start:end], expected[0], rtol=0, atol=1e-12)
    many = explain([pair, ("a lovely film", "what a terrible ending of the film")], method="lrp")
    same(many[0], found.relevance, cosine)
    str(found)
    found.to_html()
    assert found == type(found).load(_saved(found, "similarity"))


@pytest.mark.parametrize(
    ("method", "reduce"),
    [
        ("gradient-x-input", lambda x, g: (x * g).sum(-1)),
        ("gradient-l1", lambda x, g: g.abs().sum(-1)),
        ("gradient-l2-squared", lambda x, g: g.square().sum(-1)),
    ],
)
def test_the_gradient_of_a_similarity_is_the_plain_one(method, reduce):
    model = bert(tf.BertModel)
    ids = torch.tensor([[5, 7, 9], [6, 8, 11]])
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    first, second = model(inputs_embeds=embedded).last_hidden_state.mean(1)
    cosine = torch.nn.functional.cosine_similarity(first, second, 0)
    (gradient,) = torch.autograd.grad(cosine, embedded)
    found = Explainer(model)(tuple(ids.tolist()), method=method, ledger=method == "gradient-x-input")
    assert found.explained.value == pytest.approx(cosine.item(), abs=1e-12)
    expected = reduce(embedded.detach(), gradient).flatten()
    torch.testing.assert_close(found.relevance.clone(), expected, rtol=0, atol=1e-12)
    assert found.ledger is None or found.ledger.closes(1e-9)


def _saved(found, name):
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / f"{name}.safetensors"
    found.save(path)
    return path


def test_similarity_is_the_cosine():
    a, b = torch.randn(2, 7, dtype=torch.float64)
    value = Similarity().value(torch.cat([a, b]))
    torch.testing.assert_close(value, torch.nn.functional.cosine_similarity(a, b, 0))


# -------------------------------------------------------------------------------- images


def vit():
    torch.manual_seed(0)
    config = tf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return tf.ViTForImageClassification(config).eval().double()


def test_pixels_of_an_image():
    model = vit()
    image = torch.randn(3, 8, 8, dtype=torch.float64)
    with propagate(model, LRP, observe=()) as trace:
        value = model(pixel_values=image[None]).logits[0, 2]
    value = trace.explain(value)
    expected = trace.relevance("pixel_values")[0]
    explain = Explainer(model)
    for given in (image, image[None], {"pixel_values": image[None]}):
        found = explain(given, 2, method="lrp")
        part = found.parts["pixels"]
        assert part.axes == ("channel", "row", "column")
        torch.testing.assert_close(part.values.clone(), expected, rtol=0, atol=1e-12)
        assert found.tokens == ("0,0", "0,1", "1,0", "1,1")
        assert found.explained.value == pytest.approx(float(value), abs=1e-12)
    others = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    many = explain(torch.stack([image, *others]), 2, method="lrp")
    assert many == explain([image, *others], 2, method="lrp")
    torch.testing.assert_close(many[0].parts["pixels"].values.clone(), expected, rtol=0, atol=1e-12)
    classes = explain(image, [0, 1, 2], method="lrp")
    torch.testing.assert_close(classes[2].parts["pixels"].values.clone(), expected, rtol=0, atol=1e-12)
    closed = explain(image, 2, method="lrp", ledger=True)
    assert closed.ledger.closes(1e-9)
    assert closed.ledger.by_kind()["inputs"] == pytest.approx(float(expected.sum()), abs=1e-12)
    str(found)
    found.to_html()
    assert found == type(found).load(_saved(found, "image"))


def test_an_image_through_its_processor():
    model = vit().float()
    processor = tf.ViTImageProcessor(size={"height": 8, "width": 8}) if _has_pillow() else None
    if processor is None:
        pytest.skip("image processors need pillow, which is not installed")
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    found = Explainer(model, processor)(image, 2)
    ready = Explainer(model)(processor(images=image, return_tensors="pt"), 2)
    assert torch.equal(found.parts["pixels"].values, ready.parts["pixels"].values)


def test_an_image_classifier_from_a_folder(tmp_path):
    vit().float().save_pretrained(tmp_path)
    tf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    explain = Explainer.from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    assert explain(image, 2).parts["pixels"].shape == {"channel": 3, "row": 8, "column": 8}
    first, second = explain([image, 255 - image], 2)
    alone = explain(image, 2).parts["pixels"].values.clone()
    limit = 1e-4 * float(alone.abs().max())
    torch.testing.assert_close(first.parts["pixels"].values.clone(), alone, rtol=0, atol=limit)
    assert not torch.allclose(second.parts["pixels"].values.clone(), alone, atol=limit)


def test_real_sentences_compared(minilm):
    """MiniLM, from its folder: the ledger of the similarity closes, and two doors speak for each other."""
    explain = Explainer.from_pretrained(minilm)
    assert explain.task is Task.EMBEDDINGS
    found = explain(("The doors of the house are open", "An open door"), method="lrp", ledger=True)
    assert found.ledger.closes(1e-4)
    strongest = sorted(found, key=lambda token: -token.relevance)[:2]
    assert {token.text.strip() for token in strongest} == {"doors", "door"}
    for given in ({"input_ids": [[5, 7]]}, {"question": "is it", "context": "it is"}):
        with pytest.raises(InputError, match="a text encoder takes several texts; pass them as a tuple"):
            explain(given)
    with pytest.raises(InputError, match="a text encoder compares two texts; pass them as a tuple"):
        explain("one text")


def _has_pillow():
    try:
        import PIL  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_sound():
    torch.manual_seed(0)
    config = tf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_labels=3, classifier_proj_size=8,
    )  # fmt: skip
    model = tf.Wav2Vec2ForSequenceClassification(config).eval()
    explain = Explainer(model)
    assert explain.task is Task.AUDIO_CLASSIFICATION
    sound = torch.randn(400)
    with propagate(model, LRP, observe=()) as trace:
        value = model(input_values=sound[None]).logits[0, 1]
    value = trace.explain(value)
    found = explain(sound, 1, method="lrp")
    part = found.parts["input_values"]
    torch.testing.assert_close(part.values.clone(), trace.relevance("input_values")[0])
    assert found.explained.value == pytest.approx(float(value), rel=1e-5)
    assert found.parts == explain({"input_values": sound[None]}, 1, method="lrp").parts
    with pytest.raises(InputError, match="the sound is str; pass what the model's processor returned"):
        explain("a text")


def test_a_sound_as_a_batch_of_one():
    """As its processor returns it."""
    torch.manual_seed(0)
    model, _, batch = spectrogram_classifier()
    one = batch[:1]
    assert Explainer(model)(one, 1, method="lrp") == Explainer(model)({"input_values": one}, 1, method="lrp")


@pytest.mark.parametrize("volume", [0.1, 1.0, 20_000.0])
def test_a_recording_is_no_sound_as_the_model_takes_it(volume):
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    convolutions = {"conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (5,), "num_feat_extract_layers": 1}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = tf.Wav2Vec2Config(**size, **convolutions, **places, num_labels=3, classifier_proj_size=8)
    processor = tf.Wav2Vec2FeatureExtractor(do_normalize=True)
    explain = Explainer(tf.Wav2Vec2ForSequenceClassification(config).eval(), processor)
    recorded = torch.randn(400)
    recorded *= volume / recorded.abs().max()
    made = processor(recorded.numpy(), sampling_rate=16000, return_tensors="pt")
    found = explain(made, 1)
    assert explain(made["input_values"], 1) == explain(made["input_values"][0], 1) == found
    for given in (recorded, recorded[None], [recorded]):
        with pytest.raises(InputError, match=r"the model's processor normalises them; pass what it returned"):
            explain(given, 1)
    explain({"input_values": recorded}, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_image_and_a_sound_in_another_precision_than_the_weights(dtype):
    """As a processor makes them, whatever the model is."""
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"}
    image, sound = torch.randn(1, 3, 32, 32), torch.randn(1, 16, 8)
    models = tf.ResNetForImageClassification(tf.ResNetConfig(**sizes)), spectrogram_classifier()[0]
    for model, name, given in zip(models, ("pixel_values", "input_values"), (image, sound), strict=True):
        explain = Explainer(model.eval().to(dtype))
        found = explain({name: given}, 1)
        assert found.parts == explain({name: given.to(dtype)}, 1).parts
        assert found.provenance.dtype == str(dtype).removeprefix("torch.")


def spectrogram_classifier():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    cut = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8}
    config = tf.ASTConfig(**size, **cut, num_labels=3)
    return tf.ASTForAudioClassification(config).eval(), "input_values", torch.randn(3, 16, 8)


def film_classifier():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = tf.VideoMAEConfig(**size, image_size=8, patch_size=4, num_frames=4, num_labels=3)
    return tf.VideoMAEForVideoClassification(config).eval(), "pixel_values", torch.randn(3, 4, 3, 8, 8)


@pytest.mark.parametrize(
    ("made", "task", "part"),
    [
        (spectrogram_classifier, None, "input_values"),
        (film_classifier, Task.IMAGE_CLASSIFICATION, "pixels"),
    ],
)
def test_a_batch_of_spectrograms_or_films_is_several_inputs(made, task, part):
    torch.manual_seed(0)
    model, name, batch = made()
    explain = Explainer(model, task=task)
    found = explain({name: batch}, 1, method="lrp")
    alone = [explain({name: one[None]}, 1, method="lrp") for one in batch]
    with torch.no_grad():
        values = model(**{name: batch}).logits[:, 1].tolist()
    assert [each.explained.value for each in found] == pytest.approx(values, rel=1e-5)
    for each, one in zip(found, alone, strict=True):
        assert each.parts[part].values.shape == batch.shape[1:]
        torch.testing.assert_close(each.parts[part].values.clone(), one.parts[part].values.clone())


def test_speech_to_text():
    torch.manual_seed(0)
    config = tf.WhisperConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=20,
        max_target_positions=20, decoder_start_token_id=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    explain = Explainer(model)
    assert explain.task is Task.SPEECH
    features = torch.randn(1, 8, 40)
    written = [3, 7, 9]
    found = explain({"input_features": features}, 5, method="gradient-x-input", decoder=written)
    assert found.ids == tuple(written)
    assert [name for name, _, _ in found.segments] == ["decoder"]
    sound = features.clone().requires_grad_()
    table = model.get_input_embeddings()
    embedded = table(torch.tensor([written])).detach().requires_grad_()
    logit = model(input_features=sound, decoder_inputs_embeds=embedded).logits[0, -1, 5]
    logit.backward()
    assert found.explained.value == pytest.approx(float(logit.detach()), abs=1e-5)
    expected = (embedded * embedded.grad).sum(-1)[0].detach()
    torch.testing.assert_close(found.relevance.clone(), expected, rtol=1e-3, atol=1e-6)
    of_sound = (sound * sound.grad)[0].detach()
    torch.testing.assert_close(found.parts["input_features"].values.clone(), of_sound, rtol=1e-3, atol=1e-6)
    for given in (features, features[0], [features[0]], features.repeat(2, 1, 1)):
        again = explain(given, 5, method="gradient-x-input", decoder=written)
        again = again[0] if isinstance(again, list) else again
        torch.testing.assert_close(again.relevance.clone(), expected, rtol=1e-3, atol=1e-6)
    with pytest.raises(InputError, match="the sound is str"):
        explain("a text")


@pytest.mark.parametrize("languages", [True, False])
def test_a_decoder_text_without_the_token_for_no_times_or_a_time_is_refused(languages, byte_tokenizer):
    starts = ["<|start|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", "<|0.00|>"]  # in Whisper's order
    byte_tokenizer.add_special_tokens({"additional_special_tokens": starts})
    start, language, task, no_times, time = byte_tokenizer.convert_tokens_to_ids(starts)
    config = tf.WhisperConfig(
        vocab_size=len(byte_tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=4, max_source_positions=16,
        max_target_positions=32, decoder_start_token_id=start, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    settings = {"no_timestamps_token_id": no_times, "is_multilingual": languages, "suppress_tokens": []}
    if languages:
        settings |= {"lang_to_id": {"<|en|>": language}, "task_to_id": {"transcribe": task}}
    for name, value in (settings | {"begin_suppress_tokens": []}).items():
        setattr(model.generation_config, name, value)
    read, sound = [], torch.randn(1, 4, 32)
    hook = model.model.decoder.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    model.generate(sound, max_new_tokens=1, **({"language": "<|en|>"} if languages else {}))
    hook.remove()
    first = [start, language, task] if languages else [start]
    assert read[0] == [*first, no_times]
    explain, before = Explainer(model, byte_tokenizer), "<|en|><|transcribe|>" if languages else ""
    written = byte_tokenizer("The key")["input_ids"]

    def ids(decoder):
        return list(explain({"input_features": sound}, 5, method="gradient-x-input", decoder=decoder).ids)

    for text in ("<|en|>The key", f"{before}The key") if languages else ("The key",):
        with pytest.raises(InputError, match=r"has neither; write .*<\|notimestamps\|> before it, or pass decoder ids"):
            ids(text)
    assert ids(f"{before}<|notimestamps|>The key") == [*first, no_times, *written]
    assert ids(f"{before}<|0.00|>The key") == [*first, time, *written]
    assert ids([start, *written]) == [start, *written]
    assert ids(before or None) == first


def test_image_to_text():
    """As TrOCR and Donut: an encoder of an image, and a decoder that writes."""
    torch.manual_seed(0)
    reads = tf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    writes = tf.TrOCRConfig(
        vocab_size=50, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24, pad_token_id=1,
        decoder_start_token_id=2, max_position_embeddings=32,
    )  # fmt: skip
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(reads, writes)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = tf.VisionEncoderDecoderModel(config).eval().double()
    explain = Explainer(model)
    assert explain.task is Task.SPEECH
    image, written = torch.rand(3, 8, 8).double(), [2, 5, 9]
    found = explain(image, 7, method="gradient-x-input", decoder=written)
    pixels, table = image[None].clone().requires_grad_(), model.decoder.get_input_embeddings()
    embedded = table(torch.tensor([written])).detach().requires_grad_()
    logit = model(pixel_values=pixels, decoder_inputs_embeds=embedded).logits[0, -1, 7]
    logit.backward()
    assert found.explained.value == pytest.approx(float(logit.detach()), abs=1e-12)
    assert found.ids == tuple(written)
    of_pixels = (pixels * pixels.grad)[0].detach()
    torch.testing.assert_close(found.parts["pixels"].values.clone(), of_pixels, rtol=0, atol=1e-10)
    for given, decoder in (
        ({"pixel_values": image[None]}, written),
        ({"pixel_values": image[None], "decoder_input_ids": torch.tensor([written])}, None),
    ):
        assert explain(given, 7, method="gradient-x-input", decoder=decoder) == found
    with pytest.raises(InputError, match="no such file; pass pixel_values, a PIL image, or the path"):
        explain("a text")


@pytest.mark.parametrize("given", ["a text", [5, 7], torch.zeros(8, 8), 7, None])
def test_what_is_no_image(given):
    with pytest.raises(InputError, match=r"the image is .*; pass pixel_values"):
        Explainer(vit())(given)


def test_methods_that_need_tokens_refuse_images():
    from lrpx.errors import MethodError

    for method in ("alti-logit", "leave-one-out"):
        with pytest.raises(MethodError, match=rf"{method} does not serve ViTForImageClassification, a image|an image"):
            Explainer(vit())(torch.zeros(3, 8, 8), method=method)


class Reads(tf.ProcessorMixin):
    """A processor that holds a tokenizer alone."""

    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, text=None, **how):
        told = {name: how[name] for name in ("return_tensors", "add_special_tokens") if name in how}
        return self.tokenizer(text, **told)


SAYS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("of_tokenizer", [SAYS, "the {{ messages[0]['content'] }}", None])
@pytest.mark.parametrize("begins", [False, True])
def test_a_chat_is_what_the_processor_makes_of_it(piece_tokenizer, of_tokenizer, begins):
    """It takes its own template, and puts special tokens around it that the tokenizer does not."""
    tokenizer = copy.deepcopy(piece_tokenizer)
    tokenizer.chat_template, tokenizer.bos_token = of_tokenizer, "[CLS]"
    template, chat = "[CLS]" * begins + SAYS, [{"role": "user", "content": "key is small"}]
    model, processor = bert(tf.BertLMHeadModel, is_decoder=True), Reads(tokenizer, template)
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    made = processor.apply_chat_template(chat, **how)
    found = Explainer(model, processor)(chat)
    assert list(found.ids) == made["input_ids"][0].tolist()
    assert found.explained.value == pytest.approx(float(model(**made).logits[0, -1].max().detach()), abs=1e-12)
    assert found.segments == Explainer(model, processor)(made).segments


def test_a_chat_of_a_processor_that_reads_it_as_its_tokenizer_has_its_messages(byte_tokenizer):
    byte_tokenizer.chat_template = f"a {SAYS}"
    model, chat = models.tiny_gpt2(vocab_size=len(byte_tokenizer)), [{"role": "user", "content": "The key"}]
    alone, held = (Explainer(model, each)(chat) for each in (byte_tokenizer, Reads(byte_tokenizer, f"a {SAYS}")))
    assert {name for name, *_ in alone.segments} == {"template", "user"}
    assert held == alone


def test_an_image_and_a_text():
    """LLaVA: pixels and tokens of one value, from what a processor returns."""
    torch.manual_seed(0)
    text = tf.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
    )  # fmt: skip
    vision = tf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
    )  # fmt: skip
    config = tf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=40, image_seq_length=4)
    model = tf.LlavaForConditionalGeneration(config).eval()
    ids = [[3, 40, 40, 40, 40, 9, 11]]
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    inputs["pixel_values"] = torch.randn(1, 3, 8, 8)
    explain = Explainer(model)
    assert explain.task is Task.CAUSAL
    found = explain(inputs, 5, method="gradient-x-input")
    assert found.ids == tuple(ids[0])
    pixels = inputs["pixel_values"].clone().requires_grad_()
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    logit = model(inputs_embeds=embeddings, pixel_values=pixels, attention_mask=inputs["attention_mask"]).logits[
        0, -1, 5
    ]
    logit.backward()
    torch.testing.assert_close(
        found.relevance, (embeddings * embeddings.grad).sum(-1)[0].detach(), rtol=1e-3, atol=1e-6
    )
    assert found.explained.value == pytest.approx(float(logit.detach()), abs=1e-5)


def test_a_text_without_its_image_is_refused():
    with pytest.raises(InputError, match="the text is dict without pixel_values, and a model of images and texts"):
        Explainer(tiny.clip())({"input_ids": [[0, 5, 2]], "attention_mask": [[1, 1, 1]]})


def test_a_document_without_a_mask_is_refused_where_one_of_ones_makes_a_difference():
    """UDOP hides the places that it puts behind a text if it is given a mask, and all runs are with one."""
    chosen = next(each for each in every_class() if each.name == "UdopForConditionalGeneration")
    model = tiny_model(chosen)
    given = {name: each for name, each in tiny_inputs(chosen, model).items() if name != "use_cache"}
    explain = Explainer(model)
    with pytest.raises(InputError, match="no attention_mask, and one of ones changes what UdopForConditional"):
        explain(dict(given), 5, method="gradient-x-input")
    masked = given | {"attention_mask": torch.ones_like(given["input_ids"])}
    found = explain(dict(masked), 5, method="gradient-x-input", position=-1)
    with torch.no_grad():
        wanted, without = (model(**copy.deepcopy(each)).logits[0, -1, 5] for each in (masked, given))
    assert found.explained.value == pytest.approx(float(wanted), abs=1e-5)
    assert abs(wanted - without) > 1e-3


def test_positions_of_an_image_in_tiles_are_those_of_all_tiles():
    torch.manual_seed(0)
    text = tf.Qwen2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    vision = tf.InternVLVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=[16, 16],
        patch_size=[4, 4],
    )  # fmt: skip
    config = tf.InternVLConfig(text_config=text, vision_config=vision, image_token_id=40, image_seq_length=4)
    model = tf.InternVLForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        model.model.vision_tower.embeddings.position_embeddings.normal_()
    inputs = {"input_ids": torch.tensor([[3, *[40] * 8, 9, 11]])}
    inputs["pixel_values"] = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = Explainer(model)(inputs, 5, ledger=True)
    part = found.parts["positions"]
    assert part.shape == {"dimension 0": 2, "place": 17}
    assert float(part.values.sum()) == pytest.approx(found.ledger.by_kind()["positions"], abs=1e-9)


# ------------------------------------------------------------------- models of one's own


class Own(torch.nn.Module):
    """A plain PyTorch language model."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)
        self.layer = torch.nn.Linear(8, 8)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        return self.head(torch.tanh(self.layer(self.embedding(input_ids).cumsum(1))))


def test_a_plain_pytorch_model():
    torch.manual_seed(0)
    model = Own().eval()
    with pytest.raises(ModelError, match="say which of them it is with task="):
        Explainer(model)
    explain = Explainer(model, task=Task.CAUSAL)
    found = explain([3, 4, 5], 7, method="lrp", ledger=True)
    assert found.ledger.closes(1e-5)
    assert found.explained.value == pytest.approx(float(model(torch.tensor([[3, 4, 5]])).detach()[0, -1, 7]), abs=1e-6)
    first, second = explain([[3, 4, 5], [6]], 7, method="lrp")
    torch.testing.assert_close(first.relevance, found.relevance)
    torch.testing.assert_close(second.relevance, explain([6], 7, method="lrp").relevance)


def test_options_of_the_wrong_kind():
    for option in ("recompute", "compile"):
        with pytest.raises(InputError, match=f"{option} is 'weights.pt'; pass True or False"):
            Explainer(models.tiny_gpt2(), **{option: "weights.pt"})


def test_a_spec_builds_the_same_model_again():
    spec = Spec(dtype="float64")
    again = Spec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    one, other = spec.build(), again.build()
    assert one.fingerprint() == other.fingerprint() != Spec(dtype="float32").build().fingerprint()
    assert one.spec == spec
    with pytest.raises(ModelError, match="this is no description of a model"):
        Spec.from_dict({"names": "gpt2"})


class Activation(Enum):
    RELU = "relu"
    GELU = "gelu"


@dataclass
class OwnConfig:
    activation: Any
    eps: Any = 1e-5


@pytest.mark.parametrize("kind", [OwnConfig, SimpleNamespace])
def test_a_fingerprint_is_of_a_config_of_ones_own(kind):
    """As nanoGPT's is."""

    def fingerprint(**config):
        model = tiny.bert_classifier()
        model.config = tiny.bert_classifier().config
        model.config.own = kind(**config)
        return BoundModel(model).fingerprint()

    found = [
        fingerprint(activation=activation, eps=eps)
        for activation in (Activation.RELU, Activation.GELU)
        for eps in (np.float32(1e-5), np.float32(1e-6))
    ]
    assert len(set(found)) == 4
    assert fingerprint(activation=Activation.RELU, eps=np.float32(1e-5)) == found[0]


def test_a_fingerprint_is_of_the_weights_the_buffers_and_the_config(tmp_path):
    def saved(folder, **other):
        made = tiny.bert_classifier()
        for name, value in other.items():
            setattr(made.config, name, value)
        made.save_pretrained(tmp_path / folder)
        return tmp_path / folder

    def fingerprint(folder, **how):
        return Spec(str(folder), **how).build().fingerprint()

    first = saved("first")
    same = fingerprint(first)
    assert BoundModel(tiny.bert_classifier()).fingerprint() == same  # whether it was saved, and where
    assert fingerprint(saved("second")) == same
    assert fingerprint(first, options={"attn_implementation": "eager"}) == same  # up to rounding
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"transformers_version": "4.0.0", "architectures": None}))
    found = {name: fingerprint(saved(name, **{name: value})) for name, value in CHANGED.items()}
    assert len({same, *found.values()}) == 1 + len(CHANGED)

    bound = BoundModel(Counted(), task=Task.CAUSAL)
    before = bound.fingerprint()
    bound.module.passing.add_(1)
    assert bound.fingerprint() == before
    bound.module.counted.add_(1)
    assert bound.fingerprint() != before


@pytest.mark.parametrize("name", ["forced_bos_token_id", "decoder_start_token_id"])
def test_a_fingerprint_is_of_what_a_decoder_begins_with(name):
    bound = BoundModel(models.tiny_t5())
    before = bound.fingerprint()
    setattr(bound.module.generation_config, name, 9)  # such as the language of a translation
    assert bound.fingerprint() != before
    bound.module.generation_config.num_beams = 4  # which nothing is read by here
    after = bound.fingerprint()
    bound.module.generation_config.num_beams = 1
    assert bound.fingerprint() == after


@pytest.mark.parametrize(("one", "other"), [((0, 1, 0), (0, 1, 1)), ((0, 1, 0, 1), (0, 1, 1, 0))])
def test_a_fingerprint_is_of_the_order_in_which_layers_are_used_again(one, other):
    """The weights and their names are the same: each of a layer is told where it stands first."""

    def fingerprint(order, model):
        model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in order])
        model.config.num_hidden_layers = len(order)
        return BoundModel(model).fingerprint()

    assert fingerprint(one, models.tiny_llama()) == fingerprint(one, models.tiny_llama())
    assert fingerprint(one, models.tiny_llama()) != fingerprint(other, models.tiny_llama())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fingerprint_is_of_every_row_and_every_neuron(dtype):
    bound = BoundModel(models.tiny_llama(vocab_size=4096).to(dtype))
    with torch.no_grad():
        table, down = bound.module.model.embed_tokens.weight, bound.module.model.layers[0].mlp.down_proj.weight
        assert table.numel() > 2 * LOOKED_AT
        before = bound.fingerprint()
        for part in (table[1001], table[:, 5], down[:, 3]):
            kept = part.clone()
            part.zero_()
            assert bound.fingerprint() != before
            part.copy_(kept)
            assert bound.fingerprint() == before


def test_a_fingerprint_of_a_tokenizer_is_of_what_it_reads(byte_tokenizer, tmp_path):
    def fingerprint(tokenizer):
        return BoundModel(models.tiny_gpt2(vocab_size=340), tokenizer).tokenizer_fingerprint()

    same = fingerprint(byte_tokenizer)
    byte_tokenizer.save_pretrained(tmp_path)
    loaded = tf.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert fingerprint(loaded) == same  # whether it was saved, and where
    loaded("The film was good", truncation=True, max_length=2)
    loaded.padding_side = "left"
    assert fingerprint(loaded) == same  # nothing is padded or cut by it
    loaded.chat_template = "{{ messages }}"
    with_template = fingerprint(loaded)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    lower = fingerprint(tf.PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert len({same, with_template, lower, fingerprint(None)}) == 4


class Lowering(tf.PreTrainedTokenizerFast):
    """Says of its settings nothing in what a fast tokenizer is saved as."""

    lowers = False

    def __call__(self, text, *more, **options):
        return super().__call__(text.lower() if self.lowers else text, *more, **options)


def test_a_fingerprint_of_a_tokenizer_of_ones_own_is_of_what_it_holds(byte_tokenizer, tmp_path):
    byte_tokenizer.save_pretrained(tmp_path)

    def fingerprint(lowers):
        tokenizer = Lowering.from_pretrained(tmp_path)
        tokenizer.lowers = lowers
        return BoundModel(models.tiny_gpt2(vocab_size=340), tokenizer).tokenizer_fingerprint()

    assert fingerprint(True) == fingerprint(True) != fingerprint(False)


class Single:
    """Takes each character for a word, in Python, as some do to cut Chinese into words."""

    def pre_tokenize(self, text):
        text.split(lambda _, words: [words[i : i + 1] for i in range(len(str(words)))])


def in_words(vocabulary, normalizer=None):
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.normalizer = normalizer
    return tokenizer


class Cutting(tf.PreTrainedTokenizerFast):
    """Puts in what cuts its texts itself, as RoFormer's does."""

    def __init__(self, *given):
        super().__init__(tokenizer_object=in_words(*given), unk_token="?")
        self.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Single())


def test_a_fingerprint_of_a_tokenizer_that_cuts_in_python_is_of_its_class_and_its_other_parts():
    def fingerprint(tokenizer):
        return BoundModel(models.tiny_gpt2(vocab_size=340), tokenizer).tokenizer_fingerprint()

    words = {"?": 0, "a": 1, "b": 2}
    same = fingerprint(Cutting(words))
    assert fingerprint(Cutting(dict(words))) == same
    added = Cutting(words)
    added.add_tokens("ab")
    others = Cutting(words | {"c": 3}), Cutting(words, normalizers.Lowercase()), added
    assert len({same, *(fingerprint(each) for each in others)}) == 4
    given = tf.PreTrainedTokenizerFast(tokenizer_object=in_words(words), unk_token="?")
    given.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Single())
    with pytest.raises(ModelError, match=r"pre_tokenizer is written in Python, .* make a class of it"):
        fingerprint(given)


def test_a_fingerprint_of_a_tokenizer_in_python_is_of_its_vocabulary_merges_and_fields(tmp_path):
    def fingerprint(folder, merges, **more):
        (tmp_path / folder).mkdir()
        vocabulary, merged = tmp_path / folder / "vocab.json", tmp_path / folder / "merges.txt"
        names = ["<unk>", "a@@", "b@@", "a", "b", "ab@@", "ab", "ba", "aab"]
        vocabulary.write_text(json.dumps({name: i for i, name in enumerate(names)}))
        merged.write_text("\n".join(["#version: 0.2", *merges, ""]))
        tokenizer = tf.CTRLTokenizer(str(vocabulary), str(merged))
        for name, value in more.items():
            setattr(tokenizer, name, value)
        tokenizer("ab")  # which is kept in its cache
        return BoundModel(models.tiny_gpt2(vocab_size=340), tokenizer).tokenizer_fingerprint()

    same = fingerprint("first", ["a b", "b a</w>"])
    assert fingerprint("second", ["a b", "b a</w>"]) == same
    others = fingerprint("third", ["b a</w>", "a b"]), fingerprint("fourth", ["a b", "b a</w>"], do_lower_case=True)
    assert len({same, *others}) == 3


def test_a_fingerprint_of_a_tokenizer_in_python_is_of_its_settings_and_not_of_what_it_has_counted(tmp_path):
    def fingerprint(tokenizer):
        return BoundModel(models.tiny_gpt2(vocab_size=340), tokenizer).tokenizer_fingerprint()

    whole, part = tf.ByT5Tokenizer(), tf.ByT5Tokenizer()
    for tokenizer, single in ((whole, True), (part, False)):
        tokenizer.add_tokens([AddedToken("abc", single_word=single)])
    assert fingerprint(whole) != fingerprint(part)
    same = fingerprint(whole)
    assert len(whole) > 0
    whole.total_vocab_size = 0  # counted when it is asked for
    assert fingerprint(whole) == same
    (tmp_path / "e.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "L", "A", "G", "<mask>"]))
    assert fingerprint(tf.EsmTokenizer(str(tmp_path / "e.txt")))  # which asks for a prefix to save its files with


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_fingerprint_of_a_model_is_of_how_much_of_an_adapter_comes_in():
    """As ``lora_alpha`` says, which changes no weight."""
    peft = pytest.importorskip("peft")

    def fingerprint(alpha):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["c_attn"], fan_in_fan_out=True)
        return BoundModel(peft.get_peft_model(models.tiny_gpt2(), config).eval()).fingerprint()

    assert fingerprint(2) == fingerprint(2) != fingerprint(8)


def of_ones_own(split):
    class Letters(tf.ByT5Tokenizer):
        def _tokenize(self, text):
            return split(text)

    return Letters()


def test_a_fingerprint_of_a_tokenizer_of_ones_own_is_of_its_code():
    kinds = (lambda text: [*text]), (lambda text: [*text]), (lambda text: [*text.lower()])
    first, again, second = (checksum(_reading(of_ones_own(split))) for split in kinds)
    assert first == again != second


def test_a_fingerprint_of_a_processor_is_of_what_it_holds(byte_tokenizer):
    def fingerprint(resample, tokenizer=byte_tokenizer):
        processor = tf.CLIPProcessor(tf.CLIPImageProcessorPil(resample=resample), tokenizer)
        return BoundModel(models.tiny_gpt2(vocab_size=340), processor).tokenizer_fingerprint()

    same = fingerprint(3)
    assert fingerprint(3) == same != fingerprint(2)
    byte_tokenizer.add_tokens(["film"])
    assert fingerprint(3) != same


CHANGED = {"hidden_act": "relu", "layer_norm_eps": 0.5, "id2label": {0: "a", 1: "b", 2: "c"}}


class Counted(Own):
    """A buffer that is saved, and one that is not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counted", torch.tensor(3))
        self.register_buffer("passing", torch.tensor(3), persistent=False)


def test_labels_of_classes():
    found = Explainer(tiny.bert_classifier())([3, 4], [Logit(2), 0])
    assert [a.explained.description for a in found] == ["logit of 'mixed'", "logit of 'negative'"]


# ----------------------------------------------------------------- classifiers with a decoder


def bart_classifier(**more):
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             {"layers": 1, "attention_heads": 2, "ffn_dim": 24}.items()}  # fmt: skip
    config = tf.BartConfig(vocab_size=31, d_model=16, max_position_embeddings=64, num_labels=3, **sizes | more)
    return tiny.build(tf.BartForSequenceClassification, config)


def t5_classifier(**more):
    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return tiny.build(tf.T5ForSequenceClassification, tf.T5Config(**sizes | tokens | more, num_labels=3))


WITH_DECODER = {"BART": (bart_classifier, 2), "T5": (t5_classifier, 1)}


@pytest.mark.parametrize("name", WITH_DECODER)
def test_a_classifier_with_a_decoder_reads_each_token_twice(name):
    """In the encoder, and one place later in the decoder; a token's relevance is the sum of the two."""
    build, end = WITH_DECODER[name]
    model = build()
    ids = [7, 14, 15, 9, end]
    found = Explainer(model)(ids, 1, method="lrp")
    with propagate(model, LRP, observe=()) as trace:
        value = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 1]
    trace.explain(value)
    encoder, decoder = (trace.source_relevance(each)[0].sum(-1) for each in trace.sources if "shared" in each.paths[0])
    expected = encoder + torch.cat([decoder[1:], decoder.new_zeros(1)])
    assert float(decoder[1:].abs().max()) > 0
    same(found, expected, float(value.detach()))


@pytest.mark.parametrize(("kind", "at"), [("SequenceClassification", None), ("TokenClassification", 1)])
def test_a_classifier_whose_decoder_has_an_embedding_of_its_own_reads_each_token_twice(kind, at):
    """T5Gemma's is another than its encoder's, with other weights."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    parts = {name: tf.T5GemmaModuleConfig(**sizes | heads | tokens) for name in ("encoder", "decoder")}
    config = tf.T5GemmaConfig(**parts, **tokens, num_labels=3)
    model = tiny.build(getattr(tf, f"T5GemmaFor{kind}"), config, "eager")
    ids = [7, 14, 15, 9, 1]
    looked_up = []

    def look(_, __, output):
        looked_up.append(output.requires_grad_())

    hooks = [part.embed_tokens.register_forward_hook(look) for part in (model.get_encoder(), model.get_decoder())]
    logits = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, 5, dtype=torch.int64)).logits
    for hook in hooks:
        hook.remove()
    value = logits[0, 1] if at is None else logits[0, at, 1]
    grads = torch.autograd.grad(value, looked_up)
    shares = [(each.detach() * grad)[0].sum(-1) for each, grad in zip(looked_up, grads, strict=True)]
    expected = shares[0] + torch.cat([shares[1][1:], shares[1].new_zeros(1)])
    assert float(shares[1][1:].abs().max()) > 0
    same(Explainer(model)(ids, 1, method="gradient-x-input", position=at), expected, float(value.detach()))


@pytest.mark.parametrize("name", WITH_DECODER)
@pytest.mark.parametrize("method", ["attnlrp", "gradient-x-input", "gradient-l1"])
def test_rows_of_any_length_and_any_number_of_ends(name, method):
    """Such a model refuses a batch whose rows have not equally many ends, with an error of its own."""
    build, end = WITH_DECODER[name]
    explain = Explainer(build())
    rows = [[7, 14, end], [7, 14, 15, 9, end], [7, end, 9, end], [8, end], [5, end, 6, 7, 8, end]]
    for found, ids in zip(explain(rows, 1, method=method), rows, strict=True):
        alone = explain(ids, 1, method=method)
        same(found, alone.relevance, alone.explained.value)
    with pytest.raises(InputError, match=rf"reads the end-of-text token \(id {end}\), and the input has none; .*row 1"):
        explain([[7, end], [7, 14]])


def test_a_classifier_whose_padding_is_its_end_runs_row_by_row():
    explain = Explainer(bart_classifier(pad_token_id=2))
    rows = [[7, 14, 2], [7, 14, 15, 9, 2]]
    for found, ids in zip(explain(rows, 1), rows, strict=True):
        same(found, explain(ids, 1).relevance, explain(ids, 1).explained.value)


def test_an_answer_in_a_decoder():
    config = bart_classifier().config
    model = tiny.build(tf.BartForQuestionAnswering, config)
    found = Explainer(model)([7, 14, 15, 2], Span(1, 2))
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[7, 14, 15, 2]]))
    assert found.explained.value == pytest.approx(float(output.start_logits[0, 1] + output.end_logits[0, 2]), abs=1e-12)


# ------------------------------------------------------------------------- tokens in several tables


class Valued(torch.nn.Module):
    """A language model that looks its tokens up for the values of a layer, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = (9, 4), (64, 4), (9, 6)
        self.embed, self.wpe, self.values = (torch.nn.Embedding(*each) for each in sizes)
        self.mix, self.head = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 9, bias=False)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids) + self.wpe(torch.arange(input_ids.shape[1])).sin()
        values = torch.tanh(self.mix(x)) * self.values(input_ids)
        return self.head(values.cumsum(1))


@pytest.mark.parametrize("method", ["attnlrp", "gradient-x-input"])
def test_what_tokens_get_by_a_second_table_is_theirs(method):
    """And what positions get is none of theirs, whatever their numbers; with a ledger, and in code that is compiled."""
    model, ids = Valued().double().eval(), [0, 1, 2, 3]
    explain = Explainer(model, task=Task.CAUSAL)
    found = explain(ids, 5, method=method, ledger=True)
    with propagate(model, METHODS[method].recipe) as trace:
        trace.explain(model(torch.tensor([ids]))[0, -1, 5])
    parts = {source.paths[0]: trace.source_relevance(source)[0].sum(-1) for source in trace.sources}
    assert sorted(parts) == ["embed", "values", "wpe"]
    assert_close(found.relevance, parts["embed"] + parts["values"], rtol=0, atol=1e-12)
    assert min(float(each.abs().max()) for each in parts.values()) > 1e-3
    assert found.ledger.by_kind()["tokens"] == pytest.approx(float(found.relevance.sum()), abs=1e-12)
    for one, other in zip(explain([ids, ids[:2]], 5, method=method), (ids, ids[:2]), strict=True):
        assert_close(one.relevance, explain(other, 5, method=method).relevance, rtol=0, atol=1e-12)
    with pytest.raises(MethodError, match="looked up in embed and values, and lengths of them do not add up"):
        explain(ids, 5, method="gradient-l1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_code_has_the_second_table():
    model, ids = Valued().eval(), [0, 1, 2, 3]
    found, expected = (Explainer(model, task=Task.CAUSAL, compile=each)(ids, 5).relevance for each in (True, False))
    assert_close(found, expected, rtol=0, atol=1e-5)
