"""The command as a process, as a shell starts it."""

from __future__ import annotations

import os
import subprocess
import sys

LRPX = [sys.executable, "-m", "lrpx"]
DOORS = ["explain", "The doors of the house", "--target", " are", "--contrast", " is"]


def start(*arguments, env=(), **how):
    """A process of the command, with its output in pipes unless other places are named."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    surroundings = os.environ | {"HF_HUB_OFFLINE": "1"} | dict(env)
    return subprocess.Popen([*LRPX, *map(str, arguments)], env=surroundings, **pipes | how)


def finish(process, given=None):
    """``(exit code, standard output, standard error)`` of a process, as texts, without a slow machine's progress."""
    out, err = process.communicate(given)
    lines = [line for line in (err or b"").decode().splitlines(True) if not line.rstrip().endswith(("…", "..."))]
    return process.returncode, (out or b"").decode(), "".join(lines)
