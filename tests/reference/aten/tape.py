"""What a model computes, as a list of ATen calls on values that never change.

``torch.utils._python_dispatch`` shows every call below autograd, where only ATen is left. (``make_fx`` is built on the
same place; it cannot follow a model that asks its own numbers for the way, as a mixture of experts does.)

A call that writes into memory becomes a call that makes a new value, by following memory itself: a tensor is a
place in a storage (offset, sizes, strides), and after a write the places that overlap it are read from the new
content.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PLACED = frozenset("detach detach_ alias lift_fresh as_strided as_strided_ squeeze_ unsqueeze_ transpose_ t_".split())
"""Operations that give a place in memory and nothing else."""


class JudgeError(Exception):
    """The judge cannot say: it names the operation that it has no formula for."""


class Value:
    """A tensor at one moment; a constant if no call made it."""

    __slots__ = ("node", "number", "tensor")

    def __init__(self, tensor: Tensor, node: Node | None = None, number: int = 0) -> None:
        self.tensor, self.node, self.number = tensor, node, number

    @property
    def index(self) -> int:
        """Where on the tape it was made; -1 for a constant."""
        return -1 if self.node is None else self.node.index

    def __repr__(self) -> str:
        return f"<{'constant' if self.node is None else self.node} {list(self.tensor.shape)}>"


@dataclass(eq=False)
class Node:
    """A call: ``name`` as in ``"mul"``, ``args`` with a :class:`Value` for every tensor."""

    index: int
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Value] = field(default_factory=list)

    @property
    def values(self) -> list[Value]:
        """Those that depend on a source."""
        return [v for v in tree_iter((self.args, self.kwargs)) if isinstance(v, Value) and v.node is not None]

    def __repr__(self) -> str:
        return f"{self.index}:{self.name}"


@dataclass(eq=False)
class Source:
    """A place where the input enters: a lookup in an embedding's table, or a floating-point argument."""

    value: Value
    ids: Tensor | None


