"""``lrpx benchmark positions`` of multiple-choice questions: the prompt, the letters, and rows against a loop."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from lrpx import Task
from lrpx.benchmarks import Run, find
from lrpx.benchmarks._position_tests import PositionTests, asked
from lrpx.errors import DataError, InputError
from lrpx.model import BoundModel, Spec
from tests import tiny
from tests.reference import perturbation as twins

QUESTIONS = [
    {"text": "Which is a bird?", "A": "a wren", "B": "a trout", "C": "an ant", "D": "an oak", "label": "A"},
    {"text": "Which swims?", "A": "an oak", "B": "a wren", "C": "a trout", "D": "a key", "label": "C"},
]
METHODS = ["attnlrp", "pa-lrp"]


@pytest.fixture(scope="module")
def bundled():
    return Spec().build()


def data(folder, rows=QUESTIONS):
    path = folder / "choices.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(run):
    return pl.concat([pl.from_arrow(run.part(i)) for i in range(run.parts)]).to_dicts()


@pytest.mark.parametrize("target", ["label", "predicted"])
def test_rows_are_those_of_a_loop(bundled, tmp_path, target):
    benchmark = PositionTests(data(tmp_path), choices="A, B,C,D", target=target)
    assert find("positions") is PositionTests
    letters = [bundled.tokenizer(f" {letter}", add_special_tokens=False)["input_ids"][0] for letter in "ABCD"]
    for row, question in zip(rows_of(Run(benchmark, bundled, METHODS)), QUESTIONS, strict=True):
        prompt = f"{question['text']}\nA. {question['A']}\nB. {question['B']}\nC. {question['C']}\nD. {question['D']}"
        ids = bundled.tokenizer(f"{prompt}\nAnswer:")["input_ids"]
        with torch.no_grad():
            whole = bundled.module(input_ids=torch.tensor([ids])).logits[0, -1]
        said = max(range(4), key=lambda i: float(whole[letters[i]]))
        right = "ABCD".index(question["label"])
        explained = letters[right if target == "label" else said]
        assert row["correct"] == (said == right)
        assert row["value"] == pytest.approx(float(whole[explained]), abs=1e-4)
        assert len(row["tokens"]) == len(ids)
        (unknown,) = bundled.tokenizer("#", add_special_tokens=False)["input_ids"]  # it has no unknown token

        def value(hidden, ids=ids, at=row["hideable"], explained=explained, unknown=unknown):
            changed = list(ids)
            for i in hidden:
                changed[at[i]] = unknown
            with torch.no_grad():
                logits = bundled.module(input_ids=torch.tensor([changed])).logits[0, -1]
            return float(logits.softmax(-1)[explained])

        for method in METHODS:
            relevance = [row[f"relevance/{method}"][i] for i in row["hideable"]]
            wanted = twins.METRICS["AUAC generation"](relevance, value, 100)
            assert row[f"AUAC generation/{method}"] == pytest.approx(wanted, abs=1e-5)


def test_a_run_says_what_the_columns_are(bundled, tmp_path):
    spaced, plain = (PositionTests(data(tmp_path), choices=names).settings() for names in ("A , B", "A,B"))
    assert spaced == plain
    assert spaced["choices"] == "A,B"
    found = Run(PositionTests(data(tmp_path), choices="B,A"), bundled, ["random"])  # of another order
    with pytest.raises(DataError, match="has the label 'C'; give one of the letters A, B"):
        rows_of(found)


@pytest.mark.parametrize(
    ("settings", "row", "error", "told"),
    [
        ({"choices": "A"}, {}, InputError, "name 2 to 10"),
        ({"choices": "A,A"}, {}, InputError, "each once"),
        ({"choices": "A,B", "target": " is"}, {}, InputError, "the target is predicted"),
        ({"choices": "A,B", "context": 4}, {}, InputError, "leave --context out"),
        ({"choices": "A,E"}, {}, DataError, "the column 'E' is missing"),
        ({"choices": "A,B,C,D"}, {"label": "a trout"}, DataError, "has the label 'a trout'"),
        ({"choices": "A,B,C,D"}, {"label": ""}, DataError, "has the label ''"),
    ],
)
def test_bad_input_is_refused_by_name(bundled, tmp_path, settings, row, error, told):
    with pytest.raises(error, match=told):
        rows_of(Run(PositionTests(data(tmp_path, [QUESTIONS[0] | row]), **settings), bundled, ["random"]))


def test_a_classifier_names_no_option(piece_tokenizer, tmp_path):
    model = BoundModel(tiny.bert_classifier(vocab_size=len(piece_tokenizer)), piece_tokenizer)
    assert model.task is Task.CLASSIFICATION
    with pytest.raises(InputError, match="names no option; leave --choices out"):
        Run(PositionTests(data(tmp_path), choices="A,B"), model, ["random"])


def test_without_options_it_is_what_it_was(bundled, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("The keys to the cabinet are\nThe old man\n", encoding="utf-8")
    found = rows_of(Run(PositionTests(path), bundled, ["random"]))
    again = rows_of(Run(replace(PositionTests(path), choices=None), bundled, ["random"]))
    assert found == again
    assert [row["label"] for row in found] == [" are", " man"]


def test_what_is_asked():
    assert asked(" Which? ", ["one", " two"]) == "Which?\nA. one\nB. two\nAnswer:"


def test_questions_out_of_squad():
    path = Path(__file__).parents[2] / "bench" / "choices.py"
    spec = importlib.util.spec_from_file_location("choices", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    names = ["Ada", "Bo", "Cy", "Dee", "Eli"]
    context = " ".join(f"In year {i} it was {name}." for i, name in enumerate(names))
    asked_of = [
        {"question": f"Who in {i}?", "answers": [{"text": name, "answer_start": context.index(name)}]}
        for i, name in enumerate(names)
    ]
    squad = {"data": [{"paragraphs": [{"context": context, "qas": asked_of}]}]}
    found = made.questions(squad, 3)
    assert found == made.questions(squad, 3)
    assert len(found) == 3
    for each in found:
        right = each[each["label"]]
        assert each["text"].startswith("In year ")
        assert f"it was {right}." in each["text"]
        assert len({each[letter] for letter in "ABCD"}) == 4
    for plain, stated in zip(found, made.questions(squad, 3, stated=True), strict=True):
        said = f". (The answer is {plain['label']}, {plain[plain['label']]}.)\n"
        assert stated == plain | {"text": plain["text"].replace(".\n", said)}
