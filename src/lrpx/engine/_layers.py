"""Linear layers, convolutions and matrix products, however they are spelled.

A product of two tensors that depend on the input gets the rule ``matmul``. One of a tensor that does and a weight is a
linear layer: it gets the rule ``linear``, called as ``rule(op, x, weight, bias)`` with an ``op`` that is linear in
``x``. A weight is any constant that was not made of the model's input; attention weights that a rule for softmax makes
constants are none, and their product with the values has its plain gradient.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lrpx import _kernels, rules
from lrpx.engine import _biases, _combined, _exponentials, _factors, _inverses, _joined, _moved, _quotients, _roles
from lrpx.engine._elementwise import FACTORS, product
from lrpx.engine._gates import gate_of, gate_strength, keep_gate, move_gate, put_gate, takes_all, weakest_gate
from lrpx.engine._nodes import COPY, SHAPES, hooks_of_saved, kind, saved
from lrpx.engine._operation import Operation, beside_a_constant
from lrpx.engine._tensors import any_carries, arguments, carries, constants, detached, pair, spelled
from lrpx.errors import UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from lrpx.engine._operation import Handler
    from lrpx.engine._run import Run

# ------------------------------------------------------------------------------ layers

MANY_OUTPUTS = 4096
FEW_ROWS = 64
"""A linear layer of at least so many outputs, for at most so many rows, may be a language-model head."""


def linear(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = given = args if len(args) == 3 else arguments(args, kwargs, "input", "weight", "bias")
    x = x if type(x) is Tensor else constants(x)
    weight = weight.detach() if type(weight) is Parameter else constants(weight)
    bias = None if bias is None else run.added(bias, "bias", x, weight)
    if weight.requires_grad:
        return _with_computed_weight(run, "linear", func, x, weight, bias, bias)
    if not carries(x):
        return beside_a_constant(run, "linear", func(x, weight, bias), bias, bias)
    if run.asks_for_weights and not run.is_weight(weight):
        return _attending(run, func(x, weight, bias), x, weight, summed=BY_ROWS)
    if hasattr(x, FACTORS):
        delattr(x, FACTORS)
    is_head = weight.shape[0] >= MANY_OUTPUTS and x.numel() <= FEW_ROWS * x.shape[-1]
    if (is_head or run.in_last_layer) and _is_plain(weight):
        func = _kernels.for_sparse_gradients(func)
    elif type(weight) is not Tensor:
        _refuse_without_gradient(run, func, x, weight)
    elif run.is_usual and run.recipe.linear is rules.unmodified:  # nearly always
        if _prefers_onednn(run, x, weight):
            func = _kernels.by_onednn(func)
        out = func(x, weight, bias)
        if run.has_scales:
            _exponentials.layered(run, torch.nn.functional.linear, out, (x, weight, bias), {})
        return _moved.made_by_layer(out, x, given)
    if run.asks_for_weights:
        out = _biases.layered(run, "linear", func, x, weight, bias, _biases.LAST)
        if run.asks_for_places:
            _roles.made_by(out, given[1])
    else:
        out = run.apply("linear", func, x, weight, bias)
    if run.has_scales:
        _exponentials.layered(run, torch.nn.functional.linear, out, (x, weight, bias), {})
    return _moved.made_by_layer(out, x, given)


def _noting(handler: Handler) -> Handler:
    """The handler, with a note on what is a sum of exponentials with constant weights."""

    def answered(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
        out = handler(run, func, args, kwargs)
        if run.has_scales:
            _exponentials.layered(run, func, out, args, kwargs)
        return out

    return answered


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is a matrix in the memory of the processor, and not a quantised one."""
    return weight.device.type == "cpu" and type(weight).dequantize is Tensor.dequantize


def _prefers_onednn(run: Run, x: Tensor, weight: Tensor) -> bool:
    """Whether the gradient is to be a product by oneDNN, on a processor that prefers it. Not behind exponentials and
    logarithms, which are looked for on the graph by way of torch's own products, nor where a part of the model will run
    again, perhaps with a tap that takes another way; a compiler chooses for itself."""
    if not _kernels.prefers_onednn() or run.has_scales or run.has_logarithms:
        return False
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    is_plain = type(x) is Tensor and weight.ndim == 2 and weight.device.type == "cpu"
    return is_plain and hooks_of_saved(False) is None and not torch.compiler.is_compiling()


