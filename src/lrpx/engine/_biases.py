"""The bias of a linear layer that a model adds after the product, ``x @ W + b``.

A rule that looks at a layer's outputs (ε, γ, z⁺) divides by what ``F.linear`` gives, the bias in it. So where a vector
that is the same for each row is added to what a layer has made, the rule is applied once more, to the whole layer.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine import _origins, _roles
from lrpx.engine._exponentials import ADDING
from lrpx.engine._notes import Note
from lrpx.engine._tensors import CONSTANT, carries, constants, is_in_place, is_parameter, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from lrpx.recipes import Recipe

    Op = Callable[..., Tensor]

LAYER = "_lrpx_layer_with_bias"
"""The attribute of what a layer has made: ``(version, Layer)``; and of ``op(x)``, a scaling of ``x`` that one has made:
``(version, x, op)``."""

LAST = frozenset({-1})

TAKEN_UP = "_lrpx_taken_up"
"""The attribute of what a layer has made, and a bias was added to: the sums, which part each is of, and whether it was
taken off instead. The rule goes from a sum to the layer's input, so that nothing arrives in between."""

SUBTRACTING = frozenset("sub subtract __sub__ sub_ subtract_ __isub__".split())
SCALED = frozenset(("sum", "sum_"))
"""What sums of two are called one of which is scaled, ``alpha=``."""


class Layer(NamedTuple):
    """How a layer has made a tensor: ``op(x, weight) + bias``.

    Args:
        recipe: that of the module that the layer is in.
        kind: of layer.
        op: the product.
        x: its input.
        version: of that.
        weight: its weight.
        dims: which dimensions of the result are the weight's, the last is -1.
        bias: what is added, as the result has it.
        scale: what the product was multiplied with, if with a constant.
        node: of the graph, that of the product, where it is noted what the layer is to attention.
    """

    recipe: Recipe
    kind: str
    op: Op
    x: Tensor
    version: int
    weight: Tensor
    dims: frozenset[int]
    bias: Tensor | None = None
    scale: Callable[[], Tensor] | None = None
    node: Any = None


def layered(
    run: Any, kind: str, op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, dims: Collection[int], beta: float = 1
) -> Tensor:
    """``op(x, weight, bias)`` under the rule for a kind of layer; ``dims``: which dimensions of the result are the
    weight's, the last is -1. The bias is as a convolution or ``F.linear`` has it, and is added ``beta`` times."""
    out: Tensor = run.apply(kind, op, x, weight, bias)
    recipe = run.recipe
    if run.asks_for_places and -1 not in dims:
        _roles.along_no_outputs(out)
    if run.asks_for_places and dims and carries(out):
        _origins.layer(out, x, dims)
    if run.asks_for_places and len(dims) == 1 and carries(out):
        _roles.mixed(out, x, *dims)
    if run.asks_for_weights and (getattr(recipe, kind) is not rules.unmodified or recipe.has_places()) and carries(out):
        if bias is not None and kind == "convolution":
            bias = bias.view(-1, *(1,) * (weight.ndim - 2))
        if bias is not None and beta != 1:
            bias = beta * bias if beta else None  # what is not added may be no number

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return op(x, weight, None)

        _note(out, Layer(recipe, kind, product, x, x._version, weight, frozenset(dims), bias, node=out.grad_fn))
    return out


def without_bias(run: Any, kind: str, op: Op, x: Tensor, weight: Tensor, dims: Collection[int]) -> Tensor:
    """``op(x, weight)``, likewise."""
    return layered(run, kind, _with_summand(op), x, weight, None, dims)


