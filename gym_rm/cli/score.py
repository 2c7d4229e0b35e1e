"""`gym-rm score`: score every row of a file; `gym-rm rescore`: and compare with the rewards that rollouts had."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import numpy as np
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import fail, report_console, stderr, write_json
from gym_rm.cli.scorer_arguments import BatchSize, Columns, Options, RewardModel, ScorerArguments
from gym_rm.data.columns import parse_columns, with_columns
from gym_rm.data.formats.fields import number
from gym_rm.data.rollouts import read_rollout
from gym_rm.errors import ConfigError
from gym_rm.evaluation.stored_scores.file import FileScoring, ScoringProgress
from gym_rm.evaluation.stored_scores.output import check_output
from gym_rm.policy.advantages import estimate_advantages
from gym_rm.reports.evaluation.rescoring import compare_rewards, rescored_rows, rescoring_table, write_rescoring_page
from gym_rm.reports.evaluation.tables import console_table
from gym_rm.scorer import Scorer, is_relative

OnError: TypeAlias = Annotated[
    Literal["stop", "skip"], typer.Option(help="If a line has no score: stop, or write the error and continue.")
]
Key: TypeAlias = Annotated[str, typer.Option(help="Name of the added field, and prefix of the other fields.")]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
STD_FLOOR = 1e-4  # of advantages; TRL adds it to the standard deviation


def score(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A .jsonl, .ndjson, .json, .csv or .parquet file, or the first four compressed as .gz; - for "
            "JSON lines from standard input.",
        ),
    ],
    reward_model: RewardModel = None,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="File to write: .jsonl, .csv or .parquet; - for JSON lines to standard output."
        ),
    ] = "-",
    on_error: OnError = "stop",
    turns: Annotated[
        Literal["last", "all"], typer.Option(help="Score only the last turn, or also every assistant turn.")
    ] = "last",
    column: Columns = None,
    batch_size: BatchSize = 128,
    option: Options = None,
    key: Key = "score",
    overwrite: Overwrite = False,
) -> None:
    """Score every row of a file.

    The command reads these fields of a row, in this order: a prompt with a list of replies (completions, solutions
    or responses), with chosen and rejected, or with a response; or a whole conversation in messages. The prompt is in
    messages, prompt, context or question, as a text or a list of messages. Columns of other names are named by
    --column prompt=Question --column response=Reply.

    The output has the same rows in the same order, with these added fields:

    \b
    score                   a number, {"chosen": .., "rejected": ..}, or a list
    score_components        the same for each component of the reward
    score_turns             with --turns all: one number per turn
    score_steps             of a process reward model: one number per step
    score_step_ends         where these steps end in the reply, in characters
    score_truncated_tokens  number of tokens that were cut, if any
    score_error             reason for a missing score (score is null)

    With -o, repeat the same command (without --overwrite) to resume after an interruption, or to score rows that were
    added to the input or have no score. OUTPUT.scores has the finished scores, their settings, and a digest of the
    model's files: scores of different settings or another model are never mixed. OUTPUT is written at the end.

    Exit codes: 0 all lines have a score; 1 error (the message names the line, finished scores are in OUTPUT.scores); 2
    invalid arguments; 3 finished, but some lines have no score (--on-error skip); 130 interrupted.
    """
    try:
        scorer = ScorerArguments.parse(reward_model, option)
        renamed = parse_columns(column or [])
        path = None if source == "-" else Path(source)
        written = None if output == "-" else Path(output)
        if (path is None and sys.stdin is None) or (written is None and sys.stdout is None):
            raise ConfigError("standard input or output is closed; name a file for INPUT, and for -o.")
        if written is not None:
            check_output(written)
    except ValueError as error:
        fail(error, code=2)
    scoring = FileScoring(
        make_scorer=scorer.load,
        source=path,
        output=written,
        settings={**scorer.settings, "turns": turns, "key": key, **({"columns": renamed} if renamed else {})},
        columns=renamed,
        overwrite=overwrite,
        turns=turns,
        key=key,
        on_error=on_error,
        batch_size=batch_size,
    )
    if run_scoring(scoring).failed:
        raise typer.Exit(3)


def rescore(
    rollouts: Annotated[
        Path, typer.Argument(metavar="ROLLOUTS", help="A file of rollouts, or a folder of .jsonl or .parquet files.")
    ],
    reward_model: RewardModel = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the rows, a page and the numbers.")
    ] = Path("rescored"),
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN[=WEIGHT]", help="Column of the old reward; may be repeated, for a weighted sum."),
    ] = None,
    on_error: OnError = "stop",
    column: Columns = None,
    batch_size: BatchSize = 128,
    option: Options = None,
    key: Key = "new_reward",
    overwrite: Overwrite = False,
) -> None:
    """Score saved rollouts again, and compare with the rewards that they had; nothing is generated.

    ROLLOUTS is conversations.jsonl of gym-rm grpo, completions that TRL logs, a dump of verl (rollout_data_dir),
    rollouts of NeMo Gym, traces.jsonl or results.jsonl of verifiers, or rows of gym-rm score with one reply and a
    reward. docs/scoring.md explains the numbers.

    FOLDER gets rollouts.jsonl (the rows with new_reward and the other fields of gym-rm score), report.html and
    report.json. The command resumes, and has the exit codes, as gym-rm score.
    """
    rows, *reports = (output / name for name in ("rollouts.jsonl", "report.json", "report.html"))
    try:
        scorer, renamed = ScorerArguments.parse(reward_model, option), parse_columns(column or [])
        named = [each.partition("=") for each in reward or []]
        read = partial(read_rollout, weights={name: number(weight or 1, "--reward", name) for name, _, weight in named})
        keep_inputs([rollouts, scorer.model], reports)
        if rollouts.resolve() == output.resolve():
            raise ConfigError(f"the rows of {str(output)!r} would be read again; choose another folder for --output.")
    except ValueError as error:
        fail(error, code=2)

    def load() -> Scorer:
        if is_relative(loaded := scorer.load()):
            raise ConfigError("the scorer compares the replies of a group, but rollouts are scored one by one.")
        return loaded

    output.mkdir(parents=True, exist_ok=True)
    scoring = FileScoring(
        make_scorer=load,
        source=rollouts,
        output=rows,
        settings={**scorer.settings, "key": key, **({"columns": renamed} if renamed else {})},
        overwrite=overwrite,
        columns=renamed,
        read=lambda *row: read(*row).row,
        folders=True,
        key=key,
        on_error=on_error,
        batch_size=batch_size,
    )
    failed = run_scoring(scoring).failed
    found = compare_rewards(
        lambda: rescored_rows(rows, key, lambda row, where: read(with_columns(row, renamed, where), where)),
        lambda each: estimate_advantages(each, np.zeros(len(each)), estimator="grpo", std_floor=STD_FLOOR),
    )
    write_json(reports[0], found.numbers)
    write_rescoring_page(found, reports[1], about=f"{rollouts} · {scorer.settings['reward_model'] or 'embedded'}")
    report_console().print(console_table(rescoring_table(found)))
    stderr.print(f"wrote {', '.join(map(str, (rows, *reports)))}", markup=False)
    if failed:
        raise typer.Exit(3)


def run_scoring(scoring: FileScoring) -> ScoringProgress:
    """Score the rows of a file with a progress bar, and say how many have no score; exit with 130 if interrupted."""
    path, key = scoring.source, scoring.key
    hidden = not stderr.is_terminal or (scoring.output is None and sys.stdout.isatty())
    columns = (SpinnerColumn(), TextColumn("{task.completed} lines"), TimeElapsedColumn())
    bar = Progress(*columns, console=stderr, transient=True, disable=hidden)
    task = bar.add_task("score", total=None)
    last = ScoringProgress()

    def report(now: ScoringProgress) -> None:
        nonlocal last
        last = now
        bar.update(task, completed=now.lines)

    try:
        with bar:
            dataclasses.replace(scoring, report=report).run()
    except KeyboardInterrupt:
        command = "command without --overwrite" if scoring.overwrite and last.lines else "same command"
        advice = "use -o FILE to be able to resume" if scoring.output is None else f"repeat the {command} to resume"
        stderr.print(f"interrupted after {last.lines} finished lines; {advice}.")
        raise typer.Exit(130) from None
    if not last.lines:
        stderr.print(f"{'standard input' if path is None else path} has no rows; nothing was scored.", markup=False)
    if last.failed:
        stderr.print(f"{last.failed} of {last.lines} lines have no score; their field {key}_error has the reason.")
    return last
