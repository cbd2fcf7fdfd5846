"""``lrpx tune``: what runs when the settings of a method are searched."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from lrpx.cli._streams import hush, progress, refuse_folder
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BEST: Final = "best.json"
"""The winner's file in the folder of a search."""


@dataclass(frozen=True)
class Search:
    """The options of ``lrpx tune``, but for the data's: the model's, the method's, and the folder."""

    method: str
    grid: tuple[str, ...]
    model: str | None
    dtype: str
    device: str | None
    batch_size: int
    part: int
    out: Path


def grid_of(
    given: tuple[str, ...],
    value: Callable[[str], Any],
    wanted: str = "a setting and its values once, such as --grid sigma=0.1,0.2",
) -> dict[str, list[Any]] | None:
    """``("sigma=0.1,0.2",)`` as a grid.

    Args:
        given: the options.
        value: from a text to the value that it stands for.
        wanted: what is to be written, for the error.

    Raises:
        MethodError: a part is no such thing, or a name stands twice.
    """
    found: dict[str, list[Any]] = {}
    for each in given:
        name, equals, values = each.partition("=")
        if not equals or not name or not values or name in found:
            raise MethodError(f"--grid is {each!r}; write {wanted}")
        found[name] = [value(text.strip()) for text in values.split(",")]
    return found or None


def json_or_text(text: str) -> Any:
    """A value that is no JSON is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"None": None}.get(text, text)


def tune(search: Search, options: dict[str, Any]) -> None:
    """Search, show what was tried, and write the winner."""
    from lrpx.benchmarks import find
    from lrpx.benchmarks._keeping import read_or_kept, refuse_other
    from lrpx.model import Spec
    from lrpx.tuning import METRIC, candidates, column_of
    from lrpx.tuning import tune as searched

    refuse_folder(search.out)
    benchmark = find("faithfulness")(**options)
    benchmark.check()
    grid = grid_of(search.grid, json_or_text)
    tried = candidates(search.method, grid)  # before a model is loaded
    column_of(benchmark)
    spec = Spec(search.model, search.dtype, search.device)
    with progress("Reading the texts …"):
        refuse_other(benchmark, search.out, spec, [made for _, made in tried], part=search.part)
        read_or_kept(benchmark, search.out)
    with progress("Loading the model …"):
        hush()
        model = spec.build()
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Trying {len(tried)} settings", total=None)
        found = searched(
            model, benchmark, search.method, grid, folder=search.out, command=shlex.join(["lrpx", *sys.argv[1:]]),
            batch_size=search.batch_size, part=search.part, done=lambda more: bar.advance(task, more),
        )  # fmt: skip
    best = found.best
    path = search.out / BEST
    table = Table("settings", METRIC, "± standard error")
    for each in sorted(found.tried, key=lambda each: -each.mean):
        told = ", ".join(f"{name}={value}" for name, value in each.settings.items())
        table.add_row(Text(told), f"{each.mean:.4f}", f"{each.error:.4f}", style="bold" if each is best else "")
    Console().print(table)
    print(f"searched on {len(found.ids)} of the last {options['last']} texts")
    try:
        found.save(path)
    except MethodError as error:  # the search is done, and what was best is told
        console.print(Text(str(error)))
        return
    if found.others:
        print(f"measure it on the others: lrpx benchmark faithfulness --limit {found.others} --methods {path} …")
    else:
        print("no other text is left to measure it on; the number above is too good")
    print(path)
