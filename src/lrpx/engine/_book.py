"""The ledger while it is being written: constants become leaves, and rules that do not conserve are measured."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import Parameter

from lrpx import rules
from lrpx.engine import _notes
from lrpx.engine._learned import JOINS, is_of_image
from lrpx.engine._places import place_of_tokens
from lrpx.engine._taps import Tap
from lrpx.engine._tensors import (
    CONSTANT,
    FROM_INPUT,
    any_carries,
    arguments,
    carries,
    constants,
    first,
    is_in_place,
    tensors_in,
    whole_of,
)
from lrpx.ledger import Entry, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from lrpx.engine._operation import Operation
    from lrpx.engine._places import Source
    from lrpx.engine._taps import Call, Running
    from lrpx.rules import Rule

CONSERVING = (rules.constant, rules.uniform, rules.signal_take_all)
"""Rules that hand on exactly what they are given, whatever the operation."""

NAME = "_lrpx_name"
"""The attribute of a constant that was made of a named one."""

RESIDUES = {"softmax": "softmax residue", "constants": "constants"}
"""The kind of entry that measuring an operation of a kind gives, if not a rule's residue."""

PADDING = ("pad", "constant_pad_nd", "_pad_packed_sequence", "alpha_dropout", "feature_alpha_dropout")
"""Operations that put a number beside their input, which cannot be a tensor."""


