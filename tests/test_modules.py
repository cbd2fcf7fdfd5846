"""The walk over modules, against torch's own."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lrpx import _kept
from lrpx._kept import as_it_was, held_in
from lrpx._modules import named_modules

SIZES = {
    GPT2LMHeadModel: GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11),
    T5ForConditionalGeneration: T5Config(d_model=8, d_ff=8, num_layers=2, num_heads=2, vocab_size=11),
    AlbertForMaskedLM: AlbertConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=11),
}


@pytest.mark.parametrize("model_class", SIZES, ids=lambda each: each.__name__)
def test_the_same_in_the_same_order(model_class):
    model = model_class(SIZES[model_class])
    assert list(named_modules(model)) == list(model.named_modules(remove_duplicate=False))


def test_a_module_inside_itself_is_left_out():
    inner = torch.nn.Sequential(torch.nn.Tanh())
    outer = torch.nn.Sequential(inner, inner)
    inner.add_module("back", outer)
    assert [path for path, _ in named_modules(outer)] == ["", "0", "0.0", "1", "1.0"]


def test_what_an_optimizer_keeps_is_no_modules_own():
    module = torch.nn.Linear(2, 2)
    module.seen, module.optimizer = [torch.zeros(3)], torch.optim.Adam(module.parameters())
    module(torch.ones(2)).sum().backward()
    module.optimizer.step()
    assert [each.shape for each in held_in([module]) if type(each) is torch.Tensor] == [(3,)]


def test_an_interruption_while_all_is_put_back_leaves_nothing(monkeypatch):
    module = torch.nn.Linear(2, 2)
    module.cache, module.calls = {3: torch.zeros(3)}, 0
    own = _kept._attributes

    def interrupt(_):
        monkeypatch.setattr(_kept, "_attributes", own)
        raise KeyboardInterrupt

    def tried():
        with as_it_was(module):
            module.cache[7], module.calls = torch.zeros(7), 1
            module.cache[3].add_(1)
            monkeypatch.setattr(_kept, "_attributes", interrupt)

    with pytest.raises(KeyboardInterrupt):
        tried()
    assert list(module.cache) == [3]
    assert (module.calls, float(module.cache[3].sum())) == (0, 0.0)
