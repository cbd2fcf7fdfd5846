"""A batch gives what single runs give, whatever is in it and however it is padded."""

from __future__ import annotations

import io
import sys
import threading
import types
from contextlib import suppress
from functools import partial, update_wrapper

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lrpx import LRP, Contrast, Explainer, LogProb, Margin
from lrpx._batching import BATCH_COST, TOKENS_PER_ROW, batches
from lrpx._tokens import Tokens
from lrpx.coverage import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import InputError, MethodError, ModelError, NonFiniteError
from lrpx.inputs import Row, Segment
from lrpx.methods import Backward, IntegratedGradients
from lrpx.methods._backward import value_times_gradient
from lrpx.tasks import Task
from lrpx.units import places
from tests import tiny
from tests.reference import models
from tests.work import calls

ROWS = [[3, 14, 15, 9, 26, 5, 7], [8, 9], [4, 11, 20], [6]]
CAUSAL = [models.tiny_llama, models.tiny_gpt2, tiny.opt, tiny.bloom, tiny.neox, tiny.mamba, tiny.codegen]
CLASSIFIERS = [tiny.bert_classifier, tiny.gpt2_classifier, tiny.llama_classifier]
SEQ2SEQ = [models.tiny_t5, tiny.bart, tiny.marian]
LEFT = [models.tiny_llama, models.tiny_gpt2, models.tiny_bert, tiny.opt, tiny.neox, tiny.roberta]


def assert_same(many, single, tolerance=1e-12):
    assert many.tokens == single.tokens
    assert many.ids == single.ids
    assert many.segments == single.segments
    assert many.explained.description == single.explained.description
    assert many.explained.position == single.explained.position
    assert many.prediction.id == single.prediction.id
    assert abs(many.explained.value - single.explained.value) <= tolerance
    torch.testing.assert_close(many.relevance, single.relevance, rtol=0, atol=tolerance)


@pytest.mark.parametrize("build", CAUSAL)
@pytest.mark.parametrize("method", ["attnlrp", "lrp", "gradient-l2-squared"])
def test_causal_models(build, method):
    explain = Explainer(build())
    for many, row in zip(explain(ROWS, method=method), ROWS, strict=True):
        assert_same(many, explain(row, method=method))


@pytest.mark.parametrize("build", [*CLASSIFIERS, tiny.xlnet_classifier])
def test_classifiers(build):
    explain = Explainer(build())
    for many, row in zip(explain(ROWS, target=2, contrast=0), ROWS, strict=True):
        assert_same(many, explain(row, target=2, contrast=0))


def test_a_decoders_classifier_without_a_padding_token_runs_row_by_row():
    explain = Explainer(tiny.gpt2_classifier(pad_token_id=None))
    for many, row in zip(explain(ROWS), ROWS, strict=True):
        assert_same(many, explain(row))


@pytest.mark.parametrize("build", [models.tiny_bert, tiny.roberta])
def test_masked_models_at_one_position_a_row(build):
    explain = Explainer(build())
    positions = [2, 0, -1, 0]
    for many, row, position in zip(explain(ROWS, position=positions), ROWS, positions, strict=True):
        assert_same(many, explain(row, position=position))


def test_masked_models_at_their_masks(piece_tokenizer):
    explain = Explainer(models.tiny_bert(vocab_size=len(piece_tokenizer)), piece_tokenizer)
    texts = ["the keys to the cabinet [MASK] on the table", "[MASK] boys", "the [MASK] is small"]
    for many, text in zip(explain(texts, "are"), texts, strict=True):
        assert_same(many, explain(text, "are"))


@pytest.mark.parametrize("build", SEQ2SEQ)
@pytest.mark.parametrize("decoder", [None, [2, 8, 6], [[2, 8, 6], [2], [2, 5, 5, 5, 5, 5, 5, 5, 9], [2, 4]]])
def test_encoder_decoder_models(build, decoder):
    explain = Explainer(build())
    each = decoder if decoder and isinstance(decoder[0], list) else [decoder] * len(ROWS)
    for many, row, written in zip(explain(ROWS, decoder=decoder), ROWS, each, strict=True):
        assert_same(many, explain(row, decoder=written))


def test_decoders_may_be_none_in_some_rows_and_a_tensor_in_all():
    explain = Explainer(models.tiny_t5())
    for many, row, written in zip(explain(ROWS[:2], decoder=[None, [0, 4]]), ROWS, [None, [0, 4]], strict=False):
        assert_same(many, explain(row, decoder=written))
    decoders = torch.tensor([[0, 5], [0, 4]])
    for many, row, written in zip(explain(ROWS[:2], decoder=decoders), ROWS, decoders, strict=False):
        assert_same(many, explain(row, decoder=written))


def test_a_model_that_transposes_its_ids_gets_its_own_relevance_back():
    explain = Explainer(tiny.xlnet())
    alone = explain(ROWS[0])
    assert alone.relevance.shape == (7,)
    assert (alone.relevance != 0).all()
    for many, row in zip(explain(ROWS), ROWS, strict=True):
        assert_same(many, explain(row))


def test_a_model_that_pads_its_ids_further_gets_its_own_relevance_back():
    explain = Explainer(tiny.longformer())
    three = explain([3, 14, 15], position=0)
    assert three.relevance.shape == (3,)
    assert (three.relevance != 0).all()


@pytest.mark.parametrize("length", [3, 6, 7, 8])
def test_a_model_that_pads_its_embeddings_further_gets_its_own_relevance_back(length):
    model = tiny.led()
    given = torch.arange(3, 3 + length)[None]
    decoder = torch.tensor([[2, 9, 4]])
    looked_up = []

    def keep(_, __, embeddings):
        looked_up.append(embeddings.detach().requires_grad_())
        return looked_up[-1]

    tables = [model.led.encoder.embed_tokens, model.led.decoder.embed_tokens]
    handles = [table.register_forward_hook(keep) for table in dict.fromkeys(tables)]
    logit = model(input_ids=given, decoder_input_ids=decoder).logits[0, -1, 7]
    for handle in handles:
        handle.remove()
    grads = torch.autograd.grad(logit, looked_up)
    encoder, *padding, last = [(x * grad).sum(-1)[0] for x, grad in zip(looked_up, grads, strict=True)]
    assert len(padding) == (length != 8)
    assert all((each == 0).all() for each in padding)

    explain = Explainer(model)
    found = explain(given[0].tolist(), 7, decoder=decoder[0].tolist(), method="gradient-x-input")
    torch.testing.assert_close(found.relevance.clone(), torch.cat([encoder, last]).detach())
    alone = explain(given[0].tolist(), 7, decoder=decoder[0].tolist())
    assert_same(explain([given[0].tolist(), given[0].flip(0).tolist()], 7, decoder=[decoder[0].tolist()] * 2)[0], alone)


# ---------------------------------------------------------------------------- padding


@pytest.mark.parametrize("build", LEFT)
def test_padding_on_the_left(build):
    model = build()
    left, right = Explainer(model, padding_side="left"), Explainer(model)
    for many, row in zip(left(ROWS, position=-1), ROWS, strict=True):
        assert_same(many, right(row, position=-1))


class BeginsAnew(torch.nn.Module):
    """Counts its places anew behind each 26, unless it is told them."""

    def __init__(self):
        super().__init__()
        self.table, self.places = torch.nn.Embedding(31, 16), torch.nn.Embedding(40, 16)
        self.keys, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 31)

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
            at = (input_ids == 26) * position_ids
            position_ids = position_ids - torch.nn.functional.pad(at, (1, -1)).cummax(1).values
        x = self.table(input_ids) + self.places(position_ids)
        seen = attention_mask[:, None].bool() & torch.ones(x.shape[1], x.shape[1]).tril().bool()
        scores = (x @ self.keys(x).mT).masked_fill(~seen, -1e9)
        return self.head(x + scores.softmax(-1) @ x)


