"""Leave-one-out: against its slow twin, in batches, and where it does not apply."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import pad
from torch.nn.utils.rnn import pack_padded_sequence
from transformers.models.bert.modeling_bert import BertEmbeddings

import lrpx
from lrpx import Contrast, Explainer, LogProb, Span, Task
from lrpx.coverage._classes import choose, every_class
from lrpx.coverage._inputs import tiny_inputs
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import MethodError, ModelError, NonFiniteError, TargetError
from lrpx.interventions import Set
from lrpx.methods import METHODS, LeaveOneOut
from lrpx.perturbations import outputs
from lrpx.tasks import seen_from
from tests import tiny
from tests.reference import models
from tests.reference.leave_one_out import deleted, leave_one_out

IDS = [3, 14, 15, 9, 26, 5, 7]
ROWS = [IDS, [8, 9], [4, 11, 20], [6, 2, 1, 30, 12]]


def near(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.opt, tiny.neox])
@pytest.mark.parametrize("position", [6, 3])
def test_causal_models(build, position):
    model = build()
    found = Explainer(model)(IDS, 7, 2, "leave-one-out", position=position)
    places = {"position_ids": torch.arange(7)[None]} if build is tiny.opt else {}  # which else counts them by the mask
    expected = leave_one_out(
        model, IDS, lambda output: output.logits[0, position, 7] - output.logits[0, position, 2], **places
    )
    near(found.relevance, expected)
    assert found.relevance.abs().max() > 1e-3
    near(found.relevance[position + 1 :], torch.zeros(6 - position))


def test_a_masked_model_and_a_classifier():
    bert = models.tiny_bert()
    found = Explainer(bert)(IDS, LogProb(4), method="leave-one-out", position=2)
    near(found.relevance, leave_one_out(bert, IDS, lambda output: output.logits[0, 2].log_softmax(-1)[4]))
    classifier = tiny.bert_classifier()
    found = Explainer(classifier)(IDS, 1, method="leave-one-out")
    near(found.relevance, leave_one_out(classifier, IDS, lambda output: output.logits[0, 1]))


def test_a_model_that_counts_from_another_place():
    """Nyströmformer's first position is 2, which it keeps; here its convolution is of one token alone."""
    config = transformers.NystromformerConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3,
        num_landmarks=8, segment_means_seq_len=8, max_position_embeddings=16, conv_kernel_size=1,
    )  # fmt: skip
    model = tiny.build(transformers.NystromformerForSequenceClassification, config, "eager")
    found = Explainer(model)(IDS, 1, method="leave-one-out")
    near(found.relevance, leave_one_out(model, IDS, lambda output: output.logits[0, 1]))


class FromAPlace(torch.nn.Module):
    """Counts its places from a first one, unless it is told them."""

    def __init__(self, first, padding=None, end=None):
        super().__init__()
        self.end = end
        self.first, self.table = first, torch.nn.Embedding(31, 16)
        self.places = torch.nn.Embedding(40, 16, padding_idx=padding)
        self.queries, self.values, self.head = (torch.nn.Linear(16, size) for size in (32, 16, 31))

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        count = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(self.first, self.first + count).expand(input_ids.shape)
            if self.end is not None:  # each text that is packed in begins anew
                at = (input_ids == self.end) * position_ids
                position_ids = position_ids - pad(at, (1, -1)).cummax(1).values
        x = self.table(input_ids) + self.places(position_ids)
        queries, keys = self.queries(x).chunk(2, -1)
        seen = torch.ones(count, count).tril().bool()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None].bool()
        scores = (queries @ keys.mT).masked_fill(~seen, -1e9)
        return self.head(x + scores.softmax(-1) @ self.values(x))


@pytest.mark.parametrize(("first", "padding"), [(0, None), (1, None), (2, 1), (4, 3)])
def test_a_module_of_ones_own_counts_from_where_it_says(first, padding):
    """Whatever the table of its places is called."""
    torch.manual_seed(0)
    model = FromAPlace(first, padding).double().eval()
    found = Explainer(model, task=Task.CAUSAL)(IDS, 7, method="leave-one-out")
    near(found.relevance, leave_one_out(model, IDS, lambda output: output[0, -1, 7]))


def test_where_a_module_counts_from_is_not_tried_in_a_block_of_interventions():
    """Where its places make no difference, say; it is the same behind the block."""
    torch.manual_seed(0)
    model = FromAPlace(1).double().eval()
    explain = Explainer(model, task=Task.CAUSAL)
    with lrpx.intervene(model, {("places", "output"): 0.0}):
        explain(IDS, 7, method="leave-one-out")
    found = explain(IDS, 7, method="leave-one-out")
    near(found.relevance, leave_one_out(model, IDS, lambda output: output[0, -1, 7]))


def test_a_module_of_which_nothing_tells_where_it_counts_from_is_refused():
    explain = Explainer(FromAPlace(9).double().eval(), task=Task.CAUSAL)
    with pytest.raises(ModelError, match="which places its tokens keep"):
        explain(IDS, 7, method="leave-one-out")
    told = {"input_ids": [IDS], "position_ids": [list(range(9, 9 + len(IDS)))]}
    expected = leave_one_out(explain.model, IDS, lambda output: output[0, -1, 7])
    near(explain(told, 7, method="leave-one-out").relevance, expected)


def test_so_is_one_whose_places_begin_anew_in_this_text():
    explain = Explainer(FromAPlace(0, end=26).double().eval(), task=Task.CAUSAL)
    others = IDS[:4]
    expected = leave_one_out(explain.model, others, lambda output: output[0, -1, 7])
    near(explain(others, 7, method="leave-one-out").relevance, expected)
    with pytest.raises(ModelError, match="which places its tokens keep"):
        explain([others, IDS], 7, method="leave-one-out")


