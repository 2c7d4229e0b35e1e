"""`gym-rm score`: score every row of a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

import gym_rm
from gym_rm.cli.console import choose_threads, fail, prepare_loading, stderr, warn, warn_if_embedded
from gym_rm.cli.outputs import is_stream
from gym_rm.cli.scored_files import FileScoring, Progress
from gym_rm.config import override_values
from gym_rm.errors import ConfigError, GymRMError

STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
# Options about copies of the model, which all return the same scores.
REPLICAS = ("executor", "num_replicas", "replicas", "lease_seconds", "max_restarts", "name")
SECONDS_BETWEEN_LINES = 15.0  # of progress, if stderr is not a terminal


def score(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A .jsonl, .ndjson, .json, .csv or .parquet file, or the first four compressed as .gz or .zst; - for "
            "JSON lines from standard input.",
        ),
    ],
    reward_model: Annotated[
        str | None,
        typer.Option(
            help="Folder, hub id, URL, module:function, or a JSON object as for load_scorer. Default: embedded."
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="File to write or to continue, in the format of its name; - for JSON lines to standard output. May be "
            "a pipe.",
        ),
    ] = "-",
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="If a line has no score: stop, or write the error and continue.")
    ] = "stop",
    turns: Annotated[
        Literal["last", "all"], typer.Option(help="Score only the last turn, or also every assistant turn.")
    ] = "last",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also score the lines of the output that have no score.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of conversations that are scored together.")] = 128,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of a forward pass.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of a conversation.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads. Default: 1 for a small model, else the number that torch chooses."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any option of the scorer, see below; may be repeated."),
    ] = None,
    key: Annotated[str, typer.Option(help="Name of the added field, and prefix of the other fields.")] = "score",
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Add model, revision and settings to every line.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    progress: Annotated[
        bool,
        typer.Option(help="Show a bar on a terminal; print a line now and then to a file or pipe (on stderr)."),
    ] = True,
) -> None:
    """Score every row of a file.

    The command reads these fields of a row, in this order: a prompt with a list of replies (completions, solutions
    or responses), with chosen and rejected, or with a response; or a whole conversation in messages. The prompt is in
    messages, prompt, context or question, as a text or a list of messages.

    The output has the same rows in the same order, with these added fields:

    \b
    score                    a number; {"chosen": .., "rejected": ..}; or a list, one per reply
    score_components         the same for each component of the reward, if the model has components
    score_turns              with --turns all: a list, one number per assistant turn
    score_truncated_tokens   number of tokens that were cut, if any
    score_error              reason for a missing score (score is null)
    score_provenance         with --provenance: model, revision, template, dtype, ...

    With -o, repeat the same command (without --overwrite) to continue after an interruption. OUTPUT.settings.json
    contains the settings of the scores, and a digest of the model's files. The command does not continue an output with
    different settings or another model. OUTPUT.partial contains the finished lines of an output in another format than
    JSON Lines, and of a run with --retry-failed, until they replace OUTPUT.

    Exit codes: 0 all lines have a score; 1 error (the message names the line, finished lines are in the output); 2
    invalid arguments; 3 finished, but some lines have no score (--on-error skip); 130 interrupted.
    """
    try:
        options = {**override_values(option or []), **_given(max_length=max_length, dtype=dtype)}
    except ValueError as error:
        fail(error, code=2)
    try:
        model = json.loads(reward_model) if reward_model is not None and reward_model.startswith("{") else reward_model
    except ValueError as error:
        fail(ConfigError(f"--reward-model is not valid JSON: {error}: {reward_model!r}."), code=2)
    if overwrite and retry_failed:
        fail(
            ConfigError("--overwrite and --retry-failed exclude each other: a new output has no failed lines."), code=2
        )
    # These do not change a score.
    placement = _given(device=device, max_num_batched_tokens=max_num_batched_tokens)
    placement |= {name: options.pop(name) for name in REPLICAS if name in options}
    path = None if source == "-" else Path(source)
    written = None if output in STANDARD_OUTPUT else Path(output)
    if output.endswith("/"):  # which Path removes
        fail(ConfigError(f"output must be a file, got the folder {output!r}."), code=1)
    bar = _progress_bar(path, hidden=not progress or (written is None and sys.stdout.isatty()))
    print_line = _printer(path, hidden=not progress or stderr.is_terminal)
    last = Progress()

    def report(now: Progress) -> None:
        nonlocal last
        last = now
        bar.update(bar.task_ids[0], completed=now.bytes_read, lines=now.lines, speed=_speed(now))
        print_line(now)

    def make_scorer() -> gym_rm.Scorer:
        prepare_loading(model, threads)
        scorer: gym_rm.Scorer = gym_rm.load_scorer(model, **options, **placement)
        warn_if_embedded(scorer)
        choose_threads(scorer, threads)
        return scorer

    scoring = FileScoring(
        make_scorer=make_scorer,
        source=path,
        output=written,
        settings=_with_templates(
            {
                "reward_model": without_key(model),
                **without_key(options),
                "turns": turns,
                "key": key,
                "provenance": provenance,
            }
        ),
        overwrite=overwrite,
        retry_failed=retry_failed,
        turns=turns,
        key=key,
        on_error=on_error,
        batch_size=batch_size,
        provenance=provenance,
        report=report,
    )
    try:
        with bar:
            scoring.run()
    except KeyboardInterrupt:
        advice = "use -o FILE to be able to continue" if is_stream(written) else "repeat the same command to continue"
        if overwrite and last.lines and not is_stream(written):
            advice = "repeat the command without --overwrite to continue"
        stderr.print(f"interrupted after {last.lines} finished lines; {advice}.")
        raise typer.Exit(130) from None
    except GymRMError as error:
        fail(error, code=1)
    except OSError as error:  # for example a full disk or a closed pipe
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # avoids a second error when Python flushes stdout at exit
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(1) from None
        file = repr(error.filename) if error.filename else f"{source!r} or {output!r}"
        fail(ConfigError(f"cannot read or write {file}: {error.strerror or error}."), code=1)
    if stderr.is_terminal:
        stderr.print(f"{last.lines} lines in {last.seconds:.1f} s{_speed(last)}")
    if last.equal_score is not None:
        warn(
            f"all scores are {last.equal_score}, although the conversations differ. Check that --reward-model is a "
            "trained reward model and that its chat template writes the messages."
        )
    if last.failed:
        stderr.print(f"{last.failed} of {last.lines} lines have no score; their field {key}_error has the reason.")
        raise typer.Exit(3)


def _with_templates(settings: Any) -> Any:
    """Return the settings with the text of a chat template instead of its file, which may be changed between runs."""
    if isinstance(settings, list):
        return [_with_templates(each) for each in settings]
    if not isinstance(settings, Mapping):
        return settings
    whole = {name: _with_templates(value) for name, value in settings.items()}
    template = whole.get("chat_template")
    if isinstance(template, str) and os.path.isfile(file := os.path.expanduser(template)):
        with contextlib.suppress(OSError):  # loading the scorer reports the error
            whole["chat_template"] = Path(file).read_text(encoding="utf-8", errors="replace")
    return whole


def without_key(settings: Any) -> Any:
    """Return the settings of a scorer without the key of a server, and its URLs without passwords."""
    if isinstance(settings, Mapping):
        return {name: without_key(value) for name, value in settings.items() if name != "key"}
    if isinstance(settings, list):
        return [without_key(each) for each in settings]
    return re.sub(r"(https?://)[^/@,]*@", r"\1", settings) if isinstance(settings, str) else settings


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _speed(progress: Progress) -> str:
    return f", {progress.num_tokens / progress.seconds:,.0f} tokens/s" if progress.num_tokens else ""


def _progress_bar(source: Path | None, *, hidden: bool) -> ProgressBar:
    bar = ProgressBar(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[lines]} lines{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=hidden or not stderr.is_terminal,
    )
    size = source.stat().st_size if source is not None and source.is_file() else None
    bar.add_task("score", total=size, lines=0, speed="")
    return bar


def _printer(source: Path | None, *, hidden: bool) -> Callable[[Progress], None]:
    """Return a function that prints the progress as a line, but not more often than every few seconds."""
    size = source.stat().st_size if source is not None and source.is_file() else None
    printed = time.monotonic()

    def print_line(progress: Progress) -> None:
        nonlocal printed
        if hidden or time.monotonic() - printed < SECONDS_BETWEEN_LINES:
            return
        printed = time.monotonic()
        share = f", {progress.bytes_read / size:.0%} of the input" if size else ""
        stderr.print(f"{progress.lines} lines{share}{_speed(progress)}")

    return print_line
