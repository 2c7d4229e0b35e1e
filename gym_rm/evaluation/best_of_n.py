"""Best-of-n: how often the reply with the highest reward is right, for every n, from one set of graded replies."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from gym_rm.errors import ConfigError, nearest
from gym_rm.evaluation.bootstrap import FloatArray, Interval, ratio_samples, sample_interval, widened
from gym_rm.evaluation.scored import ScoredComparisons


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Curves over n of C prompts with at least `ns[-1]` graded replies each.

    Attributes:
        gold: name of the grade.
        num_prompts: number of prompts.
        num_failed: number of prompts left out because a reply has no reward or no grade.
        num_small: number of prompts left out because they have fewer than `ns[-1]` replies.
        ns: the numbers of replies that are picked from.
        picked: mean grade of the reply with the highest reward, for each n.
        oracle: mean grade of the best reply, for each n: what a perfect reward model reaches.
        random: mean grade of a random reply.
        kl: upper bound in nats on the divergence of the policy that picks, for each n.
        recovered: share of the way from `random` to `oracle` that `picked` covers, at the largest n; None if all
            replies of each prompt have the same grade.
    """

    gold: str
    num_prompts: int
    num_failed: int
    num_small: int
    ns: tuple[int, ...]
    picked: tuple[Interval, ...]
    oracle: tuple[float, ...]
    random: float
    kl: tuple[float, ...]
    recovered: Interval | None


def best_of_n(scored: ScoredComparisons, *, gold: str) -> BestOfN:
    """Return the curves of a model, against the rating `gold` of the replies, such as `correct`.

    The largest n is the most frequent number of replies of a prompt. Prompts with fewer replies are left out.

    Raises:
        ConfigError: the comparisons have no such rating, or none of them has all rewards and grades.
    """
    groups, num_failed = graded_replies(scored, gold=gold)
    if not groups:
        raise ConfigError(f"best-of-n by {gold!r}: none of {len(scored.comparisons)} rows has all rewards and grades.")
    size = Counter(len(rewards) for rewards, _ in groups).most_common(1)[0][0]
    kept = [group for group in groups if len(group[0]) >= size]
    curve = curve_over_n(kept, curve_points(size), gold=gold)
    return dataclasses.replace(curve, num_failed=num_failed, num_small=len(groups) - len(kept))


def curve_over_n(groups: Sequence[tuple[FloatArray, FloatArray]], ns: Sequence[int], *, gold: str) -> BestOfN:
    """Return the curves of prompts whose replies all have a reward and a grade `[N]`, for these n up to N."""
    picked = np.array([expected_best(rewards, grades, ns) for rewards, grades in groups])
    oracle = np.array([expected_best(grades, grades, ns) for _, grades in groups])
    random = np.array([[grades.mean()] for _, grades in groups])
    columns = np.concatenate([picked, oracle, random], axis=1)
    means, samples = ratio_samples(columns, np.ones_like(columns))
    last, best = len(ns) - 1, 2 * len(ns) - 1
    recovered = None
    if means[best] > means[-1]:
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = (samples[:, last] - samples[:, -1]) / (samples[:, best] - samples[:, -1])
        recovered = sample_interval((means[last] - means[-1]) / (means[best] - means[-1]), shares)
    intervals = [sample_interval(means[i], samples[:, i]) for i in range(len(ns))]
    if all(np.isin(grades, (0, 1)).all() for _, grades in groups):  # shares of right replies
        intervals = [widened(each, len(groups)) for each in intervals]
    return BestOfN(
        gold=gold,
        num_prompts=len(groups),
        num_failed=0,
        num_small=0,
        ns=tuple(ns),
        picked=tuple(intervals),
        oracle=tuple(means[len(ns) : 2 * len(ns)].tolist()),
        random=float(means[-1]),
        kl=tuple(kl_bound(n) for n in ns),
        recovered=recovered,
    )


def graded_replies(scored: ScoredComparisons, *, gold: str) -> tuple[list[tuple[FloatArray, FloatArray]], int]:
    """Return rewards and grades `[N]` of each comparison that has the rating, and how many lack one of them.

    Raises:
        ConfigError: no comparison has the rating.
    """
    groups, num_failed = [], 0
    for comparison, row in zip(scored.comparisons, scored.scores, strict=True):
        grades = comparison.scores.get(gold)
        if grades is None:
            continue
        rewards = np.array(row.rewards, dtype=np.float64)
        if np.isfinite(rewards).all() and np.isfinite(grades).all():
            groups.append((rewards, np.array(grades, dtype=np.float64)))
        else:
            num_failed += 1
    if not groups and not num_failed:
        known = sorted({name for each in scored.comparisons for name in each.scores})
        raise ConfigError(
            f"best-of-n by {gold!r}: the replies have no such rating; expected one of {known}.{nearest(gold, known)}"
        )
    return groups, num_failed


def expected_best(rewards: ArrayLike, gold: ArrayLike, ns: Sequence[int]) -> FloatArray:
    """Return the mean gold of the reply with the highest reward among n random ones of N, for each n `[len(ns)]`.

    With the replies sorted by reward, the i-th is the highest of a random subset of n in `C(i-1, n-1)` of `C(N, n)`
    cases, so the mean over all subsets needs no sampling: the order statistic estimator of Nakano et al. 2021 (WebGPT,
    arXiv 2112.09332, appendix I). Replies with equal rewards share the mean of their gold, because a tie is broken at
    random. With `rewards=gold` this is pass@n (Chen et al. 2021, arXiv 2107.03374, section 2.1).

    Args:
        rewards: `[N]`.
        gold: `[N]`, what the chosen reply is worth, such as 1 for a right answer.
        ns: numbers of replies to pick from, each from 1 to N.

    Example:
        >>> expected_best([0.1, 0.9, 0.5], [0, 1, 0], [1, 2, 3]).round(3)
        array([0.333, 0.667, 1.   ])
    """
    values, worth = np.asarray(rewards, dtype=np.float64), np.asarray(gold, dtype=np.float64)
    blocks, counts = np.unique(values, return_inverse=True, return_counts=True)[1:]
    shared = np.bincount(blocks, weights=worth) / counts
    return _order_weights(values.size, tuple(ns)) @ np.repeat(shared, counts)


@functools.lru_cache(maxsize=64)
def _order_weights(size: int, ns: tuple[int, ...]) -> FloatArray:
    """Return the probability that each of N sorted replies is the highest of n random ones `[len(ns), N]`."""
    rows = [[math.comb(i, n - 1) / math.comb(size, n) for i in range(size)] for n in ns]
    return np.array(rows, dtype=np.float64)


def curve_points(size: int) -> tuple[int, ...]:
    """Return the n of a curve: all up to 8, then powers of two, then N."""
    points = set(range(1, min(size, 8) + 1)) | {2**power for power in range(4, size.bit_length())} | {size}
    return tuple(sorted(n for n in points if n <= size))


def kl_bound(n: int) -> float:
    """Return `log n - (n - 1) / n`, an upper bound on the divergence of best-of-n from the policy, in nats.

    Beirami et al. 2024 (arXiv 2401.01879) show that it is a bound and not the divergence itself.
    """
    return math.log(n) - (n - 1) / n
