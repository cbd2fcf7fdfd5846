"""What a mean over samples is worth: its interval, and whether two methods differ.

Every draw comes from a generator of its own with the given seed; the global random state is neither read nor changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lrpx.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
"""How many resamples an interval is of: its ends then are those of all resamples to a fiftieth of its width or so."""
FLIPS = 9999
"""How many random sign flips are drawn; the smallest p value then is 1 / 10,000."""
_NUMBERS = 2**20
"""How many numbers are drawn at a time: some 20 MB, whatever the number of samples."""


def interval(values: ArrayLike, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Confidence interval of the mean, by the percentile bootstrap: ``(low, high)``.

    The percentile method, because its interval always exists and lies within the range of the values. BCa costs the
    square of N and fails where nearly all values are the same; for the mean of a bounded metric it covers better only
    where there are few samples.

    Args:
        values: ``[N]``, one value of a metric a sample.
        level: the share of such intervals that hold the true mean, between 0 and 1.
        seed: of the resampling.

    Raises:
        InputError: no values, not finite, not ``[N]``, or a level that is none.
        MissingExtraError: scipy is not installed.

    >>> interval([0.5, 0.5, 0.5])
    (0.5, 0.5)
    >>> low, high = interval([0.0, 1.0] * 50)
    >>> round(low, 1), round(high, 1)
    (0.4, 0.6)
    """
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtraError("the bootstrap needs scipy: pip install 'lrpx[benchmarks]'") from error

    sample = _sample(values)
    if not 0.0 < level < 1.0:
        raise InputError(f"a confidence level of {level} is none; give one between 0 and 1, such as 0.95")
    if sample.min() == sample.max():
        return float(sample[0]), float(sample[0])
    found = bootstrap(
        (sample,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=_batch(sample.size),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def intervals(
    values: ArrayLike, others: ArrayLike | None = None, level: float = 0.95, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Confidence intervals of many means at once, or of the differences of two sets' means, by the percentile
    bootstrap: ``[K]`` low and ``[K]`` high ends. Each set is resampled on its own, and each column with the same draws.

    Args:
        values: ``[N, K]``, a value a sample of each of ``K``.
        others: ``[M, K]``, of a second set of samples.
        level: the share of such intervals that hold the true mean, between 0 and 1.
        seed: of the resampling.

    >>> low, high = intervals([[0.0, 3.0], [1.0, 3.0]] * 50)
    >>> low.round(1).tolist(), high.round(1).tolist()
    ([0.4, 3.0], [0.6, 3.0])
    """
    generator = np.random.default_rng(seed)

    def means(given: ArrayLike) -> NDArray[np.float64]:
        sample = np.asarray(given, dtype=np.float64)
        middle = sample.mean(0)  # taken off, so that what is the same in every sample has no rounding
        count = len(sample)
        draws = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
        return np.asarray(middle + draws @ (sample - middle) / count)

    found = means(values) if others is None else means(values) - means(others)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def paired_test(a: ArrayLike, b: ArrayLike, seed: int = 0) -> float:
    """Two-sided p value of the mean difference of paired values, by the sign-flip permutation test.

    If neither method is better, a sample's difference could as well have had the other sign: p is the share of all
    2^N choices of signs that make the mean difference at least as large as it is. Up to 13 samples that differ, all are
    tried; above, :data:`FLIPS` are drawn, and the observed one counts as one more, so that p is never 0.

    (``scipy.stats.permutation_test`` is the same test, but over twenty times slower for ten thousand samples.)

    Args:
        a: ``[N]``, the values of a metric for one method.
        b: ``[N]``, those of the other, for the same samples in the same order.
        seed: of the signs.

    Raises:
        InputError: no values, not finite, or not ``[N]`` and of one length.

    >>> paired_test([0.3, 0.8], [0.3, 0.8])
    1.0
    >>> paired_test([1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.25, 0.125])  # 2 of the 16 choices of signs
    0.125
    """
    first, second = _sample(a), _sample(b)
    if len(first) != len(second):
        raise InputError(
            f"{len(first)} values are paired with {len(second)}; give both methods' values for the same samples"
        )
    differences = first - second
    equal = abs(differences) <= 1e-12 * np.maximum(abs(first), abs(second))  # but for rounding
    differences = differences[~equal]  # a zero has no sign: it leaves every sum as it is
    if not len(differences):
        return 1.0
    total = differences.sum()
    least = abs(total) - 1e-12 * abs(differences).sum()  # sums equal but for rounding are equal
    return _share(len(differences), lambda flips: abs(total - 2.0 * (flips @ differences)) >= least, seed)


def swap_test(a: ArrayLike, b: ArrayLike, measure: Callable[[NDArray[np.float64]], float], seed: int = 0) -> float:
    """The same for a number of a whole set, which is made of the sums of what is counted in each sample.

    If neither method is better, a sample's counts could as well be the other's: p is the share of all 2^N choices of
    samples that change sides which make the numbers differ at least as much as they do. Of a mean it is
    :func:`paired_test`.

    Args:
        a: ``[N, K]``, the counts of one method.
        b: ``[N, K]``, those of the other, for the same samples in the same order.
        measure: from the sums ``[K]`` to the number.
        seed: of the choices.

    >>> swap_test([[1.0], [1.0], [1.0], [1.0]], [[0.0], [0.5], [0.25], [0.125]], lambda sums: sums[0] / 4)
    0.125
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    moves = (second - first)[(first != second).any(1)]  # to change sides with itself changes nothing
    if not len(moves):
        return 1.0

    def far(flips: NDArray[np.bool_]) -> NDArray[np.float64]:
        moved = flips @ moves
        pairs = zip(first.sum(0) + moved, second.sum(0) - moved, strict=True)
        return np.array([abs(measure(mine) - measure(other)) for mine, other in pairs])

    sizes = [abs(measure(each.sum(0))) for each in (first, second)]
    least = float(far(np.zeros((1, len(moves)), dtype=bool))[0]) - 1e-12 * max(sizes)
    return _share(len(moves), lambda flips: far(flips) >= least, seed)


def _share(count: int, extreme: Callable[[NDArray[np.bool_]], NDArray[np.bool_]], seed: int) -> float:
    """The share of all 2^count choices that are extreme; above :data:`FLIPS`, of those drawn and the observed one."""
    choices = 2**count
    if choices <= FLIPS:
        return float(np.mean(extreme((np.arange(choices)[:, None] >> np.arange(count) & 1).astype(bool))))
    rng = np.random.default_rng(seed)
    found, batch = 1, _batch(count)
    for start in range(0, FLIPS, batch):
        found += int(np.sum(extreme(rng.integers(2, size=(min(batch, FLIPS - start), count), dtype=bool))))
    return found / (FLIPS + 1)


def least_p_value(samples: int) -> float:
    """The least that :func:`paired_test` can give for so many samples, all of which differ.

    >>> least_p_value(4), least_p_value(1000)
    (0.125, 0.0001)
    """
    choices = 2**samples
    return 2 / choices if choices <= FLIPS else 1 / (FLIPS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: each p value as it stands for the whole family, in the same order.

    The i-th smallest of n is multiplied by n − i + 1, is at least the adjusted one before it, and at most 1. Those at
    or below an α under 1 reject with a family-wise error of at most α, however the tests depend on each other (Holm
    1979).

    Args:
        p_values: from 0 to 1.

    Raises:
        InputError: one is not from 0 to 1.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    if not all(0.0 <= p <= 1.0 for p in p_values):
        raise InputError("a p value is not from 0 to 1; give those of the tests, unadjusted")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _sample(values: ArrayLike) -> NDArray[np.float64]:
    """``[N]`` in float64, checked."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample):
        raise InputError(f"the values have the shape {list(sample.shape)}; give [N], one a sample, at least one")
    if not np.isfinite(sample).all():
        raise InputError("a value is NaN or infinite; leave out the samples that were not scored")
    return sample


def _batch(size: int) -> int:
    """How many resamples of this size to draw at a time."""
    return max(1, _NUMBERS // size)
