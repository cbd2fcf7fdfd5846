"""The activations and softmaxes of a model, written out as models write them: relevance is not to depend on it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """As ESM, and as GPT-2 has it."""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    """As a product."""
    return x * torch.sigmoid(x)


def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """By its formula."""
    assert dim is not None
    x = x if dtype is None else x.to(dtype)
    exponentials = torch.exp(x - x.amax(dim, keepdim=True))
    return exponentials / exponentials.sum(dim, keepdim=True)


class Spelled(TorchFunctionMode):
    """Writes them out; enter it inside of ``propagate``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        x = args[0] if args else kwargs.get("input")
        is_written = isinstance(x, Tensor) and x.is_floating_point()
        if name == "gelu" and is_written:
            return gelu(*args, **kwargs)
        if name == "silu" and is_written and args and not (kwargs.get("inplace") or any(args[1:])):
            return silu(args[0])
        if name == "softmax" and is_written and (kwargs.get("dim") is not None or isinstance((*args, 0)[1], int)):
            if func is torch.nn.functional.softmax:
                return softmax(*args, **kwargs)
            (x, *rest), dtype = args or (x,), kwargs.get("dtype")
            return softmax(x, rest[0] if rest else kwargs["dim"], dtype=rest[1] if len(rest) > 1 else dtype)
        return func(*args, **kwargs)