@pytest.mark.parametrize("within", [[0, *IDS, 1, 8, 2], [0, *IDS, 1]])
def test_so_is_a_text_with_padding_in_it_which_roberta_does_not_count(within):
    explain = Explainer(tiny.roberta())
    others = [0, *IDS, 2]
    places = {"position_ids": torch.arange(2, 2 + len(others))[None]}
    expected = leave_one_out(explain.model, others, lambda output: output.logits[0, 3, 7], **places)
    near(explain(others, 7, method="leave-one-out", position=3).relevance, expected)
    inputs = {"input_ids": torch.tensor([within]), "attention_mask": torch.ones(1, len(within), dtype=torch.int64)}
    with pytest.raises(ModelError, match="which places its tokens keep"):
        explain(inputs, 7, method="leave-one-out", position=3)


class BeginsAnew(BertEmbeddings):
    """Counts its places anew behind each 26, unless it is told them."""

    def forward(self, input_ids=None, token_type_ids=None, position_ids=None, inputs_embeds=None, **more):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
            at = (input_ids == 26) * position_ids
            position_ids = position_ids - pad(at, (1, -1)).cummax(1).values
        return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds, **more)


def test_so_is_a_model_of_transformers_with_such_embeddings_of_ones_own():
    model = models.tiny_bert()
    model.bert.embeddings = BeginsAnew(model.config).double().eval()
    explain = Explainer(model)
    near(
        explain(IDS[:4], 7, method="leave-one-out", position=2).relevance,
        leave_one_out(model, IDS[:4], lambda output: output.logits[0, 2, 7]),
    )
    with pytest.raises(ModelError, match="which places its tokens keep"):
        explain(IDS, 7, method="leave-one-out", position=2)


def test_where_it_counts_from_is_tried_without_interventions():
    """Behind their block it is known, and is the same: Kosmos-2.5 counts from 2."""
    (kind,) = (each for each in every_class() if each.name == "Kosmos2_5ForConditionalGeneration")
    model = tiny_model(kind).double().eval()
    explain = Explainer(model)
    with lrpx.intervene(model, {"text_model.model.layers.1": Set(0.0)}):
        explain(IDS, 7, method="leave-one-out")
    places = {"position_ids": torch.arange(2, 2 + len(IDS))[None]}
    expected = leave_one_out(model, IDS, lambda output: output.logits[0, -1, 7], **places)
    found = explain(IDS, 7, method="leave-one-out").relevance
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["Blip2ForConditionalGeneration", "IdeficsForVisionText2Text", "Qwen2VLForConditionalGeneration"]
)
def test_beside_an_image_every_token_keeps_its_place(name):
    """Where the model counts places by the mask, in whatever module; here each is given those of the whole input."""
    chosen = next(each for each in every_class() if each.name == name)
    model = tiny_model(chosen)
    given = seen_by(model) if name.startswith("Qwen") else {**tiny_inputs(chosen, model), "use_cache": False}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    text = model.get_submodule({"B": "language_model", "I": "model", "Q": "model.language_model"}[name[0]])
    places = []

    def keep(module, args, named):
        at = named.get("position_ids")
        tokens = given["input_ids"].shape[1]
        places.append(torch.arange(tokens)[None] if at is None else at)
        return args, {**named, "position_ids": places[0]}

    with torch.no_grad():
        hook = text.register_forward_pre_hook(keep, with_kwargs=True)
        whole = model(**given).logits[0, -1]
        expected = []
        for hidden in range(given["input_ids"].shape[1]):
            mask = torch.ones_like(given["attention_mask"])
            mask[0, hidden] = 0
            at = {"position_ids": places[0]} if name.startswith("Qwen") else {}  # whose count fails on a hole
            expected.append(whole[7] - model(**{**given, **at, "attention_mask": mask}).logits[0, -1, 7])
        hook.remove()
        assert torch.equal(model(**given).logits[0, -1], whole)
    before = [dict(module._forward_pre_hooks) for module in model.modules()]
    passed = {key: value for key, value in given.items() if key != "use_cache"}
    found = Explainer(model)(passed, 7, method="leave-one-out")
    torch.testing.assert_close(found.relevance.clone(), torch.stack(expected), rtol=0, atol=1e-5)
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == before


def seen_by(model):
    """A text with one image, as Qwen-VL's processor returns it."""
    config, image = model.config, model.config.vision_config
    ids = [11, 12, config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id, 14, 15]
    wide = image.in_channels * image.temporal_patch_size * image.patch_size**2
    ids = torch.tensor([ids])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": torch.randn(16, wide, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def test_the_answer_to_a_question():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=31, **sizes)).eval().double()

    def read(output):
        return output.start_logits[0, 2] + output.end_logits[0, 4]

    rows = [IDS, [8, 9, 4, 11, 20, 3]]
    for found, ids in zip(Explainer(model)(rows, Span(2, 4), method="leave-one-out"), rows, strict=True):
        near(found.relevance, leave_one_out(model, ids, read))
    with pytest.raises(TargetError, match=r"the answer from token 6 to 6 is outside.*\(row 1 of the batch\)"):
        Explainer(model)(rows, Span(6, 6))


@pytest.mark.parametrize("side", ["right", "left"])
def test_places_are_kept_whatever_the_batch(side):
    """OPT counts places from the mask; a token that is hidden still has its own."""
    explain = Explainer(tiny.opt(), padding_side=side)
    for many, row in zip(explain(ROWS, 7, method="leave-one-out"), ROWS, strict=True):
        near(many.relevance, explain(row, 7, method="leave-one-out").relevance)
        model, last = tiny.opt(), len(row) - 1
        places = {"position_ids": torch.arange(len(row))[None]}
        near(many.relevance, leave_one_out(model, row, lambda out, at=last: out.logits[0, at, 7], **places))


def test_to_mask_is_to_delete_where_there_are_no_positions():
    model = tiny.bert_classifier()
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
    found = Explainer(model)(IDS, 1, method="leave-one-out").relevance
    # the class is read from the first token, which cannot be deleted without another taking its place
    near(found[1:], deleted(model, IDS, lambda output: output.logits[0, 1])[1:])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_batches_are_single_runs(side, batch_size):
    explain = Explainer(models.tiny_llama(), padding_side=side)
    method = LeaveOneOut("own", batch_size)
    for many, row in zip(explain(ROWS, Contrast(7, 2), method=method), ROWS, strict=True):
        near(many.relevance, explain(row, Contrast(7, 2), method="leave-one-out").relevance)


