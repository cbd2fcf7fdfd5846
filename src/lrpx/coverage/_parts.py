"""What is known of a class as a part of the sweep's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from lrpx.coverage._checking import Checked

if TYPE_CHECKING:
    from lrpx.coverage._classes import ModelClass
    from lrpx.runs import Store

COLUMNS: Final = pa.schema(
    {
        "mapping": pa.string(),
        "name": pa.string(),
        "model_type": pa.string(),
        "others": pa.list_(pa.string()),
        "passed": pa.list_(pa.string()),
        "reasons": pa.map_(pa.string(), pa.string()),
        "parameters": pa.int64(),
        "difference": pa.float64(),
        "twofold": pa.bool_(),
        "missing": pa.map_(pa.string(), pa.float64()),
        "seconds": pa.float64(),
    }
)
"""A :class:`~lrpx.coverage._checking.Checked`."""


def keep(store: Store, model_class: ModelClass, found: Checked) -> None:
    """Write what is known of a class.

    Raises:
        ResultFileError: it cannot be written.
    """
    store.keep(_name(model_class), pa.Table.from_pylist([found.to_dict()], COLUMNS))


def read(store: Store, model_class: ModelClass) -> Checked | None:
    """What an earlier sweep found, or None."""
    table = store.part(_name(model_class), COLUMNS)
    if table is None or len(table) != 1:
        return None
    found = Checked.from_dict(table.to_pylist(maps_as_pydicts="strict")[0])
    return found if (found.mapping, found.name) == (model_class.mapping, model_class.name) else None


def _name(model_class: ModelClass) -> str:
    return f"{model_class.mapping}-{model_class.name}"
