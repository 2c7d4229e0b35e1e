"""Benchmarks of steps and of best-of-n, counted from rows with a model's results by the code of their sources."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, BenchmarkRow, by_subset, mean_of_present
from gym_rm.evaluation.best_of_n import expected_best
from gym_rm.types import Comparison

MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
Rows: TypeAlias = Sequence[Mapping[str, Any]]
Values: TypeAlias = dict[str, float | None]
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min, "product": math.prod, "geometric mean": lambda steps: math.prod(steps) ** (1 / len(steps)),
    "mean": lambda steps: sum(steps) / len(steps), "last": lambda steps: steps[-1], "max": max,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A benchmark whose rows have results. The first value of `measure` counts, or its mean over subsets (`macro`)."""

    measure: Callable[[Rows], Values]
    macro: bool = False

    def read_row(self, row: Mapping[str, Any], where: str) -> BenchmarkRow:
        """Return a row, which has no replies to score."""
        named = row.get("classification") or row.get("dataset") or str(row.get("id", "")).rpartition("-")[0]
        named = named or Path(where).name.split(".")[0]
        return BenchmarkRow(Comparison((), (), where=where), str(named), row, published=True)

    def result(self, rows: Sequence[BenchmarkRow]) -> BenchmarkResult:
        """Return the values of all rows and of each subset. Raises ConfigError if rows lack a field."""
        groups = {name: [row.fields for row in group] for name, group in by_subset(rows).items()}
        try:
            details = {name: self.measure(group) for name, group in groups.items()}
            total = self.measure([row.fields for row in rows])
        except MALFORMED as error:
            where = next((row.comparison.where for row in rows if self._error(row) == repr(error)), "all rows")
            raise ConfigError(f"{where}: rows lack results, or have others: {error!r}.") from error
        subsets = {name: value for name, each in details.items() if (value := next(iter(each.values()))) is not None}
        overall = mean_of_present(subsets.values()) if self.macro else next(iter(total.values()))
        counts = {name: sum("annotator" not in row for row in group) for name, group in groups.items()}
        sections, missing = {} if self.macro else total, tuple(groups.keys() - subsets.keys()) if self.macro else ()
        return BenchmarkResult(overall, subsets, counts, sections, tuple(sorted(missing)), details=details)

    def _error(self, row: BenchmarkRow) -> str | None:
        try:
            self.measure([row.fields])
        except MALFORMED as error:
            return repr(error)
        return None


def process_bench(rows: Rows) -> Values:
    """Return the harmonic mean of the accuracies on solutions with an error and without one (`label` -1).

    ProcessBench, arXiv 2412.06559, QwenLM/ProcessBench code/run_eval.py. A row has a `prediction`, or the `score_steps`
    of `gym-rm score`, of which the first one that is not above 0.5 is predicted. Without steps nothing is, as by None.
    """
    halves: tuple[list[bool], list[bool]] = ([], [])
    for row in rows:
        failed = row.get("score_error") or row.get("score_steps") == []
        bad = (place for place, score in enumerate(row.get("score_steps", ())) if not score > 0.5)
        said = None if failed else next(bad, -1) if "score_steps" in row else row["prediction"]
        halves[int(row["label"]) == -1].append(said is not None and int(said) == int(row["label"]))
    error, right = map(mean_of_present, halves)
    f1 = None if error is None or right is None else 2 * error * right / ((error + right) or 1)
    return {"F1": f1, "error accuracy": error, "correct accuracy": right}


def prm_bench(rows: Rows) -> Values:
    """Return 0.5 F1 + 0.5 negative F1 over all steps, 0 without hits (the source writes -1), and accuracies.

    PRMBench, arXiv 2501.03124, ssmisya/PRMBench mr_eval/tasks/prmtest_classified/task.py: `error_steps` from 1, and
    `scores` with labels of validity, and of redundancy for two classes; or `score_steps`, valid above 0.5.
    """
    counts, firsts = Counter[tuple[bool, bool]](), list[bool]()
    rows = [*{row.get("idx", place): row for place, row in [*enumerate(rows)][::-1]}.values()]  # the first of an idx
    rows = [row for row in rows if row["classification"] != "correct"] or rows  # which only have a line of their own
    for row in (row for row in rows if row.get("validity", True) and not row.get("score_error")):
        labels, bad = row.get("scores") or {}, [step - 1 for step in row["error_steps"]]
        said = labels["step_level_validity_labels"] if labels else [score > 0.5 for score in row["score_steps"]]
        if row["classification"] in ("redundency", "circular"):
            said = [not label for label in labels.get("step_level_redundancy_labels", ())] or said
        counts.update((place not in bad, good == 1) for place, good in enumerate(said))
        firsts += [said[place] == 0 for place in sorted(bad)[:1] if place < len(said)]
    hits, missed, false, right = (counts[good, said] for good in (True, False) for said in (True, False))
    f1, negative = (2 * each / ((2 * each + missed + false) or 1) for each in (hits, right))
    steps = (hits + right) / counts.total() if counts else None
    accuracies = {"step accuracy": steps, "first error accuracy": mean_of_present(firsts)}
    return {"PRM score": 0.5 * f1 + 0.5 * negative if counts else None, "F1": f1, "negative F1": negative, **accuracies}


