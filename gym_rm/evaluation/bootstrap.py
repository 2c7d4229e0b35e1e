"""Bootstrap intervals of means over groups of rows, such as the pairs of one prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


RESAMPLES = 2000  # bootstrap samples of an interval
CONFIDENCE = 0.95  # that an interval covers the value


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def sample_interval(value: float, samples: FloatArray) -> Interval:
    """Return the percentile interval of the bootstrap samples `[R]` of a value; samples that are NaN are left out."""
    tail = (1 - CONFIDENCE) / 2
    finite = samples[np.isfinite(samples)]
    low, high = np.quantile(finite, (tail, 1 - tail)) if finite.size else (np.nan, np.nan)
    return Interval(float(value), float(low), float(high))


def widened(interval: Interval, count: int) -> Interval:
    """Replace an interval without width, as of `count` shares that are all 0 or all 1 in every sample."""
    return interval if interval.low < interval.high else wilson_interval(interval.value, count)


def ratio_samples(totals: FloatArray, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return `sum(totals) / sum(counts)` of M columns `[M]`, and the same for each bootstrap sample `[R, M]`.

    Whole groups are drawn with replacement (Davison and Hinkley 1997, Bootstrap Methods and their Application, section
    3.8), because the rows of a group depend on each other. A column without rows in a sample is NaN there. The same
    groups give the same samples.

    Args:
        totals: sum of the values of each group `[C, M]`.
        counts: number of values of each group `[C, M]`.
    """
    both, random = np.concatenate([totals, counts], axis=1), np.random.default_rng(0)
    size, columns = len(both), totals.shape[1]
    drawn = (np.bincount(random.integers(size, size=size), minlength=size) for _ in range(RESAMPLES))
    sums = np.stack([times.astype(np.float64) @ both for times in drawn])
    with np.errstate(invalid="ignore", divide="ignore"):
        values = totals.sum(axis=0) / counts.sum(axis=0)
        return values, sums[:, :columns] / sums[:, columns:]


def mean_intervals(values: FloatArray, masks: FloatArray, groups: NDArray[np.int64]) -> list[Interval | None]:
    """Return the interval of the mean of the values under each of M masks; None where a mask selects nothing.

    Args:
        values: `[P]`.
        masks: 1 where a value belongs to a column, else 0 `[P, M]`.
        groups: index of the group of each value `[P]`, from 0 to C - 1.
    """
    num_groups = int(groups.max(initial=-1)) + 1
    if not num_groups:
        return [None] * masks.shape[1]
    totals, counts = np.zeros((2, num_groups, masks.shape[1]))
    np.add.at(totals, groups, values[:, None] * masks)
    np.add.at(counts, groups, masks)
    means, samples = ratio_samples(totals, counts)
    return [
        sample_interval(mean, column) if np.isfinite(mean) else None
        for mean, column in zip(means, samples.T, strict=True)
    ]


def mean_interval(mean: float, error: float, count: int, *, confidence: float) -> Interval:
    """Return Student's interval of a mean of `count` values with this standard error.

    The quantile is Hill's expansion in 1 / (count - 1) (Abramowitz and Stegun 26.7.5).
    """
    z, n = NormalDist().inv_cdf((1 + confidence) / 2), max(1, count - 1)
    quantile = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    half = quantile * error
    return Interval(mean, mean - half, mean + half)


def wilson_interval(share: float, count: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Return the score interval of a share of `count` independent trials (Wilson 1927, JASA 22, page 209)."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
