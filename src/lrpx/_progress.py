"""What goes on, on standard error or in the cell of a notebook: a bar for many inputs, a line for one long wait.

Nothing is shown in pipes and files, and nothing at all where a person asked for quiet.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

PAUSE: Final = 0.1
"""Seconds between two pictures of a bar in a notebook."""

_WAITS: ContextVar[Callable[[str], Any] | None] = ContextVar("lrpx waits", default=None)
"""How the call that runs here shows a wait; None for not at all."""


def is_watched() -> bool:
    """Whether a person looks on: in a terminal, or in a notebook."""
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


@contextmanager
def progress(what: str, total: int, *, wanted: bool | None, bar: bool) -> Iterator[Callable[[int], object]]:
    """Show what goes on inside the block.

    Args:
        what: what is counted, in a word.
        total: how many.
        wanted: whether to show anything; None for where a person looks on.
        bar: whether a bar is worth it; waits are shown in any case.

    Yields:
        What to call with how many more are done.
    """
    shown = is_watched() if wanted is None else wanted
    if not shown:
        kept = _WAITS.set(None)
        counting: Any = None
    elif bar:
        counting = _Cell(what, total) if _in_notebook() else _Line(what, total)
        kept = _WAITS.set(counting.waiting)
    else:
        counting = None
        kept = _WAITS.set(_told_in_cell if _in_notebook() else _told_on_line)
    try:
        if counting is None:
            yield lambda _: None
        else:
            with counting.shown():
                yield counting.advance
    finally:
        _WAITS.reset(kept)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what the block waits for, where the call around it shows anything."""
    tell = _WAITS.get()
    if tell is None:
        yield
        return
    with tell(what):
        yield


class _Bar:
    """A bar of rich, and what it says."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True, force_jupyter=False)
        self._what = what
        self._bar: Progress = Progress(*columns, console=console, auto_refresh=not _in_notebook())
        self._task = self._bar.add_task(what, total=total)

    def advance(self, more: int) -> None:
        """So many more are done."""
        self._bar.advance(self._task, more)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is waited for in the place of what is counted."""
        self._bar.update(self._task, description=what)
        try:
            yield
        finally:
            self._bar.update(self._task, description=self._what)


class _Line(_Bar):
    """A bar in a terminal."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the block runs."""
        with self._bar:
            yield


class _Cell(_Bar):
    """A bar in a notebook, as a picture that is drawn anew: it needs no widgets."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(what, total)
        self._handle: Any = None
        self._drawn = 0.0

    def advance(self, more: int) -> None:
        """So many more are done; at most a few pictures a second."""
        super().advance(more)
        if time.monotonic() - self._drawn > PAUSE:
            self._draw()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what is waited for in the place of what is counted."""
        with super().waiting(what):
            self._draw()
            yield
        self._draw()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it in the cell; it stays there."""
        from IPython.display import display

        self._handle = display(self._table(), display_id=True)
        try:
            yield
        finally:
            self._draw()

    def _table(self) -> Any:
        return self._bar.make_tasks_table(self._bar.tasks)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self._table())


@contextmanager
def _told_on_line(what: str) -> Iterator[None]:
    """One line with a spinner, gone afterwards; plain in a pipe, where someone asked for it."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, force_jupyter=False).status(Text(what)):
        yield


@contextmanager
def _told_in_cell(what: str) -> Iterator[None]:
    from IPython.display import display
    from rich.text import Text

    handle = display(Text(f"{what} …"), display_id=True)
    try:
        yield
    finally:
        handle.update(Text(f"{what}: done"))


def _in_notebook() -> bool:
    """Whether the program is run by a kernel, such as Jupyter's, VS Code's or Colab's."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
