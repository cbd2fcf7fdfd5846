"""Other rules for some modules: by path, by layer, by kind of operation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from lrpx import rules
from lrpx._modules import layer_of
from lrpx.engine import Trace, propagate
from lrpx.errors import MethodError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Recipe
from lrpx.rules import Epsilon, Gamma, ZPlus
from tests.reference import models
from tests.reference import rules as twins

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = torch.tensor([[5, 9, 3, 12, 7, 20]])
SOURCE = torch.tensor([[8, 4, 11, 6]])


def run(model: nn.Module, recipe: Recipe, **inputs: Tensor) -> Trace:
    with propagate(model, recipe) as trace:
        logits = model(input_ids=TOKENS, **inputs).logits
        trace.explain(logits[0, -1, 4] - logits[0, -1, 6])
    return trace


def embeddings(model: nn.Module, recipe: Recipe, **inputs: Tensor) -> list[Tensor]:
    trace = run(model, recipe, **inputs)
    return [trace.source_relevance(source) for source in trace.sources]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(one, other, strict=True))


def linear_is(trace: Trace, model: nn.Module, path: str, rule: str, *extra: float) -> bool:
    """Whether a linear module hands its output's relevance on by the twin's rule."""
    module, weight = model.get_submodule(path), model.get_submodule(path).weight.detach().numpy()
    weight = weight.T if type(module).__name__ == "Conv1D" else weight
    bias = None if module.bias is None else module.bias.detach().numpy()
    x = _value(trace, path, "input").numpy()
    output = trace.relevance(path)[0].numpy()
    want, _ = getattr(twins, f"linear_{rule}")(x, weight, bias, output, *extra)
    return np.allclose(trace.relevance(path, of="input")[0], want, rtol=0, atol=1e-9)


def _value(trace: Trace, path: str, side: str) -> Tensor:
    return next(place.value for place in trace.places if (place.path, place.side) == (path, side)).detach()[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [1, slice(1, None), range(1, 2), {1}, range(1, 7)], ids=str)
def test_cp_lrp_from_layer_1_on(layers: Any, implementation: str) -> None:
    model = models.tiny_llama(attn_implementation=implementation)
    mixed, pure = run(model, ATTNLRP.at(layers=layers, use=LRP)), run(model, LRP)
    at = "model.layers.1"
    assert torch.equal(mixed.relevance(at, of="input"), pure.relevance(at, of="input"))
    assert not torch.allclose(mixed.relevance("model.embed_tokens"), pure.relevance("model.embed_tokens"))
    # below: AttnLRP of layer 0, starting from what CP-LRP of layer 1 leaves at its input
    with propagate(model, ATTNLRP) as trace:
        hidden = model(input_ids=TOKENS, output_hidden_states=True).hidden_states[1]
        trace.explain((hidden * pure.gradient(at, of="input")).sum())
    assert_allclose(mixed.relevance("model.embed_tokens"), trace.relevance("model.embed_tokens"), rtol=1e-9, atol=1e-12)


def test_every_layer_is_the_whole_recipe_where_only_layers_have_rules() -> None:
    model = models.tiny_llama()
    assert same(embeddings(model, ATTNLRP.at(layers=slice(None), use=LRP)), embeddings(model, LRP))
    assert same(embeddings(model, ATTNLRP.at(use=LRP)), embeddings(model, LRP))
    for path in ("model.layers", "*.layers", "model.layers*"):  # a list, which is never called itself
        assert same(embeddings(model, ATTNLRP.at(path, use=LRP)), embeddings(model, LRP))
    assert same(embeddings(model, ATTNLRP.at(layers=range(5, 9), use=LRP)), embeddings(model, ATTNLRP))
    assert not same(embeddings(model, ATTNLRP), embeddings(model, LRP))


@pytest.mark.parametrize("kind", ["softmax", "product", "activation", "norm"])
def test_one_kind_everywhere_is_that_field_of_the_recipe(kind: str) -> None:
    model = models.tiny_gpt2() if kind == "norm" else models.tiny_llama()  # whose norms are written out
    other = getattr(GRADIENT if kind in ("activation", "norm") else LRP, kind)
    found = embeddings(model, ATTNLRP.at(**{kind: other}))
    assert same(found, embeddings(model, replace(ATTNLRP, **{kind: other})))
    assert not same(found, embeddings(model, ATTNLRP))


def test_a_constant_softmax_alone_leaves_queries_and_keys_without_relevance() -> None:
    trace = run(models.tiny_llama(), ATTNLRP.at("*.self_attn", softmax=rules.constant))
    for layer in range(2):
        assert not trace.relevance(f"model.layers.{layer}.self_attn.q_proj").any()
        assert not trace.relevance(f"model.layers.{layer}.self_attn.k_proj").any()
        assert trace.relevance(f"model.layers.{layer}.self_attn.v_proj").any()


@pytest.mark.parametrize(
    ("rule", "name", "extra"),
    [(Gamma(0.4), "gamma", (0.4,)), (ZPlus(), "z_plus", ()), (Epsilon(0.2), "epsilon", (0.2,))],
)  # fmt: skip
@pytest.mark.parametrize(
    ("build", "inside", "outside"),
    [
        (models.tiny_llama, ("mlp.down_proj",), ("self_attn.o_proj",)),
        (models.tiny_gpt2, ("mlp.c_proj", "mlp.c_fc"), ("attn.c_proj",)),
    ],
)
def test_linear_rules_only_in_the_mlps(
    build: Any, inside: Any, outside: Any, rule: Any, name: str, extra: tuple[float, ...]
) -> None:
    model = build()
    stem = "model.layers" if build is models.tiny_llama else "transformer.h"
    trace = run(model, ATTNLRP.at("*.mlp", linear=rule))
    for layer in range(2):
        for path in inside:
            assert linear_is(trace, model, f"{stem}.{layer}.{path}", name, *extra)
            assert not linear_is(trace, model, f"{stem}.{layer}.{path}", "zero")
        for path in outside:
            assert linear_is(trace, model, f"{stem}.{layer}.{path}", "zero")


def test_of_overlapping_overrides_the_later_wins() -> None:
    model = models.tiny_llama()
    first_narrow = ATTNLRP.at("*.mlp", linear=Gamma(0.4)).at(layers=1, use=LRP)
    first_wide = ATTNLRP.at(layers=1, use=LRP).at("*.mlp", linear=Gamma(0.4))
    path = "model.layers.{}.mlp.down_proj"
    narrow, wide = run(model, first_narrow), run(model, first_wide)
    assert linear_is(narrow, model, path.format(0), "gamma", 0.4)
    assert linear_is(narrow, model, path.format(1), "zero")
    assert linear_is(wide, model, path.format(0), "gamma", 0.4)
    assert linear_is(wide, model, path.format(1), "gamma", 0.4)
    for trace in (narrow, wide):  # of the wide override, what the narrow one does not name stays
        assert not trace.relevance("model.layers.1.self_attn.q_proj").any()
        assert trace.relevance("model.layers.0.self_attn.q_proj").any()
    twice = ATTNLRP.at("*.mlp", linear=Gamma(9.0)).at("*.mlp", linear=Gamma(0.4))
    assert same(embeddings(model, twice), embeddings(model, ATTNLRP.at("*.mlp", linear=Gamma(0.4))))


def test_a_whole_recipe_takes_the_place_of_rules_for_places() -> None:
    """Of two changes that meet, the later holds: also where the first one was of projections alone."""
    model = models.tiny_llama()
    first = ATTNLRP.at(input_projection=Epsilon(1.0), output_projection=Gamma(1.0))
    wanted = ATTNLRP.at(layers=0, input_projection=Epsilon(1.0), output_projection=Gamma(1.0)).at(layers=1, use=LRP)
    assert same(embeddings(model, first.at(layers=1, use=LRP)), embeddings(model, wanted))
    assert same(embeddings(model, first.at(use=LRP)), embeddings(model, LRP))
    assert not same(embeddings(model, first), embeddings(model, ATTNLRP))


PLACED = replace(ATTNLRP, linear=Gamma(0.4), input_projection=Epsilon(1.0), output_projection=Epsilon(2.0))
"""A recipe with rules for projections."""


def placed(q: Any, o: Any = PLACED.output_projection, layers: Any = None) -> Recipe:
    """:data:`PLACED` by names, with another rule at the queries' projection, and the output's, of some layers."""
    recipe = ATTNLRP.at(linear=Gamma(0.4)).at("*.o_proj", linear=Epsilon(2.0))
    recipe = recipe.at("*.[qkv]_proj", linear=Epsilon(1.0))
    return recipe.at("*.q_proj", layers=layers, linear=q).at("*.o_proj", layers=layers, linear=o)


@pytest.mark.parametrize(
    ("recipe", "by_name"),
    [
        (PLACED, placed(Epsilon(1.0))),
        (PLACED.at("*.q_proj", linear=ZPlus(), input_projection=None), placed(ZPlus())),
        (PLACED.at("*.q_proj", use=ATTNLRP), placed(rules.unmodified)),
        (PLACED.at("*.q_proj", input_projection=Gamma(0.4)), placed(Gamma(0.4))),
        (PLACED.at("*.o_proj", output_projection=ZPlus()), placed(Epsilon(1.0), ZPlus())),
        (
            PLACED.at("*.q_proj", layers=slice(1, None), input_projection=None),
            placed(Gamma(0.4), layers=slice(1, None)),
        ),
        (PLACED.at("*.mlp", linear=Epsilon(1.0)), placed(Epsilon(1.0)).at("*.mlp", linear=Epsilon(1.0))),
        (ATTNLRP.at("*.q_proj", input_projection=ZPlus()), ATTNLRP.at("*.q_proj", linear=ZPlus())),
        (ATTNLRP.at("*.o_proj", output_projection=ZPlus()), ATTNLRP.at("*.o_proj", linear=ZPlus())),
    ],
)
def test_projections_whose_rule_changes_in_some_modules_are_those_of_these_names(recipe: Any, by_name: Any) -> None:
    """No layer below is taken for a projection where a projection has no rule by its place, and none is lost."""
    model = models.tiny_llama(num_hidden_layers=4)
    assert same(embeddings(model, recipe), embeddings(model, by_name))


@pytest.mark.parametrize("path", ["*.self_attn", "*.self_attn.*", "*.q_proj", "*.o_proj", "model.layers.1"])
def test_a_rule_for_linear_layers_by_name_is_refused_where_rules_for_projections_hide_it(path: str) -> None:
    model = models.tiny_llama()
    with pytest.raises(
        MethodError, match=r"would change nothing at .*self_attn\.[qo]_proj.*pass (in|out)put_projection="
    ):
        run(model, PLACED.at(path, linear=ZPlus()))
    hidden = PLACED.at(path, linear=ZPlus(), input_projection=None, output_projection=None)
    assert not same(embeddings(model, hidden), embeddings(model, PLACED))


def test_a_rule_for_linear_layers_everywhere_leaves_projections_their_own() -> None:
    model = models.tiny_llama()
    wanted = embeddings(model, replace(PLACED, linear=ZPlus()))
    assert same(embeddings(model, PLACED.at(linear=ZPlus())), wanted)
    by_name = placed(Epsilon(1.0)).at("*.mlp", layers=1, linear=ZPlus())
    assert same(embeddings(model, PLACED.at(layers=1, linear=ZPlus())), embeddings(model, by_name))


def test_an_override_ends_where_its_module_ends() -> None:
    model = models.tiny_gpt2()
    trace = run(model, ATTNLRP.at("transformer.h.0.attn", use=LRP))
    plain = run(model, ATTNLRP)
    above = "transformer.h.0.ln_2"
    assert torch.equal(trace.relevance(above, of="input"), plain.relevance(above, of="input"))
    assert not torch.allclose(trace.relevance("transformer.wte"), plain.relevance("transformer.wte"))


def test_decoder_of_t5_as_cp_lrp() -> None:
    model = models.tiny_t5()
    inputs = {"decoder_input_ids": SOURCE}
    mixed, pure = (run(model, recipe, **inputs) for recipe in (ATTNLRP.at("decoder", use=LRP), LRP))
    for path in ("decoder.block.0", "decoder.block.1"):
        assert_allclose(mixed.relevance(path, of="input"), pure.relevance(path, of="input"), rtol=1e-9, atol=1e-12)
    gradient = pure.gradient("encoder.final_layer_norm")
    assert_allclose(mixed.gradient("encoder.final_layer_norm"), gradient, rtol=1e-9, atol=1e-12)
    with propagate(model.encoder, ATTNLRP) as trace:
        trace.explain((model.encoder(input_ids=TOKENS).last_hidden_state * gradient).sum())
    assert_allclose(mixed.relevance("shared", call=0), trace.relevance("embed_tokens"), rtol=1e-9, atol=1e-12)


def test_layers_of_t5_are_its_blocks_in_both_stacks() -> None:
    model = models.tiny_t5()
    trace = run(model, ATTNLRP.at(layers=1, use=LRP), decoder_input_ids=SOURCE)
    for stack, module in (("encoder", "layer.0.SelfAttention"), ("decoder", "layer.1.EncDecAttention")):
        assert trace.relevance(f"{stack}.block.0.{module}.q").any()
        assert not trace.relevance(f"{stack}.block.1.{module}.q").any()


@pytest.mark.parametrize(
    ("path", "layer"),
    [("model.layers.3.mlp", 3), ("transformer.h.11", 11), ("0", 0), ("decoder.block.1.layer.2.wo", 1),
     ("lm_head", None), ("model.layer4.mlp", None), ("", None), ("model.layers.10.mlp.experts.2.w1", 10)],
)  # fmt: skip
def test_the_number_of_a_layer(path: str, layer: int | None) -> None:
    found = layer_of(path)
    assert (None if found is None else found.number) == layer


@pytest.mark.parametrize("path", ["0", "2"])
def test_an_override_of_a_shared_module_holds_in_each_of_its_calls(path: str) -> None:
    torch.manual_seed(0)
    shared = torch.nn.Linear(3, 3, dtype=torch.float64)
    model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared)
    found = []
    for recipe in (ATTNLRP.at(path, linear=Gamma(0.5)), replace(ATTNLRP, linear=Gamma(0.5)), ATTNLRP):
        with propagate(model, recipe, observe=[path]) as trace:
            trace.explain(model(torch.ones(3, dtype=torch.float64))[0])
        found.append(trace.relevance("input"))
        assert_allclose(trace.relevance(path, of="input", call=0), found[-1], rtol=1e-12)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("layers", [9, [8, 9], [1, 9]])
def test_a_layer_that_there_is_not_is_refused_by_name(layers: Any) -> None:
    model = models.tiny_llama()
    with (
        pytest.raises(MethodError, match=r"LlamaForCausalLM has no layer .*9, which an .* has layers 0 to 1"),
        propagate(model, ATTNLRP.at(layers=layers, use=LRP)),
    ):
        pass
    for ranged in (range(1, 9), range(5, 9)):
        with propagate(model, ATTNLRP.at(layers=ranged, use=LRP)):
            pass


@pytest.mark.parametrize("path", ["model.layers", "model", "lm_head", "model.layers.0.mlp"])
def test_a_path_that_is_in_none_of_the_layers_named_beside_it_is_refused(path: str) -> None:
    with (
        pytest.raises(MethodError, match=r"is nothing in LlamaForCausalLM: what '.*' names is in none of these layers"),
        propagate(models.tiny_llama(), ATTNLRP.at(path, layers=[1], use=LRP)),
    ):
        pass


class ByName(nn.Module):
    """A model that runs its blocks by their ``forward``, and what is in them as modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block.forward(x)
        return x.mean(1)


