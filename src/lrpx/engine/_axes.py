"""Which constants are positions, and along which of their dimensions the places are; what nothing tells of is refused.

What was computed from the numbers of places differs from its shadow along the dimension of the places; a table of the
model itself has a row for each token, and what is added to an image's rows or map a row for each of its places
(:mod:`lrpx.engine._positions`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from lrpx._kinds import rule_name
from lrpx.engine._book import storage_of
from lrpx.engine._gates import EXPONENTS
from lrpx.engine._graph import descends
from lrpx.engine._numbers import Numbers, cut_dims, pairs
from lrpx.engine._origins import SEVERAL, has_places_of, whose
from lrpx.engine._tensors import CONSTANT, GIVEN, any_carries, arguments, is_tensor, tensors_in, whole_of
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module

    from lrpx.engine._places import Source
    from lrpx.engine._taps import Call

SUMS = frozenset(
    "add __add__ __radd__ add_ __iadd__ sub subtract __sub__ __rsub__ rsub sub_ __isub__ subtract_".split()
)
HEADS = "heads"
SCORES, WEIGHTS, MIXED, FIRST, LAST = "scores", "weights", "mixed", "channels first", "channels last"
"""What a tensor is in a model of images: features that were split in heads; products of two that depend on the input,
scaled or in another shape; their softmax; a product with one of these; a map ``[B, d, R, C]`` or ``[B, d, N]``, which a
convolution gives; or ``[B, R, C, d]``."""
UNSEEN, UNCLEAR = "unseen", "unclear"
"""What a model has been given, element by element, of which nobody saw yet where its channels are; the same with what
may be positions."""
JOINING = ("cat", "concat", "concatenate", "hstack", "dstack")
SHAPES = ("permute", "transpose", "swap", "move", "reshape", "view", "T", "flatten")
"""What is in the names of functions after which channels may be elsewhere."""
KEEPING_FIRST = frozenset("flatten unflatten reshape view squeeze".split())
"""Functions that leave the first two dimensions what they are, if their sizes stay."""
PIXEL = 4
"""How many numbers a pixel has at most."""
SPLITS = frozenset("split split_with_sizes tensor_split chunk hsplit vsplit dsplit unsafe_split unsafe_chunk".split())
HIDDEN = 20
"""How much less than the others a score has that a mask hides: Swin takes 100 off."""


class Axis(NamedTuple):
    """Which dimensions of positions, counted from their end, are those of the places, none where there is one place;
    and whether what they are added to is scores."""

    dims: tuple[int, ...]
    is_scores: bool = False


class Axes:
    """Tells which constants of a run are positions, from what was seen of its calls.

    Args:
        model: whose buffers and parameters may be tables of positions.
        numbers: what was made of the numbers of places.
    """

    def __init__(self, model: Module, numbers: Numbers) -> None:
        self._model = model
        self._numbers = numbers
        self._run: Any = None
        self._is_everywhere = False
        self._tables: frozenset[int] | None = None
        self._made: Any = WeakTensorKeyDictionary()
        self._looked_up: list[Tensor] = []
        self._of_tables: Any = WeakTensorKeyDictionary()  # what was made of the model's own tensors

    def begin(self, run: Any, *, is_everywhere: bool) -> None:
        """A run begins, in which positions are met everywhere, or by an image's rows alone."""
        self._run = run
        self._is_everywhere = is_everywhere

    def follow(self, call: Call, out: Any) -> None:
        """Remember what is a score for each pair of places; of a model of images, too, a map with its channels first,
        or a row that was looked up."""
        row = call.operation
        if row is None or not isinstance(out, Tensor) or not (self._is_everywhere or self.is_of_image()):
            return
        is_looked_up = call.name == "embedding" and not self._is_everywhere and call.args
        if is_looked_up and not self._run.is_given(call.args[0]):
            self._looked_up.append(out)
        given = [each for each in (*call.args, *call.kwargs.values()) if any_carries(each)]
        every = tensors_in((*call.args, *call.kwargs.values()))
        labels = {each: self._label(each) for each in every if any_carries(each)}
        made = {labels[each] if isinstance(each, Tensor) else None for each in given}
        of_maps = {FIRST, LAST}.intersection(labels.values()) or {UNSEEN, UNCLEAR}.intersection(labels.values())
        is_alone = None not in labels.values() or call.name in JOINING  # else what is broadcast may be of another kind
        maps = [each for each, label in labels.items() if label in of_maps and (is_alone or each.shape == out.shape)]
        x = maps[0] if maps and len(of_maps) == 1 else None
        if row.kind == "convolution" and UNCLEAR in of_maps and self._is_everywhere:
            raise self.refusal("what meets an image or a sound before its convolution has places of another dimension")
        if row.kind == "matmul":
            is_mixed = not made.isdisjoint((SCORES, WEIGHTS))
            made = {MIXED if is_mixed else SCORES} if len(given) > 1 else set()
        elif row.name == "softmax":
            made = {WEIGHTS}
        elif row.kind == "convolution":
            made = {FIRST}
        elif x is not None and made.isdisjoint((SCORES, WEIGHTS, MIXED)):
            made = _moved(of_maps, call, x, out)
            if made == {UNSEEN} and any(_may_be_of_places(each, x) for each in every):
                made = {UNCLEAR}
        elif row.kind in ("linear", "source"):
            return
        elif given and _is_split(given[0], out):
            made = {HEADS}
        if call.name in SUMS:
            made = made & {SCORES, WEIGHTS, MIXED} or made
        if len(made) == 1 and made != {None}:
            self._made[out] = made.pop()

    def follow_tables(self, call: Call, out: Any) -> None:
        """What is cast, scaled, cut or put together of a table is one, if it was not computed from places."""
        tables = [each for each in tensors_in((*call.args, *call.kwargs.values())) if self.is_of_model(each)]
        for made, _ in pairs(out, None) if tables else ():
            mark = self._numbers.mark(made)
            if (made.is_floating_point() or made.is_complex()) and (mark is None or mark.is_table):
                self._of_tables[made] = True
                if made._base is not None and (dims := cut_dims(call)):
                    self._numbers.cut(call.args[0], made, dims)
                elif made._base is not None and call.name in SPLITS:
                    self._numbers.cut(call.args[0], made)

    def is_of_places(self, c: Tensor) -> bool:
        """Whether a constant was made of the numbers of places."""
        mark = self._numbers.mark(c)
        return mark is not None and not mark.is_table

    def is_of_image(self) -> bool:
        """Whether the model reads numbers, such as pixels."""
        return any(source.ids is None for source in self._run.sources)

    def is_of_model(self, c: Tensor) -> bool:
        """Whether the numbers of a constant are the model's own, or were made of them."""
        base = whole_of(c)
        return is_constant(c) and (storage_of(c) in self._memory() or c in self._of_tables or base in self._of_tables)

    def is_constant(self, value: Any) -> bool:
        """Whether a summand is a constant, or was looked up for all rows alike, as an image's positions may be."""
        if is_constant(value):
            return True
        is_for_all = isinstance(value, Tensor) and value.ndim > 1 and (value.ndim == 2 or len(value) == 1)
        return is_for_all and any(value is each for each in self._looked_up)

    def are_known_scores(self, value: Any) -> bool:
        """Whether a tensor is known to be scores, or their softmax."""
        return is_tensor(value) and self._made.get(value) in (SCORES, WEIGHTS)

    def _are_of_keys(self, c: Tensor, met: Sequence[Any], shape: Sequence[int]) -> bool:
        """Whether a constant that meets scores has a number for each of their last dimension, which is the keys': they
        were not turned so that heads are last. A vector has so of scores of as many queries as keys: what was made of
        a product may be features, with a norm's weights."""
        scores = [each for each in met if self.are_known_scores(each)]
        if not scores or len(shape) < 3 or c.ndim == 0 or not 1 < c.shape[-1] == shape[-1]:
            return False
        return all(each.stride(-1) == 1 for each in scores) and (c.ndim > 1 or shape[-2] == shape[-1])

    def is_map(self, value: Tensor) -> bool:
        """Whether a tensor is known to be a map, with its channels first or last."""
        return self._label(value) in (FIRST, LAST)

    def _label(self, value: Tensor) -> str | None:
        """What a tensor is. Pixels have up to four channels; else a convolution tells."""
        made: str | None = self._made.get(value)
        if made is not None or GIVEN not in vars(value) or value.ndim not in (3, 4):
            return made
        if value.ndim == 3 or sorted(value.shape[1:])[1] <= PIXEL:
            return UNSEEN
        return FIRST if value.shape[1] <= PIXEL else LAST if value.shape[-1] <= PIXEL else UNSEEN

    def of_which(self, given: Sequence[Any], sources: Sequence[Source]) -> list[Source]:
        """The sources that any of the tensors was computed from; a replay has no graph to tell."""
        every = [each for each in given if is_tensor(each)]
        return [source for source in sources if any(descends(each.grad_fn, {id(source.value)}) for each in every)]

    def of_whose_places(self, given: Sequence[Any], sources: Sequence[Source], dim: int | None) -> list[Source]:
        """The sources whose places a dimension of the tensors has, counted from its end; None where there is one place,
        which any dimension but that of features may be.

        Raises:
            MethodError: nothing tells of which of the places of several sources, put together, these are.
        """
        leaves, found = {id(source.value) for source in sources}, set()
        for each in filter(any_carries, given):
            dims = range(-2, -1 - each.ndim, -1) if dim is None else [dim] if dim >= -each.ndim else []
            of = (whose(each, at, leaves) for at in dims if dim is not None or each.shape[at] == 1)
            found.add(next((one for one in of if one is not None), None))
        if SEVERAL in found:
            if all(each.ids is None for each in sources):  # a past and a future, which are told by what they have met
                return list(sources[:1])
            raise self.refusal("what it adds positions to was cut from rows of several inputs, and nothing tells whose")
        return [source for source in sources if id(source.value) in found]

    def rows(self) -> int:
        """How many rows the batch has: of ids, if the model takes any, and positions are met everywhere."""
        sources = self._run.sources
        first = next((each for each in sources if (each.ids is not None) is self._is_everywhere), sources[0])
        shape = first.value.shape if first.ids is None else self.shape_of_ids(first)
        return int(shape[0]) if first.ids is None or len(shape) > 1 else 1

    def is_turned(self, source: Source) -> bool:
        """Whether the model has looked up ``[T, B]`` ids of tokens that it was given as ``[B, T]``."""
        return source.ids is not None and self._numbers.is_turned(source.ids)

    def shape_of_ids(self, source: Source) -> tuple[int, ...]:
        """The shape of the ids of a source as the model looked them up."""
        assert source.ids is not None
        shape = tuple(source.ids.shape)
        return shape[::-1] if self.is_turned(source) else shape

    def axis(
        self,
        c: Tensor,
        met: Sequence[Any],
        shape: Sequence[int],
        *,
        is_scores: bool = False,
        is_factor: bool = False,
    ) -> Axis | None:
        """The dimension of the places of a constant; None where it is no positions.

        Args:
            c: the constant.
            met: what it meets.
            shape: of what it makes with what depends on the input.
            is_scores: whether that is known to be the scores of attention. Of the two dimensions of places there, the
                last is the keys', and what is added belongs to the positions of the keys.
            is_factor: whether it is multiplied, or joined, and not added.

        Raises:
            MethodError: nothing tells.
        """
        is_kept = self._numbers.mark(c) is None and storage_of(c) in self._memory() and c not in self._of_tables
        if is_kept and c._base is not None:
            self._numbers.cut(c._base, c)  # by the model, before the run
        mark = self._numbers.mark(c)
        if self._numbers.is_of_input(c):
            return None
        if mark is None:
            return self._axis_of_table(c, met, shape, is_scores=is_scores, is_factor=is_factor)
        if mark.is_mask and self._hides(c, shape, is_factor=is_factor):
            return None
        if mark.is_single and not self._may_be_one_place(shape):
            return None
        if mark.shadow is None and mark.is_single:
            return Axis((), is_scores)
        if mark.shadow is None:
            raise self.refusal(f"nothing tells which dimension of positions of shape {list(c.shape)} is the tokens'")
        of_scores = any(map(self.are_known_scores, met))
        differs = c != mark.shadow
        if not (bool(differs.any()) or (mark.is_single and (mark.is_table or is_scores or of_scores))):
            self._refuse_rows(c, shape, of_scores=is_scores or of_scores, is_known=mark.is_mask)
            return None  # of one place, a table has no other row, and a distance is the same from another
        if mark.is_single:
            return Axis((), is_scores or of_scores)
        if is_scores:
            return Axis((-1 if c.shape[-1] > 1 else -2,), is_scores=True)
        is_pair = c.ndim > 1 and c.shape[-1] == shape[-1] > 1 and c.shape[-2] in (1, shape[-2])
        # where no tokens are known, a head is as wide as it is, and scores alone are of pairs
        is_gated = is_factor and _is_gated(c, met)
        is_pair &= c.shape[-1] in self._numbers.lengths if self._numbers.lengths else of_scores or is_gated
        # rows of a batch, in which some may differ and others not, as where they are padded
        rows = -len(shape) if self.rows() > 1 else 0
        many = {dim: _spread(differs, dim) for dim in range(-c.ndim, 0) if c.shape[dim] > 1 and dim != rows}
        of_tokens = {dim: count for dim, count in many.items() if c.shape[dim] in self._numbers.lengths}
        if self._numbers.lengths == {1} and all(count == c.shape[dim] for dim, count in many.items()):
            return Axis((), is_pair or of_scores)
        if min(of_tokens.values(), default=math.inf) <= max(min(many.values(), default=0), self._numbers.moved):
            many = of_tokens  # else others are of places, and there may be as many features as tokens
        fewest = min(many.values(), default=0)
        found = [dim for dim, count in many.items() if count == fewest < c.shape[dim]]
        # a mask that was added to biases of pairs hides some of both dimensions' places, of one maybe more
        in_both = is_pair and mark.is_pair
        in_both |= is_pair and all(self._numbers.moved < many.get(dim, 0) for dim in (-2, -1))
        if len(found) == 1 and not in_both:
            is_kept = mark.is_table and found == [-1] and not of_scores
            # frequencies are of a range, too: where no tokens are known they may be what differs the least
            is_of_features = not self._numbers.lengths and found == [-1] and fewest > self._numbers.moved
            if is_of_features and not of_scores and c.ndim > 1:
                why = f"nothing tells which dimension of positions of shape {list(c.shape)} is that of the places"
                raise self.refusal(why)
            if is_kept:  # of features, unless it is of keys
                if len(shape) < 3 or shape[-2] not in self._numbers.lengths:
                    return None
                raise self.refusal(f"nothing tells whether a table of shape {list(c.shape)} is of keys or of features")
            return Axis((found[0],), (is_pair or of_scores) and found[0] == -1)
        if is_pair and (of_scores or is_gated):  # both dimensions differ alike: queries and keys
            return Axis((-1,), is_scores=True)
        raise self.refusal(f"nothing tells which dimension of positions of shape {list(c.shape)} is the tokens'")

    def joins_features(self, call: Call, x: Tensor) -> bool:
        """Whether a call puts tensors beside each other along their features, one of which is ``x``."""
        dim = {"hstack": 1, "dstack": 2}.get(call.name, arguments(call.args, call.kwargs, "tensors", "dim")[1])
        dim = call.kwargs.get("axis", dim)  # which torch knows, too
        if call.name not in JOINING or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
            return False
        places = self._dims_of_places(x) if self._is_of_image_alone(x) else range(-x.ndim, -1)
        return 0 != dim != -x.ndim and (dim if dim < 0 else dim - x.ndim) not in places

    def _is_of_image_alone(self, x: Tensor) -> bool:
        """Whether what a model of images has computed is no text beside the image, and no stream of both."""
        of_tokens = [each for each in self._run.sources if each.ids is not None]
        return self.is_of_image() and (self._run.replaying or not self.of_which([x], of_tokens))

    def axis_of_rows(self, c: Tensor, x: Tensor, *, is_joined: bool = False) -> Axis | None:
        """The same of what is added to the rows or the map of an image, or joined to their features, and has a row of
        its own for each place.

        Raises:
            MethodError: what is joined is joined to what may be heads.
        """
        if not self.is_of_image() or self.are_known_scores(x) or (self._made.get(x) == MIXED and x.ndim > 3):
            return None
        if self._numbers.mark(c) is not None and not is_joined:
            return None
        if self._numbers.is_of_input(c):
            return None
        if x.ndim not in (3, 4) or len(x) != self.rows() or CONSTANT in vars(x):
            return None
        dims = self._dims_of_places(x)
        if (not is_joined and c.shape[1 - x.ndim :] != x.shape[1:]) or not c.is_floating_point():
            return None
        if math.prod(x.shape[dim] for dim in dims) == 1 or (is_joined and not any(_has_rows(c, dim) for dim in dims)):
            return None
        if not self._is_of_image_alone(x):
            return None
        if is_joined and x.ndim == 4 and not self.is_map(x):
            raise self.refusal(f"nothing tells whether what is joined, of shape {list(c.shape)}, is of the places")
        return Axis(dims)

    def _dims_of_places(self, x: Tensor) -> tuple[int, ...]:
        """Which dimensions of an image's rows or map are those of its places."""
        is_first = self._label(x) == FIRST
        if x.ndim == 4 and not self.is_map(x):  # nobody saw where its channels are
            is_first = x.shape[-3] != x.shape[-2] == x.shape[-1]
        return tuple(range(2 - x.ndim, 0) if is_first else range(1 - x.ndim, -1))

    def _axis_of_table(
        self, c: Tensor, met: Sequence[Any], shape: Sequence[int], *, is_scores: bool, is_factor: bool
    ) -> Axis | None:
        """The same of what was not computed from places: a table of the model with a row for each."""
        of_scores = is_scores or any(map(self.are_known_scores, met))
        if c.ndim and not self.is_of_model(c) and not self._numbers.is_given(c):
            self._refuse_rows(c, shape, of_scores=of_scores)
            return None
        if c.ndim < 2 or (max(c.shape[:-1]) == 1 and not of_scores):  # nearly always
            return None
        if not of_scores:
            self._refuse_of_map(c, met)
        is_for_all = c.ndim == len(shape) and self.is_of_image() and len(c) == self.rows() and bool((c == c[:1]).all())
        wide = [dim for dim in range(is_for_all - c.ndim, -1) if c.shape[dim] > 1]  # but for rows that are all alike
        known = [dim for dim in wide if c.shape[dim] in self._numbers.lengths and dim > -len(shape)]
        is_whole = len(shape) == 3 and wide == [-2] and c.shape[-2:] == tuple(shape[-2:])
        is_of_input = is_whole and any(each.ids is None for each in self._run.sources)
        is_square = c.shape[-2] == c.shape[-1] or (of_scores and not self._numbers.lengths)  # or of fewer queries
        is_pair = (len(shape) > 3 or of_scores) and c.shape[-2:] == tuple(shape[-2:]) and is_square
        is_self = shape[-1] in (self._numbers.lengths or shape[-2:-1])
        is_of_keys = is_scores or (c.shape[-2] == 1 and is_self and self._are_of_keys(c, met, shape))
        is_pair |= is_of_keys
        if is_pair and not of_scores and not self._numbers.lengths and self._is_table(c, -2):
            why = (
                f"nothing tells whether a table of shape {list(c.shape)} is for pairs of places, or of as many features"
            )
            raise self.refusal(why)
        if is_pair:
            dim = -1 if c.shape[-1] in (self._numbers.lengths or c.shape) else None
            if dim is None and not is_of_keys and self._is_of_blocks(c):
                raise self.refusal(f"a table of shape {list(c.shape)} has places of a block, and not of all tokens")
        else:
            is_last = any(self._label(each) == FIRST for each in met if is_tensor(each))
            dim = known[0] if len(known) == 1 else (-1 if is_last else -2) if is_of_input else None
        whole = whole_of(c)
        is_whole_table = is_pair and whole.numel() == c.numel()  # for pairs that were one dimension
        if dim is None or not (c.shape[dim] in whole.shape or is_whole_table) or not self._is_table(c, dim):
            return None
        first = 0 if any(map(self.is_turned, self._run.sources)) else 1  # in which the tokens may be, too
        others = [each for each in range(first - len(shape), 0) if each != dim and shape[each] == c.shape[dim]]
        is_unclear = any(each < -c.ndim or c.shape[each] == 1 for each in others)
        is_unclear &= not is_of_keys
        # of as many tokens as a head is wide, unless it is for pairs of these
        is_unclear |= is_pair and not of_scores and c.shape[-1] in self._numbers.lengths
        # of a text that was cut into blocks, one of which is all of it
        is_unclear |= not is_pair and not is_of_input and 1 in shape[1 : dim + len(shape)] and c.ndim < len(shape)
        if is_unclear or (not is_pair and is_of_input and c.shape[-1] == c.shape[-2]):
            raise self.refusal(f"nothing tells which dimension of a table of shape {list(c.shape)} is the tokens'")
        return Axis((dim,), is_pair)

    def _refuse_of_map(self, c: Tensor, met: Sequence[Any]) -> None:
        """Refuse a table of a map's places that is multiplied with it, or added for all of its channels alike: of a
        square it has the shape of biases of pairs. So is one with a row for each of the colours of patches.

        Raises:
            MethodError: it is one.
        """
        colours = {each.value.shape[1] for each in self._run.sources if each.ids is None and each.value.ndim == 4}
        for x in met:
            is_of_patches = is_tensor(x) and x.ndim == 3 and len(x) != self.rows() and c.shape[-2:] == x.shape[1:]
            if is_of_patches and c.shape[-2] <= PIXEL and c.shape[-2] in colours and self._is_table(c, -2):
                why = f"nothing tells whether a table of shape {list(c.shape)} is of places or of an image's colours"
                raise self.refusal(why)
            if is_tensor(x) and x.ndim == 4 and self.is_map(x):
                dims = [dim for dim in self._dims_of_places(x) if dim >= -c.ndim and c.shape[dim] > 1]
                if len(dims) > 1 and any(self._is_table(c, dim) for dim in dims):
                    raise self.refusal(
                        f"nothing tells whether a table of shape {list(c.shape)} is of the image's places"
                    )

    def refuse_left(self, c: Tensor, met: Sequence[Any], shape: Sequence[int], *, is_added: bool = False) -> None:
        """Refuse a constant by which places may be told, and that nothing has taken for positions.

        Of a text, a table of the model with a row for each token, or one that was cut to as many places as what it
        meets has of the text: other tokens beside it, or blocks of it; or that has a row for other tokens, too. Of an
        image, whatever differs along another dimension than that of the channels, or of the heads if it is learned, is
        no mask and was not made of the input.

        Args:
            c: the constant.
            met: what it meets.
            shape: of what it makes with what depends on the input.
            is_added: whether it is added to that.

        Raises:
            MethodError: it is such a constant.
        """
        mark = self._numbers.mark(c)
        if not self._is_everywhere or not self._run.is_in_module() or (mark is not None and not mark.is_table):
            return
        is_model = self.is_of_model(c)
        if self._numbers.is_of_input(c) or (self._numbers.is_given(c) and not is_model):
            return
        dims, is_of_keys = set(range(-c.ndim, 0)), self._are_of_keys(c, met, shape)
        labels = {self._label(each) for each in met if is_tensor(each)}
        if lengths := self._numbers.lengths:
            last = 0 if is_of_keys else -1
            dims = {dim for dim in dims if dim < last and is_model and 1 < c.shape[dim] in lengths}
        elif self.is_of_image() and not is_of_keys:
            dims.discard(1 - len(shape) if FIRST in labels else -1)
        is_of_heads = HEADS in labels or c.shape[-1:] == (1,)
        is_of_heads &= not lengths and self._is_learned(c) and c.shape[-2:-1] == (1,)
        if len(shape) > 3 and (is_of_heads or labels & {SCORES, WEIGHTS}):
            dims.discard(-3)
        if any(_has_rows(c, dim) for dim in dims) or (
            is_model and self._differs_by_place(c, met, shape, is_added=is_added)
        ):
            raise self.refusal(f"nothing tells whether what differs by place, of shape {list(c.shape)}, is positions")

    def _differs_by_place(self, c: Tensor, met: Sequence[Any], shape: Sequence[int], *, is_added: bool) -> bool:
        """Whether a table differs along a dimension that is of a text's places in what it meets, and has as many as
        there are tokens, was cut to as many, or is added to more, which are the text's and others."""
        leaves = {id(source.value) for source in self._run.sources if source.ids is not None}
        if not leaves or self._run.replaying or c.ndim < 2:
            return False
        lengths = self._numbers.lengths
        most = max(lengths, default=0) if is_added and storage_of(c) in self._memory() else math.inf
        for dim in range(-min(c.ndim, len(shape)), 0):
            size = c.shape[dim]
            if size == shape[dim] > 1 and (size in lengths or size > most or _is_cut(c, dim)):
                of = [each for each in met if any_carries(each) and each.shape[dim:][:1] == (shape[dim],)]
                if any(has_places_of(each, dim, leaves) for each in of) and _has_rows(c, dim):
                    return True
        return False

    def heads(self, value: Tensor, shape: Sequence[int], rows: int, axis: Axis) -> int | None:
        """Which dimension of what positions make is that of the heads: see :class:`Sink`.

        Raises:
            MethodError: nothing tells.
        """
        first = -len(shape)
        if axis.is_scores:
            found = [-3] if first < -3 else []
        elif first == -3 or len(axis.dims) > 1:  # what else there is are features, or a text's row behind its tokens
            found = [-2] if axis.dims == (-3,) == (first,) and shape[-2] > 1 else []
        else:
            found = [dim for dim in range(first + 1, -1) if dim not in axis.dims]
        if not axis.dims:  # there is one place
            found = [dim for dim in found if shape[dim] > 1] or found[:1]
        if len(found) > 1:  # heads share their angles, which differ along the other dimensions
            found = [dim for dim in found if dim < -value.ndim or value.shape[dim] == 1]
        if len(found) > 1:
            why = f"nothing tells which of the dimensions {list(shape)} is the heads'"
            raise self.refusal(why, "leave by_head out, or ")
        if found:
            return found[0]
        return 0 if len(shape) == 3 and first not in axis.dims and shape[0] > rows and not self.is_of_image() else None

    def _hides(self, c: Tensor, shape: Sequence[int], *, is_factor: bool) -> bool:
        """Whether what was made of comparisons alone is a mask: what it does not admit is taken out of a softmax, or
        multiplied with 0, and what it does is all the same. A bonus for the first token is none."""
        if not c.is_floating_point():
            return True
        if not is_factor:
            most = c.amax()
            return bool(((c == most) | (c < most - HIDDEN)).all())
        dims = [dim for dim in range(-c.ndim, 0) if dim != -len(shape) and c.shape[dim] in self._numbers.lengths]
        most = c.abs()
        return all(bool(((c == 0) | (most == most.amax(dim, keepdim=True))).all()) for dim in dims)

    def refuse_choice(self, call: Call) -> None:
        """Refuse a look-up by whole numbers that are another for each token, and nobody's.

        Raises:
            MethodError: it is one.
        """
        if call.name == "embedding" and self._run.is_in_module():
            index = arguments(call.args, call.kwargs, "input")[0]
            if self._numbers.is_choice_of_nobody(index):
                why = "nothing tells whether whole numbers by which another row is looked up for each token are places"
                raise self.refusal(why, "let the model count places by torch.arange, or ")

    def _refuse_rows(self, c: Tensor, shape: Sequence[int], *, of_scores: bool, is_known: bool = False) -> None:
        """Refuse a constant with another row for each token, of which nothing tells whether they are positions: nobody
        saw what it was made of, or it is the same at the one other place that was tried, as what comes again is.

        Raises:
            MethodError: it is such a constant, no mask, and met in the model, not in what is made of its outputs.
        """
        rows = -len(shape) if self.rows() > 1 else 0
        dims = range(-c.ndim, 0 if of_scores else -1)
        of_tokens = [dim for dim in dims if dim != rows and 1 < c.shape[dim] == shape[dim] in self._numbers.lengths]
        is_known = is_known and any(bool((c != c.narrow(dim, 0, 1)).any()) for dim in of_tokens)
        if (is_known or any(_has_rows(c, dim) for dim in of_tokens)) and self._run.is_in_module():
            why = f"nothing tells whether what has another row for each token, of shape {list(c.shape)}, is positions"
            raise self.refusal(why, "let the model keep it as a buffer and cut it to the text, or ")

    def _may_be_one_place(self, shape: Sequence[int]) -> bool:
        """Whether what has this shape may be of one token: a dimension of it beside the rows of a batch is one."""
        ids = next((each.ids for each in self._run.sources if each.ids is not None), None)
        is_rows_first = ids is not None and ids.ndim > 1 and self.rows() == 1
        return 1 in self._numbers.lengths and 1 in (shape[1:] if is_rows_first else shape)

    def _is_of_blocks(self, c: Tensor) -> bool:
        """Whether what the model has kept for pairs of places is of fewer places than any text has tokens, as linear
        attention in blocks multiplies its products with."""
        return c.ndim > 3 and c.shape[-1] < min(self._numbers.lengths) and self._is_table(c, -1)

    def _is_table(self, c: Tensor, dim: int) -> bool:
        """Whether a constant is numbers of the model itself that differ along a dimension, and no mask."""
        return self.is_of_model(c) and _has_rows(c, dim)

    def is_of_matrices(self, c: Tensor, x: Tensor) -> bool:
        """Whether a constant that the model has kept is a matrix for each place, as rotations are; weights of so many
        experts are parameters. Matrices that are not square, and meet ``x`` whose rows are the tokens, are those of
        as many heads, as DeBERTa's tables of distances. A vector, and one matrix, has none for each place."""
        if c.ndim < 3:
            return False
        if c.shape[-1] != c.shape[-2] and x.ndim == c.ndim == 3 and x.shape[-2] in self._numbers.lengths:
            return False
        places = [dim for dim in range(-c.ndim, -2) if c.shape[dim] > 1 and c.shape[dim] in self._numbers.lengths]
        if not places or self._is_learned(c):
            return False
        return any(self._is_table(c, dim) for dim in places)

    def _is_learned(self, c: Tensor) -> bool:
        """Whether a constant is a parameter of the model, or a view of one."""
        return storage_of(c) in set(map(storage_of, self._model.parameters()))

    def _memory(self) -> frozenset[int]:
        """Where the tensors of the model are."""
        if self._tables is None:
            own = [each for module in self._model.modules() for each in _kept_in(vars(module))]
            every = (*self._model.parameters(), *self._model.buffers(), *own)
            self._tables = frozenset(map(storage_of, every)) - {0}
        return self._tables

    def refusal(self, why: str, mend: str = "") -> MethodError:
        rule = rule_name(self._run.recipe.position)
        return MethodError(
            f"{self._run.where()}: {why}, so the rule position={rule} cannot be applied; {mend}"
            "use attnlrp, for which positions are constants"
        )


