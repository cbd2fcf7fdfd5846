"""Rows without their hidden tokens: the numbers of whole rows under a mask, on every kind of model, or not used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import lrpx
from lrpx import Explainer, Logit, Task
from lrpx import _dropping as dropping
from lrpx.errors import ModelError
from lrpx.model import BoundModel
from lrpx.perturbations import outputs
from lrpx.questions import Question, Questions
from tests import tiny
from tests.engine.samples import SAMPLES
from tests.reference import models
from tests.reference.leave_one_out import leave_one_out
from tests.work import calls_of

LONG = [3, 14, 15, 9, 26, 5, 7, 8, 11, 20, 6, 2, 12, 30, 4, 13, 10, 21, 22, 17]
ROWS = [LONG, LONG[4:16], [*LONG[7:], *LONG[:3]]]


def mistral(window):
    sizes = tiny.SIZES | {"num_key_value_heads": 2, "sliding_window": window}
    return tiny.build(transformers.MistralForCausalLM, transformers.MistralConfig(**sizes))


class PlacesOfItsOwn(transformers.BertForMaskedLM):
    """Takes positions and counts its own."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        assert position_ids is not None
        return super().forward(input_ids, attention_mask, **more)


class Neighbours(transformers.GPT2LMHeadModel):
    """Adds to each token the one before it, hidden or not, as a convolution does."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        embedded = self.transformer.wte(input_ids)
        more |= {"attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(inputs_embeds=embedded + 0.01 * embedded.roll(1, 1), **more)


KINDS = {
    "bert": (models.tiny_bert, True),
    "roberta": (tiny.roberta, True),
    "albert": (SAMPLES["albert"].build, True),
    "distilbert": (SAMPLES["distilbert"].build, True),
    "gpt2": (models.tiny_gpt2, True),
    "llama": (models.tiny_llama, True),
    "opt": (tiny.opt, True),
    "modernbert, short of its window": (SAMPLES["modernbert"].build, True),
    "mistral, short of its window": (lambda: mistral(20), True),
    "mistral, beyond its window": (lambda: mistral(19), False),
    "gemma3, beyond its window": (SAMPLES["gemma3"].build, False),
    "deberta": (SAMPLES["deberta_v2"].build, False),
    "longformer": (tiny.longformer, False),
    "xlnet": (tiny.xlnet, False),
    "bert classifier": (tiny.bert_classifier, True),
    "llama classifier": (tiny.llama_classifier, True),
    "gpt2 classifier": (tiny.gpt2_classifier, True),
    "counts its own places": (
        lambda: tiny.build(PlacesOfItsOwn, transformers.BertConfig(**tiny.SIZES)), False,
    ),
}  # fmt: skip


def asked(model, rows, positions=None):
    """A question about each row, read at its last token unless it is said."""
    found = tuple(model.reader.row(row) for row in rows)
    places = [len(row) - 1 for row in rows] if positions is None else positions
    has_place = model.task.reads == "position"
    return Questions(found, tuple(Question(i, at if has_place else None, Logit(1)) for i, at in enumerate(places)))


def many(model, seed=0, count=90, share=0.6):
    """A question about each of so many rows, and the mask of each."""
    rng = np.random.default_rng(seed)
    rows = [ROWS[i % len(ROWS)] for i in range(count)]
    positions = [int(rng.integers(len(row) // 2, len(row))) for row in rows]
    masks = []
    for row, at in zip(rows, positions, strict=True):
        seen = rng.random(len(row)) >= share
        seen[rng.integers(at)] = True
        masks.append(torch.from_numpy(seen.astype(np.int64)))
    return asked(model, rows, positions), masks


def counted(module):
    """How many tokens a module is given."""
    return calls_of(module, lambda named: named["input_ids"].numel())


def one_by_one(module, questions, masks, first):
    """The formula as it reads: each row whole, alone, under its mask."""
    found = []
    for question, mask in zip(questions.asked, masks, strict=True):
        ids = torch.tensor([questions.rows[question.row].tokens.ids])
        places = {} if first is None else {"position_ids": first + torch.arange(ids.shape[1])[None]}
        with torch.no_grad():
            logits = module(input_ids=ids, attention_mask=mask[None], **places).logits
        found.append(logits[0, 1] if question.position is None else logits[0, question.position, 1])
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_shorter_rows_say_what_whole_ones_say(kind):
    build, shortens = KINDS[kind]
    module = build()
    model = BoundModel(module)
    questions, masks = many(model)
    with counted(module) as tokens:
        found = model.values(questions, attention_mask=masks)
        tried = len(tokens)
        again = model.values(questions, attention_mask=masks)
    first = {"roberta": 2, "longformer": 2, "xlnet": None}.get(kind, 0)
    wanted = one_by_one(module, questions, masks, first)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    assert found.std() > 1e-3
    whole = sum(map(len, masks))
    assert (sum(tokens[tried:]) < 0.7 * whole) is shortens
    torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_where_tokens_read_their_neighbours_rows_stay_whole_and_are_refused():
    """A hidden token is seen by the next one, which reads another where it is left out."""
    model = BoundModel(tiny.build(Neighbours, transformers.GPT2Config(**tiny.GPT2_SIZES)))
    questions, masks = many(model)
    assert not model._trials.says_the_same(model._run, questions)
    with pytest.raises(ModelError, match=r"in Neighbours other tokens see what its attention_mask hides"):
        model.values(questions, attention_mask=masks)


def test_positions_that_are_not_carried_are_another_text(monkeypatch):
    """What the trial is for: GPT-2 without its positions is refused, and would be wrong."""
    model = BoundModel(models.tiny_gpt2())
    questions, masks = many(model)
    wanted = one_by_one(model.module, questions, masks, 0)
    carried = dropping.without_hidden

    def forgotten(some, given, first):
        shorter, left = carried(some, given, first)
        rows = []
        for row in shorter.rows:
            (segment,) = row.segments
            places = {"position_ids": tuple(range(len(segment)))}
            rows.append(dropping.replace(row, segments=(dropping.replace(segment, fields=places),)))
        return dropping.replace(shorter, rows=tuple(rows)), left

    monkeypatch.setattr(dropping, "without_hidden", forgotten)
    torch.testing.assert_close(model.values(questions, attention_mask=masks), wanted, rtol=0, atol=1e-11)
    shorter, left = forgotten(questions, masks, 0)
    wrong = model._values(shorter, left, None, None, 32, None, False)
    assert (wrong - wanted).abs().max() > 1e-2


def shortened(model, questions, masks):
    """The values, of far fewer tokens than there are once the model has been tried."""
    with counted(model.module) as tokens:
        model.values(questions, attention_mask=masks)
        tried = len(tokens)
        found = model.values(questions, attention_mask=masks)
    assert sum(tokens[tried:]) < 0.7 * sum(map(len, masks))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_precision_loses_more_than_it_does_by_padding(dtype):
    module = models.tiny_gpt2(lifted=False).to(dtype)
    model = BoundModel(module)
    questions, masks = many(model)
    found = shortened(model, questions, masks)
    exact = one_by_one(module.double(), questions, masks, 0)
    module.to(dtype)
    lost = (one_by_one(module, questions, masks, 0).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 4 * lost


def test_a_longer_text_is_tried_again():
    """A window that no text has filled yet says nothing of longer ones, and these nothing of shorter ones."""
    module = mistral(15)
    model = BoundModel(module)
    for length, shortens in ((12, True), (20, False), (11, True), (14, True), (19, False)):
        rows = [LONG[:length]] * 60
        questions = asked(model, rows)
        masks = [torch.tensor([1, *[0] * (length - 3), 1, 1]) for _ in rows]
        model.values(questions, attention_mask=masks)
        with counted(module) as tokens:
            found = model.values(questions, attention_mask=masks)
        assert (sum(tokens) == 60 * 3) is shortens
        torch.testing.assert_close(found, one_by_one(module, questions, masks, 0), rtol=0, atol=1e-11)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**20), st.floats(0.3, 0.9))
def test_alone_together_and_in_any_order(seed, share):
    model = SHARED
    questions, masks = many(model, seed, 90, share)
    together = model.values(questions, attention_mask=masks)
    order = np.random.default_rng(seed).permutation(90).tolist()
    turned = model.values(questions.alone(order), attention_mask=[masks[i] for i in order], batch_size=7)
    torch.testing.assert_close(turned, together[order], rtol=0, atol=1e-12)
    alone = model.values(questions.alone([5]), attention_mask=masks[5:6])
    torch.testing.assert_close(alone[0], together[5], rtol=0, atol=1e-12)


SHARED = BoundModel(models.tiny_bert())


def test_padding_on_the_left():
    module = models.tiny_llama()
    model = BoundModel(module, padding_side="left")
    questions, masks = many(model)
    found = shortened(model, questions, masks)
    torch.testing.assert_close(found, one_by_one(module, questions, masks, 0), rtol=0, atol=1e-11)


def not_shortened(model, questions, masks, first=0):
    assert model.can_batch  # which is tried once, and runs the model
    model._trials.sees_hidden(model._run, questions)  # tried once for a model
    model._trials.reads_another(model._run, questions)
    model._trials.reads_hidden(model._run, questions, masks)
    assert not model._trials.moves_places(model._run, questions)
    with counted(model.module) as tokens:
        found = model.values(questions, attention_mask=masks)
    assert sum(tokens) == sum(map(len, masks))
    torch.testing.assert_close(found, one_by_one(model.module, questions, masks, first), rtol=0, atol=1e-11)


def test_where_it_is_not_known_what_is_read_rows_stay_whole():
    model = BoundModel(tiny.llama_classifier(eos_token_id=0))
    with_padding = [*LONG[:10], 0]  # which is hidden from all, and behind what the class is read from
    questions = asked(model, [with_padding] * 60)
    not_shortened(model, questions, [torch.tensor([1, 1, *[0] * 8, 0])] * 60)
    answers = BoundModel(tiny.build(transformers.BertForQuestionAnswering, transformers.BertConfig(**tiny.SIZES)))
    row = answers.reader.row(LONG)
    several = Questions((row,) * 60, tuple(Question(i, None, lrpx.Span(1, 2)) for i in range(60)))
    assert answers.can_batch
    masks = [torch.tensor([1, *[0] * 18, 1])] * 60
    assert not answers._trials.sees_hidden(answers._run, several)
    assert not answers._trials.reads_hidden(answers._run, several, masks)
    with counted(answers.module) as tokens:
        answers.values(several, attention_mask=masks)
    assert sum(tokens) == 60 * 20


def test_an_encoder_and_a_decoder_stay_whole():
    model = BoundModel(models.tiny_t5())
    row = model.reader.row(LONG, [0, 5])
    questions = Questions((row,) * 60, tuple(Question(i, 1, Logit(4)) for i in range(60)))
    masks = [torch.tensor([1, *[0] * 18, 1])] * 60
    assert not model._trials.sees_hidden(model._run, questions)
    with counted(model.module) as tokens:
        found = model.values(questions, attention_mask=masks)
    assert sum(tokens) == 60 * 20
    with torch.no_grad():
        out = model.module(
            input_ids=torch.tensor([LONG]), attention_mask=masks[0][None], decoder_input_ids=torch.tensor([[0, 5]])
        )
    torch.testing.assert_close(found, out.logits[0, 1, 4].expand(60), rtol=0, atol=1e-11)


def test_inside_an_intervention_rows_stay_whole():
    """A change may be at a place of the text."""
    module = models.tiny_llama()
    model = BoundModel(module)
    questions, masks = many(model)
    masks[0][:] = 1
    plain = model.values(questions, attention_mask=masks)
    layer = "model.layers.0"
    with lrpx.intervene(module, {layer: {3: lrpx.Scale(-3, positions=[11])}}), counted(module) as tokens:
        found = model.values(questions, attention_mask=masks)
    assert sum(tokens) == sum(map(len, masks))
    assert (found - plain).abs().max() > 1e-4


def test_few_hidden_tokens_are_not_worth_the_trial():
    model = BoundModel(models.tiny_gpt2())
    questions, masks = many(model, count=6)
    not_shortened(model, questions, masks)
    assert model._trials.tried.dropping == {}


def test_leave_one_out_and_curves_go_the_same_way():
    """Of many short texts so much is left out that it pays."""
    module = models.tiny_gpt2()
    rows = [LONG[i : i + 4] for i in range(16)] * 10
    explain = Explainer(module)
    explain(rows[:160], 7, method="leave-one-out")
    with counted(module) as tokens:
        found = explain(rows, 7, method="leave-one-out")
    assert sum(tokens) < 160 * 4 * 5
    for a, row in zip(found[:16], rows, strict=False):
        wanted = leave_one_out(module, row, lambda out: out.logits[0, -1, 7])
        torch.testing.assert_close(a.relevance, wanted, rtol=0, atol=1e-11)
    model = BoundModel(module, task=Task.CAUSAL)
    questions = asked(model, ROWS)
    rng = np.random.default_rng(0)
    sets = [rng.random((40, len(row))) < 0.6 for row in ROWS]
    answers = model.ask(questions)
    outputs(model, questions, answers, sets)
    with counted(module) as tokens:
        said = outputs(model, questions, answers, sets)
    assert sum(tokens) < 0.7 * 40 * sum(map(len, ROWS))
    for i, (row, each) in enumerate(zip(ROWS, sets, strict=True)):
        masks = [torch.from_numpy(~one).long() for one in each]
        wanted = one_by_one(module, asked(model, [row] * 40), masks, 0)
        np.testing.assert_allclose(said[i][:, 0], wanted.numpy(), rtol=0, atol=1e-11)
