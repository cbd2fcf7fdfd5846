"""What a model's logits are about, and where they are read: the tasks, as data, and what a model's class tells.

The only place that knows Hugging Face's model classes, and it knows their mappings, not their families. A new task is a
row of :class:`Task`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from lrpx._modules import argument_names, base_model, named_modules
from lrpx.errors import InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    Read = Callable[[Any], Tensor]

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


def is_named_inside(model: Module, argument: str) -> bool:
    """Whether a forward pass takes arguments of any name, and a module inside names this one, to which it may hand it
    on: an EncoderDecoderModel's encoder the types of tokens."""
    inside = (each for each in model.modules() if each is not model)
    return _takes_any(model) and any(argument in argument_names(each.forward) for each in inside)


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
    module = token_table(model)
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


def token_table(model: Module) -> Any:
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
    modules = [module, *(token_table(part) for part in parts if part is not None)]
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
    """The argument that takes an image or a sound: what the model says itself, else the task's, and else the only one
    of a module of one's own, or the only one that it cannot do without; of one that hands all on to its ``module``,
    that one's.

    Raises:
        ModelError: nobody can tell which it is, for the first may be a mask; or it has no name.
    """
    name = str(getattr(model, "main_input_name", None) or task.arguments[0])
    if accepts(model, name):
        return name
    taken = inspect.signature(model.forward).parameters.values()
    found = [each for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    inner = getattr(model, "module", None)
    if not found and _takes_any(model) and isinstance(inner, torch.nn.Module):  # DataParallel, AveragedModel
        return signal_argument(inner, task)
    needed = [each for each in found if each.default is each.empty] if len(found) > 1 else found
    if not (found or _takes_any(model)) or [each.kind for each in needed] == [inspect.Parameter.POSITIONAL_ONLY]:
        raise ModelError(
            f"{type(model).__name__}.forward takes what it is given by its place alone, and inputs are passed by name; "
            f"name the {'image' if task.pictures else 'sound'} among its arguments, as {name}"
        )
    is_mask = len(found) > len(needed) == 1 and "mask" in needed[0].name.lower()
    if found and (len(needed) != 1 or is_mask):
        raise ModelError(
            f"{type(model).__name__}.forward takes {', '.join(each.name for each in found)}, and nobody knows which of "
            f"these is the {'image' if task.pictures else 'sound'}; call it {name}, or let it be the only one without "
            "a default"
        )
    return needed[0].name if found else name


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
    weight = getattr(token_table(model), "weight", None)
    return weight if isinstance(weight, Tensor) else next(model.parameters())


def text_config(model: Module) -> Any:
    """What the model's config says of text: a part of it where there are images too; None where there is no config."""
    config = getattr(model, "config", None)
    part = getattr(config, "get_text_config", None)
    return config if part is None else part()


def pad_id(model: Module) -> int | None:
    """What a model takes for padding, or None."""
    found = getattr(text_config(model), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else None


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


def seen_from(model: Module, place: int, looks_back: bool) -> slice:
    """Which places all layers see from one, if nothing is hidden: with windows, or chunks, of so many tokens those of
    the narrowest. A window looks back alone, its own place among its tokens, or as far to both sides."""
    config = text_config(model)
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    configs = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]

    def length(name: str, kind: str) -> int | None:
        if kinds and not any(kind in each for each in kinds):  # Inkling's are "hybrid_sliding"
            return None
        found = (getattr(each, name, None) for each in configs)
        return min((each for each in found if isinstance(each, int) and each > 0), default=None)

    first, end = 0, place + 1 if looks_back else None
    window = length("sliding_window", "sliding")
    if window is None and "local" in kinds:  # GPT-Neo's
        window = length("window_size", "local")
    if window is not None:
        first, end = max(place - window + looks_back, 0), place + 1 + (0 if looks_back else window)
    chunk = length("attention_chunk_size", "chunked_attention")
    if chunk is not None and kinds:
        first = max(first, place // chunk * chunk)
    return slice(first, end)


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


def told_position(model: Module) -> int:
    """The position of the first token, as the modules' names tell: 0, the one after the padding's, or the first of
    those that the model keeps, as Nyströmformer does: 2."""
    kept = (each for path, each in model.named_buffers() if path.rsplit(".", 1)[-1] == "position_ids")
    first = next((int(each.flatten()[0]) for each in kept if each.numel() and each.device.type != "meta"), 0)
    return _after_padding(model) or first


def position_ids(model: Module, task: Task, mask: Tensor) -> Tensor:
    """``[B, T]`` positions that count from 0 at each row's first token, for left padding.

    Raises:
        InputError: left padding would change what the model computes, or how it is shared: a classifier reads its
            first token, the model takes no position ids, or it counts blocks of places (MiniMax; Kimi Linear beyond
            64), which share by themselves.
    """
    if task.reads != "position":
        why = "may read its first token, and padding on the left would be that token"
    elif not accepts(model, "position_ids"):
        why = "takes no position_ids, so padding on the left would move its tokens"
    elif _counts_blocks(model) or any(mask.shape[-1] > size for size in _chunks(model)):
        why = "attends in blocks from the first place on, and padding on the left would move its tokens into others"
    else:
        return count_positions(mask, told_position(model))
    raise InputError(f'{type(model).__name__} {why}; use padding_side="right"')


def _counts_blocks(model: Module) -> bool:
    """Whether linear attention goes over blocks of places whose state decays by constants, as MiniMax's."""
    config = text_config(model)
    return hasattr(config, "block_size") and "linear_attention" in (getattr(config, "layer_types", None) or ())


def _chunks(model: Module) -> set[int]:
    """Of how many places each the chunks are that the model's gated delta rules go over."""
    kinds = {type(each) for _, each in named_modules(model)}
    return {size for kind in kinds if (size := _chunk(kind)) is not None}  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _chunk(kind: type[Module]) -> int | None:
    """How many places a layer's gated delta rule takes at once, as the function that the layer calls has it."""
    forward: Any = inspect.unwrap(kind.forward)
    for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
        function = forward.__globals__.get(name)
        if inspect.isfunction(function):
            takes = inspect.signature(function).parameters
            if {"chunk_size", "beta"} <= takes.keys() and type(size := takes["chunk_size"].default) is int:
                return size
    return None


def count_positions(mask: Tensor, first: int) -> Tensor:
    """``[B, T]`` positions that count from the model's ``first`` at each row's first token."""
    return (mask.cumsum(1) - 1).clamp(min=0) + first
