"""Decoders as people write them themselves, beside the same weights in transformers: the same relevance.

Three ways to write one: as the small GPTs for teaching do (one projection for queries, keys and values, a mask in a
buffer, or torch's fused attention; GELU written out), and as the first Llama did (rotations as complex numbers).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lrpx.coverage._checking import _everything_wide
from tests.families.checks import alike, holds, ready

WIDTH, HEADS, GROUPS, LAYERS, WORDS, CONTEXT = 16, 4, 2, 2, 31, 16
IDS = torch.tensor([[3, 17, 8, 25, 4, 11, 29]])


def last(logits: Tensor) -> Tensor:
    return logits[0, -1, 5]


# ------------------------------------------------------------------- GPT, twice


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.fused = fused
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("seen", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.seen[:, :, :T, :T] == 0, float("-inf"))
            y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.dropout(self.out(y.transpose(1, 2).contiguous().view(B, T, C)))


class WrittenGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, fused: bool, activation: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(fused), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Weights of the head tied to the embedding; only the last position has logits, as where text is generated."""

    def __init__(self, fused: bool, activation: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(fused, activation) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, [-1], :])


def from_gpt2(model: GPT, gpt2: nn.Module) -> GPT:
    """The model with GPT-2's weights, whose linear layers hold theirs transposed."""
    body = gpt2.transformer
    with torch.no_grad():
        model.words.weight.copy_(body.wte.weight)
        model.places.weight.copy_(body.wpe.weight)
        model.norm.load_state_dict(body.ln_f.state_dict())
        for ours, theirs in zip(model.blocks, body.h, strict=True):
            ours.norm1.load_state_dict(theirs.ln_1.state_dict())
            ours.norm2.load_state_dict(theirs.ln_2.state_dict())
            for mine, other in (
                (ours.attention.qkv, theirs.attn.c_attn),
                (ours.attention.out, theirs.attn.c_proj),
                (ours.mlp[0], theirs.mlp.c_fc),
                (ours.mlp[2], theirs.mlp.c_proj),
            ):
                mine.weight.copy_(other.weight.T)
                mine.bias.copy_(other.bias)
    return model


def a_gpt(fused: bool, written: bool) -> tuple[GPT, nn.Module]:
    config = GPT2Config(
        vocab_size=WORDS, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        activation_function="gelu_new" if written else "gelu",
    )  # fmt: skip
    gpt2 = ready(GPT2LMHeadModel._from_config(config, attn_implementation="sdpa" if fused else "eager"))
    model = ready(GPT(fused, WrittenGELU() if written else nn.GELU()))
    return from_gpt2(model, gpt2), gpt2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_gpt_holds(fused, written):
    model, _ = a_gpt(fused, written)
    holds(model, lambda: model(IDS), last)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_gpt_as_gpt2(fused, written):
    model, gpt2 = a_gpt(fused, written)
    alike((model, lambda: model(IDS), last), (gpt2, lambda: gpt2(IDS).logits[:, [-1]], last))


# -------------------------------------------------------------------------- Llama


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)


def repeated(x: Tensor, times: int) -> Tensor:
    B, T, H, D = x.shape
    return x[:, :, :, None, :].expand(B, T, H, times, D).reshape(B, T, H * times, D)


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, GROUPS * size, bias=False), nn.Linear(WIDTH, GROUPS * size, bias=False)
        self.w1, self.w3 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def attend(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (w(x).view(B, T, -1, WIDTH // HEADS) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        q, k, v = (part.transpose(1, 2) for part in (q, repeated(k, HEADS // GROUPS), repeated(v, HEADS // GROUPS)))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(WIDTH // HEADS) + mask
        weights = F.softmax(scores.double(), dim=-1).type_as(q)
        return self.wo(torch.matmul(weights, v).transpose(1, 2).contiguous().view(B, T, -1))

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attend(self.attention_norm(x), turns, mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        size, length = WIDTH // HEADS, tokens.shape[1]
        speeds = 1.0 / 10000.0 ** (torch.arange(0, size, 2).double() / size)
        angles = torch.outer(torch.arange(length).double(), speeds)
        turns = torch.polar(torch.ones_like(angles), angles)
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=torch.float64), diagonal=1)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, turns, mask)
        return self.output(self.norm(h))


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """transformers turns the two halves of a head against each other; here neighbours are the pairs."""
    return weight.view(heads, 2, WIDTH // HEADS // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)


def a_llama() -> tuple[Llama, nn.Module]:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, rms_norm_eps=1e-6, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    theirs = ready(LlamaForCausalLM._from_config(config, attn_implementation="eager"))
    model = ready(Llama())
    body = theirs.model
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(body.embed_tokens.weight)
        model.norm.weight.copy_(body.norm.weight)
        model.output.weight.copy_(theirs.lm_head.weight)
        for ours, other in zip(model.layers, body.layers, strict=True):
            ours.wq.weight.copy_(in_pairs(other.self_attn.q_proj.weight, HEADS))
            ours.wk.weight.copy_(in_pairs(other.self_attn.k_proj.weight, GROUPS))
            for mine, same in (
                (ours.wv, other.self_attn.v_proj),
                (ours.wo, other.self_attn.o_proj),
                (ours.w1, other.mlp.gate_proj),
                (ours.w2, other.mlp.down_proj),
                (ours.w3, other.mlp.up_proj),
                (ours.attention_norm, other.input_layernorm),
                (ours.ffn_norm, other.post_attention_layernorm),
            ):
                mine.weight.copy_(same.weight)
    return model, theirs


def test_llama_holds():
    model, _ = a_llama()
    holds(model, lambda: model(IDS), last)


def test_llama_as_in_transformers():
    """In float64 throughout: what the norms and rotations of transformers cast to float32 stays wide."""
    with _everything_wide():
        model, theirs = a_llama()
        alike((model, lambda: model(IDS), last), (theirs, lambda: theirs(IDS).logits, last))
