"""Measure the bundled model on what it was never trained on.

    python training/evaluate.py --data ../shared/data --model src/lrpx/bundled --text runs/bundled/held_out_text.json

Agreement is read as the sign of a difference of two logits after the same words, right above wrong, where both verb
forms are one token (or differ in the first only, as ``hasn|'t`` and ``haven|'t``). Other forms are in pieces that
do not compare (``scan`` and ``sc|ans``), and the log-probabilities of the two whole sentences are compared.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from agreement_data import split_rows
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCH = 64


class Judge:
    """The model's preference between two ways to go on."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def prefers(self, pairs: Sequence[tuple[str, str, str, str]]) -> list[bool]:
        """For each ``(prefix, right, wrong, rest)``: whether the right word is preferred after the prefix."""
        start = [self.tokenizer.bos_token_id]
        after: list[tuple[list[int], int, int] | None] = []
        whole: dict[int, tuple[list[int], list[int]]] = {}
        for i, (prefix, right, wrong, rest) in enumerate(pairs):
            before, a, b = self._ids(prefix), self._ids(f" {right}"), self._ids(f" {wrong}")
            if a[1:] == b[1:] and a[0] != b[0]:
                after.append((start + before, a[0], b[0]))
            else:
                whole[i] = (start + self._ids(f"{prefix} {right}{rest}"), start + self._ids(f"{prefix} {wrong}{rest}"))
                after.append(None)
        verdicts = [False] * len(pairs)
        order = sorted((i for i, row in enumerate(after) if row), key=lambda i: len(after[i][0]))
        for at in range(0, len(order), BATCH):
            group = order[at : at + BATCH]
            rows = [row for i in group if (row := after[i])]
            for i, row, scores in zip(group, rows, self._last_logits([row[0] for row in rows]), strict=True):
                verdicts[i] = bool(scores[row[1]] > scores[row[2]])
        for i, (right_ids, wrong_ids) in whole.items():
            verdicts[i] = self._log_probability(right_ids) > self._log_probability(wrong_ids)
        return verdicts

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def _last_logits(self, rows: list[list[int]]) -> torch.Tensor:
        width = max(map(len, rows))
        ids = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        hidden = self.model.model(ids).last_hidden_state
        last = hidden[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
        return self.model.lm_head(last)

    @torch.no_grad()
    def _log_probability(self, ids: list[int]) -> float:
        logits = self.model(torch.tensor([ids[:-1]])).logits[0]
        return -float(cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, float]:
    """Perplexity per token, and bits per byte, each text on its own."""
    loss, count, size = 0.0, 0, 0
    for text in texts:
        ids = tokenizer(text)["input_ids"][:256]
        if len(ids) < 2:
            continue
        logits = model(torch.tensor([ids])).logits[0, :-1]
        loss += float(cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
        size += len(tokenizer.decode(ids[1:]).encode())
    return {"per_token": round(math.exp(loss / count), 2), "bits_per_byte": round(loss / size / math.log(2), 3)}


def blimp(judge: Judge, path: Path) -> dict[str, float]:
    """Accuracy on a BLiMP paradigm whose pairs share the words before the verb."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["one_prefix_method"]]

    def rest(row: dict[str, Any]) -> str:
        return row["sentence_good"].removeprefix(f"{row['one_prefix_prefix']} {row['one_prefix_word_good']}")

    prefers = judge.prefers(
        [(r["one_prefix_prefix"], r["one_prefix_word_good"], r["one_prefix_word_bad"], rest(r)) for r in rows]
    )
    return {"rows": len(rows), "accuracy": share(prefers)}


def share(verdicts: Sequence[bool]) -> float:
    return round(sum(verdicts) / len(verdicts), 4)


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="held_out_text.json of the training run, for perplexity")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    judge = Judge(model, tokenizer)
    _, held_out = split_rows(options.data / "agreement")
    prefers = judge.prefers([(row.prefix, row.right, row.wrong, row.masked.split("***mask***")[1]) for row in held_out])
    plural = share([not row.right.endswith("s") for row in held_out])
    report: dict[str, Any] = {
        "held_out_agreement": {
            "rows": len(held_out),
            "accuracy": share(prefers),
            "always_plural": plural,
            "by_attractors": {
                n: [share([ok for ok, row in zip(prefers, held_out, strict=True) if row.attractors == n]),
                    sum(row.attractors == n for row in held_out)]
                for n in sorted({row.attractors for row in held_out})
            },
        },
    }  # fmt: skip
    for name in ("regular_plural_subject_verb_agreement_1", "irregular_plural_subject_verb_agreement_1",
                 "distractor_agreement_relational_noun", "distractor_agreement_relative_clause"):  # fmt: skip
        report[f"blimp_{name}"] = blimp(judge, options.data / f"agreement/blimp_{name}.jsonl")
    if options.text:
        texts = json.loads(options.text.read_text())
        report["perplexity"] = {
            "novels": perplexity(model, tokenizer, texts["novels"][:1000]),
            "wiki": perplexity(model, tokenizer, texts["wiki"]),
        }
    say(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
