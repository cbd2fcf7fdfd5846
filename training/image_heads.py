"""Train a linear head on a frozen DINOv2 backbone: photographs in groups, or CIFAR-10.

    python training/image_heads.py --backbone runs/models/dinov2 --photographs imagenet_sample --side 112 \\
        --out runs/dinov2-groups
    python training/image_heads.py --backbone runs/models/dinov2 --train cifar10/train.npz --test cifar10/test.npz \\
        --side 112 --out runs/dinov2-cifar

The photographs' folder has classes.tsv with the columns ``file`` and ``group``; every fifth row of a group is tested
and not trained on. The npz files have ``x`` (uint8, ``[N, height, width, 3]``) and ``y``.

The backbone is not changed; the head is a logistic regression, with a squared penalty, on what
``Dinov2ForImageClassification`` gives its head: the class token beside the mean of the patches. The strength of the
penalty is chosen by the accuracy on a fifth of the rows that are trained on. Printed are the accuracy on the test rows,
the mean of the classes' accuracies, and the share of the largest class. The features are scaled for the fit only: the
scale is part of the head's weights. Of photographs, test.csv has the test images and their groups, as ``lrpx benchmark
pixels`` reads them.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import Dinov2Config, Dinov2ForImageClassification, Dinov2Model, ViTImageProcessorPil

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED, BATCH = 1, 50
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def photographs(folder: Path) -> tuple[list[Path], list[str], np.ndarray]:
    """Files, the group of each, and which are tested."""
    with open(folder / "classes.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or not {"file", "group"} <= rows[0].keys():
        raise SystemExit(f"{folder / 'classes.tsv'} needs a header with the columns file and group, and rows")
    groups = [row["group"] for row in rows]
    tested = np.zeros(len(rows), bool)
    for group in set(groups):
        tested[[i for i, each in enumerate(groups) if each == group][4::5]] = True
    return [folder / row["file"] for row in rows], groups, tested


@torch.no_grad()
def features(model: Dinov2Model, processor: ViTImageProcessorPil, images: Sequence[Image.Image | Path]) -> torch.Tensor:
    """Class token and mean of the patches, ``[N, 2D]``."""
    found = []
    for start in range(0, len(images), BATCH):
        batch = [
            Image.open(each).convert("RGB") if isinstance(each, Path) else each
            for each in images[start : start + BATCH]
        ]
        states = model(**processor(batch, return_tensors="pt")).last_hidden_state
        found.append(torch.cat([states[:, 0], states[:, 1:].mean(1)], 1))
    return torch.cat(found)


def fit(x: torch.Tensor, y: torch.Tensor, classes: int, penalty: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the logistic regression with a squared penalty, on features scaled by their deviation."""
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / scale
    weight = torch.zeros(classes, x.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(x @ weight.T + bias, y) + penalty * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    weight, bias = weight.detach(), bias.detach()
    return weight / scale, bias - weight @ (mean / scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", type=Path, required=True, metavar="FOLDER", help="DINOv2 ViT-S/14")
    parser.add_argument("--photographs", type=Path, metavar="FOLDER", help="with classes.tsv")
    parser.add_argument("--train", type=Path, metavar="NPZ")
    parser.add_argument("--test", type=Path, metavar="NPZ")
    parser.add_argument("--side", type=int, default=224, help="of an image in pixels, a multiple of 14 (default 224)")
    parser.add_argument("--out", type=Path, required=True, help="write the model and its log into this folder")
    options = parser.parse_args()
    if (options.photographs is None) == (options.train is None) or (options.train is None) != (options.test is None):
        parser.error("give --photographs, or --train and --test")
    images: Sequence[Image.Image | Path]
    if options.photographs is not None:
        images, groups, tested = photographs(options.photographs)
        names: Sequence[str] = sorted(set(groups))
        y = torch.tensor([names.index(each) for each in groups])
    else:
        parts = [np.load(file, allow_pickle=False) for file in (options.train, options.test)]
        images = [Image.fromarray(each) for part in parts for each in part["x"]]
        y = torch.cat([torch.from_numpy(part["y"]).long() for part in parts])
        tested = np.repeat([False, True], [len(part["y"]) for part in parts])
        names = CIFAR
    processor = ViTImageProcessorPil(
        size={"height": options.side, "width": options.side},
        resample=Image.Resampling.BICUBIC,
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    backbone = Dinov2Model.from_pretrained(options.backbone).eval()
    x = features(backbone, processor, images)
    train_x, train_y, test_x, test_y = x[~tested], y[~tested], x[tested], y[tested]
    order = torch.from_numpy(np.random.default_rng(SEED).permutation(len(train_y)))
    held, rest = order[: len(order) // 5], order[len(order) // 5 :]
    tried = {}
    for penalty in PENALTIES:
        weight, bias = fit(train_x[rest], train_y[rest], len(names), penalty)
        right = (train_x[held] @ weight.T + bias).argmax(1) == train_y[held]
        tried[penalty] = float(right.float().mean())
    penalty = max(PENALTIES, key=tried.__getitem__)
    weight, bias = fit(train_x, train_y, len(names), penalty)

    config = Dinov2Config.from_pretrained(
        options.backbone,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    model = Dinov2ForImageClassification(config).eval()
    model.dinov2.load_state_dict(backbone.state_dict())
    model.classifier.load_state_dict({"weight": weight, "bias": bias})
    options.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    processor.save_pretrained(options.out)
    held_out = [each for each, held in zip(images, tested, strict=True) if held and isinstance(each, Path)]
    if held_out:
        with open(options.out / "test.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "label"])
            pairs = zip(held_out, test_y.tolist(), strict=True)
            writer.writerows((image.resolve(), names[label]) for image, label in pairs)
    right = ((test_x @ weight.T + bias).argmax(1) == test_y).float()
    each = {name: round(float(right[test_y == i].mean()), 4) for i, name in enumerate(names)}
    entry = {
        "rows": len(train_y),
        "test_rows": len(test_y),
        "side": options.side,
        "penalties": tried,
        "penalty": penalty,
        "accuracy": round(float(right.mean()), 4),
        "mean_of_classes": round(float(np.mean(list(each.values()))), 4),
        "largest_class": round(float(test_y.bincount().max() / len(test_y)), 4),
        "by_class": each,
        "cpu_minutes": round(time.process_time() / 60, 2),
    }
    (options.out / "log.json").write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(entry))


if __name__ == "__main__":
    main()
