"""What cannot be explained is refused with an error that names the thing and ends with the mend."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
import transformers as tf

import lrpx
from lrpx import Contrast, Explainer, Logit, LogProb
from lrpx.errors import InputError, MethodError, ModelError, NonFiniteError, TargetError
from tests import tiny
from tests.reference import models

IDS = [3, 14, 15]


@pytest.fixture
def causal(byte_tokenizer):
    return Explainer(models.tiny_gpt2(vocab_size=len(byte_tokenizer)), byte_tokenizer)


@pytest.fixture(scope="module")
def by_ids():
    return Explainer(models.tiny_llama())


def says(error, *parts):
    """The error's message holds these parts in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# ------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_empty_text(causal, text):
    with says(InputError, "the text is empty", "pass a text"):
        causal(text)


def test_text_longer_than_the_context(causal):
    with says(InputError, "the input has 65 tokens", "context is 64", "shorten it"):
        causal("\n" * 64 + "a")
    assert len(causal("\n" * 63 + "a")) == 64
    with says(InputError, "the input has 70 tokens", "context is 64", "(row 1 of the batch)"):
        causal([IDS, [5] * 70])


def test_a_roberta_has_fewer_positions_than_its_config_says():
    explain = Explainer(tiny.roberta())
    with says(InputError, "63 tokens", "context is 62"):
        explain([5] * 63, position=0)
    assert len(explain([5] * 62, position=0)) == 62


def test_a_decoder_longer_than_the_context():
    with says(InputError, "the decoder has 65 tokens", "context is 64"):
        Explainer(tiny.bart())(IDS, decoder=[2] * 65)


@pytest.mark.parametrize("given", [[3, 31], torch.tensor([3, 31]), (3, 31)])
def test_ids_outside_the_vocabulary(by_ids, given):
    with says(InputError, "token id 31 is outside", "pass ids 0 to 30"):
        by_ids(given)
    with says(InputError, "token id -1 is outside"):
        by_ids([-1])


def test_a_tokenizer_of_another_model(byte_tokenizer):
    with says(InputError, "the tokenizer makes token id", "vocabulary ends at 30", "the model's own tokenizer"):
        Explainer(models.tiny_gpt2(), byte_tokenizer)("The keys")


def test_ids_that_the_tokenizer_does_not_know(byte_tokenizer):
    explain = Explainer(models.tiny_gpt2(vocab_size=400), byte_tokenizer)
    with says(InputError, "token id 399 at position 1", "pass ids from this tokenizer", "(row 1 of the batch)"):
        explain([[5], [6, 399]])


def test_a_prediction_the_tokenizer_does_not_know_is_shown_by_its_id(byte_tokenizer):
    explain = Explainer(models.tiny_gpt2(vocab_size=400), byte_tokenizer)
    assert explain([5], target=399).explained.description == "logit of '#399'"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (None, ("the input is NoneType; pass a text, token ids or chat messages",)),
        (7, ("the input is int; pass a text",)),
        ({"ids": [3]}, ("the input is dict without input_ids", "pass what the tokenizer returned, or a text")),
        ({"input_ids": [3, 99]}, ("token id 99 is outside", "pass ids 0 to 30")),
        ({"input_ids": []}, ("the input_ids are float64 of shape [0]", "pass the whole numbers of one input")),
        (
            {"input_ids": "text"},
            ("the input_ids are a str that is no array of numbers", "pass what the tokenizer returned"),
        ),
        ({"input_ids": [[3.5, 4]]}, ("the input_ids are float64 of shape [1, 2]",)),
        ({"input_ids": [3, 4], "attention_mask": [0, 0]}, ("the attention_mask hides",)),
        ({"input_ids": [3, 4], "attention_mask": [0.0, -1e9]}, ("holds other numbers than 0 and 1", "0 for padding")),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 0, 1]}, ("hides tokens between others", "leave these tokens")),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 1]}, ("differ in shape",)),
        ([3.5, 4.0], ("the input is a list that holds float", "pass a text, token ids")),
        ([3, "x"], ("a list that holds str", "pass a text")),
        (torch.zeros(1, 2, 3), ("has shape [1, 2, 3]", "flat list")),
        (torch.tensor(3), ("has shape []", "flat list")),
        ((text for text in ["a"]), ("the input is generator",)),
        ([], ("the list of inputs is empty", "pass at least one")),
        (torch.tensor([], dtype=torch.long), ("the input has no token ids", "pass at least one")),
        ([IDS, []], ("the input has no token ids", "(row 1 of the batch)")),
        ([IDS, None], ("the input is NoneType", "(row 1 of the batch)")),
        ("text", ("there is no tokenizer", "pass token ids, or a tokenizer")),
        ([{"role": "user", "content": "hi"}], ("there is no tokenizer", "pass token ids, or a tokenizer")),
    ],
)
def test_what_is_no_input(by_ids, given, parts):
    with says(InputError, *parts):
        by_ids(given)


