"""From samples as a model reads them to rows: the prediction, every method's relevance, and how good it is.

Explained is ``logit_p − logit_o``, where ``p`` is the form that the model prefers of the two and ``o`` the other (Arras
2025, §3.1); so a wrong prediction is explained as well. The random baseline draws relevance uniformly from [−1, 1)
(Table 2).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lrpx.benchmarks.rows import RANDOM
from lrpx.errors import InputError, NonFiniteError
from lrpx.inputs import batches, shifts
from lrpx.methods.together import attribute_all
from lrpx.metrics.ground_truth import METRICS
from lrpx.targets import Contrast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from lrpx.data.tokenised import TokenSample
    from lrpx.explainer import Explainer
    from lrpx.inputs import Row
    from lrpx.methods.backward import Found

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
    rows = [_row(explainer, sample) for sample in samples]
    for group in batches(rows, batch_size if explainer._can_batch else 1):
        together = [rows[i] for i in group]
        scores = _explained(explainer, [samples[i] for i in group], together, methods)
        logits = next(iter(scores.values())).logits
        width = max(len(row.tokens.ids) for row in together)
        moved = shifts(together, width, explainer.padding_side).tolist()
        for place, (i, start) in enumerate(zip(group, moved, strict=True)):
            sample, own = samples[i], slice(start, start + len(samples[i].ids))
            relevance = {name: found.tokens[place, own].double().numpy() for name, found in scores.items()}
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


def _row(explainer: Explainer, sample: TokenSample) -> Row:
    return explainer._reader.row(sample.ids, sample.position, where=f" (sample {sample.sample.id})")


def _explained(
    explainer: Explainer, samples: Sequence[TokenSample], rows: Sequence[Row], methods: Sequence[str]
) -> dict[str, Found]:
    """Each method's scores for a batch; a batch with a number that is not finite goes again row by row, to name it."""
    try:
        with torch.inference_mode(False):
            found = attribute_all(methods, explainer.model, explainer.task, explainer._batch(rows), _preferred(samples))
        broken = next((name for name, each in found.items() if not each.tokens.isfinite().all()), None)
        if broken is not None:
            raise NonFiniteError(f"the relevance of {broken} is not finite; use another dtype, such as float32")
    except NonFiniteError as error:
        if len(samples) == 1:
            raise NonFiniteError(f"sample {samples[0].sample.id}: {error}") from error
        for sample, row in zip(samples, rows, strict=True):
            _explained(explainer, [sample], [row], methods)
        raise
    return found


def _preferred(samples: Sequence[TokenSample]) -> Callable[[Tensor], Sequence[Contrast]]:
    """The targets of a batch: each row's preferred form against the other.

    The first pass decides which form that is, so that all methods explain the same, even where two passes round a tie
    differently.
    """
    chosen: list[Contrast] = []

    def targets(logits: Tensor) -> Sequence[Contrast]:
        if not chosen:
            size = logits.shape[-1]
            for sample in samples:
                if max(sample.right, sample.wrong) >= size:
                    raise InputError(
                        f"the tokenizer makes token id {max(sample.right, sample.wrong)} of a verb form, and the model "
                        f"has {size} logits; pass the model's own tokenizer (sample {sample.sample.id})"
                    )
            pairs = torch.tensor([(sample.right, sample.wrong) for sample in samples], device=logits.device)
            right, wrong = logits.gather(1, pairs).unbind(1)
            preferred = (right >= wrong).tolist()
            for sample, is_right in zip(samples, preferred, strict=True):
                forms = (sample.right, sample.wrong) if is_right else (sample.wrong, sample.right)
                chosen.append(Contrast(*forms))
        return chosen

    return targets
