"""Time of one attribution, side by side with plain Gradient×Input and with peers.

    python bench/speed.py [--shapes llama-512x8] [--lengths 16 64 256] [--runs 20] [--subjects "floor B" "lrpx attnlrp"]

Random weights in float32, the same for every subject, as are the token ids. Floor A: Gradient×Input with frozen
parameters and all positions through the head. Floor B: the same with only the needed row. Every round measures each
subject once, in an order of its own; a cell is the median over rounds of the ratio to floor A / to floor B. Peers run
in processes and environments of their own (``servers.py``), and the clock inside them. Captum's subjects have to be
named.
"""

from __future__ import annotations

from servers import add_cases, add_subjects, arguments, fleet, head, notes, print_header, row

FLOORS = ("floor A", "floor B")
DEFAULT = (
    "lrpx attnlrp",
    "lrpx lrp",
    "lrpx attnlrp compiled",
    "lrpx lrp compiled",
    "LXT efficient",
    "LXT efficient, frozen",
    "LXT explicit",
)
SAME = ("lrpx attnlrp ", "LXT")
"""Subjects that should give the relevance that "lrpx attnlrp" gives."""


def main() -> None:
    parser = arguments(__doc__)
    add_cases(parser, ["bert-base", "gpt2-small", "llama-512x8", "llama-3.2-1b"], [16, 64, 256, 1024], 20)
    add_subjects(parser, DEFAULT)
    options = parser.parse_args()
    subjects = list(dict.fromkeys([*FLOORS, *options.subjects]))
    print_header(options, subjects)
    head("shape", "tokens", "floor A ms", *subjects)
    below = []
    for shape in options.shapes:
        with fleet(shape, subjects, options) as group:
            for length in options.lengths:
                times = group.times(length, options.runs)
                cells = [
                    " / ".join(f"{times.ratio(name, floor):.2f}" for floor in FLOORS) if name in times else "n/a"
                    for name in subjects
                ]
                row(shape, length, f"{times.milliseconds('floor A'):.1f}", *cells)
            for name in (name for name in subjects if name.startswith(SAME) and name not in group.problems):
                found = group.difference("lrpx attnlrp", name, 64)
                below.append(f"{shape}: {name} differs from lrpx attnlrp by {found:.0e} of the largest relevance")
            below += [f"{shape}: {name} n/a: {why}" for name, why in group.problems.items()]
    notes(below)


if __name__ == "__main__":
    main()
