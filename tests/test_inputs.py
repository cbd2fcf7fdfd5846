"""Traps at the front door: padding in plain ids, tuples, types of tokens, what tokenizers return, chats."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, processors
from tokenizers.processors import BertProcessing

from lrpx import Explainer, Span, Task
from lrpx._encoded import read
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import InputError, ModelError, TargetError
from tests import tiny
from tests.reference import models
from tests.test_readers import bert

TEXTS = ["the key is small", "the keys to the old cabinets are under the table", "a film"]


def values(found):
    return [each.explained.value for each in found]


@pytest.fixture
def classify(piece_tokenizer):
    return Explainer(bert(tf.BertForSequenceClassification, num_labels=3), piece_tokenizer)


@pytest.fixture
def causal(byte_tokenizer):
    return Explainer(models.tiny_gpt2(vocab_size=400, n_positions=128), byte_tokenizer)


@pytest.mark.parametrize("text", ["[CLS] a film", ("[CLS] a film", "the key"), "[CLS]"])
def test_a_text_with_a_special_token_that_the_tokenizer_adds_is_refused(classify, piece_tokenizer, text):
    """As a chat template writes it, or ``decode`` leaves it: the model read it twice."""
    with pytest.raises(InputError, match=r"the text begins with '\[CLS\]', and the tokenizer adds it once more"):
        classify(text)
    for other in ("a film [SEP]", ("the key", "a film [SEP]")):
        with pytest.raises(InputError, match=r"the text ends with '\[SEP\]', and the tokenizer adds it once more"):
            classify(other)
    whole = piece_tokenizer("[CLS] a film [SEP]", add_special_tokens=False)
    assert classify(whole).relevance.tolist() == classify("a film").relevance.tolist()
    assert classify("a [SEP] film [MASK]").tokens[-2:] == ("[MASK]", "[SEP]")


# ------------------------------------------------------------------------------------ padding


AS = {
    "lists": lambda ids: ids,
    "tensor": torch.tensor,
    "array": np.asarray,
    "rows": lambda ids: [torch.tensor(row) for row in ids],
    "dict": lambda ids: {"input_ids": ids},
    "dict of a tensor": lambda ids: {"input_ids": torch.tensor(ids)},
    "one": lambda ids: ids[0],
    "one in a dict": lambda ids: {"input_ids": ids[0]},
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_", AS)
def test_padding_in_plain_ids_is_refused(classify, piece_tokenizer, side, as_):
    piece_tokenizer.padding_side = side
    padded = piece_tokenizer(TEXTS, padding=True)["input_ids"]
    row = "" if "one" in as_ else r" \(row 0 of the batch\)"
    message = rf"the input begins or ends with \d+ padding tokens \('\[PAD\]', id 0\), .*attention_mask.*out{row}$"
    with pytest.raises(InputError, match=message):
        classify(AS[as_](padded), 1)


def test_what_the_message_says_gives_the_numbers_of_the_texts(classify, piece_tokenizer):
    wanted = values(classify(TEXTS, 1))
    padded = piece_tokenizer(TEXTS, padding=True)
    assert values(classify(padded, 1)) == pytest.approx(wanted, abs=1e-12)
    assert values(classify(piece_tokenizer(TEXTS)["input_ids"], 1)) == pytest.approx(wanted, abs=1e-12)


def test_places_counted_from_the_first_of_what_began_with_padding_are_refused(piece_tokenizer):
    """They may be meant with the padding, as they stand in the encoding, or without."""
    piece_tokenizer.padding_side = "left"
    padded = piece_tokenizer(TEXTS, padding=True, return_tensors="pt")
    before = int((padded["attention_mask"][0] == 0).sum())
    assert before
    tag = Explainer(bert(tf.BertForTokenClassification, num_labels=3), piece_tokenizer)
    counted = rf"position 1 is counted from the first token, and the input began with {before} of padding"
    with pytest.raises(InputError, match=counted):
        tag(padded, 1, position=1)
    plain, found = tag(TEXTS, 1, position=-2), tag(padded, 1, position=-2)
    assert values(found) == pytest.approx(values(plain), abs=1e-12)
    one = {name: field[:1] for name, field in padded.items()}
    with pytest.raises(InputError, match="token 1 is counted from the first token"):
        tag.neurons(one, 1, position=-2, at=1)
    answer = Explainer(bert(tf.BertForQuestionAnswering), piece_tokenizer)
    with pytest.raises(TargetError, match="the answer's place 1 is counted from the first token"):
        answer(one, Span(1, 2))
    assert answer(one).explained == answer(TEXTS[0]).explained
    piece_tokenizer.padding_side = "right"
    assert values(tag(piece_tokenizer(TEXTS, padding=True), 1, position=1)) == pytest.approx(
        values(tag(TEXTS, 1, position=1)), abs=1e-12
    )


def test_a_mask_that_hides_nothing_says_that_padding_is_text(classify, piece_tokenizer):
    padded = piece_tokenizer(TEXTS[0], padding="max_length", max_length=12)
    meant = {"input_ids": padded["input_ids"], "attention_mask": [1] * 12}
    ids = torch.tensor([padded["input_ids"]])
    with torch.no_grad():
        value = float(classify.model(input_ids=ids, attention_mask=torch.ones(1, 12)).logits[0, 1])
    found = classify(meant, 1)
    assert len(found) == 12
    assert found.explained.value == pytest.approx(value, abs=1e-12)


def test_padding_between_tokens_is_what_was_written(classify):
    assert classify([2, 14, 0, 15, 3], 1).ids == (2, 14, 0, 15, 3)


def test_without_a_tokenizer_the_config_says_what_padding_is():
    explain = Explainer(bert(tf.BertForSequenceClassification, num_labels=3))
    with pytest.raises(InputError, match=r"ends with 2 padding tokens \(id 0\)"):
        explain([2, 14, 3, 0, 0])
    explain.model.config.pad_token_id = None
    assert len(Explainer(explain.model)([2, 14, 3, 0, 0])) == 5


def test_a_padding_token_that_the_tokenizer_is_given_later(byte_tokenizer):
    byte_tokenizer.pad_token = None
    explain, ids = Explainer(models.tiny_gpt2(vocab_size=400), byte_tokenizer), [5, 6, 2, 2]
    assert explain(ids).ids == tuple(ids)
    byte_tokenizer.pad_token = byte_tokenizer.eos_token
    with pytest.raises(InputError, match="ends with 2 padding tokens"):
        explain(ids)


def test_a_padding_token_that_also_ends_a_text(byte_tokenizer):
    """As GPT-2's users have it: one at an end may be the text's own, more are padding."""
    byte_tokenizer.pad_token = byte_tokenizer.eos_token
    end = byte_tokenizer.eos_token_id
    explain = Explainer(models.tiny_gpt2(vocab_size=400), byte_tokenizer)
    for ids in ([5, 6, end], [end, 5, 6], [end, 5, 6, end], [end]):
        assert explain(ids).ids == tuple(ids)
    for ids in ([5, 6, end, end], [end, end, 5]):
        with pytest.raises(InputError, match=r"with 2 padding tokens \('</s>', id 2\)"):
            explain(ids)
    assert len(explain(torch.tensor([[end, 5], [end, 6]]))) == 2, "the start of every row is none"
    for rows in ([[5, 6], [7, end]], [[5, 6], [end, 7]]):
        with pytest.raises(InputError, match=r"with 1 padding tokens .*\(row 1 of the batch\)"):
            explain(torch.tensor(rows))
    assert len(explain([[5, 6, 7], [7, end]])) == 2, "of different length, so nobody padded them"


def test_the_start_of_a_decoder_is_no_padding():
    explain = Explainer(models.tiny_t5())
    start = explain.model.config.decoder_start_token_id
    assert start == explain.model.config.pad_token_id
    assert explain([3, 14], decoder=[start, 8]).ids == (3, 14, start, 8)
    for decoder in ([start, 8, start], [start, start, 8]):
        with pytest.raises(InputError, match=r"the decoder begins or ends with \d padding tokens"):
            explain([3, 14], decoder=decoder)
    with pytest.raises(InputError, match="the encoder begins or ends with 1 padding"):
        explain([3, 14, start])


def test_labels_without_a_decoders_text_are_refused():
    """The model itself would make its decoder's text of them; left out, the first token it writes was explained."""
    model = tiny.bart(is_encoder_decoder=True)
    explain, given = Explainer(model), {"input_ids": [5, 7, 2], "labels": [8, 9, 2]}
    with pytest.raises(InputError, match="has labels, of which BartForConditionalGeneration would make the decoder's"):
        explain(given, 4)
    labels = torch.tensor([given["labels"]])
    with torch.no_grad():
        wanted = float(model(input_ids=torch.tensor([given["input_ids"]]), labels=labels).logits[0, -1, 4])
    shifted = model.prepare_decoder_input_ids_from_labels(labels)[0].tolist()
    assert explain(given, 4, decoder=shifted).explained.value == pytest.approx(wanted, abs=1e-12)
    assert explain({**given, "decoder_input_ids": shifted}, 4).explained.value == pytest.approx(wanted, abs=1e-12)


