"""Which branches a tensor is made of, and through which norms and factors each goes, until it meets the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrpx.engine._tensors import any_carries, tensors_in
from lrpx.units._marks import Mark, mark_of, numbers_along
from lrpx.units._operations import REARRANGES, adds_stream
from lrpx.units._place import is_in
from lrpx.units._seen import Seen
from lrpx.units._traits import ALONE, JOINED, is_alone

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from lrpx.engine import Call


class Branches(Seen):
    """Follows each branch, which is what a linear layer of units gives, to the stream."""

    def _branches(self, marks: Iterable[Mark]) -> Iterator[Mark]:
        """Those that are what a linear layer of units gives."""
        return (
            mark for mark in marks if mark.kind == "linear" and any(is_in(path, mark.path) for path, _ in self._units)
        )

    def _go_on(self, call: Call, given: Sequence[tuple[Tensor, Mark | None, frozenset[Any]]], out: Any) -> None:
        """Which branches a tensor in a layer is made of, until they meet the stream, or another, in a sum; and note of
        those that are multiplied by what depends on the input, or go through a norm, where no mark says so."""
        row, branches = call.operation, frozenset[tuple[str, int]]().union(*(each for _, _, each in given))
        if row is None or row.kind in ("linear", "convolution"):
            return
        made = [x for x in tensors_in(out) if any_carries(x)]
        for x in made:
            vars(x).pop(JOINED, None)
        is_norm = row.kind == "norm" and row.gate == "joins"
        several = row.name == "glu" or (len(given) > 1 and row.kind in ("product", "matmul", "norm") and not is_norm)
        if row.name == "lerp" and not any(map(any_carries, [*call.args[2:], call.kwargs.get("weight")])):
            return  # a sum
        moves = row.gate == "moves" or call.name in REARRANGES
        goes_on = several or is_norm or moves or row.kind in ("plain", "product") or row.name == "div"
        if not (branches and made and goes_on and self._running):
            return
        if not (several or moves) and (not all(each for _, _, each in given) or adds_stream(call)):
            return
        key = " + ".join(sorted({path for path, _ in branches}))
        lost = branches - {self._branch(mark) for x in made if (mark := mark_of(x)) is not None}
        if several and (row.name == "glu" or sum(is_alone(x, key) for x, _, _ in given) < len(given) - 1):
            self._gated |= lost
        elif several or is_norm:
            self._normed |= lost
        for _, mark, _ in given:
            branch = None if mark is None else self._branch(mark)
            if mark is not None and branch is not None and branch in lost:
                self._note(branch, mark)
        if row.name in ("lerp", "addcmul", "addcdiv"):
            return
        for x in made:
            setattr(x, JOINED, branches)
            if len(branches) > 1:
                setattr(x, ALONE, key)

    def _is_whole(self, path: str, mark: Mark) -> bool:
        """Whether what a mark is of has a branch's features, all of them, in their order."""
        wide = self._made[path].shape[-1] if path in self._made else -1
        return mark.index.shape[-1] == wide and bool((mark.index == numbers_along(mark.index, -1)).all())

    def _note(self, branch: tuple[str, int], mark: Mark) -> None:
        """Note of a branch what it went through that no module gives."""
        _, last = self._scaled.get(branch, (None, None))
        self._normed |= {branch} if mark.norms > (last.norms if last else 0) else set()
        self._gated |= {branch} if mark.gates > (last.gates if last else 0) else set()

    def _branch(self, mark: Mark) -> tuple[str, int] | None:
        """The linear layer, and which call of it, that gave what norms or gates have scaled since."""
        if mark.kind == "linear" and mark.is_scaled and mark.path in self._linears:
            return mark.path, self._linears[mark.path]
        return mark.scales if mark.kind == "neurons" else None

    def _gate(self, args: Sequence[Any], marks: Sequence[Mark | None]) -> None:
        """Note of linear layers all of whose output, as numbers from 0 to 1, is a factor of as many features."""
        for x, mark in zip(args, marks, strict=True):
            if mark is None or mark.kind != "neurons" or mark.path not in self._linears:
                continue
            wide = self._made[mark.path].shape[-1]
            others = [other for other, its in zip(args, marks, strict=True) if its is None or its.path != mark.path]
            if any(any_carries(each) and each.shape[-1:] == x.shape[-1:] == (wide,) for each in others):
                self._gates.add((mark.path, self._linears[mark.path]))
