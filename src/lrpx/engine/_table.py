"""The one table of operations: a row a torch function, read by rules, ledger and heads alike.

Every function that a model calls has a row here, or is unknown. Names are those of the torch functions themselves.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from lrpx.engine import _attention, _distances, _elementwise, _layers, _norms, _plain, _recurrent
from lrpx.engine._operation import Operation
from lrpx.engine._tensors import TRANSPOSES

TABLE: dict[str, Operation] = {}
"""From the name of each torch function to its row."""


def register(*rows: Operation) -> None:
    """Add rows to the table, or put them into the place of those that were there, for every recipe."""
    for row in rows:
        TABLE.update(row.rows())
    KNOWN_ROWS.clear()


GETTER = Operation("getter", (), _plain.plain, "plain")
"""What stands for a property of a tensor that is no operation on it, such as its shape."""

KNOWN_ROWS: dict[Any, Operation] = {}
"""From each torch function that was called to its row: sooner found than by the name."""


def row_of(func: Any) -> Operation | None:
    """The row of a torch function."""
    name = func.__name__
    row = TABLE.get(name)
    if name == "__get__" and func.__self__.__name__ not in TRANSPOSES:
        row = GETTER
    if row is not None and (type(func) is not FunctionType or func.__module__ == "torch.nn.functional"):
        KNOWN_ROWS[func] = row  # of other functions there may be ever new ones
    return row


register(
    *_plain.ROWS, *_layers.ROWS, *_elementwise.ROWS, *_attention.ROWS, *_norms.ROWS, *_distances.ROWS, *_recurrent.ROWS
)
