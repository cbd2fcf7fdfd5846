"""The kinds of units, and a place where units of one kind are read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from lrpx._modules import layer_of, named_modules
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module

    from lrpx.engine._places import Side


Kind = Literal["neurons", "heads", "queries", "keys", "values", "attention", "mlp", "residual"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""``"neurons"``: the input of an MLP's second matrix, also of a gated one, or of a state-space mixer's last;
``"heads"``: what each attention head has read, before the output projection; ``"queries"``, ``"keys"``, ``"values"``:
the features of what attention reads with, and reads; ``"attention"``, ``"mlp"``: what each branch gives to the residual
stream; ``"residual"``: the stream behind each layer."""
READS: tuple[Kind, ...] = ("queries", "keys", "values")
"""Of these, what attention reads with, and what it reads; in the order in which it is given them."""
TITLES: dict[Kind, str] = {
    **{kind: kind for kind in KINDS},
    "attention": "attention branches",
    "mlp": "MLPs",
    "residual": "layers",
}
"""How messages and tables call them."""


@dataclass(frozen=True)
class Place:
    """Where units of one kind can be read and written: the input or output of a module of the model, ``[B, T, n]``.

    Unit ``i`` is ``size`` features of the ``n``, one after another: ``columns[i * size : (i + 1) * size]``. A
    module that is called several times in a pass, as a layer that is run again and again, has a place for each call.

    Args:
        layer: the number of the layer, from 0; where a layer is run several times, of the run.
        path: the module.
        side: ``"input"`` or ``"output"``.
        kind: what they are.
        width: how many units there are.
        size: of how many features each is: 1 for a neuron, the width of a head for a head.
        columns: which of the module's features they are; None for all of them in order.
        call: which call of the module, from 0, in one forward pass.
        calls: how many calls there are.
        stack: the list that the layer is in.
        heads: of queries, keys and values: of how many heads they are, as many of one head after another; 0 where they
            stand otherwise.
        turned: whether the tokens come before the rows there, as ``[T, B, n]`` or ``[T·B, n]``.
        behind: of what a branch gives, where it enters the stream when a norm stands in between (Gemma, OLMo 2), or a
            factor that depends on the input (RWKV).
        is_normed: whether a norm stands in between that no module gives; what is behind it is at no place then.
        is_gated: whether such a factor does.
        apart: how many places there were, where these were not as many as the tokens that the model was run on; else 0.
    """

    layer: int
    path: str
    side: Side
    kind: Kind
    width: int
    size: int = 1
    columns: tuple[int, ...] | None = None
    call: int = 0
    calls: int = 1
    stack: str = field(default="", compare=False)
    heads: int = field(default=0, compare=False)
    turned: bool = field(default=False, compare=False)
    behind: Place | None = field(default=None, compare=False, repr=False)
    is_normed: bool = field(default=False, compare=False, repr=False)
    is_gated: bool = field(default=False, compare=False, repr=False)
    apart: int = field(default=0, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The module's path; of one of several calls with its number, from 0.

        >>> Place(0, "layers.0.mlp", "input", "neurons", 8).name
        'layers.0.mlp'
        >>> Place(2, "layer.mlp", "input", "neurons", 8, call=2, calls=12).name
        'layer.mlp#2'
        """
        return called(self.path, self.call if self.calls > 1 else None)

    def of(self, value: Tensor) -> Tensor:
        """``[…, width]``, each a sum over its features, or the feature itself; from ``[…, n]``."""
        if self.columns is not None:
            value = value[..., torch.tensor(self.columns, device=value.device)]
        return value if self.size == 1 else value.reshape(*value.shape[:-1], self.width, self.size).sum(-1)

    def features(self, unit: int) -> tuple[int, ...]:
        """The module's features that a unit is.

        Raises:
            MethodError: there is no such unit.
        """
        if not 0 <= unit < self.width:
            raise MethodError(f"{self.name} has {self.width} {self.kind}; {unit} is none of them, count from 0")
        chosen = range(unit * self.size, (unit + 1) * self.size)
        return tuple(chosen) if self.columns is None else tuple(self.columns[i] for i in chosen)


def called(path: str, call: int | None) -> str:
    """How a call of a module is named; None stands for every call, or the only one."""
    return path if call is None else f"{path}#{call}"


def split_name(name: str) -> tuple[str, int | None]:
    """A module's path and which of its calls is meant.

    >>> split_name("layer.mlp#2"), split_name("layer.mlp")
    (('layer.mlp', 2), ('layer.mlp', None))
    """
    path, _, call = name.rpartition("#")
    return (path, int(call)) if path and call.isdecimal() else (name, None)


def place_in(found: Sequence[Place], layer: int | str) -> Place:
    """The place of a layer's units, by its number or the path of a module.

    Raises:
        MethodError: there is none, or there are several.
    """
    if isinstance(layer, str):
        path, call = split_name(layer)
        inside = [place for place in found if place.path == path or place.path.startswith(f"{path}.")]
        fitting = [place for place in inside if call in (None, place.call)]
    else:
        fitting = [place for place in found if place.layer == layer]
    kind = found[0].kind
    if not fitting:
        numbers = sorted({place.layer for place in found})
        raise MethodError(f"there are no {kind} in layer {layer!r}; there are in {numbers[0]} to {numbers[-1]}")
    if len(fitting) > 1:
        told = ", ".join(place.name for place in fitting)
        raise MethodError(f"layer {layer!r} has {kind} in {told}; pass the path of one of them")
    return fitting[0]


def own_paths(model: Module) -> dict[str, str]:
    """Of each path in a model the first one of the same module, which stands for it."""
    first: dict[Module, str] = {}
    return {path: first.setdefault(module, path) for path, module in named_modules(model)}


def stack_of(path: str) -> str:
    """The list that a module's layer is in.

    >>> stack_of("decoder.layers.3.mlp")
    'decoder.layers'
    """
    return _layer(path).rpartition(".")[0]


def _layer(path: str) -> str:
    layer = layer_of(path)
    return path if layer is None else layer.path


def is_in(path: str, holder: str) -> bool:
    """Whether a module is another, or is in it."""
    return f"{path}.".startswith(f"{holder}.")
