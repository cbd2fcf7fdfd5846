"""How much work a call is, and threads that wait for each other, without a clock."""

from __future__ import annotations

import sys
from contextlib import contextmanager


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
