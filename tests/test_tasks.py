"""Tasks: what a Hugging Face class predicts, and what its forward pass takes."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from lrpx import ATTNLRP, LRP, Explainer, propagate, tasks
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import InputError, ModelError
from lrpx.tasks import Task
from tests import tiny
from tests.reference import models


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("GPT2LMHeadModel", Task.CAUSAL),
        ("LlamaForCausalLM", Task.CAUSAL),
        ("BloomForCausalLM", Task.CAUSAL),
        ("MambaForCausalLM", Task.CAUSAL),
        ("OpenAIGPTLMHeadModel", Task.CAUSAL),
        ("BartForCausalLM", Task.CAUSAL),
        ("BertForMaskedLM", Task.MASKED),
        ("RobertaForMaskedLM", Task.MASKED),
        ("BertForSequenceClassification", Task.CLASSIFICATION),
        ("GPT2ForSequenceClassification", Task.CLASSIFICATION),
        ("T5ForConditionalGeneration", Task.SEQ2SEQ),
        ("BartForConditionalGeneration", Task.SEQ2SEQ),
        ("MarianMTModel", Task.SEQ2SEQ),
        ("BertForTokenClassification", Task.TOKEN_CLASSIFICATION),
        ("BertForQuestionAnswering", Task.QUESTION_ANSWERING),
        ("BertForMultipleChoice", Task.MULTIPLE_CHOICE),
        ("ViTForImageClassification", Task.IMAGE_CLASSIFICATION),
        ("LlavaForConditionalGeneration", Task.CAUSAL),
        ("BertModel", Task.EMBEDDINGS),
        ("T5EncoderModel", Task.EMBEDDINGS),
    ],
)
def test_the_task_of_a_class(name, task):
    assert tasks.task_of_class(getattr(tf, name)) is task


@pytest.mark.parametrize("name", ["GPT2Model", "ViTModel", "DetrForObjectDetection"])
def test_other_classes_have_none(name):
    with pytest.raises(ModelError, match=rf"{name} is none of these: .*load the class with the right head.*task="):
        tasks.task_of_class(getattr(tf, name))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it imports its compiler
def test_what_holds_a_model_alone_says_where_it_is():
    model = models.tiny_gpt2()
    for held, name in ((torch.nn.DataParallel(model), "module"), (torch.compile(model), "_orig_mod")):
        with pytest.raises(
            ModelError, match=rf"is {type(held).__name__}, which holds a causal .*model\.{name}, or say"
        ):
            Explainer(held)


def test_a_decoder_that_hears_is_a_causal_language_model():
    """Transformers lists it with encoder-decoders; the logits of its text's first token were read once."""
    (kind,) = (each for each in choose(["voxtral"], "seq2seq-lm") if each.name == "VoxtralForConditionalGeneration")
    model = tiny_model(kind).eval()
    assert tasks.task_of(model) is Task.CAUSAL
    found = Explainer(model)([11, 25, 33], target=7)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([[11, 25, 33]])).logits[0, -1, 7]
    assert found.explained.value == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize(
    ("build", "kind", "task"),
    [
        (models.tiny_llama, None, Task.CAUSAL),
        (tiny.bert_classifier, None, Task.CLASSIFICATION),
        (tiny.bart, "SEQ_2_SEQ_LM", Task.SEQ2SEQ),
    ],
)
def test_an_adapter_that_names_no_task_has_that_of_the_model_inside(build, kind, task):
    """Most configs of adapters name none, and ``PeftModelForSeq2SeqLM`` is a name of no head."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = build()
    targets = ["query"] if task is Task.CLASSIFICATION else ["q_proj"]
    config = peft.LoraConfig(task_type=kind, target_modules=targets, r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double().eval()
    assert tasks.task_of(adapted) is task
    found = Explainer(adapted)([5, 7, 9, 11], target=1)
    merged = Explainer(adapted.merge_and_unload())([5, 7, 9, 11], target=1)
    assert found.relevance == pytest.approx(merged.relevance, rel=1e-9, abs=1e-12)


def test_a_class_of_the_users_own_is_known_by_its_base_or_its_name():
    class Mine(tf.BertForMaskedLM):
        pass

    class NewForCausalLM(tf.PreTrainedModel):
        pass

    assert tasks.task_of_class(Mine) is Task.MASKED
    assert tasks.task_of_class(NewForCausalLM) is Task.CAUSAL


def test_the_input_embedding_is_found_under_its_first_path():
    for build, path in ((models.tiny_gpt2, "transformer.wte"), (models.tiny_t5, "shared"), (tiny.bart, "model.shared")):
        model = build()
        found, module = tasks.input_embedding(model)
        assert found == path
        assert module is model.get_submodule(path)


def test_the_context_is_the_models_and_some_have_none():
    assert tasks.context_length(models.tiny_gpt2()) == 64
    assert tasks.context_length(tiny.roberta()) == 62
    assert tasks.context_length(tiny.bloom()) is None
    assert tasks.context_length(models.tiny_t5()) is None


def test_position_ids_count_from_each_rows_first_token():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert tasks.position_ids(models.tiny_gpt2(), Task.CAUSAL, mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert tasks.position_ids(tiny.roberta(), Task.MASKED, mask)[1].tolist() == [2, 3, 4, 5]
    with pytest.raises(InputError, match="MambaForCausalLM takes no position_ids"):
        tasks.position_ids(tiny.mamba(), Task.CAUSAL, mask)


@pytest.mark.parametrize("task", [Task.CAUSAL, Task.TOKEN_CLASSIFICATION])
def test_hidden_states_are_no_logits(task):
    """A feature's number was called a token's, by the tokenizer's name for that number."""
    model = tf.LlamaModel(tf.LlamaConfig(**tiny.SIZES)).double().eval()
    told = f"LlamaModel returned hidden states, whose features are no {task.logits}; load the class that has a head"
    with pytest.raises(ModelError, match=told):
        Explainer(model, task=task)([5, 7, 9], position=1)


