"""Fingerprints of models and of what reads for them: digests of what counts, wherever it was loaded from.

What says where something is from, how it runs, how it pads and how it cuts is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx._defined import digest_of_code
from lrpx._files import checksum
from lrpx._modules import named_modules
from lrpx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Module

    from lrpx.tasks import Task

LOOKED_AT = 1024
"""How many numbers of each weight the fingerprint of a model looks at."""

NO_CONTENT = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map", "torch_dtype", "dtype"}
    | {"use_cache", "output_hidden_states", "output_attentions", "return_dict"}
    | {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"}
)
"""What of a configuration the fingerprint leaves out: where it is from, and how it runs."""

BEGINNINGS = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id")
"""What of a generation config stands before a decoder's text."""

OF_READERS = ("chat_template", "special_tokens_map", "model_input_names", "split_special_tokens")
"""What changes the tokens of a text or a chat, beside a fast tokenizer's own description."""

HELD = ("tokenizer", "image_processor", "feature_extractor")
"""What a processor reads with."""

PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
"""What a fast tokenizer consists of."""

OF_ANY_PARTS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""The classes of tokenizers that are made of any parts; others put in their own."""

NO_READING = ("_file", "_path", "_side", "_length", "verbose", "total_vocab_size", "init_kwargs")
"""How the fields of a tokenizer end that say where it is from, how it pads and cuts, what it tells and has counted."""
SETTINGS = ("_kwargs", "never_split", "_added_tokens_decoder")
"""How the fields of a tokenizer end that hold several settings; others may be caches."""


def fingerprint_of(model: Module, task: Task) -> str:
    """A digest of a model's configuration, of what a decoder's text begins with, and of each of its weights and of each
    buffer that is saved with them: of ``LOOKED_AT`` numbers, evenly spread, and of the sum of all as whole numbers,
    so that a model trained further, configured otherwise, or changed in one neuron or one row, is not taken for the
    same one; of which of them stand at several places, but for those that transformers ties; and of how much of peft's
    adapters comes in."""
    digest = hashlib.sha256(json.dumps(_plain(getattr(model, "config", None)), sort_keys=True).encode())
    if "decoder" in task.segments:
        writes = getattr(model, "generation_config", None)
        digest.update(repr([getattr(writes, name, None) for name in BEGINNINGS]).encode())
    buffers = (
        (f"{path}.{name}", each)
        for path, module in named_modules(model)
        for name, each in module._buffers.items()
        if each is not None and name not in module._non_persistent_buffers_set
    )
    for name, weight in chain(model.named_parameters(), buffers):
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        values: Tensor = weight.detach()
        if type(values) is not torch.Tensor or values.is_meta:
            continue  # quantised or offloaded: its numbers are not to be had in the plain way
        some = values.flatten()[:: max(1, values.numel() // LOOKED_AT)].cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
        digest.update(str(_sum_of_bits(values)).encode())
    for told in _used_again(model):
        digest.update(told.encode())
    for path, module in named_modules(model):
        scaling = vars(module).get("scaling")
        if isinstance(scaling, dict):  # of peft's adapters: how much of each comes in
            digest.update(f"{path} {sorted(scaling.items())}".encode())
    return digest.hexdigest()


def fingerprint_of_reader(reader: Any) -> str:
    """A digest of what a tokenizer makes of texts and chats, or a processor of images."""
    return checksum(_reading(reader))


def _used_again(model: Module) -> Iterator[str]:
    """Which weights stand at further places than their first, as where layers are used again in another order; not the
    embeddings that transformers ties, for a config and a class tell these."""
    tied: Any = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(weight), name)
        if name != known and name not in tied and known not in tied:
            yield f"{name} is {known}"


def _plain(config: Any) -> Any:
    """A configuration as plain JSON values, without what says where it is from, and how it runs, up to rounding."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif is_dataclass(config) or isinstance(config, SimpleNamespace):
        config = vars(config)
    if isinstance(config, Mapping):
        return {str(name): _plain(value) for name, value in config.items() if name not in NO_CONTENT}
    if isinstance(config, (list, tuple)):
        return [_plain(each) for each in config]
    if isinstance(config, Enum):
        return _plain(config.value)
    if not isinstance(config, Tensor) and hasattr(config, "tolist"):  # numpy's
        return config.tolist()
    return config if config is None or isinstance(config, (str, int, float)) else type(config).__name__