class Tagger(torch.nn.Module):
    """A classifier of tokens, of torch's own encoder, which without a gradient leaves out what stands hidden at the end
    of every row, and puts 0 there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(31, 16)
        self.encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
        self.head = torch.nn.Linear(16, 3)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask):
        return self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0))


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_torchs_own_encoder_is_the_same_in_each_batch(batch_size):
    model = Tagger().eval().double()
    explain = Explainer(model, task=Task.TOKEN_CLASSIFICATION)
    found = explain(IDS, 1, method=LeaveOneOut("own", batch_size), position=6)
    ids, masks = torch.tensor([IDS]), 1 - torch.eye(7, dtype=torch.int64)
    with torch.enable_grad():
        whole = model(ids, torch.ones_like(ids))[0, 6, 1]
        expected = torch.stack([whole - model(ids, mask[None])[0, 6, 1] for mask in masks])
    near(found.relevance, expected.detach())
    assert model.encoder.use_nested_tensor


class EndsInConvolution(Tagger):
    """A convolution over what the encoder gives, of which one place is read."""

    def __init__(self, read, apart):
        super().__init__()
        self.read, self.convolution = read, torch.nn.Conv1d(16, 16, 3, padding=apart, dilation=apart)

    def forward(self, input_ids, attention_mask):
        found = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(self.convolution(found.mT).relu()[..., self.read])


@pytest.mark.parametrize(("read", "apart"), [(0, 1), (-1, 1), (0, 2), (-1, 2)])
def test_a_neighbour_that_only_one_token_sees_is_seen(read, apart):
    explain = Explainer(EndsInConvolution(read, apart).eval().double(), task=Task.CLASSIFICATION)
    with pytest.raises(ModelError, match="other tokens see what its attention_mask hides, as by a convolution"):
        explain(IDS, 1, method="leave-one-out")


def test_the_models_own_prediction_is_that_of_the_whole_input():
    """Not that of each changed input."""
    model = models.tiny_gpt2()
    with torch.no_grad():
        token = int(model(torch.tensor([IDS])).logits[0, -1].argmax())
    explain = Explainer(model)
    near(explain(IDS, method="leave-one-out").relevance, explain(IDS, token, method="leave-one-out").relevance)


@pytest.mark.parametrize("build", [models.tiny_gpt2, models.tiny_bert])
def test_a_place_that_could_see_nothing_else_sees_itself(build):
    """A softmax over nothing would be what the kernel makes of it."""
    found = Explainer(build())([9], 7, method="leave-one-out", position=0)
    assert found.relevance.tolist() == [0.0]


@pytest.mark.parametrize(
    ("kind", "attention", "position", "gone"),
    [
        ("LlamaForTokenClassification", "eager", 0, [0]),
        ("MistralForCausalLM", "eager", 9, [6, 7, 8, 9]),
        ("MistralForCausalLM", "sdpa", 9, [6, 7, 8, 9]),
        ("MistralForTokenClassification", "sdpa", 9, [6, 7, 8, 9]),
        ("GPTNeoForCausalLM", "eager", 9, [6, 7, 8, 9]),
        ("ModernBertForTokenClassification", "sdpa", 6, [4, 5, 6, 7, 8]),
        ("MistralForSequenceClassification", "eager", None, [10, 11, 12, 13]),
        ("MistralForSequenceClassification", "sdpa", None, [8, 9, 10, 11, 12, 13]),
    ],
)
def test_so_it_does_where_all_is_hidden_that_one_layer_sees(kind, attention, position, gone):
    """A window of four tokens, or of two to each side; a classifier's first token or its last, if it looks back."""
    own = {"pad_token_id": 0}
    if kind.startswith("GPTNeo"):
        own |= {"window_size": 4, "attention_types": [[["global", "local"], 1]], "num_layers": 2}
    elif kind.startswith("ModernBert"):
        own |= {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    else:
        own |= {"sliding_window": 4} if kind.startswith("Mistral") else {}
        own |= {"num_key_value_heads": 2}
    config = getattr(transformers, kind).config_class(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=9,
        initializer_range=0.3, **own,
    )  # fmt: skip
    model = tiny.build(getattr(transformers, kind), config, attention)
    ids = torch.arange(3, 17)
    hidden = torch.ones(14, dtype=torch.bool)
    hidden[gone] = False
    read = 13 if position is None else position
    expected = model(input_ids=ids[None], attention_mask=(hidden | (torch.arange(14) == read)).long()[None])
    logits = expected.logits[0] if position is None else expected.logits[0, position]
    explain = Explainer(model)
    _, questions = explain._one_asked(ids.tolist(), 7, None, "leave-one-out", position, None)
    answers = explain.bound.ask(questions)
    (found,) = outputs(explain.bound, questions, answers, [(~hidden).numpy()[None]])
    near(torch.from_numpy(found[0]), logits[7].detach()[None].double())


def test_so_it_does_in_layers_of_another_name():
    """Inkling calls them "hybrid_sliding"; its window is of four tokens here."""
    (kind,) = (each for each in every_class() if each.name == "InklingForCausalLM")
    explain = Explainer(tiny_model(kind))
    hidden = np.zeros((1, 9), dtype=bool)
    hidden[0, 4:8] = True
    found = []
    for ids in ([3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 4, 5, 6, 12, 13, 14, 10, 11]):
        _, questions = explain._one_asked(ids, 7, None, "leave-one-out", 7, None)
        found += outputs(explain.bound, questions, explain.bound.ask(questions), [hidden])
    assert abs(found[0] - found[1]) < 1e-6


class Windowed(torch.nn.Module):
    """Looks at so many tokens, by a mask of its own; in its own words a window is a reach."""

    def __init__(self, reach):
        super().__init__()
        self.reach = reach
        self.embed = torch.nn.Embedding(40, 16)
        self.places = torch.nn.Embedding(64, 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, 40)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask, position_ids=None):
        at = torch.arange(input_ids.shape[1])
        x = self.embed(input_ids) + self.places(at if position_ids is None else position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        behind = at[:, None] - at
        seen = (behind >= 0) & (behind < self.reach) & attention_mask[:, None].bool()
        scores = (q @ k.mT / 4).masked_fill(~seen, torch.finfo(x.dtype).min)
        return SimpleNamespace(logits=self.head(x + scores.softmax(-1) @ v))


def test_a_window_that_nothing_tells_is_refused_where_all_of_it_is_hidden():
    """A softmax over nothing but low numbers is a mean of all, those behind it and the hidden ones included."""
    torch.manual_seed(0)
    explain = Explainer(Windowed(3).double().eval(), task=Task.CAUSAL)
    _, questions = explain._one_asked(list(range(3, 17)), 7, None, "leave-one-out", 9, None)
    answers = explain.bound.ask(questions)
    hidden = np.zeros((3, 14), dtype=bool)
    hidden[0, 9], hidden[1, [8, 9]], hidden[2, [4, 6, 8, 9, 12]] = True, True, True
    (found,) = outputs(explain.bound, questions, answers, [hidden])
    assert len(found) == 3
    hidden[1, [7, 8, 9]] = True
    with pytest.raises(ModelError, match=r"in Windowed a hidden token that is read looks at others that are hidden"):
        outputs(explain.bound, questions, answers, [hidden])


def test_windows_that_are_others_in_each_layer_are_known():
    """NeoMME's config has one for each layer, and refuses to say one for all."""
    (kind,) = (each for each in every_class() if each.name == "NeoMMEForMaskedLM")
    model, ids = tiny_model(kind).double(), list(range(12, 21))
    found = Explainer(model)(ids, 1, method="leave-one-out", position=3)
    masks = 1 - torch.eye(len(ids) + 1, dtype=torch.int64)[:, : len(ids)]  # the last hides nothing
    with torch.no_grad():
        said = [model(input_ids=torch.tensor([ids]), attention_mask=mask[None]).logits[0, 3, 1] for mask in masks]
    near(found.relevance, said[-1] - torch.stack(said[:-1]))
    reaches = {each.sliding_window for each in model.config.per_layer_config}
    narrowest = min(each for each in reaches if each is not None)
    assert seen_from(model, 8, looks_back=False) == slice(8 - narrowest, 9 + narrowest)


@pytest.mark.parametrize("method", ["leave-one-out", "occlusion"])
def test_a_model_that_draws_random_numbers_is_refused(method):
    """Reformer's hashes are others in each run, unless it is told a seed."""
    (kind,) = (each for each in every_class() if each.name == "ReformerModelWithLMHead")
    model, ids = tiny_model(kind), list(range(8, 20))
    with pytest.raises(ModelError, match=r"ReformerModelWithLMHead draws random numbers as it runs, and says"):
        Explainer(model)(ids, 7, method=method, position=11)
    for module in model.modules():
        if hasattr(module, "hash_seed"):
            module.hash_seed = 3
    one, other = (Explainer(model)(ids, 7, method=method, position=11).relevance for _ in range(2))
    near(one, other)


def test_so_is_a_class_token_whose_window_is_hidden():
    config = transformers.ModernBertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        local_attention=4, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
        global_attn_every_n_layers=3,
    )  # fmt: skip
    explain = Explainer(tiny.build(transformers.ModernBertForSequenceClassification, config, "eager").float())
    _, questions = explain._one_asked(list(range(3, 17)), 1, None, "leave-one-out", None, None)
    answers = explain.bound.ask(questions)
    hidden = np.zeros((2, 14), dtype=bool)
    hidden[0, :2], hidden[1, 4:] = True, True
    assert len(outputs(explain.bound, questions, answers, [hidden])[0]) == 2
    hidden[0, :3] = True
    with pytest.raises(ModelError, match=r"in ModernBert\w+ a hidden token that is read looks at others"):
        outputs(explain.bound, questions, answers, [hidden])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_answer_that_would_see_nothing_is_refused(attention):
    """Its start looked at what stands behind it; one of one token sees itself."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    model = tiny.build(transformers.LlamaForQuestionAnswering, config, attention).float()
    with pytest.raises(ModelError, match=r"looks back alone, and where token 0 is hidden, the answer"):
        Explainer(model)(IDS, Span(0, 2), method="leave-one-out")
    found = Explainer(model)(IDS, Span(0, 0), method="leave-one-out").relevance
    near(found, torch.zeros(len(IDS)))
    assert Explainer(model)(IDS, Span(1, 2), method="leave-one-out").relevance[0].abs() > 1e-3
    both = tiny.build(transformers.BertForQuestionAnswering, models.tiny_bert().config, attention)
    assert Explainer(both)(IDS, Span(0, 2), method="leave-one-out").relevance[0].abs() > 1e-6


def test_so_it_does_at_the_first_token_of_a_chunk():
    """Llama 4 looks back to the first token of a chunk, of which there are four here."""
    config = transformers.Llama4TextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, intermediate_size_mlp=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, attention_chunk_size=4, moe_layers=[],
        no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"], initializer_range=0.3,
    )  # fmt: skip
    model = tiny.build(transformers.Llama4ForCausalLM, config, "eager")
    found = Explainer(model)(list(range(3, 14)), 7, method="leave-one-out", position=8).relevance
    assert found[8] == 0
    assert found[:8].abs().min() > 1e-6


def test_a_text_of_one_token_of_which_nothing_is_left_is_refused():
    for model in (tiny.bert_classifier(), models.tiny_t5()):
        with pytest.raises(MethodError, match=r"leave-one-out leaves nothing of a text of one token; use attnlrp"):
            Explainer(model)([IDS, [9]], 1, method="leave-one-out")


@pytest.mark.parametrize("position", [2, 0])
def test_an_encoder_and_a_decoder(position):
    """A token is hidden from the encoder and from the decoder's cross-attention; the decoder's own have 0."""
    model, decoder = models.tiny_t5(), [0, 8, 9]
    places = {"decoder_input_ids": torch.tensor([decoder])}
    expected = leave_one_out(model, IDS, lambda output: output.logits[0, position, 4], **places)
    explain = Explainer(model)
    found = explain(IDS, 4, method="leave-one-out", decoder=decoder, position=position).relevance
    near(found[:7], expected)
    assert found.abs().max() > 1e-3
    assert found[7:].tolist() == [0.0] * 3
    many = explain([IDS, ROWS[3]], 4, method="leave-one-out", decoder=[decoder, [0, 5]])
    alone = explain(ROWS[3], 4, method="leave-one-out", decoder=[0, 5])
    near(many[1].relevance, alone.relevance)


def test_what_it_does_not_serve():
    with pytest.raises(MethodError, match=r"leave-one-out needs a model that takes attention_mask.*use attnlrp"):
        Explainer(maskless())(IDS, method="leave-one-out")
    with pytest.raises(MethodError, match=r"leave-one-out has no ledger.*attnlrp"):
        Explainer(models.tiny_gpt2())(IDS, method="leave-one-out", ledger=True)


def test_a_model_that_cannot_hide_its_first_token_is_refused():
    """BLOOM's softmax over nothing but hidden tokens is no number."""
    with pytest.raises(NonFiniteError, match=r"BloomForCausalLM answers NaN.*sees only itself.*use another method"):
        Explainer(tiny.bloom())(IDS, method="leave-one-out")


