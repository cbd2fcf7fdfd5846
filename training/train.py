"""Train the bundled model: a small Llama that has learned English subject-verb agreement.

    python training/train.py --data ../shared/data --out runs/first --minutes 60
    python training/train.py --data ../shared/data --out runs/last --start runs/first --minutes 25 --rate 5e-4

Text: public-domain novels, Wikipedia sentences, and the training part of the agreement sentences
(``agreement_data.split_rows``). The loss is the usual next-token cross-entropy, plus two terms:

- pair: wherever the next token is one form of a verb whose other form is a token too (includes/include,
  was/were), the logistic loss on the difference of their two logits;
- number: wherever the next token is was, is, has, were or are, and so tells the number of the subject, the
  same loss on random verb pairs in that number. "The keys were" in a novel so teaches that "the keys admire",
  a form the novels hardly have. After "I" the word tells nothing and is left out.

The treebanks and BLiMP are never read here.

The schedule follows the clock, so that a run fits the time it is given; the log records the steps done.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import time
from collections import Counter
from pathlib import Path

import torch
from agreement_data import AgreementRow, normal_form, split_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
END = "<|endoftext|>"
VOCABULARY = 11264
CONTEXT = 512
ROW_TOKENS = 96
BATCH_TOKENS = 6144
PEAK_LEARNING_RATE = 1.5e-3
PAIR_WEIGHT = 1.0
NUMBER_WEIGHT = 0.5
NUMBER_PAIRS = 128
SINGULAR, PLURAL = ("was", "is", "has", "wasn", "isn", "hasn"), ("were", "are", "weren", "aren")
AUXILIARIES = [
    ("is", "are"), ("was", "were"), ("has", "have"), ("does", "do"),
    ("isn", "aren"), ("wasn", "weren"), ("hasn", "haven"), ("doesn", "don"),
]  # fmt: skip


def natural(sentence: str) -> str:
    """A sentence of the agreement set as a person would write it: spaces and the first capital mended."""
    text = re.sub(r" (n't|'s|'re|'ve|'ll|'d|'m)\b", r"\1", sentence)
    text = re.sub(r" ([,.;:!?%)\]])", r"\1", text)
    text = re.sub(r"([(\[$]) ", r"\1", text)
    text = re.sub(r"`` ?| ?''", '"', text)
    return text[:1].upper() + text[1:]


def novel_chunks(path: Path) -> tuple[list[str], list[str]]:
    """``(training, held_out)`` runs of sentences of at most about 400 characters; the last three books
    are held out."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        books = file.read().split(END)

    def chunks(book: str) -> list[str]:
        found = []
        for paragraph in re.split(r"\n\s*\n", book):
            run = ""
            for sentence in re.split(r"(?<=[.!?][\"”’' ])\s*(?=[A-Z\"“‘'])", " ".join(paragraph.split())):
                if run and len(run) + len(sentence) > 400:
                    found.append(run.strip())
                    run = ""
                run += sentence if run.endswith(" ") or not run else " " + sentence
            if len(run) > 40:
                found.append(run.strip())
        return found

    books = [book for book in books if len(book) > 1000]
    return [c for book in books[:-3] for c in chunks(book)], [c for book in books[-3:] for c in chunks(book)]


QUANTIFIERS = ("a lot of", "lots of", "plenty of", "a number of", "a great many")
PLURAL_SUBJECT = re.compile(
    r"\b(?:(?P<quantifier>(?i:many|some|most|all|several|few|those|these|both|two|three|four|five))|[Tt]he(?= [A-Z]))"
    r" (?:[a-z]+ )?[A-Za-z]+s (?:were|are|have|weren't|aren't|haven't)\b[^.!?;]*[.!?;]"
)


SINGULAR_NAME = re.compile(
    r"\b(?!(?:He|She|It|There|Here|This|That|What|Who|Which|How|Why|When|Where|And|But|If|All|None)\b)"
    r"[A-Z][a-z]+ (?:was|is|has|wasn't|isn't|hasn't)\b[^.!?;]*[.!?;]"
)


def subject_sentences(chunks: list[str]) -> list[str]:
    """Sentences of the novels cut to begin with their subject: a family's or people's name (``The Smiths were``), a
    quantifier, which is exchanged for a rarer one (``A lot of people were``), and as many with a single name
    (``Jane was``)."""
    draw = random.Random(SEED)
    found = []
    for match in (match for chunk in chunks for match in PLURAL_SUBJECT.finditer(chunk)):
        text = match.group()
        if quantifier := match.group("quantifier"):
            text = draw.choice(QUANTIFIERS) + text[len(quantifier) :]
        found.append(text[0].upper() + text[1:])
    names = [match.group() for chunk in chunks for match in SINGULAR_NAME.finditer(chunk)]
    return found + draw.sample(names, len(found))


