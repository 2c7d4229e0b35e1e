"""Two reward models on the same rows: is one of them better?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.evaluation.best_of_n import curve_points, expected_best, graded_replies
from gym_rm.evaluation.bootstrap import FloatArray, Interval, mean_intervals
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


def compare_models(first: ScoredComparisons, second: ScoredComparisons, *, gold: str | None = None) -> ModelComparison:
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
    difference = _paired(right.astype(np.float64) - also, pairs.prompts)
    return ModelComparison(
        num_pairs=int(right.size),
        num_prompts=int(np.unique(pairs.prompts).size),
        accuracy=(float(right.mean()), float(also.mean())),
        difference=difference,
        only_first=only_first,
        only_second=only_second,
        mcnemar=mcnemar_exact(only_first, only_second),
        agreement=float(np.mean(np.sign(pairs.margins) == np.sign(against.margins))),
        best_of_n=None if gold is None else _best_of_n_difference(a, b, gold),
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


def _paired(differences: FloatArray, prompts: NDArray[np.int64]) -> Interval:
    (found,) = mean_intervals(differences, np.ones((differences.size, 1)), prompts)
    assert found is not None, "there are differences"
    return found


def _best_of_n_difference(a: ScoredComparisons, b: ScoredComparisons, gold: str) -> Interval | None:
    groups = [graded_replies(each, gold=gold)[0] for each in (a, b)]
    values = [
        expected_best(rewards, grades, curve_points(len(rewards))[-1:])[0]
        - expected_best(others, grades, curve_points(len(rewards))[-1:])[0]
        for (rewards, grades), (others, _) in zip(*groups, strict=True)
    ]
    return _paired(np.array(values), np.arange(len(values))) if values else None
