"""Functions of one tensor that are written out have the relevance of the built-in ones, whatever they are called."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.esm import modeling_esm
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

from lrpx import rules
from lrpx.engine import propagate
from lrpx.engine._divisors import RECIPROCAL
from lrpx.errors import MethodError, UnknownOperationError
from lrpx.recipes import ATTNLRP, ATTNLRP_VIT, GIM, GRADIENT, LIBRAGRAD, LRP
from lrpx.rules import Gamma
from tests.reference.models import randomise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lrpx.recipes import Recipe
    from lrpx.rules import Operation

    Function = Callable[[Tensor], Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, UP, DOWN, WEIGHTS = 2 * noise(2, 5, 8), noise(8, 8, seed=1), noise(8, 8, seed=2), noise(2, 5, 8, seed=3)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Halved:
    """A rule of the user's own, which keeps half."""

    calls = 0

    def __call__(self, op: Operation, /, x: Tensor) -> Tensor:
        self.calls += 1
        return rules.with_gradient_of(op(x.detach()), 0.5 * rules.identity(op, x))


RECIPES = {"attnlrp": ATTNLRP, "lrp": LRP, "own": ATTNLRP.at(activation=Halved()), "gradient": GRADIENT}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
every_family = pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])


def relevance(function: Function, recipe: Recipe, ledger: bool = False) -> tuple[Tensor, Tensor]:
    """The output, and the relevance of the input."""
    model = function if isinstance(function, nn.Module) else Model(function)
    with propagate(model, recipe, observe=(), ledger=ledger) as trace:
        y = model(X)
        trace.explain((y * WEIGHTS).sum())
    assert not ledger or trace.ledger().closes(1e-9)
    return y.detach(), trace.source_relevance(trace.sources[0])


def agree(spelled: Function, built_in: Function, recipe: Recipe) -> None:
    (value, found), (expected, wanted) = relevance(spelled, recipe), relevance(built_in, recipe)
    near(value, expected)
    near(found, wanted)
    near(relevance(spelled, recipe, ledger=True)[1], found)


def near(found: Tensor, wanted: Tensor) -> None:
    assert float(wanted.abs().max()) > 0
    assert float((found - wanted).abs().max()) <= 1e-10 * float(wanted.abs().max())


def inside(function: Function) -> Function:
    """Between two linear layers."""
    return lambda x: function(x @ UP) @ DOWN


def in_place(x: Tensor) -> Tensor:
    x = x + 0
    x *= torch.sigmoid(x)
    return x


TANH = math.sqrt(2 / math.pi)
FREE = noise(5, 8, seed=13) > 0
FILLINGS: dict[str, Callable[[Function], Function]] = {
    "masked_fill": lambda f: lambda x: f((x - 0.8).masked_fill(~FREE, -math.inf)),
    "masked_fill, in place": lambda f: lambda x: f((x - 0.8).masked_fill_(~FREE, -1e9)),
    "where": lambda f: lambda x: f(torch.where(FREE, x - 0.8, -math.inf)),
    "where, from the right": lambda f: lambda x: f(torch.where(~FREE, torch.tensor(-1e9).double(), x - 0.8)),
    "the method": lambda f: lambda x: f((x - 0.8).where(FREE, torch.tensor(-math.inf).double())),
}


@every_recipe
@pytest.mark.parametrize("function", [torch.sigmoid, torch.relu, torch.exp], ids=["sigmoid", "relu", "exp"])
@pytest.mark.parametrize("name", FILLINGS)
def test_a_function_of_what_was_filled_is_filled_afterwards(name: str, function: Function, recipe: Recipe) -> None:
    afterwards = inside(lambda x: function(x - 0.8).masked_fill(~FREE, 0.0))
    agree(inside(FILLINGS[name](function)), afterwards, recipe)


@every_family
def test_a_function_of_what_was_filled_with_another_number(recipe: Recipe) -> None:
    afterwards = inside(lambda x: F.gelu(x + 1).masked_fill(~FREE, float(F.gelu(torch.tensor(0.3, dtype=X.dtype)))))
    agree(inside(lambda x: F.gelu((x + 1).masked_fill(~FREE, 0.3))), afterwards, recipe)


WITHIN: dict[str, Function] = {
    "where": lambda x: torch.where(x + 0.1 > 0, x + 0.1, 1.0).log(),
    "where, with ones": lambda x: torch.where(x + 0.1 > 0, x + 0.1, torch.ones_like(x)).log(),
    "masked_fill": lambda x: (x + 0.1).masked_fill(x + 0.1 <= 0, 1.0).log(),
    "masked_fill, in place": lambda x: (x + 0.1).masked_fill_(x + 0.1 <= 0, 1.0).log(),
}


@every_recipe
@pytest.mark.parametrize("name", WITHIN)
def test_what_a_function_has_no_number_for_is_filled(name: str, recipe: Recipe) -> None:
    afterwards = inside(lambda x: (x + 0.1).clamp(min=1e-9).log().masked_fill(x + 0.1 <= 0, 0.0))
    agree(inside(WITHIN[name]), afterwards, recipe)


def written(x: Tensor, where: Tensor) -> Tensor:
    x[where] = 0
    return x


SPELLED: dict[str, tuple[Function, dict[str, Function]]] = {
    "gelu": (F.gelu, {
        "ESM": modeling_esm.gelu,
        "special.erf": lambda x: 0.5 * x * (1 + torch.special.erf(x * 2**-0.5)),
        "the signal last": lambda x: (1 + torch.erf(x / 2**0.5)) * x / 2,
    }),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), {
        "a cube": lambda x: 0.5 * x * (1 + torch.tanh(TANH * (x + 0.044715 * torch.pow(x, 3.0)))),
        "squares": lambda x: 0.5 * x * (1 + torch.tanh(x * TANH * (1 + 0.044715 * x * x))),
        "products": lambda x: 0.5 * x * (1 + torch.tanh(TANH * (x + 0.044715 * x * x * x))),
        "einsum": lambda x: torch.einsum("btd,btd->btd", x, 0.5 + 0.5 * torch.tanh(TANH * (x + 0.044715 * x**3))),
    }),
    "silu": (F.silu, {
        "x sigmoid": lambda x: x * torch.sigmoid(x),
        "mul": lambda x: torch.sigmoid(x).mul(x),
        "by name": lambda x: torch.mul(input=x, other=x.sigmoid()),
        "a quotient": lambda x: x / (1 + torch.exp(-x)),
        "exp": lambda x: x * (1 / (1 + torch.exp(-x))),
        "mul_": lambda x: torch.sigmoid(x).mul_(x),
        "sigmoid_": lambda x: (x * 1.0).sigmoid_().mul_(x),
        "*=": in_place,
        "in another precision": lambda x: x * torch.sigmoid(x.double()).type_as(x),
        "by the name of its type": lambda x: x * torch.sigmoid(x).type(x.type()),
    }),
    "silu, scaled": (lambda x: F.silu(1.702 * x) / 1.702, {
        "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "channels": lambda x: x * torch.sigmoid(torch.full((8,), 1.702, dtype=x.dtype) * x),
    }),
    "sigmoid": (torch.sigmoid, {
        "1 /": lambda x: 1 / (1 + torch.exp(-x)),
        "reciprocal": lambda x: (1 + (-x).exp()).reciprocal(),
        "** -1": lambda x: (1 + torch.exp(-x)) ** -1,
        "exp / (1 + exp)": lambda x: torch.exp(x) / (1 + torch.exp(x)),
    }),
    "mish": (F.mish, {
        "softplus": lambda x: x * torch.tanh(F.softplus(x)),
        "log exp": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    }),
    "softplus": (F.softplus, {
        "log": lambda x: torch.log(1 + torch.exp(x)),
        "log1p": lambda x: torch.log1p(x.exp()),
        "in place": lambda x: x.exp().add_(1).log_(),
        "in pieces": lambda x: torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x))),
    }),
    "tanh": (torch.tanh, {
        "four": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
        "two": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
    }),
    "hardswish": (F.hardswish, {
        "relu6": lambda x: x * F.relu6(x + 3) / 6, "hardsigmoid": lambda x: x * F.hardsigmoid(x),
    }),
    "hardsigmoid": (F.hardsigmoid, {
        "relu6": lambda x: F.relu6(x + 3) / 6, "clamp": lambda x: (x / 6 + 0.5).clamp(0, 1),
    }),
    "softsign": (F.softsign, {"abs": lambda x: x / (1 + x.abs())}),
    "relu": (F.relu, {
        "a mask": lambda x: x * (x > 0), "clamp": lambda x: x.clamp(min=0), "abs": lambda x: (x + x.abs()) / 2,
    }),
    "elu": (F.elu, {
        "exp": lambda x: torch.where(x > 0, x, torch.exp(x) - 1), "expm1": lambda x: torch.where(x > 0, x, x.expm1()),
    }),
    "elu, as a sum": (F.elu, {
        "masks": lambda x: x * (x > 0) + (x.exp() - 1) * (x <= 0),
        "masks of numbers": lambda x: x * (x > 0).float() + (1 - (x > 0).float()) * (x.exp() - 1),
        "its own sign": lambda x: F.relu(x) + (lambda y: y * (y < 0))(x.exp() - 1),
        "where": lambda x: F.relu(x) + torch.where(x > 0, 0.0, x.exp() - 1),
        "zeros": lambda x: F.relu(x) + torch.where(x <= 0, x.exp() - 1, torch.zeros_like(x)),
        "filled": lambda x: F.relu(x) + (x.exp() - 1).masked_fill(x > 0, 0),
        "filled in place": lambda x: F.relu(x) + (x.exp() - 1).masked_fill_(x > 0, 0),
        "written": lambda x: F.relu(x) + written(x.exp() - 1, x > 0),
        "its own sign, in place": lambda x: F.relu(x) - (lambda y: y.masked_fill_(y < 0, 0))(1 - x.exp()),
    }),
    "relu²": (lambda x: F.relu(x).square(), {
        "** 2": lambda x: F.relu(x) ** 2, "x relu": lambda x: x * F.relu(x),
        "a product": lambda x: F.relu(x) * F.relu(x),
    }),
    "logsigmoid": (F.logsigmoid, {
        "log": lambda x: torch.log(torch.sigmoid(x)), "exp": lambda x: -torch.log(1 + torch.exp(-x)),
    }),
    "tanhshrink": (F.tanhshrink, {"a sum": lambda x: x - torch.tanh(x)}),
}  # fmt: skip
PAIRS = [(name, spelling) for name, (_, spellings) in SPELLED.items() for spelling in spellings]


@every_family
@pytest.mark.parametrize("shape", [(8,), (6,), (1,), ()])
@pytest.mark.parametrize(
    "spelled",
    [
        lambda x, c: x * (x > c),
        lambda x, c: F.relu(x) * (x > c),
        lambda x, c: x.masked_fill(x < c, 0.0),
        lambda x, c: torch.where(x > c, x, 0.0),
        lambda x, c: torch.where(x > 0, x, c),
        lambda x, c: torch.where(x > 0, c, torch.sigmoid(x) - 0.3),
    ],
    ids=["a product", "jumprelu", "filled", "chosen", "chosen of it", "chosen of it first"],
)
def test_a_parameter_is_the_constant_that_its_numbers_are(
    spelled: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], recipe: Recipe
) -> None:
    """As the threshold of a JumpReLU, or a learned token in the place of others."""
    width = shape[0] if shape else 8
    numbers = noise(*shape, seed=4).abs() / 9

    class Own(Model):
        def __init__(self, learned: bool) -> None:
            super().__init__(lambda x: x)
            self.level = nn.Parameter(numbers) if learned else numbers.expand(width).clone()

        def forward(self, x: Tensor) -> Tensor:
            cut = (x @ UP)[..., :width] if width > 1 else x @ UP
            return nn.functional.pad(spelled(cut, self.level), (0, 8 - cut.shape[-1])) @ DOWN

    agree(Own(True), Own(False), recipe)


