"""The pass under a compiler: recorded once for each shape, checked against the plain pass, then called.

The user's model runs under the recipe on fake tensors, its backward pass included, and torch records what it does as
one graph of plain operations (``make_fx``). Its weights and buffers are inputs of the graph like the token ids: none
is copied, and new values are seen. The graph is cut where the explained value is chosen from the logits, and
TorchInductor compiles the two halves. Matrix products in float32 on a CPU are oneDNN's.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from lrpx import _kernels
from lrpx._modules import named_modules
from lrpx._progress import waiting
from lrpx.engine import _roles
from lrpx.engine._places import Source
from lrpx.engine._settings import Settings, contents, put_back
from lrpx.engine._trace import Trace
from lrpx.errors import ModelError
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.fx import GraphModule
    from torch.nn import Module

    from lrpx.recipes import Recipe

    Forward = Callable[[Mapping[str, Any]], AbstractContextManager[tuple[Trace, Tensor]]]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
INSTEAD = "use Explainer(..., compile=False)"
MOST_PASSES = 256
"""More than the lengths of a model's texts, where each has code of its own; settings that change would fill memory."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""How far a compiled pass may be from the plain one at its first use, relative to the largest value. For bfloat16
and float16, where the plain pass rounds after each operation and the compiled one after several, it is 0.1."""


class Compiler:
    """Compiled passes, made when first needed; of more than :data:`MOST_PASSES` those that were used last are kept."""

    def __init__(self) -> None:
        self._passes: list[tuple[Any, _Pass]] = []
        self._lock = threading.Lock()

    @contextmanager
    def run(
        self,
        model: Module,
        forward: Forward,
        inputs: Mapping[str, Any],
        paths: frozenset[str],
        recipe: Recipe,
        changes: tuple[object, ...] = (),
    ) -> Iterator[tuple[Trace, Tensor]]:
        """What ``with forward(inputs) as (trace, logits)`` gives, computed by compiled code.

        Args:
            model: what ``forward`` runs.
            forward: runs the model under ``recipe``; its logits are ``[B, V]``.
            inputs: tensors, which may hold other numbers at the next call, and all else, which is part of the code.
            paths: the sources to record are those with one of these paths.
            recipe: the rules that ``forward`` applies.
            changes: what the model's user has put into it, and where it reads, besides its modules: a part of the code.

        Raises:
            ModelError: the model cannot be compiled, or gives other numbers than the plain pass when it is.
        """
        with torch.inference_mode(False), torch.enable_grad():
            call = _Call.of(model, forward, inputs, paths, recipe, changes)
            with self._lock:
                found = self._run(call)
                if found is None:
                    with waiting(f"Compiling for an input of {call.size}, once"):
                        self._passes.append((call.key, _checked(call)))
                    found = self._run(call)
                    del self._passes[:-MOST_PASSES]
            if found is None:
                raise _told_by_rounding(call)
            yield found

    def _run(self, call: _Call) -> tuple[Trace, Tensor] | None:
        for number, (key, each) in enumerate(self._passes):
            if key == call.key and (found := each(call.tensors)) is not None:
                self._passes.append(self._passes.pop(number))
                return found
        return None


# ---------------------------------------------------------------- what the code depends on


@dataclass(frozen=True)
class _Call:
    """One call of a model: the tensors its code takes as inputs, and all else that the code depends on."""

    model: Module
    forward: Forward
    given: Mapping[str, Any]
    own: list[Tensor]
    paths: frozenset[str]
    changes: tuple[object, ...]
    key: Any

    @classmethod
    def of(
        cls,
        model: Module,
        forward: Forward,
        given: Mapping[str, Any],
        paths: frozenset[str],
        recipe: Recipe,
        changes: tuple[object, ...] = (),
    ) -> _Call:
        """Look at a model.

        Raises:
            ModelError: it has hooks of the user's, or weights that are no plain tensors, or have no numbers.
        """
        modules = [module for _, module in named_modules(model)]
        spaces = [space for module in modules for space in (vars(module)["_parameters"], vars(module)["_buffers"])]
        own = {id(tensor): tensor for space in spaces for tensor in space.values() if tensor is not None}
        settings = Settings(modules, {key: number for number, key in enumerate(own)})
        facts = list(map(settings.of_module, modules))
        for module in (*modules, *settings.beside):
            if any(vars(module)[kind] for kind in HOOKS):
                _refuse_hooks(type(module).__name__, [vars(module)[kind] for kind in HOOKS])
        _refuse_hooks("every module", [vars(nn_module)[f"_global{kind}"] for kind in HOOKS])
        tensors = [*own.values(), *(value for value in given.values() if isinstance(value, Tensor))]
        for tensor in tensors:
            if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # has no memory for code to read
                raise ModelError(
                    f"{type(model).__name__} has a weight of {type(tensor).__name__}, perhaps quantised, that cannot "
                    f"be compiled; {INSTEAD}"
                )
            if tensor.is_meta:
                raise ModelError(
                    f"{type(model).__name__} has a weight without numbers, as accelerate leaves those that it brings "
                    f"when they are needed, that cannot be compiled; {INSTEAD}"
                )
        kinds = [(type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        others = {name: None if isinstance(value, Tensor) else settings.of(value) for name, value in given.items()}
        casts = {device.type: torch.get_autocast_dtype(device.type) for *_, device in kinds
                 if torch.is_autocast_enabled(device.type)}  # fmt: skip
        key = (kinds, recipe, paths, others, casts, torch.get_default_dtype(), facts, settings.of(changes))
        return cls(model, forward, given, list(own.values()), paths, changes, key)

    @property
    def size(self) -> str:
        """The shape of the first of the given tensors, for a person to read."""
        shape: Sequence[int] = next((value.shape for value in self.given.values() if isinstance(value, Tensor)), ())
        return " × ".join(map(str, shape))

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs of the code: the model's own tensors, then the given ones."""
        return [*self.own, *(value for value in self.given.values() if isinstance(value, Tensor))]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[dict[int, Tensor], dict[str, Any]]:
        """Other tensors in the place of :attr:`tensors`: for the model's own by ``id``, for the given ones by name."""
        own = {id(mine): other for mine, other in zip(self.own, tensors, strict=False)}
        rest = iter(tensors[len(self.own) :])
        return own, {name: next(rest) if isinstance(value, Tensor) else value for name, value in self.given.items()}


