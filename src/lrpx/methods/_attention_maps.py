"""What methods of attention weights have in common: the maps of each question, cut to its tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lrpx import rules, tasks
from lrpx._modules import layer_of, layers, named_modules
from lrpx.engine._attentions import Attentions
from lrpx.errors import MethodError
from lrpx.methods._contract import Found, Method
from lrpx.methods._refusals import IMAGES, SERVED, refuse_ledger, refuse_no_places, refuse_twice_given
from lrpx.parts import Part
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from lrpx._batching import Batch
    from lrpx._images import Patches
    from lrpx._passes import Pass
    from lrpx._patches import Places
    from lrpx.engine._attentions import Attended, Kind
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.tasks import Task


@dataclass(frozen=True, eq=False)
class Map:
    """The attention weights of one layer for one input.

    Args:
        kind: ``"self"`` in a model of one stream; else the ``"encoder"``'s, the ``"decoder"``'s, or ``"cross"``.
        weights: ``[H, Q, K]``, 0 where a mask forbids.
        gradient: ``[H, Q, K]`` of the explained value; of no meaning where a weight is 0.
    """

    kind: Kind
    weights: Tensor
    gradient: Tensor


@dataclass(frozen=True, eq=False)
class Maps:
    """All attention weights for one question, in the order of the forward pass.

    Args:
        layers: the weights.
        lengths: how many tokens each segment has.
        read: ``[R]``, the positions in the last segment that the explained value is read from.
    """

    layers: tuple[Map, ...]
    lengths: tuple[int, ...]
    read: Tensor


class OfAttention(Method):
    """A method that is a function of attention weights and their gradients.

    The rules are none: one forward pass, and a backward pass for each question of a row.
    """

    tasks: ClassVar[frozenset[Task]] = SERVED | IMAGES

    @property
    def has_ledger(self) -> bool:
        """No: what is made of attention weights need not sum to the value."""
        return False

    @abstractmethod
    def score(self, maps: Maps) -> Tensor:
        """``[T]``: the relevance of the tokens of all segments."""

    def refuse(self) -> None:
        """Refuse fields of the method that are none.

        Raises:
            MethodError: names the field.
        """

    def pass_key(self) -> Hashable:
        """Methods of one class share the pass: they differ in what they make of the maps."""
        return "attention maps"

    def check(self, model: BoundModel) -> None:
        """Refuse a model whose attention is not all there is; see :meth:`Method.check`."""
        super().check(model)
        refuse_twice_given(self, model)
        self.refuse()

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger is asked for, or some layer has no softmax attention that can be read.
        """
        return self.together([self], model, questions, ledger=ledger)[0]

    def together(
        self, methods: Sequence[OfAttention], model: BoundModel, questions: Questions, *, ledger: bool = False
    ) -> list[Found]:
        """What several methods make of the same maps; see :meth:`attribute`."""
        for method in methods:
            method.check(model)
            refuse_ledger(method, ledger)
        found: list[list[Tensor]] = [[torch.empty(0)] * len(questions) for _ in methods]
        pictured = [refuse_no_places(self, model, row) for row in questions.rows] if model.task in IMAGES else []
        tokens = {places.count for _, places in pictured}
        with model.traced(
            questions,
            GRADIENT,
            plain=True,
            taps=lambda batch: [attentions_of(model, batch, tuple(tokens))],
        ) as ran:
            tap = ran.trace.tap(Attentions)
            assert tap is not None
            for chosen in ran.explained():
                tap.check_beside(ran.trace.gradient_of)
                _refuse_others(model, tap.attended)
                _refuse_branches(tap.attended)
                _refuse_taken_off(tap.attended, ran.trace.gradient_of)
                for i in chosen:
                    maps = _maps(ran, tap.attended, i, tuple(tokens))
                    for method, mine in zip(methods, found, strict=True):
                        mine[i] = method.score(maps).cpu()
        refuse_mixers(model, questions)
        answers = ran.answers.detached()
        if not pictured:
            return [Found(answers, tuple(mine)) for mine in found]
        grids = [pictured[each.row] for each in questions.asked]
        return [
            Found(answers, (torch.empty(0),) * len(mine), of_places(list(zip(mine, grids, strict=True))))
            for mine in found
        ]


def attentions_of(
    model: BoundModel, batch: Batch, tokens: tuple[int, ...] = (), *, is_apart: bool = False
) -> Attentions:
    """What finds the attention over the tokens of a batch in a run with a graph; ``tokens``: how many a model makes of
    an image; ``is_apart``: see :class:`Attentions`."""
    is_beside = any(row.segments and row.arguments for row in batch.rows)
    embeddings = tasks.source_paths(model.module, model.task) if is_beside else ()
    return Attentions(len(batch.rows), tokens or batch.widths, embeddings=embeddings, is_apart=is_apart)


