"""Statistics of the rewards of a batch; conversations with a missing score (NaN) are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        min: lowest reward.
        max: highest reward.
        num_tokens: mean number of tokens per conversation; None if the scorer does not count tokens.
        truncated: share of the conversations that were truncated.
        length_correlation: Pearson correlation of reward and number of tokens; it is high if the reward model prefers
            long replies. None if either is constant.
        components: mean of each component of the reward.

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
    num_tokens: float | None
    truncated: float | None
    length_correlation: float | None
    components: Mapping[str, float] = field(default_factory=dict)


def reward_metrics(
    rewards: ArrayLike,
    *,
    num_tokens: ArrayLike | None = None,
    truncated_tokens: ArrayLike | None = None,
    components: Mapping[str, ArrayLike] | None = None,
) -> RewardMetrics:
    """Return statistics of N rewards.

    Args:
        rewards: `[N]`; a value that is not finite counts as failed and is left out of the statistics.
        num_tokens: `[N]`, number of tokens of each conversation; 0 if they were not counted.
        truncated_tokens: `[N]`, number of tokens cut from each conversation.
        components: `[N]` by name.

    Raises:
        ValueError: the arrays have different lengths.
    """
    values = np.asarray(rewards, dtype=np.float64).reshape(-1)
    scored = np.isfinite(values)

    def of_scored(column: ArrayLike | None) -> NDArray[np.float64]:
        array = np.zeros_like(values) if column is None else np.asarray(column, dtype=np.float64)
        if array.shape != values.shape:
            raise ValueError(f"expected one entry per reward, shape {values.shape}, got shape {array.shape}.")
        return array[scored]

    kept, tokens, cut = values[scored], of_scored(num_tokens), of_scored(truncated_tokens)
    any_kept, counted = kept.size > 0, tokens > 0
    parts = {name: of_scored(column) for name, column in (components or {}).items()}
    return RewardMetrics(
        num_samples=int(kept.size),
        num_failed=int(values.size - kept.size),
        mean=float(kept.mean()) if any_kept else None,
        std=_finite_std(kept) if any_kept else None,
        min=float(kept.min()) if any_kept else None,
        max=float(kept.max()) if any_kept else None,
        num_tokens=float(tokens[counted].mean()) if counted.any() else None,
        truncated=float(np.mean(cut[counted] > 0)) if counted.any() else None,
        length_correlation=correlation(kept[counted], tokens[counted]),
        components={name: float(np.nanmean(part)) for name, part in parts.items() if np.isfinite(part).any()},
    )


def _finite_std(values: NDArray[np.float64]) -> float | None:
    """Return the standard deviation, or None if the squares of the values overflow."""
    with np.errstate(over="ignore"):
        std = float(values.std())
    return std if np.isfinite(std) else None


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
