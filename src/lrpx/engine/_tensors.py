"""What is asked of the arguments and results of torch functions: what carries relevance, what is a constant."""

from __future__ import annotations

from string import ascii_letters
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN = frozenset(
    {Tensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice, type(...)}
    | {complex, torch.memory_format, torch.layout}
)
"""Types of arguments that are no parameter and hold none."""

NUMBERS = PLAIN - {Tensor}
"""The same that hold no tensor."""

KNOWN = NUMBERS | {Parameter}
"""Types of arguments that the graph of a run does not lead on from."""

LISTS = frozenset({tuple, list})
"""Types of arguments that may hold tensors."""


CONSTANT = "_lrpx_constant"
"""The attribute of a leaf that a ledger makes of a constant."""

GIVEN = "_lrpx_given"
"""The attribute of numbers, such as pixels, as the model is given them."""

FROM_INPUT = "_lrpx_from_input"
"""The attribute of a constant that was made of the model's input, and of the leaf that stands for one in a ledger.
Where layers have rules by what they are, it tells whether that was made of attention weights."""

TRANSPOSES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that are operations on it."""


LIKE_ANOTHER = frozenset("to type_as expand_as view_as reshape_as sum_to_size".split())
"""Functions that may take another tensor for no more than its type or its shape."""


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """``isinstance(value, Tensor)``, which torch answers slowly (250 ns) for anything else."""
    kind = type(value)
    return kind is Tensor or (kind not in NUMBERS and isinstance(value, Tensor))


def whole_of(x: Tensor) -> Tensor:
    """The tensor that a view is a part of; any other as it is."""
    base = x._base
    return x if base is None else base


def single(like: Any, value: float) -> Tensor:
    """One number of as many dimensions, by which a function is asked what it does; ``like`` is a tensor, or what the
    graph knows of one. A number also where a compiler traces the model, with its modes off. Of one more dimension than
    a tensor that is one number itself: by its shape it is told from what the model computes."""
    shape = (1,) * len(like.shape)
    shape = (1, *shape) if shape == tuple(like.shape) else shape
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, or in a list or tuple of values."""
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return [value] if is_tensor(value) else []


def is_parameter(value: Any) -> TypeGuard[Parameter]:
    """``isinstance(value, Parameter)``, which torch answers slowly (1 us) for anything else."""
    kind = type(value)
    return kind is Parameter or (kind is not Tensor and kind not in NUMBERS and isinstance(value, Parameter))


def constants(value: Any) -> Any:
    """The same argument with the parameters in it detached: weights are constants, and stay as they are."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is Parameter:
        return value.detach()
    if kind is tuple or kind is list:
        return value if PLAIN.issuperset(map(type, value)) else kind(map(constants, value))
    if kind is dict:
        if not value:
            return value
        is_plain = PLAIN.issuperset(map(type, value.values()))
        return value.copy() if is_plain else {key: constants(item) for key, item in value.items()}
    if isinstance(value, Parameter):
        return value.detach()
    return value


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """The call as it is, on constants that are detached."""
    if not PLAIN.issuperset(map(type, args)):
        args = constants(args)
    if kwargs and not PLAIN.issuperset(map(type, kwargs.values())):
        kwargs = constants(kwargs)
    return func(*args, **kwargs)


def has_foreign(values: Any, first: int) -> bool:
    """Whether one of these arguments requires a gradient and does not come from a run whose nodes are numbered from
    ``first``: a weight, whatever object holds it. Parameters are not looked at."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            node = value.grad_fn
            if value.requires_grad if node is None else node._sequence_nr() < first:
                return True
        elif (kind is tuple or kind is list) and value and has_foreign(value, first):
            return True
    return False


def as_own(value: Any) -> Any:
    """What a tap gives: a leaf of its own as a tensor that comes from the run."""
    if type(value) is Tensor and value.requires_grad and value.is_leaf:
        return value.view_as(value)
    return value


def is_in_place(name: str) -> bool:
    """Whether the torch function of this name changes its first argument."""
    return name in ("__setitem__", "__iadd__", "__isub__") or (name.endswith("_") and not name.endswith("__"))


def unwrapped(value: Any) -> Any:
    """The tensor that the transforms of ``torch.func`` (``vmap``, ``jvp``) have wrapped; any other value as it is."""
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def transformed_constants(value: Any) -> Any:
    """The same argument with the parameters detached that a transform of ``torch.func`` has wrapped."""
    if type(value) in (tuple, list):
        return type(value)(map(transformed_constants, value))
    if type(value) is dict:
        return {key: transformed_constants(item) for key, item in value.items()}
    inner = unwrapped(value)
    return value.detach() if inner is not value and isinstance(inner, Parameter) else value


def carries(value: Any) -> bool:
    """Whether a value, no parameter, depends on the input."""
    return value.requires_grad if type(value) is Tensor else is_tensor(value) and value.requires_grad


def any_carries(value: Any) -> bool:
    """Whether a value, or one in a list or tuple of values, depends on the input; parameters do not."""
    if type(value) is Tensor:
        return value.requires_grad
    if isinstance(value, (tuple, list)):
        return any(map(any_carries, value))
    return carries(value) and not is_parameter(value)


def detached(*values: Any) -> tuple[Any, ...]:
    """The same values, the tensors among them detached."""
    return tuple(value.detach() if is_tensor(value) else value for value in values)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The arguments of these names, in this order, however they were passed; None for those that were not."""
    if len(args) == len(names):
        return list(args)
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def spelled(equation: str, operands: Sequence[Tensor]) -> str:
    """The equation of an ``einsum`` with letters for its dots."""
    factors, arrow, result = equation.replace(" ", "").partition("->")
    labels = factors.split(",")
    counts = [x.ndim - len(label) + 3 for x, label in zip(operands, labels, strict=True) if "..." in label]
    dots = "".join(letter for letter in ascii_letters if letter not in equation)[: max(counts, default=0)]
    for i, (x, label) in enumerate(zip(operands, labels, strict=True)):
        count = x.ndim - len(label) + 3
        labels[i] = label.replace("...", dots[len(dots) - count :])
    if not arrow:
        result = "..." * ("..." in factors) + "".join(sorted(set(factors) - set(",.")))
    return f"{','.join(labels)}->{result.replace('...', dots)}"


FIRST = ("input", "self", "A", "x", "a", "x1")
"""What torch calls the tensor that a function is called on, where it is passed by name; numpy's names are known too."""


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The tensor that a torch function is called on, and its other arguments, however they were passed; parameters
    detached."""
    named = constants(kwargs) if kwargs else kwargs
    if args:
        return constants(args[0]), constants(args[1:]), named
    name = next(name for name in FIRST if name in named)
    return named[name], (), {key: value for key, value in named.items() if key != name}


SECOND = ("other", "mat2", "vec", "vec2", "tensor", "x2", "y")
"""What torch calls the second factor of a product, where it is passed by name; the first is ``input``."""


def pair(args: tuple[Any, ...], kwargs: dict[str, Any], *, names: tuple[str, ...] = SECOND) -> tuple[Any, ...]:
    """``(a, b, the other arguments by place, those by name)`` of a function of two tensors; parameters detached."""
    if len(args) == 2 and not kwargs:  # nearly always
        return constants(args[0]), constants(args[1]), (), kwargs
    a, rest, kwargs = first(args, kwargs)
    if rest:
        return a, rest[0], rest[1:], kwargs
    name = next(name for name in names if name in kwargs)
    return a, kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
