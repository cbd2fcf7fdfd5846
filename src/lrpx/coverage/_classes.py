"""Which classes there are: every model class in transformers' auto mappings of seven tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from transformers.models.auto import modeling_auto

from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAPPINGS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""The name of a task, and of transformers' mapping for it."""

DATA: dict[str, Any] = json.loads(resources.files("lrpx.coverage").joinpath("tiny.json").read_text(encoding="utf-8"))
"""What makes models tiny, and which classes are the quick form; see :mod:`lrpx.coverage._tiny`."""


@dataclass(frozen=True)
class ModelClass:
    """One class of one mapping.

    Args:
        mapping: a key of :data:`MAPPINGS`.
        name: the class, such as ``"LlamaForCausalLM"``.
        model_type: the type whose configuration it is built from, such as ``"llama"``.
        model_types: every type that the mapping has the class for.
    """

    mapping: str
    name: str
    model_type: str
    model_types: tuple[str, ...]


def every_class() -> tuple[ModelClass, ...]:
    """Every class of every mapping; one that serves several model types is there once."""
    found: dict[tuple[str, str], list[str]] = {}
    for mapping, attribute in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, attribute).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault((mapping, name), []).append(model_type)
    return tuple(ModelClass(*key, _namesake(key[1], types), tuple(types)) for key, types in found.items())


def _namesake(name: str, model_types: Sequence[str]) -> str:
    """The type that a class is named after: llama rather than internlm3."""
    plain = {model_type: model_type.replace("_", "").replace("-", "") for model_type in model_types}
    return next((kind for kind in model_types if name.lower().startswith(plain[kind])), model_types[0])


def choose(model_types: Sequence[str] = (), mapping: str | None = None, quick: bool = False) -> tuple[ModelClass, ...]:
    """The classes of these model types (of all, if none are named), in this mapping.

    Args:
        model_types: such as ``["llama", "gpt2"]``.
        mapping: a key of :data:`MAPPINGS`.
        quick: only the representative few, over all families and mappings.

    Raises:
        InputError: there is no such mapping or model type, or no class is left.

    >>> [model_class.name for model_class in choose(["llama"], "causal-lm")]
    ['LlamaForCausalLM']
    """
    classes = every_class()
    if mapping is not None and mapping not in MAPPINGS:
        raise InputError(f"there is no mapping {mapping!r}; the mappings are {', '.join(MAPPINGS)}")
    for model_type in model_types:
        if not any(model_type in one.model_types for one in classes):
            raise InputError(f"no mapping has a model type {model_type!r}; name one as transformers does, such as gpt2")
    few = {tuple(one.split("/")) for one in DATA["quick"]}
    chosen = tuple(
        one
        for one in classes
        if (mapping is None or one.mapping == mapping)
        and (not model_types or set(model_types) & set(one.model_types))
        and (not quick or (one.mapping, one.model_type) in few)
    )
    if not chosen:
        raise InputError("no class is left to cover; name fewer conditions")
    return chosen
