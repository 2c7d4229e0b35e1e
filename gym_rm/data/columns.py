"""Columns of a file whose names differ from the fields that readers know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_rm.data.rows import filled_fields
from gym_rm.errors import ConfigError


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
