"""Train a small T5 whose every answer must be copied from one known place of its source.

    python training/copying.py --out runs/first --steps 6000
    python training/copying.py --start runs/first --out runs/t5-copy --steps 5000
    python training/copying.py --evaluate runs/t5-copy

The source is pairs of a letter and a number, ``q 17 b 4 x 30 …``; the decoder is given a letter, and its next token is
the number beside it. Letters and numbers are drawn anew for each row, no letter twice in one, so nothing but that one
place of the source can tell the number: the exact ground truth of an explanation through cross-attention.
``rows.jsonl`` in the folder has 500 rows that were not trained on: ``source``, ``decoder``, ``answer`` and
``position``, the token of the source. ``--evaluate`` prints for each method how often the most relevant token of the
source is that one, over the rows that the model answers rightly.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

import lrpx
from lrpx.methods import IntegratedGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.methods import Method

SEED = 1
LETTERS, NUMBERS = list(string.ascii_lowercase), [str(n) for n in range(32)]
PAIRS = range(2, 9)
RATE, BATCH, WARM = 2e-3, 128, 100
HELD_OUT = 500
METHODS = (
    "attnlrp", "lrp", "gim", "libragrad", "gradient-x-input", "gradient-l1", "gradient-l2-squared",
    "integrated-gradients", IntegratedGradients("integrated-gradients from padding", baseline="pad"), "occlusion",
    "leave-one-out", "atman", "rollout", "gradient-rollout", "grad-cam", "random",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One question: the number beside the letter ``decoder`` in ``source`` is ``answer``, the token ``position``."""

    source: str
    decoder: str
    answer: str
    position: int


def draw_row(draw: np.random.Generator) -> Row:
    """A row of some pairs, of which one is asked for."""
    count = int(draw.choice(PAIRS))
    letters = draw.choice(LETTERS, count, replace=False).tolist()
    numbers = draw.choice(NUMBERS, count).tolist()
    asked = int(draw.integers(count))
    source = " ".join(word for pair in zip(letters, numbers, strict=True) for word in pair)
    return Row(source, letters[asked], numbers[asked], 2 * asked + 1)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, and T5's end after the source."""
    special = ["<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *LETTERS, *NUMBERS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


def small_t5(words: int) -> T5ForConditionalGeneration:
    """Two layers each way."""
    config = T5Config(
        vocab_size=words, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, relative_attention_num_buckets=16,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def batch(rows: Sequence[Row], words: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the model takes, and the ids of the answers ``[B]``."""
    source = words([row.source for row in rows], padding=True, return_tensors="pt")
    letters, answers = (torch.tensor(words.convert_tokens_to_ids([getattr(row, name) for row in rows]))
                        for name in ("decoder", "answer"))  # fmt: skip
    decoder = torch.stack([torch.zeros_like(letters), letters], 1)
    given = {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "decoder_input_ids": decoder}
    return given, answers


def training_step(model: Any, rows: Sequence[Row], words: Any, optimizer: torch.optim.Optimizer) -> float:
    """One step down the cross-entropy of the answers, which it returns."""
    given, answers = batch(rows, words)
    loss = torch.nn.functional.cross_entropy(model(**given).logits[:, -1], answers)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@torch.no_grad()
def accuracy(model: Any, rows: Sequence[Row], words: Any) -> float:
    """Share of rows whose answer has the largest logit of all words."""
    given, answers = batch(rows, words)
    return float((model(**given).logits[:, -1].argmax(-1) == answers).float().mean())


def train(model: Any, words: Any, steps: int, held: Sequence[Row], say: Callable[..., None], seed: int = SEED) -> None:
    """Train on rows drawn as it goes, none of which is held out."""
    draw, secret = np.random.default_rng(seed), set(held)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM, max(0.02, (steps - step) / steps))
    )
    shown: list[float] = []
    for step in range(1, steps + 1):
        rows = [row for row in (draw_row(draw) for _ in range(BATCH)) if row not in secret]
        shown.append(training_step(model, rows, words, optimizer))
        schedule.step()
        if step % 250 == 0 or step == steps:
            right = round(accuracy(model, held, words), 4)
            say(
                step=step,
                cpu_minutes=round(time.process_time() / 60, 2),
                loss=round(float(np.mean(shown)), 4),
                accuracy=right,
            )
            shown = []


def found(folder: Path, methods: Sequence[str | Method]) -> dict[str, float]:
    """For each method the share of rightly answered rows whose most relevant token of the source is the answer's; the
    number of these rows; and what chance earns."""
    explainer = lrpx.Explainer.from_pretrained(folder)
    words = explainer.tokenizer
    rows = [Row(**json.loads(line)) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    given, answers = batch(rows, words)
    with torch.no_grad():
        right = explainer.model(**given).logits[:, -1].argmax(-1) == answers
    rows = [row for row, is_right in zip(rows, right.tolist(), strict=True) if is_right]
    written = [[0, words.convert_tokens_to_ids(row.decoder)] for row in rows]
    lengths = [len(words(row.source)["input_ids"]) for row in rows]
    told = {"rows": float(len(rows)), "chance": float(np.mean([1 / length for length in lengths]))}
    for method in methods:
        every = explainer([row.source for row in rows], decoder=written, method=method, batch_size=64)
        places = [int(each.relevance[:length].argmax()) for each, length in zip(every, lengths, strict=True)]
        name = method if isinstance(method, str) else method.name
        told[name] = float(np.mean([place == row.position for place, row in zip(places, rows, strict=True)]))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the model, its log and its rows into this folder")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="explain the rows of this folder's model")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="go on from this model, on other rows")
    options = parser.parse_args()
    if options.evaluate:
        for name, value in found(options.evaluate, METHODS).items():
            print(f"{name}: {value:.4g}")
    if not options.out:
        return
    torch.manual_seed(SEED)
    words = tokenizer()
    model = small_t5(len(words)) if options.start is None else T5ForConditionalGeneration.from_pretrained(options.start)
    held = [draw_row(np.random.default_rng([SEED, i])) for i in range(HELD_OUT)]
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "log.jsonl", "w", encoding="utf-8") as log:

        def say(**entry: object) -> None:
            for file in (log, None):
                print(json.dumps(entry), file=file, flush=True)

        train(model.train(), words, options.steps, held, say, seed=SEED + (options.start is not None))
    model.eval().save_pretrained(options.out)
    words.save_pretrained(options.out)
    lines = (json.dumps(asdict(row)) for row in held)
    (options.out / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
