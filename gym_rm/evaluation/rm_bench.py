"""RM-Bench: right and wrong replies in three styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.data.rows import Source
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmark_results import (
    BenchmarkResult,
    BenchmarkRow,
    by_subset,
    conversations_of,
    list_field,
    mean_of_present,
    read_benchmark,
    replies_of,
    score_rows,
    stored_score,
)
from gym_rm.scorer import Scorer

DOMAINS = ("chat", "math", "code", "safety")
LEVELS = ("hard", "normal", "easy")
STYLES = ("concise", "detailed plain", "detailed markdown")


def evaluate_rm_bench(scorer: Scorer | None, rows: Source, *, model: str = "") -> BenchmarkResult:
    """Evaluate a reward model on RM-Bench.

    A row has `prompt`, `chosen` and `rejected` (each three replies: concise, detailed plain, detailed markdown) and
    `domain`; without `domain`, the name of the file must begin with it. With `scorer=None`, the stored scores
    `score_chosen` and `score_rejected` are used.

    Each chosen reply is compared with each rejected one; it is right if its score is higher. The comparisons are easy
    if the style of the chosen reply is more elaborate, normal if both styles are the same, and hard otherwise. A domain
    is the mean of easy, normal and hard; the total is the mean of the domains. The two safety sets are one domain.

    Source: Liu et al., RM-Bench (arXiv 2410.16184), and the averages in the README of its repository.

    Raises:
        ConfigError: the rows cannot be read, or a row is invalid.
        ScoringError: no row could be scored.
    """
    found = read_benchmark(rows, _read if scorer is None else _read_to_score)
    scored, failed, name = score_rows(scorer, found)
    domains = by_subset(scored)
    matrices = {domain: style_matrix([row.scores or () for row in domains[domain]]) for domain in domains}
    difficulties = {domain: difficulty_scores(matrix) for domain, matrix in matrices.items()}
    values = {domain: float(np.mean(list(difficulties[domain].values()))) for domain in DOMAINS if domain in domains}
    levels = {level: float(np.mean([each[level] for each in difficulties.values()])) for level in LEVELS}
    return BenchmarkResult(
        benchmark="rm-bench",
        model=model or name,
        overall=mean_of_present(values.values()),
        sections={},
        subsets={**values, **levels},
        counts={domain: len(each) for domain, each in domains.items()},
        missing=tuple(domain for domain in DOMAINS if domain not in domains),
        failed=failed,
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


def _read(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    if not {"score_chosen", "score_rejected"} <= row.keys():
        raise ConfigError(f"{where}: without a scorer, a row needs 'score_chosen' and 'score_rejected'.")
    scores = [stored_score(score, where, name) for name in ("score_chosen", "score_rejected")
              for score in list_field(row, name, where, size=3)]  # fmt: skip
    return BenchmarkRow(where, _domain(row, where), row, scores=tuple(scores))


def _read_to_score(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    replies = replies_of(row, where, size=3)
    return BenchmarkRow(where, _domain(row, where), row, conversations_of(row, "prompt", replies, where))


def _domain(row: Mapping[str, Any], where: str) -> str:
    named = str(row["domain"]) if row.get("domain") is not None else Path(where).name
    domain = next((domain for domain in DOMAINS if named.startswith(domain)), None)
    if domain is None:
        raise ConfigError(
            f"{where}: 'domain' must begin with one of {', '.join(DOMAINS)}; got {row.get('domain')!r}. Without this "
            "field, the name of the file must begin with it."
        )
    return domain
