"""What is explained: a scalar read from one row of logits.

>>> logits = torch.tensor([1.0, 3.0, 2.5])
>>> Contrast(1, 2).value(logits)
tensor(0.5000)
>>> Margin().value(logits)
tensor(0.5000)
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lrpx.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cell", "Contrast", "LogProb", "Logit", "Margin", "Preferred", "Similarity", "Span", "Target"]


@dataclass(frozen=True)
class Target(ABC):
    """A scalar of a row of logits ``[V]``.

    ``token`` is an index into the logits (a vocabulary id or a class), a string that names one, or None for
    the model's own prediction. A kind of one's own has a ``name`` and a ``value``; one whose value is of no token, such
    as an entropy, has a ``describe`` of its own too, for what the others say names the token.
    """

    token: int | str | None = None
    name: ClassVar[str]

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """The same target with every token as an index into ``logits`` ``[V]``.

        Raises:
            TargetError: an index is out of range.
        """
        if self.token is None:
            return replace(self, token=int(logits.argmax()))
        return replace(self, token=_index(self.token, lookup, len(logits)))

    @abstractmethod
    def value(self, logits: Tensor) -> Tensor:
        """The scalar, from one row of logits ``[V]``; differentiable."""

    def plain(self, logits: Tensor) -> Tensor:
        """The same scalar with its plain gradient, for a recipe without rules."""
        return self.value(logits)

    def describe(self, names: Callable[[int], str]) -> str:
        """How the target reads, for example ``logit of ' are'``."""
        if not isinstance(getattr(self, "name", None), str):
            raise TargetError(f'the target {type(self).__name__} has no name; give its class one: name = "…"')
        return f"{self.name} of {names(self._id)!r}"

    @property
    def _id(self) -> int:
        assert isinstance(self.token, int)
        return self.token


@dataclass(frozen=True)
class Logit(Target):
    """The logit of a token: ``z_t``."""

    name: ClassVar[str] = "logit"

    def value(self, logits: Tensor) -> Tensor:
        """``z_t``; the largest logit when no token is given."""
        return logits.max() if self.token is None else logits[self._id]


@dataclass(frozen=True)
class Contrast(Target):
    """The difference of two logits, ``z_t − z_f``: why this and not that (Yin and Neubig 2022)."""

    other: int | str | None = None
    name: ClassVar[str] = "contrast"

    def __post_init__(self) -> None:
        if self.other is None:
            raise TargetError("a contrast needs two tokens; pass Contrast(token, other), or Logit(token) for one")

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """See :meth:`Target.resolved`; the two tokens must differ."""
        first = super().resolved(lookup, logits)
        assert isinstance(first, Contrast)
        other = _index(self.other, lookup, len(logits), "contrast")
        if other == first.token and self.token is None:
            raise TargetError(
                f"the contrast {self.other!r} is the model's own prediction, which is the target by default; "
                "pass another contrast, or a target"
            )
        if other == first.token:
            raise TargetError(f"the contrast {self.other!r} is the target itself; pass another contrast")
        return replace(first, other=other)

    def value(self, logits: Tensor) -> Tensor:
        """``z_t − z_f``."""
        assert isinstance(self.other, int)
        return (logits.max() if self.token is None else logits[self._id]) - logits[self.other]

    def describe(self, names: Callable[[int], str]) -> str:
        """For example ``logit of ' are' − logit of ' is'``."""
        assert isinstance(self.other, int)
        return f"logit of {names(self._id)!r} − logit of {names(self.other)!r}"


@dataclass(frozen=True)
class LogProb(Target):
    """The log-probability of a token: ``z_t − log Σ_v exp z_v``."""

    name: ClassVar[str] = "log-probability"

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """See :meth:`Target.resolved`; there must be another logit."""
        if len(logits) < 2:
            raise TargetError("a softmax of one logit is 1, and its logarithm 0, whatever the input; pass Logit(0)")
        return super().resolved(lookup, logits)

    def value(self, logits: Tensor) -> Tensor:
        """``log softmax(z)_t``, in float32 at least."""
        with torch._C.DisableTorchFunction():  # its normaliser has no rule, also where it is computed beside the model
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            return wide.max() if self.token is None else wide[self._id]


@dataclass(frozen=True)
class Margin(Target):
    """A logit less the largest of the others: ``z_t − max_{v≠t} z_v``; negative when t is not predicted."""

    name: ClassVar[str] = "margin"

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """See :meth:`Target.resolved`; there must be another logit."""
        if len(logits) < 2:
            raise TargetError("a margin needs two logits, and the model has one; pass Logit(0)")
        return super().resolved(lookup, logits)

    def value(self, logits: Tensor) -> Tensor:
        """``z_t − max_{v≠t} z_v``."""
        chosen = int(logits.argmax()) if self.token is None else self._id
        others = logits.detach().clone()
        others[chosen] = -torch.inf
        return logits[chosen] - logits[int(others.argmax())]


@dataclass(frozen=True)
class Preferred(Contrast):
    """The one of two tokens that the model prefers, less the other: ``|z_a − z_b|``, as a contrast (Arras 2025, §3.1).

    >>> Preferred(0, 1).resolved(int, torch.tensor([1.0, 3.0]))
    Contrast(token=1, other=0)
    """

    name: ClassVar[str] = "preferred"

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """The contrast; at a tie the first of the two is preferred."""
        first, second = (_index(each, lookup, len(logits)) for each in (self.token, self.other))
        pair = (first, second) if bool(logits[first] >= logits[second]) else (second, first)
        return Contrast(*pair).resolved(lookup, logits)


@dataclass(frozen=True)
class Span(Target):
    """The answer that an extractive question answering model points at: the logit of its start and that of its end.

    Args:
        token: the place of the first token, from 0; the best span's when None.
        end: the place of the last token; the best after ``token`` when None.

    Where both are None, it is the best span of the context, the text behind the question without special tokens, as a
    pipeline answers; of plain ids that have nothing between the two texts, the best of all. Of ``[CLS]``, by which
    some models say that there is no answer, pass ``Span(0, 0)``.

    The logits are ``[2T]``: of the start at each place, then of the end.

    >>> Span().resolved(int, torch.tensor([0.0, 2.0, 1.0, 1.0, 0.0, 2.0]))
    Span(token=1, end=2)
    """

    end: int | None = None
    name: ClassVar[str] = "answer"

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """The span with its two places; the start is not behind the end."""
        starts, ends = logits.chunk(2)
        sums = starts[:, None] + ends[None, :]
        places = torch.arange(len(starts), device=logits.device)
        wanted = places[:, None] <= places[None, :]
        for at, given, name in ((0, self.token, "start"), (1, self.end, "end")):
            if given is not None:
                chosen = places == _index(given, lookup, len(starts), name)
                wanted = wanted & (chosen[:, None] if at == 0 else chosen[None, :])
        if not bool(wanted.any()):
            raise TargetError(f"the answer ends at {self.end}, before its start; pass an end that is not before it")
        sums = sums.masked_fill(~wanted, -torch.inf)
        best = int(sums.argmax())
        if sums.flatten()[best] == -torch.inf:  # padding
            raise TargetError(f"the answer from token {self.token} to {self.end} is outside the input; pass its tokens")
        return Span(best // len(ends), best % len(ends))

    def value(self, logits: Tensor) -> Tensor:
        """``s_a + e_b``."""
        assert self.end is not None
        return logits[self._id] + logits[len(logits) // 2 + self.end]

    def describe(self, names: Callable[[int], str]) -> str:
        """For example ``answer from token 4 to 6``."""
        return f"{self.name} from token {self._id} to {self.end}"


@dataclass(frozen=True)
class Similarity(Target):
    """The cosine of two embeddings, ``a·b / (‖a‖ ‖b‖)``. Their lengths are constants, as the deviations of norms are,
    and each of the two gets half of the product, as the uniform rule has it; without rules it has its plain gradient.

    The logits are ``[2d]``: one embedding, then the other.

    >>> Similarity().value(torch.tensor([1.0, 0.0, 3.0, 4.0]))
    tensor(0.6000)
    """

    name: ClassVar[str] = "similarity"

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """Itself: there is no token in it."""
        return self

    def value(self, logits: Tensor) -> Tensor:
        """The cosine."""
        with torch._C.DisableTorchFunction():  # its rules are spelled out
            a, b = logits.chunk(2)
            product: Tensor = (a @ b.detach() + a.detach() @ b) / 2
            lengths: Tensor = torch.linalg.vector_norm(a.detach()) * torch.linalg.vector_norm(b.detach())
            return product / lengths

    def plain(self, logits: Tensor) -> Tensor:
        """The cosine, with the gradient of its lengths too."""
        with torch._C.DisableTorchFunction():
            a, b = logits.chunk(2)
            cosine: Tensor = (a @ b) / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
            return cosine

    def describe(self, names: Callable[[int], str]) -> str:
        """``similarity of the two texts``."""
        return f"{self.name} of the two texts"


@dataclass(frozen=True)
class Cell(Target):
    """One place of a map that a model makes of an image, such as a segmentation or a saliency map: ``z_{k,r,c}``.

    Args:
        token: the class ``k``, by its index or its label; the one that is largest at the place when None.
        row: from 0 at the top, negative from the bottom.
        column: from 0 at the left, negative from the right.

    Without a row and a column it is the place of the largest logit, of the class if one is given. The logits are
    ``[K, R, C]``.

    >>> Cell(row=0).resolved(int, torch.tensor([[[1.0, 2.0], [5.0, 0.0]]]))
    Cell(token=0, row=0, column=1)
    """

    row: int | None = None
    column: int | None = None
    name: ClassVar[str] = "logit"

    def resolved(self, lookup: Callable[[str], int], logits: Tensor) -> Target:
        """The cell with its class and its place."""
        wanted = torch.ones_like(logits, dtype=torch.bool)
        for axis, (given, what) in enumerate(((self.token, "class"), (self.row, "row"), (self.column, "column"))):
            if given is None:
                continue
            size = logits.shape[axis]
            at = lookup(given) if isinstance(given, str) and not axis else whole_number(given)
            if at is None:
                raise TargetError(f"the {what} is {type(given).__name__}; pass a whole number")
            if not -size * (axis > 0) <= at < size:
                raise TargetError(f"{what} {at} is outside the map, {_size(logits)}; pass 0 to {size - 1}")
            chosen = torch.arange(size, device=logits.device) == at % size
            wanted = wanted & chosen.reshape([-1 if i == axis else 1 for i in range(3)])
        best = int(logits.masked_fill(~wanted, -torch.inf).argmax())
        _, rows, columns = logits.shape
        return Cell(best // (rows * columns), best // columns % rows, best % columns)

    def value(self, logits: Tensor) -> Tensor:
        """``z_{k,r,c}``."""
        assert self.row is not None
        assert self.column is not None
        return logits[self._id, self.row, self.column]

    def describe(self, names: Callable[[int], str]) -> str:
        """For example ``logit of 'sky' at row 3, column 4``."""
        return f"{self.name} of {names(self._id)!r} at row {self.row}, column {self.column}"


def _size(logits: Tensor) -> str:
    classes, rows, columns = logits.shape
    return f"{classes} classes × {rows} rows × {columns} columns"


def value_of(target: Target, logits: Tensor, *, plain: bool = False) -> Tensor:
    """The scalar of a target, from one row of logits ``[V]``; ``plain``: with its plain gradient.

    Raises:
        TargetError: a target of one's own gives something else.
    """
    value: Any = target.plain(logits) if plain else target.value(logits)
    if not isinstance(value, Tensor) or value.ndim:
        given = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TargetError(
            f"the value of the target {type(target).__name__} is {given}; return a scalar tensor that is computed from "
            "the logits, such as logits[7]"
        )
    return value


def target_of(target: Any, contrast: Any, default: Target) -> Target:
    """What is explained where a target and a contrast are given, or none.

    Raises:
        TargetError: one of the two names nothing, or there is a contrast beside a target object.
    """
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


def whole_number(value: Any) -> int | None:
    """A Python integer from any integer scalar (of numpy, or a tensor), or None when it is none.

    >>> whole_number(torch.tensor(7)), whole_number(7.0), whole_number(True), whole_number([7])
    (7, None, None, None)
    """
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0 or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def looked_up(lookup: Callable[[str], int], text: str, name: str) -> int:
    """The index that a text names; what is wrong with a contrast is told of it, not of the target.

    Raises:
        TargetError: it names none.
    """
    try:
        return lookup(text)
    except TargetError as error:
        if name != "contrast":
            raise
        said = str(error)
        told = said.replace("the target ", "the contrast ", 1)
        raise TargetError(f"the contrast: {said}" if told == said else told) from None


def _index(token: Any, lookup: Callable[[str], int], size: int, name: str = "target") -> int:
    index = looked_up(lookup, token, name) if isinstance(token, str) else whole_number(token)
    if index is None:
        raise TargetError(f"the {name} is {type(token).__name__}; pass a string or an index")
    if not 0 <= index < size:
        raise TargetError(f"{name} {token!r} is index {index}, the model has {size} logits; pass 0 to {size - 1}")
    return index