def test_a_model_that_does_not_look_at_its_mask_is_refused():
    """RWKV takes one; each token would lose nothing."""
    config = transformers.RwkvConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    explain = Explainer(tiny.build(transformers.RwkvForCausalLM, config, "eager"))
    with pytest.raises(ModelError, match=r"RwkvForCausalLM takes an attention_mask and does not look at it"):
        explain(IDS, method="leave-one-out")
    first = Explainer(models.tiny_gpt2())([3, 4], 4, position=0, method="leave-one-out")
    # of the first token nothing can be hidden, and that is no such model (two rows and one may round differently)
    assert first.relevance.abs().max() <= 1e-12 * abs(first.explained.value)


def test_what_half_precision_does_not_show_is_told_as_such():
    model = tiny.bert_classifier().bfloat16()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.output.dense.weight.mul_(1e-6)
    with pytest.raises(ModelError, match=r"and, as far as bfloat16 tells, does not look at it.*; try dtype float32"):
        Explainer(model)([3, 4, 5, 6], method="leave-one-out")


OTHERS_SEE = {
    "recurrent_gemma": "causal-lm",  # its recurrences
    "convbert": "masked-lm",  # its convolutions
    "mobilebert": "masked-lm",  # its embeddings of three neighbours
    "nystromformer": "sequence-classification",  # the convolution of its values
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("ids", "position"), [([*range(12, 21)], 6), ([12, 13, 14], 2)], ids=["text", "single word"])
@pytest.mark.parametrize("kind", OTHERS_SEE)
def test_a_model_whose_other_tokens_see_what_its_mask_hides_is_refused(kind, ids, position):
    """Of a single word, too, between whose ends there is no other token to try it with."""
    mapping = OTHERS_SEE[kind]
    model = tiny_model(choose([kind], mapping)[0])
    task = {"causal-lm": Task.CAUSAL, "masked-lm": Task.MASKED}.get(mapping, Task.CLASSIFICATION)
    place = {} if task is Task.CLASSIFICATION else {"position": position}
    with pytest.raises(ModelError, match=rf"in {type(model).__name__} other tokens see what its attention_mask hides"):
        Explainer(model, task=task)(ids, 1, method="leave-one-out", **place)


