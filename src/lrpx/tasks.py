"""What a model's logits are about, and where they are read: the tasks, as data, and what a model's class tells.

The only place that knows Hugging Face's model classes, and it knows their mappings, not their families. A new task is a
row of :class:`Task`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lrpx._hooks import hooks
from lrpx._modules import as_it_was, base_model, named_modules
from lrpx.errors import InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module

    from lrpx._pooling import Pooling

    Read = Callable[[Any], Tensor]

__all__ = ["Task"]

OF_WHOLE = ("pooler_output", "_embeds", "embeddings")
"""How names end of what is an embedding of a whole input."""
OF_QUERIES = ("pred_boxes", "pred_masks", "class_queries_logits")
"""What models return that find objects: of each query, as the classes beside it are, ``[B, Q, C]``."""
THEIRS = ("torch.", "transformers.")
"""How the paths begin of what is no user's own."""
WRAPPERS = (*THEIRS, "accelerate.", "safetensors.", "lrpx.")
"""And of what moves weights or listens, and is a hook, or in the place of a forward."""
TOLD = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)
"""Where transformers keeps what it was told of, by the name of an implementation of attention."""
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""The argument that says which tokens of another are none."""
GREEDY: Final[Mapping[str, Any]] = {
    "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None, "dola_layers": None,
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": None, "bad_words_ids": None,
    "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None, "guidance_scale": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "return_dict_in_generate": False,
}  # fmt: skip
"""What ``generate`` is told to write the token of the largest logit each time, whatever penalties the model's own
generation config has; a token that must come first or last there still does, such as that of a language."""


@dataclass(frozen=True)
class _Facts:
    """What there is to know of a task.

    Args:
        title: how messages call such a model.
        mappings: transformers' auto mappings that list such models, without ``MODEL_FOR_`` and ``_MAPPING_NAMES``.
        suffix: how classes that no mapping lists are called.
        reads: where the logits are: a row at a ``"position"``; one row for the ``"whole"`` input; a start and an end
            among the positions (``"span"``); at each place of a ``"map"``; nowhere, the hidden states of two texts are
            compared (``"embeddings"``), or what the model makes of an image and of a text (``"similarity"``).
        default: the position that is meant when none is given: the ``"last"``, the ``"mask"``, or none.
        logits: what the logits are of: ``"tokens"``, ``"classes"``, ``"choices"``, ``"places"`` in the text, or
            nothing that has a name.
        segments: the names of an input's parts; of several choices, of each.
        arguments: the model's arguments that take the parts; relevance ends at their embeddings.
        together: whether the parts are rows of one argument: ``[B, C, T]`` (``"choices"``), ``[2B, T]``
            (``"pairs"``), or each in an argument of its own.
        pictures: whether an image is explained.
    """

    title: str
    mappings: tuple[str, ...]
    suffix: str | None
    reads: Literal["position", "whole", "span", "embeddings", "map", "similarity"]
    default: Literal["last", "mask"] | None
    logits: Literal["tokens", "classes", "choices", "places"] | None
    segments: tuple[str, ...] = ("input",)
    arguments: tuple[str, ...] = ("input_ids",)
    together: Literal["choices", "pairs"] | None = None
    pictures: bool = False

    @property
    def named(self) -> str:
        """The title with its article: ``"an image classifier"``."""
        return f"{'an' if self.title[0] in 'aeiou' else 'a'} {self.title}"


class Task(_Facts, Enum):
    """What a model predicts. A class that several mappings list has the first task here."""

    SEQ2SEQ = (
        "encoder-decoder language model", ("SEQ_TO_SEQ_CAUSAL_LM",), None, "position", "last", "tokens",
        ("encoder", "decoder"), ("input_ids", "decoder_input_ids"),
    )  # fmt: skip
    CLASSIFICATION = (
        "sequence classifier", ("SEQUENCE_CLASSIFICATION",), "ForSequenceClassification", "whole", None, "classes",
    )  # fmt: skip
    TOKEN_CLASSIFICATION = (
        "token classifier", ("TOKEN_CLASSIFICATION",), "ForTokenClassification", "position", None, "classes",
    )  # fmt: skip
    QUESTION_ANSWERING = (
        "extractive question answering model", ("QUESTION_ANSWERING",), "ForQuestionAnswering", "span", None, "places",
    )  # fmt: skip
    MULTIPLE_CHOICE = (
        "multiple choice model", ("MULTIPLE_CHOICE",), "ForMultipleChoice", "whole", None, "choices",
        ("choice",), ("input_ids",), "choices",
    )  # fmt: skip
    IMAGE_CLASSIFICATION = (
        "image classifier", ("IMAGE_CLASSIFICATION",), "ForImageClassification", "whole", None, "classes",
        (), ("pixel_values",), None, True,
    )  # fmt: skip
    IMAGE_MAP = (
        "image segmenter", ("SEMANTIC_SEGMENTATION",), "ForSemanticSegmentation", "map", None, "classes",
        (), ("pixel_values",), None, True,
    )  # fmt: skip
    IMAGE_TEXT = (
        "model of images and texts", ("ZERO_SHOT_IMAGE_CLASSIFICATION",), None, "similarity", None, None,
        ("text",), ("input_ids",), None, True,
    )  # fmt: skip
    AUDIO_CLASSIFICATION = (
        "audio classifier", ("AUDIO_CLASSIFICATION",), "ForAudioClassification", "whole", None, "classes",
        (), ("input_values",),
    )  # fmt: skip
    SPEECH = (
        "speech or text recognition model", ("SPEECH_SEQ_2_SEQ",), None, "position", "last", "tokens",
        ("decoder",), ("decoder_input_ids",),
    )  # fmt: skip
    MASKED = ("masked language model", ("MASKED_LM",), "ForMaskedLM", "position", "mask", "tokens")
    CAUSAL = ("causal language model", ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"), "ForCausalLM", "position", "last", "tokens")
    EMBEDDINGS = (
        "text encoder", ("TEXT_ENCODING",), None, "embeddings", None, None,
        ("first", "second"), ("input_ids",), "pairs",
    )  # fmt: skip


def task_of(model: Module) -> Task:
    """The task of a Hugging Face model, or of that inside an adapter of peft; see :func:`task_of_class`."""
    try:
        task = task_of_class(type(model))
    except ModelError:
        if (inner := base_model(model)) is not model:  # PeftModel, of a config that names no task
            return task_of(inner)
        _refuse_wrapped(model)
        raise
    has_decoder = accepts(model, "decoder_input_ids")
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if task is Task.SEQ2SEQ and not (is_pair or has_decoder):
        return Task.CAUSAL  # Voxtral and others that hear, whose decoder alone takes the text
    task = Task.SEQ2SEQ if task is Task.CAUSAL and is_pair and has_decoder else task
    reads_text = getattr(model, "main_input_name", "input_ids") == "input_ids" or accepts(model, "input_ids")
    return task if task is not Task.SEQ2SEQ or reads_text else Task.SPEECH  # TrOCR and others that read images alone


def _refuse_wrapped(model: Module) -> None:
    """Refuse what holds a model and nothing else, as DataParallel and torch.compile do.

    Raises:
        ModelError: says where the model is.
    """
    held = [*model.named_children()]
    if len(held) != 1:
        return
    name, inner = held[0]
    try:
        task = task_of_class(type(inner))
    except ModelError:
        return
    raise ModelError(
        f"the model is {type(model).__name__}, which holds {task.named} and nothing else; pass that, model.{name}, or "
        "say with task= what it predicts"
    ) from None


def task_of_class(model_class: type) -> Task:
    """The task of a Hugging Face model class, by the auto mapping that lists it or a class it derives from.

    Raises:
        ModelError: the class is in none of the mappings.
    """
    from transformers.models.auto import modeling_auto as auto

    listed: dict[str, Task] = {}
    for task in Task:
        for mapping in task.mappings:
            for value in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
                for name in (value,) if isinstance(value, str) else value:
                    listed.setdefault(name, task)
    suffixes = {task.suffix: task for task in Task if task.suffix is not None}
    for kind in (kind.__name__ for kind in model_class.__mro__):
        if kind in listed:
            return listed[kind]
        if f"{kind}Simple" in listed:
            raise ModelError(
                f"{model_class.__name__} searches for answers by beams, whose scores are not logits of places; load "
                f"{kind}Simple, or use lrpx.propagate(model, recipe)"
            )
        for suffix, task in suffixes.items():
            if kind.endswith(suffix):
                return task
    titles = ", ".join(task.title for task in Task)
    raise ModelError(
        f"{model_class.__name__} is none of these: {titles}; load the class with the right head, say which of them it "
        "is with task=, or use lrpx.propagate(model, recipe), which takes any module"
    )


def accepts(model: Module, argument: str) -> bool:
    """Whether the model's forward pass takes an argument of this name, or takes any and hands it on: to that of a class
    it derives from, as ``super().forward(*args, **kwargs)`` does, or to a model inside, as the adapters of peft do."""
    forward = model.forward
    of_class = getattr(type(model), "forward", None)
    if getattr(forward, "__func__", None) is of_class:
        found = _parameters(of_class)
    else:
        found = _parameters.__wrapped__(forward)  # an instance's own, as hooks of accelerate set it
    if argument in found or (ANY in found and _inherited(type(model), argument)):
        return True
    inner = base_model(model) if ANY in found else model
    return inner is not model and accepts(inner, argument)


def _inherited(model_class: type, argument: str) -> bool:
    """Whether a forward pass that takes arguments of any name stands before one, of a class that it derives from, that
    names this one."""
    own = [vars(kind)["forward"] for kind in model_class.__mro__ if callable(vars(kind).get("forward"))]
    for each in own:
        found = _parameters(each)
        if argument in found or ANY not in found:
            return argument in found
    return False


def takes_mask(model: Module, argument: str) -> bool:
    """Whether the model may be told which of these tokens are none. Of a decoder's it is told also where its forward
    pass takes arguments of any name and hides this one among them."""
    hidden = argument != "input_ids" and _takes_any(model)
    return hidden or accepts(model, MASKS[argument])


def may_hand_on(model: Module) -> bool:
    """Whether nobody can tell which arguments a model takes: its forward pass, none of transformers' own, takes any and
    may hand them on to a model inside, or leave them out."""
    if (inner := base_model(model)) is not model:
        return may_hand_on(inner)
    return not type(model).__module__.startswith("transformers.") and _takes_any(model)


def _takes_any(model: Module) -> bool:
    """Whether the forward pass takes arguments of any name."""
    return ANY in _parameters.__wrapped__(model.forward)


ANY = "**"
"""What stands for arguments of any name among those of a function."""


@lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    found = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())
    return frozenset([*found, ANY] if takes_any else found)


def input_embedding(model: Module) -> tuple[str, Module]:
    """``(path, module)`` of the token embedding.

    Raises:
        ModelError: the model has none.
    """
    module = _embedding(model)
    # it is among the first, of which torch's own walk gives one after the other
    path = next((path for path, each in model.named_modules() if each is module), None) if module is not None else None
    if path is None or not isinstance(getattr(module, "weight", None), Tensor):
        raise ModelError(
            f"{type(model).__name__} has no input embeddings to attribute to; give it a get_input_embeddings() that "
            "returns its table of tokens, or use lrpx.propagate(model, recipe) and ask for relevance at a module of "
            "your choice"
        )
    return path, module


def refuse_unnamed(model: Module, task: Task) -> None:
    """Refuse a model that takes its tokens under another name than the one they are passed by.

    Raises:
        ModelError: names both.
    """
    names = _parameters.__wrapped__(model.forward)
    argument = next((each for each in task.arguments if not accepts(model, each)), None)
    if argument is not None and ANY not in names:
        raise ModelError(
            f"{type(model).__name__}.forward takes {', '.join(sorted(names)) or 'nothing'}, and token ids are passed "
            f"as {argument}; rename it, or pass a module of your own whose forward({argument}) calls this one"
        )


def _embedding(model: Module) -> Any:
    """The token embedding, or None: what the model calls so, or, in one of images and texts that calls none so, the
    table that is as long as the vocabulary of its texts."""
    try:
        return model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        size = getattr(text_config(model), "vocab_size", None)
        tables = (each for _, each in named_modules(model) if isinstance(each, torch.nn.Embedding))
        return next((each for each in tables if each.num_embeddings == size), None)


def end_read(model: Module, task: Task) -> int | None:
    """The end-of-text token that an encoder-decoder classifier reads its class at; None for other models."""
    config: Any = getattr(model, "config", None)
    if task is not Task.CLASSIFICATION or not getattr(config, "is_encoder_decoder", False):
        return None
    end = getattr(config, "eos_token_id", None)
    return end if isinstance(end, int) else None


def active_dropout(model: Module) -> str | None:
    """The path of the first dropout in training mode, or None."""
    kinds = (torch.nn.Dropout, torch.nn.AlphaDropout)
    for path, each in named_modules(model):
        if each.training and ((isinstance(each, kinds) and each.p > 0) or _drops_by_function(each)):
            return path
    return None


def _drops_by_function(module: Module) -> bool:
    """Whether a module holds the rate of a dropout that it calls as a function, such as ``attention_dropout``."""
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def source_paths(model: Module, task: Task) -> set[str]:
    """Where relevance ends: the path of the token embedding, and of the decoder's where an encoder-decoder model has
    another, which a classifier's may have, too; or the model's argument itself, for images."""
    if not task.segments:
        return {signal_argument(model, task)}
    path, module = input_embedding(model)
    if len(task.arguments) == 1 and not _gives_a_decoder_its_input(model, task):
        return {path}
    # of the parts as well: where a tied embedding is offloaded, each part loads one of its own
    parts = [part_of(model, "encoder"), part_of(model, "decoder")]
    modules = [module, *(_embedding(part) for part in parts if part is not None)]
    last: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(last, torch.nn.Embedding):  # FSMT's parts do not tell, and its decoder's is its last matrix, too
        modules.append(last)
    return {path for path, each in named_modules(model) if any(each is one for one in modules)}


def part_of(model: Module, name: str) -> Any:
    """What a model calls its encoder, or its decoder.

    Raises:
        ModelError: it calls nothing so.
    """
    found = getattr(model, f"get_{name}", None)
    if found is None:
        raise ModelError(
            f"{type(model).__name__} does not say which of its modules is the {name}, and which table has its tokens; "
            f"give it a get_{name}() that returns the module, as transformers' models have"
        )
    return found()


def _gives_a_decoder_its_input(model: Module, task: Task) -> bool:
    """Whether a decoder is given the tokens of the one input, too, perhaps by an embedding of its own (T5Gemma)."""
    is_both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(is_both) and task.logits in ("classes", "places") and hasattr(model, "get_decoder")


def signal_argument(model: Module, task: Task) -> str:
    """The argument that takes an image or a sound: what the model says itself, else the task's, and else the first of a
    module of one's own."""
    name = str(getattr(model, "main_input_name", None) or task.arguments[0])
    return name if accepts(model, name) else next(iter(inspect.signature(model.forward).parameters), name)


