"""ALTI-Logit, Logit and ALTI: equal to the slow twin, true to the model's own attention, the same in batches."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx import Explainer, propagate
from lrpx.coverage._checking import _everything_wide as everything_wide
from lrpx.errors import MethodError, NonFiniteError
from lrpx.methods import METHODS, _alti_logit, attribute_all
from lrpx.model import BoundModel
from lrpx.questions import Question, Questions
from lrpx.recipes import ALTI_LOGIT
from lrpx.targets import Contrast
from tests import tiny
from tests.engine.samples import SAMPLES
from tests.reference import models
from tests.reference.alti_logit import alti_logit as twin
from tests.reference.test_alti_twins import BUILDERS, IDS, LENGTH

ROWS = [[3, 14, 15, 9, 26, 5, 7], [8, 9], [4, 11, 20], [6]]
EMBEDDING_BIAS = "bert.embeddings.LayerNorm.bias"
STOCK = {
    "gpt2": models.tiny_gpt2,
    "llama": lambda: models.tiny_llama(lifted=False),
    "gemma2": lambda: SAMPLES["gemma2"].build(attn_implementation="eager"),  # sdpa, where it is taken, caps no scores
    "neox": tiny.neox,
    "bert": models.tiny_bert,
    "bert classifier": tiny.bert_classifier,
}


def near(actual, expected, tolerance=1e-9):
    actual, expected = torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    scale = max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def twin_of(name, model, position, target, contrast):
    found = twin(model, IDS, None if "classifier" in name else position, target, contrast)
    row = 0 if "classifier" in name else position
    # what the explained position holds before the first layer is its own, the bias of a norm there included
    first = sum(found.embeddings.values()) + found.biases.get(EMBEDDING_BIAS, 0.0)
    relevance, logit = torch.as_tensor(found.relevance), torch.as_tensor(found.logit)
    relevance[row] += found.biases.get(EMBEDDING_BIAS, 0.0)
    logit[row] += first
    return found, {"alti-logit": relevance, "logit": logit, "alti": torch.as_tensor(found.alti)}


def explained(name, model, method, position, target, contrast, **options):
    where = {} if "classifier" in name else {"position": position}
    return Explainer(model)(IDS[0], target, contrast, method, **where, **options)


# ------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("position", "target", "contrast"), [(LENGTH - 3, 2, 1), (LENGTH - 1, 1, None), (0, 0, 2)])
def test_relevance_and_heads_are_the_twins(name, position, target, contrast):
    model = BUILDERS[name]()
    with everything_wide():
        expected, relevance = twin_of(name, model, position, target, contrast)
        for method, of_tokens in relevance.items():
            found = explained(name, model, method, position, target, contrast)
            near(found.relevance, of_tokens)
            near(found.explained.value, expected.value)
            if method == "alti":
                assert list(found.parts) == ["tokens"]
            else:
                near(found.parts["heads"].values, expected.heads)


@pytest.mark.parametrize("name", STOCK)
def test_relevance_of_stock_models_is_the_twins(name):
    model = STOCK[name]()
    expected, relevance = twin_of(name, model, 4, 2, 1)
    for method, of_tokens in relevance.items():
        near(explained(name, model, method, 4, 2, 1).relevance, of_tokens, 1e-6)
    near(explained(name, model, "logit", 4, 2, 1).parts["heads"].values, expected.heads, 1e-6)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_ledger_is_the_twins_entry_by_entry(name):
    model = BUILDERS[name]()
    with everything_wide():
        expected, _ = twin_of(name, model, LENGTH - 3, 2, 1)
        ledger = explained(name, model, "alti-logit", LENGTH - 3, 2, 1, ledger=True).ledger
    assert abs(ledger.difference) < 1e-12
    by_kind = {kind: [e for e in ledger.entries if e.kind == kind] for kind in ledger.by_kind()}
    near([e.value for e in by_kind.pop("attention")], expected.heads.sum((1, 2)))
    near([e.value for e in by_kind.pop("MLPs")], expected.mlp)
    biases = {e.name: e.value for e in by_kind.pop("biases", [])}
    projections = [bias for bias in biases if re.search(r"\d+\..*(c_proj|o_proj|attention.*dense)\.bias$", bias)]
    has = expected.output_bias != 0
    near([biases.pop(bias) for bias in projections], expected.output_bias[has])
    renamed = {"cls.predictions.bias": "cls.predictions.decoder.bias"}  # one parameter, two names
    theirs = {renamed.get(bias, bias): value for bias, value in expected.biases.items()}
    assert {renamed.get(bias, bias) for bias in biases} == set(theirs)
    for bias, value in biases.items():
        near(value, theirs[renamed.get(bias, bias)])
    kinds = {"tokens": "token", "positions": "position", "token types": "token_type"}
    assert {kinds[kind] for kind in by_kind} == set(expected.embeddings)
    for kind, (entry,) in by_kind.items():
        near(entry.value, expected.embeddings[kinds[kind]])


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.05])
def test_the_distance_may_have_an_epsilon(name, epsilon):
    model = BUILDERS[name]()
    exact, found = (_alti_logit.AltiLogit("mine", epsilon=size) for size in (0.0, epsilon))
    with everything_wide():
        expected = twin(model, IDS, LENGTH - 3, 2, 1, distance_epsilon=epsilon).relevance
        expected[LENGTH - 3] += twin(model, IDS, LENGTH - 3, 2, 1).biases.get(EMBEDDING_BIAS, 0.0)
        near(explained(name, model, found, LENGTH - 3, 2, 1).relevance, expected)
        without = explained(name, model, exact, LENGTH - 3, 2, 1).relevance
    assert float((without - torch.as_tensor(expected)).abs().max()) > epsilon / 100


# ---------------------------------------------------------------- contributions and weights


def run(model, ids, **inputs):
    """The layers' writes of one run, and its logits."""
    with propagate(model, ALTI_LOGIT, heads=True) as trace:
        logits = model(ids, **inputs).logits
    trace.heads.check()
    return [write for write in trace.heads.writes if write.reads], logits


