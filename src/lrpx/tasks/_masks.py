"""What a model does with its attention mask, beside hiding tokens: it may count tokens' places by it, or which one it
reads. Found by one run in which all that is computed of the mask alone is computed of another mask, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

BESIDE: Final = 32
"""So many places a model may put before or behind those of a text, as soft prompts;"""
ENDS: Final = 2
"""and so many it may leave out, as the class token and the end."""
_aten = torch.ops.aten
NEW: Final = frozenset(
    getattr(_aten, f"{kind}") for kind in ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
) | frozenset(getattr(_aten, f"{kind}_like") for kind in ("zeros", "ones", "full", "empty", "rand", "randn"))
"""What makes a tensor of another's shape, without its numbers."""
READING: Final = frozenset(getattr(_aten, kind) for kind in ("index", "gather", "index_select", "take", "embedding"))
"""What is told by a number which tokens it reads."""
TO_PYTHON: Final = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""What takes numbers out of torch unseen."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the block, looks at what a model computes of its mask alone, where that meets tokens, whose embeddings are
    looked up in its table. Of another mask, in which other tokens are hidden, it computes the same beside it. A mask
    that only hides is another there in the places of these tokens alone. Places that are counted by it are others
    behind them, too, or everywhere; so is which token is read, and how many there are, where Python is told.

    How many tokens a pooling divides by is no place.

    Args:
        table: the token table.
        mask: what the model will be given.
        other: the other.
        hidden: the places in which they differ.
    """

    def __init__(self, table: Tensor, mask: Tensor, other: Tensor, hidden: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden, self.wide = sorted(hidden), mask.shape[-1]
        self.kept: list[Any] = [table, mask]  # else another tensor might take the place of one in memory
        self.of_tokens = {_memory(table)}
        self.others = {_memory(mask): _copied(other.contiguous())}
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        meets = any(_memory(each) in self.of_tokens for each in given) and func.overloadpacket not in NEW
        masks = [each for each in given if _memory(each) in self.others]
        if masks and not meets:
            if func._schema.is_mutable and _memory(given[0]) not in self.others:
                self.others[_memory(given[0])] = _copied(given[0])
            try:
                otherwise = func(*tree_map(self.other, args), **tree_map(self.other, kwargs))
            except (RuntimeError, ValueError, IndexError):  # what fits the one does not fit the other
                self.counts, otherwise = True, ()
        elif meets and func.overloadpacket not in (_aten.div, _aten.div_):  # by which a mean, or one so far, divides
            self.counts = self.counts or any(self._moves(each, func.overloadpacket in READING) for each in masks)
        found = func(*args, **kwargs)
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        self.kept += made
        if meets:
            self.of_tokens.update(map(_memory, made))
            for each in made:
                self.others.pop(_memory(each), None)
        elif masks and made:
            self._keep(made, [each for each in tree_leaves(otherwise) if isinstance(each, Tensor)] or made)
        elif masks:  # a number that Python is told
            self.counts = self.counts or found != otherwise
        return found

    def __enter__(self) -> Any:
        self.leaving = _Leaving(self)
        self.leaving.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)  # type: ignore[no-untyped-call]
        self.leaving.__exit__(*how)  # type: ignore[no-untyped-call]

    def other(self, given: Any) -> Any:
        """What there is of the other mask in the place of a tensor of the mask; anything else as it is."""
        if not isinstance(given, Tensor) or _memory(given) not in self.others:
            return given
        how = given.storage_offset(), given.shape, given.stride()
        return torch.empty(0, dtype=given.dtype, device=given.device).set_(self.others[_memory(given)], *how)

    def _keep(self, made: Sequence[Tensor], otherwise: Sequence[Any]) -> None:
        for one, other in zip(made, otherwise, strict=True):
            if one.shape != other.shape:
                self.counts = True
            elif _memory(one) not in self.others:  # no view of what is known, nor changed in place
                self.others[_memory(one)] = _copied(one)
                self.other(one).copy_(other)

    def _moves(self, mask: Tensor, reads: bool) -> bool:
        """Whether what meets tokens, or ``reads`` some of them, is another elsewhere than in the places that are
        hidden."""
        one, other = mask, self.other(mask)
        differs = (one != other) & ~((one != one) & (other != other))
        if not bool(differs.any()):
            return False
        dims = self._dims(one)
        if not dims:  # nothing of each token: how many there are
            return reads
        for before in range(-ENDS, BESIDE + 1):
            hidden, seen = zip(*(self._places(one.shape[i], before) for i in dims), strict=True)
            left = differs.clone()
            for i, places in zip(dims, hidden, strict=True):
                left.index_fill_(i, torch.tensor(places, device=left.device), False)
            if not bool(left.any()) or all(_is_same_everywhere(each, dims, seen) for each in (one, other)):
                return False
        return True

    def _dims(self, mask: Tensor) -> list[int]:
        """Which dimensions are of tokens."""
        return [i for i, size in enumerate(mask.shape) if -ENDS <= size - self.wide <= BESIDE]

    def _places(self, size: int, before: int) -> tuple[list[int], list[int]]:
        """Where the tokens are that are hidden, and those that are seen, among so many places, ``before`` of others
        before the first, no more than there are; below 0, so many of its own left out."""
        before = max(min(before, max(size - self.wide, 0)), min(size - self.wide, 0))
        places = {place: place + before for place in range(self.wide) if 0 <= place + before < size}
        hidden = [at for place, at in places.items() if place in self.hidden]
        return hidden, [at for place, at in places.items() if place not in self.hidden]


def _is_same_everywhere(values: Tensor, dims: Sequence[int], seen: Sequence[Sequence[int]]) -> bool:
    """Whether it is the same at all tokens that are seen, as in a mean over them."""
    for i, places in zip(dims, seen, strict=True):
        values = values.index_select(i, torch.tensor(places, device=values.device))
        if not torch.equal(values, values.narrow(i, 0, 1).expand_as(values)):
            return False
    return True


class _Leaving(TorchFunctionMode):
    """In the block, looks at what of the mask a model takes out of torch, beside :class:`Counting`."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_PYTHON:
            with torch._C._DisableTorchDispatch():
                other = self.counting.other(args[0])
                self.counting.counts = self.counting.counts or not torch.equal(args[0], other)
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor looks at, as its views do."""
    return int(tensor.untyped_storage()._cdata)


def _copied(tensor: Tensor) -> torch.UntypedStorage:
    """All that a tensor and its views look at, once more."""
    found: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return found
