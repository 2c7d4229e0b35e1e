"""Rows and results of published benchmarks, and how rows are read and scored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from gym_rm.data.messages import parse_messages
from gym_rm.data.rows import Source, rows_of, show
from gym_rm.errors import ConfigError
from gym_rm.plain_values import to_plain
from gym_rm.scorer import Scorer
from gym_rm.scores import ScoringError
from gym_rm.types import Message


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One row of a benchmark.

    Attributes:
        where: file and line of the row, for messages.
        subset: part of the benchmark that the row belongs to.
        fields: the row as it was read.
        conversations: the conversations to score.
        scores: one score per conversation; empty before scoring.
    """

    where: str
    subset: str
    fields: Mapping[str, Any]
    conversations: tuple[tuple[Message, ...], ...]
    scores: tuple[float, ...] = ()


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
        failed: rows without a score, by file and line, with the reason. They are in no value.
        details: other values of this benchmark.
        benchmark: name of the benchmark.
        model: name of the reward model.

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

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return {name: to_plain(getattr(self, name)) for name in self.__slots__}

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
            notes.append(f"Rows without a score, in no value: {len(self.failed)}; the first is {where}: {reason}")
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


def score_rows(scorer: Scorer, rows: Sequence[BenchmarkRow]) -> tuple[tuple[BenchmarkRow, ...], dict[str, str], str]:
    """Return the rows with scores, the reasons of the others by file and line, and the name of the model.

    All conversations are scored in one call.

    Raises:
        ScoringError: no row has a score.
    """
    failure: Exception = ConfigError(f"none of the {len(rows)} rows has a score.")
    try:
        scores = scorer.score([conversation for row in rows for conversation in row.conversations])
    except ScoringError as error:
        failure, scores = error, error.scores
    scored, failed = [], {}
    ends = np.cumsum([len(row.conversations) for row in rows])
    for row, end in zip(rows, ends.tolist(), strict=True):
        span = slice(end - len(row.conversations), end)
        reason = next((each for each in scores.errors[span] if each), "the score is not a finite number")
        if np.isfinite(scores.rewards[span]).all():
            scored.append(replace(row, scores=tuple(scores.rewards[span].tolist())))
        else:
            failed[row.where] = reason
    if not scored:
        raise failure
    return tuple(scored), failed, scores.provenance.model if scores.provenance else type(scorer).__name__


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


def conversations_of(
    row: Mapping[str, Any], prompt: str, replies: Mapping[str, Any], where: str
) -> tuple[tuple[Message, ...], ...]:
    """Return the prompt in the field `prompt`, a text or messages, with each of the replies by name."""
    messages = parse_messages(row.get(prompt), where, prompt)
    return tuple(
        messages + parse_messages(reply, where, name, text_role="assistant") for name, reply in replies.items()
    )


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
