"""Units ranked by their relevance: the result, which can be read, saved and shown."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from lrpx._files import checksum, kept, write_text
from lrpx.attribution import Explained, Provenance, dataframes
from lrpx.errors import ResultFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MeanUnit", "Ranking", "Unit"]

FORMAT = 2
_CHECKSUM = "sha256"


@dataclass(frozen=True)
class Unit:
    """One unit at one position.

    Args:
        layer: the number of its layer.
        unit: its number in the layer, from 0; 0 for a whole layer or branch.
        position: of the token, from 0.
        token: the token's text.
        activation: what stood there; the length of the vector for a unit of several features.
        relevance: in the units of the explained value.
        share: the relevance as a share of the explained value; None where that is zero.
        path: the module at whose input or output it was read; with ``#2``, in its third call.
    """

    layer: int
    unit: int
    position: int
    token: str
    activation: float
    relevance: float
    share: float | None
    path: str


@dataclass(frozen=True)
class MeanUnit:
    """One unit over several texts; its relevance in a text is the sum over the positions.

    Args:
        layer: the number of its layer.
        unit: its number in the layer.
        mean: the mean over the texts; or, of two sets of them, the first's mean less the second's.
        low, high: the ends of its 95 % bootstrap interval, for this unit alone: of the most relevant of many, it is
            partly by chance that they are.
        total: the sum over the texts of the first set.
        path: the module at whose input or output it was read; with ``#2``, in its third call.
    """

    layer: int
    unit: int
    mean: float
    low: float
    high: float
    total: float
    path: str


@dataclass(frozen=True)
class Ranking:
    """The most relevant units, the largest absolute relevance first.

    Args:
        kind: what they are, one of :data:`lrpx.units.KINDS`.
        rows: a :class:`Unit` each; or a :class:`MeanUnit`, over several texts.
        count: among how many they were ranked.
        explained: what was explained, of one text.
        texts: how many texts; of two sets, both numbers.
        provenance: model, recipe, versions, precision.
    """

    kind: str
    rows: tuple[Unit, ...] | tuple[MeanUnit, ...]
    count: int
    explained: Explained | None
    texts: tuple[int, ...]
    provenance: Provenance

    _KINDS: ClassVar = {"Unit": Unit, "MeanUnit": MeanUnit}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __getitem__(self, at: int) -> Any:
        return self.rows[at]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's values, in order."""
        return tuple(field.name for field in fields(self.rows[0])) if self.rows else ()

    def to_dataframe(self) -> Any:
        """A row a unit, as a table of polars or else pandas.

        Raises:
            MissingExtraError: neither is installed.
        """
        return dataframes().DataFrame({name: [getattr(row, name) for row in self.rows] for name in self.columns})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"format": FORMAT, "rows of": type(self.rows[0]).__name__ if self.rows else "Unit", **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write a JSON file.

        Raises:
            ResultFileError: it cannot be written.
        """
        plain = self.to_dict()
        write_text(path, json.dumps(plain | {_CHECKSUM: checksum(plain)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Ranking:
        """Read what :meth:`save` wrote.

        Raises:
            ResultFileError: the file is missing, changed, of another format, or no such thing.
        """
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            if found["format"] != FORMAT:
                raise ValueError("another format")
            if found.pop(_CHECKSUM) != checksum(found):
                raise ValueError("it was changed since it was written: its checksum is another")
            del found["format"]
            row = cls._KINDS[found.pop("rows of")]
            rows = tuple(_checked(row(**each)) for each in found.pop("rows"))
            explained, made = found.pop("explained"), found.pop("provenance")
            return cls(
                rows=rows, explained=None if explained is None else Explained(**explained),
                provenance=Provenance(**made), texts=tuple(found.pop("texts")), **found,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ResultFileError(f"{path} is no ranking ({type(error).__name__}: {error}); save it again") from error

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page; also written to ``path`` when given.

        Raises:
            ResultFileError: the file cannot be written.
        """
        from lrpx._views.tabled import page

        return kept(page(self._tables()), path)

    def _tables(self) -> Any:
        from lrpx._views.ranking import drawn

        return [drawn(self)]

    def _repr_html_(self) -> str:
        from lrpx._views.tabled import fragment

        return fragment(self._tables())

    def __str__(self) -> str:
        from lrpx._views.tabled import lines

        return lines(self._tables())

    def __rich__(self) -> Any:
        from lrpx._views.tabled import renderable

        return renderable(self._tables())


def _checked(row: Any) -> Any:
    """A row of a file, whose values must be of their types, and finite.

    Raises:
        TypeError, ValueError: one is not.
    """
    for field in fields(row):
        value = getattr(row, field.name)
        kinds = {"int": (int,), "str": (str,), "float": (int, float)}.get(str(field.type), (int, float, type(None)))
        if type(value) not in kinds:
            raise TypeError(f"the {field.name} of a row is {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"the {field.name} of a row is not finite")
    return row