@pytest.mark.filterwarnings("ignore:places looks up other numbers")  # which are made of the ids
@pytest.mark.parametrize("build", [lambda: BeginsAnew().double().eval(), tiny.roberta])
def test_places_that_are_not_one_after_another_are_not_told_behind_padding_on_the_left(build):
    """RoBERTa counts no padding in a text."""
    torch.manual_seed(0)
    explain = Explainer(build(), task=Task.CAUSAL if build is not tiny.roberta else None, padding_side="left")
    rows = [[3, 1, 15, 9, 26, 5, 7], [3, 14, 15, 9, 8, 5, 7, 4, 4, 11, 20]]
    for many, row in zip(explain(rows, 7, position=-2), rows, strict=True):
        assert_same(many, explain(row, 7, position=-2))


@pytest.mark.parametrize("build", [tiny.bloom, tiny.mamba, models.tiny_t5, tiny.bart])
def test_padding_on_the_left_is_refused_without_position_ids(build):
    explain = Explainer(build(), padding_side="left")
    with pytest.raises(InputError, match=r'takes no position_ids.*use padding_side="right"'):
        explain(ROWS)
    assert len(explain([ROWS[0], ROWS[0]])) == 2, "rows of one length need no padding"


@pytest.mark.parametrize("length", [4, 5, 7])
def test_a_model_that_pools_tokens_runs_row_by_row(length):
    """Funnel hides two tokens that it pools where one of them is padding, as behind a text of an odd length."""
    config = tf.FunnelConfig(
        vocab_size=31, d_model=16, n_head=4, d_head=4, d_inner=24, block_sizes=[1, 1], separate_cls=False
    )
    explain = Explainer(tiny.build(tf.FunnelForMaskedLM, config, "eager"))
    rows = [list(range(3, 3 + length)), list(range(5, 14))]
    for many, row in zip(explain(rows, position=1), rows, strict=True):
        assert_same(many, explain(row, position=1))


@pytest.mark.filterwarnings("ignore:.*looks up other numbers:UserWarning")
@pytest.mark.parametrize(("kind", "method"), [("BltForCausalLM", "attnlrp"), ("ReformerModelWithLMHead", "random")])
def test_a_model_that_padding_on_the_left_changes_runs_row_by_row(kind, method):
    """BLT makes patches of bytes, and of padding; Reformer takes no positions where it pads by itself."""
    model = tiny_model(next(each for each in choose() if each.name == kind)).double()
    left, right = Explainer(model, padding_side="left"), Explainer(model)
    rows = [ROWS[0], [31, 19], [13, 27, 40, 22]]
    how = {"method": method, "target": 1}
    for many, row in zip(left(rows, **how), rows, strict=True):
        assert_same(many, right(row, **how))


class Own(torch.nn.Module):
    """A model that takes no mask, and whose tokens see those before them or all."""

    def __init__(self, looks_back):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)
        self.looks_back = looks_back

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return self.head(x + (x.cumsum(1) if self.looks_back else x.mean(1, keepdim=True)))


@pytest.mark.parametrize("looks_back", [True, False])
def test_a_model_without_a_mask_is_padded_where_it_looks_back_alone(looks_back):
    explain = Explainer(Own(looks_back).double().eval(), task=Task.CAUSAL)
    assert explain.bound.can_batch == looks_back
    for many, ids in zip(explain(ROWS), ROWS, strict=True):
        assert_same(many, explain(ids))


@pytest.mark.parametrize("build", CLASSIFIERS)
def test_padding_on_the_left_is_refused_for_classifiers(build):
    with pytest.raises(InputError, match=r'read its first token.*use padding_side="right"'):
        Explainer(build(), padding_side="left")(ROWS)


def test_padding_on_the_left_is_refused_where_it_would_move_blocks():
    """A state that each block hands on by a constant shares by itself, so a text's relevance hangs on its blocks."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    kinds = ["linear_attention", "full_attention"]
    config = tf.MiniMaxConfig(vocab_size=64, num_hidden_layers=2, layer_types=kinds, block_size=4, **sizes)
    model = tf.MiniMaxForCausalLM(config).eval()
    with pytest.raises(InputError, match=r'attends in blocks from the first place.*use padding_side="right"'):
        Explainer(model, padding_side="left")(ROWS)
    for many, ids in zip(Explainer(model)(ROWS), ROWS, strict=True):
        assert_same(many, Explainer(model)(ids), 1e-6)


def test_padding_on_the_left_is_refused_where_it_would_move_chunks_of_a_delta_rule():
    """What a text's relevance is hangs on whether a state comes from a chunk before, be there nothing but padding."""
    kinds = ["linear_attention", "full_attention"]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 8}
    config = tf.OlmoHybridConfig(
        vocab_size=64, num_hidden_layers=2, layer_types=kinds, pad_token_id=0, eos_token_id=1, **sizes, **heads
    )
    model = tf.OlmoHybridForCausalLM(config).eval()
    left, rows = Explainer(model, padding_side="left"), [ROWS[0], [2 + i % 60 for i in range(70)]]
    with pytest.raises(InputError, match=r'attends in blocks from the first place.*use padding_side="right"'):
        left(rows)
    for many, ids in zip([*Explainer(model)(rows), *left(ROWS)], [*rows, *ROWS], strict=True):
        assert_same(many, Explainer(model)(ids), 1e-5)
    for many in left([rows[1], rows[1][::-1]]):  # as long, so that nothing is padded
        assert_same(many, Explainer(model)(many.ids), 1e-5)


def longrope():
    angles = {"short_factor": [1.0, 1.2], "long_factor": [2.0, 5.0], "original_max_position_embeddings": 5}
    return models.tiny_llama(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0} | angles)


@pytest.mark.parametrize("side", ["left", "right"])
def test_angles_that_hang_on_the_longest_row_of_a_batch_are_each_rows_own(side):
    """Rows of up to five tokens have the short factors, and longer ones the long ones, as alone."""
    explain = Explainer(longrope(), padding_side=side)
    rows = [*ROWS, [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10]]
    for method in ("attnlrp", "leave-one-out"):
        for many, row in zip(explain(rows, method=method), rows, strict=True):
            assert_same(many, explain(row, method=method))
            with torch.no_grad():
                logits = explain.model(torch.tensor([row])).logits[0, -1]
            assert many.explained.value == pytest.approx(logits.max().item(), abs=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_get_no_relevance(side):
    """The sum over all of a padded batch is the sum over its rows: nothing was cut off with the pads."""
    explain = Explainer(models.tiny_gpt2(), padding_side=side)
    scores = []

    def keep(value, gradient):
        scores.append(value_times_gradient(value, gradient))
        return scores[-1]

    found = explain(ROWS, method=Backward("spy", LRP, keep))
    (kept,) = scores
    assert kept.shape == (4, 7)
    assert int((kept != 0).sum()) <= sum(map(len, ROWS))
    torch.testing.assert_close(
        kept.abs().sum(), torch.stack([a.relevance.abs().sum() for a in found]).sum(), rtol=1e-12, atol=0
    )


# ------------------------------------------------------------- one of a thing for each row


def test_lists_of_targets_contrasts_and_positions():
    explain = Explainer(models.tiny_llama())
    targets, contrasts, positions = [7, None, LogProb(3), Margin()], [2, 0, None, None], [3, 1, 0, -1]
    many = explain(ROWS, targets, contrasts, position=positions, batch_size=3)
    for found, *one in zip(many, ROWS, targets, contrasts, positions, strict=True):
        row, target, contrast, position = one
        assert_same(found, explain(row, target, contrast, position=position))


def test_targets_of_different_precision_share_a_batch():
    explain = Explainer(models.tiny_llama().to(torch.bfloat16))
    found = explain(ROWS, [7, LogProb(3), Contrast(4, 5), Margin()])
    assert [len(a) for a in found] == [7, 2, 3, 1]


def test_texts_chats_and_ids_can_share_a_batch(byte_tokenizer):
    explain = Explainer(models.tiny_gpt2(vocab_size=len(byte_tokenizer)), byte_tokenizer)
    mixed = ["The keys", [5, 6, 7], [{"role": "user", "content": "Where?"}], torch.tensor([8, 9])]
    for many, one in zip(explain(mixed), mixed, strict=True):
        assert_same(many, explain(one))


def test_a_list_of_one_gives_a_list_of_one():
    explain = Explainer(models.tiny_llama())
    (only,) = explain([ROWS[0]])
    assert_same(only, explain(ROWS[0]))


def test_tensor_of_several_rows_is_a_batch():
    explain = Explainer(models.tiny_llama())
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    for many, row in zip(explain(ids, position=torch.tensor([2, 0])), [(ids[0], 2), (ids[1], 0)], strict=True):
        assert_same(many, explain(row[0], position=row[1]))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), rows=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=6))
