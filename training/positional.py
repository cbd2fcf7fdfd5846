"""Train a small classifier whose answer hangs on positions alone.

    python training/positional.py --out runs/positional
    python training/positional.py --evaluate runs/positional

A text is a few random letters, and its class is whether there are more than twelve of them. Which letters they are says
nothing, so the ground truth of an explanation of "long" is the letters from the thirteenth on, for where they stand.
``rows.txt`` in the folder has 200 texts that were not trained on. ``--evaluate`` prints for each method, over the long
ones that the model knows, how often the most relevant token is one of these, and which share of the positive relevance
these have; and the mean ledger. The model is of BERT's architecture, with learned positions, and takes a quarter of a
minute.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import lrpx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEED, STEPS, BATCH, RATE, DECAY = 1, 300, 64, 2e-3, 0.1
LENGTHS, LONG = range(4, 25), 12
HELD_OUT = 200
LETTERS = string.ascii_lowercase
METHODS = ("attnlrp", "lrp", "gradient-x-input", "pa-lrp", "pa-lrp-positions", "pa-lrp-tokens")


def draw_text(draw: np.random.Generator) -> str:
    """Some letters with spaces between them."""
    return " ".join(draw.choice(list(LETTERS), int(draw.choice(LENGTHS))).tolist())


def label(text: str) -> int:
    """1 of a long text."""
    return int(len(text.split()) > LONG)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter, behind one that the class is read at."""
    words = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[UNK]", *LETTERS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **names)


def small_bert(words: int) -> BertForSequenceClassification:
    """Two layers."""
    config = BertConfig(
        vocab_size=words, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, type_vocab_size=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=0, id2label={0: "short", 1: "long"},
    )  # fmt: skip
    return BertForSequenceClassification(config)


def train(model: Any, words: Any, steps: int, held: Sequence[str], say: Callable[..., None]) -> None:
    """Train on texts drawn as it goes, none of which is held out."""
    draw, secret = np.random.default_rng(SEED), set(held)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    for step in range(1, steps + 1):
        texts = [text for text in (draw_text(draw) for _ in range(BATCH)) if text not in secret]
        given = words(texts, padding=True, return_tensors="pt")
        loss = torch.nn.functional.cross_entropy(model(**given).logits, torch.tensor(list(map(label, texts))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps:
            right = accuracy(model, words, held)
            say(
                step=step,
                cpu_seconds=round(time.process_time(), 1),
                loss=round(float(loss.detach()), 4),
                accuracy=right,
            )


@torch.no_grad()
def accuracy(model: Any, words: Any, texts: Sequence[str]) -> float:
    """Share of texts whose class has the larger logit."""
    found = model(**words(list(texts), padding=True, return_tensors="pt")).logits.argmax(-1)
    return round(float((found == torch.tensor(list(map(label, texts)))).float().mean()), 4)


def found(explainer: lrpx.Explainer, texts: Sequence[str], methods: Sequence[str]) -> dict[str, tuple[float, float]]:
    """For each method how often the most relevant token is one behind the twelfth letter, and which share of the
    positive relevance these have, over the long texts that the model knows; and what chance earns."""
    long = [text for text in texts if label(text)]
    known = explainer(long, target="long", contrast="short", method="gradient-x-input", progress=False)
    long = [text for text, each in zip(long, known, strict=True) if each.explained.value > 0]
    chance = float(np.mean([1 - (LONG + 1) / (len(text.split()) + 1) for text in long]))
    told = {"chance": (chance, chance)}
    for method in methods:
        every = explainer(long, target="long", contrast="short", method=method, progress=False)
        first = LONG + 1  # [CLS] is before them
        top = [int(a.relevance.argmax()) >= first for a in every]
        positive = [a.relevance.clamp(min=0) for a in every]
        told[method] = (
            float(np.mean(top)),
            float(np.mean([float(r[first:].sum() / r.sum()) if r.any() else 0.0 for r in positive])),
        )
    return told


def shares(explainer: lrpx.Explainer, texts: Sequence[str]) -> dict[str, float]:
    """The mean ledger of the long texts, as shares of "long" less "short"."""
    total: dict[str, float] = {}
    long = [text for text in texts if label(text)][:50]
    for text in long:
        ledger = explainer(text, "long", "short", method="pa-lrp-single-sink", ledger=True).ledger
        for kind, value in ledger.by_kind().items():
            total[kind] = total.get(kind, 0.0) + value / ledger.explained / len(long)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the model, its log and its texts into this folder")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="explain the texts of this folder's model")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    if options.evaluate:
        explainer = lrpx.Explainer.from_pretrained(options.evaluate)
        texts = (options.evaluate / "rows.txt").read_text(encoding="utf-8").splitlines()
        print("| method | most relevant token is behind the twelfth letter | share of the positive relevance |")
        print("|---|---|---|")
        for name, (top, share) in found(explainer, texts, METHODS).items():
            print(f"| {name} | {top:.3f} | {share:.3f} |")
        print("ledger:", ", ".join(f"{kind} {share:+.3f}" for kind, share in shares(explainer, texts).items()))
    if not options.out:
        return
    torch.manual_seed(SEED)
    words = tokenizer()
    model = small_bert(len(words))
    held = [draw_text(np.random.default_rng([SEED, i])) for i in range(HELD_OUT)]
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "log.jsonl", "w", encoding="utf-8") as log:

        def say(**entry: object) -> None:
            for file in (log, None):
                print(json.dumps(entry), file=file, flush=True)

        train(model.train(), words, options.steps, held, say)
    model.eval().save_pretrained(options.out)
    words.save_pretrained(options.out)
    (options.out / "rows.txt").write_text("\n".join(held) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
