"""Do positions make an explanation truer to the model? Tables 1 to 3 of Bakish et al. (2025), on one's own model: of
texts, and of multiple-choice questions whose options stand in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from lrpx._data.texts import read_columns
from lrpx.benchmarks._contract import Source, register
from lrpx.benchmarks._faithfulness import Faithfulness, TextSample, listed
from lrpx.errors import DataError, InputError
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx.model import BoundModel

LETTERS: Final = "ABCDEFGHIJ"
"""What the options of a question are called, from the first."""


@register
@dataclass(frozen=True)
class PositionTests(Faithfulness):
    """Do positions make an explanation truer to the model? By generation and pruning (Bakish et al. 2025).

    Args:
        choices: the columns of the options of multiple-choice questions, with commas between.
    """

    perturbation: Annotated[
        str, "Some of: attention-mask, zero-embedding, mask-token, unk, pad, delete; with commas between."
    ] = "unk"
    choices: Annotated[
        str | None,
        "The columns of the options of multiple-choice questions, with commas between; the label is a letter from A.",
    ] = None

    name: ClassVar[str] = "positions"
    next_token: ClassVar[str] = "logit"
    title: ClassVar[str] = "Do positions make an explanation truer to the model?"
    methods: ClassVar[tuple[str, ...]] = (
        "attnlrp", "pa-lrp", "pa-lrp-absolute", "pa-lrp-single-sink", "pa-lrp-positions", "random",
    )  # fmt: skip

    def usual(self) -> list[str]:
        """Those of Bakish et al. 2025, Tables 1 to 3."""
        return ["AUAC generation", "AU-MSE generation", "AUAC pruning", "AU-MSE pruning"]

    @cached_property
    def options_of(self) -> tuple[str, ...]:
        """The columns of the options; none where the data are no multiple-choice questions.

        Raises:
            InputError: there are fewer than two, or more than there are letters.
        """
        found = () if self.choices is None else tuple(listed(self.choices, "choices"))
        if self.choices is not None and not 2 <= len(found) <= len(LETTERS):
            raise InputError(f"choices names {len(found)} columns; name 2 to {len(LETTERS)}, with commas between")
        return found

    def settings(self) -> dict[str, Any]:
        """See :meth:`Perturbed.settings`; the columns however they are spaced."""
        return super().settings() | {"choices": ",".join(self.options_of) or None}

    def check(self) -> None:
        """See the class."""
        super().check()
        if self.options_of and (self.target not in ("predicted", "label") or self.context is not None):
            raise InputError(
                "of multiple-choice questions the target is predicted (the model's own option) or label (the right "
                "one), and each is read whole; leave --context out"
            )

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Perturbed.check_model`; options are for a language model."""
        super().check_model(model)
        if self.options_of and model.task is not Task.CAUSAL:
            raise InputError(
                f"{type(model.module).__name__} predicts no next token, so it names no option; leave --choices out"
            )

    def read(self) -> Source:
        """The texts of the file; of multiple-choice questions what the model is asked, :func:`asked`.

        Raises:
            DataError: it cannot be read, or has no such column, no text, or a label that is no letter.
        """
        if not self.options_of:
            return super().read()
        rows = []
        for line, found in read_columns(self.data, [self.text, *self.options_of, self.label], self.limit):
            letters = LETTERS[: len(self.options_of)]
            if found[self.label] not in letters or len(found[self.label]) != 1:
                raise DataError(
                    f"{self.data}:{line} has the label {found[self.label]!r}; give one of the letters "
                    f"{', '.join(letters)}, or name the column with --label"
                )
            text = asked(found[self.text], [found[name] for name in self.options_of])
            rows.append({"id": f"{self.data.stem}:{line}", "line": line, "text": text, "label": found[self.label]})
        before = 0 if self.last is None else max(len(rows) - self.last, 0)
        counts = {"texts": len(rows)} | ({"not of the last": before} if before else {})
        return Source(pa.Table.from_pylist(rows[before:], self.source), (), {"counts": counts})

    def _sample(self, row: Mapping[str, Any], model: BoundModel) -> TextSample | str:
        """A sample, or why there is none."""
        if not self.options_of:
            return super()._sample(row, model)
        try:
            ids, more = self._ids(row["text"], model)
        except InputError as error:
            return str(error).split(";")[0]
        end = max(i + 1 for i, each in enumerate(ids) if each not in self._special(model))
        more = {name: values[:end] for name, values in more.items()}
        made = model.reader.row({"input_ids": ids[:end], "attention_mask": [1] * end} | more)
        position = model.reader.position(made)
        letters = tuple(model.index(f" {letter}") for letter in LETTERS[: len(self.options_of)])  # behind a colon
        label = letters[LETTERS.index(row["label"])]
        question = Questions((made,), (Question(0, position, Logit(label)),))
        target = label
        if self.target == "predicted":
            logits = model.ask(question).logits[0]
            target = max(letters, key=lambda letter: float(logits[letter]))
        may = tuple(np.flatnonzero(self.hideable(question, model)).tolist())
        return TextSample(row["id"], made, position, label, model.label(label), Logit(target), may, letters)


def asked(question: str, options: Sequence[str]) -> str:
    """What a language model is asked, behind which it says a letter.

    >>> print(asked("Which is a bird?", ["a wren", "a trout"]))
    Which is a bird?
    A. a wren
    B. a trout
    Answer:
    """
    lines = [f"{letter}. {option.strip()}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])
