"""torch's own transformers: encoder, decoder and both, masked and padded, and the encoder's fast path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEncoder

from lrpx.engine import propagate
from lrpx.recipes import ATTNLRP
from tests.families.checks import alike, holds, ready

WIDTH, LENGTH = 16, 7


def rows(length: int = LENGTH, seed: int = 0, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, width, generator=generator, dtype=torch.float64).requires_grad_()


PADDING = torch.tensor([[False] * LENGTH, [False] * (LENGTH - 2) + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)


def layer(kind: type[nn.Module], norm_first: bool = False, activation: str = "gelu") -> nn.Module:
    return kind(
        WIDTH, 4, dim_feedforward=24, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
    )


def last(output: Tensor) -> Tensor:
    """Of the first sample: the last row's largest number."""
    return output[0, -1, int(output[0, -1].argmax())]


@pytest.fixture
def fast_path():
    """Switches torch's fused encoder layer, and back afterwards."""
    before = mha.get_fastpath_enabled()
    yield mha.set_fastpath_enabled
    mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL, "is_causal": True}])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder(norm_first, masks, activation):
    encoder = ready(nn.TransformerEncoder(layer(nn.TransformerEncoderLayer, norm_first, activation), 2,
                                          enable_nested_tensor=False))  # fmt: skip
    given = rows()
    holds(encoder, lambda: encoder(given, **masks), last)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("fast", [False, True])
def test_padding_changes_nothing_and_the_fast_path_gives_the_same(fast, fast_path):
    fast_path(fast)
    encoder = ready(nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), 2, enable_nested_tensor=fast))
    given = rows()
    with torch.no_grad():
        wanted = encoder(given, src_key_padding_mask=PADDING)[1, : LENGTH - 2]
    with propagate(encoder, ATTNLRP, observe=()) as trace:
        output = encoder(given, src_key_padding_mask=PADDING)
        trace.explain(output[1, 0, 3])
    torch.testing.assert_close(output[1, : LENGTH - 2].detach(), wanted)
    padded = trace.relevance("src")[1]
    assert not padded[-2:].any()
    with propagate(encoder, ATTNLRP, observe=()) as trace:
        trace.explain(encoder(given[1:, :-2])[0, 0, 3])
    torch.testing.assert_close(padded[:-2], trace.relevance("src")[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder(norm_first):
    decoder = ready(nn.TransformerDecoder(layer(nn.TransformerDecoderLayer, norm_first), 2, nn.LayerNorm(WIDTH)))
    target, memory = rows(), rows(5, seed=1)
    holds(decoder, lambda: decoder(target, memory, tgt_mask=CAUSAL, tgt_is_causal=True), last)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_whole_transformer():
    model = ready(nn.Transformer(WIDTH, 4, 2, 2, dim_feedforward=24, batch_first=True))
    source, target = rows(), rows(5, seed=1)
    mask = CAUSAL[:5, :5]
    holds(model, lambda: model(source, target, tgt_mask=mask, src_key_padding_mask=PADDING,
                               memory_key_padding_mask=PADDING, tgt_is_causal=True), last)  # fmt: skip


def test_multihead_attention():
    attention = ready(nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=12, vdim=10))
    query, key, value = rows(), rows(5, seed=1, width=12), rows(5, seed=2, width=10)
    for weights in (True, False):
        holds(attention, lambda: attention(query, key, value, need_weights=weights)[0], last)  # noqa: B023


def test_the_same_weights_in_bert():
    """A post-norm layer of torch is one of BERT, spelled otherwise: the same relevance."""
    config = BertConfig(hidden_size=WIDTH, num_attention_heads=4, intermediate_size=24, num_hidden_layers=2,
                        hidden_act="gelu", layer_norm_eps=1e-5)  # fmt: skip
    bert = ready(BertEncoder(config))
    encoder = ready(nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), 2, enable_nested_tensor=False))
    with torch.no_grad():
        for ours, theirs in zip(encoder.layers, bert.layer, strict=True):
            attention, output = theirs.attention.self, theirs.attention.output
            parts = (attention.query, attention.key, attention.value)
            ours.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
            ours.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            for mine, other in (
                (ours.self_attn.out_proj, output.dense),
                (ours.norm1, output.LayerNorm),
                (ours.linear1, theirs.intermediate.dense),
                (ours.linear2, theirs.output.dense),
                (ours.norm2, theirs.output.LayerNorm),
            ):
                mine.load_state_dict(other.state_dict())
    given = rows()
    alike(
        (encoder, lambda: encoder(given), last),
        (bert, lambda: bert(given).last_hidden_state, last),
    )
