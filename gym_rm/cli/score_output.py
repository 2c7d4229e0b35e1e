"""Outputs of `gym-rm score`: lines that are written at once, or files that are made from the stored scores."""

from __future__ import annotations

import csv
import dataclasses
import filecmp
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from gym_rm.data.rows import columns_of, format_of, import_pyarrow
from gym_rm.errors import ConfigError
from gym_rm.evaluation.score_store import ScoreStore
from gym_rm.plain_values import to_plain
from gym_rm.scores import Scores

WithFields: TypeAlias = Callable[[Mapping[str, Any]], bytes]
"""A function that returns a line of the input with added fields."""

Lines: TypeAlias = Callable[[], Iterator[bytes]]
"""A function that returns the output lines from the first one."""


def added_names(key: str) -> list[str]:
    """Return the names of all fields that may be added to a row."""
    suffixes = ("components", "turns", "steps", "step_ends", "truncated_tokens", "error")
    return [key, *(f"{key}_{suffix}" for suffix in suffixes)]


@dataclasses.dataclass(frozen=True)
class StreamOutput:
    """Standard output: every line is written as soon as it has its scores."""

    file: IO[bytes]

    def finished(self, digest: str) -> None:
        """Return None: a stream has no earlier lines."""

    def write(self, lines: Iterable[tuple[str, WithFields, Mapping[str, Any]]], scores: Scores) -> None:
        """Write the lines."""
        self.file.write(b"".join(with_fields(added) for _, with_fields, added in lines))
        self.file.flush()


