"""The methods by Captum: against twins by hand, with seeds that leave the user's alone, on every task."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose

from lrpx import Explainer, Span, Task
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import MethodError, MissingExtraError
from lrpx.methods import (
    GradientShap,
    IntegratedGradients,
    KernelShap,
    Occlusion,
    SmoothGrad,
    _embedded,
)
from tests import tiny
from tests.reference import embedding_methods as twins
from tests.reference import models

pytest.importorskip("captum")
pytestmark = pytest.mark.filterwarnings("ignore:.* has not converged")  # few steps, from zero, under RMSNorms

IDS = [3, 14, 15, 9, 26]
ROWS = [IDS, [8, 9], [4, 11, 20], [6]]
NAMES = ["integrated-gradients", "smoothgrad", "occlusion", "gradient-shap", "kernel-shap"]


def near(found, expected, tolerance=1e-9):
    found, expected = (np.asarray(each, dtype=float) for each in (found, expected))
    assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def qa():
    return tiny.build(tf.BertForQuestionAnswering, tf.BertConfig(**tiny.SIZES))


CASES = {
    "llama": (models.tiny_llama, {}, lambda out: out.logits[0, 4, 4]),
    "gpt2": (models.tiny_gpt2, {"position": 3}, lambda out: out.logits[0, 3, 4]),
    "bert": (models.tiny_bert, {"position": 2}, lambda out: out.logits[0, 2, 4]),
    "classifier": (tiny.bert_classifier, {}, lambda out: out.logits[0, 2]),
    "answer": (qa, {}, lambda out: out.start_logits[0, 2] + out.end_logits[0, 3]),
}
TARGETS = {"classifier": 2, "answer": Span(2, 3)}


@pytest.fixture(params=CASES)
def case(request):
    """``(explain(method), model, read, embeddings [T, d])``."""
    build, how, read = CASES[request.param]
    model = build()
    explainer = Explainer(model)
    x = model.get_input_embeddings().weight.detach()[torch.tensor(IDS)]
    return lambda method: explainer(IDS, TARGETS.get(request.param, 4), method=method, **how).relevance, model, read, x


@pytest.fixture
def points(monkeypatch):
    """What the function that is handed to Captum is called with: tensors ``[N, T, d]``."""
    seen = []
    plain = _embedded.Function.__call__

    def recording(self, *embeddings):
        seen.append([each.detach().clone() for each in embeddings])
        return plain(self, *embeddings)

    monkeypatch.setattr(_embedded.Function, "__call__", recording)
    return seen


@pytest.mark.parametrize("batch_size", [3, 32])
def test_integrated_gradients(case, batch_size):
    explain, model, read, x = case
    expected = twins.integrated_gradients(model, read, x, torch.zeros_like(x), 12)
    near(explain(IntegratedGradients("own", 12, batch_size=batch_size)), expected, 1e-6)  # its weights are float32


@pytest.mark.slow
def test_integrated_gradients_sum_to_the_difference(case):
    """Where the path is smooth: an RMSNorm is not near an embedding of 0, so that it takes more steps."""
    explain, model, read, x = case
    found = explain(IntegratedGradients("own", 800))
    near(found.sum(), twins.value(model, read, x) - twins.value(model, read, torch.zeros_like(x)), 1e-5)


@pytest.mark.filterwarnings("error")
def test_a_warning_where_they_do_not():
    with pytest.warns(UserWarning, match=r"own has not converged.*pass more steps, or another baseline"):
        Explainer(models.tiny_llama())(IDS, 4, method=IntegratedGradients("own", 20))
    for build in (models.tiny_gpt2, tiny.bert_classifier):
        Explainer(build())(IDS, 2, method="integrated-gradients")
    Explainer(models.tiny_llama())(IDS, 4, method=IntegratedGradients("own", 50, "pad"))


@pytest.mark.parametrize("batch_size", [2, 32])
def test_occlusion(case, batch_size):
    explain, model, read, x = case
    near(explain(Occlusion("own", batch_size=batch_size)), twins.occlusion(model, read, x, torch.zeros_like(x)))


def test_the_embedding_of_a_token_as_the_baseline():
    model = models.tiny_llama()  # whose config says that token 0 is the padding
    x, pad = (model.get_input_embeddings().weight.detach()[torch.tensor(ids)] for ids in (IDS, [0] * 5))
    read = CASES["llama"][2]
    explain = Explainer(model)
    near(explain(IDS, 4, method=Occlusion("own", "pad")).relevance, twins.occlusion(model, read, x, pad))
    found = explain(IDS, 4, method=IntegratedGradients("own", 12, "pad")).relevance
    near(found, twins.integrated_gradients(model, read, x, pad, 12), 1e-6)
    assert Occlusion("own", "pad").describe() != Occlusion("own").describe()
    with pytest.raises(MethodError, match=r"has no mask token; use baseline='zero'"):
        explain(IDS, 4, method=Occlusion("own", "mask"))
    with pytest.raises(MethodError, match=r"the baseline of own is 'noise'; pass one of 'zero', 'pad', 'mask', 'unk'"):
        explain(IDS, 4, method=Occlusion("own", "noise"))


@pytest.mark.parametrize("score", ["x-input", "l1"])
def test_smoothgrad(case, points, score):
    explain, model, read, x = case
    found = explain(SmoothGrad("own", 6, 0.1, score, batch_size=4))
    noisy = torch.cat([each for (each,) in points])
    assert len(noisy) == 6
    assert len(noisy.unique(dim=0)) == 6
    gradient = twins.mean_gradient(model, read, noisy)
    near(found, gradient.abs().sum(-1) if score == "l1" else (x * gradient).sum(-1))


def test_the_noise_is_as_large_as_asked(points):
    model = models.tiny_gpt2()
    x = model.get_input_embeddings().weight.detach()[torch.tensor(IDS)]
    Explainer(model)(IDS, 4, method=SmoothGrad("own", 400, 0.1))
    noise = torch.cat([each for (each,) in points]) - x
    sigma = 0.1 * float(x.max() - x.min())
    assert abs(float(noise.std()) / sigma - 1) < 5 / (2 * noise.numel()) ** 0.5
    assert abs(float(noise.mean())) < 5 * sigma / noise.numel() ** 0.5


def test_without_noise_it_is_gradient_x_input(case):
    explain, *_ = case
    near(explain(SmoothGrad("own", 2, 0)), explain("gradient-x-input"))
    near(explain(SmoothGrad("own", 2, 0, "l1")), explain("gradient-l1"))


def test_gradient_shap(case, points):
    explain, model, read, x = case
    found = explain(GradientShap("own", 7, batch_size=4))
    on_the_path = torch.cat([each for (each,) in points])
    assert len(on_the_path) == 7
    share = on_the_path / x  # each point is a share of the input, for the baseline is 0
    assert (share - share[:, :1, :1]).abs().max() < 1e-9
    assert share.min() > 0
    assert share.max() < 1
    near(found, (x * twins.mean_gradient(model, read, on_the_path)).sum(-1))


@pytest.mark.filterwarnings("error")
def test_a_warning_where_one_point_decides():
    """On the way from zero an RMSNorm's gradient has no bound: one of the points of this seed outweighs all others."""
    explain = Explainer.from_pretrained()
    text = ("The doors of the house", " are", " is")
    with pytest.warns(UserWarning, match=r"own has not converged.*pass more n_samples, or another baseline"):
        wrong = explain(*text, method=GradientShap("own", seed=1))
    assert wrong.relevance.abs().max() > 5 * abs(wrong.explained.value)
    explain(*text, method=GradientShap("own"))
    for build in (models.tiny_gpt2, tiny.bert_classifier):
        Explainer(build())(IDS, 2, method="gradient-shap")


