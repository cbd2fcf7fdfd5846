"""Gradient checkpointing of the model's layers: their inside is forgotten, and computed again in the backward pass."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from lrpx.errors import LRPxError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.nn import Module

SAMPLED = 256
"""So many numbers of what a layer gives are kept, to see whether it gives the same when it is run again."""


class Layer:
    """One call of a layer. What autograd saves inside it is replaced by the call's number in the list of what the same
    call saves again when the backward pass first asks.

    Args:
        module: the layer.
        args: what it was called with.
        kwargs: the same, by name.
        again: a context in which the layer runs as it did, and nothing is recorded.
        newest: shared by the layers of a run; the one that was computed again last, which forgets when another is. (A
            graph that is kept for another pass would hold them all.)
    """

    def __init__(
        self,
        module: Module,
        args: Any,
        kwargs: Any,
        again: Callable[[], AbstractContextManager[object]],
        newest: list[weakref.ref[Layer]],
    ) -> None:
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._again = again
        self._newest = newest
        self._saved: list[Tensor] | None = None
        self._count = 0
        self._gave: list[Tensor] = []
        self._is_other = False
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        self._autocasts = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices]
        self._versions = _versions(args, kwargs)
        self._random = torch.get_rng_state(), *get_device_states(*args)

    def hooks(self) -> saved_tensors_hooks:
        """The context in which the layer's first run forgets; not kept by the layer, which would keep itself alive."""
        return saved_tensors_hooks(self._forget, self._recall)

    def gave(self, output: Any) -> None:
        """Note what the first run has given: a layer with a state that it changes gives something else the next time,
        and may still save as many tensors of the same shapes."""
        self._gave = _sample(output)

    def gives(self, module: Module, output: Any) -> None:
        """Note whether a module that runs again, seen from the same hook, is the layer and gives something else."""
        if module is self._module:
            self._is_other = not _are_alike(self._gave, _sample(output))

    def _forget(self, x: Tensor) -> tuple[int, torch.Size, torch.dtype]:
        self._count += 1
        return self._count - 1, x.shape, x.dtype

    def _recall(self, forgotten: tuple[int, torch.Size, torch.dtype]) -> Tensor:
        number, shape, dtype = forgotten
        saved = self._saved
        if saved is None:
            for older in filter(None, (each() for each in self._newest)):
                older._saved = None
            self._newest[:] = [weakref.ref(self)]
            saved = self._saved = self._run_again()
        x = saved[number] if len(saved) == self._count else None
        if x is None or x.shape != shape or x.dtype != dtype:
            raise self._other()
        return x

    def _other(self) -> TraceError:
        return TraceError(
            f"{type(self._module).__name__} computes something else when it is run again, as with a state that it "
            "changes; explain without recompute=True"
        )

    def _run_again(self) -> list[Tensor]:
        saved: list[Tensor] = []

        def keep(x: Tensor) -> None:
            saved.append(x.detach())

        def never(_: None) -> Tensor:
            raise AssertionError("this graph has no backward pass")

        if _versions(self._args, self._kwargs) != self._versions:
            raise TraceError(
                f"{type(self._module).__name__} changes its input in place, so it cannot be run again; explain without "
                "recompute=True"
            )
        cpu, devices, states = self._random
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            with torch._C.DisableTorchFunction():  # the mode may be on by now, and knows no such leaves
                args, kwargs = _cut((self._args, self._kwargs), {})
            stack.enter_context(self._again())
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(cpu)
            set_device_states(devices, states)
            for device, dtype, enabled in self._autocasts:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.enter_context(saved_tensors_hooks(keep, never))
            # from where the hooks stand: a checkpoint around the call of the module is outside of them
            try:
                torch.nn.Module.__call__(self._module, *args, **kwargs)
            except (RuntimeError, LookupError) as error:
                if isinstance(error, (LRPxError, torch.OutOfMemoryError)):
                    raise
                raise self._other() from error  # as a cache that has grown, or a list that its input was taken from
        if self._is_other:
            raise self._other()
        return saved


def _sample(output: Any) -> list[Tensor]:
    """Some numbers of every tensor in an output that depends on the input, evenly from all of it."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad and x.numel()]
        return [x.detach().reshape(-1)[:: x.numel() // SAMPLED | 1].clone() for x in tensors]


class Sampled:
    """What a checkpoint of the model's own compares of a tensor that it saves and computes again, and some of its
    numbers; two are the same up to rounding."""

    def __init__(self, described: Any, x: Tensor) -> None:
        self.described, self.numbers = described, _numbers(x) if type(x) is Tensor else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sampled) or self.described != other.described:
            return False
        mine, others = self.numbers, other.numbers
        return mine is None or others is None or _are_alike([mine], [others])

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.described)


def compare_numbers(pack: Any) -> None:
    """Let a checkpoint, whose hook ``pack`` is, compare numbers too, where it begins: torch compares shapes alone, and
    what is another function when it runs again, by a state or a loop's variable, may give the same."""
    free = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    frame: Any = free["frame"].cell_contents if "frame" in free else None
    describe = getattr(frame, "metadata_fn", None)
    if describe is None or getattr(frame, "x_metadatas", True) or isinstance(describe, partial):
        return
    frame.metadata_fn = partial(_described, describe)


def _described(describe: Callable[[Tensor], Any], x: Tensor) -> Sampled:
    return Sampled(describe(x), x)


def _numbers(x: Tensor) -> Tensor | None:
    """Some numbers of a tensor, evenly from all of it; None where it has none, or not in the usual way."""
    if x.layout != torch.strided or not x.numel() or not x.is_floating_point() or x.element_size() < 2:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return x.detach().reshape(-1)[:: x.numel() // SAMPLED | 1].clone()


def _are_alike(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether a layer has given the same twice, up to rounding, which may hang on the thread that it runs in."""
    if [(x.shape, x.dtype) for x in first] != [(x.shape, x.dtype) for x in second]:
        return False
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for a, b in zip(first, second, strict=True):
            bound = torch.finfo(a.dtype).eps ** 0.5 * a.abs().max()
            # what is not finite is not compared: it is told of where it arrives
            if bool(((a - b).abs() > bound).any()):
                return False
    return True


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [x._version for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def _cut(value: Any, leaves: dict[int, Tensor]) -> Any:
    """The same arguments, cut off from the graph they came from; constants as they are, and as taps know them.

    Args:
        value: an argument, or several.
        leaves: those made so far, by what each stands for, so that a tensor that is given twice is one again.
    """
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        if id(value) not in leaves:
            leaf = value.detach().requires_grad_()
            # as a leaf it would be a constant; a view would have other strides where a dimension is of size 1
            leaves[id(value)] = leaf if value.is_leaf else torch.ops.aten.alias(leaf)
        return leaves[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_cut(each, leaves) for each in value)
    if type(value) is dict:
        return {key: _cut(each, leaves) for key, each in value.items()}
    return value
