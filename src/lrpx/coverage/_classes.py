"""Which classes there are: every model class in transformers' auto mappings."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from transformers.models.auto import modeling_auto

from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST = (
    "causal-lm",
    "seq2seq-lm",
    "masked-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "image-classification",
)
"""The mappings that come first in a table; after them the others, in the order of their names."""
LAST = ("pretraining", "text-encoding", "multimodal-lm", "base")
"""The mappings that mostly hold what other mappings hold too."""


def _mappings() -> dict[str, str]:
    found = {}
    for attribute in dir(modeling_auto):
        if match := re.fullmatch(r"MODEL_(?:FOR_(\w+)_)?MAPPING_NAMES", attribute):
            name = (match[1] or "base").lower().replace("_", "-")
            found["seq2seq-lm" if name == "seq-to-seq-causal-lm" else name] = attribute
    others = [name for name in found if name not in FIRST + LAST]
    return {name: found[name] for name in (*FIRST, *others, *LAST)}


MAPPINGS = _mappings()
"""The name of a task, and of transformers' mapping for it: every ``MODEL_…_MAPPING_NAMES`` there is."""

DATA: dict[str, Any] = json.loads(resources.files("lrpx.coverage").joinpath("tiny.json").read_text(encoding="utf-8"))
"""What makes models tiny, and which classes are the quick form; see :mod:`lrpx.coverage._tiny`."""


@dataclass(frozen=True)
class ModelClass:
    """One class, and where it is found.

    Args:
        mapping: the first key of :data:`MAPPINGS` that has the class; as such a model it is checked.
        name: the class, such as ``"LlamaForCausalLM"``.
        model_type: the type whose configuration it is built from, such as ``"llama"``.
        model_types: every type that the mapping has the class for.
        others: the other mappings that have the class.
    """

    mapping: str
    name: str
    model_type: str
    model_types: tuple[str, ...]
    others: tuple[str, ...] = ()


def every_class() -> tuple[ModelClass, ...]:
    """Every class of every mapping; one that is in several mappings, or serves several model types, is there once."""
    found: dict[str, dict[str, list[str]]] = {}
    for mapping, attribute in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, attribute).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, {}).setdefault(mapping, []).append(model_type)
    classes = []
    for name, by_mapping in found.items():
        first, *others = by_mapping
        types = by_mapping[first]
        classes.append(ModelClass(first, name, _namesake(name, types), tuple(types), tuple(others)))
    return tuple(classes)


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
        if (mapping is None or mapping in (one.mapping, *one.others))
        and (not model_types or set(model_types) & set(one.model_types))
        and (not quick or (one.mapping, one.model_type) in few)
    )
    if not chosen:
        raise InputError("no class is left to cover; name fewer conditions")
    return chosen