def test_a_decoders_text_that_begins_with_its_start_is_refused(piece_tokenizer):
    """As what ``generate`` returned reads, decoded: the start stood there twice."""
    model = tiny.bart(is_encoder_decoder=True, vocab_size=400, decoder_start_token_id=piece_tokenizer.cls_token_id)
    explain = Explainer(model, piece_tokenizer)
    with pytest.raises(InputError, match=r"the decoder's text begins with the token that the model starts with \(id"):
        explain("the key", 4, decoder="[CLS] a film")
    ids = piece_tokenizer("[CLS] a film", add_special_tokens=False)["input_ids"]
    assert explain("the key", 4, decoder="a film") == explain("the key", 4, decoder=ids)


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 0, 0]])
def test_a_mask_that_hides_what_a_decoder_has_written_is_refused(mask):
    explain = Explainer(models.tiny_t5())
    given = {"input_ids": [3, 14], "decoder_input_ids": [0, 8, 9]}
    with pytest.raises(InputError, match=r"the decoder_attention_mask hides tokens between others, or all; leave"):
        explain(given | {"decoder_attention_mask": mask})
    assert explain(given | {"decoder_attention_mask": [1, 1, 0]}).ids == (3, 14, 0, 8)
    with pytest.raises(InputError, match=r"the decoder_input_ids begin with padding.*pass them padded on the right"):
        explain(given | {"decoder_attention_mask": [0, 1, 1]})


# ------------------------------------------------------------------------------------- tuples


def test_a_tuple_is_one_input_or_refused(classify, causal, piece_tokenizer):
    pair = ("the key is small", "the keys are tall")
    inputs = piece_tokenizer(*pair, return_tensors="pt")
    with torch.no_grad():
        value = float(classify.model(**inputs).logits[0, 1])
    assert classify(pair, 1).explained.value == pytest.approx(value, abs=1e-12)
    assert len(classify(list(pair), 1)) == 2
    for several in (pair[:1], (*pair, "a film")):
        with pytest.raises(InputError, match=r"a tuple of [13] texts, and two make a pair; pass a list"):
            classify(several)
    for two in (([5, 6], [7, 8]), (torch.tensor([5, 6]), torch.tensor([7])), (inputs, inputs)):
        with pytest.raises(
            InputError, match="the input is a tuple of two, and only two texts make a pair; pass a list"
        ):
            classify(two)
        assert len(classify(list(two))) == 2
    assert len(classify((pair, pair))) == 2
    with pytest.raises(InputError, match="a pair of texts, and a causal language model takes one; pass a list for two"):
        causal(pair)
    with pytest.raises(InputError, match="encoder-decoder language model takes one"):
        Explainer(models.tiny_t5(vocab_size=200), piece_tokenizer)(pair)


