"""The face: text, chat messages or token ids in, attributions out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lrpx import _progress, neurons, tasks
from lrpx._batching import filled
from lrpx._images import as_shown
from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.attributions import Attributions
from lrpx.errors import InputError, LRPxError, MethodError, ModelError
from lrpx.flow import Flow
from lrpx.inputs import spread
from lrpx.methods import Backward, Found, attribute_all, find
from lrpx.model import AT_A_TIME, BoundModel, Spec
from lrpx.parts import Part, Parts
from lrpx.questions import Question, Questions
from lrpx.ranking import Ranking
from lrpx.targets import Target, target_of, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

    from lrpx.inputs import Row
    from lrpx.methods import Method
    from lrpx.recipes import Recipe
    from lrpx.tasks import Task
    from lrpx.units import Kind

__all__ = ["Explainer"]

FEW = 4
"""So many batches run without a progress bar, unless it is asked for."""


class Explainer:
    """Explains the predictions of a Hugging Face model with its own tokenizer.

    Args:
        model: a language model, a classifier, a question answering or multiple choice model, a text encoder or an image
            classifier of transformers (:class:`~lrpx.tasks.Task`), or a module of your own that takes ``input_ids`` and
            returns logits, in eval mode. It is run as it is and left as it is. A pipeline of transformers, a
            SentenceTransformer or a CrossEncoder is taken apart: its model and its tokenizer or processor are
            explained, as they are set now; of a reranker the logit, before any sigmoid.
        tokenizer: its tokenizer or processor; None when inputs and targets come as ids.
        task: what a model predicts whose class does not tell.
        padding_side: where shorter rows of a batch are padded; ``"right"`` works for every model.
        recompute: compute each layer a second time in the backward pass, to need the memory of one layer only; for
            long contexts. The numbers are the same.
        compile: run the passes as compiled code: the same numbers, sooner. Lengths and batches are padded up to a few
            sizes (16, 24, 32, 48, … tokens), and the first use of each waits for the compiler, seconds to minutes. Of
            an image, the result has no parts for learned tokens and positions.
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
            inputs: a text, token ids, or chat messages (``[{"role": "user", "content": "…"}]``), with the prompt for an
                answer, or going on with the assistant's, where the model writes, and as they are where it reads them,
                as a reward model does; a tuple of two texts (premise and hypothesis, question and context, the two
                texts to compare); ``(text, [choice, …])`` for multiple choice; an image; what a tokenizer or processor
                returned. Or a list of these, which runs as padded batches and gives a list. Ids are taken as they are,
                and refused where they begin or end with padding: what a tokenizer returned says by its mask what
                padding is.
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
            decoder: what an encoder-decoder model has written so far: a text, or ids with the start token. A text
                follows that token and what the generation config says must be written first; a language that is an
                argument of ``generate`` alone (NLLB, M2M100) belongs into the text.
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
        self.bound.refuse_random()
        if (whole_number(batch_size) or 0) < 1:
            raise InputError(f"batch_size is {batch_size!r}; pass a whole number, at least 1")
        chosen = find(method)
        chosen.check(bound)  # before the inputs are read
        several, rows, questions = self._asked(inputs, target, contrast, position, decoder)
        groups = bound.groups(rows, 1 if ledger else batch_size)
        results: dict[int, list[Attribution]] = {}
        bar = several and (len(groups) > FEW if progress is None else progress)
        with _progress.progress("Explaining", len(rows), wanted=progress, bar=bar) as done:
            for group in groups:
                found = self._explain(rows, questions, group, batch_size, chosen, ledger)
                results.update(zip(group, found, strict=True))
                done(len(group))
        all_rows = [Attributions(results[i]) if is_list else results[i][0] for i, (is_list, _) in enumerate(questions)]
        return Attributions(all_rows) if several else all_rows[0]

    def neurons(
        self,
        inputs: Any,
        target: Any = None,
        contrast: Any = None,
        *,
        kind: Kind = "neurons",
        top: int = 20,
        at: int | Sequence[int] | None = None,
        method: str | Path | Method | Recipe = "attnlrp",
        position: Any = None,
        decoder: Any = None,
        versus: Any = None,
        batch_size: int = AT_A_TIME,
        progress: bool | None = None,
    ) -> Ranking:
        """Rank all units of a kind, of all layers at all positions, by their relevance: one forward and one backward
        pass. Which modules hold them is found by running the model once on a few tokens (:mod:`lrpx.units`).

        Args:
            inputs: one input, as :meth:`__call__` takes it; or a list of them: then units are ranked by their mean
                relevance over these, summed over the positions, with bootstrap intervals.
            target, contrast, position, decoder: as :meth:`__call__` takes them, one question of each input.
            kind: ``"neurons"``; ``"heads"``; ``"queries"``, ``"keys"``, ``"values"``; ``"attention"`` and ``"mlp"``:
                what each branch gives to the residual stream; ``"residual"``: the stream behind each layer.
            top: how many are wanted.
            at: only at this token, or these, negative from the end; the first token of a text often stands for none,
                and has large activations that swallow the ranking.
            method: one whose relevance is ``x ⊙ ∂x``: ``"attnlrp"``, ``"lrp"``, ``"gradient-x-input"``, or a recipe.
            versus: a second list of inputs: the means' differences are ranked, these less those.
            batch_size, progress: as :meth:`__call__` takes them, for lists.

        Returns:
            A :class:`~lrpx.ranking.Ranking`.

        Raises:
            MethodError: the method tells nothing of units, or the model has no units of this kind.
            InputError, TargetError, ModelError, NonFiniteError: as :meth:`__call__`.

        >>> explainer = Explainer.from_pretrained()
        >>> found = explainer.neurons("The doors of the house", target=" are", contrast=" is", top=3)
        >>> len(found), found.count, found.explained.description
        (3, 25344, "logit of ' are' − logit of ' is'")
        """
        bound = self.bound
        self.bound.refuse_random()
        for name, number in (("top", top), ("batch_size", batch_size)):
            if (whole_number(number) or 0) < 1:
                raise InputError(f"{name} is {number!r}; pass a whole number, at least 1")
        where = None if at is None else list(at) if isinstance(at, Sequence) else [at]
        if where is not None and (not where or any(whole_number(token) is None for token in where)):
            raise InputError(f"at is {at!r}; pass the number of a token, or a list of them")
        chosen = find(method)
        chosen.check(bound)
        recipe = recipe_of(chosen)
        several, rows, asked = self._asked(inputs, target, contrast, position, decoder)
        made = self._provenance(chosen)
        if not several and versus is None:
            found, count, answers = neurons.rank(
                bound,
                _one_each(rows, asked),
                recipe,
                kind,
                top,
                None if where is None else neurons.tokens_of(rows[0], where),
            )
            explained = Explained(bound.describe(answers.targets[0]), float(answers.values[0]), asked[0][1][0][0])
            return Ranking(kind, found, count, explained, (1,), made)
        sets = [_one_each(rows, asked)]
        if versus is not None:
            sets.append(_one_each(*self._asked(versus, target, contrast, position, decoder)[1:]))
        if not all(rows for rows in (several, versus is None or bound.reader.is_many(versus))):
            raise InputError("two sets of inputs are compared; pass both as lists")
        total = sum(len(each) for each in sets)
        with _progress.progress(
            "Ranking", total, wanted=progress, bar=total > FEW * batch_size or bool(progress)
        ) as done:
            sums = [neurons.sums(bound, each, recipe, kind, batch_size, where, done) for each in sets]
        units = neurons.mean_units(sums[0][0], sums[0][1], sums[1][1] if len(sums) > 1 else None, top)
        return Ranking(kind, units, sums[0][1].shape[1], None, tuple(map(len, sets)), made)

    def flow(
        self,
        inputs: Any,
        target: Any = None,
        contrast: Any = None,
        *,
        method: str | Path | Method | Recipe = "attnlrp",
        position: int | None = None,
        decoder: Any = None,
    ) -> Flow:
        """How the relevance of one prediction flows through the layers: which layer, which branch, which heads carry
        it, at which tokens; one forward and one backward pass.

        Args:
            inputs, target, contrast, position, decoder: as :meth:`__call__` takes them, one question of one input.
            method: as :meth:`neurons` takes it.

        Raises:
            MethodError: the method tells nothing of layers, or the model has none that are known.
            InputError, TargetError, ModelError, NonFiniteError: as :meth:`__call__`.
        """
        chosen, questions = self._one_asked(inputs, target, contrast, method, position, decoder)
        answers, tokens, parts = neurons.flow(self.bound, questions, recipe_of(chosen))
        found = Found(answers, (tokens,), {part.name: (part,) for part in parts})
        return Flow(self._attributed(questions, found, chosen))

    def paths(
        self,
        inputs: Any,
        target: Any = None,
        contrast: Any = None,
        *,
        layer: int | str,
        kind: Kind = "heads",
        units: Sequence[int] | int = 16,
        method: str | Path | Method | Recipe = "attnlrp",
        position: int | None = None,
        decoder: Any = None,
    ) -> Attribution:
        """The exact split of one prediction over paths *source token → unit → target*: how much of each token's
        relevance goes through each head or neuron of one layer, through all others there, and past them.

        What goes through a unit is measured by a backward pass from it with the other branches of the layer cut: one
        for each unit, below its layer, and a second run for what goes past them. The rows of the part ``"paths"`` sum
        to the relevance of the tokens.

        Args:
            inputs, target, contrast, position, decoder: as :meth:`__call__` takes them, one question of one input.
            layer: the number of the layer, or the path of the units' module where a layer has several.
            kind: ``"heads"`` or ``"neurons"``.
            units: which of them, or how many, the most relevant.
            method: as :meth:`neurons` takes it.

        Raises:
            MethodError: there is no such layer or unit, or the method tells nothing of units.
            InputError, TargetError, ModelError, NonFiniteError: as :meth:`__call__`.
        """
        if kind not in ("heads", "neurons"):
            raise MethodError(f"there are no paths through {kind!r}; pass kind='heads' or 'neurons'")
        given, least = (units, 0) if isinstance(units, Sequence) else ([units], 1)
        if not given or any(number is None or number < least for number in map(whole_number, given)):
            raise InputError(f"units is {units!r}; pass how many, or a list of their numbers")
        chosen, questions = self._one_asked(inputs, target, contrast, method, position, decoder)
        answers, tokens, part = neurons.paths(self.bound, questions, recipe_of(chosen), kind, layer, units)
        return self._attributed(questions, Found(answers, (tokens,), {"paths": (part,)}), chosen)

    def _one_asked(
        self, inputs: Any, target: Any, contrast: Any, method: Any, position: Any, decoder: Any
    ) -> tuple[Method, Questions]:
        """The method, and one question of one input.

        Raises:
            InputError: there are several inputs or questions.
            MethodError: a token's relevance is more than its embedding's, which is what is followed.
        """
        self.bound.refuse_random()
        chosen = find(method)
        chosen.check(self.bound)
        if isinstance(chosen, Backward) and not chosen.of_embeddings:
            recipe_of(chosen)
            raise MethodError(
                f"{chosen.name} gives a token what its position has, and relevance is followed to embeddings alone; "
                "use pa-lrp-tokens or attnlrp"
            )
        several, rows, asked = self._asked(inputs, target, contrast, position, decoder)
        if several or not rows[0].segments:
            raise InputError("relevance is followed for one input with tokens; pass one text")
        return chosen, _one_each(rows, asked)

    def _attributed(self, questions: Questions, found: Found, method: Method) -> Attribution:
        """What was found for one question."""
        predicted = self.bound.predicted(found.answers.logits[0].to(torch.float64), questions.rows[0])
        prediction = None if predicted is None else Prediction(*predicted)
        return self._attribution(questions.rows[0], questions.asked[0], found, 0, prediction, method)

    def _asked(
        self, inputs: Any, target: Any, contrast: Any, position: Any, decoder: Any
    ) -> tuple[bool, list[Row], list[tuple[bool, list[tuple[int | None, Target]]]]]:
        """Whether several inputs are given, their rows, and what is asked of each."""
        reader = self.bound.reader
        several = reader.is_many(inputs)
        rows = reader.rows(inputs, decoder) if several else [reader.row(inputs, decoder)]
        asked = {"target": target, "contrast": contrast, "position": position}
        each = {name: spread(value, len(rows), name) if several else [value] for name, value in asked.items()}
        return several, rows, [self._questions(row, *(each[name][i] for name in asked)) for i, row in enumerate(rows)]

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
            (reader.position(row, where), target_of(one, other, self.bound.default_target()))
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
            predicted = self.bound.predicted(logits[i], row)
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
                self.model(**self.bound.batch(questions).handed)
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
            model=bound.as_it_is,
            revision=bound.revision,
            method=method.name,
            recipe=method.describe(),
            dtype=bound.precision,
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


def _one_each(rows: Sequence[Row], asked: Sequence[tuple[bool, list[tuple[int | None, Target]]]]) -> Questions:
    """One question of each row.

    Raises:
        InputError: a row is asked several.
    """
    if any(is_list for is_list, _ in asked):
        raise InputError("units are ranked for one question of each input; pass one target and one position")
    return Questions(tuple(rows), tuple(Question(i, *each[0]) for i, (_, each) in enumerate(asked)))


def recipe_of(method: Method) -> Recipe:
    """The rules of a method whose relevance is that of units too.

    Raises:
        MethodError: it has no relevance inside the model.
    """
    if not isinstance(method, Backward) or not method.has_ledger:
        raise MethodError(
            f"{method.name} tells nothing of neurons, heads or layers; use attnlrp, lrp, gradient-x-input or a recipe"
        )
    return method.recipe


def _is_list(given: Any) -> bool:
    """Whether several are given: a list, a tuple, a range, an array."""
    return isinstance(given, (list, tuple, range)) or getattr(given, "ndim", 0) == 1
