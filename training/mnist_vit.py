"""Make a model of transformers of a ViT that was trained on MNIST elsewhere (github.com/researchase/vit_mnist, MIT).

    python training/mnist_vit.py --weights vit_mnist/vit_mnist_gpu.pt --mnist mnist --out runs/vit-mnist

Nothing is trained: the weights are renamed. The model reads 28 x 28 digits in 7 x 7 patches; it has 6 layers, 4 heads
of 64 numbers each and no biases at queries, keys and values. Printed is its accuracy on MNIST's test images. test.npz
has the first 1,000 of these as ``x`` and ``y``.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

MEAN, STD = 0.1307, 0.3081
NAMES = {
    "0.norm": "layernorm_before",
    "0.fn.to_out.0": "attention.o_proj",
    "1.norm": "layernorm_after",
    "1.fn.net.0": "mlp.fc1",
    "1.fn.net.3": "mlp.fc2",
}


def idx(path: Path) -> np.ndarray:
    """The array of a gzipped idx file."""
    with gzip.open(path) as file:
        data = file.read()
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def made(old: dict[str, torch.Tensor]) -> ViTForImageClassification:
    """The model with these weights."""
    width, layers = old["cls_token"].shape[-1], 1 + max(int(name.split(".")[2]) for name in old if "layers" in name)
    inner = old["transformer.layers.0.0.fn.to_out.0.weight"].shape[1]
    config = ViTConfig(
        image_size=28, patch_size=4, num_channels=1, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=inner // 64, head_dim=64, qkv_bias=False, num_labels=10, layer_norm_eps=1e-5,
        intermediate_size=old["transformer.layers.0.1.fn.net.0.weight"].shape[0],
        id2label={i: str(i) for i in range(10)}, label2id={str(i): i for i in range(10)},
    )  # fmt: skip
    new = {
        "vit.embeddings.cls_token": old["cls_token"],
        "vit.embeddings.position_embeddings": old["pos_embedding"],
        "vit.embeddings.patch_embeddings.projection.weight": old["to_patch_embedding.1.weight"].view(width, 1, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": old["to_patch_embedding.1.bias"],
        "vit.layernorm.weight": old["mlp_head.0.weight"],
        "vit.layernorm.bias": old["mlp_head.0.bias"],
        "classifier.weight": old["mlp_head.1.weight"],
        "classifier.bias": old["mlp_head.1.bias"],
    }
    for layer in range(layers):
        for before, after in NAMES.items():
            for kind in ("weight", "bias"):
                new[f"vit.layers.{layer}.{after}.{kind}"] = old[f"transformer.layers.{layer}.{before}.{kind}"]
        thirds = old[f"transformer.layers.{layer}.0.fn.to_qkv.weight"].chunk(3)
        for name, value in zip("qkv", thirds, strict=True):
            new[f"vit.layers.{layer}.attention.{name}_proj.weight"] = value
    model = ViTForImageClassification(config).eval()
    model.load_state_dict({name: value.contiguous() for name, value in new.items()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE")
    parser.add_argument("--mnist", type=Path, required=True, metavar="FOLDER", help="with the idx files of the test")
    parser.add_argument("--out", type=Path, required=True, help="write the model and test.npz into this folder")
    options = parser.parse_args()
    model = made(torch.load(options.weights, map_location="cpu", weights_only=True))
    x = idx(next(options.mnist.glob("t10k-images*.gz")))
    y = idx(next(options.mnist.glob("t10k-labels*.gz")))
    right = 0
    with torch.no_grad():
        for start in range(0, len(x), 500):
            pixels = (torch.from_numpy(x[start : start + 500].copy()).float()[:, None] / 255 - MEAN) / STD
            found = model(pixel_values=pixels).logits.argmax(-1)
            right += int((found.numpy() == y[start : start + 500]).sum())
    model.save_pretrained(options.out)
    ViTImageProcessorPil(size={"height": 28, "width": 28}, image_mean=[MEAN], image_std=[STD]).save_pretrained(
        options.out
    )
    np.savez_compressed(options.out / "test.npz", x=x[:1000], y=y[:1000])
    print(json.dumps({"test_rows": len(y), "accuracy": right / len(y)}))


if __name__ == "__main__":
    main()
