"""Train a vision transformer on CIFAR-10, from the first blocks of DINOv2 (ViT-S/14).

    python training/vit_cifar.py --start runs/models/dinov2 --train cifar10/train.npz --test cifar10/test.npz \\
        --out runs/vit-cifar

Accuracy 0.7160 on the 2,000 test images after three epochs over 10,000, 14 minutes of one core.

The model is a plain ``ViTForImageClassification`` of images of 32 x 32 in 8 x 8 patches of 4 x 4 pixels. Ten thousand
images are too few to learn attention from nothing, so it begins as DINOv2's first six blocks: their layer scales are
multiplied into the matrices before them, the patch convolution is composed with the bilinear enlargement of a 4 x 4
patch to the 14 x 14 that it was trained on, and the positions are interpolated to the 8 x 8 grid. Then the upper blocks
are trained, lower ones in smaller steps (each 0.8 of the one above); the embeddings and the first ``--frozen`` blocks
stay as they are, which saves a third of the work.

Images are shifted by up to 4 pixels, mirrored, and changed in brightness and contrast; in half of them a rectangle is
set to the mean colour, so that an image with parts at the mean is nothing new to the model.

The npz files have ``x`` (uint8, ``[N, 32, 32, 3]``) and ``y``. log.jsonl has the loss, and after each epoch the
accuracy on the test file, which chooses nothing: the weights of the last step are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from transformers import Dinov2Model, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 1
BLOCKS, SIDE, PATCH = 6, 32, 4
RATE, WARM, DECAY, LOWER, SMOOTH, BATCH = 3e-4, 0.06, 0.05, 0.8, 0.1, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[N, 3, 32, 32]`` from 0 to 1, and their labels."""
    with np.load(path, allow_pickle=False) as file:
        x, y = file["x"], file["y"]
    if x.shape[1:] != (SIDE, SIDE, 3) or x.dtype != np.uint8:
        raise SystemExit(f"{path} needs x of [N, {SIDE}, {SIDE}, 3], uint8; it has {x.shape}, {x.dtype}")
    return torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(y).long()


def normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def enlargement(old: int, new: int) -> torch.Tensor:
    """The matrix ``[new, old]`` of a bilinear enlargement."""
    unit = torch.eye(old).view(old, 1, 1, old)
    return functional.interpolate(unit, size=(1, new), mode="bilinear", align_corners=False).view(old, new).T


