"""`gym-rm data`: show what a file of comparisons holds, and write the rows from which a judge is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import fail
from gym_rm.cli.scorer_arguments import Columns, Options
from gym_rm.config import override_values
from gym_rm.documents import replaced_file
from gym_rm.errors import ConfigError

if TYPE_CHECKING:
    from gym_rm.data.comparisons import ComparisonSet

data = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the data that reward models are trained and evaluated on.",
)
Source: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A .jsonl, .ndjson, .json, .csv or .parquet file, the first four also compressed as .gz; a "
        "data set 'org/name' or 'org/name:split'; - for JSON lines from standard input.",
    ),
]


@data.command()
def inspect(
    source: Source,
    column: Columns = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is understood of a file of preferences, and what may be wrong with it.

    Rows that cannot be used are counted with their reasons; they are no error here. The report has the shapes of the
    rows, ties, margins, ratings, sources, lengths, how often the preferred reply is the longer one, equal prompts and
    comparisons, contradictory preferences, and suspicious roles and texts.

    Tokens are counted by gym-rm train, which says at its start how many rows are dropped or cut.

    Exit codes: 0 done; 1 the file cannot be read, or no row can be used; 2 invalid arguments.
    """
    from gym_rm.data.inspection import inspect_comparisons  # imported here because the imports are slow
    from gym_rm.reports.data_tables import inspection_report

    found = inspect_comparisons(_comparisons(source, column))
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        Console(highlight=False).print(inspection_report(found))


@data.command()
def judgements(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.jsonl", help="Where the rows are written.")],
    style: Annotated[str, typer.Option(help="Style of the judge, such as genrm, or its file.")] = "fenced",
    column: Columns = None,
    option: Options = None,
) -> None:
    """Write the questions of a judge about pairs, with the right verdicts: prompts to train the judge with gym-rm grpo.

    Each pair is two questions, one for each order, so a judge that prefers a place is paid less. Ties have none. Their
    scorer is {"kind": "verdict", "style": STYLE}.

    Exit codes: 0 done; 1 the file cannot be read, or a row cannot be used; 2 invalid arguments.
    """
    from gym_rm.scorers.judge.training_rows import judgement_rows

    keep_inputs([source, style], [output])
    pairs = _comparisons(source, column)
    rows = list(judgement_rows(pairs, style=style, **override_values(option or [])))
    with replaced_file(output) as file:
        file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    typer.echo(f"{len(rows)} rows of {len(pairs.comparisons)} comparisons, {len(pairs.dropped)} were dropped: {output}")


def _comparisons(source: str, column: list[str] | None) -> ComparisonSet:
    from gym_rm.data.columns import parse_columns
    from gym_rm.data.comparisons import load_comparisons

    try:
        renamed = parse_columns(column or [])
    except ConfigError as error:
        fail(error, code=2)
    name, path = source.rstrip("/").rsplit("/", 1)[-1], "/dev/stdin" if source == "-" else source
    return load_comparisons(path, name=name, on_error="drop", columns=renamed)
