"""Tiny random vision models in float64, and models as people write them themselves."""

from __future__ import annotations

import torch
import transformers as tf

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 4, "num_labels": 3, "initializer_range": 0.3,
}  # fmt: skip
TOWER = {key: value for key, value in SIZES.items() if key != "num_labels"}
WORDS = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 31,
    "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SWIN = {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
    "num_labels": 3, "initializer_range": 0.3,
}  # fmt: skip
BUILT = {
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**SIZES)),
    "deit": lambda: tf.DeiTForImageClassificationWithTeacher(tf.DeiTConfig(**SIZES)),
    "dinov2": lambda: tf.Dinov2ForImageClassification(tf.Dinov2Config(**SIZES)),
    "registers": lambda: tf.Dinov2WithRegistersForImageClassification(
        tf.Dinov2WithRegistersConfig(**SIZES, num_register_tokens=2)
    ),
    "beit": lambda: tf.BeitForImageClassification(tf.BeitConfig(**SIZES, use_relative_position_bias=True)),
    "swin": lambda: tf.SwinForImageClassification(tf.SwinConfig(**SWIN)),
    "clip": lambda: tf.CLIPForImageClassification(tf.CLIPConfig(vision_config=TOWER, text_config=WORDS, num_labels=3)),
    "siglip": lambda: tf.SiglipForImageClassification(
        tf.SiglipConfig(vision_config=TOWER, text_config=WORDS, num_labels=3)
    ),
    "convnext": lambda: tf.ConvNextForImageClassification(
        tf.ConvNextConfig(
            patch_size=4, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, num_labels=3, image_size=16,
            layer_scale_init_value=0.5,
        )
    ),
    "resnet": lambda: tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=3)
    ),
}  # fmt: skip


def build(name, seed=0):
    """A model whose biases, learned tokens and positions are not 0, as in a trained one."""
    torch.manual_seed(seed)
    model = BUILT[name]().eval().double()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path and path.endswith("weight"):
                weight.uniform_(0.5, 1.5)
            elif any(part in path for part in ("bias", "token", "position", "class_embedding", "lambda")):
                weight.normal_(0, 0.3)
    return model


def image(seed=0, size=16, channels=3):
    torch.manual_seed(100 + seed)
    return torch.randn(channels, size, size, dtype=torch.float64)


class OwnViT(torch.nn.Module):
    """A vision transformer as people write one: patches by reshaping, fused queries, keys and values, no names of
    transformers."""

    def __init__(self, by="reshape"):
        super().__init__()
        torch.manual_seed(0)
        self.by = by
        self.embed = torch.nn.Linear(48, 16) if by != "conv" else torch.nn.Conv2d(3, 16, 4, 4)
        self.first = torch.nn.Parameter(torch.randn(1, 1, 16))
        self.where = torch.nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "n1": torch.nn.LayerNorm(16),
                    "qkv": torch.nn.Linear(16, 48),
                    "o": torch.nn.Linear(16, 16),
                    "n2": torch.nn.LayerNorm(16),
                    "m": torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 16)),
                }
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(16, 3)

    def patches(self, x):
        b = len(x)
        if self.by == "reshape":
            cut = x.reshape(b, 3, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, 16, 48)
            return self.embed(cut)
        if self.by == "unfold":
            return self.embed(torch.nn.functional.unfold(x, 4, stride=4).transpose(1, 2))
        return self.embed(x).flatten(2).transpose(1, 2)

    def forward(self, x):
        b = len(x)
        h = torch.cat([self.first.expand(b, -1, -1), self.patches(x)], 1) + self.where
        for block in self.blocks:
            q, k, v = block["qkv"](block["n1"](h)).reshape(b, 17, 3, 2, 8).permute(2, 0, 3, 1, 4)
            attended = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
            h = h + block["o"](attended.transpose(1, 2).reshape(b, 17, 16))
            h = h + block["m"](block["n2"](h))
        return self.head(h[:, 0])