def begin(start: Path) -> ViTForImageClassification:
    """The model before training: DINOv2's first blocks as a ViT."""
    old = Dinov2Model.from_pretrained(start)
    kept: dict[str, torch.Tensor] = {}
    for name, value in old.state_dict().items():
        if name.startswith("encoder.layer."):
            _, _, block, inner = name.split(".", 3)
            if int(block) < BLOCKS and not inner.startswith("layer_scale"):
                inner = inner.replace("norm1.", "layernorm_before.").replace("norm2.", "layernorm_after.")
                kept[f"vit.layers.{block}.{inner}"] = value.clone()
    for i, block in enumerate(old.encoder.layer[:BLOCKS]):
        for last, scale in (("attention.o_proj", block.layer_scale1), ("mlp.fc2", block.layer_scale2)):
            kept[f"vit.layers.{i}.{last}.weight"] *= scale.lambda1.detach()[:, None]
            kept[f"vit.layers.{i}.{last}.bias"] *= scale.lambda1.detach()
    width, patch = old.config.hidden_size, old.config.patch_size
    convolution = old.embeddings.patch_embeddings.projection
    up = enlargement(PATCH, patch)
    kept["vit.embeddings.patch_embeddings.projection.weight"] = torch.einsum(
        "ocij,ia,jb->ocab", convolution.weight.detach(), up, up
    )
    kept["vit.embeddings.patch_embeddings.projection.bias"] = convolution.bias.detach()
    kept["vit.embeddings.cls_token"] = old.embeddings.cls_token.detach()
    kept["vit.embeddings.position_embeddings"] = old.embeddings.interpolate_pos_encoding(
        torch.zeros(1, (SIDE // PATCH) ** 2 + 1, width), SIDE // PATCH * patch, SIDE // PATCH * patch
    ).detach()
    kept["vit.layernorm.weight"], kept["vit.layernorm.bias"] = (
        old.layernorm.weight.detach(), old.layernorm.bias.detach(),
    )  # fmt: skip
    config = ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=width,
        num_hidden_layers=BLOCKS,
        num_attention_heads=old.config.num_attention_heads,
        intermediate_size=int(width * old.config.mlp_ratio),
        hidden_act="gelu",
        layer_norm_eps=old.config.layer_norm_eps,
        num_labels=len(LABELS),
        id2label=dict(enumerate(LABELS)),
        label2id={name: i for i, name in enumerate(LABELS)},
    )
    model = ViTForImageClassification(config)
    missing, unknown = model.load_state_dict(kept, strict=False)
    if unknown or any(not name.startswith("classifier.") for name in missing):
        raise SystemExit(f"{start} is no DINOv2 of this layout: missing {missing}, unknown {unknown}")
    return model


def groups(model: ViTForImageClassification) -> list[dict[str, Any]]:
    """The parameters by block, each with its own rate; biases, norms and embeddings without weight decay."""
    found: dict[tuple[int, bool], list[torch.nn.Parameter]] = {}
    for name, value in model.named_parameters():
        if not value.requires_grad:
            continue
        level = BLOCKS - 1 - int(name.split(".")[2]) if name.startswith("vit.layers.") else 0
        level = BLOCKS if name.startswith("vit.embeddings") else level
        found.setdefault((level, value.ndim == 2), []).append(value)
    return [
        {"params": values, "lr": RATE * LOWER**level, "weight_decay": DECAY if decays else 0.0}
        for (level, decays), values in found.items()
    ]


def freeze(model: ViTForImageClassification, blocks: int) -> None:
    """The embeddings and the first so many blocks are not trained; with 0 everything is."""
    for part in [model.vit.embeddings, *model.vit.layers[:blocks]] if blocks else []:
        part.requires_grad_(False)


def changed(x: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """A batch of images from 0 to 1, changed at random and normalized."""
    n = len(x)
    padded = functional.pad(x, (4, 4, 4, 4), mode="reflect")
    out = torch.empty_like(x)
    for i in range(n):
        top, left = draw.integers(0, 9, 2)
        out[i] = padded[i, :, top : top + SIDE, left : left + SIDE]
    flip = torch.from_numpy(draw.random(n) < 0.5)
    out[flip] = out[flip].flip(-1)
    contrast, light, colour = (
        torch.from_numpy(draw.uniform(-0.25, 0.25, (n, *shape))).float().view(n, -1, 1, 1) for shape in ((), (), (3,))
    )
    mean = out.mean((1, 2, 3), keepdim=True)
    out = normalized(((out - mean) * (1 + contrast) + mean * (1 + light) + 0.3 * colour * mean).clamp(0, 1))
    for i in np.flatnonzero(draw.random(n) < 0.5):
        height, width = draw.integers(4, 21, 2)
        top, left = draw.integers(0, SIDE - height + 1), draw.integers(0, SIDE - width + 1)
        out[i, :, top : top + height, left : left + width] = 0.0
    return out


@torch.no_grad()
def accuracy(model: ViTForImageClassification, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of images whose label has the largest logit."""
    model.eval()
    right = sum(
        int((model(pixel_values=normalized(images)).logits.argmax(-1) == labels).sum())
        for images, labels in zip(x.split(100), y.split(100), strict=True)
    )
    model.train()
    return right / len(y)


def train(
    model: ViTForImageClassification,
    trained: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    *,
    epochs: int,
    out: Path,
    say: Callable[..., None],
) -> float:
    """Train, write the model after each epoch, and return the accuracy on ``test`` at the end."""
    x, y = trained
    draw = np.random.default_rng(SEED)
    optimizer = torch.optim.AdamW(groups(model), fused=True)
    each = len(y) // BATCH
    steps = max(1, epochs * each)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1.0, WARM * steps), (steps - step) / steps)
    )
    say(rows=len(y), test_rows=len(test[1]), steps=steps, parameters=sum(p.numel() for p in model.parameters()))
    model.train()
    shown: list[float] = []
    last = 0.0
    for epoch in range(epochs):
        order = draw.permutation(len(y))
        for step in range(each):
            rows = torch.from_numpy(order[step * BATCH : (step + 1) * BATCH])
            logits = model(pixel_values=changed(x[rows], draw)).logits
            loss = functional.cross_entropy(logits, y[rows], label_smoothing=SMOOTH)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            shown.append(float(loss.detach()))
            if (step + 1) % 20 == 0:
                minutes = round(time.process_time() / 60, 2)
                say(epoch=epoch, step=step + 1, cpu_minutes=minutes, loss=round(float(np.mean(shown)), 4))
                shown = []
        last = accuracy(model, *test)
        model.save_pretrained(out)
        say(epoch=epoch + 1, cpu_minutes=round(time.process_time() / 60, 2), accuracy=round(last, 4))
    model.eval().requires_grad_(True)
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--start", type=Path, required=True, metavar="FOLDER", help="DINOv2 ViT-S/14")
    parser.add_argument("--train", type=Path, required=True, metavar="FILE")
    parser.add_argument("--test", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, help="write the model and its log into this folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--frozen", type=int, default=3, help="blocks that are not trained (default 3 of 6)")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = begin(options.start)
    freeze(model, options.frozen)
    options.out.mkdir(parents=True, exist_ok=True)
    ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=list(MEAN), image_std=list(STD)
    ).save_pretrained(options.out)
    with open(options.out / "log.jsonl", "w", encoding="utf-8") as log:

        def say(**entry: object) -> None:
            for file in (log, None):
                print(json.dumps(entry), file=file, flush=True)

        say(
            train=str(options.train),
            test=str(options.test),
            start=str(options.start),
            epochs=options.epochs,
            frozen=options.frozen,
        )
        train(model, read(options.train), read(options.test), epochs=options.epochs, out=options.out, say=say)


if __name__ == "__main__":
    main()