def test_any_batch_equals_single_runs_in_any_order_and_size(data, rows):
    explain = Explainer(MODEL, padding_side=data.draw(st.sampled_from(["left", "right"])))
    order = data.draw(st.permutations(range(len(rows))))
    size = data.draw(st.integers(1, 4))
    found = explain([rows[i] for i in order], batch_size=size)
    for many, i in zip(found, order, strict=True):
        assert_same(many, explain(rows[i]))


MODEL = models.tiny_llama()


def test_real_float32_batches_equal_single_runs_to_rounding(shared_data):
    model = LlamaForCausalLM.from_pretrained(shared_data / "models" / "stories260K" / "hf", dtype=torch.float32).eval()
    explain = Explainer(model)
    rows = [[1, 403, 407, 261, 378, 432, 300], [1, 317, 262], [1, 291, 454, 290, 450]]
    for many, row in zip(explain(rows), rows, strict=True):
        single = explain(row)
        limit = 1e-5 * float(single.relevance.abs().max())
        torch.testing.assert_close(many.relevance, single.relevance, rtol=0, atol=limit)


# --------------------------------------------------------------------- planning the batches


def row(length, decoder=0):
    def tokens(count):
        return Tokens(tuple(range(count)), ("a",) * count, (False,) * count, (), ())

    return Row((Segment("encoder", tokens(length)), *([Segment("decoder", tokens(decoder))] if decoder else [])))


def padded(rows, group):
    """How many tokens a batch has, padding included."""
    return len(group) * sum(max(sizes) for sizes in zip(*(rows[i].lengths for i in group), strict=True))


LENGTHS = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 40)), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_every_row_is_in_one_batch_of_bounded_size(lengths, size):
    rows = [row(*each) for each in lengths]
    found = batches(rows, size)
    assert sorted(i for group in found for i in group) == list(range(len(rows)))
    for group in found:
        assert 1 <= len(group) <= size
        assert len(group) == 1 or padded(rows, group) <= TOKENS_PER_ROW * size
    longest = [rows[group[0]].lengths for group in found]
    assert longest == sorted(longest, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), st.integers(1, 5))
def test_no_other_cut_of_the_sorted_rows_is_cheaper(lengths, size):
    rows = [row(length) for length in lengths]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])

    def cost(groups):
        return sum(padded(rows, group) + BATCH_COST for group in groups)

    def cuts(left):
        if not left:
            yield []
        for count in range(1, min(size, len(left)) + 1):
            if count == 1 or padded(rows, left[:count]) <= TOKENS_PER_ROW * size:
                yield from ([left[:count], *rest] for rest in cuts(left[count:]))

    assert cost(batches(rows, size)) == min(map(cost, cuts(order)))


def test_a_long_text_is_not_padded_to_by_short_ones():
    rows = [row(10) for _ in range(15)] + [row(500)]
    assert sorted(map(len, batches(rows, 32))) == [1, 15]


def test_twice_as_many_rows_are_twice_the_work_to_plan():
    rows = [row(1 + i * i % 60) for i in range(4000)]
    assert calls(batches, rows, 32) < 2.2 * calls(batches, rows[:2000], 32)
    assert sum(map(len, batches(rows, 32))) == 4000


def test_a_batch_is_never_larger_than_its_bound():
    explain = Explainer(models.tiny_llama())
    assert explain.bound.can_batch  # which is tried once, and runs the model
    shapes = []
    handle = explain.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    lengths = [60, 3, 41, 7, 7, 58, 22, 1, 30, 2, 2, 2]
    many = explain([[1 + i % 30 for i in range(length)] for length in lengths], batch_size=2)
    handle.remove()
    assert [len(a) for a in many] == lengths
    assert all(count <= 2 and (count == 1 or count * length <= 2 * TOKENS_PER_ROW) for count, length in shapes)
    assert sum(count for count, _ in shapes) == len(lengths)


# ------------------------------------------------------------------ progress and interruption


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("progress", "terminal", "batch_size", "shown"),
    [
        (None, True, 1, True),
        (None, True, 32, False),
        (None, False, 1, False),
        (True, False, 32, True),
        (False, True, 1, False),
    ],
)
def test_progress_is_shown_for_long_runs_on_a_terminal(monkeypatch, progress, terminal, batch_size, shown):
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    explain = Explainer(MODEL)
    many = explain([[3, 4]] * 6, batch_size=batch_size, progress=progress)
    assert many == [many[0]] * 6
    assert ("6/6" in stderr.getvalue()) == shown
    assert shown or stderr.getvalue() == ""


def test_one_input_needs_no_progress(capsys):
    Explainer(MODEL)([3, 4], progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("progress", [True, False])
def test_an_interruption_leaves_everything_as_it_was(monkeypatch, progress):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    model = models.tiny_llama()
    explain = Explainer(model)
    expected = explain(ROWS[0])
    calls = []

    def interrupt(*_):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        explain(ROWS, batch_size=1, progress=progress)
    handle.remove()
    assert len(calls) == 3
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert explain(ROWS[0]) == expected
    assert stderr.getvalue().count("\x1b[?25l") == stderr.getvalue().count("\x1b[?25h"), "the cursor is back"
    assert ("2/4" in stderr.getvalue()) == progress


# ------------------------------------------------------------------ only the needed rows


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, models.tiny_bert, models.tiny_t5, tiny.bart])
def test_only_the_needed_rows_go_through_the_head(build):
    model = build()
    seen = []
    head = model.get_output_embeddings()
    run = head.forward
    head.forward = lambda rows: seen.append(tuple(rows.shape[:-1])) or run(rows)  # a user's hook is given all rows
    explain = Explainer(model)
    extra = {"decoder": [2, 8, 6]} if explain.task.name == "SEQ2SEQ" else {"position": -1}
    explain(ROWS, **extra)  # whether rows may run together, and the head be given a few, is tried once
    seen.clear()
    explain(ROWS, **extra)
    assert seen == [(4, 1)]
    model(torch.tensor([[3, 4, 5]]), **({"decoder_input_ids": torch.tensor([[0, 1]])} if "decoder" in extra else {}))
    assert seen[1][1] > 1, "and afterwards every row again"


