"""The seam: a mode that sees each torch function the model calls, in this thread and this block only."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lrpx import rules
from lrpx.engine import norms, operations  # noqa: F401  their handlers join the table
from lrpx.engine.handlers import HANDLERS, any_carries, constants
from lrpx.engine.linear import LINEAR, linear
from lrpx.engine.trace import Source, Trace
from lrpx.errors import UnknownOperationError
from lrpx.kinds import rule_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lrpx.engine.book import Book
    from lrpx.engine.heads import Heads
    from lrpx.recipes import Recipe
    from lrpx.rules import Rule

HANDLERS_WITHOUT_GATES = HANDLERS | dict.fromkeys(LINEAR, linear)
"""The table for recipes that do not ask which factor of a product is the gate, at less cost."""

TRANSPOSES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that are operations on it."""


class RuleMode(TorchFunctionMode):
    """Gives each torch function called inside the model its rule.

    Args:
        recipe: the recipe outside every override.
        trace: where sources are recorded.
        embeddings: the embeddings, with their paths.
        paths: for each module (by ``id``), its path; to name the culprit in errors.
    """

    def __init__(
        self,
        recipe: Recipe,
        trace: Trace,
        embeddings: Sequence[tuple[str, Module]],
        paths: Callable[[], Mapping[int, str]],
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.trace = trace
        self.book: Book | None = None
        self.heads: Heads | None = None
        self.active = False
        self.replaying = False
        self.in_last_layer = False
        self._embeddings = embeddings
        self._paths = paths
        self._rule = ""
        self._handlers = HANDLERS if recipe.has_gates() else HANDLERS_WITHOUT_GATES

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self.active and torch.is_grad_enabled()):
            out = func(*args, **kwargs)
            if self.active and self.book is not None:
                self.book.inherit(out, (*args, *kwargs.values()))
            return out
        name = func.__name__
        if self.heads is None:
            return self._ruled(name, func, types, args, kwargs)
        return self.heads.around(name, args, kwargs, lambda args: self._ruled(name, func, types, args, kwargs))

    def _ruled(self, name: str, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__get__":
            if type(args[0]) is Parameter and func.__self__.__name__ in TRANSPOSES:
                return func(args[0].detach())
            return func(*args)
        handler = self._handlers.get(name)
        if handler is None:
            return self._unlisted(name, func, types, args, kwargs)
        if self.trace.ran is None:
            return handler(self, func, args, kwargs)
        self._rule = "linear"
        return self.counted(name, handler(self, func, args, kwargs))

    def _unlisted(self, name: str, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, FunctionType):
            # a function written in Python hides its inner calls unless the mode is entered again
            with self:
                return torch._C._skip_one_hop_torch_function(func, types, args, kwargs)
        args, kwargs = constants(args), constants(kwargs)
        if not any_carries((*args, *kwargs.values())):
            return func(*args, **kwargs)
        out = self.apply("unknown", lambda *args: func(*args, **kwargs), *args, rule=rules.unmodified)
        if any_carries(out):
            self.refuse(name)
        self._rule = "unknown"
        return self.counted(name, out)

    def counted(self, name: str, out: Any) -> Any:
        """``out``, with the operation called ``name`` that made it in the coverage report, if there is one."""
        if self.trace.ran is not None and not self.replaying and any_carries(out):
            self.trace.ran[name, self._rule, self.where()] += 1
        return out

    def apply(
        self,
        kind: str,
        op: Callable[..., Any],
        *inputs: Any,
        rule: Rule | None = None,
        conserves: bool = False,
    ) -> Any:
        """``op(*inputs)`` under the recipe's rule for a kind of operation, or under another rule.

        Args:
            kind: the kind of operation.
            op: the operation.
            inputs: its inputs, at least one of which depends on the model's input.
            rule: the rule where the recipe's own does not say it all.
            conserves: whether this rule hands on exactly what it is given; if not, the ledger measures it.
        """
        rule = getattr(self.recipe, kind) if rule is None else rule
        if self.trace.ran is not None:
            self._rule = rule_name(rule)
        if self.book is None or conserves:
            return rule(op, *inputs)
        return self.book.watch(kind, rule, op, inputs)

    def refuse(self, name: str) -> None:
        """Under a strict recipe, refuse the operation called ``name``.

        Raises:
            UnknownOperationError: names the operation, the module that calls it, and the mend.
        """
        self._rule = "unknown"
        if self.recipe.strict:
            raise UnknownOperationError(
                f"{self.where()} calls torch's {name!r}, which is neither known to be linear nor has a rule; "
                "use a recipe with strict=False to take its plain gradient"
            )

    def source(self, weight: Tensor, ids: Tensor, out: Tensor) -> Tensor:
        """Make the output of an embedding a leaf of the graph, and record it."""
        leaf = out.detach().requires_grad_()
        if not self.replaying:
            # looked for now, not when the block begins: an offloaded weight is another object in each call
            holders = (path for path, e in self._embeddings if any(weight is p for p in e.parameters(recurse=False)))
            self.trace.sources.append(Source(tuple(holders) or ("an embedding",), leaf, ids))
        return leaf.clone()

    def where(self) -> str:
        """The path of the module whose forward pass is running, found on the call stack."""
        paths = self._paths()
        frame = sys._getframe(1)  # reading the variables of its own frame would keep the whole stack alive
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, Module) and id(owner) in paths:
                return paths[id(owner)] or type(owner).__name__
            frame = frame.f_back  # type: ignore[assignment]
        return "the model"