def pixel_argument(model: Module, task: Task) -> str | None:
    """The argument that takes the pixels of an image, or None for a task without images; beside texts, where it may be
    left out, it is called as transformers calls it."""
    if task.segments:
        return "pixel_values"
    return signal_argument(model, task) if task.pictures else None


def input_device(model: Module) -> torch.device:
    """Where inputs go: to the token embedding, or the first weight; to the CPU where that is offloaded, whose hooks
    then move them."""
    device = first_weight(model).device
    return torch.device("cpu") if device.type == "meta" else device


def first_weight(model: Module) -> Tensor:
    """The weight that tells in which precision and where a model runs: the token embedding's, or the first."""
    weight = getattr(_embedding(model), "weight", None)
    return weight if isinstance(weight, Tensor) else next(model.parameters())


def text_config(model: Module) -> Any:
    """What the model's config says of text: a part of it where there are images too; None where there is no config."""
    config = getattr(model, "config", None)
    part = getattr(config, "get_text_config", None)
    return config if part is None else part()


def context_length(model: Module) -> int | None:
    """The most tokens the model has positions for, or None when it has no such limit (T5, BLOOM, Mamba).

    A tokenizer's ``model_max_length`` is advice, and no limit.
    """
    positions = getattr(text_config(model), "max_position_embeddings", None)
    return positions - _after_padding(model) if isinstance(positions, int) and positions > 0 else None


