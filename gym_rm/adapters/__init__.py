"""Adapters for RL libraries, one module per library.

An adapter imports its library when the adapter itself is imported. It calls `Scorer.score` (TRL, verl, OpenRLHF, ...)
or `gym.make_vec` and `step` (SB3, TorchRL, RLlib, ...).
"""

from __future__ import annotations

import importlib
from typing import Any

from gym_rm.errors import MissingExtraError


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