def test_a_tokenizer_that_puts_nothing_between_two_texts_makes_no_pair(byte_tokenizer):
    explain = Explainer(tiny.gpt2_classifier(vocab_size=400), byte_tokenizer)
    with pytest.raises(InputError, match="puts nothing between a pair of texts; pass one text with what the model was"):
        explain(("the key", "is small"))


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_pairs_explain_in_one_line(piece_tokenizer, labels):
    """A reranker has one logit, which predicts nothing; paraphrase and entailment have classes."""
    explain = Explainer(bert(tf.BertForSequenceClassification, num_labels=labels), piece_tokenizer)
    found = explain([("is it small", "the key is small"), ("what is tall", "the girl is tall, the boys are near")])
    inputs = piece_tokenizer("is it small", "the key is small", return_tensors="pt")
    with torch.no_grad():
        logits = explain.model(**inputs).logits[0]
    assert found[0].explained.value == pytest.approx(float(logits.max()), abs=1e-12)
    assert (found[0].prediction is None) == (labels == 1)


# ---------------------------------------------------------------------------- types of tokens


def test_the_types_of_a_single_text_are_carried(piece_backend):
    """XLNet's ``<cls>`` comes last and has a type of its own."""
    backend = Tokenizer.from_str(piece_backend)
    backend.post_processor = processors.TemplateProcessing(
        single="$A:0 [SEP]:0 [CLS]:2", pair="$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **special
    )
    sizes = {"vocab_size": 200, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "pad_token_id": 0}
    torch.manual_seed(0)
    model = tf.XLNetForSequenceClassification(tf.XLNetConfig(**sizes, num_labels=3)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    explain = Explainer(model, tokenizer)
    given = ["the key is small", ("the key", "is small and tall")]
    for found, each in zip(explain(given, 1), given, strict=True):
        inputs = tokenizer(*([each] if isinstance(each, str) else each), return_tensors="pt")
        assert int(inputs["token_type_ids"][0, -1]) == 2
        with torch.no_grad():
            value = float(model(**inputs).logits[0, 1])
            untyped = float(model(input_ids=inputs["input_ids"]).logits[0, 1])
        assert found.explained.value == pytest.approx(value, abs=1e-9)
        assert abs(untyped - value) > 1e-5
        assert explain(inputs, 1).explained.value == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("whose", ["own", "peft"])
def test_types_reach_a_model_inside_another(whose, piece_tokenizer):
    """The forward pass of peft's models names neither the types nor the positions that it hands on."""
    model = bert(tf.BertForSequenceClassification, num_labels=3)
    if whose == "peft":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)
        with warnings.catch_warnings(action="ignore"):  # peft's own, of what transformers will remove
            outer = peft.get_peft_model(model, lora).double().eval()
    else:

        class OuterForSequenceClassification(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner, self.config = inner, inner.config

            def get_base_model(self):
                return self.inner

            def get_input_embeddings(self):
                return self.inner.get_input_embeddings()

            def forward(self, input_ids=None, attention_mask=None, **more):
                return self.inner(input_ids=input_ids, attention_mask=attention_mask, **more)

        outer = OuterForSequenceClassification(model).eval()
    ids, types = [2, 14, 15, 9, 3], [0, 0, 1, 1, 1]
    with torch.no_grad():
        typed = float(outer(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 1])
        untyped = float(outer(input_ids=torch.tensor([ids])).logits[0, 1])
    found = Explainer(outer)({"input_ids": ids, "token_type_ids": types}, 1)
    assert found.explained.value == pytest.approx(typed, abs=1e-12)
    assert abs(typed - untyped) > 1e-3


@pytest.mark.parametrize("pad", [None, 0])
@pytest.mark.parametrize("types", [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
def test_types_of_tokens_that_are_looked_up_among_the_tokens_are_refused(pad, types):
    """Types of 0 are no padding, whose id may be 0 too: what they add would be told nowhere."""
    config = tf.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, pad_token_id=pad)
    explain = Explainer(tf.GPT2LMHeadModel(config).eval())
    ids = [2, 14, 15, 9, 3]
    with pytest.raises(ModelError, match=r"used for the token_type_ids too.*return_token_type_ids=False"):
        explain({"input_ids": ids, "token_type_ids": types}, 1)
    assert len(explain({"input_ids": ids}, 1)) == 5


def test_a_forward_pass_that_hands_on_what_it_is_given_takes_what_that_of_its_class_takes(piece_tokenizer):
    """Types of tokens, and the mask, without which rows would run one by one."""

    class Mine(tf.BertForSequenceClassification):
        def forward(self, *args, **more):
            return super().forward(*args, **more)

    model = bert(Mine, num_labels=3)
    ids, types = [2, 14, 15, 9, 3], [0, 0, 1, 1, 1]
    with torch.no_grad():
        typed = float(model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 1])
        untyped = float(model(input_ids=torch.tensor([ids])).logits[0, 1])
    explain = Explainer(model)
    assert explain({"input_ids": ids, "token_type_ids": types}, 1).explained.value == pytest.approx(typed, abs=1e-12)
    assert abs(typed - untyped) > 1e-3
    assert explain.bound.can_batch
    assert not explain.bound.accepts("no_such_argument")


@pytest.mark.parametrize("read", ["pair", "encoding"])
def test_types_are_not_left_out_where_a_forward_pass_may_hand_them_on(read, piece_tokenizer):
    """To a model that a module of one's own holds; where they are all alike, there is nothing to tell."""

    class Mine(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, attention_mask=None, **more):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, **more).logits

    class Named(Mine):
        def forward(self, input_ids, attention_mask=None, token_type_ids=None):
            return super().forward(input_ids, attention_mask, token_type_ids=token_type_ids)

    inner = bert(tf.BertForSequenceClassification, num_labels=3)
    tokens = [(each, piece_tokenizer.convert_tokens_to_ids(each)) for each in ("[SEP]", "[CLS]")]
    piece_tokenizer.backend_tokenizer.post_processor = BertProcessing(*tokens)
    piece_tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    pair = ("the cat", "a dog")
    given = {"pair": pair, "encoding": dict(piece_tokenizer(*pair))}[read]
    with pytest.raises(InputError, match="so nobody knows whether it would hand them on; name token_type_ids among"):
        Explainer(Mine(inner).eval(), piece_tokenizer, task=Task.CLASSIFICATION)(given, 1)
    found = Explainer(Named(inner).eval(), piece_tokenizer, task=Task.CLASSIFICATION)(given, 1)
    assert found.relevance.equal(Explainer(inner, piece_tokenizer)(given, 1).relevance)
    alone = Explainer(Mine(inner).eval(), piece_tokenizer, task=Task.CLASSIFICATION)("the cat", 1)
    assert alone.relevance.equal(Explainer(inner, piece_tokenizer)("the cat", 1).relevance)


