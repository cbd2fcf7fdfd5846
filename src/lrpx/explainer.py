"""The face: text, chat messages or token ids in, attributions out."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import cache, cached_property
from importlib import metadata, resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from lrpx import tasks, tokens
from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.engine.compiled import Compiler
from lrpx.errors import InputError, MethodError, ModelError, TargetError
from lrpx.inputs import Reader, batches, filled, is_many, shifts, spread, widths
from lrpx.loading import load_pretrained
from lrpx.methods import METHODS, Backward, Method
from lrpx.methods.backward import Batch
from lrpx.parts import Part, Parts
from lrpx.recipes import Recipe
from lrpx.targets import Contrast, Logit, Target, whole_number
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lrpx.inputs import Row

BUNDLED = resources.files("lrpx") / "bundled"
"""The small language model that comes with the package."""

FEW = 4
"""So many batches run without a progress bar, unless it is asked for."""


class Explainer:
    """Explains the predictions of a Hugging Face model with its own tokenizer.

    Args:
        model: a causal, masked or encoder-decoder language model or a sequence classifier, in eval mode. It
            is run as it is and left as it is.
        tokenizer: its tokenizer; None when inputs and targets come as ids.
        padding_side: where shorter rows of a batch are padded; ``"right"`` works for every model.
        recompute: compute each layer a second time in the backward pass, to need the memory of one layer only; for
            long contexts. The numbers are the same.
        compile: run the passes as compiled code: the same numbers, sooner. Lengths and batches are padded up to a few
            sizes (16, 24, 32, 48, … tokens), and the first use of each waits for the compiler, seconds to minutes.

    Raises:
        ModelError: the model is of another kind, or has no input embeddings.

    >>> explainer = Explainer.from_pretrained()
    >>> a = explainer("The doors of the house", target=" are", contrast=" is")
    >>> a.tokens[1:4], a.explained.description
    (('The', ' doors', ' of'), "logit of ' are' − logit of ' is'")
    >>> a.tokens[int(a.relevance.argmax())]
    ' doors'
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        padding_side: Literal["left", "right"] = "right",
        recompute: bool = False,
        compile: bool = False,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"the model is {type(model).__name__}; pass a model, or use Explainer.from_pretrained(name_or_folder)"
            )
        self.model: PreTrainedModel = model
        self.tokenizer = tokenizer
        self.padding_side = padding_side
        self.recompute = recompute
        self.task = tasks.task_of(model)
        tasks.input_embedding(model)
        if padding_side not in ("left", "right"):
            raise InputError(f'padding_side is {padding_side!r}; pass "left" or "right"')
        if compile and recompute:
            raise InputError("compile and recompute exclude each other; pass one of them")
        self._reader = Reader(model, tokenizer, self.task)
        self._compiler = Compiler() if compile else None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        padding_side: Literal["left", "right"] = "right",
        recompute: bool = False,
        compile: bool = False,
        **options: Any,
    ) -> Explainer:
        """Load a model and its tokenizer by name or folder, with the class its config names.

        Args:
            name_or_path: as transformers takes it; None for the small model bundled with LRPx.
            device: ``"cuda"``, ``"cpu"``, …; where transformers puts it when None.
            dtype: ``"float32"``, ``torch.bfloat16``, …; the checkpoint's own by default.
            padding_side, recompute, compile: see :class:`Explainer`.
            options: passed on to transformers, such as ``attn_implementation="eager"``.

        Raises:
            ModelError: the model cannot be found or loaded, or its class has no head to explain.
        """
        name = str(BUNDLED if name_or_path is None else name_or_path)
        model, tokenizer = load_pretrained(name, dtype, options)
        try:
            model = model if device is None else model.to(device)
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise ModelError(f"cannot move the model to device {device!r}: {first}; pass another device") from error
        return cls(model.eval(), tokenizer, padding_side=padding_side, recompute=recompute, compile=compile)

    @overload
    def __call__(
        self,
        inputs: str,
        target: Target | str | int | None = ...,
        contrast: str | int | None = ...,
        method: str | Method | Recipe = ...,
        *,
        position: int | None = ...,
        decoder: str | Sequence[int] | None = ...,
        ledger: bool = ...,
        batch_size: int = ...,
        progress: bool | None = ...,
    ) -> Attribution: ...

    @overload
    def __call__(
        self,
        inputs: list[str],
        target: Any = ...,
        contrast: Any = ...,
        method: str | Method | Recipe = ...,
        *,
        position: Any = ...,
        decoder: Any = ...,
        ledger: bool = ...,
        batch_size: int = ...,
        progress: bool | None = ...,
    ) -> list[Attribution]: ...

    @overload
    def __call__(
        self,
        inputs: Any,
        target: Any = ...,
        contrast: Any = ...,
        method: str | Method | Recipe = ...,
        *,
        position: Any = ...,
        decoder: Any = ...,
        ledger: bool = ...,
        batch_size: int = ...,
        progress: bool | None = ...,
    ) -> Any: ...

    def __call__(
        self,
        inputs: Any,
        target: Any = None,
        contrast: Any = None,
        method: str | Method | Recipe = "attnlrp",
        *,
        position: Any = None,
        decoder: Any = None,
        ledger: bool = False,
        batch_size: int = 32,
        progress: bool | None = None,
    ) -> Any:
        """Explain one input, or each of a list of inputs.

        Args:
            inputs: a text, token ids, or chat messages (``[{"role": "user", "content": "…"}]``); or a list
                of these, which runs as padded batches and gives a list. Ids are taken as they are.
            target: a token or class (a string or an index), or a target such as ``LogProb(" are")``; the
                model's own prediction by default. For a list of inputs, one for all or a list.
            contrast: a second token or class: the difference of the two logits is explained.
            method: ``"attnlrp"``, ``"lrp"``, ``"alti-logit"``, ``"logit"``, ``"alti"``, ``"gradient-x-input"``,
                ``"gradient-l1"``, ``"gradient-l2-squared"``, a method object, or a recipe.
            position: the token whose logits are explained, negative from the end; by default the last
                token (of the decoder, for an encoder-decoder model), or the mask of a masked model.
            decoder: what an encoder-decoder model has written so far: a text, or ids with the start token.
            ledger: also measure where the rest of the value went, which biases, constants and rules kept for
                themselves (:class:`~lrpx.ledger.Ledger`). A bias's share cannot be told apart by rows, so a list then
                runs row by row.
            batch_size: the most rows run together. Rows are sorted by length, and fewer run together when they are
                long: at most 64 tokens a row on average (:func:`lrpx.inputs.batches`), which bounds the memory.
            progress: show a progress bar on standard error while a list runs; by default on a terminal, when there
                are more than a few batches.

        Returns:
            An :class:`~lrpx.Attribution`; for a list of inputs, a list of them in the same order.

        Raises:
            InputError: empty or too long inputs, or a position that is none.
            TargetError: a target that is not one token or class, or equals the contrast.
            MethodError: an unknown method, or one that does not apply to the model.
            ModelError: the model is in training mode, or cannot be compiled.
            NonFiniteError: NaN or infinity in the logits or the relevance.
        """
        random = "the model" if self.model.training else tasks.active_dropout(self.model)
        if random:
            raise ModelError(f"{random} is in training mode, where dropout makes outputs random; call model.eval()")
        if (whole_number(batch_size) or 0) < 1:
            raise InputError(f"batch_size is {batch_size!r}; pass a whole number, at least 1")
        chosen = _method(method)
        if not is_many(inputs):
            row = self._reader.row(inputs, position, decoder)
            return self._explain([row], [_target(target, contrast)], chosen, ledger)[0]
        rows = self._reader.rows(inputs, position, decoder)
        pairs = zip(spread(target, len(rows), "target"), spread(contrast, len(rows), "contrast"), strict=True)
        targets = [_target(one, other) for one, other in pairs]
        groups = batches(rows, batch_size if self._can_batch and not ledger else 1)
        results: dict[int, Attribution] = {}
        with _progress(len(rows), sys.stderr.isatty() and len(groups) > FEW if progress is None else progress) as done:
            for group in groups:
                ran = filled(group, batch_size) if self._pads and not ledger else group
                found = self._explain([rows[i] for i in ran], [targets[i] for i in ran], chosen, ledger)
                results.update(zip(ran, found, strict=True))
                done(len(group))
        return [results[i] for i in range(len(rows))]

    # -------------------------------------------------------------------------- running

    @cached_property
    def _can_batch(self) -> bool:
        """Padding needs an attention mask, or a causal model padded on the right; a decoder's classifier also
        needs to know the padding token to find each row's last one, and XLNet's takes the last of all."""
        if not tasks.accepts(self.model, "attention_mask"):
            return self.task is Task.CAUSAL and self.padding_side == "right"
        takes_last = getattr(self.model.config, "summary_type", None) == "last"
        return self.task is not Task.CLASSIFICATION or (self._pad_id is not None and not takes_last)

    @property
    def _pads(self) -> bool:
        """Whether to pad up to the sizes that code is compiled for."""
        return self._compiler is not None and self._can_batch

    @property
    def _pad_id(self) -> int | None:
        found = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        return found if isinstance(found, int) and found >= 0 else None

    def _batch(self, rows: Sequence[Row]) -> Batch:
        pad_id = self._pad_id or 0
        device = tasks.input_device(self.model)
        width, written = widths(rows, self._reader.limit) if self._pads else (0, 0)
        ids, mask = tokens.pad([row.tokens.ids for row in rows], pad_id, self.padding_side, width)
        inputs = {"input_ids": ids}
        if tasks.accepts(self.model, "attention_mask"):
            inputs["attention_mask"] = mask
        if self.padding_side == "left" and not mask.all():
            inputs["position_ids"] = tasks.position_ids(self.model, self.task, mask)
        if self.task is Task.SEQ2SEQ:
            decoders = [row.decoder.ids for row in rows if row.decoder is not None]
            ids, mask = tokens.pad(decoders, pad_id, "right", written)
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        if tasks.accepts(self.model, "use_cache"):
            inputs["use_cache"] = False  # type: ignore[assignment]
        shift = shifts(rows, ids.shape[1], self.padding_side if self.task is not Task.SEQ2SEQ else "right")
        positions = None if rows[0].position is None else torch.tensor([row.position or 0 for row in rows]) + shift
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return Batch(moved, positions)

    def _explain(
        self, rows: Sequence[Row], targets: Sequence[Target], method: Method, ledger: bool
    ) -> list[Attribution]:
        def resolve(logits: Tensor) -> list[Target]:
            each = zip(targets, logits, rows, strict=True)
            return [self._resolved(target, of, row.where) for target, of, row in each]

        with torch.inference_mode(False):  # else the ids could not be saved for the backward pass
            batch = self._batch(rows)
        how = (self.model, self.task, batch, resolve)
        scores = method.attribute(*how, ledger=ledger, recompute=self.recompute, compiler=self._compiler)
        moved = shifts(rows, scores.tokens.shape[1], self.padding_side).tolist()
        logits = scores.logits.to(torch.promote_types(scores.logits.dtype, torch.float32))
        predictions = logits.argmax(-1).tolist()
        probabilities = logits.softmax(-1).amax(-1).tolist()
        results = []
        for i, (row, shift) in enumerate(zip(rows, moved, strict=True)):
            described, (length, written) = row.described, row.sizes
            relevance = scores.tokens[i, shift : shift + length]
            segments = [("input", length)]
            if row.decoder is not None and scores.decoder_tokens is not None:
                relevance = torch.cat([relevance, scores.decoder_tokens[i, :written]])
                segments = [("encoder", length), ("decoder", written)]
            ends = [0]
            for _, size in segments:
                ends.append(ends[-1] + size)
            parts = [Part("tokens", relevance, ("token",))]
            if scores.heads is not None:
                parts.append(Part("heads", scores.heads[i, ..., shift : shift + length], ("layer", "head", "token")))
            predicted, target = predictions[i], scores.targets[i]
            results.append(
                Attribution(
                    tokens=described.pieces,
                    parts=Parts(parts),
                    explained=Explained(target.describe(self._name), float(scores.values[i]), row.position),
                    prediction=Prediction(self._name(predicted), predicted, probabilities[i]),
                    provenance=self._provenance(method),
                    ids=described.ids,
                    word_spans=described.word_spans,
                    word_texts=described.word_texts,
                    special=described.special,
                    segments=tuple((name, a, b) for (name, _), (a, b) in zip(segments, pairwise(ends), strict=True)),
                    ledger=scores.ledger,
                )
            )
        return results

    # ------------------------------------------------------------------------- naming

    def _resolved(self, target: Target, logits: Tensor, where: str) -> Target:
        try:
            return target.resolved(self._lookup, logits)
        except TargetError as error:
            raise TargetError(f"{error}{where}") if where else error from None

    def _lookup(self, text: str) -> int:
        """The index of a logit, from a token's text or a class label."""
        if self.task is not Task.CLASSIFICATION:
            return tokens.token_id(self.tokenizer, text)
        config = self.model.config
        labels = dict(config.label2id or {}) | {label: index for index, label in (config.id2label or {}).items()}
        if text not in labels:
            raise TargetError(
                f"there is no class {text!r}; pass one of {', '.join(map(repr, labels))}, or the index of a class"
            )
        return int(labels[text])

    def _name(self, index: int) -> str:
        if self.task is Task.CLASSIFICATION:
            return str((self.model.config.id2label or {}).get(index, index))
        try:
            return tokens.describe(self.tokenizer, [index]).pieces[0]
        except InputError:  # a model's vocabulary may be larger than its tokenizer's
            return f"#{index}"

    def _provenance(self, method: Method) -> Provenance:
        config = self.model.config
        weight = self.model.get_input_embeddings().weight
        name = str(config.name_or_path or type(self.model).__name__)
        return Provenance(
            model="lrpx bundled model" if name == str(BUNDLED) else name,
            revision=getattr(config, "_commit_hash", None),
            method=method.name,
            recipe=method.recipe.describe(),
            dtype=str(weight.dtype).removeprefix("torch."),
            device=str(tasks.input_device(self.model)),
            versions=dict(_versions()),
        )


