"""Patching and circuits: against twins in plain loops, closed in every family, and refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lrpx
from lrpx import circuits, patching
from lrpx.errors import InputError, MethodError, ModelError, TargetError, TraceError
from lrpx.interventions import Add, Clamp, Patch, Scale, Set
from lrpx.model import BoundModel, Spec
from lrpx.recipes import ATTNLRP, GIM, GRADIENT, LRP, RELP
from lrpx.tasks import Task
from tests import tiny
from tests.reference import patching as twin
from tests.reference.models import tiny_gpt2
from tests.test_own_outputs import of_hidden_states
from tests.test_units import Experts, OfLayers, OfPostNorms, PostNorm, WithHeads

CLEAN, CORRUPT = [3, 4, 5, 6, 7, 8], [3, 4, 11, 6, 9, 8]
RIGHT, WRONG = 4, 5
UNITS = {"residual": 0, "attention": 0, "mlp": 0, "heads": 4, "neurons": 24}


def llama(**more):
    return tiny.build(tf.LlamaForCausalLM, tf.LlamaConfig(**tiny.SIZES, num_key_value_heads=2, head_dim=4, **more))


def gemma3():
    sizes = {"num_key_value_heads": 2, "head_dim": 4}
    return tiny.build(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**tiny.SIZES, **sizes))


def gpt2():
    return tiny.build(tf.GPT2LMHeadModel, tf.GPT2Config(**tiny.GPT2_SIZES, **tiny.GPT2_TOKENS))


def phi():
    """One norm before an attention and an MLP side by side."""
    return tiny.build(tf.PhiForCausalLM, tf.PhiConfig(**tiny.SIZES))


def gated():
    """The matrix of the queries gives each head a gate as well."""
    more = {"layer_types": ["full_attention"] * 2, "num_experts": 0, "mlp_only_layers": [0, 1]}
    sizes = {"num_key_value_heads": 2, "head_dim": 4}
    return tiny.build(tf.Qwen3NextForCausalLM, tf.Qwen3NextConfig(**tiny.SIZES, **sizes, **more))


def olmo2():
    """An attention reads the stream itself, and a norm what it gives."""
    sizes = {"num_key_value_heads": 2, "head_dim": 4}
    return tiny.build(tf.Olmo2ForCausalLM, tf.Olmo2Config(**tiny.SIZES, **sizes))


def modernbert_decoder():
    """Before the first attention stands the identity in the place of a norm."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return tiny.build(tf.ModernBertDecoderForCausalLM, tf.ModernBertDecoderConfig(**tiny.SIZES, **tokens))


FAMILIES = {
    "llama": llama,
    "olmo2": olmo2,
    "modernbert-decoder": modernbert_decoder,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "neox": tiny.neox,
    "bloom": tiny.bloom,
    "phi": phi,
    "gated": gated,
}
COUNTS = {
    "llama": (82, 33),
    "olmo2": (82, 33),
    "modernbert-decoder": (110, 33),
    "gemma3": (82, 33),
    "gpt2": (110, 33),
    "neox": (102, 25),
    "bloom": (110, 33),
    "phi": (102, 18),
    "gated": (89, 33),
}
"""The edges by hand: with 4 heads 1, 5, 6, 10 and 11 writers are before the readers of 2 layers and the output."""


@pytest.fixture(scope="module")
def module():
    return llama()


@pytest.fixture(scope="module")
def model(module):
    return BoundModel(module)


@pytest.fixture(scope="module")
def pair(model):
    return patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)


@pytest.mark.parametrize("kind", patching.KINDS)
def test_exact_patching_is_what_a_twin_patches_one_by_one(module, model, pair, kind):
    wanted = twin.exact(module, CLEAN, CORRUPT, kind, UNITS[kind], RIGHT, WRONG)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(patching.exact(model, pair, kind), wanted, rtol=0, atol=1e-9)
    if kind == "heads":  # a copy alone is as good as a batch
        torch.testing.assert_close(patching.exact(model, pair, kind, batch_size=1), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("is_known", "is_watched"), [(False, False), (True, False), (True, True)])
