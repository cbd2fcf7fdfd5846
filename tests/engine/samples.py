"""Tiny random models of many architectures, with inputs for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.reference.models import randomise

VOCABULARY = 31


def token_ids(length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass(frozen=True)
class Sample:
    """One architecture: ``head`` is the class, ``config`` that of its configuration."""

    head: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": token_ids()})

    def build(self, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
        config = getattr(transformers, self.config)(**(SIZES | self.settings))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, self.head)._from_config(config, **settings)
        randomise(model, 0)
        return model.to(dtype).eval()

    def batch(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        return {
            name: value.to(dtype) if value.is_floating_point() else value.clone() for name, value in self.inputs.items()
        }


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
}
BOTH = {"input_ids": token_ids(8), "decoder_input_ids": token_ids(5, seed=1)}
PIXELS: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3}

SAMPLES = {
    "llama": Sample("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Sample("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "qwen2": Sample("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": Sample("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 4}),
    "gemma2": Sample("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 4, "sliding_window": 4}),
    "gemma3": Sample("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 4, "sliding_window": 4}),
    "mixtral": Sample("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "olmo2": Sample("Olmo2ForCausalLM", "Olmo2Config"),
    "phi": Sample("PhiForCausalLM", "PhiConfig"),
    "falcon": Sample("FalconForCausalLM", "FalconConfig", {"alibi": False}),
    "falcon alibi": Sample("FalconForCausalLM", "FalconConfig", {"alibi": True}),
    "bloom": Sample("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    "opt": Sample("OPTForCausalLM", "OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "gpt2": Sample("GPT2LMHeadModel", "GPT2Config"),
    "gpt_neox": Sample("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "mamba": Sample("MambaForCausalLM", "MambaConfig", {"state_size": 4, "use_mambapy": False}),
    "bert": Sample("BertForMaskedLM", "BertConfig"),
    "bert classifier": Sample("BertForSequenceClassification", "BertConfig"),
    "roberta": Sample("RobertaForMaskedLM", "RobertaConfig"),
    "distilbert": Sample(
        "DistilBertForMaskedLM", "DistilBertConfig",
        {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4},
    ),
    "albert": Sample("AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 8}),
    "electra": Sample("ElectraForMaskedLM", "ElectraConfig", {"embedding_size": 8}),
    "deberta_v2": Sample(
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
         "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "modernbert": Sample("ModernBertForMaskedLM", "ModernBertConfig", {"cls_token_id": 1, "sep_token_id": 2}),
    "t5": Sample(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu",
         "decoder_start_token_id": 0},
        BOTH,
    ),
    "bart": Sample("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, BOTH),
    "whisper": Sample(
        "WhisperForConditionalGeneration", "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16},
        {"input_features": noise(2, 4, 16), "decoder_input_ids": token_ids(5)},
    ),
    "vit": Sample("ViTForImageClassification", "ViTConfig", PIXELS, {"pixel_values": noise(2, 3, 8, 8)}),
    "clip vision": Sample(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig",
        PIXELS | {"projection_dim": 6}, {"pixel_values": noise(2, 3, 8, 8)},
    ),
    "wav2vec2": Sample(
        "Wav2Vec2ForCTC", "Wav2Vec2Config",
        {"conv_dim": [8, 8], "conv_kernel": [4, 3], "conv_stride": [3, 2], "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "group"},
        {"input_values": noise(2, 60)},
    ),
}  # fmt: skip


def output_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output["logits"] if "logits" in output else output[0]


def last_row(logits: Tensor) -> Tensor:
    """One row of logits for each sample of the batch."""
    return logits if logits.ndim == 2 else logits[:, -1]
