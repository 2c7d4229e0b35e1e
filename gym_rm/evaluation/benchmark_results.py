"""Results of published benchmarks, and how their rows are read and scored."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from gym_rm.data.messages import parse_messages
from gym_rm.data.rows import Source, format_of, open_binary, parse_line, rows_of, show
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
        conversations: the conversations to score; empty if the scores were read.
        scores: one score per conversation, NaN where it is missing; None before scoring.
    """

    where: str
    subset: str
    fields: Mapping[str, Any]
    conversations: tuple[tuple[Message, ...], ...] = ()
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Result of a reward model on a benchmark. All values are shares from 0 to 1, or None without rows.

    Attributes:
        benchmark: name of the benchmark.
        model: name of the reward model.
        overall: the total of the leaderboard, over the parts that are present.
        sections: values of groups of subsets, in RewardBench 1.
        subsets: value of every part that has rows.
        counts: number of scored rows by section and by subset.
        missing: subsets of the benchmark without a value; sections and total are computed without them.
        not_counted: subsets in the rows that are not part of the total.
        failed: rows without a score, by file and line, with the reason. They are in no value.
        details: other values of this benchmark.

    Example:
        >>> result = BenchmarkResult("rewardbench", "my-model", 0.75, {"Chat": 0.75}, {"alpacaeval-easy": 0.75}, {})
        >>> result.table_rows()[0]
        ('overall', 0.75, None)
    """

    benchmark: str
    model: str
    overall: float | None
    sections: Mapping[str, float | None]
    subsets: Mapping[str, float]
    counts: Mapping[str, int]
    missing: tuple[str, ...] = ()
    not_counted: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

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
    """Read all rows of a benchmark: from a file or list as in `load_prompts`, columns, or a list of several files.

    In a JSON file or mapping of columns, values that are not lists, such as the name of the model, belong to every row.

    Raises:
        ConfigError: the source cannot be read, it has no rows, or a row is invalid.
    """
    rows = []
    names = isinstance(source, list | tuple) and source and all(isinstance(each, str | os.PathLike) for each in source)
    sources = cast("Sequence[Source]", source) if names else [source]
    for where, row in itertools.chain.from_iterable(map(_rows_or_columns, sources)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where}: expected a row of the benchmark, got {show(row)}.")
        rows.append(read_row(row, where))
    if not rows:
        raise ConfigError("the benchmark has no rows; expected at least one.")
    return tuple(rows)


def score_rows(
    scorer: Scorer | None, rows: Sequence[BenchmarkRow]
) -> tuple[tuple[BenchmarkRow, ...], dict[str, str], str]:
    """Return the rows with scores, the reasons of the others by file and line, and the name of the model.

    All conversations are scored in one call. Without a scorer, the rows have the scores that were read.

    Raises:
        ScoringError: no row has a score.
        ConfigError: no row has a score, and there is no scorer.
    """
    errors: list[str | None] = [None] * len(rows)
    model = str(rows[0].fields.get("model") or "stored scores")
    failure: Exception = ConfigError(f"none of the {len(rows)} rows has a score; check the stored scores.")
    if scorer is not None:
        try:
            scores = scorer.score([conversation for row in rows for conversation in row.conversations])
        except ScoringError as error:
            failure, scores = error, error.scores
        model = scores.provenance.model if scores.provenance else type(scorer).__name__
        ends = np.cumsum([len(row.conversations) for row in rows])
        spans = [slice(end - len(row.conversations), end) for row, end in zip(rows, ends, strict=True)]
        errors = [next((each for each in scores.errors[span] if each), None) for span in spans]
        rows = [
            replace(row, scores=tuple(scores.rewards[span].tolist())) for row, span in zip(rows, spans, strict=True)
        ]
    missing = "the score is missing or not a finite number"
    failed = {
        row.where: reason or missing
        for row, reason in zip(rows, errors, strict=True)
        if reason or not np.isfinite(row.scores or np.nan).all()
    }
    if len(failed) == len(rows):
        raise failure
    return tuple(row for row in rows if row.where not in failed), failed, model


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


def stored_score(value: Any, where: str, name: str) -> float:
    """Return a stored score as a float: a number, a list with one number, or NaN for a missing one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {name!r} must be a number, got {show(value)}.")
    try:
        return float(value)
    except OverflowError:  # an integer above the largest float
        return math.inf


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


def _rows_or_columns(source: Source) -> Iterator[tuple[str, Any]]:
    if isinstance(source, str | os.PathLike) and format_of(Path(source))[0] == "json" and Path(source).exists():
        name = os.fspath(source)
        with open_binary(Path(name)) as file:
            source = parse_line(file.read(), name)
        return rows_of(_transposed(source, name) if isinstance(source, dict) else source, name)
    if isinstance(source, Mapping):
        return rows_of(_transposed(source, "rows"), "rows")
    return rows_of(source, "rows")


def _transposed(columns: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    lists = {name: column for name, column in columns.items() if isinstance(column, list)}
    shared = {name: value for name, value in columns.items() if name not in lists}
    lengths = Counter(len(column) for column in lists.values())
    if len(lengths) != 1:
        shown = {name: len(column) for name, column in lists.items()}
        raise ConfigError(f"{where}: expected a list of rows, or columns of one length; got columns of {shown}.")
    return [{**shared, **dict(zip(lists, values, strict=True))} for values in zip(*lists.values(), strict=True)]