def _sum_of_bits(values: Tensor) -> int:
    """The sum of all numbers, each read as a whole one: exact, and so the same in any order, on any device."""
    if values.is_complex():
        values = torch.view_as_real(values)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.contiguous().view(whole).sum(dtype=torch.int64))


def _reading(reader: Any) -> dict[str, Any]:
    """A tokenizer, processor or None as plain JSON values, without where it is from, how it pads and how it cuts."""
    found: dict[str, Any] = {name: _plain(getattr(reader, name, None)) for name in OF_READERS}
    found["held"] = [_reading(getattr(reader, name)) for name in HELD if getattr(reader, name, None) is not None]
    code = digest_of_code(type(reader))
    if code is not None:  # a class of the user's
        found["code"] = code
        found["fields"] = _fields(_held(reader))
    backend = getattr(reader, "backend_tokenizer", None)
    if backend is not None:
        return found | _parts(reader, backend) | {"padding": None, "truncation": None}
    if hasattr(reader, "to_dict"):
        found["config"] = _plain(reader.to_dict())
    elif reader is not None:  # a tokenizer in Python: its class, its fields, its vocabulary, its files, as of merges
        found["class"] = type(reader).__name__
        held = _held(reader)
        found["fields"] = _fields(held)
        found["settings"] = {name: _setting(each) for name, each in held.items() if name.endswith(SETTINGS)}
        found["vocabulary"] = reader.get_vocab() if hasattr(reader, "get_vocab") else None
        if hasattr(reader, "save_vocabulary"):
            with TemporaryDirectory() as folder, suppress(NotImplementedError):
                reader.save_vocabulary(folder, filename_prefix=None)
                files = sorted(Path(folder).iterdir())
                found["files"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return found


def _parts(reader: Any, backend: Any) -> dict[str, Any]:
    """What a fast tokenizer consists of, as it describes itself; where a part of it is written in Python, which it does
    not describe, as for RoFormer's words, the class that puts it in, and the other parts.

    Raises:
        ModelError: the class puts in no parts of its own, and so tells of none.
    """
    with suppress(Exception):  # tokenizers knows no other kind of error
        described: dict[str, Any] = json.loads(backend.to_str())
        return described
    found: dict[str, Any] = {"class": type(reader).__name__}
    for name in PARTS:
        try:
            state = getattr(backend, name).__getstate__()
            found[name] = None if state is None else json.loads(state)
        except Exception:
            if found["class"] in OF_ANY_PARTS:
                raise ModelError(
                    f"the tokenizer's {name} is written in Python, and nothing tells whether another run has the same; "
                    "make a class of it that inherits from PreTrainedTokenizerFast and puts the part in itself"
                ) from None
    found["added"] = {str(key): repr(each) for key, each in backend.get_added_tokens_decoder().items()}
    return found


def _held(reader: Any) -> dict[str, Any]:
    """What a reader holds, without where it is from, how it pads and how it cuts."""
    return {name: each for name, each in vars(reader).items() if not name.endswith(NO_READING)}


def _fields(held: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Of what a reader holds the numbers, switches and texts."""
    return {name: each for name, each in held.items() if isinstance(each, (int, float, str))}


def _setting(value: Any) -> Any:
    """A tokenizer's setting as plain JSON values; of an added token all that it says of itself."""
    if isinstance(value, dict):
        return {str(name): _setting(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_setting(each) for each in (sorted(value) if isinstance(value, set) else value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return repr(value) if type(value).__name__ == "AddedToken" else type(value).__name__