def agent_process_bench(rows: Rows) -> Values:
    """Return the share of right labels over all steps, and of rows whose first step -1 (or none) is the right one.

    AgentProcessBench, arXiv 2603.14465, RUCBM/AgentProcessBench eval/compare.py: rows with `messages`, and rows of
    which the newest has the labels of a model (one `annotator`); what it did not label is wrong.
    """
    key = operator.itemgetter("data_source", "query_index", "sample_index")
    newest = sorted(rows, key=lambda row: str(row.get("updated_at") or ""))
    said = {key(row): row["step_labels"] or {} for row in newest if "messages" not in row}
    known = [row for row in rows if "messages" in row]
    models = {(key(row), row.get("annotator")) for row in rows if "messages" not in row}
    if not said or len(models) > len(said) or len({*map(key, known)}) < len(known):
        raise ValueError("expected each trajectory once, and its labels by one model")
    pairs = [(row["step_labels"], said.get(key(row), {})) for row in known]
    steps = [labels.get(step) == label for known, labels in pairs for step, label in known.items()]
    firsts = [{min((int(step) for step in each if each[step] == -1), default=-1) for each in pair} for pair in pairs]
    first = mean_of_present(len(each) == 1 for each in firsts)
    return {"step accuracy": sum(steps) / len(steps), "first error accuracy": first}


def reward_math(rows: Rows) -> Values:
    """Return the share of problems whose right solution is strictly above all others, and the mean of 1 / its rank.

    RewardMATH, arXiv 2410.01729, kimsh0507/RewardMATH_official src/evaluation/eval.py: a wrong solution with the same
    score ranks before the right one. The scores of steps are reduced in each of the ways of `REDUCTIONS`.
    """
    values, steps = Values(), isinstance(rows[0]["score"][0], list)
    for name, reduce in (REDUCTIONS if steps else {"": float}).items():
        ranks = []
        for row in rows:
            if "chosen_position" in row:  # a judge of pairs
                lost = sum(one != other for one, other in zip(row["score"], row["chosen_position"], strict=True))
            else:
                right = [source == "human_to_GPT-4" for source in row["solution_reference"]]
                scores = list(map(reduce, row["score"]))
                (best,) = itertools.compress(scores, right)
                lost = sum(not score < best for score, own in zip(scores, right, strict=True) if not own)
            ranks.append(1 + lost)
        of = f" ({name})" if name else ""
        values[f"accuracy{of}"] = mean_of_present(rank == 1 for rank in ranks)
        values[f"mean reciprocal rank{of}"] = mean_of_present(1 / rank for rank in ranks)
    return values


def ppe(rows: Rows) -> Values:
    """Return the accuracy on pairs, where equal scores are wrong, and for known answers best of K and the ROC area.

    PPE, arXiv 2410.14872, sections 4 and 5: `score_1`, ... with `winner` (ties are left out), or with `scores` and
    `sampled_conflict_pairs`. Best of K is over all subsets; its loss is the squared distance from a perfect pick.
    Scores that are missing or "$ERROR$" are below all others.
    """
    hits, curves, areas = list[bool](), list[Any](), list[float]()
    for row in rows:
        said = [row[name] for name in (f"score_{k}" for k in range(1, len(row) + 1)) if name in row]
        given = [None if each == "$ERROR$" else np.ravel(each)[0] for each in said]
        scores = np.nan_to_num(np.array(given, dtype=np.float64), nan=-1e308)  # no infinity, so that they differ by 0
        if "scores" not in row and row["winner"] not in ("model_a", "model_b", "tie", "tie (bothbad)"):
            raise ValueError(f"unknown winner {row['winner']!r}")
        grades = np.array(row.get("scores") or [row["winner"] == each for each in ("model_a", "model_b")], dtype=float)
        pairs = row["sampled_conflict_pairs"] if "scores" in row else [(0, 1)]
        better = [pair if grades[pair[0]] > grades[pair[1]] else pair[::-1] for pair in pairs]
        hits += [bool(scores[a] > scores[b]) for a, b in better if grades[a] != grades[b]]
        if "scores" in row:
            curves.append([expected_best(each, grades, range(1, len(grades) + 1)) for each in (scores, grades)])
            wins = np.sign(np.subtract.outer(scores[grades > 0], scores[grades == 0]))
            areas += [float(wins.mean() + 1) / 2] if wins.size else []
    values: Values = {"accuracy": mean_of_present(hits)}
    if curves:
        picked, perfect = np.mean(curves, axis=0)
        values |= {"best of K: maximum": float(picked.max()), "best of K: end": float(picked[-1])}
        values |= {"best of K: loss": float(np.mean((perfect - picked) ** 2)), "ROC area": mean_of_present(areas)}
    return values
