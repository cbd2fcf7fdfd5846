"""What a model's logits are about: the next token, a masked token, a class, or a decoder's next token.

The only place that knows Hugging Face's model classes, and it knows their mappings, not their families.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.errors import InputError, ModelError
from lrpx.modules import named_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module


class Task(Enum):
    """What a model predicts."""

    CAUSAL = "causal language model"
    MASKED = "masked language model"
    CLASSIFICATION = "sequence classifier"
    SEQ2SEQ = "encoder-decoder language model"


def task_of(model: Module) -> Task:
    """The task of a Hugging Face model; see :func:`task_of_class`."""
    return task_of_class(type(model))


def task_of_class(model_class: type) -> Task:
    """The task of a Hugging Face model class, by the auto mapping that lists it or a class it derives from.

    Raises:
        ModelError: the class is in none of the four mappings.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = {
        Task.SEQ2SEQ: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        Task.CLASSIFICATION: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        Task.MASKED: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        Task.CAUSAL: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    kinds = [kind.__name__ for kind in model_class.__mro__]
    suffixes = {
        Task.CLASSIFICATION: "ForSequenceClassification",
        Task.MASKED: "ForMaskedLM",
        Task.CAUSAL: "ForCausalLM",
    }
    for kind in kinds:
        for task, mapping in mappings.items():
            names = {n for value in mapping.values() for n in ([value] if isinstance(value, str) else value)}
            if kind in names:
                return task
        for task, suffix in suffixes.items():
            if kind.endswith(suffix):
                return task
    raise ModelError(
        f"{model_class.__name__} is not a causal, masked or encoder-decoder language model nor a sequence "
        "classifier; load the class with the right head, or use lrpx.propagate(model, recipe), which takes any module"
    )


def accepts(model: Module, argument: str) -> bool:
    """Whether the model's forward pass takes an argument of this name."""
    forward = model.forward
    of_class = getattr(type(model), "forward", None)
    if getattr(forward, "__func__", None) is of_class:
        return argument in _parameters(of_class)
    return argument in inspect.signature(forward).parameters  # an instance's own, as hooks of accelerate set it


@lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def input_embedding(model: Module) -> tuple[str, Module]:
    """``(path, module)`` of the token embedding.

    Raises:
        ModelError: the model has none.
    """
    try:
        module = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        module = None
    path = next((path for path, each in named_modules(model) if each is module), None) if module is not None else None
    if path is None or not isinstance(getattr(module, "weight", None), Tensor):
        raise ModelError(
            f"{type(model).__name__} has no input embeddings to attribute to; "
            "use lrpx.propagate(model, recipe) and ask for relevance at a module of your choice"
        )
    return path, module


def active_dropout(model: Module) -> str | None:
    """The path of the first dropout in training mode, or None."""
    kinds = (torch.nn.Dropout, torch.nn.AlphaDropout)
    found = (path for path, each in named_modules(model) if isinstance(each, kinds) and each.training and each.p > 0)
    return next(found, None)


def embedding_paths(model: Module, task: Task) -> set[str]:
    """The paths of the token embedding, and of the decoder's where an encoder-decoder model has another."""
    path, module = input_embedding(model)
    if task is not Task.SEQ2SEQ:
        return {path}
    # of the parts as well: where a tied embedding is offloaded, each part loads one of its own
    parts: list[Any] = [model.get_encoder(), model.get_decoder()]  # type: ignore[operator]
    modules = [module, *(part.get_input_embeddings() for part in parts)]
    return {path for path, each in named_modules(model) if any(each is one for one in modules)}


def input_device(model: Module) -> torch.device:
    """Where token ids go: to the token embedding; to the CPU where that is offloaded, whose hooks then move them."""
    device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    return torch.device("cpu") if device.type == "meta" else device


def context_length(model: Module) -> int | None:
    """The most tokens the model has positions for, or None when it has no such limit (T5, BLOOM, Mamba).

    A tokenizer's ``model_max_length`` is advice, and no limit.
    """
    config = getattr(model, "config", None)
    positions = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions - _first_position(model) if isinstance(positions, int) and positions > 0 else None


def _first_position(model: Module) -> int:
    """The position of the first token: 0, or in RoBERTa and its kin the one after the padding's."""
    for path, module in named_modules(model):
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None and path.endswith("position_embeddings"):
            return int(padding) + 1
    return 0


def position_ids(model: Module, task: Task, mask: Tensor) -> Tensor:
    """``[B, T]`` positions that count from 0 at each row's first token, for left padding.

    Raises:
        InputError: left padding would change what the model computes: a classifier reads its first token,
            or the model takes no position ids.
    """
    if task is Task.CLASSIFICATION:
        why = "may read its first token for the class, and padding on the left would be that token"
    elif not accepts(model, "position_ids"):
        why = "takes no position_ids, so padding on the left would move its tokens"
    else:
        return (mask.cumsum(1) - 1).clamp(min=0) + _first_position(model)
    raise InputError(f'{type(model).__name__} {why}; use padding_side="right"')


@contextmanager
def only_rows(model: Module, positions: Tensor) -> Iterator[None]:
    """Send only row ``positions[b]`` of each sequence ``b`` through the language-model head.

    The head's hidden states ``[B, T, d]`` become ``[B, 1, d]``, so the logits are ``[B, 1, V]``.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        yield
        return

    thread = threading.get_ident()

    def select(_: Module, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() != thread:
            return None
        hidden = args[0]
        if hidden.ndim != 3 or hidden.shape[0] != len(positions) or hidden.shape[1] == 1:
            return None
        rows = torch.arange(len(positions), device=hidden.device)
        return (hidden[rows, positions.to(hidden.device)].unsqueeze(1), *args[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def rows_of(logits: Tensor, positions: Tensor) -> Tensor:
    """``[B, V]``: the logits at ``positions[b]``, whether the head saw all positions or only that one."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits[torch.arange(len(positions), device=logits.device), positions.to(logits.device)]
