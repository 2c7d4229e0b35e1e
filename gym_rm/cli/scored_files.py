"""Score a file of rows: write every row with its scores, in the same order. A stopped run can be continued.

An output line is the input line, byte for byte, with fields added before its last brace. Therefore the lines that an
earlier run finished are recognised by their first bytes. The rows of other formats become JSON lines first.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from gym_rm.cli.outputs import ADDED, Line, Output
from gym_rm.data.rows import decompressed, format_of, parse_line, present, read_lines, rows_in, show
from gym_rm.data.scored_rows import Labels, row_to_score
from gym_rm.errors import ConfigError
from gym_rm.scorer import Scorer, try_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation

FEW_CONVERSATIONS = 8  # different conversations that may all have one score without a warning
LINES_AT_ONCE = 10_000  # finished lines are copied in batches of at most this many lines


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        lines: number of lines in the output.
        failed: number of these lines without a score.
        num_tokens: number of tokens scored in this run.
        bytes_read: number of bytes read from the stored input; 0 for a pipe.
        seconds: seconds since the scorer was created.
        equal_score: the score of all conversations of this run, if there are more than a few and all scores are equal.
    """

    lines: int = 0
    failed: int = 0
    num_tokens: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    equal_score: float | None = None


@dataclass(frozen=True, kw_only=True)
class FileScoring:
    """One scoring run over a file.

    Attributes:
        make_scorer: creates the scorer; called once, if there is a line to score.
        source: a JSON Lines, JSON, CSV or Parquet file, by its name; None for standard input, which has JSON lines.
        output: file to write in the format of its name, or to continue if an earlier run stopped; None for standard
            output. A pipe or a device is written from the start, without a settings file.
        settings: settings that affect the scores; an existing output must have the same settings.
        overwrite: replace an existing output.
        retry_failed: score the lines of an existing output that have no score again.
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
    retry_failed: bool = False
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
        with ExitStack() as stack:
            stored, rows = _open_source(self.source, name, stack)
            output = Output(
                self.output,
                source=self.source,
                key=self.key,
                settings=self.settings,
                overwrite=self.overwrite,
                retry_failed=self.retry_failed,
                stack=stack,
            )
            lines = output.skip_finished(_read_line(raw, where, number, self.key) for where, number, raw in rows)
            run = _Run(self._make_scorer)
            progress = Progress()
            for batch in _batches(lines, self.batch_size):
                self.report(dataclasses.replace(progress, lines=output.lines, failed=output.failed))
                num_tokens, stopped = self._score_batch(run, batch, output)
                progress = dataclasses.replace(
                    progress,
                    lines=output.lines,
                    failed=output.failed,
                    num_tokens=progress.num_tokens + num_tokens,
                    bytes_read=stored.tell() if stored.seekable() else 0,
                    seconds=run.seconds,
                    equal_score=run.equal_score,
                )
                self.report(progress)
                if stopped is not None:
                    raise ConfigError(stopped)
            output.finish()
            progress = dataclasses.replace(progress, lines=output.lines, failed=output.failed)
            self.report(progress)
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

    def _score_batch(self, run: _Run, batch: list[Line], output: Output) -> tuple[int, str | None]:
        """Score and write the lines; return the number of scored tokens and the reason to stop, or None."""
        stopped = None
        if self.on_error == "stop":
            bad = next((i for i, line in enumerate(batch) if line.error and line.finished is None), None)
            if bad is not None:
                stopped, batch = batch[bad].error, batch[:bad]
        scores = self._score(run, batch)
        output.check_provenance(scores.provenance)
        written: list[tuple[Line, dict[str, Any]]] = []
        row = 0
        for line in batch:
            rows = slice(row, row + len(line))
            row = rows.stop
            if line.finished is not None:
                written.append((line, {}))
                continue
            reason = line.error or _reason(line.labels, scores.errors[rows])
            if reason and self.on_error == "stop":
                stopped = f"{line.where}: {reason}"
                break
            written.append((line, self._added(line.labels, scores, rows, reason)))
        if written:
            output.write(written)
        return int(scores.num_tokens[:row].sum()), stopped

    def _score(self, run: _Run, batch: list[Line]) -> Scores:
        rows = [line.row for line in batch if line.row is not None and line.finished is None]
        conversations = [conversation for row in rows for conversation in row.conversations]
        prompts = [row.prompt for row in rows for _ in row.conversations]
        if not conversations:
            return Scores.from_rewards([])
        options: dict[str, Any] = {"turns": "all"} if self.turns == "all" else {}
        scorer = run.scorer
        try:
            scores = try_score(scorer, conversations, prompts, **options)
        except Exception as error:
            error.add_note(f"while scoring {batch[0].where} to {batch[-1].where}")
            raise
        run.add(conversations, scores)
        return scores

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


class _Run:
    """Scorer of a run, made for the first batch with a conversation, and whether its scores differ at all."""

    def __init__(self, make_scorer: Callable[[], Scorer]) -> None:
        self._make_scorer = make_scorer
        self._scorer: Scorer | None = None
        self._began = time.perf_counter()
        self._seen: set[str] = set()
        self._lowest, self._highest = np.inf, -np.inf

    @property
    def scorer(self) -> Scorer:
        if self._scorer is None:
            self._scorer = self._make_scorer()
            self._began = time.perf_counter()
        return self._scorer

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def equal_score(self) -> float | None:
        equal = len(self._seen) > FEW_CONVERSATIONS and self._lowest == self._highest
        return float(self._lowest) if equal else None

    def add(self, conversations: Sequence[Conversation], scores: Scores) -> None:
        for conversation, reward in zip(conversations, scores.rewards.tolist(), strict=True):
            if np.isfinite(reward):
                self._lowest, self._highest = min(self._lowest, reward), max(self._highest, reward)
                if len(self._seen) <= FEW_CONVERSATIONS:
                    self._seen.add(repr(conversation))


# --- reading -----------------------------------------------------------------------------------------------------


def _open_source(
    source: Path | None, name: str, stack: ExitStack
) -> tuple[IO[bytes], Iterator[tuple[str, int, bytes]]]:
    """Return the stored file, whose position is the progress, and `(where, number, JSON)` of its rows."""
    if source is None:
        file = stored = sys.stdin.buffer
        stored_as = "jsonl"
    else:
        try:
            stored = stack.enter_context(source.open("rb"))
        except OSError as error:
            raise ConfigError(f"cannot read {str(source)!r}: {error.strerror}.") from error
        file = stack.enter_context(decompressed(stored, source))
        stored_as = format_of(source)[0] or "jsonl"
    if stored_as == "jsonl":
        return stored, ((f"{name} line {number}", number, raw) for number, raw in read_lines(file, name))
    rows = enumerate(rows_in(file, name, stored_as))
    return stored, ((where, number, _as_json(row)) for number, (where, row) in rows)


def _as_json(row: Any) -> bytes:
    # The escape of a lone surrogate, which UTF-8 cannot encode, is also its escape in JSON.
    return json.dumps(present(row), default=str, ensure_ascii=False).encode(errors="backslashreplace")


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
        return Line(where, stem, row_to_score(present(row), where, number))
    except ConfigError as error:
        return Line(where, stem, error=str(error))


def _batches(lines: Iterable[Line], batch_size: int) -> Iterator[list[Line]]:
    batch: list[Line] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += max(len(line), line.finished is None)
        if size >= batch_size or len(batch) >= max(LINES_AT_ONCE, batch_size):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
