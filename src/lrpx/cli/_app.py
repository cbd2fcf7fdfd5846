"""The commands with their options. What they do is imported when they run, and brings torch along."""

from __future__ import annotations

import re
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Any, Final

import typer

import lrpx
from lrpx.cli._benchmarks import benchmark
from lrpx.cli._cards import cards
from lrpx.cli._neurons import neurons
from lrpx.cli._options import Command, Device, Model, Precision
from lrpx.cli._streams import own_lines_only, prepare_output, refuse_same, refuse_unwritable
from lrpx.cli._wanted import METHODS, Wanted, methods
from lrpx.errors import InputError

DTYPES: Final = ("auto", "float32", "float64", "bfloat16", "float16")

UsageError: Any = typer.BadParameter.__base__
"""What typer raises of a command that is not written as commands are; it has no public name there."""

app = typer.Typer(
    help="Why did the transformer predict this?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(benchmark, name="benchmark")
neurons.add_typer(cards)
app.add_typer(neurons, name="neurons")


def run() -> None:
    """Run the command that was asked for.

    Raises:
        LRPxError: it cannot be done, or is not written as commands are.
    """
    prepare_output()
    with own_lines_only():
        try:
            code = app(prog_name="lrpx", standalone_mode=False)
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # which has shown the help
                sys.exit(error.exit_code)
            raise InputError(_told(error)) from None
        except typer.Abort:
            code = 1
        if code:
            sys.exit(code)


def _told(error: Any) -> str:
    """What is wrong with how a command was written, with the mend, in one line."""
    path = "lrpx" if error.ctx is None else error.ctx.command_path
    said = error.format_message().strip().rstrip(".")
    if said.startswith("Got unexpected extra argument") and path == "lrpx explain":
        return f"{said[0].lower()}{said[1:]}; put the text in quotes"
    return f"{said[0].lower()}{said[1:]}; {path} --help says what there is"


def lacking(message: str) -> str:
    """What is added to a message that names options of ``lrpx explain`` which the command that was asked for has not:
    that it has not. Empty for others, and for benchmarks, whose messages are their own."""
    command: Any = typer.main.get_command(app)
    explain, path = command.commands["explain"], ["lrpx"]
    for name in sys.argv[1:]:
        if name not in getattr(command, "commands", ()):
            break
        path.append(name)
        command = command.commands[name]
    if hasattr(command, "commands"):
        return ""
    theirs = {name for parameter in explain.params for name in parameter.opts}
    theirs -= {name for parameter in command.params for name in parameter.opts}
    named = [each for each in dict.fromkeys(re.findall(r"--[a-z-]+", message)) if each in theirs]
    return f"; {' '.join(path)} has no {' or '.join(named)}, lrpx explain has" if named else ""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lrpx {lrpx.__version__}")
        raise typer.Exit


def _among(names: tuple[str, ...]) -> Any:
    """What completes one of some names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Why did the transformer predict this?"""


INPUT: Final = "What is explained"
MODEL: Final = "The model"
OUTPUT: Final = "What is shown and kept"


@app.command(cls=Command)
def explain(
    text: Annotated[
        str | None,
        typer.Argument(help="The text to explain; - reads it from standard input.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Token or class to explain.", show_default="the model's own prediction", rich_help_panel=INPUT
        ),
    ] = None,
    contrast: Annotated[
        str | None, typer.Option(help="Explain the target's logit less this one's.", rich_help_panel=INPUT)
    ] = None,
    target_id: Annotated[
        int | None, typer.Option(help="The target as a token id, or the index of a class.", rich_help_panel=INPUT)
    ] = None,
    contrast_id: Annotated[
        int | None, typer.Option(help="The contrast as a token id, or the index of a class.", rich_help_panel=INPUT)
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(
            help="The token whose logits are explained, from 0; negative from the end.",
            show_default="the last, or the mask",
            rich_help_panel=INPUT,
        ),
    ] = None,
    decoder: Annotated[
        str | None, typer.Option(help="What an encoder-decoder model has written so far.", rich_help_panel=INPUT)
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(help="The second text: a hypothesis, a context, one to compare.", rich_help_panel=INPUT),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="A choice of a multiple choice model; once for each.", rich_help_panel=INPUT),
    ] = None,
    ids: Annotated[
        bool,
        typer.Option("--ids", help="The text and --decoder are token ids, such as '464 8251'.", rich_help_panel=INPUT),
    ] = False,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Explain each line of this file, or each object of a .jsonl file; - is standard input.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="Explain this image; with a text, how alike a model finds them.", rich_help_panel=INPUT),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            help="The place of the map that a model makes of an image: row,column, from 0.",
            show_default="its largest",
            rich_help_panel=INPUT,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name or folder of a Hugging Face model.", show_default="the bundled model", rich_help_panel=MODEL
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.", rich_help_panel=MODEL)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, ….", show_default="where the model loads", rich_help_panel=MODEL),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, float64, bfloat16, float16; auto is the checkpoint's own.",
            autocompletion=_among(DTYPES),
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Long texts: the memory of one layer, and more time.", rich_help_panel=MODEL),
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of: {', '.join(methods())}; or a recipe (my.json), or a script (my.py). Several are shown side "
            "by side.",
            show_default=METHODS[0],
            autocompletion=_among(methods()),
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    ledger: Annotated[
        bool,
        typer.Option(
            "--ledger",
            help="Also show where the rest came from: positions, biases, softmax, ….",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    words: Annotated[
        bool, typer.Option("--words", help="Sum the relevance over the tokens of each word.", rich_help_panel=OUTPUT)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the heatmap to this HTML file.", rich_help_panel=OUTPUT)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the numbers to this JSON file; - is standard output. With --texts, a line for each text; "
            "started again, it goes on after the last.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the result to this file (Attribution.load reads it).", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Explain a prediction: which tokens speak for it (red), which against (blue)."""
    wanted = Wanted(
        text=text, pair=pair, choices=tuple(choice or ()), ids=ids, texts=texts, decoder=decoder,
        image=image, cell=cell,
        target=target, target_id=target_id, contrast=contrast, contrast_id=contrast_id, position=position,
        model=model, revision=revision, device=device, dtype=dtype, recompute=recompute,
        methods=tuple(dict.fromkeys(method or METHODS[:1])), ledger=ledger, words=words,
        html=html, json=json_file, save=save,
    )  # fmt: skip
    wanted = wanted.checked()
    from lrpx.cli import _explain

    _explain.explain(wanted)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was written, whatever its value is."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command(cls=Command)
def tune(
    ctx: typer.Context,
    method: Annotated[
        str,
        typer.Option(
            help=f"The method: {', '.join(methods())}; or a recipe with γ rules (my.json), or a script.",
            autocompletion=_among(methods()),
        ),
    ],
    data: Annotated[Path, typer.Option(help="Texts (.tsv, .csv, .jsonl, .parquet, .txt), or images (a folder, .npz).")],
    out: Annotated[
        Path,
        typer.Option(help="Keep everything in this folder, the winner in best.json; started again, it goes on there."),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting and the values to try, sigma=0.05,0.1; once for each setting.", show_default="the method's"
        ),
    ] = None,
    model: Model = None,
    last: Annotated[int, typer.Option(min=1, help="Search on the last so many texts, and leave the others.")] = 64,
    text: Annotated[str, typer.Option(help="The column of the texts.")] = "text",
    label: Annotated[str, typer.Option(help="The column of the labels, if there is one.")] = "label",
    target: Annotated[
        str, typer.Option(help="What is explained: predicted, label, or the name of a class or token.")
    ] = "predicted",
    perturbation: Annotated[str, typer.Option(help="How tokens are hidden.")] = "zero-embedding",
    steps: Annotated[int, typer.Option(min=1, help="The most steps of a curve.")] = 100,
    context: Annotated[int | None, typer.Option(min=1, help="Read only the first so many tokens of a text.")] = None,
    cells: Annotated[str, typer.Option(help="What of an image is covered at once: pixels or patches.")] = "pixels",
    batch_size: Annotated[int, typer.Option(min=1, help="The most texts run together.")] = 32,
    part: Annotated[int, typer.Option(min=1, help="Texts in a part: a stopped search loses the part in work.")] = 8,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Search the settings of a method (σ, steps, quantile, suppression, γ) that are most faithful on held-out texts."""
    from lrpx.cli import _composites, _tuning

    images = _composites.are_images(data, text)
    for name in ("text", "perturbation", "steps", "context", "part") if images else ("cells",):
        if _is_given(ctx, name):
            what, of = ("images", "texts") if images else ("texts", "images")
            raise InputError(f"{data} holds {what}, and --{name} is of {of}; leave it out")
    if images:
        of_images = {"data": data, "label": label, "target": target, "last": last, "cells": cells}
        where: dict[str, str | None] = {"name": model, "dtype": dtype, "device": device}
        _composites.tune(of_images, method, tuple(grid or ()), out, batch_size, **where)
        return
    options = {
        "data": data, "text": text, "label": label, "target": target, "perturbation": perturbation, "steps": steps,
        "context": context, "last": last,
    }  # fmt: skip
    search = _tuning.Search(method, tuple(grid or ()), model, dtype, device, batch_size, part, out)
    _tuning.tune(search, options)


@app.command(cls=Command)
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
    refuse_unwritable(report)
    from rich.console import Console
    from rich.progress import Progress

    from lrpx import coverage as sweeping
    from lrpx._files import write_text

    classes = sweeping.choose(model_types or (), mapping, quick)
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        checked = list(bar.track(sweeping.sweep(classes, out, workers), len(classes), description="Covering"))
    Console().print(sweeping.summary(checked))
    if report is not None:
        command = ["lrpx coverage", *(model_types or ()), *(["--mapping", mapping] if mapping else [])]
        command += ["--quick"] if quick else []
        write_text(report, sweeping.markdown(checked, " ".join([*command, f"--report {report}"]), sweeping.versions()))


@app.command(cls=Command)
def check(
    model: Model = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Some of: {', '.join(methods())}; or a recipe (my.json), or a script (my.py).",
            show_default="attnlrp and lrp",
            autocompletion=_among(methods()),
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Check on these texts: .tsv, .csv, .jsonl or .parquet with a column text, or .txt, a line each.",
            show_default="a few sentences",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most texts that are read.")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the random weights and the other class.")] = 0,
    device: Device = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, float64, bfloat16, float16; auto is the checkpoint's own.", autocompletion=_among(DTYPES)
        ),
    ] = "auto",
    html: Annotated[Path | None, typer.Option(help="Write the page to this HTML file, too.")] = None,
) -> None:
    """Check the explanations of a model: do they depend on its weights and on the class, and do they add up?"""
    refuse_unwritable(html)
    refuse_same(texts, html)
    from lrpx.cli import _check

    _check.check(model, method or ("attnlrp", "lrp"), texts, limit, seed, device, dtype, html)