def of_pages(tokenizer):
    """A model that takes the places of words on a page, a page's ids, and the places of their words."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    model = tf.LayoutLMForSequenceClassification(tf.LayoutLMConfig(vocab_size=200, num_labels=3, **sizes)).eval()
    return Explainer(model.double(), tokenizer), [2, 14, 15, 3], torch.randint(0, 500, (1, 4, 4)).sort(-1).values


def test_several_numbers_for_each_token_lose_their_padding_with_it(piece_tokenizer):
    """The places of words on a page, as LayoutLM takes them."""
    explain, ids, boxes = of_pages(piece_tokenizer)
    padded = {
        "input_ids": [[*ids, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 0, 0]],
        "bbox": torch.cat([boxes, torch.zeros(1, 2, 4, dtype=torch.int64)], 1),
    }
    found, alone = explain(padded, 1), explain({"input_ids": [ids], "bbox": boxes}, 1)
    assert found.explained.value == alone.explained.value
    assert torch.equal(found.relevance, alone.relevance)


def test_several_numbers_for_each_token_of_a_flat_list(piece_tokenizer):
    """What a tokenizer of pages returns of one page without ``return_tensors``."""
    explain, ids, boxes = of_pages(piece_tokenizer)
    alone = explain({"input_ids": [ids], "bbox": boxes}, 1)
    for given in (
        {"input_ids": ids, "bbox": boxes[0].tolist()},
        {
            "input_ids": torch.tensor([*ids, 0]),
            "attention_mask": torch.tensor([1, 1, 1, 1, 0]),
            "bbox": torch.cat([boxes[0], boxes.new_zeros(1, 4)]),
        },
    ):
        assert torch.equal(explain(given, 1).relevance, alone.relevance)


@pytest.mark.parametrize("name", ["visual", "states"])
@pytest.mark.parametrize("count", [3, 6])
def test_what_stands_beside_a_text_is_whole_where_it_is_as_long_as_the_text_with_its_padding(
    name, count, piece_tokenizer
):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    given = {"input_ids": torch.tensor([[2, 14, 15, 3, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
    numbers, ones = torch.randn(1, count, 16, dtype=torch.float64), torch.ones(1, count, dtype=torch.int64)
    if name == "visual":
        config = tf.VisualBertConfig(vocab_size=200, num_labels=3, visual_embedding_dim=16, **sizes)
        model = tf.VisualBertForQuestionAnswering(config)
        given |= {"visual_embeds": numbers, "visual_attention_mask": ones, "visual_token_type_ids": ones}
        task, read = Task.CLASSIFICATION, 0
    else:
        config = tf.BertConfig(vocab_size=200, is_decoder=True, add_cross_attention=True, **sizes)
        model = tf.BertLMHeadModel(config)
        given |= {"encoder_hidden_states": numbers, "encoder_attention_mask": ones}
        task, read = Task.CAUSAL, (0, 3)
    model = model.double().eval()
    found = Explainer(model, piece_tokenizer, task=task)(given, 1)
    with torch.no_grad():
        wanted = model(**given).logits[read][..., 1]
    assert found.explained.value == pytest.approx(float(wanted), abs=1e-12)


def test_entities_of_a_text_are_whole_where_they_are_as_many_as_its_tokens():
    entities = {
        "entity_ids": torch.tensor([[3, 4, 5, 6]]),
        "entity_attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "entity_position_ids": torch.zeros(1, 4, 5, dtype=torch.int64),
    }
    text = {"input_ids": torch.tensor([[2, 14, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    found = read(text | entities, lambda *_: True)
    assert found.per_token == {"input_ids": [2, 14, 3]}
    assert all(torch.equal(found.arguments[key], value) for key, value in entities.items())
    flat = {key: value[0] for key, value in (text | entities).items()}  # as a tokenizer gives one text
    found = read(flat, lambda *_: True)
    assert found.per_token == {"input_ids": [2, 14, 3]}
    assert all(torch.equal(found.arguments[key], value) for key, value in entities.items())


# ---------------------------------------------------------------------- several texts together


def test_two_texts_to_compare_come_in_every_form(piece_tokenizer):
    explain = Explainer(bert(tf.BertModel), piece_tokenizer)
    pair = ("the keys are on the table", "the key is small")
    wanted = explain(pair)
    ids = piece_tokenizer(list(pair))["input_ids"]
    padded = piece_tokenizer(list(pair), padding=True, return_tensors="pt")
    each = tuple(piece_tokenizer(text) for text in pair)
    tensors = tuple(torch.tensor([row]) for row in ids)
    for given in (
        tuple(ids),
        tuple([row] for row in ids),
        tensors,
        each,
        padded,
        dict(padded),
        piece_tokenizer(list(pair)),
    ):
        found = explain(given)
        assert found.explained.value == pytest.approx(wanted.explained.value, abs=1e-12)
        torch.testing.assert_close(found.relevance, wanted.relevance, rtol=0, atol=1e-12)
    for given in (piece_tokenizer(pair[0]), piece_tokenizer([*pair, "a film"])):
        with pytest.raises(
            InputError, match=r"a text encoder takes several texts; pass them as a tuple: \(text, other\)"
        ):
            explain(given)
    with pytest.raises(InputError, match="a tuple of two tuples; pass a list for two inputs"):
        explain((pair, pair))
    assert len(explain([pair, pair])) == 2


def test_the_choices_of_a_question_as_a_tokenizer_returns_them(piece_tokenizer):
    explain = Explainer(bert(tf.BertForMultipleChoice), piece_tokenizer)
    text, choices = "the keys to the cabinet", ["are on the old table", "is small"]
    wanted = explain((text, choices), 1)
    padded = piece_tokenizer([text] * 2, choices, padding=True, return_tensors="pt")
    question = {name: value[None] for name, value in padded.items()}
    for given in (padded, question, {name: value.tolist() for name, value in question.items()}):
        found = explain(given, 1)
        assert [name for name, _, _ in found.segments] == ["choice 0", "choice 1"]
        assert found.explained.value == pytest.approx(wanted.explained.value, abs=1e-12)
        torch.testing.assert_close(found.relevance, wanted.relevance, rtol=0, atol=1e-12)
    two = explain({name: torch.cat([value, value]) for name, value in question.items()}, 1)
    assert values(two) == pytest.approx([wanted.explained.value] * 2, abs=1e-12)


# ------------------------------------------------------------------------------ what is no input


def test_embeddings_in_the_place_of_ids(classify):
    embedded = torch.randn(1, 3, 16, dtype=torch.float64)
    for given in ({"inputs_embeds": embedded}, {"input_ids": [2, 14, 3], "inputs_embeds": embedded}):
        with pytest.raises(InputError, match=r"the inputs_embeds cannot be explained here, .*lrpx\.propagate"):
            classify(given)


def test_an_array_of_texts_says_what_several_inputs_are(classify):
    with pytest.raises(InputError, match=r"a ndarray that holds str; .*; several inputs are a list, one input a text"):
        classify(np.array(["one", "two"]))


class Table:
    """A table as pandas has it: as an array has rows, and as a sequence the names of its columns."""

    ndim, columns = 2, ("one", "two")

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(self.columns)


def test_a_table_is_not_read_as_the_names_of_its_columns(classify):
    with pytest.raises(InputError, match=r"the input is Table, a table; pass the list of one column"):
        classify(Table())


def test_a_column_of_texts_says_what_several_inputs_are(classify):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    for given in (polars.Series(["one", "two"]), (each for each in ["one", "two"])):
        with pytest.raises(InputError, match=r"; several inputs are a list, as list\(texts\) makes one"):
            classify(given)


def test_a_whole_answer_as_target_says_what_to_do_today(causal):
    with pytest.raises(
        TargetError, match=r"is \d+ tokens: .*to explain a whole answer, token by token, write it after"
    ):
        causal("The keys", target=" to the cabinet")
    text, answer = "The keys", " to the cabinet"
    ids = causal.tokenizer(text)["input_ids"]
    whole = causal.tokenizer(text + answer)["input_ids"]
    assert whole[: len(ids)] == ids
    places = list(range(len(ids) - 1, len(whole) - 1))
    found = causal(whole, position=places, target=whole[len(ids) :])
    assert "".join(causal.tokenizer.decode([each]) for each in whole[len(ids) :]) == answer
    assert len(found) == len(places)


# ----------------------------------------------------------------------------------------- chats


MESSAGES = [
    {"role": "system", "content": "user"},
    {"role": "user", "content": "The keys to the cabinet?"},
    {"role": "assistant", "content": "are"},
    {"role": "user", "content": "assistant: The"},
]


def said(found):
    return [(name, "".join(found.tokens[a:b])) for name, a, b in found.segments]


def test_the_messages_of_a_chat_and_its_template_are_segments(causal):
    found = causal(MESSAGES)
    assert said(found) == [
        ("template", "<s>system: "),
        ("system", "user"),
        ("template", "\n<s>user: "),
        ("user", "The keys to the cabinet?"),
        ("template", "\n<s>assistant:"),
        ("assistant", " are"),  # one token, most of which is the message's
        ("template", "\n<s>user:"),
        ("user", " assistant: The"),
        ("template", "\n<s>assistant: "),
    ]
    summed = found.by_segment()
    assert summed.tokens == tuple(name for name, _ in said(found))
    for token, (name, start, end) in zip(summed, found.segments, strict=True):
        assert token.text == name
        assert token.relevance == pytest.approx(float(found.relevance[start:end].sum()), abs=1e-12)
    assert float(summed.relevance.sum()) == pytest.approx(float(found.relevance.sum()), abs=1e-12)


def test_a_message_that_goes_on_ends_the_segments(causal):
    found = causal([*MESSAGES[:2], {"role": "assistant", "content": "The keys"}])
    assert said(found)[-2:] == [("template", "\n<s>assistant: "), ("assistant", "The keys")]


@pytest.mark.parametrize("last", ["assistant", "user"])
def test_a_reward_model_reads_a_whole_chat(byte_tokenizer, last):
    """With the end of its last message, and no prompt for another: what the template makes of it by default."""
    model = tiny.llama_classifier(vocab_size=400, max_position_embeddings=128, num_labels=1)
    chat = [*MESSAGES[:2], {"role": last, "content": "are"}]
    made = byte_tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
    found = Explainer(model, byte_tokenizer)(chat)
    assert list(found.ids) == made["input_ids"][0].tolist()
    assert found.explained.value == pytest.approx(float(model(**made).logits), abs=1e-12)
    assert [name for name, _, _ in found.segments][-2:] == [last, "template"]


@pytest.mark.parametrize(
    ("template", "segments"),
    [
        (
            "{% for m in messages %}{{ '<s>' + m['content'] | trim + '</s>' }}{% endfor %}",
            ["template", "user", "template"],
        ),
        ("{% for m in messages %}{{ '<s>' + m['content'] | upper }}{% endfor %}", ["input"]),
        ("{{ messages | length }} {{ messages[-1]['content'] }}", ["template", "user"]),
        ("{{ 'nothing of it' }}", ["input"]),
        ("{% for m in messages %}{{ m['content'][:4] }}{% endfor %}", ["input"]),
        ("{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}", ["input"]),
    ],
)
def test_a_template_that_changes_what_is_said_has_no_segments_of_it(causal, template, segments):
    """Trimming aside, a part of the text is never said to be another's."""
    causal.tokenizer.chat_template = template
    found = causal([{"role": "user", "content": " The keys are "}])
    assert [name for name, _, _ in found.segments] == segments
    assert (found.segments[0][1], found.segments[-1][2]) == (0, len(found))


