"""``lrpx neurons rank``, ``flow``, ``features`` and ``turn``: which units carry a prediction, and what the model says
without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lrpx.cli._options import Command, Device, Model, Precision
from lrpx.cli._streams import hush, progress, read_column, read_text, refuse_empty, refuse_same, refuse_unwritable
from lrpx.cli._wanted import OF_UNITS, asked
from lrpx.errors import InputError, MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.explainer import Explainer
    from lrpx.interventions import Change
    from lrpx.methods import Method
    from lrpx.units import Kind, Place

KINDS: Final = ("neurons", "heads", "queries", "keys", "values", "attention", "mlp", "residual")
SHOWN: Final = 5
"""So many of the likeliest predictions are told before and after; of scores all."""
ROWS: Final = 1000
"""So many units are shown in the terminal; files have all that were asked for."""

neurons = typer.Typer(
    help="Which neurons carry a prediction, what happens without them, and what do they stand for?",
    no_args_is_help=True,
)

Text = Annotated[str, typer.Argument(help="The text; - reads it from standard input.", show_default=False)]
Target = Annotated[
    str | None, typer.Option(help="Token or class to explain.", show_default="the model's own prediction")
]
Contrast = Annotated[str | None, typer.Option(help="Explain the target's logit less this one's.")]
TargetId = Annotated[int | None, typer.Option(help="The target as a token id, or the index of a class.")]
ContrastId = Annotated[int | None, typer.Option(help="The contrast as a token id, or the index of a class.")]
Position = Annotated[
    int | None, typer.Option(help="The token whose logits are explained.", show_default="the last, or the mask")
]
How = Annotated[
    str,
    typer.Option(
        help=f"One of: {', '.join(OF_UNITS)}; or a recipe (my.json).",
        autocompletion=lambda incomplete: [name for name in OF_UNITS if name.startswith(incomplete)],
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this JSON file.")]
Html = Annotated[Path | None, typer.Option(help="Write a page to this HTML file.")]


@neurons.command(cls=Command)
def rank(
    text: Annotated[
        str | None, typer.Argument(help="The text; - reads it from standard input.", show_default=False)
    ] = None,
    target: Target = None,
    contrast: Contrast = None,
    target_id: TargetId = None,
    contrast_id: ContrastId = None,
    position: Position = None,
    kind: Annotated[str, typer.Option(help=f"What is ranked: {', '.join(KINDS)}.")] = KINDS[0],
    top: Annotated[int, typer.Option(min=1, help="How many are shown.")] = 20,
    at: Annotated[
        list[int] | None,
        typer.Option(help="Only at this token, negative from the end; once for each.", show_default="at all"),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="Rank by the mean relevance over the lines of this file, or its column text, instead."),
    ] = None,
    versus: Annotated[Path | None, typer.Option(help="With --texts: less the mean over those of this one.")] = None,
    method: How = "attnlrp",
    model: Model = None,
    dtype: Precision = "auto",
    device: Device = None,
    json_file: Json = None,
    html: Html = None,
) -> None:
    """Rank all neurons, heads or layers by their relevance for a prediction."""
    refuse_unwritable(json_file, html)
    for each in (texts, versus):
        refuse_same(each, json_file, html)
    if (text is None) == (texts is None):
        raise InputError("there is no text, or one beside --texts; pass the text in quotes, or a file with --texts")
    if versus is not None and texts is None:
        raise InputError("--versus compares two files; pass the first with --texts")
    if kind not in KINDS:
        raise MethodError(f"there are no units called {kind!r}; pass one of {', '.join(KINDS)}")
    about = asked(target, target_id, contrast, contrast_id)
    inputs = [None if path is None else read_column(path) for path in (texts, versus)]
    given = _text(text) if text is not None else inputs[0]
    chosen = _chosen(method)
    explainer = _loaded(model, dtype, device, target, contrast)
    from rich.console import Console

    how: dict[str, Any] = {
        "kind": kind,
        "top": top,
        "at": at or None,
        "method": chosen,
        "position": position,
        "versus": inputs[1],
    }
    with progress("Ranking …"):
        found = explainer.neurons(given, *about, **how)
    Console().print(replace(found, rows=found.rows[:ROWS]))
    if len(found) > ROWS:
        Console(stderr=True).print(f"and {len(found) - ROWS:,} more; --json writes all of them", style="dim")
    if json_file is not None:
        found.save(json_file)
    if html is not None:
        found.to_html(html)


@neurons.command(cls=Command)
def flow(
    text: Text,
    target: Target = None,
    contrast: Contrast = None,
    target_id: TargetId = None,
    contrast_id: ContrastId = None,
    position: Position = None,
    method: How = "attnlrp",
    model: Model = None,
    dtype: Precision = "auto",
    device: Device = None,
    json_file: Json = None,
    html: Html = None,
    png: Annotated[Path | None, typer.Option(help="Draw layers by tokens into this PNG file.")] = None,
) -> None:
    """Show which layers, branches and heads carry a prediction, at which tokens."""
    refuse_unwritable(json_file, html, png)
    refuse_same(json_file, html, png)
    text, about, chosen = _text(text), asked(target, target_id, contrast, contrast_id), _chosen(method)
    explainer = _loaded(model, dtype, device, target, contrast)
    from rich.console import Console

    with progress("Explaining …"):
        found = explainer.flow(text, *about, method=chosen, position=position)
    Console().print(found)
    _save(json_file, found.attribution)
    if html is not None:
        found.to_html(html)
    if png is not None:
        found.to_png(png)


@neurons.command(cls=Command)
def features(
    text: Text,
    sae: Annotated[
        Path, typer.Option(help="The folder of a sparse autoencoder, of SAELens or sparsify.", show_default=False)
    ],
    path: Annotated[
        str | None, typer.Option(help="The module whose output it reads.", show_default="where it was trained")
    ] = None,
    target: Target = None,
    contrast: Contrast = None,
    target_id: TargetId = None,
    contrast_id: ContrastId = None,
    position: Position = None,
    method: How = "attnlrp",
    top: Annotated[int, typer.Option(min=1, help="How many are shown.")] = 20,
    model: Model = None,
    dtype: Precision = "auto",
    device: Device = None,
    json_file: Json = None,
    html: Html = None,
) -> None:
    """Split a prediction over the features of a sparse autoencoder, its bias and its error."""
    refuse_unwritable(json_file, html)
    refuse_same(json_file, html)
    text, about, chosen = _text(text), asked(target, target_id, contrast, contrast_id), _chosen(method)
    with progress("Loading the autoencoder …"):
        from lrpx.explainer import recipe_of
        from lrpx.sae import SparseAutoencoder, explain_features

        autoencoder = SparseAutoencoder.load(sae)
    explainer = _loaded(model, dtype, device, target, contrast)
    from rich.console import Console

    from lrpx._features import drawn
    from lrpx._views.tabled import renderable

    with progress("Explaining …"):
        found = explain_features(
            explainer, text, autoencoder, *about, path=path, position=position, recipe=recipe_of(chosen)
        )
    Console().print(renderable(drawn(found, top)))
    _save(json_file, found)
    if html is not None:
        found.to_html(html, top)


@neurons.command(cls=Command)
def turn(
    text: Text,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="LAYER:UNIT=NUMBER sets a unit; once for each, as all below.")
    ] = None,
    scale: Annotated[list[str] | None, typer.Option(help="LAYER:UNIT=FACTOR multiplies what a unit has.")] = None,
    add: Annotated[list[str] | None, typer.Option(help="LAYER:UNIT=NUMBER is added to what a unit has.")] = None,
    clamp: Annotated[
        list[str] | None, typer.Option(help="LAYER:UNIT=LOW,HIGH keeps a unit between two bounds.")
    ] = None,
    kind: Annotated[str, typer.Option(help="What the units are: neurons or heads.")] = "neurons",
    at: Annotated[
        list[int] | None, typer.Option(min=0, help="Only at this token, from 0; once for each.", show_default="at all")
    ] = None,
    generate: Annotated[int, typer.Option(min=0, help="Write on for so many tokens, greedily.")] = 0,
    model: Model = None,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Set, scale or shift neurons or heads, and show what the model says before and after."""
    if kind not in ("neurons", "heads"):
        raise MethodError(f"--kind is {kind!r}; pass neurons or heads")
    from lrpx.interventions import Add, Clamp, Scale, Set, intervene

    makers: tuple[tuple[str, list[str] | None, Any, int], ...] = (
        ("--set", set_, Set, 1), ("--scale", scale, Scale, 1), ("--add", add, Add, 1), ("--clamp", clamp, Clamp, 2),
    )  # fmt: skip
    wanted = []
    for name, given, make, count in makers:
        for each in given or ():
            layer, unit, numbers = _parsed(name, each, count)
            wanted.append((layer, unit, make(*numbers, positions=at)))
            wanted[-1][-1].check()  # before a model is loaded
    text = _text(text)
    if not wanted:
        raise InputError("nothing is changed; pass --set, --scale, --add or --clamp, such as --scale 17:3948=5")
    explainer = _loaded(model, dtype, device)
    from lrpx.units import place_in, places

    found = places(explainer.model, _kind(kind))
    changes: dict[Place, dict[int, Change]] = {}
    for layer, unit, change in wanted:
        place = place_in(found, layer)
        if unit in changes.setdefault(place, {}):
            raise InputError(f"unit {unit} of {place.path} is changed twice; name it once")
        changes[place][unit] = change
    with progress("Asking the model …"):
        says = _written if generate else _predicted
        before = says(explainer, text, generate)
        with intervene(explainer.model, changes):  # type: ignore[arg-type]
            after = says(explainer, text, generate)
    _show(before, after)