@every_recipe
@pytest.mark.parametrize(("name", "spelling"), PAIRS)
def test_an_activation_written_out(name: str, spelling: str, recipe: Recipe) -> None:
    built_in, spellings = SPELLED[name]
    if recipe is RECIPES["own"] and name in ("relu", "tanhshrink", "elu, as a sum"):
        return  # a sum and a selection have no rule of their own
    if recipe is GRADIENT and spelling in ("mul_", "sigmoid_", "in place"):
        return  # torch itself has no gradient
    if recipe is GRADIENT:
        value, found = relevance(inside(spellings[spelling]), recipe)
        x = X.clone().requires_grad_()
        y = inside(spellings[spelling])(x)
        assert torch.equal(value, y)
        near(found, x.detach() * torch.autograd.grad((y * WEIGHTS).sum(), x)[0])
        return
    agree(inside(spellings[spelling]), inside(built_in), recipe)


@every_recipe
@pytest.mark.parametrize("name", ["gelu", "silu", "softplus"])
def test_a_rule_of_ones_own_is_called_for_the_whole(name: str, recipe: Recipe) -> None:
    built_in, spellings = SPELLED[name]
    for spelling in spellings.values():
        own = ATTNLRP.at(activation=Halved())
        near(relevance(inside(spelling), own)[1], relevance(inside(built_in), ATTNLRP)[1] / 2)


MODULES = {
    "gelu": F.gelu, "gelu_python": F.gelu, "mish": F.mish, "silu": F.silu, "hardswish": F.hardswish, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "relu": F.relu, "relu6": F.relu6, "relu2": lambda x: F.relu(x).square(),
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702, "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
    "leaky_relu": F.leaky_relu, "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}  # fmt: skip


class Activated(nn.Module):
    """An activation as a module of the model."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ UP) @ DOWN


class Gated(Activated):
    """An activation as a module, whose output is multiplied with another layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ UP) * (x @ DOWN)


@every_family
@pytest.mark.parametrize("name", MODULES)
def test_the_activations_of_transformers(name: str, recipe: Recipe) -> None:
    agree(Activated(ACT2FN[name]), inside(MODULES[name]), recipe)


@every_family
@pytest.mark.parametrize("name", sorted({*MODULES, "gelu_fast", "laplace", "xielu", "linear"}))
def test_a_users_own_class_with_the_same_code(name: str, recipe: Recipe) -> None:
    """What counts is what is computed, not where the class is from."""
    module = ACT2FN[name].double()
    agree(inside(lambda x: type(module).forward(module, x)), Activated(module), recipe)
    if name != "xielu":  # engine.md, "Not seen": what a minimum with a constant hands on is no function of its argument
        agree(lambda x: type(module).forward(module, x @ UP) * (x @ DOWN), Gated(module), recipe)


@every_family
def test_bloom_has_an_activation_that_no_mode_sees(recipe: Recipe) -> None:
    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    agree(Activated(BloomGelu()), inside(gelu), recipe)


def test_bloom_where_activations_have_their_plain_gradient() -> None:
    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    (value, found), (expected, wanted) = (relevance(inside(each), GIM) for each in (BloomGelu(), gelu))
    assert torch.allclose(value, expected, rtol=1e-6)  # BLOOM has √(2/π) with eight digits
    assert torch.allclose(found, wanted, rtol=1e-5)


SIGMOIDS: dict[str, Function] = {
    "a number over it": lambda x: x * (1 / (1 + torch.exp(-x))),
    "its reciprocal, first": lambda x: torch.reciprocal(1 + torch.exp(-x)) * x,
    "its power": lambda x: x * (1 + torch.exp(-x)) ** -1,
}


@pytest.mark.parametrize("name", SIGMOIDS)
def test_a_product_with_a_sigmoid_that_is_written_out_where_activations_have_their_plain_gradient(name: str) -> None:
    agree(inside(SIGMOIDS[name]), inside(F.silu), GIM)


def test_a_product_with_the_logarithm_of_an_exponential_and_a_number() -> None:
    agree(inside(lambda x: x * (1 + x.exp()).log().tanh()), inside(F.mish), GIM)
    agree(inside(lambda x: x * x.exp().log1p().tanh()), inside(F.mish), GIM)


def test_a_product_with_a_function_of_an_exponential_that_is_no_power() -> None:
    for function in (lambda x: x * x.exp().tanh(), lambda x: x * (x.exp() / 2).sigmoid(), lambda x: x * x.exp().atan()):
        near(relevance(inside(function), GIM)[1], relevance(inside(function), GRADIENT)[1])


PIECES: dict[str, tuple[Function, Function]] = {
    "elu": (lambda x: torch.where(x > 0, x, torch.expm1(x)), F.elu),
    "elu, the other way round": (lambda x: torch.where(x <= 0, x.expm1(), x), F.elu),
}


@every_family
@pytest.mark.parametrize("name", PIECES)
def test_a_gate_in_pieces_to_none_of_which_a_number_was_added(name: str, recipe: Recipe) -> None:
    spelled, built_in = PIECES[name]
    agree(lambda x: spelled(x @ UP) * (x @ DOWN), lambda x: built_in(x @ UP) * (x @ DOWN), recipe)


