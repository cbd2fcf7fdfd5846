"""More tiny random models in float64, for the tests of the explainer: classifiers and other families."""

from __future__ import annotations

import torch
import transformers as tf

from tests.reference import models

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"vocab_size": 31, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
GPT2_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(model_class, config, attn_implementation="sdpa"):
    return models._build(model_class, config, attn_implementation, True, 0)


def opt():
    config = tf.OPTConfig(
        vocab_size=31,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=24,
        max_position_embeddings=64,
    )
    return build(tf.OPTForCausalLM, config)


def bloom():
    config = tf.BloomConfig(vocab_size=31, hidden_size=16, n_layer=2, n_head=4)
    return build(tf.BloomForCausalLM, config, "eager")


def neox():
    return build(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**SIZES))


def mamba():
    config = tf.MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, state_size=4)
    return build(tf.MambaForCausalLM, config, "eager")


def roberta():
    return build(tf.RobertaForMaskedLM, tf.RobertaConfig(**SIZES, pad_token_id=1, bos_token_id=0, eos_token_id=2))


def xlnet():
    config = tf.XLNetConfig(vocab_size=31, d_model=16, n_layer=2, n_head=4, d_inner=24)
    return build(tf.XLNetLMHeadModel, config, "eager")


def bart(**settings):
    sizes = {
        "vocab_size": 31,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 64,
    }
    return build(tf.BartForConditionalGeneration, tf.BartConfig(**sizes | settings))


def longformer():
    """Pads its input to a multiple of the window by itself."""
    return build(
        tf.LongformerForMaskedLM, tf.LongformerConfig(**SIZES, attention_window=[4, 4], pad_token_id=1), "eager"
    )


def led():
    """Pads its embeddings to a multiple of the window by itself."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    more = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "attention_window": [4, 4], "pad_token_id": 1}
    config = tf.LEDConfig(vocab_size=31, d_model=16, decoder_start_token_id=2, **sizes, **more)
    return build(tf.LEDForConditionalGeneration, config, "eager")


def marian():
    """The encoder and the decoder have embeddings of their own."""
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 24}.items()
    }
    config = tf.MarianConfig(
        vocab_size=31,
        d_model=16,
        max_position_embeddings=64,
        share_encoder_decoder_embeddings=False,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        **sizes,
    )
    return build(tf.MarianMTModel, config)


def xlnet_classifier():
    """Takes the last token of all for the class, so no row of a batch may be padded."""
    config = tf.XLNetConfig(vocab_size=31, d_model=16, n_layer=2, n_head=4, d_inner=24, num_labels=3)
    return build(tf.XLNetForSequenceClassification, config, "eager")


def codegen():
    """Its config names no padding token at all."""
    return build(tf.CodeGenForCausalLM, tf.CodeGenConfig(**GPT2_SIZES, rotary_dim=4), "eager")


def bert_classifier(**settings):
    labels = {0: "negative", 1: "positive", 2: "mixed"}
    config = tf.BertConfig(**SIZES | {"id2label": labels} | settings)
    return build(tf.BertForSequenceClassification, config)


def bert_answers():
    return build(tf.BertForQuestionAnswering, tf.BertConfig(**SIZES))


def gpt2_classifier(**settings):
    config = tf.GPT2Config(**GPT2_SIZES | GPT2_TOKENS | {"num_labels": 3} | settings)
    return build(tf.GPT2ForSequenceClassification, config)


def llama_classifier(**settings):
    config = tf.LlamaConfig(**SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 3} | settings)
    return build(tf.LlamaForSequenceClassification, config)


PATCHES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
"""A tower for an image of 8 × 8 pixels, of which it makes five places: four patches and a class token."""


def clip():
    sizes = SIZES | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    vision = PATCHES | {"image_size": 8, "patch_size": 4}
    config = tf.CLIPConfig(text_config=sizes, vision_config=vision, projection_dim=12)
    return build(tf.CLIPModel, config)


def llava():
    """Four tokens of id 30 stand for an image."""
    vision = tf.CLIPVisionConfig(**PATCHES, image_size=8, patch_size=4)
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}),
        vision_config=vision, image_token_index=30, image_seq_length=4,
    )  # fmt: skip
    return build(tf.LlavaForConditionalGeneration, config)


def speech_to_text():
    """Of 32 frames of 4 numbers its encoder makes 8 places."""
    config = tf.Speech2TextConfig(
        vocab_size=31, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, input_feat_per_channel=4, conv_channels=8,
        max_source_positions=64, max_target_positions=16, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    return build(tf.Speech2TextForConditionalGeneration, config, "eager")


class TokensFirst(torch.nn.Module):
    """A causal language model of one layer, whose MLP is given all tokens in one dimension, those of each place first:
    ``[T·B, d]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)
        mlp = (torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8))
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(*mlp)])

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids).transpose(0, 1).cumsum(0)
        x = x + self.layers[0](x.reshape(-1, 8)).view(x.shape)
        return self.head(x.transpose(0, 1))


def tokens_first():
    model = TokensFirst().double().eval()
    models.randomise(model, 0)
    return model
