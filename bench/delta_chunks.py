"""How much relevance under a gated delta rule hangs on where the borders of its chunks are.

    python bench/delta_chunks.py

A tiny Qwen3-Next with random weights of deviation 0.4, in float64, of 16 tokens; its delta rule in chunks of 2 to 8.
Each figure is the largest difference between the relevance of two lengths of chunks, over the largest relevance.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from unittest import mock

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as module

import lrpx
from lrpx.coverage._checking import _everything_wide

CHUNKS = (2, 3, 4, 8)


def tiny() -> Qwen3NextForCausalLM:
    config = Qwen3NextConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=4, num_experts=0, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.4)
    return model


def relevance(recipe: lrpx.Recipe, chunk: int) -> torch.Tensor:
    model, rule = tiny(), partial(module.torch_chunk_gated_delta_rule, chunk_size=chunk)
    with (
        mock.patch.object(module, "torch_chunk_gated_delta_rule", rule),
        _everything_wide(),  # the rule casts to float32
        lrpx.propagate(model, recipe) as trace,
    ):
        trace.explain(model(torch.arange(1, 17)[None]).logits[0, -1, 5])
    return trace.source_relevance(trace.sources[0])


def main() -> None:
    print("| recipe | largest difference, of the largest relevance |\n|---|---|")
    for name, recipe in (("plain gradients", lrpx.GRADIENT), ("AttnLRP", lrpx.ATTNLRP), ("CP-LRP", lrpx.LRP)):
        found = [relevance(recipe, chunk) for chunk in CHUNKS]
        largest = max(float(each.abs().max()) for each in found)
        print(f"| {name} | {max(float((a - b).abs().max()) for a, b in combinations(found, 2)) / largest:.1e} |")


if __name__ == "__main__":
    main()