def test_a_head_on_hidden_states_is_given_what_was_put_there(is_known, is_watched):
    """transformers keeps them by hooks that are there for good, before those of a run."""
    module = of_hidden_states(is_known)
    if is_watched:
        module.body.layers[1].register_forward_hook(lambda *_: None)
    model = BoundModel(module, task=Task.CAUSAL)
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    clean, corrupt = (module.body(torch.tensor([ids]), output_hidden_states=True) for ids in (CLEAN, CORRUPT))
    states = [each.hidden_states[2][0, -1] for each in (clean, corrupt)]
    weight = module.head.weight[RIGHT] - module.head.weight[WRONG]
    moved = (weight[16:] @ (states[1] - states[0])).item()  # the last token behind the second layer
    assert patching.exact(model, pair, "residual")[1, -1].item() == pytest.approx(moved, abs=1e-12)
    scores = patching.attributed(model, pair, GRADIENT, ["residual"], steps=2)["residual"]
    assert scores[1, -1].item() == pytest.approx(moved, abs=1e-12)


@pytest.mark.parametrize(("recipe", "rules"), [(GRADIENT, twin.PLAIN), (RELP, twin.RELP), (ATTNLRP, twin.ATTNLRP)])
@pytest.mark.parametrize("steps", [1, 3])
def test_attribution_is_the_twins_differences_times_coefficients(module, model, pair, recipe, rules, steps):
    found = patching.attributed(model, pair, recipe, steps=steps)
    for kind, units in UNITS.items():
        wanted = twin.attributed(module, CLEAN, CORRUPT, kind, units, RIGHT, WRONG, rules, steps)
        torch.testing.assert_close(found[kind], wanted, rtol=0, atol=1e-9)


def test_exact_patching_is_what_hooks_written_by_hand_do(module, model, pair):
    """One head of the second layer, at all positions, by torch's own hooks."""
    found = patching.exact(model, pair, "heads")
    matrix, kept = module.model.layers[1].self_attn.o_proj, []

    def value(ids):
        logits = module(input_ids=torch.tensor([ids])).logits[0, -1]
        return float(logits[RIGHT] - logits[WRONG])

    with torch.no_grad():
        with matrix.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone())):
            value(CORRUPT)

        def patch(_, args):
            changed = args[0].clone()
            changed[..., 8:12] = kept[0][..., 8:12]
            return (changed,)

        before = value(CLEAN)
        with matrix.register_forward_pre_hook(patch):
            after = value(CLEAN)
    assert abs(float(found[1, 2]) - (after - before)) < 1e-9


def test_patches_of_all_at_once_turn_the_clean_run_into_the_corrupt_one(model, pair):
    """The whole stream of a layer is all that later ones see."""
    place = patching.parts_of(model, "residual")[0]
    values = patching.recorded(model, pair, [place])[place]
    after = patching.patched(model, pair.questions.alone([0]), [{place: Patch(values[1])}, {}])
    torch.testing.assert_close(after, model.values(pair.questions).flip(0), rtol=0, atol=1e-12)


def test_many_changes_at_once_are_each_what_intervene_makes_of_it(module, model, pair):
    heads = patching.parts_of(model, "heads")
    other = patching.recorded(model, pair, [heads[1]])[heads[1]][1]
    runs = [
        {"model.layers.0.mlp": {3: 0.0, 5: 0.0, 7: Scale(5)}, heads[1]: {2: Patch(other)}},
        {},
        {"model.layers.1": Add(torch.linspace(-1, 1, 16), positions=[2, 5])},
        {heads[0]: Clamp(-0.01, 0.01), ("model.layers.1.mlp", "output"): {4: 1.5}},
    ]
    found = patching.patched(model, pair.questions.alone([0]), runs)
    for value, changes in zip(found, runs, strict=True):
        with lrpx.intervene(module, changes) if changes else nullcontext():
            wanted = model.values(pair.questions.alone([0]))[0]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-9)
    assert len(set(found.tolist())) == 4
    for changes, error, told in (
        ({heads[0]: {4: 0.0}}, MethodError, "has 4 heads"),
        ({"model.layers.0": Set(0.0, positions=[9])}, TraceError, "no text in this block had position 9"),
        ({"model.layers.7": 0.0}, MethodError, "no module 'model.layers.7'"),
    ):
        with pytest.raises(error, match=told):
            patching.patched(model, pair.questions.alone([0]), [changes])


