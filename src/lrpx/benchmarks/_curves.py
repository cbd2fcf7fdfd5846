"""The curves of a run that hides tokens: as lines of SVG for its page, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lrpx._views.colour import INK, QUIET, hexadecimal
from lrpx.benchmarks._panels import png, sheet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH: Final = 640
HEIGHT: Final = 360
"""Of a panel's lines, in its own units."""
COLOURS: Final = (
    ("#d1495b", "#ff8a98"), ("#00798c", "#4fc3d5"), ("#b8860b", "#edc34f"), ("#30638e", "#7fb4e3"),
    ("#6a994e", "#a6d686"), ("#7b2d8b", "#cf8ade"), ("#3d3d3d", "#d9d9d9"), ("#c76b00", "#ffab57"),
    ("#1d8a5f", "#63d6aa"), ("#8d6e63", "#cbb0a6"),
)  # fmt: skip
"""Of the methods, light and dark; then again, with the line broken."""
DASHES: Final = ("", "8 4", "2 4", "10 3 2 3")
TITLES: Final = {"most": "Most relevant {} hidden first", "least": "Least relevant {} hidden first"}
GOOD: Final = {"most": "a line that falls early is good", "least": "a line that stays up is good"}


@dataclass(frozen=True)
class Line:
    """A method's curve in a panel.

    Args:
        method: the method.
        number: its place in the run.
        path: what ``points`` of an SVG polyline takes.
        points: each with its share of hidden tokens in per cent and its value.
    """

    method: str
    number: int
    path: str
    points: tuple[tuple[float, float, int, float], ...]


@dataclass(frozen=True)
class Panel:
    """The curves of one order.

    Args:
        title, good: what it shows, and which line is good.
        lines: of each method.
        low, high: the values at the bottom and the top.
    """

    title: str
    good: str
    lines: tuple[Line, ...]
    low: float
    high: float


def panels(curves: Mapping[str, Mapping[str, Sequence[float]]], noun: str = "tokens") -> list[Panel]:
    """The curves ``[order][method]`` as lines, both panels on one scale; none where there are none."""
    if not curves:
        return []
    every = [value for table in curves.values() for line in table.values() for value in line]
    low, high = min(every), max(every)
    size = high - low or 1.0
    low, high = low - 0.05 * size, high + 0.05 * size
    found = []
    for order, table in curves.items():
        lines = []
        for number, (method, values) in enumerate(table.items()):
            last = max(len(values) - 1, 1)
            points = tuple(
                (round(WIDTH * i / last, 1), round(HEIGHT * (high - v) / (high - low), 1), round(100 * i / last), v)
                for i, v in enumerate(values)
            )
            path = " ".join(f"{x:g},{y:g}" for x, y, _, _ in points)
            lines.append(Line(method, number, path, points))
        found.append(Panel(TITLES[order].format(noun), GOOD[order], tuple(lines), low, high))
    return found


def picture(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    labels: Mapping[str, str],
    value: str,
    title: str,
    noun: str = "tokens",
) -> bytes:
    """The same as a PNG file, whatever matplotlib's settings are; no text in it is read as mathematics.

    Args:
        curves: ``[order][method]``.
        labels: how the methods are spelled.
        value: what the axis is of.
        title: of the picture.
        noun: what is hidden.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with sheet((9.0, 4.2), 200, "curves as a picture need") as figure:
        axes = figure.subplots(1, len(curves), sharey=True)
        for order, panel in zip(curves, axes, strict=True):
            for number, (method, values) in enumerate(curves[order].items()):
                style = ("-", "--", ":", "-.")[number // len(COLOURS) % len(DASHES)]
                shares = [100 * i / max(len(values) - 1, 1) for i in range(len(values))]
                name = labels[method]
                shown = name if not name.startswith("_") else f" {name}"  # which matplotlib would leave out
                panel.plot(shares, values, style, color=COLOURS[number % len(COLOURS)][0], label=shown, linewidth=1.4)
            panel.set_title(f"{TITLES[order].format(noun)}\n{GOOD[order]}", color=hexadecimal(INK[False]), fontsize=9)
            panel.set_xlabel(f"hidden {noun}, %", color=hexadecimal(QUIET[False]))
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25, linewidth=0.5)
        axes[0].set_ylabel(value, color=hexadecimal(QUIET[False]))
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(4, max(1, len(names))), frameon=False)
        figure.suptitle(title, fontsize=10)
        return png(figure)
