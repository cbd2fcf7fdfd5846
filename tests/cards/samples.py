"""A tiny model with a tokenizer, a corpus, and what plain torch finds in it."""

from __future__ import annotations

import numpy as np
import torch

from lrpx.model import BoundModel
from tests.reference import models

TEXTS = [
    "The keys to the cabinet are on the table.",
    "The key to the cabinets is under the old rug.",
    "The boys near the tree are tall, the girl is small.",
    "What a lovely film, and what a terrible ending!",
    "The film.",
    "A key, a rug, a tree, a table; and <b>the</b> girl is near the old cabinets, the boys are not.",
    "x",
]


def llama(tokenizer):
    return BoundModel(models.tiny_llama(vocab_size=340), tokenizer)


def gpt2(tokenizer):
    return BoundModel(models.tiny_gpt2(vocab_size=340), tokenizer)


def corpus(folder, texts=TEXTS):
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")  # lines 1, 3, 5, …
    return path


def ids_of(model, text):
    return model.reader.row(text).segments[0].tokens.ids


def activations(model, paths, text):
    """``[T, U]`` of each of some linear layers' inputs, the text alone, by a hook of plain torch."""
    found = {}
    handles = [
        model.module.get_submodule(path).register_forward_pre_hook(
            lambda _, args, path=path: found.__setitem__(path, args[0][0].double().numpy())
        )
        for path in paths
    ]
    try:
        with torch.no_grad():
            model.module(input_ids=torch.tensor([ids_of(model, text)]))
    finally:
        for handle in handles:
            handle.remove()
    return [found[path] for path in paths]


def same(passages, wanted, within):
    """Whether passages are those of the twin."""
    assert [(each.line, each.position) for each in passages] == [(line, at) for _, line, at in wanted]
    np.testing.assert_allclose(
        [each.value for each in passages], [value for value, *_ in wanted], rtol=within, atol=within
    )