class Convolved(nn.Module):
    """A convolution over the tokens, of a map [B, d, T] and a wider one, before an attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.convolution = nn.Embedding(31, 12), nn.Conv1d(12, 12, 3, padding=2, groups=12)
        self.norm, self.qkv, self.head = nn.BatchNorm1d(12), nn.Linear(12, 36), nn.Linear(12, 31)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        x = x + self.norm(self.convolution(x.mT)[..., : x.shape[1]]).mT.tanh()
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


VECTOR = torch.linspace(-1, 1, 12, dtype=torch.float64)
TIED = {"num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("build", "place", "changes"),
    [
        (lambda: Convolved().double().eval(), ("convolution", "output"), [{3: 0.0}, Add(VECTOR), Scale(2.0)]),
        (lambda: Convolved().double().eval(), ("norm", "input"), [{3: 0.0}, {3: Set(0.0, positions=[2])}]),
        (
            lambda: tiny.build(tf.Qwen3ForCausalLM, tf.Qwen3Config(**tiny.SIZES | TIED), "eager"),
            ("model.layers.0.self_attn.q_norm", "output"),
            [{3: 0.0}, Add(VECTOR[:4])],
        ),
        (tiny.bert_classifier, ("bert.pooler.dense", "output"), [{1: 2.0}, {15: Scale(3.0)}]),
    ],
    ids=["convolution", "batch norm", "norm of each head", "pooler"],
)
def test_places_that_are_no_list_of_vectors_are_changed_as_intervene_changes_them(build, place, changes):
    """Maps have their channels second, heads and poolers no vector for each token: and each run is its own row's."""
    module = build()
    model = BoundModel(module, None, task=Task.CAUSAL if isinstance(module, Convolved) else None)
    question = patching.pair_of(model, CLEAN, CORRUPT, 1, 2).questions.alone([0])
    plain = model.values(question)
    found = patching.patched(model, question, [{}, *({place: change} for change in changes), {}])
    expected = [plain]
    for change in changes:
        with lrpx.intervene(module, {place: change}):
            expected.append(model.values(question))
        assert not torch.equal(expected[-1], plain)
    assert torch.allclose(found, torch.cat([*expected, plain]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "place", "change", "told"),
    [
        (
            tiny_gpt2,
            "transformer.wpe",
            {3: 0.0},
            r"nobody knows which numbers of .*wpe, \[1, \d+, 16\], are of which of 2",
        ),
        (lambda: Convolved().double().eval(), "convolution", Set(0.0, positions=[2]), "nobody knows at which tokens"),
        (lambda: Experts().double().eval(), "layers.0.experts.1", 0.0, "picked among .* one run after another"),
    ],
)
def test_numbers_that_are_no_rows_alone_are_refused(build, place, change, told):
    module = build()
    model = BoundModel(module, None, task=Task.CAUSAL)
    question = patching.pair_of(model, CLEAN, CORRUPT, 1, 2).questions.alone([0])
    with pytest.raises((MethodError, TraceError), match=told):
        patching.patched(model, question, [{}, {(place, "output"): change}])


def test_only_the_parts_asked_for_are_patched(model, pair):
    whole = patching.exact(model, pair, "mlp")
    some = patching.exact(model, pair, "mlp", which=[(1, 5), (0, 2)])
    assert some.isnan().sum() == whole.numel() - 2
    torch.testing.assert_close(some[1, 5], whole[1, 5], rtol=0, atol=1e-12)
    torch.testing.assert_close(some[0, 2], whole[0, 2], rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="there is no part 6 of layer 1; mlp has 2 × 6"):
        patching.exact(model, pair, "mlp", which=[(1, 6)])


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(3, 30), min_size=3, max_size=7).flatmap(
        lambda ids: st.tuples(st.just(ids), st.lists(st.integers(3, 30), min_size=len(ids), max_size=len(ids)))
    )
)
def test_scores_turn_round_with_the_answers_and_vanish_where_nothing_differs(model, both):
    clean, corrupt = both
    if clean == corrupt:
        return
    one = patching.pair_of(model, clean, corrupt, RIGHT, WRONG)
    other = patching.pair_of(model, clean, corrupt, WRONG, RIGHT)
    found, turned = (patching.attributed(model, each, RELP) for each in (one, other))
    for kind in patching.KINDS:
        torch.testing.assert_close(found[kind], -turned[kind], rtol=0, atol=1e-9)
        if kind in ("residual", "attention", "mlp"):
            assert found[kind][:, : one.first].abs().max().item() < 1e-12 if one.first else True


