"""The slow twin of ALTI-Logit checks itself: the models' own logits and attention weights, closure, row sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from tests import tiny
from tests.reference import models
from tests.reference.alti_logit import AltiLogit, alti_logit, contributions
from tests.reference.alti_networks import Attention, Block, Norm, read_gpt2

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = torch.tensor([[5, 9, 3, 30, 5, 12, 7, 21, 4]])
LENGTH = IDS.shape[1]


class LiftedGemmaNorm(torch.nn.Module):
    """Gemma's RMSNorm, whose weights count from 1, without its cast to float32; it shares the original's weight."""

    def __init__(self, original: Gemma2RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = original.weight, original.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def gemma2(**settings: Any) -> tf.Gemma2ForCausalLM:
    """Three layers, the first and third with a window of 4 tokens; caps tight enough to bend every score."""
    config = tf.Gemma2Config(
        **tiny.SIZES
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "query_pre_attn_scalar": 9,
            "sliding_window": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
            "attention_bias": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | settings
    )
    model = models._build(tf.Gemma2ForCausalLM, config, "eager", False, 0)
    for name, module in list(model.named_modules()):
        if isinstance(module, Gemma2RMSNorm):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LiftedGemmaNorm(module))
    return model


def neox(**settings: Any) -> tf.GPTNeoXForCausalLM:
    rotary = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    config = tf.GPTNeoXConfig(**tiny.SIZES | {"rope_parameters": rotary} | settings)
    return tiny.build(tf.GPTNeoXForCausalLM, config, "eager")


def bert_classifier() -> tf.BertForSequenceClassification:
    config = tf.BertConfig(**tiny.SIZES | {"num_labels": 3})
    return tiny.build(tf.BertForSequenceClassification, config, "eager")


BUILDERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: models.tiny_gpt2("eager"),
    "gpt2, unusual scales": lambda: models.tiny_gpt2("eager", scale_attn_by_inverse_layer_idx=True, n_layer=3),
    "llama": lambda: models.tiny_llama("eager"),
    "llama, one layer": lambda: models.tiny_llama("eager", num_hidden_layers=1, mlp_bias=False, attention_bias=False),
    "gemma2": gemma2,
    "gemma2, no caps": lambda: gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False),
    "neox": neox,
    "neox, sequential": lambda: neox(use_parallel_residual=False, attention_bias=False),
    "bert": lambda: models.tiny_bert("eager"),
    "bert classifier": bert_classifier,
}
DECODERS = [name for name in BUILDERS if not name.startswith("bert")]
every_model = pytest.mark.parametrize("name", BUILDERS)


@pytest.fixture(autouse=True)
def _float64_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift transformers' cast of the attention scores to float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


def explain(name: str, model: Any, position: int = LENGTH - 3, token: int = 2, other: int | None = 1) -> AltiLogit:
    return alti_logit(model, IDS, None if name == "bert classifier" else position, token, other)


def near(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    assert_allclose(actual, expected, rtol=0, atol=atol)


@every_model
@pytest.mark.parametrize("other", [None, 1])
def test_value_and_attention_are_the_models_own(name: str, other: int | None) -> None:
    model = BUILDERS[name]()
    found = explain(name, model, other=other)
    with torch.no_grad():
        output = model(IDS, output_attentions=True)
    logits = output.logits[0] if name == "bert classifier" else output.logits[0, LENGTH - 3]
    assert logits.std() > 0.1
    near(found.value, (logits[2] - (logits[other] if other else 0.0)).item())
    near(found.attention, torch.stack(output.attentions)[:, 0].numpy())


@every_model
@pytest.mark.parametrize("position", [0, 4, LENGTH - 1])
@pytest.mark.parametrize("other", [None, 1])
def test_terms_sum_to_the_explained_value(name: str, position: int, other: int | None) -> None:
    found = explain(name, BUILDERS[name](), position, other=other)
    near(found.total(), found.value)
    near(found.relevance.sum(), found.logit.sum() + sum(found.embeddings.values()))
    terms = [*found.mlp, *found.embeddings.values(), *found.heads.sum(-1).flat, *found.biases.values()]
    assert min(map(abs, terms)) > 1e-6  # each is there


@every_model
def test_contributions_are_shares(name: str) -> None:
    found = explain(name, BUILDERS[name]())
    near(found.contributions.sum(-1), 1.0)
    near(found.alti.sum(), 1.0)
    assert (found.contributions >= 0).all()
    if name in DECODERS:
        assert (np.triu(found.contributions, 1) == 0).all()
        assert (found.alti[LENGTH - 2 :] == 0).all()
        assert (found.relevance[LENGTH - 2 :] == 0).all()
    else:
        assert (np.triu(found.contributions, 1) > 0).any()


def test_a_window_hides_what_is_far() -> None:
    found = explain("gemma2", gemma2())
    far = np.tril(np.ones((LENGTH, LENGTH), dtype=bool), -4)
    for layer in (0, 2):
        assert (found.contributions[layer][far] == 0).all()
        assert (found.attention[layer][:, far] == 0).all()
    assert (found.attention[1][:, far] > 0).all()


@every_model
def test_a_contrast_is_a_difference(name: str) -> None:
    model = BUILDERS[name]()
    both, right, wrong = (
        explain(name, model),
        explain(name, model, other=None),
        explain(name, model, token=1, other=None),
    )
    for part in ("value", "relevance", "logit", "heads", "mlp", "output_bias"):
        near(getattr(both, part), getattr(right, part) - getattr(wrong, part))
    for part in ("alti", "contributions"):
        near(getattr(both, part), getattr(right, part))
    for part in ("biases", "embeddings"):
        assert getattr(both, part).keys() == getattr(right, part).keys()
        for key, value in getattr(both, part).items():
            near(value, getattr(right, part)[key] - getattr(wrong, part)[key])


def test_the_first_layer_is_not_mixed() -> None:
    found = explain("llama", models.tiny_llama("eager", num_hidden_layers=1))
    expected = found.heads[0].sum(0)
    expected[LENGTH - 3] += found.embeddings["token"]
    near(found.relevance, expected)
    near(found.alti, found.contributions[0, LENGTH - 3])


def test_three_layers_are_mixed_by_the_layers_below() -> None:
    found = explain("gemma2", gemma2())
    delta, c = found.heads.sum(1), found.contributions
    expected = delta[0] + delta[1] @ c[0] + delta[2] @ c[1] @ c[0]
    expected[LENGTH - 3] += found.embeddings["token"]
    near(found.relevance, expected)
    near(found.alti, (c[2] @ c[1] @ c[0])[LENGTH - 3])


def block(x: Any, values: Any, weights: Any, bias: Any = (0.0, 0.0)) -> Block:
    """One head that passes its values on unchanged, on two components."""
    attention = Attention(np.array([weights]), np.array([values]), np.eye(2)[None], np.array(bias))
    return Block(np.array(x), attention, np.zeros_like(x))


def test_contributions_by_hand() -> None:
    # Row 1: T_10 = 1/4 (4, 8) = (1, 2), T_11 = 3/4 (4, 0) = (3, 0); F_11 = (3, 0) + (1, -1) = (4, -1); y = (5, 1).
    # ‖y‖ = 6; ‖F_10 − y‖ = ‖(-4, 1)‖ = 5, so c_10 = 1; ‖F_11 − y‖ = ‖(-1, -2)‖ = 3, so c_11 = 3.
    one = block([[2.0, 2.0], [1.0, -1.0]], [[4.0, 8.0], [4.0, 0.0]], [[1.0, 0.0], [0.25, 0.75]])
    near(contributions(one), [[1.0, 0.0], [0.25, 0.75]])
    # With b_O = (0, 3): y = (5, 4), ‖y‖ = 9; ‖F_10 − y‖ = ‖(-4, -2)‖ = 6: 3; ‖F_11 − y‖ = ‖(-1, -5)‖ = 6: 3.
    two = block([[2.0, 2.0], [1.0, -1.0]], [[4.0, 8.0], [4.0, 0.0]], [[1.0, 0.0], [0.25, 0.75]], (0.0, 3.0))
    near(contributions(two)[1], [0.5, 0.5])
    # epsilon in every component, row 1 of the first: ‖(-4 + ½, 1 + ½)‖ = 5, ‖(-1 + ½, -2 + ½)‖ = 2.
    near(contributions(one, 0.5)[1], [0.2, 0.8])


def rms_norm(gamma: Any, beta: Any, at: Any) -> Norm:
    return Norm("", np.array([at, at]), np.array(gamma), np.array(beta), 0.0, centred=False)


def test_contributions_past_a_norm_by_hand() -> None:
    plain = block([[2.0, 2.0], [1.0, -1.0]], [[4.0, 8.0], [4.0, 0.0]], [[1.0, 0.0], [0.25, 0.75]], (0.0, 3.0))
    # Before the sum, (2, 1/2) times: T_10 = (2, 1), T_11 = (6, 0), b = (0, 1.5), F_11 = (7, -1), y = (9, 1.5): 10.5.
    # ‖F_10 − y‖ = ‖(-7, -0.5)‖ = 7.5: 3; ‖F_11 − y‖ = ‖(-2, -2.5)‖ = 4.5: 6.
    branch = replace(plain, branch_norm=rms_norm((2.0, 0.5), (0.0, 0.0), (1.0, 1.0)))
    near(contributions(branch)[1], [1 / 3, 2 / 3])
    # After the sum, (1/2, 1) times: F_10 = (0.5, 2), F_11 = (2, -1), y = (2.5, 1) + (0, 3) + β = (2.5, 1): 3.5.
    # ‖F_10 − y‖ = ‖(-2, 1)‖ = 3: 0.5; ‖F_11 − y‖ = ‖(-0.5, -2)‖ = 2.5: 1.
    past = replace(plain, sum_norm=rms_norm((1.0, 2.0), (0.0, -3.0), (2.0, 2.0)))
    near(contributions(past)[1], [1 / 3, 2 / 3])


def test_a_row_that_nothing_comes_near_is_the_tokens_own() -> None:
    opposed = block([[1.0, 1.0]], [[1.0, 1.0]], [[1.0]], (-4.0, -4.0))  # F = (2, 2), y = (-2, -2)
    near(contributions(opposed), [[1.0]])


def test_without_attention_tokens_stay_by_themselves() -> None:
    model = models.tiny_gpt2("eager")
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.attn.c_proj.weight.zero_()
    found = explain("gpt2", model)
    near(found.contributions, np.broadcast_to(np.eye(LENGTH), found.contributions.shape))
    near(found.heads, 0.0)
    near(found.relevance, np.eye(LENGTH)[LENGTH - 3] * sum(found.embeddings.values()))


def test_a_position_counts_from_the_end_too() -> None:
    model = models.tiny_gpt2("eager")
    near(explain("gpt2", model, -2).relevance, explain("gpt2", model, LENGTH - 2).relevance)


def test_biases_have_the_models_names() -> None:
    for name, build in BUILDERS.items():
        model = build()
        assert set(explain(name, model).biases) <= set(dict(model.named_parameters()))
    found = explain("bert", models.tiny_bert("eager"))
    assert len(found.biases) == 1 + 2 * 2 + 2 + 1  # embeddings, two norms a layer, transform and its norm, decoder
    assert set(found.embeddings) == {"token", "position", "token_type"}


def test_shapes() -> None:
    found = explain("gemma2", gemma2())
    assert found.relevance.shape == found.logit.shape == found.alti.shape == (LENGTH,)
    assert found.heads.shape == (3, 4, LENGTH)
    assert found.mlp.shape == found.output_bias.shape == (3,)
    assert found.contributions.shape == (3, LENGTH, LENGTH)
    assert found.attention.shape == (3, 4, LENGTH, LENGTH)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no twin"):
        alti_logit(tiny.opt(), IDS, 0, 1)
    with pytest.raises(ValueError, match="position"):
        alti_logit(models.tiny_gpt2(), IDS, None, 1)
    with pytest.raises(ValueError, match="position"):
        alti_logit(bert_classifier(), IDS, 0, 1)
    with pytest.raises(IndexError):
        read_gpt2(models.tiny_gpt2(), IDS[0].tolist(), LENGTH, [1])
