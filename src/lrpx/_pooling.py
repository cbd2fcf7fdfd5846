"""How a text encoder makes one embedding of the hidden states of a text: as its files say, by sentence-transformers'
``modules.json`` and what stands beside it; where they say nothing, the mean, and results say that this was assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch

from lrpx.errors import InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

Kind = Literal["mean", "cls", "lasttoken", "weightedmean"]
"""The mean of all tokens; the first or the last token alone; the mean weighted by the places, from 1."""

TITLES: Final[dict[Kind, str]] = {
    "mean": "mean of the tokens",
    "cls": "first token",
    "lasttoken": "last token",
    "weightedmean": "mean of the tokens, weighted by their places",
}
SAME: Final = {"mean_sqrt_len_tokens": "mean"}
"""What differs from another in length alone, which a cosine does not see."""
MEND: Final = "pass pooling='mean', say, to compare what the encoder itself gives, or use lrpx.propagate(model, recipe)"
WHERE: Final = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


@dataclass(frozen=True)
class Pooling:
    """How embeddings are made.

    Args:
        kind: of :data:`TITLES`.
        is_assumed: whether nobody has said so.
        dims: how many numbers of an embedding are kept, the first ones; None for all.
        most: the most tokens of a text, where its files say so: sentence-transformers cuts the rest off, and a longer
            text has another embedding there.
        lowers: whether its files say that texts are put into lower case, whatever the tokenizer does.

    >>> str(Pooling("cls")), str(Pooling(is_assumed=True))
    ('first token', 'mean of the tokens, as nothing else is said')
    >>> str(Pooling(dims=64))
    'mean of the tokens, its first 64 numbers'
    """

    kind: Kind = "mean"
    is_assumed: bool = False
    dims: int | None = None
    most: int | None = field(default=None, compare=False, repr=False)
    lowers: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        kept = "" if self.dims is None else f", its first {self.dims} numbers"
        return TITLES[self.kind] + kept + (", as nothing else is said" if self.is_assumed else "")

    def weights(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[B, T]``: how much of each token's hidden state the embedding is, from a mask of 1 and 0.

        >>> mask = torch.tensor([[1, 1, 1, 0]])
        >>> [Pooling(kind).weights(mask).tolist()[0] for kind in ("cls", "lasttoken", "weightedmean")]
        [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.1666..., 0.3333..., 0.5, 0.0]]
        """
        places = mask.cumsum(-1) * mask
        last = places.amax(-1, keepdim=True)
        chosen = {"mean": mask, "cls": places == 1, "lasttoken": places == last, "weightedmean": places}[self.kind]
        wide = chosen.to(torch.promote_types(dtype, torch.float32))
        return (wide / wide.sum(-1, keepdim=True)).to(dtype)


def pooling_of(given: Any, name: Any, options: Mapping[str, Any], tokenizer: Any = None) -> Pooling:
    """What was asked for, or what the files of a model say, or the mean.

    Args:
        given: a kind; None for what the files say.
        name: the model's name on the Hub or its folder; None where it has none.
        options: where on the Hub, as transformers takes it.
        tokenizer: the model's, which says where texts are cut off if these files do not.

    Raises:
        InputError: there is no such kind.
        ModelError: the files cannot be read, or say that embeddings are made in a way that is not known here, or of
            texts with something around them.
    """
    if given is not None:
        if given not in TITLES:
            raise InputError(f"pooling is {given!r}; pass one of {', '.join(map(repr, get_args(Kind)))}")
        return Pooling(given)
    modules = _json(name, "modules.json", options)
    if modules is None:
        return Pooling(is_assumed=True)
    try:
        kinds = {_short(str(each["type"])): str(each["path"]) for each in modules}
        _refuse_others(name, kinds, ", says its modules.json")
        config = _json(name, f"{kinds['Pooling']}/config.json", options) if "Pooling" in kinds else None
        if config is None:
            raise ModelError(f"{name} has a modules.json that names no Pooling with a config.json; {MEND}")
        said = _kinds(config)
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{name} has a modules.json that is none of sentence-transformers; {MEND}") from error
    asked = _json(name, "config_sentence_transformers.json", options) or {}
    prompt = asked.get("default_prompt_name")
    if prompt is not None:
        raise ModelError(
            f"{name} puts a prompt before each text, {prompt!r}, says its config_sentence_transformers.json, which is "
            "no part of the text that is explained; write it into the texts, and "
            "pass pooling='mean', or what its files say"
        )
    reading, about = _reading(name, options)
    _refuse_chats(name, about.get("modality_config"), f", says its {reading}")
    _refuse_other_states(name, about.get("modality_config"), f", says its {reading}")
    longest = about.get("max_seq_length") or getattr(tokenizer, "model_max_length", None)
    found = _known(name, said, cut(name, about.get("processing_kwargs"), longest), ", say its files")
    found = replace(found, lowers=bool(about.get("do_lower_case")), dims=asked.get("truncate_dim"))
    if not _is_cosine(asked.get("similarity_fn_name"), found, kinds):
        raise ModelError(
            f"{name} compares embeddings by {asked['similarity_fn_name']!r}, says its "
            "config_sentence_transformers.json, and the cosine is explained here; pass "
            f"pooling={found.kind!r} to explain that"
        )
    return found


