"""The seam: a mode that sees each torch function the model calls, in this thread and this block only."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from lrpx import rules
from lrpx.engine._gates import keep_gate, move_gate
from lrpx.engine._table import TABLE
from lrpx.engine._taps import Call
from lrpx.engine._tensors import any_carries, carries, constants, transformed_constants

if TYPE_CHECKING:
    from lrpx.engine._operation import Operation
    from lrpx.engine._run import Run


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
        if not run.active:
            return func(*args, **kwargs)
        name = func.__name__
        is_transformed = peek_interpreter_stack() is not None
        if is_transformed:
            args, kwargs = transformed_constants(args), transformed_constants(kwargs)
        row = TABLE.get(name)
        if row is not None and run.is_quick and is_grad_enabled():  # nearly always
            out = row.handler(run, func, args, kwargs)
        elif run.is_tapped:
            call = Call(name, row, args, kwargs)
            out = run.tapped(call, lambda args, kwargs: self._ruled(name, row, func, types, args, kwargs))
        else:
            out = self._ruled(name, row, func, types, args, kwargs)
        if is_transformed:
            run.refuse_transformed(name, out)
        if run.asks_for_gates and row is not None and row.gate is not None:
            made_of = args[:3] or tuple(kwargs.values())
            out = move_gate(out, *made_of[:1]) if row.gate == "moves" else keep_gate(run.recipe, out, *made_of)
        if run.asks_for_weights and not carries(out):
            run.mark_from_input(out, (*args, *kwargs.values()), name)
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
        if not is_grad_enabled():
            return func(*args, **kwargs)
        run = self.run
        if row is None:
            return self._unlisted(name, func, types, args, kwargs)
        if run.trace.ran is None or name == "__get__":
            return row.handler(run, func, args, kwargs)
        run.call_it(row.kind if row.kind == "source" else "plain")
        return run.counted(name, row.handler(run, func, args, kwargs))

    def _unlisted(self, name: str, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, FunctionType):
            # a function written in Python hides its inner calls unless the mode is entered again
            with self:
                return torch._C._skip_one_hop_torch_function(func, types, args, kwargs)
        args, kwargs = constants(args), constants(kwargs)
        if not any_carries((*args, *kwargs.values())):
            return func(*args, **kwargs)
        run = self.run
        out = run.apply("unknown", lambda *args: func(*args, **kwargs), *args, rule=rules.unmodified)
        if any_carries(out):
            run.refuse(name)
        run.call_it("unknown")
        return run.counted(name, out)
