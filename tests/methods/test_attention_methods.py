"""Rollout, gradient rollout, Grad-CAM, AtMan: against slow twins, whatever the kernel, in batches, and their laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lrpx import Explainer, Logit, LogProb, Span, Task
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import MethodError
from lrpx.methods import METHODS, AtMan, GradCam, GradientRollout, Rollout, attribute_all
from lrpx.methods._rollout import discarded
from lrpx.model import BoundModel
from lrpx.questions import Question, Questions
from tests import tiny
from tests.plain_gpt import GPT
from tests.reference import attention_methods as twins
from tests.reference import models

IDS = [3, 14, 15, 9, 26, 5, 7]
DECODER = [0, 8, 9]
ROWS = [IDS, [8, 9], [4, 11, 20], [6, 2, 1, 30, 12]]
OF_MAPS = ["rollout", "gradient-rollout", "grad-cam"]
TWINS = {"rollout": twins.rollout, "gradient-rollout": twins.gradient_rollout, "grad-cam": twins.grad_cam}


def eager_bart():
    return tiny.build(tf.BartForConditionalGeneration, tiny.bart().config, "eager")


def neox(attn_implementation="sdpa"):
    return tiny.build(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**tiny.SIZES), attn_implementation)


def qa(attn_implementation="sdpa"):
    return tiny.build(tf.BertForQuestionAnswering, tf.BertConfig(**tiny.SIZES), attn_implementation)


def classifier(attn_implementation="sdpa"):
    return tiny.build(tf.BertForSequenceClassification, tf.BertConfig(**tiny.SIZES, num_labels=3), attn_implementation)


def mean_classifier(attn_implementation="sdpa"):
    """Its class is read from every position."""
    model = tiny.build(tf.BertForSequenceClassification, tf.BertConfig(**tiny.SIZES, num_labels=3), attn_implementation)
    model.bert.pooler.forward = lambda hidden: hidden.mean(1)
    return model


CASES = {
    "gpt2": (models.tiny_gpt2, {"position": 5}, lambda out: out.logits[0, 5, 4], [5]),
    "gpt2, inside": (models.tiny_gpt2, {"position": 3}, lambda out: out.logits[0, 3, 4], [3]),
    "neox": (neox, {}, lambda out: out.logits[0, 6, 4], [6]),
    "bert": (models.tiny_bert, {"position": 2}, lambda out: out.logits[0, 2, 4], [2]),
    "classifier": (classifier, {}, lambda out: out.logits[0, 2], [0]),
    "mean": (mean_classifier, {}, lambda out: out.logits[0, 2], [0, 1, 2, 3, 4, 5, 6]),
    "answer": (qa, {}, lambda out: out.start_logits[0, 2] + out.end_logits[0, 4], [2, 4]),
}
TARGETS = {"classifier": 2, "mean": 2, "answer": Span(2, 4)}


def near(found, expected, tolerance=1e-9):
    assert_allclose(np.asarray(found, dtype=float), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", OF_MAPS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_they_are_their_twins(name, method, kernel):
    build, how, read, positions = CASES[name]
    layers = twins.attentions(build("eager"), read, input_ids=torch.tensor([IDS]))
    found = Explainer(build(kernel))(IDS, TARGETS.get(name, 4), method=method, **how).relevance
    # eager, NeoX has a softmax in float32
    near(found, TWINS[method](layers, (7,), positions), 1e-5 if name == "neox" else 1e-9)
    assert method == "grad-cam" or found.abs().max() > 1e-4  # which may well be 0


@pytest.mark.parametrize("method", OF_MAPS)
@pytest.mark.parametrize("decoder", [DECODER, [0, 8, 9, 3, 4, 11, 2]], ids=["short", "as long as the encoder's"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_an_encoder_and_a_decoder(method, decoder, kernel):
    inputs = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([decoder])}
    layers = twins.attentions(eager_bart(), lambda out: out.logits[0, 2, 4], **inputs)
    model = eager_bart() if kernel == "eager" else tiny.bart()
    found = Explainer(model)(IDS, 4, method=method, decoder=decoder, position=2).relevance
    near(found, TWINS[method](layers, (7, len(decoder)), [2]))


@pytest.mark.parametrize("method", OF_MAPS)
def test_t5(method):
    """Whose eager softmax is in float32."""
    inputs = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([DECODER])}
    layers = twins.attentions(models.tiny_t5("eager"), lambda out: out.logits[0, 2, 4], **inputs)
    for kernel in ("sdpa", "eager"):
        found = Explainer(models.tiny_t5(kernel))(IDS, 4, method=method, decoder=DECODER).relevance
        near(found, TWINS[method](layers, (7, 3), [2]), 1e-5)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("outliers", ["lowest", "highest"])
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_what_is_discarded(share, outliers, fusion):
    layers = twins.attentions(models.tiny_gpt2("eager"), lambda out: out.logits[0, 6, 4], input_ids=torch.tensor([IDS]))
    explain = Explainer(models.tiny_gpt2())
    found = explain(IDS, 4, method=Rollout("r", fusion, share, outliers)).relevance
    near(found, twins.rollout(layers, (7,), [6], fusion, share, outliers))
    found = explain(IDS, 4, method=GradientRollout("g", share, outliers)).relevance
    near(found, twins.gradient_rollout(layers, (7,), [6], share, outliers))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100), st.floats(0, 0.99), st.sampled_from(["lowest", "highest"]))
def test_as_many_are_discarded_as_asked(seed, share, outliers):
    weights = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)).tril()
    kept = discarded(weights, share, outliers)
    gone = (kept != weights).sum()
    assert gone == int(share * (weights > 0).sum() + 1e-9)
    if 0 < gone < (weights > 0).sum():
        left, lost = kept[kept > 0], weights[kept != weights]
        assert lost.max() <= left.min() if outliers == "lowest" else lost.min() >= left.max()


@pytest.mark.parametrize("suppression", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("name", ["gpt2", "bert", "classifier", "answer"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_atman_is_its_twin(name, suppression, kernel):
    build, how, read, _ = CASES[name]
    expected = twins.atman(build("eager"), read, (7,), suppression, input_ids=torch.tensor([IDS]))
    method = AtMan("own", suppression, batch_size=3)
    found = Explainer(build(kernel))(IDS, TARGETS.get(name, 4), method=method, **how).relevance
    near(found, expected)
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("decoder", [DECODER, [0, 8, 9, 3, 4, 11, 2]], ids=["short", "as long as the encoder's"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_atman_turns_down_what_looks_at_the_encoder(decoder, kernel):
    inputs = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([decoder])}
    model = eager_bart() if kernel == "eager" else tiny.bart()
    found = Explainer(model)(IDS, 4, method="atman", decoder=decoder, position=2).relevance
    assert not found[7:].any()
    if len(decoder) == 3:  # else the twin could not tell a decoder's own attention by its shape
        near(found, twins.atman(eager_bart(), lambda out: out.logits[0, 2, 4], (7, 3), 0.9, **inputs))


def test_atman_in_t5():
    inputs = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([DECODER])}
    expected = twins.atman(models.tiny_t5("eager"), lambda out: out.logits[0, 2, 4], (7, 3), 0.9, **inputs)
    for kernel in ("sdpa", "eager"):
        near(Explainer(models.tiny_t5(kernel))(IDS, 4, method="atman", decoder=DECODER).relevance, expected, 1e-5)


def test_atman_turns_down_what_is_alike():
    model = models.tiny_gpt2("eager")
    embedded = model.transformer.wte.weight.detach()[torch.tensor(IDS)].numpy()
    unit = embedded / np.linalg.norm(embedded, axis=1, keepdims=True)
    cosine = unit @ unit.T
    threshold = 0.1
    assert ((cosine >= threshold) & ~np.eye(7, dtype=bool)).any()
    likeness = np.where(cosine >= threshold, cosine, 0.0)
    np.fill_diagonal(likeness, 1.0)
    read = lambda out: out.logits[0, 6].log_softmax(-1)[4]  # noqa: E731
    expected = twins.atman(model, read, (7,), 0.5, likeness, input_ids=torch.tensor([IDS]))
    near(Explainer(model)(IDS, LogProb(4), method=AtMan("own", 0.5, threshold)).relevance, expected)


class TwoAttentions(torch.nn.Module):
    """One attention that the model calls itself, and then torch's own, which a function written in Python hides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = torch.nn.Embedding(99, 8), torch.nn.Linear(8, 99)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        x = self.words(input_ids)
        x = x + torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])

    def less(self, factors):
        """The logits, with the scores multiplied by ``factors``, and both attentions written out."""
        x, torchs = self.words(torch.tensor(IDS)), self.attention
        x = x + (x @ x.T / 8**0.5 * factors).softmax(-1) @ x
        projected = torch.nn.functional.linear(x, torchs.in_proj_weight, torchs.in_proj_bias)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(0, 1) for each in projected.chunk(3, -1))
        heads = (q @ k.mT / 2.0 * factors).softmax(-1) @ v
        return self.head(x + torchs.out_proj(heads.transpose(0, 1).flatten(1)))


