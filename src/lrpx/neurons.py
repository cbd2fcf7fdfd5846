"""Which neurons, heads or layers carry a prediction: the relevance of every unit, from one backward pass.

The relevance of a latent neuron is ``x ⊙ ∂x`` at the input of the MLP's second matrix (Achtibat et al. 2024, §3.4),
that of a head or a layer the sum over its features; it is in the units of the explained value. All units of a kind, of
all layers and at all positions, are ranked together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lrpx._batching import batches
from lrpx.errors import MethodError
from lrpx.metrics._statistics import intervals
from lrpx.ranking import MeanUnit, Unit
from lrpx.units import Reading, places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lrpx._batching import Batch
    from lrpx.model import BoundModel
    from lrpx.questions import Answers, Questions
    from lrpx.recipes import Recipe
    from lrpx.units import Kind, Place

__all__ = ["relevance_of_units"]

# ------------------------------------------------------------------------------ one text


def relevance_of_units(
    model: BoundModel, questions: Questions, recipe: Recipe, chosen: Sequence[Place]
) -> Iterator[tuple[int, Answers, list[tuple[Tensor, Tensor, int]]]]:
    """The relevance of all units, in one forward pass and one backward pass for each question of a row.

    Args:
        model: the model.
        questions: what is asked; the rows run as one batch.
        recipe: the rules.
        chosen: the places of the units.

    Yields:
        The number of a question; the answers to all; and for each place what stood there ``[T, n]``, its relevance
        ``[T, n]``, and which of the row's tokens the first of these ``T`` is. They are good until the next.

    Raises:
        MethodError: what a module takes or gives has not one vector for each token.
        TargetError, NonFiniteError, UnknownOperationError: as an explanation.
    """
    readings: list[Reading] = []

    def taps(_: object) -> list[Reading]:
        readings.append(Reading(chosen))
        return readings[-1:]

    with model.traced(questions, recipe, taps=taps) as ran:
        answers = ran.answers.detached()
        for round_ in ran.explained():
            values = [readings[-1].value(place) for place in chosen]
            pairs = [(value.detach(), ran.trace.relevance_of(value)) for value in values]
            for i in round_:
                row = questions.asked[i].row
                found = []
                for place, (value, relevance) in zip(chosen, pairs, strict=True):
                    spots = spots_of(ran.batch, row, place, value.shape)
                    found.append((spots.of(value), spots.of(relevance), spots.first))
                yield i, answers, found


@dataclass(frozen=True)
class Spots:
    """Where a row's tokens stand in what a module takes or gives.

    Args:
        wide: how many tokens wide that is.
        turned: whether the tokens come before the rows.
        ranges: ``(row, start, stop)``, one for each segment.
        first: which of the row's tokens the first is.
    """

    wide: int
    turned: bool
    ranges: tuple[tuple[int, int, int], ...]
    first: int

    def of(self, value: Tensor) -> Tensor:
        """``[T, n]`` of ``[B, W, n]``, ``[W, B, n]`` or ``[B·W, n]``."""
        value = value.transpose(0, 1) if self.turned else value.reshape(-1, self.wide, value.shape[-1])
        parts = [value[row, start:stop] for row, start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def spots_of(batch: Batch, row: int, place: Place, shape: Sequence[int]) -> Spots:
    """Where a row's tokens stand in a tensor of this shape.

    Raises:
        MethodError: it has not one vector for each token.
    """
    count, lengths = len(batch.rows), batch.rows[row].lengths
    before = tuple(shape[:-1])
    if batch.task.together is not None:
        first, several = row * len(lengths), count * len(lengths)
        ranges = tuple((first + i, 0, length) for i, length in enumerate(lengths))
        known = [(several, Spots(batch.wide, False, ranges, 0))]
    elif not batch.arguments:  # an image has places and no tokens
        wide = before[-1]
        known = [(count, Spots(wide, False, ((row, 0, wide),), 0))] if len(before) == 2 else []
    else:
        starts = [int(start[row]) for start in batch.starts]
        known = [
            (count, Spots(wide, False, ((row, start, start + length),), sum(lengths[:i])))
            for i, (wide, start, length) in enumerate(zip(batch.widths, starts, lengths, strict=True))
        ]
    for rows, spots in known:
        if before in ((rows, spots.wide), (rows * spots.wide,)):
            return spots
        if before == (spots.wide, rows):
            return replace(spots, turned=True)
    raise MethodError(
        f"the {place.side} of {place.path} has the shape {list(shape)}, which has no vector for each of the input's "
        "tokens; ask for other units"
    )


def rank(
    model: BoundModel, questions: Questions, recipe: Recipe, kind: Kind, top: int
) -> tuple[tuple[Unit, ...], int, Answers]:
    """The most relevant units for one question, among how many, and the answer.

    Raises:
        MethodError: the model has no such units.
    """
    chosen = places_of(model, questions, kind)
    for i, answers, found in relevance_of_units(model, questions, recipe, chosen):
        pieces = questions.row_of(i).tokens.pieces
        value = float(answers.values[i])
        best: list[tuple[float, int, int]] = []
        count = 0
        for at, (place, (_, relevance, _)) in enumerate(zip(chosen, found, strict=True)):
            flat = place.of(relevance).flatten()
            count += len(flat)
            sizes, where = flat.abs().topk(min(top, len(flat)))
            best += zip((-sizes).tolist(), [at] * len(where), where.tolist(), strict=True)
        units = []
        for _, at, where_ in sorted(best)[:top]:
            place, (activation, relevance, first) = chosen[at], found[at]
            position, unit = divmod(where_, place.width)
            there = activation[position, list(place.features(unit))]
            amount = float(place.of(relevance[position])[unit])
            units.append(
                Unit(
                    place.layer,
                    unit,
                    first + position,
                    pieces[first + position] if first + position < len(pieces) else "",
                    float(there if place.size == 1 else torch.linalg.vector_norm(there)),
                    amount,
                    amount / value if value else None,
                    place.path,
                )
            )
    return tuple(units), count, answers


def places_of(model: BoundModel, questions: Questions, kind: Kind) -> tuple[Place, ...]:
    """The places of a model's units, found on a few tokens, or else on the very first input."""
    example = None
    if not model.task.segments or questions.rows[0].arguments:
        example = model.batch(questions.about([0])).inputs
    return places(model.module, kind, example)


