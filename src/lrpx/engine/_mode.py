"""The seam: a mode that sees each torch function the model calls, in this thread and this block only."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks as hooks_of_saved
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from lrpx.engine._gates import keep_gate, move_gate, set_gate, weakest_gate
from lrpx.engine._graph import newest
from lrpx.engine._operation import unknown
from lrpx.engine._table import TABLE
from lrpx.engine._taps import Call
from lrpx.engine._tensors import TRANSPOSES, any_carries, as_own, carries, has_foreign

if TYPE_CHECKING:
    from lrpx.engine._operation import Operation
    from lrpx.engine._run import Run

AUTOGRAD = frozenset({"grad", "backward"})


class RuleMode(TorchFunctionMode):
    """Gives each torch function called inside the model its rule; the state is the run's."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self.run
        kwargs = kwargs or {}
        if not (run.active or (run.is_after and run.is_ours(func, args, kwargs))):
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__get__" and run.is_quick and func.__self__.__name__ not in TRANSPOSES:
            return func(*args)
        row = TABLE.get(name)
        nodes = run.nodes
        if newest() != nodes.last:
            run.meet_unseen()
        if hooks_of_saved(False) is not None:
            run.meet_hooks()
        is_transformed = peek_interpreter_stack() is not None
        first = nodes.first
        is_odd = run.has_constants or (kwargs and has_foreign(kwargs.values(), first))
        for value in args:  # as has_foreign() does, which would take as long again to call
            kind = type(value)
            if kind is Tensor:
                if value.requires_grad and ((node := value.grad_fn) is None or node._sequence_nr() < first):
                    is_odd = True
            elif (kind is tuple or kind is list) and value and has_foreign(value, first):
                is_odd = True
        if is_odd and not is_transformed:
            args, kwargs = run.without_foreign(name, row, args, kwargs)
        is_direct = run.is_direct and not (kwargs and "out" in kwargs)
        if is_direct and row is not None and not is_transformed and is_grad_enabled():  # nearly always
            out = row.handler(run, func, args, kwargs)
            if nodes.waiting:
                nodes.close()
            nodes.last = newest()
            return out
        joins = run.asks_for_gates and row is not None and row.gate == "joins"
        strength = weakest_gate((*args, *kwargs.values())) if joins else 0
        if is_transformed:
            out = run.transformed(name, func, args, kwargs)
        elif row is not None and kwargs.get("out") is not None and is_grad_enabled():
            out = run.written_out(name, func, args, kwargs)
        elif row is not None and run.is_quick and is_grad_enabled():  # nearly always
            out = row.handler(run, func, args, kwargs)
        elif run.is_tapped:
            call = Call(name, row, args, kwargs)
            out = run.tapped(call, lambda args, kwargs: self._ruled(name, row, func, types, args, kwargs))
            if not (args and out is args[0]):  # requires_grad_() makes no leaf of the run
                out = as_own(out)
        else:
            out = self._ruled(name, row, func, types, args, kwargs)
        if run.asks_for_gates and row is not None and row.gate is not None:
            made_of = args[:3] or tuple(kwargs.values())
            if joins:
                set_gate(run.recipe, args[0] if name == "__setitem__" else out, strength)
            elif row.gate != "joins":
                out = move_gate(out, *made_of[:1]) if row.gate == "moves" else keep_gate(run.recipe, out, *made_of)
        if run.asks_for_weights and not carries(out):
            run.mark_from_input(out, (*args, *kwargs.values()), name)
        if nodes.waiting:
            nodes.close()
        nodes.last = newest()
        return out

    def _ruled(
        self,
        name: str,
        row: Operation | None,
        func: Any,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run = self.run
        if not is_grad_enabled():
            if not run.trace.notes.cut and any_carries((*args, *kwargs.values())):
                run.trace.notes.cut = run.where()
            return func(*args, **kwargs)
        if row is None:
            return self._unlisted(name, func, types, args, kwargs)
        if run.trace.ran is None or name == "__get__":
            return row.handler(run, func, args, kwargs)
        run.call_it(row.kind if row.kind == "source" else "plain")
        return run.counted(name, row.handler(run, func, args, kwargs))

    def _unlisted(self, name: str, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in AUTOGRAD:
            self.run.refuse_gradients(name, (*args, *kwargs.values()))
        if isinstance(func, FunctionType):
            # a function written in Python hides its inner calls unless the mode is entered again
            with self:
                return torch._C._skip_one_hop_torch_function(func, types, args, kwargs)
        return unknown(self.run, func, args, kwargs)