def test_atman_sees_the_attention_within_a_function_written_in_python():
    """Or it would turn down the scores of the other attention alone, without a word."""
    model = TwoAttentions().eval().double()
    found = Explainer(model, task=Task.CAUSAL)(IDS, 4, method="atman").relevance
    factors = 1 - AtMan().suppression * torch.eye(len(IDS), dtype=torch.float64)
    with torch.no_grad():
        changed = torch.stack([model.less(each)[-1, 4] for each in factors])
        assert_allclose(found, model.less(torch.ones(len(IDS), dtype=torch.float64))[-1, 4] - changed, atol=1e-12)


def test_atman_with_a_bias_on_the_scores_is_the_same_for_both_kernels():
    """ALiBi belongs to the scores, as for T5's relative bias."""
    config = tf.MptConfig(vocab_size=31, d_model=16, n_layers=2, n_heads=4, max_seq_len=32)
    model = tiny.build(tf.MptForCausalLM, config, "eager")
    expected = twins.atman(model, lambda out: out.logits[0, 6, 4], (7,), 0.9, input_ids=torch.tensor([IDS]))
    near(Explainer(model)(IDS, 4, method="atman").relevance, expected, 1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("method", [*OF_MAPS, "atman", "ifr"])
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2])
def test_batches_are_single_runs(build, method, side):
    explain = Explainer(build(), padding_side=side)
    for many, row in zip(explain(ROWS, 7, method=method), ROWS, strict=True):
        near(many.relevance, explain(row, 7, method=method).relevance, 1e-12)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
@pytest.mark.parametrize("build", [classifier, models.tiny_t5])
def test_batches_of_others(build, method):
    explain = Explainer(build())
    how = {"decoder": [DECODER, [0, 4], [0], [0, 8, 9, 3, 2]]} if build is models.tiny_t5 else {}
    each = how.get("decoder", [None] * 4)
    for many, row, decoder in zip(explain(ROWS, 1, method=method, **how), ROWS, each, strict=True):
        alone = explain(row, 1, method=method, **({} if decoder is None else {"decoder": decoder}))
        near(many.relevance, alone.relevance, 1e-12)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman", "ifr"])
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2])
def test_what_follows_the_position_is_no_matter(build, method):
    explain, tokens = Explainer(build()), [4, 7, 11, 20]
    every = explain(IDS, tokens, method=method, position=3)
    others = explain([*IDS[:4], 30, 1, 2], tokens, method=method, position=3)
    for found, other in zip(every, others, strict=True):
        near(found.relevance[4:], np.zeros(3), 1e-12)
        near(other.relevance[:4], found.relevance[:4], 1e-12)
    assert any(found.relevance.abs().max() > 1e-4 for found in every)


@pytest.mark.parametrize("method", ["rollout", "ifr"])
def test_shares_sum_to_one(method):
    found = Explainer(models.tiny_gpt2())(IDS, method=method).relevance
    assert found.min() >= 0
    near(found.sum(), 1.0)


