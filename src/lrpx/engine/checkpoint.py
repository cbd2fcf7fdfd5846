"""Gradient checkpointing of the model's layers: their inside is forgotten, and computed again in the backward pass."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lrpx.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch.nn import Module


def layers(paths: Iterable[str]) -> list[str]:
    """The paths of a model's layers: the elements of its outermost lists of modules.

    >>> layers(["", "model", "model.layers", "model.layers.0", "model.layers.0.experts.1", "model.layers.1", "head"])
    ['model.layers.0', 'model.layers.1']
    """
    return [path for path in paths if re.fullmatch(r"(?:.*\.)?\d+", path) and not re.search(r"(?:^|\.)\d+\.", path)]


class Layer:
    """One call of a layer. What autograd saves inside it is replaced by the call's number in the list of what the same
    call saves again when the backward pass first asks.

    Args:
        module: the layer.
        args: what it was called with.
        kwargs: the same, by name.
        again: a context in which the layer runs as it did, and nothing is recorded.
    """

    def __init__(
        self, module: Module, args: Any, kwargs: Any, again: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._again = again
        self._saved: list[Tensor] | None = None
        self._count = 0
        self.hooks = saved_tensors_hooks(self._forget, self._recall)

    def _forget(self, x: Tensor) -> tuple[int, torch.Size, torch.dtype]:
        self._count += 1
        return self._count - 1, x.shape, x.dtype

    def _recall(self, forgotten: tuple[int, torch.Size, torch.dtype]) -> Tensor:
        number, shape, dtype = forgotten
        if self._saved is None:
            self._saved = self._run_again()
        x = self._saved[number] if len(self._saved) == self._count else None
        if x is None or x.shape != shape or x.dtype != dtype:
            raise TraceError(
                f"{type(self._module).__name__} computes something else when it is run again, such as one with a cache "
                "or random numbers; explain without checkpoint=True"
            )
        return x

    def _run_again(self) -> list[Tensor]:
        saved: list[Tensor] = []

        def keep(x: Tensor) -> None:
            saved.append(x.detach())

        def never(_: None) -> Tensor:
            raise AssertionError("this graph has no backward pass")

        with self._again(), torch.enable_grad(), saved_tensors_hooks(keep, never):
            self._module(*_cut(self._args), **_cut(self._kwargs))
        return saved


def _cut(value: Any) -> Any:
    """The same arguments, cut off from the graph they came from."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(map(_cut, value))
    if type(value) is dict:
        return {key: _cut(each) for key, each in value.items()}
    return value
