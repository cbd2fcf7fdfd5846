"""Which neurons, heads or layers carry a prediction: the relevance of every unit, from one backward pass.

The relevance of a latent neuron is ``x ⊙ ∂x`` at the input of the MLP's second matrix (Achtibat et al. 2024, §3.4),
that of a head or a layer the sum over its features; it is in the units of the explained value. All units of a kind, of
all layers and at all positions, are ranked together.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lrpx.errors import InputError, MethodError
from lrpx.metrics._statistics import intervals
from lrpx.parts import Part
from lrpx.ranking import MeanUnit, Unit
from lrpx.units import Reading, place_in, places
from lrpx.units._asked import NoUnitsError, unseen
from lrpx.units._looking import with_tokens
from lrpx.units._place import TITLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lrpx._batching import Batch
    from lrpx._passes import Pass
    from lrpx.engine._places import Side
    from lrpx.inputs import Row
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
        chosen: the places of the units, all that the model has of a kind.

    Yields:
        The number of a question; the answers to all; and for each place what stood there ``[T, n]``, its relevance
        ``[T, n]``, and which of the row's tokens the first of these ``T`` is. They are good until the next.

    Raises:
        MethodError: what a module takes or gives has not one vector for each token.
        TargetError, NonFiniteError, UnknownOperationError: as an explanation.
    """
    _refuse_no_tokens(model, questions, chosen)
    readings: list[Reading] = []

    def taps(_: object) -> list[Reading]:
        readings.append(Reading(chosen, unseen(model.module, chosen)))
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
        """``[T, n]`` of ``[B, W, n]``, ``[B, 1, W, n]``, ``[W, B, n]``, ``[B·W, n]`` or ``[W·B, n]``."""
        before = (self.wide, -1) if self.turned else (-1, self.wide)
        value = value.reshape(*before, value.shape[-1])
        value = value.transpose(0, 1) if self.turned else value
        parts = [value[row, start:stop] for row, start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _refuse_no_tokens(model: BoundModel, questions: Questions, chosen: Sequence[Place]) -> None:
    """Refuse places of what a model makes of an image beside a text, whose places may be as many as the tokens.

    Raises:
        MethodError: one of them is such a place.
    """
    if not (model.task.segments and questions.rows[0].arguments):
        return
    seen = with_tokens(model.module, model.batch(questions.about([0])).handed)
    other = next((place for place in chosen if (place.path, place.side) not in seen), None)
    if other is not None:
        raise MethodError(
            f"the {other.side} of {other.name} is computed without the input's tokens, as of an image beside them, and "
            "has no vector for each; ask for other units"
        )


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
        if batch.arguments and place.apart == spots.wide:  # latents, say, which happen to be as many
            continue
        if before in ((rows, spots.wide), (rows, 1, spots.wide), (rows * spots.wide,)):
            return replace(spots, turned=place.turned and len(before) == 1)
        if before == (spots.wide, rows):
            return replace(spots, turned=True)
    raise MethodError(
        f"the {place.side} of {place.name} has the shape {list(shape)}, which has no vector for each of the input's "
        "tokens; ask for other units"
    )


def rank(
    model: BoundModel, questions: Questions, recipe: Recipe, kind: Kind, top: int, at: Sequence[int] | None = None
) -> tuple[tuple[Unit, ...], int, Answers]:
    """The most relevant units for one question, at some of its tokens or all, among how many, and the answer.

    Raises:
        MethodError: the model has no such units.
    """
    chosen = places_of(model, questions, kind, recipe)
    ((_, answers, found),) = relevance_of_units(model, questions, recipe, chosen)
    pieces = questions.row_of(0).tokens.pieces
    value = float(answers.values[0])
    best: list[tuple[float, int, int]] = []  # the size, less than zero, the place, and where in it
    count = 0
    for number, (place, (_, relevance, first)) in enumerate(zip(chosen, found, strict=True)):
        sizes = place.of(relevance).abs()
        if at is not None:
            elsewhere = [i for i in range(len(sizes)) if first + i not in at]
            sizes[elsewhere] = -1  # smaller than any
        count += sizes.numel() if at is None else (len(sizes) - len(elsewhere)) * place.width
        # the largest are among those that are no smaller than as many peaks: to look is quicker than to sort
        across = 0 if sizes.shape[1] > sizes.shape[0] else 1
        peaks = sizes.amax(across)
        least = float(peaks.topk(top).values[-1]) if len(peaks) >= top else 0.0
        least = max(0.0, least, -best[-1][0] if len(best) == top else 0.0)
        lines = (peaks >= least).nonzero()[:, 0]
        part = sizes.index_select(1 - across, lines)
        rows, columns = (part >= least).nonzero(as_tuple=True)
        if len(rows) > top:
            largest = part[rows, columns].topk(top).indices
            rows, columns = rows[largest], columns[largest]
        amounts = (-part[rows, columns]).tolist()
        rows, columns = (rows, lines[columns]) if across == 0 else (lines[rows], columns)
        where = (rows * place.width + columns).tolist()
        best = sorted([*best, *zip(amounts, [number] * len(where), where, strict=True)])[:top]
    units: dict[tuple[int, int], Unit] = {}
    for number, (place, (activation, relevance, first)) in enumerate(zip(chosen, found, strict=True)):
        mine = [divmod(there_at, place.width) for _, at_place, there_at in best if at_place == number]
        if not mine:
            continue
        spots = torch.tensor(mine, device=relevance.device)
        features = torch.tensor([list(place.features(unit)) for _, unit in mine], device=activation.device)
        there = activation[spots[:, :1], features]
        lengths = there[:, 0] if place.size == 1 else torch.linalg.vector_norm(there, dim=1)
        relevances = place.of(relevance)[spots[:, 0], spots[:, 1]]
        for (position, unit), size, amount in zip(mine, lengths.tolist(), relevances.tolist(), strict=True):
            at_token = first + position
            units[number, position * place.width + unit] = Unit(
                place.layer,
                unit,
                at_token,
                pieces[at_token] if at_token < len(pieces) else "",
                size,
                amount,
                amount / value if value else None,
                place.name,
            )
    return tuple(units[number, there_at] for _, number, there_at in best), count, answers


def tokens_of(row: Row, at: Sequence[int]) -> list[int]:
    """The tokens of a row that are meant, from 0; given perhaps from the end.

    Raises:
        InputError: there is no such token.
    """
    for segment in row.segments:
        for place in at:
            segment.refuse_counted(place, "token")
    count = sum(row.lengths)
    wrong = next((t for t in at if not -count <= t < count), None)
    if wrong is not None:
        raise InputError(f"there is no token {wrong} among {count}; pass {-count} to {count - 1}{row.where}")
    return sorted({t % count for t in at})


def places_of(model: BoundModel, questions: Questions, kind: Kind, recipe: Recipe) -> tuple[Place, ...]:
    """The places of a model's units, found on a few tokens, or else on the very first input; of a branch the last of
    it, behind a norm that it has there. Keys and values that several layers read are those of the first alone.

    Raises:
        MethodError: there are none; or no module gives what stands behind that norm, and its plain gradient would have
            the branch sum to nothing before it; or behind a gate, which a recipe would give a share.
    """
    example = None
    if not model.task.segments or questions.rows[0].arguments:
        example = model.batch(questions.about([0])).handed
    found = places(model.module, kind, example)
    hidden = next((place for place in found if place.is_normed), None)
    if hidden is not None and not recipe.has_rule_for_norms():
        raise MethodError(
            f"what {hidden.name} gives goes through a norm that no module is, before which its plain gradient sums to "
            "nothing; use attnlrp or lrp, or make the norm a module"
        )
    hidden = next((place for place in found if place.is_gated), None)
    if hidden is not None and recipe.shares_products():
        raise MethodError(
            f"what {hidden.name} gives is multiplied by what depends on the input, and no module gives the product, a "
            "share of whose relevance is that factor's; use lrp or gradient-x-input, or make the gate a module"
        )
    each: dict[tuple[object, ...], Place] = {}
    for place in (place.behind or place for place in found):
        each.setdefault((place.path, place.side, place.call, place.columns), place)
    return tuple(each.values())


# ------------------------------------------------------------------------- many texts


def sums(
    model: BoundModel,
    questions: Questions,
    recipe: Recipe,
    kind: Kind,
    batch_size: int,
    at: Sequence[int] | None = None,
    done: Callable[[int], object] = lambda count: None,
) -> tuple[tuple[Place, ...], Tensor]:
    """The places of a kind, and ``[K, U]``: for each question the relevance of each unit of all places, summed over the
    positions, or over some, negative from the end; four bytes a unit and question.
    """
    chosen = places_of(model, questions, kind, recipe)
    found = torch.zeros(len(questions), sum(place.width for place in chosen), dtype=torch.float32)
    mine: dict[int, list[int]] = {row: [] for row in range(len(questions.rows))}
    for i, question in enumerate(questions.asked):
        mine[question.row].append(i)
    for group in model.groups(questions.rows, batch_size):
        numbers = sorted(i for row in group for i in mine[row])
        for i, _, each in relevance_of_units(model, questions.about(group), recipe, chosen):
            wanted = None if at is None else tokens_of(questions.row_of(numbers[i]), at)
            parts = []
            for place, (_, relevance, first) in zip(chosen, each, strict=True):
                if wanted is not None:
                    relevance = relevance[[t - first for t in wanted if 0 <= t - first < len(relevance)]]
                parts.append(place.of(relevance).sum(0))
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
            float(found[:, u].double().sum()), units[u][0].name,
        )
        for i, u in enumerate(order)
    )  # fmt: skip


