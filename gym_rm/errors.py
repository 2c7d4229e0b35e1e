"""One exception per boundary that a failure can cross, and one way to warn.

`ConfigError` a setting, `ActionError` a reply, `RenderError` text to tokens, `ScoringError` a conversation
without a score, `RemoteError` another process or host, `PlanError` resources, `SandboxError` code execution.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_rm.types import Scores

logger = logging.getLogger("gym_rm")


class GymRMError(Exception):
    """Base of every error that gym_rm raises on purpose."""


class ConfigError(GymRMError, ValueError):
    """A setting that cannot be: what was expected, what came, what to do."""


class RenderModeError(ConfigError, TypeError):
    """A render mode that there is not; as a `TypeError`, Stable-Baselines3 takes it for a no to its `rgb_array`."""


class ActionError(GymRMError, ValueError):
    """A reply that the environment cannot take; the environment is as it was."""


class RenderError(GymRMError, ValueError):
    """A conversation that cannot become tokens."""


class PlanError(GymRMError, ValueError):
    """A request that the described machines cannot hold."""


class RemoteError(GymRMError, ConnectionError):
    """A scorer in another process or on another host that did not answer as it should."""


class SandboxError(GymRMError, RuntimeError):
    """Code that could not be executed safely."""


class ScoringError(GymRMError, ValueError):
    """Some conversations have no score; those that have one are kept.

    Attributes:
        scores: the `Scores` of the whole call, NaN and a reason in the failed rows.
        rows: indices of the failed rows.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.rows = scores.failed_rows
        shown = [f"row {row}: {scores.errors[row]}".removesuffix(".") for row in self.rows[:5]]
        if len(self.rows) > len(shown):
            shown.append(f"and {len(self.rows) - len(shown)} more")
        super().__init__(
            f"{len(self.rows)} of {len(scores)} conversations could not be scored: "
            + "; ".join(shown)
            + ". The other scores are in the `scores` attribute of this error."
        )

    def __reduce__(self) -> tuple[type[ScoringError], tuple[Scores]]:
        return type(self), (self.scores,)


def nearest(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time this exact message comes up in the process."""
    logger.warning(message)