@pytest.mark.parametrize("recipe", [GRADIENT, RELP, LRP, ATTNLRP, GIM])
def test_nothing_of_the_model_changes(module, model, pair, recipe):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    logits = module(input_ids=torch.tensor([CLEAN])).logits
    patching.attributed(model, pair, recipe, ["heads"])
    patching.exact(model, pair, "heads")
    graph = circuits.graph_of(model, pair)
    circuits.run(model, pair, graph, graph.edges[None])
    with pytest.raises(InputError, match="99 features"):
        patching.patched(model, pair.questions.alone([0]), [{"model.layers.0": Patch(torch.zeros(99, 99))}])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    assert torch.equal(module(input_ids=torch.tensor([CLEAN])).logits, logits)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def both_ways(request):
    """A model whose queries, keys and values are of three matrices, the last two shared by heads; and of one."""
    found = FAMILIES[request.param]()
    bound = BoundModel(found)
    return found, bound, patching.pair_of(bound, CLEAN, CORRUPT, RIGHT, WRONG)


@pytest.mark.parametrize("rules", [(GRADIENT, twin.PLAIN), (RELP, twin.RELP), (ATTNLRP, twin.ATTNLRP)])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_edge_scores_are_the_twins(both_ways, rules, steps, whole):
    module, model, pair = both_ways
    graph = circuits.graph_of(model, pair, whole=whole)
    wanted = twin.edge_scores(module, CLEAN, CORRUPT, RIGHT, WRONG, rules[1], steps, whole)
    found = circuits.scores(model, pair, graph, rules[0], steps=steps)
    assert graph.count == sum(map(len, wanted))
    assert found.abs().max() > 1e-2
    for row, line in zip(found, wanted, strict=True):
        torch.testing.assert_close(row[: len(line)], torch.tensor(line, dtype=torch.float64), rtol=0, atol=1e-9)
        assert not row[len(line) :].any()


@pytest.mark.parametrize("whole", [False, True])
def test_a_circuit_is_the_twins_mix(both_ways, whole):
    module, model, pair = both_ways
    graph = circuits.graph_of(model, pair, whole=whole)
    drawn = torch.rand(5, *graph.edges.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    wanted = [twin.circuit(module, CLEAN, CORRUPT, RIGHT, WRONG, each.tolist(), whole) for each in drawn]
    for size in (16, 1):
        found = circuits.run(model, pair, graph, drawn & graph.edges, batch_size=size)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_edge_is_the_corrupt_run_and_every_edge_the_clean_one(family):
    model = BoundModel(FAMILIES[family]())
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    wanted = model.values(pair.questions)
    for whole in (False, True):
        graph = circuits.graph_of(model, pair, whole=whole)
        assert graph.count == COUNTS[family][whole]
        both = circuits.run(model, pair, graph, torch.stack([graph.edges, torch.zeros_like(graph.edges)]))
        assert abs(float(wanted[0] - wanted[1])) > 0.01
        torch.testing.assert_close(both, wanted, rtol=0, atol=1e-9 if family != "gemma3" else 1e-5)
        circuits.check_closes(model, pair, graph)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", [GRADIENT, RELP])
def test_what_an_attention_reads_is_what_its_heads_read(family, recipe):
    """Gradients add up, and so do the scores of a norm's readers."""
    model = BoundModel(FAMILIES[family]())
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    apart, whole = (circuits.graph_of(model, pair, whole=each) for each in (False, True))
    wanted = circuits.scores(model, pair, whole, recipe)
    parts = circuits.scores(model, pair, apart, recipe)
    at = torch.tensor([whole.wiring.readers.index(replace(each, share=None)) for each in apart.wiring.readers])
    found = torch.zeros_like(wanted).index_add(0, at, parts)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 if family != "gemma3" else 1e-4)


