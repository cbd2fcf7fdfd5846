"""A gate stays one in whatever way a model writes what only moves it, chooses from it or puts it together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx.engine import propagate
from lrpx.errors import UnknownOperationError
from lrpx.recipes import ATTNLRP, LRP
from lrpx.rules import unmodified

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
MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda g: g[:, None][:, 0],
    "unsqueeze": lambda g: g.unsqueeze(1).squeeze(1),
    "negative": lambda g: -g.neg(),
    "scaled": lambda g: 2 * g * 0.5,
    "divided": lambda g: g / K * K,
    "chunk": lambda g: torch.cat([g, g], -1).chunk(2, -1)[1],
    "split": lambda g: torch.cat([g, g], -1).split([6, 6], -1)[0],
    "unbind": lambda g: torch.stack(g.unbind(1), 1),
    "narrow": lambda g: torch.cat([g.narrow(1, 0, 2), g[:, 2:]], 1),
    "gather": lambda g: g.gather(1, torch.arange(5)[None, :, None].expand(3, 5, 6)),
    "repeat": lambda g: g.repeat(1, 2, 1)[:, 5:],
    "expand": lambda g: g[:, None].expand(3, 2, 5, 6)[:, 1],
    "padded": lambda g: F.pad(g, (1, 1))[..., 1:-1],
    "masked": lambda g: g.masked_fill(~WHERE, 0.0) * WHERE,
    "permuted": lambda g: g.permute(2, 0, 1).contiguous().permute(1, 2, 0).to(torch.float64),
    "sum": lambda g: torch.stack([0.25 * g, 0.75 * g]).sum(0),
    "mean": lambda g: torch.stack([g, g, g]).mean(0),
    "added": lambda g: 0.25 * g + 0.75 * g,
    "added in place": lambda g: (0.25 * g).add_(0.75 * g),
    "addcmul": lambda g: torch.addcmul(g, g, K) / (1 + K),
    "lerp": lambda g: torch.lerp(0.5 * g, 1.5 * g, 0.5),
    "shifted": lambda g: (g + K) - K,
    "first power": lambda g: g**1,
    "einsum": lambda g: torch.einsum("bti->tib", g).permute(2, 0, 1),
    "einsum with a constant": lambda g: torch.einsum("bti,i->bti", g, K) / K,
    "normed": lambda g: F.rms_norm(g, (6,)) * (g.square().mean(-1, keepdim=True) + torch.finfo(g.dtype).eps).sqrt(),
    "cumsum": lambda g: g.cumsum(1).diff(dim=1, prepend=torch.zeros(3, 1, 6, dtype=torch.float64)),
}
"""What hands on the relevance of its result, and makes a gate of a gate, whatever function it is the output of."""

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
    **MOVED,
}


@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_a_sigmoid_is_a_gate(same: Callable[[Tensor], Tensor]) -> None:
    agree(lambda a, b: same(torch.sigmoid(a)) * torch.tanh(b), lambda a, b: torch.sigmoid(a) * torch.tanh(b), LRP)


PRODUCTS: dict[str, Function] = {
    "over a reciprocal": lambda a, b: torch.tanh(b) / (1 / torch.sigmoid(a)),
    "over the function": lambda a, b: torch.tanh(b) / torch.sigmoid(a).reciprocal(),
    "over a power": lambda a, b: torch.tanh(b) / torch.sigmoid(a) ** -1,
    "diagonal": lambda a, b: (torch.diag_embed(torch.sigmoid(a)) @ torch.tanh(b)[..., None]).squeeze(-1),
    "diagonal on the right": lambda a, b: (torch.tanh(b)[..., None, :] @ torch.sigmoid(a).diag_embed()).squeeze(-2),
    "diagonals of vectors": lambda a, b: torch.stack(
        [torch.diag(g) @ s for g, s in zip(torch.sigmoid(a).flatten(0, 1), torch.tanh(b).flatten(0, 1), strict=True)]
    ).view(3, 5, 6),
    "stacked": lambda a, b: torch.stack([torch.tanh(b), torch.sigmoid(a)]).prod(0),
    "stacked last": lambda a, b: torch.prod(torch.stack([torch.sigmoid(a), torch.tanh(b)], -1), -1),
    "stacked, kept": lambda a, b: torch.stack((torch.sigmoid(a), torch.tanh(b)), dim=1).prod(1, keepdim=True)[:, 0],
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_another_spelling(name: str, recipe: Recipe) -> None:
    agree(PRODUCTS[name], lambda a, b: torch.sigmoid(a) * torch.tanh(b), recipe)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared relu": lambda a: F.relu(a).square(),
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "square root of softplus": lambda a: F.softplus(a).sqrt(),
    "softmax": lambda a: a.softmax(-1),
    "power": lambda a: a.pow(3),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("same", MOVED.values(), ids=MOVED)
def test_an_activation_is_a_gate(same: Callable[[Tensor], Tensor], gate: Callable[[Tensor], Tensor]) -> None:
    def scaled(a: Tensor, b: Tensor) -> Tensor:
        """What the gate is multiplied by takes all, whatever the gate's numbers are."""
        return same(gate(a)).detach() * b

    agree(lambda a, b: same(gate(a)) * b, scaled, LRP)
    agree(lambda a, b: b * same(gate(a)), scaled, LRP)


SIGMOIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "hyperbolic tangent": lambda a: torch.tanh(a / 2) * 0.5 + 0.5,
    "half of it": lambda a: 0.5 * (1 + torch.tanh(a / 2)),
    "in place": lambda a: torch.tanh(a / 2).mul_(0.5).add_(0.5),
    "one over": lambda a: 1 / (1 + torch.exp(-a)),
    "reciprocal": lambda a: (1 + torch.exp(-a)).reciprocal(),
    "negative power": lambda a: (1 + torch.exp(-a)) ** -1,
    "quotient": lambda a: torch.exp(a) / (1 + torch.exp(a)),
    "softmax of two": lambda a: torch.stack([a, torch.zeros_like(a)]).softmax(0)[0],
    "expit": torch.special.expit,
    "one less": lambda a: 1 - torch.sigmoid(-a),
}


@pytest.mark.parametrize("same", SIGMOIDS.values(), ids=SIGMOIDS)
def test_a_sigmoid_is_a_sure_gate_however_it_is_written(same: Callable[[Tensor], Tensor]) -> None:
    agree(lambda a, b: same(a) * torch.tanh(b), lambda a, b: torch.sigmoid(a).detach() * torch.tanh(b), LRP)


def test_a_sigmoid_by_a_negative_power_is_no_exponential() -> None:
    agree(lambda a, b: (1 + torch.exp(-a)) ** -1 * b, lambda a, b: torch.sigmoid(a) * b, ATTNLRP)


POSITIVE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softplus": (F.softplus, lambda a: torch.log(1 + torch.exp(a))),
    "hard sigmoid": (F.hardsigmoid, lambda a: F.relu6(a + 3) / 6),
    "clamped": (F.hardsigmoid, lambda a: (a + 3).clamp(0, 6) / 6),
    "logarithm": (F.logsigmoid, lambda a: -F.softplus(-a)),
    "normal": (torch.special.ndtr, lambda a: 0.5 * (1 + torch.erf(a / 2**0.5))),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_a_function_of_one_sign_is_a_sure_gate(name: str) -> None:
    for same in POSITIVE[name]:
        agree(lambda a, b, same=same: same(a) * F.silu(b), lambda a, b: POSITIVE[name][0](a).detach() * F.silu(b), LRP)


WEAK: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "elu": (F.elu, lambda a: torch.where(a > 0, a, torch.exp(a) - 1)),
    "silu": (F.silu, lambda a: a * torch.sigmoid(a)),
    "tanh": (torch.tanh, lambda a: torch.tanh(a / 2 * 2) * 2 / 2),
    "leaky relu": (lambda a: F.leaky_relu(a, 0.1), lambda a: torch.where(a > 0, a, 0.1 * a)),
    "leaky relu the other way": (lambda a: F.leaky_relu(a, 0.1), lambda a: torch.where(a < 0, 0.1 * a, a)),
    "abs": (torch.abs, lambda a: torch.where(a >= 0, a, -a)),
    "relu": (F.relu, lambda a: torch.where(a > 0, a, 0.0)),
    "relu by the method": (F.relu, lambda a: a.where(a > 0, 0.0)),
    "leaky relu by the method": (lambda a: F.leaky_relu(a, 0.1), lambda a: a.where(a > 0, 0.1 * a)),
}


