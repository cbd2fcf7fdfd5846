"""Activation patching, and what approximates it: which parts of a model make the difference between two inputs?

Two inputs of the same length, a clean and a corrupt one, are run. **Exact** patching puts one part's value of the
corrupt run into the clean run, one part at a time, and measures how the explained value moves. **Attribution** scores
all parts at once, ``Σ (a_corrupt − a_clean) · ∂̃``, where ``∂̃`` is the gradient of the clean run under a recipe:

- no rules: attribution patching (Nanda 2023; Syed et al. 2023);
- ``recipes.RELP``: relevance patching (Jafari et al. 2025); ``recipes.GIM``, ``ATTNLRP`` and ``LRP`` likewise;
- no rules, and the mean gradient of several points on the way from the corrupt to the clean embeddings: EAP-IG's
  (Hanna et al. 2024).

Parts are positions of the residual stream behind a layer and of what an attention or an MLP gives to it, and whole
heads and neurons, at all positions together. Where these are is known from :mod:`lrpx.units`.

>>> from lrpx.model import Spec
>>> from lrpx.recipes import RELP
>>> model = Spec().build()
>>> pair = pair_of(model, "The doors of the old house", "The door of the old house", " are", " is")
>>> truth = exact(model, pair, "mlp")
>>> truth.shape == attributed(model, pair, RELP, ["mlp"])["mlp"].shape == (6, len(pair))
True
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lrpx.errors import InputError, MethodError, TargetError
from lrpx.interventions import Patch
from lrpx.interventions._writing import Writing, recording, writing
from lrpx.questions import Question, Questions
from lrpx.recipes import Recipe
from lrpx.targets import Contrast, Target, whole_number
from lrpx.units import Place, Reading, places
from lrpx.units._asked import unseen
from lrpx.units._reading import Called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lrpx._batching import Batch
    from lrpx.engine import Tap
    from lrpx.engine._places import Side
    from lrpx.inputs import Row
    from lrpx.interventions._where import Key, Wanted
    from lrpx.model import BoundModel

__all__ = [
    "BY_POSITION",
    "KINDS",
    "Pair",
    "attributed",
    "coefficients",
    "exact",
    "pair_of",
    "parts_of",
    "patched",
    "recorded",
]

KINDS: Final[dict[str, str]] = {
    "residual": "residual stream behind a layer, by position",
    "attention": "output of an attention, by position",
    "mlp": "output of an MLP, by position",
    "heads": "attention heads, at all positions",
    "neurons": "neurons of the MLPs, at all positions",
}
"""The kinds of parts."""
BY_POSITION: Final = ("residual", "attention", "mlp")
"""Of these, each position is a part."""
AT_A_TIME: Final = 32
"""The most patched copies that run together."""


@dataclass(frozen=True)
class Pair:
    """Two inputs of as many tokens, and what is asked of both.

    Args:
        clean: the input that the model is right about.
        corrupt: the other.
        position: where the logits are read; None where they belong to the whole input.
        target: the explained value, with its tokens resolved.
    """

    clean: Row
    corrupt: Row
    position: int | None
    target: Target

    def __len__(self) -> int:
        """How many tokens each of the two has."""
        return self.clean.lengths[0]

    @cached_property
    def questions(self) -> Questions:
        """The same question about the clean and the corrupt input."""
        asked = tuple(Question(row, self.position, self.target) for row in (0, 1))
        return Questions((self.clean, self.corrupt), asked)

    @cached_property
    def first(self) -> int:
        """The first position at which the two inputs differ."""
        ids = zip(self.clean.tokens.ids, self.corrupt.tokens.ids, strict=True)
        return next(at for at, (a, b) in enumerate(ids) if a != b)


def pair_of(
    model: BoundModel, clean: Any, corrupt: Any, right: str | int, wrong: str | int, *, position: int | None = None
) -> Pair:
    """A pair, explained by the logit of the right token less that of the wrong one.

    Args:
        model: what will be asked.
        clean, corrupt: texts, or anything else that the model reads as one segment of tokens.
        right, wrong: a token of the model's vocabulary each, such as ``" Mary"``, or a class.
        position: where the logits are read; where the model reads them by itself when None, such as at the last token.

    Raises:
        InputError: the two are of unequal length in tokens, the same, or not of one segment of tokens.
        TargetError: ``right`` or ``wrong`` is no single token, or they are the same.
    """
    rows = [model.reader.row(each) for each in (clean, corrupt)]
    if any(len(row.segments) != 1 or row.arguments for row in rows):
        raise InputError(f"a {model.task.title} is given more than one text at once; patching takes one; pass another")
    lengths = [row.lengths[0] for row in rows]
    if lengths[0] != lengths[1]:
        raise InputError(
            f"the clean text has {lengths[0]} tokens and the corrupt one {lengths[1]}; patching needs as many, so "
            "that each position has its counterpart; choose words of as many tokens"
        )
    if rows[0].tokens.ids == rows[1].tokens.ids:
        raise InputError("the clean and the corrupt text are the same tokens; pass two that differ")
    found = [model.index(each) if isinstance(each, str) else each for each in (right, wrong)]
    if found[0] == found[1]:
        raise TargetError(f"the right and the wrong answer are the same token, {right!r}; pass two that differ")
    return Pair(rows[0], rows[1], model.reader.position(rows[0], position), Contrast(*found))


def parts_of(model: BoundModel, kind: str) -> tuple[Place, ...]:
    """Where the parts of a kind are, layer after layer.

    Raises:
        InputError: there is no such kind.
        MethodError: the model has no parts of that kind that are seen, or the tokens before the rows there.
    """
    if kind not in KINDS:
        raise InputError(f"there is no kind of parts {kind!r}; the kinds are {', '.join(KINDS)}")
    found = places(model.module, kind)  # type: ignore[arg-type]
    if len({each.width for each in found}) > 1:
        raise MethodError(f"the layers have {kind} of unequal number, and no table holds them; ask for other parts")
    if turned := next((each for each in found if each.turned), None):
        raise MethodError(
            f"the {turned.side} of {turned.name} has the tokens before the rows as XLNet, and patching takes the rows "
            "first; use lrpx.intervene with Patch"
        )
    return found


def recorded(model: BoundModel, pair: Pair, at: Sequence[Place]) -> dict[Place, Tensor]:
    """``[2, T, w]`` for each place: its values in the clean and in the corrupt run.

    Raises:
        TraceError: one of these comes to parts that no table has, as an expert that did not run when they were looked
            for.
    """
    kept: dict[tuple[Place, int], Tensor] = {}
    others = unseen(model.module, at)

    def listen(_: Batch, rows: Sequence[int]) -> Sequence[Tap]:
        return [recording(model.module, {place: keeper(place, rows) for place in at}), Reading((), others)]

    def keeper(place: Place, rows: Sequence[int]) -> Callable[[Tensor], None]:
        def keep(value: Tensor) -> None:
            for row, each in zip(rows, by_row(value.detach().clone(), len(rows)), strict=True):
                kept[place, row] = each[: len(pair)]

        return keep

    model.values(pair.questions, taps=listen)
    return {place: torch.stack([kept[place, row] for row in (0, 1)]) for place in at}


def attributed(
    model: BoundModel,
    pair: Pair,
    recipe: Recipe,
    kinds: Sequence[str] = tuple(KINDS),
    *,
    steps: int = 1,
) -> dict[str, Tensor]:
    """``Σ (a_corrupt − a_clean) · ∂̃`` of every part, in two forward passes and a backward pass.

    Args:
        model: the model.
        pair: the two inputs.
        recipe: the rules of the backward pass.
        kinds: of which parts.
        steps: how many points on the way from the corrupt to the clean embeddings the gradient is the mean of; one is
            the clean input alone.

    Returns:
        For each kind ``[L, T]`` by layer and position, or ``[L, units]``; in float32 at least.

    Raises:
        MethodError, InputError: as :func:`parts_of`; or a number of steps that is none; or several, where nobody knows
            of one stream that the first layer is given; or the model runs some parts under its own ``no_grad``.
        TraceError: as :func:`recorded`.
        UnknownOperationError, NonFiniteError: as any explanation.
    """
    check_steps(steps)
    chosen = {kind: parts_of(model, kind) for kind in kinds}
    start = [] if steps == 1 else [beginning(model)]
    every = list(dict.fromkeys([*start, *(each for some in chosen.values() for each in some)]))
    if not every:
        return {}
    values = recorded(model, pair, every)
    inputs = between(values[start[0]], steps) if start else None
    gradients = coefficients(model, pair, recipe, every, inputs)
    return {
        kind: torch.stack([_summed(values[each], gradients[each], each) for each in some])
        for kind, some in chosen.items()
    }


def beginning(model: BoundModel) -> Place:
    """What the first layer is given.

    Raises:
        MethodError: it is not seen to be one stream.
    """
    try:
        return replace(places(model.module, "residual")[0], side="input")
    except MethodError as error:
        raise MethodError(
            f"{str(error).partition('; ask for')[0]}, from which several steps start; use steps=1"
        ) from error


def check_steps(steps: Any) -> None:
    """Refuse a number of points that is none: between whole ones the last is beyond the clean input.

    Raises:
        InputError: it is none.
    """
    if (whole_number(steps) or 0) < 1:
        raise InputError(f"steps is {steps!r}; pass a whole number, at least 1")


def between(values: Tensor, steps: int) -> Tensor:
    """``[steps, T, w]``: the points ``a_corrupt + k/steps · (a_clean − a_corrupt)``, ``k = 1, …, steps``."""
    shares = torch.arange(1, steps + 1, dtype=values.dtype, device=values.device) / steps
    return values[1] + shares[:, None, None] * (values[0] - values[1])


def coefficients(
    model: BoundModel, pair: Pair, recipe: Recipe, at: Sequence[Place], inputs: Tensor | None = None
) -> dict[Place, Tensor]:
    """``∂̃`` at each place of the clean run ``[T, w]``, or its mean over inputs ``[n, T, d]`` of the first place."""
    with backward(model, pair, recipe, at, inputs) as (gradients, _):
        return {place: gradient[:, : len(pair)].mean(0) for place, gradient in gradients.items()}


@contextmanager
def backward(
    model: BoundModel, pair: Pair, recipe: Recipe, at: Sequence[Place], inputs: Tensor | None = None
) -> Iterator[tuple[dict[Place, Tensor], dict[Place, tuple[Tensor, Tensor]]]]:
    """A forward and a backward pass of the clean input, or of inputs ``[n, T, d]`` of the first place.

    Yields:
        ``∂̃`` at each place ``[n, T, w]``; and for each place the leaf of the graph that all behind it was computed
        from, and what was there before: the graph goes on until the block ends.

    Raises:
        MethodError: there is no such recipe.
    """
    if not isinstance(recipe, Recipe):
        raise MethodError(f"the recipe is {recipe!r}; pass one of lrpx.recipes, such as lrpx.recipes.RELP")
    count = 1 if inputs is None else len(inputs)
    start = None if inputs is None else inputs.detach()
    taps: list[_Leaves] = []

    def listen(_: Batch) -> Sequence[Tap]:
        taps.append(_Leaves(at, count, start))
        return taps

    with model.traced(pair.questions.alone([0] * count), recipe, taps=listen) as ran:
        ran.trace.explain(ran.answers.values, ran.answers.logits, keep=True)
        leaves = {each: taps[-1].found[each.path, each.side, each.call] for each in at}
        yield {place: ran.trace.gradient_of(leaf) for place, (leaf, _) in leaves.items()}, leaves


def exact(
    model: BoundModel,
    pair: Pair,
    kind: str,
    *,
    which: Sequence[tuple[int, int]] | None = None,
    batch_size: int = AT_A_TIME,
) -> Tensor:
    """How the explained value moves when one part has its value of the corrupt run, one part at a time.

    Args:
        model: the model.
        pair: the two inputs.
        kind: of which parts.
        which: the parts to patch, each by its layer and its position or unit; all when None.
        batch_size: the most patched copies that run together.

    Returns:
        ``[L, T]`` or ``[L, units]``; NaN for parts that were not patched.

    Raises:
        MethodError, InputError: as :func:`parts_of`, or a part that there is not.
        TraceError: as :func:`recorded`.
    """
    chosen = parts_of(model, kind)
    values = recorded(model, pair, chosen)
    width = len(pair) if kind in BY_POSITION else chosen[0].width
    asked = [(i, at) for i in range(len(chosen)) for at in range(width)] if which is None else list(which)
    wrong = next(((i, at) for i, at in asked if not (0 <= i < len(chosen) and 0 <= at < width)), None)
    if wrong is not None:
        raise InputError(f"there is no part {wrong[1]} of layer {wrong[0]}; {kind} has {len(chosen)} × {width}")
    runs: list[Mapping[Key, Wanted]] = [{chosen[i]: _patch(chosen[i], values[chosen[i]][1], at)} for i, at in asked]
    before = float(model.values(pair.questions.alone([0]))[0])
    found = torch.full((len(chosen), width), torch.nan, dtype=torch.float64)
    if runs:
        after = patched(model, pair.questions.alone([0]), runs, batch_size=batch_size).double()
        rows, columns = zip(*asked, strict=True)
        found[list(rows), list(columns)] = after - before
    return found


def patched(
    model: BoundModel,
    question: Questions,
    runs: Sequence[Mapping[Key, Wanted]],
    *,
    batch_size: int = AT_A_TIME,
    read: Callable[[int, Target, Tensor], Tensor] | None = None,
) -> Tensor:
    """``[n]``: the value of one question, with the model's inner values changed as each of ``n`` runs says.

    Args:
        model: the model.
        question: about one row, its target resolved.
        runs: what is changed in each run, as :func:`~lrpx.interventions.intervene` takes it.
        batch_size: the most runs together.
        read: what else is read at the output, as :meth:`BoundModel.values <lrpx.model.BoundModel.values>` takes it.

    Raises:
        MethodError, InputError: a place or a unit that is not there, or a change that does not fit it.
        TraceError: the model did not come to a place, or to a position.
    """
    taps: list[Writing] = []

    def write(batch: Batch, rows: Sequence[int]) -> Sequence[Tap]:
        at = torch.arange(batch.real.shape[1]) - batch.starts[0][:, None]
        taps.append(writing(model.module, [runs[row] for row in rows], torch.where(batch.real, at, -1)))
        return taps[-1:]

    values = model.values(question.alone([0] * len(runs)), taps=write, batch_size=batch_size, read=read)
    for tap in taps:
        tap.refuse_unreached(type(model.module).__name__)
    return values


def _patch(place: Place, corrupt: Tensor, at: int) -> Wanted:
    """What patches one part."""
    return Patch(corrupt, positions=[at]) if place.kind in BY_POSITION else {at: Patch(corrupt)}


def _summed(values: Tensor, gradient: Tensor, place: Place) -> Tensor:
    """``Σ (a_corrupt − a_clean) · ∂`` by position, or by unit."""
    product = (values[1] - values[0]).to(gradient.dtype) * gradient
    return product.sum(-1) if place.kind in BY_POSITION else place.of(product).sum(0)


class _Leaves(Called):
    """Values ``[B, T, w]`` at some places as leaves, and perhaps other inputs ``[B, T, d]`` of the first of them."""

    writes = True

    def __init__(self, at: Sequence[Place], rows: int, start: Tensor | None) -> None:
        super().__init__(each.path for each in at)
        self._places = {(each.path, each.side, each.call) for each in at}
        self._first = [(each.path, each.side, each.call) for each in at[:1]]
        self._rows = rows
        self._start = start
        self.found: dict[tuple[str, Side, int], tuple[Tensor, Tensor]] = {}

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """The same value, with a leaf that all after it is computed from; what is before goes on in the graph.

        Raises:
            MethodError: the model computes it without gradients.
        """
        key = path, side, call
        if key not in self._places:
            return None
        if not torch.is_grad_enabled():
            raise MethodError(
                f"{path} runs without gradients, in a part of the model under its own "
                "no_grad, and what it makes of a difference would be scored as nothing; use exact patching"
            )
        leaf = by_row(value.detach().clone(), self._rows)
        if self._start is not None and key in self._first:
            leaf[:, : self._start.shape[1]] = self._start
        self.found[key] = leaf.requires_grad_(), value
        return leaf.reshape(value.shape) + (value - value.detach())

    def leaves(self) -> list[Tensor]:
        """What was found."""
        return [leaf for leaf, _ in self.found.values()]


def by_row(value: Tensor, rows: int) -> Tensor:
    """``[B, T, w]`` also where a module is given all tokens one after another.

    Raises:
        MethodError: the model computes with the tokens before the rows.
    """
    if value.ndim != 3:
        return value.reshape(rows, -1, value.shape[-1])
    if len(value) != rows:  # the rows of a batch are never as many as its tokens
        raise MethodError(
            f"the model computes with {list(value.shape)} for {rows} rows, the tokens before the rows as XLNet, and "
            "patching takes the rows first; use lrpx.intervene with Patch"
        )
    return value