class Tape(TorchDispatchMode):
    """Records what depends on the sources; made by :func:`record`."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.sources: list[Source] = []
        self._memory: dict[int, _Memory] = {}
        self._constants: dict[int, tuple[Any, list[Value]]] = {}

    # ---------------------------------------------------------------- what is asked

    def add_source(self, tensor: Tensor, ids: Tensor | None = None) -> None:
        """From here on what depends on this tensor is recorded."""
        node = self._node("source", torch.clone, (), {})
        self.sources.append(Source(self._made(node, 0, tensor), ids))

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor at this moment."""
        memory = self._memory.get(_storage(tensor))
        if memory is None:
            found = Value(tensor)
            storage = tensor.untyped_storage()
            self._constants.setdefault(storage._cdata, (storage, []))[1].append(found)
            return found
        place = _place(tensor)
        if place not in memory.places:
            memory.places[place] = self._read(memory, tensor)
        return memory.places[place]

    # ------------------------------------------------------------------ the recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in PLACED:
            return func(*args, **kwargs)  # another place in the same memory, which is read where it is used
        written = _written(func, args, kwargs)
        depends = any(isinstance(t, Tensor) and _storage(t) in self._memory for t in tree_iter((args, kwargs)))
        if written:
            return self._write(func, name, written, args, kwargs, depends)
        outputs = func(*args, **kwargs)
        if depends:
            self._call(func, name, args, kwargs, outputs)
        elif name == "embedding":
            self.add_source(outputs, args[1])
        elif name in ("_embedding_bag", "_embedding_bag_forward_only"):
            self.add_source(outputs[0], args[1])
        return outputs

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, outputs: Any) -> None:
        made = [outputs] if isinstance(outputs, Tensor) else outputs
        if name.endswith("_like") or name.startswith("new_"):
            return  # of the shape alone
        if not isinstance(made, (list, tuple)) or not any(_can_carry(t) for t in made):
            return
        node = self._node(name, func, *self._held(args, kwargs))
        for number, tensor in enumerate(made):
            if isinstance(tensor, Tensor) and _can_carry(tensor):
                self._made(node, number, tensor)
            else:
                node.outputs.append(Value(tensor))

    def _write(self, func: Any, name: str, written: list[Tensor], args: Any, kwargs: Any, depends: bool) -> Any:
        """A call that writes: the same call without, and a new content of the memory."""
        if not depends:
            for tensor in written:
                self._keep(tensor)
            return func(*args, **kwargs)
        if len(written) != 1 or not _can_carry(written[0]):
            raise JudgeError(f"{name} writes into {len(written)} tensors of {[t.dtype for t in written]}")
        target = written[0]
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = getattr(packet, func._overloadname, None)
        held = self._held(args, kwargs)
        if name == "copy_":
            name, overload, held = "copied", _copied, ((held[0][1], tuple(target.shape), target.dtype), {})
        elif name in ("zero_", "fill_"):
            name, overload, held = "filled", _filled, (tuple(each for each in held[0][1:]), {})
        elif overload is None or not name.endswith("_"):
            raise JudgeError(f"{name}.{func._overloadname} writes, and has no twin that does not")
        before = self._content(target)
        self._keep(target)
        result = func(*args, **kwargs)
        after = target.detach().clone()
        node = self._node(name.removesuffix("_"), overload, *held)
        node.outputs = [Value(after, node)]
        memory = self._memory[_storage(target)]
        if _covers(target):
            memory.write(target, node.outputs[0])
        else:
            where = _indices(target)
            content = self._node("write", _write_flat, (before, where, node.outputs[0]), {})
            content.outputs = [Value(_write_flat(before.tensor, where, after), content)]
            memory.fill(content.outputs[0])
        return result

    # ----------------------------------------------------------------------- memory

    def _content(self, tensor: Tensor) -> Value:
        """All of a tensor's storage as one flat value; the storage is followed from here on."""
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = _Memory(storage)
            memory.fill(Value(_flat(tensor).clone()))
        if memory.content is None:
            assert memory.root is not None
            where, value = memory.root
            node = self._node("flat", _flat_of, (value, where, len(_flat(tensor))), {})
            node.outputs = [Value(_flat_of(value.tensor, where, len(_flat(tensor))), node)]
            memory.content = node.outputs[0]
        return memory.content

    def _read(self, memory: _Memory, tensor: Tensor) -> Value:
        content = self._content(tensor)
        if content.tensor.dtype != tensor.dtype:
            raise JudgeError(f"memory of {content.tensor.dtype} is read as {tensor.dtype}")
        where = _indices(tensor)
        while content.node is not None and content.node.name == "write":  # what was written elsewhere is no matter
            before, written, value = content.node.args
            if written.shape == where.shape and torch.equal(written, where):
                return value
            if torch.isin(where.reshape(-1), written.reshape(-1)).any():
                break
            content = before
        node = self._node("read", _read_flat, (content, where), {})
        node.outputs = [Value(_read_flat(content.tensor, where), node)]
        return node.outputs[0]

    def _keep(self, tensor: Tensor) -> None:
        """Before memory is written: what was seen of it keeps its numbers."""
        storage = _storage(tensor)
        if storage in self._memory:
            for value in self._memory[storage].seen:
                value.tensor = value.tensor.clone()
            self._memory[storage].seen = []
        if storage in self._constants:
            for value in self._constants.pop(storage)[1]:
                value.tensor = value.tensor.clone()

    def _made(self, node: Node, number: int, tensor: Tensor) -> Value:
        value = Value(tensor.detach(), node, number)
        node.outputs.append(value)
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = _Memory(storage)
            if _covers(tensor):
                memory.root = (_indices(tensor), value)
            else:
                self._constants.pop(storage._cdata, None)
                content = self._node("write", _write_flat, (Value(_flat(tensor).clone()), _indices(tensor), value), {})
                content.outputs = [Value(_flat(tensor).clone(), content)]
                memory.content = content.outputs[0]
        memory.places[_place(tensor)] = value
        memory.seen.append(value)
        return value

    # ------------------------------------------------------------------------ small

    def _held(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(lambda t: self.value(t) if isinstance(t, Tensor) else t, (tuple(args), dict(kwargs)))

    def _node(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Node:
        self.nodes.append(Node(len(self.nodes), name, func, args, kwargs))
        return self.nodes[-1]


class _Memory:
    """A storage that holds what depends on a source: its values by place, and its content once it was written."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage  # alive, so that no other gets its address
        self.places: dict[Any, Value] = {}
        self.seen: list[Value] = []
        self.root: tuple[Tensor, Value] | None = None
        self.content: Value | None = None

    def write(self, tensor: Tensor, value: Value) -> None:
        self.places, self.content, self.root = {_place(tensor): value}, None, (_indices(tensor), value)

    def fill(self, content: Value) -> None:
        self.places, self.content, self.root = {}, content, None


def _copied(source: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return source.to(dtype).expand(shape)


def _filled(*number: Any) -> Tensor:
    raise JudgeError("no formula for a fill with what depends on the input")


def _read_flat(content: Tensor, where: Tensor) -> Tensor:
    return content[where]


def _write_flat(content: Tensor, where: Tensor, value: Tensor) -> Tensor:
    return content.index_put((where,), value)


def _flat_of(value: Tensor, where: Tensor, length: int) -> Tensor:
    return value.new_zeros(length).index_put((where,), value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: Tensor) -> Any:
    return (
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_neg(),
        tensor.is_conj(),
    )


def _flat(tensor: Tensor) -> Tensor:
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((length,), (1,), 0)


def _indices(tensor: Tensor) -> Tensor:
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.arange(length).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and (
        tensor.numel() < 2 or len(_indices(tensor).unique()) == tensor.numel()
    )


def _can_carry(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_iter(value) if isinstance(t, Tensor)]
    return found


# ------------------------------------------------------------------------------- runs


class _Wide(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        swap = {torch.float32: torch.float64}
        args, kwargs = tree_map(
            lambda v: swap[v] if isinstance(v, torch.dtype) and v in swap else v, (args, kwargs or {})
        )
        return func(*args, **kwargs)


class _Detached(TorchFunctionMode):
    """What a model itself detaches is a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "detach":
            with _disable_current_modes():
                return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def wide() -> Iterator[None]:
    """What a model casts to float32 stays in float64, and so does what it makes of nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def record(floating: list[Tensor]) -> Iterator[Tape]:
    """Record what runs inside on these floating-point inputs and on what embeddings look up.

    Attention runs as the products and the softmax that it is, and no fused encoder layer is taken.
    """
    tape = Tape()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            for tensor in floating:
                tape.add_source(tensor)
            with tape, _Detached():
                yield tape
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
