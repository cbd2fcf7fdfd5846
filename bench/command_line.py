"""The processor time of the commands that need no model: help, the version, completion.

    python bench/command_line.py [--times 5]

The median of so many processes each, of user and system time, as the operating system counts it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys

COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'lrpx'; from lrpx.cli import main; main()"]
COMPLETING = {"_LRPX_COMPLETE": "complete_bash", "COMP_WORDS": "lrpx explain --method gr", "COMP_CWORD": "3"}
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "lrpx --version": (["--version"], {}),
    "lrpx --help": (["--help"], {}),
    "lrpx explain --help": (["explain", "--help"], {}),
    "lrpx benchmark --help": (["benchmark", "--help"], {}),
    "lrpx benchmark sva --help": (["benchmark", "sva", "--help"], {}),
    "lrpx coverage --help": (["coverage", "--help"], {}),
    "completion of --method": ([], COMPLETING),
}


def seconds(arguments: list[str], surroundings: dict[str, str]) -> float:
    """The processor time of one process of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*COMMAND, *arguments], env=os.environ | surroundings, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    for name, case in CASES.items():
        print(f"{name:28}{statistics.median(seconds(*case) for _ in range(options.times)):.3f} s")


if __name__ == "__main__":
    main()