OPPOSITE = -0.9999
"""A cosine at or below this is that of a vector and its negative multiple, in half precision too."""
MANY = 40
"""So many numbers of two vectors do not all have opposite signs by chance."""
PLACES = replace(GRADIENT, name="places", norm=rules.constant)
"""Which place depends on which: also where a norm's input was changed in place since, as where a model adds to its
residual stream so."""


def refuse_mixers(model: BoundModel, questions: Questions, *, of_features: bool = False) -> None:
    """Refuse a model in which something else than attention mixes tokens before the last attention, or puts them into
    other places, in a pass of the longest row in which what attention gives is a constant; ``of_features``: only one in
    which features look at features.

    Raises:
        MethodError: says before which attention.
    """
    if model.task in IMAGES:
        return
    longest = max(range(len(questions)), key=lambda i: sum(questions.row_of(i).lengths))
    with model.traced(
        questions.alone([longest]), PLACES, taps=lambda batch: [attentions_of(model, batch, is_apart=True)]
    ) as ran:
        tap = ran.trace.tap(Attentions)
        assert tap is not None
        tap.check_features()
        if not of_features:
            tap.check_places()


def _refuse_others(model: BoundModel, attended: Sequence[Attended]) -> None:
    """Refuse a model with a layer whose attention was not found, beside others with one, or is the same whatever is
    read, as one of places alone, or takes one softmax off another."""
    alike = next((each.path for each in attended if not each.raw.requires_grad), None)
    if alike is not None:
        raise MethodError(
            f"the attention weights in {alike} do not depend on the input, or are computed where gradients are off, so "
            "nobody knows which layer comes before which; use attnlrp or lrp"
        )
    below = next((each.path for each in attended if bool((each.raw < 0).any())), None)
    if below is not None:
        raise MethodError(
            f"in {below} values are multiplied by numbers below 0, as by the difference of two softmaxes in a "
            "differential transformer, which are no shares of what a token reads; use attnlrp or lrp"
        )
    refuse_layers_without(model, attended)


def refuse_layers_without(model: BoundModel, attended: Sequence[Attended]) -> None:
    """Refuse a model with a layer whose attention was not found, beside others with one.

    Raises:
        MethodError: names the layer.
    """
    found = {layer.path for each in attended if (layer := layer_of(each.path)) is not None}
    lists = {path.rpartition(".")[0] for path in found}
    modules = dict(named_modules(model.module))
    seen = {modules[path] for path in found}  # a list may have one module several times
    for path in layers(model.paths):
        if path.rpartition(".")[0] in lists and modules[path] not in seen:
            raise MethodError(f"{path} has no softmax attention, as the layers of hybrid models; use attnlrp or lrp")


def of_places(found: Sequence[tuple[Tensor, tuple[Patches, Places]]]) -> dict[str, tuple[Part, ...]]:
    """The parts of questions about images, from the relevance of the model's tokens ``[T]``: the patches, and the
    learned tokens where there are any."""
    patches, learned = [], []
    for values, (grid, places) in found:
        end = places.first + len(grid)
        cut = values[places.first : end].reshape(grid.rows, grid.columns)
        patches.append(Part("patches", cut, ("row", "column")))
        learned.append(Part("class token", torch.cat([values[: places.first], values[end:]]), ("learned token",)))
    has_learned = any(len(part.values) for part in learned)
    return {"patches": tuple(patches)} | ({"class token": tuple(learned)} if has_learned else {})


def _by_layer(attended: Sequence[Attended]) -> list[tuple[Kind, list[Attended]]]:
    """The attention of each layer: one, or the heads that are modules of their own, of which none hangs on another."""
    found: list[tuple[Kind, list[Attended]]] = []
    for each in attended:
        is_beside = found and found[-1][0] == each.kind
        if is_beside and not any(_hangs_on(each, before) for before in found[-1][1]):
            found[-1][1].append(each)
        else:
            found.append((each.kind, [each]))
    return found


def _refuse_branches(attended: Sequence[Attended]) -> None:
    """Refuse a model whose layers are no chain, each upon the one before: as two encoders of one text.

    Raises:
        MethodError: names two layers.
    """
    last: dict[Kind, list[Attended]] = {}
    for kind, layer in _by_layer(attended):
        for before in last.get(kind, []):
            lost = next((each for each in layer if not _hangs_on(each, before)), None)
            if lost is not None:
                raise MethodError(
                    f"the attention in {lost.path} does not see what that in {before.path} gives, as where two "
                    "encoders read one text, so a product of their maps says nothing of the model; use attnlrp or lrp"
                )
        last[kind] = layer


