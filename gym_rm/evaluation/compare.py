"""Two reward models on the same rows: is one of them better?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import curve_points, expected_best, graded_replies
from gym_rm.evaluation.bootstrap import DEFAULT_RESAMPLING, FloatArray, Interval, Resampling, ratio_samples
from gym_rm.evaluation.scored import RowScores, ScoredComparisons, pair_table


@dataclass(frozen=True, slots=True, eq=False)
class ModelComparison:
    """The pairs that two models A and B both scored.

    Attributes:
        num_pairs: number of pairs with rewards of both models.
        num_prompts: number of prompts of these pairs.
        accuracy: accuracy of A and of B on these pairs.
        difference: accuracy of A minus that of B, with its interval; prompts are drawn, with all of their pairs.
        only_first: number of pairs that only A gets right.
        only_second: number of pairs that only B gets right.
        mcnemar: two-sided p of the exact McNemar test. It takes the pairs as independent: if a prompt has several
            pairs, trust the interval.
        agreement: share of the pairs on which both prefer the same reply.
        best_of_n: mean grade of the pick of A minus that of B at the largest n, or None without grades.
    """

    num_pairs: int
    num_prompts: int
    accuracy: tuple[float, float]
    difference: Interval
    only_first: int
    only_second: int
    mcnemar: float
    agreement: float
    best_of_n: Interval | None = None


def compare_models(
    first: ScoredComparisons,
    second: ScoredComparisons,
    *,
    gold: str | None = None,
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> ModelComparison:
    """Compare two models on the pairs that both of them scored.

    Raises:
        ConfigError: the two have other comparisons, or no pair with rewards of both.
    """
    if first.comparisons != second.comparisons:
        raise ConfigError(
            f"two models are compared on the same rows, got {len(first.comparisons)} rows of {first.model!r} and "
            f"{len(second.comparisons)} other rows of {second.model!r}."
        )
    a, b = _both_scored(first, second)
    pairs, against = pair_table(a), pair_table(b)
    if not pairs.margins.size:
        raise ConfigError(f"no pair has rewards of both {first.model!r} and {second.model!r}.")
    right, also = pairs.margins > 0, against.margins > 0
    only_first, only_second = int(np.sum(right & ~also)), int(np.sum(also & ~right))
    difference = _paired(right.astype(np.float64) - also, pairs.prompts, resampling)
    return ModelComparison(
        num_pairs=int(right.size),
        num_prompts=int(np.unique(pairs.prompts).size),
        accuracy=(float(right.mean()), float(also.mean())),
        difference=difference,
        only_first=only_first,
        only_second=only_second,
        mcnemar=mcnemar_exact(only_first, only_second),
        agreement=float(np.mean(np.sign(pairs.margins) == np.sign(against.margins))),
        best_of_n=None if gold is None else _best_of_n_difference(a, b, gold, resampling),
    )


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's test in its exact form (McNemar 1947, Psychometrika 12).

    Under the null hypothesis the smaller of the two counts is binomial with probability 1/2.

    Example:
        >>> round(mcnemar_exact(1, 9), 9)
        0.021484375
    """
    total, smaller = only_first + only_second, min(only_first, only_second)
    logs = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(smaller + 1)]
    return min(1.0, float(2 * np.exp(np.logaddexp.reduce(logs) - total * math.log(2))))


def _both_scored(a: ScoredComparisons, b: ScoredComparisons) -> tuple[ScoredComparisons, ScoredComparisons]:
    """Return both models without the rewards that the other one lacks."""

    def both(one: RowScores, other: RowScores) -> RowScores:
        pairs = zip(one.rewards, other.rewards, strict=True)
        return replace(one, rewards=tuple(x if math.isfinite(y) else math.nan for x, y in pairs))

    rows = list(zip(a.scores, b.scores, strict=True))
    ours, theirs = tuple(both(x, y) for x, y in rows), tuple(both(y, x) for x, y in rows)
    return replace(a, scores=ours), replace(b, scores=theirs)


def _paired(differences: FloatArray, prompts: NDArray[np.int64], resampling: Resampling) -> Interval:
    totals = np.bincount(prompts, weights=differences).astype(np.float64)
    counts = np.bincount(prompts).astype(np.float64)
    value, samples = ratio_samples(totals[:, None], counts[:, None], resampling=resampling)
    return resampling.interval(value[0], samples[:, 0])


def _best_of_n_difference(
    a: ScoredComparisons, b: ScoredComparisons, gold: str, resampling: Resampling
) -> Interval | None:
    groups = [graded_replies(each, gold=gold)[0] for each in (a, b)]
    values = [
        expected_best(rewards, grades, curve_points(len(rewards))[-1:])[0]
        - expected_best(others, grades, curve_points(len(rewards))[-1:])[0]
        for (rewards, grades), (others, _) in zip(*groups, strict=True)
    ]
    if not values:
        return None
    return _paired(np.array(values), np.arange(len(values)), resampling)
