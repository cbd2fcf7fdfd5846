"""What ``lrpx explain`` was asked for, and all that is wrong with it whatever the model is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from lrpx._files import goes_on
from lrpx.cli._streams import (
    DASH,
    read_text,
    refuse_empty,
    refuse_same,
    refuse_unreadable,
    refuse_unwritable,
    refuse_utf16,
)
from lrpx.errors import DataError, InputError, MethodError, ModelError, ResultFileError, TargetError

METHODS: Final = (
    "attnlrp", "lrp", "alti-logit", "logit", "alti", "gradient-x-input", "gradient-l1", "gradient-l2-squared",
    "gim", "libragrad", "lrp-ding", "lrp-voita", "lrp-chefer", "attnlrp-vit", "lrp-vit", "leave-one-out",
    "occlusion", "atman", "integrated-gradients", "smoothgrad", "gradient-shap", "kernel-shap", "rollout",
    "gradient-rollout", "grad-cam", "ifr", "random", "position", "centre", "libragrad-fullgrad", "pa-lrp",
    "pa-lrp-absolute", "pa-lrp-single-sink", "pa-lrp-positions", "pa-lrp-tokens",
)  # fmt: skip
"""The names of our methods, known without importing them."""

OF_UNITS: Final = (
    "attnlrp", "lrp", "gradient-x-input", "gim", "libragrad", "lrp-ding", "lrp-voita", "lrp-chefer", "attnlrp-vit",
    "lrp-vit", "pa-lrp-single-sink", "pa-lrp-tokens",
)  # fmt: skip
"""Those that tell something of neurons, heads and layers."""

RESULT: Final = b'{"line": '
"""How a line of results begins."""

_IDS = re.compile(r"\d{1,18}(?:[\s,]+\d{1,18})*")


@cache
def methods() -> tuple[str, ...]:
    """The names of our methods and of those that other packages bring."""
    return (*METHODS, *(entry.name for entry in metadata.entry_points(group="lrpx.methods")))


@dataclass(frozen=True)
class Wanted:
    """The options of ``lrpx explain``, as they are there."""

    text: str | None
    pair: str | None
    choices: tuple[str, ...]
    ids: bool
    texts: Path | None
    image: Path | None
    cell: str | None
    decoder: str | None
    target: str | None
    target_id: int | None
    contrast: str | None
    contrast_id: int | None
    position: int | None
    model: str | None
    revision: str | None
    device: str | None
    dtype: str
    recompute: bool
    methods: tuple[str, ...]
    ledger: bool
    words: bool
    html: Path | None
    json: Path | None
    save: Path | None

    def checked(self) -> Wanted:
        """The same with the text read from standard input, if that is meant.

        Raises:
            LRPxError: options that exclude each other, a file that is missing or cannot be written, an empty text.
        """
        self._check_options()
        refuse_unwritable(self.html, self.json, self.save, in_place=self.texts is not None, or_output=True)
        for name in self.methods:
            if name.endswith(".json"):
                _check_recipe(Path(name))
        text = self.text
        refuse_unreadable(self.texts, self.image)
        if self.texts is not None and self.texts.is_file():
            with self.texts.open("rb") as file:
                refuse_utf16(file.read(2), str(self.texts))
                file.seek(0)
                if not any(line.strip() for line in file):
                    raise DataError(f"{self.texts} has no text; write one a line")
        if self.texts is not None and self.json not in (None, DASH):
            _check_results(self.json)
        if self.texts is not None:
            _check_lines(self.texts)
        if text is not None:
            text = read_text(text)
        if self.texts is self.image is None:
            refuse_empty(text or "")
        if self.ids:
            for given in (text, self.decoder):
                if given is not None:
                    read_ids(given)
        return replace(self, text=text)

    @property
    def place(self) -> tuple[int, int] | None:
        """The row and the column of a map.

        Raises:
            TargetError: they are none.
        """
        if self.cell is None:
            return None
        found = re.fullmatch(r"\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*", self.cell)
        if found is None:
            raise TargetError(f"--cell is {self.cell!r}; pass a row and a column, such as --cell 3,4")
        return int(found[1]), int(found[2])

    @property
    def asked(self) -> tuple[str | int | None, str | int | None]:
        """The target and the contrast, as texts or as ids."""
        return asked(self.target, self.target_id, self.contrast, self.contrast_id)

    def _check_options(self) -> None:
        if self.text is None and self.texts is None and self.image is None:
            raise InputError("there is no text; write it after the command, or name a file of texts with --texts")
        if self.image is not None and self.model is None:
            raise ModelError("--image needs a model of images, and the bundled one reads texts; name one with --model")
        if self.cell is not None and self.image is None:
            raise InputError("--cell is a place of the map that a model makes of an image; pass --image, too")
        _ = self.place
        if self.text is not None and self.texts is not None:
            raise InputError("a text and --texts were both given; leave one of them out")
        for first, second in (
            ("pair", "choices"), ("pair", "ids"), ("choices", "ids"), ("image", "texts"), ("image", "pair"),
            ("image", "choices"), ("image", "ids"), ("image", "words"), ("image", "decoder"), ("cell", "contrast"),
            ("cell", "contrast_id"), ("texts", "pair"), ("texts", "choices"), ("texts", "html"), ("texts", "save"),
        ):  # fmt: skip
            if all(getattr(self, name) not in (None, False, ()) for name in (first, second)):
                one, other = ("--" + name.replace("choices", "choice").replace("_", "-") for name in (first, second))
                raise InputError(f"{one} and {other} exclude each other; leave one of them out")
        _ = self.asked
        if self.save is not None and len(self.methods) > 1:
            raise MethodError(
                f"--save holds one method, and {len(self.methods)} were given; pass one --method, or --json or --html, "
                "which hold several"
            )
        if self.html is not None and self.ledger and len(self.methods) > 1:
            raise MethodError("a page of several methods shows no ledger; pass one --method, or leave --html out")
        for path, name in ((self.html, "html"), (self.save, "save")):
            if path == DASH:
                raise InputError(f"--{name} - is no file; name one (only --json can be standard output)")
        if self.revision is not None and (self.model is None or Path(self.model).is_dir()):
            what = "the bundled model" if self.model is None else f"the folder {self.model}"
            raise ModelError(f"{what} has no revisions; leave --revision out, or name a model on the Hub with --model")
        refuse_same(self.texts, self.image, self.html, self.json, self.save)


def asked(
    target: str | None, target_id: int | None, contrast: str | None, contrast_id: int | None
) -> tuple[str | int | None, str | int | None]:
    """The target and the contrast, as texts or as ids.

    Raises:
        InputError: one is given as both.
        TargetError: one is empty, or they are the same.
    """
    for name, text, number in (("target", target, target_id), ("contrast", contrast, contrast_id)):
        if text is not None and number is not None:
            raise InputError(f"--{name} and --{name}-id exclude each other; leave one of them out")
        if text == "":
            raise TargetError(f'--{name} is empty; pass the text of one token, such as " are", or --{name}-id')
    first = target if target_id is None else target_id
    second = contrast if contrast_id is None else contrast_id
    if second is not None and first == second:
        raise TargetError(f"the contrast {second!r} is the target itself; pass another contrast")
    return first, second


def read_ids(text: str) -> list[int]:
    """Token ids from a text.

    Raises:
        InputError: there is something else in it.

    >>> read_ids("464 8251, 284")
    [464, 8251, 284]
    """
    if not _IDS.fullmatch(text.strip(" []\t\r\n")):
        raise InputError(f"{text[:60]!r} are no token ids; write whole numbers, such as '464 8251', or leave --ids out")
    return [int(number) for number in re.findall(r"\d+", text)]


def _check_lines(path: Path) -> None:
    """Refuse a table, whose lines are no texts: its header, its labels and its commas would be explained as such."""
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv", ".parquet"):
        raise DataError(
            f"{path} is a table, and --texts reads a text a line; write its texts into a .txt or a .jsonl file, or "
            "pipe the column in, as by cut -f 2 table.tsv | lrpx explain --texts -"
        )
    if ending in (".json", ".ndjson"):
        raise DataError(
            f'{path} ends in {ending!r}; write an object {{"text": "…"}} a line, in a file that ends in .jsonl'
        )


def _check_results(path: Path) -> None:
    """Refuse a file that has other things in it than results; whose they are is checked when the model is there."""
    if path.is_file() and not goes_on(path):
        with path.open("rb") as file:
            begins = file.read(len(RESULT))
        if not RESULT.startswith(begins):
            raise ResultFileError(f"{path} holds something else than results; name another file, or remove it")


def _check_recipe(path: Path) -> None:
    """Refuse a file that is no JSON; the rest is checked when it is read."""
    refuse_unreadable(path)
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MethodError(f"{path} is no recipe: no JSON ({error}); save one by recipe.save(path)") from error
