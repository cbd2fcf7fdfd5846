"""Means of values, weighted by exponentials: ``Σ e v / Σ e``, in whatever order a model computes it.

By the papers it is a product of a softmax and the values, so under AttnLRP (Achtibat et al. 2024, eqs. 8 and 13) each
has its share of the plain gradient: ``1 / (n + 1)`` the exponents, ``n / (n + 1)`` the values, which are products of
``n`` factors. A division of exponentials alone is a softmax, all of which is the exponents'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.reference.aten.operations import BILINEAR, EXPONENTIALS, JOINS, QUOTIENTS, SELECTS, SHAPES, SUMMATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.reference.aten.tape import Node, Tape, Value

MOVES = SHAPES | SELECTS | JOINS | SUMMATIONS | frozenset("sum mean cumsum neg".split())
"""Linear without weights."""


@dataclass(frozen=True)
class Mean:
    """What a division is made of.

    ``nodes``: the calls between its leaves and it, itself last; ``exponents`` and ``values``: the leaves, of which a
    value may come more than once, by the index of the call that it is a factor in.
    """

    nodes: list[Node]
    exponents: list[Value]
    values: list[tuple[int, Value]]


@dataclass(frozen=True)
class _Made:
    is_weighted: bool
    is_sum: bool


def find(tape: Tape, softmaxes: frozenset[int]) -> dict[int, Mean]:
    """The divisions of a tape that are means, by their index, but those that are known as softmaxes."""
    made: dict[int, _Made] = {}
    means: dict[int, Mean] = {}
    for node in tape.nodes:
        if node.name in QUOTIENTS and all(_depends(each) for each in node.args[:2]):
            above, below = (made.get(id(each)) for each in node.args[:2])
            if above and below and below.is_sum and not below.is_weighted and node.index not in softmaxes:
                means[node.index] = _mean(node, made)
            continue
        found = _made(node, made)
        if found is not None:
            made.update((id(value), found) for value in node.outputs)
    return means


def _depends(argument: Any) -> bool:
    return getattr(argument, "node", None) is not None


def _made(node: Node, made: dict[int, _Made]) -> _Made | None:
    if node.name in EXPONENTIALS:
        return _Made(is_weighted=False, is_sum=False)
    inputs = [made.get(id(value)) for value in node.values]
    known = [each for each in inputs if each is not None]
    if not known:
        return None
    is_sum, is_weighted = any(each.is_sum for each in known), any(each.is_weighted for each in known)
    if node.name in BILINEAR and node.name not in QUOTIENTS | {"addcmul"} and len(inputs) == 2:
        if len(known) == 2:
            return None if all(each.is_weighted for each in known) else _Made(is_weighted, is_sum)
        return None if is_weighted else _Made(is_weighted=True, is_sum=is_sum)
    if node.name in QUOTIENTS | {"mul"} and len(inputs) == 1:
        return known[0]
    if node.name not in MOVES or len(known) < len(inputs):
        return None
    if node.name in ("sub", "rsub") and len(inputs) > 1 and not is_weighted:
        return None
    return _Made(
        is_weighted, is_sum or node.name in ("sum", "mean", "cumsum") or (node.name == "add" and len(inputs) > 1)
    )


def _mean(last: Node, made: dict[int, _Made]) -> Mean:
    nodes, exponents, values = {last.index: last}, dict[int, Any](), list[tuple[int, Any]]()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        for value in node.values:
            if node.name in EXPONENTIALS:
                exponents[id(value)] = value
            elif id(value) not in made:
                values.append((node.index, value))
            elif value.node.index not in nodes:
                nodes[value.node.index] = value.node
                waiting.append(value.node)
    return Mean([nodes[index] for index in sorted(nodes)], list(exponents.values()), values)


def shares(mean: Mean, c: Tensor, factors: Callable[[Value], int]) -> Iterator[tuple[Value, Tensor]]:
    """What the leaves of a mean get of ``c``; ``factors(value)``: of how many factors a value is a product.

    Raises:
        ValueError: of different numbers of factors.
    """
    counts = {factors(value) for _, value in mean.values} or {0}
    if len(counts) > 1:
        raise ValueError("values of different numbers of factors")
    (n,) = counts
    leaves = {(-1, id(value)): value for value in mean.exponents}
    leaves.update({(index, id(value)): value for index, value in mean.values})
    numbers = {key: value.tensor.detach().clone().requires_grad_() for key, value in leaves.items()}
    made: dict[int, Tensor] = {}
    with torch.enable_grad():
        for node in mean.nodes:

            def number(each: Any, node: Node = node) -> Any:
                if not hasattr(each, "tensor"):
                    return each
                place = -1 if node.name in EXPONENTIALS else node.index
                own = numbers.get((place, id(each)))
                return made.get(id(each), each.tensor) if own is None else own

            results = node.func(*tree_map(number, node.args), **tree_map(number, node.kwargs))
            for value, tensor in zip(node.outputs, [results] if isinstance(results, Tensor) else results, strict=True):
                made[id(value)] = tensor
        y = made[id(mean.nodes[-1].outputs[0])]
        found = torch.autograd.grad(y, list(numbers.values()), c.contiguous())
    for (place, _), value, gradient in zip(leaves, leaves.values(), found, strict=True):
        yield value, gradient * ((1 if place == -1 else n) / (n + 1))