def test_a_norm_that_is_written_out_keeps_no_graph_of_its_mean() -> None:
    seen = []

    def norm(x: Tensor) -> Tensor:
        seen.append(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x * seen[-1]

    relevance(inside(norm), ATTNLRP)
    assert not hasattr(seen[0], RECIPROCAL)


@every_family
def test_slopes_of_channels_inside_another_function(recipe: Recipe) -> None:
    slopes = torch.linspace(0.1, 0.9, X.shape[1], dtype=torch.float64)

    def leaky(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * slopes[:, None])

    for function in (lambda f, x: f(x) + x, lambda f, x: (f(x) + 1).tanh(), lambda f, x: torch.where(x > 0, f(x), x)):
        spelled, wanted = (
            lambda x, f=f, function=function: function(f, x @ UP) * (x @ DOWN)
            for f in (lambda x: F.prelu(x, slopes), leaky)
        )
        agree(spelled, wanted, recipe)


OVER = {
    "one over": lambda x: x * (1 / (1 + x.abs())),
    "reciprocal": lambda x: (1 + x.abs()).reciprocal() * x,
    "power": lambda x: x * (1 + x.abs()) ** -1,
    "root": lambda x: x * torch.rsqrt(1 + 2 * x.abs() + x * x),
}


@pytest.mark.parametrize("recipe", [GIM, LRP, ATTNLRP, LIBRAGRAD], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelling", OVER)
def test_a_product_with_one_over_a_function_of_the_same(spelling: str, recipe: Recipe) -> None:
    agree(inside(OVER[spelling]), inside(F.softsign), recipe)
    agree(lambda x: OVER[spelling](x @ UP) * (x @ DOWN), lambda x: F.softsign(x @ UP) * (x @ DOWN), recipe)


@every_family
def test_a_function_by_addcmul(recipe: Recipe) -> None:
    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * torch.addcmul(x, x * x, x, value=0.044715)))

    def whole(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    agree(inside(gelu), inside(whole), recipe)
    agree(lambda x: gelu(x @ UP) * (x @ DOWN), lambda x: whole(x @ UP) * (x @ DOWN), recipe)

    def half(x: Tensor) -> Tensor:
        return torch.addcmul(x / 2, x / 2, torch.erf(x / math.sqrt(2)))

    agree(lambda x: half(x @ UP) * (x @ DOWN), lambda x: F.gelu(x @ UP) * (x @ DOWN), recipe)


LOGARITHMIC: dict[str, Function] = {
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "log": lambda x: (x.relu() + 1).log(),
}
LOGISTIC: dict[str, Function] = {
    "over": lambda z: 1 / (1 + (-z).exp()),
    "exp over": lambda z: z.exp() / (1 + z.exp()),
}


@every_family
@pytest.mark.parametrize("sigmoid", LOGISTIC.values(), ids=LOGISTIC)
@pytest.mark.parametrize("before", LOGARITHMIC.values(), ids=LOGARITHMIC)
def test_a_sigmoid_of_what_a_layer_makes_of_logarithms(before: Function, sigmoid: Function, recipe: Recipe) -> None:
    layer = nn.Linear(8, 8).double()
    agree(lambda x: x @ UP * sigmoid(layer(before(x))), lambda x: x @ UP * layer(before(x)).sigmoid(), recipe)


@every_family
def test_a_square_by_einsum_in_a_function_of_what_is_moved(recipe: Recipe) -> None:
    def by(square: Function) -> Function:
        def function(x: Tensor) -> Tensor:
            y = square(x) + x
            return torch.stack([a * b for a, b in zip(y.unbind(1), x.unbind(1), strict=True)], 1)

        return inside(function)

    agree(by(lambda x: torch.einsum("btd,btd->btd", x, x)), by(torch.square), recipe)


@every_family
def test_esm_with_its_own_gelu_and_with_torchs(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tf.EsmConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=1, mask_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tf.EsmForMaskedLM(config)
    randomise(model, 0)
    model = model.double().eval()
    found = []
    for gelu in (modeling_esm.gelu, F.gelu):
        monkeypatch.setattr(modeling_esm, "gelu", gelu)
        with propagate(model, recipe, observe=()) as trace:
            trace.explain(model(input_ids=torch.tensor([[5, 9, 3, 17, 4]])).logits[0, 2, 7])
        found.append(trace.source_relevance(trace.sources[0]))
    near(*found)


@every_family
def test_recurrent_gemmas_square_root_is_torchs(recipe: Recipe) -> None:
    """It is a custom autograd function, that no mode sees into."""

    def gated(root: Function) -> Function:
        def function(x: Tensor) -> Tensor:
            a = -F.softplus(x @ UP)
            scale = root(1 - torch.exp(2 * a))
            reset = torch.zeros(2, 5, 1, dtype=torch.bool)
            reset[:, 0] = True
            return (x @ DOWN) * (reset + ~reset * scale)

        return function

    agree(gated(SqrtBoundDerivative.apply), gated(torch.sqrt), recipe)


# ------------------------------------------------------------------------------------- softmax


def by_formula(x: Tensor) -> Tensor:
    exponentials = torch.exp(x - x.max(-1, keepdim=True).values)
    return exponentials / exponentials.sum(-1, keepdim=True)


def by_formula_in_place(x: Tensor) -> Tensor:
    exponentials = (x - x.amax(-1, keepdim=True)).exp_()
    exponentials /= exponentials.sum(-1, keepdim=True)
    return exponentials


def masked(x: Tensor, softmax: Function) -> Tensor:
    return softmax(x.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf))


SOFTMAX: dict[str, Function] = {
    "exp / sum": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(x.exp()),
    "less the largest": by_formula,
    "in place": by_formula_in_place,
    "by two": lambda x: (lambda e: e / torch.sum(e, dim=-1)[..., None])(torch.exp(x)),
    "unsqueezed": lambda x: (lambda e: e / e.sum(-1).unsqueeze(-1))(torch.exp(x)),
    "with an epsilon": lambda x: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-30))(torch.exp(x)),
    "log_softmax": lambda x: torch.exp(F.log_softmax(x, -1)),
    "times 1 / sum": lambda x: (lambda e: e * (1 / e.sum(-1, keepdim=True)))(x.exp()),
    "times 1 / sum, by two": lambda x: (lambda e: (1 / e.sum(-1))[..., None].expand_as(e) * e)(x.exp()),
    "times a reciprocal": lambda x: (lambda e: e.mul(e.sum(-1, keepdim=True).reciprocal()))(x.exp()),
    "times a viewed reciprocal": lambda x: (lambda e: e * e.sum(-1).reciprocal().view(2, -1, 1))(x.exp()),
    "times a power": lambda x: (lambda e: e * e.sum(-1, keepdim=True) ** -1)(x.exp()),
    "normalize": lambda x: F.normalize(x.exp(), p=1, dim=-1),
    "1-norm": lambda x: (lambda e: e / e.norm(p=1, dim=-1, keepdim=True))(x.exp()),
    "1-norm of linalg": lambda x: (lambda e: e / torch.linalg.vector_norm(e, 1, -1, keepdim=True))(x.exp()),
    "transposed": lambda x: (lambda e: (e / e.sum(1, keepdim=True)).mT)(x.mT.exp()),
    "transposed after": lambda x: (lambda e: (e.mT / e.mT.sum(1, keepdim=True)).mT)(x.exp()),
    "transposed by name": lambda x: (lambda e: (e.transpose(1, 2) / e.sum(-1)[:, None]).transpose(1, 2))(x.exp()),
    "viewed": lambda x: (lambda e: (e / e.sum(-1, keepdim=True)).view(2, -1, 5))(x.exp().view(-1, 5)),
    "viewed after": lambda x: (lambda e: (e.view(-1, 5) / e.view(-1, 5).sum(-1, keepdim=True)).view(2, -1, 5))(x.exp()),
    "chunked": lambda x: (lambda e: torch.cat([c / e.sum(-1, keepdim=True) for c in e.chunk(2, -1)], -1))(x.exp()),
    "chunked rows": lambda x: torch.cat([c / c.sum(-1, keepdim=True) for c in x.exp().chunk(2, 1)], 1),
    "put together": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.cat(x.exp().split(2, -1), -1)),
    "stacked": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.stack(x.exp().unbind(1), 1)),
    "mean": lambda x: (lambda e: e / e.mean(-1, keepdim=True) / 5)(x.exp()),
    "cumsum": lambda x: (lambda e: e / e.cumsum(-1)[..., -1:])(x.exp()),
    "ones": lambda x: (lambda e: e / (e @ torch.ones(5, 1, dtype=x.dtype)))(x.exp()),
    "ones, times a reciprocal": lambda x: (lambda e: e * (1 / (e @ torch.ones(5, 5, dtype=x.dtype))))(x.exp()),
    "ones, of its type": lambda x: (lambda e: e * (1 / (e @ torch.ones(5, 1).to(e))))(x.exp()),
    "ones on the left": lambda x: (lambda e: (e * (1 / (torch.ones(5).type_as(e) @ e))[:, None]).mT)(x.mT.exp()),
    "ones, by a layer": lambda x: (lambda e: e / F.linear(e, torch.ones(5, 5, dtype=x.dtype)))(x.exp()),
    "ones, times a layer": lambda x: (lambda e: e * F.linear(e, torch.ones(1, 5).type_as(e)).reciprocal())(x.exp()),
    "ones, by a convolution": lambda x: (lambda e: e / F.conv1d(e.mT, torch.ones(1, 5, 1).type_as(e)).mT)(x.exp()),
    "ones, by tensordot": lambda x: (lambda e: e / torch.tensordot(e, torch.ones(5, 1, dtype=x.dtype), 1))(x.exp()),
    "ones, by addmm": lambda x: torch.stack(
        [e / torch.addmm(e.new_zeros(1), e, e.new_ones(5, 1)) for e in x.exp().unbind()]
    ),
    "ones, a sparse matrix": lambda x: torch.stack(
        [(e / torch.sparse.mm(e.new_ones(1, 5).to_sparse(), e)).mT for e in x.mT.exp().unbind()]
    ),
    "einsum": lambda x: (lambda e: e / torch.einsum("bts->bt", e)[..., None])(x.exp()),
    "masked": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(x.exp().masked_fill(x.isinf(), 0.0)),
    "masked in place": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(x.exp().masked_fill_(x.isinf(), 0.0)),
    "chosen": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.where(x.isinf(), 0.0, x.exp())),
    "logsumexp": lambda x: torch.exp(x - torch.logsumexp(x, -1, keepdim=True)),
    "logsumexp unsqueezed": lambda x: (x - x.logsumexp(-1)[..., None]).exp(),
    "logsumexp viewed": lambda x: (x - x.logsumexp(-1).view(2, 5, 1)).exp(),
    "log of sum": lambda x: torch.exp(x - x.exp().sum(-1, keepdim=True).log()),
    "log of sum, ones": lambda x: torch.exp(x - (x.exp() @ torch.ones(5, 5, dtype=x.dtype)).log()),
    "log of sum, by two": lambda x: (x - torch.log(torch.sum(torch.exp(x), -1))[..., None]).exp(),
    "log of sum, the largest off": lambda x: (lambda z: (z - z.exp().sum(-1, keepdim=True).log()).exp())(
        x - x.amax(-1, keepdim=True)
    ),
    "log of sum, the largest on": lambda x: (lambda m: (x - ((x - m).exp().sum(-1, keepdim=True).log() + m)).exp())(
        x.amax(-1, keepdim=True)
    ),
    "of two tensors": lambda x: (
        lambda a, b: torch.cat([a, b], -1) / (a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True))
    )(x[..., :2].exp(), x[..., 2:].exp()),
    "of two tensors, one by one": lambda x: (
        lambda a, b: torch.cat([c / (a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True)) for c in (a, b)], -1)
    )(x[..., :2].exp(), x[..., 2:].exp()),
    "of each key": lambda x: (lambda es: torch.stack([e / sum(es) for e in es], -1))(
        [torch.exp(x[..., i]) for i in range(5)]
    ),
    "of two tensors, times a reciprocal": lambda x: (
        lambda a, b: torch.cat([a, b], -1) * (1 / (a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True)))
    )(x[..., :2].exp(), x[..., 2:].exp()),
    "clamped": lambda x: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-9))(x.exp()),
    "log1p": lambda x: torch.exp(x - torch.log1p(x.exp().sum(-1, keepdim=True) - 1)),
    "index_add": lambda x: by_index(x, lambda zeros, ids, e: zeros.index_add(2, ids[0, 0], e)),
    "index_add in place": lambda x: by_index(x, lambda zeros, ids, e: zeros.index_add_(2, ids[0, 0], e)),
    "scatter_add": lambda x: by_index(x, lambda zeros, ids, e: zeros.scatter_add(2, ids, e)),
    "scatter_add in place": lambda x: by_index(x, lambda zeros, ids, e: zeros.scatter_add_(2, ids, e) + 1e-16),
    "scatter_reduce": lambda x: by_index(x, lambda zeros, ids, e: zeros.scatter_reduce(2, ids, e, "sum")),
    "a mean by index": lambda x: by_index(x, lambda zeros, ids, e: 6 * zeros.scatter_reduce(2, ids, e, "mean")),
    "index_put": lambda x: by_index(x, lambda zeros, ids, e: zeros.index_put(PLACES, e, accumulate=True)),
}
PLACES = (torch.arange(2)[:, None, None], torch.arange(5)[None, :, None], torch.zeros(1, 1, 5, dtype=torch.long))


def by_index(x: Tensor, gathered: Callable[..., Tensor]) -> Tensor:
    """As layers of graphs have it, that sum over the edges of each node; here all are of one."""
    e, ids = x.exp(), torch.zeros(2, 5, 5, dtype=torch.long)
    return e / gathered(torch.zeros_like(x[..., :1]), ids, e)


def attention(softmax: Function) -> Function:
    return lambda x: softmax((x @ UP @ x.mT) / 3) @ (x @ DOWN)


@every_family
@pytest.mark.parametrize("name", SOFTMAX)
def test_a_softmax_written_out(name: str, recipe: Recipe) -> None:
    agree(attention(SOFTMAX[name]), attention(lambda x: x.softmax(-1)), recipe)
    causal = attention(lambda x: masked(x, SOFTMAX[name]))
    agree(causal, attention(lambda x: masked(x, lambda x: x.softmax(-1))), recipe)


SUMS_OF_GROUPS: dict[str, Function] = {
    "a product": lambda e: e @ GROUPS,
    "a product on the left": lambda e: (GROUPS @ e.mT).mT,
    "of its type": lambda e: (GROUPS.to(e) @ e.mT).mT,
    "a layer": lambda e: F.linear(e, GROUPS),
    "a product, and back": lambda e: (e @ GROUPS[:, [0, 2]]) @ GROUPS[[0, 2]],
    "two layers": lambda e: F.linear(F.linear(e, GROUPS[[0, 2]]), GROUPS[:, [0, 2]]),
    "sums, and a product": lambda e: torch.stack([e[..., :2].sum(-1), e[..., 2:].sum(-1)], -1) @ GROUPS[[0, 2]],
    "a convolution": lambda e: F.conv1d(e.mT, GROUPS[..., None]).mT,
    "tensordot": lambda e: torch.tensordot(e, GROUPS, 1),
    "einsum": lambda e: torch.einsum("bij,jk->bik", e, GROUPS),
}
GROUPS = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).double()
DIVISIONS: dict[str, Callable[[Tensor, Function], Tensor]] = {
    "a quotient": lambda s, summed: s.exp() / summed(s.exp()),
    "times a reciprocal": lambda s, summed: (e := s.exp()) * (1 / summed(e)),
    "a logarithm": lambda s, summed: (s - summed(s.exp()).log()).exp(),
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP, ATTNLRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", SUMS_OF_GROUPS)
def test_a_softmax_of_groups_that_a_constant_matrix_adds_up(name: str, division: str, recipe: Recipe) -> None:
    agree(
        attention(lambda s: DIVISIONS[division](s, SUMS_OF_GROUPS[name])),
        attention(lambda s: torch.cat([s[..., :2].softmax(-1), s[..., 2:].softmax(-1)], -1)),
        recipe,
    )


def online(s: Tensor, v: Tensor) -> Tensor:
    """Attention with as little memory as there is: a key after another, less the largest score so far."""
    largest, total, found = s[..., :1], torch.ones_like(s[..., :1]), v[:, :1]
    for i in range(1, s.shape[-1]):
        now = torch.maximum(largest, s[..., i : i + 1])
        decay, e = torch.exp(largest - now), torch.exp(s[..., i : i + 1] - now)
        found, total, largest = decay * found + e * v[:, i : i + 1], decay * total + e, now
    return found / total


def in_chunks(s: Tensor, v: Tensor) -> Tensor:
    """Self-attention does not need O(n²) memory (Rabe & Staats 2021)."""
    parts = []
    for keys in (slice(2), slice(2, None)):
        largest = s[..., keys].amax(-1, keepdim=True).detach()
        e = torch.exp(s[..., keys] - largest)
        parts.append((e @ v[:, keys], e.sum(-1, keepdim=True), largest))
    scales = [torch.exp(part[2] - torch.maximum(parts[0][2], parts[1][2])) for part in parts]
    values, totals = (sum(part[i] * scale for part, scale in zip(parts, scales, strict=True)) for i in (0, 1))
    return values / totals


def merged(s: Tensor, v: Tensor) -> Tensor:
    """Two attentions, each normalised, by their normalisers, as a ring of devices puts them together."""
    one, other = (s[..., keys].logsumexp(-1, keepdim=True) for keys in (slice(2), slice(2, None)))
    both = torch.logaddexp(one, other)
    return (one - both).exp() * (s[..., :2].softmax(-1) @ v[:, :2]) + (other - both).exp() * (
        s[..., 2:].softmax(-1) @ v[:, 2:]
    )


DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda s, v: (lambda e: e @ v / e.sum(-1, keepdim=True))(s.exp()),
    "einsum": lambda s, v: (lambda e: torch.einsum("bts,bsd->btd", e, v) / e.sum(-1, keepdim=True))(s.exp()),
    "einsum of both": lambda s, v: (
        lambda e: torch.einsum("bsd,bts->btd", v, e) / torch.einsum("bts->bt", e)[..., None]
    )(s.exp()),
    "times a reciprocal": lambda s, v: (lambda e: e @ v * (1 / e.sum(-1, keepdim=True)))(s.exp()),
    "a reciprocal first": lambda s, v: (lambda e: e.sum(-1, keepdim=True).reciprocal() * (e @ v))(s.exp()),
    "written out": lambda s, v: (lambda e: (e[..., None] * v[:, None]).sum(2) / e.sum(-1)[..., None])(s.exp()),
    "a sum of products": lambda s, v: (lambda es: sum(e * v[:, i : i + 1] for i, e in enumerate(es)) / sum(es))(
        [s[..., i : i + 1].exp() for i in range(5)]
    ),
    "turned": lambda s, v: (lambda e: (v.mT @ e / e.sum(-2, keepdim=True)).mT)(s.mT.exp()),
    "viewed": lambda s, v: (
        (lambda e: (e @ v).view(2, 5, 2, 4).transpose(1, 2) / e.sum(-1).view(2, 1, 5, 1))(s.exp())
        .transpose(1, 2)
        .reshape(2, 5, 8)
    ),
    "two tensors": lambda s, v: (
        lambda a, b: (a @ v[:, :2] + b @ v[:, 2:]) / (a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True))
    )(s[..., :2].exp(), s[..., 2:].exp()),
    "a key after another": online,
    "in chunks": in_chunks,
}


