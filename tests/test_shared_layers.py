"""Layers that run again and again: each call of a module is a place of its own, as if the model were written out."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils.checkpoint import checkpoint

import lrpx
from lrpx import circuits, patching
from lrpx.errors import MethodError, ModelError, TraceError
from lrpx.interventions import Patch, Scale, record
from lrpx.model import BoundModel
from lrpx.recipes import ATTNLRP, GRADIENT, RELP
from lrpx.sae import SparseAutoencoder, explain_features
from lrpx.units import KINDS, place_in, places
from tests import tiny
from tests.engine.samples import SAMPLES
from tests.reference import patching as twin

IDS = [5, 9, 3, 12, 7, 22, 8]
OTHER = [5, 9, 11, 12, 4, 22, 8]
RIGHT, WRONG = 4, 5
UNITS = {"residual": 0, "attention": 0, "mlp": 0, "heads": 4, "neurons": 24}


def untied(order):
    """A Llama in which these layers of two run one after another, each a module of its own."""
    sizes = {"num_key_value_heads": 2, "head_dim": 4}
    model = tiny.build(tf.LlamaForCausalLM, tf.LlamaConfig(**tiny.SIZES, **sizes))
    layers = model.model.layers
    model.config.num_hidden_layers = len(order)
    model.model.layers = nn.ModuleList(deepcopy(layers[i]) for i in order)
    return model


def tied(order):
    """The same with one module for a layer, however often it runs."""
    model = untied(order)
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layers[order.index(i)] for i in order)
    return model


ORDERS = pytest.mark.parametrize("order", [(0, 0, 0), (0, 1, 0, 1)], ids=["one", "two"])
NAMES = {(0, 0, 0): ["0#0", "0#1", "0#2"], (0, 1, 0, 1): ["0#0", "1#0", "0#1", "1#1"]}


@ORDERS
def test_each_call_is_a_layer_with_a_name(order):
    model = tied(order)
    for kind in KINDS:
        found = places(model, kind)
        assert [place.layer for place in found] == list(range(len(order)))
        names = [place.name.removeprefix("model.layers.") for place in found]
        assert [f"{name[0]}#{name.partition('#')[2]}" for name in names] == NAMES[order]
        assert place_in(found, 2) == place_in(found, found[2].name) == found[2]


@ORDERS
@pytest.mark.parametrize("kind", KINDS)
def test_units_are_ranked_as_in_the_model_written_out(order, kind):
    one, other = (lrpx.Explainer(make(order)) for make in (tied, untied))
    found, wanted = (each.neurons(IDS, 5, kind=kind, top=40) for each in (one, other))
    assert [(row.layer, row.unit, row.position) for row in found] == [
        (row.layer, row.unit, row.position) for row in wanted
    ]
    for name in ("relevance", "activation"):
        values = torch.tensor([[getattr(row, name) for row in each] for each in (found, wanted)], dtype=torch.float64)
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-9)
    assert len({row.path for row in found}) > 1


@ORDERS
@pytest.mark.parametrize("method", ["rollout", "gradient-rollout", "grad-cam", "atman", "ifr"])
def test_attention_of_a_module_that_is_in_the_list_of_layers_several_times(order, method):
    wanted, found = (lrpx.Explainer(make(order))(IDS, RIGHT, method=method) for make in (untied, tied))
    torch.testing.assert_close(found.relevance, wanted.relevance)


@ORDERS
def test_flow_and_paths_are_those_of_the_model_written_out(order):
    one, other = (lrpx.Explainer(make(order)) for make in (tied, untied))
    found, wanted = one.flow(IDS, 5), other.flow(IDS, 5)
    for part in ("residual", "attention", "mlp", "heads"):
        torch.testing.assert_close(found[part], wanted[part], rtol=0, atol=1e-9)
    labels = found.attribution.parts["residual"].labels["layer"]
    assert labels == tuple(f"model.layers.{name}" for name in NAMES[order])
    for layer in range(len(order)):
        paths = [each.paths(IDS, 5, layer=layer, units=[1, 0]).parts["paths"].values for each in (one, other)]
        torch.testing.assert_close(paths[0], paths[1], rtol=0, atol=1e-9)
    by_name = one.paths(IDS, 5, layer="model.layers.0.self_attn#1", units=[1, 0]).parts["paths"].values
    number = NAMES[order].index("0#1")
    assert torch.equal(by_name, one.paths(IDS, 5, layer=number, units=[1, 0]).parts["paths"].values)


@ORDERS
@pytest.mark.parametrize("kind", patching.KINDS)
def test_patching_is_the_twins(order, kind):
    module = tied(order)
    model = BoundModel(module)
    pair = patching.pair_of(model, IDS, OTHER, RIGHT, WRONG)
    wanted = twin.exact(module, IDS, OTHER, kind, UNITS[kind], RIGHT, WRONG)
    assert len(wanted) == len(order)
    torch.testing.assert_close(patching.exact(model, pair, kind), wanted, rtol=0, atol=1e-9)
    for recipe, rules, steps in ((GRADIENT, twin.PLAIN, 1), (RELP, twin.RELP, 1), (ATTNLRP, twin.ATTNLRP, 3)):
        found = patching.attributed(model, pair, recipe, [kind], steps=steps)[kind]
        wanted = twin.attributed(module, IDS, OTHER, kind, UNITS[kind], RIGHT, WRONG, rules, steps)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("whole", [False, True])
def test_edges_are_the_twins(whole):
    module = tied((0, 0, 0))
    model = BoundModel(module)
    pair = patching.pair_of(model, IDS, OTHER, RIGHT, WRONG)
    graph = circuits.graph_of(model, pair, whole=whole)
    assert graph.readers[2 if whole else 9] == ("model.layers.0.input_layernorm#1" if whole else "query 1.0")
    assert graph.readers[-1] == "model.norm"
    assert graph.writers[5:7] == ("mlp 0", "head 1.0")
    wanted = twin.edge_scores(module, IDS, OTHER, RIGHT, WRONG, twin.RELP, whole=whole)
    found = circuits.scores(model, pair, graph, RELP)
    for row, line in zip(found, wanted, strict=True):
        torch.testing.assert_close(row[: len(line)], torch.tensor(line, dtype=torch.float64), rtol=0, atol=1e-9)
    drawn = torch.rand(3, *graph.edges.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    values = circuits.run(model, pair, graph, drawn & graph.edges)
    wanted = [twin.circuit(module, IDS, OTHER, RIGHT, WRONG, each.tolist(), whole) for each in drawn]
    torch.testing.assert_close(values, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)
    circuits.check_closes(model, pair, graph)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits


def by_hand(module, which, change, side):
    """Torch's own hook, in one call of the module."""
    calls = []

    def hook(_, args, out=None):
        calls.append(1)
        there = args[0] if out is None else out
        changed = change(there.clone()) if len(calls) - 1 == which else there
        return changed if out is not None else (changed, *args[1:])

    return module.register_forward_hook(hook) if side == "output" else module.register_forward_pre_hook(hook)


