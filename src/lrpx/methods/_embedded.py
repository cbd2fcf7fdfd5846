"""An explained value as a function of token embeddings, for the methods of Captum, with their baselines and seeds.

The embeddings are put in place of what the model's own embedding gives out, so a model need not take
``inputs_embeds``, and whatever it does to them afterwards (a scale, positions) is done to these too.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args

import torch
from torch import Tensor, autograd

from lrpx import tasks
from lrpx._modules import named_modules
from lrpx.attribution import axes_of_pixels
from lrpx.engine import Tap
from lrpx.errors import MethodError, MissingExtraError
from lrpx.methods._contract import Found, Method
from lrpx.methods._refusals import IMAGES, SERVED, refuse_count, refuse_ledger, refuse_other, refuse_twice_given
from lrpx.parts import Part
from lrpx.questions import Questions
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.nn import Module

    from lrpx._batching import Batch
    from lrpx.model import BoundModel
    from lrpx.questions import Answers
    from lrpx.tasks import Task

Baseline = Literal["zero", "pad", "mask", "unk"]
"""What stands for no token: zeros, or the embedding of a special token of the tokenizer."""


class Embeddings(Tap):
    """Reads what the token embeddings give out, or puts other values into their place.

    Args:
        model: whose embeddings.
        batch: the rows.
        given: for each segment ``[B, T, d]``, what is put into the place of its tokens; None to read.
    """

    def __init__(self, model: BoundModel, batch: Batch, given: Sequence[Tensor] | None = None) -> None:
        modules = dict(named_modules(model.module))
        paths = tasks.source_paths(model.module, model.task)
        tables = [getattr(modules[path], "weight", None) for path in paths]
        paths |= {path for path, each in modules.items() if _is_one_of(each, tables)}  # T5's encoder has one of its own
        self._modules = {id(modules[path]): path for path in sorted(paths, reverse=True)}
        self.patterns = tuple(self._modules.values())
        self._batch = batch
        self._given = given
        self.read: list[tuple[str, Tensor]] = []

    def leaves(self) -> Sequence[Tensor]:
        """What is put in."""
        return () if self._given is None else self._given

    def module(self, path: str, side: str, value: Tensor) -> Tensor | None:
        """The output of an embedding."""
        if side != "output":
            return None
        number = len(self.read)
        shape = (len(self._batch.rows), self._batch.widths[number]) if number < len(self._batch.widths) else None
        self.read.append((path, value.detach().clone()))  # positions may be added in place, as BLIP and GIT do
        if shape is not None and value.shape[:2] == shape[::-1] != shape:
            raise MethodError(
                f"the token embedding {path} gives out tokens before rows, {list(value.shape)}, where no values can "
                "be put in; use attnlrp or lrp"
            )
        if shape is None or value.shape[:2] != shape:
            raise MethodError(
                f"the token embedding {path} was used {number + 1} times, or gives out {list(value.shape)} for "
                f"{list(self._batch.widths)} tokens; use attnlrp or lrp"
            )
        if self._given is None:
            return None
        given = self._given[number].to(value.device, value.dtype)
        with torch._C.DisableTorchFunction():  # it is no part of the model, and has no rules
            placed = value.detach().clone()
            for row, start in enumerate(self._batch.starts[number].tolist()):
                placed[row, start : start + given.shape[1]] = given[row]
        return placed


def _is_one_of(module: Module, tables: Sequence[Any]) -> bool:
    """Whether a module looks up in one of these tables."""
    return isinstance(module, torch.nn.Embedding) and any(module.weight is each for each in tables)


@dataclass(frozen=True, eq=False)
class Embedded:
    """The embeddings of one question's row.

    Args:
        values: of each segment ``[1, T, d]``.
        paths: the path of the module that gave each of them.
    """

    values: tuple[Tensor, ...]
    paths: tuple[str, ...]


def embeddings_of(method: Method, model: BoundModel, questions: Questions, question: int) -> Embedded:
    """What a question's tokens are embedded as.

    Args:
        method: who asks.
        model: the model.
        questions: with targets that are resolved.
        question: which of them.

    Raises:
        MethodError: the model does not embed each segment once, or looks its tokens up in other tables besides.
    """
    taps: list[Embeddings] = []

    def reading(batch: Batch) -> Sequence[Tap]:
        taps.append(Embeddings(model, batch))
        return taps[:]

    with model.traced(questions.alone([question]), GRADIENT, plain=True, taps=reading) as ran:
        batch, others = ran.batch, ran.other_tables
    (tap,) = taps
    if others:
        raise MethodError(
            f"{method.name} changes what the tokens are embedded as in {tap.patterns[0]}, and they are looked up in "
            f"{others[0].paths[0]}, too, where they would stay what they are; use attnlrp, lrp or gradient-x-input"
        )
    lengths = batch.rows[0].lengths
    if len(tap.read) != len(lengths):
        kind = type(model.module).__name__
        raise MethodError(
            f"{method.name} found the embeddings of {len(tap.read)} of {len(lengths)} texts of {kind}; use attnlrp"
        )
    found = []
    for (_, value), start, length in zip(tap.read, batch.starts, lengths, strict=True):
        begin = int(start[0])
        found.append(value[:, begin : begin + length].clone())
    return Embedded(tuple(found), tuple(path for path, _ in tap.read))


@dataclass(frozen=True, eq=False)
class PixelFunction:
    """``f``: from pixels ``[N, P, 1]``, all of an image one after another, to the values ``[N]``; where gradients are
    on, with the gradient at the pixels."""

    model: BoundModel
    questions: Questions
    question: int
    argument: str

    def __call__(self, pixels: Tensor) -> Tensor:
        """``[N]``."""
        return _at_a_time(1 if self.model.rows_meet else len(pixels), self, pixels)

    def values(self, pixels: Tensor) -> Tensor:
        """``[N]``, without a graph."""
        return self.model.values(self._asked(pixels), batch_size=len(pixels)).to(pixels.device, pixels.dtype)

    def with_gradients(self, pixels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``[N]``, and the gradient at the pixels."""
        with self.model.traced(self._asked(pixels), GRADIENT, plain=True) as ran:
            for _ in ran.explained():  # one round: each question has a row of its own
                source = next(each for each in ran.trace.sources if each.paths == (self.argument,))
                gradient = ran.trace.source_gradient(source).reshape(pixels.shape)
        return ran.answers.values.detach(), (gradient,)

    def _asked(self, pixels: Tensor) -> Questions:
        """The question about each of the images."""
        asked = self.questions.alone([self.question] * len(pixels))
        shape = asked.rows[0].arguments[self.argument].shape
        rows = (
            replace(row, arguments={**row.arguments, self.argument: each.reshape(shape)})
            for row, each in zip(asked.rows, pixels.detach(), strict=True)
        )
        return Questions(tuple(rows), asked.asked)


