"""Input and biases together, at each patch: FullGrad's aggregation, under LibraGrad's rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lrpx import recipes, tasks
from lrpx.engine import Tap
from lrpx.engine._taps import Call
from lrpx.engine._tensors import any_carries, arguments, is_in_place
from lrpx.errors import MethodError
from lrpx.methods._attention_maps import of_places
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import IMAGES, refuse_ledger, refuse_no_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.tasks import Task

JOINS = ("cat", "concat", "concatenate")
"""How torch calls what joins tokens."""
STACKS = ("hstack", "vstack", "dstack", "stack", "column_stack")
SHIFTS = frozenset(
    "add __add__ __radd__ sub subtract __sub__ rsub where masked_fill lerp addcmul addcdiv addmm baddbmm pad "
    "batch_norm group_norm instance_norm".split()
) | {*JOINS, *STACKS}
"""Functions of which a part is the constants that they are given; in place too. (``1 - x`` calls ``rsub``.)"""
LAYERS = {
    "linear": ("input", "weight", "bias"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "bilinear": ("input1", "input2", "weight", "bias"),
}
"""Functions of which the constant is the bias, along the last dimension: their arguments."""
CONVOLUTIONS = {f"conv{way}{dimensions}d": dimensions for way in ("", "_transpose") for dimensions in (1, 2, 3)}
"""The same along the dimension before so many."""
WRITES = frozenset(
    "__setitem__ scatter scatter_add index_put index_copy index_add masked_scatter select_scatter slice_scatter "
    "index_fill copy".split()
)
"""Functions that write into a part of a tensor; in place too."""
CHOOSES = ("__getitem__", "index_select", "gather", "take_along_dim")
"""How it calls what may take some of them, not as a view."""


@register
@dataclass(frozen=True)
class FullGrad(Method):
    """``R_t = Σ_{pixels of t} x ⊙ ∂x + Σ_l Σ_d b^l_d ∂y^l_td``: at each token of an image what its pixels have, and
    what every constant has that is added to it: biases, and positions (Srinivas & Fleuret 2019, Eq. 3, with its sign
    kept), with the gradients of LibraGrad (Mehri et al. 2025).

    The bias of the patches belongs to the patches. What learned tokens have is the part ``"class token"``. A constant
    that is added to something else than the tokens, as in the head, to fewer of them than there are patches, or to
    scores, or that is chosen by a maximum, is nobody's.

    Args:
        name: how results call it.
        label: how tables spell it.
    """

    name: str = "libragrad-fullgrad"
    label: str = "LibraGrad (FullGrad)"

    tasks: ClassVar[frozenset[Task]] = IMAGES

    @property
    def has_ledger(self) -> bool:
        """No: what a token has here comes from many sources."""
        return False

    def describe(self) -> str:
        """What is summed, and the recipe."""
        return f"inputs and constants at each token; {recipes.LIBRAGRAD.describe()}"

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger is asked for, the model's tokens are not its patches, or nothing tells to which of
                them a constant is added.
        """
        self.check(model)
        refuse_ledger(self, ledger)
        grids = [refuse_no_places(self, model, row) for row in questions.rows]
        grid, places = grids[0]
        own = slice(places.first, places.first + len(grid))
        found = [torch.empty(0)] * len(questions)
        tap = _Constants(len(questions.rows), places.count, (grid.rows, grid.columns), own)
        with model.traced(questions, recipes.LIBRAGRAD, plain=True, taps=lambda _: [tap]) as ran:
            argument = {tasks.signal_argument(model.module, model.task)}
            for chosen in ran.explained():
                source = next(each for each in ran.trace.sources if set(each.paths) == argument)
                pixels, added = ran.trace.source_relevance(source).cpu(), tap.taken()
                for i in chosen:
                    row = questions.asked[i].row
                    found[i] = added[row].to(pixels.dtype)
                    found[i][own] += grid.summed(pixels[row]).flatten()
        parts = of_places([(each, (grid, places)) for each in found])
        return Found(ran.answers.detached(), (torch.empty(0),) * len(found), parts)