@every_family
@pytest.mark.parametrize("name", DIVIDED)
def test_a_softmax_that_is_divided_after_the_values(name: str, recipe: Recipe) -> None:
    def attend(written: Callable[[Tensor, Tensor], Tensor], tied: bool) -> Function:
        return lambda x: written(x @ UP @ x.mT / 3, x if tied else x @ DOWN)

    for tied in (False, True):
        agree(attend(DIVIDED[name], tied), attend(lambda s, v: s.softmax(-1) @ v, tied), recipe)
    three = (lambda x: DIVIDED[name](x @ UP @ x.mT / 3, (x @ UP) * (x @ DOWN)),
             lambda x: (x @ UP @ x.mT / 3).softmax(-1) @ ((x @ UP) * (x @ DOWN)))  # fmt: skip
    agree(*three, recipe)


ROWS = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.5], dtype=torch.float64)[:, None]
MASKED: dict[str, tuple[Function, Function]] = {
    "softplus": (lambda x: torch.log1p(torch.exp(x * ROWS)), lambda x: F.softplus(x * ROWS)),
    "sigmoid": (lambda x: 1 / (1 + torch.exp(-x * ROWS)), lambda x: torch.sigmoid(x * ROWS)),
    "in place": (lambda x: 1 / (1 + torch.exp(-x.clone().mul_(ROWS))), lambda x: torch.sigmoid(x * ROWS)),
    "transposed": (lambda x: (1 / (1 + torch.exp(-x.mT * ROWS.mT))).mT, lambda x: torch.sigmoid(x * ROWS)),
    "of a relu": (
        lambda x: torch.sigmoid(F.relu(x) * ROWS),
        lambda x: torch.where(ROWS > 0, torch.sigmoid(F.relu(x) * ROWS.clamp(min=1e-9)), 0.5),
    ),
    "a shift": (
        lambda x: torch.sigmoid(x * ROWS + 1),
        lambda x: torch.where(ROWS > 0, torch.sigmoid(x * ROWS.clamp(min=1e-9) + 1), torch.ones_like(x).sigmoid()),
    ),
    "an angle": (
        lambda x: torch.cos(torch.tanh(x).acos() * ROWS),
        lambda x: torch.where(ROWS > 0, torch.cos(torch.tanh(x).acos() * ROWS.clamp(min=1e-9)), 1.0),
    ),
    "an angle of what was moved": (
        lambda x: torch.cos(torch.tanh(x).mT.acos() * ROWS.mT).mT,
        lambda x: torch.where(ROWS > 0, torch.cos(torch.tanh(x).acos() * ROWS.clamp(min=1e-9)), 1.0),
    ),
    "numbers": (
        lambda x: torch.stack([torch.cos(x[:, i].tanh() * k) for i, k in enumerate(ROWS[:, 0].tolist())], 1),
        lambda x: torch.where(ROWS > 0, torch.cos(x.tanh() * ROWS.clamp(min=1e-9)), 1.0),
    ),
    "tensors of one number": (
        lambda x: torch.stack([torch.cos(x[:, i].tanh() * k) for i, k in enumerate(ROWS[:, 0])], 1),
        lambda x: torch.where(ROWS > 0, torch.cos(x.tanh() * ROWS.clamp(min=1e-9)), 1.0),
    ),
}  # fmt: skip


@every_family
@pytest.mark.parametrize("name", MASKED)
def test_a_function_of_what_was_masked_is_a_number_there(name: str, recipe: Recipe) -> None:
    written, built_in = MASKED[name]
    agree(inside(written), inside(built_in), recipe)
    assert not relevance(inside(written), recipe)[1][:, [1, 3]].any()


@every_family
@pytest.mark.parametrize("written", ["@", "einsum"])
def test_attention_whose_values_are_a_weight(written: str, recipe: Recipe) -> None:
    def attend(e: Tensor) -> Tensor:
        return e @ UP if written == "@" else torch.einsum("bts,sd->btd", e, UP)

    def divided(x: Tensor) -> Tensor:
        e = (x @ UP).exp()
        return attend(e) / e.sum(-1, keepdim=True) + x

    agree(divided, lambda x: attend((x @ UP).softmax(-1)) + x, recipe)


def token_by_token(k: Tensor, v: Tensor) -> Tensor:
    """The mean of all tokens so far, weighted by ``exp(k)``."""
    above, below, found = torch.zeros_like(v[:, 0]), torch.zeros_like(k[:, 0]), []
    for i in range(k.shape[1]):
        e = k[:, i].exp()
        above, below = above + e * v[:, i], below + e
        found.append(above / below)
    return torch.stack(found, 1)


