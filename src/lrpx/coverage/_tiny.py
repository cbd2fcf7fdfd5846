"""Tiny random models: a configuration shrunk by the names of its fields, and weights.

What each name means is data, in ``tiny.json``:

- ``sizes``: for a size, the names of the fields that shall have no larger one.
- ``types``: for a model type (or a mapping and a model type), what its configuration needs beside, by field.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lrpx.coverage._classes import DATA
from lrpx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lrpx.coverage._classes import ModelClass

FIRST, END = 10, 60
"""Text is made of the token ids in this range, and no special token is in it."""
SPREAD = 0.1
"""The standard deviation of what a model would initialise to a constant."""
GAIN = 1.4
"""The standard deviation of a convolution's outputs for inputs of deviation one; what a ReLU halves, it restores."""
LARGEST = 40_000_000
"""Parameters of a model that is still tiny."""
COMMON = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))
SIZES: dict[str, int] = {name: int(size) for size, names in DATA["sizes"].items() for name in names}
SPREADS = {"initializer_range": 0.2, "init_std": 0.2}
"""The standard deviation of weights: for a hidden size of 32, what keeps activations near one."""
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
"""Lists of what kind each layer is."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = "num_attention_heads"
KEYS = ("num_key_value_heads", "num_kv_heads")


# --------------------------------------------------------------------- configurations


def tiny_config(model_class: ModelClass) -> PreTrainedConfig:
    """The smallest configuration of the model's type that still has everything its own default has."""
    kind = CONFIG_MAPPING[model_class.model_type]
    wanted = getattr(transformers, model_class.name).config_class
    kind = kind if wanted is None or issubclass(kind, wanted) else wanted
    return _shrunk(kind, _special_tokens(), DATA["types"].get(f"{model_class.mapping}/{model_class.model_type}", {}))


def _shrunk(kind: type[PreTrainedConfig], special: Iterator[int], more: dict[str, Any]) -> PreTrainedConfig:
    settings = DATA["types"].get(kind.model_type, {}) | more
    try:
        resolved: Any = kind()
        resolved.allow_global_per_layer_attribute_access = True
    except Exception:  # some configurations have no valid default: then what is None stays None
        resolved = None
    values: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for field in dataclasses.fields(kind):
        if field.name in COMMON:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = _attribute(resolved, field.name, default)
        if isinstance(value, PreTrainedConfig):
            values[field.name] = _shrunk(type(value), special, {})
        elif field.name in settings:
            continue
        elif field.name.endswith(("token_id", "token_index")) and isinstance(default, int):
            values[field.name] = default if 0 <= default < FIRST else next(special)
        elif field.name in SPREADS:
            values[field.name] = SPREADS[field.name]
        elif field.name in SIZES and type(default) is int:
            values[field.name] = min(default, SIZES[field.name])
        elif isinstance(value, (list, tuple)) and len(value) == _layers(resolved):
            lists[field.name] = list(value)
    for name in KEYS:
        if name in values and values[name] != 1 and _attribute(resolved, name) == _attribute(resolved, HEADS):
            values[name] = SIZES[HEADS]  # not grouped by default, so not grouped here
    kinds = [lists[name] for name in KINDS if name in lists]
    if kinds:
        picked = _one_of_each(kinds)
        values |= {name: [items[i] for i in picked] for name, items in lists.items()}
        values |= dict.fromkeys(set(DEPTHS) & {field.name for field in dataclasses.fields(kind)}, len(picked))
    return kind(**values | settings)


def _attribute(config: PreTrainedConfig | None, name: str, default: Any = None) -> Any:
    return default if config is None else getattr(config, name, default)


def _layers(config: PreTrainedConfig | None) -> int:
    found = [_attribute(config, name) for name in DEPTHS]
    return next((value for value in found if type(value) is int and value > 2), -1)


def _one_of_each(lists: list[list[Any]]) -> list[int]:
    """The first layers that show every kind of layer there is, two at least."""
    rows = list(zip(*lists, strict=True))
    seen: set[tuple[int, Any]] = set()
    picked = []
    for i, row in enumerate(rows):
        new = {(column, str(value)) for column, value in enumerate(row)} - seen
        if new:
            picked.append(i)
            seen |= new
    return sorted({*picked, *[i for i in range(2) if len(picked) < 2]})


def _special_tokens() -> Iterator[int]:
    """Ids for special tokens, which no text has."""
    yield from range(SIZES["vocab_size"] - 1, END, -1)


# -------------------------------------------------------------------------- models


@contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers each time, and the caller's own afterwards; some models draw some in every pass."""
    state, others = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)
            numpy.random.set_state(others)


def tiny_model(model_class: ModelClass) -> nn.Module:
    """A tiny model of the class, in float32 and eval mode, where no parameter is a constant.

    The model's own initialisation, then random numbers around what it made zero or one: biases are not zero, and
    norms do not have weight one.

    Raises:
        ModelError: it is not tiny.
    """
    kind: type[nn.Module] = getattr(transformers, model_class.name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(tiny_config(model_class)).parameters())
    if size > LARGEST:
        raise ModelError(f"the tiny {kind.__name__} has {size:,} parameters; shrink it by its fields in tiny.json")
    with seeded():
        model = kind(tiny_config(model_class)).float().eval()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, _ConvNd) and module.weight.any():
                    # its own weights are too small to show an image behind many layers
                    module.weight *= GAIN / (module.weight.std() * module.weight[0].numel() ** 0.5)
            means = [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]
            for tensor in [*model.parameters(), *means]:
                if tensor.is_floating_point() and tensor.numel() and tensor.min() == tensor.max():
                    tensor.add_(torch.randn_like(tensor), alpha=SPREAD)
    return model


def let_batch_norms_learn(model: nn.Module, inputs: dict[str, Any]) -> None:
    """One pass in which each batch norm takes over the variances of what it is given, as training would."""

    def learn(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        of_channels = args[0].transpose(0, 1).flatten(1)
        if isinstance(module.running_var, Tensor) and of_channels.shape[1] > 1:
            module.running_var.copy_(of_channels.var(1))

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    hooks = [norm.register_forward_pre_hook(learn) for norm in norms]
    if norms:
        with torch.no_grad(), seeded():
            model(**inputs)
    for hook in hooks:
        hook.remove()