def _kind(name: str) -> Kind:
    return "heads" if name == "heads" else "neurons"


def _loaded(
    model: str | None, dtype: str, device: str | None, target: str | None = None, contrast: str | None = None
) -> Explainer:
    """The model, which has the target and the contrast among its tokens or classes, if they are given as texts.

    Raises:
        ModelError, TargetError: it cannot be loaded, or has none such.
    """
    from lrpx.cli._explain import check_names
    from lrpx.explainer import Explainer

    with progress("Loading the model …"):
        hush()
        explainer = Explainer.from_pretrained(model, dtype=dtype, device=device)
    check_names(target, contrast, explainer)
    return explainer


def _save(path: Path | None, found: Any) -> None:
    """Write a result as JSON, if a file is named."""
    from lrpx._files import write_text
    from lrpx.cli._explain import as_json

    if path is not None:
        write_text(path, as_json([found]).decode())


def _text(given: str) -> str:
    """The text that is asked about; ``-`` is standard input.

    Raises:
        InputError: it is empty, or cannot be read.
    """
    text = read_text(given)
    refuse_empty(text)
    return text


def _chosen(method: str) -> Method:
    """The method, before a model is loaded.

    Raises:
        MethodError: there is none, or it tells nothing of units.
    """
    from lrpx.explainer import recipe_of
    from lrpx.methods import find

    found = find(method)
    recipe_of(found)
    return found


