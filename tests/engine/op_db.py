"""Every operation of torch's own operator database under the engine, judged by what plain torch says of it.

A program, for the database changes torch when it is imported, and an operation may end the process:
``python -m tests.engine.op_db SAMPLES FIRST [NAME …]`` writes a line of JSON for each operation from the first on, or
those of these names, before and after it is judged. ``test_op_db.py`` starts it.

The judge shares nothing with the engine. It finds out what a function is by calling it: linear, piecewise linear
through zero, element-wise, or a product of several; each of these has one right answer. What is none of these needs
its answer written out (``references.py``), or must be refused.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lrpx.engine import propagate
from lrpx.errors import LRPxError, NonFiniteError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from tests.engine.op_db_references import COMPOSED, LENGTHS, NORMALISERS, REFERENCES, SELECTIONS, STEPS, VARIANCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RECIPES = {"attnlrp": ATTNLRP, "lrp": LRP, "gradient": GRADIENT}
RUNS = (("attnlrp", True), ("lrp", False), ("lrp", True), ("gradient", True))
"""Recipes, with a ledger or without."""

SPELLED = 1
"""On how many samples every spelling is judged."""


class Calls(nn.Module):
    """A function of tensors, as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        nothing = sum(
            x.nan_to_num().sum() * 0.0 for x in (x.clone() for x in tensors)
        )  # adds constants to what carries
        return tuple(y if y.requires_grad else y + nothing for y in outputs(self.function(*tensors)))


@dataclass(frozen=True)
class Case:
    """One spelling of one operation on one sample.

    Args:
        call: the torch function.
        arguments: its arguments by place and by name, from the tensors that carry.
        tensors: these, at the sample's values.
    """

    call: Callable[..., Any]
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    tensors: tuple[Tensor, ...]

    def function(self, *tensors: Tensor) -> Any:
        """What the torch function returns."""
        args, kwargs = self.arguments(*tensors)
        return self.call(*args, **kwargs)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs that can depend on copies of the tensors, complex ones as their two parts."""
        torch.manual_seed(0)
        return outputs(self.function(*(x.clone() for x in tensors or self.tensors)))

    def alone(self, i: int) -> Case:
        """The same function of one of its tensors."""

        def arguments(x: Tensor) -> Any:
            return self.arguments(*(x if j == i else other.clone() for j, other in enumerate(self.tensors)))

        return replace(self, arguments=arguments, tensors=(self.tensors[i],))


def outputs(result: Any) -> tuple[Tensor, ...]:
    found = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
    found = [each.to_dense() if each.layout is not torch.strided else each for each in found]
    found = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in found]
    return tuple(each for each in found if each.is_floating_point())


def weighted(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """One number of all outputs, each element weighted on its own; what is not finite is left out."""
    total = torch.zeros((), dtype=torch.float64)
    for each, plain in zip(found, wanted, strict=True):
        weights = torch.linspace(0.5, 1.5, each.numel(), dtype=torch.float64).view(each.shape)
        total = total + torch.where(plain.isfinite(), each.double() * weights, 0.0).sum()
    return total


# ------------------------------------------------------------------------------ the cases


def spellings(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", op.op
    for name in ("method_variant", "operator_variant", "inplace_variant", "inplace_operator_variant"):
        variant = getattr(op, name, None)
        if callable(variant) and variant is not op.op:
            yield name.removesuffix("_variant"), variant
    for alias in op.aliases:
        yield f"alias {alias.name}", alias.op
        for name in ("method_variant", "inplace_variant"):
            variant = getattr(alias, name, None)
            if callable(variant):
                yield f"alias {alias.name} {name.removesuffix('_variant')}", variant


def by_name(op: Any, args: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The names that torch's schemas have for the arguments."""
    name = op.aten_name or op.name
    packet = getattr(torch.ops.aten, name.split(".")[-1], None)
    seen = []
    for overload in packet.overloads() if packet is not None else ():
        names = [a.name for a in getattr(packet, overload)._schema.arguments if not a.kwarg_only]
        names = ["input" if each == "self" else each for each in names][: len(args)]
        if len(names) == len(args) and names not in seen:
            seen.append(names)
            yield dict(zip(names, args, strict=True))


