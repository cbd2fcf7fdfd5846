"""Train a linear head on a frozen DINOv2 backbone: photographs in groups, or CIFAR-10.

    python training/image_heads.py --backbone runs/models/dinov2 --photographs imagenet_sample --side 112 \\
        --out runs/dinov2-groups
    python training/image_heads.py --backbone runs/models/dinov2 --train cifar10/train.npz --test cifar10/test.npz \\
        --side 84 --limit 3000 --out runs/dinov2-cifar

Accuracy 0.7475 on 198 photographs (0.6061 of them are of the largest group), and 0.7020 on CIFAR-10's 2,000 test
images; one and two minutes of one core.

The photographs' folder has classes.tsv with the columns ``file`` and ``group``; every fifth row of a group is tested
and not trained on. The npz files have ``x`` (uint8, ``[N, height, width, 3]``) and ``y``.

The backbone is not changed, but perhaps cut: the head is a logistic regression, with a squared penalty, on what
``Dinov2ForImageClassification`` gives its head, the class token beside the mean of the patches, after as many blocks as
are best. Their number and the strength of the penalty are chosen by the accuracy on a fifth of the rows that are
trained on; ``--blocks`` sets the number. Printed are the accuracy on the test rows, the mean of the classes'
accuracies, and the share of the largest class. The features are scaled for the fit only: the scale is part of the
head's weights. Of photographs, test.csv has the test images and their groups, as ``lrpx benchmark pixels`` reads them.
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
def features(
    model: Dinov2Model, processor: ViTImageProcessorPil, images: Sequence[Image.Image | Path]
) -> dict[int, torch.Tensor]:
    """By the number of blocks, class token and mean of the patches, ``[N, 2D]``."""
    found = []
    for start in range(0, len(images), BATCH):
        batch = [
            Image.open(each).convert("RGB") if isinstance(each, Path) else each
            for each in images[start : start + BATCH]
        ]
        every = model(**processor(batch, return_tensors="pt"), output_hidden_states=True).hidden_states
        states = [model.layernorm(each) for each in every[1:]]
        found.append([torch.cat([each[:, 0], each[:, 1:].mean(1)], 1) for each in states])
    return {i: torch.cat(each) for i, each in enumerate(zip(*found, strict=True), 1)}


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
    parser.add_argument("--limit", type=int, help="train on so many of the npz file, evenly spaced")
    parser.add_argument("--blocks", type=int, help="of the backbone; the best number of them if it is left out")
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
        arrays = [(part["x"], part["y"]) for part in parts]
        chosen = np.linspace(0, len(arrays[0][1]) - 1, options.limit or len(arrays[0][1])).astype(int)
        arrays[0] = arrays[0][0][chosen], arrays[0][1][chosen]
        images = [Image.fromarray(each) for x, _ in arrays for each in x]
        y = torch.cat([torch.from_numpy(each).long() for _, each in arrays])
        tested = np.repeat([False, True], [len(each) for _, each in arrays])
        names = CIFAR
    processor = ViTImageProcessorPil(
        size={"height": options.side, "width": options.side},
        resample=Image.Resampling.BICUBIC,
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    backbone = Dinov2Model.from_pretrained(options.backbone).eval()
    x = features(backbone, processor, images)
    x = x if options.blocks is None else {options.blocks: x[options.blocks]}
    train_y, test_y = y[~tested], y[tested]
    order = torch.from_numpy(np.random.default_rng(SEED).permutation(len(train_y)))
    held, rest = order[: len(order) // 5], order[len(order) // 5 :]
    tried = {}
    for blocks, each in x.items():
        for penalty in PENALTIES:
            rows = each[~tested]
            weight, bias = fit(rows[rest], train_y[rest], len(names), penalty)
            right = (rows[held] @ weight.T + bias).argmax(1) == train_y[held]
            tried[blocks, penalty] = float(right.float().mean())
    blocks, penalty = max(tried, key=tried.__getitem__)
    weight, bias = fit(x[blocks][~tested], train_y, len(names), penalty)

    settings = Dinov2Config.from_pretrained(options.backbone).to_dict()
    for stages in ("out_features", "out_indices", "stage_names"):
        settings.pop(stages, None)  # of the whole backbone
    settings |= {"num_hidden_layers": blocks, "id2label": dict(enumerate(names))}
    config = Dinov2Config(**settings | {"label2id": {name: i for i, name in enumerate(names)}})
    model = Dinov2ForImageClassification(config).eval()
    kept = model.dinov2.state_dict()
    model.dinov2.load_state_dict({name: value for name, value in backbone.state_dict().items() if name in kept})
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
    right = ((x[blocks][tested] @ weight.T + bias).argmax(1) == test_y).float()
    each = {name: round(float(right[test_y == i].mean()), 4) for i, name in enumerate(names)}
    entry = {
        "rows": len(train_y),
        "test_rows": len(test_y),
        "side": options.side,
        "blocks": blocks,
        "penalty": penalty,
        "held_out": {str(depth): max(each for key, each in tried.items() if key[0] == depth) for depth in x},
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
