"""One evaluation: files of preferences or of a benchmark, one model or two, and a file with the scores of each."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gym_rm
from gym_rm.data.comparisons import ComparisonSet, load_comparisons
from gym_rm.data.rows import sampled
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.by_name import BENCHMARKS, benchmark_result
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, read_benchmark
from gym_rm.evaluation.report import SetEvaluation, evaluate_set
from gym_rm.evaluation.scored import (
    RowScores,
    ScoredComparisons,
    comparisons_of,
    digest_of,
    missing_comparisons,
    score_comparisons,
)
from gym_rm.evaluation.stored_scores.store import ScoreStore
from gym_rm.plain_values import to_plain
from gym_rm.scorer import Scorer, provenance_of
from gym_rm.types import Comparison


@dataclass(frozen=True, slots=True)
class Results:
    """What an evaluation found, and the settings that it had."""

    settings: Mapping[str, Any]
    sets: Sequence[SetEvaluation] = ()
    benchmarks: Sequence[BenchmarkResult] = ()

    @property
    def lacks_scores(self) -> bool:
        """Whether a reply has no score."""
        scored = [model.scored for each in self.sets for model in each.models]
        return any(each.failed for each in self.benchmarks) or any(rows.errors.total() for rows in scored)

    def as_dict(self) -> dict[str, Any]:
        """Return all results as plain values for JSON."""
        return {
            "gym_rm": gym_rm.__version__,
            "settings": to_plain(self.settings),
            "sets": [each.as_dict() for each in self.sets],
            "benchmarks": [each.as_dict() for each in self.benchmarks],
        }


@dataclass(frozen=True, kw_only=True)
class ModelRows:
    """One reward model of an evaluation, or a file with its scores.

    Attributes:
        name: name of the model in tables.
        make_scorer: loads the model; None to only read `scores`.
        scores: file of scores to write, and to resume if it has scores of the same model; None for no file.
        batch_size: number of conversations in one call of the scorer.
        report: called with the number of finished and of all rows.
        warn: called with a sentence if the scores in the file are of another model.
    """

    name: str
    make_scorer: Callable[[], Scorer] | None
    scores: Path | None = None
    batch_size: int = 128
    report: Callable[[int, int], None] = lambda done, total: None
    warn: Callable[[str], None] = lambda message: None

    def score(self, sets: Sequence[ComparisonSet]) -> list[ScoredComparisons]:
        """Return the comparisons of each set with their rewards.

        Raises:
            ConfigError: without a model, the file lacks scores.
            GymRMError: the scorer failed for a whole batch; the finished rows are in the file.
        """
        if self.make_scorer is None:
            if self.scores is None:
                raise ConfigError("an evaluation needs a reward model or a file of scores.")
            store = ScoreStore.read(self.scores)
            return [comparisons_of(store, each.comparisons) for each in sets]
        scorer = self.make_scorer()
        store = self._opened(scorer)
        missing = missing_comparisons(store, itertools.chain.from_iterable(each.comparisons for each in sets))
        count = itertools.count(1)

        def report(comparison: Comparison, row: RowScores) -> None:
            store.add({digest_of(comparison): row.as_entry()})
            self.report(next(count), len(missing))

        try:
            score_comparisons(scorer, missing, batch_size=self.batch_size, report=report)
        finally:
            store.close()
        getattr(scorer, "close", lambda: None)()  # two large models may not fit beside each other
        scored = [comparisons_of(store, each.comparisons) for each in sets]
        return [dataclasses.replace(each, model=self.name) for each in scored]

    def _opened(self, scorer: Scorer) -> ScoreStore:
        """Return the store with the rows that this model has scored."""
        provenance = provenance_of(scorer)
        plain = None if provenance is None else to_plain(dataclasses.asdict(provenance))
        store = ScoreStore(self.scores)
        store.lock()
        if plain is None or store.header is None or store.header.get("provenance") != plain:
            if store.entries:
                self.warn(f"{self.scores} has scores of another model or settings; scoring all rows again.")
            store.start({"model": self.name, "provenance": plain})
        return store


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of one model or two.

    Attributes:
        files: files of preferences, each a set of its own, or the rows of a benchmark.
        benchmark: name of the benchmark whose rules are used; None for preferences.
        best_of_n: name of the rating that best-of-n counts; None for no curves.
        rows: most rows of a file, by a random sample; None for all.
        seed: seed of the sample.
        columns: names of the columns of fields, see `with_columns`.
        skip_malformed: count malformed rows instead of raising an error.
        published: take the results in the rows of a benchmark, if all rows have them, instead of asking a model.

    Raises:
        ConfigError: a setting cannot be used with a benchmark.
    """

    files: Sequence[str]
    benchmark: str | None = None
    best_of_n: str | None = None
    rows: int | None = None
    seed: int = 0
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skip_malformed: bool = False
    published: bool = False

    def __post_init__(self) -> None:
        rows = self.rows if self.benchmark == "agent-process-bench" else None  # which joins rows of two files
        for name, given in (("--column", self.columns), ("--best-of-n", self.best_of_n), ("--rows", rows)):
            if self.benchmark is not None and given:
                raise ConfigError(f"{name} cannot be used with --benchmark {self.benchmark}; leave it out.")

    def run(self, models: Sequence[ModelRows], settings: Mapping[str, Any]) -> Results:
        """Score what the files of the models lack, and return the results, with these settings of the models.

        Raises:
            ConfigError: a file cannot be read or has no preference, or a model has no scores.
            GymRMError: a scorer failed for a whole batch.
        """
        of_rows = {name: getattr(self, name) for name in ("files", "benchmark", "best_of_n", "rows", "seed")}
        if self.benchmark is None:
            return Results({**of_rows, **settings}, sets=self._sets(models))
        read = sampled(read_benchmark(self.files, BENCHMARKS[self.benchmark].read_row), self.rows, seed=self.seed)
        if self.published and any(row.published for row in read):
            if bare := next((row.comparison.where for row in read if not row.published), None):
                raise ConfigError(f"{bare}: no results, but other rows have some; expected them in all rows, or none.")
            named = {"benchmark": self.benchmark, "model": "published"}
            result = dataclasses.replace(BENCHMARKS[self.benchmark].result(read), **named)
            return Results({**of_rows, **settings}, benchmarks=[result])
        if bare := next((row.comparison.where for row in read if not row.comparison.replies), None):
            raise ConfigError(f"{bare}: --benchmark {self.benchmark} counts the results in the rows; name no model.")
        rows = ComparisonSet(self.benchmark, tuple(row.comparison for row in read))
        found = [benchmark_result(self.benchmark, read, *model.score([rows])) for model in models]
        return Results({**of_rows, **settings}, benchmarks=found)

    def _sets(self, models: Sequence[ModelRows]) -> list[SetEvaluation]:
        sets = []
        for file, name in zip(self.files, short_names(self.files), strict=True):
            on_error: Literal["raise", "drop"] = "drop" if self.skip_malformed else "raise"
            every = load_comparisons(file, name=name, on_error=on_error, columns=self.columns)
            chosen = sampled(every.comparisons, self.rows, seed=self.seed)
            sets.append(dataclasses.replace(every, comparisons=tuple(chosen)))
        scored = [model.score(sets) for model in models]
        return [evaluate_set(each, *of, gold=self.best_of_n) for each, *of in zip(sets, *scored, strict=True)]


def short_names(names: Sequence[str]) -> list[str]:
    """Return the last parts of paths, or the paths if these do not tell them apart; repeated ones get a number.

    Example:
        >>> short_names(["runs/a/final", "runs/b/last"]), short_names(["runs/a/final", "runs/b/final"])
        (['final', 'last'], ['runs/a/final', 'runs/b/final'])
    """
    short = [Path(name).name or name for name in names]
    found = short if len(set(short)) == len(short) else list(names)
    return [name if found.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(found)]


def spec_name(spec: Any) -> str:
    """Return the name of a setting of a reward model."""
    if isinstance(spec, Mapping):
        named = [spec[name] for name in ("path", "model", "reward_model", "url") if spec.get(name)]
        return str(named[0] if named else json.dumps(to_plain(spec)))
    return "embedded" if spec is None else str(spec)