@every_family
def test_the_first_of_a_mean_token_by_token_is_over_one_token(recipe: Recipe) -> None:
    def by_softmax(k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([(k[:, :i].softmax(1) * v[:, :i]).sum(1) for i in range(1, 6)], 1)

    agree(lambda x: token_by_token(x @ UP / 3, x @ DOWN), lambda x: by_softmax(x @ UP / 3, x @ DOWN), recipe)


KEPT = noise(5, 8, seed=12) > -0.5
CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()


def shared(w: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """What a router makes of the experts that it has chosen."""
    return (w[..., None] * values[..., None, :]).mul(places[..., None] + 1.0).sum(-2)


def in_their_place(p: Tensor, values: Tensor) -> Tensor:
    w, places = p.topk(3)
    w /= w.sum(-1, keepdim=True)
    return shared(w, places, values)


@pytest.mark.parametrize("observe", [(), ("*",)], ids=["nothing", "everything"])
@every_family
def test_what_a_layer_makes_twice_is_one_whether_anything_keeps_it(recipe: Recipe, observe: tuple[str, ...]) -> None:
    """Before it meets another factor, and with a number that was added before the function."""

    class Gated(nn.Module):
        def __init__(self, *, twice: bool) -> None:
            super().__init__()
            self.twice = twice
            self.gate, self.up = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
            randomise(self, 0)

        def forward(self, x: Tensor) -> Tensor:
            if self.twice:
                return self.gate(x) * F.relu6(self.gate(x) + 3) / 6 * self.up(x)
            h = self.gate(x)
            return h * F.relu6(h + 3) / 6 * self.up(x)

    found = []
    for twice in (False, True):
        model = Gated(twice=twice)
        with propagate(model, recipe, observe=observe) as trace:
            trace.explain((model(X) * WEIGHTS).sum())
        found.append(trace.source_relevance(trace.sources[0]))
    near(*found)


def over(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What is shared by the chosen over their sum, however that is written."""
    return lambda p, v: (lambda w, at: shared(w / total(w), at, v))(*p.topk(3))


def by(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The same, however they are chosen."""

    def chosen(p: Tensor, v: Tensor) -> Tensor:
        at = p.topk(3).indices
        w = choose(p, at)
        return shared(w / w.sum(-1, keepdim=True), at, v)

    return chosen


def ones_for_zeros(x: Tensor) -> Tensor:
    x[x == 0] = 1.0
    return x


def chosen_of(p: Tensor, at: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, at, True)


def in_order(w: Tensor, at: Tensor) -> Tensor:
    """What was chosen in the order of the places, in that of ``at``."""
    return w.gather(-1, at.argsort(-1).argsort(-1))


CHOSEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "topk": lambda p, v: (lambda w, at: shared(w / w.sum(-1, keepdim=True), at, v))(*p.topk(3, -1)),
    "in place": in_their_place,
    "gather": lambda p, v: (
        lambda at: (lambda w: shared(w / (w.sum(dim=2, keepdim=True) + 1e-20), at, v))(p.gather(-1, at))
    )(p.topk(3).indices),
    "a scale": lambda p, v: (lambda p: (lambda w, at: shared(w / w.sum(-1, keepdim=True), at, v))(*p.topk(3, -1)))(
        2 * p
    ),
    "a bound": lambda p, v: (lambda w, at: shared(w / w.sum(-1, keepdim=True).clamp(min=1e-9), at, v))(*p.topk(3)),
    "a 1-norm": lambda p, v: (lambda w, at: shared(w / torch.norm(w, p=1, dim=-1, keepdim=True), at, v))(*p.topk(3)),
    "normalize": lambda p, v: (lambda w, at: shared(F.normalize(w, p=1, dim=-1), at, v))(*p.topk(3)),
    "a reciprocal": lambda p, v: (lambda w, at: shared(w * w.sum(-1, keepdim=True).reciprocal(), at, v))(*p.topk(3)),
    "one over": lambda p, v: (lambda w, at: shared(1 / w.sum(-1, keepdim=True) * w, at, v))(*p.topk(3)),
    "scattered": lambda p, v: (
        lambda w, at: (lambda w: shared((w / w.sum(-1, keepdim=True)).gather(-1, at), at, v))(
            torch.zeros_like(p).scatter(-1, at, w)
        )
    )(*p.topk(3)),
    "split": lambda p, v: (lambda w, at: shared(w / w.sum(-1, keepdim=True), at, v))(
        p.sort(-1, descending=True).values.split([3, 5], -1)[0], p.topk(3).indices
    ),
    "put together": lambda p, v: (
        lambda w, at: (lambda w: shared((w / w.sum(-1, keepdim=True))[..., :3], at, v))(
            torch.cat([w, torch.zeros_like(w)], -1)
        )
    )(*p.topk(3)),
    "written": lambda p, v: (
        lambda w, at: (lambda w: shared((w / w.sum(-1, keepdim=True)).gather(-1, at), at, v))(
            torch.zeros_like(p).scatter_(-1, at, w)
        )
    )(*p.topk(3)),
    "in rows": lambda p, v: (lambda w, at: shared((w / w.sum(-1, keepdim=True)).view(*p.shape[:-1], 3), at, v))(
        *(lambda w, at: (w[:, None].squeeze(1), at.view(*p.shape[:-1], 3)))(*p.view(-1, p.shape[-1]).topk(3))
    ),
    "where": over(lambda w: (n := w.sum(-1, keepdim=True)).where(n > 0, torch.ones_like(n))),
    "filled": over(lambda w: (n := w.sum(-1, keepdim=True)).masked_fill(n == 0, 1.0)),
    "written into": over(lambda w: ones_for_zeros(w.sum(-1, keepdim=True))),
    "no infinity": over(lambda w: w.sum(-1, keepdim=True).nan_to_num()),
    "einsum": over(lambda w: torch.einsum("btk->bt", w)[..., None]),
    "a column of ones": over(lambda w: w @ torch.ones(3, 1, dtype=w.dtype)),
    "no sign": over(lambda w: w.abs().sum(-1, keepdim=True)),
    "nansum": over(lambda w: w.nansum(-1, keepdim=True)),
    "repeated": over(lambda w: w.sum(-1, keepdim=True).repeat(1, 1, 3)),
    "masked again": over(lambda w: (w * torch.ones(3, dtype=w.dtype)).sum(-1, keepdim=True)),
    "twice": over(lambda w: w[..., None].sum(-1).sum(-1, keepdim=True)),
    "the last of the sums": over(lambda w: w.cumsum(-1)[..., -1:]),
    "by hand": over(lambda w: w[..., :1] + w[..., 1:2] + w[..., 2:]),
    "take_along_dim": by(lambda p, at: p.take_along_dim(at, -1)),
    "a boolean mask": by(lambda p, at: in_order(p[chosen_of(p, at)].view(*at.shape), at)),
    "masked_select": by(lambda p, at: in_order(p.masked_select(chosen_of(p, at)).view(*at.shape), at)),
    "row by row": by(lambda p, at: torch.stack([torch.stack([p[b, t][at[b, t]] for t in range(5)]) for b in range(2)])),
    "one by one": lambda p, v: (
        lambda at: shared(
            torch.stack([torch.stack([(w := p[b, t, at[b, t]]) / w.sum() for t in range(5)]) for b in range(2)]), at, v
        )
    )(p.topk(3).indices),
    "one-hot rows": by(lambda p, at: (p[..., None, :] * F.one_hot(at, p.shape[-1])).sum(-1)),
    "transposed": by(lambda p, at: p.mT.gather(1, at.mT).mT),
    "along another dimension": lambda p, v: (
        lambda w, at: shared((w[..., None] / w[..., None].sum(-2, keepdim=True)).squeeze(-1), at, v)
    )(*p.topk(3)),
    "multiplied first": lambda p, v: (lambda w, at: shared(w, at, v) / w.sum(-1, keepdim=True))(*p.topk(3)),
    "multiplied first, one over": lambda p, v: (
        lambda w, at: shared(w, at, v) * (1 / (w.sum(-1)[..., None].expand(*w.shape[:-1], v.shape[-1]) + 1e-20))
    )(*p.topk(3)),
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP, LIBRAGRAD], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", CHOSEN)
def test_some_of_a_softmax_over_their_own_sum_are_the_softmax_of_what_was_chosen(name: str, recipe: Recipe) -> None:
    def by_softmax(s: Tensor, v: Tensor) -> Tensor:
        scores, places = s.topk(3)
        return shared(scores.softmax(-1), places, v)

    agree(lambda x: CHOSEN[name]((x @ UP).softmax(-1), x @ DOWN), lambda x: by_softmax(x @ UP, x @ DOWN), recipe)
    written = lambda s: (e := (s - s.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)  # noqa: E731
    agree(lambda x: CHOSEN[name](written(x @ UP), x @ DOWN), lambda x: by_softmax(x @ UP, x @ DOWN), recipe)


class Softmax(torch.autograd.Function):
    """A user's own, of torch's name."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        p = ctx.saved_tensors[0].softmax(-1)
        return p * (gradient - (p * gradient).sum(-1, keepdim=True))


def test_some_of_a_softmax_of_the_users_own_are_refused_by_name() -> None:
    def routed(x: Tensor) -> Tensor:
        p: Tensor = Softmax.apply(x @ UP)
        return p / p.sum(-1, keepdim=True) * (x @ DOWN)

    with pytest.raises(UnknownOperationError, match="Softmax"):
        relevance(routed, ATTNLRP)


@every_family
def test_some_of_a_softmax_that_is_masked(recipe: Recipe) -> None:
    def masked(x: Tensor) -> Tensor:
        p = (x @ UP).softmax(-1).masked_fill(~KEPT, 0.0)
        return p / p.sum(-1, keepdim=True) * (x @ DOWN)

    agree(masked, lambda x: (x @ UP).masked_fill(~KEPT, -math.inf).softmax(-1) * (x @ DOWN), recipe)


@every_family
@pytest.mark.parametrize("written", ["@", "einsum", "sum"])
def test_attention_that_is_masked_after_its_softmax(written: str, recipe: Recipe) -> None:
    """And divided by the sum of its weights after the product with the values."""

    def weighted(p: Tensor, v: Tensor) -> Tensor:
        if written == "sum":
            return (p[..., None] * v[:, None]).sum(-2)
        return p @ v if written == "@" else torch.einsum("bts,bsd->btd", p, v)

    def masked(x: Tensor) -> Tensor:
        p = (x @ UP @ x.mT / 3).softmax(-1) * CAUSAL
        return weighted(p, x @ DOWN) / p.sum(-1, keepdim=True)

    agree(masked, lambda x: (x @ UP @ x.mT / 3).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ (x @ DOWN), recipe)


GATE = noise(5, 8, seed=41)
WEIGHTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in chunks": lambda p, v, t: (p[..., :2] @ v[:, :2] + p[..., 2:] @ v[:, 2:]) / t,
    "in chunks, summed so": lambda p, v, t: (p[..., :2] @ v[:, :2] + p[..., 2:] @ v[:, 2:]) / (
        p[..., :2].sum(-1, keepdim=True) + p[..., 2:].sum(-1, keepdim=True) + 1e-200
    ),
    "scaled": lambda p, v, t: (p @ v) * GATE / t / GATE,
    "transposed": lambda p, v, t: ((p @ v).mT / p.sum(-1)[:, None]).mT,
    "the mean": lambda p, v, t: (p @ v / 5) * p.mean(-1, keepdim=True).reciprocal(),
}  # fmt: skip
OF_THREE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "first": lambda p, v, g: (p @ v) * g / p.sum(-1, keepdim=True),
    "in an einsum": lambda p, v, g: torch.einsum("bts,bsd,btd->btd", p, v, g) / p.sum(-1, keepdim=True),
}


@every_family
def test_sums_of_products_with_what_is_left_of_a_softmax_over_its_sum(recipe: Recipe) -> None:
    def scores(x: Tensor) -> Tensor:
        return x @ UP @ x.mT / 3

    def masked(x: Tensor) -> Tensor:
        return scores(x).softmax(-1) * CAUSAL

    def at_once(x: Tensor) -> Tensor:
        return scores(x).masked_fill(~CAUSAL, -math.inf).softmax(-1)

    for written in WEIGHTED.values():
        agree(
            lambda x, written=written: written(p := masked(x), x @ DOWN, p.sum(-1, keepdim=True)),
            lambda x: at_once(x) @ (x @ DOWN),
            recipe,
        )
    for written in OF_THREE.values():
        agree(
            lambda x, written=written: written(masked(x), x @ DOWN, x @ UP),
            lambda x: (at_once(x) @ (x @ DOWN)) * (x @ UP),
            recipe,
        )

    def layered(x: Tensor, p: Tensor, total: Tensor) -> Tensor:
        return F.linear(p @ (x @ DOWN), UP) / total * x

    agree(
        lambda x: layered(x, p := masked(x), p.sum(-1, keepdim=True)),
        lambda x: layered(x, p := at_once(x), torch.ones_like(p[..., :1])),
        recipe,
    )


SHARPENED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "a square": (lambda p: p**2, 2.0),
    "a square by the method": (torch.square, 2.0),
    "itself twice": (lambda p: p * p, 2.0),
    "a power": (lambda p: p.pow(1.5), 1.5),
    "a root": (torch.sqrt, 0.5),
    "twice": (lambda p: (3 * p**2) ** 2, 4.0),
}


@every_family
@pytest.mark.parametrize("name", SHARPENED)
def test_a_softmax_to_a_power_over_its_sum_is_the_softmax_of_so_much_of_the_scores(name: str, recipe: Recipe) -> None:
    function, power = SHARPENED[name]

    def sharpened(x: Tensor) -> Tensor:
        p = function((x @ UP).softmax(-1))
        return p / p.sum(-1, keepdim=True) * (x @ DOWN)

    def written_twice(x: Tensor) -> Tensor:
        p = (x @ UP).softmax(-1)
        return function(p) / function(p).sum(-1, keepdim=True) * (x @ DOWN)

    by_softmax = lambda x: (power * (x @ UP)).softmax(-1) * (x @ DOWN)  # noqa: E731
    agree(sharpened, by_softmax, recipe)
    agree(written_twice, by_softmax, recipe)


@every_family
def test_a_softmax_that_is_masked_and_squared_over_its_sum(recipe: Recipe) -> None:
    def sharpened(x: Tensor) -> Tensor:
        p = ((x @ UP).softmax(-1) * KEPT) ** 2
        return p / p.sum(-1, keepdim=True) * (x @ DOWN)

    agree(sharpened, lambda x: (2 * (x @ UP)).masked_fill(~KEPT, -math.inf).softmax(-1) * (x @ DOWN), recipe)


HALF: dict[str, Function] = {
    "something beside the product": lambda x: (lambda p: (p @ x + x) / p.sum(-1, keepdim=True))(
        (x @ UP @ x.mT).softmax(-1) * CAUSAL
    ),
    "a constant beside the product": lambda x: (lambda p: (p @ x + 1) / p.sum(-1, keepdim=True))(
        (x @ UP @ x.mT).softmax(-1) * CAUSAL
    ),
    "the weights squared": lambda x: (lambda p: (p**2 @ x) / p.sum(-1, keepdim=True))(
        (x @ UP @ x.mT).softmax(-1) * CAUSAL
    ),
    "the weights twice": lambda x: (lambda p: (p @ p @ x) / p.sum(-1, keepdim=True))(
        (x @ UP @ x.mT).softmax(-1) * CAUSAL
    ),
}


@pytest.mark.parametrize("name", HALF)
def test_what_is_no_softmax_of_the_masked_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownOperationError, match="of what some of a softmax are in, by their sum"):
        relevance(HALF[name], ATTNLRP)
    relevance(HALF[name], LRP)


def sinkhorn(p: Tensor) -> Tensor:
    for dim in (-2, -1) * 2:
        p = p / p.sum(dim, keepdim=True)
    return p


def sinkhorn_of_logarithms(s: Tensor) -> Tensor:
    for dim in (-2, -1) * 2:
        s = s - s.logsumexp(dim, keepdim=True)
    return s.exp()


ALONG: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "another dimension": (
        lambda p, v: (p / p.sum(1, keepdim=True)).mT @ v,
        lambda s, v: (s - s.logsumexp(1, keepdim=True)).exp().mT @ v,
    ),
    "another dimension, after the values": (
        lambda p, v: (p.mT @ v) / p.sum(1)[..., None],
        lambda s, v: (s - s.logsumexp(1, keepdim=True)).exp().mT @ v,
    ),
    "one and the other": (lambda p, v: sinkhorn(p).mT @ v, lambda s, v: sinkhorn_of_logarithms(s).mT @ v),
}


@pytest.mark.parametrize("name", ALONG)
def test_a_softmax_over_sums_along_other_dimensions_is_what_its_logarithms_are(name: str) -> None:
    of_softmax, of_logarithms = ALONG[name]
    agree(
        lambda x: of_softmax((x @ UP @ x.mT / 3).softmax(-1), x @ DOWN),
        lambda x: of_logarithms((x @ UP @ x.mT / 3).log_softmax(-1), x @ DOWN),
        ATTNLRP,
    )


@pytest.mark.parametrize("recipe", [ATTNLRP, LIBRAGRAD], ids=lambda recipe: recipe.name)
def test_some_of_a_softmax_over_their_sum_and_a_number_before_the_values_or_after(recipe: Recipe) -> None:
    def weights(x: Tensor) -> Tensor:
        return (x @ UP @ x.mT / 3).softmax(-1) * CAUSAL

    agree(
        lambda x: (lambda p: (p @ x) / (p.sum(-1, keepdim=True) + 0.5))(weights(x)),
        lambda x: (lambda p: (p / (p.sum(-1, keepdim=True) + 0.5)) @ x)(weights(x)),
        recipe,
    )


def test_two_attentions_that_are_put_together_by_their_normalisers() -> None:
    """They are a product of three in either way, where nothing is refused."""

    def by_softmax(x: Tensor) -> Tensor:
        s, v = x @ UP @ x.mT / 3, x @ DOWN
        one, other = (s[..., keys].logsumexp(-1, keepdim=True) for keys in (slice(2), slice(2, None)))
        a, b = torch.cat([one, other], -1).softmax(-1).split(1, -1)
        return a * (s[..., :2].softmax(-1) @ v[:, :2]) + b * (s[..., 2:].softmax(-1) @ v[:, 2:])

    agree(lambda x: merged(x @ UP @ x.mT / 3, x @ DOWN), by_softmax, replace(ATTNLRP, strict=False))


WRITTEN_SIGMOIDS: dict[str, Function] = {
    "over": lambda z: 1 / (1 + (-z).exp()),
    "a reciprocal": lambda z: (1 + (-z).exp()).reciprocal(),
    "a power": lambda z: (1 + (-z).exp()) ** -1,
    "exp over": lambda z: z.exp() / (1 + z.exp()),
    "tanh": lambda z: 0.5 * (1 + torch.tanh(z / 2)),
    "stable": lambda z: (lambda e: torch.where(z >= 0, 1 / (1 + e), e / (1 + e)))((-z.abs()).exp()),
    "bounded": lambda z: z.sigmoid().clamp(1e-3, 1 - 1e-3),
    "another": lambda z: 0.5 * (1 + torch.erf(z)),
}


@pytest.mark.parametrize("recipe", [ATTNLRP, LIBRAGRAD, GIM], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", WRITTEN_SIGMOIDS)
def test_attentions_that_are_put_together_by_a_sigmoid_however_it_is_written_are_refused(
    name: str, recipe: Recipe
) -> None:
    def blocks(x: Tensor) -> Tensor:
        s, v = x @ UP @ x.mT / 3, x @ DOWN
        one, other = (s[..., keys].softmax(-1) @ v[:, keys] for keys in (slice(2), slice(2, None)))
        a, b = (s[..., keys].logsumexp(-1, keepdim=True) for keys in (slice(2), slice(2, None)))
        return one - WRITTEN_SIGMOIDS[name](b - a) * (one - other)

    with pytest.raises(UnknownOperationError, match=r"run attention at once|torch\.softmax"):
        relevance(blocks, recipe)
    relevance(blocks, LRP)


LASER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda p, v: p @ v.exp(),
    "einsum": lambda p, v: torch.einsum("bij,bjd->bid", p, v.exp()),
    "less the largest": lambda p, v: p @ (v - v.amax(1, keepdim=True)).exp(),
    "fused": lambda p, v: F.scaled_dot_product_attention(p, p, v.exp()),
}


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GIM, LIBRAGRAD], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", LASER)
def test_attention_in_the_space_of_exponentials_is_refused(name: str, recipe: Recipe) -> None:
    """LASER attention (Duvvuri and Dhillon 2024), whose logarithm was held constant, as a softmax's normaliser is."""
    with pytest.raises(UnknownOperationError, match="log of"):
        relevance(lambda x: x + LASER[name]((x @ UP @ x.mT / 3).softmax(-1), x @ DOWN).log(), recipe)


WEIGHED: dict[str, Function] = {
    "times": lambda s: (lambda e: e / e.sum(-1, keepdim=True))(s.exp() * BESIDE.exp()),
    "over": lambda s: (lambda e: e / e.sum(-1, keepdim=True))(s.exp() / BESIDE.exp()),
    "in place": lambda s: (lambda e: e / e.sum(-1, keepdim=True))(s.exp().mul_(BESIDE.exp())),
    "a sink": lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + BESIDE[0, 0].exp()))(s.exp()),
    "a sink of one number": lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 2))(s.exp()),
}
BESIDE = noise(5, 5, seed=31)


