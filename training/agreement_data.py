"""The agreement sentences, split once and for all into what the bundled model may see and what it may not.

The split is by sentence: a sentence whose normal form stands in the held-out part stands nowhere in
the training part, whatever file it comes from.

    python training/agreement_data.py --held-out > held_out.txt    # the benchmark's ids of the rows held out
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import NamedTuple

RANDOM_THIRD = "lgd_random10001.tsv"
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


def held_out_numbers(rows: int) -> list[int]:
    """Which of the rows of the random third are held out, from 0 and in order."""
    return sorted(random.Random(HELD_OUT_SEED).sample(range(rows), HELD_OUT_ROWS))


def split_rows(agreement: Path) -> tuple[list[AgreementRow], list[AgreementRow]]:
    """``(training, held_out)``: 4,500 rows of the random third are held out by a fixed seed."""
    rows = read_rows(agreement / RANDOM_THIRD)
    chosen = set(held_out_numbers(len(rows)))
    held_out = [row for i, row in enumerate(rows) if i in chosen]
    barred = {normal_form(row.sentence) for row in held_out}
    rest = [row for i, row in enumerate(rows) if i not in chosen] + read_rows(agreement / "lgd_extra.tsv")
    return [row for row in rest if normal_form(row.sentence) not in barred], held_out


def held_out_ids(agreement: Path) -> list[str]:
    """The held-out rows by the ids that ``lrpx._data.agreement`` gives them, ``"lgd_random10001:<line>"``."""
    path = agreement / RANDOM_THIRD
    return [f"{path.stem}:{number + 1}" for number in held_out_numbers(len(read_rows(path)))]


def main() -> None:
    parser = argparse.ArgumentParser(description="List the agreement rows that the bundled model never saw.")
    parser.add_argument("--held-out", action="store_true", required=True, help="print their ids, one a line")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of the data at hand")
    print(*held_out_ids(parser.parse_args().data / "agreement"), sep="\n")


if __name__ == "__main__":
    main()
