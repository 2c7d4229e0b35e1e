"""Statistics of the rewards of a batch; conversations with a missing score (NaN) are left out."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def mean_and_std(rewards: ArrayLike) -> tuple[float | None, float | None]:
    """Return the mean and the population standard deviation of the rewards `[N]` that are finite.

    They are None without such a reward, and the deviation also where the squares of large values overflow.

    Example:
        >>> mean_and_std([1.0, 3.0, float("nan")])
        (2.0, 1.0)
    """
    values = np.asarray(rewards, dtype=np.float64).reshape(-1)
    kept = values[np.isfinite(values)]
    if not kept.size:
        return None, None
    with np.errstate(over="ignore"):
        std = float(kept.std())
    return float(kept.mean()), std if math.isfinite(std) else None


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
