"""Hooks on the modules of a model, which are all taken off again, and are seen while they are there."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module


CAPTURES = "transformers.utils.output_capturing"
"""Where the hooks are from that keep what modules give (``output_hidden_states``). They stay from the first call on
that asks for them, and one put on later would change nothing of what they keep."""


def captures(hook: Any) -> bool:
    """Whether a hook is transformers' own, which keeps what a module gives."""
    return getattr(hook, "__module__", None) == CAPTURES


def is_own(hook: Any) -> bool:
    """Whether a hook is one of this package's."""
    return str(getattr(hook, "__module__", None)).startswith("lrpx.")


def capture_last(module: Module) -> None:
    """Let transformers keep what a module gives (``output_hidden_states``) behind what changes it."""
    held: Any = module._forward_hooks
    for number, hook in list(held.items()):
        if captures(hook):
            held.move_to_end(number)


def keep_instead(module: Module, value: Any, other: Any) -> None:
    """Have transformers keep what is written in the place of what a module gave, where it has kept that already: a hook
    of the user's that changes nothing may stand between its own and the one that writes."""
    held = [captures(hook) for hook in module._forward_hooks.values()]
    if not any(held) or held[-1]:  # it comes last, and keeps what it is given
        return
    collected: dict[str, Any] = sys.modules[CAPTURES]._active_collector.get() or {}
    for kept in collected.values():
        if isinstance(kept, list) and kept and kept[-1] is value:
            kept[-1] = other


class Hooks:
    """Forward hooks that are known before torch has them, so that they can be taken off at any moment: an interrupt may
    fall between any two steps of the code that puts them on or takes them off."""

    def __init__(self) -> None:
        self._known: list[tuple[Module, Callable[..., Any]]] = []

    def before(self, module: Module, hook: Callable[..., Any], **how: bool) -> None:
        """A hook of its own that is called before the module, as ``register_forward_pre_hook`` has it."""
        self._known.append((module, hook))
        module.register_forward_pre_hook(hook, **how)

    def after(self, module: Module, hook: Callable[..., Any], **how: bool) -> None:
        """A hook of its own that is called after the module, as ``register_forward_hook`` has it; and transformers'
        behind it, if no hook of the user's is between them: what a head makes of hidden states is so, whenever these
        were first asked for."""
        self._known.append((module, hook))
        module.register_forward_hook(hook, **how)
        behind = dropwhile(lambda each: not captures(each), [*module._forward_hooks.values()])
        if all(captures(each) or is_own(each) for each in behind):
            capture_last(module)

    def remove(self) -> None:
        """Take all of them off; what was interrupted in it is done by doing it again."""
        for module, hook in self._known:
            for hooks, *marks in (
                (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
                (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
            ):
                for number, each in list(hooks.items()):
                    if each is hook:
                        for mark in marks:
                            mark.pop(number, None)
                        hooks.pop(number, None)
        self._known.clear()


@contextmanager
def hooks() -> Iterator[Hooks]:
    """Hooks that are there in the block.

    >>> import torch
    >>> model = torch.nn.Tanh()
    >>> with hooks() as on:
    ...     on.after(model, lambda module, args, output: output + 1)
    ...     found = model(torch.zeros(1))
    >>> float(found), float(model(torch.zeros(1)))
    (1.0, 0.0)
    """
    on = Hooks()
    try:
        yield on
    finally:
        try:
            on.remove()
        except BaseException:
            on.remove()
            raise


_lock = threading.RLock()
_plainly: dict[object, Any] = {}
"""The blocks in which compiled code runs plainly, and how torch ran it before the first of them."""


@contextmanager
def plainly() -> Iterator[None]:
    """In the block, what ``torch.compile`` has compiled runs plainly, and nothing is compiled: compiled code does not
    look at hooks that come later, and keeps those that were there. It holds for all threads, as torch has it."""
    from torch._dynamo import eval_frame  # slow to load

    block = object()

    def leave() -> None:
        with _lock:
            if len(_plainly) == 1 and block in _plainly:
                eval_frame._set_stance(_plainly[block])
            _plainly.pop(block, None)

    try:
        with _lock:
            # known before torch has it, as hooks are
            _plainly[block] = next(iter(_plainly.values()), eval_frame._stance)
            eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
        yield
    finally:
        try:
            leave()
        except BaseException:
            leave()
            raise
