"""What the commands share on the terminal."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer
from rich.console import Console

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: Exception, code: int) -> NoReturn:
    """Print an error in one paragraph and end with this exit code."""
    for text in (f"error: {error}", *getattr(error, "__notes__", ())):
        stderr.print(text, style="red", markup=False)
    raise typer.Exit(code)


def find_own_modules() -> None:
    """Let `module:function` name a module in the working directory, as `python -m` does."""
    sys.path.insert(0, os.getcwd())


def quiet_loading() -> None:
    """No progress bars of transformers in a log file."""
    if not stderr.is_terminal:
        from transformers.utils import logging  # slow to import, and only loading needs it

        logging.disable_progress_bar()
