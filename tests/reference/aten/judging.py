"""The way back over a tape, one formula for each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.reference.aten import means
from tests.reference.aten.operations import (
    BILINEAR,
    FUNCTIONS,
    LENGTHS,
    LINEAR,
    QUOTIENTS,
    SELECTION,
    SOFTMAXES,
    STEPS,
)
from tests.reference.aten.patterns import Patterns, depends, divides, find
from tests.reference.aten.sharing import Sharing
from tests.reference.aten.tape import JudgeError, Node, Source, Tape, Value, record

Shares = Iterator[tuple[Value, Tensor]]
STEEPEST = 1e4
"""Where ``|g(x) / x|`` is larger, the output of an element-wise function is a constant (docs/design/engine.md)."""


class Recipe(Enum):
    """Which of the papers' two methods."""

    ATTNLRP = "attnlrp"
    LRP = "lrp"


@dataclass(frozen=True)
class Verdict:
    """What the judge found: the explained value, and the relevance of each source, in the order of their lookup."""

    value: Tensor
    sources: list[Source]
    relevance: list[Tensor]


def judge(
    forward: Callable[[], Tensor], choose: Callable[[Tensor], Tensor], floating: list[Tensor], recipe: Recipe
) -> Verdict:
    """Run ``forward`` and explain ``choose`` of its output.

    Args:
        forward: the model on its inputs; gives its logits.
        choose: one number of them, or a sum of some.
        floating: the floating-point tensors among the inputs that relevance is asked of.
        recipe: AttnLRP or CP-LRP.

    Raises:
        JudgeError: relevance meets an operation that there is no formula for.
    """
    with record(floating) as tape:
        logits = forward()
    return explain(tape, logits, choose, recipe)


def explain(
    tape: Tape,
    logits: Tensor,
    choose: Callable[[Tensor], Tensor],
    recipe: Recipe,
    sources: Sequence[Source] | None = None,
) -> Verdict:
    """The relevance of a tape's sources for ``choose(logits)``; all others but ``sources`` are constants, if given."""
    sources = tape.sources if sources is None else sources
    leaf = logits.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = choose(leaf)
        (seed,) = torch.autograd.grad(value, leaf)
    last = tape.value(logits)
    if last.node is None:
        raise JudgeError("the output does not depend on a source")
    with torch.no_grad():
        found = _Way(tape, recipe, sources).back(last, seed)
        zero = torch.zeros(())
        relevance = [s.value.tensor * found.get(id(s.value), zero) for s in sources]
    return Verdict(value.detach(), list(sources), relevance)


