"""Benchmarks: methods measured against what is known; each is registered, and is then a command with reports."""

from lrpx.errors import MissingExtraError

try:
    import polars  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingExtraError("the benchmarks need pyarrow and polars: pip install 'lrpx[benchmarks]'") from error

from lrpx._data.agreement import Dropped
from lrpx.benchmarks import _agreement as _agreement
from lrpx.benchmarks import _circuits as _circuits
from lrpx.benchmarks import _faithfulness as _faithfulness
from lrpx.benchmarks import _layers as _layers
from lrpx.benchmarks import _patching as _patching
from lrpx.benchmarks import _pixels as _pixels
from lrpx.benchmarks import _position_tests as _position_tests
from lrpx.benchmarks import _qa as _qa
from lrpx.benchmarks._contract import BENCHMARKS, Benchmark, Case, Samples, Source, find, register
from lrpx.benchmarks._faithfulness import Perturbed
from lrpx.benchmarks._ground_truth import GroundTruth
from lrpx.benchmarks._keeping import Kept, keep
from lrpx.benchmarks._running import Run
from lrpx.benchmarks._words import Group, Words

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Case",
    "Dropped",
    "GroundTruth",
    "Group",
    "Kept",
    "Perturbed",
    "Run",
    "Samples",
    "Source",
    "Words",
    "find",
    "keep",
    "register",
]