@pytest.mark.parametrize("name", BUILDERS)
def test_contributions_are_the_twins_shares(name):
    model = BUILDERS[name]()
    with everything_wide():
        expected, _ = twin_of(name, model, 4, 2, 1)
        writes, _ = run(model, IDS)
        shares = torch.cat([_alti_logit.contributions(write, torch.arange(LENGTH)[None]) for write in writes])
    near(shares, expected.contributions)
    near(shares.sum(-1), torch.ones(len(writes), LENGTH))
    assert (shares >= 0).all()
    if not name.startswith("bert"):
        assert (shares.triu(1) == 0).all()


PADDED = ["llama", "mistral", "gemma2", "gemma3", "qwen3", "phi", "gpt2", "opt", "bert", "modernbert"]
NAMES = [*PADDED, "bloom", "falcon", "falcon alibi", "gpt_neox"]
FUSED = [name for name in NAMES if name not in ("gemma2", "bloom", "falcon alibi")]  # the last adds other biases there
SIDES = [("none", NAMES), ("right", NAMES), ("left", PADDED)]


@pytest.mark.parametrize(("name", "side"), [(name, side) for side, names in SIDES for name in names])
def test_attention_weights_are_the_models_own(name, side):
    """Causal, in windows, with ALiBi, with caps, and under a mask; the fused ones against the eager ones."""
    built = {kind: SAMPLES[name].build(attn_implementation=kind) for kind in ("eager", *["sdpa"] * (name in FUSED))}
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 7, 12], [8, 9, 11, 20, 6, 4, 19, 10]])
    mask = torch.ones_like(ids)
    if side != "none":
        mask[1, slice(5, None) if side == "right" else slice(3)] = 0
    inputs = {"attention_mask": mask}
    if side == "left":
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    real, every, some = mask.bool(), torch.arange(8).expand(2, -1), torch.tensor([[2, 4], [4, 3]])
    for model in built.values():
        with everything_wide():
            with torch.no_grad():
                expected = built["eager"](ids, **inputs, output_attentions=True).attentions
            writes, _ = run(model, ids, **inputs)
            found = [part.attention.weights for write in writes for part in write.reads]
            for weights, theirs in zip(found, expected, strict=True):
                near(weights(every).transpose(1, 2)[real], theirs.transpose(1, 2)[real], 1e-12)
                near(weights(some), torch.take_along_dim(weights(every), some[:, None, :, None], 2), 1e-15)


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_chunks_do_not_matter(monkeypatch, size):
    model, ids = models.tiny_llama(num_hidden_layers=3), [3, 14, 15, 9, 26, 5, 7]
    methods = ("alti-logit", "alti")
    whole = [Explainer(model)([ids, ids[:4]], method=method) for method in methods]
    monkeypatch.setattr(_alti_logit, "CHUNK", size)
    parts = [Explainer(model)([ids, ids[:4]], method=method) for method in methods]
    for some, others in zip(parts, whole, strict=True):
        for one, other in zip(some, others, strict=True):
            near(one.relevance, other.relevance, 1e-14)