def test_one_edge_after_another_is_a_circuit_without_it(model, pair):
    graph = circuits.graph_of(model, pair)
    found = circuits.exact_edges(model, pair, graph)
    reader, writer = graph.readers.index("key 1.1"), graph.writers.index("mlp 0")
    without = graph.edges.clone()
    without[reader, writer] = False
    values = circuits.run(model, pair, graph, torch.stack([without, graph.edges]))
    torch.testing.assert_close(found[reader, writer], values[0] - values[1], rtol=0, atol=1e-9)
    assert abs(found[reader, writer]) > 1e-4
    assert not found[~graph.edges].any()


def test_the_best_edges_are_those_of_the_largest_scores(model, pair):
    graph = circuits.graph_of(model, pair, whole=True)
    scores = torch.zeros_like(graph.edges, dtype=torch.float64)
    scores[2, 1], scores[4, 3], scores[0, 5] = -3.0, 2.0, 99.0  # the last is no edge
    best = circuits.chosen(graph, scores, 2)
    assert best.nonzero().tolist() == [[2, 1], [4, 3]]
    assert not circuits.chosen(graph, scores, 0).any()
    assert torch.equal(circuits.chosen(graph, scores, graph.count), graph.edges)


def test_what_cannot_be_patched_is_refused(model):
    bundled = Spec().build()
    with pytest.raises(InputError, match=r"7 tokens and the corrupt one 6; patching needs as many"):
        patching.pair_of(bundled, "The doors of the old house", "The doors of the house", " are", " is")
    with pytest.raises(InputError, match="are the same tokens"):
        patching.pair_of(bundled, "The doors", "The doors", " are", " is")
    with pytest.raises(TargetError, match="tokens"):
        patching.pair_of(bundled, "The doors", "The door", " Bartholomew", " is")
    with pytest.raises(TargetError, match="the same token"):
        patching.pair_of(bundled, "The doors", "The door", " is", " is")
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    with pytest.raises(InputError, match="no kind of parts 'layers'; the kinds are residual"):
        patching.exact(model, pair, "layers")
    graph = circuits.graph_of(model, pair)
    for steps in (0, 1.5, "2"):  # of one and a half, the last point would be beyond the clean input
        for asked in (
            lambda steps=steps: patching.attributed(model, pair, GRADIENT, steps=steps),
            lambda steps=steps: circuits.scores(model, pair, graph, GRADIENT, steps=steps),
        ):
            with pytest.raises(InputError, match=f"steps is {steps!r}; pass a whole number, at least 1"):
                asked()
    with pytest.raises(MethodError, match=r"the recipe is 'relp'; pass one of lrpx\.recipes"):
        patching.attributed(model, pair, "relp")
    with pytest.raises(InputError, match=r"pass \[n, 19, 11\]"):
        circuits.run(model, pair, graph, graph.edges)


class WithoutGradients(OfLayers):
    def forward(self, input_ids):
        x = self.table(input_ids)
        with torch.no_grad():
            z = self.layers[0](x)
        return self.head(self.layers[1](x + z))


def test_parts_that_run_without_gradients_have_no_scores():
    """They were scored as nothing, though patching them moves the value, as in HRM's first cycles."""
    torch.manual_seed(0)
    bound = BoundModel(WithoutGradients(WithHeads("plain") for _ in range(2)).eval(), None, task=Task.CAUSAL)
    two = patching.pair_of(bound, [1, 2, 3], [1, 5, 3], 4, 6)
    assert patching.exact(bound, two, "residual")[0].abs().max() > 1e-3
    for kind in ("residual", "heads"):
        with pytest.raises(MethodError, match=r"layers\.0(\.o)? runs without gradients"):
            patching.attributed(bound, two, RELP, [kind])


