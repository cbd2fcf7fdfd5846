"""The numbers and the reports of a run about images: tables, curves, and one page with heatmaps over the images."""

from __future__ import annotations

import base64
import io
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lrpx._images import Patches
from lrpx._views.canvas import Canvas, Layer, uri
from lrpx.benchmarks._faithful_report import SHOWN, _context, terminal, write_files
from lrpx.benchmarks._faithful_summary import ORDERS, Described, Summary, Variant, adjusted, recorded, score, tabulated
from lrpx.benchmarks._keeping import check_shown
from lrpx.benchmarks._summary import Score, select
from lrpx.metrics import Metric, PerturbationMetric, SetMetric
from lrpx.metrics._statistics import RESAMPLES, swap_test

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from lrpx.runs import Store

__all__ = ["summarise", "terminal", "write_reports"]

LEDGER: Final = "completeness error by the ledger"
"""What the column is called of how far a method's ledger is from adding up to the explained value."""
TOLD: Final = (
    "how far the ledger is from adding up to the explained value, 0 where it does; methods in other units have none."
)
CELLS: Final = "{cells}"
"""In a caption, what is covered."""


def summarise(store: Store, known: Mapping[str, Metric]) -> Summary:
    """Read a run's rows and compute its tables.

    Args:
        store: the run's folder.
        known: the benchmark's metrics, for those that are of a whole set.

    Raises:
        ResultFileError: the folder holds no readable run of this kind, or no rows.
    """
    described = _described(store, known)
    _, methods, found = described
    curves = "cells" in store.settings
    columns = [f"{each.name}/{method}" for each in found for method in methods]
    drawn = [f"curve {order}/{method}" for order in ORDERS for method in methods] if curves else []
    rows = select(store, ["correct", *columns, *drawn])
    values: dict[str, dict[str, NDArray[np.float64] | None]] = {}
    scores: dict[str, dict[str, Score | None]] = {}
    of_sets: dict[str, dict[tuple[str, str], float]] = {}
    for each in found:
        table = {method: rows[f"{each.name}/{method}"] for method in methods}
        metric = each.metric
        if isinstance(metric, SetMetric):
            counts = {method: np.array(column.to_list()) for method, column in table.items()}
            values[each.name] = {m: np.array([metric(row) for row in every]) for m, every in counts.items()}
            scores[each.name] = {m: of_set(metric, every) for m, every in counts.items()}
            of_sets[each.name] = adjusted(counts, partial(swap_test, measure=metric.measure))
        else:
            values[each.name] = {method: column.to_numpy() for method, column in table.items()}
            scores[each.name] = {m: score(every) for m, every in values[each.name].items()}
    curve_of = str(store.settings.get("fill", "")), str(store.settings.get("read_out", ""))
    return tabulated(store, described, rows, values, scores, ORDERS if curves else (), curve_of, of_sets)


