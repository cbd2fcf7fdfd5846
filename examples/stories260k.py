"""Explain a prediction of stories260K, a real Llama of 260,032 parameters.

    python examples/stories260k.py ../shared/data/models/stories260K/hf [page.html]

The folder holds the model and ``tok512_vocab_scores.json``, the SentencePiece vocabulary with its scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import LlamaForCausalLM, LlamaTokenizer

import lrpx

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the"


def tokenizer(folder: Path) -> LlamaTokenizer:
    """The model's tokenizer: two pieces merge when their union is a piece, the highest score first."""
    rows = json.loads((folder / "tok512_vocab_scores.json").read_text(encoding="utf-8"))["vocab"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        row[0].replace(" ", "▁"): i for i, row in enumerate(rows) if i > 2
    }
    scores = {row[0].replace(" ", "▁"): row[1] for row in rows}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocabulary, key=lambda piece: -scores.get(piece, 0.0))
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary and vocabulary[piece] > 258
    ]
    return LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def main() -> None:
    """Print the heatmaps of two methods."""
    folder = Path(sys.argv[1])
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    model.config.name_or_path = "stories260K"
    explainer = lrpx.Explainer(model, tokenizer(folder))
    for method in ("attnlrp", "lrp"):
        a = explainer(TEXT, method=method).words()
        print(method, a)
        if len(sys.argv) > 2 and method == "attnlrp":
            a.to_html(sys.argv[2])


if __name__ == "__main__":
    main()
