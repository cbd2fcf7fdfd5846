"""The bias of a linear layer that a model adds after the product, ``x @ W + b``.

A rule that looks at a layer's outputs (ε, γ, z⁺) divides by what ``F.linear`` gives, the bias in it. So where a vector
that is the same for each row is added to a product that has no bias, the rule is applied once more, to the whole layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrpx import rules
from lrpx.engine._exponentials import ADDING, Note
from lrpx.engine._factors import CONSTANT
from lrpx.engine._tensors import carries, constants, is_in_place, is_parameter, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

WITHOUT = "_lrpx_without_bias"
"""The attribute of what a layer without a bias has made: ``(version, recipe, kind, op, x, its version, weight, dims)``,
the recipe being that of the module that the layer is in."""

LAST = frozenset({-1})

SUBTRACTING = frozenset("sub subtract __sub__ sub_ subtract_ __isub__".split())


def without_bias(
    run: Any, kind: str, op: Callable[..., Tensor], x: Tensor, weight: Tensor, dims: Collection[int]
) -> Tensor:
    """``op(x, weight)`` under the rule for a kind of layer; ``dims``: which dimensions of the result are the weight's,
    the last is -1."""

    def with_summand(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return op(x, weight) if bias is None else op(x, weight) + bias

    out: Tensor = run.apply(kind, with_summand, x, weight, None)
    if run.asks_for_weights and carries(out):
        note = Note((out._version, run.recipe, kind, with_summand, x, x._version, weight, frozenset(dims)))
        setattr(out, WITHOUT, note)
    return out


def with_bias(run: Any, func: Any, a: Any, b: Any) -> Tensor | None:
    """``func(a, b)``, a sum, if one of the two is what a layer without a bias has made and the other is its bias."""
    adds = func.__name__ in ADDING
    if not (adds or func.__name__ in SUBTRACTING) or not (is_tensor(a) and is_tensor(b)):
        return None
    layer, bias = _layer(a), b
    if not layer and adds and not is_in_place(func.__name__):
        layer, bias = _layer(b), a
    made = a if bias is b else b
    if not layer or layer[0] != made._version or layer[4]._version != layer[5] or not _is_constant(run, bias):
        return None
    _, recipe, kind, op, x, _, weight, dims = layer
    is_vector = bias.ndim == 1 or not dims <= LAST  # else it may be that of a position, where there is only one
    if not is_vector or any(size > 1 and i - bias.ndim not in dims for i, size in enumerate(bias.shape)):
        return None
    value = func(a.detach().clone() if is_in_place(func.__name__) else a.detach(), b.detach())
    bias = constants(bias) if adds else -constants(bias)
    run.enter(recipe)
    try:
        whole = rules.with_gradient_of(value, run.apply(kind, op, x, weight, bias))
    finally:
        run.leave()
    return a.copy_(whole) if is_in_place(func.__name__) else whole


def _layer(made: Tensor) -> Any:
    """The note of what a layer without a bias has made, also where that has another shape since, in the same memory."""
    note, base = getattr(made, WITHOUT, None), made._base
    if note or base is None or not (note := getattr(base, WITHOUT, None)):
        return note
    if made.numel() != base.numel() or not base.is_contiguous() or base.storage_offset():
        return None
    version, recipe, kind, op, *given, dims = note
    memory = [(base.stride(i), base.stride(i) * base.shape[i]) for i in dims]

    def is_in_one(step: int, size: int) -> bool:
        return any(least <= step and step * size <= end for least, end in memory)

    dims = frozenset(i for i in range(-made.ndim, 0) if is_in_one(made.stride(i), made.shape[i]))
    place = made.shape, made.stride()

    def moved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = op(x, weight).contiguous().as_strided(*place)
        return out if bias is None else out + bias

    return version, recipe, kind, moved, *given, dims


def _is_constant(run: Any, value: Tensor) -> bool:
    """Whether a summand was not made of the model's input; the leaf of a ledger stands for one that was not."""
    return bool(run.is_weight(value)) and (is_parameter(value) or not carries(value) or CONSTANT in vars(value))