def _refuse_taken_off(attended: Sequence[Attended], gradient_of: Callable[[Tensor], Tensor]) -> None:
    """Refuse a model in which what one softmax reads is taken off what another reads of the same values, as fused
    kernels have a differential transformer: the gradient at one is that at the other, times a number below 0 for each
    token, or for each feature.

    Raises:
        MethodError: names the attention.
    """
    for _, layer in _by_layer(attended):
        heads = [
            (each, each.by_head(gradient_of(given).permute(each.order or tuple(range(given.ndim)))))
            for each in layer
            if (given := each.given) is not None
        ]
        for (one, g), (other, h) in combinations_with_replacement(heads, 2):
            if g.shape[2:] != h.shape[2:] or g.shape[-1] == 1:
                continue
            cosines = torch.einsum("bhqd,bkqd->hkbq", _unit(g), _unit(h)).flatten(2)
            is_none = (g == 0).all(-1)[:, :, None] & (h == 0).all(-1)[:, None]
            is_off = (cosines < OPPOSITE) | is_none.permute(1, 2, 0, 3).flatten(2)
            is_opposite = is_off.all(-1) & (cosines < OPPOSITE).any(-1)
            signs, counts = (torch.einsum("bhqd,bkqd->hk", f(g), f(h)) for f in (torch.sign, _is_any))
            is_opposite |= (signs == -counts) & (counts >= MANY)
            for i, j in is_opposite.nonzero().tolist():
                if torch.equal(_read(one, i, g.shape[1]), _read(other, j, h.shape[1])):
                    raise MethodError(
                        f"in {one.path} what one softmax reads is taken off what another reads of the same values, as "
                        "in a differential transformer, so its weights are no shares of what a token reads; use "
                        "attnlrp or lrp"
                    )


def _is_any(gradient: Tensor) -> Tensor:
    return (gradient != 0).to(gradient.dtype)


def _unit(gradient: Tensor) -> Tensor:
    """``[B, H, Q, d]``, each row with the length 1, or 0; however small it is."""
    largest = gradient.abs().amax(-1, keepdim=True)
    return torch.nn.functional.normalize(gradient / largest.masked_fill(largest == 0, 1.0), dim=-1)


def _read(each: Attended, head: int, heads: int) -> Tensor:
    """The values that a head reads ``[B, K, d]``: its own, or its group's."""
    values = each.by_head(each.values)
    return values[:, head * values.shape[1] // heads]


def _hangs_on(later: Attended, earlier: Attended) -> bool:
    """Whether attention was computed from what other attention gave."""
    goal: Any = earlier.raw.grad_fn
    oldest = goal._sequence_nr()
    waiting: list[Any] = [each.grad_fn for each in (later.raw, later.values) if each.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is goal:
            return True
        new = {child for child, _ in node.next_functions if child is not None and child._sequence_nr() >= oldest} - seen
        seen |= new
        waiting += new
    return False


def _summed(layer: Sequence[Attended], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The weights and gradients of a layer's attention. Where one module has the same weights once more, for another
    half of the values, as DiffLlama has, they are the same heads', and their gradients are summed."""
    found: list[tuple[str, Tensor, Tensor]] = []
    for each, (weights, gradient) in zip(layer, pairs, strict=True):
        same = (i for i, (path, other, _) in enumerate(found) if path == each.path and torch.equal(other, weights))
        if (at := next(same, None)) is None:
            found.append((each.path, weights, gradient))
        else:
            found[at] = (each.path, weights, found[at][2] + gradient)
    return [(weights, gradient) for _, weights, gradient in found]


def _maps(ran: Pass, attended: Sequence[Attended], question: int, tokens: tuple[int, ...]) -> Maps:
    """The maps of one question, without the padding; ``tokens``: how many a model makes of an image."""
    asked = ran.questions.asked[question]
    row = ran.batch.rows[asked.row]
    lengths = tokens or row.lengths
    begins = [0] * len(tokens) if tokens else [int(start[asked.row]) for start in ran.batch.starts]
    spans = [slice(start, start + length) for start, length in zip(begins, lengths, strict=True)]
    found = []
    for kind, layer in _by_layer(attended):
        queries = spans[0] if kind in ("self", "encoder") else spans[1]
        keys = spans[1] if kind == "decoder" else spans[0]
        pairs = _summed(
            layer, [(each.by_head(each.raw), each.by_head(ran.trace.gradient_of(each.raw))) for each in layer]
        )
        weights, gradient = (
            torch.cat([each[asked.row][:, queries, keys] for each in values]) for values in zip(*pairs, strict=True)
        )
        found.append(Map(kind, weights, gradient))
    if asked.position is not None:
        return Maps(tuple(found), lengths, torch.tensor([asked.position], device=found[-1].weights.device))
    # the value is a function of the rows of the last layer's attention alone that it has a gradient at
    read = (found[-1].gradient.abs().amax((0, 2)) > 0).nonzero()[:, 0]
    if not len(read):
        raise MethodError("the explained value does not depend on the last attention; use attnlrp or lrp")
    return Maps(tuple(found), lengths, read)