def test_parts_of_layers_of_two_streams_are_scored():
    """Where `residual` is refused other parts are what they were; the points of several steps are of one stream."""
    torch.manual_seed(0)
    bound = BoundModel(OfPostNorms(PostNorm() for _ in range(2)).double().eval(), None, task=Task.CAUSAL)
    two = patching.pair_of(bound, [1, 2, 3], [1, 2, 5], 4, 6)
    found = patching.attributed(bound, two, GRADIENT, ["mlp", "neurons"])
    for layer, each in enumerate(bound.module.layers):
        kept = []
        with each.down.register_forward_hook(lambda _, args, out, kept=kept: kept.append((args[0], out))):
            for ids in ([1, 2, 3], [1, 2, 5]):
                logits = bound.module(torch.tensor([ids]))[0, -1]
                kept.append(logits[4] - logits[6])
        gradients = torch.autograd.grad(kept[1], kept[0])
        neurons, mlp = ((b - a) * g for a, b, g in zip(kept[0], kept[2], gradients, strict=True))
        torch.testing.assert_close(found["neurons"][layer], neurons[0].sum(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(found["mlp"][layer], mlp[0].sum(-1), rtol=0, atol=1e-12)
    assert found["neurons"].abs().max() > 1e-3
    with pytest.raises(MethodError, match="two streams"):
        patching.attributed(bound, two, GRADIENT, ["residual"])
    with pytest.raises(MethodError, match=r"two streams .* from which several steps start; use steps=1"):
        patching.attributed(bound, two, GRADIENT, ["mlp"], steps=2)
    assert patching.attributed(bound, two, GRADIENT, []) == {}


def test_a_model_without_a_stream_has_no_edges():
    config = tf.BertConfig(**tiny.SIZES)
    model = BoundModel(tiny.build(tf.BertForMaskedLM, config))
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG, position=2)
    assert patching.exact(model, pair, "heads").shape == (2, 4)  # but parts
    with pytest.raises(ModelError, match="has no residual stream that every layer is given"):
        circuits.graph_of(model, pair)


def low_rank():
    """Queries by way of two matrices, as where they are compressed."""
    found = llama()
    for layer in found.model.layers:
        layer.self_attn.q_proj = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 16)).double()
    return found


