"""Subject-verb agreement sentences with a word-level ground truth (Arras et al. 2025, App. B, *generic ground truth*).

Each sample is a sentence with a verb in the present tense; the evidence for the verb's number is its subject. As in
the paper, the ground truth is the one word that stands in the relation ``nsubj`` to the verb, the head of the
subject's noun phrase and not the whole phrase: the paper says only that a dependency parser identifies the
subject, and its printed lengths settle it (1 token for 96.7 % of its BERT samples). Three more choices that it leaves
open are made by the same letter of ``nsubj``:

- a relative pronoun is the ground truth of its clause's verb ("the keys **that** open it"), not its antecedent;
- of subjects that are coordinated it is the first, which is the head ("**cats** and dogs sleep");
- passive subjects, clauses and expletives are none (:func:`lrpx._data.trees.nominal_subjects`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lrpx._data.inflection import other_form
from lrpx._data.trees import Parser, Tree, nominal_subjects, read_lines, read_trees, words_apart
from lrpx.errors import DataError, InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

MASK = "***mask***"
NOUN_TAGS = {"VBZ": {"NNS", "NNPS"}, "VBP": {"NN", "NNP"}}
"""The nouns of the other number, for a verb of each tag."""
IDENTICAL = "identical verb forms"
NO_SUBJECT = "no nominal subject (nsubj)"
SEVERAL_SUBJECTS = "several nominal subjects"
OTHER_TENSE = "verb not tagged VBZ or VBP"
NO_PARSE = "no parse of the sentence"
UNKNOWN_FORM = "other verb form unknown"
FUSED = "verb or subject fused with another word"


@dataclass(frozen=True)
class Sample:
    """One sentence with its ground truth.

    Args:
        id: ``"<file stem>:<line>"``, in a treebank ``"<file stem>:<sentence>.<word>"``, all from 1.
        text: the sentence with the right verb form in it.
        verb: the characters of the verb in the text, half-open.
        form: the right form.
        other: the opposite form (VBZ for VBP, VBP for VBZ).
        subject: the characters of the words of the ground truth, half-open ranges in order.
        attractors: nouns of the other number between the subject and the verb.
    """

    id: str
    text: str
    verb: tuple[int, int]
    form: str
    other: str
    subject: tuple[tuple[int, int], ...]
    attractors: int

    @property
    def line(self) -> int:
        """The line in the file, or in a treebank the number of the sentence."""
        return int(self.id.rpartition(":")[2].partition(".")[0])

    @property
    def plural(self) -> bool:
        """Whether the right form is the VBP, which the paper calls plural ("I" and "you" take it, too).

        Of two forms the VBZ is the one with an s at its end, and the longer one where both have it.

        >>> Sample("", "they pass", (5, 9), "pass", "passes", ((0, 4),), 0).plural
        True
        """

        def singular(form: str) -> tuple[bool, int]:
            return form.lower().endswith("s"), len(form)

        return singular(self.form) < singular(self.other)


@dataclass(frozen=True)
class Dropped:
    """A row that is no sample: its id, its line (in a treebank the number of the sentence), why, and its text."""

    id: str
    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class Agreement:
    """What a source gave: the samples, the rows that are none, and the source in words."""

    samples: tuple[Sample, ...]
    dropped: tuple[Dropped, ...]
    source: str

    def counts(self) -> dict[str, int]:
        """What App. B prints: rows read, rows dropped for each reason, samples kept, and these by number."""
        order = (NO_PARSE, IDENTICAL, UNKNOWN_FORM, NO_SUBJECT, SEVERAL_SUBJECTS, OTHER_TENSE, FUSED)
        reasons = Counter(row.reason for row in self.dropped)
        plural = sum(sample.plural for sample in self.samples)
        return {
            "read": len(self.samples) + len(self.dropped),
            **{reason: reasons[reason] for reason in order if reasons[reason]},
            "kept": len(self.samples),
            "kept, plural": plural,
            "kept, singular": len(self.samples) - plural,
        }


def read_agreement(
    path: str | Path,
    *,
    parser: str | None = None,
    parses: str | Path | None = None,
    only: Collection[str] | None = None,
    limit: int | None = None,
) -> Agreement:
    """Samples from a file.

    A ``.tsv`` file has the columns of Goldberg's (2019) ``lgd_dataset.tsv``, without a header: attractors, sentence,
    the sentence with ``***mask***`` for the verb, right verb, wrong verb. Its words are single spaces apart, and
    go to the parser as they are. A ``.conllu`` or ``.conllu.xz`` file is a treebank with Penn tags in its XPOS
    column; every verb tagged VBZ or VBP is a row of its own, since the first verb of a sentence often has one
    word before it; so samples from one sentence share words. There, the number that attractors differ from is
    that of the verb's form, which is there even where the subject shows none (*that*, *who*).

    Args:
        path: the file.
        parser: for ``.tsv``, a spaCy pipeline, by its name or folder. The paper's is ``en_core_web_trf``.
        parses: for ``.tsv`` instead of a parser, a CoNLL-U file that has the sentences, with the same words.
        only: ids of the rows to read; others are not parsed.
        limit: stop after this many samples.

    Raises:
        InputError: two sources of trees, or none, or a limit below 1.
        DataError: the file or its parses cannot be read, or nothing in the file is asked for.
        ModelError: the parser cannot be loaded.
    """
    if limit is not None and limit < 1:
        raise InputError(f"the limit is {limit}; pass how many samples to read, at least 1, or None for all")
    path = Path(path)
    wanted = None if only is None else frozenset(only)
    stem = path.name.removesuffix(".xz").rsplit(".", 1)[0]
    if path.name.endswith((".conllu", ".conllu.xz")):
        if parser is not None or parses is not None:
            raise InputError(f"{path} has trees of its own; leave the parser and the parses out")
        source, rows = path.name, _treebank_rows(path, stem, wanted)
    elif path.suffix == ".tsv":
        goldberg = [row for row in _read_goldberg(path, stem) if wanted is None or row.id in wanted]
        if parser is not None and parses is None:
            pipeline = Parser(parser)
            source, rows = f"{path.name}, parsed by {pipeline.description}", _parsed_rows(goldberg, pipeline)
        elif parses is not None and parser is None:
            found = _find(goldberg, Path(parses))
            source = f"{path.name}, parsed in {Path(parses).name}"
            rows = (row.sample(found.get(row.text)) for row in goldberg)
        else:
            raise InputError(
                f"the sentences of {path} need one parser: pass a spaCy pipeline such as en_core_web_trf, or their "
                "parses as a CoNLL-U file"
            )
    else:
        raise DataError(f"{path} is neither a .tsv nor a .conllu(.xz) file; pass one of these")
    samples: list[Sample] = []
    dropped: list[Dropped] = []
    for row in rows:
        if isinstance(row, Dropped):
            dropped.append(row)
        else:
            samples.append(row)
            if len(samples) == limit:
                break
    if not samples and not dropped:
        raise DataError(
            f"{path} has no row to read; pass a file with sentences"
            if wanted is None
            else f"none of the {len(wanted)} ids asked for is in {path}; leave this file out, or ask for ids such as "
            f'"{stem}:1"'
        )
    return Agreement(tuple(samples), tuple(dropped), source)


class _Line(NamedTuple):
    """A row of the Goldberg/Linzen set; its verb is the word of this index."""

    id: str
    line: int
    attractors: int
    text: str
    verb: int
    right: str
    wrong: str

    def sample(self, tree: Tree | None) -> Sample | Dropped:
        if self.right == self.wrong:
            return Dropped(self.id, self.line, IDENTICAL, self.text)
        if tree is None:
            return Dropped(self.id, self.line, NO_PARSE, self.text)
        return _sample(self.id, self.line, tree, self.verb, self.wrong, self.attractors)


def _read_goldberg(path: Path, stem: str) -> Iterator[_Line]:
    """The rows of a ``.tsv`` file, checked; empty lines are passed over."""
    for line, content in read_lines(path):
        if not content:
            continue
        columns = content.split("\t")
        where = f"{path}, line {line}"
        if len(columns) != 5:
            raise DataError(
                f"{where}: {len(columns)} columns where 5 are due (attractors, sentence, sentence with {MASK}, right "
                "verb, wrong verb, with tabs between); mend the row, or take it out"
            )
        attractors, text, masked, right, wrong = columns
        words = masked.split(" ")
        if not (attractors.isascii() and attractors.isdigit()):
            raise DataError(f"{where}: the attractors are {attractors[:20]!r}; the first column takes a number, as 1")
        if words.count(MASK) != 1:
            raise DataError(f"{where}: {words.count(MASK)} words are {MASK} where one is due; mask the verb once")
        verb = words.index(MASK)
        words[verb] = right
        if words != text.split(" "):
            raise DataError(
                f"{where}: with {right[:40]!r} for {MASK}, the third column does not read as the second; "
                "mend the row, or take it out"
            )
        if not all(words) or not wrong or " " in wrong:
            raise DataError(f"{where}: the words, and the verb forms, are not single spaces apart; mend the row")
        yield _Line(f"{stem}:{line}", line, int(attractors), text, verb, right, wrong)


def _parsed_rows(rows: Sequence[_Line], parser: Parser) -> Iterator[Sample | Dropped]:
    """Each row with the parser's tree; those with identical forms need none."""
    trees = parser(row.text for row in rows if row.right != row.wrong)
    for row in rows:
        yield row.sample(None if row.right == row.wrong else next(trees))


