"""Rows and results of published benchmarks, and how rows are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from gym_rm.data.messages import parse_messages
from gym_rm.data.rows import Source, rows_of, show
from gym_rm.errors import ConfigError
from gym_rm.evaluation.judges import JudgeReport
from gym_rm.evaluation.scored import RowScores
from gym_rm.plain_values import to_plain
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Comparison


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One row of a benchmark.

    Attributes:
        comparison: the replies to score; `where` is the file and line of the row.
        subset: part of the benchmark that the row belongs to.
        fields: the row as it was read.
        scores: one score per reply; empty before scoring.
        published: whether the row came with its results, so that no model is asked.
    """

    comparison: Comparison
    subset: str
    fields: Mapping[str, Any]
    scores: tuple[float, ...] = ()
    published: bool = False


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Result of a reward model on a benchmark. All values are shares from 0 to 1, or None without rows.

    Attributes:
        overall: the total of the leaderboard, over the parts that are present.
        sections: values of groups of subsets, in RewardBench 1.
        subsets: value of every part that has rows.
        counts: number of scored rows by section and by subset.
        missing: subsets of the benchmark without a value; sections and total are computed without them.
        not_counted: subsets in the rows that are not part of the total.
        failed: rows without a score, by file and line, with the reason. They are in no value, or not right.
        details: other values of this benchmark.
        benchmark: name of the benchmark.
        model: name of the reward model.
        judge: what the model is worth as a judge, if it is one.

    Example:
        >>> BenchmarkResult(0.75, {"alpacaeval-easy": 0.75}, {}).table_rows()[0]
        ('overall', 0.75, None)
    """

    overall: float | None
    subsets: Mapping[str, float]
    counts: Mapping[str, int]
    sections: Mapping[str, float | None] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    not_counted: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    benchmark: str = ""
    model: str = ""
    judge: JudgeReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return to_plain(asdict(self))  # type: ignore[no-any-return]

    def table_rows(self) -> list[tuple[str, float | None, int | None]]:
        """Return `(name, value, number of rows)` of the total, the sections and the subsets, which are indented."""
        sections = [(name, value, self.counts.get(name)) for name, value in self.sections.items()]
        subsets = [(f"  {name}", value, self.counts.get(name)) for name, value in self.subsets.items()]
        return [("overall", self.overall, None), *sections, *subsets]

    def notes(self) -> list[str]:
        """Return a sentence for everything that the values leave out."""
        notes = []
        if self.missing:
            names = ", ".join(self.missing)
            notes.append(f"Without rows, and left out of every mean: {names} ({len(self.missing)}).")
        if self.not_counted:
            notes.append(f"Not part of {self.benchmark}, and in no section: {', '.join(self.not_counted)}.")
        if self.failed:
            where, reason = next(iter(self.failed.items()))
            counted = "a missing verdict counts 0" if self.benchmark == "judge-bench" else "in no value"
            notes.append(f"Rows without a score, {counted}: {len(self.failed)}; the first is {where}: {reason}")
        return notes


def read_benchmark(
    source: Source, read_row: Callable[[Mapping[str, Any], str], BenchmarkRow]
) -> tuple[BenchmarkRow, ...]:
    """Read all rows of a benchmark: from a file or list as in `load_prompts`, or a list of several files.

    Raises:
        ConfigError: the source cannot be read, it has no rows, or a row is invalid.
    """
    rows = []
    names = isinstance(source, list | tuple) and source and all(isinstance(each, str | os.PathLike) for each in source)
    for each in cast("Sequence[Source]", source) if names else [source]:
        for where, row in rows_of(each, "rows"):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{where}: expected a row of the benchmark, got {show(row)}.")
            rows.append(read_row(row, where))
    if not rows:
        raise ConfigError("the benchmark has no rows; expected at least one.")
    return tuple(rows)


def with_scores(
    rows: Sequence[BenchmarkRow], scores: Sequence[RowScores], *, both_orders: bool = False
) -> tuple[tuple[BenchmarkRow, ...], dict[str, str]]:
    """Return the rows whose replies all have a score, and the reasons of the others by file and line.
    With `both_orders` a row of two replies has the verdicts for less those against the first, and stays without some.

    Raises:
        ScoringError: there is no such row.
    """
    scored, failed = [], {}
    for row, found in zip(rows, scores, strict=True):
        reason = next((each for each in found.errors if each), None)
        if reason is None and found.judge is not None and found.judge.judge_unread > 0:  # other replies have a reward
            reason = f"{found.judge.judge_unread:g} of {found.judge.judge_questions:g} questions have no verdict"
        if both_orders and (found.judge is not None) and math.isfinite(found.judge.judge_lead):
            scored.append(replace(row, scores=(found.judge.judge_lead, 0.0)))
        elif both_orders or reason is None:
            scored.append(replace(row, scores=(0.0, 0.0) if reason else found.rewards))
        if reason is not None:
            failed[row.comparison.where] = reason
    if len(failed) == len(rows) and not any(any(row.scores) for row in scored):
        rewards = [reward for found in scores for reward in found.rewards]
        errors = [error for found in scores for error in found.errors]
        raise ScoringError(Scores.from_rewards(rewards, errors=errors))
    return tuple(scored), failed


def text_field(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must be a text."""
    value = row.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name!r} must be a text, got {show(value)}.")
    return value


def list_field(row: Mapping[str, Any], name: str, where: str, size: int | None = None) -> list[Any]:
    """Return a field that must be a list, of this size if one is given."""
    value = row.get(name)
    if not isinstance(value, list) or not value or (size is not None and len(value) != size):
        raise ConfigError(f"{where}: {name!r} must be a list of {size or 'at least one'} entries, got {show(value)}.")
    return value


def comparison_of(row: Mapping[str, Any], prompt: str, replies: Mapping[str, Any], where: str) -> Comparison:
    """Return the prompt in the field `prompt`, a text or messages, with the replies by name."""
    messages = parse_messages(row.get(prompt), where, prompt)
    parsed = [parse_messages(reply, where, name, text_role="assistant") for name, reply in replies.items()]
    return Comparison(messages, tuple(parsed), where=where)


def replies_of(row: Mapping[str, Any], where: str, size: int | None = None) -> dict[str, Any]:
    """Return the replies in the lists `chosen` and `rejected` by name, the chosen ones first."""
    return {
        f"{name}[{index}]": reply
        for name in ("chosen", "rejected")
        for index, reply in enumerate(list_field(row, name, where, size))
    }


def by_subset(rows: Iterable[BenchmarkRow]) -> dict[str, list[BenchmarkRow]]:
    """Return the rows of each subset, by name."""
    groups: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        groups.setdefault(row.subset, []).append(row)
    return dict(sorted(groups.items()))


def mean_of_present(values: Iterable[float | None], weights: Iterable[float] | None = None) -> float | None:
    """Return the weighted mean of the values that are not None, or None if there is none."""
    values = list(values)
    pairs = [(value, weight) for value, weight in zip(values, weights or [1.0] * len(values), strict=True)
             if value is not None]  # fmt: skip
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None
