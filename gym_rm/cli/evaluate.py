"""`gym-rm evaluate`: compare the rewards of a model, or of two, with preferences and grades."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

import gym_rm
from gym_rm.checks import keep_inputs
from gym_rm.cli.console import exit_codes, fail, stderr
from gym_rm.cli.scorer_arguments import BatchSize, Columns, Options, RewardModel, ScorerArguments, Threads, without_key
from gym_rm.data.columns import parse_columns
from gym_rm.data.comparisons import ComparisonSet, load_comparisons
from gym_rm.data.rows import sampled
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.by_name import BENCHMARKS, benchmark_result
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult, read_benchmark
from gym_rm.evaluation.report import SetEvaluation, evaluate_set, notes
from gym_rm.evaluation.score_store import ScoreStore
from gym_rm.evaluation.scored import (
    RowScores,
    ScoredComparisons,
    comparisons_of,
    digest_of,
    missing_comparisons,
    score_comparisons,
)
from gym_rm.plain_values import to_plain
from gym_rm.reports.evaluation.page import write_evaluation_page
from gym_rm.reports.evaluation.tables import benchmark_tables, console_table, result_tables
from gym_rm.reports.transcripts import visible
from gym_rm.scorer import Scorer, provenance_of
from gym_rm.types import Comparison

REPORTS, STORES = ("report.json", "report.html"), ("scores.jsonl", "against.jsonl")  # files of an output folder
Benchmark = Literal["rewardbench", "rewardbench2", "rm-bench", "judge-bench"]


def evaluate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Files of preferences, as gym-rm data inspect reads them, or hub names."
        ),
    ],
    reward_model: RewardModel = None,
    against: Annotated[
        str | None, typer.Option(help="A second reward model, to compare on the same rows; written like the first.")
    ] = None,
    best_of_n: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Also pick the best of n replies, and count this grade, such as correct."),
    ] = None,
    benchmark: Annotated[
        Benchmark | None, typer.Option(help="The files are rows of this benchmark; use its rules.")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read the scores from this file of an earlier evaluation; no model is loaded."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder for a page, the numbers and the scores."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")] = False,
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="If a row of a file is malformed: stop, or count it and continue.")
    ] = "stop",
    rows: Annotated[int | None, typer.Option(min=1, help="Most rows of a file, by a random sample.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample of rows.")] = 0,
    column: Columns = None,
    batch_size: BatchSize = 128,
    threads: Threads = None,
    option: Options = None,
) -> None:
    """Compare the rewards of a model with preferences: how often does it prefer the better reply?

    The table has the accuracy with a bootstrap interval (prompts are drawn, with all of their pairs), by length of the
    replies and source; margins and calibration; with --best-of-n, what picking by reward gives; with --against, the
    difference between two models and a paired test.

    A reply without a score is counted and its pairs are left out: a failure is never a score.

    For a judge (kind="judge"), also how often it gives no verdict or prefers a place, how much its samples differ, and
    what a verdict costs. --rows takes a sample, because judges are expensive.

    With -o FOLDER, the folder gets report.html, report.json, and the scores of all rows in scores.jsonl (and
    against.jsonl). The same command then scores only what is missing, and --scores FOLDER/scores.jsonl repeats the
    evaluation without the model.

    Exit codes: 0 finished; 1 error (the message names the row; finished scores are in the file); 2 invalid arguments;
    3 finished, but some replies have no score; 130 interrupted.
    """
    try:
        # --option is of the first scorer; the second one takes a JSON object.
        arguments = [
            ScorerArguments.parse(reward_model, option, threads=threads),
            ScorerArguments.parse(against, threads=threads),
        ]
        renamed = parse_columns(column or [])
        if benchmark is not None and column:
            raise ConfigError(f"--column has no effect with --benchmark {benchmark}; leave it out.")
        if benchmark is not None and best_of_n is not None:
            raise ConfigError(f"--best-of-n has no effect with --benchmark {benchmark}; leave it out.")
        if reward_model is not None and scores is not None:
            raise ConfigError("--reward-model and --scores exclude each other; -o FOLDER keeps the scores of a model.")
        if output is not None and output.suffix.lower() in (".html", ".json"):
            raise ConfigError(f"-o is a folder for all files, got {str(output)!r}.")
        if output is not None:
            stores = [] if scores is not None else [STORES[0]]
            stores += [] if against is None else [STORES[1]]
            read = [sources, scores, *((each.model, each.options) for each in arguments)]
            keep_inputs(read, [output / name for name in (*REPORTS, *stores)])
    except ValueError as error:
        fail(error, code=2)
    names = [spec_name(each.model) for each in (arguments if against is not None else arguments[:1])]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = ProgressBar(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    models = [
        ModelRows(
            name=name,
            make_scorer=None if scores is not None and given is arguments[0] else given.load,
            scores=scores if scores is not None and given is arguments[0] else output and output / file,
            batch_size=batch_size,
            report=_reporter(bar, name),
        )
        for name, given, file in zip(short_names(names), arguments, STORES, strict=False)
    ]
    settings = {
        "files": sources,
        "reward_model": without_key(arguments[0].model),
        "options": without_key(arguments[0].options),
        "against": without_key(arguments[1].model),
        "benchmark": benchmark,
        "best_of_n": best_of_n,
        "rows": rows,
        "seed": seed,
    }
    results = Results(settings)
    with exit_codes("interrupted; with -o FOLDER, repeat the same command to continue."):
        with bar:
            if benchmark is not None:
                results.benchmarks = evaluate_benchmark_files(benchmark, sources, models, rows=rows, seed=seed)
            else:
                skip = on_error == "skip"
                results.sets = evaluate_files(
                    sources,
                    models,
                    gold=best_of_n,
                    skip_malformed=skip,
                    rows=rows,
                    seed=seed,
                    columns=renamed,
                )
        written = [] if output is None else write_results(output, results)
    if as_json:
        typer.echo(json.dumps(results.as_dict(), indent=2))
    else:
        _print_results(results)
    for path in written:
        stderr.print(f"wrote {path}", markup=False)
    if results.lacks_scores:
        raise typer.Exit(3)


@dataclass
class Results:
    """What an evaluation found, and the settings that it had."""

    settings: Mapping[str, Any]
    sets: list[SetEvaluation] = dataclasses.field(default_factory=list)
    benchmarks: list[BenchmarkResult] = dataclasses.field(default_factory=list)

    @property
    def lacks_scores(self) -> bool:
        """Whether a reply has no score."""
        scored = [rows for each in self.sets for rows in (each.scored, each.against) if rows is not None]
        return any(each.failed for each in self.benchmarks) or any(rows.errors.total() for rows in scored)

    def as_dict(self) -> dict[str, Any]:
        """Return all results as plain values for JSON."""
        return {
            "gym_rm": gym_rm.__version__,
            "settings": to_plain(self.settings),
            "sets": [each.as_dict() for each in self.sets],
            "benchmarks": [each.as_dict() for each in self.benchmarks],
        }


def _reporter(bar: ProgressBar, name: str) -> Callable[[int, int], None]:
    task = bar.add_task(escape(name), total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _print_results(results: Results) -> None:
    console = Console(highlight=False)
    for each in results.sets:
        console.rule(Text(visible(each.name)), align="left")
        for table in result_tables(each):
            console.print(console_table(table))
        for note in notes(each):
            console.print(Text(f"- {visible(note)}"))
    for table in benchmark_tables(results.benchmarks):
        console.print(console_table(table))
        for note in table.notes:
            console.print(Text(f"- {note}"))


@dataclass(frozen=True, kw_only=True)
class ModelRows:
    """One reward model of an evaluation, or a file with its scores.

    Attributes:
        name: name of the model in tables.
        make_scorer: loads the model; None to only read `scores`.
        scores: file of scores to write, and to continue if it has scores of the same model; None for no file.
        batch_size: number of conversations in one call of the scorer.
        report: called with the number of finished and of all rows.
    """

    name: str
    make_scorer: Callable[[], Scorer] | None
    scores: Path | None = None
    batch_size: int = 128
    report: Callable[[int, int], None] = lambda done, total: None

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
        else:
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
        named = [comparisons_of(store, each.comparisons) for each in sets]
        return [dataclasses.replace(each, model=self.name) for each in named] if self.make_scorer else named

    def _opened(self, scorer: Scorer) -> ScoreStore:
        """Return the store with the rows that this model has scored."""
        provenance = provenance_of(scorer)
        plain = None if provenance is None else to_plain(dataclasses.asdict(provenance))
        store = ScoreStore(self.scores)
        store.lock()
        if plain is None or store.header is None or store.header.get("provenance") != plain:
            if store.entries:
                stderr.print(f"{self.scores} has scores of another model or settings; scoring all rows again.")
            store.start({"model": self.name, "provenance": plain})
        return store


def evaluate_files(
    sources: Sequence[str],
    models: Sequence[ModelRows],
    *,
    gold: str | None = None,
    skip_malformed: bool = False,
    rows: int | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
) -> list[SetEvaluation]:
    """Evaluate one model or two on each file of preferences, or on a sample of at most `rows` of its rows.

    Raises:
        ConfigError: a file cannot be read or has no preference, or a model has no scores.
        GymRMError: a scorer failed for a whole batch.
    """
    on_error: Literal["raise", "drop"] = "drop" if skip_malformed else "raise"
    sets = [
        load_comparisons(each, name=name, on_error=on_error, columns=columns)
        for each, name in zip(sources, short_names(sources), strict=True)
    ]
    sets = [dataclasses.replace(each, comparisons=tuple(sampled(each.comparisons, rows, seed=seed))) for each in sets]
    scored = [model.score(sets) for model in models]
    return [
        evaluate_set(each, of[0], against=of[1] if len(of) > 1 else None, gold=gold)
        for each, *of in zip(sets, *scored, strict=True)
    ]


def evaluate_benchmark_files(
    name: str, sources: Sequence[str], models: Sequence[ModelRows], *, rows: int | None = None, seed: int = 0
) -> list[BenchmarkResult]:
    """Evaluate the models on a benchmark whose rows are in these files, or on a sample of at most `rows` of them."""
    read = sampled(read_benchmark(sources, BENCHMARKS[name].read_row), rows, seed=seed)
    comparisons = ComparisonSet(name, tuple(row.comparison for row in read))
    return [benchmark_result(name, read, *model.score([comparisons])) for model in models]


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


def write_results(folder: Path, results: Results) -> list[Path]:
    """Write the values and the page into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    values, page = (folder / name for name in REPORTS)
    values.write_text(json.dumps(results.as_dict(), indent=2) + "\n", encoding="utf-8")
    tables = benchmark_tables(results.benchmarks)
    return [values, write_evaluation_page(results.sets, page, tables=tables)]
