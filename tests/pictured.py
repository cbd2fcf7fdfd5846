"""A tiny random ViT, its processor, and images for it."""

from __future__ import annotations

import numpy as np
import torch
import transformers as tf

SIDE, PATCH, CLASSES = 16, 4, 5


def vit(**how):
    torch.manual_seed(0)
    names = {i: f"c{i}" for i in range(CLASSES)}
    config = tf.ViTConfig(
        image_size=SIDE, patch_size=PATCH, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=CLASSES, id2label=names, label2id={name: i for i, name in names.items()},
        initializer_range=0.3, **how,
    )  # fmt: skip
    return tf.ViTForImageClassification(config).eval()


def processor(side=SIDE):
    return tf.ViTImageProcessorPil(size={"height": side, "width": side})


def saved(path):
    """The model as a folder, for the command."""
    vit().save_pretrained(path)
    processor().save_pretrained(path)
    return path


def arrays(path):
    """An npz file of six images, with labels and masks."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 255, (6, 20, 20, 3), dtype=np.uint8)
    np.savez(path, x=x, y=np.array([0, 1, 2, 3, 4, 0]), mask=draw.random((6, 20, 20)) < 0.4)
    return path