def is_input(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


UNFIT = ("empty", "fractional_max_pool", "to_sparse", "sparse_sampled_addmm")
"""What has no values, takes random numbers that may not need a gradient, or gives what has no strides."""

UNFIT_SETTINGS = ("max_norm", "sparse")
"""Settings of an embedding that change its table, or give it a sparse gradient."""


def cases(op: Any, sample: Any) -> Iterator[tuple[str, Case]]:
    """Each spelling of an operation, all tensors carrying; and the function with each of them alone."""
    flat, structure = tree_flatten((sample.input, *sample.args))
    places = [i for i, each in enumerate(flat) if is_input(each)]
    named, named_structure = tree_flatten(dict(sample.kwargs))
    named_places = [i for i, each in enumerate(named) if is_input(each)]
    tensors = tuple(flat[i] for i in places) + tuple(named[i] for i in named_places)

    def case(call: Callable[..., Any], carrying: tuple[int, ...]) -> Case:
        def arguments(*given: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
            values = dict(zip(carrying, given, strict=True))
            here, by = list(flat), list(named)
            for n, i in enumerate(places):
                here[i] = values.get(n, flat[i].clone())
            for n, i in enumerate(named_places, len(places)):
                by[i] = values.get(n, named[i].clone())
            return tuple(tree_unflatten(here, structure)), dict(tree_unflatten(by, named_structure))

        return Case(call, arguments, tuple(tensors[i] for i in carrying))

    everything = tuple(range(len(tensors)))
    if not tensors:
        return
    for name, call in spellings(op):
        yield name, case(call, everything)
    try:
        given = list(by_name(op, (sample.input, *sample.args)))
    except Exception:
        given = []
    for names in given:
        keys = list(names)
        for k in {0, len(keys) - 1}:

            def named_call(*args: Any, keys: Any = keys, k: int = k, **kwargs: Any) -> Any:
                return op.op(*args[:k], **dict(zip(keys[k:], args[k:], strict=True)), **kwargs)

            yield f"by name {','.join(keys[k:])}", case(named_call, everything)
    if len(tensors) > 1:
        for i in everything:
            yield f"alone {i}", case(op.op, (i,))
            if callable(getattr(op, "inplace_variant", None)):
                yield f"alone {i} inplace", case(op.inplace_variant, (i,))


# ---------------------------------------------------------------------- what plain torch says


def plain_gradients(case: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor] | None:
    """Outputs, gradients and the explained number, by autograd; None where torch itself has none."""
    leaves = [x.detach().clone().requires_grad_() for x in case.tensors]
    found = case(*(x.clone() for x in leaves))
    value = weighted(found, [y.detach() for y in found])
    if not value.requires_grad:
        return tuple(y.detach() for y in found), tuple(torch.zeros_like(x) for x in leaves), value
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return (
        tuple(y.detach() for y in found),
        tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)),
        value.detach(),
    )


LOSSES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-6}
"""What is lost in outputs that are less precise than the inputs."""


def precision(tensors: Sequence[Tensor]) -> float:
    return max([1e-8, *(LOSSES.get(x.dtype, 0.0) for x in tensors)])


def close(a: Tensor, b: Tensor, loss: float = 1e-8) -> bool:
    size = max(1.0, float(b.nan_to_num(posinf=0, neginf=0).abs().max())) if b.numel() else 1.0
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), loss, loss * size, equal_nan=True)


def all_close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(close(x, y, precision([x])) for x, y in zip(a, b, strict=True))


def combined(a: float, xs: Sequence[Tensor], b: float, ys: Sequence[Tensor]) -> list[Tensor]:
    return [a * x + b * y for x, y in zip(xs, ys, strict=True)]


def is_affine(case: Case) -> bool:
    generator = torch.Generator().manual_seed(1)
    xs = case.tensors
    try:
        for size in (1.0, 30.0, -3.0):
            ys = [size * (torch.rand(x.shape, generator=generator, dtype=x.dtype) + 0.5) for x in xs]
            mixed, apart = case(*combined(2.5, xs, -1.5, ys)), combined(2.5, case(), -1.5, case(*ys))
            if not all(m.isfinite().all() for m in mixed) or not all_close(mixed, apart):
                return False
    except Exception:
        return False
    return True


