"""Rows of the table of operations that were wrong, missing, or crashed with a ledger, against plain spellings."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx.engine import propagate
from lrpx.errors import MethodError, UnknownOperationError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from lrpx.rules import Gamma, constant

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine import Trace
    from lrpx.recipes import Recipe

    Function = Callable[[Tensor], Tensor]

every_recipe = pytest.mark.parametrize("recipe", [ATTNLRP, LRP, GRADIENT], ids=lambda recipe: recipe.name)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x)
        return y if y.requires_grad else y + (x * 0.0).sum()  # under some rules nothing carries


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, W, ROWS = normal(3, 4), normal(4, 4, seed=1), normal(3, 4, seed=2)


def explained(function: Function, recipe: Recipe, x: Tensor = X, ledger: bool = True) -> Trace:
    model = Calls(function)
    with propagate(model, recipe, (), ledger=ledger) as trace:
        y = model(x)
        assert torch.equal(y, function(x))
        trace.explain((y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum())
    if ledger:
        assert trace.ledger().closes(1e-12)
    return trace


def relevance(function: Function, recipe: Recipe, x: Tensor = X, ledger: bool = True) -> Tensor:
    return explained(function, recipe, x, ledger).relevance("x")


def put(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    y = x * 1
    change(y)
    return y


def grid(x: Tensor) -> Tensor:
    return x.view(1, 2, 3, 2).tanh()


def image(x: Tensor) -> Tensor:
    return x.view(1, 1, 3, 4)


def sampled(x: Tensor, at: Tensor) -> Tensor:
    return F.grid_sample(x, at, align_corners=False)


SPARSE = W.to_sparse()

SAME: dict[str, tuple[Function, Function]] = {
    "neg_": (lambda x: put(x, lambda y: y.neg_()), lambda x: -x),
    "negative_": (lambda x: put(x, lambda y: y.negative_()), lambda x: -x),
    "tril_": (lambda x: put(x, lambda y: y.tril_()), lambda x: x.tril()),
    "elu_": (lambda x: put(x, F.elu_), F.elu),
    "hardtanh_": (lambda x: put(x, F.hardtanh_), F.hardtanh),
    "leaky_relu_": (lambda x: put(x, F.leaky_relu_), F.leaky_relu),
    "round_": (lambda x: put(x, lambda y: y.round_()) + x, lambda x: x.round() + x),
    "meshgrid": (
        lambda x: torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")),
        lambda x: torch.stack([x[0, :, None].expand(4, 4), x[1].expand(4, 4)]),
    ),
    "atleast_3d": (lambda x: torch.atleast_3d(x), lambda x: x[..., None]),
    "atleast_2d": (lambda x: torch.atleast_2d(x[0]), lambda x: x[:1]),
    "block_diag": (lambda x: torch.block_diag(x, x), lambda x: torch.cat([F.pad(x, (0, 4)), F.pad(x, (4, 0))])),
    "linalg.matmul": (lambda x: torch.linalg.matmul(x, x.T), lambda x: x @ x.T),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x.tanh()), lambda x: torch.einsum("td,td->t", x, x.tanh())),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, W, x.T]), lambda x: x @ W @ x.T),
    "cross": (lambda x: torch.linalg.cross(x[:, :3], (x @ W)[:, 1:]), lambda x: crossed(x[:, :3], (x @ W)[:, 1:])),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x.exp(), value=2), lambda x: x + 2 * (x / x.exp())),
    "addr": (lambda x: torch.addr(W, x[0], x[1], beta=2, alpha=3), lambda x: 2 * W + 3 * (x[0, :, None] * x[1])),
    "kron": (lambda x: torch.kron(x[0], x[1]), lambda x: (x[0, :, None] * x[1]).flatten()),
    "outer": (lambda x: torch.outer(x[0], W[0]), lambda x: x[0, :, None] * W[0]),
    "prod of two": (lambda x: x[:2].prod(0), lambda x: x[0] * x[1]),
    "cumprod of two": (lambda x: x[:2].cumprod(0), lambda x: torch.stack([x[0], x[0] * x[1]])),
    "nanmean": (lambda x: x.nanmean(0), lambda x: x.mean(0)),
    "sparse.mm": (lambda x: torch.sparse.mm(SPARSE, x.T), lambda x: W @ x.T),
    "fft2": (lambda x: torch.view_as_real(torch.fft.fft2(x)), lambda x: twice(x)),
    "fftshift": (lambda x: torch.fft.fftshift(x, -1), lambda x: x.roll(2, -1)),
    "instance_norm": (lambda x: F.instance_norm(x[None]), lambda x: F.group_norm(x[None], 3)),
    "hypot": (lambda x: torch.hypot(x[0], x[1]), lambda x: x[:2].norm(dim=0)),
    "logaddexp": (lambda x: torch.logaddexp(x[0], ROWS[0]), lambda x: torch.stack([x[0], ROWS[0]]).logsumexp(0)),
    "clamp(min=T)": (lambda x: x.clamp(min=ROWS[:, None]), lambda x: x.expand(3, 3, 4).clamp(min=ROWS[:, None])),
    "clamp_min(T)": (lambda x: x.clamp_min(ROWS[:, None]), lambda x: x.expand(3, 3, 4).clamp(min=ROWS[:, None])),
    "bounds that depend on it": (lambda x: x.clamp(min=x.tanh()), lambda x: torch.maximum(x, x.tanh())),
    "pow(T, x)": (
        lambda x: torch.pow(ROWS.exp()[:, None], x),
        lambda x: torch.pow(ROWS.exp()[:, None], x.expand(3, 3, 4)),
    ),
    "x ** T": (lambda x: x.abs() ** ROWS[:, None].abs(), lambda x: x.abs().expand(3, 3, 4) ** ROWS[:, None].abs()),
    "a threshold to a value": (lambda x: F.threshold(x, 0.2, 0.2), lambda x: x.clamp(min=0.2)),
    "prelu": (
        lambda x: F.prelu(x, x[0].exp()),
        lambda x: x.relu() + x[0].exp() * (x - x.relu()),
    ),
    "group_norm, its weight and bias": (
        lambda x: F.group_norm(x[None], 1, x[:, 0].exp(), x[:, 1]),
        lambda x: F.layer_norm(x[None], (3, 4)) * x[:, :1].exp() + x[:, 1:2],
    ),
    "instance_norm, its weight": (
        lambda x: F.instance_norm(x[None], weight=x[:, 0].exp()),
        lambda x: F.instance_norm(x[None]) * x[:, :1].exp(),
    ),
    "einsum, a scaling": (lambda x: torch.einsum("td,d->td", x, W[0]), lambda x: x * W[0]),
    "einsum of three": (
        lambda x: torch.einsum("td,td,td->dt", x, x.tanh(), x.exp()),
        lambda x: (x * x.tanh() * x.exp()).T,
    ),
    "matmul, other=": (lambda x: torch.matmul(x, other=x.T), lambda x: x @ x.T),
    "mul, input=": (lambda x: torch.mul(input=x, other=x.tanh()), lambda x: x * x.tanh()),
    "softmax, x= and axis=": (lambda x: torch.softmax(x=x, axis=-1), lambda x: x.softmax(-1)),
    "log, a=": (lambda x: torch.log(a=x.exp()), lambda x: x.exp().log()),
    "x * its copy": (lambda x: x * x.clone(), lambda x: x * x),
    "a sigmoid * its copy": (lambda x: x.sigmoid() * x.sigmoid().clone(), lambda x: x.sigmoid().square()),
    "a gate, in place": (
        lambda x: put(F.silu(x), lambda y: y.neg_()) * (x @ W),
        lambda x: -F.silu(x) * (x @ W),
    ),
}  # fmt: skip


def crossed(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a[:, i - 2] * b[:, i - 1] - a[:, i - 1] * b[:, i - 2] for i in range(3)], 1)


def twice(x: Tensor) -> Tensor:
    whole = torch.complex(x, torch.zeros_like(x))
    return torch.view_as_real(torch.fft.fft(torch.fft.fft(whole, dim=-1), dim=-2))


@every_recipe
@pytest.mark.parametrize("name", SAME)
def test_one_function_has_one_relevance(name: str, recipe: Recipe) -> None:
    found, plain = SAME[name]
    torch.testing.assert_close(relevance(found, recipe), relevance(plain, recipe), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)
def test_factors_of_one_product_share_evenly(recipe: Recipe) -> None:
    x = X.abs() + 0.5
    weights = torch.linspace(0.5, 1.5, 3, dtype=x.dtype)
    wanted = (x.prod(1) * weights / 4)[:, None].expand(3, 4)
    torch.testing.assert_close(relevance(lambda x: x.prod(1), recipe, x), wanted)
    whole = relevance(lambda x: x.prod().view(1), recipe, x)
    torch.testing.assert_close(whole, (0.5 * x.prod() / 12).expand(3, 4))
    for y in (x, x * (x != x[1, 1])):  # a factor of 0 is no obstacle
        assert relevance(lambda x: x.cumprod(0), recipe, y).isfinite().all()


def own(op: Any, *inputs: Any) -> Tensor:
    return op(*inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [lambda x: x.prod(1), lambda x: x.cumprod(1)])
def test_products_of_many_factors_refuse_a_rule_of_ones_own(function: Any) -> None:
    with pytest.raises(MethodError, match=r"prod.*product=own.*products of two"):
        explained(function, ATTNLRP.at(product=own))
    assert not relevance(lambda x: function(x).sum() + 0 * x, ATTNLRP.at(product=constant)).any()


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)
def test_the_grid_of_an_interpolation_is_a_constant(recipe: Recipe) -> None:
    """Deformable attention: where it looks is a choice, as a gate's is; the values have all."""
    x = normal(2, 3, 4)

    def depends(x: Tensor) -> Tensor:
        return sampled(image(x[0]), grid(x[1]))

    trace = explained(depends, recipe, x)
    found = trace.relevance("x")
    assert not found[1].any()
    torch.testing.assert_close(found[0], relevance(lambda y: sampled(image(y), grid(x[1])), recipe, x[0]))
    torch.testing.assert_close(found.sum().item(), trace.ledger().explained)
    by_torch = relevance(lambda x: torch.grid_sampler(image(x[0]), grid(x[1]), 0, 0, False), recipe, x)
    torch.testing.assert_close(by_torch, found)
    plain = relevance(depends, GRADIENT, x)
    leaf = x.clone().requires_grad_()
    y = depends(leaf)
    (slope,) = torch.autograd.grad((y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum(), leaf)
    torch.testing.assert_close(plain, x * slope)


def test_an_interpolation_refuses_a_rule_of_ones_own_for_products() -> None:
    with pytest.raises(MethodError, match=r"grid_sample.*product=own"):
        explained(lambda x: sampled(image(x), grid(x)), ATTNLRP.at(product=own), ledger=False)


REFUSED: dict[str, tuple[Function, str]] = {
    "scatter_reduce": (
        lambda x: x.scatter_reduce(0, torch.zeros(3, 4, dtype=torch.long), x.tanh(), "prod"),
        r"scatter_reduce with reduce=prod",
    ),
    "index_reduce_": (
        lambda x: (x * 1).index_reduce_(0, torch.tensor([0, 0, 1]), x.tanh(), "prod"),
        r"index_reduce_ with reduce=prod",
    ),
    "quantile": (lambda x: x.quantile(x[0, 0].sigmoid()), "quantile with more than its first argument"),
    "fmod": (lambda x: torch.fmod(x, x.exp()), "fmod of several tensors"),
    "logdet": (lambda x: torch.logdet(x @ x.T)[None], "logdet"),
    "without a derivative": (lambda x: x + torch.special.bessel_j0(x), "special_bessel_j0"),
    "in place": (lambda x: put(x, lambda y: y.erfinv_().digamma_().polygamma_(1)), "polygamma_"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_name(name: str) -> None:
    function, named = REFUSED[name]
    for recipe in (ATTNLRP, LRP):
        for ledger in (False, True):
            with pytest.raises(UnknownOperationError, match=rf"Calls calls torch's '{named}.*strict=False"):
                explained(function, recipe, X.sigmoid() / 3, ledger)


def test_a_sparse_weight_hides_its_products_from_a_rule() -> None:
    with pytest.raises(MethodError, match=r"_sparse_mm.*linear=Gamma"):
        explained(lambda x: torch.sparse.mm(SPARSE, x.T), ATTNLRP.at(linear=Gamma(0.5)))


# ------------------------------------------------------------------ harmless calls, with a ledger

TWICE = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [2, 0, 2, 0]])
AT = torch.tensor([0, 0, 2])

HARMLESS: dict[str, Function] = {
    "equal": lambda x: x * float(torch.equal(x, x)),
    "allclose": lambda x: x * float(torch.allclose(x, x)),
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=1)),
    "broadcast_tensors": lambda x: torch.stack(torch.broadcast_tensors(x, x[:1])),
    "unique of numbers": lambda x: x * torch.unique((x > 0).long()).sum(),
    "comparisons": lambda x: torch.where((x > x.mean()) & ~(x > 3).logical_not(), x, x.tanh()),
    "logical_not_": lambda x: put(x, lambda y: y.logical_not_()) + x,
    "gt_": lambda x: put(x, lambda y: y.gt_(0.1)) + x,
    "layer_norm of a vector": lambda x: F.layer_norm(x[0], (4,), W[0], W[1]),
    "no rows of a head": lambda x: torch.cat([x, F.linear(x[:0], normal(5000, 4))[:, :4]]),
    "no rows": lambda x: torch.cat([x, x[:0] @ W]),
    "scatter": lambda x: x.scatter(1, TWICE, ROWS),
    "scatter_ a number": lambda x: (x * 1).scatter_(1, TWICE, 2.5),
    "index_copy": lambda x: x.index_copy(0, AT, ROWS[:1].expand(3, 4)),
    "index_put": lambda x: x.index_put((AT, AT), ROWS[0, :3]),
    "index_put, adding": lambda x: x.index_put((AT, AT), ROWS[0, :3], accumulate=True),
    "x[i] = w": lambda x: put(x, lambda y: y.__setitem__((AT, AT), ROWS[0, 0])),
    "put": lambda x: x.put(AT, ROWS[0, :3]),
    "a complex constant": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(3, 2, 2)) + torch.view_as_complex(ROWS.view(3, 2, 2))
    ),
    "integers": lambda x: torch.cat([x.clamp(x.tanh(), TWICE), torch.maximum(x, TWICE), torch.where(x > 0, x, TWICE)]),
    "integers beside it": lambda x: torch.cat([x, TWICE]) + torch.stack([TWICE[0], x[0]]).sum(0),
    "x.where": lambda x: x.where(x > 0, TWICE),
    "padding": lambda x: F.pad(x, pad=(1, 1), value=2.0),
    "a constant layer with a bias": lambda x: F.linear(ROWS, W, x[0]),
    "a constant convolution with a bias": lambda x: F.conv1d(ROWS[None], normal(4, 3, 2), x[0]),
}


@every_recipe
@pytest.mark.parametrize("name", HARMLESS)
def test_a_ledger_minds_no_harmless_call(name: str, recipe: Recipe) -> None:
    explained(HARMLESS[name], recipe)


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)
def test_the_encoder_of_torch_with_a_padding_mask(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double().eval()
    x, padding = normal(2, 5, 8), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    with propagate(model, recipe, (), ledger=True) as trace:
        out = model(x, src_key_padding_mask=padding)
        trace.explain(out[1, 0, 0])
    assert trace.ledger().closes(1e-9)
    found = trace.relevance("src")
    assert not found[1, 3:].any()
    with propagate(model, recipe, ()) as trace:
        trace.explain(model(x[1:, :3])[0, 0, 0])
    torch.testing.assert_close(found[1:, :3], trace.relevance("src"), rtol=1e-9, atol=1e-9)


def test_weights_made_in_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    with (
        pytest.raises(MethodError, match=r"0\.weight of Sequential was made in inference mode.*deepcopy"),
        propagate(model, ATTNLRP),
    ):
        model(X)
    model = copy.deepcopy(model)
    with propagate(model, ATTNLRP, ledger=True) as trace:
        trace.explain(model(X)[0, 0])
    assert trace.ledger().closes(1e-12)
