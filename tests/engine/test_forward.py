"""The forward value is the model's own on many architectures, relevance is finite, and CP-LRP conserves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx.engine import propagate
from lrpx.errors import UnknownOperationError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Recipe
from tests.engine.samples import SAMPLES, last_row, output_of
from tests.reference.models import zero_biases

if TYPE_CHECKING:
    from collections.abc import Callable

transformers.logging.set_verbosity_error()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RECIPES = {"lrp": LRP, "attnlrp": ATTNLRP}
NO_SDPA = {"gemma2", "bloom", "mamba", "deberta_v2"}
EAGER_TOO = {"llama", "gpt2", "bert", "t5", "falcon alibi", "vit", "whisper", "gemma3"}
BUILDS = [(name, "eager" if name in NO_SDPA else "sdpa") for name in SAMPLES] + [
    (n, "eager") for n in sorted(EAGER_TOO)
]
every_build = pytest.mark.parametrize(("name", "implementation"), BUILDS, ids=[" ".join(build) for build in BUILDS])


def build(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    experts = {"experts_implementation": "eager"} if name == "mixtral" and dtype == torch.float64 else {}
    model = SAMPLES[name].build(dtype, attn_implementation=implementation, **experts)
    return model.requires_grad_(False)


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_value_is_the_models_own(name: str, implementation: str, dtype: torch.dtype) -> None:
    model, batch = build(name, implementation, dtype), SAMPLES[name].batch(dtype)
    with torch.no_grad():
        want = output_of(model, batch)
    learned = [weight for path, weight in model.named_parameters() if "relative_attention_bias" in path]
    for recipe in RECIPES.values():
        with propagate(model, recipe) as trace:
            found = output_of(model, batch)
            trace.explain(last_row(found)[:, 1].float())
        assert found.dtype == want.dtype
        if learned and recipe is ATTNLRP:  # torch takes another kernel for a learned mask that needs its gradient
            for weight in learned:
                weight.requires_grad_(True)
            want = output_of(model, batch).detach()
        assert torch.equal(found, want)
        for source in trace.sources:
            assert torch.isfinite(trace.source_relevance(source)).all()
            assert trace.source_gradient(source).abs().sum() > 0 or "relative" in source.paths[0]


@every_build
def test_lrp_conserves_where_nothing_is_constant(name: str, implementation: str) -> None:
    model, batch = zero_biases(build(name, implementation)), SAMPLES[name].batch()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "position" in path or "cls_token" in path or "class_embedding" in path:
                parameter.zero_()
    with propagate(model, LRP, observe=()) as trace:
        value = trace.explain(last_row(output_of(model, {name: rows[:1] for name, rows in batch.items()}))[0, 1])
    found = sum(trace.source_relevance(source).sum() for source in trace.sources)
    torch.testing.assert_close(found.double(), value.double(), rtol=1e-5, atol=1e-6)


@every_build
def test_weights_that_need_gradients_change_nothing(name: str, implementation: str) -> None:
    batch, found = SAMPLES[name].batch(), []
    for needed in (True, False):
        model = build(name, implementation).requires_grad_(needed)
        with propagate(model, ATTNLRP, observe=()) as trace:
            trace.explain(last_row(output_of(model, batch))[:, 1])
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append([trace.source_relevance(source) for source in trace.sources])
    for free, frozen in zip(*found, strict=True):
        torch.testing.assert_close(free, frozen, rtol=1e-9, atol=1e-12)


def test_grouped_experts_are_the_experts_one_by_one() -> None:
    sample, found = SAMPLES["mixtral"], []
    for implementation in ("eager", "grouped_mm"):
        model, batch = sample.build(torch.float32, experts_implementation=implementation), sample.batch()
        with propagate(model, ATTNLRP) as trace:
            trace.explain(last_row(output_of(model, batch))[:, 1])
        found.append(trace.relevance("model.embed_tokens"))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- one function at a time


class Function(nn.Module):
    """Calls a function between linear layers."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, self.first(x), self.second(x))


