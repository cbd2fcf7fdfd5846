"""Which factor of a product is the gate, for CP-LRP's rule that the signal takes all.

The output of an element-wise non-linearity is marked as a gate, and the mark stays with it as far as it makes no
difference where a product is written: moves and selections commute with it, ``c (g · s) = (c g) · s``, and
``(g + h) · s = g · s + h · s``. So what is cast, reshaped, chosen, put together, scaled, shifted by constants, or
summed of gates is a gate. A layer with weights ends it: what it makes is something new.

Of two gates the stronger is the gate of the other: an exponential (also under the uniform rule: ``engine/_factors.py``)
before a function that is of one sign everywhere (a sigmoid, a softmax, a softplus: they say how much, and nothing else)
before any other (SiLU, GELU, tanh), which may be the signal itself. So what the other factor was computed from is no
gate of it: in Mamba, ``x`` is the output of a SiLU, and ``B`` is made of ``x``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import rules
from lrpx.engine._nodes import NORM, OWN, SCALES, SHAPES, kind
from lrpx.engine._tensors import CONSTANT, any_carries, carries, is_tensor, single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lrpx.recipes import Recipe

GATE = "_lrpx_gate"
EXPONENTS = "_lrpx_exponents"
"""The attribute of what is made of exponentials: how (``engine/_notes.py``)."""
KNOWN = "_lrpx_gate_is_known"
"""The attribute of a sum with a number, whose strength as a gate its numbers have told, and not what it was made of."""
OF_ONE_SIGN = frozenset(
    """sigmoid hardsigmoid softplus log_sigmoid softmax erfc cosh i0 special_expit special_erfc special_erfcx
    special_ndtr special_log_ndtr special_i0 special_i0e""".split()
)
"""Functions that are of one sign everywhere."""
SAME = SHAPES | SCALES | {OWN, NORM}
"""Nodes whose result is what they are made of, in another shape or scale, if that is one tensor."""

BEGUN = "lrpx gate begun"
"""The mark of a node that looks like a scaling, and is a non-linearity: a square, or a product with a mask of signs."""

WEAK, SURE, EXPONENTIAL = 1, 2, 3
"""The strengths of gates: a non-linearity, one that is of one sign everywhere, and an exponential."""


def takes_all(recipe: Recipe) -> bool:
    """Whether it is CP-LRP's rule that holds for products."""
    return recipe.product is rules.signal_take_all


def mark_gate(recipe: Recipe, name: str, value: Tensor) -> Tensor:
    """Mark the output of the non-linearity called ``name`` as a possible gate."""
    if takes_all(recipe):
        setattr(value, GATE, max(gate_strength(value), SURE if name in OF_ONE_SIGN else WEAK))
    return value


def mark_begun(recipe: Recipe, value: Tensor) -> Tensor:
    """Mark the node of ``value``, a gate that is written as a scaling: what it was made of is none."""
    node: Any = value.grad_fn
    if takes_all(recipe) and node is not None:
        node.metadata[BEGUN] = True
    return value


def mark_written(recipe: Recipe, value: Tensor, root: Tensor, op: Callable[..., Any]) -> Tensor:
    """Mark ``value = op(root)``, a non-linearity that the model has written out."""
    if takes_all(recipe):
        setattr(value, GATE, max(gate_strength(value), SURE if _is_of_one_sign(root, op) else WEAK))
    return value


def mark_shifted(recipe: Recipe, value: Tensor, root: Tensor, op: Callable[..., Any]) -> None:
    """Mark ``value = op(root)``, to which a number was added: of one sign now, as ``1 + tanh(x)`` is, or no longer, as
    ``2 sigmoid(2 x) − 1`` is tanh."""
    if takes_all(recipe):
        setattr(value, GATE, SURE if _is_of_one_sign(root, op) else WEAK)
        setattr(value, KNOWN, True)


def mark_relu(recipe: Recipe, value: Tensor, x: Tensor) -> Tensor:
    """Mark ``value``, a (leaky) ReLU of ``x`` that the model has written out."""
    if takes_all(recipe) and carries(value):
        setattr(value, GATE, max(gate_strength(value), gate_strength(x), WEAK))
        mark_begun(recipe, value)
    return value


def _is_of_one_sign(root: Tensor, op: Callable[..., Any]) -> bool:
    """Whether a function has one sign far below zero and far above it, and at zero, where it is not nothing."""
    with _disable_current_modes():  # numbers, also where a compiler traces the model
        below, at, above = (op(single(root, x)) for x in (-5.0, 0.0, 5.0))
        return any(bool(((sign * below >= 0) & (sign * at > 0) & (sign * above >= 0)).all()) for sign in (1, -1))


