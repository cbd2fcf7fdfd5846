"""Taps: what listens to a run, or writes into it, by the protocol alone."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from lrpx.engine import Call, Tap, Trace, propagate
from lrpx.engine._book import Book
from lrpx.errors import TraceError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from lrpx.rules import Gamma
from tests.engine.samples import SAMPLES, last_row, output_of
from tests.reference import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lrpx.engine import Running
    from lrpx.engine._places import Side

IDS = torch.tensor([[5, 9, 3, 12, 7]])


def run(model: nn.Module, recipe: Any, *taps: Tap, **options: Any) -> tuple[Trace, Tensor]:
    with propagate(model, recipe, (), taps=taps, **options) as trace:
        logits = model(IDS).logits
    trace.explain(logits[0, -1, 3])
    return trace, logits.detach()


class Everything(Tap):
    """Hears all there is, and changes nothing."""

    patterns = ("*",)

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begin(self, run: Running) -> None:
        self.heard.append("begin")

    def around(self, call: Call, proceed: Callable[..., Any]) -> Any:
        out = proceed(call.args, call.kwargs)
        self.heard.append(("call", call.name, None if call.operation is None else call.operation.kind))
        return out

    def rule(
        self, kind: str, rule: Any, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        self.heard.append(("rule", kind))
        return proceed(*inputs)

    def added(self, value: Any, operation: str) -> Any:
        self.heard.append(("added", operation))
        return value.detach() if isinstance(value, nn.Parameter) else value

    def module(self, path: str, side: Side, value: Tensor) -> None:
        self.heard.append(("module", path, side))

    def check(self) -> None:
        self.heard.append("check")

    @contextmanager
    def backward(self, value: Tensor, outputs: Tensor | None) -> Iterator[None]:
        self.heard.append("backward begins")
        yield
        self.heard.append("backward ends")


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT, ATTNLRP.at(linear=Gamma())], ids=lambda r: r.name)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_listening_changes_nothing(name: str, recipe: Any) -> None:
    model, batch = SAMPLES[name].build(), SAMPLES[name].batch()
    traces = []
    for taps in ((), (Everything(), Everything())):
        with propagate(model, recipe, taps=taps) as trace:
            value = last_row(output_of(model, batch))[:, 1]
        trace.explain(value)
        traces.append(trace)
    for one, other in zip(*(trace.sources for trace in traces), strict=True):
        assert torch.equal(traces[0].source_gradient(one), traces[1].source_gradient(other))


def test_a_tap_hears_all_of_a_run_in_its_order() -> None:
    model, tap = models.tiny_gpt2(), Everything()
    trace, _ = run(model, ATTNLRP, tap)
    assert tap.heard[0] == "begin"
    assert tap.heard[-3:] == ["check", "backward begins", "backward ends"]
    assert {kind for what, kind, *_ in (each for each in tap.heard if each[0] == "rule")} >= {
        "linear", "activation", "softmax",
    }  # fmt: skip
    assert ("added", "bias") in tap.heard
    assert tap.heard.index(("module", "lm_head", "input")) < tap.heard.index(("module", "lm_head", "output"))
    modules = {path for what, path, *_ in (each for each in tap.heard if each[0] == "module")}
    assert modules == {path for path, m in model.named_modules() if path and not path.endswith(("attn_dropout", ".h"))}
    assert ("call", "layer_norm", "norm") in tap.heard
    assert trace.tap(Everything) is tap
    assert trace.tap(Book) is None


class Neurons(Tap):
    """A tap of a user's: what a module's output is worth, as a leaf of the graph in its place."""

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns
        self.found: dict[str, Tensor] = {}
        self._replaying: Callable[[], bool] = lambda: False

    def begin(self, run: Running) -> None:
        seen = weakref.proxy(run)
        self._replaying = lambda: seen.replaying

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        if side == "input" or self._replaying():
            return None
        self.found[path] = value
        return None

    def leaves(self) -> list[Tensor]:
        return list(self.found.values())


def test_leaves_of_a_tap_get_their_relevance() -> None:
    model, tap = models.tiny_llama(), Neurons("model.layers.1.mlp")
    trace, _ = run(model, ATTNLRP, tap)
    with propagate(model, ATTNLRP, ["model.layers.1.mlp"]) as observed:
        logits = model(IDS).logits
    observed.explain(logits[0, -1, 3])
    (leaf,) = tap.leaves()
    assert torch.equal(trace.relevance_of(leaf), observed.relevance("model.layers.1.mlp"))
    assert torch.equal(trace.gradient_of(leaf), observed.gradient("model.layers.1.mlp"))
    assert trace.relevance_of(leaf).any()


class Written(Tap):
    """An intervention: a module's input or output times a number."""

    def __init__(self, path: str, side: Side, factor: float) -> None:
        self.patterns = (path,)
        self.side, self.factor = side, factor

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        return self.factor * value if side == self.side else None


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("path", ["model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.0"])
def test_what_a_tap_writes_is_what_the_model_goes_on_with(path: str, recompute: bool) -> None:
    """As a hook of the user's own would have it; attention returns a tuple."""
    model = models.tiny_llama()
    trace, logits = run(model, ATTNLRP, Written(path, "output", 0.5), recompute=recompute)

    def halved(_: Any, __: Any, output: Any) -> Any:
        return (0.5 * output[0], *output[1:]) if isinstance(output, tuple) else 0.5 * output

    handle = model.get_submodule(path).register_forward_hook(halved)
    expected, wanted = run(model, ATTNLRP)
    handle.remove()
    assert torch.equal(logits, wanted)
    assert not torch.equal(logits, model(IDS).logits)
    torch.testing.assert_close(trace.relevance("model.embed_tokens"), expected.relevance("model.embed_tokens"))


