"""Multiple-choice questions out of SQuAD, for ``lrpx benchmark positions --choices A,B,C,D``.

    python bench/choices.py --squad dev-v2.0.json --count 200 --out choices.jsonl

Each line has ``text`` (the sentence that holds the answer, and the question), ``A`` to ``D`` (the answer, and three
answers of much its length to other questions about the same article, in an order that is drawn), and ``label``, the
letter of the answer. Which questions are taken is drawn too, always the same.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

LETTERS = "ABCD"


def questions(squad: dict[str, Any], count: int, seed: int = 0) -> list[dict[str, str]]:
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
            text = f"{sentence}\n{question.strip()}"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    made = questions(json.loads(options.squad.read_text(encoding="utf-8")), options.count)
    options.out.write_text("".join(json.dumps(each) + "\n" for each in made), encoding="utf-8")
    shares = {letter: sum(each["label"] == letter for each in made) for letter in LETTERS}
    print(f"{len(made)} questions, right answers {shares}")


if __name__ == "__main__":
    main()