def any_gate(values: Iterable[Any]) -> bool:
    """Whether a gate is among values, also in lists."""
    for value in values:
        if is_tensor(value):
            if getattr(value, GATE, None) is not None:
                return True
        elif isinstance(value, (tuple, list)) and any_gate(value):
            return True
    return False


def gate_strength(value: Tensor) -> int:
    """0 for no gate, or how strong a gate it is."""
    return int(getattr(value, GATE, 0))


def put_gate(recipe: Recipe, out: Any, strength: int) -> Any:
    """``out``, one tensor or several, as gates of a strength; none under a rule for which it is none."""
    is_gate = strength >= (WEAK if takes_all(recipe) else EXPONENTIAL)
    for value in out if isinstance(out, (tuple, list)) else (out,):
        if is_gate and carries(value):
            setattr(value, GATE, strength)
        elif is_tensor(value):  # perhaps changed in place
            vars(value).pop(GATE, None)
            if hasattr(value, EXPONENTS):  # no gate, but what is made of it is looked at
                setattr(value, GATE, 0)
    return out


def told(recipe: Recipe, out: Tensor) -> Tensor:
    """``out``, marked by its handler, whatever it was put together of."""
    if takes_all(recipe) and carries(out):
        setattr(out, KNOWN, True)
    return out


def was_known(out: Any) -> bool:
    """Whether what a call has made is marked by its handler already; asked once."""
    return is_tensor(out) and hasattr(out, KNOWN) and bool(vars(out).pop(KNOWN))


def keep_gate(recipe: Recipe, out: Any, *inputs: Any) -> Any:
    """``out``, made of ``inputs`` by a selection or a sum, or by a product with constants: a gate, if all of them that
    depend on the input are."""
    if getattr(out, GATE, None) is None and not any_gate(inputs):  # nearly always
        return out
    if was_known(out):
        return out
    strength = weakest_gate(inputs)
    if is_tensor(out) and out is not inputs[0]:  # perhaps a function that is known better
        strength = max(strength, gate_strength(out))
    return put_gate(recipe, out, strength)


def written(recipe: Recipe, x: Tensor) -> None:
    """``x`` was changed in place; if it is a part of another, that is as strong a gate as the weakest of its parts."""
    base = x._base
    node = None if base is None else base.grad_fn
    if base is None or node is None:
        return
    strength, before = gate_strength(x), node.next_functions[0][0]
    if before is not None and x.numel() != base.numel():
        strength = min(strength, gate_strength(base))
    put_gate(recipe, base, strength)


def weakest_gate(inputs: Any) -> int:
    """The strength of the weakest gate among what depends on the input, also in lists."""
    return _weakest(inputs) or 0


def _weakest(values: Any) -> int | None:
    """The same; None where nothing depends on the input."""
    found: int | None = None
    for value in values:
        if type(value) is Tensor:
            strength = getattr(value, GATE, 0) if value.requires_grad and not hasattr(value, CONSTANT) else None
        elif isinstance(value, (tuple, list)):
            strength = _weakest(value)
        else:
            strength = gate_strength(value) if any_carries(value) else None
        if strength is not None and (found is None or strength < found):
            found = strength
    return found


def gate_of(a: Tensor, b: Tensor) -> Tensor | None:
    """Which of two factors is the gate, if one is."""
    of_a, of_b = gate_strength(a), gate_strength(b)
    if of_a == of_b:
        return None
    gate, signal = (a, b) if of_a > of_b else (b, a)
    return None if gate_strength(gate) == WEAK and _is_made_of(signal, gate) else gate


def _is_made_of(x: Tensor, gate: Tensor) -> bool:
    """Whether a tensor was computed from another, in whatever shape or scale that is. Nodes of the graph that are older
    than the other one need not be looked at."""
    if gate.grad_fn is None:
        return False
    edge: tuple[Any, int] = gate.grad_fn, gate.output_nr
    edges = {edge}
    while kind(edge[0]) in SAME and BEGUN not in edge[0].metadata:
        made_of = [each for each in edge[0].next_functions if each[0] is not None]
        if len(made_of) != 1:
            break
        (edge,) = made_of
        edges.add(edge)
    oldest = min([node._sequence_nr() for node, _ in edges])
    waiting: list[tuple[Any, int]] = [(x.grad_fn, x.output_nr)]
    seen = set(waiting)
    while waiting:
        edge = waiting.pop()
        if edge in edges:
            return True
        if edge[0] is not None and edge[0]._sequence_nr() > oldest:
            new = [each for each in edge[0].next_functions if each not in seen]
            seen.update(new)
            waiting += new
    return False


def move_gate(out: Any, x: Any) -> Any:
    """``out``, which is ``x`` cast or in another shape: a gate stays a gate."""
    if is_tensor(x):
        strength = getattr(x, GATE, None)
        if strength is not None:
            setattr(out, GATE, strength)
    return out
