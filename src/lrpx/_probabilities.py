"""Models that give probabilities where logits are explained are refused: of what ends in a softmax, a sigmoid or the
logarithm of one, relevance is another than of the logits before it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lrpx.engine import _nodes
from lrpx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

FUNCTIONS = frozenset(("Log", "LogSigmoid", "Softplus", "_Identity", _nodes.OWN))
"""Nodes of the graph that may have made the logarithm of a sigmoid, by themselves or under a rule."""


def refuse_probabilities(model: Module, logits: Tensor, dim: int) -> None:
    """Refuse a model that ends in a softmax, of which rules give other relevance than of the logits before it.

    Raises:
        ModelError: no logit is negative, and those along a dimension, of the tokens or classes, sum to one.
    """
    if logits.shape[dim] > 1 and logits.numel() and float(logits.min()) >= 0:
        sums = logits.double().sum(dim)
        # no more than a softmax may lose, for two or three logits sum to about 1 by chance too
        if bool(((sums - 1).abs() <= max(torch.finfo(logits.dtype).eps, 1e-6, 1e-8 * logits.shape[dim])).all()):
            raise ModelError(
                f"{type(model).__name__} gives probabilities, not logits: none is negative, they sum to 1, "
                "as after a softmax; pass the model without the softmax at its end, and ask for the target LogProb "
                "where you want to explain a probability"
            )


def refuse_sigmoids(model: Module, logits: Tensor, run: Callable[[], Tensor]) -> None:
    """Refuse a model that ends in a sigmoid, or the logarithm of one, whose relevance has the other sign than that
    of the logits before it: where these are negative, or positive. It runs once more to tell, where all that it
    gives is between 0 and 1, or not above 0: in another thread, where no recipe holds.

    Raises:
        ModelError: its output is that of a sigmoid, or its logarithm.
    """
    with torch._C.DisableTorchFunction():
        seen = logits.detach()
        is_log = bool((seen <= 0).all()) and _are_of_function(logits)
        if not (is_log or _are_probabilities(seen)):
            return

    def ends_in_one() -> bool:
        with torch.no_grad(), _Sigmoids() as sigmoids:
            found = run()
        return any(bool(torch.isin(found, each).all()) for each in sigmoids.given)

    with ThreadPoolExecutor(1) as thread:
        if thread.submit(ends_in_one).result():
            given, what = ("log-probabilities", "logarithm of a sigmoid") if is_log else ("probabilities", "sigmoid")
            raise ModelError(
                f"{type(model).__name__} gives {given}, not logits: it ends in a {what}; pass the model "
                f"without the {what} at its end"
            )


def _are_of_function(logits: Tensor) -> bool:
    """Whether it was no layer but a function that gave the logits, in whatever shape or selection."""
    node: Any = logits.grad_fn
    while node is not None and _nodes.kind(node) in _nodes.SHAPES | {"Index", "IndexSelect", "Select", "Slice"}:
        node = node.next_functions[0][0]
    return node is not None and _nodes.kind(node) in FUNCTIONS


def _are_probabilities(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


class _Sigmoids(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what the sigmoids in a block give, and the logarithms of sigmoids."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called, aten = func.overloadpacket, torch.ops.aten
        is_log = called in (aten.log, aten.log_) and any(bool(torch.isin(args[0], each).all()) for each in self.given)
        found = func(*args, **(kwargs or {}))
        if is_log or called in (aten.sigmoid, aten.sigmoid_):
            self.given.append(found.detach().clone())
        elif called == aten.softplus:  # of the negative
            self.given.append(-found.detach())
        elif called == aten.log_sigmoid_forward:
            self.given.append(found[0].detach().clone())
        return found
