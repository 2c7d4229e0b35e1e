"""Terminal functions that the commands share."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

from gym_rm.documents import replaced_file
from gym_rm.errors import GymRMError

WIDTH = 120
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: Exception, code: int) -> NoReturn:
    """Print an error in one paragraph and exit with this code."""
    for text in (f"error: {error}", *getattr(error, "__notes__", ())):
        stderr.print(text, style="red", markup=False)
    raise typer.Exit(code)


@contextlib.contextmanager
def exit_codes(advice: str = "interrupted.") -> Iterator[None]:
    """End a command with 1 after an error of its data or scorer, and with 130 and this advice after an interrupt.

    If nobody reads its output any more (`| head -1`), it ends without a message.
    """
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it exits
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        stderr.print(advice)
        raise typer.Exit(130) from None
    except (GymRMError, FloatingPointError, OSError) as error:
        fail(error, code=1)


def report_console() -> Console:
    """Return the console of wide tables; in a file or pipe, they have `WIDTH` columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def write_json(path: Path, values: Any) -> None:
    """Write plain values to a JSON file, which is replaced at once."""
    with replaced_file(path) as file:
        file.write(json.dumps(values, indent=2).encode() + b"\n")


def warn(message: str) -> None:
    """Print a warning in one paragraph."""
    stderr.print(f"warning: {message}", style="yellow", markup=False)


class PrintedWarnings(logging.Handler):
    """Print the warnings of the package like those of the commands."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        warn(record.getMessage())


def quiet_loading() -> None:
    """Disable the progress bars of transformers if stderr is not a terminal."""
    if not stderr.is_terminal:
        from transformers.utils import logging  # imported here because the import is slow

        logging.disable_progress_bar()