class _WithGradients(autograd.Function):
    """Values and their gradients, from one forward and one backward pass, whose graph is gone then."""

    @staticmethod
    def forward(ctx: Any, function: Function | PixelFunction, *inputs: Tensor) -> Tensor:
        if not any(ctx.needs_input_grad):
            return function.values(*inputs)
        values, gradients = function.with_gradients(*inputs)
        ctx.save_for_backward(*(each.to(x.device, x.dtype) for each, x in zip(gradients, inputs, strict=True)))
        return values.to(inputs[0].device, inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(dy.reshape(-1, *(1,) * (each.ndim - 1)) * each for each in ctx.saved_tensors)


def _at_a_time(most: int, function: Function | PixelFunction, *inputs: Tensor) -> Tensor:
    """``[N]``, of so many inputs together at most."""
    parts = (tuple(each[i : i + most] for each in inputs) for i in range(0, len(inputs[0]), most))
    return torch.cat([_WithGradients.apply(function, *part) for part in parts])  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Function:
    """``f``: from the embeddings of one row's tokens, one tensor ``[N, T, d]`` a segment, to the values ``[N]``; where
    gradients are on, with the gradient at the embeddings."""

    model: BoundModel
    questions: Questions
    question: int

    def __call__(self, *embeddings: Tensor) -> Tensor:
        """``[N]``."""
        # beside an image there is room for one text, and some decoders' classifiers take one without a padding token
        unpadded = self.model.pad_id is None and self.model.task.reads == "whole"
        alone = self.questions.row_of(self.question).arguments or self.model.rows_meet or unpadded
        return _at_a_time(1 if alone else len(embeddings[0]), self, *embeddings)

    def values(self, *embeddings: Tensor) -> Tensor:
        """``[N]``, without a graph."""

        def writing(batch: Batch, rows: Sequence[int]) -> Sequence[Tap]:
            chosen = torch.tensor(rows, device=embeddings[0].device)
            return [Embeddings(self.model, batch, [each[chosen] for each in embeddings])]

        count = len(embeddings[0])
        found = self.model.values(self._asked(count), taps=writing, batch_size=count)
        return found.to(embeddings[0].device)

    def with_gradients(self, *embeddings: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``[N]``, and the gradient at each segment's embeddings."""
        leaves = [each.detach().requires_grad_() for each in embeddings]

        def writing(batch: Batch) -> Sequence[Tap]:
            return [Embeddings(self.model, batch, leaves)]

        with self.model.traced(self._asked(len(leaves[0])), GRADIENT, taps=writing) as ran:
            for _ in ran.explained():  # one round: each question has a row of its own
                gradients = tuple(map(ran.trace.gradient_of, leaves))
        return ran.answers.values.detach(), gradients

    def _asked(self, count: int) -> Questions:
        return self.questions.alone([self.question] * count)


Values = Callable[..., Tensor]
"""From what is explained, one tensor ``[N, T, d]`` a segment, to the values ``[N]``."""


class ByCaptum(Method):
    """A method of Captum, on the embeddings of one text, or of an encoder's and a decoder's, or on pixels."""

    tasks: ClassVar[frozenset[Task]] = SERVED
    baseline: Baseline
    batch_size: int

    @property
    def has_ledger(self) -> bool:
        """No."""
        return False

    @abstractmethod
    def explain(self, captum: Any, function: Values, inputs: Any, baselines: Any) -> Sequence[Tensor]:
        """The scores of one row: for each segment ``[1, T]``.

        Args:
            captum: ``captum.attr``.
            function: from embeddings to values.
            inputs: the row's embeddings, a tuple with ``[1, T, d]`` for each segment.
            baselines: what stands for no token, of the same shapes.
        """

    def check(self, model: BoundModel) -> None:
        """Refuse a baseline that the tokenizer has no token for, and what :meth:`Method.check` refuses."""
        super().check(model)
        refuse_twice_given(self, model)
        _captum()
        baseline_id(self, model)
        refuse_count(self.name, "batch_size", self.batch_size)

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`. Rows are explained one by one, and
        the changed inputs of each run together.

        Raises:
            MethodError: a ledger is asked for, or the model does not embed each text once.
            MissingExtraError: Captum is not installed.
        """
        self.check(model)
        refuse_ledger(self, ledger)
        captum = _captum()
        with torch.inference_mode(False):  # where Captum asks for gradients
            answers = model.ask(questions)
            resolved = questions.with_targets(answers.targets)
            found = []
            if model.task in IMAGES:
                return self._of_images(captum, model, resolved, answers)
            for i in range(len(resolved)):
                embedded = embeddings_of(self, model, resolved, i)
                baselines = _baselines(self, model, embedded)
                scores = self.explain(captum, Function(model, resolved, i), embedded.values, baselines)
                found.append(torch.cat([each[0].detach().cpu() for each in scores]))
            return Found(answers, tuple(found))

    def _of_images(self, captum: Any, model: BoundModel, questions: Questions, answers: Answers) -> Found:
        """The same, where each number of the pixels is an embedding of one dimension."""
        name, parts = tasks.signal_argument(model.module, model.task), []
        for i in range(len(questions)):
            pixels = questions.row_of(i).arguments[name].to(tasks.input_device(model.module))
            inputs = (pixels.clone().reshape(1, -1, 1),)  # whatever mode they were made in
            function = PixelFunction(model, questions, i, name)
            (scores,) = self.explain(captum, function, inputs, tuple(map(torch.zeros_like, inputs)))
            values = scores.detach().cpu().reshape(pixels.shape[1:])
            parts.append(Part("pixels", values, axes_of_pixels(values.ndim)))
        return Found(answers, (torch.empty(0),) * len(parts), {"pixels": tuple(parts)})


def _captum() -> Any:
    try:
        return import_module("captum.attr")
    except ImportError as error:
        raise MissingExtraError(
            "this method is Captum's, which is not installed: pip install 'lrpx[captum]'"
        ) from error


def baseline_id(method: Any, model: BoundModel) -> int | None:
    """The token that stands for none; None for zeros.

    Raises:
        MethodError: there is no such baseline, or the tokenizer has no such token.
    """
    name = method.baseline
    refuse_other(method.name, "baseline", name, get_args(Baseline))
    if name == "zero":
        return None
    found = getattr(model.reader.text_tokenizer, f"{name}_token_id", None)
    if name == "pad" and found is None:
        found = getattr(tasks.text_config(model.module), "pad_token_id", None)
    if not isinstance(found, int) or found < 0:
        raise MethodError(f"the tokenizer of {type(model.module).__name__} has no {name} token; use baseline='zero'")
    return found


def _baselines(method: Any, model: BoundModel, embedded: Embedded) -> tuple[Tensor, ...]:
    """``[1, T, d]`` a segment: the embedding of what stands for no token."""
    token = baseline_id(method, model)
    if token is None:
        return tuple(map(torch.zeros_like, embedded.values))
    modules = dict(named_modules(model.module))
    found = []
    for path, value in zip(embedded.paths, embedded.values, strict=True):
        ids = torch.full(value.shape[:2], token, device=tasks.input_device(model.module))
        with torch.no_grad():
            found.append(modules[path](ids).detach().to(value.device))
    return tuple(found)


def are_settled(drawn: Tensor) -> bool:
    """Whether scores ``[N, T]``, each of a point of its own, have a mean that is more than its error: of no token is
    the standard error more than half of the largest mean. Of one point nothing can be said.

    >>> are_settled(torch.tensor([[1.0, 0.2], [1.2, 0.1]])), are_settled(torch.tensor([[0.0], [0.0], [90.0]]))
    (True, False)
    """
    if len(drawn) < 2:
        return True
    error = drawn.double().std(0) / len(drawn) ** 0.5
    return not float(error.max()) > float(drawn.double().mean(0).abs().max()) / 2


def deviations(sigma: float, inputs: Sequence[Tensor]) -> tuple[float, ...]:
    """A share of the range ``max − min`` of each segment's embeddings."""
    return tuple(sigma * float(each.max() - each.min()) for each in inputs)


_DRAWING: Final = RLock()
"""The generators are the process's: of two threads one draws after the other."""


@contextmanager
def seeded(seed: int, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside, what is drawn depends on the seed alone, of one kind of device; afterwards every generator is where it
    was."""
    import numpy as np

    devices = sorted({each.get_device() for each in inputs if each.is_cuda})
    with _DRAWING, torch.random.fork_rng(devices=devices):
        numpy_state, python_state = np.random.get_state(), random.getstate()
        try:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
