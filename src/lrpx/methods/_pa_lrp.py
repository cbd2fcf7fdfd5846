"""PA-LRP: relevance of tokens and of their positions (Bakish et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lrpx import recipes
from lrpx.errors import MethodError
from lrpx.methods._backward import Backward, of_tokens
from lrpx.methods._contract import register
from lrpx.parts import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lrpx._passes import Pass
    from lrpx.engine import Source

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

    Args:
        name: how results call it.
        recipe: the rules; they give positions relevance.
        label: how tables spell it.
        of: what a token's relevance is: its own (``"tokens"``), its position's (``"positions"``), or ``"both"``.
        sinks: how layers are put together, one of :data:`SINKS`.

    Raises:
        MethodError: another ``of`` or ``sinks``, or a recipe for which positions are constants.
    """

    recipe: recipes.Recipe = recipes.PA_LRP
    of: Literal["both", "tokens", "positions"] = "both"
    sinks: Literal["positive", "absolute", "single"] = "positive"

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

    def describe(self) -> str:
        """The recipe, what is counted, and how layers are put together."""
        return f"{super().describe()}; of={self.of} sinks={self.sinks}"

    def read(self, ran: Pass, chosen: Sequence[int]) -> tuple[list[Tensor], dict[str, list[Part]]]:
        """See :meth:`Backward.read <lrpx.methods._backward.Backward.read>`.

        Raises:
            MethodError: the model has no positions.
        """
        own = of_tokens(ran, chosen, self.reduce)
        positions = _of_positions(ran, chosen)
        if not ran.batch.arguments:
            return own, {"positions": positions}
        kept = [SINKS[self.sinks](part.values).to(mine.dtype) for part, mine in zip(positions, own, strict=True)]
        if self.of == "both":
            own = [mine + each for mine, each in zip(own, kept, strict=True)]
        return (kept if self.of == "positions" else own), {"positions": positions}


def _of_positions(ran: Pass, chosen: Sequence[int]) -> list[Part]:
    """For each of the chosen questions, the relevance of positions by layer and token, or place.

    Raises:
        MethodError: there are no positions.
    """
    kept = ran.trace.positions()
    layers = list(dict.fromkeys(each.layer for each in kept))
    if not layers:
        raise MethodError("no positions were met in this model, which may have none; use attnlrp")
    labels = {"layer": layers}
    if not ran.batch.arguments:  # an image: places are patches
        rows = [[torch.stack([e.relevance for e in kept if e.layer == layer]).sum(0) for layer in layers]]
        same = len({each.shape for each in rows[0]}) == 1
        values = torch.stack([each if same else each.sum(1) for each in rows[0]], 1).float()
        at = [ran.questions.asked[i].row for i in chosen]
        return [Part("positions", values[row], ("layer", "place")[: values.ndim - 1], labels) for row in at]
    found: dict[str, list[Tensor]] = {
        layer: [torch.zeros(part.value.shape[:-1], dtype=torch.float64) for part, *_ in ran.sources] for layer in layers
    }
    for layer, source, relevance in kept:
        found[layer][_number(ran, source)] += relevance.cpu()
    by_layer = [ran.by_token(found[layer]) for layer in layers]
    rows_of = [ran.questions.asked[i].row for i in chosen]
    dtype = torch.promote_types(ran.sources[0][0].value.dtype, torch.float32)
    return [
        Part("positions", torch.stack([ran.batch.of_row(row, each) for each in by_layer]).to(dtype), AXES, labels)
        for row in rows_of
    ]


AXES = ("layer", "token")


def _number(ran: Pass, source: Any) -> int:
    """Of which of the pass's sources the tokens of a source are: the newest before it with as many of them."""
    order = [id(each) for each in ran.trace.sources]
    starts = [order.index(id(part)) for part, *_ in ran.sources]
    length, at = source.ids.shape[-1], order.index(id(source))
    return max(
        number
        for number, (start, (part, *_)) in enumerate(zip(starts, ran.sources, strict=True))
        if start <= at and _length(part) == length
    )


def _length(source: Source) -> int:
    assert source.ids is not None
    return int(source.ids.shape[-1])


register(PositionAware("pa-lrp", label="PA-LRP"))
register(PositionAware("pa-lrp-absolute", label="PA-LRP, absolute", sinks="absolute"))
register(PositionAware("pa-lrp-single-sink", label="PA-LRP, one sink", sinks="single"))
register(PositionAware("pa-lrp-positions", label="PA-LRP, positions only", of="positions"))
register(PositionAware("pa-lrp-tokens", label="PA-LRP, tokens only", of="tokens"))