def test_gradient_shap_nears_integrated_gradients():
    explain = Explainer(models.tiny_gpt2())
    found = explain(IDS, 4, method=GradientShap("own", 3000, batch_size=500)).relevance
    exact = explain(IDS, 4, method=IntegratedGradients("ig", 100)).relevance
    assert (found - exact).abs().max() < 0.05 * exact.abs().sum()


def test_kernel_shap(case, points):
    explain, model, read, x = case
    found = explain(KernelShap("own", 40, batch_size=7))
    sets = torch.cat([each for (each,) in points])
    masks = (sets == x).all(-1).numpy()
    assert (torch.where(torch.tensor(masks)[..., None], x, 0) == sets).all()
    values = [twins.value(model, read, each) for each in sets]
    near(found, twins.least_squares(masks, values), 1e-6)


def test_kernel_shap_nears_shapley():
    model = models.tiny_gpt2()
    x = model.get_input_embeddings().weight.detach()[torch.tensor(IDS)]
    exact = twins.shapley(model, lambda out: out.logits[0, 4, 4], x, torch.zeros_like(x))
    found = Explainer(model)(IDS, 4, method=KernelShap("own", 3000, batch_size=500)).relevance
    assert (found - exact).abs().max() < 0.03 * exact.abs().sum()


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("build", [models.tiny_llama, tiny.bert_classifier])
@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_single_runs(build, method, side):
    if side == "left" and build is tiny.bert_classifier:
        pytest.skip("a classifier is padded on the right")
    explain = Explainer(build(), padding_side=side)
    for many, row in zip(explain(ROWS, 1, method=method), ROWS, strict=True):
        near(many.relevance, explain(row, 1, method=method).relevance, 1e-12)


