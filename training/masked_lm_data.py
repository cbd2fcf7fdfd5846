"""The sentences the masked language model learns from: which verbs are masked, and which sentences leak.

A sentence is kept if it has a verb whose form its subject decides (``Marker``) and shares no eight words in a row with
a sentence the model is measured on (``LeakFilter``). ``prepare`` writes them, ``Sentences`` draws from them.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from agreement_data import read_rows
from train import AUXILIARIES, novel_chunks, verb_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

SEED = 1
LEAK_WORDS = 8
LONGEST = 64
BATCH_TOKENS = 1536
AFTER_VERB, CUT_SHARE = 8, 0.75

EASY, MEDIUM, HARD = 1, 2, 3
SOURCES = {"hard": 0.5, "medium": 0.2, "easy": 0.05, "wiki": 0.25}
MOST = {"hard": 200_000, "medium": 120_000, "easy": 40_000, "wiki": 15_000, "dev_novels": 1000, "dev_wiki": 1000}

MODALS = set("will would can could shall should may might must ll d".split())
BARE = MODALS | set(
    "do does did don doesn didn won wouldn couldn cannot let lets make makes made see saw hear heard help helped watch "
    "watched feel felt bid dare dared need have has had having be been if though lest suggest demand insist".split()
)
BEFORE_NOUNS = set(
    "the a an his her my your their our its no some any every each of in with by from for these those this two three "
    "four five many few such".split()
)
SUBJECT_PRONOUNS = set("i you he she it we they there".split())
BEFORE_BASE, BEFORE_THIRD = MODALS | {"i", "you", "we", "they"}, {"he", "she", "it", "who", "which"}
ADVERBS = set("also always never often still now then only just not even usually generally sometimes already".split())
AUXILIARY_FORMS = {form for pair in AUXILIARIES for form in pair}
NOT_PRESENT = set("like lay bid hit let put read set cut shut cost hurt cast spread beat burst run".split())
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’']?\s+(?=[A-Z\"“‘'])")


def word_runs(text: str, length: int = LEAK_WORDS) -> set[str]:
    """Every run of ``length`` words, lower case and without punctuation; of a shorter text, all its words as one.

    >>> sorted(word_runs("Boys and girls, it's late", 4))
    ['and girls its late', 'boys and girls its']
    """
    text = re.sub(r" (?=(?:n't|'s|'re|'ve|'ll|'d|'m)\b)", "", text.lower().replace("’", "'"))
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=\w)'(?=\w)", "", text))
    return {" ".join(words[at : at + length]) for at in range(max(1, len(words) - length + 1))}


def evaluation_texts(agreement: Path) -> Iterator[str]:
    """Every sentence that may not be trained on: the Goldberg/Linzen rows, the treebank's, BLiMP's."""
    for path in sorted(agreement.glob("lgd_*.tsv")):
        yield from (row.sentence for row in read_rows(path))
    with lzma.open(agreement / "en_ewt-all.conllu.xz", "rt", encoding="utf-8") as file:
        yield from (line.removeprefix("# text = ") for line in file if line.startswith("# text = "))
    for path in sorted(agreement.glob("blimp_*.jsonl")):
        yield from (json.loads(line)["sentence_good"] for line in path.read_text(encoding="utf-8").splitlines())


class LeakFilter:
    """Lets a sentence pass unless it shares eight words in a row with an evaluation sentence, or all its words."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.barred: set[str] = set()
        self.dropped = 0
        for text in texts:
            self.barred |= word_runs(text)

    def __call__(self, text: str) -> bool:
        passes = self.barred.isdisjoint(word_runs(text))
        self.dropped += not passes
        return passes


def clear_pairs(pairs: Sequence[tuple[str, str]], chunks: Iterable[str]) -> list[tuple[str, str]]:
    """The ``(singular, plural)`` pairs both of whose forms are verbs rather than nouns in the text: the singular
    more often after "he" than after "the", the plural three times as often after "they" or "would". Forms that are a
    past tense or another word too ("put", "like") are left out."""
    counts: Counter[tuple[str, str]] = Counter()
    cues = "|".join(sorted(BEFORE_BASE | BEFORE_THIRD | BEFORE_NOUNS))
    cue_and_word = re.compile(rf"\b({cues}) (?=([a-z]+)\b)")
    for chunk in chunks:
        counts.update(cue_and_word.findall(chunk.lower()))

    def is_verb(word: str, cues: set[str], ratio: int) -> bool:
        seen = sum(counts[cue, word] for cue in cues)
        return seen >= 3 and seen >= ratio * sum(counts[cue, word] for cue in BEFORE_NOUNS)

    return [
        (third, base)
        for third, base in pairs
        if base not in NOT_PRESENT and is_verb(third, BEFORE_THIRD, 1) and is_verb(base, BEFORE_BASE, 3)
    ]