def _parsed(option: str, given: str, count: int) -> tuple[int | str, int, list[float]]:
    """``17:3948=0.5`` as a layer's number or a module's path, a unit, and numbers.

    Raises:
        InputError: it is no such thing.
    """
    place, _, numbers = given.rpartition("=")
    layer, _, unit = place.rpartition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
        if len(values) != count or not layer or not unit.isdecimal():
            raise ValueError
    except ValueError:
        form = "LAYER:UNIT=LOW,HIGH" if count == 2 else "LAYER:UNIT=NUMBER"
        raise InputError(
            f"{option} is {given!r}; write it as {form}, such as {option} 17:3948=0{',1' * (count - 1)}"
        ) from None
    return int(layer) if layer.isdecimal() else layer, int(unit), values


def _predicted(explainer: Explainer, text: str, _: int) -> list[str]:
    """The likeliest predictions, one a line; of numbers that are no chances, as scores, each of them.

    Raises:
        MethodError: there is no row of logits to read them from.
    """
    from lrpx._views.picture import number
    from lrpx.questions import Question, Questions

    bound = explainer.bound
    if bound.task.logits not in ("tokens", "classes"):
        raise MethodError(
            f"{type(explainer.model).__name__} is {bound.task.named} and predicts no token or class; in Python, "
            "lrpx.intervene changes what it says"
        )
    row = bound.reader.row(text)
    question = Question(0, bound.reader.position(row, None), bound.default_target())
    logits = bound.ask(Questions((row,), (question,))).logits[0].double()
    if bound.predicted(logits, row) is None:
        return [f"{number(value)}  {bound.exact_label(index)!r}" for index, value in enumerate(logits.tolist())]
    best = bound.probabilities(logits).topk(min(SHOWN, len(logits)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [f"{chance:6.1%}  {bound.exact_label(index)!r}" for chance, index in pairs]


def _written(explainer: Explainer, text: str, count: int) -> list[str]:
    """What a model writes on, greedily.

    Raises:
        MethodError: it writes nothing.
        InputError: so many tokens go beyond its context.
    """
    import torch

    from lrpx import tasks

    model: Any = explainer.model
    if explainer.task not in (tasks.Task.CAUSAL, tasks.Task.SEQ2SEQ) or not hasattr(model, "generate"):
        raise MethodError(f"{type(model).__name__} is {explainer.task.named} and writes nothing; leave --generate out")
    row, limit = explainer.bound.reader.row(text), explainer.bound.limit
    read = row.lengths[-1]  # by what writes; the last token that is written is read no more
    if limit is not None and read + count - 1 > limit:
        raise InputError(
            f"--generate {count} goes beyond the model's context of {limit} tokens, {read} of which are taken; pass "
            f"--generate {limit + 1 - read} at most"
        )
    ids = torch.tensor([row.segments[0].tokens.ids], device=tasks.input_device(model))
    pad = explainer.bound.pad_id
    how: dict[str, Any] = {**tasks.GREEDY, "max_new_tokens": count, "pad_token_id": 0 if pad is None else pad}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0]
    new = out if explainer.task is tasks.Task.SEQ2SEQ else out[ids.shape[1] :]
    return [explainer.tokenizer.decode(new, skip_special_tokens=True)]


def _show(before: Sequence[str], after: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text as Shown

    from lrpx._views.picture import one_line

    table = Table("before", "after")
    for column in table.columns:
        column.ratio, column.overflow = 1, "fold"
    for pair in zip(before, after, strict=True):
        table.add_row(*(Shown(one_line(each)) for each in pair))
    Console().print(table)
    if list(before) == list(after):
        Console(stderr=True).print("what was changed makes no difference to what is shown here", style="dim")