def test_an_empty_text_in_a_batch_names_its_row(causal):
    with says(InputError, "the text is empty", "(row 2 of the batch)"):
        causal(["The keys", "The boys", " "])


def test_chat_messages_without_a_template(causal):
    causal.tokenizer.chat_template = None
    with says(InputError, "has no chat template", "tokenizer.chat_template"):
        causal([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["target", "contrast", "position"])
def test_lists_of_another_length(by_ids, name):
    with says(InputError, f"{name} is a list of 3 for 2 inputs", "one for all, or one for each"):
        by_ids([IDS, IDS], **{name: [1, 2, 0]})


def test_decoders_of_another_length():
    with says(InputError, "decoder is a list of 1 for 2 inputs"):
        Explainer(models.tiny_t5())([IDS, IDS], decoder=[[0]])


@pytest.mark.parametrize("position", [3, -4, 10**9])
def test_position_outside(by_ids, position):
    with says(InputError, f"position {position} is outside the 3 tokens", "pass -3 to 2"):
        by_ids(IDS, position=position)


@pytest.mark.parametrize("position", ["1", 1.0, True])
def test_position_that_is_no_number(by_ids, position):
    with says(InputError, f"the position is {position!r}", "pass a whole number"):
        by_ids(IDS, position=position)


@pytest.mark.parametrize("size", [0, -1, "4", 2.0, None])
def test_batch_size_that_is_none(by_ids, size):
    with says(InputError, f"batch_size is {size!r}", "at least 1"):
        by_ids([IDS], batch_size=size)


def test_masks_of_a_masked_model(piece_tokenizer):
    explain = Explainer(models.tiny_bert(vocab_size=len(piece_tokenizer)), piece_tokenizer)
    for text, count in (("the keys", 0), ("[MASK] keys [MASK]", 2)):
        with says(InputError, "explained at '[MASK]'", f"has {count} of it", "exactly one", "or pass position"):
            explain(text)
    with says(InputError, "explained at the mask token", "pass position"):
        Explainer(explain.model)([3, 4])


def test_arguments_that_are_not_for_this_kind_of_model(by_ids):
    with says(InputError, "LlamaForCausalLM has no decoder of its own", "leave decoder out"):
        by_ids(IDS, decoder=[1])
    with says(InputError, "the logits of a sequence classifier belong to the whole input", "leave position out"):
        Explainer(tiny.bert_classifier())(IDS, position=0)


def test_a_decoder_needs_a_start_and_a_tokenizer():
    model = models.tiny_t5()
    with says(InputError, "no tokenizer to read the decoder's text", "pass decoder ids"):
        Explainer(model)(IDS, decoder="The")
    with says(InputError, "the decoder has no token ids"):
        Explainer(model)(IDS, decoder=[])
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with says(InputError, "names no decoder_start_token_id", "pass decoder ids that begin with one"):
        Explainer(model)(IDS)


# ------------------------------------------------------------------------------- targets


def test_target_of_several_tokens_shows_the_pieces(causal):
    with says(TargetError, "the target ' zebra' is", "tokens: ' ", "(id ", "pass one of them by its id"):
        causal("The", target=" zebra")
    with says(TargetError, "the target ' zebra' is", "(row 1 of the batch)"):
        causal(["The", "The"], target=[" are", " zebra"])


def test_target_outside_the_vocabulary(piece_tokenizer):
    explain = Explainer(models.tiny_bert(vocab_size=len(piece_tokenizer)), piece_tokenizer)
    with says(TargetError, "the vocabulary does not have the target '🙂'", "[UNK]"):
        explain("the [MASK]", target="🙂")


def test_contrast_equal_to_target(causal):
    with says(TargetError, "the contrast ' are' is the target itself", "pass another contrast"):
        causal("The", " are", " are")
    predicted = causal("The").prediction.id
    with says(TargetError, f"the contrast {predicted} is the model's own prediction", "pass another contrast"):
        causal("The", contrast=predicted)


def test_contrast_beside_a_target_object(by_ids):
    with says(TargetError, "both a target object and a contrast", "Contrast(token, other)"):
        by_ids(IDS, Logit(3), 4)
    with says(TargetError, "the contrast is Logit; pass a string or an index"):
        by_ids(IDS, 3, Logit(4))


@pytest.mark.parametrize("target", [1.5, True, {}, b"a"])
def test_what_is_no_target(by_ids, target):
    with says(TargetError, f"the target is {type(target).__name__}", "pass a string, an index or a target"):
        by_ids(IDS, target)


def test_target_index_out_of_range(by_ids):
    with says(TargetError, "target 31 is index 31, the model has 31 logits", "pass 0 to 30"):
        by_ids(IDS, 31)
    with says(TargetError, "contrast -1 is index -1"):
        by_ids(IDS, 3, -1)
    with says(TargetError, "contrast 99 is index 99"):
        by_ids(IDS, Contrast(3, 99))


def test_target_text_without_a_tokenizer(by_ids):
    with says(TargetError, "no tokenizer to read the target ' are'", "pass its token id"):
        by_ids(IDS, " are")


def test_unknown_class(piece_tokenizer):
    explain = Explainer(tiny.bert_classifier(vocab_size=len(piece_tokenizer)), piece_tokenizer)
    with says(TargetError, "no class 'POSITIVE'", "'negative', 'positive', 'mixed'", "or the index of a class"):
        explain("the film", target="POSITIVE")
    with says(TargetError, "the contrast: there is no class 'POSITIVE'"):
        explain("the film", target="positive", contrast="POSITIVE")


def test_a_label_of_two_classes(piece_tokenizer):
    """ImageNet has two cranes: which of them is meant is not for us to say."""
    model = tiny.bert_classifier(vocab_size=len(piece_tokenizer))
    model.config.id2label = {0: "crane", 1: "dog", 2: "crane"}
    explain = Explainer(model, piece_tokenizer)
    for asked in ({"target": "crane"}, {"target": "dog", "contrast": "crane"}):
        with says(TargetError, "2 classes are called 'crane': 0, 2", "by its id, such as 0 for 'crane'"):
            explain("the film", **asked)
    assert explain("the film", target="dog").explained.value == explain("the film", target=1).explained.value
    assert "'crane (2)' − logit of 'crane (0)'" in explain("the film", target=2, contrast=0).explained.description


def test_a_model_that_ends_in_a_softmax(piece_tokenizer):
    model = tiny.bert_classifier(vocab_size=len(piece_tokenizer))
    model.classifier = torch.nn.Sequential(model.classifier, torch.nn.Softmax(-1))
    for method in ("attnlrp", "gradient-x-input"):
        with says(ModelError, "BertForSequenceClassification gives probabilities, not logits", "without the softmax"):
            Explainer(model, piece_tokenizer)("the film", method=method)
    model.classifier = model.classifier[0]
    assert Explainer(model, piece_tokenizer)("the film", target=LogProb(0)).tokens


class EndsIn(torch.nn.Module):
    """A binary classifier as it is trained with ``BCELoss``."""

    def __init__(self, end, count=1):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head, self.end = torch.nn.Embedding(50, 16), torch.nn.Linear(16, count), end

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids):
        return self.end(self.head(self.table(input_ids).relu().mean(1)))