def test_a_tap_writes_what_enters_a_module() -> None:
    model = models.tiny_gpt2()
    _, once = run(model, LRP, Written("transformer.h.1.mlp", "input", 0.0))
    _, twice = run(
        model, LRP, Written("transformer.h.1.mlp", "input", 0.5), Written("transformer.h.1.mlp", "input", 0.0)
    )
    handle = model.transformer.h[1].mlp.register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    wanted = model(IDS).logits
    handle.remove()
    assert torch.equal(once, wanted)
    assert torch.equal(twice, wanted)


class Other(Tap):
    """Something else in the place of what the first layer's feed-forward block puts out."""

    patterns = ("model.layers.0.mlp",)

    def __init__(self, other: Callable[[Tensor], Any]) -> None:
        self.other = other

    def module(self, path: str, side: Side, value: Tensor) -> Any:
        return self.other(value) if side == "output" else None


@pytest.mark.parametrize(
    ("other", "given"),
    [
        (lambda value: value[:, :1], r"shape \[1, 1, 16\]"),
        (lambda value: value.mean(-1, keepdim=True), r"shape \[1, 5, 1\]"),
        (lambda value: value.repeat(2, 1, 1), r"shape \[2, 5, 16\]"),
        (lambda value: 0.0, "float"),
        (lambda value: (value,), "tuple"),
    ],
    ids=["one token", "one feature", "two rows", "number", "tuple"],
)
def test_a_tap_writes_a_tensor_of_the_same_shape(other: Callable[[Tensor], Any], given: str) -> None:
    """The sum with the stream would spread one token, or one feature, over all."""
    message = rf"the tap Other writes {given} at 'model.layers.0.mlp', where the value has shape \[1, 5, 16\]; return"
    with pytest.raises(TraceError, match=message):
        run(models.tiny_llama(), ATTNLRP, Other(other))


class Replaced(Tap):
    """Around a call: ReLU instead of tanh."""

    def around(self, call: Call, proceed: Callable[..., Any]) -> Any:
        return torch.relu(call.args[0]) if call.name == "tanh" else proceed(call.args, call.kwargs)


class Doubled(Tap):
    """Around a rule: what a linear layer hands on, twice."""

    def rule(
        self, kind: str, rule: Any, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        y = proceed(*inputs)
        return y + (y - y.detach()) if kind == "linear" else y


def test_a_tap_around_calls_and_rules() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    with propagate(model, LRP, taps=[Replaced()]) as trace:
        y = model(x)
        trace.explain(y[0, 0])
    with propagate(model, LRP) as plain:
        model[1] = nn.ReLU()
    assert torch.equal(y, model(x))
    with propagate(model, LRP) as plain:
        plain.explain(model(x)[0, 0])
    with propagate(model, LRP, taps=[Doubled()]) as doubled:
        doubled.explain(model(x)[0, 0])
    torch.testing.assert_close(trace.relevance("input"), plain.relevance("input"))
    torch.testing.assert_close(doubled.relevance("input"), 4 * plain.relevance("input"))


def test_taps_nest_in_their_order() -> None:
    order: list[str] = []

    class Named(Tap):
        def __init__(self, name: str) -> None:
            self.name = name

        def around(self, call: Call, proceed: Callable[..., Any]) -> Any:
            if call.name == "tanh":
                order.append(f"{self.name} begins")
            out = proceed(call.args, call.kwargs)
            if call.name == "tanh":
                order.append(f"{self.name} ends")
            return out

    with propagate(nn.Tanh(), LRP, taps=[Named("first"), Named("second")]):
        pass
    model = nn.Tanh()
    with propagate(model, LRP, taps=[Named("first"), Named("second")]) as trace:
        trace.explain(model(torch.ones(1, 1))[0])
    assert order == ["first begins", "second begins", "second ends", "first ends"]


def test_a_tap_may_refuse_the_run() -> None:
    class Refuses(Tap):
        def check(self) -> None:
            raise TraceError("this tap cannot read the run; use another model")

    with pytest.raises(TraceError, match="cannot read the run"):
        run(models.tiny_gpt2(), LRP, Refuses())


def test_the_ledger_closes_beside_other_taps() -> None:
    trace, _ = run(
        models.tiny_gpt2(), ATTNLRP, Everything(), Written("transformer.h.0.mlp", "output", 2.0), ledger=True
    )
    assert trace.ledger().closes(1e-9)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (Tap(), "taps is .*; pass a list of taps"),
        ([Tap], "taps is .*; pass a list of taps"),
        ("x", "taps is 'x'; pass a list of taps"),
    ],
)
def test_what_is_no_list_of_taps(taps: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message), propagate(nn.Tanh(), LRP, taps=taps):
        pass


def test_a_pattern_that_no_module_has_is_refused() -> None:
    tap = Written("transformer.layer.0", "output", 2.0)
    with pytest.raises(
        TraceError, match=r"no module of GPT2LMHeadModel has a path like 'transformer\.layer\.0'.*Written"
    ):
        run(models.tiny_gpt2(), LRP, tap)


def test_a_tensor_that_no_tap_has_named_has_no_relevance() -> None:
    trace, _ = run(models.tiny_gpt2(), LRP)
    for asked in (trace.relevance_of, trace.gradient_of):
        with pytest.raises(TraceError, match=r"no tap named this tensor among its leaves"):
            asked(torch.ones(3))
