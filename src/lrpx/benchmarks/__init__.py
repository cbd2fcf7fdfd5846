"""Benchmarks: methods measured against what is known; each is registered, and is then a command with reports."""

from lrpx.errors import MissingExtraError

try:
    import polars  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingExtraError("the benchmarks need pyarrow and polars: pip install 'lrpx[benchmarks]'") from error

from lrpx.benchmarks import agreement as _agreement  # noqa: F401 - registers itself
from lrpx.benchmarks.contract import BENCHMARKS, Benchmark, Case, Samples, Source, find, register
from lrpx.benchmarks.ground_truth import GroundTruth
from lrpx.benchmarks.keeping import Kept, keep
from lrpx.benchmarks.running import Run
from lrpx.benchmarks.words import Group, Words
from lrpx.data.agreement import Dropped

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Case",
    "Dropped",
    "GroundTruth",
    "Group",
    "Kept",
    "Run",
    "Samples",
    "Source",
    "Words",
    "find",
    "keep",
    "register",
]
