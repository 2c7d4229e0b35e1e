"""Published benchmarks of reward models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from gym_rm.checks import one_of
from gym_rm.data.rows import Source
from gym_rm.evaluation.benchmarks import judge_bench, rewardbench, rewardbench_2, rm_bench
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, read_benchmark, score_rows
from gym_rm.scorer import Scorer

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
        >>> from gym_rm.scorer import load_scorer
        >>> length = load_scorer(lambda conversations: [len(each[-1]["content"]) for each in conversations])
        >>> row = {"subset": "hep-go", "prompt": "2 + 2?", "chosen": "four", "rejected": "5"}
        >>> evaluate_benchmark("rewardbench", length, [row]).sections["Reasoning"]
        1.0
    """
    benchmark = BENCHMARKS[one_of("benchmark", name, tuple(BENCHMARKS))]
    scored, failed, scorer_name = score_rows(scorer, read_benchmark(rows, benchmark.read_row))
    result: BenchmarkResult = benchmark.result(scored)
    return replace(result, benchmark=name, model=model or scorer_name, failed=failed)