ENDS = {"module": torch.nn.Sigmoid(), "method": torch.Tensor.sigmoid, "in place": lambda z: z.clone().sigmoid_()}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("count", [1, 4])
def test_a_model_that_ends_in_a_sigmoid(end, count):
    for method in ("attnlrp", "lrp", "gradient-x-input"):
        with says(ModelError, "EndsIn gives probabilities, not logits", "without the sigmoid"):
            Explainer(EndsIn(end, count).eval(), task=lrpx.Task.CLASSIFICATION)(IDS, method=method)


LOG_ENDS = {
    "module": torch.nn.LogSigmoid(),
    "softplus": lambda z: -torch.nn.functional.softplus(-z),
    "of a sigmoid": lambda z: z.sigmoid().log(),
}


@pytest.mark.parametrize("end", LOG_ENDS.values(), ids=LOG_ENDS)
@pytest.mark.parametrize("count", [1, 4])
def test_a_model_that_ends_in_the_logarithm_of_a_sigmoid(end, count):
    for method in ("attnlrp", "lrp", "gradient-x-input"):
        with says(ModelError, "EndsIn gives log-probabilities, not logits", "without the logarithm of a sigmoid"):
            Explainer(EndsIn(end, count).eval(), task=lrpx.Task.CLASSIFICATION)(IDS, method=method)