# ------------------------------------------------------------------------------- flow


def flow(model: BoundModel, questions: Questions, recipe: Recipe) -> tuple[Answers, Tensor, list[Part]]:
    """How the relevance of one question flows: the answers, ``[T]`` of the tokens, and parts of it.

    ``"residual"``, ``"attention"``, ``"mlp"`` are ``[L, T]``: the stream behind each layer, and what each branch gives
    to it; ``"heads"`` ``[L, H, T]``, where every layer has one attention of as many heads, or none: then it has zeros.
    What a model has not is left out, and so is what is refused, with a warning.

    Raises:
        MethodError: the model has no layers that are known (:mod:`lrpx.units`).
    """
    found: dict[Kind, tuple[Place, ...]] = {"residual": places_of(model, questions, "residual", recipe)}
    kinds: tuple[Kind, ...] = ("attention", "mlp", "heads")
    for kind in kinds:
        try:
            found[kind] = places_of(model, questions, kind, recipe)
        except NoUnitsError:
            continue
        except MethodError as error:
            warnings.warn(f"the flow is told without {TITLES[kind]}: {error}", stacklevel=3)
    layers_ = [(place.stack, place.layer) for place in found["residual"]]
    count = sum(questions.rows[0].lengths)
    values: dict[str, Tensor] = {}
    reading = [place for each in found.values() for place in each]
    _refuse_no_tokens(model, questions, reading)
    with _kept(model, questions, recipe, Reading(reading, unseen(model.module, reading))) as (ran, read):
        tokens = _of_tokens(ran, [ran.trace.source_gradient(source) for source in ran.trace.sources])
        for kind, chosen in found.items():
            heads = kind == "heads"
            whole = torch.zeros(len(layers_), max(place.width for place in chosen), count, dtype=torch.float64)
            times = Counter((place.stack, place.layer) for place in chosen)
            if heads and (len({place.width for place in chosen}) > 1 or set(times.values()) != {1}):
                continue
            for place in chosen:
                value = read.value(place)
                spots = spots_of(ran.batch, 0, place, value.shape)
                relevance = place.of(spots.of(ran.trace.relevance_of(value))).T
                at = layers_.index((place.stack, place.layer))
                whole[at, :, spots.first : spots.first + relevance.shape[1]] += relevance.double().cpu()
            values[kind] = whole if heads else whole[:, 0]
        answers = ran.answers.detached()
    labels = [place.name for place in found["residual"]]
    axes = {"heads": ("layer", "head", "token")}
    parts = [
        Part(kind, values[kind].to(tokens.dtype), axes.get(kind, ("layer", "token")), {"layer": labels})
        for kind in values
    ]
    return answers, tokens, parts


