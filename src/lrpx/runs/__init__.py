"""A run's folder: its record, its parts, and one run in it at a time."""

from lrpx._files import write_whole
from lrpx.errors import MissingExtraError

try:
    import filelock  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"to keep a run's rows in a folder needs {error.name}: pip install 'lrpx[benchmarks]'"
    ) from error

from lrpx.runs._store import Store, digest, versions
from lrpx.runs._tables import BROKEN, read_columns, read_table, write_table

__all__ = ["BROKEN", "Store", "digest", "read_columns", "read_table", "versions", "write_table", "write_whole"]
