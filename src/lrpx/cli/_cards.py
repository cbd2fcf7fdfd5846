"""``lrpx neurons collect``, ``card`` and ``search``: what neurons stand for."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lrpx.cli._options import Command, Device, Model, Precision
from lrpx.cli._streams import (
    hush,
    progress,
    refuse_empty,
    refuse_folder,
    refuse_same,
    refuse_unreadable,
    refuse_unwritable,
)
from lrpx.errors import InputError, MethodError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lrpx.model import BoundModel

MEASURES: Final = ("activation", "negative activation", "relevance")
WAYS: Final = ("writes", "peaks", "passages")

cards = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The folder that lrpx neurons collect has written.")]
Corpus = Annotated[
    Path | None, typer.Option(help="The file of the passages, where it has moved.", show_default="where it was")
]


@cards.command(cls=Command)
def collect(
    data: Annotated[Path, typer.Option(help="Texts: .tsv, .csv, .jsonl or .parquet with named columns, or .txt.")],
    out: Annotated[Path, typer.Option(help="Keep everything in this folder; started again, the run goes on there.")],
    model: Model = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            help=f"By what passages are ranked: {', '.join(MEASURES)}; once for each.", show_default="activation"
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Passages kept of each neuron.")] = 16,
    text: Annotated[str, typer.Option(help="The column of the texts.")] = "text",
    context: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a text.", show_default="the model's own limit")
    ] = None,
    long: Annotated[str, typer.Option(help="What becomes of longer texts: refuse, or cut.")] = "refuse",
    at: Annotated[
        str,
        typer.Option(help="Where the prediction is read whose relevance is asked for: drawn in each text, or last."),
    ] = "drawn",
    skip: Annotated[int, typer.Option(min=0, help="Leave out the first so many tokens of each text.")] = 0,
    part: Annotated[int, typer.Option(min=1, help="Texts in a part: a stopped run loses the part in work.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="The most texts run together.")] = 32,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Find the passages in which each neuron of a model is highest, for all neurons in one pass over a corpus."""
    refuse_unreadable(data)
    refuse_folder(out)
    for option, given, known in (
        ("measure", measure or (), MEASURES), ("long", (long,), ("refuse", "cut")), ("at", (at,), ("drawn", "last")),
    ):  # fmt: skip
        _refuse_unknown(option, given, known)
    from rich.console import Console
    from rich.progress import Progress

    from lrpx.cards import Collection
    from lrpx.cards import collect as collected
    from lrpx.cards._collect import refuse_other
    from lrpx.cards._corpus import read_corpus
    from lrpx.model import Spec

    spec, measures = Spec(model, dtype, device), tuple(measure or MEASURES[:1])
    with progress("Reading the corpus …"):  # before a model is loaded
        refuse_other(out, spec, data, measures, k=k, text=text, long=long, skip=skip, part=part)
        for _ in read_corpus(data, text):
            pass
    with progress("Loading the model …"):
        hush()
        bound = spec.build()
    options: dict[str, Any] = {"k": k, "text": text, "context": context, "long": long, "at": at, "skip": skip}
    collection = Collection(bound, data, measures, part=part, batch_size=batch_size, **options)
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("Reading the corpus", total=None)

        def done(more: int, total: int) -> None:
            bar.update(task, description="Collecting", total=total, advance=more)

        found = collected(collection, out, shlex.join(["lrpx", *sys.argv[1:]]), done)
    units, layers = found.table.num_rows, len(found.layers)
    print(f"{units:,} neurons of {layers} layers, {found.record['texts']:,} texts")
    print(f"a card: lrpx neurons card {shlex.quote(str(out))} {next(iter(found.layers))}:0")


