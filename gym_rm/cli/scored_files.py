"""Score a JSON Lines file: every line comes out again, in order, with its scores; a stopped run can go on.

What makes that simple: an output line is the input line, byte for byte, with fields added before its last brace. So
the lines that an earlier run finished are recognised by how they begin.
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
from gym_rm.scores import Provenance, Scores

ADDED = ("components", "turns", "truncated_tokens", "error", "provenance")
# What of a provenance must stay the same for two parts of one output to belong together.
SAME_SCORES = ("scorer", "model", "revision", "template_hash", "dtype", "settings")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    Attributes:
        where: its file and number.
        stem: the output line up to the added fields.
        row: what is to be scored; None where the line cannot be scored.
        error: why it cannot.
    """

    where: str
    stem: bytes
    row: RowToScore | None = None
    error: str | None = None

    @property
    def labels(self) -> Labels:
        """How the scores are written."""
        return None if self.row is None else self.row.labels

    def __len__(self) -> int:
        """Conversations."""
        return 0 if self.row is None else len(self.row.conversations)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        lines: lines in the output.
        resumed: how many of them an earlier run wrote.
        failed: how many lack a score.
        num_tokens: tokens that this run scored.
        bytes_read: how much of the input was read, as it is stored; 0 where it comes through a pipe.
        seconds: since the scorer was made.
    """

    lines: int = 0
    resumed: int = 0
    failed: int = 0
    num_tokens: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FileScoring:
    """One run over a file.

    Attributes:
        make_scorer: called once, when there is something to score.
        source: a `.jsonl` or `.jsonl.gz` file; None for standard input.
        output: the file to write, continued where an earlier run stopped; None for standard output. A pipe or a device
            is written like standard output: from the beginning, with no settings beside it.
        settings: what decides the scores; an output that was begun with others is refused.
        overwrite: begin anew where `output` exists.
        turns: score the last turn only, or every assistant turn as well.
        key: name of the added field, and beginning of the names of the others (`key` + `_` + one of `ADDED`).
        on_error: at a line without a score: stop there, or write the reason in its place and go on.
        batch_size: conversations in one call of the scorer; a line is never divided.
        provenance: write what made the score into every line.
        report: called after every batch.
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
        """Score what is not scored yet.

        Raises:
            ConfigError: a line without a score (`on_error="stop"`), an output of another run, an unusable file.
            GymRMError: what the scorer raises for a whole batch. The finished lines are in the output then, too.
        """
        name = str(self.source) if self.source else "standard input"
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.source and self.output and self.output.exists() and self.output.samefile(self.source):
            raise ConfigError(f"the output {str(self.output)!r} is the input; choose another file.")
        if self.output and self.output.is_dir():
            raise ConfigError(f"cannot write {str(self.output)!r}: it is a folder; name a file in it.")
        if self.output and self.output.suffix == ".gz":
            raise ConfigError(f"the output {str(self.output)!r} is written plain; choose a name without .gz.")
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
                "turns='all' needs a scorer that reads every turn, as a single reward model does; "
                f"{type(scorer).__name__} scores whole conversations only: use turns='last'."
            )
        return scorer

    def _score_batch(self, scorer: Scorer, batch: list[Line], output: _Output) -> tuple[int, str | None]:
        """Score and write the lines; the tokens scored, and why to stop after them."""
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
        """The fields that a line gains."""
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
    """The file as it is stored, whose position is the progress, and the file to read lines from."""
    if source is None:
        return sys.stdin.buffer, sys.stdin.buffer
    try:
        stored = stack.enter_context(source.open("rb"))
    except OSError as error:
        raise ConfigError(f"cannot read {str(source)!r}: {error.strerror}.") from error
    return stored, cast(IO[bytes], gzip.GzipFile(fileobj=stored)) if source.suffix == ".gz" else stored


