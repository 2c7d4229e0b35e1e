"""Settings checked at the door: each function returns the value to use, or raises a `ConfigError` that names it."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from gym_rm.errors import ConfigError, nearest


def at_least_one(name: str, value: int) -> int:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
    return int(value)


def one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    """One of the `known` values."""
    if value not in known:
        hint = nearest(str(value), [each for each in known if each is not None])
        raise ConfigError(f"{name} must be one of {list(known)}, got {value!r}.{hint}")
    return value


def finite_or_none(name: str, value: float | None) -> float | None:
    """A finite float, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, or None to raise an error instead; got {value!r}.")
    return float(value)


def parse_autoreset_mode(value: AutoresetMode | str) -> AutoresetMode:
    """The mode of any spelling: `"SameStep"`, `"SAME_STEP"`, `"same-step"`, ..."""
    if isinstance(value, AutoresetMode):
        return value
    spelled = str(value).replace("_", "").replace("-", "").lower()
    modes = {mode.value.lower(): mode for mode in AutoresetMode}
    if spelled not in modes:
        known = [mode.value for mode in AutoresetMode]
        raise ConfigError(f"autoreset_mode must be one of {known}, got {value!r}.{nearest(str(value), known)}")
    return modes[spelled]


def load_function(name: str, value: Any) -> Any:
    """A function, or the one that `"module:function"` names."""
    if callable(value):
        return value
    module, _, attribute = str(value).partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name} must be a function or 'module:function', got {value!r}: {error}.") from error
    if not callable(function):
        raise ConfigError(f"{name}={value!r} names a {type(function).__name__}, expected a function.")
    return function


def seed_of_each(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """N seeds, as `SyncVectorEnv` takes them from an int, a list or None."""
    if seed is None:
        return [None] * num_envs
    try:
        if isinstance(seed, int | np.integer):
            return [int(seed) + row for row in range(num_envs)]
        seeds = [None if each is None else operator.index(each) for each in seed]
    except TypeError as error:
        raise ConfigError(f"seed must be an integer or None, or a list of those; got {seed!r:.80}.") from error
    if len(seeds) != num_envs:
        raise ValueError(f"a list of seeds must have one for each of the {num_envs} environments, got {len(seeds)}.")
    return seeds