@pytest.mark.parametrize("name", WEIGHED)
def test_exponentials_beside_other_constants_have_no_temperature(name: str) -> None:
    spelled = attention(WEIGHED[name])
    with pytest.raises(MethodError, match="add the logarithms of these to the scores"):
        relevance(spelled, GIM)
    relevance(spelled, LIBRAGRAD)
    for masked in (
        lambda s: (lambda e: e / e.sum(-1, keepdim=True))(s.exp() * (BESIDE > -1)),
        lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-9))(s.exp().masked_fill(BESIDE <= -1, 0.0)),
    ):
        agree(attention(masked), attention(lambda s: s.masked_fill(BESIDE <= -1, -math.inf).softmax(-1)), GIM)


@pytest.mark.parametrize("recipe", [GIM, LIBRAGRAD], ids=lambda recipe: recipe.name)
def test_a_logsumexp_of_logsumexps_is_refused_where_softmaxes_have_a_rule(recipe: Recipe) -> None:
    def chain(x: Tensor) -> Tensor:
        return torch.logaddexp(torch.logaddexp(x[:, 0], x[:, 1]), x[:, 2])

    def again(x: Tensor) -> Tensor:
        return torch.stack([x[:, :2].logsumexp(1), x[:, 2]]).logsumexp(0)

    for function in (chain, again):
        with pytest.raises(UnknownOperationError, match="that of all at once"):
            relevance(lambda x, of=function: of(x @ UP)[:, None].expand(X.shape), recipe)
        agree(
            lambda x, of=function: of(x @ UP)[:, None].expand(X.shape),
            lambda x: (x @ UP)[:, :3].logsumexp(1, keepdim=True).expand(X.shape),
            ATTNLRP,
        )


SQUARES: dict[str, Function] = {
    "einsum": lambda x: torch.einsum("btd,btd->btd", x, x),
    "a sum": lambda x: torch.einsum("btd,btd->bt", x, x)[..., None].expand(x.shape),
    "addcmul": lambda x: torch.addcmul(x, x, x) - x,
    "to zeros": lambda x: torch.addcmul(torch.zeros_like(x), x, x),
}


@pytest.mark.parametrize(
    "recipe", [GIM, replace(LRP, activation=rules.unmodified), ATTNLRP, LRP], ids="gim plain attnlrp lrp".split()
)
@pytest.mark.parametrize("name", SQUARES)
def test_a_square_is_one_however_it_is_written(name: str, recipe: Recipe) -> None:
    def square(x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).expand(x.shape) if name == "a sum" else x.square()

    agree(inside(SQUARES[name]), inside(square), recipe)
    agree(lambda x: SQUARES[name](x @ UP) * (x @ DOWN), lambda x: square(x @ UP) * (x @ DOWN), recipe)


UNKNOWN: dict[str, Function] = {
    "a layer before the division": lambda x: (lambda e: F.linear(e @ (x @ DOWN), UP) / e.sum(-1, keepdim=True))(
        (x @ UP @ x.mT / 3).exp()
    ),
    **{
        f"{name} before the division": lambda x, layer=layer: (
            lambda e: layer(e @ (x @ DOWN)) / e.sum(-1, keepdim=True)
        )((x @ UP @ x.mT / 3).exp())
        for name, layer in {
            "a layer with a bias": lambda y: F.linear(y, UP, UP[:, 0]),
            "a convolution": lambda y: F.conv1d(y.mT, UP[..., None]).mT,
            "a sparse layer": lambda y: torch.sparse.mm(UP.to_sparse(), y.flatten(0, 1).T).T.unflatten(0, y.shape[:2]),
            "a Fourier transform": lambda y: torch.fft.fft(y, dim=-1).real,
        }.items()
    },
    "of three factors": lambda x: (lambda e: (e @ (x @ DOWN)) * (x @ UP) / e.sum(-1, keepdim=True))(
        (x @ UP @ x.mT / 3).exp()
    ),
    "values of one factor and of two": lambda x: (
        lambda e: (e[..., :2] @ (x @ DOWN)[:, :2] + e[..., 2:] @ ((x @ UP) * x)[:, 2:]) / e.sum(-1, keepdim=True)
    )((x @ UP @ x.mT / 3).exp()),
    "scores that were changed": lambda x: (
        lambda s: (lambda e: s.add_(1)[..., :1] * 0 + e / e.sum(-1, keepdim=True) @ x)(s.exp())
    )(x @ UP @ x.mT / 3),
    "a logarithm that was put together": lambda x: (
        lambda s: (s - torch.cat([s.logsumexp(-1, keepdim=True)] * 2, -1)[..., :1]).exp() @ x
    )(x @ UP @ x.mT / 3),
}


LOGARITHMIC: dict[str, Function] = {
    "a product": lambda x: ((x @ UP).abs().log() + (x @ DOWN).abs().log()).exp(),
    "cumprod": lambda x: F.softplus(x @ UP).log().cumsum(1).exp(),
    "a scan": lambda x: ((x @ UP).cumsum(1) + (x @ DOWN - (x @ UP).cumsum(1)).logcumsumexp(1)).exp(),
    "a scan that is written out": lambda x: (x @ UP + (x @ DOWN).exp().cumsum(1).log()).exp(),
}
"""Gated recurrences in the space of logarithms (Heinsen 2023; Feng et al. 2024)."""


@every_family
@pytest.mark.parametrize("name", LOGARITHMIC)
def test_what_is_computed_by_logarithms_is_refused_by_name(name: str, recipe: Recipe) -> None:
    with pytest.raises(UnknownOperationError, match="exp of a sum that logarithms are in"):
        relevance(LOGARITHMIC[name], recipe)
    with (
        pytest.raises(UnknownOperationError, match="exp of a sum that logarithms are in"),
        propagate(model := Model(LOGARITHMIC[name]), recipe, ledger=True) as trace,
    ):
        trace.explain(model(X).flatten()[0])
    plain = replace(recipe, activation=rules.unmodified)  # the gradients of a logarithm and of exp cancel
    relevance(LOGARITHMIC[name], plain)
    agree(lambda x: LOGARITHMIC[name](x) * x, lambda x: LOGARITHMIC[name](x).detach() * x, recipe)  # a scale
    agree(lambda x: (x @ UP).abs().log().exp() + 1, lambda x: (x @ UP).abs() + 1, recipe)  # a function of one tensor


