"""Hidden tokens: each way against its slow twin on every kind of model, in batches, once each, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from lrpx import Contrast, Logit, LogProb, Span, Task
from lrpx.errors import InputError, ModelError, TargetError
from lrpx.model import BoundModel
from lrpx.perturbations import READS, WAYS, Perturbation, outputs
from lrpx.questions import Question, Questions
from tests import tiny
from tests.reference import models
from tests.reference.perturbation import hidden_output
from tests.work import calls_of

IDS = [3, 14, 15, 9, 26, 5, 7]
ROWS = [IDS, [8, 9], [4, 11, 20], [6, 2, 1, 30, 12]]
TOKENS = {"mask-token": 4, "unk": 1, "pad": 0}


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


def asked(model, rows=ROWS, target=None, position="last"):
    """A question about each row."""
    read = [model.reader.row(row) for row in rows]
    reads_place = model.task.reads == "position"
    places = [len(row) - 1 if position == "last" else position for row in rows]
    target = Logit(2) if target is None else target
    return Questions(
        tuple(read), tuple(Question(i, at if reads_place else None, target) for i, at in enumerate(places))
    )


def random_sets(rows, seed=0, count=5, share=0.5):
    rng = np.random.default_rng(seed)
    return [rng.random((count, len(row))) < share for row in rows]


def with_token(how, monkeypatch):
    """Give a model without a tokenizer the token that stands in a hidden one's place."""
    monkeypatch.setattr(Perturbation, "_token", lambda self, _: TOKENS.get(self.how))
    return TOKENS.get(how)


KINDS = {
    "llama": (models.tiny_llama, True),
    "gpt2": (models.tiny_gpt2, True),
    "bert": (models.tiny_bert, True),
    "opt": (tiny.opt, True),
    "bert classifier": (tiny.bert_classifier, False),
    "llama classifier": (tiny.llama_classifier, False),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_twins_agree(kind, how, monkeypatch):
    build, has_place = KINDS[kind]
    module = build()
    model = BoundModel(module)
    token = with_token(how, monkeypatch)
    questions = asked(model)
    perturbation = Perturbation(how)
    sets = random_sets(ROWS)
    for each, row in zip(sets, ROWS, strict=True):
        each[0] = False
        each[:, len(row) // 2] &= how != "attention-mask" or has_place  # something is left
        if how == "delete" or (how == "pad" and not has_place):
            each[:, -1] = False
        elif how == "attention-mask" and has_place:
            each[1] = True  # all of them
    full = model.ask(questions)
    found = outputs(model, questions, full, sets, tuple(READS), perturbation, batch_size=8)
    for k, (row, each) in enumerate(zip(ROWS, sets, strict=True)):
        place = len(row) - 1 if has_place else None
        for s, hidden in enumerate(each):
            out, at = hidden_output(module, row, set(np.flatnonzero(hidden).tolist()), how, token=token, position=place)
            logits = out.logits[0] if at is None else out.logits[0, at]
            whole = full.logits[k]
            error = float(((logits - whole) ** 2).sum() if not has_place else (logits[2] - whole[2]) ** 2)
            log = float(
                logits.float().log_softmax(-1)[2] if logits.dtype != torch.float64 else logits.log_softmax(-1)[2]
            )
            near(found[k][s], [float(logits[2]), np.exp(log), log, error])
        near(found[k][0, 0], full.values[k])
    assert max(np.ptp(each[:, 0]) for each in found) > 1e-3


def test_an_answer_keeps_its_place():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    module = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=31, **sizes)).eval().double()
    model = BoundModel(module)
    rows = [IDS, [8, 9, 4, 11, 20, 3]]
    questions = asked(model, rows, Span(2, 4))
    sets = random_sets(rows)
    for how in ("attention-mask", "zero-embedding"):
        found = outputs(model, questions, model.ask(questions), sets, ("logit", "log-probability"), Perturbation(how))
        for row, each, values in zip(rows, sets, found, strict=True):
            for hidden, (logit, log) in zip(each, values, strict=True):
                out, _ = hidden_output(module, row, set(np.flatnonzero(hidden).tolist()), how)
                starts, ends = out.start_logits[0], out.end_logits[0]
                near(logit, float(starts[2] + ends[4]))
                near(log, float(starts.log_softmax(-1)[2] + ends.log_softmax(-1)[4]))
    with pytest.raises(ModelError, match="places in the text, which delete would move"):
        outputs(model, questions, model.ask(questions), sets, perturbation=Perturbation("delete"))


