"""What the ledger costs: one attribution with it against one without.

    python bench/ledger.py [--shapes llama-512x8] [--lengths 16 64 256 1024] [--runs 20]

Measured like ``speed.py``; "with ledger" is the median as a ratio to the same method without.
"""

from __future__ import annotations

from servers import add_cases, arguments, fleet, head, notes, print_header, row

METHODS = ("lrpx attnlrp", "lrpx lrp")


def main() -> None:
    parser = arguments(__doc__)
    add_cases(parser, ["bert-base", "gpt2-small", "llama-512x8"], [16, 64, 256, 1024], 20)
    options = parser.parse_args()
    print_header(options, METHODS)
    head("shape", "tokens", *(cell for name in METHODS for cell in (f"{name} ms", "with ledger")))
    below = []
    for shape in options.shapes:
        with fleet(shape, [each for name in METHODS for each in (name, f"{name} with ledger")], options) as group:
            for length in options.lengths:
                times = group.times(length, options.runs)
                cells = []
                for name in METHODS:
                    kept = f"{name} with ledger"
                    cells.append(f"{times.milliseconds(name):.1f}")
                    cells.append(f"{times.ratio(kept, name):.2f}" if kept in times else "n/a")
                row(shape, length, *cells)
            below += [f"{shape}: {name} n/a: {why}" for name, why in group.problems.items()]
    notes(below)


if __name__ == "__main__":
    main()