def test_so_it_is_where_the_first_question_is_about_an_early_place():
    """What is hidden behind it says nothing of the model."""
    explain = Explainer(tiny_model(choose(["recurrent_gemma"], "causal-lm")[0]), task=Task.CAUSAL)
    with pytest.raises(ModelError, match="other tokens see what its attention_mask hides"):
        explain([*range(12, 21)], 1, method="leave-one-out", position=[2, 8])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("kind", "dtype", "length"),
    [
        ("recurrent_gemma", torch.float32, 2),  # the first token alone can be hidden
        ("recurrent_gemma", torch.bfloat16, 40),  # of one token far away the rounding leaves nothing
        ("deepseek_v4", torch.float32, 40),  # which chooses, and did not choose the one in the middle
    ],
)
def test_so_it_is_of_short_and_of_long_texts(kind, dtype, length):
    explain = Explainer(tiny_model(choose([kind], "causal-lm")[0]).to(dtype), task=Task.CAUSAL)
    with pytest.raises(ModelError, match="other tokens see what its attention_mask hides"):
        explain([12 + 7 * i % 23 for i in range(length)], 1, method="leave-one-out")


@pytest.mark.parametrize("position", [0, 1])
def test_so_it_is_of_two_tokens_one_of_which_is_read(position):
    explain = Explainer(tiny_model(choose(["convbert"], "token-classification")[0]), task=Task.TOKEN_CLASSIFICATION)
    with pytest.raises(ModelError, match="other tokens see what its attention_mask hides"):
        explain([12, 19], 1, method="leave-one-out", position=position)


@pytest.mark.parametrize("kind", ["bamba", "deepseek_v3", "lfm2", "olmo_hybrid", "opt", "zamba"])
def test_a_model_whose_mask_hides_is_served(kind):
    """What stands in the place that is hidden is no matter."""
    explain = Explainer(tiny_model(choose([kind], "causal-lm")[0]), task=Task.CAUSAL)
    ids, other = [*range(12, 21)], [*range(12, 15), 40, *range(16, 21)]
    without = []
    for each in (ids, other):
        found = explain(each, 1, method="leave-one-out", position=8)
        without.append(found.explained.value - float(found.relevance[3]))
    assert without[0] == pytest.approx(without[1], rel=1e-4, abs=1e-5)