class ByPlace(torch.nn.Module):
    """A norm that makes more of later tokens, so that what it gives is not of the stream alone."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None]


def by_place():
    found = llama()
    for layer in found.model.layers:
        layer.input_layernorm = ByPlace(layer.input_layernorm)
    return found


def of_one_matrix():
    """Keys and values are the same numbers in one of the layers."""
    sizes = {"num_key_value_heads": 2, "head_dim": 4, "global_head_dim": 4, "attention_k_eq_v": True}
    none = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    return tiny.build(tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**tiny.SIZES, **sizes, **none, **kinds))


def unseen():
    """Queries that are turned as complex numbers."""
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    return tiny.build(tf.DeepseekV2ForCausalLM, tf.DeepseekV2Config(**tiny.SIZES, **ranks, first_k_dense_replace=2))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (low_rank, r"q_proj\.1 is given something else than what a norm makes of the residual stream"),
        (by_place, r"q_proj is given something else than what a norm makes of the residual stream"),
        (of_one_matrix, r"the values of model\.layers\.1\.self_attn\.k_proj are not one head's"),
        (unseen, r"no queries were found in DeepseekV2ForCausalLM"),
    ],
)
def test_where_heads_cannot_be_told_apart_an_attention_is_one_reader(build, told):
    model = BoundModel(build())
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    with pytest.raises(MethodError, match=rf"{told}.*; take an attention as one reader: whole=True"):
        circuits.graph_of(model, pair)
    graph = circuits.graph_of(model, pair, whole=True)
    assert graph.count == 33
    circuits.check_closes(model, pair, graph)


class WithValues(torch.nn.Module):
    """A matrix of values to which each token adds its own, past the stream (value embeddings)."""

    def __init__(self, matrix, ids):
        super().__init__()
        self.matrix, self.ids = matrix, ids
        self.table = torch.nn.Embedding(31, matrix.out_features, dtype=torch.float64)

    def forward(self, x):
        return self.matrix(x) + self.table(self.ids[0])


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_of_what_a_module_puts_out_is_not_taken_for_all_of_it(whole, monkeypatch):
    """The edges of such writers were those of the whole, and the graph closed all the same."""
    module = llama()

    def forward(self, hidden_states, **kwargs):
        attention, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = torch.add(hidden_states, attention, alpha=0.3)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    monkeypatch.setattr(type(module.model.layers[0]), "forward", forward)
    model = BoundModel(module)
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    with pytest.raises(ModelError, match="no residual stream that every layer is given and adds to"):
        circuits.graph_of(model, pair, whole=whole)


@pytest.mark.parametrize("first", ["attention", "mlp"])
def test_a_branch_reads_the_stream_as_it_was_before_its_neighbour_wrote(first, monkeypatch):
    """``x + attention(x) + mlp(x)`` is ``x + (attention(x) + mlp(x))``: the second branch is a reader in both."""
    module = llama()

    def forward_of(apart):
        def forward(self, hidden_states, **kwargs):
            def attention():
                return self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]

            def mlp():
                return self.mlp(self.post_attention_layernorm(hidden_states))

            one, other = (attention, mlp) if first == "attention" else (mlp, attention)
            return hidden_states + one() + other() if apart else hidden_states + (one() + other())

        return forward

    found = []
    for apart in (False, True):
        monkeypatch.setattr(type(module.model.layers[0]), "forward", forward_of(apart))
        model = BoundModel(module)
        pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
        graph = circuits.graph_of(model, pair)
        circuits.check_closes(model, pair, graph)
        drawn = torch.rand(5, *graph.edges.shape, generator=torch.Generator().manual_seed(0)) < 0.6
        found.append((graph, circuits.run(model, pair, graph, drawn), circuits.scores(model, pair, graph, RELP)))
    (together, values, scores), (apart, values_apart, scores_apart) = found
    assert apart.readers == together.readers
    assert torch.equal(apart.edges, together.edges)
    torch.testing.assert_close(values_apart, values, rtol=0, atol=1e-9)
    torch.testing.assert_close(scores_apart, scores, rtol=0, atol=1e-9)


def test_what_comes_to_a_layer_past_the_stream_is_no_edge():
    """Without any edge the value is the corrupt one, for the last norm is given the corrupt stream all the same."""
    module, ids = llama(), []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ids.__setitem__(slice(None), [kwargs["input_ids"]]), with_kwargs=True
    )
    torch.manual_seed(0)
    attention = module.model.layers[1].self_attn
    attention.v_proj = WithValues(attention.v_proj, ids)
    model = BoundModel(module)
    pair = patching.pair_of(model, CLEAN, CORRUPT, RIGHT, WRONG)
    graph = circuits.graph_of(model, pair, whole=True)
    with pytest.raises(MethodError, match="are not all that joins its layers"):
        circuits.check_closes(model, pair, graph)


def test_what_comes_to_a_layer_at_a_token_that_is_not_read_is_no_edge_either():
    """Gemma 4's layers look their tokens up once more; where the last token is the same in both texts, what its own
    writers write there is, too."""
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 31, "num_kv_shared_layers": 0}
    sizes = {"head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2, "num_global_key_value_heads": 2}
    kinds = {"layer_types": ["full_attention", "full_attention"], "attention_k_eq_v": False}
    config = tf.Gemma4TextConfig(**tiny.SIZES, **sizes, **kinds, **more)
    model = BoundModel(tiny.build(tf.Gemma4ForCausalLM, config))
    for corrupt in (CORRUPT, [*CORRUPT[:-1], 30]):
        pair = patching.pair_of(model, CLEAN, corrupt, RIGHT, WRONG)
        graph = circuits.graph_of(model, pair, whole=True)
        with pytest.raises(MethodError, match="are not all that joins its layers"):
            circuits.check_closes(model, pair, graph)


@pytest.mark.parametrize("length", [2, 4])
def test_a_model_whose_tokens_come_before_the_rows_is_refused(length):
    model = lrpx.Explainer(tiny.xlnet()).bound
    pair = patching.pair_of(model, [11, 25, 3, 4][:length], [12, 25, 3, 4][:length], RIGHT, WRONG, position=1)
    for measure in (lambda: patching.exact(model, pair, "mlp"), lambda: patching.attributed(model, pair, LRP, ["mlp"])):
        with pytest.raises(MethodError, match=r"tokens before the rows as XLNet.*use lrpx.intervene"):
            measure()
    flat = lrpx.Explainer(tiny.tokens_first(), task=lrpx.Task.CAUSAL).bound  # whose shapes do not tell
    with pytest.raises(MethodError, match=r"tokens before the rows as XLNet.*use lrpx.intervene"):
        patching.exact(flat, patching.pair_of(flat, [11, 25, 3], [12, 25, 3], RIGHT, WRONG), "neurons")