def border(model: Module) -> int | None:
    """The length in tokens up to which a model turns by other angles than beyond, or None: LongRoPE (Phi-3) takes its
    short factors or its long ones, the same for all rows of a batch, by the longest."""
    said = getattr(text_config(model), "rope_parameters", None)
    if not isinstance(said, Mapping):
        return None
    every = [said, *(each for each in said.values() if isinstance(each, Mapping))]  # one for each kind of layer
    lengths = [each.get("original_max_position_embeddings") for each in every if each.get("rope_type") == "longrope"]
    return min((each for each in lengths if isinstance(each, int)), default=None)


def sizes(model: Module) -> dict[str, int]:
    """How many types and places of tokens the model has embeddings of, by the argument that takes them."""
    types = getattr(text_config(model), "type_vocab_size", None)
    places = getattr(text_config(model), "max_position_embeddings", None)
    found = {"token_type_ids": types, "position_ids": places}
    return {name: size for name, size in found.items() if isinstance(size, int) and size > 0}


def _after_padding(model: Module) -> int:
    """The position after the padding's, from which RoBERTa and its kin count; else 0."""
    for path, module in named_modules(model):
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None and path.endswith("position_embeddings"):
            return int(padding) + 1
    return 0


def _first_position(model: Module) -> int:
    """The position of the first token: 0, the one after the padding's, or the first of those that the model keeps, as
    Nyströmformer does: 2."""
    kept = (each for path, each in model.named_buffers() if path.rsplit(".", 1)[-1] == "position_ids")
    first = next((int(each.flatten()[0]) for each in kept if each.numel() and each.device.type != "meta"), 0)
    return _after_padding(model) or first


