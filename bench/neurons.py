"""What ranking every neuron of every layer costs: the ratio to one plain AttnLRP explanation of the same text.

    python bench/neurons.py [--model NAME_OR_FOLDER] [--tokens 256] [--rounds 9]

Both are run by turns, and the median of the ratios of neighbours is told with its quartiles. What is measured is the
processor time of this process, which another load of the machine leaves nearly alone. The model's units are found
before, once for a model, which takes the time that is printed below.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from servers import arguments, head, notes, print_header, row

import lrpx
from lrpx.units import places

if TYPE_CHECKING:
    from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    """How much processor time a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=None, help="a model of transformers; the bundled one by default")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    explainer = lrpx.Explainer.from_pretrained(options.model, dtype="float32")
    ids = torch.randint(5, 1000, (options.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    found = seconds(lambda: places(explainer.model, "neurons"))
    some = places(explainer.model, "neurons")
    calls: dict[str, Callable[[], object]] = {
        "every neuron": lambda: explainer.neurons(ids, 7),
        "every head": lambda: explainer.neurons(ids, 7, kind="heads"),
        "flow": lambda: explainer.flow(ids, 7),
    }
    print_header(options, ["lrpx attnlrp"])
    head("ranked", "of one explanation", "quartiles", "explanation ms")
    explainer(ids, 7)
    for name, call in calls.items():
        call()
        ratios, plain = [], []
        for _ in range(options.rounds):
            plain.append(seconds(lambda: explainer(ids, 7)))
            ratios.append(seconds(call) / plain[-1])
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row(name, f"{middle:.2f} ×", f"{low:.2f} to {high:.2f}", f"{statistics.median(plain) * 1000:.0f}")
    notes(
        [
            f"{explainer.bound.name}: {len(some)} layers of {some[0].width} neurons, {options.tokens} tokens; finding "
            f"the units, once: {found * 1000:.0f} ms"
        ]
    )


if __name__ == "__main__":
    main()