class Book(Tap):
    """Collects the entries of one run.

    Args:
        model: whose parameters and buffers give the entries their names.
    """

    def __init__(self, model: Module) -> None:
        self._run: Running
        self._model = model
        self._names: dict[int, tuple[bool, str]] = {}
        for is_parameter, named in ((False, model.named_buffers()), (True, model.named_parameters())):
            self._names |= {storage_of(tensor): (is_parameter, path) for path, tensor in named}
        self._names.pop(0, None)
        self._leaves: list[tuple[Line, Tensor]] = []
        self._unsummed: dict[int, Tensor] = {}
        self._fresh: list[Tensor] = []
        self._joins_image = False
        self._measured: list[tuple[Line, Tensor, Tensor]] = []
        self._count = 0

    def begin(self, run: Running) -> None:
        """The run that it is the book of."""
        self._run = weakref.proxy(run)  # which holds this: no circle, so that memory is given back at once
        self._sources = run.sources

    def leaves(self) -> list[Tensor]:
        """Every constant that was added to what depends on the input, as a leaf of the graph."""
        return [leaf for _, leaf in self._leaves]

    def _line(self, kind: str, name: str) -> Line:
        """An entry of this kind and name, at the place that the model has reached."""
        self._count += 1
        return Line((len(self._sources), self._count), kind, name)

    # -------------------------------------------------------------------------- constants

    def added(self, value: Any, operation: str) -> Any:
        """``value``, when it is a constant, as a leaf whose relevance is an entry."""
        return self._added(value, operation, torch.float64)

    def _added(self, value: Any, operation: str, dtype: torch.dtype) -> Any:
        """The same; a number gets the dtype."""
        if type(value) in (list, tuple):
            return type(value)(self.added(each, operation) if isinstance(each, Tensor) else each for each in value)
        if not isinstance(value, (Tensor, int, float)):
            return value
        if not isinstance(value, Tensor):
            return self._leaf(torch.tensor(value, dtype=dtype), value, operation) if value else value
        constant = isinstance(value, Parameter) or not value.requires_grad
        known = value.is_floating_point() or value.is_complex()
        if not (constant and known):
            return value
        # zeros are worth nothing, and what meets them is known by that: as a leaf a ReLU's other side would be no zero
        return self._leaf(value, value, operation) if bool(value.any()) else constants(value)

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """An operation that needs no rule, the constants among its summands as leaves; any other as it is."""
        out = self._around(call, proceed)
        self.added_to(out)
        return out

    def _around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        args, kwargs, row = call.args, call.kwargs, call.operation
        if not torch.is_grad_enabled():
            out = proceed(args, kwargs)
            self.inherit(out, (*args, *kwargs.values()))
            return out
        if row is None or row.kind != "plain" or call.name == "__get__":
            return proceed(args, kwargs)
        if call.name in PADDING:
            x, rest, kwargs = first(args, kwargs)
            return self._watched("constants", lambda x: proceed((x, *rest), kwargs), (x,))
        out = proceed(*self._operands(call.name, row, args, kwargs))
        self.inherit(out, args)
        return out

    def _operands(
        self, name: str, row: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not row.has_summands or not any_carries((*args, *kwargs.values())):
            return tuple(args), dict(kwargs)
        if name in JOINS and not self._run.replaying:
            rows = [x for x in tensors_in((args, tuple(kwargs.values()))) if carries(x)]
            self._joins_image = any(is_of_image(x, self._sources) for x in rows)
        if name in ("scatter", "scatter_"):
            args, kwargs = _one_source(args, kwargs)
        if name in CASTS:
            into = args[0] if args else kwargs["input"]
            args = [_cast(x, into) if i == CASTS[name] else x for i, x in enumerate(args)]
            kwargs = {key: _cast(x, into) if key in ("value", "src") else x for key, x in kwargs.items()}
        if name in WRITES:
            args = self._written_once(name, args, kwargs)
        is_sum = row.numbers == (1,)
        numbers = (0,) if is_sum and args and not isinstance(args[0], Tensor) else row.numbers  # torch.sub(1, x)
        # a sum takes a number in the widest precision, anything else in the tensor's own
        dtype = torch.float64 if is_sum else next((x.dtype for x in args if carries(x)), torch.float64)
        lifted: list[Any] = [
            self._added(value, name, dtype) if i in numbers or not isinstance(value, (int, float)) else value
            for i, value in enumerate(args)
        ]
        if is_sum or name in MIXED:  # these take integers and truth values too
            dtype = next(x.dtype for x in tensors_in((args, tuple(kwargs.values()))) if carries(x))
            lifted = [self._as_number(x, name, dtype) for x in lifted]
        if is_in_place(name) and isinstance(args[0], Tensor):
            lifted[0] = args[0]
            whole = whole_of(args[0])
            if not any_carries(whole) and whole.is_floating_point() and whole.any():
                # its constant content becomes an entry: the same values, with a leaf behind them
                whole.copy_(self.added(whole.clone(), name))
                _ = args[0].grad_fn  # a view of it gets its place in the graph when it is asked for
        named = {
            key: self._added(value, name, dtype)
            if not isinstance(value, (int, float)) or (numbers and key in ("other", "value"))
            else value
            for key, value in kwargs.items()
        }
        return tuple(lifted), named

    def _as_number(self, value: Any, name: str, dtype: torch.dtype) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._as_number(each, name, dtype) for each in value)
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
            return value
        if name == "where" and value.dtype is torch.bool:  # the condition
            return value
        return self.added(value.to(dtype), name)

    def _written_once(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments of what writes a constant at indices, where some are the same: what stands there in the end,
        which each of them then has an even share of, for autograd would count it as often as it was written."""
        where, place = WRITES[name]
        source = args[place] if place < len(args) else None
        if (
            not isinstance(source, Tensor)
            or any_carries(source)
            or kwargs.get("accumulate", args[place + 1 :] == (True,))
        ):
            return args
        x, index = args[0], args[where:place]
        if all(each.dtype is torch.bool for each in tensors_in(index)):  # or slices: no place comes twice
            return args
        numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
        try:
            at = READS[name](numbers, *index)
        except (RuntimeError, IndexError, TypeError):  # which the operation itself will raise
            return args
        times = at.flatten().bincount(minlength=1)[at] if at.numel() else at
        if not bool((times > 1).any()):
            return args
        last = numbers.new_empty(numbers.numel(), dtype=source.dtype)
        last[at] = source.detach().expand(at.shape)
        leaf = self.added(last[at], name)
        return (*args[:place], rules.with_gradient_of(leaf.detach(), leaf / times), *args[place + 1 :])

    def _leaf(self, constant: Tensor, named_by: Any, operation: str) -> Tensor:
        leaf = constant.detach().requires_grad_()
        setattr(leaf, CONSTANT, True)
        if hasattr(constant, FROM_INPUT):
            setattr(leaf, FROM_INPUT, getattr(constant, FROM_INPUT))
        _notes.stands_for(leaf, constant)
        if self._run.replaying:
            return leaf
        is_parameter, name = self._name(named_by, operation)
        otherwise = "biases" if is_parameter else "constants"
        kind = otherwise if is_parameter and self._has_weight(name) else place_of_tokens(name, otherwise)
        if constant.ndim == 3 and any(source.ids is None for source in self._sources):  # beside the tokens of an image
            kind = "class token" if operation in JOINS and self._joins_image else kind
        self._leaves.append((self._line(kind, name), leaf))
        self._fresh.append(leaf)
        return leaf

    def _has_weight(self, name: str) -> bool:
        """Whether a parameter is the bias of a layer with a weight, as of a convolution that makes positions of what
        it is given."""
        path, _, last = name.rpartition(".")
        return last == "bias" and hasattr(self._model.get_submodule(path), "weight")

    def added_to(self, out: Any) -> None:
        """The constants that were taken up since the last call went into ``out``.

        A bias is added in every row, so its gradient is a sum over rows; how exact that is, only the rows can tell.
        (The bias of the keys adds the same to every score that a softmax sees: the rows sum to zero, but for rounding.)
        """
        fresh, self._fresh = self._fresh, []
        if isinstance(out, Tensor) and out.requires_grad:
            for leaf in fresh:
                self._see_rows(out, leaf)

    def _see_rows(self, out: Tensor, leaf: Tensor) -> None:
        shapes = zip(reversed(leaf.shape), reversed(out.shape), strict=False)
        if leaf.shape == out.shape or leaf.ndim > out.ndim or not all(size in (1, rows) for size, rows in shapes):
            return

        def record(gradient: Tensor) -> None:
            self._unsummed[id(leaf)] = rounding(leaf.detach(), gradient, coarsest(leaf, gradient))

        out.register_hook(record)  # type: ignore[no-untyped-call]

    def name_of(self, value: Tensor, operation: str) -> str:
        """What an entry of a constant is called: by the parameter or buffer that it is, or is made of."""
        return self._name(value, operation)[1]

    def _name(self, value: Any, operation: str) -> tuple[bool, str]:
        return self._known(value) or (isinstance(value, Parameter), f"{operation.strip('_')} in {self._run.where()}")

    def _known(self, value: Any) -> tuple[bool, str] | None:
        known = getattr(value, NAME, None) or self._names.get(storage_of(value))
        if known is None and isinstance(value, Parameter):  # loaded for this call only, as where a model is offloaded
            known = next(((True, path) for path, each in self._model.named_parameters() if each is value), None)
        return known

    def inherit(self, out: Any, made_of: Iterable[Any]) -> None:
        """A constant made of one named constant alone, such as the positions looked up in a table, keeps its name."""
        if isinstance(out, Tensor) and not out.requires_grad and self._known(out) is None:
            floating = [x for x in made_of if isinstance(x, Tensor) and x.is_floating_point()]
            if len(floating) == 1 and (name := self._known(floating[0])) is not None:
                setattr(out, NAME, name)

    # --------------------------------------------------------------------------- residues

    def rule(
        self, kind: str, rule: Rule, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        """``rule(op, *inputs)``, and what enters the operation backwards less what leaves it as an entry."""
        if (
            self._run.replaying
            or any(rule is each for each in CONSERVING)
            or (rule is rules.unmodified and kind in ("linear", "convolution"))
        ):
            return proceed(*inputs)
        if rule is rules.identity:
            return self._identity(proceed, inputs[0])
        return self._watched(kind, proceed, inputs)

    def _watched(self, kind: str, proceed: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        if self._run.replaying:
            return proceed(*inputs)
        seen = [_apart(x) for x in inputs]
        y = proceed(*seen)
        self._residue(kind, y, seen)
        return y

    def _residue(self, kind: str, y: Any, seen: Sequence[Any]) -> None:
        """What enters an operation of a kind backwards at ``y``, less what leaves it at its inputs, as an entry.

        ``y`` may be many tensors, or what is none. The inputs must go into this operation only: views of the tensors
        that others see too.
        """
        made = [each for each in tensors_in(y) if carries(each) and each.layout is torch.strided]
        if made and not self._run.replaying:
            # with several inputs a softmax is fused with two products, which the residue is of if they do not conserve
            fused = len(seen) > 1 and self._run.recipe.matmul not in CONSERVING
            named = "rule residue" if fused else RESIDUES.get(kind, "rule residue")
            line = self._line(named, f"{kind} in {self._run.where()}")
            carrying = [x for x in tensors_in(seen) if carries(x)]
            dtype = coarsest(*made, *carrying)
            for each in made:
                self._measure(line, each, 1, dtype)
            for x in carrying:
                self._measure(line, x, -1, dtype)

    def _identity(self, proceed: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Under the identity rule an output is a constant where its input is next to zero."""
        y = proceed(x)
        constant = rules.is_steep(y.detach(), x.detach())
        if bool(constant.any()):
            line = self._line("constants", f"activation at zero in {self._run.where()}")
            self._measure(line, y, 1, coarsest(y, x), constant)
        return y

    def _measure(
        self, line: Line, x: Tensor, sign: int, dtype: torch.dtype, only: Tensor | None = None
    ) -> RemovableHandle:
        value = x.detach().clone()

        def record(gradient: Tensor | None) -> None:
            if gradient is None:  # nothing arrives at one of many results
                return
            gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            x, dx = (value, gradient) if only is None else (value[only], gradient[only])
            terms = relevance(x, dx)
            self._measured.append((line, sign * terms.sum(), rounding(x, dx, dtype, terms)))

        return x.register_hook(record)  # type: ignore[no-any-return, no-untyped-call]

    @contextmanager
    def backward(self, value: Tensor, outputs: Tensor | None) -> Iterator[None]:
        """One backward pass from ``value``, whose measurements take the place of an earlier one's.

        ``outputs``: what it was computed from, if the target itself may keep something (a log-probability's
        normaliser).
        """
        self._measured.clear()
        if outputs is None or not outputs.requires_grad:
            yield
            return
        line, dtype, kept = self._line("rule residue", "target"), coarsest(value, outputs), value.detach()
        self._measured.append((line, kept.double().sum(), rounding(kept, torch.ones_like(kept), dtype)))
        handle = self._measure(line, outputs, -1, dtype)
        try:
            yield
        finally:
            handle.remove()

    # ------------------------------------------------------------------------- conclusion

    def close(
        self,
        explained: float,
        sources: Iterable[tuple[Source, Tensor]],
        gradients: Mapping[int, Tensor],
        tokens: Collection[str] | None,
        positions: Sequence[tuple[Line, Tensor]] = (),
    ) -> Ledger:
        """The ledger, entries of one kind and name summed, where the model first reached them.

        What is no more than its own rounding is no entry: whether it is zero, only exact arithmetic could tell.

        Args:
            explained: the explained value.
            sources: each source with its relevance.
            gradients: the gradient of each leaf, by ``id``.
            tokens: the paths of the token embeddings, if there are any; None where they are not known.
            positions: leaves that are positions.
        """
        lines = [
            (Line((number, 0), _kind_of_source(source, tokens), source.paths[0]), r.double().sum(), torch.zeros(()))
            for number, (source, r) in enumerate(sources, 1)
        ]
        for line, leaf in (*self._leaves, *positions):
            if id(leaf) in gradients:
                gradient = gradients[id(leaf)]
                error = self._unsummed.get(id(leaf))
                if error is None:
                    error = rounding(leaf.detach(), gradient, coarsest(leaf, gradient))
                value = relevance(leaf.detach(), gradient).sum()
                if not abs(value) <= error:  # a mask's error would hide all that has its name
                    lines.append((line, value, error))
        sums: dict[tuple[str, str], tuple[float, float]] = {}
        for line, value, error in sorted((*lines, *self._measured), key=lambda each: each[0].place):
            before = sums.get((line.kind, line.name), (0.0, 0.0))
            sums[line.kind, line.name] = before[0] + float(value), before[1] + float(error)
        found = (Entry(kind, name, value) for (kind, name), (value, error) in sums.items() if not abs(value) <= error)
        return Ledger(tuple(found), explained)


class Line(NamedTuple):
    """What an entry is called, and its place in the forward pass: sources before it, and lines before it."""

    place: tuple[int, int]
    kind: str
    name: str


def rounding(value: Tensor, gradient: Tensor, dtype: torch.dtype, terms: Tensor | None = None) -> Tensor:
    """How far from zero a sum of ``x ⊙ ∂x`` (``terms``, if they are there already), computed in a dtype, may be if in
    exact arithmetic it is zero.

    Each gradient was rounded to its dtype, with errors of up to ``ε/2 |x ∂x|`` that are independent: ``ε ‖x ⊙ ∂x‖₂``
    is 3.5 standard deviations of their sum; the least that a dtype can hold is lost whatever the size. And each is
    itself a sum of as many numbers ``n`` as the tensor is long, in the dtype or, where that is a half, in float32: such
    sums lose ``ε √n ‖x ⊙ ∂x‖₁`` at most (Higham and Mary 2019, Theorem 3.1, with twice the unit roundoff).
    """
    terms, narrow = relevance(value, gradient) if terms is None else terms, torch.finfo(dtype)
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    found: Tensor = narrow.eps * vector_norm(terms) + wide.eps * max(terms.shape, default=1) ** 0.5 * vector_norm(
        terms, 1
    )
    if narrow.tiny > LEAST:
        found += narrow.eps * narrow.tiny * vector_norm(torch.where(gradient == 0, 0.0, value.abs().double()), 1)
    return found


LEAST = 1e-30
"""A dtype whose least number is below this loses nothing to it that a ledger could show."""


def coarsest(*tensors: Tensor) -> torch.dtype:
    """The dtype of the tensors that rounds most."""
    return max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)


