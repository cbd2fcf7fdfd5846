"""PA-LRP: relevance of tokens and of their positions (Bakish et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lrpx import recipes
from lrpx.engine._positions import Positions
from lrpx.errors import MethodError
from lrpx.methods._backward import Backward, of_tokens
from lrpx.methods._contract import register
from lrpx.parts import Part

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from lrpx._passes import Pass
    from lrpx.engine import Source
    from lrpx.engine._sinks import Kept

SINKS = {
    "positive": lambda layers: layers.clamp(min=0).sum(0),
    "absolute": lambda layers: layers.abs().sum(0),
    "single": lambda layers: layers.sum(0),
}
"""How the positions' relevance in each layer ``[S, T]`` becomes one number a token: the sum of what is positive (the
paper's Eq. 11), of absolute values (its published code), or of all, as with one sink for all layers (its Table 2)."""


@dataclass(frozen=True)
class PositionAware(Backward):
    """AttnLRP whose inputs are pairs of a token and its position: what a position has where a layer adds, multiplies or
    biases by it is kept in a sink of that layer, and a token's relevance is its own and that of its sinks.

    The part ``"positions"`` (layer, token) holds the sinks as they are, signed; the layer ``"input"`` is what is added
    to the embeddings. A relative bias belongs to the position that is attended to, the key's.

    With ``by_head`` the part ``"positions by head"`` (layer, head, token) has what rotary angles and relative biases
    have in each head; its sum over the heads is ``"positions"``. Where queries and keys have other numbers of heads, or
    layers have, heads are labelled ``"2 of 9"``, and what is met outside of heads ``"no head"``.

    Positions of an image (or a sound) are those of its places, class token and all, and stand in that part alone: the
    relevance of its patches and pixels is their own, whatever ``sinks`` is, and ``of="positions"`` is refused.

    Args:
        name: how results call it.
        recipe: the rules; they give positions relevance.
        label: how tables spell it.
        of: what a token's relevance is: its own (``"tokens"``), its position's (``"positions"``), or ``"both"``.
        sinks: how layers are put together, one of :data:`SINKS`.
        by_head: whether heads are kept apart too, which takes as many times the memory where heads share angles.

    Raises:
        MethodError: another ``of`` or ``sinks``, or a recipe for which positions are constants.
    """

    recipe: recipes.Recipe = recipes.PA_LRP
    of: Literal["both", "tokens", "positions"] = "both"
    sinks: Literal["positive", "absolute", "single"] = "positive"
    by_head: bool = False

    def __post_init__(self) -> None:
        if self.of not in ("both", "tokens", "positions"):
            raise MethodError(f"of is {self.of!r}; pass 'both', 'tokens' or 'positions'")
        if self.sinks not in SINKS:
            raise MethodError(f"sinks is {self.sinks!r}; pass {', '.join(map(repr, SINKS))}")
        if not self.recipe.has_positions():
            raise MethodError(f"positions are constants under {self.recipe.name}; use lrpx.PA_LRP")

    @property
    def has_ledger(self) -> bool:
        """Only where no sign is lost, so that a token's relevance is a part of the value."""
        return self.sinks == "single" or self.of == "tokens"

    @property
    def of_embeddings(self) -> bool:
        """Not where a token's relevance is its position's too."""
        return self.of == "tokens"

    def describe(self) -> str:
        """The recipe, what is counted, and how layers are put together."""
        return f"{super().describe()}; of={self.of} sinks={self.sinks}{' by_head' * self.by_head}"

    def pass_key(self) -> Hashable:
        """Methods of one recipe differ in what they make of the sinks alone, but for heads."""
        return super().pass_key(), self.by_head

    def run_with(self) -> dict[str, Any]:
        """See :meth:`Backward.run_with <lrpx.methods._backward.Backward.run_with>`."""
        return {"by_head": self.by_head}

    def read(self, ran: Pass, chosen: Sequence[int]) -> tuple[list[Tensor], dict[str, list[Part]]]:
        """See :meth:`Backward.read <lrpx.methods._backward.Backward.read>`.

        Raises:
            MethodError: the model has no positions, or meets none in heads that are to be told apart; positions alone
                are asked for, of an image; or nothing tells which positions are of one layer.
        """
        own = of_tokens(ran, chosen, self.reduce)
        positions = _of_positions(ran, chosen)
        parts = {"positions": positions}
        if self.by_head:
            parts["positions by head"] = _by_head(ran, chosen)
        if not ran.batch.arguments:
            if self.of != "positions":
                return own, parts
            raise MethodError(
                f"{self.name} is of the positions of tokens, and those here are of places, which no patch, pixel or "
                'sample has; use pa-lrp, whose part "positions" has them'
            )
        tap = ran.trace.tap(Positions)
        if self.of != "tokens" and self.sinks != "single" and tap is not None and tap.has_unknown_layers():
            raise MethodError(
                f"{self.name} has a sink for each layer, and this model meets positions outside of every list of "
                "modules, where nothing tells a layer from the next; keep its layers in a torch.nn.ModuleList and call "
                "them, or use pa-lrp-single-sink"
            )
        kept = [SINKS[self.sinks](part.values).to(mine.dtype) for part, mine in zip(positions, own, strict=True)]
        if self.of == "both":
            own = [mine + each for mine, each in zip(own, kept, strict=True)]
        return (kept if self.of == "positions" else own), parts


