"""The scripts that train the models of the faithfulness runs: a few steps learn, what is asked is answered in the text,
and the two linear-attention networks are one function."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import copying
import extractive_qa
import linear_attention
import numpy as np
import pytest
import sentiment
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification

import lrpx

# ----------------------------------------------------------------------------------- sentiment


@drawn(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(0, 9))
def test_every_row_is_in_one_batch_of_bounded_size(lengths: list[int], seed: int) -> None:
    groups = list(sentiment.batches(lengths, np.random.default_rng(seed)))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) <= sentiment.BATCH_ROWS
        assert len(group) * min(lengths[i] for i in group) <= max(sentiment.BATCH_TOKENS, lengths[group[0]])
    ends = sorted((min(lengths[i] for i in group), max(lengths[i] for i in group)) for group in groups)
    assert all(one[1] <= other[0] or one[1] == other[1] for one, other in pairwise(ends))


def test_quotes_and_other_columns_are_read_as_they_are(tmp_path: Any) -> None:
    (tmp_path / "a.tsv").write_text('label\trating\ttext\n1\t9\t"Die Sieger" was good\n0\t2\tit\'s "bad\n')
    assert sentiment.read(tmp_path / "a.tsv") == (['"Die Sieger" was good', "it's \"bad"], [1, 0])
    (tmp_path / "b.tsv").write_text("words\tlabel\nx\t1\n")
    with pytest.raises(SystemExit, match=r"columns label and text"):
        sentiment.read(tmp_path / "b.tsv")


def test_a_few_steps_learn_a_word(piece_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "RATE", 5e-3)  # a model this small, and new
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(piece_tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, pad_token_id=piece_tokenizer.pad_token_id,
    )  # fmt: skip
    texts = ["a lovely film", "a terrible ending", "the lovely girl is tall", "what a terrible tree is that"] * 60
    labels = [1, 0, 1, 0] * 60
    said: list[dict[str, Any]] = []
    model = BertForSequenceClassification(config)
    last = sentiment.train(
        model, piece_tokenizer, (texts, labels), (texts[:40], labels[:40]), epochs=8, length=8,
        say=lambda **entry: said.append(entry),
    )  # fmt: skip
    assert not model.training
    assert last == said[-1]["accuracy"] == 1.0
    ids = piece_tokenizer(texts[:4], padding=True, return_tensors="pt")
    assert model(**ids).logits.argmax(-1).tolist() == labels[:4]


# ------------------------------------------------------------------------- extractive answers


@drawn(st.integers(1, 6), st.integers(1, 40), st.integers(8, 30), st.integers(0, 9), st.data())
def test_a_window_holds_the_answer_and_no_more_tokens_than_it_may(
    question: int, context: int, length: int, seed: int, data: st.DataObject
) -> None:
    ids = [0, *range(1000, 1000 + question), 1, *range(2000, 2000 + context), 1]
    first = question + 2
    start = data.draw(st.integers(first, first + context - 1))
    end = data.draw(st.integers(start, first + context - 1))
    found = extractive_qa.windowed(ids, first, (start, end), length, np.random.default_rng(seed))
    if len(ids) > length and length - first - 1 < end - start + 1:
        assert found is None
        return
    cut, (low, high) = found
    assert len(cut) == min(len(ids), length)
    assert cut[low : high + 1] == ids[start : end + 1]
    assert cut[:first] == ids[:first]
    assert cut[-1] == 1
    assert all(after - before == 1 for before, after in pairwise(cut[first:-1]))  # one piece of the context


def test_the_tokens_of_an_answer_are_those_of_its_characters(piece_tokenizer: Any) -> None:
    asked = extractive_qa.Asked("1", 1, "the lovely girl is the tall tree", "what is tall", ((16, 27),))
    ((ids, first, start, end),) = extractive_qa.rows_of([asked], piece_tokenizer, 64, np.random.default_rng(0))
    assert piece_tokenizer.decode(ids[start : end + 1]).replace(" ", "") == "isthetall"
    assert start >= first > ids.index(piece_tokenizer.sep_token_id)
    cut = extractive_qa.rows_of([asked], piece_tokenizer, first + 2, np.random.default_rng(0))
    assert cut == []  # no window so small holds it


@drawn(st.integers(0, 10**6))
def test_the_best_span_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start, end = (torch.from_numpy(rng.normal(size=50)) for _ in range(2))
    first, last = 5, 45
    every = [
        (float(start[a] + end[b]), (a, b))
        for a in range(first, last)
        for b in range(a, min(last, a + extractive_qa.LONGEST))
    ]
    assert extractive_qa.best_span(start, end, first, last) == max(every)[1]


def test_exact_match_and_f1_are_those_of_squad() -> None:
    assert extractive_qa.normalised(" The  quick, brown-fox! ") == "quick brownfox"
    assert extractive_qa.f1("the cat sat", "a cat") == pytest.approx(2 / 3)
    assert extractive_qa.f1("dog", "a cat") == 0
    assert extractive_qa.f1("the", "a") == 1
    assert extractive_qa.f1("the", "cat") == 0


def test_no_article_is_in_both_parts() -> None:
    content = {"version": "v2.0", "data": [{"title": str(i)} for i in range(35)]}
    trained, held_out = extractive_qa.split(content)
    titles = [{each["title"] for each in part["data"]} for part in (trained, held_out)]
    assert not titles[0] & titles[1]
    assert list(map(len, titles)) == [28, 7]
    assert trained["version"] == held_out["version"] == "v2.0"


# ------------------------------------------------------------------------------------- copying


@drawn(st.integers(0, 10**6))
def test_the_answer_stands_at_its_place_behind_its_letter(seed: int) -> None:
    row = copying.draw_row(np.random.default_rng(seed))
    words = copying.tokenizer()
    tokens = words.convert_ids_to_tokens(words(row.source)["input_ids"])
    assert tokens[row.position] == row.answer
    assert tokens[row.position - 1] == row.decoder
    assert tokens.count(row.decoder) == 1
    assert tokens[-1] == "</s>"
    assert "<unk>" not in tokens


def test_a_few_steps_learn() -> None:
    torch.manual_seed(0)
    words, said = copying.tokenizer(), []
    model = copying.small_t5(len(words))
    held = [copying.draw_row(np.random.default_rng([9, i])) for i in range(20)]
    given, answers = copying.batch(held, words)

    def logits() -> torch.Tensor:
        return model(**given).logits[:, -1].detach()

    before = torch.nn.functional.cross_entropy(logits(), answers)
    copying.train(model, words, 30, held, lambda **entry: said.append(entry))
    assert torch.nn.functional.cross_entropy(logits(), answers) < 0.8 * before
    assert said[-1]["accuracy"] == pytest.approx(float((logits().argmax(-1) == answers).double().mean()), abs=1e-4)


def test_the_share_of_answers_found_is_that_of_each_row_alone(tmp_path: Any) -> None:
    """Of an untrained model, whose rows are made to be answered as it does."""
    torch.manual_seed(0)
    words = copying.tokenizer()
    model = copying.small_t5(len(words)).eval()
    rows = [copying.draw_row(np.random.default_rng([5, i])) for i in range(6)]
    given, _ = copying.batch(rows, words)
    told = words.convert_ids_to_tokens(model(**given).logits[:, -1].argmax(-1).tolist())
    rows = [replace(row, answer=each) for row, each in zip(rows, told, strict=True)]
    wrong = replace(rows[0], answer=next(each for each in copying.NUMBERS if each != rows[0].answer))
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    lines = "\n".join(json.dumps(asdict(row)) for row in [*rows, wrong])
    (tmp_path / "rows.jsonl").write_text(lines)
    found = copying.found(tmp_path, ["lrp"])
    explainer, hits = lrpx.Explainer.from_pretrained(tmp_path), []
    for row in rows:
        alone = explainer(row.source, decoder=[0, words.convert_tokens_to_ids(row.decoder)], method="lrp")
        assert alone.tokens[row.position].strip() == row.source.split()[row.position]
        hits.append(int(alone.relevance[: len(words(row.source)["input_ids"])].argmax()) == row.position)
    assert found["rows"] == len(rows)
    assert found["lrp"] == np.mean(hits)


# ---------------------------------------------------------------------------- linear attention


def test_left_and_right_are_one_function_and_not_one_explanation() -> None:
    torch.manual_seed(0)
    left, right = (model.double() for model in linear_attention.twins())
    pixels, digits = torch.rand(3, linear_attention.PIXELS, dtype=torch.float64), torch.tensor([1, 2, 3])
    torch.testing.assert_close(left(pixels), right(pixels), rtol=1e-9, atol=1e-9)

    def both(recipe: lrpx.Recipe) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (linear_attention.relevance(model, recipe, pixels, digits) for model in (left, right))
        return a, b

    for recipe in (lrpx.ATTNLRP, lrpx.LRP, lrpx.GRADIENT):
        torch.testing.assert_close(*both(recipe), rtol=1e-9, atol=1e-12)
    a, b = both(linear_attention.PAIRWISE)
    assert (a - b).abs().max() > 1e-3 * a.abs().max()


def test_three_nodes_are_exact_and_integrated_gradients_complete() -> None:
    torch.manual_seed(0)
    model = linear_attention.LinearAttention(left=False).double()
    pixels, digits = torch.rand(2, linear_attention.PIXELS, dtype=torch.float64), torch.tensor([4, 7])
    found = linear_attention.integrated_gradients(model, pixels, digits).sum(1)
    gained = (model(pixels) - model(torch.zeros_like(pixels))).gather(1, digits[:, None])[:, 0]
    torch.testing.assert_close(found, gained.detach(), rtol=1e-9, atol=1e-9)


def test_leave_one_out_is_a_pixel_less() -> None:
    torch.manual_seed(0)
    model = linear_attention.LinearAttention(left=True).double()
    pixels = torch.rand(1, linear_attention.PIXELS, dtype=torch.float64)
    found = linear_attention.leave_one_out(model, pixels, torch.tensor([5]))
    without = pixels.clone()
    without[0, 17] = 0
    assert found[0, 17].item() == pytest.approx((model(pixels) - model(without))[0, 5].item(), abs=1e-12)


def test_correlation_is_numpys() -> None:
    a, b = torch.rand(4, 9), torch.rand(4, 9)
    wanted = np.mean([np.corrcoef(x, y)[0, 1] for x, y in zip(a.double().numpy(), b.double().numpy(), strict=True)])
    assert linear_attention.correlation(a, b) == pytest.approx(wanted, abs=1e-12)
