"""Steps: constants that are computed of a tensor element by element, such as a comparison with 0.

What is masked by one may be a ReLU that the model has written out. Which it is, is told by what the model has written,
and not by the numbers of a run: another text, or the same in another batch, would have others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from lrpx.engine._notes import Note
from lrpx.engine._tensors import carries, is_parameter

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = "_lrpx_step"
"""The attribute of a step: ``(its version, the tensor, held weakly, that one's version, the function)``."""


UNIFORM = "_lrpx_uniform"
"""The attribute of a tensor that was made of one number, zeros or ones: its version."""


def uniform(out: Any) -> Any:
    """``out``, a new tensor of one number."""
    if type(out) is Tensor:
        setattr(out, UNIFORM, out._version)
    return out


def keep(func: Any, out: Any, *given: Any, **settings: Any) -> Any:
    """``out = func(*given, **settings)``, perhaps a step of a tensor that depends on the input, and of nothing else but
    numbers: noted, so that what is masked by it is known for a ReLU. By what the model has written, and not by the
    numbers of this run: another text would have others."""
    values = (*given, *settings.values())
    if type(out) is not Tensor or out.requires_grad or not any(hasattr(each, STEP) or carries(each) for each in values):
        return out
    made = [step_of(each) for each in values]
    roots = {id(root): root for root, _ in made if root is not None}
    if len(roots) != 1 or any(op is None for _, op in made):
        return out
    (root,), names = roots.values(), tuple(settings)
    ops = [op for _, op in made if op is not None]
    if out.shape == root.shape:

        def again(x: Tensor) -> Any:
            made = [op(x) for op in ops]
            return func(*made[: len(given)], **dict(zip(names, made[len(given) :], strict=True)))

        setattr(out, STEP, Note((out._version, ref(root), root._version, again)))
    return out


def step_of(value: Any) -> tuple[Tensor | None, Callable[[Tensor], Any] | None]:
    """Of which tensor a value is a step, or itself, and how; of none, if it is one number everywhere. No function where
    it is neither."""
    if is_parameter(value):
        value = value.detach()
    if type(value) is not Tensor:
        return None, lambda _: value
    if (found := getattr(value, STEP, None)) is not None:
        version, held, its_version, again = found
        root = held()
        is_there = value._version == version and root is not None and root._version == its_version
        return (root, again) if is_there else (None, None)
    if carries(value):
        return value, lambda x: x
    # of others, such as a padding mask, a text alone would not tell whether they are one number in a batch, too
    is_one = (value.ndim < 2 and value.numel() == 1) or getattr(value, UNIFORM, None) == value._version
    if not is_one or not value.numel() or value.is_complex():
        return None, None
    dtype, number = value.dtype, value.detach().flatten()[0].item()
    return None, lambda x: torch.full_like(x, number, dtype=dtype)