@pytest.mark.parametrize("path", ["blocks.1", "blocks", "*"])
def test_rules_of_what_is_never_called_are_refused(path: str) -> None:
    recipe = ATTNLRP.at(path, layers=1, linear=Gamma(0.5)) if path == "*" else ATTNLRP.at(path, linear=Gamma(0.5))
    model = ByName()
    with (
        pytest.raises(MethodError, match=r"begins at blocks.*does not call, while it calls blocks\.\d\.0"),
        propagate(model, recipe),
    ):
        model(TOKENS)


def test_rules_of_what_is_called_in_it_are_held() -> None:
    model, found = ByName().double(), []
    for recipe in (ATTNLRP.at("blocks.*.*", linear=Gamma(0.5)), replace(ATTNLRP, linear=Gamma(0.5))):
        with propagate(model, recipe, observe=()) as trace:
            trace.explain(model(TOKENS)[0, 1])
        found.append(trace.source_relevance(trace.sources[0]))
    assert torch.equal(*found)


def test_rules_of_what_does_not_run_are_no_matter() -> None:
    class Half(ByName):
        def forward(self, ids: Tensor) -> Tensor:
            return self.blocks[0](self.embed(ids)).mean(1)

    model = Half()
    with propagate(model, ATTNLRP.at("blocks.*", linear=Gamma(0.5))) as trace:
        trace.explain(model(TOKENS)[0, 1])
