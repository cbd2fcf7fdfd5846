"""Into which patches a model cuts its images, found by what it does."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx._images import Patches
from lrpx.engine import Tap, propagate
from lrpx.engine._tensors import any_carries, arguments, carries
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Module

    from lrpx.engine._taps import Call, Running


def patches_of(model: Module, inputs: Mapping[str, Any], argument: str) -> Patches | None:
    """The patches that a model cuts an image into; None where it does not, or where they overlap.

    It runs up to the first operation with a weight that depends on the pixels.

    Args:
        model: the model.
        inputs: of one image.
        argument: the one that takes its pixels ``[1, channel, row, column]``.
    """
    tap = _FirstWeight(argument)
    with suppress(_Met), torch.inference_mode(False), propagate(model, GRADIENT, (), taps=[tap]):
        model(**inputs)
    pixels = inputs[argument]
    return None if tap.places is None else _regular(tap.places, *pixels.shape[-2:])


@dataclass(frozen=True, eq=False)
class Places:
    """The tokens that a model makes of an image, over which its attention goes.

    Args:
        count: how many there are.
        first: which of them is the first patch; the others follow it in reading order.
    """

    count: int
    first: int


def places_of(model: Module, inputs: Mapping[str, Any], argument: str, patches: Patches) -> Places | None:
    """Where the patches are among a model's tokens; None where its first attention does not go over all of them, as
    where it goes over windows, or where they are not in reading order.

    The model is run up to its first attention with the image, and for each bit of a number with those patches changed
    whose number, from 1, has it, and with the others: a token is changed by the patch of one number, or by none.

    Args:
        model: the model.
        inputs: of one image.
        argument: the one that takes its pixels.
        patches: into which it cuts the image.
    """
    pixels: Tensor = inputs[argument]
    place = 1 + patches.places(*pixels.shape[-2:]).to(pixels.device)
    x = entering(model, inputs)
    if x is None:
        return None
    number, other = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for bit in range(len(patches).bit_length()):
        has = (place >> bit) % 2 == 1
        for found, chosen in ((number, has), (other, ~has & (place > 0))):
            changed = entering(model, {**inputs, argument: torch.where(chosen, pixels + 1, pixels)})
            if changed is None or changed.shape != x.shape:
                return None
            found += (changed != x)[0].any(-1).cpu().long() << bit
    (of_patches,) = (number + other).nonzero(as_tuple=True)
    every = torch.arange(1, len(patches) + 1)
    if not torch.equal(number[of_patches], every) or bool((number & other).any()):
        return None
    first = int(of_patches[0])
    return Places(x.shape[1], first) if int(of_patches[-1]) - first == len(patches) - 1 else None


def entering(model: Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """``[1, T, d]``: what enters the layers of a model's first attention; None where that is no row for each token.

    Args:
        model: the model.
        inputs: of one image.
    """
    tap = _Entering()
    with suppress(_Met), torch.inference_mode(False), propagate(model, GRADIENT, (), taps=[tap]):
        model(**inputs)
    return None if tap.entering is None else tap.entering.detach()


class _Entering(Tap):
    """Stops a run at its first attention, with what entered the last linear layer before it, ``[1, T, d]``; one that
    makes biases of distances sees nothing of the image."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function."""
        if call.name == "linear":
            (x,) = arguments(call.args[:1], call.kwargs, "input")
            if not any_carries(x):
                return proceed(call.args, call.kwargs)
            x = x.transpose(0, 1) if x.ndim == 3 and x.shape[1] == 1 else x  # in torch's attention tokens are first
            self.entering = x if x.ndim == 3 and len(x) == 1 else None
        if call.operation is not None and call.operation.name in ("attention", "softmax"):
            raise _Met
        return proceed(call.args, call.kwargs)


class _Met(Exception):  # noqa: N818 - it is no error
    """The first weight was met, and the rest of the model need not run."""


class _FirstWeight(Tap):
    """Stops a run at its first operation with a weight that depends on the pixels, and asks which pixel goes where."""

    def __init__(self, argument: str) -> None:
        self._run: Running
        self._argument = argument
        self.places: Tensor | None = None

    def begin(self, run: Running) -> None:
        """The run begins."""
        self._run = weakref.proxy(run)  # which holds this

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function."""
        name = call.name
        x: Any = None
        if name in ("conv2d", "linear"):
            x, weight = arguments(call.args, call.kwargs, "input", "weight")
            if carries(x) and not any_carries(weight):
                op = _placed_conv(call, weight) if name == "conv2d" else lambda x: x.sum(-1)
                self._look(x, op)
        elif name in ("matmul", "__matmul__", "addmm", "einsum", "bmm", "mm", "conv1d", "conv3d"):
            x = next((each for each in call.args if any_carries(each) and isinstance(each, Tensor)), None)
            if x is not None:
                self._look(x, None if name.startswith(("conv", "einsum")) else lambda x: x.sum(-1))
        return proceed(call.args, call.kwargs)

    def _look(self, x: Tensor, op: Callable[[Tensor], Tensor] | None) -> None:
        """Find the places ``[R, C]`` that pixels go to, if ``x`` is made of pixels.

        Raises:
            _Met: it is.
        """
        leaf = next((source.value for source in self._run.sources if source.paths == (self._argument,)), None)
        if leaf is None:
            return
        with torch._C.DisableTorchFunction():
            any_way: Any = torch.autograd.grad(x.sum(), leaf, retain_graph=True, allow_unused=True)[0]
            if any_way is None:
                return
            if op is not None and x.ndim > 2 and len(x) == 1:
                self.places = _places(op(x)[0], leaf)
        raise _Met


def _placed_conv(call: Call, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The convolution with weights of ones, summed over its channels."""
    rest = call.args[3:]
    named = {key: value for key, value in call.kwargs.items() if key not in ("input", "weight", "bias")}
    ones = torch.ones_like(weight)
    return lambda x: torch.nn.functional.conv2d(x, ones, None, *rest, **named).sum(1)


def _places(out: Tensor, leaf: Tensor) -> Tensor | None:
    """``[R, C]``: the place in ``out`` that each pixel of the leaf ``[1, C, R, C]`` goes to, −1 for none; None where
    one goes to several."""
    total = out.numel()
    number = torch.arange(total, device=out.device).reshape(out.shape)

    def arrived(code: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((out * code).sum(), leaf, retain_graph=True)
        return gradient[0]

    whole = arrived(torch.ones_like(out))
    goes = whole != 0
    found = torch.zeros_like(whole, dtype=torch.int64)
    for bit in count():
        if 1 << bit >= total:
            break
        # a pixel that goes to two places has, for a bit that these differ in, less than the whole
        half = arrived(torch.where((number >> bit) % 2 == 1, 1.0, -1.0).to(out.dtype))
        if not torch.equal(half.abs(), whole.abs()):
            return None
        found += ((half * whole) > 0).to(torch.int64) << bit
    found = torch.where(goes, found, -1)
    return found[0].cpu() if bool((found == found[:1]).all()) else None


def _regular(places: Tensor, height: int, width: int) -> Patches | None:
    """The places as a regular grid in reading order, if they are one of several patches of several pixels."""
    if places.shape != (height, width) or int(places[0, 0]) != 0:
        return None
    patch_height, patch_width = int((places[:, 0] == 0).sum()), int((places[0] == 0).sum())
    columns = int(places[0].max()) + 1
    rows = (int(places.max()) + 1) // columns
    found = Patches(rows, columns, patch_height, patch_width)
    if len(found) < 2 or patch_height * patch_width < 2:
        return None
    return found if torch.equal(found.places(height, width), places) else None