@every_family
def test_the_zeros_that_a_recurrence_begins_with_are_nothing_of_its_decays(recipe: Recipe) -> None:
    def state(decay: Function) -> Function:
        def function(x: Tensor) -> Tensor:
            decays, y = decay(x @ UP), x @ DOWN
            states = [torch.zeros_like(y[:, 0])]
            for t in range(x.shape[1]):
                states.append(states[-1] * decays[:, t].exp() + y[:, t])
            return torch.stack(states[1:], 1) * x

        return function

    for decay in (lambda a: torch.log(a.sigmoid()), lambda a: -torch.log(1 + torch.exp(-a))):
        agree(state(decay), state(F.logsigmoid), recipe)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_softmax_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownOperationError, match=r"softmax|divi"):
        relevance(UNKNOWN[name], ATTNLRP)
    relevance(UNKNOWN[name], LRP)  # where it is constant


@every_family
def test_values_beside_constants_are_divided_one_by_one(recipe: Recipe) -> None:
    """Values have another share than constants; a learned position of each key is one (Shaw et al. 2018)."""
    places = noise(5, 5, 8, seed=21)

    def weighted(x: Tensor, divided: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        e = (x @ UP @ x.mT / 3).exp()
        return divided(e @ (x @ DOWN), torch.einsum("bij,ijd->bid", e, places), e.sum(-1, keepdim=True))

    def by_softmax(x: Tensor) -> Tensor:
        p = (x @ UP @ x.mT / 3).softmax(-1)
        return p @ (x @ DOWN) + torch.einsum("bij,ijd->bid", p, places)

    agree(lambda x: weighted(x, lambda one, other, total: one / total + other / total), by_softmax, recipe)
    with pytest.raises(UnknownOperationError, match="division, of what exponentials are in"):
        relevance(lambda x: weighted(x, lambda one, other, total: (one + other) / total), recipe)


@every_family
def test_scores_that_are_the_values_are_pooled(recipe: Recipe) -> None:
    """SoftPool's way to write it (Stergiou et al. 2021)."""

    def soft_pool(x: Tensor) -> Tensor:
        e = torch.exp(x)
        return F.avg_pool1d(x.mul(e), 2).mul_(2).div_(F.avg_pool1d(e, 2).mul_(2))

    def by_softmax(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (4, 2))
        return (x.softmax(-1) * x).sum(-1)

    agree(lambda x: soft_pool(x @ UP) @ UP[:4], lambda x: by_softmax(x @ UP) @ UP[:4], recipe)


@every_family
@pytest.mark.parametrize("sharpness", [2.0, -1.0])
def test_smooth_maxima_and_minima_are_weighted_means(sharpness: float, recipe: Recipe) -> None:
    """And so they are of what is masked."""

    def pooled(e: Tensor, x: Tensor) -> Tensor:
        return (x * e).sum(1, keepdim=True) / e.sum(1, keepdim=True) + 0 * x

    def by_softmax(s: Tensor, x: Tensor) -> Tensor:
        return (s.softmax(1) * x).sum(1, keepdim=True) + 0 * x

    seen = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[:, None]
    agree(lambda x: pooled((sharpness * x).exp(), x), lambda x: by_softmax(sharpness * x, x), recipe)
    agree(
        lambda x: pooled((sharpness * x).exp() * seen, x),
        lambda x: by_softmax((sharpness * x).masked_fill(seen == 0, -math.inf), x),
        recipe,
    )


@every_family
def test_attention_by_blocks_whose_state_begins_with_zeros(recipe: Recipe) -> None:
    """As FlashAttention's does, and RWKV's."""

    def by_blocks(x: Tensor) -> Tensor:
        q, k, v = x @ UP, x @ UP.mT, x @ DOWN
        out, total = torch.zeros_like(v), torch.zeros_like(v[..., :1])
        largest = torch.full_like(total, -math.inf)
        for block in (slice(2), slice(2, 4), slice(4, None)):
            s = q @ k[:, block].mT / 9
            new = torch.maximum(largest, s.amax(-1, keepdim=True))
            e, decay = (s - new).exp(), (largest - new).exp()
            out, total, largest = out * decay + e @ v[:, block], total * decay + e.sum(-1, keepdim=True), new
        return out / total

    agree(by_blocks, lambda x: ((x @ UP) @ (x @ UP.mT).mT / 9).softmax(-1) @ (x @ DOWN), recipe)


def test_what_is_divided_by_no_sum_of_its_exponentials_is_no_softmax() -> None:
    decayed = relevance(lambda x: torch.exp((x @ UP) / 9) * (x @ DOWN) / torch.exp((x @ DOWN) / 9), ATTNLRP)[1]
    wanted = relevance(
        lambda x: torch.exp((x @ UP) / 9).detach() * (x @ DOWN) / torch.exp((x @ DOWN) / 9).detach(), ATTNLRP
    )[1]
    near(decayed, wanted)


def test_queries_and_keys_get_nothing_of_a_softmax_that_is_constant() -> None:
    class Attention(nn.Module):
        def forward(self, queries: Tensor, values: Tensor) -> Tensor:
            return by_formula(queries @ UP) @ values

    model = Attention()
    with propagate(model, LRP, observe=()) as trace:
        trace.explain((model(X, noise(2, 8, 8)) * WEIGHTS).sum())
    queries, values = map(trace.source_relevance, trace.sources)
    assert not queries.any()
    assert values.any()


@pytest.mark.parametrize("recipe", [LRP, replace(LRP, linear=Gamma(0.3))], ids=["lrp", "beside a rule for layers"])
def test_a_softmax_by_its_logsumexp_is_constant_where_a_softmax_is(recipe: Recipe) -> None:
    agree(
        lambda x: ((h := x @ UP) - torch.logsumexp(h, -1, keepdim=True)).exp() + h,
        lambda x: (h := x @ UP).softmax(-1) + h,
        recipe,
    )


def test_a_weight_among_what_sums_of_exponentials_are_made_of_is_a_constant() -> None:
    class Chain(nn.Module):
        """The sum over all paths of a conditional random field, with weights that are trained."""

        def __init__(self) -> None:
            super().__init__()
            self.emit, self.moves = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            first, *rest = self.emit(x).unbind(1)
            for each in rest:
                first = torch.log(torch.exp(first[:, :, None] + self.moves).sum(1)) + each
            return first.logsumexp(-1)

    torch.manual_seed(0)
    model, x, found = Chain().double(), torch.randn(1, 4, 4).double(), []
    for is_trained in (True, False):
        with propagate(model.requires_grad_(is_trained), ATTNLRP) as trace:
            trace.explain(model(x)[0])
        found.append(trace.relevance("x"))
    torch.testing.assert_close(*found)


def test_what_a_model_returns_can_be_saved_and_copied(tmp_path: Path) -> None:
    for function in (
        lambda x: 30 * torch.tanh(x / 30),
        torch.exp,
        lambda x: x.log_softmax(-1),
        lambda x: x.logsumexp(-1),
    ):
        model = Model(function)
        with propagate(model, ATTNLRP) as trace:
            y = model(X)
            torch.save(y, tmp_path / "y.pt")
            loaded = torch.load(tmp_path / "y.pt")
            copied = copy.deepcopy({"y": y.detach()})["y"]
            trace.explain(y.flatten()[0])
        assert torch.equal(loaded, y)
        assert torch.equal(copied, y)
        with propagate(model, ATTNLRP) as trace:
            trace.explain(model(loaded).flatten()[0])


# ------------------------------------------------------------------------- what is no such function


@every_family
def test_a_gated_product_stays_a_product(recipe: Recipe) -> None:
    def gated(act: Function) -> Function:
        return lambda x: act(x @ UP) * (x @ DOWN)

    agree(gated(lambda x: x * torch.sigmoid(x)), gated(F.silu), recipe)
    halved = relevance(gated(F.silu), ATTNLRP)[1]
    one = relevance(lambda x: F.silu(x @ UP) * (x @ DOWN).detach(), ATTNLRP)[1]
    other = relevance(lambda x: F.silu(x @ UP).detach() * (x @ DOWN), ATTNLRP)[1]
    near(halved, (one + other) / 2)


CLAMPED: dict[str, tuple[Function, Function]] = {
    "a signal": (
        lambda x: F.silu(x @ UP) * (x @ DOWN).clamp(-1, 1),
        lambda x: F.silu(x @ UP).detach() * (x @ DOWN).clamp(-1, 1),
    ),
    "a signal in place": (
        lambda x: F.silu(x @ UP) * (x @ DOWN).clamp_(max=1),
        lambda x: F.silu(x @ UP).detach() * (x @ DOWN).clamp(max=1),
    ),
    "a gate": (
        lambda x: torch.sigmoid(x @ UP).clamp(0.1, 0.9) * torch.tanh(x @ DOWN),
        lambda x: torch.sigmoid(x @ UP).clamp(0.1, 0.9).detach() * torch.tanh(x @ DOWN),
    ),
    "relu": (lambda x: (x @ UP).clamp(min=0) * (x @ DOWN), lambda x: F.relu(x @ UP) * (x @ DOWN)),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_a_clamp_makes_no_gate_and_leaves_one(name: str) -> None:
    one, other = CLAMPED[name]
    agree(one, other, LRP)


@every_family
def test_norms_written_out_stay_norms(recipe: Recipe) -> None:
    built_in = inside(lambda x: F.rms_norm(x, (8,), None, 1e-5))
    for norm in (
        lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(),
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5),
        lambda x: x * (1 / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)),
        lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** -0.5,
    ):
        agree(inside(norm), built_in, recipe)


@every_family
def test_a_tensor_that_was_changed_in_place_is_another(recipe: Recipe) -> None:
    def changed_root(x: Tensor) -> Tensor:
        h = x @ UP
        gate = torch.sigmoid(h)
        h.add_(x @ DOWN)
        return h * gate

    def changed_function(x: Tensor) -> Tensor:
        h = x @ UP
        gate = torch.sigmoid(h)
        gate += x @ DOWN
        return h * gate

    def copied(x: Tensor) -> Tensor:
        h = x @ UP
        doubled = 2 * h
        doubled.copy_(x @ DOWN)
        return (h + 0).mul_(doubled)

    wanted: list[Function] = [
        lambda x: (x @ UP + x @ DOWN) * torch.sigmoid(x @ UP),
        lambda x: (x @ UP) * (torch.sigmoid(x @ UP) + x @ DOWN),
        lambda x: (x @ UP) * (x @ DOWN),
    ]
    for function, other in zip((changed_root, changed_function, copied), wanted, strict=True):
        agree(function, other, recipe)


CHAINS: dict[str, Function] = {
    "hard sigmoid": lambda x: F.relu6(x + 3) / 6,
    "relu": lambda x: torch.relu(x + 1),
    "silu": lambda x: F.silu(x - 1),
    "a power": lambda x: (x + 1) ** 2,
    "a root": lambda x: (x.square() + 1).sqrt(),
    "what is left of tanh": lambda x: (1 - torch.tanh(x)) ** 2,
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "sigmoid": lambda x: (1 + torch.exp(-x)).reciprocal(),
    "a function of a flat one": lambda x: torch.sigmoid(torch.relu(x)),
    "a cosine of one": lambda x: torch.cos(x.clamp(min=0)),
}


