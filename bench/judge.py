"""Compare the engine with the independent judge of ``tests/reference/aten`` on every class of transformers.

Each class is built tiny and random as ``lrpx coverage`` builds it, and one value of its output is explained by both,
under AttnLRP and CP-LRP, in float64 throughout. Ends with code 1 where the two differ for a reason that is not known.

    python bench/judge.py --report docs/judge.md
    python bench/judge.py --types llama gpt2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from classes import each_examined, in_order, listed, reason
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))  # the judge is no part of the package

from lrpx.coverage import ModelClass, _checking, _inputs, _tiny, choose, versions
from tests.reference.aten.comparing import TOLERANCE, Compared, compare

if TYPE_CHECKING:
    from collections.abc import Sequence

RECIPES = ("attnlrp", "lrp")
OUTCOMES = ("agree", "differ", "not judged", "refused", "failed", "not built")
KNOWN: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""Why the two differ: by the beginning of the name of a class, and of a recipe if it is for that alone."""


def examine(model_class: ModelClass) -> dict[str, Compared]:
    """What became of a class under both recipes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    try:
        model: Any = _tiny.tiny_model(model_class)
        inputs = _inputs.tiny_inputs(model_class, model)
        _tiny.let_batch_norms_learn(model, inputs)
        _checking._stock(model_class, model, inputs)
    except Exception as error:
        return dict.fromkeys(RECIPES, Compared("not built", reason=reason(error)))
    model = _checking.in_float64(model)
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    try:
        return compare(
            model,
            wide,
            lambda output: _checking._logits(model_class, output),
            lambda logits: _checking._value(model_class, logits),
            _tiny.seeded,
        )
    except Exception as error:
        return dict.fromkeys(RECIPES, Compared("failed", reason=reason(error)))


def examined(
    classes: Sequence[ModelClass], workers: int, kept: Path | None = None, first: int | None = None
) -> dict[ModelClass, dict[str, Compared]]:
    """Every class, in a process of its own; ``kept`` has a line for each that was examined before, and gets more.

    Each model type's first class comes before its others; only the ``first`` so many, if given.
    """
    classes = in_order(classes, first)
    before = _read(kept)
    found = {one: before[one.mapping, one.name] for one in classes if (one.mapping, one.name) in before}
    waiting = [one for one in classes if one not in found]
    for number, (one, done) in enumerate(each_examined(examine, waiting, workers), 1):
        lost = isinstance(done, BaseException)
        found[one] = dict.fromkeys(RECIPES, Compared("failed", reason=reason(done))) if lost else done
        said = ", ".join(f"{recipe} {_shown(each)}" for recipe, each in found[one].items())
        if kept:
            with kept.open("a", encoding="utf-8") as file:
                line = [one.mapping, one.name, {recipe: asdict(each) for recipe, each in found[one].items()}]
                file.write(json.dumps(line) + "\n")
        print(f"{number}/{len(waiting)} {one.mapping} {one.name}: {said}", file=sys.stderr, flush=True)
    return {one: found[one] for one in classes}


def _read(kept: Path | None) -> dict[tuple[str, str], dict[str, Compared]]:
    if kept is None or not kept.exists():
        return {}
    lines = map(json.loads, kept.read_text(encoding="utf-8").splitlines())
    return {
        (mapping, name): {recipe: Compared(**each) for recipe, each in found.items()} for mapping, name, found in lines
    }


def _shown(one: Compared) -> str:
    return f"{one.outcome} ({one.difference:.1e})" if one.outcome == "differ" else one.outcome


def known(name: str, recipe: str) -> str:
    """Why a class differs, if that is known."""
    fits = [
        key for key in KNOWN if name.startswith(key.split("/")[0]) and ("/" not in key or key.endswith(f"/{recipe}"))
    ]
    return KNOWN[max(fits, key=len)] if fits else ""


def arguments(options: argparse.Namespace) -> list[str]:
    """Those of the command line that say what is examined."""
    chosen = [("--types", *options.types)] if options.types else []
    chosen += [("--mapping", options.mapping)] if options.mapping else []
    chosen += [("--quick",)] if options.quick else []
    chosen += [("--first", str(options.first))] if options.first else []
    return [word for option in chosen for word in option]


def report(found: dict[ModelClass, dict[str, Compared]], among: int, chosen: str) -> str:
    """The whole of it as Markdown; of so many classes, and by which arguments these were chosen."""
    of_versions = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# The judge",
        "",
        "`tests/reference/aten/` is a second implementation that shares no code with the engine: it records the ATen",
        "calls of a model and goes back over them by the papers' formulas. Here it stands beside the engine on classes",
        "that `lrpx coverage` builds, for one value each, in float64 throughout. Printed by",
        "",
        "```console",
        f"$ python bench/judge.py {chosen + ' ' if chosen else ''}--report docs/judge.md",
        "```",
        "",
        f"with {of_versions}: {len(found)} of {among} classes"
        + (", each model type's first before its others; the rest was not run." if len(found) < among else "."),
        "",
        f"- **agree**: the relevance of every source, to {TOLERANCE:g} of the largest. That is far above what rounding",
        f"  (eps {torch.finfo(torch.float64).eps:.1e}) does in some thousand operations, far below another rule.",
        "- **differ**: it does not; below by how much, and why.",
        "- **not judged**: the judge has no formula for an operation that relevance meets, and says so.",
        "- **refused**: by the engine. **failed**: one of the two ended with another error.",
        "",
        "| mapping | recipe | " + " | ".join(OUTCOMES) + " |",
        "|---|---|" + "---:|" * len(OUTCOMES),
    ]
    mappings = [*sorted({one.mapping for one in found}), "all"]
    for mapping in mappings:
        for recipe in RECIPES:
            counts = [
                sum(each[recipe].outcome == outcome for one, each in found.items() if mapping in (one.mapping, "all"))
                for outcome in OUTCOMES
            ]
            lines.append(f"| {mapping} | {recipe} | {' | '.join(map(str, counts))} |")
    agreeing = [each[r].difference for each in found.values() for r in RECIPES if each[r].outcome == "agree"]
    if agreeing:
        lines += ["", f"The largest difference of two that agree is {max(agreeing):.1e}."]
    lines += [
        "",
        "## Where they differ",
        "",
        "| class | mapping | recipe | difference | why |",
        "|---|---|---|---:|---|",
    ]
    for one, each in found.items():
        lines += [
            f"| {one.name} | {one.mapping} | {recipe} | {each[recipe].difference:.1e} | "
            f"{known(one.name, recipe) or 'not known'} |"
            for recipe in RECIPES
            if each[recipe].outcome == "differ"
        ]
    for outcome in OUTCOMES[2:]:
        lines += listed(found, outcome, lambda _: "")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="*", default=(), help="model types, such as llama; all without")
    parser.add_argument("--mapping", help="one of transformers' mappings")
    parser.add_argument("--quick", action="store_true", help="the representative few")
    parser.add_argument("--first", type=int, help="only so many; each model type's first class comes first")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "--kept", type=Path, help="a file with a line for each class; those that it has are not run again"
    )
    parser.add_argument("--report", type=Path, help="write the report there")
    options = parser.parse_args()
    classes = choose(options.types, options.mapping, options.quick)
    found = examined(classes, options.workers, options.kept, options.first)
    text = report(found, len(classes), " ".join(arguments(options)))
    print(text)
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    unknown = [
        one.name
        for one, each in found.items()
        for recipe in RECIPES
        if each[recipe].outcome in ("differ", "failed") and not known(one.name, recipe)
    ]
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
