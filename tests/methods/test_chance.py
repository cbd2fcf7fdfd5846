"""Random and position: the rows that say what chance and order earn."""

from __future__ import annotations

import pytest
import torch

from lrpx import Explainer
from lrpx.errors import MethodError
from lrpx.methods import Random
from tests import tiny
from tests.reference import models

IDS = [3, 14, 15, 9, 26, 5, 7]
ROWS = [IDS, [8, 9], [4, 11, 20]]


def test_random_is_uniform_and_depends_on_seed_and_tokens_alone():
    explain = Explainer(models.tiny_gpt2())
    rows = [torch.randint(31, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(25)]
    drawn = torch.cat([a.relevance for a in explain(rows, method="random")])
    assert drawn.min() >= -1
    assert drawn.max() < 1
    # of 1,000 uniform numbers: five standard errors
    assert abs(float(drawn.mean())) < 5 * (1 / 3) ** 0.5 / 1000**0.5
    assert abs(float(drawn.square().mean()) - 1 / 3) < 5 * (4 / 45) ** 0.5 / 1000**0.5
    assert not torch.equal(*(explain(row, method="random").relevance for row in ([8, 9], [9, 8])))
    many, state = explain(ROWS, 7, method="random"), torch.random.get_rng_state()
    for found, row in zip(many, ROWS, strict=True):
        assert torch.equal(found.relevance, explain(row, 3, method="random").relevance)
        assert torch.equal(found.relevance, Explainer(models.tiny_llama())(row, method="random").relevance)
        assert not torch.equal(found.relevance, explain(row, 7, method=Random(seed=1)).relevance)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_position_is_a_ramp():
    for build, how in ((models.tiny_gpt2, {}), (tiny.bert_classifier, {}), (models.tiny_t5, {"decoder": [0, 4]})):
        found = Explainer(build())(IDS, method="position", **how).relevance
        count = len(IDS) + len(how.get("decoder", ()))
        assert torch.equal(found, torch.arange(1, count + 1, dtype=torch.float64) / count)


def test_what_they_refuse():
    explain = Explainer(models.tiny_gpt2())
    with pytest.raises(MethodError, match=r"the seed of random is 1\.5; pass a whole number from 0 to 4294967295"):
        explain(IDS, method=Random(seed=1.5))
    for method in ("random", "position"):
        with pytest.raises(MethodError, match=f"{method} has no ledger"):
            explain(IDS, method=method, ledger=True)