@cards.command(cls=Command)
def card(
    folder: Folder,
    unit: Annotated[
        str | None, typer.Argument(help="The neuron: its layer and its number, such as 17:3948.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the card to this HTML file, too.")] = None,
    index: Annotated[Path | None, typer.Option(help="Write a page to search all neurons in to this HTML file.")] = None,
    passages: Annotated[int, typer.Option(min=1, help="Passages of each ranking that are explained.")] = 8,
    words: Annotated[int, typer.Option(min=1, help="Tokens on either side of the vocabulary.")] = 12,
    corpus: Corpus = None,
    device: Device = None,
) -> None:
    """Show what a neuron stands for: its passages as heatmaps, what it writes, how active it is and where."""
    refuse_unwritable(html, index)
    refuse_same(html, index, corpus)
    if unit is None and (index is None or html is not None):
        raise InputError("no neuron was named; write its layer and number, such as 17:3948, or --index FILE for all")
    which = None if unit is None else _unit(unit)
    from rich.console import Console
    from rich.progress import Progress

    from lrpx._files import write_text
    from lrpx.cards import References, index_page
    from lrpx.cards import card as made
    from lrpx.cards._corpus import texts_of

    references = References.read(folder)
    if index is not None:
        references.check_measure(MEASURES[0])  # before a model is loaded, as all here
    if which is not None:
        references.row(*which)
        next(texts_of(references, corpus), None)
    bound = _loaded(references, device)
    if which is not None:
        found = made(references, *which, bound, corpus=corpus, passages=passages, words=words)
        Console().print(found)
        if html is not None:
            found.to_html(html)
            print(html)
    if index is not None:
        console = Console(stderr=True)
        with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("Reading the neurons", total=references.table.num_rows)
            page = index_page(references, bound, done=lambda more: bar.advance(task, more))
        write_text(index, page)
        print(index)


@cards.command(cls=Command)
def search(
    folder: Folder,
    text: Annotated[str, typer.Argument(help="A token, such as ' Paris'; or any text, with --by passages.")],
    by: Annotated[
        str,
        typer.Option(
            help="writes: the token stands out in what the neuron writes; peaks: the neuron is highest at it; "
            "passages: its passages contain the text."
        ),
    ] = WAYS[0],
    measure: Annotated[str, typer.Option(help="By which ranking the passages were kept.")] = MEASURES[0],
    top: Annotated[int, typer.Option(min=1, help="How many neurons.")] = 20,
    corpus: Corpus = None,
    device: Device = None,
) -> None:
    """Find the neurons that have to do with a word."""
    from rich.console import Console
    from rich.table import Table

    from lrpx.cards import References
    from lrpx.cards import search as found
    from lrpx.cards._corpus import texts_of

    _refuse_unknown("by", (by,), WAYS)
    _refuse_unknown("measure", (measure,), MEASURES)
    refuse_empty(text)
    references = References.read(folder)
    if by != "writes":
        references.check_measure(measure)  # before a model is loaded, as all here
    if by == "passages":
        next(texts_of(references, corpus), None)
    bound = None if by == "passages" and not references.are_cut else _loaded(references, device)
    try:
        hits = found(references, text, by, bound, measure=measure, top=top, corpus=corpus)  # type: ignore[arg-type]
    except TargetError as error:
        what = str(error).partition("; ")[0].replace("the target ", "")
        raise TargetError(f"{what}; search for one token, or for any text with --by passages") from error
    if not hits:
        print("no neuron was found")
        return
    table = Table("neuron", "standard deviations" if by == "writes" else "passages")
    for each in hits:
        score = f"{each.score:+.1f}" if by == "writes" else f"{each.score:.0f} of {each.of}"
        table.add_row(f"{each.layer}:{each.unit}", score)
    Console().print(table)


def _loaded(references: Any, device: str | None) -> BoundModel:
    with progress("Loading the model …"):
        hush()
        bound: BoundModel = references.model(device)
    return bound


def _unit(text: str) -> tuple[int, int]:
    """A layer and a number.

    Raises:
        MethodError: it is written in another way.

    >>> _unit("17:3948")
    (17, 3948)
    """
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip())
    if found is None:
        raise MethodError(f"{text!r} names no neuron; write its layer and its number, such as 17:3948")
    return int(found[1]), int(found[2])


def _refuse_unknown(option: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    """Refuse a word that is none of an option's, before a model is loaded."""
    for each in given:
        if each not in known:
            raise InputError(f"--{option} is {each!r}; pass one of {', '.join(known)}")