@pytest.mark.parametrize("name", WEAK)
def test_a_function_of_two_signs_is_a_signal_to_a_sigmoid(name: str) -> None:
    for same in WEAK[name]:
        agree(
            lambda a, b, same=same: same(a) * torch.sigmoid(b),
            lambda a, b: WEAK[name][0](a) * torch.sigmoid(b).detach(),
            LRP,
        )


TANH: dict[str, Callable[[Tensor], Tensor]] = {
    "by a sigmoid": lambda a: 2 * torch.sigmoid(2 * a) - 1,
    "in place": lambda a: torch.sigmoid(2 * a).mul_(2).sub_(1),
    "by an exponential": lambda a: 1 - 2 / (1 + torch.exp(2 * a)),
    "moved": lambda a: (torch.sigmoid(2 * a) * 2 - 1).unsqueeze(1).squeeze(1),
}


@pytest.mark.parametrize("name", TANH)
def test_a_sigmoid_that_a_number_makes_one_of_two_signs_is_a_signal(name: str) -> None:
    """The number itself is a constant, added last as it is, so that it is the gates that are compared."""
    same = TANH[name]
    agree(lambda a, b: same(a) * torch.sigmoid(b), lambda a, b: same(a) * torch.sigmoid(b).detach(), LRP)


def test_a_selection_that_asks_for_something_else_is_no_gate() -> None:
    odd = torch.arange(90).view(3, 5, 6) % 2 == 1
    for choose in lambda a: torch.where(odd, a, 0.1 * a), lambda a: torch.where(odd, a, 0.0):
        agree(
            lambda a, b, choose=choose: choose(a) * torch.tanh(b),
            lambda a, b, choose=choose: choose(a) * torch.tanh(b).detach(),
            LRP,
        )


def test_what_the_other_factor_is_made_of_is_no_gate() -> None:
    """As ``x`` of Mamba is not; but the other half of a chunk is one."""

    def halves(a: Tensor, b: Tensor) -> Tensor:
        u = F.silu(a)
        return u[:, :, None].double() * (u @ THIRD)[:, :, None]

    def apart(a: Tensor, b: Tensor) -> Tensor:
        u = F.silu(a)
        return torch.einsum("bti,bti->bti", u @ torch.eye(6, dtype=u.dtype), u @ THIRD)

    agree(halves, lambda a, b: apart(a, b)[:, :, None], LRP)

    def gated(a: Tensor, b: Tensor) -> Tensor:
        u, v = F.silu(torch.cat([a, b], -1)).chunk(2, -1)
        return u * (v @ THIRD)

    agree(gated, lambda a, b: F.silu(a).detach() * (F.silu(b) @ THIRD), LRP)


SCALED = {
    "square": (torch.square, torch.square),
    "times itself": (lambda a: a * a, torch.square),
    "power": (lambda a: 0.5 * a**2, lambda a: 0.5 * a.square()),
    "turned": (lambda a: (a.mT**2).mT, torch.square),
    "relu by a mask": (lambda a: a * (a > 0), torch.relu),
    "relu by a step": (lambda a: (a > 0).double() * a, torch.relu),
    "abs by a sign": (lambda a: a * a.sign(), torch.abs),
}
"""Non-linearities whose node in the graph is a product with a constant, and what they are."""


@pytest.mark.parametrize("name", SCALED)
def test_what_a_gate_is_made_of_is_not_the_gate(name: str) -> None:
    """Nor where autograd has the gate as a scaling: the other factor, made of the same, is still the signal."""
    spelled, plain = SCALED[name]
    agree(lambda a, b: spelled(a) * (a @ THIRD), lambda a, b: plain(a).detach() * (a @ THIRD), LRP)