def test_several_settings_share_a_pass(monkeypatch):
    explain = Explainer(models.tiny_gpt2())
    passes = []
    traced = BoundModel.traced
    monkeypatch.setattr(BoundModel, "traced", lambda *args, **how: passes.append(1) or traced(*args, **how))
    methods = [Rollout(f"r{share}", discard=share) for share in (0.0, 0.5)]
    questions = Questions((explain.bound.reader.row(IDS),), (Question(0, 6, Logit(4)),))
    found = attribute_all(methods, explain.bound, questions)
    assert len(passes) == 2  # one of them to see whether anything else mixes tokens
    for method in methods:
        near(found[method.name].relevance[0], explain(IDS, 4, method=method).relevance, 1e-12)


# ---------------------------------------------------------------------------- what they refuse


def test_what_they_do_not_serve():
    for method in (*OF_MAPS, "atman"):
        with pytest.raises(MethodError, match=r"mixes positions by a convolution.*use attnlrp"):
            Explainer(tiny.mamba())(IDS, method=method)
        with pytest.raises(MethodError, match=rf"{method} has no ledger"):
            Explainer(models.tiny_gpt2())(IDS, method=method, ledger=True)
        config = tiny.bart(num_labels=3, eos_token_id=2, pad_token_id=1).config
        explain = Explainer(tiny.build(tf.BartForSequenceClassification, config))
        with pytest.raises(MethodError, match=r"gives it to an encoder and to a decoder; use lrp"):
            explain([3, 4, 2], method=method)
    with pytest.raises(MethodError, match=r"ifr follows one residual stream"):
        Explainer(models.tiny_t5())(IDS, method="ifr")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_embeddings_of_neighbours_are_refused(method):
    """MobileBERT's tokens are made of three neighbours before any attention."""
    explain = Explainer(tiny_model(choose(["mobilebert"], "masked-lm")[0]), task=Task.MASKED)
    with pytest.raises(MethodError, match=r"embeddings shifts tokens to their neighbours, besides attention"):
        explain([*range(12, 21)], 4, position=6, method=method)


class Looks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Turned(torch.nn.Module):
    """Its attention looks at the tokens in another order, as at what is behind them."""

    def __init__(self, turn, back):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 3)
        self.layers = torch.nn.ModuleList([Looks()])
        self.turn, self.back = turn, back

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + self.back(layer(self.turn(x)))
        return self.head(x)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_tokens_in_another_order_are_refused(method):
    order = torch.tensor([2, 0, 1, 6, 3, 4, 5])
    turns = (
        (lambda x: x.flip(1), lambda x: x.flip(1)),
        (lambda x: torch.roll(x, 2, 1), lambda x: torch.roll(x, -2, 1)),
        (lambda x: x[:, order], lambda x: x[:, order.argsort()]),
        (lambda x: x.index_select(1, order), lambda x: x.index_select(1, order.argsort())),
    )
    for turn, back in turns:
        explain = Explainer(Turned(turn, back).eval(), task=Task.TOKEN_CLASSIFICATION)
        with pytest.raises(MethodError, match=r"puts the tokens into another order"):
            explain(IDS, 1, position=3, method=method)
    for same in (
        lambda x: x, lambda x: x.flip(2), lambda x: x[:, torch.arange(7)], lambda x: torch.cat([x[:, :3], x[:, 3:]], 1),
        lambda x: torch.cat([x[:, :3], x.new_ones(len(x), 1, 16), x[:, 4:]], 1),
    ):  # fmt: skip
        explain = Explainer(Turned(same, same).eval(), task=Task.TOKEN_CLASSIFICATION)
        assert explain(IDS, 1, position=3, method=method).relevance.isfinite().all()