def is_constant(value: Any) -> bool:
    """Whether a tensor does not depend on the input; a normaliser that a rule has held constant is no position."""
    if not isinstance(value, Tensor) or hasattr(value, EXPONENTS):
        return False
    return isinstance(value, Parameter) or not value.requires_grad


def _may_be_of_places(c: Tensor, x: Tensor) -> bool:
    """Whether a constant differs along a dimension of ``x`` that may be that of its places, or joins such numbers."""
    if any_carries(c) or c.ndim < 2:
        return False
    return any(_has_rows(c, dim) for dim in range(max(2 - x.ndim, -c.ndim), 0))


def _moved(made: set[Any], call: Call, x: Tensor, out: Tensor) -> set[Any]:
    """Where the channels of a map ``x`` are after a call."""
    is_moved = any(word in call.name for word in (*SHAPES, "einsum", "__get__")) or out.ndim != x.ndim
    if made <= {UNSEEN, UNCLEAR}:
        return set() if is_moved else made
    if made == {FIRST} and 3 in (out.ndim, x.ndim):  # one whose places are one dimension, as of a sound
        is_kept = call.name in KEEPING_FIRST and out.shape[:2] == x.shape[:2]
        return made if out.ndim in (3, 4) and (is_kept or not is_moved) else set()
    if call.name == "permute" and made == {FIRST}:
        dims = call.args[1:] or (call.kwargs["dims"],)
        dims = tuple(dims[0]) if isinstance(dims[0], (tuple, list)) else dims
        return {LAST} if tuple(dim % 4 for dim in dims) == (0, 2, 3, 1) else set()
    return made if out.ndim == 4 and not any(word in call.name for word in SHAPES) else set()