def _read_line(raw: bytes, where: str, number: int, key: str) -> Line:
    text = raw.strip()
    # A line that is not a row comes out as a row that holds it.
    stem = json.dumps({"line": text.decode(errors="replace")}).encode()[:-1]
    try:
        row = parse_line(text, where)
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected a JSON object, got {show(row)}.")
        for name in (key, *(f"{key}_{suffix}" for suffix in ADDED)):
            if name in row:
                raise ConfigError(f"{where}: the field {name!r} is there already; choose another name with --key.")
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
    """Whether an output cannot be read again: standard output (None), a pipe, a device."""
    return output is None or (output.exists() and not output.is_file())


class _Output:
    """The output, with a file beside it that says how it was made; a stream has neither that nor a beginning to read.

    Attributes:
        lines: how many lines it holds.
        failed: how many of them lack a score.
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
        """The lines that are not in the output yet; cuts off a last line that was only half written."""
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
                    f"{self._path} line {self.lines + 1} is not the scored {line.where}: the input has changed since. "
                    "Choose another output, or begin anew with --overwrite."
                )
            self.lines += 1
            self.failed += f'"{self._key}_error": '.encode() in finished[len(line.stem) :]
        if self._file.readline():
            raise ConfigError(f"{self._path} has more lines than the input; begin anew with --overwrite.")
        return iter(())

    def write(self, finished: Sequence[tuple[Line, Mapping[str, Any]]]) -> None:
        """Append lines with the fields that they gain, all at once."""
        self._file.write(
            b"".join(
                line.stem + b", " + json.dumps(added, default=str).encode()[1:] + b"\n" for line, added in finished
            )
        )
        self._file.flush()
        self.lines += len(finished)
        self.failed += sum(f"{self._key}_error" in added for _, added in finished)

    def check_provenance(self, provenance: Provenance | None) -> None:
        """The same name may hold other weights today: what made the earlier lines must be what makes the next."""
        if self._path is None or provenance is None:
            return
        ours = _plain({name: getattr(provenance, name) for name in SAME_SCORES})
        if self._provenance is None:
            self._provenance = ours
            self._save_record()
        self._refuse_other("model", self._provenance, ours)

    @property
    def _begin_added(self) -> bytes:
        return f", {json.dumps(self._key)}: ".encode()

    def _read_record(self) -> None:
        try:
            record = json.loads(self._record.read_text())
            fields = record if isinstance(record, dict) else {}
            settings, self._provenance = fields.get("settings"), fields.get("provenance")
            if not isinstance(settings, dict) or not isinstance(self._provenance, dict | None):
                raise ValueError(f"it holds {show(record)}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._path} exists, but {self._record.name} beside it, which says how it was made, cannot be read "
                f"({error}). Choose another output, or begin anew with --overwrite."
            ) from error
        self._refuse_other("settings", settings, self._settings)

    def _save_record(self) -> None:
        half_written = self._record.with_suffix(".tmp")
        record = {"settings": self._settings, "provenance": self._provenance}
        half_written.write_text(json.dumps(record, indent=2) + "\n")
        half_written.replace(self._record)

    def _refuse_other(self, what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        different = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if different:
            shown = "; ".join(f"{name}: {theirs.get(name)!r} then, {ours.get(name)!r} now" for name in different)
            raise ConfigError(
                f"{self._path} was begun with another {what} ({shown}). "
                "Use the same, choose another output, or begin anew with --overwrite."
            )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON makes of the values, so that they compare equal with what a file held."""
    return cast(dict[str, Any], json.loads(json.dumps(values, default=str)))


def _reason(labels: Labels, errors: Sequence[str | None]) -> str | None:
    names = [""] if labels is None else [f"{label}: " for label in labels]
    return "; ".join(f"{name}{error}" for name, error in zip(names, errors, strict=True) if error) or None


def _shaped(labels: Labels, values: Iterable[Any]) -> Any:
    if labels is None:
        return next(iter(values))
    return dict(zip(labels, values, strict=True)) if isinstance(labels[0], str) else list(values)


def _number(value: np.float32) -> float | None:
    """The shortest decimal that reads back as the same float32."""
    return float(str(value)) if np.isfinite(value) else None
