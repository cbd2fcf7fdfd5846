"""The training of the masked language model: what leaks is dropped, the right verbs are marked, a step learns, and a
stopped run goes on as if it had not been stopped."""

from __future__ import annotations

import lzma

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_lm import Verbs, masked_batch, question, restore, save, training_step, verdicts
from masked_lm_data import EASY, HARD, LeakFilter, Marker, Sentences, cut, evaluation_texts, prepare, word_runs
from transformers import BertConfig, BertForMaskedLM

ROW = "the keys to the old cabinet , which crowe 's brother does n't open , ***mask*** on the table ."
WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=5), min_size=1, max_size=30)


@pytest.fixture
def agreement(tmp_path):
    """A folder of evaluation data of one row each."""
    folder = tmp_path / "data/agreement"
    folder.mkdir(parents=True)
    row = "\t".join(["1", ROW.replace("***mask***", "are"), ROW, "are", "is"])
    (folder / "lgd_some.tsv").write_text(row + "\n")
    with lzma.open(folder / "en_ewt-all.conllu.xz", "wt") as file:
        file.write("# sent_id = 1\n# text = What a lovely film it is!\n1\tWhat\t_\n")
    (folder / "blimp_some.jsonl").write_text('{"sentence_good": "Paula references Robert.", "sentence_bad": "x"}\n')
    return folder


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("She says: the keys to the old cabinet, which Crowe's sister lost.", False),
        ("It is the cabinet which Crowe’s brother doesn't open, are you sure?", True),
        ("The OLD cabinet, which Crowe's brother doesn’t open -- are there others?", False),
        ("The keys to the old cabinet are lost.", True),
        ("what a lovely film it is", False),
        ("Paula references Robert", False),
        ("Yesterday Paula references Robert again", True),
    ],
)
def test_a_sentence_that_shares_eight_words_with_an_evaluation_row_is_dropped(agreement, text, passes):
    keeps = LeakFilter(evaluation_texts(agreement))
    assert keeps(text) is passes
    assert keeps.dropped == (not passes)


def test_prepared_sentences_hold_no_leak(agreement, piece_tokenizer, tmp_path):
    leak = "Look at the keys to the old cabinet, which Crowe's sister lost."
    book = "\n\n".join(["The keys to the cabinet are on the table. The girl is small.", leak] * 20)
    data = agreement.parent
    (data / "text").mkdir()
    with lzma.open(data / "text/novels.txt.xz", "wt") as file:
        file.write("<|endoftext|>".join([book] * 5))
    wiki = ["The boys near the old tree are tall .", leak, "What a lovely film it is !"] * 400
    (data / "text/wiki_split_sentences.txt").write_text("\n".join(wiki))
    said = []
    prepare(data, tmp_path / "sentences.npz", piece_tokenizer, lambda **entry: said.append(entry))
    sentences = Sentences(tmp_path / "sentences.npz")
    texts = {
        name: {piece_tokenizer.decode(sentences.row(place)[0][1:-1]) for place in places}
        for name, places in sentences.places.items()
    }
    assert texts["hard"] == {"the keys to the cabinet are on the table."}
    assert texts["medium"] == {"the girl is small."}
    assert texts["wiki"] == texts["dev_wiki"] == {"the boys near the old tree are tall."}
    assert texts["dev_novels"] == texts["hard"] | texts["medium"]
    assert said[-1]["leaks"] > 0


@given(WORDS, WORDS, WORDS, st.integers(0, 30))
def test_whatever_stands_around_the_shared_words(row, before, after, at):
    shared = row[at : at + 8]
    text = " ".join(w.upper() for w in before) + " , " + ", ".join(shared) + "; " + " ".join(after)
    if len(shared) == 8:
        assert not LeakFilter([" ".join(row)])(text)
    assert LeakFilter([" ".join(row)])(" ".join(row) + " x y") is (len(row) < 8)


@given(WORDS)
def test_word_runs_are_all_windows(words):
    runs = word_runs(" ".join(words))
    assert len(runs) <= max(1, len(words) - 7)
    assert all(len(run.split()) == min(8, len(words)) for run in runs)


@pytest.mark.parametrize(
    ("text", "verb", "mark"),
    [
        ("the keys to the cabinet are lost", "are", -HARD),
        ("the key to the cabinets is lost", "is", HARD),
        ("he is lost", "is", EASY),
        ("the doors to the house open slowly", "open", -HARD),
        ("they want to open it", "open", 0),
        ("the boys would never open it", "open", 0),
        ("the open door", "open", 0),
        ("i was lost", "was", 0),
        ("if he were lost", "were", 0),
    ],
)
def test_verbs_whose_form_the_subject_decides_are_marked(text, verb, mark):
    pieces = ["[CLS]", *text.split(), "[SEP]"]
    marks = Marker([("is", "are"), ("was", "were"), ("opens", "open")])(pieces)
    assert marks[pieces.index(verb)] == mark


