"""`gym-rm score`: score every line of a JSON Lines file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

import gym_rm
from gym_rm.cli.console import fail, find_own_modules, quiet_loading, stderr
from gym_rm.cli.scored_files import FileScoring, Progress, is_stream
from gym_rm.config import override_values
from gym_rm.errors import ConfigError, GymRMError


def score(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="A .jsonl or .jsonl.gz file; - for standard input.")],
    reward_model: Annotated[
        str | None,
        typer.Option(help="Folder, hub id, module:function, or a JSON object as for load_scorer. Default: embedded."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File to write or to continue; - for standard output. May be a pipe.")
    ] = "-",
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="If a line has no score: stop, or write the error and continue.")
    ] = "stop",
    turns: Annotated[
        Literal["last", "all"], typer.Option(help="Score only the last turn, or also every assistant turn.")
    ] = "last",
    batch_size: Annotated[int, typer.Option(min=1, help="Number of conversations that are scored together.")] = 128,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of a forward pass.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of a conversation.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any other option of the scorer; may be repeated.")
    ] = None,
    key: Annotated[str, typer.Option(help="Name of the added field, and prefix of the other fields.")] = "score",
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Add model, revision and settings to every line.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Score every line of a JSON Lines file.

    The command reads these fields of a line, in this order: a prompt with a list of replies (completions, solutions
    or responses), with chosen and rejected, or with a response; or a whole conversation in messages. The prompt is in
    messages, prompt, context or question, as a text or a list of messages.

    The output has the same lines in the same order, with these added fields:

    \b
    score                    a number; {"chosen": .., "rejected": ..}; or a list, one per reply
    score_components         the same for each component of the reward, if the model has components
    score_turns              with --turns all: a list, one number per assistant turn
    score_truncated_tokens   number of tokens that were cut, if any
    score_error              reason for a missing score (score is null)
    score_provenance         with --provenance: model, revision, template, dtype, ...

    With -o, repeat the same command to continue after an interruption. OUTPUT.settings.json contains the settings of
    the scores. The command does not continue an output with different settings.

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
    placement = _given(device=device, max_num_batched_tokens=max_num_batched_tokens)  # these do not change a score
    path = None if source == "-" else Path(source)
    written = None if output in ("-", "/dev/stdout") else Path(output)
    bar = _progress_bar(path, hidden=written is None and sys.stdout.isatty())
    last = Progress()

    def report(progress: Progress) -> None:
        nonlocal last
        last = progress
        bar.update(bar.task_ids[0], completed=progress.bytes_read, lines=progress.lines, speed=_speed(progress))

    scoring = FileScoring(
        make_scorer=lambda: _load_scorer(model, **options, **placement),
        source=path,
        output=written,
        settings={"reward_model": model, **options, "turns": turns, "key": key, "provenance": provenance},
        overwrite=overwrite,
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
    if last.failed:
        stderr.print(f"{last.failed} of {last.lines} lines have no score; their field {key}_error has the reason.")
        raise typer.Exit(3)


def _load_scorer(model: Any, **options: Any) -> gym_rm.Scorer:
    quiet_loading()
    find_own_modules()
    return gym_rm.load_scorer(model, **options)


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
