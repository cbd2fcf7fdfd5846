"""Dependency trees, from a CoNLL-U file or from spaCy, and the subject of a verb in one of them."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lrpx.errors import DataError, MissingExtraError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

EXTRA = "pip install 'lrpx[benchmarks]'"


class Word(NamedTuple):
    """A word of a tree.

    Args:
        form: the word.
        lemma: its lemma, empty where the source has none.
        tag: its Penn tag, as ``VBZ``.
        head: the index of its head in the tree, its own index at the root.
        relation: its relation to the head, in Universal Dependencies or in spaCy's own labels.
        span: its characters in the text, or None where it is fused with another word, as *de* in French *du*.
    """

    form: str
    lemma: str
    tag: str
    head: int
    relation: str
    span: tuple[int, int] | None


class Tree(NamedTuple):
    """A sentence: its text and its words."""

    text: str
    words: tuple[Word, ...]


def nominal_subjects(words: Sequence[Word], verb: int) -> list[int]:
    """The words that stand in the relation ``nsubj`` to a verb: one, none, or more where a parser errs.

    An auxiliary's subject hangs on the verb it helps, and in Universal Dependencies a copula's on the predicate:
    there it is looked for. Where that predicate is a clause ("The problem is that he left"), the copula's is
    ``nsubj:outer``. Subjects of the passive (``nsubj:pass``, ``nsubjpass``), clauses (``csubj``) and expletives
    (``expl``) are none, and neither is what follows *there is*: spaCy's own labels call it an attribute.
    """
    relation = words[verb].relation
    copula = relation == "cop"
    clause = words[verb].head if copula or relation in {"aux", "aux:pass", "auxpass"} else verb
    inner, outer = [], []
    for at, word in enumerate(words):
        if word.head == clause and at != clause:
            if word.tag == "EX":
                return []
            if word.relation == "nsubj":
                inner.append(at)
            elif word.relation == "nsubj:outer":
                outer.append(at)
    return outer if copula and outer else inner


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """``(number, line)`` of a UTF-8 file, plain or ``.xz``, from 1 and without line ends.

    Raises:
        DataError: the file cannot be read, unpacked or decoded; the message has the line.
    """
    number = 0
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path} is no whole .xz file ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; pass a file that exists") from error


def read_trees(path: Path) -> Iterator[Tree]:
    """The trees of a ``.conllu`` or ``.conllu.xz`` file, one after the other.

    Raises:
        DataError: the file, or a sentence in it, cannot be read; the message has the line.
    """
    try:
        from conllu import parse_sentences, parse_token_and_metadata
        from conllu.exceptions import ParseException
    except ImportError as error:
        raise MissingExtraError(f"reading a treebank needs the conllu library; {EXTRA}") from error

    first = 1

    def lines() -> Iterator[str]:
        nonlocal first
        between = True
        for number, line in read_lines(path):
            first = number if between else first
            between = not line.strip()
            yield f"{line}\n"

    def as_it_is(columns: list[str], at: int) -> str:
        return columns[at]

    columns: Any = dict.fromkeys(("xpos", "feats", "deps", "misc"), as_it_is)
    for sentence in parse_sentences(lines()):  # type: ignore[arg-type]  # any lines will do
        try:
            yield _tree(parse_token_and_metadata(sentence, field_parsers=columns))
        except (ParseException, ValueError, KeyError, TypeError) as error:
            why = f"no column {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise DataError(
                f"{path}, sentence at line {first}: not CoNLL-U ({why[:120]}); mend the sentence, or take it out"
            ) from error


def _tree(rows: Sequence[Any]) -> Tree:
    """A sentence as the conllu library has it. Parts of a contraction get their own part of its characters."""
    if any(row["id"] is None for row in rows):
        raise ValueError("a word without its number")
    rows_of_words = [row for row in rows if isinstance(row["id"], int)]
    contractions = {row["id"][0]: row for row in rows if isinstance(row["id"], tuple) and row["id"][1] == "-"}
    text = ""
    words: list[Word] = []
    while len(words) < len(rows_of_words):
        done = len(words)
        token = contractions.get(done + 1, rows_of_words[done])
        last = token["id"][2] if done + 1 in contractions else done + 1
        if not done < last <= len(rows_of_words):
            raise ValueError(f"the contraction {done + 1}-{last} has no such words")
        parts = rows_of_words[done:last]
        whole = "".join(row["form"] for row in parts) == token["form"]
        start = len(text)
        for number, row in enumerate(parts, done + 1):
            head = row["head"]
            if row["id"] != number:
                raise ValueError(f"word {row['id']} where word {number} is due")
            if head not in range(len(rows_of_words) + 1):
                raise ValueError(f"word {number} has the head {head}, which is no word")
            end = start + len(row["form"])
            span = (start, end) if whole else None
            words.append(
                Word(row["form"], row["lemma"], row["xpos"], head - 1 if head else number - 1, row["deprel"], span)
            )
            start = end
        text += token["form"] + ("" if "SpaceAfter=No" in token["misc"].split("|") else " ")
    return Tree(text.rstrip(" "), tuple(words))


class Parser:
    """A spaCy pipeline, for sentences whose words are known.

    Args:
        name: a pipeline's name or folder; it needs a tagger and a dependency parser.

    Raises:
        ModelError: the pipeline is missing, cannot be loaded, or neither tags nor parses.
    """

    def __init__(self, name: str) -> None:
        try:
            import spacy
            from spacy.about import __version__ as version
        except ImportError as error:
            raise MissingExtraError(f"parsing sentences needs spaCy; {EXTRA}") from error
        if not Path(name).is_dir() and not spacy.util.is_package(name):
            raise ModelError(
                f"spaCy has no pipeline {name!r}: neither a package nor a folder; python -m spacy download {name}"
            )
        try:
            self._pipeline = spacy.load(name, exclude=["ner", "lemmatizer"])
        except (OSError, ValueError, ImportError) as error:
            why = " ".join(str(error).split())[:300]
            raise ModelError(f"spaCy cannot load the pipeline {name!r}: {why}; install or train it anew") from error
        missing = {"tagger", "parser"} - set(self._pipeline.pipe_names)
        if missing:
            raise ModelError(f"the spaCy pipeline {name!r} has no {' and no '.join(sorted(missing))}; use another")
        meta = self._pipeline.meta
        own = f"{meta['lang']}_{meta['name']}"
        self.description = f"spaCy {version}, {own if own == name else f'{name} ({own})'} {meta['version']}"

    def __call__(self, texts: Iterable[str]) -> Iterator[Tree]:
        """The trees of texts whose words are single spaces apart, in order."""
        from spacy.tokens import Doc

        docs = (Doc(self._pipeline.vocab, words=text.split(" ")) for text in texts)
        for doc in self._pipeline.pipe(docs, batch_size=256):
            words = (Word(token.text, "", token.tag_, token.head.i, token.dep_, None) for token in doc)
            yield words_apart(Tree(doc.text, tuple(words)))


def words_apart(tree: Tree) -> Tree:
    """The same tree over a text in which all its words are single spaces apart.

    >>> words_apart(Tree("Go!", (Word("Go", "go", "VB", 0, "root", (0, 2)), Word("!", "!", ".", 0, "punct", (2, 3)))))
    Tree(text='Go !', words=(Word(..., span=(0, 2)), Word(..., span=(3, 4))))
    """
    words, start = [], 0
    for word in tree.words:
        words.append(word._replace(span=(start, start + len(word.form))))
        start += len(word.form) + 1
    return Tree(" ".join(word.form for word in words), tuple(words))