@given(st.integers(4, 40), st.data())
def test_a_cut_sentence_keeps_all_up_to_its_verb_and_its_end(length, data):
    verb = data.draw(st.integers(1, length - 2))
    ids, marks = np.arange(length), np.zeros(length, np.int8)
    marks[1], marks[verb] = 1, -HARD
    short, short_marks = cut(ids, marks)
    assert len(short) == len(short_marks) == min(length, verb + 10)
    assert short[:-1].tolist() == list(range(len(short) - 1))
    assert short[-1] == length - 1
    assert abs(short_marks).argmax() == verb


def test_the_mask_of_a_question_stands_for_the_first_piece(piece_tokenizer):
    ids, right, wrong = question(piece_tokenizer, "the keys to the cabinet", "are", "is", "on the table.")
    assert [piece_tokenizer.decode(i) for i in (right, wrong)] == ["are", "is"]
    at = ids.index(piece_tokenizer.mask_token_id)
    whole = piece_tokenizer("the keys to the cabinet are on the table.")["input_ids"]
    assert [*ids[:at], right, *ids[at + 1 :]] == whole
    assert question(piece_tokenizer, "the", "are", "is the", ".") is None


def test_a_verdict_is_the_sign_of_the_models_own_logits(piece_tokenizer):
    model, *_ = a_run(piece_tokenizer)
    model.eval()
    parts = [("the keys to the cabinet", "are", "is", "on the table."), ("the girl", "is", "are", ".")]
    questions = [question(piece_tokenizer, *part) for part in parts] + [question(piece_tokenizer, "", "are", "is", ".")]
    for (ids, right, wrong), told in zip(questions, verdicts(model, piece_tokenizer, questions), strict=True):
        logits = model(torch.tensor([ids])).logits[0, ids.index(piece_tokenizer.mask_token_id)]
        assert told == (logits[right] > logits[wrong]).item()


def a_run(tokenizer):
    """A tiny BERT, an optimizer, the verbs, and two rows."""
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    verbs = Verbs.of([("is", "are"), ("tall", "small")], tokenizer.get_vocab())
    rows = []
    for text, verb in [("the keys to the cabinet are on the table.", "are"), ("the girl is small.", "is")]:
        encoding = tokenizer.backend_tokenizer.encode(text)
        marks = [(2 if verb == "is" else -2) * (piece == verb) for piece in encoding.tokens]
        rows.append((np.array(encoding.ids), np.array(marks)))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), verbs, rows


def test_a_batch_masks_the_verb_and_no_padding(piece_tokenizer):
    *_, rows = a_run(piece_tokenizer)
    batch = masked_batch(rows, piece_tokenizer, np.random.default_rng(0))
    for i, (ids, marks) in enumerate(rows):
        verb = int(abs(marks).argmax())
        assert batch.ids[i, verb] == piece_tokenizer.mask_token_id
        assert batch.labels[i, verb] == ids[verb]
        assert batch.number[i].tolist() == np.pad(np.sign(marks), (0, batch.ids.shape[1] - len(ids))).tolist()
        restored = torch.where(batch.labels[i] >= 0, batch.labels[i], batch.ids[i])
        assert restored[: len(ids)].tolist() == ids.tolist()
        assert batch.mask[i].tolist() == [1] * len(ids) + [0] * (batch.ids.shape[1] - len(ids))
        assert (batch.labels[i, len(ids) :] == -100).all()


def test_steps_learn_and_a_head_alone_leaves_the_encoder(piece_tokenizer):
    model, optimizer, verbs, rows = a_run(piece_tokenizer)
    batch = masked_batch(rows, piece_tokenizer, np.random.default_rng(0))
    model.bert.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training_step(model, model.bert, batch, verbs, optimizer, head_only=True)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(name.startswith("cls.") for name in changed)

    model.bert.requires_grad_(True)
    losses = [training_step(model, model.bert, batch, verbs, optimizer) for _ in range(60)]
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert losses[-1][1] < 0.5 * losses[0][1]
    assert losses[-1][2] == 1.0


def test_a_stopped_run_goes_on_the_same(piece_tokenizer, tmp_path):
    model, optimizer, verbs, rows = a_run(piece_tokenizer)
    batch = masked_batch(rows, piece_tokenizer, np.random.default_rng(0))
    for _ in range(3):
        training_step(model, model.bert, batch, verbs, optimizer)
    save(tmp_path / "checkpoint.safetensors", model, optimizer, 3, 1.5)

    torch.manual_seed(5)
    again, second, *_ = a_run(piece_tokenizer)
    assert restore(tmp_path / "checkpoint.safetensors", again, second) == (3, 1.5)
    for run, steps in ((model, optimizer), (again, second)):
        torch.manual_seed(3)
        training_step(run, run.bert, batch, verbs, steps)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
