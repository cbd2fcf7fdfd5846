"""Input and biases together, at each patch: FullGrad's aggregation, under LibraGrad's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lrpx import recipes, tasks
from lrpx.engine import Tap
from lrpx.engine._tensors import any_carries, arguments
from lrpx.errors import MethodError
from lrpx.methods._attention_maps import of_places
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import IMAGES, refuse_ledger, refuse_no_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine._taps import Call
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.tasks import Task

JOINS = ("cat", "concat", "concatenate")
"""How torch calls what joins tokens."""
CHOOSES = ("__getitem__", "index_select", "gather", "take_along_dim")
"""How it calls what may take some of them, not as a view."""


@register
@dataclass(frozen=True)
class FullGrad(Method):
    """``R_t = Σ_{pixels of t} x ⊙ ∂x + Σ_l Σ_d b^l_d ∂y^l_td``: at each token of an image what its pixels have, and
    what every constant has that is added to it: biases, and positions (Srinivas & Fleuret 2019, Eq. 3, with its sign
    kept), with the gradients of LibraGrad (Mehri et al. 2025).

    The bias of the patches belongs to the patches. What learned tokens have is the part ``"class token"``. A constant
    that is added to something else than the tokens, as in the head, is nobody's.

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
            MethodError: a ledger is asked for, or the model's tokens are not its patches.
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
    """

    def __init__(self, rows: int, tokens: int, grid: tuple[int, int], own: slice) -> None:
        self._tokens, self._map, self._own = (rows, tokens), grid, own
        self._sums = torch.zeros(rows, tokens, dtype=torch.float64)
        self._first = {own.stop - own.start: 0, tokens: own.start}  # before the patches, of so many tokens
        self._unclear: set[int] = set()  # of so many tokens
        self._looked_up: list[Any] = []

    def taken(self) -> Tensor:
        """``[B, T]`` of the last backward pass."""
        found, self._sums = self._sums, torch.zeros_like(self._sums)
        return found

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """One call of a torch function."""
        out = proceed(call.args, call.kwargs)
        self._know_joined(call, out)
        self._know_taken(call, out)
        if call.name == "embedding":  # of positions, for there are no other tokens
            self._looked_up.append(out)
            return out
        if isinstance(out, Tensor) and out.requires_grad and torch.is_grad_enabled():
            constant = self._constant(call)
            if constant is not None and self._fits(out):
                value = constant.detach()
                out.register_hook(lambda gradient: self._add(value, gradient))  # type: ignore[no-untyped-call]
        return out

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
        if gradient.ndim == 4:
            self._sums[:, self._own] += (constant.double() * gradient.double()).sum(1).flatten(1).cpu()
        else:
            found = (constant.double() * gradient.double()).sum(-1).cpu()
            first = self._first[found.shape[1]]
            end = first + self._own.stop - self._own.start
            after = self._sums.shape[1] - (found.shape[1] - end)
            self._sums[:, :first] += found[:, :first]
            self._sums[:, self._own] += found[:, first:end]
            self._sums[:, after:] += found[:, end:]

    def _constant(self, call: Call) -> Tensor | None:
        """What a call adds to what depends on the input, so that it can be multiplied with the result."""
        name, args = call.name, call.args
        if name == "linear":
            return arguments(args, call.kwargs, "input", "weight", "bias")[2]  # type: ignore[no-any-return]
        if name == "layer_norm":
            return arguments(args, call.kwargs, "input", "normalized_shape", "weight", "bias", "eps")[3]  # type: ignore[no-any-return]
        if name == "conv2d":
            bias = arguments(args[:3], call.kwargs, "input", "weight", "bias")[2]
            return None if bias is None else bias[:, None, None]
        if name in ("add", "__add__", "__radd__", "add_", "__iadd__") and len(args) == 2:
            constants = [x for x in args if isinstance(x, Tensor) and self._is_constant(x)]
            return constants[0] if constants else None
        if name in JOINS:
            parts, axis = args[0], (*args[1:], call.kwargs.get("dim", 0))[0]
            if axis in (1, -2) and all(x.ndim == 3 for x in parts):
                return torch.cat([x if self._is_constant(x) else torch.zeros_like(x) for x in parts], 1)
        return None

    def _is_constant(self, x: Tensor) -> bool:
        return not any_carries(x) or any(x is each for each in self._looked_up)