# ---------------------------------------------------------------------------------- batches


def same(many, single):
    assert many.tokens == single.tokens
    assert many.explained.description == single.explained.description
    near(many.explained.value, single.explained.value)
    near(many.relevance, single.relevance)
    assert list(many.parts) == list(single.parts)
    for name in many.parts:
        near(many.parts[name].values, single.parts[name].values)


CAUSAL = [models.tiny_llama, models.tiny_gpt2, tiny.opt, tiny.bloom, tiny.neox]


@pytest.mark.parametrize("build", [*CAUSAL, tiny.bert_classifier, tiny.llama_classifier])
@pytest.mark.parametrize("method", ["alti-logit", "logit", "alti"])
def test_a_batch_is_its_rows(build, method):
    explain = Explainer(build())
    for many, row in zip(explain(ROWS, 2, 1, method), ROWS, strict=True):
        same(many, explain(row, 2, 1, method))


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.opt, tiny.neox, models.tiny_bert])
@pytest.mark.parametrize("method", ["alti-logit", "alti"])
def test_padding_on_the_left(build, method):
    model = build()
    left, right = Explainer(model, padding_side="left"), Explainer(model)
    for many, row in zip(left(ROWS, method=method, position=-1), ROWS, strict=True):
        same(many, right(row, method=method, position=-1))


def test_masked_models_at_one_position_a_row():
    explain, positions = Explainer(models.tiny_bert()), [2, 0, -1, 0]
    for many, row, position in zip(
        explain(ROWS, method="alti-logit", position=positions), ROWS, positions, strict=True
    ):
        same(many, explain(row, method="alti-logit", position=position))


def test_methods_together_are_the_methods_alone():
    model = BoundModel(models.tiny_llama())
    questions = Questions((model.reader.row(ROWS[0]),), (Question(0, 6, Contrast(7, 2)),))
    names = ["alti", "lrp", "logit", "gradient-l1", "alti-logit"]
    together = attribute_all([METHODS[name] for name in names], model, questions)
    assert list(together) == names
    for name, found in together.items():
        alone = METHODS[name].attribute(model, questions)
        near(found.relevance[0], alone.relevance[0], 1e-14)
        assert torch.equal(found.answers.values, alone.answers.values)
        assert ("heads" not in found.parts) == (name in ("alti", "lrp", "gradient-l1"))


@pytest.mark.parametrize("build", [tiny.bert_classifier, models.tiny_gpt2])
@pytest.mark.parametrize("method", ["alti-logit", "alti", "ifr"])
def test_layers_may_run_again(build, method):
    """In a post-norm encoder the stream passes norms, which a backward pass asks for what they kept."""
    model = build()
    same(Explainer(model, recompute=True)(ROWS[0], 2, 1, method), Explainer(model)(ROWS[0], 2, 1, method))


# ------------------------------------------------------------------------------- invariants


