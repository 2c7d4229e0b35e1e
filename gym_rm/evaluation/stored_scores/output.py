"""Where the scores of a file go: lines that are written at once, or a file that is made of the stored scores."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gym_rm.data.rows import columns_of, format_of, import_pyarrow
from gym_rm.data.scored_rows import RowToScore
from gym_rm.documents import replaced_file
from gym_rm.errors import ConfigError
from gym_rm.evaluation.stored_scores.store import ScoreStore, digest_of_text
from gym_rm.plain_values import to_plain
from gym_rm.types import Provenance


def added_names(key: str) -> list[str]:
    """Return the names of all fields that may be added to a row."""
    suffixes = ("components", "turns", "steps", "step_ends", "truncated_tokens", "error")
    return [key, *(f"{key}_{suffix}" for suffix in suffixes)]


@dataclasses.dataclass(frozen=True, slots=True)
class InputLine:
    """One line of the input.

    An output line is the input line, byte for byte, with fields added before its last brace.

    Attributes:
        where: file name and line number.
        stem: start of the output line, up to the added fields.
        row: conversations to score; None if the line is invalid.
        error: why the line is invalid.
    """

    where: str
    stem: bytes
    row: RowToScore | None = None
    error: str | None = None

    @property
    def digest(self) -> str:
        """Name of the line in a `ScoreStore`."""
        return digest_of_text(self.stem)

    def __len__(self) -> int:
        """Return the number of conversations to score."""
        return 0 if self.row is None else len(self.row.conversations)


def output_line(stem: bytes, added: Mapping[str, Any]) -> bytes:
    """Return the output line of an input line with these fields."""
    return stem + b", " + json.dumps(added, allow_nan=False).encode()[1:] + b"\n"


@dataclasses.dataclass(frozen=True)
class StreamOutput:
    """Standard output: every line is written as soon as it has its scores."""

    file: IO[bytes]

    def finished(self, line: InputLine) -> None:
        """Return None: a stream has no earlier lines."""

    def check_model(self, provenance: Provenance | None) -> None:
        """Do nothing: there are no earlier scores, of another model."""

    def write(self, lines: Sequence[tuple[InputLine, Mapping[str, Any]]]) -> None:
        """Write the lines."""
        self.file.write(b"".join(output_line(line.stem, added) for line, added in lines))
        self.file.flush()

    def finish(self, stems: Sequence[bytes]) -> None:
        """Do nothing: every line is written."""


class FileOutput:
    """A file, made at the end of a run of the input and the scores, which are stored in `OUTPUT.scores`.

    The file of scores is only appended to: a run that was stopped is resumed from it, and rows that the input has more
    are added. Its first line has the settings and the model of the scores.

    Args:
        path: file to write: JSON lines, CSV or Parquet.
        source: the input; None for standard input.
        key: name of the added field.
        settings: settings that affect the scores; stored scores must have the same settings.
        overwrite: make all scores again, and replace the output.

    Raises:
        ConfigError: the output cannot be written, another process writes it, or it is of another run.
    """

    def __init__(
        self, path: Path, source: Path | None, key: str, settings: Mapping[str, Any], *, overwrite: bool
    ) -> None:
        self._path, scores = working_files(path)
        self._source, self._key = source, key
        self._settings = to_plain({"input": source.name if source else "-", **settings})
        self._version = _version(source)
        self.store = ScoreStore(scores)
        self._is_new = overwrite or self.store.header is None
        if self._is_new and not overwrite and path.exists() and path.stat().st_size > 0:
            raise ConfigError(
                f"{path} exists, but the file with its scores, {path.name}.scores, does not. "
                "Choose another output, or start again with --overwrite."
            )
        if not self._is_new:
            self._require_equal(None)
        try:
            with self._path.open("ab"):
                pass  # a folder that cannot be written is an error before anything is scored
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}.") from error
        self.store.lock()
        self._finished = {} if self._is_new else dict(self.store.entries)

    def finished(self, line: InputLine) -> Mapping[str, Any] | None:
        """Return what an earlier run added to a line; None if it is to be scored, also because it has no score."""
        entry = self._finished.get(line.digest)
        return None if entry is None or f"{self._key}_error" in entry else entry

    def check_model(self, provenance: Provenance | None) -> None:
        """Check that the stored scores are of the model of these; the first ones replace what `overwrite` gives up.

        Raises:
            ConfigError: they have another provenance, for example another revision of the model.
        """
        identity = {} if provenance is None else to_plain(provenance.identity)
        if self._is_new:
            self.store.start({"settings": self._settings, "identity": identity})
            self._is_new = False
        elif (self.store.header or {}).get("identity") is None:  # until now, every line was invalid
            self.store.start({"settings": self._settings, "identity": identity}, self.store.entries)
        self._require_equal(identity)

    def write(self, lines: Sequence[tuple[InputLine, Mapping[str, Any]]]) -> None:
        """Store the added fields of these lines."""
        if self._is_new:
            self.store.start({"settings": self._settings, "identity": None})
            self._is_new = False
        self.store.add({line.digest: added for line, added in lines})

    def finish(self, stems: Sequence[bytes]) -> None:
        """Write the file of these lines in the format of its name.

        Raises:
            ConfigError: the format cannot hold a value, or a Parquet input changed while it was scored.
        """
        if self._is_new:
            self.write([])
        lines = [output_line(stem, self.store.entries[digest_of_text(stem)]) for stem in stems]
        if self._version != _version(self._source):
            raise ConfigError("the input changed while it was scored; repeat the command when nothing writes to it.")
        try:
            with replaced_file(self._path) as file:
                self._write_rows(lines, file)
        except ConfigError:
            raise
        except (ValueError, TypeError, OverflowError, NotImplementedError) as error:  # those of pyarrow are among them
            raise ConfigError(
                f"the scores cannot be written to {str(self._path)!r}: {error}. They are in {str(self.store.path)!r}; "
                "choose an output that ends in .jsonl."
            ) from error

    def _write_rows(self, lines: Sequence[bytes], file: IO[bytes]) -> None:
        stored_as, names = format_of(self._path)[0], added_names(self._key)
        if stored_as == "parquet":
            write_parquet(lines, file, self._source, names)
        elif stored_as == "csv":
            write_csv(lines, file, self._source, names)
        else:
            file.writelines(lines)

    def _require_equal(self, identity: Mapping[str, Any] | None) -> None:
        if different := self.store.differences(self._settings, identity):
            raise ConfigError(
                f"{self._path} was written with other settings or another model ({different}). "
                "Use the earlier ones, choose another output, or start again with --overwrite."
            )


def _version(source: Path | None) -> tuple[int, int] | None:
    """Return the size and the time of a file, which change if it is written; None for a pipe."""
    if source is None or not source.is_file():
        return None
    found = source.stat()
    return found.st_size, found.st_mtime_ns


def write_csv(lines: Sequence[bytes], file: IO[bytes], source: Path | None, added: Sequence[str]) -> None:
    """Write a CSV file with the columns of the source and all fields (the `added` ones last)."""
    columns = _columns(map(json.loads, lines), source, added)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in map(json.loads, lines))
    text.flush()
    text.detach()


def write_parquet(lines: Sequence[bytes], file: IO[bytes], source: Path | None, added: Sequence[str]) -> None:
    """Write one row per line. The columns of a parquet `source` keep their types, and the `added` ones are appended."""
    pyarrow = import_pyarrow("writing parquet")
    rows = [json.loads(line) for line in lines]
    names = _columns(rows, source, added)
    if source is not None and format_of(source)[0] == "parquet":
        table = pyarrow.parquet.read_table(source)
        for name in (name for name in names if name in added):
            table = table.append_column(name, pyarrow.array([row.get(name) for row in rows]))
    else:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    pyarrow.parquet.write_table(table, file)


def _columns(rows: Iterable[Mapping[str, Any]], source: Path | None, added: Sequence[str]) -> list[str]:
    """Return the columns of the source, also those without values, and the fields of the rows, `added` ones last."""
    names = dict.fromkeys([*columns_of(source), *added[:1], *(name for row in rows for name in row)])
    return sorted(names, key=added.__contains__)


def _cell(value: Any) -> str:
    if value is None or value != value or isinstance(value, str):  # NaN is a missing value
        return value if isinstance(value, str) else ""
    return json.dumps(value, ensure_ascii=False)


def working_files(path: Path) -> tuple[Path, Path]:
    """Return the file behind an output, which may be a link, and the file of its scores."""
    path = Path(os.path.realpath(path))  # the lock is of the file, not of a link to it
    return path, path.with_name(f"{path.name}.scores")


def check_output(path: Path) -> None:
    """Raise ConfigError for an output in another format, or one that is no file, before anything is scored."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"output must be a file, or - for standard output, got {str(path)!r}.")
    stored_as, compression = format_of(path)
    if compression or stored_as not in ("jsonl", "csv", "parquet"):
        raise ConfigError(f"output must end in .jsonl, .csv or .parquet, got {str(path)!r}.")
    if stored_as == "parquet":
        import_pyarrow(f"writing {path}")
