"""A trace that is asked again: each answer is that of a run of its own, and nothing of an earlier one stays."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from lrpx.engine import Trace, propagate
from lrpx.engine._compiled import Compiler
from lrpx.engine._recompute import Layer
from lrpx.errors import TraceError
from lrpx.methods._alti_logit import head_relevance
from lrpx.recipes import ALTI_LOGIT, ATTNLRP, GRADIENT, LRP
from lrpx.rules import Gamma
from tests.engine.samples import SAMPLES, output_of
from tests.engine.test_recompute import checkpointing
from tests.reference import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lrpx.ledger import Ledger
    from lrpx.recipes import Recipe

IDS = torch.tensor([[5, 9, 3, 12, 7]])
VALUES: list[Callable[[Tensor], Tensor]] = [
    lambda logits: logits[0, -1, 3],
    lambda logits: logits[0, 1, 4] - logits[0, 1, 5],
    lambda logits: logits[0, -1].log_softmax(-1)[3],
    lambda logits: logits[0, -1, 3],
]
RECIPES = {"lrp": LRP, "attnlrp": ATTNLRP, "gradient": GRADIENT, "gamma": ATTNLRP.at(layers=1, linear=Gamma(0.1))}


def answers(trace: Trace) -> list[Tensor]:
    """Relevance and gradient of every source and every observed place."""
    values = [each.value for each in (*trace.sources, *trace.places)]
    return [found(trace, value) for value in values for found in (Trace.relevance_of, Trace.gradient_of)]


def assert_same_ledger(one: Ledger, other: Ledger) -> None:
    assert {(entry.kind, entry.name) for entry in one.entries} == {(e.kind, e.name) for e in other.entries}
    values = {(entry.kind, entry.name): entry.value for entry in other.entries}
    for entry in one.entries:
        assert entry.value == pytest.approx(values[entry.kind, entry.name], rel=1e-12, abs=1e-14)
    assert one.explained == other.explained


def asked_again_as_alone(
    model: nn.Module, recipe: Recipe, batch: dict[str, Tensor] | None = None, **options: Any
) -> None:
    batch = {"input_ids": IDS} if batch is None else batch
    with propagate(model, recipe, **options) as kept:
        logits = output_of(model, batch)
        values = [value(logits) for value in VALUES]
    seen = []
    for i, value in enumerate(values):
        with propagate(model, recipe, **options) as alone:
            fresh = output_of(model, batch)
            only = VALUES[i](fresh)
        outputs = (logits, fresh) if i == 2 else (None, None)
        kept.explain(value, outputs[0], keep=i < len(values) - 1)
        alone.explain(only, outputs[1])
        for found, expected in zip(answers(kept), answers(alone), strict=True):
            assert torch.equal(found, expected)
        if options.get("ledger"):
            assert_same_ledger(kept.ledger(), alone.ledger())
            assert kept.ledger().closes(1e-5)  # Mamba computes in float32 inside
        seen.append(kept.source_gradient(kept.sources[0]))
    assert torch.equal(seen[0], seen[3])
    assert not torch.equal(seen[0], seen[1])
    with pytest.raises(TraceError, match=r"graph is gone; pass keep=True"):
        kept.explain(values[0])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("ledger", [False, True], ids=["", "ledger"])
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, models.tiny_bert])
def test_each_answer_is_that_of_a_run_of_its_own(build, recipe, recompute, ledger):
    asked_again_as_alone(build(), recipe, ledger=ledger, recompute=recompute)


@pytest.mark.parametrize("name", ["t5", "mamba", "whisper"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_of_other_architectures(name, recompute):
    asked_again_as_alone(SAMPLES[name].build(), ATTNLRP, SAMPLES[name].batch(), ledger=True, recompute=recompute)


def test_with_the_models_own_checkpoints():
    model = models.tiny_llama().train()
    checkpointing(model, False)
    asked_again_as_alone(model, ATTNLRP)
    asked_again_as_alone(model, LRP, ledger=True)


def test_a_kept_graph_recomputes_one_layer_at_a_time(monkeypatch):
    model = models.tiny_llama()
    held: list[int] = []
    layers: list[Layer] = []
    made, again = Layer.__init__, Layer._run_again

    def remembers(layer: Layer, *args: Any) -> None:
        made(layer, *args)
        layers.append(layer)

    def counts(layer: Layer) -> list[Tensor]:
        held.append(sum(each._saved is not None for each in layers))
        return again(layer)

    monkeypatch.setattr(Layer, "__init__", remembers)
    monkeypatch.setattr(Layer, "_run_again", counts)
    with propagate(model, ATTNLRP, (), recompute=True) as trace:
        logits = model(IDS).logits
        trace.explain(logits[0, -1, 3], keep=True)
        trace.explain(logits[0, -1, 4], keep=True)
    assert len(layers) == len(model.model.layers)
    assert held == [0] * 2 * len(layers)  # each layer once in each pass, when no other is held
    assert sum(each._saved is not None for each in layers) == 1


def test_the_heads_of_the_newest():
    model = models.tiny_gpt2()
    found = []
    with propagate(model, ALTI_LOGIT, (), heads=True) as kept:
        logits = model(IDS).logits
    for token in (3, 4, 3):
        kept.explain(logits[0, -1, token], keep=True)
        with propagate(model, ALTI_LOGIT, (), heads=True) as alone:
            fresh = model(IDS).logits
        alone.explain(fresh[0, -1, token])
        rows = torch.tensor([[4]])
        for trace in (kept, alone):
            assert trace.heads is not None
        found.append([head_relevance(kept, write, rows) for write in kept.heads.writes if write.reads])
        expected = [head_relevance(alone, write, rows) for write in alone.heads.writes if write.reads]
        assert all(map(torch.equal, found[-1], expected))
        assert torch.equal(kept.relevance_of_beginning(), alone.relevance_of_beginning())
    assert all(map(torch.equal, found[0], found[2]))
    assert not torch.equal(found[0][0], found[1][0])


class Sqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy / (2 * x.sqrt())


class SqrtBoundDerivative(Sqrt):
    """Of the name that RecurrentGemma's has, which gets the identity rule on the graph."""


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


