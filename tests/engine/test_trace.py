"""Relevance at any place of any module, from one backward pass; and what a trace refuses."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lrpx.engine import Trace, propagate
from lrpx.errors import NonFiniteError, TraceError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Recipe
from tests.engine.samples import SAMPLES
from tests.reference import models

TOKENS = torch.tensor([[5, 9, 3, 12, 7], [4, 4, 8, 30, 11]])
RECIPES = [LRP, ATTNLRP]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def near(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def run(model: nn.Module, recipe: Recipe, observe: tuple[str, ...] = ("*",), **inputs: Tensor) -> Trace:
    inputs = inputs or {"input_ids": TOKENS[:1]}
    with propagate(model, recipe, observe) as trace:
        logits = model(**inputs).logits
        trace.explain(logits[0, -1, 4] if logits.ndim == 3 else logits[0, 1])
    return trace


def plain(model: nn.Module, x: Tensor, recipe: Recipe) -> tuple[Tensor, Trace]:
    with propagate(model, recipe) as trace:
        value = model(x).flatten()[1]
        trace.explain(value)
    return value.detach(), trace


def without_biases(model: nn.Module) -> nn.Module:
    return models.zero_biases(model.double().eval())


# --------------------------------------------------------------------------- places


@every_recipe
def test_input_and_output_of_every_module_that_carries(recipe: Recipe) -> None:
    model = models.tiny_gpt2()
    trace = run(model, recipe)
    for path, module in model.named_modules():
        if path and not isinstance(module, (nn.ModuleList, nn.Dropout)):
            for side in ("input", "output"):
                if path in ("transformer", "transformer.wte", "transformer.wpe") and side == "input":
                    continue  # token ids
                found = trace.relevance(path, of=side)
                assert found.dtype == torch.float64
                assert torch.isfinite(found).all()
                assert found.any(), (path, side)
    near(trace.relevance("transformer.h.0"), trace.relevance("transformer.h.1", of="input"))


@every_recipe
def test_a_spelled_out_activation_hands_its_relevance_on(recipe: Recipe) -> None:
    trace = run(models.tiny_gpt2(), recipe)
    for layer in range(2):
        act = f"transformer.h.{layer}.mlp.act"
        near(trace.relevance(act, of="input"), trace.relevance(act))
        near(trace.relevance(act, of="input"), trace.relevance(f"transformer.h.{layer}.mlp.c_fc"))


@every_recipe
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, models.tiny_bert])
def test_embeddings_given_by_the_user_are_the_looked_up_ones(build: Any, recipe: Recipe) -> None:
    model = build()
    looked_up = run(model, recipe)
    words = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is words)
    given = run(model, recipe, inputs_embeds=words(TOKENS[:1]).detach())
    assert torch.equal(given.relevance("inputs_embeds"), looked_up.relevance(path))
    source = next(source for source in looked_up.sources if path in source.paths)
    assert torch.equal(source.ids, TOKENS[:1])
    assert torch.equal(looked_up.source_relevance(source), source.value.detach() * looked_up.source_gradient(source))


@every_recipe
def test_pixels_of_a_vision_transformer(recipe: Recipe) -> None:
    sample = SAMPLES["vit"]
    pixels = sample.batch()["pixel_values"][:1]
    model = models.zero_biases(sample.build())
    trace = run(model, recipe, pixel_values=pixels)
    assert trace.relevance("pixel_values").shape == pixels.shape
    patches = "vit.embeddings.patch_embeddings.projection"
    near(trace.relevance("pixel_values").sum(), trace.relevance(patches).sum())
    wrong = run(model, GRADIENT, pixel_values=pixels)
    assert not torch.allclose(wrong.relevance("pixel_values"), trace.relevance("pixel_values"))


class Convolutional(nn.Module):
    """Convolutions, batch norms, in-place activations and both poolings."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(),
            nn.Linear(6, 5),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> Tensor:
        return self.body(pixels)


