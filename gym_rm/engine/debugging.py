"""Switches for debugging, read from environment variables here alone; names of calls, and ranges for profilers.

`GYM_RM_DEBUG` has names with commas between them: `plain` (the model's own forward), `skip_trial` (no comparison at
load), `repeat_trial` (twice, and refuse another result), `layout=tree`, `layout=padded` or `layout=one_by_one`, and
`rows=256` (products have a multiple of so many rows). `GYM_RM_SAVE_FAILED` is a folder: a batch whose forward fails,
other than for lack of memory, or gives values that are not finite is saved there, for `gym-rm doctor --replay FILE`.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError, nearest

LAYOUTS = ("tree", "padded", "one_by_one")
NAMES = ("plain", "skip_trial", "repeat_trial", "layout", "rows")
_calls = itertools.count(1)
_saving_nothing: contextvars.ContextVar[bool] = contextvars.ContextVar("gym_rm saving nothing", default=False)
_call_id: contextvars.ContextVar[str] = contextvars.ContextVar("gym_rm call", default="")


@dataclass(frozen=True, slots=True)
class Switches:
    """What `GYM_RM_DEBUG` asks for.

    Attributes:
        plain: whether the model's own forward runs, one sequence at a time.
        skip_trial, repeat_trial: whether nothing is compared at load, or everything twice.
        layout: the only layout to try; None for all.
        rows: the only multiple of rows to try; None for all.
    """

    plain: bool = False
    skip_trial: bool = False
    repeat_trial: bool = False
    layout: str | None = None
    rows: int | None = None


def read_switches() -> Switches:
    """Return the switches of `GYM_RM_DEBUG`.

    Raises:
        ConfigError: a name is unknown, or its value is not one that it can have.
    """
    values: dict[str, Any] = {}
    for entry in filter(None, os.environ.get("GYM_RM_DEBUG", "").replace(" ", "").split(",")):
        name, _, value = entry.partition("=")
        if name not in NAMES:
            raise ConfigError(f"GYM_RM_DEBUG has {entry!r}; it can have {', '.join(NAMES)}.{nearest(name, NAMES)}")
        valid = {"layout": value in LAYOUTS, "rows": value.isdecimal() and int(value) > 0}.get(name, not value)
        if not valid:
            raise ConfigError(
                f"GYM_RM_DEBUG has {entry!r}; write plain, layout=padded ({', '.join(LAYOUTS)}) or rows=256."
            )
        values[name] = int(value) if name == "rows" else value or True
    return Switches(**values)


def failed_folder() -> Path | None:
    """Return the folder of `GYM_RM_SAVE_FAILED`; None if it is not set, or inside of `saving_nothing`."""
    folder = os.environ.get("GYM_RM_SAVE_FAILED")
    return Path(folder).expanduser() if folder and not _saving_nothing.get() else None


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Save no failed batches inside, such as one that runs again."""
    before = _saving_nothing.set(True)
    try:
        yield
    finally:
        _saving_nothing.reset(before)


def replay_command(file: str | os.PathLike[str]) -> str:
    """Return the command that runs a saved batch again."""
    return f"gym-rm doctor --replay {shlex.quote(os.fspath(file))}"


@contextmanager
def call_id(kind: str) -> Iterator[str]:
    """Give what happens inside a name for log lines, such as `step-1/score-7`.

    Example:
        >>> with call_id("score") as name:
        ...     name.startswith("score-")
        True
    """
    above = _call_id.get()
    name = f"{above}/{kind}-{next(_calls)}".lstrip("/")
    before = _call_id.set(name)
    try:
        yield name
    finally:
        _call_id.reset(before)


def current_call() -> str:
    """Return the name of the call around this one; empty outside."""
    return _call_id.get()


def stage(name: str) -> AbstractContextManager[Any]:
    """Return the range of a stage (`render`, `plan`, `forward`, `head`, `copy back`) for torch's profiler."""
    from torch.profiler import record_function  # planning batches must not import torch

    return record_function(f"gym_rm: {name}")
