"""Many questions of one text: one forward pass and packed backward passes, against one pass each and one call each.

    python bench/questions.py

A random Llama (hidden size 512, 8 layers, float32). Each round times every way once, in random order; the ratios are
medians over the rounds, to a call of the explainer for each question.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lrpx import Explainer, _passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_key_value_heads=4, **sizes)).eval()
    explain = Explainer(model)
    short = _passes.SHORT

    def packed(ids: list[int], positions: list[int], limit: int) -> torch.Tensor:
        _passes.SHORT = limit
        try:
            return torch.stack([a.relevance.clone() for a in explain(ids, position=positions)])
        finally:
            _passes.SHORT = short

    print(f"{options.questions} questions of one text; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| tokens | a call each, ms | one forward pass | packed | largest difference |\n|---|---|---|---|---|")
    for length in options.lengths:
        ids = torch.randint(0, 32000, (length,)).tolist()
        positions = torch.linspace(0, length - 1, options.questions).long().tolist()
        ways = {
            "calls": lambda: torch.stack([explain(ids, position=p).relevance.clone() for p in positions]),  # noqa: B023
            "alone": lambda: packed(ids, positions, 0),  # noqa: B023
            "packed": lambda: packed(ids, positions, length),  # noqa: B023
        }
        found = {name: way() for name, way in ways.items()}
        off = max(float((found[name] - found["calls"]).abs().max()) for name in ("alone", "packed"))
        off /= float(found["calls"].abs().max())
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.runs):
            for name in random.sample(list(ways), len(ways)):
                began = time.perf_counter()
                ways[name]()
                times[name].append(time.perf_counter() - began)
        base = statistics.median(times["calls"])
        ratios = [
            statistics.median(a / b for a, b in zip(times[name], times["calls"], strict=True))
            for name in ("alone", "packed")
        ]
        print(f"| {length} | {1000 * base:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {off:.0e} |", flush=True)


if __name__ == "__main__":
    main()
