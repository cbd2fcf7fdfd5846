"""Sanity checks: does an explanation depend on the model's weights and on what is explained, and does it add up?

:func:`check` asks five questions of each method, on a model and texts of yours:

- *Randomised weights* (Adebayo et al. 2018; part by part, MPRT): from the head downwards the weights of one part after
  another become random, and the explanation of the same value is compared with that of the trained model, by rank
  correlation. One that survives does not depend on what the model has learned.
- *Another class* (Sixt et al. 2020, random logit): is another logit explained otherwise?
- *Ledger*: do all shares of the value add up to it?
- *Batch*: are the numbers of a batch those of each text alone?
- *Completeness*: how much of the value do the tokens sum to? Told, not judged: AttnLRP is not complete by design.

The weights are made random in a copy of the model; yours is left as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from lrpx._modules import layer_of
from lrpx.errors import InputError, ModelError, NonFiniteError
from lrpx.methods import attribute_all, find
from lrpx.methods._contract import check_each_once
from lrpx.metrics._perturbation import pearson, ranks
from lrpx.metrics._statistics import interval
from lrpx.model import BoundModel
from lrpx.questions import Question, Questions
from lrpx.targets import Logit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch.nn import Module

    from lrpx.methods import Method
    from lrpx.targets import Target

    Numbers = NDArray[np.float64]

__all__ = ["SIMILAR", "Mean", "Sane", "Sanity", "Stage", "check"]

SEEDS: Final = 2**32
"""So many seeds there are."""
SIMILAR: Final = 0.5
"""A mean rank correlation whose interval ends above this passes for similar: a convention, told with the verdicts."""


@dataclass(frozen=True)
class Mean:
    """A mean over texts, with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of one value a text."""
        return cls(float(np.mean(values)), *interval(values))


@dataclass(frozen=True)
class Stage:
    """One part of the model, and how alike the explanations are with random weights in it: rank correlations.

    Args:
        part: the path of a layer, or ``"head"`` or ``"embeddings"``: what comes after and before the layers.
        cascade: with this part and all above it random, of the relevance.
        absolute: the same, of its absolute value.
        alone: with this part alone random, of the relevance.
    """

    part: str
    cascade: Mean
    absolute: Mean
    alone: Mean


@dataclass(frozen=True)
class Sane:
    """What was found of one method.

    Args:
        method: its name.
        stages: from the head to the embeddings.
        other: rank correlation of the explanations of two logits; None where there is no other logit.
        ledger: the largest difference that a ledger misses, relative to its scale; None for a method without one.
        batch: the largest difference between a batch and each text alone, relative to the text's largest relevance;
            None where no two texts run together: there is one, the model takes no batch, or the lengths are too unlike.
        complete: the tokens' sum over the explained value, a text: their median, smallest and largest.
        tolerance: what ledger and batch may miss: half the digits of the model's precision, of float32 at most, which
            the norms of many a float64 model compute in.
    """

    method: str
    stages: tuple[Stage, ...]
    other: Mean | None
    ledger: float | None
    batch: float | None
    complete: tuple[float, float, float]
    tolerance: float

    def verdicts(self) -> dict[str, bool | None]:
        """For each check whether it is passed; None where it does not apply. Completeness is not judged."""
        return {
            "randomised weights": self.stages[-1].cascade.high <= SIMILAR,
            "another class": None if self.other is None else self.other.high <= SIMILAR,
            "ledger": None if self.ledger is None else self.ledger <= self.tolerance,
            "batch": None if self.batch is None else self.batch <= self.tolerance,
        }


@dataclass(frozen=True)
class Sanity:
    """What was found of a model's explanations.

    Args:
        model: its name.
        dtype: its precision.
        texts: how many.
        seed: of all that is random.
        methods: one for each method.
    """

    model: str
    dtype: str
    texts: int
    seed: int
    methods: tuple[Sane, ...]


def check(
    model: BoundModel,
    texts: Sequence[object],
    methods: Sequence[Method | str] = ("attnlrp", "lrp"),
    *,
    seed: int = 0,
    batch_size: int = 16,
    done: Callable[[int], object] = lambda _: None,
) -> Sanity:
    """Ask all checks of each method.

    Args:
        model: the model; it is left as it is.
        texts: inputs as the explainer takes them, of at least three tokens each; the model's own prediction is
            explained.
        methods: which methods.
        seed: of the random weights and of the other class.
        batch_size: the most texts run together.
        done: called with how many more of the :func:`steps` are done.

    Raises:
        InputError: no texts, or one of fewer than three tokens; a seed that is none.
        ModelError: the model cannot be copied, or its weights cannot be made random.
        MethodError: a method that does not apply to the model; none, or two of one name.
        NonFiniteError: NaN or infinity; names the random part.
    """
    chosen = [find(method) for method in methods]
    check_each_once(chosen)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise InputError(f"the seed is {seed!r}; pass a whole number from 0 to {SEEDS - 1}")
    model.refuse_random()
    for method in chosen:
        method.check(model)
    questions = _questions(model, texts)
    found = {method.name: _Checking(model, method, questions, batch_size) for method in chosen}
    done(1)
    parts = parts_of(model.module)
    stages: dict[str, list[tuple[str, list[Numbers], list[Numbers]]]] = {name: [] for name in found}
    random = _RandomCopy(model, parts, seed)
    alone: dict[str, list[list[Numbers]]] = {name: [] for name in found}
    for part in parts:
        random.randomise(part)
        for name, each in found.items():
            alone[name].append(each.again(random.bound, f"random weights in {part}"))
        random.restore(part)
        done(1)
    for at, part in enumerate(parts):
        random.randomise(part)
        for name, each in found.items():
            again = each.again(random.bound, f"random weights from the head down to {part}")
            stages[name].append((part, again, alone[name][at]))
        done(1)
    sane = []
    for name, each in found.items():
        rows = tuple(
            Stage(
                part,
                Mean.of(each.alike(cascade)),
                Mean.of(each.alike(cascade, absolute=True)),
                Mean.of(each.alike(only)),
            )
            for part, cascade, only in stages[name]
        )
        sane.append(
            Sane(name, rows, each.other_class(seed), each.ledger(), each.batch(), each.complete(), each.tolerance)
        )
        done(1)
    return Sanity(model.as_it_is, model.dtype, len(questions), seed, tuple(sane))


def steps(model: BoundModel, methods: Sequence[object]) -> int:
    """How many steps :func:`check` tells of."""
    return 1 + 2 * len(parts_of(model.module)) + len(methods)


# --------------------------------------------------------------------------------------- the parts


def parts_of(module: Module) -> dict[str, list[str]]:
    """The names of a module's weights by the part of the model they are in, from the head down to the embeddings.

    Weights before the first layer are the embeddings, others outside of the layers the head; a weight that is in two
    places is in the lower one.

    >>> import torch
    >>> net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "layers": torch.nn.ModuleList([torch.nn.Linear(2,
    ... 2)]), "head": torch.nn.Linear(2, 3, bias=False)})
    >>> parts_of(net)
    {'head': ['head.weight'], 'layers.0': ['layers.0.weight', 'layers.0.bias'], 'embeddings': ['embed.weight']}
    """
    head: list[str] = []
    layers: dict[str, list[str]] = {}
    embeddings: list[str] = []
    for name, _ in module.named_parameters():
        layer = layer_of(name)
        if layer is not None:
            layers.setdefault(layer.path, []).append(name)
        else:
            (head if layers else embeddings).append(name)
    parts = {"head": head, **dict(reversed(layers.items())), "embeddings": embeddings}
    return {part: names for part, names in parts.items() if names}


class _RandomCopy:
    """A copy of a model, ``bound``, whose parts can be made random, and be given back what they were."""

    def __init__(self, model: BoundModel, parts: dict[str, list[str]], seed: int) -> None:
        self.parts, self.seed = parts, seed
        self.weights = dict(model.module.named_parameters())
        wrong = next((name for name, weight in self.weights.items() if not _is_plain(weight)), None)
        if wrong is not None:
            raise ModelError(
                f"the weight {wrong} is quantised or not in memory, and cannot be made random; load the model in a "
                "floating-point dtype, such as float32"
            )
        try:
            module = copy.deepcopy(model.module)
        except Exception as error:
            raise ModelError(
                f"{type(model.module).__name__} cannot be copied ({type(error).__name__}: {error}); load it anew"
            ) from error
        self.copied = dict(module.named_parameters())
        self.bound = BoundModel(
            module, model.tokenizer, task=model.task, padding_side=model.padding_side, recompute=model.recompute,
            pooling=model.pooling,
        )  # fmt: skip

    @torch.no_grad()
    def randomise(self, part: str) -> None:
        """Each weight becomes normal numbers of its own mean and deviation, the same for the same part and seed."""
        generator = torch.Generator().manual_seed(self.seed * 65_537 + list(self.parts).index(part))
        for name in self.parts[part]:
            known = self.weights[name].detach().to("cpu", torch.float32)
            drawn = torch.randn(known.shape, generator=generator, dtype=torch.float32)
            self.copied[name].copy_(drawn * known.std(correction=0) + known.mean())

    @torch.no_grad()
    def restore(self, part: str) -> None:
        """The weights that the model has."""
        for name in self.parts[part]:
            self.copied[name].copy_(self.weights[name])


def _is_plain(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.is_floating_point() and not weight.is_meta


# -------------------------------------------------------------------------------------- one method


def _questions(model: BoundModel, texts: Sequence[object]) -> Questions:
    """What is asked of each text: the model's own prediction."""
    if not texts:
        raise InputError("there are no texts; pass some")
    if model.task.pictures or not model.task.segments:
        raise ModelError(
            f"{type(model.module).__name__} is {model.task.named}, and these checks read texts; pass another"
        )
    rows = model.reader.rows(list(texts))
    short = next((i for i, row in enumerate(rows) if sum(row.lengths) < 3), None)
    if short is not None:
        raise InputError(f"text {short + 1} is of fewer than 3 tokens, which have no ranks to compare; leave it out")
    target = model.default_target()
    return Questions(tuple(rows), tuple(Question(i, model.reader.position(row), target) for i, row in enumerate(rows)))