@every_recipe
def test_a_convolutional_net_conserves(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = without_biases(Convolutional())
    value, trace = plain(model, torch.randn(1, 3, 8, 8, dtype=torch.float64), recipe)
    near(trace.relevance("pixels").sum(), value)
    near(trace.relevance("body.3").sum(), value)
    assert trace.relevance("pixels").shape == (1, 3, 8, 8)


@every_recipe
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_torch_encoder_layer(recipe: Recipe, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=norm_first)
    model, x = without_biases(layer), torch.randn(1, 5, 8, dtype=torch.float64)
    value, trace = plain(model, x, recipe)
    near(value, model(x).flatten()[1].detach())
    if recipe is LRP:
        near(trace.relevance("src").sum(), value)
    else:
        assert (trace.relevance("src").sum() - value).abs() > 1e-6
    assert trace.relevance("linear1").shape == (1, 5, 16)


class SelfAttention(nn.Module):
    """torch's own attention, with or without its attention weights."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.needs_weights)[0]


@every_recipe
def test_torch_attention_with_and_without_weights(recipe: Recipe) -> None:
    found, x = [], torch.randn(1, 5, 8, dtype=torch.float64)
    for needs_weights in (True, False):
        torch.manual_seed(0)
        model = without_biases(SelfAttention(needs_weights))
        value, trace = plain(model, x, recipe)
        found.append(trace.relevance("x"))
        if recipe is LRP:
            near(found[-1].sum(), value)
    near(*found)


def test_functions_of_several_arguments_and_calls() -> None:
    model = nn.Bilinear(3, 4, 5).double()
    with propagate(model, GRADIENT) as trace:
        for scale in (1.0, 2.0):
            value = model(torch.ones(3).double(), scale * torch.ones(4).double())[0]
        trace.explain(value)
    assert not trace.relevance("input1", call=0).any()
    assert trace.relevance("input1", call=1).any()
    with pytest.raises(TraceError, match="input2 was called 2 times; pass call=0 to 1"):
        trace.relevance("input2")
    with pytest.raises(TraceError, match="call=2 is not one of them"):
        trace.relevance("input2", call=2)


class Step(nn.Module):
    """A step of a recurrence, whose state is a tensor, or in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, h: Any) -> tuple[Tensor, Any]:
        state = torch.tanh(self.of_input(x) + self.of_state(h[0] if isinstance(h, list) else h))
        return self.head(state), [state] if isinstance(h, list) else state


