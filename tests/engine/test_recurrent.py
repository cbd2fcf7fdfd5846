"""Recurrent layers and cells: their equations' own relevance, and the same whatever torch has fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lrpx.engine import propagate
from lrpx.errors import UnknownOperationError
from lrpx.recipes import ATTNLRP, ATTNLRP_VIT, GRADIENT, LRP, LRP_VIT
from lrpx.rules import Gamma
from tests.reference import recurrent

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
TWINS = {"lstm": recurrent.lstm, "gru": recurrent.gru, "rnn": recurrent.simple}
RECIPES = [ATTNLRP, LRP, GRADIENT]
by_name = pytest.mark.parametrize("kind", LAYERS)
by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def made(kind: Any, *sizes: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(*sizes, **settings).double()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def explained(model: nn.Module, recipe: Any, x: Tensor, ledger: bool = True) -> tuple[Tensor, Any]:
    def first(out: Any) -> Tensor:
        return out if isinstance(out, Tensor) else first(out[0])

    with propagate(model, recipe, (), ledger=ledger) as trace:
        out = first(model(x))
        trace.explain((out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum())
    assert torch.equal(out, first(model(x)))
    if ledger:
        assert trace.ledger().closes(1e-12)
    return trace.source_relevance(trace.sources[0]), trace


@by_name
@pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)
def test_relevance_is_that_of_the_equations(kind: str, recipe: Any) -> None:
    model, x, seed = made(LAYERS[kind], 3, 4), noise(5, 3), noise(4)
    with propagate(model, recipe, ()) as trace:
        trace.explain((model(x)[0][-1] * seed).sum())
    weights = recurrent.Weights(*(p.detach().tolist() for p in model.parameters()))
    wanted = torch.tensor(TWINS[kind](x.tolist(), weights, 4, seed.tolist(), recipe is LRP), dtype=x.dtype)
    torch.testing.assert_close(trace.relevance("input"), wanted, rtol=1e-9, atol=1e-9)


class Spelled(nn.Module):
    """A layer of torch as its cell, step by step."""

    def __init__(self, kind: str, layer: Any) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer
        self.tanh = layer.nonlinearity == "tanh" if kind == "rnn" else True

    def cell(self, x: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        inputs, hidden = (
            nn.functional.linear(
                of, getattr(self.layer, f"weight_{name}{suffix}"), getattr(self.layer, f"bias_{name}{suffix}", None)
            )
            for of, name in ((x, "ih"), (state[0], "hh"))
        )
        if self.kind == "rnn":
            return ((inputs + hidden).tanh() if self.tanh else (inputs + hidden).relu(),)
        if self.kind == "gru":
            (r, z, n), (hr, hz, hn) = inputs.chunk(3, -1), hidden.chunk(3, -1)
            r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
            n = (n + r * hn).tanh()
            return ((1 - z) * n + z * state[0],)
        i, f, g, o = (inputs + hidden).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        projection = getattr(self.layer, "weight_hr" + suffix, None)
        return (h if projection is None else nn.functional.linear(h, projection), c)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        for number in range(layer.num_layers):
            made = []
            for direction in range(1 + layer.bidirectional):
                sizes = [getattr(layer, "proj_size", 0) or layer.hidden_size, layer.hidden_size]
                state = tuple(x.new_zeros(x.shape[1], size) for size in sizes)
                outputs = []
                for step in reversed(range(len(x))) if direction else range(len(x)):
                    state = self.cell(x[step], state, f"_l{number}" + "_reverse" * direction)
                    outputs.append(state[0])
                made.append(torch.stack(outputs[::-1] if direction else outputs))
            x = torch.cat(made, -1)
        return x


SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two, both ways": {"num_layers": 2, "bidirectional": True},
    "no biases": {"bias": False},
}


@by_name
@by_recipe
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_layer_is_its_cells(kind: str, recipe: Any, settings: str) -> None:
    layer, x = made(LAYERS[kind], 3, 4, **SETTINGS[settings]), noise(4, 2, 3)
    found, _ = explained(layer, recipe, x)
    wanted, _ = explained(Spelled(kind, layer), recipe, x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@by_recipe
def test_other_spellings_of_layers(recipe: Any) -> None:
    x = noise(4, 2, 3)
    projected = made(nn.LSTM, 3, 5, proj_size=2)
    torch.testing.assert_close(explained(projected, recipe, x)[0], explained(Spelled("lstm", projected), recipe, x)[0])
    relu = made(nn.RNN, 3, 4, nonlinearity="relu")
    torch.testing.assert_close(explained(relu, recipe, x)[0], explained(Spelled("rnn", relu), recipe, x)[0])
    first, second = made(nn.LSTM, 3, 4), made(nn.LSTM, 3, 4, batch_first=True)
    wanted = explained(first, recipe, x)[0]
    with propagate(second, recipe, ()) as trace:
        out = second(x.transpose(0, 1))[0].transpose(0, 1)
        trace.explain((out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum())
    torch.testing.assert_close(trace.relevance("input").transpose(0, 1), wanted)


@by_name
@by_recipe
def test_a_cell(kind: str, recipe: Any) -> None:
    cell = made(CELLS[kind], 3, 4)
    layer = made(LAYERS[kind], 3, 4)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    x = noise(2, 3)
    torch.testing.assert_close(explained(cell, recipe, x)[0], explained(layer, recipe, x[None])[0][0])


class Packed(nn.Module):
    def __init__(self, layer: nn.Module, lengths: list[int]) -> None:
        super().__init__()
        self.layer, self.lengths = layer, lengths

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor(self.lengths), enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], padding_value=0.5)[0]


@by_name
@by_recipe
def test_packed_rows_are_the_rows_one_by_one(kind: str, recipe: Any) -> None:
    layer, x, lengths = made(LAYERS[kind], 3, 4, 2, bidirectional=True), noise(5, 3, 3), [2, 5, 4]
    found, _ = explained(Packed(layer, lengths), recipe, x)
    weights = torch.linspace(0.5, 1.5, 5 * 3 * 8, dtype=x.dtype).view(5, 3, 8)
    for row, length in enumerate(lengths):
        with propagate(layer, recipe, ()) as trace:
            trace.explain((layer(x[:length, row])[0] * weights[:length, row]).sum())
        torch.testing.assert_close(found[:length, row], trace.relevance("input"), rtol=1e-9, atol=1e-9)
        assert not found[length:, row].any()


class Multiplied(nn.Module):
    """What a recurrent layer puts out, times what a linear layer makes of the input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.other = layer, made(nn.Linear, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return (out[0] if isinstance(out, tuple) else out) * self.other(x)


@by_name
@by_recipe
def test_what_a_layer_puts_out_is_as_much_a_gate_as_what_its_cells_do(kind: str, recipe: Any) -> None:
    """As where one text's states are multiplied with what its attention to another gives (ESIM)."""
    layer, x = made(LAYERS[kind], 3, 4, bidirectional=True), noise(4, 2, 3)
    found, _ = explained(Multiplied(layer), recipe, x)
    wanted, _ = explained(Multiplied(Spelled(kind, layer)), recipe, x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    packed, _ = explained(Multiplied(Packed(layer, [4, 4])), recipe, x)
    torch.testing.assert_close(packed, wanted, rtol=1e-9, atol=1e-9)


@by_name
@by_recipe
def test_what_a_cell_puts_out_is_as_much_a_gate_as_what_a_layer_does(kind: str, recipe: Any) -> None:
    cell, layer, x = made(CELLS[kind], 3, 8), made(LAYERS[kind], 3, 8), noise(2, 3)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    found, _ = explained(Multiplied(cell), recipe, x)
    wanted, _ = explained(Multiplied(Spelled(kind, layer)), recipe, x[None])
    torch.testing.assert_close(found, wanted[0], rtol=1e-9, atol=1e-9)


def test_a_given_state_that_depends_on_the_input_has_relevance() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = made(nn.LSTM, 3, 4, bias=False)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.layer(x, (h, h.tanh()))[0]

    model = Given()
    with propagate(model, LRP, (), ledger=True) as trace:
        value = trace.explain(model(noise(2, 1, 3), noise(1, 1, 4)).sum())
    assert trace.relevance("h").any()
    torch.testing.assert_close(trace.relevance("x").sum() + trace.relevance("h").sum(), value)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cp_lrp_conserves_without_biases(kind: str) -> None:
    x = noise(6, 2, 3)
    relevance, trace = explained(made(LAYERS[kind], 3, 4, 2, bias=False), LRP, x)
    assert relevance.sum().item() == pytest.approx(trace.ledger().explained, rel=1e-9)


@by_name
def test_a_rule_reaches_the_layers_inside(kind: str) -> None:
    layer, x, recipe = made(LAYERS[kind], 3, 4), noise(4, 2, 3), LRP.at(linear=Gamma(0.5))
    found, wanted = (explained(each, recipe, x, ledger=False)[0] for each in (layer, Spelled(kind, layer)))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found, explained(layer, LRP, x)[0])


def test_dropout_between_layers_is_refused_while_training() -> None:
    with (
        pytest.raises(UnknownOperationError, match=r"lstm with dropout .*eval\(\)"),
        propagate(model := made(nn.LSTM, 3, 4, 2, dropout=0.5), LRP) as trace,
    ):
        trace.explain(model(noise(4, 2, 3))[0].sum())
    assert explained(model.eval(), LRP, noise(4, 2, 3))[0].any()


class Attending(nn.Module):
    """A layer whose states are themselves queries, keys and values, as in the attention of Luong et al. (2015)."""

    def __init__(self, kind: str, *, both: bool) -> None:
        super().__init__()
        self.layer = made(LAYERS[kind], 6, 6, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(x)[0]
        return torch.softmax(states[:, -1:] @ states.mT, -1) @ states


@by_name
@pytest.mark.parametrize("both", [False, True], ids=["forwards", "both"])
@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_a_recurrent_layer_is_no_projection_into_attention(kind: str, both: bool, recipe: Any) -> None:
    x = noise(1, 5, 6)
    found, plain = (
        explained(Attending(kind, both=both), each, x, ledger=False)[0]
        for each in (recipe, replace(recipe, input_projection=None))
    )
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
