"""The face: text, chat messages or token ids in, attributions out."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lrpx import _progress, tasks
from lrpx._batching import batches, filled
from lrpx._images import as_shown
from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.attributions import Attributions
from lrpx.errors import InputError, LRPxError, ModelError, TargetError
from lrpx.inputs import spread
from lrpx.methods import attribute_all, find
from lrpx.model import AT_A_TIME, BoundModel, Spec
from lrpx.parts import Part, Parts
from lrpx.questions import Question, Questions
from lrpx.targets import Contrast, Logit, Target, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

    from lrpx.inputs import Row
    from lrpx.methods import Found, Method
    from lrpx.recipes import Recipe
    from lrpx.tasks import Task

__all__ = ["Explainer"]

FEW = 4
"""So many batches run without a progress bar, unless it is asked for."""


class Explainer:
    """Explains the predictions of a Hugging Face model with its own tokenizer.

    Args:
        model: a language model, a classifier, a question answering or multiple choice model, a text encoder or an image
            classifier of transformers (:class:`~lrpx.tasks.Task`), or a module of your own that takes ``input_ids`` and
            returns logits, in eval mode. It is run as it is and left as it is. A pipeline of transformers is taken
            apart: its model and its tokenizer or processor are explained.
        tokenizer: its tokenizer or processor; None when inputs and targets come as ids.
        task: what a model predicts whose class does not tell.
        padding_side: where shorter rows of a batch are padded; ``"right"`` works for every model.
        recompute: compute each layer a second time in the backward pass, to need the memory of one layer only; for
            long contexts. The numbers are the same.
        compile: run the passes as compiled code: the same numbers, sooner. Lengths and batches are padded up to a few
            sizes (16, 24, 32, 48, … tokens), and the first use of each waits for the compiler, seconds to minutes.
        pooling: how a text encoder's hidden states become one embedding: ``"mean"``, ``"cls"`` (the first token),
            ``"lasttoken"`` or ``"weightedmean"``. By default as the model's files say (those of sentence-transformers),
            and else the mean; results say which.

    Raises:
        ModelError: the model is of another kind, or has no input embeddings.
        InputError: an option of the wrong kind.

    >>> explainer = Explainer.from_pretrained()
    >>> a = explainer("The doors of the house", target=" are", contrast=" is")
    >>> a.tokens[1:4], a.explained.description
    (('The', ' doors', ' of'), "logit of ' are' − logit of ' is'")
    >>> a.tokens[int(a.relevance.argmax())]
    ' doors'
    """

    def __init__(
        self,
        model: Module,
        tokenizer: PreTrainedTokenizerBase | Any | None = None,
        *,
        task: Task | None = None,
        padding_side: Literal["left", "right"] = "right",
        recompute: bool = False,
        compile: bool = False,
        pooling: str | None = None,
    ) -> None:
        how: dict[str, Any] = {"recompute": recompute, "compile": compile, "pooling": pooling}
        self.bound = BoundModel(model, tokenizer, task=task, padding_side=padding_side, **how)

    @classmethod
    def of(cls, bound: BoundModel) -> Explainer:
        """The face of a model that is bound already."""
        explainer = cls.__new__(cls)
        explainer.bound = bound
        return explainer

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        padding_side: Literal["left", "right"] = "right",
        recompute: bool = False,
        compile: bool = False,
        pooling: str | None = None,
        **options: Any,
    ) -> Explainer:
        """Load a model and its tokenizer by name or folder, with the class its config names.

        Args:
            name_or_path: as transformers takes it; None for the small model bundled with LRPx.
            device: ``"cuda"``, ``"cpu"``, the number of an accelerator; where transformers puts it when None.
            dtype: ``"float32"``, ``torch.bfloat16``, …; the checkpoint's own by default.
            padding_side, recompute, compile, pooling: see :class:`Explainer`.
            options: passed on to transformers, such as ``attn_implementation="eager"``.

        Raises:
            ModelError: the model cannot be found or loaded, or its class has no head to explain.
        """
        name = None if name_or_path is None else str(name_or_path)
        precision = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        place = None if device is None else _place(device)
        return cls.of(Spec(name, precision, place, padding_side, recompute, compile, options, pooling).build())

    @property
    def model(self) -> Module:
        """The user's own model."""
        return self.bound.module

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer or processor."""
        return self.bound.tokenizer

    @property
    def task(self) -> Task:
        """What it predicts."""
        return self.bound.task

    @overload
    def __call__(
        self,
        inputs: str,
        target: Target | str | int | None = ...,
        contrast: str | int | None = ...,
        method: str | Path | Method | Recipe = ...,
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
        method: str | Path | Method | Recipe = ...,
        *,
        position: Any = ...,
        decoder: Any = ...,
        ledger: bool = ...,
        batch_size: int = ...,
        progress: bool | None = ...,
    ) -> Attributions: ...

    @overload
    def __call__(
        self,
        inputs: Any,
        target: Any = ...,
        contrast: Any = ...,
        method: str | Path | Method | Recipe = ...,
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
        method: str | Path | Method | Recipe = "attnlrp",
        *,
        position: Any = None,
        decoder: Any = None,
        ledger: bool = False,
        batch_size: int = AT_A_TIME,
        progress: bool | None = None,
    ) -> Any:
        """Explain one input, or each of a list of inputs.

        Args:
            inputs: a text, token ids, or chat messages (``[{"role": "user", "content": "…"}]``); a tuple of two texts
                (premise and hypothesis, question and context, the two texts to compare); ``(text, [choice, …])`` for
                multiple choice; an image; what a tokenizer or processor returned. Or a list of these, which runs as
                padded batches and gives a list. Ids are taken as they are, and refused where they begin or end with
                padding: what a tokenizer returned says by its mask what padding is.
            target: a token or class (a string or an index), or a target such as ``LogProb(" are")``; the
                model's own prediction by default. A list asks several questions of the input, from one forward pass.
                For a list of inputs, one for all or a list, which may hold lists.
            contrast: a second token or class: the difference of the two logits is explained.
            method: a name such as ``"attnlrp"``, ``"lrp"``, ``"alti-logit"``, ``"leave-one-out"``,
                ``"gradient-x-input"`` (:data:`lrpx.METHODS` has all), a recipe or its file, a script that registers a
                method, or a method object.
            position: the token whose logits are explained, negative from the end; by default the last
                token (of the decoder, for an encoder-decoder model), or the mask of a masked model. Lists as for the
                target.
            decoder: what an encoder-decoder model has written so far: a text, or ids with the start token.
            ledger: also measure where the rest of the value went, which biases, constants and rules kept for
                themselves (:class:`~lrpx.ledger.Ledger`). A bias's share cannot be told apart by rows, so a list then
                runs row by row.
            batch_size: the most rows run together. Rows are sorted by length, and fewer run together when they are
                long: at most 64 tokens a row on average (:func:`lrpx._batching.batches`), which bounds the memory.
            progress: show a progress bar while a list runs, and say so when the compiler is waited for; by default in a
                terminal (on standard error) and in a notebook, the bar when there are more than a few batches. Never in
                a pipe unless it is asked for.

        Returns:
            An :class:`~lrpx.Attribution`, or a list of them where several questions are asked; for a list of inputs, a
            list of that in the same order. The lists are :class:`~lrpx.Attributions`, which show themselves.

        Raises:
            InputError: empty or too long inputs, or a position that is none.
            TargetError: a target that is not one token or class, or equals the contrast.
            MethodError: an unknown method, or one that does not apply to the model.
            ModelError: the model is in training mode, or cannot be compiled.
            NonFiniteError: NaN or infinity in the logits or the relevance.
        """
        bound = self.bound
        if bound.random_part:
            raise ModelError(
                f"{bound.random_part} is in training mode, where dropout makes outputs random; call model.eval()"
            )
        if (whole_number(batch_size) or 0) < 1:
            raise InputError(f"batch_size is {batch_size!r}; pass a whole number, at least 1")
        chosen = find(method)
        chosen.check(bound)  # before the inputs are read
        several = bound.reader.is_many(inputs)
        rows = bound.reader.rows(inputs, decoder) if several else [bound.reader.row(inputs, decoder)]
        asked = {"target": target, "contrast": contrast, "position": position}
        each = {name: spread(value, len(rows), name) if several else [value] for name, value in asked.items()}
        questions = [self._questions(row, *(each[name][i] for name in asked)) for i, row in enumerate(rows)]
        groups = batches(rows, batch_size if len(rows) > 1 and not ledger and bound.can_batch else 1)
        results: dict[int, list[Attribution]] = {}
        bar = several and (len(groups) > FEW if progress is None else progress)
        with _progress.progress("Explaining", len(rows), wanted=progress, bar=bar) as done:
            for group in groups:
                found = self._explain(rows, questions, group, batch_size, chosen, ledger)
                results.update(zip(group, found, strict=True))
                done(len(group))
        all_rows = [Attributions(results[i]) if is_list else results[i][0] for i, (is_list, _) in enumerate(questions)]
        return Attributions(all_rows) if several else all_rows[0]

    def _questions(
        self, row: Row, target: Any, contrast: Any, position: Any
    ) -> tuple[bool, list[tuple[int | None, Target]]]:
        """The positions and targets that are asked of one row, and whether they came as a list."""
        given = {"target": target, "contrast": contrast, "position": position}
        lists = {name: len(value) for name, value in given.items() if _is_list(value)}
        count = next(iter(lists.values()), 1)
        if 0 in lists.values() or len(set(lists.values())) > 1:
            told = ", ".join(f"{size} of {name}" for name, size in lists.items())
            raise InputError(f"the lists differ in length or are empty: {told}; pass one for each question{row.where}")
        each = [list(value) if name in lists else [value] * count for name, value in given.items()]
        reader = self.bound.reader
        found = [
            (reader.position(row, where), _target(one, other, self.bound.default_target()))
            for one, other, where in zip(*each, strict=True)
        ]
        return bool(lists), found

    # -------------------------------------------------------------------------- running

    def _explain(
        self,
        rows: Sequence[Row],
        questions: Sequence[tuple[bool, list[tuple[int | None, Target]]]],
        group: Sequence[int],
        batch_size: int,
        method: Method,
        ledger: bool,
    ) -> list[list[Attribution]]:
        """The attributions of the rows of a group, a list for each."""
        ran = filled(group, batch_size) if self.bound.pads_up and not ledger else group
        asked = [Question(at, *each) for at, i in enumerate(group) for each in questions[i][1]]
        together = Questions(tuple(rows[i] for i in ran), tuple(asked))
        try:
            found = attribute_all([method], self.bound, together, ledger=ledger)[method.name]
        except (RuntimeError, ValueError, AssertionError) as error:
            if self.task.pictures and not isinstance(error, LRPxError):
                self._refuse_size(together, error)
            raise
        logits = found.answers.logits.to(torch.promote_types(found.answers.logits.dtype, torch.float32))
        results: list[list[Attribution]] = [[] for _ in group]
        for i, question in enumerate(asked):
            row = rows[group[question.row]]
            predicted = self.bound.predicted(logits[i])
            prediction = None if predicted is None else Prediction(*predicted)
            results[question.row].append(self._attribution(row, question, found, i, prediction, method))
        return results

    def _attribution(
        self, row: Row, question: Question, found: Found, i: int, prediction: Prediction | None, method: Method
    ) -> Attribution:
        described = row.tokens
        ends = [0]
        for length in row.lengths:
            ends.append(ends[-1] + length)
        segments = [
            (name, start + a, start + b)
            for segment, start in zip(row.segments, ends, strict=False)
            for name, a, b in segment.parts or ((segment.name, 0, len(segment)),)
        ]
        parts = [each[i] for each in found.parts.values()]
        tokens, relevance, image, patch = described.pieces, found.relevance[i], None, None
        if self.task.pictures:
            image, patch, parts = self._pictured(row, parts)
            if not self.task.segments:
                segments = []
            if patch is not None and not self.task.segments:
                patches = next(part for part in parts if part.name == "patches")
                rows, columns = patches.shape.values()
                tokens = tuple(f"{row},{column}" for row in range(rows) for column in range(columns))
                relevance = patches.values.clone().flatten()
        return Attribution(
            tokens=tokens,
            parts=Parts([Part("tokens", relevance, ("token",)), *parts]),
            explained=Explained(
                self.bound.describe(found.answers.targets[i]), float(found.answers.values[i]), question.position
            ),
            prediction=prediction,
            provenance=self._provenance(method),
            ids=described.ids,
            word_spans=described.word_spans,
            word_texts=described.word_texts,
            special=described.special,
            segments=tuple(segments),
            ledger=None if found.ledgers is None else found.ledgers[i],
            is_decomposition=method.has_ledger,
            image=image,
            patch=patch,
        )

    def _refuse_size(self, questions: Questions, error: Exception) -> None:
        """Refuse images that the model itself cannot take, as those of another size.

        Raises:
            InputError: it cannot.
        """
        name = tasks.pixel_argument(self.model, self.task)
        pixels = None if name is None else questions.rows[0].arguments.get(name)
        try:
            with torch.no_grad():
                self.model(**self.bound.batch(questions).inputs)
        except (RuntimeError, ValueError, AssertionError) as refusal:
            told = " ".join(str(refusal).split()) or type(refusal).__name__
            size = "" if pixels is None else f" of {' × '.join(map(str, pixels.shape[1:]))}"
            raise InputError(
                f"{type(self.model).__name__} cannot take pixels{size} ({told[:160]}); pass an image through the "
                "model's own processor, or pixels of the size it was made for"
            ) from error

    def _pictured(self, row: Row, parts: list[Part]) -> tuple[Tensor | None, tuple[int, int] | None, list[Part]]:
        """The image of a row as shown, how large its patches are, and the parts with those of the patches."""
        name = tasks.pixel_argument(self.model, self.task)
        pixels = None if name is None else row.arguments.get(name)
        if pixels is None or pixels.ndim != 4 or len(pixels) != 1:
            return None, None, parts
        image = as_shown(pixels[0], self.tokenizer)
        grid = self.bound.patches(row)
        if grid is None:
            return image, None, parts
        named = {part.name: part for part in parts}
        if "patches" not in named and "pixels" in named:
            summed = Part("patches", grid.summed(named["pixels"].values.clone()), ("row", "column"))
            parts = [summed, *parts]
        return image, (grid.height, grid.width), parts

    def _provenance(self, method: Method) -> Provenance:
        bound = self.bound
        return Provenance(
            model=bound.name,
            revision=bound.revision,
            method=method.name,
            recipe=method.describe(),
            dtype=bound.dtype,
            device=bound.device,
            versions=dict(_versions()),
        )


@cache
def _versions() -> Mapping[str, str]:
    """The installed versions, looked up once: the search through the environment takes a millisecond."""
    return {package: metadata.version(package) for package in ("lrpx", "torch", "transformers")}


def _place(device: Any) -> str:
    """A device as a spec names it."""
    number = whole_number(device)
    if number is None:
        return str(device)
    try:
        return str(torch.device(number))  # of whatever kind of accelerator there is
    except RuntimeError as error:
        raise ModelError(f"there is no device {device!r}: {str(error).splitlines()[0]}; pass another device") from error


def _target(target: Any, contrast: Any, default: Target) -> Target:
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
    if target is None and contrast is None:
        return default
    return Logit(target) if contrast is None else Contrast(target, contrast)


def _names_a_token(given: Any) -> bool:
    return given is None or isinstance(given, str) or whole_number(given) is not None


def _is_list(given: Any) -> bool:
    """Whether several are given: a list, a tuple, a range, an array."""
    return isinstance(given, (list, tuple, range)) or getattr(given, "ndim", 0) == 1
