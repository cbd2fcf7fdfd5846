"""A model and its tokenizer, by name or folder, with the class its config names."""

from __future__ import annotations

import re
from functools import cache
from os import PathLike, fsdecode
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lrpx import tasks
from lrpx._pooling import UNTOUCHED, cut, kind_of, reads_by_itself
from lrpx.errors import InputError, ModelError
from lrpx.targets import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder", "trust_remote_code")
"""The options that say which files are meant: for the config and the tokenizer as for the model."""


def load_pretrained(name: str, dtype: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """``(model, tokenizer)``; the tokenizer, or the processor of a model of images, is None where there is none.

    Args:
        name: a name on the Hub or a folder.
        dtype: as transformers takes it.
        options: passed on to transformers.

    Raises:
        InputError: there is no such dtype, or it is given by its older name; or a task is given.
        ModelError: the model cannot be found or loaded, or its class has no head to explain.
    """
    import transformers

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise InputError(f"there is no dtype {dtype!r} to run a model in; pass float32, float64, bfloat16 or float16")
    if "torch_dtype" in options:  # which transformers leaves out beside the newer name
        raise InputError(f"torch_dtype is an older name of dtype; pass dtype={options['torch_dtype']!r} instead")
    if "task" in options:
        raise InputError(
            "the task of a model is that of the class its config names; load it yourself and pass it to "
            "lrpx.Explainer(model, tokenizer, task=…)"
        )
    where = {option: options[option] for option in HUB_OPTIONS if option in options}
    _refuse_no_folder(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name, **where)
        architecture = (config.architectures or ["AutoModelForCausalLM"])[0]
        kind = getattr(transformers, architecture, None)
        has_code = any(each.startswith("AutoModel") for each in getattr(config, "auto_map", None) or ())
        if kind is None or (has_code and options.get("trust_remote_code")):
            whose = "no class of transformers" if kind is None else "to run by code of its own"
            raise ModelError(
                f"{name} holds a {architecture}, which is {whose}; load it yourself and pass it to "
                "lrpx.Explainer(model, tokenizer)"
            )
        if not architecture.startswith("Auto"):
            try:
                tasks.task_of_class(kind)
            except ModelError as error:
                raise ModelError(f"{name} cannot be explained: {error}") from None
        model, loaded = kind.from_pretrained(name, dtype=dtype, **options, output_loading_info=True)
        task = tasks.task_of(model)
        unfit = (each for each, *_ in loaded["mismatched_keys"])  # where a user lets transformers leave these out
        _refuse_random(name, architecture, [*loaded["missing_keys"], *unfit], task)
        tokenizer = _tokenizer(name, config, task, where)
    except ModelError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if "ignore_mismatched_sizes" in first:  # said above it, in a report that is not shown
            first = "its weights have other shapes than its config.json says"
        raise ModelError(
            f"cannot load the model {name!r}: {first.rstrip('. ')}; pass a folder, or the name of a model that is in "
            "the local cache or that the network can reach"
        ) from error
    return model, tokenizer


def _refuse_no_folder(name: str) -> None:
    """Refuse what can only be meant as a folder, and is none with a model in it.

    Raises:
        ModelError: says what is missing.
    """
    path = Path(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2 or path.exists()
    if not name.strip():
        raise ModelError("the name of the model is empty; pass a folder or a name on the Hub, or leave it out")
    if is_path and not path.exists():
        raise ModelError(f"there is no folder {name}; pass the folder of a model, or its name on the Hub")
    if is_path and not path.is_dir():
        raise ModelError(f"{name} is a file; pass the folder that holds the model")


def _refuse_random(name: str, architecture: str, missing: Iterable[str], task: tasks.Task) -> None:
    """Refuse a model with weights that are in no file, and so are random: the files are of another class.

    Raises:
        ModelError: there are such; the pooler of a text encoder is none, for its hidden states are read before it.
    """
    found = sorted(each for each in missing if task is not tasks.Task.EMBEDDINGS or "pooler" not in each)
    if found:
        raise ModelError(
            f"{name} has no weights for {found[0]} and {len(found)} in all of a {architecture}, which would be random; "
            "load it yourself with the class that the files are of, and pass it to lrpx.Explainer(model, tokenizer)"
        )


def taken_apart(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """``(model, tokenizer)`` of a pipeline of transformers, a SentenceTransformer or a CrossEncoder; anything else as
    it is.

    A pipeline has a processor for images with texts, a tokenizer for texts, or what reads images or sounds.
    """
    if is_sentence_transformer(model) or is_cross_encoder(model):
        encoder = getattr(model[0], "auto_model", None)
        if isinstance(encoder, torch.nn.Module):
            return encoder, model.tokenizer if tokenizer is None else tokenizer
    if not _is_one("Pipeline", "transformers", model):
        return model, tokenizer
    readers = (
        getattr(model, name, None) for name in ("processor", "tokenizer", "image_processor", "feature_extractor")
    )
    found = next((reader for reader in readers if reader is not None), None)
    return model.model, found if tokenizer is None else tokenizer


CUTTING = ("TokenClassificationPipeline", "ZeroShotClassificationPipeline")
"""Pipelines that cut where their tokenizer says, without being told."""


HANDED_ON = ("tokenizer_kwargs", "tokenizer_encode_kwargs", "processor_kwargs")
"""What pipelines hand on to their tokenizer, to its chat template, or to their processor: of masked models, of those
that write, of those that take images."""

ALL_HANDED_ON = tuple(
    f"{kind}Pipeline" for kind in ("TextClassification", "FeatureExtraction", "ImageTextToText", "AnyToAny")
)
"""Pipelines that hand on all that they are told of reading."""

CHANGING = ("continue_final_message", "tools", "documents", "handle_long_generation")
"""What other pipelines are told that changes the tokens of a chat or a text, where they are told it at all."""


def _told(pipeline: Any) -> dict[str, Any]:
    """How a pipeline of transformers reads texts, as it was told when it was made."""
    given = dict(getattr(pipeline, "_preprocess_params", {}))
    for name in HANDED_ON:
        given |= given.get(name) or {}
    return given


def cut_by_whole(model: Any) -> int | None:
    """At how many tokens a CrossEncoder cuts pairs of texts off, or a pipeline of transformers texts, as it was told
    when it was made or as its kind is; None where it does not, and of what is none of the two."""
    if is_cross_encoder(model):
        told = getattr(model[0], "processing_kwargs", None)
        return whole_number(cut("the CrossEncoder", told, model.max_seq_length))
    if not _is_one("Pipeline", "transformers", model):
        return None
    given = _told(model)
    most, how = given.get("max_length"), given.get("truncation")
    is_told_by_length = how is None and most is not None and not given.get("padding")  # as tokenizers take it
    is_kind = any(_is_one(kind, "transformers", model) for kind in CUTTING)
    if not (is_told_by_length or is_kind) and how in (None, False, "do_not_truncate"):
        return None
    return whole_number(getattr(model.tokenizer, "model_max_length", None) if most is None else most)


def refuse_other_reading(model: Any) -> None:
    """Refuse a pipeline of transformers that gives its model other tokens of a text than its tokenizer makes, and a
    CrossEncoder that does so, or has more than a model.

    Raises:
        ModelError: it does, as it was told when it was made or by the model's config.
    """
    if is_cross_encoder(model):
        parts = [kind_of(part) for part in model]
        others = [*parts[1:], *(kind for kind in parts[:1] if kind != "Transformer")]
        does = f"makes its scores by a {others[0]} too" if others else ""
        if reads_by_itself(model):
            does = "reads pairs by code of its own"
        if model.default_prompt_name is not None:
            does = f"puts a prompt before each text, {model.default_prompt_name!r}"
        if "message" in (getattr(model[0], "modality_config", None) or ()):
            does = "reads each pair as a chat's messages, by a chat template"
        if does:
            raise ModelError(
                f"the CrossEncoder {does}, which is no part of its classifier; pass that and its tokenizer, and texts "
                "or token ids as you mean them"
            )
    if not _is_one("Pipeline", "transformers", model):
        return
    given = _told(model)
    adds = getattr(getattr(model, "tokenizer", None), "num_special_tokens_to_add", lambda: 0)()
    does = f"puts {given['prefix'][:60]!r} before each text" if given.get("prefix") else ""
    if any(not getattr(model, name).__module__.startswith("transformers.") for name in ("preprocess", "_forward")):
        does = f"reads texts by code of its own, as {type(model).__name__} has it"
    if given.get("add_special_tokens") is False and adds:
        does = "reads texts without special tokens"
    told = {key for name in HANDED_ON for key in given.get(name) or {}}
    told |= {*CHANGING} & given.keys()
    if any(_is_one(kind, "transformers", model) for kind in ALL_HANDED_ON):
        told |= given.keys()
    if given.get("is_split_into_words"):  # which a pipeline of token classes always has
        told.add("is_split_into_words")
    others = sorted(told - UNTOUCHED - {"add_special_tokens", "timeout", *HANDED_ON})
    if others:  # such as enable_thinking, of a chat template
        does = f"reads texts or chats with {others[0]}={repr(given[others[0]])[:60]}"
    if does:
        raise ModelError(
            f"the pipeline {does}, which its tokenizer does not; pass its model and its tokenizer, and texts or token "
            "ids as you mean them"
        )


def is_sentence_transformer(model: Any) -> bool:
    """Whether it is a model of sentence-transformers, which holds one of transformers."""
    return _is_one("SentenceTransformer", "sentence_transformers", model)


def is_cross_encoder(model: Any) -> bool:
    """Whether it is a reranker of sentence-transformers, from release 6 on a list of modules that has a classifier of
    transformers first."""
    return isinstance(model, torch.nn.Sequential) and _is_one("CrossEncoder", "sentence_transformers", model)


def _is_one(name: str, package: str, model: Any) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith(f"{package}.") for kind in type(model).__mro__)


@cache
def short_name(name: str) -> str:
    """How a result that others may see calls a model: a folder by its last name, one of the Hub's cache as on the Hub.

    >>> short_name("openai-community/gpt2"), short_name("/home/me/models/mine/"), short_name("runs/mine/checkpoint-500")
    ('openai-community/gpt2', 'mine', 'mine/checkpoint-500')
    >>> short_name("/home/me/.cache/huggingface/hub/models--org--bert/snapshots/1a2b")
    'org/bert'
    """
    parts = [part for part in re.split(r"[/\\\\]", name) if part not in ("", ".", "..")]
    cached = next((part for part in parts if part.startswith("models--")), None)
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/", 1)
    is_folder = name.startswith((".", "~")) or Path(name).is_absolute() or len(parts) > 2 or Path(name).is_dir()
    if not is_folder:
        return name
    parts = parts or list(Path(name).resolve().parts)
    last = 2 if re.fullmatch(r"checkpoint-\d+", parts[-1]) else 1
    return "/".join(parts[-last:])


def _tokenizer(name: str, config: Any, task: tasks.Task, where: dict[str, Any]) -> Any:
    """The tokenizer of a model, or what reads images for it, with texts beside them or alone; None where there is
    none."""
    import transformers

    if not task.segments:
        # from its module: transformers 5.17 gives it at the top only where torchvision is installed
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        kinds = [AutoImageProcessor]
    elif hasattr(config, "vision_config"):
        kinds = [transformers.AutoProcessor, transformers.AutoTokenizer]
    else:
        kinds = [transformers.AutoTokenizer]
    for kind in kinds:
        try:
            found = kind.from_pretrained(name, **where)
        except (OSError, ValueError, KeyError, ImportError):
            continue
        if not hasattr(found, "added_tokens_decoder") or len(found) > len(found.added_tokens_decoder) + 2:
            return found  # else transformers has made one up, of special tokens alone, for there are no files
    return None


def refuse_no_numbers(module: Module) -> None:
    """Refuse weights on the device "meta", which nothing brings when they are needed, as accelerate's hooks do: torch
    multiplies with them on the CPU, and gives whatever is in memory.

    Raises:
        ModelError: there are some.
    """
    if any(hasattr(each, "_hf_hook") or each._forward_pre_hooks for each in module.modules()):
        return
    empty = next((name for name, weight in module.named_parameters() if weight.is_meta), None)
    if empty is not None:
        raise ModelError(
            f'{empty} of {type(module).__name__} is on the device "meta", which holds no numbers; load its weights'
        )


def has_cases(tokenizer: Any) -> bool:
    """Whether a text in capitals is another one to a tokenizer."""
    small = "the quick brown fox jumps over a lazy dog"
    return bool(tokenizer(small)["input_ids"] != tokenizer(small.upper())["input_ids"])


def refuse_no_tokenizer(given: Any, needed: str = "__call__") -> None:
    """Refuse what cannot read texts: a name, a class, a tokenizer of another library, one without a method needed."""
    if isinstance(given, (str, bytes, PathLike)):
        name = fsdecode(given)
        raise InputError(
            f"the tokenizer is {name!r}, a name; pass AutoTokenizer.from_pretrained({name!r}), or load it with the "
            "model by Explainer.from_pretrained(name_or_folder)"
        )
    if given is not None and (isinstance(given, type) or not hasattr(given, needed)):
        kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise InputError(
            f"the tokenizer is {kind}; pass a tokenizer or processor of transformers, such as "
            "PreTrainedTokenizerFast(tokenizer_object=…), or None and token ids"
        )