@every_family
@pytest.mark.parametrize("name", CHAINS)
def test_it_is_no_matter_whether_the_model_keeps_what_a_function_is_of(name: str, recipe: Recipe) -> None:
    function, kept = CHAINS[name], list[Tensor]()

    def keeping(x: Tensor) -> Tensor:
        kept.append(x @ UP)
        return function(kept[-1]) @ DOWN

    spelled: Function = {  # each temporary is gone with the line, as no argument is
        "hard sigmoid": lambda x: F.relu6(x @ UP + 3) / 6,
        "relu": lambda x: torch.relu(x @ UP + 1),
        "silu": lambda x: F.silu(x @ UP - 1),
        "a power": lambda x: (x @ UP + 1) ** 2,
        "a root": lambda x: ((x @ UP).square() + 1).sqrt(),
        "what is left of tanh": lambda x: (1 - torch.tanh(x @ UP)) ** 2,
        "softplus": lambda x: torch.log(1 + torch.exp(x @ UP)),
        "sigmoid": lambda x: (1 + torch.exp(-(x @ UP))).reciprocal(),
        "a function of a flat one": lambda x: torch.sigmoid(torch.relu(x @ UP)),
        "a cosine of one": lambda x: torch.cos((x @ UP).clamp(min=0)),
    }[name]
    agree(lambda x: spelled(x) @ DOWN, keeping, recipe)


IN_PLACE: dict[str, tuple[Function, Function]] = {
    "hard sigmoid": (lambda x: x.add_(3).clamp_(0, 6).div_(6), lambda x: (x + 3).clamp(0, 6) / 6),
    "relu6": (lambda x: F.relu6(x.add_(3), inplace=True), lambda x: F.relu6(x + 3)),
    "relu": (lambda x: F.relu(x.sub_(1), inplace=True), lambda x: F.relu(x - 1)),
    "sigmoid": (lambda x: x.neg_().exp_().add_(1).reciprocal_(), lambda x: (1 + torch.exp(-x)).reciprocal()),
    "softplus": (lambda x: x.exp_().add_(1).log_(), lambda x: torch.log(1 + torch.exp(x))),
    "a number and a scale": (lambda x: x.mul_(-1).add_(1).tanh_(), lambda x: torch.tanh(1 - x)),
    "a power": (lambda x: x.add_(0.5).pow_(2), lambda x: (x + 0.5) ** 2),
    "a function of a flat one": (lambda x: x.clamp_(min=0).cos_(), lambda x: x.clamp(min=0).cos()),
}


@every_family
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_function_that_is_computed_in_place(name: str, recipe: Recipe) -> None:
    changing, plain = IN_PLACE[name]
    agree(inside(changing), inside(plain), recipe)
    agree(lambda x: changing((x @ UP)[..., :4]) @ DOWN[:4], lambda x: plain((x @ UP)[..., :4]) @ DOWN[:4], recipe)


BY_KEYWORD: dict[str, tuple[Function, Function]] = {
    "a number": (lambda h: F.relu6(torch.add(input=h, other=3)), lambda h: F.relu6(h + 3)),
    "a number times": (lambda h: F.silu(torch.sub(h, 1, alpha=2)), lambda h: F.silu(h - 2)),
    "and in place": (lambda h: F.relu6(h.clone().add_(1, alpha=3)), lambda h: F.relu6(h + 3)),
    "a sum": (lambda h: torch.add(h, torch.tanh(h), alpha=0.5) * h, lambda h: (h + 0.5 * torch.tanh(h)) * h),
    "twice the same": (lambda h: (h + h) * torch.tanh(h), lambda h: (2 * h) * torch.tanh(h)),
    "pieces": (lambda h: torch.where(condition=h > 0, input=h, other=torch.exp(h) - 1), F.elu),
}


@every_family
@pytest.mark.parametrize("name", BY_KEYWORD)
def test_a_sum_by_keyword_is_that_sum(name: str, recipe: Recipe) -> None:
    spelled, plain = BY_KEYWORD[name]
    agree(
        lambda x: spelled(x @ UP) * (x @ UP.T) * (x @ DOWN), lambda x: plain(x @ UP) * (x @ UP.T) * (x @ DOWN), recipe
    )


@every_family
def test_gates_stay_gates_in_a_product_that_is_added(recipe: Recipe) -> None:
    gate = lambda x: torch.sigmoid(x @ UP)  # noqa: E731
    agree(
        lambda x: torch.baddbmm(gate(x), gate(x) @ gate(x).mT, gate(x)) * (x @ DOWN),
        lambda x: (gate(x) + (gate(x) @ gate(x).mT) @ gate(x)) * (x @ DOWN),
        recipe,
    )


@every_family
def test_what_is_turned_or_summed_is_no_element_wise_function(recipe: Recipe) -> None:
    def turned(x: Tensor) -> Tensor:
        h = x @ x.mT
        return torch.einsum("bij,bji->bij", h, h.sigmoid()) @ x

    agree(turned, lambda x: ((x @ x.mT) * (x @ x.mT).sigmoid().transpose(1, 2)) @ x, recipe)
    agree(lambda x: (h := x @ UP) * h.roll(1, -1), lambda x: (x @ UP) * (x @ UP).roll(1, -1), recipe)
    agree(
        lambda x: (h := x @ UP) * h.sum(-1, keepdim=True), lambda x: (x @ UP) * (x @ UP).sum(-1, keepdim=True), recipe
    )


# --------------------------------------------------------------------------- many factors, and exp


def test_the_factors_of_a_product_share_alike_however_it_is_bracketed() -> None:
    a, b, c = (lambda x, w=w: x @ noise(8, 8, seed=w) for w in (4, 5, 6))
    products: list[Function] = [
        lambda x: (a(x) * b(x)) * c(x),
        lambda x: a(x) * (b(x) * c(x)),
        lambda x: torch.einsum("btd,btd,btd->btd", a(x), b(x), c(x)),
        lambda x: (a(x)[..., None] * b(x)[..., None] * 2).squeeze(-1) / 2 * c(x),
    ]
    (_, wanted), *others = (relevance(product, ATTNLRP) for product in products)
    for _, found in others:
        near(found, wanted)
    linear: list[Function] = [lambda x: (a(x) @ b(x).mT) @ c(x), lambda x: a(x) @ (b(x).mT @ c(x))]
    (_, wanted), (_, found) = (relevance(product, ATTNLRP) for product in linear)
    near(found, wanted)


def test_norms_are_as_many_factors_in_one_function_as_written_out() -> None:
    def of(norm: Function) -> Tensor:
        return relevance(lambda x: norm((x @ x.mT) @ (x @ UP)) * (x @ DOWN), ATTNLRP)[1]

    near(
        of(lambda h: F.rms_norm(h, (8,), eps=0.1)), of(lambda h: h * (h.square().mean(-1, keepdim=True) + 0.1).rsqrt())
    )
    near(
        of(lambda h: F.layer_norm(h, (8,), eps=0.1)),
        of(lambda h: (c := h - h.mean(-1, keepdim=True)) / (c.square().mean(-1, keepdim=True) + 0.1).sqrt()),
    )


@every_family
def test_what_divides_makes_something_new(recipe: Recipe) -> None:
    """``x / rms(x)`` is no function of ``x``, in whatever spelling, so that its product with one stays a product."""
    root = lambda h: (h.square().mean(-1, keepdim=True) + 0.1).sqrt()  # noqa: E731

    def of(norm: Function) -> Function:
        return inside(lambda h: (1 - torch.sigmoid(h)) * norm(h))

    for norm in (lambda h: h / root(h), lambda h: h * root(h).reciprocal(), lambda h: h * (root(h) ** 2).rsqrt()):
        agree(of(norm), of(lambda h: F.rms_norm(h, (8,), eps=0.1)), recipe)


@every_family
@pytest.mark.parametrize("place", range(3))
def test_an_exponential_in_fused_attention_takes_nothing(place: int, recipe: Recipe) -> None:
    def given(x: Tensor) -> list[Tensor]:
        qkv = [x @ UP, x @ DOWN, x @ UP.T]
        qkv[place] = torch.exp(qkv[place] / 9)
        return qkv

    def written(x: Tensor) -> Tensor:
        q, k, v = given(x)
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    agree(lambda x: F.scaled_dot_product_attention(*(each[:, None] for each in given(x)))[:, 0], written, recipe)


@pytest.mark.parametrize("square", [torch.square, lambda h: h * h, lambda h: h**2, lambda h: h.clone().square_()])
def test_a_square_of_a_product_is_one_factor(square: Function) -> None:
    def of(function: Function) -> Tensor:
        return relevance(lambda x: function((x @ x.mT) @ (x @ UP)) * (x @ DOWN), ATTNLRP)[1]

    near(of(square), of(lambda h: h.abs() ** 2.0000000000001))


@every_family
def test_an_einsum_of_many_shares_as_products_of_two(recipe: Recipe) -> None:
    """A state-space model in the four-factor spelling of its authors: the decays are exponentials, and take nothing."""

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        decays = torch.exp(-F.softplus(x @ noise(8, 5, seed=4)).cumsum(1))
        return x @ UP, (x @ DOWN) * (x @ UP.T), decays, x @ DOWN.T

    def at_once(x: Tensor) -> Tensor:
        return torch.einsum("bln,bsn,bls,bsp->blp", *parts(x)) * (x @ DOWN)

    def by_twos(x: Tensor) -> Tensor:
        c, b, decays, values = parts(x)
        return ((c @ b.mT) * decays) @ values * (x @ DOWN)

    agree(at_once, by_twos, recipe)


@every_family
def test_an_exponential_takes_nothing_of_a_product(recipe: Recipe) -> None:
    for function in (
        lambda x: torch.exp((x @ UP) / 9) * (x @ DOWN),
        lambda x: (x @ DOWN) * torch.exp2((x @ UP) / 9).float().double(),
        lambda x: torch.exp(-(x @ x.mT).square().cumsum(-1) / 999) @ (x @ DOWN),
    ):
        value, found = relevance(function, recipe)
        near(found.sum(), (value * WEIGHTS).sum())
    wanted = relevance(lambda x: torch.exp((x @ UP) / 9).detach() * (x @ DOWN), recipe)[1]
    near(relevance(lambda x: torch.exp((x @ UP) / 9) * (x @ DOWN), recipe)[1], wanted)
    value, found = relevance(inside(lambda x: torch.exp(x / 9)), recipe)  # no factor: it hands on what it gets
    near(found.sum(), (value * WEIGHTS).sum())


ANGLES = noise(2, 4, seed=21)


@every_family
def test_roots_are_kept_where_others_are_scaled_by_constants_in_between(recipe: Recipe) -> None:
    def scaled(x: Tensor) -> Tensor:
        return ((x @ UP).view(2, 5, 2, 4) * ANGLES + (x @ DOWN).view(2, 5, 2, 4) * ANGLES).reshape(2, 5, 8)

    def apart(x: Tensor) -> Tensor:
        gate = torch.relu(x @ UP.T)
        other = scaled(x)
        return torch.sigmoid(gate) + other

    agree(apart, lambda x: torch.sigmoid(torch.relu(x @ UP.T)) + scaled(x), recipe)


@every_family
def test_a_function_of_a_function_of_what_is_gone_is_refused(recipe: Recipe) -> None:
    def apart(x: Tensor) -> Tensor:
        gate = torch.relu(x @ UP.T)
        other = 0.5 * (x @ UP) * (0.5 * (x @ DOWN))
        return torch.sigmoid(gate) + other

    with pytest.raises(UnknownOperationError, match="what is gone"):
        relevance(apart, recipe)
