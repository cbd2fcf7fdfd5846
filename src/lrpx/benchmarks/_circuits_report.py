"""What a run of ``circuits`` has found: CPR and CMD, with intervals over the pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lrpx._views.picture import one_line
from lrpx.benchmarks._curves import COLOURS
from lrpx.benchmarks._pairs_report import Grid, Report, drawn
from lrpx.benchmarks._report import figure
from lrpx.benchmarks._summary import described, select
from lrpx.errors import InputError
from lrpx.metrics import Metric
from lrpx.metrics._perturbation import is_more
from lrpx.metrics._statistics import RESAMPLES

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from lrpx.runs import Store

TITLE: Final = "How much of the model is in the best edges?"
FRACTIONS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of the edges, in a circuit (Mueller et al. 2025); the number is rounded down, as their code does."""


def recovery(circuits: ArrayLike, full: ArrayLike, empty: ArrayLike) -> NDArray[np.float64]:
    """``f = (m(circuit) − m(∅)) / (m(full) − m(∅))``, each ``m`` the mean over the samples.

    Args:
        circuits: ``[N, F]``, the value of each sample in each circuit.
        full: ``[N]``, in the whole model.
        empty: ``[N]``, without any edge.

    Raises:
        InputError: the whole model and no edge have the same mean value, but for rounding, so that there is nothing to
            divide by.

    >>> recovery([[1.0, 2.0]], [3.0], [1.0]).tolist()
    [0.0, 0.5]
    """
    least = float(np.mean(np.asarray(empty, dtype=np.float64)))
    between = float(np.mean(np.asarray(full, dtype=np.float64))) - least
    if not is_more(abs(between), least):
        raise InputError("the clean and the corrupt prompts have the same mean value, so nothing can be recovered")
    found: NDArray[np.float64] = (np.asarray(circuits, dtype=np.float64).mean(0) - least) / between
    return found


def cpr(curve: ArrayLike) -> float:
    """``∫ f`` over the fractions of the edges, by trapezoids; larger is better, and a whole model's is 0.999."""
    return float(np.trapezoid(np.asarray(curve), FRACTIONS))


def cmd(curve: ArrayLike) -> float:
    """``∫ |1 − f|``, likewise; 0 is a circuit that says what the model says, at every size."""
    return float(np.trapezoid(np.abs(1 - np.asarray(curve)), FRACTIONS))


METRICS: Final = {
    each.name: each
    for each in (
        Metric("CPR", "area below the recovered share f, over the share of edges.", -np.inf, np.inf, "higher", cpr),
        Metric("CMD", "area between f and 1.", 0.0, np.inf, "lower", cmd),
    )
}


def summarised(store: Store) -> Report:
    """The report of a run.

    Raises:
        ResultFileError: the folder holds no readable run.
        MissingExtraError: matplotlib is not installed.
    """
    model, methods, metrics = described(store)
    labels = {name: one_line(label) for name, label in store.record["labels"].items()}
    rows = select(store, ["value", "corrupt value", "edges", *(f"circuits/{method}" for method in methods)])
    full, empty = rows["value"].to_numpy(), rows["corrupt value"].to_numpy()
    values = {method: np.array(rows[f"circuits/{method}"].to_list()) for method in methods}
    edges = int(rows["edges"][0])
    lead = (
        f"{model}: {edges:,} edges, {len(rows):,} pairs. Mean value of the whole model {figure(float(full.mean()))}, "
        f"without any edge {figure(float(empty.mean()))}."
    )
    draws = np.random.default_rng(0).integers(len(rows), size=(RESAMPLES, len(rows)))
    known = [METRICS[each.name] for each in metrics]
    table = [(labels[name], [_cell(each, values[name], full, empty, draws) for each in known]) for name in methods]
    captions = " ".join(f"{each.name}: {each.caption}" for each in known)
    grids = [
        Grid(
            "CPR and CMD",
            [f"{each.name} {each.arrow}" for each in known],
            table,
            f"{captions} In brackets the bootstrap 95 % interval over the pairs.",
        )
    ]
    curves = {name: recovery(values[name], full, empty) for name in methods}
    shares = [f"{100 * each:g} %" for each in FRACTIONS]
    rows_of = [(labels[name], [figure(float(each)) for each in curve]) for name, curve in curves.items()]
    note = f"Of {edges:,} edges: " + ", ".join(f"{int(each * edges):,}" for each in FRACTIONS) + "."
    grids.append(Grid("The recovered share f", shares, rows_of, note, wide=True))

    def draw(axes: Any) -> None:
        panel = axes[0][0]
        for number, (name, curve) in enumerate(curves.items()):
            style = "-" if number < len(COLOURS) else "--"
            panel.plot(FRACTIONS, curve, style, color=COLOURS[number % len(COLOURS)][0], label=labels[name], marker=".")
        panel.axhline(1, color="#999999", lw=0.5)
        panel.set_xscale("log")
        panel.set_xlabel("share of the edges")
        panel.set_ylabel("recovered share f")
        panel.legend(frameon=False)

    return Report(TITLE, lead, grids, drawn(1, 1, (5.5, 3.6), draw), "curves.png", "f over the share of edges")


def _cell(metric: Metric, circuits: Any, full: Any, empty: Any, draws: Any) -> str:
    value = metric(recovery(circuits, full, empty))
    means = ((each, full[each].mean(), empty[each].mean()) for each in draws)
    there = [each for each, whole, least in means if is_more(abs(whole - least), least)]
    found = [metric(recovery(circuits[each], full[each], empty[each])) for each in there]
    low, high = np.quantile(found, (0.025, 0.975))
    return f"{figure(value)} [{figure(float(low))}, {figure(float(high))}]"
