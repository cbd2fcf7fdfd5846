"""A bias that is added after the product is a part of the layer, whatever rule for linear layers there is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GptOssConfig, GptOssForCausalLM

import lrpx
from lrpx.recipes import ATTNLRP_VIT, LRP_VIT
from lrpx.rules import AlphaBeta, Epsilon, Gamma, ZPlus

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH, OUT = 3, 4, 5
RULES = {"epsilon": Epsilon(0.3), "gamma": Gamma(0.5), "zplus": ZPlus(), "alpha-beta": AlphaBeta(2.0)}


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x @ w.T
    y += b
    return y


LAYERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w) + b,
    "the bias first": lambda x, w, b: b + F.linear(x, w),
    "in place": in_place,
    "taken off": lambda x, w, b: F.linear(x, w) - (-b),
    "@": lambda x, w, b: x @ w.T + b,
    "torch.add": lambda x, w, b: torch.add(torch.matmul(x, w.T), other=b),
    "on the left": lambda x, w, b: (w @ x.mT + b[:, None]).mT,
    "bmm": lambda x, w, b: torch.bmm(x, w.T.expand(len(x), -1, -1)) + b.expand(len(x), 1, -1),
    "einsum": lambda x, w, b: torch.einsum("bsd,od->bso", x, w) + b,
    "einsum with dots": lambda x, w, b: torch.einsum("...d,od->...o", x, w) + b,
    "tensordot": lambda x, w, b: torch.tensordot(x, w, dims=([2], [1])) + b,
    "in two dimensions": lambda x, w, b: ((x @ w.T).view(-1, OUT) + b).view(x.shape[:2] + b.shape),
    "squeezed, in place": lambda x, w, b: (
        torch.bmm(x.flatten(0, 1)[:, None], w.T.expand(6, -1, -1))
        .squeeze(1)
        .add_(b.expand(6, -1))
        .unflatten(0, x.shape[:2])
    ),
    "transposed": lambda x, w, b: (w @ x.mT).mT + b,
    "conv1d": lambda x, w, b: (F.conv1d(x.mT, w[:, :, None]) + b[:, None]).mT,
    "in a row": lambda x, w, b: F.linear(x, w) + b[None],
    "in rows": lambda x, w, b: x @ w.T + b.view(1, 1, -1).expand(2, ROWS, -1),
    "in a row, of one": lambda x, w, b: torch.cat([each @ w.T + b.view(1, -1) for each in x.split(1, 1)], 1),
    "a second": lambda x, w, b: F.linear(x, w, 0.5 * b) + 0.5 * b,
    "a second, of a convolution": lambda x, w, b: (F.conv1d(x.mT, w[:, :, None], 0.25 * b) + 0.75 * b[:, None]).mT,
    "a second, of addmm": lambda x, w, b: torch.addmm(0.25 * b, x.flatten(0, 1), w.T).view(2, ROWS, -1) + 0.75 * b,
    "a second, of addmm by name": lambda x, w, b: (
        torch.addmm(input=b, mat1=x.flatten(0, 1), mat2=w.T / 2, beta=0.25, alpha=2).view(2, ROWS, -1) + 0.75 * b
    ),
    "a second, of addmm on the left": lambda x, w, b: (
        torch.addmm(0.25 * b[:, None], w, x.flatten(0, 1).T) + 0.75 * b[:, None]
    ).T.unflatten(0, (2, ROWS)),
    "after addmm of nothing": lambda x, w, b: (
        torch.addmm(torch.full_like(b, torch.nan), x.flatten(0, 1), w.T, beta=0).view(2, ROWS, -1) + b
    ),
    "a second, of baddbmm": lambda x, w, b: (
        torch.baddbmm(0.25 * b[None, None], x, w.T.expand(len(x), -1, -1)) + 0.75 * b
    ),
    "three": lambda x, w, b: F.linear(x, w, b) + b - b,
    "taken from": lambda x, w, b: b - F.linear(x, -w),
    "taken from, with another": lambda x, w, b: 2 * b - F.linear(x, -w, b),
    "more than once": lambda x, w, b: torch.add(x @ w.T, 0.5 * b, alpha=2),
    "inner": lambda x, w, b: torch.inner(x, w) + b,
    "inner, on the left": lambda x, w, b: (torch.inner(w, x) + b[:, None, None]).permute(1, 2, 0),
    "in parts": lambda x, w, b: torch.cat(
        [part + c for part, c in zip((x @ w.T).split((2, OUT - 2), -1), b.split((2, OUT - 2)), strict=True)], -1
    ),
    "in parts, before and after": lambda x, w, b: torch.cat(
        [F.linear(x, w, 0.5 * b)[..., :2] + 0.5 * b[:2], F.linear(x, w, 0.25 * b)[..., 2:] + 0.75 * b[2:]], -1
    ),
    "in parts of a convolution": lambda x, w, b: (
        torch.cat(
            [
                part + c[:, None]
                for part, c in zip(F.conv1d(x.mT, w[:, :, None]).tensor_split(2, 1), b.tensor_split(2), strict=True)
            ],
            1,
        ).mT
    ),
    "of the output's shape": lambda x, w, b: (lambda y: y + b.expand_as(y))(x @ w.T),
    "of the output's type": lambda x, w, b: (lambda y: y + b.to(y, copy=True))(x @ w.T),
    "of the input's type": lambda x, w, b: x @ w.T.to(x, copy=True) + b.to(x, copy=True),
    "both widened": lambda x, w, b: torch.add(*torch.broadcast_tensors(x @ w.T, b)),
    "less, by keyword": lambda x, w, b: torch.sub(x @ w.T, other=b, alpha=-1),
}
WHOLE = 8
"""What whole numbers are divided by, as where weights are quantised."""


def quantised(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``layer(x, w, b)`` with weights of whole numbers, eight times as large."""
    return lambda x, w, b: layer(x, (WHOLE * w).round(), b)


