"""What a sweep over the classes of transformers found: one torch function at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx.engine import propagate
from lrpx.errors import MethodError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from lrpx.rules import constant

if TYPE_CHECKING:
    from collections.abc import Callable

every_recipe = pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT], ids=lambda recipe: recipe.name)


class Function(nn.Module):
    """Calls a function on the outputs of two linear layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), self.second(x))


def relevance(function: Any, recipe: Any, path: str = "x") -> Tensor:
    torch.manual_seed(0)
    model, x = Function(function).double(), torch.randn(4, 4, dtype=torch.float64)
    with propagate(model, recipe) as trace:
        found = model(x)
        trace.explain(found.square().sum())
    assert torch.equal(found, model(x))
    return trace.relevance(path)


# ------------------------------------------------------------------ triangular systems


def system(a: Tensor) -> Tensor:
    return a + 3 * torch.eye(4, dtype=a.dtype)


def substituted(a: Tensor, b: Tensor) -> Tensor:
    """``a⁻¹ b`` for a lower triangular ``a``, row after row."""
    rows = [b[:1] / a[:1, :1]]
    for i in range(1, 4):
        rows.append((b[i : i + 1] - a[i : i + 1, :i] @ torch.cat(rows)) / a[i : i + 1, i : i + 1])
    return torch.cat(rows)


def inverse(a: Tensor) -> Tensor:
    """``(1 − a)⁻¹`` of a strictly lower triangular ``a``, row after row, as code of the gated delta rule has it."""
    for i in range(1, 4):
        row, above = a[..., i, :i].clone(), a[..., :i, :i].clone()
        a[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    return a + torch.eye(4, dtype=a.dtype)


SYSTEMS: dict[str, tuple[Any, Any]] = {
    "lower": (
        lambda a, b: torch.linalg.solve_triangular(system(a), b, upper=False),
        lambda a, b: substituted(system(a), b),
    ),
    "unit lower": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True),
        lambda a, b: substituted(a.tril(-1) + torch.eye(4, dtype=a.dtype), b),
    ),
    "unit lower, by the inverse": (
        lambda a, b: inverse(-a.tril(-1)) @ b,
        lambda a, b: substituted(a.tril(-1) + torch.eye(4, dtype=a.dtype), b),
    ),
    "upper": (
        lambda a, b: torch.linalg.solve_triangular(system(a), b, upper=True),
        lambda a, b: substituted(system(a).flip(0, 1), b.flip(0)).flip(0),
    ),
    "from the right": (
        lambda a, b: torch.linalg.solve_triangular(system(a), b, upper=True, left=False),
        lambda a, b: substituted(system(a).mT, b.mT).mT,
    ),
}


@every_recipe
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_triangular_solve_is_its_forward_substitution(name: str, recipe: Any) -> None:
    solved, unrolled = SYSTEMS[name]
    torch.testing.assert_close(relevance(solved, recipe), relevance(unrolled, recipe))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_triangular_solve_conserves(name: str) -> None:
    torch.manual_seed(0)
    model, x = Function(SYSTEMS[name][0]).double(), torch.randn(4, 4, dtype=torch.float64)
    with propagate(model, ATTNLRP) as trace:
        value = trace.explain(model(x)[2, 1])
    torch.testing.assert_close(trace.relevance("first").sum() + trace.relevance("second").sum(), value)


def test_a_triangular_solve_refuses_a_rule_it_cannot_carry() -> None:
    with pytest.raises(MethodError, match=r"solve_triangular.*matmul=constant.*recipe\.at"):
        relevance(SYSTEMS["lower"][0], LRP.at(matmul=constant))


# ------------------------------------------------------------------------ batch norm


@every_recipe
def test_batch_norm_of_one_sample_has_its_true_gradient(recipe: Any) -> None:
    """torch's own is wrong where the gradient of one sample is not contiguous."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).double().eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.weight)
    x, weight = torch.randn(1, 4, 2, 3, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    with propagate(norm, recipe) as trace:
        value = norm(x)
        trace.explain((value.flatten(2).mT * weight).sum())
    assert torch.equal(value, norm(x))
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None]
    torch.testing.assert_close(trace.gradient("input"), weight.mT.reshape(1, 4, 2, 3) * scale.detach())


def test_batch_norm_is_the_same_by_either_name() -> None:
    mean, variance, weight = torch.tensor([[0.3, -1, 0, 2], [1, 2, 0.5, 4], [-1, 1, 2, 3]], dtype=torch.float64)
    found = [
        relevance(lambda a, b: F.batch_norm(a, mean, variance, weight, weight) * b, LRP),
        relevance(lambda a, b: torch.batch_norm(a, weight, weight, mean, variance, False, 0.1, 1e-5, False) * b, LRP),
    ]
    torch.testing.assert_close(*found)


# ----------------------------------------------------------------------------- gates

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "1 - z": lambda z: 1 - z,
    "2 * z": lambda z: 2 * z,
    "z + eps": lambda z: z + 1e-3,
    "z + weight": lambda z: z + torch.ones(4, dtype=z.dtype),
    "a row": lambda z: z[1, None],
    "a half": lambda z: z.chunk(2, -1)[1].repeat(1, 2),
    "the largest": lambda z: z.topk(1).values,
    "gathered": lambda z: z.gather(-1, torch.tensor([[1], [0], [3], [2]])),
    "to sum one": lambda z: z / z.sum(-1, keepdim=True),
    "scaled in place": lambda z: z.clone().mul_(2),
}


@pytest.mark.parametrize("name", GATES)
def test_a_sigmoid_stays_a_gate(name: str) -> None:
    for function in (lambda a, b: GATES[name](a.sigmoid()) * b, lambda a, b: b * GATES[name](a.sigmoid())):
        assert not relevance(function, LRP, "first").any()
        assert relevance(function, ATTNLRP, "first").any() or name == "to sum one"


def test_a_gate_stays_one_where_it_is_passed_by_name() -> None:
    for function in (
        lambda a, b: torch.reshape(input=a.sigmoid(), shape=(2, 8)) * b.view(2, 8),
        lambda a, b: F.dropout(input=a.sigmoid(), training=False) * b,
        lambda a, b: torch.index_select(input=a.sigmoid(), dim=0, index=torch.arange(4)) * b,
    ):
        assert not relevance(function, LRP, "first").any()
        assert relevance(function, LRP, "second").any()


def test_a_gate_plus_a_signal_is_no_gate() -> None:
    in_place = relevance(lambda a, b: a.sigmoid().add_(b) * b, LRP, "first")
    torch.testing.assert_close(in_place, relevance(lambda a, b: (a.sigmoid() + b) * b, LRP, "first"))
    assert in_place.any()