@pytest.mark.parametrize("method", [each for each in NAMES if each != "occlusion"])
@pytest.mark.parametrize("build", [tiny.llama_classifier, tiny.gpt2_classifier])
def test_a_classifier_without_a_padding_token(build, method):
    """It takes no two texts together, so points run one by one; a padding token that no text has changes nothing."""
    model = build(pad_token_id=None)
    found = Explainer(model)(IDS, 1, method=method).relevance
    model.config.pad_token_id = 0
    near(found, Explainer(model)(IDS, 1, method=method).relevance, 1e-6)


@pytest.mark.parametrize("build", [models.tiny_t5, tiny.bart, tiny.marian])
def test_an_encoder_and_a_decoder(build):
    """One set of embeddings for both (T5, BART), and one for each (Marian); occlusion by hand."""
    model, decoder = build(), [0, 8, 9]
    found = Explainer(model)(IDS, 4, method="occlusion", decoder=decoder).relevance
    tables = [part.get_input_embeddings() for part in (model.get_encoder(), model.get_decoder())]
    x = [table(torch.tensor([ids])).detach() for table, ids in zip(tables, (IDS, decoder), strict=True)]

    def value(i=None):
        """With zeros for token i, by hooks on the embeddings themselves."""
        calls = []

        def hook(_, __, out):
            out = out.clone()
            number = len(calls)
            calls.append(1)
            if i is not None and (i < 5) == (number == 0):
                out[0, i if i < 5 else i - 5] = 0
            return out

        handles = [table.register_forward_hook(hook) for table in dict.fromkeys(tables)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([IDS]), decoder_input_ids=torch.tensor([decoder])).logits
        for handle in handles:
            handle.remove()
        return float(logits[0, -1, 4])

    assert len(x) == 2
    near(found, [value() - value(i) for i in range(8)])
    for method in NAMES:
        assert Explainer(model)(IDS, 4, method=method, decoder=decoder).relevance.abs().min() > 0


def test_a_model_that_scales_its_embeddings():
    """Gemma's embedding multiplies with √d; the function is of what it gives out."""
    config = tf.Gemma3TextConfig(**tiny.SIZES, num_key_value_heads=2, head_dim=4)
    model = tiny.build(tf.Gemma3ForCausalLM, config)
    x = model.get_input_embeddings()(torch.tensor(IDS)).detach()
    read = lambda out: out.logits[0, 4, 4]  # noqa: E731
    near(
        Explainer(model)(IDS, 4, method="occlusion").relevance,
        twins.occlusion(model, read, x, torch.zeros_like(x)),
        1e-4,  # its norms are in float32
    )