def test_logits_below_0_are_no_logarithms_and_cost_no_second_run():
    model = EndsIn(lambda z: z, 4).eval()
    with torch.no_grad():
        model.head.bias -= 9
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    explainer = Explainer(model, task=lrpx.Task.CLASSIFICATION)
    explainer(IDS)
    before = len(calls)
    assert explainer(IDS).explained.value < -5
    assert len(calls) == before + 1


def test_a_batch_of_a_model_that_ends_in_a_sigmoid():
    model = tiny.bert_classifier()
    model.classifier = torch.nn.Sequential(model.classifier, torch.nn.Sigmoid())
    with says(ModelError, "gives probabilities, not logits", "without the sigmoid"):
        Explainer(model)([IDS, [5, 7]])


def test_what_lies_between_0_and_1_is_no_probability():
    model = EndsIn(lambda z: z.sigmoid() / 2 + 0.25).double().eval()
    a = Explainer(model, task=lrpx.Task.CLASSIFICATION)(IDS, ledger=True)
    with lrpx.propagate(model, lrpx.ATTNLRP) as trace:
        value = model(torch.tensor([IDS]))[0, 0]
    trace.explain(value)
    assert 0 < a.explained.value < 1
    assert a.ledger.total == pytest.approx(a.explained.value, abs=1e-9)
    assert torch.allclose(a.relevance, trace.relevance("table")[0].sum(-1), atol=1e-12)


def test_logits_that_sum_to_about_one_are_no_probabilities():
    model = tiny.bert_classifier()
    ids = [5, 7, 9, 11, 13]
    with torch.no_grad():
        model.classifier.bias += torch.tensor([0.5, 0.3, 0.2]).to(model.dtype) - model(torch.tensor([ids])).logits[0]
        model.classifier.bias[0] += 1e-4
    a = Explainer(model)(ids, 0)
    assert a.explained.value == pytest.approx(0.5001)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [2, 30_000])
def test_probabilities_of_every_precision_are_refused(dtype, classes):
    model = tiny.bert_classifier(num_labels=classes)
    model.classifier = torch.nn.Sequential(model.classifier, torch.nn.Softmax(-1))
    with says(ModelError, "gives probabilities, not logits"):
        Explainer(model.to(dtype))([5, 7, 9, 11, 13], 0)


# ------------------------------------------------------------------------ methods, models


@pytest.mark.parametrize("method", ["AttnLRP", "", None, 3, Logit(3)])
def test_unknown_method(by_ids, method):
    with says(
        MethodError,
        "method",
        "attnlrp, lrp, alti-logit, logit, alti, gradient-x-input, gradient-l1, gradient-l2-squared",
    ):
        by_ids(IDS, method=method)


def test_training_mode():
    model = models.tiny_llama().train()
    with says(ModelError, "the model is in training mode", "call model.eval()"):
        Explainer(model)(IDS)


def test_one_dropout_in_training_mode():
    model = models.tiny_gpt2()
    model.transformer.h[1].attn.resid_dropout.train()
    with says(ModelError, "transformer.h.1.attn.resid_dropout is in training mode", "call model.eval()"):
        Explainer(model)(IDS)


# --------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_found_at_their_module(bad):
    model = models.tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = bad
    with says(NonFiniteError, "NaN or infinity in the", "first in the output of model.layers.1.mlp.up_proj", "check"):
        Explainer(model)([IDS, IDS[:1]])


def test_a_single_infinite_logit_is_found():
    model = models.tiny_llama()
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(31, dtype=torch.float64))
        model.lm_head.bias[5] = float("inf")
    with says(NonFiniteError, "logits", "lm_head"):
        Explainer(model)(IDS, target=3)


def test_logits_of_minus_infinity_are_a_mask():
    model = models.tiny_llama()
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(31, dtype=torch.float64))
        model.lm_head.bias[5] = -float("inf")
    assert Explainer(model)(IDS).relevance.isfinite().all()
    with says(NonFiniteError, "NaN or infinity in the explained value"):
        Explainer(model)(IDS, target=5)


def test_a_gradient_that_is_not_finite_is_found():
    model = models.tiny_gpt2()

    def spoil(_module, _inputs, output):
        output.register_hook(lambda gradient: gradient * float("nan"))

    hook = model.transformer.h[1].mlp.register_forward_hook(spoil)
    with says(NonFiniteError, "the relevance of", "is not finite", "transformer.h.1", "float32"):
        Explainer(model)(IDS, method="gradient-x-input")  # a strict recipe refuses such a hook
    hook.remove()
    assert Explainer(model)(IDS).relevance.isfinite().all()