class FromTheStart(torch.nn.Module):
    """What comes before a token predicts it: the tokens move one on behind a vector of the model's own."""

    def __init__(self, move):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 31)
        self.start, self.layers, self.move = torch.nn.Parameter(torch.randn(1, 1, 16)), torch.nn.ModuleList(), move
        self.layers.append(Adds())

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.move(self.embedding(input_ids), self.start.expand(len(input_ids), -1, -1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Adds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.looks = Looks()

    def forward(self, x):
        return x + self.looks(x)


class Cut(FromTheStart):
    """The same, where the last token is cut off before it is looked up."""

    def __init__(self):
        super().__init__(lambda x, start: torch.cat([start, x], 1))

    def forward(self, input_ids):
        return super().forward(input_ids[:, :-1])


MOVED = {
    "a slice": lambda: FromTheStart(lambda x, start: torch.cat([start, x[:, :-1]], 1)),
    "a copy": lambda: FromTheStart(lambda x, start: torch.cat([start, x[:, :-1].clone()], 1)),
    "scaled": lambda: FromTheStart(lambda x, start: torch.cat([start, 4 * x[:, :-1]], 1)),
    "cut ids": Cut,
}


@pytest.mark.parametrize("method", [*OF_MAPS, "atman", "ifr", "alti", "alti-logit"])
def test_tokens_that_move_one_on_are_refused(method):
    """Each had what its neighbour should have."""
    for move in MOVED.values():
        with pytest.raises(MethodError, match=r"into other places|7 vectors made of the 6 tokens"):
            Explainer(move().eval(), task=Task.CAUSAL)(IDS, 1, position=3, method=method)
    explain = Explainer(FromTheStart(lambda x, start: torch.cat([x[:, :-1], start], 1)).eval(), task=Task.CAUSAL)
    assert explain(IDS, 1, position=3, method=method).relevance.isfinite().all()


class Blocks(Adds):
    """With a part that looks at nothing behind it, and perhaps a stream that moves before both."""

    def __init__(self, move):
        super().__init__()
        self.linear, self.move = torch.nn.Linear(16, 16), move

    def forward(self, x):
        x = super().forward(self.move(x))
        return x + self.linear(x)


@pytest.mark.parametrize("method", ["ifr", "alti", "alti-logit"])
def test_streams_that_are_rolled_between_layers_are_refused(method):
    model = FromTheStart(lambda x, start: x).eval()
    model.layers = torch.nn.ModuleList(Blocks(lambda x: x) for _ in range(3))
    explain = Explainer(model, task=Task.CAUSAL)
    assert explain(IDS, 1, position=3, method=method).relevance.isfinite().all()
    model.layers[1].move = lambda x: x.roll(1, 1)
    with pytest.raises(MethodError, match="between layers the model puts the tokens into other places"):
        explain(IDS, 1, position=3, method=method)


@pytest.mark.parametrize("method", ["ifr", "alti-logit"])
@pytest.mark.parametrize("move", [lambda x: x.roll(2, 1), lambda x: x.flip(1), lambda x: x + x.roll(4, 1)])
def test_streams_of_tokens_in_other_places_are_refused(method, move):
    explain = Explainer(FromTheStart(lambda x, start: move(x)).eval(), task=Task.CAUSAL)
    with pytest.raises(MethodError, match="into other places"):
        explain(IDS, 1, position=3, method=method)


class LooksSpelled(Looks):
    """The same without a fused kernel."""

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Hourglass(FromTheStart):
    """Its second layer has half as many vectors."""

    def __init__(self):
        super().__init__(None)
        self.layers.append(Adds())
        self.layers[1].looks = LooksSpelled()

    def forward(self, input_ids):
        x = self.layers[0](self.embedding(input_ids))
        halves = self.layers[1](x.unflatten(1, (-1, 2)).mean(2))
        return self.head(x + halves.repeat_interleave(2, 1))


@pytest.mark.parametrize("method", ["ifr", "alti-logit"])
def test_layers_over_pairs_of_tokens_are_refused(method):
    with pytest.raises(MethodError, match=r"layers\.1 adds to 3 vectors made of the 6 tokens"):
        Explainer(Hourglass().eval(), task=Task.CAUSAL)(IDS[:6], 1, position=3, method=method)


def chunks(x):
    return torch.cat(x.chunk(4, -1))


HEADS_FIRST = {  # queries, keys and values [B, T, d] in heads, and what attention gives [B, T, d] again
    "in chunks": (chunks, lambda o, rows: torch.cat(o.chunk(4), -1)),
    "in one copy": (
        lambda x: x.unflatten(-1, (4, 4)).permute(2, 0, 1, 3).reshape(-1, x.shape[1], 4),
        lambda o, rows: o.unflatten(0, (4, rows)).permute(1, 2, 0, 3).flatten(2),
    ),
    "stacked": (lambda x: torch.stack(x.chunk(4, -1)), lambda o, rows: torch.cat(list(o), -1)),
    "turned": (lambda x: x.unflatten(-1, (4, 4)).permute(2, 0, 1, 3), lambda o, rows: torch.cat(list(o), -1)),
}


class HeadsFirst(Looks):
    """Its heads stand before the rows of a batch."""

    def __init__(self, split, join):
        super().__init__()
        self.split, self.join = split, join

    def forward(self, x):
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        causal = torch.ones(x.shape[1], x.shape[1]).tril() == 0
        weights = (q @ k.mT / 2).masked_fill(causal, -torch.inf).softmax(-1)
        return self.out(self.join(weights @ v, len(x)))


class Batched(Turned):
    """Its inputs run together, for it takes a mask."""

    def __init__(self, layer):
        super().__init__(lambda x: x, lambda x: x)
        self.layers[0] = layer

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids)


@pytest.mark.parametrize("spelled", HEADS_FIRST)
@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_heads_before_the_rows_of_a_batch_are_refused_in_one(method, spelled):
    """A row alone is right but under AtMan, which changes copies of it in a batch."""

    def explain(layer, inputs, **options):
        torch.manual_seed(1)
        explainer = Explainer(Batched(layer).double().eval(), task=Task.TOKEN_CLASSIFICATION)
        return explainer(inputs, 1, position=3, method=method, **options)

    torch.manual_seed(0)
    layer, usual = HeadsFirst(*HEADS_FIRST[spelled]), Looks()
    usual.load_state_dict(layer.state_dict())
    batch = [IDS[:4], ROWS[3][:4], IDS[3:], IDS[2:6]]
    with pytest.raises(MethodError, match=r"heads before the rows of a batch|no softmax attention"):
        explain(layer, batch)
    if method != "atman":
        for found, wanted in zip(explain(layer, batch, batch_size=1), explain(usual, batch), strict=True):
            assert_allclose(found.relevance, wanted.relevance, atol=1e-12)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_a_convolution_of_the_values_of_heads_is_refused(method):
    """Nyströmformer adds one to its attention, which is a softmax where there are as many landmarks as segments."""
    explain = Explainer(tiny_model(choose(["nystromformer"], "masked-lm")[0]), task=Task.MASKED)
    with pytest.raises(MethodError, match=r"mixes positions by a convolution, besides attention"):
        explain([*range(12, 21)], 4, position=6, method=method)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_attention_of_patches_of_tokens_is_refused(method):
    """BLT's bytes are put together in patches, which look at them, and at each other."""
    explain = Explainer(tiny_model(choose(["blt"], "causal-lm")[0]), task=Task.CAUSAL)
    with pytest.raises(MethodError, match=r"local_encoder.* looks at all tokens from places that are none of them, as"):
        explain([*range(12, 21)], 4, method=method)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_a_decoder_that_looks_at_both_at_once_is_refused(method):
    """T5Gemma 2's decoder has one softmax over its own tokens and the encoder's."""
    (kind,) = choose(["t5gemma2"], "seq2seq-lm")
    with pytest.raises(MethodError, match=r"no softmax attention of both alone was found.*use attnlrp or lrp"):
        Explainer(tiny_model(kind))(IDS, 4, method=method, decoder=[1, 8, 9])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Rollout(discard=1), "the discard of rollout is 1, which leaves nothing"),
        (Rollout(discard=-0.1), r"the discard of rollout is -0.1; pass a number from 0 to 1"),
        (Rollout(fusion="sum"), "pass one of 'mean', 'max', 'min'"),
        (GradientRollout(outliers="both"), "pass one of 'lowest', 'highest'"),
        (AtMan(suppression=0), "the suppression of atman is 0, which changes nothing"),
        (AtMan(suppression=1.5), "the suppression of atman is 1.5"),
        (AtMan(threshold=2), "the threshold of atman is 2"),
        (AtMan(batch_size=0), "the batch_size of atman is 0"),
    ],
)
def test_fields_that_are_none(method, said):
    with pytest.raises(MethodError, match=said):
        Explainer(models.tiny_gpt2())(IDS, method=method)