def paths(
    model: BoundModel, questions: Questions, recipe: Recipe, kind: Kind, layer: int | str, units: Sequence[int] | int
) -> tuple[Answers, Tensor, Part]:
    """The exact split of one question's relevance over the units of one layer: the answers, ``[T]`` of the tokens, and
    ``[U + 2, T]``: what of it goes through each unit, through all others there, and past them.

    What goes through a unit is measured by a backward pass from that unit alone, with what arrived at it: the residual
    stream and the other units of the layer are cut. What goes past them is measured in a run in which they are cut.
    Every rule's backward pass is linear in what arrives, so the rows sum to the relevance of the tokens.

    Args:
        model: the model.
        questions: one question.
        recipe: the rules.
        kind: ``"heads"`` or ``"neurons"``.
        layer: its number, or the path of the units' module.
        units: which of them; or how many, the most relevant.

    Raises:
        MethodError: there is no such layer or unit.
    """
    place = place_in(places_of(model, questions, kind, recipe), layer)
    _refuse_no_tokens(model, questions, [place])
    others = () if layer == place.path else unseen(model.module, [place], beside=True)
    with _kept(model, questions, recipe, Reading([place], others)) as (ran, read):
        sources = [source.value for source in ran.trace.sources]
        tokens = _of_tokens(ran, [ran.trace.source_gradient(source) for source in ran.trace.sources])
        value = read.value(place)
        arrived = ran.trace.gradient_of(value).to(value.dtype)
        if isinstance(units, int):
            spots = spots_of(ran.batch, 0, place, value.shape)
            sizes = place.of(spots.of(ran.trace.relevance_of(value))).sum(0).abs()
            units = sizes.topk(min(units, place.width)).indices.tolist()
        masks = torch.zeros(len(units) + 1, value.shape[-1], dtype=value.dtype, device=value.device)
        for i, unit in enumerate(units):
            masks[i, list(place.features(unit))] = 1
        if len(set(units)) < len(units):
            raise MethodError(f"a unit stands twice in {list(units)}; name each once")
        masks[-1] = 1 - masks[:-1].sum(0)
        rows = []
        for mask in masks:
            found = ran.trace.gradients(value, sources, arrived * mask, keep=True)
            gradients = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]
            rows.append(_of_tokens(ran, gradients))
        answers = ran.answers.detached()
    with _kept(model, questions.with_targets(answers.targets), recipe, _Cut([place])) as (ran, _):
        rows.append(_of_tokens(ran, [ran.trace.source_gradient(source) for source in ran.trace.sources]))
    one = kind.removesuffix("s")
    labels = [*(f"{one} {unit}" for unit in units), f"all other {kind}", f"past the {kind}"]
    return answers, tokens, Part("paths", torch.stack(rows), ("unit", "token"), {"unit": labels})


