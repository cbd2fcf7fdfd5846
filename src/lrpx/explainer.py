"""The face: text, chat messages or token ids in, attributions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx import tasks, tokens
from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.errors import InputError, MethodError, ModelError, TargetError
from lrpx.methods import METHODS, Backward
from lrpx.methods.backward import Batch
from lrpx.recipes import Recipe
from lrpx.targets import Contrast, Logit, Target
from lrpx.tasks import Task

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = resources.files("lrpx") / "bundled"
"""The small language model that comes with the package."""


@dataclass(frozen=True)
class _Row:
    """One input: the encoder's (or only) ids, the decoder's ids if any, and where its logits are read."""

    ids: list[int]
    decoder_ids: list[int] | None
    position: int | None


class Explainer:
    """Explains the predictions of a Hugging Face model with its own tokenizer.

    Args:
        model: a causal, masked or encoder-decoder language model or a sequence classifier, in eval mode. It
            is run as it is and left as it is.
        tokenizer: its tokenizer; None when inputs and targets come as ids.
        padding_side: where shorter rows of a batch are padded; ``"right"`` works for every model.

    Raises:
        ModelError: the model is of another kind, or has no input embeddings.

    >>> explainer = Explainer.from_pretrained()
    >>> a = explainer("The keys to the cabinet", target=" are", contrast=" is")
    >>> a.tokens[-1], len(a), a.target.description
    (' cabinet', 6, "logit of ' are' − logit of ' is'")
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        padding_side: Literal["left", "right"] = "right",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.padding_side = padding_side
        self.task = tasks.task_of(model)
        tasks.input_embedding(model)
        if padding_side not in ("left", "right"):
            raise InputError(f'padding_side is {padding_side!r}; pass "left" or "right"')

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        padding_side: Literal["left", "right"] = "right",
        **options: Any,
    ) -> Explainer:
        """Load a model and its tokenizer by name or folder, with the class its config names.

        Args:
            name_or_path: as transformers takes it; None for the small model bundled with LRPx.
            device: ``"cuda"``, ``"cpu"``, …; where transformers puts it when None.
            dtype: ``"float32"``, ``torch.bfloat16``, …; the checkpoint's own by default.
            padding_side: see :class:`Explainer`.
            options: passed on to transformers, such as ``attn_implementation="eager"``.

        Raises:
            ModelError: the model cannot be found or loaded, or its class has no head to explain.
        """
        name = str(BUNDLED if name_or_path is None else name_or_path)
        model, tokenizer = _load(name, dtype, options)
        try:
            model = model if device is None else model.to(device)
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise ModelError(
                f"cannot move the model to device {device!r}: {first}; pass another device"
            ) from error
        return cls(model.eval(), tokenizer, padding_side=padding_side)

    def __call__(
        self,
        inputs: Any,
        target: Any = None,
        contrast: Any = None,
        method: str | Backward | Recipe = "attnlrp",
        *,
        position: Any = None,
        decoder: Any = None,
        batch_size: int = 16,
    ) -> Any:
        """Explain one input, or each of a list of inputs.

        Args:
            inputs: a text, token ids, or chat messages (``[{"role": "user", "content": "…"}]``); or a list
                of these, which runs as padded batches and gives a list. Ids are taken as they are.
            target: a token or class (a string or an index), or a target such as ``LogProb(" are")``; the
                model's own prediction by default. For a list of inputs, one for all or a list.
            contrast: a second token or class: the difference of the two logits is explained.
            method: ``"attnlrp"``, ``"lrp"``, ``"gradient-x-input"``, ``"gradient-l1"``, ``"gradient-l2"``, a
                method object, or a recipe.
            position: the token whose logits are explained, negative from the end; by default the last
                token (of the decoder, for an encoder-decoder model), or the mask of a masked model.
            decoder: what an encoder-decoder model has written so far: a text, or ids with the start token.
            batch_size: the most rows run together.

        Returns:
            An :class:`~lrpx.Attribution`; for a list of inputs, a list of them in the same order.

        Raises:
            InputError: empty or too long inputs, or a position that is none.
            TargetError: a target that is not one token or class, or equals the contrast.
            MethodError: an unknown method, or one that does not apply to the model.
            ModelError: the model is in training mode.
            NonFiniteError: NaN or infinity in the logits or the relevance.
        """
        if self.model.training:
            raise ModelError(
                "the model is in training mode, where dropout makes its outputs random; call model.eval()"
            )
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; pass at least 1")
        chosen = self._method(method)
        if not _is_many(inputs):
            row = self._row(inputs, position, decoder, "")
            return self._explain([row], [_target(target, contrast)], chosen)[0]
        many = list(inputs)
        if not many:
            raise InputError("the list of inputs is empty; pass at least one text")
        decoders = _spread(decoder, len(many), "decoder", lambda d: _is_many(d) or (bool(d) and None in d))
        rows = [
            self._row(one, at, dec, f" (row {i} of the batch)")
            for i, (one, at, dec) in enumerate(
                zip(many, _spread(position, len(many), "position"), decoders, strict=True)
            )
        ]
        targets = [
            _target(one, other)
            for one, other in zip(
                _spread(target, len(many), "target"), _spread(contrast, len(many), "contrast"), strict=True
            )
        ]
        size = batch_size if self._can_batch else 1
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), len(rows[i].decoder_ids or ())))
        results: dict[int, Attribution] = {}
        for start in range(0, len(order), size):
            group = order[start : start + size]
            found = self._explain([rows[i] for i in group], [targets[i] for i in group], chosen)
            results.update(zip(group, found, strict=True))
        return [results[i] for i in range(len(rows))]

    # ------------------------------------------------------------------ reading the inputs

    def _method(self, method: str | Backward | Recipe) -> Backward:
        if isinstance(method, Recipe):
            return Backward(method.name, method)
        if isinstance(method, str):
            if method not in METHODS:
                raise MethodError(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
            return METHODS[method]
        return method

    def _row(self, given: Any, position: int | None, decoder: Any, where: str) -> _Row:
        try:
            ids = self._ids(given)
            if not ids:
                raise InputError("there are no token ids; pass at least one")
            decoder_ids = self._decoder_ids(decoder)
            self._check_length(ids)
            return _Row(
                ids, decoder_ids, self._position(ids if decoder_ids is None else decoder_ids, position)
            )
        except (InputError, TargetError) as error:
            raise type(error)(f"{error}{where}") if where else error from None

    def _ids(self, given: Any) -> list[int]:
        if isinstance(given, str):
            return tokens.encode(self.tokenizer, given)
        if isinstance(given, Tensor):
            return [int(i) for i in (given[0] if given.ndim == 2 and len(given) == 1 else given).tolist()]
        if isinstance(given, Sequence) and given and all(isinstance(message, Mapping) for message in given):
            return tokens.encode_chat(self.tokenizer, given)
        if isinstance(given, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in given):
            size = self.model.get_input_embeddings().weight.shape[0]
            wrong = next((i for i in given if not 0 <= i < size), None)
            if wrong is not None:
                raise InputError(
                    f"token id {wrong} is outside the model's vocabulary; pass ids 0 to {size - 1}"
                )
            return list(given)
        raise InputError(f"the input is {type(given).__name__}; pass a text, token ids or chat messages")

    def _decoder_ids(self, decoder: Any) -> list[int] | None:
        if self.task is not Task.SEQ2SEQ:
            if decoder is not None:
                raise InputError(f"{type(self.model).__name__} has no decoder of its own; leave decoder out")
            return None
        if decoder is not None and not isinstance(decoder, str):
            ids = self._ids(decoder)
            if not ids:
                raise InputError("there are no decoder ids; pass at least the start token")
            return ids
        config = self.model.config
        start = (
            config.decoder_start_token_id
            if config.decoder_start_token_id is not None
            else config.bos_token_id
        )
        if start is None:
            raise InputError(
                "the model's config names no decoder_start_token_id; pass decoder ids that begin with one"
            )
        if decoder is None:
            return [start]
        if self.tokenizer is None:
            raise InputError("there is no tokenizer to read the decoder's text with; pass decoder ids")
        return [start, *self.tokenizer(text_target=decoder, add_special_tokens=False)["input_ids"]]

    def _check_length(self, ids: list[int]) -> None:
        limit = tasks.context_length(self.model, self.tokenizer)
        if limit is not None and len(ids) > limit:
            raise InputError(f"the input has {len(ids)} tokens, the model's context is {limit}; shorten it")

    def _position(self, ids: list[int], position: int | None) -> int | None:
        if self.task is Task.CLASSIFICATION:
            if position is not None:
                raise InputError("a classifier's logits belong to the whole text; leave position out")
            return None
        if position is None and self.task is Task.MASKED:
            return self._mask_position(ids)
        position = -1 if position is None else position
        if not -len(ids) <= position < len(ids):
            raise InputError(
                f"position {position} is outside the {len(ids)} tokens; pass {-len(ids)} to {len(ids) - 1}"
            )
        return position % len(ids)

    def _mask_position(self, ids: list[int]) -> int:
        mask = None if self.tokenizer is None else self.tokenizer.mask_token_id
        found = [i for i, token in enumerate(ids) if token == mask]
        if len(found) != 1:
            shown = "the mask token" if self.tokenizer is None else repr(self.tokenizer.mask_token)
            raise InputError(
                f"a masked language model is explained at {shown}, and the input has {len(found)} of it; "
                "put exactly one in the text, or pass position"
            )
        return found[0]

    # -------------------------------------------------------------------------- running

    @cached_property
    def _can_batch(self) -> bool:
        """Padding needs an attention mask, or a causal model padded on the right; a decoder's classifier
        also needs to know the padding token to find each row's last one."""
        if not tasks.accepts(self.model, "attention_mask"):
            return self.task is Task.CAUSAL and self.padding_side == "right"
        config = self.model.config
        return self.task is not Task.CLASSIFICATION or config.get_text_config().pad_token_id is not None

    def _batch(self, rows: Sequence[_Row]) -> Batch:
        config = self.model.config
        pad_id = config.get_text_config().pad_token_id
        pad_id = pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0
        device = self.model.get_input_embeddings().weight.device
        ids, mask = tokens.pad([row.ids for row in rows], pad_id, self.padding_side)
        inputs = {"input_ids": ids}
        if tasks.accepts(self.model, "attention_mask"):
            inputs["attention_mask"] = mask
        if self.padding_side == "left" and not mask.all():
            inputs["position_ids"] = tasks.position_ids(self.model, mask)
        if self.task is Task.SEQ2SEQ:
            ids, mask = tokens.pad([row.decoder_ids or [] for row in rows], pad_id, "right")
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        if tasks.accepts(self.model, "use_cache"):
            inputs["use_cache"] = False  # type: ignore[assignment]
        shift = _shifts(rows, ids.shape[1], self.padding_side if self.task is not Task.SEQ2SEQ else "right")
        positions = (
            None if rows[0].position is None else torch.tensor([row.position or 0 for row in rows]) + shift
        )
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        return Batch(moved, positions)

    def _explain(
        self, rows: Sequence[_Row], targets: Sequence[Target], method: Backward
    ) -> list[Attribution]:
        def resolve(logits: Tensor) -> list[Target]:
            return [target.resolved(self._lookup, row) for target, row in zip(targets, logits, strict=True)]

        scores = method.attribute(self.model, self.task, self._batch(rows), resolve)
        shifts = _shifts(rows, scores.tokens.shape[1], self.padding_side).tolist()
        results = []
        for i, (row, shift) in enumerate(zip(rows, shifts, strict=True)):
            relevance = scores.tokens[i, shift : shift + len(row.ids)]
            described = tokens.describe(self.tokenizer, row.ids)
            segments = [("input", len(row.ids))]
            if row.decoder_ids is not None and scores.decoder_tokens is not None:
                relevance = torch.cat([relevance, scores.decoder_tokens[i, : len(row.decoder_ids)]])
                described = _joined(described, tokens.describe(self.tokenizer, row.decoder_ids))
                segments = [("encoder", len(row.ids)), ("decoder", len(row.decoder_ids))]
            ends = [0]
            for _, length in segments:
                ends.append(ends[-1] + length)
            probabilities = scores.logits[i].float().softmax(-1)
            predicted = int(probabilities.argmax())
            target = scores.targets[i]
            results.append(
                Attribution(
                    tokens=described.pieces,
                    relevance=relevance.clone(),
                    target=Explained(target.describe(self._name), float(scores.values[i]), row.position),
                    prediction=Prediction(self._name(predicted), predicted, float(probabilities[predicted])),
                    provenance=self._provenance(method),
                    ids=described.ids,
                    word_spans=described.word_spans,
                    word_texts=described.word_texts,
                    special=described.special,
                    segments=tuple(
                        (name, a, b) for (name, _), (a, b) in zip(segments, pairwise(ends), strict=True)
                    ),
                )
            )
        return results

    # ------------------------------------------------------------------------- naming

    def _lookup(self, text: str) -> int:
        """The index of a logit, from a token's text or a class label."""
        if self.task is not Task.CLASSIFICATION:
            return tokens.token_id(self.tokenizer, text)
        labels = self.model.config.label2id
        if text not in labels:
            raise TargetError(f"there is no class {text!r}; the classes are {', '.join(map(repr, labels))}")
        return int(labels[text])

    def _name(self, index: int) -> str:
        if self.task is Task.CLASSIFICATION:
            return str(self.model.config.id2label.get(index, index))
        if self.tokenizer is not None and index >= len(self.tokenizer):
            return f"#{index}"
        return tokens.describe(self.tokenizer, [index]).pieces[0]

    def _provenance(self, method: Backward) -> Provenance:
        config = self.model.config
        weight = self.model.get_input_embeddings().weight
        name = str(config.name_or_path or type(self.model).__name__)
        return Provenance(
            model="lrpx bundled model" if name == str(BUNDLED) else name,
            revision=getattr(config, "_commit_hash", None),
            method=method.name,
            recipe=str(method.recipe),
            dtype=str(weight.dtype).removeprefix("torch."),
            device=str(weight.device),
            versions={package: metadata.version(package) for package in ("lrpx", "torch", "transformers")},
        )


def _load(name: str, dtype: str | torch.dtype, options: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or ["AutoModelForCausalLM"])[0]
        kind = getattr(transformers, architecture, None)
        if kind is None or architecture.endswith("Model"):
            raise ModelError(
                f"{name} holds a {architecture}, which has no head to explain; load the class with a head yourself "
                "and pass it to lrpx.Explainer(model, tokenizer), or use lrpx.propagate(model, recipe)"
            )
        model = kind.from_pretrained(name, dtype=dtype, **options)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError):
            tokenizer = None
    except ModelError:
        raise
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"cannot load the model {name!r}: {first} "
            "Pass a folder, or the name of a model that is in the local cache or that the network can reach"
        ) from error
    return model, tokenizer


