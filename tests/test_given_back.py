"""What an explanation held is given back when it ends, not when the garbage collector happens to run."""

from __future__ import annotations

import gc

import pytest
import torch

from lrpx import Explainer
from lrpx.methods import METHODS

REFUSED = {"lrp-voita", "centre", "libragrad-fullgrad"}
"""A rule for norms in one function, which the bundled model's are not; and methods of images."""
CASES = [(name, False) for name in METHODS if name not in REFUSED] + [
    (name, True) for name in ("attnlrp", "lrp", "alti-logit")
]


@pytest.mark.filterwarnings("ignore:integrated-gradients has not converged")
@pytest.mark.parametrize(("method", "ledger"), CASES)
def test_no_tensor_waits_for_the_garbage_collector(method, ledger):
    explainer = Explainer.from_pretrained()
    explainer("The doors", method=method, ledger=ledger)
    gc.collect()
    gc.disable()
    gc.freeze()  # what is there now is not looked at
    try:
        for _ in range(3):
            explainer("The doors", method=method, ledger=ledger)
        assert not [each for each in gc.get_objects() if type(each) is torch.Tensor]
    finally:
        gc.unfreeze()
        gc.enable()