def position_ids(model: Module, task: Task, mask: Tensor) -> Tensor:
    """``[B, T]`` positions that count from 0 at each row's first token, for left padding.

    Raises:
        InputError: left padding would change what the model computes: a classifier reads its first token,
            or the model takes no position ids.
    """
    if task.reads != "position":
        why = "may read its first token, and padding on the left would be that token"
    elif not accepts(model, "position_ids"):
        why = "takes no position_ids, so padding on the left would move its tokens"
    else:
        return count_positions(model, mask)
    raise InputError(f'{type(model).__name__} {why}; use padding_side="right"')


def count_positions(model: Module, mask: Tensor) -> Tensor:
    """``[B, T]`` positions that count from the model's first at each row's first token."""
    return (mask.cumsum(1) - 1).clamp(min=0) + _first_position(model)


def _is_changed_by_few(model: Module) -> bool:
    """Whether a short input changes the model for good: BigBird takes another attention then."""
    return any(getattr(each, "attention_type", None) == "block_sparse" for each in model.modules())


def rows_meet(model: Module, task: Task) -> bool:
    """Whether what a model says of a text or an image hangs on what else is in the batch. No short input tells of
    experts that take a number of all tokens there are (NLLB-MoE, a Switch layer of one's own), which is known by the
    name of that number, and of batch norms that keep no statistics; of a module of one's own that takes texts, and of a
    model that its user has put something into, three short runs tell the rest (experts that choose their tokens)."""
    return _seem_to_meet(model, task) or any(
        any("capacity" in name and isinstance(value, (int, float)) for name, value in vars(each).items())
        or (isinstance(each, _BatchNorm) and each.running_mean is None)
        for each in model.modules()
    )


def _seem_to_meet(model: Module, task: Task) -> bool:
    """Whether a short text is another beside others of its length, before them or behind them: experts that take a
    number of all tokens, first come, first served, turn away those of the last rows. A token of the last is hidden."""
    if not task.segments or task.together == "choices" or is_believed(model):
        return False
    weight = first_weight(model)
    steps = torch.tensor([1, 3, 5, 7])[:, None]
    ids = (torch.arange(6) * steps + steps).to(input_device(model)) % weight.shape[0]
    given = _whole(model, task, ids)
    for name in MASKS.values():
        if name in given:
            given[name][-1, 2] = 0  # as leave-one-out has it: a model may read the first row's mask for all
    found = []
    try:
        with torch.no_grad(), as_it_was(model):
            for rows in (slice(1), slice(-1, None), slice(None)):
                some = {name: value[rows] for name, value in given.items()}
                found.append(_first_of(model(**some | _needed(model, ids[rows]))))
    except Exception:  # of the model's own: it takes something else, or fewer tokens, and nothing is known
        return not is_theirs(model)
    first, last, beside = found
    if beside.shape != (len(ids), *first.shape[1:]) or len(first) != 1 or last.shape != first.shape:
        return False
    return not (_is_close(first, beside[:1], weight.dtype) and _is_close(last, beside[-1:], weight.dtype))


def looks_back(model: Module) -> bool:
    """Whether the logits of a token are the same whatever stands behind it and beside it, as far as short inputs tell:
    what takes no attention mask would read padding there, and of a module of one's own nothing else is known. One input
    does not tell: who chooses among all tokens (mixture of depths, experts' own choice) may choose the same again."""
    if _is_changed_by_few(model):
        return False
    weight = first_weight(model)
    steps = torch.tensor([1, 3, 5, 7, 11, 13])[:, None]  # six texts of other tokens, in other orders
    ids = (torch.arange(8) * steps + torch.arange(len(steps))[:, None]).to(input_device(model)) % weight.shape[0]
    try:
        with torch.no_grad(), as_it_was(model):
            followed = _named(model(input_ids=ids), "logits")
            alone = [_named(model(input_ids=each[None, :4]), "logits") for each in ids]
    except (RuntimeError, ValueError, IndexError):  # its own, or eight tokens are too many
        return False
    if not all(isinstance(each, Tensor) and each.ndim == 3 for each in (followed, *alone)):
        return False
    return all(
        one.shape[1] == 4 and _is_close(one, row[None, :4], weight.dtype)
        for one, row in zip(alone, followed, strict=True)
    )


def is_theirs(model: Module) -> bool:
    """Whether a model, without what adapters have put around it, is one of transformers."""
    return type(base_model(model)).__module__.startswith("transformers.")


def changes(model: Module) -> tuple[object, ...]:
    """What its user has put into a model, each by what is another for another: modules and forwards of other packages
    than torch and transformers, an instance's or a class's, functions in the place of those that a model of
    transformers calls by their names, attention functions and masks that transformers was told of, and hooks, of a
    module or of all there are. Nothing is known of what these read."""
    found: list[object] = []
    configs: dict[int, Any] = {}
    classes: dict[type[Module], bool] = {}
    for _, module in named_modules(model):  # as cheap as can be, for a short text would notice
        held, kind = vars(module), type(module)
        if kind not in classes:
            classes[kind] = kind.__module__.startswith(THEIRS)
        if not classes[kind]:
            found.append((kind, module))
        if "forward" in held and not _home(held["forward"]).startswith(WRAPPERS):
            found.append(("forward", held["forward"]))
        if held["_forward_hooks"] or held["_forward_pre_hooks"]:
            found += [("hook", each) for each in users_hooks(module)]
        if "config" in held:
            configs[id(held["config"])] = held["config"]
    found += [("hook", each) for each in _everywhere()]
    forwards = [kind.forward for kind, is_known in classes.items() if is_known]
    found += [("forward", each) for each in forwards if not _home(each).startswith(WRAPPERS)]
    for home in {kind.__module__: None for kind, is_known in classes.items() if is_known}:
        called = vars(sys.modules[home]).values() if home.startswith("transformers.") and home in sys.modules else ()
        found += [("function", each) for each in called if type(each) is FunctionType and _is_users(each)]
    kinds = {getattr(config, "_attn_implementation", None): None for config in configs.values()}
    for path, name in TOLD:
        told: Any = getattr(sys.modules.get(path), name, {})
        given = [(kind, told[kind]) for kind in kinds if isinstance(kind, str) and kind in told]
        found += [each for each in given if not _home(each[1]).startswith(THEIRS)]
    return tuple(found)


