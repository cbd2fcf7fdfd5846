"""Selections between two tensors, and the ReLUs that models write out by them: by a mask, a filling, a maximum.

A ReLU is known by the signs of what it is of; it is a gate then, and a function of it is one of what was there before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import rules
from lrpx.engine import _activations, _casts, _combined, _exponentials, _factors, _functions, _joined, _lost, _steps
from lrpx.engine._functions import CURVED, LINEAR, PARTWISE, Function, function_of
from lrpx.engine._gates import gate_strength, mark_relu, put_gate, takes_all, told, weakest_gate
from lrpx.engine._nodes import kind
from lrpx.engine._operation import write
from lrpx.engine._tensors import CONSTANT, arguments, called, carries, is_in_place

if TYPE_CHECKING:
    from collections.abc import Callable


def plain_where(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A selection between two; of functions of one tensor, a function in pieces."""
    if kwargs.keys() <= {"condition", "input", "other"} and len(args) + len(kwargs) == 3:
        args, kwargs = (*args, *(kwargs[name] for name in ("condition", "input", "other") if name in kwargs)), {}
    out = _steps.keep(func, called(func, args, kwargs), *args, **kwargs)
    if run.asks_for_gates:
        put_gate(run.recipe, out, weakest_gate((*args, *kwargs.values())))
    if not any(isinstance(each, Tensor) for each in args[1:]) and args[1:] == (1, 0):
        return _casts.of_whole_numbers(run, out, args[0])
    if len(args) == 3 and (whole := _piece_or_zero(run, *args)) is not None:
        return whole
    run.computed(out, *args, *kwargs.values())
    if run.has_scales:
        _exponentials.keep_exponents(func, out, args, kwargs)
    root = _chosen_by_sign(run, *args) if _finds_relus(run) and len(args) == 3 and carries(out) else None
    if root is not None:
        return kinked(run, out, root, mask=args[0] if args[0].dtype is torch.bool else args[1])
    if len(args) == 3 and carries(out) and _fills(out, *args):
        _step_or_zero(run, out, *args)
        return out
    if len(args) != 3:
        return out
    (where, a), b = _condition_first(*args[:2]), args[2]
    if not (isinstance(where, Tensor) and carries(a) and carries(b)):
        return out
    return _combined.in_pieces(run, out, _choosing(where, out), a, b, step=_steps.step_of(where))


