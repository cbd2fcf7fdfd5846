"""The changes: what each makes of some features, which are refused, and how results tell of one."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of some features; a number stands for :class:`Set`.

    Every change takes ``positions``: the tokens at which it holds, from 0 in the text, padding not counted; also while
    text is generated with a cache. By default it holds at all.
    """

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """What stands in the place of ``x [..., k]``, whose features are these columns of the module's, at positions
        ``[...]`` of the text, where they are known."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse a change that is none.

        Raises:
            InputError: says why.
        """


@dataclass(frozen=True, eq=False)
class Set(Change):
    """``value`` in the place of what is there: a number, or one for each feature, ``[k]``."""

    value: float | Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return _like(self.value, x).expand(x.shape).clone()  # the model may go on in place, as Falcon does

    def check(self) -> None:
        """See :meth:`Change.check`."""
        _check_number(self.value, "set")


@dataclass(frozen=True, eq=False)
class Scale(Change):
    """``factor`` times what is there."""

    factor: float
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return x * self.factor

    def check(self) -> None:
        """See :meth:`Change.check`."""
        _check_number(self.factor, "scale by", only_numbers=True)


@dataclass(frozen=True, eq=False)
class Add(Change):
    """What is there and ``amount``: a number, or one for each feature, ``[k]``, as a direction of the stream."""

    amount: float | Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return x + _like(self.amount, x).expand(x.shape[-1])

    def check(self) -> None:
        """See :meth:`Change.check`."""
        _check_number(self.amount, "add")


@dataclass(frozen=True, eq=False)
class Clamp(Change):
    """What is there, kept between ``low`` and ``high``."""

    low: float = -math.inf
    high: float = math.inf
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        return x.clamp(self.low, self.high)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        for bound in (self.low, self.high):
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or math.isnan(bound):
                raise InputError(f"the bound {bound!r} is no number; pass Clamp(low, high)")
        if self.low > self.high:
            raise InputError(f"Clamp({self.low}, {self.high}) lets nothing through; pass the smaller bound first")


@dataclass(frozen=True, eq=False)
class Patch(Change):
    """What stood there in another run (:func:`~lrpx.interventions.record`): ``values [T, n]``, all features of the
    place at each position of the text, without padding before it. Beyond ``T`` it stays as it is; a position there is
    refused.
    """

    values: Tensor
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        assert at is not None
        chosen = self.values if columns is None else self.values[..., columns.to(self.values.device)]
        there = (at >= 0) & (at < len(chosen))
        rows = _like(chosen, x)[torch.where(there, at, 0)]
        return torch.where(there[..., None], rows, x)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        if not isinstance(self.values, Tensor) or self.values.ndim != 2 or not len(self.values):
            what = list(self.values.shape) if isinstance(self.values, Tensor) else type(self.values).__name__
            raise InputError(f"the values of Patch are {what}; pass a tensor [tokens, features] of one text")
        if self.positions is not None and max(self.positions) >= len(self.values):
            raise InputError(
                f"the values of Patch are of {len(self.values)} tokens, and none stood at position "
                f"{max(self.positions)}; pass positions to {len(self.values) - 1}"
            )


@dataclass(frozen=True, eq=False)
class Along(Change):
    """A change of the coefficient along a direction ``vector [k]``, and of nothing across it.

    The coefficient is ``x·v / v·v``, so ``Along(v, 0.0)`` takes the direction out, ``Along(v, Scale(2))`` doubles it.
    """

    vector: Tensor
    change: Change | float
    positions: Sequence[int] | None = None

    def of(self, x: Tensor, at: Tensor | None, columns: Tensor | None) -> Tensor:
        """See :meth:`Change.of`."""
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision does not hold the square of a long vector
        vector = _like(self.vector, x.new_empty(0, dtype=wide))
        if vector.shape != x.shape[-1:]:
            raise InputError(f"the direction has {len(vector)} features, the place has {x.shape[-1]}; pass as many")
        length: Tensor = torch.linalg.vector_norm(vector)
        before = (x.to(wide) @ (vector / length) / length)[..., None]
        after = change_of(self.change).of(before, at, None)
        return x + ((after - before) * vector).to(x.dtype)

    def check(self) -> None:
        """See :meth:`Change.check`."""
        if not isinstance(self.vector, Tensor) or self.vector.ndim != 1 or not bool((self.vector != 0).any()):
            raise InputError("the direction of Along is no vector; pass a tensor [features] that is not zero")
        inner = change_of(self.change)
        if isinstance(inner, (Patch, Along)) or getattr(inner, "positions", None) is not None:
            raise InputError("Along takes a number, Scale, Add or Clamp without positions; give the positions to Along")
        inner.check()


def change_of(given: Any) -> Change:
    """What is meant by a change or a number; its positions are looked at, and not yet what else it holds.

    Raises:
        InputError: it is none.
    """
    if isinstance(given, Change):
        positions = getattr(given, "positions", None)
        whole = positions is None or (
            isinstance(positions, (list, tuple, range))
            and len(positions) > 0
            and all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in positions)
        )
        if not whole:
            raise InputError(f"the positions {positions!r} are none; pass a list of whole numbers from 0")
        return given
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return Set(given)
    raise InputError(f"{given!r} is no change; pass a number, or Set, Scale, Add, Clamp, Patch or Along")


def _check_number(value: Any, what: str, *, only_numbers: bool = False) -> None:
    if isinstance(value, Tensor) and not only_numbers:
        if value.ndim != 1 or not bool(value.isfinite().all()):
            raise InputError(f"what is to {what} is a tensor {list(value.shape)}; pass a number, or a finite vector")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"what is to {what} is {value!r}; pass a finite number")


def is_of_features(columns: tuple[int, ...] | None, change: Change) -> bool:
    """Whether a change is of some features, or not the same for all numbers."""
    vector = getattr(change, "value", getattr(change, "amount", None))
    return columns is not None or not isinstance(change, (Set, Scale, Add, Clamp)) or isinstance(vector, Tensor)


def needs_positions(change: Change) -> bool:
    """Whether a change holds at some tokens, or is another at each."""
    return isinstance(change, Patch) or getattr(change, "positions", None) is not None


def described(change: Any) -> str:
    """A change with all that it holds; of a tensor its shape and a digest of its numbers."""
    if isinstance(change, Tensor):
        numbers = change.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()
        return f"tensor {list(change.shape)} {hashlib.sha256(numbers).hexdigest()[:8]}"
    if not isinstance(change, Change) or not is_dataclass(change):
        return repr(change)
    held = ((each.name, getattr(change, each.name)) for each in fields(change))
    told = (f"{name}={described(value)}" for name, value in held if name != "positions" or value is not None)
    return f"{type(change).__name__}({', '.join(told)})"


def in_ranges(numbers: Sequence[int]) -> str:
    """Whole numbers, those that follow on each other as a range.

    >>> in_ranges((7, 0, 1, 2))
    '0-2, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _like(value: float | Tensor, x: Tensor) -> Tensor:
    """A constant in the precision and place of ``x``."""
    return torch.as_tensor(value, dtype=x.dtype, device=x.device).detach()
