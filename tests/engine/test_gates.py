"""A gate stays one in whatever way a model writes what only moves it, chooses from it or puts it together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx.engine import propagate
from lrpx.errors import UnknownOperationError
from lrpx.recipes import ATTNLRP, LRP

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.recipes import Recipe

    Function = Callable[[Tensor, Tensor], Tensor]

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 5, 4, generator=GENERATOR, dtype=torch.float64)
UP, OTHER = torch.randn(2, 4, 6, generator=GENERATOR, dtype=torch.float64)
THIRD = torch.randn(6, 6, generator=GENERATOR, dtype=torch.float64)
K = torch.randn(6, generator=GENERATOR, dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ UP, x @ OTHER)


def relevance(function: Function, recipe: Recipe, ledger: bool = False) -> Tensor:
    model = Model(function)
    with propagate(model, recipe, observe=(), ledger=ledger) as trace:
        y = model(X)
        trace.explain(y.sum())
    assert torch.equal(y, model(X))
    assert not ledger or trace.ledger().closes(1e-9)
    return trace.relevance("x")


def agree(spelled: Function, plain: Function, recipe: Recipe) -> None:
    found, wanted = relevance(spelled, recipe), relevance(plain, recipe)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert torch.allclose(relevance(spelled, recipe, ledger=True), found, rtol=1e-10, atol=1e-12)


def written(g: Tensor) -> Tensor:
    made = torch.zeros_like(g)
    made[:, :3] = g[:, :3]
    made[:, 3:] = g[:, 3:]
    return made


WHERE = torch.ones(3, 5, 6, dtype=torch.bool)
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "mT": lambda g: g.mT.mT,
    "index": lambda g: g[:, torch.arange(5)],
    "cat": lambda g: torch.cat([g[:, :2], g[:, 2:]], 1),
    "stack": lambda g: torch.stack([g, 1 * g])[0],
    "max": lambda g: torch.stack([g, g]).max(0)[0],
    "amax": lambda g: torch.stack([g, g]).amax(0),
    "minimum": lambda g: torch.minimum(g, torch.full((1,), 1e9, dtype=torch.float64)),
    "where": lambda g: torch.where(WHERE, g, 2 * g),
    "clamp": lambda g: g.clamp(0, 1e9),
    "relu": F.relu,
    "abs": torch.abs,
    "square": lambda g: g.square().sqrt(),
    "pow": lambda g: g.pow(2.0).pow(0.5),
    "diagonal": lambda g: g.diag_embed().diagonal(dim1=-2, dim2=-1),
    "take": lambda g: g.take(torch.arange(90).view(3, 5, 6)),
    "fliplr": lambda g: g.fliplr().fliplr(),
    "written": written,
    "copied": lambda g: torch.zeros_like(g).copy_(g),
    "scattered": lambda g: torch.zeros_like(g).scatter(0, torch.arange(3)[:, None, None].expand(3, 5, 6), g),
    "product": lambda g: g.sqrt() * g.sqrt(),
}


@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_a_sigmoid_is_a_gate(same: Callable[[Tensor], Tensor]) -> None:
    agree(lambda a, b: same(torch.sigmoid(a)) * torch.tanh(b), lambda a, b: torch.sigmoid(a) * torch.tanh(b), LRP)


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_an_exponential_is_a_gate(same: Callable[[Tensor], Tensor], recipe: Recipe) -> None:
    agree(lambda a, b: same(torch.exp(a)) * b, lambda a, b: torch.exp(a) * b, recipe)


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
def test_a_product_of_gates_is_a_gate(recipe: Recipe) -> None:
    agree(
        lambda a, b: (torch.exp(a) * torch.exp(b)) * (a - b),
        lambda a, b: torch.exp(a) * (torch.exp(b) * (a - b)),
        recipe,
    )
    if recipe is LRP:
        agree(
            lambda a, b: (torch.exp(a) * torch.sigmoid(b)) * (a - b),
            lambda a, b: torch.exp(a) * (torch.sigmoid(b) * (a - b)),
            recipe,
        )


def test_what_something_else_is_written_into_is_no_gate() -> None:
    def half(a: Tensor, b: Tensor) -> Tensor:
        gate = torch.sigmoid(a)
        gate[:, :3] = b[:, :3]
        return gate * b

    def apart(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([b[:, :3], torch.sigmoid(a)[:, 3:]], 1) * b

    agree(half, apart, LRP)


POWERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "cube": (lambda x: x**3, lambda x: x * x * x),
    "root": (lambda x: x.abs().sum(-1, keepdim=True) ** 0.5, lambda x: x.abs().sum(-1, keepdim=True).sqrt()),
}


@pytest.mark.parametrize("name", POWERS)
def test_a_power_is_the_activation_that_it_is_by_another_name(name: str) -> None:
    power, other = POWERS[name]
    agree(lambda a, b: power(a) * b, lambda a, b: other(a) * b, LRP)


def test_the_logarithm_of_a_sigmoid_is_no_surer_than_another_activation() -> None:
    agree(lambda a, b: F.logsigmoid(a) * F.silu(b), lambda a, b: -(F.softplus(-a) * F.silu(b)), LRP)


# -------------------------------------------------------------------------- beside gates


def looped(a: Tensor, b: Tensor) -> Tensor:
    made = torch.zeros(3, 90, dtype=torch.float64)
    for i in range(90):
        made[:, i] = a[:, i % 5, i % 6] * b[:, i % 5, i % 6]
    return made


JOINED: dict[str, Function] = {
    "cat": lambda a, b: torch.cat([(a[:, i % 5, i % 6] * b[:, i % 5, i % 6]).view(3, 1) for i in range(90)], 1),
    "loop": looped,
    "chosen": lambda a, b: looped(a, b)[None].amax(0),
    "mean": lambda a, b: looped(a, b)[None].mean(0),
    "copy": lambda a, b: a[:, torch.arange(90) % 5, torch.arange(90) % 6].mul_(looped(b, torch.ones_like(b))),
}


@pytest.mark.parametrize("name", JOINED)
def test_three_factors_have_a_third_each(name: str) -> None:
    """However many parts the first two were put together from."""

    def third(a: Tensor, b: Tensor) -> Tensor:
        return (a @ THIRD)[:, torch.arange(90) % 5, torch.arange(90) % 6]

    def at_once(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bi,bi,bi->bi", third(a, a), third(b, b), third(a - b, b))

    agree(
        lambda a, b: JOINED[name](a @ THIRD, b @ THIRD) * third(a - b, b),
        at_once,
        ATTNLRP,
    )


LERPS: dict[str, tuple[Function, Function]] = {
    "constant ends": (
        lambda a, b: torch.lerp(K.expand_as(a), K.flip(0).expand_as(a), a.sigmoid()),
        lambda a, b: K + a.sigmoid() * (K.flip(0) - K),
    ),
    "constant end": (
        lambda a, b: torch.lerp(a, K.expand_as(a), b.sigmoid()),
        lambda a, b: a + b.sigmoid() * (K - a),
    ),
    "constant start": (
        lambda a, b: torch.lerp(K.expand_as(a), a, b.sigmoid()),
        lambda a, b: K + b.sigmoid() * (a - K),
    ),
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
@pytest.mark.parametrize("name", LERPS)
def test_an_interpolation_is_what_it_is_written_out(name: str, recipe: Recipe) -> None:
    agree(*LERPS[name], recipe)


OUT: dict[str, Callable[..., object]] = {
    "mul": lambda out: torch.mul(K, K, out=out),
    "pow": lambda out: torch.pow(K, 2, out=out),
    "square": lambda out: torch.square(K, out=out),
    "lerp": lambda out: torch.lerp(K, K.flip(0), 0.5, out=out),
    "hypot": lambda out: torch.hypot(K, K, out=out),
    "logaddexp": lambda out: torch.logaddexp(K, K, out=out),
    "exp": lambda out: torch.exp(nn.Parameter(K), out=out),
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
@pytest.mark.parametrize("fill", OUT.values(), ids=OUT)
def test_a_result_is_written_where_the_model_wants_it(fill: Callable[..., object], recipe: Recipe) -> None:
    def scaled(a: Tensor, b: Tensor) -> Tensor:
        out = torch.zeros(6, dtype=torch.float64)
        fill(out)
        return a * out

    with torch.no_grad():
        wanted = Model(scaled)(X)
    model = Model(scaled)
    with propagate(model, recipe, observe=()) as trace:
        y = model(X)
        trace.explain(y.sum())
    assert torch.equal(y, wanted)
    assert wanted.any()


def test_what_depends_on_the_input_is_not_written_out() -> None:
    model = Model(lambda a, b: torch.mul(a, b, out=torch.empty_like(a)))
    with propagate(model, ATTNLRP), pytest.raises(UnknownOperationError, match="'mul' with out="):
        model(X)
