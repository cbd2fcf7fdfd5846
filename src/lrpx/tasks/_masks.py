"""What a model does with its attention mask, beside hiding tokens: it may count tokens' places by it, or which one it
reads. Found by one run in which all that is computed of the mask alone is computed of other masks, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.nn import Module

BESIDE: Final = 32
"""So many places a model may put before or behind those of a text, as soft prompts;"""
ENDS: Final = 2
"""and so many it may leave out, as the class token and the end."""
_aten = torch.ops.aten


def _kinds(names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names.split())


NEW: Final = _kinds(
    "new_zeros new_ones new_full new_empty new_empty_strided zeros_like ones_like full_like empty_like rand_like "
    "randn_like"
)
"""What makes a tensor of another's shape, without its numbers."""
READING: Final = _kinds("index gather index_select take embedding")
"""What is told by a number which tokens it reads."""
PACKING: Final = _kinds("index masked_select")
"""What leaves out the rows that a mask hides: where one stands then is counted by it."""
ALIKE: Final = _kinds(
    "sum mean amax amin max min logsumexp var std var_mean linalg_vector_norm any all index_put index_put_ "
    "masked_scatter masked_scatter_ mm addmm native_layer_norm _softmax _log_softmax view _unsafe_view unsqueeze "
    "squeeze expand alias detach clone _to_copy native_dropout"
)
"""What may be done with such rows, beside what is done with each number: with each row, with all of them, or to put
them back."""
SUMMING: Final = _kinds("mul div cumsum sum bmm mm")
"""What sums up tokens, or divides their sum, by weights that are known."""
WEIGHING: Final = SUMMING | _kinds("mul_ div_ baddbmm addmm addcmul")
"""What multiplies tokens with weights."""
SAME: Final = 1e-4
"""So much may ratios of weights differ by rounding."""
TO_PYTHON: Final = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""What takes numbers out of torch unseen."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the block, looks at what a model computes of its mask alone, where that meets tokens, whose embeddings are
    looked up in its table. Of other masks, in each of which another token is hidden, it computes the same beside it.

    A mask that only hides has numbers that hang on one place each, or on two, a query's and a key's, and is another in
    the place of the hidden token alone. Or it has weights whose ratios stay, as those of a mean. Anything else counts:
    places behind a hidden token are others, or all are; so is which token is read, and how many there are, where Python
    is told. How many tokens a pooling divides by is no place; a mean so far divides by a sum of the same weights.

    Args:
        model: whose weights are known, and its tokens' table.
        table: the token table.
        inputs: what the model will be given, its ``attention_mask`` among it.
        others: other masks,
        hidden: each with the places in which it differs from that.
    """

    def __init__(
        self,
        model: Module,
        table: Tensor,
        inputs: Mapping[str, Any],
        others: Iterable[Tensor],
        hidden: Iterable[Sequence[int]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        mask = inputs["attention_mask"]
        self.never = [place for place, seen in enumerate(mask.flatten(0, -2)[0].tolist()) if not seen]
        self.hidden, self.wide = [sorted(each) for each in hidden], mask.shape[-1]
        known = [*model.parameters(), *model.buffers(), *(each for each in inputs.values() if isinstance(each, Tensor))]
        self.kept: list[Any] = [table, *known]  # else another tensor might take the place of one in memory
        self.of_tokens = {_memory(table)}
        self.of_mask = {_memory(mask): [_copied(each.contiguous()) for each in (mask, *others)]}
        self.weights: dict[int, list[torch.UntypedStorage]] = {}
        self.packed: set[int] = set()
        self.seen = {_memory(each) for each in self.kept}
        self.unseen: list[Tensor] = []
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, func.overloadpacket
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._look(given)
        meets = any(_memory(each) in self.of_tokens for each in given) and kind not in NEW
        masks = [each for each in given if _memory(each) in self.of_mask]
        otherwise: list[Any] = []
        if masks and not meets:
            if func._schema.is_mutable and _memory(given[0]) not in self.of_mask:
                self.of_mask[_memory(given[0])] = [_copied(given[0]) for _ in (None, *self.hidden)]
            otherwise = self._otherwise(func, args, kwargs, self.of_mask)
        elif meets:
            otherwise = self._summed(func, args, kwargs, given, masks)
            is_sum = kind is _aten.div and any(_memory(each) in self.weights for each in given)
            hides = is_sum and bool(otherwise) and _stay(otherwise)  # by which a mean divides
            is_each = torch.Tag.pointwise in func.tags
            numbers = [each.dtype.is_floating_point or each.dtype is torch.bool or is_each for each in masks]
            reads = [kind in READING or not is_number for is_number in numbers]  # or is told how many to read
            self.counts |= not hides and not all(
                self._hides(mask, is_read, kind in WEIGHING) for mask, is_read in zip(masks, reads, strict=True)
            )
            self.counts |= self._tells_rows(func, given)
        found = func(*args, **kwargs)
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        self.kept += made
        self.seen.update(map(_memory, made))
        if meets:
            self.of_tokens.update(map(_memory, made))
            for each in made:
                self.of_mask.pop(_memory(each), None)
                if func._schema.is_mutable:
                    self.weights.pop(_memory(each), None)
            if otherwise:
                _keep(self.weights, made, otherwise)
            packs = kind in PACKING and any(each.dtype in (torch.bool, torch.uint8) for each in masks)
            rows = {each.shape[0] for each in given if _memory(each) in self.packed and each.ndim}
            puts_back = kind in (_aten.index_put, _aten.index_put_, _aten.masked_scatter, _aten.masked_scatter_)
            self.packed.update(
                _memory(each) for each in made if packs or (each.ndim and each.shape[0] in rows and not puts_back)
            )
        elif masks and made:
            self.counts |= not _keep(self.of_mask, made, otherwise)
        elif masks:  # a number that Python is told
            self.counts |= any(each != found for each in otherwise)
        return found

    def __enter__(self) -> Any:
        self.leaving = _Leaving(self)
        self.leaving.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)  # type: ignore[no-untyped-call]
        self.leaving.__exit__(*how)  # type: ignore[no-untyped-call]

    def each(self, given: Tensor) -> list[Tensor]:
        """What there is of each mask in the place of a tensor of the mask, the model's own first."""
        return [_like(given, memory) for memory in self.of_mask.get(_memory(given), ())]

    def end(self, output: Any) -> None:
        """What a model gave: where that was made unseen, as in another thread, nothing is known."""
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        self.counts |= bool(made) and not any(_memory(each) in self.of_tokens for each in made)

    def saw_other(self, run: Counting) -> bool:
        """Whether another run had other tensors of those that nobody has seen made."""
        pairs = zip(self.unseen, run.unseen, strict=False)
        return len(self.unseen) != len(run.unseen) or any(
            one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs
        )

    def _look(self, given: Iterable[Tensor]) -> None:
        """Keep what nobody has seen made, as what another thread has."""
        for each in given:
            if _memory(each) not in self.seen:
                self.seen.add(_memory(each))
                self.kept.append(each)
                self.unseen.append(each.clone())

    def _otherwise(self, func: Any, args: Any, kwargs: Any, known: dict[int, list[torch.UntypedStorage]]) -> list[Any]:
        """What it computes of each mask."""

        def at(which: int) -> Any:
            def other(given: Any) -> Any:
                is_known = isinstance(given, Tensor) and _memory(given) in known
                return _like(given, known[_memory(given)][which]) if is_known else given

            return other

        try:
            return [func(*tree_map(at(i), args), **tree_map(at(i), kwargs)) for i in range(len(self.hidden) + 1)]
        except (RuntimeError, ValueError, IndexError):  # what fits the one does not fit the other
            self.counts = True
            return []

    def _summed(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Any]:
        """The weights that tokens have in what this gives, for each mask: the same of ones in their place."""
        tokens = [each for each in given if _memory(each) in self.of_tokens]
        if func.overloadpacket not in SUMMING or len(tokens) != 1 or func._schema.is_mutable:
            return []
        if not masks and _memory(tokens[0]) not in self.weights:
            return []
        known = self.of_mask | self.weights
        if _memory(tokens[0]) not in known:
            ones = _copied(tokens[0])
            _like(tokens[0], ones).fill_(1)
            known[_memory(tokens[0])] = [ones] * (len(self.hidden) + 1)
        if len(given) > len(tokens) + len(masks) and func.overloadpacket is _aten.mm:  # a layer of the model's
            return []
        return self._otherwise(func, args, kwargs, known)

    def _hides(self, mask: Tensor, reads: bool, weighs: bool) -> bool:
        """Whether what meets tokens, ``reads`` some of them or ``weighs`` them, only hides."""
        one, *others = self.each(mask)
        changed = [(one != other) & ~((one != one) & (other != other)) for other in others]
        if not any(bool(each.any()) for each in changed):
            return True
        alone = self._single(changed)
        if self._of_one_place(changed):
            return True
        if reads:
            return False
        if all(bool((each == each.flatten()[0]).all()) for each in (one, *others)):
            return True  # how many there are
        if not self._dims(mask) and bool((alone == alone.flatten(1)[:, :1].reshape(-1, *[1] * mask.ndim)).all()):
            return True  # and what is made of that
        return weighs and self._weighs(one, others)

    def _weighs(self, one: Tensor, others: Sequence[Tensor]) -> bool:
        """Whether these are weights of tokens whose ratios stay, but for those of hidden ones: all of them, or those of
        each query."""
        if one.is_complex():
            return False
        lost = SAME if not one.is_floating_point() else max(SAME, 16 * torch.finfo(one.dtype).eps)
        if self._dims(one) and self._in_place([_rescaled(one, other, lost) for other in others], self.never):
            return True
        gone = [(one == 0) != (other == 0) for other in others]
        single = self._single(gone)
        if not bool(single.any()) or not self._of_one_place(gone):
            return False
        ratios = [_ratios(one, other) for other in others]
        for i, size in enumerate(one.shape):
            if size > 1 and int(single.sum(i + 1).max()) <= 1:
                spread = [each.nan_to_num(-torch.inf).amax(i) - each.nan_to_num(torch.inf).amin(i) for each in ratios]
                if all(bool((each <= lost).all()) for each in spread):
                    return True
        return False

    def _single(self, changed: Sequence[Tensor]) -> Tensor:
        """What is another where one token is hidden, for each of them."""
        return torch.stack([each for each, places in zip(changed, self.hidden, strict=True) if len(places) == 1])

    def _of_one_place(self, changed: Sequence[Tensor]) -> bool:
        """Whether each number hangs on one token alone, or on two, and is in its place."""
        return int(self._single(changed).sum(0).max()) <= 2 and self._in_place(changed)

    def _in_place(self, changed: Sequence[Tensor], beside: Sequence[int] = ()) -> bool:
        """Whether nothing is another elsewhere than in the places that are hidden, and those ``beside``."""
        dims = self._dims(changed[0])
        if not dims:
            return True
        for before in sorted(range(-ENDS, BESIDE + 1), key=abs):
            for each, hidden in zip(changed, self.hidden, strict=True):
                left = each.clone()
                for i in dims:
                    at = self._places(each.shape[i], before, [*hidden, *beside])
                    left.index_fill_(i, torch.tensor(at, device=left.device, dtype=torch.int64), False)
                if bool(left.any()):
                    break
            else:
                return True
        return False

    def _dims(self, mask: Tensor) -> list[int]:
        """Which dimensions are of tokens."""
        return [i for i, size in enumerate(mask.shape) if -ENDS <= size - self.wide <= BESIDE]

    def _places(self, size: int, before: int, hidden: Sequence[int]) -> list[int]:
        """Where the tokens are that are hidden, among so many places, ``before`` of others before the first, no more
        than there are; below 0, so many of its own left out."""
        before = max(min(before, max(size - self.wide, 0)), min(size - self.wide, 0))
        return [place + before for place in hidden if 0 <= place + before < size]

    def _tells_rows(self, func: Any, given: Sequence[Tensor]) -> bool:
        """Whether rows that were packed by a mask are told apart by where they stand."""
        rows = {each.shape[0] for each in given if _memory(each) in self.packed and each.ndim}
        if not rows:
            return False
        others = [each for each in given if _memory(each) not in self.packed]
        each_number = torch.Tag.pointwise in func.tags
        beside = each_number and any(size > 1 and size in rows for each in others for size in each.shape[:-1])
        return beside or not (each_number or func.overloadpacket in ALIKE)