def _is_users(function: FunctionType) -> bool:
    """Whether a function is of none of the packages that a model of transformers is written with."""
    home = _home(function)
    return not home.startswith(WRAPPERS) and home.partition(".")[0] not in sys.stdlib_module_names


def users_hooks(module: Module) -> list[Any]:
    """The forward hooks of a module that are its user's: what they read, and do, nobody knows."""
    return _foreign(module._forward_hooks, module._forward_pre_hooks)


def _everywhere() -> list[Any]:
    """The hooks of all modules there are that are a user's."""
    return _foreign(nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)


def _foreign(*held: Mapping[int, Any]) -> list[Any]:
    return [each for hooks in held for each in hooks.values() if not _home(each).startswith(WRAPPERS)]


def _home(function: Any) -> str:
    """The module that a function, or its class, is from."""
    return str(getattr(function, "__module__", None) or type(function).__module__)


def is_believed(model: Module) -> bool:
    """Whether a model is one of transformers, made of modules that are there, too."""
    return type(model).__module__.startswith("transformers.") and not changes(model)


def _whole(model: Module, task: Task, ids: Tensor) -> dict[str, Tensor]:
    """The same ids for all that a model reads, none of them hidden."""
    given = dict.fromkeys(task.arguments, ids)
    return given | {MASKS[name]: torch.ones_like(ids) for name in given if accepts(model, MASKS[name])}


def _needed(model: Module, ids: Tensor) -> dict[str, Tensor]:
    """What a module of one's own cannot run without, beside ids and their mask: what tokenizers tell of each token."""
    kinds = inspect.signature(model.forward).parameters.get("token_type_ids")
    return {} if kinds is None or kinds.default is not kinds.empty else {"token_type_ids": torch.zeros_like(ids)}


def _first_of(output: Any) -> Tensor:
    """What a model says in a short run: its logits, those of a span's start, or its hidden states.

    Raises:
        ValueError: none of these.
    """
    for name in ("logits", "start_logits", "last_hidden_state"):
        found = _named(output, name)
        if isinstance(found, Tensor) and found.ndim > 1:
            return found
    raise ValueError("no logits and no hidden states")


