"""Positions have the same relevance however a model writes down what it does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx import ATTNLRP, PA_LRP, Explainer, Task
from lrpx.engine import propagate
from lrpx.engine._positions import Positions
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEADS, EACH = 16, 2, 8
REST, LENGTHS = torch.float64, (7, 5)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=REST) / 2


ANGLES = torch.outer(torch.arange(32, dtype=REST), 100 ** -(torch.arange(0, EACH, 2, dtype=REST) / EACH)).repeat(1, 2)
IDS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(4))
MASK = torch.arange(7) < torch.tensor(LENGTHS)[:, None]


class Model(nn.Module):
    """Two layers of attention, with positions in the embeddings (``add``) or in queries and keys (``turn``)."""

    def __init__(self, add: Callable[..., Tensor] | None = None, turn: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.add, self.turn = add, turn
        self.tokens = nn.Embedding(11, WIDTH, _weight=noise(11, WIDTH, seed=0))
        self.places = nn.Parameter(noise(32, WIDTH, seed=1))
        self.layers = nn.ParameterList(noise(4, WIDTH, WIDTH, seed=seed) for seed in (2, 3))
        self.cos, self.sin = nn.Buffer(ANGLES.cos()), nn.Buffer(ANGLES.sin())

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.tokens(ids)
        x = x if self.add is None else self.add(x, self.places, length)
        allowed = mask[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril()
        for weights in self.layers:
            q, k, v, out = weights
            q, k, v = (F.linear(x, w).view(rows, length, HEADS, EACH).transpose(1, 2) for w in (q, k, v))
            if self.turn is not None:
                q, k = (self.turn(each, self.cos[:length], self.sin[:length]) for each in (q, k))
            scores = (q @ k.mT).masked_fill(~allowed, -1e30)
            x = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), out)
        return x @ self.tokens.weight.T


def found(model: Model, ids: Tensor, mask: Tensor, row: int = 0, at: int = -1) -> tuple[Tensor, Tensor]:
    """The relevance of each token, and of its position."""
    with torch.no_grad():
        plain = model(ids, mask)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        logits = model(ids, mask)
        trace.explain(logits[row, at, 3])
    assert torch.equal(logits, plain)
    assert trace.ledger().closes(1e-9)
    kept = trace.positions()
    assert kept
    of_places = torch.stack([each.relevance[row] for each in kept]).sum(0)
    return trace.source_relevance(trace.sources[0])[row].sum(-1), of_places


def turned(x: Tensor) -> Tensor:
    return torch.cat((-x[..., EACH // 2 :], x[..., : EACH // 2]), -1)


def turned_as_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turned(x) * sin


TURNS: dict[str, Callable[..., Tensor]] = {
    "added to a product": lambda x, cos, sin: torch.addcmul(x * cos, turned(x), sin),
    "and in place": lambda x, cos, sin: (x * cos).addcmul_(sin, turned(x)),
    "in place": lambda x, cos, sin: (x * cos).add_(turned(x).mul_(sin)),
    "einsum": lambda x, c, s: torch.einsum("bhtd,td->bhtd", x, c) + torch.einsum("td,bhtd->bhtd", s, turned(x)),
    "einsum, moved": lambda x, c, s: torch.einsum("bhtd,td->dthb", x, c).permute(3, 2, 1, 0) + turned(x) * s,
    "einsum, dots": lambda x, c, s: torch.einsum("...td,td->...td", x, c) + torch.einsum("...,...", turned(x), s),
    "heads last": lambda x, c, s: turned_as_one(x.transpose(1, 2), c[:, None], s[:, None]).transpose(1, 2),
    "by keyword": lambda x, c, s: torch.add(torch.mul(x, other=c), other=torch.mul(input=turned(x), other=s)),
}

ADDS: dict[str, Callable[..., Tensor]] = {
    "cast": lambda x, table, n: x + table[:n].to(torch.complex128).real,
    "scaled": lambda x, table, n: x + table[:n] * 2 / 2,
    "without a gradient": lambda x, table, n: x + table.detach()[:n].requires_grad_(False),
    "dropped": lambda x, table, n: x + F.dropout(table[:n], training=False).clone(),
    "put together": lambda x, table, n: x + torch.cat([table[:n, :4], table[:n, 4:]], -1),
    "split": lambda x, table, n: x + table.split([n, len(table) - n])[0],
    "chunks of its length": lambda x, table, n: x + table.split(n)[0],
    "chosen": lambda x, table, n: x + table.index_select(0, torch.arange(n)),
    "for each row": lambda x, table, n: x + table[None, :n].repeat(len(x), 1, 1),
    "of a list": lambda x, table, n: x + F.embedding(torch.tensor([*range(n)]), table),
    "of a row of a list": lambda x, table, n: x + F.embedding(torch.as_tensor([[*range(n)]]), table),
    "counted of a mask": lambda x, table, n: x + F.embedding((torch.arange(n) < n).cumsum(0) - 1, table),
    "sums of a mask": lambda x, table, n: (
        x + F.embedding((torch.arange(n)[:, None] >= torch.arange(n)).sum(1) - 1, table)
    ),
    "of no zeros": lambda x, table, n: x + F.embedding(torch.ones(n).nonzero()[:, 0], table),
    "of indices": lambda x, table, n: x + F.embedding(torch.tril_indices(n, 1)[0], table),
    "one of many": lambda x, table, n: x + (torch.arange(n)[:, None] == torch.arange(len(table))).to(table) @ table,
    "with a factor": lambda x, table, n: torch.add(x, table[:n] * 2, alpha=0.5),
}
CASES = [*((Model(turn=turn), Model(turn=turned_as_one)) for turn in TURNS.values())]
CASES += [(Model(add=add), Model(add=lambda x, table, n: x + table[:n])) for add in ADDS.values()]


@pytest.mark.parametrize(("model", "plain"), CASES, ids=[*TURNS, *ADDS])
def test_positions_in_another_spelling(model: Model, plain: Model) -> None:
    for row, length in enumerate(LENGTHS):  # alone, and beside another row, padded
        ids, mask = IDS[row : row + 1, :length], MASK[row : row + 1, :length]
        wanted = found(plain, ids, mask)
        assert all(float(each.abs().max()) > 1e-3 for each in wanted)
        for mine, its in zip(found(model, ids, mask), wanted, strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)
        for mine, its in zip(found(model, IDS, MASK, row, length - 1), wanted, strict=True):
            assert torch.allclose(mine[:length], its, rtol=1e-9, atol=1e-12)
            assert not mine[length:].any()


def test_a_table_that_is_joined_to_the_features_is_one_of_positions() -> None:
    """As the same rows were that are looked up by their numbers: beside other positions they were constants."""
    weights = noise(WIDTH, 2 * WIDTH, seed=5)

    def joined(x: Tensor, rows: Tensor) -> Tensor:
        return F.linear(torch.cat([x, rows.expand_as(x)], -1), weights)

    cut, looked_up = (
        Model(lambda x, table, n: joined(x, table[:n]), turned_as_one),
        Model(lambda x, table, n: joined(x, F.embedding(torch.arange(n), table)), turned_as_one),
    )
    for mine, its in zip(found(cut, IDS, MASK, 1, 4), found(looked_up, IDS, MASK, 1, 4), strict=True):
        assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "add",
    [
        lambda x, table, n: torch.addcmul(x, table[0], F.embedding(torch.arange(n), table)),
        lambda x, table, n: torch.addcdiv(x, table[:n], 1 + table[0] ** 2),
        lambda x, table, n: torch.lerp(x, table[:n].expand_as(x), 0.5),
    ],
    ids=["addcmul", "addcdiv", "lerp"],
)
def test_positions_that_are_multiplied_and_added_by_one_function_are_refused(add: Callable[..., Tensor]) -> None:
    """Beside other positions they were constants."""
    with pytest.raises(MethodError, match=r"which multiplies them before it adds.*write its sum and its product"):
        found(Model(add, turned_as_one), IDS, MASK)


@pytest.mark.parametrize(
    "meet",
    [
        lambda x, table, n: torch.maximum(x, table[:n]),
        lambda x, table, n: torch.where(x > 0, x, table[:n]),
        lambda x, table, n: torch.stack([x, table[:n].expand_as(x)]).sum(0),
        lambda x, table, n: torch.index_add(x, 1, torch.arange(n), table[:n].expand_as(x)),
    ],
    ids=["maximum", "where", "stack", "index_add"],
)
def test_a_table_that_meets_the_tokens_otherwise_than_by_a_sum_is_refused(meet: Callable[..., Tensor]) -> None:
    """Beside other positions it was a constant."""
    with pytest.raises(MethodError, match=r"differs by place.*positions|neither a sum nor a product"):
        found(Model(meet, turned_as_one), IDS, MASK)


def test_positions_that_are_counted_from_the_last_key_do_not_hang_on_padding() -> None:
    """MPT's ALiBi is 0 at the last key, which is padding in a shorter row of a batch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tf.MptConfig(vocab_size=30, d_model=16, n_layers=2, n_heads=2, max_seq_len=32)
        explain = Explainer(tf.MptForCausalLM(config).double().eval())
    rows = [[5, 9, 11, 3, 8, 7, 21], [4, 17, 6]]
    for row, beside in zip(rows, explain(rows, 9, method="pa-lrp-single-sink"), strict=True):
        alone = explain(row, 9, method="pa-lrp-single-sink")
        pairs = [(a.relevance.clone(), a.parts["positions"].values.clone()) for a in (alone, beside)]
        for one, other in zip(*pairs, strict=True):
            assert float(one.abs().max()) > 0
            assert torch.allclose(one, other, rtol=0, atol=1e-6 * float(one.abs().max()))  # its softmax is in float32