def maskless():
    model = models.tiny_gpt2()
    forward = type(model).forward

    class Maskless(type(model)):
        def forward(self, input_ids):
            return forward(self, input_ids)

    model.__class__ = Maskless
    return model


def test_it_describes_itself():
    assert METHODS["leave-one-out"].label == "Leave-one-out"
    a = Explainer(models.tiny_gpt2())(IDS, method="leave-one-out")
    assert a.provenance.method == "leave-one-out"
    assert "attention mask" in a.provenance.recipe


def test_where_embeddings_are_multiplied_by_the_mask():
    """Of ESM what the place that is read holds itself goes with its mask, whichever token it is, as the class says."""
    sizes = tiny.SIZES | {"pad_token_id": 1, "mask_token_id": 4}
    config = transformers.EsmConfig(**sizes, position_embedding_type="rotary")
    explain = Explainer(tiny.build(transformers.EsmForTokenClassification, config, "eager"))
    rows = [[*IDS[:2], token, *IDS[3:]] for token in (15, 20)]
    found = [explain(row, 1, method="leave-one-out", position=2) for row in rows]
    hidden = [each.explained.value - float(each.relevance[2]) for each in found]
    assert abs(hidden[0] - hidden[1]) < 1e-12 < 1e-3 < abs(found[0].explained.value - found[1].explained.value)
    assert "ESM" in (LeaveOneOut.__doc__ or "")


class PoolsLast(torch.nn.Module):
    """A causal classifier that reads its last token: the last of all, or as many as its mask has ones."""

    def __init__(self, by_mask):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.q, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        self.by_mask = by_mask

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        admitted = torch.ones(x.shape[1], x.shape[1]).tril().bool() & (attention_mask[:, None] == 1)
        x = x + (self.q(x) @ x.mT).masked_fill(~admitted, -1e9).softmax(-1) @ x
        last = attention_mask.sum(1) - 1 if self.by_mask else attention_mask.cumsum(1).argmax(1)
        return self.head(x[torch.arange(len(x)), last])


@pytest.mark.parametrize("given", [[3, 7, 1, 9, 5], [[3, 7, 1, 9, 5], [8, 2, 2, 11], [4, 6]]])
def test_a_model_that_counts_by_its_mask_which_token_it_reads_is_refused(given):
    """With a token hidden it reads the one before the last; that was taken for what the hidden token does."""
    right, wrong = (Explainer(PoolsLast(by).double().eval(), task=Task.CLASSIFICATION) for by in (False, True))
    right(given, 1, method="leave-one-out")
    with pytest.raises(ModelError, match="counts tokens' places by its attention_mask, or which one it reads"):
        wrong(given, 1, method="leave-one-out")


class Counts(torch.nn.Module):
    """Its tokens' places are given, or counted from the mask."""

    def __init__(self, *, learned=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = torch.nn.Embedding(20, 8), torch.nn.Embedding(16, 8)
        self.q, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 20)
        if not learned:
            self.places.weight.data.zero_()

    def get_input_embeddings(self):
        return self.embed

    def run(self, input_ids, attention_mask, position_ids):
        x = self.embed(input_ids) + self.places(position_ids)
        admitted = torch.ones(x.shape[1], x.shape[1]).tril().bool() & (attention_mask[:, None] == 1)
        return self.head(x + (self.q(x) @ x.mT).masked_fill(~admitted, -1e9).softmax(-1) @ x)

    def forward(self, input_ids, attention_mask):
        return self.run(input_ids, attention_mask, (attention_mask.cumsum(-1) - 1).clamp(min=0))


class Takes(Counts):
    def forward(self, input_ids, attention_mask, position_ids=None):
        if position_ids is None:
            return super().forward(input_ids, attention_mask)
        return self.run(input_ids, attention_mask, position_ids)


def test_a_model_that_counts_places_by_its_mask_is_refused_unless_it_takes_them():
    """A hidden token moved all behind it, and what that made of the value was taken for what the token does."""
    explain = Explainer(Takes().double().eval(), task=Task.CAUSAL)
    at = {"position_ids": torch.arange(5)[None]}
    near(explain([3, 7, 1, 9, 5], 1, method="leave-one-out").relevance, leave_one_out(
        explain.model, [3, 7, 1, 9, 5], lambda out: out[0, -1, 1], **at
    ))  # fmt: skip
    with pytest.raises(ModelError, match="Counts counts tokens' places by its attention_mask"):
        Explainer(Counts().double().eval(), task=Task.CAUSAL)([3, 7, 1, 9, 5], 1, method="leave-one-out")
    anywhere = Explainer(Counts(learned=False).double().eval(), task=Task.CAUSAL)
    near(anywhere([3, 7, 1, 9, 5], 1, method="leave-one-out").relevance, leave_one_out(
        anywhere.model, [3, 7, 1, 9, 5], lambda out: out[0, -1, 1]
    ))  # fmt: skip


COUNTED = {
    "from the end": lambda mask, at: mask.sum(-1, keepdim=True) - 1 - at,
    "back to the end": lambda mask, at: (mask.sum(-1, keepdim=True) - mask.cumsum(-1)).clamp(min=0),
    "a part of all": lambda mask, at: at * 9 // mask.sum(-1, keepdim=True),
    "from the first": lambda mask, at: at - mask.argmax(-1, keepdim=True),
    "in Python": lambda mask, at: at + mask.shape[-1] - torch.from_numpy(mask.sum(-1, keepdim=True).numpy()),
    "from the mask": lambda mask, at: mask.cumsum(-1) - 1,
    "up to the fourth": lambda mask, at: (mask.cumsum(-1) > 4).long(),
    "up to the eighth": lambda mask, at: (mask.cumsum(-1) > 8).long(),
    "put in": lambda mask, at: torch.zeros_like(mask).index_put((mask == 1,), torch.arange(int(mask.sum()))),
}


