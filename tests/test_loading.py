"""How a model and its tokenizer are got: by a name, a folder, a spec, a pipeline, or as they are."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers as tf

from lrpx import Explainer, Task
from lrpx.errors import InputError, ModelError
from lrpx.model import BUNDLED, BoundModel, Spec
from tests import tiny
from tests.plain_gpt import GPT
from tests.reference import models
from tests.test_bad_input import says
from tests.test_readers import bert

IDS = [3, 14, 15]


# --------------------------------------------------------------------------- names and folders


def test_a_folder_that_is_no_model(tmp_path):
    for content in (None, "{", '{"architectures": ["NoSuchForCausalLM"], "model_type": "llama"}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
            Explainer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/no/such/folder", "there is no folder /no/such/folder; pass the folder of a model, or its name on the Hub"),
        ("./no-such", "there is no folder ./no-such; pass"),
        ("runs/mine/checkpoint-500", "there is no folder runs/mine/checkpoint-500; pass"),
        (__file__, "test_loading.py is a file; pass the folder that holds the model"),
        ("", "the name of the model is empty; pass a folder"),
    ],
)
def test_a_folder_that_is_none(name, said):
    """And not that a name on the Hub is made of other characters."""
    with says(ModelError, said):
        Explainer.from_pretrained(name)


def test_models_without_a_head_or_for_other_inputs(tmp_path):
    for model in (models.tiny_gpt2().transformer, models.tiny_llama().model, torch.nn.Linear(2, 2)):
        with says(ModelError, f"{type(model).__name__} is none of these", "the right head", "lrpx.propagate"):
            Explainer(model)
    for model in (models.tiny_gpt2().transformer, models.tiny_llama().model):
        model.save_pretrained(tmp_path)
        with says(ModelError, str(tmp_path), type(model).__name__, "the right head", "lrpx.propagate"):
            Explainer.from_pretrained(tmp_path)


def test_options_that_say_which_files_are_meant_go_to_the_config_too(tmp_path):
    models.tiny_llama().save_pretrained(tmp_path / "inner")
    assert Explainer.from_pretrained(tmp_path, subfolder="inner")(IDS).ids == tuple(IDS)


def test_an_unknown_name_without_network_asks_nobody(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: pytest.fail(f"a call to {address}"))
    with says(ModelError, "cannot load the model 'no/such-model'", "pass a folder, or the name of a model"):
        Explainer.from_pretrained("no/such-model")


def test_weights_of_other_shapes_than_the_config_says(tmp_path):
    models.tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 3}))
    with says(ModelError, "its weights have other shapes than its config.json says; pass a folder"):
        Explainer.from_pretrained(tmp_path)


@pytest.mark.slow
def test_an_unknown_name_shows_one_line_and_no_warnings():
    code = (
        "import lrpx\n"
        "try: lrpx.Explainer.from_pretrained('no/such-model')\n"
        "except lrpx.LRPxError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_weights_that_are_in_no_file_are_not_explained(piece_tokenizer, tmp_path):
    """A head that was made up would be explained as if the model had it."""
    bert(tf.BertModel).save_pretrained(tmp_path)
    piece_tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for architecture in ("BertForMaskedLM", "BertForSequenceClassification"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        with pytest.raises(ModelError, match=rf"has no weights for c.* of a {architecture}, which would be random"):
            Explainer.from_pretrained(tmp_path)


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


# ------------------------------------------------------------------------ devices and specs


def test_a_device_that_is_not_there(tmp_path):
    models.tiny_llama().save_pretrained(tmp_path)
    with says(ModelError, "cannot move the model to device 'no-such'", "pass another device"):
        Explainer.from_pretrained(tmp_path, device="no-such")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", [0, 99, "cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_named_before_the_model_is_loaded(device, monkeypatch):
    monkeypatch.setattr("lrpx.model.load_pretrained", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ModelError, match=f"device '?(cuda:)?{device}'?: .*; pass another device"):
        Explainer.from_pretrained(device=device)


@pytest.mark.parametrize("dtype", ["float64", torch.float64])
def test_a_dtype_by_its_older_name_is_refused(dtype):
    with says(InputError, "older name of dtype", f"pass dtype={dtype!r}"):
        Explainer.from_pretrained(torch_dtype=dtype)


def test_a_task_is_that_of_the_class_that_is_loaded():
    with says(InputError, "class its config names", "pass it to lrpx.Explainer(model, tokenizer, task=…)"):
        Explainer.from_pretrained(task=Task.CAUSAL)


def test_a_model_with_code_of_its_own_is_not_run_by_that_of_transformers(tmp_path):
    models.tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_own.py").write_text("from transformers import LlamaForCausalLM\n")
    with says(ModelError, "a LlamaForCausalLM, which is to run by code of its own", "load it yourself"):
        Explainer.from_pretrained(tmp_path, trust_remote_code=True)
    assert Explainer.from_pretrained(tmp_path)(IDS).ids == tuple(IDS)


def test_weights_of_other_shapes_are_random_too(tmp_path):
    bert(tf.BertForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    with says(ModelError, "no weights for classifier.bias and 2 in all", "which would be random"):
        Explainer.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)


def test_a_spec_can_be_a_key():
    one, same = (Spec("some/model", options={"attn_implementation": "eager"}) for _ in range(2))
    other = Spec("some/model", options={"attn_implementation": "sdpa"})
    assert {one: 1}[same] == 1
    assert len({one, same, other, Spec()}) == 3


@pytest.mark.parametrize("options", [None, [1], "eager", {1: 2}])
def test_a_spec_takes_options_by_name(options):
    with says(ModelError, "options is", "pass a dict of what transformers takes"):
        Spec(options=options)
    with says(ModelError, "pass"):
        Spec.from_dict({"name": None, "options": options})


# ------------------------------------------------------------------------ as they are, and pipelines


@pytest.mark.parametrize("given", ["gpt2", None, tf.LlamaForCausalLM])
def test_what_is_no_model(given):
    with says(ModelError, f"the model is {type(given).__name__}", "Explainer.from_pretrained("):
        Explainer(given)


def test_a_model_without_input_embeddings():
    class Headless(tf.LlamaForCausalLM):
        def get_input_embeddings(self):
            return None

    with says(ModelError, "Headless has no input embeddings", "get_input_embeddings()", "lrpx.propagate"):
        Explainer(tiny.build(Headless, models.tiny_llama().config))


def test_a_model_of_ones_own_that_calls_its_tokens_something_else():
    class Tutorial(GPT):
        def forward(self, idx, targets=None):
            return super().forward(idx)

    with says(ModelError, "Tutorial.forward takes idx, targets, and token ids are passed as input_ids", "rename"):
        Explainer(Tutorial(), task=Task.CAUSAL)
    assert len(Explainer(GPT(), task=Task.CAUSAL)([3, 14, 15], target=4)) == 3


def test_padding_side_that_is_none():
    with says(InputError, "padding_side is 'both'", 'pass "left" or "right"'):
        Explainer(models.tiny_llama(), padding_side="both")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpt2", "the tokenizer is 'gpt2', a name; pass AutoTokenizer.from_pretrained"),
        (Path("folder"), "the tokenizer is 'folder', a name"),
        (b"gpt2", "the tokenizer is 'gpt2', a name"),
        (7, "the tokenizer is int; pass a tokenizer or processor of transformers, such as"),
        (str.split, "the tokenizer is method_descriptor; pass a tokenizer or processor of transformers, such as"),
        (tf.PreTrainedTokenizerFast, "the tokenizer is the class"),
        (
            tokenizers.Tokenizer(tokenizers.models.BPE()),
            "the tokenizer is Tokenizer; pass",
        ),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(given, said):
    model = Explainer.from_pretrained().model
    with pytest.raises(InputError, match=re.escape(said)):
        Explainer(model, given)


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


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("text-classification", tf.BertForSequenceClassification, {"truncation": True, "max_length": 5}),
        ("text-classification", tf.BertForSequenceClassification, {"max_length": 5}),
        ("fill-mask", tf.BertForMaskedLM, {"tokenizer_kwargs": {"truncation": "only_first", "max_length": 5}}),
        ("text-classification", tf.BertForSequenceClassification, {"truncation": True}),
        ("token-classification", tf.BertForTokenClassification, {}),
    ],
)
def test_a_text_that_a_pipeline_would_cut_is_refused(name, kind, told, piece_tokenizer):
    model, text = bert(kind), "the [MASK] is small"
    piece_tokenizer.model_max_length = 5
    read = []  # how many tokens the model is given
    pipeline = tf.pipeline(name, model=model, tokenizer=piece_tokenizer, **told)
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    pipeline(text)
    hook.remove()
    assert read == [5]
    assert len(piece_tokenizer(text)["input_ids"]) > 5
    explain = Explainer(pipeline)
    asked = {"position": 1} if kind is tf.BertForTokenClassification else {}
    with says(InputError, "tokens, the model's context is 5, where the pipeline cuts it; shorten it"):
        explain(text, **asked)
    assert len(explain("the [MASK]", **asked)) <= 5
    assert len(Explainer(model, piece_tokenizer)(text, **asked)) > 5


@pytest.mark.parametrize(
    "told", [{"truncation": False, "max_length": 5}, {"padding": "max_length", "max_length": 5}, {}]
)
def test_a_pipeline_that_cuts_nothing(told, piece_tokenizer):
    model, text = bert(tf.BertForSequenceClassification), "the key is small"
    pipeline = tf.pipeline("text-classification", model=model, tokenizer=piece_tokenizer, **told)
    (said,) = pipeline(text)
    found = Explainer(pipeline)(text)
    assert len(found) > 5
    assert said["score"] == pytest.approx(found.prediction.probability)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"add_special_tokens": False}, "reads texts without special tokens"),
        ({"tokenizer_encode_kwargs": {"add_special_tokens": False}}, "reads texts without special tokens"),
        ({"prefix": "the key "}, "puts 'the key ' before each text"),
    ],
)
def test_a_pipeline_that_reads_texts_otherwise_than_its_tokenizer_is_refused(told, said, piece_tokenizer):
    model, text = bert(tf.BertLMHeadModel, is_decoder=True), "the key is small"
    read = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    pipeline = tf.pipeline("text-generation", model=model, tokenizer=piece_tokenizer, **told)
    pipeline(text, max_new_tokens=1)
    hook.remove()
    assert read[0] != piece_tokenizer(text)["input_ids"]
    with says(ModelError, f"the pipeline {said}, which its tokenizer does not; pass its model and its tokenizer"):
        Explainer(pipeline)
    found = Explainer(pipeline.model, pipeline.tokenizer)(text, position=-2)  # an end is put behind it
    assert list(found.ids) == piece_tokenizer(text)["input_ids"]


def test_a_pipeline_of_ones_own_that_reads_texts_by_itself_is_refused(piece_tokenizer):
    class Asking(tf.TextClassificationPipeline):
        def preprocess(self, inputs, **told):
            return super().preprocess(f"the key: {inputs}", **told)

    class Telling(tf.TextClassificationPipeline):
        def postprocess(self, outputs, **told):
            return super().postprocess(outputs, **told)

    model = bert(tf.BertForSequenceClassification, num_labels=3)
    with says(ModelError, "the pipeline reads texts by code of its own, as Asking has it", "pass its model"):
        Explainer(Asking(model=model, tokenizer=piece_tokenizer))
    assert Explainer(Telling(model=model, tokenizer=piece_tokenizer)).model is model


def test_a_pipeline_that_tells_the_chat_template_something_is_refused(byte_tokenizer):
    byte_tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %} is{% endif %}"
    )
    model, chat = models.tiny_gpt2(vocab_size=len(byte_tokenizer)), [{"role": "user", "content": "The key"}]
    read = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    told = {"tokenizer_encode_kwargs": {"enable_thinking": False}}
    pipeline = tf.pipeline("text-generation", model=model, tokenizer=byte_tokenizer, **told)
    pipeline(chat, max_new_tokens=1)
    hook.remove()
    assert read[0] != list(Explainer(model, byte_tokenizer)(chat).ids)
    with says(ModelError, "the pipeline reads texts or chats with enable_thinking=False, which its tokenizer does not"):
        Explainer(pipeline)
    pipeline = tf.pipeline("text-generation", model=model, tokenizer=byte_tokenizer, continue_final_message=False)
    with says(ModelError, "the pipeline reads texts or chats with continue_final_message=False"):
        Explainer(pipeline)


@pytest.mark.parametrize(
    "told", [{"tools": [{"name": "clock"}]}, {"documents": [{"title": "keys"}]}], ids=["tools", "documents"]
)
def test_a_pipeline_that_gives_a_chat_tools_or_documents_is_refused(told, byte_tokenizer):
    byte_tokenizer.chat_template = (
        "{% for each in tools or documents or [] %}{{ each['name'] or each['title'] }}{% endfor %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    model, chat = models.tiny_gpt2(vocab_size=len(byte_tokenizer)), [{"role": "user", "content": "The key"}]
    read = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    pipeline = tf.pipeline("text-generation", model=model, tokenizer=byte_tokenizer, **told)
    pipeline(chat, max_new_tokens=1)
    hook.remove()
    assert read[0] != list(Explainer(model, byte_tokenizer)(chat).ids)
    with says(ModelError, f"the pipeline reads texts or chats with {next(iter(told))}="):
        Explainer(pipeline)


@pytest.mark.parametrize(
    ("kind", "task", "told"),
    [
        (tf.BertForSequenceClassification, "text-classification", {"split_special_tokens": True}),
        (tf.BertForSequenceClassification, "text-classification", {"text_pair": "the key"}),
        (tf.BertForTokenClassification, "token-classification", {"is_split_into_words": True}),
        (tf.BertModel, "feature-extraction", {"tokenize_kwargs": {"split_special_tokens": True}}),
        (tf.BertLMHeadModel, "text-generation", {"handle_long_generation": "hole"}),
    ],
)
def test_a_pipeline_that_tells_its_tokenizer_something_else_is_refused(kind, task, told, piece_tokenizer):
    pipeline = tf.pipeline(task, model=bert(kind), tokenizer=piece_tokenizer, **told)
    (name, value), *_ = (told.get("tokenize_kwargs") or told).items()
    with says(ModelError, f"the pipeline reads texts or chats with {name}={value!r}, which its tokenizer does not"):
        Explainer(pipeline)


@pytest.mark.parametrize("told", [{"truncation": True, "max_length": 9}, {"top_k": 1}, {"padding": True}, {}])
def test_a_pipeline_of_classes_that_reads_texts_as_its_tokenizer_does(told, piece_tokenizer):
    model = bert(tf.BertForSequenceClassification)
    pipeline = tf.pipeline("text-classification", model=model, tokenizer=piece_tokenizer, **told)
    assert list(Explainer(pipeline)("the key").ids) == piece_tokenizer("the key")["input_ids"]


@pytest.mark.parametrize("told", [{"add_special_tokens": True}, {"add_special_tokens": False}, {"prefix": ""}, {}])
def test_a_pipeline_that_reads_texts_as_its_tokenizer_does(told, byte_tokenizer):
    model = models.tiny_gpt2(vocab_size=len(byte_tokenizer))
    pipeline = tf.pipeline("text-generation", model=model, tokenizer=byte_tokenizer, **told)
    assert list(Explainer(pipeline)("The key").ids) == byte_tokenizer("The key")["input_ids"]


def test_a_pipeline_for_images_gives_what_reads_them():
    pytest.importorskip("PIL", reason="Pillow is not installed")
    config = tf.ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=24)  # fmt: skip
    reader = tf.ViTImageProcessor(size={"height": 8, "width": 8})
    model = tf.ViTForImageClassification(config).eval()
    explain = Explainer(tf.pipeline("image-classification", model=model, image_processor=reader))
    assert explain.tokenizer is reader
    assert "pixels" in explain(torch.randint(0, 255, (3, 8, 8), dtype=torch.uint8).numpy()).parts
