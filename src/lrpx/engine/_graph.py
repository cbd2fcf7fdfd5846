"""The graph of a run: which of its nodes the engine has made, and one walk of it before the backward pass.

Autograd numbers the nodes of a thread as it makes them. What a handler of the table makes is numbered between the call
of the torch function and its return; what is numbered in between was made unseen, by code that no rule reaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction

from lrpx import rules
from lrpx.engine._nodes import LINEAR, NOTHING, kind
from lrpx.engine._tensors import KNOWN
from lrpx.errors import UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from lrpx.recipes import Recipe

LEAF = "torch::autograd::AccumulateGrad"

LEAVES = "lrpx found none of these leaves"
"""The key, in what a node of the graph carries along, of leaves that it does not come from."""

AS_WRITTEN = 'run what torch.compile has compiled as it is written, inside torch.compiler.set_stance("force_eager")'
"""The mend where compiled code hides what it does."""

OUTSIDE = ""
"""Where a node was made that no forward pass of the model has made."""


newest: Callable[[], int] = _get_sequence_nr
"""The number that the next node of this thread gets."""


class Span(NamedTuple):
    """Nodes numbered from ``begin`` to before ``end``, and what is said of them."""

    begin: int
    end: int
    said: str


class Nodes:
    """The numbers of the nodes that a run has made, in its thread.

    Attributes:
        first: the first number.
        last: the number after that of the last node that a handler has made.
        unseen: what was made in between by no handler, and in which module.
        refused: what the torch functions have made that a strict recipe refuses, and its message.
        waiting: the message about the torch function that is being called, if it is refused.
        is_sure: whether all that was given to the torch functions was of a known kind and in this thread, and all that
            was made of it was made by rules of ours.
    """

    __slots__ = ("_begun_at", "first", "has_begun", "is_sure", "last", "refused", "unseen", "waiting")

    def __init__(self) -> None:
        self.first = self.last = newest()
        self.has_begun = False
        self.unseen: list[Span] = []
        self.refused: list[Span] = []
        self.waiting = ""
        self.is_sure = True
        self._begun_at = 0

    def begin(self) -> None:
        """The forward pass of the model begins."""
        if not self.has_begun:
            self.has_begun, self.first, self.last = True, newest(), newest()
        self.skip(OUTSIDE)

    def skip(self, where: str) -> None:
        """What was made since the last node was made unseen."""
        now = newest()
        if now != self.last:
            self.unseen.append(Span(self.last, now, where))
            self.last = now

    def refuse(self, message: str) -> None:
        """The torch function that is being called is refused, if the explained value depends on it."""
        self.waiting, self._begun_at = message, self.last

    def close(self) -> None:
        """The torch function that is refused has returned."""
        self.last = newest()
        self.refused.append(Span(self._begun_at, self.last, self.waiting))
        self.waiting = ""

    def knows(self, values: Any) -> bool:
        """Whether each of these arguments, also in lists, is of a known kind, and was made by the run if it requires a
        gradient and is no parameter."""
        if KNOWN.issuperset(map(type, values)):
            return True
        first, last = self.first, self.last
        for value in values:
            kind = type(value)
            if kind is Tensor:
                if value.requires_grad and ((node := value.grad_fn) is None or not first <= node._sequence_nr() < last):
                    return False
            elif kind not in KNOWN and not ((kind is tuple or kind is list) and self.knows(value)):
                return False
        return True

    def is_own(self, node: Any) -> bool:
        """Whether a node was made by the run: in the model, or by a handler of what is computed from its outputs."""
        number = node._sequence_nr()
        return self.first <= number < self.last and _find(self.unseen, number) != OUTSIDE


def _find(spans: list[Span], number: int) -> str | None:
    return next((span.said for span in spans if span.begin <= number < span.end), None)


def descends(node: Any, leaves: Collection[int]) -> bool:
    """Whether a node that seems older than the run does come from one of the leaves, by their ``id``: another thread
    has made it, which numbers its nodes by itself."""
    if node is None or node.metadata.get(LEAVES) == leaves:
        return False
    seen, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        if each.name() == LEAF and id(each.variable) in leaves:
            return True
        for child, _ in each.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    node.metadata[LEAVES] = leaves
    return False


# ------------------------------------------------------------------------------- the walk

MET = "lrpx met this function"
"""The key, in what a node of the graph carries along, of those that an earlier pass has dealt with."""

ELEMENT_WISE = {"SqrtBoundDerivative": torch.sqrt}
"""Custom autograd functions of one saved input that are element-wise, and what they compute."""


def _function_of(node: Any) -> type:
    """The custom autograd function whose node of the graph this is."""
    function: type = getattr(node, "_forward_cls", type(node))
    return function


def made_by(value: Any) -> str | None:
    """The name of the custom autograd function of :data:`ELEMENT_WISE` that made a tensor."""
    node = value.grad_fn if isinstance(value, Tensor) else None
    if not isinstance(node, BackwardCFunction):
        return None
    name = _function_of(node).__name__
    return name if name in ELEMENT_WISE else None


PIECEWISE = frozenset(("Relu", "Abs", "Error"))
"""Nodes that are piecewise linear through zero, or have no gradient: their plain gradient is right, too."""

LINEAR_NODES = {"Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Dot": (0, 1), "Addmm": (1, 2), "Addmv": (1, 2),
                "Baddbmm": (1, 2), "Convolution": (0, 1)}  # fmt: skip
"""Nodes of a product, and where its two factors are: those of a linear layer, if one is a constant."""


class Walk:
    """One walk of the graph of an explained value.

    Args:
        recipe: the recipe of the run.
        nodes: what the run has made.
        leaves: by ``id``, the leaves that relevance may end at.
        limit: what is numbered from here on is the target's own.
    """

    def __init__(self, recipe: Recipe, nodes: Nodes, leaves: Collection[int], limit: int) -> None:
        self.recipe, self.nodes, self.leaves, self.limit = recipe, nodes, leaves, limit
        self._refused: list[tuple[int, str]] = []

    def unseen(self, value: Tensor) -> Iterator[tuple[str, str]]:
        """What no rule has reached and would be wrong without one, and where; each once, however often the graph is
        passed.

        Raises:
            UnknownOperationError: there is one, and the recipe is strict.
        """
        nodes, limit = self.nodes, self.limit
        first, last, is_odd = nodes.first, min(nodes.last, limit), bool(nodes.unseen or nodes.refused)
        # of what the torch functions have made nothing need be asked where they have made all, of what was asked then
        ends = first if nodes.is_sure and not is_odd else last
        rule_modules: frozenset[str] | None = None
        has_identity = self.recipe.activation is rules.identity and not self.recipe.overrides
        seen = {value.grad_fn}
        waiting: list[tuple[Any, int]] = [(value.grad_fn, 2**64)]
        while waiting:
            node, above = waiting.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if ends <= number < last:
                continue
            if isinstance(node, BackwardCFunction):
                function = _function_of(node)
                element_wise = ELEMENT_WISE.get(function.__name__) if has_identity else None
                rule_modules = self.recipe.rule_modules() if rule_modules is None else rule_modules
                unknown = element_wise or function.__module__ not in rule_modules
                if unknown and number < limit and MET not in node.metadata:
                    if element_wise is not None:
                        _give_identity_rule(node, element_wise)
                    else:
                        where = _find(nodes.unseen, number)
                        is_weight = not descends(node, self.leaves)
                        self._refused.append((number, _unseen_function(function, where, is_weight)))
                        yield function.__name__, where or "a custom autograd function"
                    node.metadata[MET] = True
            elif is_odd or not first <= number < last or number > above:
                yield from self._judged(node, number, above)
                if is_odd and NOTHING in node.metadata:
                    continue
            for child, _ in node.next_functions:
                if child not in seen:
                    seen.add(child)
                    waiting.append((child, number))
        if self._refused and self.recipe.strict:
            raise UnknownOperationError(min(self._refused)[1])  # the first that the model has called

    def _judged(self, node: Any, number: int, above: int) -> Iterator[tuple[str, str]]:
        """What is to be said of a node that the engine may not have made, or that is refused."""
        nodes = self.nodes
        if node.name() == LEAF:
            if above < self.limit and id(node.variable) not in self.leaves:
                where = _find(nodes.unseen, above)
                said = _unseen_node("a sum or product with a weight", where) if where else _foreign(node.variable)
                self._refused.append((above, said))
            return
        if number >= self.limit:
            return
        message = _find(nodes.refused, number)
        if message is not None:  # counted when it was called
            self._refused.append((number, message))
            return
        is_of_thread = number <= above
        where = OUTSIDE if number >= nodes.last else _find(nodes.unseen, number)
        if nodes.first <= number and is_of_thread and where is None:
            return
        name = kind(node)
        if self._is_plain(name, node):
            return
        if is_of_thread and where == OUTSIDE:
            said = (
                f"the explained value was computed by {name} outside of the block, where no rule holds; compute it "
                "inside, or tell explain() the model's outputs that it was computed from, outputs=logits, to take its "
                "plain gradient from there"
            )
        else:
            where = where or "the model"
            said = _unseen_node(name, where)
        self._refused.append((number, said))
        if MET not in node.metadata:
            node.metadata[MET] = True
            yield name, where or "outside of the model"

    def _is_plain(self, name: str, node: Any) -> bool:
        if name in LINEAR or name in PIECEWISE:
            return True
        given = [child is not None for child, _ in node.next_functions]
        if name == "Mul":
            return given != [True, True]
        if name == "Div":
            return not any(given[1:])
        if name in LINEAR_NODES and not self.recipe.has_rules_for_linear():
            one, other = LINEAR_NODES[name]
            return not (given[one] and given[other])
        return False


def _unseen_function(function: type, where: str | None, is_weight: bool) -> str:
    if function.__module__ == "torch.utils.checkpoint":
        return (
            "the model's gradient checkpointing hides its layers from every rule; enable it with use_reentrant=False, "
            "or use lrpx.propagate(model, recipe, recompute=True)"
        )
    if function.__name__.startswith("BackwardHook") and function.__module__.startswith("torch."):
        return (
            f"{where or 'the model'} has a full backward hook, through which no rule can be followed; remove it first, "
            "and ask for gradients inside with lrpx.propagate(model, recipe, observe=paths)"
        )
    called = f"{function.__name__} of {function.__module__}"
    if is_weight:
        return (
            f"{where or 'the model'} calls {called}, a custom autograd function that makes a weight, as if that "
            "depended on the input; freeze what it is made of, model.requires_grad_(False), or put the weight itself "
            "into the model"
        )
    mend = "use"
    if "flash" in called.lower():
        mend = 'for flash_attention_2 load the model with attn_implementation="sdpa", else use'
    elif function.__module__.startswith("torch._functorch"):
        mend = f"{AS_WRITTEN}, else use"
    return (
        f"{where or 'the model'} calls {called}, a custom autograd function that no rule can reach; {mend} a recipe "
        "with strict=False to take its plain gradient"
    )


def _unseen_node(name: str, where: str) -> str:
    return (
        f"{where} computes {name} where no rule sees it, as code of torch.jit, of an extension or of another thread "
        "does; call it as plain PyTorch (as code of torch.jit is where PYTORCH_JIT=0 was set before it was imported), "
        "or use a recipe with strict=False to take its plain gradient"
    )


def _foreign(leaf: Tensor) -> str:
    return (
        f"the explained value depends on a tensor of shape {list(leaf.shape)} that requires a gradient and is no input "
        "of the model; detach it, or make it a torch.nn.Parameter that the model uses"
    )


def _give_identity_rule(node: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Let a node of the graph that is an element-wise function of its one saved tensor hand its relevance on."""
    (x,) = node.saved_tensors
    share = rules.ratio(function(x.detach()), x.detach())
    node.register_hook(lambda _, arrived: (arrived[0] * share,))