def verb_pairs(rows: list[AgreementRow], words: Counter[str]) -> list[tuple[str, str]]:
    """Third-person singular and plural forms: those of the agreement sentences, and every word of the novels
    that has an ``-ing`` form and an ``-ed`` or ``-s`` form there."""
    pairs = set()
    for row in rows:
        forms = (row.right, row.wrong)
        pairs.add(forms if forms[0].endswith("s") and not forms[1].endswith("s") else forms[::-1])
    for word, count in words.items():
        if count < 40 or len(word) < 3:
            continue
        stem, doubled = word.removesuffix("e"), word + word[-1]
        singular = word[:-1] + "ies" if re.search("[^aeiou]y$", word) else word
        if singular == word:
            singular = word + ("es" if re.search("(s|x|z|ch|sh|o)$", word) else "s")
        past = words[stem + "ed"] + words[doubled + "ed"] + words[word[:-1] + "ied"]
        if words[stem + "ing"] + words[doubled + "ing"] >= 3 and (past >= 3 or words[singular] >= 10):
            pairs.add((singular, word))
    return sorted(pairs - set(AUXILIARIES))


def train_tokenizer(texts: list[str], pairs: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which both forms of (nearly) every verb pair are one token: a verb in pieces
    could not be explained by one logit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    verbs = [f" {singular} {plural}" for singular, plural in pairs]
    tokenizer.train_from_iterator(texts + verbs * 3000, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


class Batches:
    """Rows of about equal length, each beginning with the start token, drawn without end from a mixture."""

    def __init__(self, sources: list[tuple[float, list[list[int]]]], pad: int) -> None:
        self.random = random.Random(SEED)
        self.sources = sources
        self.pad = pad
        self.places = [0] * len(sources)
        self.pool: list[list[int]] = []

    def row(self) -> list[int]:
        which = self.random.choices(range(len(self.sources)), [share for share, _ in self.sources])[0]
        rows = self.sources[which][1]
        if self.places[which] == 0:
            self.random.shuffle(rows)
        row = rows[self.places[which]]
        self.places[which] = (self.places[which] + 1) % len(rows)
        return row

    def next(self) -> torch.Tensor:
        """Token ids ``[B, T]``, T a multiple of 16, B·T about ``BATCH_TOKENS``."""
        if not self.pool:
            rows = sorted((self.row() for _ in range(2048)), key=len)
            while rows:
                width = -(-len(rows[-1]) // 16) * 16
                take = max(1, BATCH_TOKENS // width)
                self.pool.append(rows[-take:])
                del rows[-take:]
            self.random.shuffle(self.pool)
        rows = self.pool.pop()
        width = -(-max(map(len, rows)) // 16) * 16
        return torch.tensor([row + [self.pad] * (width - len(row)) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--start", type=Path, help="go on from the weights and tokenizer of an earlier run")
    parser.add_argument("--rate", type=float, default=PEAK_LEARNING_RATE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = open(options.out / "train.log", "a", encoding="utf-8")  # noqa: SIM115

    def say(**entry: object) -> None:
        print(json.dumps(entry), file=log, flush=True)

    torch.manual_seed(SEED)
    rows, held_out = split_rows(options.data / "agreement")
    barred = {normal_form(row.sentence) for row in held_out}
    wiki = (options.data / "text/wiki_split_sentences.txt").read_text(encoding="utf-8").splitlines()
    wiki = [line for line in wiki if normal_form(line) not in barred]
    wiki, wiki_test = wiki[:-1000], wiki[-1000:]
    novels, novels_test = novel_chunks(options.data / "text/novels.txt.xz")
    say(
        start=str(options.start or ""),
        agreement_rows=len(rows),
        held_out_rows=len(held_out),
        wiki=len(wiki),
        novel_chunks=len(novels),
    )

    words = Counter(re.findall(r"[a-z]+", " ".join(novels).lower()))
    verbs = verb_pairs(rows, words)
    pairs = AUXILIARIES + verbs
    sample = [row.sentence for row in rows] + [natural(row.sentence) for row in rows] + wiki
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(options.start)
        if options.start
        else train_tokenizer(novels[::4] + sample * 4, pairs)
    )
    tokenizer.save_pretrained(options.out)
    vocabulary = tokenizer.get_vocab()
    opposite = torch.full((VOCABULARY,), -1)
    verb_ids = []
    for forms in pairs:
        ids = [vocabulary.get("Ġ" + form) for form in forms]
        if None not in ids:
            opposite[ids[0]], opposite[ids[1]] = ids[1], ids[0]
            if forms not in AUXILIARIES:
                verb_ids.append(ids)
    say(pair_tokens=int((opposite >= 0).sum()), verbs=len(verb_ids))
    verb_forms = torch.tensor(verb_ids)
    # +1 where a word tells that the subject is singular, -1 where plural
    number = torch.zeros(VOCABULARY)
    number[[vocabulary["Ġ" + word] for word in SINGULAR if "Ġ" + word in vocabulary]] = 1
    number[[vocabulary["Ġ" + word] for word in PLURAL if "Ġ" + word in vocabulary]] = -1
    first_person = torch.tensor([vocabulary["I"], vocabulary["ĠI"]])

    encode = tokenizer.backend_tokenizer.encode_batch_fast
    pair_ids = set(torch.nonzero(opposite >= 0).flatten().tolist())

    def encoded(texts: list[str]) -> list[list[int]]:
        return [e.ids[:ROW_TOKENS] + [0] * (len(e.ids) < ROW_TOKENS) for e in encode(texts)]

    random.Random(SEED).shuffle(novels)
    batches = Batches(
        [
            (0.52, [row for row in encoded(novels) if sum(i in pair_ids for i in row) >= 4]),
            (0.09, encoded([row.sentence for row in rows])),
            (0.09, encoded([natural(row.sentence) for row in rows])),
            (0.18, encoded(wiki)),
            (0.12, encoded(subject_sentences(novels))),
        ],
        pad=tokenizer.pad_token_id,
    )
    say(rows=[len(source) for _, source in batches.sources])

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    if options.start:
        model = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    compiled = torch.compile(model.model, dynamic=True)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=options.rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    say(parameters=sum(p.numel() for p in model.parameters()))

    step, tokens, began, shown = 0, 0, time.monotonic(), []
    while (progress := (time.monotonic() - began) / (60 * options.minutes)) < 1:
        rate = options.rate * min(1.0, (step + 1) / 100) * min(1.0, (1.02 - progress) / 0.6)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        ids = batches.next()
        # the start token is also the end token and the padding: a row ends at its first end token
        ends = (ids[:, 1:] == tokenizer.pad_token_id).cumsum(1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = compiled(ids[:, :-1]).last_hidden_state
            logits = model.lm_head(hidden[ends <= 1]).float()
        target = ids[:, 1:][ends <= 1]
        loss = F.cross_entropy(logits, target)
        paired = torch.nonzero(opposite[target] >= 0).flatten()
        right = logits[paired, target[paired]]
        wrong = logits[paired, opposite[target[paired]]]
        pair_loss = F.softplus(wrong - right).mean()
        tells = torch.nonzero((number[target] != 0) & ~torch.isin(ids[:, :-1][ends <= 1], first_person)).flatten()
        forms = verb_forms[torch.randint(len(verb_forms), (NUMBER_PAIRS,))]
        difference = logits[tells][:, forms[:, 0]] - logits[tells][:, forms[:, 1]]
        difference = difference * number[target[tells], None]
        number_loss = F.softplus(-difference).mean()
        (loss + PAIR_WEIGHT * pair_loss + NUMBER_WEIGHT * number_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        tokens += target.numel()
        shown.append(
            [loss.item(), pair_loss.item(), (right > wrong).float().mean().item(),
             number_loss.item(), (difference > 0).float().mean().item()]
        )  # fmt: skip
        if step % 100 == 0:
            mean = [round(value, 4) for value in torch.tensor(shown).mean(0).tolist()]
            names = ("loss", "pair_loss", "pair_right", "number_loss", "number_right")
            minutes = round((time.monotonic() - began) / 60, 2)
            say(step=step, tokens=tokens, minutes=minutes, rate=round(rate, 6), **dict(zip(names, mean, strict=True)))
            shown = []
        if step % 500 == 0:
            model.save_pretrained(options.out)
    model.save_pretrained(options.out)
    say(done=True, step=step, tokens=tokens, minutes=options.minutes)
    (options.out / "held_out_text.json").write_text(json.dumps({"novels": novels_test, "wiki": wiki_test}))


if __name__ == "__main__":
    main()