def test_a_single_token_has_it_all():
    found = Explainer(models.tiny_gpt2())([9], 7, 2, "alti-logit", ledger=True)
    kinds = found.ledger.by_kind()
    near(found.relevance, [kinds["tokens"] + kinds["positions"] + kinds["attention"]])
    near(Explainer(models.tiny_gpt2())([9], method="alti").relevance, [1.0])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    width=st.sampled_from([2, 4]),
    layers=st.integers(1, 4),
    ids=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    data=st.data(),
)
def test_any_llama_closes(groups, shared, width, layers, ids, data):
    heads = groups * shared
    model = models.tiny_llama(
        hidden_size=heads * 4, num_attention_heads=heads, num_key_value_heads=groups, head_dim=width,
        num_hidden_layers=layers, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    position = data.draw(st.integers(0, len(ids) - 1))
    target = data.draw(st.integers(0, 30))
    with everything_wide():
        found = Explainer(model)(ids, target, (target + 1) % 31, "alti-logit", position=position, ledger=True)
        shares = Explainer(model)(ids, target, method="alti", position=position).relevance
    kinds = found.ledger.by_kind()
    assert abs(found.ledger.difference) <= 1e-9 * found.ledger.scale
    assert found.parts["heads"].values.shape == (layers, heads, len(ids))
    near(found.parts["heads"].values.sum(), kinds["attention"])
    near(found.relevance.sum(), kinds["attention"] + kinds["tokens"])
    assert (found.relevance[position + 1 :] == 0).all()
    assert (shares >= 0).all()
    near(shares.sum(), 1.0)


# ------------------------------------------------------------------- the model stays as it is


def state(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [len(getattr(module, kind)) for module in model.modules() for kind in kinds]
    marks = [sorted(vars(x)) for x in (*model.parameters(), *model.buffers())]
    flags = [x.requires_grad for x in model.parameters()] + [module.training for module in model.modules()]
    gradients = [x.grad is None for x in model.parameters()]
    return hooks, marks, flags, gradients, torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "bloom", "falcon", "mixtral", "opt", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_bit_identical_and_nothing_changes(name, dtype):
    model, ids = SAMPLES[name].build(dtype), torch.tensor([[3, 14, 15, 9, 26, 5, 7], [8, 9, 11, 4, 20, 6, 5]])
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before, expected = state(model), model(ids).logits
    writes, logits = run(model, ids)
    assert torch.equal(logits, expected)
    assert len(writes) == 2
    Explainer(model)(ids[0], method="alti-logit", position=-1)
    assert state(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(ids).logits, expected)


def test_what_it_cannot_be_is_refused_when_it_is_made():
    with pytest.raises(MethodError, match=r"the what of a is 'foo'; pass one of 'alti-logit', 'logit', 'alti'"):
        _alti_logit.AltiLogit("a", what="foo")
    with pytest.raises(MethodError, match=r"the epsilon of a is -1; pass a number from 0"):
        _alti_logit.AltiLogit("a", epsilon=-1)


@pytest.mark.parametrize("method", ["alti", "ifr"])
def test_a_value_that_is_read_from_nowhere_has_no_shares(method):
    """The pad token's row of a tied embedding is 0, so its logit is 0 whatever the text says."""
    model = tiny.opt().double()
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = 0
    explainer = Explainer(model)
    for ids in ([5, 6, 7, 8], [[5, 6, 7, 8], [9, 5, 6, 7, 8, 9]]):
        with pytest.raises(MethodError, match="does not depend on the last layer"):
            explainer(ids, 1, method=method)


def test_nothing_changes_after_an_error():
    model = models.tiny_llama()
    before = state(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        Explainer(model)([3, 4, 5], method="alti-logit")
    assert state(model) == before
    mamba = tiny.mamba()
    before = state(mamba)
    with pytest.raises(MethodError):
        Explainer(mamba)([3, 4, 5], method="alti-logit")
    assert state(mamba) == before


def test_gradients_need_not_be_on():
    explain = Explainer(models.tiny_llama())
    expected = explain(ROWS[0], method="alti-logit").relevance
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert torch.equal(explain(ROWS[0], method="alti-logit").relevance, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_the_norm_takes_away_is_no_entry(dtype):
    """The same number added to all of the stream is gone with the mean, and what is left of it is rounding."""
    model = models.tiny_gpt2().to(dtype)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.attn.c_proj.bias.fill_(1.0)
    ledger = explained("gpt2", model, "alti-logit", 3, 2, 1, ledger=True).ledger
    assert ledger.closes()
    names = [entry.name for entry in ledger.entries]
    assert "transformer.h.1.attn" in names
    assert not [name for name in names if name.endswith("attn.c_proj.bias")]