def test_every_message_comes_from_one_tree():
    for error in (InputError, TargetError, ModelError, MethodError, NonFiniteError):
        assert issubclass(error, lrpx.LRPxError)


@pytest.mark.parametrize("given", [b"The keys", bytearray(b"The keys"), memoryview(b"The keys"), [b"The keys"]])
def test_bytes_are_no_text_and_no_token_ids(given):
    with pytest.raises(InputError, match=r"which is no text; pass a str, such as bytes\(…\).decode\(\)"):
        Explainer.from_pretrained()(given)


# ----------------------------------------------------------------------- fields, images, classes


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        (
            "token_type_ids",
            [0, 5, 0],
            "the token_type_ids hold 5, the model takes 0 to 1; pass these, or leave them out",
        ),
        ("token_type_ids", [0, -1, 0], "the token_type_ids hold -1"),
        (
            "position_ids",
            [0, 64, 2],
            "the position_ids hold 64, the model takes 0 to 63; pass these, or leave them out",
        ),
        ("position_ids", [0, -1, 2], "the position_ids hold -1"),
    ],
)
def test_types_and_places_that_the_model_has_no_embeddings_of(field, wrong, said):
    explain = Explainer(tiny.bert_classifier())
    given = {"input_ids": IDS, "attention_mask": [1, 1, 1]}
    with says(InputError, said):
        explain(given | {field: wrong})
    assert len(explain(given | {field: [0, 1, 1]})) == 3


def test_texts_that_are_packed_into_one_row():
    explain, packed = Explainer(models.tiny_llama()), {"input_ids": [*IDS, *IDS], "position_ids": [0, 1, 2, 0, 1, 2]}
    with says(InputError, "the position_ids do not count up by one", "pass each text by itself"):
        explain(packed)
    ones = packed | {"attention_mask": [1] * 6}  # of a mask all models make the same
    assert explain(ones).explained.value != explain({"input_ids": [*IDS, *IDS]}).explained.value
    moved = {"input_ids": IDS, "position_ids": [3, 4, 5]}
    assert explain(moved | {"attention_mask": [1, 1, 1]}).explained.value == explain(moved).explained.value


def test_a_tokenizer_whose_types_the_model_does_not_have(piece_tokenizer):
    config = tf.RobertaConfig(**tiny.SIZES | {"vocab_size": 160}, pad_token_id=0, type_vocab_size=1)
    explain = Explainer(tiny.build(tf.RobertaForSequenceClassification, config), piece_tokenizer)
    given = piece_tokenizer("the key", "the keys")
    with says(InputError, "the token_type_ids hold 1, the model takes 0 to 0"):
        explain(given | {"token_type_ids": [0] * 4 + [1] * (len(given["input_ids"]) - 4)})


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA"])
def test_an_image_of_other_colours_says_what_to_do(mode):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    config = tf.ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=24)  # fmt: skip
    explain = Explainer(
        tf.ViTForImageClassification(config).eval(), tf.ViTImageProcessor(size={"height": 8, "width": 8})
    )
    given = image.new(mode, (12, 12))
    with says(InputError, f"of mode {mode}", "image.convert('RGB')"):
        explain(given)
    assert "pixels" in explain(given.convert("RGB")).parts
    with says(InputError, "the image, which is ndarray of shape [12, 12]", "image.convert('RGB')"):
        explain(numpy.zeros((12, 12), numpy.uint8))
    with says(InputError, "Tensor of shape [1, 8, 8], and the model takes 3 channels, not 1"):
        explain(torch.zeros(1, 8, 8))
    with says(InputError, "Tensor of shape [8, 8, 3], and the model", "such as image.permute(2, 0, 1)"):
        explain(torch.randn(8, 8, 3))


def test_several_classes_at_once_have_a_sigmoid_each():
    """A softmax over them would be a probability that the model does not give."""
    model = tiny.bert_classifier(problem_type="multi_label_classification")
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    found = Explainer(model)(IDS).prediction
    assert found.id == int(logits.argmax())
    assert found.probability == pytest.approx(float(logits.sigmoid().max()), abs=1e-12)
    with says(TargetError, "multi_label_classification", "no softmax", "pass the class itself"):
        Explainer(model)(IDS, LogProb(1))
    assert Explainer(tiny.bert_classifier(problem_type="regression"))(IDS).prediction is None
    one = Explainer(tiny.bert_classifier(problem_type="single_label_classification"))(IDS).prediction
    assert one.probability == pytest.approx(float(logits.softmax(-1).max()), abs=1e-12)
