"""Published benchmarks of reward models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.evaluation.benchmarks import judge_bench, published, rewardbench, rewardbench_2, rm_bench
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, BenchmarkRow, with_scores
from gym_rm.evaluation.scored import ScoredComparisons

BENCHMARKS: Mapping[str, Any] = {
    "rewardbench": rewardbench,
    "rewardbench2": rewardbench_2,
    "rm-bench": rm_bench,
    "judge-bench": judge_bench,
    "process-bench": published.PublishedTable(published.process_bench, macro=True),
    "prm-bench": published.PublishedTable(published.prm_bench),
    "agent-process-bench": published.PublishedTable(published.agent_process_bench),
    "reward-math": published.PublishedTable(published.reward_math),
    "ppe": published.PublishedTable(published.ppe),
}
"""Each has `read_row(row, where)`, and `result(rows)` of scored rows."""


def benchmark_result(name: str, rows: Sequence[BenchmarkRow], scored: ScoredComparisons) -> BenchmarkResult:
    """Return the result of rows whose comparisons were scored, in the same order; raises ScoringError if none was."""
    found, failed = with_scores(rows, scored.scores, both_orders=name == "judge-bench")
    result: BenchmarkResult = BENCHMARKS[name].result(found)
    return dataclasses.replace(result, benchmark=name, model=scored.model, failed=failed, judge=scored.judge())
