"""Methods of one forward and one backward pass: the LRP family and the gradient baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lrpx import recipes, tasks
from lrpx.attribution import axes_of_pixels, numbered
from lrpx.engine._learned import Learned
from lrpx.engine._positions import Positions
from lrpx.errors import MethodError, NonFiniteError
from lrpx.methods._contract import Found, Method, register
from lrpx.parts import Part
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from lrpx._passes import Pass
    from lrpx.engine import Source
    from lrpx.ledger import Ledger
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.recipes import Recipe


def value_times_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """``Σ_d x ⊙ ∂x``: relevance under a rule recipe, Gradient×Input under none."""
    return (value.to(gradient.dtype) * gradient).sum(-1)


@dataclass(frozen=True)
class Backward(Method):
    """One forward pass under a recipe, a backward pass for each question of a row, and a reduction over the embedding.

    Args:
        name: how results call it.
        recipe: the rules.
        reduce: from embeddings and their gradients ``[..., d]`` to scores ``[...]``.
        label: how tables spell it.
    """

    name: str
    recipe: Recipe
    reduce: Callable[[Tensor, Tensor], Tensor] = value_times_gradient
    label: str = ""

    tasks: ClassVar[frozenset[Task]] = frozenset(Task)

    @property
    def has_ledger(self) -> bool:
        """Whether its scores are in the units of the explained value."""
        return self.reduce is value_times_gradient

    @property
    def of_embeddings(self) -> bool:
        """Whether a token's score is that of its embedding, and of nothing else."""
        return True

    def describe(self) -> str:
        """The recipe, and the reduction if it is not ``Σ x ⊙ ∂x``."""
        reduced = "" if self.reduce is value_times_gradient else f"; {self.reduce.__module__}.{self.reduce.__name__}"
        return self.recipe.describe() + reduced

    def pass_key(self) -> Hashable:
        """Methods of one recipe differ in what they make of the gradient alone."""
        return self.recipe

    def run_with(self) -> dict[str, Any]:
        """What else :meth:`BoundModel.traced <lrpx.model.BoundModel.traced>` is told, the same for methods of one
        :meth:`pass_key`."""
        return {}

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger of a method whose scores are not in the units of the explained value.
            NonFiniteError: NaN or infinity in the logits or the relevance; names the first module.
            ModelError: the token embedding was not used, or the model cannot be compiled.
        """
        return self.together([self], model, questions, ledger=ledger)[0]

    def together(
        self, methods: Sequence[Backward], model: BoundModel, questions: Questions, *, ledger: bool = False
    ) -> list[Found]:
        """What methods of one recipe find, in one pass for all of them; see :meth:`attribute`."""
        for method in methods:
            if ledger and not method.has_ledger:
                raise MethodError(
                    f"{method.name} does not measure in the units of the explained value, so no ledger can add up to "
                    "it; leave ledger out, or use attnlrp, lrp or gradient-x-input"
                )
        try:
            return self._found(methods, model, questions, ledger=ledger)
        except NonFiniteError:
            # once more, watching every module, so that the error can name the first one
            return self._found(methods, model, questions, ledger=ledger, observe=("*",), plain=True)

    def read(self, ran: Pass, chosen: Sequence[int]) -> tuple[list[Tensor], dict[str, list[Part]]]:
        """What a round of the pass tells of the chosen questions: ``[T]`` for each, and other parts by name."""
        found = of_tokens(ran, chosen, self.reduce)
        is_plain = self.has_ledger and not self.recipe.has_rules()
        if is_plain and ran.batch.arguments and all(len(parts) == 1 for parts in ran.sources):
            for mine, lost in zip(found, of_tokens(ran, chosen, _rounded), strict=True):
                _refuse_rounding(self.name, mine, lost)
        return found, {}

    def _found(
        self, methods: Sequence[Backward], model: BoundModel, questions: Questions, *, ledger: bool, **how: Any
    ) -> list[Found]:
        relevance: list[list[Tensor]] = [[torch.empty(0)] * len(questions) for _ in methods]
        parts: dict[str, list[list[Part]]] = {}
        ledgers: list[Ledger] = []
        how |= {"ledger": ledger, "learned": model.task.pictures} | methods[0].run_with()
        with model.traced(questions, self.recipe, **how) as ran:
            for chosen in ran.explained():
                for at, (method, mine) in enumerate(zip(methods, relevance, strict=True)):
                    scores, others = method.read(ran, chosen)
                    for i, found in zip(chosen, scores, strict=True):
                        mine[i] = found
                    for name, each in others.items():
                        places = parts.setdefault(name, [[] for _ in methods])[at]
                        places += each[:1] * (len(questions) - len(places))
                        for i, part in zip(chosen, each, strict=True):
                            places[i] = part
                ledgers += [ran.trace.ledger(ran.tables if ran.batch.arguments else ())] if ledger else []
                _of_arguments(ran, chosen, methods, parts, tasks.pixel_argument(model.module, model.task))
                _of_learned(ran, chosen, methods, parts)
            given = [source.value for source in ran.trace.sources if source.ids is None]
        answers = ran.answers.detached()
        if given and not self.recipe.has_rules():
            _refuse_rounded_patches(model, questions, methods, parts.get("pixels", []), max(map(_precision, given)))
        if ledger:  # a round has one question then, the first of them first
            assert len(questions.rows) == 1
        return [
            Found(
                answers,
                tuple(mine),
                {name: tuple(each[at]) for name, each in parts.items()},
                tuple(ledgers) if ledger else None,
            )
            for at, mine in enumerate(relevance)
        ]


def of_tokens(ran: Pass, chosen: Sequence[int], reduce: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """``[T]`` for each of the chosen questions."""
    if not ran.batch.arguments:
        return [torch.empty(0)] * len(chosen)
    with torch._C.DisableTorchFunction():  # what is found is no part of the model
        scores = [each.cpu() for each in ran.by_token([_reduced(ran, parts, reduce) for parts in ran.sources])]
        return [ran.batch.of_row(ran.questions.asked[i].row, scores).clone() for i in chosen]


def _rounded(value: Tensor, gradient: Tensor) -> Tensor:
    """What is lost at most, nearly, where ``Σ_d x ⊙ ∂x`` is summed of rounded numbers."""
    length: Tensor = torch.linalg.vector_norm(value.to(gradient.dtype) * gradient, dim=-1)
    return 4 * _precision(value) * length


def _precision(value: Tensor) -> float:
    """Of the numbers that a model computes of these."""
    kind = value.device.type
    return torch.finfo(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype).eps


def _refuse_rounding(name: str, found: Tensor, lost: Tensor, of: str = "", dtype: str = "float32") -> None:
    """Refuse the scores of a question, of its tokens or of something else (``of``), that are rounding alone.

    Raises:
        MethodError: none is larger than the most that is lost.
    """
    if found.numel() and float(found.abs().max()) < float(lost.max()):
        raise MethodError(
            f"{name} has nothing but rounding {of}here, as where a norm stands right behind the embeddings, to which "
            f"their length is nothing; load the model in torch.{dtype}, or use attnlrp"
        )


def _refuse_rounded_patches(
    model: BoundModel, questions: Questions, methods: Sequence[Backward], pixels: Sequence[Sequence[Part]], eps: float
) -> None:
    """Refuse pixels whose sums over the patches are rounding alone.

    Raises:
        MethodError: no patch of a question has more.
    """
    for method, found in zip(methods, pixels, strict=False):
        for i, part in enumerate(found if method.has_ledger else ()):
            grid = model.patches(questions.row_of(i))
            if grid is not None:
                values = part.values.clone()
                lost = 4 * eps * grid.summed(values.double() ** 2).sqrt()
                _refuse_rounding(method.name, grid.summed(values), lost, "at the patches ", "float64")


def _reduced(ran: Pass, parts: Sequence[Source], reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``[B, T]``: of tokens that are looked up in several tables, the sum of what each has.

    Raises:
        MethodError: there are several, and the reduction is no sum.
    """
    if len(parts) > 1 and reduce is not value_times_gradient:
        raise MethodError(
            f"the tokens are looked up in {' and '.join(source.paths[0] for source in parts)}, and lengths of them "
            "do not add up; use attnlrp, lrp or gradient-x-input, or merge an adapter, model.merge_and_unload()"
        )
    first, *others = (reduce(source.value.detach(), ran.trace.source_gradient(source)) for source in parts)
    return sum(others, first)


