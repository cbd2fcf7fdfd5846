"""What computes the same has the same relevance, or is refused by name: gates, scales, divisions in many spellings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lrpx
from lrpx.errors import UnknownOperationError
from lrpx.recipes import ATTNLRP_VIT, GIM, LRP_CHEFER, LRP_VOITA

if TYPE_CHECKING:
    from collections.abc import Callable

    Of = Callable[..., Tensor]

ROWS, LENGTH, WIDTH, WORDS = 2, 5, 4, 9
RECIPES = {recipe.name: recipe for recipe in (lrpx.ATTNLRP, lrpx.LRP)}


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """``function`` of three layers of the words, and a layer."""

    def __init__(self, function: Of) -> None:
        super().__init__()
        self.function = function
        self.words = nn.Embedding(WORDS, WIDTH, _weight=noise(WORDS, WIDTH, seed=0))
        self.w = nn.ParameterList(0.7 * noise(WIDTH, WIDTH, seed=seed) for seed in range(1, 5))
        self.b = nn.ParameterList(0.5 * noise(WIDTH, seed=seed) for seed in range(5, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        layers = [F.linear(x, w, b) for w, b in zip(self.w, self.b, strict=False)]
        return self.function(*layers) @ self.w[3]


def relevance(
    function: Of, recipe: lrpx.Recipe, dtype: torch.dtype = torch.float64, *, ledger: bool = False
) -> tuple[Tensor, Tensor]:
    model, ids = Model(function).to(dtype), torch.tensor([[1, 4, 2, 7, 3], [6, 0, 3, 8, 5]])
    with lrpx.propagate(model, recipe, observe=(), ledger=ledger) as trace:
        out = model(ids)
        value = trace.explain((out * noise(*out.shape, seed=9).to(dtype)).sum())
    with torch.no_grad():
        assert torch.equal(out, model(ids))
    assert not ledger or trace.ledger().closes(1e-9)
    return value, trace.source_relevance(trace.sources[0])


def agree(one: Of, other: Of, recipe: str, *, ledger: bool = False) -> None:
    (value, found), (same, wanted) = (relevance(each, RECIPES[recipe], ledger=ledger) for each in (one, other))
    assert torch.allclose(value, same, rtol=1e-10)
    assert float((found - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


def gated(gate: Of) -> Of:
    return lambda a, b, _: gate(a) * b


def filled(a: Tensor) -> Tensor:
    a = a.clone()
    a[a < 0] = 0
    return a


RELUS: dict[str, Of] = {
    "a mask": lambda a: a * (a > 0),
    "a mask first": lambda a: (a > 0) * a,
    "a mask of numbers": lambda a: a * (a > 0).to(a.dtype),
    "a step": lambda a: a * torch.heaviside(a, torch.zeros((), dtype=a.dtype)),
    "in place": lambda a: a.clone().mul_(a > 0),
    "filled": lambda a: a.masked_fill(a < 0, 0),
    "filled, turned round": lambda a: a.masked_fill(~(a > 0), 0),
    "filled, not": lambda a: a.masked_fill(torch.logical_not(a > 0), 0.0),
    "a mask of what is detached": lambda a: a * (a.detach() > 0),
    "a comparison with zeros": lambda a: a * (a > torch.zeros_like(a)),
    "a comparison by name": lambda a: a * torch.gt(input=a, other=0),
    "half of a sign": lambda a: a * (torch.sign(a) + 1) / 2,
    "one less": lambda a: a * (1 - (a < 0).to(a.dtype)),
    "no sign bit": lambda a: a * ~torch.signbit(a),
    "two masks": lambda a: a * ((a > 0) & (a > -1)),
    "ones and zeros": lambda a: a * torch.where(a > 0, torch.ones_like(a), torch.zeros_like(a)),
    "where it is left": lambda a: a * (F.relu(a) > 0),
    "filled in place": lambda a: a.clone().masked_fill_(a <= 0, 0),
    "written": filled,
    "maximum": lambda a: torch.maximum(a, torch.zeros_like(a)),
    "max": lambda a: torch.max(a, torch.zeros((), dtype=a.dtype)),
    "with its absolute": lambda a: (a + a.abs()) / 2,
    "less its minimum": lambda a: a - a.clamp(max=0),
    "from above": lambda a: -(-a).clamp(max=0),
    "where": lambda a: torch.where(a <= 0, torch.zeros_like(a), a),
    "the largest of a stack": lambda a: torch.stack([a, torch.zeros_like(a)]).amax(0),
    "the largest of a stack, and where": lambda a: torch.stack([torch.zeros_like(a), a], -1).max(-1).values,
    "the smallest of a stack": lambda a: -torch.stack([torch.zeros_like(a), -a], 1).amin(dim=1),
}
LEAKY: dict[str, Of] = {
    "two slopes": lambda a: a * torch.where(a > 0, 1.0, 0.125),
    "a mask of slopes": lambda a: a * ((a > 0) * 0.875 + 0.125),
    "filled slopes": lambda a: a * torch.ones_like(a).masked_fill(a < 0, 0.125),
    "maximum": lambda a: torch.maximum(a, 0.125 * a),
    "with its absolute": lambda a: 0.5625 * a + 0.4375 * a.abs(),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", RELUS)
def test_a_relu_is_a_gate(name: str, recipe: str) -> None:
    agree(gated(RELUS[name]), gated(F.relu), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", RELUS)
def test_a_function_of_a_relu_that_is_not_0_at_0_is_one_of_what_was_there_before(name: str, recipe: str) -> None:
    relu = RELUS[name]
    for function in (torch.sigmoid, torch.exp, lambda x: (2 * x + 0.5).cos()):

        def after(relu: Of, function: Of = function) -> Of:
            return lambda a, b, _: function(relu(a)) + function(-relu(2 * a[..., :2])).sum(-1, keepdim=True) * b

        agree(after(relu), after(F.relu), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", RELUS)
def test_a_relu_of_a_product_is_one_factor(name: str, recipe: str) -> None:
    for multiply in (torch.mul, lambda a, b: a @ b.mT):

        def attended(relu: Of, multiply: Of = multiply) -> Of:
            return lambda a, b, c: (lambda s: s @ c if s.shape[-1] == LENGTH else s * c)(relu(multiply(a, b)))

        agree(attended(RELUS[name]), attended(F.relu), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_of_what_was_stacked_with_a_constant_is_a_scaling(recipe: str) -> None:
    w = noise(2, LENGTH, WIDTH, seed=33)
    agree(lambda a, *_: torch.stack([a, w]).prod(0), lambda a, *_: a * w, recipe)
    agree(lambda a, b, _: torch.stack([a, w, b], -1).prod(-1), lambda a, b, _: a * w * b, recipe)


def turned(a: Tensor) -> Tensor:
    a = a.clone()
    a.neg_()
    return 0.5 * a * (1 + torch.tanh(0.8 * (a + 0.04 * a**3)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_function_of_what_was_turned_in_place(recipe: str) -> None:
    agree(
        lambda a, b, _: turned(a) * b,
        lambda a, b, _: -0.5 * a * (1 - torch.tanh(0.8 * (a + 0.04 * a**3))) * b,
        recipe,
    )


def in_rows(parts: list[Tensor]) -> Tensor:
    out = torch.zeros(2, LENGTH, WIDTH, dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        out[:, :, i :: len(parts)] = part
    return out


JOINED: dict[str, Of] = {
    "cat": lambda parts: torch.cat(parts, -1),
    "stack": lambda parts: torch.stack(parts, -1),
    "stack, flat": lambda parts: torch.stack(parts, -1).flatten(-2),
    "written": in_rows,
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", JOINED)
def test_a_function_of_functions_that_were_put_together_is_refused_by_name(name: str, recipe: str) -> None:
    for inner, outer in (
        (lambda x: x + 1, torch.sigmoid),
        (F.relu, torch.sigmoid),
        (lambda x: x.tanh() + 1, torch.sqrt),
    ):

        def joined(a: Tensor, *_: Tensor, inner: Of = inner, outer: Of = outer) -> Tensor:
            return outer(JOINED[name]([inner(each) for each in a.chunk(2, -1)])).reshape(2, LENGTH, WIDTH)

        with pytest.raises(UnknownOperationError, match="function of a function that was moved"):
            relevance(joined, RECIPES[recipe])
    kept = (lambda x: 2 * x, torch.sigmoid), (F.relu, torch.tanh), (torch.sigmoid, torch.tanh)
    for inner, outer in (*kept, (F.relu, lambda x: x.clamp(min=1e-6).pow(3))):  # generalised mean pooling

        def allowed(a: Tensor, *_: Tensor, inner: Of = inner, outer: Of = outer) -> Tensor:
            return outer(JOINED[name]([inner(each) for each in a.chunk(2, -1)])).reshape(2, LENGTH, WIDTH)

        relevance(allowed, RECIPES[recipe])


def pooled(x: Tensor, how: str) -> Tensor:
    """The mean over the tokens."""
    new, rows = x.new_zeros(x.shape[0], 1, x.shape[2]), torch.zeros(x.shape[1], dtype=torch.long)
    if how == "scatter_reduce":
        return new.scatter_reduce(1, torch.zeros_like(x, dtype=torch.long), x, "mean", include_self=False)
    if how == "index_reduce":
        return new.index_reduce(1, rows, x, "mean", include_self=False)
    if how == "embedding_bag":
        bags = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2])
        return F.embedding_bag(bags, x.flatten(0, 1), mode="mean")[:, None]
    return torch.var_mean(x, 1, keepdim=True)[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("how", ["scatter_reduce", "index_reduce", "embedding_bag", "var_mean"])
def test_a_mean_is_of_as_many_factors_and_as_much_a_gate_as_what_it_is_of(how: str, recipe: str) -> None:
    for of in (lambda a, b, c: a @ (b.mT @ c), lambda a, *_: F.silu(a)):

        def mean(own: Of, of: Of = of) -> Of:
            return lambda a, b, c: own(of(a, b, c)) * b

        agree(mean(lambda x: pooled(x, how)), mean(lambda x: x.mean(1, keepdim=True)), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_with_a_constant_that_is_added_to_something_is_of_as_many_factors(recipe: str) -> None:
    w, shift = noise(LENGTH, seed=31), noise(LENGTH, seed=32)
    agree(lambda a, b, c: torch.addcmul(shift, a @ b.mT, w) @ c, lambda a, b, c: ((a @ b.mT) * w + shift) @ c, recipe)
    agree(lambda a, b, c: torch.addcmul(a, a * b, w[:1]) * c, lambda a, b, c: (a + a * b * w[:1]) * c, recipe)


BY_COMPARISON = ["a mask", "a mask first", "a mask of numbers", "filled", "maximum", "where"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*BY_COMPARISON, "torch's"])
def test_a_relu_of_a_product_is_one_factor_whatever_its_signs(name: str, recipe: str) -> None:
    """A text alone as in a batch, whose scores have other signs."""
    relu = F.relu if name == "torch's" else RELUS[name]

    def attended(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return relu((a * b).square().sum(-1, keepdim=True) * (a * a)[..., :1]) * c  # all positive

    def by_torch(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.relu((a * b).square().sum(-1, keepdim=True) * (a * a)[..., :1]) * c

    agree(attended, by_torch, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LEAKY)
def test_a_leaky_relu_is_a_gate(name: str, recipe: str) -> None:
    agree(gated(LEAKY[name]), gated(lambda a: F.leaky_relu(a, 0.125)), recipe)


def test_a_mask_that_is_none_of_the_sign_is_no_relu() -> None:
    mask = torch.arange(WIDTH) % 2 > 0
    agree(lambda a, b, _: a * mask.expand(a.shape) * b, lambda a, b, _: a * mask * b, "lrp")
    agree(lambda a, b, _: a.masked_fill(mask, 0) * b, lambda a, b, _: a * ~mask * b, "lrp")
    agree(lambda a, b, _: torch.maximum(a, a.clone()) * b, lambda a, b, _: a * b, "lrp")


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def xielu(a: Tensor, least: Of) -> Tensor:
    return torch.where(a > 0, 0.8 * a * a + 0.5 * a, (torch.expm1(least(a)) - a) * 0.3 + 0.5 * a)


BOUNDED: dict[str, tuple[Of, Of]] = {
    "maximum": (lambda a: torch.maximum(a, number(0.7)), lambda a: a.clamp(min=0.7)),
    "max": (lambda a: torch.max(number(-0.3), a), lambda a: a.clamp(min=-0.3)),
    "fmin, filled": (lambda a: torch.fmin(a, other=torch.full_like(a, 0.2)), lambda a: a.clamp(max=0.2)),
    "minimum, of a column": (lambda a: a.minimum(number(0.2).expand(LENGTH, 1)), lambda a: a.clamp(max=0.2)),
    "relu6": (lambda a: torch.minimum(a.relu(), number(0.6)), lambda a: a.clamp(0, 0.6)),
    "hardswish": (
        lambda a: a * torch.minimum(torch.maximum(a + 1, number(0.0)), number(2.0)) / 2,
        lambda a: a * (a + 1).clamp(0, 2) / 2,
    ),
    "less itself": (
        lambda a: torch.expm1(torch.minimum(a, number(-1e-6))) - a,
        lambda a: torch.expm1(a.clamp(max=-1e-6)) - a,
    ),
    "xielu": (
        lambda a: xielu(a, lambda a: torch.min(a, number(-1e-6))),
        lambda a: xielu(a, lambda a: a.clamp(max=-1e-6)),
    ),
}


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", BOUNDED)
def test_the_larger_of_a_tensor_and_a_number_is_between_bounds(name: str, recipe: str, ledger: bool) -> None:
    one, other = BOUNDED[name]
    for made in (lambda function: gated(function), lambda function: lambda a, b, _: function(a) + b):
        agree(made(one), made(other), recipe, ledger=ledger)


def test_the_larger_of_a_tensor_and_several_numbers_selects() -> None:
    several = noise(WIDTH, seed=11)
    for recipe in RECIPES:
        agree(
            lambda a, b, _: torch.maximum(a, several) + b,
            lambda a, b, _: torch.where(a > several, a, several) + b,
            recipe,
        )


FUNCTIONS: dict[str, tuple[Of, Of]] = {
    "a sum": (lambda a: a - F.logsigmoid(a), F.softplus),
    "a part twice": (
        lambda a: torch.cat([a[..., :2] * a[..., :2].sigmoid(), a[..., 2:] * a[..., 2:].sigmoid()], -1),
        F.silu,
    ),
    "added product": (lambda a: torch.addcmul(torch.zeros_like(a), a, a.sigmoid()), F.silu),
    "logsumexp": (lambda a: torch.logsumexp(torch.stack([a, torch.zeros_like(a)]), 0), F.softplus),
    "logsumexp, kept": (
        lambda a: torch.stack([torch.zeros_like(a), a], -1).logsumexp(dim=(-1,), keepdim=True)[..., 0],
        F.softplus,
    ),
    "logaddexp": (lambda a: torch.logaddexp(a, torch.zeros_like(a)), F.softplus),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_one(name: str, recipe: str) -> None:
    one, other = FUNCTIONS[name]
    agree(gated(one), gated(other), recipe)


UNIT: dict[str, Of] = {
    "normalize": lambda a: F.normalize(a, dim=-1),
    "a length, bounded": lambda a: a / a.norm(dim=-1, keepdim=True).clamp(min=1e-12),
    "a length, and a number": lambda a: a / (a.norm(dim=-1, keepdim=True) + 1e-12),
    "scaled before": lambda a: 3 * a * (1 / (3 * a).norm(dim=-1))[..., None].expand_as(a),
    "a root": lambda a: a * torch.rsqrt(a.square().sum(-1)).to(a.dtype).unsqueeze(-1).expand_as(a),
    "a variance": lambda a: (
        a / (torch.var_mean(a, -1, correction=0, keepdim=True)[0].add(a.mean(-1, keepdim=True) ** 2) ** 0.5 * 2)
    ),
    "larger": lambda a: a / torch.maximum(a.norm(dim=-1, keepdim=True), torch.full((), 1e-9, dtype=a.dtype)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", UNIT)
def test_a_norm_is_something_new(name: str, recipe: str) -> None:
    unit = UNIT[name]
    of_unit = lambda a, b, _: (a * unit(a).sigmoid()) * b  # noqa: E731
    agree(of_unit, lambda a, b, _: (a * (F.rms_norm(a, (WIDTH,), eps=1e-30) / 2).sigmoid()) * b, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_rms_norm_in_one_function_is_a_scaling_as_one_that_is_written_out_is(recipe: str) -> None:
    def by(norm: Of) -> Of:
        return lambda a, b, _: norm(r := a.relu()) * (r @ (EYE + 0.5).roll(1, 0)) + b * norm(a.tanh())

    written = by(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1))
    agree(by(lambda x: F.rms_norm(x, (WIDTH,), eps=0.1)), written, recipe)


HEADS = (ROWS, LENGTH, 2, WIDTH // 2)
SHAPED: dict[str, Of] = {
    "flat": lambda a: (a.view(-1) * a.sigmoid().view(-1)).view(a.shape),
    "turned": lambda a: (a.sigmoid().mT * a.mT).mT,
    "heads": lambda a: (a.view(HEADS).transpose(1, 2) * a.sigmoid().view(HEADS).transpose(1, 2)).transpose(1, 2),
    "halves of a layer": lambda a: torch.cat(
        [half.unsqueeze(1) * half.sigmoid()[:, None] for half in a.chunk(2, -1)], -1
    ),
    "over": lambda a: (a.view(HEADS) / (1 + torch.exp(-a)).view(HEADS)).view(a.shape),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SHAPED)
def test_a_function_is_one_in_another_shape(name: str, recipe: str) -> None:
    function = SHAPED[name]
    agree(lambda a, b, _: function(a).reshape(a.shape) * b, gated(F.silu), recipe)


def halves(a: Tensor) -> Tensor:
    return torch.cat([(each.mT.contiguous() * each.sigmoid().mT.contiguous()).mT for each in a.chunk(2, -1)], -1)


def in_heads(x: Tensor) -> Tensor:
    return x.view(HEADS).transpose(1, 2).reshape(-1, LENGTH, WIDTH // 2)


PLACES = torch.tensor([1, 0, 2, 4, 3])
TWO = torch.full((1,), 2.0, dtype=torch.bfloat16)  # which leaves any other precision as it is
COPIED: dict[str, Of] = {
    "turned": lambda a: (a.mT.contiguous() * a.sigmoid().mT.contiguous()).mT,
    "one of them": lambda a: (a.mT * a.sigmoid().mT.clone()).mT,
    "before": lambda a: (a.mT.contiguous().sigmoid() * a.mT.clone()).mT,
    "in another way": lambda a: (a.permute(0, 2, 1).clone() * a.sigmoid().mT.contiguous()).mT,
    "flat": lambda a: (a.mT.reshape(-1) * a.sigmoid().mT.flatten()).view(ROWS, WIDTH, LENGTH).mT,
    "heads": lambda a: (in_heads(a) * in_heads(a.sigmoid())).view(ROWS, 2, LENGTH, -1).transpose(1, 2).reshape(a.shape),
    "halves": halves,
    "repeated": lambda a: (a.repeat(2, 1, 1) * a.sigmoid().repeat(2, 1, 1))[ROWS:],
    "expanded": lambda a: (a.expand(2, -1, -1, -1) * a.sigmoid().expand(2, -1, -1, -1).contiguous())[1],
    "flipped": lambda a: (a.flip(1) * a.sigmoid().flip(1)).flip(1),
    "rolled": lambda a: (a.roll(1, 1) * a.sigmoid().roll(1, 1)).roll(-1, 1),
    "chosen": lambda a: (a[:, PLACES] * a.sigmoid().index_select(1, PLACES))[:, PLACES],
    "one by one": lambda a: torch.stack([x * g for x, g in zip(a.unbind(1), a.sigmoid().unbind(1), strict=True)], 1),
    "over": lambda a: (a.mT.contiguous() / (1 + torch.exp(-a)).mT.contiguous()).mT,
    "written": lambda a: (0.5 * (1 + (a / 2).tanh())).mT.contiguous().mT * a,
    "scaled": lambda a: ((3.0 * a).mT * (a.sigmoid() / 3.0).mT).mT,
    "negated": lambda a: ((-a).mT * (-a.sigmoid()).mT).mT,
    "negated, a function of it": lambda a: ((-a).mT / -(1 + torch.exp(-a)).mT.clone()).mT,
    "scaled by a buffer": lambda a: ((a * TWO).mT * (a.sigmoid() / 2).mT).mT,
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", COPIED)
def test_a_function_is_one_in_a_copy_of_another_shape(name: str, recipe: str) -> None:
    function = COPIED[name]
    agree(lambda a, b, _: (function(a) * b).contiguous(), gated(F.silu), recipe)


def near(one: Of, other: Of, recipe: lrpx.Recipe) -> None:
    for ledger in (False, True):
        (value, found), (same, wanted) = (relevance(each, recipe, ledger=ledger) for each in (one, other))
        assert torch.allclose(value, same, rtol=1e-10)
        assert float((found - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


PLAIN = {"gim": GIM, "plain functions": replace(lrpx.LRP, activation=lrpx.rules.unmodified)}
"""Recipes under which functions have their plain gradient, and products a rule."""


@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize("name", [*SHAPED, *COPIED])
def test_a_function_in_another_shape_is_no_product_where_functions_have_their_plain_gradient(
    name: str, recipe: str
) -> None:
    function = (SHAPED | COPIED)[name]
    near(lambda a, b, _: function(a).reshape(a.shape).contiguous() * b, gated(F.silu), PLAIN[recipe])


@pytest.mark.parametrize("recipe", PLAIN)
def test_functions_that_were_moved_apart_are_one_where_they_have_their_plain_gradient(recipe: str) -> None:
    moved = lambda a, b, _: (a.tanh().mT * (a * WEIGHTS).sigmoid().mT * a.mT).mT * b  # noqa: E731
    near(moved, gated(lambda a: a.tanh() * (a * WEIGHTS).sigmoid() * a), PLAIN[recipe])


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *PLAIN.values()], ids=lambda recipe: recipe.name)
def test_functions_of_what_was_moved_twice_are_one(recipe: lrpx.Recipe) -> None:
    twice = lambda a, b, _: (a.roll(1, 1).tanh() * (2 * a.roll(1, 1) + 3)) * b  # noqa: E731
    near(twice, lambda a, b, _: (a.tanh() * (2 * a + 3)).roll(1, 1) * b, recipe)
    summed = lambda a, b, _: (a.roll(1, 1).exp() + 1).log() * (a.roll(1, 1).square() + a.roll(1, 1)).tanh() * b  # noqa: E731
    near(summed, lambda a, b, _: ((a.exp() + 1).log() * (a.square() + a).tanh()).roll(1, 1) * b, recipe)


WEIGHTS = noise(ROWS, LENGTH, WIDTH, seed=77)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_function_with_constants_of_a_shape_that_was_moved_is_refused_by_name(recipe: str) -> None:
    with pytest.raises(UnknownOperationError, match="multiply before they are moved"):
        relevance(lambda a, b, _: ((a * WEIGHTS).sigmoid().mT * a.mT).mT * b, RECIPES[recipe])
    number = WEIGHTS.flatten()[0]
    agree(
        lambda a, b, _: ((a * number).sigmoid().mT * a.mT).mT * b, gated(lambda a: (a * number).sigmoid() * a), recipe
    )


@pytest.mark.parametrize("recipe", [*RECIPES.values(), PLAIN["plain functions"]], ids=lambda recipe: recipe.name)
def test_what_is_pooled_by_its_own_exponentials_may_be_moved_before(recipe: lrpx.Recipe) -> None:
    def pooled(a: Tensor, *_: Tensor) -> Tensor:
        x, e = a.mT, a.exp().mT
        return ((x * e).sum(-1) / e.sum(-1))[:, None].expand_as(a)

    near(pooled, lambda a, *_: (a.softmax(1) * a).sum(1, keepdim=True).expand_as(a), recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_known_in_every_precision(name: str, dtype: torch.dtype) -> None:
    function = COPIED[name]
    found, wanted = (
        relevance(lambda a, b, _, of=of: of(a) * b, lrpx.ATTNLRP, dtype)[1].double()
        for of in (lambda a: function(a).contiguous(), F.silu)
    )
    # a product of two would be 0.36 of the largest away
    assert float((found - wanted).abs().max()) <= 0.1 * float(wanted.abs().max())


class Layers(nn.Module):
    """Two layers, each with a function that was moved, perhaps each in a checkpoint."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, _weight=noise(WORDS, WIDTH, seed=0))
        self.layers = nn.ModuleList(Gated() for _ in range(2))
        self.own = own

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.own else layer(x)
        return x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return x + y.flip(-1) * y.sigmoid().mT.flip(-2).mT + self.layer(x) * self.layer(x).tanh()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("own", [False, True])