def _refuse_without_gradient(run: Run, func: Any, x: Tensor, weight: Tensor) -> None:
    """Refuse a quantised weight whose kernel would stop the relevance without a word; one row of ``x`` tells."""
    if not carries(func(x.detach().reshape(-1, x.shape[-1])[:1].requires_grad_(), weight)):
        raise UnknownOperationError(
            f"{run.where()} has a weight of {type(weight).__name__} whose product with the input has no gradient, "
            "as where activations are quantised too; quantise the weights alone"
        )


def _convolution(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = arguments(args, kwargs, "input", "weight", "bias")
    x, weight = constants(x), constants(weight)
    bias = run.added(bias, "bias", x, weight)
    rest = {name: value for name, value in kwargs.items() if name not in ("input", "weight", "bias")}

    def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return func(x, weight, bias, *args[3:], **rest)

    channels = None if bias is None else bias.view(-1, *(1,) * (weight.ndim - 2))
    if carries(weight):
        return _with_computed_weight(run, "convolution", op, x, weight, bias, channels)
    if carries(x) and run.asks_for_weights and not run.is_weight(weight):
        return _attending(run, op(x, weight, bias), x, weight)
    if carries(x):
        return _biases.layered(run, "convolution", op, x, weight, bias, {1 - weight.ndim})
    return beside_a_constant(run, "convolution", op(x, weight, bias), bias, channels)


def _with_computed_weight(
    run: Run,
    kind: str,
    op: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    summand: Tensor | None,
) -> Any:
    """A linear layer or a convolution whose weight depends on the input; ``summand``: the bias as the output has it."""
    summed = BY_ROWS if kind == "linear" else ()
    if not carries(x):  # linear in what stands in the weight's place
        swapped = _bilinear_in(lambda weight, x, bias: op(x, weight, bias))
        if run.is_weight(x):
            return run.apply(kind, swapped, weight, x, bias)
        return _attending(run, op(x, weight, bias), x, weight, summed=summed)
    made = _factors.matmul(run, lambda a, b: op(a, b, None), x, weight)
    product = _attending(run, made, x, weight, summed=summed)
    if bias is None or summand is None:
        return product
    return rules.with_gradient_of(op(x.detach(), weight.detach(), bias.detach()), product + summand)


def _bilinear_in(op: Callable[..., Any]) -> Callable[..., Any]:
    """The same operation; a rule may leave the bias out."""
    return lambda x, weight, bias=None: op(x, weight, bias)


def _add_matmul(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``bias + a b``; the bias may depend on the input, as the residual stream does."""
    named = ("input", "mat1", "mat", "batch1", "mat2", "vec", "batch2")
    given = [*args, *(kwargs[name] for name in named if name in kwargs)]
    settings = {name: value for name, value in kwargs.items() if name not in named}
    a, b = constants(given[1]), constants(given[2])
    has_constant_bias = not carries(constants(given[0]))
    bias = run.added(given[0], "bias", a, b)

    def product(a: Tensor, b: Tensor) -> Any:
        return func(bias.new_zeros(()) if isinstance(bias, Tensor) else bias, a, b, **settings)

    if carries(a) and carries(b):
        apart = _attending(run, _factors.matmul(run, product, a, b), a, b, summed=_summed(a, b))
    elif carries(a) or carries(b):
        if not run.is_weight(b if carries(a) else a):
            return _attending(run, func(bias, a, b, **settings), a, b, summed=_summed(a, b))
        x, weight = (a, b) if carries(a) else (b, a)

        def op(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            a_, b_ = (x, weight) if carries(a) else (weight, x)
            if bias is None and func.__name__ == "addmm" and not settings:
                return a_ @ b_
            return product(a_, b_) if bias is None else func(bias, a_, b_, **settings)

        if has_constant_bias:
            if func.__name__ == "addmm" and x is a and not settings:
                if run.in_last_layer and _is_plain(weight):
                    op = _kernels.for_sparse_gradients(op, transposed=True)
                elif run.is_usual and run.recipe.linear is rules.unmodified and _prefers_onednn(run, x, weight):
                    op = _kernels.by_onednn(op, transposed=True)
            if func.__name__ not in ("addmm", "baddbmm") or not isinstance(bias, Tensor):
                return run.apply("linear", op, x, weight, bias)
            beta = settings.get("beta", 1)
            return _biases.layered(run, "linear", op, x, weight, bias, {-1 if x is a else -2}, beta)
        if run.recipe.linear is rules.unmodified:
            return run.apply("linear", lambda x, weight, _: op(x, weight, bias), x, weight, None)
        apart = run.apply("linear", op, x, weight, None)
    elif run.has_taps_on_constants and carries(bias):
        apart = run.added(product(a, b), func.__name__, bias)
    else:
        return func(bias, a, b, **settings)
    value = func(bias.detach(), a.detach(), b.detach(), **settings)
    out = rules.with_gradient_of(value, apart + settings.get("beta", 1) * bias)
    return put_gate(run.recipe, out, weakest_gate((given[0], apart))) if run.asks_for_gates else out


# ------------------------------------------------------------------- products of two


MATRICES = frozenset("matmul __matmul__ mm bmm mv linalg_matmul".split())
"""Functions that are ``a @ b``."""


def _matmul(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    a, b, rest, settings = pair(args, kwargs)

    def op(a: Tensor, b: Tensor) -> Any:
        return func(a, b, *rest, **settings)

    if run.has_systems and run.recipe.matmul is rules.uniform and (solved := _of_inverse(run, op, a, b)) is not None:
        return solved
    if (
        takes_all(run.recipe)
        and func.__name__ != "__rmatmul__"
        and (written := _by_a_diagonal(run, op, a, b)) is not None
    ):
        return written
    if run.has_scales and (softmax := _quotients.times_inverse(run, op, a, b)) is not None:
        return softmax
    dims: Dims = (), ()
    if run.asks_for_weights and func.__name__ in MATRICES:
        dims = _dims(a, b)
    elif run.asks_for_weights and func.__name__ == "inner":  # those of the first factor before those of the second
        dims = range(2 - a.ndim - b.ndim, 1 - b.ndim), range(1 - b.ndim, 0)
    out = product_of_two(run, op, a, b, dims, _summed(a, b) if func.__name__ in MATRICES else ())
    if run.has_scales:
        is_matrix = b.ndim > 1 and func.__name__ != "__rmatmul__"
        again = (lambda a: product_of_two(run, op, a, b)) if is_matrix else None
        return _exponentials.multiplied(run, op, out, a, b, again)
    return out


def _by_a_diagonal(run: Run, op: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor) -> Tensor | None:
    """A product with a diagonal matrix, a gate perhaps: that with the vector on the diagonal, element by element."""
    if not (carries(a) and carries(b)):
        return None
    left, right = _diagonal(a), _diagonal(b)
    if left is not None and b.ndim > 1:
        factors = move_gate(left.unsqueeze(-1), left), b
    elif left is not None:
        factors = left, b
    elif right is not None:
        factors = a, right if a.ndim == 1 else move_gate(right.unsqueeze(-2), right)
    else:
        return None
    return rules.with_gradient_of(op(a.detach(), b.detach()), product(run, torch.mul, factors, {}))


def _diagonal(x: Tensor, *, is_gate: bool = False) -> Tensor | None:
    """The vector on the diagonal of a matrix that was made of it, or that is a gate and has nothing else: it was put
    there, or masked, or the matrix is a constant."""
    made_of = _joined.on_diagonal(x)
    if made_of is not None or not (is_gate or gate_strength(x)) or x.ndim < 2 or not x.shape[-1] == x.shape[-2] > 1:
        return made_of
    node = _put_there(x.grad_fn) if carries(x) else None
    is_traced = type(x) is not Tensor  # of a compiler's tensors only the mask may have numbers
    if (node is None and carries(x)) or not (is_traced or _is_diagonal(x)):
        return None
    if node is not None and kind(node) in MASKS and ((mask := _mask(node)) is None or not _is_diagonal(mask)):
        return None
    if is_traced and not _is_diagonal(x):
        return None
    vector: Tensor = move_gate(x.diagonal(dim1=-2, dim2=-1), x)
    return vector


WRITES = frozenset("DiagonalScatter CopySlices Scatter IndexPut DiagEmbed SelectScatter SliceScatter".split()) | {COPY}
"""Nodes that write some numbers among others."""
MASKS = {"Mul": ("self", "other"), "Where": ("condition",), "MaskedFill": ("mask",)}
"""Nodes that mask, and what they keep of the mask."""


def _put_there(node: Any) -> Any:
    """The node that has written numbers into a matrix, or masked them; None for any other: that a function is 0 beside
    the diagonal is chance, and another text has other numbers."""
    while kind(node) in SHAPES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node if kind(node) in WRITES or kind(node) in MASKS else None


def _mask(node: Any) -> Tensor | None:
    """Where a node that masks leaves what it is given, if one matrix says so for all rows."""
    is_other = kind(node) == "MaskedFill" or (kind(node) == "Where" and node.next_functions[0][0] is None)
    kept = (saved(node, name) for name in MASKS[kind(node)])
    masks = [~each if is_other else each for each in kept if each is not None and not carries(each)]
    return masks[0] if len(masks) == 1 and masks[0].ndim == 2 else None


def _is_diagonal(x: Tensor) -> bool:
    """Whether a matrix has numbers on its diagonal, and no others."""
    if not (x.ndim > 1 and x.shape[-1] == x.shape[-2]):
        return False
    filled = x.detach() != 0
    vector = filled.diagonal(dim1=-2, dim2=-1)
    return bool(vector.any()) and torch.equal(torch.diag_embed(vector), filled)


def _tensordot(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    given: tuple[Any, ...] = (*args, *(kwargs[name] for name in "ab"[len(args) :]))
    a, b, *rest = given
    settings = {name: value for name, value in kwargs.items() if name not in ("a", "b")}
    a, b = constants(a), constants(b)
    summed = rest[0] if rest else settings.get("dims", 2)
    number = summed if isinstance(summed, int) else len(summed[0])
    of_a, of_b = a.ndim - number, b.ndim - number
    dims = range(-of_a - of_b, -of_b), range(-of_b, 0)
    return product_of_two(run, lambda a, b: func(a, b, *rest, **settings), a, b, dims)


Dims = tuple["Collection[int]", "Collection[int]"]
"""Which dimensions of a product are those of the first factor, and of the second; the last is -1."""


def product_of_two(
    run: Run,
    op: Callable[[Tensor, Tensor], Any],
    a: Tensor,
    b: Tensor,
    dims: Dims = ((), ()),
    summed: Sequence[int | None] = (),
) -> Any:
    """A product ``op(a, b)``, linear in each; ``dims`` tell what may be added as a bias, and ``summed`` which dimension
    of each is summed over."""
    return _attending(run, _product_of_two(run, op, a, b, dims), a, b, summed=summed)


BY_ROWS = -1, -1
"""Which dimension of each is summed over where both are rows."""


def _summed(a: Tensor, b: Tensor) -> tuple[int, int]:
    """The same in ``a @ b``."""
    return -1, -1 if b.ndim == 1 else -2


def _attending(run: Run, out: Any, *factors: Tensor, summed: Sequence[int | None] = ()) -> Any:
    """``out``, a product, which is what attention gives where attention weights are among its factors."""
    if not run.asks_for_places:
        return out
    is_attention = _roles.any_weights(factors) or _roles.weighs_places(factors, summed)
    if not is_attention or _roles.are_mixed(out):
        return _roles.gathered(run, out, factors, summed)
    return _roles.attend(run, out, *factors, summed=summed)


def _product_of_two(run: Run, op: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor, dims: Dims) -> Any:
    if carries(a) and carries(b):
        return _factors.matmul(run, op, a, b)
    if run.positions is not None:
        run.positions.refuse_product(a, b)
    if run.asks_for_weights and _turns(run, b if carries(a) else a):
        return op(a, b)
    if carries(a) and run.is_weight(b):
        return _biases.without_bias(run, "linear", op, a, b, dims[1])
    if carries(b) and run.is_weight(a):
        return _biases.without_bias(run, "linear", lambda x, weight: op(weight, x), b, a, dims[0])
    return op(a, b)


def _turns(run: Run, constant: Tensor) -> bool:
    """Whether a constant has a rotation of pairs for each place, as rotary angles are written as matrices: it turns
    what it is multiplied with, and is no layer."""
    if constant.ndim < 3 or constant.shape[-1] != constant.shape[-2] or not constant.is_floating_point():
        return False
    if type(constant) is not Tensor or not constant.numel() or run.is_all_of_parameter(constant):
        return False
    first = constant[(0,) * (constant.ndim - 2)]
    if any(bool(((each != 0).sum(-1) > 2).any()) for each in (first, constant)):  # the first tells of most
        return False
    own = torch.eye(constant.shape[-1], dtype=constant.dtype, device=constant.device)
    return bool(((constant @ constant.mT - own).abs() < NEARLY_ONE).all())


NEARLY_ONE = 1e-2
"""How far from 1 the length of a row may be, in whatever precision."""


def _dims(a: Tensor, b: Tensor) -> Dims:
    """Those of ``a @ b``."""
    if b.ndim == 1:
        return range(1 - a.ndim, 0), ()
    if a.ndim == 1:
        return (), range(1 - b.ndim, 0)
    of_a, of_b = ({-i for i in range(3, x.ndim + 1) if x.shape[-i] > 1} for x in (a, b))
    return of_a | {-2}, of_b | {-1}


def _grouped_matmul(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The experts of a mixture, all at once: each row of the input times the weight of its expert."""
    names = ("input", "mat_a", "mat2", "mat_b")
    given: list[Any] = [*constants(args), *(constants(kwargs[name]) for name in names if name in kwargs)]
    a, b, *rest = given
    settings = {name: value for name, value in kwargs.items() if name not in names}
    bias = settings.pop("bias", None)
    bias = None if bias is None else run.added(bias, "bias", a, b)

    def op(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Any:
        return func(a, b, *rest, **settings) if bias is None else func(a, b, *rest, bias=bias, **settings)

    if carries(a) and carries(b):
        return run.apply("matmul", lambda a, b: op(a, b, bias), a, b)
    if carries(a) and run.is_weight(b):
        if bias is None and run.asks_for_weights:
            return _biases.without_bias(run, "linear", op, a, b, {-2, -1})
        return run.apply("linear", op, a, b, bias)
    if carries(b) and run.is_weight(a):
        return run.apply("linear", lambda x, weight, bias=None: op(weight, x, bias), b, a, bias)
    return op(a, b, bias)


# ------------------------------------------------------------------ products of several


def _einsum(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    operands = [constants(each) for each in operands]
    if len(operands) == 1:  # a sum, or another shape
        out = func(equation, *operands, **kwargs)
        if run.has_scales:
            _exponentials.keep_exponents(func, out, (equation, *operands), kwargs)
        return keep_gate(run.recipe, out, *operands) if run.asks_for_gates else out
    if len(operands) > 1 and _sums_nothing(equation):
        return _element_wise(run, func, equation, operands)
    is_of_itself = len(operands) == 2 and operands[0] is operands[1] and carries(operands[0])
    if is_of_itself and _combined.takes_squares(run) and run.recipe.matmul is rules.uniform:
        labels, arrow, result = equation.partition("->")
        of_one, of_other = labels.replace(" ", "").split(",")
        if of_one == of_other and arrow:  # a sum of squares
            squares = product(run, torch.mul, operands, {})
            made = _einsum(run, func, (f"{of_one}->{result}", squares), {})
            return move_gate(rules.with_gradient_of(func(equation, *detached(*operands)), made), made)
    has_gate = takes_all(run.recipe) and any(map(gate_strength, operands))
    if has_gate and (vectors := _without_diagonals(run, equation, operands)) is not None:
        return rules.with_gradient_of(func(equation, *detached(*operands)), _element_wise(run, func, *vectors))
    if has_gate and (made := _without_a_gate(run, func, equation, operands)) is not None:
        return _biases.again(rules.with_gradient_of(func(equation, *detached(*operands)), made), made)

    def op(*operands: Tensor) -> Any:
        return func(equation, *operands, **kwargs)

    if run.has_scales:
        softmax = (
            _quotients.times_inverse(run, op, *operands)
            if len(operands) == 2
            else _quotients.hides_division(run, op, operands)
        )
        if softmax is not None:
            return softmax
    has_bias = run.asks_for_weights and len(operands) == 2
    dims = _einsum_dims(equation, operands) if has_bias else ((), ())
    summed = _einsum_summed(equation, operands) if run.asks_for_places and len(operands) == 2 else ()
    out = _product_of_several(run, "einsum", op, operands, dims, summed)
    if len(operands) > 2 and run.asks_for_places and _roles.any_weights(operands):
        given, result = spelled(equation, operands).split("->")
        labels = given.split(",")  # what nothing is summed over of is a gate
        _roles.attend(
            run, out, *(x for x, label in zip(operands, labels, strict=True) if not set(label) <= set(result))
        )
    if not run.has_scales or len(operands) != 2:
        return out
    a, b = operands
    again = (lambda a: product_of_two(run, op, a, b)) if _is_of_rows(equation, operands) else None
    return _exponentials.multiplied(run, op, out, a, b, again)


def _einsum_summed(equation: str, operands: Sequence[Tensor]) -> Sequence[int]:
    """Which dimension of each of two factors an ``einsum`` sums over; none where it is not one."""
    given, result = spelled(equation, operands).split("->")
    a, b = given.split(",")
    both = [label for label in a if label in b and label not in result]
    return (a.index(both[0]) - len(a), b.index(both[0]) - len(b)) if len(both) == 1 else ()


def _is_of_rows(equation: str, operands: Sequence[Tensor]) -> bool:
    """Whether a product of two is ``a @ b``: rows of ``a``, of which not all are in ``b``, by columns of ``b``."""
    given, result = spelled(equation, operands).split("->")
    a, b = given.split(",")
    rows, columns = a[:-1], result[-1:]
    is_product = bool(columns) and result == rows + columns and columns not in a and a[-1:] in b
    return is_product and set(b) < set(a + columns) and len(set(a)) == len(a) and len(set(b)) == len(b)


def _einsum_dims(equation: str, operands: Sequence[Tensor]) -> Dims:
    given, result = spelled(equation, operands).split("->")
    of_a, of_b = ([i - len(result) for i, letter in enumerate(result) if letter in label] for label in given.split(","))
    return of_a, of_b


def _sums_nothing(equation: str) -> bool:
    """Whether each index of the factors is one of the result, so that it is an element-wise or an outer product."""
    factors, arrow, result = equation.replace(" ", "").partition("->")
    labels = factors.replace(",", "")
    letters = labels.replace(".", "")  # without an arrow, the dots are kept, and so is each letter that comes once
    return set(labels) <= set(result) if arrow else len(set(letters)) == len(letters)


def _without_diagonals(run: Run, equation: str, operands: Sequence[Tensor]) -> tuple[str, list[Tensor]] | None:
    """An equation and its operands with the vectors on their diagonals in the place of diagonal matrices, if it is an
    element-wise product then."""
    equation = spelled(equation, operands)
    given, result = equation.split("->")
    labels, vectors = given.split(","), list(operands)
    for i, x in enumerate(operands):
        rest, row, column = labels[i][:-2], labels[i][-2:-1], labels[i][-1:]
        is_constant = len(operands) > 2 and not carries(x) and run.recipe.linear is rules.unmodified
        if x.ndim < 2 or row == column or {row, column} <= set(result) or not (carries(x) or is_constant):
            continue
        vector = _diagonal(x, is_gate=is_constant)
        if vector is None:
            continue
        kept, lost = (column, row) if column in result else (row, column)
        vectors[i], labels[i] = vector, rest + kept
        labels = [label.replace(lost, kept) for label in labels]
        if any(len(set(label)) < len(label) for label in labels):
            return None
    equation = f"{','.join(labels)}->{result}"
    return (equation, vectors) if _sums_nothing(equation) and any_carries(vectors) else None


def _without_a_gate(run: Run, func: Any, equation: str, operands: Sequence[Tensor]) -> Any:
    """The same product after one of its gates was multiplied with another factor, or before one is multiplied with the
    result, element by element, for it makes no difference where: ``(c g) · s = (c · s) g``. None where there is none.
    What is summed over of one factor alone is summed first."""
    given, result = spelled(equation, operands).split("->")
    labels = given.split(",")
    if any(len(set(label)) < len(label) for label in labels):
        return None
    for i, x in enumerate(operands):
        needed = set(result).union(*labels[:i], *labels[i + 1 :])
        if carries(x) and not set(labels[i]) <= needed:
            label = "".join(letter for letter in labels[i] if letter in needed)
            summed = _einsum(run, func, (f"{labels[i]}->{label}", x), {})
            labels[i] = label
            return _einsum(run, func, (f"{','.join(labels)}->{result}", *operands[:i], summed, *operands[i + 1 :]), {})
    if len(operands) == 2:
        return None
    for i, gate in enumerate(operands):
        if not (carries(gate) and gate_strength(gate)):
            continue
        of_gate, rest = labels[i], [j for j in range(len(operands)) if j != i]
        factors, kept = list(operands), list(labels)
        of_others = [j for j in rest if carries(operands[j]) and gate_of(operands[j], gate) is gate]
        for j in of_others:
            needed = set(result).union(*(labels[k] for k in rest if k != j))
            if set(of_gate) <= set(labels[j]) & needed:
                factors[j] = _element_wise(run, func, f"{labels[j]},{of_gate}->{labels[j]}", (operands[j], gate))
                del factors[i], kept[i]
                return _einsum(run, func, (f"{','.join(kept)}->{result}", *factors), {})
        if of_others and set(of_gate) <= set(result):
            del factors[i], kept[i]
            left = "".join(letter for letter in result if any(letter in label for label in kept))
            made = _einsum(run, func, (f"{','.join(kept)}->{left}", *factors), {})
            return _element_wise(run, func, f"{left},{of_gate}->{result}", (made, gate))
    return None


def _element_wise(run: Run, func: Any, equation: str, operands: Sequence[Tensor]) -> Any:
    """Products of two after one another, as ``a * b * c`` is; none is a layer, for no index is summed over."""
    if run.positions is not None:
        equation = spelled(equation, operands)
    factors, arrow, result = equation.replace(" ", "").partition("->")
    labels = factors.split(",")
    if not arrow:
        result = "..." * ("..." in factors) + "".join(sorted(set(factors) - set(",.")))
    made, label = operands[0], labels[0]
    roots = list(run.roots)  # which a product gives up, and the next may ask for
    for i, (factor, of_factor) in enumerate(zip(operands[1:], labels[1:], strict=True), 2):
        kept = (
            result
            if i == len(operands)
            else "..." * ("..." in label + of_factor)
            + "".join(letter for letter in dict.fromkeys(label + of_factor) if letter != ".")
        )
        step = f"{label},{of_factor}->{kept}"
        is_by_element = label == of_factor == kept and made.ndim == factor.ndim
        is_square = is_by_element and _combined.takes_squares(run)
        factor = factor.view_as(factor) if factor is made and carries(made) and not is_square else factor
        if is_by_element:
            op = torch.mul  # of whatever shape: a function that it belongs to is computed again before a move
        else:
            op = partial(func, step)
            op.__name__ = "mul" if label == of_factor == kept else "outer"  # type: ignore[attr-defined]
        if run.positions is not None and carries(made) != carries(factor):
            # with a dimension for each index, in the order of what may have rows, so that positions can have them too
            order = "".join(dict.fromkeys((label if carries(made) else of_factor) + kept))
            given = _aligned(made, label, order), _aligned(factor, of_factor, order)
            shared = run.positions.product(torch.mul, *given)
            if shared is None:  # no position, but perhaps the reciprocal of a sum, which its notes tell
                positions, run.positions = run.positions, None
                try:
                    made = product(run, op, (made, factor), {})
                finally:
                    run.positions = positions
            else:
                made = shared.permute([order.index(letter) for letter in kept])
        else:
            made = product(run, op, (made, factor), {})
        label = kept
    roots.clear()
    return made


def _aligned(x: Tensor, label: str, order: str) -> Tensor:
    """A factor of an element-wise ``einsum``, with its indices in another order, and 1 for those that it has not."""
    x = x.permute([label.index(letter) for letter in order if letter in label])
    return x[tuple(slice(None) if letter in label else None for letter in order)]


def _chain(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """A product of many matrices, one after another from the left; the value is that of torch's own order."""
    matrices = constants(args[0] if args else kwargs["tensors"])
    if not any_carries(matrices):
        return func(matrices)
    made = matrices[0]
    for matrix in matrices[1:]:
        before = made
        made = product_of_two(run, torch.matmul, made, matrix, _dims(made, matrix))
        if not carries(made):  # a weight, unless it was made of the input
            run.mark_from_input(made, (before, matrix), "matmul")
    return rules.with_gradient_of(func(detached(*matrices)), made)


def _sparse_matmul(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    a, b, rest, _ = pair(args, kwargs)
    if any(carries(x) and x.layout is not torch.strided for x in (a, b)):
        run.refuse(f"{func.__name__} of a sparse tensor that depends on the input")
    own = run.recipe.linear not in (rules.unmodified, rules.constant)
    if own and any_carries((a, b)) and not (carries(a) and carries(b)):
        raise run.refuse_rule("linear", func.__name__, "which hides its products from a rule")
    return product_of_two(run, lambda a, b: func(a, b, *rest), a, b)


def _bilinear(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    a, b, weight, bias = arguments(args, kwargs, "input1", "input2", "weight", "bias")
    operands = [constants(a), constants(b), constants(weight)]
    product = _product_of_several(run, "bilinear", func, operands)
    return product if bias is None else run.added(product, "bilinear", bias) + run.added(bias, "bias", *operands)


def _product_of_several(
    run: Run,
    name: str,
    op: Callable[..., Any],
    operands: Sequence[Tensor],
    dims: Dims = ((), ()),
    summed: Sequence[int | None] = (),
) -> Any:
    """``op(*operands)``, linear in each."""
    places = [i for i, operand in enumerate(operands) if carries(operand)]
    carrying = [operands[i] for i in places]

    def of_carrying(*others: Tensor) -> Any:
        given = dict(zip(places, others, strict=True))
        return op(*(given.get(i, operand) for i, operand in enumerate(operands)))

    weights = [operand for operand in operands if not carries(operand) and run.is_weight(operand)]
    is_own = run.recipe.linear not in (rules.unmodified, rules.constant)
    if len(carrying) >= 2 and weights and is_own:
        raise run.refuse_rule(
            "linear", name, f"a product of a constant and {len(carrying)} tensors that depend on the input",
            "spell it as products of two tensors each, or ",
        )  # fmt: skip
    if len(carrying) == 2:
        made = _factors.matmul(run, of_carrying, *carrying)
        return _attending(run, made, *carrying, summed=summed if len(operands) == 2 else ())
    if len(carrying) > 2:
        return _shared(run, name, of_carrying, carrying)
    if len(operands) == 2:
        return product_of_two(run, op, operands[0], operands[1], dims, summed)
    if not carrying or not weights:
        return op(*operands)
    if is_own:
        raise run.refuse_rule(
            "linear", name, "a product of more than one constant with the input",
            "spell it as products of two tensors each, or ",
        )  # fmt: skip
    return run.apply("linear", of_carrying, *carrying)


def _shared(run: Run, name: str, op: Callable[..., Any], factors: Sequence[Tensor]) -> Any:
    """A product of more than two tensors that depend on the input."""
    if run.recipe.matmul is rules.uniform:
        run.under("matmul")
        return _factors.several(run, op, factors)
    if run.recipe.matmul not in (rules.unmodified, rules.constant):
        raise run.refuse_rule(
            "matmul", name, f"a product of {len(factors)} tensors that depend on the input",
            "spell it as products of two, or ",
        )  # fmt: skip
    return run.apply("matmul", op, *factors)


def _solve_triangular(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """Forward substitution; a gated delta rule spells its recurrence so."""
    a, b, _, settings = pair(args, kwargs, names=("B",))
    op = partial(func, **settings)
    if not carries(a):
        if not (carries(b) and run.is_weight(a)):
            return op(a, b)
        if run.recipe.linear not in (rules.unmodified, rules.constant):
            raise run.refuse_rule("linear", "linalg.solve_triangular", "which hides its products from a rule")
        return run.apply("linear", op, a, b)
    b = run.added(b, "right-hand side", a)
    matmul = run.recipe.matmul
    if matmul is rules.uniform:
        count = _factors.factors(run, a)  # what it is solved for is a sum, and so one factor
        rule = partial(_kernels.substitution, share=count / (count + 1), **settings)
        out = run.apply("matmul", func, a, b, rule=rule, conserves=True)
        return _factors.made_of(run, out, _factors.factors(run, b)) if carries(b) else out
    if matmul is not rules.unmodified:
        raise run.refuse_rule("matmul", "linalg.solve_triangular", "which hides its products from a rule")
    return run.apply("matmul", op, a, b)


def _of_inverse(run: Run, op: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor) -> Tensor | None:
    """A product with the inverse of a triangular matrix that was written row after row: a triangular solve."""
    system = _inverses.system_of(a) if b.ndim > 1 and carries(a) else None
    if system is None:
        return None
    solved = _solve_triangular(
        run, torch.linalg.solve_triangular, (-system, b), {"upper": False, "unitriangular": True}
    )
    return rules.with_gradient_of(op(a.detach(), b.detach()), solved)


ROWS = [
    Operation("linear", ("linear",), linear, "linear"),
    Operation("addmm", ("addmm",), _noting(_add_matmul), "linear"),
    Operation("baddbmm", ("addmv", "baddbmm", "addbmm"), _noting(_add_matmul), "linear"),
    Operation("grouped_mm", ("_grouped_mm", "grouped_mm"), _grouped_matmul, "linear"),
    Operation("matmul", ("matmul", "__matmul__", "mm", "bmm"), _matmul, "matmul"),
    Operation("rmatmul", ("__rmatmul__",), _matmul, "matmul"),
    Operation("linalg_matmul", ("linalg_matmul",), _matmul, "matmul"),
    Operation("dot", ("mv", "dot", "vdot", "inner", "linalg_vecdot", "cross", "linalg_cross"), _matmul, "matmul"),
    Operation("multi_dot", ("linalg_multi_dot",), _chain, "matmul"),
    Operation("sparse_mm", ("_sparse_mm", "smm"), _noting(_sparse_matmul), "matmul"),
    Operation("tensordot", ("tensordot",), _noting(_tensordot), "matmul"),
    Operation("einsum", ("einsum",), _einsum, "matmul"),
    Operation("bilinear", ("bilinear",), _bilinear, "matmul"),
    Operation("solve_triangular", ("linalg_solve_triangular",), _solve_triangular, "matmul"),
    *(
        Operation(name, (name,), _noting(_convolution), "convolution")
        for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    ),
]