def test_two_threads_explain_one_model_at_once():
    model = models.tiny_llama()
    explain = Explainer(model)
    jobs = [(ROWS[0], position, method) for position in (1, 3, 6) for method in ("attnlrp", "lrp")]
    expected = [explain(row, position=at, method=method) for row, at, method in jobs]
    stock = model(torch.tensor([ROWS[0]])).logits
    wrong, stop = [], threading.Event()

    def plain():
        while not stop.is_set():
            if not torch.equal(model(torch.tensor([ROWS[0]])).logits, stock):
                wrong.append("the stock model's logits")

    def work(which):
        for _ in range(10):
            for i in which:
                row, at, method = jobs[i]
                try:
                    if explain(row, position=at, method=method) != expected[i]:
                        wrong.append(jobs[i])
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(order,)) for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])]
    beside = threading.Thread(target=plain)
    for thread in [*threads, beside]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    beside.join()
    assert not wrong


# --------------------------------------------------------------- models that read what the mask hides


def convbert(model_class=tf.ConvBertForMaskedLM, **settings):
    return tiny.build(
        model_class, tf.ConvBertConfig(**tiny.SIZES, embedding_size=16, conv_kernel_size=3, **settings), "eager"
    )


def nystromformer():
    sizes = tiny.SIZES | {"num_landmarks": 64, "segment_means_seq_len": 64, "conv_kernel_size": 3}
    return tiny.build(tf.NystromformerForMaskedLM, tf.NystromformerConfig(**sizes), "eager")


def yoso():
    return tiny.build(tf.YosoForMaskedLM, tf.YosoConfig(**tiny.SIZES), "eager")


def mobilebert():
    """Its embeddings read the token behind each."""
    sizes = {"embedding_size": 8, "intra_bottleneck_size": 16, "num_feedforward_networks": 1}
    model = tiny.build(tf.MobileBertForMaskedLM, tf.MobileBertConfig(**tiny.SIZES, **sizes), "sdpa")
    table = model.get_input_embeddings()
    table.weight.data[table.padding_idx] = table.weight.data[5]  # as where it was trained
    return model


@pytest.mark.parametrize("build", [convbert, nystromformer, yoso, mobilebert])
def test_a_model_that_reads_padding_runs_row_by_row(build):
    explain = Explainer(build())
    assert not explain.bound.can_batch
    how = {"position": 0, "method": "gradient-x-input"}
    for many, ids in zip(explain(ROWS, **how), ROWS, strict=True):
        assert_same(many, explain(ids, **how))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_that_reads_its_own_padding_runs_row_by_row(side):
    """ProphetNet's: what it says of a text hangs on how much padding is behind it."""
    explain = Explainer(tiny_model(choose(["prophetnet"], "seq2seq-lm")[0]), padding_side=side)
    rows, decoders = [[11, 12, 13, 2], [14, 15, 16, 2]], [[0], [0, 21, 22, 23]]
    for many, ids, decoder in zip(explain(rows, decoder=decoders), rows, decoders, strict=True):
        assert_same(many, explain(ids, decoder=decoder))


class Mean(torch.nn.Module):
    def forward(self, hidden):
        return hidden + hidden.mean(1, keepdim=True)


def by_sdpa(module, *given, **options):
    """What transformers' users write to look at their attention: no mask is made for a name of theirs."""
    return sdpa_attention_forward(module, *given, **options)


def by_length(module, query, key, *given, scaling, **options):
    return sdpa_attention_forward(module, query, key, *given, scaling=scaling * key.shape[-2] ** 0.5, **options)


def attending(model, function):
    tf.AttentionInterface.register(function.__name__, function)
    model.set_attn_implementation(function.__name__)
    return model


def with_own_mlp():
    model = models.tiny_llama()
    model.model.layers[0].mlp = Mean()
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: attending(models.tiny_llama(), by_length),
        lambda: attending(tiny.bart(decoder_start_token_id=2), by_sdpa),
        with_own_mlp,
    ],
)
def test_what_a_user_puts_into_a_model_of_transformers_may_read_padding(build):
    model = build()
    explain, how = Explainer(model), {"method": "gradient-x-input", "target": 4}
    assert not explain.bound.can_batch
    for many, ids in zip(explain(ROWS, **how), ROWS, strict=True):
        given = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            truth = model(torch.tensor([ids]), **given).logits[0, -1, 4]
        assert abs(many.explained.value - truth.item()) <= 1e-12
        assert_same(many, explain(ids, **how))


def test_and_is_seen_where_it_is_put_there_later():
    model = tiny.bart(decoder_start_token_id=2)
    explain = Explainer(model)
    explain(ROWS)
    assert explain.bound.can_batch
    attending(model, by_sdpa)
    given = {"decoder_input_ids": torch.tensor([[2]])}
    with torch.no_grad():
        truth = [model(torch.tensor([ids]), **given).logits[0, -1, 4].item() for ids in ROWS]
    assert [a.explained.value for a in explain(ROWS, 4)] == pytest.approx(truth, abs=1e-12)
    model.set_attn_implementation("sdpa")
    assert explain.bound.can_batch


def test_a_hook_at_the_head_is_given_all_rows():
    model = models.tiny_llama()
    model.lm_head.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))
    with torch.no_grad():
        truth = model(torch.tensor([ROWS[0]])).logits[0, -1, 4].item()
    assert Explainer(model)(ROWS[0], 4).explained.value == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize(("build", "path"), [(models.tiny_llama, ""), (models.tiny_bert, "cls.predictions")])
@pytest.mark.parametrize("way", ["a hook", "a forward", "a forward that says it is theirs"])
def test_what_is_put_around_the_head_is_given_all_rows(build, path, way):
    """Its mean of all logits was that of the rows at the asked positions alone."""
    model = build()
    place = model.get_submodule(path)
    run = place.forward

    def mixed(output):
        logits = output if isinstance(output, torch.Tensor) else output.logits
        logits += logits.mean(1, keepdim=True)
        return output

    def forward(*args, **kwargs):
        return mixed(run(*args, **kwargs))

    if way == "a hook":
        place.register_forward_hook(lambda module, args, output: mixed(output))
    else:
        place.forward = forward if way == "a forward" else update_wrapper(forward, run)
    embedded = model.get_input_embeddings()(torch.tensor([ROWS[0]])).detach().requires_grad_()
    truth = model(inputs_embeds=embedded).logits[0, 2, 4]
    (gradient,) = torch.autograd.grad(truth, embedded)
    found = Explainer(model)(ROWS[0], 4, position=2, method="gradient-x-input")
    assert found.explained.value == pytest.approx(truth.item(), abs=1e-12)
    expected = (gradient * embedded).sum(-1)[0].detach()
    torch.testing.assert_close(found.relevance, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "build", [models.tiny_llama, lambda: tiny.bart(decoder_start_token_id=2), tiny.bert_classifier]
)
@pytest.mark.parametrize(
    "mix", [lambda x: x + x.mean(1, keepdim=True), lambda x: x - x[:, -1:], lambda x: x - 0.5 * x.mean(0, keepdim=True)]
)
def test_hooks_that_mix_tokens_or_rows_are_given_one_text_at_a_time(build, mix):
    model = build()
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    explain, how = Explainer(model), {"method": "gradient-x-input", "target": 1}
    explain(ROWS, **how)  # what was tried before holds no longer

    def hook(_, __, output):
        return mix(output) if isinstance(output, torch.Tensor) else (mix(output[0]), *output[1:])

    layers[0].register_forward_hook(hook)
    for many, ids in zip(explain(ROWS, **how), ROWS, strict=True):
        given = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            logits = model(torch.tensor([ids]), **given).logits[0]
        assert abs(many.explained.value - (logits if logits.ndim == 1 else logits[-1])[1].item()) <= 1e-12
        assert_same(many, explain(ids, **how))


