"""The one table of operations: a row a torch function, read by rules, ledger and heads alike.

Every function that a model calls has a row here, or is unknown. Names are those of the torch functions themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrpx.engine import _attention, _distances, _elementwise, _layers, _norms, _plain, _recurrent

if TYPE_CHECKING:
    from lrpx.engine._operation import Operation

TABLE: dict[str, Operation] = {}
"""From the name of each torch function to its row."""


def register(*rows: Operation) -> None:
    """Add rows to the table, or put them into the place of those that were there, for every recipe."""
    for row in rows:
        TABLE.update(row.rows())


register(
    *_plain.ROWS, *_layers.ROWS, *_elementwise.ROWS, *_attention.ROWS, *_norms.ROWS, *_distances.ROWS, *_recurrent.ROWS
)
