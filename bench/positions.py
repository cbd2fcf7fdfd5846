"""What positions cost: one attribution by PA-LRP against one by AttnLRP.

    python bench/positions.py [--shapes llama-512x8] [--lengths 16 64 256] [--runs 20]

Measured like ``speed.py``; the last column is the median as a ratio to AttnLRP in the same round.
"""

from __future__ import annotations

from servers import add_cases, arguments, fleet, head, notes, print_header, row

SUBJECTS = ("lrpx attnlrp", "lrpx pa-lrp")


def main() -> None:
    parser = arguments(__doc__)
    add_cases(parser, ["bert-base", "gpt2-small", "llama-512x8"], [16, 64, 256], 20)
    options = parser.parse_args()
    print_header(options, SUBJECTS)
    head("shape", "tokens", "lrpx attnlrp ms", "lrpx pa-lrp")
    below = []
    for shape in options.shapes:
        with fleet(shape, SUBJECTS, options) as group:
            for length in options.lengths:
                times = group.times(length, options.runs)
                ratio = f"{times.ratio(*SUBJECTS[::-1]):.2f}" if SUBJECTS[1] in times else "n/a"
                row(shape, length, f"{times.milliseconds(SUBJECTS[0]):.1f}", ratio)
            below += [f"{shape}: {name} n/a: {why}" for name, why in group.problems.items()]
    notes(below)


if __name__ == "__main__":
    main()