def _of_positions(ran: Pass, chosen: Sequence[int]) -> list[Part]:
    """For each of the chosen questions, the relevance of positions by layer and token, or place.

    Raises:
        MethodError: there are no positions.
    """
    kept = ran.trace.positions()
    layers = list(dict.fromkeys(each.layer for each in kept))
    if not layers:
        raise MethodError("no positions were met in this model, which may have none; use attnlrp")
    values = [_together(ran, [each for each in kept if each.layer == layer]) for layer in layers]
    return _parts(ran, chosen, "positions", values, ("layer",), {"layer": layers})


def _by_head(ran: Pass, chosen: Sequence[int]) -> list[Part]:
    """The same by layer, head and token, or place.

    Raises:
        MethodError: nothing is met in heads.
    """
    kept = ran.trace.positions(by_head=True)
    layers = list(dict.fromkeys(each.layer for each in kept))
    counts = sorted({each.heads or 0 for each in kept})
    if counts == [0]:
        raise MethodError("the positions of this model are met outside of its heads; leave by_head out")
    labels = {"layer": layers}
    if len(counts) > 1:
        every = [(head, count) for count in counts for head in range(count or 1)]
        labels["head"] = [f"{head} of {count}" if count else "no head" for head, count in every]
    values = []
    for layer in layers:
        here = [each for each in kept if each.layer == layer]
        nothing = [each._replace(relevance=torch.zeros_like(each.relevance[:, 0])) for each in here]
        for count in counts:
            mine = [each for each in here if (each.heads or 0) == count]
            for head in range(count or 1):
                values.append(_together(ran, [e._replace(relevance=e.relevance[:, head]) for e in mine] or nothing))
    return _parts(ran, chosen, "positions by head", values, ("layer", "head"), labels)


def _together(ran: Pass, kept: Sequence[Kept]) -> Tensor | list[Tensor]:
    """The relevance of one layer's positions: ``[B, n]`` of places, or ``[B, T]`` of the tokens of each source.

    Raises:
        MethodError: they are positions of an image or a sound beside the tokens.
    """
    if not ran.batch.arguments:  # an image: places are patches
        return torch.stack([each.relevance.cpu() for each in kept]).sum(0)
    found = [torch.zeros(part.value.shape[:-1], dtype=torch.float64) for part, *_ in ran.sources]
    tap = ran.trace.tap(Positions)
    for each in kept:
        if each.source is None or each.source.ids is None:
            raise MethodError(
                f"the positions in {each.layer} are those of an image or a sound beside the tokens, which have no part "
                "of their own; use attnlrp or lrp"
            )
        is_turned = tap is not None and tap.is_turned(each.source)
        found[_number(ran, each.source)] += (each.relevance.T if is_turned else each.relevance).cpu()
    return found


def _parts(
    ran: Pass,
    chosen: Sequence[int],
    name: str,
    values: Sequence[Tensor | list[Tensor]],
    axes: tuple[str, ...],
    labels: dict[str, list[str]],
) -> list[Part]:
    """What was found of each place along ``axes``, the last the fastest, as a part of each of the chosen questions; of
    images whose layers have other numbers of places, summed over these."""
    rows = [ran.questions.asked[i].row for i in chosen]
    sizes = [len(labels["layer"]), *([-1] if len(axes) > 1 else [])]
    if not ran.batch.arguments:
        images = [each for each in values if isinstance(each, torch.Tensor)]
        same = len({each.shape for each in images}) == 1
        stacked = torch.stack([each if same else each.sum(1) for each in images], 1).float()
        last = ("place",) if same else ()
        return [Part(name, _unflattened(stacked[row], sizes), (*axes, *last), labels) for row in rows]
    dtype = torch.promote_types(ran.sources[0][0].value.dtype, torch.float32)
    by_token = [ran.by_token(each) for each in values if isinstance(each, list)]
    return [
        Part(
            name,
            _unflattened(torch.stack([ran.batch.of_row(row, each) for each in by_token]).to(dtype), sizes),
            (*axes, "token"),
            labels,
        )
        for row in rows
    ]


def _unflattened(values: Tensor, sizes: Sequence[int]) -> Tensor:
    return values.reshape(*sizes, *values.shape[1:])


def _number(ran: Pass, source: Any) -> int:
    """Of which of the pass's sources the tokens of a source are: the newest before it with as many of them, or the
    oldest behind it where there is none, as where types of tokens are looked up before these."""
    order = [id(each) for each in ran.trace.sources]
    starts = [order.index(id(part)) for part, *_ in ran.sources]
    length, at = source.ids.shape[-1], order.index(id(source))
    fitting = [number for number, (part, *_) in enumerate(ran.sources) if _length(part) == length]
    return max((number for number in fitting if starts[number] <= at), default=fitting[0])


def _length(source: Source) -> int:
    assert source.ids is not None
    return int(source.ids.shape[-1])


register(PositionAware("pa-lrp", label="PA-LRP"))
register(PositionAware("pa-lrp-absolute", label="PA-LRP, absolute", sinks="absolute"))
register(PositionAware("pa-lrp-single-sink", label="PA-LRP, one sink", sinks="single"))
register(PositionAware("pa-lrp-positions", label="PA-LRP, positions only", of="positions"))
register(PositionAware("pa-lrp-tokens", label="PA-LRP, tokens only", of="tokens"))
