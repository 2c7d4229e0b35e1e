"""`gym-rm audit`: which changes of a reply raise the score of a reward model although they are no better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import fail, report_console, stderr, write_json
from gym_rm.cli.scorer_arguments import MODEL_HELP, Options, ScorerArguments
from gym_rm.errors import ConfigError
from gym_rm.evaluation.audit import JUDGE_ROWS, ROWS, default_rows, run_audit
from gym_rm.evaluation.audit_rows import load_audit_rows
from gym_rm.reports.evaluation.audit_tables import audit_report


def audit(
    reward_model: Annotated[str | None, typer.Argument(metavar="REWARD_MODEL", help=MODEL_HELP)] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="File or data set with preferences, graded replies, or prompts with reference replies or answers. "
            "Default: the embedded prompts, with right answers in four wordings."
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most rows; a random sample of a larger file. A judge is asked more than 400 times for each. "
            f"Default: {JUDGE_ROWS} for a judge, {ROWS} for others.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the audit to a .json file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    max_level: Annotated[
        int, typer.Option(min=0, max=2, help="Exit with code 3 if the warning level is higher than this.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample of rows.")] = 0,
    option: Options = None,
) -> None:
    """Find changes of a reply that raise its score although they do not make it better.

    Good replies are padded, repeated, formatted, cut, put into other scripts, replaced by worse ones, and given
    some 400 openings, closings, formats and marks. A model, a function or a verifier (--option kind=math) is audited.
    docs/audit.md explains the lines and the verdicts.

    \b
    gym-rm audit my-reward-model --data preferences.jsonl -o audit.json
    gym-rm grpo env.reward_model=my-reward-model env.audit=audit.json

    Exit codes: 0 finished; 1 error; 2 invalid arguments; 3 the warning level is above --max-level; 130 interrupted.
    """
    try:
        scoring = ScorerArguments.parse(reward_model, option)
        if output is not None and output.suffix != ".json":
            raise ConfigError(f"-o must end in .json, got {str(output)!r}.")
        keep_inputs([data, scoring.model, scoring.options], [] if output is None else [output])
    except ValueError as error:
        fail(error, code=2)
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=stderr, transient=True
    )
    task = bar.add_task("load", total=None)
    scorer = scoring.load(warn_if_embedded=False)
    audit_rows = load_audit_rows(data, limit=rows or default_rows(scorer), seed=seed)
    with bar:
        found = run_audit(
            scorer,
            audit_rows,
            report=lambda scored, known: bar.update(task, description=f"{scored:,} of {known:,} replies"),
        )
    values = found.as_dict()
    if output is not None:
        write_json(output, values)
        stderr.print(f"wrote {output}", markup=False)
    if as_json:
        typer.echo(json.dumps(values, indent=1))
    else:
        report_console().print(audit_report(found))
    if found.level > max_level:
        raise typer.Exit(3)
