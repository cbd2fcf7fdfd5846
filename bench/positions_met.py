"""Which positions PA-LRP meets in the model classes of transformers, each built tiny with random weights.

    python bench/positions_met.py [--mapping causal-lm] [--models llama bloom …]

For each class: its outputs are the model's own, bit for bit or to rounding; the sum of its ledger; and how many layers
keep relevance of positions, or why not.
"""

from __future__ import annotations

import argparse
import warnings

import torch

from lrpx import PA_LRP, propagate
from lrpx.coverage import _checking, _tiny, choose
from lrpx.coverage._inputs import tiny_inputs
from lrpx.errors import LRPxError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapping", default="causal-lm")
    parser.add_argument("--models", nargs="*", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| class | layers with positions | of the value | ledger misses |")
    print("|---|---|---|---|", flush=True)
    for model_class in choose(options.models, options.mapping):
        try:
            model = _tiny.tiny_model(model_class)
            inputs = tiny_inputs(model_class, model)
            with torch.no_grad(), _tiny.seeded():
                stock = _checking._logits(model_class, model(**inputs))
        except Exception:  # it cannot be built here, which says nothing of positions
            continue
        print(f"| {model_class.name} | {met(model_class, model, inputs, stock)} |", flush=True)


def met(model_class: object, model: torch.nn.Module, inputs: dict[str, object], stock: torch.Tensor) -> str:
    try:
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace, _tiny.seeded():
            logits = _checking._logits(model_class, model(**inputs))
        trace.explain(_checking._value(model_class, logits))
        ledger, kept = trace.ledger(), trace.positions()
    except LRPxError as error:
        return f"refused: {str(error).splitlines()[0]} | |"
    difference = (logits.detach() - stock).abs().max() / stock.abs().max()
    same = "" if difference == 0 else f" (outputs differ by {float(difference):.0e})"
    share = ledger.by_kind().get("positions", 0.0) / ledger.explained
    return f"{len({each.layer for each in kept})}{same} | {share:+.4f} | {abs(ledger.difference) / ledger.scale:.0e}"


if __name__ == "__main__":
    main()
