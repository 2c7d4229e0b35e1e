"""Adapters for RL libraries, one module per library.

An adapter imports its library when the adapter itself is imported. It calls `Scorer.score` (TRL, verl, OpenRLHF, ...)
or `gym.make_vec` and `step` (SB3, TorchRL, RLlib, ...).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from gym_rm.checks import finite
from gym_rm.errors import ConfigError


class MissingExtraError(ConfigError, ImportError):
    """The library of an adapter is not installed; the message has the install command."""


def require(module: str, *, install: str) -> Any:
    """Import and return a module of a library.

    Args:
        module: dotted name of the module.
        install: argument of `pip install` that installs the library.

    Raises:
        MissingExtraError: the library or one of its dependencies is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(
            f"{library} is required by this adapter, but importing {module} failed: {error}. Install it with "
            f"pip install '{install}'."
        ) from error


def check_fallback_reward(value: Any) -> float | None:
    """Return a fallback reward as a float, or None if there is none.

    Raises:
        ConfigError: the value is not a number that is finite in float32, the type of the libraries' rewards.
    """
    if value is None:
        return None
    reward = finite("fallback_reward", value)
    if abs(reward) > float(np.finfo(np.float32).max):
        raise ConfigError(f"fallback_reward must be finite in float32, got {value!r}.")
    return reward
