"""The engine beside the judge of ``tests/reference/aten``, which shares no code with it.

The whole of transformers is compared by ``python bench/judge.py``; here are a dozen architectures, and what each
pattern is worth on a few lines.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import lrpx
from tests.engine.samples import SAMPLES, last_row, output_of
from tests.reference.aten import JudgeError, Recipe, explain, judge, record, wide
from tests.reference.aten.comparing import TOLERANCE, compare

MODELS = [
    "llama", "gpt2", "bert", "t5", "gemma2", "gemma3", "qwen3", "bloom", "opt", "falcon alibi", "bart", "deberta_v2",
    "modernbert", "whisper", "vit", "wav2vec2",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_judge_agrees(name):
    sample = SAMPLES[name]

    def value(logits):
        row = last_row(logits)[0]
        return row[row.argmax()]

    found = compare(
        sample.build(), sample.batch(), lambda output: output["logits"] if "logits" in output else output[0], value
    )
    assert {recipe: one.outcome for recipe, one in found.items()} == {"attnlrp": "agree", "lrp": "agree"}, found


# --------------------------------------------------------------- what the judge itself holds


class Written(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.before, self.after = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x):
        return self.after(self.function(self.before(x)))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def judged(function, recipe):
    model = Written(function)
    return judge(lambda: model(X), lambda output: output.sum(), [X], recipe).relevance[0]


SPELLED = {
    "gelu": (lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)), functional.gelu),
    "tanh gelu": (
        lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    "silu": (lambda x: x / (1 + torch.exp(-x)), functional.silu),
    "softplus": (lambda x: torch.log(1 + torch.exp(x)), functional.softplus),
    "hardswish": (lambda x: x * functional.relu6(x + 3) / 6, functional.hardswish),
    "mish": (lambda x: x * torch.tanh(functional.softplus(x)), functional.mish),
    "softmax": (lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), lambda x: x.softmax(-1)),
    "stable softmax": (
        lambda x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
        lambda x: x.softmax(-1),
    ),
    "softmax by its logarithm": (lambda x: x.log_softmax(-1).exp(), lambda x: x.softmax(-1)),
    "layer norm": (
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt(),
        lambda x: functional.layer_norm(x, (6,)),
    ),
    "rms norm": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5),
        lambda x: functional.rms_norm(x, (6,), eps=1e-5),
    ),
    "unit length": (lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt(), lambda x: functional.normalize(x, dim=-1)),
}


@pytest.mark.parametrize("recipe", list(Recipe))
@pytest.mark.parametrize("name", SPELLED)
def test_the_judge_sees_what_is_computed(name, recipe):
    spelled, built_in = (judged(function, recipe) for function in SPELLED[name])
    assert torch.allclose(spelled, built_in, rtol=1e-11, atol=1e-13)


def test_the_judge_follows_what_is_written_in_place():
    def in_place(x):
        kept = torch.zeros(3, 6, dtype=x.dtype)
        kept[:, :3] = x[:, 3:]
        kept[:, 3:] += x[:, :3].mul_(2)
        return kept.relu_()

    plain = judged(lambda x: torch.cat([x[:, 3:], 2 * x[:, :3]], -1).relu(), Recipe.ATTNLRP)
    assert torch.allclose(judged(in_place, Recipe.ATTNLRP), plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("recipe", list(Recipe))
def test_what_the_judge_does_not_know_it_names(recipe):
    with pytest.raises(JudgeError, match="no formula for std"):
        judged(lambda x: x.std(-1, keepdim=True).expand(3, 6), recipe)


def test_a_table_that_calls_an_operation_linear_is_checked(monkeypatch):
    from tests.reference.aten import judging

    monkeypatch.setattr(judging, "FUNCTIONS", frozenset())
    monkeypatch.setattr(judging, "LINEAR", judging.LINEAR | {"sin"})
    with pytest.raises(JudgeError, match="sin is not linear"):
        judged(torch.sin, Recipe.ATTNLRP)


def test_a_wrong_rule_is_caught():
    """Plain Gradient×Input for what AttnLRP halves: the judge is far off it."""
    sample = SAMPLES["llama"]
    model, batch = sample.build(), sample.batch()
    with wide():
        with record([]) as tape:
            output = output_of(model, batch)
        mine = explain(tape, output, lambda logits: logits[0, -1, 3], Recipe.ATTNLRP).relevance[0]
        with lrpx.propagate(model, lrpx.GRADIENT) as trace:
            trace.explain(output_of(model, batch)[0, -1, 3])
    other = trace.source_relevance(trace.sources[0])
    assert float((mine - other).abs().max() / mine.abs().max()) > 1e3 * TOLERANCE
