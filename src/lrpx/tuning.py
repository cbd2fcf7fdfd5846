"""Which settings of a method are best? A search over a grid, on a held-out part of one's own texts.

As Achtibat et al. 2024, App. B.3: every combination of the grid explains the same values of the same texts, and the one
with the largest mean ``ΔA = A_LeRF − A_MoRF`` wins. It must then be measured on other texts, for the best of many
numbers is too good on those that it was chosen by.

A search is a run of the benchmark ``faithfulness`` whose methods are the combinations, so it is kept in a folder, and
goes on there, as any run is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final

from lrpx._kinds import KINDS, PLACES
from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._faithfulness import Faithfulness
from lrpx.errors import InputError, MethodError
from lrpx.methods import (
    AtMan,
    Backward,
    GradientRollout,
    GradientShap,
    InformationFlow,
    IntegratedGradients,
    KernelShap,
    Rollout,
    SmoothGrad,
)
from lrpx.methods import find as find_method
from lrpx.methods._method_files import with_settings, write
from lrpx.rules import Gamma
from lrpx.runs import read_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from lrpx.benchmarks import Benchmark
    from lrpx.methods import Method
    from lrpx.model import BoundModel

__all__ = ["GRIDS", "Tried", "Tuned", "candidates", "tune"]

METRIC: Final = "ΔA flipping"
"""What is searched by (Achtibat et al. 2024, App. B.2, B.3)."""
PART: Final = 8
"""Texts in a part, each of which is explained with every combination."""

_DISCARD: Final = {"discard": (0.0, 0.5, 0.8, 0.9, 0.95), "outliers": ("lowest", "highest")}
GRIDS: Final[Mapping[type, Mapping[str, Sequence[Any]]]] = {
    SmoothGrad: {"sigma": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)},
    IntegratedGradients: {"steps": (10, 20, 50, 100)},
    GradientShap: {"sigma": (0.0, 0.02, 0.1)},
    KernelShap: {"n_samples": (64, 256, 1024)},
    Rollout: _DISCARD,
    GradientRollout: _DISCARD,
    AtMan: {"suppression": (0.1, 0.3, 0.5, 0.7, 0.9, 1.0), "threshold": (None, 0.5, 0.8)},
    InformationFlow: {"threshold": (0.0, 0.005, 0.01, 0.02, 0.04)},
    Backward: {"gamma": (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)},
}
"""What is tried of a method of each class when nobody says; ``gamma`` is the γ of every γ rule of a recipe."""


@dataclass(frozen=True)
class Tried:
    """One combination of settings.

    Args:
        method: the method with these settings.
        settings: what was set.
        scores: ΔA on each text, in their order.
    """

    method: Method
    settings: Mapping[str, Any]
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of the scores."""
        return fmean(self.scores)

    @property
    def error(self) -> float:
        """Its standard error; NaN of a single text."""
        return stdev(self.scores) / math.sqrt(len(self.scores)) if len(self.scores) > 1 else math.nan


@dataclass(frozen=True)
class Tuned:
    """What a search has found.

    Args:
        tried: every combination, in the order of the grid.
        ids: the texts that it was searched on.
        others: how many texts stand before them, which were not asked about.
    """

    tried: tuple[Tried, ...]
    ids: tuple[str, ...]
    others: int = 0

    @property
    def best(self) -> Tried:
        """The combination of the largest mean; the first of equals."""
        return max(self.tried, key=lambda each: each.mean)

    def save(self, path: str | Path) -> None:
        """Write the best method as a JSON file, which goes wherever a method's name goes.

        Raises:
            MethodError: it cannot be written as one.
            ResultFileError: the folder is missing or cannot be written to.
        """
        write(self.best.method, path)


def candidates(method: Any, grid: Mapping[str, Sequence[Any]] | None = None) -> list[tuple[dict[str, Any], Method]]:
    """Every combination of settings, with its method.

    Args:
        method: as :func:`lrpx.methods.find` takes it.
        grid: for each setting the values that are tried; that of :data:`GRIDS` when None.

    Raises:
        MethodError: there is no such method or setting, or nothing to search.

    >>> [made.name for _, made in candidates("rollout", {"fusion": ["mean", "max"]})]
    ['rollout fusion=mean', 'rollout fusion=max']
    """
    base = find_method(method)
    chosen = next((each for kind, each in GRIDS.items() if type(base) is kind), {}) if grid is None else grid
    if not chosen or not all(chosen.values()):
        raise MethodError(
            f"there is no grid for {base.name}; name a setting and its values: grid={{'sigma': [0.1, 0.2]}}"
        )
    found = []
    for values in product(*chosen.values()):
        settings = dict(zip(chosen, values, strict=True))
        name = " ".join([base.name, *(f"{key}={value}" for key, value in settings.items())])
        if isinstance(base, Backward):
            found.append((settings, _with_gamma(base, name, settings)))
        else:
            found.append((settings, with_settings(base, name, settings)))
    names = [made.name for _, made in found]
    if len(set(names)) < len(names):
        raise MethodError(f"the grid of {base.name} has a value twice; name each once")
    return found


