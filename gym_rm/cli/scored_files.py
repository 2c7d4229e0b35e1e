"""Score a JSON Lines file: write every line with its scores, in the same order. A stopped run can be continued.

An output line is the input line, byte for byte, with fields added before its last brace. Therefore the lines that an
earlier run finished are recognised by their first bytes.
"""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from gym_rm.data.rows import parse_line, read_lines, show
from gym_rm.data.scored_rows import Labels, RowToScore, row_to_score
from gym_rm.errors import ConfigError
from gym_rm.scorer import Scorer, try_score
from gym_rm.scores import Scores
from gym_rm.types import Provenance

ADDED = ("components", "turns", "truncated_tokens", "error", "provenance")
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
    """

    where: str
    stem: bytes
    row: RowToScore | None = None
    error: str | None = None

    @property
    def labels(self) -> Labels:
        """Labels of the scores in the output line."""
        return None if self.row is None else self.row.labels

    def __len__(self) -> int:
        """Return the number of conversations."""
        return 0 if self.row is None else len(self.row.conversations)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        lines: number of lines in the output.
        resumed: number of these lines from an earlier run.
        failed: number of these lines without a score.
        num_tokens: number of tokens scored in this run.
        bytes_read: number of bytes read from the stored input; 0 for a pipe.
        seconds: seconds since the scorer was created.
    """

    lines: int = 0
    resumed: int = 0
    failed: int = 0
    num_tokens: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FileScoring:
    """One scoring run over a file.

    Attributes:
        make_scorer: creates the scorer; called once, if there is a line to score.
        source: a `.jsonl` or `.jsonl.gz` file; None for standard input.
        output: file to write, or to continue if an earlier run stopped; None for standard output. A pipe or a device
            is written from the start, without a settings file.
        settings: settings that affect the scores; an existing output must have the same settings.
        overwrite: replace an existing output.
        turns: `"last"` scores only the last turn, `"all"` also every assistant turn.
        key: name of the added field. The other added fields are named `key` + `_` + one of `ADDED`.
        on_error: if a line has no score, `"stop"` ends the run, and `"skip"` writes the error and continues.
        batch_size: number of conversations in one call of the scorer; a line is never split.
        provenance: whether to add the provenance of the score to every line.
        report: called with the progress after every batch.
    """

    make_scorer: Callable[[], Scorer]
    source: Path | None
    output: Path | None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overwrite: bool = False
    turns: Literal["last", "all"] = "last"
    key: str = "score"
    on_error: Literal["stop", "skip"] = "stop"
    batch_size: int = 128
    provenance: bool = False
    report: Callable[[Progress], None] = lambda progress: None

    def run(self) -> Progress:
        """Score the lines that are not in the output yet.

        Raises:
            ConfigError: a line has no score (`on_error="stop"`), the output is from a different run, or a file is
                invalid.
            GymRMError: the scorer failed for a whole batch. The output contains the lines that were finished before.
        """
        name = str(self.source) if self.source else "standard input"
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.source and self.output and self.output.exists() and self.output.samefile(self.source):
            raise ConfigError(f"output must not be the input {str(self.output)!r}; choose another file.")
        if self.output and self.output.is_dir():
            raise ConfigError(f"output must be a file, got the folder {str(self.output)!r}.")
        if self.output and self.output.suffix == ".gz":
            raise ConfigError(f"output is not compressed; choose a name without .gz, got {str(self.output)!r}.")
        with ExitStack() as stack:
            stored, file = _open_source(self.source, stack)
            output = _Output(self.output, self.key, self.settings, self.overwrite, stack)
            numbered = read_lines(file, name)
            lines = output.skip_finished(_read_line(raw, f"{name} line {n}", n, self.key) for n, raw in numbered)
            progress = Progress(lines=output.lines, resumed=output.lines, failed=output.failed)
            self.report(progress)
            scorer = None
            for batch in _batches(lines, self.batch_size):
                if scorer is None:
                    scorer = self._make_scorer()
                    began = time.perf_counter()
                num_tokens, stopped = self._score_batch(scorer, batch, output)
                progress = dataclasses.replace(
                    progress,
                    lines=output.lines,
                    failed=output.failed,
                    num_tokens=progress.num_tokens + num_tokens,
                    bytes_read=stored.tell() if stored.seekable() else 0,
                    seconds=time.perf_counter() - began,
                )
                self.report(progress)
                if stopped is not None:
                    raise ConfigError(stopped)
        return progress

    def _make_scorer(self) -> Scorer:
        scorer = self.make_scorer()
        taken = inspect.signature(scorer.score).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        if self.turns == "all" and "turns" not in taken and not anything:
            raise ConfigError(
                "turns='all' needs a scorer that scores every turn, for example a single reward model; "
                f"{type(scorer).__name__} scores only whole conversations. Use turns='last'."
            )
        return scorer

    def _score_batch(self, scorer: Scorer, batch: list[Line], output: _Output) -> tuple[int, str | None]:
        """Score and write the lines; return the number of scored tokens and the reason to stop, or None."""
        stopped = None
        if (
            self.on_error == "stop"
            and (bad := next((i for i, line in enumerate(batch) if line.error), None)) is not None
        ):
            stopped, batch = batch[bad].error, batch[:bad]
        scores = self._score(scorer, batch)
        output.check_provenance(scores.provenance)
        finished = []
        row = 0
        for line in batch:
            rows = slice(row, row + len(line))
            row = rows.stop
            reason = line.error or _reason(line.labels, scores.errors[rows])
            if reason and self.on_error == "stop":
                stopped = f"{line.where}: {reason}"
                break
            finished.append((line, self._added(line.labels, scores, rows, reason)))
        output.write(finished)
        return int(scores.num_tokens[:row].sum()), stopped

    def _score(self, scorer: Scorer, batch: list[Line]) -> Scores:
        rows = [line.row for line in batch if line.row is not None]
        conversations = [conversation for row in rows for conversation in row.conversations]
        prompts = [row.prompt for row in rows for _ in row.conversations]
        if not conversations:
            return Scores.from_rewards([])
        options: dict[str, Any] = {"turns": "all"} if self.turns == "all" else {}
        try:
            return try_score(scorer, conversations, prompts, **options)
        except Exception as error:
            error.add_note(f"while scoring {batch[0].where} to {batch[-1].where}")
            raise

    def _added(self, labels: Labels, scores: Scores, rows: slice, reason: str | None) -> dict[str, Any]:
        """Return the fields to add to a line."""
        if rows.start == rows.stop:
            return {self.key: None, f"{self.key}_error": reason}
        added = {self.key: _shaped(labels, map(_number, scores.rewards[rows]))}
        if scores.components:
            added[f"{self.key}_components"] = {
                name: _shaped(labels, map(_number, values[rows])) for name, values in scores.components.items()
            }
        if scores.turn_rewards is not None:
            per_turn = ([_number(value) for value in values] for values in scores.turn_rewards[rows])
            added[f"{self.key}_turns"] = _shaped(labels, per_turn)
        if scores.truncated_tokens[rows].any():
            added[f"{self.key}_truncated_tokens"] = _shaped(labels, scores.truncated_tokens[rows].tolist())
        if reason:
            added[f"{self.key}_error"] = reason
        if self.provenance and scores.provenance is not None:
            added[f"{self.key}_provenance"] = dataclasses.asdict(scores.provenance)
        return added


