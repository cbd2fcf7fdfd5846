"""What a model returns is read as its task says, or refused by name; pipelines, tokenizers, and names of models."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
import transformers as tf

from lrpx import Explainer, Task
from lrpx.errors import InputError, ModelError
from lrpx.model import BUNDLED, BoundModel, Spec
from tests import tiny
from tests.reference import models
from tests.test_readers import bert


class Own(torch.nn.Module):
    """A language model that gives its logits ``[B, T, V]`` to a function."""

    def __init__(self, returns):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.returns = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31), returns

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        return self.returns(self.head(self.embedding(input_ids)))


class Named:
    """An output that is no dict and no tuple."""

    def __init__(self, logits):
        self.logits = logits


RIGHT = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None),
    "list": lambda x: [x],
    "dict": lambda x: {"loss": None, "logits": x},
    "object": Named,
}
WRONG = {
    "None": (lambda x: None, "Own returned NoneType"),
    "rows": (lambda x: x[0], r"Own returned a tensor \[3, 31\] of float32"),
    "last": (lambda x: x[:, -1], r"Own returned a tensor \[\d, 31\] of float32"),
    "more": (lambda x: x[None], r"Own returned a tensor \[1, \d, 3, 31\] of float32"),
    "ids": (lambda x: x.argmax(-1), r"Own returned a tensor \[\d, 3\] of int64"),
    "empty": (lambda x: (), "Own returned tuple"),
    "tuple of None": (lambda x: (None, x), "Own returned NoneType"),
    "dict": (lambda x: {"scores": x}, "Own returned dict of scores"),
    "logits None": (lambda x: {"logits": None}, "Own returned NoneType"),
    "text": (lambda x: "logits", "Own returned str"),
}
IDS = [5, 6, 7]


@pytest.mark.parametrize("name", RIGHT)
def test_logits_in_every_form(name):
    found, wanted = (
        Explainer(Own(form).eval(), task=Task.CAUSAL)([IDS, [8]], 3) for form in (RIGHT[name], RIGHT["tensor"])
    )
    assert [each.explained.value for each in found] == [each.explained.value for each in wanted]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("given", [IDS, [IDS, IDS]], ids=["one", "two"])
def test_what_is_no_logits_is_refused(name, given):
    returns, told = WRONG[name]
    message = (
        rf"{told}, and a causal language model returns logits \[B, T, V\], a row for each of \d inputs; return these"
    )
    with pytest.raises(ModelError, match=message):
        Explainer(Own(returns).eval(), task=Task.CAUSAL)(given)


@pytest.mark.parametrize("returns", [lambda x: x[0], lambda x: x], ids=["rows", "all"])
def test_the_logits_of_a_classifier_are_a_row_an_input(returns):
    """Rows of tokens once went for rows of inputs."""
    message = r"a sequence classifier returns logits \[B, V\], a row for each of 1 inputs"
    with pytest.raises(ModelError, match=message):
        Explainer(Own(returns).eval(), task=Task.CLASSIFICATION)([IDS, IDS])
    found = Explainer(Own(lambda x: x.mean(1)).eval(), task=Task.CLASSIFICATION)(IDS, 3)
    assert found.explained.description == "logit of '3'"


@pytest.mark.parametrize("config", [types.SimpleNamespace(block_size=8, vocab_size=31), {"block_size": 8}, None, 7])
def test_a_config_of_ones_own_is_no_config_of_transformers(config):
    """As nanoGPT and minGPT have it."""
    model = Own(lambda x: x).eval()
    model.config = config
    assert Explainer(model, task=Task.CAUSAL)([IDS, [8]], 3)[0].ids == tuple(IDS)


def test_logits_of_the_last_token_alone_are_no_other_tokens():
    explain = Explainer(Own(lambda x: x[:, -1:]).eval(), task=Task.CAUSAL)
    with pytest.raises(ModelError, match="returned logits of 1 places for 3 tokens; return those of every token"):
        explain(IDS, position=0)


@pytest.mark.parametrize(
    "kind", [tf.BertForQuestionAnswering, tf.BertForSequenceClassification, tf.BertForMaskedLM,
             tf.BertForTokenClassification, tf.BertModel, tf.BertForMultipleChoice],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_a_config_that_wants_tuples_changes_nothing(kind, piece_tokenizer):
    given = {"BertModel": ("the key", "is small"), "BertForMultipleChoice": ("the key", ["is small", "are tall"])}
    position = {"BertForMaskedLM": 1, "BertForTokenClassification": 1}.get(kind.__name__)
    asked = given.get(kind.__name__, "the key is small")
    model = bert(kind)
    wanted = Explainer(model, piece_tokenizer)(asked, position=position)
    model.config.return_dict = False
    assert isinstance(model(torch.tensor([IDS]) if "Choice" not in kind.__name__ else torch.tensor([[IDS]])), tuple)
    found = Explainer(model, piece_tokenizer)(asked, position=position)
    assert found.explained == wanted.explained
    assert torch.equal(found.relevance, wanted.relevance)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (tf.XLNetForQuestionAnswering, tf.XLNetConfig(vocab_size=31, d_model=16, n_layer=1, n_head=2, d_inner=24)),
        (tf.XLMForQuestionAnswering, tf.XLMConfig(vocab_size=31, emb_dim=16, n_layers=1, n_heads=2)),
    ],
)
def test_answers_by_beams_are_refused_by_name(kind, config):
    with pytest.raises(ModelError, match=f"{kind.__name__} searches for answers by beams.* load {kind.__name__}Simple"):
        Explainer(kind(config).eval())
    simple = getattr(tf, f"{kind.__name__}Simple")(config).eval()
    assert Explainer(simple)([8, 6, 7]).explained.description.startswith("answer from token")


def test_texts_of_unequal_length_need_a_mask(piece_tokenizer):
    torch.manual_seed(0)
    config = tf.FNetConfig(vocab_size=200, hidden_size=16, num_hidden_layers=1, intermediate_size=24)
    explain = Explainer(tf.FNetModel(config).eval(), piece_tokenizer, task=Task.EMBEDDINGS)
    with pytest.raises(ModelError, match="FNetModel takes no attention_mask and would read the padding of the shorter"):
        explain(("the key", "the key is small"))


# ------------------------------------------------------------------------- pipelines, tokenizers


@pytest.mark.parametrize("name", ["text-classification", "question-answering", "fill-mask", "token-classification"])
def test_a_pipeline_is_taken_apart(name, piece_tokenizer):
    kinds = {
        "text-classification": (tf.BertForSequenceClassification, "the key is small"),
        "question-answering": (tf.BertForQuestionAnswering, ("is it small", "the key is small")),
        "fill-mask": (tf.BertForMaskedLM, "the [MASK] is small"),
        "token-classification": (tf.BertForTokenClassification, "the key"),
    }
    if name not in tf.pipelines.SUPPORTED_TASKS:
        pytest.skip(f"this transformers has no pipeline {name}")
    kind, asked = kinds[name]
    model = bert(kind)
    pipeline = tf.pipeline(name, model=model, tokenizer=piece_tokenizer)
    how = {"position": 1} if name == "token-classification" else {}
    explain = Explainer(pipeline)
    assert explain.model is model
    assert explain.tokenizer is piece_tokenizer
    found, wanted = explain(asked, **how), Explainer(model, piece_tokenizer)(asked, **how)
    assert found.explained == wanted.explained
    other = object.__new__(type(piece_tokenizer))
    assert Explainer(pipeline, other).tokenizer is other


def test_a_pipeline_for_images_gives_what_reads_them():
    pytest.importorskip("PIL", reason="Pillow is not installed")
    config = tf.ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=24)  # fmt: skip
    reader = tf.ViTImageProcessor(size={"height": 8, "width": 8})
    model = tf.ViTForImageClassification(config).eval()
    explain = Explainer(tf.pipeline("image-classification", model=model, image_processor=reader))
    assert explain.tokenizer is reader
    assert "pixels" in explain(torch.randint(0, 255, (3, 8, 8), dtype=torch.uint8).numpy()).parts


def test_a_bare_tokenizer_of_the_tokenizers_library_is_refused(byte_backend):
    from tokenizers import Tokenizer

    with pytest.raises(
        InputError, match=r"the tokenizer is Tokenizer; .* PreTrainedTokenizerFast\(tokenizer_object=…\)"
    ):
        Explainer(models.tiny_gpt2(), Tokenizer.from_str(byte_backend))


# ------------------------------------------------------------------------------- specs and names


def test_a_spec_can_be_a_key():
    one, same = (Spec("some/model", options={"attn_implementation": "eager"}) for _ in range(2))
    other = Spec("some/model", options={"attn_implementation": "sdpa"})
    assert {one: 1}[same] == 1
    assert len({one, same, other, Spec()}) == 3


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", [0, 99, "cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_named_before_the_model_is_loaded(device, monkeypatch):
    monkeypatch.setattr("lrpx.model.load_pretrained", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ModelError, match=f"device '?{device}'?: .*; pass another device"):
        Explainer.from_pretrained(device=device)


@pytest.mark.parametrize("folder", ["secret/place/mine", "secret/mine/checkpoint-500"])
def test_a_model_from_a_folder_shows_its_name_and_no_path(tmp_path, folder):
    path = tmp_path / folder
    tiny.bert_classifier().save_pretrained(path)
    name = "mine/checkpoint-500" if "checkpoint" in folder else "mine"
    found = Explainer.from_pretrained(path)([5, 6, 7])
    assert found.provenance.model == name
    found.save(tmp_path / "a")
    shared = (found.to_html(), str(found.to_dict()), (tmp_path / "a").read_bytes().decode("utf-8", "replace"))
    assert not any("secret" in text or str(tmp_path) in text for text in shared)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("gpt2", "gpt2"),
        ("org/model", "org/model"),
        ("./model", "model"),
        (".", Path.cwd().name),
        ("~/models/mine/", "mine"),
        ("/a/hub/models--org--big--model/snapshots/1a2b3c", "org/big--model"),
        ("C:\\Users\\me\\mine", "mine"),
        (str(BUNDLED), "lrpx bundled model"),
        ("", "BertForSequenceClassification"),
    ],
)
def test_the_name_of_a_model(given, name):
    model = tiny.bert_classifier()
    model.config._name_or_path = given
    assert BoundModel(model).name == name
