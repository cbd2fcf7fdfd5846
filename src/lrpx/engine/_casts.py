"""Casts, copies and changes of sign, which lead on to what they are of; one-hot ids that are cast are a source."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lrpx.engine import _moved, _notes, _steps
from lrpx.engine._functions import scaled
from lrpx.engine._gates import EXPONENTS
from lrpx.engine._tensors import called, is_tensor, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from lrpx.engine._moved import Noted

    Op = Callable[..., Any]


ONE_HOT = "_lrpx_one_hot"
"""The attribute of one-hot ids of the model's input: the ids. Cast to be multiplied they are a source, as what is
looked up in an embedding is."""


def plain_scaling(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A cast, a copy or a change of sign; of one-hot ids a source."""
    out = called(func, args, kwargs)
    x = args[0] if args else None
    if out is x or not is_tensor(x):
        return out
    if not x.requires_grad:
        if not x.is_floating_point():
            return of_whole_numbers(run, out, x)
        if hasattr(x, EXPONENTS):  # a logarithm that a rule has made a constant
            _notes.keep(out, x, _moved.callable_of(_with_rest(func, args[1:], kwargs)))
        return run.computed(out, x)
    if out.requires_grad:
        scaled(out, x, _with_rest(func, args[1:], kwargs))
    return out


def cast_or_name(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``x.type(dtype)``, a cast; ``x.type()`` is the name of a type."""
    return plain_scaling(run, func, args, kwargs) if len(args) > 1 or kwargs else called(func, args, kwargs)


def _with_rest(func: Any, rest: Any, kwargs: Any) -> Noted:
    if kwargs or len(rest) > 1:
        return lambda x: func(x, *rest, **kwargs)
    return (func, rest[0], True) if rest else func


def of_whole_numbers(run: Any, out: Tensor, x: Tensor) -> Tensor:
    """``out``, a copy of ``x`` or a cast; of one-hot ids a source, once it is floating-point."""
    rows = whole_of(x)
    ids = getattr(rows, ONE_HOT, None)
    if ids is None:
        _steps.keep(partial(_cast, out.dtype), out, x)
        if out.is_floating_point():
            run.leaving_ids("a cast", x)
        else:
            run.copied_ids(out, x)
        return out
    if not out.is_floating_point():
        if x is rows:
            setattr(out, ONE_HOT, ids)
        return out
    leaf: Tensor = run.source(rows, ids, rows.to(out), "one_hot")
    return leaf if x is rows else leaf.as_strided(x.shape, x.stride(), x.storage_offset())


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype)