def _is_split(x: Any, out: Tensor) -> bool:
    """Whether a call has split the last dimension of a tensor in two."""
    return (
        isinstance(x, Tensor)
        and x.ndim > 0
        and out.ndim == x.ndim + 1
        and out.shape[:-2] == x.shape[:-1]
        and out.shape[-2] > 1
    )


def _has_rows(c: Tensor, dim: int) -> bool:
    """Whether a constant is numbers that differ along a dimension, and no mask."""
    if not (c.is_floating_point() or c.is_complex()) or not c.numel():
        return False
    is_mask = not c.is_complex() and bool(((c == c.min()) | (c == c.max())).all())
    return not is_mask and bool((c != c.narrow(dim, 0, 1)).any())


def _is_gated(c: Tensor, met: Sequence[Any]) -> bool:
    """Whether what is multiplied has one number for all of the last dimension of a constant, which has others for each
    head, as WavLM's gates of biases have: no angles do."""
    is_one = all(each.ndim > 2 and each.shape[-1] == 1 for each in met if is_tensor(each))
    return is_one and c.ndim > 2 and bool((c != c.narrow(-3, 0, 1)).any())


def _is_cut(c: Tensor, dim: int) -> bool:
    """Whether a tensor is a part of another, of which it has fewer along a dimension."""
    whole = whole_of(c)
    return any(
        step == c.stride(dim) > 0 and size > c.shape[dim]
        for step, size in zip(whole.stride(), whole.shape, strict=True)
    )


def _spread(differs: Tensor, dim: int) -> int:
    """At how many indices of a dimension anything differs."""
    others = [other for other in range(-differs.ndim, 0) if other != dim]
    return int((differs.any(others) if others else differs).sum())


def _kept_in(value: Any, depth: int = 4) -> list[Tensor]:
    """The tensors in a module's attributes, and in dictionaries and lists there, as caches are."""
    if isinstance(value, Tensor):
        return [value]
    if depth and isinstance(value, dict):
        value = list(value.values())
    if not depth or not isinstance(value, (tuple, list)):
        return []
    return [each for item in value for each in _kept_in(item, depth - 1)]
