"""`gym-rm data inspect`: show what a file of comparisons holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from gym_rm.cli.console import fail
from gym_rm.cli.scorer_arguments import Columns
from gym_rm.errors import ConfigError

data = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the data that reward models are trained and evaluated on.",
)


@data.callback()
def _group() -> None:
    """Keep `inspect` a command of its own, although it is the only one."""


@data.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A .jsonl, .ndjson, .json, .csv or .parquet file, the first four also compressed as .gz; a "
            "data set 'org/name' or 'org/name:split'; - for JSON lines from standard input.",
        ),
    ],
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
    from gym_rm.data.columns import parse_columns  # imported here because the imports are slow
    from gym_rm.data.comparisons import load_comparisons
    from gym_rm.data.inspection import inspect_comparisons
    from gym_rm.reports.data_tables import inspection_report

    try:
        renamed = parse_columns(column or [])
    except ConfigError as error:
        fail(error, code=2)
    found = inspect_comparisons(
        load_comparisons(
            "/dev/stdin" if source == "-" else source,
            name=source.rstrip("/").rsplit("/", 1)[-1],
            on_error="drop",
            columns=renamed,
        )
    )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        Console(highlight=False).print(inspection_report(found))
