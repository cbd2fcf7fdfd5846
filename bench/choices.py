"""Multiple-choice questions out of SQuAD, for ``lrpx benchmark positions --choices A,B,C,D``.

    python bench/choices.py --squad dev-v2.0.json --count 200 --out choices.jsonl

Each line has ``text`` (the sentence that holds the answer, and the question), ``A`` to ``D`` (the answer, and three
answers of much its length to other questions about the same article, in an order that is drawn), and ``label``, the
letter of the answer. Which questions are taken is drawn too, always the same. With ``--stated`` the sentence is
followed by ``(The answer is B, a wren.)``, so that no more is asked than to find a letter again.

    python bench/choices.py --questions choices.jsonl --model smollm2 --shots 0 4

prints how many of the first 100 a language model answers right, among the four letters, in the words of the benchmark;
behind so many others that are answered, the shortest of the last 50 with the letters B, D, A, C in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

LETTERS = "ABCD"
ASKED = 100
SHOWN = 50


def questions(squad: dict[str, Any], count: int, seed: int = 0, stated: bool = False) -> list[dict[str, str]]:
    """At most ``count`` questions, one an article until all have given one, and so on."""
    draw = np.random.default_rng(seed)
    by_article = []
    for article in squad["data"]:
        found = [
            (paragraph["context"], each["question"], each["answers"][0])
            for paragraph in article["paragraphs"]
            for each in paragraph["qas"]
            if each["answers"]
        ]
        by_article.append([found[i] for i in draw.permutation(len(found))])
    made: list[dict[str, str]] = []
    for depth in range(max(map(len, by_article), default=0)):
        for found in by_article:
            if depth >= len(found) or len(made) == count:
                continue
            context, question, answer = found[depth]
            right, sentence = answer["text"].strip(), sentence_of(context, answer["answer_start"])
            answers = {found[i][2]["text"].strip() for i in range(len(found))}
            others = sorted(each for each in answers if each.lower() not in sentence.lower())
            others = [others[i] for i in draw.permutation(len(others))]
            others = sorted(others, key=lambda other: abs(len(other) - len(right)))[:3]
            if len(others) < 3:
                continue
            at = int(draw.integers(4))
            options = [*others[:at], right, *others[at:]]
            told = f" (The answer is {LETTERS[at]}, {right}.)" if stated else ""
            text = f"{sentence}{told}\n{question.strip()}"
            made.append({"text": text, **dict(zip(LETTERS, options, strict=True)), "label": LETTERS[at]})
    return made


def sentence_of(context: str, start: int) -> str:
    """The sentence around a place of a paragraph.

    >>> sentence_of("It rained. The wren sang. It was May.", 15)
    'The wren sang.'
    """
    begins = [0, *(found.end() for found in re.finditer(r"[.!?]\s+(?=[A-Z\"'(])", context))]
    begin = max(at for at in begins if at <= start)
    end = min((at for at in begins if at > start), default=len(context))
    return " ".join(context[begin:end].split())


def prompt(row: dict[str, str]) -> str:
    """What the benchmark asks."""
    from lrpx.benchmarks._position_tests import asked

    return asked(row["text"], [row[letter] for letter in LETTERS])


def shown(rows: list[dict[str, str]], shots: int) -> str:
    """So many answered questions, the shortest of each letter."""
    found: list[dict[str, str]] = []
    for letter in ("BDAC" * shots)[:shots]:
        left = [row for row in rows if row["label"] == letter and row not in found]
        found.append(min(left, key=lambda row: len(prompt(row))))
    return "".join(f"{prompt(row)} {row['label']}\n\n" for row in found)


def answered(rows: list[dict[str, str]], name: str, shots: int) -> str:
    """How many of the first questions a model answers right, and how often it says each letter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    letters = [tokenizer(f": {letter}", add_special_tokens=False)["input_ids"][-1] for letter in LETTERS]
    said, right = dict.fromkeys(LETTERS, 0), 0
    with torch.no_grad():
        before = tokenizer(shown(rows[-SHOWN:], shots), return_tensors="pt")["input_ids"] if shots else None
        cache = None if before is None else model(before, use_cache=True).past_key_values
        for row in rows[:ASKED]:
            ids = tokenizer(prompt(row), add_special_tokens=not shots, return_tensors="pt")["input_ids"]
            logits = model(ids, past_key_values=copy.deepcopy(cache), use_cache=bool(shots)).logits[0, -1, letters]
            letter = LETTERS[int(logits.argmax())]
            said[letter] += 1
            right += letter == row["label"]
    return f"{name}, {shots} shown: {right} of {len(rows[:ASKED])} right; says {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--squad", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--stated", action="store_true", help="state the answer behind the sentence")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--shots", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    if options.questions and options.model:
        rows = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines()]
        for shots in options.shots:
            print(answered(rows, options.model, shots), flush=True)
        return
    if not options.squad or not options.out:
        parser.error("give --squad and --out, or --questions and --model")
    made = questions(json.loads(options.squad.read_text(encoding="utf-8")), options.count, stated=options.stated)
    options.out.write_text("".join(json.dumps(each) + "\n" for each in made), encoding="utf-8")
    shares = {letter: sum(each["label"] == letter for each in made) for letter in LETTERS}
    print(f"{len(made)} questions, right answers {shares}")


if __name__ == "__main__":
    main()