@pytest.mark.parametrize("how", ["attention-mask", "zero-embedding"])
def test_an_encoder_is_perturbed_and_its_decoder_is_not(how):
    module = models.tiny_t5()
    model = BoundModel(module)
    row = model.reader.row(IDS, [0, 5, 9])
    questions = Questions((row,), (Question(0, 2, Logit(4)),))
    hidden = np.zeros((2, len(IDS) + 3), dtype=bool)
    hidden[0, [1, 4]] = True
    full = model.ask(questions)
    found = outputs(model, questions, full, [hidden], perturbation=Perturbation(how))[0]
    decoder = torch.tensor([[0, 5, 9]])
    with torch.no_grad():
        if how == "attention-mask":
            mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1]])
            out = module(input_ids=torch.tensor([IDS]), attention_mask=mask, decoder_input_ids=decoder)
        else:
            embeddings = module.shared(torch.tensor([IDS])).clone()
            embeddings[0, [1, 4]] = 0.0
            out = module(inputs_embeds=embeddings, decoder_input_ids=decoder)
    near(found[:, 0], [float(out.logits[0, 2, 4]), float(full.values[0])])
    assert Perturbation(how).hideable(model, questions, 0).tolist() == [True] * 7 + [False] * 3
    hidden[0, -1] = True
    with pytest.raises(InputError, match=r"token 9, .* may not be hidden"):
        outputs(model, questions, full, [hidden], perturbation=Perturbation(how))


@pytest.mark.parametrize("how", ["attention-mask", "zero-embedding", "unk", "delete"])
def test_alone_and_together_are_the_same(how, monkeypatch):
    with_token(how, monkeypatch)
    model = BoundModel(models.tiny_llama())
    questions, sets = asked(model), random_sets(ROWS, 1)
    for each in sets:
        each[:, -1] = False
    perturbation = Perturbation(how)
    together = outputs(model, questions, model.ask(questions), sets, perturbation=perturbation)
    for k, each in enumerate(sets):
        one = questions.alone([k])
        for s, hidden in enumerate(each):
            alone = outputs(model, one, model.ask(one), [hidden[None]], perturbation=perturbation, batch_size=1)
            near(alone[0][0], together[k][s])


def test_places_that_were_given_move_up_where_a_token_is_deleted():
    model = BoundModel(models.tiny_gpt2())
    plain = asked(model, [IDS])
    sets = [np.eye(7, dtype=bool)[:-1]]
    counted, packed = (
        replace(
            plain, rows=(model.reader.row({"input_ids": [IDS], "position_ids": [at], "attention_mask": [[1] * 7]}),)
        )
        for at in (list(range(7)), [0, 1, 2, 3, 0, 1, 2])
    )
    expected, found = (
        outputs(model, each, model.ask(each), sets, perturbation=Perturbation("delete"))[0] for each in (plain, counted)
    )
    near(found, expected)
    with pytest.raises(InputError, match="the position_ids do not count up by one"):
        outputs(model, packed, model.ask(packed), sets, perturbation=Perturbation("delete"))


def test_equal_sets_run_once(monkeypatch):
    model = BoundModel(models.tiny_llama())
    questions = asked(model, [IDS])
    sets = [np.concatenate([np.eye(7, dtype=bool)] * 5 + [np.zeros((4, 7), dtype=bool)])]
    full = model.ask(questions)
    assert not model._trials.sees_hidden(model._run, questions.with_targets(full.targets))
    with calls_of(model.module, lambda named: len(named["input_ids"])) as rows:
        monkeypatch.setattr(type(model), "accepts", lambda *_: True)
        found = outputs(model, questions, full, sets)[0]
    assert sum(rows) == 8
    assert len(found) == 39
    near(found[:7], found[7:14])