def test_copies_are_known_where_a_layer_runs_again(own: bool, recipe: str) -> None:
    ids, found = torch.tensor([[1, 4, 2]]), []
    for again in (False, True):
        torch.manual_seed(0)
        model = Layers(own=own and again)
        with lrpx.propagate(model, RECIPES[recipe], recompute=again and not own, observe=()) as trace:
            trace.explain(model(ids)[0, -1, 0])
        found.append(trace.source_relevance(trace.sources[0]))
    assert torch.allclose(*found, rtol=1e-12, atol=0)


def test_copies_by_indices_are_refused_in_a_checkpoint() -> None:
    """What the indices were would have to be computed again, within the first pass."""

    class Chosen(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, PLACES] * x.sigmoid().index_select(1, PLACES)

    model = Layers(own=True)
    model.layers[1] = Chosen()
    with lrpx.propagate(model, lrpx.ATTNLRP, observe=()) as trace:
        out = model(torch.tensor([[1, 4, 2, 7, 3]]))
        with pytest.raises(UnknownOperationError, match="chosen by indices, in a checkpoint"):
            trace.explain(out[0, -1, 0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sum_of_functions_that_were_moved_is_one(recipe: str) -> None:
    agree(lambda a, b, _: ((a.mT.contiguous() + a.abs().mT).mT / 2 * b).contiguous(), gated(F.relu), recipe)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *PLAIN.values()], ids=lambda recipe: recipe.name)
def test_what_was_added_to_itself_and_moved_is_that_twice(recipe: lrpx.Recipe) -> None:
    moved = lambda a, b, _: ((a + a).mT * a.tanh().mT).mT * b  # noqa: E731
    near(moved, gated(lambda a: 2 * a * a.tanh()), recipe)


TWICE: dict[str, tuple[Of, Of]] = {
    "a layer": (lambda y: y() * y().sigmoid(), lambda y: F.silu(y())),
    "a square": (lambda y: y() * y(), lambda y: y().square()),
    "a gelu": (lambda y: 0.5 * y() * (1 + torch.erf(y() / 2**0.5)), lambda y: F.gelu(y())),
    "a gelu, from the right": (lambda y: (1 + torch.erf(2**-0.5 * y())) / 2 * y(), lambda y: F.gelu(y())),
    "a gelu with a sum": (
        lambda y: 0.5 * y() * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y() + 0.044715 * y() ** 3))),
        lambda y: F.gelu(y(), approximate="tanh"),
    ),
    "a relu by a choice": (lambda y: torch.where(y() > 0, y(), 0.0), lambda y: y().relu()),
    "a relu by a mask": (lambda y: y() * (y() > 0), lambda y: y().relu()),
    "a relu by a filling": (lambda y: y().masked_fill(y() < 0, 0.0), lambda y: y().relu()),
    "a leaky relu": (lambda y: torch.maximum(y(), 0.1 * y()), lambda y: F.leaky_relu(y(), 0.1)),
    "a relu by a sum": (lambda y: (y() + y().abs()) / 2, lambda y: y().relu()),
    "pieces": (lambda y: torch.where(y() > 0, y(), y().exp() - 1), lambda y: F.elu(y())),
    "masked pieces": (lambda y: y().relu() + (y().exp() - 1) * (y() <= 0), lambda y: F.elu(y())),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", TWICE)
