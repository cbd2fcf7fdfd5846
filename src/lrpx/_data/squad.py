"""Questions with a context that holds the answer: SQuAD's JSON (Rajpurkar et al. 2018)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lrpx._data.agreement import Dropped
from lrpx.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """A question whose answer stands in its context.

    Args:
        id: as the file has it.
        line: which question of the file it is, from 1.
        context: the text.
        question: the question.
        answers: every accepted answer as the half-open range of its characters in the context, each once; the first is
            the one that most annotators gave, of these the one that the file has first.
    """

    id: str
    line: int
    context: str
    question: str
    answers: tuple[tuple[int, int], ...]

    @property
    def answer(self) -> str:
        """The first answer."""
        start, end = self.answers[0]
        return self.context[start:end]


def read_squad(path: Path, limit: int | None = None) -> tuple[list[Asked], list[Dropped]]:
    """The questions of a file that have an answer, and those that are left out, with the reason.

    Args:
        path: SQuAD's JSON, version 1.1 or 2.0.
        limit: take the first so many.

    Raises:
        DataError: it cannot be read, or is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        paragraphs = [each for article in content["data"] for each in article["paragraphs"]]
        asked = [(str(each["context"]), one) for each in paragraphs for one in each["qas"]]
        read = [(context, str(one["id"]), str(one["question"]), _spans(one), one) for context, one in asked]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name another file") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is no JSON as SQuAD has it ({type(error).__name__}: {error}); name such a file"
        ) from error
    found: list[Asked] = []
    dropped: list[Dropped] = []
    for number, (context, name, question, spans, _) in enumerate(read, 1):
        if limit is not None and len(found) == limit:
            break
        if not spans:
            dropped.append(Dropped(name, number, "has no answer in its context", question))
            continue
        if any(not text or start < 0 or not context.startswith(text, start) for text, start in spans):
            dropped.append(Dropped(name, number, "has an answer that is not where the file says", question))
            continue
        places = [(start, start + len(text)) for text, start in spans]
        order = sorted(dict.fromkeys(places), key=places.count, reverse=True)
        found.append(Asked(name, number, context, question, tuple(order)))
    return found, dropped


def _spans(one: Any) -> list[tuple[str, int]]:
    """``(text, start)`` of each answer."""
    return [] if one.get("is_impossible") else [(str(a["text"]), int(a["answer_start"])) for a in one["answers"]]
