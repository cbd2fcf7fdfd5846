"""``lrpx explain``: one text, or a file of them; one method, or several side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text

from lrpx._files import write_text
from lrpx._images import open_image
from lrpx._views.picture import number, one_line, percent, share
from lrpx.attributions import Attributions
from lrpx.cli import _lists
from lrpx.cli._streams import DASH, hush, progress, write_bytes
from lrpx.cli._wanted import read_ids
from lrpx.errors import InputError, MethodError, ModelError, TargetError
from lrpx.explainer import Explainer
from lrpx.methods import find
from lrpx.targets import Cell, looked_up
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.attribution import Attribution
    from lrpx.cli._wanted import Wanted
    from lrpx.methods import Method
    from lrpx.sae import FeatureRelevance

NEARLY = 0.02
"""A sum of tokens that misses the value by no more than this share is not worth a line."""


def explain(wanted: Wanted) -> None:
    """Explain what is wanted, show it, and keep it in the files that were named.

    Raises:
        LRPxError: it cannot be explained.
    """
    chosen = [find(name) for name in wanted.methods]  # before a model is loaded
    same = {method.name for method in chosen}
    if len(same) < len(chosen):
        raise InputError(f"the methods {', '.join(wanted.methods)} have names in common; pass each once")
    for method in chosen:
        if wanted.ledger and not method.has_ledger:
            raise MethodError(f"{method.name} has no ledger; leave --ledger out, or use attnlrp, lrp or alti-logit")
    if wanted.image is not None:
        open_image(wanted.image, None)  # before a model is loaded
    with progress("Loading the model …"):
        hush()
        options: dict[str, Any] = {} if wanted.revision is None else {"revision": wanted.revision}
        explainer = Explainer.from_pretrained(
            wanted.model, device=wanted.device, dtype=wanted.dtype, recompute=wanted.recompute, **options
        )
    _check_kind(wanted, explainer)
    check_names(wanted.target, wanted.contrast, explainer)
    try:
        if wanted.texts is not None:
            _lists.explain(wanted, explainer, chosen, show)
        else:
            _explain_one(wanted, explainer, chosen)
    except torch.OutOfMemoryError as error:
        raise InputError(_lists.NO_MEMORY) from error


def _check_kind(wanted: Wanted, explainer: Explainer) -> None:
    """Refuse a model of another kind than the input.

    Raises:
        ModelError: it reads no images, nothing else, or sounds.
        InputError: a text is missing, or too much; a place, where there is no map.
    """
    task = explainer.task
    told = f"{type(explainer.model).__name__} is {task.named}"
    if wanted.image is not None and not task.pictures:
        raise ModelError(f"{told}, which reads no images; leave --image out, or name another model with --model")
    if wanted.image is None and task.pictures:
        raise ModelError(f"{told}; pass an image with --image")
    if task is Task.SPEECH or not (task.segments or task.pictures):
        raise ModelError(f"{told}, and the command line reads texts; in Python, lrpx.Explainer explains it")
    if wanted.image is not None and task.segments and not (wanted.text or "").strip():
        raise InputError(f"{told}, which compares an image with a text; write the text after the command")
    if wanted.image is not None and not task.segments and wanted.text is not None:
        raise InputError(f"{told}, which takes an image alone; leave the text out")
    if wanted.cell is not None and task.reads != "map":
        raise InputError(f"{told}, which makes no map; leave --cell out")


def _explain_one(wanted: Wanted, explainer: Explainer, chosen: Sequence[Method]) -> None:
    with progress("Explaining …"):
        found = Attributions(_attribution(wanted, explainer, method) for method in chosen)
    if wanted.json == DASH:
        write_bytes(as_json(found))
    else:
        show(found)
    if wanted.html is not None:
        (found if len(found) > 1 else found[0]).to_html(wanted.html)
    if wanted.json is not None and wanted.json != DASH:
        write_text(wanted.json, as_json(found).decode())
    if wanted.save is not None:
        found[0].save(wanted.save)


def _attribution(wanted: Wanted, explainer: Explainer, method: Method) -> Attribution:
    text: Any = read_ids(wanted.text or "") if wanted.ids else wanted.text
    if wanted.pair is not None:
        text = (text, wanted.pair)
    if wanted.choices:
        text = (text, list(wanted.choices))
    if wanted.image is not None:
        text = (wanted.image, text) if explainer.task.segments else wanted.image
    decoder: Any = wanted.decoder
    if wanted.ids and decoder is not None:
        decoder = read_ids(decoder)
    target: Any
    target, contrast = wanted.asked
    if wanted.place is not None:
        target = Cell(target, *wanted.place)
    found = explainer(text, target, contrast, method, position=wanted.position, decoder=decoder, ledger=wanted.ledger)
    return found.words() if wanted.words else found  # type: ignore[no-any-return]


def as_json(found: Sequence[Attribution | FeatureRelevance]) -> bytes:
    """One result as an object, several as a list."""
    plain = [each.to_dict() for each in found]
    return (json.dumps(plain if len(plain) > 1 else plain[0], ensure_ascii=False, indent=1) + "\n").encode(
        errors="backslashreplace"
    )


def show(found: Sequence[Attribution]) -> None:
    """Print the heatmap of a method, or of several side by side."""
    console = Console()
    if len(found) > 1:
        console.print(Attributions(found))
        return
    console.print(found[0])
    if note := _rest(found[0]):
        console.print(note)


def _rest(a: Attribution) -> Text | None:
    """Where the value went that the tokens did not get, in one dim line, when the ledger can tell."""
    total = 0.0 if a.image is None else float(a.by_pixel().sum())
    if a.has_text:
        total += sum(token.relevance for token in a)
    missing = a.explained.value - total
    if a.ledger is not None or not a.is_decomposition or abs(missing) <= NEARLY * abs(a.explained.value):
        return None
    part = percent(share(missing, a.explained.value))
    told = f"{number(missing)}{f' ({part})' if part else ''}"
    unit = "token" if a.image is None else "token or pixel" if a.has_text else "pixel"
    return Text(
        f"\nthe other {told} came from no {unit}, but from positions, biases or what rules keep: --ledger shows it",
        "dim",
        overflow="fold",
    )


def check_names(target: str | None, contrast: str | None, explainer: Explainer) -> None:
    """Look the target and the contrast up, before anything is explained; and say that a word has another token than its
    letters, where one of the two was given, and the other meant perhaps.

    Raises:
        TargetError: there is no such token or class.
    """
    kind = explainer.task.logits
    for name, given in (("target", target), ("contrast", contrast)):
        if given is None or kind not in ("tokens", "classes"):
            continue
        word = f" {given}"
        one, other = _token(explainer, given), _token(explainer, word)
        if kind == "classes" or given[:1].isspace() or other is None:
            looked_up(explainer.bound.index, given, name)
        elif one is None:
            raise TargetError(f"--{name} {given!r} is not one token, but the word {word!r} is; pass --{name} {word!r}")
        elif one != other:
            note = f"lrpx: {given!r} is a token inside words; the word itself is another: --{name} {word!r}"
            Console(stderr=True).print(Text(one_line(note), "dim"), soft_wrap=True)


def _token(explainer: Explainer, text: str) -> int | None:
    try:
        return explainer.bound.index(text)
    except TargetError:
        return None
