"""The marks of tensors that are on their way through a model: which features, heads or neurons stand where in them.

And what is told of marks: how several become one, what attention was given, of how many heads some features are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RANKS = ("heads", "weights", "scores", "neurons", "linear")
"""Of two marks that meet in a product, the first here goes on."""
Pairs: TypeAlias = "tuple[tuple[Mark | None, Mark | None], ...]"


@dataclass(frozen=True, eq=False)
class Mark:
    """What is known of a tensor that is on its way.

    Args:
        kind: one of :data:`RANKS`.
        index: of the tensor's own shape: which feature of a linear layer, which head or which neuron stands where.
        path: the linear layer's module; of heads, which attention's they are; of neurons that are numbers from 0 to 1,
            as a sigmoid gives, that of the linear layer before it.
        made_of: of attention's scores and weights: the queries and keys they were made of; several where they are a
            sum of several products.
        is_scaled: whether it was multiplied by what depends on the input since, as a norm does; of neurons, by what is
            nobody's, as the stream.
        calls: of what a linear layer gives: which calls of the module gave it, as where keys of two streams are joined.
        after: of neurons: the linear layer, and which call of it, whose output the non-linearity was given.
        is_stream: whether a layer was given it, as where the embeddings end in a non-linearity.
        scales: of neurons: the linear layer, and which call of it, that gives a branch of which they are a factor.
        norms, gates: of a branch: how many norms, and how many factors that depend on the input, it went through.
    """

    kind: str
    index: Tensor
    path: str = ""
    made_of: Pairs = ()
    is_scaled: bool = False
    calls: tuple[int, ...] = ()
    after: tuple[str, int] | None = None
    is_stream: bool = False
    scales: tuple[str, int] | None = None
    norms: int = 0
    gates: int = 0


ATTRIBUTE = "_lrpx_unit"
"""The attribute of a tensor that holds its mark."""


def mark_of(x: Any) -> Mark | None:
    """The mark of a tensor, if it has one that still holds: it was not changed in place since."""
    mark, version = vars(x).get(ATTRIBUTE, (None, 0)) if isinstance(x, Tensor) else (None, 0)
    return mark if mark is not None and x._version == version and mark.index.shape == x.shape else None


def marked(x: Tensor, mark: Mark | None) -> Tensor:
    """The same tensor, with a mark of its shape on it."""
    if mark is not None and mark.index.shape == x.shape:
        setattr(x, ATTRIBUTE, (mark, x._version))
    return x


def numbers_along(x: Tensor, dim: int) -> Tensor:
    """Numbers along one dimension, in the shape of ``x``."""
    count = torch.arange(x.shape[dim], device=x.device).reshape(-1, *(1,) * (-dim - 1))
    return torch.empty_like(x, dtype=torch.int64, requires_grad=False).copy_(count.expand(x.shape))  # lying as x does


def numbers_between(x: Tensor) -> Tensor:
    """Numbers of what stands between rows and tokens, in the shape of ``x``: heads, perhaps each in several windows."""
    between = x.shape[1:-2]
    numbers = torch.arange(between.numel(), device=x.device).reshape(1, *between, 1, 1)
    return torch.empty_like(x, dtype=torch.int64, requires_grad=False).copy_(numbers.expand(x.shape))


def numbers_of_nobody(x: Tensor) -> Tensor:
    """Numbers in the shape of ``x`` that are those of nothing."""
    return torch.full_like(x, -1, dtype=torch.int64, requires_grad=False)


def is_equal_along(index: Tensor) -> bool:
    """Whether numbers are the same along the last dimension: of scores or weights that a layer mixes the heads of."""
    return bool((index == index[..., :1]).all())


def is_further(mark: Mark, other: Mark) -> bool:
    """Whether a branch went through more than when it was another's."""
    return mark.norms > other.norms or mark.gates > other.gates


def merged(mark: Mark | None, others: Iterable[Mark | None]) -> Any:
    """Scores, or weights, that were made of what others were made of, too."""
    if mark is None or mark.kind not in ("scores", "weights"):
        return mark
    made_of = [pair for each in (mark, *others) if each is not None for pair in each.made_of]
    return replace(mark, made_of=tuple(dict.fromkeys(made_of)))


def read_with(x: Tensor, mark: Mark | None) -> Pairs | None:
    """The queries and keys of what multiplies values ``[…, Q, K]``, as far as they are known; None where it is no
    weights. Those are a softmax, be it torch's or known by its numbers alone, or scores that none was taken of; a sink
    has the rest of one."""
    if mark is not None and mark.kind == "weights":
        return mark.made_of
    if mark is not None and mark.kind == "scores":
        return queries_first(mark, -1)
    with torch._C.DisableTorchFunction():
        each = x.detach()
        is_one = x.ndim > 2 and x.shape[-1] > 1 and bool((each >= 0).all())
        sums = each.sum(-1)
        return () if is_one and bool(((sums > 0) & (sums < 1 + 1e-3)).all()) else None


def is_turned_over(mark: Mark) -> bool:
    """Whether these are weights whose keys are the last dimension but one, as in ``v.mT @ p.mT``."""
    keys = mark.index.movedim(-2, 0)
    return mark.kind == "weights" and len(keys) > 1 and bool((keys[1:] != keys[:-1]).all())


def stacked(marks: Sequence[Mark | None]) -> Mark | None:
    """The queries, or the keys, of several heads' scores, which are parts of what one linear layer gives."""
    known = [mark for mark in marks if mark is not None]
    kinds = {(mark.kind, mark.path, mark.index.shape) for mark in known}
    if len(known) < len(marks) or len(kinds) > 1:
        return None
    return replace(known[0], index=torch.stack([mark.index for mark in known]), calls=calls_of_marks(known))


def calls_of_marks(marks: Sequence[Mark]) -> tuple[int, ...]:
    """Those of any of these."""
    return tuple(sorted({call for mark in marks for call in mark.calls}))


def queries_first(scores: Mark | None, dim: Any) -> Pairs:
    """The queries and keys of scores that a softmax is taken of, which is over the keys, whichever came first."""
    if scores is None or scores.kind != "scores":
        return ()
    numbers = scores.index.movedim(-1 if dim is None else int(dim), 0)
    if len(numbers) == 1 or bool((numbers[1:] != numbers[:-1]).any()):
        return scores.made_of
    return tuple((columns, rows) for rows, columns in scores.made_of)


def ordered(mark: Mark | None, label: str, first: Sequence[str]) -> Mark | None:
    """What is known of a factor of an ``einsum``, with the indices first that it shares."""
    if mark is None:
        return None
    order = [*first, *(letter for letter in label if letter not in first)]
    return replace(mark, index=mark.index.permute([label.index(letter) for letter in order]))


def features_of(indices: Sequence[Tensor], mixed: Mapping[int, set[int]]) -> set[int]:
    """The features in some indices, and those that were added to them."""
    return {i for index in indices for each in {*index.flatten().tolist()} for i in mixed.get(each, (each,))}


def heads_of(indices: Sequence[Tensor], columns: Sequence[int], mixed: Mapping[int, set[int]]) -> int:
    """Of how many heads some features are: each index ``[…, H, T, n]`` or ``[…, H, n, T]`` says which stand where."""
    blocks = [block for index in indices for block in index.reshape(-1, *index.shape[-2:])]
    each = list(dict.fromkeys(tuple(sorted(features_of([one], mixed))) for one in blocks))
    return len(each) if [i for one in each for i in one] == list(columns) and len({*map(len, each)}) == 1 else 0