def head(x):
    x[..., 4:8] *= -2
    return x


def neuron(x):
    x[..., 3] = 0.5
    return x


@pytest.mark.parametrize("call", [0, 1, 2])
def test_one_call_is_changed_as_a_hook_that_counts_would(call):
    model = tied((0, 0, 0))
    layer = model.model.layers[0]
    path = "model.layers.0"
    cases = [
        ({f"{path}.self_attn#{call}": {1: Scale(-2)}}, layer.self_attn.o_proj, "input", head),
        ({places(model, "heads")[call]: {1: Scale(-2)}}, layer.self_attn.o_proj, "input", head),
        ({f"{path}.mlp.down_proj#{call}": {3: 0.5}}, layer.mlp.down_proj, "input", neuron),
        ({f"{path}#{call}": {3: 0.5}}, layer, "output", neuron),
        ({(f"{path}.mlp#{call}", "input"): {3: 0.5}}, layer.mlp, "input", neuron),
    ]
    plain = logits(model)
    for changes, module, side, change in cases:
        with lrpx.intervene(model, changes):
            found = logits(model)
            again = logits(model)  # calls are counted anew
        with by_hand(module, call, change, side):
            assert torch.equal(found, logits(model))
        assert torch.equal(found, again)
        assert not torch.equal(found, plain)