def test_segments_of_two_texts_are_summed(piece_tokenizer):
    explain = Explainer(bert(tf.BertModel), piece_tokenizer)
    found = explain(("the key is small", "the keys"))
    assert found.by_segment().tokens == ("first", "second")
    with pytest.raises(InputError, match="this attribution has no segments"):
        found.__class__(found.tokens, found.parts, found.explained, None, found.provenance).by_segment()


def test_a_chat_is_saved_with_its_segments(causal, tmp_path):
    found = causal(MESSAGES)
    found.save(tmp_path / "a")
    assert type(found).load(tmp_path / "a") == found
    assert "template" in found.to_html()


def test_what_processors_say_of_one_image():
    """Of images there are few numbers, which are no tokens', also where as many; of tokens there is one for each."""
    ids = torch.tensor([[5, 7, 9]])
    of_images = {
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "image_sizes": torch.tensor([[24, 32]]),
        "qformer_input_ids": torch.tensor([[3, 4, 5, 6]]),
    }
    found = read({"input_ids": ids, **of_images}, lambda *_: True)
    assert list(found.per_token) == ["input_ids"]
    assert all(torch.equal(found.arguments[name], value) for name, value in of_images.items())
    with pytest.raises(InputError, match=r"the token_type_ids are int64 of shape \[2\] for 3 tokens"):
        read({"input_ids": ids, "token_type_ids": torch.tensor([[0, 1]])}, lambda *_: True)