class _Way:
    def __init__(self, tape: Tape, recipe: Recipe, sources: Sequence[Source]) -> None:
        self.tape, self.recipe = tape, recipe
        self.patterns: Patterns = find(tape)
        self.carrying = {id(source.value) for source in sources}
        self.sharing = Sharing(self.patterns, self.carries, gated=recipe is Recipe.LRP)
        for node in tape.nodes:
            is_softmax = node.name in SOFTMAXES | {"logsumexp"} or node.index in self.patterns.softmaxes
            mean = self.patterns.means.get(node.index)
            is_softmax |= (mean is not None and not mean.values) or node.index in self.patterns.logarithms
            if (
                not (recipe is Recipe.LRP and is_softmax)
                and not self._is_constant(node)
                and any(map(self.carries, node.values))
            ):
                self.carrying |= {id(value) for value in node.outputs if value.node is not None}
                self.sharing.add(node)

    def carries(self, value: Any) -> bool:
        """Whether relevance can go on to an argument."""
        return isinstance(value, Value) and id(value) in self.carrying

    def _is_constant(self, node: Node) -> bool:
        """Whether a call makes a normaliser or a step; one over a function of a tensor is a function."""
        if self.carries(self.patterns.functions.get(node.index)):
            return False
        if node.name in QUOTIENTS:
            return not self.carries(node.args[0])
        return node.name in STEPS or divides(node)

    def back(self, last: Value, seed: Tensor) -> dict[int, Tensor]:
        """``c`` of every value that relevance reaches, by its identity."""
        found = {id(last): seed}
        for node in reversed(self.tape.nodes):
            c = [found.get(id(value)) for value in node.outputs]
            if node.name == "source" or all(each is None for each in c):
                continue
            if not any(self.carries(value) for value in node.outputs):
                continue
            given = [
                torch.zeros_like(value.tensor) if each is None else each
                for value, each in zip(node.outputs, c, strict=True)
            ]
            for value, share in self._shares(node, given):
                if not bool(torch.isfinite(share).all()):
                    raise JudgeError(f"{node}: relevance is not finite")
                found[id(value)] = found[id(value)] + share if id(value) in found else share
        return found

    # -------------------------------------------------------------------- one call

    def _shares(self, node: Node, c: list[Tensor]) -> Shares:
        name, inputs = node.name, [value for value in node.values if self.carries(value)]
        if node.index in self.patterns.softmaxes:
            u, s = self.patterns.softmaxes[node.index]
            yield u, _softmax(s.tensor, c[0], _axis(node))
        elif node.index in self.patterns.shares:  # the plain gradient, as the softmax's is
            a, b = node.args[:2]
            yield a, _summed(c[0] / b.tensor, a.tensor)
            yield b, _summed(-c[0] * a.tensor / b.tensor**2, b.tensor)
        elif node.index in self.patterns.logarithms:
            yield from _logsumexp(self.patterns.logarithms[node.index], c[0])
        elif node.index in self.patterns.means and self.recipe is Recipe.ATTNLRP:
            yield from means.shares(self.patterns.means[node.index], c[0], self.sharing.factors)
        elif node.index in self.patterns.functions and self.carries(self.patterns.functions[node.index]):
            base, filled = self.patterns.functions[node.index], self.patterns.filled.get(node.index)
            given = c[0] if filled is None else c[0].masked_fill(filled, 0.0)
            yield base, _identity(base.tensor, node.outputs[0].tensor, given)
        elif name in SOFTMAXES:
            yield inputs[0], _softmax(node.outputs[0].tensor, c[0], node.args[1])
        elif name == "_log_softmax":
            s = node.outputs[0].tensor.exp()  # of x less its logsumexp, which has the rule for softmax
            taken = 0 if self.recipe is Recipe.LRP else s * c[0].sum(node.args[1], keepdim=True)
            yield inputs[0], c[0] - taken
        elif name == "logsumexp":
            total = node.outputs[0].tensor, c[0]
            if not (len(node.args) > 2 and node.args[2]):
                total = [each.unsqueeze(node.args[1][0]) for each in total]
            yield inputs[0], (inputs[0].tensor - total[0]).exp() * total[1]
        elif name == "glu":
            yield inputs[0], _gated_half(inputs[0].tensor, c[0], _axis_of_halves(node), self.sharing.of_glu(node))
        elif name == "grid_sampler_2d":  # the grid chooses, and is a constant
            if self.carries(node.args[0]):
                yield from _adjoint(node, [node.args[0]], c, 0)
        elif name == "linalg_solve_triangular":
            yield from _forward_substitution(node, c[0], self.sharing.of_solve(node))
        elif name in NORMS:
            yield from NORMS[name](node, c[0])
        elif name in LENGTHS:
            yield from _adjoint(node, inputs, [c[0] / LENGTHS[name]])
        elif name in FUNCTIONS:
            yield from self._function(node, inputs, c[0])
        elif name in BILINEAR:
            yield from self._product(node, c[0])
        elif name in LINEAR:
            _refuse_unless_linear(node, inputs)
            yield from _adjoint(node, inputs, c)
        elif name in SELECTION or (name == "scatter_reduce" and node.args[4] != "prod"):
            yield from _adjoint(node, inputs, c)
        else:
            raise JudgeError(f"no formula for {name}")

    def _function(self, node: Node, inputs: list[Value], c: Tensor) -> Shares:
        if len(inputs) != 1 or inputs[0] is not node.args[0]:
            raise JudgeError(f"no formula for {node.name} of several tensors that depend on the input")
        yield inputs[0], _identity(inputs[0].tensor, node.outputs[0].tensor, c)

    def _product(self, node: Node, c: Tensor) -> Shares:
        first, second = BILINEAR[node.name]
        if node.name in QUOTIENTS and self.sharing.gates.is_logistic(node.args[1]):
            raise JudgeError("no formula for a division by an exponential and a number")
        if node.index in self.patterns.threes:
            raise JudgeError("no formula for a product of a product and a function of one of its factors")
        shares = self.sharing.split(node)
        for position, argument in enumerate(node.args):
            if not self.carries(argument):
                continue
            share = dict(zip((first, second), shares, strict=True)).get(position, 1.0)
            if not share:
                continue
            ((value, whole),) = _adjoint(node, [argument], [c], position)
            yield value, share * whole