class FileOutput:
    """A file, made at the end of a run from the input and the scores, which are stored in `OUTPUT.scores`.

    The file of scores is only appended to: a run that was stopped is resumed from it, and rows that the input has more
    are added. Its first line has the settings and the provenance of the scores.

    Args:
        path: file to write: JSON lines, CSV or Parquet.
        source: the input; None for standard input.
        key: name of the added field.
        settings: settings that affect the scores; stored scores must have the same settings.
        overwrite: make all scores again, and replace the output.

    Attributes:
        model_is_known: whether `require_model` has compared the provenance of stored scores.

    Raises:
        ConfigError: the output cannot be written, another process writes it, or it is of another run.
    """

    def __init__(
        self, path: Path, source: Path | None, key: str, settings: Mapping[str, Any], *, overwrite: bool
    ) -> None:
        self._path, scores, self._new_path = working_files(path)
        self._source, self._key = source, key
        self._settings = to_plain({"input": source.name if source else "-", **settings})
        self.store = ScoreStore(scores)
        self._new = overwrite or self.store.header is None
        self.model_is_known = False
        if self._new and not overwrite and path.exists() and path.stat().st_size > 0:
            raise ConfigError(
                f"{path} exists, but the file with its scores, {path.name}.scores, does not. "
                "Choose another output, or start again with --overwrite."
            )
        if not self._new:
            self._require_equal("different settings", self._stored("settings"), self._settings)
        try:
            with self._path.open("ab"):
                pass  # a folder that cannot be written is an error before anything is scored
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}.") from error
        self.store.lock()
        self._finished = {} if self._new else dict(self.store.entries)

    def finished(self, digest: str) -> Mapping[str, Any] | None:
        """Return what an earlier run added to a line; None if it is to be scored, also because it has no score."""
        entry = self._finished.get(digest)
        return None if entry is None or f"{self._key}_error" in entry else entry

    def write(self, lines: Iterable[tuple[str, WithFields, Mapping[str, Any]]], scores: Scores) -> None:
        """Store the added fields, which are of these scores; the first call replaces what `overwrite` gives up.

        Raises:
            ConfigError: earlier scores have another provenance, for example another revision of the model.
        """
        if self._new:
            self.store.start({"settings": self._settings, "provenance": None})
            self._new = False
        if len(scores):
            self.require_model(scores)
        self.store.add({digest: added for digest, _, added in lines})

    def require_model(self, scores: Scores) -> None:
        """Raise ConfigError if the stored scores have another provenance than these; the first scores set it."""
        ours = {} if scores.provenance is None else to_plain(scores.provenance.identity)
        theirs = self._stored("provenance")
        if theirs is None:
            self.store.start({"settings": self._settings, "provenance": ours}, self.store.entries)
        else:
            self._require_equal("a different model", theirs, ours)
        self.model_is_known = True

    def finish(self, lines: Callable[[], Iterable[tuple[str, WithFields]]], size: int) -> None:
        """Write the file of `size` lines in the format of its name, beside its place, and move it there."""
        if self._new:
            self.store.start({"settings": self._settings, "provenance": None})

        def scored() -> Iterator[bytes]:
            changed = ConfigError("the input changed while it was read; repeat the command when nothing writes to it.")
            written = 0
            for digest, with_fields in lines():
                if digest not in self.store.entries:
                    raise changed
                written += 1
                yield with_fields(self.store.entries[digest])
            if written != size:
                raise changed

        try:
            with self._new_path.open("wb") as file:
                self._write_rows(scored, file)
            if not filecmp.cmp(self._new_path, self._path, shallow=False):
                self._new_path.replace(self._path)
        except ConfigError:
            raise
        except (ValueError, TypeError, OverflowError, NotImplementedError) as error:  # those of pyarrow are among them
            raise ConfigError(
                f"the scores cannot be written to {str(self._path)!r}: {error}. They are in {str(self.store.path)!r}; "
                "choose an output that ends in .jsonl."
            ) from error
        finally:
            self._new_path.unlink(missing_ok=True)

    def _write_rows(self, lines: Lines, file: IO[bytes]) -> None:
        stored_as, names = format_of(self._path)[0], added_names(self._key)
        if stored_as == "parquet":
            write_parquet(lines, file, self._source, names)
        elif stored_as == "csv":
            write_csv(lines, file, self._source, names)
        else:
            file.writelines(lines())

    def _stored(self, name: str) -> Any:
        """Return the settings or the provenance of the stored scores; the provenance is None before the first score."""
        values = (self.store.header or {}).get(name)
        if not isinstance(values, dict) and (name == "settings" or values is not None):
            raise ConfigError(
                f"{str(self.store.path)!r} is not a file of scores of gym-rm score: its first line has no {name}. "
                "Choose another output, or start again with --overwrite."
            )
        return values

    def _require_equal(self, difference: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        different = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if different:
            shown = "; ".join(f"{name}: earlier {theirs.get(name)!r}, now {ours.get(name)!r}" for name in different)
            raise ConfigError(
                f"{self._path} was written with {difference} ({shown}). "
                "Use the earlier values, choose another output, or start again with --overwrite."
            )


def write_csv(lines: Lines, file: IO[bytes], source: Path | None, added: Sequence[str]) -> None:
    """Write a CSV file with the columns of the source and all fields (the `added` ones last)."""
    columns = _columns(map(json.loads, lines()), source, added)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in map(json.loads, lines()))
    text.flush()
    text.detach()


def write_parquet(lines: Lines, file: IO[bytes], source: Path | None, added: Sequence[str]) -> None:
    """Write one row per line. The columns of a parquet `source` keep their types, and the `added` ones are appended."""
    pyarrow = import_pyarrow("writing parquet")
    rows = [json.loads(line) for line in lines()]
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


def working_files(path: Path) -> tuple[Path, Path, Path]:
    """Return the file behind an output, which may be a link, its scores, and what it is while it is written."""
    path = Path(os.path.realpath(path))  # the lock is of the file, not of a link to it
    return path, path.with_name(f"{path.name}.scores"), path.with_name(f"{path.name}.new")


def check_output(path: Path) -> None:
    """Raise ConfigError for an output in another format, or one that is no file, before anything is scored."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"output must be a file, or - for standard output, got {str(path)!r}.")
    stored_as, compression = format_of(path)
    if compression or stored_as not in ("jsonl", "csv", "parquet"):
        raise ConfigError(f"output must end in .jsonl, .csv or .parquet, got {str(path)!r}.")
    if stored_as == "parquet":
        import_pyarrow(f"writing {path}")


def _cell(value: Any) -> str:
    if value is None or value != value or isinstance(value, str):  # NaN is a missing value
        return value if isinstance(value, str) else ""
    return json.dumps(value, ensure_ascii=False)
