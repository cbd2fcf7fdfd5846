"""The longest context that can be explained in a given memory.

    python bench/longest_context.py [--limit-gib 20] [--shapes llama-512x8] [--try-seconds 7200]

Every try is a fresh process whose memory, weights and all, is limited: an allocation beyond it fails (RLIMIT_DATA, or
the memory fraction of a GPU), so nothing is killed. Nothing is extrapolated: a context fits when its relevance came
back, and the search ends when one at most 10 % longer ran out of memory. The memory at two short lengths says where
to begin, and no more. A try that takes longer than ``--try-seconds`` ends the search, and is called so.

The time of attention grows with the square of the length, and on a few cores it is hours where the memory is large.
With ``--without-attention`` its arithmetic alone is left out: zeros of the same shapes stand where its results go, so
that what is allocated stays the same, which ``bench/memory.py`` shows with and without the same option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from servers import Server, add_cases, add_subjects, arguments, head, print_header, row, tokens
from subjects import SUBJECTS

if TYPE_CHECKING:
    import argparse

DEFAULT = (
    "floor B",
    "lrpx attnlrp",
    "lrpx attnlrp recomputed",
    "LXT efficient",
    "LXT efficient, frozen",
    "LXT efficient, checkpointed",
)
CLOSE = 1.1


class Found(NamedTuple):
    """The longest context that fits, the time and the memory it took, and how the search ended."""

    length: int
    seconds: float
    mib: float
    end: str


def search(subject: str, shape: str, options: argparse.Namespace) -> Found:
    def attempt(length: int) -> dict[str, Any]:
        with Server(
            SUBJECTS[subject][0],
            shape,
            options,
            limit_gib=options.limit_gib,
            without_attention=options.without_attention,
        ) as server:
            server.ask(subject, tokens(shape, 16, 0))
            return server.ask(subject, tokens(shape, length, 0), memory=True, timeout=options.try_seconds)

    fits = Found(0, 0.0, 0.0, "")
    fails = 0
    step = CLOSE
    used: list[tuple[int, float]] = []
    while not fails or fails > CLOSE * fits.length:
        if fits.length >= options.at_most:
            return fits._replace(end="as far as was asked")
        if not fails and len(used) < len(options.lengths):
            length = options.lengths[len(used)]
        elif not fails and len(used) == len(options.lengths):
            (short, low), (long, high) = used[-2:]
            room = 1024 * options.limit_gib - high
            length = round(max(CLOSE * long, (long + room * (long - short) / max(high - low, 1.0)) / CLOSE))
        elif not fails:
            length, step = round(step * fits.length), step**2
        else:
            length, step = round(max((fits.length * fails) ** 0.5, fails / step)), step**2
        length = min(length, options.at_most)
        answer = attempt(length)
        if "error" not in answer:
            fits = Found(length, answer["seconds"], answer["held"] + answer["mib"], "")
            used.append((length, fits.mib))
        elif answer.get("out_of_memory") and length > options.lengths[0]:
            fails = length
        else:
            return fits._replace(end=f"{length:,}: {answer['error']}")
    return fits._replace(end=f"{fails:,}: out of memory")


def main() -> None:
    parser = arguments(__doc__)
    add_cases(parser, ["llama-512x8"], [1024, 4096])
    add_subjects(parser, DEFAULT)
    parser.add_argument("--without-attention", action="store_true", help="leave out its arithmetic, not its memory")
    parser.add_argument("--limit-gib", type=float, default=20.0, help="for the whole process")
    parser.add_argument("--at-most", type=int, default=2**20, help="look no further than this many tokens")
    parser.add_argument("--try-seconds", type=float, default=7200.0)
    options = parser.parse_args()
    print_header(options, options.subjects)
    head(
        "shape", "subject", f"tokens in {options.limit_gib:g} GiB", "seconds", "resident MiB", "the next that was tried"
    )
    for shape in options.shapes:
        for name in options.subjects:
            found = search(name, shape, options)
            row(shape, name, f"{found.length:,}", f"{found.seconds:.1f}", f"{found.mib:.0f}", found.end)


if __name__ == "__main__":
    main()
