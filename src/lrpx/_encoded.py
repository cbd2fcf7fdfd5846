"""What a tokenizer or a processor returned: its rows, its fields as tensors, and the padding taken off."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DECODERS = ("decoder_input_ids", "decoder_attention_mask")
"""The fields that are the decoder's text."""
RANKS = {"pixel_values": 4, "input_features": 3, "input_values": 2}
"""How many dimensions a batch of images or sounds has, at least: one of films has frames, too, and a sound may be a
spectrogram where others are samples (AST)."""
NO_INPUT = ("label", "special_tokens_mask", "offset_mapping", "overflow")
"""What a tokenizer may give that is not for the model's forward pass."""
OF_IMAGES = ("_thw", "_sizes")
"""How names end of what a processor says of each image, ``[images, …]``: few numbers, which are no tokens'."""
PLACES = "position_ids"
"""The places of tokens: a number for each; or several, ``[n, B, T]``, where a model counts frames, rows and columns."""
OF_OTHERS = ("qformer_", "visual_", "encoder_", "entity_", "decoder_", "protein_")
"""How names begin of what stands beside a text and has places of its own, perhaps as many as the text has."""
OF_SIGNALS = (
    *("image", "video", "vision_", "audio", "pixel_", "feature_attention", "input_features_", "input_values_", "patch"),
    *("flattened_patches", "cross_attention_states", "perceiver_", "query_embeds", "region_to_", "speaker_embedding"),
    *("structure_feats", "num_local_patches", "num_frames_", "second_per_grid"),
)
"""How names begin of images and sounds, of what was made of them, and of how many there are."""
MASKS_OF_OTHERS = ("pixel_mask", "features_mask", "values_mask", "ids_mask", "latents_mask", "compression_mask")
"""How names end of masks that hide the padding of something else; others say where in the text it stands."""
OF_IMAGES_SEEN = "image_attention_mask"
"""Which images each token sees, ``[B, T, images]``; or, as ``[B, places]``, a mask of an image."""
OF_TOKENS = ("type_ids", PLACES)
"""How names end of what has a number for each token and nothing else."""
OF_ANY_TEXT = ("_ids", "_mask", "_masks")
"""How names end of what any text may have: what they hold at the text's padding tells whose they are."""
OF_TEXT = (*OF_ANY_TEXT, "_seq", "bbox", "langs")
"""How names end of what is said of each token of the text; of others nobody knows whether it has the text's padding."""
OF_ANOTHER = ("_input_ids", "_attention_mask")
"""How names end of another text, which has places of its own."""
MASKS_OF_TEXT = ("global_attention_mask", "cross_attention_mask")
"""Which tokens see all others, and what of an image each sees."""
EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")
"""What stands in the place of token ids."""


@dataclass(frozen=True)
class Encoded:
    """One input as a tokenizer or processor gives it.

    Args:
        per_token: of each token what the tokenizer says, ``"input_ids"`` above all, without the padding; none where
            the input has no tokens.
        arguments: the other fields, each as a batch of one.
        has_mask: whether an attention mask says which ids are padding.
        before: how much padding stood before the tokens.
    """

    per_token: dict[str, list[int]] = field(default_factory=dict)
    arguments: dict[str, Tensor] = field(default_factory=dict)
    has_mask: bool = False
    before: int = 0


def rows_in(batch: Mapping[str, Any], rank: int = 2) -> int:
    """How many inputs there are, where a batch of ids has so many dimensions.

    >>> rows_in({"input_ids": [5, 7]}), rows_in({"input_ids": [[5, 7], [5, 2]]}), rows_in({"input_ids": [[5, 7]]}, 3)
    (1, 2, 1)
    """
    name = next((key for key in ("input_ids", *RANKS) if batch.get(key) is not None), None)
    if name is None:
        return 1
    found = depth(batch[name])
    several = found == rank if name == "input_ids" else found >= RANKS[name]
    return len(batch[name]) if several else 1


def rows_of(batch: Mapping[str, Any], rank: int = 2) -> list[dict[str, Any]]:
    """Several inputs, each as a batch of one.

    Raises:
        InputError: a field has another number of rows.
    """
    count = rows_in(batch, rank)
    if count == 1:
        return [dict(batch)]
    held = {key: value for key, value in batch.items() if value is not None and hasattr(value, "__len__")}
    places = _tensor(PLACES, held[PLACES]) if rank == 2 and depth(held.get(PLACES)) == 3 else None
    of_each = places is not None and places.shape[1:] == (count, len(held["input_ids"][0]))
    if places is not None and of_each:
        held[PLACES] = places.transpose(0, 1)
    uneven = next((key for key, value in held.items() if len(value) != count), None)
    if uneven is not None:
        raise InputError(f"{uneven} has {len(held[uneven])} rows for {count} inputs; pass one input at a time")
    rows = [{key: value[i : i + 1] for key, value in held.items()} for i in range(count)]
    return [row | {PLACES: row[PLACES].transpose(0, 1)} for row in rows] if of_each else rows