FUNCTIONS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "2 ** x": lambda w, a, b: 2**a,
    "x ** tensor": lambda w, a, b: a.abs() ** torch.tensor([1.0, 2.0, 3.0, 2.0], dtype=a.dtype),
    "x ** x": lambda w, a, b: a.abs() ** b,
    "float_power": lambda w, a, b: torch.float_power(a, 2),
    "x ** -0.5": lambda w, a, b: b * a.abs() ** -0.5,
    "x * x": lambda w, a, b: a * a,
    "1 / x": lambda w, a, b: b * (1 / (a.abs() + 1)),
    "rsqrt(input=)": lambda w, a, b: b * torch.rsqrt(input=a.square() + 1),
    "std": lambda w, a, b: a / (a.std(-1, keepdim=True) + 1),
    "var_mean": lambda w, a, b: (a - torch.var_mean(a, -1, keepdim=True)[1]) * b,
    "var_mean as a factor": lambda w, a, b: a * torch.var_mean(a, -1, keepdim=True)[0],
    "glu": lambda w, a, b: F.glu(a),
    "relu inplace and its input": lambda w, a, b: F.relu(a, inplace=True) + a,
    "relu inplace by position": lambda w, a, b: F.relu(a, True) + a,
    "silu inplace and its input": lambda w, a, b: F.silu(a, inplace=True) + a,
    "hardtanh inplace": lambda w, a, b: F.hardtanh(a, -0.1, 0.1, True) + a,
    "sigmoid_": lambda w, a, b: a.sigmoid_() * b,
    "mul_": lambda w, a, b: a.mul_(b) + a,
    "mul_ by itself": lambda w, a, b: a.mul_(a),
    "*=": lambda w, a, b: a.__imul__(b),
    "/=": lambda w, a, b: a.__itruediv__(b.abs() + 1),
    "product +=": lambda w, a, b: (a * b).__iadd__(a),
    "scores masked in place": lambda w, a, b: (a @ b.mT).masked_fill_(torch.eye(3) > 0, -9.0).softmax(-1) @ b,
    "gelu then *=": lambda w, a, b: F.gelu(a).mul_(b),
    "addmm by name": lambda w, a, b: torch.addmm(w[:3], mat1=a, mat2=b.mT, beta=0.5, alpha=2),
    "baddbmm by name": lambda w, a, b: w[:3].expand(1, 3, 3).baddbmm(batch1=a[None], batch2=b.mT[None], alpha=2),
    "addcmul": lambda w, a, b: torch.addcmul(w, a, b, value=0.5),
    "addcmul with itself": lambda w, a, b: torch.addcmul(w, a, a),
    "einsum": lambda w, a, b: torch.einsum("ij,kj->ik", a, b),
    "softmax of weights": lambda w, a, b: a * w.softmax(0),
    "glu of weights": lambda w, a, b: a[:, :2] * F.glu(w, 0),
    "square of weights": lambda w, a, b: a * w.square(),
    "transposed weights": lambda w, a, b: a @ torch.outer(w, w).T,
    "group norm": lambda w, a, b: F.group_norm(a, 2, w),
    "normalize": lambda w, a, b: F.normalize(a),
}  # fmt: skip


def with_length(layer: nn.Linear) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.1)


def in_single_precision(layer: nn.Linear) -> None:
    layer.to(torch.float32).to(torch.float64)


def in_other_memory(layer: nn.Linear) -> None:
    layer.weight.set_(layer.weight.detach() / 2)


@pytest.mark.parametrize("changes", [with_length, in_single_precision, in_other_memory])
def test_a_model_that_sets_its_weights_is_explained_with_those(changes: Callable[[nn.Linear], None]) -> None:
    """A constraint on a weight's length, which layers keep in their forward pass: what was set was lost."""

    class Constrained(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            changes(self)
            return super().forward(x)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), Constrained(4, 3)).double().requires_grad_(False)

    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[None]
    for recipe in RECIPES.values():
        model = fresh()
        with propagate(model, recipe) as trace:
            found = model(x)
            trace.explain(found[:, 1])
        assert torch.equal(found, fresh()(x))