class Biased(nn.Module):
    """Attention with a bias for each pair of places, to which the mask is added, or the scores first."""

    def __init__(self, *, is_mask_first: bool) -> None:
        super().__init__()
        self.is_mask_first = is_mask_first
        self.table, self.slopes = nn.Embedding(30, 16, _weight=noise(30, 16, seed=0)), noise(4, 1, 1, seed=1)
        self.layers = nn.ParameterList(noise(4, 16, 16, seed=seed) for seed in (2, 3))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        x, places = self.table(input_ids), torch.arange(input_ids.shape[1])
        bias = self.slopes * (places - places[:, None])
        mask = torch.full((len(places), len(places)), -torch.inf, dtype=REST).triu(1)
        for q, k, v, out in self.layers:
            q, k, v = (F.linear(x, each).unflatten(-1, (4, 4)).transpose(1, 2) for each in (q, k, v))
            scores = q @ k.mT + (bias + mask) if self.is_mask_first else q @ k.mT + bias + mask
            x = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), out)
        return x @ self.table.weight.T


@pytest.mark.parametrize("length", range(2, 9))
def test_biases_are_the_keys_where_a_mask_was_added_to_them(length: int) -> None:
    """It hides more of one dimension than of the other where the text is of an even length."""
    wanted, found = (
        Explainer(Biased(is_mask_first=first).eval(), task=Task.CAUSAL)(
            [5, 9, 11, 3, 8, 7, 21, 4][:length], 7, method="pa-lrp-single-sink"
        )
        for first in (False, True)
    )
    torch.testing.assert_close(found.relevance, wanted.relevance)
    torch.testing.assert_close(found.parts["positions"].values, wanted.parts["positions"].values)


class Turned(nn.Module):
    """Attention with ALiBi, whose scores have the keys first, or last."""

    def __init__(self, read: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = read
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        places = torch.arange(input_ids.shape[1])
        far = (places[:, None] - places).abs() * -0.5  # [query, key], and [key, query] alike
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.read is None:
            return self.head(x + (q @ k.mT + far).softmax(-1) @ v)
        return self.head(x + self.read(k @ q.mT + far) @ v)


KEYS_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over the first": lambda scores: scores.softmax(-2).mT,
    "turned, then softmax": lambda scores: scores.mT.softmax(-1),
    "scaled, turned": lambda scores: (scores * 1.0).transpose(1, 2).softmax(2),
}


@pytest.mark.parametrize("how", KEYS_FIRST)
def test_positions_of_scores_that_have_the_keys_first_are_refused(how: str) -> None:
    """All of them were the queries'."""
    explainer = Explainer(Turned(KEYS_FIRST[how]).double().eval(), task=Task.CAUSAL)
    for method in ("pa-lrp", "pa-lrp-single-sink"):
        with pytest.raises(MethodError, match="with the keys before the queries"):
            explainer([5, 9, 11, 3], 7, method=method)
    Explainer(Turned(None).double().eval(), task=Task.CAUSAL)([5, 9, 11, 3], 7, method="pa-lrp")


def over_sums_by_einsum(scores: Tensor) -> Tensor:
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return torch.einsum("...ij,...i->...ij", exponentials, 1 / exponentials.sum(-1))