def read(given: Mapping[str, Any], accepts: Callable[[str, Any], bool]) -> Encoded:
    """One input, carried as it is, without the padding.

    Args:
        given: what the tokenizer or processor returned.
        accepts: whether the model takes an argument, by its name and value.

    Raises:
        InputError: fields that are no numbers, do not fit each other, or hold embeddings in the place of ids.
    """
    embedded = next((key for key in EMBEDDED if given.get(key) is not None), None)
    if embedded is not None:
        raise InputError(
            f"the {embedded} cannot be explained here, for relevance ends at the embeddings of tokens; pass input_ids, "
            "or use lrpx.propagate(model, recipe), which gives relevance at any input"
        )
    fields = {
        key: _tensor(key, value)
        for key, value in given.items()
        if value is not None and not key.startswith(NO_INPUT) and key not in DECODERS
        if key in ("input_ids", "attention_mask") or accepts(key, value)
    }
    per_token = {}
    before = 0
    has_mask = "attention_mask" in fields
    if "input_ids" in fields:
        is_flat, ids = fields["input_ids"].ndim == 1, _flat(fields["input_ids"])
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
            told = _told(fields["input_ids"])
            raise InputError(f"the input_ids are {told}; pass the whole numbers of one input, or of a batch")
        kept = _flat(fields.pop("attention_mask", torch.ones_like(ids)))
        if kept.shape != ids.shape:
            raise InputError("the attention_mask and the input_ids differ in shape; pass both as they were made")
        kept = _kept(kept, "attention_mask")
        before = int(kept.nonzero()[0])
        for key in list(fields):
            value = fields[key] = _as_row(key, fields[key], len(ids), is_flat=is_flat)
            if _is_beside(key, value) or _is_of_all(key, value, is_flat=is_flat):
                continue
            if key == PLACES and value.ndim == 3 and value.shape[1:] == (1, len(ids)):
                fields[key] = value[..., kept]
            elif key not in RANKS and value.shape == (1, len(ids)) and not value.is_floating_point():
                per_token[key] = [int(each) for each in _without_padding(key, value, kept)[0]]
                del fields[key]
            elif value.ndim < 2 or (key.endswith(OF_TOKENS) and value.ndim == 2 and len(value) == 1):
                told = f"{_told(_flat(value))} for {len(ids)} tokens"
                raise InputError(f"the {key} are {told}; pass one number for each token")
            elif key not in RANKS and value.shape[:2] == (1, len(ids)):
                fields[key] = _without_padding(key, value, kept)  # several for each, as places on a page
            elif key == PLACES:
                told = f"{_told(value)} for {len(ids)} tokens"
                raise InputError(f"the {key} are {told}; pass those of this input, [n, 1, tokens], or leave them out")
        places = per_token.get(PLACES, [])
        if not has_mask and any(after - before != 1 for before, after in pairwise(places)):
            raise InputError(
                "the position_ids do not count up by one, as where several texts are packed into a row, which without "
                "an attention_mask some models keep apart and others do not; pass each text by itself, or an "
                "attention_mask of ones if they are one"
            )
    return Encoded(per_token, {key: _as_batch(key, value) for key, value in fields.items()}, has_mask, before)


def decoder_ids(given: Mapping[str, Any]) -> list[int]:
    """The decoder's text in what a tokenizer returned, without its padding.

    Raises:
        InputError: it is not that of one input, or begins with padding, which moves the places that a decoder counts.
    """
    ids = _flat(_tensor("decoder_input_ids", given["decoder_input_ids"]))
    mask = given.get("decoder_attention_mask")
    kept = torch.ones_like(ids) if mask is None else _flat(_tensor("decoder_attention_mask", mask))
    if ids.ndim != 1 or kept.shape != ids.shape or ids.is_floating_point():
        raise InputError(f"the decoder_input_ids are {_told(ids)}; pass those of one input, with their mask")
    inside = _kept(kept, "decoder_attention_mask")
    if not inside[0]:
        raise InputError(
            "the decoder_input_ids begin with padding, which moves the places of the other tokens in some models; pass "
            "them padded on the right, or without padding"
        )
    found: list[int] = ids[inside].tolist()
    return found


