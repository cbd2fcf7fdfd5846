"""Targets: their values, their gradients, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrpx.errors import TargetError
from lrpx.explainer import Explainer
from lrpx.targets import Contrast, Logit, LogProb, Margin, Target, whole_number

WORDS = {"are": 1, "is": 2}
LOGITS = torch.tensor([0.5, 3.0, 2.25, -1.0], dtype=torch.float64)


def lookup(text):
    return WORDS[text]


def value(target, logits=LOGITS):
    return float(target.resolved(lookup, logits).value(logits))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Logit("is"), 2.25),
        (Logit(), 3.0),
        (Contrast("is", "are"), -0.75),
        (Contrast(None, "is"), 0.75),
        (LogProb(0), float(LOGITS.log_softmax(0)[0])),
        (Margin("is"), -0.75),
        (Margin(), 0.75),
        (Margin(3), -4.0),
    ],
)
def test_values(target, expected):
    assert value(target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("target", "gradient"),
    [
        (Logit(1), [0, 1, 0, 0]),
        (Contrast(2, 1), [0, -1, 1, 0]),
        (Margin(2), [0, -1, 1, 0]),
        (Margin(1), [0, 1, -1, 0]),
        (LogProb(0), (torch.tensor([1.0, 0, 0, 0]) - LOGITS.softmax(0)).tolist()),
    ],
)
def test_gradients(target, gradient):
    logits = LOGITS.clone().requires_grad_()
    target.value(logits).backward()
    torch.testing.assert_close(logits.grad, torch.tensor(gradient, dtype=torch.float64))


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=9), st.data())
def test_a_margin_is_the_smallest_contrast_and_none_beats_the_prediction(values, data):
    logits = torch.tensor(values, dtype=torch.float64)
    token = data.draw(st.integers(0, len(values) - 1))
    margin = value(Margin(token), logits)
    assert margin == min(value(Contrast(token, other), logits) for other in range(len(values)) if other != token)
    assert value(Margin(), logits) >= max(margin, 0)
    assert value(LogProb(token), logits) <= value(LogProb(), logits) <= 0


def test_log_probability_of_half_precision_is_computed_in_single():
    logits = LOGITS.to(torch.float16)
    found = LogProb(0).value(logits)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(LOGITS.log_softmax(0)[0]), abs=1e-6)


def test_a_resolved_target_reads_in_words():
    names = {index: word for word, index in WORDS.items()}.get
    assert Logit("are").resolved(lookup, LOGITS).describe(names) == "logit of 'are'"
    assert Contrast("is", 1).resolved(lookup, LOGITS).describe(names) == "logit of 'is' − logit of 'are'"
    assert LogProb().resolved(lookup, LOGITS).describe(names) == "log-probability of 'are'"
    assert Margin(2).resolved(lookup, LOGITS).describe(names) == "margin of 'is'"


@pytest.mark.parametrize("index", [4, -1, 10**12])
@pytest.mark.parametrize("kind", [Logit, LogProb, Margin])
def test_an_index_out_of_range_is_refused(kind, index):
    with pytest.raises(TargetError, match=rf"target {index} is index {index}.* 4 logits; pass 0 to 3"):
        kind(index).resolved(lookup, LOGITS)


def test_a_contrast_out_of_range_is_called_a_contrast():
    with pytest.raises(TargetError, match="contrast 9 is index 9"):
        Contrast(1, 9).resolved(lookup, LOGITS)


@pytest.mark.parametrize("token", [1.0, [1], True, {}, torch.tensor([1, 2])])
def test_what_is_no_token_is_refused(token):
    with pytest.raises(TargetError, match=f"the target is {type(token).__name__}; pass a string or an index"):
        Logit(token).resolved(lookup, LOGITS)


def test_a_contrast_with_itself_is_refused():
    with pytest.raises(TargetError, match="contrast 'are' is the target itself; pass another contrast"):
        Contrast(1, "are").resolved(lookup, LOGITS)
    with pytest.raises(TargetError, match="the model's own prediction, which is the target by default"):
        Contrast(None, "are").resolved(lookup, LOGITS)


def test_a_contrast_needs_its_second_token():
    with pytest.raises(TargetError, match=r"a contrast needs two tokens; pass Contrast\(token, other\)"):
        Contrast("are")


def test_a_margin_needs_two_logits():
    with pytest.raises(TargetError, match=r"a margin needs two logits, and the model has one; pass Logit\(0\)"):
        Margin().resolved(lookup, LOGITS[:1])


def test_a_log_probability_needs_two_logits():
    """Of one it is 0, and so is every relevance."""
    for target in (LogProb(), LogProb(0)):
        with pytest.raises(TargetError, match=r"a softmax of one logit is 1, .*; pass Logit\(0\)"):
            target.resolved(lookup, LOGITS[:1])


def test_targets_are_values():
    assert Logit(1) == Logit(1) != LogProb(1)
    assert len({Contrast(1, 2), Contrast(1, 2), Contrast(2, 1)}) == 2
    with pytest.raises(AttributeError):
        Logit(1).token = 2
    with pytest.raises(TypeError):
        Target()


@pytest.mark.parametrize("number", [7, np.int64(7), np.array(7), torch.tensor(7), torch.tensor(7, dtype=torch.uint8)])
def test_every_integer_scalar_is_a_whole_number(number):
    assert whole_number(number) == 7
    assert type(whole_number(number)) is int


@pytest.mark.parametrize("other", [True, 7.0, "7", None, [7], np.array([7]), torch.tensor([7]), torch.tensor(True)])
def test_nothing_else_is_a_whole_number(other):
    assert whole_number(other) is None


@pytest.fixture(scope="module")
def bundled():
    return Explainer.from_pretrained()


class OfMyOwn(Target):
    """The third logit, as a user writes it."""

    name = "third"

    def value(self, logits):
        return logits[2]


class Number(OfMyOwn):
    def value(self, logits):
        return float(logits.detach()[2])


class Several(OfMyOwn):
    def value(self, logits):
        return logits[:2]


class Nothing(OfMyOwn):
    def value(self, logits):
        pass


class Nameless(Target):
    def value(self, logits):
        return logits[2]


class Undescribed(OfMyOwn):
    def describe(self, names):
        pass


class Unresolved(OfMyOwn):
    def resolved(self, lookup, logits):
        pass


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Number(), "the value of the target Number is float; return a scalar tensor"),
        (Several(), r"the value of the target Several is a tensor of shape \[2\]; return a scalar tensor"),
        (Nothing(), "the value of the target Nothing is NoneType; return a scalar tensor"),
        (Nameless(), "the target Nameless has no name; give its class one"),
        (Undescribed(), "the target Undescribed is described by NoneType; return a text"),
        (Unresolved(), "the target Unresolved resolves to NoneType; return a target"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Target) else "",
)
def test_a_target_of_ones_own_that_is_none_is_refused(bundled, target, message):
    for method in ("attnlrp", "leave-one-out"):
        with pytest.raises(TargetError, match=message):
            bundled("The doors of the house", target=target, method=method)


def test_a_target_of_ones_own_is_explained(bundled):
    found = bundled("The doors of the house", target=OfMyOwn(7))
    assert found.explained.description.startswith("third of ")