class Softmaxed(nn.Module):
    """Attention with learned positions."""

    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.softmax = softmax
        self.tokens = nn.Embedding(11, WIDTH, _weight=noise(11, WIDTH, seed=0))
        self.places = nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=1))
        self.weights = nn.Parameter(2 * noise(3, WIDTH, WIDTH, seed=2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (F.linear(x, w) for w in self.weights)
        x = x + self.softmax(q @ k.mT) @ v
        return F.linear(x, self.tokens.weight)


def test_a_softmax_by_einsum_is_one_beside_positions() -> None:
    """The reciprocal of its sum was an unknown constant there, and the exponentials had all."""
    found = []
    for softmax in (over_sums_by_einsum, lambda scores: scores.softmax(-1)):
        with propagate(model := Softmaxed(softmax), PA_LRP, observe=()) as trace:
            trace.explain(model(IDS[:1])[0, -1, 3])
        found.append(trace.source_relevance(trace.sources[0])[0].sum(-1))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class _Sliced(nn.Module):
    """Rotary angles that are kept for all lengths, and cut to the text's and copied, or looked up by its places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(10, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 48, bias=False)])
        self.head = nn.Linear(16, 10, bias=False)
        angles = torch.arange(32)[:, None].double() * 100.0 ** -(torch.arange(8) % 4 / 4)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("angles", angles[:, :4].clone())

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        rows, count, _ = x.shape
        places = slice(count) if self.how != "looked up" else torch.arange(count)
        cos, sin = self.cos[places], self.sin[places]
        if self.how == "copied":
            cos, sin = cos.clone(), sin * 1
        elif self.how == "halves":
            angles = self.angles[places]
            cos, sin = (torch.cat([each, each], -1)[None, None] for each in (angles.cos(), angles.sin()))
        q, k, v = (each.view(rows, count, 2, 8).transpose(1, 2) for each in self.layers[0](x).chunk(3, -1))
        q, k = (each * cos + torch.cat([-each[..., 4:], each[..., :4]], -1) * sin for each in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("count", [7, 8, 9])
@pytest.mark.parametrize("how", ["cut", "copied", "halves"])
def test_a_text_as_long_as_a_head_is_wide(how: str, count: int) -> None:
    found = []
    for each in (how, "looked up"):
        torch.manual_seed(0)
        model = _Sliced(each).double().eval()
        explainer = Explainer(model, task=Task.CAUSAL)
        found.append(explainer([1, 2, 3, 4, 5, 6, 7, 8, 9][:count], 3, method="pa-lrp").parts["positions"].values)
    torch.testing.assert_close(*found)


class _Tables(nn.Module):
    """One layer of attention whose biases are cut from longer tables."""

    def __init__(self, how: str, *, longest: int = 16) -> None:
        super().__init__()
        self.how, self.scores = how, torch.empty(0)
        self.table = nn.Embedding(30, 16, _weight=noise(30, 16, seed=0))
        self.weights = nn.Parameter(noise(4, 16, 16, seed=3))
        self.pairs = nn.Parameter(2 * noise(4, longest, longest, seed=4))
        self.last = nn.Parameter(2 * noise(longest, longest, 4, seed=5))
        self.keys = nn.Buffer(2 * noise(1, 4, 1, longest, seed=6))
        self.rows = nn.Parameter(2 * noise(longest, 4, seed=7))
        self.sink = nn.Parameter(noise(1, 4, 1, 1, seed=8))
        self.mask = nn.Buffer(torch.full((1, 1, longest, longest), -1e9, dtype=REST).triu(1))

    def bias(self, n: int) -> Tensor:
        return {
            "pairs": lambda: self.pairs[:, :n, :n],
            "pairs and mask": lambda: self.pairs[None, :, :n, :n] + self.mask[..., :n, :n],
            "one of all heads": lambda: self.pairs[0, :n, :n] + self.mask[..., :n, :n],
            "heads last": lambda: self.last[:n, :n].permute(2, 0, 1),
            "narrowed": lambda: self.pairs.narrow(1, 0, n).narrow(2, 0, n) * 2,
            "keys": lambda: self.keys[..., :n],
            "keys and mask": lambda: self.keys[..., :n] + self.mask[..., :n, :n],
            "keys, copied": lambda: self.keys[..., -n:].clone(),
            "keys, expanded": lambda: self.keys[..., :n].expand(1, 4, n, n),
            "keys in rows": lambda: self.rows[:n].T[None, :, None],
            "keys beside a sink": lambda: self.keys[..., :n],
        }[self.how]()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v, out = self.weights
        q, k, v = (F.linear(x, w).unflatten(-1, (4, 4)).transpose(1, 2) for w in (q, k, v))
        self.scores = scores = q @ k.mT + self.bias(ids.shape[1])
        if self.how == "keys beside a sink":
            scores = torch.cat([scores, self.sink.expand(len(ids), 4, ids.shape[1], 1)], -1)
        mixed = scores.softmax(-1)[..., : ids.shape[1]] @ v
        return (x + F.linear(mixed.transpose(1, 2).flatten(2), out)) @ self.table.weight.T


@pytest.mark.parametrize("longest", [16, 4])  # 4: as long as the text
@pytest.mark.parametrize(
    "how",
    "pairs|pairs and mask|one of all heads|heads last|narrowed|keys|keys and mask|keys, copied|keys, expanded|"
    "keys in rows|keys beside a sink".split("|"),
)
def test_a_table_that_is_cut_to_the_texts_length_is_the_keys_along_what_was_cut(how: str, longest: int) -> None:
    """However many heads there are: by its shape alone a text of as many tokens as heads is none or the heads'."""
    model = _Tables(how, longest=longest)
    for length in (2, 3, 4, 8):
        if length > longest:
            continue
        ids = torch.tensor([[5, 9, 11, 3, 8, 7, 21, 4][:length]])
        value = model(ids)[0, -1, 3]
        (gradient,) = torch.autograd.grad(value, model.scores)
        bias = model.bias(length).detach().expand(1, 4, length, length)
        if how.startswith("keys") and how not in ("keys and mask", "keys beside a sink"):
            bias = bias - bias[..., :1]
        wanted = (0.5 * bias * gradient).sum((0, 1, 2))  # the product with the values halves the gradient
        with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
            trace.explain(model(ids)[0, -1, 3])
        (kept,) = trace.positions()
        assert float(wanted.abs().max()) > 1e-3
        torch.testing.assert_close(kept.relevance[0], wanted, rtol=1e-9, atol=1e-12)
        assert trace.ledger().closes(1e-9)


def test_what_is_cut_to_as_many_features_as_there_are_tokens_is_no_position() -> None:
    """The bias of the first half of a layer, where the text is as long as that is wide."""

    class Halved(Softmaxed):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + (self.tokens(ids)[..., :8] + self.bias[:8]).sum(-1, keepdim=True)

    model = Halved(lambda scores: scores.softmax(-1))
    model.bias = nn.Parameter(noise(16, seed=3))
    for length in (7, 9):
        with propagate(model, PA_LRP, observe=()) as trace:
            trace.explain(model(torch.arange(length)[None] % 11)[0, -1, 3])
        assert [kept.layer for kept in trace.positions()] == ["input"]
    with (
        pytest.raises(MethodError, match=r"a table of shape \[8\] is of keys or of features"),
        propagate(model, PA_LRP),
    ):
        model(torch.arange(8)[None])


class _Folded(_Tables):
    """ALiBi as a feature of the keys, which meets ones in the queries."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v, out = self.weights
        q, k, v = (F.linear(x, w).unflatten(-1, (4, 4)).transpose(1, 2) for w in (q, k, v))
        places = torch.arange(ids.shape[1], dtype=REST)[:, None].expand(len(ids), 4, -1, 1)
        q = torch.cat([q, torch.ones_like(places)], -1) if self.how == "joined" else F.pad(q, (0, 1), value=1.0)
        k = torch.cat([k, places * self.sink], -1)
        mixed = (q @ k.mT).softmax(-1) @ v
        return (x + F.linear(mixed.transpose(1, 2).flatten(2), out)) @ self.table.weight.T


@pytest.mark.parametrize("how", ["joined", "padded"])
def test_biases_that_are_a_feature_of_the_keys_are_refused(how: str) -> None:
    """They had half of what they have where they are added to scores."""
    model = _Folded(how)
    with pytest.raises(MethodError, match="positions are joined to the features"), propagate(model, PA_LRP):
        model(IDS)


COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "counted": lambda mask: mask.cumsum(-1) - 1,
    "bounded": lambda mask: (mask.cumsum(-1) - 1).clamp(min=0),
    "filled": lambda mask: (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1),
    "from the end": lambda mask: torch.arange(mask.shape[1]) - (mask.shape[1] - mask.sum(-1, keepdim=True)),
    "in a loop": lambda mask: torch.stack([torch.arange(len(row)) - int((row == 0).sum()) for row in mask]).clamp(
        min=0
    ),
}


class _Counted(nn.Module):
    """Attention whose places are counted from the mask, and turn queries and keys or are looked up."""

    def __init__(self, how: str, *, is_rotary: bool) -> None:
        super().__init__()
        self.how, self.is_rotary = how, is_rotary
        self.table, self.places = (nn.Embedding(30, 16, _weight=noise(30, 16, seed=seed)) for seed in (0, 1))
        self.weights = nn.Parameter(noise(4, 16, 16, seed=3))
        self.frequencies = nn.Buffer(3.0 ** -torch.arange(4, dtype=REST).repeat(2))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, places = self.table(ids), COUNTS[self.how](mask)
        x = x if self.is_rotary else x + self.places(places.clamp(min=0))
        q, k, v, out = self.weights
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (q, k, v))
        if self.is_rotary:
            angles = places[:, None, :, None] * self.frequencies
            q, k = (turned_as_one(each, angles.cos(), angles.sin()) for each in (q, k))
        allowed = mask[:, None, None].bool() & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mixed = (q @ k.mT).masked_fill(~allowed, -1e30).softmax(-1) @ v
        return (x + F.linear(mixed.transpose(1, 2).flatten(2), out)) @ self.table.weight.T


@pytest.mark.parametrize("is_rotary", [True, False])
@pytest.mark.parametrize("how", COUNTS)
def test_places_that_are_counted_from_the_mask_are_met_behind_padding(how: str, *, is_rotary: bool) -> None:
    """Where the padding was moved, none were met; where a place was moved to the opposite one, its cosine was not."""
    model = _Counted(how, is_rotary=is_rotary)
    for length, before in ((1, 1), (2, 3), (3, 1), (5, 3)):
        found = []
        for padding in (0, before):
            ids = torch.tensor([[0] * padding + [5, 9, 11, 3, 8][:length]])
            with propagate(model, PA_LRP, observe=()) as trace:
                trace.explain(model(ids, (ids > 0).long())[0, -1, 3])
            found.append(sum(kept.relevance[0, padding:] for kept in trace.positions()))
            assert trace.positions()
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_tokens_that_are_all_at_one_place_have_positions() -> None:
    """Another place is none of theirs."""
    ids, mask = torch.tensor([[5, 9, 11]]), torch.tensor([[1, 0, 0]])
    model = _Counted("counted", is_rotary=True)  # 0, 0 and 0
    with propagate(model, PA_LRP, observe=()) as trace:
        trace.explain(model(ids, mask)[0, 0, 3])
    assert trace.positions()


class _Whole(_Tables):
    """Biases of keys that are kept as long as the text, and are not cut."""

    def bias(self, n: int) -> Tensor:
        return {"of heads": self.keys, "of all heads": self.keys[0, 0], "a row": self.keys[0, 0, 0]}[self.how]


@pytest.mark.parametrize("how", ["of heads", "of all heads"])
@pytest.mark.parametrize("length", [3, 4, 5])  # there are 4 heads
def test_a_bias_of_keys_that_is_as_long_as_the_text_is_theirs(how: str, length: int) -> None:
    """It was a constant, and beside other positions without a word."""
    model, ids = _Whole(how, longest=length), torch.tensor([[5, 9, 11, 3, 8][:length]])
    (gradient,) = torch.autograd.grad(model(ids)[0, -1, 3], model.scores)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        trace.explain(model(ids)[0, -1, 3])
    (kept,) = trace.positions()
    bias = model.bias(length).detach().expand(1, 4, length, length)
    wanted = (0.5 * (bias - bias[..., :1]) * gradient).sum((0, 1, 2))
    assert float(wanted.abs().max()) > 1e-3
    torch.testing.assert_close(kept.relevance[0], wanted, rtol=1e-9, atol=1e-12)
    assert trace.ledger().closes(1e-9)


def test_a_row_of_keys_that_is_as_long_as_the_text_is_refused() -> None:
    """Of as many features a product's norm has weights."""
    model = _Whole("a row", longest=5)
    with propagate(model, PA_LRP), pytest.raises(MethodError, match=r"what differs by place, of shape \[5\], is"):
        model(torch.tensor([[5, 9, 11, 3, 8]]))


class _Normalised(_Tables):
    """Biases of distances over the query's place, as FIRE has them, half of which are cut off at zero."""

    def bias(self, n: int) -> Tensor:
        places = torch.arange(n, dtype=REST)
        far = (places[:, None] - places).abs().log1p() / places.clamp(min=1).log1p()[:, None]
        return F.linear(
            F.relu(F.linear(far[..., None], self.rows[:4, :1] * 4, self.rows[0])), self.last[0, :4]
        ).permute(2, 0, 1)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(ids) + 0 * attention_mask[..., None]


@pytest.mark.parametrize("count", range(1, 6))
def test_biases_that_are_the_same_for_one_query_at_another_place_are_the_keys(count: int) -> None:
    """Of a padded batch the first place is tried, and one query less than there are had another number."""
    model, ids = _Normalised("pairs"), torch.tensor([[5, 9, 11, 3, 8], [7, 21, 4, 6, 2]])
    mask = torch.arange(5) < torch.tensor([[count], [5]])
    value = model(ids, mask)[1, -1, 3]
    (gradient,) = torch.autograd.grad(value, model.scores)
    with propagate(model, PA_LRP, observe=()) as trace:
        trace.explain(model(ids, mask)[1, -1, 3])
    (kept,) = trace.positions()
    wanted = (0.5 * model.bias(5).detach() * gradient).sum((1, 2))
    assert float(wanted.abs().max()) > 1e-3
    torch.testing.assert_close(kept.relevance, wanted, rtol=1e-9, atol=1e-12)


class _Compared(_Tables):
    """Biases that are made of comparisons alone, and hide nothing."""

    def bias(self, n: int) -> Tensor:
        places = torch.arange(n)
        far = places[:, None] - places
        if self.how == "the first alone":
            return (places == 0) * self.sink[0]
        is_so = {"near": far.abs() < 2, "behind": far > 0}[self.how]
        return torch.where(is_so, self.rows[0][:, None, None], self.rows[1][:, None, None])


@pytest.mark.parametrize("how", ["near", "behind"])
@pytest.mark.parametrize("length", [3, 5, 8])
def test_what_comparisons_add_to_scores_without_hiding_any_is_the_keys(how: str, length: int) -> None:
    model, ids = _Compared(how), torch.tensor([[5, 9, 11, 3, 8, 7, 21, 4][:length]])
    value = model(ids)[0, -1, 3]
    (gradient,) = torch.autograd.grad(value, model.scores)
    with propagate(model, PA_LRP, observe=(), ledger=True) as trace:
        trace.explain(model(ids)[0, -1, 3])
    (kept,) = trace.positions()
    wanted = (0.5 * model.bias(length).detach() * gradient).sum((0, 1, 2))
    assert float(wanted.abs().max()) > 1e-3
    torch.testing.assert_close(kept.relevance[0], wanted, rtol=1e-9, atol=1e-12)
    assert trace.ledger().closes(1e-9)


def test_a_bias_of_the_first_place_alone_is_refused_by_name() -> None:
    model = _Compared("the first alone")
    with pytest.raises(MethodError, match="what has another row for each token"), propagate(model, PA_LRP):
        model(torch.tensor([[5, 9, 11]]))


def test_what_is_looked_up_by_nobodys_numbers_is_refused_by_name() -> None:
    """It was a source of its own, and no token's."""
    model = Model(lambda x, table, n: x + F.embedding(torch.tensor([*range(n)][::-1]), table), turned_as_one)
    with pytest.raises(MethodError, match=r"let the model count places by torch\.arange"), propagate(model, PA_LRP):
        model(IDS, MASK)


def test_positions_of_as_many_tokens_as_features_are_no_biases_of_pairs() -> None:
    """The sum of a table's rows up to each place, which at another place differs for several."""

    def add(x: Tensor, table: Tensor, n: int) -> Tensor:
        return x + (torch.arange(n)[:, None] >= torch.arange(32)).to(table) @ table / 4

    ids, model = torch.arange(17)[None] % 11, Model(add)
    mask = ids >= 0
    wanted = found(model, ids[:, :12], mask[:, :12], at=5)
    for mine, its in zip(found(model, ids, mask, at=5), wanted, strict=True):
        torch.testing.assert_close(mine[:12], its, rtol=1e-9, atol=1e-12)
    with pytest.raises(MethodError, match="nothing tells which dimension"), propagate(model, PA_LRP):
        model(ids[:, :16], mask[:, :16])


ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "every fourth alike": lambda table, n: F.embedding(torch.arange(n) % 4, table),
    "to a bound": lambda table, n: F.embedding(torch.arange(n).clamp(max=2), table),
    "of numpy": lambda table, n: torch.from_numpy(np.outer(np.arange(n), np.ones(table.shape[-1]))).sin(),
    "row by row": lambda table, n: torch.tensor([[i / n] * table.shape[-1] for i in range(n)], dtype=REST),
}


class _Rows(_Counted):
    """Rotary angles, and rows of another kind for the places, added or multiplied."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        name, _, read = self.how.partition(", ")
        rows = ROWS[read or name](self.places.weight, ids.shape[1])
        self.how, before = "counted", self.how
        x = super().forward(ids, mask)[..., :16]
        self.how = before
        return x * rows if name == "times" else x + rows


@pytest.mark.parametrize("how", [*ROWS, *(f"times, {each}" for each in ROWS)])
def test_rows_for_tokens_of_which_nothing_tells_what_they_are_are_refused_by_name(how: str) -> None:
    """They were constants, and what they have was nobody's, beside angles that were positions."""
    model = _Rows(how, is_rotary=True)
    with pytest.raises(MethodError, match="what has another row for each token"), propagate(model, PA_LRP):
        model(IDS, MASK)
    with propagate(model, ATTNLRP, observe=()) as trace:
        trace.explain(model(IDS, MASK)[0, -1, 3])


class _Typed(nn.Module):
    """An encoder whose places are scaled by the first row of a table of two, and a decoder."""

    def __init__(self, first: int | slice) -> None:
        super().__init__()
        self.first = first
        self.table, self.places = (nn.Embedding(30, 16, _weight=noise(30, 16, seed=seed)) for seed in (0, 1))
        self.types, self.weights = nn.Parameter(noise(2, 16, seed=2)), nn.Parameter(noise(3, 16, 16, seed=3))

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        x, y = (self.table(ids) + self.places(torch.arange(ids.shape[1])) for ids in (input_ids, decoder_input_ids))
        q, k, v = self.weights
        x = x * self.types[self.first]
        return (y + ((y @ q) @ (x @ k).mT).softmax(-1) @ (x @ v)) @ self.table.weight.T


def test_a_row_of_a_table_is_none_of_the_decoders_only_token() -> None:
    """A slice of one row has as many rows as the decoder has tokens, and was met by five."""
    found = []
    for first in (0, slice(0, 1)):
        model = _Typed(first)
        with propagate(model, PA_LRP, observe=()) as trace:
            trace.explain(model(torch.tensor([[5, 9, 11, 3, 8]]), torch.tensor([[7]]))[0, -1, 3])
        found.append([each.relevance for each in trace.positions()] + [trace.source_relevance(trace.sources[0])])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


OTHER_PLACES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a class token": lambda m, x: _with(m, torch.cat([m.learned[None, :1], x], 1)),
    "a class token, as long": lambda m, x: torch.cat([m.learned[None, :1], x], 1) + m.others,
    "the text twice": lambda m, x: _with(m, torch.cat([x, x.flip(1)], 1)),
    "blocks": lambda m, x: _with(m, x.reshape(2, 3, WIDTH)),
    "means of blocks": lambda m, x: _with(m, x.unflatten(1, (3, 2)).mean(2)),
    "every other": lambda m, x: _with(m, F.conv1d(x.mT, m.kernel, stride=2).mT),
    "channels first": lambda m, x: (x.mT + m.turned[:, :, :6]).mT,
    "channels first, as long": lambda m, x: (x.mT + m.long).mT,
    "channels first, times": lambda m, x: (x.mT * m.turned[:, :, :6]).mT,
}


