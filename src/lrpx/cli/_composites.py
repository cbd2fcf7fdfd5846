"""``lrpx tune`` where the data are images: the search over composites of rules."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from lrpx.cli._streams import hush, progress, refuse_folder
from lrpx.cli._tuning import BEST, grid_of
from lrpx.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from lrpx.tuning import Tuned

RULES: Final = "a kind of layer and its rules once, such as --grid linear=epsilon,gamma:0.25,zplus"
"""What ``--grid`` is, for errors."""
SHOWN: Final = 20
"""Lines of the table on the terminal; the file has all."""


def are_images(data: Path, text: str) -> bool:
    """Whether the data are images: a folder, an npz file, or a table with a column ``image`` and none of the texts."""
    if data.is_dir() or data.suffix == ".npz":
        return True
    if data.suffix not in (".csv", ".tsv", ".jsonl") or not data.is_file():
        return False
    with data.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        if data.suffix == ".jsonl":
            head = _names(next(filter(str.strip, file), ""))
        else:
            head = next(csv.reader(file, delimiter="\t" if data.suffix == ".tsv" else ","), [])
    return "image" in head and text not in head


def _names(line: str) -> list[str]:
    """The names in an object of JSON; none where it is no object, as who reads the table will say."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return list(found) if isinstance(found, dict) else []


def tune(
    options: dict[str, Any], method: str, grid: tuple[str, ...], out: Path, batch_size: int, **model: str | None
) -> None:
    """Search, show what was tried, and write the winner, the table and the plot into the folder.

    Args:
        options: of the benchmark ``pixels``.
        method, grid: as the command line has them.
        out: the folder.
        batch_size: the most images that run together.
        model: what :class:`lrpx.model.Spec` takes.
    """
    if out.suffix == ".json":
        raise InputError(f"--out is {out}, and a search over images is kept in a folder; name a folder")
    refuse_folder(out)
    from lrpx._files import write_text
    from lrpx._views.picture import one_line
    from lrpx.benchmarks import find
    from lrpx.benchmarks._keeping import read_or_kept, refuse_other
    from lrpx.composites import METRIC, composites, plotted, search
    from lrpx.model import Spec
    from lrpx.runs import write_whole

    benchmark = find("pixels")(**options)
    benchmark.check()
    wanted = grid_of(grid, str, RULES)
    tried = composites(method, wanted)  # before a model is loaded
    spec = Spec(**model)  # type: ignore[arg-type]
    with progress("Reading the images …"):
        refuse_other(benchmark, out, spec, [made for _, made in tried])
        read_or_kept(benchmark, out)
    with progress("Loading the model …"):
        hush()
        bound = spec.build()
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Trying {len(tried)} composites", total=None)
        found = search(
            bound, benchmark, method, wanted, folder=out, command=shlex.join(["lrpx", *sys.argv[1:]]),
            batch_size=batch_size, done=lambda more: bar.advance(task, more),
        )  # fmt: skip
    found.save(out / BEST)
    write_text(out / "grid.csv", _csv(found))
    write_whole(out / "grid.png", plotted(found, f"{one_line(bound.name)}: {method}, {len(found.ids)} images"))
    kinds = list(found.tried[0].settings)
    table = Table(*kinds, METRIC, "± standard error")
    ranked = sorted(found.tried, key=lambda each: -each.mean)
    for each in ranked[:SHOWN]:
        cells = [Text(each.settings[kind]) for kind in kinds]
        table.add_row(
            *cells, f"{each.mean:.4f}", f"{each.error:.4f}", style="bold" if each is found.best else ""
        )  # fmt: skip
    Console().print(table)
    if len(ranked) > SHOWN:
        print(f"the best {SHOWN} of {len(ranked)} composites; all are in {out / 'grid.csv'}")
    print(f"searched on {len(found.ids)} images")
    if found.others:
        print(f"measure it on the others: lrpx benchmark pixels --limit {found.others} --methods {out / BEST} …")
    else:
        print("no other image is left to measure it on; the number above is too good")
    print(out / BEST)


def _csv(found: Tuned) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    kinds = list(found.tried[0].settings)
    writer.writerow([*kinds, "mean", "standard error"])
    for each in found.tried:
        writer.writerow([*(each.settings[kind] for kind in kinds), repr(each.mean), repr(each.error)])
    return file.getvalue()
