"""Peak memory of one attribution, over what the loaded model holds.

    python bench/memory.py [--shapes llama-512x8] [--lengths 1024 4096] [--runs 3] [--subjects "floor B" "lrpx attnlrp"]

Every run is a fresh process: it loads the model, explains 16 tokens once, and then the tokens in question; the peak of
its resident memory (or of the GPU's) above what it held just before is the figure, the median of the runs.
"""

from __future__ import annotations

import statistics

from servers import Server, add_cases, add_subjects, arguments, head, notes, print_header, row, tokens
from subjects import SUBJECTS

DEFAULT = (
    "floor A",
    "lrpx attnlrp",
    "lrpx lrp",
    "lrpx attnlrp recomputed",
    "LXT efficient",
    "LXT efficient, frozen",
    "LXT efficient, checkpointed",
)


def main() -> None:
    parser = arguments(__doc__)
    add_cases(parser, ["llama-512x8"], [1024, 4096], 3)
    add_subjects(parser, DEFAULT)
    parser.add_argument("--without-attention", action="store_true", help="leave out its arithmetic, not its memory")
    options = parser.parse_args()
    subjects = list(dict.fromkeys(["floor B", *options.subjects]))
    print_header(options, subjects)
    head("shape", "tokens", "subject", "MiB", "of floor B")
    below = []
    for shape in options.shapes:
        for length in options.lengths:
            floor = 0.0
            for name in subjects:
                peaks: list[float] = []
                for run in range(options.runs):
                    with Server(
                        SUBJECTS[name][0], shape, options, without_attention=options.without_attention
                    ) as server:
                        server.ask(name, tokens(shape, 16, run))
                        answer = server.ask(name, tokens(shape, length, run), memory=True)
                    if "error" in answer:
                        below.append(f"{shape}, {length} tokens: {name} n/a: {answer['error']}")
                        break
                    peaks.append(answer["mib"])
                if len(peaks) < options.runs:
                    row(shape, length, name, "n/a", "n/a")
                    continue
                floor = floor or statistics.median(peaks)
                row(shape, length, name, f"{statistics.median(peaks):.0f}", f"{statistics.median(peaks) / floor:.2f}")
    notes(below)


if __name__ == "__main__":
    main()
