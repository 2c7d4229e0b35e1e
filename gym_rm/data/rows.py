"""Read rows from files, lists and data sets of the hub.

Every reader yields `(where, row)`. `where` is the file and line of the row, for error messages.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.resources
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from gym_rm.errors import ConfigError

Source: TypeAlias = "str | os.PathLike[str] | Iterable[Any] | None"

_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_READ_ERRORS = (OSError, EOFError, zlib.error)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w\[\]%:+-]+)?")
_CSV_JSON_COLUMNS = ("messages", "context", "user_turns", "completions")
_SOURCES = (
    "a .jsonl, .json, .csv or .parquet file, a data set name 'org/name' or 'org/name:split', "
    "or a list of texts, message lists, rows or records"
)


def rows_of(source: Source, argument: str) -> Iterator[tuple[str, Any]]:
    """Return an iterator over `(where, row)` of a source. `argument` is the name of the source in error messages.

    Raises:
        ConfigError: the file does not exist, its format is unknown, or a line cannot be parsed.
    """
    if source is None:
        text = importlib.resources.files("gym_rm").joinpath("assets", "prompts.jsonl").read_bytes()
        lines = enumerate(io.BytesIO(text), start=1)
        return ((f"embedded prompts line {n}", parse_line(line, f"embedded prompts line {n}")) for n, line in lines)
    if isinstance(source, str | os.PathLike):
        return _stored_rows(os.fspath(source), argument)
    if type(source).__name__ == "DataFrame":  # iterating over a DataFrame yields its column names
        source = cast(Any, source).to_dict("records")
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
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


def _stored_rows(source: str, argument: str) -> Iterator[tuple[str, Any]]:
    path = Path(source).expanduser()
    if path.is_file() or _format(path):
        return _file_rows(path, argument)
    if path.is_dir() or _HUB_NAME.fullmatch(source):
        return _dataset_rows(source, argument)
    raise ConfigError(f"{argument}={source!r} is neither a file nor a data set name; expected {_SOURCES}.")


def _format(path: Path) -> str | None:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in _FORMATS else None


def _file_rows(path: Path, argument: str) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{argument}: the file {str(path)!r} does not exist.")
    match _format(path):
        case ".jsonl":
            return _jsonl_rows(path)
        case ".json":
            return _json_rows(path)
        case ".csv":
            return _csv_rows(path)
        case ".parquet" if path.suffix == ".parquet":
            return _parquet_rows(path)
    raise ConfigError(
        f"{argument}: cannot read {str(path)!r}; expected one of {', '.join(_FORMATS)}, or a gzipped text file."
    )


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, and decompress it if its name ends with `.gz`."""
    try:
        return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot open {str(path)!r}: {error.strerror or error}.") from error


def read_lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield `(line number, line)` of all lines that are not blank. Lines count from 1."""
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line
    except _READ_ERRORS as error:
        raise ConfigError(f"{name}: cannot be read after line {number}: {error}.") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with open_binary(path) as file:
        for number, line in read_lines(file, str(path)):
            yield f"{path} line {number}", parse_line(line, f"{path} line {number}")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with open_binary(path) as file:
            rows = parse_line(file.read().removeprefix(b"\xef\xbb\xbf"), str(path))
    except _READ_ERRORS as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: a .json file must contain a list of rows, got {show(rows)}.")
    return ((f"{path} row {index}", row) for index, row in enumerate(rows))


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with open_binary(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                where = f"{path} line {reader.line_num}"
                if None in cells:
                    raise ConfigError(
                        f"{where}: the row has more cells than the header, which has {len(reader.fieldnames or ())}."
                    )
                yield where, {name: _cell(name, text, where) for name, text in cells.items() if text}
        except (csv.Error, UnicodeDecodeError, *_READ_ERRORS) as error:
            raise ConfigError(f"{path}: not readable as CSV after line {reader.line_num}: {error}.") from error


def _cell(name: str, text: str, where: str) -> Any:
    """Return a cell as text. In the columns for lists, JSON is parsed."""
    return parse_line(text, f"{where}, column {name!r}") if name in _CSV_JSON_COLUMNS and text[0] in "[{" else text


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = _import("pyarrow.parquet", f"reading {path}")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{path} row {index}", row
    except (_import("pyarrow", f"reading {path}").ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not readable as parquet: {error}.") from error


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


def describe_source(source: Source) -> str:
    """Return the name of a source for error messages."""
    if source is None:
        return "the embedded set"
    return repr(os.fspath(source)) if isinstance(source, str | os.PathLike) else f"the given {type(source).__name__}"
