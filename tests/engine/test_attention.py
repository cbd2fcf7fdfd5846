"""Fused attention under a rule: the eager composition of the same rules, without its attention matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lrpx import rules
from lrpx.engine import _attention, propagate
from lrpx.errors import MethodError
from lrpx.recipes import ATTNLRP, GIM, GRADIENT, LRP

if TYPE_CHECKING:
    from lrpx.recipes import Recipe
    from lrpx.rules import Rule

RECIPES = {"attnlrp": ATTNLRP, "lrp": LRP, "gradient": GRADIENT}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: Rule, matmul: Rule) -> Tensor:
    """Attention with each rule at its own operation, as an eager model spells it."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = matmul(torch.matmul, q, k.mT) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = softmax(lambda s: s.softmax(-1), scores)
    return matmul(torch.matmul, weights, v)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    queries=st.integers(1, 5),
    keys=st.integers(1, 5),
    groups=st.sampled_from([1, 2]),
    masked=st.sampled_from(["none", "bool", "additive", "learned", "causal"]),
    rule=st.sampled_from([(rules.unmodified, rules.uniform), (rules.constant, rules.uniform),
                          (rules.unmodified, rules.unmodified)]),
    learns=st.sampled_from(["qkv", "v", "qk", "q"]),
)  # fmt: skip
def test_fused_is_eager(
    seed: int, queries: int, keys: int, groups: int, masked: str, rule: tuple[Rule, Rule], learns: str
) -> None:
    softmax, matmul = rule
    if masked == "causal":
        keys = queries
    sizes = {"q": (2, 4, queries, 3), "k": (2, 4 // groups, keys, 3), "v": (2, 4 // groups, keys, 3)}
    inputs = {n: draw(*s, seed=seed + i).requires_grad_(n in learns) for i, (n, s) in enumerate(sizes.items())}
    mask = draw(2, 1, queries, keys, seed=seed + 3)
    if masked == "bool":
        mask = (mask > -0.3) | torch.eye(queries, keys, dtype=torch.bool)
        mask[..., 0] = True
    given_mask = {"none": None, "causal": torch.ones(queries, keys, dtype=torch.bool).tril()}.get(masked, mask)
    if masked == "learned":
        mask.requires_grad_()

    def op(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
        m = None if masked == "causal" else m
        return F.scaled_dot_product_attention(q, k, v, m, is_causal=masked == "causal", enable_gqa=groups > 1)

    q, k, v = inputs.values()
    fused = _attention.fused(op, q, k, v, given_mask, softmax, matmul)
    if masked != "learned":  # torch chooses another kernel for a mask that needs its gradient
        assert torch.equal(fused, op(q, k, v, given_mask))
    if softmax is rules.constant and "v" not in learns:
        assert not fused.requires_grad
        return

    def between_inputs(op: Any, a: Tensor, b: Tensor) -> Tensor:
        return matmul(op, a, b) if a.requires_grad and b.requires_grad else op(a, b)

    wanted = eager(q, k, v, given_mask, softmax, between_inputs)
    assert_close(fused, wanted, rtol=1e-12, atol=1e-12)
    leaves = [t for t in (q, k, v, given_mask) if t is not None and t.requires_grad]
    upstream = draw(*fused.shape, seed=seed + 4)
    found = torch.autograd.grad(fused, leaves, upstream, allow_unused=True)
    want = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True)
    for one, other, of in zip(found, want, leaves, strict=True):
        zero = torch.zeros_like(of)
        assert_close(zero if one is None else one, zero if other is None else other, rtol=1e-9, atol=1e-9)


class Attention(nn.Module):
    """One attention layer of 2 heads, spelled by hand or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / 2.0
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return out.transpose(-3, -2).flatten(-2)


def attentions() -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    fused, spelled = Attention(True).double(), Attention(False).double()
    spelled.load_state_dict(fused.state_dict())
    return fused, spelled


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_fused_and_spelled_out_modules_agree_under_every_recipe(recipe: Any) -> None:
    found = []
    for model in attentions():
        with propagate(model, recipe) as trace:
            out = model(draw(1, 5, 8))
        trace.explain(out[0, -1].sum())
        found.append(trace.relevance("x"))
    assert_close(*found, rtol=1e-9, atol=1e-9)


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that any operation makes, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.seen.add(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_no_attention_matrix_is_made_by_the_fused_path(recipe: Any) -> None:
    length = 67

    def matrices(model: nn.Module) -> set[tuple[int, ...]]:
        shapes = Shapes()
        with shapes, propagate(model, recipe) as trace:
            out = model(draw(1, length, 8, dtype=torch.float32))
            trace.explain(out[0, -1].sum())
        assert trace.relevance("x").abs().sum() > 0
        return {shape for shape in shapes.seen if shape.count(length) > 1}

    fused, spelled = attentions()
    assert matrices(spelled.float())
    assert not matrices(fused.float())


@pytest.mark.parametrize(
    "changed", [{"softmax": rules.identity}, {"matmul": rules.signal_take_all}, {"matmul": rules.constant}]
)
def test_a_rule_that_no_kernel_carries_is_that_of_the_spelled_out_attention(changed: dict[str, Rule]) -> None:
    x, found = draw(1, 5, 8), []
    for model in attentions():
        with propagate(model, ATTNLRP.at(**changed)) as trace:
            out = model(x)
        assert torch.equal(out, model(x))
        trace.explain(out[0, -1].sum())
        found.append(trace.relevance("x"))
    assert_close(*found, rtol=1e-9, atol=1e-9)
    assert found[0].any()


def test_dropout_is_refused_where_the_attention_must_be_spelled_out() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    model = Dropped()
    with (
        pytest.raises(MethodError, match=r"scaled_dot_product_attention', with dropout.*softmax=identity.*eval\(\)"),
        propagate(model, ATTNLRP.at(softmax=rules.identity)),
    ):
        model(draw(1, 2, 5, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_spelled_out_is_masked_under_autocast(dtype: torch.dtype) -> None:
    """The products are narrower there than the queries are."""

    def run() -> Tensor:
        model, x = attentions()[0].float(), draw(2, 5, 8, dtype=torch.float32)
        with propagate(model, GIM) as trace:
            trace.explain(model(x)[0, -1].sum())
        return trace.relevance("x")

    exact = run()
    with torch.autocast("cpu", dtype=dtype):
        found = run()
    assert_close(found, exact, rtol=0, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_fused_value_is_bit_for_bit(recipe: Any, dtype: torch.dtype) -> None:
    fused, _ = attentions()
    fused.to(dtype)
    x = draw(2, 5, 8, dtype=dtype)
    with propagate(fused, recipe):
        out = fused(x)
    assert torch.equal(out, fused(x))


# --------------------------------------------------------------------- among other products

UP = {name: draw(6, 6, seed=seed) for seed, name in enumerate("qkvgh")}
AMONG_PRODUCTS: dict[str, Any] = {
    "gated": lambda x, attend: attend(x["q"], x["k"], x["v"]) * x["g"].sigmoid(),
    "values": lambda x, attend: attend(x["q"], x["k"], x["v"] * x["g"]),
    "queries": lambda x, attend: attend(x["q"] * x["g"], x["k"], x["v"]),
    "all": lambda x, attend: attend(x["q"] * x["g"] * x["h"], x["k"] * x["g"], x["v"] * x["h"]) * x["g"],
    "constant queries": lambda x, attend: attend(UP["q"][:4], x["k"] * x["g"], x["v"] * x["h"]) * x["g"],
    "constant values": lambda x, attend: attend(x["q"], x["k"] * x["g"], UP["v"][:4]) * x["g"],
}


class Attends(nn.Module):
    def __init__(self, name: str, attend: Any) -> None:
        super().__init__()
        self.name, self.attend = name, attend

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = AMONG_PRODUCTS[self.name]({key: x @ weight for key, weight in UP.items()}, self.attend)
        return out @ UP["h"]


@pytest.mark.parametrize("recipe", [*RECIPES.values(), ATTNLRP.at(softmax=rules.constant)])
@pytest.mark.parametrize("name", AMONG_PRODUCTS)
def test_fused_is_eager_among_other_products(name: str, recipe: Recipe) -> None:
    def spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 6**-0.5).softmax(-1) @ v

    found = []
    for attend in F.scaled_dot_product_attention, spelled:
        with propagate(model := Attends(name, attend), recipe, ledger=True) as trace:
            trace.explain(model(draw(4, 6, seed=9))[-1, 0])
        assert trace.ledger().closes(1e-9)
        found.append(trace.relevance("x"))
    assert_close(*found, rtol=1e-9, atol=1e-12)
