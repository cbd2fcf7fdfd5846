"""What an explanation held is given back when it ends, not when the garbage collector happens to run."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lrpx import ATTNLRP, Explainer, propagate
from lrpx.methods import METHODS

FOUR = torch.tensor(4.0)
REFUSED = {"lrp-voita", "centre", "libragrad-fullgrad"}
"""A rule for norms in one function, which the bundled model's are not; and methods of images."""
CASES = [(name, False) for name in METHODS if name not in REFUSED] + [
    (name, True) for name in ("attnlrp", "lrp", "alti-logit")
]


@pytest.fixture(scope="module")
def explainer():
    return Explainer.from_pretrained()


@pytest.mark.filterwarnings("ignore:integrated-gradients has not converged")
@pytest.mark.parametrize(("method", "ledger"), CASES)
def test_no_tensor_waits_for_the_garbage_collector(explainer, method, ledger):
    explainer("The doors", method=method, ledger=ledger)
    gc.collect()
    gc.disable()
    gc.freeze()  # what is there now is not looked at, nor by later tests
    try:
        for _ in range(3):
            explainer("The doors", method=method, ledger=ledger)
        assert not [each for each in gc.get_objects() if type(each) is torch.Tensor]
    finally:
        gc.enable()


def test_what_a_model_drops_is_gone_while_it_runs():
    """What a tensor is a function of is known as long as it is there: by the garbage collector's leave, the second run
    of a layer would know another than the first (a gate of Qwen4Exp: 0.38 of the largest relevance)."""
    left = []

    class Gate(torch.nn.Module):
        def forward(self, x):
            scale = x.exp().sum()  # from here on sums of exponentials are looked for
            total = (x * x.flip(-1)).sum(-1, keepdim=True) + scale
            there = weakref.ref(total)
            gate = total / FOUR  # what a number scales is kept for a function that may follow
            del total
            left.append(there())
            return gate.abs().clamp_min(1e-6).sqrt() * gate.sign()

    gc.collect()
    gc.disable()
    try:
        model = Gate()
        with propagate(model, ATTNLRP):
            model(torch.linspace(-1, 1, 8))
    finally:
        gc.enable()
    assert left == [None]