class Unrolled(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            out, h = self.step(x, h)
        return out


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("recipe", [GRADIENT, *RECIPES], ids=lambda recipe: recipe.name)
def test_a_state_that_an_earlier_call_has_computed_is_no_input(recipe: Recipe, is_listed: bool) -> None:
    torch.manual_seed(0)
    model, xs, start = Unrolled(Step()).double(), torch.randn(3, 1, 4).double(), torch.randn(1, 8).double()
    with propagate(model, recipe) as whole:
        whole.explain(model(xs, start)[0, 1])
    with propagate(model.step, recipe, ledger=True) as trace:
        state = [start] if is_listed else start
        for x in xs:
            out, state = model.step(x, state)
        trace.explain(out[0, 1])
    near(torch.stack([trace.relevance("x", call=i) for i in range(3)]), whole.relevance("xs"))
    assert abs(trace.ledger().difference) < 1e-12
    name = "h.0" if is_listed else "h"
    near(trace.relevance(name, call=0), whole.relevance("h"))
    for call in (None, 1, -1):
        with pytest.raises(TraceError, match="an earlier call has computed in this block"):
            trace.relevance(name, call=call)


def test_a_state_that_was_detached_is_an_input() -> None:
    torch.manual_seed(0)
    step, start = Step().double(), torch.randn(1, 8).double()
    with propagate(step, ATTNLRP) as trace:
        _, state = step(torch.ones(1, 4).double(), start)
        out, _ = step(torch.ones(1, 4).double(), state.detach())
        trace.explain(out[0, 1])
    assert not trace.relevance("x", call=0).any()
    assert trace.relevance("h", call=1).any()


class Caching(nn.Module):
    """A sum over what it has seen, which it keeps in a dictionary or a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        key = self.key(x).tanh()
        if isinstance(kept, (list, deque)):
            kept.append(key)
            return self.head(torch.cat(list(kept)).prod(0))
        kept["keys"] = torch.cat([kept["keys"], key]) if "keys" in kept else key
        return self.head(kept["keys"].prod(0))


class Whole(nn.Module):
    def __init__(self, step: Caching) -> None:
        super().__init__()
        self.step = step

    def forward(self, xs: Tensor, before: Tensor | None = None) -> Tensor:
        return self.step(xs.flatten(0, 1), {} if before is None else {"keys": before})


class Listed(list[Tensor]):
    """A class of one's own."""


@pytest.mark.parametrize("is_begun", [False, True], ids=["empty", "begun"])
@pytest.mark.parametrize("kind", [dict, list, Listed, deque])
@every_recipe
def test_what_a_model_keeps_in_its_argument_is_kept(recipe: Recipe, kind: Any, is_begun: bool) -> None:
    torch.manual_seed(0)
    model, xs, before = Caching().double(), torch.randn(3, 1, 4).double(), torch.randn(1, 8).double()
    outer = Whole(model)
    with propagate(outer, recipe) as whole:
        value = outer(xs, before if is_begun else None)[1]
        whole.explain(value)
    kept = kind() if not is_begun else {"keys": before} if kind is dict else kind([before])
    with propagate(model, recipe) as trace:
        for x in xs:
            out = model(x, kept)
        trace.explain(out[1])
    near(out[1].detach(), value.detach())
    near(torch.stack([trace.relevance("x", call=i) for i in range(3)]), whole.relevance("xs"))
    assert len(kept) == (1 if kind is dict else 3 + is_begun)
    if is_begun and kind is not dict:
        assert kept[0] is before
        near(trace.relevance("kept.0", call=2), whole.relevance("before"))


def test_a_cache_that_is_written_into_is_refused_in_the_next_call() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor, cache: Tensor, place: int) -> Tensor:
            cache[place] = x
            return cache[: place + 1].prod(0)

    model, cache = Writing(), torch.zeros(2, 4)
    with propagate(model, ATTNLRP) as trace:
        trace.explain(model(torch.ones(4), cache, 0)[0])
        assert trace.relevance("x").any()
        with pytest.raises(TraceError, match=r"has written into 'cache'.*let the model return it"):
            model(torch.ones(4), cache, 1)
    assert not cache.any()


def test_what_is_given_by_two_names_and_written_into_is_refused() -> None:
    """Each name has a copy, in which the model would not find what it has written by the other."""

    class Scaling(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            return (x * y).sum(-1)

    class Keeping(nn.Module):
        def forward(self, x: Tensor, one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
            one["new"] = x[0]
            return torch.stack([*other.values()]).sum(-1)

    x, kept = torch.ones(2, 4), {"old": torch.ones(4)}
    for model, given in ((Scaling(), (x, x)), (Scaling(), (x[:1], x.view(-1)[2:6])), (Keeping(), (x, kept, kept))):
        with propagate(model, ATTNLRP), pytest.raises(TraceError, match="is also given by another name"):
            model(*given)
    assert bool((x == 1).all())
    model = Scaling()
    with propagate(model, ATTNLRP) as trace:  # parts of one batch have no memory in common
        trace.explain(model(x[:1], x[1:])[0])
        assert bool((trace.relevance("y") == 1).all())
        model(x[1:], x[1:].clone())


def test_relevance_is_value_times_gradient_and_wide() -> None:
    model = models.tiny_llama(lifted=False).to(torch.bfloat16)
    trace = run(model, ATTNLRP)
    relevance, gradient = (f("model.layers.1", of="input") for f in (trace.relevance, trace.gradient))
    assert relevance.dtype == gradient.dtype == torch.float32
    place = next(p for p in trace.places if (p.path, p.side) == ("model.layers.1", "input"))
    assert torch.equal(relevance, place.value.detach().float() * gradient)


# ------------------------------------------------------------------ one pass, batches


def test_one_backward_pass() -> None:
    model, passed = models.tiny_llama(), []
    with propagate(model, ATTNLRP) as trace:
        logits = model(input_ids=TOKENS).logits
        logits.grad_fn.register_hook(lambda *_: passed.append("head"))
        trace.sources[0].value.register_hook(lambda _: passed.append("embedding"))
        trace.explain(logits[:, -1, 4])
    for path in ("model.layers.0", "model.layers.1.mlp.down_proj", "lm_head"):
        assert trace.relevance(path, of="input").any()
    assert trace.source_relevance(trace.sources[0]).any()
    assert passed == ["head", "embedding"]


@every_recipe
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, models.tiny_bert])
def test_a_batch_of_values_is_one_run_each(build: Any, recipe: Recipe) -> None:
    model, chosen = build(), [4, 9]
    with propagate(model, recipe) as trace:
        logits = model(input_ids=TOKENS).logits
        values = trace.explain(logits[[0, 1], -1, chosen])
    assert values.shape == (2,)
    for row, token in enumerate(chosen):
        with propagate(model, recipe) as single:
            value = single.explain(model(input_ids=TOKENS[row : row + 1]).logits[0, -1, token])
        near(values[row], value)
        near(trace.source_relevance(trace.sources[0])[row : row + 1], single.source_relevance(single.sources[0]))


