"""What is computed from the numbers of places, and along which dimension they count: known by a second computation.

Numbers of places are what ``arange`` or ``cumsum`` of whole numbers gives, whole numbers that the model has kept, and
its arguments of that name. Each has a *shadow*: the same, with another place in its middle. What is made of it is made
of its shadow too, and where the two differ is where that place counts: along the axis of the tokens, and at one index
of it. What comparisons give is a mask, and what is made of masks alone is none; nor is what was made of the input too,
as where a model detaches it, or runs a part of itself without gradients.

A table of the model that is cut to the text's length has a shadow, too: the same with another row in the middle of each
dimension that was cut. So nothing else of its shape need tell which dimension is the tokens'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lrpx.engine._book import storage_of
from lrpx.engine._tensors import LIKE_ANOTHER, any_carries, arguments, is_in_place, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lrpx.engine._taps import Call

OF_NO_TOKENS = ("grid", "size", "length", "index", "indices")
"""What is in the name of an argument of whole numbers whose last dimension is none of tokens."""
RANGES = ("arange", "linspace", "range")
NUMBERING = (*RANGES, "cumsum", "tensor", "as_tensor")
"""Functions that number places, of nothing, of whole numbers or of a list of them."""
LOOK_UPS = ("gather", "take_along_dim", "index_select", "take", "__getitem__")
"""Functions that choose some of a tensor by an index."""
COMPARISONS = frozenset(
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal "
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__".split()
)
OF_ITS_SHAPE = ("_like", "new_")
"""What is in the names of functions that take no more than the shape of their first argument."""


class Mark(NamedTuple):
    """That a tensor was made of the numbers of places.

    Args:
        shadow: the same of other numbers; None where it cannot be computed.
        is_single: whether there is one place only.
        is_mask: whether it was made of comparisons of them alone, and so says what is admitted, or on which side.
        is_table: whether it was made of tables that were cut to the text's length, and of no numbers of places.
        is_pair: whether such a table was cut along two dimensions, and so has a number for each pair of places.
    """

    shadow: Any
    is_single: bool = False
    is_mask: bool = False
    is_table: bool = False
    is_pair: bool = False


class Numbers:
    """The numbers of places of one run, and all constants that are made of them.

    Attributes:
        lengths: how many tokens the model was given, or may have been.
        moved: at how many indices, at most, the numbers of places have another in their shadow.
    """

    def __init__(self) -> None:
        self._marks: Any = WeakTensorKeyDictionary()
        self._seen: Any = WeakTensorKeyDictionary()  # whole numbers that the run was given, or has made
        self._own: Any = WeakTensorKeyDictionary()  # those that the model has kept
        self._of_input: Any = WeakTensorKeyDictionary()  # real numbers that were made of the input, and carry nothing
        self._given: Any = WeakTensorKeyDictionary()  # what was made of the model's arguments
        self._of_nothing: Any = WeakTensorKeyDictionary()  # what was made of no arguments but masks, and no weights
        self._ids: list[Tensor] = []
        self._masks: list[Tensor] = []
        self.lengths: set[int] = set()
        self.moved = 1

    def mark(self, constant: Tensor) -> Mark | None:
        """What a constant was made of, if of places."""
        return self._marks.get(constant)  # type: ignore[no-any-return]

    def given(self, name: str, value: Tensor) -> None:
        """An argument of the model: the tokens, or the numbers of their places, if it is of whole numbers."""
        self._given[value] = True
        if "mask" in name:
            self._of_nothing[value] = "mask"
            if value.ndim == 2:
                self._masks.append(value)
        if value.is_floating_point():
            self._seen[value] = True
            return
        if "position" in name and value.ndim:
            self._number(value)
            return
        self._seen[value] = True
        if "ids" in name and value.ndim == 2:
            self._ids.append(value)
        if "ids" in name or "mask" in name or (value.ndim <= 2 and not any(word in name for word in OF_NO_TOKENS)):
            self.lengths.update(value.shape[-1:])

    def is_turned(self, ids: Tensor) -> bool:
        """Whether ids are those that the model was given, turned round."""
        if ids.ndim != 2 or any(ids is given or torch.equal(ids, given) for given in self._ids):
            return False
        return any(torch.equal(ids.T, given) for given in self._ids)

    def is_of_input(self, constant: Any) -> bool:
        """Whether a constant was made of the input, where it was detached or gradients are off."""
        return isinstance(constant, Tensor) and (constant in self._of_input or whole_of(constant) in self._of_input)

    def follow_input(self, call: Call, out: Any) -> bool:
        """Whether a call has made something of the input that carries nothing, which is remembered; whole numbers and
        masks may still be those of places. What is a view of a constant (``broadcast_tensors``) is that constant."""
        args = call.args
        if any(word in call.name for word in OF_ITS_SHAPE):
            return False
        given = args[:1] if call.name in LIKE_ANOTHER else (*args, *call.kwargs.values())
        if not any(map(self._has_input, given)):
            return False
        writes = _writes(call.name) or "out" in call.kwargs
        own = set() if writes else {storage_of(each) for each, _ in pairs(given, None) if not self._has_input(each)}
        made = [value for value, _ in pairs(args[0] if call.name == "__setitem__" else out, None)]
        found = [each for each in made if not each.requires_grad and _is_real(each) and storage_of(each) not in own]
        for value in found:
            for each in (value, whole_of(value)):
                self._of_input[each] = True
                self._marks.pop(each, None)
        return bool(found)

    def is_given(self, constant: Tensor) -> bool:
        """Whether a constant was made of an argument of the model."""
        return constant in self._given or whole_of(constant) in self._given

    def _follow_given(self, call: Call, out: Any) -> None:
        if any(self.is_given(each) for each, _ in pairs([*call.args, *call.kwargs.values()], None)):
            writes = _writes(call.name)
            for made, _ in pairs(call.args[0] if writes else out, None):
                self._given[made] = True

    def _follow_nothing(self, call: Call, out: Any) -> None:
        given = [each for each, _ in pairs([*call.args, *call.kwargs.values()], None)]
        of = [self._of_nothing.get(each, self._of_nothing.get(whole_of(each))) for each in given]
        if None not in of:
            for made, _ in pairs(out, None):
                self._of_nothing[made] = "mask" if "mask" in of else ""

    def is_choice_of_nobody(self, index: Any) -> bool:
        """Whether whole numbers choose another for each token, and were made of neither numbers of places nor the
        model's arguments, as what ``nonzero`` gives."""
        if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index in self._marks:
            return False
        if index not in self._of_nothing or (self._of_nothing[index] and _is_mask(index)):
            return False
        dims = [dim for dim in range(index.ndim) if 1 < index.shape[dim] in self.lengths]
        return any(bool((index != index.narrow(dim, 0, 1)).any()) for dim in dims)

    def _has_input(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._has_input, value))
        return any_carries(value) or self.is_of_input(value)

    def see(self, out: Any) -> None:
        """Constants that the run has made are no numbers of places that the model has kept."""
        for made, _ in pairs(out, None):
            if not made.requires_grad:
                self._seen[made] = True

    def of_constants(self, call: Call, proceed: Callable[..., Any]) -> Any:
        """A call of constants, and of their shadows after it."""
        args, kwargs = call.args, call.kwargs
        # a range numbers its places anew, wherever it ends
        is_of_none = call.name in RANGES or self._is_of_one_number(call) or self._compares_with_text(call)
        marks = [] if is_of_none else list(self._marks_in((*args, *kwargs.values())))
        is_of_masks = bool(marks) and all(mark.is_mask for mark in marks)
        marks = [] if is_of_masks and call.name == "cumsum" else marks  # which counts anew, too
        is_table = all(mark.is_table for mark in marks)
        marks = [mark for mark in marks if mark.is_table is is_table]  # where there are numbers, they tell alone
        if not marks:
            out = proceed(args, kwargs)
            self._follow_given(call, out)
            self._follow_nothing(call, out)
            if not self._is_from_elsewhere(out, args):
                self.see(out)
            if isinstance(out, Tensor) and out.ndim and self._numbers_places(call, out):
                self._number(out, is_counted=True)
            return out
        writes = _writes(call.name) and isinstance(args[0], Tensor)
        written = self._before_writing(args[0], is_table=is_table) if writes else []
        shadow, is_known = None, all(mark.shadow is not None for mark in (*marks, *(mark for _, mark in written)))
        with torch.no_grad():  # a look-up by the numbers of places is no source of the input
            if is_known:
                first = [mark.shadow for _, mark in written[:1]]
                others = [self._shadow(value, is_table=is_table) for value in args[len(first) :]]
                named = {name: self._shadow(value, is_table=is_table) for name, value in kwargs.items()}
                try:
                    with torch.random.fork_rng(devices=(), enabled="dropout" in call.name):
                        shadow = proceed((*first, *others), named)
                except (IndexError, RuntimeError):  # the numbers of other places lead out of a table
                    is_known = False
            out = proceed(args, kwargs)
        self._follow_given(call, out)
        is_single, is_mask = all(mark.is_single for mark in marks), all(mark.is_mask for mark in marks)
        if self._is_of_ids(call):  # which token it is hangs on the place, and so what is looked up by it
            is_single, shadow = False, None
        of_table = is_table, any(mark.is_pair for mark in marks)
        for made, other in pairs(out, shadow):
            if not (writes and made is args[0]) and not self._is_part_of_numbers(made, args):
                fits = isinstance(other, Tensor) and other.shape == made.shape
                if is_of_masks and made.dtype is torch.int64 and self._counts(made):
                    self._number(made, is_counted=True)
                    continue
                self._marks[made] = Mark(
                    other if fits else None, is_single, is_mask or made.dtype is torch.bool, *of_table
                )
        for value, mark in written:
            is_mask_still = is_mask and mark.is_mask
            self._marks[value] = Mark(mark.shadow if is_known else None, is_single, is_mask_still, *of_table)
        return out

    def _marks_in(self, value: Any) -> Iterator[Mark]:
        if isinstance(value, (tuple, list)):
            for each in value:
                yield from self._marks_in(each)
        elif isinstance(value, Tensor) and (mark := self._mark_of(value)) is not None:
            yield mark

    def _mark_of(self, value: Tensor) -> Mark | None:
        mark: Mark | None = self._marks.get(value)
        if mark is None and value.dtype is torch.int64 and value.ndim and value not in self._seen:
            if bool((value != value.flatten()[:1]).any()) or value.shape[-1] == 1 in self.lengths:
                self._own[value] = True
                mark = self._number(value)
            else:
                self._seen[value] = True
        return mark

    def _shadow(self, value: Any, *, is_table: bool) -> Any:
        """The shadow of a tensor that has one, of a table or of numbers of places; any other value as it is."""
        if isinstance(value, (tuple, list)):
            made = [self._shadow(each, is_table=is_table) for each in value]
            return type(value)(made) if type(value) in (tuple, list) else value
        mark = self._mark_of(value) if isinstance(value, Tensor) else None
        return value if mark is None or mark.is_table is not is_table else mark.shadow

    def cut(self, table: Tensor, out: Tensor, dims: Sequence[int] | None = None) -> None:
        """Mark what is a part of a table of the model, if it was cut to the length of the text: along these dimensions
        of the table, or those that it has less of. Steps tell which they are.

        A part of a table that has two numbers is a mask.
        """
        mark = self._marks.get(out) or Mark(out, is_single=True, is_mask=_is_mask(table), is_table=True)
        if not mark.is_table or mark.shadow is None:
            return
        of_table = range(table.ndim) if dims is None else dims
        sizes = {table.stride(dim): table.shape[dim] + (dims is not None) for dim in of_table}
        steps = [
            step if step and size < sizes.get(step, 0) else 0
            for size, step in zip(out.shape, out.stride(), strict=True)
        ]
        found = [dim for dim, step in enumerate(steps) if step and out.shape[dim] in self.lengths]
        many = {steps[dim] for dim in found if out.shape[dim] > 1}  # a dimension of one may have the step of another
        found = [dim for dim in found if out.shape[dim] > 1 or steps[dim] not in many]
        if not found:
            return
        shadow = mark.shadow.clone()
        for dim in found:
            shadow.select(dim, out.shape[dim] // 2).copy_(_another(out, dim))
        is_single = mark.is_single and all(out.shape[dim] == 1 for dim in found)
        is_pair = mark.is_pair or len(found) > 1 or out in self._marks
        self._marks[out] = mark._replace(shadow=shadow, is_single=is_single, is_pair=is_pair)

    def _middle(self, length: int) -> int:
        """The place in the middle of the tokens that the most rows have, which is no padding."""
        mask = next((each for each in self._masks if each.shape[-1] == length), None)
        if mask is None:
            return (length - 1) // 2
        count = (mask != 0).sum(0)
        tokens = (count == count.max()).nonzero().flatten()
        return int(tokens[(len(tokens) - 1) // 2])

    def _number(self, value: Tensor, *, is_counted: bool = False) -> Mark:
        """Mark the numbers of places, along the last dimension; their shadow has another place in its middle."""
        shadow, length = value.clone(), value.shape[-1]
        if length == 1:  # the place behind it
            mark = Mark(value + 1, is_single=True)
            self._marks[value] = mark
            return mark
        known = max(self.lengths, default=length)
        behind = length - known + known // 2
        places = {self._middle(length)} if length <= known else {known // 2, behind}
        self.moved = max(self.moved, len(places))
        least, most = value.amin(-1), value.amax(-1)
        for place in places:
            here = value[..., place]
            # the last place, which dynamic angles hang on, stays; one opposite has the same cosine
            is_free = is_counted and length <= known  # a table may have no place behind the last
            other = here + 1 if is_free else torch.where(here == least, here + 1, least)
            shadow[..., place] = torch.where((most > here) & (most.abs() != here.abs()), most, other)
        mark = Mark(shadow)
        self._marks[value] = mark
        return mark

    def _numbers_places(self, call: Call, out: Tensor) -> bool:
        """Whether what ``arange`` or ``cumsum`` gives may number places: there are as many as tokens, or more; where
        the model is given no tokens, any number. What else was made of no argument but masks does where it counts."""
        if call.name == "cumsum":
            counted = call.args[0]
            return isinstance(counted, Tensor) and bool((counted == counted.long()).all())
        if call.name not in NUMBERING and out not in self._of_nothing:
            return False
        if call.name not in (*RANGES, "cumsum"):  # such as a list: of places if it counts, and is no text that does
            return self._counts(out) and not any(bool((ids == out).all(-1).any()) for ids in self._fitting(out))
        if not self.lengths or out.shape[0] in self.lengths:
            return True
        return out.shape[0] > max(self.lengths) and bool((out[1] - out[0]).abs() == 1)

    def _counts(self, out: Tensor) -> bool:
        """Whether whole numbers count as many as there are tokens, one by one."""
        is_long = out.dtype is torch.int64 and out.ndim > 0 and 1 < out.shape[-1] in self.lengths
        return is_long and bool((out.diff() == 1).all())

    def _fitting(self, numbers: Tensor) -> list[Tensor]:
        """The ids that are as long as these numbers."""
        return [ids for ids in self._ids if ids.shape[-1] == numbers.shape[-1]]

    def _is_of_one_number(self, call: Call) -> bool:
        """Whether a call chooses of whole numbers that are all the same, as BERT does of token types, by places: where
        there is one place, no shadow tells."""
        table = call.args[0] if call.args else None
        if call.name not in LOOK_UPS or not isinstance(table, Tensor) or table.dtype is not torch.int64:
            return False
        if not table.numel():
            return False
        return self._mark_of(table) is None and bool((table == table.flatten()[0]).all())

    def _compares_with_text(self, call: Call) -> bool:
        """Whether a call compares numbers of places with what was made of the model's arguments, and of more than
        masks, as of where the text's question ends: on which side a place is, the text tells."""
        if call.name not in COMPARISONS:
            return False
        given = [each for each, _ in pairs([*call.args, *call.kwargs.values()], None) if self._mark_of(each) is None]
        return any(self.is_given(each) and each not in self._of_nothing for each in given)

    def _is_of_ids(self, call: Call) -> bool:
        """Whether a call chooses of whole numbers that are no places and no mask, as of the text's ids."""
        table = call.args[0] if call.args else None
        if call.name not in LOOK_UPS or not isinstance(table, Tensor) or table.dtype is not torch.int64:
            return False
        return self._mark_of(table) is None and not bool(((table == 0) | (table == 1)).all())

    def _is_from_elsewhere(self, out: Any, made_of: Sequence[Any]) -> bool:
        """Whether it is whole numbers made of others that no call has made that was seen: those of a scripted function
        (older DeBERTa), or of the model itself. They number places by themselves where they are used."""
        made = made_of[0] if made_of else None
        if not isinstance(out, Tensor) or out.dtype is not torch.int64 or not isinstance(made, Tensor):
            return False
        return made.is_floating_point() and made not in self._seen and out.shape == made.shape

    def _is_part_of_numbers(self, made: Tensor, made_of: Sequence[Any]) -> bool:
        """Whether it is a part of whole numbers of the model itself, which number places by themselves where it is
        used."""
        whole = made_of[0] if made_of else None
        if not isinstance(whole, Tensor) or whole not in self._own or made._base is None:
            return False
        return made._base is whole_of(whole) and made.numel() < whole.numel()

    def _before_writing(self, value: Tensor, *, is_table: bool) -> list[tuple[Tensor, Mark]]:
        """A constant that will be written into, with its mark; and its base, if it is a view, with its own: the shadow
        of a view is a view of its base's shadow."""
        base = whole_of(value)
        mark = self._marks.get(base)
        if mark is None or mark.is_table is not is_table:
            mark = Mark(base.detach().clone(), is_mask=True)
        if base is value or mark.shadow is None:
            return [(value, mark)]
        shadow = mark.shadow.as_strided(value.size(), value.stride(), value.storage_offset())
        return [(value, mark._replace(shadow=shadow)), (base, mark)]

    def varies(self, constant: Tensor) -> bool:
        """Whether a constant differs from place to place."""
        mark = self._mark_of(constant)
        if mark is None or mark.is_mask or mark.is_table:
            return False
        return mark.shadow is None or not torch.equal(constant, mark.shadow)

    def is_of_one_place(self, constant: Tensor) -> bool:
        """Whether a constant was made of the number of the only place there is, as the distance from itself."""
        mark = self._mark_of(constant)
        return mark is not None and mark.is_single and not mark.is_mask and not mark.is_table


def cut_dims(call: Call) -> list[int]:
    """Along which dimensions of its first argument a call cuts, as ``table[:n]`` does along the first."""
    table, *others = call.args
    if call.name == "narrow":
        return [int(arguments(call.args, call.kwargs, "input", "dim")[1]) % table.ndim]
    if call.name != "__getitem__":
        return []
    index = others[0] if isinstance(others[0], tuple) else (others[0],)
    found, dim = [], 0
    for at, each in enumerate(index):
        if each is Ellipsis:
            dim = table.ndim - sum(later is not None for later in index[at + 1 :])
        elif each is not None:
            if isinstance(each, slice) and (each.start, each.stop) != (None, None):
                found.append(dim)
            dim += 1
    return found


def _writes(name: str) -> bool:
    """Whether the torch function of this name changes the numbers of its first argument."""
    return is_in_place(name) and name != "requires_grad_"


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _is_mask(table: Tensor) -> bool:
    """Whether it has two numbers at most."""
    return not table.is_complex() and bool(((table == table.min()) | (table == table.max())).all())


def _another(table: Tensor, dim: int) -> Tensor:
    """The row of a table that differs most from that in its middle."""
    differs = (table != table.narrow(dim, table.shape[dim] // 2, 1)).movedim(dim, 0).flatten()
    differs = differs.reshape(table.shape[dim], -1).sum(1)
    return table.select(dim, int(differs.argmax()))


def pairs(out: Any, shadow: Any) -> Iterator[tuple[Tensor, Any]]:
    """The tensors of a result, each with that of its shadow's, or None."""
    if isinstance(out, Tensor):
        yield out, shadow
    elif isinstance(out, (tuple, list)):
        others = shadow if isinstance(shadow, (tuple, list)) and len(shadow) == len(out) else [None] * len(out)
        for one, other in zip(out, others, strict=True):
            yield from pairs(one, other)
