"""Who is calling? One thin module per RL library; each imports its library only when it is imported itself.

The seam is `Scorer.score` (TRL, verl, OpenRLHF, ...) or `gym.make_vec` and `step` (SB3, TorchRL, RLlib, ...).
"""

from __future__ import annotations

import importlib
from typing import Any

from gym_rm.errors import ConfigError


class MissingExtraError(ConfigError, ImportError):
    """A library that an adapter is for is not installed; says how to install it."""


def require(module: str, *, install: str) -> Any:
    """Import a library, or say what installs it.

    Args:
        module: dotted name.
        install: what to give to `pip install`.

    Raises:
        MissingExtraError: it is not installed, or something that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(
            f"this adapter needs {library}: pip install '{install}' (importing {module} failed: {error})."
        ) from error