def _with(model: nn.Module, x: Tensor) -> Tensor:
    return x + model.learned[: x.shape[1]]


class Again(nn.Module):
    """A text whose places are known, and a learned table that is met after it."""

    def __init__(self, meet: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.meet, self.tokens = meet, nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=0))
        self.learned, self.turned, self.long = (
            nn.Parameter(noise(*shape, seed=1)) for shape in ((32, WIDTH), (1, WIDTH, 32), (WIDTH, 6))
        )
        self.kernel = nn.Parameter(noise(WIDTH, WIDTH, 2, seed=2))
        self.others, self.block = (nn.Parameter(noise(size, WIDTH, seed=3)) for size in (7, 3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + torch.arange(input_ids.shape[1])[:, None] / 7
        return self.meet(self, x).tanh().sum((0, 1))


@pytest.mark.parametrize("how", OTHER_PLACES)
def test_a_table_that_differs_by_place_and_has_no_row_for_each_token_is_refused(how: str) -> None:
    """They were constants, and what they have was nobody's, beside positions that were known."""
    model = Again(OTHER_PLACES[how])
    told = "nothing tells whether what differs by place"
    with pytest.raises(MethodError, match=told), propagate(model, PA_LRP, observe=()):
        model(IDS[:1, :6])


def test_a_table_of_what_reads_a_text_is_no_position() -> None:
    """Latents are cut from a longer table as positions are, and have no places of the text."""

    def read(model: nn.Module, x: Tensor) -> Tensor:
        latents = model.learned[None, :3]
        return latents + (latents @ x.mT).softmax(-1) @ x + model.turned.mT[:, :3]

    with propagate(model := Again(read), PA_LRP, observe=()) as trace:
        trace.explain(model(IDS[:1, :6])[3])
    assert [each.relevance.shape for each in trace.positions()] == [(1, 6)]


KEPT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "heads": lambda m, x: (x.unflatten(-1, (2, -1)) + m.learned[:2, : WIDTH // 2]).flatten(2),
    "layers": lambda m, x: (torch.stack([x, x.tanh(), x.sin()], 2) + m.block).sum(2),
    "experts": lambda m, x: (x.repeat(3, 1, 1).reshape(3, -1, WIDTH) + m.block[:, None]).sum(0)[None],
    "taps": lambda m, x: (F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1) * m.block.mT).sum(-1),
}


@pytest.mark.parametrize("how", KEPT)
def test_what_differs_by_head_layer_expert_or_tap_is_no_position(how: str) -> None:
    with propagate(model := Again(KEPT[how]), PA_LRP, observe=()) as trace:
        trace.explain(model(IDS[:1, :6])[3])
    assert [each.relevance.shape for each in trace.positions()] == [(1, 6)]


@pytest.mark.parametrize("lengths", [(5, 1), (1, 5), (1, 1)])
def test_a_table_whose_rows_are_kept_apart_is_cut_to_a_text_beside_one_token(lengths: tuple[int, int]) -> None:
    """``[places, 1, d]``, as in torch's tutorial: a dimension of one was taken for another that was cut."""
    found = []
    for is_flat in (True, False):
        model = Tutorial(is_flat=is_flat)
        with propagate(model, PA_LRP, observe=()) as trace:
            trace.explain(model(IDS[:1, : lengths[0]], IDS[1:, : lengths[1]])[3])
        found.append([each.relevance for each in trace.positions()])
    assert {each.shape[-1] for each in found[0]} == set(lengths)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Tutorial(nn.Module):
    """A text that reads another; their positions are a buffer."""

    def __init__(self, *, is_flat: bool) -> None:
        super().__init__()
        self.is_flat, self.tokens = is_flat, nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=0))
        self.table = nn.Buffer(noise(32, 1, WIDTH, seed=1))

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        table = self.table.flatten(1) if self.is_flat else self.table
        x, y = (
            self.tokens(ids) + (table[: ids.shape[1]] if self.is_flat else table[: ids.shape[1]].transpose(0, 1))
            for ids in (input_ids, other_ids)
        )
        return (x + (x @ y.mT).softmax(-1) @ y).tanh().mean((0, 1))


