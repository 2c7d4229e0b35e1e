"""`gym-rm rescore`: what another reward would have changed in saved rollouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import fail, report_console, stderr, write_json
from gym_rm.cli.score import Key, OnError, Overwrite, run_scoring
from gym_rm.cli.scorer_arguments import BatchSize, Columns, Options, RewardModel, ScorerArguments
from gym_rm.data.columns import parse_columns, with_columns
from gym_rm.data.formats.fields import number
from gym_rm.data.rollouts import read_rollout
from gym_rm.errors import ConfigError
from gym_rm.evaluation.rescoring import compare_rewards, rescored_rows
from gym_rm.evaluation.stored_scores.file import FileScoring
from gym_rm.policy.advantages import estimate_advantages
from gym_rm.reports.evaluation.rescoring import rescoring_table, write_rescoring_page
from gym_rm.reports.evaluation.tables import console_table
from gym_rm.reports.transcripts import visible
from gym_rm.scorer import Scorer, is_relative

STD_FLOOR = 1e-4  # of TRL, which adds it to the standard deviation


def rescore(
    rollouts: Annotated[
        Path, typer.Argument(metavar="ROLLOUTS", help="File of rollouts, or folder of .jsonl or .parquet files.")
    ],
    reward_model: RewardModel = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the rows, a page and the numbers.")
    ] = Path("rescored"),
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN[=WEIGHT]", help="Column of the old reward; if repeated, the weighted sum."),
    ] = None,
    on_error: OnError = "stop",
    column: Columns = None,
    batch_size: BatchSize = 128,
    option: Options = None,
    key: Key = "new_reward",
    overwrite: Overwrite = False,
) -> None:
    """Score saved rollouts again, and compare with the rewards that they had: nothing is generated.

    ROLLOUTS are conversations.jsonl of gym-rm grpo, completions that TRL logs, dumps of verl (rollout_data_dir),
    rollouts of NeMo Gym, traces.jsonl or results.jsonl of verifiers, or rows of gym-rm score with one reply and a
    reward; the columns tell which. docs/scoring.md explains the numbers.

    FOLDER gets rollouts.jsonl (the rows with new_reward and the other fields of gym-rm score), report.html and
    report.json. Repeat the same command to resume, as with gym-rm score.

    \b
    gym-rm rescore outputs/grpo-20260101-120000/conversations.jsonl --reward-model my-reward-model -o rescored

    Exit codes: 0 all lines have a score; 1 error; 2 invalid arguments; 3 finished, but some lines have no score;
    130 interrupted.
    """
    rows, page, numbers = (output / name for name in ("rollouts.jsonl", "report.html", "report.json"))
    try:
        scorer, renamed = ScorerArguments.parse(reward_model, option), parse_columns(column or [])
        named = [each.partition("=") for each in reward or []]
        weights = {name: number(weight or 1, "--reward", name) for name, _, weight in named}
        keep_inputs([rollouts, scorer.model], [page, numbers])
    except ValueError as error:
        fail(error, code=2)

    read = partial(read_rollout, weights=weights)

    def load() -> Scorer:
        if is_relative(loaded := scorer.load()):
            raise ConfigError("the scorer compares the replies of a group, but rollouts are scored row by row.")
        return loaded

    scoring = FileScoring(
        make_scorer=load,
        source=rollouts,
        output=rows,
        settings={**scorer.settings, "key": key, **({"columns": renamed} if renamed else {})},
        overwrite=overwrite,
        columns=renamed,
        read=lambda *row: read(*row).row,
        key=key,
        on_error=on_error,
        batch_size=batch_size,
    )
    output.mkdir(parents=True, exist_ok=True)
    failed = run_scoring(scoring).failed
    found = compare_rewards(
        lambda: rescored_rows(rows, key, lambda row, where: read(with_columns(row, renamed, where), where)),
        lambda group: estimate_advantages(group, np.zeros(len(group)), estimator="grpo", std_floor=STD_FLOOR),
    )
    write_json(numbers, found.numbers)
    write_rescoring_page(found, page, about=visible(f"{rollouts} · {scorer.settings}"))
    report_console().print(console_table(rescoring_table(found)))
    stderr.print(f"wrote {rows}, {page} and {numbers}", markup=False)
    if failed:
        raise typer.Exit(3)