class _Constants(Tap):
    """What the constants have that are added to tokens ``[B, T, d]``, or to patches ``[B, d, rows, columns]``.

    Args:
        rows: how many images run together.
        tokens: how many a model makes of one.
        grid: rows and columns of its patches.
        own: where they are among the tokens.

    Before all learned tokens have come in there are fewer (registers come after the positions in DINOv2). How many
    stand before the patches then is known by what was joined with them. Where as many are joined or taken otherwise
    later, the number tells no more, and constants that are added then are refused.

    What a function makes of its constants alone, with zeros for what depends on the input, is what it adds.
    """

    def __init__(self, rows: int, tokens: int, grid: tuple[int, int], own: slice) -> None:
        self._tokens, self._map, self._own = (rows, tokens), grid, own
        self._sums = torch.zeros(rows, tokens, dtype=torch.float64)
        self._first = {own.stop - own.start: 0, tokens: own.start}  # before the patches, of so many tokens
        self._unclear: set[int] = set()  # of so many tokens
        self._looked_up: list[Any] = []
        self._elsewhere: list[tuple[int, ...]] = []

    def taken(self) -> Tensor:
        """``[B, T]`` of the last backward pass.

        Raises:
            MethodError: a constant was added to tokens in a shape that does not tell them apart.
        """
        if self._elsewhere:
            raise MethodError(
                f"the model adds a constant to its tokens in the shape {list(self._elsewhere[0])}, and nothing tells "
                "which of them is where, so libragrad-fullgrad would leave it out; use libragrad"
            )
        found, self._sums = self._sums, torch.zeros_like(self._sums)
        return found

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function."""
        given = self._before(call)
        out = proceed(call.args, call.kwargs)
        self._know_joined(call, out)
        self._know_taken(call, out)
        if call.name == "embedding":  # of positions, for there are no other tokens
            self._looked_up.append(out)
            return out
        if _plain_name(call) in WRITES:
            self._refuse_written(given.args, given.kwargs)
        elif isinstance(out, Tensor) and out.requires_grad and torch.is_grad_enabled():
            constant = self._constant(given, proceed)
            if constant is not None and self._fits(out):
                value = constant.detach()
                out.register_hook(lambda gradient: self._add(value, gradient))  # type: ignore[no-untyped-call]
            elif constant is not None:
                self._see_other_shape(out)
        return out

    def _before(self, call: Call) -> Call:
        """A call with a copy of the constant that it changes in place, which is none any more afterwards."""
        into = call.args[0] if call.args else None
        if not (is_in_place(call.name) and isinstance(into, Tensor) and self._is_constant(into)):
            return call
        if not torch.is_grad_enabled() or _plain_name(call) not in SHIFTS | WRITES:
            return call
        with torch._C.DisableTorchFunction():
            return Call(call.name, call.operation, (into.detach().clone(), *call.args[1:]), call.kwargs)

    def _know_joined(self, call: Call, out: Any) -> None:
        """How many learned tokens stand before the patches, when they are joined with them."""
        if call.name not in JOINS or not isinstance(out, Tensor) or out.ndim != 3:
            return
        before, patches, count = 0, self._own.stop - self._own.start, out.shape[1]
        for part in call.args[0] if call.args else call.kwargs["tensors"]:
            is_patches = part.shape[1] == patches < count and not self._is_constant(part)
            if is_patches and (count > self._tokens[1] or self._first.setdefault(count, before) != before):
                self._unclear.add(count)
            before += part.shape[1]

    def _know_taken(self, call: Call, out: Any) -> None:
        """That some of the tokens, when they are taken, are others than as many were before."""
        x = call.args[0] if call.args else None
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] not in self._first:
            return
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(each, Tensor) or each.ndim != 3 or each.shape[1] == x.shape[1]:
                continue
            is_view = each._base is not None and each.stride(1) == x.stride(1)
            if is_view and each.shape[0] == x.shape[0] and each.shape[1] in self._first:
                start = (each.storage_offset() - x.storage_offset()) // x.stride(1)
                if start + self._first[each.shape[1]] != self._first[x.shape[1]]:
                    self._unclear.add(each.shape[1])
            elif each._base is None and call.name in CHOOSES:
                self._unclear.add(each.shape[1])

    def _fits(self, out: Tensor) -> bool:
        """Whether these are the tokens or a map of the patches.

        Raises:
            MethodError: they may be some of the tokens, and nothing tells which.
        """
        if out.ndim == 4:
            return len(out) == self._tokens[0] and out.shape[2:] == self._map
        if out.ndim != 3 or len(out) != self._tokens[0]:
            return False
        count, patches = out.shape[1], self._own.stop - self._own.start
        if count in self._unclear and count >= patches:
            raise MethodError(
                f"the model adds a constant to {count} tokens that are not those of before, and nothing tells where "
                f"the {patches} patches are among them, so libragrad-fullgrad would give it to others; use libragrad"
            )
        if patches < count < self._tokens[1] and count not in self._first:
            raise MethodError(
                f"the model adds a constant to {count} of its {self._tokens[1]} tokens, and nothing tells where the "
                f"{patches} patches are among them, so libragrad-fullgrad would leave it out; use libragrad"
            )
        return count in self._first

    def _add(self, constant: Tensor, gradient: Tensor) -> None:
        # what is masked by -inf has none
        found = (constant.double() * gradient.double()).where(gradient != 0, 0.0).cpu()
        if gradient.ndim == 4:
            self._sums[:, self._own] += found.sum(1).flatten(1)
        else:
            found = found.sum(-1)
            first = self._first[found.shape[1]]
            end = first + self._own.stop - self._own.start
            after = self._sums.shape[1] - (found.shape[1] - end)
            self._sums[:, :first] += found[:, :first]
            self._sums[:, self._own] += found[:, first:end]
            self._sums[:, after:] += found[:, end:]

    def _see_other_shape(self, out: Tensor) -> None:
        """Remember a constant that was added to tokens whose places are elsewhere in the shape: rows and tokens as one,
        tokens first or last, heads apart, windows. Where the value depends on it, it is refused."""
        rows, shape = self._tokens[0], tuple(out.shape)
        is_other = len(shape) == 4 and shape[0] == rows and shape[1:3] == tuple(self._map)
        is_other |= self._are_windows(shape)
        for count in self._first:
            is_other |= len(shape) == 3 and shape[0] == rows and shape[2] == count and shape[1] > 1
            is_other |= len(shape) == 2 and shape[0] == rows * count
            is_other |= len(shape) == 3 and shape[:2] == (count, rows)
            is_other |= len(shape) == 4 and shape[0] == rows and count in shape[1:3] and shape[3] != count
        if is_other:
            out.register_hook(lambda gradient: self._elsewhere.append(shape) if gradient.any() else None)  # type: ignore[no-untyped-call]

    def _are_windows(self, shape: tuple[int, ...]) -> bool:
        """Whether this may be all patches in windows, padded perhaps, and no scores of attention."""
        patches = self._own.stop - self._own.start
        if len(shape) == 3 and shape[0] > self._tokens[0] and shape[0] % self._tokens[0] == 0:
            return shape[0] * shape[1] >= self._tokens[0] * patches and shape[1] != shape[2]
        return len(shape) > 4 and math.prod(shape[:-1]) in {self._tokens[0] * count for count in self._first}

    def _refuse_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse to write a constant beside patches, or patches into a constant.

        Raises:
            MethodError: it is no zero.
        """
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        into = given[0] if given else None
        if not torch.is_grad_enabled() or into is None or all(map(self._is_constant, given)):
            return
        if into.ndim != 3 or len(into) != self._tokens[0] or into.shape[1] not in self._first:
            return
        if any(self._is_constant(x) and bool(x.any()) for x in given):
            raise MethodError(
                f"the model writes a constant into {into.shape[1]} tokens, and nothing tells into which, so "
                "libragrad-fullgrad would leave it out; use libragrad"
            )

    def _constant(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Tensor | None:
        """What a call adds to what depends on the input, so that it can be multiplied with the result."""
        name, args = call.name, call.args
        if name in LAYERS:
            return arguments(args, call.kwargs, *LAYERS[name])[LAYERS[name].index("bias")]  # type: ignore[no-any-return]
        if name in CONVOLUTIONS:
            bias = arguments(args[:3], call.kwargs, "input", "weight", "bias")[2]
            return None if bias is None else bias.view(-1, *(1,) * CONVOLUTIONS[name])
        if _plain_name(call) not in SHIFTS:
            return None
        with torch.no_grad():  # what it makes of the constants alone
            found = proceed(self._alone(args), {key: self._alone(each) for key, each in call.kwargs.items()})
        return found if isinstance(found, Tensor) and bool(found.any()) else None

    def _alone(self, value: Any) -> Any:
        """Arguments with zeros for what depends on the input."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._alone, value))
        return torch.zeros_like(value) if isinstance(value, Tensor) and not self._is_constant(value) else value

    def _is_constant(self, x: Tensor) -> bool:
        return not any_carries(x) or any(x is each for each in self._looked_up)


def _plain_name(call: Call) -> str:
    """The name of a torch function, that of a variant in place without what tells so."""
    name = call.name
    if name.startswith("__"):
        return f"__{name[3:]}" if name.startswith("__i") else name
    return name.removesuffix("_")