@contextmanager
def _progress(count: int, wanted: bool) -> Iterator[Callable[[int], object]]:
    """Count explained inputs on standard error, with a bar; yields what to call with how many more are done."""
    if not wanted:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Explaining"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("", total=count)
        yield lambda more: shown.advance(task, more)


@cache
def _versions() -> Mapping[str, str]:
    """The installed versions, looked up once: the search through the environment takes a millisecond."""
    return {package: metadata.version(package) for package in ("lrpx", "torch", "transformers")}


def _method(method: Any) -> Method:
    if isinstance(method, Recipe):
        return Backward(method.name, method)
    if isinstance(method, str):
        if method not in METHODS:
            raise MethodError(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
        return METHODS[method]
    if not callable(getattr(method, "attribute", None)):
        raise MethodError(
            f"the method is {type(method).__name__}; pass one of {', '.join(METHODS)}, a recipe or a method object"
        )
    return method  # type: ignore[no-any-return]


def _target(target: Any, contrast: Any) -> Target:
    if isinstance(target, Target):
        if contrast is not None:
            raise TargetError("both a target object and a contrast were given; pass Contrast(token, other) alone")
        return target
    if not _names_a_token(target):
        raise TargetError(
            f"the target is {type(target).__name__}; pass a string, an index or a target such as Logit(7)"
        )
    if not _names_a_token(contrast):
        raise TargetError(f"the contrast is {type(contrast).__name__}; pass a string or an index")
    return Logit(target) if contrast is None else Contrast(target, contrast)


def _names_a_token(given: Any) -> bool:
    return given is None or isinstance(given, str) or whole_number(given) is not None