def tune(
    model: BoundModel,
    benchmark: Benchmark[Any],
    method: Any,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    folder: str | Path | None = None,
    command: str = "",
    batch_size: int = 32,
    part: int = PART,
    done: Callable[[int], object] = lambda _: None,
) -> Tuned:
    """Search a grid of settings for the largest mean ΔA.

    Args:
        model: the model.
        benchmark: the texts, and how their tokens are hidden: ``lrpx.benchmarks.find("faithfulness")(data=path,
            last=64)`` searches on the last 64, so that the others are there to measure by.
        method: as :func:`lrpx.methods.find` takes it.
        grid: for each setting the values that are tried; that of :data:`GRIDS` when None.
        folder: keep everything there; a search that was stopped goes on there. Nothing is kept when None.
        command: how the search was asked for, for the folder's record.
        batch_size: the most texts that run together.
        part: texts in a part; a search that is stopped loses the part in work.
        done: called with how many more texts are done.

    Raises:
        MethodError: there is no such method or setting, or one does not serve the model.
        InputError: no text is left, or tokens are hidden or values read in several ways.
        DataError, ModelError: the texts or the model do not fit.
        ResultFileError: the folder cannot be written, or holds another search.
    """
    found = candidates(method, grid)
    if isinstance(benchmark, Faithfulness) and benchmark.read_out is None:
        benchmark = replace(benchmark, read_out="logit")  # of a language model it would be two numbers
    how: dict[str, Any] = {"folder": folder, "command": command, "batch_size": batch_size, "part": part, "done": done}
    return searched(model, benchmark, found, METRIC, column_of(benchmark), **how)


def searched(
    model: BoundModel,
    benchmark: Benchmark[Any],
    found: Sequence[tuple[Mapping[str, Any], Method]],
    metric: str,
    column: str,
    *,
    folder: str | Path | None,
    command: str,
    batch_size: int,
    part: int,
    done: Callable[[int], object],
) -> Tuned:
    """What a metric, in its column of the run, says of combinations of settings and their methods.

    Args:
        found: the combinations, as :func:`candidates` gives them.
        model, benchmark, folder, command, batch_size, part, done: as :func:`tune` has them.
    """
    run = Run(benchmark, model, [made for _, made in found], [metric], batch_size=batch_size, part=part)
    every = [row for table in _tables(run, folder, command, done) for row in table.to_pylist()]
    tried = [Tried(made, settings, tuple(row[f"{column}/{made.name}"] for row in every)) for settings, made in found]
    read = next(iter(run.source.notes["counts"].values()))  # how many texts or images there are in all
    return Tuned(tuple(tried), tuple(row["id"] for row in every), read - len(run.source.rows))


def column_of(benchmark: Benchmark[Any]) -> str:
    """The number that a search is by, as the benchmark calls it.

    Raises:
        InputError: there are several, for tokens are hidden or values read in several ways.
    """
    found = [each.name for each in benchmark.variants([benchmark.metrics[METRIC]])]  # type: ignore[attr-defined]
    if len(found) != 1:
        raise InputError(f"a search is by one number, not by {', '.join(found)}; name one perturbation and read-out")
    return str(found[0])


def _tables(run: Run, folder: str | Path | None, command: str, done: Callable[[int], object]) -> list[pa.Table]:
    """The rows of all parts, those that a folder has taken from there."""
    if folder is None:
        return [run.part(number, done) for number in range(run.parts)]
    with keep(run, Path(folder), command) as kept:
        kept.explain(done)
        return [read_columns(path) for path in kept.store.checked_parts()]


def _with_gamma(method: Backward, name: str, settings: Mapping[str, Any]) -> Method:
    """A recipe with another γ in all of its γ rules."""
    if set(settings) != {"gamma"}:
        wrong = next(each for each in settings if each != "gamma")
        raise MethodError(f"of a recipe only gamma can be searched, not {wrong!r}; write a recipe for each")
    recipe, new = method.recipe, Gamma(settings["gamma"])
    kinds: dict[str, Any] = {kind: new for kind in (*KINDS, *PLACES) if isinstance(recipe.rule(kind), Gamma)}
    overrides = tuple(
        replace(each, rules=tuple((kind, new if isinstance(rule, Gamma) else rule) for kind, rule in each.rules))
        for each in recipe.overrides
    )
    if not kinds and not any(isinstance(rule, Gamma) for each in recipe.overrides for _, rule in each.rules):
        raise MethodError(
            f"{method.name} has no γ rule to search; save a recipe with one, such as "
            "lrpx.ATTNLRP.at('*.mlp', linear=lrpx.Gamma(0.25)), and name its file"
        )
    return replace(method, name=name, recipe=replace(recipe, name=name, overrides=overrides, **kinds), label="")
