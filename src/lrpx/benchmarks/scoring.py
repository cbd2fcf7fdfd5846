"""From samples as a model reads them to rows: the prediction, every method's relevance, and how good it is.

Explained is ``logit_p − logit_o``, where ``p`` is the form that the model prefers of the two and ``o`` the other (Arras
2025, §3.1); so a wrong prediction is explained as well. The random baseline draws relevance uniformly from [−1, 1)
(Table 2).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from lrpx.batching import batches
from lrpx.benchmarks.rows import RANDOM
from lrpx.errors import InputError, NonFiniteError, TargetError
from lrpx.methods import METHODS, attribute_all
from lrpx.metrics.ground_truth import METRICS
from lrpx.questions import Question, Questions
from lrpx.targets import Preferred

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from lrpx.data.tokenised import TokenSample
    from lrpx.explainer import Explainer
    from lrpx.methods import Found
    from lrpx.model import BoundModel

DRAWS = 10
"""How often the random baseline is drawn for each sample (Arras 2025, Table 2)."""


def score(
    explainer: Explainer, samples: Sequence[TokenSample], methods: Sequence[str], batch_size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Explain samples in batches of like length.

    Args:
        explainer: the model, causal or masked.
        samples: what to explain.
        methods: names of methods; those that share a recipe share a pass.
        batch_size: the most rows run together.

    Yields:
        ``(i, row)`` for each ``samples[i]``, as its batch is done; a row has the columns of ``rows.schema(methods)``.

    Raises:
        NonFiniteError: NaN or infinity in the logits or the relevance; names the sample.
        InputError: token ids that the model does not have.
    """
    bound = explainer.bound
    rows = [bound.reader.row(sample.ids, where=f" (sample {sample.sample.id})") for sample in samples]
    for group in batches(rows, batch_size if bound.can_batch else 1):
        asked = tuple(
            Question(at, samples[i].position, Preferred(samples[i].right, samples[i].wrong))
            for at, i in enumerate(group)
        )
        found = _explained(bound, Questions(tuple(rows[i] for i in group), asked), methods)
        logits = next(iter(found.values())).answers.logits
        for place, i in enumerate(group):
            sample = samples[i]
            relevance = {name: each.relevance[place].double().numpy() for name, each in found.items()}
            right, wrong = logits[place, [sample.right, sample.wrong]].tolist()
            yield i, facts(sample) | _judged(sample, right - wrong, relevance)


def facts(sample: TokenSample) -> dict[str, Any]:
    """What a row says of its sample, whatever the model predicts."""
    return {
        "id": sample.sample.id,
        "tokens": list(sample.tokens),
        "ground_truth": list(sample.ground_truth),
        "position": sample.position,
        "right": sample.sample.form,
        "wrong": sample.sample.other,
        "attractors": sample.sample.attractors,
    }


def draws(name: str, length: int) -> NDArray[np.float64]:
    """``[DRAWS, length]`` random relevance in [−1, 1) for the sample of this name: the same on every machine.

    >>> draws("dev:1", 3).shape, bool((draws("dev:1", 3) == draws("dev:1", 3)).all())
    ((10, 3), True)
    """
    seeds = [hashlib.sha256(f"{name}\n{draw}".encode()).digest() for draw in range(DRAWS)]
    generators = [np.random.Generator(np.random.PCG64(int.from_bytes(seed))) for seed in seeds]
    return np.stack([generator.uniform(-1.0, 1.0, length) for generator in generators])


def _judged(sample: TokenSample, difference: float, relevance: dict[str, NDArray[np.float64]]) -> dict[str, Any]:
    """The prediction, each method's relevance ``[T]`` and metrics, and those of the random draws."""
    truth = np.zeros(len(sample.ids), dtype=bool)
    truth[list(sample.ground_truth)] = True
    every = np.stack([*relevance.values(), *draws(sample.sample.id, len(truth))])
    row: dict[str, Any] = {"logit_difference": difference, "correct": difference > 0}
    row |= {f"relevance/{method}": found.tolist() for method, found in relevance.items()}
    for metric, measure in METRICS.items():
        values = [float(measure(each, truth)) for each in every]
        row |= {f"{metric}/{method}": value for method, value in zip(relevance, values, strict=False)}
        row[f"{metric}/{RANDOM}"] = values[len(relevance) :]
    return row


def _explained(bound: BoundModel, questions: Questions, methods: Sequence[str]) -> dict[str, Found]:
    """Each method's finds for a batch; a batch with a number that is not finite goes again row by row, to name it."""
    try:
        found = attribute_all([METHODS[name] for name in methods], bound, questions)
        pairs = ((name, relevance) for name, each in found.items() for relevance in each.relevance)
        broken = next((name for name, relevance in pairs if not relevance.isfinite().all()), None)
        if broken is not None:
            raise NonFiniteError(f"the relevance of {broken} is not finite; use another dtype, such as float32")
    except NonFiniteError as error:
        if len(questions) == 1:
            raise NonFiniteError(f"{error}{questions.rows[0].where}") from error
        for i in range(len(questions)):
            _explained(bound, questions.alone([i]), methods)
        raise
    except TargetError as error:
        raise InputError(f"{error}: the tokenizer is not the model's own; pass that") from error
    return found