def relevance(value: Tensor, gradient: Tensor) -> Tensor:
    """``x ⊙ ∂x`` in float64; 0 where the gradient is, for a mask holds infinities."""
    if value.is_complex():
        value, gradient = (torch.view_as_real(each.resolve_conj()) for each in (value, gradient))
    value, gradient = (x.to_dense() if x.layout is not torch.strided else x for x in (value, gradient))
    gradient = gradient.double()
    return torch.where(gradient == 0, 0.0, value.double() * gradient)


MIXED = frozenset("maximum minimum fmax fmin where cat concat concatenate stack hstack vstack dstack".split())
"""What puts tensors of several dtypes together."""

CASTS = {
    "__setitem__": 2,
    "copy_": 1,
    "masked_fill": 2,
    "masked_fill_": 2,
    "index_fill": 3,
    "index_fill_": 3,
    "select_scatter": 1,
    "slice_scatter": 1,
    "diagonal_scatter": 1,
}
"""What writes integers and truth values as numbers: where that is which is written, among its arguments."""

WRITES = {
    "scatter": (1, 3),
    "scatter_": (1, 3),
    "index_copy": (1, 3),
    "index_copy_": (1, 3),
    "index_put": (1, 2),
    "index_put_": (1, 2),
    "__setitem__": (1, 2),
    "put": (1, 2),
    "put_": (1, 2),
}
"""What writes at indices: where these begin among its arguments, and where that is which is written."""

