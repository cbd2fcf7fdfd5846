"""Where the logit goes, by model: tokens, positions, biases and the softmaxes' residue under PA-LRP.

    python bench/position_shares.py --texts texts.txt [--limit 20] [--models bundled folder …]

The ledgers of the models' own predictions, summed over the texts, as shares of the sum of the explained logits; and the
absolute relevance of positions, each sink of each token by itself, as a share of that of tokens and positions together.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from lrpx import Explainer

KINDS = ("tokens", "positions", "token types", "biases", "constants", "softmax residue", "rule residue")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a text a line")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=["bundled"], help="names or folders, or: bundled")
    options = parser.parse_args()
    texts = options.texts.read_text(encoding="utf-8").splitlines()[: options.limit]
    print("|", " | ".join(["model", *KINDS, "sum", "of tokens and positions, absolute"]), "|")
    print("|---" * (len(KINDS) + 3) + "|", flush=True)
    for name in options.models:
        explainer = Explainer.from_pretrained(*([] if name == "bundled" else [name]), dtype=torch.float32)
        kinds, explained, sizes = Counter[str](), 0.0, [0.0, 0.0]
        for text in texts:
            a = explainer(text, method="pa-lrp-tokens", ledger=True)
            for kind, value in a.ledger.by_kind().items():
                kinds[kind] += value
            explained += a.explained.value
            for at, part in enumerate(("tokens", "positions")):
                sizes[at] += float(a.parts[part].values.abs().sum())
        cells = [f"{100 * kinds[kind] / explained:.1f} %" if kind in kinds else "" for kind in KINDS]
        total = f"{100 * sum(kinds.values()) / explained:.1f} %"
        print(
            "|", " | ".join([Path(name).name, *cells, total, f"{100 * sizes[1] / sum(sizes):.1f} %"]), "|", flush=True
        )


if __name__ == "__main__":
    main()
