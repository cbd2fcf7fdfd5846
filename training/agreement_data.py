"""The agreement sentences, split once and for all into what the bundled model may see and what it may not.

The split is by sentence: a sentence whose normal form stands in the held-out part stands nowhere in
the training part, whatever file it comes from.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

HELD_OUT_ROWS = 4500
HELD_OUT_SEED = 20250222


class AgreementRow(NamedTuple):
    """One row of the Goldberg/Linzen set, in its file's order of columns."""

    attractors: int
    sentence: str
    masked: str
    right: str
    wrong: str

    @property
    def prefix(self) -> str:
        """The words before the verb."""
        return self.masked.split("***mask***")[0].strip()


def read_rows(path: Path) -> list[AgreementRow]:
    """Every row of an ``lgd_dataset.tsv`` file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        attractors, sentence, masked, right, wrong = line.split("\t")
        rows.append(AgreementRow(int(attractors), sentence, masked, right, wrong))
    return rows


def normal_form(sentence: str) -> str:
    """Letters and digits only, lower case: how two spellings of one sentence are told to be the same."""
    return re.sub(r"[^a-z0-9]+", "", sentence.lower())


def split_rows(agreement: Path) -> tuple[list[AgreementRow], list[AgreementRow]]:
    """``(training, held_out)``: 4,500 rows of the random third are held out by a fixed seed."""
    rows = read_rows(agreement / "lgd_random10001.tsv")
    chosen = set(random.Random(HELD_OUT_SEED).sample(range(len(rows)), HELD_OUT_ROWS))
    held_out = [row for i, row in enumerate(rows) if i in chosen]
    barred = {normal_form(row.sentence) for row in held_out}
    rest = [row for i, row in enumerate(rows) if i not in chosen] + read_rows(agreement / "lgd_extra.tsv")
    return [row for row in rest if normal_form(row.sentence) not in barred], held_out