def _is_many(inputs: Any) -> bool:
    """Whether the input is a list of inputs rather than one text, one list of ids or one chat."""
    if isinstance(inputs, (str, Mapping)):
        return False
    if isinstance(inputs, Tensor):
        return inputs.ndim == 2 and len(inputs) > 1
    if not isinstance(inputs, Sequence):
        return False
    return not inputs or not isinstance(inputs[0], (int, Mapping))


def _spread(value: Any, count: int, name: str, is_list: Any = None) -> list[Any]:
    """One value a row: a list of as many, or the same for all."""
    listed = (
        isinstance(value, (list, tuple))
        if is_list is None
        else isinstance(value, (list, tuple)) and is_list(value)
    )
    if not listed:
        return [value] * count
    if len(value) != count:
        raise InputError(
            f"there are {count} inputs and {len(value)} of {name}; pass one for all, or one for each"
        )
    return list(value)


def _target(target: Any, contrast: Any) -> Target:
    if isinstance(target, Target):
        if contrast is not None:
            raise TargetError(
                "both a target object and a contrast were given; pass Contrast(token, other) alone"
            )
        return target
    if target is not None and not isinstance(target, (str, int)):
        raise TargetError(
            f"the target is {type(target).__name__}; pass a string, an index or a target such as Logit(7)"
        )
    return Logit(target) if contrast is None else Contrast(target, contrast)


def _shifts(rows: Sequence[_Row], width: int, side: str) -> Tensor:
    """``[B]``: how far padding moved each row to the right."""
    return torch.tensor([width - len(row.ids) if side == "left" else 0 for row in rows])


def _joined(first: tokens.Tokens, second: tokens.Tokens) -> tokens.Tokens:
    offset = len(first.ids)
    return tokens.Tokens(
        ids=first.ids + second.ids,
        pieces=first.pieces + second.pieces,
        special=first.special + second.special,
        word_spans=first.word_spans + tuple((a + offset, b + offset) for a, b in second.word_spans),
        word_texts=first.word_texts + second.word_texts,
    )