@pytest.mark.parametrize("square", [torch.square, lambda a: a * a, lambda a: 0.5 * a**2, torch.relu])
def test_a_square_is_a_gate_where_activations_have_no_rule(square: Callable[[Tensor], Tensor]) -> None:
    recipe = replace(LRP, activation=unmodified)
    agree(lambda a, b: square(a) * b, lambda a, b: square(a).detach() * b, recipe)
    agree(lambda a, b: square(a) * (a @ THIRD), lambda a, b: square(a).detach() * (a @ THIRD), recipe)


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
    "between gates": (
        lambda a, b: torch.lerp(F.silu(a), F.gelu(b), (a - b).sigmoid()) * torch.tanh(a + b),
        lambda a, b: (F.silu(a) + (a - b).sigmoid() * (F.gelu(b) - F.silu(a))) * torch.tanh(a + b),
    ),
    "between gates by a signal": (
        lambda a, b: torch.lerp(a.sigmoid(), b.sigmoid(), a - b),
        lambda a, b: a.sigmoid() + (a - b) * (b.sigmoid() - a.sigmoid()),
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


def test_a_first_power_of_a_signal_is_no_gate() -> None:
    agree(lambda a, b: a**1 * b, lambda a, b: a * b, LRP)


def pieces(a: Tensor, b: Tensor, *, where: Tensor) -> Tensor:
    return torch.where(where, a, b)


LEAKY = torch.tensor([0.1, 1.0], dtype=torch.float64)
IN_PIECES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "the larger": (lambda x: torch.maximum(x, x.tanh()), lambda x: pieces(x, x.tanh(), where=x > x.tanh())),
    "the smaller": (lambda x: torch.fmin(x.sigmoid(), x.exp()), lambda x: torch.fmin(x.exp(), x.sigmoid())),
    "of a stack": (
        lambda x: torch.stack([x, x.tanh()]).amax(0),
        lambda x: pieces(x, x.tanh(), where=x > x.tanh()),
    ),
    "with the places": (
        lambda x: torch.stack([x, x.tanh()], -1).max(-1).values,
        lambda x: pieces(x, x.tanh(), where=x > x.tanh()),
    ),
    "of three": (
        lambda x: torch.stack([x, 0.1 * x, -2 * x]).amin(0),
        lambda x: torch.minimum(torch.minimum(x, 0.1 * x), -2 * x),
    ),
    "lerp": (lambda x: torch.lerp(x, x.tanh(), 0.3), lambda x: 0.7 * x + 0.3 * x.tanh()),
    "lerp by a sigmoid": (lambda x: torch.lerp(torch.zeros_like(x), x, x.sigmoid()), F.silu),
    "lerp of functions": (
        lambda x: torch.lerp(x.tanh(), x, x.sigmoid()),
        lambda x: x.tanh() + x.sigmoid() * (x - x.tanh()),
    ),
    "a hard shrinkage by a mask": (lambda x: x * (x.abs() > 0.5), F.hardshrink),
    "a hard shrinkage by where": (lambda x: torch.where(x.abs() > 0.5, x, 0.0), F.hardshrink),
    "a hard shrinkage by zeros": (lambda x: x.masked_fill(x.abs() <= 0.5, 0.0), F.hardshrink),
    "slopes by signs": (lambda x: x * LEAKY[(x > 0).long()], lambda x: F.leaky_relu(x, 0.1)),
    "gathered": (
        lambda x: torch.stack([0.1 * x, x]).gather(0, (x > 0).long()[None])[0],
        lambda x: F.leaky_relu(x, 0.1),
    ),
    "a sigmoid by expm1": (lambda x: 1 / (torch.expm1(-x) + 2), torch.sigmoid),
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
@pytest.mark.parametrize("name", IN_PIECES)
def test_a_function_in_pieces_is_the_gate_that_it_is_as_a_whole(name: str, recipe: Recipe) -> None:
    spelled, whole = IN_PIECES[name]
    agree(lambda a, b: spelled(a) * b, lambda a, b: whole(a) * b, recipe)
    agree(lambda a, b: spelled(a) @ THIRD + b, lambda a, b: whole(a) @ THIRD + b, recipe)
