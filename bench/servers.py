"""Run subjects in processes of their own, each in the environment that it needs, and measure them in turn.

The environments of peers are made in ``.bench/`` at the root of the repository when they are first needed; nothing of
them is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from subjects import SHAPES, SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".bench"
TORCH = f"torch=={metadata.version('torch').split('+')[0]}"
ENVIRONMENTS = {
    "lxt": (TORCH, "transformers==4.52.4", "lxt==2.1"),
    "lxt-explicit": (TORCH, "transformers==4.46.3", "lxt==0.6.1"),
    "captum": (TORCH, f"transformers=={metadata.version('transformers')}", "captum==0.9.0"),
}
"""What is installed for each peer: its newest release, and the transformers that this was written for. LXT ships its
explicit models in releases before 2.0 only."""


def python_of(environment: str) -> str:
    """The Python of an environment, which is made if it is missing or holds something else."""
    if environment == "lrpx":
        return sys.executable
    folder = CACHE / environment
    wanted = "\n".join(ENVIRONMENTS[environment])
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted:
        print(f"making {folder} …", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *ENVIRONMENTS[environment]], check=True, stdout=sys.stderr)
        installed.write_text(wanted)
    return str(folder / "bin" / "python")


class Server:
    """A process that measures the subjects of one environment on one shape.

    Args:
        weights: share the weights with other servers, through a file in ``.bench/``.
        limit_gib: make allocations fail beyond this much memory.
        without_attention: leave out the arithmetic of attention, whose memory stays (``subjects.py``).
    """

    def __init__(
        self,
        environment: str,
        shape: str,
        options: argparse.Namespace,
        weights: bool = False,
        limit_gib: float | None = None,
        without_attention: bool = False,
    ) -> None:
        command = [python_of(environment), str(Path(__file__).with_name("subjects.py")), shape]
        command += ["--device", options.device, "--threads", str(options.threads)]
        if weights:
            CACHE.mkdir(exist_ok=True)
            command += ["--weights", str(CACHE / f"{shape}.pt")]
        command += [] if limit_gib is None else ["--limit-gib", str(limit_gib)]
        command += ["--without-attention"] if without_attention else []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        settings = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=settings
        )
        hello = self._answer(None)
        if "error" in hello:
            raise RuntimeError(f"the server of {environment} did not start: {hello['error']}")

    def ask(self, subject: str, ids: list[int], memory: bool = False, timeout: float | None = None) -> dict[str, Any]:
        """One attribution: its ``seconds`` and ``relevance``, and the MiB ``held`` before and needed above that
        (``mib``); or an ``error``, and whether it is ``out_of_memory``."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            request = {"subject": subject, "ids": ids, "memory": memory}
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer(timeout)

    def _answer(self, timeout: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            self._process.kill()
            return {"error": f"not done in {timeout:.0f} s"}
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self._process.wait()
        self._log.seek(0)
        last = (self._log.read().strip().splitlines() or ["nothing was logged"])[-1]
        out_of_memory = "bad_alloc" in last or "MemoryError" in last or "allocate memory" in last
        return {"error": f"the process ended with code {code}: {last}", "out_of_memory": out_of_memory}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Times(dict[str, list[float]]):
    """The seconds of each subject, one for each round."""

    def milliseconds(self, name: str) -> float:
        return 1000 * statistics.median(self[name])

    def ratio(self, name: str, to: str) -> float:
        """How much longer one subject takes than another: the median over rounds of the ratio within the round, which
        leaves out how fast the machine is at that moment."""
        return statistics.median(a / b for a, b in zip(self[name], self[to], strict=True))


class Fleet:
    """One server for each environment that some subjects need, on one shape.

    ``problems`` says why a subject could not be measured; it is then left out.
    """

    def __init__(self, shape: str, subjects: Sequence[str], options: argparse.Namespace) -> None:
        self.shape = shape
        self.subjects = list(subjects)
        self.problems: dict[str, str] = {}
        environments = dict.fromkeys(SUBJECTS[name][0] for name in subjects)
        self.servers: dict[str, Server] = {}
        for environment in environments:
            self.servers[environment] = Server(environment, shape, options, weights=len(environments) > 1)
            self.ask(next(name for name in subjects if SUBJECTS[name][0] == environment), tokens(shape, 4, 0))

    def ask(self, subject: str, ids: list[int]) -> dict[str, Any]:
        answer = self.servers[SUBJECTS[subject][0]].ask(subject, ids)
        if "error" in answer:
            self.problems[subject] = answer["error"]
        return answer

    def times(self, length: int, runs: int, warm: int = 2) -> Times:
        """Measure every subject once in each of ``runs`` rounds, after some that do not count, in an order drawn anew
        for each: what one leaves behind in caches and allocators then falls on all alike."""
        seconds = Times({name: [] for name in self.subjects if name not in self.problems})
        for run in range(runs + warm):
            ids = tokens(self.shape, length, run)
            for name in random.Random(run).sample(list(seconds), len(seconds)):
                answer = self.ask(name, ids)
                if "error" in answer:
                    del seconds[name]
                elif run >= warm:
                    seconds[name].append(answer["seconds"])
        return seconds

    def difference(self, one: str, other: str, length: int) -> float:
        """The largest difference of two subjects' relevance, relative to the largest relevance; NaN for want of one."""
        answers = [self.ask(name, tokens(self.shape, length, 0)) for name in (one, other)]
        a, b = (torch.tensor(answer.get("relevance", [torch.nan])) for answer in answers)
        return float((a - b).abs().max() / a.abs().max())

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


@contextlib.contextmanager
def fleet(shape: str, subjects: Sequence[str], options: argparse.Namespace) -> Iterator[Fleet]:
    opened = Fleet(shape, subjects, options)
    try:
        yield opened
    finally:
        opened.close()


def tokens(shape: str, length: int, seed: int) -> list[int]:
    """Random token ids, the same for the same arguments."""
    vocabulary = SHAPES[shape].sizes.get("vocab_size", 30000)
    chosen = random.Random(f"{length} {seed}")
    return [chosen.randrange(3, vocabulary) for _ in range(length)]


# ---------------------------------------------------------------------------- the script


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every script."""
    parser = argparse.ArgumentParser(
        description=description.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


def add_cases(parser: argparse.ArgumentParser, shapes: Sequence[str], lengths: Sequence[int], runs: int = 0) -> None:
    """The options that say on which models and lengths to measure; and how often, by default ``runs`` times."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(shapes))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(lengths), help="in tokens")
    if runs:
        parser.add_argument("--runs", type=int, default=runs, help="how many runs the median is over")


def add_subjects(parser: argparse.ArgumentParser, subjects: Sequence[str]) -> None:
    """The option that says what to measure; the environments of peers are made when one of theirs is named."""
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(subjects), metavar="SUBJECT")


