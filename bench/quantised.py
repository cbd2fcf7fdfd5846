"""What int8 and int4 weights do to the relevance of tokens and of positions, on any causal model or classifier.

    python bench/quantised.py --texts texts.txt [--limit 10] [--tokens 64] [--models bundled folder …]

Each text is explained by the model with quantised weights (torchao, weights alone, the rest in float32), by the same
model with the floating-point matrices these stand for, and by the original one: how far the relevance is from that of
the other two (the length of the difference as a share, and the Spearman correlation over tokens), and what the ledger
misses of the value. What is explained is the quantised model's own prediction.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import spearmanr

from lrpx import Attribution, Explainer

METHODS = ("attnlrp", "pa-lrp-single-sink")


def ways() -> dict[str, Any]:
    """What quantises the weights, by its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for GPUs that are not here
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup

        return {
            "int8 by row": Int8WeightOnlyConfig(),
            "int4 by group of 32": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        }


def quantised(plain: Explainer, config: Any) -> Explainer:
    """The same model with quantised linear layers."""
    from torchao.quantization import quantize_

    model = copy.deepcopy(plain.model)
    quantize_(model, config)
    return Explainer(model, plain.tokenizer)


def stood_for(explainer: Explainer) -> Explainer:
    """The same model with the matrices that its quantised weights stand for."""
    model = copy.deepcopy(explainer.model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = torch.nn.Parameter(module.weight.dequantize())
    return Explainer(model, explainer.tokenizer)


def distance(one: Attribution, other: Attribution) -> float:
    return float((one.relevance - other.relevance).norm() / other.relevance.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a text a line")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="read so many tokens of each text at most")
    parser.add_argument("--models", nargs="+", default=["bundled"], help="names or folders, or: bundled")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = options.texts.read_text(encoding="utf-8").splitlines()[: options.limit]
    print(
        "| model | weights | method | off the matrices they stand for | off the original | Spearman | ledger misses |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        plain = Explainer.from_pretrained(*([] if name == "bundled" else [name]), dtype=torch.float32)
        for way, config in ways().items():
            found = quantised(plain, config)
            same = stood_for(found)
            for method in METHODS:
                rows = []
                for text in texts:
                    ids = plain.tokenizer(text)["input_ids"][: options.tokens]
                    mine = found(ids, method=method, ledger=True)
                    others = [each(ids, target=mine.prediction.id, method=method) for each in (same, plain)]
                    rank = float(spearmanr(mine.relevance, others[1].relevance).statistic)
                    assert mine.ledger is not None
                    missed = abs(mine.ledger.difference) / mine.ledger.scale
                    rows.append((distance(mine, others[0]), distance(mine, others[1]), rank, missed))
                off, before, rank, missed = zip(*rows, strict=True)
                line = f"{max(off):.0e} | {median(before):.3f} | {median(rank):.3f} | {max(missed):.0e}"
                print(f"| {Path(name).name} | {way} | {method} | {line} |", flush=True)


if __name__ == "__main__":
    main()