def test_attention_with_a_sink_cannot_be_turned_down():
    """A softmax with one more score than there are keys is read, and not changed."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    config = tf.GptOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    config.num_experts_per_tok, config._experts_implementation = 1, "eager"
    model = tiny.build(tf.GptOssForCausalLM, config, "eager")
    with pytest.raises(MethodError, match=r"something comes between the softmax.*cannot be changed"):
        Explainer(model)(IDS, method="atman")
    assert Explainer(model)(IDS, method="rollout").relevance.sum() > 0.5


def seeing(more):
    """A Qwen2-VL, and two images of 16 patches in a text of ``11 + more`` tokens that is read at its end."""
    (kind,) = choose(["qwen2_vl"], "image-text-to-text")
    model = tiny_model(kind).double()
    model.set_attn_implementation("eager")
    config, vision = model.config, model.config.vision_config
    image = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
    ids = torch.tensor([[11, *image, *image[:-1], *range(13, 13 + more - 1)]])
    drawn = torch.Generator().manual_seed(1)
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(32, size, generator=drawn).double(),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == config.image_token_id).long(),
    }


@pytest.mark.parametrize("more", [5, *(pytest.param(more, marks=pytest.mark.slow) for more in (4, 6))])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_an_image_of_as_many_patches_as_the_text_has_tokens(more, kernel):
    """The attention of its tower is not the tokens'."""
    model, inputs = seeing(more)
    tokens = inputs["input_ids"].shape[1]
    assert (tokens == 16) == (more == 5)
    read = lambda out: out.logits[0, -1, 4]  # noqa: E731
    layers = twins.attentions(model, read, **inputs)
    with twins.only_in(model.model.language_model) as inside:
        turned = twins.atman(model, read, (tokens,), 0.9, inside=inside, **inputs)
    model.set_attn_implementation(kernel)
    explain = Explainer(model)
    for method, twin in TWINS.items():
        near(explain(inputs, 4, method=method).relevance, twin(layers, (tokens,), [tokens - 1]), 1e-6)
    near(explain(inputs, 4, method="atman").relevance, turned, 1e-6)


@pytest.mark.parametrize("objects", [len(IDS), len(IDS) + 2])
@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_an_image_that_looks_at_the_text_is_refused(method, objects):
    """LXMERT's text then looks at what the image has become, so tokens are mixed outside of their own attention."""
    config = tf.LxmertConfig(
        vocab_size=31, hidden_size=16, num_attention_heads=2, intermediate_size=24, l_layers=1, x_layers=1, r_layers=1,
        visual_feat_dim=8, num_qa_labels=3, max_position_embeddings=20, num_object_labels=3, num_attr_labels=3,
    )  # fmt: skip
    model = tf.LxmertForQuestionAnswering(config).double().eval()
    image = {"visual_feats": torch.ones(1, objects, 8).double(), "visual_pos": torch.ones(1, objects, 4).double()}
    with pytest.raises(MethodError, match=r"visual_attention\.att (mixes what comes from|is both that of) the tokens"):
        Explainer(model, task=Task.CLASSIFICATION)({"input_ids": IDS, **image}, 1, method=method)


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_as_many_experts_as_tokens(tokens):
    """A router's softmax is no attention."""
    (kind,) = choose(["switch_transformers"], "seq2seq-lm")
    model = tiny_model(kind).double()
    model.set_attn_implementation("eager")
    assert model.config.num_experts == 4
    ids, decoder = [5, 9, 3, 8, 6][:tokens], [7, 8, 9, 4, 3, 2, 6]
    inputs = {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([decoder])}
    read = lambda out: out.logits[0, -1, 4]  # noqa: E731
    layers = twins.attentions(model, read, **inputs)
    explain = Explainer(model)
    for method, twin in TWINS.items():
        found = explain(ids, 4, method=method, decoder=decoder).relevance
        near(found, twin(layers, (tokens, 7), [6]), 1e-5)
    found = explain(ids, 4, method="atman", decoder=decoder).relevance
    near(found, twins.atman(model, read, (tokens, 7), 0.9, **inputs), 1e-5)


class Masked(torch.nn.Module):
    """A language model of one layer, whose attention weights may be masked once more after the softmax."""

    def __init__(self, mask):
        super().__init__()
        self.mask, linear = mask, torch.nn.Linear
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(31, 8), linear(8, 31)
            self.layers = torch.nn.ModuleList([torch.nn.ModuleList([linear(8, 8) for _ in range(3)])])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            q, k, v = (each(x) for each in layer)
            later = torch.ones(len(x[0]), len(x[0])).triu(1).bool()
            weights = (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
            x = x + self.mask(weights, later) @ v
        return self.head(x)

    def get_input_embeddings(self):
        return self.embed


@pytest.mark.parametrize("method", OF_MAPS)
def test_weights_that_are_masked_after_the_softmax_are_what_they_were(method):
    ways = [
        lambda weights, _: weights, lambda weights, later: weights.masked_fill(later, 0.0),
        lambda weights, later: weights.where(~later, torch.zeros_like(weights)),
    ]  # fmt: skip
    found = [Explainer(Masked(way).eval(), task=Task.CAUSAL)(IDS, 4, method=method).relevance for way in ways]
    for other in found[1:]:
        assert torch.equal(other, found[0])
    in_place = Masked(lambda weights, later: weights.masked_fill_(later, 0.0)).eval()
    with pytest.raises(MethodError, match="do not multiply values as they are"):
        Explainer(in_place, task=Task.CAUSAL)(IDS, 4, method=method)


EINSUMS = {
    "heads of their own": ("bhij,bjhd->bihd", False),
    "values first": ("bjhd,bhij->bihd", False),
    "dots": ("...ij,...jd->...id", True),
    "shared values": ("bhij,bjd->bihd", False),
    "in a list": ("bhij,bjhd->bihd", False),
}


class ByHeads(torch.nn.Module):
    """A layer of attention by a matrix product, or by an ``einsum`` whose heads stand first or behind the tokens."""

    def __init__(self, equation, has_heads_first, is_shared, is_listed=False):
        super().__init__()
        self.equation, self.has_heads_first, self.is_shared = equation, has_heads_first, is_shared
        self.is_listed = is_listed
        width = 4 if is_shared else 16
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, each) for each in (16, width, width, 16))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
        if self.equation is None:
            read = (weights @ v).transpose(1, 2)
        else:
            values = v if self.has_heads_first else v[:, 0] if self.is_shared else v.transpose(1, 2)
            two = (values, weights) if self.equation.startswith("bj") else (weights, values)
            read = torch.einsum(self.equation, [*two]) if self.is_listed else torch.einsum(self.equation, *two)
            read = read.transpose(1, 2) if self.has_heads_first else read
        return x + self.o(read.flatten(2))