class CountsAngles(Counts):
    """Turns queries and keys by angles of places that it counts, or by those that there are."""

    def __init__(self, count):
        super().__init__(learned=False)
        self.count = count

    def forward(self, input_ids, attention_mask):
        at = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        angles = (at if self.count is None else self.count(attention_mask, at))[..., None] * torch.tensor([1.0, 0.1])
        x = self.embed(input_ids)
        turned = [torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).double()] * 2
        q, k = (each.unflatten(-1, (2, 2, 2)) for each in (self.q(x), x))
        q, k = (
            torch.stack([e[..., 0] * c[..., None, :, 0] - e[..., 1] * c[..., None, :, 1],
                         e[..., 0] * c[..., None, :, 1] + e[..., 1] * c[..., None, :, 0]], -1).flatten(2)
            for e, c in zip((q, k), turned, strict=True)
        )  # fmt: skip
        admitted = torch.ones(x.shape[1], x.shape[1]).tril().bool() & (attention_mask[:, None] == 1)
        return self.head(x + (q @ k.mT).masked_fill(~admitted, -1e9).softmax(-1) @ x)


@pytest.mark.parametrize("count", COUNTED.values(), ids=COUNTED)
def test_so_it_is_whatever_it_counts_by_the_mask(count):
    """Angles of places that stay are served; they are of a text without the token in none of the others."""
    ids = [3, 7, 1, 9, 5]
    stays, moves = (CountsAngles(each).double().eval() for each in (None, count))
    found = Explainer(stays, task=Task.CAUSAL)(ids, 1, method="leave-one-out")
    near(found.relevance, leave_one_out(stays, ids, lambda out: out[0, -1, 1]))
    for given in (ids, ids[:2]):
        with pytest.raises(ModelError, match="CountsAngles counts tokens' places by its attention_mask"):
            Explainer(moves, task=Task.CAUSAL)(given, 1, method="leave-one-out")


POOLED = {
    "first": lambda x, mask: x[:, 0],
    "mean": lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
    "weights": lambda x, mask: ((mask / mask.sum(1, keepdim=True))[:, None].to(x.dtype) @ x)[:, 0],
    "row by row": lambda x, mask: torch.stack([each[seen == 1].mean(0) for each, seen in zip(x, mask, strict=True)]),
    "largest": lambda x, mask: x.masked_fill(mask[..., None] == 0, -1e9).amax(1),
    "counted": lambda x, mask: x[torch.arange(len(x)), mask.sum(1) - 1],
    "gathered": lambda x, mask: x.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, -1, x.shape[-1]))[:, 0],
    "cut": lambda x, mask: torch.stack([each[n - 1] for each, n in zip(x, mask.sum(1).tolist(), strict=True)]),
    "without the first": lambda x, mask: shares(mask[:, 1:], x[:, 1:]),
    "beside others": lambda x, mask: shares(pad(mask, (4, 0), value=1), pad(x, (0, 0, 4, 0), value=1)),
    "fading behind the first": lambda x, mask: shares(fading(mask[:, 1:]), x[:, 1:]),
    "fading behind others": lambda x, mask: shares(fading(pad(mask, (20, 0), value=1)), pad(x, (0, 0, 20, 0), value=1)),
}


def fading(mask):
    return mask * 2 ** mask.cumsum(1)


def shares(weights, x):
    return ((weights / weights.sum(1, keepdim=True))[:, None].to(x.dtype) @ x)[:, 0]


@pytest.mark.parametrize("pool", POOLED)
def test_a_classifier_that_looks_both_ways_and_reads_by_its_mask(pool):
    """At the last token of so many as the mask has ones another is read where one is hidden; what pools them is not."""

    class Pools(Counts):
        def forward(self, input_ids, attention_mask):
            x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
            seen = attention_mask[:, None] == 1
            x = x + (self.q(x) @ x.mT).masked_fill(~seen, -1e9).softmax(-1) @ x
            return self.head(POOLED[pool](x, attention_mask))

    model, ids = Pools().double().eval(), [3, 7, 1, 9, 5]
    explain = Explainer(model, task=Task.CLASSIFICATION)
    if pool in ("counted", "gathered", "cut", "fading behind the first", "fading behind others"):
        with pytest.raises(ModelError, match="by its attention_mask, or which one it reads"):
            explain(ids, 1, method="leave-one-out")
        return
    near(explain(ids, 1, method="leave-one-out").relevance, leave_one_out(model, ids, lambda out: out[0, 1]))


def looked_up(model, ids, places):
    return model.embed(ids) + model.places(places)


def mean(x, mask):
    return POOLED["mean"](x, mask)


def so_far(mask):
    return mask.cumsum(1).clamp(min=1)[..., None]


def in_chunks(model, ids, mask):
    pairs = zip(ids.split(4, 1), mask.split(4, 1), strict=True)
    return mean(torch.cat([looked_up(model, some, seen.cumsum(1)) for some, seen in pairs], 1), mask)


