"""RM-Bench: right and wrong replies in three styles (Liu et al., arXiv 2410.16184, and the README of its repository).

A row has `prompt`, `chosen` and `rejected` (each three replies: concise, detailed plain, detailed markdown) and
`domain`; without `domain`, the name of the file must begin with it.

Each chosen reply is compared with each rejected one; it is right if its score is higher. The comparisons are easy if
the style of the chosen reply is more elaborate, normal if both styles are the same, and hard otherwise. A domain is the
mean of easy, normal and hard; the total is the mean of the domains. The two safety sets are one domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rows import (
    BenchmarkResult,
    BenchmarkRow,
    by_subset,
    comparison_of,
    mean_of_present,
    replies_of,
)

DOMAINS = ("chat", "math", "code", "safety")
LEVELS = ("hard", "normal", "easy")
STYLES = ("concise", "detailed plain", "detailed markdown")


def read_row(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    """Return a row, the chosen replies first."""
    replies = replies_of(row, where, size=len(STYLES))
    return BenchmarkRow(comparison_of(row, "prompt", replies, where), _domain(row, where), row)


def result(rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
    """Return the values of the domains and of the levels of difficulty."""
    domains = by_subset(rows)
    matrices = {domain: style_matrix([row.scores for row in domains[domain]]) for domain in domains}
    difficulties = {domain: difficulty_scores(matrix) for domain, matrix in matrices.items()}
    values = {domain: float(np.mean(list(difficulties[domain].values()))) for domain in DOMAINS if domain in domains}
    levels = {level: float(np.mean([each[level] for each in difficulties.values()])) for level in LEVELS}
    return BenchmarkResult(
        overall=mean_of_present(values.values()),
        subsets={**values, **levels},
        counts={domain: len(each) for domain, each in domains.items()},
        missing=tuple(domain for domain in DOMAINS if domain not in domains),
        details={
            "styles": STYLES,
            "difficulties": difficulties,
            "matrices": {domain: matrix.tolist() for domain, matrix in matrices.items()},
        },
    )


def style_matrix(scores: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return the share of right comparisons `[3, 3]`, for chosen replies by rejected replies of each style.

    Args:
        scores: for each row the scores of the three chosen and then of the three rejected replies `[N, 6]`.
    """
    table = np.asarray(scores, dtype=np.float64)
    right: NDArray[np.float64] = (table[:, :3, None] > table[:, None, 3:]).mean(axis=0)
    return right


def difficulty_scores(matrix: NDArray[np.float64]) -> dict[str, float]:
    """Return the means of the comparisons above (hard), on (normal) and below (easy) the diagonal."""
    above = np.triu_indices(len(matrix), 1)
    return {
        "hard": float(matrix[above].mean()),
        "normal": float(np.diag(matrix).mean()),
        "easy": float(matrix.T[above].mean()),
    }


def _domain(row: Mapping[str, Any], where: str) -> str:
    named = str(row["domain"]) if row.get("domain") is not None else Path(where).name
    domain = next((domain for domain in DOMAINS if named.startswith(domain)), None)
    if domain is None:
        raise ConfigError(
            f"{where}: 'domain' must begin with one of {', '.join(DOMAINS)}; got {row.get('domain')!r}. Without this "
            "field, the name of the file must begin with it."
        )
    return domain
