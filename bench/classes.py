"""What the scripts that go over every class of transformers share: their order, a process for each, what came of it."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from concurrent.futures import as_completed
from typing import TYPE_CHECKING, Any

from pebble import ProcessPool

from lrpx.coverage import _checking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lrpx.coverage import ModelClass

SECONDS = 240.0
"""How long a class may take."""


def in_order(classes: Iterable[ModelClass], first: int | None = None) -> list[ModelClass]:
    """Each model type's first class before its others; only the ``first`` so many, if given."""
    classes, types = list(classes), set()
    firsts = [one for one in classes if not (one.model_type in types or types.add(one.model_type))]
    return list(dict.fromkeys([*firsts, *classes]))[:first]


def each_examined(
    examine: Callable[..., Any], classes: Sequence[ModelClass], workers: int, *more: Any
) -> Iterator[tuple[ModelClass, Any]]:
    """Each class, as it is done, with what ``examine(class, *more)`` gave in a process of its own, or its error."""
    pool = ProcessPool(workers, context=multiprocessing.get_context("spawn"))
    waiting = {pool.schedule(examine, args=[one, *more], timeout=SECONDS): one for one in classes}
    for future in as_completed(waiting):
        yield waiting[future], future.exception() or future.result()
    pool.close()
    pool.join()


def listed(found: Mapping[ModelClass, Mapping[str, Any]], outcome: str, told: Callable[[Any], str]) -> list[str]:
    """The classes and recipes of an outcome, together where they have the same reason; ``told`` says more of one."""
    grouped = defaultdict(list)
    for one, every in found.items():
        for recipe, each in every.items():
            if each.outcome == outcome:
                grouped[each.reason].append(f"{one.name} ({one.mapping}, {recipe}{told(each)})")
    if not grouped:
        return []
    lines = [f"- {reason}: {', '.join(names)}" for reason, names in sorted(grouped.items())]
    return ["", f"## {outcome.capitalize()}", "", *lines]


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {_checking.first_line(str(error))}"
