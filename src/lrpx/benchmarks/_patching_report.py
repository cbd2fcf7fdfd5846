"""What a run of ``patching`` has found: how well each method's scores agree with exact patching, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lrpx._views.picture import one_line
from lrpx.benchmarks._pairs_report import Grid, Report, cell, drawn
from lrpx.benchmarks._report import figure
from lrpx.benchmarks._summary import described, select
from lrpx.metrics._perturbation import NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lrpx.metrics import Metric
    from lrpx.runs import Store

TITLE = "Which method says what patching would do?"


def summarised(store: Store, kinds: Sequence[str]) -> Report:
    """The report of a run.

    Args:
        store: its folder.
        kinds: the kinds of parts.

    Raises:
        ResultFileError: the folder holds no readable run.
        MissingExtraError: matplotlib is not installed.
    """
    model, methods, metrics = described(store)
    labels = {name: one_line(label) for name, label in store.record["labels"].items()}
    named = [f"{metric.name}/{kind}/{method}" for metric in metrics for kind in kinds for method in methods]
    lists = [f"exact/{kind}" for kind in kinds] + [f"score/{kind}/{method}" for kind in kinds for method in methods]
    rows = select(store, ["value", "corrupt value", *named, *lists])
    right = int((rows["value"] > 0).sum())
    lead = (
        f"{model}: {len(rows):,} pairs; it prefers the right answer in {right:,}. Mean of the explained value "
        f"{figure(float(rows['value'].to_numpy().mean()))}, of the corrupt prompts "
        f"{figure(float(rows['corrupt value'].to_numpy().mean()))}."
    )
    grids = [_grid(rows, metric, kinds, methods, labels) for metric in metrics]
    pooled = {name: np.concatenate([np.array(each) for each in rows[name].to_list()]) for name in lists}
    note = (
        "Pearson's correlation over the parts of all pairs at once, which also asks whether scores are right from pair "
        "to pair."
    )
    cells = {
        method: [_pearson(pooled[f"score/{kind}/{method}"], pooled[f"exact/{kind}"]) for kind in kinds]
        for method in methods
    }
    grids.append(Grid("All pairs together", kinds, [(labels[name], each) for name, each in cells.items()], note))

    def draw(axes: Any) -> None:
        for method, line in zip(methods, axes, strict=True):
            for kind, panel in zip(kinds, line, strict=True):
                panel.plot(pooled[f"exact/{kind}"], pooled[f"score/{kind}/{method}"], ".", ms=1.5, alpha=0.5)
                panel.axline((0, 0), slope=1, color="#999999", lw=0.5)
                panel.set_title(f"{labels[method]}: {kind}", fontsize=7)

    picture = drawn(len(methods), len(kinds), (1.9, 1.7), draw)
    pictured = "For each method and kind of parts: its scores (upright) against exact patching (across)"
    return Report(TITLE, lead, grids, picture, "scatter.png", pictured)


def _grid(rows: Any, metric: Metric, kinds: Sequence[str], methods: Sequence[str], labels: dict[str, str]) -> Grid:
    values = {method: [rows[f"{metric.name}/{kind}/{method}"].to_list() for kind in kinds] for method in methods}
    table = [(labels[method], [*map(cell, of_kinds)]) for method, of_kinds in values.items()]
    note = f"{metric.name}: {metric.caption} Mean over the pairs with its bootstrap 95 % interval."
    if any(None in each for of_kinds in values.values() for each in of_kinds):
        note += " A pair whose parts do all the same, or have one score, has none: then of fewer pairs."
    return Grid(metric.name, kinds, table, note)


def varies(values: NDArray[np.float64]) -> bool:
    """Whether numbers differ by more than rounding; else they order nothing, and correlate with nothing."""
    return bool(np.ptp(values) > NOTHING * np.abs(values).max())


def _pearson(scores: NDArray[np.float64], truth: NDArray[np.float64]) -> str:
    return "none" if not (varies(scores) and varies(truth)) else figure(float(np.corrcoef(scores, truth)[0, 1]))
