"""Outputs of `gym-rm score`: lock them, continue them, and write them in the format of their name.

Lines are written as JSON Lines. An output in another format, and a retry of failed lines, are written to a file
`OUTPUT.partial` beside the output, which replaces the output when it is finished. A run that was stopped is continued
from the partial file, and after its last line from the output of an earlier run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from gym_rm.cli.formats import compressed, write_csv, write_json, write_parquet
from gym_rm.data.rows import COMPRESSIONS, format_of, import_pyarrow, open_binary, parse_line, read_lines, rows_in, show
from gym_rm.data.scored_rows import Labels, RowToScore
from gym_rm.errors import ConfigError, warn_once
from gym_rm.types import Provenance

ADDED = ("components", "turns", "truncated_tokens", "error", "provenance")
OTHER_COMPRESSIONS = (".bz2", ".xz", ".lzma", ".zip", ".7z", ".lz4", ".br", ".zstd", ".tgz", ".tar", ".z")
# Fields of the provenance that must be equal for all lines of one output.
SAME_SCORES = ("scorer", "model", "revision", "template_hash", "dtype", "settings")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    Attributes:
        where: file name and line number.
        stem: start of the output line, up to the added fields.
        row: conversations to score; None if the line is invalid.
        error: why the line is invalid.
        finished: the output line of an earlier run; None if the line must be scored.
    """

    where: str
    stem: bytes
    row: RowToScore | None = None
    error: str | None = None
    finished: bytes | None = None

    @property
    def labels(self) -> Labels:
        """Labels of the scores in the output line."""
        return None if self.row is None else self.row.labels

    def __len__(self) -> int:
        """Return the number of conversations to score."""
        return 0 if self.row is None or self.finished is not None else len(self.row.conversations)

    def with_fields(self, added: Mapping[str, Any]) -> bytes:
        """Return the output line."""
        return self.stem + b", " + json.dumps(added, default=str).encode()[1:] + b"\n"


def is_stream(output: Path | None) -> bool:
    """Return whether an output cannot be read again: standard output (None), a pipe or a device."""
    return output is None or (output.exists() and not output.is_file())


