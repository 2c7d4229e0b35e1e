"""pass@k: how often k samples of a policy solve a prompt, from n >= k graded samples of each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import integer
from gym_rm.errors import ConfigError

Groups = Sequence[Sequence[float]]


def pass_at_k(rewards: Groups, k: int, *, threshold: float | None = None) -> float:
    """Return the probability that at least one of k samples is right, averaged over prompts.

    For c right ones of n samples it is `1 - C(n - c, k) / C(n, k)`, the mean over all subsets of k samples, so it is
    unbiased: Chen et al. 2021, arXiv 2107.03374, section 2.1.

    Args:
        rewards: for each prompt, the rewards of its n samples; n may differ between prompts.
        k: number of samples that are drawn.
        threshold: a sample is right if its reward is at least this; None requires rewards of 0 and 1.

    Raises:
        ConfigError: k is more than the samples of a prompt, or a reward is missing, or neither 0 nor 1.

    Example:
        >>> pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], k=2)
        0.25
    """
    right = _right(rewards, k, threshold)
    return float(np.mean([1 - math.comb(each.size - int(each.sum()), k) / math.comb(each.size, k) for each in right]))


def _right(rewards: Groups, k: int, threshold: float | None) -> list[NDArray[np.bool_]]:
    """Return which samples of each prompt are right."""
    integer("k", k, minimum=1)
    groups = [np.asarray(each, dtype=np.float64) for each in rewards]
    if not groups:
        raise ConfigError("rewards must have at least one prompt, got none.")
    for prompt, group in enumerate(groups):
        if group.ndim != 1 or group.size < k:
            raise ConfigError(
                f"rewards of prompt {prompt} must be at least k={k} samples, got the shape {group.shape}; sample more, "
                "or use a smaller k."
            )
        if np.isnan(group).any():
            raise ConfigError(f"rewards of prompt {prompt} has missing values; leave out samples that have no reward.")
        if threshold is None and not np.isin(group, (0.0, 1.0)).all():
            odd = group[~np.isin(group, (0.0, 1.0))][0]
            raise ConfigError(f"rewards of prompt {prompt} must be 0 or 1, got {odd}; pass threshold=.")
    return [group >= (1.0 if threshold is None else threshold) for group in groups]
