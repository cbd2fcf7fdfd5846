"""What a strict recipe refuses rather than guesses, and what it must not refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from lrpx.engine import propagate
from lrpx.errors import MethodError, TraceError, UnknownOperationError
from lrpx.recipes import ATTNLRP, ATTNLRP_VIT, GRADIENT, LRP
from lrpx.rules import AlphaBeta, Epsilon, Gamma, ZPlus, unmodified

X = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def explained(model: nn.Module, recipe: Any = LRP, x: Tensor = X) -> Any:
    with propagate(model, recipe) as trace:
        trace.explain(model(x).flatten()[0])
    return trace


def test_a_state_that_is_written_over_is_refused_by_name() -> None:
    """As RWKV's is with a cache: plain torch has no gradient of it."""

    def stepped(h: Tensor) -> Tensor:
        state = torch.zeros_like(h)
        out = 0
        for factor in (h, 2 * h):
            state[:] = state * factor + h
            out = out + state * h
        return out

    with pytest.raises(RuntimeError, match="inplace"):
        Calls(stepped)(X).sum().backward()
    with pytest.raises(TraceError, match=r"writes over a value that the backward pass needs.*use_cache=False"):
        explained(Calls(stepped), ATTNLRP)


def test_a_custom_autograd_function_of_the_model_is_refused_by_name() -> None:
    with pytest.raises(UnknownOperationError, match=r"Doubled of tests\.engine\.test_refusals.*strict=False"):
        explained(Calls(Doubled.apply))


def test_a_full_backward_hook_is_refused_by_what_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    model[0].register_full_backward_hook(lambda module, before, after: None)
    with (
        propagate(model, ATTNLRP) as trace,
        pytest.raises(UnknownOperationError, match=r"has a full backward hook, .*; remove it first"),
    ):
        trace.explain(model(X).sum())


def test_a_custom_autograd_function_runs_when_not_strict() -> None:
    trace = explained(Calls(Doubled.apply), replace(LRP, strict=False))
    assert trace.relevance("x").any()
    assert explained(Calls(Doubled.apply), GRADIENT).relevance("x").any()


def test_a_rule_may_be_a_custom_autograd_function() -> None:
    def doubling(op: Any, *inputs: Any) -> Tensor:
        return Doubled.apply(op(*inputs)) / 2

    assert explained(Calls(torch.tanh), LRP.at(activation=doubling)).relevance("x").any()


def test_batch_norm_is_refused_in_training_mode_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64))
    with pytest.raises(UnknownOperationError, match=r"^1 calls torch's 'batch_norm in training mode'"):
        explained(model, x=X.repeat(3, 1))
    model.eval()
    assert explained(model).relevance("input").any()


def test_an_override_of_no_module_is_refused() -> None:
    with pytest.raises(MethodError, match=r"no module of Calls has a path like '\*\.mpl'.*named_modules"):
        explained(Calls(torch.tanh), ATTNLRP.at("*.mpl", linear=Gamma()))


def test_layers_beyond_the_model_are_no_error() -> None:
    assert explained(Calls(torch.tanh), ATTNLRP.at(layers=slice(7, None), use=LRP)).relevance("x").any()


def test_a_run_is_explained_once() -> None:
    model = Calls(torch.tanh)
    with propagate(model, LRP) as trace:
        value = model(X)[0, 0]
        trace.explain(value)
        with pytest.raises(TraceError, match=r"explained already.*run the model again"):
            trace.explain(value)


def test_an_embedding_bag_is_a_source() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3, dtype=torch.float64), nn.Linear(3, 2, bias=False, dtype=torch.float64))
    with propagate(model, LRP) as trace:
        value = trace.explain(model(torch.tensor([[1, 4]]))[0, 1])
    torch.testing.assert_close(trace.relevance("0").sum(), value)


def test_a_transposed_weight_is_a_linear_layer() -> None:
    torch.manual_seed(0)
    model = Calls(nn.Identity())
    written_out = Calls(nn.Identity())
    written_out.load_state_dict(model.state_dict())
    written_out.layer.forward = lambda x: x @ written_out.layer.weight.T  # type: ignore[method-assign]
    model.layer.bias = None
    recipe = LRP.at(linear=Gamma(0.5))
    wanted = explained(model, recipe).relevance("x")
    torch.testing.assert_close(explained(written_out, recipe).relevance("x"), wanted)
    assert not torch.allclose(explained(model).relevance("x"), wanted)