# ------------------------------------------------------------------------------ formulas


def _identity(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    """R_x = R_y."""
    is_steep = (x == 0) | (y.abs() > STEEPEST * x.abs())
    return torch.where(is_steep, 0.0, c * y / torch.where(is_steep, 1.0, x))


def _axis_of_halves(node: Node) -> int:
    return int(node.args[1]) if len(node.args) > 1 else -1


def _gated_half(x: Tensor, c: Tensor, axis: int, share: float) -> Tensor:
    """``a · sigmoid(b)``, the halves of ``x``: a share to ``a``, the rest by the identity rule to ``b``."""
    a, b = x.chunk(2, axis)
    return torch.cat([share * c * b.sigmoid(), _identity(b, b.sigmoid(), (1 - share) * c * a)], axis)


def _softmax(s: Tensor, c: Tensor, axis: int) -> Tensor:
    return s * (c - (s * c).sum(axis, keepdim=True))


def _axis(node: Node) -> int:
    """The axis of a written-out softmax."""
    value = node.args[1] if node.name != "exp" else node.args[0]
    if value.node.name == "_log_softmax":
        return int(value.node.args[1])
    if node.name == "exp":
        value = value.node.args[1]
    while value.node.name not in ("sum", "logsumexp"):
        value = value.node.values[0]
    axes = value.node.args[1]
    if len(axes) != 1:
        raise JudgeError("no formula for a softmax over several axes")
    return int(axes[0])


def _layer_norm(node: Node, c: Tensor) -> Shares:
    x, shape, weight = node.args[:3]
    axes = tuple(range(-len(shape), 0))
    scaled = (c if weight is None else c * weight.tensor) * node.outputs[2].tensor
    yield x, scaled - scaled.mean(axes, keepdim=True)


def _group_norm(node: Node, c: Tensor) -> Shares:
    x, weight, _, n, channels, _, groups = node.args[:7]
    if depends(weight) or depends(node.args[2]):
        raise JudgeError("no formula for a group norm whose weights depend on the input")
    scaled = c if weight is None else c * weight.tensor.reshape(1, channels, *[1] * (c.ndim - 2))
    grouped = scaled.reshape(n, groups, -1) * node.outputs[2].tensor.reshape(n, groups, 1)
    yield x, (grouped - grouped.mean(-1, keepdim=True)).reshape(c.shape)


def _rms_norm(node: Node, c: Tensor) -> Shares:
    x, _, weight = node.args[:3]
    yield x, (c if weight is None else c * weight.tensor) * node.outputs[1].tensor


def _batch_norm(node: Node, c: Tensor) -> Shares:
    x, weight, _, _, variance = node.args[:5]
    training, eps = (node.args[5], node.args[7]) if node.name == "native_batch_norm" else (False, node.args[6])
    if training:
        raise JudgeError("no formula for a batch norm in training")
    scale = (variance.tensor + eps).rsqrt() * (1.0 if weight is None else weight.tensor)
    yield x, c * scale.reshape(1, -1, *[1] * (c.ndim - 2))


def _forward_substitution(node: Node, c: Tensor, share: float) -> Shares:
    """``x_i = (b_i − Σ_j a_ij x_j) / a_ii``, row after row; ``a_ij`` gets a share of each
    product, and ``a_ii`` is a constant."""
    a, b = node.args[:2]
    if not node.kwargs.get("left", True):
        raise JudgeError("no formula for a triangular solve from the right")
    lower = torch.tril(a.tensor) if not node.kwargs["upper"] else torch.triu(a.tensor)
    x, c, of_a = node.outputs[0].tensor, c.clone(), torch.zeros_like(a.tensor)
    rows = list(range(a.tensor.shape[-1]))
    for i in rows if node.kwargs["upper"] else reversed(rows):
        if not node.kwargs.get("unitriangular"):
            c[..., i, :] /= lower[..., i, i, None]
        for j in rows:
            if j != i:
                of_a[..., i, j] = -share * (x[..., j, :] * c[..., i, :]).sum(-1)
                c[..., j, :] -= (1 - share) * lower[..., i, j, None] * c[..., i, :]
    if depends(a):
        yield a, of_a * (lower != 0)
    if depends(b):
        yield b, c


NORMS: dict[str, Callable[[Node, Tensor], Shares]] = {
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "_fused_rms_norm": _rms_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
}


# ------------------------------------------------------------------- linear operations


def _with(node: Node, leaves: dict[int, Tensor], position: int | None = None) -> list[Tensor]:
    """The outputs of a call with other numbers for some values (only at one position, if given)."""

    def number(value: Any) -> Any:
        return leaves.get(id(value), value.tensor) if isinstance(value, Value) else value

    if position is None:
        args = tree_map(number, node.args)
    else:
        args = tuple(
            number(v) if i == position else tree_map(lambda each: each.tensor if isinstance(each, Value) else each, v)
            for i, v in enumerate(node.args)
        )
    made = node.func(*args, **tree_map(number, node.kwargs))
    return [made] if isinstance(made, Tensor) else list(made)


def _adjoint(node: Node, inputs: list[Value], c: list[Tensor], position: int | None = None) -> Shares:
    """The transpose of a linear operation, applied to ``c``."""
    unique = list({id(value): value for value in inputs}.values())
    leaves = {id(value): value.tensor.detach().clone().requires_grad_() for value in unique}
    with torch.enable_grad():
        made = _with(node, leaves, position)
        pairs = [(y, each.contiguous()) for y, each in zip(made, c, strict=True) if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
        )
    for value, share in zip(unique, found, strict=True):
        if share is not None:
            yield value, share


def _logsumexp(calls: list[Node], c: Tensor) -> Shares:
    """The gradient of the logarithm of a sum of exponentials with respect to the exponents: a softmax, times ``c``."""
    scores = calls[0].values[0]
    x = scores.tensor.detach().clone().requires_grad_()
    made, of = x, scores
    with torch.enable_grad():
        for node in calls:
            (made,) = _with(node, {id(of): made})
            of = node.outputs[0]
        (share,) = torch.autograd.grad(made, x, c)
    yield scores, share


def _refuse_unless_linear(node: Node, inputs: list[Value]) -> None:
    """f(x + d) − f(x) = f(d) − f(0), where these are finite; once for each call with the same constants."""
    settings, _ = tree_flatten((node.args, node.kwargs))
    call = (node.func, *(_described(each, inputs) for each in settings))
    if call in CHECKED:
        return
    generator = torch.Generator().manual_seed(node.index)
    x = {id(value): value.tensor for value in inputs}
    d = {key: torch.randn(t.shape, generator=generator, dtype=t.dtype) for key, t in x.items()}
    zero = {key: torch.zeros_like(t) for key, t in x.items()}
    both = {key: x[key] + d[key] for key in x}
    for whole, base, step, nothing in zip(*(_with(node, each) for each in (both, x, d, zero)), strict=True):
        if not whole.is_floating_point():
            continue
        error = (whole - base) - (step - nothing)
        size = sum(t.abs() for t in (whole, base, step, nothing)) + 1.0  # of what cancels
        error = (error.abs() / size)[torch.isfinite(size)]
        if error.numel() and float(error.max()) > 1e-9:
            raise JudgeError(f"{node.name} is not linear here")
    CHECKED.add(call)


CHECKED: set[Any] = set()
"""The linear calls that were found to be linear."""


def _described(value: Any, inputs: list[Value]) -> Any:
    """What a call's linearity hangs on, of one argument."""
    if not isinstance(value, Value):
        return repr(value)
    return (tuple(value.tensor.shape), str(value.tensor.dtype), any(value is each for each in inputs))


def _summed(c: Tensor, like: Tensor) -> Tensor:
    """Summed over what was broadcast."""
    return c.sum_to_size(like.shape)