def test_what_was_tried_before_a_hook_mixed_tokens_is_tried_again():
    model = models.tiny_llama()
    explain = Explainer(model)
    explain(ROWS[0], 4, method="leave-one-out")
    handle = model.model.layers[0].register_forward_hook(lambda _, __, output: output + output.mean(1, keepdim=True))
    with pytest.raises(ModelError, match="other tokens see what its attention_mask hides"):
        explain(ROWS[0], 4, method="leave-one-out")
    handle.remove()
    assert_same(explain(ROWS[0], 4, method="leave-one-out"), Explainer(model)(ROWS[0], 4, method="leave-one-out"))


class Unheeding(torch.nn.Module):
    """Each token reads all, what the mask hides, too, if it does not ``heed``; but the attention writes nothing yet."""

    def __init__(self):
        super().__init__()
        self.words, self.head, self.heed = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31), False
        self.out, self.calls = torch.nn.Linear(8, 8, bias=False), 0
        self.blind, self.settings = 0, types.SimpleNamespace(of_attention={"blind": 0})
        torch.nn.init.zeros_(self.out.weight)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        x = self.words(input_ids)
        blind = self.blind or self.settings.of_attention["blind"]
        heeds = self.heed or blind == 1 or getattr(getattr(self, "config", None), "heed", False)
        mask = attention_mask[:, None].bool() if heeds and attention_mask is not None else None
        return self.head(x + self.out(torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)))


def test_what_was_tried_before_a_model_was_trained_is_tried_again():
    """Where the attention writes nothing, padding makes no difference, nor does a mask that is not looked at."""
    model = Unheeding().double().eval()
    explain, how = Explainer(model, task=Task.MASKED), {"position": 0, "target": 3}
    explain(ROWS, **how)
    model(torch.tensor([ROWS[0]]))[0, 0, 3].backward()
    with torch.no_grad():
        model.out.weight -= model.out.weight.grad
    for many, ids in zip(explain(ROWS, **how), ROWS, strict=True):
        assert many.explained.value == pytest.approx(model(torch.tensor([ids]))[0, 0, 3].item(), abs=1e-12)
    with pytest.raises(ModelError, match="does not look at it"):
        explain(ROWS[0], method="leave-one-out", **how)
    model.heed = True
    assert explain(ROWS[0], method="leave-one-out", **how).relevance.isfinite().all()


@pytest.mark.parametrize("method", ["lrp", "leave-one-out"])
def test_hidden_states_are_as_many_as_before(method):
    """The hooks by which transformers keeps them stayed after a trial, and were not known to be there: each explanation
    put on more of them, for good."""
    model = models.tiny_llama()
    model.config.output_hidden_states = True
    before = [each.clone() for each in model(torch.tensor([ROWS[0]])).hidden_states]
    other = models.tiny_llama()
    other.config.output_hidden_states = True
    explain = Explainer(other)
    for _ in range(2):
        explain(ROWS, 4, method=method)
        places(other, "neurons")
        after = other(torch.tensor([ROWS[0]])).hidden_states
        assert len(after) == len(before)
        assert all(map(torch.equal, after, before))


def test_a_model_that_reads_hidden_states_of_its_own_is_explained_again():
    """LLaVA takes a layer of its images by its number."""
    model = tiny.llava().eval()
    vision = model.config.vision_config
    image = [model.config.image_token_id] * (vision.image_size // vision.patch_size) ** 2
    given = {"input_ids": torch.tensor([[1, *image, 2, 3]])}
    given["pixel_values"] = torch.randn(1, 3, vision.image_size, vision.image_size, dtype=model.dtype)
    said = tiny.llava().eval()
    said.load_state_dict(model.state_dict())
    places(model, "neurons", given)
    for _ in range(2):
        found = Explainer(model)(given, 3, method="leave-one-out")
        assert found.explained.value == pytest.approx(said(**given).logits[0, -1, 3].item(), abs=1e-9)
        assert torch.equal(model(**given).logits, said(**given).logits)


class OfIntegers(torch.nn.Module):
    """Weights that are in buffers, as whole numbers and a scale."""

    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(8, 8, dtype=torch.int8))
        self.register_buffer("scale", torch.full((8, 1), 0.02))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.whole.to(x.dtype) * self.scale)


HOW = ("in data", "other data", "by a move", "buffer", "config", "number", "tensor", "settings")


@pytest.mark.parametrize("how", HOW)
def test_what_was_tried_before_a_model_was_changed_without_a_version_is_tried_again(how):
    """What is written through ``.data``, as by averages of weights, or into buffers, has none."""
    model, whole = Unheeding().double().eval(), torch.randint(-99, 99, (8, 8), dtype=torch.int8)
    if how == "config":
        torch.nn.init.normal_(model.out.weight)
        model.config = types.SimpleNamespace(heed=True)
    if how in ("number", "tensor", "settings"):
        torch.nn.init.normal_(model.out.weight)
        model.settings.of_attention["blind"] = int(how == "settings")
        model.blind = {"number": 1, "tensor": torch.tensor(1)}.get(how, 0)
    if how == "buffer":
        model.out = OfIntegers().double()
    explain, asked = Explainer(model, task=Task.MASKED), {"position": 0, "target": 3}
    explain(ROWS, **asked)
    match how:
        case "in data":
            model.out.weight.data.lerp_(torch.randn(8, 8).double(), 0.5)
        case "other data":
            model.out.weight.data = torch.randn(8, 8).double()
        case "by a move":
            model.out.weight.data.normal_()
            model.float().double()
        case "buffer":
            model.out.load_state_dict({"whole": whole, "scale": model.out.scale})
        case "config":
            model.config.heed = False
        case "number":
            model.blind = 2
        case "tensor":
            model.blind.fill_(2)
        case "settings":
            model.settings.of_attention["blind"] = 2
    for many, ids in zip(explain(ROWS, **asked), ROWS, strict=True):
        assert many.explained.value == pytest.approx(model(torch.tensor([ids]))[0, 0, 3].item(), abs=1e-12)
    with pytest.raises(ModelError, match="does not look at it"):
        explain(ROWS[0], method="leave-one-out", **asked)


def test_what_was_tried_before_attention_looked_ahead_is_tried_again():
    """It does so only where no mask is needed: not in a padded batch."""
    model = models.tiny_llama()
    explain = Explainer(model)
    explain(ROWS, 4)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    for many, ids in zip(explain(ROWS, 4), ROWS, strict=True):
        assert_same(many, explain(ids, 4))


def of_all_modules(request, _):
    """A hook that torch gives every module there is."""
    model = models.tiny_llama()

    def hook(module, _, output):
        return mixing(output) if module is model.model.layers[0].mlp else None

    request.addfinalizer(torch.nn.modules.module.register_module_forward_hook(hook).remove)
    return model


def of_a_class(_, monkeypatch):
    model = models.tiny_llama()
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: mixing(forward(self, x)))
    return model


def of_a_file(_, monkeypatch):
    """A function that the model calls by its name, as those who make models faster put theirs there."""
    model = tiny.bart(decoder_start_token_id=2)
    monkeypatch.setattr(sys.modules[type(model).__module__], "create_bidirectional_mask", lambda *_, **__: None)
    return model


def of_ones_own(*_):
    model = models.tiny_llama()
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Mixing())
    return model


class Mixing(torch.nn.Module):
    """Takes off the mean over all rows."""

    def forward(self, x):
        return mixing(x)


def mixing(x):
    return x - 0.5 * x.mean(0, keepdim=True)


@pytest.mark.parametrize("change", [of_all_modules, of_a_class, of_a_file, of_ones_own])
def test_what_a_user_changes_in_classes_files_and_all_modules_is_tried_too(change, request, monkeypatch):
    """Rows that see each other do so at one length, too, where no padding tells."""
    model = change(request, monkeypatch)
    rows, how = [*ROWS, ROWS[0][::-1]], {"method": "gradient-x-input", "target": 1}
    explain = Explainer(model)
    for many, ids in zip(explain(rows, **how), rows, strict=True):
        given = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            truth = model(torch.tensor([ids]), **given).logits[0, -1, 1].item()
        assert abs(many.explained.value - truth) <= 1e-12
        assert_same(many, explain(ids, **how))