def test_a_hook_of_the_model_may_look_at_a_gradient_and_not_change_it() -> None:
    seen: list[Tensor] = []

    def looks(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y.register_hook(seen.append)
        return y

    def changes(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y.register_hook(lambda gradient: 3 * gradient)
        return y

    model = Calls(torch.tanh)
    wanted = explained(model).relevance("x")
    model.function = looks
    assert torch.equal(explained(model).relevance("x"), wanted)
    assert len(seen) == 1
    model.function = changes
    with pytest.raises(UnknownOperationError, match=r"changes a gradient by a hook.*strict=False"):
        explained(model)
    assert torch.allclose(explained(model, replace(LRP, strict=False)).relevance("x"), 3 * wanted)


def test_a_leaf_that_the_model_makes_is_a_constant_with_a_ledger_too() -> None:
    model = Calls(lambda x: x.detach().requires_grad_() * 2 + x)
    wanted = explained(model).relevance("x")
    with propagate(model, LRP, ledger=True) as trace:
        trace.explain(model(X).flatten()[0])
    assert torch.equal(trace.relevance("x"), wanted)
    assert trace.ledger().closes(1e-9)


class Complex(torch.nn.Module):
    """A layer of complex numbers, as state spaces and Fourier layers have."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (torch.fft.fft(x) @ self.weight).real


@pytest.mark.parametrize("rule", [Epsilon(0.1), Gamma(0.2), ZPlus(), AlphaBeta()], ids=repr)
def test_a_rule_by_signs_is_refused_for_complex_numbers(rule):
    model = Complex()
    refused = pytest.raises(MethodError, match="complex numbers, which have no signs")
    with refused, propagate(model, replace(ATTNLRP, linear=rule)):
        model(torch.ones(2, 4))
    with refused, propagate(model, ATTNLRP_VIT):  # whose rules hang on the place
        model(torch.ones(2, 4))


class OfCompiled(nn.Module):
    """A model of which one method, or its forward, is compiled."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 8).double(), nn.Linear(8, 3).double()
        self.run = torch.compile(self._run, backend="eager") if how == "method" else self._run
        if how == "forward":
            self.forward = torch.compile(self.forward, backend="eager")

    def _run(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)) * x.sum(-1, keepdim=True).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["method", "forward"])
def test_code_compiled_inside_of_a_model_is_refused(how: str) -> None:
    """No ``_orig_mod`` tells of it. What dynamo had made of the rules for one recipe answered for the next (up to 5
    times the largest relevance apart)."""
    torch._dynamo.reset()
    model = OfCompiled(how)
    model(X)
    for recipe in (LRP, ATTNLRP, ATTNLRP):
        with pytest.raises(TraceError, match=r"runs what torch\.compile has compiled"), propagate(model, recipe):
            model(X.clone().requires_grad_())
    with torch.compiler.set_stance("force_eager"), propagate(model, ATTNLRP) as trace:
        value = trace.explain(model(X)[0, 0])
    plain = OfCompiled("")
    with propagate(plain, ATTNLRP) as expected:
        expected.explain(plain(X)[0, 0])
    assert value.isfinite()
    torch.testing.assert_close(trace.relevance("up", of="input"), expected.relevance("up", of="input"))
    torch._dynamo.reset()


@pytest.mark.parametrize("how", [{}, {"dim": 0}, {"return_counts": True}])
def test_what_torch_has_no_derivative_of_is_told_in_the_backward_pass_too(how: dict[str, Any]) -> None:
    def unique(x: Tensor) -> Tensor:
        found = torch.unique(x, **how)
        return found if isinstance(found, Tensor) else found[0]

    model = Calls(unique)
    with propagate(model, ATTNLRP) as trace:
        value = model(X.clone().requires_grad_()).sum()
        with pytest.raises(UnknownOperationError, match=r"torch has no derivative of .*unique"):
            trace.explain(value)
    model = Calls(lambda x: x * torch.unique(x).numel())  # which needs none
    with propagate(model, ATTNLRP) as trace:
        trace.explain(model(X.clone().requires_grad_()).sum())


WRITTEN_NORMS: dict[str, Any] = {
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "reciprocal": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt().reciprocal(),
    "pow": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** -0.5,
    "var": lambda x: x / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
}


@pytest.mark.parametrize("name", WRITTEN_NORMS)
def test_a_norm_that_is_written_out_has_its_plain_gradient_or_none(name: str) -> None:
    """The product with an inverse was shared, and a variance's squares had half their gradient (0.4 to 0.6 apart)."""
    model, x, recipe = Calls(WRITTEN_NORMS[name]), X.clone().requires_grad_(), ATTNLRP.at(norm=unmodified)
    with (
        pytest.raises(MethodError, match=f"{name}.*norm=unmodified would be no plain gradient"),
        propagate(model, recipe),
    ):
        model(x)
    mended = recipe.at(product=unmodified, activation=unmodified)
    with propagate(model, mended, observe=["layer"]) as trace:
        trace.explain(model(x)[0, 0])
    (plain,) = torch.autograd.grad(model(x)[0, 0], x)
    torch.testing.assert_close(trace.gradient("layer", of="input"), plain)
    of_sums = Calls(lambda x: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    found = []
    for each in (of_sums, Calls(lambda x: nn.functional.rms_norm(x, (3,), eps=1e-5))):
        each.load_state_dict(of_sums.state_dict())
        with propagate(each, recipe, observe=["layer"]) as trace:
            trace.explain(each(x)[0, 0])
        found.append(trace.gradient("layer", of="input"))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)  # the guard is no square