class _Cut(Reading):
    """The units of a place as a leaf: nothing goes on below them."""

    writes = True

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """A leaf in the place of the value."""
        before = len(self.leaves())
        super().at(path, side, call, value)
        if len(self.leaves()) == before:
            return None
        (place,) = self.places
        leaf = value.detach().requires_grad_()
        self.keep(place, leaf)
        return leaf


_Tap = TypeVar("_Tap", bound=Reading)


@contextmanager
def _kept(model: BoundModel, questions: Questions, recipe: Recipe, tap: _Tap) -> Iterator[tuple[Pass, _Tap]]:
    """One question explained, its graph kept."""
    with model.traced(questions, recipe, taps=lambda _: [tap]) as ran:
        ran.trace.explain(ran.answers.values, ran.answers.logits, keep=True)
        yield ran, tap


def _of_tokens(ran: Pass, gradients: Sequence[Tensor]) -> Tensor:
    """``[T]``: the relevance of a row's tokens, from the gradients of the sources."""
    of = {id(source): gradient for source, gradient in zip(ran.trace.sources, gradients, strict=True)}
    sums = [
        sum((_times(source.value, of[id(source)]) for source in rest), _times(first.value, of[id(first)]))
        for first, *rest in ran.sources
    ]
    return ran.batch.of_row(0, [each.cpu() for each in ran.by_token(sums)]).clone()


def _times(value: Tensor, gradient: Tensor) -> Tensor:
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return (value.detach().to(gradient.dtype) * gradient).sum(-1)