BESIDE = {
    **dict.fromkeys(("image_embeds", "image_hidden_states", "image_text_alignment", "image_position_ids"), (8, 4)),
    **dict.fromkeys(("cross_attention_states", "perceiver_embeddings", "query_embeds", "flattened_patches"), (8, 4)),
    **dict.fromkeys(("audio_input_ids", "pixel_mask", "protein_feats", "decoder_inputs"), (8, 4)),
    **dict.fromkeys(("pixel_attention_mask", "audio_attention_mask", "image_attention_mask"), (8,)),
    **dict.fromkeys(("feature_attention_mask", "input_features_mask", "input_values_mask"), (8,)),
    **dict.fromkeys(("audio_input_ids_mask", "protein_input_ids", "decoder_position_ids", "speaker_embeddings"), (8,)),
}
IN_TEXT = {
    **dict.fromkeys(("token_type_ids", "mm_token_type_ids", "input_shape_ids", "global_attention_mask"), (8,)),
    **dict.fromkeys(("image_embeds_position_mask", "images_seq_mask", "vision_mask", "entity_mask"), (8,)),
    **dict.fromkeys(("bbox", "xpath_tags_seq", "image_attention_mask", "cross_attention_mask"), (8, 4)),
}


@pytest.mark.parametrize("mask", [[1] * 8, [1] * 5 + [0] * 3, [0] * 3 + [1] * 5])
def test_padding_is_taken_off_what_is_said_of_tokens_alone(mask):
    """By the names that models give to images, sounds and what is made of them."""
    given = {"input_ids": torch.arange(8)[None] + 3, "attention_mask": torch.tensor([mask])}
    for name, sizes in BESIDE.items():
        value = torch.ones(1, *sizes, dtype=torch.int64)
        found = read({**given, name: value}, lambda *_: True)
        assert list(found.per_token) == ["input_ids"], name
        assert torch.equal(found.arguments[name], value), name
    for name, sizes in IN_TEXT.items():
        value = torch.tensor(mask).reshape(1, 8, *[1] * (len(sizes) - 1)).expand(1, *sizes)
        found = read({**given, name: value}, lambda *_: True)
        cut = found.per_token[name] if len(sizes) == 1 else found.arguments[name][0]
        assert len(cut) == sum(mask), name


