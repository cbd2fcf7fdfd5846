"""Which rules explain an image classifier best? A search over composites: a rule for each kind of layer.

As Achtibat et al. 2024, App. B.4: ε, z⁺, αβ and γ at convolutions, at linear layers, and at the projections into
attention and out of it; every combination explains the same images, and the one with the largest mean
``ΔA = A_LeRF − A_MoRF`` wins. It must then be measured on other images, for the best of many numbers is too good on
those that it was chosen by.

A search is a run of the benchmark ``pixels`` whose methods are the combinations, so it is kept in a folder, and goes on
there, as any run is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from lrpx.benchmarks._panels import png, sheet
from lrpx.errors import MethodError
from lrpx.methods import Backward
from lrpx.methods import find as find_method
from lrpx.rules import AlphaBeta, Epsilon, Gamma, ZPlus
from lrpx.tuning import Tuned, searched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from lrpx.benchmarks import Benchmark
    from lrpx.model import BoundModel
    from lrpx.rules import Rule

__all__ = ["GRID", "composites", "plotted", "rule", "search"]

METRIC: Final = "ΔA"
PART: Final = 8
"""Images in a part, each of which is explained with every combination."""
KINDS: Final = ("convolution", "linear", "input_projection", "output_projection")
"""Layers of Table 4."""
GRID: Final[Mapping[str, Sequence[str]]] = {
    "convolution": ("epsilon", "gamma:0.25", "zplus"),
    "linear": ("epsilon", "gamma:0.05", "gamma:0.25", "gamma:1", "zplus", "alphabeta:2"),
    "input_projection": ("epsilon", "gamma:0.25"),
    "output_projection": ("epsilon", "gamma:0.25"),
}
"""What is tried when nobody says."""


def rule(text: str) -> Rule:
    """A rule by its name: ``epsilon``, ``zplus``, ``gamma:0.25`` (γ), ``alphabeta:2`` (α; β is one less).

    Raises:
        MethodError: there is no such rule.

    >>> rule("gamma:0.25"), rule("alphabeta:2")
    (Gamma(gamma=0.25), AlphaBeta(alpha=2.0, beta=1.0))
    """
    name, colon, given = text.partition(":")
    try:
        if name in ("epsilon", "zplus") and not colon:
            return Epsilon() if name == "epsilon" else ZPlus()
        if name == "gamma" and math.isfinite(float(given)):
            return Gamma(float(given))
        if name == "alphabeta" and math.isfinite(float(given)):
            return AlphaBeta(float(given), float(given) - 1.0)
    except ValueError:
        pass
    raise MethodError(f"there is no rule {text!r}; write epsilon, zplus, gamma:0.25 or alphabeta:2")


def composites(method: Any, grid: Mapping[str, Sequence[str]] | None = None) -> list[tuple[dict[str, str], Backward]]:
    """Every combination of rules, with its method.

    Args:
        method: of the LRP family, as :func:`lrpx.methods.find` takes it: what has no rule in the grid keeps its own.
        grid: for some of :data:`KINDS` the rules that are tried; :data:`GRID` when None.

    Raises:
        MethodError: it is no such method, it has a rule for a kind of the grid in some modules alone, or there is no
            such kind or rule.

    >>> [made.name for _, made in composites("attnlrp", {"linear": ["epsilon", "gamma:0.25"]})]
    ['attnlrp linear=epsilon', 'attnlrp linear=gamma:0.25']
    """
    base = find_method(method)
    if not isinstance(base, Backward) or not base.recipe.has_rules():
        raise MethodError(f"{base.name} has no rules for layers; search composites of attnlrp or lrp, or of a recipe")
    chosen = GRID if grid is None else grid
    wrong = next((kind for kind in chosen if kind not in KINDS), None)
    if wrong is not None or not chosen:
        raise MethodError(f"there is no kind of layer {wrong!r}; the kinds are {', '.join(KINDS)}")
    twice = next((kind for kind, rules in chosen.items() if not rules or len(set(rules)) < len(rules)), None)
    if twice is not None:
        raise MethodError(f"the rules of {twice} are {', '.join(chosen[twice]) or 'none'}; name each once")
    for each in base.recipe.overrides:
        held = next((kind for kind, _ in each.rules if kind in chosen), None)
        if held is not None:
            raise MethodError(
                f"{base.name} has a rule for {held} in some modules ({each.where}), which none of the grid's would "
                "reach; search composites of a recipe without it, or leave that kind out of the grid"
            )
    found = []
    for rules in product(*chosen.values()):
        settings = dict(zip(chosen, rules, strict=True))
        name = " ".join([base.name, *(f"{kind}={each}" for kind, each in settings.items())])
        changed: dict[str, Any] = {kind: rule(each) for kind, each in settings.items()}
        recipe = replace(base.recipe, name=name, **changed)
        found.append((settings, replace(base, name=name, recipe=recipe, label="")))
    return found


def search(
    model: BoundModel,
    benchmark: Benchmark[Any],
    method: Any = "attnlrp",
    grid: Mapping[str, Sequence[str]] | None = None,
    *,
    folder: str | Path,
    command: str = "",
    batch_size: int = 32,
    part: int = PART,
    done: Callable[[int], object] = lambda _: None,
) -> Tuned:
    """Search a grid of rules for the largest mean ΔA.

    Args:
        model: the model.
        benchmark: the images, and how they are covered: ``lrpx.benchmarks.find("pixels")(data=path, last=16)`` searches
            on the last 16, so that the others are there to measure by.
        method: as :func:`composites` takes it.
        grid: likewise.
        folder: keep everything there; a search that was stopped goes on there.
        command: how the search was asked for, for the folder's record.
        batch_size: the most images that run together.
        part: images in a part; a search that is stopped loses the part in work.
        done: called with how many more images are done.

    Raises:
        MethodError: there is no such method, kind or rule.
        DataError, ModelError, InputError: the images or the model do not fit.
        ResultFileError: the folder cannot be written, or holds another search.
    """
    found = composites(method, grid)
    how: dict[str, Any] = {"folder": folder, "command": command, "batch_size": batch_size, "part": part, "done": done}
    return searched(model, benchmark, found, METRIC, METRIC, **how)


def plotted(found: Tuned, title: str) -> bytes:
    """The whole grid as a PNG: for each kind of layer, the ΔA of every composite over its rule, and their mean.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    kinds = list(found.tried[0].settings)
    with sheet((2.6 * len(kinds) + 0.8, 3.6), 160, "a grid as a picture needs") as figure:
        axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for kind, panel in zip(kinds, axes, strict=True):
            rules = list(dict.fromkeys(each.settings[kind] for each in found.tried))
            for place, name in enumerate(rules):
                means = [each.mean for each in found.tried if each.settings[kind] == name]
                panel.plot([place] * len(means), means, "o", color="#30638e", alpha=0.45, markersize=4)
                panel.plot([place - 0.3, place + 0.3], [sum(means) / len(means)] * 2, color="#d1495b")
            panel.plot([rules.index(found.best.settings[kind])], [found.best.mean], "*", color="#d1495b", markersize=11)
            panel.set_xticks(range(len(rules)), rules, rotation=40, ha="right")
            panel.set_title(kind.replace("_", " "))
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25, linewidth=0.5)
        axes[0].set_ylabel("mean ΔA")
        figure.suptitle(title, fontsize=10)
        return png(figure)