def pooling_in(encoder: Any) -> Pooling:
    """How a model of sentence-transformers itself makes embeddings.

    Raises:
        ModelError: in a way that is not known here, or of texts with a prompt before them or in a chat template.
    """
    name = type(encoder).__name__
    parts = {kind_of(part): part for part in encoder}
    if reads_by_itself(encoder):
        raise ModelError(f"the {name} reads texts by code of its own; {MEND}")
    _refuse_others(name, parts, "")
    if not {"Transformer", "Pooling"} <= set(parts):
        raise ModelError(f"the {name} has no Transformer with a Pooling after it; {MEND}")
    prompt = getattr(encoder, "default_prompt_name", None)
    if prompt is not None:
        raise ModelError(
            f"the {name} puts a prompt before each text, {prompt!r}, which is no part of the text that is explained; "
            "set its default_prompt_name to None, and write the prompt into the texts"
        )
    transformer = parts["Transformer"]
    _refuse_chats(f"the {name}", getattr(transformer, "modality_config", None), "")
    _refuse_other_states(f"the {name}", getattr(transformer, "modality_config", None), "")
    longest = cut(f"the {name}", getattr(transformer, "processing_kwargs", None), encoder.max_seq_length)
    found = _known(f"the {name}", _kinds(parts["Pooling"].get_config_dict()), longest, "")
    found = replace(found, dims=getattr(encoder, "truncate_dim", None))
    compares = getattr(encoder, "_similarity_fn_name", None)  # the property of that name would set it
    if not _is_cosine(compares, found, parts):
        raise ModelError(
            f"the {name} compares embeddings by {compares!r}, and the cosine is explained here; set its "
            "similarity_fn_name to 'cosine' to explain that"
        )
    return found


def _is_cosine(compares: Any, pooling: Pooling, kinds: Iterable[str]) -> bool:
    """Whether embeddings are compared by their cosine, which the product of two whole ones of length 1 is, too."""
    return compares in (None, "cosine") or (compares == "dot" and "Normalize" in kinds and pooling.dims is None)


def kind_of(part: Any) -> str:
    """The class of a part of a model of sentence-transformers, as that calls it; one of one's own, which may be called
    the same and do something else, by its whole name."""
    return _short(f"{type(part).__module__}.{type(part).__qualname__}")


READING: Final = ("preprocess", "tokenize", "forward", "encode", "predict")
"""The methods by which a model of sentence-transformers reads texts, of whichever kind and release."""


def reads_by_itself(model: Any) -> bool:
    """Whether a model of a class that derives from one of sentence-transformers reads texts in a way of its own."""
    found = (getattr(type(model), name, None) for name in READING)
    return any(not each.__module__.startswith(("sentence_transformers.", "torch.")) for each in found if each)


def _short(kind: str) -> str:
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _refuse_others(name: Any, kinds: Iterable[str], where: str) -> None:
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        raise ModelError(f"{name} makes its embeddings by a {others[0]} too{where}; {MEND}")


