"""Read rows from files, lists and data sets of the hub.

Every reader yields `(where, row)`. `where` is the file and line of the row, for error messages.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import gzip
import importlib
import importlib.resources
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar, cast

import numpy as np

from gym_rm.documents import parse_json
from gym_rm.errors import ConfigError

Source: TypeAlias = "str | os.PathLike[str] | Iterable[Any] | None"
Row = TypeVar("Row")

EMBEDDED = {"embedded": "prompts.jsonl", "embedded:code": "code_prompts.jsonl"}
"""Files of the package by their name as a source; None is the first one."""

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_READ_ERRORS = (OSError, EOFError, zlib.error)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w\[\]%:+-]+)?")
_LIKE_MESSAGES = re.compile(r"""\[\s*\{\s*["'](role|content)["']\s*:""")
_CSV_REPLIES = ("chosen", "rejected", "response")
_SOURCES = (
    "a .jsonl, .ndjson, .json, .csv or .parquet file, a data set name 'org/name' or 'org/name:split', "
    "or a list of texts, message lists, rows or records"
)


def sampled(rows: Sequence[Row], limit: int | None, *, seed: int) -> list[Row]:
    """Return a random sample of at most `limit` rows in their order; all of them for None.

    A smaller sample with the same seed is a part of a larger one.
    """
    chosen = np.random.default_rng(seed).permutation(len(rows))[:limit]
    return [rows[index] for index in sorted(chosen.tolist())]


def rows_of(source: Source, argument: str) -> Iterator[tuple[str, Any]]:
    """Return an iterator over `(where, row)` of a source. `argument` is the name of the source in error messages.

    Missing values (NaN, `pandas.NA`, NaT) become None, and arrays become lists.

    Raises:
        ConfigError: the file does not exist, its format is unknown, a line cannot be parsed, or the source is a set.
    """
    return ((where, present(row)) for where, row in _without_errors(rows_or_errors(source, argument)))


def _without_errors(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Raise the first error instead of yielding it."""
    for where, row in rows:
        if isinstance(row, ConfigError):
            raise row
        yield where, row


def rows_or_errors(source: Source, argument: str) -> Iterator[tuple[str, Any]]:
    """Like `rows_of`, but a row that cannot be parsed is yielded as its ConfigError, and NaN is kept."""
    if source is None or (isinstance(source, str) and source in EMBEDDED):
        name = EMBEDDED[source or "embedded"]
        text = importlib.resources.files("gym_rm").joinpath("assets", name).read_bytes()
        return rows_or_errors_in(io.BytesIO(text), "embedded prompts", "jsonl")
    if isinstance(source, str | os.PathLike):
        return _stored_rows(os.fspath(source), argument)
    if isinstance(source, Set) and not isinstance(source, KeysView | ItemsView):
        raise ConfigError(
            f"{argument} must have an order, but a {type(source).__name__} has none: its rows would come in another "
            "order in every process. Pass a list."
        )
    source = _records(source, argument)
    scalar = getattr(source, "ndim", 1) == 0  # an array without rows
    if isinstance(source, Mapping | bytes) or not isinstance(source, Iterable) or scalar:
        raise ConfigError(f"{argument} must be {_SOURCES}; got {show(source)}.")
    return ((f"{argument}[{index}]", row) for index, row in enumerate(source))


def _records(source: Any, argument: str) -> Any:
    """Return the rows of a table or a column of pandas, polars, pyarrow or datasets; another source as it is."""
    library = type(source).__module__.partition(".")[0]
    if library not in ("pandas", "polars", "pyarrow", "datasets") or isinstance(source, Mapping):
        return source
    names = getattr(source, "columns" if library in ("pandas", "polars") else "column_names", None)
    _refuse_twice(list(() if names is None else names), argument)
    if hasattr(source, "to_pylist"):
        source = source.to_pylist()
    elif names is not None and library != "datasets":  # an empty cell of pandas is NaN
        source = source.to_dicts() if library == "polars" else map(present, source.to_dict("records"))
    return map(without_filled, source) if isinstance(source, Iterable) else source


def without_filled(row: Any) -> Any:
    """Return a row of a column format without the None that its nested mappings have.

    Column formats give every mapping the keys of those in other rows; which of them the row had cannot be told.
    """
    return {name: _without_none(each) for name, each in row.items()} if isinstance(row, Mapping) else _without_none(row)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple | np.ndarray) else value


def parse_line(line: bytes, where: str) -> Any:
    """Parse one line as JSON.

    Raises:
        ConfigError: the line is not UTF-8 or not JSON.
    """
    try:
        return parse_json(line, allow_nan=True)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} at column {error.colno}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not valid UTF-8: byte {error.object[error.start]:#04x} at position {error.start}."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be parsed as JSON: {error}.") from error


def show(value: Any) -> str:
    """Return a value as text for error messages: its type and the start of its repr."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def format_of(path: Path) -> tuple[str | None, str]:
    """Return the format (`"jsonl"`, `"json"`, `"csv"`, `"parquet"`; None if unknown) and the compression by the name.

    Example:
        >>> format_of(Path("replies.NDJSON.gz")), format_of(Path("notes.txt"))
        (('jsonl', '.gz'), (None, ''))
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] == ".gz" else ""
    return _FORMATS.get(suffixes[-1]) if suffixes else None, compression


def _stored_rows(source: str, argument: str) -> Iterator[tuple[str, Any]]:
    path = Path(os.path.expanduser(source))
    stored_as, compression = format_of(path)
    if os.path.isdir(path) and (Path.cwd().is_relative_to(path.resolve()) or not _has_rows(path)):
        raise ConfigError(f"{argument}={source!r} is a folder and no data set; name a file in it.")
    if os.path.isdir(path) or (_HUB_NAME.fullmatch(source) and not os.path.exists(path) and not stored_as):
        return _dataset_rows(source, argument)
    if not os.path.exists(path):
        if stored_as:
            raise ConfigError(f"{argument}: the file {source!r} does not exist.")
        raise ConfigError(f"{argument}={source!r} is neither a file nor a data set name; expected {_SOURCES}.")
    if stored_as is None and not os.path.isfile(path):
        stored_as = "jsonl"  # a pipe has no suffix
    if stored_as is None or (stored_as == "parquet" and compression):
        raise ConfigError(
            f"{argument}: cannot read {str(path)!r}; expected one of {', '.join(_FORMATS)}, or a text file that is "
            "compressed as .gz."
        )
    return _rows_of_file(path, stored_as)


def _has_rows(folder: Path) -> bool:
    return any(format_of(each)[0] for each in (*folder.glob("*.*"), *folder.glob("data/*.*")))


def _rows_of_file(path: Path, stored_as: str) -> Iterator[tuple[str, Any]]:
    with open_binary(path) as file:
        yield from rows_or_errors_in(file, str(path), stored_as)


def rows_or_errors_in(
    file: IO[bytes], name: str, stored_as: str, *, without_binary: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield `(where, row)` of an open, decompressed file in a format of `format_of`, as `rows_or_errors` does.

    `without_binary` leaves out bytes that are no text, such as images, instead of refusing their row.
    """
    match stored_as:
        case "json":
            return _json_rows(file, name)
        case "csv":
            return _csv_rows(file, name)
        case "parquet":
            return _parquet_rows(file, name, without_binary)
    lines = ((f"{name} line {number}", line) for number, line in read_lines(file, name))
    return ((where, _or_error(parse_line, line, where)) for where, line in lines)


def _or_error(parse: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns, or the ConfigError that it raises."""
    try:
        return parse(*arguments)
    except ConfigError as error:
        return error


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, and decompress it if its name ends with `.gz`."""
    try:
        return decompressed(path.open("rb"), path)
    except OSError as error:
        raise ConfigError(f"cannot open {str(path)!r}: {error.strerror or error}.") from error


def decompressed(file: IO[bytes], path: Path) -> IO[bytes]:
    """Return the open file, decompressed if the name of `path` ends with `.gz`."""
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if format_of(path)[1] else file


def read_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield `(line number, line)` of all lines that are not blank. Lines count from 1."""
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(codecs.BOM_UTF8)  # also of a file that was appended to another one
            if line.strip():
                yield number, line
    except _READ_ERRORS as error:
        raise ConfigError(f"{name}: cannot be read after line {number}: {error}.") from error


def _json_rows(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_line(file.read().removeprefix(codecs.BOM_UTF8), name)
    except _READ_ERRORS as error:
        raise ConfigError(f"{name}: cannot be read: {error}.") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{name}: a .json file must contain a list of rows, got {show(rows)}.")
    for index, row in enumerate(rows):
        yield f"{name} row {index}", row


def _csv_rows(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, strict=True)
    begin = 1
    try:
        header = _csv_header(reader, name)
        begin = reader.line_num + 1
        for cells in reader:
            begin = reader.line_num + 1
            where = f"{name} line {reader.line_num}"
            yield where, _or_error(_csv_row, header, cells, where)
    except csv.Error as error:
        raise ConfigError(
            f"{name} line {begin}: the row that begins here is not valid CSV: {error}. A cell that begins with a "
            "quote must end with one, and quotes inside it must be doubled; write longer cells to a .jsonl file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not readable as CSV after line {reader.line_num}: not valid UTF-8: {error}; convert the file."
        ) from error
    except _READ_ERRORS as error:
        raise ConfigError(f"{name}: not readable as CSV after line {reader.line_num}: {error}.") from error
    finally:
        if not file.closed:
            text.detach()  # the caller closes the file


def _csv_header(reader: csv.DictReader[str], name: str) -> Sequence[str]:
    header = reader.fieldnames or []
    _refuse_twice(header, f"{name} line 1: the header")
    return header


def _refuse_twice(columns: Sequence[str], owner: str) -> None:
    if twice := [column for index, column in enumerate(columns) if column in columns[:index]]:
        raise ConfigError(f"{owner} has the column {twice[0]!r} twice; rename one of them.")


def columns_of(path: Path | None) -> Sequence[str]:
    """Return the columns of a CSV or Parquet file, also without rows; none for another file, and for a pipe."""
    if path is None or not os.path.isfile(path):
        return ()
    match format_of(path)[0]:
        case "csv":
            with open_binary(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
                return _csv_header(csv.DictReader(text, strict=True), str(path))
        case "parquet":
            names: list[str] = import_pyarrow(f"reading {path}").parquet.read_schema(path).names
            return names
    return ()


def _csv_row(header: Sequence[str], cells: dict[Any, Any], where: str) -> dict[str, Any]:
    """Return the cells of a row as texts: those that are not empty, and the replies."""
    if None in cells or None in cells.values():
        amount = "more" if None in cells else "fewer"
        raise ConfigError(f"{where}: the row has {amount} cells than the header, which has {len(header)}.")
    for column, cell in cells.items():
        if _LIKE_MESSAGES.match(cell):
            raise ConfigError(
                f"{where}, column {column!r}: the cells of a .csv file are texts, and this one has messages; write "
                "messages and lists to a .jsonl file."
            )
    return {column: cell for column, cell in cells.items() if cell or column in _CSV_REPLIES}


def _parquet_rows(file: IO[bytes], name: str, without_binary: bool) -> Iterator[tuple[str, Any]]:
    pyarrow = import_pyarrow(f"reading {name}")
    try:
        stored = pyarrow.parquet.ParquetFile(file)
        _refuse_twice(stored.schema_arrow.names, name)
        batches = stored.iter_batches(batch_size=1024)
        for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            where = f"{name} row {index}"
            yield where, without_filled(_or_error(_plain_cell, row, where, without_binary))
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{name}: not readable as parquet: {error}.") from error


def _plain_cell(value: Any, where: str, without_binary: bool) -> Any:
    """Return a value of a column format as a value of JSON: bytes, dates and decimal numbers become texts.

    Raises:
        ConfigError: bytes are not UTF-8, or a number is infinite.
    """
    if isinstance(value, Mapping):
        return {name: _plain_cell(each, f"{where}, {name!r}", without_binary) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_cell(each, where, without_binary) for each in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            if without_binary:
                return None
            raise ConfigError(
                f"{where}: expected a text, got {show(value)}, which is not UTF-8; leave the column out."
            ) from error
    if isinstance(value, float) and math.isinf(value):
        raise ConfigError(f"{where}: expected a finite number, got {value}; leave it out (null) if it is not known.")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _dataset_rows(source: str, argument: str) -> Iterator[tuple[str, Any]]:
    datasets = _import("datasets", f"loading {source!r}")
    name, _, split = source.partition(":")
    try:
        dataset = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the hub, the network and the builders raise many types
        raise ConfigError(f"{argument}: the data set {source!r} cannot be loaded: {error}") from error
    return ((f"{source} row {index}", without_filled(row)) for index, row in enumerate(dataset))


def _import(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package {module.partition('.')[0]}; run pip install 'gym-rm[data]' ({error})."
        ) from error


def import_pyarrow(purpose: str) -> Any:
    """Import pyarrow with its module `parquet`.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    _import("pyarrow.parquet", purpose)
    return importlib.import_module("pyarrow")


def present(value: Any, *, keep_nan: bool = False) -> Any:
    """Return a value of a row with missing values (NaN, NA, NaT) as None and arrays as lists, at any depth.

    `keep_nan` keeps the NaN of a number, for readers that refuse it.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: present(each, keep_nan=keep_nan) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [present(each, keep_nan=keep_nan) for each in value]
    if keep_nan and isinstance(value, float):
        return value
    try:
        missing = bool(value != value)
    except (TypeError, ValueError):
        missing = type(value).__name__ == "NAType"  # comparing pandas.NA returns pandas.NA, which is no bool
    return None if missing else value


def filled_fields(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that have a value, for error messages."""
    return sorted(name for name, value in row.items() if value is not None)


def describe_source(source: Source) -> str:
    """Return the name of a source for error messages."""
    if source is None:
        return "the embedded set"
    return repr(os.fspath(source)) if isinstance(source, str | os.PathLike) else f"the given {type(source).__name__}"
