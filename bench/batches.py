"""A list of sentences of mixed length in one call, against a loop of single calls.

    python bench/batches.py [--text FILE] [--sentences 1000] [--rounds 5]

The bundled model; each round does both, the other one first every time. Without ``--text`` (one sentence a line, of
which some are drawn) the sentences are 3 to 60 words each of this repository's licence, drawn with a fixed seed.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from servers import ROOT, arguments, head, notes, print_header, row
from subjects import peak_memory, wait

import lrpx

if TYPE_CHECKING:
    from collections.abc import Callable


def sentences(path: Path | None, count: int) -> list[str]:
    chosen = random.Random(0)
    if path is not None:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        return chosen.sample(lines, count)
    words = (ROOT / "LICENSE").read_text().split()
    starts = [(chosen.randrange(len(words) - 60), chosen.randint(3, 60)) for _ in range(count)]
    return [" ".join(words[start : start + length]) for start, length in starts]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--text", type=Path, help="a file of sentences, one a line")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    explainer = lrpx.Explainer.from_pretrained(device=device)
    texts = sentences(options.text, options.sentences)
    ways: dict[str, Callable[[], list[lrpx.Attribution]]] = {
        "one list": lambda: explainer(texts, batch_size=options.batch_size),
        "a loop": lambda: [explainer(text) for text in texts],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, list[lrpx.Attribution]] = {}
    explainer(texts[:16])
    for around in range(options.rounds):
        for name in list(ways)[:: 1 if around % 2 else -1]:
            results.pop(name, None)
            with peak_memory(device) as peak:
                wait(device)
                began = time.perf_counter()
                results[name] = ways[name]()
                wait(device)
                seconds[name].append(time.perf_counter() - began)
            peaks[name].append(peak.mib)
    lengths = sorted(len(each.tokens) for each in results["a loop"])
    middle = statistics.median(lengths)
    print_header(options, ["lrpx attnlrp"])
    head("way", "sentences", "tokens each", "seconds", "of the loop", "peak MiB")
    loop = statistics.median(seconds["a loop"])
    for name in ways:
        taken = statistics.median(seconds[name])
        spread = f"{lengths[0]}–{lengths[-1]}, median {middle:.0f}"
        row(name, len(texts), spread, f"{taken:.2f}", f"{loop / taken:.2f} × faster", f"{max(peaks[name]):.0f}")
    pairs = list(zip(*results.values(), strict=True))
    worst = max(float((a.relevance - b.relevance).abs().max() / b.relevance.abs().max()) for a, b in pairs)
    notes(
        [
            f"in the same order: {all(a.tokens == b.tokens for a, b in pairs)}; largest difference of the relevance, "
            f"relative to each sentence's largest: {worst:.1e}"
        ]
    )


if __name__ == "__main__":
    main()