def _choosing(where: Tensor, out: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What has chosen ``out``, for functions; asked what it does with numbers, it gives both, for which is chosen is no
    matter of these."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        if a.shape == b.shape == out_shape:
            return torch.where(where, a, b)
        return torch.stack(torch.broadcast_tensors(a, b))  # type: ignore[no-untyped-call]

    out_shape = out.shape
    return choose


def _condition_first(where: Any, a: Any) -> tuple[Any, Any]:
    """The condition of a selection and the first of the two; the method has the condition second."""
    return (a, where) if isinstance(where, Tensor) and where.dtype is not torch.bool else (where, a)


def _fills(out: Tensor, where: Any, a: Any, b: Any) -> bool:
    """Whether one of the two that ``out`` is chosen from is a constant: noted, as what is filled with it is."""
    where, a = _condition_first(where, a)
    is_own, is_other = (carries(each) and not hasattr(each, CONSTANT) for each in (a, b))
    if is_own and not is_other:
        _functions.filled(out, _functions.to_be_filled(a, in_place=False), b, lambda x, c: torch.where(where, x, c))
    elif is_other and not is_own:
        _functions.filled(out, _functions.to_be_filled(b, in_place=False), a, lambda x, c: torch.where(where, c, x))
    return is_own != is_other


def _chosen_by_sign(run: Any, where: Any, a: Any, b: Any) -> Tensor | None:
    """The tensor by whose sign one of two scalings of it, or one and 0, is selected: a leaky ReLU, or ReLU."""
    where, a = _condition_first(where, a)
    if type(where) is not Tensor or where.dtype is not torch.bool or not (carries(a) or carries(b)):
        return None  # a compiler's tensors have no numbers
    x = a if carries(a) else b
    both = _combined.of_same(run, a, b) if carries(a) and carries(b) else (function_of(x) or Function(x),)
    scalings = [] if both is None else [*both]
    is_zero = [not (each.any() if isinstance(each, Tensor) else each) for each in (a, b) if not carries(each)]
    if not scalings or not all(is_zero) or not _are_scalings(root := scalings[0].root, scalings):
        return None
    return root if root.shape == x.shape == where.shape and _tells_signs(run, where, root) else None


def _are_scalings(root: Tensor, functions: list[Function]) -> bool:
    return all(f.kind == LINEAR and f.exact and _combined.is_same(f.root, root) for f in functions)


def _finds_relus(run: Any) -> bool:
    """Whether a ReLU that is written out has to be known: it is a gate, or a function of it is one of its root, or a
    product of it and its root is one, which another rule would share."""
    return takes_all(run.recipe) or run.recipe.activation is rules.identity or _combined.are_apart(run)


def _tells_signs(run: Any, mask: Any, x: Tensor) -> bool:
    """Whether a mask is one of the signs of ``x``, or of a scaling or a ReLU of it."""
    if not hasattr(mask, _steps.STEP):
        return False
    root, again = _steps.step_of(mask)
    if root is None or again is None:
        return False
    f = Function(x) if _combined.is_same(root, x) else function_of(root)
    if f is None or not _combined.is_same(f.root, x):
        both = _combined.of_same(run, x, root)
        if both is None or both[0].op is not None or not (both[0].root is both[1].root is x):
            return False
        f = both[1]
    with _disable_current_modes():
        if f.kind == LINEAR and f.exact:
            steps = again(torch.tensor(SIGNS, dtype=x.dtype, device=x.device)).tolist()
        elif f.op is None:
            return False
        else:  # which may have tensors in it, of the shape of ``x``
            made = [again(f.op(torch.full_like(x.detach(), number))) for number in SIGNS]
            if not all(bool((step == step.flatten()[0]).all()) for step in made if step.numel()):
                return False
            steps = [step.flatten()[0].item() for step in made if step.numel()]
    low, high = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    return len({*low}) == len({*high}) == 1 and low[0] != high[0]


SIGNS = (-9.0, -1.0, -0.1, 0.1, 1.0, 9.0)
"""Numbers by which it is told whether a step is one of signs."""


def kinked(run: Any, out: Tensor, root: Tensor, x: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """``out``, a (leaky) ReLU of ``root``, or of ``x``, a scaling of it, that the model has written out, by a mask
    perhaps; where its numbers have both signs, or the mask is known to tell them, it is one factor, as activations
    are."""
    if mask is None or _tells_signs(run, mask, root) or _has_both_signs(root.detach()):
        _factors.made_of(run, out, 1)
    if run.recipe.activation in (rules.identity, rules.unmodified) and carries(out) and _functions.fits(out, root):
        numbers, made = root.detach(), out.detach()
        signs = numbers > 0, numbers < 0
        slopes = [made[sign][:1] / numbers[sign][:1] for sign in signs]
        up, down = (float(slope) if slope.numel() else 0.0 for slope in slopes)

        def relu(x: Tensor) -> Tensor:
            return torch.where(x > 0, up * x, down * x)

        _lost.refuse_moved(run, relu, Function(root))
        f = function_of(root) or Function(root)
        run.keep_root(f.root)
        _functions.write_note(out, Function(f.root, max(CURVED, f.kind), f.exact, _functions.then(f.op, relu)))
    return mark_relu(run.recipe, out, root if x is None else x)


def _has_both_signs(x: Tensor) -> bool:
    return bool((x < 0).any()) and bool((x > 0).any())


def masked_by_sign(run: Any, x: Any, mask: Any) -> Tensor | None:
    """What ``x`` is a scaling of, perhaps itself, if a mask that it is multiplied with, or filled with 0 by, is that of
    the signs of this: the result is a (leaky) ReLU then. A mask of numbers has two of them."""
    if (
        type(mask) is not Tensor
        or mask.requires_grad
        or mask.shape != x.shape
        or not carries(x)
        or not _finds_relus(run)
    ):
        return None
    f = function_of(x)
    root = f.root if f is not None and f.kind == LINEAR and f.exact and f.root.shape == x.shape else x
    return root if _tells_signs(run, mask, root) else None


def _of_step(run: Any, x: Tensor, mask: Any, op: Callable[..., Any]) -> Function | None:
    """``op(x, mask)`` as a function of what ``x`` is a function of, if the mask is a step of that, or of another
    function of it; also where both were moved alike."""
    of, again = _steps.step_of(mask)
    if of is None or again is None:
        return None
    both = _combined.of_same(run, x, of)
    if both is None:
        return None
    if both[0].root is not both[1].root:  # functions that were moved apart
        if run.recipe.activation not in PARTWISE:
            run.refuse(_lost.MOVED)
        return None
    f, before, at = both[0], both[0].op, both[1].op

    def whole(root: Tensor) -> Any:
        return op(root if before is None else before(root), again(root if at is None else at(root)))

    return Function(f.root, max(CURVED, f.kind), f.exact, whole)


def piece(run: Any, op: Callable[..., Any], x: Any, mask: Any) -> Tensor | None:
    """``op(x, mask)``, what a number was added to after a function of a tensor, masked by a step of that tensor, or of
    another function of it: one piece of a function of it, ``(exp(a) - 1) * (a <= 0)``, to which the number belongs."""
    if not hasattr(mask, _steps.STEP) or run.recipe.activation in PARTWISE or not _functions.is_shifted(x):
        return None
    f, value = _of_step(run, x, mask, op), op(x.detach(), mask)
    if f is None or f.op is None or not _functions.fits(value, f.root):
        return None
    _lost.refuse_moved(run, f.op, f._replace(op=None))
    if f.root is x:  # which was shifted before it was moved
        return None
    return _activations.as_whole(run, f.root, value, f.op, f.kind)


def stepped(run: Any, out: Tensor, op: Callable[..., Any], x: Any, mask: Any) -> None:
    """``out = op(x, mask)``, masked by a step of what ``x`` is a function of, as a hard shrinkage is: noted as a
    function of that, which hands all on."""
    if not (hasattr(mask, _steps.STEP) and _finds_relus(run) and type(x) is Tensor and carries(out) and out is not x):
        return
    f = _of_step(run, x, mask, op)
    if f is not None and _functions.fits(out, f.root):
        run.keep_root(f.root)
        _functions.write_note(out, f)
        _combined.mark_function(run, out, f)


def zeroed(run: Any, x: Any, mask: Any) -> Tensor | None:
    """The same, with zeros where the mask says so; a new tensor."""
    return piece(run, lambda x, mask: x.masked_fill(mask, 0.0), x, mask)


def _piece_or_zero(run: Any, where: Any, a: Any, b: Any) -> Tensor | None:
    """The same, where one of two is chosen and the other is 0."""
    where, a = _condition_first(where, a)
    if not hasattr(where, _steps.STEP):  # nearly always
        return None
    if _is_zero(b):
        return piece(run, lambda x, mask: torch.where(mask, x, 0.0), a, where)
    return piece(run, lambda x, mask: torch.where(mask, 0.0, x), b, where) if _is_zero(a) else None


def _step_or_zero(run: Any, out: Tensor, where: Any, a: Any, b: Any) -> None:
    """Note what is chosen by a step of it, or 0, as a function of one tensor."""
    where, a = _condition_first(where, a)
    if not hasattr(where, _steps.STEP):  # nearly always
        return
    if _is_zero(b):
        stepped(run, out, lambda x, mask: torch.where(mask, x, 0.0), a, where)
    elif _is_zero(a):
        stepped(run, out, lambda x, mask: torch.where(mask, 0.0, x), b, where)


def _is_zero(value: Any) -> bool:
    """Whether a value is 0, or zeros by what the model has written."""
    of, number = _steps.step_of(value)
    return of is None and number is not None and not number(torch.zeros(()))


def written_zeros(run: Any, x: Tensor, mask: Any, *, in_place: bool) -> Tensor | None:
    """The same, of what zeros will be written into; a copy of ``x``, if it is changed."""
    root = masked_by_sign(run, x, mask)
    if root is not x or root is None or not in_place:
        return root
    copy: Tensor = x.clone()
    if (found := function_of(x)) is not None:
        _functions.write_note(copy, found)
    return copy


def filled(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A number in some places of a tensor."""
    x, mask, value = arguments(args, kwargs, "input", "mask", "value")
    is_zero = type(value) in (int, float) and value == 0
    in_place = is_in_place(func.__name__)
    if is_zero and (whole := zeroed(run, x, mask)) is not None:
        return write(run, x, whole) if in_place else whole
    root = written_zeros(run, x, mask, in_place=in_place) if is_zero else None
    before = _functions.to_be_filled(x, in_place=in_place)
    out = _exponentials.plain_of_exponentials(run, func, args, kwargs)
    if not in_place:
        _steps.keep(func, out, *args, **kwargs)
    _functions.filled(out, before, value, lambda x, value: torch.where(mask, value, x))
    if root is not None:
        return kinked(run, out, root, x, mask)
    if is_zero and not in_place:
        stepped(run, out, lambda x, mask: x.masked_fill(mask, 0.0), x, mask)
        return told(run.recipe, out) if gate_strength(out) else out
    return out


def larger(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The larger, or the smaller, of two; of a tensor and zeros, or of two scalings of one, a (leaky) ReLU."""
    out = called(func, args, kwargs)
    if isinstance(out, tuple):  # with the places
        largest_of_all(run, _extreme_of(func), out[0], *arguments(args, kwargs, "input", "dim")[:2])
        return out
    given = arguments(args, kwargs, "input", "other")
    if not all(isinstance(each, Tensor) for each in given):
        return out
    if not carries(out):
        return run.computed(out, *given)
    if _finds_relus(run) and type(out) is Tensor:
        scalings = [function_of(each) or Function(each) for each in given if carries(each)]
        is_of_one = _are_scalings(scalings[0].root, scalings)
        is_one = is_of_one and len(scalings) == 2 and torch.equal(*given)
        has_zeros = not any(bool(each.any()) for each in given if not carries(each))
        if is_of_one and not is_one and has_zeros:
            return kinked(run, out, scalings[0].root)
        if len(scalings) == 1 and has_zeros:  # and a function
            return kinked(run, out, next(filter(carries, given)))
        if not is_one and all(map(carries, given)):
            made = _combined.in_pieces(run, out, func, *given, least=CURVED)
            return told(run.recipe, made) if gate_strength(made) else made  # and no weaker than one of them
    return out


def _extreme_of(func: Any) -> Callable[..., Any]:
    return torch.amin if "min" in func.__name__ else torch.amax


def extreme(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The largest, or the smallest, along a dimension; of two, of which one is 0, a ReLU."""
    out = called(func, args, kwargs)
    largest_of_all(run, _extreme_of(func), out, *arguments(args, kwargs, "input", "dim")[:2])
    return out


def largest_of_all(run: Any, choose: Callable[..., Any], out: Tensor, x: Tensor, dim: Any) -> None:
    """``out`` is the largest, or the smallest, of ``x`` along a dimension: mark it, if it is a ReLU, or one of several
    functions of one tensor that were stacked."""
    if not (_finds_relus(run) and type(out) is Tensor and out.requires_grad and isinstance(dim, int)):
        return
    if (place := zero_beside(x, dim)) is not None:
        part = x.select(dim, place)
        kinked(run, out, part if out.shape == part.shape else part.unsqueeze(dim), out)
    elif takes_all(run.recipe) and _combined.mark_chosen(run, out, _joined.parts_of(x, dim), choose):
        told(run.recipe, out)


def zero_beside(x: Tensor, dim: int) -> int | None:
    """Of a constant 0 and something else that were put together along a dimension: which of the two the other is."""
    node: Any = x.grad_fn
    if node is None or x.ndim == 0 or x.shape[dim] != 2 or kind(node) not in ("Stack", "Cat"):
        return None
    if sum(child is not None for child, _ in node.next_functions) != 1:
        return None
    return next((1 - i for i in (0, 1) if not x.detach().select(dim, i).any()), None)
