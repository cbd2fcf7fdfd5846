"""Images: read from files, and the pixels of a model as a person sees them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence


def open_image(path: str | os.PathLike[str], channels: int | None) -> Any:
    """A PIL image from a file, turned as its camera says, in the colours that the model takes.

    Args:
        path: the file.
        channels: how many channels the model takes: 1 is read as grey, all else as red, green and blue.

    Raises:
        InputError: there is no such file, it is no image, or it is cut short.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError("reading an image needs Pillow: pip install 'lrpx[images]'") from error
    file = Path(path)
    shown = repr(os.fsdecode(path)[:200])
    mend = "pass pixel_values, a PIL image, or the path of a file that is one"
    try:
        if not file.is_file():
            raise InputError(f"the image is {shown}, and there is no such file; {mend}")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as opened:
                whole = _of_eight_bits(ImageOps.exif_transpose(opened), shown)
                return whole.convert("L" if channels == 1 else "RGB")
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"the image is {shown}, which has too many pixels to be read; {mend}, made smaller") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow says of broken files
        told = "no image" if type(error).__name__ == "UnidentifiedImageError" else f"no whole image ({error})"
        told = " ".join(told.split())
        raise InputError(f"the image is {shown}, a file that holds {told[:200]}; {mend}") from None


def as_of_a_file(image: Any, channels: int | None) -> Any:
    """A PIL image as its file is read: turned as its camera says (as pipelines of transformers do), and in the colours
    that the model takes where it holds others than its numbers say: palettes, bits, 16 bits, floats. All else as it is.

    Raises:
        InputError: nothing tells what its numbers are.
    """
    if not hasattr(image, "getexif"):
        return image
    from PIL import ImageOps

    whole = ImageOps.exif_transpose(image)
    if whole.mode.startswith(("P", "1", "I", "F")):
        return _of_eight_bits(whole, f"of mode {whole.mode}").convert("L" if channels == 1 else "RGB")
    return whole


def _of_eight_bits(image: Any, shown: str) -> Any:
    """A PIL image of one channel of more than 8 bits, which Pillow would cut off at 255, with 8; any other as it is.

    Raises:
        InputError: nothing tells what its numbers are.
    """
    import numpy as np
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    numbers = np.asarray(image)
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.ceil(numbers / 257).astype(np.uint8))  # what is not 0 stays so, as in a mask
    is_share = image.mode == "F" and 0 < numbers.max() <= 1
    if is_share or not (numbers.min() >= 0 and numbers.max() <= 255):
        raise InputError(
            f"the image is {shown}, whose numbers are from {numbers.min():g} to {numbers.max():g}, and nothing tells "
            "which is white; pass a file with 8 or 16 bits for a channel, or pixel_values"
        )
    return image


def reader_of(processor: Any) -> Any:
    """What a processor does to the colours of images, as fields of the names that transformers has for it; timm's says
    it in a dictionary."""
    reader = getattr(processor, "image_processor", processor)
    said = getattr(reader, "data_config", None)
    if not (isinstance(said, Mapping) and {"mean", "std"} <= said.keys()):
        return reader
    return SimpleNamespace(do_rescale=True, do_normalize=True, image_mean=said["mean"], image_std=said["std"])


def as_shown(pixels: Tensor, processor: Any = None) -> Tensor:
    """What a model was given, as a person sees it: ``[row, column, 3]``, ``uint8``.

    The processor's own normalisation is undone; without one, the least number is black and the largest white.

    Args:
        pixels: ``[channel, row, column]``.
        processor: of the model, or None.

    >>> as_shown(torch.tensor([[[0.0, 1.0]]])).tolist()
    [[[0, 0, 0], [255, 255, 255]]]
    """
    values = pixels.detach().to("cpu", torch.float64)
    reader = reader_of(processor)
    rescales, normalises = (getattr(reader, name, False) for name in ("do_rescale", "do_normalize"))
    if rescales or normalises:
        mean, std = (_by_channel(getattr(reader, name, None), len(values)) for name in ("image_mean", "image_std"))
        if getattr(reader, "include_top", False):  # EfficientNet's divides once more
            values = values * std[:, None, None]
        if normalises:
            values = values * std[:, None, None] + mean[:, None, None]
        factor = getattr(reader, "rescale_factor", None) if rescales else 1.0
        is_moved = rescales and getattr(reader, "rescale_offset", False)  # to −1 for black
        values = (values + is_moved) / (255 * float(factor or 1 / 255))
    else:
        low, high = float(values.min()), float(values.max())
        values = (values - low) / ((high - low) or 1.0)
    if getattr(reader, "do_flip_channel_order", False):  # blue, green, red
        values = values.flip(0)
    if len(values) != 3:
        values = values.mean(0, keepdim=True).expand(3, -1, -1)
    return (values.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def _by_channel(given: Sequence[float] | float | None, channels: int) -> Tensor:
    numbers = torch.tensor(0.5 if given is None else given, dtype=torch.float64).flatten()
    return numbers if len(numbers) == channels else numbers.mean().expand(channels)


@dataclass(frozen=True)
class Patches:
    """A grid of patches, from the image's upper left corner.

    Args:
        rows: of the grid.
        columns: of the grid.
        height: of a patch, in pixels.
        width: of a patch, in pixels.

    >>> Patches(1, 2, 2, 2).summed(torch.ones(2, 5))
    tensor([[4., 4.]])
    """

    rows: int
    columns: int
    height: int
    width: int

    def __len__(self) -> int:
        return self.rows * self.columns

    def places(self, height: int, width: int) -> Tensor:
        """``[R, C]``: of each pixel of an image the number of its patch, in reading order; −1 where it is in none."""
        row, column = torch.arange(height) // self.height, torch.arange(width) // self.width
        inside = (row < self.rows)[:, None] & (column < self.columns)
        return torch.where(inside, row[:, None] * self.columns + column, -1)

    def summed(self, values: Tensor) -> Tensor:
        """``[rows, columns]`` from ``[…, R, C]``: the sum over the pixels of each patch, and all dimensions before."""
        values = values.reshape(-1, *values.shape[-2:]).sum(0)
        place = self.places(*values.shape)
        sums = values.new_zeros(len(self)).index_add_(0, place[place >= 0], values[place >= 0])
        return sums.reshape(self.rows, self.columns)

    def spread(self, values: Tensor, height: int, width: int) -> Tensor:
        """``[R, C]`` from ``[rows, columns]``: each number evenly over the pixels of its patch, 0 beside them."""
        place = self.places(height, width)
        inside = place >= 0
        sizes = place[inside].bincount(minlength=len(self)).to(values.dtype)
        spread = values.new_zeros(height, width)
        spread[inside] = (values.flatten() / sizes.clamp(min=1))[place[inside]]
        return spread