def _find(rows: Sequence[_Line], parses: Path) -> dict[str, Tree]:
    """The parses of the rows' sentences, by their text; the first of several."""
    wanted = {row.text for row in rows}
    found: dict[str, Tree] = {}
    for tree in read_trees(parses):
        apart = words_apart(tree)
        if apart.text in wanted:
            found.setdefault(apart.text, apart)
    if rows and not found:
        raise DataError(f"{parses} has none of the sentences; pass their parses, made without changing the words")
    return found


def _treebank_rows(path: Path, stem: str, only: frozenset[str] | None) -> Iterator[Sample | Dropped]:
    """Every verb tagged VBZ or VBP, in order."""
    found = False
    for number, tree in enumerate(read_trees(path), 1):
        for verb, word in enumerate(tree.words):
            if word.tag not in NOUN_TAGS:
                continue
            found = True
            name = f"{stem}:{number}.{verb + 1}"
            if only is None or name in only:
                other = other_form(word.form, word.lemma, word.tag)
                yield _sample(name, number, tree, verb, other)
    if not found:
        raise DataError(
            f"{path} has no verb tagged VBZ or VBP; pass an English treebank with Penn tags in its XPOS column"
        )


def _sample(
    name: str, line: int, tree: Tree, verb: int, other: str | None, attractors: int | None = None
) -> Sample | Dropped:
    """The sample, or why it is none; the reasons are tried in the paper's order."""

    def dropped(reason: str) -> Dropped:
        return Dropped(name, line, reason, tree.text)

    word = tree.words[verb]
    if other is None:
        return dropped(UNKNOWN_FORM)
    if other == word.form:
        return dropped(IDENTICAL)
    subjects = nominal_subjects(tree.words, verb)
    if len(subjects) != 1:
        return dropped(SEVERAL_SUBJECTS if subjects else NO_SUBJECT)
    if word.tag not in NOUN_TAGS:
        return dropped(OTHER_TENSE)
    subject = tree.words[subjects[0]].span
    if word.span is None or subject is None:
        return dropped(FUSED)
    if attractors is None:
        first, last = sorted((subjects[0], verb))
        attractors = sum(each.tag in NOUN_TAGS[word.tag] for each in tree.words[first + 1 : last])
    return Sample(name, tree.text, word.span, word.form, other, (subject,), attractors)