def test_hidden_states_before_the_logits_of_an_own_model_are_refused():
    """The first of a tuple was taken for logits, and a feature's number for a token's."""

    class Both(torch.nn.Module):
        def __init__(self, order):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head, self.order = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31), order

        def get_input_embeddings(self):
            return self.embed

        def forward(self, input_ids):
            hidden = self.embed(input_ids).cumsum(1)
            both = {"hidden": hidden, "logits": self.head(hidden), "none": None}
            return tuple(both[name] for name in self.order)

    found = Explainer(Both(["logits", "none", "hidden"]).eval(), task=Task.CAUSAL)([5, 7, 9], 4)
    alone = Explainer(Both(["logits"]).eval(), task=Task.CAUSAL)([5, 7, 9], 4)
    assert torch.equal(found.relevance, alone.relevance)
    with pytest.raises(ModelError, match=r"Both returned 8 numbers for each token first, .* and 31 behind"):
        Explainer(Both(["hidden", "none", "logits"]).eval(), task=Task.CAUSAL)([5, 7, 9], 4)


def test_embeddings_are_no_logits():
    """What stands first, ``[B, d]`` or ``[B, T, d]``, was taken for logits of classes, or for a map."""
    image, bert = (
        {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_attention_heads": 2},
        tf.BertConfig(**tiny.SIZES),
    )
    pixels, told = torch.rand(3, 8, 8).double(), "whose features are no classes; load the class that has a head"
    for model, task, given, name in (
        (tf.DPRQuestionEncoder(tf.DPRConfig(**tiny.SIZES)), Task.CLASSIFICATION, [5, 7, 9], "pooler_output"),
        (
            tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**image)),
            Task.IMAGE_CLASSIFICATION,
            pixels,
            "image_embeds",
        ),
        (tf.ViTModel(tf.ViTConfig(**image)), Task.IMAGE_MAP, pixels, "hidden states"),
    ):
        with pytest.raises(ModelError, match=f"{type(model).__name__} returned {name}, {told}"):
            Explainer(model.double().eval(), task=task)(given)
    answering = tf.BertForQuestionAnswering(bert).double().eval()
    with pytest.raises(
        ModelError, match=r"returned start_logits, a logit for each place.*task=Task.QUESTION_ANSWERING"
    ):
        Explainer(answering, task=Task.CLASSIFICATION)([5, 7, 9])


