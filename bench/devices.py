"""Compare a GPU with the processor on every class of transformers: the same relevance, and an unchanged forward pass.

Each class is built tiny and random as ``lrpx coverage`` builds it. In float64, one value of its output is explained on
both, under AttnLRP and CP-LRP; in float32, the outputs inside ``propagate`` on the GPU are compared with its own
outputs there. Ends with code 1 where relevance differs, or a class runs on one alone.

    python bench/devices.py --workers 12 --report devices.md
    python bench/devices.py --types llama gpt2 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from classes import each_examined, in_order, listed, reason
from torch import Tensor
from transformers.utils import logging

from lrpx.coverage import ModelClass, _checking, _inputs, _tiny, choose, versions
from lrpx.errors import LRPxError
from lrpx.recipes import ATTNLRP, LRP

TOLERANCE = 1e-9
"""How far apart relevance may be, relative to the largest: far above rounding, far below another rule."""
RECIPES = (ATTNLRP.name, LRP.name)
OUTCOMES = ("agree", "differ", "refused by both", "one alone", "not built")


@dataclass(frozen=True)
class Compared:
    """What became of a class under one recipe: how far apart the two are, or why that cannot be said.

    ``outputs`` is how far apart the outputs are themselves, relative to the largest, and ``changed`` how much those of
    the device change inside ``propagate``, in eps of the largest.
    """

    outcome: str
    difference: float = 0.0
    outputs: float = 0.0
    changed: float = 0.0
    reason: str = ""


def examine(one: ModelClass, device: str) -> dict[str, Compared]:
    """What became of a class under both recipes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    try:
        model: Any = _tiny.tiny_model(one)
        inputs = _inputs.tiny_inputs(one, model)
        _tiny.let_batch_norms_learn(model, inputs)
        _checking._stock(one, model, inputs)
        there = _moved(copy.deepcopy(model), device)
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        stock = _checking._stock(one, there, given)
    except Exception as error:
        return dict.fromkeys(RECIPES, Compared("not built", reason=reason(error)))
    found = {}
    for recipe in (ATTNLRP, LRP):
        try:
            logits = _checking._run(one, there, given, recipe).logits
            changed = min(_checking._difference(logits, expected) for expected in stock)
        except Exception:
            changed = float("nan")  # it says why below
        found[recipe.name] = _compared(one, _checking.in_float64(model), inputs, device, recipe, changed)
    return found


def _compared(
    one: ModelClass, model: Any, inputs: dict[str, Any], device: str, recipe: Any, changed: float
) -> Compared:
    relevance, logits, errors = [], [], []
    for place in ("cpu", device):
        try:
            given = {name: _put(value, place) for name, value in inputs.items()}
            with _checking._everything_wide():
                run = _checking._run(one, _moved(copy.deepcopy(model), place), given, recipe)
            relevance.append([each.detach().cpu() for each in run.relevance])
            logits.append(run.logits.cpu())
        except Exception as error:
            errors.append(f"{'' if isinstance(error, LRPxError) else 'failed: '}{place}: {reason(error)}")
    if errors:
        return Compared("refused by both" if len(errors) > 1 else "one alone", changed=changed, reason=errors[-1])
    if [each.shape for each in relevance[0]] != [each.shape for each in relevance[1]]:
        return Compared("differ", float("inf"), changed=changed, reason="other sources")
    apart, outputs = _apart(*relevance), _apart(*([each] for each in logits))
    return Compared("agree" if apart <= TOLERANCE else "differ", apart, outputs, changed)


def _apart(first: list[Tensor], second: list[Tensor]) -> float:
    """How far apart two lists of tensors are, relative to the largest number of the first."""
    largest = max((float(each.abs().max()) for each in first if each.numel()), default=0.0) or 1.0
    pairs = ((a, b) for a, b in zip(first, second, strict=True) if a.numel())
    return max((float((a - b).abs().max()) / largest for a, b in pairs), default=0.0)


def _moved(model: Any, device: str) -> Any:
    for held in _checking._in_lists(model):
        held.to(device)
    return model.to(device)


def _put(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, torch.float64) if value.is_floating_point() else value.to(device)


def report(found: dict[ModelClass, dict[str, Compared]], device: str) -> str:
    """Counts, and each class that is not as on the processor."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    counts = Counter((recipe, each.outcome) for every in found.values() for recipe, each in every.items())
    lines = [
        f"{name}. {', '.join(' '.join(each) for each in versions().items())}. {len(found)} classes.",
        "",
        "| recipe | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---:|" * len(OUTCOMES),
        *(f"| {recipe} | {' | '.join(str(counts[recipe, outcome]) for outcome in OUTCOMES)} |" for recipe in RECIPES),
    ]
    agreeing = [each.difference for every in found.values() for each in every.values() if each.outcome == "agree"]
    lines += [
        "",
        f"The largest difference of two that agree is {max(agreeing, default=0.0):.1e} of the largest relevance.",
    ]
    changed = {
        one.name: max(each.changed for each in every.values())
        for one, every in found.items()
        if any(each.changed > 0 for each in every.values())
    }
    lines += [f"Outputs on the device changed by the rules: {len(changed)} classes."]
    lines += [f"- {name}: {size:.2g} eps" for name, size in sorted(changed.items())]
    for outcome in OUTCOMES[1:]:
        lines += listed(found, outcome, _size)
    return "\n".join(lines) + "\n"


def _size(one: Compared) -> str:
    return f" {one.difference:.1e}, outputs {one.outputs:.1e}" if one.outcome == "differ" else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="*", default=(), help="model types, such as llama; all without")
    parser.add_argument("--quick", action="store_true", help="the representative few")
    parser.add_argument("--first", type=int, help="only so many; each model type's first class comes first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--report", type=Path, help="write the report there")
    options = parser.parse_args()
    classes = in_order(choose(options.types, None, options.quick), options.first)
    found = {}
    for number, (one, done) in enumerate(each_examined(examine, classes, options.workers, options.device), 1):
        lost = isinstance(done, BaseException)
        found[one] = dict.fromkeys(RECIPES, Compared("one alone", reason=reason(done))) if lost else done
        if number % 50 == 0 or number == len(classes):
            print(f"{number}/{len(classes)}", file=sys.stderr, flush=True)
            if options.report:
                options.report.write_text(report(found, options.device), encoding="utf-8")
    print(report(found, options.device))
    return 1 if any(each.outcome in OUTCOMES[1:4:2] for every in found.values() for each in every.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
