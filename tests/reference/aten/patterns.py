"""What written-out functions compute, seen on the tape.

- A function of one tensor: every operation between ``base`` and the result is element-wise; or one in pieces
  (``where``).
- A softmax: ``e / sum(e)`` with ``e = exp(u)``, or ``exp(log_softmax(u))``, or ``exp(u - logsumexp(u))``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter

from tests.reference.aten import means
from tests.reference.aten.operations import (
    BILINEAR,
    EXPONENTIALS,
    FUNCTIONS,
    NORMALISERS,
    QUOTIENTS,
    SAME,
    SELECTS,
    SHAPES,
    SOFTMAXES,
)
from tests.reference.aten.tape import Node, Tape, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.reference.aten.means import Mean

ARITHMETIC = frozenset("add sub rsub mul div true_divide neg addcmul where masked_fill maximum minimum".split())
"""Element-wise where their shapes are the same, beside :data:`FUNCTIONS` and :data:`SAME`."""
SHIFTS = frozenset("add sub rsub".split())
SCALES = frozenset("mul div true_divide neg".split())
CHOOSING = frozenset("mul where masked_fill maximum minimum fmax fmin index_put".split())
"""What may choose by the sign of what it is given."""
FILLS = frozenset({"masked_fill", "where"})
"""What may put a constant in some places."""
PLACES = frozenset("view _unsafe_view reshape expand unsqueeze squeeze permute transpose t slice select read".split())


@dataclass
class Patterns:
    """What was found: by the index of a node.

    ``functions``: the base of a written-out function; ``softmaxes``: the scores ``u`` and the result; ``means``: what
    is weighted by exponentials, before a division by their sum; ``logistic``: by identity, exponentials to which a
    number was added, and powers and products of these; ``sums``: what two that are added are both functions of;
    ``logarithms``: the calls from exponentials by their sum to its logarithm; ``shares``: quotients of some of a
    softmax, or sums of such, by sums of such;
    ``threes``: products of a product and a function of one of its factors; ``filled``: where what a function is of was
    filled with a constant.
    """

    functions: dict[int, Value] = field(default_factory=dict)
    softmaxes: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    means: dict[int, Mean] = field(default_factory=dict)
    logistic: set[int] = field(default_factory=set)
    sums: dict[int, Value] = field(default_factory=dict)
    logarithms: dict[int, list[Node]] = field(default_factory=dict)
    shares: set[int] = field(default_factory=set)
    threes: set[int] = field(default_factory=set)
    filled: dict[int, torch.Tensor] = field(default_factory=dict)


def find(tape: Tape) -> Patterns:
    """Look at every call of the tape."""
    found = Patterns()
    first, calls, keys = _first(tape)
    of: dict[int, frozenset[int]] = {}  # the values that a value is an element-wise function of, by id
    values: dict[int, Value] = {}
    scales: set[int] = set()
    for node in tape.nodes:
        values.update((id(value), value) for value in node.outputs)
    for node in tape.nodes:
        _find_logistic(node, found.logistic, scales)
        for value in node.outputs:
            of[id(value)] = _bases(node, value, of, first) | _moved_bases(node, value, of, first, calls, keys)
        one_over = node.name in QUOTIENTS and not depends(node.args[0])
        if node.name in QUOTIENTS | {"mul", "addcmul"} and not one_over:
            _product(node, found, of, values, first)
        elif node.name in SHIFTS and len(node.values) == 2:
            if (base := _common(node.values, of, values)) is not None:
                found.sums[node.index] = base
        elif node.name == "exp" and (scores := _normalised(node.values[0].node, first)) is not None:
            found.softmaxes[node.index] = (scores, node.outputs[0])
        elif node.name == "where" and all(map(depends, node.args[1:3])):
            _of_one(node, node.args[1:3], found, of, values)
        elif node.name == "log" and (calls_from := _from_exponentials(node)):
            found.logarithms[node.index] = calls_from
        elif node.name in FUNCTIONS or one_over:
            base = _chained(node, found, of, values)
            if base is not None:
                found.functions[node.index] = base
    found.means = means.find(tape, frozenset(found.softmaxes) | frozenset(found.functions))
    return found


def _from_exponentials(log: Node) -> list[Node]:
    """The calls from exponentials to the logarithm of their sum, in their order; none, if it is of something else."""
    calls, is_sum = [log], False
    while len(calls[-1].values) == 1 and (node := calls[-1].values[0].node) is not None:
        calls.append(node)
        if is_sum and node.name in EXPONENTIALS:
            return calls[::-1]
        if node.name not in SHAPES | {"sum", "mean"}:
            break
        is_sum |= node.name in ("sum", "mean")
    return []


def _find_logistic(node: Node, logistic: set[int], scales: set[int]) -> None:
    """Whether a call makes an exponential, one with a number, or a power or a product of such, times numbers."""
    inputs, made = node.values, {id(value) for value in node.outputs}
    constants = [each for each in node.args if isinstance(each, Value) and each.node is None]
    if node.name in EXPONENTIALS:
        scales |= made
    if not inputs or len(made) > 1 or any(each.tensor.ndim for each in constants):
        return
    is_one_over = node.name in QUOTIENTS and not depends(node.args[0])
    is_scaling = len(inputs) == 1 and node.name in SCALES | SAME and not is_one_over
    is_shift = len(inputs) == 1 and node.name in SHIFTS
    is_power = node.name in ("sqrt", "square", "mul") or (node.name == "pow" and not divides(node))
    if all(id(each) in logistic for each in inputs) and (is_scaling or is_shift or is_power):
        logistic |= made
    elif id(inputs[0]) in scales and is_scaling:
        scales |= made
    elif id(inputs[0]) in scales and is_shift:
        logistic |= made


def _first(tape: Tape) -> tuple[dict[int, int], dict[Any, Node], dict[int, tuple[Any, ...]]]:
    """By the identity of a value that of the first one which the same call on the same values made; and what tells
    calls apart, with the first of each, and by the index of a call."""
    first: dict[int, int] = {}
    calls: dict[Any, Node] = {}
    keys: dict[int, tuple[Any, ...]] = {}

    def key(value: Any) -> Any:
        if not isinstance(value, Value):
            return repr(value)
        if value.node is not None:
            return first[id(value)]
        tensor = value.tensor
        if not tensor.is_floating_point() and not tensor.is_complex():
            return (str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
        if tensor.numel() > 1:
            return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        return (str(tensor.dtype), tuple(tensor.shape), *tensor.flatten().tolist())

    for node in tape.nodes:
        call = (node.name, *map(key, tree_iter((node.args, node.kwargs))))
        keys[node.index] = call
        twin = node if node.name == "source" else calls.setdefault(call, node)
        for mine, other in zip(node.outputs, twin.outputs, strict=True):
            first[id(mine)] = id(other)
    return first, calls, keys


MOVING = (SHAPES | SELECTS) - {"topk", "sort", "tril", "triu", "masked_fill"} | {"read"}
"""What gives some of the numbers of a tensor, in other places."""


def _moved_bases(
    node: Node,
    value: Value,
    of: dict[int, frozenset[int]],
    first: dict[int, int],
    calls: dict[Any, Node],
    keys: dict[int, tuple[Any, ...]],
) -> frozenset[int]:
    """Functions commute with moves: the function of a tensor, moved, is one of the tensor that was moved so, if a call
    does that."""
    if node.name not in MOVING or len(node.values) != 1:
        return frozenset()
    (before,), key = node.values, keys[node.index]
    found = set()
    for base in of[id(before)]:
        twin = calls.get(tuple(base if each == first[id(before)] else each for each in key))
        if twin is not None:
            found.add(first[id(twin.outputs[value.number])])
    return frozenset(found)


def _bases(node: Node, value: Value, of: dict[int, frozenset[int]], first: dict[int, int]) -> frozenset[int]:
    own = frozenset([first[id(value)]])
    inputs = node.values
    if node.name not in FUNCTIONS | ARITHMETIC | SAME or not inputs or len(node.outputs) != 1:
        return own
    if any(each.tensor.shape != value.tensor.shape for each in inputs):
        return own
    if node.name in SHIFTS and any(
        isinstance(each, Value) and each.node is None and each.tensor.ndim for each in node.args
    ):
        return own  # a tensor that is added is a bias
    return own | frozenset.intersection(*(of[id(each)] for each in inputs))


def _product(
    node: Node, found: Patterns, of: dict[int, frozenset[int]], values: dict[int, Value], first: dict[int, int]
) -> None:
    a, b = (node.args[i] for i in BILINEAR[node.name])
    if not (depends(a) and depends(b)) or (node.name == "addcmul" and depends(node.args[0])):
        return
    if node.name in QUOTIENTS and (scores := _written_softmax(a, b, first)) is not None:
        found.softmaxes[node.index] = (scores, node.outputs[0])
        return
    if node.name in QUOTIENTS and _is_share(a, b, found.shares):
        found.shares.add(node.index)
        return
    _of_one(node, (a, b), found, of, values)
    for x, other in ((a, b), (b, a)) if node.index not in found.functions else ():
        factors = [each for each in x.node.args[:2] if depends(each)] if x.node.name == "mul" else []
        factors = [each for each in factors * (len(factors) == 2) if first[id(each)] != first[id(other)]]
        bases = [(_common((each, other), of, values), each) for each in factors]
        if any(base is not None and FUNCTIONS & _between((each, other), base) for base, each in bases):
            found.threes.add(node.index)


def _of_one(
    node: Node, both: Sequence[Value], found: Patterns, of: dict[int, frozenset[int]], values: dict[int, Value]
) -> None:
    """Whether a call on two tensors is a function of one that both are a function of."""
    if (base := _common(both, of, values)) is not None:
        found.functions[node.index] = base


def _between(values: Sequence[Value], base: Value) -> set[str]:
    """The names of the calls from a base to what is made of it."""
    found, waiting = set(), list(values)
    while waiting:
        value = waiting.pop()
        if value.node is not None and value.index > base.index:
            found.add(value.node.name)
            waiting += value.node.values
    return found


def _common(both: Sequence[Value], of: dict[int, frozenset[int]], values: dict[int, Value]) -> Value | None:
    a, b = both
    common = of[id(a)] & of[id(b)] if a.tensor.shape == b.tensor.shape else frozenset()
    return min((values[each] for each in common), key=lambda v: (v.index, v.number)) if common else None


def _chained(node: Node, found: Patterns, of: dict[int, frozenset[int]], values: dict[int, Value]) -> Value | None:
    """The base of a function of a function, ``log(1 + exp x)``, or of a tensor plus a number: ``relu6(x + 3)``."""
    value, shifted, filled = node.values[0], False, torch.zeros((), dtype=torch.bool)
    while value.node.name in SCALES | SHIFTS | SAME | FILLS and len(value.node.values) == 1:
        before = value.node.values[0]
        others = [each for each in value.node.args if isinstance(each, Value) and each.node is None]
        is_bias = value.node.name in SHIFTS and any(each.tensor.ndim for each in others)
        if is_bias or (value.node.name in QUOTIENTS and not depends(value.node.args[0])):
            break
        if before.tensor.shape != value.tensor.shape or _root_of_kink(value) is not None:
            break
        shifted |= value.node.name in SHIFTS
        if value.node.name in FILLS:
            filled = filled | (value.tensor != before.tensor)
        value = before
    if filled.any():
        found.filled[node.index] = filled
    inner = value.node
    if len(node.values) != 1 or (divides(node) and not shifted and id(node.values[0]) not in found.logistic):
        return None
    if inner.index in found.functions:
        return found.functions[inner.index]
    if inner.name in FUNCTIONS and len(inner.values) == 1:
        return inner.values[0]
    root = _root_of_kink(value)
    if root is not None:
        return root
    if inner.name in SHIFTS and len(inner.values) == 2 and len(of[id(value)]) > 1 and not divides(node):
        return min((values[each] for each in of[id(value)]), key=lambda v: (v.index, v.number))  # a sum of functions
    return value if shifted and not divides(node) else None  # one over what is no function is a normaliser


def _root_of_kink(value: Value) -> Value | None:
    """What a value is a (leaky) ReLU of that was written as a selection or with a mask: one slope where that is above
    zero, and another below."""
    node = value.node
    if node.name in ("amax", "amin", "max", "min") and node.values[0].node.name in ("stack", "cat"):
        inputs = node.values[0].node.values
        if len(inputs) != 1 or node.values[0].tensor.numel() != 2 * inputs[0].tensor.numel():
            return None
    elif node.name in CHOOSING and len(node.outputs) == 1:
        inputs = node.values
    else:
        return None
    roots = {id(root): root for root in (_back(each, (SCALES - QUOTIENTS) | SAME) for each in inputs)}
    if len(roots) != 1:
        return None
    (root,) = roots.values()
    x, y = root.tensor.reshape(-1), value.tensor.reshape(-1)
    if x.shape != y.shape or x.is_complex():
        return None
    slopes = [y[side] / x[side] for side in (x > 0, x < 0)]
    if any(each.numel() and not torch.allclose(each, each[:1], rtol=1e-12, atol=0) for each in slopes):
        return None
    up, down = (float(each[0]) if each.numel() else 0.0 for each in slopes)
    return root if abs(up - down) > 1e-9 and root.tensor.shape == value.tensor.shape else None


def divides(node: Node) -> bool:
    """Whether a call makes what a norm divides by, if it is no function."""
    exponent = node.args[1] if node.name == "pow" else 0
    is_negative = not isinstance(exponent, Value) and exponent < 0
    return node.name in NORMALISERS | QUOTIENTS or is_negative


def depends(value: object) -> bool:
    """Whether an argument is a tensor that depends on a source."""
    return isinstance(value, Value) and value.node is not None


def _back(value: Value, names: frozenset[str]) -> Value:
    """Back through operations of these names that have one input that depends on a source."""
    while value.node is not None and value.node.name in names and len(value.node.values) == 1:
        value = value.node.values[0]
    return value


def _written_softmax(e: Value, total: Value, first: dict[int, int]) -> Value | None:
    total = _back(total, PLACES | SAME)
    if total.node.name != "sum" or e.node.name != "exp" or first[id(total.node.values[0])] != first[id(e)]:
        return None
    return e.node.values[0]


CHOOSES = SELECTS | SAME | PLACES | frozenset("where masked_fill scatter _reshape_alias mul div cat stack".split())
"""What may choose some of a softmax, scale them and put them together."""
ADDS_UP = frozenset("sum mean add cumsum linalg_vector_norm clamp clamp_min".split())
"""What may add them up, beside a number or a bound; the 1-norm is a sum of what is not negative."""


def _is_share(a: Value, total: Value, shares: set[int]) -> bool:
    """Whether some of a softmax, or a sum of such, is divided by a sum of some of the same; or of what such a division
    has given (``shares``)."""
    softmax, is_sum = _sum_of_softmax(total, shares)
    return is_sum and softmax is not None and softmax is _sum_of_softmax(a, shares)[0]


def _sum_of_softmax(value: Value, shares: set[int]) -> tuple[Value | None, bool]:
    """The softmax of some of which a value is a sum, if it is of nothing else; and whether anything was added up."""
    found, is_sum, waiting = dict[int, Value](), False, [value]
    while waiting:
        value = waiting.pop()
        if value.node is None:
            return None, False
        if value.node.name in SOFTMAXES or value.node.index in shares:
            found[id(value)] = value
            continue
        made_of = [each for each in value.node.values if depends(each)]
        is_product = value.node.name in ("mul", "div") and len(made_of) > 1
        is_norm = value.node.name == "linalg_vector_norm" and value.node.args[1] != 1
        if value.node.name not in CHOOSES | ADDS_UP or is_product or is_norm:
            return None, False
        is_sum = is_sum or value.node.name in ADDS_UP - {"clamp", "clamp_min"}
        waiting += made_of
    return (next(iter(found.values())), is_sum) if len(found) == 1 else (None, False)


def _normalised(node: Node, first: dict[int, int]) -> Value | None:
    """The scores whose log-softmax a call gives."""
    if node.name == "_log_softmax":
        return node.args[0]
    if node.name == "sub" and all(map(depends, node.args[:2])):
        total = _back(node.args[1], PLACES | SAME).node
        if total is not None and total.name == "logsumexp" and first[id(total.args[0])] == first[id(node.args[0])]:
            return node.args[0]
    return None
