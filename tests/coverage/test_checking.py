"""What is read from an output, and modules that a model holds where torch does not look."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lrpx.coverage import CHECKS, check, choose
from lrpx.coverage._checking import _in_lists, _logits, _value
from lrpx.coverage._classes import ModelClass
from lrpx.errors import ModelError

BERT = ModelClass("base", "BertModel", "bert", ("bert",))
ROWS = torch.arange(12.0).view(1, 3, 4)


@pytest.mark.parametrize(
    "output",
    [
        {"loss": torch.zeros(()), "logits": ROWS},
        {"pooled": torch.zeros(1, 4), "last_hidden_state": ROWS},
        {"ids": torch.ones(3, dtype=torch.long), "scores": (ROWS, torch.zeros(3))},
        (None, [ROWS], torch.zeros(2)),
        ROWS,
    ],
)
def test_logits_or_the_first_real_numbers(output):
    assert _logits(BERT, output) is ROWS


def test_an_output_without_real_numbers_is_named():
    with pytest.raises(ModelError, match="the model's output, of type dict, holds no real number"):
        _logits(BERT, {"ids": torch.ones(3, dtype=torch.long)})


@pytest.mark.parametrize(
    ("mapping", "value"), [("base", 11), ("causal-lm", 11), ("masked-lm", 7), ("token-classification", 7)]
)
def test_one_number_is_explained(mapping, value):
    assert float(_value(ModelClass(mapping, "Model", "kind", ("kind",)), ROWS)) == value


def test_modules_in_lists_are_found():
    model = nn.Sequential(nn.Linear(2, 2))
    hidden = nn.Linear(3, 3)
    model[0].more = [hidden, "no module"]
    assert list(_in_lists(model)) == [hidden]


def test_kernels_that_torch_chooses_by_the_weights_are_no_difference():
    """This one's outputs are those of frozen weights, which are not those of others bit for bit."""
    (mixer,) = choose(["patchtsmixer"], "time-series-regression")
    assert check(mixer).passed == CHECKS


def test_a_check_leaves_torchs_default_dtype_as_it_was() -> None:
    """It was float32 from then on."""
    torch.set_default_dtype(torch.float64)
    try:
        check(choose(["gpt2"], "causal-lm")[0])
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