def test_nothing_of_the_model_changes():
    module = tiny.bert_classifier()
    module.requires_grad_(True)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    model = BoundModel(module)
    questions = asked(model)
    random = torch.random.get_rng_state()
    for how in ("attention-mask", "zero-embedding"):
        outputs(model, questions, model.ask(questions), [s & (np.arange(s.shape[1]) > 0) for s in random_sets(ROWS)],
                perturbation=Perturbation(how))  # fmt: skip
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    assert all(each.requires_grad and each.grad is None for each in module.parameters())


# ------------------------------------------------------------------------------------ tokenizers


@pytest.fixture
def pieces(piece_tokenizer):
    """A classifier with a tokenizer that puts special tokens around a text."""
    return BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer)), piece_tokenizer)


@pytest.fixture
def bytes_(byte_tokenizer):
    """A causal model whose tokenizer knows no unknown and no mask token."""
    return BoundModel(tiny.build(transformers.LlamaForCausalLM, transformers.LlamaConfig(
        **tiny.SIZES | {"vocab_size": len(byte_tokenizer), "num_key_value_heads": 2})), byte_tokenizer)  # fmt: skip


def of_text(model, text):
    row = model.reader.row(text)
    return Questions((row,), (Question(0, model.reader.position(row), Logit(2)),))


def test_a_masked_models_mask_is_never_hidden(piece_tokenizer):
    size = {**tiny.SIZES, "vocab_size": len(piece_tokenizer)}
    model = BoundModel(tiny.build(transformers.BertForMaskedLM, transformers.BertConfig(**size)), piece_tokenizer)
    questions = of_text(model, f"the {piece_tokenizer.mask_token} keys")
    (length,), at = questions.rows[0].lengths, questions.asked[0].position
    for how in ("attention-mask", "zero-embedding", "unk"):
        may = Perturbation(how, specials=True).hideable(model, questions, 0)
        assert [i for i in range(length) if not may[i]] == [at]


def test_special_tokens_are_never_hidden_unless_it_is_said(pieces):
    questions = of_text(pieces, "the keys")
    (length,) = questions.rows[0].lengths
    assert Perturbation().hideable(pieces, questions, 0).tolist() == [False, *[True] * (length - 2), False]
    assert Perturbation(specials=True).hideable(pieces, questions, 0).all()
    hidden = np.eye(length, dtype=bool)[:1]
    answers = pieces.ask(questions)
    with pytest.raises(InputError, match=r"token 0, .*\[CLS\].*specials=True"):
        outputs(pieces, questions, answers, [hidden])
    assert outputs(pieces, questions, answers, [hidden], perturbation=Perturbation(specials=True))[0].shape == (1, 1)


@pytest.mark.parametrize(("how", "token"), [("mask-token", "[MASK]"), ("unk", "[UNK]"), ("pad", "[PAD]")])
def test_the_tokenizers_own_tokens_stand_in(how, token, pieces):
    questions = of_text(pieces, "the keys")
    ids = list(questions.rows[0].tokens.ids)
    ids[1] = pieces.tokenizer.convert_tokens_to_ids(token)
    hidden = np.zeros((1, len(ids)), dtype=bool)
    hidden[0, 1] = True
    found = outputs(pieces, questions, pieces.ask(questions), [hidden], perturbation=Perturbation(how))
    with torch.no_grad():
        near(found[0][0, 0], float(pieces.module(input_ids=torch.tensor([ids])).logits[0, 2]))
    assert token in Perturbation(how).describe(pieces)


