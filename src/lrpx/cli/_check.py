"""``lrpx check``: sanity checks of methods on a model, as a page."""

from __future__ import annotations

import io
from html import escape as html_escape
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress import Progress
from rich.text import Text

from lrpx import sanity
from lrpx._files import write_text
from lrpx._views.picture import one_line
from lrpx.benchmarks._pieces import Pieces
from lrpx.cli._streams import hush, progress, read_column
from lrpx.methods import find
from lrpx.methods._contract import check_each_once
from lrpx.model import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

TEXTS = (
    "The doors of the old house at the end of the street",
    "The keys to the cabinet that stands in the hall",
    "What a lovely film, and what a terrible ending!",
    "The author that the critics admire has written a new book",
    "A slow and tiresome story without a single idea of its own",
    "The children who live near the river swim every day",
    "It is a warm, funny and engaging picture",
    "The friend of the girls from the village said that he",
)
"""Explained where no texts are given."""
WIDTH = 108
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>TITLE</title>
</head>
<body style="color:{foreground};background-color:{background}">
<main tabindex="0" aria-label="TITLE" style="overflow-x:auto">
<h1 style="font:bold 1.2em sans-serif">TITLE</h1>
<pre style="font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace">{code}</pre>
</main>
</body>
</html>
"""
"""The page, as rich fills it in; what is wider than the screen is moved inside it."""


def check(
    model: str | None,
    methods: Sequence[str],
    texts: Path | None,
    limit: int,
    seed: int,
    device: str | None,
    dtype: str,
    html: Path | None,
) -> None:
    """Check, show the page, and keep it in the file that was named.

    Raises:
        LRPxError: something cannot be checked.
    """
    chosen = [find(method) for method in dict.fromkeys(methods)]
    check_each_once(chosen)
    given = TEXTS[:limit] if texts is None else read_column(texts, limit)
    with progress("Loading the model …"):
        hush()
        bound = Spec(model, dtype, device).build()
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("Checking", total=sanity.steps(bound, chosen))
        found = sanity.check(bound, given, chosen, seed=seed, done=lambda more: bar.advance(task, more))
    told = page(found)
    Console().print(told)
    if html is not None:
        recorded = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=False)
        recorded.print(told)
        title = html_escape(f"Sanity checks of {found.model} · LRPx").replace("{", "&#123;").replace("}", "&#125;")
        write_text(html, recorded.export_html(code_format=PAGE.replace("TITLE", title), inline_styles=True))


def page(found: sanity.Sanity) -> RenderableType:
    """The verdicts of all methods, and behind them each method's numbers."""
    names = list(found.methods[0].verdicts())
    columns = []
    for sane in found.methods:
        complete = Text(f"Σ tokens = {_range(sane.complete)} of the value")
        columns.append((one_line(sane.method), [*(_verdict(sane, name) for name in names), complete]))
    title = f"{one_line(found.model)} ({found.dtype}), {found.texts} texts, seed {found.seed}"
    verdicts = Pieces("check", [*names, "completeness"], columns, title, wrapped=True, justify="left")
    about = Text(
        "Rank correlations are means over texts with their 95 % bootstrap intervals. Randomised weights (the "
        "embeddings and all above them) and another class pass where the interval ends at "
        f"{sanity.SIMILAR} or below, a convention; ledger and batch where no more than "
        f"{found.methods[0].tolerance:.1e} is missed, half the digits of the precision. Completeness, the median "
        "and the ends, is not judged."
    )
    return Group(verdicts, about, *(_cascade(sane) for sane in found.methods))


def _verdict(sane: sanity.Sane, name: str) -> Text:
    passed = sane.verdicts()[name]
    if passed is None:
        return Text("does not apply")
    said = {
        "randomised weights": lambda: _mean(sane.stages[-1].cascade),
        "another class": lambda: "" if sane.other is None else _mean(sane.other),
        "ledger": lambda: f"misses {sane.ledger:.1e}",
        "batch": lambda: f"differs by {sane.batch:.1e}",
    }[name]()
    return Text().append(*("passed", "green") if passed else ("FAILED", "red")).append(f", {said}")


def _cascade(sane: sanity.Sane) -> Pieces:
    means = {
        "down to here": [stage.cascade for stage in sane.stages],
        "its absolute value": [stage.absolute for stage in sane.stages],
        "here alone": [stage.alone for stage in sane.stages],
    }
    columns = [(name, [Text(_mean(each)) for each in some]) for name, some in means.items()]
    title = f"{one_line(sane.method)}: rank correlation with the explanation of the trained model"
    return Pieces(
        "random", [one_line(stage.part) for stage in sane.stages], columns, title, wrapped=True, justify="left"
    )


def _mean(mean: sanity.Mean) -> str:
    return f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}]".replace("-", "−")


def _range(ends: tuple[float, float, float]) -> str:
    return f"{ends[0]:.2f} ({ends[1]:.2f} to {ends[2]:.2f})".replace("-", "−")