def _refuse_hooks(of: str, hooks: Sequence[Mapping[int, Any]]) -> None:
    """Refuse hooks of the user's, which may do another thing at every call.

    Raises:
        ModelError: names what has them and the hook.
    """
    for hook in (hook for each in hooks for hook in each.values()):
        if not (getattr(hook, "__module__", None) or "").startswith(("lrpx.", "transformers.")):
            name = getattr(hook, "__qualname__", repr(hook))
            raise ModelError(f"{of} has a hook, {name}, that cannot be compiled; {INSTEAD}")


# ------------------------------------------------------------------------------- one pass


@dataclass(frozen=True)
class _Pass:
    """The code for one shape.

    Args:
        before: from the inputs to the logits, the value and the ids of each source, and what ``after`` needs.
        after: from that and the gradient of the logits to the gradient of each source.
        sources: the paths of each source, and whether ids were looked up in it.
        answers: what the engine found in the numbers of the pass it was made for, of which the code depends.
        needed: where to find what ``after`` needs: ``(is an input, index)``.
    """

    before: Callable[..., Sequence[Tensor]]
    after: Callable[..., Sequence[Tensor]]
    sources: Sequence[tuple[tuple[str, ...], bool]]
    answers: Sequence[bool]
    needed: Sequence[tuple[bool, int]]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Trace, Tensor] | None:
        """The pass, or None where the engine would find another thing in its numbers."""
        tensors = [tensor.detach() for tensor in tensors]
        with torch.no_grad():
            out = self.before(*tensors)
        if self.answers and out[1].tolist() != self.answers:
            return None
        trace = Trace(GRADIENT)
        for (paths, has_ids), value, ids in zip(self.sources, out[2::2], out[3::2], strict=False):
            leaf = value.detach().requires_grad_()
            trace.sources.append(Source(paths, leaf, ids if has_ids else None, is_of_tokens=has_ids))
        needed = [tensors[i] if is_input else out[i] for is_input, i in self.needed]
        leaves = [source.value for source in trace.sources]
        return trace, _Logits.apply(lambda seed: self.after(*needed, seed), out[0], *leaves)  # type: ignore[no-untyped-call]


class _Logits(Function):
    """Computed logits, with code for their gradient."""

    @staticmethod
    def forward(ctx: Any, after: Callable[[Tensor], Sequence[Tensor]], logits: Tensor, *leaves: Tensor) -> Tensor:
        ctx.after = after
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            return (None, None, *ctx.after(seed.contiguous()))


def _checked(call: _Call) -> _Pass:
    """A new pass, which gives the numbers of the plain one for this very call.

    Raises:
        ModelError: it cannot be made, gives other numbers, or finds other answers in its own.
    """
    asked = _roles.Asked()
    with _roles.asking(asked), call.forward(call.given) as (trace, logits):
        seed = torch.arange(logits.numel(), device=logits.device).cos().to(logits.dtype).view_as(logits)
        plain = _numbers(trace, logits, seed, call.paths)
    found = _made(call, seed, asked.answers)
    ran = found(call.tensors)
    if ran is None:
        raise _told_by_rounding(call)
    for one, other in zip(plain, _numbers(*ran, seed, call.paths), strict=True):
        size = float(one.masked_fill(~one.isfinite(), 0.0).abs().max())
        tolerance = TOLERANCE.get(logits.dtype, 0.1) * size
        if not torch.isclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True).all():
            off = float((one - other).abs().max()) / size
            raise ModelError(f"compiled, {type(call.model).__name__} gives other numbers (off by {off:.0e}); {INSTEAD}")
    return found