# ------------------------------------------------------------------------- many texts


def sums(
    model: BoundModel,
    questions: Questions,
    recipe: Recipe,
    kind: Kind,
    batch_size: int,
    done: Callable[[int], object] = lambda count: None,
) -> tuple[tuple[Place, ...], Tensor]:
    """The places of a kind, and ``[K, U]``: for each question the relevance of each unit of all places, summed over the
    positions; four bytes a unit and question.
    """
    chosen = places_of(model, questions, kind)
    found = torch.zeros(len(questions), sum(place.width for place in chosen))
    mine: dict[int, list[int]] = {row: [] for row in range(len(questions.rows))}
    for i, question in enumerate(questions.asked):
        mine[question.row].append(i)
    for group in batches(questions.rows, batch_size if model.can_batch else 1):
        numbers = sorted(i for row in group for i in mine[row])
        for i, _, each in relevance_of_units(model, questions.about(group), recipe, chosen):
            parts = [place.of(relevance).sum(0) for place, (_, relevance, _) in zip(chosen, each, strict=True)]
            found[numbers[i]] = torch.cat(parts).float().cpu()
        done(len(group))
    return chosen, found


def mean_units(chosen: Sequence[Place], found: Tensor, others: Tensor | None, top: int) -> tuple[MeanUnit, ...]:
    """The units with the largest absolute mean, or difference of two means.

    Args:
        chosen: the places of the units.
        found: ``[N, U]``, the relevance of each in each text.
        others: ``[M, U]``: of a second set of texts.
        top: how many.
    """
    means = found.double().mean(0) - (0 if others is None else others.double().mean(0))
    order = sorted(means.abs().topk(min(top, len(means))).indices.tolist(), key=lambda u: (-abs(float(means[u])), u))
    low, high = intervals(found[:, order].numpy(), None if others is None else others[:, order].numpy())
    units = [(place, unit) for place in chosen for unit in range(place.width)]
    return tuple(
        MeanUnit(
            units[u][0].layer, units[u][1], float(means[u]), float(low[i]), float(high[i]),
            float(found[:, u].double().sum()), units[u][0].path,
        )
        for i, u in enumerate(order)
    )  # fmt: skip