# ---------------------------------------------------------------------- observe


def test_only_what_is_observed_is_recorded() -> None:
    model = models.tiny_llama()
    trace = run(model, LRP, observe=("model.layers.*.mlp", "lm_head"))
    assert {place.path for place in trace.places} == {"model.layers.0.mlp", "model.layers.1.mlp", "lm_head"}
    assert run(model, LRP, observe=()).places == []
    one, other = run(model, LRP, observe=()), run(model, LRP)
    assert torch.equal(one.relevance("model.embed_tokens"), other.relevance("model.embed_tokens"))


def test_a_place_that_was_not_recorded_is_named_with_the_mend() -> None:
    trace = run(models.tiny_gpt2(), LRP, observe=())
    with pytest.raises(
        TraceError, match=r"no input of 'transformer.h.0' was recorded; the sources are transformer.wpe"
    ):
        trace.relevance("transformer.h.0", of="input")
    with pytest.raises(TraceError, match=r"propagate\(..., observe=\[pattern\]\)"):
        trace.relevance("no.such.module")


class InPlace(nn.Module):
    """Changes the output of a module in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden += x
        return self.second(hidden)


def test_a_place_changed_in_place_is_refused_and_the_rest_is_right() -> None:
    model = without_biases(InPlace())
    value, trace = plain(model, torch.randn(3, dtype=torch.float64), LRP)
    with pytest.raises(TraceError, match="the output of first was changed in place later; observe a module beside it"):
        trace.relevance("first")
    near(trace.relevance("x").sum(), value)
    # its input was recorded after the change
    near(trace.relevance("second", of="input").sum(), value)


# ----------------------------------------------------------------------- refusals


def test_what_explain_refuses() -> None:
    model = models.tiny_gpt2()
    with propagate(model, LRP) as trace:
        with pytest.raises(TraceError, match="nothing was recorded: call the very module"):
            trace.explain(torch.tensor(1.0, requires_grad=True))
        logits = model(input_ids=TOKENS).logits
        with pytest.raises(TraceError, match=r"has shape \[2, 31\]; pass a scalar or one value a row"):
            trace.explain(logits[:, -1])
        with pytest.raises(TraceError, match="does not depend on the model's inputs"):
            trace.explain(logits[0, -1, 4].detach())
        with pytest.raises(TraceError, match=r"call trace.explain\(value\) first"):
            trace.relevance("transformer.wte")


def test_not_a_number_in_the_weights_is_blamed_on_the_first_module() -> None:
    model = models.tiny_gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    with pytest.raises(
        NonFiniteError, match=r"in the explained value, first in the output of transformer.h.1.mlp.c_fc;"
    ):
        run(model, ATTNLRP)


class InfiniteGradient(nn.Module):
    """Finite going forward, not back: the slope of a square root at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sqrt(self.first(x).abs()))


def test_an_infinite_gradient_is_blamed_on_the_last_module_it_passed() -> None:
    with pytest.raises(NonFiniteError, match=r"the relevance of x is not finite, first at first; try dtype float32"):
        plain(InfiniteGradient(), torch.zeros(3), GRADIENT)
    _, trace = plain(InfiniteGradient(), torch.zeros(3), ATTNLRP)
    assert not trace.relevance("x").any()
