"""Published benchmarks of reward models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType

from gym_rm.checks import one_of
from gym_rm.data.rows import Source
from gym_rm.evaluation.benchmarks import judge_bench, rewardbench, rewardbench_2, rm_bench
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, BenchmarkRow, read_benchmark, with_scores
from gym_rm.evaluation.scored import ScoredComparisons, score_comparisons
from gym_rm.scorer import Scorer, provenance_of

BENCHMARKS: Mapping[str, ModuleType] = {
    "rewardbench": rewardbench,
    "rewardbench2": rewardbench_2,
    "rm-bench": rm_bench,
    "judge-bench": judge_bench,
}
"""Each has `read_row(row, where)`, and `result(rows)` of scored rows."""


def evaluate_benchmark(name: str, scorer: Scorer, rows: Source, *, model: str = "") -> BenchmarkResult:
    """Evaluate a reward model on the benchmark with this name, one of `BENCHMARKS`.

    Args:
        name: `"rewardbench"`, `"rewardbench2"`, `"rm-bench"` or `"judge-bench"`.
        scorer: the reward model.
        rows: a file in the benchmark's own shape, several such files, a hub data set, or rows.
        model: name of the reward model in the result; by default the name that its scores have.

    Raises:
        ConfigError: the name is unknown, the rows cannot be read, or a row is invalid.
        ScoringError: no row could be scored.

    Example:
        >>> from gym_rm import load_scorer
        >>> length = load_scorer(lambda conversations: [len(each[-1]["content"]) for each in conversations])
        >>> row = {"subset": "hep-go", "prompt": "2 + 2?", "chosen": "four", "rejected": "5"}
        >>> evaluate_benchmark("rewardbench", length, [row]).sections["Reasoning"]
        1.0
    """
    read = read_benchmark(rows, BENCHMARKS[one_of("benchmark", name, tuple(BENCHMARKS))].read_row)
    comparisons, made = tuple(row.comparison for row in read), provenance_of(scorer)
    named, plain = (type(scorer).__name__, None) if made is None else (made.model, dataclasses.asdict(made))
    scored = ScoredComparisons(comparisons, score_comparisons(scorer, comparisons), model or named, plain)
    return benchmark_result(name, read, scored)


def benchmark_result(name: str, rows: Sequence[BenchmarkRow], scored: ScoredComparisons) -> BenchmarkResult:
    """Return the result of rows whose comparisons were scored, in the same order; raises ScoringError if none was."""
    found, failed = with_scores(rows, scored.scores)
    result: BenchmarkResult = BENCHMARKS[name].result(found)
    return dataclasses.replace(result, benchmark=name, model=scored.model, failed=failed, judge=scored.judge())
