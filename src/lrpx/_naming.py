"""How a model's logits are called: which one a text names, what one is of, what the model predicts with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from lrpx import _tokens
from lrpx.errors import InputError, TargetError
from lrpx.targets import Cell, Logit, LogProb, Similarity, Span, Target
from lrpx.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx._pooling import Pooling
    from lrpx.inputs import Reader, Row

MULTI_LABEL = "multi_label_classification"
"""How configs call a classifier of which several classes may hold at once, each with a sigmoid of its own."""

_WHOLE_ANSWER = {
    Task.CAUSAL: "to explain a whole answer, token by token, write it after the text and pass position=[…], the places "
    "before its tokens, and target=[…], their ids",
    Task.SEQ2SEQ: "to explain a whole answer, token by token, pass it as decoder, with position=[…], the places before "
    "its tokens, and target=[…], their ids",
}
"""What an error says of a target of several tokens."""


class Named(ABC):
    """What has a task, a reader and a configuration, and so names for its logits."""

    task: Task
    reader: Reader
    pooling: Pooling

    @property
    @abstractmethod
    def config(self) -> Any:
        """The model's configuration, or None."""

    def index(self, text: str) -> int:
        """The index of a logit, from a token's text or a class label.

        Raises:
            TargetError: there is no such token or class, or more than one class.
        """
        if self.task.logits == "tokens":
            whole = _WHOLE_ANSWER.get(self.task, "")
            how = {"decoder": "decoder" in self.task.segments}
            return _tokens.token_id(self.reader.text_tokenizer, text, f"; {whole}" if whole else "", **how)
        if self.task.logits != "classes":
            raise TargetError(f"the logits of {self.task.named} have no names; pass the index instead of {text!r}")
        names = self._classes()
        same = [index for index, label in names.items() if label == text]
        if len(same) > 1:  # as ImageNet's bird and machine, both a crane
            raise TargetError(
                f"{len(same)} classes are called {text!r}: {', '.join(map(str, same))}; pass one of them by its id, "
                f"such as {same[0]} for {text!r}"
            )
        labels = dict(getattr(self.config, "label2id", None) or {}) | {label: index for index, label in names.items()}
        if text not in labels:
            raise TargetError(
                f"there is no class {text!r}; pass one of {', '.join(map(repr, labels))}, or the index of a class"
            )
        return int(labels[text])

    def _classes(self) -> dict[int, str]:
        """The names of classes by the model's config; its keys are texts where it was read as JSON."""
        return {int(index): str(label) for index, label in (getattr(self.config, "id2label", None) or {}).items()}

    def label(self, index: int) -> str:
        """What a logit is of: a token's text, or the label of a class, with its index if several have that label."""
        if self.task.logits == "classes":
            names = self._classes()
            label = names.get(index, str(index))
            return f"{label} ({index})" if list(names.values()).count(label) > 1 else label
        if self.task.logits != "tokens":
            return str(index)
        try:
            return _tokens.describe(self.reader.text_tokenizer, [index]).pieces[0]
        except InputError:  # a model's vocabulary may be larger than its tokenizer's
            return f"#{index}"

    def exact_label(self, index: int) -> str:
        """The same where it stands alone, so that no two tokens are called the same."""
        label = self.label(index)
        if self.task.logits != "tokens" or label == f"#{index}":
            return label
        return _tokens.alone(self.reader.text_tokenizer, index, label, decoder="decoder" in self.task.segments)

    def predicted(self, logits: Tensor, row: Row) -> tuple[str, int, float] | None:
        """The model's own prediction from the logits ``[V]`` of one question about a row: how it reads, its index and
        its probability; of an answer, its place in the context and the index of its start. None where nothing is
        predicted."""
        if self.task.reads in ("embeddings", "similarity", "map") or logits.numel() == 1:  # a reranker's score, say
            return None
        if self._problem == "regression":
            return None
        if self.task.reads == "span":
            logits = row.within_context(logits)
            best = Span().resolved(self.index, logits)
            assert isinstance(best, Span)
            start, end = best.token, best.end
            assert isinstance(start, int)
            assert isinstance(end, int)
            starts, ends = (each.softmax(-1) for each in logits.chunk(2))
            return f"token {start} to {end}", start, float(starts[start] * ends[end])
        index = int(logits.argmax())
        return self.exact_label(index), index, float(self.probabilities(logits)[index])

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the model gives each token or class, from the logits ``[V]`` of one question: by their softmax, or
        by the sigmoid of each where several classes may hold at once."""
        return logits.sigmoid() if self._problem == MULTI_LABEL else logits.softmax(-1)

    def describe(self, target: Target) -> str:
        """How an explained value reads; of two embeddings, how they are made too."""
        if self.task.reads == "similarity" and isinstance(target, Similarity):
            return f"{target.name} of the image and the text"
        made = f" ({self.pooling})" if self.task.reads == "embeddings" else ""
        return target.describe(self.exact_label) + made

    @property
    def _problem(self) -> str | None:
        """What a classifier's config says of its classes, as transformers names it."""
        return getattr(self.config, "problem_type", None) if self.task.reads == "whole" else None

    def default_target(self) -> Target:
        """What is explained when nobody says: the model's own prediction."""
        if self.task.reads in ("embeddings", "similarity"):
            return Similarity()
        if self.task.reads == "map":
            return Cell()
        return Span() if self.task.reads == "span" else Logit()

    def refuse_unnamed(self, target: Target, found: Any) -> None:
        """Refuse a target of a user's own that resolves to none, or that says nothing of itself.

        Raises:
            TargetError: it does.
        """
        kind = type(target)
        if kind.__module__ == Span.__module__:
            return
        if not isinstance(found, Target):
            told = f"resolves to {type(found).__name__}; return a target from its resolved(…)"
            raise TargetError(f"the target {kind.__name__} {told}")
        described: Any = found.describe(self.exact_label)
        if not isinstance(described, str):
            told = f"is described by {type(described).__name__}; return a text from its describe(…)"
            raise TargetError(f"the target {kind.__name__} {told}")

    def refuse_other(self, target: Target) -> None:
        """Refuse a target of another kind of logits than the model gives; of a user's own nothing is known.

        Raises:
            TargetError: it is one.
        """
        kinds: dict[str, type[Target]] = {"span": Span, "embeddings": Similarity, "similarity": Similarity, "map": Cell}
        wanted = kinds.get(self.task.reads)
        kind = type(target)
        is_ours = kind.__module__ == Span.__module__
        if kind is not wanted and (kind in (Span, Similarity, Cell) or (wanted is not None and is_ours)):
            mend = "a token or a class" if wanted is None else f"{wanted.__name__}(…), or no target"
            raise TargetError(f"{self.task.named} has no {kind.__name__} to explain; pass {mend}")
        if kind is LogProb and self._problem in (MULTI_LABEL, "regression"):
            raise TargetError(
                f"the logits are of a {self._problem} problem, says the model's config, and have no softmax; pass the "
                "class itself, which explains its logit"
            )