class _Checking:
    """A method's explanations by the trained model, and what is compared with them."""

    def __init__(self, model: BoundModel, method: Method, questions: Questions, batch_size: int) -> None:
        self.model, self.method, self.batch_size = model, method, batch_size
        self.relevance, self.values, targets = self._explained(model, questions)
        self.questions = questions.with_targets(targets)
        dtypes = torch.float32, getattr(torch, model.dtype)
        self.tolerance = float(max(torch.finfo(dtype).eps for dtype in dtypes)) ** 0.5

    def _explained(
        self, model: BoundModel, questions: Questions, batch_size: int | None = None
    ) -> tuple[list[Numbers], list[float], list[Target]]:
        """Relevance, value and target of each question, of a row of its own."""
        relevance: list[Numbers] = [np.empty(0)] * len(questions)
        values, targets = [0.0] * len(questions), [each.target for each in questions.asked]
        for group in model.groups(questions.rows, batch_size or self.batch_size):
            found = attribute_all([self.method], model, questions.about(group))[self.method.name]
            places = [i for i, asked in enumerate(questions.asked) if asked.row in set(group)]
            for i, each, value, target in zip(
                places, found.relevance, found.answers.values, found.answers.targets, strict=True
            ):
                relevance[i], values[i], targets[i] = each.double().numpy(), float(value), target
        return relevance, values, targets

    def again(self, model: BoundModel, what: str) -> list[Numbers]:
        """The relevance of the same values in another model."""
        try:
            return self._explained(model, self.questions)[0]
        except NonFiniteError as error:
            raise NonFiniteError(f"with {what}: {error}") from error

    def alike(self, others: Sequence[Numbers], *, absolute: bool = False) -> list[float]:
        """Rank correlation with other explanations, a text; where one of the two has no order 0, and 1 where neither
        has: what stays constant is what nothing changes."""
        pairs = zip(self.relevance, others, strict=True)
        return [_spearman(np.abs(a), np.abs(b)) if absolute else _spearman(a, b) for a, b in pairs]

    def other_class(self, seed: int) -> Mean | None:
        """How alike the explanation of another logit is; None where none can be told."""
        draw = np.random.default_rng(seed)
        with_logits = self.model.ask(self.questions.about(range(1)))
        count = with_logits.logits.shape[-1]
        targets = [each.target for each in self.questions.asked]
        if count < 2 or not all(type(target) is Logit for target in targets):
            return None
        others = []
        for target in targets:
            assert isinstance(target, Logit)
            assert isinstance(target.token, int)
            others.append(Logit((target.token + int(draw.integers(1, count))) % count))
        found = self._explained(self.model, self.questions.with_targets(others))[0]
        return Mean.of(self.alike(found))

    def ledger(self) -> float | None:
        """The largest difference that a ledger misses, relative to its scale."""
        if not self.method.has_ledger:
            return None
        missed = []
        for i in range(len(self.questions)):
            found = attribute_all([self.method], self.model, self.questions.alone([i]), ledger=True)[self.method.name]
            assert found.ledgers is not None
            missed.append(abs(found.ledgers[0].difference) / (found.ledgers[0].scale or 1.0))
        return max(missed)

    def batch(self) -> float | None:
        """The largest difference between a batch and a text alone, relative to the text's largest relevance; None where
        each text ran alone in any case, for nothing is compared then."""
        if all(len(group) == 1 for group in self.model.groups(self.questions.rows, self.batch_size)):
            return None
        alone = self._explained(self.model, self.questions, batch_size=1)[0]
        pairs = zip(self.relevance, alone, strict=True)
        return max(float(np.abs(a - b).max() / (np.abs(b).max() or 1.0)) for a, b in pairs)

    def complete(self) -> tuple[float, float, float]:
        """The tokens' sum over the value: median, smallest and largest."""
        shares = [float(each.sum()) / (value or 1.0) for each, value in zip(self.relevance, self.values, strict=True)]
        return float(np.median(shares)), min(shares), max(shares)


def _spearman(a: Numbers, b: Numbers) -> float:
    return 1.0 if np.ptp(a) == np.ptp(b) == 0 else pearson(ranks(a), ranks(b))
