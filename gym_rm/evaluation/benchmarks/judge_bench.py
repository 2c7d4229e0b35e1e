"""JudgeBench: pairs of replies to hard questions (Tan et al., arXiv 2410.12784).

A row has `question`, `response_A`, `response_B`, `label` (`"A>B"` or `"B>A"`) and `source`. By the rule of JudgeBench
(`compute_final_metrics` in utils/metrics.py of ScalerLab/JudgeBench at e2c52c2), the verdict in each of the two orders
counts 1 if it is right, -1 if it is wrong and 0 if it is a tie or missing; a pair is right if the sum is above 0, so a
right verdict and a tie are right. Values are shares of all rows. A model that scores each reply has the same verdict in
both orders. The rows of a published result have `judgments` with a `decision` for each order, or null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gym_rm.checks import one_of
from gym_rm.evaluation.benchmarks.rows import (
    BenchmarkResult,
    BenchmarkRow,
    by_subset,
    comparison_of,
    list_field,
    text_field,
)

SOURCES = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")
LABELS = ("A>B", "B>A")


def read_row(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    """Return a row, the better reply first."""
    label = one_of(f"{where}: 'label'", row.get("label"), LABELS)
    names = ("response_A", "response_B") if label == "A>B" else ("response_B", "response_A")
    source = text_field(row, "source", where)
    subset = next((known for known in SOURCES if source.startswith(known)), source)
    replies = {name: row.get(name) for name in names}
    found = BenchmarkRow(comparison_of(row, "question", replies, where), subset, row)
    if "judgments" not in row:
        return found
    said = [each and each.get("decision") for each in list_field(row, "judgments", where)]
    right = [label, *(other for other in LABELS if other != label)]  # the second order is the other one
    lead = sum((one == good) - (one == bad) for one, good, bad in zip(said, right, right[::-1], strict=False))
    return replace(found, lead=float(lead), published=True)


def result(rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
    """Return the shares of right pairs of all rows, and how many pairs are neither right nor wrong."""
    groups = {source: np.array([_lead(row) for row in group]) for source, group in by_subset(rows).items()}
    every = np.concatenate([*groups.values()])
    return BenchmarkResult(
        overall=float(np.mean(every > 0)),
        subsets={source: float(np.mean(leads > 0)) for source, leads in groups.items()},
        counts={source: len(leads) for source, leads in groups.items()},
        missing=tuple(source for source in SOURCES if source not in groups),
        details={"ties": int(np.sum(every == 0))},
    )


def _lead(row: BenchmarkRow) -> float:
    if row.lead is not None or not row.scores:
        return row.lead or 0.0
    return float(np.sign(row.scores[0] - row.scores[1]))
