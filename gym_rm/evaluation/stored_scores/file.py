"""Scores of the rows of a file: what is missing is scored, and added to the rows in a file or to standard output."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from gym_rm.checks import keep_inputs
from gym_rm.data.columns import with_columns
from gym_rm.data.rows import decompressed, format_of, parse_line, present, read_lines, rows_or_errors_in, show
from gym_rm.data.scored_rows import Labels, RowToScore, row_to_score
from gym_rm.errors import ConfigError
from gym_rm.evaluation.stored_scores.output import FileOutput, InputLine, StreamOutput, added_names, working_files
from gym_rm.scorer import Scorer, provenance_of, try_score
from gym_rm.scores import Scores

LINES_AT_ONCE = 10_000  # finished lines are passed over in batches of at most this many lines


@dataclass(frozen=True, slots=True)
class ScoringProgress:
    """Numbers of lines in the output, and of those without a score."""

    lines: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class FileScoring:
    """One scoring run over a file.

    Attributes:
        make_scorer: creates the scorer; called once, if there is a line to score, or a score of an earlier run.
        source: a JSON Lines, JSON, CSV or Parquet file, by its name; None for standard input, which has JSON lines.
        output: file to write in the format of its name, see `FileOutput`; None for JSON lines to standard output.
        settings: settings that affect the scores; stored scores must have the same settings.
        overwrite: make all scores again, and replace an existing output.
        columns: see `with_columns`.
        read: returns the conversations of a row, see `row_to_score`.
        folders: whether the source may be a folder, all of whose .jsonl and .parquet files are read.
        turns: `"last"` scores only the last turn, `"all"` also every assistant turn.
        key: name of the added field, and prefix of the others.
        on_error: if a line has no score, `"stop"` ends the run, and `"skip"` writes the error and continues.
        batch_size: number of conversations in one call of the scorer; a line is never split.
        report: called with the progress before and after every batch.
    """

    make_scorer: Callable[[], Scorer]
    source: Path | None
    output: Path | None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overwrite: bool = False
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read: Callable[[Mapping[str, Any], str, int], RowToScore] = row_to_score
    folders: bool = False
    turns: Literal["last", "all"] = "last"
    key: str = "score"
    on_error: Literal["stop", "skip"] = "stop"
    batch_size: int = 128
    report: Callable[[ScoringProgress], None] = lambda progress: None

    def run(self) -> ScoringProgress:
        """Score the lines that are not in the output yet.

        Raises:
            ConfigError: a line has no score (`on_error="stop"`), the output is from a different run, or a file is
                invalid.
            GymRMError: the scorer failed for a whole batch. The lines that were finished before are stored.
        """
        with ExitStack() as stack:
            lines = self._lines(stack)
            output = self._open_output(stack)
            load = functools.cache(self._load_scorer)
            progress, num_scored, stems = ScoringProgress(), 0, list[bytes]()
            for batch in self._batches(lines, output):
                self.report(progress)
                entries = [(line, output.finished(line)) for line in batch]
                earlier = [fields for _, fields in entries if fields is not None]
                new = [line for line, fields in entries if fields is None]
                written, stopped = self._score_batch(load, new, output)
                if self.output is not None:
                    stems += [line.stem for line in batch]
                num_scored += sum(map(len, new))
                failed = sum(f"{self.key}_error" in fields for fields in (*earlier, *written))
                progress = ScoringProgress(progress.lines + len(earlier) + len(written), progress.failed + failed)
                self.report(progress)
                if stopped is not None:
                    raise ConfigError(stopped)
            if not num_scored and progress.lines > progress.failed:  # every score is of an earlier run
                output.check_model(provenance_of(load()))
            output.finish(stems)
        return progress

    def _open_output(self, stack: ExitStack) -> StreamOutput | FileOutput:
        written = ["/dev/stdout"] if self.output is None else working_files(self.output)
        keep_inputs([self.source or "/dev/stdin", self.settings], written)
        if self.output is None:
            return StreamOutput(sys.stdout.buffer)
        output = FileOutput(self.output, self.source, self.key, self.settings, overwrite=self.overwrite)
        stack.callback(output.store.close)
        return output

    def _load_scorer(self) -> Scorer:
        scorer = self.make_scorer()
        parameters = inspect.signature(scorer.score).parameters
        any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if self.turns == "all" and "turns" not in parameters and not any_keyword:
            raise ConfigError(
                "turns='all' needs a scorer that scores every turn, for example a single reward model; "
                f"{type(scorer).__name__} scores only whole conversations. Use turns='last'."
            )
        return scorer

    def _batches(self, lines: Iterable[InputLine], output: StreamOutput | FileOutput) -> Iterator[list[InputLine]]:
        """Yield lines with about `batch_size` conversations that are still to be scored."""
        batch: list[InputLine] = []
        size = 0
        for line in lines:
            batch.append(line)
            size += 0 if output.finished(line) is not None else max(len(line), 1)
            if size >= self.batch_size or len(batch) >= max(LINES_AT_ONCE, self.batch_size):
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _score_batch(
        self, load: Callable[[], Scorer], lines: list[InputLine], output: StreamOutput | FileOutput
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Score and write lines; return the fields that were added, and why to stop, or None."""
        stopped = None
        if self.on_error == "stop":
            bad = next((i for i, line in enumerate(lines) if line.error), None)
            if bad is not None:
                stopped, lines = lines[bad].error, lines[:bad]
        scores = self._score(load, lines)
        written: list[tuple[InputLine, dict[str, Any]]] = []
        start = 0
        for line in lines:
            rows = slice(start, start := start + len(line))
            labels = None if line.row is None else line.row.labels
            reason = line.error or _reason(labels, scores.errors[rows])
            if reason and self.on_error == "stop":
                stopped = f"{line.where}: {reason}"
                break
            written.append((line, self._added(labels, scores, rows, reason)))
        if written:
            if len(scores):
                output.check_model(scores.provenance)
            output.write(written)
        return [added for _, added in written], stopped

    def _score(self, load: Callable[[], Scorer], lines: Sequence[InputLine]) -> Scores:
        rows = [line.row for line in lines if line.row is not None]
        conversations = [conversation for row in rows for conversation in row.conversations]
        prompts = [row.prompt for row in rows for _ in row.conversations]
        if not conversations:
            return Scores.from_rewards([])
        options: dict[str, Any] = {"turns": "all"} if self.turns == "all" else {}
        scorer = load()
        try:
            return try_score(scorer, conversations, prompts, **options)
        except Exception as error:
            error.add_note(f"while scoring {lines[0].where} to {lines[-1].where}")
            raise

    def _added(self, labels: Labels, scores: Scores, rows: slice, reason: str | None) -> dict[str, Any]:
        if rows.start == rows.stop:
            return {self.key: None, f"{self.key}_error": reason}
        added = {self.key: _shaped(labels, map(_number, scores.rewards[rows]))}
        if scores.components:
            added[f"{self.key}_components"] = {
                name: _shaped(labels, map(_number, values[rows])) for name, values in scores.components.items()
            }
        for name, column in (("turns", scores.turn_rewards), ("steps", scores.step_rewards)):
            if column is not None:
                added[f"{self.key}_{name}"] = _shaped(labels, ([*map(_number, values)] for values in column[rows]))
        if scores.step_ends is not None:
            added[f"{self.key}_step_ends"] = _shaped(labels, (ends.tolist() for ends in scores.step_ends[rows]))
        if scores.truncated_tokens[rows].any():
            added[f"{self.key}_truncated_tokens"] = _shaped(labels, scores.truncated_tokens[rows].tolist())
        if reason:
            added[f"{self.key}_error"] = reason
        return added

    def _lines(self, stack: ExitStack) -> Iterator[InputLine]:
        """Open the input, and return its lines."""
        name = str(self.source) if self.source else "standard input"
        if self.source is None:
            return self._json_lines(sys.stdin.buffer, name)
        if self.folders and self.source.is_dir():
            return self._folder_lines(self.source)
        try:
            stored = stack.enter_context(self.source.open("rb"))
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}.") from error
        file = stack.enter_context(decompressed(stored, self.source))
        stored_as = format_of(self.source)[0] or "jsonl"
        return self._json_lines(file, name) if stored_as == "jsonl" else self._table_lines(file, name, stored_as)

    def _folder_lines(self, folder: Path) -> Iterator[InputLine]:
        found = [each for each in folder.iterdir() if each.suffix in (".jsonl", ".parquet")]
        if not found:
            raise ConfigError(f"the folder {str(folder)!r} has no .jsonl and no .parquet file.")
        for file in sorted(found, key=lambda each: (len(each.name), each.name)):  # 9.jsonl before 10.jsonl
            with ExitStack() as stack:
                yield from dataclasses.replace(self, source=file)._lines(stack)

    def _json_lines(self, file: IO[bytes], name: str) -> Iterator[InputLine]:
        for number, raw in read_lines(file, name):
            yield self._line(raw, f"{name} line {number}", number)

    def _table_lines(self, file: IO[bytes], name: str, stored_as: str) -> Iterator[InputLine]:
        keeps_columns = self.output is not None and format_of(self.output)[0] == "parquet"  # also binary ones
        rows = rows_or_errors_in(file, name, stored_as, without_binary=keeps_columns)
        for number, (where, row) in enumerate(rows):
            if isinstance(row, ConfigError):
                yield InputLine(where, _invalid_stem(where), error=str(row))
            else:
                # The escape of a lone surrogate, which UTF-8 cannot encode, is also its escape in JSON.
                text = json.dumps(present(row), ensure_ascii=False, allow_nan=False)
                yield self._line(text.encode(errors="backslashreplace"), where, number)

    def _line(self, raw: bytes, where: str, number: int) -> InputLine:
        text = raw.strip()
        stem = _invalid_stem(text.decode(errors="backslashreplace"))
        try:
            row = parse_line(text, where)
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: expected a JSON object, got {show(row)}.")
            for name in added_names(self.key):
                if name in row:
                    raise ConfigError(f"{where}: the field {name!r} already exists; choose another name with --key.")
            if row:
                stem = text[:-1].rstrip()
            return InputLine(where, stem, self.read(with_columns(present(row), self.columns, where), where, number))
        except ConfigError as error:
            return InputLine(where, stem, error=str(error))


def _invalid_stem(line: str) -> bytes:
    """Return the start of the output line for an invalid line: its text, or its place in the file, as `line`."""
    return json.dumps({"line": line}).encode()[:-1]


def _reason(labels: Labels, errors: Sequence[str | None]) -> str | None:
    names = [""] if labels is None else [f"{label}: " for label in labels]
    return "; ".join(f"{name}{error}" for name, error in zip(names, errors, strict=True) if error) or None


def _shaped(labels: Labels, values: Iterable[Any]) -> Any:
    if labels is None:
        return next(iter(values))
    return dict(zip(labels, values, strict=True)) if isinstance(labels[0], str) else list(values)


def _number(value: np.float64) -> float | None:
    """Return the number to write, or None if it is not finite.

    A float32, such as the score of a reward model, becomes the shortest decimal that reads back as the same float32.
    """
    if not np.isfinite(value):
        return None
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if single == value else float(value)