def test_what_one_call_had_is_put_into_another():
    model = tied((0, 0, 0))
    with record(model, ["model.layers.0#0", "model.layers.0#2"]) as seen:
        logits(model)
    first, last = seen["model.layers.0#0"][0], seen["model.layers.0#2"][0]
    with lrpx.intervene(model, {"model.layers.0#2": Patch(first)}):
        early = logits(model)
    assert not torch.equal(first, last)
    torch.testing.assert_close(early, model.lm_head(model.model.norm(first))[None], rtol=0, atol=1e-12)


def test_albert_is_patched_as_by_hooks_that_count():
    module = SAMPLES["albert"].build()
    model = BoundModel(module)
    pair = patching.pair_of(model, IDS, OTHER, RIGHT, WRONG, position=3)
    found = patching.exact(model, pair, "heads")
    inner = module.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.dense

    def value(ids):
        row = module(input_ids=torch.tensor([ids])).logits[0, 3]
        return float(row[RIGHT] - row[WRONG])

    with torch.no_grad():
        kept = []
        with inner.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone())):
            value(OTHER)
        before = value(IDS)
        for call in range(2):
            for unit in range(4):
                mine = slice(unit * 4, unit * 4 + 4)

                def patched(x, call=call, mine=mine):
                    x[..., mine] = kept[call][..., mine]
                    return x

                with by_hand(inner, call, patched, "input"):
                    assert abs(float(found[call, unit]) - (value(IDS) - before)) < 1e-9


def test_a_module_of_two_layers_has_a_place_in_each():
    model = untied((0, 1))
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    names = [(place.layer, place.name) for place in places(model, "neurons")]
    assert names == [(i, f"model.layers.0.mlp.down_proj#{i}") for i in range(2)]
    wanted = untied((0, 1))
    wanted.model.layers[1].mlp = deepcopy(wanted.model.layers[0].mlp)
    for part in ("mlp", "residual"):
        one, other = (lrpx.Explainer(each).flow(IDS, 5)[part] for each in (model, wanted))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


class Twice(nn.Module):
    """An MLP that is applied two times."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


def test_a_module_that_runs_twice_in_a_layer():
    model = untied((0, 1))
    model.model.layers[1].mlp = Twice(model.model.layers[1].mlp)
    names = [(place.layer, place.name) for place in places(model, "neurons")]
    path = "model.layers.1.mlp.inner.down_proj"
    assert names == [(0, "model.layers.0.mlp.down_proj"), (1, f"{path}#0"), (1, f"{path}#1")]
    explainer = lrpx.Explainer(model)
    with pytest.raises(MethodError, match=rf"has neurons in {path}#0, {path}#1; pass the path of one"):
        explainer.paths(IDS, 5, layer=1, kind="neurons")
    rows = explainer.paths(IDS, 5, layer=f"{path}#1", kind="neurons", units=2).parts["paths"].values
    torch.testing.assert_close(rows.sum(0), explainer(IDS, 5).relevance, rtol=0, atol=1e-9)
    assert explainer.flow(IDS, 5)["mlp"].shape == (2, len(IDS))
    with (
        pytest.raises(MethodError, match="name one of the 2 calls of that"),
        lrpx.intervene(model, {"model.layers.1.mlp#0": {3: 0.0}}),
    ):
        pass


def autoencoder():
    drawn = torch.Generator().manual_seed(0)
    encoder, decoder = (torch.randn(*shape, generator=drawn) for shape in ((16, 20), (20, 16)))
    return SparseAutoencoder(encoder, torch.zeros(20), decoder, torch.zeros(16), hook="blocks.1.hook_resid_post")


def test_features_at_one_call():
    one, other = (lrpx.Explainer(make((0, 0, 0))) for make in (tied, untied))
    wanted = explain_features(other, IDS, autoencoder(), 5)
    assert wanted.path == "model.layers.1"
    for path in (None, "model.layers.0#1"):
        found = explain_features(one, IDS, autoencoder(), 5, path=path)
        assert found.path == "model.layers.0#1"
        torch.testing.assert_close(found.relevance, wanted.relevance, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.attribution.relevance, wanted.attribution.relevance, rtol=0, atol=1e-9)
    with pytest.raises(ModelError, match=r"is called several times .* pass path='model\.layers\.0#0', or a later"):
        explain_features(one, IDS, autoencoder(), 5, path="model.layers.0")
    with pytest.raises(ModelError, match=r"did not come to model\.layers\.0#3"):
        explain_features(one, IDS, autoencoder(), 5, path="model.layers.0#3")


class Checkpointed(nn.Module):
    """A layer that forgets what it saves, and computes it again."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, **given):
        return checkpoint(self.inner, x, use_reentrant=False, **given)


