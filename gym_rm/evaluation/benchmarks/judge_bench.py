"""JudgeBench: pairs of replies to hard questions (Tan et al., arXiv 2410.12784).

A row has `question`, `response_A`, `response_B`, `label` (`"A>B"` or `"B>A"`) and `source`. By JudgeBench's rule
(`compute_final_metrics` in utils/metrics.py of ScalerLab/JudgeBench at e2c52c2) the verdict in each of the two orders
counts 1 if it is right, -1 if it is wrong and 0 if it is a tie or missing, and a pair is right if the sum is above 0. A
model that scores single replies says the same in both orders. Values are shares of all rows, also of those without a
verdict. Rows of a published result have `judgments`, with a `decision` or null for each order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gym_rm.checks import one_of
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rows import (
    BenchmarkResult,
    BenchmarkRow,
    by_subset,
    comparison_of,
    list_field,
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
    found = BenchmarkRow(comparison_of(row, "question", replies, where), subset, row)
    if "judgments" not in row:
        return found
    judgments = [{"decision": None} if each is None else each for each in list_field(row, "judgments", where)]
    if len(judgments) > 2 or not all(isinstance(each, Mapping) and "decision" in each for each in judgments):
        raise ConfigError(f"{where}: 'judgments' must be 1 or 2, null or with a 'decision', got {judgments!r:.80}.")
    asked = [(each["decision"], good) for each, good in zip(judgments, (label, label[::-1]), strict=False)]
    return replace(found, scores=(sum((one == good) - (one == good[::-1]) for one, good in asked), 0), published=True)


def result(rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
    """Return the shares of right pairs, and the number of those that are neither right nor wrong."""
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