def _with_summand(op: Op) -> Op:
    def with_summand(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return op(x, weight) if bias is None else op(x, weight) + bias

    return with_summand


def _note(out: Tensor, layer: Layer) -> None:
    setattr(out, LAYER, Note((out._version, layer)))


def again(out: Tensor, made: Tensor) -> Tensor:
    """``out``, the same values as ``made``, noted as what a layer has made, if one has made that."""
    if (layer := _layer(made)) is not None:
        _note(out, layer)
    return out


def scaled(out: Tensor, x: Tensor, op: Op) -> None:
    """``out = op(x)``, where ``op`` multiplies with a constant, noted if a layer has made ``x``."""
    if hasattr(x, LAYER) or hasattr(x._base, LAYER):
        setattr(out, LAYER, Note((out._version, x, op)))


def _times(layer: Layer | None, out: Tensor, x: Tensor, op: Op) -> Layer | None:
    """The layer that has made ``out = op(x)``, if this one has made ``x``."""
    if layer is None or out.shape != x.shape:
        return None
    before = layer.op, layer.scale

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return op(before[0](x, weight))

    def scale() -> Tensor:
        return op(torch.ones_like(x) if before[1] is None else before[1]())

    bias = None if layer.bias is None else op(layer.bias.expand(x.shape))
    return layer._replace(op=product, bias=bias, scale=scale)


def with_bias(run: Any, func: Any, a: Any, b: Any) -> Tensor | None:
    """``func(a, b)``, a sum, if one of the two is what a layer has made and the other is a bias of it."""
    name = func.__name__
    adds = name in ADDING
    if not (adds or name in SUBTRACTING or name in SCALED) or not (is_tensor(a) and is_tensor(b)):
        return None
    changes = is_in_place(name)
    is_first = _is_constant(run, b)
    if not is_first and (name in SCALED or changes or not _is_constant(run, a)):  # nearly always
        return None
    made, bias = (a, b) if is_first else (b, a)
    layer = _layer(made)
    if layer is None or not _is_bias(run, bias, layer.dims):
        return None
    if layer.scale is not None and not _is_quantised(layer):  # what is normalised so has no bias
        return None
    value = func(a.detach().clone() if changes else a.detach(), b.detach())
    bias = constants(bias)
    if is_first:
        bias = func(torch.zeros_like(bias), bias)
    elif not adds:
        layer = layer._replace(weight=-layer.weight, bias=None if layer.bias is None else -layer.bias)
    whole = layer._replace(bias=bias if layer.bias is None else layer.bias + bias)
    run.enter(whole.recipe)
    try:
        applied = run.apply(whole.kind, _with_summand(whole.op), whole.x, whole.weight, whole.bias)
        if run.asks_for_places and carries(applied):
            _noted_places(run, applied, whole)
            whole = whole._replace(node=applied.grad_fn)
    finally:
        run.leave()
    out = rules.with_gradient_of(value, applied)
    out = a.copy_(out) if changes else out
    _note(out, whole)
    if not changes:
        taken_off = not (adds or is_first)
        for before, at in ((made, None), (made._base, (made.shape, made.stride(), made.storage_offset()))):
            if before is not None:
                setattr(before, TAKEN_UP, Note((*getattr(before, TAKEN_UP, ()), (out, at, taken_off))))
    return out


def _noted_places(run: Any, applied: Tensor, whole: Layer) -> None:
    """Note of a layer with its bias what is noted of the product alone."""
    if -1 not in whole.dims:
        _roles.along_no_outputs(applied)
    if whole.dims:
        _origins.layer(applied, whole.x, whole.dims)
    _roles.is_of_same_layer(run, applied, whole.x, whole.node)


def sums_behind(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The sums that have taken tensors up, and those that have taken these up."""
    for tensor in tensors:
        for out, *_ in getattr(tensor, TAKEN_UP, ()):
            yield out
            yield from sums_behind([out])


def gradient(tensor: Tensor, gradients: Mapping[int, Tensor]) -> Tensor | None:
    """That of a tensor, by its ``id``; with what arrives at sums that have taken it up, which is as much, or
    as much of the other sign."""
    found = gradients.get(id(tensor))
    for out, at, taken_off in getattr(tensor, TAKEN_UP, ()):
        arrived = gradient(out, gradients)
        if arrived is not None:
            whole = torch.zeros_like(tensor, dtype=arrived.dtype)  # in the tensor's own order, whatever the gradient's
            found = whole if found is None else whole.copy_(found)
            part = found if at is None else found.as_strided(*at)
            part += (-arrived if taken_off else arrived).sum_to_size(part.shape)
    return found


def _is_quantised(layer: Layer) -> bool:
    """Whether the weight of a layer that was scaled is of whole numbers, and the scale positive."""
    weight = layer.weight
    assert layer.scale is not None
    return bool((weight == weight.round()).all()) and bool((layer.scale() > 0).all())


def _is_bias(run: Any, bias: Tensor, dims: frozenset[int]) -> bool:
    """Whether what is added is the same for each row, and no mask. What has one row may be a position, where there is
    only one: so it is a vector, or all of a parameter, or it is known which of its dimensions are the weight's."""
    if not bias.ndim:  # a number, which is a part of the function that follows
        return False
    rows = [i - bias.ndim for i, size in enumerate(bias.shape) if size > 1 and bias.stride(i)]
    if not dims.issuperset(rows) or (type(bias) is Tensor and not bias.isfinite().all()):
        return False
    return bias.ndim == 1 or not dims <= LAST or is_parameter(bias) or run.is_all_of_parameter(bias)


def _layer(made: Tensor) -> Layer | None:
    """How a layer has made a tensor, also where that has another shape since, or is some of the outputs, in the same
    memory."""
    if note := getattr(made, LAYER, None):
        return _noted(made, note)
    base = made._base
    if base is None or not (note := getattr(base, LAYER, None)) or (layer := _noted(base, note)) is None:
        return None
    return _moved(layer, made, base)


def _noted(made: Tensor, note: Note) -> Layer | None:
    if note[0] != made._version:
        return None
    layer: Layer | None = note[1] if len(note) == 2 else _times(_layer(note[1]), made, *note[1:])
    return None if layer is None or layer.x._version != layer.version else layer


def _moved(layer: Layer, made: Tensor, base: Tensor) -> Layer | None:
    """``layer``, which has made the base of ``made``: its outputs for all rows, or some of them, as the queries are of
    one product that gives queries, keys and values."""
    order = sorted(range(base.ndim), key=base.stride, reverse=True)  # as in memory: channels may be the last there
    if not base.permute(order).is_contiguous() or base.storage_offset():
        return None
    memory: list[tuple[int, int]] = []
    for least, end in sorted((base.stride(i), base.stride(i) * base.shape[i]) for i in layer.dims):
        if memory and memory[-1][1] == least:  # two that may be one now, as heads and what each has
            memory[-1] = memory[-1][0], end
        else:
            memory.append((least, end))

    def is_in_one(step: int, size: int) -> bool:
        return any(least <= step and step * size <= end for least, end in memory)

    dims = frozenset(i for i in range(-made.ndim, 0) if is_in_one(made.stride(i), made.shape[i]))
    rows = prod(size for i, size in enumerate(base.shape, -base.ndim) if i not in layer.dims)
    if rows != prod(size for i, size in enumerate(made.shape, -made.ndim) if i not in dims):
        return None
    place, shape = (made.shape, made.stride(), made.storage_offset()), base.shape

    def moved(x: Tensor) -> Tensor:
        return x.permute(order).contiguous().as_strided(*place)

    bias = None if layer.bias is None else moved(layer.bias.expand(shape))
    return layer._replace(op=lambda x, weight: moved(layer.op(x, weight)), bias=bias, dims=dims)


def _is_constant(run: Any, value: Tensor) -> bool:
    """Whether a summand was not made of the model's input; the leaf of a ledger stands for one that was not."""
    return bool(run.is_weight(value)) and (is_parameter(value) or not carries(value) or CONSTANT in vars(value))
