"""A real spaCy pipeline, trained on a few sentences until it knows them."""

from __future__ import annotations

import pytest
import spacy
from spacy.tokens import Doc
from spacy.training import Example

NOUNS = {"keys": "NNS", "key": "NN", "members": "NNS", "list": "NN", "cabinet": "NN"}
SENTENCES = [
    ("keys", "cabinet", "open"),
    ("members", "list", "have"),
    ("list", "members", "has"),
    ("key", "keys", "opens"),
    ("keys", "list", "have"),
    ("cabinet", "members", "has"),
]
"""Subject, another noun and verb of "the keys to the cabinet open"."""


def example(vocab, subject, other, verb):
    words = ["the", subject, "to", "the", other, verb]
    known = Doc(
        vocab,
        words=words,
        tags=["DT", NOUNS[subject], "IN", "DT", NOUNS[other], "VBP" if NOUNS[subject] == "NNS" else "VBZ"],
        heads=[1, 5, 4, 4, 1, 5],
        deps=["det", "nsubj", "case", "det", "nmod", "ROOT"],
    )
    return Example(Doc(vocab, words=words), known)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    """The folder of the pipeline."""
    spacy.util.fix_random_seed(0)
    nlp = spacy.blank("en")
    nlp.add_pipe("tagger")
    nlp.add_pipe("parser", config={"min_action_freq": 1})
    known = [example(nlp.vocab, *sentence) for sentence in SENTENCES]
    optimizer = nlp.initialize(lambda: known)
    for _ in range(40):
        nlp.update(known, sgd=optimizer)
    scores = nlp.evaluate(known)
    assert scores["tag_acc"] == scores["dep_las"] == 1
    folder = tmp_path_factory.mktemp("pipeline") / "tiny"
    nlp.to_disk(folder)
    return folder