@pytest.mark.parametrize("to", [lambda y: y.data * 2, lambda y: y * 2])
def test_data_of_the_stream_that_is_set_is_refused(to: Callable[[Tensor], Tensor]) -> None:
    class Setting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.data = to(y)
            return y

    model = Setting(5, 3)
    with propagate(model, LRP), pytest.raises(UnknownOperationError, match="sets the data of a tensor"):
        model(torch.ones(1, 5))


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_function(name: str, recipe: Recipe) -> None:
    torch.manual_seed(0)
    model, x = Function(FUNCTIONS[name]).double(), torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        want = model(x)
    found = []
    for needed in (True, False):
        model.requires_grad_(needed)
        with propagate(model, recipe) as trace:
            value = model(x)
            trace.explain(value.sum())
        assert torch.equal(value, want)
        found.append(trace.relevance("x"))
        assert torch.isfinite(found[-1]).all()
        assert found[-1].abs().sum() > 0
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("mul_", lambda w, a, b: (a * b) + (a * b)),
        ("product +=", lambda w, a, b: a * b + a),
        ("silu inplace and its input", lambda w, a, b: 2 * F.silu(a)),
        ("relu inplace and its input", lambda w, a, b: 2 * F.relu(a)),
        ("gelu then *=", lambda w, a, b: F.gelu(a) * b),
        ("addcmul", lambda w, a, b: 0.5 * (a * b)),
        ("addmm by name", lambda w, a, b: 2 * (a @ b.mT)),
        ("addcmul with itself", lambda w, a, b: a * a),
        ("glu", lambda w, a, b: a[:, :2] * a[:, 2:].sigmoid()),
        ("var_mean as a factor", lambda w, a, b: a * a.var(-1, keepdim=True)),
        ("rsqrt(input=)", lambda w, a, b: b / (a.square() + 1).sqrt()),
    ],
)
@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT], ids=lambda recipe: recipe.name)
def test_other_spellings_get_the_same_relevance(recipe: Recipe, name: str, plain: Any) -> None:
    x, found = torch.randn(3, 4, dtype=torch.float64), []
    for function in (FUNCTIONS[name], plain):
        torch.manual_seed(0)
        model = Function(function).double()
        with propagate(model, recipe) as trace:
            trace.explain(model(x).sum())
        found.append(trace.relevance("x"))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


UNKNOWN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "linalg_det": lambda w, a, b: torch.linalg.det(a.mT @ b),
    "nextafter": lambda w, a, b: torch.nextafter(a, b),
    "linalg_inv": lambda w, a, b: torch.linalg.inv(a.mT @ a + torch.eye(4)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_operation_is_refused_by_name_and_runs_when_not_strict(name: str) -> None:
    inner = Function(UNKNOWN[name])
    model, x = nn.Sequential(nn.Linear(4, 4), inner), torch.randn(3, 4)
    refused = pytest.raises(UnknownOperationError, match=f"^1 calls torch's '{name}'.* strict=False")
    with refused, propagate(model, LRP) as trace:
        trace.explain(model(x).sum())
    lenient = Recipe("lenient", strict=False)
    with propagate(model, lenient) as trace:
        value = model(x)
        trace.explain(value.sum())
    assert torch.equal(value, model(x))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf)
    torch.testing.assert_close(trace.gradient("input"), gradient)


def test_an_unknown_operation_on_constants_is_no_matter() -> None:
    model = Function(lambda w, a, b: a * torch.lgamma(w.abs()) + torch.linalg.det(torch.eye(3)))
    with propagate(model, LRP) as trace:
        trace.explain(model(torch.randn(3, 4)).sum())
    assert trace.relevance("x").abs().sum() > 0


class OwnParameter(nn.Parameter):
    """A user's own kind of parameter."""


@pytest.mark.parametrize("kind", [nn.Parameter, OwnParameter])
def test_parameters_of_any_class_are_constants(kind: type[nn.Parameter]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    model[0].weight = kind(model[0].weight.detach())
    with propagate(model, LRP) as trace:
        value = trace.explain(model(torch.ones(4, dtype=torch.float64))[0])
    torch.testing.assert_close(trace.relevance("input").sum(), value)


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP], ids=lambda recipe: recipe.name)
def test_a_gate_is_still_a_gate_after_a_change_in_place(recipe: Recipe) -> None:
    x, found = torch.randn(3, 4, dtype=torch.float64), []
    for gate in (lambda a: torch.sigmoid(a), lambda a: a.clone().sigmoid_(), lambda a: torch.sigmoid(a).view(3, 4)):
        torch.manual_seed(0)
        model = Function(lambda w, a, b, gate=gate: gate(a) * b).double()
        with propagate(model, recipe) as trace:
            trace.explain(model(x).sum())
        found.append(trace.relevance("second"))
        assert trace.relevance("first").any() == (recipe is ATTNLRP)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