def _is_close(alone: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs are the same, but for rounding beside the largest finite number of them."""
    largest, lost = alone.nan_to_num(0, 0, 0).abs().max().item(), torch.finfo(dtype).eps ** 0.5
    return torch.allclose(alone, other, rtol=0, atol=lost * largest, equal_nan=True)


def hides_ones(model: Module, task: Task, pad_id: int) -> bool:
    """Whether a module of one's own hides the tokens at which its attention mask is 1, as torch's ``key_padding_mask``
    does, as far as a short input tells: a mask of ones changes what it says without one; or, where it cannot do without
    a mask, the one token at which that is 0 makes a difference, and another makes none. transformers' are believed."""
    if is_theirs(model) or not accepts(model, MASKS["input_ids"]):
        return False
    weight = first_weight(model)
    plain = [i for i in range(2, weight.shape[0]) if i not in (pad_id, end_read(model, task))][:6]  # most pad with 0
    if len(plain) < 3:
        return False
    ids = torch.tensor([plain], device=input_device(model))
    given = _whole(model, task, ids) | _needed(model, ids)
    unmasked = {name: each for name, each in given.items() if name not in MASKS.values()}

    def said(given: Mapping[str, Tensor]) -> Tensor | None:
        try:
            return _first_of(model(**given))[..., -1, :]  # of the last token, or of the whole text
        except Exception:  # of the model's own: it takes something else, and a run will say so
            return None

    def differ(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None or one.shape != other.shape:
            return False
        return not _is_close(one, other, weight.dtype)

    with torch.no_grad(), as_it_was(model):
        without = said(unmasked)
        if without is not None:  # and says the same again, as what keeps an average does not
            return differ(without, said(given)) and not differ(without, said(unmasked))
        masks = {name: (ids != plain[0]).to(torch.int64) for name in given if name in MASKS.values()}
        whole, first, second = (
            said(given | masks | dict.fromkeys(task.arguments, torch.where(ids == token, plain[-1], ids)))
            for token in (plain[-1], plain[0], plain[1])
        )
        return differ(whole, first) and second is not None and not differ(whole, second)


def hides(model: Module, task: Task) -> bool:
    """Whether a token that the attention mask hides makes any difference, as far as a short input tells: RWKV takes a
    mask and does not look at it."""
    if _is_changed_by_few(model):
        return True
    weight = first_weight(model)
    ids = torch.arange(6, device=input_device(model))[None] % weight.shape[0]
    found = []
    try:
        with torch.no_grad(), as_it_was(model):
            for hidden in (torch.zeros_like(ids), ids == 1):
                given = {"input_ids": ids, "attention_mask": (~hidden.bool()).to(torch.int64)}
                if "decoder_input_ids" in task.arguments:
                    given["decoder_input_ids"] = ids[:, :3]
                found.append(_named(model(**given | _needed(model, ids)), "logits"))
        return not torch.equal(*found)
    except Exception:  # of the model's own: it takes something else
        return True


def counts_places(model: Module, task: Task) -> bool:
    """Whether a module of one's own counts by the attention mask at which place each token stands, so that those behind
    a hidden one move up, as far as a short input tells: it says the same of a text without the token, and something
    else where tokens are repeated or change places. Distances alone, as BLOOM's, are no places."""
    if is_theirs(model) or task.together or _is_changed_by_few(model):
        return False
    count = first_weight(model).shape[0]
    a, b, c = (count // 2 + i for i in range(3))
    whole = ([a, c], [a, a, a], [a, a], [a, b, c], [b, a, c])
    found = []
    try:
        with torch.no_grad(), as_it_was(model):
            for text, hidden in (([a, b, c], 1), *((text, None) for text in whole)):
                ids = torch.tensor([text], device=input_device(model))
                mask = torch.ones_like(ids)
                if hidden is not None:
                    mask[0, hidden] = 0
                given = {"input_ids": ids, "attention_mask": mask} | _needed(model, ids)
                if "position_ids" in inspect.signature(model.forward).parameters:
                    given["position_ids"] = torch.arange(len(text), device=ids.device)[None]
                if "decoder_input_ids" in task.arguments:
                    given["decoder_input_ids"] = ids.new_tensor([[a, b, c]])
                logits = _first_of(model(**given))[0]
                found.append(logits[-1] if task.reads == "position" else logits)
    except Exception:  # it takes something else, or fewer tokens
        return False
    if len({each.shape for each in found}) > 1:
        return False
    moved, short, *others = found
    same = functools.partial(_is_close, dtype=first_weight(model).dtype)
    return same(moved, short) and not same(*others[:2]) and not same(*others[2:])


WIDE = 16
"""As wide a short text is padded to find out whether that changes what a model says: no pooling divides it."""


def heeds_mask(model: Module, task: Task, pad_id: int, side: str, wide: int = WIDE) -> bool:
    """Whether the model says the same of a text with padding, up to so many tokens, that its mask hides, if it takes
    one, as far as a short input tells: a convolution over tokens, as ConvBERT's, reads what is there, and so do
    MobileBERT's embeddings. With padding on the right, a model of transformers that gives one token after another is
    believed (:func:`is_believed`), if it has none, and torch's own attention can take the place of its; padding on the
    left moves the patches that BLT makes of bytes. A classifier that reads one token may not look at the last, beside
    the padding, in a short input: so what transformers' models hand their heads is compared token by token, too. What
    draws at random, as Reformer's hashes are, says the same by chance alone. A decoder whose attention was told to look
    ahead does so only where no mask is needed."""
    convolves = any(isinstance(each, _ConvNd) and max(each.kernel_size) > 1 for each in model.modules())
    is_plain = getattr(model, "_supports_sdpa", False) and is_believed(model)
    is_told = task is Task.CAUSAL and any(getattr(each, "is_causal", None) is False for each in model.modules())
    if side == "right" and is_plain and not (convolves or is_told) and task in (Task.CAUSAL, Task.SEQ2SEQ):
        return True
    if _is_changed_by_few(model):  # and its random blocks hang on how wide a batch is
        return False
    weight, count = first_weight(model), 7  # which no pooling divides, and no padding of theirs
    end = end_read(model, task)
    plain = [i for i in range(weight.shape[0]) if i not in (pad_id, end)][:count]
    text = torch.tensor([plain if end is None else [*plain[:-1], end]], device=input_device(model))
    space = (wide - text.shape[1], 0) if side == "left" else (0, wide - text.shape[1])
    found, states = [], []

    def keep(_: Module, __: Any, output: Any) -> None:
        state = _named(output, "last_hidden_state")
        if isinstance(state, Tensor):
            states.append(state)

    try:
        with torch.no_grad(), as_it_was(model), hooks() as on:
            body = getattr(model, "base_model", model) if is_theirs(model) else model
            if isinstance(body, torch.nn.Module) and body is not model:
                on.after(body, keep)
            before = torch.get_rng_state()
            for ids, mask in (
                (text, torch.ones_like(text)),
                (torch.nn.functional.pad(text, space, value=pad_id), torch.nn.functional.pad(text * 0 + 1, space)),
            ):
                given: dict[str, Any] = {"input_ids": ids} | _needed(model, ids)
                if accepts(model, MASKS["input_ids"]):
                    given["attention_mask"] = mask
                if side == "left" and not mask.all():
                    given["position_ids"] = position_ids(model, task, mask)
                if task.together == "choices":
                    given = {name: value[None] for name, value in given.items()}
                if accepts(model, "use_cache"):
                    given["use_cache"] = False
                if "decoder_input_ids" in task.arguments:
                    given["decoder_input_ids"] = text[:, :3]
                found.append(_first_of(model(**given)))
            draws = not torch.equal(before, torch.get_rng_state())
    except InputError:  # no padding on the left; a run will say so
        return True
    except Exception:  # it takes something else, and a run will say so; or no positions (Reformer)
        return is_theirs(model) and (side == "right" or not found)  # one's own may take fewer tokens: nothing is known
    for alone, padded in (found, states) if len(states) == len(found) else (found,):
        real = padded[:, -alone.shape[1] :] if side == "left" else padded[:, : alone.shape[1]]
        if alone.shape == real.shape and (draws or not _is_close(alone, real, weight.dtype)):
            return False
    return True


def is_moved_by_padding(model: Module, ids: Sequence[int], arguments: Mapping[str, Tensor], pad_id: int) -> bool:
    """Whether a text beside an image has another embedding with padding behind it that its mask hides, as where it is
    read at its last place."""
    weight, text = first_weight(model), torch.tensor([[*ids]], device=input_device(model))
    others = {
        name: each.to(text.device, weight.dtype if each.is_floating_point() else None)
        for name, each in arguments.items()
    }
    found = []
    try:
        with torch.no_grad(), as_it_was(model):
            for space in ((0, 0), (0, 1)):
                mask = torch.nn.functional.pad(torch.ones_like(text), space)
                padded = torch.nn.functional.pad(text, space, value=pad_id)
                output = model(input_ids=padded, attention_mask=mask, **others)
                found.append(_compared(output, model, Task.IMAGE_TEXT))
    except Exception:  # it takes something else, and a run will say so
        return False
    alone, padded = found
    return not _is_close(alone, padded, weight.dtype)


def head_is_hooked(model: Module) -> bool:
    """Whether a user's hook is at a model's head: it may read all rows, and is given them."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return isinstance(head, torch.nn.Module) and bool(users_hooks(head) or _everywhere())


def rows_alone(model: Module, task: Task, pad_id: int) -> bool:
    """Whether a model's head may be given a few rows alone, as far as a short input tells: a module of one's own may
    add others of each token to its logits, a second table's, say, or use them again. transformers' are believed."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, torch.nn.Module):
        return True
    homes = type(head).__module__, _home(head.forward)
    if type(model).__module__.startswith("transformers.") and all(home.startswith(WRAPPERS) for home in homes):
        return True
    weight, positions, calls = first_weight(model), torch.tensor([[4, 1]]), 0
    plain = [i for i in range(weight.shape[0]) if i not in (pad_id, end_read(model, task))][:6]
    given = _whole(model, task, torch.tensor([plain], device=input_device(model)))

    def count(_: Module, __: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += 1

    try:
        with torch.no_grad(), as_it_was(model):
            with hooks() as on:
                on.before(head, count)
                whole = _at(_logits(model(**given), model, task, 1), positions)
            with only_rows(model, positions) as read:
                alone = read(_logits(model(**given), model, task, 1))
    except Exception:  # of the model's own: it takes something else, or more
        return False
    if calls != 1 or alone.shape != whole.shape:
        return False
    lost = 16 * torch.finfo(weight.dtype).eps * whole.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(alone, whole, rtol=0, atol=lost, equal_nan=True)


@contextmanager
def reading(
    model: Module,
    task: Task,
    inputs: Mapping[str, Any],
    positions: Tensor | None,
    pooling: Pooling,
    alone: bool,
) -> Iterator[Read]:
    """Where the logits of a task are read.

    Args:
        model: the model.
        task: what it predicts.
        inputs: what it is about to be called with.
        positions: ``[B, n]``, for a task that reads at positions.
        pooling: how the embeddings of texts are made, for a task that compares them.
        alone: whether the head may be given the rows at the positions alone (:func:`rows_alone`).

    Yields:
        What reads the logits ``[B, n, V]`` from the model's output.
    """
    mask = inputs.get(MASKS["input_ids"])
    if task.reads == "position":
        assert positions is not None
        wide = _width(inputs.get(task.arguments[-1]))
        with only_rows(model, positions, wide, alone) as read:
            yield lambda output: read(_logits(output, model, task, positions.shape[0]))
    elif task.reads == "span":
        yield lambda output: _span(output, mask, model, task)
    elif task.reads == "embeddings":
        yield lambda output: _embedded(output, mask, model, task, pooling)
    elif task.reads == "similarity":
        yield lambda output: _compared(output, model, task)
    elif task.reads == "map":
        yield lambda output: _map(output, model, task)
    else:
        first = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
        yield lambda output: _logits(output, model, task, None if first is None else len(first)).unsqueeze(1)


def _width(ids: Any) -> int | None:
    return ids.shape[-1] if isinstance(ids, Tensor) else None


def _logits(output: Any, model: Module, task: Task, rows: int | None) -> Tensor:
    """``[B, T, V]``, or ``[B, V]`` where they belong to the whole of an input.

    Raises:
        ModelError: the model returned something else.
    """
    _refuse_features(output, model, task)
    found: Any = _named(output, "logits")
    shape = ("B", "T", "V") if task.reads == "position" else ("B", "V")
    fits = isinstance(found, Tensor) and found.ndim == len(shape) and found.is_floating_point()
    if fits and rows in (None, found.shape[0]):  # sooner asked than len() under a mode
        logits: Tensor = found
        return logits
    wanted = f"logits [{', '.join(shape)}], a row for each of {rows} inputs"
    raise ModelError(_other_output(found, model, task, wanted))


def _refuse_features(output: Any, model: Module, task: Task) -> None:
    """Refuse what a model without a head returns, which has the shape of logits, or of a map, and stands for no class.

    Raises:
        ModelError: hidden states or embeddings come first, or the logits of an answer's start.
    """
    first = str(next(iter(output), "")) if isinstance(output, Mapping) and "logits" not in output else ""
    if first == "start_logits":
        raise ModelError(
            f"{type(model).__name__} returned {first}, a logit for each place of the text; explain it with "
            "task=Task.QUESTION_ANSWERING"
        )
    is_hidden = first == "last_hidden_state"
    if is_hidden or first.endswith(OF_WHOLE):
        texts = is_hidden and not task.pictures
        mend = "compare texts with task=Task.EMBEDDINGS" if texts else "use lrpx.propagate(model, recipe)"
        raise ModelError(
            f"{type(model).__name__} returned {'hidden states' if is_hidden else first}, whose features are no "
            f"{task.logits}; load the class that has a head on it, or {mend}"
        )
    if task.logits == "tokens" and type(output) in (tuple, list):
        _refuse_hidden_first(output, model)


def _refuse_hidden_first(output: Sequence[Any], model: Module) -> None:
    """Refuse what an own model returns, where something as wide as its vocabulary comes behind something that is not.

    Raises:
        ModelError: it does.
    """
    size = getattr(getattr(_embedding(model), "weight", None), "shape", (0,))[0]
    widths = [each.shape[-1] for each in output if isinstance(each, Tensor) and each.ndim == 3]
    if size in widths[1:] and size != widths[0]:
        raise ModelError(
            f"{type(model).__name__} returned {widths[0]} numbers for each token first, as hidden states are, and "
            f'{size} behind them, as many as its vocabulary has tokens; return the logits first, or as "logits"'
        )


def _named(output: Any, name: str) -> Any:
    """What a model returned by this name, or first."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if isinstance(getattr(output, name, None), Tensor):
        return getattr(output, name)
    ordered = isinstance(output, (tuple, list)) or hasattr(output, "to_tuple")  # not a dict, whose order says nothing
    return output[0] if ordered and len(output) else output


def _other_output(found: Any, model: Module, task: Task, wanted: str) -> str:
    told = type(found).__name__
    if isinstance(found, Tensor):
        told = f"a tensor {list(found.shape)} of {str(found.dtype).removeprefix('torch.')}"
    elif isinstance(found, Mapping):
        told = f"{told} of {', '.join(map(str, found)) or 'nothing'}"
    return (
        f"{type(model).__name__} returned {told}, and {task.named} returns {wanted}; return these, as a tensor, as "
        'the first of a tuple or as "logits", or say with task= what it predicts'
    )


def _span(output: Any, mask: Tensor | None, model: Module, task: Task) -> Tensor:
    """``[B, 1, 2T]``: the logits of a span's start, then those of its end; none at padding.

    Raises:
        ModelError: the model returned something else.
    """
    named = isinstance(output, Mapping) and {"start_logits", "end_logits"} <= set(output)
    found = [output["start_logits"], output["end_logits"]] if named else []
    if isinstance(output, (tuple, list)):
        found = list(output[:2])
    fits = len(found) == 2 and all(isinstance(each, Tensor) and each.ndim == 2 for each in found)
    if not fits or (mask is not None and any(each.shape != mask.shape for each in found)):
        raise ModelError(_other_output(output, model, task, "start_logits and end_logits [B, T]"))
    if mask is not None:
        found = [each.masked_fill(mask == 0, -torch.inf) for each in found]
    return torch.cat(found, -1).unsqueeze(1)


def _embedded(output: Any, mask: Tensor | None, model: Module, task: Task, pooling: Pooling) -> Tensor:
    """``[B, 1, 2d]``: each text's hidden states as one, of the two texts of a row one after the other.

    Raises:
        ModelError: the model returned something else.
    """
    hidden = _named(output, "last_hidden_state")
    fits = isinstance(hidden, Tensor) and hidden.ndim == 3 and len(hidden) % 2 == 0
    if not fits or (mask is not None and hidden.shape[:2] != mask.shape):
        raise ModelError(_other_output(hidden, model, task, "hidden states [B, T, d]"))
    kept = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask
    weights = pooling.weights(kept, hidden.dtype)
    pooled = torch.einsum("bt,btd->bd", weights, hidden)[:, : pooling.dims]
    return pooled.reshape(len(hidden) // 2, 1, -1)


def _map(output: Any, model: Module, task: Task) -> Tensor:
    """``[B, 1, K, R, C]``: the logits of each class at each place; of one class where there is no dimension of them.

    Raises:
        ModelError: the model returned something else.
    """
    queries = next((name for name in OF_QUERIES if isinstance(output, Mapping) and name in output), None)
    if queries is not None:
        raise ModelError(
            f"{type(model).__name__} gives {queries}, a row for each query and none for the places of a map; use "
            "lrpx.propagate(model, recipe), and explain the number of a query"
        )
    _refuse_features(output, model, task)
    found = _named(output, "logits")
    if not (isinstance(found, Tensor) and found.ndim in (3, 4) and found.is_floating_point()):
        raise ModelError(_other_output(found, model, task, "a map [B, K, R, C] or [B, R, C]"))
    entries = getattr(getattr(model, "config", None), "vocab_size", None)
    is_masked = isinstance(output, Mapping) and "ids_restore" in output  # of masked autoencoders
    if found.ndim == 3 and (is_masked or found.shape[-1] == entries):
        raise ModelError(
            f"{type(model).__name__} gives {list(found.shape[1:])} numbers, a row for each patch and none for those of "
            "a map; use lrpx.propagate(model, recipe), and explain a number of a patch"
        )
    return found.unsqueeze(1) if found.ndim == 4 else found[:, None, None]


def _compared(output: Any, model: Module, task: Task) -> Tensor:
    """``[1, 1, 2d]``: the embedding of an image, then that of a text.

    Raises:
        ModelError: the model returned something else.
    """
    names = ("image_embeds", "text_embeds")
    found = [output[name] if isinstance(output, Mapping) and name in output else None for name in names]
    if not all(isinstance(each, Tensor) and each.ndim == 2 for each in found):
        raise ModelError(_other_output(output, model, task, "image_embeds and text_embeds [B, d]"))
    return torch.cat([each for each in found if each is not None], -1).unsqueeze(1)


@contextmanager
def only_rows(
    model: Module, positions: Tensor, wide: int | None = None, alone: bool = True
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Send only the rows at ``positions`` ``[B, n]`` of each sequence through the language-model head.

    The head's hidden states ``[B, T, d]`` become ``[B, n, d]``.

    Args:
        model: the model.
        positions: ``[B, n]``.
        wide: how many tokens it is given, where that is known.
        alone: False for a head that must see all positions.

    Yields:
        What reads the logits ``[B, n, V]`` at the positions from those that the model gives, whether its head saw all
        positions or only these.
    """
    thread = threading.get_ident()
    places = 0  # those that the head would have seen

    def select(_: Module, args: tuple[Any, ...]) -> Any:
        nonlocal places
        if threading.get_ident() != thread:
            return None
        hidden = args[0]
        if hidden.ndim != 3 or hidden.shape[0] != positions.shape[0] or hidden.shape[1] == 1:
            return None
        places = hidden.shape[1]
        return (_at(hidden, positions), *args[1:])

    def read(logits: Tensor) -> Tensor:
        count = places or logits.shape[1]
        if wide is not None and count != wide:
            told = f"{type(model).__name__} returned logits of {count} places for {wide} tokens"
            if count > wide:
                raise ModelError(
                    f"{told}: it puts others among them, as soft prompts do, and which are the text's is not known; "
                    "give it the embeddings of all under lrpx.propagate"
                )
            raise ModelError(f"{told}; return those of every token, or say with task= what it predicts")
        return logits if places or logits.shape[1] == positions.shape[1] == 1 else _at(logits, positions)

    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not alone:
        yield read
        return
    with hooks() as on:
        on.before(head, select)
        yield read


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """``[B, n, …]``: what stands at ``positions`` ``[B, n]`` of ``[B, T, …]``."""
    positions = positions.to(values.device)
    if positions.shape[0] == 1:
        return values.index_select(1, positions[0])
    return values[torch.arange(len(positions), device=values.device)[:, None], positions]