def test_checkpoints_of_the_models_own():
    model, plain = untied((0, 1)), untied((0, 1))
    model.model.layers = nn.ModuleList(Checkpointed(layer) for layer in model.model.layers)
    changes = {("model.layers.0.inner.mlp.down_proj", "input"): Scale(-2)}
    with lrpx.intervene(model, changes):
        found = lrpx.Explainer(model)(IDS, 5).relevance
    with lrpx.intervene(plain, {("model.layers.0.mlp.down_proj", "input"): Scale(-2)}):
        wanted = lrpx.Explainer(plain)(IDS, 5).relevance
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    model.model.layers = nn.ModuleList([model.model.layers[0]] * 3)
    with (
        pytest.raises(TraceError, match="runs again in the backward pass, where nobody knows which call"),
        lrpx.intervene(model, {("model.layers.0.inner.mlp.down_proj#1", "input"): Scale(-2)}),
    ):
        lrpx.Explainer(model)(IDS, 5)


class Deeper(nn.Module):
    """A layer that runs its MLP again where there are many tokens."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        x = self.inner(x)
        return self.inner(x) if x.shape[1] > 5 else x


def test_depth_that_depends_on_the_input_is_refused():
    model = untied((0, 1))
    model.model.layers[1].mlp = Deeper(model.model.layers[1].mlp)
    with pytest.raises(TraceError, match="was called 2 times, and 1 when its units were looked for"):
        lrpx.Explainer(model).neurons(IDS, 5)


class Sent(nn.Module):
    """Two experts, of which the second runs where a token is sent to it: the sixth, or a later one."""

    def __init__(self, first, second):
        super().__init__()
        self.experts = nn.ModuleList([first, second])

    def forward(self, x):
        to = (torch.arange(x.shape[1]) > 4).long()
        return sum((to == i)[:, None] * each(x) for i, each in enumerate(self.experts) if bool((to == i).any()))


def test_an_expert_that_nothing_was_sent_to_is_refused():
    """Where it runs, and its units were not looked for: those of the other expert were ranked as if they were all."""
    model = untied((0, 1))
    model.model.layers[0].mlp = Sent(*(layer.mlp for layer in model.model.layers))
    model.model.layers = model.model.layers[:1]
    explainer = lrpx.Explainer(model)
    assert explainer.neurons(IDS[:5], 5).count == 5 * 24
    for asked in (explainer.neurons, explainer.flow):
        with pytest.raises(TraceError, match=r"layers\.0\.mlp\.experts\.1\..* was called, and was not when"):
            asked(IDS, 5)
    changes = {"model.layers.0.mlp": {3: 5.0}}
    with pytest.raises(MethodError, match=r"layers\.0\.mlp has no neurons"), lrpx.intervene(model, changes):
        pass


def test_an_expert_that_nothing_was_sent_to_is_refused_in_paths_patching_and_circuits():
    """A table had the units of the other expert alone; and a layer's number, or its MLP's, meant that one."""
    module = untied((0, 1))
    module.model.layers[0].mlp = Sent(*(layer.mlp for layer in module.model.layers))
    module.model.layers = module.model.layers[:1]
    explainer, model = lrpx.Explainer(module), BoundModel(module)
    refused = pytest.raises(TraceError, match=r"layers\.0\.mlp\.experts\.1\..* was called, and was not when")
    for layer in (0, "model.layers.0.mlp"):
        with refused:
            explainer.paths(IDS, 5, layer=layer, kind="neurons")
        explainer.paths(IDS[:5], 5, layer=layer, kind="neurons")
    named = explainer.paths(IDS, 5, layer="model.layers.0.mlp.experts.0.down_proj", kind="neurons", units=2)
    torch.testing.assert_close(named.parts["paths"].values.sum(0), named.relevance, rtol=0, atol=1e-9)
    for length in (5, 7):
        pair = patching.pair_of(model, IDS[:length], OTHER[:length], RIGHT, WRONG)
        graph = circuits.graph_of(model, pair)
        for asked in (
            lambda pair=pair: patching.exact(model, pair, "neurons"),
            lambda pair=pair: patching.attributed(model, pair, RELP, ["mlp"]),
            lambda pair=pair, graph=graph: circuits.scores(model, pair, graph, RELP),
        ):
            if length == 5:
                asked()
                continue
            with refused:
                asked()


def test_what_is_refused():
    model = tied((0, 0, 0))
    for path in ("model.layers.1", "model.layers.0", "model.layers.2.mlp"):
        with (
            pytest.raises(MethodError, match=r"is one module with .*name a call, 'model\.layers\.0"),
            lrpx.intervene(model, {path: Scale(2)}),
        ):
            pass
    with (
        pytest.raises(TraceError, match=r"did not come to the output of model\.layers\.0#3"),
        lrpx.intervene(model, {"model.layers.0#3": Scale(2)}),
    ):
        logits(model)
    with (
        pytest.raises(MethodError, match="no module 'model"),
        lrpx.intervene(model, {"model.layers.0#x": 0}),
    ):
        pass
    with pytest.raises(MethodError, match="no heads in layer 3; there are in 0 to 2"):
        lrpx.Explainer(model).paths(IDS, 5, layer=3)


def albert():
    return SAMPLES["albert"].build()


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (albert, 0), (albert, slice(1, None)), (albert, range(1, 2)),
        (lambda: untied_twice((0, 1)), 0), (lambda: untied_twice((0, 1)), slice(2, 4)),
    ],
)  # fmt: skip
def test_rules_of_some_runs_are_refused(build, layers):
    """A module has the same rules in all of them."""
    with pytest.raises(MethodError, match="runs several times, and a module has the same rules in all of them"):
        lrpx.Explainer(build())(IDS, 5, position=3, method=ATTNLRP.at(layers=layers, use=GRADIENT))


@pytest.mark.parametrize("build", [albert, lambda: untied_twice((0, 1))])
def test_rules_of_all_runs_hold(build):
    how = {"target": 5, "position": 3}
    explain = lrpx.Explainer(build())
    wanted = explain(IDS, method=ATTNLRP.at("*layer*.[01]", use=GRADIENT), **how).relevance
    for layers in (slice(None), range(12)):
        recipe = ATTNLRP.at(layers=layers, use=GRADIENT)
        for _ in range(2):  # runs are counted anew
            assert torch.equal(explain(IDS, method=recipe, **how).relevance, wanted)
    none = explain(IDS, method=ATTNLRP.at(layers=slice(12, None), use=GRADIENT), **how).relevance
    assert torch.equal(none, explain(IDS, method=ATTNLRP, **how).relevance)
    assert not torch.equal(none, wanted)


class Again(nn.ModuleList):
    """Layers, all of which run twice."""

    def __iter__(self):
        return iter([*super().__iter__()] * 2)

    def __getitem__(self, index):
        return [*self][index] if isinstance(index, slice) else super().__getitem__(index)


def untied_twice(order):
    model = untied(order)
    model.model.layers = Again(model.model.layers)
    model.config.num_hidden_layers = 2 * len(order)
    return model


def test_rules_of_one_place_of_a_shared_module():
    mixed = ATTNLRP.at(layers=1, use=GRADIENT)
    with pytest.raises(MethodError, match=r"model\.layers\.1 is one module with model\.layers\.0"):
        lrpx.Explainer(tied((0, 0, 1)))(IDS, 5, method=mixed)
    one = lrpx.Explainer(tied((0, 0, 1)))(IDS, 5, method=ATTNLRP.at(layers=[0, 1], use=GRADIENT)).relevance
    other = lrpx.Explainer(untied((0, 0, 1)))(IDS, 5, method=ATTNLRP.at(layers=[0, 1], use=GRADIENT)).relevance
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    # a part of two layers has the rules of the layer that runs it, unless it is named itself
    model, wanted = untied((0, 1)), untied((0, 1))
    model.model.layers[1].mlp = model.model.layers[0].mlp
    wanted.model.layers[1].mlp = deepcopy(wanted.model.layers[0].mlp)
    one, other = (lrpx.Explainer(each)(IDS, 5, method=mixed).relevance for each in (model, wanted))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    with pytest.raises(MethodError, match=r"layers\.1\.mlp is one module with model\.layers\.0\.mlp"):
        lrpx.Explainer(model)(IDS, 5, method=ATTNLRP.at("*.mlp", layers=1, use=GRADIENT))
