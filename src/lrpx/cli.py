"""The command line: ``lrpx explain``, ``lrpx benchmark`` and ``lrpx coverage``."""

from __future__ import annotations

import contextlib
import inspect
import json
import shlex
import sys
import threading
from collections.abc import Callable  # noqa: TC003 - typer reads the annotations
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

import lrpx
import lrpx.errors
from lrpx._files import write_text
from lrpx.errors import LRPxError
from lrpx.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lrpx.benchmarks import Benchmark

__all__ = ["main"]

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


class _Benchmarks(TyperGroup):
    """A command for each benchmark, looked up when it is asked for: they need packages that ``explain`` does not."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names of all that are registered."""
        from lrpx.benchmarks import BENCHMARKS

        return [*BENCHMARKS]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """The command of a benchmark, by its name or its script."""
        from lrpx.benchmarks import find

        kind = find(cmd_name)
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, help=inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0])(_command(kind))
        return typer.main.get_command(single)


benchmark = typer.Typer(
    cls=_Benchmarks,
    help="Measure how well the methods find what matters: a benchmark by its name, or a script that registers one.",
    no_args_is_help=True,
)
app.add_typer(benchmark, name="benchmark")


def _command(kind: type[Benchmark[Any]]) -> Callable[..., None]:
    """A benchmark's command: its fields are options, beside those that every benchmark has."""
    own = kind.options()
    defaults = {each.name: each.default for each in fields(kind) if each.default is not MISSING}  # type: ignore[arg-type]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name, inspect.Parameter.empty),
            annotation=Annotated[wanted, typer.Option(help=said)],
        )
        for name, (wanted, said) in own.items()
    ]

    def run(**given: Any) -> None:
        _benchmark(kind, {name: given.pop(name) for name in own}, **given)

    common = inspect.signature(_benchmark, eval_str=True).parameters.values()
    parameters += [each for each in common if each.kind is inspect.Parameter.KEYWORD_ONLY]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _benchmark(
    kind: Callable[..., Any],
    options: dict[str, Any],
    *,
    out: Annotated[Path, typer.Option(help="Keep everything in this folder; started again, the run goes on there.")],
    model: Annotated[
        str | None, typer.Option(help="Name or folder of a Hugging Face model.", show_default="the bundled model")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Some of: {','.join(METHODS)}; or a recipe (my.json), or a script (my.py).",
            show_default="those of the benchmark",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Some of the benchmark's metrics, or a script (my.py).", show_default="all of them"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="The most samples run together.")] = 32,
    part: Annotated[int, typer.Option(min=1, help="Samples in a part: a stopped run loses the part in work.")] = 512,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, bfloat16, float16; auto is the checkpoint's own.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ….", show_default="where the model loads")] = None,
    show: Annotated[list[str] | None, typer.Option(help="Show the heatmap of the sample with this id, too.")] = None,
) -> None:
    from lrpx.benchmarks import Run, keep
    from lrpx.model import Spec

    _refuse_missing_files(*options.values())
    benchmark = kind(**options)
    with _progress("Loading the model …"):
        _quiet()
        bound = Spec(model, dtype, device).build()
    run = Run(benchmark, bound, _listed(methods), _listed(metrics), batch_size=batch_size, part=part)
    with contextlib.ExitStack() as stack:
        with _progress("Reading the samples …"):
            kept = stack.enter_context(keep(run, out, shlex.join(["lrpx", *sys.argv[1:]])))
        for name, value in kept.numbers.items():
            print(f"{name}: {value:,.6g}")
        console = Console(stderr=True)
        with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("Explaining", total=len(run))
            kept.explain(lambda more: bar.advance(task, more))
        with _progress("Writing the reports …"):
            found = benchmark.report(kept.store, show or ())
    Console().print(found)
    print(*sorted(path for path in out.iterdir() if not path.name.startswith(".")), sep="\n")


def _listed(names: str | None) -> list[str] | None:
    """Names with commas between."""
    return None if names is None else [name.strip() for name in names.split(",")]


def _refuse_missing_files(*values: Any) -> None:
    """Refuse files that cannot be read, before the work begins."""
    for path in [each for value in values for each in (value if isinstance(value, list) else [value])]:
        try:
            if isinstance(path, Path):
                path.open("rb").close()
        except OSError as error:
            raise lrpx.errors.DataError(f"cannot read {path}: {error.strerror}; name another file") from error


@app.command()
def coverage(
    model_types: Annotated[
        list[str] | None, typer.Argument(help="Model types, such as llama gpt2.", show_default="all")
    ] = None,
    mapping: Annotated[
        str | None, typer.Option(help="Only this task, such as causal-lm.", show_default="all of them")
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
