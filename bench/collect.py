"""What collecting reference passages costs: the same texts through the model alone, and with all its neurons ranked.

    python bench/collect.py [--model FOLDER] [--data FILE] [--texts 128] [--rounds 5] [--threads 1]

"forward" runs the very batches under ``no_grad``, with one row of each text through the head, and nothing listens;
"activation" is a whole part: it reads the texts, runs them, ranks every neuron's passages, counts histograms, and makes
the table; "relevance" also runs a backward pass. All take turns in random order; the columns are the median, over the
rounds, of the share of the forward pass's speed: 1 is as fast. With one thread on a CPU the seconds are the processor's
own, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from servers import ROOT, arguments, head, print_header, row

from lrpx.cards import Collection
from lrpx.model import Spec
from lrpx.questions import Question, Questions
from lrpx.targets import Logit


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="the bundled model by default")
    parser.add_argument("--data", type=Path, help="a text a line; words of the licence by default")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--no-relevance", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = Spec(options.model, "float32", str(options.device)).build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.txt"
        if options.data is None:
            words = itertools.cycle((ROOT / "LICENSE").read_text(encoding="utf-8").split())
            lines = [" ".join(itertools.islice(words, 10 + i % 30)) for i in range(options.texts)]
        else:
            with open(options.data, encoding="utf-8") as file:
                lines = list(itertools.islice((line.strip() for line in file if line.strip()), options.texts))
        path.write_text("\n".join(lines), encoding="utf-8")
        measures = [("activation",)] if options.no_relevance else [("activation",), ("activation", "relevance")]
        collections = [Collection(model, path, each, batch_size=options.batch_size) for each in measures]
        texts = list(collections[0].texts())
        rows = [collections[0].row(each) for each in texts]
        asked = [Question(i, collections[0].position(each), Logit(0)) for i, each in enumerate(rows)]
        questions = Questions(tuple(rows), tuple(asked))
        ways = {"forward": lambda: model.values(questions, batch_size=options.batch_size)}
        ways |= {each.measures[-1]: lambda each=each: each.of(texts) for each in collections}
        clock = (
            time.process_time
            if options.threads == 1 and torch.device(options.device).type == "cpu"
            else time.perf_counter
        )
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(options.rounds + 1):
            for name in random.sample(list(ways), len(ways)):
                began = clock()
                ways[name]()
                if i:  # the first round warms up
                    seconds[name].append(clock() - began)
    print_header(options, ["lrpx attnlrp"])
    tokens = sum(len(each.tokens.ids) for each in rows)
    head(
        "model",
        "texts",
        "tokens",
        "neurons",
        "forward, tokens/s",
        *(f"{name}, of its speed" for name in ways if name != "forward"),
    )
    shares = [
        statistics.median(a / b for a, b in zip(seconds["forward"], taken, strict=True))
        for name, taken in seconds.items()
        if name != "forward"
    ]
    neurons = sum(place.width for place in collections[0].places)
    speed = tokens / statistics.median(seconds["forward"])
    row(model.name, len(texts), tokens, neurons, f"{speed:.0f}", *(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
