"""What a recipe that is not strict tells of the operations that ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpx.engine import Ran, Trace, propagate
from lrpx.errors import TraceError, UnknownOperationError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from lrpx.rules import Gamma
from tests.engine.test_refusals import Doubled
from tests.engine.test_scope import snapshot
from tests.reference import models

LENIENT = replace(ATTNLRP, strict=False)
IDS = torch.tensor([[5, 9, 3]])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(self.linear(x).tanh(), 2, 0, 100.0)


class Model(nn.Module):
    """``renorm`` is unknown; everything else has a rule or is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 4).double()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(4).double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) + x
        x = self.norm(x)
        return (x + 1).softmax(-1) * x


def run(model: nn.Module, recipe: Any, ids: Tensor = IDS, **options: Any) -> Trace:
    with propagate(model, recipe, **options) as trace:
        output = model(ids)
        output = output.logits if hasattr(output, "logits") else output
    trace.explain(output[0, -1].sum())
    return trace


def counted(trace: Trace) -> dict[tuple[str, str, str], int]:
    found = {(ran.operation, ran.rule, ran.module): ran.count for ran in trace.operations}
    assert len(found) == len(trace.operations)
    return found


EXPECTED = {
    ("embedding", "source", "embed"): 1,
    ("linear", "unmodified", "layers.0.linear"): 1,
    ("tanh", "identity", "layers.0"): 1,
    ("renorm", "unknown", "layers.0"): 1,
    ("linear", "unmodified", "layers.1.linear"): 1,
    ("tanh", "identity", "layers.1"): 1,
    ("renorm", "unknown", "layers.1"): 1,
    ("add", "plain", "Model"): 3,
    ("layer_norm", "constant", "norm"): 1,
    ("softmax", "unmodified", "Model"): 1,
    ("mul", "uniform", "Model"): 1,
}


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "plain"])
@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no ledger"])
@pytest.mark.parametrize("observe", ["*", "embed"])
def test_every_operation_is_there_once(recompute: bool, ledger: bool, observe: str) -> None:
    trace = run(Model(), LENIENT, recompute=recompute, ledger=ledger, observe=(observe,))
    assert counted(trace) == EXPECTED


def test_it_can_be_read_before_the_explanation() -> None:
    with propagate(Model(), LENIENT) as trace:
        assert trace.operations == ()
    model = Model()
    with propagate(model, LENIENT) as trace:
        model(IDS)
        assert counted(trace) == EXPECTED


def test_overrides_show_in_the_rules() -> None:
    recipe = LENIENT.at(layers=1, linear=Gamma(0.3)).at(layers=0, use=LRP)
    found = counted(run(Model(), recipe))
    assert found["linear", "unmodified", "layers.0.linear"] == 1
    assert found["linear", "Gamma(gamma=0.3)", "layers.1.linear"] == 1
    assert found["mul", "uniform", "Model"] == 1


def test_operations_off_the_way_from_the_input_are_not_counted() -> None:
    class Constants(Model):
        def forward(self, ids: Tensor) -> Tensor:
            shift = torch.special.i0(torch.arange(4.0, dtype=torch.float64)).sigmoid()
            return self.embed(ids) * shift + self.norm.weight

    assert counted(run(Constants(), LENIENT)) == {
        ("embedding", "source", "embed"): 1,
        ("mul", "plain", "Constants"): 1,
        ("add", "plain", "Constants"): 1,
    }


def test_a_models_input_is_no_operation() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sigmoid() * x).relu()

    model, x = Gate(), torch.linspace(-1, 1, 6, dtype=torch.float64).view(1, 1, 6)
    assert counted(run(model, LENIENT, x)) == {
        ("sigmoid", "identity", "Gate"): 1,
        ("mul", "identity", "Gate"): 1,
        ("relu", "identity", "Gate"): 1,
    }


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_whole_model_has_no_unknown_operation(implementation: str) -> None:
    for build in (models.tiny_llama, models.tiny_gpt2, models.tiny_bert):
        found = counted(run(build(attn_implementation=implementation), LENIENT))
        assert "unknown" not in {rule for _, rule, _ in found}
        operation = "softmax" if implementation == "eager" else "scaled_dot_product_attention"
        assert sum(count for (name, _, _), count in found.items() if name == operation) == 2


def test_activations_that_are_spelled_out_are_there() -> None:
    found = counted(run(models.tiny_gpt2(), LENIENT))
    acts = {key: count for key, count in found.items() if key[2].endswith(".mlp.act")}
    assert {(rule, module) for _, rule, module in acts} == {
        ("identity", f"transformer.h.{layer}.mlp.act") for layer in range(2)
    }


def test_custom_autograd_functions_are_unknown() -> None:
    class Custom(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return Doubled.apply(self.embed(ids)).tanh()

    found = counted(run(Custom(), LENIENT))
    assert [key[:2] for key in found if key[1] == "unknown"] == [("Doubled", "unknown")]


def test_batch_norm_with_the_batchs_own_statistics_is_unknown() -> None:
    class Batch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, training=True)

    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert {ran.rule for ran in run(Batch(), LENIENT, x).operations} == {"unknown"}


def test_entries_are_plain_values() -> None:
    ran = next(ran for ran in run(Model(), LENIENT).operations if ran.rule == "unknown")
    assert ran == Ran("renorm", "unknown", "layers.0", 1)


# ------------------------------------------------------------------------ strict as before


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "plain"])
@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no ledger"])
@pytest.mark.parametrize("recipe", [LRP, ATTNLRP], ids=lambda recipe: recipe.name)
def test_a_strict_recipe_refuses(recipe: Any, ledger: bool, recompute: bool) -> None:
    model = Model()
    before = snapshot(model)
    with pytest.raises(UnknownOperationError, match=r"layers\.0 calls torch's 'renorm'.*strict=False"):
        run(model, recipe, ledger=ledger, recompute=recompute)
    assert snapshot(model) == before


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT], ids=lambda recipe: recipe.name)
def test_it_is_recorded_for_recipes_with_rules_that_are_not_strict(recipe: Any) -> None:
    trace = run(models.tiny_gpt2(), recipe)
    with pytest.raises(TraceError, match="strict=False"):
        trace.operations  # noqa: B018


def test_the_report_changes_nothing() -> None:
    model = models.tiny_gpt2()
    before = snapshot(model)
    want, found = run(model, ATTNLRP), run(model, LENIENT)
    assert snapshot(model) == before
    for a, b in zip(want.sources, found.sources, strict=True):
        assert torch.equal(want.source_relevance(a), found.source_relevance(b))


def test_layers_are_told_by_the_rule_for_their_place() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval()
    layers = nn.Sequential(nn.Linear(4, 4), layer)
    recipe = replace(
        ATTNLRP, strict=False, linear=Gamma(0.1), input_projection=Gamma(0.2), output_projection=Gamma(0.3)
    )
    with propagate(layers, replace(recipe, first=Gamma(0.4))) as trace:
        trace.explain(layers(torch.randn(1, 3, 4))[0, 0, 1])
    found = {ran.module: [] for ran in trace.operations}
    for ran in trace.operations:
        found[ran.module] += [(ran.rule, ran.count)] if ran.operation == "linear" else []
    assert found["0"] == [("Gamma(gamma=0.4)", 1)]
    assert found["1.self_attn"] == [("Gamma(gamma=0.2)", 1), ("Gamma(gamma=0.3)", 1)]
    assert found["1.linear1"] == found["1.linear2"] == [("Gamma(gamma=0.1)", 1)]