class OfHeads(torch.nn.Module):
    """A language model of two such layers."""

    def __init__(self, *settings):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 31)
            self.layers = torch.nn.Sequential(*(ByHeads(*settings) for _ in range(2)))
        self.double().eval()

    def forward(self, input_ids):
        return self.head(self.layers(self.embed(input_ids)))

    def get_input_embeddings(self):
        return self.embed


@pytest.mark.parametrize("spelling", EINSUMS)
@pytest.mark.parametrize("method", [*OF_MAPS, "atman", "alti-logit", "alti", "ifr"])
def test_attention_by_einsum_is_that_by_a_matrix_product(spelling, method):
    equation, has_heads_first = EINSUMS[spelling]
    is_shared, is_listed = spelling == "shared values", spelling == "in a list"
    both = (OfHeads(each, has_heads_first, is_shared, is_listed) for each in (None, equation))
    explainers = (Explainer(model, task=Task.CAUSAL) for model in both)
    expected, found = (explain([IDS, [7, *IDS[:4]]], [4, 5], method=method) for explain in explainers)
    for a, b in zip(expected, found, strict=True):
        near(b.relevance, a.relevance, 1e-12)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman", "alti-logit"])
def test_weights_over_queries_by_einsum_are_no_attention_of_each_query(method):
    with pytest.raises(MethodError, match="use attnlrp or lrp"):
        Explainer(OfHeads("bhij,bihd->bjhd", False, False), task=Task.CAUSAL)(IDS, 4, method=method)


@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_two_streams_of_one_text_are_refused(method):
    """What predicts in ProphetNet looks at both, of twice as many places."""
    explain = Explainer(tiny_model(choose(["prophetnet"], "causal-lm")[0]))
    with pytest.raises(MethodError, match="over 14 places that are not the tokens"):
        explain([*range(12, 19)], 2, method=method)


@pytest.mark.parametrize("method", OF_MAPS)
def test_attention_of_places_alone_is_refused(method):
    class Placed(Masked):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            place = torch.eye(8)[: x.shape[1]].expand(len(x), -1, -1)
            for _, _, value in self.layers:
                x = x + (place @ place.mT).softmax(-1) @ value(x)
            return self.head(x)

    with pytest.raises(MethodError, match="do not depend on the input, or are computed where gradients are off"):
        Explainer(Placed(None).eval(), task=Task.CAUSAL)(IDS, 4, method=method)


@pytest.mark.parametrize("method", OF_MAPS)
def test_one_softmax_less_another_is_refused(method):
    """The difference has weights below 0: rollout gave some tokens relevance below 0, and divided by what was left."""

    class Differential(Masked):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for q, k, value in self.layers:
                two = (each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (q, k))
                both = (next(two) @ next(two).mT).softmax(-1)  # one call, as timm's
                x = x + (both[:, 0] - self.share * both[:, 1]) @ value(x)
            return self.head(x)

    model = Differential(None).eval()
    model.share = 0.0
    assert Explainer(model, task=Task.CAUSAL)(IDS, 4, method=method).relevance.min() >= 0
    model.share = 0.8
    with pytest.raises(MethodError, match=r"numbers below 0, as by the difference of two softmaxes .* use attnlrp"):
        Explainer(model, task=Task.CAUSAL)(IDS, 4, method=method)


def test_values_that_a_linear_layer_chooses():
    """Nobody knows whether its outputs are for tokens or for experts, where there are as many."""

    class Chosen(Masked):
        def __init__(self):
            super().__init__(lambda weights, _: weights)
            self.router = torch.nn.Linear(8, 7)

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for _, _, value in self.layers:
                x = x + self.router(x).float().softmax(-1) @ value(x)
            return self.head(x)

    for method in (*OF_MAPS, "atman"):
        with pytest.raises(MethodError, match="whether that is attention or a choice of experts; use attnlrp or lrp"):
            Explainer(Chosen().eval(), task=Task.CAUSAL)(IDS, 4, method=method)