def _reading(name: Any, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The file that says how texts are read, and what it says; older versions called it after the model's type."""
    files = (f"sentence_{kind}_config.json" for kind in TYPES)
    return next(((file, said) for file in files if (said := _json(name, file, options))), ("files", {}))


UNTOUCHED: Final = frozenset(
    {"padding", "padding_side", "pad_to_multiple_of", "truncation", "max_length"}
    | {"return_tensors", "return_attention_mask", "verbose", "logits_to_keep"}
)
"""Of what a tokenizer is told, what changes no token of a text, but for where it is cut off."""


def cut(name: str, told: Any, longest: Any) -> Any:
    """At how many tokens a model of sentence-transformers cuts texts off.

    Args:
        name: how an error calls the model.
        told: its ``processing_kwargs``, what its tokenizer is told with each text.
        longest: where it cuts if that says nothing.

    Raises:
        ModelError: the tokenizer is told to make other tokens of a text.
    """
    of_texts = {key: value for kind in ("common", "text") for key, value in ((told or {}).get(kind) or {}).items()}
    others = sorted(of_texts.keys() - UNTOUCHED)
    if others:
        raise ModelError(
            f"{name} tells its tokenizer {others[0]}={of_texts[others[0]]!r} with each text, in its processing_kwargs, "
            "and the tokenizer is asked without here; leave that out there, or pass the model inside and its tokenizer"
        )
    if of_texts.get("truncation") in (False, "do_not_truncate"):
        return None
    return longest if of_texts.get("max_length") is None else of_texts["max_length"]


TYPES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Of models, after which sentence-transformers calls a file; the first that is there holds."""


def _refuse_chats(name: Any, kinds: Any, where: str) -> None:
    """Refuse what reads texts as messages: whatever else it reads, it does so where it can."""
    if "message" in (kinds or ()):
        raise ModelError(f"{name} reads each text as a chat's message, by a chat template{where}; {MEND}")


def _refuse_other_states(name: Any, kinds: Any, where: str) -> None:
    """Refuse what pools something else than a forward pass of its model gives: an inner layer's hidden states, say."""
    told = kinds.get("text") if isinstance(kinds, Mapping) else None
    told = told if isinstance(told, Mapping) else {}
    method, found = told.get("method", "forward"), told.get("method_output_name", "last_hidden_state")
    steps = [found] if found is None or isinstance(found, str) else list(found)
    if method != "forward" or steps not in (["last_hidden_state"], ["logits"]):
        what = ".".join(str(each) for each in (*steps, method) if each not in (None, "forward"))
        raise ModelError(f"{name} makes its embeddings of its model's {what}{where}; {MEND}")


def _known(name: Any, said: list[str], longest: Any, where: str) -> Pooling:
    kind = SAME.get(said[0], said[0]) if len(said) == 1 else ""
    if kind not in TITLES:
        raise ModelError(f"{name} makes its embeddings by {' and '.join(said) or 'no'} pooling{where}; {MEND}")
    return Pooling(kind, most=longest if isinstance(longest, int) and longest > 0 else None)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds of pooling that a config asks for, as newer or older versions write it."""
    named = config.get("pooling_mode")
    if named is not None:
        return [named] if isinstance(named, str) else [str(each) for each in named]
    older = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "weightedmean_tokens": "weightedmean"}
    names = [key.removeprefix("pooling_mode_") for key, value in config.items() if "pooling_mode_" in key and value]
    return [older.get(each, each) for each in names]


def _json(name: Any, file: str, options: Mapping[str, Any]) -> Any:
    """A JSON file of a model; None where there is none."""
    from transformers.utils import cached_file

    if not isinstance(name, str) or not name:
        return None
    try:
        found = cached_file(
            name,
            file,
            **{key: value for key, value in options.items() if key in WHERE},
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is None:
            return None
        said = json.loads(Path(found).read_bytes())
        if said is None:
            raise ValueError("it is null")
        return said
    except (OSError, ValueError, RecursionError) as error:
        if not Path(name).is_dir():
            return None  # a name that is none of the Hub's
        raise ModelError(f"cannot read {file} of {name}: {error}; repair the file, or pass pooling=…") from error