def _stay(weights: Sequence[Tensor]) -> bool:
    """Whether weights are the same whatever is hidden, wherever there are any."""
    one, *others = weights
    return not one.is_complex() and all(
        bool(((_ratios(one, each) - 1).abs().nan_to_num(0) <= SAME).all()) for each in others
    )


def _ratios(one: Tensor, other: Tensor) -> Tensor:
    """Of numbers that are no zeros; NaN where one is."""
    ratios = other.double() / one.double()
    return ratios.masked_fill((one == 0) | (other == 0) | ratios.isinf(), torch.nan)


def _rescaled(one: Tensor, other: Tensor, lost: float) -> Tensor:
    """Where one is not as many times the other as it mostly is."""
    most = _ratios(one, other).nanmedian().nan_to_num(1.0)
    found: Tensor = ~torch.isclose(other.double(), most * one.double(), rtol=lost, atol=0, equal_nan=True)
    return found


def _keep(known: dict[int, list[torch.UntypedStorage]], made: Sequence[Tensor], otherwise: Sequence[Any]) -> bool:
    """Keep what was computed of each mask beside what was made; whether it has the same shapes."""
    for each, *others in zip(made, *map(tree_leaves, otherwise), strict=False):
        if any(each.shape != other.shape for other in others):
            return False
        if _memory(each) not in known:  # no view of what is known, nor changed in place
            known[_memory(each)] = [_copied(each) for _ in others]
            for memory, other in zip(known[_memory(each)], others, strict=True):
                _like(each, memory).copy_(other)
    return True


class _Leaving(TorchFunctionMode):
    """In the block, looks at what of the mask a model takes out of torch, beside :class:`Counting`."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_PYTHON:
            with torch._C._DisableTorchDispatch():
                self.counting.counts |= any(not torch.equal(args[0], each) for each in self.counting.each(args[0]))
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor looks at, as its views do."""
    return int(tensor.untyped_storage()._cdata)


def _copied(tensor: Tensor) -> torch.UntypedStorage:
    """All that a tensor and its views look at, once more."""
    found: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return found


def _like(tensor: Tensor, memory: torch.UntypedStorage) -> Tensor:
    """A tensor that looks at other memory in the same way."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