def behind_others(model, ids, mask):
    mask = pad(mask, (40, 0), value=1)
    x = model.embed(pad(ids, (40, 0), value=2)) + model.places((mask.cumsum(1) - 1) // 4)
    return mean(x, mask)


def every_other(model, ids, mask):
    x, mask = at_places(model, ids)[:, ::2], mask[:, ::2]
    return mean(x + model.places(mask.cumsum(1)), mask)


def elsewhere(function):
    """What it gives in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def at_places(model, ids):
    return looked_up(model, ids, torch.arange(ids.shape[1]))


def seen_rows(x, mask):
    return [each[seen.bool()] for each, seen in zip(x, mask, strict=True)]


def near_by_count(model, ids, mask):
    x, at = at_places(model, ids), mask.cumsum(1)
    scores = model.q(x) @ x.mT / (1 + (at[:, :, None] - at[:, None]).abs())
    return mean(scores.masked_fill(mask[:, None] == 0, -1e9).softmax(-1) @ x, mask)


def one_by_one(model, ids, mask):
    """A scan that goes past what is hidden."""
    x = at_places(model, ids)
    state = torch.zeros_like(x[:, 0])
    for t in range(ids.shape[1]):
        state = torch.where(mask[:, t, None] == 1, (model.q(state) + x[:, t]).tanh(), state)
    return state


def put_back(model, ids, mask):
    x, seen = at_places(model, ids), mask.bool()
    x[seen] = model.q(x[seen]).tanh()
    return mean(x, mask)


def of_their_own(mask):
    """Weights of places, normalised over those that are seen."""
    return torch.linspace(0, 2, mask.shape[1]).masked_fill(mask == 0, -1e9).softmax(-1)


def shares_of_a_graph(model, ids, mask):
    """Each token beside all that are seen, by the root of how many those are, on both sides."""
    beside = (mask[:, :, None] * mask[:, None]).double()
    roots = beside.sum(-1, keepdim=True).clamp(min=1).rsqrt()
    return mean(roots * (beside @ (roots * at_places(model, ids))), mask)


def parts_of_all(model, ids, mask):
    shares = torch.arange(ids.shape[1]) / mask.sum(1, keepdim=True)
    return mean((model.embed(ids) + shares[..., None] * model.places.weight[0]).tanh(), mask)


MORE = {
    "parts of all": parts_of_all,
    "shares of so far": lambda m, ids, mask: mean(at_places(m, ids) * mask[..., None] / so_far(mask), mask),
    "scores by distance": near_by_count,
    "in another thread": lambda m, ids, mask: mean(looked_up(m, ids, elsewhere(lambda: mask.cumsum(1))), mask),
    "all in another": lambda m, ids, mask: elsewhere(lambda: mean(looked_up(m, ids, mask.cumsum(1)), mask).detach()),
    "every other": every_other,
    "in chunks": in_chunks,
    "behind many": behind_others,
    "the third that is seen": lambda m, ids, mask: torch.stack([x[2] for x in seen_rows(at_places(m, ids), mask)]),
    "packed with places": lambda m, ids, mask: torch.stack(
        [(x + m.places.weight[: len(x)]).mean(0) for x in seen_rows(m.embed(ids), mask)]
    ),
    "a sum so far by a square": lambda m, ids, mask: (
        (at_places(m, ids) * mask[..., None]).cumsum(1) / so_far(mask) ** 2
    )[:, -1],
}
HIDING = {
    "shares of a graph": shares_of_a_graph,
    "a mean so far": lambda m, ids, mask: ((at_places(m, ids) * mask[..., None]).cumsum(1) / so_far(mask))[:, -1],
    "by what there are of": lambda m, ids, mask: (
        (at_places(m, ids) * mask[..., None]).sum(1) * (1 / mask.sum(1)[:, None])
    ),
    "learned weights": lambda m, ids, mask: (at_places(m, ids) * of_their_own(mask)[..., None]).sum(1),
    "a scan": one_by_one,
    "put back": put_back,
    "half of all": lambda m, ids, mask: mean(at_places(m, ids)[:, ::2], mask[:, ::2]),
    "the largest": lambda m, ids, mask: torch.stack([x.amax(0) for x in seen_rows(at_places(m, ids), mask)]),
}


@pytest.mark.parametrize("way", [*MORE, *HIDING])
def test_what_is_made_of_a_mask_hides_one_place_or_weighs_those_that_are_seen(way):
    """Anything else is refused, wherever it is computed, along whatever and behind however many others."""

    class Own(Counts):
        def forward(self, input_ids, attention_mask):
            return self.head((MORE | HIDING)[way](self, input_ids, attention_mask))

    model, ids = Own().double().eval(), [3, 7, 1, 9, 5, 11, 2]
    explain = Explainer(model, task=Task.CLASSIFICATION)
    if way in MORE:
        with pytest.raises(ModelError, match="by its attention_mask, or which one it reads"):
            explain(ids, 1, method="leave-one-out")
        return
    near(explain(ids, 1, method="leave-one-out").relevance, leave_one_out(model, ids, lambda out: out[0, 1]))


class ReadsOn(Counts):
    """A recurrence over what attention makes of a text, as far as the mask has ones; what that hides is zero."""

    def __init__(self, zeros):
        super().__init__()
        self.recurrence, self.zeros = torch.nn.GRU(8, 8, batch_first=True), zeros

    def forward(self, input_ids, attention_mask):
        x = at_places(self, input_ids)
        x = x + (self.q(x) @ x.mT).masked_fill(attention_mask[:, None] == 0, -1e9).softmax(-1) @ x
        x = x * attention_mask[..., None] if self.zeros else x
        lengths = attention_mask.sum(1)
        return self.head(self.recurrence(pack_padded_sequence(x, lengths, True, enforce_sorted=False))[1][-1])


@pytest.mark.parametrize("zeros", [True, False])
def test_a_recurrence_over_so_many_tokens_as_the_mask_has_ones_is_refused(zeros):
    """The last token was left out with any other."""
    explain = Explainer(ReadsOn(zeros).double().eval(), task=Task.CLASSIFICATION)
    with pytest.raises(ModelError, match="ReadsOn counts tokens' places by its attention_mask, or which one it reads"):
        explain([3, 7, 1, 9, 5], 1, method="leave-one-out")


class Around(torch.nn.Module):
    """Hands its model places that it counts by the mask, as generation does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, attention_mask):
        places = (attention_mask.cumsum(-1) - 1).clamp_min(0)
        return self.inner(input_ids, attention_mask=attention_mask, position_ids=places).logits


def test_a_module_around_a_model_that_counts_places_by_the_mask_says_what_the_model_does():
    inner = tiny.neox()
    ids = [3, 17, 8, 25, 4]
    expected = Explainer(inner, tokenizer=None)(ids, target=7, method="leave-one-out")
    found = Explainer(Around(inner).eval(), tokenizer=None, task=Task.CAUSAL)(ids, target=7, method="leave-one-out")
    torch.testing.assert_close(found.relevance, expected.relevance)
