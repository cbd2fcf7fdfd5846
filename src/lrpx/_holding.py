"""Places that tokens keep while a mask hides others, where the model itself would count them by the mask."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx._hooks import hooks
from lrpx._modules import argument_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.nn import Module

PLACES = "position_ids"
"""How transformers calls the argument in which places are handed on."""


@contextmanager
def holding(model: Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """In the block, every module is given the places that it has for the whole input, which is run once for that. A
    module that is given none has those of the tokens that the first one inside it has, so that it counts none anew
    (Qwen-VL's count fails where the mask has a hole).

    Args:
        model: what will run.
        inputs: the whole input, of rows ``[B, T]``, with nothing hidden.
    """
    takers = [each for each in model.modules() if PLACES in argument_names(each.forward)]
    if not takers:
        yield
        return
    given: dict[Module, list[Any]] = {each: [] for each in takers}
    open_calls: list[tuple[Module, int]] = []
    shape = inputs["input_ids"].shape

    def see(module: Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        places = _argument(module, args, named)
        given[module].append(places)
        open_calls.append((module, len(given[module]) - 1))
        if isinstance(places, Tensor) and places.shape[-2:] in (shape, (1, shape[1])):
            for outer, call in open_calls:
                if given[outer][call] is None:
                    given[outer][call] = places

    def leave(module: Module, args: tuple[Any, ...], output: Any) -> None:
        open_calls.pop()

    with torch.no_grad(), hooks() as on:
        for each in takers:
            on.before(each, see, with_kwargs=True)
            on.after(each, leave)
        model(**inputs)
    with hooks() as on:
        for each, places in given.items():
            on.before(each, _held(each, places), with_kwargs=True)
        yield


_NO_CALL = object()
"""What stands for the places of a call that there was none of."""


def _held(module: Module, places: list[Any]) -> Callable[..., Any]:
    """A hook that gives a module the places of one call after another; none where it had none, for it may count others
    than a module around it is given (LayoutLMv3's embeddings from 2, its biases from 0)."""
    left = iter(places)
    where = argument_names(module.forward).index(PLACES)

    def hook(_: Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        held = next(left, _NO_CALL)
        if held is _NO_CALL:
            return args, named
        if where < len(args):
            return (*args[:where], held, *args[where + 1 :]), named
        return args, {**named, PLACES: held}

    return hook


def _argument(module: Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The places that a call is given, by name or not."""
    where = argument_names(module.forward).index(PLACES)
    return args[where] if where < len(args) else named.get(PLACES)