def _told_by_rounding(call: _Call) -> ModelError:
    return ModelError(f"whether weights of {type(call.model).__name__} sum to 1 is told by rounding; {INSTEAD}")


def _recorded(trace: Trace, paths: frozenset[str]) -> list[Source]:
    """The sources with one of these paths, and other tables of tokens."""
    return [source for source in trace.sources if source.is_of_tokens or not paths.isdisjoint(source.paths)]


def _numbers(trace: Trace, logits: Tensor, seed: Tensor, paths: frozenset[str]) -> list[Tensor]:
    trace.explain((logits.masked_fill(logits == -torch.inf, 0.0) * seed).sum())
    sources = _recorded(trace, paths)
    return [logits.detach(), *(s.value.detach() for s in sources), *map(trace.source_gradient, sources)]


def _made(call: _Call, seed: Tensor, answers: Sequence[tuple[object, bool]]) -> _Pass:
    kept: list[tuple[tuple[str, ...], bool]] = []

    def joint(*tensors: Tensor) -> list[Tensor]:
        own, given = call.with_tensors(tensors[:-1])
        asked = _roles.Asked(answers)
        with _Swapped(own), _roles.asking(asked), call.forward(given) as (trace, logits):
            sources = _recorded(trace, call.paths)
            kept[:] = [(source.paths, source.ids is not None) for source in sources]
            leaves = [source.value for source in sources]
            gradients = [
                torch.zeros_like(leaf) if gradient is None else gradient
                for leaf, gradient in zip(leaves, trace.gradients(logits, leaves, tensors[-1]), strict=True)
            ]
        found = [each for s in sources for each in (s.value.detach(), s.value.new_empty(0) if s.ids is None else s.ids)]
        told = torch.stack(asked.traced) if asked.traced else logits.new_empty(0)
        return [logits.detach(), told, *found, *gradients]

    try:
        with _unchanged(call.model, call.changes):
            before, after = _halves(joint, [*call.tensors, seed])
        needed = _needed(before, after)
        return _Pass(_code(before), _code(after), kept, [answer for _, answer in answers], needed)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        raise ModelError(f"{type(call.model).__name__} cannot be compiled ({reason}); {INSTEAD}") from error


class _Swapped(TorchFunctionMode):
    """Gives each torch function other tensors in the place of the model's own, which stay where they are.

    The tensors of a trace have no numbers. But what was made of nothing but numbers and shapes (zeros that a state
    begins with, a causal mask) has the same whatever the inputs and the weights are: it is computed beside the trace,
    so that the model, or the engine, can ask for it. Of all else no number can be asked for.
    """

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._swap(args), self._swap(kwargs or {})
        if func.__name__ in GROUPED and args and args[0].dtype is not torch.bfloat16:
            raise TypeError(f"torch traces {func.__name__} of experts in bfloat16 alone; {BATCHED}")
        known = _known(func, args, kwargs)
        if known is None:
            return func(*args, **kwargs)
        if func.__name__ in ASKING or not torch._C._len_torch_dispatch_stack():  # the engine asks beside the trace
            with _disable_current_modes():
                out = func(*known[0], **known[1])
            return _with_numbers(out, out)
        out = func(*args, **kwargs)
        if not _tensors_of(out):
            return out
        with _disable_current_modes(), torch.no_grad():
            return _with_numbers(out, func(*known[0], **known[1]))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._others.get(id(value), value)
        if type(value) is tuple or type(value) is list:
            return type(value)(map(self._swap, value))
        return {key: self._swap(item) for key, item in value.items()} if type(value) is dict else value


GROUPED = ("grouped_mm", "_grouped_mm")
BATCHED = 'for a model of transformers, model.set_experts_implementation("batched_mm")'
NUMBERS = "_lrpx_numbers"
"""The attribute of a tensor of a trace that was made of numbers and shapes alone: its version, and such a tensor."""
ASKING = frozenset("__bool__ __int__ __float__ __index__ item tolist equal allclose is_nonzero".split())
"""Functions that give numbers."""
LIKE = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full new_tensor".split())
"""Functions that take nothing of their first tensor but its shape, type and device."""
WITHOUT_NUMBERS = "rand empty normal uniform bernoulli dropout multinomial poisson exponential_ resize set_".split()
"""Parts of the names of functions whose numbers differ from call to call."""
PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.Size,
         torch.memory_format)  # fmt: skip
