"""What written-out functions compute, seen on the tape.

- A function of one tensor: every operation between ``base`` and the result is element-wise.
- A softmax: ``e / sum(e)`` with ``e = exp(u)``, or ``exp(log_softmax(u))``.
- A norm: a factor that is one over a standard deviation, root mean square or length of the other factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_iter

from tests.reference.aten.operations import BILINEAR, FUNCTIONS, SAME
from tests.reference.aten.tape import Node, Tape, Value

if TYPE_CHECKING:
    from torch import Tensor

ARITHMETIC = frozenset("add sub rsub mul div true_divide neg addcmul where masked_fill maximum minimum".split())
"""Element-wise where their shapes are the same, beside :data:`FUNCTIONS` and :data:`SAME`."""
SUMS = frozenset("sum mean".split())
STATISTICS = frozenset("var std var_mean std_mean linalg_vector_norm norm".split())
EXTREMES = frozenset("amax max aminmax".split())
LINEAR_MAPS = frozenset("mm bmm mv".split())
EVEN = frozenset("pow square abs".split())
PLACES = frozenset("view _unsafe_view reshape expand unsqueeze squeeze permute transpose t slice select read".split())


@dataclass
class Patterns:
    """What was found: by the index of a node.

    ``functions``: the base of a written-out function; ``softmaxes``: the scores ``u`` and the axis;
    ``norms``: the positions (0 or 1) of the factor that is held constant.
    """

    functions: dict[int, Value] = field(default_factory=dict)
    softmaxes: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    norms: dict[int, int] = field(default_factory=dict)


def find(tape: Tape) -> Patterns:
    """Look at every call of the tape."""
    found = Patterns()
    first = _first(tape)
    of: dict[int, frozenset[int]] = {}  # the values that a value is an element-wise function of, by id
    values: dict[int, Value] = {}
    for node in tape.nodes:
        for value in node.outputs:
            values[id(value)] = value
            of[id(value)] = _bases(node, value, of, first)
        if node.name in ("mul", "div", "true_divide", "addcmul"):
            _product(node, found, of, values, first)
        elif node.name == "exp" and node.values[0].node.name == "_log_softmax":
            found.softmaxes[node.index] = (node.values[0].node.args[0], node.outputs[0])
        elif node.name in FUNCTIONS:
            base = _chained(node, found)
            if base is not None:
                found.functions[node.index] = base
    return found


def _first(tape: Tape) -> dict[int, int]:
    """By the identity of a value that of the first one which the same call on the same values made."""
    first: dict[int, int] = {}
    calls: dict[Any, Node] = {}

    def key(value: Any) -> Any:
        if not isinstance(value, Value):
            return repr(value)
        if value.node is not None:
            return first[id(value)]
        tensor = value.tensor
        if tensor.numel() > 1:
            return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        return (str(tensor.dtype), tuple(tensor.shape), *tensor.flatten().tolist())

    for node in tape.nodes:
        call = (node.name, *map(key, tree_iter((node.args, node.kwargs))))
        twin = node if node.name == "source" else calls.setdefault(call, node)
        for mine, other in zip(node.outputs, twin.outputs, strict=True):
            first[id(mine)] = id(other)
    return first


def _bases(node: Node, value: Value, of: dict[int, frozenset[int]], first: dict[int, int]) -> frozenset[int]:
    own = frozenset([first[id(value)]])
    inputs = node.values
    if node.name not in FUNCTIONS | ARITHMETIC | SAME or not inputs or len(node.outputs) != 1:
        return own
    if any(each.tensor.shape != value.tensor.shape for each in inputs):
        return own
    return own | frozenset.intersection(*(of[id(each)] for each in inputs))


def _product(
    node: Node, found: Patterns, of: dict[int, frozenset[int]], values: dict[int, Value], first: dict[int, int]
) -> None:
    a, b = (node.args[i] for i in BILINEAR[node.name])
    if not (depends(a) and depends(b)):
        return
    if node.name in ("div", "true_divide") and (scores := _written_softmax(a, b, first)) is not None:
        found.softmaxes[node.index] = (scores, node.outputs[0])
        return
    quotient = node.name in ("div", "true_divide")
    for position, (signal, factor) in enumerate(((b, a), (a, b))):
        if is_spread(factor, signal, first, quotient and position == 1):
            found.norms[node.index] = position
            return
    if a.tensor.shape == b.tensor.shape:
        common = of[id(a)] & of[id(b)]
        if common:
            found.functions[node.index] = max((values[each] for each in common), key=lambda v: (v.index, v.number))


def _chained(node: Node, found: Patterns) -> Value | None:
    """The base of a function of a function plus a number, as in ``log(1 + exp(x))``."""
    value, shifted = node.values[0], False
    while value.node.name in ARITHMETIC | SAME and len(value.node.values) == 1:
        others = [each for each in value.node.args if isinstance(each, Value) and each.node is None]
        if value.node.name in ("where", "masked_fill") or any(each.tensor.ndim for each in others):
            return None
        shifted |= value.node.name in ("add", "sub", "rsub")
        value = value.node.values[0]
    inner = value.node
    if not shifted or len(node.values) != 1 or inner.name not in FUNCTIONS or len(inner.values) != 1:
        return None
    return found.functions.get(inner.index, inner.values[0])


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


def is_spread(factor: Value, signal: Value, first: dict[int, int], divides: bool) -> bool:
    """Whether a factor is a function of a standard deviation, a root mean square or a length of the signal.

    Lengths are those of any norm; where the signal is divided, its sum is one too (weights that shall sum to one), and
    its maximum.
    """
    value = _back(factor, PLACES | SAME | FUNCTIONS | ARITHMETIC)
    node = value.node
    if node is None:
        return False
    if node.name in STATISTICS:
        measured = node.values[0]
    elif node.name in SUMS | EXTREMES:
        measured = node.values[0]
        inner = _back(measured, SAME).node
        if inner.name in EVEN or (
            inner.name == "mul" and len(inner.values) == 2 and first[id(inner.values[0])] == first[id(inner.values[1])]
        ):
            measured = inner.values[0]
        elif not divides:
            return False
    else:
        return False
    return bool(_roots(measured, first) & _roots(signal, first, LINEAR_MAPS))


def _roots(value: Value, first: dict[int, int], more: frozenset[str] = frozenset()) -> set[int]:
    """A tensor and what it is but for its place, its scale and its mean, and for ``more`` operations without a bias.

    (A norm may be divided by after the matrix product: ``W(x · r) = (W x) · r``.)
    """
    found = {first[id(value)]}
    while value.node is not None:
        node = value.node
        inputs = node.values
        if node.name == "sub" and len(inputs) == 2 and _back(inputs[1], PLACES | SAME).node.name == "mean":
            value = inputs[0]
        elif len(inputs) == 1 and node.name in PLACES | SAME | more | {"mul", "div", "split", "split_with_sizes"}:
            others = [each for each in node.args if isinstance(each, Value) and each is not inputs[0]]
            if node.name in ("mul", "div") and any(_large(each.tensor) for each in others):
                break
            value = inputs[0]
        else:
            break
        if value.node is not None:
            found.add(first[id(value)])
    return found


def _large(tensor: Tensor) -> bool:
    return tensor.numel() > 1
