"""Where the tokens of a call of a model stand in their texts, as far as its arguments tell."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx._encoded import EMBEDDED
from lrpx._modules import base_model
from lrpx._padding import without_padding
from lrpx.engine._observer import first_tensor
from lrpx.engine._running import CACHES

if TYPE_CHECKING:
    from torch.nn import Module

OF_CACHES = ("past", "cache", "kv", "mems", "state")
"""What is in the names of arguments that hold what an earlier call has computed."""
OF_STARTS = ("pos", "start", "offset", "seen")
"""What is in the names of arguments that say where in its text a call begins."""


def by_name(module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by their names; None where those of some tensors are not known. A first one that has no
    name is what the module is about."""
    if not args:
        return dict(kwargs)
    names = _positional(module) or _positional(base_model(module))
    if any(isinstance(each, Tensor) for each in args[max(len(names), 1) :]):
        return None
    return {**dict(zip(names or [""], args, strict=False)), **kwargs}


def _positional(module: Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def positions_of(kwargs: Mapping[str, Any]) -> Tensor | None:
    """``[B, W]``: where the tokens of a call with such arguments stand in their texts, from 0; -1 for padding. None
    where nobody knows."""
    given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    if given is None:
        given = next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
    if not isinstance(given, Tensor) or given.ndim not in (2, 3):  # as of an image
        return None
    if given.ndim == 3 and not given.is_floating_point():  # the choices of several questions
        given = given.flatten(0, 1)
    batch, wide = given.shape[:2]
    seen = _seen(kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 3 and not mask.is_floating_point():
        mask = mask.flatten(0, 1)
    if seen is None or (mask is not None and not (isinstance(mask, Tensor) and mask.shape == (batch, seen + wide))):
        return None
    at = (seen + torch.arange(wide, device=given.device)).expand(batch, wide)
    if mask is None:
        return at
    real = without_padding(mask)  # nor is a token that is hidden inside a text
    before = real.cumsum(1) > 0
    padding = ~(before & (real.flip(1).cumsum(1) > 0).flip(1))[:, seen:]
    return torch.where(padding, -1, at - (~before).sum(1, keepdim=True))


def has_others(given: Mapping[str, Any]) -> bool:
    """Whether a call is given numbers beside tokens, as an image's, of which the model may make places of their own."""
    if all(given.get(name) is None for name in ("input_ids", "inputs_embeds")):
        return False
    others = [value for name, value in given.items() if name not in (*CACHES, *EMBEDDED) and "mask" not in name]
    return any(first_tensor(value) is not None for value in others)


def may_go_on(kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of a call of a module of one's own have a cache that does not count its tokens, or say that
    its tokens are not the first of a text."""
    for name, value in kwargs.items():
        if value is None or isinstance(value, (bool, str)) or name in ("past_key_values", "cache_params"):
            continue
        if "hidden" in name:  # what another part of the model has made
            continue
        if any(word in name.lower() for word in OF_CACHES) and not (isinstance(value, Sized) and not len(value)):
            return True
        if any(word in name.lower() for word in OF_STARTS) and "layer" not in name and _least(value) > 0:
            return True
    return False


def pads_before(kwargs: Mapping[str, Any], positions: Tensor) -> bool:
    """Whether a mask that has a name of its own hides the first token of a text: of ``"padding_mask"`` 1 is padding, of
    any other 0."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.shape == positions.shape and "mask" in name and name != "attention_mask":
            hidden = value != 0 if "pad" in name else value == 0
            if not value.is_floating_point() and bool((hidden[:, 0] & ~hidden.all(1)).any()):
                return True
    return False


def begins_anew(kwargs: Mapping[str, Any], positions: Tensor) -> bool:
    """Whether ``position_ids`` go back inside of a row, as of several texts that are laid behind one another."""
    given = kwargs.get("position_ids")
    if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != positions.shape[1]:
        return False
    real = positions >= 0
    return bool(((given[:, 1:] < given[:, :-1]) & real[:, 1:] & real[:, :-1]).any())


def _least(value: Any) -> int:
    """The least of whole numbers; 0 of anything else."""
    if isinstance(value, Tensor):
        return 0 if value.is_floating_point() or not value.numel() else int(value.min())
    return value if isinstance(value, int) else 0


def _seen(kwargs: Mapping[str, Any]) -> int | None:
    """How many tokens a cache holds; None for one that does not tell."""
    cache = next((kwargs[name] for name in ("past_key_values", "cache_params") if kwargs.get(name) is not None), None)
    if cache is None:
        return 0
    if not hasattr(cache, "get_seq_length"):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # it holds the states of recurrent layers alone
        return None
