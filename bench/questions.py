"""Many questions of one text: one forward pass for all, and backward passes that share, against a call for each.

    python bench/questions.py [--shape llama-512x8] [--lengths 16 64 256] [--questions 16] [--rounds 7]

AttnLRP; the questions are about positions spread evenly over the text. "alone": a backward pass each; "packed": as many
together as there may be. Each round measures every way once, in an order drawn anew; cells are medians over the rounds
of the ratio within the round to a call for each question.
"""

from __future__ import annotations

import random
import statistics
import time

import torch
from servers import arguments, head, notes, print_header, row
from subjects import SHAPES, Case, wait

from lrpx import Explainer, _passes


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="llama-512x8", choices=SHAPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    model = Case(SHAPES[options.shape], device).model()
    explain = Explainer(model)
    short = _passes.SHORT

    def together(ids: list[int], positions: list[int], limit: int) -> torch.Tensor:
        _passes.SHORT = limit
        try:
            found = torch.stack([a.relevance.clone() for a in explain(ids, position=positions)])
        finally:
            _passes.SHORT = short
        wait(device)
        return found

    def each(ids: list[int], positions: list[int]) -> torch.Tensor:
        found = torch.stack([explain(ids, position=position).relevance.clone() for position in positions])
        wait(device)
        return found

    print_header(options, ["lrpx attnlrp"])
    head("shape", "tokens", "questions", "a call each, ms", "alone", "packed")
    worst = 0.0
    size = model.get_input_embeddings().weight.shape[0]
    for length in options.lengths:
        drawn = random.Random(length)
        ids = [drawn.randrange(3, size) for _ in range(length)]
        positions = torch.linspace(0, length - 1, options.questions).long().tolist()
        ways = {
            "a call each": lambda given=(ids, positions): each(*given),
            "alone": lambda given=(ids, positions): together(*given, 0),
            "packed": lambda given=(ids, positions): together(*given, 1 << 20),
        }
        found = {name: way() for name, way in ways.items()}
        base = found["a call each"]
        worst = max([worst, *(float((one - base).abs().max() / base.abs().max()) for one in found.values())])
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name in random.sample(list(ways), len(ways)):
                began = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - began)
        pairs = {name: zip(taken, seconds["a call each"], strict=True) for name, taken in seconds.items()}
        ratios = {name: statistics.median(a / b for a, b in pair) for name, pair in pairs.items()}
        milliseconds = 1000 * statistics.median(seconds["a call each"])
        cells = [f"{milliseconds:.0f}", *(f"{ratios[name]:.2f}" for name in ("alone", "packed"))]
        row(options.shape, length, options.questions, *cells)
    notes([f"largest difference of the relevance, relative to the largest: {worst:.1e}"])


if __name__ == "__main__":
    main()