SCALED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "times a number": lambda x, w, b: F.linear(x, w) * (1 / WHOLE) + b,
    "times a row": lambda x, w, b: torch.full((OUT,), 1 / WHOLE).double() * (x @ w.T) + b,
    "times a column": lambda x, w, b: F.linear(x, w) * torch.full((2, ROWS, 1), 1 / WHOLE).double() + b[None],
    "over a number": lambda x, w, b: F.linear(x, w, WHOLE / 2 * b) / WHOLE + 0.5 * b,
    "over two, and moved": lambda x, w, b: ((x @ w.T / 2).view(-1, OUT) / (WHOLE // 2) + b).view(2, ROWS, OUT),
}


class Model(nn.Module):
    """A layer and a layer; the first has its bias in some spelling."""

    def __init__(self, layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.w, self.b = nn.Parameter(noise(OUT, WIDTH, seed=1)), nn.Parameter(noise(OUT, seed=2))
        self.v = nn.Parameter(noise(OUT, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x, self.w, self.b)) @ self.v


def relevance(layer: Callable[..., Tensor], recipe: lrpx.Recipe, *, ledger: bool = False) -> Tensor:
    model, x = Model(layer).requires_grad_(False), noise(2, ROWS, WIDTH, seed=4)
    with lrpx.propagate(model, recipe, observe=(), ledger=ledger) as trace:
        out = model(x)
        trace.explain(out.sum())
    with torch.no_grad():
        assert torch.equal(out, model(x))
    found = trace.source_relevance(trace.sources[0])
    assert not ledger or trace.ledger().closes(1e-9)
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("equation", ["bsd,bsd,od->bso", "bsd,od,bsd->bso"])
def test_a_bias_after_an_einsum_of_a_gate_a_signal_and_a_weight(equation: str, rule: str) -> None:
    """The gate is multiplied first, and what is left is the layer."""

    def at_once(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        gate = torch.sigmoid(x[..., :1]).expand_as(x)
        return torch.einsum(equation, gate, *((x, w) if equation[4:7] == "bsd" else (w, x))) + b

    def in_turns(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(x[..., :1]).expand_as(x) * x, w, b)

    recipe = replace(lrpx.LRP, linear=RULES[rule])
    torch.testing.assert_close(relevance(at_once, recipe), relevance(in_turns, recipe))


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", LAYERS)
def test_a_bias_after_the_product_is_the_layers(spelling: str, rule: str, ledger: bool) -> None:
    kind = "convolution" if "conv" in spelling else "linear"
    recipe = replace(lrpx.LRP, **{kind: RULES[rule]})
    whole = (lambda x, w, b: F.conv1d(x.mT, w[:, :, None], b).mT) if kind == "convolution" else F.linear
    found, wanted = (relevance(layer, recipe, ledger=ledger) for layer in (LAYERS[spelling], whole))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_bias_behind_a_convolution_whose_channels_are_last_in_memory(rule: str, ledger: bool) -> None:
    """As `input_projections[i](x).flatten(2) + level_embed[i][:, None]` of a OneFormer, whose batch is laid out so."""

    def behind(x: Tensor, w: Tensor, b: Tensor, layout: torch.memory_format = torch.channels_last) -> Tensor:
        image = x.mT.unflatten(-1, (ROWS, 1)).expand(-1, -1, -1, 2).contiguous(memory_format=layout)
        made = F.conv2d(image, w[..., None, None], 0.5 * b)
        return (made.flatten(2) + 0.5 * b[None, :, None]).mT

    def in_order(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return behind(x, w, b, torch.contiguous_format)

    recipe = replace(lrpx.LRP, convolution=RULES[rule])
    found, wanted = (relevance(layer, recipe, ledger=ledger) for layer in (behind, in_order))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", SCALED)
def test_a_bias_after_the_scale_of_quantised_weights_is_the_layers(spelling: str, rule: str, ledger: bool) -> None:
    recipe = replace(lrpx.LRP, linear=RULES[rule])
    whole = quantised(lambda x, w, b: F.linear(x, w / WHOLE, b))
    found, wanted = (relevance(layer, recipe, ledger=ledger) for layer in (quantised(SCALED[spelling]), whole))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("rule", RULES)
def test_what_is_normalised_has_no_bias(rule: str) -> None:
    """A batch norm that is written out is as one in one function."""
    recipe = replace(lrpx.LRP, linear=RULES[rule])
    scale, zero = noise(OUT, seed=7).abs(), torch.zeros(OUT).double()

    def written(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w) * scale + b

    def at_once(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(F.linear(x, w).mT, zero, zero + 1, scale, b, eps=1e-30).mT

    found, wanted = (relevance(layer, recipe) for layer in (written, at_once))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("rule", RULES)
def test_a_mask_is_no_bias(rule: str) -> None:
    """As where words are forbidden: what it makes nothing of has no relevance, and the others have theirs."""
    recipe, forbidden = replace(lrpx.LRP, linear=RULES[rule]), torch.tensor([0, 0, -torch.inf, 0, 0]).double()
    found, wanted = (
        relevance(layer, recipe)
        for layer in (
            lambda x, w, b: (F.linear(x, w, b) + forbidden).clamp(min=-1e3),
            lambda x, w, b: F.linear(x, w, b).masked_fill(forbidden < 0, -1e3),
        )
    )
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("rule", RULES)
def test_the_bias_of_experts_is_the_layers(rule: str) -> None:
    """A mixture of experts multiplies all at once, and adds the bias of each to its rows."""
    recipe = replace(lrpx.LRP, linear=RULES[rule])

    def at_once(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(x, torch.stack([w.T, w.T.flip(0)])) + torch.stack([b, -b])[:, None]

    def apart(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.stack([F.linear(x[0], w, b), F.linear(x[1], w.flip(1), -b)])

    found, wanted = (relevance(layer, recipe) for layer in (at_once, apart))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


@pytest.mark.parametrize("rule", RULES)
def test_a_bias_of_heads_is_the_layers(rule: str) -> None:
    """It is added where the last dimension has been split, as Transformer-XL adds one to its queries, or where heads
    that were computed apart are one dimension again."""
    recipe = replace(lrpx.LRP, linear=RULES[rule])

    def by_heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        w, b = torch.cat([w, w[:1]]), torch.cat([b, b[:1]]).view(2, 3)
        return ((x @ w.T).view(*x.shape[:2], 2, 3) + b).flatten(2)[..., :OUT]

    def joined(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        w, b = torch.cat([w, w[:1]]).view(2, 3, -1), torch.cat([b, b[:1]])
        return (torch.einsum("btd,ohd->btoh", x, w).flatten(2) + b)[..., :OUT]

    def whole(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, torch.cat([w, w[:1]]), torch.cat([b, b[:1]]))[..., :OUT]

    wanted = relevance(whole, recipe)
    for layer in (by_heads, joined):
        assert float((relevance(layer, recipe) - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


class Apart(nn.Module):
    """A layer without a bias, to which the model around it adds one, as a language-model head may have it."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, OUT, bias=not outside, dtype=torch.float64)
        self.proj.weight = nn.Parameter(noise(OUT, WIDTH, seed=1))
        self.b, self.v = nn.Parameter(noise(OUT, seed=2)), nn.Parameter(noise(OUT, seed=3))
        if not outside:
            self.proj.bias = self.b

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        return torch.tanh(y + self.b if self.proj.bias is None else y) @ self.v


@pytest.mark.parametrize("others", [None, Epsilon(0.3)])
@pytest.mark.parametrize("rule", RULES)
def test_a_bias_has_the_rule_of_the_module_that_the_layer_is_in(rule: str, others: Epsilon | None) -> None:
    recipe = lrpx.LRP if others is None else replace(lrpx.LRP, linear=others)
    found = []
    for outside in (True, False):
        model = Apart(outside=outside)
        with lrpx.propagate(model, recipe.at("proj", linear=RULES[rule]), observe=()) as trace:
            trace.explain(model(noise(2, ROWS, WIDTH, seed=4)).sum())
        found.append(trace.source_relevance(trace.sources[0]))
    assert float((found[0] - found[1]).abs().max()) <= 1e-12 * float(found[1].abs().max())


def of_experts(spelling: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Each row has a layer of its own, which the row itself chooses, and its bias."""
    weights, biases = torch.stack([w.T, w.T.flip(0)]), torch.stack([b, -b])
    rows = x.flatten(0, 1)
    chosen = (rows[:, 0] > 0).long()
    if spelling == "einsum":
        out = torch.einsum("ri,rio->ro", rows, weights[chosen]) + biases[chosen]
    elif spelling == "bmm":
        out = torch.bmm(weights.mT.index_select(0, chosen), rows[:, :, None]).squeeze(-1).add_(biases[chosen])
    elif spelling == "one by one":
        out = torch.stack([row @ weights[i] + biases[i] for row, i in zip(rows, chosen, strict=True)])
    else:
        out = torch.stack(
            [F.linear(row, weights[int(i)].T, biases[int(i)]) for row, i in zip(rows, chosen, strict=True)]
        )
    return out.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("spelling", ["einsum", "bmm", "one by one"])
@pytest.mark.parametrize("rule", RULES)
def test_what_a_router_chooses_is_a_layer(rule: str, spelling: str, ledger: bool) -> None:
    recipe = replace(lrpx.LRP, linear=RULES[rule])
    found, wanted = (relevance(partial(of_experts, how), recipe, ledger=ledger) for how in (spelling, "F.linear"))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


def test_one_hot_rows_are_no_layer() -> None:
    """They move: the rows of an identity matrix as ``one_hot``'s."""

    def moved(make: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        return make((-x[0, :, 0]).argsort()) @ x @ w.T

    def of_eye(at: Tensor) -> Tensor:
        return torch.eye(ROWS, dtype=torch.float64)[at]

    def one_hot(at: Tensor) -> Tensor:
        return F.one_hot(at, ROWS).double()

    recipe = replace(lrpx.LRP, linear=ZPlus())
    assert torch.equal(*(relevance(partial(moved, make), recipe) for make in (of_eye, one_hot)))


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("rule", RULES)
def test_all_implementations_of_experts_are_one(rule: str, implementation: str) -> None:
    config = GptOssConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2 if parameter.ndim == 1 else 0.0, 0.3)
    found = []
    for each in ("eager", implementation):
        model.set_experts_implementation(each)
        with lrpx.propagate(model, lrpx.LRP.at("*.experts", linear=RULES[rule]), observe=()) as trace:
            trace.explain(model(torch.tensor([[3, 1, 7, 5]])).logits[0, -1, 2])
        found.append(trace.source_relevance(trace.sources[0]))
    with lrpx.propagate(model, lrpx.LRP, observe=()) as trace:
        trace.explain(model(torch.tensor([[3, 1, 7, 5]])).logits[0, -1, 2])
    largest = float(found[0].abs().max())
    assert float((found[0] - found[1]).abs().max()) <= 1e-4 * largest
    assert float((found[0] - trace.source_relevance(trace.sources[0])).abs().max()) > 1e-2 * largest


@pytest.mark.parametrize("rule", RULES)
def test_what_was_made_of_the_input_is_no_bias(rule: str) -> None:
    """Nor is it with a ledger open, whose leaf stands for it."""

    def layer(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        return F.linear(x, w) + x.detach().mean((0, 1)) @ w.T

    recipe = replace(lrpx.LRP, linear=RULES[rule])
    found, wanted = (relevance(layer, recipe, ledger=ledger) for ledger in (True, False))
    assert float((found - wanted).abs().max()) <= 1e-12 * float(wanted.abs().max())


def test_what_is_not_the_same_for_each_row_is_no_bias() -> None:
    """Positions are constants beside the layer, also where there is only one."""
    recipe = replace(lrpx.LRP, linear=Gamma(0.5))
    for rows in (1, ROWS):
        positions = noise(rows, OUT, seed=5)

        def beside(x: Tensor, w: Tensor, _: Tensor, p: Tensor = positions) -> Tensor:
            return F.linear(x[:, : len(p)], w) + p

        def apart(x: Tensor, w: Tensor, _: Tensor, p: Tensor = positions) -> Tensor:
            return F.linear(x[:, : len(p)], w).clone() + p

        assert torch.equal(relevance(beside, recipe), relevance(apart, recipe))


class BiasBehind(nn.Module):
    """The first of two layers has no bias of its own, and some of its outputs have one that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split(3, -1)
        return self.second(torch.cat([a + self.bias, b], -1).relu())


@pytest.mark.parametrize("keep", [True, False])
def test_the_outputs_of_a_layer_whose_bias_comes_later(keep: bool) -> None:
    """The rule goes from the sum to the layer's input; what arrives at the sum is what arrived between the two."""
    torch.manual_seed(0)
    model, x = BiasBehind().double(), noise(1, 4, seed=0)
    found = []
    for recipe in (lrpx.ATTNLRP, replace(lrpx.ATTNLRP, linear=Epsilon(0.0))):
        with lrpx.propagate(model, recipe, observe=["first"]) as trace:
            value = model(x)[0, 1]
            trace.explain(value, keep=keep)
            if keep:
                trace.explain(value)
        found.append(trace.relevance("first"))
        total = float(trace.relevance("first", of="input").sum())
        if recipe is lrpx.ATTNLRP:
            assert float(found[0].sum()) == pytest.approx(total)
    assert found[0].count_nonzero() > 2
    torch.testing.assert_close(found[1], found[0])


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda y, b: (y + b).relu(),
    "taken from it": lambda y, b: (b - y).relu(),
    "taken from it twice": lambda y, b: ((b - y) - b - (b - (2 * b - y))).relu(),
    "of a part, the others in another order": lambda y, b: (
        (y[:, :2] + b[:2]).relu().sum() + (y.mT @ noise(3, 2, seed=7)).relu().sum()
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_arrives_at_a_layer_whose_bias_comes_later(name: str) -> None:
    """A layer without a bias of its own, under ε = 0: its output has what its input has."""

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bias = nn.Linear(4, 6, bias=False), nn.Parameter(noise(6, seed=1))

        def forward(self, x: Tensor) -> Tensor:
            return SUMS[name](self.first(x), self.bias)

    torch.manual_seed(0)
    model, x = Later().double(), noise(3, 4, seed=0)
    found = []
    for recipe in (lrpx.ATTNLRP, replace(lrpx.ATTNLRP, linear=Epsilon(0.0))):
        with lrpx.propagate(model, recipe, observe=["first"]) as trace:
            trace.explain(model(x).sum())
        found.append(trace.relevance("first"))
    assert found[0].count_nonzero() > 2
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("how", ["off the bias", "more dimensions"])
def test_the_outputs_of_a_layer_that_are_taken_off_a_bias_or_are_widened_by_it(how: str) -> None:
    """What arrives at ``b − z`` arrives at ``z`` with the other sign; a bias may have more dimensions."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 3, bias=False)
            self.bias = nn.Parameter(torch.ones(1, 1, 3))

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.first(x)
            return (self.bias[0, 0] - z if how == "off the bias" else z + self.bias).flatten()

    torch.manual_seed(0)
    model, x = Behind().double(), noise(1, 4, seed=0)
    z = model.first(x).detach()
    for recipe in (lrpx.ATTNLRP, replace(lrpx.ATTNLRP, linear=Epsilon(0.1))):
        with lrpx.propagate(model, recipe, observe=["first"]) as trace:
            trace.explain(model(x).sum())
        torch.testing.assert_close(trace.relevance("first"), -z if how == "off the bias" else z)


def test_the_outputs_of_a_quantised_layer_that_scales_before_its_bias_comes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[2.0, -1, 3], [1, 4, -2]], dtype=torch.float64))
            self.scale = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) * self.scale

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bias = Scaled(), nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.bias

    model, x = Behind(), noise(1, 3, seed=0)
    with lrpx.propagate(model, replace(lrpx.ATTNLRP, linear=Epsilon(0.1)), observe=["first"]) as trace:
        trace.explain(model(x).sum())
    torch.testing.assert_close(trace.relevance("first"), model.first(x).detach())


class Pooled(nn.Module):
    """Additive attention over places; ``apart``: the bias of the layer that makes the scores is added after the
    product."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.keys, self.scores, self.values = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.tanh(self.keys(x))
        scores = keys @ self.scores.weight.T + self.scores.bias if self.apart else self.scores(keys)
        return (scores.softmax(1) * self.values(x)).sum(1)


class MixedHeads(nn.Module):
    """Attention whose weights a layer mixes over the heads; ``apart``: its bias is added after the product."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.qkv, self.mix, self.out = nn.Linear(4, 12), nn.Linear(2, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT).softmax(-1)
        if self.apart:
            mixed = torch.einsum("bhij,gh->bgij", weights, self.mix.weight) + self.mix.bias[:, None, None]
        else:
            mixed = self.mix(weights.movedim(1, -1)).movedim(-1, 1)
        return x + self.out((mixed @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("build", [Pooled, MixedHeads])
def test_what_projects_is_known_where_the_bias_comes_later(build: type[nn.Module], recipe: lrpx.Recipe) -> None:
    found = []
    x = noise(2, 5, 4, seed=1)
    for apart in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = build(apart).double()
        with lrpx.propagate(model, recipe) as trace:
            trace.explain(model(x)[0].sum())
        found.append(trace.relevance("x"))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-12)
