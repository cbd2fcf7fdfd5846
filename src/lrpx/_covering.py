"""What a model says of an image parts of which are covered, and which parts these can be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from lrpx import tasks
from lrpx._images import Patches
from lrpx.errors import InputError, ModelError
from lrpx.model import AT_A_TIME
from lrpx.perturbations import READS, _different, check_reads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from lrpx.inputs import Row
    from lrpx.model import BoundModel
    from lrpx.parts import Part
    from lrpx.questions import Answers, Questions
    from lrpx.targets import Target

CELLS: Final = ("patches", "pixels")
"""What can be covered at once."""
FILLS: Final = {
    "zero": "0 after the processor's normalisation, which is the mean colour of the images that it was made for",
    "mean": "the image's own mean colour",
    "blur": "the image itself, blurred",
}
"""What stands in the place of a covered cell."""
FIRST: Final = "first"
"""Beside :data:`~lrpx.perturbations.READS`: 1 where the explained class has the largest logit, 0 elsewhere."""

_SLAB: Final = 4
"""So many batches of covered images are made at a time."""


def cells_of(model: BoundModel, row: Row, kind: str) -> Patches | None:
    """The patches that the model cuts the image of a row into, None where it does not; or its pixels, each alone."""
    if kind == "patches":
        return model.patches(row)
    rows, columns = pixels_of(model, row).shape[-2:]
    return Patches(rows, columns, 1, 1)


def pixels_of(model: BoundModel, row: Row) -> Tensor:
    """``[channel, row, column]``: the image of a row as the model is given it.

    Raises:
        ModelError: it has other dimensions.
    """
    found = row.arguments[tasks.signal_argument(model.module, model.task)][0]
    if found.ndim != 3:
        raise ModelError(f"the model's image has {found.ndim} dimensions; pass one of [channel, row, column]")
    return found


def by_pixel(parts: Mapping[str, Part], patches: Patches | None, shape: tuple[int, int], method: str) -> Tensor:
    """``[R, C]``: the relevance of pixels summed over their channels, or where a method knows only patches, theirs
    spread over their pixels.

    Raises:
        InputError: the method found neither.
    """
    if "pixels" in parts:
        return parts["pixels"].values.double().reshape(-1, *shape).sum(0)
    if "patches" in parts and patches is not None:
        return patches.spread(parts["patches"].values.double(), *shape)
    raise InputError(f"{method} found no relevance of pixels or patches; use another method, such as attnlrp")


def outputs(
    model: BoundModel,
    questions: Questions,
    answers: Answers,
    covered: Sequence[NDArray[np.bool_]],
    cells: Sequence[Patches],
    reads: Sequence[str],
    fill: str = "zero",
    batch_size: int = AT_A_TIME,
) -> list[NDArray[np.float64]]:
    """What the model says of images some cells of which are covered; each different set is run once.

    Args:
        model: the model.
        questions: ``K`` of them.
        answers: what the model says to them as they are.
        covered: for each question ``[S_k, N_k]``, True at the cells that are covered.
        cells: for each question, the cells of its image.
        reads: what is read, names of :data:`~lrpx.perturbations.READS`, or :data:`FIRST`.
        fill: what stands in their place, one of :data:`FILLS`.
        batch_size: the most images run together.

    Returns:
        For each question ``[S_k, len(reads)]``.

    Raises:
        InputError: something cannot be read.
        TargetError: there is no probability of what is explained.
        NonFiniteError: NaN or infinity in an output.
    """
    check_reads(model, [each for each in reads if each != FIRST], answers.targets)
    resolved = questions.with_targets(answers.targets)
    argument = tasks.signal_argument(model.module, model.task)
    shapes = [pixels_of(model, resolved.row_of(i)).shape[-2:] for i in range(len(resolved))]
    grids = [each.places(*shape) for each, shape in zip(cells, shapes, strict=True)]
    filled = [_fill(resolved.row_of(i).arguments[argument], fill) for i in range(len(resolved))]
    places, jobs = _different(covered)
    found = np.empty((len(jobs), len(reads)))
    for start in range(0, len(jobs), batch_size * _SLAB):
        chosen = range(start, min(start + batch_size * _SLAB, len(jobs)))
        some = resolved.alone(jobs[job][0] for job in chosen)
        rows = tuple(
            _covered(row, argument, filled[jobs[job][0]], grids[jobs[job][0]], jobs[job][1])
            for row, job in zip(some.rows, chosen, strict=True)
        )
        said = model.values(
            replace(some, rows=rows), batch_size=batch_size, read=_reader(answers, jobs, chosen, reads)
        )  # fmt: skip
        found[list(chosen)] = said.numpy()
    return [found[each] for each in places]


def _reader(answers: Answers, jobs: Sequence[tuple[int, Any]], chosen: range, reads: Sequence[str]) -> Any:
    def read(number: int, target: Target, logits: Tensor) -> Tensor:
        full = answers.logits[jobs[chosen[number]][0]]
        each = []
        for name in reads:
            if name == FIRST:
                each.append((logits.argmax(-1) == getattr(target, "token", -1)).double())
            else:
                each.append(READS[name](target, logits, full, True).double())
        return torch.stack(each)

    return read


def _covered(row: Row, argument: str, filled: Tensor, grid: Tensor, chosen: NDArray[np.bool_]) -> Row:
    """A row with another image, which is covered where ``chosen`` says so of the cells; no cell is −1."""
    hidden = torch.from_numpy(np.append(chosen, False))[grid]
    pixels = row.arguments[argument]
    changed = torch.where(hidden.to(pixels.device), filled, pixels)
    return replace(row, arguments={**row.arguments, argument: changed}, where="")


def _fill(pixels: Tensor, fill: str) -> Tensor:
    """What stands in the place of the pixels ``[1, channel, row, column]`` that are covered.

    Raises:
        InputError: there is no such thing.
    """
    if fill == "zero":
        return torch.zeros_like(pixels)
    if fill == "mean":
        return pixels.mean((2, 3), keepdim=True).expand_as(pixels)
    if fill != "blur":
        raise InputError(f"nothing is called {fill!r} that could cover; choose of {', '.join(FILLS)}")
    values = pixels
    for axis in (2, 3):  # a Gaussian of a tenth of the side, one axis after the other, renormalised at the edge
        side = pixels.shape[axis]
        places = torch.arange(side, dtype=pixels.dtype, device=pixels.device)
        weights = torch.softmax(-((places[:, None] - places) ** 2) / (2 * (side / 10) ** 2), 1)
        values = torch.einsum("bcrw,qr->bcqw" if axis == 2 else "bcrw,qw->bcrq", values, weights)
    return values