def test_unk_is_the_hash_sign_where_there_is_none(bytes_):
    number = bytes_.tokenizer.convert_tokens_to_ids("#")
    assert bytes_.tokenizer.unk_token_id is None
    assert f"('#', id {number})" in Perturbation("unk").describe(bytes_)
    questions = of_text(bytes_, "The keys")
    ids = [number, *questions.rows[0].tokens.ids[1:]]
    hidden = np.eye(len(ids), dtype=bool)[:1]
    found = outputs(bytes_, questions, bytes_.ask(questions), [hidden], perturbation=Perturbation("unk"))
    with torch.no_grad():
        near(found[0][0, 0], float(bytes_.module(input_ids=torch.tensor([ids])).logits[0, -1, 2]))


# -------------------------------------------------------------------------------------- refusals


def refused(error, match, model, how="attention-mask", hidden=None, reads=("logit",), target=None, rows=(IDS,)):
    questions = asked(model, list(rows), target)
    hidden = [np.zeros((1, len(row)), dtype=bool) for row in rows] if hidden is None else hidden
    with pytest.raises(error, match=match):
        outputs(model, questions, model.ask(questions), hidden, reads, Perturbation(how))


def test_an_unknown_way():
    with pytest.raises(InputError, match="there is no perturbation 'burn'; the perturbations are attention-mask"):
        Perturbation("burn")


def test_a_tokenizer_without_the_token(bytes_):
    with pytest.raises(InputError, match="has no mask token to put in a token's place; use another"):
        Perturbation("mask-token").check(bytes_)
    bytes_.tokenizer.pad_token = None
    with pytest.raises(InputError, match="has no padding token"):
        Perturbation("pad").check(bytes_)
    with pytest.raises(InputError, match="mask-token needs a tokenizer"):
        Perturbation("mask-token").check(BoundModel(models.tiny_bert()))


def test_a_token_the_model_does_not_have(piece_tokenizer):
    piece_tokenizer.add_special_tokens({"mask_token": "<new>"})
    model = BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer) - 1), piece_tokenizer)
    with pytest.raises(InputError, match="and the model's vocabulary ends at"):
        Perturbation("mask-token").check(model)


def test_models_that_cannot_be_perturbed():
    sizes = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.BartConfig(vocab_size=31, d_model=16, max_position_embeddings=64, **sizes)
    with pytest.raises(ModelError, match="BartForSequenceClassification gives the tokens to a decoder too"):
        Perturbation().check(BoundModel(tiny.build(transformers.BartForSequenceClassification, config)))
    with pytest.raises(ModelError, match="a text encoder; texts are perturbed of"):
        Perturbation().check(BoundModel(models.tiny_bert().bert, task=Task.EMBEDDINGS))

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(31, 4), torch.nn.Linear(4, 31)

        def get_input_embeddings(self):
            return self.embedding

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids).cumsum(1))

    model = BoundModel(Plain().eval(), task=Task.CAUSAL)
    for how, missing in (("attention-mask", "attention_mask"), ("zero-embedding", "inputs_embeds")):
        with pytest.raises(ModelError, match=f"Plain takes no {missing}, which {how} needs"):
            Perturbation(how).check(model)


def test_a_model_that_makes_something_else_of_embeddings():
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, inputs_embeds=None, **more):
            more |= {"inputs_embeds": inputs_embeds * 2} if input_ids is None else {"input_ids": input_ids}
            return super().forward(**more)

    config = transformers.LlamaConfig(**tiny.SIZES | {"num_key_value_heads": 2})
    refused(
        ModelError,
        "Scaled makes .* of its own embeddings and",
        BoundModel(tiny.build(Scaled, config)),
        "zero-embedding",
    )


@pytest.mark.parametrize("rows", [[[8, 9], IDS, [4, 11, 20, 3]], [[8, 9], [4, 11, 20, 3]]])
def test_so_it_is_of_any_of_several_texts(rows):
    """A classifier that looks for padding in the ids read the last token but one of the third, whose end is padding
    too, and the end itself where it was given embeddings; only the shortest text was tried."""
    model = BoundModel(tiny.llama_classifier(pad_token_id=3, eos_token_id=3))
    questions = asked(model, rows)
    sets = [np.eye(len(row), dtype=bool)[:1] for row in rows]
    with pytest.raises(ModelError, match=r"makes .* of its own embeddings and .* of the ids"):
        outputs(model, questions, model.ask(questions), sets, perturbation=Perturbation("zero-embedding"))
    some = asked(model, rows[:-1])
    outputs(model, some, model.ask(some), sets[:-1], perturbation=Perturbation("zero-embedding"))