def test_only_rows_leaves_no_hook_behind_when_the_model_fails():
    model = models.tiny_gpt2()
    with tasks.only_rows(model, torch.tensor([[1], [0]])):
        assert model(torch.tensor([[3, 4, 5], [6, 7, 8]])).logits.shape == (2, 1, 31)
    with pytest.raises(IndexError), tasks.only_rows(model, torch.tensor([[1], [0]])):
        model(torch.tensor([[3, 4, 99]]))
    assert model(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 31)


def test_only_rows_reads_what_a_model_without_a_head_gives_at_all_positions():
    logits = torch.arange(12.0).view(2, 3, 2)
    with tasks.only_rows(torch.nn.Identity(), torch.tensor([[2, 0], [0, 0]])) as read:
        assert read(logits).tolist() == [[[4, 5], [0, 1]], [[6, 7], [6, 7]]]
    with tasks.only_rows(torch.nn.Identity(), torch.tensor([[2], [0]])) as read:
        assert read(logits).tolist() == [[[4, 5]], [[6, 7]]]
        assert read(logits[:, :1]).tolist() == [[[0, 1]], [[6, 7]]]


@pytest.mark.parametrize("positions", [[[1, 0], [2, 2]], [[2, 1, 0], [0, 1, 2]], [[0, 0, 0], [1, 1, 1]]])
def test_only_rows_gives_the_rows_in_the_order_asked(positions):
    model, ids = models.tiny_gpt2(), torch.tensor([[3, 4, 5], [6, 7, 8]])
    whole = model(ids).logits
    with tasks.only_rows(model, torch.tensor(positions)) as read:
        found = read(model(ids).logits)
    for row, wanted in enumerate(positions):
        torch.testing.assert_close(found[row], whole[row, wanted], rtol=1e-12, atol=1e-14)


class OwnHead(torch.nn.Module):
    """A model whose head is known, and what becomes of its logits."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding, self.mix, self.head = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 31)
        self.second, self.back = torch.nn.Embedding(31, 31), torch.nn.Linear(31, 8)
        self.double().eval()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        if self.kind == "back":
            x = x + self.back(self.head(x).softmax(-1))
        elif self.kind == "sure":
            x = torch.nn.functional.layer_norm(x * self.head(x).softmax(-1).amax(-1, keepdim=True), (8,), eps=0.0)
        logits = self.head(x + self.mix(x.cumsum(1)))
        if self.kind == "second":
            return logits + self.second(input_ids)
        if self.kind == "gate":
            return logits * x[..., :1].sigmoid()
        if self.kind == "before":
            return logits + logits.cumsum(1)
        return logits


@pytest.mark.parametrize("kind", ["none", "second", "gate", "before", "back", "sure"])
@pytest.mark.parametrize("method", ["attnlrp", "lrp"])
def test_a_head_whose_logits_meet_other_rows_sees_all(kind, method):
    model, ids = OwnHead(kind), [3, 14, 15, 9, 26]
    explain = Explainer(model, task=Task.CAUSAL)
    assert explain.bound._trials.rows_alone == (kind == "none")
    for position in (4, 2):
        with propagate(model, ATTNLRP if method == "attnlrp" else LRP) as trace:
            trace.explain(model(torch.tensor([ids]))[0, position, 7])
        expected = sum(trace.source_relevance(each)[0].sum(-1) for each in trace.sources)
        found = explain(ids, target=7, method=method, position=position)
        assert found.explained.value == pytest.approx(model(torch.tensor([ids]))[0, position, 7].item(), rel=1e-12)
        torch.testing.assert_close(found.relevance, expected, rtol=1e-10, atol=1e-12)


def test_methods_that_were_put_in_come_in_the_order_of_their_names():
    """Whatever the seed of hashes is: a run in another process asks whether they are the same."""
    layer = tiny.longformer().longformer.encoder.layer[0].attention.self
    names = [
        *("_compute_attn_output_with_global_indices", "_compute_global_attn_output_from_hidden"),
        *("_concat_with_global_key_attn_probs", "_sliding_chunks_matmul_attn_probs_value"),
        "_sliding_chunks_query_key_matmul",
    ]
    for name in names:
        setattr(layer, name, lambda name=name: name)
    assert [method() for _, method in tasks.changes(layer)] == names