class Marker:
    """Finds the verbs of a sentence, given in BERT's pieces, whose form its subject decides."""

    def __init__(self, clear: Sequence[tuple[str, str]]) -> None:
        self.number = {third: 1 for third, _ in clear} | {base: -1 for _, base in clear}

    def __call__(self, pieces: Sequence[str]) -> list[int]:
        """A mark a piece: 0, or how hard the verb is (``EASY``, ``MEDIUM``, ``HARD``), negative for a plural."""
        marks = [0] * len(pieces)
        for at in range(2, len(pieces) - 1):
            number = self.number.get(pieces[at], 0)
            if number and not pieces[at + 1].startswith("##"):
                marks[at] = number * self._difficulty(pieces, at, number)
        return marks

    def _difficulty(self, pieces: Sequence[str], at: int, number: int) -> int:
        verb, before = pieces[at], pieces[at - 1]
        if before in BEFORE_NOUNS or before in MODALS or before == "to":
            return 0  # a noun or an infinitive
        if number < 0 and verb not in ("were", "are"):
            clause = range(max(1, at - 8), at)
            if any(pieces[i] in BARE or (pieces[i] == "to" and pieces[i + 1] not in BEFORE_NOUNS) for i in clause):
                return 0  # perhaps an infinitive
        while at > 2 and (pieces[at - 1].endswith("ly") or pieces[at - 1] in ADVERBS):
            at -= 1
        before = pieces[at - 1]
        if before == "i" if number > 0 else before in ("he", "she", "it"):
            return 0  # "I was" tells no number; nor do "if he were" and "does it have"
        word = before[-1].isalpha()
        if before in SUBJECT_PRONOUNS or not (word or verb in AUXILIARY_FORMS):
            return EASY
        if not word or before in ("who", "which", "that", "what", "and"):
            return MEDIUM
        plural = before.endswith("s") and not before.endswith(("ss", "us", "is"))
        plural = plural or before.endswith("men") or before in ("people", "children")
        return HARD if plural == (number > 0) else MEDIUM


def cut(ids: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sentence up to a few pieces after its hardest verb, and its end token: the subject stands before, mostly."""
    end = min(int(abs(marks).argmax()) + 1 + AFTER_VERB, len(ids) - 1)
    return np.append(ids[:end], ids[-1]), np.append(marks[:end], marks[-1])


def padded(length: int) -> int:
    """The next multiple of 8: few sizes of batches, so that memory is used again."""
    return -(-length // 8) * 8


class Sentences:
    """The prepared sentences by source, each as its piece ids and their marks."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.ids, self.marks = arrays["ids"], arrays["marks"]
            self.starts, source = arrays["starts"], arrays["source"]
        self.places = {name: np.flatnonzero(source == i) for i, name in enumerate(MOST)}

    def row(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.starts[place], self.starts[place + 1])
        return self.ids[part].astype(np.int64), self.marks[part]

    def groups(self, draw: np.random.Generator) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Rows of about equal length, without end, drawn from the mixture of the sources."""
        while True:
            which = draw.choice(len(SOURCES), 4096, p=list(SOURCES.values()))
            drawn = [draw.choice(self.places[name], (which == i).sum()) for i, name in enumerate(SOURCES)]
            rows = [self.row(place) for place in np.concatenate(drawn)]
            rows = sorted(
                (cut(*row) if draw.random() < CUT_SHARE else row for row in rows), key=lambda row: len(row[0])
            )
            groups = []
            while rows:
                take = max(1, BATCH_TOKENS // padded(len(rows[-1][0])))
                groups.append(rows[-take:])
                del rows[-take:]
            yield from (groups[i] for i in draw.permutation(len(groups)))


def prepare(data: Path, path: Path, tokenizer: Any, say: Callable[..., None]) -> None:
    """Read the texts, mark their verbs, drop what leaks, and write the sentences that training draws from."""
    novels, novels_test = novel_chunks(data / "text/novels.txt.xz")
    words: Counter[str] = Counter()
    for chunk in novels:
        words.update(re.findall(r"[a-z]+", chunk.lower()))
    verbs = verb_pairs([], words)
    (path.parent / "verbs.json").write_text(json.dumps(verbs))
    vocabulary = tokenizer.get_vocab()
    known = [pair for pair in verbs + AUXILIARIES if all(form in vocabulary for form in pair)]
    clear = clear_pairs([pair for pair in known if pair not in AUXILIARIES], novels)
    clear += [("is", "are"), ("was", "were"), ("has", "have")]
    say(pairs=len(verbs), of_one_piece=len(known), clear=len(clear))

    marker, passes = Marker(clear), LeakFilter(evaluation_texts(data / "agreement"))
    kept: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in MOST}
    draw, seen = random.Random(SEED), Counter[str]()

    def keep(sentences: list[str], name: Callable[[int], str]) -> None:
        for text, encoding in zip(sentences, tokenizer.backend_tokenizer.encode_batch(sentences), strict=True):
            if not 6 <= len(encoding.ids) <= LONGEST:
                continue
            marks = marker(encoding.tokens)
            if not any(marks):
                continue
            source = name(max(map(abs, marks)))
            seen[source] += 1
            if (source == "easy" and draw.random() > 0.1) or not passes(text):
                continue
            kept[source].append((np.array(encoding.ids, np.uint16), np.array(marks, np.int8)))

    def blocks(chunks: list[str]) -> Iterator[list[str]]:
        for at in range(0, len(chunks), 1000):
            yield [text for chunk in chunks[at : at + 1000] for text in SENTENCE_END.split(chunk)]

    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    wiki = (data / "text/wiki_split_sentences.txt").read_text(encoding="utf-8").splitlines()
    keep(wiki[:-1000], lambda _: "wiki")
    keep(wiki[-1000:], lambda _: "dev_wiki")
    say(wiki_leaks=passes.dropped)
    for block in blocks(novels):
        keep(block, lambda hardness: ("easy", "medium", "hard")[hardness - 1])
    for block in blocks(novels_test):
        keep(block, lambda _: "dev_novels")
    say(leaks=passes.dropped, seen=dict(seen), passed={name: len(rows) for name, rows in kept.items()})
    chosen = [
        (i, row) for i, name in enumerate(MOST) for row in draw.sample(kept[name], min(MOST[name], len(kept[name])))
    ]
    temporary = path.with_suffix(".partial.npz")
    np.savez(
        temporary,
        ids=np.concatenate([row[0] for _, row in chosen]),
        marks=np.concatenate([row[1] for _, row in chosen]),
        starts=np.cumsum([0] + [len(row[0]) for _, row in chosen]),
        source=np.array([i for i, _ in chosen], np.uint8),
    )
    temporary.replace(path)