READS: dict[str, Callable[..., Tensor]] = {
    "scatter": torch.gather,
    "index_copy": torch.index_select,
    "index_put": lambda x, index: x[tuple(index)],
    "__setitem__": lambda x, index: x[index],
    "put": torch.take,
}
READS |= {f"{name}_": function for name, function in READS.items()}
"""What reads where these write."""


def _cast(value: Any, into: Tensor) -> Any:
    """What is written into a tensor, as the numbers that then stand there: those of an integer count, too."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return value
    return value.to(into.dtype)


def _one_source(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a scatter by place; a number among them as the tensor it stands for."""
    x, dim, index, source = arguments(tuple(args), dict(kwargs), "input", "dim", "index", "src")
    source = kwargs.get("value") if source is None else source
    if not isinstance(source, Tensor):
        source = torch.tensor(source, dtype=x.dtype).expand(index.shape)
    source = source[tuple(slice(size) for size in index.shape)]
    return (x, dim, index, source), {key: value for key, value in kwargs.items() if key == "reduce"}


def _apart(value: Any) -> Any:
    """The same value, the tensors in it that depend on the input as views of their own."""
    if type(value) in (tuple, list):
        return type(value)(map(_apart, value))
    seen = carries(value) and not isinstance(value, Parameter) and value.layout is torch.strided
    return value.view_as(value) if seen else value


def storage_of(tensor: Any) -> int:
    """The address of a tensor's memory, by which a slice of a parameter still has the parameter's name."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor subclass without storage of its own
        return 0


def _kind_of_source(source: Source, tokens: Collection[str] | None) -> str:
    if tokens is not None and not set(tokens).isdisjoint(source.paths):
        return "tokens"
    if source.ids is None:
        return "tokens" if "embeds" in source.paths[0] else "inputs"
    return place_of_tokens(source.paths[0], "tokens" if tokens is None else "inputs")
