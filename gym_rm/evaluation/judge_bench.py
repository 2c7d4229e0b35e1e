"""JudgeBench: pairs of replies to hard questions, judged in both orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.checks import one_of
from gym_rm.data.rows import Source, show
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmark_results import (
    BenchmarkResult,
    BenchmarkRow,
    by_subset,
    conversations_of,
    list_field,
    read_benchmark,
    score_rows,
    text_field,
)
from gym_rm.scorer import Scorer

SOURCES = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")
_SWAPPED = {"A>B": "B>A", "B>A": "A>B"}


def evaluate_judge_bench(scorer: Scorer | None, rows: Source, *, model: str = "") -> BenchmarkResult:
    """Evaluate a reward model on JudgeBench.

    A row has `question`, `response_A`, `response_B`, `label` (`"A>B"` or `"B>A"`) and `source`. With `scorer=None`, the
    stored `judgments` are used, as in the files that JudgeBench publishes.

    A pair is judged in both orders and right if `agreement` is above 0; a pair with equal scores is wrong. The total is
    the share of right pairs over all sources.

    Source: Tan et al., JudgeBench (arXiv 2410.12784), and the metrics of its repository.

    Raises:
        ConfigError: the rows cannot be read, or a row is invalid.
        ScoringError: no row could be scored.
    """
    found = read_benchmark(rows, _read if scorer is None else _read_to_score)
    scored, failed, name = score_rows(scorer, found)
    groups = by_subset(scored)
    accuracies = {source: _accuracy(group) for source, group in groups.items()}
    return BenchmarkResult(
        benchmark="judge-bench",
        model=model or name,
        overall=_accuracy(scored),
        sections={},
        subsets=accuracies,
        counts={source: len(group) for source, group in groups.items()},
        missing=tuple(source for source in SOURCES if source not in accuracies),
        failed=failed,
        details={"ties": sum(_agreement(row) == 0 for row in scored)},
    )


def agreement(label: str, decisions: Sequence[str | None]) -> int:
    """Return the number of decisions that agree with the label minus the number that say the opposite.

    Args:
        label: `"A>B"` or `"B>A"`.
        decisions: the decision in the given order, and the decision in the other order, if there is one, as it was
            made: its A is the reply that is B in the given order. None, or any other text, is no decision.
    """
    turned = [decisions[0], *(_SWAPPED.get(each or "") for each in decisions[1:])]
    return sum((each == label) - (each == _SWAPPED[label]) for each in turned)


def _accuracy(rows: Sequence[BenchmarkRow]) -> float:
    return sum(_agreement(row) > 0 for row in rows) / len(rows)


def _agreement(row: BenchmarkRow) -> float:
    scores = row.scores or ()
    if len(scores) == 1:
        return scores[0]
    # Both orders of a pair have the same scores, so the two decisions never contradict each other.
    decision = "A>B" if scores[0] > scores[1] else "B>A" if scores[0] < scores[1] else None
    return agreement(row.fields["label"], [decision])


def _read(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    label = _label(row, where)
    judgments = list_field(row, "judgments", where)
    if len(judgments) > 2 or not all(judgment is None or isinstance(judgment, Mapping) for judgment in judgments):
        raise ConfigError(f"{where}: 'judgments' must be one or two objects with a 'decision', got {show(judgments)}.")
    decisions = [judgment.get("decision") if judgment else None for judgment in judgments]
    return BenchmarkRow(where, _source(row, where), row, scores=(float(agreement(label, decisions)),))


def _read_to_score(row: Mapping[str, Any], where: str) -> BenchmarkRow:
    _label(row, where)
    replies = {name: row.get(name) for name in ("response_A", "response_B")}
    return BenchmarkRow(where, _source(row, where), row, conversations_of(row, "question", replies, where))


def _label(row: Mapping[str, Any], where: str) -> str:
    return str(one_of(f"{where}: 'label'", row.get("label"), tuple(_SWAPPED)))


def _source(row: Mapping[str, Any], where: str) -> str:
    source = text_field(row, "source", where)
    return next((known for known in SOURCES if source.startswith(known)), source)