class Output:
    """The output and its settings file. A stream has no settings file and cannot be continued.

    Args:
        path: file to write or to continue; None for standard output.
        source: the input, or None for standard input.
        key: name of the added field.
        settings: settings that affect the scores; an existing output must have the same settings.
        overwrite: replace an existing output, when the first line is written.
        retry_failed: score the lines without a score again.
        stack: closes the files.

    Attributes:
        lines: number of lines in the output.
        failed: number of these lines without a score.

    Raises:
        ConfigError: the output cannot be written, another process writes it, or it has different settings.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        source: Path | None,
        key: str,
        settings: Mapping[str, Any],
        overwrite: bool,
        retry_failed: bool,
        stack: ExitStack,
    ) -> None:
        self.lines = self.failed = 0
        self._key = key
        self._names_added = [key, *(f"{key}_{suffix}" for suffix in ADDED)]
        self._settings = _plain(settings)
        self._source = source
        self._retry = retry_failed
        self._stack = stack
        self._provenance: Any = None
        self._finished: list[Any] = []
        self._scored = self._continued = self._exhausted = False
        self._kept = hashlib.sha256()  # of the input lines that have a score
        self._file: IO[bytes] | None = None
        self._path = None if is_stream(path) else path
        stored_as, self._compression = ("jsonl", "") if path is None else format_of(path)
        self._stored_as = stored_as or "jsonl"
        packed = (self._stored_as, self._compression) != ("jsonl", "")
        if self._stored_as == "parquet" and self._compression:
            raise ConfigError(f"output is parquet, which has its own compression; got {str(path)!r}.")
        if self._path is not None and self._path.suffix.lower() in OTHER_COMPRESSIONS:
            raise ConfigError(f"output can be compressed only as {' or '.join(COMPRESSIONS)}, got {str(path)!r}.")
        if packed and self._path is None:
            raise ConfigError(f"output {str(path)!r} is a pipe or a device, which gets JSON lines; name it .jsonl.")
        if self._stored_as == "parquet" or self._compression == ".zst":
            import_pyarrow(f"writing {path}")
        if path is None:
            self._file = sys.stdout.buffer
            return
        try:
            self._open(path, packed, overwrite)
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}.") from error

    def _open(self, path: Path, packed: bool, overwrite: bool) -> None:
        if self._path is None:
            self._file = self._stack.enter_context(path.open("wb"))
            return
        self._target = Path(os.path.realpath(path))  # unlike resolve(), without an error of its own for a loop of links
        self._record = self._target.with_name(f"{self._target.name}.settings.json")
        partial = self._target.with_name(f"{self._target.name}.partial")
        self._stack.enter_context(_locked(self._target))
        earlier = self._target.stat().st_size > 0 and not overwrite
        self._continued = partial.exists() and not overwrite
        if earlier or self._continued:
            self._read_record()
        in_partial = packed or self._continued or (self._retry and earlier)
        self._working = partial if in_partial else self._target
        self._earlier = self._target if earlier and in_partial else None
        if self._continued or (earlier and not in_partial):
            self._file = self._stack.enter_context(self._working.open("r+b"))

    def skip_finished(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines that are not in the output yet; remove an incomplete last line of the output."""
        if self._path is None:
            yield from lines
            return
        earlier, in_earlier, kept = self._earlier_lines(), 0, hashlib.sha256()
        for line in lines:
            finished = None
            if (stored := next(earlier, None)) is not None:
                in_earlier += 1
                finished, failed = self._restore(line, stored)
                if not failed:
                    kept.update(line.stem + b"\n")
                elif self._retry:
                    finished = None
            else:
                self._require_same_input(in_earlier, kept.hexdigest())
            if written := self._next_written(line):
                self._count(line, written)
            else:
                yield dataclasses.replace(line, finished=finished)
        if next(earlier, None) is not None or (self._file is not None and self._file.readline()):
            raise ConfigError(f"{self._path} has more lines than the input; start again with --overwrite.")
        self._require_same_input(in_earlier, kept.hexdigest())

    def write(self, lines: Sequence[tuple[Line, Mapping[str, Any]]]) -> None:
        """Append the lines with their added fields, in one write; a line that is finished already keeps its fields."""
        whole = [(line, line.finished or line.with_fields(added)) for line, added in lines]
        file = self._writable()
        file.write(b"".join(text for _, text in whole))
        file.flush()
        self._scored = self._scored or any(line.finished is None for line, _ in whole)
        for line, text in whole:
            self._count(line, text)

    def finish(self) -> None:
        """Replace the output by the finished lines, in the format of its name."""
        self._writable()
        if self._path is None or self._working == self._target:
            return
        if self._earlier is not None and not self._scored and not self._continued:
            self._working.unlink()  # the output was complete
            return
        try:
            new = self._pack()
        except (ValueError, TypeError, OverflowError) as error:  # errors of pyarrow are among them
            raise ConfigError(
                f"the scores cannot be written to {str(self._path)!r}: {error}. They are in {str(self._working)!r}, as "
                "JSON lines."
            ) from error
        self._finished.append({"lines": self.lines, "input": self._kept.hexdigest()})
        self._save_record()
        self._stack.enter_context(_locked(new))  # before another process can open it
        new.replace(self._target)
        del self._finished[:-1]
        self._save_record()
        self._working.unlink(missing_ok=True)

    def check_provenance(self, provenance: Provenance | None) -> None:
        """Raise ConfigError if the earlier lines have a different provenance, for example another model revision."""
        if self._path is None or provenance is None:
            return
        ours = _plain({name: getattr(provenance, name) for name in SAME_SCORES})
        if self._provenance is None:
            self._writable()
            self._provenance = ours
            self._save_record()
        self._require_equal("a different model", self._provenance, ours)

    # --- the working file ------------------------------------------------------------------------------------------

    def _writable(self) -> IO[bytes]:
        """Return the open file at the end of its lines; the first call creates it and removes what it replaces."""
        if self._file is None:
            if self._earlier is None:
                os.truncate(self._target, 0)
                self._target.with_name(f"{self._target.name}.partial").unlink(missing_ok=True)
                self._save_record()
            self._file = self._stack.enter_context(self._working.open("w+b"))
        return self._file

    def _next_written(self, line: Line) -> bytes | None:
        """Return the next line of the working file, or None after its last whole line."""
        if self._file is None or self._exhausted:
            return None
        end = self._file.tell()
        written = self._file.readline()
        if not written.endswith(b"\n"):
            self._file.seek(end)
            self._file.truncate()
            self._exhausted = True
            return None
        if not written.startswith(line.stem + self._begin_added):
            raise self._different_input(self.lines + 1, line)
        return written

    def _count(self, line: Line, text: bytes) -> None:
        failed = self._error_field in text[len(line.stem) :]
        self.lines += 1
        self.failed += failed
        if not failed:
            self._kept.update(line.stem + b"\n")

    # --- an earlier output -----------------------------------------------------------------------------------------

    def _earlier_lines(self) -> Iterator[bytes | Mapping[str, Any]]:
        if self._earlier is None:
            return iter(())
        file = self._stack.enter_context(open_binary(self._earlier))
        if self._stored_as == "jsonl":
            return (line for _, line in read_lines(file, str(self._path)) if line.endswith(b"\n"))
        return (row for _, row in rows_in(file, str(self._path), self._stored_as))

    def _restore(self, line: Line, stored: bytes | Mapping[str, Any]) -> tuple[bytes, bool]:
        """Return a line of an earlier output as JSON, and whether it has no score."""
        error = f"{self._key}_error"
        if isinstance(stored, bytes):
            if stored.startswith(line.stem + self._begin_added):
                return stored, self._error_field in stored[len(line.stem) :]
            if self._retry and error in parse_line(stored, str(self._path)):
                return stored, True  # the line may have been corrected
            raise self._different_input(self.lines + 1, line)
        added: dict[str, Any] = {self._key: None}
        for name in self._names_added:
            value = stored.get(name)
            if value is not None:
                is_json = isinstance(value, str) and name != error
                added[name] = parse_line(value, f"{self._path}, column {name!r}") if is_json else value
        return line.with_fields(added), error in added

    def _require_same_input(self, lines: int, digest: str) -> None:
        """Raise ConfigError if the rows of an earlier output in a format without JSON lines are of another input."""
        if self._earlier is None or self._stored_as == "jsonl":
            return
        if {"lines": lines, "input": digest} not in self._finished:
            raise ConfigError(
                f"{self._path} does not match the input, which has changed. Choose another output, or start again with "
                "--overwrite."
            )

    def _different_input(self, number: int, line: Line) -> ConfigError:
        return ConfigError(
            f"{self._path} line {number} does not match {line.where}: the input has changed. "
            "Choose another output, or start again with --overwrite."
        )

    @property
    def _begin_added(self) -> bytes:
        return f", {json.dumps(self._key)}: ".encode()

    @property
    def _error_field(self) -> bytes:
        return f"{json.dumps(f'{self._key}_error')}: ".encode()

    # --- the settings file -----------------------------------------------------------------------------------------

    def _read_record(self) -> None:
        try:
            record = json.loads(self._record.read_text())
            fields = record if isinstance(record, dict) else {}
            settings, self._provenance = fields.get("settings"), fields.get("provenance")
            self._finished = fields.get("finished", [])
            if not isinstance(settings, dict) or not isinstance(self._provenance, dict | None):
                raise ValueError(f"expected an object with settings, got {show(record)}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._path} exists, but its settings file {self._record.name} cannot be read ({error}). "
                "Choose another output, or start again with --overwrite."
            ) from error
        self._require_equal("different settings", settings, self._settings)

    def _save_record(self) -> None:
        half_written = self._record.with_suffix(".tmp")
        record = {"settings": self._settings, "provenance": self._provenance, "finished": self._finished}
        half_written.write_text(json.dumps(record, indent=2) + "\n")
        half_written.replace(self._record)

    def _require_equal(self, difference: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        different = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if different:
            shown = "; ".join(f"{name}: earlier {theirs.get(name)!r}, now {ours.get(name)!r}" for name in different)
            raise ConfigError(
                f"{self._path} was written with {difference} ({shown}). "
                "Use the earlier values, choose another output, or start again with --overwrite."
            )

    # --- other formats ---------------------------------------------------------------------------------------------

    def _pack(self) -> Path:
        """Write the finished lines in the format of the output's name to a new file, and return its path."""
        if (self._stored_as, self._compression) == ("jsonl", ""):
            return self._working
        new = self._target.with_name(f"{self._target.name}.new")
        with new.open("wb") as stored, self._working.open("rb") as lines:
            if self._stored_as == "parquet":
                write_parquet(lines, stored, self._source, self._names_added)
                return new
            with compressed(stored, new.with_suffix("")) as file:
                match self._stored_as:
                    case "csv":
                        write_csv(lines, file, self._names_added)
                    case "json":
                        write_json(lines, file)
                    case _:
                        shutil.copyfileobj(lines, file)
        return new


def _locked(path: Path) -> IO[bytes]:
    """Open a file, which is created if it does not exist, and lock it until it is closed or the process ends.

    Raises:
        ConfigError: another process has the lock.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(
                f"another process is writing {str(path)!r}; wait until it has finished, stop it, or choose another "
                "output."
            ) from error
        except OSError as error:
            warn_once(f"{str(path)!r} cannot be locked ({error.strerror}): do not write it with two commands at once.")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # another process has replaced the file since it was opened


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values to JSON and back, so that they can be compared with values from a file."""
    return cast(dict[str, Any], json.loads(json.dumps(values, default=str)))
