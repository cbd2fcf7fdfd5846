"""Time of one attribution against plain Gradient×Input, side by side in one run.

    python bench/speed.py [--runs 20] [--threads 2]

A random Llama of hidden size 512 and 8 layers on the CPU, float32. Floor A: Gradient×Input with frozen
parameters and all positions through the head. Floor B: the same with only the needed row. Every round
times each of them once, in turn; the table shows medians as ratios to floor A.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lrpx

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).eval()
    frozen = LlamaForCausalLM(config).eval().requires_grad_(False)
    frozen.load_state_dict(model.state_dict())
    explainer = lrpx.Explainer(model)

    def floor(ids: list[int], **options: int) -> None:
        embeddings = frozen.model.embed_tokens(torch.tensor([ids])).requires_grad_()
        logits = frozen(inputs_embeds=embeddings, use_cache=False, **options).logits[0, -1]
        (gradient,) = torch.autograd.grad(logits.max(), embeddings)
        (embeddings * gradient).sum(-1)

    subjects: dict[str, Callable[[list[int]], object]] = {
        "floor A": floor,
        "floor B": lambda ids: floor(ids, logits_to_keep=1),
        "lrpx attnlrp": lambda ids: explainer(ids, method="attnlrp"),
        "lrpx lrp": lambda ids: explainer(ids, method="lrp"),
    }
    print(f"| tokens | floor A ms | {' | '.join(subjects)} |\n|{'---|' * (len(subjects) + 2)}")
    for length in options.lengths:
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for run in range(options.runs + 3):
            ids = torch.randint(3, 32000, (length,)).tolist()
            for name, subject in subjects.items():
                began = time.perf_counter()
                subject(ids)
                if run >= 3:
                    times[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(each) for name, each in times.items()}
        ratios = " | ".join(f"{median / medians['floor A']:.2f}" for median in medians.values())
        print(f"| {length} | {1000 * medians['floor A']:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
