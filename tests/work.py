"""How much work a call is, and threads that wait for each other, without a clock."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from types import FunctionType


@contextmanager
def aborting(barrier):
    """Let the other threads at a barrier fail too, where this one does, rather than wait for ever."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def calls(function, *args):
    """How many functions Python calls inside ``function(*args)``: the same on any machine, however busy it is."""
    count = 0

    def profile(_, event, __):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return count


@contextmanager
def calls_of(module, of=dict):
    """``of`` what a module is given by name, for each of its calls, as the block goes on. By no hook and no function of
    a user's, beside which rows run one by one, and what was tried of the module is tried again."""
    found = []
    forward = module.forward

    def heard(*args, **named):
        found.append(of(named))
        return forward(*args, **named)

    own = FunctionType(heard.__code__, {"__name__": "lrpx._hooks"}, closure=heard.__closure__)
    own.__signature__ = inspect.signature(forward)
    module.forward = own
    try:
        yield found
    finally:
        del module.forward


class Interrupt:
    """Raises a KeyboardInterrupt in this thread, at one of the moments at which Python looks for a signal: when a
    function begins or goes on, and after a function of C.

    Args:
        functions: code objects; only moments inside calls of these count.
        at: which of these moments, from 0.
    """

    def __init__(self, functions, at):
        self._functions = frozenset(functions)
        self._left = at
        self.fell = False

    def _profile(self, frame, event, _):
        if event not in ("call", "c_return"):
            return
        inside = frame
        while inside is not None and inside.f_code not in self._functions:
            inside = inside.f_back
        if inside is None:
            return
        self._left -= 1
        if self._left < 0:
            self.fell = True
            sys.setprofile(None)
            raise KeyboardInterrupt

    def __enter__(self):
        self._before = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        sys.setprofile(self._before)
