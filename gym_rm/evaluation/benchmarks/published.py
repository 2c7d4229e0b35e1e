"""Benchmarks of steps and of best-of-n, counted from rows with a model's results by the code of their sources."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, BenchmarkRow, by_subset, mean_of_present
from gym_rm.types import Comparison

Rows: TypeAlias = Sequence[Mapping[str, Any]]
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "geometric mean": lambda steps: math.prod(steps) ** (1 / len(steps)),
    "mean": lambda steps: functools.reduce(operator.add, steps) / len(steps),  # `sum` rounds by the version of Python
    "last": lambda steps: steps[-1],
    "max": max,
}


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A benchmark whose rows have results. The first value of `measure` counts, or its mean over subsets (`macro`)."""

    measure: Callable[[Rows], Mapping[str, float | None]]
    macro: bool = False

    def read_row(self, row: Mapping[str, Any], where: str) -> BenchmarkRow:
        """Return a row, which has no replies to score."""
        named = row.get("classification") or row.get("dataset") or str(row.get("id", "")).rpartition("-")[0]
        subset = str(named or Path(where).name.split(".")[0])
        return BenchmarkRow(Comparison((), (), where=where), subset, row, published=True)

    def result(self, rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
        """Return the values of all rows and of each subset. Raises ConfigError if rows lack a field."""
        groups = by_subset(rows)
        try:
            every = {name: self.measure([row.fields for row in group]) for name, group in groups.items()}
            total = self.measure([row.fields for row in rows])
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{self.measure.__name__}: rows lack results, or have others: {error!r}.") from error
        main, *_ = total
        subsets = {name: value for name, values in every.items() if (value := values[main]) is not None}
        overall, sections = (mean_of_present(subsets.values()), {}) if self.macro else (total[main], total)
        counts = {name: sum("annotator" not in row.fields for row in group) for name, group in groups.items()}
        return BenchmarkResult(overall, subsets, counts, sections, details=every)


def process_bench(rows: Rows) -> dict[str, float | None]:
    """Return the harmonic mean of the accuracies on solutions with an error and without one (`label` -1).

    ProcessBench, arXiv 2412.06559, QwenLM/ProcessBench code/run_eval.py. Rows without a `prediction` have `score_steps`
    of `gym-rm score`: the first step that is not above 0.5 is predicted.
    """
    halves: tuple[list[bool], list[bool]] = ([], [])
    for row in rows:
        bad = (place for place, score in enumerate(row.get("score_steps", ())) if not score > 0.5)
        said = next(bad, -1) if "score_steps" in row else row["prediction"]
        halves[row["label"] == -1].append(said == row["label"])
    error, right = map(mean_of_present, halves)
    f1 = None if error is None or right is None else 2 * error * right / ((error + right) or 1)
    return {"F1": f1, "error accuracy": error, "correct accuracy": right}


def prm_bench(rows: Rows) -> dict[str, float | None]:
    """Return 0.5 F1 + 0.5 negative F1 over all steps, 0 without hits (the source writes -1), and accuracies.

    PRMBench, arXiv 2501.03124, ssmisya/PRMBench mr_eval/tasks/prmtest_classified/task.py: `error_steps` from 1,
    `scores` with the labels of validity, and of redundancy for two classes; or `score_steps`, valid above 0.5.
    """
    counts, firsts = Counter[tuple[bool, bool]](), list[float]()
    rows = [row for row in rows if row["classification"] != "correct"] or rows  # which only have a line of their own
    for row in (row for row in rows if row.get("validity", True)):
        labels, bad = row.get("scores") or {}, [step - 1 for step in row["error_steps"]]
        said = labels["step_level_validity_labels"] if labels else [score > 0.5 for score in row["score_steps"]]
        if row["classification"] in ("redundency", "circular") and "step_level_redundancy_labels" in labels:
            said = [not label for label in labels["step_level_redundancy_labels"]]
        counts.update((place not in bad, bool(good)) for place, good in enumerate(said))
        firsts += [not said[place] for place in sorted(bad)[:1] if place < len(said)]
    hits, missed, false, right = (counts[good, said] for good in (True, False) for said in (True, False))
    f1, negative = (
        2 * (p := hit / (hit + wrong)) * (r := hit / (hit + lost)) / (p + r) if hit else 0.0
        for hit, wrong, lost in ((hits, false, missed), (right, missed, false))
    )
    values = {"PRM score": 0.5 * f1 + 0.5 * negative, "F1": f1, "negative F1": negative}
    steps, first = (hits + right) / counts.total(), mean_of_present(firsts)
    return {**values, "step accuracy": steps, "first error accuracy": first}


def agent_process_bench(rows: Rows) -> dict[str, float | None]:
    """Return the share of right labels over all steps, and of rows whose first step -1 (or none) is the right one.

    AgentProcessBench, arXiv 2603.14465, RUCBM/AgentProcessBench eval/compare.py: rows with `messages`, and rows with
    the labels of a model, of which the newest counts; what it did not label is wrong.
    """
    key = operator.itemgetter("data_source", "query_index", "sample_index")
    newest = sorted(rows, key=lambda row: str(row.get("updated_at") or ""))
    said = {key(row): row["step_labels"] or {} for row in newest if "messages" not in row}
    pairs = [(row["step_labels"], said.get(key(row), {})) for row in rows if "messages" in row]
    steps = [labels.get(step) == label for known, labels in pairs for step, label in known.items()]
    firsts = [{min((int(step) for step in each if each[step] == -1), default=-1) for each in pair} for pair in pairs]
    first = mean_of_present(len(each) == 1 for each in firsts)
    return {"step accuracy": sum(steps) / len(steps), "first error accuracy": first}


def reward_math(rows: Rows) -> dict[str, float | None]:
    """Return the share of problems whose right solution is strictly above all others, and the mean of 1 / its rank.

    RewardMATH, arXiv 2410.01729, kimsh0507/RewardMATH_official src/evaluation/eval.py: a wrong solution with the same
    score ranks before the right one. The scores of steps are reduced in each of the ways of `REDUCTIONS`.
    """
    values, steps = dict[str, float | None](), isinstance(rows[0]["score"][0], list)
    for name, reduce in (REDUCTIONS if steps else {"": lambda score: score}).items():
        ranks = []
        for row in rows:
            if "chosen_position" in row:  # the choices of a judge of pairs: a lost pair ranks before
                ranks.append(1 + sum(map(operator.ne, row["score"], row["chosen_position"])))
                continue
            scores = {True: list[float](), False: list[float]()}
            for source, score in zip(row["solution_reference"], row["score"], strict=True):
                scores[source == "human_to_GPT-4"].append(reduce(score))
            ranks.append(1 + sum(score >= max(scores[True]) for score in scores[False]))
        of = f" ({name})" if name else ""
        values[f"accuracy{of}"] = mean_of_present(rank == 1 for rank in ranks)
        values[f"mean reciprocal rank{of}"] = mean_of_present(1 / rank for rank in ranks)
    return values


TABLES: Mapping[str, PublishedTable] = {
    "process-bench": PublishedTable(process_bench, macro=True),
    "prm-bench": PublishedTable(prm_bench),
    "agent-process-bench": PublishedTable(agent_process_bench),
    "reward-math": PublishedTable(reward_math),
}
