"""Benchmarks of the methods against ground truth: subject-verb agreement (Arras et al. 2025)."""

from lrpx.errors import MissingExtraError

try:
    import polars  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingExtraError("the benchmarks need pyarrow and polars: pip install 'lrpx[benchmarks]'") from error
