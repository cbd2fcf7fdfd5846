"""Things known by a name: the methods, the benchmarks, those of other packages and the user's own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from lrpx.errors import LRPxError

T = TypeVar("T")

BROUGHT: dict[int, tuple[object, str]] = {}
"""By ``id``: what other packages have brought, each with the module of their entry point. The thing is kept, so that no
other gets its id."""


class Registry(Mapping[str, T], Generic[T]):
    """Things by name, in the order they were registered.

    Packages add theirs by an entry point in ``group``; they are loaded when the registry is first read, so that an
    import stays quick, and one that cannot be loaded is a warning, not the end.

    Args:
        kind: what is in it, for messages: ``"method"``.
        error: what is raised when a name is taken or unknown.
        group: the group of entry points, such as ``"lrpx.methods"``.

    >>> from lrpx.errors import MethodError
    >>> numbers = Registry[int]("number", MethodError)
    >>> numbers.add("one", 1)
    >>> numbers["one"], list(numbers)
    (1, ['one'])
    >>> numbers
    <the numbers one>
    >>> numbers["two"]
    Traceback (most recent call last):
    ...
    lrpx.errors.MethodError: there is no number 'two'; the numbers are one
    """

    def __init__(self, kind: str, error: type[LRPxError], group: str | None = None) -> None:
        self._kind = kind
        self._error = error
        self._group = group
        self._found: dict[str, T] = {}
        self._origins: dict[str, str] = {}

    def add(self, name: str, thing: T, origin: str = "") -> None:
        """Register a thing; what the same file registers again, as when it is run again, or imported by another name,
        takes its own place.

        Args:
            name: how it is asked for.
            thing: the thing.
            origin: the module that registers it.

        Raises:
            LRPxError: another file's has the name.
        """
        origin = getattr(sys.modules.get(origin), "__file__", None) or origin
        if name in self._found and (not origin or self._origins[name] != origin):
            raise self._error(f"there is a {self._kind} {name!r} already; give yours another name")
        self._found[name], self._origins[name] = thing, origin

    @property
    def origins(self) -> Mapping[str, str]:
        """The file, or the module where it has none, that has registered each thing; by the thing's name."""
        return self._origins

    def __getitem__(self, name: str) -> T:
        self._load()
        try:
            return self._found[name]
        except (KeyError, TypeError):
            listed = ", ".join(self._found)
            raise self._error(f"there is no {self._kind} {name!r}; the {self._kind}s are {listed}") from None

    def get(self, name: Any, default: Any = None) -> Any:
        """The thing of that name, or the default."""
        self._load()
        return self._found.get(name, default)

    def __contains__(self, name: object) -> bool:
        self._load()
        return isinstance(name, str) and name in self._found

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._found)

    def __repr__(self) -> str:
        return f"<the {self._kind}s {', '.join(self)}>"

    def __len__(self) -> int:
        self._load()
        return len(self._found)

    def _load(self) -> None:
        """What other packages bring; what they load registers itself."""
        group, self._group = self._group, None
        for entry in () if group is None else metadata.entry_points(group=group):
            before = dict(self._found)
            try:
                entry.load()
            except Exception as error:
                package = "a package" if entry.dist is None else entry.dist.name
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"the {self._kind} {entry.name!r} of {package} cannot be loaded ({reason})", stacklevel=3)
            top = entry.module.partition(".")[0]
            modules = [each for name, each in sys.modules.copy().items() if name.partition(".")[0] == top]
            files = {getattr(each, "__file__", None) for each in modules}
            for name, thing in self._found.items():
                if thing is not before.get(name) or self._origins[name] in files:  # or it was imported already
                    BROUGHT[id(thing)] = thing, entry.module
                    if type(thing).__module__.partition(".")[0] == top:
                        BROUGHT[id(type(thing))] = type(thing), entry.module
