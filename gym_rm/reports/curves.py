"""CSV files of a run: one line per step, or per measurement; lines after a checkpoint are removed at resumption."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from gym_rm.errors import ConfigError


class Curve:
    """A CSV file whose first column is `step`; every line is on disk when `add` returns.

    Columns that a later line adds are appended to the header, and earlier lines have no value there.

    Args:
        path: the file.
        after: last step whose lines are kept, to resume a run; 0 to begin again.
    """

    def __init__(self, path: Path, *, after: int) -> None:
        self._path = path
        rows = [row for row in read_curve(path) if int(row["step"]) <= after] if path.exists() and after else []
        names = list(rows[0]) if rows else []
        # A line after `after` may have added the last columns.
        filled = [index for row in rows for index, name in enumerate(names) if row[name] != ""]
        self._columns = names[: max(filled, default=-1) + 1]
        if rows:
            self._write([{name: row[name] for name in self._columns} for row in rows])
        else:
            path.unlink(missing_ok=True)

    def add(self, row: Mapping[str, object]) -> None:
        """Append a line."""
        new = [name for name in row if name not in self._columns]
        if new:
            rows = list(read_curve(self._path)) if self._path.exists() else []
            self._columns += new
            self._write(rows)
        text = io.StringIO()
        csv.DictWriter(text, self._columns).writerow(dict(row))
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(text.getvalue())

    def _write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replace the whole file at once."""
        unfinished = self._path.with_name(f".{self._path.name}")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        unfinished.replace(self._path)


def read_curve(path: Path) -> list[dict[str, str]]:
    """Return the lines of a curve; a last line that was not written to its end is left out.

    Raises:
        ConfigError: another line is damaged; the message names it.
    """
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, content[: error.start].count(b"\n") + 1, "text in UTF-8") from error
    reader = csv.DictReader(io.StringIO(text))
    rows = []
    for row in reader:
        if None in row or None in row.values() or not row.get("step", "0").isdecimal():
            columns = len(reader.fieldnames or ())
            raise _damaged(path, reader.line_num, f"a step and a value for each of the {columns} columns")
        rows.append(row)
    return rows


def _damaged(path: Path, line: int, expected: str) -> ConfigError:
    return ConfigError(f"line {line} of {str(path)!r} is damaged: expected {expected}; repair or remove it.")