def test_an_encoder_that_looks_up_in_the_same_table_by_a_module_of_its_own():
    """T5's token classifier names ``shared``, which is never called; the encoder's ``embed_tokens`` has its weights."""
    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "num_heads": 4, "num_layers": 2, "d_ff": 24}
    model = tiny.build(tf.T5ForTokenClassification, tf.T5Config(**sizes, pad_token_id=0, eos_token_id=1), "eager")
    x = model.get_input_embeddings().weight.detach()[torch.tensor(IDS)]
    expected = twins.occlusion(model, lambda out: out.logits[0, 2, 1], x, torch.zeros_like(x))
    near(Explainer(model)(IDS, 1, method="occlusion", position=2).relevance, expected, 1e-5)  # its norms: float32
    found = Explainer(model)([IDS, IDS[:2]], 1, method="gradient-shap", position=1)[1].relevance
    near(found, Explainer(model)(IDS[:2], 1, method="gradient-shap", position=1).relevance, 1e-5)


def test_a_model_that_adds_positions_in_place():
    """GIT's embedding adds them to what its table of words gives out, which is read before."""
    (chosen,) = choose(["git"], "causal-lm")
    model = tiny_model(chosen).double()
    ids, table = torch.tensor([IDS]), model.get_input_embeddings()
    with torch.no_grad():
        whole, x = model(input_ids=ids).logits[0, -1, 4], table(ids)
        expected = []
        for i in range(len(IDS)):
            without = x.clone()
            without[0, i] = 0.0
            hook = table.register_forward_hook(lambda *_, without=without: without)
            expected.append(whole - model(input_ids=ids).logits[0, -1, 4])
            hook.remove()
    near(Explainer(model)(IDS, 4, method="occlusion").relevance, expected)
    near(
        Explainer(model)(IDS, 4, method=SmoothGrad(sigma=0.0, n_samples=1)).relevance,
        Explainer(model)(IDS, 4, method="gradient-x-input").relevance,
    )


@pytest.mark.parametrize("method", NAMES)
def test_seeds(method):
    explain = Explainer(models.tiny_gpt2())
    first = explain(IDS, 4, method=method).relevance
    torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(explain(IDS, 4, method=method).relevance, first)
    np.random.seed(99)  # another state than the method's own end
    random.seed(99)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    explain(IDS, 4, method=method)
    after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("method", [SmoothGrad, GradientShap, KernelShap])
def test_another_seed_draws_other_numbers(method):
    explain = Explainer(models.tiny_gpt2())
    a, b = (explain(IDS, 4, method=method(n_samples=9, seed=seed)).relevance for seed in (0, 1))
    assert (a - b).abs().max() > 1e-6
    assert method(seed=1).describe() != method().describe()


@pytest.mark.parametrize("method", [SmoothGrad, GradientShap, KernelShap])
def test_threads_draw_one_after_the_other(method, monkeypatch):
    explain, chosen = Explainer(models.tiny_gpt2()), method(n_samples=4, batch_size=2)
    alone = explain(IDS, 4, method=chosen).relevance
    plain, both = _embedded.Function.__call__, Barrier(2)

    def meeting(self, *embeddings):
        with suppress(BrokenBarrierError):  # as when one of the two has to wait for the other
            both.wait(0.2)
        return plain(self, *embeddings)

    monkeypatch.setattr(_embedded.Function, "__call__", meeting)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: explain(IDS, 4, method=chosen).relevance, range(2)):
            assert torch.equal(found, alone)
    after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_an_interrupt_leaves_everything_as_it_was(monkeypatch):
    model = models.tiny_gpt2()
    explain = Explainer(model)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    plain, calls = _embedded.Function.__call__, []

    def interrupted(self, *embeddings):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(self, *embeddings)

    monkeypatch.setattr(_embedded.Function, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explain(IDS, 4, method=SmoothGrad(batch_size=2))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (IntegratedGradients(steps=0), "the steps of integrated-gradients is 0"),
        (SmoothGrad(n_samples=True), "the n_samples of smoothgrad is True"),
        (SmoothGrad(sigma=-1), "the sigma of smoothgrad is -1"),
        (SmoothGrad(score="sum"), "the score of smoothgrad is 'sum'; pass one of 'x-input', 'l1'"),
        (GradientShap(seed=-1), "the seed of gradient-shap is -1"),
        (GradientShap(sigma=float("nan")), "the sigma of gradient-shap is nan"),
        (KernelShap(n_samples=0.5), "the n_samples of kernel-shap is 0.5"),
        (KernelShap(n_samples=1), "the n_samples of kernel-shap is 1; pass a whole number, at least 2"),
        (Occlusion(batch_size=0), "the batch_size of occlusion is 0"),
    ],
)
def test_fields_that_are_none(method, said):
    with pytest.raises(MethodError, match=said):
        Explainer(models.tiny_gpt2())(IDS, method=method)


