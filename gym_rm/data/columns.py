"""Columns of a file whose names differ from the fields that readers know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_rm.data.formats.fields import ALL_PROMPT_FIELDS, REPLY_TEXTS, SOURCE_FIELDS
from gym_rm.data.formats.pairs import SIGNED
from gym_rm.data.formats.reply_lists import BESIDE, OBJECTIVES, REPLY_LISTS
from gym_rm.data.rows import filled_fields
from gym_rm.errors import ConfigError

FIELDS = (
    *ALL_PROMPT_FIELDS, *REPLY_TEXTS, *REPLY_LISTS, *SOURCE_FIELDS, *OBJECTIVES, *BESIDE, *SIGNED[0], *SIGNED[1], "id",
    "chosen", "rejected", "margin", "score_chosen", "score_rejected", "labels", "prompt_id", "tools", "user_turns",
)  # fmt: skip


def parse_columns(arguments: Sequence[str]) -> dict[str, str]:
    """Return the columns by field from texts `FIELD=COLUMN`; the name of a column is everything after the first `=`.

    Raises:
        ConfigError: an argument has another form, or its field is given twice or misspelt.

    Example:
        >>> parse_columns(["response=Reply #2", "prompt=a=b"])
        {'response': 'Reply #2', 'prompt': 'a=b'}
    """
    columns: dict[str, str] = {}
    for argument in arguments:
        name, equals, column = argument.partition("=")
        if not equals or not name or name in columns:
            expected = f"one column for {name!r}" if name in columns else "FIELD=COLUMN, as in prompt=Question"
            raise ConfigError(f"--column must be {expected}, got {argument!r}.")
        columns[name] = column
    check_fields(columns)
    return columns


def check_fields(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is almost that of a field; any other one is a field of the user's own."""
    for name in names:
        close = difflib.get_close_matches(name.lower().strip(), FIELDS, n=1, cutoff=0.8)
        if close and name not in FIELDS and not name.startswith(f"{close[0]}_"):
            raise ConfigError(f"columns: unknown field {name!r}. Did you mean {close[0]!r}?")


def with_columns(row: Any, columns: Mapping[str, str] | None, where: str) -> Any:
    """Return a row with renamed columns: `{"prompt": "Question"}` reads the prompt from the column `Question`.

    Raises:
        ConfigError: the row does not have such a column.
    """
    if not columns or not isinstance(row, Mapping):
        return row
    if missing := [column for column in columns.values() if column not in row]:
        raise ConfigError(f"{where}: there is no column {missing[0]!r}, got the fields {filled_fields(row)}.")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return {**others, **{name: row[column] for name, column in columns.items()}}
