"""JudgeBench: pairs of replies to hard questions (Tan et al., arXiv 2410.12784).

A row has `question`, `response_A`, `response_B`, `label` (`"A>B"` or `"B>A"`) and `source`. A pair is right if the
better reply has the higher score; a reward model judges both orders of a pair alike. A judge that compares is asked in
both, and has a tie if its verdict changes (JudgeBench also takes a verdict and a tie as right). The total is the share
of right pairs over all sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.checks import one_of
from gym_rm.evaluation.benchmarks.rows import (
    BenchmarkResult,
    BenchmarkRow,
    by_subset,
    comparison_of,
    mean_of_present,
    text_field,
)

SOURCES = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")


def read_row(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    """Return a row, the better reply first."""
    label = one_of(f"{where}: 'label'", row.get("label"), ("A>B", "B>A"))
    names = ("response_A", "response_B") if label == "A>B" else ("response_B", "response_A")
    source = text_field(row, "source", where)
    subset = next((known for known in SOURCES if source.startswith(known)), source)
    replies = {name: row.get(name) for name in names}
    return BenchmarkRow(comparison_of(row, "question", replies, where), subset, row)


def result(rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
    """Return the shares of right pairs, and the number of pairs with equal scores, which are wrong."""
    groups = by_subset(rows)
    return BenchmarkResult(
        overall=_accuracy(rows),
        subsets={source: _accuracy(group) for source, group in groups.items()},
        counts={source: len(group) for source, group in groups.items()},
        missing=tuple(source for source in SOURCES if source not in groups),
        details={"ties": sum(row.scores[0] == row.scores[1] for row in rows)},
    )


def _accuracy(rows: Sequence[BenchmarkRow]) -> float:
    return mean_of_present(float(row.scores[0] > row.scores[1]) for row in rows) or 0.0