class Pictured(nn.Module):
    """Patches of an image, to which positions are added, or joined, in a spelling of its own; and attention."""

    def __init__(self, place: Callable[[Pictured, Tensor], Tensor]) -> None:
        super().__init__()
        self.place = place
        self.patches = nn.Parameter(noise(8, 3, 4, 4, seed=0))
        self.table, self.rows, self.columns = (nn.Parameter(noise(n, 8, seed=n)) for n in (16, 4, 5))
        self.cls = nn.Parameter(noise(1, 8, 1, seed=2))
        self.weights = nn.Parameter(noise(4, 8, 8, seed=1))
        self.mix = nn.Parameter(noise(8, 16, seed=3))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.place(self, F.conv2d(pixels, self.patches, stride=4))  # [B, 8, 4, 4] to [B, 16, 8]
        q, k, v, out = (F.linear(x, w) for w in self.weights)
        return ((q @ k.mT).softmax(-1) @ v * out).mean(1)

    def joined(self, x: Tensor, table: Tensor, dim: int) -> Tensor:
        x = torch.cat([x, table.expand(len(x), *table.shape[1:])], dim)
        return F.linear(x if dim == -1 else x.flatten(2).mT, self.mix)


def of_pictures(place: Callable[[Pictured, Tensor], Tensor], count: int = 1) -> Tensor:
    """The positions of the first image."""
    with propagate(model := Pictured(place), PA_LRP, observe=(), ledger=True) as trace:
        trace.explain(model(noise(2, 3, 16, 16, seed=4)[:count])[:, 3].sum())
    assert trace.ledger().closes(1e-9)
    (kept,) = trace.positions()
    assert float(kept.relevance.abs().max()) > 1e-3
    return kept.relevance[0]


