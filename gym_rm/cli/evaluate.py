"""`gym-rm evaluate`: compare the rewards of a model, or of two, with preferences and grades."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import exit_codes, fail, stderr, write_json
from gym_rm.cli.scorer_arguments import BatchSize, Columns, Options, RewardModel, ScorerArguments, without_key
from gym_rm.data.columns import parse_columns
from gym_rm.errors import ConfigError
from gym_rm.evaluation.report import notes
from gym_rm.evaluation.run import Evaluation, ModelRows, Results, short_names, spec_name
from gym_rm.reports.evaluation.page import write_evaluation_page
from gym_rm.reports.evaluation.tables import benchmark_tables, console_table, result_tables
from gym_rm.reports.transcripts import visible

REPORTS, STORES = ("report.json", "report.html"), ("scores.jsonl", "against.jsonl")  # files of an output folder
Benchmark = Literal["rewardbench", "rewardbench2", "rm-bench", "judge-bench", "process-bench", "prm-bench",
                    "agent-process-bench", "reward-math", "ppe"]  # fmt: skip


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
    stores: list[Path | None] = [None if output is None else output / name for name in STORES]
    try:
        # --option is of the first scorer; the second one takes a JSON object.
        first = ScorerArguments.parse(reward_model, option)
        second = ScorerArguments.parse(against)
        evaluation = Evaluation(
            files=sources,
            benchmark=benchmark,
            best_of_n=best_of_n,
            rows=rows,
            seed=seed,
            columns=parse_columns(column or []),
            skip_malformed=on_error == "skip",
            published=all(each is None for each in (reward_model, against, scores)),
        )
        if reward_model is not None and scores is not None:
            raise ConfigError("--reward-model and --scores exclude each other; -o FOLDER keeps the scores of a model.")
        if output is not None:
            if output.suffix.lower() in (".html", ".json"):
                raise ConfigError(f"-o is a folder for all files, got {str(output)!r}.")
            written = [stores[0]] * (scores is None) + [stores[1]] * (against is not None)
            read = [sources, scores, first.model, first.options, second.model]
            keep_inputs(read, [*(output / name for name in REPORTS), *(path for path in written if path is not None)])
    except ValueError as error:
        fail(error, code=2)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    every = [first] if against is None else [first, second]
    models = [
        ModelRows(
            name=name,
            make_scorer=each.load,
            scores=store,
            batch_size=batch_size,
            report=_reporter(bar, name),
            warn=_say,
        )
        for name, each, store in zip(
            short_names([spec_name(each.model) for each in every]), every, stores, strict=False
        )
    ]
    if scores is not None:
        models[0] = ModelRows(name=models[0].name, make_scorer=None, scores=scores)
    settings = {
        "reward_model": without_key(first.model),
        "options": without_key(first.options),
        "against": without_key(second.model),
    }
    with exit_codes("interrupted; with -o FOLDER, repeat the same command to continue."):
        with bar:
            results = evaluation.run(models, settings)
        if output is not None:
            _write_results(output, results)
    if as_json:
        typer.echo(json.dumps(results.as_dict(), indent=2))
    else:
        _print_results(results)
    if output is not None:
        for name in REPORTS:
            stderr.print(f"wrote {output / name}", markup=False)
    if results.lacks_scores:
        raise typer.Exit(3)


def _say(message: str) -> None:
    stderr.print(message, markup=False)


def _reporter(bar: Progress, name: str) -> Callable[[int, int], None]:
    task = bar.add_task(escape(name), total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _write_results(folder: Path, results: Results) -> None:
    """Write the values and the page into a folder."""
    values, page = (folder / name for name in REPORTS)
    write_json(values, results.as_dict())
    write_evaluation_page(results.sets, page, tables=benchmark_tables(results.benchmarks))


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
