"""The seam: a mode that sees each torch function the model calls, in this thread and this block only."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lrpx import rules
from lrpx.engine import _roles
from lrpx.engine._exponentials import keep_exponents
from lrpx.engine._gates import GATE, any_gate, keep_gate, move_gate, put_gate, was_known, weakest_gate, written
from lrpx.engine._graph import ELEMENT_WISE, made_by, newest
from lrpx.engine._nodes import hooks_of_saved
from lrpx.engine._operation import unknown, write
from lrpx.engine._plain import plain
from lrpx.engine._table import TABLE
from lrpx.engine._taps import Call
from lrpx.engine._tensors import LISTS, NUMBERS, TRANSPOSES, any_carries, as_own, carries, has_foreign, is_tensor
from lrpx.errors import TraceError, UnknownOperationError

if TYPE_CHECKING:
    from lrpx.engine._operation import Operation
    from lrpx.engine._run import Run


def _known(run: Run, value: Any) -> None:
    """Let a tensor that a custom autograd function of a known name has made be what the table's operation makes of its
    input, where the recipe has rules: so it is a function like others, and the gate that it is.

    Raises:
        UnknownOperationError: it was made in a checkpoint, and the recipe is strict.
    """
    name = made_by(value)
    if name is not None and run.recipe.activation is not rules.unmodified:
        if hooks_of_saved(False) is not None:  # which would run the part again to tell its input
            if not run.recipe.strict:
                return
            raise UnknownOperationError(
                f"{run.where()} calls {name}, a custom autograd function whose input is not kept in a checkpoint; "
                "switch gradient checkpointing off, leave recompute out, or use a recipe with strict=False"
            )
        (x,) = value.grad_fn.saved_tensors
        torch_function = ELEMENT_WISE[name]
        made = TABLE[torch_function.__name__].handler(run, torch_function, (x,), {})
        write(run, value.detach_(), made)


AUTOGRAD = frozenset({"grad", "backward"})


HOP = getattr(torch._C, "_skip_one_hop_torch_function", None)
"""It runs a function of torch that is written in Python as if no mode were on, and what that calls under it. torch
2.11 has none."""


class _Beside:
    """A module with other things under some of its names."""

    def __init__(self, module: Any, others: dict[str, Any]) -> None:
        self.__dict__ |= others | {"_module": module}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _no(*tensors: Any) -> bool:
    return False


ASKS = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
"""By these a function of torch that is written in Python asks, before all else, whether a mode is to run it."""
OVERRIDES = _Beside(torch.overrides, ASKS)
UNASKED = {**ASKS, "overrides": OVERRIDES, "torch": _Beside(torch, {"overrides": OVERRIDES})}


@cache
def _unasked(func: FunctionType) -> FunctionType:
    """A function of torch that does not hand itself to the mode, as it does while that is on; what it calls does. Where
    torch cannot skip that itself."""
    found = FunctionType(func.__code__, func.__globals__ | UNASKED, func.__name__, func.__defaults__, func.__closure__)
    found.__kwdefaults__ = func.__kwdefaults__
    return found


class RuleMode(TorchFunctionMode):
    """Gives each torch function called inside the model its rule; the state is the run's."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.inside: set[FunctionType] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self.run
        if kwargs is None:
            kwargs = {}
        if not run.active and not (run.is_after and run.is_ours(func, args, kwargs)):
            return func(*args, **kwargs)
        if not run.is_usual:
            return self._careful(func, types, args, kwargs)
        # nearly always; what is asked here is asked of each call, so it is asked as cheaply as can be
        name = func.__name__
        if name == "__get__" and func.__self__.__name__ not in TRANSPOSES:
            return func(*args)
        row = TABLE.get(name)
        nodes = run.nodes
        first, last = nodes.first, nodes.last
        if (
            row is None
            or newest() != last
            or hooks_of_saved(False) is not None
            or peek_interpreter_stack() is not None
            or get_eval_frame_callback() is not None
            or not is_grad_enabled()
        ):
            return self._careful(func, types, args, kwargs)
        is_bare, asks, has_gates = True, run.asks_for_gates, False  # bare: without parameters and lists of tensors
        if kwargs and not NUMBERS.issuperset(map(type, kwargs.values())):
            if "out" in kwargs or not nodes.knows(kwargs.values()):
                return self._careful(func, types, args, kwargs)
            is_bare, has_gates = False, asks and any_gate(kwargs.values())
        for value in args:  # as nodes.knows() and any_gate() do
            kind = type(value)
            if kind is Tensor:
                node = value.grad_fn
                if value.requires_grad if node is None else not first <= node._sequence_nr() < last:
                    return self._careful(func, types, args, kwargs)
                if asks and getattr(value, GATE, None) is not None:
                    has_gates = True
            elif kind is Parameter:
                is_bare = False
            elif kind not in NUMBERS and not (kind in LISTS and NUMBERS.issuperset(map(type, value))):
                if not (kind in LISTS and nodes.knows(value)):
                    return self._careful(func, types, args, kwargs)
                is_bare, has_gates = False, has_gates or (asks and any_gate(value))
        handler = row.handler
        if asks and row.gate is not None:
            strength = weakest_gate((*args, *kwargs.values())) if has_gates and row.gate == "joins" else None
            out = func(*args, **kwargs) if is_bare and handler is plain else handler(run, func, args, kwargs)
            # else what is made of them is none
            if has_gates or (args and out is args[0] and (row.gate != "moves" or run.has_scales)):
                out = self._marked(func, row, out, args, kwargs, strength)
        elif is_bare and handler is plain:
            out = func(*args, **kwargs)
            nodes.last = newest()
            return out
        else:
            out = handler(run, func, args, kwargs)
        if nodes.waiting:
            nodes.close()
        nodes.last = newest()
        return out

    def _careful(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, with all that may have to be asked and done.

        Raises:
            TraceError: it is in code that torch.compile has compiled, as that of a method.
        """
        run, nodes, name = self.run, self.run.nodes, func.__name__
        if get_eval_frame_callback() is not None:
            raise TraceError(
                f"{run.where()} runs what torch.compile has compiled, where no rule is called; pass the model before "
                "its methods or functions are compiled, or call torch.compiler.set_stance('force_eager') first"
            )
        if name == "__get__" and run.is_quick and func.__self__.__name__ not in TRANSPOSES:
            return func(*args)
        row = TABLE.get(name)
        if newest() != nodes.last:
            run.meet_unseen()
        if run.has_unseen:
            for value in (*args, *kwargs.values()):
                _known(run, value)
        has_hooks = hooks_of_saved(False) is not None
        if has_hooks:
            run.meet_hooks()
        is_transformed = peek_interpreter_stack() is not None
        is_known = nodes.knows(args) and nodes.knows(kwargs.values())  # then nothing is foreign, either
        if has_hooks or is_transformed or not is_known:
            nodes.is_sure = False
        first = nodes.first
        is_odd = run.has_constants or (
            not is_known and (has_foreign(args, first) or has_foreign(kwargs.values(), first))
        )
        if is_odd and not is_transformed:
            args, kwargs = run.without_foreign(name, row, args, kwargs)
        # before the call, which may change its first argument
        joins = run.asks_for_gates and row is not None and row.gate == "joins"
        given = (*args, *kwargs.values()) if joins else ()
        strength = weakest_gate(given) if any_gate(given) else None  # else what the handler has found holds
        writes = kwargs.get("out") is not None
        if is_transformed:
            out = run.transformed(name, func, args, kwargs)
        elif row is not None and writes and is_grad_enabled():
            out = run.written_out(name, func, args, kwargs)
        elif row is not None and run.is_quick and is_grad_enabled():
            out = row.handler(run, func, args, kwargs)
        elif run.is_tapped:
            call = Call(name, row, args, kwargs)
            out = run.tapped(call, lambda args, kwargs: self._ruled(name, row, func, types, args, kwargs))
            if not (args and out is args[0]):  # requires_grad_() makes no leaf of the run
                out = as_own(out)
        else:
            out = self._ruled(name, row, func, types, args, kwargs)
        out = self._marked(func, row, out, args, kwargs, strength)
        if nodes.waiting:
            nodes.close()
        nodes.last = newest()
        return out

    def _marked(
        self,
        func: Any,
        row: Operation | None,
        out: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strength: int | None,
    ) -> Any:
        """``out``, with what rules must know of it: whether it is a gate (``strength``: that of what was put together),
        or a constant that was made of the input."""
        run, name = self.run, func.__name__
        if strength is not None:
            target = args[0] if name == "__setitem__" else out
            if not was_known(target):
                put_gate(run.recipe, target, strength)
        elif run.asks_for_gates and row is not None and row.gate is not None and row.gate != "joins":
            if row.gate == "moves":
                out = move_gate(out, args[0] if args else kwargs.get("input"))
            else:
                out = keep_gate(run.recipe, out, *args[:3], *kwargs.values())
        if args and out is args[0] and run.asks_for_gates and is_tensor(out):
            written(run.recipe, out)
        if run.has_scales and row is not None and row.gate is not None:
            keep_exponents(func, out, args, kwargs)
        if run.by_ids:
            run.keep_by_ids(out, (*args, *kwargs.values()))
        if run.asks_for_places and row is not None:
            _roles.multiplied(row.name, out, (*args, *kwargs.values()))
        if run.asks_for_places and not carries(out):
            _roles.keep_shares(out, (*args, *kwargs.values()), row)
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
        run = self.run
        if not is_grad_enabled():
            if not run.trace.notes.cut and any_carries((*args, *kwargs.values())):
                run.trace.notes.cut = run.where()
            if row is None and run.is_tapped and isinstance(func, FunctionType):
                return self._opened(func, types, args, kwargs)
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
            return self._opened(func, types, args, kwargs)
        return unknown(self.run, func, args, kwargs)

    def _opened(self, func: FunctionType, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function written in Python, which hides its inner calls unless the mode is entered again."""
        if HOP is not None:
            with self:
                return HOP(func, types, args, kwargs)
        if func in self.inside:  # it hands itself over from deeper within, and stays unknown
            return unknown(self.run, func, args, kwargs) if is_grad_enabled() else func(*args, **kwargs)
        self.inside.add(func)
        try:
            with self:
                return _unasked(func)(*args, **kwargs)
        finally:
            self.inside.discard(func)
