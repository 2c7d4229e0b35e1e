"""Statistics of the rewards of a batch; conversations with a missing score (NaN) are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Statistics of the rewards of one batch.

    Attributes:
        num_samples: number of conversations with a score; the statistics use only these.
        num_failed: number of conversations with a missing score.
        mean: mean reward. This and the other statistics are None if they are undefined, never NaN.
        std: population standard deviation (divisor N), computed in two passes; 0.0 for a single sample.
        min, max: lowest and highest reward.

    Example:
        >>> metrics = reward_metrics([1.0, 3.0, float("nan")])
        >>> metrics.num_samples, metrics.num_failed, metrics.mean, metrics.std
        (2, 1, 2.0, 1.0)
    """

    num_samples: int
    num_failed: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None


def reward_metrics(rewards: ArrayLike) -> RewardMetrics:
    """Return statistics of N rewards `[N]`; a value that is not finite counts as failed and is left out."""
    values = np.asarray(rewards, dtype=np.float64).reshape(-1)
    kept = values[np.isfinite(values)]
    any_kept = kept.size > 0
    with np.errstate(over="ignore"):
        std = float(kept.std()) if any_kept else math.nan
    return RewardMetrics(
        num_samples=int(kept.size),
        num_failed=int(values.size - kept.size),
        mean=float(kept.mean()) if any_kept else None,
        std=std if math.isfinite(std) else None,  # the squares of large values overflow
        min=float(kept.min()) if any_kept else None,
        max=float(kept.max()) if any_kept else None,
    )


def correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Return Pearson's r of two `[N]` arrays, or None if one is constant or N < 2.

    The values themselves are compared, because rounding can make the deviations from the mean of a constant nonzero.
    """
    if x.size < 2 or (x == x[0]).all() or (y == y[0]).all():
        return None
    # Scale to 1 first, because squares of very large or very small values overflow or underflow in float64.
    dx, dy = _unit(x - x.mean()), _unit(y - y.mean())
    if not (dx.any() and dy.any()):
        return None
    r = (dx @ dy) / np.sqrt((dx @ dx) * (dy @ dy))
    return float(np.clip(r, -1.0, 1.0))


def _unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = np.abs(values).max()
    return values / largest if largest > 0 else values
