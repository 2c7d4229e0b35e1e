"""Terminal functions that the commands share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console

from gym_rm.cli.options import how_to_write
from gym_rm.scorer import Scorer

stderr = Console(stderr=True, highlight=False, soft_wrap=True)

# Below this hidden size, the threads of a matrix product wait for each other longer than they compute.
HIDDEN_SIZE_FOR_THREADS = 512


def fail(error: Exception, code: int, *, scorer_options: bool = True) -> NoReturn:
    """Print an error in one paragraph and exit with this code.

    With `scorer_options`, it also says how to write the options of scorers that the error names.
    """
    advice = how_to_write(str(error)) if scorer_options else None
    for text in (f"error: {error}", *getattr(error, "__notes__", ()), advice):
        if text is not None:
            stderr.print(text, style="red", markup=False)
    raise typer.Exit(code)


def warn(message: str) -> None:
    """Print a warning in one paragraph."""
    for text in (f"warning: {message}", how_to_write(message)):
        if text is not None:
            stderr.print(text, style="yellow", markup=False)


class PrintedWarnings(logging.Handler):
    """Print the warnings of the package like those of the commands."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        warn(record.getMessage())


def find_own_modules() -> None:
    """Add the working directory to `sys.path`, so that `module:function` can name a module in it."""
    sys.path.insert(0, os.getcwd())


def quiet_loading() -> None:
    """Disable the progress bars of transformers if stderr is not a terminal."""
    if not stderr.is_terminal:
        from transformers.utils import logging  # imported here because the import is slow

        logging.disable_progress_bar()


def warn_if_embedded(scorer: Scorer) -> None:
    """Print a warning if the scorer is the embedded reward model."""
    if getattr(getattr(scorer, "provenance", None), "model", None) == "embedded":
        warn(
            "the scores come from the small reward model that is part of the package. It only rates answers to "
            "questions like 'Which is the largest, 12, 30 or 27?', and its scores of other texts mean nothing. Pass "
            "--reward-model with a folder, a hub id or module:function."
        )


def prepare_loading(reward_model: Any, threads: int | None) -> None:
    """Let a scorer name functions in the working directory; no progress bars if stderr is not a terminal.

    More threads than a model was loaded with can change the last bits of its scores, so a number is set before.
    """
    find_own_modules()
    if threads is not None:
        import torch  # imported here because the import is slow

        torch.set_num_threads(threads)
    if not (isinstance(reward_model, str) and ":" in reward_model):  # a function may not need transformers
        quiet_loading()


def choose_threads(scorer: Scorer, threads: int | None) -> None:
    """Set the number of CPU threads of torch: this number, or for small models one if it is None."""
    if threads is None:
        sizes = [getattr(model.config, "hidden_size", HIDDEN_SIZE_FOR_THREADS) for model in _models_of(scorer)]
        if not sizes or max(sizes) >= HIDDEN_SIZE_FOR_THREADS:
            return
    import torch

    torch.set_num_threads(threads or 1)


def _models_of(scorer: Any) -> Iterator[Any]:
    """Yield the models of a scorer and of the scorers that it combines."""
    yield from getattr(getattr(scorer, "executor", None), "models", ())
    for part in (getattr(scorer, "scorer", None), *getattr(scorer, "scorers", {}).values()):
        if part is not None:
            yield from _models_of(part)
