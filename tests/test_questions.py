"""Many questions of one row: one forward pass, and the numbers of questions that are asked alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx import LRP, Contrast, Explainer, Logit, LogProb, Margin, Task, Trace
from lrpx.errors import InputError, TargetError
from lrpx.methods import METHODS, Backward
from lrpx.model import BoundModel
from lrpx.questions import Question, Questions
from tests import tiny
from tests.reference import models
from tests.work import calls_of

IDS = [3, 14, 15, 9, 26, 5, 7]
ROWS = [IDS, [8, 9], [4, 11, 20]]


def same(found, expected, tolerance=1e-12):
    assert found.explained.description == expected.explained.description
    assert found.explained.position == expected.explained.position
    assert found.prediction.id == expected.prediction.id
    assert abs(found.explained.value - expected.explained.value) <= tolerance
    # of the largest: a rule whose relevance is thousands of times the value rounds as coarsely
    unit = max(1.0, float(expected.relevance.abs().max()))
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=0, atol=tolerance * unit)
    assert found.parts.keys() == expected.parts.keys()
    for name, part in found.parts.items():
        torch.testing.assert_close(part.values, expected.parts[name].values, rtol=0, atol=tolerance * unit)


@pytest.mark.filterwarnings("ignore:integrated-gradients has not converged")
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if Task.CAUSAL in method.tasks])
@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2, models.tiny_bert])
def test_every_position_of_a_text(build, method):
    if method == "lrp-voita" and build is models.tiny_llama:
        pytest.skip("its rule is refused where a model spells its norms out")
    explain = Explainer(build())
    together = explain(IDS, method=method, position=range(7))
    assert len(together) == 7
    for position, found in enumerate(together):
        same(found, explain(IDS, method=method, position=position))


@pytest.mark.parametrize("build", [models.tiny_t5, tiny.bart])
def test_positions_of_a_decoder(build):
    explain = Explainer(build())
    for position, found in enumerate(explain(IDS, position=[0, 1, 2], decoder=[0, 8, 9])):
        same(found, explain(IDS, position=position, decoder=[0, 8, 9]))


@pytest.mark.parametrize("build", [tiny.bert_classifier, tiny.llama_classifier])
def test_classes_of_a_text(build):
    explain = Explainer(build())
    for label, found in enumerate(explain(IDS, [0, 1, 2])):
        same(found, explain(IDS, label))


def test_targets_of_all_kinds_at_once():
    explain = Explainer(models.tiny_llama())
    targets = [Logit(4), Contrast(7, 2), LogProb(5), Margin(3), None, 9]
    for target, found in zip(targets, explain(IDS, targets), strict=True):
        same(found, explain(IDS, target))
    for other, found in zip([2, 3], explain(IDS, 7, [2, 3], position=[6, 1]), strict=True):
        same(found, explain(IDS, 7, other, position=6 if other == 2 else 1))


@pytest.mark.parametrize("method", ["attnlrp", "alti-logit"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_a_batch_with_different_numbers_of_questions(side, method):
    explain = Explainer(models.tiny_llama(), padding_side=side)
    positions = [[6, 0, 3], 1, [2, 2]]
    first, second, third = explain(ROWS, 7, method=method, position=positions)
    for found, position in zip(first, positions[0], strict=True):
        same(found, explain(IDS, 7, method=method, position=position))
    same(second, explain(ROWS[1], 7, method=method, position=1))
    for found in third:
        same(found, explain(ROWS[2], 7, method=method, position=2))


@pytest.mark.parametrize("options", [{"recompute": True}, {}])
@pytest.mark.parametrize("method", ["attnlrp", "lrp", "alti-logit", "gradient-x-input"])
def test_each_question_has_its_own_ledger(options, method):
    explain = Explainer(models.tiny_gpt2(), **options)
    targets = [LogProb(4), 7, 2]
    for target, position, found in zip(targets, [6, 3, 0], explain(
        IDS, targets, method=method, position=[6, 3, 0], ledger=True
    ), strict=True):  # fmt: skip
        alone = Explainer(models.tiny_gpt2())(IDS, target, method=method, position=position, ledger=True)
        same(found, alone)
        assert found.ledger.closes(1e-9)
        assert found.ledger.by_kind() == pytest.approx(alone.ledger.by_kind(), abs=1e-9)


def test_one_forward_pass_for_all():
    model = models.tiny_llama()
    explain = Explainer(model)
    explain(ROWS)  # what is tried of the model once
    with calls_of(model) as calls:
        explain(IDS, position=range(7))
        assert len(calls) == 1
        explain(ROWS, position=[[0, 1], [0, 1], [0, 1]])
        assert len(calls) == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"position": []}, "the lists differ in length or are empty: 0 of position"),
        ({"target": [3, 4], "position": [1, 2, 3]}, "2 of target, 3 of position; pass one for each question"),
    ],
)
def test_lists_that_do_not_fit(asked, message):
    with pytest.raises(InputError, match=message):
        Explainer(models.tiny_llama())(IDS, **asked)


def test_what_is_wrong_in_a_list_is_named():
    explain = Explainer(models.tiny_llama())
    with pytest.raises(InputError, match=r"position 7 is outside the 7 tokens"):
        explain(IDS, position=[0, 7])
    with pytest.raises(TargetError, match=r"target 31 is index 31.*\(row 1 of the batch\)"):
        explain(ROWS, target=[3, [4, 31], 5])


def test_questions_must_be_about_rows_that_there_are():
    with pytest.raises(InputError, match="there are no questions; ask at least one"):
        Questions((), ())
    with pytest.raises(InputError, match=r"a question is about row 1 of 0; count rows from 0"):
        Questions((), (Question(1, None, Logit(3)),))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_rounds_hold_each_question_once_and_each_row_at_most_once(about):
    model = BoundModel(models.tiny_gpt2())
    rows = tuple(model.reader.row([3, 4 + i]) for i in range(5))
    questions = Questions(rows, tuple(Question(row, 1, Logit(3)) for row in about))
    rounds = questions.rounds()
    assert sorted(i for chosen in rounds for i in chosen) == list(range(len(about)))
    assert all(len({about[i] for i in chosen}) == len(chosen) for chosen in rounds)
    assert len(rounds) == max(about.count(row) for row in about)


def test_a_bound_model_answers_without_a_graph():
    model = BoundModel(models.tiny_gpt2())
    assert model.paths == tuple(path for path, _ in model.module.named_modules(remove_duplicate=False) if path)
    questions = Questions((model.reader.row(IDS),), (Question(0, 6, Logit()), Question(0, 2, Contrast(7, 2))))
    answers = model.ask(questions)
    with torch.no_grad():
        logits = model.module(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(answers.logits, logits[[6, 2]], rtol=0, atol=1e-14)
    assert not answers.logits.requires_grad
    assert answers.targets[0] == Logit(int(logits[6].argmax()))
    torch.testing.assert_close(answers.values, torch.stack([logits[6].max(), logits[2, 7] - logits[2, 2]]))


@pytest.mark.parametrize("side", ["right", "left"])
def test_values_of_changed_embeddings(side):
    model = BoundModel(models.tiny_llama(), padding_side=side)
    rows = tuple(model.reader.row(ids) for ids in ROWS)
    questions = Questions(rows, tuple(Question(i, len(ids) - 1, Logit(4)) for i, ids in enumerate(ROWS)))
    embed = model.module.get_input_embeddings()
    with torch.no_grad():
        plain = [embed(torch.tensor(ids)) for ids in ROWS]
        changed = [each.roll(1, 0) for each in plain]
        expected = torch.stack([model.module(inputs_embeds=each[None]).logits[0, -1, 4] for each in changed])
    torch.testing.assert_close(model.values(questions, embeddings=plain), model.ask(questions).values)
    torch.testing.assert_close(model.values(questions, embeddings=changed, batch_size=2), expected)


BUILDS = [
    models.tiny_llama, models.tiny_gpt2, models.tiny_bert, tiny.opt, tiny.neox, tiny.bloom, tiny.codegen, tiny.roberta,
    tiny.bert_classifier, tiny.gpt2_classifier, tiny.llama_classifier, tiny.xlnet,
]  # fmt: skip


@pytest.mark.parametrize("build", BUILDS)
def test_a_mask_that_hides_nothing_changes_nothing(build):
    model = BoundModel(build())
    rows = tuple(model.reader.row(ids) for ids in ROWS)
    at = [len(ids) - 1 if model.task.reads == "position" else None for ids in ROWS]
    questions = Questions(rows, tuple(Question(i, position, Logit(1)) for i, position in enumerate(at)))
    if not model.accepts("attention_mask"):
        pytest.skip(f"{type(model.module).__name__} takes no mask")
    masks = [torch.ones(len(ids), dtype=torch.int64) for ids in ROWS]
    alone = torch.stack([model.ask(questions.alone([i])).values[0] for i in range(len(rows))])
    torch.testing.assert_close(model.values(questions, attention_mask=masks), alone, rtol=1e-9, atol=1e-12)


def test_two_altis_of_different_epsilon_do_not_share_their_numbers():
    from lrpx.methods import AltiLogit, attribute_all

    model = BoundModel(models.tiny_llama())
    questions = Questions((model.reader.row(IDS),), (Question(0, 6, Contrast(7, 2)),))
    exact, off = AltiLogit("exact"), AltiLogit("off", epsilon=0.01)
    together = attribute_all([exact, off], model, questions)
    for method in (exact, off):
        alone = method.attribute(model, questions).relevance[0]
        torch.testing.assert_close(together[method.name].relevance[0], alone, rtol=0, atol=1e-14)
    assert not torch.allclose(together["exact"].relevance[0], together["off"].relevance[0], atol=1e-6)


def test_methods_of_one_name_are_refused():
    from lrpx.errors import MethodError
    from lrpx.methods import attribute_all

    model = BoundModel(models.tiny_llama())
    questions = Questions((model.reader.row(IDS),), (Question(0, 6, Logit(7)),))
    with pytest.raises(MethodError, match="2 methods are called 'lrp'"):
        attribute_all([METHODS["lrp"], Backward("lrp", LRP)], model, questions)


# ------------------------------------------------------------------------ several in one pass


@pytest.fixture
def packs(monkeypatch):
    """How many values each backward pass for several of them explained."""
    found = []
    together = Trace.explain_together

    def counted(self, values, outputs=None):
        found.append(len(values))
        return together(self, values, outputs)

    monkeypatch.setattr(Trace, "explain_together", counted)
    return found


def test_short_inputs_share_a_backward_pass(packs):
    explain = Explainer(models.tiny_llama())
    ids = [3 + i % 20 for i in range(20)]
    together = explain(ids, 7, position=range(20))
    assert packs == [16, 4]
    for position in (0, 15, 16, 19):
        same(together[position], explain(ids, 7, position=position))


@pytest.mark.parametrize("options", [{"ledger": True}, {"method": "alti-logit", "ledger": True}])
def test_a_ledger_is_measured_one_pass_at_a_time(packs, options):
    explain = Explainer(models.tiny_llama())
    for position, found in zip([6, 2], explain(IDS, 7, position=[6, 2], **options), strict=True):
        same(found, explain(IDS, 7, position=position, **options))
    assert packs == []


def test_long_inputs_do_not(packs):
    explain = Explainer(models.tiny_llama())
    explain([[3] * 50, [4] * 50, [5] * 50], 7, position=[[49, 2], [3, 4], [5, 6]])
    Explainer(models.tiny_llama(), recompute=True)(IDS, 7, position=[6, 2])
    assert packs == []


class Looking(torch.autograd.Function):
    """Looks at a number of its gradient, which a batch of gradients has not."""

    @staticmethod
    def forward(ctx, x, op):
        return op(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if float(gradient.sum()) else 2 * gradient, None


def looking(op, /, x):
    return Looking.apply(x, op)


def test_rules_of_ones_own_run_one_by_one(packs):
    """Nobody knows whether they can be batched; in plain torch one that looks at ``gradient.data`` ends the process."""
    explain = Explainer(models.tiny_llama())
    recipe = LRP.at(activation=looking)
    for position, found in zip([6, 2, 0], explain(IDS, 7, method=recipe, position=[6, 2, 0]), strict=True):
        same(found, explain(IDS, 7, method=recipe, position=position))
    assert packs == []
