"""The command line: ``lrpx explain`` and ``lrpx coverage``."""

from __future__ import annotations

import json
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
    save: Annotated[Path | None, typer.Option(help="Write the result to this file, for lrpx.load().")] = None,
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
        Path | None, typer.Option(help="Keep the rows in this folder; started again, the sweep goes on there.")
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
        rows = list(bar.track(sweeping.sweep(classes, out, workers), len(classes), description="Covering"))
    Console().print(sweeping.summary(rows))
    if report is not None:
        command = ["lrpx coverage", *(model_types or ()), *(["--mapping", mapping] if mapping else [])]
        command += ["--quick"] if quick else []
        write_text(report, sweeping.markdown(rows, " ".join([*command, f"--report {report}"]), sweeping.versions()))


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
