"""Parts of a result: numbers with named axes, such as heads ("layer", "head", "token"), which nobody can overwrite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lrpx.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Part", "Parts"]

_NAME = re.compile(r"[^\W\d_][\w ./:-]*")


@dataclass(frozen=True, eq=False)
class Part:
    """One way to spread the explained value: a number for each place along some named axes.

    Two are equal when every field is, the values bit for bit.

    Args:
        name: what the numbers belong to, such as ``"tokens"`` or ``"heads"``; letters, digits, spaces, ``_./:-``.
        values: a number for each place, one dimension an axis, in the units of the explained value. They are copied,
            and the part's own cannot be written into: ``values.clone()`` gives numbers to work on.
        axes: the name of each dimension. ``"token"`` is the axis of the attribution's tokens, which
            :meth:`Attribution.words() <lrpx.Attribution.words>` sums over the tokens of a word.
        labels: for some of the axes, how each place along it is called.

    Raises:
        ResultError: the name, the axes or the labels do not fit the values, or the values are no floating-point tensor.

    >>> part = Part("heads", torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.5, 0.5]]), ("head", "token"))
    >>> part.shape
    {'head': 2, 'token': 3}
    >>> part.grouped("token", [(0, 1), (1, 3)]).values
    tensor([[1.0000, 6.0000],
            [0.5000, 1.0000]])
    >>> part.summed("token").values
    tensor([7.0000, 1.5000])
    """

    name: str
    values: Tensor
    axes: tuple[str, ...]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(init=False, repr=False)
    _kept: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise ResultError(f"a part is called {self.name!r}; pass a name, such as 'heads'")
        values = self.values
        if not isinstance(values, Tensor) or values.layout != torch.strided or not values.is_floating_point():
            raise ResultError(f"the values of part {self.name!r} are no floating-point tensor; pass one, not sparse")
        if values.element_size() < 2:  # float8 and less: torch cannot even add them up
            kind = str(values.dtype).removeprefix("torch.")
            raise ResultError(f"the values of part {self.name!r} are {kind}; pass float16 or wider")
        axes = self.axes if isinstance(self.axes, str) else tuple(self.axes)
        if isinstance(axes, str) or not all(map(_is_name, axes)):
            raise ResultError(f"the axes of part {self.name!r} are {axes!r}; pass a tuple of names: ('token',)")
        if not axes or len(axes) != values.ndim or len(set(axes)) != len(axes):
            raise ResultError(
                f"part {self.name!r} has {values.ndim} dimensions and the axes {axes}; name each dimension once"
            )
        sizes = dict(zip(axes, values.shape, strict=True))
        labels = {}
        for axis, names in dict(self.labels).items():
            if axis not in sizes:
                raise ResultError(f"part {self.name!r} has labels along {axis!r}; its axes are {', '.join(axes)}")
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ResultError(f"the labels of part {self.name!r} along {axis!r} are no texts; pass a list of them")
            if len(names) != sizes[axis]:
                raise ResultError(
                    f"part {self.name!r} has {len(names)} labels along {axis!r} for {sizes[axis]} places; "
                    "pass one for each"
                )
            labels[axis] = tuple(names)
        del self.__dict__["values"]  # they are read by __getattr__
        object.__setattr__(self, "_kept", frozen(values))
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "labels", MappingProxyType(labels))

    def __getattr__(self, name: str) -> Any:
        if name != "values":
            raise AttributeError(f"a part has no {name}")
        return frozen(self._kept)  # a copy, for what no tensor can refuse: dlpack, vmap, a pointer

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        described = (self.name, self.axes, self.labels, self._kept.dtype)
        return described == (other.name, other.axes, other.labels, other._kept.dtype) and torch.equal(
            self._kept, other._kept
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Part({self}, {str(self._kept.dtype).removeprefix('torch.')})"

    def __str__(self) -> str:
        return f"{self.name} [{' × '.join(f'{axis} {size}' for axis, size in self.shape.items())}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, (self.name, self.values.clone(), self.axes, dict(self.labels))

    @property
    def shape(self) -> dict[str, int]:
        """The number of places along each axis."""
        return dict(self._sizes)

    def grouped(self, axis: str, spans: Sequence[tuple[int, int]]) -> Part:
        """The same part with an axis summed over half-open ranges of it; their labels are joined.

        A part without that axis stays as it is.
        """
        if axis not in self.axes:
            return self
        at, values = self.axes.index(axis), self.values.clone()
        sums = [values.narrow(at, start, end - start).sum(at) for start, end in spans]
        none = values.narrow(at, 0, 0)
        labels = dict(self.labels)
        if axis in labels:
            labels[axis] = tuple("".join(labels[axis][start:end]) for start, end in spans)
        return Part(self.name, torch.stack(sums, at) if sums else none, self.axes, labels)

    def summed(self, axis: str) -> Part:
        """The same part without an axis, its places summed.

        Raises:
            ResultError: there is no such axis, or it is the only one.
        """
        if axis not in self.axes or len(self.axes) == 1:
            raise ResultError(f"part {self.name!r} has the axes {', '.join(self.axes)}; pass one of several")
        rest = {name: names for name, names in self.labels.items() if name != axis}
        kept = tuple(name for name in self.axes if name != axis)
        return Part(self.name, self.values.sum(self.axes.index(axis)), kept, rest)


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and _NAME.fullmatch(given) is not None


class Parts(Mapping[str, Part]):
    """The parts of a result by name, in order: ``a.parts["heads"].values``.

    Raises:
        ResultError: two parts have one name.

    >>> Parts([Part("tokens", torch.ones(2), ("token",))])
    Parts(tokens [token 2])
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        given = tuple(parts)
        if not all(isinstance(part, Part) for part in given):
            raise ResultError("what was passed is no list of parts; pass Part(name, values, axes) objects")
        self._parts = {part.name: part for part in given}
        if len(self._parts) != len(given):
            raise ResultError(f"two parts have one name in {', '.join(part.name for part in given)}; rename one")

    def __getitem__(self, name: str) -> Part:
        """The part of that name.

        Raises:
            ResultError: there is none.
        """
        if name not in self._parts:
            raise ResultError(f"there is no part {name!r}; this result has {', '.join(self._parts) or 'none'}")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"Parts({', '.join(map(str, self.values()))})"


