"""Inputs for the tiny models: what a model's ``forward`` takes, made by the names of its arguments.

``inputs`` of ``tiny.json`` says, for a mapping, a model type, or both (``"mapping/type"``), what is needed beside:
the ``names`` of the arguments that are given, the ``length`` of a sequence, whether pictures are ``frames`` of a film,
how many numbers a patch has where pictures are given as ``patches``, and ``arguments``: their values, or the range and
the shape of random ones.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.coverage._classes import DATA
from lrpx.coverage._tiny import END, FIRST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from lrpx.coverage._classes import ModelClass

LENGTH = 12
"""Tokens in a sequence."""
DECODER_LENGTH = 6
IMAGE = 64
"""The side of an image in pixels, where the configuration has none."""
FRAMES = 4
"""Pictures in a video, where the configuration does not say."""
SAMPLES = 2000
"""Samples of a sound."""
STEPS = 40
"""Steps of a spectrogram."""
MELS = 80
"""Its bands, where the configuration does not say."""
PARTS = ("vision_config", "audio_config", "encoder_config", "backbone_config", "encoder", "text_config")
"""Configurations inside of others."""


def tiny_inputs(model_class: ModelClass, model: nn.Module) -> dict[str, Any]:
    """One example for the model: tokens, an image, a sound, and what else its class needs."""
    needs = _needs(model_class)
    names = inspect.signature(model.forward).parameters
    make = _Maker(model_class, model.config, needs)
    inputs: dict[str, Any] = {name: make(name) for name in needs.get("names") or _names(model_class, model, names)}
    inputs |= {name: _argument(spec, make.generator) for name, spec in needs["arguments"].items() if name in names}
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


def _needs(model_class: ModelClass) -> dict[str, Any]:
    mapping, kind = model_class.mapping, model_class.model_type
    needs: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for key in (mapping, kind, f"{mapping}/{kind}"):
        found = DATA["inputs"].get(key, {})
        needs |= found
        arguments |= found.get("arguments", {})
    return needs | {"arguments": arguments}


def _names(model_class: ModelClass, model: Any, names: Mapping[str, inspect.Parameter]) -> list[str]:
    """What the model is given: its main input, what it cannot do without, and a decoder's tokens."""
    if model_class.mapping == "image-classification":
        main = "pixel_values" if "pixel_values" in names else next(iter(names))
    else:
        mains = [model.main_input_name] if isinstance(model.main_input_name, str) else model.main_input_name
        main = next((name for name in mains if name in names), next(iter(names)))
    given = [name for name, one in names.items() if name == main or (one.default is one.empty and one.kind in NAMED)]
    both = "decoder_input_ids" in names and model_class.mapping not in FROM_ENCODER
    return [*given, "decoder_input_ids"] if both and model.config.is_encoder_decoder else given


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
FROM_ENCODER = ("causal-lm", "masked-lm", "sequence-classification", "token-classification", "question-answering")
"""Mappings whose encoder-decoder models make the decoder's input of the encoder's."""


class _Maker:
    """Makes an argument by its name."""

    def __init__(self, model_class: ModelClass, config: Any, needs: dict[str, Any]) -> None:
        self.model_class = model_class
        self.config = config
        self.length = needs.get("length", LENGTH)
        self.videos = needs.get("frames", model_class.mapping == "video-classification")
        self.patches = needs.get("patches", 0)
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, name: str) -> Tensor:
        if name == "pixel_values" and self.patches:
            return torch.randn(16, self.patches, generator=self.generator)
        if name.startswith(("pixel_values", "flattened_patches")) or self.model_class.mapping == "image-classification":
            return self.image(videos=self.videos or "videos" in name)
        if name.endswith("grid_thw"):
            return torch.tensor([[1, 4, 4]])
        if name.endswith("input_features_mask"):
            return torch.ones(1, 2 * self.setting(STEPS // 2, "max_source_positions"), dtype=torch.long)
        if name in ("input_values", "audio_values"):
            return torch.randn(1, SAMPLES, generator=self.generator)
        if name.endswith("input_features"):
            steps = 2 * self.setting(STEPS // 2, "max_source_positions")
            return torch.randn(1, self.setting(MELS, "num_mel_bins"), steps, generator=self.generator)
        return self.tokens(decoder="decoder" in name)

    def tokens(self, decoder: bool = False) -> Tensor:
        ids = torch.randint(FIRST, END, (1, DECODER_LENGTH if decoder else self.length), generator=self.generator)
        end = self.setting(None, "eos_token_id")
        if self.config.is_encoder_decoder and not decoder and isinstance(end, int):
            ids[:, -1] = end
        if self.model_class.mapping == "multiple-choice":
            ids = torch.stack([ids, ids.flip(-1)], 1)
        return ids

    def image(self, videos: bool = False) -> Tensor:
        side = self.setting(IMAGE, "image_size")
        height, width = (side, side) if isinstance(side, int) else side
        frames = [self.setting(FRAMES, "num_frames")] if videos else []
        shape = (1, *frames, self.setting(3, "num_channels"), height, width)
        return torch.randn(shape, generator=self.generator)

    def setting(self, default: Any, name: str) -> Any:
        """What the configuration or a part of it says, or the default."""
        for config in (self.config, *(getattr(self.config, part, None) for part in PARTS)):
            if (value := getattr(config, name, None)) is not None:
                return value
        return default


def _argument(spec: dict[str, Any] | list[Any], generator: torch.Generator) -> Tensor:
    """``{"values": …}`` as a tensor, or ``[low, high, *shape]`` as a random one."""
    if isinstance(spec, dict):
        return torch.tensor(spec["values"])
    low, high, *shape = spec
    if isinstance(low, int):
        return torch.randint(low, high, shape, generator=generator)
    return torch.empty(shape).uniform_(low, high, generator=generator)
