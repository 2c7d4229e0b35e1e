"""Write JSON lines as CSV, JSON or Parquet, and compress them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from gym_rm.data.rows import format_of, import_pyarrow

ROWS_AT_ONCE = 1000


def compressed(file: IO[bytes], path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Return a file to write to, which compresses according to the suffix of `path`."""
    match format_of(path)[1]:
        case ".gz":
            stream: Any = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
            return cast("contextlib.AbstractContextManager[IO[bytes]]", stream)
        case ".zst":
            stream = import_pyarrow(f"writing {path}").CompressedOutputStream(file, "zstd")
            return cast("contextlib.AbstractContextManager[IO[bytes]]", stream)
    return contextlib.nullcontext(file)


def write_json(lines: Iterable[bytes], file: IO[bytes]) -> None:
    """Write a list with one row per line."""
    start = b"["
    for line in lines:
        file.write(start + b"\n" + line.rstrip(b"\n"))
        start = b","
    file.write(b"[]\n" if start == b"[" else b"\n]\n")


def write_csv(lines: IO[bytes], file: IO[bytes], added: Sequence[str]) -> None:
    """Write a header with all fields (the `added` ones last), and one row per line: texts, other values as JSON."""
    names = dict.fromkeys(name for line in lines for name in json.loads(line))
    columns = sorted(names, key=added.__contains__)
    lines.seek(0)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    rows = ([_text(row.get(column)) for column in columns] for row in map(json.loads, lines))
    for cells in itertools.chain([columns], rows):
        # Before Python 3.13, the writer leaves a lone carriage return unquoted, which readers take for a new line.
        (quoting if any("\r" in cell for cell in cells) else writer).writerow(cells)
    text.flush()
    text.detach()


def write_parquet(lines: IO[bytes], file: IO[bytes], source: Path | None, added: Sequence[str]) -> None:
    """Write one row per line. The columns of a parquet `source` keep their types, and only `added` fields are appended.

    A column of values of different types is written as JSON texts.
    """
    pyarrow = import_pyarrow("writing parquet")
    from_parquet = source is not None and format_of(source) == ("parquet", "")
    types = _column_types(pyarrow, lines, added if from_parquet else None)
    names = sorted(types, key=added.__contains__)
    lines.seek(0)
    tables: Iterator[Any]
    if from_parquet:
        batches = pyarrow.parquet.ParquetFile(source).iter_batches(ROWS_AT_ONCE)
        tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
    else:
        tables = itertools.repeat(None)
    writer = None
    for table in tables:
        rows = [json.loads(line) for line in itertools.islice(lines, ROWS_AT_ONCE if table is None else len(table))]
        if not rows and writer is not None:
            break
        columns = {name: _column(pyarrow, types[name], [row.get(name) for row in rows]) for name in names}
        if table is None:
            table = pyarrow.table(columns)
        else:
            for name, column in columns.items():
                table = table.append_column(name, column)
        writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        if not rows:
            break
    if writer is None:  # a parquet source without rows
        pyarrow.parquet.write_table(pyarrow.parquet.read_schema(source).empty_table(), file)
    else:
        writer.close()


def _column_types(pyarrow: Any, lines: Iterable[bytes], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the type of each of these columns that occurs (None for all columns); None for JSON texts."""
    types: dict[str, Any] = {}
    remaining = iter(lines)
    while rows := [json.loads(line) for line in itertools.islice(remaining, ROWS_AT_ONCE)]:
        for name in dict.fromkeys(name for row in rows for name in row if names is None or name in names):
            if name in types and types[name] is None:
                continue
            try:
                found = pyarrow.array([row.get(name) for row in rows]).type
                both = [pyarrow.schema([(name, each)]) for each in (types.get(name, found), found)]
                merged = pyarrow.unify_schemas(both, promote_options="permissive").field(name).type
            except (pyarrow.ArrowException, OverflowError):
                merged = None
            # Parquet has no structs without fields.
            types[name] = None if "struct<>" in str(merged) else merged
    return types


def _column(pyarrow: Any, kind: Any, values: list[Any]) -> Any:
    if kind is None:
        return pyarrow.array([None if value is None else json.dumps(value) for value in values], pyarrow.string())
    return pyarrow.array(values, kind)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
