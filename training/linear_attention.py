"""Do explanations depend on the brackets? Two linear-attention networks of one function (You et al. 2025, §3).

    python training/linear_attention.py --data ../shared/data/mnist

Both are queries, keys and values of pixels (MNIST at 14×14, a sequence of 196) and no softmax, so that the product is
associative: ``(Q Kᵀ) V`` in one, ``Q (Kᵀ V)`` in the other. They share their weights, trained here in seconds. Printed
is the mean over test images of the Pearson correlation, over pixels, of each rule's relevance in one with that in the
other, and of each with leave-one-out (the pixel set to 0); as it is, and with each map divided by its sum as the paper
has it, which turns the sign of a map whose sum is negative.
"""

from __future__ import annotations

import argparse
import gzip
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lrpx
from lrpx.rules import Epsilon, Gamma, ZPlus, with_gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEED, WIDTH, SIDE, CLASSES = 1, 32, 14, 10
PIXELS = SIDE * SIDE
RATE, BATCH = 1e-3, 128


class LinearAttention(nn.Module):
    """Logits ``[B, 10]`` of images ``[B, 196]``; ``left`` says where the brackets are."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        self.left = left
        self.embedding = nn.Linear(1, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(PIXELS * WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embedding(pixels.unsqueeze(-1))
        q, k, v = self.query(x), self.key(x) / SIDE, self.value(x)
        mixed = (q @ k.mT) @ v if self.left else q @ (k.mT @ v)
        return self.output(mixed.flatten(1))  # type: ignore[no-any-return]


def twins() -> tuple[LinearAttention, LinearAttention]:
    """Left and right, with the same weights."""
    left, right = LinearAttention(left=True), LinearAttention(left=False)
    right.load_state_dict(left.state_dict())
    return left, right


def images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Pixels ``[N, 196]`` from 0 to 1, each the mean of four, and digits ``[N]``; ``part``: ``train`` or ``t10k``."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=16).copy()).view(-1, 1, 28, 28)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        digits = torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64))
    return F.avg_pool2d(pixels.float() / 255, 2).flatten(1), digits


def train(model: nn.Module, pixels: Tensor, digits: Tensor, epochs: int) -> None:
    """Adam on the cross-entropy."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    order = torch.Generator().manual_seed(SEED)
    for _ in range(epochs):
        for group in torch.randperm(len(pixels), generator=order).split(BATCH):
            F.cross_entropy(model(pixels[group]), digits[group]).backward()
            optimizer.step()
            optimizer.zero_grad()


# ----------------------------------------------------------------------------------- explanations


def pairwise(op: Callable[..., Tensor], /, a: Tensor, b: Tensor) -> Tensor:
    """Each product by itself gives its two factors half (Achtibat et al. 2024, Eq. 13)."""
    y = op(a, b)
    return with_gradient_of(y, 0.5 * y)


PAIRWISE = replace(lrpx.ATTNLRP, name="AttnLRP, each product by itself", matmul=pairwise)
RECIPES = {
    PAIRWISE.name: PAIRWISE,
    "AttnLRP, every factor alike (`attnlrp`)": lrpx.ATTNLRP,
    "CP-LRP (`lrp`)": lrpx.LRP,
    "AttnLRP, ε = 1e-6": replace(lrpx.ATTNLRP, linear=Epsilon(1e-6)),
    "AttnLRP, γ = 0.25": replace(lrpx.ATTNLRP, linear=Gamma(0.25)),
    "AttnLRP, z⁺": replace(lrpx.ATTNLRP, linear=ZPlus()),
    "Gradient×Input": lrpx.GRADIENT,
}


def relevance(model: nn.Module, recipe: lrpx.Recipe, pixels: Tensor, digits: Tensor) -> Tensor:
    """``[N, 196]``: of each image's pixels, for the logit of its digit."""
    with lrpx.propagate(model, recipe, ()) as trace:
        logits = model(pixels)
    trace.explain(logits.gather(1, digits[:, None]).sum(), outputs=logits)
    return trace.relevance("pixels")


def leave_one_out(model: nn.Module, pixels: Tensor, digits: Tensor) -> Tensor:
    """``[N, 196]``: what the logit loses when a pixel is 0."""
    found = []
    with torch.no_grad():
        for image, digit in zip(pixels, digits, strict=True):
            without = image.expand(PIXELS, PIXELS) * (1 - torch.eye(PIXELS))
            found.append(model(image[None])[0, digit] - model(without)[:, digit])
    return torch.stack(found)


def integrated_gradients(model: nn.Module, pixels: Tensor, digits: Tensor) -> Tensor:
    """``[N, 196]``: from the black image; the logit is of degree 3 on the way, so three nodes are exact."""
    places, weights = np.polynomial.legendre.leggauss(3)
    total = torch.zeros_like(pixels)
    for place, weight in zip(places, weights, strict=True):
        x = ((place + 1) / 2 * pixels).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).gather(1, digits[:, None]).sum(), x)
        total += weight / 2 * gradient
    return pixels * total


def correlation(a: Tensor, b: Tensor) -> float:
    """The mean over images of the Pearson correlation over pixels."""
    a, b = (x - x.mean(1, keepdim=True) for x in (a.double(), b.double()))
    return float((F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1).mean())


def rows(left: nn.Module, right: nn.Module, pixels: Tensor, digits: Tensor) -> Iterator[tuple[str, list[float]]]:
    """For each explanation: left with right, left and right with leave-one-out; these two of maps of sum one, too."""
    both = (left, right)
    explained: dict[str, tuple[Tensor, Tensor]] = {
        "LOO": tuple(leave_one_out(model, pixels, digits) for model in both),  # type: ignore[dict-item]
        "Integrated gradients": tuple(integrated_gradients(model, pixels, digits) for model in both),  # type: ignore[dict-item]
    }
    for name, recipe in RECIPES.items():
        explained[name] = tuple(relevance(model, recipe, pixels, digits) for model in both)  # type: ignore[assignment]
    truth = explained["LOO"]
    for name, (a, b) in explained.items():
        signs = [x.sum(1, keepdim=True).sign() for x in (a, b, *truth)]
        found = [correlation(a, b), correlation(a, truth[0]), correlation(b, truth[1])]
        found += [correlation(a * signs[0], truth[0] * signs[2]), correlation(b * signs[1], truth[1] * signs[3])]
        yield name, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's four idx files")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--images", type=int, default=256, help="test images that are explained, each for its prediction"
    )
    options = parser.parse_args()
    torch.manual_seed(SEED)
    left, right = twins()
    train(right, *images(options.data, "train"), options.epochs)
    left.load_state_dict(right.state_dict())
    pixels, digits = images(options.data, "t10k")
    with torch.no_grad():
        a, b = (torch.cat([model(group) for group in pixels.split(500)]) for model in (left, right))
    print(f"accuracy {(b.argmax(1) == digits).float().mean():.4f}; ", end="")
    print(f"logits differ by {(a - b).abs().max() / b.abs().max():.1e} of the largest")
    print("| explanation | left–right | left–LOO | right–LOO | left–LOO, sum one | right–LOO, sum one |")
    print("|---|---|---|---|---|---|")
    for name, found in rows(left, right, pixels[: options.images], b[: options.images].argmax(1)):
        print(f"| {name} | " + " | ".join(f"{value:.4f}" for value in found) + " |")


if __name__ == "__main__":
    main()