@pytest.mark.parametrize("sizes", [(4,), (4, 8)])
def test_what_has_as_many_places_as_a_text_with_its_padding_is_refused_by_names_that_do_not_say_whose(sizes):
    """A model's own: numbers of some other thing, perhaps as many by chance, would lose places that are no padding."""
    text = {"input_ids": torch.tensor([[5, 7, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    for name in ("context", "text_embeds", "spatial_shapes", "padding_mask"):
        value = torch.ones(1, *sizes, dtype=torch.int64)
        for given in ({**text, name: value}, {key: each[0] for key, each in {**text, name: value}.items()}):
            with pytest.raises(InputError, match=f"the {name} are as many as .* pass the input without padding"):
                read(given, lambda *_: True)
        for count in (3, 5):  # as many as the text without it, and others
            given = {"input_ids": text["input_ids"][:, :3], name: torch.ones(1, count, 2)}
            assert torch.equal(read(given, lambda *_: True).arguments[name], given[name])


def test_another_text_is_whole_beside_one_that_is_as_long():
    text = {"input_ids": torch.tensor([[5, 7, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    other = {"context_input_ids": torch.tensor([[5, 7, 4, 3]]), "context_attention_mask": torch.ones(1, 4)}
    for given in (text | other, {key: each[0] for key, each in (text | other).items()}):
        found = read(given, lambda *_: True)
        assert found.per_token == {"input_ids": [5, 7, 9]}
        assert all(torch.equal(found.arguments[key], value) for key, value in other.items())


@pytest.mark.parametrize(("padding", "last"), [(1, [3]), (3, [4, 3, 7]), (3, [4, 0, 0])])
def test_ids_that_go_on_where_a_text_has_padding_are_another_text_s(padding, last):
    """A model's own, of two texts that a tokenizer has padded to one length: they would lose tokens."""
    text = {"input_ids": torch.tensor([[5, 7, 9, *[0] * padding]])}
    text["attention_mask"] = (text["input_ids"] > 0).to(torch.int64)
    for name, value in (
        ("context_ids", [5, 7, 4, *last]),
        ("knowledge_mask", [1, 1, 1, *[int(each > 0) for each in last]]),
    ):
        with pytest.raises(InputError, match=f"the {name} are as many as .* pass the input without padding"):
            read({**text, name: torch.tensor([value])}, lambda *_: True)
    for name in ("ner_ids", "image_mask", "speaker_ids"):  # of a text's tokens, padded with them
        for end in (0, -100):
            said = torch.tensor([[2, 1, 1, *[end] * padding]])
            assert read({**text, name: said}, lambda *_: True).per_token[name] == [2, 1, 1]


@pytest.mark.parametrize(
    "name",
    ["image_num_crops", "num_local_patches", "audio_feature_lengths", "lang_ids", "video_compression_mask"],
)
def test_what_is_said_of_each_image_or_of_the_whole_input_is_no_number_of_tokens(name):
    value = torch.tensor([1] if name == "lang_ids" else [1, 1])
    found = read({"input_ids": torch.tensor([[5, 7, 9]]), name: value}, lambda *_: True)
    assert torch.equal(found.arguments[name], value)


def test_one_number_beside_a_flat_list_is_of_the_whole_input_where_it_says_no_token_s():
    """``{**tokenizer(text), "lang_ids": [1]}``, as X-MOD's."""
    found = read({"input_ids": [5, 7, 9], "lang_ids": [1]}, lambda *_: True)
    assert found.arguments["lang_ids"].tolist() == [1]
    assert found.per_token == {"input_ids": [5, 7, 9]}
    assert read({"input_ids": [5], "ner_ids": [1]}, lambda *_: True).per_token["ner_ids"] == [1]
    for name in ("token_type_ids", "global_attention_mask"):
        with pytest.raises(InputError, match=r"int64 of shape \[1\] for 3 tokens; pass one number for each token"):
            read({"input_ids": [5, 7, 9], name: [1]}, lambda *_: True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_which_token_sees_which_is_cut_twice_where_a_text_has_padding(side):
    """XLNet's ``perm_mask``; a box for each of so many tokens is as it was."""
    model = tiny.xlnet()
    ids, sees = torch.tensor([[6, 7, 8, 9]]), torch.ones(4, 4, dtype=torch.float64).triu(1)[None]
    before = 2 if side == "left" else 0
    places = slice(before, before + 4)
    given = {name: torch.zeros(1, 6, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    given["perm_mask"] = torch.zeros(1, 6, 6, dtype=torch.float64)
    given["input_ids"][:, places], given["attention_mask"][:, places] = ids, 1
    given["perm_mask"][:, places, places] = sees
    logit = model(ids, perm_mask=sees).logits[0, -1, 4]
    assert Explainer(model)(given, 4).explained.value == pytest.approx(logit.item(), abs=1e-12)
    boxes = torch.ones(1, 4, 4, dtype=torch.int64)
    found = read({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]]), "bbox": boxes}, lambda *_: True)
    assert found.arguments["bbox"].shape == (1, 3, 4)


def test_a_spectrogram_is_read_where_others_have_samples():
    """AST's ``input_values``: ``[steps, frequencies]``, one or several of them, are no batch of recordings."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    steps = {"max_length": 12, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4, "patch_size": 4}
    torch.manual_seed(0)
    model = tf.ASTForAudioClassification(tf.ASTConfig(**sizes, **steps, num_labels=3)).eval()
    sounds = torch.randn(2, 12, 8)
    first, second = model(input_values=sounds).logits[:, 1].tolist()
    explain = Explainer(model)
    for given in (sounds[0], sounds[:1], {"input_values": sounds[:1]}):
        assert explain(given, 1).explained.value == pytest.approx(first, abs=1e-5)
    for given in (sounds, list(sounds), {"input_values": sounds}):
        assert [each.explained.value for each in explain(given, 1)] == pytest.approx([first, second], abs=1e-5)
    for given in (sounds[0].T, sounds[0, 0], {"input_values": sounds[0]}, torch.randn(1, 400)):
        with pytest.raises(InputError, match=r"takes the spectrogram of a sound, \[1, steps, 8\]; pass"):
            explain(given, 1)


def test_types_of_tokens_that_a_model_hands_on_to_its_encoder_are_read():
    """An EncoderDecoderModel names none among its arguments, and its BERT has embeddings of them."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    parts = {"vocab_size": 30, "initializer_range": 0.4}
    torch.manual_seed(0)
    encoder = tf.BertModel(tf.BertConfig(**sizes, **parts))
    decoder = tf.BertLMHeadModel(tf.BertConfig(**sizes, **parts, is_decoder=True, add_cross_attention=True))
    model = tf.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    given = {"input_ids": torch.tensor([[5, 7, 9]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    given["token_type_ids"] = torch.tensor([[0, 0, 1]])
    written = torch.tensor([[1, 7]])
    table = encoder.get_input_embeddings()
    kept = []

    def keep(module, args, output):
        kept.append(output.detach().requires_grad_())
        return kept[0] * 1

    with table.register_forward_hook(keep):
        logit = model(**given, decoder_input_ids=written).logits[0, -1, 4]
    (slope,) = torch.autograd.grad(logit, kept)
    found = Explainer(model)(given, 4, method="gradient-x-input", decoder=[1, 7])
    assert found.explained.value == pytest.approx(logit.item(), abs=1e-5)
    expected = (kept[0] * slope).detach().sum(-1)[0]
    torch.testing.assert_close(found.relevance[:3], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* as those of n-grams")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen4_exp"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_places_of_three_numbers_for_each_token_are_those_of_their_row_without_its_padding(name, side):
    """``[3, B, T]``, as ``get_rope_index`` makes them of padded texts; as many texts as numbers, and another count."""
    (kind,) = choose([name], "image-text-to-text")
    model = tiny_model(kind)
    explain = Explainer(model)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 30, (count,), generator=generator) for count in (6, 4, 3)]
    places = [torch.arange(len(ids))[None] * torch.tensor([[1], [2], [3]]) for ids in texts]
    alone = [
        explain({"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids)), "position_ids": at[:, None]}, 7)
        for ids, at in zip(texts, places, strict=True)
    ]
    values = [
        model(input_ids=ids[None], position_ids=at[:, None]).logits[0, -1, 7].item()
        for ids, at in zip(texts, places, strict=True)
    ]
    assert [each.explained.value for each in alone] == pytest.approx(values, abs=1e-5)

    def padded(rows):
        width = max(row.shape[-1] for row in rows)
        return torch.stack([torch.nn.functional.pad(row, shape(width - row.shape[-1])) for row in rows], -2)

    def shape(more):
        return (more, 0) if side == "left" else (0, more)

    for count in (1, 2, 3):
        chosen = [1] if count == 1 else range(count)
        width = {"input_ids": padded([texts[0], *texts])[1:], "position_ids": padded([places[0], *places])[:, 1:]}
        width["attention_mask"] = padded([torch.ones(len(ids), dtype=torch.int64) for ids in [texts[0], *texts]])[1:]
        batch = {key: each[..., list(chosen), :] for key, each in width.items()}
        found = explain(batch, 7)
        for at, each in zip(chosen, [found] if count == 1 else found, strict=True):
            torch.testing.assert_close(each.relevance.clone(), alone[at].relevance.clone(), rtol=1e-3, atol=1e-6)
    with pytest.raises(InputError, match=r"the position_ids are int64 of shape \[3, 1, 5\] for 6 tokens"):
        explain({"input_ids": texts[0][None], "position_ids": torch.zeros(3, 1, 5, dtype=torch.int64)}, 7)


def test_a_token_of_a_page_is_left_out_where_the_model_counts_places_twice():
    """LayoutLMv3 counts them from 2 for its embeddings, from 0 for its biases."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    parts = {"coordinate_size": 3, "shape_size": 2, "initializer_range": 0.4, "num_labels": 3}
    torch.manual_seed(0)
    model = tf.LayoutLMv3ForSequenceClassification(tf.LayoutLMv3Config(vocab_size=200, **sizes, **parts))
    model = model.eval().double()
    ids, boxes = torch.tensor([[5, 14, 15, 9, 3]]), torch.randint(0, 500, (1, 5, 4)).sort(-1).values
    found = Explainer(model)({"input_ids": ids, "bbox": boxes}, 1, method="leave-one-out").relevance
    masks = 1 - torch.eye(5, dtype=torch.int64)
    with torch.no_grad():
        whole, *others = (
            model(input_ids=ids, bbox=boxes, attention_mask=mask[None]).logits[0, 1] for mask in (masks[0] | 1, *masks)
        )
    torch.testing.assert_close(found, whole - torch.stack(others), rtol=0, atol=1e-9)


def test_a_text_behind_which_the_tokenizer_puts_an_end_is_refused_unless_it_is_said_where(piece_tokenizer):
    """What a model says there is what comes after an end, as of a BERT that writes."""
    model = models.tiny_gpt2(vocab_size=len(piece_tokenizer))
    explain = Explainer(model, piece_tokenizer)
    for given in ("the keys", ["the keys", "the old table"]):
        with pytest.raises(InputError, match=r"puts '\[SEP\]' behind a text, and .* pass position=-2"):
            explain(given, 5)
    ids = piece_tokenizer("the keys")["input_ids"]
    found = explain("the keys", 5, position=-2, method="gradient-x-input")
    with torch.no_grad():
        assert found.explained.value == pytest.approx(model(torch.tensor([ids[:-1]])).logits[0, -1, 5].item())
    assert explain("the keys", 5, position=-1) == explain(ids, 5)
    without = piece_tokenizer("the keys", add_special_tokens=False)
    assert explain(without, 5).ids == tuple(ids[1:-1])


def test_a_table_of_positions_that_grew_takes_longer_texts():
    model = models.tiny_gpt2()
    explain, width = Explainer(model), model.config.n_positions
    assert explain.bound.limit == width
    explain([3, 4], 5)
    model.config.n_positions, wide = width + 4, torch.nn.Embedding(width + 4, model.config.n_embd)
    model.transformer.wpe = wide.to(model.dtype)
    assert len(explain([3] * (width + 4), 5)) == explain.bound.limit == width + 4
