"""Images and sounds, as a model takes them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from lrpx._images import as_of_a_file, open_image, reader_of
from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module


WIDEST: Final = 50.0
"""No processor makes larger numbers of colours that it has divided by 255."""


def signal(model: Module, processor: Any, given: Any, argument: str, *, is_image: bool) -> dict[str, Tensor]:
    """An image or a sound as the model's argument, a batch of one, as its processor reads it; a floating-point tensor
    is what a processor made.

    Args:
        model: the model.
        processor: what reads images for it; None where there is nothing.
        given: the image, or the path of one, or the sound.
        argument: the model's, that takes it.
        is_image: whether it is an image.

    Raises:
        InputError: it is no image or sound, or one of other colours than the model takes.
    """
    if isinstance(given, Tensor) and given.is_floating_point() and (given.ndim in (3, 4) or not is_image):
        is_batch = given.ndim == 4 if is_image else given.ndim > 1 and len(given) == 1
        one = given if is_batch else given[None]
        if len(one) == 1:
            _refuse_channels(model, one, given)
            if is_image:
                refuse_colours_last(model, one)
                _refuse_plain(processor, one)
            else:
                _refuse_recording(processor, one, argument)
            return {argument: one}
    if not is_image:
        raise InputError(
            f"the sound is {type(given).__name__}; pass what the model's processor returned, or {argument} as the "
            "model takes them, a float tensor of one sound"
        )
    channels = getattr(getattr(model, "config", None), "num_channels", None)
    if isinstance(given, (str, os.PathLike)):
        given = open_image(given, channels)
    processor = getattr(processor, "image_processor", processor)
    if hasattr(processor, "added_tokens_decoder"):
        raise InputError(
            f"there is a tokenizer, {type(processor).__name__}, and nothing that reads images; pass the model and its "
            "processor as tokenizer, as AutoProcessor.from_pretrained(name) gives it, or pixel_values"
        )
    if processor is None or not (hasattr(given, "ndim") or hasattr(given, "convert")):
        raise InputError(
            f"the image is {type(given).__name__}; pass pixel_values as the model takes them, a float tensor "
            "[channels, rows, columns], or an image together with the model's processor as tokenizer"
        )
    _refuse_numbers(processor, given)
    try:
        made = dict(processor(images=as_of_a_file(given, channels), return_tensors="pt"))
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        told = " ".join(str(error).split())[:120]
        raise InputError(
            f"the processor cannot read the image, which is {_told(given)}: {told}; pass one of as many colours as "
            "the model was trained with, such as image.convert('RGB'), or pixel_values"
        ) from error
    refuse_whole(made)
    refuse_cut(made)
    pixels = made["pixel_values"]
    if getattr(pixels, "ndim", 0) == 5 and pixels.shape[1] == 1:
        raise InputError(
            f"the processor, {type(processor).__name__}, makes a film of one frame of an image; pass what it returns "
            "of all frames, processor(frames, return_tensors='pt')"
        )
    _refuse_channels(model, pixels, given)
    return {argument: pixels}


def refuse_cut(made: Mapping[str, Any]) -> None:
    """Refuse what a processor has made of an image where it cuts it into patches itself, as that of SigLIP 2 does for
    images of any shape: no pixel has a row and a column then."""
    if made.get("spatial_shapes") is not None:
        raise InputError(
            "the processor cuts images into patches itself, and says in spatial_shapes how many rows and columns of "
            "them there are; an image is explained as pixel_values [channels, rows, columns], so use "
            "lrpx.propagate(model, recipe), which gives relevance at any input"
        )


def refuse_whole(made: Mapping[str, Any]) -> None:
    """Refuse pixels that are whole numbers, as of a processor that neither rescales nor normalises: none of them can
    have relevance."""
    kind = str(getattr(made.get("pixel_values"), "dtype", "")).removeprefix("torch.")
    if kind.startswith(("int", "uint", "bool")):
        raise InputError(
            f"the pixel_values are {kind}, and relevance is that of floating-point numbers; pass pixel_values.float() "
            "if these are what the model takes, or set the processor to rescale and normalise as it was trained with"
        )


def refuse_colours_last(model: Module, pixels: Any) -> None:
    """Refuse an image ``[1, rows, columns, 3]``, as a model takes it that turns it round itself: its columns would be
    told as colours, and its rows as channels. A model whose config has as many channels means them."""
    shape = tuple(getattr(pixels, "shape", ()))
    channels = getattr(getattr(model, "config", None), "num_channels", None)
    if len(shape) == 4 and shape[-1] == 3 and shape[1] > 4 and shape[1] != channels:
        raise InputError(
            f"the pixels are {' × '.join(map(str, shape[1:]))}, which is [rows, columns, channels], and an image is "
            "explained as [channels, rows, columns]; pass these, image.permute(2, 0, 1), and a module whose forward "
            "gives the model pixels.permute(0, 2, 3, 1)"
        )


def _refuse_numbers(processor: Any, given: Any) -> None:
    """Refuse what a processor would read as other colours than it has, without a word."""
    if getattr(given, "mode", None) in ("HSV", "LAB", "YCbCr"):
        raise InputError(
            f"the image is {_told(given)}, and the processor reads red, green and blue; pass image.convert('RGB')"
        )
    kind = str(getattr(given, "dtype", "")).removeprefix("torch.")
    if not getattr(processor, "do_rescale", False) or not kind or 0 in given.shape:
        return
    numbers = given.double() if isinstance(given, Tensor) else given
    lowest, highest = float(numbers.min()), float(numbers.max())
    white = max(255.0, 1 / (getattr(processor, "rescale_factor", None) or 1 / 255))
    if lowest < 0 or highest > white * (1 + 1e-6):
        raise InputError(
            f"the image is {_told(given)} of {kind} from {lowest:g} to {highest:g}, and the processor takes {white:g} "
            "for white; pass whole numbers from 0 to 255, as image // 257 makes of 16 bits, or pixel_values, a float "
            "tensor [channels, rows, columns]"
        )
    if kind.startswith(("float", "bool")) and 0 < highest <= 1:
        raise InputError(
            f"the image is {_told(given)} of {kind} up to {highest:g}, and the processor divides by 255, as if it were "
            "nearly black; pass whole numbers from 0 to 255, or pixel_values, a float tensor [channels, rows, columns]"
        )


def _refuse_plain(processor: Any, pixels: Tensor) -> None:
    """Refuse an image as it is shown, in shares of white or from 0 to 255, for a model whose processor moves colours
    around 0: no photograph is nowhere darker than the mean. It would be read as one that was made for the model."""
    reader = reader_of(processor)
    mean = getattr(reader, "image_mean", None) or 0.0
    around = min(mean) if isinstance(mean, (list, tuple)) else mean
    if not getattr(reader, "do_normalize", False) or around <= 0 or not pixels.numel():
        return
    low, high = float(pixels.min()), float(pixels.max())
    if 0 <= low < high and (high <= 1 or (high > WIDEST and getattr(reader, "do_rescale", False))):
        raise InputError(
            f"the image is {_told(pixels)} from {low:g} to {high:g}, and the model's processor normalises it; pass "
            "whole numbers from 0 to 255, which it reads, or {'pixel_values': image} if these are what the model takes"
        )


def _refuse_recording(processor: Any, sound: Tensor, argument: str) -> None:
    """Refuse samples as they were recorded, for a model whose processor gives each sound the mean 0 and the variance 1:
    among such samples one is at least 1, and none beyond the root of their number. They would be read as made for it.
    """
    reader = getattr(processor, "feature_extractor", processor)
    if not getattr(reader, "do_normalize", False) or sound.ndim != 2 or not sound.numel():
        return
    most = float(sound.abs().max())
    if 0 < most <= 1 or most > sound.numel() ** 0.5:
        raise InputError(
            f"the sound has samples up to {most:g}, and the model's processor normalises them; pass what it returned, "
            f"or {{'{argument}': sound}} if the model takes these"
        )


def _refuse_channels(model: Module, pixels: Any, given: Any) -> None:
    """Refuse an image ``[1, channels, rows, columns]`` of other colours than the model's config names."""
    wanted = getattr(getattr(model, "config", None), "num_channels", None)
    if isinstance(wanted, int) and getattr(pixels, "ndim", 0) == 4 and pixels.shape[1] != wanted:
        mend = "one that has"
        if hasattr(given, "convert"):
            mend = {3: "image.convert('RGB')", 1: "image.convert('L')"}.get(wanted, mend)
        elif getattr(given, "shape", ())[-1:] == (wanted,):
            mend = "a tensor [channels, rows, columns], such as image.permute(2, 0, 1)"
        raise InputError(
            f"the image is {_told(given)}, and the model takes {wanted} channels, not {pixels.shape[1]}; pass {mend}"
        )


def _told(image: Any) -> str:
    """An image as an error tells of it."""
    mode, shape = getattr(image, "mode", None), getattr(image, "shape", None)
    if isinstance(mode, str):
        return f"of mode {mode}"
    return type(image).__name__ if shape is None else f"{type(image).__name__} of shape {list(shape)}"