def parts(case: Case) -> list[Tensor] | None:
    """The relevance of each tensor where the function is affine in each: its products of some of them, found by setting
    the others to zero, share evenly. None for any other function."""
    n = len(case.tensors)
    if n > 5 or not all(is_affine(case.alone(i)) for i in range(n)):
        return None
    relevances = [torch.zeros_like(x) for x in case.tensors]
    y = case()
    for signs in product((False, True), repeat=n):
        if any(signs):
            # the term of these tensors by inclusion and exclusion, and its gradient
            leaves = [x.detach().clone().requires_grad_() for x in case.tensors]
            total = torch.zeros((), dtype=torch.float64)
            for kept in product(*((False, True) if sign else (False,) for sign in signs)):
                sign = (-1) ** (sum(signs) - sum(kept))
                given = [x.clone() if keep else x * 0.0 for x, keep in zip(leaves, kept, strict=True)]
                total = total + sign * weighted(outputs(case.function(*given)), y)
            if total.requires_grad:
                gradients = torch.autograd.grad(total, leaves, allow_unused=True)
                for i, gradient in enumerate(gradients):
                    if signs[i] and gradient is not None:
                        relevances[i] += case.tensors[i] * gradient / sum(signs)
    return relevances


def is_straight(case: Case, gradients: Sequence[Tensor], value: Tensor) -> bool:
    """Whether the function is linear near where it is."""
    generator = torch.Generator().manual_seed(2)
    small = [1e-6 * torch.rand(x.shape, generator=generator, dtype=x.dtype) for x in case.tensors]
    try:
        slope = sum((h * g).sum() for h, g in zip(small, gradients, strict=True))
        beside = weighted(case(*combined(1, case.tensors, 1, small)), case())
        return bool((beside - value - slope).abs() < 1e-13 * (1 + value.abs()) * 100)
    except Exception:
        return False


def is_through_zero(case: Case, gradients: Sequence[Tensor], value: Tensor) -> bool:
    """Whether it is of degree one."""
    euler = sum((x * g).sum() for x, g in zip(case.tensors, gradients, strict=True))
    try:
        return all_close(case(*(2 * x for x in case.tensors)), [2 * y for y in case()]) and bool(
            (euler - value).abs() < 1e-9 * (1 + value.abs())
        )
    except Exception:
        return False


def is_element_wise(case: Case) -> bool:
    """One tensor in and one out, and each element depends on its own alone."""
    found = case()
    if len(case.tensors) != 1 or len(found) != 1 or found[0].shape != case.tensors[0].shape:
        return False
    x, y = case.tensors[0], found[0]
    for place in {0, x.numel() // 2, x.numel() - 1} if x.numel() > 1 else ():
        changed = x.clone().flatten()
        changed[place] = 0.5 * changed[place] + 0.1
        try:
            other = case(changed.view(x.shape))[0].flatten()
        except Exception:
            return False
        expected = y.clone().flatten()
        expected[place] = other[place]
        if not close(other, expected):
            return False
    return True


def expected(
    op: Any, case: Case, recipe: str, y: Sequence[Tensor], gradients: Sequence[Tensor], value: Tensor
) -> tuple[str, list[Tensor] | None]:
    """What the function is, and the relevance of each tensor; None where only a reference can tell."""
    plain = [x * g for x, g in zip(case.tensors, gradients, strict=True)]
    name, nothing = op.formatted_name, [torch.zeros_like(x) for x in case.tensors]
    if name in STEPS:
        return "step", nothing
    if recipe == "gradient":
        return "gradient", plain
    if name in COMPOSED:
        return "composed", None
    if name in NORMALISERS:
        return "normaliser", nothing
    if name in LENGTHS | VARIANCES:
        return "length", [x / 2 if name in VARIANCES else x for x in plain]
    if name in REFERENCES:
        return "reference", by_reference(replace(case, call=REFERENCES[name](recipe)), y)
    shared = parts(case)
    if shared is not None:
        return "multilinear", shared
    straight = is_straight(case, gradients, value)
    if straight and ((name in SELECTIONS and not is_bounded(case)) or is_through_zero(case, gradients, value)):
        return "piecewise linear", plain
    if is_element_wise(case):
        (x,), (out,) = case.tensors, y
        weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
        through_zero = not case(torch.zeros_like(x))[0].any()
        kept = (x != 0) & (through_zero | (out.abs() <= 1e4 * x.abs())) & out.isfinite()
        return "element-wise", [torch.where(kept, out * weights, 0.0)]
    return "compound", None


def is_bounded(case: Case) -> bool:
    """Whether one of two is a number, which bounds the other as a clamp does."""
    given = [each for each in case.arguments(*case.tensors)[0] if isinstance(each, Tensor)]
    others = [each for each in given if all(each is not x for x in case.tensors)]
    return len(given) == 2 and len(others) == 1 and len(others[0].unique()) == 1


def by_reference(case: Case, y: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in case.tensors]
    total = weighted(outputs(case.function(*(x.clone() for x in leaves))), y)
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in case.tensors]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    zipped = zip(case.tensors, found, strict=True)
    return [torch.zeros_like(x) if g is None else x * g for x, g in zipped]