@pytest.mark.parametrize("of_all", [True, False], ids=["class", "instance"])
def test_a_method_beside_forward_that_mixes_rows(of_all, monkeypatch):
    """A layer's forward calls it, and is transformers' own."""
    model = models.tiny_bert()
    explain, layer = Explainer(model), model.bert.encoder.layer[0]
    explain(ROWS, 4, position=0)
    chunk = type(layer).feed_forward_chunk
    owner = type(layer) if of_all else layer
    put_in = (lambda self, x: mixing(chunk(self, x))) if of_all else (lambda x: mixing(chunk(layer, x)))
    monkeypatch.setattr(owner, "feed_forward_chunk", put_in)
    for many, ids in zip(explain([*ROWS, ROWS[0][::-1]], 4, position=0), [*ROWS, ROWS[0][::-1]], strict=True):
        assert_same(many, explain(ids, 4, position=0))


OF_TOKENS = {"tokens": lambda x: x - x.mean(1, keepdim=True), "rows": lambda x: x - 0.5 * x.mean(0, keepdim=True)}


def assert_each_as_alone(model, explain, method="gradient-x-input"):
    for many, ids in zip(explain(ROWS, 4, method=method), ROWS, strict=True):
        with torch.no_grad():
            assert abs(many.explained.value - model(torch.tensor([ids])).logits[0, -1, 4].item()) <= 1e-12
        assert_same(many, explain(ids, 4, method=method))


@pytest.mark.parametrize("mix", OF_TOKENS.values(), ids=OF_TOKENS)
def test_hooks_of_all_modules(mix):
    model = models.tiny_llama()
    kind = type(model.model.layers[0].mlp), type(model.lm_head)
    register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda module, _, output: mix(output) if type(module) in kind else None)
    try:
        assert_each_as_alone(model, Explainer(model))
    finally:
        handle.remove()


@pytest.mark.parametrize("path", ["model.layers.0.mlp", "lm_head"])
@pytest.mark.parametrize("mix", OF_TOKENS.values(), ids=OF_TOKENS)
@pytest.mark.parametrize(
    "put",
    [lambda own, _: own, update_wrapper, lambda own, theirs: update_wrapper(partial(own), theirs)],
    ids=["own", "wraps", "partial"],
)
def test_a_forward_of_ones_own_that_mixes_tokens_or_rows(mix, path, put):
    """Also one that says that it is from where the other was (``functools.wraps``)."""
    model = models.tiny_llama()
    explain, module = Explainer(model), model.get_submodule(path)
    explain(ROWS, 4)
    forward = module.forward
    module.forward = put(lambda x: mix(forward(x)), forward)
    assert_each_as_alone(model, explain)