def _of_arguments(
    ran: Pass,
    chosen: Sequence[int],
    methods: Sequence[Backward],
    parts: dict[str, list[list[Part]]],
    pixels: str | None,
) -> None:
    """The relevance of inputs that are no tokens, such as pixels, as parts: ``parts[name][method][question]``."""
    for source in ran.trace.sources:
        (name, *_) = source.paths
        if source.ids is not None or name not in ran.questions.rows[0].arguments:
            continue
        gradient = ran.trace.source_gradient(source)
        for at, method in enumerate(methods):
            called = "pixels" if name == pixels else name
            mine = parts.setdefault(called, [[] for _ in methods])[at]
            mine += [Part(called, torch.empty(0), ("place",))] * (len(ran.questions) - len(mine))
            # a number is its own embedding: the reduction over a dimension of size one
            scores = method.reduce(source.value.detach().unsqueeze(-1), gradient.unsqueeze(-1)).cpu()
            for i in chosen:
                values = _of_row(ran, i, scores)
                mine[i] = Part(called, values, _axes(called, values.ndim))


def _of_learned(
    ran: Pass, chosen: Sequence[int], methods: Sequence[Backward], parts: dict[str, list[list[Part]]]
) -> None:
    """The relevance of learned tokens and of positions, as parts like those of :func:`_of_arguments`."""
    learned, positions = ran.trace.tap(Learned), ran.trace.tap(Positions)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {"class token": [], "positions": []}
    for leaf in () if learned is None else learned.found:
        found["class token"].append((leaf.detach(), ran.trace.gradient_of(leaf)))
    if methods[0].recipe.has_positions():  # which their method reads
        positions = None
    for sink in () if positions is None else positions.sinks:
        found["positions"].append((sink.rows_of(sink.leaf.detach()), sink.rows_of(ran.trace.gradient_of(sink.leaf))))
    for kind, axis in (("class token", "learned token"), ("positions", "place")):
        pairs = found[kind]
        for at, method in enumerate(methods if pairs else ()):
            scores = torch.cat([method.reduce(*pair).flatten(1).cpu() for pair in pairs], 1)
            mine = parts.setdefault(kind, [[] for _ in methods])[at]
            mine += [Part(kind, torch.empty(0), (axis,))] * (len(ran.questions) - len(mine))
            for i in chosen:
                values = _of_row(ran, i, scores)
                mine[i] = Part(kind, values, (*_axes(kind, values.ndim - 1), axis))


def _of_row(ran: Pass, question: int, scores: Tensor) -> Tensor:
    """What a question's row has of ``[B, …]``; all of it where one row alone has several images, or tiles of one."""
    if len(ran.questions.rows) > 1:
        return scores[ran.questions.asked[question].row]
    return scores[0] if len(scores) == 1 else scores


def _axes(name: str, count: int) -> tuple[str, ...]:
    """The axes of an argument of the model."""
    return axes_of_pixels(count) if name == "pixels" else numbered(count)


register(Backward("attnlrp", recipes.ATTNLRP, label="AttnLRP"))
register(Backward("lrp", recipes.LRP, label="LRP"))