# --- reading -----------------------------------------------------------------------------------------------------


def _open_source(source: Path | None, stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return the stored file, whose position is the progress, and the file to read lines from."""
    if source is None:
        return sys.stdin.buffer, sys.stdin.buffer
    try:
        stored = stack.enter_context(source.open("rb"))
    except OSError as error:
        raise ConfigError(f"cannot read {str(source)!r}: {error.strerror}.") from error
    return stored, cast(IO[bytes], gzip.GzipFile(fileobj=stored)) if source.suffix == ".gz" else stored


def _read_line(raw: bytes, where: str, number: int, key: str) -> Line:
    text = raw.strip()
    # An invalid line is written as an object with the line in its field `line`.
    stem = json.dumps({"line": text.decode(errors="replace")}).encode()[:-1]
    try:
        row = parse_line(text, where)
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected a JSON object, got {show(row)}.")
        for name in (key, *(f"{key}_{suffix}" for suffix in ADDED)):
            if name in row:
                raise ConfigError(f"{where}: the field {name!r} already exists; choose another name with --key.")
        if row:
            stem = text[:-1].rstrip()
        return Line(where, stem, row_to_score(row, where, number))
    except ConfigError as error:
        return Line(where, stem, error=str(error))


def _batches(lines: Iterable[Line], batch_size: int) -> Iterator[list[Line]]:
    batch: list[Line] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += max(len(line), 1)
        if size >= batch_size:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- writing -----------------------------------------------------------------------------------------------------


def is_stream(output: Path | None) -> bool:
    """Return whether an output cannot be read again: standard output (None), a pipe or a device."""
    return output is None or (output.exists() and not output.is_file())


class _Output:
    """The output and its settings file. A stream has no settings file and cannot be continued.

    Attributes:
        lines: number of lines in the output.
        failed: number of these lines without a score.
    """

    def __init__(
        self, path: Path | None, key: str, settings: Mapping[str, Any], overwrite: bool, stack: ExitStack
    ) -> None:
        self.lines = self.failed = 0
        self._path = None if is_stream(path) else path
        self._key = key
        self._settings = _plain(settings)
        self._provenance: Any = None
        if path is None:
            self._file: IO[bytes] = sys.stdout.buffer
            return
        self._record = path.with_name(f"{path.name}.settings.json")
        try:
            if self._path is None:
                self._file = stack.enter_context(path.open("wb"))
            elif overwrite or not path.exists() or not path.stat().st_size:
                self._file = stack.enter_context(path.open("w+b"))
                self._save_record()
            else:
                self._read_record()
                self._file = stack.enter_context(path.open("r+b"))
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}.") from error

    def skip_finished(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Return the lines that are not in the output yet; remove an incomplete last line of the output."""
        if self._path is None:
            return lines
        for line in lines:
            end = self._file.tell()
            finished = self._file.readline()
            if not finished.endswith(b"\n"):
                self._file.seek(end)
                self._file.truncate()
                return itertools.chain([line], lines)
            if not finished.startswith(line.stem + self._begin_added):
                raise ConfigError(
                    f"{self._path} line {self.lines + 1} does not match {line.where}: the input has changed. "
                    "Choose another output, or start again with --overwrite."
                )
            self.lines += 1
            self.failed += f"{json.dumps(f'{self._key}_error')}: ".encode() in finished[len(line.stem) :]
        if self._file.readline():
            raise ConfigError(f"{self._path} has more lines than the input; start again with --overwrite.")
        return iter(())

    def write(self, finished: Sequence[tuple[Line, Mapping[str, Any]]]) -> None:
        """Append the lines with their added fields, in one write."""
        self._file.write(
            b"".join(
                line.stem + b", " + json.dumps(added, default=str).encode()[1:] + b"\n" for line, added in finished
            )
        )
        self._file.flush()
        self.lines += len(finished)
        self.failed += sum(f"{self._key}_error" in added for _, added in finished)

    def check_provenance(self, provenance: Provenance | None) -> None:
        """Raise ConfigError if the earlier lines have a different provenance, for example another model revision."""
        if self._path is None or provenance is None:
            return
        ours = _plain({name: getattr(provenance, name) for name in SAME_SCORES})
        if self._provenance is None:
            self._provenance = ours
            self._save_record()
        self._require_equal("a different model", self._provenance, ours)

    @property
    def _begin_added(self) -> bytes:
        return f", {json.dumps(self._key)}: ".encode()

    def _read_record(self) -> None:
        try:
            record = json.loads(self._record.read_text())
            fields = record if isinstance(record, dict) else {}
            settings, self._provenance = fields.get("settings"), fields.get("provenance")
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
        record = {"settings": self._settings, "provenance": self._provenance}
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


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values to JSON and back, so that they can be compared with values from a file."""
    return cast(dict[str, Any], json.loads(json.dumps(values, default=str)))


def _reason(labels: Labels, errors: Sequence[str | None]) -> str | None:
    names = [""] if labels is None else [f"{label}: " for label in labels]
    return "; ".join(f"{name}{error}" for name, error in zip(names, errors, strict=True) if error) or None


def _shaped(labels: Labels, values: Iterable[Any]) -> Any:
    if labels is None:
        return next(iter(values))
    return dict(zip(labels, values, strict=True)) if isinstance(labels[0], str) else list(values)


def _number(value: np.float32) -> float | None:
    """Return the shortest decimal that reads back as the same float32, or None if the value is not finite."""
    return float(str(value)) if np.isfinite(value) else None
