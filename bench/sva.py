"""The agreement benchmark: samples a second against plain loops, and what more samples cost.

    python bench/sva.py --data FILE [--parser SPACY | --parses CONLLU] [--samples 256] [--rounds 5] \
        [--sizes 1000 4000 14000] [--subjects "lrpx attnlrp" "LXT efficient"]

The bundled model. The first table: the same samples explained by the benchmark in its batches, metrics, random baseline
and rows included, and one by one by each subject (``subjects.py``; random weights of the same shape, in processes of
their own), which does nothing else. Every round does each of them once, in turn; the figures are medians. The second
table: the whole command, each time in a fresh process that reads the samples from the folder, where this one has put
them; its seconds and its peak resident memory, reports included.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from servers import add_subjects, arguments, fleet, head, notes, print_header, row
from subjects import SHAPES

from lrpx.benchmarks import Run, keep
from lrpx.benchmarks._agreement import Agreement
from lrpx.methods import METHODS
from lrpx.model import Spec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from servers import Fleet

    from lrpx.model import BoundModel

SHAPE = "bundled"


def prepared(options: argparse.Namespace, model: BoundModel, folder: Path, methods: Sequence[str], limit: int) -> Run:
    """A run with its samples read, and kept in a folder for the next."""
    benchmark = Agreement(options.data, parser=options.parser, parses=options.parses, limit=limit)
    run = Run(benchmark, model, methods, batch_size=options.batch_size)
    with keep(run, folder):
        return run


def rates(options: argparse.Namespace, model: BoundModel, folder: Path) -> list[str]:
    """Print the first table."""
    named = {"benchmark, attnlrp": ["attnlrp"], "benchmark, all methods": list(Agreement.methods)}
    ways = {name: prepared(options, model, folder, methods, options.samples) for name, methods in named.items()}
    chosen = next(iter(ways.values())).samples.kept
    vocabulary = SHAPES[options.shape].sizes["vocab_size"]
    ids = [[token % vocabulary for token in each.ids] for each in chosen]
    seconds: dict[str, list[float]] = {name: [] for name in [*ways, *options.subjects]}

    def measure(name: str, group: Fleet) -> float:
        if name not in ways:
            answers = [group.ask(name, each) for each in ids]
            return sum(answer.get("seconds", float("nan")) for answer in answers)
        began = time.perf_counter()
        for number in range(ways[name].parts):
            ways[name].part(number)
        return time.perf_counter() - began

    with fleet(options.shape, options.subjects, options) as group:
        for around in range(options.rounds + 1):
            for name in list(seconds)[:: 1 if around % 2 else -1]:
                taken = measure(name, group)
                if around:  # the first is for warming up
                    seconds[name].append(taken)
        problems = [f"{name} n/a: {why}" for name, why in group.problems.items()]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    head("way", "samples", "samples a second", "ms each", "of " + options.subjects[0])
    for name, median in medians.items():
        rate = len(chosen) / median
        row(name, len(chosen), f"{rate:.1f}", f"{1000 / rate:.2f}", f"{medians[options.subjects[0]] / median:.2f}")
    lengths = sorted(map(len, ids))
    return [f"tokens each: {lengths[0]}–{lengths[-1]}, median {statistics.median(lengths):.0f}", *problems]


def growth(options: argparse.Namespace, model: BoundModel, folder: Path) -> None:
    """Print the second table."""
    head("samples", "seconds", "ms each", "ms each further", "peak MiB")
    before: tuple[int, float] | None = None
    for size in options.sizes:
        out = folder / str(size)
        count = len(prepared(options, model, out, options.methods, size))
        command = [sys.executable, "-c", "from lrpx.cli import main; main()", "benchmark", "sva", "--out", str(out)]
        command += [f"--data={path}" for path in options.data] + ["--limit", str(size)]
        command += [] if options.parser is None else ["--parser", options.parser]
        command += [] if options.parses is None else ["--parses", str(options.parses)]
        command += ["--methods", ",".join(options.methods), "--batch-size", str(options.batch_size)]
        command += ["--device", options.device]
        settings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
        with tempfile.TemporaryFile("w+") as log:
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=log, stderr=log, env=settings)
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                log.seek(0)
                raise RuntimeError(f"the command failed: {log.read()}")
        further = "" if before is None else f"{1000 * (seconds - before[1]) / (count - before[0]):.2f}"
        row(count, f"{seconds:.1f}", f"{1000 * seconds / count:.2f}", further, f"{used.ru_maxrss / 1024:.0f}")
        before = count, seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="as lrpx benchmark sva takes it")
    parser.add_argument("--parser", help="for a .tsv: a spaCy pipeline")
    parser.add_argument("--parses", type=Path, help="for a .tsv: its parses instead, as a CoNLL-U file")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE, help="of the subjects' models")
    parser.add_argument("--samples", type=int, default=256, help="in the first table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 4000, 14000], help="in the second table")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(Agreement.methods), help="in the second table"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    add_subjects(parser, ["lrpx attnlrp", "LXT efficient"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = Spec(device=options.device).build()
    print_header(options, options.subjects)
    with tempfile.TemporaryDirectory() as folder:
        below = rates(options, model, Path(folder) / "rates")
        notes(below)
        print()
        growth(options, model, Path(folder))


if __name__ == "__main__":
    main()