def test_padding_in_the_place_of_the_token_that_is_read_is_refused(monkeypatch):
    """It stands before an end that is padding too: with padding in its place the token before it is read."""
    with_token("pad", monkeypatch)
    model = BoundModel(tiny.llama_classifier(pad_token_id=0, eos_token_id=0))
    questions = asked(model, [[4, 11, 20, 0]])
    full, hidden = model.ask(questions), np.eye(4, dtype=bool)
    for place in (2, 3):
        with pytest.raises(InputError, match="may look for its last token by the padding, which pad would put there"):
            outputs(model, questions, full, [hidden[[place]]], perturbation=Perturbation("pad"))
    found = outputs(model, questions, full, [hidden[:2]], perturbation=Perturbation("pad"))
    with torch.no_grad():
        for value, ids in zip(found[0], ([0, 11, 20, 0], [4, 0, 20, 0]), strict=True):
            near(value, float(model.module(torch.tensor([ids])).logits[0, 2]))


def test_the_rounding_of_a_batch_is_no_other_embedding():
    """What a text's value is in a padded batch may differ from the text's alone by more than a few last digits."""
    model = BoundModel(models.tiny_llama().float())
    questions = asked(model)
    answers = model.ask(questions)
    rounded = replace(answers, values=answers.values * (1 + 1e-4))
    nothing = [np.zeros((1, len(row)), dtype=bool) for row in ROWS]
    found = outputs(model, questions, rounded, nothing, perturbation=Perturbation("zero-embedding"))
    np.testing.assert_allclose(np.concatenate(found)[:, 0], answers.values.numpy(), rtol=0, atol=1e-5)


def test_sets_that_cannot_be_run(monkeypatch):
    model = BoundModel(models.tiny_llama())
    for wrong in (np.zeros((1, 6), dtype=bool), np.zeros((1, 7)), np.zeros(7, dtype=bool)):
        refused(InputError, r"give booleans \[S, 7\]", model, hidden=[wrong])
    last = np.eye(7, dtype=bool)[-1:]
    refused(InputError, "token 6, .* may not be hidden by delete", model, "delete", [last])
    everything = [np.ones((1, 7), dtype=bool)]
    classifier = BoundModel(tiny.bert_classifier())
    refused(InputError, "attention-mask would leave nothing", classifier, hidden=everything)
    refused(InputError, "delete would leave nothing", classifier, "delete", hidden=everything)
    with_token("pad", monkeypatch)
    reads_last = BoundModel(tiny.llama_classifier())
    refused(InputError, "may look for its last token by the padding", reads_last, "pad", [last])
    refused(InputError, "may look for its last token by the padding", reads_last, "pad", everything)


def test_what_cannot_be_read():
    model = BoundModel(models.tiny_llama())
    refused(InputError, "nothing is called 'odds'", model, reads=("odds",))
    refused(TargetError, "a contrast has no probability", model, reads=("probability",), target=Contrast(2, 3))
    several = BoundModel(tiny.bert_classifier(problem_type="multi_label_classification"))
    refused(TargetError, "no classes that exclude each other", several, reads=("log-probability",))
    score = BoundModel(tiny.bert_classifier(id2label={0: "score"}))
    refused(TargetError, r"\(one output\), so a softmax", score, reads=("probability",), target=Logit(0))
    questions = asked(model, [IDS], LogProb(2))
    found = outputs(
        model, questions, model.ask(questions), [np.zeros((1, 7), dtype=bool)], ("logit", "log-probability")
    )
    near(found[0][0, 0], found[0][0, 1])
