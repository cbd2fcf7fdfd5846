"""Compile two programs into transformers whose inner workings are known (Lindner et al. 2023), for the tests.

    python -m venv compiler && compiler/bin/pip install tracr-pypi safetensors
    compiler/bin/python training/compiled.py tests/reference/compiled.safetensors

``reverse`` gives back its letters from the last to the first: three layers count how many there are, which does not
depend on the letters, and the attention of the fourth fetches the letter. ``count`` says of each letter how often it
comes, by an attention and an MLP.
"""

from __future__ import annotations

import json
import re
import sys

import numpy as np
from safetensors.numpy import save_file
from tracr.compiler import compiling, lib
from tracr.rasp import rasp

LETTERS = ("a", "b", "c")
LENGTH = 4


def reverse() -> rasp.SOp:
    """The letters from the last to the first."""
    last = lib.make_length() - rasp.indices - 1
    return rasp.Aggregate(rasp.Select(rasp.indices, last, rasp.Comparison.EQ), rasp.tokens).named("out")


def count() -> rasp.SOp:
    """How often each letter comes."""
    return rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.EQ)).named("out")


def main(path: str) -> None:
    """Write the weights of both."""
    weights: dict[str, np.ndarray] = {}
    notes = {}
    for name, program in (("reverse", reverse()), ("count", count())):
        made = compiling.compile_rasp_to_model(program, vocab=set(LETTERS), max_seq_len=LENGTH, compiler_bos="BOS")
        for part, arrays in made.params.items():
            weights |= {f"{name}/{part}/{key}": np.array(value) for key, value in arrays.items()}
        out = [i for i, label in enumerate(made.residual_labels) if re.match(r"out(_\d+)?:", str(label))]
        labels = [str(made.residual_labels[i]) for i in out]
        config = made.model_config
        encoding = made.input_encoder.encoding_map
        notes[name] = json.dumps(
            {
                "heads": config.num_heads,
                "layers": config.num_layers,
                "out": out,
                "labels": labels,
                "encoding": {str(k): int(v) for k, v in encoding.items()},
            }
        )
        print(name, labels, made.apply(["BOS", "a", "b", "b", "c"]).decoded)
    save_file(weights, path, notes)


if __name__ == "__main__":
    main(sys.argv[1])
