"""Folders of a benchmark for the reports' tests: sentences that the bundled model explains, and random numbers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import lrpx
from lrpx.benchmarks._agreement import Agreement
from lrpx.benchmarks._report import write_reports
from lrpx.methods import find
from lrpx.metrics._ground_truth import METRICS
from lrpx.runs import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lrpx.benchmarks._summary import Summary
    from lrpx.metrics import Metric

BENCHMARK = Agreement([])
METHODS = ("lrp", "attnlrp", "gradient-l1", "gradient-l2-squared", "gradient-x-input")

SENTENCES = (  # the text before the verb, its subject, the right form and the other, attractors
    ("The keys to the cabinet", "keys", "are", "is", 1),
    ("The key to the cabinets", "key", "is", "are", 1),
    ("The boys near the tree", "boys", "are", "is", 1),
    ("The old man behind the houses and the trees", "man", "is", "are", 2),
    ("The books on the table in the room", "books", "are", "is", 2),
    ("The girl with the dogs", "girl", "is", "are", 1),
    ("The flowers in the garden of the king", "flowers", "are", "is", 2),
    ("The cat under the chairs", "cat", "is", "are", 1),
    ("The children in the house", "children", "are", "is", 1),
    ("The dog that the boys like", "dog", "is", "are", 1),
    ("The doors of the house", "doors", "are", "is", 1),
    ("The friend of the girls and the boys by the trees", "friend", "is", "are", 3),
)


@cache
def explained() -> tuple[dict[str, Any], ...]:
    """A row of each sentence, by the bundled model itself, which knows them all."""
    explainer = lrpx.Explainer.from_pretrained()
    found: dict[int, dict[str, Any]] = {}
    for form, other in (("are", "is"), ("is", "are")):
        numbers = [number for number, sentence in enumerate(SENTENCES) if sentence[2] == form]
        texts = [SENTENCES[number][0] for number in numbers]
        values = {m: explainer(texts, target=f" {form}", contrast=f" {other}", method=m) for m in METHODS}
        for at, number in enumerate(numbers):
            a, subject = values["lrp"][at], SENTENCES[number][1]
            words = zip(a.word_spans, a.word_texts, strict=True)
            truth = next([*range(*span)] for span, word in words if word.strip() == subject)
            facts = {
                "right": form,
                "wrong": other,
                "attractors": SENTENCES[number][4],
                "logit_difference": a.explained.value,
            }
            relevance = {method: each[at].relevance for method, each in values.items()}
            found[number] = row(f"dev:{number + 1}", a.tokens, truth, relevance, facts, number)
    return tuple(found[number] for number in sorted(found))


def row(
    name: str,
    tokens: Sequence[str],
    truth: Sequence[int],
    relevance: Any,
    facts: dict[str, Any],
    seed: int,
    metrics: Sequence[Metric] = tuple(METRICS.values()),
) -> dict[str, Any]:
    """One row, with the metrics of its relevance."""
    inside = [at in truth for at in range(len(tokens))]
    made: dict[str, Any] = {
        "id": name,
        "tokens": list(tokens),
        "ground_truth": list(truth),
        "position": len(tokens) - 1,
        "correct": facts["logit_difference"] > 0,
        **facts,
    }
    draws = np.random.default_rng(seed).uniform(-1, 1, (10, len(tokens)))
    for metric in metrics:
        made |= {f"{metric.name}/{m}": metric(each, inside) for m, each in relevance.items()}
        made[f"{metric.name}/random"] = [metric(draw, inside) for draw in draws]
    return made | {f"relevance/{m}": [float(value) for value in each] for m, each in relevance.items()}


def random_rows(
    count: int,
    methods: Sequence[str] = METHODS,
    seed: int = 0,
    metrics: Sequence[Metric] = tuple(METRICS.values()),
) -> list[dict[str, Any]]:
    """Rows of random relevance, which the first method has a little more of on the subject."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(1, count + 1):
        length = int(rng.integers(3, 12))
        truth = [int(rng.integers(length))]
        relevance = {m: rng.normal(size=length) for m in methods}
        relevance[methods[0]][truth] += 1.0
        facts = {"right": "are", "wrong": "is", "attractors": int(rng.integers(1, 4))}
        facts["logit_difference"] = float(rng.normal(1.0))
        found.append(
            row(f"random:{number}", [f" t{at}" for at in range(length)], truth, relevance, facts, number, metrics)
        )
    return found


def write(
    folder: Path,
    found: Sequence[dict[str, Any]],
    methods: Sequence[str] = METHODS,
    metrics: Sequence[Metric] = tuple(METRICS.values()),
    **more: Any,
) -> Path:
    """A run's folder with these rows, in two parts."""
    settings = {
        "model": more.pop("model", "openai-community/gpt2"),
        "data": [{"file": "dev.tsv", "bytes": 1234, "sha256": "ab" * 32}],
        "parser": None,
        "dtype": "float32",
        "methods": list(methods),
        "metrics": [metric.describe() for metric in metrics],
    }
    notes = {
        "counts": {"read": 14000, "kept": len(found)},
        "statistics": {"mean tokens": 11.25, "samples": float(len(found))},
        "labels": {name: find(name).label for name in methods},
        "command": "lrpx bench sva dev.tsv --out runs/sva",
    }
    with Store.begin(folder, "sva", settings, {"lrpx": "0.1.0", "torch": "2.13.0"}) as store:
        store.note(**notes | more)
        half = (len(found) + 1) // 2
        for number, part in enumerate(filter(None, (found[:half], found[half:]))):
            store.keep(f"{number:05}", pa.Table.from_pylist(part, BENCHMARK.columns(methods, list(metrics))))
    return folder


def reports(folder: Path, show: Sequence[str] = ()) -> Summary:
    """Write the reports of a folder."""
    return write_reports(BENCHMARK, Store.read(folder), show=show)
