"""Read rows from files, lists and data sets of the hub.

Every reader yields `(where, row)`. `where` is the file and line of the row, for error messages.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.resources
import io
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import numpy as np

from gym_rm.errors import ConfigError

Source: TypeAlias = "str | os.PathLike[str] | Iterable[Any] | None"

EMBEDDED = {"embedded": "prompts.jsonl", "embedded:code": "code_prompts.jsonl"}
"""Files of the package by their name as a source; None is the first one."""

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
_READ_ERRORS = (OSError, EOFError, zlib.error)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w\[\]%:+-]+)?")
# CSV cells are texts, except lists as JSON in the first columns, and messages as JSON in the second ones.
_CSV_LISTS = ("user_turns", "completions", "solutions", "responses")
_CSV_MESSAGES = (
    *("messages", "prompt", "context", "question", "instruction"),
    *("chosen", "rejected", "response", "response1", "response2"),
)
_LIKE_MESSAGES = re.compile(r"""\[\s*\{\s*["'](role|content)["']\s*:""")
# An empty cell of these columns is an empty text, if the row has no other reply.
_CSV_REPLIES = (("response",), ("chosen", "rejected"))
_SOURCES = (
    "a .jsonl, .ndjson, .json, .csv or .parquet file, a data set name 'org/name' or 'org/name:split', "
    "or a list of texts, message lists, rows or records"
)


def rows_of(source: Source, argument: str) -> Iterator[tuple[str, Any]]:
    """Return an iterator over `(where, row)` of a source. `argument` is the name of the source in error messages.

    Missing values (NaN, `pandas.NA`, NaT) become None, and arrays become lists.

    Raises:
        ConfigError: the file does not exist, its format is unknown, a line cannot be parsed, or the source is a set.
    """
    return ((where, present(row)) for where, row in _without_errors(rows_or_errors(source, argument)))


def rows_or_errors(source: Source, argument: str, *, max_row_bytes: int | None = None) -> Iterator[tuple[str, Any]]:
    """Like `rows_of`, but a row that is too long or cannot be parsed is yielded as its ConfigError, and NaN is kept.

    A line of JSON that is longer than `max_row_bytes` is not read as a whole; of other rows, the texts are counted.
    """
    rows = _rows_of(source, argument, max_row_bytes)
    if max_row_bytes is None:
        return rows
    return (
        (where, _too_long(where, max_row_bytes) if _text_length(row) > max_row_bytes else row) for where, row in rows
    )


def _without_errors(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Raise the first error instead of yielding it."""
    for where, row in rows:
        if isinstance(row, ConfigError):
            raise row
        yield where, row


def _rows_of(source: Source, argument: str, max_row_bytes: int | None) -> Iterator[tuple[str, Any]]:
    if source is None or (isinstance(source, str) and source in EMBEDDED):
        name = EMBEDDED[source or "embedded"]
        text = importlib.resources.files("gym_rm").joinpath("assets", name).read_bytes()
        return rows_in(io.BytesIO(text), "embedded prompts", "jsonl")
    if isinstance(source, str | os.PathLike):
        return _stored_rows(os.fspath(source), argument, max_row_bytes)
    if isinstance(source, Set) and not isinstance(source, KeysView | ItemsView):
        raise ConfigError(
            f"{argument} must have an order, but a {type(source).__name__} has none: its rows would come in another "
            "order in every process. Pass a list."
        )
    if type(source).__name__ == "DataFrame":  # iterating over a DataFrame yields its column names
        table = cast(Any, source)
        records = cast("list[Any]", table.to_dicts() if hasattr(table, "to_dicts") else table.to_dict("records"))
        source = [present(record) for record in records]  # an empty cell of a table is NaN
    scalar = getattr(source, "ndim", 1) == 0  # an array without rows
    if isinstance(source, Mapping) or not isinstance(source, Iterable) or scalar:
        raise ConfigError(f"{argument} must be {_SOURCES}; got {show(source)}.")
    return ((f"{argument}[{index}]", row) for index, row in enumerate(source))


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield `(line number, row)` of a `.jsonl` or `.jsonl.gz` file. Lines count from 1; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be opened, or a line is not a JSON object.
    """
    path = Path(path)
    with open_binary(path) as file:
        for number, line in read_lines(file, str(path)):
            row = parse_line(line, f"{path} line {number}")
            if not isinstance(row, dict):
                raise ConfigError(f"{path} line {number}: expected a JSON object, got {show(row)}.")
            yield number, row


def parse_line(line: bytes | str, where: str) -> Any:
    """Parse one line as JSON.

    Raises:
        ConfigError: the line is not UTF-8 or not JSON.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} at column {error.colno}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not valid UTF-8: byte {error.object[error.start]:#04x} at position {error.start}."
        ) from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, or too many nested brackets
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
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return _FORMATS.get(suffixes[-1]) if suffixes else None, compression


def _stored_rows(source: str, argument: str, max_row_bytes: int | None) -> Iterator[tuple[str, Any]]:
    path = Path(source).expanduser()
    if path.is_dir():
        return _dataset_rows(source, argument)
    if path.exists() or format_of(path)[0]:
        return _file_rows(path, argument, max_row_bytes)
    if _HUB_NAME.fullmatch(source):
        return _dataset_rows(source, argument)
    raise ConfigError(f"{argument}={source!r} is neither a file nor a data set name; expected {_SOURCES}.")


def _file_rows(path: Path, argument: str, max_row_bytes: int | None) -> Iterator[tuple[str, Any]]:
    if not path.exists():
        raise ConfigError(f"{argument}: the file {str(path)!r} does not exist.")
    stored_as, compression = format_of(path)
    if stored_as is None and not path.is_file():
        stored_as = "jsonl"  # a pipe has no suffix
    if stored_as is None or (stored_as == "parquet" and compression):
        raise ConfigError(
            f"{argument}: cannot read {str(path)!r}; expected one of {', '.join(_FORMATS)}, or a text file that is "
            "compressed as .gz or .zst."
        )
    return _rows_of_file(path, stored_as, max_row_bytes)


def _rows_of_file(path: Path, stored_as: str, max_row_bytes: int | None) -> Iterator[tuple[str, Any]]:
    with open_binary(path) as file:
        yield from _rows_or_errors_in(file, str(path), stored_as, max_row_bytes)


def rows_in(file: IO[bytes], name: str, stored_as: str) -> Iterator[tuple[str, Any]]:
    """Yield `(where, row)` of an open, decompressed file in a format of `format_of`."""
    return _without_errors(_rows_or_errors_in(file, name, stored_as, None))


def _rows_or_errors_in(
    file: IO[bytes], name: str, stored_as: str, max_row_bytes: int | None
) -> Iterator[tuple[str, Any]]:
    match stored_as:
        case "json":
            return _json_rows(file, name)
        case "csv":
            return _csv_rows(file, name)
        case "parquet":
            return _parquet_rows(file, name)
    lines = ((f"{name} line {number}", line) for number, line in _short_lines(file, name, max_row_bytes))
    return (
        (where, _too_long(where, max_row_bytes) if line is None else _or_error(parse_line, line, where))
        for where, line in lines
    )


def _or_error(parse: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns, or the ConfigError that it raises."""
    try:
        return parse(*arguments)
    except ConfigError as error:
        return error


def _too_long(where: str, max_row_bytes: int | None) -> ConfigError:
    return ConfigError(
        f"{where}: the row is longer than {max_row_bytes} bytes; check that the file has one row per line, or increase "
        "max_row_bytes."
    )


def _text_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    values = value.values() if isinstance(value, Mapping) else value
    return sum(map(_text_length, values)) if isinstance(value, Mapping | list | tuple) else 0


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, and decompress it if its name ends with `.gz` or `.zst`."""
    try:
        return decompressed(path.open("rb"), path)
    except OSError as error:
        raise ConfigError(f"cannot open {str(path)!r}: {error.strerror or error}.") from error


def decompressed(file: IO[bytes], path: Path) -> IO[bytes]:
    """Return the open file, decompressed according to the suffix of `path`.

    Raises:
        ConfigError: a `.zst` file, and pyarrow is not installed.
    """
    match format_of(path)[1]:
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=file))
        case ".zst":
            stream = import_pyarrow(f"reading {path}").CompressedInputStream(file, "zstd")
            return cast(IO[bytes], io.BufferedReader(stream))
    return file


def read_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield `(line number, line)` of all lines that are not blank. Lines count from 1."""
    return ((number, line) for number, line in _short_lines(file, name, None) if line is not None)


def _short_lines(file: IO[bytes], name: str, limit: int | None) -> Iterator[tuple[int, bytes | None]]:
    """Like `read_lines`, but a line of more than `limit` bytes is yielded as None and never held in memory."""
    number, size = 0, -1 if limit is None else limit + 1
    try:
        for number, line in enumerate(iter(lambda: file.readline(size), b""), start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if limit is not None and len(line) > limit:
                end = line
                while end and not end.endswith(b"\n"):
                    end = file.readline(size)
                yield number, None
            elif line.strip():
                yield number, line
    except _READ_ERRORS as error:
        raise ConfigError(f"{name}: cannot be read after line {number}: {error}.") from error


def _json_rows(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_line(file.read().removeprefix(b"\xef\xbb\xbf"), name)
    except _READ_ERRORS as error:
        raise ConfigError(f"{name}: cannot be read: {error}.") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{name}: a .json file must contain a list of rows, got {show(rows)}.")
    for index, row in enumerate(rows):
        yield f"{name} row {index}", row


def _csv_rows(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    begin = 1
    try:
        header = _next_record(reader) or []
        if twice := [column for index, column in enumerate(header) if column and column in header[:index]]:
            raise ConfigError(f"{name} line 1: the header has the column {twice[0]!r} twice; rename one of them.")
        begin = reader.line_num + 1
        while (cells := _next_record(reader)) is not None:
            begin = reader.line_num + 1
            where = f"{name} line {reader.line_num}"
            if cells:
                yield where, _or_error(_csv_row, header, cells, where)
    except csv.Error as error:
        raise ConfigError(
            f"{name} line {begin}: the row that begins here is not valid CSV: {error}. A cell that begins with a "
            "quote must end with one, and quotes inside it must be doubled."
        ) from error
    except (UnicodeDecodeError, *_READ_ERRORS) as error:
        raise ConfigError(f"{name}: not readable as CSV after line {reader.line_num}: {error}.") from error
    finally:
        if not file.closed:
            text.detach()  # the caller closes the file


def _csv_row(header: Sequence[str], cells: Sequence[str], where: str) -> dict[str, Any]:
    if len(cells) != len(header):
        amount = "more" if len(cells) > len(header) else "fewer"
        raise ConfigError(f"{where}: the row has {amount} cells than the header, which has {len(header)}.")
    named = list(zip(header, cells, strict=True))
    if header.count("") > 1 and any(cell for column, cell in named if not column):
        raise ConfigError(f"{where}: a column without a name has a value; give every column a name.")
    row = {column: parse_cell(column, cell, where) for column, cell in named if cell}
    _add_empty_replies(row, header)
    return row


def _next_record(reader: Any) -> list[str] | None:
    """Return the next cells, of any length; the limit of the module `csv` belongs to the whole process."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(limit)


def parse_cell(name: str, text: str, where: str) -> Any:
    """Return a cell of a csv file as text. In the columns for lists and messages, JSON is parsed.

    Raises:
        ConfigError: the cell begins like a list or like messages, but is not JSON.
    """
    where = f"{where}, column {name!r}"
    if name in _CSV_LISTS and text[0] in "[{":
        return parse_line(text, where)
    if name not in _CSV_MESSAGES or text[0] not in ("[{" if name == "messages" else "["):
        return text
    try:
        value = parse_line(text, where)
    except ConfigError:
        if _LIKE_MESSAGES.match(text):
            raise
        return text
    return value if name == "messages" or (value and all(map(_is_message, value))) else text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and ("content" in value or "tool_calls" in value)


def _add_empty_replies(row: dict[str, Any], header: Sequence[str]) -> None:
    """Add the empty cells of the columns with replies."""
    others = {"messages", *_CSV_LISTS[1:], *itertools.chain.from_iterable(_CSV_REPLIES)}
    for columns in _CSV_REPLIES:
        if row and not row.keys() & (others - set(columns)):
            row.update({column: "" for column in columns if column in header and column not in row})


def _parquet_rows(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    pyarrow = import_pyarrow(f"reading {name}")
    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)
        for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{name} row {index}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{name}: not readable as parquet: {error}.") from error


def _dataset_rows(source: str, argument: str) -> Iterator[tuple[str, Any]]:
    datasets = _import("datasets", f"loading {source!r}")
    name, _, split = source.partition(":")
    try:
        dataset = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the hub, the network and the builders raise many types
        raise ConfigError(f"{argument}: the data set {source!r} cannot be loaded: {error}") from error
    return ((f"{source} row {index}", row) for index, row in enumerate(dataset))


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


def present(value: Any) -> Any:
    """Return a value of a row with missing values (NaN, NA, NaT) as None and arrays as lists, at any depth."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: present(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [present(each) for each in value]
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