@pytest.mark.parametrize("method", NAMES)
def test_what_they_do_not_serve(method):
    with pytest.raises(MethodError, match=rf"{method} has no ledger"):
        Explainer(models.tiny_gpt2())(IDS, method=method, ledger=True)
    config = tiny.bart(num_labels=3, eos_token_id=2, pad_token_id=1).config
    explain = Explainer(tiny.build(tf.BartForSequenceClassification, config))
    with pytest.raises(MethodError, match=r"gives it to an encoder and to a decoder; use lrp"):
        explain([3, 4, 2], method=method)
    with pytest.raises(MethodError, match=r"embedding .* gives out tokens before rows, .*; use attnlrp or lrp"):
        Explainer(tiny.xlnet())(IDS, method=method, position=2)
    several = Explainer(tiny_model(choose(["gemma3n_text"], "causal-lm")[0]), task=Task.CAUSAL)
    with pytest.raises(MethodError, match=rf"{method} changes .*, and they are looked up in .*per_layer, too"):
        several([12, 13, 14], method=method)


@pytest.mark.parametrize("method", [name for name in NAMES if name != "occlusion"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_as_torchs_default_is_refused(method, dtype):
    """Captum rounded its steps and noise to it without a word, or failed in scikit-learn."""
    explainer = Explainer(models.tiny_llama())
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(MethodError, match=rf"{method} .* default dtype, which is .*float16; call torch.set"):
            explainer(IDS, 4, method=method)
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_captum(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lrpx\[captum\]'"):
        Explainer(models.tiny_gpt2())(IDS, method="occlusion")


@pytest.mark.parametrize("name", NAMES)
def test_the_surroundings_gradient_mode_does_not_matter(name):
    explain = Explainer(models.tiny_gpt2())
    expected = explain(IDS, 4, method=name).relevance
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            near(explain(IDS, 4, method=name).relevance, expected)


@pytest.mark.parametrize(("name", "mapping"), [("bloom", "causal-lm"), ("modernbert", "masked-lm")])
def test_gradient_x_input_that_is_rounding_alone_is_refused(name: str, mapping: str) -> None:
    """A norm stands right behind the embeddings, so that what is left of them is a matter of its ε alone."""
    (chosen,) = choose([name], mapping)
    for dtype in (torch.float64, torch.float32):
        found = Explainer(tiny_model(chosen).to(dtype))([5, 6, 7, 8], 11, method="gradient-x-input", position=2)
        assert found.relevance.abs().max() > 0
    explain = Explainer(tiny_model(chosen).bfloat16())
    with pytest.raises(MethodError, match="gradient-x-input has nothing but rounding here"):
        explain([5, 6, 7, 8], 11, method="gradient-x-input", position=2)
    assert explain([5, 6, 7, 8], 11, position=2).relevance.abs().max() > 0


def test_gradient_x_input_in_half_precision_is_no_rounding_elsewhere() -> None:
    exact, half = (
        Explainer(tiny_model(choose(["llama"], "causal-lm")[0]).to(dtype))([5, 6, 7], 11, method="gradient-x-input")
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert torch.allclose(half.relevance.double(), exact.relevance.double(), rtol=0, atol=0.02)