# ------------------------------------------------------------------------ numbers that stay


class Frozen(Tensor):
    """A tensor that can be read like any other and not be written into.

    Whatever torch does with it is done with a copy, so that nothing can reach the numbers; and what would have changed
    the copy is an error, for else the change would be lost without a word. Results are plain tensors; views of it
    (``x[1:]``, ``x.T``, ``x.detach()``) are frozen as well, and so are NumPy arrays.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function on plain copies.

        Raises:
            ResultError: the function writes into a frozen tensor.
        """
        kwargs = {} if kwargs is None else kwargs
        copies: list[Tensor] = []
        look = func.__name__ in ("__get__", "data_ptr")  # these do not write, and of data_ptr a copy would be gone

        def copied(value: Any) -> Any:
            if isinstance(value, Frozen):
                value = Tensor.as_subclass(value, Tensor)
                if not look:
                    with torch.inference_mode(False):  # where a tensor knows how often it was changed
                        value = value.clone()
                copies.append(value)
            return value

        def kept(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.as_subclass(Frozen) if any(_shares(value, copy) for copy in copies) else value
            if type(value).__module__ == "numpy" and hasattr(value, "setflags"):
                value.setflags(write=False)
            return value

        if _is_written(func.__name__, args, kwargs):
            raise _refusal()
        with torch._C.DisableTorchFunctionSubclass():
            given = tree_map(copied, (args, dict(kwargs)))
            before = [copy._version for copy in copies]
            result = func(*given[0], **given[1])
            if [copy._version for copy in copies] != before:
                raise _refusal()
            return tree_map(kept, result)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """A copy as another kind of tensor; torch does not pass this method on either."""
        return self.clone().as_subclass(cls)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, like every other method that writes; torch does not pass this one on.

        Raises:
            ResultError: always.
        """
        raise _refusal()


def frozen(values: Tensor) -> Tensor:
    """A copy of a tensor, without its graph, that cannot be written into."""
    if isinstance(values, Frozen):
        values = Tensor.as_subclass(values, Tensor)
    with torch.inference_mode(False):
        return values.detach().clone().as_subclass(Frozen)


def _is_written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of that name writes into a frozen argument: ``x.mul_(2)``, ``x[0] = 5``, ``out=x``."""
    named = name in ("__setitem__", "__set__", "__delete__", "__ilshift__", "__irshift__")
    if named or (name.endswith("_") and not name.endswith("__")):
        first = args[0] if args else kwargs.get("input")
        return any(isinstance(each, Frozen) for each in (first if isinstance(first, list | tuple) else [first]))
    out = kwargs.get("out")
    return any(isinstance(each, Frozen) for each in (out if isinstance(out, list | tuple) else [out]))


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same memory."""
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    memory = one.untyped_storage().data_ptr()
    return memory != 0 and memory == other.untyped_storage().data_ptr()


def _refusal() -> ResultError:
    return ResultError("a result cannot be written into; work on a copy of its numbers: a.relevance.clone()")