ADDED_TO_PICTURES: dict[str, Callable[[Pictured, Tensor], Tensor]] = {
    "a map": lambda m, x: (x + m.table.T.reshape(8, 4, 4)).flatten(2).mT,
    "columns": lambda m, x: (x.flatten(2) + m.table.T).mT,
    "columns, for each row": lambda m, x: (F.relu(x.flatten(2)).neg().neg() + m.table.T.expand(len(x), 8, 16)).mT,
    "a sound's map": lambda m, x: (F.conv1d(x.flatten(2), torch.eye(8, dtype=REST)[..., None]) + m.table.T).mT,
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ADDED_TO_PICTURES)
def test_positions_that_are_added_where_the_channels_come_first_are_the_places(how: str, count: int) -> None:
    """They were the features': a list of 8, whose sum was right."""
    is_gated = how == "columns, for each row"
    wanted = of_pictures(lambda m, x: (F.relu(x) if is_gated else x).flatten(2).transpose(1, 2) + m.table)
    torch.testing.assert_close(of_pictures(ADDED_TO_PICTURES[how], count), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", ADDED_TO_PICTURES)
def test_features_that_come_before_an_images_places_are_no_heads(how: str) -> None:
    """By head, each of the 8 features was one."""
    with propagate(model := Pictured(ADDED_TO_PICTURES[how]), PA_LRP, taps=[Positions(model, by_head=True)]) as trace:
        trace.explain(model(noise(1, 3, 16, 16, seed=4))[0, 3])
    (kept,) = trace.positions(by_head=True)
    assert kept.heads is None
    assert kept.relevance.shape == (1, 1, 16)


def test_the_rows_of_a_batch_that_come_behind_the_tokens_are_no_heads() -> None:
    """By head, a model of [T, B, d] had a head for each text."""
    turned = Model(lambda x, table, n: (x.transpose(0, 1) + table[:n, None]).transpose(0, 1))
    with propagate(turned, PA_LRP, taps=[Positions(turned, by_head=True)]) as trace:
        trace.explain(turned(IDS[:1], MASK[:1])[0, -1, 3])
    (kept,) = trace.positions(by_head=True)
    assert kept.heads is None


@pytest.mark.parametrize("how", ["heads behind the tokens", "heads before the tokens"])
def test_heads_of_a_text_without_a_dimension_of_rows_are_heads(how: str) -> None:
    """As in models of texts that are put one after another, [T, H, d]: all were one."""

    def turned_alone(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if "before" in how:
            return turned_as_one(x[0], cos, sin)[None]
        return turned_as_one(x[0].transpose(0, 1), cos[:, None], sin[:, None]).transpose(0, 1)[None]

    found = []
    for turn in (turned_as_one, turned_alone):
        with propagate(model := Model(turn=turn), PA_LRP, taps=[Positions(model, by_head=True)]) as trace:
            trace.explain(model(IDS[:1], MASK[:1])[0, -1, 3])
        found.append([(each.heads, each.relevance) for each in trace.positions(by_head=True)])
    assert [heads for heads, _ in found[1]] == [HEADS]
    torch.testing.assert_close(found[1][0][1], found[0][0][1], rtol=1e-9, atol=1e-12)


JOINED_TO_PICTURES: dict[str, Callable[[Pictured, Tensor], Tensor]] = {
    "rows": lambda m, x: m.joined(x.flatten(2).mT, m.table[None], -1),
    "columns": lambda m, x: m.joined(x.flatten(2), m.table.T[None], 1),
    "a map": lambda m, x: m.joined(x, m.table.T.reshape(1, 8, 4, 4), 1),
    "a map, looked up": lambda m, x: m.joined(x, F.embedding(torch.arange(16), m.table).T.reshape(1, 8, 4, 4), 1),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", JOINED_TO_PICTURES)
def test_positions_that_are_joined_to_an_images_features_are_the_places(how: str, count: int) -> None:
    """In a batch of two, and in a map, they were constants."""

    def added(m: Pictured, x: Tensor) -> Tensor:
        return F.linear(x.flatten(2).mT, m.mix[:, :8]) + F.linear(m.table, m.mix[:, 8:])

    found = of_pictures(JOINED_TO_PICTURES[how], count)
    torch.testing.assert_close(found, of_pictures(added), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_a_class_token_that_comes_before_an_images_columns_is_no_position(count: int) -> None:
    """It had a number for each of its features, of one image alone."""

    def beside(m: Pictured, x: Tensor) -> Tensor:
        return torch.cat([m.cls.expand(len(x), -1, -1), x.flatten(2)], -1).mT

    with propagate(model := Pictured(beside), PA_LRP, observe=()) as trace:
        trace.explain(model(noise(count, 3, 16, 16, seed=4))[:, 3].sum())
    assert trace.positions() == []


ROWS_AND_COLUMNS: dict[str, Callable[[Pictured, Tensor], Tensor]] = {
    "looked up": lambda m, x: (
        x.movedim(1, -1) + F.embedding(torch.arange(4), m.rows)[:, None] + F.embedding(torch.arange(4), m.columns)
    ).flatten(1, 2),
    "counted": lambda _, x: (x + torch.arange(4)[:, None] + torch.arange(4)).flatten(2).mT,
}


@pytest.mark.parametrize("how", ROWS_AND_COLUMNS)
def test_positions_of_rows_and_of_columns_have_no_sum(how: str) -> None:
    """The first row's and the first column's were one number, and so on."""
    with pytest.raises(MethodError, match=r"positions of rows and those of columns.*add one to the other before"):
        of_pictures(ROWS_AND_COLUMNS[how])


def test_tokens_that_are_joined_behind_their_features_are_no_positions() -> None:
    """What a convolution is given before the text: of a text as long as it has features, they were taken for places."""
    start, weights = nn.Parameter(noise(1, WIDTH, 2, seed=6)), noise(WIDTH, WIDTH, 3, seed=7)

    def begun(x: Tensor, _: Tensor, __: int) -> Tensor:
        return x + F.conv1d(torch.cat([model.start.expand(len(x), -1, -1), x.mT], -1), weights).mT

    model = Model(begun, turned_as_one)
    model.start = start
    for length in (5, WIDTH):
        ids = torch.arange(length)[None] % 11
        with propagate(model, PA_LRP, observe=()) as trace:
            if length == 5:
                model(ids, ids >= 0)
                tap = trace.tap(Positions)
                assert tap is not None
                assert len(tap.sinks) == 2 * 2 * 2  # layers, queries and keys, cosine and sine
                continue
            with pytest.raises(MethodError, match=r"whether what is joined, .* is of the tokens or more tokens"):
                model(ids, ids >= 0)


def of_places(how: str, times: int, x: Tensor, model: Pictured) -> Tensor:
    """A second attention, without a layer behind it, and a table for its rows."""
    table = model.table[None].repeat(times, 1, 1) if "repeated" in how else model.table[None].expand(times, -1, -1)
    table = F.embedding(torch.arange(16), model.table) if "looked up" in how else table
    if "multiplied" in how:
        return x * table
    if "linear" in how:
        return x + x.relu() @ (x.relu().mT @ x) / 16 + table
    weights = (x @ x.mT).relu() / 16 if "ReLU" in how else (x @ x.mT).softmax(-1)
    return x + weights @ x + table


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["linear", "ReLU", "softmax", "multiplied"])
def test_a_table_of_an_image_is_its_rows_however_many_images_there_are(how: str, count: int) -> None:
    """Repeated for two images it was a constant; behind a product with linear attention it was its features'."""
    wanted = of_pictures(lambda m, x: of_places(how + ", looked up", 1, x.flatten(2).mT, m))
    for spelled in ("expanded", "repeated"):
        found = of_pictures(lambda m, x, s=spelled: of_places(f"{how}, {s}", len(x), x.flatten(2).mT, m), count)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_factor", [False, True])
def test_a_table_that_meets_an_images_heads_is_refused(is_factor: bool, count: int) -> None:
    """Repeated for two images, or added, it was a constant beside other positions."""

    def place(m: Pictured, x: Tensor) -> Tensor:
        heads = (x.flatten(2).mT + m.table).unflatten(-1, (2, 4)).transpose(1, 2)
        table = m.table.detach()[:, :4].clone().expand(len(x), 1, -1, -1)
        return (heads * table if is_factor else heads + table).transpose(1, 2).flatten(2)

    with pytest.raises(MethodError, match=r"nothing tells whether what differs by place, .* is positions"):
        of_pictures(place, count)


LEFT: dict[str, Callable[[Pictured, Tensor], Tensor]] = {
    "a factor of each place": lambda m, x: x.flatten(2).mT * m.table.detach()[:, :1].exp(),
    "a factor of each place, channels first": lambda m, x: (x.flatten(2) * m.table.detach()[:, 0].exp()).mT,
    "a factor of each row": lambda m, x: (x * m.rows.detach()[:, :1].exp()).flatten(2).mT,
    "numpy's": lambda m, x: x.flatten(2).mT * torch.tensor(m.table.detach().numpy() + 2).exp(),
    "the larger": lambda m, x: torch.maximum(x.flatten(2).mT, m.table),
    "a choice": lambda m, x: torch.where(x.flatten(2).mT > 0, x.flatten(2).mT, m.table),
    "stacked": lambda m, x: torch.stack([x[0].flatten(1).mT, m.table]).sum(0)[None],
    "in columns": lambda m, x: x.flatten(2).permute(2, 0, 1).add(m.table[:, None]).transpose(0, 1),
    "of frames": lambda m, x: (x.flatten(2).mT.reshape(len(x), 4, 4, 8) + m.rows[:, None]).flatten(1, 2),
    "of as many places as a head is wide": lambda m, x: (
        (x.flatten(2).mT[:, :4].unflatten(2, (2, 4)).transpose(1, 2) * m.table.detach()[:4, :4].exp())
        .transpose(1, 2)
        .flatten(2)
    ),
    "of tiles": lambda m, x: (x.flatten(2).mT[:, None] + m.table).flatten(1, 2),
}


@pytest.mark.parametrize("how", LEFT)
def test_what_differs_by_place_and_is_not_known_to_be_positions_is_refused(how: str) -> None:
    """Beside other positions it was a constant."""
    with pytest.raises(MethodError, match=r"nothing tells whether"):
        of_pictures(lambda m, x: LEFT[how](m, x) + m.table)


def test_what_a_channel_or_a_head_has_is_no_position() -> None:
    """As layers' scales and normalisations, and the scales and biases of heads, in as many as there are places."""

    def place(m: Pictured, x: Tensor) -> Tensor:
        x = (x * m.table[:8, :1, None].exp() + m.table[:8, 1:2, None]).flatten(2) * m.table[:8, 2:3]
        heads = (x.mT * m.table[0] + m.table).unflatten(-1, (4, 2)).transpose(1, 2) + m.rows[:, None, :2]
        return (heads * m.rows[:, None, :1]).transpose(1, 2).flatten(2)

    assert len(of_pictures(place)) == 16


@pytest.mark.parametrize("count", [1, 2])
def test_a_bias_of_an_images_keys_is_theirs(count: int) -> None:
    """The same for every query, it was a constant, and beside other positions without a word."""

    def biased(m: Pictured, x: Tensor, bias: Tensor) -> Tensor:
        heads = x.flatten(2).mT.unflatten(-1, (2, 4)).transpose(1, 2)
        scores = heads @ heads.mT
        scores = (scores.permute(0, 2, 3, 1) * m.rows[0, :2]).permute(0, 3, 1, 2)  # no positions: a factor of heads
        return ((scores + bias).softmax(-1) @ heads).transpose(1, 2).flatten(2)

    found = of_pictures(lambda m, x: biased(m, x, m.table.T[:2, None]), count)
    wanted = of_pictures(lambda m, x: biased(m, x, F.embedding(torch.arange(16), m.table).T[:2, None]), count)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    with pytest.raises(MethodError, match=r"what differs by place, of shape \[16\], is positions"):
        of_pictures(lambda m, x: biased(m, x, m.table[:, 0]), count)


def test_what_the_colours_of_patches_have_is_refused() -> None:
    """As the frequencies of CSATv2's are normalised: it was three positions."""

    class Coloured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.mix = nn.Buffer(noise(3, 16, seed=1)), nn.Parameter(noise(8, 48, seed=2))

        def forward(self, pixels: Tensor) -> Tensor:
            x = pixels.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 16)
            return F.linear((x - self.mean).reshape(len(pixels), -1, 48), self.mix).mean(1)

    with propagate(model := Coloured(), PA_LRP, observe=()), pytest.raises(MethodError, match="an image's colours"):
        model(noise(1, 3, 16, 16, seed=4))


class Seen(nn.Module):
    """Attention over what a spelling makes of numbers that the model is given."""

    def __init__(self, place: Callable[[Seen, Tensor], Tensor], *shape: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.place = place
        self.kernel, self.table = nn.Parameter(noise(8, *kernel, seed=0)), nn.Parameter(noise(*shape, seed=5))
        self.cls, self.gate = nn.Parameter(noise(1, 8, 1, seed=2)), nn.Parameter(noise(8, 8, seed=3))
        self.weights = nn.Parameter(noise(3, 8, 8, seed=1))

    def conv(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.kernel) if x.ndim == 3 else F.conv2d(x, self.kernel, stride=4)

    def gated(self, x: Tensor) -> Tensor:
        gate = F.linear(x.flatten(2).mean(2), self.gate).sigmoid()
        return x * gate.reshape(*gate.shape, *(1 for _ in x.shape[2:]))

    def forward(self, given: Tensor) -> Tensor:
        x = self.place(self, given).flatten(2).mT
        q, k, v = (F.linear(x, w) for w in self.weights)
        return ((q @ k.mT).softmax(-1) @ v * v).mean(1)


def seen(place: Callable[[Seen, Tensor], Tensor], given: Tensor, *shape: int, kernel: tuple[int, ...]) -> None:
    """There is one sink, and what it has is what a table has by its gradients."""
    with propagate(model := Seen(place, *shape, kernel=kernel), PA_LRP, observe=(), ledger=True) as trace:
        trace.explain(model(given)[:, 3].sum())
    (kept,) = trace.positions()
    assert trace.ledger().closes(1e-9)
    places = model.table.shape[2:].numel()
    assert kept.relevance.shape == (len(given), places)
    # a constant has the share of all of its numbers, whatever its places are
    assert float(kept.relevance.sum()) == pytest.approx(trace.ledger().by_kind()["positions"])
    moved = Seen(lambda m, x: place(m, x), *shape, kernel=kernel)
    with torch.no_grad():
        moved.table[..., 1:] = 0
    with propagate(moved, PA_LRP, observe=()) as trace:
        trace.explain(moved(given)[:, 3].sum())
    found = trace.positions()[0].relevance.reshape(len(given), *shape[2:])
    assert bool((found[..., 0] != 0).all())
    assert bool((found[..., 1:] == 0).all())


SOUNDS: dict[str, Callable[[Seen, Tensor], Tensor]] = {
    "a class token before": lambda m, x: torch.cat([m.cls.expand(len(x), -1, -1), m.conv(x)], -1)[..., 1:] + m.table,
    "joined": lambda m, x: torch.cat([m.conv(x), m.conv(x)], -1)[..., :10] + m.table,
    "gated": lambda m, x: m.gated(m.conv(x)) + m.table,
    "a branch": lambda m, x: m.conv(x) + F.linear(m.conv(x).mT, m.gate).mT + m.table,
}
IMAGES: dict[str, tuple[Callable[[Seen, Tensor], Tensor], tuple[int, ...], int]] = {
    "added to pixels": (lambda m, x: m.conv(x + m.table), (1, 3, 16, 24), 3),
    "joined to pixels": (lambda m, x: m.conv(torch.cat([x, m.table.expand(len(x), -1, -1, -1)], 1)), (1, 2, 16, 24), 5),
    "stacked": (lambda m, x: m.conv(torch.hstack([x, m.table.expand(len(x), -1, -1, -1)])), (1, 2, 16, 24), 5),
    "by axis": (lambda m, x: m.conv(torch.cat([x, m.table.expand(len(x), -1, -1, -1)], axis=1)), (1, 2, 16, 24), 5),
    "gated": (lambda m, x: m.gated(m.conv(x)) + m.table, (1, 8, 4, 6), 3),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", SOUNDS)
def test_where_channels_are_is_followed_through_joins_gates_and_branches(how: str, count: int) -> None:
    """The features were listed as places."""
    seen(SOUNDS[how], noise(count, 6, 12, seed=4), 1, 8, 10, kernel=(6, 3))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", IMAGES)
def test_what_pixels_meet_before_a_convolution_has_the_places_of_the_pixels(how: str, count: int) -> None:
    """Of an image that is no square what was joined was a constant, and what was added had places of rows and channels;
    of a square, of columns alone."""
    place, shape, channels = IMAGES[how]
    seen(place, noise(count, 3, 16, 24, seed=4), *shape, kernel=(channels, 4, 4))
    if "gated" not in how:
        seen(place, noise(count, 3, 16, 16, seed=4), *shape[:2], 16, 16, kernel=(channels, 4, 4))


@pytest.mark.parametrize("how", ["added", "joined"])
def test_what_a_sound_meets_before_its_convolution_is_refused(how: str) -> None:
    """Nothing tells yet where its channels are: the features were listed, or it was a constant."""

    def place(m: Seen, x: Tensor) -> Tensor:
        return m.conv(x + m.table if how == "added" else torch.cat([x, m.table.expand(len(x), -1, -1)], 1).relu())

    with pytest.raises(MethodError, match=r"what meets an image or a sound before its convolution"):
        seen(place, noise(2, 6, 12, seed=4), 1, 6, 12, kernel=(6 if how == "added" else 12, 3))


def test_keys_that_are_joined_to_as_many_heads_as_features_are_no_positions() -> None:
    def place(m: Pictured, x: Tensor) -> Tensor:
        heads = x.flatten(2).mT.unflatten(-1, (2, 4))[..., :2] * 1
        null = m.table[:2, :2].expand(len(x), 1, 2, 2)
        return torch.cat([null, F.linear(heads, m.table[:2, :2])], 1).flatten(2).repeat(1, 1, 2)

    with pytest.raises(MethodError, match=r"nothing tells whether what is joined, .* is of the places"):
        of_pictures(place)


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("how", ["multiplied", "multiplied, for all channels", "added, for all channels"])
def test_a_table_of_a_map_that_is_no_summand_of_each_channel_is_refused(how: str, width: int) -> None:
    """Of a square its columns were listed as places, as of biases of pairs; else it was a constant."""

    def place(m: Seen, x: Tensor) -> Tensor:
        return m.conv(x) + m.table if "added" in how else m.conv(x) * m.table

    with pytest.raises(MethodError, match=r"nothing tells whether a table of shape .* is of the image's places"):
        seen(place, noise(2, 3, 16, width, seed=4), 1, 1 if "all" in how else 8, 4, width // 4, kernel=(3, 4, 4))


@pytest.mark.parametrize("count", [1, 2])
def test_a_table_of_the_one_block_that_an_image_is_has_its_places(count: int) -> None:
    """As NesT has in its last level, ``[B, 1, N, d]``: it was taken for one that is added to heads, and refused."""
    found = of_pictures(lambda m, x: (x.flatten(2).mT[:, None] + m.table[None, None]).squeeze(1), count)
    wanted = of_pictures(lambda m, x: x.flatten(2).mT + m.table)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Towers(nn.Module):
    """Two texts that are looked up first, or each before its layers, and read each other by cross-attention."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.tokens, self.places = (nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=seed)) for seed in (0, 1))
        self.first, self.second = (nn.ModuleList(Reads(seed) for seed in seeds) for seeds in ((2, 3), (4, 5)))

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        if self.order == "second first":
            y, x = (self.tokens(ids) for ids in (other_ids, input_ids))
        elif self.order == "first":
            x, y = (self.tokens(ids) for ids in (input_ids, other_ids))
        if self.order == "one by one":
            x, y = (self.tokens(ids) + self.places(torch.arange(ids.shape[1])) for ids in (input_ids, other_ids))
        else:
            x, y = (each + self.places(torch.arange(each.shape[1])) for each in (x, y))
        for first, second in zip(self.first, self.second, strict=True):
            x, y = first(x, y), second(y, x)
        return torch.cat([x.mean(1), y.mean(1)], -1)


class Reads(nn.Module):
    """Attention to another text, whose distances are added to scores and turn queries and keys by angles."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(noise(4, WIDTH, WIDTH, seed=seed))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        w = self.weights
        q, k = (
            turned_as_one(F.linear(of, weight).unflatten(-1, (HEADS, EACH)).transpose(1, 2), *angles(of.shape[1]))
            for of, weight in ((x, w[0]), (y, w[1]))
        )
        at = torch.arange(y.shape[1]) - torch.arange(x.shape[1])[:, None]
        scores = q @ k.mT - at.abs() * torch.tensor([0.5, 0.25])[:, None, None]
        values = F.linear(y, w[2]).unflatten(-1, (HEADS, EACH)).transpose(1, 2)
        return x + F.linear((scores.softmax(-1) @ values).transpose(1, 2).flatten(2), w[3])


def angles(length: int) -> tuple[Tensor, Tensor]:
    each = torch.outer(torch.arange(length), 100 ** -(torch.arange(0, EACH, 2, dtype=REST) / EACH)).repeat(1, 2)
    return each.cos(), each.sin()


def of_towers(order: str, length: int, *, recompute: bool) -> list[Tensor]:
    """By layer, the relevance of the positions of the first and the second text, of the first ``length`` tokens."""
    model, ids = Towers(order), (IDS[:1, :5], IDS[1:, :length])
    with propagate(model, PA_LRP, observe=(), recompute=recompute) as trace:
        trace.explain(model(*ids)[0, 3])
    kept = {(each.layer, torch.equal(each.source.ids, ids[0])): each.relevance for each in trace.positions()}
    return [kept[key] for key in sorted(kept)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["first", "second first"])
@pytest.mark.parametrize("length", [5, 4])
def test_positions_are_those_of_the_text_that_meets_them(order: str, length: int, *, recompute: bool) -> None:
    """Of two texts of one length the one that was looked up last had the positions of both."""
    found, wanted = (of_towers(each, length, recompute=recompute) for each in (order, "one by one"))
    assert len(found) == 10
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Spelled(nn.Module):
    """Reads another text, with scores, a mean of the other text and what is joined as they may be written."""

    def __init__(self, spelled: str) -> None:
        super().__init__()
        self.spelled, self.tokens = spelled, nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=0))
        self.weights = nn.Parameter(noise(3, WIDTH, WIDTH, seed=1))

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        x, y = (self.tokens(ids) for ids in (input_ids, other_ids))
        mean, at = y.mean(1, keepdim=True), torch.arange(x.shape[1])
        if self.spelled == "joined":
            joined = torch.cat([x, y], 1) @ self.weights[0]
            x, y = joined[:, : x.shape[1]], joined[:, x.shape[1] :]
        if self.spelled == "rows":
            x, y = (torch.cat([x, y], 0) + at[:, None] / 3).chunk(2, 0)
        if self.spelled == "stacked":
            x, y = (torch.stack([x, y], 1) + at[:, None] / 3).unbind(1)
        x = {"added": lambda: mean + x, "scaled": lambda: (1 + mean) * x, "wide": lambda: mean.expand_as(x) + x}.get(
            self.spelled, lambda: x
        )()
        x, y = x + at[:, None] / 7, y + at[:, None] / 5
        q, k, v = x @ self.weights[0], y @ self.weights[1], y @ self.weights[2]
        scores = {
            "turned": lambda: (k @ q.mT).mT,
            "permuted": lambda: (k @ q.mT).permute(0, 2, 1),
            "letters": lambda: torch.einsum("bqd,bkd->bqk", q, k),
            "keys first": lambda: torch.einsum("bkd,bqd->bqk", k, q),
            "two": lambda: q @ k.mT + q.flip(-1) @ k.mT,
        }.get(self.spelled, lambda: q @ k.mT)()
        return (x + (scores - (at - at[:, None]).abs() / 3).softmax(-1) @ v).mean(1)


def of_spelled(spelled: str) -> list[tuple[int, bool]]:
    """For each of the sinks its last dimension, and whether it is the second text's."""
    ids, taps = (IDS[:1, :5], IDS[1:, :5]), [Positions(model := Spelled(spelled))]
    with propagate(model, PA_LRP, observe=(), taps=taps) as trace:
        trace.explain(model(*ids)[0, 3])
    return [(sink.leaf.shape[-1], torch.equal(sink.source.ids, ids[1])) for sink in taps[0].sinks]


@pytest.mark.parametrize("spelled", [*"added scaled wide turned permuted letters two plain".split(), "keys first"])
def test_a_mean_of_another_text_has_no_rows_and_keys_may_be_written_first(spelled: str) -> None:
    """Positions of what was added to a mean of the other text, or scaled by it, were the other text's."""
    assert of_spelled(spelled) == [(1, False), (1, True), (5, True)]


@pytest.mark.parametrize("how", ["joined", "rows", "stacked"])
def test_positions_of_what_was_put_together_of_two_texts_are_refused(how: str) -> None:
    """Two texts as two rows of a batch had one sink for both, which was the first's."""
    with pytest.raises(MethodError, match="cut from rows of several inputs"):
        of_spelled(how)


CONTEXTS: dict[str, Callable[..., Tensor]] = {
    "repeated": lambda x, y: y.mean(1, keepdim=True).repeat(1, x.shape[1], 1) + x,
    "tiled, joined": lambda x, y: torch.cat([y.mean(1)[:, None].tile(1, x.shape[1], 1), x], -1)[..., 8:24],
    "by ones": lambda x, y: torch.ones(x.shape[1], 1, dtype=REST) @ y.mean(1, keepdim=True) + x,
    "read by columns": lambda x, y: (y @ x.mT).softmax(1).mT @ y + x,
    "read, turned": lambda x, y: (y @ x.mT).mT.softmax(-1) @ y,
    "added in place": lambda x, y: F.linear(x, torch.eye(WIDTH).to(x), x.new_zeros(WIDTH)).add_(y),
    "of sums": lambda x, y: (x[:, :, None] + y[:, None]).relu().sum(-1).softmax(-1) @ y + x,
    "of sums, by a vector": lambda x, y: ((x[:, :, None] + y[:, None]).relu() @ x.new_ones(WIDTH)).softmax(-1) @ y + x,
}


class Told(nn.Module):
    """Tells a text of another, adds positions to both, and attends."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.tokens = how, nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=0))

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        x, y = (self.tokens(ids) for ids in (input_ids, other_ids))
        x, at = CONTEXTS[self.how](x, y), torch.arange(x.shape[1])[:, None]
        return ((x + at / 7).tanh().sum(1) * (y + at / 5).tanh().mean(1)).sum(-1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("how", CONTEXTS)
def test_positions_are_those_of_the_text_whose_places_a_tensor_has(how: str, length: int, rows: int) -> None:
    """What was made of both texts had the places of the one that its functions were given first."""
    ids, taps = (IDS[:rows, :length], (IDS[:rows, -length:] + 3)), [Positions(model := Told(how))]
    with propagate(model, PA_LRP, observe=(), taps=taps) as trace:
        trace.explain(model(*ids)[-1])
    assert [torch.equal(sink.source.ids, ids[1]) for sink in taps[0].sinks] == [False, True]


@pytest.mark.parametrize("count", [1, 4])  # as many heads as there are tokens
@pytest.mark.parametrize("is_fused", [True, False])
def test_biases_are_those_of_the_keys_of_one_head_behind_a_norm(count: int, *, is_fused: bool) -> None:
    """The keys of one head were taken for what is the same in each row, and fused attention's for the queries'."""
    ids = IDS[:1, :4], IDS[1:, :4]
    taps = [Positions(model := Norms(count, is_fused=is_fused))]
    with propagate(model, PA_LRP, observe=(), taps=taps) as trace:
        trace.explain(model(*ids)[0, 3])
    assert [torch.equal(sink.source.ids, ids[1]) for sink in taps[0].sinks] == [False, True]


class Norms(nn.Module):
    """A text that reads another, and is read by it, with distances; a norm is behind each sum."""

    def __init__(self, heads: int, *, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.tokens = nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=0))
        self.weights = nn.Parameter(noise(2, WIDTH // heads, WIDTH, seed=1))

    def read(self, x: Tensor, y: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = -(at - at[:, None]).abs() * torch.arange(1, self.heads + 1, dtype=REST)[:, None, None]
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (F.linear(y, w)[:, None].expand(-1, self.heads, -1, -1) for w in self.weights)
        if self.is_fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        else:
            out = (q @ k.mT + bias).softmax(-1) @ v
        return F.layer_norm(out.transpose(1, 2).flatten(2) + x, (WIDTH,))

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        x, y = (self.tokens(ids) for ids in (input_ids, other_ids))
        y = self.read(y, x)
        return self.read(x, y).mean(1)


@pytest.mark.parametrize("length", [5, 1])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_positions_that_are_added_to_one_row_for_all_of_a_text_are_the_texts(length: int, *, is_in_place: bool) -> None:
    """As Kosmos-2.5's of a text without an image, and a language that is looked up once; they were of one place."""
    model, ids, kind = Kinds(), IDS[:1, :length], torch.tensor([[1]])
    found = []
    for model.how in ("rows", "in place" if is_in_place else "one row"):
        with propagate(model, PA_LRP, observe=()) as trace:
            trace.explain(model(ids, kind)[0, 3])
        found.append([sum(each.relevance for each in trace.positions())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Kinds(nn.Module):
    """Adds a row for what kind of text it is to its positions, or to its tokens."""

    how = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = (nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=seed)) for seed in (0, 1))

    def forward(self, input_ids: Tensor, kind: Tensor) -> Tensor:
        x, each = self.tokens(input_ids), self.kinds(kind)
        at = (torch.arange(x.shape[1])[:, None] / noise(1, WIDTH, seed=2) + 1)[None].clone()
        if self.how == "in place":
            at += each
        x = {"rows": lambda: x + at + each, "one row": lambda: x + (at + each)}.get(self.how, lambda: x + at)()
        return x.tanh().mean(1)


def test_what_was_cut_from_a_longer_text_is_not_that_of_a_text_as_long() -> None:
    """Positions of the rest of one text were those of another that has as many tokens."""
    model = Cut()
    with pytest.raises(MethodError, match="none of the tokens"), propagate(model, PA_LRP, observe=()):
        model(IDS[:1, :5], IDS[1:, :4])


class Cut(nn.Module):
    """Leaves the first token out before it adds positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH, _weight=noise(32, WIDTH, seed=0))

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        x, y = self.tokens(input_ids)[:, 1:], self.tokens(other_ids)
        return (x + torch.arange(x.shape[1])[:, None] / 7).mean(1) * y.mean(1)