def test_what_is_computed_twice_is_one(name: str, recipe: str) -> None:
    twice, once = TWICE[name]
    weight, bias = EYE + 0.3, noise(WIDTH, seed=3)
    layers = (lambda a: F.linear(a, weight, bias), lambda a: F.linear(a, weight))
    moves = (
        lambda a: a[..., :WIDTH],
        lambda a: a.roll(1, 1),
        lambda a: a.mT.clone().mT.clone(),
        lambda a: (2 * a).flip(1),
    )
    for of in (*layers, *moves):
        agree(lambda a, b, _, of=of: twice(lambda: of(a)) * b, lambda a, b, _, of=of: once(lambda: of(a)) * b, recipe)


ORDERS: dict[str, Of] = {
    "the gate's sigmoid last": lambda a, b: b * a * torch.sigmoid(a),
    "the gate's sigmoid first": lambda a, b: torch.sigmoid(a) * b * a,
    "the gate last": lambda a, b: a * (b * torch.sigmoid(a)),
    "a number": lambda a, b: b * 0.5 * a * (1 + torch.tanh(a / 2)),
    "a quotient": lambda a, b: b * a / (1 + torch.exp(-a)),
    "all moved": lambda a, b: (b.mT * a.mT * torch.sigmoid(a).mT).mT,
    "the sigmoid moved and back": lambda a, b: b * a * torch.sigmoid(a.mT.contiguous()).mT,
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ORDERS)
def test_a_product_meets_a_function_of_one_of_its_factors(name: str, recipe: str) -> None:
    agree(lambda a, b, _: ORDERS[name](a, b), gated(F.silu), recipe)


