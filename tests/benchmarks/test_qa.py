"""Question answering: the answer's tokens are those of its characters, only the context is judged, and every kind of
model is asked as it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import lrpx
from lrpx._data.squad import read_squad
from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._heatmaps import choose
from lrpx.benchmarks._qa import PROMPT, Answers, AnswersPerturbed, _places
from lrpx.errors import DataError, InputError, ModelError
from lrpx.metrics import ANSWERS
from lrpx.model import BoundModel, Spec
from lrpx.targets import Logit, Span

CONTEXT = "The keys to the cabinet are on the table. The girl is small, and the boys near the tree are tall."


def squad(*asked: tuple[str, list[tuple[str, int]], bool]) -> dict[str, Any]:
    qas = [
        {
            "id": f"q{i}",
            "question": question,
            "answers": [{"text": text, "answer_start": start} for text, start in answers],
            "is_impossible": impossible,
        }
        for i, (question, answers, impossible) in enumerate(asked)
    ]
    return {"version": "v2.0", "data": [{"title": "x", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]}


@pytest.fixture
def data(tmp_path: Any) -> Any:
    table = CONTEXT.index("the table")
    content = squad(
        ("Where are the keys?", [("on the table", table - 3), ("the table", table), ("the table", table)], False),
        ("Who is small?", [("The girl", CONTEXT.index("The girl"))], False),
        ("Who is old?", [], True),
        ("Who is lost?", [("the girl", 3)], False),
        ("What are the boys?", [("are", -len("are tall."))], False),
    )
    (tmp_path / "squad.json").write_text(json.dumps(content))
    return tmp_path / "squad.json"


def test_the_first_answer_is_what_most_say_and_what_has_none_is_dropped(data: Any) -> None:
    found, dropped = read_squad(data)
    assert [(each.id, each.answer, len(each.answers)) for each in found] == [
        ("q0", "the table", 2),
        ("q1", "The girl", 1),
    ]
    assert [(each.id, each.reason) for each in dropped] == [
        ("q2", "has no answer in its context"),
        ("q3", "has an answer that is not where the file says"),
        ("q4", "has an answer that is not where the file says"),
    ]
    assert len(read_squad(data, limit=1)[0]) == 1
    marked = data.with_name("marked.json")
    marked.write_text(data.read_text(), encoding="utf-8-sig")  # as Windows saves it
    assert read_squad(marked) == (found, dropped)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "JSON"), ("[]", "as SQuAD has it"), ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "qas")],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Any, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=said):
        read_squad(tmp_path / "a.json")
    with pytest.raises(DataError, match="cannot read"):
        read_squad(tmp_path / "nowhere.json")


def extractive(tokenizer: Any) -> BoundModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return BoundModel(BertForQuestionAnswering(config).eval().double(), tokenizer)


def test_the_tokens_of_the_answers_are_those_of_their_characters(data: Any, piece_tokenizer: Any) -> None:
    """For a generator and an extractive model."""
    for model in (Spec().build(), extractive(piece_tokenizer)):
        benchmark = Answers(data=data)
        found = benchmark.samples(benchmark.read(), model).kept
        for sample, said in zip(found, ("on the table", "The girl"), strict=True):
            tokenizer = model.tokenizer
            ids = sample.row.segments[0].tokens.ids
            inside = tokenizer.decode([ids[at] for at in sample.truth]).strip()
            assert inside.lower().replace(" ", "") == said.lower().replace(" ", "")
            start, end = sample.context
            whole = tokenizer.decode(ids[start:end]).strip().lower().replace(" ", "")
            assert whole == CONTEXT.lower().replace(" ", "")
            assert list(sample.truth) == list(range(sample.truth[0], sample.truth[-1] + 1))


def test_a_generator_is_asked_for_the_first_token_behind_the_prompt(data: Any) -> None:
    model = Spec().build()
    benchmark = Answers(data=data)
    sample = benchmark.samples(benchmark.read(), model).kept[0]
    prompt = PROMPT.format(context=CONTEXT, question="Where are the keys?")
    ids = model.tokenizer(prompt)["input_ids"]
    assert list(sample.row.segments[0].tokens.ids) == ids
    assert sample.position == len(ids) - 1
    with_answers = [model.tokenizer(f"{prompt} {answer}")["input_ids"] for answer in ("the table", "on the table")]
    assert sample.target == Logit(with_answers[0][len(ids)])
    assert sample.accepted == {each[len(ids)] for each in with_answers}


def test_an_extractive_model_is_asked_for_the_span(data: Any, piece_tokenizer: Any) -> None:
    model = extractive(piece_tokenizer)
    benchmark = Answers(data=data)
    sample = benchmark.samples(benchmark.read(), model).kept[1]
    assert sample.target == Span(sample.truth[0], sample.truth[-1])
    run = Run(benchmark, model, ["attnlrp"])
    explained = lrpx.Explainer.of(model)(("Who is small?", CONTEXT), sample.target)
    rows = run.part(0).to_pylist()
    np.testing.assert_allclose(rows[1]["relevance/attnlrp"], explained.relevance.numpy(), atol=1e-9)
    assert rows[1]["explained"] == pytest.approx(explained.explained.value, abs=1e-9)


def test_only_the_context_is_judged(data: Any, piece_tokenizer: Any) -> None:
    model = extractive(piece_tokenizer)
    run = Run(Answers(data=data), model, ["lrp"])
    for row in run.part(0).to_pylist():
        start, end = row["context_start"], row["context_end"]
        relevance, truth = np.array(row["relevance/lrp"])[start:end], np.zeros(end - start, dtype=bool)
        truth[np.array(row["ground_truth"]) - start] = True
        positive = relevance > 0
        assert row["IoU/lrp"] == pytest.approx((positive & truth).sum() / (positive | truth).sum())
        assert row["top-1/lrp"] == float(truth[relevance.argmax()])
        assert row["IoU/lrp"] == ANSWERS["IoU"](relevance, truth)


def test_a_model_that_always_points_at_the_answer_is_right(data: Any, piece_tokenizer: Any) -> None:
    model = extractive(piece_tokenizer)
    benchmark = Answers(data=data)
    found = benchmark.samples(benchmark.read(), model).kept
    sample = found[1]
    length = sum(sample.row.lengths)
    run = Run(benchmark, model, ["lrp"])
    logits = torch.zeros(2 * length, dtype=torch.float64)
    assert isinstance(sample.target, Span)
    logits[0] = logits[length] = 9.0  # of [CLS], which is no answer
    logits[sample.target.token] = logits[length + sample.target.end] = 5.0  # type: ignore[index,operator]
    case = run._explained([sample], [benchmark.ask(sample, model)])[0]
    object.__setattr__(case.answers, "logits", logits[None])
    assert benchmark.predicted(case)["correct"] is True
    logits[sample.target.token] = -5.0  # type: ignore[index]
    assert benchmark.predicted(case)["correct"] is False


def test_a_run_writes_its_reports(data: Any, piece_tokenizer: Any, tmp_path: Any) -> None:
    model = extractive(piece_tokenizer)
    benchmark = Answers(data=data, limit=2)
    run = Run(benchmark, model, ["attnlrp", "lrp"])
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        right = any(row["correct"] for row in run.part(0).to_pylist())
        if right:
            benchmark.report(kept.store)
            assert "IoU" in (tmp_path / "out/table.md").read_text()
        else:
            with pytest.raises(lrpx.errors.LRPxError, match="predicts none"):
                benchmark.report(kept.store)
    again = Run.from_spec(json.loads(json.dumps(run.spec)), model=model)
    assert again.part(0).equals(run.part(0))


def test_a_negative_logit_is_shown_as_one(
    data: Any, piece_tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a GPT-2 are, all of them; and the largest is the nearest to zero."""
    model = extractive(piece_tokenizer)
    model.module.qa_outputs.bias.data -= 30  # type: ignore[operator]
    monkeypatch.setattr("lrpx.benchmarks._qa._is_right", lambda case: True)
    benchmark = Answers(data=data)
    run = Run(benchmark, model, ["lrp"])
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
    rows = sorted(run.part(0).to_pylist(), key=lambda row: -row["explained"])
    assert len(rows) > 1
    largest, _ = choose(benchmark, kept.store, ["lrp"], ANSWERS["IoU"])
    assert [heatmap.value for heatmap in largest.heatmaps] == [row["explained"] for row in rows[:5]]
    told = f"{rows[0]['explained']:.2f}"
    assert told.startswith("-")
    assert f"= {told.replace('-', '−')}<" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    said = rf"\ensuremath{{=}} {told.replace('-', chr(92) + 'ensuremath{-}')};"
    assert said in (tmp_path / "out/heatmaps.tex").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "a curve of 0 steps"),
        ({"perturbation": "burn"}, "no perturbation 'burn'"),
        ({"read_out": "squared-error"}, "nothing is called 'squared-error'"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_bad_options_of_the_perturbed_are_refused_before_a_model_is_loaded(options: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        AnswersPerturbed(data=Path("squad.json"), **options).check()


def test_bad_options_and_models_are_refused_by_name(data: Any, piece_tokenizer: Any) -> None:
    with pytest.raises(InputError, match="limit is 0"):
        Run(Answers(data=data, limit=0), Spec().build())
    with pytest.raises(InputError, match=r"no question of squad\.json.*more than 5 tokens"):
        Run(Answers(data=data, context=5), Spec().build()).part(0)
    model = extractive(piece_tokenizer)

    class Slow:
        """A tokenizer that tells no offsets."""

        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(piece_tokenizer, name)

        def __call__(self, *given: Any, **how: Any) -> Any:
            return piece_tokenizer(*given, **how)

    slow = BoundModel(model.module, Slow())
    with pytest.raises(ModelError, match="fast"):
        Run(Answers(data=data), slow, ["lrp"]).part(0)


CHAT = "{% for m in messages %}<|endoftext|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:\n"


def test_a_chat_asks_in_the_template(data: Any) -> None:
    model = Spec().build()
    model.tokenizer.chat_template = CHAT
    benchmark = Answers(data=data, chat=True)
    benchmark.check_model(model)
    sample = benchmark.samples(benchmark.read(), model).kept[0]
    ids = sample.row.segments[0].tokens.ids
    text = model.tokenizer.decode(ids)
    assert text.endswith("Answer:\nassistant:")
    assert model.tokenizer.decode([ids[at] for at in sample.truth]).strip() == "on the table"
    written, before = (model.tokenizer(f"assistant:{text}")["input_ids"] for text in (" the table", ""))
    assert sample.target == Logit(written[len(before)])


def test_what_the_model_writes_is_explained_where_it_writes_the_answer(tmp_path: Any) -> None:
    """The answer is made to be what the model does write."""
    model = Spec().build()
    question = "Where are the keys?"
    prompt = PROMPT.format(context=CONTEXT, question=question)
    ids = model.tokenizer(prompt)["input_ids"]
    greedy = list(ids)
    for _ in range(8):
        greedy.append(int(model.module(torch.tensor([greedy])).logits[0, -1].argmax()))
    penalties = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": greedy[len(ids) :]}
    model.module.generation_config.update(**penalties)  # which a largest logit knows nothing of
    words = [model.tokenizer.decode([each]).strip() for each in greedy[len(ids) + 1 :]]
    word = next(each for each in words if len(each) > 1 and each in CONTEXT)
    content = squad((question, [(word, CONTEXT.index(word))], False))
    (tmp_path / "a.json").write_text(json.dumps(content))
    benchmark = Answers(data=tmp_path / "a.json", write=8)
    found = benchmark.samples(benchmark.read(), model).kept
    (sample,) = found
    told = list(sample.row.segments[0].tokens.ids)
    assert told == greedy[: len(told)]
    assert sample.target == Logit(greedy[len(told)])
    assert word.startswith(model.tokenizer.decode([greedy[len(told)]]).strip())
    row = Run(benchmark, model, ["lrp"]).part(0).to_pylist()[0]
    assert row["correct"] is True
    with pytest.raises(InputError, match="does not write in 1 tokens"):
        Answers(data=tmp_path / "a.json", write=1).samples(benchmark.read(), model)


@pytest.mark.parametrize(("question", "kept"), [("When did the 1973 oil crisis begin?", 1), ("October 1973?", 0)])
def test_what_repeats_the_question_is_no_answer(question: str, kept: int, tmp_path: Any, monkeypatch: Any) -> None:
    """As in the first question of SQuAD's development set, which "1973" answers, too."""
    context = "The 1973 oil crisis began in October 1973, when oil was dear."
    answers = [(text, context.index(text)) for text in ("October 1973", "October", "1973")]
    content = squad((question, answers, False))
    content["data"][0]["paragraphs"][0]["context"] = context
    (tmp_path / "a.json").write_text(json.dumps(content))
    model = Spec().build()
    writes = model.tokenizer(" The 1973 oil crisis began in October 1973", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(model.module, "generate", lambda ids, **_: torch.cat([ids, torch.tensor([writes])], 1))
    benchmark = Answers(data=tmp_path / "a.json", write=40)
    if not kept:
        with pytest.raises(InputError, match="that the question says, too"):
            benchmark.samples(benchmark.read(), model)
        return
    (sample,) = benchmark.samples(benchmark.read(), model).kept
    read = model.tokenizer.decode(sample.row.segments[0].tokens.ids)
    assert read.endswith("The 1973 oil crisis began in")


def test_a_model_writes_no_further_than_its_context(tmp_path: Any) -> None:
    """Learned positions end there, and with them the whole run would."""
    tokenizer = Spec().build().tokenizer
    content = squad(("Where?", [("The girl", CONTEXT.index("The girl"))], False))
    (tmp_path / "a.json").write_text(json.dumps(content))
    length = len(tokenizer(PROMPT.format(context=CONTEXT, question="Where?"))["input_ids"])
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=length + 2, n_embd=8, n_layer=1, n_head=1)
    model = BoundModel(GPT2LMHeadModel(config).eval(), tokenizer)
    benchmark = Answers(data=tmp_path / "a.json", write=8)
    with pytest.raises(InputError, match="does not write in 3 tokens"):
        benchmark.samples(benchmark.read(), model)


@pytest.mark.parametrize("answer", ["he", "in"])
def test_an_answer_inside_other_words_is_not_written(answer: str, tmp_path: Any) -> None:
    """The model writes " I am not going to be a man of the kind"."""
    context = "Yesterday he sold the old house in 1994 for 19 coins."
    content = squad(("Who sold it?", [(answer, context.index(answer))], False))
    content["data"][0]["paragraphs"][0]["context"] = context
    (tmp_path / "a.json").write_text(json.dumps(content))
    benchmark = Answers(data=tmp_path / "a.json", write=12)
    with pytest.raises(InputError, match="does not write in 12 tokens"):
        benchmark.samples(benchmark.read(), Spec().build())


@pytest.mark.parametrize(
    ("answer", "text", "places"),
    [
        ("he", "the man said he, and she", [13]),
        ("19", "in 1994, 1.19, 1,190 and 19.5: 19. 19, 19", [31, 35, 39]),
        ("$5", "US$5 or $5.5 or $5", [2, 16]),
        ("東京", "首都は東京です", [3]),
        ("cafe", "cafe\u0301 or cafe", [9]),
        ("an an", "an an an", [0, 3]),
        ("\u092e\u0928", "\u092e\u0928\u0941 \u0914\u0930 \u092e\u0928", [7]),  # a vowel's sign goes on with the word
        ("กรุงเทพ", "คำตอบคือกรุงเทพครับ", [8]),
        ("서울", "서울에서", [0]),
    ],
)
def test_answers_are_found_in_whole_words(answer: str, text: str, places: list[int]) -> None:
    assert _places(answer, text) == places


def test_chat_and_writing_are_for_models_that_write(data: Any, piece_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="leave --chat and --write out"):
        Answers(data=data, write=3).check_model(extractive(piece_tokenizer))
    with pytest.raises(ModelError, match="no chat template"):
        Answers(data=data, chat=True).check_model(Spec().build())
    with pytest.raises(InputError, match="write is -1"):
        Answers(data=data, write=-1).check()


def test_only_the_context_is_perturbed(data: Any, piece_tokenizer: Any, tmp_path: Any) -> None:
    """The correlation with leave-one-out is that over the context's tokens, by hand."""
    model = extractive(piece_tokenizer)
    benchmark = AnswersPerturbed(data=data)
    run = Run(benchmark, model, ["attnlrp", "lrp"], ["LOO Pearson", "AOPC Δ"])
    explainer = lrpx.Explainer.of(model)
    asked = benchmark.samples(benchmark.read(), model).kept
    for sample, row in zip(asked, run.part(0).to_pylist(), strict=True):
        start, end = sample.context
        assert row["hideable"] == list(range(start, end))
        given = (sample.asked.question, CONTEXT)
        loo = explainer(given, sample.target, method="leave-one-out").relevance.numpy()[start:end]
        for method in ("attnlrp", "lrp"):
            relevance = np.array(row[f"relevance/{method}"])[start:end]
            wanted = np.corrcoef(relevance, loo)[0, 1]
            assert row[f"LOO Pearson/{method}"] == pytest.approx(wanted, abs=1e-9)
    with keep(run, tmp_path / "out") as kept:
        kept.explain()
        benchmark.report(kept.store)
    assert "LOO Pearson" in (tmp_path / "out/table.md").read_text()
    again = Run.from_spec(json.loads(json.dumps(run.spec)), model=model)
    assert again.part(0).equals(run.part(0))


def test_an_encoder_and_decoder_is_asked_in_its_encoder(data: Any, piece_tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(piece_tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        decoder_start_token_id=piece_tokenizer.pad_token_id, pad_token_id=piece_tokenizer.pad_token_id,
    )  # fmt: skip
    model = BoundModel(T5ForConditionalGeneration(config).eval().double(), piece_tokenizer)
    for kind in (Answers, AnswersPerturbed):
        rows = Run(kind(data=data), model, ["lrp"]).part(0).to_pylist()
        for row, said in zip(rows, ("the table", "The girl"), strict=True):
            assert row["answer"] == said
            ids = piece_tokenizer(PROMPT.format(context=CONTEXT, question=row["question"]))["input_ids"]
            assert len(row["tokens"]) == len(ids) + 1  # and the decoder's start
            assert len(row["relevance/lrp"]) == len(ids) + 1
    sample = Answers(data=data).samples(Answers(data=data).read(), model).kept[1]
    first = piece_tokenizer("The girl", add_special_tokens=False)["input_ids"][0]
    assert sample.target == Logit(first)


def test_a_context_with_too_few_tokens_to_hide_is_dropped_by_name(data: Any, piece_tokenizer: Any) -> None:
    """Of no tokens and of one: a context of special tokens, and of a word; each by its number in the file."""
    content = json.loads(data.read_text())
    for i, context in enumerate(("[MASK]", "", "girl")):
        answers = [{"text": context, "answer_start": 0}] * bool(context)
        qas = [{"id": f"short{i}", "question": "Who?", "answers": answers, "is_impossible": False}]
        content["data"][0]["paragraphs"].insert(i, {"context": context, "qas": qas})
    data.write_text(json.dumps(content))
    benchmark = AnswersPerturbed(data=data)
    found = benchmark.samples(benchmark.read(), extractive(piece_tokenizer))
    assert [each.asked.id for each in found.kept] == ["q0", "q1"]
    assert [(each.id, each.line, each.reason) for each in found.dropped] == [
        ("short0", 1, "has 0 tokens that may be hidden, and an order needs 2"),
        ("short2", 3, "has 1 token that may be hidden, and an order needs 2"),
    ]
    model = extractive(piece_tokenizer)
    assert len(Run(benchmark, model, ["lrp"], ["LOO Pearson"]).part(0)) == 2
    assert len(Run(Answers(data=data), model, ["lrp"]).part(0)) == 4  # where nothing is hidden
