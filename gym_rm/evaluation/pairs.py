"""Metrics of scored pairs: accuracy, margins, calibration and length. Only numpy, cheap enough for every step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gym_rm.errors import ConfigError

FloatArray = NDArray[np.float64]
CALIBRATION_BINS = 10


@dataclass(frozen=True, slots=True)
class PairMetrics:
    """Metrics of P pairs of rewards. A margin is `chosen - rejected`. A metric is None if it is undefined, never NaN.

    Attributes:
        num_pairs: number of pairs with two finite rewards; all metrics use only these.
        num_failed: number of other pairs.
        accuracy: share of the pairs with a margin above 0. A pair with equal rewards counts as wrong.
        ties: share of the pairs with equal rewards.
        loss: mean of `-log sigmoid(margin)`, the Bradley-Terry loss.
        margin_mean: mean margin.
        margin_p10: margin that a tenth of the pairs do not exceed.
        margin_p50: median margin.
        margin_p90: margin that nine tenths of the pairs do not exceed.
        rewards_chosen_mean: mean reward of the preferred replies.
        rewards_rejected_mean: mean reward of the rejected replies.
        calibration_error: see `calibration_error`.
        length_correlation: see `length_correlation`; None without numbers of tokens.

    Example:
        >>> metrics = pair_metrics([2.0, 0.0, 1.0], [0.0, 1.0, 1.0])
        >>> round(metrics.accuracy, 3), round(metrics.ties, 3), round(metrics.margin_mean, 3)
        (0.333, 0.333, 0.333)
    """

    num_pairs: int
    num_failed: int
    accuracy: float | None = None
    ties: float | None = None
    loss: float | None = None
    margin_mean: float | None = None
    margin_p10: float | None = None
    margin_p50: float | None = None
    margin_p90: float | None = None
    rewards_chosen_mean: float | None = None
    rewards_rejected_mean: float | None = None
    calibration_error: float | None = None
    length_correlation: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the metrics by name."""
        return dataclasses.asdict(self)


def pair_metrics(
    chosen: ArrayLike,
    rejected: ArrayLike,
    *,
    chosen_tokens: ArrayLike | None = None,
    rejected_tokens: ArrayLike | None = None,
) -> PairMetrics:
    """Return the metrics of P scored pairs.

    Args:
        chosen: rewards of the preferred replies `[P]`.
        rejected: rewards of the rejected replies `[P]`.
        chosen_tokens: number of tokens of the preferred replies `[P]`.
        rejected_tokens: number of tokens of the rejected replies `[P]`.

    Raises:
        ConfigError: the arrays have different lengths.
    """
    columns = {"chosen": chosen, "rejected": rejected}
    if chosen_tokens is not None and rejected_tokens is not None:
        columns |= {"chosen_tokens": chosen_tokens, "rejected_tokens": rejected_tokens}
    arrays = {name: np.asarray(column, dtype=np.float64).reshape(-1) for name, column in columns.items()}
    sizes = {name: array.size for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"expected one entry per pair in each of {list(sizes)}, got {list(sizes.values())}.")
    with np.errstate(over="ignore", invalid="ignore"):  # rewards of +-1e308, inf - inf
        margins = arrays["chosen"] - arrays["rejected"]
    scored = np.isfinite(margins)
    kept = {name: array[scored] for name, array in arrays.items()}
    margins = margins[scored]
    num_failed = int(scored.size - margins.size)
    if not margins.size:
        return PairMetrics(0, num_failed)
    low, middle, high = np.quantile(margins, (0.1, 0.5, 0.9))
    correlation = None
    if "chosen_tokens" in kept:
        correlation = length_correlation(margins, kept["chosen_tokens"] - kept["rejected_tokens"])
    return PairMetrics(
        num_pairs=int(margins.size),
        num_failed=num_failed,
        accuracy=float(np.mean(margins > 0)),
        ties=float(np.mean(margins == 0)),
        loss=float(np.logaddexp(0.0, -margins).mean()),
        margin_mean=float(margins.mean()),
        margin_p10=float(low),
        margin_p50=float(middle),
        margin_p90=float(high),
        rewards_chosen_mean=float(kept["chosen"].mean()),
        rewards_rejected_mean=float(kept["rejected"].mean()),
        calibration_error=calibration_error(margins),
        length_correlation=correlation,
    )


@dataclass(frozen=True, slots=True)
class CalibrationBins:
    """Stated and observed probabilities of pairs, in bins of equal width over [0.5, 1]; empty bins are left out.

    Attributes:
        stated: mean `sigmoid(|margin|)` of each bin `[B]`: the probability that the model gives its own choice.
        observed: share of the pairs of each bin whose choice is right `[B]`; a margin of 0 counts as half right.
        num_pairs: number of pairs of each bin `[B]`.
    """

    stated: FloatArray
    observed: FloatArray
    num_pairs: NDArray[np.int64]


def calibration_bins(margins: ArrayLike, *, num_bins: int = CALIBRATION_BINS) -> CalibrationBins:
    """Sort P margins into bins by `sigmoid(|margin|)` (Guo et al. 2017, arXiv 1706.04599, section 2).

    The order of a pair carries no information, so a probability below 0.5 that a reply is better is the same statement
    as one above 0.5 that the other one is.
    """
    values = np.asarray(margins, dtype=np.float64).reshape(-1)
    stated = 1.0 / (1.0 + np.exp(-np.abs(values)))
    right = np.where(values == 0, 0.5, values > 0)
    positions = np.minimum((stated - 0.5) * 2 * num_bins, num_bins - 1).astype(np.int64)
    counts = np.bincount(positions, minlength=num_bins)
    used = counts > 0
    mean_stated, mean_right = (
        np.bincount(positions, weights=column, minlength=num_bins)[used] / counts[used] for column in (stated, right)
    )
    return CalibrationBins(mean_stated, mean_right, counts[used])


def calibration_error(margins: ArrayLike) -> float | None:
    """Return the expected calibration error of `sigmoid(margin)`, or None without margins.

    It is the mean over the pairs of `|observed - stated|` of their bin (Guo et al. 2017, arXiv 1706.04599, equation 3).
    """
    bins = calibration_bins(margins)
    if not bins.num_pairs.size:
        return None
    return float(np.average(np.abs(bins.observed - bins.stated), weights=bins.num_pairs))


def length_correlation(margins: FloatArray, differences: FloatArray) -> float | None:
    """Return the correlation of reward and length within P pairs, or None if one of them never differs.

    It is Pearson's r over the 2P replies after the mean of each pair is taken from rewards and lengths. Thus it does
    not depend on the prompts, or on which reply of a pair comes first.
    """
    largest = np.abs(margins).max(initial=0.0), np.abs(differences).max(initial=0.0)
    if not all(largest):
        return None
    x, y = margins / largest[0], differences / largest[1]  # the squares of very large values overflow
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))