OTHERS: dict[str, tuple[Of, Of]] = {
    "outer": (
        lambda a, b: torch.einsum("...i,...j->...ij", b * a, torch.sigmoid(a)).sum(-1),
        lambda a, b: ((b * a)[..., None] * torch.sigmoid(a)[..., None, :]).sum(-1),
    ),
    "outer of two vectors": (
        lambda a, b: torch.outer((b * a)[0, 0], torch.sigmoid(a)[0, 0]),
        lambda a, b: (b * a)[0, 0][:, None] * torch.sigmoid(a)[0, 0],
    ),
    "addcmul with a value": (
        lambda a, b: torch.addcmul(b, b * a, torch.sigmoid(a), value=0.5),
        lambda a, b: b + 0.5 * (b * a * torch.sigmoid(a)),
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OTHERS)
def test_another_product_with_a_function_of_one_of_its_factors(name: str, recipe: str) -> None:
    one, other = OTHERS[name]
    agree(lambda a, b, _: one(a, b), lambda a, b, _: other(a, b), recipe)


CUT_OFF: dict[str, Of] = {
    "by a mask": lambda y: y * (y > 0),
    "by a choice": lambda y: torch.where(y > 0, y, 0.0),
    "by a filling": lambda y: (z := y * 1).masked_fill_(z < 0, 0.0),
    "by the larger": lambda y: torch.maximum(y, torch.zeros_like(y)),
}


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *PLAIN.values()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", CUT_OFF)
def test_a_relu_of_a_function_that_is_written_out_is_a_function_of_what_that_is(name: str, recipe: lrpx.Recipe) -> None:
    for of in (torch.tanh, F.silu, F.relu, lambda a: 2 * a.tanh()):
        cut = lambda a, of=of: CUT_OFF[name](of(a))  # noqa: E731
        near(
            lambda a, b, _, cut=cut: cut(a) * a.sigmoid() * b,
            gated(lambda a, of=of: of(a).relu() * a.sigmoid()),
            recipe,
        )
        near(lambda a, b, _, cut=cut: cut(a).sigmoid() * b, gated(lambda a, of=of: of(a).relu().sigmoid()), recipe)


MOVED_WITH_SIGNS: dict[str, Callable[..., Tensor]] = {
    "by a mask": lambda f, a, move: move(f(a)) * (move(a) > 0),
    "by a filling": lambda f, a, move: move(f(a)).masked_fill(move(a) < 0, 0.0),
    "by a choice": lambda f, a, move: torch.where(move(a) > 0, move(f(a)), 0.0),
    "in pieces": lambda f, a, move: torch.where(move(a) > 0, move(a), move(f(a))),
    "the larger": lambda f, a, move: torch.maximum(move(f(a)), move(a)),
}


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *PLAIN.values()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", MOVED_WITH_SIGNS)
def test_what_was_moved_beside_a_function_of_it_chooses_of_that(name: str, recipe: lrpx.Recipe) -> None:
    """As where nothing was moved: a gate, and a function of it is one of the tensor that was there before."""
    for f in (torch.tanh, F.softplus, F.relu):
        for last in (torch.sigmoid, lambda y: 2 * y):
            moved = lambda a, f=f, last=last: last(MOVED_WITH_SIGNS[name](f, a, lambda x: x.mT)).mT  # noqa: E731
            at_once = lambda a, f=f, last=last: last(MOVED_WITH_SIGNS[name](f, a, lambda x: x))  # noqa: E731
            near(gated(moved), gated(at_once), recipe)


MOVED_APART: dict[str, tuple[Of, Of]] = {
    "numbers in what is masked": (lambda a: ((a - 0.5).mT * (a.mT > 0)).mT, lambda a: (a - 0.5) * (a > 0)),
    "numbers in what is filled": (
        lambda a: (a + 1).roll(1, 1).masked_fill(a.roll(1, 1) ** 2 < 0.2, 0.0).roll(-1, 1),
        lambda a: (a + 1).masked_fill(a**2 < 0.2, 0.0),
    ),
    "two slopes": (lambda a: torch.where(a.mT > 0, (2 * a).mT, a.mT).mT, lambda a: torch.where(a > 0, 2 * a, a)),
    "slopes by a ReLU": (
        lambda a: torch.where(a.relu().mT > 0, -a.mT, a.mT).mT,
        lambda a: torch.where(a.relu() > 0, -a, a),
    ),
    "pieces of one sign by a step": (
        lambda a: torch.where(a.mT < 0.3, a.exp().mT, a.relu().mT).mT,
        lambda a: torch.where(a < 0.3, a.exp(), a.relu()),
    ),
    "pieces by a step of a function": (
        lambda a: F.silu(a).flip(-1).where(a.tanh().flip(-1) > 0.3, a.sigmoid().flip(-1)).flip(-1),
        lambda a: torch.where(a.tanh() > 0.3, F.silu(a), a.sigmoid()),
    ),
    "a sum": (lambda a: (F.elu(a).mT + (a - 0.5).mT).mT, lambda a: F.elu(a) + (a - 0.5)),
    "a difference": (lambda a: ((a + 1).mT - a.sigmoid().mT).mT, lambda a: (a + 1) - a.sigmoid()),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", MOVED_APART)
def test_functions_that_were_moved_one_by_one_are_one_gate(name: str, recipe: lrpx.Recipe) -> None:
    moved, at_once = MOVED_APART[name]
    near(gated(moved), gated(at_once), recipe)
    near(lambda a, b, _: moved(a) * F.silu(b), lambda a, b, _: at_once(a) * F.silu(b), recipe)


def test_a_function_in_pieces_by_a_mask_may_be_moved() -> None:
    def twice(a: Tensor, move: Of) -> Tensor:
        y = torch.where(a < 0.3, a.exp() - 1, a)
        return move(torch.where(move(a) > 0, move(y), move(2 * a)))

    for recipe in RECIPES.values():
        near(gated(lambda a: twice(a, lambda x: x.mT)), gated(lambda a: twice(a, lambda x: x)), recipe)
    with pytest.raises(UnknownOperationError, match="apply it before that is moved"):
        relevance(lambda a, b, _: (a + 1).mT.masked_fill(F.elu(a).mT < 0.2, 0.0).mT * b, lrpx.ATTNLRP)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_choice_by_the_method_is_one(recipe: lrpx.Recipe) -> None:
    at_once = gated(lambda a: torch.where(a > 0, a + 1, a.exp()))
    near(gated(lambda a: (a + 1).where(a > 0, a.exp())), at_once, recipe)
    near(gated(lambda a: a.exp().where(a <= 0, other=a + 1)), at_once, recipe)


CLAMPED: dict[str, tuple[Of, Of]] = {
    "from below": (lambda a: a.clamp(min=a.exp() - 1), lambda a: torch.maximum(a, a.exp() - 1)),
    "from above": (lambda a: torch.clamp(a, max=a.tanh() + 0.1), lambda a: torch.minimum(a, a.tanh() + 0.1)),
    "two slopes, in place": (lambda a: a.clone().clamp_(min=0.1 * a), lambda a: torch.maximum(a, 0.1 * a)),
    "a ReLU": (lambda a: torch.zeros_like(a).clamp(min=a).sigmoid(), lambda a: F.relu(a).sigmoid()),
    "between two": (lambda a: a.clip(0.1 * a, a * a), lambda a: torch.minimum(torch.maximum(a, 0.1 * a), a * a)),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", CLAMPED)
def test_bounds_that_depend_on_the_input_choose_as_a_maximum_does(name: str, recipe: lrpx.Recipe) -> None:
    clamped, chosen = CLAMPED[name]
    near(gated(clamped), gated(chosen), recipe)


PIECES: dict[str, Of] = {
    "elu and 1": lambda a: torch.where(a > 0, a + 1, a.exp()),
    "of minGRU": lambda a: torch.where(a >= 0, a + 0.5, a.sigmoid()),
}


@pytest.mark.parametrize("name", PIECES)
def test_what_a_function_in_pieces_gates_hangs_on_what_it_is(name: str) -> None:
    """And not on which of its pieces are chosen in a batch: of one sign everywhere it is a surer gate than a SiLU."""
    ids = torch.arange(WORDS)[:, None]

    def found(function: Of, ids: Tensor) -> Tensor:
        model = Model(function)
        with lrpx.propagate(model, lrpx.LRP, observe=()) as trace:
            trace.explain(model(ids)[:, -1, 0].sum())
        return trace.source_relevance(trace.sources[0])

    function = lambda a, b, _: PIECES[name](a) * F.silu(b)  # noqa: E731
    together = found(function, ids)
    assert torch.allclose(torch.cat([found(function, each[None]) for each in ids]), together, rtol=1e-9, atol=1e-12)
    surer = found(lambda a, b, _: PIECES[name](a).detach() * F.silu(b), ids)
    assert torch.allclose(together, surer, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["of two signs", "of one sign"])
def test_what_a_choice_gates_is_the_same_for_one_number(name: str, recipe: lrpx.Recipe) -> None:
    """Chosen by what is no step of it, for one feature of a text of one token alone, too."""

    def chosen(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        a, b = a[..., :1], b[..., :1]
        return torch.where(a + b > 0, a.exp(), a.tanh() if name == "of two signs" else a.sigmoid())

    def found(ids: Tensor) -> Tensor:
        model = Model(lambda a, b, c: chosen(a, b, c) * F.silu(b))
        with lrpx.propagate(model, recipe, observe=()) as trace:
            trace.explain(model(ids)[:, -1, 0].sum())
        return trace.source_relevance(trace.sources[0])

    ids = torch.arange(WORDS)[:, None]
    assert torch.allclose(torch.cat([found(each[None]) for each in ids]), found(ids), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sum_of_functions_of_a_function_that_was_moved_twice_is_one(recipe: str) -> None:
    def twice(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        y = a.clamp(-1, 1)
        return (F.silu(y.flip(-1)) - y.flip(-1) / 3) * b

    agree(twice, lambda a, b, _: (lambda y: F.silu(y) - y / 3)(a.clamp(-1, 1).flip(-1)) * b, recipe)
    kept = lambda a, b, _: (lambda y: (F.silu(y) - y / 3) * b)(a.clamp(-1, 1).flip(-1))  # noqa: E731
    agree(twice, kept, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_beside_what_a_cosine_compares_belong_to_its_lengths(recipe: str) -> None:
    """As a memory's rows are addressed."""
    near = lambda a, b: F.cosine_similarity(a, b, dim=-1).softmax(-1)  # noqa: E731
    guarded = lambda a, b, c: near(a + 1e-16, b[:, :1] + 1e-16)[..., None] * c  # noqa: E731
    agree(guarded, lambda a, b, c: near(a, b[:, :1])[..., None] * c, recipe)
    shifted = lambda a, b, c: near(a + 0.5, b[:, :1])[..., None] * c  # noqa: E731
    agree(shifted, lambda a, b, c: near(a + 0.5, b[:, :1].expand(a.shape))[..., None] * c, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_that_differ_are_two(recipe: str) -> None:
    weight, bias, other = EYE + 0.3, noise(WIDTH, seed=3), noise(WIDTH, seed=4)
    apart = lambda a, b, _: F.linear(a, weight, bias) * F.linear(a, weight, other).sigmoid() * b  # noqa: E731
    product = lambda a, b, _: (a @ weight + bias) * F.linear(a, 1 * weight, other).sigmoid() * b  # noqa: E731
    agree(apart, product, recipe)


def test_functions_of_what_was_not_moved_with_them_are_refused() -> None:
    with pytest.raises(UnknownOperationError, match="multiply before they are moved"):
        relevance(lambda a, b, _: (a.tanh().mT.contiguous() * a.sigmoid().mT).mT * b, lrpx.ATTNLRP)


def test_exponentials_as_values_before_the_division_are_refused() -> None:
    def attention(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        e = (a @ b.mT).exp()
        return e @ b.exp() / e.sum(-1, keepdim=True)

    with pytest.raises(UnknownOperationError, match="sum of exponentials"):
        relevance(attention, lrpx.ATTNLRP)


AFTER_A_MOVE: dict[str, Of] = {
    "cut": lambda a: a.relu().mT.sigmoid().mT,
    "shrunk": lambda a: F.hardshrink(a, 0.1).mT.sigmoid().mT,
    "cut, and a part": lambda a: F.pad(torch.exp(F.hardswish(4 * a)[..., :2]), (0, 2)),
    "shifted, and cut": lambda a: (a + 1).mT.contiguous().relu().mT,
    "shifted, and squared": lambda a: (a + 1).view(-1).square().view(a.shape),
    "shifted": lambda a: (1 + a.tanh()).mT.log1p().mT,
    "written": lambda a: torch.log((1 + ex(a)).flip(1)).flip(1),
    "and shifted again": lambda a: (a.relu().mT + 1).sqrt().mT,
    "turned": lambda a: a.relu().rot90(2).sigmoid(),
    "taken": lambda a: a.relu().take(torch.arange(a.numel()).view(a.shape)).sigmoid(),
    "enlarged": lambda a: F.interpolate(a + 3, scale_factor=2.0).clamp(0, 6)[..., : a.shape[-1]],
    "mirrored": lambda a: F.pad(a.relu(), (1, 0), mode="reflect").sigmoid()[..., 1:],
    "shuffled": lambda a: F.channel_shuffle((a + 3)[..., None, None], 1).clamp(0, 6)[..., 0, 0],
    "scattered": lambda a: torch.zeros_like(a).scatter(0, torch.zeros_like(a).long(), a.relu()).sigmoid(),
    "the largest": lambda a: a.relu().amax(0).sigmoid().expand_as(a),
    "sorted": lambda a: (a + 3).sort(-1)[0].clamp(0, 6),
    "pooled": lambda a: F.max_pool1d(a.relu(), 3, 1, 1).sigmoid(),
    "negated": lambda a: (-a.relu().mT).sigmoid().mT,
    "scaled": lambda a: (2 * (a + 1).mT).relu().mT,
    "masked": lambda a: ((a + 1).mT * torch.ones_like(a.mT).tril()).relu().mT,
    "filled": lambda a: a.relu().mT.masked_fill(torch.ones_like(a.mT).tril() > 0, 0.0).sigmoid().mT,
    "chosen": lambda a: torch.where(torch.ones_like(a.mT).tril() > 0, (a + 1).mT, a.roll(1, 1).mT).relu().mT,
    "joined": lambda a: torch.cat([a + 1, a]).relu()[: len(a)],
    "in pieces, of which one is a function": lambda a: torch.where(a.mT > 0, (a + 1).mT, a.tanh().mT).mT,
    "a relu by a mask": lambda a: (lambda y: (y * (y > 0)).mT)((a + 1).mT),
    "a relu by a choice": lambda a: (lambda y: torch.where(y > 0, y, 0.1 * y).mT)((a + 1).mT / 2),
    "filled by a step": lambda a: (lambda y: y.masked_fill(y < 0.5, 0.0).mT)((a + 1).mT),
    "in pieces": lambda a: (lambda y: torch.where(y > 0.5, y, y / 2).mT)((a + 1).mT),
    "a sum of two that were moved": lambda a: ((a + 1).roll(1, 1) + a.tanh().roll(1, 1)).relu(),
    "a silu": lambda a: (lambda y: (y * y.sigmoid()).mT)((a + 1).mT),
    "a quotient": lambda a: (lambda y: (y / (1 + torch.exp(-y))).mT)((a + 1).mT),
    "a softsign": lambda a: (lambda y: (y / (1 + y.abs())).mT)((a + 1).mT),
    "a product": lambda a: (lambda y: (y * (y - 0.5)).mT)((a + 1).mT),
    "next to nothing": lambda a: F.softplus(F.silu(40 * a).mT).mT,
    "next to nothing, and a guard": lambda a: torch.log(torch.sigmoid(40 * a).mT + 1e-6).mT,
    "next to nothing, and shifted": lambda a: F.relu6((1e-3 * a).square().view(-1) + 1).view(a.shape),
}


@pytest.mark.parametrize("name", AFTER_A_MOVE)
def test_a_function_of_a_function_that_was_moved_is_refused(name: str) -> None:
    """As a whole it is one function of what is not at hand."""
    for recipe in RECIPES.values():
        with pytest.raises(UnknownOperationError, match="apply it before that is moved"):
            relevance(lambda a, b, _: AFTER_A_MOVE[name](a) + b, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_of_three_is_one_wherever_it_was_moved(recipe: str) -> None:
    three = lambda a, b, _: a * (b * a.roll(1, 0)) + b  # noqa: E731
    agree(lambda a, b, _: (a.rot90(2) * (b * a.roll(1, 0)).rot90(2)).rot90(2) + b, three, recipe)
    twice = lambda a, b, _: a * (lambda y: y + y)(b * a.roll(1, 0)) + b  # noqa: E731
    agree(twice, lambda a, b, _: a * (2 * (b * a.roll(1, 0))) + b, recipe)
    blocks = lambda c: torch.stack([torch.block_diag(row, row)[: len(row), : row.shape[1]] for row in c])  # noqa: E731
    agree(lambda a, b, _: a * blocks(b * a.roll(1, 0)) + b, three, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_function_of_a_function_that_was_moved_is_one_where_it_makes_no_difference(recipe: str) -> None:
    for first, last in ((torch.relu, torch.tanh), (torch.tanh, torch.exp), (F.silu, torch.sigmoid), (ex, torch.cos)):
        agree(
            lambda a, b, _, f=first, g=last: g(f(a).mT).mT + b,
            lambda a, b, _, f=first, g=last: g(f(a)) + b,
            recipe,
        )


def gated_halves(halves: Callable[[Tensor], tuple[Tensor, ...]]) -> Of:
    def function(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        inner, gate = halves(a)
        return (F.silu(inner) * gate).repeat(1, 1, 2) * b

    return function


def test_other_places_are_no_function() -> None:
    product = gated(torch.sigmoid)
    agree(lambda a, b, _: (a.sigmoid().mT * b.mT).mT, product, "attnlrp")
    other = lambda a, b, _: F.pad((a.roll(-1, -1) * a.sigmoid())[..., :-1], (0, 1))  # noqa: E731
    agree(lambda a, b, _: F.pad(a[..., 1:] * a.sigmoid()[..., :-1], (0, 1)), other, "lrp")
    agree(lambda a, b, _: F.pad(a[..., 1:] * a.sigmoid()[..., :-1], (0, 1)), other, "attnlrp")
    for recipe in RECIPES:
        agree(gated_halves(lambda a: a.chunk(2, -1)), gated_halves(lambda a: (a[..., :2], 1 * a[..., 2:])), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_divide_by_a_logistic_is_a_product_with_a_sigmoid(recipe: str) -> None:
    product = gated(torch.sigmoid)
    agree(lambda a, b, _: b / (1 + torch.exp(-a)), product, recipe)
    agree(lambda a, b, _: b / torch.sqrt((1 + torch.exp(-a)) ** 2), product, recipe)
    agree(lambda a, b, _: torch.addcdiv(torch.zeros_like(b), b, torch.exp(-a) + 1.0), product, recipe)


GUARDED: dict[str, tuple[Of, Of]] = {
    "divided": (lambda a, b: b / (ex(-a) + 1e-15), lambda a, b: b / ex(-a)),
    "in place": (lambda a, b: b / ex(-a).add_(1e-15), lambda a, b: b / ex(-a)),
    "times the reciprocal": (lambda a, b: b * (1 / (1e-15 + 2 * ex(-a))), lambda a, b: b / (2 * ex(-a))),
    "alone": (lambda a, b: 1 / (ex(a) + 1e-15) + b, lambda a, b: 1 / ex(a) + b),
    "alone, in place": (lambda a, b: 1 / ex(a).add_(1e-15) + b, lambda a, b: 1 / ex(a) + b),
    "a power": (lambda a, b: b * (ex(a) + 1e-15).rsqrt(), lambda a, b: b * ex(a).rsqrt()),
    "moved": (lambda a, b: b.mT / (ex(a) + 1e-15).mT, lambda a, b: b.mT / ex(a).mT),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", GUARDED)
def test_a_small_number_beside_an_exponential_is_a_guard(name: str, recipe: str) -> None:
    one, other = (lambda a, b, _, of=of: of(a, b).reshape(a.shape) for of in GUARDED[name])
    agree(one, other, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_number_beside_an_exponential_is_a_sigmoids_from_some_size_on(recipe: str) -> None:
    for number, is_guard in ((1e-6, True), (1e-4, False)):
        wanted = (lambda a, b, _: b / ex(a)) if is_guard else (lambda a, b, _: b * torch.sigmoid(-a - 9.2))
        _, found = relevance(lambda a, b, _, number=number: b / (ex(a) + number), RECIPES[recipe])
        _, same = relevance(wanted, RECIPES[recipe])
        found, same = found / found.abs().max(), same / same.abs().max()
        assert float((found - same).abs().max()) < 0.01


OTHER_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a threshold": lambda a: torch.where(a > 0.05, a, 0.0),
    "a threshold, filled": lambda a: a.masked_fill(a < 0.05, 0.0),
    "a threshold, times": lambda a: a * (a > 0.05),
    "more than the mean": lambda a: a * (a >= a.mean(-1, keepdim=True)),
    "the largest two": lambda a: a * (a >= a.topk(2).values[..., -1:]),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OTHER_MASKS)
def test_a_mask_that_is_that_of_the_signs_by_chance_is_none(name: str, recipe: str) -> None:
    """Of 24 texts some have no number between 0 and the threshold: alone they share as in a batch with one that has."""
    mask = OTHER_MASKS[name]
    up, gate = noise(4, 3, seed=31), noise(4, 3, seed=32)
    for function in (lambda x: mask(x @ gate) * (x @ up), lambda x: torch.sigmoid(mask(x @ gate))):
        for seed in range(24):
            x = noise(3, 2, 4, seed=seed)
            batch, alone = (of_first(function, given, recipe) for given in (x, x[:1]))
            torch.testing.assert_close(batch, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_padding_mask_is_no_relu(recipe: str) -> None:
    """What the value does not depend on has nothing, whatever the signs of its scores."""
    mask = torch.tensor([[True, True, False]])
    for last in (1.0, -1.0):
        x = torch.tensor([[[1.0], [0.5], [last]]], dtype=torch.float64)
        found = of_first(lambda x: torch.sigmoid(x[..., 0] * mask), x, recipe)
        assert found[:2].all()
        assert not found[2].any()


class Plain(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_relu_by_a_mask_of_what_was_scaled_by_a_tensor(rows: int, recipe: str) -> None:
    up, value, x = noise(4, 4, seed=35), noise(4, 4, seed=36), noise(3, 5, 4, seed=37)
    mask = torch.ones(3, 5, 1, dtype=x.dtype)
    mask[1:, 3:] = 0

    def gated(scale: Tensor, relu: Of) -> Tensor:
        def function(x: Tensor) -> Tensor:
            a = x @ up
            return relu(a * scale) * (x @ value)

        return of_first(function, x[:rows], recipe)

    for scale in (torch.linspace(0.5, 2, 4, dtype=x.dtype), mask[:rows]):
        for relu in (lambda b: b * (b > 0), lambda b: torch.where(b > 0, b, 0.0), lambda b: b.masked_fill(b < 0, 0)):
            torch.testing.assert_close(gated(scale, relu), gated(scale, torch.relu), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mask_of_signs_and_padding_is_alone_what_it_is_in_a_batch(recipe: str) -> None:
    up, value, x = noise(4, 4, seed=38), noise(4, 4, seed=39), noise(1, 5, 4, seed=40)
    seen = torch.tensor([True] * 5 + [False] * 2)[None, :, None]
    masks: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda a, seen: torch.where((a > 0) & seen, a, 0.0),
        lambda a, seen: a * ((a > 0).to(a.dtype) * seen.to(a.dtype)),
        lambda a, seen: a.masked_fill((a < 0) | ~seen, 0.0),
    ]
    for mask in masks:
        alone = of_first(lambda x, mask=mask: mask(x @ up, seen[:, :5]) * (x @ value), x, recipe)
        padded = of_first(lambda x, mask=mask: mask(x @ up, seen) * (x @ value), F.pad(x, (0, 0, 0, 2)), recipe)
        torch.testing.assert_close(padded[:5], alone, rtol=1e-9, atol=1e-12)


def of_first(function: Callable[[Tensor], Tensor], x: Tensor, recipe: str) -> Tensor:
    """The relevance of the first row of the input for the sum of its outputs."""
    model = Plain(function)
    with lrpx.propagate(model, RECIPES[recipe]) as trace:
        trace.explain(model(x)[0].sum())
    return trace.relevance("x")[0]


# ------------------------------------------------------------------------------------- diagonals


def matrix(g: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
    made = g.new_zeros(*g.shape, g.shape[-1])
    fill(made)
    return made


EYE = torch.eye(WIDTH, dtype=torch.float64)
DIAGONALS: dict[str, Of] = {
    "made": torch.diag_embed,
    "copied into": lambda g: matrix(g, lambda m: m.diagonal(dim1=-2, dim2=-1).copy_(g)),
    "written into": lambda g: matrix(g, lambda m: m.__setitem__((..., range(WIDTH), range(WIDTH)), g)),
    "times one": lambda g: g[..., None] * EYE,
    "scattered": lambda g: torch.diagonal_scatter(g.new_zeros(*g.shape, WIDTH), g, dim1=-2, dim2=-1),
    "where": lambda g: torch.where(EYE.bool(), g[..., None], torch.zeros_like(g)[..., None]),
    "filled": lambda g: g[..., None].expand(-1, -1, -1, WIDTH).masked_fill(~EYE.bool(), 0.0),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", DIAGONALS)
def test_a_gate_on_a_diagonal_is_a_gate(name: str, recipe: str) -> None:
    function = DIAGONALS[name]
    agree(lambda a, b, _: (function(a.sigmoid()) @ b[..., None])[..., 0], gated(torch.sigmoid), recipe)
    agree(lambda a, b, _: (b[..., None, :] @ function(a.sigmoid()))[..., 0, :], gated(torch.sigmoid), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_padding_leaves_of_a_matrix_of_gates_is_no_diagonal(recipe: str) -> None:
    """Attention of SiLUs from a token to itself, all others being zeros, as at the end of a last chunk."""

    def attended(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (F.silu(a)[:, :, None] * F.silu(b)[:, None]).sum(-1) @ c

    def padded(*given: Tensor) -> Tensor:
        return attended(*(F.pad(each[:, :1], (0, 0, 0, 2)) for each in given))[:, :1].contiguous()

    agree(padded, lambda *given: attended(*(each[:, :1] for each in given)), recipe)


SELF = torch.eye(5, dtype=torch.bool)
LOOPS: dict[str, tuple[Of, Of]] = {
    "on the diagonal": (lambda g: torch.where(SELF, 1.0, g), lambda g: g.masked_fill(SELF, 1.0)),
    "elsewhere": (lambda g: g.masked_fill(~SELF, 0.5), lambda g: torch.where(~SELF, 0.5, g)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LOOPS)
def test_a_matrix_of_gates_and_a_constant_is_no_diagonal(name: str, recipe: str) -> None:
    """A graph that is learned, with an edge from each node to itself."""

    def graph(fill: Of) -> Of:
        return lambda a, b, c: fill((a @ b.mT).sigmoid()) @ c

    agree(*map(graph, LOOPS[name]), recipe, ledger=True)


def test_a_matrix_that_is_diagonal_by_chance_is_none() -> None:
    """A kernel of tokens that are far from each other, alone and beside others."""
    where, values = noise(3, seed=33), noise(3, 3, seed=34)

    def kernel(x: Tensor) -> Tensor:
        places = x @ where
        return torch.relu(0.3 - (places[..., None] - places[..., None, :]).abs()) @ (x @ values)

    def put(x: Tensor) -> Tensor:
        return ((torch.eye(3, dtype=x.dtype) * torch.relu(x @ values)[..., None]) @ x[..., None])[..., 0]

    masks = torch.stack([torch.eye(3), torch.ones(3, 3), torch.ones(3, 3)]).to(values.dtype)

    def masked(x: Tensor) -> Tensor:
        """A graph whose nodes have only themselves, beside others."""
        return (torch.sigmoid(x @ values @ x.mT) * masks[: len(x)]) @ x

    for seed in range(24):
        x = noise(3, 3, 3, seed=seed)
        for function in (kernel, put, masked):
            batch, alone = (of_first(function, given, "lrp") for given in (x, x[:1]))
            torch.testing.assert_close(batch, alone, rtol=1e-9, atol=1e-12)


EINSUMS: dict[str, Of] = {
    "before": lambda g, b: torch.einsum("btij,btj->bti", torch.diag_embed(g), b),
    "after": lambda g, b: torch.einsum("...j,...ji->...i", b, g[..., None] * EYE),
    "without an arrow": lambda g, b: torch.einsum("abij,abjk->abik", torch.diag_embed(g), b[..., None])[..., 0],
    "of three": lambda g, b: torch.einsum("bti,ij,btj->bti", g, EYE, b),
    "of three, scaled": lambda g, b: torch.einsum("bti,ij,btj->btj", g, 2 * EYE, b) / 2,
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", EINSUMS)
def test_a_gate_on_a_diagonal_in_an_einsum_is_a_gate(name: str, recipe: str) -> None:
    function = EINSUMS[name]
    agree(lambda a, b, _: function(a.sigmoid(), b), gated(torch.sigmoid), recipe)
    agree(lambda a, b, c: function(a.sigmoid(), b) * c, lambda a, b, c: a.sigmoid() * b * c, recipe)


SQUARE = noise(WIDTH, WIDTH, seed=4)
GATES_IN_EINSUMS: dict[str, tuple[Of, Of]] = {
    "of a factor": (
        lambda g, b, c: torch.einsum("bij,bi,bik->bjk", b, g[..., 0], c),
        lambda g, b, c: (b * g[..., :1]).mT @ c,
    ),
    "of the result": (
        lambda g, b, c: torch.einsum("bij,bkj,bi,bkl->bil", b, c, g[..., 0], b),
        lambda g, b, c: (b @ c.mT @ b) * g[..., :1],
    ),
    "two": (
        lambda g, b, c: torch.einsum("...ij,...i,...i,...ik->...jk", b, g[..., 0], c[..., 0].exp(), c),
        lambda g, b, c: (b * (g[..., :1] * c[..., :1].exp())).mT @ c,
    ),
    "before a layer": (
        lambda g, b, _: torch.einsum("bij,bij,jk->bik", g, b, SQUARE),
        lambda g, b, _: (g * b) @ SQUARE,
    ),
    "after a layer": (
        lambda g, b, _: torch.einsum("bij,bik,kj->bij", g, b, SQUARE),
        lambda g, b, _: g * (b @ SQUARE),
    ),
    "summed alone": (
        lambda g, b, _: torch.einsum("bij,bik->bik", g, b),
        lambda g, b, _: g.sum(-1, keepdim=True) * b,
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", GATES_IN_EINSUMS)
def test_a_gate_in_an_einsum_is_one(name: str, recipe: str) -> None:
    """As where the product is written after another; what is summed over of two is a matrix product of theirs."""
    together, apart = GATES_IN_EINSUMS[name]

    def after(function: Of, product: Of) -> Of:
        return lambda a, b, c: product(function(a), b, c).mean(-2) + b[:, 0]

    for function in (F.softplus, F.silu, torch.exp):
        agree(after(function, together), after(function, apart), recipe)


# ---------------------------------------------------------------------------- written into a part


def in_place(make: Of, change: Callable[[Tensor, Tensor], object]) -> Of:
    def function(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        y = make(a)
        change(y, b)
        return y * b

    return function


def times_a_part(a: Tensor, b: Tensor, make: Of) -> Tensor:
    y = make(a)
    return torch.cat([y[..., :2] * b[..., :2], y[..., 2:]], -1) * b


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [torch.sigmoid, lambda a: a.exp() * 1], ids=["gate", "scale"])
def test_what_is_written_into_a_part_ends_a_gate(make: Of, recipe: str) -> None:
    wanted = lambda a, b, _: times_a_part(a, b, make)  # noqa: E731
    agree(in_place(make, lambda y, b: y[..., :2].mul_(b[..., :2])), wanted, recipe)
    agree(in_place(make, lambda y, b: y.view(-1, WIDTH).mT[:2].mul_(b.reshape(-1, WIDTH).mT[:2])), wanted, recipe)
    agree(in_place(make, lambda y, b: y.view(-1).add_(b.reshape(-1))), lambda a, b, _: (make(a) + b) * b, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_is_as_good_a_gate(recipe: str) -> None:
    gate = gated(torch.sigmoid)
    agree(lambda a, b, _: b.clone().copy_(a.sigmoid()) * b, gate, recipe)
    agree(in_place(torch.clone, lambda y, b: y[..., :].copy_(y.sigmoid())), gate, recipe)
    agree(in_place(torch.clone, lambda y, b: y.view(-1).copy_(y.sigmoid().view(-1))), gate, recipe)


# ---------------------------------------------------------------------------------- exponentials

ex = torch.exp
ALONE: dict[str, Of] = {
    "the other way": lambda a, b, c: ex(a) * (ex(b) * ex(c)),
    "stacked": lambda a, b, c: torch.stack([ex(a), ex(b), ex(c)]).prod(0),
    "together": lambda a, b, c: torch.einsum("btd,btd,btd->btd", ex(a), ex(b), ex(c)),
    "over a dimension": lambda a, b, c: ex(torch.stack([a, b, c])).prod(0),
    "moved": lambda a, b, c: ((ex(a) * ex(b)).mT.contiguous() * ex(c).mT).mT.contiguous(),
}
ALONE_IN_MATRICES: dict[str, Of] = {
    "the other way": lambda a, b, c: ex(a) @ (ex(b).mT @ ex(c)),
    "together": lambda a, b, c: torch.einsum("bnd,bmd,bme->bne", ex(a), ex(b), ex(c)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ALONE)
def test_exponentials_alone_share_however_they_are_bracketed(name: str, recipe: str) -> None:
    agree(ALONE[name], lambda a, b, c: (ex(a) * ex(b)) * ex(c), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ALONE_IN_MATRICES)
def test_matrices_of_exponentials_alone_share_however_they_are_bracketed(name: str, recipe: str) -> None:
    agree(ALONE_IN_MATRICES[name], lambda a, b, c: (ex(a) @ ex(b).mT) @ ex(c), recipe)


SCALES: dict[str, Of] = {
    "product": lambda a, b, c: ex(a) * ex(b) * c,
    "stacked with the signal": lambda a, b, c: torch.stack([ex(a), ex(b), c]).prod(0),
    "product of a dimension": lambda a, b, c: c * torch.stack([a, b]).exp().prod(0),
    "products along it": lambda a, b, c: c * torch.stack([a, b]).exp().cumprod(0)[-1],
    "a sum by keyword": lambda a, b, c: torch.mul(c, torch.exp(torch.add(a, other=b))),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SCALES)
def test_products_of_exponentials_scale(name: str, recipe: str) -> None:
    agree(SCALES[name], lambda a, b, c: ex(a + b) * c, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_decays_that_are_multiplied_up(recipe: str) -> None:
    agree(
        lambda a, b, _: torch.cumprod(ex(-F.softplus(a)), 1) * b,
        lambda a, b, _: ex(-F.softplus(a).cumsum(1)) * b,
        recipe,
    )


BESIDE: dict[str, Of] = {
    "a factor": lambda a, b, _: torch.cumprod(a, 1) * b,
    "a part": lambda a, b, _: torch.cumprod(a, 1)[:, -1:] * b,
    "a matrix product": lambda a, b, _: torch.cumprod(a, 1) @ (b.mT @ b),
    "scales alone": lambda a, b, _: torch.cumprod(ex(a), 1) * ex(b),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_different_numbers_of_factors_are_refused_beside_another(recipe: str) -> None:
    for function in BESIDE.values():
        with pytest.raises(UnknownOperationError, match="cumprod beside another factor"):
            relevance(function, RECIPES[recipe])
    agree(lambda a, b, _: torch.cumprod(a[:, :1], 1) * b, lambda a, b, _: a[:, :1] * b, recipe)
    firsts = lambda a: torch.stack([a[:, 0], a[:, 0] * a[:, 1]], 1)  # noqa: E731
    agree(lambda a, b, _: torch.cumprod(a[:, :2], 1) + b[:, :2], lambda a, b, _: firsts(a) + b[:, :2], recipe)
    gate = lambda a: a[:, :2].sigmoid()  # noqa: E731
    agree(lambda a, b, _: torch.cumprod(gate(a), 1) * b[:, :2], lambda a, b, _: firsts(gate(a)) * b[:, :2], "lrp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_gates_that_are_multiplied_are_one(recipe: str) -> None:
    agree(
        lambda a, b, c: torch.stack([a, b]).sigmoid().prod(0) * c,
        lambda a, b, c: a.sigmoid() * b.sigmoid() * c,
        recipe,
    )


def test_what_glu_makes_of_gates_is_one() -> None:
    def spelled(a: Tensor) -> Tensor:
        signal, inner = F.silu(a).chunk(2, -1)
        return signal * inner.sigmoid()

    def gating(glu: Callable[[Tensor], Tensor]) -> Of:
        return lambda a, b, c: torch.cat([glu(a) * c[..., :2], b[..., :2]], -1)

    agree(gating(lambda a: F.glu(F.silu(a))), gating(spelled), "lrp")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [torch.sigmoid, torch.exp], ids=["gate", "scale"])
def test_a_sum_is_of_what_is_given_by_keyword_too(make: Of, recipe: str) -> None:
    agree(lambda a, b, c: torch.add(make(a), other=b) * c, lambda a, b, c: (make(a) + b) * c, recipe)
    agree(lambda a, b, c: torch.sub(make(a), other=b, alpha=2) * c, lambda a, b, c: (make(a) - 2 * b) * c, recipe)


# ---------------------------------------------------------------- divisions by sums of exponentials


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 2


def with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


MEANS: dict[str, Of] = {
    "a diagonal after": lambda q, k, v: torch.diag_embed(1 / (e := scores(q, k).exp()).sum(-1)) @ (e @ v),
    "a diagonal before": lambda q, k, v: (torch.diag_embed(1 / (e := scores(q, k).exp()).sum(-1)) @ e) @ v,
    "a diagonal, by one": lambda q, k, v: (
        ((1 / (e := scores(q, k).exp()).sum(-1))[..., None] * torch.eye(LENGTH, dtype=v.dtype)) @ (e @ v)
    ),
    "a column of ones": lambda q, k, v: (o := scores(q, k).exp() @ with_ones(v))[..., :-1] / o[..., -1:],
    "a logarithm": lambda q, k, v: (e := scores(q, k).exp()) @ v * torch.exp(-torch.log(e.sum(-1, keepdim=True))),
    "logsumexp": lambda q, k, v: (s := scores(q, k)).exp() @ v * torch.exp(-torch.logsumexp(s, -1, keepdim=True)),
}


def of_segments(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp().permute(2, 0, 1).contiguous()
    return e.permute(1, 2, 0) / torch.segment_reduce(e, "sum", lengths=torch.tensor([LENGTH]))[0][..., None] @ v


MEANS["segments"] = of_segments


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MEANS)
def test_a_division_is_a_softmax(name: str, recipe: str) -> None:
    agree(MEANS[name], lambda q, k, v: scores(q, k).softmax(-1) @ v, recipe)


def test_a_division_in_a_product_of_three_is_refused() -> None:
    def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = scores(q, k).exp()
        return torch.einsum("bij,bjd,bi->bid", e, v, 1 / e.sum(-1))

    with pytest.raises(UnknownOperationError, match="by a sum of exponentials"):
        relevance(hidden, lrpx.ATTNLRP)
    agree(hidden, lambda q, k, v: scores(q, k).softmax(-1) @ v, "lrp")  # the values take all


def lse(s: Tensor) -> Tensor:
    return s.logsumexp(-1, keepdim=True)


def log_sum(s: Tensor) -> Tensor:
    return s.exp().sum(-1, keepdim=True).log()


def less(s: Tensor, of: Of = lse) -> Tensor:
    s -= of(s)
    return s


NORMALISED: dict[str, Of] = {
    "taken off": lambda s: s - lse(s),
    "the logarithm first": lambda s: -lse(s) + s,
    "with its sign turned": lambda s: s + -lse(s),
    "scaled": lambda s: torch.add(s, lse(s), alpha=-1),
    "in place": lambda s: s.sub_(lse(s)),
    "in place, by an operator": less,
    "in place, written": lambda s: less(s, log_sum),
    "in place, with its sign turned": lambda s: s.add_(-lse(s)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NORMALISED)
def test_scores_less_their_logsumexp_are_a_log_softmax(name: str, recipe: str) -> None:
    normalised, mask = NORMALISED[name], torch.ones(LENGTH, LENGTH).tril() == 0
    for masked in (lambda s: 1 * s, lambda s: s.masked_fill(mask, -torch.inf)):

        def weights(q: Tensor, k: Tensor, normalised: Of = normalised, masked: Of = masked) -> Tensor:
            return normalised(masked(scores(q, k))).exp()

        def softmax(q: Tensor, k: Tensor, masked: Of = masked) -> Tensor:
            return masked(scores(q, k)).softmax(-1)

        for made in (torch.matmul, lambda p, v: p[..., :WIDTH] + v):
            one, other = (lambda q, k, v, of=of, made=made: made(of(q, k), v) for of in (weights, softmax))
            agree(one, other, recipe)


def test_sums_in_turns_are_refused() -> None:
    """Sinkhorn's iterations, as SuperGlue has them, are no softmax of one tensor."""

    def transport(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        rows = number(0.5) - lse(a)
        columns = number(0.2) - (a + rows).logsumexp(1, keepdim=True)
        return (a + rows + columns).exp() + b

    with pytest.raises(UnknownOperationError, match="exp of what the logarithm of a sum"):
        relevance(transport, lrpx.ATTNLRP)


def in_chunks(put_together: Of) -> Of:
    """Attention over the first two keys and over the others, put together by the logarithms of their sums."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = scores(q, k).tensor_split([2], -1)
        outputs = first.softmax(-1) @ v[:, :2], second.softmax(-1) @ v[:, 2:]
        return put_together(*outputs, lse(first), lse(second))

    return attention


def by_weights(one: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    weights = torch.stack([a, b]).softmax(0)
    return weights[0] * one + weights[1] * other


def by_their_sum(one: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    both = torch.logaddexp(a, b)
    return (a - both).exp() * one + (b - both).exp() * other


def flash(blocks: int) -> Of:
    """FlashAttention as its first paper has it: each block's output is normalised, and again by the next."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m, total, out = torch.full_like(q[..., :1].detach(), -1e10), 0 * q[..., :1].detach(), 0 * v.detach()
        for s, values in zip(scores(q, k).tensor_split(blocks, -1), v.tensor_split(blocks, 1), strict=True):
            highest = s.max(-1, keepdim=True).values
            p = torch.exp(s - highest)
            most = torch.maximum(highest, m)
            both = torch.exp(m - most) * total + torch.exp(highest - most) * p.sum(-1, keepdim=True)
            out = (total / both) * torch.exp(m - most) * out + (torch.exp(highest - most) / both) * (p @ values)
            m, total = most, both
        return out

    return attention


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_softmax_beside_nothing_is_one(recipe: str) -> None:
    """With 1 added to what it is divided by, it is one of a score more, which is 0."""

    def beside_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1] @ v

    agree(lambda q, k, v: (e := scores(q, k).exp()) / (1 + e.sum(-1, keepdim=True)) @ v, beside_0, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_flash_attention_of_one_block_is_attention(recipe: str) -> None:
    agree(flash(1), lambda q, k, v: scores(q, k).softmax(-1) @ v, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", [F.logsigmoid, lambda s: -F.softplus(-s)], ids=["logsigmoid", "softplus"])
def test_stick_breaking_attention_in_the_space_of_logarithms_is_refused(function: Of, recipe: str) -> None:
    """Its weights are no decays (Tan et al. 2024); as a product they are known."""
    before = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril(-1)

    def left(s: Tensor) -> Tensor:
        return torch.einsum("bij,jk->bik", F.logsigmoid(-s), before)

    relevance(lambda q, k, v: (torch.sigmoid(s := scores(q, k)) * left(s).exp()) @ v, RECIPES[recipe])
    with pytest.raises(UnknownOperationError, match="exp of a sum with a function of scores"):
        relevance(lambda q, k, v: (function(s := scores(q, k)) + left(s)).exp() @ v, RECIPES[recipe])


def test_flash_attention_of_blocks_that_are_normalised_is_refused() -> None:
    with pytest.raises(UnknownOperationError, match="exponentials"):
        relevance(flash(2), lrpx.ATTNLRP)
    agree(flash(2), lambda q, k, v: scores(q, k).softmax(-1) @ v, "lrp")


CHUNKS: dict[str, Of] = {
    "a softmax": by_weights,
    "logaddexp": by_their_sum,
    "logsumexp": lambda one, other, a, b: (
        torch.stack([one, other]) * ((both := torch.stack([a, b])) - both.logsumexp(0)).exp()
    ).sum(0),
    "a softplus": lambda one, other, a, b: (a - (both := a + F.softplus(b - a))).exp() * one + (b - both).exp() * other,
    "a logsigmoid": lambda one, other, a, b: one + (b - (a - F.logsigmoid(a - b))).exp() * (other - one),
    "their largest": lambda one, other, a, b: (
        (a - (both := (m := torch.maximum(a, b)) + ((a - m).exp() + (b - m).exp()).log())).exp() * one
        + (b - both).exp() * other
    ),
    "sigmoids": lambda one, other, a, b: one * torch.sigmoid(a - b) + (b - a).sigmoid() * other,
    "a ring": lambda one, other, a, b: one - torch.sigmoid(b - a) * (one - other),
    "their exponentials": lambda one, other, a, b: (a.exp() * one + b.exp() * other) / (a.exp() + b.exp()),
    "an einsum": lambda one, other, a, b: torch.einsum(
        "btc,cbtd->btd", torch.cat([a, b], -1).softmax(-1), torch.stack([one, other])
    ),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_attention_that_is_put_together_of_chunks_is_refused(name: str) -> None:
    attention = in_chunks(CHUNKS[name])
    with pytest.raises(UnknownOperationError, match=r"run attention at once|torch\.softmax"):
        relevance(attention, lrpx.ATTNLRP)
    agree(attention, lambda q, k, v: scores(q, k).softmax(-1) @ v, "lrp")  # the values take all


def test_attention_in_chunks_by_the_sums_that_they_were_divided_by_is_refused() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [s.exp() for s in scores(q, k).tensor_split(2, -1)]
        sums = [e.sum(-1, keepdim=True) for e in parts]
        given = [(e / n) @ values for e, n, values in zip(parts, sums, v.tensor_split(2, 1), strict=True)]
        return (sums[0] * given[0] + sums[1] * given[1]) / (sums[0] + sums[1])

    with pytest.raises(UnknownOperationError, match="run attention at once"):
        relevance(attention, lrpx.ATTNLRP)
    agree(attention, lambda q, k, v: scores(q, k).softmax(-1) @ v, "lrp")


def test_layers_of_exponentials_over_one_another_are_refused_under_a_rule_for_layers() -> None:
    """The attention-free transformer (Zhai et al. 2021), whose weights of places are a matrix of constants."""
    weights = noise(LENGTH, LENGTH, seed=33)
    free = lambda q, k, v: torch.sigmoid(q) * ((weights.exp() @ (k.exp() * v)) / (weights.exp() @ k.exp()))  # noqa: E731

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shares = (weights[..., None] + k[:, None]).softmax(2)
        return torch.sigmoid(q) * torch.einsum("btsd,bsd->btd", shares, v)

    for recipe in RECIPES:
        agree(free, attention, recipe)
    with pytest.raises(UnknownOperationError, match="under a rule for layers"):
        relevance(free, ATTNLRP_VIT)


@pytest.mark.parametrize("name", ["to the base of 2", "to a power", "masked after"])
def test_a_softmax_of_so_many_times_the_scores_has_a_uniform_bias_of_these(name: str) -> None:
    times = 0.7 if name == "to a power" else math.log(2)
    seen = torch.tensor([1.0, 1.0, 0.0, 1.0] if name == "masked after" else [1.0] * 4, dtype=torch.float64)

    def written(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        e = a.exp() ** times if name == "to a power" else torch.exp2(a)
        e = e * seen if name == "masked after" else e
        return e / e.sum(-1, keepdim=True) * b

    def softmax(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        return (times * a).masked_fill(seen == 0, -math.inf).softmax(-1) * b

    (value, found), (same, wanted) = (relevance(each, LRP_VOITA) for each in (written, softmax))
    assert torch.allclose(value, same)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_with_a_sink_is_not(recipe: str) -> None:
    """GraniteSWA has it so."""
    attention = lambda q, k, v: (s := scores(q, k)).softmax(-1) @ v * torch.sigmoid(lse(s) - 0.5)  # noqa: E731
    written = lambda q, k, v: (s := scores(q, k)).softmax(-1) @ v * (1 / (1 + ex(0.5 - lse(s).clone())))  # noqa: E731
    agree(attention, written, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_made_of_logsumexps_are_a_softmax_of_anything_else(recipe: str) -> None:
    agree(
        lambda a, b, _: lse(a).softmax(1) * b,
        lambda a, b, _: ((e := lse(a).exp()) / e.sum(1, keepdim=True)) * b,
        "lrp",
    )
    relevance(lambda a, b, _: lse(a).softmax(1) * b + torch.sigmoid(lse(a)) * F.linear(a * b, EYE), RECIPES[recipe])


LOGS: dict[str, Of] = {
    "at once": lambda a: a.softmax(-1).log(),
    "of what is lost": lambda a: (2 * a).softmax(-1).log(),
    "of what is kept": lambda a: (kept := 2 * a, p := kept.softmax(-1), p.mT.softmax(-1), torch.log(p))[3] + 0 * kept,
    "in another precision": lambda a: F.softmax(a, dim=-1, dtype=torch.float64).log(),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LOGS)
def test_the_logarithm_of_a_softmax_is_a_log_softmax(name: str, recipe: str) -> None:
    scale = 2 if name.startswith("of what") else 1
    one: Of = lambda a, b, _: LOGS[name](a) * b + b  # noqa: E731
    agree(one, lambda a, b, _: (scale * a).log_softmax(-1) * b + b, recipe)


@pytest.mark.parametrize("name", ["at once", "of what is lost"])
def test_the_logarithm_of_a_softmax_is_one_where_activations_have_no_rule(name: str) -> None:
    """GIM's rule for softmax is another than its plain gradient, and only so is its logarithm."""
    scale = 2 if name.startswith("of what") else 1
    one: Of = lambda a, b, _: LOGS[name](a) * b + b  # noqa: E731
    (value, found), (same, wanted) = (
        relevance(each, lrpx.recipes.GIM) for each in (one, lambda a, b, _: (scale * a).log_softmax(-1) * b + b)
    )
    assert torch.allclose(value, same, rtol=1e-10)
    assert torch.allclose(found, wanted, rtol=1e-9)
    with pytest.raises(UnknownOperationError, match="log of a softmax"):
        relevance(lambda a, b, _: ((e := a.exp()) / e.sum(-1, keepdim=True)).log() * b, lrpx.recipes.GIM)


FEW = {
    "norms": lrpx.Recipe("norms", norm=lrpx.rules.constant),
    "norms and activations": lrpx.Recipe("both", activation=lrpx.rules.identity, norm=lrpx.rules.constant),
    "activations": lrpx.Recipe("activations", activation=lrpx.rules.identity),
    "softmax": lrpx.Recipe("softmax", softmax=lrpx.rules.Temperature(2.0)),
    "products of your own": replace(lrpx.ATTNLRP, product=lambda op, a, b: op(a, b), matmul=lrpx.rules.unmodified),
}
"""Recipes with rules for few kinds of operation, and none of ours for products."""


@pytest.mark.parametrize("recipe", FEW.values(), ids=FEW)
def test_a_softmax_is_known_without_a_rule_for_products(recipe: lrpx.Recipe) -> None:
    """Its exponentials are no activations then, and their sum is no norm."""
    value, wanted = relevance(lambda a, b, _: a.softmax(-1) + b, recipe)
    written: tuple[Of, ...] = (
        lambda a: (e := a.exp()) / e.sum(-1, keepdim=True),
        lambda a: (e := (a - a.amax(-1, keepdim=True).detach()).exp()) * e.sum(-1, keepdim=True).reciprocal(),
        lambda a: F.normalize(a.exp(), p=1, dim=-1),
    )
    for one in written:
        same, found = relevance(lambda a, b, _, one=one: one(a) + b, recipe)
        assert torch.allclose(value, same, rtol=1e-10)
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


def guard(logs: Tensor) -> Tensor:
    """What ``1e-5`` adds to the logarithms, and all of those below it."""
    return (logs.exp() + 1e-5).log() - torch.where(logs >= math.log(1e-5), logs, 0)


SUMS_OF_EXPONENTIALS: dict[str, Of] = {
    "at once": lambda a: a.exp().sum(-1).log(),
    "less the largest": lambda a: (m := a.amax(-1, keepdim=True)).squeeze(-1) + (a - m).exp().sum(-1).log(),
    "less a constant": lambda a: (m := a.detach().amax(-1)) + torch.log(torch.exp(a - m[..., None]).sum(-1)),
    "by products": lambda a: (a.exp() @ a.new_ones(WIDTH)).log(),
}


@pytest.mark.parametrize("name", SUMS_OF_EXPONENTIALS)
def test_the_logarithm_of_a_sum_of_exponentials_is_a_logsumexp(name: str) -> None:
    """As CRFs and energies have it. Where it is a constant, the largest of the scores is none."""
    one = SUMS_OF_EXPONENTIALS[name]
    agree(lambda a, b, _: one(a)[..., None] * b, lambda a, b, _: a.logsumexp(-1, keepdim=True) * b, "attnlrp")
    if name != "less the largest":
        agree(lambda a, b, _: one(a)[..., None] * b, lambda a, b, _: a.logsumexp(-1, keepdim=True) * b, "lrp")
    for rule in (lrpx.rules.identity, lrpx.rules.uniform_bias):
        with pytest.raises(lrpx.errors.MethodError, match="one number for all scores"):
            relevance(lambda a, b, _: one(a)[..., None] * b, replace(lrpx.ATTNLRP, softmax=rule))


@pytest.mark.parametrize("name", ["amax", "max"])
def test_the_largest_of_logarithms_normalises_nothing(name: str) -> None:
    def by(weights: Of) -> Of:
        return lambda a, b, c: weights((a[..., None, :] + b[..., None]).logsumexp(-1)) * c

    def written(s: Tensor) -> Tensor:
        m = s.amax(1, keepdim=True) if name == "amax" else s.max(1, keepdim=True).values
        return (e := (s - m).exp()) / e.sum(1, keepdim=True)

    with pytest.raises(UnknownOperationError, match="exp of what the logarithm of a sum"):
        relevance(by(written), lrpx.ATTNLRP)
    agree(by(lambda s: (e := s.exp()) / e.sum(1, keepdim=True)), by(lambda s: s.softmax(1)), "attnlrp")


PARTS: dict[str, tuple[Of, Of]] = {
    "selected": (lambda a, *_: torch.log(a.softmax(-1)[:, 2]), lambda a, *_: a.log_softmax(-1)[:, 2]),
    "transposed": (lambda a, *_: a.softmax(-1).mT[..., 1].log(), lambda a, *_: a.log_softmax(-1).mT[..., 1]),
    "to the base of 2": (lambda a, *_: a.softmax(-1).log2(), lambda a, *_: a.log_softmax(-1) / math.log(2)),
    "to the base of 10": (lambda a, *_: a.softmax(1).log10(), lambda a, *_: a.log_softmax(1) / math.log(10)),
    "guarded": (lambda a, *_: (a.softmax(-1) + 1e-14).log(), lambda a, *_: a.log_softmax(-1)),
    "bounded": (lambda a, *_: a.softmax(-1).clamp(min=1e-8).log(), lambda a, *_: a.log_softmax(-1)),
    "selected and guarded": (
        lambda a, *_: torch.log(a.softmax(-1)[:, 2] + 1e-14),
        lambda a, *_: a.log_softmax(-1)[:, 2],
    ),
    "less than the guard": (
        lambda a, *_: ((6 * a).softmax(-1) + 1e-5).log(),
        lambda a, *_: torch.where((logs := (6 * a).log_softmax(-1)) >= math.log(1e-5), logs, 0) + guard(logs.detach()),
    ),
}


@pytest.mark.parametrize("recipe", ["attnlrp", "lrp"])
@pytest.mark.parametrize("name", PARTS)
def test_the_logarithm_of_a_part_of_a_softmax_is_that_of_a_log_softmax(name: str, recipe: str) -> None:
    """With a guard, a function of it; where a softmax is a constant, that is refused."""
    if recipe == "lrp" and ("guard" in name or name == "bounded"):
        with pytest.raises(UnknownOperationError, match="log of a softmax"):
            relevance(PARTS[name][0], lrpx.LRP)
    else:
        agree(*PARTS[name], recipe)


@pytest.mark.parametrize("part", [torch.tensor([2, 0]), torch.tensor([1])])
def test_the_logarithm_of_a_copied_part_of_a_softmax_is_refused(part: Tensor) -> None:
    with pytest.raises(UnknownOperationError, match="log of a part of a softmax"):
        relevance(lambda a, *_: a.softmax(-1)[:, part].log(), lrpx.ATTNLRP)


SUMMED_UP: dict[str, Of] = {
    "chosen": lambda a, *_: a.softmax(-1)[..., [0, 2]].sum(-1, keepdim=True),
    "a slice": lambda a, *_: a.softmax(-1)[..., 1:].mean(-1, keepdim=True) + 1e-9,
    "by a layer": lambda a, *_: a.softmax(-1) @ (torch.eye(WIDTH, dtype=a.dtype) + 0.1),
    "by a vector": lambda a, *_: (a.softmax(-1) @ torch.arange(WIDTH).to(a)).unsqueeze(-1),
    "the largest": lambda a, *_: a.softmax(-1).amax(-1, keepdim=True),
    "what is left": lambda a, *_: 1 - a.softmax(-1)[..., :1],
    "a quotient": lambda a, *_: a.softmax(-1) / a.softmax(-1).flip(-1),
    "a mixture": lambda a, b, _: b.softmax(1) * a.softmax(-1) + (b * a).softmax(-1),
    "its square": lambda a, *_: (p := a.softmax(-1).sum(0)) * p,
    "its odds": lambda a, *_: (p := a.softmax(-1)[..., :1]) / (1 - p),
    "its odds, bounded": lambda a, *_: (p := a.softmax(-1)[..., :1].clamp(1e-6, 1 - 1e-6)) / (1 - p),
    "written out": lambda a, *_: a.log_softmax(-1).exp()[..., 1:].sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", SUMMED_UP)
def test_the_logarithm_of_a_sum_of_probabilities_is_refused(name: str) -> None:
    """As one function it would turn the sign, for it is negative where its argument is not."""
    with pytest.raises(UnknownOperationError, match="log of a part of a softmax, or a sum"):
        relevance(lambda a, b, c: SUMMED_UP[name](a, b, c).log() + c, lrpx.ATTNLRP)


@pytest.mark.parametrize("logit", [torch.logit, torch.special.logit])
def test_log_odds_of_a_softmax_are_refused_and_of_a_sigmoid_are_what_it_is_of(logit: Of) -> None:
    with pytest.raises(UnknownOperationError, match="logit of a part of a softmax"):
        relevance(lambda a, _, c: logit(a.softmax(-1)[..., :1]) + c, lrpx.ATTNLRP)
    agree(lambda a, b, _: logit(a.sigmoid()) + b, lambda a, b, _: a + b, "attnlrp")


@pytest.mark.parametrize("op", [lambda p, v: (p[..., None] * v[:, None]).sum(2), torch.matmul], ids=["sum", "matmul"])
def test_the_logarithm_of_values_that_a_softmax_weighs_is_one_function(op: Callable[..., Tensor]) -> None:
    _, found = relevance(lambda a, b, _: op((a @ b.mT).softmax(-1), b.square() + 1).log(), lrpx.ATTNLRP)
    assert found.any()


def test_the_logarithm_of_a_softmax_in_place_is_a_log_softmax() -> None:
    """Where the softmax is a constant: else torch has no gradient of it."""
    agree(lambda a, b, _: (2 * a).softmax(-1).log_() * b + b, lambda a, b, _: (2 * a).log_softmax(-1) * b + b, "lrp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_logarithm_of_a_softmax_whose_scores_are_gone_is_refused(recipe: str) -> None:
    def late(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        p = (2 * a).softmax(-1)
        return b.softmax(-1) + p.log()

    def written(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        return b + ((e := a.exp()) / e.sum(-1, keepdim=True)).log()

    def beside(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        assert late(a, b, c).isfinite().all()
        return a + b

    for each in (late, written):
        with pytest.raises(UnknownOperationError, match=r"log of a softmax \(log_softmax is the same\)"):
            relevance(each, RECIPES[recipe])
    agree(beside, lambda a, b, _: a + b, recipe)


POWERS: dict[str, tuple[Of, Of]] = {
    "a number over it": (lambda q, k, v: 1 / (-scores(q, k)).exp(), lambda q, k, v: scores(q, k).exp()),
    "reciprocal": (lambda q, k, v: (-scores(q, k)).exp().reciprocal(), lambda q, k, v: scores(q, k).exp()),
    "a negative power": (lambda q, k, v: (-scores(q, k)).exp() ** -1, lambda q, k, v: scores(q, k).exp()),
    "a square": (lambda q, k, v: (scores(q, k) / 2).exp() ** 2, lambda q, k, v: scores(q, k).exp()),
    "a square by name": (lambda q, k, v: (scores(q, k) / 2).exp().square(), lambda q, k, v: scores(q, k).exp()),
    "times itself": (lambda q, k, v: (e := (scores(q, k) / 2).exp()) * e, lambda q, k, v: scores(q, k).exp()),
    "a root": (lambda q, k, v: (2 * scores(q, k)).exp().sqrt(), lambda q, k, v: scores(q, k).exp()),
    "one over a root": (lambda q, k, v: (-2 * scores(q, k)).exp().rsqrt(), lambda q, k, v: scores(q, k).exp()),
    "to another base": (
        lambda q, k, v: torch.exp2(-scores(q, k)).pow(-2),
        lambda q, k, v: torch.exp2(2 * scores(q, k)),
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", POWERS)
def test_a_power_of_an_exponential_is_one(name: str, recipe: str) -> None:
    """Alone, beside another summand, as weights over their sum, and in what divides a gate's signal."""
    power, plain = POWERS[name]
    for made in (
        lambda e, v: e @ torch.ones_like(v),
        lambda e, v: e / e.sum(-1, keepdim=True) @ v,
        lambda e, v: v / (1 + e[..., :1]) + v,
    ):
        one, other = (lambda q, k, v, e=e, made=made: made(e(q, k, v), v) for e in (power, plain))
        agree(one, other, recipe)


OTHERS_FIRST: dict[str, tuple[Of, Of]] = {
    "values over the sums": (
        lambda q, k, v: (e := scores(q, k).exp()) @ (v / e.sum(-2).unsqueeze(-1)),
        lambda q, k, v: scores(q, k).softmax(-2) @ v,
    ),
    "values times their reciprocals": (
        lambda q, k, v: (e := scores(q, k).exp()) @ (v * e.sum(-2).reciprocal().unsqueeze(-1)),
        lambda q, k, v: scores(q, k).softmax(-2) @ v,
    ),
    "a gate over the sums": (
        lambda q, k, v: q.sigmoid() / (e := scores(q, k).exp()).sum(-1, keepdim=True) * (e @ v),
        lambda q, k, v: q.sigmoid() * (scores(q, k).softmax(-1) @ v),
    ),
    "a gate in the denominator": (
        lambda q, k, v: (e := scores(q, k).exp()) @ v / (e.sum(-1, keepdim=True) * (1 + (-q).exp())),
        lambda q, k, v: q.sigmoid() * (scores(q, k).softmax(-1) @ v),
    ),
    "a gate times the reciprocals, in an einsum": (
        lambda q, k, v: torch.einsum(
            "bid,bij,bjd->bid", q.sigmoid() * (1 / (e := scores(q, k).exp()).sum(-1, keepdim=True)), e, v
        ).contiguous(),
        lambda q, k, v: q.sigmoid() * (scores(q, k).softmax(-1) @ v),
    ),
}


@pytest.mark.parametrize("name", OTHERS_FIRST)
def test_a_division_of_another_factor_is_refused(name: str) -> None:
    """A softmax is lost where its sums divide what the exponentials are multiplied with."""
    hidden, plain = OTHERS_FIRST[name]
    with pytest.raises(UnknownOperationError, match="by a sum of exponentials"):
        relevance(hidden, lrpx.ATTNLRP)
    agree(hidden, plain, "lrp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_function_of_a_relu_in_place_that_is_not_0_at_0_is_refused(recipe: str) -> None:
    def after(function: Of) -> Of:
        return lambda a, b, _: function(F.relu(a, inplace=True)) + b

    for function in (torch.sigmoid, torch.exp, lambda x: torch.log(2 * x + 0.5)):
        with pytest.raises(UnknownOperationError, match="inplace=True"):
            relevance(after(function), RECIPES[recipe])
    for function in (torch.tanh, torch.sqrt, lambda x: (x + 1).log()):
        agree(after(function), lambda a, b, _, function=function: function(F.relu(a)) + b, recipe)


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a root, squared": lambda total: torch.rsqrt(total) ** 2,
    "a root of a square": lambda total: torch.rsqrt(total * total),
    "a power of a square": lambda total: total.square().pow(-0.5),
    "a power, squared": lambda total: (total**-0.5)[..., :].square(),
    "a root of a root": lambda total: 1 / total.square().sqrt(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_reciprocal_by_way_of_a_root_is_refused(name: str) -> None:
    def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = scores(q, k).exp()
        return (e @ v) * HIDDEN[name](e.sum(-1, keepdim=True))

    with pytest.raises(UnknownOperationError, match="by a sum of exponentials"):
        relevance(hidden, lrpx.ATTNLRP)
    agree(hidden, lambda q, k, v: scores(q, k).softmax(-1) @ v, "lrp")  # the values take all


LOGISTIC: dict[str, Of] = {
    "a root, squared": lambda a: torch.rsqrt(1 + ex(-a)) ** 2,
    "a root of a square": lambda a: torch.rsqrt((1 + ex(-a)) ** 2),
    "a power of a square": lambda a: (1 + ex(-a)).square() ** -0.5,
    "a root of a product": lambda a: torch.rsqrt((1 + ex(-a)) * (2 + 2 * ex(-a))) * 2**0.5,
    "one over a root": lambda a: 1 / ((1 + ex(-a)) ** 2).sqrt(),
    "one over a root of a fourth power": lambda a: ((1 + ex(-a)) ** 4).sqrt().sqrt().reciprocal(),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LOGISTIC)
def test_a_root_of_a_logistic_is_a_function(name: str, recipe: str) -> None:
    agree(gated(LOGISTIC[name]), gated(torch.sigmoid), recipe)


def test_to_divide_by_a_logistic_that_was_moved_is_refused_where_a_sigmoid_would_share() -> None:
    for divided in (
        lambda a, b, _: b / (1 + ex(-a)).mT.contiguous().mT,
        lambda a, b, _: (1 / (1 + ex(-a)).mT).mT * b,
        lambda a, b, _: (1 + ex(-a)).view(-1).reciprocal().view(a.shape) * b,
    ):
        with pytest.raises(UnknownOperationError, match="divide before they are moved"):
            relevance(divided, lrpx.ATTNLRP)
        agree(divided, gated(torch.sigmoid), "lrp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_root_of_an_exponential_alone_is_a_scale(recipe: str) -> None:
    scale = lambda a, b, _: ex(-a) * b  # noqa: E731
    agree(lambda a, b, _: torch.rsqrt(ex(a) ** 2) * b, scale, recipe)
    agree(lambda a, b, _: b / (ex(a) * ex(a)).sqrt(), scale, recipe)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "sqrt"])
def test_functions_of_complex_numbers_are_refused(name: str) -> None:
    with pytest.raises(UnknownOperationError, match=f"{name} of complex numbers"):
        relevance(lambda a, b, _: getattr(torch, name)(torch.complex(a, b)).real, lrpx.ATTNLRP)


def test_powers_of_complex_numbers() -> None:
    agree(lambda a, b, _: (torch.complex(a, b) ** 2).imag, lambda a, b, _: 2 * a * b, "attnlrp")
    with pytest.raises(UnknownOperationError, match="of complex numbers"):
        relevance(lambda a, b, _: (torch.complex(a, b) ** 1.5).real, lrpx.ATTNLRP)


# ------------------------------------------------------------------------- what leads on, what stays

SAME: dict[str, Of] = {
    "reshape by keyword": lambda y: torch.reshape(shape=y.shape, input=y),
    "unsqueeze by keyword": lambda y: torch.unsqueeze(dim=0, input=y)[0],
    "added to zeros": lambda y: torch.zeros_like(y).add_(y),
    "nearest": lambda y: F.interpolate(y.mT, size=LENGTH).mT.contiguous(),
    "pooled": lambda y: F.avg_pool1d(y.repeat_interleave(2, -1), 2),
    "pooled to a size": lambda y: F.adaptive_avg_pool2d(y.repeat_interleave(2, -1), (LENGTH, WIDTH)),
    "the largest": lambda y: F.max_pool1d(y, 1),
    "padded": lambda y: F.pad(y, (1, 1), mode="replicate")[..., 1:-1],
    "shuffled": lambda y: F.pixel_shuffle(y.reshape(-1, WIDTH, 1, 1), 2).view_as(y),
    "folded": lambda y: F.fold(F.unfold(y[:, None], 1), y.shape[1:], 1)[:, 0],
    "real": lambda y: torch.real(torch.complex(y, y)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SAME)
def test_what_is_moved_or_pooled_is_what_it_was(name: str, recipe: str) -> None:
    same = SAME[name]
    agree(lambda a, b, _: same(a.sigmoid()) * b, lambda a, b, _: a.sigmoid() * b, recipe)
    agree(lambda a, b, _: same(a.exp()) * b, lambda a, b, _: a.exp() * b, recipe)
    agree(lambda a, b, c: same(a * b) * c, lambda a, b, c: a * b * c, recipe)


def test_what_is_multiplied_with_what_decays_decays_however_it_is_bracketed() -> None:
    def state(product: Of) -> Of:
        def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            decayed = product(ex(-F.softplus(a)), b, c)
            return (decayed[:, :1] + decayed[:, 1:2]) * (b * c)

        return function

    for recipe in RECIPES:
        agree(state(lambda e, b, c: (e * b) * c), state(lambda e, b, c: e * (b * c)), recipe)
        agree(state(lambda e, b, c: (e * b) * c.sigmoid()), state(lambda e, b, c: e * (b * c.sigmoid())), recipe)


LENGTHS: dict[str, tuple[Of, Of]] = {
    "norm": (lambda a, b, _: (a - b).norm(dim=1), lambda a, b, _: (a - b).square().sum(1).sqrt()),
    "torch.norm": (lambda a, b, _: torch.norm(a - b, dim=1), lambda a, b, _: ((a - b) ** 2).sum(1) ** 0.5),
    "linalg.norm": (
        lambda a, b, _: torch.linalg.norm(a - b, dim=1),
        lambda a, b, _: F.pairwise_distance(a.mT, b.mT, eps=0.0),
    ),
    "1-norm": (lambda a, b, _: (a - b).norm(1, 1), lambda a, b, _: (a - b).abs().sum(1)),
    "infinity": (
        lambda a, b, _: torch.linalg.vector_norm(a - b, torch.inf, 1),
        lambda a, b, _: (a - b).abs().amax(1),
    ),
    "from a number": (lambda a, *_: (a - 0.5).norm(dim=1), lambda a, *_: (a - 0.5).square().sum(1).sqrt()),
    "1-norm from a number": (lambda a, *_: (1 - a).norm(1, 1), lambda a, *_: (1 - a).abs().sum(1)),
    "filled, from a number": (
        lambda a, *_: (a + 0.3).masked_fill(a > 1, 0.0).norm(dim=1),
        lambda a, *_: (a + 0.3).masked_fill(a > 1, 0.0).square().sum(1).sqrt(),
    ),
    "hypot": (lambda a, b, _: torch.hypot(a, b), lambda a, b, _: torch.stack((a, b)).norm(dim=0)),
    "std": (lambda a, *_: a.std(1), lambda a, *_: ((a - a.mean(1, keepdim=True)) ** 2).sum(1).div(4).sqrt()),
    "root of var": (lambda a, *_: a.std(1), lambda a, *_: a.var(1).sqrt()),
    "var": (lambda a, *_: a.var(1), lambda a, *_: ((a - a.mean(1, keepdim=True)) ** 2).sum(1) / 4),
    "var_mean": (lambda a, *_: torch.var_mean(a, 1)[0], lambda a, *_: a.var(1)),
    "std_mean": (lambda a, *_: torch.cat(torch.std_mean(a, 1)), lambda a, *_: torch.cat((a.std(1), a.mean(1)))),
    "a factor": (lambda a, b, _: a.std(1) * b[:, 0], lambda a, b, _: a.var(1).sqrt() * b[:, 0]),
}


@pytest.mark.parametrize("recipe", ["attnlrp", "lrp"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_that_divides_nothing_is_a_function(name: str, recipe: str) -> None:
    """Of the features of a siamese network, or of a speaker model that pools means and deviations."""
    agree(*LENGTHS[name], recipe)
    assert relevance(LENGTHS[name][0], RECIPES[recipe], ledger=True)[1].any()


CUTOFFS: dict[str, Of] = {
    "product": lambda d: 0.5 * (torch.cos(d) + 1) * (d < 1.5).to(d.dtype),
    "where": lambda d: torch.where(d < 1.5, 0.5 * (torch.cos(d) + 1), 0.0),
    "filled": lambda d: (0.5 * (torch.cos(d) + 1)).masked_fill(d >= 1.5, 0.0),
}


@pytest.mark.parametrize("recipe", ["attnlrp", "lrp"])
@pytest.mark.parametrize("name", CUTOFFS)
def test_a_function_of_a_length_that_ends_at_one_is_a_function_however_the_length_is_written(
    name: str, recipe: str
) -> None:
    """As the filters of molecular models do (SchNet): the number that is added belongs to the piece."""
    cutoff = CUTOFFS[name]
    agree(lambda a, b, _: cutoff((a - b).square().sum(1).sqrt()), lambda a, b, _: cutoff((a - b).norm(dim=1)), recipe)


@pytest.mark.parametrize("function", [lambda x: x.norm(dim=2), lambda x: x.square().sum(2).sqrt()])
def test_a_length_from_a_number_that_was_moved_is_refused_as_its_squares_are(function: Callable[..., Tensor]) -> None:
    with pytest.raises(UnknownOperationError, match="function of a function that was moved"):
        relevance(lambda a, *_: function((a + 0.3).mT), RECIPES["attnlrp"])


DEVIATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "var": lambda x: torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5),
    "std": lambda x: x.std(1, keepdim=True),
    "std_mean": lambda x: torch.std_mean(x, 1, keepdim=True)[0],
    "norm": lambda x: x.norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("recipe", ["attnlrp", "lrp"])
@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_series_is_divided_in_place_by_its_deviation_and_multiplied_with_it_again(name: str, recipe: str) -> None:
    """As most models of time series do."""
    deviation = DEVIATIONS[name]

    def in_place(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        x = a - b
        scale = deviation(x)
        x /= scale
        return F.silu(x) * scale

    agree(in_place, lambda a, b, _: F.silu((a - b) / deviation(a - b)) * deviation(a - b), recipe)


ODD = (torch.arange(LENGTH) % 2 == 1)[:, None]
BESIDE_A_CONSTANT: dict[str, Of] = {
    "where, zeros": lambda a, b, _: torch.where(ODD, a.sigmoid(), torch.zeros_like(a)) * b,
    "where, ones": lambda a, b, _: torch.where(ODD, a.sigmoid(), torch.ones_like(a)) * b,
    "where, a number": lambda a, b, _: torch.where(ODD, a.sigmoid(), 0.5) * b,
    "a length of at least": lambda a, b, _: (lambda n: torch.where(n > 1, n, torch.ones_like(n)))(a.std(1)) * b[:, 0],
    "lerp": lambda a, b, _: torch.lerp(a.sigmoid(), torch.ones_like(a), 0.25) * b,
    "put together": lambda a, b, _: torch.cat((a.sigmoid()[:, 1:], torch.ones_like(a[:, :1])), 1) * b,
}
SPELLED_RELUS = {
    **{name: gated(relu) for name, relu in (RELUS | LEAKY).items()},
    **{f"sigmoid of {name}": gated(lambda a, relu=relu: relu(a).sigmoid()) for name, relu in RELUS.items()},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SPELLED_RELUS | BESIDE_A_CONSTANT)
def test_a_ledger_and_a_rule_for_layers_change_no_gate(name: str, recipe: str) -> None:
    function = (SPELLED_RELUS | BESIDE_A_CONSTANT)[name]
    wanted = relevance(function, RECIPES[recipe])[1]
    by_epsilon = RECIPES[recipe].at("*", linear=lrpx.rules.Epsilon(0.0))  # which is the plain gradient
    for found in (relevance(function, RECIPES[recipe], ledger=True)[1], relevance(function, by_epsilon)[1]):
        assert float((found - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


def test_the_ledger_closes_over_a_variance_whose_gradient_is_plain() -> None:
    relevance(lambda a, b, _: a.var(1) + b[:, 0], lrpx.recipes.GIM, ledger=True)
    relevance(lambda a, b, _: torch.var_mean(a, 1)[0] + b[:, 0], lrpx.recipes.GIM, ledger=True)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_a_loss_in_the_block_is_told_of_outputs(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(
        UnknownOperationError, match=r"compute it after the block, trace\.explain\(loss, outputs=logits\), or"
    ):
        relevance(lambda a, *_: a * loss(a[:, 0], a[:, 1].detach().softmax(-1)), lrpx.ATTNLRP)


LEARNED = torch.tensor(0.6, dtype=torch.float64)
SHIFTED: dict[str, tuple[Of, Of]] = {
    "tanh": (lambda a, b, c: torch.tanh(LEARNED + a), lambda a, b, c: torch.tanh(a + 0.6)),
    "less": (lambda a, b, c: torch.tanh(LEARNED - a), lambda a, b, c: torch.tanh(0.6 - a)),
    "add": (lambda a, b, c: torch.sigmoid(torch.add(LEARNED, a)), lambda a, b, c: torch.sigmoid(a + LEARNED)),
    "product": (lambda a, b, c: (LEARNED + a) * torch.sigmoid(a) * b, lambda a, b, c: (a + 0.6) * torch.sigmoid(a) * b),
    "rational": (
        lambda a, b, c: (LEARNED + a) / (1 + (LEARNED * a).abs()),
        lambda a, b, c: (a + 0.6) / (1 + (0.6 * a).abs()),
    ),
}


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SHIFTED)
def test_a_learned_number_is_a_number_on_either_side(name: str, recipe: str, ledger: bool) -> None:
    agree(*SHIFTED[name], recipe, ledger=ledger)


def decays(a: Tensor) -> Tensor:
    return F.logsigmoid(a).cumsum(1).exp()


RATIOS: dict[str, Of] = {
    "of one decay": lambda a, b, _: ((f := decays(a))[:, :, None] / f[:, None]).sum(2) * b,
    "to the end": lambda a, b, _: (f := decays(a))[:, -1:] / f * b,
    "to the end, as a product": lambda a, b, _: b * ((f := decays(a))[:, -1:] / f),
    "of a value": lambda a, b, _: (b * (f := decays(a))[:, -1:]) / f,
}


@pytest.mark.parametrize("recipe", [lrpx.ATTNLRP, GIM, LRP_CHEFER], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", RATIOS)
def test_a_decay_over_an_earlier_one_is_no_softmax(name: str, recipe: lrpx.Recipe) -> None:
    with pytest.raises(UnknownOperationError, match="division of one exponential by another, for exp of the differ"):
        relevance(RATIOS[name], recipe)


def test_the_first_token_has_all_of_its_own_softmax() -> None:
    def alone(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        return (b * (e := a.exp())) / e

    agree(alone, lambda a, b, _: b * torch.softmax(a[..., None], -1)[..., 0], "attnlrp")