"""Arguments without tensors in them."""


def _known(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a call with numbers in the place of tensors; None where one has none."""
    if any(word in func.__name__ for word in WITHOUT_NUMBERS):
        return None
    try:
        if func.__name__ in LIKE:
            args = (_like(args[0]), *args[1:])
        return _numbers_of(args), _numbers_of(kwargs)
    except LookupError:
        return None


def _like(x: Tensor) -> Tensor:
    """A tensor of the same shape, type and device, with any numbers, that can be asked for."""
    with _disable_current_modes():
        out = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
        setattr(out, NUMBERS, (out._version, out))
    return out


def _tensors_of(out: Any) -> list[Tensor]:
    """What a function has made, one tensor or several."""
    parts = out if isinstance(out, (tuple, list)) else (out,)
    return [each for each in parts if isinstance(each, Tensor)]


def _with_numbers(out: Any, found: Any) -> Any:
    """``out``, with the numbers of what the same function has made of others."""
    for each, numbers in zip(_tensors_of(out), _tensors_of(found), strict=True):
        setattr(each, NUMBERS, (each._version, numbers))
    return out


def _numbers_of(value: Any) -> Any:
    """An argument with numbers in the place of the tensors in it.

    Raises:
        LookupError: one has none.
    """
    if isinstance(value, Tensor):
        found = getattr(value, NUMBERS, None)
        if found is None or found[0] != value._version:
            raise LookupError
        return found[1]
    if type(value) is tuple or type(value) is list:
        return type(value)(map(_numbers_of, value))
    if type(value) is dict:
        return {key: _numbers_of(item) for key, item in value.items()}
    if type(value) is slice:
        return slice(*map(_numbers_of, (value.start, value.stop, value.step)))
    if not isinstance(value, PLAIN):
        raise LookupError
    return value


@contextmanager
def _unchanged(model: Module, changes: tuple[object, ...]) -> Iterator[None]:
    """Put back what a model writes into itself, and into the containers, objects and classes that it holds, or that its
    user has put into it.

    Raises:
        TypeError: it did, so that its code would depend on the calls before.
    """
    modules = list(model.modules())
    settings = Settings(modules)
    for module in modules:
        settings.of_module(module)
    settings.of(changes)
    spaces = [*map(vars, (*modules, *settings.beside)), *settings.holders]
    earlier = [contents(space) for space in spaces]
    try:
        yield
    finally:
        changed = [name for name in map(put_back, spaces, earlier) if name is not None]
    if changed:
        raise TypeError(f"its forward pass keeps something in {changed[0]!r}")


# ------------------------------------------------------------------------------ the graph


def _halves(joint: Callable[..., list[Tensor]], tensors: Sequence[Tensor]) -> tuple[GraphModule, GraphModule]:
    """What ``joint`` does, as one graph that ends when its last argument is wanted and one that begins there.

    Raises:
        TypeError: it writes into its arguments.
    """
    import torch._inductor.lowering  # which that of a max-pooling reads, and nothing has imported before the first code
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in tensors]
    with mode:
        graph = make_fx(joint)(*fakes)
        graph = make_fx(functionalize(graph), {**select_decomp_table(), **_kernels.ONEDNN})(*fakes)
    inputs = graph.graph.find_nodes(op="placeholder")
    if any(node.target is torch.ops.aten.copy_.default and node.args[0] in inputs for node in graph.graph.nodes):
        raise TypeError("its forward pass writes into its own buffers")
    for i, node in enumerate(inputs):
        node.name = node.target = "tangents_0" if node is inputs[-1] else f"primals_{i}"  # names that torch looks for
    sources = (len(_results(graph)) - 2) // 3
    return min_cut_rematerialization_partition(graph, fakes, num_fwd_outputs=2 + 2 * sources)


def _results(graph: GraphModule) -> list[Any]:
    results: Any = graph.graph.output_node().args[0]
    return list(results)


def _needed(before: GraphModule, after: GraphModule) -> list[tuple[bool, int]]:
    """Where the inputs of ``after`` are found; ``before`` no longer gives those that it was given itself."""
    inputs = list(before.graph.find_nodes(op="placeholder"))
    count = len(after.graph.find_nodes(op="placeholder")) - 1
    results = _results(before)
    own, saved = results[: len(results) - count], results[len(results) - count :]
    computed = [node for node in saved if node not in inputs]
    before.graph.output_node().args = ((*own, *computed),)
    before.recompile()
    return [(True, inputs.index(n)) if n in inputs else (False, len(own) + computed.index(n)) for n in saved]


def _code(graph: GraphModule) -> Any:
    import torch._inductor

    return torch._inductor.compile(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
