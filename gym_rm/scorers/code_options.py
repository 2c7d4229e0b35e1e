"""Options that `CodeScorer` and `CodeInterpreter` share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from gym_rm.checks import finite, integer
from gym_rm.errors import ConfigError, nearest
from gym_rm.sandbox.limits import Limits


def positive(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    number = finite(name, value)
    if number <= 0:
        raise ConfigError(f"{name} must be greater than 0, got {value!r}.")
    return number


def worker_count(value: int | None) -> int:
    """Return a number of workers, by default that of the cores of this process."""
    if value is not None:
        return integer("num_workers", value, minimum=1)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_limits(value: Mapping[str, Any] | Limits | None, **defaults: Any) -> Limits:
    """Return limits from some of their fields; the others have these defaults."""
    if isinstance(value, Limits):
        return value
    known = [each.name for each in dataclasses.fields(Limits)]
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"limits must be a dict with some of the fields {known}, got {value!r:.80}.")
    for name in value or {}:
        if name not in known:
            raise ConfigError(f"limits has no field {name!r}; expected some of {known}.{nearest(str(name), known)}")
    return Limits(**{**defaults, **(value or {})})