def print_header(options: argparse.Namespace, subjects: Iterable[str]) -> None:
    """The command, the machine, and the versions of what is measured."""
    settings = "".join(f"{name}={value} " for name, value in os.environ.items() if name.startswith("MALLOC_"))
    print(f"`{settings}python {shlex.join(['bench/' + Path(sys.argv[0]).name, *sys.argv[1:]])}`")
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.split(":", 1)[1].strip() for line in info if line.startswith("model name")}
    machine = f"{', '.join(sorted(names))}, {os.cpu_count()} cores, {options.threads} threads"
    if options.device != "cpu":
        machine += f"; {torch.cuda.get_device_name(options.device)}"
    print(f"\n{time.strftime('%Y-%m-%d')}, {machine}.", end=" ")
    for environment in dict.fromkeys(SUBJECTS[name][0] for name in subjects):
        if environment == "lrpx":
            versions = [f"{package} {metadata.version(package)}" for package in ("lrpx", "torch", "transformers")]
        else:
            versions = [each.replace("==", " ") for each in ENVIRONMENTS[environment]]
        print(f"{environment}: {', '.join(versions)}.", end=" ")
    print("\n", flush=True)


def row(*cells: object) -> None:
    """One line of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    print(f"|{'---|' * len(cells)}", flush=True)


def notes(lines: Iterable[str]) -> None:
    """What is said below a table."""
    print("".join(f"\n- {line}" for line in lines), flush=True)
