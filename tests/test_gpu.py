"""On a GPU: what the processor gives, the model's own outputs, and nothing of the user's changed; skipped without."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf

import lrpx
from lrpx import METHODS, Explainer
from lrpx.coverage import _checking
from lrpx.errors import LRPxError
from tests import tiny
from tests.reference import models
from tests.test_placement import BUILDS as PLACED
from tests.test_placement import divided

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    # torch's own, in the first backward pass of a process
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

GPU = torch.device("cuda", 0)
IDS = [3, 14, 15, 9, 26]
BUILDS = {name: PLACED[name] for name in ("llama", "gpt2", "bert classifier", "mamba", "t5, tied")}
DRAWN = {"smoothgrad", "gradient-shap"}
"""They draw on the device that the model is on, and a GPU draws other numbers."""
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@pytest.fixture
def wide():
    """What models cast to float32 stays in float64: there the two devices are rounding apart, without any rule too."""
    with _checking._everything_wide():
        yield


in_float64 = pytest.mark.usefixtures("wide")


def asked(explainer, build, **options):
    """The answer, or the name of the refusal."""
    given = {"target": 1} if build is tiny.bert_classifier else {}
    if build is models.tiny_t5:
        given["decoder"] = [0, 7]
    try:
        return explainer(IDS, **given, **options)
    except LRPxError as refusal:
        return type(refusal)


def near(found, want, tolerance=1e-9):
    """Both as one, relative to the largest."""
    found, want = found.cpu(), want.cpu()
    assert float((found - want).abs().max()) <= tolerance * float(want.abs().max())


@in_float64
@pytest.mark.filterwarnings("ignore:integrated-gradients has not converged")
@every_build
@pytest.mark.parametrize("method", sorted(set(METHODS) - DRAWN))
def test_every_method_gives_what_it_gives_on_the_processor(build, method):
    model = build().double()
    want = asked(Explainer(model), build, method=method)
    found = asked(Explainer(copy.deepcopy(model).to(GPU)), build, method=method)
    if isinstance(want, type):
        assert found is want
    else:
        near(found.relevance, want.relevance)
        assert found.explained.value == pytest.approx(want.explained.value, rel=1e-9)


@pytest.mark.parametrize("method", sorted(DRAWN))
def test_what_is_drawn_is_drawn_alike_and_leaves_the_generators(method):
    explainer = Explainer(models.tiny_llama().to(GPU))
    before = torch.cuda.get_rng_state(GPU), torch.get_rng_state()
    first, second = (explainer(IDS, method=method).relevance for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before[0], torch.cuda.get_rng_state(GPU))
    assert torch.equal(before[1], torch.get_rng_state())


@in_float64
@every_build
def test_a_ledger_has_the_same_rows(build):
    want, found = (
        asked(Explainer(build().double().to(place)), build, method="attnlrp", ledger=True).ledger
        for place in ("cpu", GPU)
    )
    assert [(each.kind, each.name) for each in found.entries] == [(each.kind, each.name) for each in want.entries]
    assert [each.value for each in found.entries] == pytest.approx(
        [each.value for each in want.entries], abs=1e-9 * want.scale
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_are_the_models_own(attention, dtype, padded):
    """With the fused kernels that this GPU takes for the dtype: heads are of 64 features."""
    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).to(GPU, dtype).eval()
    ids = torch.randint(64, (2, 48), device=GPU)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).logits
    with lrpx.propagate(model, lrpx.ATTNLRP):
        ruled = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(ruled[mask.bool()], plain[mask.bool()])


@pytest.mark.parametrize("method", ["attnlrp", "lrp", "pa-lrp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_loses_no_more_than_on_the_processor(method, dtype):
    """Twice as much leaves room for another order of the same sums."""
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**tiny.SIZES)).eval()
    rows = [[int(each) for each in torch.randperm(30)[:8]] for _ in range(16)]
    want, here, there = (
        torch.cat([each(row, target=5, method=method).relevance.cpu().double() for row in rows])
        for each in (
            Explainer(copy.deepcopy(model).double()),
            Explainer(copy.deepcopy(model).to(dtype)),
            Explainer(model.to(GPU, dtype)),
        )
    )
    assert float((there - want).norm()) <= 2 * float((here - want).norm())


@in_float64
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, tiny.bert_classifier])
def test_a_model_that_is_split_over_the_gpu_and_the_processor(build, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    moved = divided(accelerate, build(), tmp_path, one=0, other="cpu", main=0)
    for method in ("attnlrp", "lrp", "alti-logit"):
        found, want = (asked(Explainer(each), build, method=method) for each in (moved, build()))
        near(found.relevance, want.relevance)


@in_float64
@pytest.mark.parametrize("kind", ["neurons", "heads", "residual"])
def test_units_are_ranked_alike(kind):
    model = models.tiny_llama()
    want, found = (Explainer(each).neurons(IDS, 5, kind=kind) for each in (model, copy.deepcopy(model).to(GPU)))
    assert [(row.layer, row.unit) for row in found] == [(row.layer, row.unit) for row in want]
    assert [row.relevance for row in found] == pytest.approx([row.relevance for row in want], rel=1e-9)


@in_float64
def test_an_intervention():
    model = models.tiny_llama()
    logits = []
    for each in (model, copy.deepcopy(model).to(GPU)):
        ids = torch.tensor([IDS], device=each.device)
        changes = {"model.layers.1.mlp.down_proj": {3: 0.7, 7: lrpx.Scale(2, positions=[1])}}
        with torch.no_grad(), lrpx.intervene(each, changes):
            logits.append(each(input_ids=ids).logits)
    near(*reversed(logits))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_passes():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**tiny.SIZES)).eval().to(GPU)
    found, want = (Explainer(model, compile=each)(IDS, target=5).relevance for each in (True, False))
    near(found, want, 1e-4)


def test_autocast():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**tiny.SIZES)).eval()
    want = Explainer(copy.deepcopy(model).double())(IDS, target=5).relevance
    with torch.autocast("cuda", torch.bfloat16):
        found = Explainer(model.to(GPU))(IDS, target=5).relevance
    near(found.double(), want, 0.1)


@in_float64
def test_a_batch_is_its_rows():
    explainer = Explainer(models.tiny_llama().to(GPU))
    rows = [IDS, IDS[:3], IDS[1:]]
    for found, row in zip(explainer(rows), rows, strict=True):
        near(found.relevance, explainer(row).relevance)