@pytest.mark.parametrize("mix", OF_TOKENS.values(), ids=OF_TOKENS)
def test_a_head_of_ones_own_that_is_put_in_later(mix):
    class Head(torch.nn.Linear):
        def forward(self, x):
            return mix(super().forward(x))

    model = models.tiny_llama()
    explain = Explainer(model)
    explain(ROWS, 4)
    weight = model.lm_head.weight
    model.lm_head = Head(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    model.lm_head.weight = weight
    assert_each_as_alone(model, explain)


def test_a_classifier_that_does_not_look_at_the_token_beside_the_padding():
    """Attention that is all or nothing: what the first token says of the trial's text has nothing of its last token."""
    sizes = {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32, "use_bottleneck": False}
    wide = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_labels": 3}
    config = tf.MobileBertConfig(**tiny.SIZES | sizes | wide)
    model = tiny.build(tf.MobileBertForSequenceClassification, config, "sdpa").float()
    draws = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = 1.2 * torch.randn(weight.shape, generator=draws) / weight.shape[1] ** 0.5
    explain, rows = Explainer(model), [[5, 9, 33, 12, 40, 7, 21, 8, 30], [11, 25, 3, 44], [6, 50, 14, 22, 31, 19, 17]]
    assert not explain.bound.can_batch
    for many, ids in zip(explain(rows, 1), rows, strict=True):
        assert_same(many, explain(ids, 1))


def test_and_compares_texts_of_one_length_alone():
    explain = Explainer(convbert(tf.ConvBertModel), task=Task.EMBEDDINGS)
    assert explain(([5, 6, 7], [8, 9, 10])).explained.value
    with pytest.raises(ModelError, match=r"ConvBertModel would read the padding .* does not heed it; pass texts of eq"):
        explain(([5, 6, 7], [8, 9]))


def test_a_translator_whose_parts_do_not_tell_their_embeddings():
    sides = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")]
    sizes = dict(zip(sides, [2, 4, 24] * 2, strict=True)) | {"src_vocab_size": 31, "tgt_vocab_size": 29, "d_model": 16}
    config = tf.FSMTConfig(langs=["en", "de"], **sizes, max_position_embeddings=64)
    explain = Explainer(tiny.build(tf.FSMTForConditionalGeneration, config, "eager").float())
    decoders = [[2, 9, 4], [2, 8], [2, 7, 6, 5], [2]]
    for many, ids, decoder in zip(explain(ROWS, decoder=decoders), ROWS, decoders, strict=True):
        assert_same(many, explain(ids, decoder=decoder), 1e-5)
        assert bool(many.relevance[len(ids) :].any())


def bigbird():
    config = tf.BigBirdConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, block_size=4,
        num_random_blocks=1, max_position_embeddings=128, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.BigBirdForSequenceClassification(config).double().eval()


def test_no_trial_changes_what_a_model_attends_to():
    """BigBird takes full attention for good where a text is short."""
    model = bigbird()
    rows = [torch.randint(3, 60, (length,)).tolist() for length in (64, 57)]
    explain = Explainer(model)
    many = explain(rows, target=0)
    assert model.bert.attention_type == "block_sparse"
    for row, found in zip(rows, many, strict=True):
        torch.testing.assert_close(found.relevance, explain(row, target=0).relevance, rtol=0, atol=1e-12)
    assert model.bert.attention_type == "block_sparse"


@pytest.mark.parametrize("how", ["short", "beside", "asked", "hidden", "units"])
def test_nor_does_a_short_text(how):
    model = bigbird()
    inside, long, short = list(model.modules()), torch.randint(3, 60, (64,)).tolist(), [5, 6, 7]
    with torch.no_grad():
        value = model(input_ids=torch.tensor([long])).logits[0, 0]
    explain = Explainer(model)
    state = torch.get_rng_state()
    found = None
    if how == "short":
        explain(short, target=0)
    elif how == "beside":
        _, found = explain([short, long], target=0)
    elif how == "asked":
        explain(short)
    elif how == "hidden":
        explain(short, target=0, method="leave-one-out")
    else:
        explain.neurons(long, target=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(model.modules(), inside, strict=True))
    found = explain(long, target=0) if found is None else found
    torch.testing.assert_close(torch.tensor(found.explained.value), torch.tensor(float(value)), rtol=0, atol=1e-6)


def test_numbers_that_are_none_are_refused_in_a_list_of_texts_too():
    model = tiny.bert_classifier()
    model.classifier.weight.data[0, 0] = torch.nan
    for ids in (ROWS[0], ROWS):
        with pytest.raises(NonFiniteError, match=r"NaN or infinity in the logits, first in the output of classifier"):
            Explainer(model)(ids)


def test_infinite_logits_hide_no_padding_that_is_read():
    """A vocabulary that is masked leaves the other logits to be compared."""
    model = convbert()
    model.get_output_embeddings().bias.data[3] = -torch.inf
    assert not Explainer(model).bound.can_batch


def moe_of_a_capacity():
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_sparse_step": 1}
    experts = {"num_experts": 4, "expert_capacity": 6, "moe_eval_capacity_token_fraction": -1.0}
    torch.manual_seed(0)
    config = tf.NllbMoeConfig(vocab_size=64, init_std=0.2, **sizes, **heads, **experts)
    return tf.NllbMoeForConditionalGeneration(config).eval()


def test_experts_that_take_a_number_of_all_tokens_see_one_row_at_a_time():
    explain = Explainer(moe_of_a_capacity())
    rows = [list(range(10, 10 + length)) for length in (8, 9)]
    many = explain(rows, target=5, decoder=[2, 15, 17])
    for found, row in zip(many, rows, strict=True):
        assert_same(found, explain(row, target=5, decoder=[2, 15, 17]), 1e-6)


def test_copies_of_a_text_are_one_row_at_a_time_too():
    model, row = moe_of_a_capacity(), list(range(10, 18))
    explain = Explainer(model)
    asked = {"target": 5, "decoder": [2, 15, 17]}

    def value(hidden=None):
        mask = torch.tensor([[int(i != hidden) for i in range(len(row))]])
        given = {"attention_mask": mask, "decoder_input_ids": torch.tensor([asked["decoder"]])}
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([row]), **given).logits[0, -1, 5])

    found = explain(row, **asked, method="leave-one-out").relevance[: len(row)]
    assert found.tolist() == pytest.approx([value() - value(i) for i in range(len(row))], abs=1e-6)
    pytest.importorskip("captum")
    found, wanted = (
        explain(row, **asked, method=IntegratedGradients(steps=4, batch_size=most)).relevance for most in (4, 1)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_batch_norms_without_statistics_see_one_row_at_a_time():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.norm = torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(12, track_running_stats=False)

        def forward(self, pixel_values):
            return self.head(self.norm(pixel_values.flatten(2).mT.reshape(-1, 12)).view(-1, 4, 12).mean(1))

    torch.manual_seed(0)
    explain = Explainer(Normed().eval(), task=Task.IMAGE_CLASSIFICATION)
    images = [torch.randn(12, 2, 2) * scale for scale in (1, 3)]
    for found, image in zip(explain(images, target=1, method="gradient-x-input"), images, strict=True):
        assert_same(found, explain(image, target=1, method="gradient-x-input"), 1e-6)


class Capped(torch.nn.Module):
    """A layer with two experts, each of which takes a part of all tokens there are; what is left goes by."""

    def __init__(self):
        super().__init__()
        self.switch, self.capacity_factor = torch.nn.Linear(8, 2), 1.5
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        flat = x.reshape(-1, 8)
        chosen, out = self.switch(flat).argmax(-1), flat.clone()
        for i, expert in enumerate(self.experts):
            taken = (chosen == i).nonzero()[:, 0][: int(self.capacity_factor * len(flat) / 2)]
            out[taken] = expert(flat[taken])
        return out.view_as(x)


def test_experts_of_ones_own_that_take_a_part_of_all_tokens_run_row_by_row():
    model = Own(looks_back=True)
    model.head = torch.nn.Sequential(Capped(), model.head)
    with torch.no_grad():  # the first expert takes tokens below 8, alternately in what the model tries
        model.embedding.weight[:, 0] = torch.tensor([(-1.0) ** i for i in range(8)] + [1.0] * 23)
        model.head[0].switch.weight.zero_()[0, 0] = 9.0
        model.head[0].switch.bias.zero_()
    explain = Explainer(model.double().eval(), task=Task.CAUSAL)
    rows = [[9] * 8, [3, 5, 7, 1, 3, 5, 7, 1]]
    for many, ids in zip(explain(rows), rows, strict=True):
        assert_same(many, explain(ids))


class Filled(Own):
    """A layer with two experts, each of which takes so many tokens and no more, the first ones."""

    def __init__(self, most):
        super().__init__(looks_back=True)
        self.most, self.experts = most, torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        flat, chosen = x.flatten(0, 1), input_ids.flatten() % 2
        out = flat.clone()
        for i, expert in enumerate(self.experts):
            taken = (chosen == i).nonzero()[: self.most, 0]
            out[taken] = expert(flat[taken])
        return self.head(out.view_as(x).cumsum(1))


@pytest.mark.parametrize("most", [6, 9])
def test_experts_of_ones_own_that_are_full_when_the_last_rows_come_run_row_by_row(most):
    """A row beside others is what it is alone, if it is the first."""
    explain = Explainer(Filled(most).double().eval(), task=Task.CAUSAL)
    rows = [[3, 5, 7, 1, 3, 5], [9, 4, 8, 2, 6, 1], [2, 4, 6, 8, 9, 7]]
    for many, ids in zip(explain(rows), rows, strict=True):
        assert_same(many, explain(ids))


def test_so_they_do_where_more_tokens_run_together_than_ever_before():
    """No attribute tells how many an expert takes, and a short batch does not fill it."""
    explain = Explainer(Filled(25).double().eval(), task=Task.CAUSAL)
    explain([[3, 5, 7], [1, 2, 4]])
    rows = [[(3 * i + 7 * j) % 10 for i in range(10)] for j in range(8)]
    for many, ids in zip(explain(rows), rows, strict=True):
        assert_same(many, explain(ids))


class OfOneMask(Own):
    """The mean of the tokens so far that a mask shows: the first row's, whichever row it is."""

    def __init__(self):
        super().__init__(looks_back=True)

    def forward(self, input_ids, attention_mask):
        seen = attention_mask[:1, :, None].double()
        x = self.embedding(input_ids)
        return self.head(x + (x * seen).cumsum(1) / seen.cumsum(1).clamp(min=1))


def test_a_model_that_reads_one_row_of_its_mask_runs_row_by_row():
    explain = Explainer(OfOneMask().double().eval(), task=Task.CAUSAL)
    ids = [3, 5, 7, 1, 3, 5]
    found = explain(ids, method="leave-one-out").relevance
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    hidden = [mask.index_fill(1, torch.tensor([place]), 0) for place in range(len(ids))]
    with torch.no_grad():
        full, *left = (explain.model(torch.tensor([ids]), each)[0, -1] for each in (mask, *hidden))
    drops = torch.stack([full.max() - each[full.argmax()] for each in left])
    torch.testing.assert_close(found, drops.to(found.dtype))


class Choosing(Own):
    """Half of all tokens, those with the largest scores, have a layer of their own (mixture of depths)."""

    def __init__(self, seed):
        super().__init__(looks_back=True)
        torch.manual_seed(seed)
        self.score, self.layer = torch.nn.Linear(8, 1), torch.nn.Linear(8, 8)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        weights, chosen = self.score(x)[..., 0].topk(max(1, x.shape[1] // 2), 1)
        chosen = chosen[..., None].expand(-1, -1, 8)
        return self.head(x.scatter_add(1, chosen, weights.sigmoid()[..., None] * self.layer(x.gather(1, chosen))))


@pytest.mark.parametrize("seed", range(8))
def test_tokens_that_are_chosen_among_all_run_row_by_row(seed):
    explain = Explainer(Choosing(seed).double().eval(), task=Task.CAUSAL)
    for many, ids in zip(explain(ROWS), ROWS, strict=True):
        assert_same(many, explain(ids))


class Together(Own):
    """Heeds its mask, and takes off each feature's mean over the tokens of all rows."""

    def __init__(self):
        super().__init__(looks_back=True)

    def forward(self, input_ids, attention_mask):
        x, kept = self.embedding(input_ids), attention_mask[..., None].double()
        return self.head(x - (x * kept).sum((0, 1)) / kept.sum())


def test_a_model_of_ones_own_whose_rows_see_each_other_runs_row_by_row():
    model = Together().double().eval()
    explain, row = Explainer(model, task=Task.CAUSAL), ROWS[0]
    for many, ids in zip(explain(ROWS), ROWS, strict=True):
        assert_same(many, explain(ids))

    def value(hidden=None):
        mask = torch.tensor([[int(i != hidden) for i in range(len(row))]])
        return float(model(torch.tensor([row]), mask)[0, -1, 5].detach())

    found = explain(row, target=5, method="leave-one-out").relevance
    assert found[:-1].tolist() == pytest.approx([value() - value(i) for i in range(len(row) - 1)], abs=1e-9)


class Typed(Own):
    """Cannot run without its tokens' types, and averages over all places of its input, whatever the mask says."""

    def __init__(self, most=64, together=False):
        super().__init__(looks_back=False)
        self.positions, self.together = torch.nn.Embedding(most, 8), together
        self.config = types.SimpleNamespace(pad_token_id=0)

    def forward(self, input_ids, attention_mask, token_type_ids):
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        if self.together:
            kept = attention_mask[..., None].double()
            return {"last_hidden_state": x - (x * kept).sum((0, 1)) / kept.sum()}
        return self.head((x + token_type_ids[..., None]).mean(1))


class Untyped(Typed):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask, torch.zeros_like(input_ids))


def encoded(rows):
    wide = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (wide - len(row)) for row in rows])
    ids = torch.tensor([row + [0] * (wide - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


@pytest.mark.parametrize("build", [Typed, lambda: Untyped(most=12), lambda: Untyped(most=5)])
def test_a_model_of_ones_own_that_ignores_its_mask_runs_row_by_row(build):
    model = build().double().eval()
    rows = [[5, 6, 7, 8, 9], [4, 3], [11, 12, 13]]
    explain = Explainer(model, task=Task.CLASSIFICATION)
    asked = encoded(rows) if type(model) is Typed else rows
    for many, row in zip(explain(asked, 1), rows, strict=True):
        ids = torch.tensor([row])
        alone = model(*encoded([row]).values()) if type(model) is Typed else model(ids, torch.ones_like(ids))
        assert many.explained.value == pytest.approx(float(alone[0, 1].detach()), abs=1e-12)


def test_hidden_states_that_hang_on_other_rows_run_row_by_row():
    model = Untyped(together=True).double().eval()
    explain = Explainer(model, task=Task.EMBEDDINGS)
    assert explain.bound.rows_meet
    pairs = [([5, 6, 7], [8, 9]), ([1, 2, 3, 4], [3, 2])]
    for many, pair in zip(explain(pairs), pairs, strict=True):
        torch.testing.assert_close(many.relevance, explain(pair).relevance, rtol=0, atol=1e-12)


class Unmasked(Own):
    """An encoder and a decoder, which is told of no padding."""

    def __init__(self):
        super().__init__(looks_back=True)

    def get_encoder(self):
        return self

    get_decoder = get_encoder

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        kept = attention_mask[..., None].double()
        read = (self.embedding(input_ids) * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return self.head(read * self.embedding(decoder_input_ids).cumsum(1))


def test_a_decoder_of_ones_own_that_takes_no_mask_runs_row_by_row():
    model = Unmasked().double().eval()
    explain, texts, written = Explainer(model, task=Task.SEQ2SEQ), ROWS[:2], [[1], [2, 4, 9]]
    for many, ids, begun in zip(explain(texts, decoder=written), texts, written, strict=True):
        ids, begun = torch.tensor([ids]), torch.tensor([begun])
        best = model(ids, torch.ones_like(ids), begun)[0, -1].max()
        assert many.explained.value == pytest.approx(float(best.detach()), abs=1e-12)


def test_a_padding_token_that_is_taken_away_or_named_later():
    model = tiny.llama_classifier()
    explain = Explainer(model)
    found = explain(ROWS, 1)
    model.config.pad_token_id = None
    for one, other in zip(explain(ROWS, 1), found, strict=True):
        assert_same(one, other)
    model.config.pad_token_id = 0
    assert explain.bound.can_batch


def test_a_decoder_that_was_told_to_look_ahead():
    """It does so where there is no padding, and with padding transformers hides what is ahead."""
    torch.manual_seed(0)
    model = tiny.build(LlamaForCausalLM, tf.LlamaConfig(**tiny.SIZES | {"num_key_value_heads": 2}))
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    explain = Explainer(model)
    single = [explain(row, 1, position=0) for row in ROWS]
    assert any(a.relevance[1:].any() for a in single)
    for one, other in zip(explain(ROWS, 1, position=0), single, strict=True):
        assert_same(one, other)


class Stretched(torch.nn.Module):
    """A causal model whose angles hang on how many tokens there are, beyond 10 (dynamic NTK)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30)
        self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.run(input_ids)

    def run(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x, long = self.table(input_ids), input_ids.shape[1]
        base = 100.0 * max(long / 10, 1.0) ** 2
        angles = torch.outer(torch.arange(long), base ** (-torch.arange(4) / 4)).repeat(1, 2).to(x.dtype)

        def turned(x: torch.Tensor) -> torch.Tensor:
            return x * angles.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angles.sin()

        seen = torch.ones(long, long, dtype=torch.bool).tril()
        seen = seen if mask is None else seen & mask[:, None].bool()
        q, k = turned(self.q(x)), turned(self.k(x))
        return self.head(x + torch.nn.functional.scaled_dot_product_attention(q, k, self.v(x), attn_mask=seen))


class MaskedToo(Stretched):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(input_ids, attention_mask)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", [Stretched, MaskedToo])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_counts_padding_runs_row_by_row_where_it_does(kind: type[Stretched], compiled: bool) -> None:
    model = kind().double().eval()
    rows = [[*range(1, 15)], [3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11, 12]]
    alone = [Explainer(model, task=Task.CAUSAL)(row, 7) for row in rows]
    explain = Explainer(model, task=Task.CAUSAL, compile=compiled)
    for some in (rows[1:], rows, [*reversed(rows)]):
        for row, found in zip(some, explain(some, 7), strict=True):
            want = alone[rows.index(row)]
            assert found.explained.value == pytest.approx(model(torch.tensor([row]))[0, -1, 7].item(), rel=1e-9)
            assert torch.allclose(found.relevance, want.relevance, rtol=0, atol=1e-9)
    assert len(explain.bound.groups(explain.bound.reader.rows(rows), 8)) == 3


class Growing(Stretched):
    """One that keeps its angles, and makes them anew for a longer text than any before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.zeros(0, 8), persistent=False)
        self.longest, self.seen = 0, {"calls": 0}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if input_ids.shape[1] > self.longest:
            self.longest = input_ids.shape[1]
            self.angles = torch.linspace(0, 1 / self.longest, 256).reshape(32, 8)
        self.seen["calls"] += 1
        return super().forward(input_ids) + self.angles.sum()


def test_trials_leave_what_a_model_keeps() -> None:
    """Tables that grow with the longest text were those of a trial from then on."""
    model = Growing().eval()
    explain = Explainer(model, task=Task.CAUSAL)
    assert not explain.bound.can_batch
    assert not explain.bound._trials.pads_to(12)
    with suppress(MethodError):  # whose layers are in no list
        places(model, "queries", {"input_ids": torch.tensor([[*range(9)]])})
    assert (model.longest, model.seen, model.angles.numel()) == (0, {"calls": 0}, 0)
    text = [3, 4, 5, 6]
    (found, _) = explain([text, [7, 8, 9]], 7)
    assert found.explained.value == pytest.approx(Growing().eval()(torch.tensor([text]))[0, -1, 7].item(), rel=1e-5)
    assert model.longest == 4