def of_set(metric: SetMetric, counts: NDArray[np.float64]) -> Score:
    """A metric of counts ``[N, K]`` summed over the set, with the percentile bootstrap over its images.

    >>> from lrpx.metrics import IMAGE_METRICS
    >>> of_set(IMAGE_METRICS["pixel accuracy"], np.array([[1.0, 1.0, 0.0, 2.0]] * 3))
    Score(mean=0.75, low=0.75, high=0.75)
    """
    draw = np.random.default_rng(0)
    drawn = [metric(counts[draw.integers(len(counts), size=len(counts))].sum(0)) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Score(metric(counts.sum(0)), float(low), float(high))


def write_reports(store: Store, title: str, known: Mapping[str, Metric], *, show: Sequence[str] = ()) -> Summary:
    """Write ``table.md``, ``report.html`` and, where there are curves, ``curves.png``, each as a whole.

    Args:
        store: the run's folder.
        title: the headline.
        known: the benchmark's metrics.
        show: ids of samples to show as heatmaps; the first few where none is given.

    Raises:
        InputError: an id is of no sample.
        ResultFileError: the folder holds no readable run, or a file cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    found = summarise(store, known)
    noun = str(store.settings.get("cells", "pixels"))
    context = _context(found, store.record, title, noun) | {"heatmaps": _heatmaps(store, found.methods, show)}
    context["captions"] = [(name, caption.replace(CELLS, noun)) for name, caption in context["captions"]]
    ledgers = _ledgers(store, found.methods)
    if ledgers:
        context["extra"] = [(LEDGER, {name: f"{value:.1g}" for name, value in ledgers.items()})]
        context["captions"].append((LEDGER, TOLD))
    write_files(store, found, context, "pixels.html.j2", sheets=("pixels.css.j2",))
    return found


# ------------------------------------------------------------------------------------------------ below: pieces


def _described(store: Store, known: Mapping[str, Metric]) -> Described:
    def variants(settings: Mapping[str, Any]) -> list[Variant]:
        found = []
        for each in settings["metrics"]:
            mine = known.get(each["name"])
            metric = mine if isinstance(mine, SetMetric) else PerturbationMetric.read(each)
            way = f"{settings['cells']} covered by {settings['fill']}" if each.get("reads") is not None else "as it is"
            read = each.get("reads") or settings.get("read_out", "relevance")
            found.append(Variant(metric.name, metric, way, str(read if "reads" in each else "relevance")))  # type: ignore[arg-type]
        return found

    return recorded(store, "about images", variants)


def _ledgers(store: Store, methods: Sequence[str]) -> dict[str, float]:
    """The mean of each method that has ledgers; nothing in a run of mosaics, which have none."""
    if "cells" not in store.settings:
        return {}
    rows = select(store, [f"{LEDGER}/{method}" for method in methods])
    means = {method: rows[f"{LEDGER}/{method}"].mean() for method in methods}
    return {method: float(mean) for method, mean in means.items() if isinstance(mean, float)}


def _heatmaps(store: Store, methods: Sequence[str], show: Sequence[str]) -> list[dict[str, Any]]:
    """The samples asked for, or the first few, as every method explains them."""
    ids = select(store, ["id"])["id"].to_list()
    check_shown(show, ids, store.folder)
    wanted = list(dict.fromkeys(show)) or ids[:SHOWN]
    columns = ["id", "explained", "value", "image", "grid", *(f"relevance/{method}" for method in methods)]
    columns += [f"{LEDGER}/{method}" for method in methods if "cells" in store.settings]
    rows = {row["id"]: row for row in select(store, columns, ids=wanted).iter_rows(named=True)}
    return [
        {
            "id": name,
            "told": rows[name]["explained"].split("; ")[0],
            "value": rows[name]["value"],
            "image": _address(rows[name]["image"]),
            "maps": [
                (
                    method,
                    overlay(rows[name]["image"], rows[name][f"relevance/{method}"], rows[name]["grid"]),
                    rows[name].get(f"{LEDGER}/{method}"),
                )
                for method in methods
            ],
        }
        for name in wanted
    ]


def overlay(image: bytes, relevance: Sequence[float], grid: Sequence[int]) -> str:
    """A heatmap over an image in pale grey, as a PNG in a URI.

    Args:
        image: a PNG.
        relevance: of the cells, in reading order.
        grid: how many rows and columns of cells there are, and how many pixels high and wide each is.
    """
    from PIL import Image

    with Image.open(io.BytesIO(image)) as opened:
        behind = torch.from_numpy(np.array(opened.convert("RGB")))
    place = Patches(*grid).places(*behind.shape[:2])
    values = torch.tensor(relevance, dtype=torch.float64)
    limit = float(values.abs().max()) or 1.0
    ratios = torch.where(place >= 0, values[place.clamp(min=0)] / limit, 0.0)
    layer = Layer("patches", ratios, limit, (), 0.0, 0.0, 0.0, 0.0, None, "")
    return uri(Canvas(behind, (layer,)).over(layer))


def _address(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()