# ------------------------------------------------------------------------------ the judgement


def judged(op: Any, case: Case, recipe: str, ledger: bool, wanted: Any) -> tuple[str, str]:
    """``("right", what it is)``, ``("refused", why)``, ``("skipped", why)`` or ``("wrong", how)``."""
    y, gradients, value = wanted
    loss, model = precision(y), Calls(case.function)
    try:
        with propagate(model, RECIPES[recipe], (), ledger=ledger) as trace:
            torch.manual_seed(0)
            found = model(*(x.clone() for x in case.tensors))
            if not all_close(found, y):  # to rounding: torch chooses some kernels by whether a gradient is needed
                return "wrong", "another value"
            total = weighted(found, y)
            for source in trace.sources:
                total = total + (source.value * 0.0).nan_to_num().sum()
            trace.explain(total)
            relevances = [trace.source_relevance(source) for source in trace.sources]
            missing = trace.ledger().difference if ledger else 0.0
            scale = trace.ledger().scale if ledger else 1.0
    except NonFiniteError as error:
        return "skipped", str(error)
    except LRPxError as error:
        return "refused", f"{type(error).__name__}: {error}"
    if not all(g.isfinite().all() for g in gradients):
        return "skipped", "torch's own gradient is not finite"
    if len(relevances) != len(case.tensors):
        return "wrong", f"{len(relevances)} sources for {len(case.tensors)} tensors"
    what, right = expected(op, case, recipe, y, gradients, value)
    if right is None:
        if what == "compound":
            return "wrong", "compound: what is right must be written out, or it must be refused"
        right = relevances
    for n, (a, b) in enumerate(zip(relevances, right, strict=True)):
        if not close(a.nan_to_num(), b.nan_to_num(), loss):
            sums = f"{float(a.sum()):.6g}, not {float(b.sum()):.6g} of {float(value):.6g}"
            return "wrong", f"{what}: tensor {n} has {sums}"
    sizes = [scale, 1e-30, *(float(each.nan_to_num().abs().sum()) for each in relevances)]
    if abs(missing) > max(loss, 1e-9) * max(sizes):
        return "wrong", f"{what}: the ledger misses {missing:.3g} of {float(value):.6g}"
    return "right", what


def judge(op: Any, samples: int) -> Iterator[dict[str, str]]:
    """What comes out of every spelling of an operation on its first samples, and of its function on all."""
    for n, sample in enumerate(islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), samples)):
        if any(sample.kwargs.get(name) for name in UNFIT_SETTINGS):
            continue
        for spelling, case in cases(op, sample) if n < SPELLED else islice(cases(op, sample), 1):
            try:
                wanted = plain_gradients(case)
                if not wanted[0] or not all_close(case(), wanted[0]):  # it is random, or no number
                    continue
            except Exception as error:  # torch cannot do it
                yield {"at": f"sample {n}, {spelling}", "verdict": "skipped", "why": f"{error!r:.80}"}
                continue
            for recipe, ledger in RUNS:
                at = f"sample {n}, {spelling}, {recipe}{', ledger' if ledger else ''}"
                print(json.dumps({"at": at}), flush=True)
                try:
                    verdict, why = judged(op, case, recipe, ledger, wanted)
                except NotImplementedError as error:
                    verdict, why = ("skipped" if not error.args else "crash"), repr(error)
                except Exception as error:
                    verdict, why = "crash", f"{type(error).__name__}: {str(error)[:200]}"
                yield {"at": at, "verdict": verdict, "why": why}


def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float64 in op.dtypes and not any(name in op.name for name in UNFIT)]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count, first, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for i, op in enumerate(database()):
        if i >= first and (not names or op.formatted_name in names):
            print(json.dumps({"op": op.formatted_name, "number": i}), flush=True)
            results = list(judge(op, count))
            print(json.dumps({"op": op.formatted_name, "results": results}), flush=True)


if __name__ == "__main__":
    main()
