"""The command line: ``lrpx explain``, ``lrpx benchmark`` and ``lrpx coverage``."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

import lrpx
import lrpx.errors
from lrpx.attribution import write_text
from lrpx.errors import LRPxError
from lrpx.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 2.0
"""Seconds before progress is shown."""

app = typer.Typer(
    help="Why did the transformer predict this?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
benchmark = typer.Typer(help="Measure how well the methods find what matters.", no_args_is_help=True)
app.add_typer(benchmark, name="benchmark")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lrpx {lrpx.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Why did the transformer predict this?"""


@app.command()
def explain(
    text: Annotated[str, typer.Argument(help="The text to explain; - reads it from standard input.")],
    model: Annotated[
        str | None, typer.Option(help="Name or folder of a Hugging Face model.", show_default="the bundled model")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Token or class to explain.", show_default="the model's own prediction")
    ] = None,
    contrast: Annotated[str | None, typer.Option(help="Explain the target's logit less this one's.")] = None,
    method: Annotated[str, typer.Option(help=f"One of: {', '.join(METHODS)}.")] = "attnlrp",
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Also show where the rest came from: positions, biases, softmax, ….")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the heatmap to this HTML file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this JSON file.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the result to this file (Attribution.load reads it).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ….", show_default="where the model loads")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, bfloat16, float16; auto is the checkpoint's own.")
    ] = "auto",
) -> None:
    """Explain a prediction: which tokens speak for it (red), which against (blue)."""
    if text == "-":
        text = sys.stdin.read().rstrip("\n")
    _refuse_missing_folders(html, json_file, save)
    with _progress("Loading the model …"):
        _quiet()
        explainer = lrpx.Explainer.from_pretrained(model, device=device, dtype=dtype)
    with _progress("Explaining …"):
        attribution = explainer(text, target, contrast, method, ledger=ledger)
    Console().print(attribution)
    if html is not None:
        attribution.to_html(html)
    if json_file is not None:
        write_text(json_file, json.dumps(attribution.to_dict(), ensure_ascii=False, indent=1) + "\n")
    if save is not None:
        attribution.save(save)


def _refuse_missing_folders(*paths: Path | None) -> None:
    """Refuse files that could not be written at the end, before the work begins."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise lrpx.errors.ResultFileError(f"cannot write {path}: there is no folder {path.parent}; create it first")


@benchmark.command()
def sva(
    data: Annotated[
        list[Path], typer.Option(help="Sentences: a .tsv (Goldberg 2019) or a .conllu treebank; as often as you like.")
    ],
    out: Annotated[Path, typer.Option(help="Keep everything in this folder; started again, the run goes on there.")],
    model: Annotated[
        str | None, typer.Option(help="Name or folder of a Hugging Face model.", show_default="the bundled model")
    ] = None,
    parser: Annotated[str | None, typer.Option(help="The spaCy pipeline that finds the subjects in a .tsv.")] = None,
    parses: Annotated[Path | None, typer.Option(help="The parses of a .tsv instead, as a CoNLL-U file.")] = None,
    methods: Annotated[
        str | None, typer.Option(help=f"Some of: {','.join(METHODS)}.", show_default="all of them")
    ] = None,
    only: Annotated[Path | None, typer.Option(help="A text file of the sample ids to take, one a line.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many samples.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="The most samples run together.")] = 32,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, bfloat16, float16; auto is the checkpoint's own.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ….", show_default="where the model loads")] = None,
    show: Annotated[list[str] | None, typer.Option(help="Show the heatmap of the sample with this id, too.")] = None,
) -> None:
    """Subject-verb agreement: do the methods find the subject behind the number of the verb? (Arras et al. 2025)"""
    from lrpx.benchmarks import report
    from lrpx.benchmarks import sva as agreement

    _refuse_missing_files(*data, parses, only)
    ids = None if only is None else {line.strip() for line in only.read_text("utf-8", "replace").splitlines()} - {""}
    with _progress("Loading the model …"):
        _quiet()
        explainer = lrpx.Explainer.from_pretrained(model, device=device, dtype=dtype)
    with _progress("Finding the subjects …"):
        run = agreement.prepare(
            explainer,
            data,
            out,
            parser=parser,
            parses=parses,
            methods=tuple(METHODS) if methods is None else [name.strip() for name in methods.split(",")],
            only=ids,
            limit=limit,
            batch_size=batch_size,
            command=shlex.join(["lrpx", *sys.argv[1:]]),
        )
    for name, value in (run.counts | run.statistics).items():
        print(f"{name}: {value:,.6g}")
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("Explaining", total=len(run))
        for more in run.explain():
            bar.advance(task, more)
    with _progress("Writing the reports …"):
        summary = report.write_reports(out, show=show or ())
    Console().print(report.terminal(summary))
    print(*sorted(out.iterdir()), sep="\n")


def _refuse_missing_files(*paths: Path | None) -> None:
    """Refuse files that cannot be read, before the work begins."""
    for path in paths:
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise lrpx.errors.DataError(f"cannot read {path}: {error.strerror}; name another file") from error


@app.command()
def coverage(
    model_types: Annotated[
        list[str] | None, typer.Argument(help="Model types, such as llama gpt2.", show_default="all")
    ] = None,
    mapping: Annotated[
        str | None, typer.Option(help="Only this task, such as causal-lm.", show_default="all seven")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the representative few.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep what is found in this folder; started again, the sweep goes on there.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the Markdown report to this file.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
) -> None:
    """Build a tiny random model of every class of transformers, and check that it runs, and what its ledger misses."""
    from lrpx import coverage as sweeping

    _refuse_missing_folders(report)
    classes = sweeping.choose(model_types or (), mapping, quick)
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        checked = list(bar.track(sweeping.sweep(classes, out, workers), len(classes), description="Covering"))
    Console().print(sweeping.summary(checked))
    if report is not None:
        command = ["lrpx coverage", *(model_types or ()), *(["--mapping", mapping] if mapping else [])]
        command += ["--quick"] if quick else []
        write_text(report, sweeping.markdown(checked, " ".join([*command, f"--report {report}"]), sweeping.versions()))


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say on standard error what is going on, once it takes longer than two seconds."""
    console = Console(stderr=True)
    status = console.status(what)
    timer = threading.Timer(PATIENCE, status.start if console.is_terminal else lambda: console.print(what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _quiet() -> None:
    """Only this command's own lines in this command's output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> None:
    """Run the command line; bad input ends with one line on standard error and exit code 2."""
    try:
        app()
    except LRPxError as error:
        print(f"lrpx: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