def _as_row(name: str, value: Tensor, count: int, *, is_flat: bool) -> Tensor:
    """A field of one text with so many tokens as a batch of one, ``[1, tokens, …]`` or ``[1, places, …]``, also if it
    was given flat; what is said of images and sounds, and of the whole input, as it is."""
    if _is_beside(name, value):
        is_row = value.ndim < (3 if name.startswith(OF_OTHERS) else 2 if name.endswith(OF_ANOTHER) else 0)
        return value[None] if is_flat and is_row else value
    is_one = not is_flat and count == 1 and not name.endswith(OF_TOKENS)
    is_row = (value.ndim == 1 and not is_one) or (is_flat and value.ndim == 2 and name != PLACES)
    return value[None] if is_row and len(value) == count and name not in RANKS else value


def _is_of_all(name: str, value: Tensor, *, is_flat: bool) -> bool:
    """Whether a field is one number for the whole input, such as its language."""
    return value.shape == (1,) and not name.endswith(OF_TOKENS) and (not is_flat or name.endswith("_ids"))


def _without_padding(name: str, value: Tensor, kept: Tensor) -> Tensor:
    """A field ``[1, tokens, …]`` of the tokens that are kept alone.

    Raises:
        InputError: some are not, and neither its name nor what it holds there says that it is the text's.
    """
    if not (kept.all() or name == "input_ids" or _is_of_text(name, value[0, ~kept])):
        raise InputError(
            f"the {name} are as many as the text has places with its padding, and neither their name nor what they "
            "hold there says whether they are its tokens', which lose the padding; pass the input without padding"
        )
    value = value[:, kept]
    sees_tokens = name.endswith("_mask") and name != OF_IMAGES_SEEN and value.shape[2:] == kept.shape
    return value[..., kept] if sees_tokens else value


def _is_beside(name: str, value: Tensor) -> bool:
    """Whether a field is no tokens': of what stands beside the text, with places of its own or none."""
    if name in (*RANKS, *MASKS_OF_TEXT) or (name == OF_IMAGES_SEEN and value.ndim == 3):
        return False
    if name.endswith(OF_ANOTHER):
        return True
    if name.endswith(("_mask", "_masks")) and not name.endswith(MASKS_OF_OTHERS):
        return False
    return name.endswith(OF_IMAGES) or name.startswith((*OF_OTHERS, *OF_SIGNALS))


def _is_of_text(name: str, hidden: Tensor) -> bool:
    """Whether the name of a field says that it is the tokens' of the text, and what it holds at the text's padding does
    not say that it is another's: a mask hides something there, and ids are all one, which alone may be the last one of
    a text that is longer, unless it is none of a token."""
    if not name.endswith(OF_TEXT) or name.endswith("padding_mask"):
        return False
    if name in MASKS_OF_TEXT or name.endswith(OF_TOKENS) or not name.endswith(OF_ANY_TEXT):
        return True
    if name.endswith("_ids") and len(hidden) > 1:
        return bool((hidden == hidden[:1]).all())
    return not bool((hidden > 0).any())


def _kept(mask: Tensor, name: str) -> Tensor:
    """Which tokens a mask keeps; refused where it hides all of them, or some between others, which are no padding."""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(f"the {name} holds other numbers than 0 and 1; pass 1 for each token and 0 for padding")
    inside = mask.nonzero()[:, 0].tolist()
    if not inside or inside != list(range(inside[0], inside[-1] + 1)):
        raise InputError(f"the {name} hides tokens between others, or all; leave these tokens out of the input")
    return mask.bool()


def depth(value: Any) -> int:
    """The number of dimensions of a tensor, an array, a list of lists, a list of arrays."""
    if hasattr(value, "ndim"):
        return int(value.ndim)
    if not isinstance(value, (list, tuple)):
        return 0
    return 1 + (depth(value[0]) if value else 0)


def _tensor(name: str, value: Any) -> Tensor:
    """A field as a tensor, whatever a tokenizer or processor returned: lists, arrays, lists of arrays, tensors."""
    try:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            value = torch.stack(tuple(value))
        return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        told = f"a {type(value).__name__} that is no array of numbers"
        raise InputError(f"the {name} are {told}; pass what the tokenizer returned, or leave them out") from None


def differs(name: str, value: Any) -> bool:
    """Whether there are different numbers in a field."""
    numbers = _tensor(name, value)
    return bool((numbers != numbers.flatten()[:1]).any()) if numbers.numel() else False


def _flat(value: Tensor) -> Tensor:
    """A field of tokens without the dimension of a batch of one."""
    return value[0] if value.ndim == 2 and len(value) == 1 else value


def _as_batch(name: str, value: Tensor) -> Tensor:
    """A field that holds no tokens, as a batch of one if it was not one yet."""
    return value[None] if value.ndim == RANKS.get(name, value.ndim) - 1 else value


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
