"""The references in a folder, as they were collected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lrpx._defined import CODE_OF_MODEL, digest_of_model
from lrpx.cards._references import FACTS, LOWEST, schema
from lrpx.errors import InputError, MethodError, ModelError, ResultFileError
from lrpx.model import Spec
from lrpx.runs import Store, read_table

if TYPE_CHECKING:
    from collections.abc import Collection

    import pyarrow as pa

    from lrpx.model import BoundModel

KIND: Final = "neurons"
"""How the run of a folder is called."""
REFERENCES: Final = "references.parquet"
SETTINGS: Final = (
    *("model", "weights and config", "tokenizer", "places", "corpus", "text", "context", "measures", "every"),
)
NOTED: Final = ("spec", "corpus", "texts")
"""What is read of the record, and of the settings in it."""


@dataclass(frozen=True)
class Passage:
    """A reference passage of a unit.

    Args:
        value: the unit's activation there, or its relevance.
        line: where the passage stands in the corpus.
        position: the token at which it is highest, from 0.
        token: that token's id.
        predicted: the id of what the model predicted, whose relevance it is; None of an activation.
    """

    value: float
    line: int
    position: int
    token: int
    predicted: int | None = None


@dataclass(frozen=True)
class References:
    """What was collected of every unit of a model.

    Args:
        folder: where it was.
        record: what the run says of itself.
        table: a row a unit; ``"activation value"``, ``"activation line"``, … are lists, best first, ``"counts"`` the
            histogram, ``"peaks"`` in how many texts the unit was highest at which places. Of a negative activation the
            table has the opposite.
    """

    folder: Path
    record: dict[str, Any]
    table: pa.Table

    @classmethod
    def read(cls, folder: str | Path) -> References:
        """The references in a folder that :func:`~lrpx.cards.collect` wrote.

        Raises:
            ResultFileError: there are none, or they are of another run.
        """
        folder = Path(folder)
        store = Store.read(folder)
        if store.record["kind"] != KIND:
            raise ResultFileError(f"{folder} holds a run of {store.record['kind']}, not references of units")
        missing = [name for name in SETTINGS if name not in store.settings]
        missing += [name for name in NOTED if name not in store.record]
        if missing:  # of an older version, say
            raise ResultFileError(
                f"the references in {folder} say nothing of {', '.join(missing)}; collect them again, into a new folder"
            )
        table = read_table(folder / REFERENCES, schema(store.settings["measures"]), store.digest)
        if table is None:
            raise ResultFileError(f"{folder / REFERENCES} is missing or broken; run lrpx neurons collect again")
        return cls(folder, store.record, table)

    @property
    def settings(self) -> dict[str, Any]:
        """What defines the run."""
        return dict(self.record["settings"])

    @property
    def measures(self) -> tuple[str, ...]:
        """What units were ranked by."""
        return tuple(self.settings["measures"])

    @property
    def are_cut(self) -> bool:
        """Whether texts that are longer than the context were cut."""
        return bool(self.settings.get("long") == "cut")

    @property
    def corpus(self) -> Path:
        """The file that the passages are in."""
        return Path(self.record["corpus"])

    @cached_property
    def layers(self) -> dict[int, range]:
        """The rows of each layer's units."""
        found, start = {}, 0
        for layer, path, width in self.settings["places"]:
            if layer in found:
                raise MethodError(f"layer {layer} has units at several places, such as {path}; read the table instead")
            found[layer] = range(start, start + width)
            start += width
        return found

    def row(self, layer: int, unit: int) -> int:
        """Which row of the table a unit has.

        Raises:
            MethodError: there is no such unit; says how many there are.
        """
        if layer not in self.layers:
            raise MethodError(f"there is no layer {layer}; the layers with neurons are {_listed(self.layers)}")
        rows = self.layers[layer]
        if not 0 <= unit < len(rows):
            raise MethodError(f"layer {layer} has {len(rows)} neurons, 0 to {len(rows) - 1}; {unit} is none of them")
        return rows[unit]

    def check_measure(self, measure: str) -> None:
        """Refuse a measure by which units were not ranked.

        Raises:
            InputError: says by which they were.
        """
        if measure not in self.measures:
            raise InputError(
                f"the units were ranked by {', '.join(self.measures)}, not by {measure}; collect them again"
            )

    def passages(self, layer: int, unit: int, measure: str = "activation") -> list[Passage]:
        """A unit's reference passages, the best first. The value of a negative activation is negative.

        Raises:
            MethodError: there is no such unit.
            InputError: units were not ranked by this.
        """
        self.check_measure(measure)
        row = self.row(layer, unit)
        columns = [self.table[f"{measure} {part}"][row].as_py() for part in ("value", "line", *FACTS[measure])]
        sign = -1 if measure == LOWEST else 1
        return [Passage(sign * value, *rest) for value, *rest in zip(*columns, strict=True)]

    def counts(self, layer: int, unit: int) -> list[int]:
        """Of how many of the tokens that were looked at the activation was in each bin."""
        return list(self.table["counts"][self.row(layer, unit)].as_py())

    def peaks(self, layer: int, unit: int) -> list[int]:
        """In how many passages the unit was highest in each octave of positions."""
        return list(self.table["peaks"][self.row(layer, unit)].as_py())

    def flat(self, column: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """A column of lists as ``(row of each value, value)``."""
        lists = self.table[column].combine_chunks()
        return np.repeat(np.arange(len(lists)), np.diff(np.asarray(lists.offsets))), np.asarray(lists.flatten())

    def name(self, row: int) -> tuple[int, int]:
        """The layer and the unit of a row."""
        return next((layer, row - rows.start) for layer, rows in self.layers.items() if row in rows)

    def model(self, device: str | None = None) -> BoundModel:
        """The model, loaded as it was.

        Raises:
            ModelError: it was loaded by no name, cannot be loaded, or is another by now.
        """
        if self.record["spec"] is None:
            raise ModelError("the model was loaded by no name when the units were collected; pass it yourself")
        spec = Spec.from_dict(self.record["spec"] | ({} if device is None else {"device": device}))
        return self.check(spec.build())

    def check(self, model: BoundModel) -> BoundModel:
        """The same model, when it is the one that the references are of.

        Raises:
            ModelError: it has other weights, another config, other code of the user's, or another tokenizer.
        """
        if model.fingerprint() != self.settings["weights and config"]:
            raise ModelError(
                f"the references are of {self.settings['model']} with other weights, or another config, than "
                f"{model.name} has; pass the model as it was, or collect them again"
            )
        if digest_of_model(model.module) != self.settings.get(CODE_OF_MODEL):
            raise ModelError(
                f"the references are of {self.settings['model']} with other code, functions or numbers in its modules "
                f"than {model.name} has; pass the model as it was, or collect them again"
            )
        if model.tokenizer_fingerprint() != self.settings["tokenizer"]:
            raise ModelError(
                f"the references are of texts as another tokenizer than that of {model.name} reads them; pass the "
                "tokenizer as it was, or collect them again"
            )
        return model


def _listed(layers: Collection[int]) -> str:
    """``0 to 29``, or each."""
    together = list(layers) == list(range(min(layers), max(layers) + 1))
    return f"{min(layers)} to {max(layers)}" if together else ", ".join(map(str, layers))
