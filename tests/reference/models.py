"""Tiny transformers models with random weights, float64, ready to compare to a twin.

Every bias and every norm weight is random and far from its default, so that a rule which forgets one
cannot pass. ``lifted`` replaces norms that cast to float32 inside by the same norm without the cast.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

Model = TypeVar("Model", bound=nn.Module)


class LiftedRMSNorm(nn.Module):
    """The RMSNorm of Llama and T5 without its cast to float32; it shares the original's weight."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.weight = original.weight
        self.variance_epsilon = original.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def lift(model: Model) -> Model:
    """Replace every norm of this model instance that casts to float32."""
    for name, module in list(model.named_modules()):
        if isinstance(module, (LlamaRMSNorm, T5LayerNorm)):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LiftedRMSNorm(module))
    return model


def zero_biases(model: Model) -> Model:
    """Set every additive bias, the betas of the norms included, to zero (in place)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    return model


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew: matrices keep the scale of their input, nothing stays at its default."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: nn.Parameter, mean: float, std: float) -> None:
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(mean + std * drawn)

    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("bias"):
                    normal(parameter, 0.0, 0.3)
                elif parameter.ndim <= 1:
                    normal(parameter, 1.0, 0.25)
                elif isinstance(module, nn.Embedding):
                    normal(parameter, 0.0, 0.7)
                else:
                    fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[1]
                    normal(parameter, 0.0, 1.2 * fan_in**-0.5)


def _build(model_class: type[Model], config: object, attn_implementation: str, lifted: bool, seed: int) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class._from_config(config, attn_implementation=attn_implementation)
    model = model.double().eval()
    randomise(model, seed)
    model.requires_grad_(False)
    return lift(model) if lifted else model


def tiny_llama(
    attn_implementation: str = "sdpa", lifted: bool = True, seed: int = 0, **overrides: object
) -> LlamaForCausalLM:
    """Two layers, four query heads on two key-value heads, biases in attention and MLP.

    With "eager", transformers' Llama computes the softmax in float32 whatever comes in (``lifted`` or not),
    so agreement to 1e-9 needs "sdpa".
    """
    settings: dict[str, object] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = LlamaConfig(**(settings | overrides))
    return _build(LlamaForCausalLM, config, attn_implementation, lifted, seed)


def tiny_gpt2(
    attn_implementation: str = "sdpa", lifted: bool = True, seed: int = 0, **overrides: object
) -> GPT2LMHeadModel:
    """Two layers, four heads, learned positions (its norms do not cast; ``lifted`` changes nothing)."""
    settings: dict[str, object] = {
        "vocab_size": 31,
        "n_positions": 64,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 24,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = GPT2Config(**(settings | overrides))
    return _build(GPT2LMHeadModel, config, attn_implementation, lifted, seed)


def tiny_bert(
    attn_implementation: str = "sdpa", lifted: bool = True, seed: int = 0, **overrides: object
) -> BertForMaskedLM:
    """Two layers, four heads, token types (its norms do not cast; ``lifted`` changes nothing)."""
    settings: dict[str, object] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    config = BertConfig(**(settings | overrides))
    return _build(BertForMaskedLM, config, attn_implementation, lifted, seed)


def tiny_t5(
    attn_implementation: str = "sdpa",
    lifted: bool = True,
    seed: int = 0,
    feed_forward_proj: str = "gated-gelu",
    **overrides: object,
) -> T5ForConditionalGeneration:
    """Two encoder and two decoder blocks, four heads, few buckets so that far distances occur."""
    settings: dict[str, object] = {
        "vocab_size": 31,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": feed_forward_proj,
        "decoder_start_token_id": 0,
    }
    config = T5Config(**(settings | overrides))
    return _build(T5ForConditionalGeneration, config, attn_implementation, lifted, seed)