def test_a_rule_given_on_the_graph_is_given_once():
    model = Calls(SqrtBoundDerivative)
    x = torch.tensor([4.0, 9.0])
    with propagate(model, ATTNLRP) as trace:
        y = model(x)
        for i in (0, 1, 0):
            trace.explain(y[i], keep=True)
            assert trace.relevance("x").tolist() == [[2.0, 0.0], [0.0, 3.0]][i]


def test_an_unseen_function_is_counted_once():
    model = Calls(Sqrt)
    with propagate(model, dataclasses.replace(ATTNLRP, strict=False)) as trace:
        y = model(torch.tensor([4.0, 9.0]))
        trace.explain(y[0], keep=True)
        trace.explain(y[1])
    assert [(ran.operation, ran.count) for ran in trace.operations if ran.rule == "unknown"] == [("Sqrt", 1)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_trace():
    model = models.tiny_gpt2()

    @contextmanager
    def forward(given: Mapping[str, Any]) -> Iterator[tuple[Trace, Tensor]]:
        with propagate(model, ATTNLRP, ()) as trace:
            yield trace, model(**given).logits[:, -1]

    given, paths = {"input_ids": IDS}, frozenset({"transformer.wte"})
    with Compiler().run(model, forward, given, paths, ATTNLRP) as (kept, logits):
        for token in (3, 4, 3):
            kept.explain(logits[0, token], keep=True)
            with forward(given) as (plain, expected):
                plain.explain(expected[0, token])
            torch.testing.assert_close(kept.relevance("transformer.wte"), plain.relevance("transformer.wte"))
        kept.explain(logits[0, 5])
        with pytest.raises(TraceError, match="graph is gone"):
            kept.explain(logits[0, 5])