def test_hybrids_are_refused():
    sizes = tiny.SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 2}
    config = tf.LlamaConfig(**sizes)
    model = tiny.build(tf.LlamaForCausalLM, config)

    class Nothing(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    model.model.layers[0].self_attn = Nothing()
    with pytest.raises(MethodError, match=r"model.layers.0 has no softmax attention, as the layers of hybrid models"):
        Explainer(model)(IDS, method="rollout")


def test_hybrids_whose_attention_stands_first_are_refused():
    """AtMan turned a token down for the attentions alone, and what a linear attention behind them reads was left."""
    sizes = tiny.SIZES | {"num_key_value_heads": 2, "head_dim": 4, "block_size": 4, "num_local_experts": 2}
    model = tf.MiniMaxForCausalLM(tf.MiniMaxConfig(**sizes)).eval()
    assert model.config.layer_types == ["full_attention", "linear_attention"]
    for method in (*OF_MAPS, "atman"):
        with pytest.raises(
            MethodError, match=r"model.layers.1 has no softmax attention, as the layers of hybrid models"
        ):
            Explainer(model)(IDS, method=method)


def test_nothing_of_the_model_changes():
    model = models.tiny_gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    for method in METHODS:
        if method != "lrp-voita" and Task.CAUSAL in METHODS[method].tasks:
            Explainer(model)(IDS, method=method)
    assert torch.equal(state, torch.random.get_rng_state())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(each.grad is None and not each.requires_grad for each in model.parameters())


def test_they_describe_themselves():
    assert Rollout(discard=0.5).describe() != Rollout().describe()
    assert AtMan(suppression=0.5).describe() != AtMan().describe()
    assert AtMan(batch_size=5).describe() == AtMan().describe()
    assert GradCam().label == "Grad-CAM"


@pytest.mark.parametrize("how", ["cat", "stack"])
@pytest.mark.parametrize("name", OF_MAPS)
def test_heads_that_are_modules_of_their_own_are_one_layer(name, how):
    separate, together = (Explainer(GPT(how, together=each), task=Task.CAUSAL) for each in (False, True))
    near(separate(IDS, target=4, method=name).relevance, together(IDS, target=4, method=name).relevance)


class Halves(torch.nn.Module):
    """One attention, whose weights multiply all values in one call, or each half of them in a call of its own."""

    def __init__(self, calls, kernel):
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.kernel = calls, kernel
        self.embed = torch.nn.Embedding(32, 24)
        self.maps = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.head = torch.nn.Linear(24, 32)

    def get_input_embeddings(self):
        return self.embed

    def attend(self, q, k, v):
        if self.kernel == "sdpa":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v

    def forward(self, input_ids):
        x = self.embed(input_ids)
        q, k, v = (each(x).unflatten(-1, (3, 8)).transpose(1, 2) for each in self.maps)
        out = torch.cat([self.attend(q, k, half) for half in v.chunk(self.calls, -1)], -1)
        return self.head((x + out.transpose(1, 2).flatten(2)).tanh())


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", OF_MAPS)
def test_one_attention_of_values_in_two_halves_is_that_of_all(name, kernel):
    halves, whole = (Explainer(Halves(n, kernel).double().eval(), task=Task.CAUSAL) for n in (2, 1))
    near(halves(IDS, target=9, method=name).relevance, whole(IDS, target=9, method=name).relevance)


class TakenOff(Halves):
    """What one softmax reads is taken off what another reads of the same values, by calls of their own or one; two
    layers."""

    share = torch.tensor([[0.8], [0.5], [0.2]])[:, None]

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for _ in range(2):
            q, k, v = (each(x).unflatten(-1, (3, 8)).transpose(1, 2) for each in self.maps)
            out = self.differ(q.chunk(2, -1), k.chunk(2, -1), v)
            x = (x + out.transpose(1, 2).flatten(2)).tanh()
        return self.head(x)

    def differ(self, q, k, v):
        if self.calls == 1:  # as DiffLlama's
            one, other = self.attend(*(torch.cat(each, 1) for each in (q, k, (v, v)))).chunk(2, 1)
        else:
            pairs, halves = zip(q, k, strict=True), v.chunk(self.calls // 2, -1)
            one, other = (torch.cat([self.attend(*both, half) for half in halves], -1) for both in pairs)
        return one - self.share.to(one) * other


@pytest.mark.parametrize("calls", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("method", OF_MAPS)
def test_what_one_softmax_reads_less_what_another_reads_is_refused(method, kernel, calls):
    """Each softmax counted as a head of its own, also the one that was taken off."""
    model = TakenOff(calls, kernel).double().eval()
    with pytest.raises(MethodError, match=r"what one softmax reads is taken off what another reads .* use attnlrp"):
        Explainer(model, task=Task.CAUSAL)([IDS, IDS[:3]], 4, method=method)
    model.share = torch.linspace(0.2, 0.8, 24).unflatten(0, (3, 1, 8))  # of each feature
    with pytest.raises(MethodError, match="what one softmax reads is taken off what another reads"):
        Explainer(model, task=Task.CAUSAL)([IDS, IDS[:3]], 4, method=method)
    model.share = torch.tensor(-0.5)
    assert Explainer(model, task=Task.CAUSAL)(IDS, 4, method=method).relevance.min() >= 0


def test_diffllama_is_refused():
    (cls,) = choose(["diffllama"], "causal-lm")
    with pytest.raises(MethodError, match="what one softmax reads is taken off what another reads"):
        Explainer(tiny_model(cls))(IDS, 4, method="rollout")


@pytest.mark.parametrize("name", ["rollout", "gradient-rollout", "atman"])
def test_a_masked_kernel_under_autocast(name):
    """Its scores are narrower there than its queries are."""
    explainer = Explainer(neox().float())
    exact = explainer(IDS, target=4, method=name).relevance
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = explainer(IDS, target=4, method=name).relevance
    torch.testing.assert_close(found.double(), exact.double(), rtol=0, atol=0.05 * float(exact.abs().max()))


class Stable(torch.nn.Module):
    """One attention, from whose scores the largest is perhaps taken off, as exponentials could overflow."""

    def __init__(self, how):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.qkv = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 48)
            self.out, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 32)
        self.how = how
        self.double().eval()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores, admitted = q @ k.mT, torch.ones(x.shape[1], x.shape[1]).tril() == 1
        if self.how != "before the mask":
            scores = scores.masked_fill(~admitted, -torch.inf)
        if self.how == "of rows":
            scores = scores - scores.max(dim=-1, keepdim=True)[0]
        elif self.how == "of all":
            scores = (scores - scores.max()).clamp(min=-50000)
        elif self.how == "in place":
            scores -= scores.amax(-1).unsqueeze(-1).detach()
        elif self.how == "added":
            scores = scores + (-scores.amax(-1, keepdim=True))
        elif self.how == "bounded":
            scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        elif self.how == "before the mask":
            scores = torch.where(admitted, scores - scores.amax(-1, keepdim=True), -torch.inf)
        return self.head(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("how", ["of rows", "of all", "in place", "added", "before the mask"])
def test_scores_whose_largest_was_taken_off_are_not_turned_down(how):
    """All are below 0 then, so that to multiply them would turn each key up."""
    near(Stable(how)(torch.tensor([IDS])).detach(), Stable("plain")(torch.tensor([IDS])).detach().numpy())
    assert Explainer(Stable("plain"), task=Task.CAUSAL)(IDS, 4, method="atman").relevance.abs().max() > 1e-3
    explain = Explainer(Stable(how), task=Task.CAUSAL)
    with pytest.raises(MethodError, match=r"the largest score is taken off before the softmax.*use another method"):
        explain(IDS, 4, method="atman")
    plain = Explainer(Stable("plain"), task=Task.CAUSAL)
    for method in OF_MAPS:
        near(explain(IDS, 4, method=method).relevance, plain(IDS, 4, method=method).relevance)
    bounded = Explainer(Stable("bounded"), task=Task.CAUSAL)
    near(bounded(IDS, 4, method="atman").relevance, plain(IDS, 4, method="atman").relevance)


class Mixing(torch.nn.Module):
    """Two blocks of attention and of a second part, which may mix tokens as well."""

    def __init__(self, how):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)
            self.layers = torch.nn.ModuleList(Mixer(how) for _ in range(2))
        self.double().eval()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mixer(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.qkv, self.out = how, torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.norm, self.linear = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)
        self.lstm = torch.nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        admitted = torch.ones(x.shape[1], x.shape[1]).tril() == 1
        if self.how == "fused":
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        else:
            mixed = (q @ k.mT).masked_fill(~admitted, -torch.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm(x)
        if self.how == "LSTM":
            return x + self.lstm(h)[0]
        if self.how == "shift":
            h = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        elif self.how == "mean":
            h = h.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        elif self.how == "windows":  # of two tokens, whose rows are beside those of the batch
            windows = torch.nn.functional.pad(h, (0, 0, 0, x.shape[1] % 2)).view(-1, 2, 16)
            weights = (windows @ windows.mT).masked_fill(torch.ones(2, 2).triu(1) == 1, -torch.inf).softmax(-1)
            h = (weights @ windows).view(len(x), -1, 16)[:, : x.shape[1]]
        return x + self.linear(h)


@pytest.mark.parametrize("method", [*OF_MAPS, "ifr", "alti-logit"])
def test_what_mixes_tokens_beside_attention_is_refused(method):
    """An LSTM, a shift, a mean or windows in the place of a feed-forward part: no map has them, and none is told of."""
    fused, eager = (Explainer(Mixing(how), task=Task.CAUSAL)(IDS, 4, method=method) for how in ("fused", "eager"))
    near(fused.relevance, eager.relevance)
    said = r"before the attention in layers.1.* mixes them; use attnlrp or lrp"
    of_windows = r"attention in layers.0 is over 2 places that are not the tokens" if method in OF_MAPS else said
    for how, refusal in {"LSTM": said, "shift": said, "mean": said, "windows": of_windows}.items():
        with pytest.raises(MethodError, match=refusal):
            Explainer(Mixing(how), task=Task.CAUSAL)(IDS, 4, method=method)


class AtDistances(Stable):
    """One attention whose weights multiply embeddings of the distances, too, or are looked at beside it."""

    def __init__(self, how):
        super().__init__(how)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.distances = torch.nn.Embedding(16, 4).double()

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        far = self.distances(places[:, None] - places + 8)
        weights = (q @ k.mT).masked_fill(places > places[:, None], -torch.inf).softmax(-1)
        read = weights @ v
        if self.how == "einsum":
            read = read + torch.einsum("bhij,ijd->bhid", weights, far)
        elif self.how == "sum":
            read = read + (weights.unsqueeze(-1) * far).sum(-2)
        else:
            self.seen = weights.mean(1), -(weights * (weights + 1e-9).log()).sum(-1)
        return self.head(x + read.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", ["einsum", "sum"])
def test_weights_that_meet_more_than_values_are_not_turned_down(how):
    """As those of Shaw et al. (2018) do; once they were turned down for the values alone."""
    with pytest.raises(MethodError, match=r"something besides values.*use another method, such as leave-one-out"):
        Explainer(AtDistances(how), task=Task.CAUSAL)(IDS, 4, method="atman")


def test_weights_that_are_looked_at_are_turned_down():
    assert Explainer(AtDistances("looked at"), task=Task.CAUSAL)(IDS, 4, method="atman").relevance.abs().max() > 1e-3


class Branches(torch.nn.Module):
    """A classifier of two stacks of layers, the second upon the first, or both upon the tokens."""

    def __init__(self, are_beside):
        super().__init__()
        self.first, self.second = (torch.nn.Sequential(*OfHeads(None, True, False).layers) for _ in range(2))
        self.are_beside = are_beside
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 3)
        self.double().eval()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.embed(input_ids)
        first = self.first(x)
        return self.head((first + self.second(x) if self.are_beside else self.second(first))[:, -1])


@pytest.mark.parametrize("method", OF_MAPS)
def test_two_encoders_of_one_text_are_refused(method):
    """Their maps were once multiplied, as if the layers were of one."""
    assert Explainer(Branches(False), task=Task.CLASSIFICATION)(IDS, 1, method=method).relevance.sum() > 1e-6
    with pytest.raises(MethodError, match=r"second.0 does not see what that in first.0 gives, as where two encoders"):
        Explainer(Branches(True), task=Task.CLASSIFICATION)(IDS, 1, method=method)


class OverFeatures(torch.nn.Module):
    """A classifier of attention over the tokens, over the features of each head, and over the tokens again."""

    def __init__(self):
        super().__init__()
        self.first, self.last = OfHeads(None, True, False).layers
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.qkv, self.head = (
                torch.nn.Embedding(31, 16),
                torch.nn.Linear(16, 48),
                torch.nn.Linear(16, 3),
            )
        self.double().eval()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.first(self.embed(input_ids))
        q, k, v = (each.unflatten(-1, (4, 4)).permute(0, 2, 3, 1) for each in self.qkv(x).chunk(3, -1))
        x = x + ((q @ k.mT).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.last(x)[:, -1])


@pytest.mark.parametrize("tokens", [3, 4, 5])
@pytest.mark.parametrize("method", [*OF_MAPS, "atman"])
def test_attention_over_features_is_refused_whatever_the_length(method, tokens):
    """Of as many tokens as a head has features it once went for attention over the tokens."""
    with pytest.raises(MethodError, match=r"places that are not the tokens|or mixes them"):
        Explainer(OverFeatures(), task=Task.CLASSIFICATION)(IDS[:tokens], 1, method=method)


class OfTorch(torch.nn.Module):
    """A language model of one layer of torch's own attention."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 31)
            self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.double().eval()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        x = self.embed(input_ids)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.head(x + self.attention(x, x, x, attn_mask=later)[0])


def test_atman_of_torchs_own_attention_runs_as_many_copies_as_there_are_tokens():
    """Its queries, keys and values are copied as ``[3, T, B, d]``, which of ``T`` rows looks like heads before rows."""
    explain = Explainer(OfTorch(), task=Task.CAUSAL)
    alone, together = (explain(IDS, 4, method=AtMan(batch_size=size)).relevance for size in (1, 32))
    near(together, alone, 1e-12)
